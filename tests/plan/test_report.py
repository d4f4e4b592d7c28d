import html
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import (
    AxisRules,
    Code,
    MeshSpec,
    PathRules,
    follow,
    fsdp,
    plan,
    replicate,
    report,
)
from shardfx.presets import models
from tests.structs import struct


MESH = MeshSpec({"data": 2, "tensor": 4})


def planned(tree, target: Any = replicate, mesh=MESH, **keywords):
    rules = PathRules([(".*", target)])
    return plan(tree, mesh, paths=rules, **keywords)


@pytest.mark.parametrize(
    "tree, paths",
    [
        ({"layers": {"0": {"w": 8}}}, ["layers/0/w"]),
        (
            {"layers": {str(number): {"w": 8} for number in (7, 3, 5, 4)}},
            ["layers/{3..5,7}/w"],
        ),
        (
            {"layers": {str(number): {"w": 8} for number in (0, 1, 3, 5, 6, 8)}},
            ["layers/{0..1,3,..,8}/w"],
        ),
        ({"h": [{"experts": [{"w": 8}] * 3}] * 2}, ["h/{0..1}/experts/{0..2}/w"]),
        # Numbers that are part of a name stay, and a star is no number.
        (
            dict.fromkeys(("fc1", "fc2", "h.0.w", "h.1.w", "b_0"), 8),
            ["b_0", "fc1", "fc2", "h.{0..1}.w"],
        ),
        ({"h": {"*": 8, "0": 8, "1": 8}}, ["h/*", "h/{0..1}"]),
        ([8, 8, 6, 8], ["{0..1,3}", "2"]),
    ],
)
def test_rows_are_of_arrays_that_differ_in_numbers_alone(tree, paths):
    content = planned(jax.tree.map(struct, tree), P("tensor")).content
    rows = content.groups
    assert [row.where for row in rows] == paths


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.sampled_from([6, 8])),
        min_size=1,
        max_size=30,
    )
)
def test_rows_cover_every_array_once(leaves):
    tree = {f"{name}/{number}": struct(size) for name, number, size in leaves}
    sharding_plan = planned(tree, P("tensor"))
    rows = sharding_plan.content.groups
    total = sum(len(row.paths) for row in rows)
    assert total == len(sharding_plan.leaves)
    assert sum(row.bytes for row in rows) == sharding_plan.bytes_total
    assert sum(row.bytes_per_device for row in rows) == sharding_plan.bytes_per_device


def test_the_whole_table():
    class Model(eqx.Module):
        table: object
        blocks: list
        act: object

    block = {"w": struct(64, 12, dtype=jnp.bfloat16), "scale": struct(64)}
    model = Model(struct(1003, 64), [block] * 3, jax.nn.relu)
    rules = PathRules(
        [
            ("table", ("vocab", "embed")),
            ("w", P(("data", "tensor"), None)),
            ("scale", replicate),
        ]
    )
    axes = AxisRules([("vocab", "tensor"), ("embed", "data")])
    text = """\
path                 arrays  shape         spec         bytes/device  why
table                     1  f32[1003,64]  -,data          125.4 KiB  [1] paths[0] table (vocab, embed)
blocks/{0..2}/scale       3  f32[64]       -                   768 B  paths[2] scale
blocks/{0..2}/w           3  bf16[64,12]   data+tensor         576 B  paths[1] w

[1] dim 0: size 1003 is not divisible by `tensor` (4); pad it to 1004, or use axes whose product divides 1003.

7 arrays, 256.0 KiB, on mesh data=2,tensor=4 (8 devices): 126.7 KiB per device, 3.96 x an even split.

Replicated, 768 B on every device: blocks/{0..2}/scale (768 B)."""
    actual = report(plan(model, MESH, paths=rules, axes=axes))
    assert actual == text


def test_the_state_of_repeated_layers_is_grouped_as_they_are():
    layer = {"w": struct(8, 16), "norm": struct(16)}
    rules = PathRules([("w", P("data", "tensor")), ("norm", P())])
    sharding_plan = plan({"layers": [layer] * 12}, MESH, paths=rules)
    state_plan = follow(optax.adamw(1e-3).init, sharding_plan)
    groups = [
        (group.where, len(group.paths), group.row.rule)
        for group in state_plan.content.groups
    ]
    expected = [
        ("0/count", 1, None),
        ("0/mu/layers/{0..11}/norm", 12, "path and shape of `layers/*/norm`"),
        ("0/mu/layers/{0..11}/w", 12, "the sharding that `init` gives it"),
    ]
    assert groups[:3] == expected


def test_a_reason_is_told_once():
    actual = report(planned([struct(6)] * 2 + [struct(6, 8)] * 2, P("tensor"))).count(
        "not divisible"
    )
    assert actual == 1
    cases = (2, 4, 8, 16)
    structs = {str(size): struct(size, size) for size in cases}
    few = report(
        planned(
            structs,
            fsdp("data", min_bytes=10_000),
        )
    )
    assert few.count("min_bytes") == 1
    assert "[1] arrays of fewer than 10000 bytes stay whole" in few
    rules = PathRules([("a", P("gone")), ("b", P(None, "gone"))], mesh_axes=["gone"])
    wide = plan({"a": struct(8, 8), "b": struct(8, 8)}, MESH, paths=rules)
    assert report(wide).count("the mesh has no axis `gone`") == 1


def test_scalars_unmatched_arrays_and_the_largest_replicated():
    sharding_plan = plan(
        {"count": struct(), "w": struct(8)}, MESH, unmatched="replicate"
    )
    lines = report(sharding_plan).splitlines()
    expected = ["count", "f32[]", "-", "4", "B", "-"]
    assert lines[1].split() == expected
    expected = ["w", "f32[8]", "-", "32", "B", "[1]"]
    assert lines[2].split() == expected
    assert any(line.startswith("[1] no rule covers the array") for line in lines)
    structs_by_name = {name: struct(8 * (i + 1)) for i, name in enumerate("abcdefg")}
    last = report(planned(structs_by_name)).splitlines()[-1]
    assert (
        last
        == "Replicated, 896 B on every device: g (224 B), f (192 B), e (160 B), d (128"
        " B), c (96 B), 2 more."
    )


def test_memory_kinds_axis_types_and_unconstrained_are_shown():
    axes = {"data": 2, "tensor": 4}
    mesh = MeshSpec(axes, axis_types={"tensor": AxisType.Explicit})
    spec = P(P.UNCONSTRAINED, "tensor")
    memory_kinds = [("w", "pinned_host")]
    text = report(
        planned(
            {"w": struct(8, 8)},
            spec,
            mesh,
            memory_kinds=memory_kinds,
        )
    )
    assert "any,tensor" in text
    assert "in pinned_host" in text
    assert "Auto/Explicit axes" in text
    assert "as `jax.make_mesh` makes them: `tensor`." in text
    assert "`MeshSpec({'data': 2, 'tensor': 4}).build(jax.devices())`" in text


def test_an_empty_plan():
    assert (
        report(plan({}, MESH))
        == "path  shape  spec  bytes/device  why\n\n0 arrays, 0 B, on mesh"
        " data=2,tensor=4 (8 devices): 0 B per device, nothing to hold."
    )


def test_dtypes_are_short():
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    kinds = {
        "i4": jnp.int4,
        "f8_e4m3fn": jnp.float8_e4m3fn,
        "bool": bool,
        "c64": "c8",
        "key<fry>": key,
    }
    structs = [struct(8, dtype=kind) for kind in kinds.values()]
    text = report(planned(structs))
    for name in kinds:
        assert f"  {name}[8]  " in text


def awkward():
    tree = {
        "<b>\x1b[31m": struct(8, 6),
        "line\nbreak": struct(12),
        "layers": [struct(8)] * 2,
        "n": struct(),
    }
    rules = PathRules([("<b>", P("data", "tensor")), (".*", replicate)])
    return plan(tree, MESH, paths=rules)


def test_a_report_escapes_what_a_terminal_would_obey():
    text = report(awkward())
    assert "\x1b" not in text
    assert r"<b>\x1b[31m  " in text
    assert "\nline\\nbreak  " in text
    assert r"on every device: layers/{0..1} (64 B), line\nbreak (48 B)." in text
    assert isinstance(text, str)
    assert repr(text) == str(text) == f"{text}"
    assert text.splitlines()[0].startswith("path")


@pytest.mark.parametrize(
    "sharding_plan", [awkward(), planned({"w": struct(8, 16)}, P("data"))]
)
def test_a_notebook_shows_a_plan_as_a_table(sharding_plan):
    page = sharding_plan._repr_html_()
    matches = set(re.findall(r"<(\w+)", page))
    assert matches == {"table", "tr", "td", "th", "p"}
    rows = [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
        for row in re.findall("<tr>(.*?)</tr>", page)
    ]
    table, *below = report(sharding_plan).split("\n\n")
    assert rows[0] == table.splitlines()[0].split()
    shown = [" ".join(html.unescape(" ".join(row)).split()) for row in rows[1:]]
    lines = table.splitlines()[1:]
    expected = [" ".join(line.split()) for line in lines]
    assert shown == expected
    texts = [html.unescape(text) for text in re.findall("<p>(.*?)</p>", page)]
    assert texts == "\n".join(below).splitlines()


def test_plans_of_leaves_and_codes_read_well():
    rules = PathRules.parse("<b>->data.tensor")
    kinds = [("<b>", "pinned_host")]
    sharding_plan = plan(
        {"<b>\x1b[31m": struct(8, 6)}, MESH, paths=rules, memory_kinds=kinds
    )
    (leaf,) = sharding_plan.leaves
    assert repr(leaf) == (
        rf"LeafPlan(<b>\x1b[31m: f32[8,6]; {leaf.spec}; by paths[0] <b>; in"
        r" pinned_host; 96 of 192 bytes per device; "
        "dim 1: size 6 is not divisible by `tensor` (4); use axes whose product"
        " divides 6)"
    )
    assert repr(Code.indivisible) == "Code.indivisible"
    assert "code=Code.indivisible" in repr(leaf.reasons[0])


def test_paths_stay_whole_in_80_columns():
    tree = models.tree("llama3-70b")
    mesh = MeshSpec({"fsdp": 8, "tensor": 16})
    sharding_plan = plan(
        tree,
        mesh,
        paths=models.rules_for("llama3-70b", "fsdp_tp"),
    )
    cases = (80, 100, 120, 200)
    widest = {
        width: max(map(len, report(sharding_plan, width=width).splitlines()))
        for width in cases
    }
    for width, text in widest.items():
        assert text <= width
    assert max(map(len, report(sharding_plan).splitlines())) > 80
    lines = report(sharding_plan, width=80).splitlines()
    assert lines.count("model/layers/{0..79}/") == 1
    assert lines[0].split()[-1] == "why"
    parts = [line.split()[0] for line in lines if line.startswith("  ") and "/" in line]
    below = parts[:9]
    assert len(set(below)) == 9
    assert "mlp/up_proj/weight" in below
    assert "self_attn/k_proj/weight" in below
    # What says why goes first, what says that there is a reason stays.
    assert any(
        line.startswith("  self_attn/k_proj/weight") and line.endswith("[1]")
        for line in lines
    )
    assert "paths[" not in "\n".join(lines)
    assert "paths[" in report(sharding_plan)
