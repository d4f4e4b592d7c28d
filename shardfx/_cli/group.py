"""The group of all verbs, and how any of them ends."""

import os
import sys
from collections.abc import Sequence

import click

import shardfx

from ._usage import shown
from .verbs.chips import chips
from .verbs.clean import clean
from .verbs.convert import convert
from .verbs.demo import demo
from .verbs.diff import diff
from .verbs.explain import explain
from .verbs.fit import fit
from .verbs.lint import lint
from .verbs.models import models
from .verbs.plan import plan
from .verbs.report import report
from .verbs.search import search
from .verbs.traffic import traffic


_COMPLETION = """\b
completion in a shell, here for bash; zsh and fish have their own word:
  eval "$(_SHARDFX_COMPLETE=bash_source shardfx)"
"""


@click.group(
    name="shardfx",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    epilog=_COMPLETION,
)
@click.version_option(shardfx.__version__, prog_name="shardfx")
def shardfx_() -> None:
    """Sharding plans as plain data, for JAX."""


for _verb in (plan, explain, lint, diff, fit, report, traffic, search, convert, clean, models, chips, demo):
    shardfx_.add_command(_verb)


def run(arguments: Sequence[str] | None) -> int:
    """Runs a command line.

    **Arguments:**

    - `arguments`: what follows the program's name; `sys.argv` by default.

    **Returns:**

    The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if sys.stdout is None:  # as a shell's `>&-` leaves it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    try:
        return shardfx_.main(given, prog_name="shardfx", standalone_mode=False) or 0
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = "shardfx" if context is None else context.command_path
        message = " ".join(error.format_message().split()).rstrip(".")
        print(shown(f"{path}: error: {message}; see {path} --help", sys.stderr.encoding), file=sys.stderr)
        return 2
