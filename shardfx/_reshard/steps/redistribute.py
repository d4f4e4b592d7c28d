"""Plans the steps from one layout to another with little traffic and bounded memory, without any devices.

The steps are those of Rink et al. 2021 (arXiv 2112.01075); the search is a bidirectional A* over them.
"""

import dataclasses
import functools as ft
import math
from fractions import Fraction

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ... import topology
from ..._ground.spec import canonical, entries_of, entry_axes
from ...topology import MeshSpec
from .layout import StepLayout
from .lower_bound import missing_share
from .path import Path, StepKind, path_along
from .search import Problem, search
from .splits import refine


# The cost of a byte between slices (or nodes), relative to a byte inside one. A TPU v5p link carries 100 GB/s each
# way and its share of the data center's network 6.25, 16 times
# less (https://cloud.google.com/tpu/docs/v5p); of an H100,
# NVLink carries 450 GB/s and its network card 50, 9 times less.
_DCN_WEIGHT = 10.0


@dataclasses.dataclass(frozen=True)
class MoveStep:
    """One collective (or local slice) of a move, along factors of the mesh axes.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after, on meshes whose axes are factors of the given mesh
        axes; the two differ in their mesh only where a permute or a slice leads from one factorisation to another.
    - `wire_bytes`: the bytes that a device receives, as the mean over devices, rounded up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another slice (or node). An upper bound if slices do not
        line up with mesh axes.
    - `peak_bytes`: the bytes of the shards that a device reads and writes in the step.
    """

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """The steps that move one array from one layout to another, with their traffic and memory.

    **Arguments:**

    - `steps`: in order; empty if every device already holds its target shard.
    - `wire_bytes`: the bytes that a device receives over all steps, as the mean over devices, rounded up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another slice (or node). An upper bound if slices do not
        line up with mesh axes.
    - `peak_bytes`: the most bytes of shards that a device holds at one time.
    - `lower_bound_bytes`: the bytes that a device must receive under any algorithm, as the mean over devices: its
        target shard without the elements that it already holds.
    """

    steps: tuple[MoveStep, ...]
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


@ft.lru_cache(maxsize=4096)
def layout(mesh: MeshSpec | Mesh | AbstractMesh, spec: PartitionSpec, rank: int) -> StepLayout:
    """The `StepLayout` of an array of `rank` dimensions under `spec`.

    A mesh axis that spans slices becomes two factors: one between slices, with a higher weight, and one inside a slice.

    **Arguments:**

    - `mesh`: only a `jax.sharding.Mesh` has a device order; the others leave it open. The devices of a Mesh say in
        which slices they are, a MeshSpec by its `dcn`; an AbstractMesh is in one slice.
    - `spec`: a spec that fits the mesh and the rank. Its UNCONSTRAINED entries count as not sharded.
    - `rank`: the number of dimensions of the array.

    **Returns:**

    A `StepLayout`, cached: equal arguments give the same object.
    """
    names = tuple(mesh.axis_names)
    entries = [entry_axes(entry) for entry in entries_of(spec)][:rank]
    if isinstance(mesh, MeshSpec):  # the number of slices that each mesh axis spans
        every = mesh.dcn_sizes
    else:
        every = (1,) * len(names) if isinstance(mesh, AbstractMesh) else _device_spans(mesh)
    sizes, weights, parts = [], [], {}
    for name, spans in zip(names, every, strict=True):
        size = mesh.shape[name]
        cut = [(spans, _DCN_WEIGHT), (size // spans, 1.0)] if spans > 1 else [(size, 1.0)]
        cut = cut[:1] if spans == size else cut
        parts[name] = range(len(sizes), len(sizes) + len(cut))
        sizes += [part for part, _ in cut]
        weights += [weight for _, weight in cut]
    dims = tuple(tuple(part for axis in axes for part in parts[axis]) for axes in entries)
    return StepLayout(
        sizes=tuple(sizes),
        dims=dims + ((),) * (rank - len(dims)),
        order=tuple(device.id for device in mesh.devices.flat) if isinstance(mesh, Mesh) else None,
        weights=tuple(weights) if max(weights, default=1.0) > 1 else (),
    )


@ft.lru_cache(maxsize=256)
def _device_spans(mesh: Mesh) -> tuple[int, ...]:
    number = np.zeros(mesh.devices.size, np.int64)
    for index, members in enumerate(topology.slices(mesh.devices)):
        number[list(members)] = index
    number = number.reshape(mesh.devices.shape)
    return tuple(_parts(np.moveaxis(number, axis, 0)) for axis in range(number.ndim))


def _parts(number: np.ndarray) -> int:
    """The smallest number of equal blocks of the first axis such that no block crosses a slice boundary."""
    size = len(number)
    blocks = ((count, number.reshape(count, size // count, -1)) for count in range(1, size + 1) if size % count == 0)
    return next(count for count, block in blocks if (block == block[:, :1]).all())


@ft.lru_cache(maxsize=4096)
def redistribute(shape: tuple[int, ...], itemsize_bits: int, src: StepLayout, dst: StepLayout) -> Redistribution:
    """Plans the steps that move one array between two layouts with little traffic and bounded memory.

    A step reads one shard and writes one. It holds at most twice the larger shard of the two layouts.

    **Arguments:**

    - `shape`: the shape of the whole array. Every dimension must divide into the shards of both layouts.
    - `itemsize_bits`: bits per element.
    - `src`, `dst`: layouts over the same devices, made by `layout`.

    **Returns:**

    The `Redistribution`, from a bounded cache where the same move was planned before.

    **Raises:**

    `MeshError` if the two layouts are not over the same devices.
    """
    # The search depends only on which shard counts divide the shape, so leaves of different shapes share cached paths.
    room = tuple(math.gcd(size, src.size) for size in shape)
    path, bound = _planned(room, src, dst)
    return _measured(math.prod(shape) * itemsize_bits, path, bound, Fraction(1, min(src.pieces, dst.pieces)))


@ft.lru_cache(maxsize=4096)
def _planned(room: tuple[int, ...], src: StepLayout, dst: StepLayout) -> tuple[Path, Fraction]:
    """The path, and the least fraction of the array that a device receives on any path."""
    source, target = refine(src, dst)
    bound = missing_share(source, target)
    if not bound:  # every device already holds its target shard
        return path_along([source.layout], [target.layout]), bound
    path = search(Problem(room, source, target)) or search(Problem(room, *refine(src, dst, prime=True)))
    if path is None:
        raise AssertionError(
            "slices, all-to-alls and gathers of prime factors lead everywhere; please report this move"
        )
    return path, bound


def _measured(total: int, path: Path, bound: Fraction, larger: Fraction) -> Redistribution:
    steps = tuple(
        MoveStep(
            *(step.kind, step.source, step.target),
            wire_bytes=_bytes(total * step.wire_share),
            dcn_bytes=_bytes(total * step.dcn_share),
            peak_bytes=sum(_bytes(Fraction(total, end.pieces)) for end in (step.source, step.target)),
        )
        for step in path
    )
    return Redistribution(
        steps=steps,
        wire_bytes=_bytes(total * sum(step.wire_share for step in path)),
        dcn_bytes=_bytes(total * sum(step.dcn_share for step in path)),
        peak_bytes=max((step.peak_bytes for step in steps), default=_bytes(total * larger)),
        lower_bound_bytes=_bytes(total * bound),
    )


def _bytes(bits: Fraction | int) -> int:
    return math.ceil(Fraction(bits) / 8)


NO_MESH = AbstractMesh((), ())


def layouts(rank: int, src: NamedSharding, dst: NamedSharding) -> tuple[StepLayout, StepLayout]:
    """The `StepLayout` of each of the two shardings, for arrays of `rank` dimensions."""
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def same_order(src: NamedSharding, dst: NamedSharding) -> bool:
    """Whether both meshes list their devices in the same order. True if either is an `AbstractMesh`."""
    first, second = src.mesh, dst.mesh
    if isinstance(first, AbstractMesh) or isinstance(second, AbstractMesh):
        return True
    return first.devices is second.devices or first.devices.ravel().tolist() == second.devices.ravel().tolist()


def untyped(sharding: NamedSharding) -> NamedSharding:
    """The same sharding with all mesh axes of type `Auto` and in the default memory."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and any(kind != AxisType.Auto for kind in mesh.axis_types):
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, settled(sharding.spec))


def settled(spec: PartitionSpec) -> PartitionSpec:
    """`spec` in its shortest form, with `UNCONSTRAINED` entries replaced by `None`."""
    return canonical(PartitionSpec(*[entry_axes(entry) or None for entry in entries_of(spec)]))


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether any mesh axis of the sharding is of type `Explicit`, so that array types carry shardings."""
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def labelled(x: jax.Array, dst: jax.sharding.Sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Returns `x` with the sharding `dst`, for an `x` whose devices already hold the shards of `dst`.

    No bytes move, except for weakly typed arrays. JAX checks that the shards have the shapes that `dst` asks for.
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
