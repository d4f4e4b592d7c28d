"""What a load would read, counted from headers alone."""

import dataclasses
from collections.abc import Mapping
from typing import SupportsIndex

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._convert import TreeMap
from .._ground.boxes import Box, shard_boxes
from .._ground.errors import (
    LeafTypeError,
    PlanMismatchError,
    bytes_or_none,
    check_type,
    whole_number,
)
from .._ground.misuse import called
from .._ground.text import first_lines, html_text, table
from . import _stores as stores
from ._entry import StoreArray, itemsize
from ._index import Index
from ._leaves_to_load import LeafToLoad, Unread, box_bytes, leaves_to_load
from ._object_reads import ObjectRange, pieces_of, requests_of
from ._objects import ObjectPlace
from ._reader import Read
from ._reads import fetches, gathered_fetches, spans_into


@dataclasses.dataclass(frozen=True)
class ProcessReads:
    """The reads of one process in a load: how many, and of how many bytes.

    **Arguments:**

    - `process_index`: the number of the process.
    - `needed_bytes`: the bytes of the process's shards as the checkpoint stores them;
      replicas count once.
    - `read_bytes`: the bytes that the process reads. Chunks of a store count
      uncompressed.
    - `reads`: the number of reads.
    """

    __module__ = "shardfx.checkpoint"

    process_index: int
    needed_bytes: int
    read_bytes: int
    reads: int

    @property
    def excess_bytes(self) -> int:
        """The bytes that the process reads and does not need."""
        return self.read_bytes - self.needed_bytes


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads of a load under a plan, process by process.
    [`shardfx.checkpoint.plan_reads`][] returns it.
    """

    __module__ = "shardfx.checkpoint"

    processes: tuple[ProcessReads, ...]

    @property
    def needed_bytes(self) -> int:
        """The bytes that all processes need in total."""
        return sum(process.needed_bytes for process in self.processes)

    @property
    def read_bytes(self) -> int:
        """The bytes that all processes read in total."""
        return sum(process.read_bytes for process in self.processes)

    @property
    def excess_bytes(self) -> int:
        """The bytes that all processes read and do not need, in total."""
        return self.read_bytes - self.needed_bytes

    def __str__(self) -> str:
        head = ("process", "needed", "read", "in excess", "reads")
        rows: list[tuple[str, ...]] = [head]
        for process in self.processes:
            counts = (
                process.process_index,
                process.needed_bytes,
                process.read_bytes,
                process.excess_bytes,
                process.reads,
            )
            rows.append(tuple([f"{count:,}" for count in counts]))
        return "\n".join(table(rows, right=set(head)))

    __repr__ = first_lines
    _repr_html_ = html_text


@called("plan_reads(index, plan)")
def plan_reads(
    index: Index,
    plan: object,
    map: TreeMap | None = None,
    *,
    dtype: object = None,
    unread: Unread = "raise",
    processes: SupportsIndex | None = None,
    gap_bytes: int | None = None,
) -> ReadPlan:
    """The reads of `load` under a plan, from headers alone. No weight is read, and no
    device is needed.

    **Arguments:**

    - `index`: the checkpoint.
    - `plan`: a plan, or a tree of `jax.ShapeDtypeStruct`s with shardings, with or
      without devices.
    - `map`: a map that makes the plan's leaves from the checkpoint's arrays, if the
      load has one.
    - `dtype`: the casts of the load: `None`, `"plan"` or a dtype, as for
      [`shardfx.checkpoint.load`][].
    - `unread`: `"raise"` an error for stored arrays from which no leaf is made, or
      `"allow"` them.
    - `gap_bytes`: the least number of consecutive bytes that the load skips if the
      process does not need them; `None` for the default of `load`.
    - `processes`: for a plan without devices, the number of processes, by default 1.
      Each gets equally many devices, consecutive in the mesh's order. For a plan on
      devices, the processes are those of its devices.

    **Returns:**

    A `ReadPlan`. Its excess bytes are read and not needed. In a file, they are gaps
    that are too short to skip, such as those between the columns that a process needs.
    In a store, ranges of several arrays in one object may be one read.
    In a store of chunks, they are the rest of each chunk.

    **Raises:**

    The errors that `load` raises before it reads an array. `LeafTypeError` if
    `processes` is no whole number; `PlanMismatchError` if it is smaller than 1, or does
    not divide the number of devices of the mesh.

    !!! Example

        ```python
        import tempfile
        import numpy as np
        from safetensors.numpy import save_file
        import shardfx
        from shardfx import MeshSpec, PathRules, checkpoint

        directory = tempfile.mkdtemp()
        save_file({"w": np.ones((64, 64), np.float32)}, f"{directory}/model.safetensors")
        index = checkpoint.read_index(directory)
        made = shardfx.plan(
            checkpoint.structs(index), MeshSpec({"fsdp": 8}), paths=PathRules.parse("w->fsdp")
        )
        reads = checkpoint.plan_reads(index, made, processes=4)
        assert [process.read_bytes for process in reads.processes] == [4096] * 4
        ```
    """
    fix = "write `plan_reads(read_index(path), plan)`"
    check_type(
        what="index",
        value=index,
        expected=Index,
        error=LeafTypeError,
        fix=fix,
    )
    process_count = _count_of(processes)
    gap_bytes = bytes_or_none("gap_bytes", gap_bytes)
    if gap_bytes is None:
        gap_bytes = index.place.gap_bytes
    to_load = leaves_to_load(
        index=index,
        plan=plan,
        dtype=dtype,
        map=map,
        unread=unread,
    )
    reads_by_kind: dict[object, Mapping[int, _Reads]] = {}
    totals: dict[int, _Reads] = {}
    is_store = isinstance(index.place, ObjectPlace)
    for leaf in to_load.leaves:
        # A model has many leaves of few kinds. In a store, where they lie counts, too.
        kind = leaf.path if is_store else _kind_of(leaf)
        if kind not in reads_by_kind:
            reads_by_kind[kind] = _reads_of(leaf, process_count, gap_bytes, is_store)
        for process, reads in reads_by_kind[kind].items():
            total = totals.setdefault(process, _Reads())
            total.needed_bytes += reads.needed_bytes
            total.read_bytes += reads.read_bytes
            total.count += reads.count
            total.pieces += reads.pieces
    for total in totals.values():
        # In a store, the byte ranges of all leaves are put together to requests.
        for request in requests_of(total.pieces, gap_bytes):
            total.read_bytes += request.nbytes
            total.count += 1
        # Each process reads the Python numbers.
        for scalar in to_load.scalars:
            nbytes = itemsize(scalar.entry.dtype)
            total.needed_bytes += nbytes
            total.read_bytes += nbytes
            total.count += 1
    reads_of_processes = []
    for process in sorted(totals):
        total = totals[process]
        process_reads = ProcessReads(
            process_index=process,
            needed_bytes=total.needed_bytes,
            read_bytes=total.read_bytes,
            reads=total.count,
        )
        reads_of_processes.append(process_reads)
    return ReadPlan(tuple(reads_of_processes))


@dataclasses.dataclass
class _Reads:
    """The reads of one process, of one leaf or of all.

    - `needed_bytes`, `read_bytes`: the bytes that it needs, and those that it reads.
    - `count`: the number of reads.
    - `pieces`: in a store, the ranges of bytes to read. They become requests when all
      are known, and are not in the other numbers before.
    """

    needed_bytes: int = 0
    read_bytes: int = 0
    count: int = 0
    pieces: list[ObjectRange] = dataclasses.field(default_factory=list)


def _count_of(processes: SupportsIndex | None) -> int:
    """The argument `processes` of `plan_reads` as an int, 1 for `None`. Raises
    `LeafTypeError` if it is no whole number, and `PlanMismatchError` if it is smaller
    than 1.
    """
    if processes is None:
        return 1
    fix = "give 1 or more, such as `processes=jax.process_count()`"
    count = whole_number(processes)
    if count is None:
        raise LeafTypeError(
            f"`processes` must be a whole number, not {processes!r:.80} of type"
            f" {type(processes).__name__}; {fix}."
        )
    if count < 1:
        raise PlanMismatchError(
            f"`processes={count}` is no number of processes; {fix}."
        )
    return count


def _kind_of(leaf: LeafToLoad) -> tuple[object, ...]:
    """A value that leaves share if the same bytes of their arrays are read."""
    # What a map reads depends on its pieces, so such a leaf is of its own kind.
    if leaf.pieces is not None:
        return (leaf.shape, leaf.sharding, leaf.dtype, leaf.path)
    stored = []
    for entry in leaf.entries:
        chunks = None
        if isinstance(entry, StoreArray):
            chunks = entry.chunks
        stored.append((entry.dtype, entry.shape, chunks))
    return (leaf.shape, leaf.sharding, leaf.dtype, *stored)


def _reads_of(
    leaf: LeafToLoad,
    process_count: int,
    gap_bytes: int,
    is_store: bool,
) -> Mapping[int, _Reads]:
    """The reads of a leaf by the number of each process. A mesh without devices is
    divided among `process_count` processes. If `is_store`, the files are objects.
    """
    reads_by_process = {}
    boxes_by_process = _boxes_of(leaf.shape, leaf.sharding, process_count)
    for process, boxes in boxes_by_process.items():
        reads = _Reads()
        reads_by_process[process] = reads
        # What is only copied or cast, and pieces that need more than that.
        plain_fetches, gathered_pieces = fetches(leaf, boxes)
        other_fetches = gathered_fetches(leaf, gathered_pieces)
        for fetch in [*plain_fetches, *other_fetches]:
            entry = fetch.entry
            for box in dict.fromkeys(fetch.boxes):
                reads.needed_bytes += box_bytes(box, entry.dtype)
            if isinstance(entry, StoreArray):
                reads.count += len(fetch.boxes)
                for box in fetch.boxes:
                    reads.read_bytes += stores.chunk_bytes(entry, box)
                continue
            for span in spans_into(entry, fetch, leaf.dtype, gap_bytes):
                if is_store:
                    # An array of this size that takes no memory.
                    memory = np.broadcast_to(np.uint8(0), span.nbytes)
                    read = Read(entry=entry, span=span, targets=())
                    reads.pieces += pieces_of(read, [memory])
                    continue
                reads.read_bytes += span.nbytes
                reads.count += span.runs
    return reads_by_process


def _boxes_of(
    shape: tuple[int, ...],
    sharding: Sharding,
    process_count: int,
) -> dict[int, tuple[Box, ...]]:
    """By the number of each process, the different boxes of an array that the process's
    devices hold. `process_count` is ignored if the sharding has devices.
    """
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(
        sharding.mesh, AbstractMesh
    )
    device_count = sharding.num_devices
    if is_abstract and device_count % process_count:
        raise PlanMismatchError(
            f"{process_count} processes cannot each have as many of the {device_count}"
            " devices of the mesh; give a number that divides it."
        )
    boxes_by_process: dict[int, dict[Box, None]] = {}
    for device, box in shard_boxes(sharding, shape).items():
        if is_abstract:
            # A device of an abstract mesh is its number.
            process = device * process_count // device_count
        else:
            process = device.process_index
        boxes_by_process.setdefault(process, {})[box] = None
    result = {}
    for process, boxes in boxes_by_process.items():
        result[process] = tuple(boxes)
    return result
