"""What a report shows of a step: its arrays at the worst moment, and the lines of the program that make them."""

import linecache
from collections.abc import Sequence
from typing import Any

from .._ground.spec import entries_of, entry_axes
from .._ground.text import array_text, spec_text
from ..cost import ArrayRow, Fit, Offender


# Lines around one that makes arrays, and layouts that are told of a line.
_AROUND, _LAYOUTS = 2, 2


def step_data(fit: Fit) -> dict[str, Any] | None:
    """The arrays of the worst moment, and the source with what each line makes; `None` where there is no step."""
    known = fit.shardings
    return known and {"moment": [_held(one) for one in fit.moment if one.bytes], "source": _source(known.rows)}


def _held(one: Offender) -> dict[str, Any]:
    line = one.source and linecache.getline(one.source.file, one.source.line).strip()
    axes = [list(entry_axes(entry)) for entry in entries_of(one.spec)] if one.spec is not None else []
    by = [f"{own.axis}: {own.by or '?'}" for own in one.origins]
    chain = [frame.place for own in one.origins for frame in own.chain]
    return {
        "array": one.what,
        "bytes_per_device": one.bytes,
        "group": one.group,
        "phase": one.phase,
        "spec": axes,
        "from": by,
        "over": list(dict.fromkeys(chain)),
        "place": one.source and one.source.place,
        "function": one.source and one.source.function,
        "line": line,
        "why": one.why,
    }


def _source(rows: Sequence[ArrayRow]) -> list[dict[str, Any]]:
    """By file the lines that make arrays and those around them, with their largest layouts."""
    made: dict[str, dict[int, dict[str, None]]] = {}
    for row in rows:
        if row.source is not None:
            told = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
            made.setdefault(row.source.file, {}).setdefault(row.source.line, {})[told] = None
    return [{"file": file, "lines": _lines(file, lines)} for file, lines in made.items() if linecache.getlines(file)]


def _lines(file: str, made: dict[int, dict[str, None]]) -> list[dict[str, Any]]:
    text = linecache.getlines(file)
    near = {at + by for at in made for by in range(-_AROUND, _AROUND + 1)}
    return [
        {"number": at, "text": text[at - 1].rstrip("\n"), "makes": list(made.get(at, {}))[:_LAYOUTS]}
        for at in sorted(near)
        if 0 < at <= len(text)
    ]
