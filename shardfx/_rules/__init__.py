"""Rules that map logical names and paths to mesh axes, and the resolution of logical
names.

This folder may import `_ground` only. It never uses devices or the values of arrays.
Whether a requested spec fits the mesh and the shape is decided in `_plan`.
"""

from .axis_rules import AxisRules, RulesLike, alias_chain, axes_in, check_mode
from .pairs import Rule, Target, near, nearest
from .path_rules import (
    Matcher,
    PathRules,
    check_once,
    check_rules,
    compiled,
    first_match,
    is_callable,
    match,
)
from .resolution import (
    Attempt,
    attempts,
    check_known,
    members_of,
    names_text,
    one_per_dim,
    resolve,
    units_of,
    unknown_names,
)
from .strategies import (
    STRATEGIES,
    Atomic,
    Fsdp,
    Optional,
    Pipeline,
    Replicate,
    Strategy,
    Units,
    atomic,
    axes_of_target,
    bare,
    checked_bytes,
    fsdp,
    optional,
    replicate,
    steps_of,
    strategy_of,
)
