"""What a compiled step sends beyond its estimate, and what can be done about it."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from .._ground.text import bytes_text, table
from .._step.lines import Frame, place_text
from ._traffic import traffic
from ._traffic_rows import Traffic, TrafficRow


Why = Literal[
    "another type",
    "reduces whole",
    "gathers for an exchange",
    "sums instead of gathering",
    "more often",
    "not expected",
    "otherwise",
    "less",
    "elsewhere",
]
_SUMS = ("all-reduce", "reduce-scatter")
_SAYS: Mapping[Why, tuple[str, str]] = {
    "another type": (
        "the same is sent in another element type, as compilers for CPUs widen bfloat16 to float32",
        "There is nothing to mend: compare with an estimate for this platform.",
    ),
    "reduces whole": (
        "every device gets the whole sum, of which it needs a part",
        "constrain the sum to how its part is needed, a gradient as its parameter: "
        "`constrain(gradient, names, plan)`. Compilers for CPUs never scatter sums.",
    ),
    "gathers for an exchange": (
        "every device gets all of what it needs a part of",
        "constrain twice, first as the array is made and then as it is used: "
        "`constrain(constrain(x, before, plan), after, plan)`. For experts: to tokens first, then to experts.",
    ),
    "sums instead of gathering": (
        "partial results are added up where gathering the weight is cheaper",
        "gather the weight by name where it is used: `w = constrain(w, (None, ...), plan)`; and constrain the "
        "activations beside it.",
    ),
    "more often": (
        "the same is sent again",
        "sums that meet are sent one by one: multiply by one stacked weight instead of several; or what was gathered "
        "is gathered again: constrain it once, and use that.",
    ),
    "not expected": (
        "nothing here has to be sent",
        "constrain the result of this line to the layout that its operands have: `constrain(x, names, plan)`.",
    ),
    "otherwise": (
        "more is sent, and in another way",
        "constrain the operands and the result of this line, so that nothing is left to choose.",
    ),
    "less": ("less is sent than was estimated", "There is nothing to mend."),
    "elsewhere": (
        "what has no line, and lines at which little differs",
        "`str(...)` of the two traffics lists all that is sent.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Surplus:
    """A line at which a compiled step sends more than its estimate, or less.

    **Arguments:**

    - `why`: what the difference is like.
    - `extra_bytes`: how much more enters a device in one step; negative where it is less.
    - `source`: the line; `None` for the rest, whose `why` is "elsewhere".
    - `axes`: the mesh axes along which it is sent.
    - `leaf`: the parameters that it is about, or `None`.
    - `expected`, `found`: the bytes of each kind of collective.
    - `message`: what happens, in words.
    - `fix`: what to do about it.
    """

    why: Why
    extra_bytes: int
    source: Frame | None
    axes: tuple[str, ...]
    leaf: str | None
    expected: tuple[tuple[str, int], ...]
    found: tuple[tuple[str, int], ...]
    message: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Where a compiled step sends more than its estimate; made by [`shardfx.cost.compare`][]. `str(...)` is a table.

    No byte is in two rows, and none is left out: what `rows` and `less` say adds up to `extra_bytes`.

    **Arguments:**

    - `rows`: a [`shardfx.cost.Surplus`][] for each line, the largest first. Last, in one row without a line, comes the
        rest.
    - `estimated`, `compiled`: what was compared.
    - `less`: one for each line at which less is sent than was estimated, in the same order.
    """

    rows: tuple[Surplus, ...]
    estimated: Traffic
    compiled: Traffic
    less: tuple[Surplus, ...] = ()

    @property
    def different_bytes(self) -> int:
        """The bytes that are sent on one side only: those of all rows, whatever their sign."""
        return sum(abs(row.extra_bytes) for row in (*self.rows, *self.less))

    @property
    def explained(self) -> float:
        """Which share of `different_bytes` is in rows that name a line; 1 where nothing differs."""
        named = sum(abs(row.extra_bytes) for row in (*self.rows, *self.less) if row.source is not None)
        return named / self.different_bytes if self.different_bytes else 1.0

    @property
    def extra_bytes(self) -> int:
        """How much more enters each device in one step than was estimated; negative where it is less."""
        return self.compiled.wire_bytes - self.estimated.wire_bytes

    def __str__(self) -> str:
        ours, theirs = self.estimated.wire_bytes, self.compiled.wire_bytes
        times = f", {theirs / ours:.2f} times as much" if ours else ""
        total = f"{bytes_text(theirs)} are sent to each device in a step; {bytes_text(ours)} were estimated{times}."
        if not self.rows:
            return total
        header = ("extra", "expected", "found", "axes", "leaf", "source")
        cells = [
            (
                f"+{bytes_text(row.extra_bytes)}",
                _kinds(row.expected),
                _kinds(row.found),
                " x ".join(row.axes) or "-",
                row.leaf or "-",
                place_text(row.source),
            )
            for row in self.rows
        ]
        texts = [
            f"{place_text(row.source)}: +{bytes_text(row.extra_bytes)}: {row.message}. {row.fix}" for row in self.rows
        ]
        return "\n".join([*table([header, *cells], right={"extra"}), total, *dict.fromkeys(texts)])


def compare(estimated: Traffic, compiled: Any) -> Comparison:
    """What a compiled step sends that should not be needed, line by line, and how to avoid it.

    **Arguments:**

    - `estimated`: by [`shardfx.cost.estimate`][], for the same step and plans.
    - `compiled`: by [`shardfx.cost.traffic`][], or what that reads.

    **Returns:**

    A [`shardfx.cost.Comparison`][]. What the compiler sends at one line instead of another, along the same mesh axes,
    is no difference. Lines that differ by less than a thousandth of the whole are one row together.

    **Raises:**

    What [`shardfx.cost.traffic`][] raises for a program that it cannot read.

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
        assert row.why == "reduces whole"  # a CPU has no reduce-scatter
        ```
    """
    found = compiled if isinstance(compiled, Traffic) else traffic(compiled)
    places = _paired(_sent(estimated, {}), _sent(found, _sums_by_leaf(estimated)))
    _moved(places)
    for place in places:
        place.settle()
    least = max(1, max(estimated.wire_bytes, found.wire_bytes) // 1000)
    sides = [sorted((p for p in places if p.extra * sign > 0), key=lambda place: -abs(place.extra)) for sign in (1, -1)]
    rows, less = (
        [_surplus(place) for place in side if place.source is not None and abs(place.extra) >= least]
        + _rest([place for place in side if place.source is None or abs(place.extra) < least])
        for side in sides
    )
    return Comparison(tuple(rows), estimated, found, tuple(less))


@dataclasses.dataclass
class _Place:
    """What is sent at one line: estimated and compiled, and by mesh axes how much more was compiled."""

    source: Frame | None
    rows: tuple[list[tuple[TrafficRow, int]], list[tuple[TrafficRow, int]]]
    left: dict[tuple[str, ...], int]

    @property
    def extra(self) -> int:
        """How much more is sent than was estimated; negative where it is less."""
        return sum(self.left.values())

    def settle(self) -> None:
        """Takes what is less along some axes off what is more along others, the smallest first."""
        sign = 1 if self.extra > 0 else -1
        beyond = -sign * sum(count for count in self.left.values() if count * sign < 0)
        self.left = {axes: count for axes, count in self.left.items() if count * sign > 0}
        for axes in sorted(self.left, key=lambda axes: abs(self.left[axes])):
            taken = min(beyond, abs(self.left[axes]))
            self.left[axes], beyond = self.left[axes] - sign * taken, beyond - taken

    def kinds(self, side: int) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row, count in self.rows[side]:
            if count:
                sums[row.kind] = sums.get(row.kind, 0) + count
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which the two sides differ most."""
        return max(self.left, key=lambda axes: abs(self.left[axes]), default=())


def _sums_by_leaf(estimated: Traffic) -> dict[str, Frame | None]:
    """The line at which the gradient of each leaf is added up."""
    return {row.leaf: row.source for row in estimated.rows if row.leaf is not None and row.kind in _SUMS}


def _sent(made: Traffic, lines: Mapping[str, Frame | None]) -> Iterator[tuple[Frame | None, TrafficRow, int]]:
    """All that is sent, each with its line: of sums that the compiler joined, each leaf's own."""
    for row in made.rows:
        shares = row.shares or ((row.leaf, row.wire_bytes),)
        missing = row.wire_bytes - sum(count for _, count in shares)  # shares are rounded
        for leaf, count in shares:
            joined = leaf is not None and row.kind in _SUMS and leaf in lines
            own = dataclasses.replace(row, leaf=leaf, wire_bytes=count + missing)
            yield (lines[leaf] if joined and leaf is not None else row.source), own, count + missing
            missing = 0


def _paired(
    ours: Iterable[tuple[Frame | None, TrafficRow, int]], theirs: Iterable[tuple[Frame | None, TrafficRow, int]]
) -> list[_Place]:
    places: dict[Any, _Place] = {}
    for side, sent in enumerate((ours, theirs)):
        for source, row, count in sent:
            key = None if source is None else (source.file, source.line)
            place = places.setdefault(key, _Place(source, ([], []), {}))
            place.rows[side].append((row, count))
            place.left[row.axes] = place.left.get(row.axes, 0) + (count if side else -count)
    return [*places.values()]


def _moved(places: Sequence[_Place]) -> None:
    """What one line sends less along some axes is taken off what others send more along the same, the largest first."""
    for axes in dict.fromkeys(axes for place in places for axes in place.left):
        more = sorted((p for p in places if p.left.get(axes, 0) > 0), key=lambda place: -place.left[axes])
        for place in more:
            for other in places:
                moved = min(place.left[axes], -other.left.get(axes, 0))
                if moved > 0:
                    place.left[axes] -= moved
                    other.left[axes] += moved


def _rest(places: Sequence[_Place]) -> list[Surplus]:
    """One row for what has no line of its own."""
    extra = sum(place.extra for place in places)
    if not extra:
        return []
    whole = _Place(None, ([r for p in places for r in p.rows[0]], [r for p in places for r in p.rows[1]]), {})
    for place in places:
        for axes, count in place.left.items():
            whole.left[axes] = whole.left.get(axes, 0) + count
    return [_surplus(whole)]


def _surplus(place: _Place) -> Surplus:
    expected, found = place.kinds(0), place.kinds(1)
    why: Why = "elsewhere" if place.source is None else "less" if place.extra < 0 else _why(expected, found)
    if why == "more often" and not {row.dtype for row, _ in place.rows[0]} & {row.dtype for row, _ in place.rows[1]}:
        why = "another type"
    message, fix = _SAYS[why]
    leaves = [row.leaf for row, count in place.rows[1] if row.leaf and count]
    return Surplus(
        why,
        place.extra,
        place.source,
        place.axes(),
        ", ".join(dict.fromkeys(leaves)) or None,
        tuple(expected.items()),
        tuple(found.items()),
        message,
        fix,
    )


def _why(expected: Mapping[str, int], found: Mapping[str, int]) -> Why:
    more = {kind for kind in found if found[kind] > expected.get(kind, 0)}
    missing = {kind for kind in expected if expected[kind] > found.get(kind, 0)}
    if not expected:
        return "not expected"
    if "reduce-scatter" in missing and "all-reduce" in more:
        return "reduces whole"
    if "all-to-all" in missing and more & {"all-gather", "all-reduce"}:
        return "gathers for an exchange"
    if "all-gather" in missing and "all-reduce" in more:
        return "sums instead of gathering"
    return "more often" if more <= set(expected) else "otherwise"


def _kinds(sums: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{kind} {bytes_text(count)}" for kind, count in sums) or "nothing"
