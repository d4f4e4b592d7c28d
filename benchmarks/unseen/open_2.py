"""Steps of the open half, 2 of 5."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._case import AnyMesh, Made, case, on, optimizer_state, shardings


def _task_params(struct, width, cut):
    return {
        "trunk": [
            struct((128, width), cut),
            struct((width, width), cut),
            struct((width, width), cut),
        ],
        "classes": struct((width, 64), cut),
        "box": struct((width, 4), cut),
        "embed": struct((width, 128), cut),
        "uncertainty": struct((3,)),
    }


def _third_losses():
    def metric(z, labels):
        same = labels[:, None] == labels
        near = z @ z.T
        attraction = jax.nn.log_sigmoid(near)
        repulsion = jax.nn.log_sigmoid(-near)
        signed = jnp.where(same, attraction, repulsion)
        return -jnp.mean(signed)

    def spread(z, labels):
        centred = z - z.mean(0)
        covariance = centred.T @ centred / z.shape[0]
        total = jnp.sum(covariance**2)
        diagonal = jnp.diagonal(covariance)
        return total - jnp.sum(diagonal**2)

    def entropy(z, labels):
        log_probabilities = jax.nn.log_softmax(z)
        information = jax.nn.softmax(z) * log_probabilities
        entropies = jnp.sum(information, -1)
        return entropies.mean()

    return metric, spread, entropy


@case("many-tasks-switch-of-losses", cpu={"data": 8}, v5e={"data": 8, "fsdp": 2})
def many_tasks(mesh: AnyMesh) -> Made:
    """A shared trunk, three heads, the third of the losses chosen by a `switch`,
    weights by learned uncertainty.
    """
    struct = on(mesh)
    width = 256
    batch = tuple(mesh.axis_names)
    cut = "fsdp" if "fsdp" in mesh.axis_names else "data"
    params = _task_params(struct, width, cut)

    metric, spread, entropy = _third_losses()

    def loss(params, x, labels, boxes, which):
        for w in params["trunk"]:
            x = jax.nn.swish(x @ w)
        class_logits = x @ params["classes"]
        class_losses = optax.softmax_cross_entropy_with_integer_labels(
            class_logits, labels
        )
        classes = class_losses.mean()
        box_losses = optax.huber_loss(x @ params["box"], boxes)
        box = box_losses.mean()
        embedded = x @ params["embed"]
        third = lax.switch(which, (metric, spread, entropy), embedded, labels)
        losses = jnp.stack([classes, box, third])
        precision = jnp.exp(-params["uncertainty"])
        weighted = losses * precision
        total = jnp.sum(weighted + params["uncertainty"])
        return (
            total,
            losses,
        )

    clipped = optax.adaptive_grad_clip(0.1)
    optimizer = optax.chain(clipped, optax.adam(1e-3))

    def step(params, state, *batch):
        differentiated = jax.value_and_grad(loss, has_aux=True)
        (_, losses), grads = differentiated(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, losses

    x = struct((512, 128), batch)
    labels = struct((512,), batch, dtype=jnp.int32)
    boxes = struct((512, 4), batch)
    task = struct((), dtype=jnp.int32)
    inputs = (
        x,
        labels,
        boxes,
        task,
    )
    state = optimizer_state(mesh, optimizer, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        *inputs,
    )


@case(
    "wavenet-dilated-time-cut", cpu={"data": 2, "time": 4}, v5e={"data": 2, "time": 8}
)
def wavenet(mesh: AnyMesh) -> Made:
    """Causal gated convolutions of growing dilation over samples that are cut in time;
    a mixture of logistics' loss.
    """
    struct = on(mesh)
    width = 64
    layer = {
        "gate": struct((2, width, 2 * width)),
        "out": struct((1, width, width)),
        "skip": struct((1, width, width)),
    }
    params = {
        "embed": struct((256, width)),
        "layers": [layer] * 5,
        "final": struct((width, 256)),
    }

    def causal(x, w, dilation=1):
        kernel_reach = w.shape[0] - 1
        reach = kernel_reach * dilation
        dimensions = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x,
            w,
            (1,),
            [(reach, 0)],
            rhs_dilation=(dilation,),
            dimension_numbers=dimensions,
        )

    def loss(params, samples):
        padding = ((0, 0), (1, 0))
        padded = jnp.pad(samples, padding)
        shifted = padded[:, :-1]
        x = params["embed"][shifted]
        skips = 0.0
        for position, p in enumerate(params["layers"]):
            convolved = causal(x, p["gate"], 2**position)
            filtered, gate = jnp.split(convolved, 2, -1)
            opened = jax.nn.sigmoid(gate)
            h = jnp.tanh(filtered) * opened
            skipped = causal(h, p["skip"])
            skips = skips + skipped
            residual = causal(h, p["out"])
            x = x + residual
        activated = jax.nn.relu(skips)
        logits = activated @ params["final"]
        log_probabilities = jax.nn.log_softmax(logits)
        positions = samples[..., None]
        picked = jnp.take_along_axis(log_probabilities, positions, -1)
        return -jnp.mean(picked)

    def step(params, samples):
        value, grads = jax.value_and_grad(loss)(params, samples)

        def descended(p, g):
            return p - 1e-3 * jnp.sign(g)

        updated = jax.tree.map(descended, params, grads)
        return value, updated

    samples = struct((4, 1024), "data", "time", dtype=jnp.int32)
    jitted = jax.jit(step)
    return jitted, (params, samples)


@case("soft-experts-slots", cpu={"data": 4, "expert": 2}, v5e={"data": 4, "expert": 4})
def soft_moe(mesh: AnyMesh) -> Made:
    """Each slot is a mean of all tokens of its image, and each token of all slots;
    experts mapped by `vmap`.
    """
    struct = on(mesh)
    experts = 8
    slots = 4
    width = 192
    params = {
        "phi": struct((width, experts, slots), None, "expert"),
        "scale": struct(()),
        "up": struct((experts, width, 384), "expert"),
        "down": struct((experts, 384, width), "expert"),
        "head": struct((width, 40)),
    }

    def expert(up, down, x):
        hidden = jax.nn.gelu(x @ up)
        return hidden @ down

    def layer(params, x):
        norms = jnp.linalg.norm(params["phi"], axis=0, keepdims=True)
        unit = params["phi"] / norms
        products = jnp.einsum("btd,des->btes", x, unit)
        logits = params["scale"] * products
        dispatch = jax.nn.softmax(logits, axis=1)
        leading = logits.shape[:2]
        flat = logits.reshape(*leading, -1)
        flat_shares = jax.nn.softmax(flat, -1)
        combine = flat_shares.reshape(logits.shape)
        inputs = jnp.einsum("btes,btd->ebsd", dispatch, x)
        mapped = jax.vmap(expert)
        outputs = mapped(params["up"], params["down"], inputs)
        return jnp.einsum("btes,ebsd->btd", combine, outputs)

    def loss(params, x, labels):
        for _ in range(2):
            mixed = layer(params, x)
            x = x + mixed
        losses = optax.sigmoid_binary_cross_entropy(x.mean(1) @ params["head"], labels)
        return losses.mean()

    optimizer = optax.nadam(1e-3)

    def step(params, state, x, labels):
        grads = jax.grad(loss)(params, x, labels)
        updates, state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        return updated, state

    state = optimizer_state(mesh, optimizer, params)
    x = struct((16, 64, width), "data")
    y = struct((16, 40), "data")
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted, (
        params,
        state,
        x,
        y,
    )


@case(
    "megatron-by-hand-sequence-parallel", cpu={"dp": 2, "tp": 4}, v5e={"dp": 2, "tp": 8}
)
def megatron(mesh: AnyMesh) -> Made:
    """The whole step inside one `shard_map`: gathers, scattered sums, a reduction of
    gradients, all written by hand.
    """
    struct = on(mesh)
    width = 256
    hidden = 1024
    params = {
        "up": struct((2, width, hidden), None, None, "tp"),
        "down": struct((2, hidden, width), None, "tp"),
        "scale": struct((2, width)),
    }
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)

    def local_loss(params, x, y):
        for i in range(2):
            normed = jax.nn.standardize(x)
            h = normed * params["scale"][i]
            h = lax.all_gather(h, "tp", axis=1, tiled=True)
            raised = h @ params["up"][i]
            hidden_rows = jax.nn.gelu(raised)
            h = hidden_rows @ params["down"][i]
            summed = lax.psum_scatter(h, "tp", scatter_dimension=1, tiled=True)
            x = x + summed
        squared_errors = (x - y) ** 2
        return jnp.mean(squared_errors)

    def local_step(params, x, y):
        value, grads = jax.value_and_grad(local_loss)(params, x, y)

        def averaged(g):
            return lax.pmean(g, "dp")

        grads = jax.tree.map(averaged, grads)
        grads["scale"] = lax.psum(grads["scale"], "tp")

        def descended(p, g):
            return p - 0.1 * g

        new = jax.tree.map(descended, params, grads)
        mean_value = lax.pmean(value, ("dp", "tp"))
        return new, mean_value

    rows = P("dp", "tp")
    step = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(specs, rows, rows),
        out_specs=(specs, P()),
        check_vma=False,
    )
    x = struct((8, 128, width), *rows)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, (params, x, x)


def _nnx_mixer_with_optimizer():
    class Block(nnx.Module):
        def __init__(self, patches, width, rngs):
            norms = [nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)]
            self.norms = nnx.List(norms)
            token_layers = [
                nnx.Linear(patches, 128, rngs=rngs),
                nnx.Linear(128, patches, rngs=rngs),
            ]
            self.tokens = nnx.List(token_layers)
            channel_layers = [
                nnx.Linear(width, 512, rngs=rngs),
                nnx.Linear(512, width, rngs=rngs),
            ]
            self.channels = nnx.List(channel_layers)

        def __call__(self, x):
            normed = self.norms[0](x)
            h = normed.swapaxes(1, 2)
            raised = self.tokens[0](h)
            token_hidden = nnx.gelu(raised)
            lowered = self.tokens[1](token_hidden)
            x = x + lowered.swapaxes(1, 2)
            normed_tokens = self.norms[1](x)
            channels = self.channels[0](normed_tokens)
            channel_hidden = nnx.gelu(channels)
            return x + self.channels[1](channel_hidden)

    class Mixer(nnx.Module):
        def __init__(self, rngs):
            self.patch = nnx.Conv(
                3, 128, (8, 8), strides=(8, 8), padding="VALID", rngs=rngs
            )
            blocks = []
            for _ in range(3):
                blocks.append(Block(36, 128, rngs))
            self.blocks = nnx.List(blocks)
            self.head = nnx.Linear(128, 20, rngs=rngs)

        def __call__(self, images):
            x = self.patch(images)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            for block in self.blocks:
                x = block(x)
            means = x.mean(1)
            return self.head(means)

    def create():
        model = Mixer(nnx.Rngs(0))
        adamw = optax.adamw(1e-3)
        optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
        return nnx.split((model, optimizer))

    return create


@case(
    "nnx-mixer-optimizer-split",
    cpu={"data": 4, "model": 2},
    v5e={"data": 8, "model": 2},
)
def nnx_mixer(mesh: AnyMesh) -> Made:
    """A Flax NNX module and its optimizer, split into a graph and a state, merged and
    updated in the step.
    """
    struct = on(mesh)

    create = _nnx_mixer_with_optimizer()

    graph, state = nnx.eval_shape(create)

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        is_matrix = leaf.ndim == 2
        spec = P()
        if is_matrix and "channels'][0]" in name:
            spec = P(None, "model")
        elif is_matrix and "channels'][1]" in name:
            spec = P("model")
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.tree_util.tree_map_with_path(place, nnx.to_pure_dict(state))

    def step(pure, images, labels):
        _, full = nnx.eval_shape(create)
        nnx.replace_by_pure_dict(full, pure)
        model, optimizer = nnx.merge(graph, full)

        def loss(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(images), labels
            )
            return losses.mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        state_after = nnx.state((model, optimizer))
        pure_after = nnx.to_pure_dict(state_after)
        return pure_after, value

    images = struct((32, 48, 48, 3), "data")
    labels = struct((32,), "data", dtype=jnp.int32)
    args = (
        state,
        images,
        labels,
    )
    jitted = jax.jit(step, donate_argnums=0)
    return jitted, args


def _llama_params(struct, width, layers, heads, size, kv):
    return {
        "embed": struct((4096, width), "tensor", "fsdp"),
        "layers": {
            "q": struct((layers, width, heads, size), None, "fsdp", "tensor"),
            "k": struct((layers, width, kv, size), None, "fsdp", "tensor"),
            "v": struct((layers, width, kv, size), None, "fsdp", "tensor"),
            "o": struct((layers, heads, size, width), None, "tensor", None, "fsdp"),
            "gate": struct((layers, width, 512), None, "fsdp", "tensor"),
            "up": struct((layers, width, 512), None, "fsdp", "tensor"),
            "down": struct((layers, 512, width), None, "tensor", "fsdp"),
            "norms": struct((layers, 2, width)),
        },
        "norm": struct((width,)),
        "head": struct((width, 4096), "fsdp", "tensor"),
    }


def _llama_norm_and_rotation(size):
    def norm(x, scale):
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide**2, -1, keepdims=True)
        scale_of_rows = lax.rsqrt(mean_square + 1e-5)
        return (wide * scale_of_rows).astype(x.dtype) * scale

    def rotate(x):
        exponents = -jnp.arange(0, size, 2) / size
        frequencies = 10000.0**exponents
        positions = jnp.arange(x.shape[1])[:, None]
        angles = positions * frequencies
        columns = jnp.sin(angles)[:, None]
        sin = columns.astype(x.dtype)
        cosines = jnp.cos(angles)[:, None]
        cos = cosines.astype(x.dtype)
        first, second = jnp.split(x, 2, axis=-1)
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        return jnp.concatenate([turned_first, turned_second], -1)

    return norm, rotate


@case(
    "llama-scan-remat-fsdp-tensor",
    cpu={"fsdp": 4, "tensor": 2},
    v5e={"fsdp": 8, "tensor": 2},
)
def llama_scan(mesh: AnyMesh) -> Made:
    """Layers under one scan with rematerialization, two heads of keys, rotary
    positions, AdamW, all donated.
    """
    struct = functools.partial(on(mesh), dtype=jnp.bfloat16)
    layers = 4
    width = 256
    heads = 8
    kv = 2
    size = 32
    params = _llama_params(
        struct=struct, width=width, layers=layers, heads=heads, size=size, kv=kv
    )

    norm, rotate = _llama_norm_and_rotation(size)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, p):
        h = norm(x, p["norms"][0])
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[name]) for name in "qkv")
        turned = rotate(q)
        q = turned.reshape(*q.shape[:2], kv, heads // kv, size)
        turned_keys = rotate(k)
        products = jnp.einsum("bqgrk,bsgk->bgrqs", q, turned_keys)
        scores = products.astype(jnp.float32) * size**-0.5
        square = jnp.ones(scores.shape[-2:], bool)
        causal = jnp.tril(square)
        masked = jnp.where(causal, scores, -1e30)
        weights_of_scores = jax.nn.softmax(masked, -1)
        weights = weights_of_scores.astype(x.dtype)
        mixed_groups = jnp.einsum("bgrqs,bsgk->bqgrk", weights, v)
        mixed = mixed_groups.reshape(*x.shape[:2], heads, size)
        attended = jnp.einsum("bshk,hkd->bsd", mixed, p["o"])
        x = x + attended
        h = norm(x, p["norms"][1])
        activated = jax.nn.silu(h @ p["gate"])
        raised = h @ p["up"]
        gated = activated * raised
        return x + gated @ p["down"], None

    def loss(params, tokens):
        inputs = tokens[:, :-1]
        x = params["embed"][inputs]
        x, _ = lax.scan(layer, x, params["layers"])
        normed = norm(x, params["norm"])
        answers = normed @ params["head"]
        logits = answers.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    optimizer = optax.adamw(3e-4, weight_decay=0.1)

    def train_step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        return updated, state, value

    state = optimizer_state(mesh, optimizer, params)
    tokens = on(mesh)((16, 129), "fsdp", dtype=jnp.int32)
    out = (shardings(params), shardings(state), NamedSharding(mesh, P()))
    jitted = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=out)
    return jitted, (
        params,
        state,
        tokens,
    )


CASES = (
    many_tasks,
    wavenet,
    soft_moe,
    megatron,
    nnx_mixer,
    llama_scan,
)
