"""What a search returns."""

import dataclasses

from .._ground.text import bytes_text, table
from .._plan import ShardPlan
from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from .priced import SentRow
from .written import code_of


@dataclasses.dataclass(frozen=True)
class Check:
    """What a closer look at a candidate found: by "estimate" or "compile".

    `wire_bytes` enter a device per step, `axis_bytes` are those of each set of mesh axes; `memory_bytes` are per
    device, `None` where the look did not tell. `seconds` is the candidate's estimate with its sending scaled to the
    bytes that were found.
    """

    by: str
    wire_bytes: float
    memory_bytes: int | None
    seconds: float
    axis_bytes: tuple[tuple[tuple[str, ...], float], ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and rules for a step, with what they are estimated to cost.

    `roles` are pairs of a mesh axis and the names that it cuts, the one it prefers first. `plans` holds one plan for
    each argument of the step. `seconds` is the estimate of one step: `compute_seconds`, then
    what is sent while computation waits, then what of the rest computation does not hide. `axis_seconds` are pairs of
    a mesh axis and the seconds that it sends. `memory_bytes` is per device, of `limit_bytes`. `traffic` says what is
    sent, per device and step. `reasons` say what the next candidates, and near ones, cost instead. `checks` hold what
    a closer look found, the last of which decided the order.
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
        return ", ".join(f"{axis}={size} ({', '.join(roles[axis])})" for axis, size in self.mesh.shape.items())

    def code(self) -> str:
        """A Python file that makes the mesh and the rules, for a person to read and commit."""
        head = (
            f"Chosen by shardfx.search: {self.seconds * 1e3:.3g} ms a step by its estimate, "
            f"{bytes_text(self.memory_bytes)} a device.",
        )
        return code_of(self.mesh, self.rules, head)

    def __str__(self) -> str:
        parts = [
            f"{self.title}: {ms(self.seconds)} a step (computation {ms(self.compute_seconds)}, sending "
            f"{ms(self.exposed_seconds)} and {ms(self.hidden_seconds)} beside computation), "
            f"{bytes_text(self.memory_bytes)} of {bytes_text(self.limit_bytes)}"
        ]
        rows = [("axis", "collective", "array", "MB", "calls", "at")]
        rows += [
            (row.axis, row.kind, row.array, f"{row.wire_bytes / 1e6:.4g}", f"{row.calls:g}", row.source)
            for row in self.traffic[:6]
        ]
        checks = [
            f"by {check.by}: {check.wire_bytes / 1e6:.4g} MB sent (here {self.wire_bytes / 1e6:.4g})"
            + ("" if check.memory_bytes is None else f", {bytes_text(check.memory_bytes)} held")
            + f", {ms(check.seconds)}"
            for check in self.checks
        ]
        return "\n".join([*parts, *table(rows, right={"MB", "calls"}), *checks, *self.reasons])


def ms(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds * 1e3:.3g} ms"
