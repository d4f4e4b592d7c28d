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
X = RNG.normal(size=(5, 7)).astype(np.float32)
W = RNG.normal(size=(7, 7)).astype(np.float32) * 0.3


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), AXES)


ROWS = P("data", None)


def product(x, w, spec=ROWS):
    return jnp.matmul(x, w, out_sharding=spec)


@jax.custom_vjp
def with_vjp(x, w):
    return product(x, w, P("data", "tensor"))


with_vjp.defvjp(
    lambda x, w: (with_vjp(x, w), (x, w)),
    lambda saved, g: (product(g, saved[1].T), product(saved[0].T, g, P(None, None))),
)


@jax.custom_jvp
def with_jvp(x):
    return reshard(jnp.sin(x), P("data"))


with_jvp.defjvp(
    lambda primals, tangents: (
        with_jvp(*primals),
        reshard(jnp.cos(primals[0]) * tangents[0], P("data")),
    )
)


def scan(x, w):
    return jax.lax.scan(lambda c, _: (product(c, w), c.sum(-1)), x, length=2)


def while_loop(x, w):
    return jax.lax.fori_loop(0, 2, lambda _, c: product(c, w), x)


def cond(x, w):
    return jax.lax.cond(
        x.sum() > 1e6, lambda: reshard(x * 2, P("data")), lambda: product(x, w)
    )


def custom_vjp(x, w):
    gradient = jax.grad(lambda w: jnp.sum(with_vjp(x, w) ** 2))(w)
    return gradient, with_vjp(x, w)


def custom_jvp(x, w):
    gradient = jax.grad(lambda x: jnp.sum(with_jvp(x) @ w))(x)
    return gradient, with_jvp(x)


def checkpoint(x, w):
    layer = jax.checkpoint(lambda x: jnp.tanh(product(x, w)))
    return jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x)


def shard_map(x, w):
    in_specs = (P("data", "tensor"), P("tensor"))
    body = jax.shard_map(
        lambda a, b: jax.lax.psum(a @ b, "tensor"),
        in_specs=in_specs,
        out_specs=P("data"),
    )
    moved = reshard(x, P("data", "tensor"))
    return body(moved, reshard(w, P("tensor")))


def auto_axes(x, w):
    spread: Any = jax.sharding.auto_axes(jnp.matmul, out_sharding=P("data"))
    return spread(x, w)


def jitted(x, w):
    array = jnp.zeros((5, 7), out_sharding=P("data"))
    return jax.jit(product)(x, w) + array


def in_vmap(x, w):
    return jax.vmap(lambda row: reshard(row, P("tensor")) @ w, spmd_axis_name="data")(x)


PLAIN = {
    scan: lambda x, w: (x @ w @ w, jnp.stack([x.sum(-1), (x @ w).sum(-1)])),
    while_loop: lambda x, w: x @ w @ w,
    cond: lambda x, w: x @ w,
    custom_vjp: lambda x, w: (jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), x @ w),
    custom_jvp: lambda x, w: (
        jax.grad(lambda x: jnp.sum(jnp.sin(x) @ w))(x),
        jnp.sin(x),
    ),
    checkpoint: lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x),
    shard_map: lambda x, w: x @ w,
    auto_axes: lambda x, w: x @ w,
    jitted: lambda x, w: x @ w,
    in_vmap: lambda x, w: x @ w,
}


@pytest.mark.parametrize("step", PLAIN, ids=lambda step: step.__name__)
def test_it_computes_the_same_without_a_sharding(step, mesh):
    arguments = jnp.asarray(X), jnp.asarray(W)
    structs = tuple(
        jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments
    )
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
    jax.tree.map(
        lambda array, other: np.testing.assert_allclose(
            array, other, rtol=1e-4, atol=1e-5
        ),
        results,
        PLAIN[step](*arguments),
    )


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
    with jax.set_mesh(mesh):
        result = unsharded(step)(key, jnp.asarray(X), scale=2)
    assert result["key"].dtype == key.dtype
    assert result["scale"] == 2
    assert result["name"] == "step"
    expected = X * 2 + jax.random.normal(key, X.shape)
    np.testing.assert_allclose(result["x"], expected, rtol=1e-5, atol=1e-6)


def test_a_step_that_names_its_own_mesh_is_traced_for_that(mesh):
    def step(x, w):
        return reshard(x, NamedSharding(mesh, P("data"))) @ w

    x = jnp.ones((8, 4))
    w = jnp.ones((4, 4))
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with jax.set_mesh(mesh):
        results = jax.eval_shape(unsharded(step), struct, w)
    assert results.shape == (8, 4)
    typed = jax.device_put(x, NamedSharding(mesh, P("data")))
    result = jax.jit(unsharded(step))(typed, w)
    np.testing.assert_array_equal(result, np.full((8, 4), 4.0))


def test_without_explicit_axes_it_is_the_step():
    def step(x):
        return x * 2

    assert unsharded(step)(3) == 6
    np.testing.assert_array_equal(unsharded(step)(X), X * 2)


def test_errors_of_the_step_are_raised(mesh):
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="incompatible shapes"):
        unsharded(lambda x, w: x + jnp.ones((3, 3)))(X, W)


def test_a_weakly_typed_argument_stays_weakly_typed(mesh):
    def step(w, rate):
        return w - rate * w

    with jax.set_mesh(mesh):
        w = jnp.ones((4, 4), jnp.bfloat16)
        rate = jnp.asarray(0.1)
        result = unsharded(step)(w, rate)
        expected = step(w, rate)
    assert result.dtype == expected.dtype == jnp.bfloat16
