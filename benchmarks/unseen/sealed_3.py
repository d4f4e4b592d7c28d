"""Steps of the sealed half, 3 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ._case import AnyMesh, Made, case, fully_sharded, on, optimizer_state, shardings


@case("lstm-bidirectional-tagger", cpu={"data": 8}, v5e={"data": 16})
def lstm(mesh: AnyMesh) -> Made:
    """Two directions, the second by flipping time, padding masked inside the scan,
    whole bfloat16 weights.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 128
    direction = {
        "x": struct((width, 4 * width)),
        "h": struct((width, 4 * width)),
        "b": struct((4 * width,)),
    }
    params = {
        "embed": struct((5000, width)),
        "forward": direction,
        "backward": direction,
        "tags": struct((2 * width, 17)),
    }

    def run(p, xs, mask):
        def cell(carry, step):
            (h, c), (x, keep) = carry, step
            gates = x + h @ p["h"] + p["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            remembered = jax.nn.sigmoid(f + 1) * c
            new_c = remembered + jax.nn.sigmoid(i) * jnp.tanh(g)
            new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
            keep = keep[:, None]
            h = jnp.where(keep, new_h, h)
            c = jnp.where(keep, new_c, c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], width), xs.dtype)
        carries_and_outputs = lax.scan(
            cell, (zero, zero), (xs @ p["x"], mask), unroll=2
        )
        return carries_and_outputs[1]

    def loss(params, tokens, tags, lengths):
        mask = jnp.arange(tokens.shape[1])[:, None] < lengths
        x = params["embed"][tokens].swapaxes(0, 1)
        forward = run(params["forward"], x, mask)
        flipped = run(params["backward"], jnp.flip(x, 0), jnp.flip(mask, 0))
        backward = jnp.flip(flipped, 0)
        both = jnp.concatenate([forward, backward], -1)
        logits = (both @ params["tags"]).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tags.T)
        return jnp.sum(each * mask) / jnp.sum(mask)

    def step(params, tokens, tags, lengths):
        value, grads = jax.value_and_grad(loss)(params, tokens, tags, lengths)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    ids = functools.partial(struct, dtype=jnp.int32)
    tokens = ids((32, 40), "data")
    lengths = ids((32,), "data")
    return jax.jit(step, donate_argnums=0), (
        params,
        tokens,
        tokens,
        lengths,
    )


@case("radiance-field-rays", cpu={"rays": 8}, v5e={"rays": 16})
def radiance_field(mesh: AnyMesh) -> Made:
    """Two passes over rays mapped by `vmap`: even samples, then some where the first
    found density.
    """
    struct = on(mesh)
    width = 128
    net = {
        "hidden": [struct((63, width)), struct((width, width)), struct((width, width))]
    }
    net |= {"density": struct((width, 1)), "color": struct((width, 3))}

    def field(p, points):
        bands = points[..., None] * 2.0 ** jnp.arange(10)
        x = jnp.concatenate(
            [
                points,
                *(f(bands).reshape(*points.shape[:-1], -1) for f in (jnp.sin, jnp.cos)),
            ],
            -1,
        )
        for w in p["hidden"]:
            x = jax.nn.relu(x @ w)
        density = jax.nn.softplus(x @ p["density"])[..., 0]
        return density, jax.nn.sigmoid(x @ p["color"])

    def render(p, origin, direction, depths):
        density, color = field(p, origin + depths[:, None] * direction)
        steps = jnp.diff(depths, append=depths[-1:] + 0.1)
        opaque = 1 - jnp.exp(-density * steps)
        transparency = jnp.concatenate([jnp.ones(1), 1 - opaque[:-1] + 1e-10])
        clear = jnp.cumprod(transparency)
        return (opaque * clear)[:, None].T @ color, opaque * clear

    def ray(params, origin, direction, key):
        jitter = jax.random.uniform(key, (32,)) * 0.125
        even = jnp.linspace(2.0, 6.0, 32) + jitter
        coarse, weights = render(params["coarse"], origin, direction, even)
        share = jnp.cumsum(lax.stop_gradient(weights) + 1e-5)
        index = jnp.searchsorted(share / share[-1], jnp.linspace(0, 0.99, 32))
        depths = jnp.sort(jnp.concatenate([even, even[index] + 0.05]))
        fine, _ = render(
            params["fine"],
            origin,
            direction,
            depths,
        )
        return coarse[0], fine[0]

    def loss(params, origins, directions, colors, key):
        keys = jax.random.split(key, origins.shape[0])
        coarse, fine = jax.vmap(ray, (None, 0, 0, 0))(params, origins, directions, keys)
        return jnp.mean((coarse - colors) ** 2) + jnp.mean((fine - colors) ** 2)

    optimizer = optax.adam(5e-4)
    params = {"coarse": net, "fine": net}

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, -10 * jnp.log10(value)

    rays = [struct((512, 3), "rays")] * 3
    key = struct((), dtype=jax.random.key(0).dtype)
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
        params,
        state,
        *rays,
        key,
    )


@case(
    "conformer-on-three-by-two",
    cpu={"data": 3, "model": 2},
    v5e={"data": 8, "model": 2},
)
def conformer(mesh: AnyMesh) -> Made:
    """Speech: strided convolutions, depthwise ones between attention and feedforward, a
    loss of alignments.
    """
    struct = on(mesh)
    width = 144
    heads = 4
    first = [struct((width, 576), None, "model"), struct((576, width), "model")]
    layer = {
        "first": first,
        "qkv": struct((width, 3, heads, 36), None, None, "model"),
        "out": struct((heads, 36, width), "model"),
        "pointwise": struct((width, 2 * width)),
        "depthwise": struct((7, 1, width)),
        "second": first,
    }
    params = {
        "front": [struct((3, 80, width)), struct((3, width, width))],
        "layers": [layer] * 2,
        "words": struct((width, 42)),
    }

    def feedforward(ws, x):
        hidden = jax.nn.swish(jax.nn.standardize(x) @ ws[0])
        return 0.5 * hidden @ ws[1]

    def convolve(x, w, stride=1, groups=1):
        dimensions = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x,
            w,
            (stride,),
            "SAME",
            dimension_numbers=dimensions,
            feature_group_count=groups,
        )

    def loss(params, frames, frame_lengths, labels, label_lengths):
        x = frames
        for w in params["front"]:
            x = jax.nn.relu(convolve(x, w, 2))
        for p in params["layers"]:
            x = x + feedforward(p["first"], x)
            qkv = jnp.einsum("btd,dchk->btchk", jax.nn.standardize(x), p["qkv"])
            q, k, v = jnp.unstack(qkv, axis=2)
            weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / 6)
            x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, p["out"])
            value, gate = jnp.split(x @ p["pointwise"], 2, -1)
            convolved = convolve(
                value * jax.nn.sigmoid(gate), p["depthwise"], groups=width
            )
            x = x + jax.nn.swish(convolved)
            x = x + feedforward(p["second"], x)
        logits = x @ params["words"]
        is_late = jnp.arange(x.shape[1]) >= frame_lengths[:, None]
        late = is_late.astype(jnp.float32)
        is_gone = jnp.arange(labels.shape[1]) >= label_lengths[:, None]
        gone = is_gone.astype(jnp.float32)
        return optax.ctc_loss(logits, late, labels, gone).mean()

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    ids = functools.partial(struct, dtype=jnp.int32)
    frames = struct((24, 160, 80), "data")
    lengths = ids((24,), "data")
    labels = ids((24, 12), "data")
    batch = (
        frames,
        lengths,
        labels,
        lengths,
    )
    return jax.jit(step), (params, *batch)


@case(
    "vq-vae-codebook-average", cpu={"data": 4, "codes": 2}, v5e={"data": 8, "codes": 2}
)
def vq_vae(mesh: AnyMesh) -> Made:
    """The nearest of cut codes by argmin, gradients straight through, codes moved by
    averages of what chose them.
    """
    struct = on(mesh)
    codes = 512
    width = 64
    params = {
        "encode": [struct((256, 192)), struct((192, width))],
        "decode": [struct((width, 192)), struct((192, 256))],
    }
    book = {
        "codes": struct((codes, width), "codes"),
        "counts": struct((codes,), "codes"),
        "sums": struct((codes, width), "codes"),
    }

    def loss(params, codes, x):
        z = jax.nn.relu(x @ params["encode"][0]) @ params["encode"][1]
        squares = jnp.sum(z**2, -1, keepdims=True)
        distances = squares - 2 * z @ codes.T + jnp.sum(codes**2, -1)
        index = jnp.argmin(distances, -1)
        chosen = codes[index]
        through = z + lax.stop_gradient(chosen - z)
        back = jax.nn.relu(through @ params["decode"][0]) @ params["decode"][1]
        commitment = jnp.mean((z - lax.stop_gradient(chosen)) ** 2)
        return jnp.mean((back - x) ** 2) + 0.25 * commitment, (z, index)

    optimizer = optax.adam(3e-4)

    def step(params, state, book, x):
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, (z, index)), grads = value_and_grad(params, book["codes"], x)
        hot = jax.nn.one_hot(index, codes).reshape(-1, codes)
        counts = 0.99 * book["counts"] + 0.01 * hot.sum(0)
        sums = 0.99 * book["sums"] + 0.01 * hot.T @ z.reshape(-1, width)
        smooth = (counts + 1e-5) / (counts.sum() + codes * 1e-5) * counts.sum()
        updates, state = optimizer.update(grads, state)
        book = {"codes": sums / smooth[:, None], "counts": counts, "sums": sums}
        return optax.apply_updates(params, updates), state, book, value

    state = optimizer_state(mesh, optimizer, params)
    x = struct((32, 49, 256), "data")
    args = (
        params,
        state,
        book,
        x,
    )
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


@case("experts-sorted-ragged-dot", cpu={"fsdp": 8}, v5e={"fsdp": 16})
def ragged_moe(mesh: AnyMesh) -> Made:
    """Two experts for each token, tokens sorted by expert and multiplied by
    `ragged_dot`; experts' widths are cut.
    """
    struct = on(mesh)
    experts = 6
    width = 128
    hidden = 256
    params = {
        "router": struct((width, experts)),
        "gate": struct((experts, width, hidden), None, None, "fsdp"),
        "up": struct((experts, width, hidden), None, None, "fsdp"),
        "down": struct((experts, hidden, width), None, "fsdp", None),
    }

    def layer(params, x):
        weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // 2]
        gate = jax.nn.silu(lax.ragged_dot(rows, params["gate"], counts))
        h = gate * lax.ragged_dot(rows, params["up"], counts)
        y = lax.ragged_dot(h, params["down"], counts)[jnp.argsort(order)]
        return jnp.einsum("tkd,tk->td", y.reshape(-1, 2, width), weights)

    def loss(params, x, y):
        out = layer(params, x.reshape(-1, width)).reshape(x.shape)
        return jnp.mean((out + x - y) ** 2)

    x = struct((16, 32, width), "fsdp")
    gradient = jax.jit(jax.grad(loss), out_shardings=shardings(params))
    return gradient, (params, x, x)


@case("t5-adafactor-fsdp", cpu={"fsdp": 8}, v5e={"fsdp": 16})
def t5_adafactor(mesh: AnyMesh) -> Made:
    """An encoder and a decoder with bucketed position biases and cross attention,
    trained by Adafactor.
    """
    width = 128
    heads = 4
    attend = {name: jnp.zeros((width, width)) for name in ("q", "k", "v", "o")}
    dense = {"wi": jnp.zeros((width, 512)), "wo": jnp.zeros((512, width))}
    encoder_layer = {"self": attend, "mlp": dense, "norm": jnp.ones((2, width))}
    shapes = {
        "embed": jnp.zeros((2048, width)),
        "bias": jnp.zeros((2, 32, heads)),
        "encoder": [encoder_layer] * 2,
        "decoder": (
            [
                {
                    "self": attend,
                    "cross": attend,
                    "mlp": dense,
                    "norm": jnp.ones((3, width)),
                }
            ]
            * 2
        ),
    }
    params = fully_sharded(mesh, shapes, "fsdp")

    def norm(x, scale):
        mean_square = jnp.mean(x * x, -1, keepdims=True)
        return x * lax.rsqrt(mean_square + 1e-6) * scale

    def attention(p, x, memory, bias):
        split = lambda t: t.reshape(*t.shape[:2], heads, width // heads)
        q = split(x @ p["q"])
        k = split(memory @ p["k"])
        v = split(memory @ p["v"])
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]

    def position_bias(table, length, causal):
        offset = jnp.arange(length)[None] - jnp.arange(length)[:, None]
        logarithm = jnp.log2(jnp.abs(offset) + 1).astype(jnp.int32)
        buckets = jnp.clip(
            jnp.sign(offset) * logarithm + 16,
            0,
            31,
        )
        bias = jnp.moveaxis(table[buckets], -1, 0)
        return jnp.where(offset > 0, -1e9, bias) if causal else bias

    def loss(params, inputs, targets):
        x = params["embed"][inputs]
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        y = params["embed"][shifted]
        bias = position_bias(params["bias"][0], inputs.shape[1], False)
        for p in params["encoder"]:
            h = norm(x, p["norm"][0])
            x = x + attention(p["self"], h, h, bias)
            hidden = jax.nn.relu(norm(x, p["norm"][1]) @ p["mlp"]["wi"])
            x = x + hidden @ p["mlp"]["wo"]
        bias = position_bias(params["bias"][1], targets.shape[1], True)
        for p in params["decoder"]:
            h = norm(y, p["norm"][0])
            y = y + attention(p["self"], h, h, bias)
            cross_input = norm(y, p["norm"][1])
            y = y + attention(p["cross"], cross_input, x, 0.0)
            hidden = jax.nn.relu(norm(y, p["norm"][2]) @ p["mlp"]["wi"])
            y = y + hidden @ p["mlp"]["wo"]
        logits = y / math.sqrt(width) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=64)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    struct = functools.partial(on(mesh), dtype=jnp.int32)
    state = optimizer_state(mesh, optimizer, params)
    inputs = struct((16, 48), "fsdp")
    targets = struct((16, 32), "fsdp")
    return step, (
        params,
        state,
        inputs,
        targets,
    )


CASES = (
    lstm,
    radiance_field,
    conformer,
    vq_vae,
    ragged_moe,
    t5_adafactor,
)
