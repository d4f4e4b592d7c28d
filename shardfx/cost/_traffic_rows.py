"""The traffic of a step as data: a row for each collective, with its bytes, calls, mesh
axes and source line.
"""

import dataclasses
from collections import Counter
from typing import Any, Literal, TypeAlias, get_args

from .._ground.errors import UnknownPathError
from .._ground.text import (
    bytes_text,
    first_lines,
    html_text,
    plural,
    printable,
    table,
    together,
)
from .._rules import near
from .._step import Frame, Phase, place_text


Key = Literal["axes", "kind", "source", "leaf", "dtype", "phase"]
# The key of a difference: the kind of a collective, its mesh axes, its source line and
# its leaf.
_Kind: TypeAlias = tuple[str, tuple[str, ...], Frame | None, str | None]


@dataclasses.dataclass(frozen=True)
class TrafficRow:
    """One collective of a compiled step.

    **Arguments:**

    - `kind`: XLA's name of the kind, such as "all-gather". If `windowed` is true, the
      kind that the permutes replace.
    - `wire_bytes`: the bytes that enter a device in one step, as the mean over devices:
      `calls` times the bytes of one call. In a loop of unknown trip count, the bytes of
      one iteration.
    - `dcn_bytes`: the part of `wire_bytes` that comes from another slice.
    - `calls`: the number of times that the collective runs in one step; `None` in a
      loop of unknown trip count; 0 in a branch of a conditional if another branch sends
      more.
    - `dtype`, `arrays`: the dtype of the collective's result in HLO's notation, and its
      arrays on one device, as `f32[8,128]`.
    - `group_size`: the number of devices in a replica group.
    - `axes`: the mesh axes along which the devices of a replica group differ; empty if
      no mesh is known.
    - `source`: the innermost line of your own program that causes the collective;
      `None` if it is not known.
    - `stack`: the call stack of the operation that causes the collective, innermost
      frame first.
    - `leaf`: the path of the parameter that the collective gathers, or whose gradient
      it reduces, or `None`. Several paths are separated by ", ".
    - `shares`: pairs of a parameter's path and its part of `wire_bytes`. The path is
      `None` for other arrays.
    - `windowed`: whether the collective is a loop of permutes and matrix products (a
      windowed einsum), by which XLA replaces an all-gather or a reduce-scatter.
    - `note`: further notes, or "".
    - `phase`: "forward", "backward" or "recomputed"; "" if JAX does not name the pass.
    - `callback`: the callback to Python for which alone the collective sends, such as
      "jax.debug.print"; else "". Without the callback, the collective is gone.
    - `pairs`: of a permute, the sender and the receiver of each message, as positions in
      the mesh; empty for other kinds.
    """

    __module__ = "shardfx.cost"

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
    arrays: tuple[str, ...] = ()
    phase: Phase = ""
    callback: str = ""
    pairs: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a step sends, a row for each collective; returned by
    [`shardfx.cost.traffic`][].

    `str(...)` is a table. `a - b` is a [`shardfx.cost.TrafficDifference`][].

    **Arguments:**

    - `rows`: the collectives, the largest first.
    - `devices`, `axes`: the number of devices that run the step, and the axes of its
      mesh; empty if no mesh is known.
    - `basis`: "compiled": the rows are those of the compiler's own program. "foreseen":
      those of the program that XLA's partitioner makes, which the compiler still
      changes.
    - `notes`: further notes, such as the bytes to expect in the place of foreseen ones.
    """

    __module__ = "shardfx.cost"

    rows: tuple[TrafficRow, ...]
    devices: int
    axes: tuple[str, ...] = ()
    basis: Literal["compiled", "foreseen"] = "compiled"
    notes: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """The bytes that enter a device in one step, as the mean over devices."""
        return sum(row.wire_bytes for row in self.rows)

    @property
    def dcn_bytes(self) -> int:
        """The bytes that enter a device from other slices in one step, as the mean over
        devices.
        """
        return sum(row.dcn_bytes for row in self.rows)

    def by(self, key: Key) -> dict[Any, int]:
        """The bytes of one step for each value of a field of the rows, the largest
        first.

        **Arguments:**

        - `key`: the name of the field: "axes", "kind", "source", "leaf", "dtype" or
          "phase".

        **Raises:**

        `UnknownPathError` for another name.
        """
        if key not in get_args(Key):
            raise UnknownPathError(
                f"traffic has no field {key!r:.40} to sum by{near(str(key), get_args(Key))};"
                f' the fields are {", ".join(get_args(Key))}: write `by("axes")`.'
            )
        sums: Counter[object] = Counter()
        for row in self.rows:
            if key == "leaf":
                shares = row.shares
            else:
                shares = ((vars(row)[key], row.wire_bytes),)
            for value, nbytes in shares:
                sums[value] += nbytes
        return dict(sums.most_common())

    def __sub__(self, other: "Traffic") -> "TrafficDifference":
        """The difference of two steps: for each kind, axes, source line and leaf, the
        bytes in `self` and in `other`.
        """
        if not isinstance(other, Traffic):
            return NotImplemented
        sums: dict[_Kind, list[int]] = {}
        for side, side_traffic in enumerate((self, other)):
            for row in side_traffic.rows:
                kind = (row.kind, row.axes, row.source, row.leaf)
                sums.setdefault(kind, [0, 0])[side] += row.wire_bytes
        # Each with the bytes of the first and of the second step.
        rows = [(kind, ours, theirs) for kind, (ours, theirs) in sums.items()]
        rows.sort(key=lambda row: -abs(row[1] - row[2]))
        return TrafficDifference(tuple(rows))

    def __str__(self) -> str:
        return self.text()

    __repr__ = first_lines
    _repr_html_ = html_text

    def text(self, width: int | None = None) -> str:
        """The traffic as a text table. If it is wider than `width`, the least
        informative columns are left out.
        """
        return "\n".join(text_of(self, width=width))


def text_of(
    of_traffic: Traffic,
    most: int | None = None,
    width: int | None = None,
) -> list[str]:
    """The lines of a text table of the first `most` rows, the total and the notes. The
    source line that sends most comes first. If the table is wider than `width`, the
    least informative columns are left out.
    """
    devices = of_traffic.devices
    if not of_traffic.rows:
        return [f"no traffic: a step on {plural(devices, 'device')} sends nothing."]

    def minus_bytes(rows: list[TrafficRow]) -> int:
        return -sum(row.wire_bytes for row in rows)

    cells = []
    lines = together(of_traffic.rows[:most], lambda row: row.source)
    for rows_of_line in sorted(lines.values(), key=minus_bytes):
        for number, row in enumerate(rows_of_line):
            cells.append(_cells(row, number == 0))
    dcn = ""
    if of_traffic.dcn_bytes:
        dcn = f", {bytes_text(of_traffic.dcn_bytes)} of them between slices"
    total = (
        f"{bytes_text(of_traffic.wire_bytes)} enter each of {devices} devices in a"
        f" step{dcn}."
    )
    if len(cells) < len(of_traffic.rows):
        total += f" {len(of_traffic.rows) - len(cells)} more rows."
    notes = dict.fromkeys(row.note for row in of_traffic.rows if row.note)
    return [
        *table([_HEADER, *cells], right=_NUMBERS, width=width, spare=_SPARE),
        total,
        *notes,
        *of_traffic.notes,
    ]


def largest_first(of_traffic: Traffic) -> Traffic:
    """The traffic with its rows sorted by `wire_bytes`, the largest first."""
    rows = sorted(of_traffic.rows, key=lambda row: -row.wire_bytes)
    return dataclasses.replace(of_traffic, rows=tuple(rows))


@dataclasses.dataclass(frozen=True)
class TrafficDifference:
    """The traffic of one step minus the traffic of another.

    **Arguments:**

    - `rows`: tuples of a key (kind, axes, source, leaf), the bytes of the first step
      and those of the second, the largest difference first.
    """

    __module__ = "shardfx.cost"

    rows: tuple[tuple[_Kind, int, int], ...]

    @property
    def wire_bytes(self) -> int:
        """The bytes of the first step minus the bytes of the second."""
        return sum(ours - theirs for _, ours, theirs in self.rows)

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [(*_COMPARED, "kind", "axes", "leaf", "source")]
        for (kind, axes, source, leaf), ours, theirs in self.rows:
            if ours == theirs:
                continue
            difference = _signed(ours - theirs)
            place = place_cells(axes, leaf, source)
            cells.append(
                (difference, bytes_text(ours), bytes_text(theirs), kind, *place)
            )
        if len(cells) == 1:
            return "the same traffic"
        lines = table(cells, right=_COMPARED)
        return "\n".join([*lines, f"{_signed(self.wire_bytes)} in all."])

    __repr__ = first_lines
    _repr_html_ = html_text


_NUMBERS = {"bytes/step", "calls", "group"}
_SPARE = ("group", "calls", "pass", "array")
_COMPARED = ("difference", "first", "second")
_HEADER = (
    "bytes/step",
    "kind",
    "axes",
    "group",
    "calls",
    "array",
    "pass",
    "leaf",
    "source",
)


def axes_text(axes: tuple[str, ...]) -> str:
    return " x ".join(axes) or "-"


def place_cells(
    axes: tuple[str, ...],
    leaf: str | None,
    source: Frame | None,
) -> tuple[str, str, str]:
    return axes_text(axes), leaf or "-", place_text(source)


def _cells(row: TrafficRow, is_first: bool) -> tuple[str, ...]:
    """The cells of a row of the table. Only the first row of a source line has the line
    (`is_first`).
    """
    kind = f"{row.kind} (windowed)" if row.windowed else row.kind
    array_text = row.dtype or "-"
    if row.arrays:
        array_text = row.arrays[0]
    if len(row.arrays) > 1:
        array_text += f" +{len(row.arrays) - 1}"
    return (
        bytes_text(row.wire_bytes),
        kind,
        axes_text(row.axes),
        str(row.group_size),
        "?" if row.calls is None else str(row.calls),
        array_text,
        row.phase or "-",
        _leaf_cell(row),
        place_text(row.source) if is_first else "",
    )


def _leaf_cell(row: TrafficRow) -> str:
    """The first of a row's leaves with the number of others, and its callback."""
    first, *others = (row.leaf or "").split(", ")
    leaf = printable(f"{first} +{len(others)}" if others else first or "-")
    if not row.callback:
        return leaf
    if row.leaf:
        return f"{leaf} for {row.callback}"
    return f"for {row.callback}"


def _signed(count: int) -> str:
    """A difference in bytes as text, with its sign."""
    sign = "-" if count < 0 else "+"
    return f"{sign}{bytes_text(abs(count))}"
