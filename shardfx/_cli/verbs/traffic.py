"""`shardfx traffic`: what a step sends, and the line of the program that causes it."""

import click

from shardfx import MeshSpec, traffic as traffic_of

from .._data import as_json, data_of
from .._screen import JSON, show, working, write
from .._step import compiled_for_cpu, load_step
from .._usage import calling
from .._values import literals
from .._verb import verb


@verb(
    examples=(
        "shardfx traffic my_model:train_step --mesh data=2,fsdp=2,tensor=2",
        "shardfx traffic my_model:train_step --mesh fsdp=4 --kwargs width=64 --json traffic.json",
    )
)
@click.argument("step", metavar="MODULE:STEP")
@click.option("--mesh", metavar="MESH", help="The function's argument `mesh`, as in data=2,fsdp=4.")
@click.option("--kwargs", metavar="NAME=VALUE,...", help="For the function, as in 'layers=4'.")
@JSON
def traffic(step: str, mesh: str | None, kwargs: str | None, json_file: str | None) -> None:
    """List what a step sends, and the line that causes it.

    MODULE:STEP is a function that returns a step and a tuple of its arguments: plans, or trees of ShapeDtypeStructs
    with shardings. A parameter called `mesh` gets --mesh as a MeshSpec. The step is compiled for CPU devices, which are
    emulated; nothing runs. A result that looks like an argument lies as that one does.
    """
    spec = None if mesh is None else calling("reading --mesh", lambda: MeshSpec.parse(mesh))
    given = None if kwargs is None else literals(kwargs, "kwargs")
    with working(f"compiling {step}"):
        loaded = load_step(step, given, spec)
        compiled = compiled_for_cpu(loaded)
        found = calling("reading the program", lambda: traffic_of(compiled, loaded.mesh))
    if json_file != "-":
        show(str(found))
    if json_file is not None:
        sums = {"wire_bytes": found.wire_bytes, "dcn_bytes": found.dcn_bytes}
        write(as_json({**sums, **data_of(found)}), json_file)
