"""Errors of a command as one line on stderr."""

import pathlib
import re
import sysconfig
import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

from .._ground import errors
from .._ground.text import printable


_Result = TypeVar("_Result")

# The package's own errors say all that there is to say.
OURS = tuple(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception))
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 2000
_ARGUMENT = re.compile(r"`(unmatched|unused|mode|min_bytes|strict|refine|step)=([^`]*)`")
_INSTALLED = (*sysconfig.get_paths().values(), str(pathlib.Path(__file__).parent.parent))


class UsageError(ValueError):
    """Bad input on the command line, or in a file or module that it names. Its text is one line."""


def one_line(error: BaseException) -> str:
    """The error's text on one line. Of a list of findings it keeps the first few."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line.strip(" ^~")]
    text = ""
    for line in lines[:_SHOWN_LINES]:
        text += line if not text else f" {line}" if text[-1] in ".,:" else f"; {line}"
    return text + (f" (and {len(lines) - _SHOWN_LINES} lines more)" if len(lines) > _SHOWN_LINES else "")


def shown(text: str, encoding: str | None) -> str:
    """`text` in characters that a terminal with this encoding shows, with the middle of a very long text left out.

    What a user typed, or what stands in a file, may hold characters that a terminal obeys, or names without end.
    """
    text = printable(text)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS // 2]} ... {text[-_SHOWN_CHARACTERS // 2 :]}"
    return encodable(text, encoding)


def encodable(text: str, encoding: str | None) -> str:
    """`text` with an escape for each character that the encoding lacks."""
    name = encoding or "utf-8"
    return text.encode(name, "backslashreplace").decode(name)


def in_flags(text: str) -> str:
    """`text` with flags in the place of arguments of `shardfx.plan`: `--strict` for `strict=True`."""

    def flag(found: re.Match[str]) -> str:
        value = found[2].strip("\"'")
        return f"`--{found[1].replace('_', '-')}{'' if value in ('', 'True') else f' {value}'}`"

    pair = "give --rules a pair, MODULE:NAME of (PathRules, AxisRules)"
    return _ARGUMENT.sub(flag, text).replace("pass `axes=AxisRules([...])`", pair)


def calling(what: str, function: Callable[[], _Result]) -> _Result:
    """Runs a function that may be the user's code, and turns its errors into UsageErrors.

    **Arguments:**

    - `what`: the action in words, as "importing `my_model`".
    - `function`: does it.

    **Returns:**

    What the function returns.

    **Raises:**

    `UsageError` with what happened and where, instead of whatever the code raised.
    """
    with _Reported(what):
        return function()


class _Reported:
    """A context that turns errors into UsageErrors. A user's module may raise any class of errors."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> Literal[False]:
        # `SystemExit` is what calling `exit()` at the top of a module does; Ctrl-C must stay what it is.
        if isinstance(error, OURS):
            raise UsageError(in_flags(one_line(error))) from error
        if isinstance(error, Exception | SystemExit) and not isinstance(error, UsageError):
            # Below Python, JAX loses the type of an error that it met while it flattened a tree.
            error = error.__cause__ if isinstance(error, SystemError) and error.__cause__ else error
            text = f"{self.what} failed{_place(error)}: {type(error).__name__}: {one_line(error)}"
            raise UsageError(text) from error
        return False


def _place(error: BaseException) -> str:
    """The last source line that ran outside of installed packages, which is the user's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" in {error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_INSTALLED))]
    return f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
