"""Arrays that do not lie as their plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import shardfx as sfx


TREE = {"layers": [{"w": jnp.ones((8, 4)), "b": jnp.ones(4)} for _ in range(3)]}
RULES = sfx.PathRules.parse("w->fsdp, b->replicate")


@pytest.fixture
def plan():
    axes = {"data": 2, "fsdp": 4}
    mesh = sfx.MeshSpec(axes).build(jax.devices())
    return sfx.plan(TREE, mesh, paths=RULES)


def changed(tree, **leaves):
    return {"layers": [*tree["layers"][:2], {**tree["layers"][2], **leaves}]}


def test_nothing_is_misplaced_where_the_plan_put_it(plan):
    misplaced = sfx.misplaced(sfx.shard(TREE, plan), plan)
    assert not misplaced
    assert str(misplaced) == "every array lies as the plan says"


def test_equal_layouts_under_other_names_are_not_misplaced(plan):
    placed = sfx.shard(TREE, plan)
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))
    renamed = NamedSharding(mesh, P(("b", "c")))
    mesh = Mesh(devices.reshape(2, 4)[::-1], ("data", "fsdp"))
    flipped = NamedSharding(mesh, P("fsdp"))
    mesh = Mesh(np.roll(devices, 1).reshape(2, 4), ("data", "fsdp"))
    rotated = NamedSharding(mesh, P("fsdp"))
    for sharding, is_right in ((renamed, True), (flipped, True), (rotated, False)):
        layers = TREE["layers"][0]["w"]
        moved = changed(placed, w=jax.device_put(layers, sharding))
        assert bool(sfx.misplaced(moved, plan)) != is_right
    assert not sfx.misplaced(placed, plan.off())


def test_every_kind_of_mistake_is_a_row(plan):
    placed = sfx.shard(TREE, plan)
    whole = NamedSharding(plan.jax_mesh, P())
    tree = changed(
        placed,
        w=jax.device_put(jnp.ones((8, 4)), whole),
        extra=jax.device_put(jnp.ones(2), whole),
    )
    del tree["layers"][0]
    tree["layers"].insert(0, {"w": jnp.ones((8, 5)), "b": np.ones(4, np.float32)})
    del tree["layers"][1]["b"]
    rows = {row.path: row for row in sfx.misplaced(tree, plan)}
    actual = {
        path: (row.asked, row.found, row.excess_bytes) for path, row in rows.items()
    }
    expected = {
        "layers/0/w": ("f32[8,4] fsdp", "f32[8,5] on 1 device", 160 - 32),
        "layers/0/b": ("f32[4] -", "f32[4] on no device", 0),
        "layers/1/b": ("f32[4] -", "nothing", 0),
        "layers/2/w": ("f32[8,4] fsdp", "f32[8,4] -", 128 - 32),
        "layers/2/extra": ("nothing", "f32[2] -", 8),
    }
    assert actual == expected
    assert "shard(tree, plan)" in rows["layers/2/w"].fix
    assert "plan the tree" in rows["layers/0/w"].fix


def test_dtypes_and_memory_kinds_count(plan):
    placed = sfx.shard(TREE, plan)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), placed)
    actual = {row.found for row in sfx.misplaced(low, plan)}
    assert actual == {
        "bf16[8,4] fsdp",
        "bf16[4] -",
    }
    memory_kinds = [("w", "pinned_host")]
    hosted = sfx.plan(TREE, plan.jax_mesh, paths=RULES, memory_kinds=memory_kinds)
    assert not sfx.misplaced(sfx.shard(TREE, hosted), hosted)
    first, *_ = sfx.misplaced(placed, hosted)
    assert first.asked == "f32[8,4] fsdp in pinned_host"


def test_the_table_joins_arrays_that_are_alike(plan):
    tree = jax.device_put(TREE, NamedSharding(plan.jax_mesh, P()))
    text = str(sfx.misplaced(tree, plan))
    lines = text.splitlines()[1:]
    assert lines == [
        (
            "layers/{0..2}/w  f32[8,4] fsdp  f32[8,4] -     288 B  `shard(tree, plan)`,"
            " and keep it with `filter_jit(step, out_shardings=plan)`"
        ),
        "3 arrays misplaced, 288 B too much on each device",
    ]


def test_traced_arrays_are_checked_by_type(plan):
    mesh_spec = sfx.MeshSpec(plan.mesh.shape, axis_types=AxisType.Explicit)
    mesh = mesh_spec.build(jax.devices())
    explicit = sfx.plan(TREE, mesh, paths=RULES)
    calls = []
    whole = NamedSharding(mesh, P())

    def step(tree):
        calls.append(sfx.misplaced(tree, explicit))
        turned = jax.tree.map(lambda x: x.T, tree)
        calls.append(sfx.misplaced(jax.tree.map(lambda x: x.T, turned), explicit))
        calls.append(
            sfx.misplaced(
                jax.tree.map(lambda x: jax.sharding.reshard(x, whole), tree), explicit
            )
        )
        return tree

    jax.jit(step)(sfx.shard(TREE, explicit))
    assert [len(rows) for rows in calls] == [0, 0, 3]
    with pytest.raises(
        sfx.errors.LeafTypeError, match="is traced on a mesh with the Auto axes"
    ):
        jax.jit(
            lambda tree: sfx.misplaced(tree, plan) or tree,
            in_shardings=(plan.shardings,),
        )(sfx.shard(TREE, plan))
