"""`shardfx traffic`: what a step sends, and the line of the program that causes it."""

from typing import Any

import click

from shardfx import MeshSpec, compare, traffic as traffic_of

from .._data import as_json, data_of
from .._screen import JSON, show, working, write
from .._step import Step, compiled_for_cpu, estimated, load_step
from .._usage import calling
from .._values import literals
from .._verb import verb


STEP_HELP = """MODULE:STEP is a function that returns a step and a tuple of its arguments: plans, or trees of
    ShapeDtypeStructs with shardings. A parameter called `mesh` gets --mesh as a MeshSpec."""


@verb(
    examples=(
        "shardfx traffic my_model:train_step --mesh data=2,fsdp=2,tensor=2",
        "shardfx traffic my_model:train_step --mesh data=16,fsdp=64,tensor=8 --how estimate --json traffic.json",
    )
)
@click.argument("step", metavar="MODULE:STEP")
@click.option("--mesh", metavar="MESH", help="The function's argument `mesh`, as in data=2,fsdp=4.")
@click.option("--kwargs", metavar="NAME=VALUE,...", help="For the function, as in 'layers=4'.")
@click.option(
    "--how",
    type=click.Choice(["compile", "estimate", "compare"]),
    default="compile",
    show_default=True,
    help="Compile for emulated CPU devices; estimate, for any mesh, without compiling; or do both, and say where the "
    "compiler sends more.",
)
@click.option(
    "--compiler",
    type=click.Choice(["tpu", "gpu", "cpu"]),
    default="tpu",
    show_default=True,
    help="Whose habits the estimate has.",
)
@JSON
def traffic(step: str, mesh: str | None, kwargs: str | None, how: str, compiler: str, json_file: str | None) -> None:
    """List what a step sends, and the line that causes it.

    {STEP} Nothing runs. A result that looks like an argument lies as that one does.
    """
    spec = None if mesh is None else calling("reading --mesh", lambda: MeshSpec.parse(mesh))
    loaded = load_step(step, None if kwargs is None else literals(kwargs, "kwargs"), spec)
    with working(f"{'estimating' if how == 'estimate' else 'compiling'} {step}"):
        found = _found(loaded, how, compiler)
    if json_file != "-":
        show(str(found))
    if json_file is not None:
        sums = {"extra_bytes": found.extra_bytes} if how == "compare" else _sums(found)
        write(as_json({**sums, **data_of(found)}), json_file)


traffic.help = (traffic.help or "").replace("{STEP}", STEP_HELP)


def _found(step: Step, how: str, compiler: Any) -> Any:
    if how == "estimate":
        return estimated(step, compiler)
    compiled = compiled_for_cpu(step)
    if how == "compile":
        return calling("reading the program", lambda: traffic_of(compiled, step.mesh))
    # What was compiled is a CPU's.
    expected = estimated(step, "cpu")
    return calling("comparing", lambda: compare(expected, traffic_of(compiled, step.mesh)))


def _sums(found: Any) -> dict[str, int]:
    return {"wire_bytes": found.wire_bytes, "dcn_bytes": found.dcn_bytes}
