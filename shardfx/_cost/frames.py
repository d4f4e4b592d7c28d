"""The lines of a program that was traced, and which of them are the user's own."""

import functools as ft
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

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


def is_library(frame: Frame) -> bool:
    """Whether a line is not the user's own."""
    return _LIBRARY.search(frame.file) is not None


@ft.lru_cache(maxsize=4096)
def frames_of(traceback: Any) -> tuple[Frame, ...]:
    """The lines of a trace that are the user's own, innermost first; all of them if none is."""
    if traceback is None:
        return ()
    frames = [Frame(frame.file_name, frame.line_num, frame.function_name) for frame in traceback.frames]
    return tuple(frame for frame in frames if not is_library(frame)) or tuple(frames)


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line that is the user's own, or else any."""
    return next((frame for frame in stack if not is_library(frame)), next(iter(stack), None))


def place_text(source: Frame | None) -> str:
    """A line as tables show it, with its function."""
    if source is None:
        return "-"
    return f"{source.place} {printable(source.function)}" if source.function else source.place
