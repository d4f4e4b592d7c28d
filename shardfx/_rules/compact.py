"""The compact form of path rules, `"attention|mlp->data.model, .*->fsdp(data)"`, as pairs of a regex and a target."""

import functools as ft
import re
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .strategies import fsdp, pipeline, replicate


def parsed(text: str) -> list[tuple[str, Any]]:
    """The rules that `text` holds; see `PathRules.parse`."""
    return [_parse_rule(text, start, stop) for start, stop in _split(text, 0, len(text), ",")]


def _malformed(text: str, position: int, what: str) -> RuleError:
    return RuleError(f"{what} at position {position}:\n    {text}\n    {' ' * position}^")


def _split(text: str, start: int, stop: int, separator: str) -> list[tuple[int, int]]:
    """The stretches of `text[start:stop]` between separators that are not inside brackets or escaped."""
    depth, pieces, begin, position = 0, [], start, start
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


def _parse_rule(text: str, start: int, stop: int) -> tuple[str, Any]:
    sides = _split(text, start, stop, "->")
    if len(sides) != 2:
        if len(sides) == 1 and "->" in text[start:stop]:
            raise _malformed(text, _open_bracket(text, start, stop), "a bracket is not closed,")
        found = "no `->`" if len(sides) == 1 else "more than one `->`"
        raise _malformed(text, start if len(sides) == 1 else sides[1][1], f"a rule has {found}; write `regex->axes`,")
    pattern = text[slice(*sides[0])].strip()
    if not pattern or not all(text[slice(*piece)].strip() for piece in _split(text, *sides[0], "|")):
        raise _malformed(text, sides[0][0], "an empty alternative would match every path; write `.*` if that is meant,")
    steps = [_parse_step(text, *piece) for piece in _split(text, *sides[1], "|")]
    return pattern, ft.reduce(pipeline, steps) if len(steps) > 1 else steps[0]


def _open_bracket(text: str, start: int, stop: int) -> int:
    """Where the last bracket that is not closed stands; one that is closed twice, where none is open."""
    opened: list[int] = []
    for position in range(start, stop):
        if text[position] in "([{" and text[position - 1 : position] != "\\":
            opened.append(position)
        elif text[position] in ")]}" and opened:
            opened.pop()
    return opened[-1] if opened else start


def _parse_step(text: str, start: int, stop: int) -> Any:
    token = text[start:stop].strip()
    if token == "replicate":
        return replicate
    if token.startswith("fsdp(") and token.endswith(")"):
        axes = re.split(r"[,+]", token[len("fsdp(") : -1])
        return fsdp([_parse_axis(text, start, axis) for axis in axes])
    return PartitionSpec(*[_parse_entry(text, *piece) for piece in _split(text, start, stop, ".")])


def _parse_entry(text: str, start: int, stop: int) -> Any:
    if text[start:stop].strip() == "None":
        return None
    return tuple(_parse_axis(text, begin, text[begin:end]) for begin, end in _split(text, start, stop, "+"))


def _parse_axis(text: str, position: int, axis: str) -> str:
    if not re.fullmatch(r"\w+", axis.strip()):
        raise _malformed(
            text, position, f"{axis.strip()!r} is no mesh axis; write axes as in `data.model` or `data+fsdp`,"
        )
    return axis.strip()
