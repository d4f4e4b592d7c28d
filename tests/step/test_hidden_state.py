"""Steps that do more than return their result: modules of nnx that are updated in place,
and traced arrays that are left in variables.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.errors import ProgramError


MESH = sfx.MeshSpec({"data": 8}).build(jax.devices())
ROWS = NamedSharding(MESH, P("data"))
WHOLE = sfx.PathRules([(".*", sfx.replicate)])
X = jax.device_put(jnp.ones((32, 64)), ROWS)
# The gradients of a kernel and a bias, and the loss, are reduced over 8 devices.
WIRE_BYTES = (64 * 64 + 64 + 1) * 4 * 2 * 7 // 8


def make():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def step(model, optimizer, x):
    def loss(model):
        return jnp.mean(model(x) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def sharded():
    shardings = []
    for node in nnx.eval_shape(make):
        plan = sfx.plan(nnx.state(node), MESH, paths=WHOLE)
        shardings.append(nnx.StateSharding(plan.shardings))
    return tuple(shardings)


def test_a_step_of_nnx_jit_counts_with_what_it_updates():
    shardings = sharded()
    model, optimizer = nnx.jit(make, out_shardings=shardings)()
    args = model, optimizer, X
    graph, state = nnx.split((model, optimizer))

    def pure(state, x):
        model, optimizer = nnx.merge(graph, state)
        value = step(model, optimizer, x)
        return nnx.state((model, optimizer)), value

    jitted = nnx.jit(step, in_shardings=(*shardings, ROWS), donate_argnums=(0, 1))
    compiled = jitted.lower(*args).compile()
    assert sfx.cost.traffic(compiled).wire_bytes == WIRE_BYTES
    assert sfx.cost.traffic(jitted.lower(*args)).wire_bytes == WIRE_BYTES
    estimated = sfx.cost.estimate(jitted, *args, compiler="cpu")
    for counted in (
        estimated,
        sfx.cost.estimate(nnx.jit(step), *args, compiler="cpu"),
        sfx.cost.estimate(jitted.trace(*args), compiler="cpu"),
        sfx.cost.estimate(pure, state, X, compiler="cpu"),
        sfx.cost.estimate(sfx.filter_jit(pure), state, X, compiler="cpu"),
    ):
        assert counted.wire_bytes == WIRE_BYTES
    estimated = sfx.cost.estimate(jitted, *args)
    assert estimated.by("leaf").keys() >= {
        "kernel/value",
        "bias/value",
    }

    fit = sfx.cost.fit(jitted, *args, chip="v5e")
    assert fit.bytes_of("parameters") == fit.bytes_of("optimizer: opt_state/0/mu") > 0
    donating = jax.jit(pure, donate_argnums=0)
    by_state = sfx.cost.fit(donating, state, X, chip="v5e")
    assert fit.bytes_of("gradients") == by_state.bytes_of("gradients") > 0
    assert sfx.cost.fit(compiled, chip="h100").peak_bytes > 0
    assert sfx.cost.shardings(jitted, *args).rows
    # The updated arrays are compared too.
    assert "none of 9 outputs" in str(sfx.testing.check_step(step, *args))
    # A step without an update is as pure as any.
    estimated = sfx.cost.estimate(nnx.jit(lambda m, x: m(x)), model, X)
    wire_bytes = estimated.wire_bytes
    assert wire_bytes == 0


def fit(step, *args):
    return sfx.cost.fit(step, *args, chip="v5e")


def estimate_of_filter_jit(step, *args):
    return sfx.cost.estimate(sfx.filter_jit(step), *args)


def estimate_of_jax_jit(step, *args):
    return sfx.cost.estimate(jax.jit(step), *args)


def estimate_of_equinox_filter_jit(step, *args):
    return sfx.cost.estimate(eqx.filter_jit(step), *args)


TAKERS = {
    "estimate": lambda step, *args: sfx.cost.estimate(step, *args),
    "fit": fit,
    "shardings": lambda step, *args: sfx.cost.shardings(step, *args),
    "name_axes": lambda step, *args: sfx.auto.name_axes(step, *args),
    "filter_jit": lambda step, *args: sfx.filter_jit(step)(*args),
    "estimate of filter_jit": estimate_of_filter_jit,
    "estimate of jax.jit": estimate_of_jax_jit,
    "estimate of equinox.filter_jit": estimate_of_equinox_filter_jit,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_an_update_in_place_that_is_lost_is_an_error(taker):
    model, optimizer = make()
    message = (
        r"`step` updates `model/bias/value` and 7 more in place.*"
        r"flax\.nnx\.jit\(step\).*nnx\.split\(\(model, optimizer\)\)"
    )
    with pytest.raises(ProgramError, match=message):
        TAKERS[taker](step, model, optimizer, X)


def test_a_step_takes_keys_that_lie_on_a_mesh():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), ROWS)

    def noisy(keys, x):
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(keys)
        return (x[:8] + noise).sum()

    estimated = sfx.cost.estimate(noisy, keys, X, compiler="cpu")
    wire_bytes = estimated.wire_bytes
    assert wire_bytes > 0


def test_the_pure_form_of_the_message_trains():
    model, optimizer = make()
    graph, state = nnx.split((model, optimizer))

    def pure(state, x):
        model, optimizer = nnx.merge(graph, state)
        result = step(model, optimizer, x)
        return nnx.state((model, optimizer)), result

    run = sfx.filter_jit(pure)
    losses = []
    for _ in range(3):
        state, loss = run(state, X)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]


def test_containers_of_a_step_may_be_filled_anew():
    def scaled(params, batch):
        batch["x"] = batch["x"] / 255
        batch["rows"] = [jnp.ones(()), *batch["rows"]]
        params["w"] = params["w"] * 2
        return batch["x"] @ params["w"]

    params = {"w": jnp.ones((64, 8))}
    batch = {"x": X, "rows": [jnp.zeros(())]}
    assert sfx.cost.estimate(scaled, params, batch).wire_bytes == 0
    shape = sfx.filter_jit(scaled)(params, batch).shape
    assert shape == (32, 8)
    assert set(batch) == {"x", "rows"}
    assert params["w"].sum() == 64 * 8


class Trainer:
    def __init__(self):
        self.loss = None

    def step(self, x):
        self.loss = (x**2).sum()
        return x * 2


def test_traced_arrays_left_in_variables_are_an_error():
    losses = []
    seen = {}

    def appends(x):
        losses.append((x**2).sum())
        return x * 2

    def stores(scale, x):
        seen["loss"] = (x**2).sum()
        return x * scale

    trainer = Trainer()
    for leaking_step, name in (
        (appends, "losses"),
        (jax.jit(appends), "losses"),
        (ft.partial(stores, 2), "seen"),
        (trainer.step, "self"),
    ):
        with pytest.raises(ProgramError, match=f"leaves traced arrays in `{name}`"):
            sfx.cost.estimate(leaking_step, X)

    def logs(x):
        loss = (x**2).sum()
        leaked.append(loss)
        return x * 2, loss

    leaked = []
    # What is also returned is counted.
    assert sfx.cost.estimate(logs, X).wire_bytes > 0
