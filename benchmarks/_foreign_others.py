# pyright: reportMissingImports=false
"""Models of other libraries that nobody here had tried before `foreign_plans`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._foreign_base import (
    BATCH,
    KEY,
    Model,
    labels_loss,
    random_normal,
    random_tokens,
)


# equimo


def _images_model(make: Callable[..., Any], size: int, **sizes: Any) -> Model:
    """A classifier of images, with the keys of its dropout among the batch."""

    def loss(model: Any, images: jax.Array, labels: jax.Array, keys: Any) -> jax.Array:
        logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
        return labels_loss(logits, labels)

    model = make(in_channels=3, num_classes=8, key=jax.random.key(KEY), **sizes)
    images = random_normal(BATCH, 3, size, size)
    keys = jax.random.split(jax.random.key(3), BATCH)
    return Model(model, loss, (images, random_tokens(BATCH, most=8), keys))


def equimo_mlla() -> Model:
    from equimo.models import Mlla

    return _images_model(Mlla, 32, img_size=32, dim=16, depths=[1, 1], num_heads=[2, 4])


def equimo_mobilenet() -> Model:
    from equimo.models import mobilenet

    def make(in_channels: int, **sizes: Any) -> Any:
        return mobilenet.mobilenetv3_small(in_channels=in_channels, **sizes)

    return _images_model(make, 32)


# haiku


def haiku_vector_quantizer() -> Model:
    """An autoencoder whose codebook moves by averages, the state of the module."""
    import haiku as hk

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded = hk.nets.MLP([32, 16])(x)
        quantizer = hk.nets.VectorQuantizerEMA(
            embedding_dim=16, num_embeddings=32, commitment_cost=0.25, decay=0.9
        )
        quantized = quantizer(encoded, is_training=True)
        decoded = hk.nets.MLP([32, 24])(quantized["quantize"])
        return decoded, quantized["loss"]

    pure = hk.transform_with_state(forward)
    x = random_normal(BATCH, 24)
    params, state = pure.init(jax.random.key(KEY), x)

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        (decoded, commitment), _ = pure.apply(params, state, None, x)
        return jnp.mean((decoded - x) ** 2) + commitment

    return Model(params, loss, (state, x))


# jraph


def jraph_attention() -> Model:
    import equinox as eqx
    import jraph

    keys = jax.random.split(jax.random.key(KEY), 3)
    layers = {
        "query": eqx.nn.Linear(16, 32, key=keys[0]),
        "logit": eqx.nn.Linear(64, 1, key=keys[1]),
        "out": eqx.nn.Linear(32, 8, key=keys[2]),
    }

    def loss(layers: Any, nodes: Any, senders: Any, receivers: Any) -> jax.Array:
        def logits(sent: Any, received: Any, _: Any) -> Any:
            joined = jnp.concatenate([sent, received], axis=-1)
            return jax.nn.leaky_relu(jax.vmap(layers["logit"])(joined))

        network = jraph.GAT(jax.vmap(layers["query"]), logits, jax.vmap(layers["out"]))
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=None,
            senders=senders,
            receivers=receivers,
            n_node=jnp.array([nodes.shape[0]]),
            n_edge=jnp.array([senders.shape[0]]),
            globals=None,
        )
        return jnp.mean(network(graph).nodes ** 2)

    # Each node has an edge to itself.
    own = jnp.arange(16)
    senders = jnp.concatenate([random_tokens(32, most=16), own])
    receivers = jnp.concatenate([random_tokens(32, most=16)[::-1], own])
    return Model(layers, loss, (random_normal(16, 16), senders, receivers))


# probability


def flowjax_autoregressive() -> Model:
    from flowjax.distributions import Normal
    from flowjax.flows import block_neural_autoregressive_flow

    flow = block_neural_autoregressive_flow(
        jax.random.key(KEY),
        base_dist=Normal(jnp.zeros(8)),
        nn_block_dim=4,
        flow_layers=2,
    )

    def loss(flow: Any, x: jax.Array) -> jax.Array:
        import paramax

        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Model(flow, loss, (random_normal(32, 8),))


def numpyro_covariance() -> Model:
    import numpyro
    from numpyro.distributions import HalfNormal, Normal
    from numpyro.infer import Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weights = numpyro.sample("w", Normal(0, 1).expand([15]).to_event(1))
        noise = numpyro.sample("noise", HalfNormal(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", Normal(x @ weights, noise + 0.1), obs=y)

    guide = AutoMultivariateNormal(model)
    batch = random_normal(BATCH, 15), random_normal(BATCH, seed=3)
    seeded = numpyro.handlers.seed(guide, jax.random.key(KEY))
    trace = numpyro.handlers.trace(seeded).get_trace(*batch)
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        key = jax.random.key(KEY)
        return Trace_ELBO(4).loss(key, params, model, guide, x, y) / BATCH

    return Model(params, loss, batch)


def distreqx_triangular_flow() -> Model:
    """A density of triangular maps, whose parameters are plain arrays."""
    from distreqx.bijectors import Block, Chain, Shift, Tanh, TriangularLinear
    from distreqx.distributions import MultivariateNormalDiag, Transformed

    key = jax.random.key(KEY)
    params = {
        f"layer{number}": {
            "matrix": jnp.eye(8) + 0.1 * jax.random.normal(layer_key, (8, 8)),
            "bias": jnp.zeros(8),
        }
        for number, layer_key in enumerate(jax.random.split(key, 2))
    }

    def loss(params: Any, x: jax.Array) -> jax.Array:
        bijectors: list[Any] = [Block(Tanh(), 1)]
        for layer in params.values():
            bijectors += [
                TriangularLinear(layer["matrix"]),
                Block(Shift(layer["bias"]), 1),
            ]
        base = MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        flow = Transformed(base, Chain(bijectors))
        return -jnp.mean(jax.vmap(flow.log_prob)(jnp.tanh(x) * 0.5))

    return Model(params, loss, (random_normal(32, 8),))


OTHERS: Mapping[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        equimo_mlla,
        equimo_mobilenet,
        haiku_vector_quantizer,
        jraph_attention,
        flowjax_autoregressive,
        numpyro_covariance,
        distreqx_triangular_flow,
    )
}
