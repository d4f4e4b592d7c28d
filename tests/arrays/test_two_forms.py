"""A planned tree has two forms: with the functions of its modules, and with `None` in
their place.
"""

import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfx import (
    MeshSpec,
    PathRules,
    ShardPlan,
    checkpoint,
    filter_jit,
    plan,
    plan_reshard,
    reshard,
    shard,
    specs_of,
)


MESH = MeshSpec({"data": 2, "tensor": 4})
ROWS = PathRules.parse("weight->tensor, .*->replicate")
COLUMNS = PathRules.parse("weight->None.tensor, .*->replicate")


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    act: object
    scale: jax.Array
    depth: int = 3

    def __init__(self):
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
        self.act = jax.nn.relu
        self.scale = jnp.ones(8)


def forms():
    whole = Net()
    return {"whole": whole, "arrays": eqx.partition(whole, eqx.is_array)[0]}


def planned(form, rules=ROWS):
    return plan(forms()[form], MESH.build(jax.devices()), paths=rules)


def same_form(out, tree):
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for leaf, two in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(leaf, two) if eqx.is_array(two) else leaf == two


FORMS = pytest.mark.parametrize(
    "of, form", [*it.product(["whole", "arrays"], repeat=2)]
)


@FORMS
def test_shard_and_reshard_give_back_the_form_they_got(of, form):
    tree = forms()[form]
    rows = planned(of)
    columns = planned(of, COLUMNS)
    placed = shard(tree, rows)
    same_form(placed, tree)
    weight = specs_of(placed).mlp.layers[0].weight
    assert weight == jax.P("tensor")
    moved = reshard(placed, columns)
    same_form(moved, tree)
    weight = specs_of(moved).mlp.layers[0].weight
    assert weight == jax.P(None, "tensor")
    traced = jax.jit(lambda tree: reshard(tree, columns, src=rows))(
        eqx.filter(placed, eqx.is_array)
    )
    weight = specs_of(traced).mlp.layers[0].weight
    assert weight == jax.P(None, "tensor")


def test_a_move_is_planned_between_plans_of_both_forms():
    moves = plan_reshard(planned("whole"), planned("arrays", COLUMNS))
    expected = [leaf.path for leaf in planned("whole").leaves]
    assert [leaf.path for leaf in moves.leaves] == expected


@FORMS
def test_save_and_load(of, form, tmp_path):
    tree = forms()[form]
    sharding_plan = planned(of)
    checkpoint.save(tmp_path / "first", shard(tree, sharding_plan), sharding_plan)
    loaded = checkpoint.load(tmp_path / "first", sharding_plan)
    same_form(loaded, forms()["arrays"])
    checkpoint.save(tmp_path / "again", loaded, sharding_plan)
    out = eqx.combine(checkpoint.load(tmp_path / "again", sharding_plan), Net())
    same_form(out, Net())


@FORMS
def test_filter_jit(of, form):
    tree = forms()[form]
    sharding_plan = planned(of)
    through = filter_jit(
        lambda tree: tree, in_shardings=(sharding_plan,), out_shardings=sharding_plan
    )
    same_form(through(tree), tree)
    same_form(through(shard(tree, sharding_plan)), tree)
    weight = specs_of(through(tree)).mlp.layers[0].weight
    assert weight == jax.P("tensor")


@FORMS
def test_a_plan_is_read_for_either_form(of, form):
    sharding_plan = plan(forms()[of], MESH, paths=ROWS)
    tree = forms()[form]
    again = ShardPlan.from_json(sharding_plan.to_json(), like=tree)
    structure = jax.tree.structure(again.shardings)
    assert structure == jax.tree.structure(sharding_plan.shardings)
    paths = [leaf.path for leaf in again.leaves]
    assert paths == [leaf.path for leaf in sharding_plan.leaves]
    assert (again.digest == sharding_plan.digest) == (of == form)
    assert again.digest == plan(tree, MESH, paths=ROWS).digest


def test_a_selected_part_of_a_plan_fits_both_forms():
    selected = planned("arrays").select("mlp")
    for tree in forms().values():
        placed = shard(tree, selected)
        same_form(placed, tree)
        assert len(placed.scale.sharding.device_set) == 1  # pyright: ignore[reportAttributeAccessIssue]
        assert specs_of(placed.mlp).layers[1].weight == jax.P("tensor")  # pyright: ignore[reportAttributeAccessIssue, reportMissingModuleSource]
