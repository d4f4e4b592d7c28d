"""What is no sharding, and shardings on several sets of devices, at the boundary of `filter_jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, PlanMismatchError, filter_jit


AXES = AxisRules([("batch", "data"), ("mlp", "tensor")])
RULES = PathRules([("w", P("data", "tensor"))])
TREE = {"w": np.arange(32.0, dtype=np.float32).reshape(4, 8)}


@pytest.fixture(scope="module")
def plans():
    spec = MeshSpec({"data": 2, "tensor": 2})
    sides = jax.devices()[:4], jax.devices()[4:], jax.devices()[3::-1]
    meshes = [jax.sharding.Mesh(np.array(side).reshape(2, 2), spec.axis_names) for side in sides]
    return [sfx.plan(TREE, mesh, paths=RULES, axes=AXES) for mesh in meshes]


@pytest.mark.parametrize("names", [("batch", None), ["batch", ...], "batch"])
def test_logical_names_are_no_sharding(plans, names):
    with pytest.raises(PlanMismatchError, match=r"`in_shardings` holds logical names, .*`plan.sharding\(\('batch',"):
        filter_jit(lambda tree, x: x, in_shardings=(plans[0], names))
    with pytest.raises(PlanMismatchError, match="`out_shardings` holds logical names"):
        filter_jit(lambda x: x, out_shardings={"y": names})


@pytest.mark.parametrize("what", ["axes", "mesh", "jax_mesh", "leaves", "structs"])
def test_what_is_no_sharding(plans, what):
    given = getattr(plans[0], what)
    with pytest.raises(PlanMismatchError, match="`in_shardings` holds a value of type .*, which is no sharding; give"):
        filter_jit(lambda x: x, in_shardings=(given,))


def test_plans_on_several_meshes_are_named(plans):
    here, there, _ = plans
    both = filter_jit(lambda a, b: a["w"] + b["w"], in_shardings=(here, there))
    with pytest.raises(
        PlanMismatchError,
        match=r"`in_shardings` for argument 1 of .* is on devices \[4, 5, 6, 7\], and .* for argument 0 .* is on "
        r"devices \[0, 1, 2, 3\]; .*give each a function of its own, and `reshard` between them",
    ):
        both(TREE, TREE)
    with pytest.raises(PlanMismatchError, match=r"`out_shardings` of .* is on devices \[4, 5, 6, 7\], and"):
        filter_jit(lambda a: a, in_shardings=(here,), out_shardings=there)(TREE)
    inside = filter_jit(lambda a: sfx.shard(a, there), in_shardings=(here,))
    with pytest.raises(PlanMismatchError, match="a `constrain` or `shard` inside it is for others; use plans on one"):
        inside(TREE)


@pytest.mark.parametrize("other", [1, 2])
def test_an_array_on_other_devices_than_its_entry_is_not_moved(plans, other):
    """JAX moves one that would be cut alike at the first call; at the second the runtime fails, or crashes."""
    step = filter_jit(lambda tree: tree, in_shardings=(plans[0],))
    there = sfx.shard(TREE, plans[other])
    for given in (there, sfx.shard(TREE, plans[0]), there):
        if given is there:
            with pytest.raises(PlanMismatchError, match=r"`w` of argument 0 .* lies on devices \[(4|3)"):
                step(given)
        else:
            assert np.array_equal(step(given)["w"], TREE["w"])
    # What is on no devices yet, or on none of its own choice, goes where the entry says.
    for given in (TREE, {"w": jnp.asarray(TREE["w"])}):
        assert step(given)["w"].sharding == plans[0].shardings["w"]


def test_an_array_that_lies_otherwise_than_its_entry_is_named(plans):
    other = jax.device_put(TREE["w"], NamedSharding(plans[0].jax_mesh, P("tensor")))
    with pytest.raises(PlanMismatchError, match=r"`w` of argument 0 .* lies by .*\('tensor',?\).*`in_shardings` is"):
        filter_jit(lambda tree: tree, in_shardings=(plans[0],))({"w": other})
