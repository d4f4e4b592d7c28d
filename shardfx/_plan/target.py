"""A tree that is to be filled: by what was read, or by what was moved."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from .._ground.errors import PlanMismatchError
from .._ground.text import printable
from .._ground.tree import flatten
from .shard_plan import ShardPlan


@dataclasses.dataclass(frozen=True)
class Target:
    """A tree to be filled.

    **Arguments:**

    - `arrays`: per array its path and a struct with a sharding.
    - `others`: the position, path and value of each leaf that is no array; of a plan, which has no values, `None`.
    - `treedef`: the tree's structure.
    """

    arrays: list[tuple[str, Any]]
    others: list[tuple[int, str, Any]]
    treedef: Any

    def filled(self, values: Sequence[object], kept: Mapping[int, object]) -> PyTree:
        """The tree with these arrays, and at the positions of other leaves what is kept for them."""
        left = iter(values)
        others = {**{at: value for at, _, value in self.others}, **kept}
        leaves = [others[at] if at in others else next(left) for at in range(self.treedef.num_leaves)]
        return jax.tree.unflatten(self.treedef, leaves)


def target_of(plan: object, what: str) -> Target:
    """What is to be filled by the function `what`: a plan's tree, or the tree itself."""
    if isinstance(plan, ShardPlan):
        content = plan.content
        leaves = content.skeleton.in_order(list(content.numbered))
        arrays = [path for path, number in leaves if number >= 0]
        others = [(at, path, None) for at, (path, number) in enumerate(leaves) if number < 0]
        return Target(list(zip(arrays, jax.tree.leaves(plan.structs), strict=True)), others, content.skeleton.treedef)
    flat = flatten(plan)
    rows = list(zip(flat.paths, flat.leaves, flat.is_array, strict=True))
    arrays = [(path, leaf) for path, leaf, is_array in rows if is_array]
    others = [(at, path, leaf) for at, (path, leaf, is_array) in enumerate(rows) if not is_array]
    # A tree without any array is none that was meant: a file's name, for one.
    for path, leaf in arrays or [(path, leaf) for _, path, leaf in others]:
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) or leaf.sharding is None:
            raise PlanMismatchError(
                f"`{what}` needs a ShardPlan, or a tree of `jax.ShapeDtypeStruct`s with shardings; leaf "
                f"`{printable(path)}` ({type(leaf).__name__}) has none. Make a plan with "
                "`shardfx.plan(tree, mesh, ...)`."
            )
    return Target(arrays, others, flat.treedef)
