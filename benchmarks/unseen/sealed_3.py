"""Steps of the sealed half, 3 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ._case import AnyMesh, Made, case, fully_sharded, on, optimizer_state, shardings


def _lstm_params(struct, width):
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
    return params


@case("lstm-bidirectional-tagger", cpu={"data": 8}, v5e={"data": 16})
def lstm(mesh: AnyMesh) -> Made:
    """Two directions, the second by flipping time, padding masked inside the scan,
    whole bfloat16 weights.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 128
    params = _lstm_params(struct, width)

    def run(p, xs, mask):
        def cell(carry, step):
            h, c = carry
            x, keep = step
            gates = x + h @ p["h"] + p["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            forgetting = jax.nn.sigmoid(f + 1)
            remembered = forgetting * c
            opened = jax.nn.sigmoid(i)
            new_c = remembered + opened * jnp.tanh(g)
            shown = jax.nn.sigmoid(o)
            new_h = shown * jnp.tanh(new_c)
            keep = keep[:, None]
            h = jnp.where(keep, new_h, h)
            c = jnp.where(keep, new_c, c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], width), xs.dtype)
        projected = xs @ p["x"]
        carries_and_outputs = lax.scan(cell, (zero, zero), (projected, mask), unroll=2)
        return carries_and_outputs[1]

    def loss(params, tokens, tags, lengths):
        positions = jnp.arange(tokens.shape[1])[:, None]
        mask = positions < lengths
        embedded = params["embed"][tokens]
        x = embedded.swapaxes(0, 1)
        forward = run(params["forward"], x, mask)
        flipped_rows = jnp.flip(x, 0)
        flipped_mask = jnp.flip(mask, 0)
        flipped = run(params["backward"], flipped_rows, flipped_mask)
        backward = jnp.flip(flipped, 0)
        both = jnp.concatenate([forward, backward], -1)
        answers = both @ params["tags"]
        logits = answers.astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tags.T)
        total = jnp.sum(each * mask)
        return total / jnp.sum(mask)

    def step(params, tokens, tags, lengths):
        value, grads = jax.value_and_grad(loss)(params, tokens, tags, lengths)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, value

    ids = functools.partial(struct, dtype=jnp.int32)
    tokens = ids((32, 40), "data")
    lengths = ids((32,), "data")
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (
        params,
        tokens,
        tokens,
        lengths,
    )


def _radiance_params(struct, width):
    net = {
        "hidden": [struct((63, width)), struct((width, width)), struct((width, width))]
    }
    net |= {"density": struct((width, 1)), "color": struct((width, 3))}
    return net


def _radiance_fields():
    def field(p, points):
        frequencies = 2.0 ** jnp.arange(10)
        bands = points[..., None] * frequencies
        x = jnp.concatenate(
            [
                points,
                *(f(bands).reshape(*points.shape[:-1], -1) for f in (jnp.sin, jnp.cos)),
            ],
            -1,
        )
        for w in p["hidden"]:
            x = jax.nn.relu(x @ w)
        densities = jax.nn.softplus(x @ p["density"])
        density = densities[..., 0]
        color = jax.nn.sigmoid(x @ p["color"])
        return density, color

    def render(p, origin, direction, depths):
        offsets = depths[:, None] * direction
        points = origin + offsets
        density, color = field(p, points)
        last = depths[-1:] + 0.1
        steps = jnp.diff(depths, append=last)
        passed = jnp.exp(-density * steps)
        opaque = 1 - passed
        clear_steps = 1 - opaque[:-1] + 1e-10
        transparency = jnp.concatenate([jnp.ones(1), clear_steps])
        clear = jnp.cumprod(transparency)
        columns = (opaque * clear)[:, None]
        return columns.T @ color, opaque * clear

    return render


@case("radiance-field-rays", cpu={"rays": 8}, v5e={"rays": 16})
def radiance_field(mesh: AnyMesh) -> Made:
    """Two passes over rays mapped by `vmap`: even samples, then some where the first
    found density.
    """
    struct = on(mesh)
    width = 128
    net = _radiance_params(struct, width)

    render = _radiance_fields()

    def ray(params, origin, direction, key):
        noise = jax.random.uniform(key, (32,))
        jitter = noise * 0.125
        grid = jnp.linspace(2.0, 6.0, 32)
        even = grid + jitter
        coarse, weights = render(params["coarse"], origin, direction, even)
        smoothed = lax.stop_gradient(weights) + 1e-5
        share = jnp.cumsum(smoothed)
        levels = jnp.linspace(0, 0.99, 32)
        index = jnp.searchsorted(share / share[-1], levels)
        near = even[index] + 0.05
        all_depths = jnp.concatenate([even, near])
        depths = jnp.sort(all_depths)
        fine, _ = render(
            params["fine"],
            origin,
            direction,
            depths,
        )
        return coarse[0], fine[0]

    def loss(params, origins, directions, colors, key):
        keys = jax.random.split(key, origins.shape[0])
        mapped = jax.vmap(ray, (None, 0, 0, 0))
        coarse, fine = mapped(params, origins, directions, keys)
        coarse_errors = (coarse - colors) ** 2
        coarse_loss = jnp.mean(coarse_errors)
        return coarse_loss + jnp.mean((fine - colors) ** 2)

    optimizer = optax.adam(5e-4)
    params = {"coarse": net, "fine": net}

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        decibels = -10 * jnp.log10(value)
        return updated, state, decibels

    rays = [struct((512, 3), "rays")] * 3
    key = struct((), dtype=jax.random.key(0).dtype)
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        *rays,
        key,
    )


def _conformer_params(struct, width, heads):
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
    return params


def _conformer_layers():
    def feedforward(ws, x):
        normed = jax.nn.standardize(x)
        hidden = jax.nn.swish(normed @ ws[0])
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

    return feedforward, convolve


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
    params = _conformer_params(struct, width, heads)

    feedforward, convolve = _conformer_layers()

    def loss(params, frames, frame_lengths, labels, label_lengths):
        x = frames
        for w in params["front"]:
            strided = convolve(x, w, 2)
            x = jax.nn.relu(strided)
        for p in params["layers"]:
            fed = feedforward(p["first"], x)
            x = x + fed
            normed = jax.nn.standardize(x)
            qkv = jnp.einsum("btd,dchk->btchk", normed, p["qkv"])
            q, k, v = jnp.unstack(qkv, axis=2)
            products = jnp.einsum("bqhk,bshk->bhqs", q, k)
            weights = jax.nn.softmax(products / 6)
            attended = jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, p["out"])
            x = x + attended
            gated_input = x @ p["pointwise"]
            value, gate = jnp.split(gated_input, 2, -1)
            gated = value * jax.nn.sigmoid(gate)
            convolved = convolve(gated, p["depthwise"], groups=width)
            activated = jax.nn.swish(convolved)
            x = x + activated
            second = feedforward(p["second"], x)
            x = x + second
        logits = x @ params["words"]
        positions = jnp.arange(x.shape[1])
        frame_ends = frame_lengths[:, None]
        is_late = positions >= frame_ends
        late = is_late.astype(jnp.float32)
        label_positions = jnp.arange(labels.shape[1])
        label_ends = label_lengths[:, None]
        is_gone = label_positions >= label_ends
        gone = is_gone.astype(jnp.float32)
        losses = optax.ctc_loss(logits, late, labels, gone)
        return losses.mean()

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updated = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        return updated, value

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
    jitted = jax.jit(step)
    return jitted, (params, *batch)


def _vq_params(struct, width, codes):
    params = {
        "encode": [struct((256, 192)), struct((192, width))],
        "decode": [struct((width, 192)), struct((192, 256))],
    }
    book = {
        "codes": struct((codes, width), "codes"),
        "counts": struct((codes,), "codes"),
        "sums": struct((codes, width), "codes"),
    }
    return params, book


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
    params, book = _vq_params(struct, width, codes)

    def loss(params, codes, x):
        hidden = jax.nn.relu(x @ params["encode"][0])
        z = hidden @ params["encode"][1]
        squares = jnp.sum(z**2, -1, keepdims=True)
        products = 2 * z @ codes.T
        code_squares = jnp.sum(codes**2, -1)
        distances = squares - products + code_squares
        index = jnp.argmin(distances, -1)
        chosen = codes[index]
        straight = lax.stop_gradient(chosen - z)
        through = z + straight
        decoded = jax.nn.relu(through @ params["decode"][0])
        back = decoded @ params["decode"][1]
        target = lax.stop_gradient(chosen)
        gaps = (z - target) ** 2
        commitment = jnp.mean(gaps)
        squared_errors = (back - x) ** 2
        return jnp.mean(squared_errors) + 0.25 * commitment, (z, index)

    optimizer = optax.adam(3e-4)

    def step(params, state, book, x):
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, (z, index)), grads = value_and_grad(params, book["codes"], x)
        choices = jax.nn.one_hot(index, codes)
        hot = choices.reshape(-1, codes)
        chosen_counts = hot.sum(0)
        old_counts = 0.99 * book["counts"]
        counts = old_counts + 0.01 * chosen_counts
        rows = z.reshape(-1, width)
        old_sums = 0.99 * book["sums"]
        sums = old_sums + 0.01 * hot.T @ rows
        total = counts.sum() + codes * 1e-5
        shares = (counts + 1e-5) / total
        smooth = shares * counts.sum()
        updates, state = optimizer.update(grads, state)
        new_codes = sums / smooth[:, None]
        book = {"codes": new_codes, "counts": counts, "sums": sums}
        updated = optax.apply_updates(params, updates)
        return updated, state, book, value

    state = optimizer_state(mesh, optimizer, params)
    x = struct((32, 49, 256), "data")
    args = (
        params,
        state,
        book,
        x,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, args


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
        shares = jax.nn.softmax(x @ params["router"])
        weights, chosen = lax.top_k(shares, 2)
        sorted_choices = chosen.reshape(-1)
        order = jnp.argsort(sorted_choices)
        counted_choices = chosen.reshape(-1)
        counts = jnp.bincount(counted_choices, length=experts)
        rows = x[order // 2]
        gate_products = lax.ragged_dot(rows, params["gate"], counts)
        gate = jax.nn.silu(gate_products)
        raised = lax.ragged_dot(rows, params["up"], counts)
        h = gate * raised
        sorted_rows = lax.ragged_dot(h, params["down"], counts)
        inverse = jnp.argsort(order)
        y = sorted_rows[inverse]
        pairs = y.reshape(-1, 2, width)
        return jnp.einsum("tkd,tk->td", pairs, weights)

    def loss(params, x, y):
        rows = x.reshape(-1, width)
        mixed = layer(params, rows)
        out = mixed.reshape(x.shape)
        squared_errors = (out + x - y) ** 2
        return jnp.mean(squared_errors)

    x = struct((16, 32, width), "fsdp")
    gradient = jax.jit(jax.grad(loss), out_shardings=shardings(params))
    return gradient, (params, x, x)


def _t5_params(width, heads, mesh):
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
    return params


def _t5_layers(heads, width):
    def norm(x, scale):
        mean_square = jnp.mean(x * x, -1, keepdims=True)
        scale_of_rows = lax.rsqrt(mean_square + 1e-6)
        return x * scale_of_rows * scale

    def attention(p, x, memory, bias):
        def split(t):
            return t.reshape(*t.shape[:2], heads, width // heads)

        q = split(x @ p["q"])
        k = split(memory @ p["k"])
        v = split(memory @ p["v"])
        products = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = jax.nn.softmax(products + bias)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        flat = mixed.reshape(x.shape)
        return flat @ p["o"]

    def position_bias(table, length, causal):
        positions = jnp.arange(length)
        offset = positions[None] - positions[:, None]
        distance = jnp.abs(offset) + 1
        logs = jnp.log2(distance)
        logarithm = logs.astype(jnp.int32)
        signed = jnp.sign(offset) * logarithm + 16
        buckets = jnp.clip(
            signed,
            0,
            31,
        )
        rows = table[buckets]
        bias = jnp.moveaxis(rows, -1, 0)
        return jnp.where(offset > 0, -1e9, bias) if causal else bias

    return norm, attention, position_bias


@case("t5-adafactor-fsdp", cpu={"fsdp": 8}, v5e={"fsdp": 16})
def t5_adafactor(mesh: AnyMesh) -> Made:
    """An encoder and a decoder with bucketed position biases and cross attention,
    trained by Adafactor.
    """
    width = 128
    heads = 4
    params = _t5_params(width, heads, mesh)

    norm, attention, position_bias = _t5_layers(heads, width)

    def loss(params, inputs, targets):
        x = params["embed"][inputs]
        padded = jnp.pad(targets, ((0, 0), (1, 0)))
        shifted = padded[:, :-1]
        y = params["embed"][shifted]
        bias = position_bias(params["bias"][0], inputs.shape[1], False)
        for p in params["encoder"]:
            h = norm(x, p["norm"][0])
            attended = attention(p["self"], h, h, bias)
            x = x + attended
            mlp_input = norm(x, p["norm"][1])
            raised = mlp_input @ p["mlp"]["wi"]
            hidden = jax.nn.relu(raised)
            x = x + hidden @ p["mlp"]["wo"]
        bias = position_bias(params["bias"][1], targets.shape[1], True)
        for p in params["decoder"]:
            h = norm(y, p["norm"][0])
            decoded = attention(p["self"], h, h, bias)
            y = y + decoded
            cross_input = norm(y, p["norm"][1])
            crossed = attention(p["cross"], cross_input, x, 0.0)
            y = y + crossed
            decoder_input = norm(y, p["norm"][2])
            decoder_hidden = decoder_input @ p["mlp"]["wi"]
            hidden = jax.nn.relu(decoder_hidden)
            y = y + hidden @ p["mlp"]["wo"]
        scaled = y / math.sqrt(width)
        logits = scaled @ params["embed"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=64)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state

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
