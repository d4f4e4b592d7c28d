"""Moves of live arrays to another sharding, mesh or set of devices, in bounded memory.

This room may import `_plan` and what is below it. It never chooses a sharding. It is
loaded when `reshard` or `plan_reshard` is first used. `steps` moves arrays between
meshes of the same devices, `pieces` between different devices and between trees.
"""

from .matrices import MappedMatrices, map_matrices
from .mover import reshard
from .reshard_plan import LeafMove, ReshardPlan
from .reshard_planning import plan_reshard
from .steps.layout import StepLayout
from .steps.redistribution import MoveStep
