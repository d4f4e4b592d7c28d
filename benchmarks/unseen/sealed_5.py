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


@case("swin-shifted-windows", cpu={"data": 2, "rows": 4}, v5e={"data": 4, "rows": 4})
def swin(mesh: AnyMesh) -> Made:
    """Attention in windows of pictures cut by rows, rolled by half a window, merged two
    by two; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 96
    window = 4
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

    def attend(p, x):
        batch, height, wide, _ = x.shape
        tiles = x.reshape(
            batch, height // window, window, wide // window, window, width
        )
        turned = tiles.transpose(0, 1, 3, 2, 4, 5)
        tiles = turned.reshape(-1, window * window, width)
        q, k, v = jnp.einsum("ntd,dchk->cnhtk", tiles, p["qkv"])
        scores = (q @ k.mT).astype(jnp.float32) / math.sqrt(32)
        weights = jax.nn.softmax(scores + p["bias"])
        tiles = jnp.einsum("nhts,nhsk,hkd->ntd", weights.astype(x.dtype), v, p["out"])
        tiles = tiles.reshape(
            batch, height // window, wide // window, window, window, width
        )
        return tiles.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)

    def loss(params, patches, labels):
        x = patches @ params["patch"]
        for position, p in enumerate(params["blocks"]):
            shift = window // 2 * (position % 2)
            normed = jax.nn.standardize(x)
            h = jnp.roll(normed, (-shift, -shift), (1, 2))
            attended = attend(p, h)
            x = x + jnp.roll(attended, (shift, shift), (1, 2))
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        quarters = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        x = jnp.concatenate(quarters, -1) @ params["merge"]
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 30)).mean()

    def step(params, patches, labels):
        value, grads = jax.value_and_grad(loss)(params, patches, labels)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    patches = struct((8, 64, 32, 48), "data", "rows")
    labels = on(mesh)((8,), "data", dtype=jnp.int32)
    args = (
        params,
        patches,
        labels,
    )
    return jax.jit(step, donate_argnums=0), args


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
        noise_level = sigma[:, None, None, None].astype(jnp.bfloat16)
        x = convolve(x.astype(jnp.bfloat16), params["first"]) + noise_level
        skips = []
        for w in params["down"]:
            skips.append(x)
            x = jax.nn.silu(convolve(x, w, 2))
        x = jax.nn.silu(convolve(x, params["middle"]))
        for up, merge, skip in zip(
            params["up"], params["merge"], reversed(skips), strict=True
        ):
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
            x = jax.nn.silu(convolve(joined, merge))
        return convolve(x, params["last"]).astype(jnp.float32)

    def loss(params, clean, sigma, key):
        noise = jax.random.normal(key, clean.shape) * sigma[:, None, None, None]
        weight = 1 / jnp.square(sigma)
        squares = jnp.square(forward(params, clean + noise, sigma) - clean)
        return jnp.mean(weight * squares.mean((1, 2, 3)))

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def step(params, state, clean, sigma, key):
        value, grads = jax.value_and_grad(loss)(params, clean, sigma, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    images = struct((16, 32, 32, 3), "data")
    levels = struct((16,), "data")
    key = struct((2,), dtype=jnp.uint32)
    inputs = (
        images,
        levels,
        key,
    )
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
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
        unit = lambda v: v * lax.rsqrt(jnp.sum(v * v, -1, keepdims=True) + 1e-8)
        x = unit(images @ params["image"])
        y = unit(texts @ params["text"])

        def turn(carry, step):
            total, y = carry
            logits = jnp.exp(params["scale"]) * x @ y.T + params["shift"]
            diagonal = 2 * jnp.eye(x.shape[0]) - 1
            sign = jnp.where(step == 0, diagonal, -1.0)
            total = total - jnp.sum(jax.nn.log_sigmoid(sign * logits))
            ring = [(i, (i + 1) % count) for i in range(count)]
            return (
                total,
                lax.ppermute(y, "ring", ring),
            ), None

        start = lax.pcast(jnp.zeros(()), "ring", to="varying")
        (total, _), _ = lax.scan(turn, (start, y), jnp.arange(count))
        return lax.psum(total, "ring") / (count * x.shape[0])

    in_specs = (P(), P("ring"), P("ring"))
    loss = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())

    def step(params, images, texts):
        value, grads = jax.value_and_grad(loss)(params, images, texts)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    images = struct((512, 512), "ring")
    texts = struct((512, 384), "ring")
    return jax.jit(step), (
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
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return jax.nn.log_softmax(x @ w + b)

    def loss(params, images, labels):
        log_probabilities = predict(params, images)
        return -jnp.mean(
            jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)
        )

    def update(params, velocity, images, labels):
        value, grads = jax.value_and_grad(loss)(params, images, labels)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    images = struct((256, 784), "batch")
    labels = struct((256,), "batch", dtype=jnp.int32)
    return jax.jit(update, donate_argnums=(0, 1)), (params, params, images, labels)


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
    params = {"layers": layers, "table": table, "table_scale": struct((4096,), "model")}

    def dense(x, w, scale):
        step = jnp.max(jnp.abs(x), -1, keepdims=True) / 127 + 1e-8
        whole = jnp.round(x / step).astype(jnp.int8)
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        product = lax.dot_general(
            whole,
            w,
            dimensions,
            preferred_element_type=jnp.int32,
        )
        return product.astype(jnp.float32) * step * scale

    def scores(params, tokens):
        rows = params["table"][tokens].astype(jnp.float32)
        x = rows * params["table_scale"][tokens][..., None]
        for p in params["layers"]:
            h = jax.nn.relu(dense(x, p["up"], p["up_scale"]))
            x = x + dense(h, p["down"], p["down_scale"])
        logits = dense(x, params["table"].T, params["table_scale"])[:, :-1]
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1)
        return picked.sum((1, 2))

    tokens = struct((16, 64), "data", dtype=jnp.int32)
    return jax.jit(scores), (params, tokens)


CASES = (
    swin,
    unet,
    siglip,
    mlp_momentum,
    int8_scores,
)
