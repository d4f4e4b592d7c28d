"""What tests of training code call: a plan as a text to keep beside the code.

It may import plans, steps, costs and what is below them. It never plans, and never imports a command.
"""

from ._plan_text import assert_same_plan_text as assert_same_plan_text, plan_text as plan_text
