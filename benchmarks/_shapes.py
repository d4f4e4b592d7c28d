"""Two real models from `shardfx.presets.models`, and rules over logical axes for them.
Nothing is allocated.
"""

from typing import Any

from shardfx.presets import models


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


def llama_405b(layers: int = 126) -> Tree:
    """Llama 3.1 405B, unstacked: 1,137 leaves."""
    return models.tree("llama3-405b", layers=layers)


def deepseek_v3() -> Tree:
    """DeepSeek-V3, unstacked, with a mixture of experts in every layer: 47,705 leaves.

    The published model has three dense layers, which makes 45,395.
    """
    return models.tree("deepseek-v3", dense_layers=0)
