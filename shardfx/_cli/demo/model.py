"""A small decoder-only transformer over bytes. It declares its sharding only through logical names, of fields and
activations.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shardfx import AxisRules, ShardPlan, constrain, field


VOCAB = 256
WIDTH = 128
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 16
HIDDEN = 384

# Parameters are stored sharded over fsdp and tensor, and gathered over fsdp to compute. Units keep heads from being
# split.
AXIS_RULES = AxisRules(
    [
        ("batch", ("data", "fsdp")),
        ("embed", "fsdp"),
        ("vocab", "tensor"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("hidden", "tensor"),
        ("layers", None),
        ("norm", None),
        ("sequence", None),
    ],
    units={"heads": HEAD_DIM, "kv_heads": HEAD_DIM},
    axes=("data", "fsdp", "tensor"),  # a mesh may lack some of them
)

_ROWS, _KV_ROWS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


class Attention(eqx.Module):
    """Grouped-query attention with rotary positions: each key and value head serves several query heads."""

    query: Float[Array, "*layers embed heads"] = field(names=("embed", "heads"))
    key: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    value: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    out: Float[Array, "*layers heads embed"] = field(names=("heads", "embed"))

    def __init__(self, key: PRNGKeyArray):
        shapes = (WIDTH, _ROWS), (WIDTH, _KV_ROWS), (WIDTH, _KV_ROWS), (_ROWS, WIDTH)
        self.query, self.key, self.value, self.out = _weights(key, *shapes)

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        query = _rotate(_heads(_project(x, self.query, "heads", plan), HEADS))
        key, value = (_heads(_project(x, one, "kv_heads", plan), KV_HEADS) for one in (self.key, self.value))
        key, value = _per_query_head(_rotate(key), plan), _per_query_head(value, plan)
        scores = _einsum("bqhd,bthd->bhqt", query, key) / math.sqrt(HEAD_DIM)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        mixed = _einsum("bhqt,bthd->bqhd", weights, value).reshape(*x.shape[:2], _ROWS)
        return _project(mixed, self.out, None, plan, over="heads")


class SwiGLU(eqx.Module):
    """The gated feed-forward block."""

    gate: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    up: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    down: Float[Array, "*layers hidden embed"] = field(names=("hidden", "embed"))

    def __init__(self, key: PRNGKeyArray):
        self.gate, self.up, self.down = _weights(key, (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        gate, up = (_project(x, one, "hidden", plan) for one in (self.gate, self.up))
        return _project(jax.nn.silu(gate) * up, self.down, None, plan, over="hidden")


class Layer(eqx.Module):
    """A transformer layer: attention, then feed-forward, each with a norm before it and a residual connection."""

    attention_norm: Float[Array, "*layers embed"] = field(names=("norm",))
    attention: Attention = field()
    mlp_norm: Float[Array, "*layers embed"] = field(names=("norm",))
    mlp: SwiGLU = field()

    def __init__(self, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.attention_norm, self.attention = jnp.ones(WIDTH), Attention(first)
        self.mlp_norm, self.mlp = jnp.ones(WIDTH), SwiGLU(second)

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        x = x + self.attention(_normed(x, self.attention_norm), plan)
        return x + self.mlp(_normed(x, self.mlp_norm), plan)


class Transformer(eqx.Module):
    """A language model that maps bytes to logits of the next byte."""

    embedding: Float[Array, "vocab embed"] = field(names=("vocab", "embed"))
    # One Layer whose arrays have a leading dimension over layers, so that `scan` can run over it.
    layers: Layer = field(stacked=("layers",))
    norm: Float[Array, " embed"] = field(names=("norm",))
    unembedding: Float[Array, "embed vocab"] = field(names=("embed", "vocab"))

    def __init__(self, *, key: PRNGKeyArray):
        first, middle, last = jax.random.split(key, 3)
        self.embedding = jax.random.normal(first, (VOCAB, WIDTH)) / 2
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(middle, LAYERS))
        self.norm = jnp.ones(WIDTH)
        self.unembedding = jax.random.normal(last, (WIDTH, VOCAB)) / math.sqrt(WIDTH)

    def __call__(
        self, tokens: Int[Array, "batch sequence"], plan: ShardPlan | None = None
    ) -> Float[Array, "batch sequence vocab"]:
        """Returns, for every position, the logits of the byte that follows it.

        **Arguments:**

        - `tokens`: byte values.
        - `plan`: the plan whose mesh and rules shard the activations; with `None` they are not constrained.
        """
        # With 256 byte values, a product with one-hot rows is as cheap as a lookup, and shards like any matrix product.
        rows = _constrain(jax.nn.one_hot(tokens, VOCAB), ("batch", "sequence", None), plan)
        x = _project(rows, self.embedding, None, plan)
        x, _ = jax.lax.scan(lambda x, layer: (layer(x, plan), None), x, self.layers)
        return _project(_normed(x, self.norm), self.unembedding, "vocab", plan)


def loss(model: Transformer, text: Int[Array, "batch length"], plan: ShardPlan | None = None) -> Float[Array, ""]:
    """Returns the mean cross-entropy, in nats per byte, of each byte of `text` after the first, given the bytes before
    it.
    """
    logits = model(text[:, :-1], plan)
    targets = _constrain(jax.nn.one_hot(text[:, 1:], VOCAB), ("batch", "sequence", "vocab"), plan)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * targets, axis=-1))


def _project(
    x: Float[Array, "b s d"],
    weight: Float[Array, "d e"],
    name: str | None,
    plan: ShardPlan | None,
    over: str | None = None,
) -> Float[Array, "b s e"]:
    """Returns `x @ weight`, whose last dimension has this name. The weight is gathered over fsdp first; `over` is the
    name of the dimension that the product sums over, if it stays sharded.
    """
    weight, names = _constrain(weight, (over, name), plan), ("batch", "sequence", name)
    if plan is None or AxisType.Explicit not in plan.mesh.axis_types:
        return _constrain(_einsum("bsd,de->bse", x, weight), names, plan)
    # Under Explicit axes, a contraction over a sharded dimension needs the sharding of its result.
    spec = plan.sharding(names, (*x.shape[:-1], weight.shape[-1])).spec
    return _einsum("bsd,de->bse", x, weight, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, spec))


def _heads(x: Float[Array, "b s rows"], heads: int) -> Float[Array, "b s heads d"]:
    return x.reshape(*x.shape[:2], heads, HEAD_DIM)


def _per_query_head(x: Float[Array, "b s kv_heads d"], plan: ShardPlan | None) -> Float[Array, "b s heads d"]:
    """Returns the key or value heads, each repeated for every query head that uses it, and sharded like the query
    heads.
    """
    batch, length, *_ = x.shape
    group = jnp.broadcast_to(x[:, :, :, None], (batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))
    return _heads(_constrain(group.reshape(batch, length, _ROWS), ("batch", "sequence", "heads"), plan), HEADS)


def _constrain(x: Array, names: tuple[str | None, ...], plan: ShardPlan | None) -> Array:
    return x if plan is None else constrain(x, names, plan)


def _einsum(equation: str, *operands: Array, **kwargs: Any) -> Array:
    # At default precision, accelerators round the factors, and the rounding depends on the shard.
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST, **kwargs)


def _normed(x: Float[Array, "b s embed"], scale: Float[Array, " embed"]) -> Float[Array, "b s embed"]:
    """Returns `x` divided by its root mean square over the last dimension, times `scale`."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x: Float[Array, "b s heads d"]) -> Float[Array, "b s heads d"]:
    """Returns `x` with rotary positions: pairs of elements, one from each half of a head, are rotated by angles that
    grow with the position.
    """
    frequencies = 10_000 ** (-jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _weights(key: PRNGKeyArray, *shapes: tuple[int, int]) -> list[Float[Array, "rows columns"]]:
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(one, shape) / math.sqrt(shape[0]) for one, shape in zip(keys, shapes, strict=True)]
