"""Properties of the shardings before and after a move, which decide how an array
moves.
"""

import collections
import functools as ft
import itertools as it
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
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

from .. import chips, topology
from .._ground.spec import (
    array_bytes,
    canonical,
    entries_at,
    entries_of,
    entry_axes,
)
from ..chips._chip import Ring, axes_on
from ..topology import MeshSpec
from .steps.layout import StepLayout
from .steps.network import Network


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array with values, as JAX's and NumPy's arrays are."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def has_devices(sharding: Sharding) -> bool:
    """Whether a sharding names devices, unlike a sharding on an `AbstractMesh`."""
    if not isinstance(sharding, NamedSharding):
        return True
    return not isinstance(sharding.mesh, AbstractMesh)


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
    if sharding.memory_kind == default:
        return sharding
    return sharding.with_memory_kind(default)


def device_copy_bytes(
    shape: tuple[int, ...],
    dtype: object,
    *shardings: Sharding,
) -> int:
    """Returns the bytes of device memory that a program, which computes there, uses for
    copies of shards in host memory. `shardings` are the array's shardings before and
    after the program. Devices that share a memory count together.
    """
    copy_bytes = 0
    for sharding in shardings:
        if in_host_memory(sharding):
            shard_bytes = array_bytes(sharding.shard_shape(shape), dtype)
            copy_bytes += shard_bytes * sharers(sharding.device_set)
    return copy_bytes


def sharers(devices: Iterable[Any]) -> int:
    """Returns the largest number of `devices` that share one memory: CPU devices of one
    process, or just one device.
    """
    # Every process must get the same count, since the count decides which programs run.
    devices_of_process = collections.Counter[int]()
    for device in devices:
        if device.platform == "cpu":
            devices_of_process[device.process_index] += 1
    return max(devices_of_process.values(), default=1)


# The cost of a byte between slices (or nodes), relative to a byte inside one. A TPU v5p
# link carries 100 GB/s in each direction, and its share of the data center's network
# 6.25 GB/s, 16 times less (https://cloud.google.com/tpu/docs/v5p). NVLink carries 450
# GB/s on an H100, and its network card 50, 9 times less.
_DCN_WEIGHT = 10.0


@ft.lru_cache(maxsize=4096)
def layout(
    mesh: MeshSpec | Mesh | AbstractMesh,
    spec: PartitionSpec,
    rank: int,
) -> StepLayout:
    """Returns an array's sharding as a `StepLayout`. Equal arguments give the same
    object, from a cache.

    A mesh axis that spans TPU slices becomes two axes: one between slices, with a
    higher weight, and one inside a slice. The slices of a Mesh are those of its
    devices, and the slices of a MeshSpec are given by its `dcn`. An AbstractMesh counts
    as one slice. UNCONSTRAINED entries of `spec` count as not sharded.
    """
    torus = _torus_of_devices(mesh) if isinstance(mesh, Mesh) else None
    # For each axis of the layout its size, the cost of a byte along it, and the
    # dimensions of the torus that it spans.
    sizes: list[int] = []
    weights: list[float] = []
    rings: list[tuple[Ring, ...]] = []
    # From a mesh axis to the numbers of its one or two axes in the layout.
    sub_axes_of: dict[str, range] = {}
    for axis, slice_count in zip(mesh.axis_names, _slice_counts(mesh), strict=True):
        size = mesh.shape[axis]
        first = len(sizes)
        if slice_count > 1:
            sizes.append(slice_count)
            weights.append(_DCN_WEIGHT)
            rings.append(())
        if slice_count == 1 or slice_count < size:
            sizes.append(size // slice_count)
            weights.append(1.0)
            rings.append(torus.rings[axis] if torus is not None else ())
        sub_axes_of[axis] = range(first, len(sizes))

    dims: list[tuple[int, ...]] = []
    for entry in entries_at(spec, rank):
        sub_axes: list[int] = []
        for axis in entry_axes(entry):
            sub_axes += sub_axes_of[axis]
        dims.append(tuple(sub_axes))
    # The device ids in mesh order.
    order = None
    if isinstance(mesh, Mesh):
        order = tuple([device.id for device in mesh.devices.flat])
    is_weighted = max(weights, default=1.0) > 1
    network = None
    if torus is not None:
        chip = torus.chip
        network = Network(
            rings=tuple(rings),
            link_bytes_per_second=float(chip.link_bytes_per_second),
            dcn_bytes_per_second=chip.dcn_bytes_per_second / chip.devices_per_chip,
            hop_seconds=chip.hop_seconds,
        )
    return StepLayout(
        sizes=tuple(sizes),
        dims=tuple(dims),
        order=order,
        weights=tuple(weights) if is_weighted else (),
        network=network,
    )


class _TorusOfDevices(NamedTuple):
    """The chip of a mesh's devices, and for each mesh axis the dimensions of a slice
    that it spans.
    """

    chip: chips.Chip
    rings: dict[str, tuple[Ring, ...]]


@ft.lru_cache(maxsize=256)
def _torus_of_devices(mesh: Mesh) -> _TorusOfDevices | None:
    """Returns the torus of TPU devices: their chip, and for each mesh axis the
    dimensions of a slice that it spans. `None` for devices of another kind. Mesh axes
    are assigned to dimensions of a slice as by `shardfx.cost.seconds`.
    """
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    known = [chip for chip in chips.CHIPS if chip.torus_dims and kind in chip.kinds]
    if not known:
        return None
    [chip] = known
    # All slices have one shape.
    first_slice = [devices[index] for index in topology.slices(devices)[0]]
    # The number of chips along each dimension of a slice.
    extents = topology.bounds(first_slice)[: chip.torus_dims]
    if math.prod(extents) * chip.devices_per_chip != len(first_slice):
        # Other chips lie between those of the mesh.
        return None
    sizes_in_slice: dict[str, int] = {}
    for axis, slice_count in zip(mesh.axis_names, _slice_counts(mesh), strict=True):
        sizes_in_slice[axis] = mesh.shape[axis] // slice_count
    return _TorusOfDevices(chip, axes_on(chip, extents, sizes_in_slice))


def _slice_counts(mesh: MeshSpec | Mesh | AbstractMesh) -> tuple[int, ...]:
    """Returns the number of TPU slices (or nodes) that each mesh axis spans."""
    if isinstance(mesh, MeshSpec):
        return mesh.dcn_sizes
    if isinstance(mesh, AbstractMesh):
        return (1,) * len(mesh.axis_names)
    return _slice_counts_of_devices(mesh)


def slices_of(devices: Sequence[Any]) -> list[int]:
    """Returns the number of each device's TPU slice (or node)."""
    slice_numbers = [0] * len(devices)
    for number, members in enumerate(topology.slices(devices)):
        for member in members:
            slice_numbers[member] = number
    return slice_numbers


@ft.lru_cache(maxsize=256)
def _slice_counts_of_devices(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of TPU slices (or nodes) that each axis of a mesh spans, by
    the slices of its devices.
    """
    numbers = slices_of(list(mesh.devices.flat))
    slice_numbers = np.array(numbers).reshape(mesh.devices.shape)
    counts: list[int] = []
    for axis in range(slice_numbers.ndim):
        counts.append(_blocks(np.moveaxis(slice_numbers, axis, 0)))
    return tuple(counts)


def _blocks(slice_numbers: np.ndarray) -> int:
    """Returns the smallest number of equal blocks of the first mesh axis such that no
    block crosses a slice boundary. `slice_numbers` has the slice number of each device,
    in the shape of the mesh: for 0, 0, 1, 1 the result is 2.
    """
    size = len(slice_numbers)
    for count in range(1, size):
        if size % count == 0:
            blocks = slice_numbers.reshape(count, size // count, -1)
            if (blocks == blocks[:, :1]).all():
                return count
    return size


def divided_in_slices(
    shape: tuple[int, ...],
    sharding: Sharding,
) -> NamedSharding | None:
    """Returns a sharding that divides the shards of `sharding` further, over the mesh
    axes that replicate them inside a TPU slice (or node). `None` if there are no such
    axes, or if their sizes divide no dimension.
    """
    if not isinstance(sharding, NamedSharding) or not has_devices(sharding):
        return None
    # Mesh axes that span slices are divided into an axis between slices and one inside.
    step_layout = layout(sharding.mesh, sharding.spec, len(shape))
    weights = step_layout.weights or (1.0,) * len(step_layout.sizes)
    dims = [list(sub_axes) for sub_axes in step_layout.dims]
    # The number of shards along each dimension so far.
    counts = list(step_layout.counts)
    used = set(it.chain.from_iterable(step_layout.dims))
    is_divided = False
    rows = zip(step_layout.sizes, weights, strict=True)
    for sub_axis, (size, weight) in enumerate(rows):
        # Axes between slices have a weight above 1.
        if sub_axis in used or weight > 1 or size == 1:
            continue
        for dim, elements in enumerate(shape):
            if elements % (counts[dim] * size) == 0:
                dims[dim].append(sub_axis)
                counts[dim] *= size
                is_divided = True
                break
    if not is_divided:
        return None
    assert isinstance(sharding.mesh, Mesh)
    names = tuple([f"axis{number}" for number in range(len(step_layout.sizes))])
    mesh = Mesh(sharding.mesh.devices.reshape(step_layout.sizes), names)
    entries = [tuple([names[sub_axis] for sub_axis in sub_axes]) for sub_axes in dims]
    return NamedSharding(mesh, PartitionSpec(*entries))


NO_MESH = AbstractMesh((), ())


def layouts(
    rank: int,
    src: NamedSharding,
    dst: NamedSharding,
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
    if first.devices is second.devices:
        return True
    return first.devices.ravel().tolist() == second.devices.ravel().tolist()


def untyped(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding with all mesh axes of type `Auto` and in the default
    memory.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and {*mesh.axis_types} - {AxisType.Auto}:
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, plain_spec(sharding.spec))


def plain_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` in its shortest form, without UNCONSTRAINED entries and without
    reduced or unreduced axes.
    """
    entries = [entry_axes(entry) or None for entry in entries_of(spec)]
    return canonical(PartitionSpec(*entries))


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether any mesh axis of the sharding is of type `Explicit`. The types of arrays
    then have shardings.
    """
    return AxisType.Explicit in sharding.mesh.axis_types


def labelled(
    x: jax.Array,
    dst: jax.sharding.Sharding,
    shape: tuple[int, ...] | None = None,
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
    devices = dst.addressable_devices_indices_map(shape)
    local_shards = [shards[device] for device in devices]
    return jax.make_array_from_single_device_arrays(
        shape, dst, local_shards, dtype=x.dtype
    )


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
