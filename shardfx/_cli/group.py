"""The command group `shardfx`, which imports a verb's module when the verb is called,
and the handling of errors in the command line itself.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from ._usage import shown
from ._versions import verbose_text, version_text


# For each verb the module that has it, and its help. A verb's module is imported only
# when the verb is called: help, completion and the version then need no import of JAX,
# which takes a second.
_VERBS = {
    "chips": ("lists", "List accelerators: memory, arithmetic, links."),
    "clean": (
        "checkpoints",
        "List or remove the incomplete checkpoints of killed saves.",
    ),
    "convert": (
        "checkpoints",
        "Convert a checkpoint: change names, shapes, dtypes, files.",
    ),
    "demo": (
        "training",
        "Train a small transformer under a plan, and again without one.",
    ),
    "diff": ("plans", "Compare two plans: the differences, and the cost of moving."),
    "explain": (
        "plans",
        "Say why one array is sharded as it is, and what would change it.",
    ),
    "fit": (
        "steps",
        "Say whether a step fits a chip, and which changes would make it fit.",
    ),
    "lint": ("plans", "List the mistakes in a model's rules, with a fix for each."),
    "models": ("lists", "List the published models."),
    "plan": (
        "plans",
        "Print how every array of a model is sharded on a mesh, and why.",
    ),
    "report": (
        "plans",
        "Write a plan as one HTML page: a map of bytes, findings, a table.",
    ),
    "search": ("steps", "Choose a mesh and rules for a step by their estimated cost."),
    "traffic": (
        "steps",
        "List the collectives of a step, and the lines that cause them.",
    ),
    "why": ("steps", "Show how a step's arrays are sharded, and why."),
}
_COMPLETION = """\b
completion in a shell, here for bash; zsh and fish have their own word:
  eval "$(_SHARDFX_COMPLETE=bash_source shardfx)"
"""


class _Verbs(click.Group):
    """A click group of the verbs in `_VERBS`. It imports a verb's module when the verb
    is called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module_name, _ = _VERBS[cmd_name]
        module = importlib.import_module(f".verbs.{module_name}", __package__)
        return getattr(module, cmd_name)

    def format_commands(
        self,
        ctx: click.Context,
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])

    def shell_complete(
        self,
        ctx: click.Context,
        incomplete: str,
    ) -> list[CompletionItem]:
        """The verbs and options that begin with the word `incomplete`."""
        items = []
        for name, (_, help_text) in _VERBS.items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=help_text))
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _print_version(context: click.Context, _: object, is_asked: bool) -> None:
    """Prints the version and ends the command line, if --version is given."""
    if not is_asked:
        return
    text = version_text()
    if context.ensure_object(dict).get("verbose", False):
        text = verbose_text()
    click.echo(text)
    context.exit()


@click.command(
    cls=_Verbs,
    name="shardfx",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    epilog=_COMPLETION,
)
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, value: context.ensure_object(dict).update(
        verbose=value
    ),
    help="With --version: those of JAX and others, and the devices.",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def shardfx_() -> None:
    """Sharding plans as plain data, for JAX."""


def run(arguments: Sequence[str] | None) -> int:
    """Runs a command line and returns the exit code of the verb; 2 if the command line
    cannot be parsed.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments) or ["--help"]
    # A shell's `>&-` and `2>&-` close these streams, which Python then lacks.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    try:
        return shardfx_.main(words, prog_name="shardfx", standalone_mode=False) or 0
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = "shardfx" if context is None else context.command_path
        message = " ".join(error.format_message().split()).rstrip(".")
        print(
            shown(
                f"{command}: error: {message}; see {command} --help",
                sys.stderr.encoding,
            ),
            file=sys.stderr,
        )
        return 2
