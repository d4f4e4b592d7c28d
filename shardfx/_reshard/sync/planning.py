"""Plans a transfer from the plans of both jobs and the map between their trees.

A *buffer* is a box of a target array in the memory of a receiving process. The *scales*
of a quantised array are another array, with one number for each block of elements, by
which the elements are multiplied.
"""

import dataclasses
import itertools as it
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from ..._convert import (
    NOWHERE,
    Factor,
    Made,
    Piece,
    Struct,
    TreeMap,
    Value,
    bound,
    dtypes_of,
    extended,
    hull,
    names_of,
    swapped,
    within,
)
from ..._ground.boxes import Box, common
from ..._ground.errors import MeshError
from ..._ground.spec import bits
from ..._ground.text import together
from ..._plan import ShardPlan
from ..pieces.assembly import MovedLeaf, leaves_of_plan, numbered, shards_of
from ..pieces.parts import (
    Holders,
    ShardPart,
    divided,
    first_casts,
    sent_bits,
    shard_parts,
)
from ..shardings import data_of
from .transfer import (
    BUFFER,
    PLACE,
    Buffer,
    SentLeaf,
    TransferKind,
    TransferPlan,
    WireForm,
    hash_of,
)


# The number of processes of a job, or the process of each device in the order of the
# job's mesh.
Processes = int | Sequence[int]
_FLOAT32 = np.dtype("float32")


def plan_transfer(
    src: ShardPlan,
    dst: ShardPlan,
    map: TreeMap | None = None,
    *,
    processes: tuple[Processes, Processes] = (1, 1),
    receiver: int | None = None,
    limit_bytes: int = 16 << 20,
) -> TransferPlan:
    """Plans the transfer of one job's arrays into another job's arrays. No device is
    needed.

    **Arguments:**

    - `src`, `dst`: the plans of the sending and of the receiving job.
    - `map`: a map that makes the leaves of `dst` from the leaves of `src`. By default
      both trees have the same paths.
    - `processes`: for each of the two jobs, the number of processes, or the process of
      each device in the mesh's order.
        With a number, each process has an equal consecutive range of the mesh's
        devices.
    - `receiver`: the only receiving process to plan for. By default the plan is for
      all.
    - `limit_bytes`: the most bytes that are sent to a process at a time.

    **Returns:**

    The TransferPlan.

    **Raises:**

    `MapError` if the map does not fit the two trees; `MeshError` if `processes` or
    `receiver` does not fit the meshes.
    """
    senders, receivers = (
        _processes(one.mesh.size, count)
        for one, count in zip((src, dst), processes, strict=True)
    )
    if receiver is not None and receiver not in receivers:
        raise MeshError(
            f"`receiver` is {receiver!r}, and `dst` has the processes 0 to"
            f" {max(receivers)}."
        )
    jobs = _Jobs(senders, receivers, receiver, limit_bytes)
    sources, targets = (
        {leaf.path: leaf for leaf in leaves_of_plan(plan)} for plan in (src, dst)
    )
    here = {path: Struct(leaf.shape, leaf.dtype) for path, leaf in sources.items()}
    there = {path: Struct(leaf.shape, leaf.dtype) for path, leaf in targets.items()}
    made = bound(TreeMap({"{path*}": "{path*}"}) if map is None else map, here, there)
    numbers: dict[object, int] = {}
    kinds: list[TransferKind] = []
    leaves = []
    for path, target in targets.items():
        shape, dtype = data_of(target.shape, target.dtype)
        more = shape[len(target.shape) :]
        own = dataclasses.replace(made[path], shape=shape, dtype=dtype)
        own = dataclasses.replace(
            own, pieces=tuple(extended(piece, more) for piece in own.pieces)
        )
        names = tuple(
            dict.fromkeys(name for piece in own.pieces for name in names_of(piece))
        )
        ends = tuple(sources[name][1:] for name in names)
        key = (
            target[1:],
            numbered(own.pieces, names),
            str([piece.value.number for piece in own.pieces]),
            ends,
        )
        if key not in numbers:
            numbers[key] = len(kinds)
            ends = {name: sources[name] for name in names}
            kinds.append(_kind(target, own.pieces, ends, jobs))
        text = [
            path,
            repr(shape),
            str(target.dtype),
            str(_spec(target)),
            repr(own.pieces),
        ]
        text += [
            f"{name} {sources[name].shape} {sources[name].dtype} {_spec(sources[name])}"
            for name in names
        ]
        leaves.append(SentLeaf(path, shape, dtype, hash_of(text), numbers[key], names))
    settings = repr(
        (1, dict(src.mesh.shape), dict(dst.mesh.shape), senders, receivers, limit_bytes)
    )
    used = dict.fromkeys(name for leaf in leaves for name in leaf.names)
    data = {
        name: Struct(*data_of(sources[name].shape, sources[name].dtype))
        for name in used
    }
    return TransferPlan(hash_of([settings]), *jobs, data, tuple(kinds), tuple(leaves))


def _processes(size: int, given: Processes) -> tuple[int, ...]:
    if isinstance(given, int) and given > 0 and size % given == 0:
        return tuple(at * given // size for at in range(size))
    if isinstance(given, int) or len(given) != size or min(given) < 0:
        raise MeshError(
            f"`processes` is {given!r:.80} for {size} devices; give a number that"
            " divides them, or the process of each."
        )
    return tuple(given)


def _spec(leaf: MovedLeaf) -> object:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding.spec


class Encoding(NamedTuple):
    """How elements of a source array are sent. `value` has the array, its scales and
    its casts, and `path` is the array's path. If the receiver multiplies by the scales,
    `scales` is their dtype, and `casts` is empty. Otherwise `scales` is `None`, and
    elements have the dtype `dtype` before `casts`: float32 if the sender multiplies
    them.
    """

    value: Value
    path: str
    dtype: np.dtype
    casts: tuple[object, ...]
    scales: np.dtype | None


def encoding_of(value: Value, dtypes: Mapping[str, np.dtype]) -> Encoding:
    """How elements of the source in `value` are sent. The receiver multiplies by scales
    if that sends fewer bytes, else the sender does. `dtypes` has the dtypes of sources
    and scales, by path.
    """
    assert value.path is not None
    dtype = dtypes[value.path]
    if value.scale is None:
        return Encoding(value, value.path, dtype, value.casts, None)
    if bits(dtype) < sent_bits(value, _FLOAT32):
        # Elements and scales have fewer bytes than their product, so the receiver
        # multiplies.
        return Encoding(value, value.path, dtype, (), dtypes[value.scale.path])
    return Encoding(value, value.path, _FLOAT32, value.casts, None)


def form_of(
    encoding: Encoding | None, piece: Piece, rank: int, dtype: np.dtype
) -> WireForm:
    """The form in which a part of an array, `piece`, is sent. `encoding` says how the
    source's elements are sent; a constant has none, and is not sent. `rank` is the
    number of dimensions of the source, and `dtype` the dtype of the target.
    """
    if encoding is None:
        return WireForm(piece.value, piece.factors, 0, 0, dtype, None)
    count = first_casts(encoding.casts, encoding.dtype)
    sent = np.dtype([encoding.dtype, *dtypes_of(encoding.casts[:count])][-1])
    return WireForm(encoding.value, piece.factors, rank, count, sent, encoding.scales)


class _Jobs(NamedTuple):
    """What all leaves of a transfer have in common. `senders` has the process of each
    device of the sending job, and `receivers` that of each device of the receiving job.
    `receiver` is the only receiving process to plan for; `None` for all. At most
    `limit_bytes` are sent at a time.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    limit_bytes: int


def _kind(
    target: MovedLeaf,
    pieces: tuple[Piece, ...],
    sources: Mapping[str, MovedLeaf],
    jobs: _Jobs,
) -> TransferKind:
    locals_there = _local_numbers(jobs.receivers)
    devices: dict[tuple[int, Box], list[int]] = {}
    for at, box in enumerate(shards_of(target).boxes.values()):
        if jobs.receiver in (None, jobs.receivers[at]):
            devices.setdefault((jobs.receivers[at], box), []).append(locals_there[at])
    buffers = tuple(
        Buffer(process, tuple(own), box) for (process, box), own in devices.items()
    )
    # Each piece is treated as an array of its own, so that its parts have the dtype on
    # the wire.
    plain, read = [], dict[str, Encoding]()
    dtypes = {
        name: data_of(leaf.shape, leaf.dtype)[1] for name, leaf in sources.items()
    }
    for number, piece in enumerate(pieces):
        if piece.value.path is not None:
            own = read[str(number)] = encoding_of(piece.value, dtypes)
            piece = piece._replace(value=Value(str(number), casts=own.casts))
        plain.append(piece)
    made = Made(*data_of(target.shape, target.dtype), tuple(plain))
    held = {name: _holders(leaf) for name, leaf in sources.items()}
    rank = max(
        [len(data_of(leaf.shape, leaf.dtype)[0]) for leaf in sources.values()],
        default=0,
    )
    table = _Table(rank, made.dtype)
    for picks, group in _by_replica(buffers, held).items():
        holders = {
            name: {box: [own[pick]] for box, own in boxes.items()}
            for (name, boxes), pick in zip(held.items(), picks, strict=True)
        }
        _add(
            table,
            made,
            read,
            holders,
            [(number, buffers[number].box) for number in group],
            jobs,
        )
    return TransferKind(
        tuple(sources), rank, buffers, tuple(table.forms), table.rows(len(made.shape))
    )


def _add(
    table: "_Table",
    made: Made,
    encodings: Mapping[str, Encoding],
    holders: Mapping[str, Holders],
    group: Iterable[tuple[int, Box]],
    jobs: _Jobs,
) -> None:
    """Appends to `table` the parts of arrays that some buffers receive. `made` has the
    pieces that fill the target. In it, the source of a piece is named by the piece's
    number, "0", "1", .... `encodings` says by this name how elements are sent.
    `holders` says for each source, by path, which device sends each box of it. `group`
    has the number and the box of each buffer.
    """
    alike = together(group, lambda pair: pair[1])
    same, first = (
        [[number for number, _ in pairs] for pairs in alike.values()],
        len(jobs.senders),
    )
    wanted = [(first + at, box) for at, box in enumerate(alike)]
    ends = {alias: (one.dtype, holders[one.path]) for alias, one in encodings.items()}
    starts = {
        name: {at: [low for low, _ in box] for box, (at,) in own.items()}
        for name, own in holders.items()
    }
    locals_here, parts = _local_numbers(jobs.senders), list[ShardPart]()
    for part in shard_parts(made, wanted, ends, {}).all:
        parts += (
            [part] if part.piece.value.path is None else divided(part, jobs.limit_bytes)
        )
    # An element of a source may be needed at two positions.
    is_repeated = len({one.path for one in encodings.values()}) < len(encodings) or any(
        factor.source_dim == NOWHERE
        for piece in made.pieces
        for factor in piece.factors
    )
    for part in _split_at_edges(parts) if is_repeated else parts:
        own = same[part.receiver - first]
        if part.piece.value.path is None:
            table.add((-1, -1), None, [], part.piece, own)
            continue
        one = encodings[part.piece.value.path]
        ends_here = jobs.senders[part.sender], locals_here[part.sender]
        table.add(ends_here, one, starts[one.path][part.sender], part.piece, own)


class _Table:
    """The rows and the forms of a `TransferKind`, while these are collected one by one.
    `rank` is the largest number of dimensions of a source, and `dtype` the dtype of the
    target.
    """

    def __init__(self, rank: int, dtype: np.dtype):
        self.forms: list[WireForm] = []
        self._rank, self._dtype = rank, dtype
        self._numbers: dict[tuple[Value, tuple[Factor, ...]], int] = {}
        self._rows: list[int] = []
        self._counts: list[int] = []
        self._buffers: list[int] = []

    def add(
        self,
        sender: tuple[int, int],
        encoding: Encoding | None,
        start: Sequence[int],
        piece: Piece,
        buffers: Sequence[int],
    ) -> None:
        """Adds a part of a shard, for the buffers with the numbers `buffers`, which
        need it. `sender` is the sending process and its local device. `start` is the
        position of the shard in its array. `piece` copies the part from the shard to a
        buffer. `encoding` says how the elements are sent; `None` for a constant.
        """
        number = self._numbers.setdefault((piece.value, piece.factors), len(self.forms))
        if number == len(self.forms):
            self.forms.append(form_of(encoding, piece, len(start), self._dtype))
        source = [low + at for low, at in zip(start, piece.source, strict=False)] + [
            0
        ] * (self._rank - len(start))
        self._rows += [*sender, 0, number, *source, *piece.target]
        self._counts.append(len(buffers))
        self._buffers += buffers

    def rows(self, dims: int) -> np.ndarray:
        """The rows of a `TransferKind` whose target has `dims` dimensions. They are
        ordered by buffer. So a plan for one receiver has its rows in the same order as
        a plan for all.
        """
        rows = np.array(self._rows, np.int64).reshape(
            len(self._counts), PLACE + self._rank + dims
        )
        rows = np.repeat(rows, self._counts, axis=0)
        rows[:, BUFFER] = self._buffers
        return rows[np.argsort(rows[:, BUFFER], kind="stable")]


def _split_at_edges(parts: Sequence[ShardPart]) -> Iterator[ShardPart]:
    """Yields parts of shards, split where parts with the same sender overlap. Their
    common elements become a part of their own, which is sent once. For rows 0 to 4 and
    2 to 6: rows 0 to 2, 2 to 4, again 2 to 4, and 4 to 6.
    """
    for group in together(parts, lambda part: part.sender).values():
        hulls = [hull(swapped(part.piece)) for part in group]
        for part, own in zip(group, hulls, strict=True):
            others = [box for box in {*hulls} - {own} if common(own, box) is not None]
            edges = [
                sorted(
                    {
                        *ends,
                        *(
                            edge
                            for box in others
                            for edge in box[dim]
                            if ends[0] < edge < ends[1]
                        ),
                    }
                )
                for dim, ends in enumerate(own)
            ]
            for cell in it.product(*map(it.pairwise, edges)) if others else [own]:
                for piece in within(swapped(part.piece), cell):
                    yield part._replace(piece=swapped(piece))


def _holders(leaf: MovedLeaf) -> Holders:
    boxes = [*shards_of(leaf).boxes.values()]
    return together(range(len(boxes)), boxes.__getitem__)


def _by_replica(
    buffers: Sequence[Buffer], held: Mapping[str, Holders]
) -> dict[tuple[int, ...], list[int]]:
    """Groups buffers that receive from the same replicas. A source with `count`
    replicas sends from replica `n % count` to the receiving process `n`. The keys of
    the result have the number of the replica of each source in `held`, and the values
    have positions in `buffers`. `held` has, by path, the devices that hold each box of
    a source.
    """
    replicas = [min(map(len, one.values())) for one in held.values()]
    return together(
        range(len(buffers)),
        lambda at: tuple(buffers[at].process % count for count in replicas),
    )


def _local_numbers(processes: Iterable[int]) -> list[int]:
    """The position of each device among the devices of its process: 0, 1, 0, 1 for
    `processes` of 0, 0, 1, 1.
    """
    counts: dict[int, int] = {}
    found = []
    for process in processes:
        found.append(counts.get(process, 0))
        counts[process] = found[-1] + 1
    return found
