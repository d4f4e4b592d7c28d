"""A plan as a table for a terminal. One list of rows, made from the plan alone; one way to print it."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ._plan import LeafPlan, ShardPlan
from ._reason import Code
from ._spec import entries_of


# A number that stands alone: the 12 of `layers/12/w` and of `h.12.attn`, but not that of `fc12`.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")
_SHOWN_REPLICATED = 5
_SHOWN_RUNS = 3
_KINDS = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


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
    groups: dict[Any, list[str]] = {}
    content = plan.content
    for number, path in zip(content.index, content.paths, strict=True):
        if number >= 0:
            groups.setdefault((_NUMBER.sub("0", path), number), []).append(path)
    rows = []
    for (_, number), paths in groups.items():
        leaf, count = dataclasses.replace(content.rows[number], path=paths[0]), len(paths)
        rows.append(ReportRow(_joined(paths), count, leaf, leaf.bytes * count, leaf.bytes_per_device * count))
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
    lines = _table([header, *cells], right={"arrays", "bytes/device"}, width=width)
    reasons = [_wrapped(f"[{number}] {text}.", width) for text, number in notes.items()]
    parts = ["\n".join(lines), "\n".join(reasons), _wrapped(_totals(plan, rows), width)]
    parts.append(_wrapped(_replicated(rows), width))
    return "\n\n".join(part for part in parts if part)


def bytes_text(count: int) -> str:
    """`count` bytes for a person: `512 B`, `32.0 KiB`, `1.5 TiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 6)
    return f"{count / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


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
        _shape_text(leaf),
        _spec_text(entries_of(leaf.spec)),
        bytes_text(row.bytes_per_device),
        why.strip(),
    )


def _shape_text(leaf: LeafPlan) -> str:
    name = str(leaf.dtype) if not jnp.issubdtype(leaf.dtype, np.number) else jnp.dtype(leaf.dtype).name
    letters = re.match("[a-z]*", name)
    kind = letters.group() if letters else ""
    return f"{_KINDS.get(kind, kind)}{name[len(kind) :]}[{','.join(map(str, leaf.shape))}]"


def _spec_text(partitions: Sequence[Any]) -> str:
    """As `PathRules.parse` reads it, with commas: axes on one dimension are joined by "+"."""
    return ",".join(_entry_text(entry) for entry in partitions) or "-"


def _entry_text(entry: Any) -> str:
    if isinstance(entry, tuple):
        return "+".join(map(_entry_text, entry)) or "-"
    if isinstance(entry, str):
        return entry
    return "-" if entry is None else "any"


def _joined(paths: Sequence[str]) -> str:
    """One text for paths that differ in their numbers only."""
    if len(paths) == 1:
        return paths[0]
    columns = zip(*[map(int, _NUMBER.findall(path)) for path in paths], strict=True)
    texts = iter([_ranges(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), paths[0])


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    stops = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or n + 1 != numbers[i + 1]]
    runs = [str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, stops, strict=True)]
    if len(runs) > _SHOWN_RUNS:
        runs = [*runs[: _SHOWN_RUNS - 1], "..", runs[-1]]
    return "{" + ",".join(runs) + "}"


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


def _table(rows: Sequence[tuple[str, ...]], *, right: set[str], width: int | None) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths = _fitted(widths, width)
    aligned = [str.rjust if name in right else str.ljust for name in rows[0]]
    return [
        "  ".join(
            align(_cut(cell, size, keep_end=column == 0), size)
            for column, (align, cell, size) in enumerate(zip(aligned, row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _fitted(widths: list[int], width: int) -> list[int]:
    """Column widths that fit if they can: the last column (why) and the first (path) give way in turn."""
    widths = list(widths)
    for column, least in ((-1, 16), (0, 32), (-1, 12), (0, 16)):
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[column] -= max(0, min(excess, widths[column] - least))
    return widths


def _cut(text: str, size: int, *, keep_end: bool) -> str:
    """`text` in at most `size` characters; what tells paths apart is mostly their end."""
    if len(text) <= size:
        return text
    tail = (size - 2) * 4 // 5 if keep_end else 0
    return f"{text[: size - 2 - tail]}..{text[len(text) - tail :]}"
