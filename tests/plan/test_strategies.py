"""A new strategy needs one class: every function that takes strategies then takes it by
its name.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import (
    Code,
    MeshSpec,
    PathRules,
    ShardPlan,
    _rules,
    explain,
    follow,
    fsdp,
    lint,
    plan,
)
from shardfx.errors import RuleError, SpecError


MESH = MeshSpec({"data": 2, "fsdp": 4})
TREE = {"wide": jnp.ones((4, 16)), "odd": jnp.ones((8, 9)), "b": jnp.ones(16)}


class Largest(_rules.Strategy):
    """Shards the largest dimension, or none."""

    def open_dims(self, shape):
        return sorted(super().open_dims(shape), key=lambda dim: -shape[dim])[:1]


class Smallest(_rules.Strategy):
    """Shards the smallest free dimension that its axes divide."""

    def preference(self, size):
        return -size


largest, smallest = (
    ft.partial(_rules.strategy_of, name) for name in ("largest", "smallest")
)


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(_rules.STRATEGIES, "largest", Largest)
    monkeypatch.setitem(_rules.STRATEGIES, "smallest", Smallest)


def test_it_is_planned_alone_and_after_others():
    over = largest("fsdp", skip_dims=1)
    spec = P("data") | largest("fsdp")
    rules = PathRules([("wide", spec), ("b", over), (".*", over)])
    sharding_plan = plan(
        TREE,
        MESH,
        paths=rules,
    )
    expected = {
        "wide": P("data", "fsdp"),
        "odd": P("fsdp"),
        "b": P("fsdp"),
    }
    assert sharding_plan.specs == expected
    (why,) = plan(TREE, MESH, paths=PathRules.parse(".*->largest(fsdp)"))["odd"].reasons
    assert why.dim is None
    assert "9" in why.message


def test_it_prefers_dimensions():
    tree = {**TREE, "three": jnp.ones((8, 32, 16))}
    sharding_plan = plan(
        tree,
        MESH,
        paths=PathRules.parse("three->data|smallest(fsdp), .*->smallest(fsdp)"),
    )
    expected = {
        "three": P("data", None, "fsdp"),
        "wide": P("fsdp"),
        "odd": P("fsdp"),
        "b": P("fsdp"),
    }
    assert sharding_plan.specs == expected
    followed = follow(lambda tree: tree, sharding_plan, over=smallest("data"))
    spec = followed["three"].spec
    assert spec == P("data", None, "fsdp")


def test_it_is_read_from_text_and_from_json():
    rules = PathRules.parse("wide->data|largest(fsdp), .*->largest(data+fsdp)")
    sharding_plan = plan(TREE, MESH, paths=rules)
    assert ShardPlan.from_json(sharding_plan.to_json()) == sharding_plan
    assert sharding_plan["b"].strategies == (Largest(("data", "fsdp")),)
    other = plan(
        TREE, MESH, paths=PathRules.parse("wide->data|fsdp(fsdp), .*->fsdp(data+fsdp)")
    )
    assert other["b"].spec == sharding_plan["b"].spec
    assert other.digest != sharding_plan.digest


def test_what_reads_plans_calls_it_by_its_name():
    sharding_plan = plan(
        TREE, MESH, paths=PathRules.parse("odd->replicate, .*->largest(fsdp)")
    )
    assert "then largest(fsdp)" in str(explain(sharding_plan, "wide"))
    mesh = MeshSpec({"data": 1, "fsdp": 2})
    specs = sharding_plan.replan(mesh).specs
    actual = specs["wide"]
    assert actual == P(None, "fsdp")
    followed = follow(lambda tree: tree, sharding_plan, over=largest("data"))
    spec = followed["wide"].spec
    assert spec == P(None, ("fsdp", "data"))
    rules = PathRules([(".*", largest("fdsp", 64))])
    findings = lint(TREE, MESH, paths=rules)
    assert "largest('fsdp', 64)" in str(findings)


LIMITED = {"w": jnp.ones((64, 64)), "v": jnp.ones(8), "odd": jnp.ones((9, 3))}


def limited(limit: int, **others: Any) -> ShardPlan:
    target = fsdp(("data", "fsdp"), max_bytes=limit, **others)
    rules = PathRules([(".*", target)])
    return plan(LIMITED, MESH, paths=rules)


def test_max_bytes_adds_axes_until_the_shard_is_small():
    # The matrix has 16 KiB; `data` halves it, both axes make eight shards.
    assert limited(2**14)["w"].spec == P()
    assert limited(2**13)["w"].spec == P("data")
    spec = limited(2**13 - 1)["w"].spec
    assert spec == P(("data", "fsdp"))
    assert limited(0)["w"].spec == P(("data", "fsdp"))
    for limit in (2**11, 2**13, 2**14):
        assert limited(limit)["w"].reasons == ()


def test_an_array_above_max_bytes_has_a_reason():
    leaf = limited(1000)["w"]
    assert leaf.spec == P(("data", "fsdp"))
    assert [why.code for why in leaf.reasons] == [Code.large]
    codes = [why.code for why in limited(16)["odd"].reasons]
    assert codes == [Code.indivisible, Code.large]
    with pytest.raises(SpecError, match="2048 bytes of the array stay on each device"):
        rules = PathRules([(".*", fsdp(("data", "fsdp"), max_bytes=1000))])
        plan({"w": jnp.ones((64, 64))}, MESH, paths=rules, strict=True)


def test_max_bytes_is_kept_in_json_and_code_and_over_states():
    rules = limited(2**13, skip_dims=1)
    assert ShardPlan.from_json(rules.to_json()) == rules
    (strategy,) = rules["w"].strategies
    assert eval(strategy.code, {"fsdp": fsdp}) == strategy
    whole = plan(LIMITED, MESH, paths=PathRules([(".*", P())]))
    over = fsdp(("data", "fsdp"), max_bytes=2**13)
    state = follow(lambda tree: tree, whole, over=over)
    assert state["w"].spec == P("data")
    assert not state["w"].reasons
    assert state["v"].spec == P()
    assert not state["v"].reasons
    strategy = fsdp("data", max_bytes=2**13)
    with pytest.raises(RuleError, match="max_bytes=-1"):
        fsdp("data", max_bytes=-1)
    assert limited(2**13).digest != limited(2**12).digest
    assert strategy != fsdp("data")


@pytest.mark.parametrize(
    "number",
    [2**20, np.int64(2**20), jnp.int32(2**20), jnp.float32(2**20), np.array(2.0**20)],
)
def test_numbers_of_bytes_may_be_scalars_of_any_kind(number):
    strategy = fsdp("data", number, max_bytes=number)
    assert strategy == fsdp("data", 2**20, max_bytes=2**20)
    assert type(strategy.min_bytes) is type(strategy.max_bytes) is int
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    rules = PathRules([(".*", strategy)])
    sharding_plan = plan(tree, MeshSpec({"data": 8}), paths=rules)
    assert ShardPlan.from_json(sharding_plan.to_json()) == sharding_plan
    with pytest.raises(RuleError, match="give a number of bytes"):
        fsdp("data", jnp.ones(3))  # pyright: ignore
