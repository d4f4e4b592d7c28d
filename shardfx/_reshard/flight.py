"""The execution of moves: how many arrays at a time, in which parts, which buffers are deleted, and the state after an
error.
"""

import collections
import contextlib
import dataclasses
import functools as ft
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Sharding

from .._ground.errors import MoveError
from .destinations import leaf_name
from .move import Move, move_of, program_of
from .pieces.carry import Means, begun
from .pieces.host import LocalShards, put_together
from .pieces.work import Work
from .steps.redistribute import labelled


# The errors of a move if memory runs out, a copy fails, or another process is gone.
_FAILURES = (RuntimeError, ValueError, TypeError, MemoryError)
_IN_FLIGHT_BYTES = 256 << 20
# Each program in flight holds threads of the CPU's runtime, which gives up when too many wait for each other; programs
# that wait for other processes can block all of them.
_IN_FLIGHT_COUNT = 32
_MOST_WORKS_ON_CPU = 2
# The number of arrays that are copied while the next one starts. More take more memory, and the kernel gives fresh
# pages slowly.
_MOST_BEGUN = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of moving one tree. Arrays of the target are numbered.

    **Arguments:**

    - `path_of`: the path of an array of the target.
    - `moves`: the arrays that change their sharding alone, by move: the number and the source's array of each.
    - `placements`: NumPy arrays that have yet to be placed, and where.
    - `works`: the arrays that are put together from parts of others.
    - `arrays`: the arrays that works read, by path.
    - `kept`: the `id` of each array of the source that stays.
    - `copies`: whether devices of the CPU may move their shards by copies in the memory that they share.
    """

    path_of: Callable[[int], str]
    moves: dict[Move, list[tuple[int, jax.Array]]]
    placements: list[tuple[int, Any, Sharding]]
    works: list[tuple[int, Work]]
    arrays: Mapping[str, Any]
    kept: set[int]
    copies: bool


def require_room(job: Job, limit_bytes: int) -> None:
    """Raises before anything moves if some array cannot move within the limit."""
    needed = [(move, places[0][0], len(places)) for move, places in job.moves.items()]
    needed += [(work, at, 1) for at, work in job.works]
    short = [
        (one.least_bytes, at, count, f"{one.dtype}{list(one.shape)}")
        for one, at, count in needed
        if one.least_bytes > limit_bytes
    ]
    if not short:
        return
    need, at, _, array = max(short, key=lambda one: one[0])
    others = sum(count for _, _, count, _ in short) - 1
    raise MoveError(
        f"{leaf_name(job.path_of(at))}, {array}, needs {need} bytes beside its source and target, even in the finest "
        f"of parts; `memory_limit_bytes={limit_bytes}` is too little for it{f' and {others} more' if others else ''}. "
        f"Nothing was moved; pass `memory_limit_bytes={need}` or more."
    )


def carried_out(job: Job, limit_bytes: int | None, donate: bool) -> dict[int, jax.Array]:
    """Carries out a job, and returns the arrays that it made, by number."""
    order = list(job.moves.items())
    if donate:  # moves that shrink arrays go first, so that those that grow find the room
        order.sort(key=lambda item: item[0].target_bytes - item[0].source_bytes)
    at = -1
    with ThreadPoolExecutor(os.cpu_count() or 1, "shardfx-move") as pool:
        flight = _Flight(job, limit_bytes, donate, pool)
        try:
            for at, leaf, target in job.placements:
                flight.made[at] = jax.device_put(leaf, target)
            for move, places in order:
                alike: dict[int, jax.Array] = {}
                for at, leaf in places:
                    if id(leaf) not in alike:
                        alike[id(leaf)] = flight.move(move, leaf)
                    flight.made[at] = alike[id(leaf)]
                if limit_bytes is not None:
                    flight.window.drain()
            for at, work in job.works:
                flight.begin(at, work)
            flight.finish()
        except _FAILURES as error:
            raise _stopped(job, at, flight, error) from error
    return flight.made


class _Flight:
    """Makes the target's arrays in order, with a few of them in flight at a time."""

    def __init__(self, job: Job, limit_bytes: int | None, donate: bool, pool: ThreadPoolExecutor):
        self.made: dict[int, jax.Array] = {}
        self.donate, self.window = donate, Window(limit_bytes)
        self._job, self._limit_bytes, self._pool = job, limit_bytes, pool
        # How many more times each array of the source is read. An array that is in a tree twice is moved once.
        self._left = collections.Counter(
            one for places in job.moves.values() for one in {id(leaf): None for _, leaf in places}
        )
        self._left.update(id(job.arrays[name]) for _, work in job.works for name in work.sources)
        # An array that stays shares its buffers with the result, so no other leaf may donate it.
        idle = (id(leaf) for move, places in job.moves.items() if move.idle for _, leaf in places)
        self._kept = {*job.kept, *idle}
        self._begun: collections.deque[tuple[int, Work, Callable[[], jax.Array]]] = collections.deque()
        most_bytes = max([0, *[work.most_bytes for _, work in job.works]])
        self._means = Means(
            job.arrays, ft.partial(self._moved, job.copies), limit_bytes, most_bytes, pool, LocalShards(job.arrays)
        )

    def _moved(self, copies: bool, x: object, sharding: Sharding) -> jax.Array:
        if not isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        move = move_of(x.shape, x.dtype, x.sharding, sharding, (), copies)
        return carry_out(move, x, limit_bytes=self._limit_bytes, pool=self._pool)

    def move(self, move: Move, leaf: jax.Array) -> jax.Array:
        """One array moved to another sharding. Its buffers are donated when no later move reads it."""
        self.window.make_room(move.extra_bytes)
        self._left[id(leaf)] -= 1
        give_up = self.donate and not self._left[id(leaf)] and id(leaf) not in self._kept
        made = carry_out(move, leaf, donate=give_up, limit_bytes=self._limit_bytes, pool=self._pool)
        # A copy by the host is finished when it is returned, and so is no move at all. A copy between memories needs no
        # further memory, but too many at once would queue without bound.
        if not move.idle and (move.work is None or move.work.way != "host"):
            self.window.add(made, move.target_bytes if move.how == "memory kind" else move.extra_bytes)
            if move.how == "steps" and move.crosses_cpu:
                self.window.drain()
        return made

    def begin(self, at: int, work: Work) -> None:
        """Starts another array. Waits for the oldest if too many are in flight, and for all if sources are donated."""
        self._begun.append((at, work, begun(work, self._means)))
        most = _MOST_BEGUN if work.way == "host" and _is_on_cpu(work) and not self.donate else 0
        while len(self._begun) > most:
            self._land()

    def finish(self) -> None:
        """Waits for all arrays in flight, and deletes donated sources that nothing was made of."""
        self.land()
        if self.donate:
            self.window.drain()
            for leaf in self._job.arrays.values():
                self._give_up(leaf)

    def land(self) -> None:
        """Waits for the copies in other threads."""
        while self._begun:
            self._land()

    def _land(self) -> None:
        at, work, there = self._begun.popleft()
        self.made[at] = there()
        if not self.donate:
            self.window.add(self.made[at], 0, _MOST_WORKS_ON_CPU if _is_on_cpu(work) else _IN_FLIGHT_COUNT)
            return
        jax.block_until_ready(self.made[at])
        for name in work.sources:
            leaf = self._job.arrays[name]
            self._left[id(leaf)] -= 1
            if not self._left[id(leaf)]:
                self._means.forget(name)
                self._give_up(leaf)

    def _give_up(self, leaf: object) -> None:
        if isinstance(leaf, jax.Array) and not self._left[id(leaf)] and id(leaf) not in self._kept:
            leaf.delete()


def _is_on_cpu(work: Work) -> bool:
    return any(device.platform == "cpu" for device in work.devices)


class Window:
    """Waits for the oldest moves when too many bytes or arrays are in flight."""

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = _IN_FLIGHT_BYTES if limit_bytes is None else limit_bytes
        self.pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
        self.bytes = 0

    def add(self, array: jax.Array, count: int, most: int = _IN_FLIGHT_COUNT) -> None:
        """Adds an array of `count` bytes that is in flight, and waits while more than `most` arrays are."""
        self.pending.append((array, count))
        self.bytes += count
        while len(self.pending) > most:
            self._wait()

    def make_room(self, count: int) -> None:
        """Waits until `count` more bytes may be in flight."""
        while self.pending and (self.bytes + count > self.limit_bytes or len(self.pending) >= _IN_FLIGHT_COUNT):
            self._wait()

    def drain(self) -> None:
        """Waits for all moves."""
        while self.pending:
            self._wait()

    def _wait(self) -> None:
        array, count = self.pending.popleft()
        self.bytes -= count
        jax.block_until_ready(array)


def _stopped(job: Job, at: int, flight: _Flight, error: Exception) -> MoveError:
    with contextlib.suppress(*_FAILURES):  # moves in flight elsewhere may still arrive
        flight.land()
    moved = {job.path_of(done): array for done, array in flight.made.items() if _is_there(array)}
    total = len(job.placements) + sum(map(len, job.moves.values())) + len(job.works)
    listed = ", ".join(f"`{path}`" if path else leaf_name(path) for path in list(moved)[:8])
    listed += ", ..." if len(moved) > 8 else ""
    kept = "the sources of these were donated" if flight.donate else "the tree itself is untouched"
    return MoveError(
        f"stopped at {leaf_name(job.path_of(at))} ({type(error).__name__}: {str(error).splitlines()[0][:300]}) after "
        f"{len(moved)} of {total} leaves: {listed or 'none'}; {kept}, and they are in the error's `moved`.",
        moved,
    )


def _is_there(array: jax.Array) -> bool:
    """Whether an array was computed without an error."""
    try:
        jax.block_until_ready(array)
    except RuntimeError:
        return False
    return True


def carry_out(
    move: Move,
    x: jax.Array,
    *,
    donate: bool = False,
    limit_bytes: int | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> jax.Array:
    """Moves one live array. It does not wait for computation that the devices still have to do.

    **Arguments:**

    - `move`: the decided move.
    - `x`: an array of its shape, dtype and source.
    - `donate`: gives up its buffers, unless the result has them.
    - `limit_bytes`: bytes that may be used beside the shards of source and target, `move.least_bytes` or more. An array
        that would need more moves in parts.
    - `pool`: threads to copy with.

    **Returns:**

    The moved array, committed to exactly the sharding `move.dst`.
    """
    if x.dtype != move.dtype:  # typed PRNG keys: their data move
        data = carry_out(move, jax.random.key_data(x), donate=donate, limit_bytes=limit_bytes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if move.idle:
        return labelled(x, move.dst)
    if move.how == "memory kind":
        return _in_other_memory(x, move.dst, donate)
    if move.work is not None:
        return labelled(_in_pieces(move, x, donate, limit_bytes, pool), move.dst)
    return labelled(program_of(move, donate, move.cut_within(limit_bytes))(x), move.dst)


def _in_pieces(
    move: Move, x: jax.Array, donate: bool, limit_bytes: int | None, pool: ThreadPoolExecutor | None
) -> jax.Array:
    work, ends = move.work, (move.src, move.dst)
    assert work is not None
    if x.weak_type and not move.lost and all(end.is_fully_addressable for end in ends):  # which pieces would lose
        return jax.device_put(x, move.dst, donate=donate)
    shards = LocalShards({"": x}, one_by_one=work.way == "host" and (donate or bool(move.lost)))
    if donate and work.way == "host" and not work.is_elsewhere:
        return put_together(work.struct, work.targets, work.fillings, shards, pool)
    if work.way == "programs" and limit_bytes is not None:
        limit_bytes -= move.aside_bytes
    made = begun(work, Means({"": x}, None, limit_bytes, work.most_bytes, pool, shards))()
    if donate:
        jax.block_until_ready(made)
        x.delete()
    return made


def _in_other_memory(x: jax.Array, dst: Sharding, donate: bool) -> jax.Array:
    if not dst.addressable_devices:  # JAX's own device_put asserts that it has something to put
        return labelled(x, dst)
    result = jax.device_put(x, dst)
    if donate:  # JAX itself cannot donate across memory kinds; the copy keeps what it reads until it is done
        x.delete()
    return result
