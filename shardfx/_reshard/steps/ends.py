"""The two ends of a move as its programs see them: meshes without axis types, specs without open entries."""

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..._ground.spec import canonical, entries_of, entry_axes
from .layout import StepLayout
from .redistribute import layout


NO_MESH = AbstractMesh((), ())


def layouts(rank: int, src: NamedSharding, dst: NamedSharding) -> tuple[StepLayout, StepLayout]:
    """Both ends as the planner reads them."""
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def same_order(src: NamedSharding, dst: NamedSharding) -> bool:
    """Whether both meshes list their devices in one order; a mesh without devices has that of the other."""
    first, second = src.mesh, dst.mesh
    if isinstance(first, AbstractMesh) or isinstance(second, AbstractMesh):
        return True
    return first.devices is second.devices or first.devices.ravel().tolist() == second.devices.ravel().tolist()


def untyped(sharding: NamedSharding) -> NamedSharding:
    """The same sharding on Auto axes and in the default memory: programs of live arrays need no other kind."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and any(kind != AxisType.Auto for kind in mesh.axis_types):
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, settled(sharding.spec))


def settled(spec: PartitionSpec) -> PartitionSpec:
    """`spec` in its shortest form, with nothing left to the compiler."""
    return canonical(PartitionSpec(*[entry_axes(entry) or None for entry in entries_of(spec)]))


def abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """The mesh without its devices."""
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether types carry the sharding of arrays on this mesh."""
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def labelled(x: jax.Array, dst: jax.sharding.Sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """`x`, of whose shards every device holds the right one, under the sharding `dst`, and committed to it.

    Only the label changes. JAX checks that the shards have the shapes that `dst` asks for.
    """
    if shape is None:
        shape = x.shape
    if x.sharding == dst and x.shape == shape and x.committed:
        return x
    if x.weak_type:  # which an array that is made from its shards would lose
        return jax.device_put(x, dst)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    mine = [shards[device] for device in dst.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, dst, mine, dtype=x.dtype)
