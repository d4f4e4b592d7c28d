"""A verb's output: coloured text, JSON and progress, and its exit code."""

import dataclasses
import enum
import functools as ft
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
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
    """The terminal's columns; `None`, for no limit, if the output is no terminal."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


def show(text: str) -> None:
    """Prints a text, with the library's argument names replaced by the names of flags.

    **Arguments:**

    - `text`: printable but for its line breaks, as tables and reports of the library are.
    """
    text = encodable(in_flags(text), sys.stdout.encoding)
    if not sys.stdout.isatty():
        print(text)
        return
    # Tables fit the terminal already; a row that does not is the terminal's to wrap.
    text = wrapped(text, terminal_width())
    Console(highlight=False, markup=False, emoji=False).print(coloured(text), soft_wrap=True)


def coloured(text: str) -> Text:
    """A text with colours for a terminal: severities, sizes, dtypes and reasons."""
    made = Text(text)
    for pattern, style in _COLOURS:
        made.highlight_regex(f"(?m){pattern}", style)
    return made


def answer(json_file: str | None, text: Callable[[], str], data: Callable[[], Any]) -> None:
    """Shows a result as text, writes it as JSON, or does both, as --json says."""
    if json_file != "-":
        show(text())
    if json_file is not None:
        write(as_json(data()), json_file)


def write(text: str, file: str) -> None:
    """Writes a result to a file, or prints it if `file` is "-"."""
    if file == "-":
        print(text)
        return
    calling(f"writing {file!r}", lambda: pathlib.Path(file).write_text(text + "\n", encoding="utf-8"))


def require_writable(*files: str | None) -> None:
    """Raises before the work begins if a result could not be written, or if two results would be printed.

    **Raises:**

    `UsageError` for a file that cannot be opened, or where two results are to be printed.
    """
    if files.count("-") > 1:
        raise UsageError('two results would be printed as one; give a file for all but one "-"')
    for file in files:
        if file is not None and file != "-":
            calling(f"writing {file!r}", ft.partial(_try_to_write, file))


def _try_to_write(file: str) -> None:
    is_new = not os.path.lexists(file)
    open(file, "a", encoding="utf-8").close()
    if is_new:
        os.remove(file)


class working:
    """A context that shows a message on a terminal if the work takes longer than a second."""

    def __init__(self, what: str):
        # Names of files and modules are shown as they are, not read as rich's markup.
        self.status = Console(stderr=True).status(Text(what))
        self.timer = threading.Timer(1.0, self.status.start)

    def __enter__(self) -> "working":
        if sys.stderr.isatty():
            self.timer.start()
        return self

    def tell(self, text: str) -> None:
        """Shows another message."""
        self.status.update(Text(text))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.timer.cancel()
        if self.timer.ident is not None:
            self.timer.join()
            self.status.stop()


def as_json(value: object) -> str:
    """A result as JSON text in ASCII."""
    return json.dumps(data_of(value), indent=2)


def data_of(value: object) -> Any:
    """A result of the library as dicts, lists, strings, numbers and `None`.

    A record becomes a dict of its fields, a PartitionSpec a list with an entry for each dimension, a dtype its name.
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
        return {field.name: data_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): data_of(held) for key, held in value.items()}
    if isinstance(value, tuple) and "_fields" in dir(value):
        return {name: data_of(getattr(value, name)) for name in value._fields}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple | list):
        return [data_of(held) for held in value]
    return value.item() if isinstance(value, np.generic) else str(value)


class Verb(click.Command):
    """A command with the exit codes of all verbs: 0 or the function's result, and 2 after one line on stderr for bad
    input.
    """

    def invoke(self, ctx: click.Context) -> int:
        try:
            require_writable(ctx.params.get("json_file"))
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code or 0
        except UsageError as error:
            print(shown(f"{ctx.command_path}: error: {error}", sys.stderr.encoding), file=sys.stderr)
            return 2
        except OSError as error:
            # The interpreter must not flush what is left of the text at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader, `head` for example, has what it wanted
                return 0
            print(shown(f"{ctx.command_path}: error: printing failed: {error}", sys.stderr.encoding), file=sys.stderr)
            return 2


def verb(*, examples: Sequence[str], exits: str = "0") -> Callable[[Callable[..., Any]], click.Command]:
    """A decorator that makes a function a verb with the function's name.

    **Arguments:**

    - `examples`: command lines that work; the help shows them, and a test runs them.
    - `exits`: the meaning of the exit code, without "2 for bad input".

    **Returns:**

    A decorator.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = f"\b\nexamples:\n{lines}\n\nExit code: {exits}; 2 for bad input, after one line on stderr."
    return click.command(cls=Verb, epilog=epilog)
