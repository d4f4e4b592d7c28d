"""The lines of a program that was traced, which of them are the user's own, and its equations one by one."""

import functools as ft
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
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


def opened(given: object) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and the constants of one that may be closed."""
    return (given.jaxpr, given.consts) if isinstance(given, jex.ClosedJaxpr) else (given, ())


def applied(jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """One equation carried out, with the name and the line that it came from."""
    known = {atom: array for atom, array in zip(equation.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=[*known],
        outvars=[*equation.outvars],
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*known.values())


def carry_of(scan: Any) -> tuple[int, int]:
    """Where the carry of a scan begins in what it takes, and how many arrays it has.

    The parameters that say so have other names with each JAX. What is taken or made by turns has a dimension more.
    """
    inner = opened(scan.params["jaxpr"])[0]
    taken = sum(a.aval.shape == b.aval.shape for a, b in zip(scan.invars, inner.invars, strict=True))
    carried = sum(a.aval.shape == b.aval.shape for a, b in zip(scan.outvars, inner.outvars, strict=True))
    return taken - carried, carried


def frames_of(equation: jex.JaxprEqn) -> tuple[Frame, ...]:
    """The lines of an equation and of the calls around it, the innermost first."""
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return tuple(Frame(one.file_name, one.line_num, one.function_name) for one in frames)
