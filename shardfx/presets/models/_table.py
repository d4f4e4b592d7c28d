"""Every model by name: its family, and the numbers of its config.

The numbers are those of the checkpoints' own config.json; of GPT-3 those of its paper (arXiv:2005.14165, table 2.1), of
T5 those of t5x's gin files, of ViT those of big_vision's models/vit.py. There is one llama3-405b, Llama 3.1's.
big_vision tells ViT "g" from "G"; the others call the large one "bigG".
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


# A family with the names of its numbers, those that all its models share with their values; then a model in each row.
_TEXT = """
llama: embed heads kv_heads head_dim layers hidden vocab
    llama2-7b  4096 32 32 128 32 11008 32000
    llama2-13b 5120 40 40 128 40 13824 32000
    llama2-70b 8192 64  8 128 80 28672 32000
    llama3-8b      4096  32 8 128  32 14336 128256
    llama3-70b     8192  64 8 128  80 28672 128256
    llama3-405b   16384 128 8 128 126 53248 128256
    llama3.1-8b    4096  32 8 128  32 14336 128256
    llama3.1-70b   8192  64 8 128  80 28672 128256
    llama3.1-405b 16384 128 8 128 126 53248 128256
    llama3.3-70b   8192  64 8 128  80 28672 128256
llama: embed heads kv_heads head_dim layers hidden vocab tied=True
    llama3.2-1b 2048 32 8  64 16 8192 128256
    llama3.2-3b 3072 24 8 128 28 8192 128256
llama4: embed heads kv_heads head_dim layers hidden expert_hidden experts experts_every vocab vision_heads=16
+ vision_head_dim=88 vision_layers=34 vision_hidden=5632 vision_patch=14 vision_tokens=576 vision_out=4096
    llama4-scout    5120 40 8 128 48 16384 8192  16 1 202048
    llama4-maverick 5120 40 8 128 48 16384 8192 128 2 202048
mistral: embed heads kv_heads head_dim layers hidden vocab
    mistral-7b 4096 32 8 128 32 14336 32000
mixtral: embed heads kv_heads head_dim layers hidden experts vocab
    mixtral-8x7b  4096 32 8 128 32 14336 8 32000
    mixtral-8x22b 6144 48 8 128 56 16384 8 32768
qwen2: embed heads kv_heads head_dim layers hidden vocab tied=True qkv_bias=True
    qwen2.5-0.5b  896 14 2  64 24  4864 151936
    qwen2.5-1.5b 1536 12 2 128 28  8960 151936
    qwen2.5-3b   2048 16 2 128 36 11008 151936
qwen2: embed heads kv_heads head_dim layers hidden vocab qkv_bias=True
    qwen2.5-7b  3584 28 4 128 28 18944 152064
    qwen2.5-14b 5120 40 8 128 48 13824 152064
    qwen2.5-32b 5120 40 8 128 64 27648 152064
    qwen2.5-72b 8192 64 8 128 80 29568 152064
qwen3: embed heads kv_heads head_dim layers hidden vocab tied=True qk_norm=True
    qwen3-0.6b 1024 16 8 128 28 3072 151936
    qwen3-1.7b 2048 16 8 128 28 6144 151936
    qwen3-4b   2560 32 8 128 36 9728 151936
qwen3: embed heads kv_heads head_dim layers hidden vocab qk_norm=True
    qwen3-8b  4096 32 8 128 36 12288 151936
    qwen3-14b 5120 40 8 128 40 17408 151936
    qwen3-32b 5120 64 8 128 64 25600 151936
qwen3_moe: embed heads kv_heads head_dim layers expert_hidden experts vocab
    qwen3-30b-a3b         2048 32 4 128 48  768 128 151936
    qwen3-235b-a22b       4096 64 4 128 94 1536 128 151936
    qwen3-coder-480b-a35b 6144 96 8 128 62 2560 160 151936
qwen3_next: embed heads kv_heads head_dim layers full_attention_every linear_key_heads linear_value_heads
+ linear_head_dim conv_width expert_hidden experts vocab
    qwen3-next-80b-a3b 2048 16 2 256 48 4 16 32 128 4 512 512 151936
gemma: embed heads kv_heads head_dim layers hidden vocab tied=True
    gemma-2b 2048  8  1 256 18 16384 256000
    gemma-7b 3072 16 16 256 28 24576 256000
gemma: embed heads kv_heads head_dim layers hidden vocab tied=True four_norms=True
    gemma2-2b  2304  8  4 256 26  9216 256000
    gemma2-9b  3584 16  8 256 42 14336 256000
    gemma2-27b 4608 32 16 128 46 36864 256000
gemma: embed heads kv_heads head_dim layers hidden vocab tied=True four_norms=True qk_norm=True
    gemma3-270m  640 4 1 256 18 2048 262144
    gemma3-1b   1152 4 1 256 26 6912 262144
gemma3: embed heads kv_heads head_dim layers hidden vocab vision_heads=16 vision_head_dim=72 vision_layers=27
+ vision_hidden=4304 vision_patch=14 vision_tokens=4096
    gemma3-4b  2560  8  4 256 34 10240 262208
    gemma3-12b 3840 16  8 256 48 15360 262208
    gemma3-27b 5376 32 16 128 62 21504 262208
deepseek: embed heads q_lora layers dense_layers hidden expert_hidden experts shared_experts vocab score_bias
+ kv_lora=512 nope=128 rope=64 value=128
    deepseek-v2-lite 2048  16    0 27 1 10944 1408  64 2 102400 False
    deepseek-v2      5120 128 1536 60 1 12288 1536 160 2 102400 False
    deepseek-v3      7168 128 1536 61 3 18432 2048 256 1 129280 True
    kimi-k2          7168  64 1536 61 1 18432 2048 384 1 163840 True
gpt_oss: embed heads kv_heads head_dim layers hidden experts vocab
    gpt-oss-20b  2880 64 8 64 24 2880  32 201088
    gpt-oss-120b 2880 64 8 64 36 2880 128 201088
starcoder2: embed heads kv_heads head_dim layers hidden vocab
    starcoder2-3b 3072 24 2 128 30 12288 49152
    starcoder2-7b 4608 36 4 128 32 18432 49152
gpt: heads head_dim layers hidden vocab positions
    gpt2        12  64 12  3072 50257 1024
    gpt2-medium 16  64 24  4096 50257 1024
    gpt2-large  20  64 36  5120 50257 1024
    gpt2-xl     25  64 48  6400 50257 1024
    gpt3-6.7b   32 128 32 16384 50257 2048
    gpt3-13b    40 128 40 20480 50257 2048
    gpt3-175b   96 128 96 49152 50257 2048
bert: heads head_dim layers hidden vocab positions
    bert-base  12 64 12 3072 30522 512
    bert-large 16 64 24 4096 30522 512
    minilm-l6  12 32  6 1536 30522 512
t5: embed heads head_dim layers hidden vocab buckets
    t5.1.1-small  512  6 64  8  1024 32128 32
    t5.1.1-base   768 12 64 12  2048 32128 32
    t5.1.1-large 1024 16 64 24  2816 32128 32
    t5.1.1-xl    2048 32 64 24  5120 32128 32
    t5.1.1-xxl   4096 64 64 24 10240 32128 32
vit: heads head_dim layers hidden patch tokens
    vit-ti-16      3  64 12   768 16 196
    vit-s-16       6  64 12  1536 16 196
    vit-b-16      12  64 12  3072 16 196
    vit-l-16      16  64 24  4096 16 196
    vit-so400m-14 16  72 27  4304 14 256
    vit-h-14      16  80 32  5120 14 256
    vit-g-14      16  88 40  6144 14 256
    vit-bigg-14   16 104 48  8192 14 256
    vit-e-14      16 112 56 15360 14 256
"""


class ModelRow(NamedTuple):
    """A model: its family's name, and what it differs in from the others."""

    family: str
    config: Mapping[str, int]


def _rows() -> Iterator[tuple[str, ModelRow]]:
    family, names, same = "", list[str](), dict[str, int | bool]()
    for line in _TEXT.strip().replace("\n+", "").splitlines():
        first, *words = line.split()
        if first.endswith(":"):
            family, names = first[:-1], [word for word in words if "=" not in word]
            same = {name: _number(text) for name, _, text in (word.partition("=") for word in words) if text}
        else:
            yield first, ModelRow(family, MappingProxyType(dict(zip(names, map(_number, words), strict=True)) | same))


def _number(text: str) -> int | bool:
    return text == "True" if text in ("True", "False") else int(text)


TABLE: Final[Mapping[str, ModelRow]] = MappingProxyType(dict(_rows()))
