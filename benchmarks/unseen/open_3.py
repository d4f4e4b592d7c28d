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
        candidate = jnp.tanh(n_x + reset * n_h)
        new_part = (1 - update) * candidate
        h = new_part + update * h
        return h, h

    def loss(params, tokens):
        inputs = tokens[:, :-1]
        x = params["embed"][inputs]
        projected = jnp.einsum("btd,dgh->tbgh", x, params["input"])
        gates = projected + params["bias"]
        start = jnp.zeros((tokens.shape[0], width))
        step_cell = functools.partial(cell, params)
        _, hidden = lax.scan(step_cell, start, gates)
        logits = jnp.einsum("tbh,hv->btv", hidden, params["out"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    clipped = optax.clip(0.25)
    optimizer = optax.chain(clipped, optax.rmsprop(1e-3))

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    tokens = struct((16, 33), "data", dtype=jnp.int32)
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        tokens,
    )


def _axial_params(struct, width, heads):
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
    return params


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
    params = _axial_params(struct, width, heads)

    def along(p, x, axis):
        moved = jnp.moveaxis(x, axis, -2)
        length = moved.shape[-2]
        flat = moved.reshape(-1, length, width)
        qkv = jnp.einsum("ntd,dchk->nthck", flat, p["qkv"])
        q, k, v = jnp.split(qkv, 3, axis=3)
        queries = q[..., 0, :]
        keys = k[..., 0, :]
        values = v[..., 0, :]
        attend = jax.vmap(one_head, (2, 2, 2), 2)
        mixed = attend(queries, keys, values)
        rows = jnp.einsum("nthk,hkd->ntd", mixed, p["out"])
        out = rows.reshape(moved.shape)
        return jnp.moveaxis(out, -2, axis)

    def one_head(q, k, v):
        scores = q @ k.mT / math.sqrt(32)
        return jax.nn.softmax(scores) @ v

    def loss(params, video, masked):
        x = jnp.where(masked[..., None], 0.0, video)
        directions = ((2, "rows"), (3, "columns"), (1, "time"))
        for axis, direction in directions:
            normed = jax.nn.standardize(x)
            attended = along(params[direction], normed, axis)
            x = x + attended
        hidden = jax.nn.gelu(x @ params["mlp"]["up"])
        x = x + hidden @ params["mlp"]["down"]
        differences = (x - video) ** 2
        errors = differences * masked[..., None]
        count = jnp.sum(masked)
        return jnp.sum(errors) / (count * width)

    optimizer = optax.adam(1e-3)

    def step(params, state, video, masked):
        value, grads = jax.value_and_grad(loss)(params, video, masked)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    spec = (None, "frames")
    state = optimizer_state(mesh, optimizer, params)
    video = struct((2, 16, 12, 12, width), *spec)
    args = (
        params,
        state,
        video,
    )
    masked = struct((2, 16, 12, 12), *spec, dtype=jnp.bool_)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        *args,
        masked,
    )


def _ppo_losses():
    def forward(params, x):
        for w in params["body"]:
            x = jnp.tanh(x @ w)
        logits = x @ params["policy"]
        values = x @ params["value"]
        return logits, values[..., 0]

    def loss(params, batch):
        logits, values = forward(params, batch["seen"])
        log_probabilities = jax.nn.log_softmax(logits)
        columns = batch["actions"][:, None]
        picked = jnp.take_along_axis(log_probabilities, columns, -1)
        logs = picked[:, 0]
        ratio = jnp.exp(logs - batch["logs"])
        deviation = batch["gains"].std() + 1e-8
        centred = batch["gains"] - batch["gains"].mean()
        gain = centred / deviation
        clipped = jnp.clip(ratio, 0.8, 1.2)
        raw = ratio * gain
        bounded = jnp.minimum(raw, clipped * gain)
        surrogate = bounded.mean()
        log_shares = jax.nn.log_softmax(logits)
        information = jax.nn.softmax(logits) * log_shares
        summed = jnp.sum(information, -1)
        entropy = -summed.mean()
        differences = values - batch["returns"]
        squares = jnp.mean(differences**2)
        return squares - surrogate - 0.01 * entropy

    return forward, loss


def _ppo_rollout(struct, time, count):
    spec = (None, "environments")
    rollout = {
        name: struct((time, count), *spec) for name in ("rewards", "done", "logs")
    }
    rollout |= {
        "seen": struct((time, count, 48), *spec),
        "actions": struct((time, count), *spec, dtype=jnp.int32),
    }
    return rollout


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

    forward, loss = _ppo_losses()

    clipped = optax.clip_by_global_norm(0.5)
    optimizer = optax.chain(clipped, optax.adam(3e-4))

    def step(params, state, rollout, key):
        _, values = forward(params, rollout["seen"])

        def back(gain, at_time):
            reward, done, value, after = at_time
            bootstrapped = reward + 0.99 * after * (1 - done)
            discount = 0.95 * 0.99 * (1 - done)
            gain = bootstrapped - value + discount * gain
            return gain, gain

        last = values[-1:]
        after = jnp.concatenate([values[1:], last])
        along = (rollout["rewards"], rollout["done"], values, after)
        zeros = jnp.zeros(count)
        _, gains = lax.scan(back, zeros, along, reverse=True)
        data = {name: rollout[name] for name in ("seen", "actions", "logs")}
        data |= {"gains": gains, "returns": gains + values}

        def in_one_row(x):
            return x.reshape(time * count, *x.shape[2:])

        flat = jax.tree.map(in_one_row, data)

        def epoch(carry, key):
            order = jax.random.permutation(key, time * count)

            def shuffled(x):
                return x[order].reshape(4, -1, *x.shape[1:])

            mixed = jax.tree.map(shuffled, flat)

            def update(carry, batch):
                params, state = carry
                grads = jax.grad(loss)(params, batch)
                updates, state = optimizer.update(grads, state)
                new_params = optax.apply_updates(params, updates)
                return (new_params, state), None

            return lax.scan(update, carry, mixed)

        keys = jax.random.split(key, 2)
        (params, state), _ = lax.scan(epoch, (params, state), keys)
        return params, state

    rollout = _ppo_rollout(struct, time, count)
    key = struct((2,), dtype=jnp.uint32)
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        rollout,
        key,
    )


def _lora_params(low, layers, width, struct, rank):
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
    return base, adapters, table


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
    base, adapters, table = _lora_params(
        low=low, layers=layers, width=width, struct=struct, rank=rank
    )

    def dense(x, w, adapter):
        first = adapter["a"].astype(x.dtype)
        lowered = x @ first
        second = adapter["b"].astype(x.dtype)
        update = lowered @ second
        product = x @ w
        return product + 2.0 * update

    def layer(x, p):
        base, adapters = p
        normed = jax.nn.standardize(x)
        qkv = dense(normed, base["qkv"], adapters["qkv"])
        q, k, v = jnp.split(qkv, 3, -1)
        q, k, v = (t.reshape(*t.shape[:2], 8, -1) for t in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        mixed = attended.reshape(x.shape)
        projected = dense(mixed, base["out"], adapters["out"])
        x = x + projected
        normed_rows = jax.nn.standardize(x)
        up = dense(normed_rows, base["up"], adapters["up"])
        h = jax.nn.gelu(up)
        lowered = dense(h, base["down"], adapters["down"])
        return x + lowered, None

    def loss(adapters, base, table, tokens):
        inputs = tokens[:, :-1]
        embedded = table[inputs]
        x, _ = lax.scan(layer, embedded, (base, adapters))
        answers = x @ table.T
        logits = answers.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    optimizer = optax.adam(1e-3)

    def step(adapters, state, base, table, tokens):
        value, grads = jax.value_and_grad(loss)(adapters, base, table, tokens)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(adapters, updates)
        return updated, state, value

    state = optimizer_state(mesh, optimizer, adapters)
    args = (adapters, state, base, table)
    tokens = struct((16, 65), "fsdp", dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        *args,
        tokens,
    )


def _vit_modules(width, heads):
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
            first_norm = eqx.nn.LayerNorm(width)
            self.norms = (first_norm, eqx.nn.LayerNorm(width))

        def __call__(self, x):
            normed = jax.vmap(self.norms[0])(x)
            fused = jax.vmap(self.qkv)(normed)
            qkv = fused.reshape(x.shape[0], 3, heads, -1)
            q, k, v = qkv.transpose(1, 2, 0, 3)
            scale = q.shape[-1] ** -0.5
            scores = q @ k.swapaxes(1, 2) * scale
            mixed = jax.nn.softmax(scores) @ v
            moved = mixed.swapaxes(0, 1)
            rows = moved.reshape(x.shape)
            projected = jax.vmap(self.out)
            x = x + projected(rows)
            normed = jax.vmap(self.norms[1])(x)
            hidden = jax.vmap(self.mlp)(normed)
            return x + hidden

    class Vit(eqx.Module):
        patch: eqx.nn.Conv2d
        position: jax.Array
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.patch = eqx.nn.Conv2d(3, width, 8, 8, key=keys[0])
            self.position = jax.random.normal(keys[1], (65, width))
            blocks = []
            for k in keys[2:4]:
                blocks.append(Block(k))
            self.blocks = blocks
            self.head = eqx.nn.Linear(width, 128, key=keys[4])

        def __call__(self, image):
            patches = self.patch(image)
            x = patches.reshape(width, -1).T
            first = jnp.zeros((1, width))
            tokens = jnp.concatenate([first, x])
            x = tokens + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(x[0])

    return Vit


@case("vit-fused-qkv-equinox", cpu={"data": 4, "model": 2}, v5e={"data": 4, "model": 4})
def vit_equinox(mesh: AnyMesh) -> Made:
    """Equinox modules written for one image and mapped over the batch, with one matrix
    for queries, keys and values.
    """
    width = 192
    heads = 4
    struct = on(mesh)

    Vit = _vit_modules(width, heads)

    model = eqx.filter_eval_shape(Vit, jax.random.key(0))

    def is_struct(leaf):
        return isinstance(leaf, jax.ShapeDtypeStruct)

    arrays, static = eqx.partition(model, is_struct)

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        spec = ()
        if ".qkv" in name or ".mlp.layers[0]" in name:
            spec = ("model",)
        elif leaf.ndim == 2 and (".out" in name or ".mlp.layers[1]" in name):
            spec = (None, "model")
        return struct(leaf.shape, *spec)

    def loss(arrays, images, labels):
        model = eqx.combine(arrays, static)
        logits = jax.vmap(model)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def step(arrays, images, labels):
        differentiated = eqx.filter_value_and_grad(loss)
        value, grads = differentiated(arrays, images, labels)

        def change(g):
            return -1e-3 * g

        changes = jax.tree.map(change, grads)
        updated = eqx.apply_updates(arrays, changes)
        return (
            updated,
            value,
        )

    placed = jax.tree_util.tree_map_with_path(place, arrays)
    images = struct((16, 3, 64, 64), "data")
    labels = struct((16,), "data", dtype=jnp.int32)
    jitted = jax.jit(step)
    return jitted, (
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
