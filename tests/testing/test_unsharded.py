"""A step that is written for Explicit axes, without its shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding, reshard

from shardfx.testing import unsharded


AXES = ("data", "tensor")
RNG = np.random.default_rng(0)
# No axis of the mesh divides these sizes.
NORMAL_ROWS = RNG.normal(size=(5, 7))
NORMAL_SQUARE = RNG.normal(size=(7, 7))
X = NORMAL_ROWS.astype(np.float32)
W = NORMAL_SQUARE.astype(np.float32) * 0.3


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), AXES)


ROWS = P("data", None)


def product(x, w, spec=ROWS):
    return jnp.matmul(x, w, out_sharding=spec)


@jax.custom_vjp
def with_vjp(x, w):
    return product(x, w, P("data", "tensor"))


def with_saved(x, w):
    return with_vjp(x, w), (x, w)


def gradients_of_saved(saved, g):
    x, w = saved
    of_x = product(g, w.T)
    of_w = product(x.T, g, P(None, None))
    return of_x, of_w


with_vjp.defvjp(with_saved, gradients_of_saved)


@jax.custom_jvp
def with_jvp(x):
    return reshard(jnp.sin(x), P("data"))


def tangents_of_sine(primals, tangents):
    (x,) = primals
    (tangent,) = tangents
    moved = jnp.cos(x) * tangent
    return with_jvp(x), reshard(moved, P("data"))


with_jvp.defjvp(tangents_of_sine)


def scan(x, w):
    def turn(carry, _):
        return product(carry, w), carry.sum(-1)

    return jax.lax.scan(turn, x, length=2)


def while_loop(x, w):
    def turn(_, carry):
        return product(carry, w)

    return jax.lax.fori_loop(0, 2, turn, x)


def cond(x, w):
    def doubled():
        return reshard(x * 2, P("data"))

    def multiplied():
        return product(x, w)

    return jax.lax.cond(x.sum() > 1e6, doubled, multiplied)


def custom_vjp(x, w):
    def loss(w):
        return jnp.sum(with_vjp(x, w) ** 2)

    gradient = jax.grad(loss)(w)
    return gradient, with_vjp(x, w)


def custom_jvp(x, w):
    def loss(x):
        return jnp.sum(with_jvp(x) @ w)

    gradient = jax.grad(loss)(x)
    return gradient, with_jvp(x)


def checkpoint(x, w):
    @jax.checkpoint
    def layer(x):
        return jnp.tanh(product(x, w))

    def loss(x):
        return jnp.sum(layer(x) ** 2)

    return jax.grad(loss)(x)


def shard_map(x, w):
    def body(x, w):
        return jax.lax.psum(x @ w, "tensor")

    mapped = jax.shard_map(
        body,
        in_specs=(P("data", "tensor"), P("tensor")),
        out_specs=P("data"),
    )
    blocks = reshard(x, P("data", "tensor"))
    rows = reshard(w, P("tensor"))
    return mapped(blocks, rows)


def auto_axes(x, w):
    spread: Any = jax.sharding.auto_axes(jnp.matmul, out_sharding=P("data"))
    return spread(x, w)


def jitted(x, w):
    zeros = jnp.zeros((5, 7), out_sharding=P("data"))
    return jax.jit(product)(x, w) + zeros


def in_vmap(x, w):
    def of_row(row):
        moved = reshard(row, P("tensor"))
        return moved @ w

    return jax.vmap(of_row, spmd_axis_name="data")(x)


# The same without shardings.


def plain_product(x, w):
    return x @ w


def plain_scan(x, w):
    once = x @ w
    sums = jnp.stack([x.sum(-1), once.sum(-1)])
    return once @ w, sums


def plain_loop(x, w):
    once = x @ w
    return once @ w


def plain_vjp(x, w):
    def loss(w):
        return jnp.sum((x @ w) ** 2)

    return jax.grad(loss)(w), x @ w


def plain_jvp(x, w):
    def loss(x):
        return jnp.sum(jnp.sin(x) @ w)

    return jax.grad(loss)(x), jnp.sin(x)


def plain_checkpoint(x, w):
    def loss(x):
        hidden = jnp.tanh(x @ w)
        return jnp.sum(hidden**2)

    return jax.grad(loss)(x)


PLAIN = {
    scan: plain_scan,
    while_loop: plain_loop,
    cond: plain_product,
    custom_vjp: plain_vjp,
    custom_jvp: plain_jvp,
    checkpoint: plain_checkpoint,
    shard_map: plain_product,
    auto_axes: plain_product,
    jitted: plain_product,
    in_vmap: plain_product,
}


@pytest.mark.parametrize("step", PLAIN, ids=lambda step: step.__name__)
def test_it_computes_the_same_without_a_sharding(step, mesh):
    arguments = (jnp.asarray(X), jnp.asarray(W))
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments]
    plain = unsharded(step)

    @jax.jit
    def traced(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return plain(*args)

    if step is not shard_map:
        text = str(traced.trace(*structs).jaxpr)
        for word in ("reshard[", "sharding_constraint", "@data", "NamedSharding"):
            assert word not in text
    with jax.set_mesh(mesh):
        results = plain(*arguments)
    expected = PLAIN[step](*arguments)
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for array, expected_array in pairs:
        np.testing.assert_allclose(array, expected_array, rtol=1e-4, atol=1e-5)


def test_it_keeps_what_is_no_array_and_keys(mesh):
    def step(key, x, *, scale):
        noise = jax.random.normal(key, x.shape, out_sharding=P("data", "tensor"))
        return {
            "x": x * scale + noise,
            "key": key,
            "scale": scale,
            "name": "step",
        }

    key = jax.random.key(3)
    x = jnp.asarray(X)
    with jax.set_mesh(mesh):
        result = unsharded(step)(key, x, scale=2)
    assert result["key"].dtype == key.dtype
    assert result["scale"] == 2
    assert result["name"] == "step"
    expected = X * 2 + jax.random.normal(key, X.shape)
    np.testing.assert_allclose(result["x"], expected, rtol=1e-5, atol=1e-6)


def test_a_step_that_names_its_own_mesh_is_traced_for_that(mesh):
    def step(x, w):
        rows = reshard(x, sharding)
        return rows @ w

    sharding = NamedSharding(mesh, P("data"))
    x = jnp.ones((8, 4))
    w = jnp.ones((4, 4))
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with jax.set_mesh(mesh):
        results = jax.eval_shape(unsharded(step), struct, w)
    assert results.shape == (8, 4)
    typed = jax.device_put(x, sharding)
    result = jax.jit(unsharded(step))(typed, w)
    np.testing.assert_array_equal(result, np.full((8, 4), 4.0))


def test_without_explicit_axes_it_is_the_step():
    def step(x):
        return x * 2

    assert unsharded(step)(3) == 6
    np.testing.assert_array_equal(unsharded(step)(X), X * 2)


def test_errors_of_the_step_are_raised(mesh):
    def step(x, _):
        return x + jnp.ones((3, 3))

    with jax.set_mesh(mesh), pytest.raises(TypeError, match="incompatible shapes"):
        unsharded(step)(X, W)


def test_a_weakly_typed_argument_stays_weakly_typed(mesh):
    def step(w, rate):
        return w - rate * w

    with jax.set_mesh(mesh):
        w = jnp.ones((4, 4), jnp.bfloat16)
        rate = jnp.asarray(0.1)
        result = unsharded(step)(w, rate)
        expected = step(w, rate)
    assert result.dtype == expected.dtype == jnp.bfloat16
