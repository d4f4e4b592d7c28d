"""The shardings that a move begins and ends with: what can move, and in which memory it lies."""

import collections
import functools as ft
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._ground.errors import LeafTypeError, SpecError
from .._ground.spec import array_bytes, bits, entries_of, shard_counts


def data_of(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of the arrays that are moved in the place of typed PRNG keys, and of others."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def require_movable(shape: tuple[int, ...], dtype: Any, dst: Sharding) -> None:
    """Raises for dtypes that JAX moves wrongly, and for shardings that do not divide the shape."""
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard corrupts memory with it; "
            "move `x.astype(jnp.int4)` and convert it back."
        )
    if not isinstance(dst, NamedSharding):
        return
    if len(entries_of(dst.spec)) > len(shape):
        raise SpecError(f"{dst.spec} has more entries than the shape {shape}; drop those at the end.")
    for dim, (size, count) in enumerate(zip(shape, shard_counts(dst.spec, len(shape), dst.mesh.shape), strict=True)):
        if size % count:
            raise SpecError(
                f"dim {dim} of shape {shape} does not divide into the {count} pieces that {dst.spec} wants on mesh "
                f"{dict(dst.mesh.shape)}; pad it to {-(-size // count) * count}, or take the spec from "
                "`shardfx.correct(spec, shape, mesh)`."
            )


def require_reduced(*ends: Sharding) -> None:
    """Raises where devices hold, or should hold, summands in the place of elements."""
    for end in ends:
        if isinstance(end, NamedSharding) and end.spec.unreduced:
            raise SpecError(
                f"{end.spec} has the unreduced axes {sorted(end.spec.unreduced)}, and a move neither adds up nor takes "
                "apart what they hold; add it up first with `jax.sharding.reshard(x, NamedSharding(mesh, P(...)))`."
            )


def has_devices(sharding: Sharding) -> bool:
    """Whether a sharding says on which devices an array lies."""
    return not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh)


@ft.lru_cache(maxsize=1024)
def in_host_memory(sharding: Sharding) -> bool:
    """Whether an array lies in the host's memory, not in its devices'."""
    if has_devices(sharding):
        return in_device_memory(sharding) is not sharding
    return sharding.memory_kind not in (None, "device")


def named(sharding: Sharding) -> NamedSharding:
    """A sharding of which it is known that it names mesh axes."""
    assert isinstance(sharding, NamedSharding)
    return sharding


def in_device_memory(sharding: Sharding) -> Sharding:
    """The same placement in the memory that programs compute in; the sharding itself if it is there."""
    platform = min(sharding.device_set, key=lambda device: device.id).platform
    default = jax.local_devices(backend=platform)[0].default_memory().kind
    return sharding if sharding.memory_kind == default else sharding.with_memory_kind(default)


def copies_bytes(shape: tuple[int, ...], dtype: object, *ends: Sharding) -> int:
    """What programs need where an end lies in other memory than they compute in: a copy of its shards in theirs."""
    away = [end for end in ends if in_device_memory(end) is not end]
    return sum(array_bytes(end.shard_shape(shape), dtype) * sharers(end.device_set) for end in away)


def sharers(devices: Iterable[Any]) -> int:
    """How many devices allocate from one memory, at most: all of a process where the CPU plays them."""
    # Every process has to count alike, whichever devices are its own: the count decides what programs run.
    counts = collections.Counter(device.process_index for device in devices if device.platform == "cpu")
    return max(counts.values(), default=1)
