"""The content of a plan's report as plain data, for the HTML page and for `--json`."""

import dataclasses
import itertools as it
import linecache
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .._ground.reason import Code, Reason
from .._ground.spec import UNCONSTRAINED, entries_of, entry_axes, pinned, shard_shape
from .._ground.text import array_text, entry_text, plural, spec_text
from .._plan import Group, Row, ShardPlan, check_plan
from ..chips import Chip, find
from ..cost import ArrayRow, Fit, Offender, Traffic, TrafficRow
from ..topology import MeshSpec
from .finding import Finding


FORMAT = 1


def report_data(
    plan: ShardPlan,
    *,
    title: str | None = None,
    findings: Iterable[Finding] = (),
    traffic: Traffic | None = None,
    fit: Fit | None = None,
    chip: str | Chip | None = None,
) -> dict[str, Any]:
    """The content of a report as dicts, lists, strings and numbers that `json.dumps` takes.

    It takes the arguments of [`shardfx.html_report`][]. The rows of `rows` are groups of arrays; `memory` has the bytes
    per device of each part of the tree, or of each group of `fit`. Names are unchanged: escape them where you show
    them.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx._see import report_data

        tree = {"layers": [{"w": jnp.ones((8, 6))}] * 4}
        rules = PathRules.parse("w->data.tensor")
        made = plan(tree, MeshSpec({"data": 2, "tensor": 4}), paths=rules)
        (row,) = report_data(made)["rows"]
        assert (row["path"], row["arrays"]) == ("layers/{0..3}/w", 4)
        assert row["spec"] == [["data"], []] and row["reasons"][0]["code"] == "indivisible"
        ```
    """
    check_plan("plan", plan)
    rows = plan.content.groups
    known = fit.chip if chip is None and fit is not None else chip
    found, hardware, totals = tuple(findings), None if known is None else _chip(find(known)), _totals(plan, rows)
    return {
        "format": FORMAT,
        "title": title,
        "digest": plan.digest,
        "verdict": _verdict(totals, found, fit, hardware),
        "mesh": _mesh(plan.mesh),
        "totals": totals,
        "rows": [_row(row, plan.mesh) for row in rows],
        "memory": _memory(rows) if fit is None else _memory_of_step(fit),
        "fit": None if fit is None else _fit(fit),
        "step": None if fit is None else step_data(fit),
        "chip": hardware,
        "findings": [dataclasses.asdict(finding) for finding in found],
        "traffic": None if traffic is None else _traffic(traffic),
    }


def _mesh(mesh: MeshSpec) -> dict[str, object]:
    columns = zip(mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, mesh.axis_types, strict=True)
    axes = [
        {"name": name, "size": int(size), "slices": int(slices), "type": kind.name}
        for name, size, slices, kind in columns
    ]
    return {"text": str(mesh), "devices": int(mesh.size), "slices": math.prod(mesh.dcn_sizes), "axes": axes}


def _totals(plan: ShardPlan, rows: Sequence[Group]) -> dict[str, object]:
    whole = [row for row in rows if row.bytes_per_device == row.bytes] if plan.mesh.size > 1 else []
    return {
        "arrays": sum(len(row.paths) for row in rows),
        "bytes": plan.bytes_total,
        "bytes_per_device": plan.bytes_per_device,
        "even_bytes_per_device": -(-plan.bytes_total // plan.mesh.size),
        "replicated_bytes": sum(row.bytes for row in whole),
        "corrected_arrays": sum(len(row.paths) for row in rows if _is_less(row.row)),
    }


# A plan is shown as doubtful, or as bad, from this many times the bytes of an even split.
_DOUBTFUL, _BAD = 1.5, 4.0


def _verdict(
    totals: dict[str, Any], findings: Sequence[Finding], fit: Fit | None, chip: dict[str, Any] | None
) -> dict[str, str]:
    """The plan in one line, and a verdict: "good", "warn" or "bad"."""
    less, even = totals["corrected_arrays"], totals["even_bytes_per_device"]
    ratio = totals["bytes_per_device"] / even if even else 1.0
    errors, warnings = (sum(one.severity == severity for one in findings) for severity in ("error", "warning"))
    held = totals["bytes_per_device"] if fit is None else fit.peak_bytes
    is_full = chip is not None and held > chip["usable_hbm_bytes_per_device"]
    told = [
        f"{plural(less, 'array')} got less than asked" if less else "every array got what its rule asked for",
        f"{ratio:.3g} times an even split",
        plural(errors, "error") if errors else "",
        plural(warnings, "warning") if warnings else "",
        f"it does not fit {chip['name']}" if is_full and chip is not None else "",
    ]
    level = "warn" if less or warnings or ratio >= _DOUBTFUL else "good"
    return {"level": "bad" if errors or is_full or ratio >= _BAD else level, "text": ", ".join(filter(None, told))}


def _row(row: Group, mesh: MeshSpec) -> dict[str, object]:
    leaf = row.row
    return {
        "path": row.where,
        "arrays": len(row.paths),
        "array": array_text(leaf.dtype, leaf.shape),
        "shape": list(leaf.shape),
        "shard_shape": list(shard_shape(leaf.shape, pinned(leaf.spec), mesh.shape)),
        "names": None if leaf.names is None else [entry_text(name) for name in leaf.names],
        "requested": _axes(leaf, leaf.requested),
        "spec": _axes(leaf, leaf.spec),
        "lost": [dim for dim, axes in enumerate(_lost(leaf)) if axes],
        "less": _is_less(leaf),
        "strategies": [step.text for step in leaf.strategies],
        "rule": leaf.rule,
        "reasons": [_reason(reason) for reason in leaf.reasons],
        "memory_kind": leaf.memory_kind,
        "bytes": row.bytes,
        "bytes_per_device": row.bytes_per_device,
    }


def _lost(leaf: Row) -> list[list[str]]:
    """For each dimension, the mesh axes that a rule asked for and that do not shard it."""
    asked, given = _axes(leaf, leaf.requested), _axes(leaf, leaf.spec)
    pairs = zip(asked[: len(given)], given, strict=True)
    return [[axis for axis in wanted or [] if axis not in (got or [])] for wanted, got in pairs]


# The reason why a strategy, which asks for no particular dimension, could not shard what it should.
_CUT_SHORT = (Code.indivisible, Code.unit, Code.duplicate)


def _is_less(leaf: Row) -> bool:
    return any(_lost(leaf)) or any(reason.code in _CUT_SHORT for reason in leaf.reasons)


def _axes(leaf: Row, spec: Any) -> list[list[str] | None]:
    """For each dimension, the mesh axes that shard it; `None` if the compiler may choose."""
    entries = [None if entry is UNCONSTRAINED else list(entry_axes(entry)) for entry in entries_of(spec)]
    return [*entries, *[[] for _ in range(len(leaf.shape) - len(entries))]]


def _reason(reason: Reason) -> dict[str, object]:
    return {"code": reason.code.name, "dim": reason.dim, "axes": list(reason.axes), "message": reason.message}


def _memory(rows: Sequence[Group]) -> list[dict[str, object]]:
    """Bytes per device of each part of the tree, by the first name of the path; host memory separately."""
    sums: dict[tuple[str, str | None], int] = {}
    for row in rows:
        key = (row.where.partition("/")[0], row.row.memory_kind)
        sums[key] = sums.get(key, 0) + row.bytes_per_device
    return [
        {"group": group, "memory_kind": kind, "bytes_per_device": count}
        for (group, kind), count in sorted(sums.items(), key=lambda item: -item[1])
    ]


def _memory_of_step(fit: Fit) -> list[dict[str, object]]:
    """Bytes per device of a step by group, those beyond its arguments included."""
    here = [(row.group, None, row.bytes) for row in fit.rows if row.bytes]
    away = [(row.group, "pinned_host", row.host_bytes) for row in fit.rows if row.host_bytes]
    return [{"group": group, "memory_kind": kind, "bytes_per_device": count} for group, kind, count in [*here, *away]]


def _fit(fit: Fit) -> dict[str, object]:
    changes = [dataclasses.asdict(change) for change in fit.changes]
    told = {"how": fit.how, "peak_bytes": fit.peak_bytes, "fits": fit.fits, "changes": changes}
    told |= {"batch": fit.batch, "largest_batch": fit.largest_batch, "notes": list(fit.notes)}
    return {**told, "timeline": _timeline(fit.timeline)}


# The number of points that fit on a page.
_MOST_POINTS = 300


def _timeline(timeline: Sequence[int]) -> dict[str, object]:
    """Bytes in memory over the operations of a step, as the maximum of each of equally long intervals."""
    count = min(len(timeline), _MOST_POINTS)
    ends = [len(timeline) * at // count for at in range(count + 1)] if count else [0]
    return {"operations": len(timeline), "bytes": [max(timeline[a:b]) for a, b in it.pairwise(ends)]}


def _chip(chip: Chip) -> dict[str, object]:
    usable = chip.usable_hbm_bytes_per_device
    return {"name": chip.name, "hbm_bytes": chip.hbm_bytes, "usable_hbm_bytes_per_device": usable}


_SUMS = ("devices", "wire_bytes", "dcn_bytes", "unsure_bytes")
_SENT = ("kind", "windowed", "wire_bytes", "dcn_bytes", "calls", "dtype", "group_size", "leaf", "note")


def _traffic(traffic: Traffic) -> dict[str, object]:
    rows = [_traffic_row(row) for row in traffic.rows]
    return {**{name: getattr(traffic, name) for name in _SUMS}, "rows": rows}


def _traffic_row(row: TrafficRow) -> dict[str, object]:
    source = row.source
    place = (None, None) if source is None else (f"{source.file}:{source.line}", source.function)
    told = {name: getattr(row, name) for name in _SENT}
    return {**told, "axes": list(row.axes), "source": place[0], "function": place[1]}


# The lines around one that makes arrays, and the shardings that are shown for a line.
_AROUND, _LAYOUTS = 2, 2


def step_data(fit: Fit) -> dict[str, object] | None:
    """The arrays of the worst moment, and the source lines with the arrays that each makes; `None` without a step."""
    known = fit.shardings
    return known and {"moment": [_held(one) for one in fit.moment if one.bytes], "source": _source(known.rows)}


def _held(one: Offender) -> dict[str, object]:
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


def _source(rows: Sequence[ArrayRow]) -> list[dict[str, object]]:
    """By file, the lines that make arrays and the lines around them, with the largest arrays of each."""
    made: dict[str, dict[int, dict[str, None]]] = {}
    for row in rows:
        if row.source is not None:
            told = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
            made.setdefault(row.source.file, {}).setdefault(row.source.line, {})[told] = None
    return [{"file": file, "lines": _lines(file, lines)} for file, lines in made.items() if linecache.getlines(file)]


def _lines(file: str, made: dict[int, dict[str, None]]) -> list[dict[str, object]]:
    text = linecache.getlines(file)
    near = {at + by for at in made for by in range(-_AROUND, _AROUND + 1)}
    return [
        {"number": at, "text": text[at - 1].rstrip("\n"), "makes": list(made.get(at, {}))[:_LAYOUTS]}
        for at in sorted(near)
        if 0 < at <= len(text)
    ]
