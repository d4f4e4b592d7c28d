"""The two ends of a move on factors of their mesh axes: fine enough for both, and no finer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .layout import StepLayout, digits, piece_index, positions
from .splits import Split, join_primes, order_primes


# Below this many prime factors the search sees all of them; above it, only those that the two ends tell apart.
_FEW = 6


@dataclasses.dataclass(frozen=True, eq=False)
class End:
    """One end of a move (or of a step): its layout over factors of its mesh, and every device's coordinates there.

    Both ends of a move number the devices by their place in the source's mesh.
    """

    layout: StepLayout
    coordinates: np.ndarray

    @property
    def keys(self) -> tuple[bytes, ...]:
        """One key per factor; factors of any mesh that tell the devices apart in the same way have equal keys."""
        return tuple(row.astype(np.uint16).tobytes() for row in self.coordinates)


def coordinates(layout: StepLayout, like: StepLayout) -> np.ndarray:
    """Each device's coordinates in the mesh of `layout`, the devices numbered by their place in that of `like`."""
    return digits(layout.sizes, positions(layout, like))


def levels(end: End) -> list[tuple[float, np.ndarray]]:
    """From cheap to dear: a weight, and per device the group within which a byte costs no more than that."""
    weights = end.layout.weights or (1.0,) * len(end.layout.sizes)
    found = []
    for weight in sorted(dict.fromkeys(weights)) or [1.0]:
        dearer = tuple(axis for axis, other in enumerate(weights) if other > weight)
        found.append((weight, piece_index(end.layout.sizes, end.coordinates, dearer)))
    return found


def refine(src: StepLayout, dst: StepLayout, *, prime: bool = False) -> tuple[End, End]:
    """Splits the axes of both meshes into factors.

    Where every factor of the target's mesh is one of the source's too, both ends are on the source's mesh.

    **Arguments:**

    - `src`, `dst`: layouts over the same devices.
    - `prime`: whether all factors are prime, however many those are. By default neighbouring primes that neither end
        tells apart are one factor, if there are many; but a dimension may have room for one of them and not for all.

    **Returns:**

    The source's end and the target's.
    """
    places = (np.arange(src.size), positions(dst, src))
    splits = order_primes(src, dst, places)
    if not prime and max(sum(map(len, split)) for split in splits) > _FEW:
        ends = [_end(*one) for one in zip((src, dst), splits, places, strict=True)]
        splits = join_primes([end.layout for end in ends], [end.keys for end in ends], splits)
    ours, theirs = _equally_dear(*(_end(*one) for one in zip((src, dst), splits, places, strict=True)))
    factors = {key: factor for factor, key in enumerate(ours.keys)}
    if not all(key in factors for key in theirs.keys):
        return ours, theirs
    rename = [factors[key] for key in theirs.keys]
    dims = tuple(tuple(rename[factor] for factor in axes) for axes in theirs.layout.dims)
    return ours, End(dataclasses.replace(ours.layout, dims=dims), ours.coordinates)


def _end(layout: StepLayout, split: Split, place: np.ndarray) -> End:
    """A layout on the factors of its axes, for devices that are at `place` in its mesh."""
    sizes = tuple(size for factors in split for size in factors)
    start = [0]
    for factors in split:
        start.append(start[-1] + len(factors))
    dims = tuple(
        tuple(factor for axis in axes for factor in range(start[axis], start[axis + 1])) for axes in layout.dims
    )
    weights = tuple(weight for weight, factors in zip(layout.weights, split, strict=False) for _ in factors)
    return End(StepLayout(sizes, dims, layout.order, weights), digits(sizes, place))


def _equally_dear(ours: End, theirs: End) -> tuple[End, End]:
    """Both ends with weights that say the same: a factor is as dear as its dearest step is by either's account."""
    if not ours.layout.weights and not theirs.layout.weights:
        return ours, theirs
    first, second = (
        End(dataclasses.replace(end.layout, weights=_weights(end, (ours, theirs))), end.coordinates)
        for end in (ours, theirs)
    )
    return first, second


def _weights(end: End, accounts: Sequence[End]) -> tuple[float, ...]:
    sizes = end.layout.sizes
    order = np.lexsort(end.coordinates[::-1]) if sizes else np.arange(1)
    found = [1.0] * len(sizes)
    for account in accounts:
        for axis, weight in enumerate(account.layout.weights):
            grid = account.coordinates[axis][order].reshape(sizes)
            for factor in range(len(sizes)):
                # A step along this factor is one along the account's axis too.
                if weight > found[factor] and (grid != grid.take([0], factor)).any():
                    found[factor] = weight
    return tuple(found)
