"""The execution of moves: how many arrays move at a time, in which chunks, which
buffers are deleted, and the state after an error.

`limit_bytes` is the most bytes in one memory besides the shards of source and target;
`None` for no limit. With `donate`, source arrays are deleted once they have been read.
"""

import collections
import contextlib
import dataclasses
import functools as ft
import itertools as it
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from .._ground.errors import MoveError
from .._ground.keys import as_keys, raw
from .movable import leaf_name
from .move import Move, least_bytes_of, move_of, program_of, spread_of
from .pieces.assembly import Assembly
from .pieces.host import LocalShards, assemble_and_delete
from .pieces.run import Context, start_assembly
from .pieces.small_moves import SmallMover, small_mover
from .shardings import labelled


# The errors of a move if memory runs out, a copy fails, or another process is gone.
_FAILURES = (RuntimeError, ValueError, TypeError, MemoryError)
_IN_FLIGHT_BYTES = 256 << 20
# Each program in flight holds threads of the CPU's runtime, which gives up when too
# many wait for each other; programs that wait for other processes can block all of
# them.
_IN_FLIGHT_COUNT = 32
_MOST_ASSEMBLED_ON_CPU = 2


class NumberedAssembly(NamedTuple):
    """An array to assemble from parts of other arrays: its number, the paths of the
    source's arrays, and the plan that says which parts go where.
    """

    number: int
    source_paths: tuple[str, ...]
    assembly: Assembly


@dataclasses.dataclass(frozen=True)
class Job:
    """The moves, placements and assemblies that make one target tree.

    Each array of the target has a number, which is its position in the tree.

    **Arguments:**

    - `path_of`: a function from the number of an array of the target to its path.
    - `moves`: for each move, the arrays that it moves: pairs of the number of the
      target's array and the source's array.
    - `placements`: the NumPy arrays to put on devices. Each entry is the number of the
      target's array, the NumPy array, and the sharding.
    - `assemblies`: the arrays to assemble from parts of other arrays.
    - `arrays`: the source's arrays that assemblies read, by path.
    - `kept`: the `id` of each array of the source that is in the result unchanged.
    - `copies`: whether shards on CPU devices may be copied in host memory, which these
      devices share.
    """

    path_of: Callable[[int], str]
    moves: dict[Move, list[tuple[int, jax.Array]]]
    placements: list[tuple[int, Any, Sharding]]
    assemblies: list[NumberedAssembly]
    arrays: Mapping[str, Any]
    kept: set[int]
    copies: bool


class _Work(NamedTuple):
    """A move or an assembly, the numbers of the target's arrays that it makes, and the
    least `limit_bytes` under which it can.
    """

    plan: Move | Assembly
    numbers: list[int]
    least_bytes: int


def require_memory(job: Job, limit_bytes: int) -> None:
    """Raises `MoveError` if some array of a job needs more than `limit_bytes`, even in
    its smallest chunks. Arrays are numbered by their positions in the target tree.
    """
    works: list[_Work] = []
    for move, numbered_arrays in job.moves.items():
        numbers = [number for number, _ in numbered_arrays]
        works.append(_Work(plan=move, numbers=numbers, least_bytes=move.least_bytes))
    for array in job.assemblies:
        least_bytes = least_bytes_of(array.assembly)
        works.append(
            _Work(plan=array.assembly, numbers=[array.number], least_bytes=least_bytes)
        )

    too_large = [work for work in works if work.least_bytes > limit_bytes]
    if not too_large:
        return
    largest = max(too_large, key=lambda work: work.least_bytes)
    move_or_assembly = largest.plan
    others = sum(len(work.numbers) for work in too_large) - 1
    and_others = f" and {others} more" if others else ""
    raise MoveError(
        f"{leaf_name(job.path_of(largest.numbers[0]))},"
        f" {move_or_assembly.dtype}{list(move_or_assembly.shape)},"
        f" needs {largest.least_bytes} bytes beside its source and target, even in the"
        f" smallest parts; `memory_limit_bytes={limit_bytes}` is too little for"
        f" it{and_others}. Nothing was moved; pass"
        f" `memory_limit_bytes={largest.least_bytes}` or more."
    )


def run_job(job: Job, limit_bytes: int | None, donate: bool) -> dict[int, jax.Array]:
    """Runs a job, and returns the arrays that it made. A key is an array's number: its
    position in the target tree.
    """
    order = list(job.moves.items())
    if donate:
        # Moves that shrink arrays go first. They free the memory that others need.
        order.sort(key=lambda item: item[0].target_bytes - item[0].source_bytes)
    with ThreadPoolExecutor(os.cpu_count() or 1, "shardfx-move") as pool:
        flight = _Flight(job=job, limit_bytes=limit_bytes, donate=donate, pool=pool)
        try:
            for number, leaf, target in job.placements:
                flight.current = number
                flight.made[number] = jax.device_put(leaf, target)
            for move, numbered_arrays in order:
                flight.move_all(move, numbered_arrays)
                # Under a limit, only arrays of one move are in flight at a time.
                if limit_bytes is not None:
                    flight.window.drain()
            for array in job.assemblies:
                flight.assemble(array)
            flight.finish()
        except _FAILURES as error:
            raise _move_error(job, flight, error) from error
    return flight.made


class _StartedAssembly(NamedTuple):
    """An assembly that other threads copy, and a function that waits for the array."""

    target: NumberedAssembly
    wait: Callable[[], jax.Array]


class _Flight:
    """The state of a running job, which makes the target's arrays in order, a bounded
    number at a time. The threads of `pool` copy.
    """

    def __init__(
        self,
        job: Job,
        limit_bytes: int | None,
        donate: bool,
        pool: ThreadPoolExecutor,
    ):
        self.made: dict[int, jax.Array] = {}
        self.donate = donate
        self.window = Window(limit_bytes)
        self._job = job
        self._limit_bytes = limit_bytes
        self._pool = pool
        # How many more moves and assemblies read each array of the source, by its `id`.
        # A move that has an array twice reads it once.
        self._reads_left = collections.Counter[int]()
        for numbered_arrays in job.moves.values():
            self._reads_left.update({id(leaf) for _, leaf in numbered_arrays})
        for array in job.assemblies:
            self._reads_left.update(id(job.arrays[path]) for path in array.source_paths)
        # An array that stays shares its buffers with the result, so no other leaf may
        # donate it.
        self._kept = set(job.kept)
        for move, numbered_arrays in job.moves.items():
            # An idle move copies nothing: its result shares the buffers of the source.
            if move.idle:
                self._kept.update([id(leaf) for _, leaf in numbered_arrays])
        # The number of the target's array that is being made, for an error's text.
        self.current = -1
        self._started: _StartedAssembly | None = None
        # Without a limit, the programs of each assembly may use as many bytes as the
        # assembly that may use the most.
        most_bytes = 0
        for array in job.assemblies:
            most_bytes = max(most_bytes, array.assembly.most_bytes)
        self._context = Context(
            arrays=job.arrays,
            # A bound method would make a cycle of references, in which both trees' arrays
            # would stay until the garbage collector ran.
            move=ft.partial(
                _moved, copies=job.copies, limit_bytes=limit_bytes, pool=pool
            ),
            limit_bytes=limit_bytes,
            most_bytes=most_bytes,
            pool=pool,
            shards=LocalShards(job.arrays),
        )

    def move_all(
        self,
        move: Move,
        numbered_arrays: Sequence[tuple[int, jax.Array]],
    ) -> None:
        """Makes the target's arrays from pairs of their number and the source's array.
        An array that is in the source twice moves once. Small arrays move several at a
        time.
        """
        numbers_by_id: dict[int, list[int]] = {}
        leaves: dict[int, jax.Array] = {}
        for number, leaf in numbered_arrays:
            numbers_by_id.setdefault(id(leaf), []).append(number)
            leaves[id(leaf)] = leaf
        mover = None
        if self._limit_bytes is None:
            mover = _small_mover(move)
        batch_size = 1 if mover is None else mover.most_together
        remaining = iter(leaves.values())
        while batch := list(it.islice(remaining, batch_size)):
            self.current = numbers_by_id[id(batch[0])][0]
            if mover is not None and all(map(_has_shards_of_its_type, batch)):
                moved = self._move_together(mover, move, batch)
                for leaf, array in zip(batch, moved, strict=True):
                    for number in numbers_by_id[id(leaf)]:
                        self.made[number] = array
                continue
            for leaf in batch:
                self.current = numbers_by_id[id(leaf)][0]
                array = self.move(move, leaf)
                for number in numbers_by_id[id(leaf)]:
                    self.made[number] = array

    def _move_together(
        self,
        mover: SmallMover,
        move: Move,
        batch: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Moves some small arrays, and deletes those that are donated."""
        self.window.make_room(move.extra_bytes)
        moved = [labelled(array, move.dst) for array in mover(batch)]
        for leaf in batch:
            self._reads_left[id(leaf)] -= 1
            if self.donate and self._is_done_with(leaf):
                leaf.delete()
        return moved

    def move(self, move: Move, leaf: jax.Array) -> jax.Array:
        """Moves `leaf` as `move` says. Its buffers are donated if no later move or
        assembly reads it.
        """
        self.window.make_room(move.extra_bytes)
        self._reads_left[id(leaf)] -= 1
        moved = carry_out(
            move,
            leaf,
            donate=self.donate and self._is_done_with(leaf),
            limit_bytes=self._limit_bytes,
            pool=self._pool,
        )
        # A copy by the host is finished when it is returned, and so is no move at all.
        # A copy between memories needs no further memory, but too many at once would
        # queue without bound.
        if not move.idle and (move.assembly is None or move.assembly.method != "host"):
            is_kind_move = move.how == "memory kind"
            nbytes = move.target_bytes if is_kind_move else move.extra_bytes
            self.window.add(moved, nbytes)
            # Of programs in which CPU devices of several processes take part, only one
            # is in flight: see `_IN_FLIGHT_COUNT`.
            if move.how == "steps" and move.crosses_cpu:
                self.window.drain()
        return moved

    def assemble(self, target: NumberedAssembly) -> None:
        """Starts to assemble an array of the target. Waits until the array that was
        started before is finished. Waits for this one too if sources are donated, or if
        it is not copied on CPUs. So at most two arrays are copied at a time. More would
        take more memory, which the kernel provides slowly.
        """
        self.current = target.number
        assembly = target.assembly
        wait = start_assembly(assembly, target.source_paths, self._context)
        self.finish_copies()
        self._started = _StartedAssembly(target=target, wait=wait)
        if self.donate or assembly.method != "host" or not _is_on_cpu(assembly):
            self.finish_copies()

    def finish(self) -> None:
        """Waits for all arrays that other threads assemble. Deletes donated arrays that
        nothing reads any more.
        """
        self.finish_copies()
        if self.donate:
            self.window.drain()
            for leaf in self._job.arrays.values():
                self._delete_if_unread(leaf)

    def finish_copies(self) -> None:
        """Waits for the array that other threads assemble. Deletes donated arrays that
        nothing reads any more.
        """
        if self._started is None:
            return
        target = self._started.target
        wait = self._started.wait
        self._started = None
        self.current = target.number
        array = _spread(target.assembly, wait(), self._limit_bytes)
        if target.source_paths:
            # If the source has typed PRNG keys, their moved data become keys again.
            array = as_keys(array, self._job.arrays[target.source_paths[0]])
        self.made[target.number] = array
        if not self.donate:
            is_on_cpu = _is_on_cpu(target.assembly)
            most_in_flight = _MOST_ASSEMBLED_ON_CPU if is_on_cpu else _IN_FLIGHT_COUNT
            # Its shards are those of the target, so it takes no further bytes.
            self.window.add(array, 0, most_in_flight)
            return
        jax.block_until_ready(array)
        for source_path in target.source_paths:
            leaf = self._job.arrays[source_path]
            self._reads_left[id(leaf)] -= 1
            if not self._reads_left[id(leaf)]:
                self._context.forget(source_path)
                self._delete_if_unread(leaf)

    def _is_done_with(self, leaf: object) -> bool:
        """Whether nothing reads an array any more, and no result shares its buffers."""
        return not self._reads_left[id(leaf)] and id(leaf) not in self._kept

    def _delete_if_unread(self, leaf: object) -> None:
        """Deletes an array that nothing reads any more. NumPy arrays stay."""
        if isinstance(leaf, jax.Array) and self._is_done_with(leaf):
            leaf.delete()


def _moved(
    x: object,
    sharding: Sharding,
    copies: bool,
    limit_bytes: int | None,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """The array `x`, which an assembly reads, moved to `sharding`. `copies` says whether
    shards on CPU devices may be copied in host memory. At most `limit_bytes` are used
    beside both arrays' shards. The threads of `pool` copy.
    """
    if not isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    move = move_of(
        shape=x.shape,
        dtype=x.dtype,
        src=x.sharding,
        dst=sharding,
        lost=(),
        copies=copies,
    )
    return carry_out(move, x, limit_bytes=limit_bytes, pool=pool)


def _is_on_cpu(assembly: Assembly) -> bool:
    """Whether some device of source or target is a CPU device."""
    return any(device.platform == "cpu" for device in assembly.devices)


class Window:
    """The arrays in flight: dispatched, but not yet computed by the devices. Their
    number is bounded, and so are the bytes that computing them takes: by `limit_bytes`,
    or by a fixed limit if it is `None`.
    """

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = _IN_FLIGHT_BYTES if limit_bytes is None else limit_bytes
        self.pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
        self.bytes = 0

    def add(
        self,
        array: jax.Array,
        nbytes: int,
        most_in_flight: int = _IN_FLIGHT_COUNT,
    ) -> None:
        """Adds an array that was dispatched and takes `nbytes` to compute. Then waits
        for the oldest arrays until at most `most_in_flight` are not yet computed.
        """
        self.pending.append((array, nbytes))
        self.bytes += nbytes
        while len(self.pending) > most_in_flight:
            self._wait()

    def make_room(self, nbytes: int) -> None:
        """Waits until a further array, which takes `nbytes` to compute, may be in
        flight.
        """
        while self.pending:
            is_full = len(self.pending) >= _IN_FLIGHT_COUNT
            if not is_full and self.bytes + nbytes <= self.limit_bytes:
                break
            self._wait()

    def drain(self) -> None:
        """Waits until all arrays in flight are computed."""
        while self.pending:
            self._wait()

    def _wait(self) -> None:
        """Waits until the oldest array in flight is computed."""
        array, nbytes = self.pending.popleft()
        self.bytes -= nbytes
        jax.block_until_ready(array)


def _move_error(job: Job, flight: _Flight, error: Exception) -> MoveError:
    """The error that says where a job stopped, and why. It holds the arrays that have
    moved by then, by their paths.
    """
    stopped_at = leaf_name(job.path_of(flight.current))
    # Moves in flight elsewhere may still arrive.
    with contextlib.suppress(*_FAILURES):
        flight.finish_copies()
    moved = {}
    for number, array in flight.made.items():
        # An array that was not computed is left out.
        with contextlib.suppress(RuntimeError):
            moved[job.path_of(number)] = jax.block_until_ready(array)
    moves = sum(map(len, job.moves.values()))
    total = len(job.placements) + moves + len(job.assemblies)
    names = []
    for path in list(moved)[:8]:
        names.append(f"`{path}`" if path else leaf_name(path))
    if len(moved) > 8:
        names.append("...")
    listed = ", ".join(names)
    what_stays = "the tree itself is untouched"
    if flight.donate:
        what_stays = "the sources of these were donated"
    cause = type(error).__name__
    # The text of a `MemoryError` is usually empty.
    for first_line in str(error).splitlines()[:1]:
        cause += f": {first_line[:300]}"
    return MoveError(
        f"stopped at {stopped_at} ({cause}) after {len(moved)} of {total} leaves:"
        f" {listed or 'none'}; {what_stays}, and they are in the error's `moved`.",
        moved,
    )


def carry_out(
    move: Move,
    x: jax.Array,
    *,
    donate: bool = False,
    limit_bytes: int | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> jax.Array:
    """Moves one live array to exactly the sharding `move.dst`. It does not wait until
    the devices have computed the result. If the whole array needs more than
    `limit_bytes`, which must be at least `move.least_bytes`, it moves in chunks. The
    threads of `pool` copy; without it, the calling thread does.
    """
    if x.dtype != move.dtype:
        # Of typed PRNG keys the data move.
        data = carry_out(
            move,
            raw(x),
            donate=donate,
            limit_bytes=limit_bytes,
            pool=pool,
        )
        return as_keys(data, x)
    if move.idle:
        return labelled(x, move.dst)
    if move.how == "steps":
        program = program_of(move, donate, move.chunks_within(limit_bytes))
        return labelled(program(x), move.dst)
    if move.assembly is not None:
        array = _assembled(
            move=move,
            assembly=move.assembly,
            x=x,
            donate=donate,
            limit_bytes=limit_bytes,
            pool=pool,
        )
        return labelled(array, move.dst)
    if not move.dst.addressable_devices:
        # JAX's own device_put asserts that it has something to put.
        return labelled(x, move.dst)
    # JAX's own copy to another memory fails if the order of the devices changes, too.
    old_kind: Any = move.src.memory_kind
    placed = labelled(x, move.dst.with_memory_kind(old_kind))
    result = jax.device_put(placed, move.dst)
    if donate:
        # JAX itself cannot donate across memory kinds. The copy keeps what it reads
        # until it is done.
        x.delete()
    return result


def _small_mover(move: Move) -> SmallMover | None:
    """The mover of small arrays by the move `move`; `None` if they are not small, or do
    not move within this process.
    """
    is_local = move.src.is_fully_addressable and move.dst.is_fully_addressable
    if move.assembly is None or move.assembly.method != "host":
        return None
    if move.lost or not is_local:
        return None
    return small_mover(move.assembly)


def _has_shards_of_its_type(leaf: jax.Array) -> bool:
    """Whether an array made from copies of the shards is of the type of `leaf`: no typed
    PRNG key, and not weakly typed. A deleted array has no shards.
    """
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return not (is_key or leaf.weak_type or leaf.is_deleted())


def _assembled(
    move: Move,
    assembly: Assembly,
    x: jax.Array,
    donate: bool,
    limit_bytes: int | None,
    pool: ThreadPoolExecutor | None,
) -> jax.Array:
    """Assembles the target of `move` from shards of `x`. `assembly` says which parts of
    them each new shard is made of. With `donate`, `x` is deleted once it is read. Small
    local arrays have a faster way, and so have copies by the host that may delete each
    shard of `x` as soon as nothing reads it.
    """
    is_local = move.src.is_fully_addressable and move.dst.is_fully_addressable
    if x.weak_type and not move.lost and is_local:
        # An array assembled from shards has no weak type.
        return jax.device_put(x, move.dst, donate=donate)
    # By the host, and not by programs on the devices.
    is_copied = assembly.method == "host"
    mover = _small_mover(move)
    if mover is not None:
        (array,) = mover([x])
        if donate:
            x.delete()
        return array
    # Each replica of a shard is read by itself: to delete it when it is read, or
    # because another replica is lost.
    keeps_replicas = is_copied and (donate or bool(move.lost))
    shards = LocalShards({"": x}, keeps_replicas)
    if donate and is_copied and not assembly.is_remote:
        return assemble_and_delete(
            struct=assembly.struct,
            targets=assembly.targets,
            copies=assembly.host_copies,
            shards=shards,
            pool=pool,
        )
    if not is_copied and limit_bytes is not None:
        limit_bytes -= move.staging_bytes
    context = Context(
        arrays={"": x},
        move=None,
        limit_bytes=limit_bytes,
        most_bytes=assembly.most_bytes,
        pool=pool,
        shards=shards,
    )
    wait = start_assembly(assembly, ("",), context)
    array = wait()
    array = _spread(assembly, array, limit_bytes)
    if donate:
        jax.block_until_ready(array)
        x.delete()
    return array


def _spread(assembly: Assembly, array: jax.Array, limit_bytes: int | None) -> jax.Array:
    """Returns the assembled `array` in the sharding of the target. If each element
    entered a TPU slice once, the shards are gathered inside the slices, and `array` is
    deleted.
    """
    spread = spread_of(assembly)
    if spread is None:
        return array
    if not spread.dst.addressable_devices:
        return labelled(array, spread.dst)
    # The limit is for bytes beside the target, and the assembled array is not it.
    if limit_bytes is not None:
        limit_bytes -= spread.source_bytes_in_memory
    return carry_out(spread, array, donate=True, limit_bytes=limit_bytes)
