"""`shardfx report`: everything about a plan on one HTML page."""

import click

from shardfx import html_report, report_data

from .._asked import Asked, asks_for_a_plan, plan_of
from .._data import as_json
from .._screen import JSON, working, write
from .._usage import UsageError, calling
from .._verb import verb


@verb(
    examples=(
        "shardfx report llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp --html llama.html",
        "shardfx report my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH --optimizer optax:adam --json",
    )
)
@asks_for_a_plan
@click.option("--html", "html_file", metavar="FILE", help="Write one page that needs no network, to open in a browser.")
@click.option("--title", metavar="TEXT", help="Of the page; MODEL by default.")
@JSON
def report(asked: Asked, html_file: str | None, title: str | None, json_file: str | None) -> None:
    """Write a plan as one HTML page: a map of bytes, the mesh, a table to search.

    --json has the same rows as the page.

    {MODEL}
    """
    if html_file is None and json_file is None:
        raise UsageError("Missing option '--html'; say where the page goes, as in --html plan.html")
    made = plan_of(asked)
    name = title or asked.model
    with working("writing the report"):
        if html_file is not None:
            page = calling("drawing the page", lambda: html_report(made, title=name))
            write(page, html_file)
        if json_file is not None:
            write(as_json(report_data(made, title=name)), json_file)
