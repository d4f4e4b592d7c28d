"""How two plans differ, as lines of text."""

import dataclasses

from .leaf import LeafPlan
from .shard_plan import ShardPlan, check_plan


def differences(a: ShardPlan, b: ShardPlan) -> tuple[str, ...]:
    """How two plans differ, a line for each leaf; empty exactly if their digests are equal.

    **Arguments:**

    - `a`, `b`: the plans.

    **Returns:**

    Lines such as "leaf `w`: spec is P('data',) in one, P() in the other", in the order of `a`.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx._plan import differences

        mesh, tree = MeshSpec({"data": 2}), {"w": jnp.ones((4, 4))}
        a = plan(tree, mesh, paths=PathRules.parse("w->data"))
        b = plan(tree, mesh, paths=PathRules.parse("w->None.data"))
        print(*differences(a, b), sep="\\n")
        ```
    """
    check_plan("a", a)
    check_plan("b", b)
    if a.digest == b.digest:
        return ()
    lines = list(plan_lines(a, b))
    there, here = b.content.by_path, a.content.by_path
    for leaf in a.leaves:
        lines += _leaf_differences(leaf, there.get(leaf.path))
    lines += [f"leaf `{path}` is only in the other plan" for path in there if path not in here]
    return tuple(lines) or (OTHER_TREES,)


OTHER_TREES = "the trees are built of other containers, or their leaves are in another order"


def plan_lines(a: ShardPlan, b: ShardPlan) -> tuple[str, ...]:
    """A line for each thing that is one for a whole plan, and differs."""
    return tuple(
        f"{what} is {one} in one plan, {other} in the other"
        for what, one, other in (
            ("the mesh", a.mesh, b.mesh),
            ("the mode", a.mode, b.mode),
            ("axes", a.axes, b.axes),
            ("strict", a.strict, b.strict),
        )
        if one != other
    )


def fields_that_differ(leaf: LeafPlan, other: LeafPlan) -> tuple[str, ...]:
    """The names of the fields of two leaves that are not equal."""
    if leaf == other:
        return ()
    names = (field.name for field in dataclasses.fields(LeafPlan))
    return tuple(name for name in names if vars(leaf)[name] != vars(other)[name])


def _leaf_differences(leaf: LeafPlan, other: LeafPlan | None) -> list[str]:
    if other is None:
        return [f"leaf `{leaf.path}` is only in one plan"]
    return [
        f"leaf `{leaf.path}`: {name} is {vars(leaf)[name]} in one, {vars(other)[name]} in the other"
        for name in fields_that_differ(leaf, other)
    ]
