"""Steps of the open half, 3 of 5."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

from ._case import AnyMesh, Made, case, on, optimizer_state


@case(
    "gru-language-hidden-cut", cpu={"data": 2, "model": 4}, v5e={"data": 4, "model": 4}
)
def gru(mesh: AnyMesh) -> Made:
    """A language model of gated units by a scan over time; gates' columns are cut, as
    is the table's width.
    """
    struct = on(mesh)
    width = 256
    params = {
        "embed": struct((2048, width), None, "model"),
        "input": struct((width, 3, width), None, None, "model"),
        "hidden": struct((width, 3, width), None, None, "model"),
        "bias": struct((3, width), None, "model"),
        "out": struct((width, 2048), None, "model"),
    }

    def cell(params, h, gates):
        projected = jnp.tensordot(h, params["hidden"], 1)
        r_h, z_h, n_h = jnp.moveaxis(projected, 1, 0)
        r_x, z_x, n_x = jnp.moveaxis(gates, 1, 0)
        reset = jax.nn.sigmoid(r_x + r_h)
        update = jax.nn.sigmoid(z_x + z_h)
        h = (1 - update) * jnp.tanh(n_x + reset * n_h) + update * h
        return h, h

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        gates = jnp.einsum("btd,dgh->tbgh", x, params["input"]) + params["bias"]
        start = jnp.zeros((tokens.shape[0], width))
        _, hidden = lax.scan(functools.partial(cell, params), start, gates)
        logits = jnp.einsum("tbh,hv->btv", hidden, params["out"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    optimizer = optax.chain(optax.clip(0.25), optax.rmsprop(1e-3))

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    tokens = struct((16, 33), "data", dtype=jnp.int32)
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
        params,
        state,
        tokens,
    )


@case(
    "video-axial-attention",
    cpu={"frames": 4, "model": 2},
    v5e={"frames": 4, "model": 4},
)
def video_axial(mesh: AnyMesh) -> Made:
    """Attention along rows, columns and time in turn, axes moved and merged each time,
    frames cut over devices.
    """
    struct = on(mesh)
    width = 128
    heads = 4
    params = {
        direction: {
            "qkv": struct((width, 3, heads, 32), None, None, "model"),
            "out": struct((heads, 32, width), "model"),
        }
        for direction in ("rows", "columns", "time")
    }
    params["mlp"] = {
        "up": struct((width, 512), None, "model"),
        "down": struct((512, width), "model"),
    }

    def along(p, x, axis):
        moved = jnp.moveaxis(x, axis, -2)
        flat = moved.reshape(-1, moved.shape[-2], width)
        qkv = jnp.einsum("ntd,dchk->nthck", flat, p["qkv"])
        q, k, v = jnp.split(qkv, 3, axis=3)
        mixed = jax.vmap(one_head, (2, 2, 2), 2)(
            q[..., 0, :], k[..., 0, :], v[..., 0, :]
        )
        out = jnp.einsum("nthk,hkd->ntd", mixed, p["out"]).reshape(moved.shape)
        return jnp.moveaxis(out, -2, axis)

    def one_head(q, k, v):
        return jax.nn.softmax(q @ k.mT / math.sqrt(32)) @ v

    def loss(params, video, masked):
        x = jnp.where(masked[..., None], 0.0, video)
        for axis, direction in ((2, "rows"), (3, "columns"), (1, "time")):
            x = x + along(params[direction], jax.nn.standardize(x), axis)
        hidden = jax.nn.gelu(x @ params["mlp"]["up"])
        x = x + hidden @ params["mlp"]["down"]
        errors = (x - video) ** 2 * masked[..., None]
        return jnp.sum(errors) / (jnp.sum(masked) * width)

    optimizer = optax.adam(1e-3)

    def step(params, state, video, masked):
        value, grads = jax.value_and_grad(loss)(params, video, masked)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    spec = (None, "frames")
    state = optimizer_state(mesh, optimizer, params)
    video = struct((2, 16, 12, 12, width), *spec)
    args = (
        params,
        state,
        video,
    )
    masked = struct((2, 16, 12, 12), *spec, dtype=jnp.bool_)
    return jax.jit(step, donate_argnums=(0, 1)), (
        *args,
        masked,
    )


@case(
    "ppo-advantages-and-minibatches", cpu={"environments": 8}, v5e={"environments": 16}
)
def ppo(mesh: AnyMesh) -> Made:
    """Advantages by a reverse scan, a permutation of all samples, and a scan over
    epochs of clipped updates.
    """
    struct = on(mesh)
    time = 32
    count = 64
    params = {
        "body": [struct((48, 256)), struct((256, 256))],
        "policy": struct((256, 12)),
        "value": struct((256, 1)),
    }

    def forward(params, x):
        for w in params["body"]:
            x = jnp.tanh(x @ w)
        return x @ params["policy"], (x @ params["value"])[..., 0]

    def loss(params, batch):
        logits, values = forward(params, batch["seen"])
        log_probabilities = jax.nn.log_softmax(logits)
        logs = jnp.take_along_axis(log_probabilities, batch["actions"][:, None], -1)[
            :, 0
        ]
        ratio = jnp.exp(logs - batch["logs"])
        deviation = batch["gains"].std() + 1e-8
        gain = (batch["gains"] - batch["gains"].mean()) / deviation
        clipped = jnp.clip(ratio, 0.8, 1.2)
        surrogate = jnp.minimum(ratio * gain, clipped * gain).mean()
        information = jax.nn.softmax(logits) * jax.nn.log_softmax(logits)
        entropy = -jnp.sum(information, -1).mean()
        return jnp.mean((values - batch["returns"]) ** 2) - surrogate - 0.01 * entropy

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def step(params, state, rollout, key):
        _, values = forward(params, rollout["seen"])

        def back(gain, at_time):
            reward, done, value, after = at_time
            bootstrapped = reward + 0.99 * after * (1 - done)
            gain = bootstrapped - value + 0.95 * 0.99 * (1 - done) * gain
            return gain, gain

        after = jnp.concatenate([values[1:], values[-1:]])
        along = (rollout["rewards"], rollout["done"], values, after)
        _, gains = lax.scan(back, jnp.zeros(count), along, reverse=True)
        data = {name: rollout[name] for name in ("seen", "actions", "logs")}
        data |= {"gains": gains, "returns": gains + values}
        flat = jax.tree.map(lambda x: x.reshape(time * count, *x.shape[2:]), data)

        def epoch(carry, key):
            order = jax.random.permutation(key, time * count)
            mixed = jax.tree.map(lambda x: x[order].reshape(4, -1, *x.shape[1:]), flat)

            def update(carry, batch):
                params, state = carry
                updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
                return (optax.apply_updates(params, updates), state), None

            return lax.scan(update, carry, mixed)

        keys = jax.random.split(key, 2)
        (params, state), _ = lax.scan(epoch, (params, state), keys)
        return params, state

    spec = (None, "environments")
    rollout = {
        name: struct((time, count), *spec) for name in ("rewards", "done", "logs")
    }
    rollout |= {
        "seen": struct((time, count, 48), *spec),
        "actions": struct((time, count), *spec, dtype=jnp.int32),
    }
    key = struct((2,), dtype=jnp.uint32)
    state = optimizer_state(mesh, optimizer, params)
    return jax.jit(step, donate_argnums=(0, 1)), (
        params,
        state,
        rollout,
        key,
    )


@case(
    "lora-frozen-bf16-base", cpu={"fsdp": 4, "tensor": 2}, v5e={"fsdp": 4, "tensor": 4}
)
def lora(mesh: AnyMesh) -> Made:
    """Gradients of adapters alone; the base is bfloat16, fully sharded, scanned, and
    never changes.
    """
    struct = on(mesh)
    low = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 256
    layers = 3
    rank = 8
    base = {
        "qkv": low((layers, width, 3 * width), None, "fsdp", "tensor"),
        "out": low((layers, width, width), None, "tensor", "fsdp"),
        "up": low((layers, width, 1024), None, "fsdp", "tensor"),
        "down": low((layers, 1024, width), None, "tensor", "fsdp"),
    }
    shapes = {name: leaf.shape[1:] for name, leaf in base.items()}
    adapters = {
        name: {"a": struct((layers, i, rank)), "b": struct((layers, rank, o))}
        for name, (i, o) in shapes.items()
    }
    table = low((2048, width), "tensor", "fsdp")

    def dense(x, w, adapter):
        lowered = x @ adapter["a"].astype(x.dtype)
        update = lowered @ adapter["b"].astype(x.dtype)
        return x @ w + 2.0 * update

    def layer(x, p):
        base, adapters = p
        qkv = dense(jax.nn.standardize(x), base["qkv"], adapters["qkv"])
        q, k, v = jnp.split(qkv, 3, -1)
        q, k, v = (t.reshape(*t.shape[:2], 8, -1) for t in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(mixed, base["out"], adapters["out"])
        up = dense(jax.nn.standardize(x), base["up"], adapters["up"])
        h = jax.nn.gelu(up)
        return x + dense(h, base["down"], adapters["down"]), None

    def loss(adapters, base, table, tokens):
        embedded = table[tokens[:, :-1]]
        x, _ = lax.scan(layer, embedded, (base, adapters))
        logits = (x @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    optimizer = optax.adam(1e-3)

    def step(adapters, state, base, table, tokens):
        value, grads = jax.value_and_grad(loss)(adapters, base, table, tokens)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value

    args = (adapters, optimizer_state(mesh, optimizer, adapters), base, table)
    tokens = struct((16, 65), "fsdp", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1)), (
        *args,
        tokens,
    )


@case("vit-fused-qkv-equinox", cpu={"data": 4, "model": 2}, v5e={"data": 4, "model": 4})
def vit_equinox(mesh: AnyMesh) -> Made:
    """Equinox modules written for one image and mapped over the batch, with one matrix
    for queries, keys and values.
    """
    width = 192
    heads = 4
    struct = on(mesh)

    class Block(eqx.Module):
        qkv: eqx.nn.Linear
        out: eqx.nn.Linear
        mlp: eqx.nn.MLP
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            self.qkv = eqx.nn.Linear(width, 3 * width, key=a)
            self.out = eqx.nn.Linear(width, width, key=b)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=c)
            self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))

        def __call__(self, x):
            normed = jax.vmap(self.norms[0])(x)
            fused = jax.vmap(self.qkv)(normed)
            qkv = fused.reshape(x.shape[0], 3, heads, -1)
            q, k, v = qkv.transpose(1, 2, 0, 3)
            scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
            mixed = jax.nn.softmax(scores) @ v
            rows = mixed.swapaxes(0, 1).reshape(x.shape)
            x = x + jax.vmap(self.out)(rows)
            normed = jax.vmap(self.norms[1])(x)
            return x + jax.vmap(self.mlp)(normed)

    class Vit(eqx.Module):
        patch: eqx.nn.Conv2d
        position: jax.Array
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.patch = eqx.nn.Conv2d(3, width, 8, 8, key=keys[0])
            self.position = jax.random.normal(keys[1], (65, width))
            self.blocks = [Block(k) for k in keys[2:4]]
            self.head = eqx.nn.Linear(width, 128, key=keys[4])

        def __call__(self, image):
            x = self.patch(image).reshape(width, -1).T
            x = jnp.concatenate([jnp.zeros((1, width)), x]) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(x[0])

    model = eqx.filter_eval_shape(Vit, jax.random.key(0))
    arrays, static = eqx.partition(
        model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        columns = ".qkv" in name or ".mlp.layers[0]" in name
        rows = leaf.ndim == 2 and (".out" in name or ".mlp.layers[1]" in name)
        return struct(
            leaf.shape, *(("model",) if columns else (None, "model") if rows else ())
        )

    def loss(arrays, images, labels):
        logits = jax.vmap(eqx.combine(arrays, static))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(arrays, images, labels):
        value, grads = eqx.filter_value_and_grad(loss)(arrays, images, labels)
        changes = jax.tree.map(lambda g: -1e-3 * g, grads)
        return (
            eqx.apply_updates(arrays, changes),
            value,
        )

    placed = jax.tree_util.tree_map_with_path(place, arrays)
    images = struct((16, 3, 64, 64), "data")
    labels = struct((16,), "data", dtype=jnp.int32)
    return jax.jit(step), (
        placed,
        images,
        labels,
    )


CASES = (
    gru,
    video_axial,
    ppo,
    lora,
    vit_equinox,
)
