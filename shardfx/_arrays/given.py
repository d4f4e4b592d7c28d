"""Checks of a call's arrays: that none was deleted, is donated twice or is on other devices.

The runtime notices this too, but in a program on several CPU devices it ends the process.
"""

import functools as ft
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from .._ground.boxes import shard_boxes
from .._ground.errors import PlanMismatchError
from ..topology import MeshSpec


class Given(NamedTuple):
    """One leaf of a jitted function or of its arguments, with the sharding that `in_shardings` gives it.

    **Arguments:**

    - `name`, `path`: its name in messages, and its path: "params/layers/0/w".
    - `wanted`: its sharding by `in_shardings`; `None` without one.
    - `is_donated`: whether its argument is donated.
    - `argument`: the position of its argument; `None` for a leaf of the function.
    """

    name: str
    path: str
    leaf: Any
    wanted: Any
    is_donated: bool
    argument: int | None

    @property
    def text(self) -> str:
        """The leaf's name, dtype and shape."""
        return f"{self.name}, {self.leaf.dtype}{list(self.leaf.shape)},"


@ft.lru_cache(maxsize=1024)
def is_placed(kind: type) -> bool:
    """Whether leaves of this type are arrays with buffers."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def raise_gone_or_shared(given: Iterable[Given]) -> None:
    """Raises for an array whose buffers were deleted, and for one that a call passes twice and donates."""
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
    """Raises for the first array whose sharding differs from its entry of `in_shardings`."""
    for one in given:
        own = struct_of(one.leaf).sharding
        is_known = own is not None and isinstance(one.wanted, Sharding)
        if is_known and not lies_as(own, one.wanted, one.leaf.shape):
            raise PlanMismatchError(
                f"{one.text} lies by {own}, but its entry of `in_shardings` is {one.wanted}. Move it first: "
                "`shard(tree, plan)`, or `reshard(tree, plan)`; or leave the entry out, to take the argument as it "
                "comes."
            ) from error


def raise_apart(places: Iterable[tuple[str, object]]) -> None:
    """Raises if two shardings have different devices, or the same devices in another order. Each sharding comes with
    its name in messages.
    """
    pairs = [(what, devices) for what, sharding in places if (devices := _in_order(sharding))]
    for what, devices in pairs[1:]:
        if devices != pairs[0][1]:
            raise PlanMismatchError(
                f"{what} {_listed(devices)}, and {pairs[0][0]} {_listed(pairs[0][1])}; a compiled function runs on one "
                "set of devices in one order. Move one of them: `shard(tree, plan)`, or `reshard(tree, plan)`; where "
                "plans are on several meshes, give each a function of its own, and `reshard` between them."
            )


def raise_apart_from_entry(given: Iterable[Given]) -> None:
    """Raises for an array that is on other devices than its entry of `in_shardings`. Entries of one device are not
    checked.

    If the two shardings differ in devices only, JAX moves the array at the first call, and the next call fails.
    """
    for one in given:
        is_checked = isinstance(one.wanted, NamedSharding) and one.wanted.num_devices > 1
        if is_checked and is_placed(type(one.leaf)) and one.leaf.committed:
            raise_apart([("its entry of `in_shardings` is on", one.wanted), (f"{one.text} lies on", one.leaf.sharding)])


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
    """Whether every device holds the same part of the array under both shardings. For a mesh without devices, positions
    in the mesh stand for the devices.
    """
    if memory_kind(found) != memory_kind(wanted) or _reductions(found) != _reductions(wanted):
        return False
    if found == wanted:
        return True
    ours, theirs = shard_boxes(found, shape), shard_boxes(wanted, shape)
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
    own = found.sharding
    if not isinstance(own, NamedSharding) or own.mesh.empty:
        return found.update(sharding=None)
    abstract = NamedSharding(MeshSpec.of(own.mesh).abstract(), own.spec, memory_kind=memory_kind(own))
    return found if is_abstract(own) else found.update(sharding=abstract)


@ft.lru_cache(maxsize=1024)
def is_traced(kind: type) -> bool:
    """Whether leaves of this type are arrays, tracers or structs."""
    return issubclass(kind, (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct))


@ft.lru_cache(maxsize=1024)
def are_traced(kinds: tuple[type, ...]) -> tuple[bool, ...]:
    """For leaves of these types, whether each is an array, a tracer or a struct."""
    return tuple(map(is_traced, kinds))
