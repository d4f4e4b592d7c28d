"""Sends and receives a revision. The receiver writes into spare memory, which then
becomes the new arrays.

A *revision* is one version of all weights. A *buffer* is one box of a leaf in a
receiving process. A *round* is the parts of arrays that are sent together.
"""

import collections
import contextlib
import functools as ft
import itertools as it
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ..._convert import constant, hull, swapped, target_view
from ..._ground.boxes import array_of, boxes_here, volume
from ..._ground.copying import buffers
from ..._ground.errors import PlanMismatchError, SyncError
from ..._plan import ShardPlan, encode_dtype
from ..pieces.assembly import leaves_of_plan
from ..pieces.host import LocalShards, as_bytes
from .kinds import SentPiece, Transfer
from .transfer import TransferPlan
from .wire import ShardBytes, pack, range_in_buffer, range_in_shard, unpack


@runtime_checkable
class Channel(Protocol):
    """A connection that carries bytes from one sending process to one receiving
    process, in rounds.

    `Sender` and `Receiver` use sockets. A channel over another transport, such as RDMA,
    implements these three methods.

    Both processes have the same plan, so a channel carries bytes only. A piece is a row
    of `uint8`, and a round is a list of pieces that are sent together. The pieces of a
    round arrive in the plan's order, and have at most the plan's `limit_bytes` in
    total. A channel delivers each piece once and unchanged, or raises
    [`shardfx.errors.SyncError`][]. It waits for a dead peer no longer than its
    time-out.
    """

    __module__ = "shardfx.sync"

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the pieces of round number `round`. After the call their memory may be
        overwritten.
        """
        ...

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Receives the pieces of round number `round` into `memories`, one for each
        piece. Raises `SyncError` if a piece is damaged.
        """
        ...

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer. The sender passes the revision that it sent, and the
        receiver's call returns it.
        """
        ...


# The memory of leaves is allocated in blocks of this size: the kernel allocates large
# blocks in large pages, which takes less time.
_GROUP_BYTES = 64 << 20


def send(
    plan: TransferPlan,
    arrays: Mapping[str, jax.Array],
    channel: Channel,
    revision: int,
    *,
    sender: int,
    receiver: int,
) -> None:
    """Sends all parts of arrays that the plan takes from one sending process to one
    receiving process.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `arrays`: the sender's arrays by path.
    - `channel`: the channel to the receiver.
    - `revision`: the number of this version of the arrays.
    - `sender`, `receiver`: the numbers of the two processes, each in its own job.
    """
    shards = LocalShards(arrays)
    for number, steps in enumerate(_outgoing(plan, shards, sender, receiver)):
        slots, pieces = _slots(steps), []
        for one in steps:
            if isinstance(one, ShardBytes):
                pieces.append(
                    as_bytes(shards.typed(str(one.array), one.shard))[
                        one.start : one.stop
                    ]
                )
            else:
                pieces.append(next(slots))
                pack(one.places[0], pieces[-1], shards.read)
        channel.put(number, pieces)
    channel.commit(revision)


def receive(
    plan: TransferPlan,
    dst: ShardPlan,
    channels: Mapping[int, Channel],
    *,
    receiver: int,
) -> tuple[dict[str, jax.Array], int]:
    """Receives one revision of all arrays into spare memory, from all senders at the
    same time.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `dst`: the receiving job's plan (a sharding for each array), on its devices.
    - `channels`: the channel from each sending process, by the number of the process.
    - `receiver`: the number of this process.

    **Returns:**

    The new arrays by path, and their revision.

    **Raises:**

    `SyncError` if received bytes are damaged or missing, or if senders sent different
    revisions.
    """
    rounds = {sender: _incoming(plan, sender, receiver) for sender in (-1, *channels)}
    spare = _SpareMemory(
        plan,
        dst,
        receiver,
        it.chain.from_iterable(it.chain.from_iterable(rounds.values())),
    )
    for steps in rounds.pop(-1):
        for step in steps:
            assert isinstance(step, SentPiece)
            with np.errstate(over="ignore", invalid="ignore"):
                for one in step.places:
                    target_view(spare.memory(step.leaf, one.buffer), one.piece)[...] = (
                        constant(one.piece)
                    )
            spare.wrote(step.leaf)
    has_failed = threading.Event()

    def pull(sender: int) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(has_failed.set)
            for number, steps in enumerate(rounds[sender]):
                if has_failed.is_set():
                    raise SyncError("another sender failed; pull again.")
                _get(channels[sender], number, steps, spare)
            revision = channels[sender].commit()
            stack.pop_all()
            return revision

    with ThreadPoolExecutor(max(1, len(channels))) as pool:
        revisions = {*pool.map(pull, channels)}
    if len(revisions) != 1:
        raise SyncError(
            f"the senders sent the revisions {sorted(revisions)}; publish one revision"
            " on all of them."
        )
    return spare.arrays(), revisions.pop()


def _get(
    channel: Channel,
    number: int,
    steps: Sequence[ShardBytes | SentPiece],
    spare: "_SpareMemory",
) -> None:
    slots = _slots(steps)
    memories = [
        spare.bytes_of(one) if isinstance(one, ShardBytes) else next(slots)
        for one in steps
    ]
    channel.get(number, memories)
    for one, memory in zip(steps, memories, strict=True):
        if isinstance(one, SentPiece):
            unpack(one, memory, ft.partial(spare.memory, one.leaf))
        spare.wrote(_leaf(one))


def _slots(steps: Sequence[ShardBytes | SentPiece]) -> Iterator[np.ndarray]:
    """Yields new memory for the bytes of each `SentPiece` in `steps`. A `ShardBytes`
    needs none: its bytes stay in the shard or in the buffer.
    """
    sizes = [one.places[0].bytes for one in steps if isinstance(one, SentPiece)]
    return iter(buffers([((size,), np.dtype(np.uint8)) for size in sizes]))


def _leaf(one: ShardBytes | SentPiece) -> int:
    return one.leaf if isinstance(one, SentPiece) else int(one.array)


# The parts of arrays that one process sends another, as a list for each round.
Rounds = list[list[ShardBytes | SentPiece]]


def _outgoing(
    plan: TransferPlan, shards: LocalShards, sender: int, receiver: int
) -> Rounds:
    """The parts of arrays that the process number `sender` sends to the process number
    `receiver`, as a list for each round. A part that is contiguous in a shard is a
    `ShardBytes`, and is sent without a copy. The result is cached until a sharding
    changes.
    """
    key = "out", sender, receiver
    shardings, rounds = cast(
        "tuple[dict[str, object], Rounds]", plan.known.get(key, ({}, []))
    )
    if not shardings or any(
        shards.leaf(path).sharding != known for path, known in shardings.items()
    ):
        found = plan.rounds(sender, receiver)
        paths = {
            one.places[0].form.value.path or "" for steps in found for one in steps
        }
        shardings = {path: shards.leaf(path).sharding for path in paths}
        rounds = [
            [_in_shard(shards, one.places[0]) or one for one in steps]
            for steps in found
        ]
        plan.known[key] = shardings, rounds
    return rounds


def _in_shard(shards: LocalShards, one: Transfer) -> ShardBytes | None:
    """The contiguous range of a shard's bytes that is sent for `one`, a part of an
    array. `None` if no shard contains the part, or if its elements must be copied or
    cast.
    """
    path = one.form.value.path or ""
    number = shards.containing(path, hull(swapped(one.piece)))
    found = None if number is None else range_in_shard(one, shards.boxes(path)[number])
    return None if number is None or found is None else ShardBytes(path, number, *found)


def _incoming(plan: TransferPlan, sender: int, receiver: int) -> Rounds:
    key = "in", sender, receiver
    if key not in plan.known:
        plan.known[key] = [
            [_in_buffer(plan, one) or one for one in steps]
            for steps in plan.rounds(sender, receiver)
        ]
    return cast("Rounds", plan.known[key])


def _in_buffer(plan: TransferPlan, step: SentPiece) -> ShardBytes | None:
    leaf, (one, *more) = plan.leaves[step.leaf], step.places
    sizes = [
        stop - start for start, stop in plan.kinds[leaf.kind].buffers[one.buffer].box
    ]
    found = (
        range_in_buffer(one, sizes, leaf.dtype)
        if not more and one.process >= 0
        else None
    )
    return None if found is None else ShardBytes(step.leaf, one.buffer, *found)


class _SpareMemory:
    """The memory of a new revision of the arrays in the receiving process number
    `receiver`.

    `steps` are all parts of arrays that the process receives. When the last part of a
    leaf has arrived, its memory becomes a JAX array with the leaf's sharding in `dst`.
    """

    def __init__(
        self,
        plan: TransferPlan,
        dst: ShardPlan,
        receiver: int,
        steps: Iterable[ShardBytes | SentPiece],
    ):
        self._plan, self._lock = plan, threading.Lock()
        self._blocks = cast(
            "_Blocks", plan.known.setdefault(("memory", receiver), _Blocks())
        )
        self._planned = {
            leaf.path: (leaf.dtype, leaf.sharding) for leaf in leaves_of_plan(dst)
        }
        self._left = collections.Counter(map(_leaf, steps))
        self._memory: dict[int, dict[int, np.ndarray]] = {}
        self._bytes: dict[tuple[int, int], np.ndarray] = {}
        self._made: dict[int, jax.Array] = {}
        # For each leaf the boxes that this process fills, by the numbers of their
        # buffers.
        self._own = [
            {
                at: one.box
                for at, one in enumerate(plan.kinds[leaf.kind].buffers)
                if one.process == receiver
            }
            for leaf in plan.leaves
        ]
        sizes = [
            sum(map(volume, own.values())) * leaf.dtype.itemsize
            for own, leaf in zip(self._own, plan.leaves, strict=True)
        ]
        self._groups = [
            start // _GROUP_BYTES for start in it.accumulate(sizes, initial=0)
        ]
        for leaf in range(len(plan.leaves)):
            if not self._left[leaf]:
                self._make(leaf)

    def arrays(self) -> dict[str, jax.Array]:
        """All received arrays by path. Every part of every leaf must have been written."""
        self._blocks.end_revision()
        return {
            leaf.path: self._made[number]
            for number, leaf in enumerate(self._plan.leaves)
        }

    def memory(self, leaf: int, buffer: int) -> np.ndarray:
        """The memory of the buffer number `buffer` of the leaf number `leaf`. It is
        allocated at the first call.
        """
        with self._lock:
            if leaf not in self._memory:
                self._allocate(leaf)
            return self._memory[leaf][buffer]

    def bytes_of(self, span: ShardBytes) -> np.ndarray:
        """A writable view of the bytes in `span`, a contiguous range of a buffer."""
        leaf, buffer, start, stop = span
        if (own := self._bytes.get((leaf, buffer))) is None:  # pyright: ignore[reportArgumentType]
            own = self._bytes[int(leaf), buffer] = as_bytes(
                self.memory(int(leaf), buffer)
            )
        return own[start:stop]

    def wrote(self, leaf: int) -> None:
        """Counts one written part of a leaf. After the last part, the leaf's memory
        becomes a JAX array.
        """
        with self._lock:
            self._left[leaf] -= 1
            is_whole = not self._left[leaf]
        if is_whole:
            self._make(leaf)

    def _allocate(self, one: int) -> None:
        """Allocates one block of memory for the leaf number `one`, and for all leaves
        whose memory would start in the same 64 MiB if all leaves lay one after another.
        """
        leaves = enumerate(self._plan.leaves)
        wanted = [
            (number, at, (tuple(stop - start for start, stop in box), leaf.dtype))
            for number, leaf in leaves
            if self._groups[number] == self._groups[one]
            for at, box in self._own[number].items()
        ]
        views = buffers([shape for _, _, shape in wanted], self._blocks.take)
        for (number, at, _), made in zip(wanted, views, strict=True):
            self._memory.setdefault(number, {})[at] = made

    def _make(self, number: int) -> None:
        leaf, own = self._plan.leaves[number], self._own[number]
        with self._lock:
            if number not in self._memory:
                self._allocate(number)
            memory = self._memory.pop(number)
            for buffer in memory:
                self._bytes.pop((number, buffer), None)
        held, (dtype, sharding) = [own[at] for at in memory], self._planned[leaf.path]
        assert sharding is not None
        if {*boxes_here(sharding, leaf.shape).values()} != {*held}:
            raise PlanMismatchError(
                f"leaf `{leaf.path}` lies in `dst` otherwise than in the transfer's"
                " plan."
            )
        made = array_of(leaf.shape, leaf.dtype, sharding, held, list(memory.values()))
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            made = jax.random.wrap_key_data(
                made, impl=encode_dtype(dtype)[len("key<") : -1]
            )
        self._made[number] = made


class _Blocks:
    """Large memory blocks that are reused for later revisions, since the kernel
    allocates memory slowly.
    """

    def __init__(self):
        self._taken = 0
        # All arrays in a block have one base, a view through the buffer protocol. If it
        # is deleted, no array is left.
        self._blocks: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> np.ndarray:
        """A memory block of `nbytes` bytes that no array uses."""
        free = (
            at
            for at, (block, lent) in enumerate(self._blocks)
            if len(block) == nbytes and lent() is None
        )
        block = (
            self._blocks.pop(at)[0]
            if (at := next(free, None)) is not None
            else np.empty(nbytes, np.uint8)
        )
        lent = np.frombuffer(block.data, np.uint8)
        self._blocks.append((block, weakref.ref(lent)))
        self._taken += 1
        return lent

    def end_revision(self) -> None:
        """Drops memory blocks that no array uses. As many as this revision took are
        kept for the next one.
        """
        kept = []
        for block, lent in self._blocks:
            if lent() is not None or self._taken > 0:
                self._taken -= lent() is None
                kept.append((block, lent))
        self._blocks, self._taken = kept, 0
