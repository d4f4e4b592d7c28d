"""The plan of a transfer as data: the pieces of arrays that each process sends to each process of another job."""

import dataclasses
import functools as ft
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._convert import Factor, Piece, Struct, Value, hull, once, scale_box, swapped
from ..._ground.boxes import Box, volume
from ..._ground.spec import bits


class Buffer(NamedTuple):
    """A box of an array that a receiving process fills once, for one or more of its devices."""

    process: int
    devices: tuple[int, ...]
    box: Box


class WireForm(NamedTuple):
    """The common properties of pieces that differ only in their positions.

    **Arguments:**

    - `value`, `factors`: those of the piece.
    - `rank`: the dimensions of its source.
    - `casts`: the number of casts that the sender makes.
    - `sent`: the dtype on the wire.
    - `scales`: the dtype of the scales that follow a piece on the wire, where the receiver multiplies.
    """

    value: Value
    factors: tuple[Factor, ...]
    rank: int
    casts: int
    sent: np.dtype
    scales: np.dtype | None


class Transfer(NamedTuple):
    """One piece that one device sends to one buffer.

    **Arguments:**

    - `process`, `device`: the sending process and its local device; -1 for constants, which nobody sends.
    - `buffer`: the number of the buffer in its kind.
    - `form`: the form of the piece.
    - `source`, `target`: the position of its first element in the whole source array, and in the buffer.
    """

    process: int
    device: int
    buffer: int
    form: WireForm
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def piece(self) -> Piece:
        """The piece, from the whole source array to the buffer."""
        return Piece(self.form.value, self.source, self.target, self.form.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on the wire: one dimension per factor, without repetitions."""
        return tuple(factor.size for factor in once(self.piece).factors)

    @property
    def scale_box(self) -> Box:
        """The box of the scales that follow the piece on the wire; `()` if there are none."""
        scale = self.form.value.scale
        return () if scale is None else scale_box(hull(swapped(once(self.piece))), scale)

    @property
    def own_bytes(self) -> int:
        """Bytes of the piece on the wire without its scales. Elements of less than a byte are packed."""
        return -(-math.prod(self.shape) * bits(self.form.sent) // 8)

    @property
    def bytes(self) -> int:
        """Bytes of the piece on the wire, scales included."""
        scales = self.form.scales
        return self.own_bytes + (0 if scales is None else volume(self.scale_box) * scales.itemsize)


# The columns of a kind's rows; the position in the source and the position in the buffer follow.
PROCESS, DEVICE, BUFFER, FORM, PLACE = range(5)


@dataclasses.dataclass(frozen=True, eq=False)
class TransferKind:
    """The common plan of leaves that are made in the same way. Only the names of their sources differ.

    **Arguments:**

    - `names`: the sources of the first such leaf.
    - `rank`: the most dimensions of a source.
    - `buffers`: the buffers that receivers fill.
    - `forms`: the forms of the pieces.
    - `rows`: for each piece its process, device, buffer and form, then its position in the source and in the buffer.
    """

    names: tuple[str, ...]
    rank: int
    buffers: tuple[Buffer, ...]
    forms: tuple[WireForm, ...]
    rows: np.ndarray

    @ft.cached_property
    def receivers(self) -> np.ndarray:
        """For each piece, the number of the process that receives it."""
        return np.array([buffer.process for buffer in self.buffers], np.int64)[self.rows[:, BUFFER]]

    @ft.cached_property
    def firsts(self) -> np.ndarray:
        """For each piece, the first piece with the same bytes on the wire. A process receives such bytes once."""
        numbers: dict[object, int] = {}
        alike = np.array([numbers.setdefault(_on_wire(form), len(numbers)) for form in self.forms], np.int64)
        places = self.rows[:, PLACE : PLACE + self.rank].T
        columns = [self.rows[:, PROCESS], self.receivers, alike[self.rows[:, FORM]], *places]
        order = np.lexsort(columns[::-1])
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        found = np.empty(len(order), np.int64)
        found[order] = order[is_new][np.cumsum(is_new) - 1]
        return found

    def transfer(self, number: int) -> Transfer:
        """The `Transfer` of one piece, with the names of this kind's sources."""
        process, device, buffer, at, *places = self.rows[number].tolist()
        form = self.forms[at]
        return Transfer(process, device, buffer, form, tuple(places[: form.rank]), tuple(places[self.rank :]))

    def sent(self, sender: int, receiver: int) -> list[tuple[int, ...]]:
        """The pieces that one process sends another, in order; for each, the numbers of all pieces with its bytes."""
        found: dict[int, list[int]] = {}
        own = np.flatnonzero((self.rows[:, PROCESS] == sender) & (self.receivers == receiver))
        for number, first in zip(own.tolist(), self.firsts[own].tolist(), strict=True):
            found.setdefault(first, []).append(number)
        return [tuple(numbers) for numbers in found.values()]


def _on_wire(form: WireForm) -> object:
    factors = [factor[:3] for factor in once(Piece(form.value, (), (), form.factors)).factors]
    return form.value, tuple(factors), form.casts, form.sent, form.scales


class SentLeaf(NamedTuple):
    """An array of the target: its path, the shape and dtype of its raw data, its digest, the number of its kind, and
    its sources' paths.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str
    kind: int
    names: tuple[str, ...]


class SentPiece(NamedTuple):
    """One piece on the wire: the number of its leaf, and the transfers that all have these same bytes."""

    leaf: int
    places: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """The pieces that each process of one job sends to each process of another; made by
    [`shardfx._reshard.sync.plan_transfer`][].

    **Arguments:**

    - `settings`: one text for what is not about a leaf: the meshes, the processes and the limit.
    - `senders`, `receivers`: the process of each device, in the mesh's order.
    - `receiver`: the only receiving process that it covers; `None` for all.
    - `limit_bytes`: the most that the pieces of one round take.
    - `sources`: the arrays that are read, as shape and dtype of their bits, by path.
    - `kinds`, `leaves`: the arrays of the target, and what arrays that are made alike have in common.
    """

    __module__ = "shardfx.sync"

    settings: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    limit_bytes: int
    sources: Mapping[str, Struct]
    kinds: tuple[TransferKind, ...]
    leaves: tuple[SentLeaf, ...]

    @ft.cached_property
    def digest(self) -> str:
        """A text that is equal if both jobs plan the same transfer, whichever part they computed."""
        return hash_of([self.settings, *[leaf.digest for leaf in self.leaves]])

    @ft.cached_property
    def known(self) -> dict[object, object]:
        """A cache for the sender's or the receiver's own values, so that later revisions need no planning."""
        return {}

    @property
    def wire_bytes(self) -> int:
        """The bytes that all senders send in total."""
        own = [_wire_bytes(kind) for kind in self.kinds]
        return sum(own[leaf.kind] for leaf in self.leaves)

    def rounds(self, sender: int, receiver: int) -> list[list[SentPiece]]:
        """The pieces that one process sends another, in rounds of at most `limit_bytes` if the pieces are small enough.

        Sender -1 stands for constants.
        """
        own = [[tuple(map(kind.transfer, numbers)) for numbers in kind.sent(sender, receiver)] for kind in self.kinds]
        sizes = [[places[0].bytes for places in kind] for kind in own]
        found: list[list[SentPiece]] = []
        left = 0
        for number, leaf in enumerate(self.leaves):
            names = dict(zip(self.kinds[leaf.kind].names, leaf.names, strict=True))
            for places, count in zip(own[leaf.kind], sizes[leaf.kind], strict=True):
                if not found or count > left:
                    found.append([])
                    left = self.limit_bytes
                found[-1].append(SentPiece(number, tuple([_named(one, names) for one in places])))
                left -= count
        return found

    def senders_to(self, receiver: int) -> list[int]:
        """The processes that send something to a receiving process, in order."""
        found = {process for kind in self.kinds for process in kind.rows[kind.receivers == receiver, PROCESS].tolist()}
        return sorted(found - {-1})


def _wire_bytes(kind: TransferKind) -> int:
    rows = np.flatnonzero((kind.firsts == np.arange(len(kind.rows))) & (kind.rows[:, PROCESS] >= 0))
    total = 0
    for number, form in enumerate(kind.forms):
        own = rows[kind.rows[rows, FORM] == number]
        # The number of scales that follow a piece depends on its position; the rest of a form has one size.
        several = own if form.scales else own[:1]
        total += sum(kind.transfer(at).bytes for at in several) * (len(own) if len(several) < len(own) else 1)
    return total


def _named(one: Transfer, names: Mapping[str, str]) -> Transfer:
    value = one.form.value
    if value.path is None:
        return one
    scale = None if value.scale is None else value.scale._replace(path=names[value.scale.path])
    return one._replace(form=one.form._replace(value=value._replace(path=names[value.path], scale=scale)))


def hash_of(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
