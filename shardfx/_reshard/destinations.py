"""The shardings of arrays before and after a move, from every form in which a caller can give them, and checks that
they can move.
"""

import collections
import contextlib
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, MeshError, PlanMismatchError, SpecError, check_type
from .._ground.spec import DType, array_bytes, bits, entries_of, shard_counts
from .._ground.tree import flatten, tree_paths
from .._plan import ShardPlan, shardings_of_leaves


def targets(form: PyTree, tree: PyTree, leaves: Sequence[Any], treedef: Any, what: str) -> list[Sharding | None]:
    """The sharding of each leaf; `None` for a leaf that is no array or does not move.

    **Arguments:**

    - `form`: a plan with devices, a sharding, or a tree or prefix of shardings, of `None`, and of structs with them.
    - `tree`: the tree of arrays; `leaves`, `treedef`: as flattened by JAX.
    - `what`: the name of the argument, for messages.

    **Returns:**

    One entry per leaf.

    **Raises:**

    `PlanMismatchError` if the form is for another tree, or a plan without devices; `LeafTypeError` for entries that are
    no shardings.
    """
    if isinstance(form, ShardPlan):
        return shardings_of_leaves(form, flatten(tree))
    if isinstance(form, Sharding):
        return [form] * len(leaves)
    try:
        entries = treedef.flatten_up_to(form)
    except ValueError:
        entries = _broadcast(form, tree, what)
    found = [entry.sharding if isinstance(entry, jax.ShapeDtypeStruct | jax.Array) else entry for entry in entries]
    for at, one in enumerate(found):
        if one is not None and not isinstance(one, Sharding):
            path, kind = tree_paths(treedef)[at], type(one).__name__
            where = f"`{what}` holds a {kind} at `{path}`" if path else f"`{what}` is a {kind}"
            raise LeafTypeError(
                f"{where}, {one!r:.80}, which is no sharding; use `NamedSharding(mesh, spec)`, the `.sharding` of a "
                "`Format`, or a plan: `plan(tree, mesh, ...)`."
            )
    return found


def _broadcast(form: object, tree: object, what: str) -> list[Any]:
    try:
        whole = jax.tree.broadcast(form, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise PlanMismatchError(
            f"`{what}` is no prefix of the tree: {str(error).splitlines()[0]}; give a plan of this tree, one sharding, "
            "or a tree of shardings of its structure."
        ) from error
    return jax.tree.leaves(whole, is_leaf=lambda node: node is None)


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array that can be moved."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def lost_devices(lost: Iterable[object]) -> tuple[Any, ...]:
    """The argument `lost` of a move as a tuple; raises if it holds ids or is a single device."""
    fix = "give an iterable of jax devices, such as `lost=[jax.devices()[3]]`."
    check_type("lost", lost, Iterable, LeafTypeError, fix.removesuffix("."))
    found = tuple(lost)
    for device in found:
        if not isinstance(device, jax.Device):
            raise LeafTypeError(f"`lost` holds {device!r:.80}, of type {type(device).__name__}, not a device; {fix}")
    return found


def leaf_name(path: str) -> str:
    """The name of a leaf in a message. A tree that is one array has no path."""
    return f"leaf `{path}`" if path else "the array"


@contextlib.contextmanager
def naming(path_of: Callable[[Any], str], at: object) -> Iterator[None]:
    """A context that puts the path of a leaf, `path_of(at)`, in front of an error's message."""
    try:
        yield
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"{leaf_name(path_of(at))}: {error}") from error


def data_of(shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of the array that is moved: an array of PRNG keys moves as its key data."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def require_movable(shape: tuple[int, ...], dtype: DType, dst: Sharding) -> None:
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
    """Raises if a sharding has unreduced axes, since devices then hold summands instead of elements."""
    for end in ends:
        if isinstance(end, NamedSharding) and end.spec.unreduced:
            raise SpecError(
                f"{end.spec} has the unreduced axes {sorted(end.spec.unreduced)}, and a move neither adds up nor takes "
                "apart what they hold; add it up first with `jax.sharding.reshard(x, NamedSharding(mesh, P(...)))`."
            )


def has_devices(sharding: Sharding) -> bool:
    """Whether a sharding names devices."""
    return not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh)


@ft.lru_cache(maxsize=1024)
def in_host_memory(sharding: Sharding) -> bool:
    """Whether a sharding is in host memory rather than in device memory."""
    if has_devices(sharding):
        return in_device_memory(sharding) is not sharding
    return sharding.memory_kind not in (None, "device")


def named(sharding: Sharding) -> NamedSharding:
    """The sharding, which must be a NamedSharding."""
    assert isinstance(sharding, NamedSharding)
    return sharding


def in_device_memory(sharding: Sharding) -> Sharding:
    """The same sharding in device memory, where programs compute; the sharding itself if it is in device memory
    already.
    """
    platform = min(sharding.device_set, key=lambda device: device.id).platform
    default = jax.local_devices(backend=platform)[0].default_memory().kind
    return sharding if sharding.memory_kind == default else sharding.with_memory_kind(default)


def copies_bytes(shape: tuple[int, ...], dtype: object, *ends: Sharding) -> int:
    """Bytes of copies in device memory, which programs need of each array that is in host memory before or after the
    move.
    """
    away = [end for end in ends if in_host_memory(end)]
    return sum(array_bytes(end.shard_shape(shape), dtype) * sharers(end.device_set) for end in away)


def sharers(devices: Iterable[Any]) -> int:
    """The largest number of devices that allocate from one memory: all CPU devices of one process share theirs."""
    # Every process must get the same count, since the count decides which programs run.
    counts = collections.Counter(device.process_index for device in devices if device.platform == "cpu")
    return max(counts.values(), default=1)
