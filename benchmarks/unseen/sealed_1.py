"""Steps of the sealed half, 1 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ._case import (
    AnyMesh,
    Made,
    case,
    constrain,
    fully_sharded,
    on,
    optimizer_state,
    shardings,
)


def _zero_one_params(struct, width):
    layers = {"up": struct((4, width, 768)), "down": struct((4, 768, width))}
    params = {
        "embed": struct((1024, width)),
        "layers": layers,
        "norm": struct((4, width)),
    }
    return params


@case("zero-one-optimizer-cut-alone", cpu={"data": 8}, v5e={"data": 16})
def zero_one(mesh: AnyMesh) -> Made:
    """Whole parameters; moments are cut over the batch's axis by constraints on
    gradients and `out_shardings`.
    """
    struct = on(mesh)
    width = 256
    params = _zero_one_params(struct, width)
    moments = fully_sharded(mesh, params, "data")

    def loss(params, tokens):
        def layer(x, p):
            up, down, scale = p
            counts = jnp.arange(x.shape[1]) + 1
            counts_column = counts[:, None]
            sums = jnp.cumsum(x, axis=1)
            mixed = sums / counts_column
            normed = jax.nn.standardize(mixed)
            hidden = jax.nn.gelu(normed * scale @ up)
            return x + hidden @ down, None

        stacked = (params["layers"]["up"], params["layers"]["down"], params["norm"])
        inputs = tokens[:, :-1]
        embedded = params["embed"][inputs]
        x, _ = lax.scan(layer, embedded, stacked)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["embed"].T, tokens[:, 1:]
        )
        return losses.mean()

    def step(params, first, second, count, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)

        def placed(g, m):
            return lax.with_sharding_constraint(g, m.sharding)

        grads = jax.tree.map(placed, grads, moments)

        def first_moment(m, g):
            return 0.9 * m + 0.1 * g

        first = jax.tree.map(first_moment, first, grads)

        def second_moment(v, g):
            return 0.95 * v + 0.05 * g * g

        second = jax.tree.map(second_moment, second, grads)
        bias = 1 - 0.9 ** (count + 1)

        def updated(p, m, v):
            return p - 1e-3 * (m / bias) / (jnp.sqrt(v) + 1e-8)

        params = jax.tree.map(
            updated,
            params,
            first,
            second,
        )
        return params, first, second, count + 1, value

    of_moments = shardings(moments)
    of_params = shardings(params)
    out = (of_params, of_moments, of_moments, None, None)
    count = struct(())
    tokens = struct((32, 49), "data", dtype=jnp.int32)
    args = (
        params,
        moments,
        moments,
        count,
        tokens,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=out)
    return jitted, args


@case(
    "beam-search-while-loop", cpu={"data": 4, "model": 2}, v5e={"data": 8, "model": 2}
)
def beam_search(mesh: AnyMesh) -> Made:
    """Beams of a recurrent decoder: top-k over beams and words, states gathered along
    beams; ends by its counter.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 128
    beams = 4
    words = 1000
    steps = 10
    params = {
        "embed": struct((words, width), None, "model"),
        "cell": struct((2 * width, width), None, "model"),
        "head": struct((width, words), None, "model"),
    }

    def search(params, state):
        batch = state.shape[0]
        columns = state[:, None]
        states = jnp.broadcast_to(columns, (batch, beams, width))
        is_first = jnp.arange(beams) == 0
        first_scores = jnp.where(is_first, 0.0, -1e9)
        scores = jnp.tile(first_scores, (batch, 1))
        words_so_far = jnp.zeros((batch, beams, steps), jnp.int32)

        def body(carry):
            i, states, scores, tokens = carry
            last_step = jnp.maximum(i - 1, 0)
            previous = lax.dynamic_index_in_dim(tokens, last_step, 2, keepdims=False)
            last = params["embed"][previous]
            joined = jnp.concatenate([states, last], -1)
            states = jnp.tanh(joined @ params["cell"])
            logs = jax.nn.log_softmax((states @ params["head"]).astype(jnp.float32))
            extended = scores[..., None] + logs
            flat_scores = extended.reshape(batch, -1)
            scores, flat = lax.top_k(flat_scores, beams)
            parent = flat // words
            word = flat % words
            states = jnp.take_along_axis(states, parent[..., None], 1)
            parents = parent[..., None]
            tokens = jnp.take_along_axis(tokens, parents, 1)
            new_tokens = lax.dynamic_update_index_in_dim(tokens, word, i, 2)
            return (
                i + 1,
                states,
                scores,
                new_tokens,
            )

        carry = (jnp.int32(0), states, scores, words_so_far)

        def goes_on(carry):
            return carry[0] < steps

        _, _, scores, words_found = lax.while_loop(goes_on, body, carry)
        return words_found[:, 0], scores[:, 0]

    jitted = jax.jit(search)
    states = struct((16, width), "data")
    return jitted, (params, states)


@case(
    "graph-attention-nodes-cut",
    cpu={"nodes": 4, "heads": 2},
    v5e={"nodes": 8, "heads": 2},
)
def graph_attention(mesh: AnyMesh) -> Made:
    """Attention over neighbours, normalized by segments' maxima and sums; nodes and
    edges cut alike, heads apart.
    """
    struct = on(mesh)
    nodes = 1024
    edges = 8192
    heads = 4
    size = 32
    scorers = {name: struct((heads, size), "heads") for name in ("source", "target")}
    params = [
        {"w": struct((i, heads, size), None, "heads"), **scorers}
        for i in (96, heads * size)
    ]

    def layer(p, x, source, target):
        h = jnp.einsum("nd,dhk->nhk", x, p["w"])
        from_source = jnp.sum(h * p["source"], -1)
        from_target = jnp.sum(h * p["target"], -1)
        source_scores = from_source[source]
        score = source_scores + from_target[target]
        score = jax.nn.leaky_relu(score, 0.2)
        largest = jax.ops.segment_max(score, target, nodes, indices_are_sorted=True)
        largest_of_edge = lax.stop_gradient(largest)[target]
        weight = jnp.exp(score - largest_of_edge)
        zeros_of_edges = jnp.zeros((nodes, heads))
        total = zeros_of_edges.at[target].add(weight)
        zeros = jnp.zeros((nodes, heads, size))
        messages = weight[..., None] * h[source]
        mixed = zeros.at[target].add(messages)
        count = total[..., None] + 1e-9
        averaged = mixed / count
        activated = jax.nn.elu(averaged)
        return activated.reshape(nodes, -1)

    def loss(params, x, source, target, labels, mask):
        for p in params:
            x = layer(p, x, source, target)
        each = optax.softmax_cross_entropy_with_integer_labels(x, labels)
        masked = jnp.where(mask, each, 0)
        count = jnp.maximum(mask.sum(), 1)
        return jnp.sum(masked) / count

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updated = jax.tree.map(lambda p, g: p - 5e-3 * g, params, grads)
        return updated, value

    ids = functools.partial(struct, dtype=jnp.int32)
    features = struct((nodes, 96), "nodes")
    edge_ends = ids((edges,), "nodes")
    labels = ids((nodes,), "nodes")
    args = (
        features,
        edge_ends,
        edge_ends,
        labels,
    )
    mask = struct((nodes,), "nodes", dtype=jnp.bool_)
    jitted = jax.jit(step)
    return jitted, (params, *args, mask)


@case("experts-all-to-all-by-shard-map", cpu={"ep": 8}, v5e={"ep": 16})
def all_to_all_moe(mesh: AnyMesh) -> Made:
    """Each device holds its experts; slots go there and come back by two all-to-alls
    written by hand; bfloat16.
    """
    struct = on(mesh)
    width = 256
    hidden = 512
    count = mesh.shape["ep"]
    params = {
        "router": struct((width, count)),
        "up": struct((count, width, hidden), "ep", dtype=jnp.bfloat16),
        "down": struct((count, hidden, width), "ep", dtype=jnp.bfloat16),
    }

    def local(router, up, down, x):
        capacity = 2 * x.shape[0] // count
        wide = x.astype(jnp.float32)
        probabilities = jax.nn.softmax(wide @ router)
        index = jnp.argmax(probabilities, -1)
        chosen = jax.nn.one_hot(index, count, dtype=jnp.int32)
        earlier = jnp.cumsum(chosen, 0) - 1
        place = jnp.sum(earlier * chosen, -1)
        empty = jnp.zeros((count, capacity, width), x.dtype)
        slots = empty.at[index, place].set(x, mode="drop")
        arrived = lax.all_to_all(slots, "ep", 0, 0, tiled=True)
        hidden = jax.nn.gelu(arrived @ up[0])
        h = hidden @ down[0]
        back = lax.all_to_all(h, "ep", 0, 0, tiled=True)
        y = back.at[index, place].get(mode="fill", fill_value=0)
        mean_loads = probabilities.mean(0)
        load = lax.pmean(mean_loads, "ep")
        largest = probabilities.max(-1)
        share = largest[:, None].astype(x.dtype)
        shared = y * share
        balance = jnp.sum(load**2)
        return shared, balance

    specs = (P(), P("ep"), P("ep"), P("ep"))
    layer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P()))

    def loss(params, x, y):
        out, balance = layer(params["router"], params["up"], params["down"], x)
        residual = x + out - y
        differences = residual.astype(jnp.float32)
        squares = jnp.square(differences)
        return jnp.mean(squares) + 0.01 * balance

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)

        def descended(p, g):
            return p - (0.01 * g).astype(p.dtype)

        updated = jax.tree.map(descended, params, grads)
        return (
            updated,
            value,
        )

    x = struct((2048, width), "ep", dtype=jnp.bfloat16)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (params, x, x)


def _byol_networks():
    def batch_norm(x):
        dimension_count = x.ndim - 1
        axes = tuple(range(dimension_count))
        mean = x.mean(axes)
        variance = x.var(axes)
        deviation = lax.rsqrt(variance + 1e-5)
        return (x - mean) * deviation

    def mlp(ws, x):
        normed = batch_norm(x @ ws[0])
        hidden = jax.nn.relu(normed)
        return hidden @ ws[1]

    def embed(p, x):
        strides = ((p["stem"], 2), (p["next"], 2))
        for w, stride in strides:
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x,
                w,
                (stride, stride),
                "SAME",
                dimension_numbers=dimensions,
            )
            normed = batch_norm(x)
            x = jax.nn.relu(normed)
        means = x.mean((1, 2))
        return mlp(p["project"], means)

    return mlp, embed


@case("byol-two-views-target-average", cpu={"data": 8}, v5e={"data": 16})
def byol(mesh: AnyMesh) -> Made:
    """Two augmented views, a predictor against a slowly moving target, batch norms over
    all devices; LARS.
    """
    struct = on(mesh)
    net = {
        "stem": struct((5, 5, 3, 32)),
        "next": struct((3, 3, 32, 64)),
        "project": [struct((64, 512)), struct((512, 128))],
    }
    params = {"online": net, "predict": [struct((128, 512)), struct((512, 128))]}

    mlp, embed = _byol_networks()

    def augment(key, images):
        flip, jitter = jax.random.split(key)
        flag_shape = (images.shape[0], 1, 1, 1)
        flipped = jax.random.bernoulli(flip, 0.5, flag_shape)
        mirrored = images[:, :, ::-1]
        images = jnp.where(flipped, mirrored, images)
        color_shape = (images.shape[0], 1, 1, 3)
        brightness = jax.random.uniform(jitter, color_shape, minval=0.6, maxval=1.4)
        return images * brightness

    def loss(params, target, first, second):
        def unit(v):
            return v / jnp.linalg.norm(v, axis=-1, keepdims=True)

        total = 0.0
        pairs = ((first, second), (second, first))
        for view, two in pairs:
            embedded = embed(params["online"], view)
            predicted = mlp(params["predict"], embedded)
            guess = unit(predicted)
            target_rows = embed(target, two)
            goal = lax.stop_gradient(unit(target_rows))
            cosine = jnp.sum(guess * goal, -1)
            total += jnp.mean(2 - 2 * cosine)
        return total

    optimizer = optax.lars(0.2, weight_decay=1e-6)

    def step(params, target, state, images, key):
        a, b = jax.random.split(key)
        first_view = augment(a, images)
        second_view = augment(b, images)
        value, grads = jax.value_and_grad(loss)(params, target, first_view, second_view)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)

        def averaged(t, p):
            return 0.996 * t + 0.004 * p

        target = jax.tree.map(averaged, target, params["online"])
        return params, target, state, value

    state = optimizer_state(mesh, optimizer, params)
    images = struct((64, 32, 32, 3), "data")
    args = (
        params,
        net,
        state,
        images,
    )
    key = struct((), dtype=jax.random.key(0).dtype)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, (
        *args,
        key,
    )


@case("recommender-embedding-bags", cpu={"chips": 8}, v5e={"chips": 16})
def recommender(mesh: AnyMesh) -> Made:
    """Many tables cut by rows, several ids from each summed, pairwise products of all
    features; Adagrad.
    """
    struct = on(mesh)
    width = 32
    tables = [struct((rows, width), "chips") for rows in (4096, 16384, 1024, 8192)]
    params = {
        "tables": tables,
        "bottom": [struct((13, 128)), struct((128, width))],
        "top": [struct((width + 10, 256)), struct((256, 1))],
    }

    def forward(params, dense, ids, counts):
        hidden = jax.nn.relu(dense @ params["bottom"][0])
        x = jax.nn.relu(hidden @ params["bottom"][1])
        held = jnp.arange(ids.shape[-1]) < counts[..., None]
        bags = []
        for i, table in enumerate(params["tables"]):
            bags.append(jnp.sum(table[ids[:, i]] * held[:, i, :, None], axis=1))
        features = jnp.stack([x, *bags], axis=1)
        products = jnp.einsum("bid,bjd->bij", features, features)
        rows, columns = np.tril_indices(features.shape[1], -1)
        pairs = products[:, rows, columns]
        h = jnp.concatenate([x, pairs], -1)
        hidden = jax.nn.relu(h @ params["top"][0])
        clicks = hidden @ params["top"][1]
        return clicks[:, 0]

    def loss(params, dense, ids, counts, clicked):
        losses = optax.sigmoid_binary_cross_entropy(
            forward(params, dense, ids, counts), clicked
        )
        return losses.mean()

    optimizer = optax.adagrad(0.01)

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    dense = struct((512, 13), "chips")
    table_ids = struct((512, 4, 5), "chips", dtype=jnp.int32)
    held = struct((512, 4), "chips", dtype=jnp.int32)
    batch = (
        dense,
        table_ids,
        held,
    )
    state = optimizer_state(mesh, optimizer, params)
    clicks = struct((512,), "chips")
    args = (
        params,
        state,
        *batch,
        clicks,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, args


def _gpt2_params(struct, width):
    block = {
        "qkv": struct((width, 3 * width), None, "model"),
        "qkv_bias": struct((3 * width,), "model"),
        "out": struct((width, width), "model", None),
        "up": struct((width, 4 * width), None, "model"),
        "down": struct((4 * width, width), "model", None),
        "norms": struct((4, width)),
    }
    params = {
        "wte": struct((50257, width), None, "model"),
        "wpe": struct((64, width)),
        "blocks": (block, block),
    }
    return params


@case("gpt2-vocabulary-50257", cpu={"data": 4, "model": 2}, v5e={"data": 4, "model": 4})
def gpt2(mesh: AnyMesh) -> Made:
    """Unrolled blocks in bfloat16, a fused QKV; a tied table of 50257 rows, whose
    logits are cut unevenly.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 128
    heads = 4
    params = _gpt2_params(struct, width)

    def norm(x, scale, bias):
        return jax.nn.standardize(x, axis=-1) * scale + bias

    def attention(p, x):
        batch, length, _ = x.shape
        qkv = x @ p["qkv"] + p["qkv_bias"]
        q, k, v = jnp.split(qkv, 3, axis=-1)
        q, k, v = (
            t.reshape(batch, length, heads, -1).swapaxes(1, 2) for t in (q, k, v)
        )
        transposed = k.swapaxes(-1, -2)
        products = q @ transposed
        scores = products / math.sqrt(q.shape[-1])
        causal = jnp.tri(length, dtype=bool)
        least = jnp.finfo(scores.dtype).min
        scores = jnp.where(causal, scores, least)
        shares = jax.nn.softmax(scores)
        mixed = (shares @ v).swapaxes(1, 2)
        flat = mixed.reshape(batch, length, -1)
        return flat @ p["out"]

    def loss(params, tokens):
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        embedded = jnp.take(params["wte"], inputs, axis=0)
        x = embedded + params["wpe"][: inputs.shape[1]]
        for p in params["blocks"]:
            n = p["norms"]
            normed = norm(x, n[0], n[1])
            attended = attention(p, normed)
            x = x + attended
            normed_rows = norm(x, n[2], n[3])
            raised = normed_rows @ p["up"]
            hidden = jax.nn.gelu(raised)
            x = x + hidden @ p["down"]
        logits_of_rows = x @ params["wte"].T
        products = constrain(mesh, logits_of_rows, "data", None, "model")
        logits = products.astype(jnp.float32)
        columns = targets[..., None]
        picked_columns = jnp.take_along_axis(logits, columns, -1)
        picked = picked_columns[..., 0]
        normalizer = jax.nn.logsumexp(logits, -1)
        return jnp.mean(normalizer - picked)

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    tokens = struct((8, 65), "data", dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (
        params,
        tokens,
    )


CASES = (
    zero_one,
    beam_search,
    graph_attention,
    all_to_all_moe,
    byol,
    recommender,
    gpt2,
)
