"""Steps of the sealed half, 4 of 5."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._case import AnyMesh, Made, case, fully_sharded, on, optimizer_state, shardings


def _tabular_module():
    class Tabular(eqx.Module):
        numbers: jax.Array
        words: list[eqx.nn.Embedding]
        attention: list[eqx.nn.MultiheadAttention]
        feedforward: list[eqx.nn.MLP]
        norm: eqx.nn.RMSNorm
        head: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            keys = jax.random.split(key, 8)
            self.numbers = jax.random.normal(keys[0], (24, 96))
            word_keys = jax.random.split(keys[1], 8)
            words = []
            for k in word_keys:
                words.append(eqx.nn.Embedding(640, 96, key=k))
            self.words = words
            self.attention = [
                eqx.nn.MultiheadAttention(4, 96, dropout_p=0.1, key=k)
                for k in keys[2:4]
            ]
            feed_keys = keys[4:6]
            self.feedforward = [eqx.nn.MLP(96, 96, 256, 1, key=k) for k in feed_keys]
            self.norm = eqx.nn.RMSNorm(96)
            self.head = eqx.nn.Linear(96, 1, key=keys[6])
            self.dropout = eqx.nn.Dropout(0.2)

        def __call__(self, numbers, words, *, key):
            frozen = lax.stop_gradient(self.numbers)
            wave = numbers[:, None] * frozen
            rows = []
            for e, i in zip(self.words, words, strict=True):
                rows.append(e(i))
            word_rows = jnp.stack(rows)
            x = jnp.concatenate(
                [
                    wave,
                    word_rows,
                ]
            )
            block_keys = jax.random.split(key)
            for attend, feed, k in zip(
                self.attention, self.feedforward, block_keys, strict=True
            ):
                h = jax.vmap(self.norm)(x)
                drop_key = jax.random.fold_in(k, 1)
                attended = attend(h, h, h, key=k)
                dropped = self.dropout(attended, key=drop_key)
                x = x + dropped
                normed = jax.vmap(self.norm)(x)
                fed = jax.vmap(feed)(normed)
                x = x + fed
            means = x.mean(0)
            return self.head(means)[0]

    return Tabular


@case("equinox-tabular-fully-sharded", cpu={"fsdp": 8}, v5e={"fsdp": 16})
def equinox_tabular(mesh: AnyMesh) -> Made:
    """Equinox modules with dropout and frozen numeric embeddings; every parameter cut
    in its largest dimension.
    """

    Tabular = _tabular_module()

    model = eqx.filter_eval_shape(Tabular, jax.random.key(0))

    def is_struct(leaf):
        return isinstance(leaf, jax.ShapeDtypeStruct)

    arrays, static = eqx.partition(model, is_struct)
    arrays = fully_sharded(mesh, arrays, "fsdp")
    struct = on(mesh)
    optimizer = optax.adam(1e-3)

    def loss(arrays, numbers, words, goal, key):
        model = eqx.combine(arrays, static)
        row_keys = jax.random.split(key, numbers.shape[0])

        def guess_row(n, w, k):
            return model(n, w, key=k)

        guess = jax.vmap(guess_row)(numbers, words, row_keys)
        distances = optax.losses.log_cosh(guess, goal)
        return jnp.mean(distances)

    def step(arrays, state, numbers, words, goal, key):
        differentiated = eqx.filter_value_and_grad(loss)
        value, grads = differentiated(arrays, numbers, words, goal, key)
        updates, state = optimizer.update(grads, state)
        updated = eqx.apply_updates(arrays, updates)
        return updated, state, value

    numbers = struct((64, 24), "fsdp")
    words = struct((64, 8), "fsdp", dtype=jnp.int32)
    targets = struct((64,), "fsdp")
    inputs = (
        numbers,
        words,
        targets,
    )
    state = optimizer_state(mesh, optimizer, arrays)
    key = struct((), dtype=jax.random.key(0).dtype)
    args = (
        arrays,
        state,
        *inputs,
        key,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, args


def _retention_params(struct, width, heads, size):
    layer = {
        "qkv": struct((3, width, heads, size), None, None, "heads"),
        "gate": struct((width, heads, size), None, "heads"),
        "out": struct((heads, size, width), "heads"),
    }
    params = {"layers": [layer, layer], "embed": struct((1024, width))}
    decay = 1 - 2.0 ** (-5 - np.arange(heads))
    return params, decay


def _retention_of(chunk, size, decay, heads):
    def retain(p, x):
        q, k, v = jnp.einsum("btd,cdhk->cbhtk", x, p["qkv"])
        chunks = []
        for t in (q, k, v):
            chunks.append(jnp.moveaxis(t.reshape(*t.shape[:2], -1, chunk, size), 2, 0))
        positions = np.arange(chunk)
        offset = positions[:, None] - positions
        decays = decay[:, None, None] ** offset
        powers = np.where(offset >= 0, decays, 0)
        inside = powers.astype(np.float32)
        steps = np.arange(chunk) + 1
        later = decay[:, None] ** steps
        arrived = later.astype(np.float32)
        remaining = chunk - 1 - np.arange(chunk)
        earlier = decay[:, None] ** remaining
        weights = earlier.astype(np.float32)

        def one(state, qkv):
            q, k, v = (t.astype(jnp.float32) for t in qkv)
            products = jnp.einsum("bhqk,bhsk->bhqs", q, k)
            near = jnp.einsum("bhqs,bhsv->bhqv", products * inside, v)
            decayed = q * arrived[..., None]
            far = jnp.einsum("bhqk,bhkv->bhqv", decayed, state)
            weighted = k * weights[..., None]
            kept_state = state * (decay**chunk)[:, None, None]
            added = jnp.einsum("bhsk,bhsv->bhkv", weighted, v)
            state = kept_state + added
            mixed = (near + far).astype(x.dtype)
            return state, mixed

        start = jnp.zeros((x.shape[0], heads, size, size))
        _, mixed = lax.scan(one, start, tuple(chunks))
        chunks_of_heads = jnp.moveaxis(mixed, 0, 2)
        rows = chunks_of_heads.reshape(x.shape[0], heads, x.shape[1], size)
        mixed = rows.swapaxes(1, 2)
        gate = jnp.einsum("btd,dhk->bthk", x, p["gate"])
        opened = jax.nn.silu(gate)
        normed = jax.nn.standardize(mixed)
        mixed = normed * opened
        return jnp.einsum("bthk,hkd->btd", mixed, p["out"])

    return retain


@case(
    "retention-chunks-by-scan", cpu={"data": 4, "heads": 2}, v5e={"data": 4, "heads": 4}
)
def retention(mesh: AnyMesh) -> Made:
    """Linear attention with decays, a scan over chunks that carries a state for each
    head; bfloat16, Lion.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    heads = 8
    size = 32
    chunk = 16
    params, decay = _retention_params(struct, width, heads, size)

    retain = _retention_of(chunk, size, decay, heads)

    def loss(params, tokens):
        x = params["embed"][tokens]
        for p in params["layers"]:
            retained = retain(p, x)
            x = x + retained
        answers = x @ params["embed"].T
        earlier = answers[:, :-1]
        logits = earlier.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    optimizer = optax.lion(1e-4)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    tokens = on(mesh)((8, 128), "data", dtype=jnp.int32)
    jitted = jax.jit(step)
    state = optimizer_state(mesh, optimizer, params)
    return jitted, (params, state, tokens)


def _dit_params(width, heads, mesh, both):
    block = {
        "adaptive": jnp.zeros((width, 6 * width)),
        "qkv": jnp.zeros((width, 3, heads, width // heads)),
        "out": jnp.zeros((heads, width // heads, width)),
        "wide": jnp.zeros((width, 4 * width)),
        "narrow": jnp.zeros((4 * width, width)),
    }

    def stacked(leaf):
        return jnp.zeros((3, *leaf.shape))

    shapes = {
        "patch": jnp.zeros((2 * 2 * 4, width)),
        "class": jnp.zeros((101, width)),
        "time": [jnp.zeros((256, width)), jnp.zeros((width, width))],
        "blocks": jax.tree.map(stacked, block),
        "final": jnp.zeros((width, 16)),
    }
    params = fully_sharded(mesh, shapes, both)
    return params


def _dit_denoiser():
    def modulate(x, shift, scale):
        normed = jax.nn.standardize(x)
        scaled = normed * (1 + scale[:, None])
        return scaled + shift[:, None]

    def denoise(params, latents, time, label):
        batch, side, _, channels = latents.shape
        patches = latents.reshape(batch, side // 2, 2, side // 2, 2, channels)
        x = patches.transpose(0, 1, 3, 2, 4, 5)
        count = (side // 2) ** 2
        rows = x.reshape(batch, count, -1)
        x = rows @ params["patch"]
        rate = math.log(10000) / 128
        frequencies = jnp.exp(-jnp.arange(128) * rate)
        moments = time[:, None]
        angles = moments * frequencies
        cosines = jnp.cos(angles)
        waves = jnp.concatenate([cosines, jnp.sin(angles)], -1)
        hidden = jax.nn.silu(waves @ params["time"][0])
        timed = hidden @ params["time"][1]
        condition = timed + params["class"][label]

        def layer(x, p):
            modulation = jax.nn.silu(condition) @ p["adaptive"]
            s1, c1, g1, s2, c2, g2 = jnp.split(modulation, 6, axis=-1)
            modulated = modulate(x, s1, c1)
            q, k, v = jnp.einsum("btd,dchk->cbthk", modulated, p["qkv"])
            mixed = jax.nn.dot_product_attention(q, k, v)
            projected = jnp.einsum("bthk,hkd->btd", mixed, p["out"])
            x = x + g1[:, None] * projected
            modulated_rows = modulate(x, s2, c2)
            raised = modulated_rows @ p["wide"]
            wide = jax.nn.gelu(raised)
            lowered = wide @ p["narrow"]
            return (
                x + g2[:, None] * lowered,
                None,
            )

        x, _ = lax.scan(layer, x, params["blocks"])
        normed = jax.nn.standardize(x)
        final = normed @ params["final"]
        x = final.reshape(batch, side // 2, side // 2, 2, 2, channels)
        turned = x.transpose(0, 1, 3, 2, 4, 5)
        return turned.reshape(latents.shape)

    return denoise


@case("dit-adaptive-norm-noise-ema", cpu={"data": 8}, v5e={"data": 8, "fsdp": 2})
def dit(mesh: AnyMesh) -> Made:
    """Diffusion on patches with norms that follow the time and class, noise drawn in
    the step, and averaged weights.
    """
    width = 192
    heads = 6
    both = tuple(mesh.axis_names)
    params = _dit_params(width, heads, mesh, both)

    denoise = _dit_denoiser()

    def loss(params, latents, labels, key):
        a, b, c = jax.random.split(key, 3)
        time = jax.random.randint(a, labels.shape, 0, 1000)
        betas = jnp.linspace(1e-4, 2e-2, 1000)
        signals = jnp.cumprod(1 - betas)
        columns = signals[time]
        signal = columns[:, None, None, None]
        noise = jax.random.normal(b, latents.shape)
        is_dropped = jax.random.bernoulli(c, 0.1, labels.shape)
        labels = jnp.where(is_dropped, 100, labels)
        noise_scale = jnp.sqrt(1 - signal)
        signal_scale = jnp.sqrt(signal)
        noised = signal_scale * latents + noise_scale * noise
        times = time.astype(jnp.float32)
        predicted = denoise(params, noised, times, labels)
        squared_errors = (predicted - noise) ** 2
        return jnp.mean(squared_errors)

    optimizer = optax.adam(1e-4)

    def step(params, average, state, latents, labels, key):
        value, grads = jax.value_and_grad(loss)(params, latents, labels, key)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        new_average = optax.incremental_update(params, average, 1e-3)
        return params, new_average, state, value

    struct = on(mesh)
    state = optimizer_state(mesh, optimizer, params)
    of_params = shardings(params)
    out = (
        of_params,
        of_params,
        shardings(state),
        NamedSharding(mesh, P()),
    )
    latents = struct((32, 16, 16, 4), both)
    labels = struct((32,), both, dtype=jnp.int32)
    key = struct((2,), dtype=jnp.uint32)
    inputs = (
        latents,
        labels,
        key,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=out)
    return jitted, (
        params,
        params,
        state,
        *inputs,
    )


def _resnet_params(struct):
    def unit(size, inward, outward):
        return {
            "w": struct((size, size, inward, outward)),
            "scale": struct((outward,)),
            "bias": struct((outward,)),
        }

    blocks = [(64, 64, 1), (64, 128, 2), (128, 128, 1)]
    stem = unit(7, 3, 64)
    params = {
        "stem": stem,
        "blocks": [
            {
                "a": unit(1, i, o // 2),
                "b": unit(3, o // 2, o // 2),
                "c": unit(1, o // 2, o),
                "skip": unit(1, i, o),
            }
            for i, o, _ in blocks
        ],
        "head": struct((128, 100)),
    }

    def is_unit(node):
        return isinstance(node, dict) and "scale" in node

    def averages(node):
        return {"mean": node["scale"], "var": node["scale"]} if is_unit(node) else ()

    running = jax.tree.map(
        averages,
        params,
        is_leaf=is_unit,
    )
    return blocks, params, running


def _resnet_forward(blocks):
    def convolve(p, stats, x, stride=1):
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x,
            p["w"],
            (stride, stride),
            "SAME",
            dimension_numbers=dimensions,
        )
        mean = jnp.mean(x, (0, 1, 2))
        var = jnp.var(x, (0, 1, 2))
        new = {
            "mean": 0.9 * stats["mean"] + 0.1 * mean,
            "var": 0.9 * stats["var"] + 0.1 * var,
        }
        deviation = lax.rsqrt(var + 1e-5)
        normed = (x - mean) * deviation
        return normed * p["scale"] + p["bias"], new

    def forward(params, stats, images):
        x, stem = convolve(params["stem"], stats["stem"], images, 2)
        activated = jax.nn.relu(x)
        x = lax.reduce_window(
            activated, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        )
        new_blocks = []
        for p, s, (_, _, stride) in zip(
            params["blocks"], stats["blocks"], blocks, strict=True
        ):
            h, a = convolve(p["a"], s["a"], x)
            activated = jax.nn.relu(h)
            h, b = convolve(p["b"], s["b"], activated, stride)
            activated_rows = jax.nn.relu(h)
            h, c = convolve(p["c"], s["c"], activated_rows)
            x, skip = convolve(p["skip"], s["skip"], x, stride)
            residual = x + h
            x = jax.nn.relu(residual)
            statistics = {
                "a": a,
                "b": b,
                "c": c,
                "skip": skip,
            }
            new_blocks.append(statistics)
        means = x.mean((1, 2))
        logits = means @ params["head"]
        return logits, {
            "stem": stem,
            "blocks": new_blocks,
            "head": (),
        }

    return forward


@case("resnet-nhwc-batch-norm", cpu={"data": 8}, v5e={"data": 16})
def resnet_nhwc(mesh: AnyMesh) -> Made:
    """Bottleneck blocks with batch statistics over the whole batch and running
    averages, Nesterov momentum.
    """
    struct = on(mesh)

    blocks, params, running = _resnet_params(struct)

    forward = _resnet_forward(blocks)

    def loss(params, stats, images, labels):
        logits, stats = forward(params, stats, images)
        hot = jax.nn.one_hot(labels, 100)
        smooth = optax.smooth_labels(hot, 0.1)
        matrix_squares = []
        for p in jax.tree.leaves(params):
            if p.ndim > 1:
                matrix_squares.append(jnp.sum(p**2))
        decay = sum(matrix_squares)
        losses = optax.softmax_cross_entropy(logits, smooth)
        return losses.mean() + 1e-4 * decay, (
            stats,
            logits,
        )

    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def step(params, stats, state, images, labels):
        differentiated = jax.grad(loss, has_aux=True)
        grads, (stats, logits) = differentiated(params, stats, images, labels)
        updates, state = optimizer.update(grads, state)
        is_right = jnp.argmax(logits, -1)
        accuracy = jnp.mean(is_right == labels)
        updated = optax.apply_updates(params, updates)
        return updated, stats, state, accuracy

    images = struct((32, 64, 64, 3), "data")
    labels = struct((32,), "data", dtype=jnp.int32)
    state = optimizer_state(mesh, optimizer, params)
    args = (params, running, state, images, labels)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, args


def _dqn_params(struct, size):
    params = {
        "frames": struct((128, 512), None, "model"),
        "hidden": struct((512, 256), "model"),
        "value": struct((256, 1)),
        "gain": struct((256, 18)),
    }
    buffer = {
        "frames": struct((size, 128), "data", dtype=jnp.uint8),
        "actions": struct((size,), "data", dtype=jnp.int32),
        "rewards": struct((size,), "data"),
    }
    return params, buffer


@case("dueling-dqn-replay", cpu={"data": 4, "model": 2}, v5e={"data": 8, "model": 2})
def dqn(mesh: AnyMesh) -> Made:
    """A cut buffer that new frames are written into and samples gathered from; a target
    replaced under a `cond`.
    """
    struct = on(mesh)
    size = 2048
    batch = 256
    params, buffer = _dqn_params(struct, size)

    def values(p, x):
        pixels = x.astype(jnp.float32) / 255
        first = jax.nn.relu(pixels @ p["frames"])
        h = jax.nn.relu(first @ p["hidden"])
        gain = h @ p["gain"]
        mean_gain = gain.mean(-1, keepdims=True)
        return h @ p["value"] + gain - mean_gain

    def loss(params, target, buffer, index):
        now = buffer["frames"][index]
        following_index = (index + 1) % size
        later = buffer["frames"][following_index]
        next_values = values(params, later)
        best = jnp.argmax(next_values, -1)
        following = values(target, later)
        best_columns = best[:, None]
        picked = jnp.take_along_axis(following, best_columns, -1)
        after = picked[:, 0]
        actions = buffer["actions"][index]
        rows = jnp.arange(batch)
        estimates = values(params, now)[rows, actions]
        rewards = buffer["rewards"][index]
        goal = rewards + 0.99 * after
        losses = optax.huber_loss(estimates, lax.stop_gradient(goal))
        return losses.mean()

    def step(params, target, buffer, fresh, count, key):
        start = (count * 32) % size

        def written(b, f):
            return lax.dynamic_update_slice_in_dim(b, f, start, 0)

        buffer = jax.tree.map(written, buffer, fresh)
        index = jax.random.randint(key, (batch,), 0, size)
        grads = jax.grad(loss)(params, target, buffer, index)

        def descended(p, g):
            return p - 1e-3 * g

        params = jax.tree.map(descended, params, grads)
        is_due = count % 100 == 0
        target = lax.cond(is_due, lambda: params, lambda: target)
        next_count = count + 1
        return params, target, buffer, next_count

    def of_fresh(leaf):
        return struct((32, *leaf.shape[1:]), dtype=leaf.dtype)

    fresh = jax.tree.map(of_fresh, buffer)
    start = struct((), dtype=jnp.int32)
    key = struct((2,), dtype=jnp.uint32)
    args = (
        params,
        params,
        buffer,
        fresh,
        start,
        key,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, args


CASES = (
    equinox_tabular,
    retention,
    dit,
    resnet_nhwc,
    dqn,
)
