"""The bytes that a compiled step sends beyond its estimate, by source line."""

import dataclasses
from collections.abc import Iterator, Sequence, Set

from .._ground.text import bytes_text, first_lines, html_text, table
from .._step import Frame, place_text
from ._traffic import traffic
from ._traffic_rows import Traffic, TrafficRow, place_cells


_SUMS = ("all-reduce", "reduce-scatter")
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
        ours, theirs = self.estimated.wire_bytes, self.compiled.wire_bytes
        times = f", {theirs / ours:.2f} times as much" if ours else ""
        total = (
            f"{bytes_text(theirs)} are sent to each device in a step;"
            f" {bytes_text(ours)} were estimated{times}."
        )
        if not self.rows:
            return total
        cells = [("extra", "expected", "found", "axes", "leaf", "source")]
        for row in self.rows:
            place = place_cells(row.axes, row.leaf, row.source)
            cells.append(
                (
                    f"+{bytes_text(row.extra_bytes)}",
                    _kinds(row.expected),
                    _kinds(row.found),
                    *place,
                )
            )
        texts = [
            f"{place_text(row.source)}: +{bytes_text(row.extra_bytes)}: {row.why}."
            for row in self.rows
        ]
        return "\n".join([*table(cells, right={"extra"}), total, *dict.fromkeys(texts)])

    __repr__ = first_lines
    _repr_html_ = html_text


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

    The errors of [`shardfx.cost.traffic`][] for a program that it cannot read.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec
        from shardfx.cost import compare, estimate

        mesh = MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=rows)
        step = lambda x: jax.lax.with_sharding_constraint(x.T @ x, rows)
        compiled = jax.jit(step).lower(x).compile()
        (row,) = compare(estimate(step, x, compiler="gpu"), compiled).rows
        assert row.why == "it is sent by all-reduce, not by reduce-scatter"
        ```
    """
    compiled_traffic = compiled if isinstance(compiled, Traffic) else traffic(compiled)
    # The source line of the reduction of each leaf's gradient. A reduction of several
    # gradients is divided among them.
    lines = {
        row.leaf: row.source
        for row in estimated.rows
        if row.leaf is not None and row.kind in _SUMS
    }
    places: dict[tuple[object, ...], _LineTraffic] = {}
    for side, sent in enumerate(
        (_rows_by_line(estimated, {}), _rows_by_line(compiled_traffic, lines))
    ):
        for source, row in sent:
            key = None if source is None else (source.file, source.line), row.axes
            place = places.setdefault(key, _LineTraffic(source, row.axes, ([], [])))
            place.rows[side].append(row)
            place.extra += row.wire_bytes if side else -row.wire_bytes
    # Bytes that a line sends less offset bytes that other lines send more along the
    # same mesh axes, the largest first.
    for place in sorted(places.values(), key=lambda place: -place.extra):
        for other in places.values():
            if other.axes == place.axes:
                moved = min(place.extra, -other.extra)
            else:
                moved = 0
            if moved > 0:
                place.extra -= moved
                other.extra += moved
    least = max(1, max(estimated.wire_bytes, compiled_traffic.wire_bytes) // 1000)
    sides: list[tuple[Excess, ...]] = []
    for sign in (1, -1):
        places_of_sign = sorted(
            (place for place in places.values() if place.extra * sign > 0),
            key=lambda place: -abs(place.extra),
        )
        rest = [
            place
            for place in places_of_sign
            if place.source is None or abs(place.extra) < least
        ]
        named = (
            _excess([place], place.source, place.axes)
            for place in places_of_sign
            if place not in rest
        )
        sides.append((*named, *([_excess(rest)] if rest else ())))
    return Comparison(sides[0], estimated, compiled_traffic, sides[1])


@dataclasses.dataclass(eq=False)
class _LineTraffic:
    """The estimated and the compiled rows of one source line and tuple of mesh axes,
    and the bytes of the compiled rows minus the bytes of the estimated rows (`extra`).
    """

    source: Frame | None
    axes: tuple[str, ...]
    rows: tuple[list[TrafficRow], list[TrafficRow]]
    extra: int = 0


def _rows_by_line(
    of_traffic: Traffic, lines: dict[str, Frame | None]
) -> Iterator[tuple[Frame | None, TrafficRow]]:
    """Yields each row of `made`, divided into one row for each parameter of the
    collective, with a source line. This is the row's own line, with one exception:
    `lines` has the lines at which the gradients of parameters are reduced, by the
    parameter's path. A row that reduces the gradient of one of these parameters has its
    line from there.
    """
    for row in of_traffic.rows:
        shares = row.shares or ((row.leaf, row.wire_bytes),)
        # The rounding error of the shares.
        missing = row.wire_bytes - sum(count for _, count in shares)
        for leaf, count in shares:
            if leaf in lines and row.kind in _SUMS:
                source = lines[leaf]
            else:
                source = row.source
            yield (
                source,
                dataclasses.replace(row, leaf=leaf, wire_bytes=count + missing),
            )
            missing = 0


def _excess(
    places: Sequence[_LineTraffic],
    source: Frame | None = None,
    axes: tuple[str, ...] = (),
) -> Excess:
    """The sum of `places` as a `Excess`. `source` and `axes` are the line and the axes
    of a single place. The sum of several places has neither.
    """
    expected_rows = [row for place in places for row in place.rows[0] if row.wire_bytes]
    found_rows = [row for place in places for row in place.rows[1] if row.wire_bytes]
    leaves = dict.fromkeys(row.leaf for row in found_rows if row.leaf)
    return Excess(
        extra_bytes=sum(place.extra for place in places),
        source=source,
        axes=axes,
        leaf=", ".join(leaves) or None,
        expected=_bytes_by_kind(expected_rows),
        found=_bytes_by_kind(found_rows),
        why=_REST if source is None else _why(expected_rows, found_rows),
    )


def _bytes_by_kind(rows: Sequence[TrafficRow]) -> tuple[tuple[str, int], ...]:
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
