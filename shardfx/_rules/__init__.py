"""What is asked: rules from logical names and from paths to mesh axes, and how names are resolved.

It may import the ground values: errors, reasons, specs and trees. It never looks at a device or at an array's values.
Whether what is asked fits is for `_plan` to say.
"""

from .axis_rules import AxisRules as AxisRules
from .path_rules import PathRules as PathRules, match as match
from .resolution import resolve as resolve
from .strategies import atomic as atomic, fsdp as fsdp, optional as optional, replicate as replicate
