"""The judge of partitioned programs: right steps are proved, faults of XLA refuted."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
ROWS = P(("data", "fsdp"))


def struct(shape, *spec, dtype=jnp.float32):
    sharding = NamedSharding(MESH.abstract(), P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def rows(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH.abstract(), ROWS))


def block(x, w):
    return x + jnp.tanh(x @ w)


X = struct((16, 32), ("data", "fsdp"))
W = struct((32, 32), "tensor", "fsdp")
PAIR = (struct((32, 64), "fsdp", "tensor"), struct((64, 32), "tensor", "fsdp"))
STACKED = (
    struct((3, 32, 64), None, "fsdp", "tensor"),
    struct((3, 64, 32), None, "tensor", "fsdp"),
)


def mlp(pair, x):
    return x + jax.nn.gelu(x @ pair[0]) @ pair[1]


def language(table, tokens):
    logits = table[tokens] @ table.T
    picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def scanned(pairs, x):
    return jnp.sum(jax.lax.scan(lambda x, pair: (mlp(pair, x), None), x, pairs)[0])


RIGHT = {
    "an MLP": (mlp, PAIR, X),
    "its gradient": (jax.grad(lambda p, x: jnp.sum(mlp(p, x) ** 2)), PAIR, X),
    "a constrained residual": (lambda x, w: rows(block(rows(block(x, w)), w)), X, W),
    "layers in a loop, and back": (jax.value_and_grad(scanned), STACKED, X),
    "a vocabulary that is cut": (
        jax.value_and_grad(language),
        struct((64, 32), "tensor", "fsdp"),
        struct((8, 16), ("data", "fsdp"), dtype=jnp.int32),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_are_proved(name):
    step, *args = RIGHT[name]
    verdict = sfx.testing.verify(step, *args)
    assert verdict.outcome == "proved" and verdict, verdict
    assert verdict.judged_operations == verdict.operations > 0
    assert verdict.judged_bytes == verdict.bytes > 0
    assert not verdict.refutations and not verdict.unjudged


WRONG = {
    "two residual blocks": (lambda x, w: block(block(x, w), w), X, W),
    "in a loop": (
        lambda x, ws: jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0],
        X,
        struct((3, 32, 32), None, "tensor", "fsdp"),
    ),
    "of rank three": (
        lambda x, w: block(block(x, w), w),
        struct((16, 4, 32), ("data", "fsdp")),
        W,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sum_of_two_device_orders_is_refuted_at_its_line(name):
    step, *args = WRONG[name]
    verdict = sfx.testing.verify(step, *args)
    assert verdict.outcome == "refuted" and not verdict
    (refutation,) = verdict.refutations
    assert refutation.source is not None and refutation.source.function == "block"
    assert "(add)" in refutation.operation
    assert "operands that lie differently" in refutation.fault
    assert "holds [4:8] of one operand and [8:12] of another" in refutation.fault
    assert refutation.right == "both operands at [4:8] on device 2"
    assert "with_sharding_constraint" in refutation.mend
    assert str(refutation) in str(verdict)


@pytest.mark.parametrize("devices", [16, 32, 64])
def test_more_devices_are_judged_too(devices):
    mesh = sfx.MeshSpec({"data": devices // 8, "fsdp": 4, "tensor": 2}).abstract()
    cut = NamedSharding(mesh, P("tensor", "fsdp"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=cut)
    verdict = sfx.testing.verify(block, x, w)
    assert verdict.outcome == "proved" and verdict.operations > 5, str(verdict)
