"""A map on whole arrays in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.tree import flatten
from . import in_jax
from .binding import Bound, bound_steps, places, structs_of, tree_structs
from .casts import cast_array
from .evaluate import evaluated
from .on_arrays import on_arrays
from .pieces import Made
from .rules import Rules
from .values import fill


def applied(steps: Sequence[Rules], tree: Any, like: Any) -> Any:
    """As `TreeMap.apply`."""
    flat = flatten(tree)
    arrays = {
        path: leaf for path, leaf, is_array in zip(flat.paths, flat.leaves, flat.is_array, strict=True) if is_array
    }
    target = None if like is None else tree_structs(like)
    made = bound_steps(steps, structs_of(arrays, arrays.values()), target)
    if any(step.inverted for step in steps):
        put = in_jax.assembled if _is_in_jax(arrays) else _assembled
        found = {path: put(one, arrays) for path, one in made.made.items()}
    else:
        found = _by_rules(steps, arrays, made)
    if like is None:
        return found
    there = flatten(like)
    leaves = [found[path] if path in found else leaf for path, leaf in zip(there.paths, there.leaves, strict=True)]
    return jax.tree.unflatten(there.treedef, leaves)


def _is_in_jax(arrays: Mapping[str, Any]) -> bool:
    return any(isinstance(one, jax.Array) for one in arrays.values())


def _by_rules(steps: Sequence[Rules], arrays: Mapping[str, Any], made: Bound) -> dict[str, Any]:
    """Step by step, rule by rule: not by pieces, so that the two can be compared."""
    ops = on_arrays(jnp if _is_in_jax(arrays) else np)
    leaves, structs = dict(arrays), structs_of(arrays, arrays.values())
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        target = dict(made.made) if last else dict(bound_steps([step], structs).made)
        found = {}
        for path, rule, binding in places(step, structs, target, {}, []):
            value = evaluated(rule, binding, leaves, ops)
            found[path] = cast_array(value, target[path].dtype) if value.dtype != target[path].dtype else value
        leaves, structs = {path: found[path] for path in target}, structs_of(target, target.values())
    return leaves


def _assembled(made: Made, arrays: Mapping[str, Any]) -> Any:
    """A leaf put together from pieces."""
    out = np.zeros(made.shape, made.dtype)
    whole = tuple((0, size) for size in made.shape)
    for piece in made.pieces:
        fill(out, whole, piece, lambda path, box: np.asarray(arrays[path])[(..., *[slice(*ends) for ends in box])])
    return out
