"""`shardfx search`: the mesh and the rules for a step, chosen by what they are estimated to cost."""

from collections.abc import Sequence
from typing import Any

import click

from shardfx import AxisRules
from shardfx.auto import Candidate, search as search_of
from shardfx.cost import TrafficRow

from ..._ground.text import bytes_text, table
from ..._step import place_text
from ...auto._asked import device_count
from .._load import attribute
from .._screen import JSON, answer, require_writable, verb, working, write
from .._step import emulate, load_bare_step
from .._usage import UsageError, calling
from .._words import Whole


_FIELDS = tuple(
    "assignments by seconds compute_seconds exposed_seconds hidden_seconds wire_bytes memory_bytes unsure_bytes "
    "limit_bytes fits constrained donated results state_over states reasons notes".split()
)


@verb(
    examples=(
        "shardfx search my_model:plain_step --target tpu:v5e:2x4",
        "shardfx search my_model:plain_step --devices 16 --chip h100 --keep 2 --write chosen.py --json",
        "shardfx search my_model:plain_step --target cpu:4 --kwargs width=64,rows=64 --verify --closely 1",
    ),
    exits="0; 1 if nothing fits in memory",
)
@click.argument("step", metavar="MODULE:STEP")
@click.option(
    "--target",
    metavar="tpu:KIND:AxBxC|cpu:N",
    help="A slice, as tpu:v5p:4x4x4 (two: tpu:v5p:4x4x4*2), or emulated CPU devices.",
)
@click.option("--devices", type=Whole(positive=True), help="How many devices of --chip, where they are no slice.")
@click.option("--chip", metavar="CHIP", help="What N devices are, as h100; see `shardfx chips`.")
@click.option("--keep", type=Whole(positive=True), default=5, show_default=True, help="How many candidates to show.")
@click.option("--rules", "rules", metavar="MODULE:NAME", multiple=True, help="AxisRules to compile too, for --verify.")
@click.option(
    "--verify",
    is_flag=False,
    flag_value="compile",
    type=click.Choice(["compile", "run"]),
    help="Compile the best and the usual ways by hand, order them by their programs, and drop what does not fit: with "
    "the TPU's compiler where libtpu is installed, else for emulated CPU devices. Or run them on the devices here.",
)
@click.option(
    "--closely", type=Whole(positive=True), default=12, show_default=True, help="How many to compile, at most."
)
@click.option("--kwargs", metavar="NAME=VALUE,...", help="For the function, as in 'layers=4'.")
@click.option("--write", "code_file", metavar="FILE", help="Write the best mesh and rules as Python.")
@JSON
def search(
    step: str,
    target: str | None,
    devices: int | None,
    chip: str | None,
    keep: int,
    rules: tuple[str, ...],
    verify: str | None,
    closely: int,
    kwargs: str | None,
    code_file: str | None,
    json_file: str | None,
) -> int:
    """Choose mesh and rules for a step, by what they would cost.

    MODULE:STEP is a function that returns a step and a tuple of its arguments, trees of ShapeDtypeStructs. Its
    dimensions are named by what the step does with them. XLA's partitioner makes the program of one device for the best
    candidates and the usual ways by hand; without --verify nothing is compiled further.
    """
    hardware = _hardware(target, devices, chip)
    require_writable(code_file, json_file)
    function, args = load_bare_step(step, kwargs)
    also = [_axis_rules(name) for name in rules]
    if verify is not None:
        emulate(calling("reading --target", lambda: device_count(hardware["devices"], hardware["chip"])))
    with working(f"searching for {step}") as work:
        more = {"verify": verify, "closely": closely}
        given = {"keep": keep, "also": also, "progress": work.tell, **hardware, **more}
        found = calling("searching", lambda: search_of(function, *args, **given))
    text = "\n\n".join([_table(found), *map(str, found)])
    answer(json_file, lambda: text, lambda: [_data(one) for one in found])
    if code_file is not None:
        write(found[0].code().removesuffix("\n"), code_file)
    return 0 if found[0].fits else 1


def _hardware(target: str | None, devices: int | None, chip: str | None) -> dict[str, Any]:
    """The devices, as `shardfx.auto.search` takes them."""
    if (target is None) == (devices is None):
        raise UsageError("say what the devices are: --target tpu:v5e:4x4, or --devices 16 --chip h100")
    if devices is not None and chip is None:
        raise UsageError(f"--devices {devices} does not say which chip; add one, as --chip h100")
    return {"devices": target or devices, "chip": chip}


def _axis_rules(name: str) -> AxisRules:
    found = attribute(name)
    if not isinstance(found, AxisRules):
        raise UsageError(f"`{name}` is {found!r:.60}; name AxisRules, whose names are those that `name_axes` finds")
    return found


def _table(found: Sequence[Candidate]) -> str:
    """A line for each candidate."""
    rows = [("", "candidate", "by", "ms a step", "sent", "a device")]
    for number, one in enumerate(found, start=1):
        sent = bytes_text(one.wire_bytes) + (f" ± {bytes_text(one.unsure_bytes)}" if one.unsure_bytes else "")
        rows.append((f"[{number}]", one.title, one.by, f"{one.seconds * 1e3:.3g}", sent, bytes_text(one.memory_bytes)))
    return "\n".join(table(rows, right={"ms a step", "sent", "a device"}))


def _data(found: Candidate) -> dict[str, object]:
    fields = {name: getattr(found, name) for name in _FIELDS}
    plans = [{leaf.path: leaf.spec for leaf in plan.leaves} for plan in found.plans]
    sent = [_row(row) for row in found.traffic.rows]
    return {"mesh": str(found.mesh), "rules": found.rules.rules, "plans": plans, **fields, "traffic": sent}


def _row(row: TrafficRow) -> dict[str, object]:
    """A row without the lines around its own."""
    names = ("kind", "axes", "leaf", "wire_bytes", "dcn_bytes", "unsure_bytes", "calls", "note")
    return {**{name: getattr(row, name) for name in names}, "at": place_text(row.source)}
