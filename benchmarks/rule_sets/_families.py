"""Forward passes of the published families, for trees with the names and the shapes of
`shardfx.presets.models.tree`, a few layers deep.

They are as plain as the families allow: one block, written as its paper writes it, for
weights in torch's layout `[out, in]`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


Params = Mapping[str, Any]


def linear(p: Params, x: jax.Array) -> jax.Array:
    """A projection by `[out, in]`, with the bias if there is one."""
    return x @ p["weight"].T + p.get("bias", 0)


def normed(p: Params, x: jax.Array) -> jax.Array:
    """The norm of a family: that of RMS, or with a bias that of layers."""
    if "bias" in p:
        scale = p.get("weight", p.get("scale"))
        return jax.nn.standardize(x, epsilon=1e-6) * scale + p["bias"]
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * p["weight"]


def turned(x: jax.Array) -> jax.Array:
    """Rotary positions of `[batch, length, heads, dim]`."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half) / half)
    values = jnp.arange(x.shape[1])[:, None, None]
    angles = values * rates
    first = x[..., :half]
    second = x[..., half:]
    cosine = jnp.cos(angles)
    sine = jnp.sin(angles)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    return jnp.concatenate([turned_first, turned_second], axis=-1)


def attended(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, bias: Any = 0.0
) -> jax.Array:
    """Attention over `[batch, length, heads, dim]`, the heads joined in the result."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(each, repeats, axis=2) for each in (key, value))
    products = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = products / query.shape[-1] ** 0.5 + bias
    if causal:
        array = jnp.ones(scores.shape[-2:], bool)
        scores = jnp.where(jnp.tril(array), scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(*mixed.shape[:2], -1)


def heads_of(x: jax.Array, width: int) -> jax.Array:
    """The last dimension as heads of `width` elements."""
    return x.reshape(*x.shape[:-1], -1, width)


def token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    right = picked[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def layers_of(p: Params) -> list[Params]:
    return [p[number] for number in sorted(p, key=int)]


def decoder_loss(p: Params, tokens: jax.Array, head_dim: int) -> jax.Array:
    """Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3, StarCoder 2."""
    model = p["model"]
    x = model["embed_tokens"]["weight"][tokens]
    for layer in layers_of(model["layers"]):
        has_four = "pre_feedforward_layernorm" in layer
        mixed = _self_attention(
            layer["self_attn"], normed(layer["input_layernorm"], x), head_dim
        )
        after = layer["post_attention_layernorm"]
        if has_four:
            x = x + normed(after, mixed)
            wide = _feed_forward(layer, normed(layer["pre_feedforward_layernorm"], x))
            x = x + normed(layer["post_feedforward_layernorm"], wide)
        else:
            x = x + mixed
            x = x + _feed_forward(layer, normed(after, x))
    if "lm_head" in p:
        head = p["lm_head"]
    else:
        head = model["embed_tokens"]
    logits = linear(head, normed(model["norm"], x))
    return token_loss(logits, tokens)


def _self_attention(p: Params, x: jax.Array, head_dim: int) -> jax.Array:
    query, key, value = (
        heads_of(linear(p[f"{name}_proj"], x), head_dim) for name in "qkv"
    )
    if "q_norm" in p:
        query = normed(p["q_norm"], query)
        key = normed(p["k_norm"], key)
    mixed = attended(turned(query), turned(key), value, causal=True)
    return linear(p["o_proj"], mixed)


def _feed_forward(layer: Params, x: jax.Array) -> jax.Array:
    if "block_sparse_moe" in layer:
        return _experts(layer["block_sparse_moe"], x, ("w1", "w3", "w2"))
    p = layer["mlp"]
    if "experts" in p:
        return _experts(p, x, ("gate_proj", "up_proj", "down_proj"))
    if "c_fc" in p:
        wide = jax.nn.gelu(linear(p["c_fc"], x))
        return linear(p["c_proj"], wide)
    gated = jax.nn.silu(linear(p["gate_proj"], x))
    wide = gated * linear(p["up_proj"], x)
    return linear(p["down_proj"], wide)


def _experts(p: Params, x: jax.Array, names: tuple[str, str, str]) -> jax.Array:
    """Each token through its two best experts. The experts are an array each, or one
    array with a leading dimension.
    """
    scores = linear(p["gate"], x)
    gates = jax.nn.softmax(scores, axis=-1)
    _, chosen = jax.lax.top_k(gates, 2)
    hot = jax.nn.one_hot(chosen, gates.shape[-1], dtype=x.dtype)
    total = hot.sum(-2)
    shares = total * gates
    gate, up, down = names
    if gate in p["experts"]:
        gate, up, down = (p["experts"][name]["weight"] for name in names)
        rows = jnp.einsum("bse,bsx->xbse", x, shares)
        wide = jax.nn.silu(jnp.einsum("xbse,xhe->xbsh", rows, gate))
        wide = wide * jnp.einsum("xbse,xhe->xbsh", rows, up)
        return jnp.einsum("xbsh,xeh->bse", wide, down)
    result = jnp.zeros_like(x)
    for number, expert in enumerate(layers_of(p["experts"])):
        gated = jax.nn.silu(linear(expert[gate], x))
        wide = gated * linear(expert[up], x)
        share = shares[..., number : number + 1]
        result = result + share * linear(expert[down], wide)
    return result


def latent_loss(
    p: Params, tokens: jax.Array, nope: int, rope: int, value: int
) -> jax.Array:
    """DeepSeek-V3 with latent attention and dense layers."""
    model = p["model"]
    x = model["embed_tokens"]["weight"][tokens]
    for layer in layers_of(model["layers"]):
        y = normed(layer["input_layernorm"], x)
        attention_weights = layer["self_attn"]
        query = normed(
            attention_weights["q_a_layernorm"], linear(attention_weights["q_a_proj"], y)
        )
        query = heads_of(linear(attention_weights["q_b_proj"], query), nope + rope)
        joint = linear(attention_weights["kv_a_proj_with_mqa"], y)
        latent = joint[..., :-rope]
        shared = joint[..., -rope:]
        both = linear(
            attention_weights["kv_b_proj"],
            normed(attention_weights["kv_a_layernorm"], latent),
        )
        both = heads_of(both, nope + value)
        turned_shared = turned(shared[:, :, None])
        shared = jnp.broadcast_to(turned_shared, (*both.shape[:-1], rope))
        key = jnp.concatenate([both[..., :nope], shared], axis=-1)
        plain_query = query[..., :nope]
        turned_query = turned(query[..., nope:])
        query = jnp.concatenate([plain_query, turned_query], axis=-1)
        mixed = attended(query, key, both[..., nope:], causal=True)
        x = x + linear(attention_weights["o_proj"], mixed)
        x = x + _feed_forward(layer, normed(layer["post_attention_layernorm"], x))
    logits = linear(p["lm_head"], normed(model["norm"], x))
    return token_loss(logits, tokens)


def gpt_loss(p: Params, tokens: jax.Array, head_dim: int) -> jax.Array:
    """GPT-2 and 3, whose weights are `[in, out]`."""

    def conv(weights: Params, x: jax.Array) -> jax.Array:
        return x @ weights["weight"] + weights["bias"]

    weight = p["wpe"]["weight"][: tokens.shape[1]]
    x = p["wte"]["weight"][tokens] + weight
    for layer in layers_of(p["h"]):
        attention_input = normed(layer["ln_1"], x)
        joint = conv(layer["attn"]["c_attn"], attention_input)
        query, key, value = (
            heads_of(each, head_dim) for each in jnp.split(joint, 3, axis=-1)
        )
        mixed = attended(query, key, value, causal=True)
        x = x + conv(layer["attn"]["c_proj"], mixed)
        mlp_input = normed(layer["ln_2"], x)
        wide = jax.nn.gelu(conv(layer["mlp"]["c_fc"], mlp_input))
        x = x + conv(layer["mlp"]["c_proj"], wide)
    logits = normed(p["ln_f"], x) @ p["wte"]["weight"].T
    return token_loss(logits, tokens)


def bert_loss(p: Params, tokens: jax.Array, head_dim: int) -> jax.Array:
    """BERT and MiniLM, with a loss over the pooled first tokens."""
    tables = p["embeddings"]
    x = tables["word_embeddings"]["weight"][tokens]
    weight = tables["position_embeddings"]["weight"][: tokens.shape[1]]
    x = x + weight
    weight = tables["token_type_embeddings"]["weight"][0]
    x = normed(tables["LayerNorm"], x + weight)
    for layer in layers_of(p["encoder"]["layer"]):
        attention_weights = layer["attention"]["self"]
        out = layer["attention"]["output"]
        query, key, value = (
            heads_of(linear(attention_weights[name], x), head_dim)
            for name in ("query", "key", "value")
        )
        joined = attended(query, key, value, causal=False)
        mixed = linear(out["dense"], joined)
        x = normed(out["LayerNorm"], x + mixed)
        wide = jax.nn.gelu(linear(layer["intermediate"]["dense"], x))
        narrow = linear(layer["output"]["dense"], wide)
        x = normed(layer["output"]["LayerNorm"], x + narrow)
    pooled = linear(p["pooler"]["dense"], x[:, 0])
    return jnp.mean(jnp.tanh(pooled) ** 2)


def t5_loss(p: Params, tokens: jax.Array, head_dim: int) -> jax.Array:
    """T5 v1.1, encoder and decoder."""

    def attention(
        weights: Params, x: jax.Array, y: jax.Array, bias: Any, *, causal: bool
    ) -> jax.Array:
        query = heads_of(linear(weights["q"], x), head_dim)
        key, value = (heads_of(linear(weights[name], y), head_dim) for name in "kv")
        joined = attended(query, key, value, causal=causal, bias=bias)
        return linear(weights["o"], joined)

    def gated(weights: Params, x: jax.Array) -> jax.Array:
        activated = jax.nn.gelu(linear(weights["wi_0"], x))
        return linear(
            weights["wo"],
            activated * linear(weights["wi_1"], x),
        )

    def bias_of(side: Params, length: int) -> jax.Array:
        first = side["block"]["0"]["layer"]["0"]["SelfAttention"]
        table = first["relative_attention_bias"]["weight"]
        values = jnp.arange(length)[:, None]
        apart = jnp.arange(length)[None] - values
        rows = table[jnp.clip(apart + 8, 0, 31)]
        return rows.transpose(2, 0, 1)

    table = p["shared"]["weight"]
    encoder = p["encoder"]
    decoder = p["decoder"]
    x = table[tokens]
    bias = bias_of(encoder, tokens.shape[1])
    for block in layers_of(encoder["block"]):
        first, second = layers_of(block["layer"])
        y = normed(first["layer_norm"], x)
        x = x + attention(first["SelfAttention"], y, y, bias, causal=False)
        x = x + gated(second["DenseReluDense"], normed(second["layer_norm"], x))
    read = normed(encoder["final_layer_norm"], x)
    x = table[tokens]
    bias = bias_of(decoder, tokens.shape[1])
    for block in layers_of(decoder["block"]):
        first, second, third = layers_of(block["layer"])
        y = normed(first["layer_norm"], x)
        x = x + attention(first["SelfAttention"], y, y, bias, causal=True)
        y = normed(second["layer_norm"], x)
        x = x + attention(second["EncDecAttention"], y, read, 0.0, causal=False)
        x = x + gated(third["DenseReluDense"], normed(third["layer_norm"], x))
    logits = linear(p["lm_head"], normed(decoder["final_layer_norm"], x))
    return token_loss(logits, tokens)


def vit_loss(p: Params, images: jax.Array) -> jax.Array:
    """ViT under big_vision's names, with a loss over its last tokens."""
    kernel = p["embedding"]["kernel"]
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        images,
        kernel,
        kernel.shape[:2],
        "VALID",
        dimension_numbers=dimensions,
    )
    patches = x.reshape(x.shape[0], -1, x.shape[-1])
    x = patches + p["embedding"]["bias"]
    x = x + p["pos_embedding"]
    body = p["Transformer"]
    names = [name for name in body if name.startswith("encoderblock")]
    for name in sorted(names):
        layer = body[name]
        attention_weights = layer["MultiHeadDotProductAttention_0"]
        y = normed(layer["LayerNorm_0"], x)
        query, key, value = (
            jnp.einsum("bse,ehd->bshd", y, attention_weights[each]["kernel"])
            + attention_weights[each]["bias"]
            for each in ("query", "key", "value")
        )
        joined = attended(query, key, value, causal=False)
        mixed = heads_of(joined, query.shape[-1])
        x = x + jnp.einsum("bshd,hde->bse", mixed, attention_weights["out"]["kernel"])
        x = x + attention_weights["out"]["bias"]
        first = layer["MlpBlock_0"]["Dense_0"]
        second = layer["MlpBlock_0"]["Dense_1"]
        wide = normed(layer["LayerNorm_1"], x) @ first["kernel"] + first["bias"]
        hidden = jax.nn.gelu(wide)
        x = x + hidden @ second["kernel"] + second["bias"]
    squares = normed(body["encoder_norm"], x) ** 2
    return jnp.mean(squares * jnp.arange(x.shape[-1]))
