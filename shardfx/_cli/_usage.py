"""Turns errors into one line on stderr. User code is run so that its errors become such
a line, too.
"""

import pathlib
import re
import sysconfig
import traceback
from collections.abc import Callable
from typing import TypeVar

from .._ground import errors
from .._ground.text import printable


_Result = TypeVar("_Result")

# The package's own errors: their messages are complete, so no context is added to them.
_CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
OURS = tuple(kind for kind in _CLASSES if issubclass(kind, Exception))
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 2000
_ARGUMENT = re.compile(
    r"`(unmatched|unused|mode|min_bytes|strict|refine|step|overwrite)=([^`]*)`"
)
_INSTALLED = (
    *sysconfig.get_paths().values(),
    str(pathlib.Path(__file__).parent.parent),
)


class UsageError(ValueError):
    """The error of an argument on the command line, or of a file or object that it
    names. Its message has one line.
    """


def one_line(error: BaseException) -> str:
    """Returns the first three lines of an error's message as one line. Lines that only
    mark positions are left out.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line.strip(" ^~")]
    text = ""
    for line in lines[:_SHOWN_LINES]:
        if not text:
            text = line
        elif text[-1] in ".,:":
            text += f" {line}"
        else:
            text += f"; {line}"
    if len(lines) > _SHOWN_LINES:
        text += f" (and {len(lines) - _SHOWN_LINES} lines more)"
    return text


def shown(text: str, encoding: str | None) -> str:
    """Returns `text` as a terminal can display it: user input may have control
    characters or very long names.

    Characters that cannot be displayed, or that `encoding` lacks, become escape
    sequences. The middle of a very long text is left out.
    """
    text = printable(text)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS // 2]} ... {text[-_SHOWN_CHARACTERS // 2 :]}"
    return encodable(text, encoding)


def encodable(text: str, encoding: str | None) -> str:
    """Returns `text` with an escape sequence for each character that the encoding
    lacks.
    """
    name = encoding or "utf-8"
    return text.encode(name, "backslashreplace").decode(name)


def in_flags(text: str) -> str:
    """Returns `text` with arguments of functions replaced by flags: `strict=True` of
    `shardfx.plan` becomes `--strict`.
    """

    def flag(argument: re.Match[str]) -> str:
        """The flag for a match, whose groups are the name and the value of an argument."""
        name = argument[1].replace("_", "-")
        value = argument[2].strip("\"'")
        if value in ("", "True"):
            return f"`--{name}`"
        return f"`--{name} {value}`"

    pair = "give --rules a pair, MODULE:NAME of (PathRules, AxisRules)"
    return _ARGUMENT.sub(flag, text).replace("pass `axes=AxisRules([...])`", pair)


def calling(what: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that may run user code, and turns its errors into a `UsageError`
    with the same message.

    For an error of another library or of user code, the message also has its type and
    the line of user code that raised it. Such a message begins with `what`, a phrase
    such as "importing `my_model`".
    """
    try:
        return function()
    except UsageError:
        raise
    except OURS as error:
        raise UsageError(in_flags(one_line(error))) from error
    # A user's module may also raise SystemExit, by `exit()` at its top level.
    except (Exception, SystemExit) as error:
        # JAX's C++ code turns an error that it meets while it flattens a tree into a
        # SystemError.
        cause: BaseException = error
        if isinstance(error, SystemError) and error.__cause__:
            cause = error.__cause__
        raise UsageError(
            f"{what} failed{_user_line(cause)}: {type(cause).__name__}: {one_line(cause)}"
        ) from cause


def _user_line(error: BaseException) -> str:
    """Returns the last line of user code that ran before the error, as " in FILE, line
    N"; "" if there is none.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" in {error.filename}, line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *_INSTALLED)):
            return f" in {frame.filename}, line {frame.lineno}"
    return ""
