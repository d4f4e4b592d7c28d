"""What XLA's compiler for CPUs does behind the partitioner."""

from .dead import without_dead
from .loops import hoisted
from .narrow import widened
from .one_pass import Pass


_READ = "jaxlib 0.10.2"
_HLO = "xla/hlo/transforms"

PASSES = (
    Pass("while-loop-invariant-code-motion", hoisted, f"{_HLO}/while_loop_invariant_code_motion.cc", _READ),
    Pass("dce", without_dead, f"{_HLO}/simplifiers/hlo_dce.cc", _READ),
    Pass("float-normalization-bf16", widened, f"{_HLO}/simplifiers/float_normalization.cc", _READ),
)
