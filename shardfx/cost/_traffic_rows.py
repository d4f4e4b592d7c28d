"""The rows of a step's traffic: which collective runs how often, along which mesh axes, from which line."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from .._ground.text import bytes_text, first_lines, html_table, printable, table
from .._step import Frame, place_text
from ._hlo_text import Phase


Key = Literal["axes", "kind", "source", "leaf", "dtype"]


@dataclasses.dataclass(frozen=True)
class TrafficRow:
    """One collective of a compiled step.

    **Arguments:**

    - `kind`: XLA's name of the kind, such as "all-gather". A loop of permutes that feeds a product has the kind of the
        collective that it replaces, and `windowed` is true.
    - `wire_bytes`: bytes that enter a device in one step, the mean over devices: `calls` times the bytes of one call.
        In a loop whose trips are not known, the bytes of one trip.
    - `dcn_bytes`: the part of `wire_bytes` that comes from another slice.
    - `calls`: the number of times that it runs in one step; `None` in a loop whose trips are not known; 0 in a branch
        of a conditional that has a branch which sends more.
    - `dtype`: the dtype that it sends, in HLO's notation.
    - `group_size`: the number of devices that exchange with each other.
    - `axes`: the mesh axes along which they differ; empty where no mesh is known.
    - `source`: the innermost line of your own program that it came from; `None` where the program does not say.
    - `stack`: all lines, innermost first.
    - `leaf`: the path of the parameter that it gathers, or whose gradient it adds up; several are joined by ", ".
    - `shares`: the bytes of each leaf, `None` for those of none.
    - `windowed`: whether it is a loop of permutes in the place of a gather or a reduction.
    - `note`: further notes, or "".
    - `passes`: the compiler's passes that made it from another collective, if the program was not finished by a
        compiler.
    - `unsure_bytes`: bytes by which the finished program may differ from `wire_bytes`, in either direction.
    - `arrays`: the arrays of its result on one device, as `f32[8,128]`.
    - `phase`: "forward", "backward" or "recomputed", where JAX says which pass it is of.
    """

    kind: str
    wire_bytes: int
    dcn_bytes: int
    calls: int | None
    dtype: str
    group_size: int
    axes: tuple[str, ...]
    source: Frame | None
    stack: tuple[Frame, ...]
    leaf: str | None
    shares: tuple[tuple[str | None, int], ...] = ()
    windowed: bool = False
    note: str = ""
    passes: tuple[str, ...] = ()
    unsure_bytes: int = 0
    arrays: tuple[str, ...] = ()
    phase: Phase = ""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a step sends, a row for each collective, the largest first; made by [`shardfx.cost.traffic`][].

    `str(...)` is a table. `a - b` is a [`shardfx.cost.TrafficDifference`][].

    **Arguments:**

    - `rows`: the collectives.
    - `devices`: the number of devices that run the step.
    - `axes`: the axes of its mesh; empty if no mesh is known.
    """

    rows: tuple[TrafficRow, ...]
    devices: int
    axes: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter a device in one step."""
        return sum(row.wire_bytes for row in self.rows)

    @property
    def dcn_bytes(self) -> int:
        """Bytes that enter a device from another slice in one step."""
        return sum(row.dcn_bytes for row in self.rows)

    @property
    def unsure_bytes(self) -> int:
        """The bytes by which the finished program may differ from `wire_bytes`, in either direction."""
        return sum(row.unsure_bytes for row in self.rows)

    def by(self, key: Key) -> dict[Any, int]:
        """The bytes of one step, summed.

        **Arguments:**

        - `key`: "axes", "kind", "source", "leaf" or "dtype": a field of the rows.

        **Returns:**

        Bytes per value, the largest first.
        """
        sums: dict[object, int] = {}
        for row in self.rows:
            for value, count in row.shares if key == "leaf" else ((vars(row)[key], row.wire_bytes),):
                sums[value] = sums.get(value, 0) + count
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __sub__(self, other: "Traffic") -> "TrafficDifference":
        ours, theirs = _keyed(self), _keyed(other)
        pairs = [(key, ours.get(key, 0), theirs.get(key, 0)) for key in {**ours, **theirs}]
        return TrafficDifference(tuple(sorted(pairs, key=lambda row: -abs(row[1] - row[2]))))

    def __str__(self) -> str:
        return self.text()

    __repr__ = first_lines

    def text(self, width: int | None = None) -> str:
        """The traffic as a table. If it is wider than `width`, the least informative columns are left out."""
        return "\n".join(text_of(self, width=width))

    def _repr_html_(self) -> str:
        # Notebooks show this if the traffic is the last line of a cell.
        return html_of(self)

    def below(self, most: int | None = None) -> list[str]:
        """The lines below the table: the total, the number of rows left out, and each note once."""
        if not self.rows:
            where = "one device" if self.devices == 1 else f"{self.devices} devices"
            return [f"no traffic: a step on {where} sends nothing."]
        dcn = f", {bytes_text(self.dcn_bytes)} of them between slices" if self.dcn_bytes else ""
        total = f"{bytes_text(self.wire_bytes)} enter each of {self.devices} devices in a step{dcn}."
        if self.unsure_bytes:
            total += f" {bytes_text(self.unsure_bytes)} more or less are not sure: the compiler decides."
        total += f" {more} more rows." if (more := len(self.rows[most:]) if most else 0) else ""
        return [total, *dict.fromkeys(row.note for row in self.rows if row.note)]


def text_of(made: Traffic, most: int | None = None, width: int | None = None) -> list[str]:
    """The first rows as a table, and the lines below it."""
    rows = _table(made.rows[:most])
    return [*(table(rows, right=_NUMBERS, width=width, spare=_SPARE) if rows else ()), *made.below(most)]


def html_of(made: Traffic, most: int | None = None, above: Sequence[str] = (), below: Sequence[str] = ()) -> str:
    """The table of `text_of` and the lines around it as HTML, for a notebook."""
    return html_table(_table(made.rows[:most]), right=_NUMBERS, below=[*above, *made.below(most), *below])


def _table(rows: Sequence[TrafficRow]) -> list[tuple[str, ...]]:
    """A header and a line of cells for each row. Rows of one source line are adjacent, and the line that sends most
    comes first.
    """
    sums: dict[Frame | None, int] = {}
    for row in rows:
        sums[row.source] = sums.get(row.source, 0) + row.wire_bytes
    lines = [[row for row in rows if row.source == line] for line in sorted(sums, key=lambda line: -sums[line])]
    return [_HEADER, *[_cells(row, at == 0) for own in lines for at, row in enumerate(own)]] if lines else []


def largest_first(made: Traffic) -> Traffic:
    """The traffic with its rows sorted by bytes."""
    return dataclasses.replace(made, rows=tuple(sorted(made.rows, key=lambda row: -row.wire_bytes)))


@dataclasses.dataclass(frozen=True)
class TrafficDifference:
    """The difference between the traffic of two steps; made by subtracting one [`shardfx.cost.Traffic`][] from another.

    **Arguments:**

    - `rows`: (kind, axes, source, leaf), bytes of the first, bytes of the second; the largest difference first.
    """

    rows: tuple[tuple[tuple[str, tuple[str, ...], Frame | None, str | None], int, int], ...]

    @property
    def wire_bytes(self) -> int:
        """The bytes that the first step sends beyond the second; negative if it sends fewer."""
        return sum(ours - theirs for _, ours, theirs in self.rows)

    def __str__(self) -> str:
        rows = self._table()
        return "\n".join([*(table(rows, right=_COMPARED) if rows else ()), self._below(rows)])

    __repr__ = first_lines

    def _repr_html_(self) -> str:
        rows = self._table()
        return html_table(rows, right=_COMPARED, below=[self._below(rows)])

    def _below(self, rows: Sequence[object]) -> str:
        return f"{_signed(self.wire_bytes)} in all." if rows else "the same traffic"

    def _table(self) -> list[tuple[str, ...]]:
        """A header and a line of cells for each change; nothing if the two are equal."""
        cells = [
            (
                _signed(ours - theirs),
                bytes_text(ours),
                bytes_text(theirs),
                kind,
                " x ".join(axes) or "-",
                leaf or "-",
                place_text(source),
            )
            for (kind, axes, source, leaf), ours, theirs in self.rows
            if ours != theirs
        ]
        return [(*_COMPARED, "kind", "axes", "leaf", "source"), *cells] if cells else []


_NUMBERS = {"bytes/step", "calls", "group"}
_SPARE = ("group", "calls", "pass", "array")
_COMPARED = ("difference", "first", "second")
_HEADER = ("bytes/step", "kind", "axes", "group", "calls", "array", "pass", "leaf", "source")


def _cells(row: TrafficRow, is_first: bool) -> tuple[str, ...]:
    """The cells of a row. The source line is shown only in the first row of that line."""
    first, _, others = (row.leaf or "").partition(", ")
    more = f" +{len(row.arrays) - 1}" if len(row.arrays) > 1 else ""
    return (
        bytes_text(row.wire_bytes),
        f"{row.kind}{' (windowed)' if row.windowed else ''}",
        " x ".join(row.axes) or "-",
        str(row.group_size),
        "?" if row.calls is None else str(row.calls),
        f"{row.arrays[0]}{more}" if row.arrays else row.dtype or "-",
        row.phase or "-",
        printable(first + (f" +{others.count(', ') + 1}" if others else "") or "-"),
        place_text(row.source) if is_first else "",
    )


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{bytes_text(abs(count))}"


def _keyed(made: Traffic) -> dict[tuple[str, tuple[str, ...], Frame | None, str | None], int]:
    sums: dict[tuple[str, tuple[str, ...], Frame | None, str | None], int] = {}
    for row in made.rows:
        key = (row.kind, row.axes, row.source, row.leaf)
        sums[key] = sums.get(key, 0) + row.wire_bytes
    return sums
