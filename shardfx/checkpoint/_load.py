import concurrent.futures
import contextlib
import dataclasses
import functools as ft
import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._boxes import Box, boxes_here
from .._errors import CheckpointError
from . import _stores as stores
from ._entry import FileArray, StoreArray
from ._files import ChangedError, require_seen_unchanged
from ._index import Index, read_index
from ._keys import keys_from
from ._progress import Progress
from ._reader import GAP_BYTES, RUN_BYTES, Files, buffers, spans_of
from ._spans import Span
from ._stores import MissingChunks
from ._wanted import Fetch, Rename, Wanted, box_bytes, fetches, require_devices, wanted


_STAGING_BYTES = 2**30
_WORKERS = 8
_CALL_BYTES = 8192
_TRIES = 16


def load(
    path: str | os.PathLike[str] | Index,
    plan: Any,
    *,
    rename: Rename = None,
    dtype: Any = None,
    memory_limit_bytes: int | None = None,
    gap_bytes: int = GAP_BYTES,
    missing_chunks: MissingChunks = "raise",
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Any:
    """Reads a checkpoint into arrays sharded by a plan; each process reads the bytes of its own shards.

    On a CPU the bytes go from the file into the memory that the arrays keep. Replicas within a process are read once.
    The mesh, the plan and the device count with which the checkpoint was saved do not matter.

    **Arguments:**

    - `path`: as in `read_index`, or what that returned.
    - `plan`: a [`shardfx.ShardPlan`][] on devices, or a tree of `jax.ShapeDtypeStruct`s with shardings, or of arrays
        that the loaded ones shall be placed like.
    - `rename`: from a leaf's path to the name of its array in the checkpoint: a mapping (paths that it leaves out are
        names themselves) or a function. In the place of a name, a `Take` transposes and stacks on the way.
    - `dtype`: `None`: the checkpoint must have the plan's dtypes. `"plan"`: cast to the plan's dtypes on the way. A
        dtype: cast all floating-point arrays to it.
    - `memory_limit_bytes`: the most that is in host memory on its way to a device. By default it is 1 GiB or the
        largest shard, whichever is larger. On a CPU nothing is on its way: the memory that is read into becomes the
        array's.
    - `gap_bytes`: bytes that no device of the process needs are skipped where as many lie in a row, and read along
        where fewer do; `plan_reads` says what that is. A read costs about as much as 4 KiB from the page cache, so for
        columns of short rows 4096 is faster; on a network file system, where a read takes long, more still.
    - `missing_chunks`: of stores of chunks. `"raise"`: a chunk that is not there was lost, which is an error.
        `"fill"`: it holds the array's fill value, as zarr has it; right for arrays whose writer leaves such chunks out.
    - `root`: as in `read_index`.
    - `progress`: whether to show a line on stderr; by default if that is a terminal.

    **Returns:**

    A tree of the plan's structure. Leaves that are no arrays, activation functions for one, are as in the tree that is
    given, and `None` for a ShardPlan, which has none: `equinox.combine(loaded, model)` takes them from a model.

    **Raises:**

    `CheckpointError` that lists every leaf that the checkpoint lacks or has with another shape or dtype, before
    anything is read; for a file that is truncated, missing, or changed since its header was read; for an integer that
    the dtype it is cast to lacks; for a limit below the largest shard. Nothing is half loaded.

    !!! Example

        ```python
        import tempfile
        import jax
        import jax.numpy as jnp
        import shardfx
        from shardfx import MeshSpec, PathRules, checkpoint

        tree = {"wi": jnp.ones((64, 8)), "wo": jnp.ones((8, 64))}
        mesh = MeshSpec({"fsdp": 8}).build(jax.devices())
        made = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->fsdp"))
        directory = tempfile.mkdtemp() + "/step-1"
        checkpoint.save(directory, shardfx.shard(tree, made), made)

        columns = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->None.fsdp"))
        again = checkpoint.load(directory, columns)
        assert again["wi"].sharding.spec == jax.P(None, "fsdp")
        ```
    """
    how = _How(rename, dtype, memory_limit_bytes, gap_bytes, missing_chunks, progress)
    if isinstance(path, Index):
        return _load(path, plan, how)
    # A file that a writer replaces meanwhile is read again from its header on. With more processes one alone must not:
    # it might load another file than the others.
    for _ in range(_TRIES if jax.process_count() == 1 else 0):
        with contextlib.suppress(ChangedError):
            return _load(read_index(path, root=root), plan, how)
    return _load(read_index(path, root=root), plan, how)


@dataclasses.dataclass(frozen=True)
class _How:
    """What `load` was asked for, apart from what and where to."""

    rename: Rename
    dtype: Any
    memory_limit_bytes: int | None
    gap_bytes: int
    missing_chunks: MissingChunks
    progress: bool | None


def _load(index: Index, plan: Any, how: _How) -> Any:
    leaves, rebuild = wanted(index, plan, how.rename, how.dtype)
    require_devices(leaf.sharding for leaf in leaves)
    limit = _limit(leaves, how.memory_limit_bytes)
    units = [unit for number, leaf in _in_file_order(leaves) for unit in _units(number, leaf, limit)]
    bar = Progress("loading", sum(unit.nbytes for unit in units), how.progress)
    shards = _run(index, units, limit, how, bar)
    bar.end()
    return rebuild([_assembled(leaf, shards.get(number, {})) for number, leaf in enumerate(leaves)])


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What is read, and then moved, together: some boxes of one leaf."""

    number: int
    leaf: Wanted
    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    staging_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(box_bytes(box, self.leaf.dtype) for box in self.boxes)


def _in_file_order(leaves: list[Wanted]) -> list[tuple[int, Wanted]]:
    def position(numbered: tuple[int, Wanted]) -> tuple[str, int]:
        entry = numbered[1].entries[0]
        return entry.file, entry.offset if isinstance(entry, FileArray) else 0

    return sorted(enumerate(leaves), key=position)


@ft.lru_cache(maxsize=1024)
def _holders(shape: tuple[int, ...], sharding: Sharding) -> Mapping[Box, tuple[Any, ...]]:
    """The boxes of an array that this process holds, each with the devices that hold it."""
    holders: dict[Box, tuple[Any, ...]] = {}
    for device, box in boxes_here(sharding, shape).items():
        holders[box] = (*holders.get(box, ()), device)
    return types.MappingProxyType(holders)


@ft.lru_cache(maxsize=1024)
def _is_final(sharding: Sharding) -> bool:
    """Whether the host memory that an array is read into becomes the array's."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _limit(leaves: list[Wanted], asked: int | None) -> int:
    staged = [
        (box_bytes(box, leaf.dtype), leaf)
        for leaf in leaves
        if not _is_final(leaf.sharding)
        for box in _holders(leaf.shape, leaf.sharding)
    ]
    largest, leaf = max(staged, key=lambda pair: pair[0], default=(0, None))
    if asked is None:
        return max(_STAGING_BYTES, largest)
    if asked < largest and leaf is not None:
        raise CheckpointError(
            f"`memory_limit_bytes={asked}` is less than one shard of leaf `{leaf.path}`, {largest} bytes; allow at "
            "least that, or cut the leaf over more devices."
        )
    return asked


def _units(number: int, leaf: Wanted, limit: int) -> list[_Unit]:
    holders, is_final = _holders(leaf.shape, leaf.sharding), _is_final(leaf.sharding)
    sizes = [0 if is_final else box_bytes(box, leaf.dtype) for box in holders]
    if sum(sizes) <= limit:
        return [_Unit(number, leaf, tuple(holders), tuple(holders.values()), sum(sizes))]
    return [_Unit(number, leaf, (box,), (holders[box],), size) for box, size in zip(holders, sizes, strict=True)]


Shards = dict[int, dict[Box, tuple[np.ndarray, list[Any]]]]
Task = Callable[[], int]


def _run(index: Index, units: list[_Unit], limit: int, how: _How, bar: Progress) -> Shards:
    """Reads the units in parallel, at most `limit` bytes of them on their way to a device at any time."""
    shards: Shards = {}
    workers = max(2, min(_WORKERS, os.cpu_count() or 1))
    entries = [entry for unit in units for entry in unit.leaf.entries]
    stores.require_possible([entry for entry in entries if isinstance(entry, StoreArray)], index.place)
    names = list(dict.fromkeys(entry.file for entry in entries if isinstance(entry, FileArray)))
    with Files(index.place, names, workers) as files:
        require_seen_unchanged(index.place)
        with concurrent.futures.ThreadPoolExecutor(workers, "shardfx-load") as pool:
            flight = _Flight(pool, limit, bar, shards)
            try:
                for group in _groups(units, min(limit, RUN_BYTES)):
                    flight.admit(group, lambda unit, memory: _tasks(files, unit, memory, how))
                flight.land(0)
            finally:
                # After an error, what has not begun must not begin.
                pool.shutdown(wait=True, cancel_futures=True)
        # A store's chunks have no header of their own that could be looked at.
        require_seen_unchanged(index.place)
    return shards


def _groups(units: list[_Unit], most_bytes: int) -> Iterator[list[_Unit]]:
    """Units that follow each other in the file and are small together: handing each to a thread would cost more."""
    group: list[_Unit] = []
    nbytes = 0
    for unit in units:
        if group and nbytes + unit.nbytes > most_bytes:
            yield group
            group, nbytes = [], 0
        group.append(unit)
        nbytes += unit.nbytes
    if group:
        yield group


@dataclasses.dataclass
class _Group:
    """Units under way, the memory of each, and how many of their tasks are not done."""

    units: list[tuple[_Unit, list[np.ndarray]]]
    left: int

    @property
    def staging_bytes(self) -> int:
        return sum(unit.staging_bytes for unit, _ in self.units)


class _Flight:
    """The groups being read: admitted in order while they fit, landed as they finish."""

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress, shards: Shards):
        self._pool, self._limit, self._bar, self._shards = pool, limit, bar, shards
        self._open: dict[concurrent.futures.Future[int], _Group] = {}
        self._staging_bytes = 0

    def admit(self, units: list[_Unit], tasks_of: Callable[[_Unit, list[np.ndarray]], Iterator[Task]]) -> None:
        coming = sum(unit.staging_bytes for unit in units)
        while self._open and (self._staging_bytes + coming > self._limit or len(self._open) > 256):
            self._land_one()
        memory = iter(buffers([(box, unit.leaf.dtype) for unit in units for box in unit.boxes]))
        pairs = [(unit, list(itertools.islice(memory, len(unit.boxes)))) for unit in units]
        tasks = [task for unit, memory in pairs for task in tasks_of(unit, memory)]
        if len(units) > 1:
            tasks = [_in_turn(tasks)]
        group = _Group(pairs, len(tasks))
        self._staging_bytes += coming
        self._open.update((self._pool.submit(task), group) for task in tasks)
        if not tasks:
            self._finish(group)

    def land(self, at_most: int) -> None:
        while len(self._open) > at_most:
            self._land_one()

    def _land_one(self) -> None:
        done, _ = concurrent.futures.wait(self._open, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            group = self._open.pop(future)
            self._bar.advance(future.result())
            group.left -= 1
            if not group.left:
                self._finish(group)

    def _finish(self, group: _Group) -> None:
        moved = []
        for unit, memory in group.units:
            _check_bools(unit.leaf, memory)
            held = self._shards.setdefault(unit.number, {})
            for box, filled, devices in zip(unit.boxes, memory, unit.devices, strict=True):
                # Where the memory is only a stop on the way, it must be gone before more is admitted.
                placed = _moved(filled, devices, unit.leaf) if unit.staging_bytes else []
                held[box] = (np.empty(0) if placed else filled, placed)
                moved += placed
        jax.block_until_ready(moved)
        self._staging_bytes -= group.staging_bytes
        group.units.clear()


def _in_turn(tasks: list[Task]) -> Task:
    return lambda: sum(task() for task in tasks)


def _moved(filled: np.ndarray, devices: tuple[Any, ...], leaf: Wanted) -> list[Any]:
    kind = leaf.sharding.memory_kind
    return [jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]


def _check_bools(leaf: Wanted, memory: list[np.ndarray]) -> None:
    if leaf.dtype == np.dtype(bool) and any(filled.view(np.uint8).max(initial=0) > 1 for filled in memory):
        raise CheckpointError(
            f"leaf `{leaf.path}`: a boolean in the checkpoint is neither 0 nor 1; the file is damaged."
        )


def _tasks(files: Files, unit: _Unit, memory: list[np.ndarray], how: _How) -> Iterator[Task]:
    for fetch in fetches(unit.leaf, unit.boxes):
        targets = _targets(unit.leaf, fetch, memory)
        entry = fetch.entry
        if isinstance(entry, StoreArray):
            yield ft.partial(stores.read_into, entry, fetch.boxes, targets, missing_chunks=how.missing_chunks)
            continue
        in_place = all(t.dtype == entry.dtype and t.flags.c_contiguous for t in targets)
        for batch in _batches(spans_of(entry, fetch.boxes, in_place, how.gap_bytes)):
            yield ft.partial(files.read, entry, batch, fetch.boxes, targets)


def _targets(leaf: Wanted, fetch: Fetch, memory: list[np.ndarray]) -> list[np.ndarray]:
    """The memory of a fetch's boxes, seen with the dimensions in the order that they have in the checkpoint."""
    targets = []
    for number, layer in fetch.homes:
        filled = memory[number] if layer is None else memory[number][(layer, ...)]
        targets.append(filled if leaf.order is None else filled.transpose(np.argsort(leaf.order)))
    return targets


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    nbytes = 0
    for span in spans:
        batch.append(span)
        # A read costs a call besides its bytes.
        nbytes += span.nbytes + _CALL_BYTES * span.runs
        if nbytes >= RUN_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _assembled(leaf: Wanted, held: dict[Box, tuple[np.ndarray, list[Any]]]) -> jax.Array:
    array = _array(leaf, held)
    return array if leaf.keys is None else keys_from(array, leaf.keys)


def _array(leaf: Wanted, held: dict[Box, tuple[np.ndarray, list[Any]]]) -> jax.Array:
    moved = [array for _, arrays in held.values() for array in arrays]
    if moved:
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, moved)

    def shard(index: Any) -> np.ndarray:
        return held[tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))][0]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard, dtype=leaf.dtype)
