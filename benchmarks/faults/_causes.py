"""Groups failures by cause: how they fail, and where.

The cause of wrong numbers is the operation that `verify` refutes, with what it says of
it, or else the first equation whose results differ by `check_step`. The cause of an
abort or an error is the line of XLA, or its message without names and numbers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._data import Case, from_json, to_json
from ._driver import Child, Configuration, Result
from ._minimise import minimised


_SOURCE = re.compile(r"(\w+\.(?:cc|h)):(\d+)\]? ?(Check failed: [^(]*)?")
_NUMBERS = re.compile(r"[%\d][\w.\-\[\],{}<=>]*")
Refutation = Mapping[str, Any]


def symptom(outcome: Mapping[str, Any]) -> str:
    """How a case fails, in words that equal failures share."""
    kind = outcome["outcome"]
    message = outcome.get("message", "")
    if kind == "abort":
        source = _SOURCE.search(message)
        if source is not None:
            check = (source[3] or "").strip()
            return f"abort at {source[1]}:{source[2]} {check}".strip()
    if kind in ("abort", "error"):
        first_line = message.strip().split("\n")[0]
        return f"{kind}: {_NUMBERS.sub('_', first_line)[:120]}"
    return kind


def is_alike(outcome: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two cases fail in the same way."""
    return symptom(outcome) == symptom(other)


class Group:
    """Failures that look alike before they are minimised: the same symptom of programs
    with the same operations.
    """

    def __init__(self, first: Result):
        self.first = first
        self.results = [first]

    @property
    def key(self) -> tuple[str, str]:
        """What the results of the group share."""
        return key_of(self.first)


def key_of(result: Result) -> tuple[str, str]:
    """The symptom of a result, and its program's operations."""
    case = from_json(result.case)
    return symptom(result.outcome), case.program.name


def groups(failures: Sequence[Result]) -> list[Group]:
    """The failures by symptom and operations; the smallest case of each is its first."""
    by_key: dict[tuple[str, str], Group] = {}
    for result in sorted(failures, key=_size_of):
        key = key_of(result)
        if key in by_key:
            by_key[key].results.append(result)
        else:
            by_key[key] = Group(result)
    return list(by_key.values())


def _size_of(result: Result) -> tuple[int, int]:
    case = from_json(result.case)
    cut = sum(bool(entry) for spec in case.layout.arguments for entry in spec)
    return len(case.program.operations), cut


def explained(
    found: Sequence[Group],
    configuration: Configuration,
    *,
    seconds: float,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The causes, most frequent first: each with its minimal case, the numbers of cases
    by operations, and whether XLA's default optimisations leave it wrong.
    """
    causes: dict[str, dict[str, Any]] = {}
    optimised = Configuration(configuration.python, configuration.shardy, True)
    with Child(configuration) as child, Child(optimised) as default:
        for group in found:
            symptom_text, name = group.key
            progress(f"{name}: {symptom_text}, {len(group.results)} cases")
            outcome = group.first.outcome

            def fails(
                case: Case,
                child: Child = child,
                outcome: Mapping[str, Any] = outcome,
            ) -> bool:
                return is_alike(once(child, case), outcome)

            smallest, tried = minimised(from_json(group.first.case), fails, seconds)
            told = once(child, smallest, explain=True)
            cause = cause_of(told, symptom_text, smallest)
            entry = causes.setdefault(
                cause,
                {
                    "cause": cause,
                    "cases": 0,
                    "programs": {},
                    "outcome": told,
                    "error": told.get("error"),
                    "refutation": told.get("refutation"),
                    "equation": told.get("equation"),
                    "message": outcome.get("message", "")[:300],
                    "by default optimisations": once(default, smallest)["outcome"],
                    "candidates tried": tried,
                    "minimal": to_json(smallest),
                    "first": group.first.case,
                },
            )
            entry["cases"] += len(group.results)
            entry["programs"][name] = len(group.results)
    return sorted(causes.values(), key=lambda entry: -entry["cases"])


def once(child: Child, case: Case, **options: Any) -> Mapping[str, Any]:
    """The outcome of one case."""
    [result] = child.results({"cases": [to_json(case)], **options})
    return result.outcome


def cause_of(told: Mapping[str, Any], symptom_text: str, case: Case) -> str:
    """The cause in words: what refutes the program, or the equation that differs."""
    if symptom_text != "wrong":
        return symptom_text
    refutation = told.get("refutation")
    if refutation:
        fault = _NUMBERS.sub("_", refutation["fault"])[:80]
        return f"wrong: {refutation['opcode']}: {fault}"
    if told.get("equation"):
        return f"wrong: first at {told['equation']}"
    return f"wrong: {case.program.name}"
