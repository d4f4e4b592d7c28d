"""What a step costs, before it runs: the traffic of its compiled program, row by row, and an estimate without one.

It may import the ground values, rules, plans, device orders, and how `filter_jit` reads shardings. It never runs a step
and never chooses a plan: it reads programs, compiled and traced, and says what is in them.
"""

from .compare import Comparison as Comparison, Surplus as Surplus, compare as compare
from .estimate import estimate as estimate
from .hlo_text import Frame as Frame
from .traffic import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
    traffic as traffic,
)
