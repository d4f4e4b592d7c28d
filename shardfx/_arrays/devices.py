"""On which devices arrays lie, and shardings place them: a program has one set of them, in one order."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from .._ground.errors import PlanMismatchError


class Place(NamedTuple):
    """What is on some devices, in words that end in a verb, and these devices."""

    what: str
    devices: tuple[Any, ...]


def in_order(sharding: Sharding) -> tuple[Any, ...]:
    """The devices of a sharding in the order in which a program takes them; none for an abstract mesh."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else ()
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def lies_elsewhere(leaf: Any, wanted: Any) -> bool:
    """Whether an array lies on other devices than those of a sharding for several.

    For one that would be cut alike there, JAX moves it at the first call, and the next one ends in the runtime.
    """
    if not isinstance(wanted, NamedSharding) or not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    given = leaf.sharding
    if not leaf.committed or (isinstance(given, NamedSharding) and given.mesh is wanted.mesh):
        return False
    devices = in_order(wanted)
    return len(devices) > 1 and in_order(given) != devices


def raise_apart(places: Iterable[Place], error: Exception | None) -> None:
    """Raises if two of these are on other devices, or on the same ones in another order."""
    first: Place | None = None
    for place in places:
        if first is None:
            first = place
        elif place.devices != first.devices:
            raise PlanMismatchError(
                f"{place.what} {_text(place.devices)}, and {first.what} {_text(first.devices)}; a compiled function "
                "runs on one set of devices in one order. Move one of them: `shard(tree, plan)`, or `reshard(tree, "
                "plan)`; where plans are on several meshes, give each a function of its own, and `reshard` between "
                "them."
            ) from error


def _text(devices: Sequence[Any]) -> str:
    ids = [device.id for device in devices]
    listed = f"{ids}" if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ...]"
    return f"{'device' if len(ids) == 1 else 'devices'} {listed}"
