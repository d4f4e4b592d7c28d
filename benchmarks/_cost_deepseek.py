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
    mesh = MeshSpec(
        {name: axes.get(name, 1) for name in ("fsdp", "tensor", "transpose")}
    )
    ours = plan(_structs(config), mesh, names=_names(), axes=RULES, unused="allow")
    count = sequences * mesh.size
    tokens = jax.ShapeDtypeStruct((count, config["length"]), jnp.int32)
    batch = plan(
        {"inputs": tokens, "targets": tokens},
        mesh,
        names=("batch", None),
        axes=RULES,
        unused="allow",
    )
    plans = {"params": ours, "state": follow(_moments, ours), "batch": batch}
    return mesh, plans, _step(config, ours)


def _names() -> dict[str, Any]:
    def stacked(tree: Any) -> Any:
        return jax.tree.map(
            lambda dims: ("layers", *dims),
            tree,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    norms = {"attention_norm": ("norm",), "mlp_norm": ("norm",)}
    mixture = {"router": ("embed", None), "experts": _EXPERTS, "shared": _DENSE}
    return {
        "embedding": ("vocab", "embed"),
        "dense": stacked({**norms, "attention": _ATTENTION, "mlp": _DENSE}),
        "mixed": stacked({**norms, "attention": _ATTENTION, "mlp": mixture}),
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

    many = {
        name: (experts, *shape)
        for name, shape in block(config["expert_hidden"]).items()
    }
    mixture = {
        "router": (width, experts),
        "experts": many,
        "shared": block(config["expert_hidden"]),
    }
    norms = {"attention_norm": (width,), "mlp_norm": (width,)}

    def struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def stacked(count: int, tree: Any) -> Any:
        return jax.tree.map(
            lambda shape: struct((count, *shape)),
            tree,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    return {
        "embedding": struct((config["vocab"], width)),
        "dense": stacked(
            config["dense_layers"],
            {**norms, "attention": attention, "mlp": block(config["hidden"])},
        ),
        "mixed": stacked(
            config["layers"] - config["dense_layers"],
            {**norms, "attention": attention, "mlp": mixture},
        ),
        "norm": struct((width,)),
        "unembedding": struct((width, config["vocab"])),
    }


def _moments(params: Any) -> dict[str, Any]:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return {"mean": zeros, "square": zeros}


def _step(config: Mapping[str, Any], plan: ShardPlan) -> Callable[..., Any]:
    def laid(x: jax.Array, *names: str | None) -> jax.Array:
        return constrain(x, names, plan)

    def attended(x: jax.Array, w: Any) -> jax.Array:
        x = laid(x, *STREAM)
        query = jnp.einsum("bsr,rhk->bshk", x @ w["query_down"], w["query_up"])
        low = x @ w["keys_down"]
        rank = config["key_rank"]
        keys_and_values = jnp.einsum("bsr,rhk->bshk", low[..., :rank], w["keys_up"])
        keys_and_values = laid(keys_and_values, *HEADS)
        key, value = jnp.split(keys_and_values, [config["head_dim"]], axis=-1)
        rope_shape = (*key.shape[:3], config["rope_dim"])
        turned = jnp.broadcast_to(low[..., None, rank:], rope_shape)
        key = laid(jnp.concatenate([key, turned], axis=-1), *HEADS)
        mixed = _flash(laid(query, *HEADS), key, value)
        out = jnp.einsum("bshk,hkd->bsd", mixed, w["out"])
        return laid(out, *STREAM)

    def fed(x: jax.Array, w: Any) -> jax.Array:
        gate = laid(x @ w["gate"], *HIDDEN)
        hidden = jax.nn.silu(gate) * laid(x @ w["up"], *HIDDEN)
        return laid(hidden @ w["down"], *STREAM)

    routed = ft.partial(_routed, config=config, mesh=plan.mesh)

    def layer(
        mlp: Callable[..., jax.Array], x: jax.Array, w: Any
    ) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        attention_input = laid(normed(x, w["attention_norm"]), *STREAM)
        x = x + attended(attention_input, w["attention"])
        mlp_input = laid(normed(x, w["mlp_norm"]), *STREAM)
        x = x + mlp(mlp_input, w["mlp"])
        return laid(x, *STREAM), None

    def mixture(x: jax.Array, w: Any) -> jax.Array:
        scores = (x @ w["router"]).astype(jnp.float32)
        shares = laid(jax.nn.sigmoid(scores), "batch", None, None)
        best, chosen = jax.lax.top_k(shares, config["experts_per_token"])
        mixed = routed(x, best.astype(x.dtype), chosen, w["experts"])
        return laid(mixed, *STREAM) + fed(x, w["shared"])

    def loss(params: Any, batch: Any) -> jax.Array:
        embedding = params["embedding"].astype(jnp.bfloat16)[batch["inputs"]]
        x = laid(embedding, *STREAM)
        dense_layer = jax.checkpoint(ft.partial(layer, fed))
        x, _ = jax.lax.scan(dense_layer, x, params["dense"])
        mixed_layer = jax.checkpoint(ft.partial(layer, mixture))
        x, _ = jax.lax.scan(mixed_layer, x, params["mixed"])
        norm = params["norm"].astype(x.dtype)
        x = laid(normed(x, norm), *STREAM)
        unembedding = params["unembedding"].astype(x.dtype)
        logits = laid(x @ unembedding, *VOCAB).astype(jnp.float32)
        targets = jax.nn.one_hot(batch["targets"], logits.shape[-1])
        targets = laid(targets, *VOCAB)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        elements = normalizer - jnp.sum(logits * targets, axis=-1)
        return jnp.sum(elements)

    return _trained(loss)


def _trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(
            lambda v, g: 0.95 * v + 0.05 * g * g, state["square"], grads
        )

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)

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
        x: jax.Array, best: jax.Array, chosen: jax.Array, gate: Any, up: Any, down: Any
    ) -> jax.Array:
        rows = x.shape[0] * x.shape[1]
        width = x.shape[2]
        order = jnp.argsort(chosen.reshape(-1))
        many = jnp.repeat(x.reshape(rows, width), count, axis=0)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=config["experts"])
        gated = jax.lax.psum(jax.lax.ragged_dot(many, gate, sizes), "transpose")
        raised = jax.lax.psum(jax.lax.ragged_dot(many, up, sizes), "transpose")
        out = jax.lax.ragged_dot(jax.nn.silu(gated) * raised, down, sizes)
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
        back = out[jnp.argsort(order)].reshape(rows, count, -1)
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
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bhqt,bthd->bqhd", weights, value)
