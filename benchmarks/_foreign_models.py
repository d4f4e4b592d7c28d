"""Models of other libraries, each as its users write it. None knows of shardings.

Sizes are small: each trains for a few steps on a CPU in seconds.
"""

# What is not installed here, and how libraries annotate themselves, is not ours.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportArgumentType=false

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._foreign_base import BATCH, KEY, Model, labels_loss, random_normal, random_tokens
from ._foreign_solvers import (
    diffrax_neural_ode,
    diffrax_neural_sde,
    distreqx_vae,
    flowjax_coupling,
    flowjax_spline,
    lineax_cg,
    lineax_ridge,
    numpyro_svi,
    optimistix_equilibrium,
)


# equimo


def _images_model(make: Callable[..., Any], **sizes: Any) -> Model:
    """A classifier of ten kinds of images."""

    def loss(model, images: jax.Array, labels: jax.Array) -> jax.Array:
        key = jax.random.key(KEY)
        logits = jax.vmap(lambda image: model(image, key=key))(images)
        return labels_loss(logits, labels)

    model = make(num_classes=10, key=jax.random.key(KEY), **sizes)
    images = random_normal(BATCH, 3, 32, 32)
    labels = random_tokens(BATCH, most=10)
    return Model(model, loss, (images, labels))


def equimo_vit() -> Model:
    from equimo.models import VisionTransformer

    return _images_model(
        VisionTransformer,
        img_size=32,
        in_channels=3,
        dim=32,
        patch_size=8,
        num_heads=[4],
        depths=[2],
    )


def equimo_convnext() -> Model:
    from equimo.models import ConvNeXt

    return _images_model(
        ConvNeXt, in_channels=3, depths=[1, 1, 1, 1], dims=[16, 16, 32, 32]
    )


def equimo_mamba() -> Model:
    from equimo.models import Vssd

    return _images_model(
        Vssd,
        img_size=32,
        in_channels=3,
        dim=16,
        d_state=8,
        patch_size=4,
        depths=[1, 1],
        num_heads=[2, 4],
        attentions_layers=("mamba2mixer", "attention"),
    )


def equimo_reduceformer() -> Model:
    from equimo.models import ReduceFormer

    return _images_model(
        ReduceFormer,
        in_channels=3,
        widths=[8, 16, 32],
        depths=[1, 1, 1],
        block_types=["conv", "conv", "attention"],
        head_dim=8,
    )


# haliax


def haliax_mlp() -> Model:
    import haliax as hax

    inputs, outputs, rows = hax.make_axes(I=16, O=8, B=BATCH)
    key = jax.random.key(KEY)
    mlp = hax.nn.MLP.init(inputs, outputs, 64, 3, key=key)

    def loss(mlp, x, y) -> jax.Array:
        return hax.mean((mlp(x) - y) ** 2).scalar()

    x = hax.named(random_normal(BATCH, 16), (rows, inputs))
    y = hax.named(random_normal(BATCH, 8, seed=3), (rows, outputs))
    return Model(mlp, loss, (x, y))


def haliax_transformer() -> Model:
    import haliax as hax

    rows, positions, embed = hax.make_axes(batch=BATCH, position=16, embed=32)
    heads, head_dim, mlp = hax.make_axes(heads=4, head_dim=8, mlp=64)
    vocab, layers = hax.make_axes(vocab=64, layers=2)

    class Block(eqx.Module):
        qkv: hax.nn.Linear
        out: hax.nn.Linear
        up: hax.nn.Linear
        down: hax.nn.Linear
        norm: hax.nn.LayerNorm

        @staticmethod
        def init(*, key: Any) -> "Block":
            keys = jax.random.split(key, 4)
            three = hax.Axis("qkv", 3)
            return Block(
                hax.nn.Linear.init(embed, (three, heads, head_dim), key=keys[0]),
                hax.nn.Linear.init((heads, head_dim), embed, key=keys[1]),
                hax.nn.Linear.init(embed, mlp, key=keys[2]),
                hax.nn.Linear.init(mlp, embed, key=keys[3]),
                hax.nn.LayerNorm.init(embed),
            )

        def __call__(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).unbind("qkv")
            k = k.rename({"position": "key_position"})
            v = v.rename({"position": "key_position"})
            mask = hax.nn.attention.causal_mask(
                positions, positions.alias("key_position")
            )
            mixed = hax.nn.attention.dot_product_attention(
                "key_position", head_dim, q, k, v, mask=mask
            )
            x = x + self.out(mixed)
            return x + self.down(hax.nn.gelu(self.up(x)))

    class Transformer(eqx.Module):
        embed: hax.nn.Embedding
        blocks: hax.nn.Stacked

        def __call__(self, tokens: Any) -> Any:
            return self.embed.unembed(self.blocks.fold(self.embed(tokens)))

    keys = jax.random.split(jax.random.key(KEY), layers.size + 1)
    model = Transformer(
        hax.nn.Embedding.init(vocab, embed, key=keys[0]),
        hax.nn.Stacked.init(layers, Block)(key=keys[1:]),
    )

    def loss(model, tokens) -> jax.Array:
        targets = hax.nn.one_hot(hax.roll(tokens, -1, positions), vocab)
        losses = hax.nn.cross_entropy_loss(model(tokens), vocab, targets)
        return losses.mean().scalar()

    tokens = hax.named(random_tokens(BATCH, positions.size), (rows, positions))
    return Model(model, loss, (tokens,))


def haliax_convolutions() -> Model:
    import haliax as hax

    rows, height, width, channels = hax.make_axes(
        B=BATCH,
        H=8,
        W=8,
        C=8,
    )
    hidden = hax.Axis("hidden", 16)
    key = jax.random.key(KEY)
    conv = hax.nn.Conv.init(
        ("H", "W"), channels, hidden, kernel_size=3, padding=1, key=key
    )

    def loss(conv, x) -> jax.Array:
        y = hax.nn.relu(conv(x))
        window = (hax.Axis("H", 2), hax.Axis("W", 2))
        y = hax.nn.max_pool(window, y, stride=2)
        return hax.mean((y - 1) ** 2).scalar()

    images = random_normal(BATCH, 8, 8, 8)
    x = hax.named(images, (rows, height, width, channels))
    return Model(conv, loss, (x,))


# flax


def linen_transformer() -> Model:
    from flax import linen as nn

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(64, 32)
            x = embed(tokens)
            mask = nn.make_causal_mask(tokens)
            for _ in range(2):
                normed = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(num_heads=4)(normed, mask=mask)
                hidden = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
                x = x + nn.Dense(32)(hidden)
            return embed.attend(x)

    return _linen(Transformer(), random_tokens(BATCH, 16), random_tokens(BATCH, 16))


def _linen(module: Any, x: jax.Array, labels: jax.Array) -> Model:
    params = module.init(jax.random.key(KEY), x)

    def loss(params, x: jax.Array, labels: jax.Array) -> jax.Array:
        return labels_loss(module.apply(params, x), labels)

    return Model(params, loss, (x, labels))


def linen_lstm() -> Model:
    from flax import linen as nn

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(64, 32)(tokens)
            x = nn.RNN(nn.OptimizedLSTMCell(32))(x)
            return nn.Dense(16)(x)

    tokens = random_tokens(BATCH, 12)
    labels = random_tokens(BATCH, 12, most=16)
    return _linen(Tagger(), tokens, labels)


def linen_convolutions() -> Model:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for channels in (16, 32):
                convolved = nn.Conv(channels, (3, 3))(x)
                x = nn.relu(nn.GroupNorm(num_groups=4)(convolved))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    images = random_normal(BATCH, 16, 16, 3)
    labels = random_tokens(BATCH, most=10)
    return _linen(Net(), images, labels)


def _nnx(module: Any, loss_of: Callable[..., jax.Array], *batch: Any) -> Model:
    from flax import nnx

    definition, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, rest, *batch) -> jax.Array:
        # Statistics are computed, and stay as they are.
        module = nnx.merge(definition, params, rest, copy=True)
        return loss_of(module, *batch)

    return Model(params, loss, (rest, *batch))


def nnx_transformer() -> Model:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.attention = nnx.MultiHeadAttention(
                num_heads=4,
                in_features=32,
                decode=False,
                rngs=rngs,
            )
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.up = nnx.Linear(32, 64, rngs=rngs)
            self.down = nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm(x), mask=mask)
            return x + self.down(nnx.silu(self.up(x)))

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any):
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.head = nnx.Linear(32, 64, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    def loss(model, tokens: jax.Array) -> jax.Array:
        return labels_loss(model(tokens)[:, :-1], tokens[:, 1:])

    return _nnx(Transformer(nnx.Rngs(KEY)), loss, random_tokens(BATCH, 16))


def nnx_batch_norm() -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(16 * 16, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.conv(x)))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
            flat = x.reshape(x.shape[0], -1)
            return self.head(self.dropout(flat))

    def loss(model, x: jax.Array, labels: jax.Array) -> jax.Array:
        return labels_loss(model(x), labels)

    net = Net(nnx.Rngs(KEY))
    images = random_normal(BATCH, 8, 8, 3)
    labels = random_tokens(BATCH, most=8)
    return _nnx(net, loss, images, labels)


def nnx_gru() -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            self.rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs))
            self.head = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.rnn(x))

    def loss(model, x: jax.Array) -> jax.Array:
        predicted = model(x)[:, :-1]
        return jnp.mean((predicted - x[:, 1:]) ** 2)

    values = random_normal(BATCH, 12, 16)
    return _nnx(Net(nnx.Rngs(KEY)), loss, values)


# haiku, jraph, equinox


def haiku_resnet() -> Model:
    import haiku as hk

    def forward(images: jax.Array) -> jax.Array:
        x = hk.Conv2D(16, 3)(images)
        for _ in range(2):
            normed = hk.GroupNorm(4)(x)
            x = x + hk.Conv2D(16, 3)(jax.nn.relu(normed))
        return hk.Linear(10)(jnp.mean(x, axis=(1, 2)))

    network = hk.without_apply_rng(hk.transform(forward))
    images = random_normal(BATCH, 16, 16, 3)
    params = network.init(jax.random.key(KEY), images)

    def loss(params, images: jax.Array, labels: jax.Array) -> jax.Array:
        return labels_loss(network.apply(params, images), labels)

    return Model(params, loss, (images, random_tokens(BATCH, most=10)))


def haiku_attention() -> Model:
    import haiku as hk

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(64, 32)(tokens)
        initializer = hk.initializers.VarianceScaling(1.0)
        mixed = hk.MultiHeadAttention(4, 8, w_init=initializer)(x, x, x)
        x = hk.LayerNorm(-1, True, True)(x + mixed)
        features = hk.nets.MLP([64, 32])(x)
        return hk.Linear(64)(features)

    network = hk.without_apply_rng(hk.transform(forward))
    tokens = random_tokens(BATCH, 16)
    params = network.init(jax.random.key(KEY), tokens)

    def loss(params, tokens: jax.Array) -> jax.Array:
        return labels_loss(network.apply(params, tokens), tokens)

    return Model(params, loss, (tokens,))


def jraph_network() -> Model:
    import jraph

    mlps = {
        name: eqx.nn.MLP(width, 16, 32, 1, key=jax.random.key(seed))
        for seed, (name, width) in enumerate({"edges": 48, "nodes": 48}.items())
    }

    def loss(mlps, nodes: jax.Array, senders: jax.Array, receivers):
        def update_edges(edges, sent, received, _):
            joined = jnp.concatenate([edges, sent, received], axis=-1)
            return jax.vmap(mlps["edges"])(joined)

        def update_nodes(nodes, sent, received, _):
            joined = jnp.concatenate([nodes, sent, received], axis=-1)
            return jax.vmap(mlps["nodes"])(joined)

        network = jraph.GraphNetwork(update_edges, update_nodes)
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=jnp.ones((senders.shape[0], 16)),
            senders=senders,
            receivers=receivers,
            n_node=jnp.array([nodes.shape[0]]),
            n_edge=jnp.array([senders.shape[0]]),
            globals=None,
        )
        return jnp.mean(network(network(graph)).nodes ** 2)

    batch = (
        random_normal(16, 16),
        random_tokens(32, most=16),
        random_tokens(32, most=16)[::-1],
    )
    return Model(mlps, loss, batch)


def equinox_mixer() -> Model:
    class Mixer(eqx.Module):
        patches: eqx.nn.Conv2d
        across: eqx.nn.MLP
        within: eqx.nn.MLP
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __call__(self, image: jax.Array) -> jax.Array:
            x = self.patches(image)
            channels = x.shape[0]
            x = x.reshape(channels, -1)
            x = x + jax.vmap(self.across)(x)
            mixed = jax.vmap(self.within)(self.norm(x).T)
            x = x + mixed.T
            return self.head(jnp.mean(x, axis=1))

    keys = jax.random.split(jax.random.key(KEY), 4)
    mixer = Mixer(
        eqx.nn.Conv2d(3, 32, 4, stride=4, key=keys[0]),
        eqx.nn.MLP(64, 64, 32, 1, key=keys[1]),
        eqx.nn.MLP(32, 32, 64, 1, key=keys[2]),
        eqx.nn.LayerNorm((32, 64)),
        eqx.nn.Linear(32, 10, key=keys[3]),
    )

    def loss(mixer, images: jax.Array, labels: jax.Array) -> jax.Array:
        return labels_loss(jax.vmap(mixer)(images), labels)

    images = random_normal(BATCH, 3, 32, 32)
    labels = random_tokens(BATCH, most=10)
    return Model(mixer, loss, (images, labels))


def quax_lora() -> Model:
    import quax
    from quax.examples.lora import loraify

    mlp = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(KEY))
    adapted = loraify(mlp, rank=4, key=jax.random.key(KEY))

    def loss(adapted, x: jax.Array) -> jax.Array:
        def applied(model, x: jax.Array) -> jax.Array:
            return jax.vmap(model)(x)

        return jnp.mean((quax.quaxify(applied)(adapted, x) - x) ** 2)

    return Model(adapted, loss, (random_normal(BATCH, 16),))


MODELS: Mapping[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        equimo_vit,
        equimo_convnext,
        equimo_mamba,
        equimo_reduceformer,
        haliax_mlp,
        haliax_transformer,
        haliax_convolutions,
        linen_transformer,
        linen_lstm,
        linen_convolutions,
        nnx_transformer,
        nnx_batch_norm,
        nnx_gru,
        diffrax_neural_ode,
        diffrax_neural_sde,
        lineax_ridge,
        lineax_cg,
        optimistix_equilibrium,
        flowjax_coupling,
        flowjax_spline,
        distreqx_vae,
        numpyro_svi,
        haiku_resnet,
        haiku_attention,
        jraph_network,
        equinox_mixer,
        quax_lora,
    )
}
