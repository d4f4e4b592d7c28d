"""A rule set as large as MaxText's, 76 rules for 12 mesh axes, and a decoder of experts under names that it rules."""

from typing import Any

import jax
import jax.numpy as jnp

from shardfx import AxisRules, MeshSpec


_TENSOR = ("tensor", "tensor_sequence", "autoregressive")
_EMBED = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert")
_WEIGHTS: list[tuple[str, Any]] = [
    *((name, _TENSOR) for name in ("vocab", "heads", "q_heads", "kv_heads")),
    *((name, axes) for name in ("embed", "q_lora", "kv_lora") for axes in (_EMBED, ("fsdp", *_EMBED[2:]))),
    ("mlp", ("fsdp_transpose", *_TENSOR)),
    ("exp", "expert"),
    ("embed_moe", _EMBED[:4]),
    ("embed_moe", ("fsdp", *_EMBED[2:4])),
    ("norm", "tensor"),
    ("layers", "stage"),
    *((name, None) for name in ("kv", "kv_head_dim", "qkv", "q_lora_up", "kv_lora_up")),
]
_BATCH = ("data", "fsdp", "fsdp_transpose", "expert")
_ACTIVATIONS: list[tuple[str, Any]] = [
    *((f"activation_{name}", _BATCH) for name in ("batch", "kv_batch", "batch_no_exp", "embed_and_logits_batch")),
    *((f"activation_{name}", ("context", "context_usp_ulysses")) for name in ("length", "q_length", "kv_length")),
    *((f"activation_{name}", _TENSOR[:2]) for name in ("heads", "kv_heads", "mlp", "vocab", "embed", "kv")),
    ("activation_exp", "expert"),
    ("activation_stage", "stage"),
]
_REST = [(f"cache_{number}", None) for number in range(76 - len(_WEIGHTS) - len(_ACTIVATIONS))]
AXES = AxisRules([*_WEIGHTS, *_ACTIVATIONS, *_REST], axes=("autoregressive",))
SIZES = {
    **{"data": 2, "stage": 1, "fsdp": 8, "fsdp_transpose": 1, "sequence": 1, "context": 2, "context_usp_ulysses": 1},
    **{"tensor": 4, "tensor_sequence": 1, "expert": 4, "autoregressive": 1, "tensor_transpose": 1},
}
MESH = MeshSpec(SIZES)


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


_LAYER: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "query": ((4096, 32, 128), ("embed", "q_heads", "kv")),
    "key": ((4096, 8, 128), ("embed", "kv_heads", "kv_head_dim")),
    "value": ((4096, 8, 128), ("embed", "kv_heads", "kv_head_dim")),
    "out": ((32, 128, 4096), ("heads", "kv", "embed")),
    "gate": ((4096, 64), ("embed", "exp")),
    "wi_0": ((64, 4096, 14336), ("exp", "embed_moe", "mlp")),
    "wi_1": ((64, 4096, 14336), ("exp", "embed_moe", "mlp")),
    "wo": ((64, 14336, 4096), ("exp", "mlp", "embed_moe")),
    "pre_norm": ((4096,), ("norm",)),
    "post_norm": ((4096,), ("norm",)),
}


def decoder(layers: int) -> tuple[Any, Any]:
    """A tree of `10 * layers + 2` leaves, and its names."""
    shapes = {name: leaf(*shape) for name, (shape, _) in _LAYER.items()}
    names = {name: given for name, (_, given) in _LAYER.items()}
    ends = {"embedding": leaf(32768, 4096), "logits": leaf(4096, 32768)}
    end_names = {"embedding": ("vocab", "embed"), "logits": ("embed", "vocab")}
    return {**ends, "layers": [shapes] * layers}, {**end_names, "layers": [names] * layers}
