"""`shardfx chips`: the accelerators that are known."""

import click

from shardfx import chips as known

from .._data import as_json
from .._screen import JSON, show, terminal_width, write
from .._usage import calling
from .._verb import verb


@verb(examples=("shardfx chips", "shardfx chips v5p --json"))
@click.argument("names", nargs=-1, metavar="[NAME]...")
@JSON
def chips(names: tuple[str, ...], json_file: str | None) -> None:
    """List accelerators: memory, arithmetic, links.

    NAME is one as people write it, v5p or "NVIDIA H200". --json has the source of every number.
    """
    found = calling("reading NAME", lambda: tuple(known.find(name) for name in names)) or known.CHIPS
    if json_file != "-":
        show(known.table(found, width=terminal_width()))
    if json_file is not None:
        write(as_json(list(found)), json_file)
