"""Results show in a console and in a notebook what `print` shows."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 4})
TREE = {
    f"w{name}": jax.ShapeDtypeStruct((8 * (1 + position), 8), jnp.float32)
    for position, name in enumerate("abcdefgh" * 8)
}
RULES = sfx.PathRules([(".*", P("data"))])
WHOLE = sfx.PathRules([(".*", sfx.replicate)])


def results():
    cut, whole = (sfx.plan(TREE, MESH, paths=rules) for rules in (RULES, WHOLE))
    yield sfx.plan_reshard(whole, cut)
    yield sfx.diff(whole, cut)
    yield sfx.explain(cut, "wa")
    yield sfx.cost.fit(cut, chip="v5e")
    many = {
        f"{letter}{path}/w": TREE[path]
        for letter, path in itertools.product("abcdefgh", TREE)
    }
    sharding_plan = sfx.plan(many, MESH, paths=RULES)
    yield sfx.diff(sharding_plan, sfx.plan(many, MESH, paths=WHOLE))


@pytest.mark.parametrize(
    "result", list(results()), ids=lambda item: type(item).__name__
)
def test_a_result_shows_what_print_shows(result):
    shown = repr(result).splitlines()
    printed = str(result).splitlines()
    assert len(shown) <= 40
    assert (
        shown == printed
        if len(printed) <= 40
        else shown[:39] == printed[:39] and "lines more" in shown[39]
    )
    assert result._repr_html_().startswith(("<table>", "<pre>", "<p>"))
    assert dataclasses.is_dataclass(result)
