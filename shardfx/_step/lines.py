"""The lines of a program that was traced, which of them are the user's own, and JAX's name stacks."""

import functools as ft
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from .._ground.text import printable


class Frame(NamedTuple):
    """A line of a program that was traced."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file without its folder, and the line."""
        return printable(f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}")


# Frames of these are not the user's own program; the demo is a user's program like any other.
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]shardfx[/\\](?!_cli[/\\]demo)|^<frozen")
# As MLIR writes a location: `"function"("file":line:column)`, and the name stack before the calls.
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+)')
_STACK = re.compile(r'loc\("([^"]*)"')


@ft.lru_cache(maxsize=2**14)
def lines_of(locations: tuple[ir.Location, ...]) -> tuple[Frame, ...]:
    """The lines of an operation and of the calls around it, the innermost first."""
    found = (_FRAME.findall(str(location)) for location in locations)
    return tuple(Frame(file, int(line), function) for frames in found for function, file, line in frames)


def name_stacks(locations: tuple[ir.Location, ...]) -> tuple[str, ...]:
    """JAX's names for what an operation, and each call around it, is part of: `jit(step)/while/body/dot_general`."""
    found = (_STACK.match(str(location)) for location in locations)
    return tuple(one[1] for one in found if one)


def is_library(frame: Frame) -> bool:
    """Whether a line is not the user's own."""
    return _LIBRARY.search(frame.file) is not None


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line that is the user's own, or else any."""
    return next((frame for frame in stack if not is_library(frame)), next(iter(stack), None))


def place_text(source: Frame | None) -> str:
    """A line as tables show it, with its function."""
    if source is None:
        return "-"
    return f"{source.place} {printable(source.function)}" if source.function else source.place
