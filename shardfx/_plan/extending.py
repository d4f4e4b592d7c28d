"""Strategies add mesh axes to a corrected spec."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from .._ground.reason import Code, Decision, Reason, nothing_to_shard, reason_for
from .._ground.spec import (
    array_bytes,
    axes_of_entries,
    canonical_entry,
    entry_axes,
    shard_counts,
    shards_over,
    trimmed,
)
from .._rules import Strategy
from ..topology import MeshSpec
from .fitting import (
    Axes,
    Leaf,
    axes_of,
    corrected,
    dividing_axes,
    fitted,
    free_axes,
    indivisible,
    leaf_of,
    product_text,
    too_small,
)
from .requests import Request, units_for


def apply_strategy(
    spec: PartitionSpec,
    leaf: Leaf,
    mesh: Axes,
    strategy: Strategy,
) -> Decision:
    """Returns `spec` with axes of `strategy` added to the unsharded dimension that they
    divide into the most shards.

    If several dimensions tie, the strategy's preference decides. Axes that `spec` uses
    and axes that the mesh lacks are dropped with a reason. `spec` must be valid for the
    array and the mesh.
    """
    if small_reasons := too_small(leaf, strategy.axes, strategy.min_bytes):
        return Decision(spec, small_reasons)
    if strategy.max_bytes:
        return _until_small(spec, leaf, mesh, strategy)
    sizes = mesh.sizes
    entries = [*fitted(spec, leaf.shape)]
    used = set(axes_of_entries(entries))
    free, reasons = free_axes(strategy.axes, None, sizes, used)
    # Axes of size 1 make no shards: leaving them out is no reason.
    dividing = tuple(axis for axis in free if sizes[axis] > 1)
    open_dims = strategy.open_dims(leaf.shape)
    if dividing and entries and not open_dims:
        reasons.append(_skipped(strategy, dividing, len(entries)))
    if not free or not open_dims:
        return Decision(spec, tuple(reasons))
    dims = [dim for dim in open_dims if entries[dim] is None]
    best_dim, new_axes = _best_dim(
        strategy=strategy, axes=free, entries=entries, leaf=leaf, sizes=sizes, dims=dims
    )
    if dividing and not dims:
        message = (
            f"no dimension is free for {product_text(free, sizes)}: all that may be cut"
            " are sharded already; put the axes into the rule's spec"
        )
        reasons.append(
            Reason(code=Code.indivisible, dim=None, axes=free, message=message)
        )
    elif dims and len(new_axes) < len(free):
        # Where the axes divide no dimension, the reason is about the largest one.
        shown_dim = best_dim
        if shown_dim is None:
            shown_dim = max(dims, key=leaf.shape.__getitem__)
        size = leaf.shape[shown_dim]
        unit = leaf.units[shown_dim]
        reasons.append(
            indivisible(
                axes=free,
                kept_axes=new_axes,
                dim=best_dim,
                size=size,
                unit=unit,
                sizes=sizes,
            )
        )
    if best_dim is not None:
        entries[best_dim] = canonical_entry(new_axes)
    return Decision(trimmed(entries, spec), tuple(reasons))


def _until_small(
    spec: PartitionSpec,
    leaf: Leaf,
    mesh: Axes,
    strategy: Strategy,
) -> Decision:
    """Returns `spec` with the first axes of `strategy` added, as many as are needed for
    a device to hold at most `strategy.max_bytes` bytes of the array; if all are too
    few, with a reason.
    """
    decision = Decision(spec)
    _, reasons_for_absent = free_axes(strategy.axes, None, mesh.sizes, ())
    size = _shard_bytes(spec, leaf, mesh)
    for count in range(len(strategy.axes) + 1):
        if count:
            axes = strategy.axes[:count]
            step = dataclasses.replace(strategy, axes=axes, max_bytes=0)
            decision = apply_strategy(spec, leaf, mesh, step)
        size = _shard_bytes(decision.spec, leaf, mesh)
        if size <= strategy.max_bytes:
            return Decision(decision.spec, tuple(reasons_for_absent))
    reason = _too_large(size, strategy)
    return Decision(decision.spec, (*decision.reasons, reason))


def _too_large(size: int, strategy: Strategy) -> Reason:
    """The reason that a device holds `size` bytes of an array, more than the
    `max_bytes` of the strategy.
    """
    limit = strategy.max_bytes
    return reason_for(Code.large, None, strategy.axes, size=size, limit=limit)


def _shard_bytes(spec: PartitionSpec, leaf: Leaf, mesh: Axes) -> int:
    """The bytes of one shard of the array under `spec`."""
    counts = shard_counts(spec, len(leaf.shape), mesh.sizes)
    pairs = zip(leaf.shape, counts, strict=True)
    return array_bytes(tuple(size // count for size, count in pairs), leaf.dtype)


def _skipped(strategy: Strategy, axes: tuple[str, ...], rank: int) -> Reason:
    """Returns the reason why `strategy`, which may shard none of the `rank` dimensions
    of an array, does not shard it over `axes`.
    """
    noun = "dims" if rank > 1 else "dim"
    dims = f"{noun} {', '.join(map(str, range(rank)))}"
    return reason_for(Code.skipped, None, axes, strategy=strategy.text, dims=dims)


def shard_over(
    request: Request,
    shape: tuple[int, ...],
    dtype: object,
    mesh: MeshSpec,
    over: Strategy,
) -> Request:
    """Returns `request` with the unused axes of the strategy `over` added, as ZeRO
    shards an optimizer's state.

    The axes are added to the dimension that they divide into the most shards. Axes that
    do not divide this dimension are added to other dimensions in the same manner. A
    dimension that is already sharded is split further. Axes that divide no dimension
    are dropped with a reason.
    """
    sizes = mesh.shape
    leaf = leaf_of(shape, dtype, units_for(request, shape))
    if over.max_bytes:
        return _over_until_small(request, leaf, mesh, over)
    base_spec = corrected(request.spec, leaf, axes_of(mesh)).spec
    entries = [*fitted(base_spec, shape)]
    used = set(axes_of_entries(entries))
    unused_axes = tuple(axis for axis in over.axes if axis not in used)
    free, reasons = free_axes(unused_axes, None, sizes, ())
    free = tuple(axis for axis in free if sizes[axis] > 1)
    if free and math.prod(shape) <= 1:
        if not any(why.code.is_expected for why in request.reasons):
            reasons.append(nothing_to_shard(shape))
        free = ()
    if free and (small := too_small(leaf, free, over.min_bytes)):
        reasons += small
        free = ()
    dims = over.open_dims(shape)
    added_axes: tuple[str, ...] = ()
    while free:
        dim, divisors = _best_dim(
            strategy=over, axes=free, entries=entries, leaf=leaf, sizes=sizes, dims=dims
        )
        if dim is None:
            reasons.append(
                _nowhere_to_add(over=over, axes=free, leaf=leaf, sizes=sizes, dims=dims)
            )
            break
        entries[dim] = (*entry_axes(entries[dim]), *divisors)
        free = tuple(axis for axis in free if axis not in divisors)
        added_axes = (*added_axes, *divisors)
    request = request._replace(reasons=(*request.reasons, *reasons))
    if not added_axes:
        return request
    rule = f"over {', '.join(added_axes)}"
    if request.rule:
        rule = f"{request.rule}, {rule}"
    return request._replace(spec=trimmed(entries, base_spec), rule=rule)


def _over_until_small(
    request: Request,
    leaf: Leaf,
    mesh: MeshSpec,
    over: Strategy,
) -> Request:
    """Returns `request` with the first axes of `over` added, as many as are needed for
    a device to hold at most `over.max_bytes` bytes of the array; if all are too few,
    with a reason.
    """
    axes = axes_of(mesh)
    further = request
    size = array_bytes(leaf.shape, leaf.dtype)
    for count in range(len(over.axes) + 1):
        if count:
            step = dataclasses.replace(over, axes=over.axes[:count], max_bytes=0)
            further = shard_over(
                request=request,
                shape=leaf.shape,
                dtype=leaf.dtype,
                mesh=mesh,
                over=step,
            )
        spec = corrected(further.spec, leaf, axes).spec
        size = _shard_bytes(spec, leaf, axes)
        if size <= over.max_bytes:
            return further._replace(reasons=request.reasons)
    return further._replace(reasons=(*further.reasons, _too_large(size, over)))


def _nowhere_to_add(
    over: Strategy,
    axes: tuple[str, ...],
    leaf: Leaf,
    sizes: Mapping[str, int],
    dims: Sequence[int],
) -> Reason:
    """Returns the reason why the strategy `over` adds `axes` to none of `dims`, the
    dimensions that it may shard.
    """
    if not dims:
        return _skipped(over, axes, len(leaf.shape))
    size = max(leaf.shape[dim] for dim in dims)
    what = (
        f"{product_text(axes, sizes)} beside the axes that shard it already, and no other"
        " dimension is"
    )
    return reason_for(
        Code.indivisible,
        None,
        axes,
        size=size,
        what=what,
        pad="",
        whole=size,
    )


def _best_dim(
    strategy: Strategy,
    axes: tuple[str, ...],
    entries: Sequence[object],
    leaf: Leaf,
    sizes: Mapping[str, int],
    dims: Iterable[int],
) -> tuple[int | None, tuple[str, ...]]:
    """Returns the dimension in `dims` that `axes` divide into the most shards, and the
    axes that divide it.

    If no axis divides any of `dims`, it returns `None` and no axes. If several tie, an
    unsharded dimension is preferred, then the one that the strategy prefers, then the
    first. `entries` are the entries of the array's spec: if they shard a dimension
    already, the axes must divide its shards.
    """
    best_rank: tuple[int, ...] = ()
    best_dim = None
    best_axes: tuple[str, ...] = ()
    for dim in dims:
        shards = shards_over(entry_axes(entries[dim]), sizes)
        shard_size = leaf.shape[dim] // shards
        new_axes = dividing_axes(axes, shard_size, leaf.units[dim], sizes)
        if not new_axes:
            continue
        rank = (
            shards_over(new_axes, sizes),
            entries[dim] is None,
            strategy.preference(shard_size),
            -dim,
        )
        if rank > best_rank:
            best_rank = rank
            best_dim = dim
            best_axes = new_axes
    return best_dim, best_axes
