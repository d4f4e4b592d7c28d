"""A plan as a table for a terminal. One list of rows, made from the plan alone; one way to print it."""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import AxisType

from .._reason import Code
from .._spec import entries_of
from .._text import array_text, between_numbers, bytes_text, joined, table
from .leaf import LeafPlan
from .shard_plan import ShardPlan, check_plan


_SHOWN_REPLICATED = 5


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


def report_rows(plan: ShardPlan) -> tuple[ReportRow, ...]:
    """The plan's arrays in the tree's order, repeated layers as one row.

    **Arguments:**

    - `plan`: the plan.

    **Returns:**

    One [`shardfx.ReportRow`][] for each group of arrays whose paths differ in numbers only, and that agree in
    everything else: shape, dtype, spec, rule, reasons.
    """
    check_plan("plan", plan)
    groups: dict[Any, list[str]] = {}
    content = plan.content
    for number, path in zip(content.index, content.paths, strict=True):
        if number >= 0:
            groups.setdefault((between_numbers(path), number), []).append(path)
    rows = []
    for (_, number), paths in groups.items():
        leaf, count = dataclasses.replace(content.rows[number], path=paths[0]), len(paths)
        rows.append(ReportRow(joined(paths), count, leaf, leaf.bytes * count, leaf.bytes_per_device * count))
    return tuple(rows)


def report(plan: ShardPlan, *, width: int | None = None) -> str:
    """The plan as a table: for each array its shape, its spec, its bytes per device, and why.

    **Arguments:**

    - `plan`: the plan.
    - `width`: how many columns of text there are; longer paths and rules are then cut. `None` cuts nothing.

    **Returns:**

    The text: a row per array or group of alike arrays, then each reason once, the totals, and the largest
    arrays that every device holds whole.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, report

        layer = {"wi": jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), "bias": jnp.ones(4099)}
        rules = PathRules.parse("wi->fsdp.tensor, bias->tensor")
        print(report(plan({"layers": [layer] * 24}, MeshSpec({"fsdp": 4, "tensor": 2}), paths=rules)))
        ```

        ```text
        path                  arrays  shape            spec         bytes/device  why
        layers/{0..23}/bias       24  f32[4099]        -               384.3 KiB  [1] paths[1] bias
        layers/{0..23}/wi         24  bf16[1024,4096]  fsdp,tensor      24.0 MiB  paths[0] wi
        ...
        ```
    """
    rows = report_rows(plan)
    notes: dict[str, int] = {}
    cells = [_cells(row, notes) for row in rows]
    header = ("path", "arrays", "shape", "spec", "bytes/device", "why")
    if all(row.count == 1 for row in rows):
        header, cells = _without(header, 1), [_without(line, 1) for line in cells]
    lines = table([header, *cells], right={"arrays", "bytes/device"}, width=width)
    reasons = [_wrapped(f"[{number}] {text}.", width) for text, number in notes.items()]
    parts = ["\n".join(lines), "\n".join(reasons), _wrapped(_totals(plan, rows), width)]
    parts.append(_wrapped(_replicated(rows), width))
    return "\n\n".join(part for part in parts if part)


def _cells(row: ReportRow, notes: dict[str, int]) -> tuple[str, ...]:
    leaf = row.leaf
    # A scalar has nothing to explain, and a table of optimizer states has many.
    told = [str(reason) for reason in leaf.reasons if reason.code is not Code.scalar]
    why = "".join(f"[{notes.setdefault(text, len(notes) + 1)}]" for text in told)
    why += (" " if why else "") + (leaf.rule or ("-" if not why else ""))
    if leaf.names is not None:
        why += f" ({', '.join(map(_entry_text, leaf.names))})"
    if leaf.memory_kind is not None:
        why += f" in {leaf.memory_kind}"
    return (
        row.path,
        str(row.count),
        array_text(leaf.dtype, leaf.shape),
        _spec_text(entries_of(leaf.spec)),
        bytes_text(row.bytes_per_device),
        why.strip(),
    )


def _spec_text(partitions: Sequence[Any]) -> str:
    """As `PathRules.parse` reads it, with commas: axes on one dimension are joined by "+"."""
    return ",".join(_entry_text(entry) for entry in partitions) or "-"


def _entry_text(entry: Any) -> str:
    if isinstance(entry, tuple):
        return "+".join(map(_entry_text, entry)) or "-"
    if isinstance(entry, str):
        return entry
    return "-" if entry is None else "any"


def _totals(plan: ShardPlan, rows: Sequence[ReportRow]) -> str:
    mesh, total, share = plan.mesh, plan.bytes_total, plan.bytes_per_device
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


def _wrapped(text: str, width: int | None) -> str:
    return text if width is None else textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)


def _without(cells: tuple[str, ...], position: int) -> tuple[str, ...]:
    return cells[:position] + cells[position + 1 :]
