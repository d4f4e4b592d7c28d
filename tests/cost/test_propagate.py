"""How arrays lie that nobody constrains, against what the compiler makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, compile_for, estimate, traffic


MESH = MeshSpec({"fsdp": 8})
L, V, D, F, B, T = 2, 64, 128, 256, 32, 8


def struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(MESH.abstract(), P(*spec)))


def scanned(params, tokens):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.sum(jax.lax.scan(layer, params["table"][tokens], params["layers"])[0] ** 2)


def scaled(params, tokens):
    x = params["table"][tokens]
    for at in range(L):
        x = x * jnp.mean(params["layers"]["down"][at], 0)
    return jnp.sum(jnp.tanh(x) ** 2)


def arguments(down):
    layers = {"up": struct((L, D, F), None, None, "fsdp"), "down": struct((L, F, D), *down)}
    params = {"table": struct((V, D), "fsdp"), "layers": layers}
    return params, struct((B, T), "fsdp", dtype=jnp.int32)


@pytest.mark.parametrize(
    ("loss", "down"), [(scanned, (None, None, "fsdp")), (scanned, (None, "fsdp")), (scaled, (None, None, "fsdp"))]
)
def test_arrays_that_nobody_constrains_lie_as_compilers_lay_them(loss, down):
    # The rows that are looked up come cut by tokens; what a loop carries lies as its body wants it, which is asked
    # before what goes into the loop. Weights that are only multiplied by elements are asked last.
    params, tokens = arguments(down)
    ours = estimate(loss, params, tokens, compiler="cpu")
    found = traffic(compile_for(loss, [params, tokens], "cpu"))
    assert ours.wire_bytes == pytest.approx(found.wire_bytes, rel=0.01)


def gated(params, tokens):
    def cell(state, x):
        gate, new = jnp.split(x @ params["in"] + state @ params["again"], 2, axis=-1)
        return jax.nn.sigmoid(gate) * state + jnp.tanh(new), None

    x = jnp.swapaxes(params["table"][tokens], 0, 1)
    return jnp.sum(jax.lax.scan(cell, jnp.zeros((B, D)), x)[0] ** 2)


def test_the_pieces_of_an_array_lie_as_it_does_and_are_sent_where_they_lie():
    # A recurrent cell computes its gates at once: both are pieces of an array that is cut as its weights are.
    weights = {"in": struct((D, 2 * D), None, "fsdp"), "again": struct((D, 2 * D), None, "fsdp")}
    params, tokens = {"table": struct((V, D), "fsdp"), **weights}, struct((B, T), "fsdp", dtype=jnp.int32)
    ours = estimate(gated, params, tokens, compiler="cpu")
    found = traffic(compile_for(gated, [params, tokens], "cpu"))
    assert ours.wire_bytes == pytest.approx(found.wire_bytes, rel=0.1)
    pieces = [row.calls for row in ours.rows if row.kind == "collective-permute"]
    assert pieces and set(pieces) == {T}
