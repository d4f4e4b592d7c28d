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

    def with_layers(names):
        return "layers", *names

    stacked = jax.tree.map(with_layers, layer, is_leaf=_is_names)
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
        shape = tuple(size[name] for name in names)
        return jax.ShapeDtypeStruct(shape, sizes.dtype)

    names = parameter_names(sizes, strategy)
    return jax.tree.map(struct, names, is_leaf=_is_names)


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
    count = jnp.zeros((), jnp.int32)
    return {"mean": zeros, "square": zeros, "count": count}


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
        answers = self.logits(params, batch["tokens"])
        logits = answers.astype(jnp.float32)
        targets = jax.nn.one_hot(batch["targets"], self.sizes.vocab)
        laid_targets = self.laid(targets, ("batch", "inner", "vocab"))
        elements = logits * laid_targets
        picked = jnp.sum(elements, axis=-1)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        return jnp.mean(normalizer - picked)

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        embedded = params["embedding"][tokens]
        x = self.laid(embedded, STREAM)
        if self.way.remat:
            layer = jax.checkpoint(self.layer)
        else:
            layer = self.layer
        if self.way.scan:

            def step(x, weights):
                return layer(x, weights), None

            x, _ = jax.lax.scan(step, x, params["layers"])
        else:
            for weights in params["layers"]:
                x = layer(x, weights)
        normed_x = normed(x, params["norm"])
        x = self.laid(normed_x, INSIDE)
        logits = x @ params["unembedding"]
        return self.laid(logits, ("batch", "inner", "vocab"))

    def layer(self, x: jax.Array, weights: Any) -> jax.Array:
        normed_x = normed(x, weights["attention_norm"])
        attention_input = self.laid(normed_x, INSIDE)
        attended = self.attention(
            attention_input,
            weights["attention"],
        )
        x = x + attended
        if self.sizes.experts:
            mlp = self.mixture
        else:
            mlp = self.mlp
        normed_mlp = normed(x, weights["mlp_norm"])
        mlp_input = self.laid(normed_mlp, INSIDE)
        mlp_out = mlp(mlp_input, weights["mlp"])
        return x + mlp_out

    def attention(self, x: jax.Array, weights: Any) -> jax.Array:
        query = jnp.einsum("bsd,dhk->bshk", x, weights["query"])
        turned_query = _rotated(query)
        query = self.laid(turned_query, QUERIES)
        key = jnp.einsum("bsd,dhk->bshk", x, weights["key"])
        turned_key = _rotated(key)
        key = self.laid(turned_key, KEYS)
        value = jnp.einsum("bsd,dhk->bshk", x, weights["value"])
        value = self.laid(value, KEYS)
        key, value = (self.per_query_head(projection) for projection in (key, value))
        root = math.sqrt(self.sizes.head_dim)
        products = jnp.einsum("bqhd,bthd->bhqt", query, key)
        scores = products / root
        length = x.shape[1]
        square = jnp.ones((length, length), bool)
        causal = jnp.tril(square)
        wide = scores.astype(jnp.float32)
        masked = jnp.where(causal, wide, -1e30)
        shares = jax.nn.softmax(masked, axis=-1)
        mixing = shares.astype(x.dtype)
        by_heads = jnp.einsum("bhqt,bthd->bqhd", mixing, value)
        mixed = self.laid(by_heads, QUERIES)
        out = jnp.einsum("bshk,hkd->bsd", mixed, weights["out"])
        return self.laid(out, STREAM)

    def per_query_head(self, x: jax.Array) -> jax.Array:
        group = self.sizes.heads // self.sizes.kv_heads
        repeated_shape = (*x.shape[:3], group, x.shape[3])
        columns = x[:, :, :, None]
        repeated = jnp.broadcast_to(columns, repeated_shape)
        fused = repeated.reshape(*x.shape[:2], self.sizes.heads, x.shape[3])
        return self.laid(fused, ("batch", "keys", "heads", None))

    def mlp(self, x: jax.Array, weights: Any) -> jax.Array:
        names = ("batch", "inner", "hidden")
        gate_product = x @ weights["gate"]
        gate = self.laid(gate_product, names)
        up_product = x @ weights["up"]
        up = self.laid(up_product, names)
        hidden = jax.nn.silu(gate) * up
        out = (hidden) @ weights["down"]
        return self.laid(out, STREAM)

    def mixture(self, x: jax.Array, weights: Any) -> jax.Array:
        """Each row of the batch gives each expert as many tokens as it has room for;
        what does not fit is left out.
        """
        sizes = self.sizes
        length = x.shape[1]
        tokens_per_expert = length * sizes.experts_per_token / sizes.experts
        room = max(1, math.ceil(tokens_per_expert))
        router_logits = x @ weights["router"]
        scores = router_logits.astype(jnp.float32)
        shares = jax.nn.softmax(scores, axis=-1)
        best, chosen = jax.lax.top_k(shares, sizes.experts_per_token)
        choices = jax.nn.one_hot(chosen, sizes.experts)
        elements = choices * best[..., None]
        total = jnp.sum(elements, axis=2)
        is_wanted = total > 0
        wanted = is_wanted.astype(jnp.int32)
        earlier = jnp.cumsum(wanted, axis=1)
        place = jnp.where(is_wanted, earlier - 1, room)
        places = jax.nn.one_hot(place, room)
        combine = total[..., None] * places
        low_combine = combine.astype(x.dtype)
        combine = self.laid(low_combine, ("batch", "inner", None, None))
        is_sent = (combine > 0).astype(x.dtype)
        sent = jnp.einsum("bsec,bsd->ebcd", is_sent, x)
        handed = self.handed(sent, to_experts=True)
        done = self.experts(handed, weights)
        returned = self.handed(done, to_experts=False)
        back = jnp.einsum("bsec,ebcd->bsd", combine, returned)
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
        laid = self.laid(x, first)
        return self.laid(laid, second)

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
    scale_of_rows = jax.lax.rsqrt(mean_square + epsilon)
    scaled = wide * scale_of_rows
    return scaled.astype(x.dtype) * scale


def _rotated(x: jax.Array) -> jax.Array:
    """Turns the two halves of each head as planes, by angles that grow with the
    position.
    """
    half = x.shape[-1] // 2
    cases = (x.shape[1], half)
    positions, planes = (jnp.arange(size, dtype=jnp.float32) for size in cases)
    rates = 10_000 ** (-planes / half)
    angles = positions[:, None, None] * rates
    first_half, right = jnp.split(x, 2, axis=-1)
    cosine = jnp.cos(angles)
    cos = cosine.astype(x.dtype)
    sine = jnp.sin(angles)
    sin = sine.astype(x.dtype)
    turned_first = first_half * cos - right * sin
    turned_right = right * cos + first_half * sin
    return jnp.concatenate([turned_first, turned_right], axis=-1)


def _updated(
    params: Any, state: Any, gradients: Any, rate: float = 1e-3
) -> tuple[Any, Any]:
    def to_wide(g):
        return g.astype(jnp.float32)

    wide = jax.tree.map(to_wide, gradients)
    if "momentum" in state:

        def next_momentum(m, g):
            return 0.9 * m + g

        momentum = jax.tree.map(next_momentum, state["momentum"], wide)

        def moved_by_momentum(p, m):
            return p - (rate * m).astype(p.dtype)

        return jax.tree.map(moved_by_momentum, params, momentum), {"momentum": momentum}
    count = state["count"] + 1

    def next_mean(m, g):
        return 0.9 * m + 0.1 * g

    mean = jax.tree.map(next_mean, state["mean"], wide)

    def next_square(v, g):
        return 0.99 * v + 0.01 * g * g

    square = jax.tree.map(next_square, state["square"], wide)
    first, second = (1 - rate ** count.astype(jnp.float32) for rate in (0.9, 0.99))

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        unbiased_square = v / second
        root = jnp.sqrt(unbiased_square) + 1e-8
        decay = 0.01 * p.astype(jnp.float32)
        unbiased_mean = m / first
        change = unbiased_mean / (root) + decay
        return p - (rate * change).astype(p.dtype)

    new_params = jax.tree.map(moved, params, mean, square)
    return new_params, {
        "mean": mean,
        "square": square,
        "count": count,
    }


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple)
