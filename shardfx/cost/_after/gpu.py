"""What XLA's compiler for GPUs does behind the partitioner, as the compiled programs in `tests/data/hlo` show it."""

from .dead import without_dead
from .one_pass import Pass
from .scatter import always_scattered


_READ = "jaxlib 0.10.2"

PASSES = (
    Pass("dce", without_dead, "xla/hlo/transforms/simplifiers/hlo_dce.cc", _READ),
    Pass("reduce-scatter-creator", always_scattered, "xla/service/reduce_scatter_creator.cc", _READ, unsure=1.0),
)
