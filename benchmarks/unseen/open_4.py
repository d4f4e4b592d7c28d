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
        rolled = []
        for i, direction in enumerate(ways):
            rolled.append(jnp.roll(density[i], tuple(direction), (0, 1)))
        moved = jnp.stack(rolled)
        moved = jnp.where(wall, moved[opposite], moved)
        mass = moved.sum(0)
        columns = ways.T.astype(np.float32)
        speed = jnp.tensordot(columns, moved, 1) / mass
        rows = ways.astype(np.float32)
        along = jnp.tensordot(rows, speed, 1)
        square = jnp.sum(speed**2, 0)
        equilibrium = 1 + 3 * along + 4.5 * along**2 - 1.5 * square
        rest = mass * weights[:, None, None] * equilibrium
        excess = (moved - rest) / 0.6
        return moved - excess, wall

    def simulate(density, wall):
        density, _ = lax.fori_loop(0, 20, advance, (density, wall))
        excess = density.sum(0) - 1
        largest = jnp.max(jnp.abs(excess))
        return density, largest

    grid = struct((9, 128, 256), None, "x", "y")
    walls = struct((128, 256), "x", "y", dtype=jnp.bool_)
    jitted = jax.jit(simulate, donate_argnums=0)
    return jitted, (
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
        mixed = 0.5 * z @ mix
        return jnp.tanh(mixed + x)

    @jax.custom_vjp
    def solve(mix, x):
        start = jnp.zeros_like(x)

        def turn(_, z):
            return cell(mix, z, x)

        return lax.fori_loop(0, 12, turn, start)

    def forward(mix, x):
        z = solve(mix, x)
        return z, (mix, x, z)

    def backward(saved, cotangent):
        mix, x, z = saved

        def cell_of_z(z):
            return cell(mix, z, x)

        _, pull_z = jax.vjp(cell_of_z, z)

        def back(_, u):
            return cotangent + pull_z(u)[0]

        adjoint = lax.fori_loop(0, 12, back, cotangent)

        def cell_of_weights(mix, x):
            return cell(mix, z, x)

        _, pull = jax.vjp(cell_of_weights, mix, x)
        return pull(adjoint)

    solve.defvjp(forward, backward)

    def loss(params, x, labels):
        inputs = x @ params["in"]
        solved = solve(params["mix"], inputs)
        answers = solved @ params["out"]
        logits = answers.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def step(params, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return updated, value

    x = struct((256, 64), "data", dtype=jnp.bfloat16)
    labels = struct((256,), "data", dtype=jnp.int32)
    jitted = jax.jit(step)
    return jitted, (
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
        projected = jnp.einsum("btd,dci->cbti", x, p["in"])
        h, gate = jnp.unstack(projected)
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
        rate = jnp.exp(p["log_decay"])
        decay = jnp.exp(-delta[..., None] * rate)
        raised = (delta * h)[..., None]
        driven = raised * b[:, :, None, :]

        def compose(first, second):
            decay_of_both = first[0] * second[0]
            kept_state = first[1] * second[0]
            return decay_of_both, kept_state + second[1]

        _, state = lax.associative_scan(compose, (decay, driven), axis=1)
        mixed = jnp.einsum("btin,btn->bti", state, c)
        y = mixed + p["direct"] * h
        opened = jax.nn.silu(gate)
        gated = y * opened
        return gated @ p["out"]

    def loss(params, x, y):
        for p in params:
            normed = jax.nn.standardize(x)
            mixed = mix(p, normed)
            x = x + mixed
        squared_errors = (x - y) ** 2
        return jnp.mean(squared_errors)

    x = struct((8, 64, width), "data")
    jitted = jax.jit(jax.value_and_grad(loss))
    return jitted, ((p, p), x, x)


def _clip_params(struct):
    return {
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


def _clip_towers():
    def image_tower(p, pixels):
        low_pixels = pixels.astype(jnp.bfloat16)
        patch = p["patch"].astype(jnp.bfloat16)
        x = low_pixels @ patch
        mix = p["mix"].astype(x.dtype)
        unmix = p["unmix"].astype(x.dtype)
        mixed = jnp.einsum("btd,tm,mu->bud", x, mix, unmix)
        x = x + mixed
        out = p["out"].astype(x.dtype)
        return x.mean(1) @ out

    def text_tower(p, tokens):
        table = p["embed"].astype(jnp.bfloat16)
        x = table[tokens]
        wide = p["wide"].astype(x.dtype)
        hidden = jax.nn.gelu(x @ wide)
        narrow = p["narrow"].astype(x.dtype)
        x = x + hidden @ narrow
        last = jnp.argmax(tokens, -1)
        rows = jnp.arange(x.shape[0])
        last_rows = x[rows, last]
        out = p["out"].astype(x.dtype)
        return last_rows @ out

    return image_tower, text_tower


@case("clip-two-towers", cpu={"data": 8}, v5e={"data": 16})
def clip(mesh: AnyMesh) -> Made:
    """Images and captions against each other over the whole batch, a learned
    temperature; towers in bfloat16.
    """
    struct = on(mesh)
    params = _clip_params(struct)

    image_tower, text_tower = _clip_towers()

    def loss(params, pixels, tokens):
        def unit(v):
            return v / jnp.linalg.norm(v.astype(jnp.float32), axis=-1, keepdims=True)

        image_rows = image_tower(params["image"], pixels)
        images = unit(image_rows)
        text_rows = text_tower(params["text"], tokens)
        texts = unit(text_rows)
        scale = jnp.exp(params["temperature"])
        logits = scale * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        across_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        across = across_losses.mean()
        down_losses = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        down = down_losses.mean()
        return (across + down) / 2

    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, 100, 1000)
    optimizer = optax.adamw(schedule)

    def step(params, state, pixels, tokens):
        value, grads = jax.value_and_grad(loss)(params, pixels, tokens)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    state = optimizer_state(mesh, optimizer, params)
    patches = struct((256, 16, 768), "data")
    args = (
        params,
        state,
        patches,
    )
    tokens = struct((256, 24), "data", dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
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
        wide = x.astype(jnp.float32)
        probabilities = jax.nn.softmax(wide @ params["router"])
        gate = probabilities.max(-1)
        index = probabilities.argmax(-1)
        chosen = jax.nn.one_hot(index, experts)
        running = jnp.cumsum(chosen, axis=1)
        place = running * chosen - 1
        slot_index = place.astype(jnp.int32)
        slots = jax.nn.one_hot(slot_index, capacity, dtype=jnp.bfloat16)
        gates = gate[..., None, None].astype(jnp.bfloat16)
        combine = gates * slots
        sent = jnp.einsum("gtec,gtd->egcd", slots, x)
        sent = constrain(mesh, sent, "expert", "data")
        raised = jnp.einsum("egcd,edf->egcf", sent, params["up"])
        h = jax.nn.relu(raised)
        back = jnp.einsum("egcf,efd->egcd", h, params["down"])
        y = jnp.einsum("gtec,egcd->gtd", combine, back)
        mean_probabilities = probabilities.mean((0, 1))
        loads = mean_probabilities * chosen.mean((0, 1))
        balance = experts * jnp.sum(loads)
        placed = constrain(mesh, y, ("data", "expert"))
        return placed, balance

    def loss(params, x, y):
        out, balance = layer(params, x)
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

    x = struct((16, 64, width), ("data", "expert"), dtype=jnp.bfloat16)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (params, x, x)


def _ring_of(mesh, spec, count, heads):
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
            first_row = position * length
            rows = first_row + jnp.arange(length)[:, None]
            first_column = there * length
            columns = first_column + jnp.arange(length)
            products = jnp.einsum("bqhk,bshk->bhqs", q, k)
            scores = products / math.sqrt(q.shape[-1])
            scores = jnp.where(rows >= columns, scores, -1e9)
            block_largest = scores.max(-1)
            new = jnp.maximum(largest, block_largest)
            weights = jnp.exp(scores - new[..., None])
            old = jnp.exp(largest - new)
            scaled = total * old[..., None]
            added = jnp.einsum("bhqs,bshk->bhqk", weights, v)
            total = scaled + added
            kept_norm = norm * old
            summed = weights.sum(-1)
            norm = kept_norm + summed
            step = []
            for j in range(count):
                step.append((j, (j + 1) % count))
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
        mixed = total / norm[..., None]
        return mixed.swapaxes(1, 2)

    return ring


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

    ring = _ring_of(mesh, spec, count, heads)

    def loss(params, x, y):
        projected = jnp.einsum("btd,dchk->cbthk", x, params["qkv"])
        q, k, v = jnp.unstack(projected)
        mixed = ring(q, k, v)
        attended = jnp.einsum("bthk,hkd->btd", mixed, params["out"])
        x = x + attended
        hidden = jax.nn.relu(x @ params["mlp"][0])
        x = x + hidden @ params["mlp"][1]
        squared_errors = (x - y) ** 2
        return jnp.mean(squared_errors)

    x = struct((4, 512, width), *spec)
    jitted = jax.jit(jax.value_and_grad(loss))
    return jitted, (params, x, x)


def _decoder_params(struct, width, heads, latent):
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
    return params


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
    params = _decoder_params(struct, width, heads, latent)

    def loss(params, tokens):
        inputs = tokens[:, :-1]
        x = params["embed"][inputs]
        mask = jnp.tri(x.shape[1], dtype=bool)
        for p in params["layers"]:
            h = jax.nn.standardize(x)
            small = h @ p["squeeze"]
            q = jnp.einsum("btd,dhk->bthk", h, p["q"])
            k, v = jnp.einsum("btl,clhk->cbthk", small, p["expand"])
            scores = jnp.einsum(
                "bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32
            )
            scaled = scores * 0.25
            masked = jnp.where(mask, scaled, -1e9)
            shares = jax.nn.softmax(masked)
            weights = shares.astype(x.dtype)
            attended = jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, p["out"])
            x = x + attended
            h = jax.nn.standardize(x)
            activated = jax.nn.gelu(h @ p["gate"])
            raised = h @ p["value"]
            gated = activated * raised
            x = x + gated @ p["down"]
        logits = jnp.einsum(
            "btd,vd->btv", x, params["embed"], preferred_element_type=jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return updated, value

    whole = NamedSharding(mesh, P())
    out = (shardings(params), whole)
    tokens = on(mesh)((12, 61), "data", dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted, (
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
