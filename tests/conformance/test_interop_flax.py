from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import meta, spmd
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import AxisRules, MeshSpec, PathRules, plan, resolve, shard
from shardfx.errors import RuleError, SpecError
from shardfx.interop import flax as interop
from tests.specs import canonical


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
RULES = AxisRules([("embed", "fsdp"), ("mlp", "tensor")])
NAMES = st.sampled_from(["a", "b", "c", "d"])
AXES = st.sampled_from(["x", "y", "z", "w"])
PAIRS = st.lists(st.tuples(NAMES, st.one_of(AXES, st.none())), max_size=6)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        kernel_init = nn.with_logical_partitioning(init, ("embed", "mlp"))
        x = nn.Dense(8, kernel_init=kernel_init)(x)
        kernel_init = nn.with_logical_partitioning(init, ("mlp", "embed"))
        return nn.Dense(4, kernel_init=kernel_init)(x)


def boxed_mlp():
    return jax.eval_shape(Mlp().init, jax.random.key(0), jnp.ones((2, 4)))


def nnx_mlp():
    metadata = {"out_sharding": ("embed", "mlp"), "eager_sharding": False}
    return nnx.eval_shape(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_metadata=metadata)
    )


# --- linen


def test_names_of_linen_variables_and_what_flax_unboxes():
    cases = (("embed", "mlp"), ("mlp", "embed"))
    dense = [{"bias": (), "kernel": names} for names in cases]
    boxed = boxed_mlp()
    params = interop.names_of(boxed, default=())["params"]
    assert params == {
        "Dense_0": dense[0],
        "Dense_1": dense[1],
    }
    assert interop.unboxed(boxed) == meta.unbox(boxed)
    # Arrays without names can be left to path rules.
    paths = PathRules([("bias", P("tensor"))])
    sharding_plan = plan(
        interop.unboxed(boxed),
        MESH,
        names=interop.names_of(boxed),
        axes=RULES,
        paths=paths,
    )
    assert sharding_plan["params/Dense_0/bias"].spec == P("tensor")
    assert sharding_plan["params/Dense_1/kernel"].spec == P("tensor", "fsdp")


@pytest.mark.parametrize(
    "reading", [interop.unboxed, lambda tree: tree], ids=["unboxed", "boxed"]
)
def test_linen_variables_are_initialised_sharded_under_a_plan(reading):
    mesh = MESH.build(jax.devices())
    boxed = boxed_mlp()
    names = interop.names_of(boxed, default=())
    sharding_plan = plan(reading(boxed), mesh, names=names, axes=RULES)
    init = jax.jit(
        lambda key: reading(Mlp().init(key, jnp.ones((2, 4)))),
        out_shardings=sharding_plan.shardings,
    )
    params = interop.unboxed(init(jax.random.key(0)))["params"]
    kernel = params["Dense_0"]["kernel"]
    assert kernel.sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    params = meta.unbox(Mlp().init(jax.random.key(0), jnp.ones((2, 4))))["params"]
    plain = params["Dense_0"]["kernel"]
    assert jnp.array_equal(kernel, plain)


def bridged():
    """An nnx layer inside a linen model: its variables come in boxes of their own."""
    init = nnx.with_partitioning(
        nnx.initializers.lecun_normal(),
        ("embed", "mlp"),
        sharding_rules=(("mlp", "tensor"),),
    )
    layer = nnx.bridge.to_linen(
        nnx.Linear, 4, 8, kernel_init=init, kernel_metadata={"eager_sharding": False}
    )
    return layer, jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 4)))


def test_bridged_layers_keep_their_names_and_rules():
    layer, boxed = bridged()
    expected = {"params": {"kernel": ("embed", "mlp"), "bias": ()}}
    assert interop.names_of(boxed, default=()) == expected
    assert interop.rules_of(boxed) == AxisRules([("mlp", "tensor")])
    rules = interop.composite_rules(interop.rules_of(boxed), [("embed", "fsdp")])
    names = interop.names_of(boxed, default=())
    sharding_plan = plan(
        interop.unboxed(boxed), MESH, names=names, axes=rules, strict=True
    )
    assert sharding_plan["params/kernel"].spec == P("fsdp", "tensor")
    assert sharding_plan["params/bias"].spec == P()
    # Flax reads only the rules that the box itself carries.
    kernel = nn.get_partition_spec(boxed)["params"]["kernel"]
    assert kernel == P("embed", "tensor")
    placed = sharding_plan.on(MESH.build(jax.devices()))
    init = jax.jit(
        lambda key: interop.unboxed(layer.init(key, jnp.ones((2, 4)))),
        out_shardings=placed.shardings,
    )
    kernel = init(jax.random.key(0))["params"]["kernel"]
    sharding = kernel.sharding
    assert sharding == placed.shardings["params"]["kernel"]


# --- nnx


def test_nnx_states_are_planned_and_sharded():
    mesh = MESH.build(jax.devices())
    state = nnx.state(nnx_mlp())
    names = interop.names_of(state, default=())
    sharding_plan = plan(state, mesh, names=names, axes=RULES)
    assert sharding_plan["kernel/value"].spec == P("fsdp", "tensor")
    assert sharding_plan["bias/value"].spec == P()
    arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), state)
    placed = shard(arrays, sharding_plan)
    kernel: Any = placed["kernel"]
    assert kernel.get_value().sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    doubled = jax.jit(
        lambda state: jax.tree.map(lambda x: 2 * x, state),
        out_shardings=sharding_plan.shardings,
    )(placed)
    assert isinstance(doubled["kernel"], nnx.Param)
    assert float(doubled["kernel"].get_value()[0, 0]) == 2


@pytest.mark.parametrize(
    "sharding",
    [
        ("embed", "mlp"),
        ["embed", "mlp"],
        P("embed", "mlp"),
        NamedSharding(MESH.abstract(), P("fsdp", "tensor")),
    ],
)
def test_every_kind_of_out_sharding_is_read(sharding):
    variable = lambda arguments: {
        "w": nnx.Param(jnp.ones((4, 8)), out_sharding=arguments, eager_sharding=False)
    }
    names = interop.names_of(variable(sharding))["w"]
    if isinstance(sharding, NamedSharding):
        axes = ("fsdp", "tensor")
    else:
        axes = ("embed", "mlp")
    # A PartitionSpec says nothing of the dimensions beyond its end, a tuple of names
    # has one for each.
    if isinstance(sharding, tuple | list):
        expected = axes
    else:
        expected = (*axes, ...)
    assert names == expected
    with pytest.raises(
        SpecError,
        match="the sharding 'embed' of a flax variable has no names; give it a tuple",
    ):
        interop.names_of(variable("embed"))


def test_reading_a_box_changes_nothing():
    # B89: flax's `to_nnx_metadata` takes the names out of the box that it reads.
    box = nn.LogicallyPartitioned(jnp.ones(4), ("embed",))
    for _ in range(2):
        names = interop.names_of({"w": box})
        assert names == {"w": ("embed",)}
        assert interop.rules_of({"w": box}) == AxisRules()
    # B89: flax's boxes are equal whatever their names are; plans are not.
    other = nn.LogicallyPartitioned(box.value, ("mlp",))
    plans = [plan(x, MESH, names=interop.names_of(x), axes=RULES) for x in (box, other)]
    assert plans[0] != plans[1]


# --- rules


def test_rules_of_boxes_and_variables_are_merged():
    tree = {
        "a": nn.LogicallyPartitioned(
            jnp.ones(4), ("embed",), rules=(("embed", "fsdp"),)
        ),
        "b": nnx.Param(
            jnp.ones(4),
            out_sharding=("mlp",),
            sharding_rules=(("mlp", "tensor"),),
            eager_sharding=False,
        ),
        "c": nn.Partitioned(jnp.ones(4), ("fsdp",)),
        "d": jnp.ones(4),
    }
    assert interop.rules_of(tree) == RULES
    names = interop.names_of(tree, default=())
    axes = interop.core_rules(interop.rules_of(tree), MESH)
    sharding_plan = plan(
        interop.unboxed(tree),
        MESH,
        names=names,
        axes=axes,
    )
    expected = [
        P("fsdp"),
        P("tensor"),
        P("fsdp"),
        P(),
    ]
    assert [leaf.spec for leaf in sharding_plan.leaves] == expected
    rules = (("embed", "tensor"),)
    other = nn.LogicallyPartitioned(jnp.ones(4), ("embed",), rules=rules)
    with pytest.raises(RuleError, match="`merge`: rules map 'embed' to"):
        interop.rules_of({**tree, "d": other})


@given(PAIRS, st.lists(st.one_of(NAMES, AXES), unique=True, max_size=4))
@settings(deadline=None, max_examples=200)
def test_last_wins_and_keep_equal_flax_core(pairs, names):
    rules = [(name, axis) for name, axis in pairs]
    expected = spmd.from_sharding_rules(tuple(names), rules)
    used = [axis for axis in expected if axis is not None]
    # B80: flax gives one axis to two dimensions, here the first of the rules has it.
    if len(set(used)) < len(used):
        return
    mesh = MeshSpec(dict.fromkeys(("x", "y", "z", "w", "a", "b", "c", "d"), 1))
    resolved = resolve(names, AxisRules.last_wins(rules), unmatched="keep")
    for decision in (resolved, resolve(names, interop.core_rules(rules, mesh))):
        assert decision.spec == canonical(P(*expected))
        assert not decision.reasons


@given(PAIRS, PAIRS)
@settings(deadline=None, max_examples=200)
def test_composite_rules_is_flaxs_where_no_name_occurs_twice(one, two):
    one = list(dict(one).items())
    two = list(dict(two).items())
    try:
        expected = spmd.composite_rules(one, two)
    except ValueError:
        with pytest.raises(RuleError, match="`merge`: rules map"):
            interop.composite_rules(one, two)
        return
    assert interop.composite_rules(one, two).rules == tuple(expected)


def test_flax_rules_keep_modes_units_and_aliases():
    assert interop.composite_rules(None, None) == AxisRules()
    actual = interop.composite_rules({"embed": "fsdp"}, AxisRules({"mlp": "tensor"}))
    assert actual == RULES
    # A rule may rename an axis.
    decision = resolve(("fsdp",), interop.core_rules({"fsdp": "tensor"}, MESH))
    spec = decision.spec
    assert spec == P("tensor")
    modes = {"decode": {"a": None}}
    rules = AxisRules({"a": "x"}, modes=modes, units={"a": 2}, aliases={"b": "a"})
    mesh = MeshSpec({"y": 1, "a": 1})
    actual = interop.core_rules(rules, mesh)
    assert actual == rules.prepend({"y": "y"})


# --- axes that come and go


@given(
    st.lists(NAMES, unique=True, max_size=4).map(tuple),
    st.integers(-5, 6),
    st.one_of(st.none(), st.just("layers")),
)
def test_remove_axis_undoes_add_axis(names, index, name):
    # B88: flax inserts -1 before the last one.
    if len(names) + 1 + index < 0:
        with pytest.raises(SpecError, match="lies before the first dimension"):
            interop.add_axis(names, index, name)
        return
    added = interop.add_axis(names, index, name)
    assert added[index] == name
    assert len(added) == max(len(names), index) + 1
    assert interop.remove_axis(added, index, name) == names


@pytest.mark.parametrize(
    ("index", "name"), [(0, "zz"), (2, "in"), (-3, "in"), (1, None)]
)
def test_remove_axis_checks_what_it_removes(index, name):
    with pytest.raises(
        SpecError, match=r"`remove_axis\(\('in', 'out'\), .*has no such name"
    ):
        interop.remove_axis(("in", "out"), index, name)
