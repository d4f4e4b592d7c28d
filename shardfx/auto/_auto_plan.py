"""`AutoPlan`, a plan that is made without rules, with the rules that made it."""

import textwrap
from typing import Any

import equinox as eqx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._plan import ShardPlan, Tree
from .._rules import Fsdp, Optional, PathRules, Pipeline


class AutoPlan(ShardPlan[Tree]):
    """A plan that [`shardfx.auto.plan`][] made, with the reason for it and the rules
    that made it. It is used as any [`shardfx.ShardPlan`][].

    `why` is a text: the bytes of the state, the mesh that they need, and what was
    assumed. `rules` are the path rules that made the plan, and `code()` prints them.
    `batch_dim` is the dimension of a batch that has its rows.

    A plan that is made of it, as by `on` and `off`, is a `ShardPlan` without them, and so
    is what `ShardPlan.from_json` reads from its `to_json()`: it equals `off()`. To keep
    the rules, keep the text of `code()`.
    """

    __module__ = "shardfx.auto"

    why: str = eqx.field(static=True, kw_only=True)
    rules: PathRules = eqx.field(static=True, kw_only=True)
    batch_dim: int = eqx.field(static=True, kw_only=True)

    @property
    def batch(self) -> NamedSharding:
        """The sharding of a batch: its rows over all mesh axes but `tensor`."""
        axes = tuple(name for name in self.mesh.axis_names if name != "tensor")
        if not axes:
            return self.sharding(PartitionSpec())
        return self.sharding(PartitionSpec(*[None] * self.batch_dim, axes))

    def code(self) -> str:
        """The text of a Python module with the mesh and the rules, to keep and edit.

        The module defines `plan_of(tree)`, which returns this plan without devices.

        !!! Example

            ```python
            import jax
            import shardfx

            tree = {"w": jax.ShapeDtypeStruct((8192, 8192), "float32")}
            made = shardfx.auto.plan(tree, "tpu:v5e:2x2")
            module = {}
            exec(made.code(), module)
            assert module["plan_of"](tree) == made.off()
            ```
        """
        why = "\n# ".join(textwrap.wrap(self.why, 86))
        lines = [
            f"        ({_regex_code(regex)}, {_target_code(target)}),\n"
            for regex, target in self.rules.rules
        ]
        text = "".join(lines)
        strategies = [
            word for word in ("fsdp", "optional", "replicate") if word in text
        ]
        names = ", ".join(["MeshSpec", "PathRules", *strategies, "plan"])
        # The code of a mesh names the types of its axes if one is not Auto.
        has_types = any(kind != AxisType.Auto for kind in self.mesh.axis_types)
        import_of_types = "from jax.sharding import AxisType\n" if has_types else ""
        return f'''\
{import_of_types}from shardfx import {names}


# {why}
MESH = {self.mesh!r}
RULES = PathRules(
    [
{text}    ]
)


def plan_of(tree):
    """The plan of a tree of arrays, or of structs of them."""
    return plan(tree, MESH, paths=RULES)
'''


def _regex_code(regex: str) -> str:
    """A regex as Python code: raw if it has a backslash."""
    if "'" in regex or '"' in regex or "\n" in regex:
        return repr(regex)
    if "\\" in regex:
        return f'r"{regex}"'
    return f'"{regex}"'


def _target_code(target: Any) -> str:
    """The target of a path rule as Python code: `optional(...)`, strategies joined by
    `|`, `fsdp(...)`, `replicate` or a spec.
    """
    if isinstance(target, Optional):
        return f"optional({_target_code(target.target)})"
    if isinstance(target, Pipeline):
        return " | ".join(map(_target_code, target.steps))
    if isinstance(target, Fsdp):
        return target.code.replace("'", '"')
    return repr(target)
