"""One candidate in full: what each axis sends, at which line, and what all of it comes to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .core import Found
from .layouts import Layout, Layouts
from .name_axes import source_line
from .together import Together


@dataclasses.dataclass(frozen=True, slots=True)
class SentRow:
    """What one mesh axis sends for one kind of array at one line, per device and step.

    `array` is its dtype and shape before it is cut, `calls` how many collectives a step has of it, and `hidden` whether
    computation can go on beside it.
    """

    axis: str
    kind: str
    array: str
    wire_bytes: float
    calls: float
    hidden: bool
    source: str


def sent_rows(
    layouts: Layouts, made: Sequence[Layout], found: Found, axes: Sequence[str], data: Sequence[bool]
) -> tuple[SentRow, ...]:
    """The rows of a candidate, the most bytes first."""
    rows: dict[Any, list[float]] = {}
    chosen = [made[role] for role in found.roles]
    together = Together(layouts, chosen)
    for at, layout in enumerate(chosen):
        size = found.sizes[at]
        for event in layout.events:
            value = layouts.program.values[event.value]
            local = value.bytes
            for divides, span in zip(together.divides(at, event), found.sizes, strict=True):
                local /= span if divides else 1
            amount = local * (1 - 1 / size) * event.times * together.factor(event)
            source = source_line(layouts.program.operations[event.operation].source)
            array = f"{_short_dtype(value.dtype)}[{','.join(map(str, value.shape))}]"
            row = rows.setdefault((axes[at], event.kind, array, not data[event.value], source), [0.0, 0.0])
            row[0] += amount
            row[1] += event.times
    made_rows = [
        SentRow(axis, kind, array, row[0], row[1], hidden, source)
        for (axis, kind, array, hidden, source), row in rows.items()
    ]
    return tuple(sorted(made_rows, key=lambda row: -row.wire_bytes))


def _short_dtype(dtype: Any) -> str:
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return name.replace(long, short)
    return name
