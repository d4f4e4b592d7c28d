"""`shardfx traffic`, `why`, `fit` and `search`: a step's collectives, the sharding of
its arrays, its memory, and the choice of its mesh and rules. `help` texts explain the
options; texts about MODEL and STEP replace {MODEL} and {STEP}.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import click

from shardfx import ShardPlan, cost

from ... import AxisRules
from ..._ground.text import bytes_text, table
from ..._step import place_text
from ...auto import Candidate, search as search_of
from ...auto._asked import search_options
from ...cost import TrafficRow
from .._load import made_of
from .._options import (
    LoadedStep,
    PlanOptions,
    chip_of,
    compiled,
    emulate,
    fit_of,
    load_bare_step,
    load_step,
    plan_of,
    takes_plan_options,
    traffic_of,
)
from .._screen import (
    JSON,
    answer,
    data_of,
    require_writable,
    terminal_width,
    verb,
    working,
    write,
)
from .._usage import UsageError, calling


_STEP_HELP = """MODULE:STEP is a function that returns a step and a tuple of its arguments: trees of
    ShapeDtypeStructs with shardings, as `plan.structs`. A parameter called `mesh` gets --mesh as a MeshSpec."""
# The arguments of the verbs that take a step.
_STEP = click.argument("step", metavar="MODULE:STEP")
_MESH = click.option(
    "--mesh",
    metavar="MESH",
    help="The function's argument `mesh`, as in data=2,fsdp=4.",
)
_KWARGS = click.option(
    "--kwargs",
    metavar="NAME=VALUE,...",
    help="For the function, as in 'layers=4'.",
)


@verb(
    examples=(
        "shardfx traffic my_model:train_step --mesh data=2,fsdp=2,tensor=2",
        (
            "shardfx traffic my_model:train_step --mesh data=16,fsdp=64,tensor=8 --how"
            " estimate --json traffic.json"
        ),
    )
)
@_STEP
@_MESH
@_KWARGS
@click.option(
    "--how",
    type=click.Choice(["compile", "estimate", "compare"]),
    default="compile",
    show_default=True,
    help=(
        "Compile for emulated CPU devices; estimate, for any mesh, without compiling;"
        " or do both, and say where the compiler sends more."
    ),
)
@click.option(
    "--target",
    metavar="tpu:KIND:AxBxC",
    help="Compile for this TPU slice; needs the extra `aot`.",
)
@click.option(
    "--chip",
    metavar="CHIP",
    help="Say how long it takes over the links of this one; see `shardfx chips`.",
)
@JSON
def traffic(
    step: str,
    mesh: str | None,
    kwargs: str | None,
    how: str,
    target: str | None,
    chip: str | None,
    json_file: str | None,
) -> None:
    """List the collectives of a step, and the lines that cause them.

    {STEP} Nothing runs. The donated arguments and the shardings of the results are
    those that the step's `jax.jit` or `filter_jit` sets.
    """
    if target is not None and how == "estimate":
        raise UsageError(
            "--target is what is compiled for; with --how estimate leave it out"
        )
    hardware = None if chip is None else chip_of(chip)
    loaded = load_step(step, kwargs, mesh)
    verb_text = "estimating" if how == "estimate" else "compiling"
    with working(f"{verb_text} {step}"):
        step_traffic = traffic_of(loaded, how, target)
    if how == "compare":
        sent = step_traffic.compiled
        text = str(step_traffic)
        totals = ("extra_bytes",)
    else:
        sent = step_traffic
        text = step_traffic.text(terminal_width())
        totals = ("wire_bytes", "dcn_bytes")
    data = {name: getattr(step_traffic, name) for name in totals} | data_of(
        step_traffic
    )
    if hardware is not None:
        timed = calling("timing", lambda: cost.seconds(sent, hardware, loaded.mesh))
        text = f"{text}\n\n{timed}"
        data = {**data, "seconds": data_of(timed)}
    answer(json_file, lambda: text, lambda: data)


@verb(
    examples=(
        "shardfx why my_model:train_step --mesh data=2,fsdp=2,tensor=2",
        "shardfx why my_model:train_step my_model.py:24 --mesh data=2,fsdp=2,tensor=2",
    )
)
@_STEP
@click.argument("line", required=False, metavar="[LINE]")
@_MESH
@_KWARGS
@JSON
def why(
    step: str,
    line: str | None,
    mesh: str | None,
    kwargs: str | None,
    json_file: str | None,
) -> None:
    """Show how a step's arrays are sharded, and why.

    With LINE, such as train.py:41, print the arrays that this line makes, the
    collectives that the line causes, and why. {STEP}
    """
    loaded = load_step(step, kwargs, mesh)
    with working(f"asking about {step}"):
        if line is None:
            shardings = calling(
                "asking", lambda: cost.shardings(loaded.function, *loaded.args)
            )
        else:
            shardings = calling("asking", lambda: _shardings_of_line(loaded, line))
    answer(
        json_file,
        lambda: str(shardings),
        lambda: {
            "arrays": json.loads(shardings.to_json()),
            "notes": shardings.notes,
        },
    )


@verb(
    examples=(
        (
            "shardfx fit llama3-70b --mesh fsdp=64,tensor=4 --rules fsdp_tp --optimizer"
            " optax:adamw --chip v5e"
        ),
        (
            "shardfx fit --step my_model:train_step --mesh data=2,fsdp=2,tensor=2"
            " --chip v5p --json"
        ),
    ),
    exits="0 if a step fits; 1 if it does not, or where no step was counted",
)
@takes_plan_options(model_is_needed=False)
@click.option(
    "--chip",
    metavar="CHIP",
    help="As v5e or h100, see `shardfx chips`; by default that of --target, else v5p.",
)
@click.option(
    "--step",
    metavar="MODULE:STEP",
    help="In the place of MODEL: a step; see `shardfx traffic`.",
)
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Compile the step for --target: the compiler's own numbers.",
)
@JSON
def fit(
    options: PlanOptions,
    chip: str | None,
    step: str | None,
    compiles: bool,
    json_file: str | None,
) -> int:
    """Say whether a step fits a chip, and which changes would make it fit.

    For a step, it counts the bytes that are live when the step uses most memory. For a
    model, it counts the bytes of its arrays and of the state of --optimizer; these
    alone do not say whether a step fits.

    {MODEL}
    """
    hardware = chip_of(chip or options.target or "v5p")
    if compiles and (step is None or options.target is None):
        raise UsageError(
            "--compile needs --step MODULE:STEP, and --target that says what to"
            " compile for"
        )
    if (step is None) == (options.model is None):
        raise UsageError("give a MODEL, as llama3-8b, or --step MODULE:STEP")
    if step is None:
        made_plan = plan_of(options)
        # `cost.fit` makes a row for each first path component.
        roots = {path.partition("/")[0] for path in made_plan}
        is_joined = roots == {"model", "optimizer"}
        parts = made_plan if is_joined else ShardPlan.join(model=made_plan)
        step_fit = calling("counting", lambda: cost.fit(parts, chip=hardware))
    else:
        loaded = load_step(step, options.kwargs, options.mesh)
        program = None  # `fit` estimates
        if compiles:
            program = compiled(loaded, options.target)
        step_fit = fit_of(loaded, hardware, program)
    answer(
        json_file,
        lambda: calling("trying changes", step_fit.explain),
        lambda: _fit_data(step_fit),
    )
    if step_fit.fits and step_fit.basis != "arguments":
        return 0
    return 1


def _fit_data(step_fit: cost.Fit) -> dict[str, Any]:
    """Returns a fit as dicts and lists, for JSON."""
    names = (
        "fits",
        "is_close",
        "peak_bytes",
        "usable_bytes",
        "headroom_bytes",
        "basis",
        "batch",
    )
    tables = ("rows", "largest", "changes", "notes")
    data = {name: data_of(getattr(step_fit, name)) for name in (*names, *tables)}
    return {**data, "chip_name": step_fit.chip.name}


for _command in (traffic, why):
    _command.help = (_command.help or "").replace("{STEP}", _STEP_HELP)


def _shardings_of_line(loaded: LoadedStep, line: str) -> cost.StepShardings:
    """The shardings of the arrays that one source line of a step computes. The notes
    have the reason for each collective of this line.
    """
    shardings = cost.shardings(loaded.function, *loaded.args)
    traffic_of_step = cost.estimate(loaded.function, *loaded.args)
    notes = []
    # A row of the traffic is one collective; its note then ends with the reason.
    for row in shardings.annotate(traffic_of_step).rows:
        if row.source is not None and row.source.place == line:
            sent_text = f"{bytes_text(row.wire_bytes)} by {row.kind}"
            phase = row.phase or "no gradient"
            notes.append(
                f"{sent_text} over {', '.join(row.axes)} ({phase}), {row.note}"
            )
    return dataclasses.replace(shardings.at(line), notes=tuple(notes))


_FIELDS = tuple(
    "assignments by seconds compute_seconds exposed_seconds hidden_seconds wire_bytes"
    " memory_bytes limit_bytes fits constrained donated results state_over"
    " states reasons notes".split()
)


@verb(
    examples=(
        "shardfx search my_model:plain_step --target tpu:v5e:2x4",
        (
            "shardfx search my_model:plain_step --devices 16 --chip h100 --keep 2"
            " --write chosen.py --json"
        ),
        (
            "shardfx search my_model:plain_step --target cpu:4 --kwargs width=64"
            " --verify --closely 1"
        ),
    ),
    exits="0; 1 if nothing fits in memory",
)
@_STEP
@click.option(
    "--target",
    metavar="tpu:KIND:AxBxC|cpu:N",
    help="A slice, as tpu:v5p:4x4x4 (two: tpu:v5p:4x4x4*2), or emulated CPU devices.",
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    help="How many devices of --chip, where they are no slice.",
)
@click.option(
    "--chip",
    metavar="CHIP",
    help="What N devices are, as h100; see `shardfx chips`.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How many candidates to show.",
)
@click.option(
    "--rules",
    "rules",
    metavar="MODULE:NAME",
    multiple=True,
    help="AxisRules to compile too, for --verify.",
)
@click.option(
    "--verify",
    is_flag=False,
    flag_value="compile",
    type=click.Choice(["compile", "run"]),
    help=(
        "Compile the best and the usual ways by hand, order them by their programs, and"
        " drop what does not fit: with the TPU's compiler where libtpu is installed,"
        " else for emulated CPU devices. Or run them on the devices here."
    ),
)
@click.option(
    "--closely",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="How many of the best to compile; the usual ways are compiled too.",
)
@_KWARGS
@click.option(
    "--write",
    "code_file",
    metavar="FILE",
    help="Write the best mesh and rules as Python.",
)
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
    """Choose a mesh and rules for a step by their estimated cost.

    MODULE:STEP is a function that returns a step and a tuple of its arguments, trees of
    ShapeDtypeStructs. The search names their dimensions by their use in the step. XLA's
    partitioner makes the program of one device for the best candidates and for the
    usual strategies. Only --verify compiles these programs.
    """
    if (target is None) == (devices is None):
        raise UsageError(
            "say what the devices are: --target tpu:v5e:4x4, or --devices 16 --chip"
            " h100"
        )
    if devices is not None and chip is None:
        raise UsageError(
            f"--devices {devices} does not say which chip; add one, as --chip h100"
        )
    hardware = {"devices": target or devices, "chip": chip}
    require_writable(code_file, json_file)
    function, args = load_bare_step(step, kwargs)
    what = "AxisRules, whose names are those of `name_axes`"
    rules_to_compile = [made_of(name, AxisRules, what) for name in rules]
    if verify is not None:
        device_count = calling(
            "reading --target",
            lambda: search_options(hardware["devices"], hardware["chip"]).total,
        )
        emulate(device_count)
    with working(f"searching for {step}") as tell:
        checking = {"verify": verify, "closely": closely}
        options = {
            "keep": keep,
            "also": rules_to_compile,
            "progress": tell,
            **hardware,
            **checking,
        }
        candidates = calling("searching", lambda: search_of(function, *args, **options))
    text = "\n\n".join([_table(candidates), *map(str, candidates)])
    answer(
        json_file,
        lambda: text,
        lambda: [_candidate_data(candidate) for candidate in candidates],
    )
    if code_file is not None:
        write(candidates[0].code().removesuffix("\n"), code_file)
    if candidates[0].fits:
        return 0
    return 1


def _table(candidates: Sequence[Candidate]) -> str:
    """Returns the candidates of a search as the text of a table, with one line for each
    candidate: its number, mesh and rules, and its costs. The column "by" says whether an
    estimate, a compiler or a run gave the costs.
    """
    rows = [("", "candidate", "by", "ms a step", "sent", "a device")]
    for number, candidate in enumerate(candidates, start=1):
        sent = bytes_text(candidate.wire_bytes)
        rows.append(
            (
                f"[{number}]",
                candidate.title,
                candidate.by,
                f"{candidate.seconds * 1e3:.3g}",
                sent,
                bytes_text(candidate.memory_bytes),
            )
        )
    return "\n".join(table(rows, right={"ms a step", "sent", "a device"}))


def _candidate_data(candidate: Candidate) -> dict[str, object]:
    """Returns a candidate of a search as dicts and lists, for JSON: its mesh and rules,
    the specs that its plans give to the arguments, its costs, and its collectives.
    """
    fields = {name: getattr(candidate, name) for name in _FIELDS}
    plans = []
    for plan in candidate.plans:
        plans.append({leaf.path: leaf.spec for leaf in plan.leaves})
    sent = [_traffic_row_data(row) for row in candidate.traffic.rows]
    return {
        "mesh": str(candidate.mesh),
        "rules": candidate.rules.rules,
        "plans": plans,
        **fields,
        "traffic": sent,
    }


def _traffic_row_data(row: TrafficRow) -> dict[str, object]:
    """Returns a collective of a step as a dict. Of its source lines, the dict has only
    the innermost one.
    """
    names = (
        "kind",
        "axes",
        "leaf",
        "callback",
        "wire_bytes",
        "dcn_bytes",
        "calls",
        "note",
    )
    data = {name: getattr(row, name) for name in names}
    return {**data, "at": place_text(row.source)}
