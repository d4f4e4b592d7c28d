"""The tree of arrays that is loaded or moved under a plan, with its other leaves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from .._ground.errors import (
    PlanMismatchError,
)
from .._ground.text import printable
from .._ground.tree import flatten, is_number
from .content import (
    LEFT_OUT,
    NUMBER,
    Content,
)
from .shard_plan import ShardPlan


class OtherLeaf(NamedTuple):
    """A leaf of a target that is not loaded as an array.

    - `position`: its index among all leaves of the tree.
    - `path`: its path.
    - `value`: its value; `None` if a plan is the target, since a plan holds no values.
    - `is_number`: whether it is a Python number.
    - `is_left_out`: whether it is an array that `ShardPlan.select` left out.
    """

    position: int
    path: str
    value: Any
    is_number: bool
    is_left_out: bool


@dataclasses.dataclass(frozen=True)
class Target:
    """A tree of arrays to load: a ShapeDtypeStruct with a sharding for each, and the
    values of the other leaves.

    `arrays` has, for each array, its path, and a ShapeDtypeStruct or an array with a
    sharding. `others` has the other leaves.
    """

    arrays: list[tuple[str, Any]]
    others: list[OtherLeaf]
    treedef: Any

    def filled(self, values: Sequence[object], kept: Mapping[int, object]) -> PyTree:
        """Returns the tree with `values` at its arrays, in order. `kept` maps indices
        of other leaves to new values.
        """
        arrays = iter(values)
        others = {leaf.position: leaf.value for leaf in self.others}
        others.update(kept)
        leaves = []
        for position in range(self.treedef.num_leaves):
            if position in others:
                leaves.append(others[position])
            else:
                leaves.append(next(arrays))
        return jax.tree.unflatten(self.treedef, leaves)


def target_of(plan: object, what: str) -> Target:
    """Returns the tree to load into. `plan` is a ShardPlan or a tree of
    ShapeDtypeStructs with shardings, else this raises `PlanMismatchError`. `what` is
    the name of the calling function, for the message.
    """
    if isinstance(plan, ShardPlan):
        return _target_of_plan(plan.content, jax.tree.leaves(plan.structs))
    flat = flatten(plan)
    arrays = []
    others = []
    columns = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    for position, (path, leaf, is_array) in enumerate(columns):
        if is_array:
            arrays.append((path, leaf))
        else:
            other = OtherLeaf(
                position=position,
                path=path,
                value=leaf,
                is_number=is_number(leaf),
                is_left_out=False,
            )
            others.append(other)
    # A tree without any array is a mistake, such as a file's name.
    for path, leaf in arrays or zip(flat.paths, flat.leaves, strict=True):
        is_array = isinstance(leaf, jax.ShapeDtypeStruct | jax.Array)
        if not is_array or leaf.sharding is None:
            raise PlanMismatchError(
                f"`{what}` needs a ShardPlan, or a tree of `jax.ShapeDtypeStruct`s"
                f" with shardings; leaf `{printable(path)}` ({type(leaf).__name__})"
                " has none. Make a plan with `shardfx.plan(tree, mesh, ...)`."
            )
    return Target(
        arrays=arrays,
        others=others,
        treedef=flat.treedef,
    )


def _target_of_plan(content: Content, structs: Sequence[Any]) -> Target:
    """Returns the tree to load into from the data of a plan. `structs` has a
    ShapeDtypeStruct for each array, in the order of the tree's leaves.
    """
    path_tree = content.path_tree
    remaining_structs = iter(structs)
    arrays = []
    others = []
    pairs = path_tree.in_order(list(content.paths_and_rows))
    for position, (path, row_number) in enumerate(pairs):
        if row_number >= 0:
            arrays.append((path, next(remaining_structs)))
            continue
        leaf = OtherLeaf(
            position=position,
            path=path,
            value=None,
            is_number=row_number == NUMBER,
            is_left_out=row_number == LEFT_OUT,
        )
        others.append(leaf)
    return Target(
        arrays=arrays,
        others=others,
        treedef=path_tree.treedef,
    )
