"""`shardfx fit`: whether a model, or a step of training, fits the memory of a chip."""

from typing import Any

import click

from shardfx import MeshSpec, ShardPlan, chips
from shardfx.cost import Fit, fit as fit_of

from .._asked import Asked, asks_for_a_plan, plan_of
from .._data import as_json, data_of
from .._screen import JSON, show, working, write
from .._step import compiled, load_step
from .._usage import UsageError, calling
from .._values import literals
from .._verb import verb


@verb(
    examples=(
        "shardfx fit llama3-70b --mesh fsdp=64,tensor=4 --rules fsdp_tp --optimizer optax:adamw --chip v5e",
        "shardfx fit --step my_model:train_step --mesh data=2,fsdp=2,tensor=2 --chip v5p --json",
    ),
    exits="0 if a step fits; 1 if it does not, or where no step was counted",
)
@asks_for_a_plan(model_is_needed=False)
@click.option(
    "--chip", metavar="CHIP", help="As v5e or h100, see `shardfx chips`; by default that of --target, else v5p."
)
@click.option("--step", metavar="MODULE:STEP", help="In the place of MODEL: a step; see `shardfx traffic`.")
@click.option("--compile", "compiles", is_flag=True, help="Compile the step for --target: the compiler's own numbers.")
@JSON
def fit(asked: Asked, chip: str | None, step: str | None, compiles: bool, json_file: str | None) -> int:
    """Say whether a step fits a chip, and which changes would make it fit.

    Of a step, what is live at the worst moment is counted. Of a model, what its arrays take and those of --optimizer;
    that alone says not whether a step of it fits.

    {MODEL}
    """
    hardware = calling("reading --chip", lambda: chips.find(chip or asked.target or "v5p"))
    if compiles and (step is None or asked.target is None):
        raise UsageError("--compile needs --step MODULE:STEP, and --target that says what to compile for")
    if (step is None) == (asked.model is None):
        raise UsageError("give a MODEL, as llama3-8b, or --step MODULE:STEP")
    if step is None:
        made = plan_of(asked)
        found = calling("counting", lambda: fit_of(_parts(made), chip=hardware))
    else:
        found = _of_step(asked, step, hardware, compiles)
    if json_file != "-":
        show(calling("trying changes", found.explain))
    if json_file is not None:
        write(as_json(_data(found)), json_file)
    return 0 if found.fits and found.how != "arguments" else 1


def _parts(made: ShardPlan) -> ShardPlan:
    """The plan of a model alone as one of several: what is called `model` are parameters."""
    return made if {path.partition("/")[0] for path in made} == {"model", "optimizer"} else ShardPlan.join(model=made)


def _of_step(asked: Asked, name: str, chip: chips.Chip, compiles: bool) -> Fit:
    mesh = asked.mesh
    spec = None if mesh is None else calling("reading --mesh", lambda: MeshSpec.parse(mesh))
    loaded = load_step(name, None if asked.kwargs is None else literals(asked.kwargs, "kwargs"), spec)
    with working(f"tracing {name}") as work:
        program = compiled(loaded, asked.target, tell=work.tell) if compiles else None
        given = {"compiled": program, "chip": chip, "mesh": loaded.mesh}
        return calling("counting memory", lambda: fit_of(loaded.function, *loaded.args, **given))


def _data(found: Fit) -> dict[str, Any]:
    names = ("fits", "is_close", "peak_bytes", "usable_bytes", "headroom_bytes", "how", "batch", "largest_batch")
    tables = ("rows", "largest", "changes", "notes")
    return {name: data_of(getattr(found, name)) for name in (*names, *tables)} | {"chip_name": found.chip.name}
