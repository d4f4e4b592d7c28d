"""A step on one GPU, from its plan to its program."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import MeshSpec


ONE = MeshSpec({"data": 1, "tensor": 1})


def step(model, x):
    return jax.vmap(model)(x).sum()


def test_a_step_on_one_gpu_from_plan_to_program():
    model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    rules = sfx.PathRules([(".*", P("data"))])
    plans = [
        sfx.plan(model, ONE, unmatched="replicate"),
        sfx.plan(x, ONE, paths=rules),
    ]
    mesh = ONE.build(jax.devices()[:1])
    in_shardings = tuple(sharding_plan.on(mesh) for sharding_plan in plans)
    lowered = sfx.filter_jit(step, in_shardings=in_shardings).lower(model, x)
    compiled = lowered.compile()
    sent = sfx.cost.traffic(compiled)
    assert sent.rows == ()
    assert str(sent).startswith("no traffic: ")
    assert sfx.cost.seconds(sent, "h200", ONE).seconds == 0
    # A model that holds functions.
    ours = (
        eqx.combine(plans[0].structs, model),
        plans[1].structs,
    )
    assert sfx.cost.estimate(step, *ours).wire_bytes == 0
    fit = sfx.cost.fit(step, *ours, chip="NVIDIA H200")
    assert fit.fits
    assert "h200" in str(fit)
    assert sfx.cost.fit(compiled, chip="h200").fits
