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
