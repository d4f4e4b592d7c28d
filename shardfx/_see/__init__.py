"""Ways to look at a plan: explained, checked, compared, as a text beside tests, and as a page.

It may import everything below it that makes facts: plans, rules, the planner of moves, costs, chips. It never decides
how an array is cut: what it says is read from the plan, or from the lists that the planner raises its errors from. It
never touches an array or a device.
"""

from .._rules.resolve import Attempt as Attempt
from .diff import AxisMove as AxisMove, Diff as Diff, LeafDiff as LeafDiff, diff as diff
from .explain import DimExplanation as DimExplanation, Explanation as Explanation, explain as explain
from .finding import Finding as Finding, Findings as Findings
from .golden import assert_same_plan_text as assert_same_plan_text, plan_text as plan_text
from .html_report import html_report as html_report
from .lint import lint as lint
from .report_data import report_data as report_data
