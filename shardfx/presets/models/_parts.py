"""What models are built of. Weights lie as torch lays them out, `[out, in]`; every leaf is its own object."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp


Tree = dict[str, Any]


def leaf(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """One array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)


def weight(*shape: int) -> Tree:
    """A module with nothing but a weight."""
    return {"weight": leaf(*shape)}


def dense(out: int, into: int, *, bias: bool = True) -> Tree:
    """A linear layer."""
    return {**weight(out, into), "bias": leaf(out)} if bias else weight(out, into)


def scale_and_bias(size: int) -> Tree:
    """A LayerNorm."""
    return {"weight": leaf(size), "bias": leaf(size)}


def numbered(count: int, make: Callable[[int], Tree]) -> Tree:
    """`count` modules by their number, as a checkpoint names them."""
    return {str(index): make(index) for index in range(count)}


def gated_mlp(embed: int, hidden: int) -> Tree:
    """The gate, up and down projections of a gated feed-forward block."""
    return {
        "gate_proj": weight(hidden, embed),
        "up_proj": weight(hidden, embed),
        "down_proj": weight(embed, hidden),
    }


def routed_mlp(embed: int, hidden: int, experts: int) -> Tree:
    """A router and gated feed-forward blocks that it chooses from."""
    return {"gate": weight(experts, embed), "experts": numbered(experts, lambda _: gated_mlp(embed, hidden))}


def grouped_attention(
    embed: int, heads: int, kv_heads: int, head_dim: int, *, qkv_bias: bool = False, qk_norm: bool = False
) -> Tree:
    """The projections of grouped-query attention, heads and head_dim fused."""
    projections = {
        "q_proj": dense(heads * head_dim, embed, bias=qkv_bias),
        "k_proj": dense(kv_heads * head_dim, embed, bias=qkv_bias),
        "v_proj": dense(kv_heads * head_dim, embed, bias=qkv_bias),
        "o_proj": weight(embed, heads * head_dim),
    }
    return projections | ({"q_norm": weight(head_dim), "k_norm": weight(head_dim)} if qk_norm else {})


def latent_attention(embed: int, heads: int, *, q_lora: int, kv_lora: int, nope: int, rope: int, value: int) -> Tree:
    """The projections of multi-head latent attention; the query is compressed unless `q_lora` is 0."""
    query = {
        "q_a_proj": weight(q_lora, embed),
        "q_a_layernorm": weight(q_lora),
        "q_b_proj": weight(heads * (nope + rope), q_lora),
    }
    return {
        **(query if q_lora else {"q_proj": weight(heads * (nope + rope), embed)}),
        "kv_a_proj_with_mqa": weight(kv_lora + rope, embed),
        "kv_a_layernorm": weight(kv_lora),
        "kv_b_proj": weight(heads * (nope + value), kv_lora),
        "o_proj": weight(embed, heads * value),
    }


NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def block(embed: int, attention: Tree, feed_forward: Tree, norms: Iterable[str] = NORMS) -> Tree:
    """A layer of a decoder."""
    return {"self_attn": attention, **feed_forward, **{name: weight(embed) for name in norms}}


def causal_lm(embed: int, vocab: int, layers: Tree, *, tied: bool = False) -> Tree:
    """Embedding, layers by their number, final norm, and the output projection unless it is tied."""
    model = {"embed_tokens": weight(vocab, embed), "layers": layers, "norm": weight(embed)}
    return {"model": model} if tied else {"model": model, "lm_head": weight(vocab, embed)}
