"""How two plans differ, as lines of text."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

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
    lines = [*plan_lines(a, b), *[line for pair in pairs(a, b) for line in _lines(pair)]]
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


class Pair(NamedTuple):
    """An array of either plan with that of the same path in the other, and the names of the fields that differ."""

    path: str
    before: LeafPlan | None
    after: LeafPlan | None
    fields: tuple[str, ...]


def pairs(a: ShardPlan, b: ShardPlan) -> Iterator[Pair]:
    """Each array of either plan, in the order of `a`, then of `b`."""
    there, here = b.content.by_path, a.content.by_path
    names = [field.name for field in dataclasses.fields(LeafPlan)]
    for leaf in a.leaves:
        other = there.get(leaf.path)
        same = other is None or leaf == other
        yield Pair(leaf.path, leaf, other, () if same else tuple(n for n in names if vars(leaf)[n] != vars(other)[n]))
    yield from (Pair(path, None, leaf, ()) for path, leaf in there.items() if path not in here)


def _lines(pair: Pair) -> list[str]:
    if pair.before is None or pair.after is None:
        return [f"leaf `{pair.path}` is only in {'one' if pair.after is None else 'the other'} plan"]
    one, other = vars(pair.before), vars(pair.after)
    return [f"leaf `{pair.path}`: {name} is {one[name]} in one, {other[name]} in the other" for name in pair.fields]
