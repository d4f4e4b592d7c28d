"""What each array gets, and why: rules matched, resolved and corrected, leaf by leaf, here and nowhere else.

It may import `_rules` and the ground values. It never touches the values of an array, and it looks at no device: a plan
for a mesh that is not there is made the same way.
"""

from .correction import correct as correct
from .differences import differences as differences
from .following import follow as follow
from .leaf import LeafPlan as LeafPlan
from .names import field as field, renamed as renamed
from .planner import plan as plan
from .replanning import Replan as Replan, replan as replan
from .shard_plan import ShardPlan as ShardPlan
from .table import report as report
