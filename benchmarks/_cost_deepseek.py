"""The step of a small DeepSeek as MaxText lays it out on four chips: what the order of
maxtext#2579 is asked of.

Its facts are `configs/models/deepseek3-test.yml` and the rules and layers of MaxText in
November 2025: latent attention, three dense layers and 58 of 256 experts with one that
all tokens share, each layer computed again in the backward pass. Tokens go to experts
of their own device: the weights of all experts are gathered, each token is repeated for
its experts, and a ragged product takes them. Under `tensor_transpose` the weights of a
feed-forward block are cut along the width and not along the hidden dimension, so that
what a product leaves must be added up.
"""

import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx import AxisRules, MeshSpec, ShardPlan, constrain, follow, plan

from ._steps import normed


_CUT = ("tensor", "transpose")
RULES = AxisRules(
    [
        ("batch", "fsdp"),
        ("tokens", "fsdp"),
        ("active_heads", _CUT),
        ("active_embed", _CUT),
        ("active_hidden", _CUT),
        ("active_vocab", _CUT),
        ("mlp", "tensor"),
        ("vocab", _CUT),
        ("heads", _CUT),
        ("embed", ("fsdp", "transpose")),
        ("embed", "fsdp"),
        ("rank", ("fsdp", "transpose")),
        ("rank", "fsdp"),
        *((name, None) for name in ("layers", "expert", "head", "norm")),
    ]
)
_ATTENTION = {
    "query_down": ("embed", "rank"),
    "query_up": ("rank", "heads", "head"),
    "keys_down": ("embed", "rank"),
    "keys_up": ("rank", "heads", "head"),
    "out": ("heads", "head", "embed"),
}
_DENSE = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
_EXPERTS = {name: ("expert", *dims) for name, dims in _DENSE.items()}
STREAM = ("batch", None, "active_embed")
HEADS = ("batch", None, "active_heads", None)
HIDDEN = ("batch", None, "active_hidden")
VOCAB = ("batch", None, "active_vocab")


def planned(
    config: Mapping[str, Any], axes: Mapping[str, int], *, sequences: int
) -> tuple[Any, ...]:
    """The mesh, the plans and the step.

    **Arguments:**

    - `config`: the sizes, by name.
    - `axes`: how many devices "fsdp", "tensor" and "transpose" have.
    - `sequences`: of the batch, on each device.
    """
    sizes = {}
    for name in ("fsdp", "tensor", "transpose"):
        sizes[name] = axes.get(name, 1)
    mesh = MeshSpec(sizes)
    ours = plan(_structs(config), mesh, names=_names(), axes=RULES, unused="allow")
    count = sequences * mesh.size
    tokens_shape = (count, config["length"])
    tokens = jax.ShapeDtypeStruct(tokens_shape, jnp.int32)
    batch = plan(
        {"inputs": tokens, "targets": tokens},
        mesh,
        names=("batch", None),
        axes=RULES,
        unused="allow",
    )
    state = follow(_moments, ours)
    plans = {"params": ours, "state": state, "batch": batch}
    return mesh, plans, _step(config, ours)


def _names() -> dict[str, Any]:
    def stacked(tree):
        def with_layers(dims):
            return "layers", *dims

        def is_dims(node):
            return isinstance(node, tuple)

        return jax.tree.map(
            with_layers,
            tree,
            is_leaf=is_dims,
        )

    norms = {"attention_norm": ("norm",), "mlp_norm": ("norm",)}
    mixture = {"router": ("embed", None), "experts": _EXPERTS, "shared": _DENSE}
    dense = {**norms, "attention": _ATTENTION, "mlp": _DENSE}
    mixed = {**norms, "attention": _ATTENTION, "mlp": mixture}
    return {
        "embedding": ("vocab", "embed"),
        "dense": stacked(dense),
        "mixed": stacked(mixed),
        "norm": ("norm",),
        "unembedding": ("embed", "vocab"),
    }


def _structs(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config["width"]
    heads = config["heads"]
    experts = config["experts"]
    whole = config["head_dim"]
    rope = config["rope_dim"]
    value = config["head_dim"]
    attention = {
        "query_down": (width, config["query_rank"]),
        "query_up": (config["query_rank"], heads, whole + rope),
        "keys_down": (width, config["key_rank"] + rope),
        "keys_up": (config["key_rank"], heads, whole + value),
        "out": (heads, value, width),
    }

    def block(hidden: int) -> dict[str, tuple[int, ...]]:
        return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

    many = {}
    for name, shape in block(config["expert_hidden"]).items():
        many[name] = (experts, *shape)
    expert_shapes = block(config["expert_hidden"])
    mixture = {
        "router": (width, experts),
        "experts": many,
        "shared": expert_shapes,
    }
    norms = {"attention_norm": (width,), "mlp_norm": (width,)}

    def struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def stacked(count: int, tree):
        def with_count(shape):
            return struct((count, *shape))

        def is_shape(node):
            return isinstance(node, tuple)

        return jax.tree.map(
            with_count,
            tree,
            is_leaf=is_shape,
        )

    dense_mlp = block(config["hidden"])
    dense = {**norms, "attention": attention, "mlp": dense_mlp}
    mixed_layers = config["layers"] - config["dense_layers"]
    mixed = {**norms, "attention": attention, "mlp": mixture}
    return {
        "embedding": struct((config["vocab"], width)),
        "dense": stacked(
            config["dense_layers"],
            dense,
        ),
        "mixed": stacked(
            mixed_layers,
            mixed,
        ),
        "norm": struct((width,)),
        "unembedding": struct((width, config["vocab"])),
    }


def _moments(params: Any) -> dict[str, Any]:
    def zeros_like(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype)

    zeros = jax.tree.map(zeros_like, params)
    return {"mean": zeros, "square": zeros}


def _blocks_of(laid, config):
    def attended(x: jax.Array, w) -> jax.Array:
        x = laid(x, *STREAM)
        low_query = x @ w["query_down"]
        query = jnp.einsum("bsr,rhk->bshk", low_query, w["query_up"])
        low = x @ w["keys_down"]
        rank = config["key_rank"]
        low_keys = low[..., :rank]
        keys_and_values = jnp.einsum("bsr,rhk->bshk", low_keys, w["keys_up"])
        keys_and_values = laid(keys_and_values, *HEADS)
        key, value = jnp.split(keys_and_values, [config["head_dim"]], axis=-1)
        rope_shape = (*key.shape[:3], config["rope_dim"])
        turned = jnp.broadcast_to(low[..., None, rank:], rope_shape)
        keys = jnp.concatenate([key, turned], axis=-1)
        key = laid(keys, *HEADS)
        laid_query = laid(query, *HEADS)
        mixed = _flash(laid_query, key, value)
        out = jnp.einsum("bshk,hkd->bsd", mixed, w["out"])
        return laid(out, *STREAM)

    def fed(x: jax.Array, w) -> jax.Array:
        gate_input = x @ w["gate"]
        gate = laid(gate_input, *HIDDEN)
        up_input = x @ w["up"]
        raised = laid(up_input, *HIDDEN)
        hidden = jax.nn.silu(gate) * raised
        out = hidden @ w["down"]
        return laid(out, *STREAM)

    return attended, fed


def _step(config: Mapping[str, Any], plan: ShardPlan) -> Callable[..., Any]:
    def laid(x: jax.Array, *names: str | None) -> jax.Array:
        return constrain(x, names, plan)

    attended, fed = _blocks_of(laid, config)

    routed = ft.partial(_routed, config=config, mesh=plan.mesh)

    def layer(mlp: Callable[..., jax.Array], x: jax.Array, w) -> tuple[jax.Array, None]:
        def of_type(leaf):
            return leaf.astype(x.dtype)

        w = jax.tree.map(of_type, w)
        attention_norm = normed(x, w["attention_norm"])
        attention_input = laid(attention_norm, *STREAM)
        attention_out = attended(attention_input, w["attention"])
        x = x + attention_out
        mlp_norm = normed(x, w["mlp_norm"])
        mlp_input = laid(mlp_norm, *STREAM)
        mlp_out = mlp(mlp_input, w["mlp"])
        x = x + mlp_out
        return laid(x, *STREAM), None

    def mixture(x: jax.Array, w) -> jax.Array:
        router_logits = x @ w["router"]
        scores = router_logits.astype(jnp.float32)
        shares = laid(jax.nn.sigmoid(scores), "batch", None, None)
        best, chosen = jax.lax.top_k(shares, config["experts_per_token"])
        weights = best.astype(x.dtype)
        mixed = routed(x, weights, chosen, w["experts"])
        shared = fed(x, w["shared"])
        return laid(mixed, *STREAM) + shared

    def loss(params, batch) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        embedding = table[batch["inputs"]]
        x = laid(embedding, *STREAM)
        dense_layer = jax.checkpoint(ft.partial(layer, fed))
        x, _ = jax.lax.scan(dense_layer, x, params["dense"])
        mixed_layer = jax.checkpoint(ft.partial(layer, mixture))
        x, _ = jax.lax.scan(mixed_layer, x, params["mixed"])
        norm = params["norm"].astype(x.dtype)
        normed_x = normed(x, norm)
        x = laid(normed_x, *STREAM)
        unembedding = params["unembedding"].astype(x.dtype)
        raw_logits = x @ unembedding
        laid_logits = laid(raw_logits, *VOCAB)
        logits = laid_logits.astype(jnp.float32)
        targets = jax.nn.one_hot(batch["targets"], logits.shape[-1])
        targets = laid(targets, *VOCAB)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.sum(logits * targets, axis=-1)
        elements = normalizer - picked
        return jnp.sum(elements)

    return _trained(loss)


def _trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)

        def next_mean(m, g):
            return 0.9 * m + 0.1 * g

        mean = jax.tree.map(next_mean, state["mean"], grads)

        def next_square(v, g):
            return 0.95 * v + 0.05 * g * g

        square = jax.tree.map(next_square, state["square"], grads)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            deviation = jnp.sqrt(v) + 1e-8
            return p - 1e-3 * m / deviation

        new = jax.tree.map(moved, params, mean, square)
        return new, {"mean": mean, "square": square}, value

    return step


def _routed(
    x: jax.Array,
    best: jax.Array,
    chosen: jax.Array,
    w: Any,
    *,
    config: Mapping[str, Any],
    mesh: MeshSpec,
) -> jax.Array:
    """Experts on the tokens of their own device; what is cut along the width is added
    up.
    """
    count = config["experts_per_token"]

    def local(
        x: jax.Array, best: jax.Array, chosen: jax.Array, gate, up, down
    ) -> jax.Array:
        rows = x.shape[0] * x.shape[1]
        width = x.shape[2]
        choices = chosen.reshape(-1)
        order = jnp.argsort(choices)
        flat = x.reshape(rows, width)
        repeated = jnp.repeat(flat, count, axis=0)
        many = repeated[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=config["experts"])
        gate_products = jax.lax.ragged_dot(many, gate, sizes)
        gated = jax.lax.psum(gate_products, "transpose")
        up_products = jax.lax.ragged_dot(many, up, sizes)
        raised = jax.lax.psum(up_products, "transpose")
        hidden = jax.nn.silu(gated) * raised
        out = jax.lax.ragged_dot(hidden, down, sizes)
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
        inverse = jnp.argsort(order)
        back = out[inverse].reshape(rows, count, -1)
        shares = best.reshape(rows, count)
        mixed = jnp.einsum("nkd,nk->nd", back, shares)
        return mixed.reshape(*x.shape[:2], -1)

    in_specs = (
        P("fsdp", None, "transpose"),
        P("fsdp"),
        P("fsdp"),
        P(None, "transpose", "tensor"),
        P(None, "transpose", "tensor"),
        P(None, "tensor", "transpose"),
    )
    inner = jax.shard_map(
        local,
        mesh=mesh.abstract(),
        in_specs=in_specs,
        out_specs=P("fsdp", None, ("transpose", "tensor")),
        check_vma=False,
    )
    return inner(x, best, chosen, w["gate"], w["up"], w["down"])


def _flash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    products = jnp.einsum("bqhd,bthd->bhqt", query, key)
    scores = products.astype(jnp.float32)
    shares = jax.nn.softmax(scores, axis=-1)
    weights = shares.astype(query.dtype)
    return jnp.einsum("bhqt,bthd->bqhd", weights, value)
