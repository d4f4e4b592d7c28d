"""The choice of a mesh and rules for a step, and names for the dimensions of its arguments.

It may import plans, costs and what is below them. It never touches arrays, and never imports a command.

The words of this room; each is defined by the ones before it:

- part: a dimension, or a piece of one that a reshape splits off, as heads are of `heads * head_dim` (`_program.py`).
- label: what an operation calls its dimensions; those with one label are walked together (`_layouts.py`).
- class: all parts that operations tie together, so that they are cut alike. A group is the classes that have one name,
    since they stand at the same place of layers that are alike (`_classes.py`).
- assignment: in which order one mesh axis prefers classes; with it, what the axis does to every array
    (`_layouts.py`).
- term: bytes or operations of the step, with the assignments that divide them (`_core.py`).
- set and share: some assignments, and how the devices are shared out among them. Both make a candidate (`_core.py`).
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
