"""Small random weights under the real names of published checkpoints, and what NumPy makes of them."""

from typing import Any

import ml_dtypes
import numpy as np

from shardfx._ground.tree import flatten
from shardfx.presets import models


_DECODER = {"embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 3, "hidden": 48, "vocab": 64}
_EXPERTS = {**_DECODER, "experts": 4}
_EYES = {"vision_layers": 1, "vision_heads": 2, "vision_head_dim": 4, "vision_hidden": 8, "vision_tokens": 4}
_EYES |= {"vision_patch": 2}
_MLA = {"embed": 64, "heads": 2, "kv_lora": 16, "nope": 8, "rope": 4, "value": 8, "layers": 5, "hidden": 96}
_MLA |= {"vocab": 64}
# A published model, its numbers made small, and a configuration of that size in Hugging Face's words.
MODELS = {
    "llama": ("llama3-8b", _DECODER, {}),
    "mistral": ("mistral-7b", _DECODER, {}),
    "mixtral": ("mixtral-8x7b", _EXPERTS, {"num_local_experts": 4}),
    "qwen2": ("qwen2.5-7b", _DECODER, {}),
    "qwen3": ("qwen3-4b", _DECODER, {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3-30b-a3b",
        {**{name: size for name, size in _EXPERTS.items() if name != "hidden"}, "expert_hidden": 24},
        {"num_experts": 4},
    ),
    "gemma": ("gemma-2b", {**_DECODER, "kv_heads": 1}, {"num_key_value_heads": 1}),
    "gemma2": ("gemma2-2b", _DECODER, {}),
    "gemma3_text": ("gemma3-1b", _DECODER, {}),
    "gemma3": ("gemma3-4b", {**_DECODER, **_EYES}, {}),
    "gpt2": ("gpt2", {"heads": 4, "head_dim": 8, "layers": 3, "hidden": 48, "vocab": 50, "positions": 16}, {}),
    "bert": ("bert-base", {"heads": 4, "head_dim": 8, "layers": 3, "hidden": 48, "vocab": 50, "positions": 16}, {}),
    "deepseek_v2": (
        "deepseek-v2-lite",
        {**_MLA, "dense_layers": 1, "expert_hidden": 24, "experts": 4},
        {"first_k_dense_replace": 1, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "deepseek-v3",
        {**_MLA, "dense_layers": 3, "expert_hidden": 24, "experts": 4, "q_lora": 24},
        {"first_k_dense_replace": 3, "q_lora_rank": 24, "topk_method": "noaux_tc"},
    ),
}


def config_of(family: str, **more_sizes: int) -> dict:
    """What its config.json would say."""
    _, sizes, more = MODELS[family]
    sizes = {**sizes, **more_sizes}
    heads, dim = sizes["heads"], sizes.get("head_dim", 0)
    config = {"model_type": family, "vocab_size": sizes["vocab"], "num_hidden_layers": sizes["layers"]}
    if family == "gpt2":
        config |= {"n_embd": heads * dim, "n_head": heads}
    elif "nope" in sizes:
        config |= {"hidden_size": sizes["embed"], "num_attention_heads": heads, "n_routed_experts": sizes["experts"]}
        config |= {"kv_lora_rank": sizes["kv_lora"], "qk_nope_head_dim": sizes["nope"]}
        config |= {"qk_rope_head_dim": sizes["rope"], "v_head_dim": sizes["value"]}
    else:
        config |= {"hidden_size": sizes.get("embed", heads * dim), "num_attention_heads": heads}
        config |= {"num_key_value_heads": sizes.get("kv_heads", heads), "head_dim": dim}
    config |= more
    return {"model_type": family, "text_config": config} if family == "gemma3" else config


def files_of(family: str, dtype: Any = np.float64, **more_sizes: int) -> dict[str, np.ndarray]:
    """Random weights by the names of the checkpoint."""
    name, sizes, _ = MODELS[family]
    flat, random = flatten(models.tree(name, **{**sizes, **more_sizes})), np.random.default_rng(0)
    shapes = {path.replace("/", "."): leaf.shape for path, leaf in zip(flat.paths, flat.leaves, strict=True)}
    return {path: (random.normal(size=shape) / 4).astype(dtype) for path, shape in shapes.items()}


def in_blocks(files: dict[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
    """The matrices of linear layers as DeepSeek publishes them: fp8, and a scale for each block."""
    found = {}
    for path, array in files.items():
        if not path.endswith(("_proj.weight", "_with_mqa.weight")):
            found[path] = array.astype(ml_dtypes.bfloat16)
            continue
        rows, columns = (-(-size // block) for size in array.shape)
        found[path] = (array * 16).astype(ml_dtypes.float8_e4m3fn)
        scales = np.random.default_rng(len(found)).uniform(0.01, 0.1, size=(rows, columns))
        found[f"{path}_scale_inv"] = scales.astype(np.float32)
    return found


def unscaled(files: dict[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
    """The matrices that such blocks stand for, element by element."""
    found = {}
    for path, array in files.items():
        scales = files.get(f"{path}_scale_inv")
        if scales is not None:
            rows, columns = (np.arange(size) // block for size in array.shape)
            array = (array.astype(np.float32) * scales[rows][:, columns]).astype(ml_dtypes.bfloat16)
        if not path.endswith("_scale_inv"):
            found[path] = array
    return found


def equal(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Bit by bit."""
    assert sorted(found) == sorted(expected)
    for path, array in expected.items():
        assert found[path].shape == array.shape and found[path].dtype == array.dtype, path
        assert np.ascontiguousarray(found[path]).tobytes() == np.ascontiguousarray(array).tobytes(), path


def close(found: dict[str, Any], expected: dict[str, np.ndarray], rtol: float = 1e-15, atol: float = 0) -> None:
    """As `equal`, but for rounding: what was counted with, and counted back."""
    assert sorted(found) == sorted(expected)
    for path, array in expected.items():
        assert found[path].shape == array.shape and found[path].dtype == array.dtype, path
        np.testing.assert_allclose(found[path], array, rtol=rtol, atol=atol, err_msg=path)


# By hand: per path of the stacked tree the name in the checkpoint, and what NumPy does with one layer of it.


def _by_hand(text):
    """Rows of a path, a name and at most one letter: T for turned, 0 to 2 for a third of the columns."""
    changes = {"": lambda x: x, "T": np.transpose} | {str(i): lambda x, i=i: np.split(x, 3, -1)[i] for i in range(3)}
    rows = [[*line.split(), ""] for line in text.strip().splitlines()]
    return {path: (name, changes[change]) for path, name, change, *_ in rows}


_ATTENTION = _by_hand("""
attention_norm/scale  input_layernorm.weight
attention/query       self_attn.q_proj.weight  T
attention/key         self_attn.k_proj.weight  T
attention/value       self_attn.v_proj.weight  T
attention/out         self_attn.o_proj.weight  T
""")
_MLP = _by_hand("""
mlp/gate  mlp.gate_proj.weight  T
mlp/up    mlp.up_proj.weight    T
mlp/down  mlp.down_proj.weight  T
""")
_TWO_NORMS = _by_hand("mlp_norm/scale  post_attention_layernorm.weight")
_FOUR_NORMS = _by_hand("""
attention_post_norm/scale  post_attention_layernorm.weight
mlp_norm/scale             pre_feedforward_layernorm.weight
mlp_post_norm/scale        post_feedforward_layernorm.weight
""")
_QK_NORMS = _by_hand("""
attention/query_norm  self_attn.q_norm.weight
attention/key_norm    self_attn.k_norm.weight
""")
_BIASES = _by_hand("""
attention/query_bias  self_attn.q_proj.bias
attention/key_bias    self_attn.k_proj.bias
attention/value_bias  self_attn.v_proj.bias
""")


def _experts(prefix, gate, up, down):
    return _by_hand(f"""
    mlp/router        {prefix}gate.weight                 T
    mlp/experts/gate  {prefix}experts.{{e}}.{gate}.weight  T
    mlp/experts/up    {prefix}experts.{{e}}.{up}.weight    T
    mlp/experts/down  {prefix}experts.{{e}}.{down}.weight  T
    """)


_MIXTRAL = _experts("block_sparse_moe.", "w1", "w3", "w2")
_ROUTED = _experts("mlp.", "gate_proj", "up_proj", "down_proj")
_LATENT = _TWO_NORMS | _by_hand("""
attention_norm/scale  input_layernorm.weight
attention/kv_a        self_attn.kv_a_proj_with_mqa.weight  T
attention/kv_a_norm   self_attn.kv_a_layernorm.weight
attention/kv_b        self_attn.kv_b_proj.weight           T
attention/out         self_attn.o_proj.weight              T
""")
_SHARED = _by_hand("""
mlp/shared/gate  mlp.shared_experts.gate_proj.weight  T
mlp/shared/up    mlp.shared_experts.up_proj.weight    T
mlp/shared/down  mlp.shared_experts.down_proj.weight  T
""")
_V2 = _LATENT | _by_hand("attention/query  self_attn.q_proj.weight  T")
_V3 = _LATENT | _by_hand("""
attention/query_a       self_attn.q_a_proj.weight       T
attention/query_a_norm  self_attn.q_a_layernorm.weight
attention/query_b       self_attn.q_b_proj.weight       T
""")
_SCORES = _by_hand("mlp/router_bias  mlp.gate.e_score_correction_bias")
_GPT2 = _by_hand("""
attention_norm/scale  ln_1.weight
attention_norm/bias   ln_1.bias
mlp_norm/scale        ln_2.weight
mlp_norm/bias         ln_2.bias
attention/query       attn.c_attn.weight  0
attention/key         attn.c_attn.weight  1
attention/value       attn.c_attn.weight  2
attention/query_bias  attn.c_attn.bias    0
attention/key_bias    attn.c_attn.bias    1
attention/value_bias  attn.c_attn.bias    2
attention/out         attn.c_proj.weight
attention/out_bias    attn.c_proj.bias
mlp/up                mlp.c_fc.weight
mlp/up_bias           mlp.c_fc.bias
mlp/down              mlp.c_proj.weight
mlp/down_bias         mlp.c_proj.bias
""")
_BERT = _by_hand("""
attention/query       attention.self.query.weight   T
attention/key         attention.self.key.weight     T
attention/value       attention.self.value.weight   T
attention/query_bias  attention.self.query.bias
attention/key_bias    attention.self.key.bias
attention/value_bias  attention.self.value.bias
attention/out         attention.output.dense.weight  T
attention/out_bias    attention.output.dense.bias
mlp/up                intermediate.dense.weight      T
mlp/up_bias           intermediate.dense.bias
mlp/down              output.dense.weight            T
mlp/down_bias         output.dense.bias
attention_norm/scale  attention.output.LayerNorm.weight
attention_norm/bias   attention.output.LayerNorm.bias
mlp_norm/scale        output.LayerNorm.weight
mlp_norm/bias         output.LayerNorm.bias
""")
_LLAMA = _ATTENTION | _TWO_NORMS | _MLP
_IN_LAYERS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _ATTENTION | _TWO_NORMS | _MIXTRAL,
    "qwen2": _LLAMA | _BIASES,
    "qwen3": _LLAMA | _QK_NORMS,
    "qwen3_moe": _ATTENTION | _TWO_NORMS | _QK_NORMS | _ROUTED,
    "gemma": _LLAMA,
    "gemma2": _ATTENTION | _FOUR_NORMS | _MLP,
    "gemma3": _ATTENTION | _FOUR_NORMS | _MLP | _QK_NORMS,
    "gemma3_text": _ATTENTION | _FOUR_NORMS | _MLP | _QK_NORMS,
    "gpt2": _GPT2,
    "bert": _BERT,
}
_STACKS = {
    "deepseek_v2": {"dense_layers": (0, 1, _V2 | _MLP), "moe_layers": (1, 5, _V2 | _ROUTED | _SHARED)},
    "deepseek_v3": {"dense_layers": (0, 3, _V3 | _MLP), "moe_layers": (3, 5, _V3 | _ROUTED | _SHARED | _SCORES)},
}


def stacked_by_hand(family: str, files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stacked tree of a checkpoint, with loops over layers and experts."""
    before, layers = _prefixes(family)
    found = _ends(family, files, before)
    for stack, (start, stop, rows) in _STACKS.get(family, {"layers": (0, 3, _IN_LAYERS.get(family, {}))}).items():
        for path, (name, change) in rows.items():
            one = [_layer(files, f"{before}{layers}.{i}.{name}", change) for i in range(start, stop)]
            found[f"{stack}/{path}"] = np.stack(one)
    return found


def _layer(files, name, change):
    if "{e}" not in name:
        return change(files[name])
    return np.stack([change(files[name.replace("{e}", str(number))]) for number in range(4)])


def _prefixes(family):
    if family == "bert":
        return "", "encoder.layer"
    return ("", "h") if family == "gpt2" else ("language_model.model." if family == "gemma3" else "model.", "layers")


def _ends(family, files, before):
    if family == "gpt2":
        found = {"embedding": files["wte.weight"], "positions": files["wpe.weight"]}
        return found | {"norm/scale": files["ln_f.weight"], "norm/bias": files["ln_f.bias"]}
    if family == "bert":
        names = {"embedding": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"}
        found = {path: files[f"embeddings.{name}.weight"] for path, name in names.items()}
        norm = {"scale": "weight", "bias": "bias"}
        found |= {f"norm/{one}": files[f"embeddings.LayerNorm.{name}"] for one, name in norm.items()}
        return found | {"pooler/weight": files["pooler.dense.weight"].T, "pooler/bias": files["pooler.dense.bias"]}
    found = {"embedding": files[f"{before}embed_tokens.weight"], "norm/scale": files[f"{before}norm.weight"]}
    return found | ({"head": files["lm_head.weight"].T} if "lm_head.weight" in files else {})
