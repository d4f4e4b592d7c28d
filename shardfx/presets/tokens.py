"""eformer's semantic tokens and modes, as the logical names and modes of AxisRules."""

from typing import Final


# The semantic tokens are ordinary logical names. EMPTY is `None`, the entry of a
# dimension that is not sharded.
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
DP = DATA_PARALLEL
FSDP = FULLY_SHARDED_DATA_PARALLEL
TP = TENSOR_PARALLEL
SP = SEQUENCE_PARALLEL
EP = EXPERT_PARALLEL

MODE_TRAIN: Final = "train"
MODE_PREFILL: Final = "prefill"
MODE_DECODE: Final = "decode"
MODE_INSERT: Final = "insert"
GENERATION_MODES: Final = (MODE_DECODE, MODE_INSERT)

# The token of each field of eformer's PartitionAxis.
# `with_alias(name, TOKENS["head_axis"])` gives `name` its rule.
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
