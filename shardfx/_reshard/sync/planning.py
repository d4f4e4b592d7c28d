"""Plans a transfer from the plans of both jobs and the map between their trees.

A *buffer* is a box of a target array in the memory of a receiving process. The *scales*
of a quantised array are another array, with one number for each block of elements, by
which the elements are multiplied.
"""

import itertools as it
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._convert import (
    NOWHERE,
    Made,
    Struct,
    TreeMap,
    Value,
    bound,
    extended,
    hull,
    names_of,
    swapped,
    within,
)
from ..._ground.boxes import Box, box_start, common, holders_by_box
from ..._ground.errors import MeshError, SyncError, whole_number
from ..._ground.keys import data_of
from ..._ground.spec import entries_at, entry_axes
from ..._ground.text import joined, together
from ..._plan import ShardPlan, check_plan
from ..pieces.assembly import (
    MovedLeaf,
    leaves_of_plan,
    numbers_text,
    shards_of,
    with_numbered_sources,
)
from ..pieces.parts import Source, shard_parts
from ..pieces.senders import Holders
from ..pieces.shard_part import ShardPart, divided
from .coverage import MOST_ROWS, most_rows
from .encoding import Encoding, encoding_of
from .kinds import (
    Buffer,
    SentLeaf,
    SourceLeaf,
    TransferKind,
    hash_of,
)
from .table import Table
from .transfer import TransferPlan


# The number of processes of a job, or the process of each device in the order of the
# job's mesh.
Processes = SupportsIndex | Sequence[SupportsIndex] | np.ndarray
_MOST_DEVICES = 1 << 20
# What is sent at a time is encrypted under one nonce, which AES-GCM allows for 64 GiB.
_MOST_LIMIT_BYTES = 16 << 30


def plan_transfer(
    src: ShardPlan,
    dst: ShardPlan,
    map: TreeMap | None = None,
    *,
    processes: tuple[Processes, Processes] = (1, 1),
    receiver: SupportsIndex | None = None,
    memory_limit_bytes: SupportsIndex = 16 << 20,
) -> TransferPlan:
    """Plans the transfer of one job's arrays into another job's arrays. No device is
    needed.

    **Arguments:**

    - `src`, `dst`: the plans of the sending and of the receiving job.
    - `map`: a map that makes the leaves of `dst` from the leaves of `src`. By default
      both trees have the same paths.
    - `processes`: for each of the two jobs, the number of processes, or the process of
      each device in the mesh's order. With a number, each process has an equal
      consecutive range of the mesh's devices.
    - `receiver`: the only receiving process to plan for. By default the plan is for
      all.
    - `memory_limit_bytes`: the most bytes that are sent to a process at a time.

    **Returns:**

    The TransferPlan.

    **Raises:**

    `MapError` if the map does not fit the two trees; `MeshError` if `processes` or
    `receiver` does not fit the meshes; `SyncError` if the limit asks for more than
    4,194,304 sends to a process.
    """
    check_plan("src", src, "plan_transfer(src, dst)")
    check_plan("dst", dst, "plan_transfer(src, dst)")
    jobs = _jobs(
        src=src,
        dst=dst,
        processes=processes,
        receiver=receiver,
        memory_limit_bytes=memory_limit_bytes,
    )
    sources = {leaf.path: leaf for leaf in leaves_of_plan(src)}
    targets = {leaf.path: leaf for leaf in leaves_of_plan(dst)}
    if map is None:
        map = TreeMap({"{path*}": "{path*}"})
    made_leaves = bound(map, _structs(sources), _structs(targets))

    kinds: list[TransferKind] = []
    kind_numbers: dict[object, int] = {}
    leaves: list[SentLeaf] = []
    for path, target in targets.items():
        made_leaf = _of_raw_data(made_leaves[path], target)
        source_leaves = _sources_of(made_leaf, sources)
        key = _kind_key(target, made_leaf, source_leaves)
        if key not in kind_numbers:
            kind_numbers[key] = len(kinds)
            kinds.append(_kind(target, made_leaf, source_leaves, jobs))
        leaf = SentLeaf(
            path=path,
            shape=made_leaf.shape,
            dtype=made_leaf.dtype,
            digest=_leaf_digest(target, made_leaf, source_leaves),
            kind=kind_numbers[key],
            source_paths=tuple(source_leaves),
        )
        leaves.append(leaf)

    row_count = most_rows(kinds, leaves, jobs.memory_limit_bytes)
    if row_count > MOST_ROWS:
        raise SyncError(
            f"one process would receive up to {row_count:,} rows of bytes, and a"
            f" transfer has at most {MOST_ROWS:,}, since `memory_limit_bytes` is"
            f" {jobs.memory_limit_bytes:,}; leave it out for 16 << 20."
        )

    return TransferPlan(
        settings=_settings_digest(src, dst, jobs),
        mesh=tuple(src.mesh.shape.items()),
        senders=jobs.senders,
        receivers=jobs.receivers,
        receiver=jobs.receiver,
        memory_limit_bytes=jobs.memory_limit_bytes,
        sources={path: _source_leaf(leaf) for path, leaf in sources.items()},
        kinds=tuple(kinds),
        leaves=tuple(leaves),
    )


class _Jobs(NamedTuple):
    """What all leaves of a transfer have in common. `senders` has the process of each
    device of the sending job, and `receivers` that of each device of the receiving job.
    `receiver` is the only receiving process to plan for; `None` for all. At most
    `memory_limit_bytes` are sent at a time.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    memory_limit_bytes: int


def _jobs(
    src: ShardPlan,
    dst: ShardPlan,
    processes: tuple[Processes, Processes],
    receiver: SupportsIndex | None,
    memory_limit_bytes: SupportsIndex,
) -> _Jobs:
    """Checks the arguments of `plan_transfer`. Raises `MeshError` for meshes, processes
    or a limit that no transfer has.
    """
    sending_processes, receiving_processes = processes
    for name, plan in (("src", src), ("dst", dst)):
        if plan.mesh.size > _MOST_DEVICES:
            raise MeshError(
                f"`{name}` has a mesh of {plan.mesh.size:,} devices; a transfer is"
                f" planned for at most {_MOST_DEVICES:,}."
            )
    limit_bytes = whole_number(memory_limit_bytes)
    if limit_bytes is None or not 1 <= limit_bytes <= _MOST_LIMIT_BYTES:
        raise MeshError(
            f"`memory_limit_bytes` is {memory_limit_bytes!r:.40}; give a number of bytes from 1 to"
            f" {_MOST_LIMIT_BYTES:,}, such as 16 << 20."
        )
    senders = _process_of_each_device(src.mesh.size, sending_processes)
    receivers = _process_of_each_device(dst.mesh.size, receiving_processes)
    only_receiver = whole_number(receiver)
    if receiver is not None and only_receiver not in receivers:
        numbers = [str(process) for process in sorted(set(receivers))]
        raise MeshError(
            f"`receiver` is {receiver!r:.40}, and the processes of `dst` are"
            f" {joined(numbers)}; give the number of one, or `None` for all."
        )
    return _Jobs(
        senders=senders,
        receivers=receivers,
        receiver=only_receiver,
        memory_limit_bytes=limit_bytes,
    )


def _process_of_each_device(size: int, processes: Processes) -> tuple[int, ...]:
    """The process of each of `size` devices, in the order of the mesh. Raises
    `MeshError` if `processes` does not fit the mesh.
    """
    if isinstance(processes, np.ndarray):
        processes = processes.tolist()
    count = whole_number(processes)
    if count is not None and count > 0 and size % count == 0:
        return tuple(device * count // size for device in range(size))
    numbers: list[int] = []
    if isinstance(processes, Sequence) and len(processes) == size:
        for process in processes:
            number = whole_number(process)
            if number is not None and number >= 0:
                numbers.append(number)
    if len(numbers) < size:
        raise MeshError(
            f"`processes` is {processes!r:.80} for {size} devices; give a number that"
            " divides them, or the process of each."
        )
    return tuple(numbers)


def _structs(leaves: Mapping[str, MovedLeaf]) -> dict[str, Struct]:
    """The shape and dtype of each array, by its path."""
    return {path: Struct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


def _of_raw_data(made_leaf: Made, target: MovedLeaf) -> Made:
    """`made_leaf` for the raw data of the leaf `target`: for PRNG keys their key data,
    which has one more dimension.
    """
    shape, dtype = data_of(target.shape, target.dtype)
    key_shape = shape[len(target.shape) :]
    pieces = tuple(extended(piece, key_shape) for piece in made_leaf.pieces)
    return Made(
        shape=shape,
        dtype=dtype,
        pieces=pieces,
    )


def _sources_of(
    made_leaf: Made,
    sources: Mapping[str, MovedLeaf],
) -> dict[str, MovedLeaf]:
    """The leaves that the pieces of `made_leaf` read, by path, in the order of first
    use.
    """
    names = dict.fromkeys(it.chain.from_iterable(map(names_of, made_leaf.pieces)))
    return {name: sources[name] for name in names}


def _kind_key(
    target: MovedLeaf,
    made_leaf: Made,
    sources: Mapping[str, MovedLeaf],
) -> object:
    """A key that leaves share if their plans differ only in the paths of sources."""
    # Pieces whose constants are zeros of two signs are equal, but not their texts.
    return (
        target._replace(path=""),
        with_numbered_sources(made_leaf.pieces, tuple(sources)),
        numbers_text(made_leaf.pieces),
        tuple(leaf._replace(path="") for leaf in sources.values()),
    )


def _leaf_digest(
    target: MovedLeaf,
    made_leaf: Made,
    sources: Mapping[str, MovedLeaf],
) -> str:
    """A hash of all that a leaf's part of the plan follows from, besides the settings:
    the leaf, its pieces and its sources. Both jobs must have the same.
    """
    texts = [
        target.path,
        repr(made_leaf.shape),
        str(target.dtype),
        str(_spec(target)),
        repr(made_leaf.pieces),
    ]
    for name, leaf in sources.items():
        texts.append(f"{name} {leaf.shape} {leaf.dtype} {_spec(leaf)}")
    return hash_of(texts)


# Plans of packages that divide a transfer otherwise must not be equal.
_SETTINGS_VERSION = 2


def _settings_digest(src: ShardPlan, dst: ShardPlan, jobs: _Jobs) -> str:
    """A hash of what the leaves of a transfer have in common. A plan for all receivers
    and a plan for one of them have the same.
    """
    settings = (
        _SETTINGS_VERSION,
        dict(src.mesh.shape),
        dict(dst.mesh.shape),
        jobs.senders,
        jobs.receivers,
        jobs.memory_limit_bytes,
    )
    return hash_of([repr(settings)])


def _source_leaf(leaf: MovedLeaf) -> SourceLeaf:
    """An array of the sending job as the plan keeps it."""
    entries = entries_at(_spec(leaf), len(leaf.shape))
    return SourceLeaf(
        shape=leaf.shape,
        dtype=leaf.dtype,
        axes=tuple(entry_axes(entry) for entry in entries),
    )


def _data_struct(leaf: MovedLeaf) -> Struct:
    """The shape and dtype of an array's raw data: of PRNG keys, their key data."""
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    return Struct(shape, dtype)


def _spec(leaf: MovedLeaf) -> PartitionSpec:
    """The spec of an array of a plan, which has a `NamedSharding`."""
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding.spec


def _kind(
    target: MovedLeaf,
    made_leaf: Made,
    sources: Mapping[str, MovedLeaf],
    jobs: _Jobs,
) -> TransferKind:
    """The plan for the leaf `target` and for all leaves that differ from it only in the
    paths of their sources. `made_leaf` has the pieces that fill the leaf, and `sources`
    the arrays that they read, by path.
    """
    buffers = _buffers_of(target, jobs)
    structs = {name: _data_struct(leaf) for name, leaf in sources.items()}
    holders_by_source = {name: _holders_of(leaf) for name, leaf in sources.items()}
    encodings = _encodings(made_leaf, structs)
    rank = max([len(struct.shape) for struct in structs.values()], default=0)

    # It collects the rows and the forms.
    table = Table(path=target.path, rank=rank, dtype=made_leaf.dtype)
    # Of sources with several replicas, receiving processes get different ones. A choice
    # has the number of the replica of each source, and serves the buffers `numbers`.
    for replica_choice, numbers in _by_replica(buffers, holders_by_source).items():
        senders_by_source: dict[str, Holders] = {}
        for name, replica in zip(sources, replica_choice, strict=True):
            senders_by_source[name] = _with_replica(holders_by_source[name], replica)
        numbers_and_boxes = [(number, buffers[number].box) for number in numbers]
        _add_parts(
            table=table,
            made_leaf=_wire_made(made_leaf, encodings),
            encodings=encodings,
            holders=senders_by_source,
            numbers_and_boxes=numbers_and_boxes,
            jobs=jobs,
        )

    return TransferKind(
        source_paths=tuple(sources),
        pieces=tuple(made_leaf.pieces),
        rank=rank,
        buffers=buffers,
        forms=tuple(table.forms),
        rows=table.rows(len(made_leaf.shape)),
    )


def _buffers_of(target: MovedLeaf, jobs: _Jobs) -> tuple[Buffer, ...]:
    """The boxes of `target` that the receiving processes hold, each once per process."""
    local_numbers = _local_numbers(jobs.receivers)
    devices: dict[tuple[int, Box], list[int]] = {}
    for position, box in enumerate(shards_of(target).boxes.values()):
        process = jobs.receivers[position]
        if jobs.receiver in (None, process):
            holders = devices.setdefault((process, box), [])
            holders.append(local_numbers[position])
    return tuple(
        Buffer(process=process, devices=tuple(numbers), box=box)
        for (process, box), numbers in devices.items()
    )


def _encodings(made_leaf: Made, structs: Mapping[str, Struct]) -> dict[str, Encoding]:
    """How the source of each piece of `made_leaf` is sent, by the piece's number as
    text, which is the path that `_wire_made` gives the source. Constants are left out.
    """
    dtypes = {name: struct.dtype for name, struct in structs.items()}
    return {
        str(number): encoding_of(piece.value, dtypes)
        for number, piece in enumerate(made_leaf.pieces)
        if piece.value.path is not None
    }


def _wire_made(made_leaf: Made, encodings: Mapping[str, Encoding]) -> Made:
    """`made_leaf` with each piece treated as an array of its own, named by its number, so
    that its parts have the dtype on the wire.
    """
    pieces = []
    for number, piece in enumerate(made_leaf.pieces):
        encoding = encodings.get(str(number))
        if encoding is not None:
            value = Value(str(number), casts=encoding.casts)
            piece = piece._replace(value=value)
        pieces.append(piece)
    return Made(
        shape=made_leaf.shape,
        dtype=made_leaf.dtype,
        pieces=tuple(pieces),
    )


def _with_replica(holders: Holders, replica: int) -> Holders:
    """For each box only the holder number `replica`."""
    return {box: [devices[replica]] for box, devices in holders.items()}


def _add_parts(
    table: Table,
    made_leaf: Made,
    encodings: Mapping[str, Encoding],
    holders: Mapping[str, Holders],
    numbers_and_boxes: Iterable[tuple[int, Box]],
    jobs: _Jobs,
) -> None:
    """Appends to `table` the parts of arrays that some buffers receive. `made_leaf` has
    the pieces that fill the target. In it, the source of a piece is named by the
    piece's number, "0", "1", .... `encodings` says by this name how elements are sent.
    `holders` says for each source, by path, which device sends each box of it.
    `numbers_and_boxes` has the number and the box of each buffer.
    """
    # Buffers with the same box need the same parts. Each box counts as one receiver,
    # and the receivers are numbered behind the sending devices.
    first_receiver = len(jobs.senders)
    numbers_by_box = holders_by_box(numbers_and_boxes)
    numbers_by_receiver = list(numbers_by_box.values())
    receivers = [
        (first_receiver + position, box) for position, box in enumerate(numbers_by_box)
    ]

    sources = {
        name: Source(encoding.dtype, holders[encoding.path])
        for name, encoding in encodings.items()
    }
    parts = list[ShardPart]()
    for part in shard_parts(made_leaf, receivers, sources, {}).all:
        if part.piece.value.path is None:
            parts.append(part)
            continue
        table.require_room(
            len(parts) + part.memory_bytes // max(1, jobs.memory_limit_bytes)
        )
        parts += divided(part, jobs.memory_limit_bytes)
    if _reads_an_element_twice(made_leaf, encodings):
        paths = {name: encoding.path for name, encoding in encodings.items()}
        parts = list(_split_at_edges(parts, paths, table))

    local_numbers = _local_numbers(jobs.senders)
    # For each source, by path: where each sending device's shard starts in it.
    shard_starts = {path: _starts(boxes) for path, boxes in holders.items()}
    for part in parts:
        buffer_numbers = numbers_by_receiver[part.receiver - first_receiver]
        name = part.piece.value.path
        if name is None:
            # A constant has no sender, no encoding and no shard.
            table.add((-1, -1), None, [], part.piece, buffer_numbers)
            continue
        encoding = encodings[name]
        # The sending process, and the number of the device in it.
        sender = (jobs.senders[part.sender], local_numbers[part.sender])
        start = shard_starts[encoding.path][part.sender]
        table.add(sender, encoding, start, part.piece, buffer_numbers)


def _starts(holders: Holders) -> dict[int, Sequence[int]]:
    """The position of the first element of each sending device's shard."""
    starts: dict[int, Sequence[int]] = {}
    for box, devices in holders.items():
        (device,) = devices
        starts[device] = box_start(box)
    return starts


def _reads_an_element_twice(made_leaf: Made, encodings: Mapping[str, Encoding]) -> bool:
    """Whether an element of a source may be needed at two positions of the target.
    `encodings` has an entry for each piece, by the piece's number.
    """
    paths = {encoding.path for encoding in encodings.values()}
    if len(paths) < len(encodings):
        return True
    for piece in made_leaf.pieces:
        if any(factor.source_dim == NOWHERE for factor in piece.factors):
            return True
    return False


def _split_at_edges(
    parts: Sequence[ShardPart],
    paths: Mapping[str, str],
    table: Table,
) -> Iterator[ShardPart]:
    """Yields parts of shards, split where parts of the same array from the same sender
    overlap. Their common elements become a part of their own, which is sent once. For
    rows 0 to 4 and 2 to 6: rows 0 to 2, 2 to 4, again 2 to 4, and 4 to 6.

    `paths` has the array's path by the name that a part has for its source.
    """
    groups = together(
        parts, lambda part: (part.sender, paths.get(part.piece.value.path or ""))
    )
    count = 0
    for group in groups.values():
        hulls = [hull(swapped(part.piece)) for part in group]
        distinct = [*dict.fromkeys(hulls)]
        for part, box in zip(group, hulls, strict=True):
            others = [
                other
                for other in distinct
                if other != box and common(other, box) is not None
            ]
            if not others:
                yield from _within_source(part, box)
                continue
            edges = [_edges(box, others, dim) for dim in range(len(box))]
            count += math.prod(len(stops) - 1 for stops in edges)
            table.require_room(count)
            for cell in it.product(*map(it.pairwise, edges)):
                yield from _within_source(part, cell)


def _within_source(part: ShardPart, box: Box) -> Iterator[ShardPart]:
    """Yields what `part` reads inside a box of its sender's shard, as parts of it."""
    for piece in within(swapped(part.piece), box):
        yield part._replace(piece=swapped(piece))


def _edges(box: Box, others: Iterable[Box], dim: int) -> list[int]:
    """The start and stop of `box` along a dimension, and those of `others` between
    them, in ascending order.
    """
    start, stop = box[dim]
    edges = {start, stop}
    for other in others:
        edges.update(edge for edge in other[dim] if start < edge < stop)
    return sorted(edges)


def _holders_of(leaf: MovedLeaf) -> Holders:
    """The positions, in the mesh, of the devices that hold each box of an array."""
    return holders_by_box(enumerate(shards_of(leaf).boxes.values()))


def _by_replica(
    buffers: Sequence[Buffer],
    holders_by_source: Mapping[str, Holders],
) -> dict[tuple[int, ...], list[int]]:
    """Groups buffers that receive from the same replicas. A source with `count`
    replicas sends from replica `n % count` to the receiving process `n`. The keys of
    the result have the number of the replica of each source, and the values have
    positions in `buffers`. `holders_by_source` has, by path, the devices that hold each
    box of a source.
    """
    replica_counts = [
        min(map(len, holders.values())) for holders in holders_by_source.values()
    ]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, buffer in enumerate(buffers):
        choice = tuple(buffer.process % count for count in replica_counts)
        groups.setdefault(choice, []).append(number)
    return groups


def _local_numbers(processes: Iterable[int]) -> list[int]:
    """The position of each device among the devices of its process: 0, 1, 0, 1 for
    `processes` of 0, 0, 1, 1.
    """
    counts: dict[int, int] = {}
    numbers = []
    for process in processes:
        number = counts.get(process, 0)
        numbers.append(number)
        counts[process] = number + 1
    return numbers
