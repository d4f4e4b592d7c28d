"""The reads of a load, as a value, from headers alone."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._convert import TreeMap
from .._ground.boxes import Box, boxes as all_boxes
from .._ground.errors import PlanMismatchError
from .._ground.text import first_lines, html_text, table
from . import _stores as stores
from ._entry import StoreArray
from ._fetches import fetches, gathered_fetches, spans_into
from ._index import Index
from ._reader import GAP_BYTES
from ._wanted import Unread, WantedLeaf, box_bytes, wanted


@dataclasses.dataclass(frozen=True)
class ProcessReads:
    """The reads of one process.

    **Arguments:**

    - `process_index`: the number of the process.
    - `needed_bytes`: the bytes of its shards as the checkpoint stores them, replicas within the process once.
    - `read_bytes`: the bytes that it reads for them (of stores of chunks: the chunks that they touch, uncompressed).
    - `reads`: the number of reads.
    """

    process_index: int
    needed_bytes: int
    read_bytes: int
    reads: int

    @property
    def excess_bytes(self) -> int:
        """Bytes that are read and not needed."""
        return self.read_bytes - self.needed_bytes


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads of a load under a plan, process by process. Made by `plan_reads`."""

    processes: tuple[ProcessReads, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes that all processes need in total."""
        return sum(process.needed_bytes for process in self.processes)

    @property
    def read_bytes(self) -> int:
        """Bytes that all processes read in total."""
        return sum(process.read_bytes for process in self.processes)

    @property
    def excess_bytes(self) -> int:
        """Bytes that all processes in total read and do not need."""
        return self.read_bytes - self.needed_bytes

    def __str__(self) -> str:
        head = ("process", "needed", "read", "in excess", "reads")
        counts = [(p.process_index, p.needed_bytes, p.read_bytes, p.excess_bytes, p.reads) for p in self.processes]
        return "\n".join(table([head, *[tuple([f"{one:,}" for one in row]) for row in counts]], right={*head}))

    __repr__ = first_lines
    _repr_html_ = html_text


def plan_reads(
    index: Index,
    plan: object,
    map: TreeMap | None = None,
    *,
    dtype: object = None,
    unread: Unread = "raise",
    processes: int | None = None,
    gap_bytes: int = GAP_BYTES,
) -> ReadPlan:
    """The reads of `load` under a plan, from headers alone. No weight is read, and no device is needed.

    **Arguments:**

    - `index`, `plan`, `map`, `dtype`, `unread`, `gap_bytes`: as in `load`; the plan need not have devices.
    - `processes`: for a plan without devices: over how many processes its mesh is spread, each with as many devices,
        consecutive in the mesh's order. By default 1. A plan on devices knows.

    **Returns:**

    A `ReadPlan`. Excess bytes are gaps, too short to skip, between the columns that a process needs, and in chunked
    stores the rest of each chunk.

    **Raises:**

    The errors of `load` before it reads; `PlanMismatchError` for a number of processes that does not divide the mesh.

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
    leaves, _ = wanted(index, plan, dtype, map, unread)
    known: dict[object, Mapping[int, tuple[int, int, int]]] = {}
    totals: dict[int, list[int]] = {}
    for leaf in leaves:
        # A model has many leaves of few kinds.
        stored = [(one.dtype, one.shape, one.chunks if isinstance(one, StoreArray) else None) for one in leaf.entries]
        key = (leaf.shape, leaf.sharding, leaf.dtype, *(stored if leaf.pieces is None else [leaf.path]))
        if key not in known:
            known[key] = _reads_of(leaf, processes, gap_bytes)
        for process, counts in known[key].items():
            total = totals.setdefault(process, [0, 0, 0])
            totals[process] = [a + b for a, b in zip(total, counts, strict=True)]
    return ReadPlan(tuple(ProcessReads(process, *totals[process]) for process in sorted(totals)))


def _reads_of(leaf: WantedLeaf, processes: int | None, gap_bytes: int) -> Mapping[int, tuple[int, int, int]]:
    """For each process, the bytes needed, the bytes read, and the number of reads."""
    found = {}
    for process, boxes in _boxes_of(leaf.shape, leaf.sharding, processes).items():
        needed = read = count = 0
        plain, gathered = fetches(leaf, boxes)
        for fetch in [*plain, *gathered_fetches(leaf, gathered)]:
            entry = fetch.entry
            needed += sum(box_bytes(box, entry.dtype) for box in dict.fromkeys(fetch.boxes))
            if isinstance(entry, StoreArray):
                sizes = [(stores.chunk_bytes(entry, box), 1) for box in fetch.boxes]
            else:
                sizes = [(span.nbytes, span.runs) for span in spans_into(entry, fetch, leaf.dtype, gap_bytes)]
            read, count = read + sum(nbytes for nbytes, _ in sizes), count + sum(reads for _, reads in sizes)
        found[process] = (needed, read, count)
    return found


def _boxes_of(shape: tuple[int, ...], sharding: Sharding, processes: int | None) -> dict[int, tuple[Box, ...]]:
    """For each process, the different boxes of an array that its devices hold."""
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    count, size = processes or 1, sharding.num_devices
    if is_abstract and size % count:
        raise PlanMismatchError(
            f"{count} processes cannot each have as many of the {size} devices of the mesh; give a number that "
            "divides it."
        )
    held: dict[int, dict[Box, None]] = {}
    for device, box in all_boxes(sharding, shape).items():
        held.setdefault(device * count // size if is_abstract else device.process_index, {})[box] = None
    return {process: tuple(boxes) for process, boxes in held.items()}
