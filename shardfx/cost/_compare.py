"""The bytes that a compiled step sends beyond its estimate, by source line."""

import dataclasses
from collections.abc import Iterator, Sequence, Set

from .._ground import opcodes
from .._ground.errors import LeafTypeError, check_type
from .._ground.misuse import called
from .._ground.text import bytes_text, first_lines, html_text, table
from .._step import Frame, place_text
from ._traffic import traffic
from ._traffic_rows import Traffic, TrafficRow, place_cells


_REST = "what has no line, and lines at which little differs"


@dataclasses.dataclass(frozen=True)
class Excess:
    """The difference between a compiled step's traffic and its estimate, for one source
    line and tuple of mesh axes.

    **Arguments:**

    - `extra_bytes`: the bytes per device and step of the compiled step, minus the bytes
      of the estimate.
    - `source`, `axes`: the source line and the mesh axes; `None` and empty in a row
      that sums all other lines.
    - `leaf`: the paths of the parameters that the collectives gather, or whose
      gradients they reduce, or `None`.
    - `expected`, `found`: pairs of a kind of collective and its bytes, in the estimate
      and in the compiled step.
    - `why`: a sentence that explains the difference.
    """

    __module__ = "shardfx.cost"

    extra_bytes: int
    source: Frame | None
    axes: tuple[str, ...]
    leaf: str | None
    expected: tuple[tuple[str, int], ...]
    found: tuple[tuple[str, int], ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences between a compiled step's traffic and its estimate; returned by
    [`shardfx.cost.compare`][].

    The bytes of all rows, in `rows` and `less`, add up to `extra_bytes`. `str(...)` is
    a table.

    **Arguments:**

    - `rows`, `less`: a [`shardfx.cost.Excess`][] for each source line and tuple of mesh
      axes where the compiled step sends more (or less) than the estimate, the largest
      first. The last row of each can be the sum of other lines.
    - `estimated`, `compiled`: the traffic of the estimate, and of the compiled step.
    """

    __module__ = "shardfx.cost"

    rows: tuple[Excess, ...]
    estimated: Traffic
    compiled: Traffic
    less: tuple[Excess, ...] = ()

    @property
    def different_bytes(self) -> int:
        """The sum of the absolute differences in bytes of all rows."""
        return sum(abs(row.extra_bytes) for row in (*self.rows, *self.less))

    @property
    def extra_bytes(self) -> int:
        """The bytes per device and step of the compiled step, minus the bytes of the
        estimate.
        """
        return self.compiled.wire_bytes - self.estimated.wire_bytes

    def __str__(self) -> str:
        estimated_bytes = self.estimated.wire_bytes
        compiled_bytes = self.compiled.wire_bytes
        times = ""
        if estimated_bytes:
            times = f", {compiled_bytes / estimated_bytes:.2f} times as much"
        total = (
            f"{bytes_text(compiled_bytes)} are sent to each device in a step;"
            f" {bytes_text(estimated_bytes)} were estimated{times}."
        )
        if not self.rows:
            return total
        cells = [("extra", "expected", "found", "axes", "leaf", "source")]
        sentences: dict[str, None] = {}
        for row in self.rows:
            extra = f"+{bytes_text(row.extra_bytes)}"
            kinds = (_kinds(row.expected), _kinds(row.found))
            place = place_cells(row.axes, row.leaf, row.source)
            cells.append((extra, *kinds, *place))
            sentences[f"{place_text(row.source)}: {extra}: {row.why}."] = None
        return "\n".join([*table(cells, right={"extra"}), total, *sentences])

    __repr__ = first_lines
    _repr_html_ = html_text


@called("compare(estimated, compiled)")
def compare(estimated: Traffic, compiled: object) -> Comparison:
    """The bytes that a compiled step sends beyond its estimate, by source line.

    **Arguments:**

    - `estimated`: the estimate of the step, from [`shardfx.cost.estimate`][].
    - `compiled`: the traffic of the compiled step, from [`shardfx.cost.traffic`][]; or
      any argument of that function.

    **Returns:**

    A [`shardfx.cost.Comparison`][]. If the compiler sends the same bytes along the same
    mesh axes at another source line, they are no difference. All differences smaller
    than a thousandth of the step's bytes are in one row.

    **Raises:**

    `LeafTypeError` for an estimate that is none; the errors of
    [`shardfx.cost.traffic`][] for a program that it cannot read.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec
        from shardfx.cost import compare, estimate

        mesh = MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=rows)
        step = lambda x: jax.lax.with_sharding_constraint(x.T @ x, rows)
        compiled = jax.jit(step).lower(x).compile()
        (row,) = compare(estimate(step, x, compiler="gpu"), compiled).rows
        assert row.why == "it is sent by all-reduce, not by reduce-scatter"
        ```
    """
    check_type(
        what="estimated",
        value=estimated,
        expected=Traffic,
        error=LeafTypeError,
        fix="give what `cost.estimate(step, *args)` returns",
    )
    compiled_traffic = compiled
    if not isinstance(compiled_traffic, Traffic):
        compiled_traffic = traffic(compiled)
    line_traffics = _line_traffics(estimated, compiled_traffic)
    _offset(line_traffics)
    step_bytes = max(estimated.wire_bytes, compiled_traffic.wire_bytes)
    least_bytes = max(1, step_bytes // 1000)
    larger = [line_traffic for line_traffic in line_traffics if line_traffic.extra > 0]
    smaller = [line_traffic for line_traffic in line_traffics if line_traffic.extra < 0]
    return Comparison(
        rows=_excesses(larger, least_bytes),
        estimated=estimated,
        compiled=compiled_traffic,
        less=_excesses(smaller, least_bytes),
    )


def _line_traffics(estimated: Traffic, compiled: Traffic) -> list["_LineTraffic"]:
    """The estimated and the compiled rows of each source line and tuple of axes. A
    collective that the compiler moved to another line counts at the line of its
    estimate if it reduces the gradient of the same leaf.
    """
    # The source line of the reduction of each leaf's gradient. A reduction of several
    # gradients is divided among them.
    reduction_lines: dict[str, Frame | None] = {}
    for row in estimated.rows:
        if row.leaf is not None and row.kind in opcodes.SUMS:
            reduction_lines[row.leaf] = row.source

    line_traffics: dict[object, _LineTraffic] = {}

    def traffic_at(source: Frame | None, axes: tuple[str, ...]) -> _LineTraffic:
        line = None if source is None else (source.file, source.line)
        line_traffic = _LineTraffic(source=source, axes=axes)
        return line_traffics.setdefault((line, axes), line_traffic)

    for source, row in _rows_by_line(estimated, {}):
        line_traffic = traffic_at(source, row.axes)
        line_traffic.estimated.append(row)
        line_traffic.extra -= row.wire_bytes
    for source, row in _rows_by_line(compiled, reduction_lines):
        line_traffic = traffic_at(source, row.axes)
        line_traffic.compiled.append(row)
        line_traffic.extra += row.wire_bytes
    return list(line_traffics.values())


def _offset(line_traffics: Sequence["_LineTraffic"]) -> None:
    """Offsets bytes that a line sends less with bytes that other lines send more along
    the same mesh axes, the largest first. The `extra` of a line is its compiled bytes
    less its estimated ones, and negative if it sends less.
    """
    for line_traffic in sorted(
        line_traffics, key=lambda line_traffic: -line_traffic.extra
    ):
        for other in line_traffics:
            if other.axes != line_traffic.axes:
                continue
            moved_bytes = min(line_traffic.extra, -other.extra)
            if moved_bytes > 0:
                line_traffic.extra -= moved_bytes
                other.extra += moved_bytes


def _excesses(
    line_traffics: Sequence["_LineTraffic"],
    least_bytes: int,
) -> tuple[Excess, ...]:
    """A row for each place, the largest first, and one for all places without a line or
    with less than `least_bytes` bytes. The `extra` of a place is its compiled bytes
    less its estimated ones; all have one sign here.
    """
    rows = []
    rest = []
    for line_traffic in sorted(
        line_traffics, key=lambda line_traffic: -abs(line_traffic.extra)
    ):
        if line_traffic.source is None or abs(line_traffic.extra) < least_bytes:
            rest.append(line_traffic)
        else:
            rows.append(_excess([line_traffic], line_traffic.source, line_traffic.axes))
    if rest:
        rows.append(_excess(rest))
    return tuple(rows)


@dataclasses.dataclass(eq=False)
class _LineTraffic:
    """The estimated and the compiled rows of one source line and tuple of mesh axes,
    and the bytes of the compiled rows minus the bytes of the estimated rows (`extra`).
    """

    source: Frame | None
    axes: tuple[str, ...]
    estimated: list[TrafficRow] = dataclasses.field(default_factory=list[TrafficRow])
    compiled: list[TrafficRow] = dataclasses.field(default_factory=list[TrafficRow])
    extra: int = 0


def _rows_by_line(
    of_traffic: Traffic,
    reduction_lines: dict[str, Frame | None],
) -> Iterator[tuple[Frame | None, TrafficRow]]:
    """Yields each row of the traffic, divided into one row for each parameter of the
    collective, with a source line. This is the row's own line, with one exception:
    `reduction_lines` has the lines at which the gradients of parameters are reduced, by
    the parameter's path. A row that reduces the gradient of one of these parameters has
    its line from there.
    """
    for row in of_traffic.rows:
        shares = row.shares or ((row.leaf, row.wire_bytes),)
        shared_bytes = sum(nbytes for _, nbytes in shares)
        rounded_off_bytes = row.wire_bytes - shared_bytes
        for leaf, nbytes in shares:
            source = row.source
            if leaf in reduction_lines and row.kind in opcodes.SUMS:
                source = reduction_lines[leaf]
            wire_bytes = nbytes + rounded_off_bytes
            yield source, dataclasses.replace(row, leaf=leaf, wire_bytes=wire_bytes)
            # The first part has what rounding took.
            rounded_off_bytes = 0


def _excess(
    line_traffics: Sequence[_LineTraffic],
    source: Frame | None = None,
    axes: tuple[str, ...] = (),
) -> Excess:
    """The sum of `line_traffics` as an `Excess`. `source` and `axes` are the line and
    the axes of a single place. The sum of several places has neither.
    """
    expected_rows: list[TrafficRow] = []
    found_rows: list[TrafficRow] = []
    for line_traffic in line_traffics:
        expected_rows += [row for row in line_traffic.estimated if row.wire_bytes]
        found_rows += [row for row in line_traffic.compiled if row.wire_bytes]
    leaves = dict.fromkeys(row.leaf for row in found_rows if row.leaf)
    return Excess(
        extra_bytes=sum(line_traffic.extra for line_traffic in line_traffics),
        source=source,
        axes=axes,
        leaf=", ".join(leaves) or None,
        expected=_bytes_by_kind(expected_rows),
        found=_bytes_by_kind(found_rows),
        why=_REST if source is None else _why(expected_rows, found_rows),
    )


def _bytes_by_kind(rows: Sequence[TrafficRow]) -> tuple[tuple[str, int], ...]:
    """Pairs of a kind of collective and the bytes of its rows, the largest first."""
    return tuple(Traffic(tuple(rows), 1).by("kind").items())


def _why(expected: Sequence[TrafficRow], compiled: Sequence[TrafficRow]) -> str:
    """A sentence about the difference between the rows of one source line."""
    notes = dict.fromkeys(row.note for row in expected if row.note)
    if notes:
        return "; ".join(notes).rstrip(".")
    if not expected:
        return "nothing was estimated here"
    expected_kinds = {row.kind for row in expected}
    found_kinds = {row.kind for row in compiled}
    if found_kinds and found_kinds != expected_kinds:
        return f"it is sent by {_words(found_kinds)}, not by {_words(expected_kinds)}"
    expected_dtypes = {row.dtype for row in expected}
    found_dtypes = {row.dtype for row in compiled}
    if found_dtypes and found_dtypes != expected_dtypes:
        return f"it is sent as {_words(found_dtypes)}, not as {_words(expected_dtypes)}"
    return "this compiler sends it otherwise"


def _words(names: Set[str]) -> str:
    return " and ".join(sorted(names))


def _kinds(sums: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{kind} {bytes_text(count)}" for kind, count in sums) or "nothing"
