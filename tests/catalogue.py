"""Real models as trees of ShapeDtypeStructs under their public names: nothing is allocated.

Each model says how many parameters were published, which of its dimensions hold fused heads, and which preset is
for it, so that every law can be tested on every model.
"""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import _shapes as shapes
from benchmarks._shapes import Tree, causal_lm, gated_mlp, grouped_attention, leaf, llama, weight


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the catalogue.

    `fused` holds `(regex of paths, dimension, elements per head)` for every dimension in which heads lie side by
    side. `parameters` is the published total.
    """

    make: Callable[[], Tree]
    parameters: int
    preset: str | None = None
    arguments: tuple[tuple[str, int], ...] = ()
    fused: tuple[tuple[str, int, int], ...] = ()


def dense(out: int, into: int, *, bias: bool = True) -> Tree:
    """A linear layer in torch's layout."""
    return {**weight(out, into), "bias": leaf(out)} if bias else weight(out, into)


def scale_and_bias(size: int) -> Tree:
    """A LayerNorm."""
    return {"weight": leaf(size), "bias": leaf(size)}


def decoder(
    embed: int,
    heads: int,
    kv_heads: int,
    layers: int,
    hidden: int,
    vocab: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    mlp: Callable[[], Tree] | None = None,
) -> Tree:
    """A decoder of Llama's form with the variations of Qwen and Gemma."""

    def layer() -> Tree:
        attention = grouped_attention(embed, heads, kv_heads, head_dim)
        if qkv_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                attention[name] = dense(*attention[name]["weight"].shape)
        if qk_norm:
            attention |= {"q_norm": weight(head_dim), "k_norm": weight(head_dim)}
        block = {"self_attn": attention, "mlp": gated_mlp(embed, hidden) if mlp is None else mlp()}
        return block | {name: weight(embed) for name in norms}

    return causal_lm(embed, vocab, [layer() for _ in range(layers)], tied=tied)


def mixtral(embed: int, heads: int, layers: int, hidden: int, vocab: int) -> Tree:
    def layer() -> Tree:
        experts = {
            str(index): {"w1": weight(hidden, embed), "w2": weight(embed, hidden), "w3": weight(hidden, embed)}
            for index in range(8)
        }
        return {
            "self_attn": grouped_attention(embed, heads, 8, 128),
            "block_sparse_moe": {"gate": weight(8, embed), "experts": experts},
            "input_layernorm": weight(embed),
            "post_attention_layernorm": weight(embed),
        }

    return causal_lm(embed, vocab, [layer() for _ in range(layers)])


def routed(embed: int, hidden: int, experts: int) -> Callable[[], Tree]:
    """The mixture of experts of Qwen3."""
    return lambda: {
        "gate": weight(experts, embed),
        "experts": {str(index): gated_mlp(embed, hidden) for index in range(experts)},
    }


def starcoder2(embed: int, heads: int, kv_heads: int, layers: int, hidden: int, vocab: int) -> Tree:
    def layer() -> Tree:
        return {
            "self_attn": {
                "q_proj": dense(heads * 128, embed),
                "k_proj": dense(kv_heads * 128, embed),
                "v_proj": dense(kv_heads * 128, embed),
                "o_proj": dense(embed, heads * 128),
            },
            "mlp": {"c_fc": dense(hidden, embed), "c_proj": dense(embed, hidden)},
            "input_layernorm": scale_and_bias(embed),
            "post_attention_layernorm": scale_and_bias(embed),
        }

    model = causal_lm(embed, vocab, [layer() for _ in range(layers)], tied=True)
    model["model"]["norm"] = scale_and_bias(embed)
    return model


def gpt2(embed: int, layers: int) -> Tree:
    """GPT-2's projections are Conv1D: `[in, out]`, with query, key and value side by side."""

    def conv(into: int, out: int) -> Tree:
        return {**weight(into, out), "bias": leaf(out)}

    def layer() -> Tree:
        return {
            "ln_1": scale_and_bias(embed),
            "attn": {"c_attn": conv(embed, 3 * embed), "c_proj": conv(embed, embed)},
            "ln_2": scale_and_bias(embed),
            "mlp": {"c_fc": conv(embed, 4 * embed), "c_proj": conv(4 * embed, embed)},
        }

    return {
        "wte": weight(50257, embed),
        "wpe": weight(1024, embed),
        "h": {str(index): layer() for index in range(layers)},
        "ln_f": scale_and_bias(embed),
    }


def bert(embed: int, layers: int, hidden: int) -> Tree:
    def layer() -> Tree:
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
            "word_embeddings": weight(30522, embed),
            "position_embeddings": weight(512, embed),
            "token_type_embeddings": weight(2, embed),
            "LayerNorm": scale_and_bias(embed),
        },
        "encoder": {"layer": {str(index): layer() for index in range(layers)}},
        "pooler": {"dense": dense(embed, embed)},
    }


def t5(embed: int, heads: int, layers: int, hidden: int) -> Tree:
    """T5 v1.1: gated feed-forward blocks, an output projection of its own, heads of 64."""

    def attention(first: bool) -> Tree:
        inner = heads * 64
        projections = {name: weight(inner, embed) for name in "qkv"} | {"o": weight(embed, inner)}
        return projections | ({"relative_attention_bias": weight(32, heads)} if first else {})

    def block(index: int, cross: bool) -> Tree:
        feed_forward = {"wi_0": weight(hidden, embed), "wi_1": weight(hidden, embed), "wo": weight(embed, hidden)}
        parts = [{"SelfAttention": attention(index == 0)}]
        parts += [{"EncDecAttention": attention(False)}] if cross else []
        parts += [{"DenseReluDense": feed_forward}]
        return {"layer": {str(i): part | {"layer_norm": weight(embed)} for i, part in enumerate(parts)}}

    def stack(cross: bool) -> Tree:
        blocks = {str(index): block(index, cross) for index in range(layers)}
        return {"block": blocks, "final_layer_norm": weight(embed)}

    return {
        "shared": weight(32128, embed),
        "encoder": stack(cross=False),
        "decoder": stack(cross=True),
        "lm_head": weight(32128, embed),
    }


def vit(embed: int, heads: int, layers: int, hidden: int, *, patch: int, tokens: int) -> Tree:
    """A ViT encoder under big_vision's names: flax kernels, `[in, out]`, heads and head_dim not fused.

    Without pooling and classifier, as its size is published.
    """
    head_dim = embed // heads

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


def stacked(tree: Tree) -> Tree:
    """The same decoder with its layers stacked along a new first dimension, as `jax.lax.scan` wants them."""
    layers = list(tree["model"]["layers"].values())
    same = jax.tree.map(lambda one, *_: leaf(len(layers), *one.shape, dtype=one.dtype), *layers)
    return {**tree, "model": {**tree["model"], "layers": same}}


def paths_of(tree: Any) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Path and struct of every leaf, the paths written down without shardfx."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join(key.key for key in keys), struct) for keys, struct in leaves]


def parameters(tree: Any) -> int:
    """How many elements all the leaves have."""
    return sum(math.prod(struct.shape) for struct in jax.tree.leaves(tree))


@ft.cache
def fused_of(model: Model) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
    """Path, shape, dimension and elements per head of each leaf with fused heads, one for each distinct shape."""
    found = {}
    for path, struct in paths_of(model.make()):
        for pattern, dim, unit in model.fused:
            if re.search(pattern, path):
                found.setdefault((re.sub(r"\d+", "0", path), struct.shape, dim, unit), path)
    return tuple((path, shape, dim, unit) for (_, shape, dim, unit), path in found.items())


_GEMMA2 = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _heads(head_dim: int, *, bias: bool = False) -> tuple[tuple[str, int, int], ...]:
    projections = ((r"self_attn/[qkv]_proj/weight$", 0, head_dim), (r"self_attn/o_proj/weight$", 1, head_dim))
    return (*projections, (r"self_attn/[qkv]_proj/bias$", 0, head_dim)) if bias else projections


def _llama(make: Callable[[], Tree], total: int, preset: str = "llama", head_dim: int = 128, **kwargs: bool) -> Model:
    return Model(make, total, preset, (("head_dim", head_dim),), _heads(head_dim, **kwargs))


_BERT_HEADS = r"attention/self/\w+/(weight|bias)$", r"attention/output/dense/weight$"
_T5_HEADS = ((r"Attention/[qkv]/weight$", 0, 64), (r"Attention/o/weight$", 1, 64))
_GPT2_HEADS = ((r"c_attn/weight$", 1, 64), (r"c_attn/bias$", 0, 64), (r"attn/c_proj/weight$", 0, 64))

MODELS: dict[str, Model] = {
    "llama-3-8b": _llama(lambda: llama(4096, 32, 8, 32, 14336, 128256), 8_030_261_248),
    "llama-3-70b": _llama(lambda: llama(8192, 64, 8, 80, 28672, 128256), 70_553_706_496),
    "llama-3-405b": _llama(shapes.llama_405b, 405_853_388_800),
    "llama-2-70b": _llama(lambda: llama(8192, 64, 8, 80, 28672, 32000), 68_976_648_192),
    "mistral-7b": _llama(lambda: llama(4096, 32, 8, 32, 14336, 32000), 7_241_732_096, "mistral"),
    "qwen2.5-7b": _llama(
        lambda: decoder(3584, 28, 4, 28, 18944, 152064, qkv_bias=True), 7_615_616_512, "qwen2", bias=True
    ),
    "qwen3-0.6b": _llama(lambda: decoder(1024, 16, 8, 28, 3072, 151936, tied=True, qk_norm=True), 596_049_920, "qwen3"),
    "qwen3-8b": _llama(lambda: decoder(4096, 32, 8, 36, 12288, 151936, qk_norm=True), 8_190_735_360, "qwen3"),
    "qwen3-30b-a3b": _llama(
        lambda: decoder(2048, 32, 4, 48, 0, 151936, qk_norm=True, mlp=routed(2048, 768, 128)),
        30_532_122_624,
        "qwen3_moe",
    ),
    "qwen3-235b-a22b": _llama(
        lambda: decoder(4096, 64, 4, 94, 0, 151936, qk_norm=True, mlp=routed(4096, 1536, 128)),
        235_093_634_560,
        "qwen3_moe",
    ),
    "gemma-2b": _llama(
        lambda: decoder(2048, 8, 1, 18, 16384, 256000, head_dim=256, tied=True), 2_506_172_416, "gemma", 256
    ),
    "gemma-7b": _llama(
        lambda: decoder(3072, 16, 16, 28, 24576, 256000, head_dim=256, tied=True), 8_537_680_896, "gemma", 256
    ),
    "gemma2-9b": _llama(
        lambda: decoder(3584, 16, 8, 42, 14336, 256000, head_dim=256, tied=True, norms=_GEMMA2),
        9_241_705_984,
        "gemma",
        256,
    ),
    "gemma2-27b": _llama(
        lambda: decoder(4608, 32, 16, 46, 36864, 256000, tied=True, norms=_GEMMA2), 27_227_128_320, "gemma"
    ),
    "gemma3-1b": _llama(
        lambda: decoder(1152, 4, 1, 26, 6912, 262144, head_dim=256, tied=True, norms=_GEMMA2, qk_norm=True),
        999_885_952,
        "gemma",
        256,
    ),
    "starcoder2-3b": _llama(lambda: starcoder2(3072, 24, 2, 30, 12288, 49152), 3_030_371_328, "starcoder2", bias=True),
    "mixtral-8x7b": _llama(lambda: mixtral(4096, 32, 32, 14336, 32000), 46_702_792_704, "mixtral"),
    "mixtral-8x22b": _llama(lambda: mixtral(6144, 48, 56, 16384, 32768), 140_630_071_296, "mixtral"),
    "deepseek-v3": Model(
        lambda: shapes.deepseek_v3(dense_layers=3),
        671_026_419_200,
        "deepseek_v3",
        (),
        ((r"q_b_proj/weight$", 0, 192), (r"kv_b_proj/weight$", 0, 256), (r"self_attn/o_proj/weight$", 1, 128)),
    ),
    "gpt2": Model(lambda: gpt2(768, 12), 124_439_808, "gpt2", (), _GPT2_HEADS),
    "gpt2-xl": Model(lambda: gpt2(1600, 48), 1_557_611_200, "gpt2", (), _GPT2_HEADS),
    "bert-base": Model(
        lambda: bert(768, 12, 3072),
        109_482_240,
        "bert",
        (),
        ((_BERT_HEADS[0], 0, 64), (_BERT_HEADS[1], 1, 64)),
    ),
    "minilm-l6": Model(
        lambda: bert(384, 6, 1536),
        22_713_216,
        "bert",
        (("head_dim", 32),),
        ((_BERT_HEADS[0], 0, 32), (_BERT_HEADS[1], 1, 32)),
    ),
    "t5-v1.1-xxl": Model(lambda: t5(4096, 64, 24, 10240), 11_135_332_352, "t5", (), _T5_HEADS),
    # Published as 1,843 million.
    "vit-g-14": Model(lambda: vit(1664, 16, 48, 8192, patch=14, tokens=256), 1_842_772_352),
}
