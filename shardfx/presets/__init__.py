"""Ready-made sharding rules (T5X, eformer, Hugging Face models), model shapes
(`models`) and layout maps (`maps`).

It may import `_rules`, `_convert` and `_ground`. It never plans: a preset is a value
that a user passes to `plan`, `load`, `save` or `reshard`.
"""

from . import layouts as layouts, maps as maps, models as models, tokens as tokens
from ._axis_rules import eformer as eformer, t5x as t5x
from .hf import (
    bert as bert,
    deepseek_v3 as deepseek_v3,
    gemma as gemma,
    gemma3n as gemma3n,
    glm4_moe as glm4_moe,
    gpt2 as gpt2,
    gpt_oss as gpt_oss,
    llama as llama,
    llama4 as llama4,
    mistral as mistral,
    mixtral as mixtral,
    olmo2 as olmo2,
    phi3 as phi3,
    qwen2 as qwen2,
    qwen3 as qwen3,
    qwen3_moe as qwen3_moe,
    qwen3_next as qwen3_next,
    starcoder2 as starcoder2,
    t5 as t5,
)
from .layouts import Layout as Layout, infer_mode as infer_mode
