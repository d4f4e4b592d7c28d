"""The plan of a transfer as data: the parts of arrays that each process sends to each
process of another job.

A *buffer* is a box of a target array in the memory of a receiving process. The *scales*
of a quantised array are another array, with one number for each block of elements, by
which the elements are multiplied.
"""

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
    """A box of a target array in the receiving process number `process`. `devices` are
    the positions of the devices that hold the box, among the devices of this process.
    """

    process: int
    devices: tuple[int, ...]
    box: Box


class WireForm(NamedTuple):
    """The form in which parts of arrays are sent. Parts of one form differ only in
    their positions.

    **Arguments:**

    - `value`: the source, its scales and its casts.
    - `factors`: the nested loops that copy a part.
    - `rank`: the number of dimensions of the source.
    - `casts`: the number of casts that the sender makes. The receiver makes the others.
    - `sent`: the dtype in which elements are sent.
    - `scales`: the dtype in which scales are sent; `None` if the receiver does not
      multiply by scales.
    """

    value: Value
    factors: tuple[Factor, ...]
    rank: int
    casts: int
    sent: np.dtype
    scales: np.dtype | None


class Transfer(NamedTuple):
    """A part of an array that one device sends to one buffer.

    **Arguments:**

    - `process`, `device`: the sending process, and the number of the device in this
      process; -1 for constants, which
        are not sent.
    - `buffer`: the number of the buffer among the buffers of its leaf.
    - `form`: the form in which the part is sent.
    - `source`, `target`: the position of the first element in the whole source array,
      and in the buffer.
    """

    process: int
    device: int
    buffer: int
    form: WireForm
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def piece(self) -> Piece:
        """The part as a strided copy from the whole source array to the buffer."""
        return Piece(self.form.value, self.source, self.target, self.form.factors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which the part is sent. An element that is written several times
        is sent once.
        """
        return tuple(factor.size for factor in once(self.piece).factors)

    @property
    def scale_box(self) -> Box:
        """The box of the scales that the part's elements need; `()` if they have none."""
        scale = self.form.value.scale
        return (
            () if scale is None else scale_box(hull(swapped(once(self.piece))), scale)
        )

    @property
    def own_bytes(self) -> int:
        """The bytes of the elements as they are sent, without scales. 4-bit elements
        are sent two to a byte.
        """
        return -(-math.prod(self.shape) * bits(self.form.sent) // 8)

    @property
    def bytes(self) -> int:
        """The bytes of the elements and of their scales as they are sent."""
        scales = self.form.scales
        return self.own_bytes + (
            0 if scales is None else volume(self.scale_box) * scales.itemsize
        )


# The first columns of `TransferKind.rows`. The position in the source and the position
# in the buffer follow.
PROCESS, DEVICE, BUFFER, FORM, PLACE = range(5)


@dataclasses.dataclass(frozen=True, eq=False)
class TransferKind:
    """The plan that leaves have in common if they differ only in the paths of their
    sources.

    **Arguments:**

    - `names`: the paths of the first leaf's sources.
    - `rank`: the largest number of dimensions of a source.
    - `buffers`: the buffers that receiving processes fill.
    - `forms`: the forms in which parts of the sources are sent.
    - `rows`: one row for each part that is sent to a buffer: the sending process, its
      device, the number of the buffer,
        the number of the form, and the positions of its first element in the source and
        in the buffer.
    """

    names: tuple[str, ...]
    rank: int
    buffers: tuple[Buffer, ...]
    forms: tuple[WireForm, ...]
    rows: np.ndarray

    @ft.cached_property
    def receivers(self) -> np.ndarray:
        """The receiving process of each row of `rows`."""
        return np.array([buffer.process for buffer in self.buffers], np.int64)[
            self.rows[:, BUFFER]
        ]

    @ft.cached_property
    def firsts(self) -> np.ndarray:
        """For each row, the number of the first row for which the same process sends
        the same bytes to the same process. These bytes are received once.
        """
        numbers: dict[object, int] = {}
        alike = np.array(
            [numbers.setdefault(_on_wire(form), len(numbers)) for form in self.forms],
            np.int64,
        )
        places = self.rows[:, PLACE : PLACE + self.rank].T
        columns = [
            self.rows[:, PROCESS],
            self.receivers,
            alike[self.rows[:, FORM]],
            *places,
        ]
        order = np.lexsort(columns[::-1])
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        found = np.empty(len(order), np.int64)
        found[order] = order[is_new][np.cumsum(is_new) - 1]
        return found

    def transfer(self, number: int) -> Transfer:
        """The row of `rows` with the given number as a `Transfer`, with the source
        paths of the first leaf.
        """
        process, device, buffer, at, *places = self.rows[number].tolist()
        form = self.forms[at]
        return Transfer(
            process,
            device,
            buffer,
            form,
            tuple(places[: form.rank]),
            tuple(places[self.rank :]),
        )

    def sent(self, sender: int, receiver: int) -> list[tuple[int, ...]]:
        """The row numbers of the parts that the process `sender` sends to the process
        `receiver`, in the order of sending. Parts with the same content are one tuple,
        since their bytes are sent once.
        """
        found: dict[int, list[int]] = {}
        own = np.flatnonzero(
            (self.rows[:, PROCESS] == sender) & (self.receivers == receiver)
        )
        for number, first in zip(own.tolist(), self.firsts[own].tolist(), strict=True):
            found.setdefault(first, []).append(number)
        return [tuple(numbers) for numbers in found.values()]


def _on_wire(form: WireForm) -> object:
    factors = [
        factor[:3] for factor in once(Piece(form.value, (), (), form.factors)).factors
    ]
    return form.value, tuple(factors), form.casts, form.sent, form.scales


class SentLeaf(NamedTuple):
    """An array of the receiving job. `shape` and `dtype` are those of its raw data (the
    key data of PRNG keys). `digest` is a hash of its part of the plan. `kind` is the
    number of its `TransferKind`. `names` are the paths of its sources.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str
    kind: int
    names: tuple[str, ...]


class SentPiece(NamedTuple):
    """A row of bytes that is sent once, for the leaf number `leaf`. `places` has a
    `Transfer` for each buffer that needs the bytes.
    """

    leaf: int
    places: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """The parts of arrays that each process of one job sends to each process of another
    job. It is made by [`shardfx._reshard.sync.plan_transfer`][].

    **Arguments:**

    - `settings`: a hash of the meshes, the processes and the limit.
    - `senders`, `receivers`: the process of each device of the two jobs, in the order
      of their meshes.
    - `receiver`: the receiving process, if the plan covers only one; `None` for all.
    - `limit_bytes`: the most bytes that are sent to a process at a time.
    - `sources`: by path, the shape and dtype of each array that is read (for PRNG keys,
      of their key data).
    - `leaves`: the arrays of the receiving job.
    - `kinds`: the plans of the leaves. Leaves that differ only in the paths of their
      sources share one.
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
        """A hash of the plan. A plan for all receivers and a plan for one of them have
        the same hash.
        """
        return hash_of([self.settings, *[leaf.digest for leaf in self.leaves]])

    @ft.cached_property
    def known(self) -> dict[object, object]:
        """A cache of values that the sender or the receiver computes from the plan, for
        later revisions.
        """
        return {}

    @property
    def wire_bytes(self) -> int:
        """The bytes that all processes of the sending job send in total, after casts."""
        own = [_wire_bytes(kind) for kind in self.kinds]
        return sum(own[leaf.kind] for leaf in self.leaves)

    def rounds(self, sender: int, receiver: int) -> list[list[SentPiece]]:
        """The parts of arrays that one process sends another, as a list for each round
        (the parts that are sent together).

        A round has at most `limit_bytes`, or one larger part. The `sender` -1 stands
        for constants, which are not sent.
        """
        own = [
            [
                tuple(map(kind.transfer, numbers))
                for numbers in kind.sent(sender, receiver)
            ]
            for kind in self.kinds
        ]
        sizes = [[places[0].bytes for places in kind] for kind in own]
        found: list[list[SentPiece]] = []
        left = 0
        for number, leaf in enumerate(self.leaves):
            names = dict(zip(self.kinds[leaf.kind].names, leaf.names, strict=True))
            for places, count in zip(own[leaf.kind], sizes[leaf.kind], strict=True):
                if not found or count > left:
                    found.append([])
                    left = self.limit_bytes
                found[-1].append(
                    SentPiece(number, tuple([_named(one, names) for one in places]))
                )
                left -= count
        return found

    def senders_to(self, receiver: int) -> list[int]:
        """The numbers of the processes that send bytes to a receiving process, in
        ascending order.
        """
        found = {
            process
            for kind in self.kinds
            for process in kind.rows[kind.receivers == receiver, PROCESS].tolist()
        }
        return sorted(found - {-1})


def _wire_bytes(kind: TransferKind) -> int:
    rows = np.flatnonzero(
        (kind.firsts == np.arange(len(kind.rows))) & (kind.rows[:, PROCESS] >= 0)
    )
    total = 0
    for number, form in enumerate(kind.forms):
        own = rows[kind.rows[rows, FORM] == number]
        # The number of scales that are sent with a part depends on its position. All
        # else has one size for a form.
        several = own if form.scales else own[:1]
        total += sum(kind.transfer(at).bytes for at in several) * (
            len(own) if len(several) < len(own) else 1
        )
    return total


def _named(one: Transfer, names: Mapping[str, str]) -> Transfer:
    value = one.form.value
    if value.path is None:
        return one
    scale = (
        None
        if value.scale is None
        else value.scale._replace(path=names[value.scale.path])
    )
    return one._replace(
        form=one.form._replace(
            value=value._replace(path=names[value.path], scale=scale)
        )
    )


def hash_of(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
