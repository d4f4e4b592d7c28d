"""`shardfx clean`: what saves that were killed left behind."""

import dataclasses

import click

from shardfx import checkpoint

from ..._ground.text import bytes_text, table
from .._data import as_json
from .._screen import JSON, show, write
from .._usage import calling
from .._verb import verb


@verb(examples=("shardfx clean .", "shardfx clean . --remove"))
@click.argument("directory", metavar="DIRECTORY")
@click.option("--remove", is_flag=True, help="Remove what is found.")
@click.option(
    "--older-than",
    "older_than_seconds",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Only what nothing was written to for so long.",
)
@JSON
def clean(directory: str, remove: bool, older_than_seconds: float, json_file: str | None) -> None:
    """List or remove what saves that were killed left in DIRECTORY.

    A save writes to .NAME.partial-... and renames it at the end. One that was killed leaves this behind.
    """
    found = calling(
        f"looking at {directory!r}",
        lambda: checkpoint.left_over(directory, older_than_seconds=older_than_seconds, remove=remove),
    )
    if json_file != "-":
        cells = [(one.path, bytes_text(one.nbytes), f"{one.age_seconds / 3600:.1f} h") for one in found]
        what = "removed" if remove else "left over"
        show(
            "\n".join(table([(what, "bytes", "age"), *cells], right={"bytes", "age"}))
            if found
            else "nothing is left over"
        )
    if json_file is not None:
        write(as_json([dataclasses.asdict(one) for one in found]), json_file)
