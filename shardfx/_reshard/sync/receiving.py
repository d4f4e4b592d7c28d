"""Receives a revision (one version of all weights) into spare memory, which then
becomes the new arrays.
"""

import contextlib
import itertools as it
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..._convert import (
    NOWHERE,
    Piece,
    Read,
    Value,
    constant,
    fill,
    hull,
    offset_of,
    once,
    source_view,
    strides_of,
    swapped,
    target_view,
    write,
)
from ..._ground.boxes import box_shape, box_start, whole_box
from ..._ground.copying import block_dim, buffers, copy_along
from ..._ground.errors import SyncError
from ..._ground.spec import bits
from ..._plan import ShardPlan
from .channel import Channel
from .contents import received_sums, require_equal, sum_rounds
from .kinds import Transfer, TransferKind
from .scheduling import Row, ScheduledRow, SentPart, SentRange, schedule
from .spare import SpareMemory
from .transfer import TransferPlan


_UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}


class BufferBytes(NamedTuple):
    """A contiguous range of a buffer's bytes, which is received without a copy."""

    buffer: int
    start: int
    stop: int


class BufferCopy(NamedTuple):
    """A strided copy from a received row of bytes into a buffer, with casts.

    **Arguments:**

    - `buffer`: the number of the buffer.
    - `shape`: the shape of the two views.
    - `source_dtype`, `source_strides`: the view of the row, in bytes. A dimension along
      which elements are repeated has stride 0.
    - `target_dtype`, `target_start`, `target_strides`: the view of the buffer.
    - `casts`: the operations on the elements.
    - `block_dim`: the dimension along which the elements are copied in blocks; `None`
      for a copy without blocks.
    """

    buffer: int
    shape: tuple[int, ...]
    source_dtype: np.dtype
    source_strides: tuple[int, ...]
    target_dtype: np.dtype
    target_start: int
    target_strides: tuple[int, ...]
    casts: tuple[Any, ...]
    block_dim: int | None


class Placed(NamedTuple):
    """A row of `bytes` bytes, whose elements are copied into buffers. `decoded` is the
    row's part if its elements have 4 bits or are multiplied by scales; it has no
    `copies` then.
    """

    bytes: int
    copies: tuple[BufferCopy, ...]
    decoded: SentPart | None = None


IncomingRow = BufferBytes | Placed


def receive(
    plan: TransferPlan,
    dst: ShardPlan,
    channels: Mapping[int, Channel],
    *,
    receiver: int,
    check_content: bool = False,
) -> tuple[Any, int]:
    """Receives one revision of all arrays into spare memory, from all senders at the
    same time.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `dst`: the receiving job's plan (a sharding for each array), on its devices.
    - `channels`: the channel from each sending process, by the number of the process.
    - `receiver`: the number of this process.
    - `check_content`: whether to compare a checksum of each leaf's content with the
      senders', who must send it.

    **Returns:**

    The new arrays, as the tree that `dst` was made of, and their revision. Leaves of
    the tree that are no arrays are `None`.

    **Raises:**

    `SyncError` if received bytes are damaged or missing, if senders sent different
    revisions, or if a checksum of content differs; `PlanMismatchError` if `dst` is not
    the plan that the transfer was planned for.
    """
    spare = SpareMemory(plan, dst, receiver)
    lines = {
        sender: _Incoming(
            plan=plan, sender=sender, receiver=receiver, spare=spare, channel=channel
        )
        for sender, channel in channels.items()
    }
    spare.begin([line.rows_by_leaf for line in lines.values()])
    _write_constants(plan, receiver, spare)

    sums = np.zeros((len(plan.leaves), 2), np.uint64)
    has_failed = threading.Event()

    def pull(sender: int) -> tuple[int, np.ndarray]:
        """The revision from one sender, and the sums of its content. After an error the
        threads of the other senders stop too.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(has_failed.set)
            result = lines[sender].run(has_failed, check_content)
            stack.pop_all()
            return result

    if len(lines) == 1:
        results = [pull(sender) for sender in lines]
    else:
        with ThreadPoolExecutor(max(1, len(lines))) as pool:
            futures = [pool.submit(pull, sender) for sender in lines]
        results = _results_of(futures)
    revisions = {revision for revision, _ in results}
    if len(revisions) != 1:
        raise SyncError(
            f"the senders sent the revisions {sorted(revisions)}; publish one revision"
            " on all of them."
        )
    arrays = spare.arrays()
    if check_content:
        for _, sent in results:
            sums += sent
        require_equal(plan.leaves, sums, received_sums(plan.leaves, arrays))
    return spare.tree(arrays), revisions.pop()


def prepare(plan: TransferPlan, sender: int, receiver: int) -> None:
    """Computes ahead what all revisions have in common."""
    _rows_of_kinds(plan, sender, receiver)


class _StoppedError(SyncError):
    """A sender's rounds were not received to the end because another sender failed."""


def _results_of(
    futures: Sequence[Future[tuple[int, np.ndarray]]],
) -> list[tuple[int, np.ndarray]]:
    """The results of finished futures, one for each sender. If senders failed, raises
    the error of the first.
    """
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]


class _Incoming:
    """The rounds that come from one sending process."""

    def __init__(
        self,
        plan: TransferPlan,
        sender: int,
        receiver: int,
        spare: SpareMemory,
        channel: Channel,
    ):
        planned = schedule(plan, sender, receiver)
        self._plan = plan
        self._rounds = planned.rounds
        # For each kind of leaves, its rows of bytes and where these go.
        self._rows_of_kind = _rows_of_kinds(plan, sender, receiver)
        self._spare = spare
        self._channel = channel
        # The memory of rows that are copied into buffers once they have arrived.
        self._scratch = np.empty(0, np.uint8)
        # For each leaf the number of its rows.
        self.rows_by_leaf = [len(self._rows_of_kind[leaf.kind]) for leaf in plan.leaves]

    def run(
        self,
        has_failed: threading.Event,
        check_content: bool,
    ) -> tuple[int, np.ndarray]:
        """Receives all rounds, unless another sender fails and sets `has_failed`.
        Returns the revision and, with `check_content`, the sums of the sender's content.
        """
        for number, entries in enumerate(self._rounds):
            if has_failed.is_set():
                raise _StoppedError("another sender failed; pull again.")
            self._get(number, entries)
        sums = np.zeros((len(self._plan.leaves), 2), np.uint64)
        if check_content:
            for number, leaves in enumerate(sum_rounds(self._plan), len(self._rounds)):
                rows = sums[leaves.start : leaves.stop]
                self._channel.get(number, [rows.reshape(-1).view(np.uint8)])
        return self._channel.commit(), sums

    def _get(self, number: int, entries: Sequence[ScheduledRow]) -> None:
        """Receives round number `number`, whose rows are `entries`: ranges straight
        into their buffers, and other rows into scratch memory, from which they are
        placed.
        """
        leaves = self._plan.leaves
        rows = [
            self._rows_of_kind[leaves[entry.leaf].kind][entry.number]
            for entry in entries
        ]
        nbytes = sum(_aligned(row.bytes) for row in rows if isinstance(row, Placed))
        if len(self._scratch) < nbytes:
            (self._scratch,) = buffers([((nbytes,), np.dtype(np.uint8))])

        memories = []
        start = 0
        for entry, row in zip(entries, rows, strict=True):
            if isinstance(row, BufferBytes):
                memory = self._spare.bytes_of(entry.leaf, row.buffer)
                memories.append(memory[row.start : row.stop])
            else:
                memories.append(self._scratch[start : start + row.bytes])
                start += _aligned(row.bytes)
        self._channel.get(number, memories)

        for entry, row, memory in zip(entries, rows, memories, strict=True):
            if isinstance(row, Placed):
                self._place(entry.leaf, row, memory)
            self._spare.wrote(entry.leaf)

    def _place(self, leaf: int, row: Placed, memory: np.ndarray) -> None:
        """Writes the elements of a received row, whose bytes are in `memory`, into the
        buffers of the leaf number `leaf`.
        """
        if row.decoded is not None:
            _decode(
                row.decoded, memory, lambda buffer: self._spare.memory(leaf, buffer)
            )
        for copy in row.copies:
            source = np.ndarray(
                copy.shape, copy.source_dtype, memory, 0, copy.source_strides
            )
            target = np.ndarray(
                copy.shape,
                copy.target_dtype,
                self._spare.bytes_of(leaf, copy.buffer),
                copy.target_start,
                copy.target_strides,
            )
            if copy.casts:
                write(
                    target,
                    source,
                    Piece(
                        value=Value(None, casts=copy.casts),
                        source=(),
                        target=(),
                        factors=(),
                    ),
                )
            else:
                copy_along(target, source, copy.block_dim)


def _aligned(nbytes: int) -> int:
    """The bytes that a row takes in scratch memory, where rows start at cache lines."""
    return -(-nbytes // 64) * 64


def _write_constants(plan: TransferPlan, receiver: int, spare: SpareMemory) -> None:
    """Writes the constants of all leaves, which nobody sends, into a receiver's memory."""
    # The sender -1 stands for constants.
    planned = schedule(plan, -1, receiver)
    for entry in it.chain.from_iterable(planned.rounds):
        row = planned.rows_of_kind[plan.leaves[entry.leaf].kind][entry.number]
        assert isinstance(row, SentPart)
        with np.errstate(over="ignore", invalid="ignore"):
            for transfer in row.transfers_of_buffers:
                memory = spare.memory(entry.leaf, transfer.buffer)
                target_view(memory, transfer.piece)[...] = constant(transfer.piece)


def _rows_of_kinds(
    plan: TransferPlan,
    sender: int,
    receiver: int,
) -> list[tuple[IncomingRow, ...]]:
    """For each kind of leaves, the rows that `sender` sends to `receiver`, with where
    their bytes go. They are computed once per plan.
    """
    key = ("incoming", sender, receiver)
    if key not in plan.known:
        planned = schedule(plan, sender, receiver)
        dtypes = {leaf.kind: leaf.dtype for leaf in plan.leaves}
        plan.known[key] = [
            tuple(_incoming_row(row, kind, dtypes[number]) for row in rows)
            for number, (kind, rows) in enumerate(
                zip(plan.kinds, planned.rows_of_kind, strict=True)
            )
        ]
    rows: Any = plan.known[key]
    return rows


def _incoming_row(row: Row, kind: TransferKind, dtype: np.dtype) -> IncomingRow:
    """Where the bytes of `row`, a row of `kind`, go. `dtype` is that of the leaves."""
    if isinstance(row, SentRange):
        return BufferBytes(buffer=row.buffer, start=row.start, stop=row.stop)
    form = row.transfers_of_buffers[0].form
    if form.scales_dtype is not None or bits(form.sent_dtype) < 8:
        return Placed(bytes=row.bytes, copies=(), decoded=row)
    copies = [
        _buffer_copy(transfer, kind, dtype) for transfer in row.transfers_of_buffers
    ]
    return Placed(bytes=row.bytes, copies=tuple(copies))


def _buffer_copy(
    transfer: Transfer,
    kind: TransferKind,
    dtype: np.dtype,
) -> BufferCopy:
    """The copy from a received row into the buffer of `transfer`, one of those that the
    row serves. `dtype` is that of the buffer.
    """
    form = transfer.form
    box = kind.buffers[transfer.buffer].box
    strides = strides_of(box_shape(box), dtype.itemsize)
    # The row has only the factors that move in the source.
    row_strides = iter(strides_of(transfer.shape, form.sent_dtype.itemsize))
    source_strides: list[int] = []
    for factor in form.factors:
        is_in_row = factor.source_dim != NOWHERE
        source_strides.append(next(row_strides) if is_in_row else 0)
    target_strides = tuple(
        strides[factor.target_dim] * factor.target_step for factor in form.factors
    )
    casts = form.value.casts[form.sender_casts :]
    source_dtype = form.sent_dtype
    if not casts:
        # NumPy copies integers faster than elements of other libraries' dtypes.
        source_dtype = dtype = _UNSIGNED.get(dtype.itemsize, dtype)
    shape = tuple(factor.size for factor in form.factors)
    return BufferCopy(
        buffer=transfer.buffer,
        shape=shape,
        source_dtype=source_dtype,
        source_strides=tuple(source_strides),
        target_dtype=dtype,
        target_start=offset_of(transfer.target, strides),
        target_strides=target_strides,
        casts=casts,
        block_dim=block_dim(shape, target_strides, source_strides),
    )


def _decode(part: SentPart, memory: np.ndarray, buffer_of: Any) -> None:
    """Decodes the received bytes in `memory`, whose elements have 4 bits or are
    multiplied by scales, and writes them into every buffer that needs them. `buffer_of`
    returns the memory of a buffer, given its number.
    """
    first = part.transfers_of_buffers[0]
    form = first.form
    raw = memory[: first.element_bytes]
    if bits(form.sent_dtype) < 8:
        values = unpacked(raw, form.sent_dtype, first.shape)
    else:
        values = np.ndarray(first.shape, form.sent_dtype, raw)
    read = None
    if form.scales_dtype is not None:
        read = _reader(first, values, memory[first.element_bytes :])

    for transfer in part.transfers_of_buffers:
        buffer = buffer_of(transfer.buffer)
        if read is not None:
            fill(buffer, whole_box(buffer.shape), transfer.piece, read)
            continue
        # Elements that are repeated have come once.
        sizes: list[int] = []
        for factor in transfer.form.factors:
            sizes.append(1 if factor.source_dim == NOWHERE else factor.size)
        target = target_view(buffer, transfer.piece)
        value = transfer.form.value
        remaining = value._replace(casts=value.casts[form.sender_casts :])
        elements = np.broadcast_to(values.reshape(sizes), target.shape)
        write(target, elements, transfer.piece._replace(value=remaining))


def unpacked(raw: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """The 4-bit numbers that `packed` made bytes of."""
    flat = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)[: int(np.prod(shape))]
    return flat.view(dtype).reshape(shape)


def _reader(transfer: Transfer, values: np.ndarray, scale_bytes: np.ndarray) -> Read:
    """Returns a function that `fill` calls for elements of an array, with the array's
    path and a box. It returns the scales for the path of the scales, and `values`, the
    received elements of the transfer, for any other path.
    """
    piece = once(transfer.piece)
    scale = transfer.form.value.scale
    assert scale is not None and transfer.form.scales_dtype is not None
    box = hull(swapped(piece))
    whole = np.empty(box_shape(box), values.dtype)
    source_view(whole, piece, box_start(box))[...] = values
    sizes = box_shape(transfer.scale_box)
    scales = np.ndarray(sizes, transfer.form.scales_dtype, scale_bytes)
    return lambda path, _: scales if path == scale.path else whole
