"""What is in memory together: gathered weights, sums over devices, and values by elements."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, constrain, filter_jit, fit, plan


def test_a_sum_that_is_read_in_pieces_is_scattered_once_its_parts_are_there():
    mesh = MeshSpec({"tensor": 4})
    whole, piece = 64 * 128 * 4, 64 * 128 * 4 // 4
    specs = {"h": P(None, "tensor"), "weights": P("tensor"), "x": P("tensor")}
    shapes = {"h": (64, 512), "weights": (512, 128), "x": (64, 128)}
    plans = {
        name: plan(jax.ShapeDtypeStruct(shape, jnp.float32), mesh, paths=PathRules([(".*", specs[name])]))
        for name, shape in shapes.items()
    }
    everywhere = jax.NamedSharding(mesh.abstract(), P(None, None))

    def step(h, weights, x):
        sums = [jax.lax.with_sharding_constraint((h * turn) @ weights, everywhere) for turn in range(1, 6)]
        kept = [x + one for one in sums]
        total = jnp.sum(kept[0] @ kept[1].T)
        return x + total + sum(kept)

    found = fit(plans, step=step, chip="h100")
    # The five sums are all needed at the end: four in pieces while the last is whole, and `h * turn` is its operand.
    live = found.peak_bytes - sum(row.bytes for row in found.rows if row.exact) - found.bytes_of("results")
    assert live <= 64 * 512 * 4 // 4 + whole + 5 * piece


def test_a_weight_that_a_layer_gathered_is_gathered_again_where_the_layer_is_computed_again():
    mesh = MeshSpec({"data": 4})
    params = plan(
        {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abc"},
        mesh,
        paths=PathRules([(".*", P("data"))]),
    )
    batch = plan(jax.ShapeDtypeStruct((1024, 256), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))

    def peak(prevent_cse):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), prevent_cse=prevent_cse)

        def step(params, batch):
            return jax.grad(lambda params: jnp.sum(ft.reduce(layer, params.values(), batch)))(params)

        return fit({"params": params, "batch": batch}, step=step, chip="h100").peak_bytes

    # Without the barrier a compiler keeps what the other two layers gathered.
    assert peak(prevent_cse=False) - peak(prevent_cse=True) == 2 * 256 * 256 * 4


def test_many_leaves_and_long_chains_by_elements_are_read_once():
    params = plan(
        {f"w{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(300)},
        MeshSpec({"data": 4}),
        paths=PathRules([(".*", P("data"))]),
    )

    def step(params):
        norm = jnp.sqrt(sum(jnp.sum(one * one) for one in params.values()))
        x = jnp.ones((8, 8))
        for _ in range(60):  # each reads the last twice: 2^60 ways to walk back
            x = x * x + x
        return jnp.sum(x @ x) * norm

    found = fit({"params": params}, step=step, chip="h100")
    assert found.bytes_of("parameters") == 300 * 8 * 8 * 4 // 4


@pytest.mark.parametrize("is_laid", [False, True])
def test_activations_lie_as_the_compiler_lays_them(is_laid):
    """A table that is cut by width makes activations that are: of the whole batch, but for constraints."""
    made = {"table": (1000, 64), "up": (6, 64, 512), "down": (6, 512, 64)}
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in made.items()}
    tokens = jax.ShapeDtypeStruct((64, 32), jnp.int32)
    mesh = MeshSpec({"fsdp": 8})
    rules = [("table|up", P(None, "fsdp")), ("down", P(None, None, "fsdp"))]
    params, batch = plan(structs, mesh, paths=PathRules(rules)), plan(tokens, mesh, paths=PathRules([("", P("fsdp"))]))

    def step(weights, tokens):
        def laid(x):
            return constrain(x, P("fsdp", None, None), params) if is_laid else x

        def layer(x, w):
            return laid(x + jnp.tanh(x @ w["up"]) @ w["down"]), None

        def loss(weights):
            layers = {"up": weights["up"], "down": weights["down"]}
            return jnp.mean(jax.lax.scan(layer, laid(weights["table"][tokens]), layers)[0] ** 2)

        return jax.grad(loss)(weights)

    found = fit([params, batch], step=step, chip="h100")
    ends = [one.on(mesh.build(jax.devices())) for one in (params, batch)]
    program = filter_jit(step, in_shardings=tuple(ends), out_shardings=ends[0]).lower(structs, tokens).compile()
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert found.peak_bytes == pytest.approx(held, rel=0.15)


def test_a_donated_cache_that_a_loop_reads_and_stacks_anew_is_there_twice():
    cache = plan(jax.ShapeDtypeStruct((4, 64, 128), jnp.float32), MeshSpec({"data": 4}), paths=PathRules([(".*", P())]))

    def stacked(cache):
        return jax.lax.scan(lambda _, layer: (None, layer.at[0].set(1.0)), None, cache)[1]

    def at_once(cache):
        return cache.at[:, 0].set(1.0)

    twice, once = (
        fit({"cache": cache}, step=step, chip="h100", donate="all").peak_bytes for step in (stacked, at_once)
    )
    whole = 4 * 64 * 128 * 4
    assert once < 1.5 * whole and 2 * whole <= twice < 2.5 * whole
