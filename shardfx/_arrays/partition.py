"""The values of a call that `filter_jit` does not trace, as one static argument of `jax.jit`.

The values are compared by value and by type: 1, 1.0 and True are equal, and their programs differ.
"""

import dataclasses
import functools as ft
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax


@ft.lru_cache(maxsize=1024)
def _compared_fields(kind: type) -> tuple[str, ...]:
    return tuple([field.name for field in dataclasses.fields(kind) if field.compare])


def mark(value: object) -> Hashable:
    """The properties of a value that `==` ignores: the type and the sign of a zero, also inside containers and
    dataclasses. The properties of two NaNs are equal, although NaN does not equal itself.
    """
    kind = type(value)
    # A subclass may have a text of its own.
    if isinstance(value, float):
        return kind, float.__repr__(value)
    if isinstance(value, complex):
        return kind, complex.__repr__(value)
    if isinstance(value, tuple | list):
        return kind, tuple(map(mark, value))
    if isinstance(value, dict):
        return kind, frozenset([(key, mark(key), mark(one)) for key, one in value.items()])
    if isinstance(value, set | frozenset):
        return kind, frozenset([(one, mark(one)) for one in value])
    if dataclasses.is_dataclass(kind):
        # An attribute may be unset.
        return kind, *[mark(getattr(value, name, None)) for name in _compared_fields(kind)]
    return kind


def node_data(treedef: Any) -> list[Any]:
    """The static data of the inner nodes of a tree: static fields of modules, and dict keys that are not strings."""
    found: list[Any] = []
    nodes = [treedef]
    for node in nodes:
        kind, data = node.node_data() or (None, ())
        if kind is dict:
            found += [key for key in data if type(key) is not str]
        else:
            found += data if type(data) is tuple else (data,)
        nodes += node.children()
    return found


class Static:
    """The values of a tree that are not traced, and the structure of the tree.

    **Arguments:**

    - `treedef`: the structure of the tree. An equal structure may hold other static data.
    - `is_array`: whether each leaf is traced.
    - `values`: the leaves that are not traced.
    - `parts`: the values, and the static data of the nodes.
    """

    def __init__(self, treedef: Any, is_array: tuple[bool, ...], values: Sequence[Any], parts: Sequence[Any]):
        self.treedef, self.is_array, self.values, self.parts = treedef, is_array, values, parts
        # NaN does not equal itself.
        compared = tuple([None if isinstance(one, float | complex) and one != one else one for one in values])
        self._key = is_array, compared, mark(parts), treedef
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Static) and self._key == other._key)

    def tree(self, arrays: Iterable[Any]) -> Any:
        """The tree, with these arrays as the traced leaves."""
        return joined(self.treedef, self.is_array, (self.values, arrays))


def joined(treedef: Any, order: Sequence[int], lists: Sequence[Iterable[Any]]) -> Any:
    """The tree with this structure, whose leaves come from several lists. `order` has the index of the list for each
    leaf.
    """
    left = [*map(iter, lists)]
    return treedef.unflatten([next(left[at]) for at in order])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """The results of a function that are no arrays, the structure of all results, and for each result the index of the
    list that holds it.
    """

    treedef: Any
    order: list[int]
    statics: list[Any]


class Parted(NamedTuple):
    """The results of a function: one list of arrays for each sharding in `out_shardings`, and the other results."""

    lists: Any
    rest: Any

    def joined(self) -> Any:
        """The tree of results that the function returned."""
        return joined(self.rest.treedef, self.rest.order, (self.rest.statics, *self.lists))
