"""The rows and forms of a `TransferKind`, collected one by one."""

from collections.abc import Sequence

import numpy as np

from ..._convert import Factor, Piece, Value
from ..._ground.errors import SyncError
from ..pieces.assembly import numbers_text
from .coverage import MOST_BOXES
from .encoding import Encoding, form_of
from .kinds import BUFFER, FIRST_POSITION, WireForm


class Table:
    """The rows and the forms of a `TransferKind`, while these are collected one by one.
    `path` is that of the first leaf, `rank` the largest number of dimensions of a
    source, and `dtype` the dtype of the target.
    """

    def __init__(self, path: str, rank: int, dtype: np.dtype):
        self.forms: list[WireForm] = []
        # The path of the first leaf, the most dimensions of a source, and the dtype of
        # the target.
        self._path = path
        self._rank = rank
        self._dtype = dtype
        # By a form's value, the text of its numbers and its loops, its position in
        # `forms`.
        self._form_numbers: dict[tuple[Value, str, tuple[Factor, ...]], int] = {}
        # The integers of all parts, one after another, without the numbers of buffers.
        self._rows: list[int] = []
        # For each part the number of buffers that need it, and their numbers for all
        # parts one after another.
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
        numbers = ""
        # Most parts are copied as they are, and have no numbers.
        if piece.value.number is not None or piece.value.casts:
            numbers = numbers_text([piece])
        key = (piece.value, numbers, piece.factors)
        form_number = self._form_numbers.setdefault(key, len(self.forms))
        if form_number == len(self.forms):
            form = form_of(encoding, piece, len(start), self._dtype)
            self.forms.append(form)

        source = [0] * self._rank
        for dim, low in enumerate(start):
            source[dim] = low + piece.source[dim]
        # The number of the buffer is written by `rows`.
        self._rows += [*sender, 0, form_number, *source, *piece.target]
        self._counts.append(len(buffers))
        self._buffers += buffers

    def require_room(self, count: int) -> None:
        """Raises `SyncError` if `count` more parts are too many for one array."""
        if len(self._counts) + count > MOST_BOXES:
            raise SyncError(
                f"leaf `{self._path}` would be sent in more than {MOST_BOXES:,} parts;"
                " plan with a larger `memory_limit_bytes`, or for one process with"
                " `receiver=`."
            )

    def rows(self, dims: int) -> np.ndarray:
        """The rows of a `TransferKind` whose target has `dims` dimensions. They are
        ordered by buffer. So a plan for one receiver has its rows in the same order as
        a plan for all.
        """
        shape = (len(self._counts), FIRST_POSITION + self._rank + dims)
        rows = np.array(self._rows, np.int64).reshape(shape)
        # One row for each buffer that needs a part.
        rows = np.repeat(rows, self._counts, axis=0)
        rows[:, BUFFER] = self._buffers
        order = np.argsort(rows[:, BUFFER], kind="stable")
        return rows[order]
