"""The rules and the pairs of two AxisRules as one, if they agree."""

from collections.abc import Sequence
from typing import Any

from .._ground.errors import RuleError
from .pairs import Rule, Target


def merged_rules(
    first: tuple[Rule, ...],
    second: tuple[Rule, ...],
    what: str,
) -> tuple[Rule, ...]:
    """The rules of `first`, then those that only `second` has. Raises `RuleError`,
    whose message calls these rules `what`, if both give a name other targets: those of
    one side must begin with all those of the other.
    """
    # The targets that `first` gives to each name, less those that are already compared.
    targets_by_name: dict[str, list[Target]] = {}
    for name, target in first:
        targets_by_name.setdefault(name, []).append(target)
    added = []
    for name, target in second:
        # A rule of `second` is compared with the next one of its name in `first`.
        targets = targets_by_name.get(name)
        if not targets:
            added.append((name, target))
        elif targets.pop(0) != target:
            raise RuleError(
                f"`merge`: {what} map {name!r} to {_targets_of(name, first)} on one"
                f" side and to {_targets_of(name, second)} on the other; use"
                f" `without({name!r})` on the side that should give way."
            )
    return first + tuple(added)


def _targets_of(name: str, rules: Sequence[Rule]) -> list[Target]:
    return [target for rule_name, target in rules if rule_name == name]


def merged_pairs(
    first: tuple[Any, ...],
    second: tuple[Any, ...],
    what: str,
) -> dict[str, Any]:
    """The pairs of `first` and of `second` as one dict. Raises `RuleError`, whose
    message calls such a pair `what`, if both give a name another value.
    """
    merged = dict(first)
    for name, value in second:
        if merged.setdefault(name, value) != value:
            raise RuleError(
                f"`merge`: the {what} {name!r} is {merged[name]!r} on one side and"
                f" {value!r} on the other; use `without({name!r})` on the side that"
                " should give way."
            )
    return merged
