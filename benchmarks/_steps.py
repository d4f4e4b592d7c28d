"""Training steps of a small Llama and of a mixture of experts, as plain functions: what
the costs are told of.

Nothing here is run by the suites, only traced and compiled. The arguments of a step are
structs: parameters, the optimizer's state, and a batch; all that is said about sharding
are the names below, which a plan of `_step_plans` lays out.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardfx import ShardPlan, constrain


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a model and its batch are; `experts` is 0 for a dense one."""

    layers: int = 2
    width: int = 64
    hidden: int = 128
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 8
    vocab: int = 256
    batch: int = 16
    length: int = 64
    experts: int = 0
    experts_per_token: int = 2
    dtype: Any = jnp.float32


SMALL = Sizes()
# Large enough that a weight is told from an activation, and small enough to compile in
# seconds.
MIDDLE = Sizes(
    layers=4,
    width=256,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=16,
    vocab=2048,
    batch=16,
    length=256,
)
MIDDLE_EXPERTS = dataclasses.replace(MIDDLE, hidden=256, experts=16)
# As the study's, with as many layers as are asked for: 0.32 billion parameters in 16.
STUDY = Sizes(
    layers=16,
    width=1024,
    hidden=4096,
    heads=16,
    kv_heads=8,
    head_dim=64,
    vocab=32768,
    batch=16,
    length=1024,
    dtype=jnp.bfloat16,
)
STUDY_EXPERTS = dataclasses.replace(STUDY, hidden=1024, experts=16)
# Llama 3.1 405B.
LARGE = dataclasses.replace(
    STUDY,
    layers=126,
    width=16384,
    hidden=53248,
    heads=128,
    head_dim=128,
    vocab=128256,
    batch=256,
    length=8192,
)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is written: one `scan` over the layers or one after another, and what
    the backward pass keeps.

    `exchange` is how a mixture hands tokens to experts: constrained "once", to experts
    alone, or "twice", to tokens first and then to experts.
    """

    scan: bool = True
    remat: bool = False
    optimizer: Literal["adamw", "momentum"] = "adamw"
    exchange: Literal["once", "twice"] = "twice"


# The names of the dimensions of each parameter; `layers` comes before those of a layer
# if they are stacked.
ATTENTION = {
    "query": ("embed", "heads", "head_dim"),
    "key": ("embed", "kv_heads", "head_dim"),
    "value": ("embed", "kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
}
DENSE = {
    "gate": ("embed", "hidden"),
    "up": ("embed", "hidden"),
    "down": ("hidden", "embed"),
}
MIXTURE = {
    "router": ("embed", None),
    "gate": ("expert", "embed", "hidden"),
    "up": ("expert", "embed", "hidden"),
    "down": ("expert", "hidden", "embed"),
}
# And of the activations: the stream between blocks, and inside of them, where the
# sequence may be whole.
STREAM = ("batch", "sequence", "width")
INSIDE = ("batch", "inner", "width")
QUERIES = ("batch", "inner", "heads", None)
KEYS = ("batch", "keys", "kv_heads", None)


def parameter_names(sizes: Sizes, strategy: Way) -> dict[str, Any]:
    """The logical names of each parameter."""
    layer = {
        "attention_norm": ("norm",),
        "attention": ATTENTION,
        "mlp_norm": ("norm",),
        "mlp": MIXTURE if sizes.experts else DENSE,
    }
    stacked = jax.tree.map(lambda names: ("layers", *names), layer, is_leaf=_is_names)
    if strategy.scan:
        layers = stacked
    else:
        layers = [layer] * sizes.layers
    return {
        "embedding": ("vocab", "embed"),
        "layers": layers,
        "norm": ("norm",),
        "unembedding": ("embed", "vocab"),
    }


def parameters(sizes: Sizes, strategy: Way) -> dict[str, Any]:
    """The parameters, as structs."""
    size = {
        "layers": sizes.layers,
        "embed": sizes.width,
        "norm": sizes.width,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab": sizes.vocab,
        "expert": sizes.experts,
        None: sizes.experts,
    }

    def struct(names: tuple) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(size[name] for name in names), sizes.dtype)

    return jax.tree.map(struct, parameter_names(sizes, strategy), is_leaf=_is_names)


def batch(sizes: Sizes) -> dict[str, jax.ShapeDtypeStruct]:
    """Tokens, and the tokens that come after them."""
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


BATCH_NAMES = {"tokens": ("batch", "inner"), "targets": ("batch", "inner")}


def optimizer_state(params: Any, strategy: Way) -> dict[str, Any]:
    """What the optimizer begins with: two moments and a count, or one momentum."""
    zeros_like = lambda leaf: jnp.zeros(leaf.shape, jnp.float32)
    zeros = jax.tree.map(zeros_like, params)
    if strategy.optimizer == "momentum":
        return {"momentum": zeros}
    return {"mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}


def train_step(
    sizes: Sizes, strategy: Way, plan: ShardPlan
) -> Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]:
    """A step of training: from parameters, state and batch to the next parameters,
    state, and the loss.

    **Arguments:**

    - `sizes`, `way`: of the model, and how its step is written.
    - `plan`: the plan of the parameters, whose rules lay out the activations.
    """
    model = _Model(sizes, strategy, plan)

    def step(params, state, batch) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(model.loss)(params, batch)
        params, state = _updated(params, state, gradients)
        return params, state, value

    return step


@dataclasses.dataclass(frozen=True)
class _Model:
    sizes: Sizes
    way: Way
    plan: ShardPlan

    def loss(self, params: Any, batch: Any) -> jax.Array:
        logits = self.logits(params, batch["tokens"]).astype(jnp.float32)
        targets = jax.nn.one_hot(batch["targets"], self.sizes.vocab)
        elements = logits * self.laid(targets, ("batch", "inner", "vocab"))
        picked = jnp.sum(elements, axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        x = self.laid(params["embedding"][tokens], STREAM)
        if self.way.remat:
            layer = jax.checkpoint(self.layer)
        else:
            layer = self.layer
        if self.way.scan:
            x, _ = jax.lax.scan(
                lambda x, weights: (layer(x, weights), None), x, params["layers"]
            )
        else:
            for weights in params["layers"]:
                x = layer(x, weights)
        x = self.laid(normed(x, params["norm"]), INSIDE)
        return self.laid(x @ params["unembedding"], ("batch", "inner", "vocab"))

    def layer(self, x: jax.Array, weights: Any) -> jax.Array:
        attention_input = self.laid(normed(x, weights["attention_norm"]), INSIDE)
        x = x + self.attention(
            attention_input,
            weights["attention"],
        )
        if self.sizes.experts:
            mlp = self.mixture
        else:
            mlp = self.mlp
        mlp_input = self.laid(normed(x, weights["mlp_norm"]), INSIDE)
        return x + mlp(mlp_input, weights["mlp"])

    def attention(self, x: jax.Array, weights: Any) -> jax.Array:
        query = jnp.einsum("bsd,dhk->bshk", x, weights["query"])
        query = self.laid(_rotated(query), QUERIES)
        key = jnp.einsum("bsd,dhk->bshk", x, weights["key"])
        key = self.laid(_rotated(key), KEYS)
        value = jnp.einsum("bsd,dhk->bshk", x, weights["value"])
        value = self.laid(value, KEYS)
        key, value = (self.per_query_head(projection) for projection in (key, value))
        scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / math.sqrt(
            self.sizes.head_dim
        )
        length = x.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        masked = jnp.where(causal, scores.astype(jnp.float32), -1e30)
        mixing = jax.nn.softmax(masked, axis=-1).astype(x.dtype)
        mixed = self.laid(jnp.einsum("bhqt,bthd->bqhd", mixing, value), QUERIES)
        return self.laid(jnp.einsum("bshk,hkd->bsd", mixed, weights["out"]), STREAM)

    def per_query_head(self, x: jax.Array) -> jax.Array:
        group = self.sizes.heads // self.sizes.kv_heads
        repeated_shape = (*x.shape[:3], group, x.shape[3])
        repeated = jnp.broadcast_to(x[:, :, :, None], repeated_shape)
        fused = repeated.reshape(*x.shape[:2], self.sizes.heads, x.shape[3])
        return self.laid(fused, ("batch", "keys", "heads", None))

    def mlp(self, x: jax.Array, weights: Any) -> jax.Array:
        names = ("batch", "inner", "hidden")
        gate = self.laid(x @ weights["gate"], names)
        up = self.laid(x @ weights["up"], names)
        hidden = jax.nn.silu(gate) * up
        return self.laid((hidden) @ weights["down"], STREAM)

    def mixture(self, x: jax.Array, weights: Any) -> jax.Array:
        """Each row of the batch gives each expert as many tokens as it has room for;
        what does not fit is left out.
        """
        sizes = self.sizes
        length = x.shape[1]
        room = max(1, math.ceil(length * sizes.experts_per_token / sizes.experts))
        scores = (x @ weights["router"]).astype(jnp.float32)
        shares = jax.nn.softmax(scores, axis=-1)
        best, chosen = jax.lax.top_k(shares, sizes.experts_per_token)
        elements = jax.nn.one_hot(chosen, sizes.experts) * best[..., None]
        total = jnp.sum(elements, axis=2)
        is_wanted = total > 0
        earlier = jnp.cumsum(is_wanted.astype(jnp.int32), axis=1)
        place = jnp.where(is_wanted, earlier - 1, room)
        combine = total[..., None] * jax.nn.one_hot(place, room)
        combine = self.laid(combine.astype(x.dtype), ("batch", "inner", None, None))
        is_sent = (combine > 0).astype(x.dtype)
        sent = jnp.einsum("bsec,bsd->ebcd", is_sent, x)
        done = self.experts(self.handed(sent, to_experts=True), weights)
        back = jnp.einsum(
            "bsec,ebcd->bsd", combine, self.handed(done, to_experts=False)
        )
        return self.laid(back, STREAM)

    def handed(self, x: jax.Array, *, to_experts: bool) -> jax.Array:
        """Slots (expert, batch, place, width) on their way from the devices of their
        tokens to those of experts.
        """
        by_tokens = (None, "batch", None, "width")
        by_experts = ("expert", "expert_batch", None, "width")
        if self.way.exchange == "once":
            return self.laid(x, by_experts)
        if to_experts:
            first = by_tokens
            second = by_experts
        else:
            first = by_experts
            second = by_tokens
        return self.laid(self.laid(x, first), second)

    def experts(self, x: jax.Array, weights: Any) -> jax.Array:
        names = ("expert", "expert_batch", None, "hidden")
        gate = jnp.einsum("ebcd,edf->ebcf", x, weights["gate"])
        gate = self.laid(gate, names)
        up = jnp.einsum("ebcd,edf->ebcf", x, weights["up"])
        up = self.laid(up, names)
        hidden = jax.nn.silu(gate) * up
        return jnp.einsum("ebcf,efd->ebcd", hidden, weights["down"])

    def laid(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        return constrain(x, names, self.plan)


def normed(x: jax.Array, scale: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """The root mean square norm, in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(mean_square + epsilon)
    return scaled.astype(x.dtype) * scale


def _rotated(x: jax.Array) -> jax.Array:
    """Turns the two halves of each head as planes, by angles that grow with the
    position.
    """
    half = x.shape[-1] // 2
    cases = (x.shape[1], half)
    positions, planes = (jnp.arange(size, dtype=jnp.float32) for size in cases)
    angles = positions[:, None, None] * 10_000 ** (-planes / half)
    first_half, right = jnp.split(x, 2, axis=-1)
    cos = jnp.cos(angles).astype(x.dtype)
    sin = jnp.sin(angles).astype(x.dtype)
    turned_first = first_half * cos - right * sin
    turned_right = right * cos + first_half * sin
    return jnp.concatenate([turned_first, turned_right], axis=-1)


def _updated(
    params: Any, state: Any, gradients: Any, rate: float = 1e-3
) -> tuple[Any, Any]:
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    if "momentum" in state:
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], wide)
        return jax.tree.map(
            lambda p, m: p - (rate * m).astype(p.dtype), params, momentum
        ), {"momentum": momentum}
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], wide)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["square"], wide)
    first, second = (1 - rate ** count.astype(jnp.float32) for rate in (0.9, 0.99))

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(v / second) + 1e-8
        decay = 0.01 * p.astype(jnp.float32)
        change = m / first / (root) + decay
        return p - (rate * change).astype(p.dtype)

    new_params = jax.tree.map(moved, params, mean, square)
    return new_params, {
        "mean": mean,
        "square": square,
        "count": count,
    }


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple)
