"""Makes sharding plans: matches rules to the arrays of a tree, resolves logical names,
and corrects specs to shapes.

No other folder decides how an array is sharded. This one may import `_rules`,
`topology` and `_ground`. It never reads the values of an array and never asks for a
device, so it can plan for a mesh of devices that this machine lacks.
"""

from .aligning import correspondences
from .compared import OTHER_TREES, Pair, differences, pairs, plan_lines, report
from .complaints import (
    Draft,
    Unused,
    absent_axes,
    axes_used,
    check_policy,
    misspelled_axes,
    raise_empty,
    uncovered,
    unknown_of_rows,
    unknown_units,
    unused_rules,
)
from .content import LEFT_OUT, NUMBER, Content, Group, at_leaves, devices_named
from .decide import correct, sizes_of_shape
from .extending import shard_over
from .following import follow
from .leaf import (
    MEMORY_KINDS,
    LeafPlan,
    PathTree,
    Row,
    canonical_dtype,
    kinds_matcher,
    kinds_pairs,
    named_sharding,
)
from .matching import aligned, branch_of, require_range, rows_of
from .names import field, is_named_array, names_of_leaves, renamed
from .plan_json import decode_dtype, encode_dtype
from .planner import NAMES, drafted, plan
from .projections import FUSED, ROLES, fused_dimension, head_dimension
from .replanning import refined
from .requests import Request
from .shard_plan import ShardPlan, check_plan, shardings_of_leaves
from .single import Policy, decision_for
from .target import OtherLeaf, Target, target_of
from .tree_type import Tree
