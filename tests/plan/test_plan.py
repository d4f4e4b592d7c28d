import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from shardfx import AxisRules, Code, MeshSpec, PathRules, ShardPlan, fsdp, plan
from shardfx.errors import SpecError


MESH = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
AXES = AxisRules(
    [
        ("batch", ("data", "fsdp")),
        ("embed", "fsdp"),
        ("mlp", "tensor"),
        ("heads", "tensor"),
    ]
)
# JAX will hold the NumPy array as float32.
TREE = {
    "w": jnp.ones((8, 16)),
    "b": np.ones(16),
    "step": jnp.zeros((), jnp.int32),
    "act": jnp.tanh,
    "none": None,
}
RULES = PathRules([("w", P("fsdp", "tensor")), ("b", P("tensor"))])


def test_a_plan_of_paths():
    sharding_plan = plan(TREE, MESH, paths=RULES)
    expected = {
        "w": P("fsdp", "tensor"),
        "b": P("tensor"),
        "step": P(),
        "act": None,
        "none": None,
    }
    assert sharding_plan.specs == expected
    leaf = sharding_plan["w"]
    assert leaf.shape == (8, 16)
    assert leaf.dtype == jnp.float32
    assert leaf.bytes == 512
    assert leaf.bytes_per_device == 128
    assert leaf.rule == "paths[0] w"
    assert leaf.reasons == ()
    assert sharding_plan["b"].dtype == jnp.float32
    codes = [why.code for why in sharding_plan["step"].reasons]
    assert codes == [Code.scalar]
    assert sharding_plan.bytes_total == 512 + 64 + 4
    assert sharding_plan.bytes_per_device == 128 + 32 + 4
    paths = [leaf.path for leaf in sharding_plan.leaves]
    assert paths == ["b", "step", "w"]
    assert (
        repr(sharding_plan)
        == "ShardPlan(3 arrays, mesh data=2,fsdp=2,tensor=2, 580 bytes, 164 per device)"
    )


def test_shardings_and_structs_lie_on_the_mesh_that_there_is():
    abstract = plan(TREE, MESH, paths=RULES)
    assert isinstance(abstract.shardings["w"].mesh, AbstractMesh)
    assert abstract.jax_mesh is None
    assert abstract.structs["w"].sharding == abstract.shardings["w"]
    mesh = MESH.build(jax.devices())
    concrete = plan(TREE, mesh, paths=RULES)
    assert concrete.jax_mesh is mesh
    assert concrete.shardings["w"].mesh is mesh
    assert abstract.on(mesh) == concrete
    assert abstract != concrete
    assert abstract.digest == concrete.digest
    assert concrete.off() == abstract == concrete.off().off()
    assert concrete.off().jax_mesh is None


def test_names_win_over_paths_and_none_leaves_them_the_choice():
    rules = PathRules([("b", P("tensor")), ("step", ()), ("v", ("mlp", "embed"))])
    names = {
        **dict.fromkeys(TREE),
        "w": ("mlp", None),
        "step": (),
        "v": None,
    }
    sharding_plan = plan(
        {**TREE, "v": TREE["w"]},
        MESH,
        paths=rules,
        names=names,
        axes=AXES,
        unused="allow",
    )
    assert sharding_plan["w"].spec == P("tensor")
    assert sharding_plan["w"].rule == "names"
    assert sharding_plan["w"].names == ("mlp", None)
    assert sharding_plan["b"].spec == P("tensor")
    assert sharding_plan["b"].rule == "paths[0] b"
    assert sharding_plan["step"].spec == P()
    assert sharding_plan["v"].spec == P("tensor", "fsdp")
    assert sharding_plan["v"].names == ("mlp", "embed")


def test_a_tuple_of_arrays_has_names_for_each_array():
    mesh = MeshSpec({"data": 4})
    axes = AxisRules([("batch", "data"), ("embed", None)])
    batch = (jnp.ones((8, 4)), jnp.ones(8))
    names = (("batch", "embed"), ("batch",))
    rows = plan(batch, mesh, names=names, axes=axes)
    assert rows.specs == (P("data"), P("data"))
    below = plan({"x": batch}, mesh, names={"x": names}, axes=axes)
    assert below.specs == {"x": rows.specs}
    # The names of one array are those of each array.
    pair = plan((jnp.ones(8), jnp.ones(8)), mesh, names=("batch",), axes=axes)
    assert pair.specs == rows.specs
    with pytest.raises(SpecError, match="leaf `0` has shape"):
        plan(batch, mesh, names=("batch",), axes=axes)


def test_names_may_be_a_prefix_of_the_tree():
    tree = {
        "a": {"x": jnp.ones((4, 4)), "y": jnp.ones((4, 4))},
        "b": (jnp.ones((4,)), jnp.ones((4,))),
    }
    names = {"a": ("embed", "mlp"), "b": (("mlp",), ("embed",))}
    sharding_plan = plan(
        tree,
        MESH,
        names=names,
        axes=AXES,
    )
    expected = {
        "a": {"x": P("fsdp", "tensor"), "y": P("fsdp", "tensor")},
        "b": (P("tensor"), P("fsdp")),
    }
    assert sharding_plan.specs == expected
    names = (("embed", "mlp"), ("mlp", "embed"))
    pair = plan(
        (TREE["w"], TREE["w"]),
        MESH,
        names=names,
        axes=AXES,
    )
    expected = (P("fsdp", "tensor"), P("tensor", "fsdp"))
    assert pair.specs == expected


def test_strategies_refine_what_comes_before_them():
    rules = PathRules(
        [
            ("w", ("embed", None) | fsdp("fsdp") | fsdp("data")),
            ("b", P("fsdp") | fsdp("data")),
        ]
    )
    sharding_plan = plan({"w": TREE["w"], "b": TREE["b"]}, MESH, paths=rules, axes=AXES)
    assert sharding_plan["w"].spec == P("fsdp", "data")
    codes = [why.code for why in sharding_plan["w"].reasons]
    assert codes == [Code.duplicate]
    (taken,) = sharding_plan["b"].reasons
    assert taken.message.startswith(
        "no dimension is free for `data` (2): all that may be cut are sharded already"
    )


def test_equal_plans_share_a_trace_and_different_meshes_do_not():
    sharding_plan = plan(TREE, MESH, paths=RULES)
    traces = []
    run = jax.jit(lambda output, x: traces.append(output))
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    cases = (devices, devices[::-1])
    others = [sharding_plan.on(Mesh(order, MESH.axis_names)) for order in cases]
    restored = ShardPlan.from_json(sharding_plan.to_json(), like=TREE)
    for plan_copy in (
        sharding_plan,
        ShardPlan.from_json(sharding_plan.to_json()),
        restored,
        *others,
    ):
        run(plan_copy, 1.0)
    assert traces == [sharding_plan, *others]


def test_a_planned_size_below_its_unit_counts_units_again():
    axes = AxisRules([("heads", "tensor")], units={"heads": 128})
    mesh = MeshSpec({"tensor": 4})
    tree = {"scale": jnp.ones(8)}
    names = {"scale": ("heads",)}
    sharding_plan = plan(tree, mesh, names=names, axes=axes)
    assert sharding_plan["scale"].spec == P("tensor")
    assert sharding_plan.sharding(("heads",), (8,)).spec == P("tensor")
