"""A verb: a command whose errors are one line, and whose help ends in examples."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from ._screen import require_writable
from ._usage import UsageError, shown


class Verb(click.Command):
    """A command that ends as all verbs end: 0, or what it returns; 2 after one line about what cannot be used."""

    def invoke(self, ctx: click.Context) -> int:
        try:
            require_writable(ctx.params.get("json_file"))
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code or 0
        except UsageError as error:
            print(shown(f"{ctx.command_path}: error: {error}", sys.stderr.encoding), file=sys.stderr)
            return 2
        except BrokenPipeError:
            # The reader, `head` for example, has what it wanted; the interpreter must not flush to it at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            # The disk is full, for example; what is left of the text cannot be printed either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(shown(f"{ctx.command_path}: error: printing failed: {error}", sys.stderr.encoding), file=sys.stderr)
            return 2


def verb(*, examples: Sequence[str], exits: str = "0") -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a function a verb of its name.

    **Arguments:**

    - `examples`: command lines that work; the help shows them, and a test runs them.
    - `exits`: what the exit code says, before "2 for bad input".

    **Returns:**

    A decorator.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = f"\b\nexamples:\n{lines}\n\nExit code: {exits}; 2 for bad input, after one line on stderr."
    return click.command(cls=Verb, epilog=epilog)
