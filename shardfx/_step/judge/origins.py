"""The lines of the user's code from which an operation comes.

JAX traces a function that several programs use once, such as the slice with which a
scan takes its rows, and keeps what it traced. An operation of that function has the
call stack of its first call, and after it that of the present one. So the innermost
line may be one of another program.

Each trace of shardfx leaves frames of its own in a call stack, which divide it: the
innermost part is of the operation, the next one is of the loop around it, and so on. A
part is of the present program if it contains the line that calls it, which is the
innermost line of the next part.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..lowered import Frame, is_library, own_line


class Origin(NamedTuple):
    """Where an operation comes from.

    - `source`: the innermost line of the user's code that the present program runs;
      `None` if it is not known.
    - `caller`: the line of the step itself; `None` if it is `source`, or not known.
    - `first_traced`: the innermost line of the first call of the operation's function,
      if that is another than the present one.
    """

    source: Frame | None
    caller: Frame | None = None
    first_traced: Frame | None = None


def origin_of(stack: Sequence[Frame]) -> Origin:
    """The origin of an operation with this call stack, innermost frame first. Its parts
    are read from the outermost, which is the step's own, inwards.
    """
    lowering_place = _start_of_lowering(stack)
    if lowering_place is None:
        # A program that another compiler finished.
        return Origin(own_line(stack))
    parts = _parts(stack[:lowering_place])
    if not parts:
        return Origin(own_line(stack))

    innermost = len(parts) - 1
    while innermost > 0 and parts[innermost][0] in parts[innermost - 1]:
        innermost -= 1
    source = parts[innermost][0]
    step_line = parts[-1][-1]
    return Origin(
        source=source,
        caller=None if step_line == source else step_line,
        first_traced=None if innermost == 0 else parts[0][0],
    )


def _start_of_lowering(stack: Sequence[Frame]) -> int | None:
    """The place of the frame in which shardfx lowers a step. Frames behind it are of
    code that calls shardfx.
    """
    for place, frame in enumerate(stack):
        if frame.function == "lower" and _is_of_shardfx(frame):
            return place
    return None


def _parts(stack: Sequence[Frame]) -> list[list[Frame]]:
    """The user's frames between those of shardfx, innermost first: a list for each
    stretch of the call stack that has some.
    """
    parts: list[list[Frame]] = [[]]
    for frame in stack:
        if _is_of_shardfx(frame):
            parts.append([])
        elif not is_library(frame):
            parts[-1].append(frame)
    return [part for part in parts if part]


def _is_of_shardfx(frame: Frame) -> bool:
    folders = frame.file.replace("\\", "/").split("/")
    return "shardfx" in folders[:-1] and is_library(frame)
