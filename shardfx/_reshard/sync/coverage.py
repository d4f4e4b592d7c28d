"""Checks that a transfer plan, read from a text, writes each element of each shard
exactly once, from positions inside of its sources.
"""

import collections
import itertools as it
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import Piece, dtypes_of, hull, names_of, swapped
from ..._ground.boxes import box_shape, volume
from .kinds import (
    BUFFER,
    FIRST_POSITION,
    FORM,
    PROCESS,
    Buffer,
    PlanFields,
    SentLeaf,
    SourceLeaf,
    TransferKind,
    WireForm,
)


# Limits for numbers and for the boxes of one array; no plan of this package exceeds
# them.
MOST_NUMBER = 1 << 48
MOST_BOXES = 1 << 22
# The corners of boxes that are compared for one plan. A short text can ask for any
# number of them, since a piece may write every second element. Each row allows for some
# more.
_MOST_CORNERS = 1 << 24
_CORNERS_OF_ROW = 1 << 6
# The rows of bytes that one process receives. Each is some objects in memory.
MOST_ROWS = 1 << 22


def require(holds: object, what: str) -> None:
    """Raises `ValueError` with the text `what` unless `holds`."""
    if not holds:
        raise ValueError(what)


def check_transfer(plan: PlanFields) -> None:
    """Raises `ValueError` unless all positions are inside their arrays, and each device
    receives each element of its shards once.
    """
    shapes = [leaf.shape for leaf in plan.leaves]
    shapes += [struct.shape for struct in plan.sources.values()]
    # A limit of bytes is positive, and may be as large as the numbers' own limit.
    numbers = [*plan.senders, *plan.receivers, plan.memory_limit_bytes - 1]
    numbers += [leaf.kind for leaf in plan.leaves]
    are_in_range = all(
        0 <= number < MOST_NUMBER for number in it.chain(numbers, *shapes)
    )
    require(are_in_range, "a number that no plan has")
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
        require(_fits_mesh(source, sizes), f"`{path}` does not fit the mesh")

    rows = most_rows(plan.kinds, plan.leaves, plan.memory_limit_bytes)
    require(
        rows <= MOST_ROWS,
        f"up to {rows:,} rows of bytes for a process, since `memory_limit_bytes` is"
        f" {plan.memory_limit_bytes:,}",
    )
    row_count = sum(len(kind.rows) for kind in plan.kinds)
    budget = _CornerBudget(_MOST_CORNERS + _CORNERS_OF_ROW * row_count)
    first_of_kind: dict[int, SentLeaf] = {}
    for leaf in plan.leaves:
        kind = plan.kinds[leaf.kind]
        first = first_of_kind.setdefault(leaf.kind, leaf)
        is_of_kind = (
            leaf.shape == first.shape
            and leaf.dtype == first.dtype
            and _sources_of(plan, leaf) == _sources_of(plan, first)
            and kind.source_paths == first.source_paths
        )
        require(is_of_kind, f"leaf `{leaf.path}` is not of its kind")
        if first is leaf:
            _check_kind(plan, leaf, kind, budget)


def most_rows(
    kinds: Sequence[TransferKind],
    leaves: Sequence[SentLeaf],
    memory_limit_bytes: int,
) -> int:
    """An upper bound of the rows of bytes that one process receives, for the process
    with the largest one.

    A part of the plan is one row, or divided into rows of at most `memory_limit_bytes`,
    of which two together have more.
    """
    leaf_counts = collections.Counter(leaf.kind for leaf in leaves)
    itemsizes = {leaf.kind: leaf.dtype.itemsize for leaf in leaves}
    rows_by_process: collections.Counter[int] = collections.Counter()
    for number, leaf_count in leaf_counts.items():
        kind = kinds[number]
        for process, part_count in collections.Counter(kind.receivers.tolist()).items():
            rows_by_process[process] += leaf_count * part_count
        for buffer in kind.buffers:
            nbytes = volume(buffer.box) * itemsizes[number]
            rows_by_process[buffer.process] += (
                leaf_count * 2 * nbytes // memory_limit_bytes
            )
    return max(rows_by_process.values(), default=0)


class _CornerBudget:
    """The number of corners of boxes that may still be compared for a plan."""

    def __init__(self, corners: int):
        self._corners = corners

    def take(self, corners: int) -> None:
        """Raises `ValueError` if `corners` more are too many."""
        self._corners -= corners
        require(self._corners >= 0, f"pieces whose boxes have {corners:,} more corners")


def _fits_mesh(source: SourceLeaf, sizes: Mapping[str, int]) -> bool:
    """Whether the sharding of a source is one of a mesh with these axis sizes, each of
    whose axes shards at most one dimension, and divides it.
    """
    names = list(it.chain.from_iterable(source.axes))
    if len({*names}) < len(names) or not sizes.keys() >= {*names}:
        return False
    return len(source.axes) == len(source.shape) and all(
        size % math.prod(sizes[axis] for axis in axes) == 0
        for size, axes in zip(source.shape, source.axes, strict=True)
    )


def _sources_of(plan: PlanFields, leaf: SentLeaf) -> list[SourceLeaf]:
    """The sources of a leaf, in the order of its `source_paths`."""
    return [plan.sources[name] for name in leaf.source_paths]


def _check_kind(
    plan: PlanFields,
    leaf: SentLeaf,
    kind: TransferKind,
    budget: _CornerBudget,
) -> None:
    """Raises `ValueError` unless the buffers, pieces, forms and rows of `kind` fit its
    first leaf, `leaf`, and the rows write each element of each buffer once. `budget`
    limits the corners of boxes that are compared for that.
    """
    where = f"leaf `{leaf.path}`"
    rank = len(leaf.shape)

    processes = [
        process for process in plan.receivers if plan.receiver in (None, process)
    ]
    devices: list[tuple[int, int]] = []
    for buffer in kind.buffers:
        devices += [(buffer.process, device) for device in buffer.devices]
    devices.sort()
    is_once_per_device = len({*devices}) == len(devices)
    is_complete = [process for process, _ in devices] == sorted(processes)
    require(is_once_per_device and is_complete, f"{where} is not for every device once")
    for buffer in kind.buffers:
        require(
            _has_box_inside(buffer, leaf.shape),
            f"{where} has the box {buffer.box} in shape {leaf.shape}",
        )

    values = [piece.value for piece in kind.pieces]
    values += [form.value for form in kind.forms]
    for value in values:
        names = names_of(Piece(value=value, source=(), target=(), factors=()))
        require(
            set(names) <= set(kind.source_paths), f"{where} has a piece of no source"
        )
    for piece in kind.pieces:
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
            stop = FIRST_POSITION + form.source_rank
            source_positions = rows[:, FIRST_POSITION:stop]
            _check_source(leaf, form, plan.sources, source_positions)

    require(
        _is_covered(kind, rank, budget),
        f"{where}: the elements of its shards are not each written once",
    )


def _is_piece(piece: Piece, leaf: SentLeaf, sources: Mapping[str, SourceLeaf]) -> bool:
    """Whether a piece is inside of the array `leaf` and of its source, and has a scale
    for each block of it.
    """
    # Exchanged, a piece writes the array that it reads.
    pieces_and_shapes = [(piece, leaf.shape)]
    scale = piece.value.scale
    if piece.value.path is not None:
        source_shape = sources[piece.value.path].data.shape
        pieces_and_shapes.append((swapped(piece), source_shape))
        if scale is not None:
            scale_shape = sources[scale.path].data.shape
            if not _is_scaled(source_shape, scale_shape, scale.block):
                return False
    elif scale is not None:
        return False
    return all(
        len(written.target) == len(shape)
        and all(factor.target_dim < len(shape) for factor in written.factors)
        and min(written.target, default=0) >= 0
        and _fits(written, shape)
        for written, shape in pieces_and_shapes
    )


def _has_box_inside(buffer: Buffer, shape: Sequence[int]) -> bool:
    """Whether the box of a buffer is inside of an array of this shape."""
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
        source=(0,) * form.source_rank,
        target=(0,) * rank,
        factors=form.factors,
    )


def _check_source(
    leaf: SentLeaf,
    form: WireForm,
    sources: Mapping[str, SourceLeaf],
    source_positions: np.ndarray,
) -> None:
    """Raises `ValueError` unless the parts of one form read from inside of their source
    and have the dtype of the leaf after their casts. `source_positions` has a row for
    each part: where its first element is in the source.
    """
    value = form.value
    where = f"leaf `{leaf.path}`"
    source = sources[value.path or ""].data
    rank = len(source.shape)
    dtype = source.dtype
    if value.scale is not None:
        dtype = np.dtype("float32")
        scales = sources[value.scale.path].data
        is_scaled = _is_scaled(source.shape, scales.shape, value.scale.block)
        require(is_scaled, f"{where} has scales of another shape")

    source_dims = [factor.source_dim for factor in form.factors]
    is_alike = form.source_rank == rank and all(dim < rank for dim in source_dims)
    require(is_alike, f"{where} has a piece of more dimensions than `{value.path}`")

    reading = swapped(_at_start(form, len(leaf.shape)))
    is_inside = _fits(reading, source.shape)
    if is_inside:
        stops = np.array([high for _, high in hull(reading)], np.int64)
        sizes = np.array(source.shape, np.int64)
        is_inside = (source_positions + stops <= sizes).all()
    require(is_inside, f"{where} has a piece outside of `{value.path}`")

    dtypes = [dtype, *dtypes_of(value.casts)]
    cast_dtype = np.dtype(dtypes[-1])
    require(
        cast_dtype == leaf.dtype,
        f"{where} is {leaf.dtype}, which its casts do not give",
    )


def _is_scaled(
    shape: Sequence[int],
    scale_shape: Sequence[int],
    block: Sequence[int],
) -> bool:
    """Whether scales have one element for each block of an array."""
    if len(block) != len(shape) or min(block, default=1) < 1:
        return False
    block_counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    return list(scale_shape) == block_counts


def _fits(piece: Piece, shape: Sequence[int]) -> bool:
    """Whether a piece writes no element behind the ends of an array of this shape."""
    return all(high <= size for (_, high), size in zip(hull(piece), shape, strict=True))


class _Boxes(NamedTuple):
    """Boxes in the buffers of a kind. `lows` and `highs` have a row for each box, and
    `buffers` has the number of its buffer.
    """

    lows: np.ndarray
    highs: np.ndarray
    buffers: np.ndarray


def _is_covered(kind: TransferKind, rank: int, budget: _CornerBudget) -> bool:
    """Whether the rows of `kind` write each element of each buffer (one box of a target
    array) exactly once.

    `rank` is the number of dimensions of the target. The check compares corners of
    boxes, with signs. A corner has the sign -1 if an odd number of its coordinates are
    ends of their intervals, else 1. The written boxes cover a buffer exactly once if at
    each position their signs have the same sum as the buffer's. For intervals 0 to 2
    and 2 to 5, the signs at 2 cancel, and 1 at 0 and -1 at 5 are left, as for 0 to 5.
    """
    buffer_count = len(kind.buffers)
    # A box has 2**rank corners.
    budget.take(buffer_count << rank)
    sizes = [box_shape(buffer.box) for buffer in kind.buffers]
    whole = _Boxes(
        lows=np.zeros((buffer_count, rank), np.int64),
        highs=np.array(sizes, np.int64).reshape(buffer_count, rank),
        buffers=np.arange(buffer_count),
    )
    written = [
        _written_boxes(kind, number, rank, budget) for number in range(len(kind.forms))
    ]
    parts = [whole, *written]
    lows = np.concatenate([boxes.lows for boxes in parts])
    highs = np.concatenate([boxes.highs for boxes in parts])

    # A corner's key is its buffer and its position; the sums of signs belong to keys.
    # Coordinates are numbered among those that occur along their dimension.
    keys = np.concatenate([boxes.buffers for boxes in parts])
    # The buffers themselves count with the opposite sign, so that all sums are 0.
    signs = np.ones(len(keys), np.int8)
    signs[:buffer_count] = -1
    key_count = buffer_count
    for dim in range(rank):
        # Each corner becomes two: one at the start and one at the end along `dim`.
        coordinates = np.stack([lows[:, dim], highs[:, dim]])
        values, numbers = np.unique(coordinates, return_inverse=True)
        key_count *= len(values)
        require(key_count < MOST_NUMBER, f"pieces at {key_count:,} positions")
        # `keys` has the corners of all boxes so far, one set of corners of every box
        # after another.
        corner_numbers = np.tile(numbers.reshape(2, -1), len(keys) // len(lows))
        keys = (keys * len(values) + corner_numbers).reshape(-1)
        signs = np.concatenate([signs, -signs])
    _, positions = np.unique(keys, return_inverse=True)
    sums = np.bincount(positions, signs)
    return not sums.any()


def _written_boxes(
    kind: TransferKind,
    form_number: int,
    rank: int,
    budget: _CornerBudget,
) -> _Boxes:
    """The boxes without gaps that the parts of one form write.

    A part that writes every second one of 6 elements writes three boxes of one element.
    """
    rows = kind.rows[kind.rows[:, FORM] == form_number]
    factors = kind.forms[form_number].factors
    # Along each dimension, how many elements a box without gaps has, and the loops that
    # repeat it.
    lengths = np.ones(rank, np.int64)
    loops = []
    for factor in sorted(factors, key=lambda factor: factor.target_step):
        # Along its dimension, the factors with shorter steps fill this many elements.
        if factor.target_step == lengths[factor.target_dim]:
            lengths[factor.target_dim] *= factor.size
        else:
            loops.append(factor)
    box_count = max(1, len(rows)) * math.prod(factor.size for factor in loops)
    budget.take(box_count << rank)

    lows = rows[:, FIRST_POSITION + kind.rank :]
    buffers = rows[:, BUFFER]
    for factor in loops:
        offsets = np.zeros((factor.size, rank), np.int64)
        offsets[:, factor.target_dim] = np.arange(factor.size) * factor.target_step
        lows = (lows[:, None] + offsets).reshape(-1, rank)
        buffers = np.repeat(buffers, factor.size)
    return _Boxes(lows=lows, highs=lows + lengths, buffers=buffers)
