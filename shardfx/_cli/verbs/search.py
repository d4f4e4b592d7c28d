"""`shardfx search`: the mesh and the rules for a step, chosen by what they are estimated to cost."""

import click

from shardfx import Candidate, search as search_of

from .._data import as_json
from .._screen import JSON, show, working, write
from .._step import load_bare_step
from .._types import Whole
from .._usage import UsageError, calling
from .._values import literals, whole_number
from .._verb import verb


@verb(
    examples=(
        "shardfx search my_model:plain_step --devices tpu:v5e:2x4",
        "shardfx search my_model:plain_step --devices 16 --chip h100 --keep 2 --write chosen.py --json",
    ),
    exits="0; 1 if nothing fits in memory",
)
@click.argument("step", metavar="MODULE:STEP")
@click.option("--devices", required=True, metavar="N|tpu:KIND:AxBxC", help="How many, or a slice, as tpu:v5p:4x4x4.")
@click.option("--chip", metavar="CHIP", help="What N devices are, as h100; see `shardfx chips`.")
@click.option("--slices", type=Whole(positive=True), default=1, show_default=True, help="Joined by the hosts' network.")
@click.option("--keep", type=Whole(positive=True), default=5, show_default=True, help="How many candidates to show.")
@click.option("--kwargs", metavar="NAME=VALUE,...", help="For the function, as in 'layers=4'.")
@click.option("--write", "code_file", metavar="FILE", help="Write the best mesh and rules as Python.")
@JSON
def search(
    step: str,
    devices: str,
    chip: str | None,
    slices: int,
    keep: int,
    kwargs: str | None,
    code_file: str | None,
    json_file: str | None,
) -> int:
    """Choose mesh and rules for a step, by what they would cost.

    MODULE:STEP is a function that returns a step and a tuple of its arguments, trees of ShapeDtypeStructs. Its
    dimensions are named by what the step does with them; nothing is compiled.
    """
    number = whole_number(devices)
    if number is not None and chip is None:
        raise UsageError(f"--devices {devices} does not say which chip; add one, as --chip h100")
    function, args = load_bare_step(step, None if kwargs is None else literals(kwargs, "kwargs"))
    with working(f"searching for {step}"):
        hardware = {"devices": devices if number is None else number, "chip": chip, "slices": slices}
        found = calling("searching", lambda: search_of(function, *args, keep=keep, **hardware))
    if json_file != "-":
        show("\n\n".join(map(str, found)))
    if code_file is not None:
        write(found[0].code(), code_file)
    if json_file is not None:
        write(as_json([_data(one) for one in found]), json_file)
    return 0 if found[0].fits else 1


def _data(found: Candidate) -> dict[str, object]:
    names = ("roles", "seconds", "compute_seconds", "exposed_seconds", "hidden_seconds", "axis_seconds", "memory_bytes")
    numbers = {name: getattr(found, name) for name in (*names, "limit_bytes", "fits", "traffic", "reasons")}
    return {"mesh": str(found.mesh), "rules": found.rules.rules, **numbers}
