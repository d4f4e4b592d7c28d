"""A new strategy needs one class: every function that takes strategies then takes it by
its name.
"""

import functools as ft

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, explain, follow, lint, plan
from shardfx._rules import STRATEGIES, Strategy, strategy_of


MESH = MeshSpec({"data": 2, "fsdp": 4})
TREE = {"wide": jnp.ones((4, 16)), "odd": jnp.ones((8, 9)), "b": jnp.ones(16)}


class Largest(Strategy):
    """Shards the largest dimension, or none."""

    def open_dims(self, shape):
        return sorted(super().open_dims(shape), key=lambda dim: -shape[dim])[:1]


class Smallest(Strategy):
    """Shards the smallest free dimension that its axes divide."""

    def preference(self, size):
        return -size


largest, smallest = (ft.partial(strategy_of, name) for name in ("largest", "smallest"))


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "largest", Largest)
    monkeypatch.setitem(STRATEGIES, "smallest", Smallest)


def test_it_is_planned_alone_and_after_others():
    over = largest("fsdp", skip_dims=1)
    made = plan(
        TREE,
        MESH,
        paths=PathRules(
            [("wide", P("data") | largest("fsdp")), ("b", over), (".*", over)]
        ),
    )
    assert made.specs == {"wide": P("data", "fsdp"), "odd": P("fsdp"), "b": P("fsdp")}
    (why,) = plan(TREE, MESH, paths=PathRules.parse(".*->largest(fsdp)"))["odd"].reasons
    assert why.dim is None and "9" in why.message


def test_it_prefers_dimensions():
    tree = {**TREE, "three": jnp.ones((8, 32, 16))}
    made = plan(
        tree,
        MESH,
        paths=PathRules.parse("three->data|smallest(fsdp), .*->smallest(fsdp)"),
    )
    assert made.specs == {
        "three": P("data", None, "fsdp"),
        "wide": P("fsdp"),
        "odd": P("fsdp"),
        "b": P("fsdp"),
    }
    assert follow(lambda tree: tree, made, over=smallest("data"))["three"].spec == P(
        "data", None, "fsdp"
    )


def test_it_is_read_from_text_and_from_json():
    rules = PathRules.parse("wide->data|largest(fsdp), .*->largest(data+fsdp)")
    made = plan(TREE, MESH, paths=rules)
    assert ShardPlan.from_json(made.to_json()) == made
    assert made["b"].strategies == (Largest(("data", "fsdp")),)
    other = plan(
        TREE, MESH, paths=PathRules.parse("wide->data|fsdp(fsdp), .*->fsdp(data+fsdp)")
    )
    assert other["b"].spec == made["b"].spec and other.digest != made.digest


def test_what_reads_plans_calls_it_by_its_name():
    made = plan(TREE, MESH, paths=PathRules.parse("odd->replicate, .*->largest(fsdp)"))
    assert "then largest(fsdp)" in str(explain(made, "wide"))
    assert made.replan(MeshSpec({"data": 1, "fsdp": 2})).specs["wide"] == P(
        None, "fsdp"
    )
    assert follow(lambda tree: tree, made, over=largest("data"))["wide"].spec == P(
        None, ("fsdp", "data")
    )
    found = lint(TREE, MESH, paths=PathRules([(".*", largest("fdsp", 64))]))
    assert "largest('fsdp', 64)" in str(found)
