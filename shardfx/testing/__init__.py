"""What a user's tests call: golden texts of plans and of collectives, and steps checked against one device.

It may import plans, costs, names of axes and steps. It never decides how anything is sharded, and nothing of the package
needs it.
"""

from ._check import CheckedOutput as CheckedOutput, CheckedStep as CheckedStep, check_step as check_step
from ._traffic import (
    assert_collectives as assert_collectives,
    assert_same_traffic_text as assert_same_traffic_text,
    traffic_text as traffic_text,
)
