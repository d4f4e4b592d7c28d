"""Checks that no array of a call was deleted, is donated twice, or has another sharding
than its entry.

The entry of an array is the sharding that `in_shardings` gives it. Without these
checks, some bad calls of a program on several CPU devices end the process.
"""

import functools as ft
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from .._ground.boxes import shard_boxes
from .._ground.errors import PlanMismatchError
from ..topology import MeshSpec


class Given(NamedTuple):
    """One array that a call passes to a jitted function, or that the function itself
    holds.

    **Arguments:**

    - `name`, `path`: the name of the array in messages, and its path, such as
      "params/layers/0/w".
    - `array`: an array, a tracer or a ShapeDtypeStruct.
    - `expected`: the sharding that `in_shardings` gives it; `None` if it gives none.
    - `is_donated`: whether the argument that holds the array is donated.
    - `argument`: the position of the argument that holds the array; `None` for an array
      that the function holds.
    """

    name: str
    path: str
    array: Any
    expected: Any
    is_donated: bool
    argument: int | None

    @property
    def text(self) -> str:
        """The name, dtype and shape of the array."""
        return f"{self.name}, {self.array.dtype}{list(self.array.shape)},"

    @property
    def sharding(self) -> Sharding | None:
        """The sharding that the array is committed to; `None` if JAX may place the
        array anywhere.
        """
        return struct_of(self.array).sharding


def is_placed(kind: type) -> bool:
    """Whether values of the type `kind` are JAX arrays with buffers. Tracers have no
    buffers.
    """
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def check_given(arrays: Iterable[Given]) -> None:
    """Raises `PlanMismatchError` if an array was deleted, if it has another sharding
    than its entry of `in_shardings`, or if it is passed twice and donated.
    """
    first_by_id: dict[int, Given] = {}
    for given in arrays:
        if _is_elsewhere(given):
            raise PlanMismatchError(
                f"{given.text} lies by {_sharding_text(given.sharding)}, but its entry of"
                f" `in_shardings` is {_sharding_text(given.expected)}. Move it first:"
                " `shard(tree, plan)`, or `reshard(tree, plan)`; or leave the entry"
                " out, to take the argument as it comes."
            )
        if not is_placed(type(given.array)):
            continue
        if given.array.is_deleted():
            raise PlanMismatchError(
                f"{given.text} was deleted, or donated to an earlier call, which may have"
                " written over it. Use what that call returned, or leave the argument"
                " out of `donate`."
            )
        first = first_by_id.setdefault(id(given.array), given)
        is_one_donated = first.is_donated or given.is_donated
        # JAX copies an array that is not committed, and the program donates the copy.
        if first is not given and is_one_donated and given.sharding is not None:
            are_donated = first.is_donated and given.is_donated
            which = "one of them is"
            if are_donated:
                which = "both are"
            raise PlanMismatchError(
                f"{first.name} and {given.text} are one array, and"
                f" {which} donated: the"
                " program could write over what it still reads. Copy one of them"
                " first: `jax.tree.map(jax.numpy.copy, tree)`; or leave the argument"
                " out of `donate`."
            )


def raise_if_donated_twice(
    name: str,
    arrays: Sequence[Any],
    error: Exception,
) -> None:
    """Raises `PlanMismatchError` if JAX refused a call of the function `name` with
    `error` because one of its arguments `arrays` is passed twice and donated.
    """
    if "previously donated in the same call" not in str(error):
        return
    array_ids = [id(array) for array in arrays]
    repeated_arrays = [array for array in arrays if array_ids.count(id(array)) > 1]
    array_text = "".join(
        f", {array.dtype}{list(array.shape)}," for array in repeated_arrays[:1]
    )
    raise PlanMismatchError(
        f"two arguments of `{name}` are one array{array_text} and one of them is donated:"
        " the program could write over what it still reads. Copy one of them first:"
        " `jax.tree.map(jax.numpy.copy, tree)`; or leave the argument out of `donate`."
    ) from error


def _is_elsewhere(given: Given) -> bool:
    """Whether an array has another sharding than `in_shardings` gives it, or devices in
    another order. `given` has the array and both shardings.

    A replicated array may be passed where `in_shardings` has one device, since JAX then
    moves it. If two shardings differ in devices only, JAX moves the array at the first
    call and fails at the next call.
    """
    sharding = given.sharding
    expected = given.expected
    if sharding is None or not isinstance(expected, Sharding):
        return False
    if expected.num_devices == 1 and sharding.is_fully_replicated:
        return memory_kind(sharding) != memory_kind(expected)
    device_orders = {
        *filter(None, (_devices_in_order(sharding), _devices_in_order(expected)))
    }
    return len(device_orders) > 1 or not has_same_shards(
        sharding, expected, given.array.shape
    )


def raise_unless_same_devices(name: str, shardings: dict[str, list[Any]]) -> None:
    """Raises `PlanMismatchError` if two shardings have different devices, or the same
    devices in another order.

    `name` is the function's name in messages. `shardings` has two keys, "in_shardings"
    and "out_shardings", with the shardings in these arguments of `filter_jit`.
    """
    arguments_and_shardings = []
    for argument, shardings_of_argument in shardings.items():
        for sharding in shardings_of_argument:
            if _devices_in_order(sharding):
                arguments_and_shardings.append((argument, sharding))
    for argument, sharding in arguments_and_shardings[1:]:
        first_argument, first = arguments_and_shardings[0]
        if _devices_in_order(sharding) != _devices_in_order(first):
            raise PlanMismatchError(
                f"an entry of `{argument}` of `{name}` is{_devices_text(sharding)}, and"
                f" an entry of `{first_argument}` of `{name}` is"
                f"{_devices_text(first)}; a compiled function runs on one set of devices in"
                " one order. Where plans are on"
                " several meshes, give each a function of its own, and `reshard`"
                " between them."
            )


@ft.lru_cache(maxsize=64)
def _devices_in_order(sharding: object) -> tuple[Any, ...]:
    """The devices of a sharding, in the order that a program uses; empty for an
    abstract mesh, and for no sharding.
    """
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        if isinstance(mesh, Mesh):
            return tuple(mesh.devices.flat)
        return ()
    if not isinstance(sharding, Sharding):
        return ()
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _sharding_text(sharding: object) -> str:
    """A sharding and its devices, as a text."""
    return f"{sharding}{_devices_text(sharding)}"


def _devices_text(sharding: object) -> str:
    """The devices of a sharding as a text, such as " on devices [0, 1]"; "" if it has
    none.
    """
    ids = [device.id for device in _devices_in_order(sharding)]
    if not ids:
        return ""
    noun = "devices"
    if len(ids) == 1:
        noun = "device"
    text = str(ids)
    if len(ids) > 16:
        text = f"{str(ids[:16])[:-1]}, ...]"
    return f" on {noun} {text}"


def is_abstract(sharding: object) -> bool:
    """Whether a sharding is on an abstract mesh, which has no devices."""
    return isinstance(sharding, NamedSharding) and isinstance(
        sharding.mesh, AbstractMesh
    )


@ft.lru_cache(maxsize=4096)
def has_same_shards(first: Sharding, second: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether every device holds the same part of an array of `shape` under both
    shardings.

    On a mesh without devices, positions in the mesh stand for devices. The result is
    False if the memory kinds, or the `unreduced` or `reduced` axes of the specs,
    differ.
    """
    if memory_kind(first) != memory_kind(second):
        return False
    if _reductions(first) != _reductions(second):
        return False
    if first == second:
        return True
    first_boxes = shard_boxes(first, shape)
    second_boxes = shard_boxes(second, shape)
    if is_abstract(first) or is_abstract(second):
        return list(first_boxes.values()) == list(second_boxes.values())
    return first_boxes == second_boxes


def memory_kind(sharding: Sharding) -> str | None:
    """The memory kind of a sharding; `None` for the default memory of the devices."""
    kind = sharding.memory_kind
    if kind in (None, "device", "unpinned_host"):
        return None
    return kind


def _reductions(sharding: Sharding) -> tuple[frozenset[str], ...]:
    """The unreduced and the reduced axes of the spec of a sharding."""
    if isinstance(sharding, NamedSharding):
        return (sharding.spec.unreduced, sharding.spec.reduced)
    return (frozenset(), frozenset())


def sharding_of(leaf: object) -> Sharding | None:
    """The sharding of an array or a ShapeDtypeStruct; for a tracer, that of its type;
    `None` for other leaves.
    """
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).sharding
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf.sharding
    return None


def struct_of(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an array, with `sharding`; if that is `None`, with the
    one the array is committed to.
    """
    if sharding is None and not isinstance(leaf, Tracer):
        if getattr(leaf, "committed", True):
            sharding = getattr(leaf, "sharding", None)
    is_weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=sharding,
        weak_type=is_weak,
    )


def without_devices(leaf: Any) -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an array. Its sharding is on an abstract mesh, or `None`
    if the array's has no mesh.
    """
    struct = struct_of(leaf)
    sharding = struct.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return struct.update(sharding=None)
    if is_abstract(sharding):
        return struct
    abstract = NamedSharding(
        MeshSpec.of(sharding.mesh).abstract(),
        sharding.spec,
        memory_kind=memory_kind(sharding),
    )
    return struct.update(sharding=abstract)
