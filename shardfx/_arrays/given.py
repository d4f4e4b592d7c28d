"""Checks of a call's arguments and results: arrays that were deleted, are donated twice or are on other devices, and
static leaves.

The runtime notices this too, but in a program on several CPU devices it ends the process. Static values are compared by
value and by type: 1, 1.0 and True are equal, and their programs differ.
"""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from .._ground.boxes import boxes
from .._ground.errors import PlanMismatchError
from ..topology import MeshSpec


class Given(NamedTuple):
    """A leaf of the arguments: its name in messages, its path, its entry in `in_shardings`, and whether it
    is donated.
    """

    name: str
    path: str
    leaf: Any
    wanted: Any
    is_donated: bool
    argument: int

    @property
    def text(self) -> str:
        """The leaf's name, dtype and shape."""
        return f"{self.name}, {self.leaf.dtype}{list(self.leaf.shape)},"


def is_placed(kind: type) -> bool:
    """Whether leaves of this type are arrays with buffers."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def raise_gone_or_shared(given: Iterable[Given]) -> None:
    """Raises for an array whose buffers were deleted, or that is donated and given twice."""
    seen: dict[int, Given] = {}
    for one in given:
        if one.leaf.is_deleted():
            raise PlanMismatchError(
                f"{one.text} was deleted, or donated to an earlier call, which may have written over it. Use what that "
                "call returned, or leave the argument out of `donate`."
            )
        first = seen.setdefault(id(one.leaf), one)
        if first is not one and (first.is_donated or one.is_donated) and not (_is_moved(first) or _is_moved(one)):
            raise PlanMismatchError(
                f"{first.name} and {one.name} are one array, {one.leaf.dtype}{list(one.leaf.shape)}, and "
                f"{'both are' if first.is_donated and one.is_donated else 'one of them is'} donated: the program "
                "could write over what it still reads. Copy one of them first: "
                "`jax.tree.map(jax.numpy.copy, tree)`; or leave the argument out of `donate`."
            )


def _is_moved(one: Given) -> bool:
    """Whether JAX copies an array to the sharding that the program wants, so that only the copy is donated."""
    is_asked = isinstance(one.wanted, Sharding)
    return not one.leaf.committed or (is_asked and not lies_as(one.leaf.sharding, one.wanted, one.leaf.shape))


def raise_elsewhere(given: Iterable[Given], error: Exception | None) -> None:
    """Raises for the first array whose sharding is not that of its entry."""
    for one in given:
        own = struct_of(one.leaf).sharding
        is_known = own is not None and isinstance(one.wanted, Sharding)
        if is_known and not lies_as(own, one.wanted, one.leaf.shape):
            raise PlanMismatchError(
                f"{one.text} lies by {own}, but its entry of `in_shardings` is {one.wanted}. Move it first: "
                "`shard(tree, plan)`, or `reshard(tree, plan)`; or leave the entry out, to take the argument as it "
                "comes."
            ) from error


def raise_apart(places: Iterable[tuple[str, object]], error: Exception | None) -> None:
    """Raises if two shardings have different devices, or the same in another order. Each comes with a text
    for messages.
    """
    pairs = [(what, devices) for what, sharding in places if (devices := _in_order(sharding))]
    for what, devices in pairs[1:]:
        if devices != pairs[0][1]:
            raise PlanMismatchError(
                f"{what} {_listed(devices)}, and {pairs[0][0]} {_listed(pairs[0][1])}; a compiled function runs on one "
                "set of devices in one order. Move one of them: `shard(tree, plan)`, or `reshard(tree, plan)`; where "
                "plans are on several meshes, give each a function of its own, and `reshard` between them."
            ) from error


def lies_apart(leaf: Any, wanted: Any) -> bool:
    """Whether an array is on other devices than those of a sharding for several devices.

    If its sharding there would be the same, JAX moves it at the first call, and the next call fails in the runtime.
    """
    if not isinstance(wanted, NamedSharding) or not is_placed(type(leaf)) or not leaf.committed:
        return False
    devices = _in_order(wanted)
    return len(devices) > 1 and _in_order(leaf.sharding) != devices


def _in_order(sharding: object) -> tuple[Any, ...]:
    """The devices of a sharding in the order in which a program takes them; none for an abstract mesh."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else ()
    return tuple(sorted(sharding.device_set, key=lambda one: one.id)) if isinstance(sharding, Sharding) else ()


def _listed(devices: Sequence[Any]) -> str:
    ids = [device.id for device in devices]
    listed = f"{ids}" if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ...]"
    return f"{'device' if len(ids) == 1 else 'devices'} {listed}"


def is_abstract(sharding: object) -> bool:
    """Whether a sharding is on a mesh without devices."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


@ft.lru_cache(maxsize=4096)
def lies_as(found: Sharding, wanted: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether all devices hold the same boxes under both shardings. A mesh without devices is compared by positions."""
    if memory_kind(found) != memory_kind(wanted) or _reductions(found) != _reductions(wanted):
        return False
    if found == wanted:
        return True
    ours, theirs = boxes(found, shape), boxes(wanted, shape)
    is_abstract_one = is_abstract(found) or is_abstract(wanted)
    return [*ours.values()] == [*theirs.values()] if is_abstract_one else ours == theirs


def memory_kind(sharding: Sharding) -> str | None:
    """The memory kind; `None` for the default memory of the devices."""
    kind = sharding.memory_kind
    return None if kind in (None, "device", "unpinned_host") else kind


def _reductions(sharding: Sharding) -> tuple[frozenset[str], ...]:
    is_named = isinstance(sharding, NamedSharding)
    return (sharding.spec.unreduced, sharding.spec.reduced) if is_named else (frozenset(), frozenset())


def sharding_of(leaf: object) -> Sharding | None:
    """The sharding of an array or struct; for a traced array the one in its type; `None` for other leaves."""
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).sharding
    return leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None


def struct_of(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The struct of an array, with the given sharding, or else with its own if the array is committed to it."""
    if sharding is None and not isinstance(leaf, Tracer) and getattr(leaf, "committed", True):
        sharding = getattr(leaf, "sharding", None)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def without_devices(leaf: Any) -> jax.ShapeDtypeStruct:
    """The struct of an array, on the abstract mesh if the array is on a mesh."""
    found = struct_of(leaf)
    own, abstract = found.sharding, None
    if is_abstract(own):
        return found
    if isinstance(own, NamedSharding) and not own.mesh.empty:
        usual = next(iter(own.device_set)).default_memory().kind
        kind = None if own.memory_kind == usual else own.memory_kind
        abstract = NamedSharding(MeshSpec.of(own.mesh).abstract(), own.spec, memory_kind=kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=abstract, weak_type=found.weak_type)


@ft.lru_cache(maxsize=1024)
def is_traced(kind: type) -> bool:
    """Whether leaves of this type are arrays, tracers or structs."""
    return issubclass(kind, (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct))


@ft.lru_cache(maxsize=1024)
def _compared_fields(kind: type) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple([field.name for field in dataclasses.fields(kind) if field.compare])


def mark(value: object) -> Hashable:
    """The properties of a value that `==` ignores: its type and the sign of a zero, also inside containers and
    dataclasses.

    NaN does not equal itself, but its mark does.
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
    # An attribute may be unset.
    return kind if fields is None else (kind, *[mark(getattr(value, name, None)) for name in fields])


def node_data(treedef: Any) -> list[Any]:
    """The data that the nodes of a tree hold beside leaves: static fields of modules, and dict keys that are not
    strings.
    """
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
    """Whether trees with equal structures may still differ in their nodes' data."""
    return any(type(one).__eq__ is not object.__eq__ for one in node_data(treedef))


class Static:
    """The parts of a tree that are not traced, as one static argument of `jax.jit`: hashed and compared as a whole.

    **Arguments:**

    - `positions`: the positions, among all leaves, of the leaves that are no arrays, and of each list of arrays.
    - `treedef`: the structure of this very tree: one that is equal may hold other data.
    - `values`: the leaves that are no arrays.
    - `data`: the data of the nodes beside their leaves.
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
        """Whether `parts` are the very objects that this value holds."""
        return len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))

    def difference(self, given: "Static") -> str:
        """The difference to the static parts of another call, in words."""
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """The results of a function that are not arrays, and the positions of these and of each list of arrays among all
    leaves.
    """

    treedef: Any
    positions: list[list[int]]
    statics: list[Any]


class Parted(NamedTuple):
    """The results of a function if not all of them are arrays, or if `out_shardings` has entries for them."""

    lists: Any
    rest: Any

    def joined(self) -> Any:
        return joined(self.rest.treedef, self.rest.positions, (self.rest.statics, *self.lists))


def taking(positions: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the items at these positions out of a list, in half the time of a loop."""
    first = positions[0] if positions else 0
    run = slice(first, first + len(positions))
    is_run = positions == [*range(run.start, run.stop)]
    return operator.itemgetter(run) if is_run else operator.itemgetter(*positions)
