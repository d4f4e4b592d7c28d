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
    """The properties of a value that `==` ignores: its type, and the sign of a zero.

    They include those of the items of containers and the fields of dataclasses. Two NaNs have equal properties,
    although NaN does not equal itself.
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
    """The static data of the inner nodes of a tree with the structure `treedef`.

    These are static fields of modules, and dict keys that are not strings.
    """
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


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """The values of a tree that are not traced, and the structure of the tree. It is a static argument of `jax.jit`.

    **Arguments:**

    - `treedef`: the structure of the tree. Two structures that are equal may hold different static data, such as 1 and
        True.
    - `is_array`: for each leaf, whether it is traced.
    - `values`: the leaves that are not traced.
    """

    treedef: Any
    is_array: tuple[bool, ...]
    values: Sequence[Any]

    def key(self, parts: Sequence[Any]) -> Hashable:
        """Equal for the static arguments of one program.

        `parts` is what is compared by type too: the values, and the static data of the inner nodes.
        """
        # NaN does not equal itself.
        compared = [None if isinstance(one, float | complex) and one != one else one for one in self.values]
        return self.is_array, tuple(compared), mark(parts), self.treedef

    def tree(self, arrays: Iterable[Any]) -> Any:
        """The tree, with `arrays` as its traced leaves."""
        return joined(self.treedef, self.is_array, (self.values, arrays))


def joined(treedef: Any, order: Sequence[int], lists: Sequence[Iterable[Any]]) -> Any:
    """The tree with the structure `treedef`, whose leaves come from several lists.

    `order` has, for each leaf, the index of the list that has it. Each list has its leaves in the order of the tree.
    """
    left = [*map(iter, lists)]
    return treedef.unflatten([next(left[at]) for at in order])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """What a jitted function returns besides arrays.

    **Arguments:**

    - `treedef`: the structure of all results.
    - `order`: for each result, the index of the list that has it. The list 0 is `statics`, and the others are lists of
        arrays.
    - `statics`: the results that are no arrays.
    """

    treedef: Any
    order: list[int]
    statics: list[Any]


class Parted(NamedTuple):
    """The results of a jitted function.

    **Arguments:**

    - `lists`: one list of arrays for each sharding in `out_shardings`.
    - `rest`: the results that are no arrays, and the structure of all results.
    """

    lists: Any
    rest: Any

    def joined(self) -> Any:
        """The tree of results that the function returned."""
        return joined(self.rest.treedef, self.rest.order, (self.rest.statics, *self.lists))
