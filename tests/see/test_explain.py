"""An explanation agrees with the plan, dimension by dimension."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, atomic, explain, fsdp
from tests.specs import entries_of, entry_axes


MESH = MeshSpec({"fsdp": 4, "tensor": 8})


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def planned(shape, target, **others):
    rules = PathRules([("w", target)])
    return sfx.plan({"w": leaf(*shape)}, MESH, paths=rules, **others)


def test_names_say_what_each_rule_came_to():
    rules = [
        ("vocab", "tensor"),
        ("embed", "tensor"),
        ("embed", "fsdp"),
        ("embed", None),
    ]
    axes = AxisRules(rules)
    names = {"head": ("embed", "vocab")}
    plan = sfx.plan({"head": leaf(768, 50257)}, MESH, names=names, axes=axes)
    embed, vocab = explain(plan, "head").dims
    actual = [(trial.number, trial.outcome) for trial in embed.tried]
    expected = [
        (1, "blocked"),
        (2, "applied"),
        (3, "settled"),
    ]
    assert actual == expected
    expected = (("tensor", "vocab", 1),)
    assert embed.tried[0].taken == expected
    assert embed.wanted == ("fsdp",)
    assert embed.kept == ("fsdp",)
    assert embed.dropped == ()
    assert vocab.wanted == ("tensor",)
    assert vocab.kept == ()
    assert vocab.dropped == ("tensor",)
    assert vocab.sizes == (50256, 50264)
    assert embed.free == ("tensor",)


def test_heads_that_are_not_cut():
    explanation = explain(planned((512, 64), atomic(P("tensor"), (128, 1))), "w")
    dim, _ = explanation.dims
    assert dim.unit == 128
    assert dim.dropped == ("tensor",)
    assert dim.sizes == (1024,)
    assert (
        dim.changes[1]
        == "`tensor` of size 4 would cut it (`refine=True` splits the axis)"
    )
    # And so it does.
    again = planned((512, 64), atomic(P("tensor"), (128, 1)), refine=True)
    assert again["w"].bytes_per_device == again["w"].bytes // 4


def test_a_strategy_adds_axes():
    spec = P("tensor") | fsdp("fsdp")
    explanation = explain(planned((8, 64), spec), "w")
    actual = [(dim.kept, dim.added) for dim in explanation.dims]
    expected = [
        (("tensor",), ()),
        ((), ("fsdp",)),
    ]
    assert actual == expected
    assert "then fsdp(fsdp)" in str(explanation)


EMBED = AxisRules([("embed", "fsdp")])
KV = AxisRules([("kv", "tensor"), ("embed", "fsdp")])
BOTH = AxisRules([("mlp", "tensor"), ("embed", "tensor")])
SERVE = EMBED.extend(modes={"serve": [("embed", "tensor")]})


def by_names(shape, names, axes, **others):
    return sfx.plan({"w": leaf(*shape)}, MESH, names={"w": names}, axes=axes, **others)


@pytest.mark.parametrize(
    "make_plan, text",
    [
        (
            lambda: planned((8, 8), P("tensor") | fsdp("tensor")),
            "`tensor` is already used by an earlier",
        ),
        (
            lambda: planned((8, 8), fsdp("fsdp", min_bytes=10**6)),
            "fewer than the 1000000",
        ),
        (lambda: planned((8, 8), P("tensro"), unmatched="replicate"), "no `tensro`"),
        (
            lambda: by_names((8,), ("emebd",), EMBED, unmatched="replicate"),
            "did you mean 'embed'?",
        ),
        (lambda: by_names((64,), (P.UNCONSTRAINED,), AxisRules([])), "gets: any"),
        (
            lambda: by_names((64,), ("embed",), SERVE, mode="serve"),
            "axes.modes['serve'][0]: embed -> tensor: applies",
        ),
        (
            lambda: by_names((6, 8), ("kv", "embed"), KV),
            "kv -> tensor: matches, and `tensor` is dropped",
        ),
        (lambda: by_names((6, 8), ("kv", "embed"), KV), "embed -> fsdp: applies"),
        (
            lambda: by_names((64, 64), ("embed", "mlp"), BOTH),
            "`tensor` went to dim 1 (`mlp`) by axes.rules[0]; the",
        ),
        (
            lambda: by_names((64, 64), ("embed", "mlp"), BOTH),
            "free mesh axes that cut it evenly: `fsdp` (4)",
        ),
        (
            lambda: planned((8, 8), P("tensor")).replace("w", P("fsdp")),
            "by replaced by hand",
        ),
        (lambda: sfx.plan({"w": leaf()}, MESH), "rank 0"),
        (lambda: planned((0, 8), P("tensor")), "bf16[0,8], 0 B"),
        (lambda: sfx.plan({"w": jax.random.key(0)}, MESH), "key"),
        (
            lambda: sfx.plan(
                {"w": leaf(8)},
                MESH,
                paths=PathRules([("a", sfx.optional(P())), ("w", P())]),
            ),
            "(the first that matches: rule 0 does not)",
        ),
    ],
)
def test_what_is_said(make_plan, text):
    assert text in str(explain(make_plan(), "w"))


sizes = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 32, 96])
entries = st.sampled_from(
    [None, "fsdp", "tensor", ("fsdp", "tensor"), ("tensor", "fsdp")]
)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(sizes, entries), min_size=1, max_size=3), st.booleans())
def test_the_numbers_are_those_of_the_plan(dims, spreads):
    target = P(*[entry for _, entry in dims])
    used = list(itertools.chain.from_iterable(map(entry_axes, target)))
    assume(len(set(used)) == len(used))
    if spreads:
        target = target | fsdp("fsdp")
    plan = planned(tuple(size for size, _ in dims), target)
    spec = [*entries_of(plan["w"].spec), *[None] * len(dims)]
    kept_axes = set(itertools.chain.from_iterable(map(entry_axes, spec)))
    for dim, asked in zip(explain(plan, "w").dims, dims, strict=True):
        actual = set(dim.kept) | set(dim.added)
        assert actual == set(entry_axes(spec[dim.dim]))
        assert dim.wanted == entry_axes(asked[1])
        expected = set(dim.kept) | set(dim.dropped)
        assert set(dim.wanted) == expected
        assert bool(dim.dropped) == bool(dim.reasons)
        product = math.prod(MESH.shape[axis] for axis in dim.wanted)
        for near in dim.sizes:
            assert near % product == 0
            assert 0 < abs(near - dim.size) < product
        for axis in dim.free:
            cut = (
                math.prod(
                    MESH.shape[entry_axis] for entry_axis in entry_axes(spec[dim.dim])
                )
                * MESH.shape[axis]
            )
            assert axis not in kept_axes
            assert dim.size % cut == 0


def test_a_regex_that_finds_one_group_will_do():
    layer = {
        "k_proj": {"weight": leaf(16, 8)},
        "v_proj": {"weight": leaf(16, 8), "bias": leaf(16)},
    }
    mesh = sfx.MeshSpec({"tensor": 4})
    rules = sfx.PathRules.parse(".*->tensor")
    plan = sfx.plan(
        {"layers": [layer] * 3},
        mesh,
        paths=rules,
    )
    assert sfx.explain(plan, "k_proj").leaf.path == "layers/0/k_proj/weight"
    assert sfx.explain(plan, "2/v_proj/w").leaf.path == "layers/2/v_proj/weight"
    for path, text in {
        "v_proj": "finds `layers/{0..2}/v_proj/bias` and `layers/{0..2}/v_proj/w",
        "q_proj": "the plan has no leaf `q_proj`",
        "k_proj(": "the plan has no leaf `k_proj(`",
        "layers/0/k_proj/weigth": "did you mean `layers/0/k_proj/weight`",
    }.items():
        with pytest.raises(sfx.errors.UnknownPathError, match=re.escape(text)):
            sfx.explain(plan, path)
    with pytest.raises(
        sfx.errors.UnknownPathError, match="did you mean `layers/0/k_proj/weight` or"
    ):
        plan["k_proj"]


def test_a_regex_says_which_layers_are_planned_in_another_way():
    layers = [{"w": leaf(16, 8)}, {"w": leaf(6, 8)}, {"w": leaf(16, 8)}]
    plan = sfx.plan(
        {"layers": layers},
        sfx.MeshSpec({"tensor": 4}),
        paths=sfx.PathRules.parse(".*->tensor"),
    )
    explanation = sfx.explain(plan, "w")
    assert explanation.others == ("layers/1/w", "layers/2/w")
    assert explanation.different == ("layers/1/w",)
    assert "the first of 3 arrays; planned in another way" in str(explanation)
    assert "by their paths: layers/1/w\n" in str(explanation)

    alike = plan.select("0|2")
    text = str(sfx.explain(alike, "w"))
    assert "the first of 2 arrays that are planned alike" in text
    assert "first of" not in str(sfx.explain(plan, "layers/0/w"))
