"""Steps of the open half, 5 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._case import AnyMesh, Made, case, on, optimizer_state


@case(
    "resnet-nchw-spatial-group-norm",
    cpu={"data": 2, "rows": 4},
    v5e={"data": 4, "rows": 4},
)
def resnet_nchw(mesh: AnyMesh) -> Made:
    """Channels first, images cut by height so that convolutions exchange their borders,
    norms over groups, bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    params = {
        "stem": struct((32, 3, 3, 3)),
        "blocks": [
            {
                "a": struct((o, i, 3, 3)),
                "b": struct((o, o, 3, 3)),
                "skip": struct((o, i, 1, 1)),
            }
            for i, o in ((32, 64), (64, 64))
        ],
        "head": struct((64, 50)),
    }
    numbers = ("NCHW", "OIHW", "NCHW")

    def convolve(x, w, stride=1):
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=numbers
        )

    def norm(x):
        batch, channels, height, wide = x.shape
        groups = x.reshape(batch, 8, channels // 8, height, wide).astype(jnp.float32)
        mean = groups.mean((2, 3, 4), keepdims=True)
        spread = jnp.square(groups - mean).mean((2, 3, 4), keepdims=True)
        normed = (groups - mean) * lax.rsqrt(spread + 1e-5)
        return normed.reshape(x.shape).astype(x.dtype)

    def loss(params, images, labels):
        x = jax.nn.relu(norm(convolve(images, params["stem"])))
        for position, p in enumerate(params["blocks"]):
            stride = 1 + position
            h = jax.nn.relu(norm(convolve(x, p["a"], stride)))
            residual = norm(convolve(h, p["b"]))
            skipped = convolve(x, p["skip"], stride)
            x = jax.nn.relu(residual + skipped)
        zero = np.zeros((), x.dtype)
        window_sums = lax.reduce_window(
            x, zero, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        )
        x = window_sums / 4
        pooled = x.mean((2, 3))
        logits = (pooled @ params["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def step(params, images, labels):
        value, grads = jax.value_and_grad(loss)(params, images, labels)
        updated = jax.tree.map(
            lambda p, g: (p - 0.05 * g).astype(p.dtype), params, grads
        )
        return (
            updated,
            value,
        )

    images = struct((8, 3, 64, 64), "data", None, "rows")
    labels = on(mesh)((8,), "data", dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (params, images, labels)


def _scaled_params(struct, width):
    hidden = [
        {"w": struct((width, width), "fsdp"), "b": struct((width,))} for _ in range(4)
    ]
    masters = {
        "in": struct((96, width), None, "fsdp"),
        "hidden": hidden,
        "out": struct((width, 96), "fsdp"),
    }
    return masters


@case(
    "mixed-precision-loss-scaling",
    cpu={"data": 4, "fsdp": 2},
    v5e={"data": 4, "fsdp": 4},
)
def loss_scaling(mesh: AnyMesh) -> Made:
    """Float32 masters and bfloat16 compute, a loss scale that a `cond` halves, and
    skips the update, on overflow.
    """
    struct = on(mesh)
    width = 384
    both = ("data", "fsdp")
    masters = _scaled_params(struct, width)
    optimizer = optax.adamw(1e-3, b2=0.95)

    def loss(masters, x, y, scale):
        def lowered(p):
            return p.astype(jnp.bfloat16)

        low = jax.tree.map(lowered, masters)
        low_x = x.astype(jnp.bfloat16)
        x = low_x @ low["in"]
        for p in low["hidden"]:
            raised = x @ p["w"] + p["b"]
            x = x + jax.nn.relu(raised)
        out = x @ low["out"]
        wide = out.astype(jnp.float32)
        squared_errors = (wide - y) ** 2
        return jnp.mean(squared_errors) * scale

    def step(masters, state, scale, x, y):
        value, grads = jax.value_and_grad(loss)(masters, x, y, scale)

        def unscaled(g):
            return g / scale

        grads = jax.tree.map(unscaled, grads)
        is_finite = []
        for g in jax.tree.leaves(grads):
            is_finite.append(jnp.all(jnp.isfinite(g)))
        finite = jnp.all(jnp.stack(is_finite))

        def update():
            updates, new = optimizer.update(grads, state, masters)
            updated = optax.apply_updates(masters, updates)
            return updated, new, scale * 1.001

        def skip():
            return masters, state, scale / 2

        after = lax.cond(finite, update, skip)
        unscaled_value = value / scale
        return (
            *after,
            unscaled_value,
        )

    state = optimizer_state(mesh, optimizer, masters)
    inputs = struct((256, 96), both)
    scale = struct(())
    args = (
        masters,
        state,
        scale,
        inputs,
        inputs,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, args


@case("graph-network-edges-cut", cpu={"graph": 8}, v5e={"graph": 16})
def graph_network(mesh: AnyMesh) -> Made:
    """Messages along edges that are cut over all devices, summed by segments into nodes
    that are whole everywhere.
    """
    struct = on(mesh)
    nodes = 2000
    edges = 8192
    width = 64
    layer = {
        "message": struct((3 * width, width)),
        "update": struct((2 * width, width)),
    }
    params = {
        "encode": struct((32, width)),
        "edge": struct((8, width)),
        "layers": [layer] * 3,
        "decode": struct((width, 1)),
    }

    def forward(params, graph):
        h = graph["nodes"] @ params["encode"]
        e = graph["edges"] @ params["edge"]
        senders = graph["senders"]
        receivers = graph["receivers"]
        ones = jnp.ones(edges)
        neighbours = jax.ops.segment_sum(ones, receivers, nodes)
        degree = neighbours[:, None] + 1
        for p in params["layers"]:
            edge_rows = jnp.concatenate([h[senders], h[receivers], e], -1)
            message = jax.nn.relu(edge_rows @ p["message"])
            sums = jax.ops.segment_sum(message, receivers, num_segments=nodes)
            total = sums / degree
            joined = jnp.concatenate([h, total], -1)
            change = jnp.tanh(joined @ p["update"])
            h = h + change
            e = e + message
        energies = h @ params["decode"]
        return jnp.sum(energies)

    def loss(params, graph):
        def energy_of(x):
            return forward(params, {**graph, "nodes": x})

        energy, slope = jax.value_and_grad(energy_of)(graph["nodes"])
        squared_errors = (energy - graph["energy"]) ** 2
        return squared_errors + jnp.mean(slope**2)

    ids = functools.partial(struct, dtype=jnp.int32)
    graph = {
        "nodes": struct((nodes, 32)),
        "edges": struct((edges, 8), "graph"),
        "energy": struct(()),
    }
    graph |= {"senders": ids((edges,), "graph"), "receivers": ids((edges,), "graph")}
    jitted = jax.jit(jax.value_and_grad(loss))
    return jitted, (params, graph)


@case(
    "retrieval-sparse-rows-top-k",
    cpu={"users": 4, "items": 2},
    v5e={"users": 4, "items": 4},
)
def retrieval(mesh: AnyMesh) -> Made:
    """Rows of a cut table are updated alone, by scatter; then the hundred best of all
    items are found for each user.
    """
    struct = on(mesh)
    items = 8192
    width = 64
    tower = {"history": struct((2 * width, 256)), "out": struct((256, width))}

    def embed(tower, rows, weights):
        sums = jnp.einsum("bhd,bh->bd", rows, weights)
        total = weights.sum(-1, keepdims=True)
        mean = sums / total
        largest = rows.max(1)
        history_rows = jnp.concatenate([mean, largest], -1)
        hidden = jax.nn.relu(history_rows @ tower["history"])
        return hidden @ tower["out"]

    def step(tower, table, history, weights, bought):
        def loss(tower, rows, positives):
            users = embed(tower, rows, weights)
            logits = users @ positives.T
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(users.shape[0])
            )
            return losses.mean()

        gathered = table[history], table[bought]
        differentiated = jax.grad(loss, argnums=(0, 1, 2))
        grads = differentiated(tower, *gathered)

        def descended(p, g):
            return p - 0.1 * g

        tower = jax.tree.map(descended, tower, grads[0])
        history_change = -0.1 * grads[1]
        with_history = table.at[history].add(history_change)
        bought_change = -0.1 * grads[2]
        table = with_history.at[bought].add(bought_change)
        users = embed(tower, table[history], weights)
        scores = users @ table.T
        best, indices = lax.top_k(scores, 100)
        is_same = indices == bought[:, None]
        is_hit = jnp.any(is_same, -1)
        hit_rate = jnp.mean(is_hit)
        return (
            tower,
            table,
            best,
            indices,
            hit_rate,
        )

    ids = functools.partial(struct, dtype=jnp.int32)
    table = struct((items, width), "items")
    history = ids((256, 20), "users")
    seen = struct((256, 20), "users")
    bought = ids((256,), "users")
    args = (
        tower,
        table,
        history,
        seen,
        bought,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, args


def _decoding_params(struct, width, layers, heads, size, length):
    params = {
        "embed": struct((4096, width), None, "tensor"),
        "layers": {
            "qkv": struct((layers, width, 3, heads, size), None, None, None, "tensor"),
            "out": struct((layers, heads, size, width), None, "tensor"),
            "wide": struct((layers, width, 768), None, None, "tensor"),
            "narrow": struct((layers, 768, width), None, "tensor"),
        },
    }
    cache = {
        name: struct((layers, 16, length, heads, size), None, "data", None, "tensor")
        for name in ("k", "v")
    }
    return params, cache


@case(
    "decode-dynamic-update-slice",
    cpu={"data": 2, "tensor": 4},
    v5e={"data": 4, "tensor": 4},
)
def decode_slice(mesh: AnyMesh) -> Made:
    """One token for each sequence: a scan over layers that carries the cache, written
    at one position; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    layers = 4
    width = 256
    heads = 8
    length = 128
    size = width // heads
    params, cache = _decoding_params(
        struct=struct, width=width, layers=layers, heads=heads, size=size, length=length
    )

    def decode(params, cache, token, position):
        def layer(x, p):
            p, keys, values = p
            normed = jax.nn.standardize(x)
            q, k, v = jnp.einsum("bd,dchk->cbhk", normed, p["qkv"])
            key = k[:, None]
            keys = lax.dynamic_update_slice(keys, key, (0, position, 0, 0))
            value = v[:, None]
            corner = (0, position, 0, 0)
            values = lax.dynamic_update_slice(values, value, corner)
            products = jnp.einsum("bhk,bshk->bhs", q, keys)
            scores = products.astype(jnp.float32) / math.sqrt(size)
            seen = jnp.arange(length) <= position
            scores = jnp.where(seen, scores, -jnp.inf)
            shares = jax.nn.softmax(scores)
            weights = shares.astype(x.dtype)
            mixed = jnp.einsum("bhs,bshk->bhk", weights, values)
            attended = jnp.einsum("bhk,hkd->bd", mixed, p["out"])
            x = x + attended
            hidden = jax.nn.silu(x @ p["wide"])
            lowered = hidden @ p["narrow"]
            return x + lowered, (keys, values)

        rows = (params["layers"], cache["k"], cache["v"])
        embedded = params["embed"][token]
        x, (keys, values) = lax.scan(layer, embedded, rows)
        logits = x @ params["embed"].T
        words = jnp.argmax(logits, -1)
        following = words.astype(jnp.int32)
        next_position = position + 1
        return (
            {"k": keys, "v": values},
            following,
            next_position,
        )

    ids = functools.partial(on(mesh), dtype=jnp.int32)
    tokens = ids((16,), "data")
    position = ids(())
    jitted = jax.jit(decode, donate_argnums=1)
    return jitted, (
        params,
        cache,
        tokens,
        position,
    )


def _bert_params(struct, width, heads):
    layer = {
        "query": struct((width, heads, 32), None, "model"),
        "key": struct((width, heads, 32), None, "model"),
        "value": struct((width, heads, 32), None, "model"),
        "out": struct((heads, 32, width), "model"),
        "wide": struct((width, 1024), None, "model"),
        "wide_bias": struct((1024,), "model"),
        "narrow": struct((1024, width), "model"),
        "norm": struct((2, 2, width)),
    }
    params = {
        "word": struct((3072, width), "model"),
        "position": struct((128, width)),
        "segment": struct((2, width)),
        "layers": [layer, layer],
        "transform": struct((width, width)),
        "next": struct((width, 2)),
    }
    return params


def _bert_encoder():
    def norm(x, p):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.var(x, -1, keepdims=True)
        deviation = lax.rsqrt(variance + 1e-12)
        scaled = (x - mean) * deviation
        return scaled * p[0] + p[1]

    def encode(params, batch):
        words = params["word"][batch["tokens"]]
        segments = params["segment"][batch["segments"]]
        x = words + params["position"] + segments
        bias = jnp.where(batch["mask"], 0, -1e9)
        bias_rows = bias[:, None, None]
        hidden = bias_rows.astype(x.dtype)
        for p in params["layers"]:
            q, k, v = (
                jnp.tensordot(x, p[name], 1) for name in ("query", "key", "value")
            )
            products = jnp.einsum("bqhk,bshk->bhqs", q, k)
            scores = products / math.sqrt(32)
            weights = jax.nn.softmax(scores + hidden)
            mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
            attended = jnp.einsum("bqhk,hkd->bqd", mixed, p["out"])
            x = norm(x + attended, p["norm"][0])
            raised = x @ p["wide"] + p["wide_bias"]
            wide = jax.nn.gelu(raised)
            lowered = wide @ p["narrow"]
            x = norm(
                x + lowered,
                p["norm"][1],
            )
        return x

    return encode


@case(
    "bert-masked-positions-lamb",
    cpu={"data": 2, "model": 4},
    v5e={"data": 8, "model": 2},
)
def bert(mesh: AnyMesh) -> Made:
    """Norms after each layer, segment embeddings, and logits of gathered positions
    alone; LAMB.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    heads = 8
    params = _bert_params(struct, width, heads)

    encode = _bert_encoder()

    def loss(params, batch):
        x = encode(params, batch)
        positions = batch["positions"][..., None]
        masked = jnp.take_along_axis(x, positions, axis=1)
        transformed = jnp.tanh(masked @ params["transform"])
        logits = transformed @ params["word"].T
        word_logits = logits.astype(jnp.float32)
        words = optax.softmax_cross_entropy_with_integer_labels(
            word_logits, batch["labels"]
        )
        first_rows = x[:, 0] @ params["next"]
        pooled = first_rows.astype(jnp.float32)
        next_losses = optax.softmax_cross_entropy_with_integer_labels(
            pooled, batch["is_next"]
        )
        return words.mean() + next_losses.mean()

    optimizer = optax.lamb(1e-3)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        norm = optax.global_norm(grads)
        facts = {"loss": value, "norm": norm}
        updated = optax.apply_updates(params, updates)
        return (
            updated,
            state,
            facts,
        )

    whole = functools.partial(on(mesh), dtype=jnp.int32)
    batch = {name: whole((16, 128), "data") for name in ("tokens", "segments", "mask")}
    batch |= {name: whole((16, 20), "data") for name in ("positions", "labels")} | {
        "is_next": whole((16,), "data")
    }
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        batch,
    )


CASES = (
    resnet_nchw,
    loss_scaling,
    graph_network,
    retrieval,
    decode_slice,
    bert,
)
