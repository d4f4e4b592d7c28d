"""Splitting mesh axes where dimensions can take only part of one: which, into what, and specs on the result."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.spec import canonical_entry, entries_of, entry_axes, trimmed, unreduced_kind, with_reductions
from ..topology._mesh import MeshSpec


class Wish(NamedTuple):
    """A dimension would take `part` of the devices along `axis`, of which it now takes none."""

    axis: str
    part: int


def wishes(
    requested: PartitionSpec,
    spec: PartitionSpec,
    shape: tuple[int, ...],
    units: tuple[int, ...] | None,
    strategies: Iterable[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[Wish, ...]:
    """What an array would still take of the axes that it asked for and did not get.

    **Arguments:**

    - `requested`, `spec`: what was asked for, and what it was corrected to on a mesh of axis `sizes`.
    - `shape`, `units`: of the array; see [`shardfx.correct`][].
    - `strategies`: the axes of each `fsdp` that was asked for after `requested`.

    **Returns:**

    One wish per axis that could be used in part, at the first dimension that could use it.
    """
    used = {axis for entry in entries_of(spec) for axis in entry_axes(entry)}
    kept = [*entries_of(spec), *[None] * len(shape)]
    units = units or (1,) * len(shape)
    counts = [
        (1 if size % unit else size // unit) // math.prod(sizes[axis] for axis in entry_axes(entry))
        for size, unit, entry in zip(shape, units, kept, strict=False)
    ]
    found: dict[str, int] = {}
    for count, entry in zip(counts, entries_of(requested), strict=False):
        for axis in entry_axes(entry) if isinstance(entry, str | tuple) else ():
            part = math.gcd(count, sizes.get(axis, 1))
            if axis not in used and axis not in found and part > 1:
                found[axis] = part
                count //= part
    free = [count for count, entry in zip(counts, kept, strict=False) if entry is None]
    for axes in strategies:
        for axis in axes:
            part = max((math.gcd(count, sizes.get(axis, 1)) for count in free), default=1)
            if axis not in used and axis not in found and part > 1:
                found[axis] = part
    return tuple(Wish(axis, part) for axis, part in found.items())


def refined_mesh(mesh: MeshSpec, asked: Mapping[Wish, int]) -> tuple[MeshSpec, dict[str, tuple[str, ...]]]:
    """The mesh with the axes split that wishes ask to be, the wishes that save most bytes first.

    **Arguments:**

    - `mesh`: the mesh.
    - `asked`: the bytes per device that each wish would save.

    **Returns:**

    The mesh, and for each split axis the names of its parts, slowest first: the `i`-th part of `tensor` is
    `tensor_i`. Every device keeps its place.
    """
    parts: dict[str, tuple[str, ...]] = {}
    for axis, size, slices in zip(mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, strict=True):
        wanted = {wish.part: saved for wish, saved in asked.items() if wish.axis == axis}
        chain = _chain(size, slices, sorted(wanted, key=lambda part: (-wanted[part], part)))
        if len(chain) < 3:
            continue
        parts[axis] = _names(axis, len(chain) - 1, mesh.axis_names)
        factors = [large // small for small, large in zip(chain, chain[1:], strict=False)]
        mesh = mesh.split(axis, dict(zip(parts[axis], factors, strict=True)))
    return mesh, parts


def renamed(spec: PartitionSpec, parts: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """The spec of the same layout on the refined mesh: each split axis is all of its parts, in order."""
    entries = [renamed_entry(entry, parts) for entry in entries_of(spec)]
    unreduced, reduced = (renamed_axes(sorted(axes), parts) for axes in (spec.unreduced, spec.reduced))
    return trimmed(entries, with_reductions((), unreduced, reduced, unreduced_kind(spec)))


def renamed_entry(entry: Any, parts: Mapping[str, tuple[str, ...]]) -> Any:
    """One entry of a spec, or one target of a rule, on the refined mesh."""
    if not isinstance(entry, str | tuple):
        return entry
    return canonical_entry(renamed_axes(entry_axes(entry), parts))


def renamed_axes(axes: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Mesh axes, each split one as its parts."""
    return tuple(part for axis in axes for part in parts.get(axis, (axis,)))


def _chain(size: int, slices: int, wanted: Iterable[int]) -> list[int]:
    """Divisors of `size` from 1 to itself, each dividing the next: products of parts, slowest first."""
    chain = [1, size]
    for part in wanted:
        # A part that does not fit between those before it is cut down until it does; slices stay whole.
        fitting = [n for n in range(1, part + 1) if part % n == 0 and (n % slices == 0 or slices % n == 0)]
        best = max(n for n in fitting if all(n % other == 0 or other % n == 0 for other in chain))
        chain = sorted({*chain, best})
    return chain


def _names(axis: str, count: int, taken: tuple[str, ...]) -> tuple[str, ...]:
    stem = axis
    while any(f"{stem}_{i}" in taken for i in range(count)):
        stem += "_"
    return tuple(f"{stem}_{i}" for i in range(count))
