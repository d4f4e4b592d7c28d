"""The demo: trains a byte-level transformer under a plan, and then on one device
without a plan, on the same batches.

It uses only the public names of `shardfx`, as a user's program does. The model declares
its sharding only through the logical names of fields and activations.
"""

import math
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
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from shardfx import (
    AxisRules,
    MeshSpec,
    ShardPlan,
    constrain,
    field,
    filter_jit,
    follow,
    misplaced,
    plan,
    report,
    shard,
    testing,
)


VOCAB = 256
WIDTH = 128
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 16
HIDDEN = 384

# Parameters are stored sharded over fsdp and tensor, and gathered over fsdp to compute.
# Units keep heads from being split.
AXIS_RULES = AxisRules(
    [
        ("batch", ("data", "fsdp")),
        ("embed", "fsdp"),
        ("vocab", "tensor"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("hidden", "tensor"),
        ("layers", None),
        ("norm", None),
        ("sequence", None),
    ],
    units={"heads": HEAD_DIM, "kv_heads": HEAD_DIM},
    mesh_axes=("data", "fsdp", "tensor"),  # a mesh may lack some of them
)

_QUERY_WIDTH = HEADS * HEAD_DIM
_KV_WIDTH = KV_HEADS * HEAD_DIM


class Layer(eqx.Module):
    """A transformer layer: grouped-query attention with rotary positions, in which each
    key and value head serves several query heads, then a gated feed-forward block. Each
    has a norm before it and a residual connection.
    """

    attention_norm: Float[Array, "*layers embed"] = field(names=("norm",))
    query: Float[Array, "*layers embed heads"] = field(names=("embed", "heads"))
    key: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    value: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    out: Float[Array, "*layers heads embed"] = field(names=("heads", "embed"))
    mlp_norm: Float[Array, "*layers embed"] = field(names=("norm",))
    gate: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    up: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    down: Float[Array, "*layers hidden embed"] = field(names=("hidden", "embed"))

    def __init__(self, key: PRNGKeyArray):
        """Draws the weights of one layer."""
        keys = iter(jax.random.split(key, 7))

        def weights(rows: int, columns: int) -> Array:
            return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

        self.attention_norm = jnp.ones(WIDTH)
        self.mlp_norm = jnp.ones(WIDTH)
        self.query = weights(WIDTH, _QUERY_WIDTH)
        self.out = weights(_QUERY_WIDTH, WIDTH)
        self.key = weights(WIDTH, _KV_WIDTH)
        self.value = weights(WIDTH, _KV_WIDTH)
        self.gate = weights(WIDTH, HIDDEN)
        self.up = weights(WIDTH, HIDDEN)
        self.down = weights(HIDDEN, WIDTH)

    def __call__(
        self,
        x: Float[Array, "b s embed"],
        plan: ShardPlan | None,
    ) -> Float[Array, "b s embed"]:
        """Returns the output of the layer for its input `x`. The mesh and rules of
        `plan` shard the activations; with `None` they are not constrained.
        """
        x = x + self.attention(_normed(x, self.attention_norm), plan)
        normed = _normed(x, self.mlp_norm)
        gate = _project(normed, self.gate, "hidden", plan)
        up = _project(normed, self.up, "hidden", plan)
        gated = jax.nn.silu(gate) * up
        return x + _project(gated, self.down, None, plan, summed_name="hidden")

    def attention(
        self,
        x: Float[Array, "b s embed"],
        plan: ShardPlan | None,
    ) -> Float[Array, "b s embed"]:
        """Returns the causal attention of `x` over its own positions, sharded between
        heads.
        """
        query = _rotate(_heads(_project(x, self.query, "heads", plan), HEADS))
        key = _heads(_project(x, self.key, "kv_heads", plan), KV_HEADS)
        value = _heads(_project(x, self.value, "kv_heads", plan), KV_HEADS)
        key = _per_query_head(_rotate(key), plan)
        value = _per_query_head(value, plan)
        scores = _einsum("bqhd,bthd->bhqt", query, key) / math.sqrt(HEAD_DIM)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        mixed = _einsum("bhqt,bthd->bqhd", weights, value).reshape(
            *x.shape[:2], _QUERY_WIDTH
        )
        return _project(mixed, self.out, None, plan, summed_name="heads")


class Transformer(eqx.Module):
    """A language model that maps bytes to logits of the next byte."""

    embedding: Float[Array, "vocab embed"] = field(names=("vocab", "embed"))
    # One Layer whose arrays have a leading dimension over layers, so that `scan` can
    # run over it.
    layers: Layer = field(stacked=("layers",))
    norm: Float[Array, " embed"] = field(names=("norm",))
    unembedding: Float[Array, "embed vocab"] = field(names=("embed", "vocab"))

    def __init__(self, *, key: PRNGKeyArray):
        first, middle, last = jax.random.split(key, 3)
        self.embedding = jax.random.normal(first, (VOCAB, WIDTH)) / 2
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(middle, LAYERS))
        self.norm = jnp.ones(WIDTH)
        self.unembedding = jax.random.normal(last, (WIDTH, VOCAB)) / math.sqrt(WIDTH)

    def __call__(
        self,
        tokens: Int[Array, "batch sequence"],
        plan: ShardPlan | None = None,
    ) -> Float[Array, "batch sequence vocab"]:
        """Returns, for every position, the logits of the byte that follows it.

        The mesh and rules of `plan` shard the activations; with `None` they are not
        constrained.
        """
        # With 256 byte values, a product with one-hot rows is as cheap as a lookup, and
        # shards like any matrix product.
        rows = jax.nn.one_hot(tokens, VOCAB)
        rows = _constrain(rows, ("batch", "sequence", None), plan)
        x = _project(rows, self.embedding, None, plan)
        x, _ = jax.lax.scan(lambda x, layer: (layer(x, plan), None), x, self.layers)
        return _project(_normed(x, self.norm), self.unembedding, "vocab", plan)


def loss(
    model: Transformer,
    text: Int[Array, "batch length"],
    plan: ShardPlan | None = None,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy, in nats per byte, of all bytes of `text` but the
    first. Each byte is predicted from the bytes before it. `plan` shards the
    activations; `None` leaves them free.
    """
    logits = model(text[:, :-1], plan)
    targets = jax.nn.one_hot(text[:, 1:], VOCAB)
    targets = _constrain(targets, ("batch", "sequence", "vocab"), plan)
    normalizers = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.sum(logits * targets, axis=-1)
    return jnp.mean(normalizers - target_logits)


def _project(
    x: Array,
    weight: Array,
    out_name: str | None,
    plan: ShardPlan | None,
    summed_name: str | None = None,
) -> Array:
    """Returns `x @ weight`, whose last dimension has the logical name `out_name`.

    The weight is first gathered over the mesh axis fsdp. `summed_name` is the logical
    name of the dimension that the product sums over. A dimension without a name
    (`None`) is not sharded. `plan` has the mesh and the rules; with `None` nothing is
    sharded.
    """
    weight = _constrain(weight, (summed_name, out_name), plan)
    result_names = ("batch", "sequence", out_name)
    if plan is None or AxisType.Explicit not in plan.mesh.axis_types:
        return _constrain(_einsum("bsd,de->bse", x, weight), result_names, plan)
    # Under Explicit axes, a contraction over a sharded dimension needs the sharding of
    # its result.
    spec = plan.sharding(result_names, (*x.shape[:-1], weight.shape[-1])).spec
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, spec)
    return _einsum("bsd,de->bse", x, weight, out_sharding=sharding)


def _heads(x: Float[Array, "b s rows"], heads: int) -> Float[Array, "b s heads d"]:
    """Returns `x` with its last dimension split into heads and HEAD_DIM."""
    return x.reshape(*x.shape[:2], heads, HEAD_DIM)


def _per_query_head(
    x: Float[Array, "b s kv_heads d"],
    plan: ShardPlan | None,
) -> Float[Array, "b s heads d"]:
    """Returns key or value heads with one head for each query head, sharded like the
    query heads. A head that several query heads share is repeated.
    """
    batch, length, *_ = x.shape
    shape = (batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    groups = jnp.broadcast_to(x[:, :, :, None], shape)
    rows = groups.reshape(batch, length, _QUERY_WIDTH)
    return _heads(_constrain(rows, ("batch", "sequence", "heads"), plan), HEADS)


def _constrain(
    x: Array,
    names: tuple[str | None, ...],
    plan: ShardPlan | None,
) -> Array:
    """Returns `x`, constrained to the sharding of these logical names unless `plan` is
    `None`.
    """
    if plan is None:
        return x
    return constrain(x, names, plan)


def _einsum(equation: str, *operands: Array, **kwargs: Any) -> Array:
    """`jnp.einsum` at full precision."""
    # At default precision, accelerators round the factors, and the rounding depends on
    # the shard.
    return jnp.einsum(
        equation,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        **kwargs,
    )


def _normed(
    x: Float[Array, "b s embed"],
    scale: Float[Array, " embed"],
) -> Float[Array, "b s embed"]:
    """Returns `x` divided by its root mean square over the last dimension, times
    `scale`.
    """
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x: Float[Array, "b s heads d"]) -> Float[Array, "b s heads d"]:
    """Returns `x` with rotary positions. Pairs of elements, one from each half of a
    head, are rotated by angles that grow with the position.
    """
    frequencies = 10_000 ** (-jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1)


def stdlib_text(max_bytes: int = 8 << 20) -> UInt8[np.ndarray, " bytes"]:
    """Returns the first `max_bytes` of the source files of Python's standard library,
    in order of their paths.

    Every run of one Python installation returns the same bytes.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped_folders = ("test", "tests", "site-packages", "dist-packages")
    text = bytearray()
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]:
        if len(text) < max_bytes and path.parent.name not in skipped_folders:
            text += path.read_bytes()
    return np.frombuffer(bytes(text[:max_bytes]), np.uint8)


def batch(
    text: UInt8[np.ndarray, " bytes"],
    step: int,
    *,
    size: int,
    length: int,
    seed: int,
) -> Int[np.ndarray, "size length"]:
    """Returns `size` random windows of `length` bytes of `text`. They depend only on
    `seed` and `step`.
    """
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, text.size - length, size=size)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


# The allowed difference of losses, in nats. Float32 sums in another order differ in the
# last bits, and training amplifies this. Over the default 100 steps the losses were
# seen to differ by 5e-6.
TOLERANCE = 1e-4


class Run(NamedTuple):
    """The settings of a training run. A batch has `batch_size` windows of text, each
    with `length` predicted bytes.
    """

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
    """Returns a mesh of `device_count` devices with the axes data, fsdp and tensor, all
    of the type `axis_types`. The sizes of fsdp and tensor are 2 if the number of
    devices allows it, and all other devices are along data.
    """
    tensor = KV_HEADS if device_count % KV_HEADS == 0 else 1
    fsdp = 2 if device_count % (2 * tensor) == 0 else 1
    sizes = {"data": device_count // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
    return MeshSpec(sizes, axis_types=axis_types)


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """Returns AdamW with clipping of the gradient's norm, a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, run.learning_rate, max(run.steps // 10, 1), run.steps + 1
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )


def make_plans(mesh: Any, run: Run) -> DemoPlans:
    """Plans model, optimizer state and batch from shapes alone, for a MeshSpec or for a
    jax Mesh.
    """
    structs = eqx.filter_eval_shape(lambda: Transformer(key=jax.random.key(0)))
    model = plan(structs, mesh, axes=AXIS_RULES)
    text = jax.ShapeDtypeStruct((run.batch_size, run.length + 1), jnp.int32)
    return DemoPlans(
        model=model,
        optimizer=follow(make_optimizer(run).init, model),
        batch=plan(text, mesh, names=("batch", "sequence"), axes=AXIS_RULES),
    )


def make_step(
    optimizer: optax.GradientTransformation,
    model_plan: ShardPlan | None,
) -> Callable:
    """Returns the function of one training step. `model_plan` constrains the
    activations; `None` leaves them free.
    """

    def train_step(
        model: Transformer,
        state: optax.OptState,
        text: Int[Array, "batch length"],
    ) -> tuple:
        value, gradients = eqx.filter_value_and_grad(loss)(model, text, model_plan)
        arrays = eqx.filter(model, eqx.is_array)
        updates, state = optimizer.update(gradients, state, arrays)
        return eqx.apply_updates(model, updates), state, value

    return train_step


class Started(NamedTuple):
    """The jitted step, and the model and the optimizer state that it begins with."""

    step: Any
    model: Transformer
    state: optax.OptState


def start_sharded(plans: DemoPlans, run: Run) -> Started:
    """Returns what training begins with. Each array is made directly in the shards of
    its plan.
    """
    optimizer = make_optimizer(run)
    step = filter_jit(
        make_step(optimizer, plans.model),
        in_shardings=tuple(plans),
        out_shardings=(plans.model, plans.optimizer, None),
        donate=(0, 1),
    )
    make = filter_jit(lambda key: Transformer(key=key), out_shardings=plans.model)
    model = make(jax.random.key(run.seed))
    init = filter_jit(
        lambda model: optimizer.init(model),
        in_shardings=(plans.model,),
        out_shardings=plans.optimizer,
    )
    return Started(step=step, model=model, state=init(model))


def start_unsharded(run: Run) -> Started:
    """Returns what training begins with, made only with Equinox, on JAX's first
    device.
    """
    optimizer = make_optimizer(run)
    step = eqx.filter_jit(make_step(optimizer, None), donate="all")
    make = eqx.filter_jit(lambda key: Transformer(key=key))
    model = make(jax.random.key(run.seed))
    init = eqx.filter_jit(optimizer.init)
    state = init(eqx.filter(model, eqx.is_array))
    return Started(step=step, model=model, state=state)


def train(
    started: Started,
    text: UInt8[np.ndarray, " bytes"],
    run: Run,
    *,
    place: Callable[[np.ndarray], Array] = jnp.asarray,
    show: str = "",
) -> list[float]:
    """Runs the training steps and returns their losses.

    - `started`: the result of `start_sharded` or `start_unsharded`; its arrays are
      donated.
    - `place`: puts a batch onto the devices of the step.
    - `show`: a name. With it, a line is printed for the first step and after each tenth
      of the steps.
    """
    model = started.model
    state = started.state
    losses = []
    begin = time.perf_counter()
    for number in range(1, run.steps + 1):
        tokens = batch(
            text,
            number - 1,
            size=run.batch_size,
            length=run.length + 1,
            seed=run.seed,
        )
        model, state, value = started.step(model, state, place(tokens))
        # Waiting for each step keeps emulated devices from queueing more collectives
        # than the runtime can hold.
        losses.append(float(value))
        if number == 1:
            begin = time.perf_counter()  # the first step compiles
        if show and number - 1 in _tenths(run.steps):
            speed = " compiled"
            if number > 1:
                token_count = (number - 1) * run.batch_size * run.length
                rate = token_count / (time.perf_counter() - begin)
                speed = f"{rate:>9,.0f} tokens/s"
            print(
                f"{show:>10}  step {number:>4}/{run.steps}  loss {value:.4f}  {speed}",
                flush=True,
            )
    return losses


def _tenths(steps: int) -> list[int]:
    """Returns the indices of the first step, of the last step, and of every tenth of
    the steps.
    """
    every = max(steps // 10, 1)
    return sorted({0, steps - 1, *range(every - 1, steps, every)})


def _print_curves(sharded: Sequence[float], unsharded: Sequence[float]) -> bool:
    """Prints the losses of both runs side by side, and returns whether they are the same,
    within `TOLERANCE`.
    """
    differences = []
    for sharded_loss, unsharded_loss in zip(sharded, unsharded, strict=True):
        differences.append(abs(sharded_loss - unsharded_loss))
    # Unlike Python's, NumPy's `max` is NaN if a difference is.
    largest_difference = np.max(differences)
    highest_loss = np.max(sharded)
    print(f"\n{'step':>6}  {'sharded':>9}  {'one device':>10}  {'difference':>10}")
    for step_number in _tenths(len(sharded)):
        bar = ""
        if math.isfinite(highest_loss):
            bar = "#" * round(30 * sharded[step_number] / highest_loss)
        print(
            f"{step_number + 1:>6}  {sharded[step_number]:>9.5f}  {unsharded[step_number]:>10.5f} "
            f" {differences[step_number]:>10.1e}  {bar}"
        )
    are_equal = bool(largest_difference <= TOLERANCE)
    print(
        f"\nLargest difference over {len(sharded)} steps: {largest_difference:.1e} nats"
        f" (allowed: {TOLERANCE:.0e})."
    )
    if are_equal:
        print("The curves are the same up to rounding.")
    else:
        print("THE CURVES DIFFER.")
    return are_equal


def show(
    mesh: MeshSpec,
    devices: Sequence[Any],
    run: Run,
    *,
    width: int | None = None,
) -> bool:
    """Trains twice, with and without a plan, and prints the plan, the progress and both
    loss curves.

    Returns whether both runs have the same losses, within `TOLERANCE`, and `check_step`
    finds no difference. `width` is the maximum width of the plan's table in characters.
    """
    begin = time.perf_counter()
    text = stdlib_text()
    plans = make_plans(mesh.build(devices), run)
    model_plan, optimizer_plan, batch_plan = plans
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = f"emulated {kind}"
    print(
        f"{len(devices)} x {kind}, as the mesh {mesh}.\n\nThe plan of the"
        f" model:\n\n{report(model_plan, width=width)}\n"
    )
    started = start_sharded(plans, run)
    misplaced_arrays = [
        *misplaced(started.model, model_plan),
        *misplaced(started.state, optimizer_plan),
    ]
    placement = "as planned"
    if misplaced_arrays:
        placement = f"NOT as planned: {misplaced_arrays}"
    print(
        f"The optimizer's state follows it: {len(optimizer_plan.leaves)} arrays,"
        f" {optimizer_plan.bytes_per_device:,} bytes per device.\nA batch,"
        f" {list(batch_plan.leaves[0].shape)}, is sharded as"
        f" {batch_plan.leaves[0].spec}.\n\nParameters and optimizer state were made in"
        " shards: no device ever held a whole one.\nEach holds"
        f" {model_plan.bytes_per_device:,} and {optimizer_plan.bytes_per_device:,} bytes"
        f" of them, {placement}.\nTraining on"
        f" {text.size:,} bytes of Python's standard library, batches of"
        f" {run.batch_size} x {run.length}.\n"
    )
    tokens = batch(text, 0, size=run.batch_size, length=run.length + 1, seed=run.seed)
    checked = testing.check_step(*started, shard(tokens, batch_plan))
    sharded = train(
        started,
        text,
        run,
        place=lambda tokens: shard(tokens, batch_plan),
        show="sharded",
    )
    del started
    print("\nThe same on one of the devices, without a plan, with Equinox alone:\n")
    unsharded = train(start_unsharded(run), text, run, show="one device")

    losses_are_equal = _print_curves(sharded, unsharded)
    print(
        "One step under the plan, beside one device in float64"
        f" (`check_step`):\n{checked}"
    )
    print(f"{time.perf_counter() - begin:.0f} s in all.")
    return losses_are_equal and bool(checked)
