"""What works on arrays inside a traced function, where nothing can be put anywhere:
constraints, constants, reasons.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfx import (
    AxisRules,
    Code,
    Decision,
    MeshSpec,
    PathRules,
    constrain,
    gather,
    plan,
    shard,
)
from shardfx.errors import LeafTypeError, PlanMismatchError, SpecError


SIZES = {"data": 2, "tensor": 4}
AXES = AxisRules([("batch", "data"), ("mlp", "tensor")])
RULES = PathRules([("w", P("data", "tensor")), ("b", P("tensor"))])
TREE = {
    "w": np.arange(128.0, dtype=np.float32).reshape(8, 16),
    "b": np.ones(16, np.float32),
    "act": jnp.tanh,
}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def made_for(kind: AxisType, **kwargs):
    mesh = MeshSpec(SIZES, axis_types=kind).build(jax.devices())
    return plan(TREE, mesh, paths=RULES, axes=AXES, **kwargs)


def mesh_of(sharding_plan):
    assert sharding_plan.jax_mesh is not None
    return sharding_plan.jax_mesh


@KINDS
def test_shard_inside_jit_constrains(kind):
    sharding_plan = made_for(kind)

    @jax.jit
    def double(w, b):
        tree = shard({"w": 2 * w, "b": 2 * b, "act": jnp.tanh}, sharding_plan)
        assert tree["act"] is jnp.tanh
        return tree["w"], tree["b"]

    sharding = NamedSharding(mesh_of(sharding_plan), P())
    placed = jax.device_put((TREE["w"], TREE["b"]), sharding)
    w, b = double(*placed)
    assert w.sharding.is_equivalent_to(sharding_plan.shardings["w"], 2)
    assert b.sharding.is_equivalent_to(sharding_plan.shardings["b"], 1)
    assert np.array_equal(w, 2 * TREE["w"])
    jitted = jax.jit(lambda w: shard({**TREE, "w": w[:4]}, sharding_plan))
    with pytest.raises(PlanMismatchError, match="leaf `w`"):
        jitted(TREE["w"])


@KINDS
@pytest.mark.parametrize(
    "constant", [TREE["w"], jnp.asarray(TREE["w"])], ids=["numpy", "jax"]
)
def test_a_constant_is_constrained_inside_jit(kind, constant):
    sharding_plan = made_for(kind)
    # JAX itself compiles an Explicit constraint for the devices of an argument only.
    zeros = np.zeros((8, 16), np.float32)
    placed_zeros = jax.device_put(zeros, sharding_plan.shardings["w"])

    @jax.jit
    def both(zeros):
        constrained = constrain(constant, ("batch", "mlp"), sharding_plan)
        tree = shard({**TREE, "w": constant}, sharding_plan)
        return zeros, constrained, tree["w"]

    _, *outs = both(placed_zeros)
    for out in outs:
        assert out.sharding.is_equivalent_to(sharding_plan.shardings["w"], 2)
        assert np.array_equal(out, constant)


@KINDS
def test_constrain_can_explain(kind):
    sharding_plan = made_for(kind)
    decisions = []

    @jax.jit
    def inside(x):
        x, decision = constrain(x, ("batch", "mlp"), sharding_plan, explain=True)
        decisions.append(decision)
        return x

    mesh = mesh_of(sharding_plan)
    ones = np.ones((8, 6), np.float32)
    x = jax.device_put(ones, NamedSharding(mesh, P()))
    sharding = NamedSharding(mesh, P("data"))
    assert inside(x).sharding.is_equivalent_to(sharding, 2)
    _, outside = constrain(x, ("batch", "mlp"), sharding_plan, explain=True)
    assert decisions == [outside]
    assert outside.spec == P("data")
    actual = [(why.code, why.dim) for why in outside.reasons]
    assert actual == [(Code.indivisible, 1)]
    same, nothing = constrain(x, None, sharding_plan, explain=True)
    assert same is x
    assert nothing == Decision(P())


def test_a_strict_plan_makes_constrain_strict():
    strict = made_for(AxisType.Auto, strict=True)
    x = np.ones((8, 6), np.float32)
    with pytest.raises(
        SpecError, match="`strict=True`, and .* size 6 is not divisible by `tensor`"
    ):
        jax.jit(lambda x: constrain(x, ("batch", "mlp"), strict))(x)
    loose: Any = constrain(x, ("batch", "mlp"), strict, strict=False)
    assert loose.sharding.spec == P("data")


@KINDS
def test_axes_of_size_one_stay_and_trip_nothing(kind):
    mesh = MeshSpec({"data": 8, "fsdp": 1}, axis_types=kind).build(jax.devices())
    axes = AxisRules([("batch", ("data", "fsdp")), ("embed", "fsdp")])
    names = {"w": ("embed", None)}
    tree = {"w": TREE["w"].T}
    sharding_plan = plan(tree, mesh, names=names, axes=axes)
    w = shard(tree, sharding_plan)["w"]
    x = jax.device_put(TREE["w"], NamedSharding(mesh, P("data")))

    @jax.jit
    def step(x, w):
        # `with_sharding_constraint` of the same spec is refused or asserts.
        x = constrain(x, ("batch", None), sharding_plan)
        columns = constrain(x[:, :8], ("batch", None), sharding_plan)
        whole_w = constrain(w, (None, None), sharding_plan)
        return columns + x @ whole_w

    expected = TREE["w"] @ TREE["w"].T + TREE["w"][:, :8]
    assert np.allclose(step(x, w), expected)


def test_a_constraint_that_would_do_nothing_is_an_error():
    sharding_plan = plan(TREE, MeshSpec(SIZES), paths=RULES, axes=AXES)
    built_plan = sharding_plan.on(sharding_plan.mesh.build(jax.devices()))
    x = jnp.asarray(TREE["w"])

    def inside(x):
        return constrain(2 * x, ("batch", "mlp"), sharding_plan)

    def placed_inside(x):
        tree = shard({**TREE, "w": x}, sharding_plan)
        return tree["w"]

    def summed_inside(x):
        return inside(x).sum()

    jitted = jax.jit(inside)
    jitted_vmap = jax.jit(jax.vmap(inside))
    jitted_gradient = jax.jit(jax.value_and_grad(summed_inside))
    for attempt in (
        lambda: jitted(x),
        lambda: jax.jit(placed_inside)(x),
        lambda: jitted_vmap(x[None]),
        lambda: jitted_gradient(x),
        lambda: jitted.lower(x),
    ):
        with pytest.raises(
            PlanMismatchError,
            match="tensor=4 without devices, in a program for 1 device, where",
        ):
            attempt()
    # Wherever the program is for the mesh, it does what it says, also to what lies on
    # no mesh by itself.
    spec = P("data", "tensor")
    sharding = built_plan.shardings["w"]
    placed = jax.device_put(x, sharding)
    assert jitted(placed).sharding.spec == spec

    def beside_a_constant(y):
        return y, inside(jnp.ones((8, 16)))

    _, constrained_ones = jax.jit(beside_a_constant)(placed)
    assert constrained_ones.sharding.spec == spec
    constrained = jax.jit(inside, out_shardings=sharding)(x)
    assert constrained.sharding.spec == spec
    with jax.set_mesh(mesh_of(built_plan)):
        assert jitted(x).sharding.spec == spec

    def beside_a_gradient(y):
        def total(scale):
            return summed_inside(scale * jnp.ones((8, 16)))

        return y, jax.grad(total)(1.0)

    _, gradient = jax.jit(beside_a_gradient)(placed)
    assert gradient == 2 * 8 * 16
    # Without a program there is nothing to say: shapes, and exports for devices that
    # are not there.
    assert jax.eval_shape(inside, x).shape == (8, 16)
    traced = jitted.trace(sharding_plan.structs["w"])
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert lowered.as_text()


@pytest.mark.parametrize("on", [True, False])
def test_a_constraint_on_a_closed_over_array_is_told(on):
    sharding_plan = plan(TREE, MeshSpec(SIZES), paths=RULES, axes=AXES)
    built_plan = sharding_plan.on(sharding_plan.mesh.build(jax.devices()))
    w = shard(TREE, built_plan)["w"]
    x = jnp.ones((8, 8))
    plan_of_constraint = sharding_plan
    if on:
        plan_of_constraint = built_plan

    def inside(w, x):
        return constrain(x @ w, ("batch", "mlp"), plan_of_constraint)

    product = jax.jit(inside)(w, x)
    assert product.sharding.spec == P("data", "tensor")
    assert np.allclose(product, x @ TREE["w"])
    closed = jax.jit(lambda x: inside(w, x))
    if on:
        # The devices of the plan are those of the program.
        closed_product = closed(x)
        assert closed_product.sharding == product.sharding
        assert np.allclose(closed_product, product)
    else:
        # JAX types the product on the mesh of `w`, runs it on the one device of `x`,
        # and drops the constraint.
        with pytest.raises(
            PlanMismatchError,
            match="pass arrays that the function closes over as arguments",
        ):
            closed(x)
    placed = jax.device_put(x, built_plan.sharding(()))
    assert closed(placed).sharding == product.sharding


def test_gather_inside_jit_says_what_to_do():
    with pytest.raises(
        LeafTypeError,
        match=r"array `a/w`, float32\[8, 16\], is traced: .* `constrain\(x, Partition",
    ):
        jax.jit(gather)({"a": {"w": TREE["w"]}})
    with pytest.raises(LeafTypeError, match="the array, float32"):
        jax.jit(gather)(TREE["w"])
