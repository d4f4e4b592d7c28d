"""The content of a report of a plan as plain data."""

import collections
import dataclasses
import linecache
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .._ground.errors import LeafTypeError, check_type
from .._ground.reason import Reason
from .._ground.spec import (
    UNCONSTRAINED,
    entries_of,
    entry_axes,
    shard_shape,
    without_unconstrained,
)
from .._ground.text import (
    array_text,
    entry_text,
    plural,
    spec_text,
)
from .._plan import Group, Row, ShardPlan, check_plan
from ..chips import Chip, find
from ..cost import ArrayRow, Fit, LargeArray, Traffic
from ..topology import MeshSpec
from .finding import Finding


FORMAT = 1

_OF_CHIP = ("name", "hbm_bytes", "usable_hbm_bytes_per_device")


def report_data(
    plan: ShardPlan,
    *,
    title: str | None = None,
    findings: Iterable[Finding] = (),
    traffic: Traffic | None = None,
    fit: Fit | None = None,
    chip: str | Chip | None = None,
) -> dict[str, Any]:
    """The content of a report as plain data that `json.dumps` takes: dicts, lists,
    strings and numbers.

    It takes the arguments of [`shardfx.html_report`][]: a `title`, `findings` of
    `lint`, the `traffic` and the memory `fit` of a step, and the `chip` whose memory
    the plan is compared with. In the result, `rows` has one entry for each array, or
    for equal arrays of repeated layers. `memory` has the bytes per device of each part
    of the tree, or of each group of arrays in `fit`. Texts are not escaped for HTML.

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
    check_type(
        what="findings",
        value=findings,
        expected=Iterable,
        error=LeafTypeError,
        fix="pass `lint(plan)`",
    )
    listed = tuple(findings)
    _check_arguments(title, listed, traffic, fit)
    rows = plan.content.groups
    if chip is None and fit is not None:
        chip = fit.chip
    hardware = None
    if chip is not None:
        hardware = {name: getattr(find(chip), name) for name in _OF_CHIP}
    totals = _totals(plan, rows)
    fit_data = None
    step = None
    if fit is not None:
        fit_data = _fit(fit)
        step = step_data(fit)
    return {
        "format": FORMAT,
        "title": title,
        "digest": plan.digest,
        "verdict": _verdict(totals, listed, fit, hardware),
        "mesh": _mesh(plan.mesh),
        "totals": totals,
        "rows": _rows(rows, plan.mesh),
        "memory": _memory(rows, fit),
        "fit": fit_data,
        "step": step,
        "chip": hardware,
        "findings": [dataclasses.asdict(finding) for finding in listed],
        "traffic": _traffic(traffic),
    }


def _check_arguments(
    title: object,
    findings: Iterable[object],
    traffic: object,
    fit: object,
) -> None:
    """Raises `LeafTypeError` if one of these arguments of `html_report` has another type
    than it must have.
    """
    if title is not None:
        check_type(
            what="title",
            value=title,
            expected=str,
            error=LeafTypeError,
            fix="write a text",
        )
    for finding in findings:
        check_type(
            what="findings",
            value=finding,
            expected=Finding,
            error=LeafTypeError,
            fix="pass `lint(plan)`",
        )
    if traffic is not None:
        fix = "pass what `shardfx.cost.traffic` returns"
        check_type(
            what="traffic",
            value=traffic,
            expected=Traffic,
            error=LeafTypeError,
            fix=fix,
        )
    if fit is not None:
        fix = "pass what `shardfx.cost.fit` returns"
        check_type(what="fit", value=fit, expected=Fit, error=LeafTypeError, fix=fix)


def _mesh(mesh: MeshSpec) -> dict[str, object]:
    """A mesh as data."""
    columns = zip(
        mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, mesh.axis_types, strict=True
    )
    axes = [
        {"name": name, "size": int(size), "slices": int(slices), "type": kind.name}
        for name, size, slices, kind in columns
    ]
    return {
        "text": str(mesh),
        "devices": int(mesh.size),
        "slices": math.prod(mesh.dcn_sizes),
        "axes": axes,
    }


def _totals(plan: ShardPlan, rows: Sequence[Group]) -> dict[str, object]:
    """The sums over all arrays of a plan; `rows` has its arrays in groups."""
    device_count = plan.mesh.size
    replicated_bytes = 0
    arrays = 0
    corrected_arrays = 0
    row_by_number = {group.number: group.row for group in rows}
    is_undersharded = {
        number: _is_undersharded(row) for number, row in row_by_number.items()
    }
    for row in rows:
        arrays += len(row.paths)
        if is_undersharded[row.number]:
            corrected_arrays += len(row.paths)
        if device_count > 1 and row.bytes_per_device == row.bytes:
            replicated_bytes += row.bytes
    return {
        "arrays": arrays,
        "bytes": plan.bytes_total,
        "bytes_per_device": plan.bytes_per_device,
        "even_bytes_per_device": -(-plan.bytes_total // device_count),
        "replicated_bytes": replicated_bytes,
        "corrected_arrays": corrected_arrays,
    }


# A plan is shown as doubtful, or as bad, from this many times the bytes of an even
# split.
_DOUBTFUL = 1.5

_BAD = 4.0


def _verdict(
    totals: dict[str, Any],
    findings: Sequence[Finding],
    fit: Fit | None,
    chip: dict[str, Any] | None,
) -> dict[str, str]:
    """The quality of a plan: its `level`, "good", "warn" or "bad", and a `text` of one
    line.

    `totals` has the sums over all arrays of the plan, such as `bytes_per_device`.
    `findings` are those of `lint`, and `fit` is the memory of a step. `chip` has the
    name and the memory of the accelerator; `None` if it is not known.
    """
    corrected_arrays = totals["corrected_arrays"]
    even_bytes = totals["even_bytes_per_device"]
    ratio = totals["bytes_per_device"] / even_bytes if even_bytes else 1.0
    severities = collections.Counter(finding.severity for finding in findings)
    errors = severities["error"]
    warnings = severities["warning"]
    peak_bytes = totals["bytes_per_device"] if fit is None else fit.peak_bytes

    parts = ["every array got what its rule asked for"]
    if corrected_arrays:
        parts = [f"{plural(corrected_arrays, 'array')} got less than asked"]
    parts.append(f"{ratio:.3g} times an even split")
    if errors:
        parts.append(plural(errors, "error"))
    if warnings:
        parts.append(plural(warnings, "warning"))
    is_full = chip is not None and peak_bytes > chip["usable_hbm_bytes_per_device"]
    if chip is not None and is_full:
        parts.append(f"it does not fit {chip['name']}")

    level = "good"
    if corrected_arrays or warnings or ratio >= _DOUBTFUL:
        level = "warn"
    if errors or is_full or ratio >= _BAD:
        level = "bad"
    return {"level": level, "text": ", ".join(parts)}


def _rows(groups: Sequence[Group], mesh: MeshSpec) -> list[dict[str, object]]:
    """Each group of arrays that are planned alike, as data."""
    # Thousands of arrays have the plans of a few.
    plan_by_number: dict[int, dict[str, object]] = {}
    rows: list[dict[str, object]] = []
    for group in groups:
        if group.number not in plan_by_number:
            plan_by_number[group.number] = _plan_of(group.row, mesh)
        row = {
            "path": group.where,
            "arrays": len(group.paths),
            **plan_by_number[group.number],
            "bytes": group.bytes,
            "bytes_per_device": group.bytes_per_device,
        }
        rows.append(row)
    return rows


def _plan_of(row: Row, mesh: MeshSpec) -> dict[str, object]:
    """The plan of an array, as data. "lost" has the dimensions that are sharded less
    than requested.
    """
    names = None
    if row.names is not None:
        names = [*map(entry_text, row.names)]
    shard = shard_shape(row.shape, without_unconstrained(row.spec), mesh.shape)
    return {
        "array": array_text(row.dtype, row.shape),
        "shape": list(row.shape),
        "shard_shape": list(shard),
        "names": names,
        "requested": _axes(row, row.requested),
        "spec": _axes(row, row.spec),
        "lost": [dim for dim, axes in enumerate(_unmet_axes(row)) if axes],
        "less": _is_undersharded(row),
        "strategies": [step.text for step in row.strategies],
        "rule": row.rule,
        "reasons": [*map(_reason, row.reasons)],
        "memory_kind": row.memory_kind,
    }


def _reason(why: Reason) -> dict[str, object]:
    return {**vars(why), "code": why.code.name, "axes": list(why.axes)}


def _unmet_axes(leaf: Row) -> list[list[str]]:
    """For each dimension of the array, the mesh axes that its rule requests and that do
    not shard it.
    """
    # A request may have more entries than the array has dimensions.
    columns = zip(_axes(leaf, leaf.requested), _axes(leaf, leaf.spec), strict=False)
    unmet_axes = []
    for requested_axes, axes in columns:
        unmet_axes.append(
            [axis for axis in requested_axes or [] if axis not in (axes or [])]
        )
    return unmet_axes


def _is_undersharded(leaf: Row) -> bool:
    """Whether an array is sharded less than its rule requests."""
    return any(_unmet_axes(leaf)) or any(reason.code.is_cut for reason in leaf.reasons)


def _axes(leaf: Row, spec: Any) -> list[list[str] | None]:
    """For each dimension of the array, the mesh axes that shard it under `spec`; `None`
    if it is UNCONSTRAINED.
    """
    axes: list[list[str] | None] = []
    for entry in entries_of(spec):
        entry_names = None if entry is UNCONSTRAINED else list(entry_axes(entry))
        axes.append(entry_names)
    for _ in range(len(leaf.shape) - len(axes)):
        axes.append([])
    return axes


def _memory(rows: Sequence[Group], fit: Fit | None) -> list[dict[str, object]]:
    """The bytes per device of each part of the tree, or with `fit` of each group of
    arrays of the step.

    `rows` has the arrays of the tree; a `Group` is equal arrays of repeated layers. A
    part of the tree is all arrays whose paths have the same first segment, such as
    `params`. Bytes in host memory are separate entries.
    """
    sums = collections.Counter[tuple[str, str | None]]()
    amounts: list[tuple[tuple[str, str | None], int]]
    if fit is None:
        for row in rows:
            root = row.where.partition("/")[0]
            sums[root, row.row.memory_kind] += row.bytes_per_device
        amounts = sums.most_common()
    else:
        amounts = [((row.group, None), row.bytes) for row in fit.rows if row.bytes]
        for row in fit.rows:
            if row.host_bytes:
                amounts.append(((row.group, "pinned_host"), row.host_bytes))
    return [
        {"group": group, "memory_kind": kind, "bytes_per_device": count}
        for (group, kind), count in amounts
    ]


def _fit(fit: Fit) -> dict[str, object]:
    return {
        "basis": fit.basis,
        "peak_bytes": fit.peak_bytes,
        "fits": fit.fits,
        "changes": [*map(dataclasses.asdict, fit.changes)],
        "batch": fit.batch,
        "notes": list(fit.notes),
    }


_SUMS = ("devices", "wire_bytes", "dcn_bytes")

_SENT = (
    "kind",
    "windowed",
    "wire_bytes",
    "dcn_bytes",
    "calls",
    "dtype",
    "group_size",
    "leaf",
    "note",
)


def _traffic(traffic: Traffic | None) -> dict[str, object] | None:
    """The traffic of a step as data; `None` without it."""
    if traffic is None:
        return None
    rows = []
    for row in traffic.rows:
        data: dict[str, object] = {name: getattr(row, name) for name in _SENT}
        data["axes"] = list(row.axes)
        data["source"] = row.source and f"{row.source.file}:{row.source.line}"
        data["function"] = row.source and row.source.function
        rows.append(data)
    sums = {name: getattr(traffic, name) for name in _SUMS}
    return {**sums, "rows": rows}


# The number of lines shown before and after a line that makes arrays, and of shardings
# shown for this line.
_AROUND = 2

_LAYOUTS = 2


def step_data(fit: Fit) -> dict[str, object] | None:
    """A dict of `moment`, the arrays that a step has in memory when it uses most
    memory, and `source`, the source lines that make arrays. It is `None` if `fit` does
    not know the shardings of a step.
    """
    shardings = fit.shardings
    if not shardings:
        return None
    moment = [_peak_array(array) for array in fit.peak_arrays if array.bytes]
    return {"moment": moment, "source": _source(shardings.rows)}


def _peak_array(array: LargeArray) -> dict[str, object]:
    """An array in memory at the step's peak, for the report; `over` has the source places
    that its axes came through.
    """
    # The line that makes the array; `None` if it is not known.
    source = array.source
    line = source and linecache.getline(source.file, source.line).strip()
    entries = () if array.spec is None else entries_of(array.spec)
    chain: dict[str, None] = {}
    for origin in array.origins:
        chain |= dict.fromkeys(frame.place for frame in origin.chain)
    return {
        "array": array.what,
        "bytes_per_device": array.bytes,
        "group": array.group,
        "phase": array.phase,
        "spec": [list(entry_axes(entry)) for entry in entries],
        "from": [f"{origin.axis}: {origin.by or '?'}" for origin in array.origins],
        "over": list(chain),
        "place": source and source.place,
        "function": source and source.function,
        "line": line,
        "why": array.why,
    }


def _source(rows: Sequence[ArrayRow]) -> list[dict[str, object]]:
    """A dict for each source file: its name, and the lines that make some of the arrays
    `rows` or are next to such a line. Each line has its number, its text, and the
    arrays that it makes.
    """
    # By file and number of a line, the texts of the arrays that it makes. The dicts
    # with `None` keep texts in order, each once.
    texts_by_file: dict[str, dict[int, dict[str, None]]] = {}
    for row in rows:
        if row.source is not None:
            array = array_text(row.dtype, row.shape)
            text = f"{array} {spec_text(entries_of(row.spec))}"
            texts_by_line = texts_by_file.setdefault(row.source.file, {})
            texts_by_line.setdefault(row.source.line, {})[text] = None
    sources: list[dict[str, object]] = []
    for file, texts_by_line in texts_by_file.items():
        if linecache.getlines(file):
            sources.append({"file": file, "lines": _lines(file, texts_by_line)})
    return sources


def _lines(
    file: str,
    texts_by_line: dict[int, dict[str, None]],
) -> list[dict[str, object]]:
    """The lines of a file that make arrays, with a few around each. `texts_by_line` has
    the texts of the arrays that a line makes.
    """
    file_lines = linecache.getlines(file)
    shown_numbers: set[int] = set()
    for number in texts_by_line:
        shown_numbers.update(range(number - _AROUND, number + _AROUND + 1))

    lines: list[dict[str, object]] = []
    for number in sorted(shown_numbers.intersection(range(1, len(file_lines) + 1))):
        array_texts = list(texts_by_line.get(number, {}))
        line = file_lines[number - 1].rstrip("\n")
        lines.append({"number": number, "text": line, "makes": array_texts[:_LAYOUTS]})
    return lines
