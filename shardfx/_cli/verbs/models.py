"""`shardfx models`: the published models that a command line may name."""

from collections.abc import Mapping
from typing import Any

import click

from shardfx import presets

from ..._ground.text import table
from .._data import as_json
from .._screen import JSON, show, terminal_width, write
from .._usage import UsageError
from .._verb import verb


_NUMBERS = ("layers", "embed", "heads", "kv_heads", "head_dim", "hidden", "experts", "vocab")
# What a narrow terminal does without, in this order.
_SPARE = ("--rules", "head_dim", "vocab", "kv_heads", "heads")


@verb(examples=("shardfx models", "shardfx models qwen3 --json"))
@click.argument("text", default="", metavar="[TEXT]")
@JSON
def models(text: str, json_file: str | None) -> None:
    """List the published models.

    With TEXT, those that have it in their names.
    The numbers are those that --kwargs may change, as in --kwargs layers=2.
    """
    known = presets.models
    named = {name: known.config(name) for name in known.names() if text.lower() in name}
    if not named:
        raise UsageError(f"no published model has {text!r} in its name")
    rows = {name: {**config, "strategies": list(known.strategies(name))} for name, config in named.items()}
    if json_file != "-":
        cells = [(name, *_cells(row)) for name, row in rows.items()]
        header = ("model", *_NUMBERS, "--rules")
        show("\n".join(table([header, *cells], right=set(_NUMBERS), width=terminal_width(), spare=_SPARE)))
    if json_file is not None:
        write(as_json(rows), json_file)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    # Where every feed-forward block is an expert, its size is theirs.
    numbers = {**row, "hidden": row.get("hidden", row.get("expert_hidden", ""))}
    return (*(str(numbers.get(name, "")) for name in _NUMBERS), " ".join(row["strategies"]))
