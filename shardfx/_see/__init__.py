"""Explains, checks and compares plans, and shows them as an HTML page.

This room may import the rooms whose results it shows: plans, rules, the planner of
moves, costs, chips. It never decides how an array is sharded: its texts come from the
plan, or from the lists of mistakes from which the planner makes its errors. It never
touches an array or a device.
"""

from .._rules import Attempt as Attempt
from .difference import (
    AxisMove as AxisMove,
    Diff as Diff,
    LeafDiff as LeafDiff,
    diff as diff,
)
from .explanation import (
    DimExplanation as DimExplanation,
    Explanation as Explanation,
    explain as explain,
)
from .finding import Finding as Finding, Findings as Findings
from .html import html_report as html_report
from .linter import lint as lint
from .report import report_data as report_data
