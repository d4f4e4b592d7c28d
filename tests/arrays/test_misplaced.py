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
    """The tree with other leaves in its last layer."""
    *first_layers, last_layer = tree["layers"]
    return {"layers": [*first_layers, {**last_layer, **leaves}]}


def test_nothing_is_misplaced_where_the_plan_put_it(plan):
    misplaced = sfx.misplaced(sfx.shard(TREE, plan), plan)
    assert not misplaced
    assert str(misplaced) == "every array lies as the plan says"


def test_equal_layouts_under_other_names_are_not_misplaced(plan):
    placed = sfx.shard(TREE, plan)
    devices = np.array(jax.devices())
    cube = Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))
    rows = devices.reshape(2, 4)
    flipped_mesh = Mesh(rows[::-1], ("data", "fsdp"))
    rotated_devices = np.roll(devices, 1)
    rotated_mesh = Mesh(rotated_devices.reshape(2, 4), ("data", "fsdp"))
    for sharding, is_right in (
        (NamedSharding(cube, P(("b", "c"))), True),
        (NamedSharding(flipped_mesh, P("fsdp")), True),
        (NamedSharding(rotated_mesh, P("fsdp")), False),
    ):
        w = jax.device_put(jnp.ones((8, 4)), sharding)
        moved = changed(placed, w=w)
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
    tree["layers"][0] = {"w": jnp.ones((8, 5)), "b": np.ones(4, np.float32)}
    del tree["layers"][1]["b"]
    rows = {row.path: row for row in sfx.misplaced(tree, plan)}
    actual = {}
    for path, row in rows.items():
        actual[path] = (row.asked, row.found, row.excess_bytes)
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
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), placed)
    actual = {row.found for row in sfx.misplaced(narrow, plan)}
    assert actual == {"bf16[8,4] fsdp", "bf16[4] -"}
    memory_kinds = [("w", "pinned_host")]
    hosted = sfx.plan(TREE, plan.jax_mesh, paths=RULES, memory_kinds=memory_kinds)
    assert not sfx.misplaced(sfx.shard(TREE, hosted), hosted)
    first, *_ = sfx.misplaced(placed, hosted)
    assert first.asked == "f32[8,4] fsdp in pinned_host"


def test_the_table_joins_arrays_that_are_alike(plan):
    tree = jax.device_put(TREE, NamedSharding(plan.jax_mesh, P()))
    _, *lines = str(sfx.misplaced(tree, plan)).splitlines()
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
    whole = NamedSharding(mesh, P())
    counts = []

    def count_misplaced(tree):
        counts.append(len(sfx.misplaced(tree, explicit)))

    @jax.jit
    def step(tree):
        count_misplaced(tree)
        turned = jax.tree.map(jnp.transpose, tree)
        turned_back = jax.tree.map(jnp.transpose, turned)
        count_misplaced(turned_back)
        gathered = jax.tree.map(lambda x: jax.sharding.reshard(x, whole), tree)
        count_misplaced(gathered)
        return tree

    step(sfx.shard(TREE, explicit))
    assert counts == [0, 0, 3]
    on_auto_axes = jax.jit(
        lambda tree: sfx.misplaced(tree, plan) or tree,
        in_shardings=(plan.shardings,),
    )
    with pytest.raises(
        sfx.errors.LeafTypeError, match="is traced on a mesh with the Auto axes"
    ):
        on_auto_axes(sfx.shard(TREE, plan))
