"""Live arrays from one sharding, mesh or set of devices to another, in bounded memory.

It may import `_plan` and what is below it. It never chooses where an array shall lie; it is loaded when `reshard` or
`plan_reshard` is first named. `steps` moves between meshes of the same devices, `pieces` between different devices
and between trees.
"""

from .matrices import MappedMatrices as MappedMatrices, map_matrices as map_matrices
from .mover import reshard as reshard
from .reshard_plan import LeafMove as LeafMove, ReshardPlan as ReshardPlan, plan_reshard as plan_reshard
from .steps.layout import Layout as Layout
from .steps.redistribute import Step as Step
