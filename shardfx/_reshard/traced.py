"""Moves inside `jit` and other transformations: a JAX primitive, whose lowering is the planned steps."""

from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..._errors import MeshError, SpecError
from ..._spec import bits, canonical, entries_of, entry_axes
from .choose import choose, layouts, same_order, settled, untyped, xla_program
from .live import live_program, move_group, require_movable
from .program import abstract, is_explicit, placed, program
from .redistribute import layout, redistribute


def move(x: Any, dst: NamedSharding, *, src: NamedSharding | None = None, donate: bool = False) -> Any:
    """`x` in the sharding `dst`: bounded memory, little traffic, bitwise the same values.

    **Arguments:**

    - `x`: a live array, or a traced value inside `jit`. Differentiable: the cotangent is moved back.
    - `dst`: a NamedSharding on a mesh of the same devices (for a live array in any order; inside `jit` the
        order must be the one of the other shardings, as JAX demands).
    - `src`: where `x` lies; read from live arrays and from Explicit types. Inside `jit` under Auto axes it has
        to be given; a wrong one costs a reshard and is no error.
    - `donate`: gives the buffers of a live `x` up; no effect inside `jit`.

    **Returns:**

    The array. Of a live array the sharding is checked to be `dst`.

    **Raises:**

    `LeafTypeError` for dtypes that JAX itself moves wrongly (int2, uint2); `SpecError` where `src` is needed
    and missing, or a sharding does not divide the shape; `MeshError` for meshes over different devices.
    """
    if isinstance(x, Tracer):
        return traced(x, dst, src)
    return move_group([x], dst, donate=donate)[0]


def traced(x: Any, dst: NamedSharding, src: NamedSharding | None = None) -> Any:
    """`move` inside `jit` or another transformation: of a traced value, or of an array that is a constant there."""
    require_movable(x.dtype)
    own = jax.typeof(x).sharding
    if any(kind == AxisType.Manual for kind in own.mesh.axis_types):
        raise SpecError(
            f"an array of shape {x.shape} is one device's piece inside `shard_map`, and cannot be resharded there; "
            "reshard the whole array outside."
        )
    constant = not isinstance(x, Tracer)
    if is_explicit(own):
        src = own
    elif constant:
        src = x.sharding if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) else None
    if constant and src is None:  # the program has it whole, on every device
        return placed(jnp.asarray(x), dst)
    if src is None:
        raise SpecError(
            f"a traced array of shape {x.shape} does not say how it lies (its mesh has Auto axes); "
            "pass `src=` with its sharding."
        )
    if is_explicit(src) != is_explicit(dst):
        raise SpecError(
            f"the array's mesh {src.mesh.axis_names} has {_kind(src)} axes and the target's mesh "
            f"{dst.mesh.axis_names} has {_kind(dst)} ones; inside `jit` both must be of one kind: make the meshes "
            "with the same `axis_types`, or reshard outside."
        )
    if not same_order(src, dst):
        raise MeshError(
            f"the meshes {src.mesh.axis_names} and {dst.mesh.axis_names} list their devices in different orders, "
            "which JAX does not allow in one `jit`; reshard outside, or build both with one device order."
        )
    if src.spec.unreduced or dst.spec.unreduced:  # more than a move: sums
        return jax.sharding.reshard(x, dst)
    src, dst = _on_devices(_trimmed(src), dst), _on_devices(_trimmed(dst), src)
    redistribute(x.shape, bits(x.dtype), *layouts(x.ndim, src, dst))  # raises here, and not where it is compiled
    return _move.bind(x, src=src, dst=dst)


def _on_devices(end: NamedSharding, other: NamedSharding) -> NamedSharding:
    """`end` with the devices of the other end, where types alone say what its mesh is."""
    if isinstance(end.mesh, Mesh) or not isinstance(other.mesh, Mesh) or end.mesh.size != other.mesh.size:
        return end
    devices = other.mesh.devices.reshape(end.mesh.axis_sizes)
    return NamedSharding(Mesh(devices, end.mesh.axis_names, axis_types=end.mesh.axis_types), end.spec)


def _kind(sharding: NamedSharding) -> str:
    return "Explicit" if is_explicit(sharding) else "Auto"


def _trimmed(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, settled(sharding.spec))


_move = jex.core.Primitive("shardfx_move")


def _evaluate(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    """Outside of programs, as in a gradient without `jit`: there a value has a sharding, whatever `src` is."""
    if not isinstance(dst.mesh, Mesh):
        raise MeshError(
            f"outside of `jit` {dst} has no devices to move an array of shape {x.shape} to; give a jax Mesh."
        )
    here = x.sharding if isinstance(x, jax.Array) else None
    if isinstance(here, NamedSharding) and here.device_set == dst.device_set:
        return live_program(x.shape, x.dtype, here, dst)(x)
    return jax.device_put(x, dst)


def _lowering(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    choice = choose(x.shape, x.dtype, untyped(src), untyped(dst))
    if choice.how == "steps":
        return program(x, src, dst, choice.plan.steps, layout(src.mesh, src.spec, x.ndim))
    return xla_program(x.dtype, src, dst)(x)


def _abstract_eval(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    if not is_explicit(dst):
        return x
    entries = (*entries_of(dst.spec), *[None] * (x.ndim - len(entries_of(dst.spec))))
    return x.update(sharding=NamedSharding(abstract(dst.mesh), PartitionSpec(*entries)))


def _transpose(cotangent: Any, _: Any, *, src: NamedSharding, dst: NamedSharding) -> list[Any]:
    return [_move.bind(cotangent, src=dst, dst=src)]


def _batch(axis: Any, args: Any, dims: Any, *, src: NamedSharding, dst: NamedSharding) -> tuple[Any, int | None]:
    (x,), (dim,) = args, dims
    if dim is None:
        return _move.bind(x, src=src, dst=dst), None
    names = axis.spmd_name or axis.explicit_mesh_axis or ()
    return _move.bind(x, src=_batched(src, x.ndim, dim, names), dst=_batched(dst, x.ndim, dim, names)), dim


def _batched(end: NamedSharding, rank: int, dim: int, names: tuple[str, ...]) -> NamedSharding:
    """`end` with a dimension more, which stays cut along the axes of `vmap` where its mesh has them."""
    entries = [*entries_of(end.spec), *[None] * (rank - 1 - len(entries_of(end.spec)))]
    if {*names} & {axis for entry in entries for axis in entry_axes(entry)}:
        raise SpecError(
            f"`vmap` is mapped over the mesh axes {names}, and {end.spec} shards another dimension by one of them; "
            "leave them out of the specs inside `vmap`."
        )
    entries.insert(dim, names if names and {*names} <= {*end.mesh.axis_names} else None)
    return NamedSharding(end.mesh, canonical(PartitionSpec(*entries)))


_move.def_impl(_evaluate)
_move.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_move, mlir.lower_fun(_lowering, multiple_results=False))
ad.deflinear2(_move, _transpose)
batching.fancy_primitive_batchers[_move] = _batch
