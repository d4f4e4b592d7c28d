"""MaxText's own rules and a model of its own, DeepSeek-V2-Lite, with what MaxText makes of both: facts, as data.

The rules are `mesh_axes` and `logical_axis_rules` of `src/maxtext/configs/base.yml` at commit 000b810b, in their order.
Paths, shapes and specs are those that its test of shardings keeps for 16 TPU v6e under these rules, with expert=4 and
the rest fsdp: `tests/utils/sharding_info/deepseek2-16b/v6e-16/slice_1/rule_default_...`, at commit 799e3985.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec
from shardfx.interop import maxtext


MESH_AXES = (
    "diloco data stage fsdp fsdp_transpose context context_usp_ulysses context_autoregressive tensor tensor_sequence "
    "expert autoregressive"
).split()
_RULES = """
circular_repeats
activation_embed_and_logits_batch data stage fsdp fsdp_transpose expert
activation_embed_and_logits_batch_sequence data stage fsdp fsdp_transpose context context_usp_ulysses expert
activation_vocab tensor tensor_sequence
activation_vocab tensor
activation_vocab tensor_sequence
vocab tensor tensor_sequence autoregressive
embed_vocab fsdp fsdp_transpose context context_usp_ulysses expert
activation_batch_attn data fsdp fsdp_transpose expert
activation_input_length_attn tensor_sequence context
activation_heads tensor tensor_sequence autoregressive
activation_kv_heads tensor tensor_sequence
activation_length_attn context context_usp_ulysses
activation_q_length context context_usp_ulysses
activation_kv_length
activation_embed_attn tensor
activation_kv tensor tensor_sequence
activation_kv_batch data fsdp fsdp_transpose expert
activation_kv_head_dim tensor tensor_sequence
heads tensor tensor_sequence autoregressive
q_heads tensor tensor_sequence autoregressive
kv_heads tensor tensor_sequence autoregressive
qkv
kv
kv_head_dim
q_lora fsdp fsdp_transpose context context_usp_ulysses expert
q_lora fsdp context context_usp_ulysses expert
q_lora_up_proj
kv_lora fsdp fsdp_transpose context context_usp_ulysses expert
kv_lora fsdp context context_usp_ulysses expert
kv_lora_up_proj
activation_batch_moe data fsdp fsdp_transpose expert
activation_length_moe context context_usp_ulysses
activation_norm_length_moe tensor_sequence context context_usp_ulysses
activation_embed_moe tensor
activation_mlp_moe tensor tensor_sequence
activation_exp expert
exp expert
mlp_moe fsdp_transpose tensor tensor_sequence autoregressive
embed_moe fsdp fsdp_transpose context context_usp_ulysses
embed_moe fsdp context context_usp_ulysses
activation_mlp tensor tensor_sequence
activation_batch data fsdp fsdp_transpose expert
activation_length context context_usp_ulysses
activation_norm_length tensor_sequence context context_usp_ulysses
activation_embed tensor
activation_stage stage
mlp fsdp_transpose tensor tensor_sequence autoregressive
gdn_head fsdp_transpose tensor tensor_sequence autoregressive
embed fsdp fsdp_transpose context context_usp_ulysses expert
embed fsdp context context_usp_ulysses expert
norm tensor
layers stage
diloco diloco
engram_dim tensor
dense_layers
moe_layers
local_layers
mhc
prefill_activation_length context context_usp_ulysses
prefill_activation_norm_length tensor_sequence context context_usp_ulysses
activation_prefill_kv_batch data fsdp fsdp_transpose expert
decode_batch data fsdp fsdp_transpose expert
decode_length
cache_heads autoregressive tensor tensor_sequence
paged_kv_heads tensor
cache_batch_prefill
cache_batch
cache_heads_none
cache_kv
cache_sequence
num_pages
tokens_per_page
paged_kv_head_dim_size
mlp_no_fsdp tensor tensor_sequence autoregressive
exp_with_fsdp fsdp
"""
CONFIG = {
    "mesh_axes": MESH_AXES,
    "logical_axis_rules": [[name, axes] for name, *axes in map(str.split, _RULES.strip().splitlines())],
}
AXES = maxtext.rules_of(CONFIG).rules


def mesh(**sizes: int) -> MeshSpec:
    """A mesh of all of MaxText's axes, of which those that are not given have the size 1."""
    return MeshSpec({axis: sizes.get(axis, 1) for axis in MESH_AXES})


_EXPERTS, _BOTH = "decoder/moe_layers/DeepSeekMoeBlock_0", ("fsdp", "expert")
# The path; the shape; the names that its layer gives to the dimensions; and what MaxText makes of them.
_LEAVES: list[tuple[str, tuple[int, ...], str, P]] = [
    ("token_embedder/embedding", (102400, 2048), "vocab embed_vocab", P(None, _BOTH)),
    ("decoder/decoder_norm/scale", (2048,), "norm", P()),
    ("decoder/logits_dense/kernel", (2048, 102400), "embed_vocab vocab", P(_BOTH)),
    ("decoder/dense_layers/mlp/wi_0/kernel", (2048, 1, 10944), "embed dense_layers mlp", P(_BOTH)),
    ("decoder/dense_layers/mlp/wi_1/kernel", (2048, 1, 10944), "embed dense_layers mlp", P(_BOTH)),
    ("decoder/dense_layers/mlp/wo/kernel", (10944, 1, 2048), "mlp dense_layers embed", P(None, None, _BOTH)),
    (f"{_EXPERTS}/MoeBlock_0/gate/kernel", (2048, 26, 64), "embed moe_layers -", P(_BOTH)),
    *[
        (f"{_EXPERTS}/MoeBlock_0/{name}", (64, 26, 2048, 1408), "exp moe_layers embed_moe mlp_moe", spec)
        for name, spec in (("wi_0", P("expert", None, "fsdp")), ("wi_1", P("expert", None, "fsdp")))
    ],
    (
        f"{_EXPERTS}/MoeBlock_0/wo",
        (64, 26, 1408, 2048),
        "exp moe_layers mlp_moe embed_moe",
        P("expert", None, None, "fsdp"),
    ),
    (f"{_EXPERTS}/shared_experts/wi_0/kernel", (2048, 26, 2816), "embed moe_layers mlp", P(_BOTH)),
    (f"{_EXPERTS}/shared_experts/wi_1/kernel", (2048, 26, 2816), "embed moe_layers mlp", P(_BOTH)),
    (f"{_EXPERTS}/shared_experts/wo/kernel", (2816, 26, 2048), "mlp moe_layers embed", P(None, None, _BOTH)),
    *[
        (f"decoder/{stack}/{path}", (*shape[:1], count, *shape[1:]), names.replace("*", stack), spec)
        for stack, count in (("dense_layers", 1), ("moe_layers", 26))
        for path, shape, names, spec in (
            ("pre_self_attention_layer_norm/scale", (2048,), "norm *", P()),
            ("post_self_attention_layer_norm/scale", (2048,), "norm *", P()),
            ("self_attention/kv_norm/scale", (512,), "norm *", P()),
            ("self_attention/query/kernel", (2048, 16, 192), "embed * q_heads kv", P(_BOTH)),
            ("self_attention/wkv_a/kernel", (2048, 576), "embed * kv_lora_up_proj", P(_BOTH)),
            ("self_attention/wkv_b/kernel", (512, 16, 256), "kv_lora * kv_heads kv_head_dim", P(_BOTH)),
            ("self_attention/out/kernel", (16, 128, 2048), "heads * kv embed", P(None, None, None, _BOTH)),
        )
    ],
]
SPECS = {path: spec for path, _, _, spec in _LEAVES}


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *outer, last = path.split("/")
        at = made
        for part in outer:
            at = at.setdefault(part, {})
        at[last] = leaf
    return made


def _names(text: str) -> tuple[str | None, ...]:
    return tuple(None if name == "-" else name for name in text.split())


def deepseek() -> tuple[Any, Any]:
    """The tree of DeepSeek-V2-Lite as MaxText has it, with layers in one array, and its names."""
    shapes = {path: _struct(*shape) for path, shape, _, _ in _LEAVES}
    return _nested(shapes), _nested({path: _names(names) for path, _, names, _ in _LEAVES})
