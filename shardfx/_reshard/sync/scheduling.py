"""The order in which one process sends its parts of arrays to another one. Both
processes compute it from the plan.

What is sent at a time is a row of bytes, in one of two forms. A *range* is a contiguous
range of a buffer's bytes: the receiver needs no copy. A *part* is a part of an array
whose elements the receiver still has to place, cast or multiply, or needs in several
places.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import NOWHERE, hull, offset_of, strides_of, within
from ..._ground.boxes import Box, box_shape, box_start, volume, whole_box
from ..._ground.errors import SyncError
from ..._ground.spec import bits
from .kinds import Buffer, Transfer, TransferKind
from .transfer import TransferPlan


# A round is sealed, sent and checked as one frame. Its bytes are still in the
# processor's third-level cache when the next of these steps reads them. Rounds of 4 MiB
# take 8 (plain) and 15 % (strided) more processor time on a busy machine with 2 cores;
# of 16 MiB, as much for plain pieces, and more at the sender for strided ones.
ROUND_BYTES = 8 << 20
# The parts of arrays from which the ranges of a schedule are made. Each takes about 50
# us and 1 kB: a short text of a plan may ask for any number of them.
_MOST_PARTS = 1 << 18


class SentRange(NamedTuple):
    """The bytes `start` to `stop` of the buffer number `buffer`, in the buffer's own
    order. `transfers` fill them.
    """

    buffer: int
    start: int
    stop: int
    transfers: tuple[Transfer, ...]

    @property
    def bytes(self) -> int:
        """The number of bytes of the range."""
        return self.stop - self.start


class SentPart(NamedTuple):
    """A part of an array that is sent once. `transfers_of_buffers` has a transfer for
    each buffer that needs it.
    """

    transfers_of_buffers: tuple[Transfer, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the part, with its scales, as they are sent."""
        return self.transfers_of_buffers[0].bytes


Row = SentRange | SentPart


class ScheduledRow(NamedTuple):
    """A row of bytes of a leaf. `number` is its position among the rows of its kind."""

    leaf: int
    number: int


class Schedule(NamedTuple):
    """The rows of bytes that one process sends another, for each kind of leaves, with
    the sources of the kind's first leaf, and the rounds in which they are sent.
    """

    rows_of_kind: tuple[tuple[Row, ...], ...]
    rounds: tuple[tuple[ScheduledRow, ...], ...]


def schedule(plan: TransferPlan, sender: int, receiver: int) -> Schedule:
    """The schedule for two processes. The `sender` -1 stands for constants, which are
    not sent. It is computed once per plan.
    """
    key = ("schedule", sender, receiver)
    if key not in plan.known:
        plan.known[key] = _schedule(plan, sender, receiver)
    planned = plan.known[key]
    assert isinstance(planned, Schedule)
    return planned


def _schedule(plan: TransferPlan, sender: int, receiver: int) -> Schedule:
    """`schedule` without its cache. A round is filled with rows, leaf by leaf, up to
    the limit. A larger row has a round of its own.
    """
    dtypes = {leaf.kind: leaf.dtype for leaf in plan.leaves}
    limit = min(plan.memory_limit_bytes, ROUND_BYTES)
    budget = _PartBudget(_MOST_PARTS)
    rows_of_kind = [
        _rows_of(
            kind=kind,
            dtype=dtypes[number],
            sender=sender,
            receiver=receiver,
            limit=limit,
            budget=budget,
        )
        for number, kind in enumerate(plan.kinds)
    ]
    sizes_of_kind = [[row.bytes for row in rows] for rows in rows_of_kind]

    rounds: list[list[ScheduledRow]] = []
    remaining_bytes = 0
    for leaf_number, leaf in enumerate(plan.leaves):
        for number, size in enumerate(sizes_of_kind[leaf.kind]):
            if not rounds or size > remaining_bytes:
                rounds.append([])
                remaining_bytes = limit
            rounds[-1].append(ScheduledRow(leaf=leaf_number, number=number))
            remaining_bytes -= size
    return Schedule(rows_of_kind=tuple(rows_of_kind), rounds=tuple(map(tuple, rounds)))


def _rows_of(
    kind: TransferKind,
    dtype: np.dtype,
    sender: int,
    receiver: int,
    limit: int,
    budget: "_PartBudget",
) -> tuple[Row, ...]:
    """The rows of bytes that `sender` sends to `receiver` for a leaf of `kind`, of
    `dtype`. Transfers that together fill a range of a buffer become ranges of at most
    `limit` bytes, and every other transfer a part. `budget` limits the parts of
    transfers that the ranges are made of.
    """
    rows: list[Row] = []
    # Transfers that may fill a range together, by the range's box in its buffer.
    groups: dict[tuple[int, Box], list[Transfer]] = {}
    position_of_group: dict[tuple[int, Box], int] = {}
    for numbers in kind.sent(sender, receiver):
        transfers_of_buffers = tuple(map(kind.transfer, numbers))
        transfer = transfers_of_buffers[0]
        has_one_buffer = len(transfers_of_buffers) == 1
        if not has_one_buffer or not _is_written_unchanged(transfer, dtype):
            rows.append(SentPart(transfers_of_buffers))
            continue
        key = (transfer.buffer, _outer_box(transfer))
        if key not in groups:
            # This row stands for those of the whole group.
            position_of_group[key] = len(rows)
            rows.append(SentPart(transfers_of_buffers))
        groups.setdefault(key, []).append(transfer)

    # A range stands where its first transfer stood, and the rows of a group that fills
    # no range stand there one after another.
    replaced: dict[int, list[Row]] = {}
    for key, transfers in groups.items():
        buffer_number, outer_box = key
        replaced[position_of_group[key]] = _ranges_or_parts(
            transfers=transfers,
            buffer_number=buffer_number,
            buffer=kind.buffers[buffer_number],
            outer_box=outer_box,
            itemsize=dtype.itemsize,
            limit=limit,
            budget=budget,
        )
    final_rows: list[Row] = []
    for position, row in enumerate(rows):
        final_rows += replaced.get(position, [row])
    return tuple(final_rows)


def _is_written_unchanged(transfer: Transfer, dtype: np.dtype) -> bool:
    """Whether the receiver writes the bytes of a transfer as they are, each once.
    `dtype` is that of the buffer.
    """
    form = transfer.form
    if (
        transfer.process < 0
        or form.scales_dtype is not None
        or bits(form.sent_dtype) < 8
    ):
        return False
    if form.sender_casts < len(form.value.casts) or form.sent_dtype != dtype:
        return False
    return all(factor.source_dim != NOWHERE for factor in form.factors)


def _outer_box(transfer: Transfer) -> Box:
    """The intervals of a transfer in its buffer along the outer dimensions, up to the
    first along which it has several elements. In the buffer's memory the elements of
    this box, with the whole inner dimensions, are contiguous.
    """
    box = hull(transfer.piece)
    for dim, size in enumerate(box_shape(box)):
        if size > 1:
            return box[: dim + 1]
    return box


def _ranges_or_parts(
    transfers: Sequence[Transfer],
    buffer_number: int,
    buffer: Buffer,
    outer_box: Box,
    itemsize: int,
    limit: int,
    budget: "_PartBudget",
) -> list[Row]:
    """The rows of `transfers` into one buffer, which share `outer_box`. If they fill
    this box, with the whole inner dimensions, they are ranges: one for each transfer
    that is contiguous, or else ranges of at most `limit` bytes that several transfers
    fill together. Otherwise each transfer is a part, also where `limit` is below the
    bytes of one position along the last dimension of `outer_box`. `budget` limits the
    parts of transfers that the ranges are made of.
    """
    sizes = box_shape(buffer.box)
    # The elements of the box, with the whole inner dimensions.
    count = volume(outer_box) * math.prod(sizes[len(outer_box) :])
    # The plan writes each element once. So these fill the range if they have as many
    # elements.
    if sum(transfer.piece.elements for transfer in transfers) < count:
        return [SentPart((transfer,)) for transfer in transfers]
    strides = strides_of(sizes, itemsize)
    rows = _rows_in_order(transfers, buffer_number, strides, itemsize)
    if rows is not None:
        return rows

    # The sender copies the elements together, in memory of `limit` bytes at most.
    inner_box = whole_box(sizes[len(outer_box) :])
    (first, last) = outer_box[-1]
    bytes_of_position = count // (last - first) * itemsize
    positions_per_range = limit // bytes_of_position
    if not positions_per_range:
        return [SentPart((transfer,)) for transfer in transfers]
    transfers_by_range = _by_range(transfers, outer_box, positions_per_range, budget)
    ranges: list[Row] = []
    lows = range(first, last, positions_per_range)
    for low, near_transfers in zip(lows, transfers_by_range, strict=True):
        high = min(low + positions_per_range, last)
        box = (*outer_box[:-1], (low, high), *inner_box)
        start = offset_of(box_start(box), strides)
        row = SentRange(
            buffer=buffer_number,
            start=start,
            stop=start + (high - low) * bytes_of_position,
            transfers=tuple(_within(near_transfers, box)),
        )
        ranges.append(row)
    return ranges


class _PartBudget:
    """The number of parts of arrays that may still be made for the ranges of a
    schedule.
    """

    def __init__(self, parts: int):
        self._parts = parts

    def take(self, parts: int) -> None:
        """Raises `SyncError` if `parts` more are too many."""
        self._parts -= parts
        if self._parts < 0:
            raise SyncError(
                f"the arrays would be sent in more than {_MOST_PARTS:,} parts of ranges"
                " of bytes; plan the transfer with a larger `memory_limit_bytes`, such"
                " as 16 << 20."
            )


def _by_range(
    transfers: Sequence[Transfer],
    outer_box: Box,
    positions_per_range: int,
    budget: _PartBudget,
) -> list[list[Transfer]]:
    """The transfers that have elements in each range. The ranges have
    `positions_per_range` positions each along the last dimension of `outer_box`; the
    last one may have fewer.
    """
    dim = len(outer_box) - 1
    first, last = outer_box[dim]
    ranges_of_transfer = []
    for transfer in transfers:
        low, high = hull(transfer.piece)[dim]
        first_range = (low - first) // positions_per_range
        stop_range = -(-(high - first) // positions_per_range)
        ranges = range(first_range, stop_range)
        budget.take(len(ranges))
        ranges_of_transfer.append(ranges)

    range_count = -(-(last - first) // positions_per_range)
    by_range: list[list[Transfer]] = [[] for _ in range(range_count)]
    for transfer, ranges in zip(transfers, ranges_of_transfer, strict=True):
        for number in ranges:
            by_range[number].append(transfer)
    return by_range


def _within(transfers: Iterable[Transfer], box: Box) -> Iterator[Transfer]:
    """The parts of transfers inside a box of their buffer."""
    for transfer in transfers:
        for piece in within(transfer.piece, box):
            yield transfer._replace(
                form=transfer.form._replace(factors=piece.factors),
                source=piece.source,
                target=piece.target,
            )


def _rows_in_order(
    transfers: Iterable[Transfer],
    buffer_number: int,
    strides: Sequence[int],
    itemsize: int,
) -> list[Row] | None:
    """A range for each transfer, if each is contiguous in the buffer number
    `buffer_number`, whose strides in bytes are `strides`; else `None`. The sender may
    have such ranges without a copy.
    """
    rows: list[Row] = []
    for transfer in transfers:
        contiguous_strides = strides_of(transfer.shape, itemsize)
        factors = transfer.form.factors
        strides_in_buffer = tuple(
            strides[factor.target_dim] * factor.target_step for factor in factors
        )
        if strides_in_buffer != contiguous_strides:
            return None
        start = offset_of(transfer.target, strides)
        stop = start + transfer.bytes
        row = SentRange(
            buffer=buffer_number,
            start=start,
            stop=stop,
            transfers=(transfer,),
        )
        rows.append(row)
    return rows
