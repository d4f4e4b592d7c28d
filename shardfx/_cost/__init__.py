"""What a step costs, before it runs: the traffic of its compiled program, row by row.

It may import the ground values, rules, plans and device orders. It never runs a step and never chooses a plan: it reads
programs and says what is in them.
"""

from .hlo_text import Frame as Frame
from .traffic import (
    Traffic as Traffic,
    TrafficDifference as TrafficDifference,
    TrafficRow as TrafficRow,
    traffic as traffic,
)
