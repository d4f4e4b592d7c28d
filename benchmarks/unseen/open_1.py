"""Steps of the open half, 1 of 5."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._case import AnyMesh, Made, case, constrain, on, optimizer_state, shardings


@case("mlp-column-row-parallel", cpu={"dp": 2, "tp": 4}, v5e={"dp": 4, "tp": 4})
def mlp_column_row(mesh: AnyMesh) -> Made:
    """Residual GELU blocks in bfloat16, columns then rows over `tp`, with the hidden
    layer constrained.
    """
    struct = on(mesh)
    block = {
        "norm": struct((256,), dtype=jnp.bfloat16),
        "up": struct((256, 1024), None, "tp", dtype=jnp.bfloat16),
        "up_bias": struct((1024,), "tp", dtype=jnp.bfloat16),
        "down": struct((1024, 256), "tp", None, dtype=jnp.bfloat16),
    }
    params = {
        "blocks": [block] * 3,
        "head": struct((256, 64), None, "tp", dtype=jnp.bfloat16),
    }

    def loss(params, x, y):
        for p in params["blocks"]:
            mean_square = jnp.mean(jnp.square(x), -1, keepdims=True)
            h = x * lax.rsqrt(mean_square + 1e-6) * p["norm"]
            hidden = jax.nn.gelu(h @ p["up"] + p["up_bias"])
            h = constrain(mesh, hidden, "dp", "tp")
            x = x + h @ p["down"]
        predicted = (x @ params["head"]).astype(jnp.float32)
        return jnp.mean(jnp.square(predicted - y))

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updated = jax.tree.map(lambda p, g: p - jnp.bfloat16(1e-2) * g, params, grads)
        return value, updated

    out = (NamedSharding(mesh, P()), shardings(params))
    jitted = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=out,
    )
    x = struct((512, 256), "dp", dtype=jnp.bfloat16)
    y = struct((512, 64), "dp")
    return jitted, (
        params,
        x,
        y,
    )


@case(
    "distillation-wide-teacher",
    cpu={"data": 2, "model": 4},
    v5e={"data": 4, "model": 4},
)
def distillation(mesh: AnyMesh) -> Made:
    """A frozen bfloat16 teacher cut by columns and rows, a whole student, divergence of
    softened answers and layers.
    """
    struct = on(mesh)
    low = functools.partial(on(mesh), dtype=jnp.bfloat16)
    layer = {"up": low((512, 1024), None, "model"), "down": low((1024, 512), "model")}
    teacher = {
        "embed": low((2048, 512), None, "model"),
        "mix": ([layer] * 3),
        "head": low((512, 2048), None, "model"),
    }
    student = {
        "embed": struct((2048, 128)),
        "mix": [struct((128, 128))] * 2,
        "match": struct((128, 512)),
        "head": struct((128, 2048)),
    }

    def teach(p, tokens):
        x = p["embed"][tokens]
        for q in p["mix"]:
            averaged = jnp.cumsum(x, 1) * 0.01
            x = x + jax.nn.silu(averaged @ q["up"]) @ q["down"]
        return x, x @ p["head"]

    def learn(p, tokens):
        x = p["embed"][tokens]
        for w in p["mix"]:
            shifted = x + jnp.roll(x, 1, axis=1)
            x = x + jax.nn.silu(shifted @ w)
        return x, x @ p["head"]

    def loss(student, teacher, tokens, heat):
        hidden, answers = lax.stop_gradient(teach(teacher, tokens))
        features, logits = learn(student, tokens)
        soft = jax.nn.log_softmax(answers.astype(jnp.float32) / heat)
        log_probabilities = jax.nn.log_softmax(logits / heat)
        divergence = jnp.sum(jnp.exp(soft) * (soft - log_probabilities), -1).mean()
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        hard = losses.mean()
        unit = lambda v: v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6)
        matched = unit(features @ student["match"])
        taught = unit(hidden.astype(jnp.float32))
        match = jnp.mean((matched - taught) ** 2)
        return heat**2 * divergence + hard + match

    optimizer = optax.adamw(1e-3)

    def step(student, state, teacher, tokens, heat):
        value, grads = jax.value_and_grad(loss)(student, teacher, tokens, heat)
        updates, state = optimizer.update(grads, state, student)
        return optax.apply_updates(student, updates), state, value

    state = optimizer_state(mesh, optimizer, student)
    tokens = struct((16, 64), "data", dtype=jnp.int32)
    args = (
        student,
        state,
        teacher,
        tokens,
        struct(()),
    )
    return jax.jit(step, donate_argnums=(0, 1)), args


@case(
    "gradients-accumulated-by-scan",
    cpu={"replica": 2, "fsdp": 4},
    v5e={"replica": 4, "fsdp": 4},
)
def accumulation(mesh: AnyMesh) -> Made:
    """Four microbatches by a scan whose carry is the sum of gradients, kept as sharded
    as the parameters.
    """
    struct = on(mesh)
    width = 256
    layer = {
        "up": struct((width, 1024), "fsdp"),
        "down": struct((1024, width), "fsdp"),
        "scale": struct((width,)),
    }
    params = {
        "in": struct((128, width), "fsdp"),
        "layers": [layer] * 3,
        "out": struct((width, 32), "fsdp"),
    }

    def loss(params, x, labels):
        x = x @ params["in"]
        for p in params["layers"]:
            hidden = jax.nn.gelu(jax.nn.standardize(x) * p["scale"] @ p["up"])
            x = x + hidden @ p["down"]
        return optax.softmax_cross_entropy_with_integer_labels(
            x @ params["out"], labels
        ).mean()

    optimizer = optax.adamw(1e-3)

    def step(params, state, x, labels):
        def micro(total, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            grads = jax.tree.map(
                lambda g, p: constrain(mesh, g, *p.sharding.spec), grads, structs
            )
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = lax.scan(micro, zeros, (x, labels))
        mean_grads = jax.tree.map(lambda g: g / 4, grads)
        updates, state = optimizer.update(mean_grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    structs = params
    data = (None, ("replica", "fsdp"))
    state = optimizer_state(mesh, optimizer, params)
    inputs = struct((4, 64, 128), *data)
    args = (
        params,
        state,
        inputs,
    )
    labels = struct((4, 64), *data, dtype=jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1)), (
        *args,
        labels,
    )


@case(
    "decoder-window-context-parallel",
    cpu={"data": 2, "seq": 4},
    v5e={"data": 4, "seq": 4},
)
def decoder_window(mesh: AnyMesh) -> Made:
    """The sequence cut over `seq`, tokens merged with the batch for dense layers, keys
    gathered for a local window.
    """
    struct = on(mesh)
    bf16 = jnp.bfloat16
    width = 192
    heads = 6
    p = {
        "embed": struct((1024, width), dtype=bf16),
        "qkv": struct((width, 3, heads, width // heads), dtype=bf16),
        "o": struct((width, width), dtype=bf16),
        "up": struct((width, 768), dtype=bf16),
        "down": struct((768, width), dtype=bf16),
    }

    def forward(p, tokens):
        batch, length = tokens.shape
        x = p["embed"][tokens]
        for _ in range(2):
            flat = x.reshape(batch * length, width)
            q, k, v = jnp.unstack(jnp.einsum("nd,dchk->cnhk", flat, p["qkv"]))
            q, k, v = (t.reshape(batch, length, heads, -1) for t in (q, k, v))
            k, v = (constrain(mesh, t, "data", None) for t in (k, v))
            scores = jnp.einsum(
                "bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32
            )
            distance = jnp.arange(length)[:, None] - jnp.arange(length)
            scores = jnp.where((distance >= 0) & (distance < 64), scores, -1e9)
            mixed = jnp.einsum(
                "bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(bf16), v
            )
            flat = flat + mixed.reshape(batch * length, width) @ p["o"]
            flat = flat + jax.nn.relu(flat @ p["up"]) ** 2 @ p["down"]
            x = flat.reshape(batch, length, width)
        return x @ p["embed"].T

    def loss(p, tokens, targets, weights):
        logits = forward(p, tokens).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(each * weights) / jnp.sum(weights)

    tokens = struct((4, 256), "data", "seq", dtype=jnp.int32)
    weights = struct((4, 256), "data", "seq")
    return jax.jit(jax.value_and_grad(loss)), (
        p,
        tokens,
        tokens,
        weights,
    )


@case(
    "generate-fori-loop-whole-cache",
    cpu={"data": 4, "model": 2},
    v5e={"data": 4, "model": 4},
)
def generate(mesh: AnyMesh) -> Made:
    """A prompt is read at once, then twelve tokens by a `fori_loop`, with a repetition
    penalty by scatter.
    """
    struct = on(mesh)
    width = 128
    length = 48
    vocabulary = 1024
    cut = mesh.axis_names[1] if len(mesh.axis_names) > 1 else None
    params = {
        "embed": struct((vocabulary, width), cut),
        "k": struct((width, width), None, cut),
        "v": struct((width, width), None, cut),
        "q": struct((width, width), None, cut),
        "o": struct((width, width), cut),
    }

    def attend(params, x, keys, values, seen):
        q, keys, values = (
            t.reshape(*t.shape[:-1], 4, -1) for t in (x @ params["q"], keys, values)
        )
        scores = jnp.where(seen, jnp.einsum("bqhk,bshk->bhqs", q, keys), -1e9)
        mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), values)
        return x + mixed.reshape(x.shape) @ params["o"]

    def generate(params, prompt):
        batch, read = prompt.shape
        x = params["embed"][prompt]
        empty = jnp.zeros((batch, length, width))
        keys = empty.at[:, :read].set(x @ params["k"])
        empty_values = jnp.zeros((batch, length, width))
        values = empty_values.at[:, :read].set(x @ params["v"])
        x = attend(params, x, keys, values, jnp.tri(read, length, dtype=bool))
        no_tokens = jnp.zeros((batch, length), jnp.int32)
        tokens = no_tokens.at[:, :read].set(prompt)
        no_counts = jnp.zeros((batch, vocabulary))
        counts = no_counts.at[jnp.arange(batch)[:, None], prompt].add(1.0)

        def body(i, carry):
            tokens, keys, values, counts, last = carry
            token = jnp.argmax(last @ params["embed"].T - 0.5 * counts, -1)
            tokens = tokens.at[:, i].set(token.astype(jnp.int32))
            counts = counts.at[jnp.arange(batch), token].add(1.0)
            x = params["embed"][token][:, None]
            key = x @ params["k"]
            keys = keys.at[:, i].set((key)[:, 0])
            value = x @ params["v"]
            values = values.at[:, i].set((value)[:, 0])
            is_before = jnp.arange(length) <= i
            last = attend(params, x, keys, values, is_before)[:, 0]
            return tokens, keys, values, counts, last

        carry = (tokens, keys, values, counts, x[:, -1])
        return lax.fori_loop(read, read + 12, body, carry)[0]

    prompts = struct((16, 24), "data", dtype=jnp.int32)
    return jax.jit(generate), (params, prompts)


@case("gan-two-optimizers", cpu={"data": 8}, v5e={"data": 16})
def gan(mesh: AnyMesh) -> Made:
    """A generator and a critic with optimizers of their own, a gradient penalty by a
    gradient in the loss.
    """
    struct = on(mesh)
    generator = {
        "dense": struct((64, 4 * 4 * 128)),
        "up": [struct((4, 4, 128, 64)), struct((4, 4, 64, 32))],
    }
    generator["last"] = struct((3, 3, 32, 3))
    critic = {
        "convolutions": [struct((4, 4, 3, 32)), struct((4, 4, 32, 64))],
        "dense": struct((4 * 4 * 64, 1)),
    }
    numbers = ("NHWC", "HWIO", "NHWC")

    def make(p, z):
        dense = jax.nn.relu(z @ p["dense"])
        x = dense.reshape(-1, 4, 4, 128)
        for w in p["up"]:
            upsampled = lax.conv_transpose(
                x, w, (2, 2), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.relu(upsampled)
        images = x.transpose(0, 3, 1, 2)
        kernel = p["last"].transpose(3, 2, 0, 1)
        return jnp.tanh(lax.conv(images, kernel, (1, 1), "SAME"))

    def judge(p, x):
        x = x.transpose(0, 2, 3, 1)
        for w in p["convolutions"]:
            convolved = lax.conv_general_dilated(
                x, w, (2, 2), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.leaky_relu(
                convolved,
                0.2,
            )
        flat = x.reshape(x.shape[0], -1)
        return (flat @ p["dense"])[:, 0]

    def critic_loss(critic, generator, real, z, mix):
        fake = make(generator, z)
        share = mix[:, None, None, None]
        between = share * real + (1 - share) * fake
        slope = jax.grad(lambda x: judge(critic, x[None])[0])
        slopes = jax.vmap(slope)(between)
        norms = jnp.sqrt(jnp.sum(slopes**2, (1, 2, 3)) + 1e-12)
        penalty = jnp.mean((norms - 1) ** 2)
        return judge(critic, fake).mean() - judge(critic, real).mean() + 10 * penalty

    ours = optax.adam(1e-4, b1=0.0)
    theirs = optax.adam(4e-4, b1=0.0)

    def step(generator, critic, state, real, key):
        a, b, c = jax.random.split(key, 3)
        z = jax.random.normal(a, (real.shape[0], 64))
        again = jax.random.normal(b, (real.shape[0], 64))
        mix = jax.random.uniform(c, real.shape[:1])
        grads = jax.grad(critic_loss)(critic, generator, real, z, mix)
        updates, second = theirs.update(grads, state[1])
        critic = optax.apply_updates(critic, updates)
        grads = jax.grad(lambda g: -judge(critic, make(g, again)).mean())(generator)
        updates, first = ours.update(grads, state[0])
        return optax.apply_updates(generator, updates), critic, (first, second)

    state = (
        optimizer_state(mesh, ours, generator),
        optimizer_state(mesh, theirs, critic),
    )
    images = struct((64, 3, 16, 16), "data")
    key = struct((2,), dtype=jnp.uint32)
    args = (
        generator,
        critic,
        state,
        images,
        key,
    )
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


CASES = (
    mlp_column_row,
    distillation,
    accumulation,
    decoder_window,
    generate,
    gan,
)
