"""Reads the compact form of path rules: `w->data.model, .*->fsdp(data)`."""

import functools as ft
import re
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .strategies import (
    STRATEGIES,
    pipeline,
    replicate,
    strategy_of,
)


def _malformed(text: str, position: int, what: str) -> RuleError:
    """The error that `what` stands at a position of the text, which it marks."""
    return RuleError(
        f"{what} at position {position}:\n    {text}\n    {' ' * position}^"
    )


def split(text: str, start: int, stop: int, separator: str) -> list[tuple[int, int]]:
    """The start and stop of each part into which `separator` divides
    `text[start:stop]`. Separators inside of brackets and after a backslash do not
    divide the text.
    """
    # The number of brackets that are open at `position`.
    depth = 0
    parts = []
    begin = start
    position = start
    while position < stop:
        letter = text[position]
        if letter == "\\":
            # It also hides the next character.
            position += 1
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth <= 0 and text.startswith(separator, position):
            parts.append((begin, position))
            begin = position + len(separator)
        position += 1
    return [*parts, (begin, stop)]


def parse_rule(text: str, start: int, stop: int) -> tuple[str, Any]:
    """The regex and the target of the rule `text[start:stop]`, such as
    `attention|mlp->data.model`. Raises `RuleError`, with the position in `text`, if it
    is malformed.
    """
    sides = split(text, start, stop, "->")
    if len(sides) == 1:
        raise _malformed(
            text,
            start,
            "a rule has no `->` outside of brackets; write `regex->axes`,",
        )
    if len(sides) > 2:
        _, end_of_second = sides[1]
        raise _malformed(
            text,
            end_of_second,
            "a rule has more than one `->`; write `regex->axes`,",
        )
    # Each side as the positions of its start and stop in `text`.
    regex_side, target_side = sides
    regex = text[slice(*regex_side)].strip()
    alternatives = split(text, *regex_side, "|")
    if not regex or not all(text[slice(*part)].strip() for part in alternatives):
        raise _malformed(
            text,
            regex_side[0],
            "an empty alternative would match every path; write `.*` if that is meant,",
        )
    steps = [_parse_step(text, *part) for part in split(text, *target_side, "|")]
    return regex, ft.reduce(pipeline, steps)


def _parse_step(text: str, start: int, stop: int) -> Any:
    """The target `text[start:stop]`, one of those that `|` joins right of `->`:
    `replicate`, a strategy such as `fsdp(data)`, or the mesh axes of each dimension, as
    a PartitionSpec.
    """
    token = text[start:stop].strip()
    if token == "replicate":
        return replicate
    name, bracket, arguments = token.removesuffix(")").partition("(")
    if name in STRATEGIES and bracket and token.endswith(")"):
        words = re.split(r"[,+]", arguments)
        return strategy_of(name, [_parse_axis(text, start, word) for word in words])
    dims = split(text, start, stop, ".")
    return PartitionSpec(*[_parse_entry(text, *dim) for dim in dims])


def _parse_entry(text: str, start: int, stop: int) -> Any:
    """The mesh axes of one dimension, `text[start:stop]`, such as `data+model`; `None`
    for "None".
    """
    if text[start:stop].strip() == "None":
        return None
    return tuple(
        _parse_axis(text, begin, text[begin:end])
        for begin, end in split(text, start, stop, "+")
    )


def _parse_axis(text: str, position: int, axis: str) -> str:
    """The mesh axis `axis` without spaces. Raises `RuleError`, with the `position` in
    `text`, if it is no name.
    """
    if not re.fullmatch(r"\w+", axis.strip()):
        raise _malformed(
            text,
            position,
            f"{axis.strip()!r} is no mesh axis; write axes as in `data.model` or"
            " `data+fsdp`,",
        )
    return axis.strip()
