"""Moving arrays, live or traced, from one sharding to another in bounded memory."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._bits import is_small_float, moved
from ._errors import LeafTypeError, MeshError, SpecError
from ._hlo import wire_bytes
from ._layout import Layout, slice_numbers
from ._program import abstract, flat_program, is_explicit, placed, program
from ._redistribute import Redistribution, layout, redistribute
from ._spec import array_bytes, bits, canonical, entries_of, entry_axes


How = Literal["none", "xla", "steps"]

# A few bytes of allocation (the pointers of a tuple, scalars) are no copy of the array.
_SLACK_BYTES = 4096
_NO_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which program a move runs.

    **Arguments:**

    - `how`: "none" if every device holds its piece already, or there are no elements; "xla" if XLA's own program
        stays within the bound and moves no more bytes than the steps, nor more between slices; else "steps".
    - `plan`: what the planner says.
    - `xla_temp_bytes`, `xla_wire_bytes`, `xla_dcn_bytes`: of XLA's program, `None` where it was not compiled; the last
        are those of its wire bytes that come from another slice.
    """

    how: How
    plan: Redistribution
    xla_temp_bytes: int | None = None
    xla_wire_bytes: int | None = None
    xla_dcn_bytes: int | None = None


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
    return move_group([x], dst, src=src, donate=donate)[0]


def move_group(
    xs: Sequence[Any], dst: NamedSharding, *, src: NamedSharding | None = None, donate: bool = False
) -> list[Any]:
    """`move` for several arrays of one shape, dtype and source, each by the same compiled program.

    **Arguments:**

    - `xs`: arrays, all live or all traced, of the same shape and dtype and in the same sharding.
    - `dst`, `src`, `donate`: as for `move`.

    **Returns:**

    The arrays in `dst`, in order.
    """
    if not xs:
        return []
    first = xs[0]
    if isinstance(first, Tracer):
        return [traced(x, dst, src) for x in xs]
    _require_movable(first.dtype)
    run = live_program(first.shape, first.dtype, _source_of(first), dst, donate)
    return [run(x) for x in xs]


def _require_movable(dtype: Any) -> None:
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard corrupts memory with it; "
            "move `x.astype(jnp.int4)` and convert it back."
        )


def _source_of(x: Any) -> NamedSharding:
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        return x.sharding
    where = x.sharding if isinstance(x, jax.Array) else f"host memory as {type(x).__name__}"
    raise SpecError(
        f"an array of shape {x.shape} lies in {where}, which names no mesh axes; place it first with "
        "`jax.device_put(x, NamedSharding(mesh, spec))`."
    )


@ft.lru_cache(maxsize=4096)
def choose(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Choice:
    """Plans a move, compiles XLA's own program for it, and says which of the two is to run.

    **Arguments:**

    - `shape`, `dtype`: of the array.
    - `src`, `dst`: its shardings; without devices (on an AbstractMesh) nothing is compiled, and the steps run.

    **Returns:**

    The Choice, cached.
    """
    ends = _layouts(len(shape), src, dst)
    plan = redistribute(shape, bits(dtype), *ends)
    if not plan.steps or math.prod(shape) == 0:
        return Choice("none", plan)
    if isinstance(src.mesh, AbstractMesh) or isinstance(dst.mesh, AbstractMesh) or not _same_order(src, dst):
        return Choice("steps", plan)
    compiled = lowered(_xla_program(dtype, _untyped(src), _untyped(dst)), shape, dtype, src, dst).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        return Choice("steps", plan)
    temp, wire = memory.temp_size_in_bytes, math.ceil(wire_bytes(text, src.mesh.size))
    dcn = math.ceil(wire_bytes(text, src.mesh.size, slice_numbers(ends[0])))
    bound = 2 * max(array_bytes(end.piece_shape(shape), dtype) for end in ends) + _SLACK_BYTES
    as_good = temp <= bound and wire <= plan.wire_bytes and dcn <= plan.dcn_bytes
    return Choice("xla" if as_good else "steps", plan, temp, wire, dcn)


def _layouts(rank: int, src: NamedSharding, dst: NamedSharding) -> tuple[Layout, Layout]:
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def _same_order(src: NamedSharding, dst: NamedSharding) -> bool:
    first, second = src.mesh, dst.mesh
    if isinstance(first, AbstractMesh) or isinstance(second, AbstractMesh):
        return True
    return first.devices is second.devices or first.devices.ravel().tolist() == second.devices.ravel().tolist()


def lowered(
    fn: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding
) -> Any:
    """`fn` lowered for one array that comes in `src` and leaves in `dst`, ready to be compiled and looked at."""
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=_untyped(src))
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.disable_jit(False):
        return jax.jit(fn, in_shardings=_untyped(src), out_shardings=_untyped(dst)).lower(struct)


def _untyped(sharding: NamedSharding) -> NamedSharding:
    """The same sharding on Auto axes and in the default memory: programs of live arrays need no other kind."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and any(kind != AxisType.Auto for kind in mesh.axis_types):
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, _settled(sharding.spec))


def _settled(spec: PartitionSpec) -> PartitionSpec:
    """`spec` in its shortest form, with nothing left to the compiler."""
    return canonical(PartitionSpec(*[entry_axes(entry) or None for entry in entries_of(spec)]))


def _same(x: Any) -> Any:
    return x


def _xla_program(dtype: Any, src: NamedSharding, dst: NamedSharding) -> Callable[[Any], Any]:
    """What XLA makes of a move if it only knows both ends; small floats keep their bits."""
    way = lambda x: placed(placed(x, src), dst)
    return ft.partial(moved, way) if is_small_float(dtype) else way


def steps_program(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Callable[[Any], Any]:
    """The planned steps as a function to be traced; the meshes list the same devices in the same order."""
    src, dst = _untyped(src), _untyped(dst)
    like, end = _layouts(len(shape), src, dst)
    steps = redistribute(shape, bits(dtype), like, end).steps
    return ft.partial(program, src=src, dst=dst, steps=steps, like=like)


@ft.lru_cache(maxsize=1024)
def live_program(
    shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding, donate: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """A function that moves live arrays of one shape, dtype and sharding; compiled when it is first called.

    **Arguments:**

    - `shape`, `dtype`, `src`: of the arrays.
    - `dst`: where they shall lie.
    - `donate`: whether the function gives up the buffers of its argument.

    **Returns:**

    A function of one array, cached.
    """
    here, there = _untyped(src), _untyped(dst)
    choice = choose(shape, dtype, here, there)
    # XLA takes over a buffer only for a result of the same size.
    reuse = donate and here.shard_shape(shape) == there.shard_shape(shape)
    if math.prod(shape) == 0:
        # XLA labels such a result with pieces of the wrong shape.
        step = ft.partial(_empty, shape=shape, dst=dst)
    elif choice.how == "none":
        step = _same
    elif not _same_order(here, there):
        like = layout(here.mesh, here.spec, len(shape))
        step = jax.jit(ft.partial(flat_program, src=here, steps=choice.plan.steps, like=like), in_shardings=here)
    else:
        fn = _xla_program(dtype, here, there) if choice.how == "xla" else steps_program(shape, dtype, here, there)
        step = jax.jit(fn, in_shardings=here, out_shardings=there, donate_argnums=(0,) if reuse else ())

    def run(x: jax.Array) -> jax.Array:
        given = x
        if x.sharding.memory_kind != here.memory_kind:
            x = jax.device_put(x, NamedSharding(src.mesh, src.spec))
        # Whatever mesh the caller has set, this program is about its own two; and it is one under `disable_jit` too.
        with jax.sharding.use_abstract_mesh(_NO_MESH), jax.disable_jit(False):
            y = step(x)
        y = _labelled(y, shape, NamedSharding(dst.mesh, dst.spec))
        if dst.memory_kind != y.sharding.memory_kind:
            y = jax.device_put(y, dst)
        if donate and choice.how != "none" and not given.is_deleted():
            given.delete()
        return y

    return run


def _empty(x: jax.Array, *, shape: tuple[int, ...], dst: NamedSharding) -> jax.Array:
    pieces = [shard.data.reshape(dst.shard_shape(shape)) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(dst.mesh, dst.spec), pieces)


def _labelled(y: jax.Array, shape: tuple[int, ...], dst: NamedSharding) -> jax.Array:
    """`y` under the sharding `dst`, which its pieces already have: only the label changes, and that is checked."""
    if y.sharding == dst and y.shape == shape:
        return y
    pieces = [shard.data for shard in y.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, dst, pieces)


def traced(x: Any, dst: NamedSharding, src: NamedSharding | None = None) -> Any:
    """`move` inside `jit` or another transformation: of a traced value, or of an array that is a constant there."""
    _require_movable(x.dtype)
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
    if not _same_order(src, dst):
        raise MeshError(
            f"the meshes {src.mesh.axis_names} and {dst.mesh.axis_names} list their devices in different orders, "
            "which JAX does not allow in one `jit`; reshard outside, or build both with one device order."
        )
    if src.spec.unreduced or dst.spec.unreduced:  # more than a move: sums
        return jax.sharding.reshard(x, dst)
    src, dst = _on_devices(_trimmed(src), dst), _on_devices(_trimmed(dst), src)
    redistribute(x.shape, bits(x.dtype), *_layouts(x.ndim, src, dst))  # raises here, and not where it is compiled
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
    return NamedSharding(sharding.mesh, _settled(sharding.spec))


_move = jex.core.Primitive("shardfx_move")


def _lowering(x: Any, *, src: NamedSharding, dst: NamedSharding) -> Any:
    choice = choose(x.shape, x.dtype, _untyped(src), _untyped(dst))
    if choice.how == "steps":
        return program(x, src, dst, choice.plan.steps, layout(src.mesh, src.spec, x.ndim))
    return _xla_program(x.dtype, src, dst)(x)


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


_move.def_impl(_evaluate)
_move.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_move, mlir.lower_fun(_lowering, multiple_results=False))
ad.deflinear2(_move, _transpose)
batching.fancy_primitive_batchers[_move] = _batch
