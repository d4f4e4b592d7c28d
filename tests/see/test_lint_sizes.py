from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules
from tests.see.lint_arguments import applied, lint
from tests.structs import leaf, struct


SMALL = MeshSpec({"fsdp": 2, "tensor": 2})
MLP_AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)])


def mlp(width: int, down: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": struct(96, width), "down": struct(down or width, 96)}


TABLE = struct(1000, 96)
WIDE = ("wide", "embed")
NAMED = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
# What is beside three layers of width 256, its names, and where a contradiction is
# found.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "experts of another width": ({"shared": mlp(100)}, {"shared": NAMED}, []),
    "a tower of another width": (
        {"eyes": {"up": struct(90, 200), "down": struct(200, 90)}},
        {"eyes": NAMED},
        [],
    ),
    "a name that no axis cuts": (
        {"q": struct(96, 192), "v": struct(96, 128)},
        dict.fromkeys("qv", ("embed", "kv")),
        [],
    ),
    "a product that does not fit": (
        {"odd": mlp(256, 250)},
        {"odd": NAMED},
        ["odd/down, name 'mlp'"],
    ),
    "a table under another's name": (
        {"embed": TABLE},
        {"embed": ("mlp", "embed")},
        ["embed, name 'mlp'"],
    ),
    "two tables under another's name": (
        {"embed": TABLE, "head": struct(96, 1000)},
        {"embed": ("mlp", "embed"), "head": ("embed", "mlp")},
        ["embed, name 'mlp'", "head, name 'mlp'"],
    ),
    "an alias": (
        {"embed": TABLE, "few": struct(300, 96)},
        dict.fromkeys(("embed", "few"), WIDE),
        ["few, name 'wide'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_name_contradicts_where_its_sizes_cannot_be_meant(case):
    extra, named, expected = CASES[case]
    tree = {"layers": [mlp(256)] * 3, **extra}
    names = {"layers": [NAMED] * 3, **named}
    axes = MLP_AXES.with_alias("wide", of="mlp")
    findings = sfx.lint(tree, SMALL, names=names, axes=axes)
    actual = [reason.where for reason in findings if reason.code == "contradicted-name"]
    assert actual == expected, str(findings)


@pytest.mark.parametrize(
    "name, shape, head_dim, line",
    [
        ("qkv/weight", (192, 64), 16, "warning inside heads of 16"),
        ("qkv/weight", (192, 64), None, "info inside projections of 64"),
        ("qkv/weight", (192, 64), 8, None),
        ("qkv/weight", (4608, 1536), None, "info inside heads of 128"),
        ("Wqkv/bias", (192,), 16, "warning inside heads of 16"),
        ("wqkv", (192, 64), 16, "warning inside heads of 16"),
        ("qkv_proj/weight", (96, 64), 16, "warning inside heads of 16"),
        ("query_key_value/weight", (192, 64), 16, "warning inside heads of 16"),
        ("kv_proj/weight", (64, 64), 16, "warning inside heads of 16"),
        ("in_proj/weight", (192, 64), 16, "warning inside heads of 16"),
        # Of Mamba: no projections of attention.
        ("in_proj/weight", (296, 64), 16, None),
        ("mixer/norm", (64,), 16, None),
    ],
)
def test_heads_in_fused_projections(name, shape, head_dim, line):
    tree = {"attn": {name: leaf(*shape)}}
    mesh = MeshSpec({"tensor": 8})
    rules = PathRules([(".*", P("tensor"))])
    findings = sfx.lint(tree, mesh, paths=rules, head_dim=head_dim)
    cut = [finding for finding in findings if finding.code == "cut-head"]
    if line is None:
        assert not cut
        return
    (finding,) = cut
    severity, text = line.split(" ", 1)
    assert finding.severity == severity
    assert text in finding.message
    arguments = {
        "tree": tree,
        "mesh": mesh,
        "paths": rules,
        "head_dim": head_dim,
    }
    after = lint(applied(finding.fix, arguments))
    assert not [reason for reason in after if reason.code == "cut-head"]


def test_heads_in_the_fused_projection_of_gpt2():
    tree = {"c_attn": {"weight": leaf(64, 192), "bias": leaf(192)}}
    rules = PathRules([("weight", P(None, "tensor")), ("bias", P("tensor"))])
    findings = sfx.lint(tree, MeshSpec({"tensor": 8}), paths=rules, head_dim=16)
    assert [reason.code for reason in findings] == ["cut-head"] * 2


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("other", [None, "embed"])
def test_a_fused_projection_is_not_transposed(count, other):
    axes = AxisRules([("heads", "tensor"), ("embed", None)])
    tree = {f"proj{n}": leaf(64, 64) for n in range(count)} | {"qkv": leaf(192, 64)}
    names = {f"proj{n}": (other, "heads") for n in range(count)}
    names["qkv"] = ("heads", other)
    mesh = MeshSpec({"tensor": 4})
    findings = sfx.lint(tree, mesh, names=names, axes=axes, head_dim=16)
    assert findings == ()


IN_OUT = sfx.AxisRules([("in", "data"), ("out", "tensor")])


def turned(tree, names, axes):
    """The arrays whose names are the wrong way round, each with the fix."""
    paths = sfx.PathRules([*names.items()])
    mesh = sfx.MeshSpec({"data": 2, "tensor": 2})
    findings = sfx.lint(tree, mesh, paths=paths, axes=axes)
    return {
        finding.where: finding
        for finding in findings
        if finding.code == "contradicted-name"
    }


def test_a_bias_tells_that_a_weight_is_stored_transposed():
    model = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    wrong = turned(model, {"weight": ("in", "out"), "bias": ("out",)}, IN_OUT)
    assert [*wrong] == ["layers/0/weight", "layers/2/weight"]
    finding = wrong["layers/2/weight"]
    assert finding.message == (
        "the names ('in', 'out') stand on shape (16, 64), and 'out' is 16 in"
        " layers/2/bias: the array is stored as ('out', 'in')"
    )
    assert "('out', 'in')" in finding.fix
    assert not turned(model, {"weight": ("out", "in"), "bias": ("out",)}, IN_OUT)


def test_a_norm_tells_that_weights_are_stored_transposed():
    tree = {
        "up": struct(64, 16),
        "down": struct(16, 64),
        "norm": struct(16),
    }
    axes = sfx.AxisRules([("embed", "data"), ("mlp", "tensor")])
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "norm": ("embed",)}
    wrong = turned(tree, names, axes)
    assert [*wrong] == ["down", "up"]
    assert "'embed' is 16 in norm" in wrong["up"].message
    names |= {"up": ("mlp", "embed"), "down": ("embed", "mlp")}
    assert not turned(tree, names, axes)


def test_names_without_other_sizes_are_left_alone():
    tree = {"up": struct(64, 16), "down": struct(16, 64)}
    axes = sfx.AxisRules([("embed", "data"), ("mlp", "tensor")])
    assert not turned(tree, {"up": ("embed", "mlp"), "down": ("mlp", "embed")}, axes)
