"""The parts of arrays that each process sends to each process of another job, for
leaves that differ only in the paths of their sources.

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
from ..._ground.keys import data_of
from ..._ground.spec import DType, bits
from ..pieces.assembly import numbers_text


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
    - `source_rank`: the number of dimensions of the source.
    - `sender_casts`: the number of casts that the sender makes. The receiver makes the
      others.
    - `sent_dtype`: the dtype in which elements are sent.
    - `scales_dtype`: the dtype in which scales are sent; `None` if the receiver does
      not multiply by scales.
    """

    value: Value
    factors: tuple[Factor, ...]
    source_rank: int
    sender_casts: int
    sent_dtype: np.dtype
    scales_dtype: np.dtype | None


class Transfer(NamedTuple):
    """A part of an array that one device sends to one buffer.

    **Arguments:**

    - `process`, `device`: the sending process, and the number of the device in this
      process; -1 for constants, which are not sent.
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
        return Piece(
            value=self.form.value,
            source=self.source,
            target=self.target,
            factors=self.form.factors,
        )

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
        if scale is None:
            return ()
        return scale_box(hull(swapped(once(self.piece))), scale)

    @property
    def element_bytes(self) -> int:
        """The bytes of the elements as they are sent, without scales. 4-bit elements
        are sent two to a byte.
        """
        return -(-math.prod(self.shape) * bits(self.form.sent_dtype) // 8)

    @property
    def bytes(self) -> int:
        """The bytes of the elements and of their scales as they are sent."""
        if self.form.scales_dtype is None:
            return self.element_bytes
        return (
            self.element_bytes
            + volume(self.scale_box) * self.form.scales_dtype.itemsize
        )


# The first columns of `TransferKind.rows`. From `FIRST_POSITION` on, the position in the
# source and the position in the buffer follow.
PROCESS, DEVICE, BUFFER, FORM, FIRST_POSITION = range(5)


@dataclasses.dataclass(frozen=True, eq=False)
class TransferKind:
    """The plan that leaves have in common if they differ only in the paths of their
    sources.

    **Arguments:**

    - `source_paths`: the paths of the first leaf's sources.
    - `pieces`: the pieces that fill the whole array, whatever its sharding. The rows
      follow from them and from both shardings.
    - `rank`: the largest number of dimensions of a source.
    - `buffers`: the buffers that receiving processes fill.
    - `forms`: the forms in which parts of the sources are sent.
    - `rows`: one row for each part that is sent to a buffer: the sending process, its
      device, the number of the buffer, the number of the form, and the positions of its
      first element in the source and in the buffer.
    """

    source_paths: tuple[str, ...]
    pieces: tuple[Piece, ...]
    rank: int
    buffers: tuple[Buffer, ...]
    forms: tuple[WireForm, ...]
    rows: np.ndarray

    @ft.cached_property
    def receivers(self) -> np.ndarray:
        """The receiving process of each row of `rows`."""
        process_of_buffer = np.array(
            [buffer.process for buffer in self.buffers], np.int64
        )
        return process_of_buffer[self.rows[:, BUFFER]]

    @ft.cached_property
    def firsts(self) -> np.ndarray:
        """For each row, the number of the first row for which the same process sends
        the same bytes to the same process. These bytes are received once.
        """
        # Forms with one number send equal bytes from equal positions.
        content_numbers: dict[object, int] = {}
        content_of_form = np.array(
            [
                content_numbers.setdefault(_content_key(form), len(content_numbers))
                for form in self.forms
            ],
            np.int64,
        )
        columns = [
            self.rows[:, PROCESS],
            self.receivers,
            content_of_form[self.rows[:, FORM]],
            *self.rows[:, FIRST_POSITION : FIRST_POSITION + self.rank].T,
        ]
        # Equal rows stand next to each other in this order, the first one first.
        order = np.lexsort(columns[::-1])
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        firsts = np.empty(len(order), np.int64)
        firsts[order] = order[is_new][np.cumsum(is_new) - 1]
        return firsts

    def transfer(self, number: int) -> Transfer:
        """The row of `rows` with the given number as a `Transfer`, with the source
        paths of the first leaf.
        """
        row = self.rows[number].tolist()
        form = self.forms[row[FORM]]
        return Transfer(
            process=row[PROCESS],
            device=row[DEVICE],
            buffer=row[BUFFER],
            form=form,
            source=tuple(row[FIRST_POSITION : FIRST_POSITION + form.source_rank]),
            target=tuple(row[FIRST_POSITION + self.rank :]),
        )

    def sent(self, sender: int, receiver: int) -> list[tuple[int, ...]]:
        """The row numbers of the parts that the process `sender` sends to the process
        `receiver`, in the order of sending. Parts with the same content are one tuple,
        since their bytes are sent once.
        """
        is_between = (self.rows[:, PROCESS] == sender) & (self.receivers == receiver)
        numbers = np.flatnonzero(is_between)
        firsts = self.firsts[numbers]
        by_content: dict[int, list[int]] = {}
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            by_content.setdefault(first, []).append(number)
        return [tuple(equal_parts) for equal_parts in by_content.values()]

    @property
    def wire_bytes(self) -> int:
        """The bytes that all processes send for one leaf, after casts."""
        is_sent_once = self.firsts == np.arange(len(self.rows))
        rows = np.flatnonzero(is_sent_once & (self.rows[:, PROCESS] >= 0))
        total = 0
        for number, form in enumerate(self.forms):
            rows_of_form = rows[self.rows[rows, FORM] == number]
            if form.scales_dtype:
                # The number of scales that are sent with a part depends on its
                # position.
                total += sum(self.transfer(row).bytes for row in rows_of_form)
            elif len(rows_of_form):
                total += self.transfer(rows_of_form[0]).bytes * len(rows_of_form)
        return total


def _content_key(form: WireForm) -> object:
    """A key that forms share if they send the same bytes for one position."""
    piece = once(Piece(value=form.value, source=(), target=(), factors=form.factors))
    reads = tuple(
        (factor.size, factor.source_dim, factor.source_step) for factor in piece.factors
    )
    return (
        form.value,
        numbers_text([piece]),
        reads,
        form.sender_casts,
        form.sent_dtype,
        form.scales_dtype,
    )


class SentLeaf(NamedTuple):
    """An array of the receiving job. `shape` and `dtype` are those of its raw data (the
    key data of PRNG keys). `digest` is a hash of its part of the plan. `kind` is the
    number of its `TransferKind`. `source_paths` are the paths of its sources.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str
    kind: int
    source_paths: tuple[str, ...]


class SourceLeaf(NamedTuple):
    """An array of the sending job. `shape` and `dtype` are those of the array itself,
    and `axes` has the mesh axes that shard each of its dimensions.
    """

    shape: tuple[int, ...]
    dtype: DType
    axes: tuple[tuple[str, ...], ...]

    @property
    def data(self) -> Struct:
        """The shape and dtype of the raw data: for PRNG keys those of the key data."""
        shape, dtype = data_of(self.shape, self.dtype)
        return Struct(shape, dtype)


class PlanFields(NamedTuple):
    """The fields of a [`shardfx.sync.TransferPlan`][], which are written as JSON."""

    settings: str
    mesh: tuple[tuple[str, int], ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    memory_limit_bytes: int
    sources: Mapping[str, SourceLeaf]
    kinds: tuple[TransferKind, ...]
    leaves: tuple[SentLeaf, ...]


def with_paths(value: Value, path_by_first_path: Mapping[str, str]) -> Value:
    """The value for another leaf of its kind. `path_by_first_path` has the path of each
    source of that leaf, by the path of the first leaf's source.
    """
    if value.path is None:
        return value
    scale = value.scale
    if scale is not None:
        scale = scale._replace(path=path_by_first_path[scale.path])
    path = path_by_first_path[value.path]
    return value._replace(path=path, scale=scale)


def hash_of(texts: Sequence[str]) -> str:
    """The SHA-256 of some texts, as hexadecimal digits."""
    text = "\0".join(texts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
