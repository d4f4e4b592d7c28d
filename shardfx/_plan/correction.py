"""Corrects a spec to a mesh and a shape: drops the mesh axes that do not fit, with reasons, and adds the axes of
strategies.
"""

import functools as ft
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._ground.errors import SpecError
from .._ground.reason import Code, Decision, Reason, reason
from .._ground.spec import (
    UNCONSTRAINED,
    DType,
    array_bytes,
    canonical_entry,
    entries_of,
    entry_axes,
    trimmed,
    unreduced_kind,
    with_reductions,
)
from .._ground.text import plural
from .._rules import Fsdp
from ..topology import MeshSpec


class Leaf(NamedTuple):
    """The shape, dtype and units of an array. A unit is the number of elements that no shard may split in a dimension,
    such as the width of a head; `units` is `None` if each dimension may be sharded between any two elements.
    """

    shape: tuple[int, ...]
    dtype: DType
    units: tuple[int, ...] | None


class Axes(NamedTuple):
    """The sizes of the mesh axes, whether one is Auto, and the bytes below which arrays stay replicated."""

    sizes: Mapping[str, int]
    has_auto: bool
    min_bytes: int = 0


def axes_of(mesh: MeshSpec, min_bytes: int = 0) -> Axes:
    return Axes(mesh.shape, AxisType.Auto in mesh.axis_types, min_bytes)


def correct(
    spec: object,
    shape: Sequence[int],
    mesh: MeshSpec | Mesh | AbstractMesh,
    *,
    units: Sequence[int] | None = None,
    min_bytes: int = 0,
    dtype: object = None,
    strict: bool = False,
) -> Decision:
    """Makes a PartitionSpec valid for an array on a mesh, and drops as few mesh axes as possible.

    For each dimension in order, it drops the axes that the mesh lacks and the axes that an earlier dimension uses.
    Axes of size 1 stay. Of the other axes it keeps the subset with the largest product that divides the dimension; of
    several such subsets, the one whose axes come first. The function is idempotent.

    **Arguments:**

    - `spec`: the requested PartitionSpec. With fewer entries than dimensions, the other dimensions are not sharded.
        More entries are an error, unless the extra ones are `None`.
    - `shape`: the shape of the array.
    - `mesh`: any mesh; only its axis names, sizes and types are read.
    - `units`: one int per dimension: a dimension of `n * unit` elements is sharded only between units, such as the
        heads of an attention layer. `None` allows any split.
    - `min_bytes`: arrays of fewer bytes are replicated. Needs `dtype`.
    - `dtype`: the dtype of the array; `None` is enough without `min_bytes`.
    - `strict`: raise if any axis would be dropped.

    **Returns:**

    A [`shardfx.Decision`][]: a spec that JAX accepts for this shape on this mesh, and the reasons why axes were
    dropped. UNCONSTRAINED dimensions stay if the mesh has an Auto axis; only [`shardfx.constrain`][] accepts such a
    spec.

    **Raises:**

    `SpecError` if the spec does not fit the rank, and under `strict` if anything would be dropped.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, correct

        mesh = MeshSpec({"data": 2, "tensor": 4})
        decision = correct(P(("data", "tensor"), "pipe"), (4, 16), mesh)
        assert decision.spec == P("tensor")
        # dim 0: size 4 is not divisible by `data` (2) x `tensor` (4); ...
        print(decision.reasons[0])
        ```
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"expected a PartitionSpec, not {spec!r}; write `PartitionSpec({spec!r})`, or use `resolve`.")
    if min_bytes and dtype is None:
        raise SpecError("`min_bytes` needs the array's dtype: pass `dtype=`.")
    leaf = Leaf(tuple(int(size) for size in shape), dtype, None if units is None else tuple(units))
    _check_units(leaf)
    decision = _cached(spec, leaf, MeshSpec.of(mesh), min_bytes)
    if strict and decision.reasons:
        raise SpecError(
            f"{spec} for shape {leaf.shape} on mesh {MeshSpec.of(mesh)}: {'; '.join(map(str, decision.reasons))}"
        )
    return decision


@ft.lru_cache(maxsize=4096)
def _cached(spec: PartitionSpec, leaf: Leaf, mesh: MeshSpec, min_bytes: int) -> Decision:
    return corrected(spec, leaf, axes_of(mesh, min_bytes))


def corrected(spec: PartitionSpec, leaf: Leaf, axes: Axes) -> Decision:
    """Returns the decision of [`shardfx.correct`][] for arguments that are already checked."""
    entries, sizes = _fitted(spec, leaf.shape), axes.sizes
    if axes.min_bytes and (asked := tuple(dict.fromkeys(axis for entry in entries for axis in entry_axes(entry)))):
        if found := _too_small(leaf, asked, axes.min_bytes):
            return Decision(PartitionSpec(), found)
    used: dict[str, int] = dict.fromkeys((*spec.unreduced, *spec.reduced), -1)
    kept, reasons = [], []
    for dim, (entry, size, unit) in enumerate(zip(entries, leaf.shape, _units(leaf), strict=True)):
        if entry is None:
            pass
        elif entry in sizes and entry not in used and size % (unit * sizes[entry]) == 0:
            used[entry] = dim  # by far the most frequent case: a single axis that is unused and divides
        elif entry is UNCONSTRAINED:
            entry, found = _unconstrained(axes.has_auto, dim)
            reasons += found
        else:
            entry, found = _entry(entry_axes(entry), dim, size, unit, sizes, used)
            used.update(dict.fromkeys(entry_axes(entry), dim))
            reasons += found
        kept.append(entry)
    like, found = _reductions(spec, sizes)
    return Decision(trimmed(kept, like), (*reasons, *found))


def _fitted(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    entries = entries_of(spec)
    if len(entries) == len(shape):
        return entries
    if any(entry is not None for entry in entries[len(shape) :]):
        few = "the first is" if len(shape) == 1 else f"the first {len(shape)} are"
        raise SpecError(
            f"{spec} has {plural(len(entries), 'entry', 'entries')}, but shape {shape} has "
            f"{plural(len(shape), 'dimension')}; write `{trimmed(entries[: len(shape)])}` if {few} meant."
        )
    return (*entries[: len(shape)], *[None] * (len(shape) - len(entries)))


def _check_units(leaf: Leaf) -> None:
    if leaf.units is not None and (len(leaf.units) != len(leaf.shape) or not all(unit >= 1 for unit in leaf.units)):
        raise SpecError(
            f"`units` must hold one positive int for each dimension of shape {leaf.shape}, not {leaf.units}; use 1 "
            "where any cut will do."
        )


def _units(leaf: Leaf) -> tuple[int, ...]:
    return (1,) * len(leaf.shape) if leaf.units is None else leaf.units


def _too_small(leaf: Leaf, axes: tuple[str, ...], min_bytes: int) -> tuple[Reason, ...]:
    size = array_bytes(leaf.shape, leaf.dtype) if min_bytes else 0
    return (reason(Code.small, None, axes, size=size, limit=min_bytes),) if size < min_bytes else ()


def _unconstrained(has_auto: bool, dim: int) -> tuple[Any, list[Reason]]:
    if has_auto:
        return UNCONSTRAINED, []
    return None, [reason(Code.absent, dim, (), what="Auto axis that the compiler could choose for UNCONSTRAINED")]


def _entry(
    axes: tuple[str, ...], dim: int, size: int, unit: int, sizes: Mapping[str, int], used: Mapping[str, int]
) -> tuple[Any, list[Reason]]:
    free, reasons = _free(axes, dim, sizes, used)
    kept = _divisors(free, size, unit, sizes)
    if kept != free:
        reasons.append(_indivisible(free, kept, dim, size, unit, sizes))
    return canonical_entry(kept), reasons


def _free(
    axes: tuple[str, ...], dim: int | None, sizes: Mapping[str, int], used: Container[str]
) -> tuple[tuple[str, ...], list[Reason]]:
    """Returns the axes in `axes` that the mesh has and that are unused, without duplicates, and reasons for the
    others.
    """
    absent, taken = tuple(axis for axis in axes if axis not in sizes), [axis for axis in axes if axis in sizes]
    free = tuple(dict.fromkeys(axis for axis in taken if axis not in used))
    for axis in free:
        taken.remove(axis)
    reasons = [reason(Code.absent, dim, absent, what=f"axis {_names(absent)}")] if absent else []
    if taken:
        reasons.append(reason(Code.duplicate, dim, tuple(taken), what=_names(tuple(dict.fromkeys(taken)))))
    return free, reasons


def _divisors(axes: tuple[str, ...], size: int, unit: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of size 1, and of the others the subset with the largest product that divides `size` between
    units.
    """
    whole = 1 if size % unit else size // unit
    # All sizes are above 1, so a subset's product exceeds that of each of its prefixes. Of two subsets with equal
    # products, the first stays first whichever axes are added to both: one candidate per product is enough.
    best: dict[int, tuple[int, ...]] = {1: ()}
    for position, axis in enumerate(axes):
        if sizes[axis] == 1:
            continue
        for product, positions in list(best.items()):
            larger = product * sizes[axis]
            candidate = (*positions, position)
            if whole % larger == 0 and candidate < best.get(larger, (len(axes),)):
                best[larger] = candidate
    chosen = best[max(best)]
    return tuple(axis for position, axis in enumerate(axes) if sizes[axis] == 1 or position in chosen)


def _indivisible(
    axes: tuple[str, ...], kept: tuple[str, ...], dim: int | None, size: int, unit: int, sizes: Mapping[str, int]
) -> Reason:
    dropped = tuple(axis for axis in axes if axis not in kept)
    what = _product([axis for axis in axes if sizes[axis] > 1], sizes)
    if unit > 1 and size % unit:
        fix = f"use a name without a unit, else correct the unit to one that divides {size}"
        text = f"size {size} is no whole number of units of {unit}, so nothing may cut it; if it counts units already, "
        return Reason(Code.unit, dim, dropped, text + fix)
    if unit > 1 and _divisors(axes, size, 1, sizes) != kept:
        units = plural(size // unit, "unit")
        return reason(Code.unit, dim, dropped, size=size, units=units, count=size // unit, unit=unit, what=what)
    product, count = math.prod(sizes[axis] for axis in axes) * unit, size // unit
    text = f"{size} ({plural(count, 'unit')} of {unit})" if unit > 1 else size
    pad = _advice_to_pad(size, product)
    return reason(Code.indivisible, dim, dropped, size=text, what=what, pad=pad, whole=count)


# Padding is suggested only if it adds at most 1/64 of the size: a vocabulary can be padded, a width of 64 cannot.
_PADDED_PARTS = 64


def _advice_to_pad(size: int, product: int) -> str:
    """Returns the beginning of an advice to pad a dimension to a multiple of `product`; "" if that adds too much."""
    padded = -(-size // product) * product
    return f"pad it to {padded}, or " if (padded - size) * _PADDED_PARTS <= size else ""


def _reductions(spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[PartitionSpec, list[Reason]]:
    if not (spec.unreduced or spec.reduced):
        return spec, []
    absent = tuple(sorted(axis for axis in (*spec.unreduced, *spec.reduced) if axis not in sizes))
    unreduced, reduced = ([axis for axis in axes if axis in sizes] for axes in (spec.unreduced, spec.reduced))
    like = with_reductions((), unreduced, reduced, unreduced_kind(spec))
    return like, [reason(Code.absent, None, absent, what=f"axis {_names(absent)}")] if absent else []


def spread(spec: PartitionSpec, leaf: Leaf, mesh: Axes, strategy: Fsdp) -> Decision:
    """Shards an unsharded dimension over the axes of `strategy`: the dimension that the largest product of these axes
    divides.

    Of several such dimensions it takes the largest. `spec` must be corrected already. Axes that `spec` uses, and axes
    that the mesh lacks, are left out with a reason.
    """
    sizes, entries, units = mesh.sizes, [*_fitted(spec, leaf.shape)], _units(leaf)
    if found := _too_small(leaf, strategy.axes, strategy.min_bytes):
        return Decision(spec, found)
    used = {axis for entry in entries for axis in entry_axes(entry)}
    free, reasons = _free(strategy.axes, None, sizes, used)
    open_dims = [dim for dim in range(len(leaf.shape)) if dim not in strategy.skip]
    if not free or (entries and not open_dims):
        return Decision(spec, tuple(reasons))
    dims = [dim for dim in open_dims if entries[dim] is None]
    dim, kept = _roomiest(free, entries, leaf, sizes, dims) or (None, ())
    if entries and not dims:
        text = f"no dimension is free for {_product(free, sizes)}: all that may be cut are sharded already"
        reasons.append(Reason(Code.indivisible, None, free, f"{text}; put the axes into the rule's spec"))
    elif len(kept) < len(free):
        told = max(dims, key=leaf.shape.__getitem__, default=None) if dim is None else dim
        size, unit = (1, 1) if told is None else (leaf.shape[told], units[told])
        reasons.append(_indivisible(free, kept, dim, size, unit, sizes))
    if dim is None:
        return Decision(spec, tuple(reasons))
    entries[dim] = canonical_entry(kept)
    return Decision(trimmed(entries, spec), tuple(reasons))


def widened(spec: PartitionSpec, leaf: Leaf, mesh: Axes, over: Fsdp) -> tuple[Decision, tuple[str, ...]]:
    """Shards dimensions over the axes of `over` that `spec` does not use, the dimension with most room first; also
    returns the added axes.

    Axes that do not fit on that dimension go to the next. On a dimension that is sharded already, the axes split each
    shard, so that a device then holds a part of its earlier shard. Axes that fit no dimension are dropped with a
    reason.
    """
    shape, sizes = leaf.shape, mesh.sizes
    if not math.prod(shape):
        return Decision(spec), ()
    kept = corrected(spec, leaf, mesh).spec
    entries = [*_fitted(kept, shape)]
    used = {axis for entry in entries for axis in entry_axes(entry)}
    free = tuple(axis for axis in over.axes if sizes.get(axis, 1) > 1 and axis not in used)
    if free and (small := _too_small(leaf, free, over.min_bytes)):
        return Decision(spec, small), ()
    dims, added = [dim for dim in range(len(shape)) if dim not in over.skip], ()
    while free and (found := _roomiest(free, entries, leaf, sizes, dims)):
        dim, more = found
        entries[dim] = (*entry_axes(entries[dim]), *more)
        free, added = tuple(axis for axis in free if axis not in more), (*added, *more)
    return Decision(trimmed(entries, kept), _no_room(free, max(shape), sizes) if free else ()), added


def _no_room(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[Reason, ...]:
    what = f"{_product(axes, sizes)} beside the axes that shard it already, and no other dimension is"
    pad = _advice_to_pad(size, math.lcm(size, math.prod(sizes[axis] for axis in axes)))
    return (reason(Code.indivisible, None, axes, size=size, what=what, pad=pad, whole=size),)


def _roomiest(
    axes: tuple[str, ...], entries: Sequence[object], leaf: Leaf, sizes: Mapping[str, int], dims: Iterable[int]
) -> tuple[int, tuple[str, ...]] | None:
    """Returns the dimension in `dims` that the largest product of `axes` divides, and those axes; `None` if none fits.

    Ties go to a dimension that is not sharded, then to the one with the largest shards, then to the first. On a sharded
    dimension the axes must divide its shards.
    """
    choices, units = [], _units(leaf)
    for dim in dims:
        left = leaf.shape[dim] // math.prod(sizes[axis] for axis in entry_axes(entries[dim]))
        if kept := _divisors(axes, left, units[dim], sizes):
            count = math.prod(sizes[axis] for axis in kept)
            choices.append((count, entries[dim] is None, left, -dim, kept))
    *_, dim, kept = max(choices, default=(0, ()))
    return (-dim, kept) if kept else None


def _product(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    return " x ".join(f"`{axis}` ({sizes[axis]})" for axis in axes)


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{axis}`" for axis in axes)
