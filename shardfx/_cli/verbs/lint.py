"""`shardfx lint`: all that is wrong with rules, at once."""

from typing import Any

import click

from .._asked import Asked, asks_for_a_plan, inputs_of
from .._checked import findings_of
from .._data import as_json
from .._screen import JSON, show, write
from .._types import Whole
from .._usage import calling
from .._verb import verb


SEVERITIES = click.Choice(["error", "warning", "info"])


@verb(
    examples=(
        "shardfx lint llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp",
        "shardfx lint my_model:make --mesh fsdp=4,tensor=3 --rules my_model:BOTH --json",
    ),
    exits="0; 1 if there are findings of the severity of --fail-on or a worse one",
)
@asks_for_a_plan()
@click.option("--fail-on", type=SEVERITIES, default="warning", show_default=True, help="Exit with 1 for these.")
@click.option("--ignore", multiple=True, metavar="CODE", help="Leave out findings of this code; may be repeated.")
@click.option(
    "--replicated-bytes", type=Whole(), default=2**26, show_default=True, help="From which size on whole arrays count."
)
@click.option("--head-dim", type=Whole(positive=True), help="Of attention heads, where the model does not tell.")
@JSON
def lint(
    asked: Asked,
    fail_on: str,
    ignore: tuple[str, ...],
    replicated_bytes: int,
    head_dim: int | None,
    json_file: str | None,
) -> int:
    """Find all that is wrong with a model's rules, and how to mend it.

    What `plan` would refuse is an error; what is most likely a mistake, a warning.

    {MODEL}
    """
    given = None if asked.rules is None and asked.mesh is None else inputs_of(asked)
    limits: dict[str, Any] = {"replicated_bytes": replicated_bytes, "head_dim": head_dim}
    found = calling("checking", lambda: findings_of(asked, given, **limits).without(*ignore))
    if json_file != "-":
        show(str(found))
    if json_file is not None:
        write(as_json(list(found)), json_file)
    return 1 if found.worst(fail_on) else 0  # pyright: ignore[reportArgumentType]
