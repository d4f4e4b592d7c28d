"""The values of a call that `filter_jit` does not trace, as one static argument of
`jax.jit`.

The values are compared by value and by type, since 1, 1.0 and True are equal but give
different programs.
"""

import dataclasses
import functools as ft
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax


def mark(value: object) -> Hashable:
    """A key that holds what `==` ignores: the type of `value`, and the sign of a zero.

    It also holds this for the values in containers and dataclasses. Two NaNs have equal
    keys, although NaN != NaN.
    """
    kind = type(value)
    if isinstance(value, float | complex):
        # The text of a complex number has the signs of zeros. A subclass may have a
        # text of its own.
        return kind, repr(complex(value))
    if isinstance(value, tuple | list):
        return kind, tuple(map(mark, value))
    if isinstance(value, dict):
        members = [(key, mark(key), mark(member)) for key, member in value.items()]
        return kind, frozenset(members)
    if isinstance(value, set | frozenset):
        return kind, frozenset([(member, mark(member)) for member in value])
    if dataclasses.is_dataclass(kind):
        # An attribute may be unset.
        fields = [field for field in dataclasses.fields(kind) if field.compare]
        return kind, *[mark(getattr(value, field.name, None)) for field in fields]
    return kind


def node_data(treedef: Any) -> list[Any]:
    """The static data of the inner nodes of a tree: static fields of modules, and dict
    keys that are not strings. Two trees whose structures are equal may differ in it: in
    1 and True, for example.
    """
    static_data: list[Any] = []
    # The children of each node are added while the list is walked.
    nodes = [treedef]
    for node in nodes:
        # A leaf has no data.
        node_type, data = node.node_data() or (None, ())
        if node_type is dict:
            static_data += [key for key in data if type(key) is not str]
        else:
            static_data += data if type(data) is tuple else (data,)
        nodes += node.children()
    return static_data


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """The values of a tree that are not traced, and the structure of the tree, as a
    static argument or result.

    **Arguments:**

    - `treedef`: the structure of the tree. Two structures that are equal may hold
      different static data, such as 1 and True.
    - `order`: for each leaf, the index of the list that has it: 0 for `values`, and 1,
      2, ... for the lists of arrays from which the method `tree` makes the tree again.
    - `values`: the leaves that are not traced.
    - `key`: the result of `key_of`, which equal static arguments have in common; `None`
      for a static result, which equals itself alone.
    """

    treedef: Any
    order: Sequence[int]
    values: Iterable[Any]
    key: Hashable = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is Static and self.key is not None and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    @ft.cached_property
    def _hash(self) -> int:
        # JAX asks in each call, and the key has all static data of a model.
        return hash(self.key)

    def key_of(self, parts: Sequence[Any]) -> Hashable:
        """A key. Static arguments with equal keys lead to the same program for the same
        arrays.

        `parts` has `values` and the static data of the structure's inner nodes, such as
        static fields of modules. Their types are in the key too.
        """
        compared = tuple(map(_comparable, self.values))
        return self.order, compared, mark(parts), self.treedef

    def tree(self, *lists: Iterable[Any]) -> Any:
        """The tree, made again from its `values` and from `lists` of arrays.

        For each leaf, `order` has the number of the list that holds it: 0 for `values`,
        and 1, 2, ... for the given lists. Each list is in the order of the leaves.
        """
        remaining_by_list = [*map(iter, (self.values, *lists))]
        return self.treedef.unflatten(
            [next(remaining_by_list[list_number]) for list_number in self.order]
        )


def _comparable(value: object) -> object:
    """The value itself; `None` for NaN, which does not equal itself."""
    is_nan = isinstance(value, float | complex) and value != value
    return None if is_nan else value


class Parted(NamedTuple):
    """The results of a jitted function.

    **Arguments:**

    - `lists`: one list of arrays for each sharding in `out_shardings`; the first is for
      arrays without one.
    - `rest`: a `Static` with the results that are no arrays, and the structure of all
      results.
    """

    lists: Any
    rest: Any


def is_compared_by_value(value: object) -> bool:
    """Whether values of this type can be equal without being the same object."""
    return type(value).__eq__ is not object.__eq__
