"""Where a tree's arrays shall lie, in all the forms that it can be said in: a plan, a sharding, a tree of shardings."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding

from .._ground.errors import LeafTypeError, PlanMismatchError, check_type
from .._ground.tree import flatten, tree_paths
from .._plan import ShardPlan, shardings_of_leaves


def targets(form: Any, tree: Any, leaves: Sequence[Any], treedef: Any, what: str) -> list[Sharding | None]:
    """The sharding of each leaf; `None` for a leaf that is no array, and for one that is to be left alone.

    **Arguments:**

    - `form`: a plan with devices, a sharding, or a tree or prefix of shardings, of `None`, and of structs with them.
    - `tree`: the tree of arrays; `leaves`, `treedef`: as flattened by JAX.
    - `what`: the name of the argument, for messages.

    **Returns:**

    One entry per leaf.

    **Raises:**

    `PlanMismatchError` if the form is for another tree, or a plan without devices; `LeafTypeError` for entries that are
    no shardings.
    """
    if isinstance(form, ShardPlan):
        return shardings_of_leaves(form, flatten(tree))
    if isinstance(form, Sharding):
        return [form] * len(leaves)
    try:
        entries = treedef.flatten_up_to(form)
    except ValueError:
        entries = _broadcast(form, tree, what)
    known: dict[int, Sharding | None] = {}
    return [
        known[id(entry)] if id(entry) in known else _sharding(entry, at, treedef, what, known)
        for at, entry in enumerate(entries)
    ]


def _broadcast(form: object, tree: object, what: str) -> list[Any]:
    try:
        whole = jax.tree.broadcast(form, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise PlanMismatchError(
            f"`{what}` is no prefix of the tree: {str(error).splitlines()[0]}; give a plan of this tree, one sharding, "
            "or a tree of shardings of its structure."
        ) from error
    return jax.tree.leaves(whole, is_leaf=lambda node: node is None)


def _sharding(entry: object, at: int, treedef: object, what: str, known: dict[int, Sharding | None]) -> Sharding | None:
    found = entry.sharding if isinstance(entry, jax.ShapeDtypeStruct | jax.Array) else entry
    if found is not None and not isinstance(found, Sharding):
        path = tree_paths(treedef)[at]
        kind = type(found).__name__
        where = f"`{what}` holds a {kind} at `{path}`" if path else f"`{what}` is a {kind}"
        if isinstance(found, Format):
            raise LeafTypeError(
                f"{where}, which has a layout in memory beside its sharding, and moved arrays have JAX's default one; "
                "give its sharding alone, `format.sharding`, and change the layout afterwards with `jax.device_put`."
            )
        text = repr(found) if len(repr(found)) < 80 else f"{repr(found)[:77]}..."
        raise LeafTypeError(
            f"{where}, {text}, which is no sharding; use `NamedSharding(mesh, spec)`, or a plan: "
            "`plan(tree, mesh, ...)`."
        )
    known[id(entry)] = found
    return found


def is_array(leaf: object) -> bool:
    """Whether a leaf can be moved."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def lost_devices(lost: Iterable[object]) -> tuple[Any, ...]:
    """The argument `lost` of a move, for which ids, or one device alone, would name no device; as a tuple."""
    fix = "give an iterable of jax devices, such as `lost=[jax.devices()[3]]`."
    check_type("lost", lost, Iterable, LeafTypeError, fix.removesuffix("."))
    found = tuple(lost)
    for device in found:
        if not isinstance(device, jax.Device):
            raise LeafTypeError(f"`lost` holds {device!r:.80}, of type {type(device).__name__}, not a device; {fix}")
    return found


def leaf_name(path: str) -> str:
    """A leaf in a message; a tree that is one array has no path."""
    return f"leaf `{path}`" if path else "the array"
