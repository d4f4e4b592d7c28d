"""Both ends of a transfer and the channel between them: pieces are read from shards and written into spare memory."""

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
from .transfer import SentPiece, Transfer, TransferPlan
from .wire import ShardBytes, land, pack, received_at, sent_from


@runtime_checkable
class Channel(Protocol):
    """One direction from a sending to a receiving process; sockets are the reference, RDMA libraries fit.

    Both sides know the plan, so a channel carries bytes only. A piece is a row of `uint8`. The pieces of a round come
    in the plan's order, and their total is at most `limit_bytes` of the plan. A channel delivers each piece once and
    unharmed or raises [`shardfx.errors.SyncError`][]. It never waits longer than its time-out for a dead peer.
    """

    __module__ = "shardfx.sync"

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the pieces of a round. When it returns, their memory may be overwritten."""
        ...

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Fills memory with the pieces of a round. When it returns, all of them have been checked."""
        ...

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer: the sender gives its revision, and the receiver returns it."""
        ...


# Leaves whose memory is allocated in one block: the kernel gives large blocks in large pages, which takes less time.
_TOGETHER_BYTES = 64 << 20


def send(
    plan: TransferPlan, arrays: Mapping[str, jax.Array], channel: Channel, revision: int, *, sender: int, receiver: int
) -> None:
    """Sends one process's pieces of a revision to another process.

    **Arguments:**

    - `plan`: the transfer.
    - `arrays`: the sender's arrays by path.
    - `channel`: the channel to the receiver.
    - `revision`: the number of the arrays.
    - `sender`, `receiver`: the two processes.
    """
    shards = LocalShards(arrays)
    for number, steps in enumerate(_outgoing(plan, shards, sender, receiver)):
        slots, pieces = _slots(steps), []
        for one in steps:
            if isinstance(one, ShardBytes):
                pieces.append(as_bytes(shards.typed(str(one.array), one.shard))[one.start : one.stop])
            else:
                pieces.append(next(slots))
                pack(one.places[0], pieces[-1], shards.read)
        channel.put(number, pieces)
    channel.commit(revision)


def receive(
    plan: TransferPlan, dst: ShardPlan, channels: Mapping[int, Channel], *, receiver: int
) -> tuple[dict[str, jax.Array], int]:
    """Receives a revision into spare memory, from all senders at once.

    **Arguments:**

    - `plan`: the transfer.
    - `dst`: the receiver's plan, made for its devices.
    - `channels`: the channels from each sending process.
    - `receiver`: this process.

    **Returns:**

    The arrays by path, and their revision. Nothing is changed before all of them have arrived.

    **Raises:**

    `SyncError` if a piece is damaged or missing, or if senders sent different revisions.
    """
    rounds = {sender: _incoming(plan, sender, receiver) for sender in (-1, *channels)}
    spare = _Spare(plan, dst, receiver, it.chain.from_iterable(it.chain.from_iterable(rounds.values())))
    for steps in rounds.pop(-1):
        for step in steps:
            assert isinstance(step, SentPiece)
            with np.errstate(over="ignore", invalid="ignore"):
                for one in step.places:
                    target_view(spare.memory(step.leaf, one.buffer), one.piece)[...] = constant(one.piece)
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
        raise SyncError(f"the senders sent the revisions {sorted(revisions)}; publish one revision on all of them.")
    return spare.arrays(), revisions.pop()


def _get(channel: Channel, number: int, steps: Sequence[ShardBytes | SentPiece], spare: "_Spare") -> None:
    slots = _slots(steps)
    memories = [spare.bytes_of(one) if isinstance(one, ShardBytes) else next(slots) for one in steps]
    channel.get(number, memories)
    for one, memory in zip(steps, memories, strict=True):
        if isinstance(one, SentPiece):
            land(one, memory, ft.partial(spare.memory, one.leaf))
        spare.wrote(_leaf(one))


def _slots(steps: Sequence[ShardBytes | SentPiece]) -> Iterator[np.ndarray]:
    """Yields a new buffer for each piece of a round that is not one contiguous range of a shard."""
    sizes = [one.places[0].bytes for one in steps if isinstance(one, SentPiece)]
    return iter(buffers([((size,), np.dtype(np.uint8)) for size in sizes]))


def _leaf(one: ShardBytes | SentPiece) -> int:
    return one.leaf if isinstance(one, SentPiece) else int(one.array)


Rounds = list[list[ShardBytes | SentPiece]]


def _outgoing(plan: TransferPlan, shards: LocalShards, sender: int, receiver: int) -> Rounds:
    """The pieces of each round from one sender to one receiver. A contiguous piece is given as its range of a shard's
    bytes. The result is cached until a sharding changes.
    """
    key = "out", sender, receiver
    shardings, rounds = cast("tuple[dict[str, object], Rounds]", plan.known.get(key, ({}, [])))
    if not shardings or any(shards.leaf(path).sharding != known for path, known in shardings.items()):
        found = plan.rounds(sender, receiver)
        paths = {one.places[0].form.value.path or "" for steps in found for one in steps}
        shardings = {path: shards.leaf(path).sharding for path in paths}
        rounds = [[_held(shards, one.places[0]) or one for one in steps] for steps in found]
        plan.known[key] = shardings, rounds
    return rounds


def _held(shards: LocalShards, one: Transfer) -> ShardBytes | None:
    """The contiguous range of a shard's bytes that equals the piece as it is sent; `None` if there is no such range."""
    path = one.form.value.path or ""
    number = shards.containing(path, hull(swapped(one.piece)))
    found = None if number is None else sent_from(one, shards.boxes(path)[number])
    return None if number is None or found is None else ShardBytes(path, number, *found)


def _incoming(plan: TransferPlan, sender: int, receiver: int) -> Rounds:
    key = "in", sender, receiver
    if key not in plan.known:
        plan.known[key] = [[_span(plan, one) or one for one in steps] for steps in plan.rounds(sender, receiver)]
    return cast("Rounds", plan.known[key])


def _span(plan: TransferPlan, step: SentPiece) -> ShardBytes | None:
    leaf, (one, *more) = plan.leaves[step.leaf], step.places
    sizes = [stop - start for start, stop in plan.kinds[leaf.kind].buffers[one.buffer].box]
    found = received_at(one, sizes, leaf.dtype) if not more and one.process >= 0 else None
    return None if found is None else ShardBytes(step.leaf, one.buffer, *found)


class _Spare:
    """Memory for a new revision. A leaf becomes an array as soon as all of its pieces have arrived.

    **Arguments:**

    - `plan`: the transfer.
    - `dst`: the shardings of the arrays.
    - `receiver`: this process.
    - `steps`: all that will be written.
    """

    def __init__(self, plan: TransferPlan, dst: ShardPlan, receiver: int, steps: Iterable[ShardBytes | SentPiece]):
        self._plan, self._lock = plan, threading.Lock()
        self._blocks = cast("_Blocks", plan.known.setdefault(("memory", receiver), _Blocks()))
        self._planned = {leaf.path: (leaf.dtype, leaf.sharding) for leaf in leaves_of_plan(dst)}
        self._left = collections.Counter(map(_leaf, steps))
        self._memory: dict[int, dict[int, np.ndarray]] = {}
        self._bytes: dict[tuple[int, int], np.ndarray] = {}
        self._made: dict[int, jax.Array] = {}
        # For each leaf the boxes that this process fills, by the numbers of their buffers.
        self._own = [
            {at: one.box for at, one in enumerate(plan.kinds[leaf.kind].buffers) if one.process == receiver}
            for leaf in plan.leaves
        ]
        sizes = [
            sum(map(volume, own.values())) * leaf.dtype.itemsize
            for own, leaf in zip(self._own, plan.leaves, strict=True)
        ]
        self._groups = [start // _TOGETHER_BYTES for start in it.accumulate(sizes, initial=0)]
        for leaf in range(len(plan.leaves)):
            if not self._left[leaf]:
                self._make(leaf)

    def arrays(self) -> dict[str, jax.Array]:
        """All received arrays by path, once every leaf is complete."""
        self._blocks.settle()
        return {leaf.path: self._made[number] for number, leaf in enumerate(self._plan.leaves)}

    def memory(self, leaf: int, buffer: int) -> np.ndarray:
        """The spare memory of one buffer of a leaf."""
        with self._lock:
            if leaf not in self._memory:
                self._allocate(leaf)
            return self._memory[leaf][buffer]

    def bytes_of(self, span: ShardBytes) -> np.ndarray:
        """The bytes of a buffer in a range, as a writable view."""
        leaf, buffer, start, stop = span
        if (own := self._bytes.get((leaf, buffer))) is None:  # pyright: ignore[reportArgumentType]
            own = self._bytes[int(leaf), buffer] = as_bytes(self.memory(int(leaf), buffer))
        return own[start:stop]

    def wrote(self, leaf: int) -> None:
        """Counts one received piece of a leaf. After the last one, the leaf becomes an array."""
        with self._lock:
            self._left[leaf] -= 1
            is_whole = not self._left[leaf]
        if is_whole:
            self._make(leaf)

    def _allocate(self, one: int) -> None:
        """Allocates memory for the new values of a leaf, and of all leaves in its group. Groups are the same at each
        revision.
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
            raise PlanMismatchError(f"leaf `{leaf.path}` lies in `dst` otherwise than in the transfer's plan.")
        made = array_of(leaf.shape, leaf.dtype, sharding, held, list(memory.values()))
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            made = jax.random.wrap_key_data(made, impl=encode_dtype(dtype)[len("key<") : -1])
        self._made[number] = made


class _Blocks:
    """Large memory blocks that are reused from one revision to the next, since new memory costs more than
    filling it.
    """

    def __init__(self):
        self._taken = 0
        # A view through the buffer protocol is the base of all arrays in a block: when it is gone, no array is left.
        self._blocks: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> np.ndarray:
        """A block of the requested number of bytes that nothing else references."""
        free = (at for at, (block, lent) in enumerate(self._blocks) if len(block) == nbytes and lent() is None)
        block = self._blocks.pop(at)[0] if (at := next(free, None)) is not None else np.empty(nbytes, np.uint8)
        lent = np.frombuffer(block.data, np.uint8)
        self._blocks.append((block, weakref.ref(lent)))
        self._taken += 1
        return lent

    def settle(self) -> None:
        """Ends a revision: keeps as many unreferenced blocks as the next revision takes."""
        kept = []
        for block, lent in self._blocks:
            if lent() is not None or self._taken > 0:
                self._taken -= lent() is None
                kept.append((block, lent))
        self._blocks, self._taken = kept, 0
