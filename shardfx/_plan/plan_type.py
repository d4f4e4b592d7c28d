"""What users may write on a plan that it does not have, and what they write instead."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, dataclass_transform

import equinox as eqx

from .._ground.told import ToldType
from .content import Content


JOIN: Final = "`ShardPlan.join(params=plan, opt=opt_plan)`"
# By an attribute that a plan lacks.
ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spec": "`plan.specs`, or `plan[path].spec` for one array",
        "shard": "`shardfx.shard(tree, plan)`",
        "gather": "`shardfx.gather(tree)`",
        "report": "`shardfx.report(plan)`",
        "save": "`pathlib.Path('plan.json').write_text(plan.to_json())`",
        "load": "`ShardPlan.from_json(pathlib.Path('plan.json').read_text())`",
        "keys": "`list(plan)`, the paths",
        "items": "`plan.leaves`",
        "values": "`plan.leaves`",
    }
)


@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field))
class PlanType(ToldType):
    """The type of the class ShardPlan, which users do not call."""

    if not TYPE_CHECKING:

        def __call__(cls, *args, **kwargs):
            if args and not isinstance(args[0], Content):
                raise TypeError(
                    "`ShardPlan(...)` is not called: write `shardfx.plan(tree, mesh,"
                    " paths=rules)`, which returns a ShardPlan."
                )
            return super().__call__(*args, **kwargs)


def array_of_plan(plan: Any, name: str) -> str:
    """What to write in place of `plan.NAME` for the array, or the arrays, below the
    path `name`: "`plan["w"]`" for "w". Empty if the plan has no such path.
    """
    # A plan that is being unpickled has no content yet.
    content = vars(plan).get("content")
    if content is None:
        return ""
    if name in content.by_path:
        return f'`plan["{name}"]`'
    if any(path.startswith(f"{name}/") for path in content.by_path):
        return f'`plan.select("^{name}/")`, or `plan[path]` for one array'
    return ""
