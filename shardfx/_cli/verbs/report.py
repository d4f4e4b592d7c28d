"""`shardfx report`: everything about a plan on one HTML page."""

import click

from shardfx import chips, html_report
from shardfx._see import report_data
from shardfx.cost import Fit, Traffic, fit as fit_of, traffic as traffic_of

from .._asked import PlanOptions, asks_for_a_plan, findings_of, inputs_or_plan, plan_of
from .._screen import JSON, as_json, verb, working, write
from .._step import MOST_DEVICES, LoadedStep, chip_of, compiled, estimated, load_step
from .._usage import UsageError, calling


@verb(
    examples=(
        "shardfx report llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp --chip v5p --html llama.html",
        "shardfx report my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH --step my_model:train_step --json",
    )
)
@asks_for_a_plan()
@click.option("--html", "html_file", metavar="FILE", help="Write one page that needs no network, to open in a browser.")
@click.option("--title", metavar="TEXT", help="Of the page; MODEL by default.")
@click.option("--chip", metavar="CHIP", help="Compare with the memory of this one, as v5p; see `shardfx chips`.")
@click.option(
    "--step",
    metavar="MODULE:STEP",
    help="With the traffic of this step, estimated on large meshes; and with --chip its memory, moment by moment.",
)
@JSON
def report(
    asked: PlanOptions,
    html_file: str | None,
    title: str | None,
    chip: str | None,
    step: str | None,
    json_file: str | None,
) -> None:
    """Write a plan as one HTML page: a map of bytes, findings, a table.

    --json has the same rows as the page.

    {MODEL}
    """
    if html_file is None and json_file is None:
        raise UsageError("Missing option '--html'; say where the page goes, as in --html plan.html")
    hardware, inputs = None if chip is None else chip_of(chip), inputs_or_plan(asked)
    made = plan_of(asked, inputs)
    with working("checking the plan"):
        found = calling("checking", lambda: findings_of(asked, inputs))
    loaded = None if step is None else load_step(step, None, made.mesh)
    sent = None if loaded is None else _traffic(str(step), loaded)
    needs = None if loaded is None or hardware is None else _fit(loaded, hardware)
    about = {"title": title or asked.model, "findings": found, "chip": hardware, "traffic": sent, "fit": needs}
    with working("writing the report"):
        if html_file is not None:
            write(calling("drawing the page", lambda: html_report(made, **about)), html_file)
        if json_file is not None:
            write(as_json(report_data(made, **about)), json_file)


def _fit(loaded: LoadedStep, chip: chips.Chip) -> Fit:
    with working("counting memory"):
        return calling(
            "estimating its memory", lambda: fit_of(loaded.function, *loaded.args, chip=chip, mesh=loaded.mesh)
        )


def _traffic(step: str, loaded: LoadedStep) -> Traffic:
    if loaded.mesh.size > MOST_DEVICES:
        return estimated(loaded)
    with working(f"compiling {step}"):
        program = compiled(loaded)
        return calling("reading the program", lambda: traffic_of(program, loaded.mesh))
