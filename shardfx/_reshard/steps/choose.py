import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..._spec import array_bytes, bits, canonical, entries_of, entry_axes
from ..small_floats import is_small_float, moved
from .hlo import wire_bytes
from .layout import Layout, slice_numbers
from .program import placed, program
from .redistribute import Redistribution, layout, redistribute


How = Literal["none", "xla", "steps"]

# A few bytes of allocation (the pointers of a tuple, scalars) are no copy of the array.
_SLACK_BYTES = 4096
NO_MESH = AbstractMesh((), ())


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


@ft.lru_cache(maxsize=4096)
def choose(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Choice:
    """Plans a move, compiles XLA's own program for it, and says which of the two is to run.

    **Arguments:**

    - `shape`, `dtype`: of the array.
    - `src`, `dst`: its shardings; without devices (on an AbstractMesh) nothing is compiled, and the steps run.

    **Returns:**

    The Choice, cached.
    """
    ends = layouts(len(shape), src, dst)
    plan = redistribute(shape, bits(dtype), *ends)
    if not plan.steps or math.prod(shape) == 0:
        return Choice("none", plan)
    if isinstance(src.mesh, AbstractMesh) or isinstance(dst.mesh, AbstractMesh) or not same_order(src, dst):
        return Choice("steps", plan)
    compiled = lowered(xla_program(dtype, untyped(src), untyped(dst)), shape, dtype, src, dst).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        return Choice("steps", plan)
    temp, wire = memory.temp_size_in_bytes, math.ceil(wire_bytes(text, src.mesh.size))
    dcn = math.ceil(wire_bytes(text, src.mesh.size, slice_numbers(ends[0])))
    bound = 2 * max(array_bytes(end.piece_shape(shape), dtype) for end in ends) + _SLACK_BYTES
    as_good = temp <= bound and wire <= plan.wire_bytes and dcn <= plan.dcn_bytes
    return Choice("xla" if as_good else "steps", plan, temp, wire, dcn)


def layouts(rank: int, src: NamedSharding, dst: NamedSharding) -> tuple[Layout, Layout]:
    return layout(src.mesh, src.spec, rank), layout(dst.mesh, dst.spec, rank)


def same_order(src: NamedSharding, dst: NamedSharding) -> bool:
    first, second = src.mesh, dst.mesh
    if isinstance(first, AbstractMesh) or isinstance(second, AbstractMesh):
        return True
    return first.devices is second.devices or first.devices.ravel().tolist() == second.devices.ravel().tolist()


def lowered(
    fn: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding
) -> Any:
    """`fn` lowered for one array that comes in `src` and leaves in `dst`, ready to be compiled and looked at."""
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=untyped(src))
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
        return jax.jit(fn, in_shardings=untyped(src), out_shardings=untyped(dst)).lower(struct)


def untyped(sharding: NamedSharding) -> NamedSharding:
    """The same sharding on Auto axes and in the default memory: programs of live arrays need no other kind."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and any(kind != AxisType.Auto for kind in mesh.axis_types):
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, settled(sharding.spec))


def settled(spec: PartitionSpec) -> PartitionSpec:
    """`spec` in its shortest form, with nothing left to the compiler."""
    return canonical(PartitionSpec(*[entry_axes(entry) or None for entry in entries_of(spec)]))


def xla_program(dtype: Any, src: NamedSharding, dst: NamedSharding) -> Callable[[Any], Any]:
    """What XLA makes of a move if it only knows both ends; small floats keep their bits."""
    way = lambda x: placed(placed(x, src), dst)
    return ft.partial(moved, way) if is_small_float(dtype) else way


def steps_program(shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding) -> Callable[[Any], Any]:
    """The planned steps as a function to be traced; the meshes list the same devices in the same order."""
    src, dst = untyped(src), untyped(dst)
    like, end = layouts(len(shape), src, dst)
    steps = redistribute(shape, bits(dtype), like, end).steps
    return ft.partial(program, src=src, dst=dst, steps=steps, like=like)
