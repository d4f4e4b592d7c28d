"""The passes that each platform's compiler runs after XLA's partitioner, over the partitioned program.

It may import the reader of HLO and the ground. It never traces, compiles or counts bytes: it rewrites parsed modules.

Bytes that enter a device in one step, against compiled programs of JAX 0.10.2, by the passes of `PASSES`:

| programs | without passes: median, 90th percentile, worst | with passes |
|---|---|---|
| 30 steps on v5e:4x4 by another author | 17, 113, 310 % | 0.0, 8.8, 9.4 % |
| 30 more of that author | 0.1, 43, 94 % | 0.0, 6.7, 17 % |

Passes of the compilers that change none of these figures are not imitated: inlined calls, dead instructions and equal
instructions. There are no passes for CPUs, where XLA itself finishes programs. The rest of the difference on TPUs comes
from programs that libtpu simplifies before it partitions them: `_step/rewrites.py` does this as far as more than one
compiled program shows it. Sorts, rolls and sums that are added to a scatter's result are marked as unsure.
"""

from .passes import (
    PASSES as PASSES,
    as_compiled as as_compiled,
)
