"""Models that are no decoders of Llama's form: GPT, BERT, T5, ViT."""

from ._parts import Tree, dense, leaf, numbered, scale_and_bias, weight


def gpt(*, heads: int, head_dim: int, layers: int, hidden: int, vocab: int, positions: int) -> Tree:
    """GPT-2 and 3 under GPT-2's names: Conv1D is `[in, out]`, with query, key and value side by side."""
    embed = heads * head_dim

    def conv(into: int, out: int) -> Tree:
        return {**weight(into, out), "bias": leaf(out)}

    def layer(_: int) -> Tree:
        return {
            "ln_1": scale_and_bias(embed),
            "attn": {"c_attn": conv(embed, 3 * embed), "c_proj": conv(embed, embed)},
            "ln_2": scale_and_bias(embed),
            "mlp": {"c_fc": conv(embed, hidden), "c_proj": conv(hidden, embed)},
        }

    return {
        "wte": weight(vocab, embed),
        "wpe": weight(positions, embed),
        "h": numbered(layers, layer),
        "ln_f": scale_and_bias(embed),
    }


def bert(*, heads: int, head_dim: int, layers: int, hidden: int, vocab: int, positions: int) -> Tree:
    """BERT, and sentence encoders of its form, with the pooler."""
    embed = heads * head_dim

    def layer(_: int) -> Tree:
        return {
            "attention": {
                "self": {name: dense(embed, embed) for name in ("query", "key", "value")},
                "output": {"dense": dense(embed, embed), "LayerNorm": scale_and_bias(embed)},
            },
            "intermediate": {"dense": dense(hidden, embed)},
            "output": {"dense": dense(embed, hidden), "LayerNorm": scale_and_bias(embed)},
        }

    return {
        "embeddings": {
            "word_embeddings": weight(vocab, embed),
            "position_embeddings": weight(positions, embed),
            "token_type_embeddings": weight(2, embed),
            "LayerNorm": scale_and_bias(embed),
        },
        "encoder": {"layer": numbered(layers, layer)},
        "pooler": {"dense": dense(embed, embed)},
    }


def t5(*, embed: int, heads: int, head_dim: int, layers: int, hidden: int, vocab: int, buckets: int) -> Tree:
    """T5 v1.1: gated feed-forward blocks, and an output projection of its own. `layers` of each stack."""
    inner = heads * head_dim

    def attention(first: bool) -> Tree:
        projections = {name: weight(inner, embed) for name in "qkv"} | {"o": weight(embed, inner)}
        return projections | ({"relative_attention_bias": weight(buckets, heads)} if first else {})

    def block(index: int, cross: bool) -> Tree:
        feed_forward = {"wi_0": weight(hidden, embed), "wi_1": weight(hidden, embed), "wo": weight(embed, hidden)}
        parts = [{"SelfAttention": attention(index == 0)}]
        parts += [{"EncDecAttention": attention(False)}] if cross else []
        parts += [{"DenseReluDense": feed_forward}]
        return {"layer": numbered(len(parts), lambda part: parts[part] | {"layer_norm": weight(embed)})}

    def stack(cross: bool) -> Tree:
        return {"block": numbered(layers, lambda index: block(index, cross)), "final_layer_norm": weight(embed)}

    return {
        "shared": weight(vocab, embed),
        "encoder": stack(cross=False),
        "decoder": stack(cross=True),
        "lm_head": weight(vocab, embed),
    }


def vit(*, heads: int, head_dim: int, layers: int, hidden: int, patch: int, tokens: int) -> Tree:
    """A ViT encoder under big_vision's names: flax kernels, `[in, out]`, heads and head_dim not fused.

    Without pooling and classifier, as its size is published.
    """
    embed = heads * head_dim

    def kernel(*shape: int, bias: tuple[int, ...]) -> Tree:
        return {"kernel": leaf(*shape), "bias": leaf(*bias)}

    def norm() -> Tree:
        return {"scale": leaf(embed), "bias": leaf(embed)}

    def block() -> Tree:
        attention = {name: kernel(embed, heads, head_dim, bias=(heads, head_dim)) for name in ("query", "key", "value")}
        return {
            "LayerNorm_0": norm(),
            "MultiHeadDotProductAttention_0": attention | {"out": kernel(heads, head_dim, embed, bias=(embed,))},
            "LayerNorm_1": norm(),
            "MlpBlock_0": {
                "Dense_0": kernel(embed, hidden, bias=(hidden,)),
                "Dense_1": kernel(hidden, embed, bias=(embed,)),
            },
        }

    blocks = {f"encoderblock_{index}": block() for index in range(layers)}
    return {
        "embedding": kernel(patch, patch, 3, embed, bias=(embed,)),
        "pos_embedding": leaf(1, tokens, embed),
        "Transformer": blocks | {"encoder_norm": norm()},
    }
