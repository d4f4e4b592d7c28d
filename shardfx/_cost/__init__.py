"""What a step costs, before it runs: its traffic row by row, compiled or estimated, and its memory group by group.

It may import the ground values, rules, plans, device orders, chips, arrays and `interop`. It never runs a step and
never chooses a plan: it reads programs, traced or compiled, and says what is in them.

The words of this room:

- factor: a loop that an operation runs over; a product `bsd,dh->bsh` has four. Dimensions with a factor in common are
    cut together (`factors/`).
- part: a prime piece of a mesh axis, so that an axis of 16 can cut 8 heads and the 2 queries of each (`layout.py`).
- layout: for each dimension of an array the parts that cut it. A pin is a layout that is asked for (`graph.py`).
- partial: said of an array that is still to be added up over some parts (`walk.py`).
- way: how an operation may be carried out: the layouts that its arrays have meanwhile, and what that sends (`walk.py`).
- scope: where operations run, and how often: the step, the body of a loop, a branch (`graph.py`).
"""

from .changes import Change as Change
from .compare import Comparison as Comparison, Surplus as Surplus, compare as compare
from .compile_for import (
    CompiledFor as CompiledFor,
    MemoryAnalysis as MemoryAnalysis,
    compile_for as compile_for,
)
from .estimate import estimate as estimate
from .fit import Fit as Fit, FitRow as FitRow, Offender as Offender, fit as fit
from .frames import Frame as Frame
from .seconds import Seconds as Seconds, SecondsRow as SecondsRow, seconds as seconds
from .traffic import traffic as traffic
from .traffic_rows import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
)
from .zero import ZeroRow as ZeroRow, ZeroTable as ZeroTable, zero_table as zero_table
