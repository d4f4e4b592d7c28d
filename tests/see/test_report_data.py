"""What a report says as data, and as the text of a page; what a browser makes of it is
in test_report_browser.py.
"""

import importlib.resources
import json
import re
from collections.abc import Callable
from typing import Any

import draw_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import AxisRules, MeshSpec, PathRules, ShardPlan, fsdp, html_report, plan
from shardfx.cost import Fit, Traffic, fit
from shardfx.errors import ChipError, LeafTypeError
from shardfx.results import Finding
from tests.structs import struct


MESH = MeshSpec({"data": 2, "tensor": 4})
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    "\"quotes' & &amp; <b>",
    "{{data}} {{script}}",
    "\u202egnp.tsohg\u202c \u2066\u2029\x1b[31m\0",
    "\U0001f680\U0001f9d1\u200d\U0001f52c emoji",
    "\u6743\u91cd/\u0648\u0632\u0646",
    "half \ud800",
    "x" * 10_000,
    "/".join("abcdefgh" * 500),
    "",
    "__proto__",
    "${1}`",
)


def planned(rules: str, tree: Any = None, **others: Any) -> ShardPlan:
    """The plan of one small matrix, or of the given tree."""
    return plan(
        {"w": struct(8, 8)} if tree is None else tree,
        MESH,
        paths=PathRules.parse(rules),
        **others,
    )


def hostile() -> ShardPlan:
    structs_by_name = {name: struct(8, 8) for name in HOSTILE}
    return planned(".*->data.tensor", structs_by_name)


def embedded(page: str) -> dict:
    """The data that a page holds, as its script reads it."""
    (text,) = re.findall(
        '<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def paths(data: dict) -> list[str]:
    """The paths of packed rows."""
    rows = []
    before = ""
    for common, rest, _, _ in data["rows"]:
        before = before[:common] + rest
        rows.append(before)
    return rows


def data_of(sharding_plan: ShardPlan, **about: Any) -> dict:
    """The data of a plan's report, with the sums of each row of its page."""
    data = embedded(html_report(sharding_plan, **about))
    rows = []
    for path, (*_, arrays, kind_number) in zip(paths(data), data["rows"], strict=True):
        row = {**data["kinds"][kind_number], "path": path, "arrays": arrays}
        row["bytes"] *= arrays
        row["bytes_per_device"] *= arrays
        rows.append(row)
    return {**data, "rows": rows}


def test_the_rows_are_those_of_the_report():
    layer = {"w": struct(8, 6), "b": struct(6)}
    sharding_plan = planned(
        "w->data.tensor, .*->replicate", {"layers": [layer] * 3, "n": struct()}
    )
    data = data_of(sharding_plan, title="three layers")
    rows = sharding_plan.content.groups
    actual = [row["path"] for row in data["rows"]]
    assert actual == [row.where for row in rows]
    bytes_per_device = [row["bytes_per_device"] for row in data["rows"]]
    assert bytes_per_device == [row.bytes_per_device for row in rows]
    expected = {
        "arrays": 7,
        "bytes": sharding_plan.bytes_total,
        "bytes_per_device": sharding_plan.bytes_per_device,
        "even_bytes_per_device": -(-sharding_plan.bytes_total // 8),
        "replicated_bytes": 3 * 6 * 4 + 4,
        "corrected_arrays": 3,
    }
    assert data["totals"] == expected
    (w,) = [row for row in data["rows"] if row["path"].endswith("w")]
    assert w["requested"] == [["data"], ["tensor"]]
    assert w["spec"] == [["data"], []]
    assert w["shard_shape"] == [4, 6]
    actual = [
        (reason["code"], reason["dim"], reason["axes"]) for reason in w["reasons"]
    ]
    assert actual == [("indivisible", 1, ["tensor"])]
    assert data["title"] == "three layers"
    assert data["digest"] == sharding_plan.digest


def test_what_a_strategy_adds_is_not_less_than_was_asked():
    rules = PathRules(
        [
            ("norm", fsdp("data")),
            ("odd", fsdp("data")),
            ("w", P("tensor") | fsdp("data")),
        ]
    )
    sharding_plan = plan(
        {
            "norm": struct(8),
            "odd": struct(7),
            "w": struct(8, 6),
            "w_odd": struct(7, 6),
        },
        MESH,
        paths=rules,
    )
    data = data_of(sharding_plan)
    rows = {
        row["path"]: (row["less"], row["lost"], row["spec"]) for row in data["rows"]
    }
    assert rows["norm"] == (False, [], [["data"]])
    assert rows["odd"] == (True, [], [[]])
    assert rows["w"][:2] == (False, [])
    expected = sum(less for less, _, _ in rows.values())
    assert data["totals"]["corrected_arrays"] == expected


def test_everything_that_a_plan_can_hold_is_json():
    class Odd:
        pass

    array = np.ones((8, 2), np.float32)
    tree = {
        "key": jax.random.key(0),
        "fp8": struct(8, 8, dtype=jnp.float8_e4m3fn),
        "int4": struct(8, 8, dtype=jnp.int4),
        "empty": struct(0, 4),
        "numpy": array,
        "named": struct(8, 4),
        "function": Odd,
    }
    rules = [("a", ("data", "tensor")), ("b", None)]
    axes = AxisRules(rules)
    mesh = MeshSpec(
        {"data": 2, "tensor": 4},
        axis_types={"tensor": AxisType.Explicit},
        dcn={"data": 2},
    )
    rules = PathRules([("named", ("a", "b")), ("fp8", fsdp("tensor")), (".*", P())])
    memory_kinds = [("int4", "pinned_host")]
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
        axes=axes,
        memory_kinds=memory_kinds,
    )
    data = data_of(sharding_plan)
    rows = {row["path"]: row for row in data["rows"]}
    assert rows["named"]["spec"] == [["data", "tensor"], []]
    assert rows["int4"]["memory_kind"] == "pinned_host"
    assert rows["int4"]["bytes"] == 32
    assert rows["empty"]["bytes"] == 0
    assert "function" not in rows
    expected = [
        {
            "name": "data",
            "size": 2,
            "slices": 2,
            "type": "Auto",
        },
        {
            "name": "tensor",
            "size": 4,
            "slices": 1,
            "type": "Explicit",
        },
    ]
    assert data["mesh"]["axes"] == expected
    assert {(part["group"], part["memory_kind"]) for part in data["memory"]} >= {
        ("int4", "pinned_host")
    }


@pytest.mark.parametrize("tree", [{}, {"n": jnp.ones(())}, jnp.ones(4)])
def test_the_smallest_trees(tree):
    rules = PathRules([(".*", P())])
    sharding_plan = plan(tree, MeshSpec({"data": 1}), paths=rules, unused="allow")
    data = embedded(html_report(sharding_plan))
    assert data["totals"]["arrays"] == len(sharding_plan)
    assert data["totals"]["replicated_bytes"] == 0


def test_a_chip_by_its_name():
    sharding_plan = planned("w->replicate")
    assert data_of(sharding_plan, chip="v5p")["chip"]["name"] == "v5p"
    assert data_of(sharding_plan)["chip"] is None
    with pytest.raises(ChipError, match="v5"):
        html_report(sharding_plan, chip="v5x")


def fitted(batch: int) -> Fit:
    """The memory of a step on one matrix on a v5e, with the gradient."""
    tree = {"params": struct(4096, 4096), "batch": struct(batch, 4096)}
    structs = planned("params->replicate, batch->data", tree).structs
    gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    return fit(gradient, structs["params"], structs["batch"], chip="v5e")


def _smaller(row):
    return -row["bytes_per_device"]


def test_the_memory_of_a_step_takes_the_place_of_the_arrays():
    sent = fitted(1024)
    sharding_plan = planned("w->replicate")
    data = data_of(sharding_plan, fit=sent)
    total = sum(part["bytes_per_device"] for part in data["memory"])
    assert total == sent.peak_bytes == data["fit"]["peak_bytes"]
    allowed = {row.group for row in sent.rows}
    assert data["memory"][0]["group"] in allowed
    assert data["chip"]["name"] == "v5e"
    assert data["fit"]["basis"] == "foreseen"
    assert data["fit"]["fits"] is True
    assert len(data["fit"]["changes"]) == len(sent.changes)
    moment = data["step"]["moment"]
    assert {row["array"] for row in moment} >= {
        "w",
        "f32[4096,4096]",
    }
    assert moment == sorted(moment, key=_smaller)
    (source,) = [line for line in data["step"]["source"] if line["file"] == __file__]
    (line,) = [line for line in source["lines"] if "jax.grad(" in line["text"]]
    assert "f32[4096,4096] -" in line["makes"]
    chip = data_of(sharding_plan, fit=sent, chip="v5p")["chip"]
    actual = chip["name"]
    assert actual == "v5p"
    assert data_of(sharding_plan)["fit"] is None


def test_names_stay_text_whatever_they_hold():
    page = html_report(hostile(), title="</title><script>window.pwned = 3</script>")
    assert page.isascii()
    # What ends an element, or begins one, is the template's own.
    plain = html_report(planned("w->replicate"), title="a")
    for mark in ("<script", "</script", "<img", "<title", "</title", "<style", "<!--"):
        actual = page.lower().count(mark)
        assert actual == plain.lower().count(mark), mark
    shown = paths(embedded(page))
    assert len(shown) == len(HOSTILE)
    for path in shown:
        assert path.isprintable()
    assert "\\u202egnp.tsohg\\u202c \\u2066\\u2029\\x1b[31m\\x00" in shown
    assert HOSTILE[0] in shown
    assert "\u6743\u91cd/\u0648\u0632\u0646" in shown
    assert "x" * 10_000 in shown


def test_the_page_is_whole_and_the_same_for_the_same_plan():
    folder = importlib.resources.files("shardfx._see").joinpath("page")
    page = html_report(hostile())
    assert page == html_report(hostile())
    assert "{{" not in page.partition("<script")[0]
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8")
        assert text.isascii(), file.name
        assert (text in page) != (file.name == "report.html"), file.name


def test_the_picture_in_the_readme_shows_what_is_said_of_it():
    sharding_plan = draw_report.planned()
    rows = {
        row.where.rpartition("layers/")[2]: row for row in sharding_plan.content.groups
    }
    key, query, out = (
        rows[f"{{0..47}}/self_attn/{name}_proj/weight"] for name in ("k", "q", "o")
    )
    assert key.row.spec == P(None, "fsdp")
    assert key.row.reasons[0].code.name == "unit"
    assert key.bytes_per_device > query.bytes_per_device + out.bytes_per_device
    assert draw_report.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert draw_report.PICTURE.stat().st_size < 200_000


def of_many(name_of: Callable[[int], str]) -> tuple[ShardPlan, str]:
    """A plan of 50,000 arrays and its page. `name_of` gives the name of each number."""
    structs = {}
    for number in range(50_000):
        structs[name_of(number)] = struct(8, 16 + number % 7)
    sharding_plan = planned(".*->data", structs)
    return sharding_plan, html_report(sharding_plan)


def test_fifty_thousand_leaves_are_a_page_below_2_mb():
    sharding_plan, page = of_many(lambda number: f"p{number}" * 12)
    assert len(page) < 2_000_000
    data = embedded(page)
    total = sum(row[2] for row in data["rows"]) + data["more"]["arrays"]
    assert total == 50_000
    share = [kind["bytes_per_device"] for kind in data["kinds"]]
    total = (
        sum(row[2] * share[row[3]] for row in data["rows"])
        + data["more"]["bytes_per_device"]
    )
    assert total == sharding_plan.bytes_per_device
    # Those left out are those with the fewest bytes.
    shown = set(paths(data))
    bytes_of_others = [
        leaf.bytes_per_device for leaf in sharding_plan.leaves if leaf.path not in shown
    ]
    assert len(bytes_of_others) == data["more"]["rows"] > 0
    limit = min(share[row[3]] for row in data["rows"])
    assert max(bytes_of_others) <= limit


@pytest.mark.parametrize("count, shown", [(13, 13), (14, 13)])
def test_many_parts_of_a_tree_are_the_largest_and_the_rest(count, shown):
    tree = {
        f"part{chr(97 + position)}": struct(8, 8 * (position + 1))
        for position in range(count)
    }
    sharding_plan = planned(".*->data", tree)
    memory = embedded(html_report(sharding_plan))["memory"]
    assert len(memory) == shown
    assert (
        sum(part["bytes_per_device"] for part in memory)
        == sharding_plan.bytes_per_device
    )
    assert (memory[-1]["group"] == "2 others") == (shown < count)


def test_the_rest_of_a_tree_is_summed_for_each_kind_of_memory():
    tree = {f"part_{number}": struct(8, 16 + number) for number in range(20)}
    rules = PathRules.parse(".*->data")
    kinds = [("part_[0-3]$", "pinned_host")]
    mesh = MeshSpec({"data": 8})
    made = plan(tree, mesh, paths=rules, memory_kinds=kinds)
    bytes_by_kind = {None: 0, "pinned_host": 0}
    for group in embedded(html_report(made))["memory"]:
        bytes_by_kind[group["memory_kind"]] += group["bytes_per_device"]
    assert bytes_by_kind["pinned_host"] == sum(
        leaf.bytes_per_device for leaf in made.leaves if leaf.memory_kind
    )
    assert sum(bytes_by_kind.values()) == made.bytes_per_device


def test_many_findings_and_much_traffic_are_cut_and_counted():
    sharding_plan = planned("w->replicate")
    finding = Finding(
        code="replicated",
        severity="warning",
        where="w",
        bytes=9,
        message="m" * 100,
        fix="f",
    )
    traffic = Traffic((), 8)
    page = html_report(sharding_plan, findings=[finding] * 10_000, traffic=traffic)
    data = embedded(page)
    assert 100 < len(data["findings"]) < 10_000
    assert len(data["findings"]) + data["more_findings"] == 10_000
    expected = {
        "devices": 8,
        "wire_bytes": 0,
        "dcn_bytes": 0,
        "rows": [],
        "more": 0,
    }
    assert data["traffic"] == expected
    assert len(html_report(sharding_plan, findings=[finding] * 10_000)) < 2_000_000


SEVEN = {name: struct(7, 2**33, dtype=jnp.bfloat16) for name in "ab"}
NOT_FIT = "2 arrays got less than asked, 2 times an even split, it does not fit v5e"


@pytest.mark.parametrize(
    "tree, rules, findings, chip, level, text",
    [
        (
            None,
            "w->data.tensor",
            "",
            None,
            "good",
            "every array got what its rule asked for, 1 times an even split",
        ),
        (None, "w->tensor", "", None, "warn", "2 times an even split"),
        (None, "w->replicate", "", None, "bad", "8 times an even split"),
        (None, "w->data.tensor", "warning", None, "warn", "1 warning"),
        (None, "w->data.tensor", "error warning", None, "bad", "1 error, 1 warning"),
        (SEVEN, ".*->data.tensor", "", "v5e", "bad", NOT_FIT),
    ],
)
def test_the_verdict(tree, rules, findings, chip, level, text):
    sharding_plan = planned(rules, tree)
    result = [
        Finding(
            code="corrected", severity=severity, where="w", bytes=0, message="", fix=""
        )
        for severity in findings.split()
    ]
    page = html_report(sharding_plan, findings=result, chip=chip)
    verdict = embedded(page)["verdict"]
    assert verdict["level"] == level
    assert text in verdict["text"]
    assert (
        f'<p id="verdict" class="verdict {level}"><b>{verdict["text"]}</b></p>' in page
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"title": 5}, "`title` must be of type str, not int"),
        ({"findings": None}, "`findings` must be of type Iterable, not NoneType"),
        ({"findings": ["w"]}, "`findings` must be of type Finding, not str"),
        ({"traffic": 3}, "`traffic` must be of type Traffic, not int; pass what"),
        ({"fit": 3}, "`fit` must be of type Fit, not int; pass what"),
    ],
)
def test_arguments_of_other_types_are_refused(wrong, message):
    made = planned(".*->data", {"w": struct(8, 8)})
    with pytest.raises(LeafTypeError, match=message):
        html_report(made, **wrong)
