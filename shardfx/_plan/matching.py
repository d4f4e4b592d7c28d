"""Matches the arrays of a tree with the rows of a plan, and says how they differ."""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from .._ground.errors import PlanMismatchError
from .._ground.text import plural
from .._ground.tree import Flat, flatten, is_number
from .content import NO_ARRAY, NUMBER, Content, RowIndices
from .leaf import PathTree, canonical_dtype


def shaped_like(content: Content, like: object) -> Content:
    """Returns the data of a plan that was read from JSON as the plan of the tree
    `like`, with the tree's own nodes, such as modules. Raises `PlanMismatchError` if
    the arrays of `like` are not the planned ones.

    If the leaves of both trees have equal paths, the digest stays.
    """
    flat = flatten(like)
    index = rows_of(content, flat)
    if flat.paths == content.path_tree.paths:
        # The structure that was read from JSON stays, so that the digest stays. The
        # paths have the order of the leaves of `like`.
        path_tree = dataclasses.replace(
            content.path_tree,
            treedef=flat.treedef,
            order=None,
        )
        return content.replaced(path_tree=path_tree)
    return content.replaced(path_tree=PathTree(flat.paths, flat.treedef), index=index)


def rows_of(
    content: Content,
    flat: Flat,
    *,
    are_put_on_devices: bool = True,
) -> RowIndices:
    """Returns for each leaf of the tree `flat` the index of its plan in `content.rows`.
    Raises `PlanMismatchError` if the path, shape or dtype of an array differs from its
    plan.

    Leaves that are not arrays, such as the functions of a module, may be missing in the
    tree or in the plan: the tree `equinox.partition(model, equinox.is_array)[0]` fits
    the plan of `model`, and `model` fits the plan of that tree.

    `are_put_on_devices` says that JAX takes the arrays next: NumPy's integers that it
    would cut are then refused.
    """
    index = aligned(content, flat)
    columns = zip(flat.paths, flat.leaves, flat.is_array, index, strict=True)
    for path, leaf, is_array, i in columns:
        if i < 0:
            continue
        row = content.rows[i]
        if is_array and tuple(leaf.shape) == row.shape:
            if leaf.dtype == row.dtype:
                continue
            if canonical_dtype(leaf.dtype) == row.dtype:
                if are_put_on_devices:
                    require_range(path, leaf, row.dtype)
                continue
        if is_array:
            leaf_text = f"{leaf.dtype}{list(leaf.shape)}"
        else:
            leaf_text = f"{type(leaf).__name__} {leaf!r:.60}"
        raise PlanMismatchError(
            f"leaf `{path}` is {leaf_text}, but the plan is for"
            f" {row.dtype}{list(row.shape)}; plan the tree that you use."
        )
    return index


def require_range(path: str, leaf: Any, dtype: Any) -> None:
    """Raises `PlanMismatchError` for NumPy's 64-bit integers that the 32 bits of JAX do not
    hold. JAX would cut off the rest without an error.
    """
    is_wide = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu"
    if not is_wide or not leaf.size:
        return
    limits = np.iinfo(dtype)
    for value in (int(leaf.min()), int(leaf.max())):
        if not limits.min <= value <= limits.max:
            raise PlanMismatchError(
                f"leaf `{path}` is {leaf.dtype}{list(leaf.shape)} and holds {value}, which"
                f' JAX would cut to {dtype}; set `jax.config.update("jax_enable_x64",'
                " True)`, or take smaller numbers."
            )


def aligned(content: Content, flat: Flat) -> RowIndices:
    """Returns for each leaf of the tree `flat` the index of its plan in `content.rows`.
    Raises `PlanMismatchError` if the arrays have other paths than in the plan. Shapes
    and dtypes are not compared.

    The arrays must have the order of those that were planned, or of those in the plan's
    own tree, which is another one for modules that were read from JSON as dicts.
    """
    if flat.paths == content.path_tree.paths:
        return content.index
    paths_and_rows = list(content.paths_and_rows)
    number_by_path = dict(paths_and_rows)
    are_planned = []
    for path, is_array in zip(flat.paths, flat.is_array, strict=True):
        # An array that the plan lacks makes the paths differ below.
        default = 0 if is_array else NO_ARRAY
        are_planned.append(number_by_path.get(path, default) >= 0)
    paths_to_plan = list(itertools.compress(flat.paths, are_planned))
    for pairs in (paths_and_rows, content.path_tree.in_order(paths_and_rows)):
        planned = [(path, i) for path, i in pairs if i >= 0]
        if paths_to_plan == [path for path, _ in planned]:
            break
    else:
        _raise_other_tree(content, flat)
    numbers = iter([i for _, i in planned])
    index = []
    for path, is_planned in zip(flat.paths, are_planned, strict=True):
        if is_planned:
            index.append(next(numbers))
        else:
            index.append(number_by_path.get(path, NO_ARRAY))
    return with_numbers(index, flat)


def with_numbers(index: RowIndices, flat: Flat) -> RowIndices:
    """Returns the indices with `NUMBER` at each leaf of `flat` that is a Python number,
    and `NO_ARRAY` at each other leaf without a row.
    """
    if all(flat.is_array):
        return index
    marked = list(index)
    for position, is_array in enumerate(flat.is_array):
        if not is_array and marked[position] in (NO_ARRAY, NUMBER):
            leaf = flat.leaves[position]
            marked[position] = NUMBER if is_number(leaf) else NO_ARRAY
    return marked


def _raise_other_tree(content: Content, flat: Flat) -> NoReturn:
    """Raises `PlanMismatchError` for a tree whose arrays have other paths, or another
    order, than those in the plan. The message says which are missing, and what to do.
    """
    planned = [path for path, i in content.paths_and_rows if i >= 0]
    array_paths = list(itertools.compress(flat.paths, flat.is_array))
    plan_paths = set(content.path_tree.paths)
    present = set(flat.paths)
    extra = [path for path in array_paths if path not in plan_paths]
    missing = [path for path in planned if path not in present]
    differences = []
    if extra:
        differences.append(f"the plan has no {_path_text(extra[0])}")
    if missing:
        differences.append(f"the tree has no {_path_text(missing[0])}")
    raise PlanMismatchError(
        f"this tree is not the one that was planned ({plural(len(extra), 'array')}"
        f" more, {len(missing)} missing):"
        f" {'; '.join(differences) or 'the arrays are in another order'}."
        f" {_advice(planned, array_paths)}"
    )


def _path_text(path: str) -> str:
    """A path in a message; "array alone" for the path of a tree that is one array."""
    # The path of a tree that is a single array is empty.
    if not path:
        return "array alone"
    return f"`{path}`"


def _advice(planned: Sequence[str], array_paths: Sequence[str]) -> str:
    """What to do with a tree of the arrays `array_paths`, under a plan of the arrays
    `planned`.
    """
    if list(array_paths) == [""]:
        return (
            "One array stands where the plan has a tree: the sharding of a batch is"
            " `plan.sharding(names)`; or the arguments are in another order. Plan the"
            " tree that you use."
        )
    key = branch_of(planned, dict.fromkeys(array_paths))
    if key is not None:
        # A model's plan with a whole training state.
        return (
            f"The planned arrays are below `{key}` in the tree: plan the other parts,"
            f" and join the plans, `ShardPlan.join({key}=plan, ...)`."
        )
    prefixes = _prefixes(array_paths, planned)
    if len(array_paths) == len(planned) and prefixes:
        return (
            f"The planned arrays are below `{prefixes[0]}` in the tree: pass that part, or"
            " plan the tree that you use."
        )
    if prefixes:
        return (
            "This is the state of an optimizer: its plan is `follow(optimizer.init,"
            " plan)`."
        )
    if prefixes := _prefixes(planned, array_paths):
        return (
            f"The plan is for a tree that holds this one, at `{prefixes[0]}`: use the plan"
            " of this part, from which that one was made."
        )
    return "Plan the tree that you use."


def branch_of(paths: Sequence[str], present: Collection[str]) -> str | None:
    """The name of the first branch of a tree below which all of `paths` are; `None` if
    there is none. `present` has the paths of the tree in order.
    """
    if not paths:
        return None
    candidates = [path for path in present if path.endswith(f"/{paths[0]}")]
    for candidate in candidates:
        key = candidate.removesuffix(f"/{paths[0]}")
        if key.isidentifier() and all(f"{key}/{path}" in present for path in paths):
            return key
    return None


def _prefixes(outer: Sequence[str], inner: Sequence[str]) -> list[str]:
    """The paths below which the arrays `outer` have arrays with all the paths
    `inner`.
    """
    if not inner or not inner[0]:
        return []
    outer_paths = set(outer)
    suffix = f"/{inner[0]}"
    prefixes = []
    for path in outer:
        prefix = path.removesuffix(suffix)
        if prefix != path and all(f"{prefix}/{name}" in outer_paths for name in inner):
            prefixes.append(prefix)
    return prefixes
