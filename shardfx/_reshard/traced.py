"""Moves inside `jit` and other transformations, as a JAX primitive that is lowered to
the planned steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._ground.errors import MeshError, SpecError
from .._ground.keys import as_keys, is_key, raw
from .._ground.spec import axes_of_entries, bits, canonical, entries_of
from .flight import carry_out
from .movable import naming, require_movable
from .move import move_of
from .shardings import is_array, is_explicit, layouts, placed, plain_spec, same_order
from .steps.programs import program
from .steps.redistribution import redistribute


def move_traced(x: Any, dst: NamedSharding, src: NamedSharding | None = None) -> Any:
    """Moves a traced array to the sharding `dst`, inside `jit` or another
    transformation.

    `x` is a traced value, or an array that is a constant of the program. In a gradient,
    the result's cotangent moves from `dst` to `src`. `dst` must have the program's
    devices in the program's order. `src` is the sharding of `x`. It is needed if the
    mesh of `x` has Auto axes; with Explicit axes the type of `x` says it. If `src` is
    not the actual sharding of `x`, XLA first moves `x` to `src`.

    **Raises:**

    `LeafTypeError` for dtypes that JAX itself moves wrongly (int2, uint2); `SpecError`
    if `src` is needed and missing, a sharding does not divide the shape, or one mesh
    has Explicit axes and the other Auto axes; `MeshError` if the two meshes have
    different devices or device orders, or if `src` is on another abstract mesh than
    `jax.set_mesh` has set.
    """
    require_movable(x.shape, x.dtype, dst)
    if is_key(x.dtype):
        # Collectives take no keys. Their data has further dimensions, which no spec
        # names.
        return as_keys(move_traced(raw(x), dst, src), x)
    own_sharding = jax.typeof(x).sharding
    if any(kind == AxisType.Manual for kind in own_sharding.mesh.axis_types):
        raise SpecError(
            f"an array of shape {x.shape} is one device's shard inside `shard_map`, and"
            " cannot be resharded there; reshard the whole array outside."
        )
    constant = not isinstance(x, Tracer)
    if is_explicit(own_sharding):
        src = own_sharding
    elif constant:
        src = None
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            src = x.sharding
    if constant and src is None:
        # The program holds the whole array on every device.
        return placed(jnp.asarray(x), dst)
    if src is None:
        raise SpecError(
            f"a traced array of shape {x.shape} does not say its sharding (its mesh has"
            " Auto axes); pass `src=` with its sharding."
        )
    _require_like_meshes(src, dst)
    if src.spec.unreduced or dst.spec.unreduced:
        # A sum, which is more than a move.
        return jax.sharding.reshard(x, dst)
    source = _on_devices(src, dst)
    target = _on_devices(dst, src)
    _require_one_type(target, source)
    _require_no_other_mesh(source)
    if 0 not in x.shape:
        # Raised here rather than at compile time.
        redistribute(x.shape, bits(x.dtype), *layouts(x.ndim, source, target))
    if src.spec.reduced:
        # `source` is the plain form, without the name that `reduced` is.
        x = placed(x, source)
    moved = _move.bind(x, src=source, dst=target)
    if len({*target.mesh.axis_types}) > 1:
        # Types say nothing about Auto axes, which the target leaves unsharded.
        unsharded = NamedSharding(target.mesh, PartitionSpec())
        moved = jax.lax.with_sharding_constraint(moved, unsharded)
    # A name for a value that is the same on all devices of an axis. Only gradients use
    # it: their sum over that axis is due.
    return placed(moved, dst) if dst.spec.reduced else moved


def _require_like_meshes(src: NamedSharding, dst: NamedSharding) -> None:
    """Raises an error if one `jit` cannot have arrays on the meshes of both."""
    if is_explicit(src) != is_explicit(dst):
        src_kind = "Explicit" if is_explicit(src) else "Auto"
        dst_kind = "Explicit" if is_explicit(dst) else "Auto"
        raise SpecError(
            f"the array's mesh {src.mesh.axis_names} has"
            f" {src_kind} axes and the target's mesh"
            f" {dst.mesh.axis_names} has {dst_kind}"
            " ones; inside `jit` both must be of one kind: make the meshes with the"
            " same `axis_types`, or reshard outside."
        )
    if not same_order(src, dst):
        raise MeshError(
            f"the meshes {src.mesh.axis_names} and {dst.mesh.axis_names} list their"
            " devices in different orders, which JAX does not allow in one `jit`;"
            " reshard outside, or build both with one device order."
        )


def move_traced_leaves(
    leaves: Sequence[Any],
    sources: Sequence[Any],
    targets: Sequence[Any],
    path_of: Callable[[int], str],
) -> list[Any]:
    """Moves the arrays among the leaves of a traced tree from their shardings `sources`
    to `targets`. A source is `None` if the array's type has the sharding, and a target
    is `None` for a leaf that does not move. `path_of` returns the path of the leaf with
    a given number, for messages.
    """
    results = list(leaves)
    for number, (leaf, source, target) in enumerate(
        zip(leaves, sources, targets, strict=True)
    ):
        if target is None or not is_array(leaf):
            continue
        with naming(path_of, number):
            if not isinstance(target, NamedSharding):
                raise SpecError(
                    "inside `jit` an array can only move to a NamedSharding, not to"
                    f" {target}; use `NamedSharding(mesh, spec)`."
                )
            results[number] = move_traced(leaf, target, source)
        if target.memory_kind != NamedSharding(target.mesh, target.spec).memory_kind:
            results[number] = jax.device_put(results[number], target)
    return results


def _on_devices(sharding: NamedSharding, other: NamedSharding) -> NamedSharding:
    """Returns `sharding` with its spec in the shortest form. If it is on an abstract
    mesh and `other` is not, its mesh gets the devices of `other`.
    """
    mesh = sharding.mesh
    if (
        not isinstance(mesh, Mesh)
        and isinstance(other.mesh, Mesh)
        and mesh.size == other.mesh.size
    ):
        mesh = Mesh(
            other.mesh.devices.reshape(mesh.axis_sizes),
            mesh.axis_names,
            axis_types=mesh.axis_types,
        )
    return NamedSharding(mesh, plain_spec(sharding.spec))


def _require_one_type(dst: NamedSharding, src: NamedSharding) -> None:
    """Raises `SpecError` if the mesh of `dst` has both Explicit and Auto axes, and
    neither a type nor a constraint can express the move. That is so if `dst` shards the
    array over an Auto axis, or if `src` is on another mesh.
    """
    kinds = dict(zip(dst.mesh.axis_names, dst.mesh.axis_types, strict=True))
    if len({*kinds.values()}) < 2:
        return
    auto = [name for name, kind in kinds.items() if kind != AxisType.Explicit]
    used = set(axes_of_entries(entries_of(dst.spec)))
    if src.mesh.abstract_mesh != dst.mesh.abstract_mesh or used & {*auto}:
        raise SpecError(
            f"inside `jit` an array cannot move to {dst.spec} on a mesh of mixed axis"
            f" types, {kinds}: types say how Explicit axes shard it, and nothing says"
            " it of Auto ones; give all axes of the mesh one type, or reshard outside."
        )


def _require_no_other_mesh(src: NamedSharding) -> None:
    """Raises `MeshError` if `src` is on an abstract mesh of Auto axes, and
    `jax.set_mesh` has set another mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    if (
        isinstance(src.mesh, Mesh)
        or is_explicit(src)
        or around.empty
        or around == src.mesh
    ):
        return
    raise MeshError(
        f"`src` lies on the mesh {dict(src.mesh.shape)} without devices, and"
        f" `jax.set_mesh` has set {dict(around.shape)}, whose devices the program runs"
        " on; give `src` or `dst` on a `jax.sharding.Mesh`: `NamedSharding(mesh,"
        " spec)`."
    )


_move = jex.core.Primitive("shardfx_move")


def _evaluate(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    """Evaluates the move eagerly, as in a gradient without `jit`. The array moves from
    its own sharding, not `src`.
    """
    if not isinstance(dst.mesh, Mesh):
        raise MeshError(
            f"outside of `jit` {dst} has no devices to move an array of shape {x.shape}"
            " to; give a jax Mesh."
        )
    if not isinstance(x, jax.Array):
        return jax.device_put(x, dst)
    # No devices are lost, and CPU devices may copy shards in host memory.
    move = move_of(
        shape=x.shape, dtype=x.dtype, src=x.sharding, dst=dst, lost=(), copies=True
    )
    return carry_out(move, x)


def _lowering(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    """The program of the move: the planned steps, in place of the primitive. An array
    without elements has none.
    """
    if 0 in x.shape:
        return placed(x, dst)
    src_layout, dst_layout = layouts(x.ndim, src, dst)
    plan = redistribute(x.shape, bits(x.dtype), src_layout, dst_layout)
    return program(x, src, dst, plan.steps, like=src_layout)


def _abstract_eval(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    """The type of the result: that of `x`, with the sharding `dst` on Explicit axes."""
    if not is_explicit(dst):
        return x
    entries = (*entries_of(dst.spec), *[None] * (x.ndim - len(entries_of(dst.spec))))
    return x.update(
        sharding=NamedSharding(dst.mesh.abstract_mesh, PartitionSpec(*entries))
    )


def _transpose(
    cotangent: object,
    _: object,
    *,
    src: NamedSharding,
    dst: NamedSharding,
) -> list[Any]:
    """The cotangent of the move's argument: that of its result, moved back."""
    return [_move.bind(cotangent, src=dst, dst=src)]


def _batch(
    axis: Any,
    args: Any,
    dims: Any,
    *,
    src: NamedSharding,
    dst: NamedSharding,
) -> tuple[Any, int | None]:
    """The move under `vmap`: the result, and the position of the dimension that `vmap`
    has added, or `None`. `dims` has this position for the argument, `None` if it is not
    batched. `axis` is JAX's `AxisData`, with the mesh axes that shard the dimension.
    """
    (x,) = args
    (dim,) = dims
    if dim is None:
        return _move.bind(x, src=src, dst=dst), None
    names = axis.spmd_name or axis.explicit_mesh_axis or ()
    return (
        _move.bind(
            x,
            src=_batched(src, x.ndim, dim, names),
            dst=_batched(dst, x.ndim, dim, names),
        ),
        dim,
    )


def _batched(
    sharding: NamedSharding,
    rank: int,
    dim: int,
    names: tuple[str, ...],
) -> NamedSharding:
    """Returns `sharding` with an entry for the dimension `dim`, which `vmap` has added
    to an array of now `rank` dimensions. The mesh axes `names`, which `vmap` asks for,
    shard this dimension if the mesh of `sharding` has them.
    """
    entries = list(entries_of(sharding.spec))
    # The dimensions that the spec leaves out are not sharded.
    entries += [None] * (rank - 1 - len(entries))
    is_on_mesh = names and {*names} <= {*sharding.mesh.axis_names}
    entries.insert(dim, names if is_on_mesh else None)
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))


_move.def_impl(_evaluate)
_move.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_move, mlir.lower_fun(_lowering, multiple_results=False))
ad.deflinear2(_move, _transpose)
batching.fancy_primitive_batchers[_move] = _batch
