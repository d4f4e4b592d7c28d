"""Functions for tests of training code: golden files of plans and steps, and a
comparison of a step with the same step on one device.

It may import plans, steps, costs and the rooms below them. It never makes a plan, and
never imports a command.
"""

from .._step import (
    Refutation as Refutation,
    UnjudgedOperation as UnjudgedOperation,
    Verdict as Verdict,
    unsharded as unsharded,
)
from ._check import (
    CheckedOutput as CheckedOutput,
    CheckedStep as CheckedStep,
    check_step as check_step,
)
from ._patterns import assert_collectives as assert_collectives
from ._texts import (
    assert_same_plan_text as assert_same_plan_text,
    assert_same_shardings_text as assert_same_shardings_text,
    assert_same_traffic_text as assert_same_traffic_text,
    plan_text as plan_text,
    shardings_text as shardings_text,
    traffic_text as traffic_text,
)
from ._verify import verify as verify
