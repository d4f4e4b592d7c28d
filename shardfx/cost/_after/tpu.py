"""What libtpu does behind the partitioner."""

import re

from .calls import inlined
from .dead import without_dead
from .loops import summed_after
from .merge import gathered_once, without_equals
from .narrow import narrowed
from .one_pass import Doubt, Pass
from .reductions import added_once, folded
from .scatter import scattered, summed_parts
from .windowed import windowed


_READ = "the libtpu that jaxlib 0.10.2 pins"
_CSE = "xla/service/spmd/schedule_aware_collective_ops_cse.cc"

PASSES = (
    Pass("call-inliner", inlined, "xla/service/call_inliner.cc", _READ),
    Pass("cse", without_equals, "xla/service/hlo_cse.cc", _READ),
    Pass("schedule-aware-collective-cse", gathered_once, _CSE, _READ),
    Pass("windowed einsum", windowed, "xla/service/spmd/dot_handler.cc", _READ),
    Pass("all-reduce-folder", folded, "xla/service/all_reduce_folder.cc", _READ),
    Pass("while-loop-all-reduce-code-motion", summed_after, "xla/service/while_loop_all_reduce_code_motion.cc", _READ),
    Pass("all-reduce-reassociate", added_once, "xla/service/all_reduce_reassociate.cc", _READ),
    Pass("dce", without_dead, "xla/hlo/transforms/simplifiers/hlo_dce.cc", _READ),
    Pass("tpu-all-reduce-scatter-fusion", scattered, "libtpu", _READ, unsure=1.0),
    Pass("all_gather_decomposer", summed_parts, "xla/service/all_gather_decomposer.cc", _READ),
    Pass("bfloat16-propagation", narrowed, "xla/service/bfloat16_propagation.cc", _READ),
)

DOUBTS = (
    Doubt(
        re.compile(r"\b(sort|argsort|top_k|approx_top_k|argmax|argmin|cumsum|cumlogsumexp|cumprod|cummax|cummin)\b"),
        "the TPU's partitioner divides sorts, the largest values and sums along a dimension itself.",
    ),
    Doubt(re.compile(r"_roll_|\b(roll|rev)\b"), "the TPU's partitioner rolls and reverses in another way."),
    Doubt(re.compile(r"\bscatter-add\b"), "the TPU's compiler adds to what is scattered before it partitions."),
)
