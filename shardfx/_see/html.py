"""Shows a plan as one HTML page, which loads nothing from a network or from another
file, and as plain data.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._ground.misuse import called
from .._ground.text import (
    bytes_text,
    printable,
    together,
)
from .._plan import ShardPlan
from ..chips import Chip
from ..cost import Fit, Traffic
from .finding import Finding
from .report import report_data


# One script in several readable files; each may use those before it.
_SCRIPTS = (
    "ground",
    "axes",
    "details",
    "treemap",
    "table",
    "mesh",
    "memory",
    "findings",
    "traffic",
    "step",
    "page",
)


@called('pathlib.Path("plan.html").write_text(html_report(plan))')
def html_report(
    plan: ShardPlan,
    *,
    title: str | None = None,
    findings: Iterable[Finding] = (),
    traffic: Traffic | None = None,
    fit: Fit | None = None,
    chip: str | Chip | None = None,
) -> str:
    """The plan as one HTML page: a map of the bytes per device, the mesh, the memory,
    and a table to search.

    The page needs no network and no other file, contains only ASCII characters, and is
    below 2 MB for every plan.

    **Arguments:**

    - `plan`: the plan.
    - `title`: a title, such as the model's name.
    - `findings`: the findings of [`shardfx.lint`][].
    - `traffic`: the traffic of a step under the plan, from [`shardfx.cost.traffic`][].
    - `fit`: the memory of a step under the plan, from [`shardfx.cost.fit`][]. The page
      then shows it instead of the memory of the plan's arrays. A second map shows the
      arrays in memory when the step uses most memory, with the lines of your source
      that make them.
    - `chip`: a [`shardfx.chips.Chip`][] or its name, whose memory the plan is compared
      with; by default that of `fit`, if there is one.

    **Returns:**

    The text of the page. The same plan gives the same text.

    !!! Example

        ```python
        from pathlib import Path

        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, html_report, plan

        tree = {"layers": [{"w": jnp.ones((8, 8))}] * 4}
        rules = PathRules.parse("w->data.tensor")
        made = plan(tree, MeshSpec({"data": 2, "tensor": 4}), paths=rules)
        page = html_report(made, title="four layers")
        Path("plan.html").write_text(page)
        assert "four layers" in page
        ```
    """
    data = report_data(
        plan,
        title=title,
        findings=findings,
        traffic=traffic,
        fit=fit,
        chip=chip,
    )
    return page_of(data)


def page_of(data: Mapping[str, Any]) -> str:
    """The page for the content that `report_data` returns."""
    style = _read("report.css")
    template = _read("report.html")
    sources = [_read(f"{name}.js") for name in _SCRIPTS]
    script = "\n".join(["'use strict';", "(() => {", *sources, "})();"])
    parts = {
        # Only this script and this style can run, and nothing can be fetched, whatever
        # the names contain.
        "policy": (
            f"default-src 'none'; script-src '{_csp_hash(script)}'; style-src"
            f" '{_csp_hash(style)}'; base-uri 'none'"
        ),
        "title": _text(data["title"] or "Sharding plan"),
        "summary": _text(_summary(data)),
        "level": data["verdict"]["level"],
        "verdict": _text(data["verdict"]["text"]),
        "style": style,
        "script": script,
        "data": embedded(packed(data)),
    }
    # One pass over the template: inserted text is not searched again.
    head, *pieces = template.split("{{")
    filled = [head]
    for piece in pieces:
        name, _, following = piece.partition("}}")
        filled += [parts[name], following]
    return "".join(filled)


def _read(name: str) -> str:
    """The text of a file of the page, which the package contains."""
    return (
        importlib.resources.files("shardfx._see")
        .joinpath("page", name)
        .read_text(encoding="utf-8")
    )


def _csp_hash(text: str) -> str:
    """The hash by which a page's policy allows one script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(text: str) -> str:
    """A text for HTML: printable, escaped, in ASCII."""
    return html.escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode()


def _summary(data: Mapping[str, Any]) -> str:
    totals = data["totals"]
    mesh = data["mesh"]
    return (
        f"{totals['arrays']:,} arrays, {bytes_text(totals['bytes'])}, on mesh"
        f" {mesh['text']} ({mesh['devices']:,} devices):"
        f" {bytes_text(totals['bytes_per_device'])} per device."
    )


# The page stays below 2 MB: these limits leave room for its own text.
_ROW_CHARACTERS = 1_300_000
_LIST_CHARACTERS = 150_000
_MOST_GROUPS = 12
_WHOLE = ("format", "title", "digest", "verdict", "mesh", "totals", "chip", "fit")


def embedded(value: object) -> str:
    """A value as ASCII JSON without the characters `<`, `>` and `&`, so that it cannot
    end a script in HTML.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def packed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of `report_data` in a compact form of bounded size, with all text made
    printable.

    Each distinct plan of an array is stored once, in `kinds`. An entry of `rows` has
    four values: the number of characters that its path shares with the path before it,
    the rest of its path, the number of arrays, and the index of their plan in `kinds`.
    After the path `layers/0/w`, the path `layers/0/up` is `[9, "up", 1, 0]`. If there
    are too many entries, those with the fewest bytes per device are dropped, and `more`
    has their sums. If there are too many findings or collectives, the last ones are
    dropped.
    """
    packed_rows, dropped_rows = _within(
        _ROW_CHARACTERS, data["rows"], _shared, lambda row: row["bytes_per_device"]
    )
    sums = {}
    for name in ("arrays", "bytes", "bytes_per_device"):
        sums[name] = sum(row[name] for row in dropped_rows)
    findings, dropped_findings = _within(_LIST_CHARACTERS, _shown(data["findings"]))
    whole_fields = {name: _shown(data[name]) for name in _WHOLE}
    return {
        **whole_fields,
        **packed_rows,
        "more": {"rows": len(dropped_rows), **sums},
        "memory": _shown(_first_groups(data["memory"])),
        "findings": findings,
        "more_findings": len(dropped_findings),
        "traffic": _packed_traffic(data["traffic"]),
        "step": _packed_step(data["step"]),
    }


def _packed_traffic(traffic: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if traffic is None:
        return None
    rows, other_rows = _within(_LIST_CHARACTERS, _shown(traffic["rows"]))
    return {**traffic, "rows": rows, "more": len(other_rows)}


def _packed_step(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `step` of `report_data` in bounded size: the largest arrays, and an equal
    share for the lines of each source file.
    """
    if step is None:
        return None
    arrays, _ = _within(
        _LIST_CHARACTERS,
        _shown(step["moment"]),
        weight=lambda row: row["bytes_per_device"],
    )
    characters = _LIST_CHARACTERS // max(1, len(step["source"]))
    source = []
    for entry in step["source"]:
        lines, other_lines = _within(characters, _shown(entry["lines"]))
        file = printable(entry["file"])
        source.append({"file": file, "lines": lines, "more": len(other_lines)})
    return {"moment": arrays, "source": source}


def _shown(value: object) -> Any:
    """A copy of a value in which every string is printable, so that no name can reverse
    or break the text.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        shown = {_shown(name): _shown(item) for name, item in value.items()}
        if "fix" in value:
            # A fix is lines of code, to be copied.
            shown["fix"] = "\n".join(map(printable, value["fix"].split("\n")))
        return shown
    if isinstance(value, Sequence):
        return [_shown(item) for item in value]
    return value


def _within(
    characters: int,
    rows: Sequence[object],
    pack: Callable[[Sequence[Any]], Any] = list,
    weight: Callable[[Any], int] | None = None,
) -> tuple[Any, list[Any]]:
    """Keeps as many of `rows` as fit into `characters` of JSON. `pack` turns the kept
    rows into the value for JSON.

    Rows with more `weight` are kept first; without `weight`, the first rows are.
    Returns the value and the other rows.
    """
    # The indices of the rows, in the order in which rows are kept.
    ranked: Sequence[int] = range(len(rows))
    if weight is not None:
        ranked = sorted(ranked, key=lambda number: -weight(rows[number]))
    count = len(rows)
    while True:
        chosen = sorted(ranked[:count])
        value = pack([rows[number] for number in chosen])
        size = len(embedded(value))
        if size <= characters or not count:
            return value, [rows[number] for number in ranked[count:]]
        # Rows differ in length, so a little fewer than would fit on average.
        count = min(count - 1, int(0.95 * count * characters / size))


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `kinds` and `rows` of `packed`, from rows of `report_data`. A kind has the
    bytes of one of the arrays of its row.
    """
    kinds: dict[str, int] = {}
    lines = []
    path_before = ""
    for row in rows:
        kind = dict(row)
        del kind["path"]
        del kind["arrays"]
        for name in ("bytes", "bytes_per_device"):
            kind[name] //= row["arrays"]
        number = kinds.setdefault(json.dumps(kind), len(kinds))
        path = printable(row["path"])
        prefix = os.path.commonprefix([path_before, path])
        # JavaScript counts other characters differently.
        common = len(prefix) if prefix.isascii() else 0
        lines.append([common, path[common:], row["arrays"], number])
        path_before = path
    return {"kinds": [_shown(json.loads(kind)) for kind in kinds], "rows": lines}


def _first_groups(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first `_MOST_GROUPS` of `groups`, and for each kind of memory one entry with
    the sum of the bytes of the others, if there are any.
    """
    if len(groups) <= _MOST_GROUPS + 1:
        return list(groups)
    first_groups = list(groups[:_MOST_GROUPS])
    # Bytes in host memory do not count as bytes of the device.
    others_by_kind = together(groups[_MOST_GROUPS:], lambda group: group["memory_kind"])
    for memory_kind, others in others_by_kind.items():
        sum_of_others = {
            "group": f"{len(others)} others",
            "memory_kind": memory_kind,
            "bytes_per_device": sum(group["bytes_per_device"] for group in others),
        }
        first_groups.append(sum_of_others)
    return first_groups
