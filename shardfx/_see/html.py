"""A plan as one HTML page, which loads nothing from a network or from another file."""

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._ground.text import bytes_text, printable
from .._plan import ShardPlan
from ..chips import Chip
from ..cost import Fit, Traffic
from .finding import Finding
from .page_data import report_data


# One script in several readable files; each may use those before it.
_SCRIPTS = ("ground", "axes", "details", "treemap", "table", "mesh", "memory", "findings", "traffic", "step", "page")


def html_report(
    plan: ShardPlan,
    *,
    title: str | None = None,
    findings: Iterable[Finding] = (),
    traffic: Traffic | None = None,
    fit: Fit | None = None,
    chip: str | Chip | None = None,
) -> str:
    """The plan as one HTML page: a map of the bytes per device, the mesh, the memory, and a table to search.

    The page needs no network and no other file, contains only ASCII characters, and is below 2 MB for every plan.

    **Arguments:**

    - `plan`: the plan.
    - `title`: a title, such as the model's name.
    - `findings`: the findings of [`shardfx.lint`][].
    - `traffic`: the traffic of a step under the plan, from [`shardfx.cost.traffic`][].
    - `fit`: the memory of a step under the plan, from [`shardfx.cost.fit`][], shown in the place of the plan's arrays
        alone. A second map shows the step's arrays at the worst moment, with the lines of your source that make them.
    - `chip`: a [`shardfx.chips.Chip`][] or its name, whose memory the plan is compared with; by default that of `fit`,
        if there is one.

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
    data = report_data(plan, title=title, findings=findings, traffic=traffic, fit=fit, chip=chip)
    return page_of(data)


def page_of(data: Mapping[str, Any]) -> str:
    """The HTML page for the data of `report_data`."""
    style, template = _read("report.css"), _read("report.html")
    script = "\n".join(["'use strict';", "(() => {", *[_read(f"{name}.js") for name in _SCRIPTS], "})();"])
    parts = {
        # Only this script and this style can run, and nothing can be fetched, whatever the names contain.
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'",
        "title": _text(data["title"] or "Sharding plan"),
        "summary": _text(_summary(data)),
        "level": data["verdict"]["level"],
        "verdict": _text(data["verdict"]["text"]),
        "style": style,
        "script": script,
        "data": embedded(packed(data)),
    }
    # One pass over the template: inserted text is not searched again.
    pieces = template.split("{{")
    filled = [parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])]
    return "".join([pieces[0], *filled])


def _read(name: str) -> str:
    return importlib.resources.files("shardfx._see").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(text: str) -> str:
    return html.escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode()


def _summary(data: Mapping[str, Any]) -> str:
    totals, mesh = data["totals"], data["mesh"]
    return (
        f"{totals['arrays']:,} arrays, {bytes_text(totals['bytes'])}, on mesh {mesh['text']} "
        f"({mesh['devices']:,} devices): {bytes_text(totals['bytes_per_device'])} per device."
    )


# The page stays below 2 MB: these limits leave room for its own text.
_ROW_CHARACTERS = 1_300_000
_LIST_CHARACTERS = 150_000
_MOST_GROUPS = 12
_WHOLE = ("format", "title", "digest", "verdict", "mesh", "totals", "chip", "fit")


def embedded(value: object) -> str:
    """A value as ASCII JSON that contains no `</script>`."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def packed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of `report_data` in a form of bounded size, with all text made printable.

    Rows with equal plans share a kind: their common values, with the bytes of one array. A row is four values: the
    number of characters that its path shares with the path before it, the rest of its path, the number of arrays that
    it represents, and the index of its kind. If there are too many rows, those with the fewest bytes per device are
    left out, and `more` has their totals. Findings and traffic are cut at their end.
    """
    traffic = data["traffic"]
    rows, left = _within(_ROW_CHARACTERS, data["rows"], _shared, lambda row: row["bytes_per_device"])
    findings, more_findings = _within(_LIST_CHARACTERS, _shown(data["findings"]))
    if traffic is not None:
        kept, more = _within(_LIST_CHARACTERS, _shown(traffic["rows"]))
        traffic = {**traffic, "rows": kept, "more": len(more)}
    sums = {name: sum(row[name] for row in left) for name in ("arrays", "bytes", "bytes_per_device")}
    step = data["step"]
    if step is not None:
        held, _ = _within(_LIST_CHARACTERS, _shown(step["moment"]), weight=lambda row: row["bytes_per_device"])
        each = _LIST_CHARACTERS // max(1, len(step["source"]))
        pairs = [(one, _within(each, _shown(one["lines"]))) for one in step["source"]]
        source = [{"file": printable(one["file"]), "lines": kept, "more": len(more)} for one, (kept, more) in pairs]
        step = {"moment": held, "source": source}
    others = {name: _shown(data[name]) for name in _WHOLE}
    return {
        **others,
        **rows,
        "more": {"rows": len(left), **sums},
        "memory": _shown(_largest(data["memory"])),
        "findings": findings,
        "more_findings": len(more_findings),
        "traffic": traffic,
        "step": step,
    }


def _shown(value: object) -> Any:
    """A copy of a value in which every string is printable, so that no name can reverse or break the text."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_shown(name): _shown(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_shown(item) for item in value]
    return value


def _within(
    characters: int,
    rows: Sequence[object],
    pack: Callable[[Sequence[Any]], Any] = list,
    weight: Callable[[Any], int] | None = None,
) -> tuple[Any, list[Any]]:
    """As many rows as fit into `characters`, packed and in order, and the rows left out. Heavier rows are
    kept first.
    """
    numbers = range(len(rows))
    ranked = numbers if weight is None else sorted(numbers, key=lambda number: -weight(rows[number]))
    count = len(rows)
    while True:
        kept = sorted(ranked[:count])
        made = pack([rows[number] for number in kept])
        size = len(embedded(made))
        if size <= characters or not count:
            return made, [rows[number] for number in ranked[count:]]
        count = min(count - 1, int(0.95 * count * characters / size))


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    lines, before = [], ""
    for row in rows:
        kind = {name: value for name, value in row.items() if name not in ("path", "arrays")}
        for name in ("bytes", "bytes_per_device"):
            kind[name] //= row["arrays"]
        path = printable(row["path"])
        common = _common(before, path)
        lines.append([common, path[common:], row["arrays"], kinds.setdefault(json.dumps(kind), len(kinds))])
        before = path
    return {"kinds": [_shown(json.loads(kind)) for kind in kinds], "rows": lines}


def _common(first: str, second: str) -> int:
    """The length of the prefix that two texts share; 0 if it is not ASCII, since JavaScript counts other characters
    differently.
    """
    pairs = zip(first, second, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return same if first[:same].isascii() else 0


def _largest(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups with the most bytes, with the rest summed into one group."""
    if len(groups) <= _MOST_GROUPS + 1:
        return list(groups)
    rest = sum(group["bytes_per_device"] for group in groups[_MOST_GROUPS:])
    others = {"group": f"{len(groups) - _MOST_GROUPS} others", "memory_kind": None, "bytes_per_device": rest}
    return [*groups[:_MOST_GROUPS], others]
