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
    return RuleError(
        f"{what} at position {position}:\n    {text}\n    {' ' * position}^"
    )


def split(text: str, start: int, stop: int, separator: str) -> list[tuple[int, int]]:
    """The start and stop of each part into which `separator` divides
    `text[start:stop]`. Separators inside of brackets and after a backslash do not
    divide the text.
    """
    depth = 0
    pieces = []
    begin = start
    position = start
    while position < stop:
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth <= 0 and text.startswith(separator, position):
            pieces.append((begin, position))
            begin = position + len(separator)
        position += 1
    return [*pieces, (begin, stop)]


def parse_rule(text: str, start: int, stop: int) -> tuple[str, Any]:
    sides = split(text, start, stop, "->")
    if len(sides) != 2:
        fault = (
            "no `->` outside of brackets" if len(sides) == 1 else "more than one `->`"
        )
        raise _malformed(
            text,
            start if len(sides) == 1 else sides[1][1],
            f"a rule has {fault}; write `regex->axes`,",
        )
    pattern = text[slice(*sides[0])].strip()
    if not pattern or not all(
        text[slice(*piece)].strip() for piece in split(text, *sides[0], "|")
    ):
        raise _malformed(
            text,
            sides[0][0],
            "an empty alternative would match every path; write `.*` if that is meant,",
        )
    steps = [_parse_step(text, *piece) for piece in split(text, *sides[1], "|")]
    return pattern, ft.reduce(pipeline, steps) if len(steps) > 1 else steps[0]


def _parse_step(text: str, start: int, stop: int) -> Any:
    token = text[start:stop].strip()
    if token == "replicate":
        return replicate
    name, bracket, axes = token.removesuffix(")").partition("(")
    if name in STRATEGIES and bracket and token.endswith(")"):
        return strategy_of(
            name, [_parse_axis(text, start, axis) for axis in re.split(r"[,+]", axes)]
        )
    return PartitionSpec(
        *[_parse_entry(text, *piece) for piece in split(text, start, stop, ".")]
    )


def _parse_entry(text: str, start: int, stop: int) -> Any:
    if text[start:stop].strip() == "None":
        return None
    return tuple(
        _parse_axis(text, begin, text[begin:end])
        for begin, end in split(text, start, stop, "+")
    )


def _parse_axis(text: str, position: int, axis: str) -> str:
    if not re.fullmatch(r"\w+", axis.strip()):
        raise _malformed(
            text,
            position,
            f"{axis.strip()!r} is no mesh axis; write axes as in `data.model` or"
            " `data+fsdp`,",
        )
    return axis.strip()
