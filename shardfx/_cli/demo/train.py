"""Trains the demo's model under a plan, then the same on one device without one, and compares the losses."""

import dataclasses
import pathlib
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from shardfx import MeshSpec, ShardPlan, filter_jit, follow, plan

from .model import AXIS_RULES, KV_HEADS, Transformer, loss


def stdlib_text(max_bytes: int = 8 << 20) -> UInt8[np.ndarray, " bytes"]:
    """The standard library's own source files in order of their paths, as one array of bytes.

    **Arguments:**

    - `max_bytes`: where to stop.

    **Returns:**

    The bytes; the same on every run of one Python installation.

    **Raises:**

    `FileNotFoundError` if this Python was installed without its source files.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces, total = [], 0
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]:
        if path.parent.name in ("test", "tests", "site-packages", "dist-packages"):
            continue
        pieces.append(np.frombuffer(path.read_bytes(), np.uint8))
        total += pieces[-1].size
        if total >= max_bytes:
            break
    if not pieces:
        raise FileNotFoundError(
            f"no `*.py` files in {root}: this Python was installed without the sources of its standard library; "
            "install them (on Debian and Ubuntu: the package `libpython3-stdlib`)."
        )
    return np.concatenate(pieces)[:max_bytes]


def batch(
    text: UInt8[np.ndarray, " bytes"], step: int, *, size: int, length: int, seed: int
) -> Int[np.ndarray, "size length"]:
    """`size` windows of `length` bytes of `text`, at random places that depend on `seed` and `step` alone."""
    starts = np.random.default_rng((seed, step)).integers(0, text.size - length, size=size)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


# Sums of float32 in another order differ in the last bits, and training carries that on. Over the default 100
# steps the losses were seen to differ by 5e-6.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, and for how long."""

    steps: int = 100
    batch_size: int = 16
    length: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans of all that a training step takes."""

    model: ShardPlan
    optimizer: ShardPlan
    batch: ShardPlan


def default_mesh(device_count: int, axis_types: AxisType = AxisType.Auto) -> MeshSpec:
    """data x fsdp x tensor: two-way tensor and fsdp where the devices are even in number, data for the rest."""
    tensor = KV_HEADS if device_count % KV_HEADS == 0 else 1
    fsdp = 2 if device_count % (2 * tensor) == 0 else 1
    sizes = {"data": device_count // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
    return MeshSpec(sizes, axis_types=axis_types)


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's norm, with a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, run.learning_rate, max(run.steps // 10, 1), run.steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_plans(mesh: Any, run: Run) -> Plans:
    """Plans everything from shapes alone; `mesh` may be a MeshSpec, or a Mesh if arrays are to follow."""
    model = plan(eqx.filter_eval_shape(Transformer, key=_key_struct()), mesh, axes=AXIS_RULES)
    text = jax.ShapeDtypeStruct((run.batch_size, run.length + 1), jnp.int32)
    return Plans(
        model=model,
        optimizer=follow(make_optimizer(run).init, model),
        batch=plan(text, mesh, names=("batch", "sequence"), axes=AXIS_RULES),
    )


def make_step(optimizer: optax.GradientTransformation, model_plan: ShardPlan | None) -> Callable:
    """One training step; the plan, if there is one, lays out the activations."""

    def train_step(
        model: Transformer, state: optax.OptState, text: Int[Array, "batch length"]
    ) -> tuple[Transformer, optax.OptState, Float[Array, ""]]:
        value, gradients = eqx.filter_value_and_grad(loss)(model, text, model_plan)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    return train_step


def start_sharded(plans: Plans, run: Run) -> tuple[Any, Transformer, optax.OptState]:
    """The jitted step, and model and optimizer state, each array made in the shards that its plan says."""
    optimizer = make_optimizer(run)
    init = filter_jit(_init_model, out_shardings=plans.model)
    init_state = filter_jit(
        lambda model: optimizer.init(model), in_shardings=(plans.model,), out_shardings=plans.optimizer
    )
    step = filter_jit(
        make_step(optimizer, plans.model),
        in_shardings=(plans.model, plans.optimizer, plans.batch),
        out_shardings=(plans.model, plans.optimizer, None),
        donate=(0, 1),
    )
    model = init(jax.random.key(run.seed))
    return step, model, init_state(model)


def start_unsharded(run: Run) -> tuple[Callable, Transformer, optax.OptState]:
    """The same with Equinox alone, on JAX's first device."""
    optimizer = make_optimizer(run)
    step = eqx.filter_jit(make_step(optimizer, None), donate="all")
    model = eqx.filter_jit(_init_model)(jax.random.key(run.seed))
    return step, model, eqx.filter_jit(optimizer.init)(eqx.filter(model, eqx.is_array))


def train(
    started: tuple[Callable, Transformer, optax.OptState],
    text: UInt8[np.ndarray, " bytes"],
    run: Run,
    *,
    place: Callable[[np.ndarray], Array] = jnp.asarray,
    show: Callable[[int, float, float], None] = lambda step, value, rate: None,
) -> list[float]:
    """Runs the steps.

    **Arguments:**

    - `started`: what `start_sharded` or `start_unsharded` returned; its arrays are donated.
    - `text`: see `stdlib_text`.
    - `run`: what to train.
    - `place`: puts a batch where the step wants it.
    - `show`: called after every step with its number, its loss, and the tokens per second since the first step,
        which compiles.

    **Returns:**

    The loss of each step.
    """
    step, model, state = started
    losses, begin = [], time.perf_counter()
    for number, tokens in enumerate(_batches(text, run), start=1):
        model, state, value = step(model, state, place(tokens))
        # Waiting for each step keeps emulated devices from queueing more collectives than the runtime takes.
        losses.append(float(value))
        if number == 1:
            begin = time.perf_counter()
        seconds = time.perf_counter() - begin
        show(number, losses[-1], (number - 1) * run.batch_size * run.length / seconds if number > 1 else 0.0)
    return losses


def _init_model(key: PRNGKeyArray) -> Transformer:
    return Transformer(key=key)


def _key_struct() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _batches(text: UInt8[np.ndarray, " bytes"], run: Run) -> Iterator[Int[np.ndarray, "size length"]]:
    for step in range(run.steps):
        yield batch(text, step, size=run.batch_size, length=run.length + 1, seed=run.seed)
