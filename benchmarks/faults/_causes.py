"""Groups failures by cause: how they fail, and where.

The cause of wrong numbers is the operation that `verify` refutes, with what it says of
it, or else the first equation whose results differ by `check_step`. The cause of an
abort or an error is the line of XLA, or its message without names and numbers.
"""

import itertools
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
        return f"{kind}: {plain(first_line)[:120]}"
    return kind


def plain(text: str) -> str:
    """The text without names and numbers."""
    return re.sub(r"_[_ ,()]*", "_ ", _NUMBERS.sub("_", text)).strip()


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
    entries = itertools.chain.from_iterable(case.layout.arguments)
    sharded_count = sum(bool(entry) for entry in entries)
    return len(case.program.operations), sharded_count


def explained(
    found_groups: Sequence[Group],
    configuration: Configuration,
    *,
    seconds: float,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The causes, most frequent first: each with its minimal case, the numbers of cases
    by operations, and whether XLA's default optimisations leave it wrong.

    One case of each group is explained, and one case of each cause is minimised, which
    takes at most `seconds`.
    """
    causes: dict[str, list[Group]] = {}
    optimised = Configuration(
        python=configuration.python, shardy=configuration.shardy, optimised=True
    )
    with Child(configuration) as child, Child(optimised) as default:
        for group in found_groups:
            case = from_json(group.first.case)
            outcome = once(child, case, explain=True)
            cause = cause_of(outcome, group.key[0], case)
            progress(f"{case.program.name}: {cause}, {len(group.results)} cases")
            causes.setdefault(cause, []).append(group)
        entries = []
        for cause, groups_of_cause in causes.items():
            smallest = min(groups_of_cause, key=lambda group: _size_of(group.first))
            entry = _minimised(smallest, child, seconds)
            minimal = from_json(entry["minimal"])
            entry["by default optimisations"] = once(default, minimal)["outcome"]
            programs = {group.key[1]: len(group.results) for group in groups_of_cause}
            count = sum(programs.values())
            entries.append(
                {"cause": cause, "cases": count, "programs": programs} | entry
            )
            progress(f"{cause}: {count} cases, least {minimal.program.name}")
    return sorted(entries, key=lambda entry: -entry["cases"])


def _minimised(group: Group, child: Child, seconds: float) -> dict[str, Any]:
    """The smallest case of a group, and what is said of it."""
    outcome = group.first.outcome

    def fails(case: Case) -> bool:
        return is_alike(once(child, case), outcome)

    smallest, tried = minimised(from_json(group.first.case), fails, seconds)
    explained_outcome = once(child, smallest, explain=True)
    return {
        "outcome": explained_outcome,
        "candidates tried": tried,
        "minimal": to_json(smallest),
        "first": group.first.case,
    }


def once(child: Child, case: Case, **options: Any) -> Mapping[str, Any]:
    """The outcome of one case."""
    [result] = child.results({"cases": [to_json(case)], **options})
    return result.outcome


def cause_of(outcome: Mapping[str, Any], symptom_text: str, case: Case) -> str:
    """The cause in words: what refutes the program, or the equation that differs."""
    if symptom_text != "wrong":
        return symptom_text
    refutation = outcome.get("refutation")
    if refutation:
        return f"wrong: {plain(refutation['fault'])[:80]}"
    if outcome.get("equation"):
        return f"wrong: first at {outcome['equation']}"
    return f"wrong: {case.program.name}"
