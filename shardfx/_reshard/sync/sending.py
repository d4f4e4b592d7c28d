"""Sends a revision (one version of all weights): copies parts of shards into rows of
bytes, or sends bytes of shards as they lie.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._convert import (
    Piece,
    Read,
    Value,
    as_bits,
    fill,
    hull,
    is_only,
    offset_of,
    once,
    strides_of,
    swapped,
    write,
)
from ..._ground.boxes import box_shape, box_start
from ..._ground.copying import block_dim, buffers, copy as copy_elements, copy_along
from ..._ground.spec import bits
from .channel import Channel
from .contents import sent_sums, sum_rounds
from .kinds import SentLeaf, Transfer, TransferKind, with_paths
from .publishing import Published, publishable
from .scheduling import Row, Schedule, ScheduledRow, SentRange, schedule
from .transfer import TransferPlan


_UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}
_ALIGNMENT = 64
# Arrays whose shards lie otherwise need other copies. A trainer has one or two layouts.
_MOST_LAYOUTS = 1 << 14


class ShardBytes(NamedTuple):
    """A contiguous range of a shard's bytes, which is sent without a copy. `source` is
    the number of the array among the sources of its leaf.
    """

    source: int
    shard: int
    start: int
    stop: int


class ShardCopy(NamedTuple):
    """A strided copy from a shard into a row of bytes, with casts.

    **Arguments:**

    - `source`, `shard`: the number of the array among the sources of its leaf, and the
      number of its shard.
    - `shape`: the shape of the two views.
    - `source_dtype`, `source_start`, `source_strides`: the view of the shard, in bytes.
    - `target_dtype`, `target_start`, `target_strides`: the view of the row.
    - `casts`: the operations on the elements.
    - `block_dim`: the dimension along which the elements are copied in blocks; `None`
      for a copy without blocks.
    """

    source: int
    shard: int
    shape: tuple[int, ...]
    source_dtype: np.dtype
    source_start: int
    source_strides: tuple[int, ...]
    target_dtype: np.dtype
    target_start: int
    target_strides: tuple[int, ...]
    casts: tuple[Any, ...]
    block_dim: int | None


class Encoded(NamedTuple):
    """A part that is made element by element: its elements are multiplied by scales,
    have 4 bits, or lie in several shards. `start` and `strides` are those of the view
    of the row that the part fills; `strides` is `None` if it fills the whole row.
    """

    transfer: Transfer
    start: int
    strides: tuple[int, ...] | None


class Filled(NamedTuple):
    """A row of `bytes` bytes, and what is copied into it."""

    bytes: int
    copies: tuple[ShardCopy | Encoded, ...]


OutgoingRow = ShardBytes | Filled


def send(
    plan: TransferPlan,
    arrays: Any,
    channel: Channel,
    revision: int,
    *,
    sender: int,
    receiver: int,
    check_content: bool = False,
) -> None:
    """Sends all parts of arrays that the plan takes from one sending process to one
    receiving process.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `arrays`: the sender's arrays, as the tree that the sending job's plan was made
      of, or as a dict by path.
    - `channel`: the channel to the receiver.
    - `revision`: the number of this version of the arrays.
    - `sender`, `receiver`: the numbers of the two processes, each in its own job.
    - `check_content`: whether to send a checksum of each leaf's content, for a receiver
      that asks for it.

    **Raises:**

    `PlanMismatchError` if the arrays are not as planned, before anything is sent;
    `SyncError` if the receiver is gone.
    """
    send_published(
        plan,
        publishable(arrays, plan.sources, plan.known),
        channel,
        revision,
        sender=sender,
        receiver=receiver,
        check_content=check_content,
    )


def send_published(
    plan: TransferPlan,
    arrays: Published,
    channel: Channel,
    revision: int,
    *,
    sender: int,
    receiver: int,
    check_content: bool = False,
    before_round: Callable[[], None] = lambda: None,
) -> None:
    """`send` for arrays that were checked. `before_round` is called before each round.
    The arguments that both have are those of `send`.
    """
    outgoing = _Outgoing(plan=plan, arrays=arrays, sender=sender, receiver=receiver)
    for number, entries in enumerate(outgoing.rounds):
        before_round()
        channel.put(number, outgoing.pieces(entries))
    if check_content:
        for number, leaves in enumerate(sum_rounds(plan), len(outgoing.rounds)):
            before_round()
            sums = sent_sums(
                plan=plan,
                read=arrays.read,
                sender=sender,
                receiver=receiver,
                numbers=leaves,
            )
            channel.put(number, [sums.reshape(-1).view(np.uint8)])
    channel.commit(revision)


class _Outgoing:
    """The rounds that one process sends another, made from the shards in `arrays`."""

    def __init__(
        self,
        plan: TransferPlan,
        arrays: Published,
        sender: int,
        receiver: int,
    ):
        planned = schedule(plan, sender, receiver)
        self.rounds = planned.rounds
        self._plan = plan
        self._arrays = arrays
        self._rows_of_leaf = _rows_of_leaves(
            plan=plan,
            arrays=arrays,
            planned=planned,
            sender=sender,
            receiver=receiver,
        )
        # The memory of rows that are no range of a shard's bytes.
        self._scratch = np.empty(0, np.uint8)

    def pieces(self, entries: Sequence[ScheduledRow]) -> list[np.ndarray]:
        """The bytes of the rows `entries` of a round, one array for each row. The next
        call overwrites them.
        """
        rows = [self._rows_of_leaf[entry.leaf][entry.number] for entry in entries]
        nbytes = sum(_aligned(row.bytes) for row in rows if isinstance(row, Filled))
        if len(self._scratch) < nbytes:
            (self._scratch,) = buffers([((nbytes,), np.dtype(np.uint8))])

        pieces = []
        start = 0
        for entry, row in zip(entries, rows, strict=True):
            leaf = self._plan.leaves[entry.leaf]
            if isinstance(row, ShardBytes):
                shard = self._arrays.bytes_of(leaf.source_paths[row.source], row.shard)
                pieces.append(shard[row.start : row.stop])
            else:
                memory = self._scratch[start : start + row.bytes]
                self._fill(memory, leaf, row)
                pieces.append(memory)
                start += _aligned(row.bytes)
        return pieces

    def _fill(self, memory: np.ndarray, leaf: SentLeaf, row: Filled) -> None:
        """Copies the parts of a leaf's row into `memory`."""
        names = leaf.source_paths
        for copy in row.copies:
            if isinstance(copy, ShardCopy):
                shard = self._arrays.bytes_of(names[copy.source], copy.shard)
                _run_copy(copy, shard, memory)
            else:
                # A form has the paths of the sources of its kind's first leaf.
                first_names = self._plan.kinds[leaf.kind].source_paths
                paths = dict(zip(first_names, names, strict=True))
                value = with_paths(copy.transfer.form.value, paths)
                _encode(copy, value, memory, self._arrays.read)


def _aligned(nbytes: int) -> int:
    """The bytes that a row takes in scratch memory, where rows start at cache lines."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _run_copy(copy: ShardCopy, shard: np.ndarray, memory: np.ndarray) -> None:
    """Copies from the bytes of a shard into a row's `memory`, as `copy` says."""
    source = np.ndarray(
        copy.shape, copy.source_dtype, shard, copy.source_start, copy.source_strides
    )
    target = np.ndarray(
        copy.shape, copy.target_dtype, memory, copy.target_start, copy.target_strides
    )
    if copy.casts:
        write(target, source, _piece_with(copy.casts))
    else:
        copy_along(target, source, copy.block_dim)


def _piece_with(casts: tuple[Any, ...]) -> Piece:
    """A piece for `write`, which reads the casts of it alone."""
    return Piece(value=Value(None, casts=casts), source=(), target=(), factors=())


def _encode(part: Encoded, value: Value, memory: np.ndarray, read: Read) -> None:
    """Writes the elements of a part, and behind them its scales, into the row `memory`.
    An element that is needed several times is encoded once. `value` is that of the part
    with the leaf's own paths.
    """
    transfer = part.transfer
    form = transfer.form
    # The part without repetitions.
    piece = once(transfer.piece)
    # Scales that the receiver multiplies by, and casts that it makes, stay out.
    scale = value.scale if form.scales_dtype is None else None
    sent_value = value._replace(casts=value.casts[: form.sender_casts], scale=scale)
    factors = tuple(
        factor._replace(target_dim=dim, target_step=1)
        for dim, factor in enumerate(piece.factors)
    )
    box = tuple((0, factor.size) for factor in factors)
    elements = np.empty(transfer.shape, form.sent_dtype)
    compact = Piece(
        value=sent_value,
        source=piece.source,
        target=(0,) * len(factors),
        factors=factors,
    )
    fill(elements, box, compact, read)

    if part.strides is not None:
        target = np.ndarray(
            transfer.shape, form.sent_dtype, memory, part.start, part.strides
        )
        copy_elements(as_bits(target), as_bits(elements))
        return
    nbytes = transfer.element_bytes
    if bits(form.sent_dtype) < 8:
        memory[:nbytes] = packed(elements)
    else:
        memory[:nbytes] = elements.reshape(-1).view(np.uint8)
    if form.scales_dtype is not None and value.scale is not None:
        scales = read(value.scale.path, transfer.scale_box)
        memory[nbytes:] = np.ascontiguousarray(scales).reshape(-1).view(np.uint8)


def packed(elements: np.ndarray) -> np.ndarray:
    """4-bit numbers as bytes, two numbers to a byte, the first one in the low bits."""
    flat = np.zeros(-(-elements.size // 2) * 2, np.uint8)
    flat[: elements.size] = elements.reshape(-1).view(np.uint8) & 15
    return flat[::2] | flat[1::2] << 4


def _rows_of_leaves(
    plan: TransferPlan,
    arrays: Published,
    planned: Schedule,
    sender: int,
    receiver: int,
) -> list[tuple[OutgoingRow, ...]]:
    """For each leaf its rows of bytes in `planned`, as copies of shards. Leaves of one
    kind whose sources lie alike share them. The rows are computed again only if the
    shards lie otherwise than before.
    """
    key = ("rows", sender, receiver)
    rows_by_layout: Any = plan.known.setdefault(key, {})
    rows_of_leaves = []
    for leaf in plan.leaves:
        layouts = tuple(arrays.leaves[name].layout for name in leaf.source_paths)
        rows_key = (leaf.kind, layouts)
        # Another thread may clear the cache at any time.
        rows = rows_by_layout.get(rows_key)
        if rows is None:
            compiler = _Compiler(plan.kinds[leaf.kind], leaf, arrays)
            rows = tuple(map(compiler.row, planned.rows_of_kind[leaf.kind]))
            if len(rows_by_layout) >= _MOST_LAYOUTS:
                rows_by_layout.clear()
            rows_by_layout[rows_key] = rows
        rows_of_leaves.append(rows)
    return rows_of_leaves


class _Compiler:
    """Decides how the rows of a kind are made from the shards of a leaf's sources."""

    def __init__(self, kind: TransferKind, leaf: SentLeaf, arrays: Published):
        self._kind = kind
        # By the path of a source of the kind's first leaf: the path of the same source
        # of `leaf`, and its number.
        self._paths = dict(zip(kind.source_paths, leaf.source_paths, strict=True))
        self._numbers = {name: number for number, name in enumerate(kind.source_paths)}
        self._arrays = arrays

    def row(self, row: Row) -> OutgoingRow:
        """How `row` is made: of the bytes of one shard if these lie as they are sent,
        else by copies.
        """
        if isinstance(row, SentRange):
            buffer = self._kind.buffers[row.buffer]
            itemsize = row.transfers[0].form.sent_dtype.itemsize
            strides = strides_of(box_shape(buffer.box), itemsize)
            copies = []
            for transfer in row.transfers:
                # The row is a part of the buffer, and has its strides.
                start = offset_of(transfer.target, strides) - row.start
                row_strides = tuple(
                    strides[factor.target_dim] * factor.target_step
                    for factor in transfer.form.factors
                )
                copies.append(self._copy(transfer, start, row_strides))
            return self._without_copy(row.bytes, copies)
        transfer = row.transfers_of_buffers[0]
        if bits(transfer.form.sent_dtype) < 8:
            encoded = Encoded(
                transfer=transfer,
                start=0,
                strides=None,
            )
            return Filled(row.bytes, (encoded,))
        strides = strides_of(transfer.shape, transfer.form.sent_dtype.itemsize)
        return self._without_copy(row.bytes, [self._copy(transfer, 0, strides)])

    def _copy(
        self,
        transfer: Transfer,
        start: int,
        strides: tuple[int, ...],
    ) -> ShardCopy | Encoded:
        """The copy of a transfer into a view of its row of bytes. The view begins at the
        byte `start` of the row, and has these strides in bytes.
        """
        form = transfer.form
        piece = once(transfer.piece)
        path = form.value.path
        assert path is not None
        # The box of the source that contains the part's elements, and the number of a
        # shard that contains this box.
        box = hull(swapped(piece))
        shard = self._arrays.containing(self._paths[path], box)
        if form.scales_dtype is not None:
            return Encoded(
                transfer=transfer,
                start=start,
                strides=None,
            )
        if form.value.scale is not None or shard is None:
            return Encoded(
                transfer=transfer,
                start=start,
                strides=strides,
            )

        shard_box = self._arrays.leaves[self._paths[path]].boxes[shard]
        source_dtype = self._arrays.dtype_of(self._paths[path])
        shard_strides = strides_of(box_shape(shard_box), source_dtype.itemsize)
        position_in_shard = [
            position - low
            for position, low in zip(transfer.source, box_start(shard_box), strict=True)
        ]
        source_strides = tuple(
            shard_strides[factor.source_dim] * factor.source_step
            for factor in piece.factors
        )
        casts = form.value.casts[: form.sender_casts]
        target_dtype = form.sent_dtype
        if is_only(casts, source_dtype):
            # NumPy copies integers faster than elements of other libraries' dtypes.
            casts = ()
            source_dtype = _UNSIGNED.get(source_dtype.itemsize, source_dtype)
            target_dtype = source_dtype
        return ShardCopy(
            source=self._numbers[path],
            shard=shard,
            shape=transfer.shape,
            source_dtype=source_dtype,
            source_start=offset_of(position_in_shard, shard_strides),
            source_strides=source_strides,
            target_dtype=target_dtype,
            target_start=start,
            target_strides=strides,
            casts=casts,
            block_dim=block_dim(transfer.shape, strides, source_strides),
        )

    def _without_copy(
        self,
        nbytes: int,
        copies: Sequence[ShardCopy | Encoded],
    ) -> OutgoingRow:
        """A row of `nbytes` bytes that `copies` fill: as bytes of one shard, if it is a
        contiguous range of these, else `Filled`.
        """
        copy = copies[0]
        if len(copies) > 1 or isinstance(copy, Encoded) or copy.casts:
            return Filled(nbytes, tuple(copies))
        contiguous = strides_of(copy.shape, copy.source_dtype.itemsize)
        if copy.source_strides != contiguous or copy.target_strides != contiguous:
            return Filled(nbytes, tuple(copies))
        return ShardBytes(
            source=copy.source,
            shard=copy.shard,
            start=copy.source_start,
            stop=copy.source_start + nbytes,
        )
