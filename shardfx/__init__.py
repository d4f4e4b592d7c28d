"""Sharding plans as plain data, for JAX and Equinox."""

import importlib as _importlib
import typing as _typing

from . import hosts as hosts, topology as topology
from ._arrays import (
    clear_caches as clear_caches,
    constrain as constrain,
    filter_jit as filter_jit,
    gather as gather,
    shard as shard,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from ._ground.errors import (
    CheckpointError as CheckpointError,
    ChipError as ChipError,
    LeafTypeError as LeafTypeError,
    MapError as MapError,
    MeshError as MeshError,
    MoveError as MoveError,
    OutOfMemoryError as OutOfMemoryError,
    PlanFormatError as PlanFormatError,
    PlanMismatchError as PlanMismatchError,
    ProgramError as ProgramError,
    RuleError as RuleError,
    SpecError as SpecError,
    UnknownPathError as UnknownPathError,
    UnmatchedError as UnmatchedError,
)
from ._ground.reason import Code as Code, Decision as Decision, Reason as Reason
from ._ground.spec import axis_names_of as axis_names_of, canonical as canonical
from ._plan import (
    LeafPlan as LeafPlan,
    Replan as Replan,
    ReportRow as ReportRow,
    ShardPlan as ShardPlan,
    correct as correct,
    differences as differences,
    field as field,
    follow as follow,
    plan as plan,
    renamed as renamed,
    replan as replan,
    report as report,
    report_rows as report_rows,
)
from ._rules import (
    AxisRules as AxisRules,
    PathRules as PathRules,
    atomic as atomic,
    fsdp as fsdp,
    match as match,
    optional as optional,
    replicate as replicate,
    resolve as resolve,
)
from .topology._mesh import MeshSpec as MeshSpec


if _typing.TYPE_CHECKING:
    from . import checkpoint as checkpoint, chips as chips, interop as interop, presets as presets
    from ._convert import From as From, TreeMap as TreeMap
    from ._cost import (
        Change as Change,
        Comparison as Comparison,
        CompiledFor as CompiledFor,
        Fit as Fit,
        FitRow as FitRow,
        Frame as Frame,
        MemoryAnalysis as MemoryAnalysis,
        Offender as Offender,
        Seconds as Seconds,
        SecondsRow as SecondsRow,
        Surplus as Surplus,
        Traffic as Traffic,
        TrafficDifference as TrafficDifference,
        TrafficRow as TrafficRow,
        compare as compare,
        compile_for as compile_for,
        estimate as estimate,
        fit as fit,
        seconds as seconds,
        traffic as traffic,
    )
    from ._reshard import (
        Layout as Layout,
        LeafMove as LeafMove,
        ReshardPlan as ReshardPlan,
        Step as Step,
        plan_reshard as plan_reshard,
    )
    from ._reshard.reshard import reshard as reshard
    from ._search import (
        Candidate as Candidate,
        Frontier as Frontier,
        FrontierPoint as FrontierPoint,
        Limits as Limits,
        NamedAxes as NamedAxes,
        NamedAxis as NamedAxis,
        constrain_step as constrain_step,
        frontier as frontier,
        name_axes as name_axes,
        search as search,
    )
    from ._see import (
        Attempt as Attempt,
        AxisMove as AxisMove,
        Diff as Diff,
        DimExplanation as DimExplanation,
        Explanation as Explanation,
        Finding as Finding,
        Findings as Findings,
        LeafDiff as LeafDiff,
        assert_same_plan_text as assert_same_plan_text,
        diff as diff,
        explain as explain,
        html_report as html_report,
        lint as lint,
        plan_text as plan_text,
        report_data as report_data,
    )


__version__ = "0.1.0"
# Not every program reads files, takes a ready set of rules or moves arrays: these load when they are first named.
_LATE = {
    name: room or name
    for room, names in {
        "": "checkpoint chips interop presets",
        "_convert": "From TreeMap",
        "_cost": """
            Change Comparison CompiledFor Fit FitRow Frame MemoryAnalysis Offender Seconds SecondsRow Surplus
            Traffic TrafficDifference TrafficRow compare compile_for estimate fit seconds
            traffic
        """,
        "_reshard": "Layout LeafMove ReshardPlan Step plan_reshard reshard",
        "_search": """
            Candidate Frontier FrontierPoint Limits NamedAxes NamedAxis constrain_step frontier name_axes search
        """,
        "_see": """
            Attempt AxisMove Diff DimExplanation Explanation Finding Findings LeafDiff assert_same_plan_text
            diff explain html_report lint plan_text report_data
        """,
    }.items()
    for name in names.split()
}
__all__ = """
    Attempt AxisMove AxisRules Candidate Change CheckpointError ChipError Code Comparison CompiledFor
    Decision Diff DimExplanation Explanation Finding Findings Fit FitRow Frame From Frontier
    FrontierPoint Layout LeafDiff LeafMove LeafPlan LeafTypeError Limits MapError MemoryAnalysis MeshError
    MeshSpec MoveError NamedAxes NamedAxis Offender OutOfMemoryError PathRules PlanFormatError PlanMismatchError
    ProgramError Reason Replan ReportRow ReshardPlan RuleError Seconds SecondsRow ShardPlan SpecError Step
    Surplus Traffic TrafficDifference TrafficRow TreeMap UnknownPathError UnmatchedError
    assert_same_plan_text atomic axis_names_of canonical checkpoint chips clear_caches compare compile_for
    constrain constrain_step correct diff differences estimate explain field filter_jit fit follow frontier fsdp
    gather hosts html_report interop lint match name_axes optional plan plan_reshard plan_text presets
    renamed replan replicate report report_data report_rows reshard resolve search seconds shard shardings_of
    specs_of topology traffic
""".split()  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _importlib.import_module(f"{__name__}.{_LATE[name]}")
    return room if name == _LATE[name] else getattr(room, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
