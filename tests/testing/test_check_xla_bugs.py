"""Steps that XLA partitions wrongly: `check_step` finds the operation."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.testing import check_step
from tests.testing.placed import cut, some


def explicit_step(mesh: Mesh):
    def step(table, ids):
        def loss(table):
            # https://github.com/openxla/xla/issues/42481: sums over `tp` follow the
            # slice, not the scatter.
            spec = P("dp", None, reduced=frozenset({"tp"}))
            sharding = NamedSharding(mesh, spec)
            rows = jax.sharding.reshard(table, sharding)
            elements = (
                rows.at[ids].get(out_sharding=NamedSharding(mesh, P("dp", "tp", None)))
                ** 2
            )
            return jnp.sum(  # wrong
                elements
            )

        return jax.grad(loss)(table)

    return step


def bug_of_scatter():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    table = jax.random.normal(jax.random.key(0), (16, 8))
    ids = jax.random.randint(jax.random.key(1), (4, 8), 0, 5)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    return (
        jax.jit(explicit_step(mesh)),
        (put(table, "tp"), put(ids, "dp", "tp")),
        "scatter-add",
    )


def columns():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())


def bug_of_update():
    cut, whole = columns()
    # https://github.com/openxla/xla/issues/49118: a start that needs clamping is in no
    # device's part.
    step = lambda x, y, position: (
        lax.dynamic_update_slice(x, y, [jnp.int32(0), position]) * 2
    )
    values = jnp.arange(4.0).reshape(2, 2)
    args = values, jnp.full((2, 1), 99.0), jnp.int32(2)
    return (
        jax.jit(step, in_shardings=(cut, whole, whole), out_shardings=cut),
        args,
        "dynamic_update_slice",
    )


def bug_of_slice():
    cut, whole = columns()
    # https://github.com/openxla/xla/issues/49122: each device clamps its own start.
    step = lambda x, position: (
        lax.dynamic_slice(x, [jnp.int32(0), position], (2, 6)) + 1
    )
    values = jnp.arange(16.0).reshape(2, 8)
    args = values, jnp.int32(7)
    return (
        jax.jit(step, in_shardings=(cut, whole), out_shardings=cut),
        args,
        "dynamic_slice",
    )


@pytest.mark.parametrize("bug", [bug_of_scatter, bug_of_update, bug_of_slice])
def test_a_bug_of_xla_is_found_by_its_operation(bug):
    step, args, primitive = bug()
    check = check_step(step, *args)
    if jax.__version_info__ < (0, 11):
        assert not check
    # A JAX that mended it computes the same; JAX 0.12 does not, and refuses to keep
    # what is not summed yet.
    named = (
        f"the first equation that differs: `{primitive}` at test_check_xla_bugs.py:"
        in str(check)
    )
    assert (
        check or named or "XLA refuses the step where every value is kept" in str(check)
    )
    assert named or jax.__version_info__ >= (0, 11)


def test_what_verify_refutes_is_said_before_the_numbers():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    devices = sfx.MeshSpec(axes).build(jax.devices())

    def step(x, w):
        for _ in range(2):
            x = x + jnp.tanh(x @ w)
        return x

    x = cut(some(16, 32), ("data", "fsdp"), mesh=devices)
    wrong = check_step(step, x, cut(some(32, 32), "tensor", "fsdp", mesh=devices))
    assert not wrong
    assert not wrong.outputs[0].is_right
    assert wrong.refutations[0].operation.endswith("(add)")
    assert wrong.lines[0] == wrong.refutations[0].source
    first, *others = str(wrong).splitlines()
    assert first.startswith("XLA's partitioner computes this step wrongly: %add")
    assert any(line.startswith("the plan changes 1 of 1 output") for line in others)
    right = check_step(step, x, cut(some(32, 32), None, "fsdp", mesh=devices))
    assert right
    assert not right.refutations
