"""A small decoder-only transformer over bytes. It declares its sharding only through logical names, of fields and
activations.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from shardfx import AxisRules, ShardPlan, constrain, correct, field, resolve


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

_ROWS = ("batch", "sequence", None)


class Attention(eqx.Module):
    """Grouped-query attention with rotary positions: each key and value head serves several query heads."""

    query: Float[Array, "*layers embed heads"] = field(names=("embed", "heads"))
    key: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    value: Float[Array, "*layers embed kv_heads"] = field(names=("embed", "kv_heads"))
    out: Float[Array, "*layers heads embed"] = field(names=("heads", "embed"))

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.query = _normal(keys[0], WIDTH, HEADS * HEAD_DIM)
        self.key = _normal(keys[1], WIDTH, KV_HEADS * HEAD_DIM)
        self.value = _normal(keys[2], WIDTH, KV_HEADS * HEAD_DIM)
        self.out = _normal(keys[3], HEADS * HEAD_DIM, WIDTH)

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        batch, length, _ = x.shape
        query = _project(x, self.query, (None, "heads"), ("batch", "sequence", "heads"), plan)
        key = _project(x, self.key, (None, "kv_heads"), ("batch", "sequence", "kv_heads"), plan)
        value = _project(x, self.value, (None, "kv_heads"), ("batch", "sequence", "kv_heads"), plan)
        query = _rotate(query.reshape(batch, length, HEADS, HEAD_DIM))
        key = _per_query_head(_rotate(key.reshape(batch, length, KV_HEADS, HEAD_DIM)), plan)
        value = _per_query_head(value.reshape(batch, length, KV_HEADS, HEAD_DIM), plan)
        scores = _einsum("bqhd,bthd->bhqt", query, key) / math.sqrt(HEAD_DIM)
        weights = jax.nn.softmax(jnp.where(_causal(length), scores, -jnp.inf), axis=-1)
        mixed = _einsum("bhqt,bthd->bqhd", weights, value).reshape(batch, length, HEADS * HEAD_DIM)
        return _project(mixed, self.out, ("heads", None), _ROWS, plan)


class SwiGLU(eqx.Module):
    """The gated feed-forward block."""

    gate: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    up: Float[Array, "*layers embed hidden"] = field(names=("embed", "hidden"))
    down: Float[Array, "*layers hidden embed"] = field(names=("hidden", "embed"))

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.gate = _normal(keys[0], WIDTH, HIDDEN)
        self.up = _normal(keys[1], WIDTH, HIDDEN)
        self.down = _normal(keys[2], HIDDEN, WIDTH)

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        gate = _project(x, self.gate, (None, "hidden"), ("batch", "sequence", "hidden"), plan)
        up = _project(x, self.up, (None, "hidden"), ("batch", "sequence", "hidden"), plan)
        return _project(jax.nn.silu(gate) * up, self.down, ("hidden", None), _ROWS, plan)


class RMSNorm(eqx.Module):
    """Divides by the root mean square over the last dimension, and multiplies by learned scales."""

    scale: Float[Array, "*layers embed"] = field(names=("norm",))

    def __init__(self):
        self.scale = jnp.ones(WIDTH)

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s embed"]:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * self.scale


class Layer(eqx.Module):
    """A transformer layer: attention, then feed-forward, each with a norm before it and a residual connection."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __init__(self, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.attention_norm, self.attention = RMSNorm(), Attention(key=first)
        self.mlp_norm, self.mlp = RMSNorm(), SwiGLU(key=second)

    def __call__(self, x: Float[Array, "b s embed"], plan: ShardPlan | None) -> Float[Array, "b s embed"]:
        x = x + self.attention(self.attention_norm(x), plan)
        return x + self.mlp(self.mlp_norm(x), plan)


class Transformer(eqx.Module):
    """A language model that maps bytes to logits of the next byte."""

    embedding: Float[Array, "vocab embed"] = field(names=("vocab", "embed"))
    # One Layer whose arrays have a leading dimension over layers, so that `scan` can run over it.
    layers: Layer = field(stacked=("layers",))
    norm: RMSNorm = field()
    unembedding: Float[Array, "embed vocab"] = field(names=("embed", "vocab"))

    def __init__(self, *, key: PRNGKeyArray):
        first, middle, last = jax.random.split(key, 3)
        self.embedding = jax.random.normal(first, (VOCAB, WIDTH)) / 2
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(middle, LAYERS))
        self.norm = RMSNorm()
        self.unembedding = _normal(last, WIDTH, VOCAB)

    def __call__(
        self, tokens: Int[Array, "batch sequence"], plan: ShardPlan | None = None
    ) -> Float[Array, "batch sequence vocab"]:
        """Returns, for every position, the logits of the byte that follows it.

        **Arguments:**

        - `tokens`: byte values.
        - `plan`: the plan whose mesh and rules shard the activations; with `None` they are not constrained.
        """
        # With 256 byte values, a product with one-hot rows is as cheap as a lookup, and shards like any matrix product.
        rows = _constrain(jax.nn.one_hot(tokens, VOCAB), _ROWS, plan)
        x = _project(rows, self.embedding, (None, None), _ROWS, plan)
        x, _ = jax.lax.scan(lambda x, layer: (layer(x, plan), None), x, self.layers)
        return _project(self.norm(x), self.unembedding, (None, "vocab"), ("batch", "sequence", "vocab"), plan)


def loss(model: Transformer, text: Int[Array, "batch length"], plan: ShardPlan | None = None) -> Float[Array, ""]:
    """Returns the mean cross-entropy, in nats per byte, of each byte of `text` after the first, given the bytes before
    it.
    """
    logits = model(text[:, :-1], plan)
    targets = _constrain(jax.nn.one_hot(text[:, 1:], VOCAB), ("batch", "sequence", "vocab"), plan)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * targets, axis=-1))


def _project(x, weight, weight_names: tuple, names: tuple, plan: ShardPlan | None) -> Float[Array, "b s d"]:
    """Returns `x @ weight`, with the weight constrained to `weight_names` first (so gathered over fsdp) and the product
    to `names`.
    """
    weight = _constrain(weight, weight_names, plan)
    if plan is None or AxisType.Explicit not in plan.mesh.axis_types:
        return _constrain(_einsum("bsd,de->bse", x, weight), names, plan)
    # Under Explicit axes, a contraction over a sharded dimension needs the sharding of its result.
    shape, units = (*x.shape[:-1], weight.shape[-1]), dict(AXIS_RULES.units)
    spec = correct(
        resolve(names, AXIS_RULES).spec, shape, plan.mesh, units=tuple(units.get(name, 1) for name in names)
    ).spec
    return _einsum("bsd,de->bse", x, weight, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, spec))


def _per_query_head(x: Float[Array, "b s kv_heads d"], plan: ShardPlan | None) -> Float[Array, "b s heads d"]:
    """Returns the key or value heads, each repeated for every query head that uses it, and sharded like the query
    heads.
    """
    batch, length, *_ = x.shape
    group = jnp.broadcast_to(x[:, :, :, None], (batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))
    fused = _constrain(group.reshape(batch, length, HEADS * HEAD_DIM), ("batch", "sequence", "heads"), plan)
    return fused.reshape(batch, length, HEADS, HEAD_DIM)


def _constrain(x: Array, names: tuple, plan: ShardPlan | None) -> Array:
    return x if plan is None else constrain(x, names, plan)


def _einsum(equation: str, *operands: Array, **kwargs) -> Array:
    # At default precision, accelerators round the factors, and the rounding depends on the shard.
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST, **kwargs)


def _causal(length: int) -> Bool[Array, "length length"]:
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def _rotate(x: Float[Array, "b s *heads d"]) -> Float[Array, "b s *heads d"]:
    """Applies rotary positions: rotates pairs of elements, one from each half of a head, by angles that grow with the
    position.
    """
    frequencies = 10_000 ** (-jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), HEAD_DIM // 2)
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _normal(key: PRNGKeyArray, rows: int, columns: int) -> Float[Array, "rows columns"]:
    return jax.random.normal(key, (rows, columns)) / math.sqrt(rows)
