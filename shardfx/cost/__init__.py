"""The cost of a step before it runs: the bytes that it sends, its memory, and the time
of its collectives.

The room never runs a step and never chooses a plan. It may import `_ground`, `_rules`,
`_plan`, `topology`, `chips`, `_step`, `_arrays` and `interop`. `_traffic.py` reads
compiled programs, and also estimates: an estimate is the program that libtpu schedules,
or that XLA's partitioner makes.
"""

from .._step import Frame as Frame
from ._array_rows import (
    ArrayRow as ArrayRow,
    MissedAxis as MissedAxis,
    Origin as Origin,
)
from ._changes import Change as Change
from ._compare import (
    Comparison as Comparison,
    Excess as Excess,
    compare as compare,
)
from ._compile_for import (
    CompiledFor as CompiledFor,
    MemoryAnalysis as MemoryAnalysis,
    compile_for as compile_for,
)
from ._estimate import estimate as estimate
from ._fit import Fit as Fit, fit as fit
from ._fit_rows import FitRow as FitRow
from ._large_arrays import LargeArray as LargeArray
from ._policy.making import policy as policy
from ._policy.policy import (
    Policy as Policy,
    PolicyChange as PolicyChange,
    PolicyRow as PolicyRow,
)
from ._seconds import (
    Seconds as Seconds,
    SecondsRow as SecondsRow,
    seconds as seconds,
)
from ._shardings import (
    StepShardings as StepShardings,
    shardings as shardings,
)
from ._traffic import traffic as traffic
from ._traffic_rows import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
)
from ._typed import TypedLine as TypedLine, TypedStep as TypedStep, typed as typed
