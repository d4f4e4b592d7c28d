"""Steps of the sealed half, 2 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._case import (
    AnyMesh,
    Made,
    case,
    constrain,
    on,
    optimizer_state,
    other_mesh,
    shardings,
)


@case(
    "shard-map-over-another-mesh",
    cpu={"data": 4, "model": 2},
    v5e={"data": 4, "model": 4},
)
def other_mesh_sums(mesh: AnyMesh) -> Made:
    """A step on one mesh, with a norm that a `shard_map` over other axes of the same
    devices takes by `psum`.
    """
    struct = on(mesh)
    width = 256
    device_count = math.prod(mesh.shape.values())
    half = device_count // 2
    params = {
        "up": struct((width, 1024), None, "model"),
        "down": struct((1024, width), "model"),
        "scale": struct((width,)),
    }
    across = other_mesh(mesh, {"x": 2, "y": half})

    @functools.partial(
        jax.shard_map,
        mesh=across,
        in_specs=(P("y", "x"), P("x")),
        out_specs=P("y", "x"),
    )
    def norm(x, scale):
        squares = jnp.sum(x * x, -1, keepdims=True)
        total = lax.psum(squares, "x")
        mean_square = total / width
        scale_of_rows = lax.rsqrt(mean_square + 1e-6)
        return x * scale_of_rows * scale

    def loss(params, x, y):
        h = norm(x, params["scale"])
        hidden = jax.nn.relu(h @ params["up"])
        predicted = x + hidden @ params["down"]
        squared_errors = (predicted - y) ** 2
        return jnp.mean(squared_errors)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    x = struct((512, width), "data")
    jitted = jax.jit(step)
    return jitted, (
        params,
        x,
        x,
    )


def _dropout_params(struct, layers, width):
    return {
        "q": struct((layers, width, width), None, None, "tensor"),
        "k": struct((layers, width, width), None, None, "tensor"),
        "v": struct((layers, width, width), None, None, "tensor"),
        "o": struct((layers, width, width), None, "tensor"),
        "up": struct((layers, width, 768), None, None, "tensor"),
        "down": struct((layers, 768, width), None, "tensor"),
    }


def _drop(key, x, rate):
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    scaled = x / (1 - rate)
    kept_values = jnp.where(is_kept, scaled, 0)
    return kept_values.astype(x.dtype)


@case(
    "dropout-keys-for-each-layer",
    cpu={"data": 4, "tensor": 2},
    v5e={"data": 4, "tensor": 4},
)
def dropout(mesh: AnyMesh) -> Made:
    """Dropout in attention, residuals and whole layers, one key split for a scan;
    bfloat16, float32 softmax.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    layers = 3
    width = 256
    heads = 8
    params = _dropout_params(struct, layers, width)

    def layer(x, inputs):
        p, key = inputs
        a, b, c, d = jax.random.split(key, 4)
        batch, length, _ = x.shape
        q, k, v = (
            jnp.dot(x, p[name]).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        products = (q @ k.mT).astype(jnp.float32)
        scores = products / math.sqrt(width // heads)
        shares = jax.nn.softmax(scores)
        weights = shares.astype(x.dtype)
        attended = _drop(a, weights, 0.1) @ v
        mixed_heads = attended.transpose(0, 2, 1, 3)
        flat = mixed_heads.reshape(x.shape)
        mixed = flat @ p["o"]
        dropped = _drop(b, mixed, 0.1)
        h = x + dropped
        hidden = jax.nn.relu(h @ p["up"])
        lowered = hidden @ p["down"]
        dropped_rows = _drop(c, lowered, 0.1)
        h = h + dropped_rows
        keep = jax.random.bernoulli(d, 0.9, (batch, 1, 1))
        return jnp.where(keep, h, x), None

    def loss(params, x, y, key):
        keys = jax.random.split(key, layers)
        x, _ = lax.scan(layer, x, (params, keys))
        wide = x.astype(jnp.float32)
        distances = optax.cosine_distance(wide, y)
        return jnp.mean(distances)

    optimizer = optax.sgd(1e-2, momentum=0.9)

    def step(params, state, x, y, key):
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    x = struct((16, 48, width), "data")
    y = on(mesh)((16, 48, width), "data")
    key = struct((), dtype=jax.random.key(0).dtype)
    inputs = (
        x,
        y,
        key,
    )
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        *inputs,
    )


def _palm_params(struct, width, heads, size):
    return {
        "embed": struct((2048, width), "tp"),
        "q": struct((2, width, heads * size), None, None, "tp"),
        "kv": struct((2, width, 2 * size)),
        "out": struct((2, heads * size, width), None, "tp"),
        "wide": struct((2, width, 2, 512), None, None, None, "tp"),
        "narrow": struct((2, 512, width), None, "tp"),
        "scales": struct((2, width)),
    }


@case("palm-parallel-block-one-key-head", cpu={"tp": 8}, v5e={"tp": 16})
def palm(mesh: AnyMesh) -> Made:
    """Attention and SwiGLU side by side in each block, one head of keys that all
    devices hold; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    heads = 16
    size = 16
    params = _palm_params(struct, width, heads, size)

    def block(x, p):
        norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
        size_of_rows = norm / math.sqrt(width) + 1e-6
        scaled = x / size_of_rows
        h = scaled * p["scales"]
        query = h @ p["q"]
        q = query.reshape(*h.shape[:-1], heads, size)
        keys_and_values = h @ p["kv"]
        k, v = jnp.split(keys_and_values, 2, -1)
        products = jnp.einsum("bthd,bsd->bhts", q, k)
        scores = products / math.sqrt(size)
        bounded = jnp.tanh(scores / 30.0)
        scores = 30.0 * bounded
        positions = jnp.arange(x.shape[1])
        mask = positions[:, None] >= positions
        masked = jnp.where(mask, scores, -1e9)
        weights = jax.nn.softmax(masked)
        attended = jnp.einsum("bhts,bsd->bthd", weights, v)
        raised = jnp.einsum("btd,dgf->btgf", h, p["wide"])
        gate, up = jnp.moveaxis(raised, 2, 0)
        flat = attended.reshape(*x.shape[:2], -1)
        mixed = flat @ p["out"]
        gated = jax.nn.swish(gate) * up
        lowered = gated @ p["narrow"]
        return x + mixed + lowered

    def loss(params, tokens):
        embedded = params["embed"][tokens]
        x = embedded * math.sqrt(width)
        for layer in range(2):
            layer_params = {}
            for k, v in params.items():
                if k != "embed":
                    layer_params[k] = v[layer]
            x = block(x, layer_params)
        products = jnp.einsum("btd,vd->btv", x, params["embed"])
        earlier = products[:, :-1]
        logits = earlier.astype(jnp.float32)
        following = tokens[:, 1:]
        labels = jax.nn.one_hot(following, 2048)
        z = jax.nn.logsumexp(logits, -1)
        label_logits = jnp.sum(logits * labels, -1)
        losses = z - label_logits
        spread = jnp.mean(z**2)
        return jnp.mean(losses) + 1e-4 * spread

    def step(params, tokens):
        grads = jax.grad(loss)(params, tokens)
        norm = optax.global_norm(grads)
        scale = jnp.minimum(1.0, 1.0 / norm)

        def descended(p, g):
            return p - (1e-2 * scale * g).astype(p.dtype)

        return jax.tree.map(descended, params, grads)

    jitted = jax.jit(step)
    tokens = struct((8, 64), dtype=jnp.int32)
    return jitted, (params, tokens)


@case(
    "pipeline-of-stages-by-shifts",
    cpu={"stage": 4, "data": 2},
    v5e={"stage": 4, "data": 4},
)
def pipeline(mesh: AnyMesh) -> Made:
    """Stages along a cut dimension, mapped by `vmap`; a scan shifts microbatches from
    each to the next; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    stages = 4
    micro = 6
    params = {
        "up": struct((stages, 2, width, 512), "stage"),
        "down": struct((stages, 2, 512, width), "stage"),
    }

    def stage(p, x):
        def layer(x, p):
            hidden = jax.nn.silu(x @ p["up"])
            return x + hidden @ p["down"], None

        return lax.scan(layer, x, p)[0]

    def forward(params, batches):
        batch_shape = batches.shape[1:]
        state = jnp.zeros((stages, *batch_shape), batches.dtype)
        zeros = jnp.zeros((stages - 1, *batches.shape[1:]), batches.dtype)
        padded = jnp.concatenate([batches, zeros])

        def tick(state, fresh):
            fresh_row = fresh[None]
            state = jnp.concatenate([fresh_row, state[:-1]])
            state = constrain(mesh, state, "stage", "data")
            rematerialized = jax.checkpoint(stage)
            state = jax.vmap(rematerialized)(params, state)
            placed = constrain(mesh, state, "stage", "data")
            return placed, state[-1]

        outputs = lax.scan(tick, state, padded)[1]
        return outputs[stages - 1 :]

    def loss(params, batches, targets):
        outputs = forward(params, batches)
        differences = (outputs - targets).astype(jnp.float32)
        squares = jnp.square(differences)
        return jnp.mean(squares)

    def step(params, batches, targets):
        value, grads = jax.value_and_grad(loss)(params, batches, targets)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    batches = struct((micro, 32, width), None, "data")
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (params, batches, batches)


def _nucleus_params(struct, width, kv, size, length):
    params = {
        "embed": struct((2048, width)),
        "q": struct((width, kv, 4, size), None, "heads"),
        "kv": struct((2, width, kv, size), None, None, "heads"),
        "o": struct((kv, 4, size, width), "heads"),
        "head": struct((width, 2048), None, "heads"),
    }
    cache = struct((2, 32, length, kv, size), None, "batch", None, "heads")
    return params, cache


@case(
    "decode-ragged-positions-nucleus",
    cpu={"batch": 4, "heads": 2},
    v5e={"batch": 8, "heads": 2},
)
def decode_nucleus(mesh: AnyMesh) -> Made:
    """Each sequence writes at its own position by `.at[].set`; top-k, then nucleus by
    sorting and summing; sampled.
    """
    struct = on(mesh)
    width = 128
    kv = 2
    size = 32
    length = 96
    params, cache = _nucleus_params(
        struct=struct, width=width, kv=kv, size=size, length=length
    )

    def decode(params, cache, tokens, positions, key):
        x = params["embed"][tokens]
        rows = jnp.arange(tokens.shape[0])
        fresh = jnp.einsum("bd,cdgk->cbgk", x, params["kv"])
        cache = cache.at[:, rows, positions].set(fresh)
        q = jnp.einsum("bd,dghk->bghk", x, params["q"])
        products = jnp.einsum("bghk,bsgk->bghs", q, cache[0])
        scores = products * size**-0.5
        seen = jnp.arange(length) <= positions[:, None]
        seen_columns = seen[:, None, None]
        masked = jnp.where(seen_columns, scores, -1e9)
        weights = jax.nn.softmax(masked)
        out = params["o"].sum(1)
        attended = jnp.einsum("bghs,bsgk,gkd->bd", weights, cache[1], out)
        x = x + attended
        logits = x @ params["head"]
        best, ids = lax.top_k(logits, 64)
        order = jnp.argsort(-best, axis=-1)
        best = jnp.take_along_axis(best, order, -1)
        ids = jnp.take_along_axis(ids, order, -1)
        probabilities = jax.nn.softmax(best)
        running = jnp.cumsum(probabilities, -1)
        before = running - probabilities
        nucleus = jnp.where(before < 0.9, best, -jnp.inf)
        drawn = jax.random.categorical(key, nucleus)
        columns = drawn[:, None]
        chosen = jnp.take_along_axis(ids, columns, -1)
        next_positions = positions + 1
        return cache, chosen[:, 0], next_positions

    ids = functools.partial(struct, dtype=jnp.int32)
    tokens = ids((32,), "batch")
    key = struct((), dtype=jax.random.key(0).dtype)
    args = (
        params,
        cache,
        tokens,
        tokens,
        key,
    )
    by_batch = NamedSharding(mesh, P("batch"))
    out = (
        cache.sharding,
        by_batch,
        by_batch,
    )
    jitted = jax.jit(decode, donate_argnums=1, out_shardings=out)
    return jitted, args


@case("sequence-to-heads-by-constraints", cpu={"seq": 8}, v5e={"data": 2, "seq": 8})
def ulysses(mesh: AnyMesh) -> Made:
    """The sequence is cut outside attention, the heads inside: constraints that ask for
    all-to-alls; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    heads = 8
    layer = {
        "qkv": struct((width, 3 * width), "seq"),
        "out": struct((width, width), "seq"),
        "up": struct((width, 512), "seq"),
    }
    layer |= {"down": struct((512, width), "seq")}
    data = "data" if "data" in mesh.axis_names else None

    def attention(p, x):
        batch, length, _ = x.shape
        fused = x @ p["qkv"]
        qkv = fused.reshape(batch, length, 3, heads, -1)
        placed = constrain(mesh, qkv, data, None, None, "seq")
        q, k, v = jnp.moveaxis(placed, 2, 0)
        products = jnp.einsum("bqhk,bshk->bhqs", q, k)
        scores = products.astype(jnp.float32)
        exponents = jnp.arange(heads) + 1.0
        slopes = 2.0**-exponents
        positions = jnp.arange(length)
        distance = positions - positions[:, None]
        bounded = jnp.minimum(distance, 0)
        penalties = slopes[:, None, None] * bounded
        weights = jax.nn.softmax(
            scores + penalties,
            where=distance <= 0,
        )
        shares = weights.astype(x.dtype)
        mixed = jnp.einsum("bhqs,bshk->bqhk", shares, v)
        flat = mixed.reshape(batch, length, width)
        placed_mixed = constrain(mesh, flat, data, "seq")
        return placed_mixed @ p["out"]

    @jax.checkpoint
    def block(p, x):
        attended = attention(p, x)
        x = x + attended
        hidden = jax.nn.gelu(x @ p["up"])
        lowered = hidden @ p["down"]
        return constrain(mesh, x + lowered, data, "seq")

    def step(params, x, y):
        def loss(params):
            h = x
            for p in params:
                h = block(p, h)
            differences = (h - y).astype(jnp.float32)
            distances = jnp.abs(differences)
            return jnp.mean(distances)

        value, grads = jax.value_and_grad(loss)(params)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    x = struct((2, 512, width), data, "seq")
    layers = (layer, layer)
    out = (shardings(layers), None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted, ((layer, layer), x, x)


def _fourier_params(struct, width, modes):
    layer = {
        "low": struct((width, width, modes, modes), None, "modes", dtype=jnp.complex64),
        "high": struct(
            (width, width, modes, modes), None, "modes", dtype=jnp.complex64
        ),
        "local": struct((width, width), None, "modes"),
    }
    params = {
        "lift": struct((3, width)),
        "layers": [layer] * 3,
        "project": struct((width, 1)),
    }
    return params


@case(
    "fourier-operator-complex-weights",
    cpu={"data": 4, "modes": 2},
    v5e={"data": 4, "modes": 4},
)
def fourier_operator(mesh: AnyMesh) -> Made:
    """Two-dimensional transforms, complex weights for the low modes that are cut over
    channels, and back.
    """
    struct = on(mesh)
    width = 32
    modes = 8
    side = 32
    params = _fourier_params(struct, width, modes)

    def spectral(p, x):
        waves = jnp.fft.rfft2(x, axes=(2, 3))
        low_waves = waves[:, :, :modes, :modes]
        low = jnp.einsum("bixy,ioxy->boxy", low_waves, p["low"])
        high_waves = waves[:, :, -modes:, :modes]
        high = jnp.einsum("bixy,ioxy->boxy", high_waves, p["high"])
        mixed = (
            jnp.zeros_like(waves)
            .at[:, :, :modes, :modes]
            .set(low)
            .at[:, :, -modes:, :modes]
            .set(high)
        )
        return jnp.fft.irfft2(mixed, s=(side, side), axes=(2, 3))

    def loss(params, fields, targets):
        x = jnp.einsum("bxyc,cw->bwxy", fields, params["lift"])
        for p in params["layers"]:
            local = jnp.einsum("bixy,io->boxy", x, p["local"])
            waves = spectral(p, x)
            x = jax.nn.gelu(waves + local)
        out = jnp.einsum("bwxy,wc->bxyc", x, params["project"])
        differences = (out - targets).reshape(out.shape[0], -1)
        error = jnp.linalg.norm(differences, axis=-1)
        flat_targets = targets.reshape(out.shape[0], -1)
        norms = jnp.linalg.norm(flat_targets, axis=-1)
        return jnp.mean(error / norms)

    def step(params, fields, targets):
        value, grads = jax.value_and_grad(loss)(params, fields, targets)

        def descended(p, g):
            return p - 1e-3 * jnp.conj(g)

        updated = jax.tree.map(descended, params, grads)
        return updated, value

    inputs = struct((16, side, side, 3), "data")
    targets = struct((16, side, side, 1), "data")
    args = (
        params,
        inputs,
        targets,
    )
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, args


CASES = (
    other_mesh_sums,
    dropout,
    palm,
    pipeline,
    decode_nucleus,
    ulysses,
    fourier_operator,
)
