"""Ways to look at a plan: explained, checked, compared, and as a page.

It may import everything below it that makes facts: plans, rules, costs, chips. It never decides how an array is cut,
and it never touches an array or a device.
"""

from .html_report import html_report as html_report
from .report_data import report_data as report_data
