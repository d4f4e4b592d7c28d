"""Trains the demo's model under a plan, then on one device without a plan, prints both losses and compares them."""

import pathlib
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, UInt8

from shardfx import MeshSpec, ShardPlan, filter_jit, follow, misplaced, plan, report, shard, testing

from .model import AXIS_RULES, KV_HEADS, Transformer, loss


def stdlib_text(max_bytes: int = 8 << 20) -> UInt8[np.ndarray, " bytes"]:
    """Returns the standard library's own source files, in order of their paths, as one array of bytes.

    **Arguments:**

    - `max_bytes`: the maximum number of bytes.

    **Returns:**

    The bytes; the same on every run of one Python installation.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    others = ("test", "tests", "site-packages", "dist-packages")
    text = b""
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]:
        if len(text) < max_bytes and path.parent.name not in others:
            text += path.read_bytes()
    return np.frombuffer(text, np.uint8)[:max_bytes]


def batch(
    text: UInt8[np.ndarray, " bytes"], step: int, *, size: int, length: int, seed: int
) -> Int[np.ndarray, "size length"]:
    """Returns `size` random windows of `length` bytes of `text`; they depend only on `seed` and `step`."""
    starts = np.random.default_rng((seed, step)).integers(0, text.size - length, size=size)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


# The allowed difference of losses, in nats. Float32 sums in another order differ in the last bits, and training
# amplifies this. Over the default 100 steps the losses were seen to differ by 5e-6.
TOLERANCE = 1e-4


class Run(NamedTuple):
    """The settings of a training run: its length, its batches, its learning rate and its seed."""

    steps: int = 100
    batch_size: int = 16
    length: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


class DemoPlans(NamedTuple):
    """The plans of all arguments of a training step: model, optimizer state and batch."""

    model: ShardPlan
    optimizer: ShardPlan
    batch: ShardPlan


def default_mesh(device_count: int, axis_types: AxisType = AxisType.Auto) -> MeshSpec:
    """Returns a mesh data x fsdp x tensor: tensor and fsdp of size 2 if the number of devices allows it, data for the
    rest.
    """
    tensor = KV_HEADS if device_count % KV_HEADS == 0 else 1
    fsdp = 2 if device_count % (2 * tensor) == 0 else 1
    sizes = {"data": device_count // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
    return MeshSpec(sizes, axis_types=axis_types)


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """Returns AdamW with clipping of the gradient's norm, a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, run.learning_rate, max(run.steps // 10, 1), run.steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_plans(mesh: Any, run: Run) -> DemoPlans:
    """Plans model, optimizer state and batch from shapes alone. `mesh` may be a MeshSpec, or a Mesh to place arrays."""
    model = plan(eqx.filter_eval_shape(lambda: Transformer(key=jax.random.key(0))), mesh, axes=AXIS_RULES)
    text = jax.ShapeDtypeStruct((run.batch_size, run.length + 1), jnp.int32)
    return DemoPlans(
        model=model,
        optimizer=follow(make_optimizer(run).init, model),
        batch=plan(text, mesh, names=("batch", "sequence"), axes=AXIS_RULES),
    )


def make_step(optimizer: optax.GradientTransformation, model_plan: ShardPlan | None) -> Callable:
    """Returns the function of one training step; `model_plan` constrains the activations, `None` leaves them free."""

    def train_step(
        model: Transformer, state: optax.OptState, text: Int[Array, "batch length"]
    ) -> tuple[Transformer, optax.OptState, Float[Array, ""]]:
        value, gradients = eqx.filter_value_and_grad(loss)(model, text, model_plan)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    return train_step


def start_sharded(plans: DemoPlans, run: Run) -> tuple[Any, Transformer, optax.OptState]:
    """Returns the jitted step, the model and the optimizer state, with each array created in the shards of its plan."""
    optimizer, (model, state, _) = make_optimizer(run), plans
    step = filter_jit(
        make_step(optimizer, model), in_shardings=tuple(plans), out_shardings=(model, state, None), donate=(0, 1)
    )
    made = filter_jit(lambda key: Transformer(key=key), out_shardings=model)(jax.random.key(run.seed))
    init = filter_jit(lambda model: optimizer.init(model), in_shardings=(model,), out_shardings=state)
    return step, made, init(made)


def start_unsharded(run: Run) -> tuple[Callable, Transformer, optax.OptState]:
    """Returns the jitted step, the model and the optimizer state, made with Equinox alone on JAX's first device."""
    optimizer = make_optimizer(run)
    step = eqx.filter_jit(make_step(optimizer, None), donate="all")
    model = eqx.filter_jit(lambda key: Transformer(key=key))(jax.random.key(run.seed))
    return step, model, eqx.filter_jit(optimizer.init)(eqx.filter(model, eqx.is_array))


def train(
    started: tuple[Callable, Transformer, optax.OptState],
    text: UInt8[np.ndarray, " bytes"],
    run: Run,
    *,
    place: Callable[[np.ndarray], Array] = jnp.asarray,
    show: str = "",
) -> list[float]:
    """Runs the training steps and returns their losses.

    **Arguments:**

    - `started`: the result of `start_sharded` or `start_unsharded`; its arrays are donated.
    - `text`: the bytes to train on, from `stdlib_text`.
    - `run`: the settings.
    - `place`: puts a batch onto the devices of the step.
    - `show`: a name; with it, a line is printed for every tenth of the steps.

    **Returns:**

    The loss of each step.
    """
    step, model, state = started
    losses, begin = [], time.perf_counter()
    for number in range(1, run.steps + 1):
        tokens = batch(text, number - 1, size=run.batch_size, length=run.length + 1, seed=run.seed)
        model, state, value = step(model, state, place(tokens))
        # Waiting for each step keeps emulated devices from queueing more collectives than the runtime can hold.
        losses.append(float(value))
        if number == 1:
            begin = time.perf_counter()  # the first step compiles
        if show and number - 1 in _tenths(run.steps):
            rate = (number - 1) * run.batch_size * run.length / (time.perf_counter() - begin)
            speed = f"{rate:>9,.0f} tokens/s" if number > 1 else " compiled"
            print(f"{show:>10}  step {number:>4}/{run.steps}  loss {value:.4f}  {speed}", flush=True)
    return losses


def _tenths(steps: int) -> list[int]:
    """Returns the indices of the first step, of the last step, and of every tenth of the steps."""
    every = max(steps // 10, 1)
    return sorted({0, steps - 1, *range(every - 1, steps, every)})


def show(mesh: MeshSpec, devices: Sequence[Any], run: Run, *, width: int | None = None) -> bool:
    """Trains twice, sharded and not, and prints the plan, the progress and both loss curves.

    **Arguments:**

    - `mesh`: the mesh to shard over.
    - `devices`: the devices of the mesh, as many as it has.
    - `run`: the settings of both runs.
    - `width`: the maximum width of the plan's table in characters; `None` for no limit.

    **Returns:**

    Whether both runs have the same losses, within `TOLERANCE`, and `check_step` finds no difference.
    """
    begin, text = time.perf_counter(), stdlib_text()
    plans = make_plans(mesh.build(devices), run)
    model, optimizer, texts = plans
    kind = f"{'emulated ' if devices[0].platform == 'cpu' else ''}{devices[0].device_kind}"
    print(f"{len(devices)} x {kind}, as the mesh {mesh}.\n\nThe plan of the model:\n\n{report(model, width=width)}\n")
    started = start_sharded(plans, run)
    wrong = [*misplaced(started[1], model), *misplaced(started[2], optimizer)]
    print(
        f"The optimizer's state follows it: {len(optimizer.leaves)} arrays, {optimizer.bytes_per_device:,} bytes per "
        f"device.\nA batch, {list(texts.leaves[0].shape)}, is sharded as {texts.leaves[0].spec}.\n\n"
        "Parameters and optimizer state were made in shards: no device ever held a whole one.\n"
        f"Each holds {model.bytes_per_device:,} and {optimizer.bytes_per_device:,} bytes of them, "
        f"{f'NOT as planned: {wrong}' if wrong else 'as planned'}.\n"
        f"Training on {text.size:,} bytes of Python's standard library, batches of {run.batch_size} x {run.length}.\n"
    )
    tokens = batch(text, 0, size=run.batch_size, length=run.length + 1, seed=run.seed)
    checked = testing.check_step(*started, shard(tokens, texts))
    sharded = train(started, text, run, place=lambda tokens: shard(tokens, texts), show="sharded")
    del started
    print("\nThe same on one of the devices, without a plan, with Equinox alone:\n")
    unsharded = train(start_unsharded(run), text, run, show="one device")

    differences = [abs(one - two) for one, two in zip(sharded, unsharded, strict=True)]
    print(f"\n{'step':>6}  {'sharded':>9}  {'one device':>10}  {'difference':>10}")
    for at in _tenths(run.steps):
        bar = "#" * round(30 * sharded[at] / max(sharded))
        print(f"{at + 1:>6}  {sharded[at]:>9.5f}  {unsharded[at]:>10.5f}  {differences[at]:>10.1e}  {bar}")
    agree = max(differences) <= TOLERANCE
    print(f"\nLargest difference over {run.steps} steps: {max(differences):.1e} nats (allowed: {TOLERANCE:.0e}).")
    print("The curves are the same up to rounding." if agree else "THE CURVES DIFFER.")
    print(f"One step under the plan, beside one device in float64 (`check_step`):\n{checked}")
    print(f"{time.perf_counter() - begin:.0f} s in all.")
    return agree and bool(checked)
