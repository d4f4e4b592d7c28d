"""What is not traced of a call, compared by value and by type: 1, 1.0 and True are equal, and their programs differ."""

import dataclasses
import functools as ft
import gc
import itertools as it
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


@ft.lru_cache(maxsize=1024)
def is_traced(kind: type) -> bool:
    """Whether leaves of this type are arrays, or stand for one."""
    return issubclass(kind, (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_float(kind: type) -> bool:
    return issubclass(kind, float | complex)


@ft.lru_cache(maxsize=1024)
def marker(kind: type) -> Callable[[Any], Hashable] | None:
    """What tells equal values of this type apart; `None` where its values are equal only if nothing differs."""
    if issubclass(kind, float):
        return _sign
    if issubclass(kind, complex):
        return lambda value: complex.__repr__(value) if value != value else (_sign(value.real), _sign(value.imag))
    if issubclass(kind, set | frozenset):
        return lambda value: frozenset([(one, marks([one])) for one in value])
    if issubclass(kind, dict):
        return lambda value: frozenset([(key, marks((key, one))) for key, one in value.items()])
    if issubclass(kind, tuple | list):
        return marks
    if dataclasses.is_dataclass(kind):
        # An attribute may not be set yet; what is not compared makes no difference.
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
        return lambda value: marks([getattr(value, name, None) for name in names])
    return None


@ft.lru_cache(maxsize=1024)
def _markers(kinds: tuple[type, ...]) -> tuple[tuple[int, Callable[[Any], Hashable]], ...]:
    found = [(at, marker(kind)) for at, kind in enumerate(kinds)]
    return tuple([(at, one) for at, one in found if one is not None])


def marks(values: Sequence[Any]) -> Hashable:
    """What two lists of values may differ in though they are equal: types, also within containers and dataclasses, and
    the signs of zeros. NaN, which equals nothing, has a mark that says all of it.
    """
    kinds = tuple(map(type, values))
    inside = _markers(kinds)
    return (kinds, tuple([one(values[at]) for at, one in inside])) if inside else kinds


def _sign(value: float) -> str | None:
    return None if value == value != 0 else float.hex(value)


def is_nan(value: Any) -> bool:
    return is_float(type(value)) and value != value


def node_data(treedef: Any) -> list[Any]:
    """What the nodes of a tree hold beside leaves: static fields of modules, keys of dicts that are no strings."""
    found: list[Any] = []
    _append_data(treedef, found)
    return found


def _append_data(treedef: Any, found: list[Any]) -> None:
    data = treedef.node_data()
    if data is None:
        return
    kind, aux = data
    if kind is dict:
        found.extend(aux if set(map(type, aux)) - {str} else ())
    elif aux is not None:
        found.append(aux)
    for child in treedef.children():
        _append_data(child, found)


def _fields(data: list[Any]) -> list[Any]:
    """The data of nodes, that of modules taken apart into the values of their fields."""
    return [*it.chain.from_iterable([one if type(one) is tuple else (one,) for one in data])]


def data_needs_marks(treedef: Any) -> bool:
    """Whether trees whose structures are equal may still differ in what their nodes hold."""
    return any(type(value).__eq__ is not object.__eq__ for value in _fields(node_data(treedef)))


class Static:
    """What is not traced of a tree of arguments: equal and hashed as a whole, as one static argument of `jax.jit`.

    `values` are the leaves that are no arrays, and `treedef` holds the static data of the nodes.
    """

    __slots__ = ("treedef", "layout", "values", "_key", "_hash")

    def __init__(self, treedef: Any, layout: Any, values: tuple[Any, ...]):
        self.treedef, self.layout, self.values = treedef, layout, values
        compared = tuple([None if is_nan(value) else value for value in values]) if layout.has_floats else values
        data = marks(_fields(node_data(treedef))) if layout.has_data else None
        self._key = (layout.kinds, compared, marks(values) if layout.has_marks else None, data)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Static)
            and self._hash == other._hash
            and self.treedef == other.treedef
            and self._key == other._key
        )


class Recent:
    """The static part of the last call, found again where every value is the same object: most often it is.

    To ask a structure for its data takes one call per node, which is more than all else that `filter_jit` does.
    The garbage collector knows what a structure refers to, and is asked where that is seen to hold all of the data.
    """

    __slots__ = ("_has_data", "_is_known", "_last")

    def __init__(self, treedef: Any, has_data: bool):
        self._has_data = has_data
        known = set(map(id, gc.get_referents(treedef)))
        self._is_known = not has_data or known.issuperset(map(id, node_data(treedef)))
        self._last: tuple[list[Any], Static] | None = None

    def static(self, treedef: Any, layout: Any, values: tuple[Any, ...]) -> Static:
        if not self._is_known:
            return Static(treedef, layout, values)
        parts = [*values, *_fields(gc.get_referents(treedef))] if self._has_data else [*values]
        last = self._last
        if last is not None and len(parts) == len(last[0]) and all(map(operator.is_, parts, last[0])):
            return last[1]
        static = Static(treedef, layout, values)
        self._last = parts, static
        return static
