"""Steps of the sealed half, 5 of 5."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ._case import AnyMesh, Made, case, on, optimizer_state


def _swin_params(struct, width):
    block = {
        "qkv": struct((width, 3, 3, 32)),
        "out": struct((3, 32, width)),
        "bias": struct((3, 16, 16)),
    }
    block |= {"up": struct((width, 384)), "down": struct((384, width))}
    params = {
        "patch": struct((48, width)),
        "blocks": [block] * 2,
        "merge": struct((4 * width, 192)),
        "head": struct((192, 30)),
    }
    return params


@case("swin-shifted-windows", cpu={"data": 2, "rows": 4}, v5e={"data": 4, "rows": 4})
def swin(mesh: AnyMesh) -> Made:
    """Attention in windows of pictures cut by rows, rolled by half a window, merged two
    by two; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 96
    window = 4
    params = _swin_params(struct, width)

    def attend(p, x):
        batch, height, wide, _ = x.shape
        tiles = x.reshape(
            batch, height // window, window, wide // window, window, width
        )
        turned = tiles.transpose(0, 1, 3, 2, 4, 5)
        tiles = turned.reshape(-1, window * window, width)
        q, k, v = jnp.einsum("ntd,dchk->cnhtk", tiles, p["qkv"])
        products = (q @ k.mT).astype(jnp.float32)
        scores = products / math.sqrt(32)
        biased = scores + p["bias"]
        weights = jax.nn.softmax(biased)
        shares = weights.astype(x.dtype)
        tiles = jnp.einsum("nhts,nhsk,hkd->ntd", shares, v, p["out"])
        tiles = tiles.reshape(
            batch, height // window, wide // window, window, window, width
        )
        turned_back = tiles.transpose(0, 1, 3, 2, 4, 5)
        return turned_back.reshape(x.shape)

    def loss(params, patches, labels):
        x = patches @ params["patch"]
        for position, p in enumerate(params["blocks"]):
            is_odd = position % 2
            shift = window // 2 * is_odd
            normed = jax.nn.standardize(x)
            h = jnp.roll(normed, (-shift, -shift), (1, 2))
            attended = attend(p, h)
            x = x + jnp.roll(attended, (shift, shift), (1, 2))
            hidden = jax.nn.gelu(x @ p["up"])
            x = x + hidden @ p["down"]
        quarters = []
        for i in (0, 1):
            for j in (0, 1):
                quarters.append(x[:, i::2, j::2])
        joined = jnp.concatenate(quarters, -1)
        x = joined @ params["merge"]
        means = x.mean((1, 2))
        answers = means @ params["head"]
        logits = answers.astype(jnp.float32)
        losses = optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 30))
        return losses.mean()

    def step(params, patches, labels):
        value, grads = jax.value_and_grad(loss)(params, patches, labels)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    patches = struct((8, 64, 32, 48), "data", "rows")
    labels = on(mesh)((8,), "data", dtype=jnp.int32)
    args = (
        params,
        patches,
        labels,
    )
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, args


def _unet_params(struct):
    def kernel(size, i, o):
        return struct((size, size, i, o), None, None, None, "channels")

    params = {
        "first": struct((3, 3, 3, 32), None, None, None, "channels"),
        "down": [kernel(3, 32, 64), kernel(3, 64, 128)],
        "middle": kernel(3, 128, 128),
        "up": [kernel(2, 128, 64), kernel(2, 64, 32)],
        "merge": [kernel(3, 128, 64), kernel(3, 64, 32)],
        "last": struct((1, 1, 32, 3), None, None, "channels"),
    }
    return params


def _unet_forward():
    def convolve(x, w, stride=1):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x,
            w.astype(x.dtype),
            (stride, stride),
            "SAME",
            dimension_numbers=dimensions,
        )

    def forward(params, x, sigma):
        level_columns = sigma[:, None, None, None]
        noise_level = level_columns.astype(jnp.bfloat16)
        low_x = x.astype(jnp.bfloat16)
        convolved = convolve(low_x, params["first"])
        x = convolved + noise_level
        skips = []
        for w in params["down"]:
            skips.append(x)
            downsampled = convolve(x, w, 2)
            x = jax.nn.silu(downsampled)
        middle = convolve(x, params["middle"])
        x = jax.nn.silu(middle)
        pairs = zip(params["up"], params["merge"], reversed(skips), strict=True)
        for up, merge, skip in pairs:
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_transpose(
                x,
                up.astype(x.dtype),
                (2, 2),
                "SAME",
                dimension_numbers=dimensions,
            )
            if x.shape[-1] != skip.shape[-1]:
                repeats = x.shape[-1] // skip.shape[-1]
                skip = jnp.tile(skip, (1, 1, 1, repeats))
            joined = jnp.concatenate([x, skip], -1)
            merged = convolve(joined, merge)
            x = jax.nn.silu(merged)
        last = convolve(x, params["last"])
        return last.astype(jnp.float32)

    return forward


@case(
    "unet-nhwc-channels-cut",
    cpu={"data": 4, "channels": 2},
    v5e={"data": 8, "channels": 2},
)
def unet(mesh: AnyMesh) -> Made:
    """Two levels down and up, transposed convolutions, skips concatenated over cut
    channels; bfloat16 compute.
    """
    struct = on(mesh)

    params = _unet_params(struct)

    forward = _unet_forward()

    def loss(params, clean, sigma, key):
        columns = sigma[:, None, None, None]
        drawn = jax.random.normal(key, clean.shape)
        noise = drawn * columns
        weight = 1 / jnp.square(sigma)
        noised = clean + noise
        denoised = forward(params, noised, sigma)
        squares = jnp.square(denoised - clean)
        mean_squares = squares.mean((1, 2, 3))
        return jnp.mean(weight * mean_squares)

    clipped = optax.clip_by_global_norm(1.0)
    optimizer = optax.chain(clipped, optax.adamw(1e-4))

    def step(params, state, clean, sigma, key):
        value, grads = jax.value_and_grad(loss)(params, clean, sigma, key)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    images = struct((16, 32, 32, 3), "data")
    levels = struct((16,), "data")
    key = struct((2,), dtype=jnp.uint32)
    inputs = (
        images,
        levels,
        key,
    )
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        *inputs,
    )


@case("siglip-ring-of-permutes", cpu={"ring": 8}, v5e={"ring": 16})
def siglip(mesh: AnyMesh) -> Made:
    """The sigmoid loss of pairs; texts go around a ring by `ppermute` inside a scan, so
    no device holds them all.
    """
    struct = on(mesh)
    count = mesh.shape["ring"]
    params = {
        "image": struct((512, 128)),
        "text": struct((384, 128)),
        "scale": struct(()),
        "shift": struct(()),
    }

    def local(params, images, texts):
        def unit(v):
            return v * lax.rsqrt(jnp.sum(v * v, -1, keepdims=True) + 1e-8)

        image_rows = images @ params["image"]
        x = unit(image_rows)
        text_rows = texts @ params["text"]
        y = unit(text_rows)

        def turn(carry, step):
            total, y = carry
            scale = jnp.exp(params["scale"])
            logits = scale * x @ y.T + params["shift"]
            identity = jnp.eye(x.shape[0])
            diagonal = 2 * identity - 1
            sign = jnp.where(step == 0, diagonal, -1.0)
            signs = jax.nn.log_sigmoid(sign * logits)
            total = total - jnp.sum(signs)
            ring = []
            for i in range(count):
                ring.append((i, (i + 1) % count))
            next_texts = lax.ppermute(y, "ring", ring)
            return (
                total,
                next_texts,
            ), None

        zero = jnp.zeros(())
        start = lax.pcast(zero, "ring", to="varying")
        steps = jnp.arange(count)
        (total, _), _ = lax.scan(turn, (start, y), steps)
        total_of_ring = lax.psum(total, "ring")
        return total_of_ring / (count * x.shape[0])

    in_specs = (P(), P("ring"), P("ring"))
    loss = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())

    def step(params, images, texts):
        value, grads = jax.value_and_grad(loss)(params, images, texts)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, value

    images = struct((512, 512), "ring")
    texts = struct((512, 384), "ring")
    jitted = jax.jit(step)
    return jitted, (
        params,
        images,
        texts,
    )


@case("mlp-momentum-data-parallel", cpu={"batch": 8}, v5e={"batch": 16})
def mlp_momentum(mesh: AnyMesh) -> Made:
    """A classifier as in the JAX tutorial: a list of pairs, SGD with momentum written
    by hand.
    """
    struct = on(mesh)
    sizes = (784, 512, 256, 10)
    params = [(struct((i, o)), struct((o,))) for i, o in itertools.pairwise(sizes)]

    def predict(params, x):
        for w, b in params[:-1]:
            hidden = x @ w + b
            x = jax.nn.relu(hidden)
        w, b = params[-1]
        logits = x @ w + b
        return jax.nn.log_softmax(logits)

    def loss(params, images, labels):
        log_probabilities = predict(params, images)
        columns = labels[:, None]
        picked = jnp.take_along_axis(log_probabilities, columns, axis=1)
        return -jnp.mean(picked)

    def update(params, velocity, images, labels):
        value, grads = jax.value_and_grad(loss)(params, images, labels)

        def accelerated(v, g):
            return 0.9 * v + g

        velocity = jax.tree.map(accelerated, velocity, grads)
        updated = jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)
        return updated, velocity, value

    images = struct((256, 784), "batch")
    labels = struct((256,), "batch", dtype=jnp.int32)
    jitted = jax.jit(update, donate_argnums=(0, 1))
    return jitted, (params, params, images, labels)


@case("int8-weights-scores", cpu={"data": 2, "model": 4}, v5e={"data": 2, "model": 8})
def int8_scores(mesh: AnyMesh) -> Made:
    """Scores of whole sequences by weights of eight bits with a scale for each column;
    activations quantized too.
    """
    struct = on(mesh)
    width = 256
    layers = [
        {
            "up": struct((width, 1024), None, "model", dtype=jnp.int8),
            "up_scale": struct((1024,), "model"),
            "down": struct((1024, width), "model", dtype=jnp.int8),
            "down_scale": struct((width,)),
        }
    ] * 3
    table = struct((4096, width), "model", dtype=jnp.int8)
    scale_struct = struct((4096,), "model")
    params = {"layers": layers, "table": table, "table_scale": scale_struct}

    def dense(x, w, scale):
        largest = jnp.max(jnp.abs(x), -1, keepdims=True)
        step = largest / 127 + 1e-8
        scaled = x / step
        whole = jnp.round(scaled).astype(jnp.int8)
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        product = lax.dot_general(
            whole,
            w,
            dimensions,
            preferred_element_type=jnp.int32,
        )
        wide = product.astype(jnp.float32)
        return wide * step * scale

    def scores(params, tokens):
        table_rows = params["table"][tokens]
        rows = table_rows.astype(jnp.float32)
        scales = params["table_scale"][tokens]
        x = rows * scales[..., None]
        for p in params["layers"]:
            raised = dense(x, p["up"], p["up_scale"])
            h = jax.nn.relu(raised)
            lowered = dense(h, p["down"], p["down_scale"])
            x = x + lowered
        answers = dense(x, params["table"].T, params["table_scale"])
        logits = answers[:, :-1]
        log_probabilities = jax.nn.log_softmax(logits)
        following = tokens[:, 1:, None]
        picked = jnp.take_along_axis(log_probabilities, following, -1)
        return picked.sum((1, 2))

    tokens = struct((16, 64), "data", dtype=jnp.int32)
    jitted = jax.jit(scores)
    return jitted, (params, tokens)


CASES = (
    swin,
    unet,
    siglip,
    mlp_momentum,
    int8_scores,
)
