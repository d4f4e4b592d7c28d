"""Steps of the open half, 4 of 5."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._case import AnyMesh, Made, case, constrain, on, optimizer_state, shardings


@case("lattice-boltzmann-rolls", cpu={"x": 4, "y": 2}, v5e={"x": 4, "y": 4})
def lattice_boltzmann(mesh: AnyMesh) -> Made:
    """Twenty steps of a fluid on a grid cut both ways: nine directions rolled,
    collided, and bounced off a wall.
    """
    struct = on(mesh)
    weights = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, np.float32)
    ways = np.array(
        [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    )
    opposite = np.array([0, 3, 4, 1, 2, 7, 8, 5, 6])

    def advance(_, carry):
        density, wall = carry
        moved = jnp.stack(
            [
                jnp.roll(density[i], tuple(direction), (0, 1))
                for i, direction in enumerate(ways)
            ]
        )
        moved = jnp.where(wall, moved[opposite], moved)
        mass = moved.sum(0)
        speed = jnp.tensordot(ways.T.astype(np.float32), moved, 1) / mass
        along = jnp.tensordot(ways.astype(np.float32), speed, 1)
        square = jnp.sum(speed**2, 0)
        equilibrium = 1 + 3 * along + 4.5 * along**2 - 1.5 * square
        rest = mass * weights[:, None, None] * equilibrium
        return moved - (moved - rest) / 0.6, wall

    def simulate(density, wall):
        density, _ = lax.fori_loop(0, 20, advance, (density, wall))
        return density, jnp.max(jnp.abs(density.sum(0) - 1))

    grid = struct((9, 128, 256), None, "x", "y")
    walls = struct((128, 256), "x", "y", dtype=jnp.bool_)
    return jax.jit(simulate, donate_argnums=0), (
        grid,
        walls,
    )


@case(
    "equilibrium-custom-vjp", cpu={"data": 4, "model": 2}, v5e={"data": 4, "model": 4}
)
def equilibrium(mesh: AnyMesh) -> Made:
    """A fixed point by a loop, and its gradient by another loop in a `custom_vjp`;
    bfloat16 weights.
    """
    struct = on(mesh)
    width = 256
    params = {
        "in": struct((64, width), None, "model", dtype=jnp.bfloat16),
        "mix": struct((width, width), None, "model", dtype=jnp.bfloat16),
        "out": struct((width, 10), "model", dtype=jnp.bfloat16),
    }

    def cell(mix, z, x):
        return jnp.tanh(0.5 * z @ mix + x)

    @jax.custom_vjp
    def solve(mix, x):
        start = jnp.zeros_like(x)
        return lax.fori_loop(0, 12, lambda _, z: cell(mix, z, x), start)

    def forward(mix, x):
        z = solve(mix, x)
        return z, (mix, x, z)

    def backward(saved, cotangent):
        mix, x, z = saved
        _, pull_z = jax.vjp(lambda z: cell(mix, z, x), z)
        adjoint = lax.fori_loop(0, 12, lambda _, u: cotangent + pull_z(u)[0], cotangent)
        _, pull = jax.vjp(lambda mix, x: cell(mix, z, x), mix, x)
        return pull(adjoint)

    solve.defvjp(forward, backward)

    def loss(params, x, labels):
        solved = solve(params["mix"], x @ params["in"])
        logits = (solved @ params["out"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = struct((256, 64), "data", dtype=jnp.bfloat16)
    labels = struct((256,), "data", dtype=jnp.int32)
    return jax.jit(step), (
        params,
        x,
        labels,
    )


@case(
    "mamba-selective-associative-scan",
    cpu={"data": 2, "inner": 4},
    v5e={"data": 2, "inner": 8},
)
def mamba(mesh: AnyMesh) -> Made:
    """A selective state space by an associative scan over time; its inner channels are
    cut; a depthwise convolution.
    """
    struct = on(mesh)
    width = 128
    inner = 256
    states = 8
    p = {
        "in": struct((width, 2, inner), None, None, "inner"),
        "conv": struct((4, 1, inner), None, None, "inner"),
        "select": struct((inner, 2 * states + 8), "inner"),
        "step": struct((8, inner), None, "inner"),
        "log_decay": struct((inner, states), "inner"),
        "direct": struct((inner,), "inner"),
        "out": struct((inner, width), "inner"),
    }

    def mix(p, x):
        h, gate = jnp.unstack(jnp.einsum("btd,dci->cbti", x, p["in"]))
        dimensions = ("NWC", "WIO", "NWC")
        h = lax.conv_general_dilated(
            h,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=dimensions,
            feature_group_count=inner,
        )
        h = jax.nn.silu(h)
        selected = h @ p["select"]
        b, c, low = jnp.split(selected, [states, 2 * states], axis=-1)
        delta = jax.nn.softplus(low @ p["step"])
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["log_decay"]))
        driven = (delta * h)[..., None] * b[:, :, None, :]

        def compose(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, state = lax.associative_scan(compose, (decay, driven), axis=1)
        y = jnp.einsum("btin,btn->bti", state, c) + p["direct"] * h
        return (y * jax.nn.silu(gate)) @ p["out"]

    def loss(params, x, y):
        for p in params:
            x = x + mix(p, jax.nn.standardize(x))
        return jnp.mean((x - y) ** 2)

    x = struct((8, 64, width), "data")
    return jax.jit(jax.value_and_grad(loss)), ((p, p), x, x)


@case("clip-two-towers", cpu={"data": 8}, v5e={"data": 16})
def clip(mesh: AnyMesh) -> Made:
    """Images and captions against each other over the whole batch, a learned
    temperature; towers in bfloat16.
    """
    struct = on(mesh)
    params = {
        "image": {
            "patch": struct((768, 256)),
            "mix": struct((16, 64)),
            "unmix": struct((64, 16)),
            "out": struct((256, 128)),
        },
        "text": {
            "embed": struct((4096, 256)),
            "wide": struct((256, 512)),
            "narrow": struct((512, 256)),
            "out": struct((256, 128)),
        },
        "temperature": struct(()),
    }

    def image_tower(p, pixels):
        x = pixels.astype(jnp.bfloat16) @ p["patch"].astype(jnp.bfloat16)
        mix = p["mix"].astype(x.dtype)
        unmix = p["unmix"].astype(x.dtype)
        x = x + jnp.einsum("btd,tm,mu->bud", x, mix, unmix)
        return x.mean(1) @ p["out"].astype(x.dtype)

    def text_tower(p, tokens):
        x = p["embed"].astype(jnp.bfloat16)[tokens]
        hidden = jax.nn.gelu(x @ p["wide"].astype(x.dtype))
        x = x + hidden @ p["narrow"].astype(x.dtype)
        last = jnp.argmax(tokens, -1)
        last_rows = x[jnp.arange(x.shape[0]), last]
        return last_rows @ p["out"].astype(x.dtype)

    def loss(params, pixels, tokens):
        unit = lambda v: (
            v / jnp.linalg.norm(v.astype(jnp.float32), axis=-1, keepdims=True)
        )
        images = unit(image_tower(params["image"], pixels))
        texts = unit(text_tower(params["text"], tokens))
        logits = jnp.exp(params["temperature"]) * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        across = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        down = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()
        return (across + down) / 2

    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 100, 1000))

    def step(params, state, pixels, tokens):
        value, grads = jax.value_and_grad(loss)(params, pixels, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer_state(mesh, optimizer, params)
    patches = struct((256, 16, 768), "data")
    args = (
        params,
        state,
        patches,
    )
    tokens = struct((256, 24), "data", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1)), (
        *args,
        tokens,
    )


@case(
    "switch-experts-dense-dispatch",
    cpu={"data": 2, "expert": 4},
    v5e={"data": 2, "expert": 8},
)
def switch_moe(mesh: AnyMesh) -> Made:
    """One expert for each token by one-hot dispatch and combine with a capacity, and
    the balancing loss; bfloat16.
    """
    struct = on(mesh)
    experts = 8
    width = 128
    hidden = 256
    params = {
        "router": struct((width, experts)),
        "up": struct((experts, width, hidden), "expert", dtype=jnp.bfloat16),
        "down": struct((experts, hidden, width), "expert", dtype=jnp.bfloat16),
    }

    def layer(params, x):
        groups, tokens, _ = x.shape
        capacity = 2 * tokens // experts
        probabilities = jax.nn.softmax(x.astype(jnp.float32) @ params["router"])
        gate = probabilities.max(-1)
        index = probabilities.argmax(-1)
        chosen = jax.nn.one_hot(index, experts)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=jnp.bfloat16)
        combine = gate[..., None, None].astype(jnp.bfloat16) * slots
        sent = jnp.einsum("gtec,gtd->egcd", slots, x)
        sent = constrain(mesh, sent, "expert", "data")
        h = jax.nn.relu(jnp.einsum("egcd,edf->egcf", sent, params["up"]))
        back = jnp.einsum("egcf,efd->egcd", h, params["down"])
        y = jnp.einsum("gtec,egcd->gtd", combine, back)
        loads = probabilities.mean((0, 1)) * chosen.mean((0, 1))
        balance = experts * jnp.sum(loads)
        return constrain(mesh, y, ("data", "expert")), balance

    def loss(params, x, y):
        out, balance = layer(params, x)
        differences = (x + out - y).astype(jnp.float32)
        return jnp.mean(jnp.square(differences)) + 0.01 * balance

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updated = jax.tree.map(
            lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads
        )
        return (
            updated,
            value,
        )

    x = struct((16, 64, width), ("data", "expert"), dtype=jnp.bfloat16)
    return jax.jit(step, donate_argnums=0), (params, x, x)


@case(
    "ring-attention-by-shard-map",
    cpu={"data": 2, "context": 4},
    v5e={"data": 2, "context": 8},
)
def ring_attention(mesh: AnyMesh) -> Made:
    """Keys and values go around a ring while a running softmax is kept; the dense
    layers outside are plain JAX.
    """
    struct = on(mesh)
    width = 128
    heads = 4
    count = mesh.shape["context"]
    params = {
        "qkv": struct((width, 3, heads, 32)),
        "out": struct((heads, 32, width)),
        "mlp": [struct((width, 384)), struct((384, width))],
    }
    spec = P("data", "context")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    def ring(q, k, v):
        position = lax.axis_index("context")
        length = q.shape[1]

        def turn(i, carry):
            k, v, total, norm, largest = carry
            there = (position - i) % count
            rows = position * length + jnp.arange(length)[:, None]
            columns = there * length + jnp.arange(length)
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
            scores = jnp.where(rows >= columns, scores, -1e9)
            new = jnp.maximum(largest, scores.max(-1))
            weights = jnp.exp(scores - new[..., None])
            old = jnp.exp(largest - new)
            total = total * old[..., None] + jnp.einsum("bhqs,bshk->bhqk", weights, v)
            norm = norm * old + weights.sum(-1)
            step = [(j, (j + 1) % count) for j in range(count)]
            next_k = lax.ppermute(k, "context", step)
            next_v = lax.ppermute(v, "context", step)
            return (
                next_k,
                next_v,
                total,
                norm,
                new,
            )

        shape = (q.shape[0], heads, length)
        no_total = jnp.zeros((*shape, q.shape[-1]))
        no_norm = jnp.zeros(shape)
        no_top = jnp.full(shape, -1e9)
        start = (
            k,
            v,
            no_total,
            no_norm,
            no_top,
        )
        _, _, total, norm, _ = lax.fori_loop(0, count, turn, start)
        return (total / norm[..., None]).swapaxes(1, 2)

    def loss(params, x, y):
        q, k, v = jnp.unstack(jnp.einsum("btd,dchk->cbthk", x, params["qkv"]))
        x = x + jnp.einsum("bthk,hkd->btd", ring(q, k, v), params["out"])
        hidden = jax.nn.relu(x @ params["mlp"][0])
        x = x + hidden @ params["mlp"][1]
        return jnp.mean((x - y) ** 2)

    x = struct((4, 512, width), *spec)
    return jax.jit(jax.value_and_grad(loss)), (params, x, x)


@case(
    "decoder-on-two-by-three", cpu={"data": 2, "model": 3}, v5e={"data": 4, "model": 4}
)
def decoder_six(mesh: AnyMesh) -> Made:
    """Twelve heads on six devices, a vocabulary of 3000 whose rows are cut, latent keys
    and values; bfloat16.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    width = 192
    heads = 12
    latent = 48
    layer = {
        "q": struct((width, heads, 16), None, "model"),
        "squeeze": struct((width, latent)),
        "expand": struct((2, latent, heads, 16), None, None, "model"),
        "out": struct((heads, 16, width), "model"),
        "gate": struct((width, 576), None, "model"),
        "value": struct((width, 576), None, "model"),
        "down": struct((576, width), "model"),
    }
    params = {"embed": struct((3000, width), "model"), "layers": (layer, layer)}

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        mask = jnp.tri(x.shape[1], dtype=bool)
        for p in params["layers"]:
            h = jax.nn.standardize(x)
            small = h @ p["squeeze"]
            q, (k, v) = (
                jnp.einsum("btd,dhk->bthk", h, p["q"]),
                jnp.einsum("btl,clhk->cbthk", small, p["expand"]),
            )
            scores = jnp.einsum(
                "bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32
            )
            masked = jnp.where(mask, scores * 0.25, -1e9)
            weights = jax.nn.softmax(masked).astype(x.dtype)
            x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, p["out"])
            h = jax.nn.standardize(x)
            gated = jax.nn.gelu(h @ p["gate"]) * (h @ p["value"])
            x = x + gated @ p["down"]
        logits = jnp.einsum(
            "btd,vd->btv", x, params["embed"], preferred_element_type=jnp.float32
        )
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    out = (shardings(params), NamedSharding(mesh, P()))
    tokens = on(mesh)((12, 61), "data", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (
        params,
        tokens,
    )


CASES = (
    lattice_boltzmann,
    equilibrium,
    mamba,
    clip,
    switch_moe,
    ring_attention,
    decoder_six,
)
