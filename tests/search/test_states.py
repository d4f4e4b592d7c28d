"""States of optimizers among a step's arguments: they lie as their parameters do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import f32

from shardfx import follow
from shardfx.auto import search


def loss(params, x):
    for layer in params:
        x = x + jax.nn.relu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.lion(1e-3),
        optax.adafactor(1e-3, min_dim_size_to_factor=128),
        optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    ],
    ids=["adamw", "lion", "adafactor", "multisteps"],
)
def test_plans_of_states_are_those_that_follow_makes(optimizer):
    layer = {"up": f32(512, 2048), "bias": f32(2048), "down": f32(2048, 512)}
    params = [layer, layer]
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    cut = 0
    with jax.numpy_dtype_promotion("standard"):
        found = search(step, params, state, f32(4096, 512), devices=8, chip="v5e", keep=4)
        for one in found:
            followed = follow(optimizer.init, one.plans[0])
            for mine, theirs in zip(one.plans[1].leaves, followed.leaves, strict=True):
                # Statistics of rows lack what the parameter is cut along: an axis then takes what it prefers next.
                is_factored = mine.path.split("/")[1:2] in (["v_row"], ["v_col"])
                assert mine.spec == theirs.spec or (is_factored and not any(theirs.spec)), (one.title, mine.path)
                cut += any(mine.spec)
    # Some candidates cut parameters, so that there is something to follow.
    assert cut
