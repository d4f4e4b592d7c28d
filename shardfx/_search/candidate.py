"""What a search returns."""

import dataclasses

from .._cost import Comparison
from .._ground.html import html_table
from .._ground.text import bytes_text, table
from .._plan import ShardPlan
from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from .priced import SentRow
from .written import code_of


@dataclasses.dataclass(frozen=True)
class Check:
    """What a closer look at a candidate found: by "estimate", "compile" or "run".

    `wire_bytes` enter a device per step, `axis_bytes` are those of each set of mesh axes; `memory_bytes` are per
    device, `None` where the look did not tell. `seconds` are of a step: by the estimate its own with the sending scaled
    to the bytes that were found; by the compiler `compute_seconds` of its program, by cycles where it tells them and
    else by products, and the sending of what the program sends; by a run what a clock measured. `comparison` says at
    which lines the program sends more than [`shardfx.estimate`][] expects.
    """

    by: str
    wire_bytes: float
    memory_bytes: int | None
    seconds: float
    axis_bytes: tuple[tuple[tuple[str, ...], float], ...]
    compute_seconds: float = 0.0
    comparison: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and rules for a step, with what they are estimated to cost.

    `roles` are pairs of a mesh axis and the names that it cuts, the one it prefers first. `plans` holds one plan for
    each argument of the step. `seconds` is the estimate of one step: `compute_seconds`, then
    what is sent while computation waits, then what of the rest computation does not hide. `axis_seconds` are pairs of
    a mesh axis and the seconds that it sends. `memory_bytes` is per device, of `limit_bytes`. `traffic` says what is
    sent, per device and step. `reasons` say what the next candidates, and near ones, cost instead. `checks` hold what
    a closer look found, the last of which decided the order. With `laid_out` that is for the step by
    [`shardfx.lay_out`][] with this mesh and these rules: left to itself, the compiler does worse. `state_over` are the
    mesh axes that cut the optimizer's state beside those that cut its parameters (ZeRO-1), and `states` are the numbers
    of the arguments that hold it: `plans` has that, `rules` do not.
    """

    mesh: MeshSpec
    rules: AxisRules
    roles: tuple[tuple[str, tuple[str, ...]], ...]
    plans: tuple[ShardPlan, ...]
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    axis_seconds: tuple[tuple[str, float], ...]
    memory_bytes: int
    limit_bytes: int
    traffic: tuple[SentRow, ...]
    reasons: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    laid_out: bool = False
    state_over: tuple[str, ...] = ()
    states: tuple[int, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that enter a device in one step, by the estimate."""
        return sum(row.wire_bytes for row in self.traffic) + 0.0

    @property
    def fits(self) -> bool:
        """Whether its memory is within the limit."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def title(self) -> str:
        """The mesh, with what each axis cuts: `data=4 (batch), tensor=2 (heads, mlp)`."""
        roles = dict(self.roles)
        axes = [f"{axis}={size} ({', '.join(roles[axis])})" for axis, size in self.mesh.shape.items()]
        return ", ".join([*axes, *([f"ZeRO-1 over {' x '.join(self.state_over)}"] if self.state_over else [])])

    def code(self) -> str:
        """A Python file for a person to read and commit: the mesh, the rules, and a function that makes the plans.

        `plans_of(step, *args)` in it makes this candidate's plans. With `laid_out`, `laid_out(step)` is what to jit.
        """
        look = self.checks[-1] if self.checks else None
        seconds = self.seconds if look is None else look.seconds
        held = self.memory_bytes if look is None or look.memory_bytes is None else look.memory_bytes
        how = {"compile": "by its compiled program", "run": "as measured"}.get(look.by if look else "", "by estimate")
        head = (
            f"Chosen by shardfx.search: {ms(seconds)} a step {how}, {bytes_text(held)} a device.",
            *(f"{axis}={size} cuts {', '.join(dict(self.roles)[axis])}." for axis, size in self.mesh.shape.items()),
            *([f"ZeRO-1: {' x '.join(self.state_over)} cuts the optimizer's state, too."] if self.state_over else []),
            *(["Chosen for the step laid out: jit `laid_out(step)`."] if self.laid_out else []),
            *(f"Not {reason}." for reason in self.reasons[:1] if self.fits),
        )
        return code_of(self.mesh, self.rules, head, self.states, self.state_over, laid_out=self.laid_out)

    def explain(self) -> str:
        """Where the estimate and a closer look differ: bytes of each mesh axis, seconds, memory, and the lines.

        **Returns:**

        A text. The lines of the program, with what to do about each, are there after `verify="compile"`.
        """
        rows = [("by", "ms a step", "computation", "MB sent", "held", *map(" x ".join, self._axis_sets()))]
        own = (ms(self.seconds), ms(self.compute_seconds), _mb(self.wire_bytes), bytes_text(self.memory_bytes))
        first: dict[tuple[str, ...], float] = {}
        for row in self.traffic:
            first[(row.axis,)] = first.get((row.axis,), 0.0) + row.wire_bytes
        rows.append(("search", *own, *(_mb(first.get(axes, 0.0)) for axes in self._axis_sets())))
        for look in self.checks:
            held = "-" if look.memory_bytes is None else bytes_text(look.memory_bytes)
            sent = dict(look.axis_bytes)
            told = (look.by, ms(look.seconds), ms(look.compute_seconds), _mb(look.wire_bytes), held)
            rows.append((*told, *(_mb(sent.get(axes, 0.0)) for axes in self._axis_sets())))
        compared = [str(look.comparison) for look in self.checks if look.by == "compile" and look.comparison]
        return "\n".join([self.title, *table(rows, right=set(rows[0][1:])), *self._zero_1_told(), *compared])

    def _told(self, look: Check) -> str:
        laid = ", the step laid out" if self.laid_out and look.by != "estimate" else ""
        held = "" if look.memory_bytes is None else f", {bytes_text(look.memory_bytes)} held"
        sent = f"{_mb(look.wire_bytes)} MB sent (here {_mb(self.wire_bytes)})"
        return f"by {look.by}{laid}: {sent}{held}, {ms(look.seconds)}"

    def _axis_sets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of mesh axes that something is sent along, single ones first."""
        found = {axes for look in self.checks for axes, _ in look.axis_bytes} | {(row.axis,) for row in self.traffic}
        return tuple(sorted(found, key=lambda axes: (len(axes), axes)))

    def __str__(self) -> str:
        first, rows, below = self._parts()
        return "\n".join([first, *table(rows, right=_NUMBERS), *below])

    def _repr_html_(self) -> str:
        first, rows, below = self._parts()
        return html_table(rows, right=_NUMBERS, below=[first, *below])

    def _parts(self) -> tuple[str, list[tuple[str, ...]], list[str]]:
        """What it costs in a line, a table of what it sends, and what is said below it."""
        first = (
            f"{self.title}: {ms(self.seconds)} a step (computation {ms(self.compute_seconds)}, sending "
            f"{ms(self.exposed_seconds)} and {ms(self.hidden_seconds)} beside computation), "
            f"{bytes_text(self.memory_bytes)} of {bytes_text(self.limit_bytes)}"
        )
        rows: list[tuple[str, ...]] = [("axis", "collective", "array", "MB", "calls", "at")]
        rows += [
            (row.axis, row.kind, row.array, _mb(row.wire_bytes), f"{row.calls:g}", row.source)
            for row in self.traffic[:6]
        ]
        checks = [self._told(look) for look in self.checks]
        return first, rows, [*checks, *self._zero_1_told(), *self._worse_as_written(), *self.reasons]

    def _zero_1(self) -> str:
        over = ", ".join(f'"{axis}"' for axis in self.state_over)
        over = over if len(self.state_over) == 1 else f"({over})"
        return f"`state_plan = shardfx.follow(optimizer.init, params_plan, over={over})`"

    def _zero_1_told(self) -> list[str]:
        if not self.state_over:
            return []
        return [
            f"ZeRO-1: the optimizer's state is cut over {' x '.join(self.state_over)} too, the parameters are not; the "
            "gradients' sum is scattered and the new parameters are gathered, which sends as much as the sum alone: "
            f"{self._zero_1()}"
        ]

    def _worse_as_written(self) -> list[str]:
        """What to do where the compiler is expected to lay activations out in a way that costs much more."""
        look = self.checks[-1] if self.checks else None
        if self.laid_out or look is None or look.by != "estimate" or look.seconds < MUCH * self.seconds:
            return []
        return [
            f"as the step is written, activations will not lie as they should: {ms(look.seconds)} and not "
            f"{ms(self.seconds)}. Constrain them, or run `shardfx.lay_out(step, mesh, rules)`; `laid_out=True` "
            "searches for that"
        ]


_NUMBERS = {"MB", "calls"}
# How many times what was searched for the step as it is written may take before a candidate says so.
MUCH = 1.25


def ms(seconds: float) -> str:
    """Seconds for a person."""
    return f"{_number(seconds * 1e3, 3)} ms"


def _mb(amount: float) -> str:
    return _number(amount / 1e6, 4)


def _number(value: float, digits: int) -> str:
    """A number of so many digits, without an exponent where it is large."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
