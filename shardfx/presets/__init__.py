"""Ready-made values: the rules of T5X and eformer, rules for models under Hugging Face's names, `models`, and `maps`.

It may import the rules, the maps between trees and the ground values. It never plans: a preset is a value, to be
given to `plan`, `load`, `save` or `reshard`.
"""

from . import layouts as layouts, maps as maps, models as models, tokens as tokens
from ._axis_rules import eformer as eformer, t5x as t5x
from .hf import (
    bert as bert,
    deepseek_v3 as deepseek_v3,
    gemma as gemma,
    gpt2 as gpt2,
    llama as llama,
    mistral as mistral,
    mixtral as mixtral,
    qwen2 as qwen2,
    qwen3 as qwen3,
    qwen3_moe as qwen3_moe,
    starcoder2 as starcoder2,
    t5 as t5,
)
from .layouts import Layout as Layout, infer_mode as infer_mode
