"""Sharding plans as plain data, for JAX and Equinox."""

import importlib as _importlib
import typing as _typing


if _typing.TYPE_CHECKING:
    from . import (
        auto as auto,
        checkpoint as checkpoint,
        chips as chips,
        cost as cost,
        errors as errors,
        hosts as hosts,
        interop as interop,
        presets as presets,
        results as results,
        sync as sync,
        testing as testing,
        topology as topology,
    )
    from ._arrays import (
        clear_caches as clear_caches,
        constrain as constrain,
        filter_jit as filter_jit,
        gather as gather,
        misplaced as misplaced,
        shard as shard,
        shardings_of as shardings_of,
        specs_of as specs_of,
    )
    from ._convert import From as From, TreeMap as TreeMap
    from ._ground.reason import Code as Code, Decision as Decision, Reason as Reason
    from ._plan import (
        LeafPlan as LeafPlan,
        ShardPlan as ShardPlan,
        correct as correct,
        field as field,
        follow as follow,
        plan as plan,
        report as report,
    )
    from ._reshard import (
        map_matrices as map_matrices,
        plan_reshard as plan_reshard,
        reshard as reshard,
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
    from ._see import (
        diff as diff,
        explain as explain,
        html_report as html_report,
        lint as lint,
    )
    from .topology import MeshSpec as MeshSpec


__version__ = "0.1.0"
# All load when they are first named: the command line's help, and most programs, need
# few of them.
_LATE = {
    name: room or name
    for room, names in {
        "": (
            "auto checkpoint chips cost errors hosts interop presets results sync"
            " testing topology"
        ),
        "_arrays": (
            "clear_caches constrain filter_jit gather misplaced shard shardings_of"
            " specs_of"
        ),
        "_ground.reason": "Code Decision Reason",
        "_plan": "LeafPlan ShardPlan correct field follow plan report",
        "_rules": "AxisRules PathRules atomic fsdp match optional replicate resolve",
        "topology": "MeshSpec",
        "_convert": "From TreeMap",
        "_reshard": "map_matrices plan_reshard reshard",
        "_see": "diff explain html_report lint",
    }.items()
    for name in names.split()
}
__all__ = sorted(_LATE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        misuse = _importlib.import_module(f"{__name__}._ground.misuse")
        raise misuse.lacking_in(__name__, name, __all__)
    room = _importlib.import_module(f"{__name__}.{_LATE[name]}")
    value = room if name == _LATE[name] else getattr(room, name)
    # `typing.get_type_hints` looks names up in the module's own namespace.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
