"""The result of `lint`: `Finding` is one mistake, and `Findings` a tuple of them that
prints as a table.
"""

import collections
import dataclasses
import re
import textwrap
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from .._ground.errors import RuleError
from .._ground.misuse import lacking
from .._ground.text import bytes_text, html_table, plural, printable


Severity: TypeAlias = Literal["error", "warning", "info"]
SEVERITIES: Final = ("error", "warning", "info")

# Every code with a description of one line, which the documentation shows and a test
# checks.
CODES: Final = MappingProxyType(
    {
        "unplannable": (
            "a leaf that `plan` cannot plan: names or a spec of another rank, a rule"
            " that cannot be applied"
        ),
        "invalid": (
            "an argument that `plan` refuses: names that do not fit the tree, an"
            " unknown mode or memory kind"
        ),
        "unmatched": "a leaf that no rule covers",
        "unknown-name": "a logical name, or one with a unit, that no rule is about",
        "absent-axis": (
            "a mesh axis of a rule that the mesh lacks, and that nobody declares"
        ),
        "unused-axis": "a mesh axis that no rule uses",
        "unused-rule": "a path rule, or a memory kind, that matches no leaf",
        "shadowed-rule": (
            "a path rule whose leaves all go to earlier rules or to their names"
        ),
        "dead-rule": (
            "an axis rule that can never apply, because an earlier one of its name"
            " applies whenever it could"
        ),
        "replicated": "a large leaf that every device holds whole",
        "corrected": "a leaf that is cut less than its rule asks for",
        "cut-head": "a dimension that is cut inside an attention head",
        "contradicted-name": "one logical name for sizes that cannot be one axis",
        "uneven-layers": "layers of one stack that are sharded differently",
        "optimizer-state": (
            "a state of an optimizer that is sharded less than its parameter, or"
            " otherwise, or less than the others"
        ),
        "known-fault": (
            "a layout that XLA's partitioner computes wrongly in some programs: run"
            " `check_step`"
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One mistake or likely mistake in rules; found by [`shardfx.lint`][].

    **Arguments:**

    - `code`: the check that found the mistake, see the table of [`shardfx.lint`][].
    - `severity`: "error": `plan` raises for it. "warning": most likely a mistake.
      "info": worth a look.
    - `where`: the leaf's path, with number ranges for equal leaves of repeated layers;
      or the rule, name or mesh axis.
    - `bytes`: the bytes that the mistake costs each device; 0 if they are not known.
    - `message`: the mistake, in a sentence with the actual values.
    - `fix`: code that resolves the finding: statements that change the variables named
      like `lint`'s arguments. `lint` does not try them.
    """

    __module__ = "shardfx.results"

    code: str
    severity: Severity
    where: str
    bytes: int
    message: str
    fix: str


_NUMBERED = re.compile(r"\.(replace|drop)\((\d+)")


def _order_of_fix(fix: str) -> tuple[int, int]:
    """The key by which fixes are sorted: replacements of rules, which leave the numbers
    of rules as they are; rules that are dropped, the last first; everything else.
    """
    # As `.replace(3` or `.drop(3`.
    numbered = _NUMBERED.search(fix)
    if numbered is None:
        return 2, 0
    method, rule_number = numbered.groups()
    return int(method == "drop"), -int(rule_number)


class Findings(tuple[Finding, ...]):
    """A tuple of `Finding`s. `print`, a console and a notebook show it as a table."""

    __module__ = "shardfx.results"

    __slots__ = ()

    if not TYPE_CHECKING:
        __getattr__ = lacking(
            {
                "errors": '`findings.worst("error")`',
                "warnings": '`findings.worst("warning")`',
                "fixes": "`findings.fix`",
                "filter": "`findings.without(code)`",
            }
        )

    def worst(self, severity: Severity = "warning") -> "Findings":
        """The findings of this severity or a worse one, for a check in CI.

        **Arguments:**

        - `severity`: "error", "warning" or "info".

        **Returns:**

        The findings of at least this severity, in the same order.
        """
        if severity not in SEVERITIES:
            raise RuleError(
                f"there is no severity {severity!r}; `severity` is one of"
                f" {', '.join(SEVERITIES)}."
            )
        severities = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return Findings(finding for finding in self if finding.severity in severities)

    @property
    def fix(self) -> str:
        """The fixes of all findings as one program, each of them once.

        Fixes that name a rule by its number come first, those of the last rules first:
        no fix changes a number that a later one names. What an old rule has left after
        the fixes, the next `lint` says.
        """
        fixes = dict.fromkeys(finding.fix for finding in self if finding.fix)
        return "\n".join(sorted(fixes, key=_order_of_fix))

    def without(self, *codes: str) -> "Findings":
        """The findings whose codes are not among `codes`.

        **Arguments:**

        - `codes`: codes from the table of [`shardfx.lint`][].

        **Returns:**

        The findings with other codes, in the same order.

        **Raises:**

        `ValueError` for an unknown code.
        """
        for code in codes:
            if code not in CODES:
                raise ValueError(
                    f"`without({code!r})`: the codes of findings are"
                    f" {', '.join(CODES)}."
                )
        return Findings(finding for finding in self if finding.code not in codes)

    def __str__(self) -> str:
        lines = [_summary(self)]
        for finding in self[:_SHOWN]:
            lines += ["", *_paragraph(finding)]
        if len(self) > _SHOWN:
            lines += ["", _others(self)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        below = [_summary(self)]
        if len(self) > _SHOWN:
            below.insert(0, _others(self))
        if not self:
            return html_table((), right=_NUMBERS, below=below)
        rows: list[tuple[str, ...]] = [_HEADER]
        for finding in self[:_SHOWN]:
            rows.append((*_cells(finding), finding.message, finding.fix))
        return html_table(rows, right=_NUMBERS, below=below)


_HEADER = ("severity", "code", "bytes/device", "where", "what", "fix")
_NUMBERS = {"bytes/device"}
_WIDTH = 80
_SHOWN = 100


def findings_of(findings: Iterable[Finding]) -> Findings:
    """Sorts findings by the bytes that the mistake costs, the most first, and then by
    severity, the worst first. Findings that are equal in both keep their order.
    """
    distinct = dict.fromkeys(findings)
    return Findings(sorted(distinct, key=_rank))


def _rank(finding: Finding) -> tuple[int, int]:
    """The place of a finding in a table: least is first."""
    return -finding.bytes, SEVERITIES.index(finding.severity)


def _cells(finding: Finding) -> tuple[str, ...]:
    size = bytes_text(finding.bytes) if finding.bytes else "-"
    return finding.severity, finding.code, size, finding.where


def _paragraph(finding: Finding) -> list[str]:
    """The lines of a finding: a head, the message, and each line of the fix."""
    severity, code, size, where = map(printable, _cells(finding))
    head = f"{severity} {code}: {where}"
    if finding.bytes:
        head += f" ({size} per device)"
    message = textwrap.wrap(
        printable(finding.message),
        _WIDTH,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = [head]
    for line in message:
        lines.append(f"    {line}")
    for line in map(printable, finding.fix.split("\n")):
        if line:
            lines.append(f"    fix: {line}")
    return lines


def _others(findings: Findings) -> str:
    count = len(findings) - _SHOWN
    return f"and {count} more; `for finding in findings` has them all"


def _summary(findings: Findings) -> str:
    """The number of findings, and of each severity, as text."""
    if not findings:
        return "no findings"
    numbers = collections.Counter(finding.severity for finding in findings)
    plurals = {"info": "info"}
    counts = []
    for severity in SEVERITIES:
        if numbers[severity]:
            counts.append(plural(numbers[severity], severity, plurals.get(severity)))
    return f"{plural(len(findings), 'finding')}: {', '.join(counts)}"
