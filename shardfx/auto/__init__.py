"""The choice of a mesh and rules for a step, and names for the dimensions of its
arguments.

The folder may import plans, costs and the folders below them. The folder never touches
arrays or imports a command.

The terms of this folder: a sub-dimension is a factor of a dimension that a reshape
splits, such as the heads in `heads * head_dim`. Dimensions that operations pair form an
equivalence class, and must be sharded alike. A logical axis is one such class, or the
classes at one position of equal layers. An axis assignment is the logical axes that one
mesh axis shards, in order of preference. A strategy is one axis assignment per mesh
axis. A cost term is a sum of work, bytes or traffic that the same assignments divide. A
candidate is a strategy with the sizes of its mesh axes.
"""

from .._plan import renamed as renamed
from ._auto_axes import auto_axes as auto_axes
from ._auto_plan import AutoPlan as AutoPlan
from ._candidate import Candidate as Candidate
from ._constrain_step import constrain_step as constrain_step
from ._limits import Limits as Limits
from ._name_axes import (
    NamedAxes as NamedAxes,
    NamedAxis as NamedAxis,
    name_axes as name_axes,
)
from ._plan import plan as plan
from ._search import search as search
