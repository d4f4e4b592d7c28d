"""`shardfx plan`: how every array of a model is sharded, and why."""

import click

from shardfx import report

from .._asked import Asked, asks_for_a_plan, inputs_of, plan_of
from .._screen import JSON, show, terminal_width, write
from .._slice import order_text
from .._types import Whole
from .._usage import calling
from .._verb import verb


@verb(
    examples=(
        "shardfx plan llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp",
        "shardfx plan mixtral-8x7b --mesh expert=8,fsdp=-1 --target tpu:v5e:4x4 --rules ep --json plan.json",
    )
)
@asks_for_a_plan()
@click.option("--only", metavar="REGEX", help="Show the arrays whose paths it finds, and their totals.")
@click.option("--width", type=Whole(positive=True), help="Columns of text; the terminal's, else no limit.")
@JSON
def plan(asked: Asked, only: str | None, width: int | None, json_file: str | None) -> None:
    """Print how every array of a model is sharded on a mesh, and why.

    Allocates nothing and needs no device: the mesh need not exist here.

    {MODEL}
    """
    inputs = None if asked.rules is None and asked.mesh is None else inputs_of(asked)
    made = plan_of(asked, inputs)
    if json_file == "-":
        write(made.to_json(), json_file)
        return
    shown = made if only is None else calling("--only", lambda: made.select(only))
    show(report(shown, width=width or terminal_width()))
    if inputs is not None and inputs.target is not None:
        show(f"\n{order_text(inputs.target, made.mesh)}")
    if json_file is not None:
        write(made.to_json(), json_file)
