"""Loading: the arrays of a plan, read in parallel and put onto devices shard by shard.

Gaps of fewer than `gap_bytes` bytes between the bytes that this process needs are read
too.
"""

import collections
import concurrent.futures
import functools as ft
import itertools as it
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from .._convert import TreeMap
from .._ground.boxes import Box, array_of, boxes_here
from .._ground.copying import buffers
from .._ground.errors import CheckpointError, PlanMismatchError
from .._ground.spec import DType
from .._ground.text import printable
from .._plan import ShardPlan
from . import _stores as stores
from ._entry import FileArray, StoreArray
from ._files import ChangedError, require_seen_unchanged
from ._index import Index, read_index
from ._leaves_to_load import LeafToLoad, Unread, box_bytes, leaves_to_load
from ._metadata import implementation
from ._numbers import read_scalars
from ._reader import (
    GAP_BYTES,
    RUN_BYTES,
    Files,
    Progress,
    Read,
    memory_to_fill,
    open_files,
)
from ._reads import fetches, read_piece, spans_into
from ._spans import grouped
from ._stores import MissingChunks


T = TypeVar("T")
Source = str | os.PathLike[str] | Index

_STAGING_BYTES = 2**30
_WORKERS = 8
_CALL_BYTES = 8192
_TRIES = 16


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load`, whose docstring explains them in full.

    - `dtype`: the casts: `None` for none, `"plan"` to the plan's dtypes, or a dtype for
      all floating-point arrays.
    - `memory_limit_bytes`: the limit for bytes in host memory on their way to a device;
      `None` for the default.
    - `gap_bytes`: the least number of consecutive bytes that are skipped if no device
      needs them.
    - `missing_chunks`: `"raise"` an error for a missing chunk of a store, or `"fill"`
      it with the array's fill value.
    - `unread`: `"raise"` an error for stored arrays from which no leaf is made, or
      `"allow"` them.
    - `root`: a further directory that symbolic links in the checkpoint may lead to.
    - `progress`: whether to show a progress line; `None` shows it if stderr is a
      terminal.
    """

    dtype: DType
    memory_limit_bytes: int | None
    gap_bytes: int
    missing_chunks: MissingChunks
    unread: Unread
    root: str | os.PathLike[str] | None
    progress: bool | None


@overload
def load(
    path: Source,
    plan: ShardPlan,
    map: TreeMap | None = None,
    **options: Unpack[LoadOptions],
) -> PyTree: ...


@overload
def load(
    path: Source,
    plan: jax.ShapeDtypeStruct,
    map: TreeMap | None = None,
    **options: Unpack[LoadOptions],
) -> jax.Array: ...


@overload
def load(
    path: Source,
    plan: dict[str, jax.ShapeDtypeStruct],
    map: TreeMap | None = None,
    **options: Unpack[LoadOptions],
) -> dict[str, jax.Array]: ...


@overload
def load(
    path: Source, plan: T, map: TreeMap | None = None, **options: Unpack[LoadOptions]
) -> T: ...


def load(
    path: Source,
    plan: object,
    map: TreeMap | None = None,
    *,
    dtype: object = None,
    memory_limit_bytes: int | None = None,
    gap_bytes: int = GAP_BYTES,
    missing_chunks: MissingChunks = "raise",
    unread: Unread = "raise",
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> PyTree:
    """Reads a checkpoint into arrays sharded by a plan; each process reads the bytes of
    its own shards.

    On a CPU the bytes go from the file into the memory of the arrays. Replicas within a
    process are read once. The mesh, the plan and the device count of the save do not
    matter.

    **Arguments:**

    - `path`: the path of a checkpoint, or the Index that
      [`shardfx.checkpoint.read_index`][] made of it.
    - `plan`: a [`shardfx.ShardPlan`][] on devices, or a tree of `jax.ShapeDtypeStruct`s
      with shardings, or of arrays
        whose shardings the loaded arrays get.
    - `map`: a [`shardfx.TreeMap`][] that makes the plan's leaves from the checkpoint's
      arrays, if these have other
        names, shapes or values. Weights that are scaled, cast twice, or scattered
        element by element take up to 4 MiB per thread beside the result.
    - `dtype`: `None`: the checkpoint must have the plan's dtypes. `"plan"`: cast to the
      plan's dtypes on the way. A
        dtype: cast all floating-point arrays to it.
    - `memory_limit_bytes`: the limit for bytes that are in host memory on their way to
      a device. By default it is
        1 GiB or the largest shard, whichever is larger. On a CPU the limit has no
        effect, since bytes are read directly into the memory of the arrays.
    - `gap_bytes`: the least number of consecutive bytes that are skipped if no device
      of the process needs them.
        Shorter gaps are read too. To start a read takes about as long as to read 4 KiB
        from the page cache, so 4096 is faster for columns of short rows. On a network
        file system a start takes longer, so a larger number is faster.
    - `missing_chunks`: the treatment of missing chunks in stores of chunks. `"raise"`:
      an error, since the chunk was
        lost. `"fill"`: the array's fill value, as zarr defines it, for checkpoints
        whose writer leaves out such chunks.
    - `unread`: the treatment of the checkpoint's arrays and numbers from which no leaf
      is made, such as those of layers that the
        plan lacks. `"raise"`: an error that names them. `"allow"`: they are left out, as
        are those that `plan.select` left out of the plan. A map also states itself
        which arrays and numbers it drops.
    - `root`: a further directory that symbolic links in the checkpoint may lead to.
    - `progress`: whether to show a progress line on stderr; `None` shows it if stderr
      is a terminal.

    **Returns:**

    A tree of the plan's structure. A Python number, such as a step counter, is the
    checkpoint's, from its metadata or from an array of rank 0. Other leaves, such as
    activation functions, are those of the given tree. For a ShardPlan they are `None`,
    and `equinox.combine(loaded, model)` takes them from a model.

    **Raises:**

    Before an array is read: `MapError` with all problems of a map that does not fit.
    `CheckpointError` with every leaf that the checkpoint lacks or has with another
    shape or dtype; with the arrays and numbers from which no leaf is made, unless
    `unread` allows them; for a number that the leaf's type does not hold exactly; or
    for a memory limit below the largest shard.

    Later: `CheckpointError` for a file that is truncated, missing, or changed since its
    header was read, and for a cast from or to an integer dtype that would change a
    value, unless the map states the cast.

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
    # If a writer replaces a file meanwhile, it is read again from its header on. With
    # several processes, one process alone must not do this: it might load another file
    # than the others.
    tries = 1 if isinstance(path, Index) or jax.process_count() > 1 else _TRIES
    for left in reversed(range(tries)):
        try:
            index = path if isinstance(path, Index) else read_index(path, root=root)
            to_load = leaves_to_load(index, plan, dtype, map, unread)
            leaves = to_load.leaves
            # A number that does not fit is an error before anything large is read.
            scalars = read_scalars(index, to_load.scalars, missing_chunks)
            landed = _read(
                index, leaves, memory_limit_bytes, gap_bytes, missing_chunks, progress
            )
            arrays = [
                _assembled(landed, number, leaf) for number, leaf in enumerate(leaves)
            ]
            return to_load.target.filled(arrays, {**to_load.numbers, **scalars})
        except ChangedError as error:
            if not left:
                # The name of the private class would not say more than the sentence.
                raise CheckpointError(str(error)) from None
    raise AssertionError("the last try returns or raises")


def is_on_cpu(sharding: Sharding) -> bool:
    """Whether all devices of a sharding are CPUs. A load then reads shards directly
    into the memory of the array.
    """
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def moved(
    filled: np.ndarray, devices: Sequence[object], sharding: Sharding
) -> list[Any]:
    """Copies one shard from host memory to each of `devices`, and returns the
    single-device arrays.

    They get the memory kind of `sharding`, the sharding of the whole array.
    """
    kind = sharding.memory_kind
    return [
        jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind))
        for device in devices
    ]


class Kind(NamedTuple):
    """The shards of a leaf that this process loads. Leaves with equal shape, dtype and
    sharding share one `Kind`.

    **Arguments:**

    - `boxes`: the boxes of this process's shards.
    - `devices`: for each box, the devices that hold it.
    - `shapes`, `sizes`: for each box, its shape and its bytes.
    - `is_on_cpu`: whether the bytes are read directly into the memory of the array,
      without a copy to a device.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    is_on_cpu: bool


class Unit(NamedTuple):
    """The boxes of one leaf that are loaded together. For a leaf that exceeds the
    memory limit, a unit has one box.

    **Arguments:**

    - `number`: the position of the leaf in the plan.
    - `leaf`, `kind`: the leaf, and the boxes to load.
    - `nbytes`: the number of bytes of the boxes.
    """

    number: int
    leaf: LeafToLoad
    kind: Kind
    nbytes: int

    @property
    def staging_bytes(self) -> int:
        """The bytes of host memory that the boxes occupy until they are copied to
        devices; 0 on CPUs.
        """
        return 0 if self.kind.is_on_cpu else self.nbytes


def units_of(
    leaves: Sequence[LeafToLoad], asked_limit: int | None
) -> tuple[list[Unit], int]:
    """The units of all leaves, in the order of their positions in the files, and the
    memory limit in bytes.

    `asked_limit` is the limit that the caller of `load` gave, if any. Raises
    `CheckpointError` if a shard exceeds it.
    """
    known: dict[object, Kind] = {}
    whole = [_unit(number, leaf, known) for number, leaf in enumerate(leaves)]
    staged = [
        (max(unit.kind.sizes, default=0), unit.leaf.path)
        for unit in whole
        if not unit.kind.is_on_cpu
    ]
    largest, path = max(staged, default=(0, ""))
    if asked_limit is not None and asked_limit < largest:
        raise CheckpointError(
            f"`memory_limit_bytes={asked_limit}` is less than one shard of leaf"
            f" `{path}`, {largest} bytes; allow at least that, or cut the leaf over"
            " more devices."
        )
    limit = max(_STAGING_BYTES, largest) if asked_limit is None else asked_limit
    units = []
    for unit in sorted(
        whole, key=lambda unit: [_position(entry) for entry in unit.leaf.entries[:1]]
    ):
        if unit.staging_bytes <= limit:
            units.append(unit)
            continue
        for box, devices, shape, nbytes in zip(*unit.kind[:4], strict=True):
            units.append(
                unit._replace(
                    kind=Kind((box,), (devices,), (shape,), (nbytes,), False),
                    nbytes=nbytes,
                )
            )
    return units, limit


def _position(entry: FileArray | StoreArray) -> tuple[str, int]:
    return entry.file, entry.offset if isinstance(entry, FileArray) else 0


def _unit(number: int, leaf: LeafToLoad, known: dict[object, Kind]) -> Unit:
    key = (leaf.shape, leaf.dtype, leaf.sharding)
    kind = known.get(key)
    if kind is None:
        if isinstance(leaf.sharding, NamedSharding) and isinstance(
            leaf.sharding.mesh, AbstractMesh
        ):
            raise PlanMismatchError(
                "the plan has no devices, so there is nowhere to load to; put it on"
                " some: `plan.on(plan.mesh.build(jax.devices()))`."
            )
        holders: dict[Box, tuple[Any, ...]] = {}
        for device, box in boxes_here(leaf.sharding, leaf.shape).items():
            holders[box] = (*holders.get(box, ()), device)
        shapes = tuple(tuple(stop - start for start, stop in box) for box in holders)
        sizes = tuple(box_bytes(box, leaf.dtype) for box in holders)
        kind = known[key] = Kind(
            tuple(holders),
            tuple(holders.values()),
            shapes,
            sizes,
            is_on_cpu(leaf.sharding),
        )
    return Unit(number, leaf, kind, sum(kind.sizes))


# Reads some bytes, and returns their number.
Task = Callable[[], int]
# Units that are read at once, and the memory of the boxes of each.
Group = list[tuple[Unit, list[np.ndarray]]]


class Flight:
    """The reads of a load that are in progress. A limit bounds the bytes in host memory
    that are not yet on devices.

    `filled` maps the position of a leaf on CPUs to its boxes and their memory. `placed`
    maps the position of any other leaf to its arrays on single devices. Positions are
    those in the plan.

    **Arguments:**

    - `pool`: the threads that read.
    - `limit`: the limit in bytes.
    - `bar`: the progress line.
    """

    def __init__(self, pool: concurrent.futures.Executor, limit: int, bar: Progress):
        self._pool, self._limit, self._bar = pool, limit, bar
        self._open = collections.deque[
            tuple[Group, int, list[concurrent.futures.Future[int]]]
        ]()
        self._staging_bytes = 0
        self.filled: dict[int, tuple[tuple[Box, ...], list[np.ndarray]]] = {}
        self.placed: dict[int, list[jax.Array]] = {}

    def admit(
        self, units: Sequence[Unit], tasks_of: Callable[[Group], Sequence[Task]]
    ) -> None:
        """Waits until `units` fit into the memory limit, and starts the reads that
        `tasks_of` makes for them.
        """
        coming = sum(unit.staging_bytes for unit in units)
        while self._open and self._staging_bytes + coming > self._limit:
            self._land_first()
        wanted = [
            (shape, unit.leaf.dtype) for unit in units for shape in unit.kind.shapes
        ]
        # Large values get separate blocks: `malloc` serves blocks below 32 MiB from
        # memory that was touched before.
        together = [wanted] if len(units) > 1 else [[one] for one in wanted]
        memory = iter(
            [one for some in together for one in buffers(some, memory_to_fill)]
        )
        group = [
            (unit, list(it.islice(memory, len(unit.kind.boxes)))) for unit in units
        ]
        self._staging_bytes += coming
        self._open.append(
            (group, coming, [self._pool.submit(task) for task in tasks_of(group)])
        )

    def land(self) -> None:
        """Waits until all reads are finished."""
        while self._open:
            self._land_first()

    def _land_first(self) -> None:
        group, staging_bytes, tasks = self._open.popleft()
        for task in tasks:
            self._bar.advance(task.result())
        on_devices = []
        for unit, memory in group:
            if unit.leaf.dtype.kind == "b" and any(
                filled.view(np.uint8).max(initial=0) > 1 for filled in memory
            ):
                raise CheckpointError(
                    f"leaf `{printable(unit.leaf.path)}`: a boolean in the checkpoint"
                    " is neither 0 nor 1; the file is damaged."
                )
            if unit.kind.is_on_cpu:
                self.filled[unit.number] = (unit.kind.boxes, memory)
                continue
            # This memory is temporary: it must be free before more is admitted.
            for filled, devices in zip(memory, unit.kind.devices, strict=True):
                on_devices += (placed := moved(filled, devices, unit.leaf.sharding))
                self.placed.setdefault(unit.number, []).extend(placed)
        jax.block_until_ready(on_devices)
        self._staging_bytes -= staging_bytes


def _read(
    index: Index,
    leaves: Sequence[LeafToLoad],
    memory_limit_bytes: int | None,
    gap_bytes: int,
    missing_chunks: MissingChunks,
    progress: bool | None,
) -> Flight:
    """Reads the shards of this process in parallel, and returns the finished reads.

    `progress` is whether to show a progress line; `None` shows it if stderr is a
    terminal.
    """
    units, limit = units_of(leaves, memory_limit_bytes)
    bar = Progress("loading", sum(unit.nbytes for unit in units), progress)
    workers = max(2, min(_WORKERS, os.cpu_count() or 1))
    entries = [entry for leaf in leaves for entry in leaf.entries]
    stores.require_possible(
        [entry for entry in entries if isinstance(entry, StoreArray)], index.place
    )
    names = dict.fromkeys(
        entry.file for entry in entries if isinstance(entry, FileArray)
    )
    with open_files(index.place, names, workers) as files:
        tasks = ft.partial(_tasks, files, gap_bytes, missing_chunks)
        require_seen_unchanged(index.place)
        with concurrent.futures.ThreadPoolExecutor(workers, "shardfx-load") as pool:
            flight = Flight(pool, limit, bar)
            try:
                # Small units that follow each other in the file are one task, since
                # each task has a fixed cost.
                for units_of_group in grouped(
                    units, lambda unit: unit.nbytes, min(limit, RUN_BYTES)
                ):
                    flight.admit(units_of_group, tasks)
                flight.land()
            finally:
                # After an error, no further read may begin.
                pool.shutdown(wait=True, cancel_futures=True)
        # The chunks of a store have no header of their own.
        require_seen_unchanged(index.place)
    bar.end()
    return flight


def _tasks(
    files: Files, gap_bytes: int, missing_chunks: MissingChunks, group: Group
) -> list[Task]:
    """The functions that read the units of a group, for a pool of threads.

    A group of several units is small, and is read by one function.
    """
    reads: list[Read] = []
    others: list[Task] = []
    for unit, memory in group:
        leaf, boxes = unit.leaf, unit.kind.boxes
        found, gathered = fetches(leaf, boxes)
        for fetch in found:
            entry, targets = fetch.entry, fetch.targets(memory)
            if isinstance(entry, StoreArray):
                read = ft.partial(stores.read_into, entry, fetch.boxes, targets)
                others.append(ft.partial(read, missing_chunks=missing_chunks))
            else:
                reads += [
                    Read(entry, span, targets)
                    for span in spans_into(entry, fetch, leaf.dtype, gap_bytes)
                ]
        for number, piece in gathered:
            given = (
                files,
                leaf,
                piece,
                boxes[number],
                memory[number],
                gap_bytes,
                missing_chunks,
            )
            others.append(ft.partial(read_piece, *given))
    if len(group) > 1:
        return [lambda: files.read(reads) + sum(task() for task in others)]
    reads.sort(key=lambda read: _position(read.entry))
    # A read has a fixed cost beside its bytes.
    batches = grouped(
        reads, lambda read: read.span.nbytes + _CALL_BYTES * read.span.runs, RUN_BYTES
    )
    return [*[ft.partial(files.read, batch) for batch in batches], *others]


def _assembled(landed: Flight, number: int, leaf: LeafToLoad) -> jax.Array:
    """The array of `leaf`, whose position in the plan is `number`, from the finished
    reads `landed`.

    Key data becomes an array of PRNG keys.
    """
    if number in landed.placed:
        array = jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, landed.placed[number]
        )
    else:
        array = array_of(leaf.shape, leaf.dtype, leaf.sharding, *landed.filled[number])
    return (
        array
        if leaf.keys is None
        else jax.random.wrap_key_data(array, impl=implementation(leaf.keys))
    )
