"""Shape trees of two real models under their public names, and rules for them. Nothing is allocated.

Weights lie as torch lays them out, `[out, in]`; every leaf is its own object, as in a real checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp


Tree = dict[str, Any]

# Twelve rules for each model, from path to logical axes; the first match wins.
LLAMA_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"embed_tokens/weight$", ("vocab", "embed")),
    (r"lm_head/weight$", ("vocab", "embed")),
    (r"self_attn/q_proj/weight$", ("heads", "embed")),
    (r"self_attn/k_proj/weight$", ("kv_heads", "embed")),
    (r"self_attn/v_proj/weight$", ("kv_heads", "embed")),
    (r"self_attn/o_proj/weight$", ("embed", "heads")),
    (r"mlp/gate_proj/weight$", ("mlp", "embed")),
    (r"mlp/up_proj/weight$", ("mlp", "embed")),
    (r"mlp/down_proj/weight$", ("embed", "mlp")),
    (r"input_layernorm/weight$", ("norm",)),
    (r"post_attention_layernorm/weight$", ("norm",)),
    (r"model/norm/weight$", ("norm",)),
)
DEEPSEEK_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(embed_tokens|lm_head)/weight$", ("vocab", "embed")),
    (r"q_a_proj/weight$", ("q_lora", "embed")),
    (r"q_b_proj/weight$", ("heads", "q_lora")),
    (r"kv_a_proj_with_mqa/weight$", ("kv_lora", "embed")),
    (r"kv_b_proj/weight$", ("heads", "kv_lora")),
    (r"self_attn/o_proj/weight$", ("embed", "heads")),
    (r"mlp/gate/weight$", ("expert", "embed")),
    (r"e_score_correction_bias$", ("expert",)),
    (r"experts/\d+/down_proj/weight$", ("embed", "expert_mlp")),
    (r"(gate|up)_proj/weight$", ("mlp", "embed")),
    (r"down_proj/weight$", ("embed", "mlp")),
    (r"norm/weight$", ("norm",)),
)
# What the logical axes of both mean on a mesh with the axes `fsdp` and `tensor`.
AXES: tuple[tuple[str, str | None], ...] = (
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("expert_mlp", "tensor"),
    ("embed", "fsdp"),
    ("q_lora", "fsdp"),
    ("kv_lora", "fsdp"),
    ("expert", None),
    ("norm", None),
)


def leaf(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """One array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)


def weight(*shape: int) -> Tree:
    """A module with nothing but a weight."""
    return {"weight": leaf(*shape)}


def gated_mlp(embed: int, hidden: int) -> Tree:
    """The gate, up and down projections of a gated feed-forward block."""
    return {
        "gate_proj": weight(hidden, embed),
        "up_proj": weight(hidden, embed),
        "down_proj": weight(embed, hidden),
    }


def grouped_attention(embed: int, heads: int, kv_heads: int, head_dim: int) -> Tree:
    """The projections of grouped-query attention, heads and head_dim fused."""
    return {
        "q_proj": weight(heads * head_dim, embed),
        "k_proj": weight(kv_heads * head_dim, embed),
        "v_proj": weight(kv_heads * head_dim, embed),
        "o_proj": weight(embed, heads * head_dim),
    }


def latent_attention(embed: int, heads: int, *, q_lora: int, kv_lora: int, nope: int, rope: int, value: int) -> Tree:
    """The projections of multi-head latent attention with a compressed query."""
    return {
        "q_a_proj": weight(q_lora, embed),
        "q_a_layernorm": weight(q_lora),
        "q_b_proj": weight(heads * (nope + rope), q_lora),
        "kv_a_proj_with_mqa": weight(kv_lora + rope, embed),
        "kv_a_layernorm": weight(kv_lora),
        "kv_b_proj": weight(heads * (nope + value), kv_lora),
        "o_proj": weight(embed, heads * value),
    }


def causal_lm(embed: int, vocab: int, layers: list[Tree], *, tied: bool = False) -> Tree:
    """Embedding, layers by their number, final norm, and the output projection unless it is tied."""
    model = {
        "embed_tokens": weight(vocab, embed),
        "layers": {str(index): layer for index, layer in enumerate(layers)},
        "norm": weight(embed),
    }
    return {"model": model} if tied else {"model": model, "lm_head": weight(vocab, embed)}


def llama(
    embed: int,
    heads: int,
    kv_heads: int,
    layers: int,
    hidden: int,
    vocab: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
) -> Tree:
    """A decoder of Llama's form: nine leaves per layer."""
    blocks = [
        {
            "self_attn": grouped_attention(embed, heads, kv_heads, head_dim),
            "mlp": gated_mlp(embed, hidden),
            "input_layernorm": weight(embed),
            "post_attention_layernorm": weight(embed),
        }
        for _ in range(layers)
    ]
    return causal_lm(embed, vocab, blocks, tied=tied)


def llama_405b() -> Tree:
    """Llama 3.1 405B, unstacked: 1,137 leaves."""
    return llama(16384, 128, 8, 126, 53248, 128256)


def deepseek_v3(*, dense_layers: int = 0) -> Tree:
    """DeepSeek-V3, unstacked: 47,705 leaves with a mixture of experts in every layer.

    The published model has `dense_layers=3`, which makes 45,395 leaves and 671 billion parameters (its
    multi-token prediction layer apart).
    """
    blocks = [_deepseek_layer(dense=index < dense_layers) for index in range(61)]
    return causal_lm(7168, 129280, blocks)


def _deepseek_layer(*, dense: bool) -> Tree:
    return {
        "self_attn": latent_attention(7168, 128, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128),
        "mlp": gated_mlp(7168, 18432) if dense else _deepseek_experts(),
        "input_layernorm": weight(7168),
        "post_attention_layernorm": weight(7168),
    }


def _deepseek_experts() -> Tree:
    return {
        "gate": {"weight": leaf(256, 7168), "e_score_correction_bias": leaf(256, dtype=jnp.float32)},
        "experts": {str(index): gated_mlp(7168, 2048) for index in range(256)},
        "shared_experts": gated_mlp(7168, 2048),
    }
