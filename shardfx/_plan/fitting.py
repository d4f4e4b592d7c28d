"""Corrects a spec to a mesh and to the shape of an array, and says why mesh axes are
dropped.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from jax.sharding import AxisType, PartitionSpec

from .._ground.errors import SpecError
from .._ground.reason import Code, Decision, Reason, reason_for
from .._ground.spec import (
    UNCONSTRAINED,
    DType,
    array_bytes,
    axes_of_entries,
    canonical_entry,
    entries_at,
    entries_of,
    entry_axes,
    shards_over,
    trimmed,
    unreduced_kind,
    with_reductions,
)
from .._ground.text import plural
from .._rules import Units
from ..topology import MeshSpec


class Axes(NamedTuple):
    """The sizes of the mesh axes, whether any axis is Auto, and the size in bytes below
    which arrays are replicated.
    """

    sizes: Mapping[str, int]
    has_auto: bool
    min_bytes: int = 0


def axes_of(mesh: MeshSpec, min_bytes: int = 0) -> Axes:
    """The axes of a mesh. Arrays of fewer than `min_bytes` bytes are replicated on it."""
    return Axes(
        sizes=mesh.shape,
        has_auto=AxisType.Auto in mesh.axis_types,
        min_bytes=min_bytes,
    )


class Leaf(NamedTuple):
    """The shape, dtype and units of an array."""

    shape: tuple[int, ...]
    dtype: DType
    units: Units


def leaf_of(shape: tuple[int, ...], dtype: DType, units: Units | None) -> Leaf:
    """An array to be sharded; without `units`, a shard may end at any element."""
    if units is None:
        units = (1,) * len(shape)
    return Leaf(
        shape=shape,
        dtype=dtype,
        units=units,
    )


def corrected(spec: PartitionSpec, leaf: Leaf, axes: Axes) -> Decision:
    """Returns `spec` without the axes that do not fit the array `leaf` on a mesh with
    the axes `axes`, and the reasons; the same as [`shardfx.correct`][], for arguments
    that are already checked.
    """
    entries = fitted(spec, leaf.shape)
    sizes = axes.sizes
    requested_axes: tuple[str, ...] = ()
    if axes.min_bytes:
        requested_axes = tuple(dict.fromkeys(axes_of_entries(entries)))
    if requested_axes:
        reasons_for_small = too_small(leaf, requested_axes, axes.min_bytes)
        if reasons_for_small:
            return Decision(PartitionSpec(), reasons_for_small)
    used_axes = {*spec.unreduced, *spec.reduced}
    kept_entries = []
    reasons: list[Reason] = []
    columns = zip(entries, leaf.shape, leaf.units, strict=True)
    for dim, (entry, size, unit) in enumerate(columns):
        if entry is None or (entry is UNCONSTRAINED and axes.has_auto):
            pass
        elif (
            entry in sizes
            and entry not in used_axes
            and size % (unit * sizes[entry]) == 0
        ):
            # By far the most frequent case: a single axis that is unused and divides.
            used_axes.add(entry)
        elif entry is UNCONSTRAINED:
            what = "Auto axis that the compiler could choose for UNCONSTRAINED"
            entry = None
            reasons.append(reason_for(Code.absent, dim, (), what=what))
        else:
            free, dim_reasons = free_axes(entry_axes(entry), dim, sizes, used_axes)
            axes_kept = dividing_axes(free, size, unit, sizes)
            used_axes.update(axes_kept)
            reasons += dim_reasons
            if axes_kept != free:
                reasons.append(
                    indivisible(
                        axes=free,
                        kept_axes=axes_kept,
                        dim=dim,
                        size=size,
                        unit=unit,
                        sizes=sizes,
                    )
                )
            entry = canonical_entry(axes_kept)
        kept_entries.append(entry)
    if not (spec.unreduced or spec.reduced):
        return Decision(trimmed(kept_entries), tuple(reasons))
    absent = (spec.unreduced | spec.reduced).difference(sizes)
    if absent:
        reasons.append(_absent(tuple(sorted(absent)), None))
    # A spec without entries, from which `trimmed` takes the unreduced and reduced axes.
    reductions = with_reductions(
        (),
        spec.unreduced.intersection(sizes),
        spec.reduced.intersection(sizes),
        unreduced_kind(spec),
    )
    return Decision(trimmed(kept_entries, reductions), tuple(reasons))


def _absent(axes: tuple[str, ...], dim: int | None) -> Reason:
    """The reason that the mesh lacks `axes`. It names `dim` if it is known."""
    return reason_for(Code.absent, dim, axes, what=f"axis `{'`, `'.join(axes)}`")


def fitted(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns an entry of `spec` for each dimension of `shape`. Raises `SpecError` if a
    further entry is not `None`.
    """
    entries = entries_of(spec)
    if any(entry is not None for entry in entries[len(shape) :]):
        few = "the first is" if len(shape) == 1 else f"the first {len(shape)} are"
        raise SpecError(
            f"{spec} has {plural(len(entries), 'entry', 'entries')}, but shape {shape}"
            f" has {plural(len(shape), 'dimension')}; write"
            f" `{trimmed(entries[: len(shape)])}` if {few} meant."
        )
    if len(entries) == len(shape):
        return entries
    return entries_at(spec, len(shape))


def too_small(leaf: Leaf, axes: tuple[str, ...], min_bytes: int) -> tuple[Reason, ...]:
    """Returns the reason why `axes` do not shard an array of fewer than `min_bytes`
    bytes; no reason for a larger array.
    """
    if not min_bytes:
        return ()
    size = array_bytes(leaf.shape, leaf.dtype)
    if size >= min_bytes:
        return ()
    return (reason_for(Code.small, None, axes, size=size, limit=min_bytes),)


def free_axes(
    axes: tuple[str, ...],
    dim: int | None,
    sizes: Mapping[str, int],
    used: Container[str],
) -> tuple[tuple[str, ...], list[Reason]]:
    """Returns those of `axes` that are free to shard a dimension, and the reasons why
    others are not: the mesh, whose axes have these `sizes`, lacks them; `used` has
    them; or they occur twice. The reasons name `dim` if it is known.
    """
    absent = tuple(axis for axis in axes if axis not in sizes)
    present = [axis for axis in axes if axis in sizes]
    free = tuple(dict.fromkeys(axis for axis in present if axis not in used))
    # The axes in `used`, and the further occurrences of the others.
    taken = list(present)
    for axis in free:
        taken.remove(axis)
    reasons = []
    if absent:
        reasons.append(_absent(absent, dim))
    if taken:
        what = f"`{'`, `'.join(dict.fromkeys(taken))}`"
        reasons.append(reason_for(Code.duplicate, dim, tuple(taken), what=what))
    return free, reasons


def dividing_axes(
    axes: tuple[str, ...],
    size: int,
    unit: int,
    sizes: Mapping[str, int],
) -> tuple[str, ...]:
    """Returns the subset of `axes` with the largest product that divides `size / unit`.
    Axes of size 1 stay. For size 12, unit 1 and axes of sizes 8, 2 and 3 it is the axes
    of sizes 2 and 3.
    """
    # A size that is no whole number of units may not be divided at all.
    unit_count = 1 if size % unit else size // unit
    # All sizes are above 1, so a subset's product exceeds that of each of its prefixes.
    # Of two subsets with equal products, the first stays first whichever axes are added
    # to both: one candidate per product is enough.
    # By the product of a subset's sizes, the positions of its axes in `axes`.
    subsets: dict[int, tuple[int, ...]] = {1: ()}
    # Any subset comes before it.
    last = (len(axes),)
    for position, axis in enumerate(axes):
        if sizes[axis] == 1:
            continue
        for product, positions in list(subsets.items()):
            larger = product * sizes[axis]
            subset = (*positions, position)
            if unit_count % larger == 0 and subset < subsets.get(larger, last):
                subsets[larger] = subset
    chosen = subsets[max(subsets)]
    dividing = []
    for position, axis in enumerate(axes):
        if sizes[axis] == 1 or position in chosen:
            dividing.append(axis)
    return tuple(dividing)


def indivisible(
    axes: tuple[str, ...],
    kept_axes: tuple[str, ...],
    dim: int | None,
    size: int,
    unit: int,
    sizes: Mapping[str, int],
) -> Reason:
    """Returns the reason why only `kept_axes` of `axes` shard a dimension of this size and
    unit. It names `dim` if known.
    """
    dropped = tuple(axis for axis in axes if axis not in kept_axes)
    what = product_text([axis for axis in axes if sizes[axis] > 1], sizes)
    if unit > 1 and size % unit:
        fix = (
            "use a name without a unit, else correct the unit to one that divides"
            f" {size}"
        )
        text = (
            f"size {size} is no whole number of units of {unit}, so nothing may cut it;"
            " if it counts units already, "
        )
        return Reason(code=Code.unit, dim=dim, axes=dropped, message=text + fix)
    unit_count = size // unit
    units_text = plural(unit_count, "unit")
    if unit > 1 and dividing_axes(axes, size, 1, sizes) != kept_axes:
        return reason_for(
            Code.unit,
            dim,
            dropped,
            size=size,
            units=units_text,
            count=unit_count,
            unit=unit,
            what=what,
        )
    pad = advice_to_pad(size, shards_over(axes, sizes) * unit)
    text = f"{size} ({units_text} of {unit})" if unit > 1 else size
    return reason_for(
        Code.indivisible,
        dim,
        dropped,
        size=text,
        what=what,
        pad=pad,
        whole=unit_count,
    )


def advice_to_pad(size: int, product: int) -> str:
    """Returns "pad it to N, or ", where N is the next multiple of `product`; "" if
    `size` would grow by over 1/64.
    """
    padded = -(-size // product) * product
    # A vocabulary can be padded, a width of 64 cannot.
    if (padded - size) * 64 <= size:
        return f"pad it to {padded}, or "
    return ""


def product_text(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Mesh axes with their sizes as a text: "`data` (2) x `tensor` (4)"."""
    return " x ".join(f"`{axis}` ({sizes[axis]})" for axis in axes)
