"""Sharding an array over more mesh axes than it asked for, on whichever dimension has room, as ZeRO does."""

import math
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.reason import Code, reason
from .._ground.spec import array_bytes, entries_of, entry_axes, trimmed
from .._rules.strategies import Fsdp
from ..topology._mesh import MeshSpec
from .correction import advice_to_pad, correct
from .decide import Request


def further(request: Request, shape: tuple[int, ...], dtype: Any, mesh: MeshSpec, over: Fsdp) -> Request:
    """`request` with the axes of `over` that it does not use, on the dimension that they cut furthest.

    Of several such dimensions one that nothing shards yet is taken, then the largest. Axes that do not fit there too
    go to the next such dimension. A dimension that is sharded is cut further within its shards, so that what one
    device then holds is part of what it would have held. Axes for which no dimension has room are a reason.
    """
    spec = correct(request.spec, shape, mesh, units=request.units).spec
    entries = [*entries_of(spec), *[None] * (len(shape) - len(entries_of(spec)))]
    used = {axis for entry in entries for axis in entry_axes(entry)}
    free = tuple(axis for axis in over.axes if axis in mesh.axis_names and axis not in used)
    nbytes = array_bytes(shape, dtype)
    if free and nbytes < over.min_bytes:
        small = reason(Code.small, None, free, size=nbytes, limit=over.min_bytes)
        return request._replace(reasons=(*request.reasons, small))
    units, added = request.units or (1,) * len(shape), ()
    while found := _roomiest(free, entries, shape, units, mesh, over.skip):
        dim, kept = found
        entries[dim] = (*entry_axes(entries[dim]), *kept)
        free, added = tuple(axis for axis in free if axis not in kept), (*added, *kept)
    request = request._replace(reasons=(*request.reasons, *_no_room(free, shape, mesh)))
    if not added:
        return request
    rule = f"{request.rule + ', ' if request.rule else ''}over {', '.join(added)}"
    return request._replace(spec=trimmed(entries, spec), rule=rule)


def _roomiest(
    axes: tuple[str, ...],
    entries: list[Any],
    shape: tuple[int, ...],
    units: tuple[int, ...],
    mesh: MeshSpec,
    skip: tuple[int, ...],
) -> tuple[int, tuple[str, ...]] | None:
    """The dimension that some of `axes` cut furthest, and these; `None` where none cuts any."""
    choices = []
    for dim, (size, unit) in enumerate(zip(shape, units, strict=True)):
        left = 1 if size % unit else size // unit // mesh.axis_size(entry_axes(entries[dim]))
        kept = _dividing(axes, left, mesh)
        fits = kept and size and dim not in skip
        choices += [(mesh.axis_size(kept), entries[dim] is None, left, -dim, kept)] if fits else []
    *_, dim, kept = max(choices, default=(0, ()))
    return (-dim, kept) if kept else None


def _dividing(axes: tuple[str, ...], size: int, mesh: MeshSpec) -> tuple[str, ...]:
    """Those of `axes` that cut a dimension of `size` elements, axes of size 1 aside."""
    (entry,) = (*entries_of(correct(PartitionSpec(axes), (size,), mesh).spec), None)[:1]
    return tuple(axis for axis in entry_axes(entry) if mesh.axis_size(axis) > 1)


def _no_room(axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshSpec) -> tuple[Any, ...]:
    count, size = mesh.axis_size(axes), max(shape)
    if count == 1 or not size:
        return ()
    what = " x ".join(f"`{axis}` ({mesh.axis_size(axis)})" for axis in axes)
    what = f"{what} beside the axes that shard it already, and no other dimension is"
    pad = advice_to_pad(size, math.lcm(size, count))
    return (reason(Code.indivisible, None, axes, size=size, what=what, pad=pad, whole=size),)
