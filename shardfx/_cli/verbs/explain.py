"""`shardfx explain`: why one array is sharded as it is."""

import re

import click

from shardfx import explain as explain_of

from .._asked import Asked, asks_for_a_plan, plan_of
from .._data import as_json
from .._screen import JSON, show, write
from .._usage import calling
from .._verb import verb


# The first of several layers, as a plan's table names them: `layers/{0..125}/up`.
_RANGE = re.compile(r"\{(\d{1,18})[\d.,]*\}")


@verb(
    examples=(
        "shardfx explain llama3-405b 'model/layers/{0..125}/mlp/up_proj/weight' --mesh tensor=3 --rules tp",
        "shardfx explain my_model:make layer_0/up --mesh fsdp=3,tensor=2 --rules my_model:BOTH",
    )
)
@asks_for_a_plan()
@click.argument("path", metavar="PATH")
@JSON
def explain(asked: Asked, path: str, json_file: str | None) -> None:
    """Say why one array is sharded as it is, and what would change it.

    PATH is the array's, as `shardfx plan` names it, or a regex that finds it alone, as k_proj; of several layers,
    {0..31}, the first is taken.

    {MODEL}
    """
    made = plan_of(asked)
    named = path if path in made else _RANGE.sub(r"\1", path)
    found = calling("explaining", lambda: explain_of(made, named))
    if json_file != "-":
        show(str(found))
    if json_file is not None:
        write(as_json(found), json_file)
