"""eformer's `PartitionAxis` as AxisRules: fields, semantic tokens, modes and layouts, as data."""

import dataclasses
import enum
from typing import Any, Final

from .._errors import RuleError, SpecError
from .._rules.axis_rules import AxisRules, axes_in


class _Unset(enum.Enum):
    token = enum.auto()


# "Not given" means the default that eformer documents; `None` means replicated, in every mode.
NOT_GIVEN: Final = _Unset.token

# The semantic tokens are ordinary logical names. EMPTY is no name: a dimension that nothing shards is `None`.
EMPTY: Final = None
BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
EMBED: Final = "__EMBED__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"
DATA_PARALLEL: Final = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL: Final = "__TENSOR_PARALLEL__"
SEQUENCE_PARALLEL: Final = "__SEQUENCE_PARALLEL__"
EXPERT_PARALLEL: Final = "__EXPERT_PARALLEL__"
DP, FSDP, TP = DATA_PARALLEL, FULLY_SHARDED_DATA_PARALLEL, TENSOR_PARALLEL
SP, EP = SEQUENCE_PARALLEL, EXPERT_PARALLEL

MODE_TRAIN: Final = "train"
MODE_PREFILL: Final = "prefill"
MODE_DECODE: Final = "decode"
MODE_INSERT: Final = "insert"
GENERATION_MODES: Final = (MODE_DECODE, MODE_INSERT)

# Which field of PartitionAxis each token stands for; `with_alias(name, TOKENS["head_axis"])` follows a field.
TOKENS: Final = {
    "batch_axis": BATCH,
    "sequence_axis": LENGTH,
    "query_sequence_axis": QUERY_LENGTH,
    "key_sequence_axis": KV_LENGTH,
    "hidden_state_axis": EMBED,
    "head_axis": HEAD,
    "kv_head_axis": KV_HEAD,
    "mlp_intermediate_axis": MLP_INTERMEDIATE,
    "vocab_axis": VOCAB,
    "expert_axis": EXPERT,
    "expert_gate_axis": EXPERT_GATE,
    "attention_dim_axis": HEAD_DIM,
    "attention_kv_dim_axis": KV_HEAD_DIM,
    "bias_head_sequence_axis": BIAS_HEAD_SEQ,
    "bias_key_sequence_axis": BIAS_KV_SEQ,
    "data_parallel_axis": DATA_PARALLEL,
    "fully_sharded_data_parallel_axis": FULLY_SHARDED_DATA_PARALLEL,
    "tensor_parallel_axis": TENSOR_PARALLEL,
    "sequence_parallel_axis": SEQUENCE_PARALLEL,
    "expert_parallel_axis": EXPERT_PARALLEL,
}


def eformer(
    *,
    data_parallel_axis: str = "dp",
    fully_sharded_data_parallel_axis: str = "fsdp",
    tensor_parallel_axis: str = "tp",
    sequence_parallel_axis: str = "sp",
    expert_parallel_axis: str = "ep",
    batch_axis: Any = NOT_GIVEN,
    sequence_axis: Any = NOT_GIVEN,
    query_sequence_axis: Any = NOT_GIVEN,
    head_axis: Any = NOT_GIVEN,
    kv_head_axis: Any = NOT_GIVEN,
    key_sequence_axis: Any = NOT_GIVEN,
    hidden_state_axis: Any = NOT_GIVEN,
    mlp_intermediate_axis: Any = NOT_GIVEN,
    vocab_axis: Any = NOT_GIVEN,
    expert_axis: Any = NOT_GIVEN,
    expert_gate_axis: Any = None,
    attention_dim_axis: Any = None,
    attention_kv_dim_axis: Any = None,
    bias_head_sequence_axis: Any = None,
    bias_key_sequence_axis: Any = None,
    decode_batch_axis: Any = NOT_GIVEN,
    decode_query_sequence_axis: Any = None,
    decode_head_axis: Any = NOT_GIVEN,
    decode_kv_head_axis: Any = NOT_GIVEN,
    decode_key_sequence_axis: Any = NOT_GIVEN,
    decode_attention_dim_axis: Any = None,
    decode_attention_kv_dim_axis: Any = None,
) -> AxisRules:
    """AxisRules with the meaning of eformer's `PartitionAxis(...)`; its semantic tokens are the logical names.

    Where several dimensions want one mesh axis, the token that stands first in `TOKENS` gets it. The modes are
    "train", "prefill", "decode" and "insert"; the last two are eformer's generation modes.

    **Arguments:**

    - `data_parallel_axis`, `fully_sharded_data_parallel_axis`, `tensor_parallel_axis`,
        `sequence_parallel_axis`, `expert_parallel_axis`: the names of the mesh axes.
    - `decode_batch_axis` and the six others that begin with `decode_`: mesh axes in the generation modes.
        `None`, the default of the query sequence and of the two attention dims, replicates; where the others
        are not given, they are those of the field without `decode_`.
    - The other fields: mesh axes of a logical axis: a name, a tuple of names, or `None` for replicated. Where
        not given, the default of eformer: batch over fsdp and dp, sequences over sp, heads, embedding, mlp and
        vocabulary over tp, experts over ep.

    **Returns:**

    AxisRules. `extend`, `prepend`, `with_alias` and `without` take the place of eformer's registry.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.presets import eformer
        from shardfx.presets.eformer import BATCH, HEAD, HEAD_DIM, QUERY_LENGTH

        names = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
        rules = eformer(tensor_parallel_axis="model")
        assert resolve(names, rules, mode="train").spec == P(("fsdp", "dp"), "sp", "model")
        assert resolve(names, rules, mode="decode").spec == P(("fsdp", "dp"), None, "model")
        ```
    """
    # One mesh axis may play both parts.
    batch = tuple(dict.fromkeys((fully_sharded_data_parallel_axis, data_parallel_axis)))
    sequence, tensor = sequence_parallel_axis, tensor_parallel_axis
    rules = {
        BATCH: _given(batch_axis, batch),
        LENGTH: _given(sequence_axis, sequence),
        QUERY_LENGTH: _given(query_sequence_axis, sequence),
        KV_LENGTH: _given(key_sequence_axis, sequence),
        EMBED: _given(hidden_state_axis, tensor),
        HEAD: _given(head_axis, tensor),
        KV_HEAD: _given(kv_head_axis, tensor),
        MLP_INTERMEDIATE: _given(mlp_intermediate_axis, tensor),
        VOCAB: _given(vocab_axis, tensor),
        EXPERT: _given(expert_axis, expert_parallel_axis),
        EXPERT_GATE: _given(expert_gate_axis, None),
        HEAD_DIM: _given(attention_dim_axis, None),
        KV_HEAD_DIM: _given(attention_kv_dim_axis, None),
        BIAS_HEAD_SEQ: _given(bias_head_sequence_axis, None),
        BIAS_KV_SEQ: _given(bias_key_sequence_axis, None),
        DATA_PARALLEL: data_parallel_axis,
        FULLY_SHARDED_DATA_PARALLEL: fully_sharded_data_parallel_axis,
        TENSOR_PARALLEL: tensor_parallel_axis,
        SEQUENCE_PARALLEL: sequence_parallel_axis,
        EXPERT_PARALLEL: expert_parallel_axis,
    }
    generation = {
        BATCH: _given(decode_batch_axis, rules[BATCH]),
        QUERY_LENGTH: _given(decode_query_sequence_axis, None),
        KV_LENGTH: _given(decode_key_sequence_axis, rules[KV_LENGTH]),
        HEAD: _given(decode_head_axis, rules[HEAD]),
        KV_HEAD: _given(decode_kv_head_axis, rules[KV_HEAD]),
        HEAD_DIM: _given(decode_attention_dim_axis, None),
        KV_HEAD_DIM: _given(decode_attention_kv_dim_axis, None),
    }
    decode = _generation_rules(rules, generation)
    modes = {MODE_TRAIN: (), MODE_PREFILL: (), MODE_DECODE: decode, MODE_INSERT: decode}
    made = AxisRules(rules, modes=modes)
    # A mesh has some of the five axes; eformer passes over those that it lacks.
    return made.extend(axes=[axis for _, axis in axes_in(made)])


def _generation_rules(rules: dict[str, Any], generation: dict[str, Any]) -> list[tuple[str, Any]]:
    """The rules of a mode in which `generation` replaces what `rules` say of the same tokens."""
    changed = {token: target for token, target in generation.items() if target != rules[token]}
    order = list(rules)
    last = max((order.index(token) for token, target in changed.items() if target is not None), default=0)
    found: list[tuple[str, Any]] = []
    for place, token in enumerate(order):
        if token in changed:
            # `None` ends the search: the base rule of the token is no fallback in this mode.
            found += [(token, changed[token]), (token, None)]
        elif place < last:
            # The rules of a mode come first, so tokens that have priority over a changed one are said again.
            found.append((token, rules[token]))
    return found


def _given(value: Any, default: Any) -> Any:
    return default if value is NOT_GIVEN else value


@dataclasses.dataclass(frozen=True)
class Layout:
    """The logical names of a kind of array, and the dimension whose size tells decoding from training.

    **Arguments:**

    - `axes`: one entry per dimension, as [`shardfx.resolve`][] takes them.
    - `mode_dim`: the dimension that [`shardfx.presets.infer_mode`][] looks at, or `None` for "train".
    """

    axes: tuple[Any, ...]
    mode_dim: int | None = None


def infer_mode(shape: tuple[int, ...] | None, dim: int | None) -> str:
    """The mode that an array is in, from its shape: "decode" where `dim` has size 1, else "train".

    **Arguments:**

    - `shape`: the array's shape; it may be `None` where `dim` is.
    - `dim`: `mode_dim` of a [`shardfx.presets.Layout`][]. Negative ones count from the end; `None` is "train".

    **Returns:**

    "decode" or "train".

    **Raises:**

    `RuleError` without a shape or where `dim` is a bool, `SpecError` if the shape has no such dimension.

    !!! Example

        ```python
        from shardfx import resolve
        from shardfx.presets import eformer, infer_mode
        from shardfx.presets.eformer import HiddenStateSharding

        mode = infer_mode((8, 1, 512), HiddenStateSharding.mode_dim)
        assert mode == "decode"
        resolve(HiddenStateSharding.axes, eformer(), mode=mode)
        ```
    """
    if dim is None:
        return MODE_TRAIN
    if isinstance(dim, bool):
        raise RuleError(f"`infer_mode({shape}, {dim})`: the dimension is an int, not a bool; use {int(dim)}.")
    if shape is None:
        raise RuleError(f"`infer_mode(None, {dim})`: the mode depends on the size of dim {dim}; pass the shape.")
    if not -len(shape) <= dim < len(shape):
        raise SpecError(f"`infer_mode({shape}, {dim})`: the shape has no dim {dim}; use one below {len(shape)}.")
    return MODE_DECODE if shape[dim] == 1 else MODE_TRAIN


# eformer's DynamicShardingAxes under their own names.
HiddenStateSharding: Final = Layout((BATCH, QUERY_LENGTH, EMBED), mode_dim=1)
AttnQSharding: Final = Layout((BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), mode_dim=1)
AttnKVSharding: Final = Layout((BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM), mode_dim=1)
RowWise: Final = Layout((TP, (FSDP, SP)))
SRowWise: Final = Layout((TP,))
ColumnWise: Final = Layout(((FSDP, SP), TP))
SColumnWise: Final = Layout(((FSDP, SP),))
Replicated: Final = Layout((EMPTY,))
ExpertColumnWise: Final = Layout((EP, FSDP, TP))
ExpertRowWise: Final = Layout((EP, TP, FSDP))
ExpertColumnWiseAlt: Final = Layout((EP, (FSDP, SP), TP))
ExpertRowWiseAlt: Final = Layout((EP, TP, (FSDP, SP)))
UnifiedExpertColumnWise: Final = Layout(((FSDP, SP, EP), EMPTY, TP))
UnifiedExpertRowWise: Final = Layout(((FSDP, SP, EP), TP, EMPTY))
ExpertActivations: Final = Layout((DP, SP, EP, TP))
ExpertActivationsAlt: Final = Layout((DP, SP, (TP, FSDP)))
ExpertTensorParallel: Final = Layout((TP, EMPTY, EMPTY))
