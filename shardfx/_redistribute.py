"""From one layout to another in bounded memory and with little traffic: the pure planner, no devices.

The steps are those of Rink et al. 2021 (arXiv 2112.01075); the search is a bidirectional A* over them.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping
from fractions import Fraction

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ._errors import SpecError
from ._factors import refine
from ._layout import Layout
from ._mesh import MeshSpec
from ._search import Path, Problem, StepKind, missing, search
from ._spec import entries_of, entry_axes


@dataclasses.dataclass(frozen=True)
class Move:
    """A factor of the refined mesh that stops cutting one dimension or starts cutting another.

    **Arguments:**

    - `factor`: index into the sizes of the step's layouts.
    - `source`: the dimension it cut before, `None` if the pieces were copies of each other along it.
    - `target`: the dimension it cuts afterwards, `None` if the pieces become copies along it.
    """

    factor: int
    source: int | None
    target: int | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective (or local slice), over factors of the mesh axes.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after, on meshes whose axes are factors of the given mesh
        axes; the two differ in their mesh only where a permute leads from one factorisation to another.
    - `moves`: which factors change place; empty for a permute, which may send any piece anywhere.
    - `wire_bytes`: bytes that enter a device, the mean over devices, rounded up.
    - `peak_bytes`: bytes of the pieces that a device holds during the step.
    """

    kind: StepKind
    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    wire_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """How one array gets from one layout to another.

    **Arguments:**

    - `steps`: in order; empty if every device already holds what it should.
    - `wire_bytes`: bytes that enter a device over all steps, the mean over devices, rounded up.
    - `peak_bytes`: the most bytes of pieces a device holds at one time.
    - `lower_bound_bytes`: bytes that must enter a device, in the mean, whatever the algorithm: what it needs
        less what it has.
    """

    steps: tuple[Step, ...]
    wire_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


def layout(
    mesh: MeshSpec | Mesh | AbstractMesh,
    spec: PartitionSpec,
    rank: int,
    *,
    weights: Mapping[str, float] | None = None,
) -> Layout:
    """The `Layout` of an array of `rank` dimensions under `spec`.

    **Arguments:**

    - `mesh`: only a `jax.sharding.Mesh` has a device order; the others leave it open.
    - `spec`: its UNCONSTRAINED entries count as not sharded.
    - `rank`: how many dimensions the array has.
    - `weights`: the cost of a byte along a mesh axis, 1 for those left out.

    **Returns:**

    A Layout, cached: equal arguments give the same object.

    **Raises:**

    `SpecError` for a spec longer than the rank, or one that names an axis the mesh lacks.
    """
    return _layout(mesh, spec, rank, tuple(sorted((weights or {}).items())))


@ft.lru_cache(maxsize=4096)
def _layout(
    mesh: MeshSpec | Mesh | AbstractMesh, spec: PartitionSpec, rank: int, weights: tuple[tuple[str, float], ...]
) -> Layout:
    names = tuple(mesh.axis_names)
    entries = tuple(entry_axes(entry) for entry in entries_of(spec))
    if any(entries[rank:]):
        raise SpecError(f"{spec} has more entries than the array's {rank} dimensions; drop those at the end.")
    for axis in (axis for axes in entries for axis in axes):
        if axis not in names:
            raise SpecError(f"{spec} names mesh axis `{axis}`, but the mesh has {names}; use one of those.")
    dims = tuple(tuple(names.index(axis) for axis in axes) for axes in entries[:rank])
    cost = dict(weights)
    return Layout(
        sizes=tuple(mesh.shape[name] for name in names),
        dims=dims + ((),) * (rank - len(dims)),
        order=_ids(mesh) if isinstance(mesh, Mesh) else None,
        weights=tuple(float(cost.get(name, 1.0)) for name in names) if cost else (),
    )


@ft.lru_cache(maxsize=256)
def _ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


@ft.lru_cache(maxsize=4096)
def redistribute(shape: tuple[int, ...], itemsize_bits: int, src: Layout, dst: Layout) -> Redistribution:
    """Plans the move of one array: the least traffic whose memory stays bounded.

    No step holds more than twice the larger of the two ends' pieces: what it reads and what it writes.

    **Arguments:**

    - `shape`: of the whole array; every dimension must divide into the pieces of both layouts.
    - `itemsize_bits`: bits per element.
    - `src`, `dst`: layouts over the same devices, made by `layout`.

    **Returns:**

    The `Redistribution`, from a bounded cache where the same move was planned before.

    **Raises:**

    `MeshError` if the two layouts are not over the same devices; `SpecError` if a layout does not fit the shape.
    """
    for end in (src, dst):
        _require_fit(shape, end)
    # Shapes matter to the search only by what divides them, so that the leaves of a tree share their paths.
    room = tuple(math.gcd(size, src.size) for size in shape)
    path, bound = _path(room, src, dst)
    return _measured(shape, itemsize_bits, path, bound)


def _require_fit(shape: tuple[int, ...], end: Layout) -> None:
    if len(end.dims) != len(shape):
        raise SpecError(f"a layout of {len(end.dims)} dimensions does not fit an array of shape {shape}.")
    for dim, (size, count) in enumerate(zip(shape, end.counts, strict=True)):
        if size % count:
            raise SpecError(
                f"dim {dim} of an array of shape {shape} does not divide into {count} pieces; "
                f"pad it to {-(-size // count) * count}, or use axes whose product divides {size}."
            )


@ft.lru_cache(maxsize=4096)
def _path(room: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Path, Fraction]:
    ours, theirs = refine(src, dst)
    problem = Problem(room, ours, theirs)
    bound = missing(ours, theirs)
    return search(problem), bound


def _measured(shape: tuple[int, ...], bits: int, path: Path, bound: Fraction) -> Redistribution:
    total = math.prod(shape) * bits
    steps, wire = [], Fraction(0)
    for kind, source, target, wire_share in path.steps:
        wire += wire_share
        steps.append(
            Step(
                kind=kind,
                source=source,
                target=target,
                moves=_moves(source, target) if kind != "permute" else (),
                wire_bytes=_bytes(total * wire_share),
                peak_bytes=_bytes(Fraction(total, source.pieces)) + _bytes(Fraction(total, target.pieces)),
            )
        )
    ends = max(_bytes(Fraction(total, end.pieces)) for end in (path.source, path.target))
    peak = max((step.peak_bytes for step in steps), default=ends)
    return Redistribution(tuple(steps), _bytes(total * wire), peak, _bytes(total * bound))


def _bytes(bits: Fraction | int) -> int:
    return math.ceil(Fraction(bits) / 8)


def _moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    before, after = ({factor: dim for dim, axes in enumerate(end.dims) for factor in axes} for end in (source, target))
    return tuple(
        Move(factor, before.get(factor), after.get(factor))
        for factor in range(len(source.sizes))
        if before.get(factor) != after.get(factor)
    )
