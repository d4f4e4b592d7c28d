"""The facts of a plan as one list of rows, from which every display of the plan is made."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import AxisType

from .._ground.reason import Code, Reason
from .._ground.spec import entries_of
from .._ground.text import array_text, bytes_text, entry_text, html_table, printable, spec_text
from ..topology import MeshSpec
from .content import Content
from .leaf import LeafPlan


_SHOWN_REPLICATED = 5
_HEADER = ("path", "arrays", "shape", "spec", "bytes/device", "why")
NUMBERS = ("arrays", "bytes/device")


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """A row of a report: arrays of a plan that differ only in numbers in their paths.

    **Arguments:**

    - `path`: the path of the array, or of all arrays with ranges for the numbers: `layers/{0..31}/attn/q_proj/weight`.
    - `count`: the number of arrays.
    - `leaf`: the LeafPlan of the first array.
    - `bytes`, `bytes_per_device`: the bytes of all these arrays together, in total and on each device.
    """

    path: str
    count: int
    leaf: LeafPlan
    bytes: int
    bytes_per_device: int


class Facts(NamedTuple):
    """A plan in words: a table, each reason once, the totals, and the largest arrays that every device holds whole.

    No text contains control characters, which a terminal would interpret.
    """

    header: tuple[str, ...]
    cells: list[tuple[str, ...]]
    reasons: list[str]
    totals: str
    replicated: str


def report_rows_of(content: Content) -> tuple[ReportRow, ...]:
    """Returns a row for each array in the tree's order, with the arrays of repeated layers as one row."""
    rows = []
    for group in content.groups:
        leaf, count = content.leaf(group.paths[0], group.number), len(group.paths)
        rows.append(ReportRow(group.where, count, leaf, leaf.bytes * count, leaf.bytes_per_device * count))
    return tuple(rows)


def facts_of(content: Content) -> Facts:
    """Returns the content of a plan's report as a value."""
    rows = _paired(report_rows_of(content))
    notes: dict[str, int] = {}
    dims = _dims(rows)
    cells = [tuple(map(printable, _cells(row, notes, dims))) for row in rows]
    header = _HEADER
    if all(row.count == 1 for row in rows):
        header, cells = _without(header, 1), [_without(line, 1) for line in cells]
    reasons = [printable(f"[{number}] {text}.") for text, number in notes.items()]
    return Facts(header, cells, reasons, printable(_totals(content.mesh, rows)), printable(_replicated(rows)))


# The names of the two moments of an optimizer.
_MOMENTS = (("mu", "nu"), ("m", "v"), ("exp_avg", "exp_avg_sq"))


def _paired(rows: Sequence[ReportRow]) -> tuple[ReportRow, ...]:
    """Returns the rows, with the rows of an optimizer's two moments merged where these are planned alike:
    `0/{mu,nu}/w`.
    """
    found: dict[object, ReportRow] = {}
    for row in rows:
        parts = row.path.split("/")
        pair = next(((at, pair) for at, one in enumerate(parts) for pair in _MOMENTS if one in pair), None)
        path = row.path
        if pair is not None:
            path = "/".join([*parts[: pair[0]], f"{{{','.join(pair[1])}}}", *parts[pair[0] + 1 :]])
        key = (path, row.count, dataclasses.replace(row.leaf, path=""))
        other = found.get(key)
        if other is None:
            found[key] = row
        else:
            sizes = (other.bytes + row.bytes, other.bytes_per_device + row.bytes_per_device)
            found[key] = ReportRow(path, other.count + row.count, row.leaf, *sizes)
    return tuple(found.values())


def html_of(content: Content) -> str:
    """Returns the report as a plain HTML table with reasons and totals below it; all text is escaped."""
    facts = facts_of(content)
    below = [*facts.reasons, facts.totals, *([facts.replicated] if facts.replicated else [])]
    return html_table([facts.header, *facts.cells], right=NUMBERS, below=below)


def _dims(rows: Iterable[ReportRow]) -> dict[str, set[int | None]]:
    """Returns a dict from the message of each reason to the dimensions of arrays that have this reason."""
    found: dict[str, set[int | None]] = {}
    for why in (why for row in rows for why in row.leaf.reasons):
        found.setdefault(why.message, set()).add(why.dim)
    return found


def _cells(row: ReportRow, notes: dict[str, int], dims: Mapping[str, set[int | None]]) -> tuple[str, ...]:
    leaf = row.leaf
    # The reason "scalar" explains nothing, and a table of optimizer states would show it often.
    reasons = [why for why in leaf.reasons if why.code is not Code.scalar]
    told = dict.fromkeys(_note(why, len(dims[why.message]) > 1) for why in reasons)
    why = "".join(f"[{notes.setdefault(text, len(notes) + 1)}]" for text in told)
    why += (" " if why else "") + (leaf.rule or ("-" if not why else ""))
    if leaf.names is not None:
        why += f" ({', '.join(map(entry_text, leaf.names))})"
    if leaf.memory_kind is not None:
        why += f" in {leaf.memory_kind}"
    array, spec, size = array_text(leaf.dtype, leaf.shape), entries_of(leaf.spec), bytes_text(row.bytes_per_device)
    return row.path, str(row.count), array, spec_text(spec), size, why.strip()


_LIMIT = re.compile(r"fewer than the (\d+) asked for")


def _note(why: Reason, of_several_dims: bool) -> str:
    """Returns a reason as a footnote of the table, with the same text for all arrays that have the same cause."""
    limit = _LIMIT.search(why.message) if why.code is Code.small else None
    if limit is not None:
        return f"arrays of fewer than {limit[1]} bytes stay whole; lower `min_bytes` to shard them"
    return why.message if of_several_dims or why.code is Code.absent else str(why)


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
