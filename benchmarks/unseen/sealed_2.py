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
    half = math.prod(mesh.shape.values()) // 2
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
        total = lax.psum(jnp.sum(x * x, -1, keepdims=True), "x")
        return x * lax.rsqrt(total / width + 1e-6) * scale

    def loss(params, x, y):
        h = norm(x, params["scale"])
        predicted = x + jax.nn.relu(h @ params["up"]) @ params["down"]
        return jnp.mean((predicted - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    x = struct((512, width), "data")
    return jax.jit(step), (
        params,
        x,
        x,
    )


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
    params = {
        "q": struct((layers, width, width), None, None, "tensor"),
        "k": struct((layers, width, width), None, None, "tensor"),
        "v": struct((layers, width, width), None, None, "tensor"),
        "o": struct((layers, width, width), None, "tensor"),
        "up": struct((layers, width, 768), None, None, "tensor"),
        "down": struct((layers, 768, width), None, "tensor"),
    }

    def drop(key, x, rate):
        is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
        return jnp.where(is_kept, x / (1 - rate), 0).astype(x.dtype)

    def layer(x, inputs):
        p, key = inputs
        a, b, c, d = jax.random.split(key, 4)
        batch, length, _ = x.shape
        q, k, v = (
            jnp.dot(x, p[name]).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        scores = (q @ k.mT).astype(jnp.float32) / math.sqrt(width // heads)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        mixed_heads = (drop(a, weights, 0.1) @ v).transpose(0, 2, 1, 3)
        mixed = mixed_heads.reshape(x.shape) @ p["o"]
        h = x + drop(b, mixed, 0.1)
        hidden = jax.nn.relu(h @ p["up"])
        h = h + drop(c, hidden @ p["down"], 0.1)
        keep = jax.random.bernoulli(d, 0.9, (batch, 1, 1))
        return jnp.where(keep, h, x), None

    def loss(params, x, y, key):
        keys = jax.random.split(key, layers)
        x, _ = lax.scan(layer, x, (params, keys))
        return jnp.mean(optax.cosine_distance(x.astype(jnp.float32), y))

    optimizer = optax.sgd(1e-2, momentum=0.9)

    def step(params, state, x, y, key):
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    x = struct((16, 48, width), "data")
    y = on(mesh)((16, 48, width), "data")
    key = struct((), dtype=jax.random.key(0).dtype)
    inputs = (
        x,
        y,
        key,
    )
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
        params,
        state,
        *inputs,
    )


@case("palm-parallel-block-one-key-head", cpu={"tp": 8}, v5e={"tp": 16})
def palm(mesh: AnyMesh) -> Made:
    """Attention and SwiGLU side by side in each block, one head of keys that all
    devices hold; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    heads = 16
    size = 16
    params = {
        "embed": struct((2048, width), "tp"),
        "q": struct((2, width, heads * size), None, None, "tp"),
        "kv": struct((2, width, 2 * size)),
        "out": struct((2, heads * size, width), None, "tp"),
        "wide": struct((2, width, 2, 512), None, None, None, "tp"),
        "narrow": struct((2, 512, width), None, "tp"),
        "scales": struct((2, width)),
    }

    def block(x, p):
        norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
        h = x / (norm / math.sqrt(width) + 1e-6) * p["scales"]
        query = h @ p["q"]
        q = query.reshape(*h.shape[:-1], heads, size)
        k, v = jnp.split(h @ p["kv"], 2, -1)
        scores = jnp.einsum("bthd,bsd->bhts", q, k) / math.sqrt(size)
        scores = 30.0 * jnp.tanh(scores / 30.0)
        positions = jnp.arange(x.shape[1])
        mask = positions[:, None] >= positions
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        attended = jnp.einsum("bhts,bsd->bthd", weights, v)
        gate, up = jnp.moveaxis(jnp.einsum("btd,dgf->btgf", h, p["wide"]), 2, 0)
        mixed = attended.reshape(*x.shape[:2], -1) @ p["out"]
        gated = jax.nn.swish(gate) * up
        return x + mixed + gated @ p["narrow"]

    def loss(params, tokens):
        x = params["embed"][tokens] * math.sqrt(width)
        for layer in range(2):
            x = block(x, {k: v[layer] for k, v in params.items() if k != "embed"})
        products = jnp.einsum("btd,vd->btv", x, params["embed"])
        logits = products[:, :-1].astype(jnp.float32)
        labels = jax.nn.one_hot(tokens[:, 1:], 2048)
        z = jax.nn.logsumexp(logits, -1)
        losses = z - jnp.sum(logits * labels, -1)
        return jnp.mean(losses) + 1e-4 * jnp.mean(z**2)

    def step(params, tokens):
        grads = jax.grad(loss)(params, tokens)
        scale = jnp.minimum(1.0, 1.0 / optax.global_norm(grads))
        return jax.tree.map(
            lambda p, g: p - (1e-2 * scale * g).astype(p.dtype), params, grads
        )

    return jax.jit(step), (params, struct((8, 64), dtype=jnp.int32))


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
            return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

        return lax.scan(layer, x, p)[0]

    def forward(params, batches):
        state = jnp.zeros((stages, *batches.shape[1:]), batches.dtype)
        zeros = jnp.zeros((stages - 1, *batches.shape[1:]), batches.dtype)
        padded = jnp.concatenate([batches, zeros])

        def tick(state, fresh):
            state = jnp.concatenate([fresh[None], state[:-1]])
            state = constrain(mesh, state, "stage", "data")
            state = jax.vmap(jax.checkpoint(stage))(params, state)
            return constrain(mesh, state, "stage", "data"), state[-1]

        return lax.scan(tick, state, padded)[1][stages - 1 :]

    def loss(params, batches, targets):
        differences = (forward(params, batches) - targets).astype(jnp.float32)
        return jnp.mean(jnp.square(differences))

    def step(params, batches, targets):
        value, grads = jax.value_and_grad(loss)(params, batches, targets)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    batches = struct((micro, 32, width), None, "data")
    return jax.jit(step, donate_argnums=0), (params, batches, batches)


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
    params = {
        "embed": struct((2048, width)),
        "q": struct((width, kv, 4, size), None, "heads"),
        "kv": struct((2, width, kv, size), None, None, "heads"),
        "o": struct((kv, 4, size, width), "heads"),
        "head": struct((width, 2048), None, "heads"),
    }
    cache = struct((2, 32, length, kv, size), None, "batch", None, "heads")

    def decode(params, cache, tokens, positions, key):
        x = params["embed"][tokens]
        rows = jnp.arange(tokens.shape[0])
        fresh = jnp.einsum("bd,cdgk->cbgk", x, params["kv"])
        cache = cache.at[:, rows, positions].set(fresh)
        q = jnp.einsum("bd,dghk->bghk", x, params["q"])
        scores = jnp.einsum("bghk,bsgk->bghs", q, cache[0]) * size**-0.5
        seen = jnp.arange(length) <= positions[:, None]
        masked = jnp.where(seen[:, None, None], scores, -1e9)
        weights = jax.nn.softmax(masked)
        x = x + jnp.einsum("bghs,bsgk,gkd->bd", weights, cache[1], params["o"].sum(1))
        best, ids = lax.top_k(x @ params["head"], 64)
        order = jnp.argsort(-best, axis=-1)
        best = jnp.take_along_axis(best, order, -1)
        ids = jnp.take_along_axis(ids, order, -1)
        probabilities = jax.nn.softmax(best)
        before = jnp.cumsum(probabilities, -1) - probabilities
        drawn = jax.random.categorical(key, jnp.where(before < 0.9, best, -jnp.inf))
        chosen = jnp.take_along_axis(ids, drawn[:, None], -1)
        return cache, chosen[:, 0], positions + 1

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
    return jax.jit(decode, donate_argnums=1, out_shardings=out), args


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
        qkv = (x @ p["qkv"]).reshape(batch, length, 3, heads, -1)
        placed = constrain(mesh, qkv, data, None, None, "seq")
        q, k, v = jnp.moveaxis(placed, 2, 0)
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32)
        slopes = 2.0 ** -(jnp.arange(heads) + 1.0)
        distance = jnp.arange(length) - jnp.arange(length)[:, None]
        penalties = slopes[:, None, None] * jnp.minimum(distance, 0)
        weights = jax.nn.softmax(
            scores + penalties,
            where=distance <= 0,
        )
        mixed = jnp.einsum("bhqs,bshk->bqhk", weights.astype(x.dtype), v)
        placed_mixed = constrain(mesh, mixed.reshape(batch, length, width), data, "seq")
        return placed_mixed @ p["out"]

    @jax.checkpoint
    def block(p, x):
        x = x + attention(p, x)
        hidden = jax.nn.gelu(x @ p["up"])
        return constrain(mesh, x + hidden @ p["down"], data, "seq")

    def step(params, x, y):
        def loss(params):
            h = x
            for p in params:
                h = block(p, h)
            return jnp.mean(jnp.abs((h - y).astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    x = struct((2, 512, width), data, "seq")
    out = (shardings((layer, layer)), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out), ((layer, layer), x, x)


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

    def spectral(p, x):
        waves = jnp.fft.rfft2(x, axes=(2, 3))
        low = jnp.einsum("bixy,ioxy->boxy", waves[:, :, :modes, :modes], p["low"])
        high = jnp.einsum("bixy,ioxy->boxy", waves[:, :, -modes:, :modes], p["high"])
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
            x = jax.nn.gelu(spectral(p, x) + local)
        out = jnp.einsum("bwxy,wc->bxyc", x, params["project"])
        differences = (out - targets).reshape(out.shape[0], -1)
        error = jnp.linalg.norm(differences, axis=-1)
        norms = jnp.linalg.norm(targets.reshape(out.shape[0], -1), axis=-1)
        return jnp.mean(error / norms)

    def step(params, fields, targets):
        value, grads = jax.value_and_grad(loss)(params, fields, targets)
        updated = jax.tree.map(lambda p, g: p - 1e-3 * jnp.conj(g), params, grads)
        return updated, value

    inputs = struct((16, side, side, 3), "data")
    targets = struct((16, side, side, 1), "data")
    args = (
        params,
        inputs,
        targets,
    )
    return jax.jit(step, donate_argnums=0), args


CASES = (
    other_mesh_sums,
    dropout,
    palm,
    pipeline,
    decode_nucleus,
    ulysses,
    fourier_operator,
)
