"""What each array gets, and why: rules matched, resolved and corrected, leaf by leaf, here and nowhere else.

It may import `_rules` and the ground values. It never touches the values of an array, and it looks at no device: a plan
for a mesh that is not there is made the same way.
"""

from .correct import correct as correct
from .differences import differences as differences
from .facts import ReportRow as ReportRow
from .follow import follow as follow
from .leaf import LeafPlan as LeafPlan
from .names import field as field, renamed as renamed
from .planner import plan as plan
from .replan import Replan as Replan, replan as replan
from .report import report as report, report_rows as report_rows
from .shard_plan import ShardPlan as ShardPlan
