"""Places, constrains and gathers live arrays under a plan, reads their shardings, and
compiles functions of them.

It may import `_plan` and the rooms below `_plan`. It never chooses a sharding, except
that `constrain` corrects a requested spec to the shape. It never moves an array from
one plan to another, which `_reshard` does.
"""

from .constraint import constrain as constrain
from .explicit_notes import is_about_types as is_about_types
from .jit import filter_jit as filter_jit
from .misplaced_arrays import (
    Misplaced as Misplaced,
    MisplacedArray as MisplacedArray,
    misplaced as misplaced,
)
from .place import (
    clear_caches as clear_caches,
    gather as gather,
    shard as shard,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from .stages import Compiled as Compiled, Lowered as Lowered, TracedArray as TracedArray
