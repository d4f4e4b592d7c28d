"""Writes the output of verbs: coloured text, JSON, progress on a terminal, and exit
codes.
"""

import contextlib
import dataclasses
import enum
import functools as ft
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.text import Text

from .._ground.spec import UNCONSTRAINED, entries_of
from .._ground.text import wrapped
from ._usage import UsageError, calling, encodable, in_flags, shown


JSON = click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write the result as JSON, to FILE or in the place of the text.",
)
_COLOURS = (
    (r"^(error|warning|info)\b", "bold"),
    (r"\berror\b", "red"),
    (r"\bwarning\b", "yellow"),
    (r"^\[\d+\]|(?<=  )\[\d+\](?= )", "yellow"),
    (r"\b[\d.,]+ ([KMGTPE]i)?B\b", "cyan"),
    (r"\b(bf|f|u|i|c)\d+\w*\[[\d,]*\]", "green"),
)


def terminal_width() -> int | None:
    """Returns the number of the terminal's columns; `None`, which means no limit, if
    stdout is not a terminal.
    """
    if sys.stdout.isatty():
        return os.get_terminal_size(sys.stdout.fileno()).columns
    return None


def show(text: str) -> None:
    """Prints a text of several lines, such as a table of the library. The names of the
    library's arguments are replaced by flags: `strict=True` by `--strict`.
    """
    text = encodable(in_flags(text), sys.stdout.encoding)
    if sys.stdout.isatty():
        # Tables fit the terminal already. The terminal itself wraps a row that does
        # not.
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(coloured(wrapped(text, terminal_width())), soft_wrap=True)
    else:
        print(text)


def coloured(text: str) -> Text:
    """The text with colours for severities, marks of reasons, bytes and arrays."""
    coloured_text = Text(text)
    for pattern, style in _COLOURS:
        coloured_text.highlight_regex(f"(?m){pattern}", style)
    return coloured_text


def answer(
    json_file: str | None,
    text: Callable[[], str],
    data: Callable[[], Any],
) -> None:
    """Prints a result as text, or writes it as JSON, or both. `text` and `data` make
    the two forms of the result.

    `json_file` is the value of the flag --json: a file, "-" to print JSON only, or
    `None` for no JSON.
    """
    if json_file != "-":
        show(text())
    if json_file is not None:
        write(as_json(data()), json_file)


def write(text: str, file: str) -> None:
    """Writes a result to a file, or prints it if `file` is "-"."""
    if file == "-":
        print(text)
        return
    calling(
        f"writing {file!r}",
        lambda: pathlib.Path(file).write_text(text + "\n", encoding="utf-8"),
    )


def require_writable(*files: str | None) -> None:
    """Raises `UsageError` before the work begins if an output file cannot be written,
    or if more than one is "-".
    """
    if files.count("-") > 1:
        raise UsageError(
            'two results would be printed as one; give a file for all but one "-"'
        )
    for file in files:
        if file is not None and file != "-":
            is_new = not os.path.lexists(file)
            append = ft.partial(pathlib.Path(file).open, "a")
            calling(f"writing {file!r}", append).close()
            if is_new:
                os.remove(file)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A context manager that shows the message `what` in the terminal if its block
    takes longer than a second.

    Its value is a function that replaces the message.
    """
    # `Text` keeps rich from reading names of files and modules as markup.
    status = Console(stderr=True).status(Text(what))
    timer = threading.Timer(1.0, status.start)
    if sys.stderr.isatty():
        timer.start()
    try:
        yield lambda text: status.update(Text(text))
    finally:
        timer.cancel()
        # A thread that was started has a number.
        if timer.ident is not None:
            timer.join()
            status.stop()


def as_json(value: object) -> str:
    """Returns a result as JSON text in ASCII. Other characters, including lone
    surrogates, are escaped.
    """
    return json.dumps(data_of(value), indent=2)


def data_of(value: object) -> Any:
    """Converts a result of the library to dicts, lists, strings, numbers and `None`.

    A dataclass or named tuple becomes a dict of its fields, a PartitionSpec a list with
    an entry for each dimension, a dtype its name.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if value is UNCONSTRAINED:
        return "unconstrained"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PartitionSpec):
        return [data_of(entry) for entry in entries_of(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: data_of(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): data_of(item) for key, item in value.items()}
    # A NamedTuple.
    if isinstance(value, tuple) and "_fields" in dir(value):
        return {name: data_of(getattr(value, name)) for name in value._fields}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple | list):
        return [data_of(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


class Verb(click.Command):
    """A click command whose exit code is the number that its function returns, or 0.

    If the function raises a UsageError, one line is printed on stderr, and the exit
    code is 2.
    """

    def invoke(self, ctx: click.Context) -> int:
        """Runs the verb and returns its exit code: 2 for a `UsageError` or a failing
        write, after one line on stderr; 0 if the reader of a pipe has closed it.
        """
        try:
            require_writable(ctx.params.get("json_file"))
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code or 0
        except (UsageError, OSError) as error:
            prefix = ""
            if isinstance(error, OSError):
                # At its exit the interpreter would flush the rest of the text and fail
                # again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                prefix = "printing failed: "
            # The reader, such as `head`, closed the pipe.
            if isinstance(error, BrokenPipeError):
                return 0
            line = f"{ctx.command_path}: error: {prefix}{error}"
            print(shown(line, sys.stderr.encoding), file=sys.stderr)
            return 2


def verb(
    *,
    examples: Sequence[str],
    exits: str = "0",
) -> Callable[[Callable[..., Any]], click.Command]:
    """Returns a decorator that makes a function a verb (a command) of the same name.

    `examples` are command lines that the help shows and that a test runs. `exits` is
    the text of the help about exit codes, before "2 for bad input".
    """
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = (
        f"\b\nexamples:\n{lines}\n\nExit code: {exits}; 2 for bad input, after one line"
        " on stderr."
    )
    return click.command(cls=Verb, epilog=epilog)
