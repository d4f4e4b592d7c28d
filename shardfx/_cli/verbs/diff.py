"""`shardfx diff`: how two plans differ, and what it costs to move from one to the other."""

import dataclasses

import click

from shardfx import diff as diff_of

from .._asked import Asked, asks_for_a_plan, plan_of
from .._data import as_json, data_of
from .._screen import JSON, show, working, write
from .._types import ModelName, RulesName
from .._usage import UsageError, calling
from .._verb import verb


@verb(
    examples=(
        "shardfx diff llama3-8b --mesh fsdp=8 --rules fsdp --to-mesh fsdp=4,tensor=2 --to-rules fsdp_tp",
        "shardfx diff my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH --to-rules '.*->fsdp(fsdp)' --json",
    ),
    exits="0; 1 with --exit-code if the plans differ",
)
@asks_for_a_plan()
@click.argument("to", type=ModelName(), required=False, metavar="[OTHER]")
@click.option("--to-mesh", metavar="MESH", help="The second plan's; the first's by default.")
@click.option("--to-rules", type=RulesName(), metavar="RULES", help="The second plan's; the first's by default.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@JSON
def diff(
    asked: Asked,
    to: str | None,
    to_mesh: str | None,
    to_rules: str | None,
    exit_code: bool,
    json_file: str | None,
) -> int:
    """Compare two plans: what differs, and what it costs to move.

    The second plan is of OTHER, or of MODEL again, on another mesh or by other rules.

    {MODEL}
    """
    if to is None and to_mesh is None and to_rules is None:
        raise UsageError("there is one plan; name another, or give --to-mesh or --to-rules")
    first, second = plan_of(asked), plan_of(_second(asked, to, to_mesh, to_rules))
    with working("comparing the plans"):
        found = calling("comparing", lambda: diff_of(first, second))
    if json_file != "-":
        show(str(found))
    if json_file is not None:
        write(as_json({"wire_bytes": found.wire_bytes, **data_of(found)}), json_file)
    return 1 if exit_code and found else 0


def _second(asked: Asked, to: str | None, mesh: str | None, rules: str | None) -> Asked:
    # A size of -1 is filled in the first mesh; the second is written out, or has the same devices.
    other = dataclasses.replace(asked, model=to or asked.model)
    if to is not None and mesh is None and rules is None and to.endswith(".json"):
        return dataclasses.replace(other, mesh=None, rules=None)
    return dataclasses.replace(other, mesh=mesh or asked.mesh, rules=rules or asked.rules)
