"""The user's line and JAX's name stack, from the location of an operation."""

import functools as ft
import re
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A file, a line and a function of a program that was traced."""

    file: str
    line: int
    function: str


_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+)')
_STACK = re.compile(r'loc\("([^"]*)"')


@ft.lru_cache(maxsize=2**14)
def lines_of(locations: tuple[Any, ...]) -> tuple[Line, ...]:
    """The lines of an operation and of the calls around it, the innermost first."""
    found = (_FRAME.findall(str(location)) for location in locations)
    return tuple(Line(file, int(line), function) for frames in found for function, file, line in frames)


def name_stacks(locations: tuple[Any, ...]) -> tuple[str, ...]:
    """JAX's names for what an operation, and each call around it, is part of: `jit(step)/while/body/dot_general`."""
    found = (_STACK.match(str(location)) for location in locations)
    return tuple(one[1] for one in found if one)
