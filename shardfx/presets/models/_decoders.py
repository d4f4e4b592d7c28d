"""Decoders of Llama's form under their Hugging Face names, each from one row of numbers."""

import jax.numpy as jnp

from ._parts import (
    FOUR_NORMS,
    NORMS,
    Tree,
    block,
    causal_lm,
    dense,
    gated_mlp,
    grouped_attention,
    latent_attention,
    leaf,
    numbered,
    routed_mlp,
    scale_and_bias,
    weight,
)


def llama(
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    hidden: int,
    vocab: int,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    four_norms: bool = False,
) -> Tree:
    """Llama, Mistral, Qwen 2.5 and 3, and the text models of Gemma."""

    def layer(_: int) -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim, qkv_bias=qkv_bias, qk_norm=qk_norm)
        return block(embed, attention, {"mlp": gated_mlp(embed, hidden)}, FOUR_NORMS if four_norms else NORMS)

    return causal_lm(embed, vocab, numbered(layers, layer), tied=tied)


def mixtral(
    *, embed: int, heads: int, kv_heads: int, head_dim: int, layers: int, hidden: int, experts: int, vocab: int
) -> Tree:
    """Mixtral, whose experts' projections are w1 (gate), w3 (up) and w2 (down)."""

    def expert(_: int) -> Tree:
        return {"w1": weight(hidden, embed), "w2": weight(embed, hidden), "w3": weight(hidden, embed)}

    def layer(_: int) -> Tree:
        routed = {"gate": weight(experts, embed), "experts": numbered(experts, expert)}
        attention = grouped_attention(embed, heads, kv_heads, head_dim)
        return block(embed, attention, {"block_sparse_moe": routed})

    return causal_lm(embed, vocab, numbered(layers, layer))


def qwen_moe(
    *, embed: int, heads: int, kv_heads: int, head_dim: int, layers: int, expert_hidden: int, experts: int, vocab: int
) -> Tree:
    """Qwen3 with a mixture of experts in every layer."""

    def layer(_: int) -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim, qk_norm=True)
        return block(embed, attention, {"mlp": routed_mlp(embed, expert_hidden, experts)})

    return causal_lm(embed, vocab, numbered(layers, layer))


def qwen_next(
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    full_attention_every: int,
    linear_key_heads: int,
    linear_value_heads: int,
    linear_head_dim: int,
    conv_width: int,
    expert_hidden: int,
    experts: int,
    vocab: int,
) -> Tree:
    """Qwen3-Next: linear attention in most layers, gated attention in the others, and a layer that predicts ahead."""
    keys, values = linear_key_heads * linear_head_dim, linear_value_heads * linear_head_dim

    def full() -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim, qk_norm=True)
        # Query and gate of each head lie side by side.
        return attention | {"q_proj": weight(2 * heads * head_dim, embed)}

    def linear() -> Tree:
        return {
            "in_proj_qkvz": weight(2 * keys + 2 * values, embed),
            "in_proj_ba": weight(2 * linear_value_heads, embed),
            "conv1d": weight(2 * keys + values, 1, conv_width),
            "dt_bias": leaf(linear_value_heads),
            "A_log": leaf(linear_value_heads),
            "norm": weight(linear_head_dim),
            "out_proj": weight(embed, values),
        }

    def layer(is_full: bool) -> Tree:
        shared = {"shared_expert": gated_mlp(embed, expert_hidden), "shared_expert_gate": weight(1, embed)}
        attention = {"self_attn": full()} if is_full else {"linear_attn": linear()}
        norms = {name: weight(embed) for name in NORMS}
        return {**attention, "mlp": routed_mlp(embed, expert_hidden, experts) | shared, **norms}

    blocks = numbered(layers, lambda index: layer((index + 1) % full_attention_every == 0))
    ahead = {
        "fc": weight(embed, 2 * embed),
        "layers": {"0": layer(True)},
        "norm": weight(embed),
        "pre_fc_norm_embedding": weight(embed),
        "pre_fc_norm_hidden": weight(embed),
    }
    return causal_lm(embed, vocab, blocks) | {"mtp": ahead}


def deepseek(
    *,
    embed: int,
    heads: int,
    q_lora: int,
    kv_lora: int,
    nope: int,
    rope: int,
    value: int,
    layers: int,
    dense_layers: int,
    hidden: int,
    expert_hidden: int,
    experts: int,
    shared_experts: int,
    vocab: int,
    score_bias: bool,
) -> Tree:
    """DeepSeek-V2 and V3 and Kimi-K2, without the layer that predicts ahead: the first layers are dense."""

    def routed() -> Tree:
        mlp = routed_mlp(embed, expert_hidden, experts)
        mlp["shared_experts"] = gated_mlp(embed, shared_experts * expert_hidden)
        if score_bias:
            mlp["gate"]["e_score_correction_bias"] = leaf(experts, dtype=jnp.float32)
        return mlp

    def layer(index: int) -> Tree:
        attention = latent_attention(embed, heads, q_lora=q_lora, kv_lora=kv_lora, nope=nope, rope=rope, value=value)
        return block(embed, attention, {"mlp": gated_mlp(embed, hidden) if index < dense_layers else routed()})

    return causal_lm(embed, vocab, numbered(layers, layer))


def gpt_oss(
    *, embed: int, heads: int, kv_heads: int, head_dim: int, layers: int, hidden: int, experts: int, vocab: int
) -> Tree:
    """gpt-oss with its experts unpacked from MXFP4: stacked, `[in, out]`, gate and up in turns."""

    def layer(_: int) -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim, qkv_bias=True)
        attention |= {"o_proj": dense(embed, heads * head_dim), "sinks": leaf(heads)}
        stacked = {
            "gate_up_proj": leaf(experts, embed, 2 * hidden),
            "gate_up_proj_bias": leaf(experts, 2 * hidden),
            "down_proj": leaf(experts, hidden, embed),
            "down_proj_bias": leaf(experts, embed),
        }
        return block(embed, attention, {"mlp": {"router": dense(experts, embed), "experts": stacked}})

    return causal_lm(embed, vocab, numbered(layers, layer))


def gemma3(
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    hidden: int,
    vocab: int,
    vision_heads: int,
    vision_head_dim: int,
    vision_layers: int,
    vision_hidden: int,
    vision_patch: int,
    vision_tokens: int,
) -> Tree:
    """Gemma 3 that sees: SigLIP's encoder, a projection, and the text model."""
    vision_embed = vision_heads * vision_head_dim
    text = llama(
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        tied=True,
        qk_norm=True,
        four_norms=True,
    )

    def layer(_: int) -> Tree:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        return {
            "self_attn": {name: dense(vision_embed, vision_embed) for name in names},
            "mlp": {"fc1": dense(vision_hidden, vision_embed), "fc2": dense(vision_embed, vision_hidden)},
            "layer_norm1": scale_and_bias(vision_embed),
            "layer_norm2": scale_and_bias(vision_embed),
        }

    patches = {"weight": leaf(vision_embed, 3, vision_patch, vision_patch), "bias": leaf(vision_embed)}
    tower = {
        "embeddings": {"patch_embedding": patches, "position_embedding": weight(vision_tokens, vision_embed)},
        "encoder": {"layers": numbered(vision_layers, layer)},
        "post_layernorm": scale_and_bias(vision_embed),
    }
    projector = {"mm_input_projection_weight": leaf(vision_embed, embed), "mm_soft_emb_norm": weight(vision_embed)}
    return {
        "language_model": text,
        "multi_modal_projector": projector,
        "vision_tower": {"vision_model": tower},
    }


def starcoder2(
    *, embed: int, heads: int, kv_heads: int, head_dim: int, layers: int, hidden: int, vocab: int, tied: bool = True
) -> Tree:
    """StarCoder2: biases everywhere, LayerNorms, and a feed-forward block without a gate."""

    def layer(_: int) -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim, qkv_bias=True)
        return {
            "self_attn": attention | {"o_proj": dense(embed, heads * head_dim)},
            "mlp": {"c_fc": dense(hidden, embed), "c_proj": dense(embed, hidden)},
            **{name: scale_and_bias(embed) for name in NORMS},
        }

    model = causal_lm(embed, vocab, numbered(layers, layer), tied=tied)
    model["model"]["norm"] = scale_and_bias(embed)
    return model
