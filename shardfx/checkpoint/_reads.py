"""The reads that fill the leaves of a plan: the boxes of stored arrays, their positions
in a leaf's memory, and counts of their bytes from headers alone.

A part of a leaf that a map scales, casts twice or fills with a constant is read as a
piece, through temporary memory. Gaps of fewer than `gap_bytes` bytes between needed
bytes of a file are read too. `processes` is the number of processes for a plan or
sharding without devices.
"""

import dataclasses
import itertools as it
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._convert import (
    Piece,
    StridedBox,
    TreeMap,
    box_view,
    chunks,
    fill,
    from_start,
    hull,
    is_only,
    scale_box,
    shifted,
    strided_boxes,
    strides_of,
    swapped,
    within,
)
from .._ground.boxes import Box, shard_boxes
from .._ground.errors import PlanMismatchError
from .._ground.text import first_lines, html_text, table
from . import _stores as stores
from ._entry import FileArray, StoreArray, itemsize, may_change
from ._index import Index
from ._leaves_to_load import LeafToLoad, Unread, box_bytes, leaves_to_load
from ._opening import Reader
from ._packed import is_packed, raw_box, raw_entry, unpacked
from ._reader import COPY_BYTES, Read, spans_of
from ._spans import Span
from ._stores import MissingChunks


# A piece that consists of more boxes than this is read as a whole and divided in
# memory.
_MOST_BOXES = 512
# The number of a box of a leaf, and the part of that box's memory that is read into.
Destination = tuple[int, StridedBox]
# The number of a box of a leaf, and a piece inside of it that `read_piece` reads.
NumberedPiece = tuple[int, Piece]


class Fetch(NamedTuple):
    """Boxes to read from one stored array, and their positions in the memory of a leaf.

    A process loads one or more boxes of a leaf, and has memory for each of them.

    **Arguments:**

    - `entry`: the stored array.
    - `boxes`: the boxes of the stored array.
    - `places`: for each of `boxes`, the number of a box of the leaf, and the part of
      its memory that is filled. `None`
        if the leaf is the stored array: `boxes` are then the boxes of the leaf.
    """

    entry: FileArray | StoreArray
    boxes: Sequence[Box]
    places: Sequence[Destination] | None

    def targets(self, memory: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """For each of `boxes`, a view of the memory that it is read into.

        `memory` has an array for each box of the leaf that the process loads.
        """
        return (
            memory
            if self.places is None
            else [box_view(memory[number], place) for number, place in self.places]
        )


def spans_into(
    entry: FileArray, fetch: Fetch, dtype: object, gap_bytes: int
) -> tuple[Span, ...]:
    """The spans of the stored array `entry` to read for `fetch`. Their values go to
    memory of dtype `dtype`.
    """
    in_place = dtype == entry.dtype and (
        fetch.places is None or all(map(_is_in_place, fetch.places))
    )
    return spans_of(
        entry.shape, entry.dtype.itemsize, tuple(fetch.boxes), in_place, gap_bytes
    )


def _is_in_place(place: Destination) -> bool:
    """Whether the elements of a box have the same order at their destination as in the
    file.
    """
    sizes = [stop - start for start, stop in place[1].source]
    pairs = zip(sizes, place[1].strides, strides_of(sizes), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def fetches(
    leaf: LeafToLoad, boxes: Sequence[Box]
) -> tuple[list[Fetch], list[NumberedPiece]]:
    """The reads that fill `boxes` of a leaf, and the pieces that `read_piece` must read
    instead.

    Such a piece needs more than a copy: it is scaled, cast twice or constant, or
    consists of very many small boxes.
    """
    if leaf.pieces is None:
        return [Fetch(leaf.entries[0], boxes, None)], []
    entries = {entry.path: entry for entry in leaf.entries}
    places: dict[str, list[Destination]] = {}
    gathered = []
    known: dict[object, list[tuple[StridedBox, ...] | Piece]] = {}
    strides = [strides_of([stop - start for start, stop in box]) for box in boxes]
    reaches = np.array([hull(piece) for piece in leaf.pieces], int).reshape(
        len(leaf.pieces), len(leaf.shape), 2
    )
    ends = np.array(boxes, int).reshape(len(boxes), 1, len(leaf.shape), 2)
    overlaps = np.maximum(reaches[..., 0], ends[..., 0]) < np.minimum(
        reaches[..., 1], ends[..., 1]
    )
    for number, box in enumerate(boxes):
        for at in np.flatnonzero(overlaps[number].all(-1)):
            piece = leaf.pieces[at]
            is_plain = _is_plain(piece, leaf, entries)
            # The layers of a stack differ only in their position.
            by = from_start(piece, box)
            first = shifted(piece, [-more for more in by])
            key = (number, first.source, first.target, first.factors, is_plain)
            if key not in known:
                known[key] = list(_parts_in(first, box, is_plain))
            offset = sum(
                more * stride for more, stride in zip(by, strides[number], strict=True)
            )
            for part in known[key]:
                if isinstance(part, Piece):
                    gathered.append(
                        (number, shifted(part, by)._replace(value=piece.value))
                    )
                    continue
                own = places.setdefault(str(piece.value.path), [])
                own += [
                    (number, StridedBox(one.source, one.offset + offset, one.strides))
                    for one in part
                ]
    return [
        Fetch(entries[path], [one.source for _, one in own], own)
        for path, own in places.items()
    ], gathered


def _parts_in(
    piece: Piece, box: Box, is_plain: bool
) -> Iterator[tuple[StridedBox, ...] | Piece]:
    """Yields the parts of a piece that are inside a box of the leaf.

    If `is_plain`, elements are only copied, and a part is a tuple of boxes of the
    stored array with their positions in memory. Otherwise, or if there are too many
    boxes, a part is a piece.
    """
    for part in within(piece, box):
        few = (
            tuple(it.islice(strided_boxes(part, box), _MOST_BOXES + 1))
            if is_plain
            else ()
        )
        yield few if 0 < len(few) <= _MOST_BOXES else part


def _is_plain(
    piece: Piece, leaf: LeafToLoad, entries: Mapping[str, FileArray | StoreArray]
) -> bool:
    """Whether a piece writes values of the file unchanged, or cast once to the leaf's
    dtype.

    The result is `False` for a cast that the map states and that may change values,
    since `read_piece` alone accepts changed values. `entries` are the stored arrays by
    path.
    """
    value = piece.value
    if (
        value.path is None
        or value.scale is not None
        or not is_only(value.casts, leaf.dtype)
        or is_packed(entries[value.path])
    ):
        return False
    return not (
        leaf.is_cast_by_map
        and value.casts
        and may_change(entries[value.path].dtype, leaf.dtype)
    )


def read_piece(
    files: Reader,
    leaf: LeafToLoad,
    piece: Piece,
    box: Box,
    memory: np.ndarray,
    gap_bytes: int,
    missing_chunks: MissingChunks,
) -> int:
    """Reads a piece into temporary memory, and writes it into `memory`, which holds
    `box` of the leaf.

    The piece's scales and casts are applied in between. Returns the number of bytes
    read.
    """
    entries = {entry.path: entry for entry in leaf.entries}
    read_bytes = 0

    def read_raw(entry: FileArray, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """The elements of a box of a packed tensor, and the bytes that hold them."""
        raw, rows = raw_entry(entry), raw_box(entry, box)
        packed = np.empty([stop - start for start, stop in rows], np.uint8)
        spans = spans_of(raw.shape, 1, (rows,), True, gap_bytes)
        files.read([Read(raw, span, [packed]) for span in spans])
        return unpacked(packed, entry, box), packed

    def read(path: str, box: Box) -> np.ndarray:
        nonlocal read_bytes
        entry = entries[path]
        if isinstance(entry, FileArray) and is_packed(entry):
            raw, packed = read_raw(entry, box)
            read_bytes += packed.nbytes
            return raw
        scratch = np.empty([stop - start for start, stop in box], entry.dtype)
        if isinstance(entry, StoreArray):
            read_bytes += stores.read_into(
                files.where, entry, (box,), [scratch], missing_chunks=missing_chunks
            )
        else:
            spans = spans_of(entry.shape, entry.dtype.itemsize, (box,), True, gap_bytes)
            read_bytes += files.read([Read(entry, span, [scratch]) for span in spans])
        return scratch

    for part in _chunks(piece, entries):
        fill(memory, box, part, read)
    return read_bytes


def _chunks(
    piece: Piece, entries: Mapping[str, FileArray | StoreArray]
) -> Sequence[Piece]:
    if piece.value.path is None:
        return [piece]
    return list(
        chunks(piece, max(1, COPY_BYTES // entries[piece.value.path].dtype.itemsize))
    )


def _gathered_fetches(
    leaf: LeafToLoad, gathered: Sequence[NumberedPiece]
) -> Iterator[Fetch]:
    """Yields the reads that `read_piece` makes for the pieces in `gathered`, to count
    their bytes.
    """
    entries = {entry.path: entry for entry in leaf.entries}
    for _, whole in gathered:
        for piece in _chunks(whole, entries) if whole.value.path is not None else ():
            box, value = hull(swapped(piece)), piece.value
            entry = entries[str(value.path)]
            if isinstance(entry, FileArray) and is_packed(entry):
                yield Fetch(raw_entry(entry), [raw_box(entry, box)], None)
            else:
                yield Fetch(entry, [box], None)
            if value.scale is not None:
                yield Fetch(
                    entries[value.scale.path], [scale_box(box, value.scale)], None
                )


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
        counts = [
            (p.process_index, p.needed_bytes, p.read_bytes, p.excess_bytes, p.reads)
            for p in self.processes
        ]
        return "\n".join(
            table(
                [head, *[tuple([f"{one:,}" for one in row]) for row in counts]],
                right={*head},
            )
        )

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
      Each gets equally many devices,
        consecutive in the mesh's order. For a plan on devices, the processes are those
        of its devices.

    **Returns:**

    A `ReadPlan`. Its excess bytes are read and not needed. In a file, they are gaps
    that are too short to skip, such as those between the columns that a process needs.
    In a store of chunks, they are the rest of each chunk.

    **Raises:**

    The errors that `load` raises before it reads an array. `PlanMismatchError` if
    `processes` does not divide the number of devices of the mesh.

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
    gap_bytes = index.place.gap_bytes if gap_bytes is None else gap_bytes
    to_load = leaves_to_load(index, plan, dtype, map, unread)
    known: dict[object, Mapping[int, tuple[int, int, int]]] = {}
    totals: dict[int, list[int]] = {}
    for leaf in to_load.leaves:
        # A model has many leaves of few kinds.
        stored = [
            (one.dtype, one.shape, one.chunks if isinstance(one, StoreArray) else None)
            for one in leaf.entries
        ]
        key = (
            leaf.shape,
            leaf.sharding,
            leaf.dtype,
            *(stored if leaf.pieces is None else [leaf.path]),
        )
        if key not in known:
            known[key] = _reads_of(leaf, processes, gap_bytes)
        for process, counts in known[key].items():
            total = totals.setdefault(process, [0, 0, 0])
            totals[process] = [a + b for a, b in zip(total, counts, strict=True)]
    for scalar in to_load.scalars:
        # Each process reads the Python numbers.
        nbytes = itemsize(scalar.entry.dtype)
        for total in totals.values():
            total[0] += nbytes
            total[1] += nbytes
            total[2] += 1
    return ReadPlan(
        tuple(ProcessReads(process, *totals[process]) for process in sorted(totals))
    )


def _reads_of(
    leaf: LeafToLoad, processes: int | None, gap_bytes: int
) -> Mapping[int, tuple[int, int, int]]:
    """By the number of each process: the bytes of a leaf that it needs, the bytes that
    it reads, and how many reads.
    """
    found = {}
    for process, boxes in _boxes_of(leaf.shape, leaf.sharding, processes).items():
        needed = read = count = 0
        plain, gathered = fetches(leaf, boxes)
        for fetch in [*plain, *_gathered_fetches(leaf, gathered)]:
            entry = fetch.entry
            needed += sum(
                box_bytes(box, entry.dtype) for box in dict.fromkeys(fetch.boxes)
            )
            if isinstance(entry, StoreArray):
                sizes = [(stores.chunk_bytes(entry, box), 1) for box in fetch.boxes]
            else:
                sizes = [
                    (span.nbytes, span.runs)
                    for span in spans_into(entry, fetch, leaf.dtype, gap_bytes)
                ]
            read, count = (
                read + sum(nbytes for nbytes, _ in sizes),
                count + sum(reads for _, reads in sizes),
            )
        found[process] = (needed, read, count)
    return found


def _boxes_of(
    shape: tuple[int, ...], sharding: Sharding, processes: int | None
) -> dict[int, tuple[Box, ...]]:
    """By the number of each process, the different boxes of an array that the process's
    devices hold.
    """
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(
        sharding.mesh, AbstractMesh
    )
    count, size = processes or 1, sharding.num_devices
    if is_abstract and size % count:
        raise PlanMismatchError(
            f"{count} processes cannot each have as many of the {size} devices of the"
            " mesh; give a number that divides it."
        )
    held: dict[int, dict[Box, None]] = {}
    for device, box in shard_boxes(sharding, shape).items():
        held.setdefault(
            device * count // size if is_abstract else device.process_index, {}
        )[box] = None
    return {process: tuple(boxes) for process, boxes in held.items()}
