"""The leaves that `save` does not write: what a program defines by a name is left out,
and any other leaf that would be lost is an error.
"""

import collections
import enum
import types
from collections.abc import Iterable, Mapping, Set

import equinox as eqx
import jax
import numpy as np

from .._ground.errors import CheckpointError
from .._ground.text import plural, printable
from .._ground.tree import flatten, is_array_type


# What a program defines by a name, and a checkpoint need not hold.
_DEFINITIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    enum.Enum,
    np.dtype,
)


def is_definition(leaf: object) -> bool:
    """Whether a leaf is a function, a class, an enumeration member or a dtype, or can
    be called and has no arrays that JAX does not see.
    """
    if isinstance(leaf, _DEFINITIONS):
        return True
    return callable(leaf) and not _holds_arrays(leaf)


def _holds_arrays(leaf: object) -> bool:
    """Whether an object that is one leaf for JAX is an array of another library, or has
    arrays among its items or attributes.
    """
    if getattr(leaf, "__array__", None) is not None:
        return True
    contents: list[object] = [getattr(leaf, "__dict__", None)]
    if isinstance(leaf, Mapping):
        contents += leaf.values()
    elif isinstance(leaf, Set | collections.deque):
        contents += leaf
    leaves = jax.tree.leaves(contents, is_leaf=_is_other_iterable)
    return any(map(is_array_type, map(type, leaves)))


def _is_other_iterable(node: object) -> bool:
    """Whether a node is an iterable of which JAX would warn that it is one leaf."""
    return isinstance(node, Iterable) and not isinstance(node, list | tuple | dict)


def refuse_others(tree: object, others: Mapping[str, object]) -> None:
    """Raises `CheckpointError` for leaves that only the tree has. `others` has by path
    the leaves of the tree that are no arrays, numbers or definitions.

    Those in an Equinox module, such as the text `axis_name` of its BatchNorm, do not
    count: like functions, they are made again with the module. But an object there that
    holds arrays does.
    """
    for path, leaf in others.items():
        if _holds_arrays(leaf):
            kind = type(leaf).__name__
            raise CheckpointError(
                f"leaf `{printable(path)}` is a {kind}, which is one leaf for JAX: the"
                " arrays in it would be lost; register it,"
                f" `jax.tree_util.register_dataclass({kind})`, or take JAX's arrays."
            )
    # `None` has no leaves.
    without_modules = jax.tree.map(
        lambda node: None if _is_module(node) else node, tree, is_leaf=_is_module
    )
    lost = []
    for path in flatten(without_modules).paths:
        if path in others:
            lost.append(f"`{printable(path)}` ({others[path]!r:.40})")
    if lost:
        raise CheckpointError(
            f"a checkpoint keeps arrays and numbers, and the tree has"
            f" {plural(len(lost), 'other leaf', 'other leaves')}:"
            f" {', '.join(lost[:3])}, which would be lost;"
            " leave them out: `save(path, eqx.filter(tree, eqx.is_array_like), plan)`."
        )


def _is_module(node: object) -> bool:
    """Whether a node of a tree is an Equinox module."""
    return isinstance(node, eqx.Module)
