"""What a step costs, before it runs: its traffic row by row, its memory group by group, and its time.

It may import the ground values, rules, plans, device orders, chips, steps, arrays and `interop`. It never runs a step
and never chooses a plan. There is one reader of programs: an estimate is the traffic of a program that XLA's
partitioner made and no compiler finished (`after/` has what each platform's compiler still does to it).
"""

from .._step.lines import Frame as Frame
from .changes import Change as Change
from .compare import Comparison as Comparison, Surplus as Surplus, compare as compare
from .compile_for import (
    CompiledFor as CompiledFor,
    MemoryAnalysis as MemoryAnalysis,
    compile_for as compile_for,
)
from .estimate import estimate as estimate
from .fit import Fit as Fit, FitRow as FitRow, Offender as Offender, fit as fit
from .seconds import Seconds as Seconds, SecondsRow as SecondsRow, seconds as seconds
from .traffic import traffic as traffic
from .traffic_rows import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
)
