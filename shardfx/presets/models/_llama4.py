"""Llama 4, which sees: a decoder in which every layer or every second one routes to experts, and a vision encoder."""

from ._parts import (
    NORMS,
    Tree,
    block,
    causal_lm,
    dense,
    gated_mlp,
    grouped_attention,
    leaf,
    numbered,
    scale_and_bias,
    weight,
)


def llama4(
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    hidden: int,
    expert_hidden: int,
    experts: int,
    experts_every: int,
    vocab: int,
    vision_heads: int,
    vision_head_dim: int,
    vision_layers: int,
    vision_hidden: int,
    vision_patch: int,
    vision_tokens: int,
    vision_out: int,
) -> Tree:
    """Llama 4 under its checkpoint's names: experts are stacked, `[in, out]`, gate and up one after the other."""

    def routed() -> Tree:
        stacked = {
            "gate_up_proj": leaf(experts, embed, 2 * expert_hidden),
            "down_proj": leaf(experts, expert_hidden, embed),
        }
        return {
            "router": weight(experts, embed),
            "experts": stacked,
            "shared_expert": gated_mlp(embed, expert_hidden),
        }

    def layer(index: int) -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim)
        is_routed = (index + 1) % experts_every == 0
        return block(embed, attention, {"feed_forward": routed() if is_routed else gated_mlp(embed, hidden)})

    vision = _encoder(
        embed=vision_heads * vision_head_dim,
        layers=vision_layers,
        hidden=vision_hidden,
        patch=vision_patch,
        tokens=vision_tokens,
        out=vision_out,
    )
    return {
        "language_model": causal_lm(embed, vocab, numbered(layers, layer)),
        "multi_modal_projector": {"linear_1": weight(embed, vision_out)},
        "vision_model": vision,
    }


def _encoder(*, embed: int, layers: int, hidden: int, patch: int, tokens: int, out: int) -> Tree:
    def layer(_: int) -> Tree:
        return {
            "self_attn": {name: dense(embed, embed) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
            "mlp": {"fc1": dense(hidden, embed), "fc2": dense(embed, hidden)},
            **{name: scale_and_bias(embed) for name in NORMS},
        }

    return {
        "class_embedding": leaf(embed),
        "patch_embedding": {"linear": weight(embed, 3 * patch * patch)},
        # One more than there are patches, for the class.
        "positional_embedding_vlm": leaf(tokens + 1, embed),
        "layernorm_pre": scale_and_bias(embed),
        "layernorm_post": scale_and_bias(embed),
        "model": {"layers": numbered(layers, layer)},
        # Its input is four patches side by side, which have the encoder's inner width.
        "vision_adapter": {"mlp": {"fc1": weight(out, hidden), "fc2": weight(out, out)}},
    }
