"""`shardfx plan`, `explain`, `lint`, `diff` and `report`: print a plan, the reasons for
one array, mistakes in rules, the difference of two plans, or an HTML page. `help` texts
explain the options; a text about MODEL replaces {MODEL}.
"""

import dataclasses
import re

import click

import shardfx as sfx
from shardfx import html_report
from shardfx._see import report_data

from .._load import order_text
from .._options import (
    MOST_DEVICES,
    PlanOptions,
    chip_of,
    choice_text,
    findings_of,
    fit_of,
    inputs_of,
    load_step,
    plan_of,
    say_choice,
    takes_plan_options,
    traffic_of,
)
from .._screen import (
    JSON,
    answer,
    as_json,
    data_of,
    require_writable,
    show,
    terminal_width,
    verb,
    working,
    write,
)
from .._usage import UsageError, calling


# A range of layers in a path of a plan's table, `layers/{0..125}/up`; group 1 is the
# first layer.
_RANGE = re.compile(r"\{(\d{1,18})[\d.,]*\}")
_SEVERITIES = click.Choice(["error", "warning", "info"])


@verb(
    examples=(
        "shardfx plan my_model:make --devices 8",
        "shardfx plan llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp",
    )
)
@takes_plan_options()
@click.option(
    "--only",
    metavar="REGEX",
    help="Show the arrays whose paths it finds, and their totals.",
)
@click.option(
    "--width",
    type=click.IntRange(1),
    help="Columns of text; the terminal's, else no limit.",
)
@JSON
def plan(
    options: PlanOptions,
    only: str | None,
    width: int | None,
    json_file: str | None,
) -> None:
    """Print how every array of a model is sharded on a mesh, and why.

    Allocates nothing and needs no device: the mesh need not exist here.

    {MODEL}
    """
    inputs = inputs_of(options)
    made_plan = plan_of(options, inputs)
    if json_file == "-":
        write(made_plan.to_json(), json_file)
        return
    shown = made_plan
    if only is not None:
        shown = calling("--only", lambda: made_plan.select(only))
    show(sfx.report(shown, width=width or terminal_width()))
    if inputs.why:
        show(f"\n{choice_text(inputs)}")
    if inputs.target is not None:
        show(f"\n{order_text(inputs.target, made_plan.mesh)}")
    if json_file is not None:
        write(made_plan.to_json(), json_file)


@verb(
    examples=(
        (
            "shardfx explain llama3-405b 'model/layers/{0..125}/mlp/up_proj/weight'"
            " --mesh tensor=3 --rules tp"
        ),
        (
            "shardfx explain my_model:make layer_0/up --mesh fsdp=3,tensor=2 --rules"
            " my_model:BOTH"
        ),
    )
)
@takes_plan_options()
@click.argument("path", metavar="PATH")
@JSON
def explain(options: PlanOptions, path: str, json_file: str | None) -> None:
    """Say why one array is sharded as it is, and what would change it.

    PATH is the array's path, as `shardfx plan` prints it, or a regex that matches only
    this path, such as k_proj. If the path stands for several layers, as in {0..31}, the
    first one is explained.

    {MODEL}
    """
    made_plan = plan_of(options)
    named = path if path in made_plan else _RANGE.sub(r"\1", path)
    explanation = calling("explaining", lambda: sfx.explain(made_plan, named))
    answer(json_file, lambda: str(explanation), lambda: explanation)


@verb(
    examples=(
        "shardfx lint llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp",
        (
            "shardfx lint my_model:make --mesh fsdp=4,tensor=3 --rules my_model:BOTH"
            " --json"
        ),
    ),
    exits="0; 1 if there are findings of the severity of --fail-on or a worse one",
)
@takes_plan_options()
@click.option(
    "--fail-on",
    type=_SEVERITIES,
    default="warning",
    show_default=True,
    help="Exit with 1 for these.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODE",
    help="Leave out findings of this code; may be repeated.",
)
@JSON
def lint(
    options: PlanOptions,
    fail_on: str,
    ignore: tuple[str, ...],
    json_file: str | None,
) -> int:
    """List the mistakes in a model's rules, with a fix for each.

    An error is a mistake for which `plan` would fail; a warning is a probable mistake.

    {MODEL}
    """
    inputs = say_choice(inputs_of(options))
    findings = calling(
        "checking", lambda: findings_of(options, inputs).without(*ignore)
    )
    answer(json_file, lambda: str(findings), lambda: list(findings))
    return 1 if findings.worst(fail_on) else 0  # pyright: ignore[reportArgumentType]


@verb(
    examples=(
        (
            "shardfx diff llama3-8b --mesh fsdp=8 --rules fsdp --to-mesh"
            " fsdp=4,tensor=2 --to-rules fsdp_tp"
        ),
        (
            "shardfx diff my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH"
            " --to-rules '.*->fsdp(fsdp)' --json"
        ),
    ),
    exits="0; 1 with --exit-code if the plans differ",
)
@takes_plan_options()
@click.argument("to", type=click.Path(), required=False, metavar="[OTHER]")
@click.option(
    "--to-mesh",
    metavar="MESH",
    help="The second plan's; the first's by default.",
)
@click.option(
    "--to-rules",
    metavar="RULES",
    help="The second plan's; the first's by default.",
)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@JSON
def diff(
    options: PlanOptions,
    to: str | None,
    to_mesh: str | None,
    to_rules: str | None,
    exit_code: bool,
    json_file: str | None,
) -> int:
    """Compare two plans: the differences, and the cost of moving.

    The second plan is the plan of OTHER, or the plan of MODEL on another mesh or by
    other rules.

    {MODEL}
    """
    if to is None and to_mesh is None and to_rules is None:
        raise UsageError(
            "there is one plan; name another, or give --to-mesh or --to-rules"
        )
    # The second mesh has as many devices as the first if --devices or --target says how
    # many.
    mesh = to_mesh or options.mesh
    rules = to_rules or options.rules
    # A stored plan has its own.
    is_stored_plan = to is not None and to.endswith(".json")
    if is_stored_plan and to_mesh is None and to_rules is None:
        mesh = rules = None
    other = dataclasses.replace(
        options,
        model=to or options.model,
        mesh=mesh,
        rules=rules,
    )
    first = plan_of(options)
    second = plan_of(other)
    with working("comparing the plans"):
        differences = calling("comparing", lambda: sfx.diff(first, second))
    answer(
        json_file,
        lambda: str(differences),
        lambda: {"wire_bytes": differences.wire_bytes, **data_of(differences)},
    )
    if exit_code and differences:
        return 1
    return 0


@verb(
    examples=(
        (
            "shardfx report llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp"
            " --chip v5p --html llama.html"
        ),
        (
            "shardfx report my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH"
            " --step my_model:train_step --json"
        ),
    )
)
@takes_plan_options()
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    help="Write one page that needs no network, to open in a browser.",
)
@click.option(
    "--chip",
    metavar="CHIP",
    help="Compare with the memory of this one, as v5p; see `shardfx chips`.",
)
@click.option(
    "--step",
    metavar="MODULE:STEP",
    help=(
        "With the traffic of this step, estimated on large meshes; and with --chip its"
        " memory, moment by moment."
    ),
)
@JSON
def report(
    options: PlanOptions,
    html_file: str | None,
    chip: str | None,
    step: str | None,
    json_file: str | None,
) -> None:
    """Write a plan as one HTML page: a map of bytes, findings, a table.

    --json has the same rows as the page.

    {MODEL}
    """
    if html_file is None and json_file is None:
        raise UsageError(
            "Missing option '--html'; say where the page goes, as in --html plan.html"
        )
    require_writable(html_file, json_file)
    hardware = None if chip is None else chip_of(chip)
    inputs = say_choice(inputs_of(options))
    made_plan = plan_of(options, inputs)
    with working("checking the plan"):
        findings = calling("checking", lambda: findings_of(options, inputs))
    loaded = None if step is None else load_step(step, None, made_plan.mesh)
    sent = needs = None
    if loaded is not None:
        how = "estimate" if loaded.mesh.size > MOST_DEVICES else "compile"
        with working(f"compiling {step}"):
            sent = traffic_of(loaded, how)
        needs = None if hardware is None else fit_of(loaded, hardware)
    about = {
        "title": options.model,
        "findings": findings,
        "chip": hardware,
        "traffic": sent,
        "fit": needs,
    }
    with working("writing the report"):
        if html_file is not None:
            page = calling("drawing the page", lambda: html_report(made_plan, **about))
            write(page, html_file)
        if json_file is not None:
            write(as_json(report_data(made_plan, **about)), json_file)
