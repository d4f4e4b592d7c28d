"""Whether a set of regexes can tell digits apart: where none can, repeated layers are matched once."""

import functools as ft
from re import (
    _constants as sre,  # pyright: ignore[reportAttributeAccessIssue]
    _parser as sre_parser,  # pyright: ignore[reportAttributeAccessIssue]
)
from typing import Any

from .path_rules import PathRules


@ft.lru_cache(maxsize=256)
def is_digit_blind(rules: PathRules) -> bool:
    """Whether no regex can tell one digit from another, so that paths that differ only in digits match alike."""
    return all(_blind(sre_parser.parse(pattern)) for pattern, _ in rules.rules)


_DIGITS = frozenset(map(ord, "0123456789"))
_LEAVES = {sre.ANY, sre.ANY_ALL, sre.AT, sre.FAILURE, sre.CATEGORY}


def _blind(parsed: Any) -> bool:
    """Whether a parsed regex treats the ten digits alike; `False` for what this does not know."""
    return all(_blind_node(code, argument) for code, argument in parsed)


def _blind_node(code: Any, argument: Any) -> bool:
    if code in _LEAVES:
        return True
    if code in (sre.LITERAL, sre.NOT_LITERAL):
        return argument not in _DIGITS
    if code is sre.IN:
        return all(_blind_member(*member) for member in argument)
    if code is sre.BRANCH:
        return all(_blind(branch) for branch in argument[1])
    if code in (
        sre.SUBPATTERN,
        sre.MAX_REPEAT,
        sre.MIN_REPEAT,
        sre.POSSESSIVE_REPEAT,
        sre.ASSERT,
        sre.ASSERT_NOT,
    ):
        return _blind(argument[-1])
    if code is sre.ATOMIC_GROUP:
        return _blind(argument)
    return False


def _blind_member(code: Any, argument: Any) -> bool:
    if code is sre.LITERAL:
        return argument not in _DIGITS
    if code is sre.RANGE:
        inside = [argument[0] <= digit <= argument[1] for digit in sorted(_DIGITS)]
        return all(inside) or not any(inside)
    return code in (sre.NEGATE, sre.CATEGORY)
