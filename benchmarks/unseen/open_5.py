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
        window_sums = lax.reduce_window(
            x, np.zeros((), x.dtype), lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        )
        x = window_sums / 4
        pooled = x.mean((2, 3))
        logits = (pooled @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

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
    return jax.jit(step, donate_argnums=0), (params, images, labels)


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
    hidden = [
        {"w": struct((width, width), "fsdp"), "b": struct((width,))} for _ in range(4)
    ]
    masters = {
        "in": struct((96, width), None, "fsdp"),
        "hidden": hidden,
        "out": struct((width, 96), "fsdp"),
    }
    optimizer = optax.adamw(1e-3, b2=0.95)

    def loss(masters, x, y, scale):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters)
        x = x.astype(jnp.bfloat16) @ low["in"]
        for p in low["hidden"]:
            x = x + jax.nn.relu(x @ p["w"] + p["b"])
        out = x @ low["out"]
        return jnp.mean((out.astype(jnp.float32) - y) ** 2) * scale

    def step(masters, state, scale, x, y):
        value, grads = jax.value_and_grad(loss)(masters, x, y, scale)
        grads = jax.tree.map(lambda g: g / scale, grads)
        is_finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        finite = jnp.all(jnp.stack(is_finite))

        def update():
            updates, new = optimizer.update(grads, state, masters)
            return optax.apply_updates(masters, updates), new, scale * 1.001

        after = lax.cond(finite, update, lambda: (masters, state, scale / 2))
        return (
            *after,
            value / scale,
        )

    state = optimizer_state(mesh, optimizer, masters)
    inputs = struct((256, 96), both)
    args = (
        masters,
        state,
        struct(()),
        inputs,
        inputs,
    )
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


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
        neighbours = jax.ops.segment_sum(jnp.ones(edges), receivers, nodes)
        degree = neighbours[:, None] + 1
        for p in params["layers"]:
            edge_rows = jnp.concatenate([h[senders], h[receivers], e], -1)
            message = jax.nn.relu(edge_rows @ p["message"])
            total = jax.ops.segment_sum(message, receivers, num_segments=nodes) / degree
            joined = jnp.concatenate([h, total], -1)
            h = h + jnp.tanh(joined @ p["update"])
            e = e + message
        return jnp.sum(h @ params["decode"])

    def loss(params, graph):
        energy_of = lambda x: forward(params, {**graph, "nodes": x})
        energy, slope = jax.value_and_grad(energy_of)(graph["nodes"])
        return (energy - graph["energy"]) ** 2 + jnp.mean(slope**2)

    ids = functools.partial(struct, dtype=jnp.int32)
    graph = {
        "nodes": struct((nodes, 32)),
        "edges": struct((edges, 8), "graph"),
        "energy": struct(()),
    }
    graph |= {"senders": ids((edges,), "graph"), "receivers": ids((edges,), "graph")}
    return jax.jit(jax.value_and_grad(loss)), (params, graph)


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
        mean = jnp.einsum("bhd,bh->bd", rows, weights) / weights.sum(-1, keepdims=True)
        history_rows = jnp.concatenate([mean, rows.max(1)], -1)
        return jax.nn.relu(history_rows @ tower["history"]) @ tower["out"]

    def step(tower, table, history, weights, bought):
        def loss(tower, rows, positives):
            users = embed(tower, rows, weights)
            logits = users @ positives.T
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(users.shape[0])
            ).mean()

        gathered = table[history], table[bought]
        grads = jax.grad(loss, argnums=(0, 1, 2))(tower, *gathered)
        tower = jax.tree.map(lambda p, g: p - 0.1 * g, tower, grads[0])
        with_history = table.at[history].add(-0.1 * grads[1])
        table = with_history.at[bought].add(-0.1 * grads[2])
        scores = embed(tower, table[history], weights) @ table.T
        best, indices = lax.top_k(scores, 100)
        is_hit = jnp.any(indices == bought[:, None], -1)
        return (
            tower,
            table,
            best,
            indices,
            jnp.mean(is_hit),
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
    return jax.jit(step, donate_argnums=(0, 1)), args


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

    def decode(params, cache, token, position):
        def layer(x, p):
            p, keys, values = p
            normed = jax.nn.standardize(x)
            q, k, v = jnp.einsum("bd,dchk->cbhk", normed, p["qkv"])
            keys = lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
            values = lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
            products = jnp.einsum("bhk,bshk->bhs", q, keys)
            scores = products.astype(jnp.float32) / math.sqrt(size)
            scores = jnp.where(jnp.arange(length) <= position, scores, -jnp.inf)
            weights = jax.nn.softmax(scores).astype(x.dtype)
            mixed = jnp.einsum("bhs,bshk->bhk", weights, values)
            x = x + jnp.einsum("bhk,hkd->bd", mixed, p["out"])
            hidden = jax.nn.silu(x @ p["wide"])
            return x + hidden @ p["narrow"], (keys, values)

        rows = (params["layers"], cache["k"], cache["v"])
        x, (keys, values) = lax.scan(layer, params["embed"][token], rows)
        logits = x @ params["embed"].T
        following = jnp.argmax(logits, -1).astype(jnp.int32)
        return (
            {"k": keys, "v": values},
            following,
            position + 1,
        )

    ids = functools.partial(on(mesh), dtype=jnp.int32)
    tokens = ids((16,), "data")
    position = ids(())
    return jax.jit(decode, donate_argnums=1), (
        params,
        cache,
        tokens,
        position,
    )


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

    def norm(x, p):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-12) * p[0] + p[1]

    def encode(params, batch):
        x = (
            params["word"][batch["tokens"]]
            + params["position"]
            + params["segment"][batch["segments"]]
        )
        bias = jnp.where(batch["mask"], 0, -1e9)
        hidden = bias[:, None, None].astype(x.dtype)
        for p in params["layers"]:
            q, k, v = (
                jnp.tensordot(x, p[name], 1) for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(32)
            weights = jax.nn.softmax(scores + hidden)
            mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
            attended = jnp.einsum("bqhk,hkd->bqd", mixed, p["out"])
            x = norm(x + attended, p["norm"][0])
            wide = jax.nn.gelu(x @ p["wide"] + p["wide_bias"])
            x = norm(
                x + wide @ p["narrow"],
                p["norm"][1],
            )
        return x

    def loss(params, batch):
        x = encode(params, batch)
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        logits = jnp.tanh(masked @ params["transform"]) @ params["word"].T
        words = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["labels"]
        )
        pooled = (x[:, 0] @ params["next"]).astype(jnp.float32)
        return (
            words.mean()
            + optax.softmax_cross_entropy_with_integer_labels(
                pooled, batch["is_next"]
            ).mean()
        )

    optimizer = optax.lamb(1e-3)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        facts = {"loss": value, "norm": optax.global_norm(grads)}
        return (
            optax.apply_updates(params, updates),
            state,
            facts,
        )

    whole = functools.partial(on(mesh), dtype=jnp.int32)
    batch = {name: whole((16, 128), "data") for name in ("tokens", "segments", "mask")}
    batch |= {name: whole((16, 20), "data") for name in ("positions", "labels")} | {
        "is_next": whole((16,), "data")
    }
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
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
