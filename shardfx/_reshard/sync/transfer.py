"""Which process sends which piece of which array to which process of another job: planned from two plans alone."""

import dataclasses
import functools as ft
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..._convert import (
    Made,
    Piece,
    Struct,
    TreeMap,
    Value,
    bound,
    dtypes_of,
    extended,
    names_of,
    once,
    shifted,
    swapped,
)
from ..._ground.boxes import Box, boxes
from ..._ground.errors import MeshError
from ..._plan import ShardPlan
from ..destinations import data_of
from ..pieces.cuts import cuts_of, first_casts, smaller
from ..pieces.work import MovedLeaf, kind_of


Processes = int | Sequence[int]
_FLOAT32 = np.dtype("float32")


class Buffer(NamedTuple):
    """A box of an array that a receiving process fills once, for one or more of its devices."""

    process: int
    devices: tuple[int, ...]
    box: Box


class Transfer(NamedTuple):
    """One piece that one device sends to one buffer.

    **Arguments:**

    - `process`, `device`: the sending process and its local device; -1 for constants, which nobody sends.
    - `buffer`: the number of the buffer in its kind.
    - `piece`: from the whole source array to the buffer.
    - `casts`: how many of the piece's casts the sender makes.
    - `sent`: the dtype on the wire.
    """

    process: int
    device: int
    buffer: int
    piece: Piece
    casts: int
    sent: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on the wire: one dimension per factor, without repeats."""
        return tuple(factor.size for factor in once(self.piece).factors)

    @property
    def bytes(self) -> int:
        """Bytes on the wire."""
        return once(self.piece).elements * self.sent.itemsize


class Kind(NamedTuple):
    """What all leaves share that are made alike: only the names of their sources differ."""

    names: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    transfers: tuple[Transfer, ...]


class SentLeaf(NamedTuple):
    """An array of the target: its path, the shape and dtype of its bits, its digest, its kind, and its sources."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str
    kind: int
    names: tuple[str, ...]


class Step(NamedTuple):
    """A piece of one leaf, with the names of its own sources."""

    leaf: int
    transfer: Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """What each process of one job sends to each process of another; made by [`shardfx._reshard.sync.plan_transfer`][].

    **Arguments:**

    - `settings`: one text for what is not about a leaf: the meshes, the processes and the limit.
    - `senders`, `receivers`: the process of each device, in the mesh's order.
    - `receiver`: the only receiving process that it covers; `None` for all.
    - `limit_bytes`: the most that the pieces of one round take.
    - `sources`: the arrays that are read, as shape and dtype of their bits, by path.
    - `kinds`, `leaves`: the arrays of the target, and what arrays that are made alike have in common.
    """

    settings: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    limit_bytes: int
    sources: Mapping[str, Struct]
    kinds: tuple[Kind, ...]
    leaves: tuple[SentLeaf, ...]

    @ft.cached_property
    def digest(self) -> str:
        """A text that is equal where both jobs plan the same transfer, whichever part they computed."""
        return _hash([self.settings, *[leaf.digest for leaf in self.leaves]])

    @property
    def wire_bytes(self) -> int:
        """Bytes that all senders send together."""
        own = [sum(one.bytes for one in kind.transfers if one.process >= 0) for kind in self.kinds]
        return sum(own[leaf.kind] for leaf in self.leaves)

    def steps(self, sender: int, receiver: int) -> Iterator[Step]:
        """The pieces from one process to another, in order; those of sender -1 are constants."""
        own = [
            [one for one in kind.transfers if (one.process, kind.buffers[one.buffer].process) == (sender, receiver)]
            for kind in self.kinds
        ]
        for number, leaf in enumerate(self.leaves):
            names = dict(zip(self.kinds[leaf.kind].names, leaf.names, strict=True))
            for one in own[leaf.kind]:
                yield Step(number, one._replace(piece=_named(one.piece, names)))

    def rounds(self, sender: int, receiver: int) -> list[list[Step]]:
        """The same pieces in rounds of at most `limit_bytes`, as far as pieces can be cut."""
        found: list[list[Step]] = []
        left = 0
        for step in self.steps(sender, receiver):
            count = step.transfer.bytes
            if not found or count > left:
                found.append([])
                left = self.limit_bytes
            found[-1].append(step)
            left -= count
        return found

    def senders_to(self, receiver: int) -> list[int]:
        """The processes that send something to a receiving process, in order."""
        found = (one.process for k in self.kinds for one in k.transfers if k.buffers[one.buffer].process == receiver)
        return sorted({process for process in found if process >= 0})


def plan_transfer(
    src: ShardPlan,
    dst: ShardPlan,
    map: TreeMap | None = None,
    *,
    processes: tuple[Processes, Processes] = (1, 1),
    receiver: int | None = None,
    limit_bytes: int = 64 << 20,
) -> TransferPlan:
    """Plans the transfer of one job's arrays into another's. Neither job needs the other's devices.

    **Arguments:**

    - `src`, `dst`: the plans of the sender and of the receiver.
    - `map`: how the leaves of `dst` are made of those of `src`; without it the paths are the same.
    - `processes`: of each side the number of processes, which then hold equal runs of the mesh, or the process of each
        device in the mesh's order.
    - `receiver`: plans the part of this receiving process alone.
    - `limit_bytes`: the most that the pieces of one round take, on either side.

    **Returns:**

    The TransferPlan.

    **Raises:**

    `MapError` if the map does not fit, `MeshError` if the processes do not.
    """
    senders, receivers = (_processes(one.mesh.size, count) for one, count in zip((src, dst), processes, strict=True))
    if receiver is not None and receiver not in receivers:
        raise MeshError(f"`receiver` is {receiver!r}, and `dst` has the processes 0 to {max(receivers)}.")
    sources, targets = _leaves(src), _leaves(dst)
    here = {path: Struct(leaf.shape, leaf.dtype) for path, leaf in sources.items()}
    there = {path: Struct(leaf.shape, leaf.dtype) for path, leaf in targets.items()}
    made = bound(TreeMap({"{path*}": "{path*}"}) if map is None else map, here, there)
    numbers: dict[object, int] = {}
    kinds: list[Kind] = []
    leaves = []
    for path, target in targets.items():
        shape, dtype = data_of(target.shape, target.dtype)
        more = shape[len(target.shape) :]
        own = dataclasses.replace(made[path], shape=shape, dtype=dtype)
        own = dataclasses.replace(own, pieces=tuple(extended(piece, more) for piece in own.pieces))
        names = tuple(dict.fromkeys(name for piece in own.pieces for name in names_of(piece)))
        key = (target[1:], *kind_of(own, names, sources))
        if key not in numbers:
            numbers[key] = len(kinds)
            ends = {name: sources[name] for name in names}
            kinds.append(_kind(target, own.pieces, ends, senders, receivers, receiver, limit_bytes))
        text = [path, repr(shape), str(target.dtype), str(_end(target)), repr(own.pieces)]
        text += [f"{name} {sources[name].shape} {sources[name].dtype} {_end(sources[name])}" for name in names]
        leaves.append(SentLeaf(path, shape, dtype, _hash(text), numbers[key], names))
    settings = repr((1, dict(src.mesh.shape), dict(dst.mesh.shape), senders, receivers, limit_bytes))
    used = dict.fromkeys(name for leaf in leaves for name in leaf.names)
    bits = {name: Struct(*data_of(sources[name].shape, sources[name].dtype)) for name in used}
    only = (senders, receivers, receiver, limit_bytes)
    return TransferPlan(_hash([settings]), *only, bits, tuple(kinds), tuple(leaves))


def _processes(size: int, given: Processes) -> tuple[int, ...]:
    if isinstance(given, int):
        if given < 1 or size % given:
            raise MeshError(
                f"{size} devices are not those of {given} processes alike; give the process of each device."
            )
        return tuple(at * given // size for at in range(size))
    if len(given) != size or min(given) < 0:
        raise MeshError(f"{len(given)} processes are given for {size} devices; give the process of each device.")
    return tuple(given)


def _leaves(plan: ShardPlan) -> dict[str, MovedLeaf]:
    rows = list(zip(plan.content.rows, plan.content.row_shardings, strict=True))
    found = ((path, *rows[at]) for path, at in plan.content.numbered if at >= 0)
    return {path: MovedLeaf(path, row.shape, row.dtype, sharding) for path, row, sharding in found}


def _end(leaf: MovedLeaf) -> object:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding.spec


def _boxes(leaf: MovedLeaf) -> list[Box]:
    """What each device holds of the bits of an array, in the mesh's order."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    shape, _ = data_of(leaf.shape, leaf.dtype)
    more = tuple((0, size) for size in shape[len(leaf.shape) :])
    found = boxes(sharding, leaf.shape)
    order = sharding.mesh.devices.flat if isinstance(sharding.mesh, Mesh) else range(sharding.mesh.size)
    return [(*found[device], *more) for device in order]


def _kind(
    target: MovedLeaf,
    pieces: tuple[Piece, ...],
    sources: Mapping[str, MovedLeaf],
    senders: tuple[int, ...],
    receivers: tuple[int, ...],
    only: int | None,
    limit_bytes: int,
) -> Kind:
    locals_here, locals_there = _local(senders), _local(receivers)
    devices: dict[tuple[int, Box], list[int]] = {}
    for at, box in enumerate(_boxes(target)):
        if only is None or receivers[at] == only:
            devices.setdefault((receivers[at], box), []).append(locals_there[at])
    buffers = tuple(Buffer(process, tuple(own), box) for (process, box), own in devices.items())
    # What is scaled is sent as the product, so that the cuts know it as an array of its own.
    values = {f"{number}": piece.value for number, piece in enumerate(pieces) if piece.value.path is not None}
    plain = tuple(
        piece if piece.value.path is None else piece._replace(value=Value(f"{number}", None, None, piece.value.casts))
        for number, piece in enumerate(pieces)
    )
    held = {name: _held(leaf) for name, leaf in sources.items()}
    made = data_of(target.shape, target.dtype)
    transfers = []
    for picks, numbers in _groups(buffers, held).items():
        ends = {}
        for alias, value in values.items():
            dtype = data_of((), sources[value.path or ""].dtype)[1] if value.scale is None else _FLOAT32
            pick = picks[list(held).index(value.path or "")]
            ends[alias] = dtype, {box: [own[pick]] for box, own in held[value.path or ""].items()}
        alike: dict[Box, list[int]] = {}
        for number in numbers:
            alike.setdefault(buffers[number].box, []).append(number)
        wanted = [(len(senders) + at, box) for at, box in enumerate(alike)]
        same = list(alike.values())
        cuts = cuts_of(Made(*made, plain), wanted, ends, {})
        low = {(alias, at): box for alias, (_, holders) in ends.items() for box, (at,) in holders.items()}
        for cut in cuts.made:
            own, alias = same[cut.receiver - len(senders)], cut.piece.value.path
            if alias is None:
                transfers += [Transfer(-1, -1, number, cut.piece, 0, made[1]) for number in own]
                continue
            value, dtype = values[alias], ends[alias][0]
            count = first_casts(value.casts, dtype)
            sent = np.dtype([dtype, *dtypes_of(value.casts[:count])][-1])
            start = [first for first, _ in low[alias, cut.sender]]
            process, device = senders[cut.sender], locals_here[cut.sender]
            for part in smaller(cut, limit_bytes):
                piece = swapped(shifted(swapped(part.piece), start))._replace(value=value)
                transfers += [Transfer(process, device, number, piece, count, sent) for number in own]
    # A receiver that plans its part alone has the same order.
    transfers.sort(key=lambda one: one.buffer)
    return Kind(tuple(sources), buffers, tuple(transfers))


def _held(leaf: MovedLeaf) -> dict[Box, list[int]]:
    """The devices that hold each box of an array."""
    held: dict[Box, list[int]] = {}
    for at, box in enumerate(_boxes(leaf)):
        held.setdefault(box, []).append(at)
    return held


def _groups(
    buffers: Sequence[Buffer], held: Mapping[str, Mapping[Box, Sequence[int]]]
) -> dict[tuple[int, ...], list[int]]:
    """The buffers by the replica of each source that sends. The receiver's number alone says which."""
    replicas = [min(map(len, one.values())) for one in held.values()]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, buffer in enumerate(buffers):
        groups.setdefault(tuple(buffer.process % count for count in replicas), []).append(number)
    return groups


def _local(processes: Iterable[int]) -> list[int]:
    """Of each device its number among those of its process."""
    counts: dict[int, int] = {}
    found = []
    for process in processes:
        found.append(counts.get(process, 0))
        counts[process] = found[-1] + 1
    return found


def _named(piece: Piece, names: Mapping[str, str]) -> Piece:
    value = piece.value
    if value.path is None:
        return piece
    scale = None if value.scale is None else value.scale._replace(path=names[value.scale.path])
    return piece._replace(value=value._replace(path=names[value.path], scale=scale))


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
