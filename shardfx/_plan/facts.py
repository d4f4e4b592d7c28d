"""What there is to tell about a plan: one list of rows, made from its content alone, for every way to show it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AxisType

from .._ground.html import html_table
from .._ground.reason import Code
from .._ground.spec import entries_of
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    entry_text,
    joined,
    printable,
    spec_text,
)
from ..topology._mesh import MeshSpec
from .content import Content
from .leaf import LeafPlan


_SHOWN_REPLICATED = 5
_HEADER = ("path", "arrays", "shape", "spec", "bytes/device", "why")
NUMBERS = ("arrays", "bytes/device")


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """Arrays of a plan that are alike but for numbers in their paths.

    **Arguments:**

    - `path`: of the array, or of all with ranges for the numbers: `layers/{0..31}/attn/q_proj/weight`.
    - `count`: how many arrays they are.
    - `leaf`: the first of them.
    - `bytes`, `bytes_per_device`: of all of them together.
    """

    path: str
    count: int
    leaf: LeafPlan
    bytes: int
    bytes_per_device: int


class Facts(NamedTuple):
    """A plan in words: a table, each reason once, the totals, and the largest arrays that every device holds whole.

    No text holds a character that a terminal would obey.
    """

    header: tuple[str, ...]
    cells: list[tuple[str, ...]]
    reasons: list[str]
    totals: str
    replicated: str


def report_rows_of(content: Content) -> tuple[ReportRow, ...]:
    """The arrays in the tree's order, repeated layers as one row."""
    groups: dict[Any, list[str]] = {}
    for path, number in content.numbered:
        if number >= 0:
            groups.setdefault((between_numbers(path), number), []).append(path)
    rows = []
    for (_, number), paths in groups.items():
        leaf, count = content.leaf(paths[0], number), len(paths)
        rows.append(ReportRow(joined(paths), count, leaf, leaf.bytes * count, leaf.bytes_per_device * count))
    return tuple(rows)


def facts_of(content: Content) -> Facts:
    """All that a report of the plan says."""
    rows = report_rows_of(content)
    notes: dict[str, int] = {}
    cells = [tuple(map(printable, _cells(row, notes))) for row in rows]
    header = _HEADER
    if all(row.count == 1 for row in rows):
        header, cells = _without(header, 1), [_without(line, 1) for line in cells]
    reasons = [printable(f"[{number}] {text}.") for text, number in notes.items()]
    return Facts(header, cells, reasons, printable(_totals(content.mesh, rows)), printable(_replicated(rows)))


def html_of(content: Content) -> str:
    """The facts as a plain HTML table with the rest below it; everything is escaped."""
    facts = facts_of(content)
    below = [*facts.reasons, facts.totals, *([facts.replicated] if facts.replicated else [])]
    return html_table([facts.header, *facts.cells], right=NUMBERS, below=below)


def _cells(row: ReportRow, notes: dict[str, int]) -> tuple[str, ...]:
    leaf = row.leaf
    # A scalar has nothing to explain, and a table of optimizer states has many.
    told = [str(reason) for reason in leaf.reasons if reason.code is not Code.scalar]
    why = "".join(f"[{notes.setdefault(text, len(notes) + 1)}]" for text in told)
    why += (" " if why else "") + (leaf.rule or ("-" if not why else ""))
    if leaf.names is not None:
        why += f" ({', '.join(map(entry_text, leaf.names))})"
    if leaf.memory_kind is not None:
        why += f" in {leaf.memory_kind}"
    return (
        row.path,
        str(row.count),
        array_text(leaf.dtype, leaf.shape),
        spec_text(entries_of(leaf.spec)),
        bytes_text(row.bytes_per_device),
        why.strip(),
    )


def _totals(mesh: MeshSpec, rows: Sequence[ReportRow]) -> str:
    total, share = sum(row.bytes for row in rows), sum(row.bytes_per_device for row in rows)
    kinds = "" if AxisType.Explicit not in mesh.axis_types else ", " + _kinds_text(mesh.axis_types)
    even = f"{share * mesh.size / total:.2f} x an even split" if total else "nothing to hold"
    count = sum(row.count for row in rows)
    return (
        f"{count:,} array{'' if count == 1 else 's'}, {bytes_text(total)}, on mesh {mesh} "
        f"({mesh.size:,} devices{kinds}): {bytes_text(share)} per device, {even}."
    )


def _kinds_text(axis_types: Sequence[AxisType]) -> str:
    names = dict.fromkeys(kind.name for kind in axis_types)
    return "/".join(names) + " axes"


def _replicated(rows: Iterable[ReportRow]) -> str:
    whole = [row for row in rows if not entries_of(row.leaf.spec) and row.leaf.shape]
    whole.sort(key=lambda row: -row.bytes)
    total = sum(row.bytes for row in whole)
    if not total:
        return ""
    shown = [f"{row.path} ({bytes_text(row.bytes)})" for row in whole[:_SHOWN_REPLICATED]]
    more = [f"{len(whole) - len(shown)} more"] if len(whole) > len(shown) else []
    return f"Replicated, {bytes_text(total)} on every device: {', '.join([*shown, *more])}."


def _without(cells: tuple[str, ...], position: int) -> tuple[str, ...]:
    return cells[:position] + cells[position + 1 :]
