import importlib as _importlib
import typing as _typing

from . import hosts as hosts, topology as topology
from ._apply import (
    constrain as constrain,
    gather as gather,
    shard as shard,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from ._content import LeafPlan as LeafPlan
from ._correct import correct as correct
from ._elastic import Replan as Replan, replan as replan
from ._errors import (
    CheckpointError as CheckpointError,
    LeafTypeError as LeafTypeError,
    MeshError as MeshError,
    MoveError as MoveError,
    PlanFormatError as PlanFormatError,
    PlanMismatchError as PlanMismatchError,
    RuleError as RuleError,
    SpecError as SpecError,
    UnknownPathError as UnknownPathError,
    UnmatchedError as UnmatchedError,
)
from ._follow import follow as follow
from ._jit import filter_jit as filter_jit
from ._mesh import MeshSpec as MeshSpec
from ._paths import (
    PathRules as PathRules,
    fsdp as fsdp,
    match as match,
    replicate as replicate,
)
from ._plan import (
    ShardPlan as ShardPlan,
    differences as differences,
)
from ._planner import plan as plan
from ._reason import Code as Code, Decision as Decision, Reason as Reason
from ._report import ReportRow as ReportRow, report as report, report_rows as report_rows
from ._rules import AxisRules as AxisRules, resolve as resolve
from ._spec import atomic as atomic, axis_names_of as axis_names_of, canonical as canonical
from ._tree import field as field


if _typing.TYPE_CHECKING:
    from . import checkpoint as checkpoint, presets as presets
    from ._reshard import reshard as reshard
    from ._reshard_plan import LeafMove as LeafMove, ReshardPlan as ReshardPlan, plan_reshard as plan_reshard


def __getattr__(name: str) -> _typing.Any:
    # Not every program reads files, takes a ready set of rules or moves arrays: these load when they are first named.
    if name in ("checkpoint", "presets"):
        return _importlib.import_module(f"{__name__}.{name}")
    if name in ("LeafMove", "ReshardPlan", "plan_reshard"):
        return getattr(_importlib.import_module(f"{__name__}._reshard_plan"), name)
    if name == "reshard":
        return _importlib.import_module(f"{__name__}._reshard").reshard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
