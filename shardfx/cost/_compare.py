"""The bytes that a compiled step sends beyond its estimate, and the compiler's passes that explain them."""

import dataclasses
from collections.abc import Iterator, Sequence

from .._ground.text import bytes_text, first_lines, html_text, table
from .._step import Frame, place_text
from ._traffic import traffic
from ._traffic_rows import Traffic, TrafficRow, place_cells


_SUMS = ("all-reduce", "reduce-scatter")
_REST = "what has no line, and lines at which little differs"


@dataclasses.dataclass(frozen=True)
class Surplus:
    """The bytes that a compiled step sends beyond its estimate at one line and along the same mesh axes.

    **Arguments:**

    - `extra_bytes`: bytes beyond the estimate that enter a device in one step; negative if fewer do.
    - `source`: the line; `None` for the rest.
    - `axes`: the mesh axes along which it is sent; none for the rest.
    - `leaf`: the parameters that it is about, or `None`.
    - `expected`, `found`: the bytes of each kind of collective.
    - `passes`: the compiler passes that the estimate applies at this line. The compiler did not apply one of them.
    - `why`: the explanation of the difference, in words.
    """

    __module__ = "shardfx.cost"

    extra_bytes: int
    source: Frame | None
    axes: tuple[str, ...]
    leaf: str | None
    expected: tuple[tuple[str, int], ...]
    found: tuple[tuple[str, int], ...]
    passes: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences between a compiled step's traffic and its estimate; made by [`shardfx.cost.compare`][].
    `str(...)` is a table.

    Each byte is in exactly one row: the bytes of `rows` and `less` add up to `extra_bytes`.

    **Arguments:**

    - `rows`: a [`shardfx.cost.Surplus`][] for each line and mesh axes, the largest first. The last row is for all other
        lines.
    - `estimated`, `compiled`: the traffic that was compared.
    - `less`: the rows of lines that send less than the estimate.
    """

    __module__ = "shardfx.cost"

    rows: tuple[Surplus, ...]
    estimated: Traffic
    compiled: Traffic
    less: tuple[Surplus, ...] = ()

    @property
    def different_bytes(self) -> int:
        """The sum over all rows of the absolute difference in bytes."""
        return sum(abs(row.extra_bytes) for row in (*self.rows, *self.less))

    @property
    def explained(self) -> float:
        """The fraction of `different_bytes` in rows that a pass of the compiler explains; 1 if nothing differs."""
        by_pass = sum(abs(row.extra_bytes) for row in (*self.rows, *self.less) if row.passes)
        return by_pass / self.different_bytes if self.different_bytes else 1.0

    @property
    def extra_bytes(self) -> int:
        """The bytes that enter each device in one step beyond the estimate; negative if the compiled step
        sends less.
        """
        return self.compiled.wire_bytes - self.estimated.wire_bytes

    def __str__(self) -> str:
        ours, theirs = self.estimated.wire_bytes, self.compiled.wire_bytes
        times = f", {theirs / ours:.2f} times as much" if ours else ""
        unsure = f" ({bytes_text(self.estimated.unsure_bytes)} of it not sure)" if self.estimated.unsure_bytes else ""
        total = (
            f"{bytes_text(theirs)} are sent to each device in a step; {bytes_text(ours)} were estimated{unsure}{times}."
        )
        if not self.rows:
            return total
        cells = [("extra", "expected", "found", "axes", "leaf", "source")]
        for row in self.rows:
            place = place_cells(row.axes, row.leaf, row.source)
            cells.append((f"+{bytes_text(row.extra_bytes)}", _kinds(row.expected), _kinds(row.found), *place))
        texts = [f"{place_text(row.source)}: +{bytes_text(row.extra_bytes)}: {row.why}." for row in self.rows]
        return "\n".join([*table(cells, right={"extra"}), total, *dict.fromkeys(texts)])

    __repr__ = first_lines
    _repr_html_ = html_text


def compare(estimated: Traffic, compiled: object) -> Comparison:
    """The bytes that a compiled step sends beyond its estimate, line by line, with the compiler's pass that explains
    them.

    An estimate is the program that XLA's partitioner made, after the passes of the compiler that are known. Each of its
    rows names the passes that changed it.

    **Arguments:**

    - `estimated`: the estimate from [`shardfx.cost.estimate`][], for the same step and plans.
    - `compiled`: the traffic from [`shardfx.cost.traffic`][], or a program that it reads.

    **Returns:**

    A [`shardfx.cost.Comparison`][]. Bytes along the same mesh axes that the compiler sends at another line are no
    difference. All differences below a thousandth of all bytes are one row.

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
        (row,) = compare(estimate(step, x), compiled).rows
        assert row.passes == ("tpu-all-reduce-scatter-fusion",)  # a CPU has no reduce-scatter
        ```
    """
    found = compiled if isinstance(compiled, Traffic) else traffic(compiled)
    # The line where the gradient of each leaf is summed. A merged sum is divided between these lines.
    lines = {row.leaf: row.source for row in estimated.rows if row.leaf is not None and row.kind in _SUMS}
    places: dict[tuple[object, ...], _LineSent] = {}
    for side, sent in enumerate((_sent(estimated, {}), _sent(found, lines))):
        for source, row in sent:
            key = None if source is None else (source.file, source.line), row.axes
            place = places.setdefault(key, _LineSent(source, row.axes, ([], [])))
            place.rows[side].append(row)
            place.extra += row.wire_bytes if side else -row.wire_bytes
    # A line that sends less offsets lines that send more along the same mesh axes, the largest first.
    for place in sorted(places.values(), key=lambda one: -one.extra):
        for other in places.values():
            moved = min(place.extra, -other.extra) if other.axes == place.axes else 0
            if moved > 0:
                place.extra -= moved
                other.extra += moved
    least = max(1, max(estimated.wire_bytes, found.wire_bytes) // 1000)
    sides: list[tuple[Surplus, ...]] = []
    for sign in (1, -1):
        own = sorted((one for one in places.values() if one.extra * sign > 0), key=lambda one: -abs(one.extra))
        rest = [one for one in own if one.source is None or abs(one.extra) < least]
        named = (_surplus([one], one.source, one.axes) for one in own if one not in rest)
        sides.append((*named, *([_surplus(rest)] if rest else ())))
    return Comparison(sides[0], estimated, found, sides[1])


@dataclasses.dataclass(eq=False)
class _LineSent:
    """The estimated and the compiled rows of one source line and set of mesh axes, and the difference in bytes."""

    source: Frame | None
    axes: tuple[str, ...]
    rows: tuple[list[TrafficRow], list[TrafficRow]]
    extra: int = 0


def _sent(made: Traffic, lines: dict[str, Frame | None]) -> Iterator[tuple[Frame | None, TrafficRow]]:
    """The rows of a step's traffic, each with its line. A merged sum is divided into one row per leaf."""
    for row in made.rows:
        shares = row.shares or ((row.leaf, row.wire_bytes),)
        missing = row.wire_bytes - sum(count for _, count in shares)  # shares are rounded
        for leaf, count in shares:
            source = lines[leaf] if leaf in lines and row.kind in _SUMS else row.source
            yield source, dataclasses.replace(row, leaf=leaf, wire_bytes=count + missing)
            missing = 0


def _surplus(places: Sequence[_LineSent], source: Frame | None = None, axes: tuple[str, ...] = ()) -> Surplus:
    """The difference at one source line along some mesh axes; without a line, the sum over all lines that have no row
    of their own.
    """
    ours, theirs = ([row for one in places for row in one.rows[side] if row.wire_bytes] for side in (0, 1))
    passes = tuple(dict.fromkeys(one for row in ours for one in row.passes))
    notes = dict.fromkeys(row.note for row in ours if row.note)
    expected, sent = ("+".join(sorted({row.dtype for row in rows})) for rows in (ours, theirs))
    if source is None:
        why = _REST
    elif passes:
        why = f"this compiler does otherwise than the estimate in {', '.join(map(repr, passes))}"
    elif notes:
        why = "; ".join(notes).rstrip(".")
    elif not ours:
        why = "nothing was estimated here"
    else:
        why = f"it is sent as {sent}, not as {expected}" if sent not in ("", expected) else "no pass explains it"
    leaves = ", ".join(dict.fromkeys(row.leaf for row in theirs if row.leaf)) or None
    extra = sum(one.extra for one in places)
    expected, sent = (tuple(Traffic(tuple(rows), 1).by("kind").items()) for rows in (ours, theirs))
    return Surplus(extra, source, axes, leaves, expected, sent, passes, why)


def _kinds(sums: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{kind} {bytes_text(count)}" for kind, count in sums) or "nothing"
