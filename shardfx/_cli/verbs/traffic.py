"""`shardfx traffic`: what a step sends, and the line of the program that causes it."""

from typing import Any

import click

from shardfx import MeshSpec, chips
from shardfx.cost import compare, seconds, traffic as traffic_of

from .._data import as_json, data_of
from .._screen import JSON, show, terminal_width, working, write
from .._step import Step, compiled, estimated, load_step
from .._usage import UsageError, calling
from .._values import literals
from .._verb import verb


STEP_HELP = """MODULE:STEP is a function that returns a step and a tuple of its arguments: trees of
    ShapeDtypeStructs with shardings, as `plan.structs`. A parameter called `mesh` gets --mesh as a MeshSpec."""


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
    help="Whose compiler the estimate is for; by default that of what is compiled for, else a TPU's.",
)
@click.option("--target", metavar="tpu:KIND:AxBxC", help="Compile for this TPU slice; needs the extra `aot`.")
@click.option("--cache", metavar="DIR", help="Keep what was compiled for --target in this directory.")
@click.option("--chip", metavar="CHIP", help="Say how long it takes over the links of this one; see `shardfx chips`.")
@JSON
def traffic(
    step: str,
    mesh: str | None,
    kwargs: str | None,
    how: str,
    compiler: str | None,
    target: str | None,
    cache: str | None,
    chip: str | None,
    json_file: str | None,
) -> None:
    """List what a step sends, and the line that causes it.

    {STEP} Nothing runs. What the step donates, and how its results lie, `jax.jit` or `filter_jit` says.
    """
    if target is not None and how == "estimate":
        raise UsageError("--target is what is compiled for; with --how estimate leave it out")
    hardware = None if chip is None else calling("reading --chip", lambda: chips.find(chip))
    spec = None if mesh is None else calling("reading --mesh", lambda: MeshSpec.parse(mesh))
    loaded = load_step(step, None if kwargs is None else literals(kwargs, "kwargs"), spec)
    with working(f"{'estimating' if how == 'estimate' else 'compiling'} {step}") as work:
        program = None if how == "estimate" else compiled(loaded, target, cache, work.tell)
        found = _found(loaded, program, how, compiler or _habits(how, target))
    sent = found.compiled if how == "compare" else found
    timed = None if hardware is None else calling("timing", lambda: seconds(sent, hardware, loaded.mesh))
    if json_file != "-":
        show(str(found) if how == "compare" else found.text(terminal_width()))
        if timed is not None:
            show(f"\n{timed}")
    if json_file is not None:
        sums = {"extra_bytes": found.extra_bytes} if how == "compare" else _sums(found)
        timing = {} if timed is None else {"seconds": data_of(timed)}
        write(as_json({**sums, **data_of(found), **timing}), json_file)


traffic.help = (traffic.help or "").replace("{STEP}", STEP_HELP)


def _habits(how: str, target: str | None) -> str:
    return "cpu" if how == "compare" and target is None else "tpu"


def _found(step: Step, program: Any, how: str, compiler: Any) -> Any:
    if how == "estimate":
        return estimated(step, compiler)
    sent = calling("reading the program", lambda: traffic_of(program, step.mesh))
    if how == "compile":
        return sent
    return calling("comparing", lambda: compare(estimated(step, compiler), sent))


def _sums(found: Any) -> dict[str, int]:
    return {"wire_bytes": found.wire_bytes, "dcn_bytes": found.dcn_bytes, "unsure_bytes": found.unsure_bytes}
