"""Steps that broke others on Explicit axes, and the decoder of JAX's training cookbook,
written anew: they run, or the error names the call that mends them.

A scale that goes into a `shard_map` (sglang-jax#1513) is in `test_explicit_errors.py`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import shardfx as sfx
from benchmarks._explicit_steps import FULLY_SHARDED, TENSOR_PARALLEL, Form, cookbook
from shardfx.auto import auto_axes, constrain_step, name_axes


AXES = ("data", "tensor")
RULES = sfx.AxisRules([("batch", "data"), ("mlp", "tensor"), ("heads", "tensor")])


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), AXES)


def some(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def empty_plan(mesh):
    return sfx.plan(jnp.ones(8), mesh, paths=sfx.PathRules([("", P())]))


def grouped_attention(q, k, v):
    """Attention in which two heads of queries share one of keys."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


# marin#8715 and the cases that marin#8716 mends: the specs of queries and of keys.
GROUPED = {
    "heads of queries alone": (("data", None, "tensor"), ("data",)),
    "the width of a head": (("data", None, None, "tensor"),) * 2,
    "the sequence of keys": (("data", None, "tensor"), ("data", "tensor")),
    "one axis for both": (("data", "tensor"), ("data", None, "tensor")),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_attention_has_the_type_of_its_queries(name, mesh):
    of_queries, of_keys = GROUPED[name]
    q = some(2, 4, 4, 8)
    k = some(2, 4, 2, 8)
    placed_q = on(mesh, q, *of_queries)
    placed_k = on(mesh, k, *of_keys)
    typed = auto_axes(grouped_attention, empty_plan(mesh), out=P(*of_queries))
    result = jax.jit(typed)(placed_q, placed_k, placed_k)
    assert sfx.specs_of(result) == P(*of_queries)
    expected = grouped_attention(q, k, k)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_filter_shard_in_a_step_is_constrain(mesh):
    """equinox#1171"""
    sharding = NamedSharding(mesh, P("data"))
    x = on(mesh, some(8, 4))
    with pytest.raises(ValueError, match="can only refer to Auto axes") as raised:
        eqx.filter_jit(lambda x: eqx.filter_shard(x, sharding))(x)
    assert "reshard" in str(raised.value)
    plan = empty_plan(mesh)
    result = eqx.filter_jit(lambda x: sfx.constrain(x, sharding.spec, plan))(x)
    assert sfx.specs_of(result) == P("data")


def sampled_energies(params, spins, flips):
    """A variational Monte Carlo step (netket#2138): each sample has some spins
    exchanged, by a scatter (jax#28111), and the update solves with the covariance of
    derivatives.
    """

    def amplitude(params, spins):
        return jnp.sum(jnp.tanh(spins @ params["w"] + params["b"]))

    def of_sample(spins, flips):
        def flipped(pair):
            return spins.at[pair].set(spins[pair[::-1]])

        exchanged = jax.vmap(flipped)(flips)
        amplitudes = jax.vmap(amplitude, (None, 0))(params, exchanged)
        ratios = jnp.exp(amplitudes - amplitude(params, spins))
        return jnp.sum(ratios)

    energies = jax.vmap(of_sample)(spins, flips)
    rows = jax.vmap(jax.grad(amplitude), (None, 0))(params, spins)
    weight_rows = rows["w"].reshape(len(spins), -1)
    rows = jnp.concatenate([weight_rows, rows["b"]], axis=1)
    rows = rows - rows.mean(axis=0)
    covariance = rows.T @ rows / len(spins) + 0.1 * jnp.eye(rows.shape[1])
    force = rows.T @ (energies - energies.mean()) / len(spins)
    update = jnp.linalg.solve(covariance, force)
    weight_update, bias_update = jnp.split(update, [params["w"].size])
    weight_update = weight_update.reshape(params["w"].shape)
    changed = {
        "w": params["w"] - 0.1 * weight_update,
        "b": params["b"] - 0.1 * bias_update,
    }
    return changed, energies.mean()


def test_a_variational_step_runs_on_samples_of_many_devices(mesh):
    params = {"w": some(6, 4) * 0.1, "b": some(4) * 0.1}
    spins = jnp.sign(some(8, 6))
    flips = jnp.stack([jnp.arange(3), jnp.arange(3) + 1], axis=-1)
    flips = jnp.tile(flips, (8, 1, 1))
    expected, energy = jax.jit(sampled_energies)(params, spins, flips)
    placed = (
        jax.tree.map(lambda leaf: on(mesh, leaf), params),
        on(mesh, spins, ("data", "tensor")),
        on(mesh, flips, ("data", "tensor")),
    )
    with pytest.raises(Exception, match="out_sharding") as raised:
        sfx.filter_jit(sampled_energies).trace(*placed)
    assert any("auto_axes" in note for note in raised.value.__notes__)
    typed = auto_axes(sampled_energies, empty_plan(mesh), out=P())
    result, value = jax.jit(typed)(*placed)
    np.testing.assert_allclose(value, energy, rtol=1e-5)
    for name, leaf in expected.items():
        np.testing.assert_allclose(result[name], leaf, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("specs", [FULLY_SHARDED, TENSOR_PARALLEL])
def test_the_cookbooks_decoder_is_typed(specs, mesh):
    step, structs = cookbook(Form(is_typed=True), specs, embed=32)
    with jax.set_mesh(mesh):
        names = name_axes(step, *structs).names
        plan = sfx.plan(
            structs[0],
            mesh,
            names=names[0],
            axes=RULES,
            unmatched="replicate",
            unused="allow",
        )
        rows = NamedSharding(mesh, P("data"))
        tokens = jax.ShapeDtypeStruct(structs[1].shape, jnp.int32, sharding=rows)
        constrained = constrain_step(step, mesh, RULES)
        params, value = jax.eval_shape(constrained, plan.structs, tokens)
    assert sfx.specs_of(params) == plan.specs
    assert value.shape == ()


def test_the_cookbooks_gradients_are_those_of_one_device(mesh):
    step, structs = cookbook(Form(is_typed=True), TENSOR_PARALLEL, embed=32)
    plain, _ = cookbook(Form(is_typed=False), TENSOR_PARALLEL, embed=32)
    rng = np.random.default_rng(0)

    def drawn(leaf):
        values = rng.normal(size=leaf.shape) * 0.1
        return jnp.asarray(values, leaf.dtype)

    params = jax.tree.map(drawn, structs[0])
    tokens = jnp.asarray(rng.integers(0, 512, (4, 64)), jnp.int32)
    with jax.set_mesh(mesh):
        updated, value = sfx.testing.unsharded(step)(params, tokens)
    expected, expected_value = jax.jit(plain)(params, tokens)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    leaves = jax.tree.leaves(updated)
    expected_leaves = jax.tree.leaves(expected)
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)


def with_empty_tail(x, y):
    """A reshape that JAX 0.11 types without the axis of size 1, and what it cannot be
    joined with there (jax#39309). JAX 0.10 and 0.12 keep the axis.
    """
    heads = x.reshape(-1, 4, 16)
    return jnp.concatenate([y, heads[..., :0]], axis=-1)


def test_a_reshape_may_drop_an_axis_of_size_one():
    mesh = jax.make_mesh((1, 4), AXES)
    x = some(1, 64)
    y = some(1, 4, 16)
    placed = on(mesh, x, "data", "tensor"), on(mesh, y, "data", "tensor")
    spec = P("data", "tensor")
    typed = auto_axes(with_empty_tail, empty_plan(mesh), out=spec)
    result = jax.jit(typed)(*placed)
    assert sfx.specs_of(result) == spec
    np.testing.assert_array_equal(result, y)
