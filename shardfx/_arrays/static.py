"""What is not traced of a call, compared by value and by type: 1, 1.0 and True are equal, and their programs differ."""

import dataclasses
import functools as ft
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


@ft.lru_cache(maxsize=1024)
def is_traced(kind: type) -> bool:
    """Whether leaves of this type are arrays, or stand for one."""
    return issubclass(kind, (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct))


@ft.lru_cache(maxsize=1024)
def _compared_fields(kind: type) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple([field.name for field in dataclasses.fields(kind) if field.compare])


def mark(value: object) -> Hashable:
    """What equality does not see of a value: its type, the sign of a zero, and both within containers and dataclasses.

    NaN, which equals nothing, has a mark that says all of it.
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, float.__repr__(value)
    if isinstance(value, complex):
        return kind, complex.__repr__(value)
    if isinstance(value, tuple | list):
        return kind, tuple(map(mark, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset([(one, mark(one)) for one in value])
    if isinstance(value, dict):
        return kind, frozenset([(key, mark(key), mark(one)) for key, one in value.items()])
    fields = _compared_fields(kind)
    # An attribute may not be set yet.
    return kind if fields is None else (kind, *[mark(getattr(value, name, None)) for name in fields])


def node_data(treedef: Any) -> list[Any]:
    """What the nodes of a tree hold beside leaves: static fields of modules, keys of dicts that are no strings."""
    found: list[Any] = []
    nodes = [treedef]
    for node in nodes:
        data = node.node_data()
        if data is None:
            continue
        nodes += node.children()
        kind, aux = data
        if type(aux) is tuple:
            found += aux
        elif kind is not dict:
            found.append(aux)
        elif set(map(type, aux)) - {str}:
            found += aux
    return found


def needs_marks(treedef: object) -> bool:
    """Whether trees whose structures are equal may still differ in what their nodes hold."""
    return any(type(one).__eq__ is not object.__eq__ for one in node_data(treedef))


class Static:
    """All of a tree that is not traced: hashed and compared as a whole, as one static argument of `jax.jit`.

    **Arguments:**

    - `positions`: where the leaves that are no arrays, and each list of arrays, are among all leaves.
    - `treedef`: the structure of this very tree: one that is equal may hold other data.
    - `values`: the leaves that are no arrays.
    - `data`: what the nodes hold.
    """

    __slots__ = ("positions", "treedef", "values", "_parts", "_key", "_hash")

    def __init__(self, positions: list[list[int]], treedef: Any, values: Sequence[Any], data: Sequence[Any]):
        self.positions, self.treedef, self.values, self._parts = positions, treedef, values, [*values, *data]
        compared = tuple([None if isinstance(one, float | complex) and one != one else one for one in values])
        self._key = (tuple(positions[0]), compared, mark(self._parts), treedef)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Static) and self._hash == other._hash and self._key == other._key

    def holds(self, parts: Sequence[object]) -> bool:
        """Whether these are its values and data, by their identity."""
        return len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))

    def difference(self, given: "Static") -> str:
        """How another call differs, in words."""
        if self.treedef != given.treedef:
            return f"{self.treedef.num_leaves} leaves then, {given.treedef.num_leaves} now"
        pairs = zip(self._parts, given._parts, strict=False)
        then, now = next((pair for pair in pairs if mark(pair[0]) != mark(pair[1]) or pair[0] != pair[1]), ("", ""))
        return f"{then!r:.60} then, {now!r:.60} now"


def joined(treedef: Any, positions: Sequence[Sequence[int]], lists: Sequence[Sequence[Any]]) -> Any:
    """The tree whose leaves are in these lists, each at the positions of its list."""
    leaves: list[Any] = [None] * treedef.num_leaves
    for own, found in zip(positions, lists, strict=True):
        for at, leaf in zip(own, found, strict=True):
            leaves[at] = leaf
    return treedef.unflatten(leaves)
