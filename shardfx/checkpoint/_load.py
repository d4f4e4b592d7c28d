"""Loading: the arrays of a plan, read in parallel and put onto devices shard by shard.

Gaps of fewer than `gap_bytes` bytes between the bytes that this process needs are read
too.
"""

import concurrent.futures
import dataclasses
import functools as ft
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, TypeVar, Unpack, overload

import jax
from jaxtyping import PyTree

from .._convert import TreeMap
from .._ground.boxes import array_of
from .._ground.errors import CheckpointError, LeafTypeError, bytes_or_none
from .._ground.keys import as_keys_of_dtype
from .._ground.misuse import called
from .._ground.spec import DType
from .._plan import ShardPlan
from . import _stores as stores
from ._address import Where
from ._entry import FileArray, StoreArray
from ._files import ChangedError
from ._flight import Flight, Group, Task, Unit, units_of
from ._formats import read_index
from ._index import Index
from ._leaves_to_load import LeafToLoad, Unread, leaves_to_load
from ._numbers import read_scalars
from ._objects import TIMEOUT_SECONDS, ObjectPlace
from ._opening import Reader, open_files
from ._parts import files_of
from ._place import MissingError
from ._reader import COPY_BYTES, RUN_BYTES, Files, Progress, Read, RowBlock, reads_of
from ._reads import fetches, read_piece, spans_into
from ._row_reads import RowReads, row_blocks, rows_of_leaf
from ._spans import grouped
from ._stores import MissingChunks
from ._table import FileTable
from ._tails import Tail, begin_tails, require_no_tails


T = TypeVar("T")
Source = Where | Index

_WORKERS = 8
# They wait for answers.
_STORE_WORKERS = 64
_CALL_BYTES = 8192
# Leaves of arrays below this size are read together, up to this many times the bytes
# of other leaves.
_SMALL_BYTES = 64 * 1024
_SMALL_UNITS = 16
_TRIES = 16
# A file that is missing stays missing, unless a manager has just removed the step.
_TRIES_IF_MISSING = 2


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
    - `read_limit_bytes`: the limit for bytes of requests to a store that are under way.
    - `timeout_seconds`: seconds after which a store without an answer is an error.
    """

    dtype: DType
    memory_limit_bytes: int | None
    gap_bytes: int | None
    missing_chunks: MissingChunks
    unread: Unread
    root: str | os.PathLike[str] | None
    progress: bool | None
    read_limit_bytes: int | None
    timeout_seconds: float


@overload
def load(
    path: Source,
    plan: ShardPlan[T],
    map: TreeMap | None = None,
    **options: Unpack[LoadOptions],
) -> T: ...


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
    path: Source,
    plan: T,
    map: TreeMap | None = None,
    **options: Unpack[LoadOptions],
) -> T: ...


@called("load(path, plan)", strict='`unread="allow"`')
def load(
    path: Source,
    plan: object,
    map: TreeMap | None = None,
    *,
    dtype: object = None,
    memory_limit_bytes: int | None = None,
    gap_bytes: int | None = None,
    missing_chunks: MissingChunks = "raise",
    unread: Unread = "raise",
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    read_limit_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> PyTree:
    """Reads a checkpoint into arrays sharded by a plan; each process reads the bytes of
    its own shards.

    On a CPU the bytes go from the file into the memory of the arrays. Replicas within a
    process are read once. The mesh, the plan and the device count of the save do not
    matter.

    **Arguments:**

    - `path`: the path of a checkpoint; the address of one in a store,
      `gs://bucket/step-100`, `s3://bucket/step-100`, or with
      `?endpoint=https://host` for other servers of S3's kind; a spec of TensorStore;
      or the Index that [`shardfx.checkpoint.read_index`][] made of one of these.
    - `plan`: a [`shardfx.ShardPlan`][] on devices, or a tree of `jax.ShapeDtypeStruct`s
      with shardings, or of arrays whose shardings the loaded arrays get.
    - `map`: a [`shardfx.TreeMap`][] that makes the plan's leaves from the checkpoint's
      arrays, if these have other names, shapes or values. Weights that are scaled, cast
      twice, or scattered element by element take up to 4 MiB per thread beside the
      result.
    - `dtype`: `None`: the checkpoint must have the plan's dtypes. `"plan"`: cast to the
      plan's dtypes on the way. A dtype: cast all floating-point arrays to it.
    - `memory_limit_bytes`: the limit for bytes that are in host memory on their way to
      a device. By default it is 1 GiB or the largest shard, whichever is larger. On a
      CPU the limit has no effect, since bytes are read directly into the memory of the
      arrays.
    - `gap_bytes`: the least number of consecutive bytes that are skipped if no device
      of the process needs them. Shorter gaps are read too. To start a read takes about
      as long as to read 4 KiB from the page cache, so 4096 is faster for columns of
      short rows. On a network file system a start takes longer, so a larger number is
      faster. The default is 64 for files and 256 KiB for stores.
    - `missing_chunks`: the treatment of missing chunks in stores of chunks. `"raise"`:
      an error, since the chunk was lost. `"fill"`: the array's fill value, as zarr
      defines it, for checkpoints whose writer leaves out such chunks.
    - `unread`: the treatment of the checkpoint's arrays and numbers from which no leaf
      is made, such as those of layers that the plan lacks. `"raise"`: an error that
      names them. `"allow"`: they are left out, as are those that `plan.select` left out
      of the plan. A map also states itself which arrays and numbers it drops.
    - `root`: a further directory that symbolic links in the checkpoint may lead to.
    - `progress`: whether to show a progress line on stderr; `None` shows it if stderr
      is a terminal.
    - `read_limit_bytes`: the limit for bytes of requests to a store that are under way,
      by default 1 GiB. More requests at a time are faster where the network is fast.
      Beside the arrays the load takes about this much memory.
    - `timeout_seconds`: seconds after which a store that sends nothing is an error,
      repetitions of failed requests included.

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
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, checkpoint

        tree = {"wi": jnp.ones((64, 8)), "wo": jnp.ones((8, 64))}
        mesh = MeshSpec({"fsdp": 8}).build(jax.devices())
        made = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->fsdp"))
        directory = tempfile.mkdtemp() + "/step-1"
        checkpoint.save(directory, shardfx.shard(tree, made), made)

        columns = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->None.fsdp"))
        again = checkpoint.load(directory, columns)
        assert again["wi"].sharding.spec == P(None, "fsdp")
        ```
    """
    memory_limit_bytes = bytes_or_none("memory_limit_bytes", memory_limit_bytes)
    read_limit_bytes = bytes_or_none("read_limit_bytes", read_limit_bytes)
    gap_bytes = bytes_or_none("gap_bytes", gap_bytes)
    # If a writer replaces a file meanwhile, it is read again from its header on. With
    # several processes, one process alone must not do this: it might load another file
    # than the others.
    tries = _TRIES
    if isinstance(path, Index) or jax.process_count() > 1:
        tries = 1
    for attempt in range(tries):
        try:
            index = _index_of(path, root, timeout_seconds)
            to_load = leaves_to_load(
                index=index,
                plan=plan,
                dtype=dtype,
                map=map,
                unread=unread,
            )
            leaves = to_load.leaves
            # A number that does not fit is an error before anything large is read.
            scalars = read_scalars(index, to_load.scalars, missing_chunks)
            limits = Limits(
                memory_bytes=memory_limit_bytes,
                gap_bytes=index.place.gap_bytes if gap_bytes is None else gap_bytes,
                read_bytes=read_limit_bytes,
            )
            flight = _read(
                index=index,
                leaves=leaves,
                limits=limits,
                missing_chunks=missing_chunks,
                progress=progress,
            )
            arrays = [
                _assembled(flight, number, leaf) for number, leaf in enumerate(leaves)
            ]
            values = {**to_load.numbers, **scalars}
            return to_load.target.filled(arrays, values)
        except (ChangedError, MissingError) as error:
            most_tries = tries
            if isinstance(error, MissingError):
                most_tries = min(tries, _TRIES_IF_MISSING)
            if attempt + 1 >= most_tries:
                # The name of the private class would not say more than the sentence.
                raise CheckpointError(str(error)) from None
    raise AssertionError("the last try returns or raises")


class Limits(NamedTuple):
    """The limits of a load, as its arguments give them: of the bytes on their way to a
    device, of gaps, and of the bytes of requests to a store.
    """

    memory_bytes: int | None
    gap_bytes: int
    read_bytes: int | None


def _index_of(
    path: Source,
    root: str | os.PathLike[str] | None,
    timeout_seconds: float,
) -> Index:
    """The index of the checkpoint that is given to `load`. An index that was made with
    another time-out gets that of this load.
    """
    if not isinstance(path, Index | str | os.PathLike | Mapping):
        raise LeafTypeError(
            f"`path` must be a text, a `pathlib.Path` or an `Index`, not"
            f" {type(path).__name__}; write `load(path, plan)`, the path first."
        )
    if not isinstance(path, Index):
        return read_index(path, root=root, timeout_seconds=timeout_seconds)
    place = path.place
    if not isinstance(place, ObjectPlace) or place.timeout_seconds == timeout_seconds:
        return path
    place = dataclasses.replace(place, timeout_seconds=timeout_seconds)
    return dataclasses.replace(path, place=place)


def _read(
    index: Index,
    leaves: Sequence[LeafToLoad],
    limits: Limits,
    missing_chunks: MissingChunks,
    progress: bool | None,
) -> Flight:
    """Reads the shards of this process in parallel, and returns the finished reads.

    `progress` is whether to show a progress line; `None` shows it if stderr is a
    terminal.
    """
    units, limit_bytes = units_of(leaves, limits.memory_bytes)
    total_bytes = sum(unit.nbytes for unit in units)
    bar = Progress(verb="loading", total_bytes=total_bytes, show=progress)
    cpu_count = os.cpu_count() or 1
    workers = max(2, min(_WORKERS, cpu_count))
    if isinstance(index.place, ObjectPlace):
        workers = _STORE_WORKERS
    names = _files_to_read(index, leaves)
    gap_bytes = limits.gap_bytes
    with open_files(
        place=index.place,
        names=names,
        threads=workers,
        gap_bytes=gap_bytes,
        read_limit_bytes=limits.read_bytes,
    ) as files:
        tasks = ft.partial(_tasks, files, gap_bytes, missing_chunks)
        index.place.require_unchanged()
        # An object that goes on behind its last tensor is damaged.
        tails = _begun_tails(index, names)
        with concurrent.futures.ThreadPoolExecutor(workers, "shardfx-load") as pool:
            flight = Flight(pool, limit_bytes, bar)
            group_bytes = min(limit_bytes, RUN_BYTES)
            try:
                # Small units that follow each other in the file are one task, since
                # each task has a fixed cost.
                for units_of_group in grouped(units, _group_bytes, group_bytes):
                    flight.start(units_of_group, tasks)
                flight.finish()
            finally:
                # After an error, no further read may begin.
                pool.shutdown(wait=True, cancel_futures=True)
        # The chunks of a store have no header of their own.
        index.place.require_unchanged()
        if isinstance(index.place, ObjectPlace):
            require_no_tails(index.place, tails)
    bar.end()
    return flight


def _files_to_read(index: Index, leaves: Sequence[LeafToLoad]) -> list[str]:
    """The files that hold the arrays of the leaves, each once.

    Raises `CheckpointError` for an array of a store of chunks that cannot be read.
    """
    names: dict[str, None] = {}
    in_files: list[FileArray] = []
    in_chunks: list[StoreArray] = []
    for leaf in leaves:
        if isinstance(leaf.entries, FileTable):
            names |= dict.fromkeys(leaf.entries.used_files())
            continue
        for entry in leaf.entries:
            if isinstance(entry, StoreArray):
                in_chunks.append(entry)
            else:
                in_files.append(entry)
    stores.require_possible(in_chunks, index.place)
    return list(names | dict.fromkeys(files_of(in_files)))


def _begun_tails(index: Index, names: Sequence[str]) -> list[Tail]:
    """The started reads of the bytes behind the last tensors of the objects `names`. A
    file on a disk tells its size, so there are none for it, and none for other formats.
    """
    if not isinstance(index.place, ObjectPlace) or index.format != "safetensors":
        return []
    entries = []
    for entry in index.entries:
        if isinstance(entry, FileArray):
            entries.append(entry)
    return begin_tails(index.place, entries, names)


def _group_bytes(unit: Unit) -> int:
    """The bytes that a unit counts in a group. Leaves of many small arrays count less,
    since those of several leaves lie side by side in the file.
    """
    array_count = len(unit.leaf.entries)
    if unit.staging_bytes or unit.nbytes > _SMALL_BYTES * array_count:
        return unit.nbytes
    return unit.nbytes // _SMALL_UNITS


def _tasks(
    files: Reader,
    gap_bytes: int,
    missing_chunks: MissingChunks,
    group: Group,
) -> list[Task]:
    """The functions that read the units of a group, for a pool of threads. A group has
    each unit with the memory of its shards, one array for each box.

    Most arrays are read in spans of bytes by `files`. Chunks of a store, pieces that
    need more than a copy, and small rows of one array are read by functions of their
    own. A group of several small units is read by one function.
    """
    reads: list[Read] = []
    small_rows: list[RowReads] = []
    others: list[Task] = []
    for unit, memory in group:
        boxes = unit.shards.boxes
        rows_and_rest = rows_of_leaf(unit.leaf, boxes, memory)
        for rows in rows_and_rest.reads:
            if rows.are_small and isinstance(files, Files):
                small_rows.append(rows)
            else:
                reads += rows.each()
        leaf = rows_and_rest.leaf_with_rest
        # What is only copied or cast, and pieces that need more than that.
        plain_fetches, gathered_pieces = fetches(leaf, boxes)
        for fetch in plain_fetches:
            entry = fetch.entry
            targets = fetch.targets(memory)
            if isinstance(entry, StoreArray):
                read = ft.partial(
                    stores.read_into, files.place, entry, fetch.boxes, targets
                )
                others.append(ft.partial(read, missing_chunks=missing_chunks))
            else:
                spans = spans_into(entry, fetch, leaf.dtype, gap_bytes)
                reads += reads_of(entry, spans, targets)
        for box_number, piece in gathered_pieces:
            task = ft.partial(
                read_piece,
                files=files,
                leaf=leaf,
                piece=piece,
                box=boxes[box_number],
                memory=memory[box_number],
                gap_bytes=gap_bytes,
                missing_chunks=missing_chunks,
            )
            others.append(task)
    if small_rows and isinstance(files, Files):
        blocks = row_blocks(small_rows, gap_bytes)
        for some_blocks in grouped(blocks, _block_bytes, COPY_BYTES):
            others.append(ft.partial(files.read_rows, some_blocks))
    reads.sort(key=lambda read: (read.entry.file, read.entry.offset))
    if sum(unit.nbytes for unit, _ in group) <= RUN_BYTES and len(group) > 1:
        return [lambda: files.read(reads) + sum(task() for task in others)]
    # A read has a fixed cost beside its bytes.
    batches = grouped(
        reads,
        lambda read: read.span.nbytes + _CALL_BYTES * read.span.runs,
        files.batch_bytes,
    )
    tasks_of_batches = [ft.partial(files.read, batch) for batch in batches]
    return [*tasks_of_batches, *others]


def _block_bytes(block: RowBlock) -> int:
    """The bytes that the read of a block counts in a task."""
    return block.nbytes + _CALL_BYTES


def _assembled(flight: Flight, number: int, leaf: LeafToLoad) -> jax.Array:
    """The array of `leaf`, whose position in the plan is `number`, from the finished
    reads `flight`. Its parts are on devices already, or in host memory that becomes the
    memory of the array.

    Key data becomes an array of PRNG keys.
    """
    if number in flight.on_devices:
        array = jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, flight.on_devices[number]
        )
    else:
        boxes, memory = flight.host_memory[number]
        array = array_of(
            shape=leaf.shape,
            dtype=leaf.dtype,
            sharding=leaf.sharding,
            boxes=boxes,
            memory=memory,
        )
    if leaf.keys is None:
        return array
    return as_keys_of_dtype(array, leaf.keys)
