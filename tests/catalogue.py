"""Real models as trees of ShapeDtypeStructs under their public names: nothing is
allocated.

Each model says how many parameters were published, which of its dimensions hold fused
heads, and which preset is for it, so that every law can be tested on every model.
"""

import dataclasses
import functools as ft
import math
import re
from typing import Any

import jax

from shardfx.presets import models


Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the catalogue.

    `fused` holds `(regex of paths, dimension, elements per head)` for every dimension
    in which heads lie side by side.
    """

    name: str
    preset: str | None = None
    arguments: tuple[tuple[str, int], ...] = ()
    fused: tuple[tuple[str, int, int], ...] = ()

    def make(self) -> Tree:
        return models.tree(self.name)

    @property
    def parameters(self) -> int:
        return PUBLISHED[self.name]


def paths_of(tree: Any) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Path and struct of every leaf, the paths written down without shardfx."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join(key.key for key in keys), struct) for keys, struct in leaves]


def parameters(tree: Any) -> int:
    """How many elements all the leaves have."""
    return sum(math.prod(struct.shape) for struct in jax.tree.leaves(tree))


@ft.cache
def fused_of(model: Model) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
    """Path, shape, dimension and elements per head of each leaf with fused heads, one
    for each distinct shape.
    """
    arrays = {}
    for path, struct in paths_of(model.make()):
        for pattern, dim, unit in model.fused:
            if re.search(pattern, path):
                arrays.setdefault(
                    (re.sub(r"\d+", "0", path), struct.shape, dim, unit), path
                )
    return tuple(
        (path, shape, dim, unit) for (_, shape, dim, unit), path in arrays.items()
    )


def _heads(head_dim: int, *, bias: bool = False) -> tuple[tuple[str, int, int], ...]:
    projections = (
        (r"self_attn/[qkv]_proj/weight$", 0, head_dim),
        (r"self_attn/o_proj/weight$", 1, head_dim),
    )
    if bias:
        return (*projections, (r"self_attn/[qkv]_proj/bias$", 0, head_dim))
    return projections


def _decoder(
    name: str, preset: str, head_dim: int = 128, *, bias: bool = False
) -> Model:
    return Model(
        name=name,
        preset=preset,
        arguments=(("head_dim", head_dim),),
        fused=_heads(head_dim, bias=bias),
    )


_BERT_HEADS = r"attention/self/\w+/(weight|bias)$", r"attention/output/dense/weight$"
_T5_HEADS = ((r"Attention/[qkv]/weight$", 0, 64), (r"Attention/o/weight$", 1, 64))
_GPT2_HEADS = (
    (r"c_attn/weight$", 1, 64),
    (r"c_attn/bias$", 0, 64),
    (r"attn/c_proj/weight$", 0, 64),
)
_LATENT_HEADS = (
    (r"q_b_proj/weight$", 0, 192),
    (r"kv_b_proj/weight$", 0, 256),
    (r"self_attn/o_proj/weight$", 1, 128),
)
_GATED_AND_LINEAR_HEADS = (
    # A query and its gate; and a linear key head with its two values and their gates.
    (r"self_attn/q_proj/weight$", 0, 512),
    (r"self_attn/[kv]_proj/weight$", 0, 256),
    (r"self_attn/o_proj/weight$", 1, 256),
    (r"linear_attn/in_proj_qkvz/weight$", 0, 768),
    (r"linear_attn/in_proj_ba/weight$", 0, 4),
    (r"linear_attn/out_proj/weight$", 1, 128),
)
_HEADS_AND_EYES = (
    (r"^language.*/self_attn/[qkv]_proj/weight$", 0, 128),
    (r"^language.*/self_attn/o_proj/weight$", 1, 128),
    (r"^vision.*/self_attn/[qkv]_proj/(weight|bias)$", 0, 88),
    (r"^vision.*/self_attn/o_proj/weight$", 1, 88),
)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        *(
            _decoder(name, "llama")
            for name in ("llama3-8b", "llama3-70b", "llama3-405b", "llama2-70b")
        ),
        _decoder("mistral-7b", "mistral"),
        _decoder("qwen2.5-7b", "qwen2", bias=True),
        *(_decoder(name, "qwen3") for name in ("qwen3-0.6b", "qwen3-8b")),
        *(_decoder(name, "qwen3_moe") for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")),
        *(
            _decoder(name, "gemma", 256)
            for name in ("gemma-2b", "gemma-7b", "gemma2-9b", "gemma3-1b")
        ),
        _decoder("gemma2-27b", "gemma"),
        _decoder("starcoder2-3b", "starcoder2", bias=True),
        _decoder("olmo2-7b", "olmo2"),
        Model(
            name="phi3-mini",
            preset="phi3",
            arguments=(("head_dim", 96),),
            fused=(
                (r"self_attn/qkv_proj/weight$", 0, 96),
                (r"self_attn/o_proj/weight$", 1, 96),
            ),
        ),
        _decoder("glm4.5-air", "glm4_moe", bias=True),
        _decoder("gemma3n-e2b", "gemma3n", 256),
        _decoder("gpt-oss-20b", "gpt_oss", 64, bias=True),
        Model(
            name="qwen3-next-80b-a3b",
            preset="qwen3_next",
            arguments=(),
            fused=_GATED_AND_LINEAR_HEADS,
        ),
        Model(
            name="llama4-scout",
            preset="llama4",
            arguments=(),
            fused=_HEADS_AND_EYES,
        ),
        *(_decoder(name, "mixtral") for name in ("mixtral-8x7b", "mixtral-8x22b")),
        Model(
            name="deepseek-v3",
            preset="deepseek_v3",
            arguments=(),
            fused=_LATENT_HEADS,
        ),
        Model(
            name="gpt2",
            preset="gpt2",
            arguments=(),
            fused=_GPT2_HEADS,
        ),
        Model(
            name="gpt2-xl",
            preset="gpt2",
            arguments=(),
            fused=_GPT2_HEADS,
        ),
        Model(
            name="bert-base",
            preset="bert",
            arguments=(),
            fused=((_BERT_HEADS[0], 0, 64), (_BERT_HEADS[1], 1, 64)),
        ),
        Model(
            name="minilm-l6",
            preset="bert",
            arguments=(("head_dim", 32),),
            fused=((_BERT_HEADS[0], 0, 32), (_BERT_HEADS[1], 1, 32)),
        ),
        Model(
            name="t5.1.1-xxl",
            preset="t5",
            arguments=(),
            fused=_T5_HEADS,
        ),
        Model("vit-bigg-14"),
    )
}

# How many parameters each has, as was published, and where: the preset of keras_hub
# that states the total (`params`, which a test reads where keras_hub is installed);
# `safetensors.total` of the model's page on Hugging Face, as public repositories quote
# it (looked up in November 2026), without RoPE's frequencies of each layer; or, where
# no exact total was found, what its paper and card say, in millions. (The page of
# Kimi-K2 has a total with 3,416 more than its shapes give, that of DeepSeek-V3 one with
# the layer that predicts ahead; open_clip counts the projection of ViT-bigG's image
# tower, 1664 x 1280.)
HUB = "safetensors.total"
# What `safetensors.total` counts beside the weights of the table: the layer of GLM that
# predicts ahead, with its own embedding and head; and the towers of Gemma 3n for images
# and sound, which are the same in E2B and E4B.
_GLM_AIR_AHEAD = 3_616_573_568
_GLM_AHEAD = 5_539_962_272
_GEMMA3N_TOWERS = 983_281_504
_SOURCES: dict[str, tuple[int, str | float]] = {
    "llama2-7b": (6_738_415_616, "llama2_7b_en"),
    "llama2-13b": (13_015_866_880 - 40 * 64, HUB),
    "llama2-70b": (68_976_653_312 - 80 * 64, HUB),
    "llama3-8b": (8_030_261_248, "llama3_8b_en"),
    "llama3.1-8b": (8_030_261_248, "llama3_8b_en"),
    **dict.fromkeys(
        ("llama3-70b", "llama3.1-70b", "llama3.3-70b"), (70_553_706_496, HUB)
    ),
    **dict.fromkeys(("llama3-405b", "llama3.1-405b"), (405_853_388_800, HUB)),
    "llama3.2-1b": (1_235_814_400, HUB),
    "llama4-scout": (108_641_793_536, HUB),
    "llama4-maverick": (401_583_781_376, HUB),
    "llama3.2-3b": (3_212_749_824, HUB),
    "mistral-7b": (7_241_732_096, "mistral_7b_en"),
    "mixtral-8x7b": (46_702_792_704, "mixtral_8_7b_en"),
    "mixtral-8x22b": (140_630_071_296, HUB),
    "qwen2.5-0.5b": (494_032_768, "qwen2.5_0.5b_en"),
    "qwen2.5-1.5b": (1_543_714_304, "qwen2.5_math_1.5b_en"),
    "qwen2.5-3b": (3_085_938_688, "qwen2.5_3b_en"),
    "qwen2.5-7b": (7_615_616_512, "qwen2.5_math_7b_en"),
    "qwen2.5-14b": (14_770_033_664, HUB),
    "qwen2.5-32b": (32_763_876_352, "qwen2.5_instruct_32b_en"),
    "qwen2.5-72b": (72_706_203_648, "qwen2.5_instruct_72b_en"),
    "qwen3-0.6b": (596_049_920, "qwen3_0.6b_en"),
    "qwen3-1.7b": (1_720_574_976, "qwen3_1.7b_en"),
    "qwen3-4b": (4_022_468_096, "qwen3_4b_en"),
    "qwen3-8b": (8_190_735_360, "qwen3_8b_en"),
    "qwen3-14b": (14_768_307_200, "qwen3_14b_en"),
    "qwen3-32b": (32_762_123_264, "qwen3_32b_en"),
    "qwen3-30b-a3b": (30_532_122_624, "qwen3_moe_30b_a3b_en"),
    "qwen3-235b-a22b": (235_093_634_560, "qwen3_moe_235b_a22b_en"),
    "qwen3-coder-480b-a35b": (480_154_875_392, HUB),
    "qwen3-next-80b-a3b": (81_324_862_720, HUB),
    "gemma-2b": (2_506_172_416, "gemma_2b_en"),
    "gemma-7b": (8_537_680_896, "gemma_7b_en"),
    "gemma2-2b": (2_614_341_888, "gemma2_2b_en"),
    "gemma2-9b": (9_241_705_984, "gemma2_9b_en"),
    "gemma2-27b": (27_227_128_320, "gemma2_27b_en"),
    "gemma3-270m": (268_098_176, "gemma3_270m"),
    "gemma3-1b": (999_885_952, "gemma3_1b"),
    "gemma3-4b": (4_300_079_472, "medgemma_4b"),
    "gemma3-12b": (12_187_325_040, HUB),
    "gemma3-27b": (27_432_406_640, "medgemma_instruct_27b"),
    "deepseek-v2-lite": (15_706_484_224, HUB),
    "deepseek-v2": (235_741_434_880, HUB),
    "deepseek-v3": (671_026_419_200, 671_000),
    "kimi-k2": (1_026_408_232_448, 1_026_408),
    "gpt-oss-20b": (20_914_757_184, "gpt_oss_20b_en"),
    "gpt-oss-120b": (116_829_156_672, HUB),
    "starcoder2-3b": (3_030_371_328, 3_030),
    "starcoder2-7b": (7_173_923_840, 7_170),
    "olmo2-7b": (7_298_617_344, HUB),
    "olmo2-13b": (13_716_198_400, HUB),
    "olmo2-32b": (32_234_279_936, HUB),
    "phi3-mini": (3_821_079_552, "phi3_mini_4k_instruct_en"),
    "phi3-medium": (13_960_238_080, HUB),
    "phi4": (14_659_507_200, HUB),
    "glm4.5-air": (110_468_824_832 - _GLM_AIR_AHEAD, HUB),
    "glm4.5": (358_337_791_296 - _GLM_AHEAD, HUB),
    "gemma3n-e2b": (5_439_438_272 - _GEMMA3N_TOWERS, HUB),
    "gemma3n-e4b": (7_849_978_192 - _GEMMA3N_TOWERS, HUB),
    "gpt2": (124_439_808, "gpt2_base_en"),
    "gpt2-medium": (354_823_168, "gpt2_medium_en"),
    "gpt2-large": (774_030_080, "gpt2_large_en"),
    "gpt2-xl": (1_557_611_200, "gpt2_extra_large_en"),
    "bert-base": (109_482_240, "bert_base_en_uncased"),
    "bert-large": (335_141_888, "bert_large_en_uncased"),
    "minilm-l6": (22_713_216, "all_minilm_l6_v2_en"),
    "t5.1.1-small": (76_961_152, "flan_small_multi"),
    "t5.1.1-base": (247_577_856, "t5_1.1_base"),
    "t5.1.1-large": (783_150_080, "flan_large_multi"),
    "t5.1.1-xl": (2_849_757_184, "t5_1.1_xl"),
    "t5.1.1-xxl": (11_135_332_352, "t5_1.1_xxl"),
    "vit-bigg-14": (1_842_772_352, 1_844.9 - 2.1),
}
PUBLISHED: dict[str, int] = {name: total for name, (total, _) in _SOURCES.items()}
KERAS_HUB = {
    name: where
    for name, (_, where) in _SOURCES.items()
    if isinstance(where, str) and where != HUB
}
ROUNDED = {
    name: where
    for name, (_, where) in _SOURCES.items()
    if isinstance(where, float | int)
}
# In millions and rounded: GPT-3's in table D.1 of its paper, ViT-g's and e's in theirs,
# and so400m's in timm, without pooling and classifier. (PaLI says 3,926 for ViT-e; 68
# are its pooling and 53 the classifier of 29,593 classes.)
MILLIONS: dict[str, float] = {
    "gpt3-6.7b": 6_660,
    "gpt3-13b": 12_850,
    "gpt3-175b": 174_600,
    "vit-so400m-14": 412.4,
    "vit-g-14": 1_011,
    "vit-e-14": 3_926 - 68 - 53,
}
# Of ViTs with a class token and a classifier of 1,000 classes: torchvision's
# `num_params`; of the small ones DeiT's.
WITH_CLASS: dict[str, int] = {
    "vit-ti-16": 5_717_416,
    "vit-s-16": 22_050_664,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
}
