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


@case("equinox-tabular-fully-sharded", cpu={"fsdp": 8}, v5e={"fsdp": 16})
def equinox_tabular(mesh: AnyMesh) -> Made:
    """Equinox modules with dropout and frozen numeric embeddings; every parameter cut
    in its largest dimension.
    """

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
            self.words = [eqx.nn.Embedding(640, 96, key=k) for k in word_keys]
            self.attention = [
                eqx.nn.MultiheadAttention(4, 96, dropout_p=0.1, key=k)
                for k in keys[2:4]
            ]
            self.feedforward = [eqx.nn.MLP(96, 96, 256, 1, key=k) for k in keys[4:6]]
            self.norm, self.head = eqx.nn.RMSNorm(96), eqx.nn.Linear(96, 1, key=keys[6])
            self.dropout = eqx.nn.Dropout(0.2)

        def __call__(self, numbers, words, *, key):
            wave = numbers[:, None] * lax.stop_gradient(self.numbers)
            rows = [e(i) for e, i in zip(self.words, words, strict=True)]
            x = jnp.concatenate(
                [
                    wave,
                    jnp.stack(rows),
                ]
            )
            for attend, feed, k in zip(
                self.attention, self.feedforward, jax.random.split(key), strict=True
            ):
                h = jax.vmap(self.norm)(x)
                drop_key = jax.random.fold_in(k, 1)
                attended = attend(h, h, h, key=k)
                x = x + self.dropout(attended, key=drop_key)
                x = x + jax.vmap(feed)(jax.vmap(self.norm)(x))
            return self.head(x.mean(0))[0]

    model = eqx.filter_eval_shape(Tabular, jax.random.key(0))
    arrays, static = eqx.partition(
        model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    arrays = fully_sharded(mesh, arrays, "fsdp")
    struct = on(mesh)
    optimizer = optax.adam(1e-3)

    def loss(arrays, numbers, words, goal, key):
        model = eqx.combine(arrays, static)
        row_keys = jax.random.split(key, numbers.shape[0])
        guess = jax.vmap(lambda n, w, k: model(n, w, key=k))(numbers, words, row_keys)
        return jnp.mean(optax.losses.log_cosh(guess, goal))

    def step(arrays, state, numbers, words, goal, key):
        value, grads = eqx.filter_value_and_grad(loss)(
            arrays, numbers, words, goal, key
        )
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(arrays, updates), state, value

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
    return jax.jit(step, donate_argnums=(0, 1)), args


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
    layer = {
        "qkv": struct((3, width, heads, size), None, None, "heads"),
        "gate": struct((width, heads, size), None, "heads"),
        "out": struct((heads, size, width), "heads"),
    }
    params = {"layers": [layer, layer], "embed": struct((1024, width))}
    decay = 1 - 2.0 ** (-5 - np.arange(heads))

    def retain(p, x):
        q, k, v = jnp.einsum("btd,cdhk->cbhtk", x, p["qkv"])
        chunks = [
            jnp.moveaxis(t.reshape(*t.shape[:2], -1, chunk, size), 2, 0)
            for t in (q, k, v)
        ]
        offset = np.arange(chunk)[:, None] - np.arange(chunk)
        powers = np.where(offset >= 0, decay[:, None, None] ** offset, 0)
        inside = powers.astype(np.float32)
        later = decay[:, None] ** (np.arange(chunk) + 1)
        arrived = later.astype(np.float32)
        earlier = decay[:, None] ** (chunk - 1 - np.arange(chunk))
        weights = earlier.astype(np.float32)

        def one(state, qkv):
            q, k, v = (t.astype(jnp.float32) for t in qkv)
            near = jnp.einsum(
                "bhqs,bhsv->bhqv", jnp.einsum("bhqk,bhsk->bhqs", q, k) * inside, v
            )
            far = jnp.einsum("bhqk,bhkv->bhqv", q * arrived[..., None], state)
            weighted = k * weights[..., None]
            state = state * (decay**chunk)[:, None, None] + jnp.einsum(
                "bhsk,bhsv->bhkv", weighted, v
            )
            return state, (near + far).astype(x.dtype)

        start = jnp.zeros((x.shape[0], heads, size, size))
        _, mixed = lax.scan(one, start, tuple(chunks))
        chunks_of_heads = jnp.moveaxis(mixed, 0, 2)
        mixed = chunks_of_heads.reshape(x.shape[0], heads, x.shape[1], size).swapaxes(
            1, 2
        )
        gate = jnp.einsum("btd,dhk->bthk", x, p["gate"])
        mixed = jax.nn.standardize(mixed) * jax.nn.silu(gate)
        return jnp.einsum("bthk,hkd->btd", mixed, p["out"])

    def loss(params, tokens):
        x = params["embed"][tokens]
        for p in params["layers"]:
            x = x + retain(p, x)
        logits = (x @ params["embed"].T)[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    optimizer = optax.lion(1e-4)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = on(mesh)((8, 128), "data", dtype=jnp.int32)
    return jax.jit(step), (params, optimizer_state(mesh, optimizer, params), tokens)


@case("dit-adaptive-norm-noise-ema", cpu={"data": 8}, v5e={"data": 8, "fsdp": 2})
def dit(mesh: AnyMesh) -> Made:
    """Diffusion on patches with norms that follow the time and class, noise drawn in
    the step, and averaged weights.
    """
    width = 192
    heads = 6
    both = tuple(mesh.axis_names)
    block = {
        "adaptive": jnp.zeros((width, 6 * width)),
        "qkv": jnp.zeros((width, 3, heads, width // heads)),
        "out": jnp.zeros((heads, width // heads, width)),
        "wide": jnp.zeros((width, 4 * width)),
        "narrow": jnp.zeros((4 * width, width)),
    }
    shapes = {
        "patch": jnp.zeros((2 * 2 * 4, width)),
        "class": jnp.zeros((101, width)),
        "time": [jnp.zeros((256, width)), jnp.zeros((width, width))],
        "blocks": jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), block),
        "final": jnp.zeros((width, 16)),
    }
    params = fully_sharded(mesh, shapes, both)

    def modulate(x, shift, scale):
        scaled = jax.nn.standardize(x) * (1 + scale[:, None])
        return scaled + shift[:, None]

    def denoise(params, latents, time, label):
        batch, side, _, channels = latents.shape
        patches = latents.reshape(batch, side // 2, 2, side // 2, 2, channels)
        x = patches.transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, (side // 2) ** 2, -1) @ params["patch"]
        frequencies = jnp.exp(-jnp.arange(128) * (math.log(10000) / 128))
        angles = time[:, None] * frequencies
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        hidden = jax.nn.silu(waves @ params["time"][0])
        condition = hidden @ params["time"][1] + params["class"][label]

        def layer(x, p):
            modulation = jax.nn.silu(condition) @ p["adaptive"]
            s1, c1, g1, s2, c2, g2 = jnp.split(modulation, 6, axis=-1)
            q, k, v = jnp.einsum("btd,dchk->cbthk", modulate(x, s1, c1), p["qkv"])
            mixed = jax.nn.dot_product_attention(q, k, v)
            x = x + g1[:, None] * jnp.einsum("bthk,hkd->btd", mixed, p["out"])
            wide = jax.nn.gelu(modulate(x, s2, c2) @ p["wide"])
            return (
                x + g2[:, None] * (wide @ p["narrow"]),
                None,
            )

        x, _ = lax.scan(layer, x, params["blocks"])
        final = jax.nn.standardize(x) @ params["final"]
        x = final.reshape(batch, side // 2, side // 2, 2, 2, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(latents.shape)

    def loss(params, latents, labels, key):
        a, b, c = jax.random.split(key, 3)
        time = jax.random.randint(a, labels.shape, 0, 1000)
        signals = jnp.cumprod(1 - jnp.linspace(1e-4, 2e-2, 1000))
        signal = signals[time][:, None, None, None]
        noise = jax.random.normal(b, latents.shape)
        labels = jnp.where(jax.random.bernoulli(c, 0.1, labels.shape), 100, labels)
        noised = jnp.sqrt(signal) * latents + jnp.sqrt(1 - signal) * noise
        predicted = denoise(params, noised, time.astype(jnp.float32), labels)
        return jnp.mean((predicted - noise) ** 2)

    optimizer = optax.adam(1e-4)

    def step(params, average, state, latents, labels, key):
        value, grads = jax.value_and_grad(loss)(params, latents, labels, key)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 1e-3), state, value

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
    return jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=out), (
        params,
        params,
        state,
        *inputs,
    )


@case("resnet-nhwc-batch-norm", cpu={"data": 8}, v5e={"data": 16})
def resnet_nhwc(mesh: AnyMesh) -> Made:
    """Bottleneck blocks with batch statistics over the whole batch and running
    averages, Nesterov momentum.
    """
    struct = on(mesh)

    def unit(size, inward, outward):
        return {
            "w": struct((size, size, inward, outward)),
            "scale": struct((outward,)),
            "bias": struct((outward,)),
        }

    blocks = [(64, 64, 1), (64, 128, 2), (128, 128, 1)]
    params = {
        "stem": unit(7, 3, 64),
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
    is_unit = lambda node: isinstance(node, dict) and "scale" in node
    running = jax.tree.map(
        lambda node: (
            {"mean": node["scale"], "var": node["scale"]} if is_unit(node) else ()
        ),
        params,
        is_leaf=is_unit,
    )

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
        normed = (x - mean) * lax.rsqrt(var + 1e-5)
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
            h, c = convolve(p["c"], s["c"], jax.nn.relu(h))
            x, skip = convolve(p["skip"], s["skip"], x, stride)
            x = jax.nn.relu(x + h)
            new_blocks.append({"a": a, "b": b, "c": c, "skip": skip})
        logits = x.mean((1, 2)) @ params["head"]
        return logits, {
            "stem": stem,
            "blocks": new_blocks,
            "head": (),
        }

    def loss(params, stats, images, labels):
        logits, stats = forward(params, stats, images)
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, 100), 0.1)
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return optax.softmax_cross_entropy(logits, smooth).mean() + 1e-4 * decay, (
            stats,
            logits,
        )

    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def step(params, stats, state, images, labels):
        grads, (stats, logits) = jax.grad(loss, has_aux=True)(
            params, stats, images, labels
        )
        updates, state = optimizer.update(grads, state)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return optax.apply_updates(params, updates), stats, state, accuracy

    images = struct((32, 64, 64, 3), "data")
    labels = struct((32,), "data", dtype=jnp.int32)
    args = (params, running, optimizer_state(mesh, optimizer, params), images, labels)
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


@case("dueling-dqn-replay", cpu={"data": 4, "model": 2}, v5e={"data": 8, "model": 2})
def dqn(mesh: AnyMesh) -> Made:
    """A cut buffer that new frames are written into and samples gathered from; a target
    replaced under a `cond`.
    """
    struct = on(mesh)
    size = 2048
    batch = 256
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

    def values(p, x):
        pixels = x.astype(jnp.float32) / 255
        h = jax.nn.relu(jax.nn.relu(pixels @ p["frames"]) @ p["hidden"])
        gain = h @ p["gain"]
        return h @ p["value"] + gain - gain.mean(-1, keepdims=True)

    def loss(params, target, buffer, index):
        now = buffer["frames"][index]
        later = buffer["frames"][(index + 1) % size]
        best = jnp.argmax(values(params, later), -1)
        following = values(target, later)
        after = jnp.take_along_axis(following, best[:, None], -1)[:, 0]
        estimates = values(params, now)[jnp.arange(batch), buffer["actions"][index]]
        goal = buffer["rewards"][index] + 0.99 * after
        return optax.huber_loss(estimates, lax.stop_gradient(goal)).mean()

    def step(params, target, buffer, fresh, count, key):
        start = (count * 32) % size
        buffer = jax.tree.map(
            lambda b, f: lax.dynamic_update_slice_in_dim(b, f, start, 0), buffer, fresh
        )
        index = jax.random.randint(key, (batch,), 0, size)
        grads = jax.grad(loss)(params, target, buffer, index)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        target = lax.cond(count % 100 == 0, lambda: params, lambda: target)
        return params, target, buffer, count + 1

    fresh = jax.tree.map(
        lambda leaf: struct((32, *leaf.shape[1:]), dtype=leaf.dtype), buffer
    )
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
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


CASES = (
    equinox_tabular,
    retention,
    dit,
    resnet_nhwc,
    dqn,
)
