"""The choice of a mesh and rules for a step, and names for the dimensions of its arguments.

It may import plans, costs and what is below them. It never touches arrays, and never imports a command.

The words of this room; each is defined by the ones before it:

- part: a dimension, or a factor of a dimension that a reshape splits, such as the heads of `heads * head_dim`
    (`_program.py`).
- label: an operation's name for dimensions that it iterates over at once (`_layouts.py`).
- class: all parts that operations tie to each other, so that they are sharded alike. A group is the classes with one
    name: they are at the same position of equal layers (`_classes.py`).
- assignment: the order in which one mesh axis prefers classes. It determines how the axis shards every array
    (`_layouts.py`).
- term: bytes or operations of the step, with the assignments that divide them (`_core.py`).
- set and share: some assignments, and a number of devices for each. Both make a candidate (`_core.py`).
"""

from .._plan import renamed as renamed, replan as replan
from ._candidate import Candidate as Candidate
from ._constrain_step import constrain_step as constrain_step
from ._name_axes import (
    NamedAxes as NamedAxes,
    NamedAxis as NamedAxis,
    name_axes as name_axes,
)
from ._search import Frontier as Frontier, FrontierPoint as FrontierPoint, frontier as frontier, search as search
from ._space import Limits as Limits
