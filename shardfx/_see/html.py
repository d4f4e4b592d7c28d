"""A plan as one HTML page that needs nothing else: no network, no library, no second file."""

import base64
import hashlib
import html
import importlib.resources
from collections.abc import Iterable, Mapping
from typing import Any

from .._ground.text import bytes_text, printable
from .._plan.shard_plan import ShardPlan
from ..chips import Chip
from ..cost._fit import Fit
from ..cost._traffic_rows import Traffic
from .finding import Finding
from .packed import embedded, packed
from .page_data import report_data


# One script, cut into files that a person can read; each may use those before it.
_SCRIPTS = ("ground", "axes", "details", "treemap", "table", "mesh", "memory", "findings", "traffic", "page")


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

    The page needs no network and no other file, holds ASCII characters only, and is below 2 MB whatever the plan.

    **Arguments:**

    - `plan`: the plan.
    - `title`: what it is a plan of, such as the model's name.
    - `findings`: what [`shardfx.lint`][] found.
    - `traffic`: what a step under the plan sends, from [`shardfx.cost.traffic`][].
    - `fit`: what a step under the plan needs of a chip's memory, from [`shardfx.cost.fit`][]; it takes the place of
        what the plan's arrays alone need.
    - `chip`: whose memory the plan is compared with: a [`shardfx.chips.Chip`][], or its name. That of `fit`, if there
        is one and this is left out.

    **Returns:**

    The page's text. The same plan gives the same text.

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
    """The page that shows what `report_data` returned."""
    style, template = _read("report.css"), _read("report.html")
    script = "\n".join(["'use strict';", "(() => {", *[_read(f"{name}.js") for name in _SCRIPTS], "})();"])
    parts = {
        # Nothing but this script and this style can run, and nothing can be fetched, whatever the names hold.
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'",
        "title": _text(data["title"] or "Sharding plan"),
        "summary": _text(_summary(data)),
        "level": data["verdict"]["level"],
        "verdict": _text(data["verdict"]["text"]),
        "style": style,
        "script": script,
        "data": embedded(packed(data)),
    }
    # One pass over the template: what is filled in is not looked at again.
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
