"""`shardfx chips` and `shardfx models`: the accelerators and the published models that
a command line may name.
"""

import functools as ft
from collections.abc import Mapping
from typing import Any

import click

from shardfx import chips as accelerators, presets

from ..._ground.text import table
from .._screen import JSON, answer, terminal_width, verb
from .._usage import UsageError, calling


_NUMBERS = (
    "layers",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "hidden",
    "experts",
    "vocab",
)
# The columns that are left out on a narrow terminal, in this order.
_SPARE = ("--rules", "head_dim", "vocab", "kv_heads", "heads")


@verb(examples=("shardfx chips", "shardfx chips v5p --json"))
@click.argument("names", nargs=-1, metavar="[NAME]...")
@JSON
def chips(names: tuple[str, ...], json_file: str | None) -> None:
    """List accelerators: memory, arithmetic, links.

    NAME is a common name of an accelerator, such as v5p or "NVIDIA H200". --json has
    the source of every number.
    """
    shown = (
        calling(
            "reading NAME", lambda: tuple(accelerators.find(name) for name in names)
        )
        or accelerators.CHIPS
    )
    answer(
        json_file,
        lambda: accelerators.table(shown, width=terminal_width()),
        lambda: list(shown),
    )


@verb(examples=("shardfx models", "shardfx models qwen3 --json"))
@click.argument("text", default="", metavar="[TEXT]")
@JSON
def models(text: str, json_file: str | None) -> None:
    """List the published models.

    With TEXT, list only the models whose names contain it. --kwargs of other verbs may
    change the numbers of a model, as in --kwargs layers=2.
    """
    published = presets.models
    rows = {}
    cells: list[tuple[str, ...]] = [("model", *_NUMBERS, "--rules")]
    for name in published.names():
        if text.lower() in name:
            strategies = list(published.strategies(name))
            rows[name] = {**published.config(name), "strategies": strategies}
            cells.append((name, *_cells(rows[name])))
    if not rows:
        raise UsageError(f"no published model has {text!r} in its name")
    lines = ft.partial(
        table,
        cells,
        right=set(_NUMBERS),
        width=terminal_width(),
        spare=_SPARE,
    )
    answer(json_file, lambda: "\n".join(lines()), lambda: rows)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of the row of a published model, from its config and strategies."""
    # If every feed-forward block has experts, the column `hidden` shows their size.
    numbers = {**row, "hidden": row.get("hidden", row.get("expert_hidden", ""))}
    texts = [str(numbers.get(name, "")) for name in _NUMBERS]
    return (*texts, " ".join(row["strategies"]))
