"""`check_step` with structs in the place of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.testing import check_step


def test_a_training_step_of_structs_is_made_small_and_run():
    mesh = sfx.MeshSpec({"d": 2, "t": 4})
    axes = sfx.AxisRules(
        [
            ("embed", "d"),
            ("mlp", "t"),
            ("vocab", "t"),
            ("batch", "d"),
        ]
    )
    names = {
        "table": ("vocab", "embed"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }
    sizes = {"vocab": 32_000, "embed": 512, "mlp": 2048}
    structs = {}
    for path, names_of_dims in names.items():
        shape = tuple(sizes[name] for name in names_of_dims)
        structs[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = sfx.plan(structs, mesh, names=names, axes=axes)
    sharding = plan.sharding(("batch", None))
    tokens = jax.ShapeDtypeStruct((64, 4096), jnp.int32, sharding=sharding)
    seen = []

    def loss(w, tokens):
        seen.append(tokens.shape)
        table = w["table"]
        x = table[tokens]
        hidden = jax.nn.gelu(x @ w["up"])
        x = x + hidden @ w["down"]
        log_probabilities = jax.nn.log_softmax(x @ table.T)
        return -jnp.mean(log_probabilities)

    def descended(weight, gradient):
        return weight - 0.1 * gradient

    def step(w, tokens):
        value, gradients = jax.value_and_grad(loss)(w, tokens)
        return value, jax.tree.map(descended, w, gradients)

    check = check_step(step, plan.structs, tokens, shrink=True)
    assert check, str(check)
    assert max(seen[-1]) < 32
    for output in check.outputs:
        assert np.isfinite(output.allowed)


@pytest.mark.parametrize(
    ("shape", "small"), [((1024, 96), (16, 96)), ((1024, 96, 96), (16, 2, 96))]
)
def test_a_size_that_a_step_needs_is_not_shrunk(shape, small):
    mesh = sfx.MeshSpec({"d": 8}).abstract()
    rows = NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    seen = []

    def step(x):
        seen.append(x.shape)
        *leading_sizes, _ = x.shape
        elements = x.reshape(*leading_sizes, 12, 8)
        return jnp.sum(elements, axis=1)

    assert check_step(step, x, shrink=True)
    assert seen[-1] == small


def test_structs_need_devices():
    mesh = sfx.MeshSpec({"d": 16}).abstract()
    sharding = NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding)
    with pytest.raises(
        sfx.errors.MeshError,
        match=r"for 16 devices, and 8 are here.*jax_num_cpu_devices",
    ):
        check_step(lambda x: x, x)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_structs_of_keys_are_keys_of_their_kind(kind):
    key = jax.random.key(0, impl=kind)
    keys = jax.random.split(key, 8)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("d"))
    structs = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows)
    seen = []

    def step(keys):
        seen.append(keys.dtype)
        return jax.random.key_data(keys) + 1

    assert check_step(sfx.filter_jit(step), structs)
    assert set(seen) == {keys.dtype}
