"""Properties of the shardings before and after a move, and the checks that an array can
move between them.
"""

import collections
import contextlib
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jaxtyping import Array, Shaped

from .. import topology
from .._ground.errors import LeafTypeError, MeshError, SpecError
from .._ground.spec import (
    DType,
    array_bytes,
    bits,
    canonical,
    entries_of,
    entry_axes,
    shard_counts,
)
from ..topology import MeshSpec
from .steps.layout import StepLayout


def leaf_name(path: str) -> str:
    """Returns the name of a leaf for a message, from its path. The path of a tree that
    is one array is empty.
    """
    return f"leaf `{path}`" if path else "the array"


@contextlib.contextmanager
def naming(path_of: Callable[[Any], str], key: object) -> Iterator[None]:
    """Returns a context manager that puts the path of a leaf in front of the message of
    an error. `path_of` returns the path for `key`, the leaf's number or path.
    """
    try:
        yield
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"{leaf_name(path_of(key))}: {error}") from error


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array with values, as JAX's and NumPy's arrays are."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def data_of(shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of the data that move: those of the array, or of the
    key data of typed PRNG keys.
    """
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def require_movable(shape: tuple[int, ...], dtype: DType, *shardings: Sharding) -> None:
    """Raises `LeafTypeError` for dtypes that JAX moves wrongly, and `SpecError` if one
    of the shardings `shardings` does not divide the shape.
    """
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard"
            " corrupts memory with it; move `x.astype(jnp.int4)` and convert it back."
        )
    for spec, mesh in (
        (end.spec, end.mesh) for end in shardings if isinstance(end, NamedSharding)
    ):
        if len(entries_of(spec)) > len(shape):
            raise SpecError(
                f"{spec} has more entries than the shape {shape}; drop those at the"
                " end."
            )
        for dim, (size, count) in enumerate(
            zip(shape, shard_counts(spec, len(shape), mesh.shape), strict=True)
        ):
            if size % count:
                raise SpecError(
                    f"dim {dim} of shape {shape} does not divide into the {count}"
                    f" shards that {spec} wants on mesh {dict(mesh.shape)}; pad it to"
                    f" {-(-size // count) * count}, or take the spec from"
                    " `shardfx.correct(spec, shape, mesh)`."
                )


def require_reduced(*shardings: Sharding) -> None:
    """Raises `SpecError` if a sharding in `shardings` has unreduced axes: devices then hold
    summands instead of elements.
    """
    for end in shardings:
        if isinstance(end, NamedSharding) and end.spec.unreduced:
            raise SpecError(
                f"{end.spec} has the unreduced axes {sorted(end.spec.unreduced)}, and a"
                " move adds up no summands; add the array up first with"
                " `jax.sharding.reshard(x, NamedSharding(mesh, P(...)))`."
            )


def has_devices(sharding: Sharding) -> bool:
    """Whether a sharding names devices, unlike a sharding on an `AbstractMesh`."""
    return not isinstance(sharding, NamedSharding) or not isinstance(
        sharding.mesh, AbstractMesh
    )


@ft.lru_cache(maxsize=1024)
def in_host_memory(sharding: Sharding) -> bool:
    """Whether a sharding is in host memory rather than in device memory."""
    if has_devices(sharding):
        return in_device_memory(sharding) is not sharding
    return sharding.memory_kind not in (None, "device")


def named(sharding: Sharding) -> NamedSharding:
    """Returns the sharding itself, which must be a NamedSharding. The call tells type
    checkers so.
    """
    assert isinstance(sharding, NamedSharding)
    return sharding


def in_device_memory(sharding: Sharding) -> Sharding:
    """Returns the same sharding in device memory, where programs compute."""
    platform = min(sharding.device_set, key=lambda device: device.id).platform
    default = jax.local_devices(backend=platform)[0].default_memory().kind
    return (
        sharding
        if sharding.memory_kind == default
        else sharding.with_memory_kind(default)
    )


def device_copy_bytes(
    shape: tuple[int, ...], dtype: object, *shardings: Sharding
) -> int:
    """Returns the bytes of device memory that a program, which computes there, uses for
    copies of shards in host memory. `shardings` are the array's shardings before and after
    the program. Devices that share a memory count together.
    """
    away = [end for end in shardings if in_host_memory(end)]
    return sum(
        array_bytes(end.shard_shape(shape), dtype) * sharers(end.device_set)
        for end in away
    )


def sharers(devices: Iterable[Any]) -> int:
    """Returns the largest number of `devices` that share one memory: CPU devices of one
    process, or just one device.
    """
    # Every process must get the same count, since the count decides which programs run.
    counts = collections.Counter(
        device.process_index for device in devices if device.platform == "cpu"
    )
    return max(counts.values(), default=1)


# The cost of a byte between slices (or nodes), relative to a byte inside one. A TPU v5p
# link carries 100 GB/s in each direction, and its share of the data center's network
# 6.25 GB/s, 16 times less (https://cloud.google.com/tpu/docs/v5p). NVLink carries 450
# GB/s on an H100, and its network card 50, 9 times less.
_DCN_WEIGHT = 10.0


@ft.lru_cache(maxsize=4096)
def layout(
    mesh: MeshSpec | Mesh | AbstractMesh, spec: PartitionSpec, rank: int
) -> StepLayout:
    """Returns an array's sharding as a `StepLayout`. Equal arguments give the same
    object, from a cache.

    A mesh axis that spans TPU slices becomes two axes: one between slices, with a
    higher weight, and one inside a slice. The slices of a Mesh are those of its
    devices, and the slices of a MeshSpec are given by its `dcn`. An AbstractMesh counts
    as one slice. UNCONSTRAINED entries of `spec` count as not sharded.
    """
    names = tuple(mesh.axis_names)
    entries = [entry_axes(entry) for entry in entries_of(spec)][:rank]
    if isinstance(mesh, MeshSpec):  # the number of slices that each mesh axis spans
        every = mesh.dcn_sizes
    else:
        every = (
            (1,) * len(names) if isinstance(mesh, AbstractMesh) else _device_spans(mesh)
        )
    sizes = []
    weights = []
    parts = {}
    for name, spans in zip(names, every, strict=True):
        size = mesh.shape[name]
        cut = (
            [(spans, _DCN_WEIGHT), (size // spans, 1.0)] if spans > 1 else [(size, 1.0)]
        )
        cut = cut[:1] if spans == size else cut
        parts[name] = range(len(sizes), len(sizes) + len(cut))
        sizes += [part for part, _ in cut]
        weights += [weight for _, weight in cut]
    dims = tuple(
        tuple(part for axis in axes for part in parts[axis]) for axes in entries
    )
    order = None
    if isinstance(mesh, Mesh):
        order = tuple(device.id for device in mesh.devices.flat)
    is_weighted = max(weights, default=1.0) > 1
    return StepLayout(
        sizes=tuple(sizes),
        dims=dims + ((),) * (rank - len(dims)),
        order=order,
        weights=tuple(weights) if is_weighted else (),
    )


@ft.lru_cache(maxsize=256)
def _device_spans(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of TPU slices (or nodes) that each mesh axis spans."""
    number = np.zeros(mesh.devices.size, np.int64)
    for index, members in enumerate(topology.slices(mesh.devices)):
        number[list(members)] = index
    number = number.reshape(mesh.devices.shape)
    return tuple(_blocks(np.moveaxis(number, axis, 0)) for axis in range(number.ndim))


def _blocks(number: np.ndarray) -> int:
    """Returns the smallest number of equal blocks of the first mesh axis such that no
    block crosses a slice boundary. `number` has the slice number of each device, in the
    shape of the mesh: for 0, 0, 1, 1 the result is 2.
    """
    size = len(number)
    blocks = (
        (count, number.reshape(count, size // count, -1))
        for count in range(1, size + 1)
        if size % count == 0
    )
    return next(count for count, block in blocks if (block == block[:, :1]).all())


NO_MESH = AbstractMesh((), ())


def layouts(
    rank: int, src: NamedSharding, dst: NamedSharding
) -> tuple[StepLayout, StepLayout]:
    """Returns both shardings as `StepLayout`s, for arrays of `rank` dimensions."""
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def same_order(src: NamedSharding, dst: NamedSharding) -> bool:
    """Whether both meshes list their devices in the same order. True if either is an
    `AbstractMesh`.
    """
    first = src.mesh
    second = dst.mesh
    if isinstance(first, AbstractMesh) or isinstance(second, AbstractMesh):
        return True
    return (
        first.devices is second.devices
        or first.devices.ravel().tolist() == second.devices.ravel().tolist()
    )


def untyped(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding with all mesh axes of type `Auto` and in the default
    memory.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and any(
        kind != AxisType.Auto for kind in mesh.axis_types
    ):
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, plain_spec(sharding.spec))


def plain_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` in its shortest form, without UNCONSTRAINED entries and without
    reduced or unreduced axes.
    """
    return canonical(
        PartitionSpec(*[entry_axes(entry) or None for entry in entries_of(spec)])
    )


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether any mesh axis of the sharding is of type `Explicit`. The types of arrays
    then have shardings.
    """
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def labelled(
    x: jax.Array, dst: jax.sharding.Sharding, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns `x` with the sharding `dst`, and with `shape` if that is given. The
    devices must already hold the shards of `dst`. No bytes move, except for weakly
    typed arrays.
    """
    if shape is None:
        shape = x.shape
    if x.sharding == dst and x.shape == shape and x.committed:
        return x
    if x.weak_type:  # an array made from shards would lose its weak type
        return jax.device_put(x, dst)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    mine = [shards[device] for device in dst.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, dst, mine, dtype=x.dtype)


def flat(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec that shards the first dimension of an array over all
    axes of a mesh.
    """
    return PartitionSpec(tuple(mesh.axis_names))


def placed(x: Shaped[Array, "..."], sharding: NamedSharding) -> Shaped[Array, "..."]:
    """Constrains a traced `x` to `sharding`, for mesh axes of any type. XLA moves the
    array if needed.
    """
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        if is_explicit(sharding):
            return jax.sharding.reshard(x, sharding)
        return lax.with_sharding_constraint(x, sharding)
