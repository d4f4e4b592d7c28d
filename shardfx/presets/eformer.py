"""eformer's `PartitionAxis` as AxisRules.

`shardfx.presets.eformer` is the function. Its tokens are values of `shardfx.presets.tokens`, its layouts those of
`shardfx.presets.layouts`; `from shardfx.presets.eformer import BATCH` and `presets.eformer.BATCH` find both.
"""

import enum
from typing import Any, Final

from .._rules.axis_rules import AxisRules, axes_in
from . import tokens as tokens
from .layouts import (
    AttnKVSharding as AttnKVSharding,
    AttnQSharding as AttnQSharding,
    ColumnWise as ColumnWise,
    ExpertActivations as ExpertActivations,
    ExpertActivationsAlt as ExpertActivationsAlt,
    ExpertColumnWise as ExpertColumnWise,
    ExpertColumnWiseAlt as ExpertColumnWiseAlt,
    ExpertRowWise as ExpertRowWise,
    ExpertRowWiseAlt as ExpertRowWiseAlt,
    ExpertTensorParallel as ExpertTensorParallel,
    HiddenStateSharding as HiddenStateSharding,
    Layout as Layout,
    Replicated as Replicated,
    RowWise as RowWise,
    SColumnWise as SColumnWise,
    SRowWise as SRowWise,
    UnifiedExpertColumnWise as UnifiedExpertColumnWise,
    UnifiedExpertRowWise as UnifiedExpertRowWise,
    infer_mode as infer_mode,
)
from .tokens import (
    BATCH as BATCH,
    BIAS_HEAD_SEQ as BIAS_HEAD_SEQ,
    BIAS_KV_SEQ as BIAS_KV_SEQ,
    DATA_PARALLEL as DATA_PARALLEL,
    DP as DP,
    EMBED as EMBED,
    EMPTY as EMPTY,
    EP as EP,
    EXPERT as EXPERT,
    EXPERT_GATE as EXPERT_GATE,
    EXPERT_PARALLEL as EXPERT_PARALLEL,
    FSDP as FSDP,
    FULLY_SHARDED_DATA_PARALLEL as FULLY_SHARDED_DATA_PARALLEL,
    GENERATION_MODES as GENERATION_MODES,
    HEAD as HEAD,
    HEAD_DIM as HEAD_DIM,
    KV_HEAD as KV_HEAD,
    KV_HEAD_DIM as KV_HEAD_DIM,
    KV_LENGTH as KV_LENGTH,
    LENGTH as LENGTH,
    MLP_INTERMEDIATE as MLP_INTERMEDIATE,
    MODE_DECODE as MODE_DECODE,
    MODE_INSERT as MODE_INSERT,
    MODE_PREFILL as MODE_PREFILL,
    MODE_TRAIN as MODE_TRAIN,
    QUERY_LENGTH as QUERY_LENGTH,
    SEQUENCE_PARALLEL as SEQUENCE_PARALLEL,
    SP as SP,
    TENSOR_PARALLEL as TENSOR_PARALLEL,
    TOKENS as TOKENS,
    TP as TP,
    VOCAB as VOCAB,
)


class _Unset(enum.Enum):
    token = enum.auto()


# "Not given" means the default that eformer documents; `None` means replicated, in every mode.
NOT_GIVEN: Final = _Unset.token


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
        from shardfx.presets.tokens import BATCH, HEAD, HEAD_DIM, QUERY_LENGTH

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
            found += dict.fromkeys([(token, changed[token]), (token, None)])
        elif place < last:
            # The rules of a mode come first, so tokens that have priority over a changed one are said again.
            found.append((token, rules[token]))
    return found


def _given(value: Any, default: Any) -> Any:
    return default if value is NOT_GIVEN else value


# In this package the function has the name of its module, so it carries the tokens: `presets.eformer.TOKENS`.
vars(eformer).update({name: value for name, value in vars(tokens).items() if name.isupper()})
