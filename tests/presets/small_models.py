"""Small random weights under the real names of published checkpoints, and what NumPy
makes of them.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import shardfx
from shardfx import MeshSpec, PathRules
from shardfx.presets import models


_DECODER = {
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "layers": 3,
    "hidden": 48,
    "vocab": 64,
}
_EXPERTS = {**_DECODER, "experts": 4}
_EYES = {
    "vision_layers": 1,
    "vision_heads": 2,
    "vision_head_dim": 4,
    "vision_hidden": 8,
    "vision_tokens": 4,
}
_EYES |= {"vision_patch": 2}
_STREAMS = {
    "streams": 3,
    "laurel_rank": 6,
    "layer_input": 10,
    "layer_vocab": 40,
}
_STREAMS_CONFIG = {
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 40,
}
_MLA = {
    "embed": 64,
    "heads": 2,
    "kv_lora": 16,
    "nope": 8,
    "rope": 4,
    "value": 8,
    "layers": 5,
    "hidden": 96,
}
_MLA |= {"vocab": 64}
# A published model, its numbers made small, and a configuration of that size in Hugging
# Face's words.
MODELS = {
    "llama": ("llama3-8b", _DECODER, {}),
    "mistral": ("mistral-7b", _DECODER, {}),
    "mixtral": ("mixtral-8x7b", _EXPERTS, {"num_local_experts": 4}),
    "qwen2": ("qwen2.5-7b", _DECODER, {}),
    "qwen3": ("qwen3-4b", _DECODER, {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3-30b-a3b",
        {
            **{name: size for name, size in _EXPERTS.items() if name != "hidden"},
            "expert_hidden": 24,
        },
        {"num_experts": 4},
    ),
    "gemma": ("gemma-2b", {**_DECODER, "kv_heads": 1}, {"num_key_value_heads": 1}),
    "gemma2": ("gemma2-2b", _DECODER, {}),
    "gemma3_text": ("gemma3-1b", _DECODER, {}),
    "gemma3": ("gemma3-4b", {**_DECODER, **_EYES}, {}),
    "gemma3n": ("gemma3n-e2b", {**_DECODER, **_STREAMS}, _STREAMS_CONFIG),
    "olmo2": ("olmo2-7b", _DECODER, {}),
    "phi3": ("phi4", _DECODER, {}),
    "glm4_moe": (
        "glm4.5",
        {**_EXPERTS, "dense_layers": 1, "expert_hidden": 24},
        {
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "heads": 4,
            "head_dim": 8,
            "layers": 3,
            "hidden": 48,
            "vocab": 50,
            "positions": 16,
        },
        {},
    ),
    "bert": (
        "bert-base",
        {
            "heads": 4,
            "head_dim": 8,
            "layers": 3,
            "hidden": 48,
            "vocab": 50,
            "positions": 16,
        },
        {},
    ),
    "deepseek_v2": (
        "deepseek-v2-lite",
        {
            **_MLA,
            "dense_layers": 1,
            "expert_hidden": 24,
            "experts": 4,
        },
        {"first_k_dense_replace": 1, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "deepseek-v3",
        {
            **_MLA,
            "dense_layers": 3,
            "expert_hidden": 24,
            "experts": 4,
            "q_lora": 24,
        },
        {"first_k_dense_replace": 3, "q_lora_rank": 24, "topk_method": "noaux_tc"},
    ),
}


def config_of(family: str, **more_sizes: int) -> dict:
    """What its config.json would say."""
    _, sizes, options = MODELS[family]
    sizes = {**sizes, **more_sizes}
    heads = sizes["heads"]
    dim = sizes.get("head_dim", 0)
    config = {
        "model_type": family,
        "vocab_size": sizes["vocab"],
        "num_hidden_layers": sizes["layers"],
    }
    if family == "gpt2":
        config |= {"n_embd": heads * dim, "n_head": heads}
    elif "nope" in sizes:
        config |= {
            "hidden_size": sizes["embed"],
            "num_attention_heads": heads,
            "n_routed_experts": sizes["experts"],
        }
        config |= {"kv_lora_rank": sizes["kv_lora"], "qk_nope_head_dim": sizes["nope"]}
        config |= {"qk_rope_head_dim": sizes["rope"], "v_head_dim": sizes["value"]}
    else:
        config |= {
            "hidden_size": sizes.get("embed", heads * dim),
            "num_attention_heads": heads,
        }
        config |= {"num_key_value_heads": sizes.get("kv_heads", heads), "head_dim": dim}
    config |= options
    if family in ("gemma3", "gemma3n"):
        return {"model_type": family, "text_config": config}
    return config


def files_of(
    family: str, dtype: Any = np.float64, **more_sizes: int
) -> dict[str, np.ndarray]:
    """Random weights by the names of the checkpoint."""
    name, sizes, _ = MODELS[family]
    tree = models.tree(name, **{**sizes, **more_sizes})
    plan = shardfx.plan(tree, MeshSpec({"data": 1}), paths=PathRules([("", P())]))
    random = np.random.default_rng(0)
    shapes = {leaf.path.replace("/", "."): leaf.shape for leaf in plan.leaves}
    return {
        path: (random.normal(size=shape) / 4).astype(dtype)
        for path, shape in shapes.items()
    }


def in_blocks(files: dict[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
    """The matrices of linear layers as DeepSeek publishes them: fp8, and a scale for
    each block.
    """
    arrays = {}
    for path, array in files.items():
        if not path.endswith(("_proj.weight", "_with_mqa.weight")):
            arrays[path] = array.astype(ml_dtypes.bfloat16)
            continue
        rows, columns = (-(-size // block) for size in array.shape)
        arrays[path] = (array * 16).astype(ml_dtypes.float8_e4m3fn)
        scales = np.random.default_rng(len(arrays)).uniform(
            0.01, 0.1, size=(rows, columns)
        )
        arrays[f"{path}_scale_inv"] = scales.astype(np.float32)
    return arrays


def unscaled(files: dict[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
    """The matrices that such blocks stand for, element by element."""
    arrays = {}
    for path, array in files.items():
        scales = files.get(f"{path}_scale_inv")
        if scales is not None:
            rows, columns = (np.arange(size) // block for size in array.shape)
            scaled = array.astype(np.float32) * scales[rows][:, columns]
            array = scaled.astype(ml_dtypes.bfloat16)
        if not path.endswith("_scale_inv"):
            arrays[path] = array
    return arrays


def equal(arrays: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Bit by bit."""
    assert sorted(arrays) == sorted(expected)
    for path, array in expected.items():
        assert arrays[path].shape == array.shape, path
        assert arrays[path].dtype == array.dtype, path
        actual = np.ascontiguousarray(arrays[path]).tobytes()
        assert actual == np.ascontiguousarray(array).tobytes(), path


def close(
    arrays: dict[str, Any],
    expected: dict[str, np.ndarray],
    rtol: float = 1e-15,
    atol: float = 0,
) -> None:
    """As `equal`, but for rounding: what was counted with, and counted back."""
    assert sorted(arrays) == sorted(expected)
    for path, array in expected.items():
        assert arrays[path].shape == array.shape, path
        assert arrays[path].dtype == array.dtype, path
        np.testing.assert_allclose(
            arrays[path], array, rtol=rtol, atol=atol, err_msg=path
        )


# By hand: per path of the stacked tree the name in the checkpoint, and what NumPy does
# with one layer of it: T turns it, and a number takes one of three parts of its
# columns. A range of rows, such as 32:48, is turned.
_STACKED = json.loads(
    (Path(__file__).parents[1] / "data" / "stacked_names.json").read_text()
)


def stacked_by_hand(family: str, files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stacked tree of a checkpoint, with loops over layers and experts."""
    before, layers = _prefixes(family)
    arrays = _ends(family, files, before)
    for stack, start, stop, groups in _STACKED["stacks"][family]:
        rows = {}
        for group in groups:
            rows |= _STACKED["rows"][group]
        for path, name in rows.items():
            layers_of_name = [
                _layer(files, f"{before}{layers}.{i}.{name}")
                for i in range(start, stop)
            ]
            arrays[f"{stack}/{path}"] = np.stack(layers_of_name)
    return arrays


def _layer(files: dict[str, np.ndarray], row: str) -> np.ndarray:
    if "{e}" in row:
        return np.stack(
            [_layer(files, row.replace("{e}", str(number))) for number in range(4)]
        )
    name, _, change = row.partition(" ")
    if change == "T":
        return files[name].T
    if ":" in change:
        start, stop = map(int, change.split(":"))
        return files[name][start:stop].T
    if change:
        return np.split(files[name], 3, -1)[int(change)]
    return files[name]


def _prefixes(family):
    if family == "bert":
        return "", "encoder.layer"
    if family == "gpt2":
        return "", "h"
    prefixes = {
        "gemma3": "language_model.model.",
        "gemma3n": "model.language_model.",
    }
    return prefixes.get(family, "model."), "layers"


def _ends(family, files, before):
    if family == "gpt2":
        files_by_path = {
            "embedding": files["wte.weight"],
            "positions": files["wpe.weight"],
        }
        return files_by_path | {
            "norm/scale": files["ln_f.weight"],
            "norm/bias": files["ln_f.bias"],
        }
    if family == "bert":
        names = {
            "embedding": "word_embeddings",
            "positions": "position_embeddings",
            "types": "token_type_embeddings",
        }
        files_by_path = {
            path: files[f"embeddings.{name}.weight"] for path, name in names.items()
        }
        norm = {"scale": "weight", "bias": "bias"}
        files_by_path |= {
            f"norm/{key}": files[f"embeddings.LayerNorm.{name}"]
            for key, name in norm.items()
        }
        return files_by_path | {
            "pooler/weight": files["pooler.dense.weight"].T,
            "pooler/bias": files["pooler.dense.bias"],
        }
    files_by_path = {
        "embedding": files[f"{before}embed_tokens.weight"],
        "norm/scale": files[f"{before}norm.weight"],
    }
    if family == "gemma3n":
        layer = f"{before}per_layer"
        files_by_path |= {
            "layer_input/embedding": files[f"{before}embed_tokens_per_layer.weight"],
            "layer_input/projection": files[f"{layer}_model_projection.weight"].T,
            "layer_input/projection_norm": files[f"{layer}_projection_norm.weight"],
        }
        for path, name in (("in", ""), ("out", "_unembed")):
            rows = [f"{before}altup{name}_projections.{i}.weight" for i in range(2)]
            files_by_path[f"altup/{path}"] = np.stack([files[row].T for row in rows])
    return files_by_path | (
        {"head": files["lm_head.weight"].T} if "lm_head.weight" in files else {}
    )
