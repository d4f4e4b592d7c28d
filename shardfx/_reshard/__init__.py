"""Moves of live arrays to another sharding, mesh or set of devices, in bounded memory.

It may import `_plan` and what is below it. It never chooses a sharding. It is loaded when `reshard` or `plan_reshard`
is first named. `steps` moves between meshes of the same devices, `pieces` between different devices and between trees.
"""

from .matrices import MappedMatrices, map_matrices
from .mover import reshard
from .reshard_plan import LeafMove, ReshardPlan, plan_reshard
from .steps.layout import StepLayout
from .steps.redistribution import MoveStep
