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
            scale = lax.rsqrt(mean_square + 1e-6)
            h = x * scale * p["norm"]
            raised = h @ p["up"] + p["up_bias"]
            hidden = jax.nn.gelu(raised)
            h = constrain(mesh, hidden, "dp", "tp")
            x = x + h @ p["down"]
        out = x @ params["head"]
        predicted = out.astype(jnp.float32)
        squares = jnp.square(predicted - y)
        return jnp.mean(squares)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)

        def descended(p, g):
            return p - jnp.bfloat16(1e-2) * g

        updated = jax.tree.map(descended, params, grads)
        return value, updated

    whole = NamedSharding(mesh, P())
    out = (whole, shardings(params))
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


def _distillation_params(low, struct):
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
    return teacher, student


def _distillation_networks():
    def teach(p, tokens):
        x = p["embed"][tokens]
        for q in p["mix"]:
            averaged = jnp.cumsum(x, 1) * 0.01
            hidden = jax.nn.silu(averaged @ q["up"])
            x = x + hidden @ q["down"]
        answers = x @ p["head"]
        return x, answers

    def learn(p, tokens):
        x = p["embed"][tokens]
        for w in p["mix"]:
            shifted = x + jnp.roll(x, 1, axis=1)
            hidden = jax.nn.silu(shifted @ w)
            x = x + hidden
        answers = x @ p["head"]
        return x, answers

    return teach, learn


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
    teacher, student = _distillation_params(low, struct)

    teach, learn = _distillation_networks()

    def loss(student, teacher, tokens, heat):
        taught_values = teach(teacher, tokens)
        hidden, answers = lax.stop_gradient(taught_values)
        features, logits = learn(student, tokens)
        heated = answers.astype(jnp.float32) / heat
        soft = jax.nn.log_softmax(heated)
        log_probabilities = jax.nn.log_softmax(logits / heat)
        differences = jnp.exp(soft) * (soft - log_probabilities)
        sums = jnp.sum(differences, -1)
        divergence = sums.mean()
        next_logits = logits[:, :-1]
        next_tokens = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            next_logits, next_tokens
        )
        hard = losses.mean()

        def unit(v):
            return v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6)

        projected = features @ student["match"]
        matched = unit(projected)
        taught_rows = hidden.astype(jnp.float32)
        taught = unit(taught_rows)
        squares = (matched - taught) ** 2
        match = jnp.mean(squares)
        softened = heat**2 * divergence
        return softened + hard + match

    optimizer = optax.adamw(1e-3)

    def step(student, state, teacher, tokens, heat):
        value, grads = jax.value_and_grad(loss)(student, teacher, tokens, heat)
        updates, state = optimizer.update(grads, state, student)
        updated = optax.apply_updates(student, updates)
        return updated, state, value

    state = optimizer_state(mesh, optimizer, student)
    tokens = struct((16, 64), "data", dtype=jnp.int32)
    heat = struct(())
    args = (
        student,
        state,
        teacher,
        tokens,
        heat,
    )
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, args


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
            scaled = jax.nn.standardize(x) * p["scale"]
            hidden = jax.nn.gelu(scaled @ p["up"])
            x = x + hidden @ p["down"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["out"], labels
        )
        return losses.mean()

    optimizer = optax.adamw(1e-3)

    def step(params, state, x, labels):
        def micro(total, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)

            def placed(g, p):
                return constrain(mesh, g, *p.sharding.spec)

            grads = jax.tree.map(placed, grads, structs)
            updated = jax.tree.map(jnp.add, total, grads)
            return updated, value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = lax.scan(micro, zeros, (x, labels))

        def of_one_batch(g):
            return g / 4

        mean_grads = jax.tree.map(of_one_batch, grads)
        updates, state = optimizer.update(mean_grads, state, params)
        updated = optax.apply_updates(params, updates)
        mean_value = values.mean()
        return updated, state, mean_value

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
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
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
            fused = jnp.einsum("nd,dchk->cnhk", flat, p["qkv"])
            q, k, v = jnp.unstack(fused)
            q, k, v = (t.reshape(batch, length, heads, -1) for t in (q, k, v))
            k, v = (constrain(mesh, t, "data", None) for t in (k, v))
            scores = jnp.einsum(
                "bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32
            )
            positions = jnp.arange(length)[:, None]
            distance = positions - jnp.arange(length)
            is_near = (distance >= 0) & (distance < 64)
            scores = jnp.where(is_near, scores, -1e9)
            attention_weights = jax.nn.softmax(scores).astype(bf16)
            mixed = jnp.einsum("bhqs,bshk->bqhk", attention_weights, v)
            rows = mixed.reshape(batch * length, width)
            flat = flat + rows @ p["o"]
            squared = jax.nn.relu(flat @ p["up"]) ** 2
            flat = flat + squared @ p["down"]
            x = flat.reshape(batch, length, width)
        return x @ p["embed"].T

    def loss(p, tokens, targets, weights):
        answers = forward(p, tokens)
        logits = answers.astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        weighted = jnp.sum(each * weights)
        return weighted / jnp.sum(weights)

    tokens = struct((4, 256), "data", "seq", dtype=jnp.int32)
    weights = struct((4, 256), "data", "seq")
    jitted = jax.jit(jax.value_and_grad(loss))
    return jitted, (
        p,
        tokens,
        tokens,
        weights,
    )


def _generation_params(struct, vocabulary, width, cut):
    return {
        "embed": struct((vocabulary, width), cut),
        "k": struct((width, width), None, cut),
        "v": struct((width, width), None, cut),
        "q": struct((width, width), None, cut),
        "o": struct((width, width), cut),
    }


def _generation_by(length, width, attend, vocabulary):
    def generate(params, prompt):
        batch, read = prompt.shape
        x = params["embed"][prompt]
        empty = jnp.zeros((batch, length, width))
        prompt_keys = x @ params["k"]
        keys = empty.at[:, :read].set(prompt_keys)
        empty_values = jnp.zeros((batch, length, width))
        prompt_values = x @ params["v"]
        values = empty_values.at[:, :read].set(prompt_values)
        causal = jnp.tri(read, length, dtype=bool)
        x = attend(params, x, keys, values, causal)
        no_tokens = jnp.zeros((batch, length), jnp.int32)
        tokens = no_tokens.at[:, :read].set(prompt)
        no_counts = jnp.zeros((batch, vocabulary))
        rows = jnp.arange(batch)[:, None]
        counts = no_counts.at[rows, prompt].add(1.0)

        def body(i, carry):
            tokens, keys, values, counts, last = carry
            scores = last @ params["embed"].T - 0.5 * counts
            token = jnp.argmax(scores, -1)
            words = token.astype(jnp.int32)
            tokens = tokens.at[:, i].set(words)
            rows = jnp.arange(batch)
            counts = counts.at[rows, token].add(1.0)
            embedded = params["embed"][token]
            x = embedded[:, None]
            key = x @ params["k"]
            new_key = key[:, 0]
            keys = keys.at[:, i].set(new_key)
            value = x @ params["v"]
            new_value = value[:, 0]
            values = values.at[:, i].set(new_value)
            is_before = jnp.arange(length) <= i
            mixed = attend(params, x, keys, values, is_before)
            last = mixed[:, 0]
            return tokens, keys, values, counts, last

        last_row = x[:, -1]
        carry = (tokens, keys, values, counts, last_row)
        carry_at_end = lax.fori_loop(read, read + 12, body, carry)
        return carry_at_end[0]

    return generate


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
    params = _generation_params(struct, vocabulary, width, cut)

    def attend(params, x, keys, values, seen):
        query = x @ params["q"]
        q, keys, values = (
            t.reshape(*t.shape[:-1], 4, -1) for t in (query, keys, values)
        )
        products = jnp.einsum("bqhk,bshk->bhqs", q, keys)
        scores = jnp.where(seen, products, -1e9)
        attention_weights = jax.nn.softmax(scores)
        mixed = jnp.einsum("bhqs,bshk->bqhk", attention_weights, values)
        flat = mixed.reshape(x.shape)
        return x + flat @ params["o"]

    generate = _generation_by(length, width, attend, vocabulary)

    prompts = struct((16, 24), "data", dtype=jnp.int32)
    jitted = jax.jit(generate)
    return jitted, (params, prompts)


def _gan_params(struct):
    generator = {
        "dense": struct((64, 4 * 4 * 128)),
        "up": [struct((4, 4, 128, 64)), struct((4, 4, 64, 32))],
    }
    generator["last"] = struct((3, 3, 32, 3))
    critic = {
        "convolutions": [struct((4, 4, 3, 32)), struct((4, 4, 32, 64))],
        "dense": struct((4 * 4 * 64, 1)),
    }
    return generator, critic


def _gan_networks(numbers):
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
        convolved = lax.conv(images, kernel, (1, 1), "SAME")
        return jnp.tanh(convolved)

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
        scores = flat @ p["dense"]
        return scores[:, 0]

    return make, judge


@case("gan-two-optimizers", cpu={"data": 8}, v5e={"data": 16})
def gan(mesh: AnyMesh) -> Made:
    """A generator and a critic with optimizers of their own, a gradient penalty by a
    gradient in the loss.
    """
    struct = on(mesh)
    generator, critic = _gan_params(struct)
    numbers = ("NHWC", "HWIO", "NHWC")

    make, judge = _gan_networks(numbers)

    def critic_loss(critic, generator, real, z, mix):
        fake = make(generator, z)
        share = mix[:, None, None, None]
        real_part = share * real
        between = real_part + (1 - share) * fake

        def score_of(x):
            return judge(critic, x[None])[0]

        slope = jax.grad(score_of)
        slopes = jax.vmap(slope)(between)
        squares = jnp.sum(slopes**2, (1, 2, 3))
        norms = jnp.sqrt(squares + 1e-12)
        deviations = (norms - 1) ** 2
        penalty = jnp.mean(deviations)
        fake_score = judge(critic, fake).mean()
        real_score = judge(critic, real).mean()
        return fake_score - real_score + 10 * penalty

    ours = optax.adam(1e-4, b1=0.0)
    theirs = optax.adam(4e-4, b1=0.0)

    def step(generator, critic, state, real, key):
        a, b, c = jax.random.split(key, 3)
        noise_shape = (real.shape[0], 64)
        z = jax.random.normal(a, noise_shape)
        again = jax.random.normal(b, (real.shape[0], 64))
        mix = jax.random.uniform(c, real.shape[:1])
        grads = jax.grad(critic_loss)(critic, generator, real, z, mix)
        updates, second = theirs.update(grads, state[1])
        critic = optax.apply_updates(critic, updates)

        def lost(g):
            return -judge(critic, make(g, again)).mean()

        grads = jax.grad(lost)(generator)
        updates, first = ours.update(grads, state[0])
        updated = optax.apply_updates(generator, updates)
        return updated, critic, (first, second)

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
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    return jitted, args


CASES = (
    mlp_column_row,
    distillation,
    accumulation,
    decoder_window,
    generate,
    gan,
)
