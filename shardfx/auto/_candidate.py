"""What a search returns."""

import dataclasses
from typing import Literal

from .._ground.html import html_table
from .._ground.text import bytes_text, table
from .._plan import ShardPlan
from .._rules.axis_rules import AxisRules
from .._step.lines import place_text
from ..cost import Comparison, Traffic
from ..topology._mesh import MeshSpec
from ._written import code_of


By = Literal["core", "estimate", "compile", "run"]
_HOW = {
    "core": "by the search's own prices, as constrained; XLA cannot partition it for so many devices",
    "estimate": "by the partitioned program",
    "compile": "by the compiled program",
    "run": "as measured",
}
_NUMBERS = {"MB", "calls"}
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and rules for a step, with what a step costs under them.

    **Arguments:**

    - `mesh`, `rules`: what was chosen.
    - `roles`: pairs of a mesh axis and the names that it cuts, the one it prefers first.
    - `plans`: one for each argument of the step.
    - `by`: what the numbers below come from: "estimate" is the program of one device as XLA's own partitioner makes it,
        "compile" the compiled program, "run" the clock, and "core" the search's own prices, which stay where XLA cannot
        partition the step.
    - `seconds`: of one step: `compute_seconds`, then `exposed_seconds` of sending that computation waits for, then what
        of the `hidden_seconds` computation does not hide. By a run it is what the clock measured.
    - `memory_bytes`, `limit_bytes`: on one device, and how much of it may be used.
    - `traffic`: what is sent, row by row; `None` by the core.
    - `constrained`: whether the step is faster with what is between its arguments constrained too, by
        [`shardfx.auto.constrain_step`][]; then all numbers, and `code()`, are of that.
    - `donated`: the numbers of the arguments whose memory results take over: those that the step donates, and where
        it does not fit otherwise those that come back as results.
    - `results`: for each part that the step returns the number of the argument that it lies as, or `None`.
    - `state_over`, `states`: the mesh axes that cut the optimizer's state beside those that cut its parameters
        (ZeRO-1), and the numbers of the arguments that hold it: `plans` has that, `rules` do not.
    - `reasons`: what the next candidates cost instead, and which near meshes do not divide.
    - `notes`: what of the step was not understood.
    - `comparison`: where a compiled program sends something else than the partitioned one.
    """

    mesh: MeshSpec
    rules: AxisRules
    roles: tuple[tuple[str, tuple[str, ...]], ...]
    plans: tuple[ShardPlan, ...]
    by: By
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    memory_bytes: int
    limit_bytes: int
    traffic: Traffic | None = None
    constrained: bool = False
    donated: tuple[int, ...] = ()
    results: tuple[int | None, ...] = ()
    state_over: tuple[str, ...] = ()
    states: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter a device in one step; 0 by the core."""
        return 0 if self.traffic is None else self.traffic.wire_bytes

    @property
    def fits(self) -> bool:
        """Whether its memory is within the limit."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def title(self) -> str:
        """The mesh, with what each axis cuts: `data=4 (batch), tensor=2 (heads, mlp)`."""
        roles = dict(self.roles)
        axes = [f"{axis}={size} ({', '.join(roles[axis])})" for axis, size in self.mesh.shape.items()]
        zero = [f"ZeRO-1 over {' x '.join(self.state_over)}"] if self.state_over else []
        return ", ".join([*axes, *zero, *(["constrained"] if self.constrained else [])])

    def code(self) -> str:
        """A Python file to read and commit: the mesh, the rules, and all else that the numbers depend on.

        `plans_of(step, *args)` in it makes this candidate's plans, and `jitted(step, plans)` the function to call:
        with its constraints, its donation, and the layout of its results.
        """
        head = (
            f"Chosen by shardfx.auto.search: {ms(self.seconds)} a step {_HOW[self.by].partition(';')[0]}, "
            f"{bytes_text(self.memory_bytes)} a device.",
            *(f"{axis}={size} cuts {', '.join(dict(self.roles)[axis])}." for axis, size in self.mesh.shape.items()),
            *([f"ZeRO-1: {' x '.join(self.state_over)} cuts the optimizer's state, too."] if self.state_over else []),
            *(f"Not {reason}." for reason in self.reasons[:1] if self.fits),
        )
        return code_of(self, head)

    def explain(self) -> str:
        """All that is sent, along which axes and by which lines; after `verify`, where the compiled program differs.

        **Returns:**

        A text.
        """
        compared = [] if self.comparison is None else [str(self.comparison)]
        sent = [] if self.traffic is None else [str(self.traffic)]
        return "\n".join([self._head(), *sent, *self._below(), *compared])

    def __str__(self) -> str:
        return "\n".join([self._head(), *self._table(), *self._noted(), *self._below()])

    def __repr__(self) -> str:
        return f"Candidate({self._head()})"

    def _repr_html_(self) -> str:
        below = [self._head(), *self._noted(), *self._below()]
        return html_table(self._rows(), right=_NUMBERS, below=below)

    def _head(self) -> str:
        sending = f"{ms(self.exposed_seconds)} and {ms(self.hidden_seconds)} beside computation"
        parts = f" (computation {ms(self.compute_seconds)}, sending {sending})" if self.by != "run" else ""
        return (
            f"{self.title}: {ms(self.seconds)} a step{parts}, "
            f"{bytes_text(self.memory_bytes)} of {bytes_text(self.limit_bytes)}, {_HOW[self.by]}"
        )

    def _table(self) -> list[str]:
        rows = self._rows()
        return table(rows, right=_NUMBERS) if rows else []

    def _rows(self) -> list[tuple[str, ...]]:
        """What it sends, the most first."""
        if self.traffic is None or not self.traffic.rows:
            return []
        rows: list[tuple[str, ...]] = [("axes", "collective", "leaf", "MB", "calls", "at")]
        rows += [
            (
                " x ".join(row.axes) or "-",
                row.kind,
                row.leaf or "-",
                megabytes(row.wire_bytes),
                "?" if row.calls is None else f"{row.calls:g}",
                place_text(row.source),
            )
            for row in self.traffic.rows[:_SHOWN]
        ]
        return rows

    def _noted(self) -> list[str]:
        """The total, and the notes of the rows."""
        if self.traffic is None:
            return []
        rest = len(self.traffic.rows) - _SHOWN
        total = f"{megabytes(self.wire_bytes)} MB sent in all{f', {rest} more rows' if rest > 0 else ''}"
        return [total, *dict.fromkeys(row.note for row in self.traffic.rows if row.note and row.note not in self.notes)]

    def _below(self) -> list[str]:
        over = self.state_over[0] if len(self.state_over) == 1 else self.state_over
        zero = (
            f"ZeRO-1: the optimizer's state is cut over {' x '.join(self.state_over)} too, the parameters are not: "
            f"`shardfx.follow(optimizer.init, params_plan, over={over!r})`"
        )
        donated = "it fits where results take over the memory of arguments: `jitted` in `code()` donates "
        return [
            *([zero] if self.state_over else []),
            *([f"{donated}{', '.join(map(str, self.donated))}"] if self.donated else []),
            *(f"note: {note}" for note in self.notes),
            *self.reasons,
        ]


def ms(seconds: float) -> str:
    """Seconds for a person."""
    return f"{_number(seconds * 1e3, 3)} ms"


def megabytes(amount: int | float) -> str:
    """Bytes for a person."""
    return _number(amount / 1e6, 4)


def _number(value: int | float, digits: int) -> str:
    """A number of so many digits, without an exponent where it is large."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
