import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import PathRules, ShardPlan, follow, plan, reshard
from shardfx.auto import replan


RULES = PathRules([("in/w", P("model", None)), ("out/w", P(None, "model")), ("b", P("model"))])


def params():
    rng = np.random.default_rng(0)
    return {
        "in": {"w": rng.normal(size=(24, 12)).astype(np.float32), "b": np.zeros(24, np.float32)},
        "out": {"w": rng.normal(size=(4, 24)).astype(np.float32), "b": np.zeros(4, np.float32)},
    }


def batch(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(24, 12)).astype(np.float32), rng.normal(size=(24, 4)).astype(np.float32)


def trainer(mesh, state_plan):
    """A step of Adam with its state under the plan and its batch over the data axis."""
    optimizer = optax.adam(0.05)
    rows = NamedSharding(mesh, P("data"))

    def loss(params, x, y):
        hidden = jax.nn.tanh(x @ params["in"]["w"].T + params["in"]["b"])
        return jnp.mean((hidden @ params["out"]["w"].T + params["out"]["b"] - y) ** 2)

    def step(state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    shardings = state_plan.shardings
    return jax.jit(step, in_shardings=(shardings, rows, rows), out_shardings=(shardings, None))


def test_training_goes_on_after_the_loss_of_two_devices():
    devices = np.asarray(jax.devices())
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    made = plan(params(), mesh, paths=RULES)
    state_plan = ShardPlan.join(params=made, opt=follow(optax.adam(0.05).init, made))
    state = {"params": params(), "opt": optax.adam(0.05).init(jax.tree.map(jnp.asarray, params()))}
    state = jax.device_put(state, state_plan.shardings)
    step, undisturbed, steady, losses = trainer(mesh, state_plan), [], state, []
    for at in range(6):
        steady, value = step(steady, *batch(at))
        undisturbed.append(float(value))

    # Devices 2 and 7 are gone: one replica of each half of the model. What is left is read from the other replicas.
    lost = devices[[2, 7]]
    smaller = Mesh(np.asarray([device for device in devices if device not in lost]).reshape(3, 2), ("data", "model"))
    for at in range(6):
        if at == 3:
            again = replan(state_plan, smaller)
            state, step = reshard(state, again, lost=lost), trainer(smaller, again)
            assert not any(set(leaf.sharding.device_set) & set(lost) for leaf in jax.tree.leaves(state))
        state, value = step(state, *batch(at))
        losses.append(float(value))
    np.testing.assert_allclose(losses, undisturbed, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, steady)
