"""Models of other libraries, each as its users write it. None knows of shardings.

Sizes are small: each trains for a few steps on a CPU in seconds.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


BATCH = 8
KEY = 7


class Model(NamedTuple):
    """A model, what it learns from, and its loss: `loss(model, *batch)`."""

    model: Any
    loss: Callable[..., jax.Array]
    batch: tuple[Any, ...]


def _normal(*shape: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _tokens(*shape: int, most: int = 64) -> jax.Array:
    return jax.random.randint(jax.random.key(2), shape, 0, most)


def _labels_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


# equimo


def _images_model(model: Any) -> Model:
    def loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        key = jax.random.key(KEY)
        logits = jax.vmap(lambda image: model(image, key=key))(images)
        return _labels_loss(logits, labels)

    images = _normal(BATCH, 3, 32, 32)
    return Model(model, loss, (images, _tokens(BATCH, most=10)))


def equimo_vit() -> Model:
    from equimo.models import VisionTransformer

    return _images_model(
        VisionTransformer(
            img_size=32,
            in_channels=3,
            dim=32,
            patch_size=8,
            num_heads=[4],
            depths=[2],
            num_classes=10,
            key=jax.random.key(KEY),
        )
    )


def equimo_convnext() -> Model:
    from equimo.models import ConvNeXt

    return _images_model(
        ConvNeXt(
            in_channels=3,
            depths=[1, 1, 1, 1],
            dims=[16, 16, 32, 32],
            num_classes=10,
            key=jax.random.key(KEY),
        )
    )


def equimo_mamba() -> Model:
    from equimo.models import Vssd

    return _images_model(
        Vssd(
            img_size=32,
            in_channels=3,
            dim=16,
            d_state=8,
            patch_size=4,
            depths=[1, 1],
            num_heads=[2, 4],
            attentions_layers=("mamba2mixer", "attention"),
            num_classes=10,
            key=jax.random.key(KEY),
        )
    )


def equimo_reduceformer() -> Model:
    from equimo.models import ReduceFormer

    return _images_model(
        ReduceFormer(
            in_channels=3,
            widths=[8, 16, 32],
            depths=[1, 1, 1],
            block_types=["conv", "conv", "attention"],
            head_dim=8,
            num_classes=10,
            key=jax.random.key(KEY),
        )
    )


# haliax


def haliax_mlp() -> Model:
    import haliax as hax

    inputs, outputs, rows = hax.make_axes(I=16, O=8, B=BATCH)
    mlp = hax.nn.MLP.init(inputs, outputs, 64, 3, key=jax.random.key(KEY))

    def loss(mlp: Any, x: Any, y: Any) -> jax.Array:
        return hax.mean((mlp(x) - y) ** 2).scalar()

    x = hax.named(_normal(BATCH, 16), (rows, inputs))
    y = hax.named(_normal(BATCH, 8, seed=3), (rows, outputs))
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

    def loss(model: Any, tokens: Any) -> jax.Array:
        targets = hax.nn.one_hot(hax.roll(tokens, -1, positions), vocab)
        losses = hax.nn.cross_entropy_loss(model(tokens), vocab, targets)
        return losses.mean().scalar()

    tokens = hax.named(_tokens(BATCH, positions.size), (rows, positions))
    return Model(model, loss, (tokens,))


def haliax_convolutions() -> Model:
    import haliax as hax

    rows, height, width, channels = hax.make_axes(B=BATCH, H=8, W=8, C=8)
    hidden = hax.Axis("hidden", 16)
    conv = hax.nn.Conv.init(
        ("H", "W"), channels, hidden, kernel_size=3, padding=1, key=jax.random.key(KEY)
    )

    def loss(conv: Any, x: Any) -> jax.Array:
        y = hax.nn.relu(conv(x))
        y = hax.nn.max_pool((hax.Axis("H", 2), hax.Axis("W", 2)), y, stride=2)
        return hax.mean((y - 1) ** 2).scalar()

    x = hax.named(_normal(BATCH, 8, 8, 8), (rows, height, width, channels))
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

    return _linen(Transformer(), _tokens(BATCH, 16), _tokens(BATCH, 16))


def _linen(module: Any, x: jax.Array, labels: jax.Array) -> Model:
    params = module.init(jax.random.key(KEY), x)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _labels_loss(module.apply(params, x), labels)

    return Model(params, loss, (x, labels))


def linen_lstm() -> Model:
    from flax import linen as nn

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(64, 32)(tokens)
            x = nn.RNN(nn.OptimizedLSTMCell(32))(x)
            return nn.Dense(16)(x)

    return _linen(Tagger(), _tokens(BATCH, 12), _tokens(BATCH, 12, most=16))


def linen_convolutions() -> Model:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for channels in (16, 32):
                x = nn.relu(nn.GroupNorm(num_groups=4)(nn.Conv(channels, (3, 3))(x)))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    return _linen(Net(), _normal(BATCH, 16, 16, 3), _tokens(BATCH, most=10))


def _nnx(module: Any, loss_of: Callable[..., jax.Array], *batch: Any) -> Model:
    from flax import nnx

    definition, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params: Any, rest: Any, *batch: Any) -> jax.Array:
        # Statistics are computed, and stay as they are.
        module = nnx.merge(definition, params, rest, copy=True)
        return loss_of(module, *batch)

    return Model(params, loss, (rest, *batch))


def nnx_transformer() -> Model:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.attention = nnx.MultiHeadAttention(
                num_heads=4, in_features=32, decode=False, rngs=rngs
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

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return _labels_loss(model(tokens)[:, :-1], tokens[:, 1:])

    return _nnx(Transformer(nnx.Rngs(KEY)), loss, _tokens(BATCH, 16))


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
            return self.head(self.dropout(x.reshape(x.shape[0], -1)))

    def loss(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _labels_loss(model(x), labels)

    net = Net(nnx.Rngs(KEY))
    return _nnx(net, loss, _normal(BATCH, 8, 8, 3), _tokens(BATCH, most=8))


def nnx_gru() -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            self.rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs))
            self.head = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.rnn(x))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model(x)[:, :-1] - x[:, 1:]) ** 2)

    return _nnx(Net(nnx.Rngs(KEY)), loss, _normal(BATCH, 12, 16))


# solvers


def diffrax_neural_ode() -> Model:
    import diffrax

    field = eqx.nn.MLP(16, 16, 32, 2, activation=jnp.tanh, key=jax.random.key(KEY))

    def loss(field: Any, start: jax.Array, times: jax.Array) -> jax.Array:
        def solved(y: jax.Array) -> jax.Array:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y,
                saveat=diffrax.SaveAt(ts=times),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            )
            return solution.ys

        target = jnp.sin(times)[:, None]
        return jnp.mean((jax.vmap(solved)(start) - target) ** 2)

    return Model(field, loss, (_normal(BATCH, 16), jnp.linspace(0, 1, 6)))


def diffrax_neural_sde() -> Model:
    import diffrax

    field = eqx.nn.MLP(8, 8, 32, 1, key=jax.random.key(KEY))

    def loss(field: Any, start: jax.Array, keys: jax.Array) -> jax.Array:
        def solved(y: jax.Array, key: jax.Array) -> jax.Array:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (8,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.ControlTerm(
                    lambda t, y, args: 0.1 * jnp.eye(8) * jnp.cos(t), noise
                ),
            )
            return diffrax.diffeqsolve(
                terms, diffrax.Heun(), t0=0.0, t1=1.0, dt0=0.1, y0=y
            ).ys

        return jnp.mean(jax.vmap(solved)(start, keys) ** 2)

    keys = jax.random.split(jax.random.key(3), BATCH)
    return Model(field, loss, (_normal(BATCH, 8), keys))


def lineax_ridge() -> Model:
    """Features whose ridge regression, a solve in the loss, fits the targets."""
    import lineax

    features = eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(KEY))

    def loss(features: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = jax.vmap(features)(x)
        gram = z.T @ z + 0.1 * jnp.eye(8)
        operator = lineax.MatrixLinearOperator(gram, lineax.positive_semidefinite_tag)
        weights = lineax.linear_solve(operator, z.T @ y, lineax.Cholesky()).value
        return jnp.mean((z @ weights - y) ** 2)

    return Model(features, loss, (_normal(32, 16), _normal(32, seed=3)))


def lineax_cg() -> Model:
    import lineax

    layer = eqx.nn.Linear(16, 16, key=jax.random.key(KEY))

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        def solved(x: jax.Array) -> jax.Array:
            def multiplied(y: jax.Array) -> jax.Array:
                return 2 * y + layer.weight.T @ (layer.weight @ y)

            operator = lineax.FunctionLinearOperator(
                multiplied,
                jax.ShapeDtypeStruct((16,), jnp.float32),
                lineax.positive_semidefinite_tag,
            )
            solver = lineax.CG(rtol=1e-5, atol=1e-5)
            return lineax.linear_solve(operator, layer(x), solver).value

        return jnp.mean((jax.vmap(solved)(x) - 1) ** 2)

    return Model(layer, loss, (_normal(BATCH, 16),))


def optimistix_equilibrium() -> Model:
    """A deep equilibrium model: the fixed point of a layer."""
    import optimistix

    class Layer(eqx.Module):
        inner: eqx.nn.Linear
        outer: eqx.nn.Linear

        def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(0.5 * self.inner(z) + self.outer(x))

    keys = jax.random.split(jax.random.key(KEY))
    layer = Layer(
        eqx.nn.Linear(32, 32, key=keys[0]), eqx.nn.Linear(16, 32, key=keys[1])
    )

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        def point(x: jax.Array) -> jax.Array:
            solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5)
            return optimistix.fixed_point(layer, solver, jnp.zeros(32), x).value

        return jnp.mean((jax.vmap(point)(x) - 0.5) ** 2)

    return Model(layer, loss, (_normal(BATCH, 16),))


# probability


def flowjax_coupling() -> Model:
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    flow = coupling_flow(
        jax.random.key(KEY), base_dist=Normal(jnp.zeros(8)), flow_layers=3, nn_width=32
    )

    def loss(flow: Any, x: jax.Array) -> jax.Array:
        import paramax

        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Model(flow, loss, (_normal(32, 8),))


def flowjax_spline() -> Model:
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        jax.random.key(KEY),
        base_dist=Normal(jnp.zeros(8)),
        transformer=RationalQuadraticSpline(knots=4, interval=4),
        flow_layers=2,
        nn_width=32,
    )

    def loss(flow: Any, x: jax.Array) -> jax.Array:
        import paramax

        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Model(flow, loss, (_normal(32, 8),))


def distreqx_vae() -> Model:
    from distreqx.distributions import MultivariateNormalDiag

    keys = jax.random.split(jax.random.key(KEY))
    networks = {
        "encoder": eqx.nn.MLP(16, 8, 32, 1, key=keys[0]),
        "decoder": eqx.nn.MLP(4, 16, 32, 1, key=keys[1]),
    }

    def loss(networks: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        def of_row(x: jax.Array, key: jax.Array) -> jax.Array:
            mean, scale = jnp.split(networks["encoder"](x), 2)
            posterior = MultivariateNormalDiag(mean, jax.nn.softplus(scale))
            prior = MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
            z = posterior.sample(key)
            error = jnp.sum((networks["decoder"](z) - x) ** 2)
            return error + posterior.log_prob(z) - prior.log_prob(z)

        return jnp.mean(jax.vmap(of_row)(x, keys))

    rows = jax.random.split(jax.random.key(3), BATCH)
    return Model(networks, loss, (_normal(BATCH, 16), rows))


def numpyro_svi() -> Model:
    import numpyro
    from numpyro.distributions import Normal
    from numpyro.infer import Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weights = numpyro.sample("w", Normal(0, 1).expand([16, 8]).to_event(2))
        out = numpyro.sample("out", Normal(0, 1).expand([8]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", Normal(jnp.tanh(x @ weights) @ out, 0.1), obs=y)

    guide = AutoNormal(model)
    batch = _normal(BATCH, 16), _normal(BATCH, seed=3)
    seeded = numpyro.handlers.seed(guide, jax.random.key(KEY))
    trace = numpyro.handlers.trace(seeded).get_trace(*batch)
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        key = jax.random.key(KEY)
        return Trace_ELBO(4).loss(key, params, model, guide, x, y) / BATCH

    return Model(params, loss, batch)


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
    images = _normal(BATCH, 16, 16, 3)
    params = network.init(jax.random.key(KEY), images)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return _labels_loss(network.apply(params, images), labels)

    return Model(params, loss, (images, _tokens(BATCH, most=10)))


def haiku_attention() -> Model:
    import haiku as hk

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(64, 32)(tokens)
        initializer = hk.initializers.VarianceScaling(1.0)
        mixed = hk.MultiHeadAttention(4, 8, w_init=initializer)(x, x, x)
        x = hk.LayerNorm(-1, True, True)(x + mixed)
        return hk.Linear(64)(hk.nets.MLP([64, 32])(x))

    network = hk.without_apply_rng(hk.transform(forward))
    tokens = _tokens(BATCH, 16)
    params = network.init(jax.random.key(KEY), tokens)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return _labels_loss(network.apply(params, tokens), tokens)

    return Model(params, loss, (tokens,))


def jraph_network() -> Model:
    import jraph

    mlps = {
        name: eqx.nn.MLP(width, 16, 32, 1, key=jax.random.key(seed))
        for seed, (name, width) in enumerate({"edges": 48, "nodes": 48}.items())
    }

    def loss(mlps: Any, nodes: jax.Array, senders: jax.Array, receivers: Any) -> Any:
        def update_edges(edges: Any, sent: Any, received: Any, _: Any) -> Any:
            joined = jnp.concatenate([edges, sent, received], axis=-1)
            return jax.vmap(mlps["edges"])(joined)

        def update_nodes(nodes: Any, sent: Any, received: Any, _: Any) -> Any:
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

    batch = _normal(16, 16), _tokens(32, most=16), _tokens(32, most=16)[::-1]
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
            x = x + jax.vmap(self.within)(self.norm(x).T).T
            return self.head(jnp.mean(x, axis=1))

    keys = jax.random.split(jax.random.key(KEY), 4)
    mixer = Mixer(
        eqx.nn.Conv2d(3, 32, 4, stride=4, key=keys[0]),
        eqx.nn.MLP(64, 64, 32, 1, key=keys[1]),
        eqx.nn.MLP(32, 32, 64, 1, key=keys[2]),
        eqx.nn.LayerNorm((32, 64)),
        eqx.nn.Linear(32, 10, key=keys[3]),
    )

    def loss(mixer: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return _labels_loss(jax.vmap(mixer)(images), labels)

    return Model(mixer, loss, (_normal(BATCH, 3, 32, 32), _tokens(BATCH, most=10)))


def quax_lora() -> Model:
    import quax
    from quax.examples.lora import loraify

    mlp = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(KEY))
    adapted = loraify(mlp, rank=4, key=jax.random.key(KEY))

    def loss(adapted: Any, x: jax.Array) -> jax.Array:
        def applied(model: Any, x: jax.Array) -> jax.Array:
            return jax.vmap(model)(x)

        return jnp.mean((quax.quaxify(applied)(adapted, x) - x) ** 2)

    return Model(adapted, loss, (_normal(BATCH, 16),))


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
