"""The choice of a mesh and rules for a step, and names for the dimensions of its arguments.

It may import what plans, what prices and what is below them. It never touches arrays, and never imports a command.
"""

from .asked import device_count as device_count
from .candidate import Candidate as Candidate, Check as Check
from .core import CostModel as CostModel
from .fitted import fit_chip as fit_chip
from .frontier import Frontier as Frontier, FrontierPoint as FrontierPoint, frontier as frontier
from .lay_out import lay_out as lay_out
from .limits import Limits as Limits
from .name_axes import NamedAxes as NamedAxes, NamedAxis as NamedAxis, name_axes as name_axes
from .priced import SentRow as SentRow
from .search import search as search
