"""The cost of a step before it runs: its traffic row by row, its memory group by group, and its time.

It may import the ground values, rules, plans, device orders, chips, steps, arrays and `interop`. It never runs a step
and never chooses a plan. One module reads programs, since an estimate is the traffic of a program too: XLA's
partitioner made it, and no compiler has finished it. `_after/` applies what each platform's compiler would still do to
it.
"""

from .._step import Frame as Frame
from ._changes import Change as Change
from ._compare import (
    Comparison as Comparison,
    Surplus as Surplus,
    compare as compare,
)
from ._compile_for import (
    CompiledFor as CompiledFor,
    MemoryAnalysis as MemoryAnalysis,
    compile_for as compile_for,
)
from ._estimate import estimate as estimate
from ._fit import Fit as Fit, FitRow as FitRow, Offender as Offender, fit as fit
from ._seconds import (
    Seconds as Seconds,
    SecondsRow as SecondsRow,
    seconds as seconds,
)
from ._shardings import (
    ArrayRow as ArrayRow,
    Origin as Origin,
    StepShardings as StepShardings,
    Wanted as Wanted,
    shardings as shardings,
)
from ._traffic import traffic as traffic
from ._traffic_rows import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
)
