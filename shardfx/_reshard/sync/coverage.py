"""Checks that a transfer plan, read from a text, writes each element of each shard
exactly once, from positions inside of its sources.
"""

import itertools as it
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..._convert import Piece, dense, dtypes_of, hull, names_of, swapped
from .kinds import (
    BUFFER,
    FORM,
    PLACE,
    PROCESS,
    Buffer,
    PlanFields,
    SentLeaf,
    SourceLeaf,
    TransferKind,
    WireForm,
)


# Limits for numbers, boxes of one array and their corners; no plan of this package
# exceeds them.
MOST_NUMBER = 1 << 48
MOST_BOXES = 1 << 22
_MOST_CORNERS = 1 << 24


def require(holds: object, what: str) -> None:
    """Raises `ValueError` with the text `what` unless `holds`."""
    if not holds:
        raise ValueError(what)


def check_plan(plan: PlanFields) -> None:
    """Raises `ValueError` unless all positions are inside their arrays, and each device
    receives each element of its shards once.
    """
    shapes = [leaf.shape for leaf in plan.leaves]
    shapes += [struct.shape for struct in plan.sources.values()]
    numbers = [*plan.senders, *plan.receivers, plan.memory_limit_bytes - 1]
    numbers += [leaf.kind for leaf in plan.leaves]
    are_known = all(0 <= number < MOST_NUMBER for number in it.chain(numbers, *shapes))
    require(are_known, "a number that no plan has")
    paths = {leaf.path for leaf in plan.leaves}
    require(len(paths) == len(plan.leaves), "a leaf is there twice")

    sizes = dict(plan.mesh)
    is_mesh = (
        len(sizes) == len(plan.mesh)
        and all(size > 0 for size in sizes.values())
        and math.prod(sizes.values()) == len(plan.senders)
    )
    require(is_mesh, "a mesh of another number of devices")
    for path, source in plan.sources.items():
        require(_is_sharded(source, sizes), f"`{path}` does not fit the mesh")

    first_of_kind: dict[int, SentLeaf] = {}
    for leaf in plan.leaves:
        kind = plan.kinds[leaf.kind]
        first = first_of_kind.setdefault(leaf.kind, leaf)
        is_of_kind = (
            leaf.shape == first.shape
            and leaf.dtype == first.dtype
            and _sources_of(plan, leaf) == _sources_of(plan, first)
            and kind.names == first.names
        )
        require(is_of_kind, f"leaf `{leaf.path}` is not of its kind")
        if first is leaf:
            _check_kind(plan, leaf, kind)


def _is_sharded(source: SourceLeaf, sizes: Mapping[str, int]) -> bool:
    """Whether the sharding of a source is one of a mesh with these axis sizes."""
    names = [axis for axes in source.axes for axis in axes]
    if len({*names}) < len(names) or not sizes.keys() >= {*names}:
        return False
    return len(source.axes) == len(source.shape) and all(
        size % math.prod(sizes[axis] for axis in axes) == 0
        for size, axes in zip(source.shape, source.axes, strict=True)
    )


def _sources_of(plan: PlanFields, leaf: SentLeaf) -> list[SourceLeaf]:
    return [plan.sources[name] for name in leaf.names]


def _check_kind(plan: PlanFields, leaf: SentLeaf, kind: TransferKind) -> None:
    where = f"leaf `{leaf.path}`"
    rank = len(leaf.shape)

    processes = [
        process for process in plan.receivers if plan.receiver in (None, process)
    ]
    devices = sorted(
        (buffer.process, device) for buffer in kind.buffers for device in buffer.devices
    )
    is_once_per_device = len({*devices}) == len(devices)
    is_complete = [process for process, _ in devices] == sorted(processes)
    require(is_once_per_device and is_complete, f"{where} is not for every device once")
    for buffer in kind.buffers:
        require(
            _is_inside(buffer, leaf.shape),
            f"{where} has the box {buffer.box} in shape {leaf.shape}",
        )

    for piece in kind.pieces:
        is_known = set(names_of(piece)) <= set(kind.names)
        require(is_known, f"{where} has a piece of no source")
        require(
            _is_piece(piece, leaf, plan.sources),
            f"{where} has a piece that does not fit its shape {leaf.shape}",
        )

    for number, form in enumerate(kind.forms):
        start = _at_start(form, rank)
        dims = [factor.target_dim for factor in form.factors]
        fits = all(dim < rank for dim in dims) and _fits(start, leaf.shape)
        require(fits, f"{where} has a piece that does not fit its shape {leaf.shape}")

        rows = kind.rows[kind.rows[:, FORM] == number]
        is_constant = form.value.path is None
        known_senders = [-1] if is_constant else plan.senders
        is_sent = np.isin(rows[:, PROCESS], known_senders).all()
        require(is_sent, f"{where} has a piece from no process of the senders")
        if not is_constant:
            _check_source(leaf, form, plan.sources, rows[:, PLACE : PLACE + form.rank])

    require(
        _is_covered(kind, rank),
        f"{where}: the elements of its shards are not each written once",
    )


def _is_piece(piece: Piece, leaf: SentLeaf, sources: Mapping[str, SourceLeaf]) -> bool:
    """Whether a piece is inside of the array `leaf`, and of its source."""
    ends = [(piece, leaf.shape)]
    if piece.value.path is not None:
        ends.append((swapped(piece), sources[piece.value.path].data.shape))
    return all(
        len(end.target) == len(shape)
        and all(factor.target_dim < len(shape) for factor in end.factors)
        and min(end.target, default=0) >= 0
        and _fits(end, shape)
        for end, shape in ends
    )


def _is_inside(buffer: Buffer, shape: Sequence[int]) -> bool:
    return len(buffer.box) == len(shape) and all(
        0 <= start <= stop <= size
        for (start, stop), size in zip(buffer.box, shape, strict=True)
    )


def _at_start(form: WireForm, rank: int) -> Piece:
    """A part of the form `form` that starts at the first elements of its source and of
    its target, which has `rank` dimensions.
    """
    return Piece(
        value=form.value,
        source=(0,) * form.rank,
        target=(0,) * rank,
        factors=form.factors,
    )


def _check_source(
    leaf: SentLeaf,
    form: WireForm,
    sources: Mapping[str, SourceLeaf],
    places: np.ndarray,
) -> None:
    value = form.value
    where = f"leaf `{leaf.path}`"
    shape, dtype = sources[value.path or ""].data
    if value.scale is not None:
        dtype = np.dtype("float32")
        block = value.scale.block
        scale_shape = tuple(
            -(-size // step) for size, step in zip(shape, block, strict=True)
        )
        is_scaled = (
            min(block, default=1) > 0
            and sources[value.scale.path].data.shape == scale_shape
        )
        require(is_scaled, f"{where} has scales of another shape")

    is_alike = form.rank == len(shape) and all(
        factor.source_dim < len(shape) for factor in form.factors
    )
    require(is_alike, f"{where} has a piece of more dimensions than `{value.path}`")
    start = swapped(_at_start(form, len(leaf.shape)))
    stops = np.array([high for _, high in hull(start)], np.int64)
    is_inside = (
        _fits(start, shape) and (places + stops <= np.array(shape, np.int64)).all()
    )
    require(is_inside, f"{where} has a piece outside of `{value.path}`")
    cast_dtype = np.dtype([dtype, *dtypes_of(value.casts)][-1])
    require(
        cast_dtype == leaf.dtype,
        f"{where} is {leaf.dtype}, which its casts do not give",
    )


def _fits(piece: Piece, shape: Sequence[int]) -> bool:
    return all(high <= size for (_, high), size in zip(hull(piece), shape, strict=True))


def _is_covered(kind: TransferKind, rank: int) -> bool:
    """Whether the rows of `kind` write each element of each buffer (one box of a target
    array) exactly once.

    `rank` is the number of dimensions of the target. The check compares corners of
    boxes, with signs. A corner has the sign -1 if an odd number of its coordinates are
    ends of their intervals, else 1. The written boxes cover a buffer exactly once if at
    each position their signs have the same sum as the buffer's. For intervals 0 to 2
    and 2 to 5, the signs at 2 cancel, and 1 at 0 and -1 at 5 are left, as for 0 to 5.
    """
    # The buffers themselves count with the opposite sign, so that all sums are 0.
    count = len(kind.buffers)
    sizes = [[high - low for low, high in buffer.box] for buffer in kind.buffers]
    lows = [np.zeros((count, rank), np.int64)]
    highs = [np.array(sizes, np.int64).reshape(count, rank)]
    owners = [np.arange(count)]
    signs = [np.full(count, -1)]
    box_count = 0
    for number, form in enumerate(kind.forms):
        rows = kind.rows[kind.rows[:, FORM] == number]
        if not len(rows):
            continue
        places = rows[:, PLACE + kind.rank :]
        for part in dense(_at_start(form, rank)):
            box_count += len(rows)
            if box_count > MOST_BOXES:
                raise ValueError(f"pieces of more than {MOST_BOXES} boxes")
            part_box = np.array(hull(part), np.int64).reshape(rank, 2)
            lows.append(places + part_box[:, 0])
            highs.append(places + part_box[:, 1])
            owners.append(rows[:, BUFFER])
            signs.append(np.ones(len(rows), np.int64))

    low = np.concatenate(lows)
    high = np.concatenate(highs)
    owner = np.concatenate(owners)
    sign = np.concatenate(signs)
    # Each coordinate becomes its number among those that occur along its dimension.
    values_of_dim = []
    numbers_of_dim = []
    for dim in range(rank):
        coordinates = np.stack([low[:, dim], high[:, dim]])
        values, numbers = np.unique(coordinates, return_inverse=True)
        values_of_dim.append(values)
        numbers_of_dim.append(numbers.reshape(2, -1))
    corner_count = len(low) << rank
    key_count = count * math.prod(len(values) for values in values_of_dim)
    if key_count >= MOST_NUMBER or corner_count > _MOST_CORNERS:
        raise ValueError(f"the pieces of an array have {corner_count} corners")

    keys = []
    weights = []
    for corner in it.product((0, 1), repeat=rank):
        key = owner
        for values, numbers, side in zip(
            values_of_dim, numbers_of_dim, corner, strict=True
        ):
            key = key * len(values) + numbers[side]
        keys.append(key)
        weights.append(sign * (-1) ** sum(corner))
    _, positions = np.unique(np.concatenate(keys), return_inverse=True)
    sums = np.bincount(positions, np.concatenate(weights))
    return not sums.any()
