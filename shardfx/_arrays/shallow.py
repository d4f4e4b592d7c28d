"""Arguments that are leaves, or lists, tuples and dicts of leaves: the leaves, without taking a tree apart."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


# How one argument is built: for a list or tuple its type and length, for a dict its type, its keys, and what gives its
# values in the order that JAX has; `None` for a leaf.
Part = tuple[type, int | list[str], Callable[[Any], Iterable[Any]] | None] | None
Form = list[Part]


def form_of(args: Sequence[Any]) -> Form | None:
    """How arguments are built, none of which holds more than leaves; `None` where one does."""
    if not all(jax.tree_util.all_leaves([arg]) or _holds_leaves(arg) for arg in args):
        return None
    return [_part(arg) for arg in args]


def _holds_leaves(arg: Any) -> bool:
    if type(arg) is dict:
        return set(map(type, arg)) <= {str} and jax.tree_util.all_leaves(arg.values())
    return type(arg) in (list, tuple) and jax.tree_util.all_leaves(arg)


def _part(arg: Any) -> Part:
    if type(arg) is dict:
        keys = [*arg]
        is_sorted = keys == sorted(keys)
        return dict, keys, dict.values if is_sorted else operator.itemgetter(*sorted(keys))
    return (type(arg), len(arg), None) if type(arg) in (list, tuple) else None


def leaves_in(args: Sequence[Any], form: Form) -> list[Any] | None:
    """The leaves of arguments that are built as the form says, if it is leaves that they hold; `None` for others."""
    if len(args) != len(form):
        return None
    leaves: list[Any] = []
    for at, arg in enumerate(args):
        part = form[at]
        if part is None:
            leaves.append(arg)
            continue
        kind, size, values = part
        if type(arg) is not kind or size != (len(arg) if values is None else [*arg]):
            return None
        leaves += arg if values is None else values(arg)
    return leaves
