"""A step's StableHLO module: its parameters, mesh and source lines, and the same module
under other shardings.
"""

import functools as ft
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.extend.core as jex
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from .._ground.errors import ProgramError
from .._ground.text import printable


# For each dimension of an array, the mesh axes that shard it.
Dims = tuple[tuple[str, ...], ...]
# MLIR returns an operation as an object of its dialect's class, or of a general class.
Op: TypeAlias = ir.Operation | ir.OpView
# A StableHLO module, as `lowered.compiler_ir("stablehlo")` returns it, or its
# operation.
Module: TypeAlias = ir.Module | Op
# JAX's custom calls for callbacks to Python on CPUs. With the second, each device calls
# back with its own shard.
CALLS_BACK = "xla_ffi_python_cpu_callback"
CALLS_BACK_BY_SHARD = "xla_ffi_partitioned_python_cpu_callback"
_OF_LOOPS = "sdy.result_sharding_origins"
_MANUAL = "sdy.manual_computation"
_REFERENCE = re.compile(r'@"?([\w.]+)"?$')
_LOCATION = re.compile(r'^loc\("(.*?)"\)?', re.DOTALL)


class ArraySharding(NamedTuple):
    """The sharding of an array that Shardy propagated, and the origin of each of its
    mesh axes.

    An origin is Shardy's name of the argument, result or constraint from which the axis
    comes. A sub-axis has Shardy's notation: "fsdp:(1)2" is the major-most sub-axis of
    size 2.
    """

    dims: Dims
    origins: Mapping[str, str]


class Parameter(NamedTuple):
    """One array that a lowered module takes or returns.

    - `name`: its name in the text of compiled programs, "params['w']"; empty for
      results.
    - `shape`: the shape of the whole array.
    - `dims`: the mesh axes that shard each dimension; `None` if the compiler may choose
      them.
    - `donated`: whether a result may reuse its memory.
    - `on_host`: whether it is in host memory.
    - `path`: its path from the step's parameter on, "params/w"; empty for results.
    """

    name: str
    shape: tuple[int, ...]
    dims: Dims | None
    donated: bool
    on_host: bool = False
    path: str = ""


def operations(module: Module) -> Iterator[Op]:
    """Yields the operations inside a module or an operation, with nested ones, in the
    order of the text.
    """
    for region in module.operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from operations(op)


def maker(value: ir.Value, name: str) -> Op | None:
    """The operation that makes the value, if its name without the dialect is `name`,
    such as "add"; else `None`.
    """
    if isinstance(value.owner, ir.Block):
        return None
    _, _, own_name = value.owner.name.rpartition(".")
    if own_name == name:
        return value.owner
    return None


def text_attribute(op: Op, name: str) -> str:
    """The text of a string attribute of an operation."""
    return ir.StringAttr(op.attributes[name]).value


def is_callback(op: Op) -> bool:
    """Whether an operation calls back to Python."""
    if op.name != "stablehlo.custom_call":
        return False
    target = text_attribute(op, "call_target_name")
    return target in (CALLS_BACK, CALLS_BACK_BY_SHARD)


def parameters(module: Module) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """The arrays that the module takes, and those that it returns. JAX has removed
    arguments that nothing reads.
    """
    main = _main(module)
    arguments = []
    values = main.regions[0].blocks[0].arguments
    for value, attrs in zip(
        values, _attributes_of_arrays(main, "arg_attrs"), strict=True
    ):
        arguments.append(
            _parameter(_name_in_location(value.location), value.type, attrs)
        )
    results = []
    types = _type_of(main).results
    for kind, attrs in zip(
        types, _attributes_of_arrays(main, "res_attrs"), strict=True
    ):
        results.append(_parameter("", kind, attrs))
    return tuple(arguments), tuple(results)


def _type_of(function: Op) -> ir.FunctionType:
    """The types of a function's arguments and results."""
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def meshes(module: Module) -> dict[str, dict[str, int]]:
    """The axis sizes of each mesh of the module, by the mesh's name."""
    sizes_of = {}
    for op in module.operation.regions[0].blocks[0]:
        if op.operation.name == "sdy.mesh":
            name = text_attribute(op, "sym_name")
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            sizes_of[name] = {axis.name: axis.size for axis in axes}
    return sizes_of


def mesh_of_arguments(module: Module) -> str | None:
    """The name of the mesh in the first sharding of an argument or result; `None` if
    none of them has a sharding.
    """
    main = _main(module)
    for attrs in (
        *_attributes_of_arrays(main, "arg_attrs"),
        *_attributes_of_arrays(main, "res_attrs"),
    ):
        if "sdy.sharding" in attrs:
            sharding = sdy.TensorShardingAttr(attrs["sdy.sharding"])
            match = _REFERENCE.match(str(sharding.mesh_or_ref))
            return None if match is None else match[1]
    return None


def bytecode(module: Module) -> bytes:
    """The module as the bytecode that XLA reads."""
    sink = io.BytesIO()
    module.operation.write_bytecode(sink)
    return sink.getvalue()


def resharded(
    module: Module,
    mesh: Mapping[str, int],
    arguments: Sequence[Dims | None],
    results: Sequence[Dims | None],
) -> bytes:
    """The bytecode of the module on another mesh, with other shardings of its arguments
    and results. `mesh` has the sizes of the mesh axes. The compiler chooses a sharding
    that is `None`. Raises `ProgramError` if operations inside the step constrain arrays
    over a mesh that is not `mesh`.
    """
    # Typed keys have an empty mesh, which counts as none.
    declared = {name: sizes for name, sizes in meshes(module).items() if sizes}
    same = _mesh_with_axes(declared, tuple(mesh))
    _require_no_other_mesh(module, declared, same, mesh)
    clone = module.operation.clone()
    with clone.context, ir.Location.unknown(clone.context):
        integer = ir.IntegerType.get_signless(32)
        partitions = ir.IntegerAttr.get(integer, math.prod(mesh.values()))
        clone.attributes["mhlo.num_partitions"] = partitions
        name = same or "_".join(["mesh", *declared])
        _declare_mesh(clone, name, mesh, is_new=same is None)
        main = _main(clone)
        for attribute, dims in (("arg_attrs", arguments), ("res_attrs", results)):
            rows: list[ir.Attribute] = []
            for attrs, array_dims in zip(
                _attributes_of_arrays(main, attribute), dims, strict=True
            ):
                row = _with_sharding(attrs, name, array_dims)
                rows.append(ir.DictAttr.get(row))
            main.attributes[attribute] = ir.ArrayAttr.get(rows)
        return bytecode(clone)


def donating(module: Module, donated: Sequence[bool]) -> Module:
    """A copy of the module that donates the arguments that are true in `donated`, and
    those that it donates already.
    """
    clone = module.operation.clone()
    with clone.context, ir.Location.unknown(clone.context):
        main = _main(clone)
        rows: list[ir.Attribute] = []
        arguments = _attributes_of_arrays(main, "arg_attrs")
        for attrs, is_donated in zip(arguments, donated, strict=True):
            if is_donated and "tf.aliasing_output" not in attrs:
                attrs["jax.buffer_donor"] = ir.BoolAttr.get(True)
            rows.append(ir.DictAttr.get(attrs))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(rows)
    return clone


def _mesh_with_axes(
    declared: Mapping[str, Mapping[str, int]],
    axes: tuple[str, ...],
) -> str | None:
    """The name of a declared mesh with these axes; `None` if there is none."""
    for name, sizes in declared.items():
        if tuple(sizes) == axes:
            return name
    return None


def _require_no_other_mesh(
    module: Module,
    declared: Mapping[str, Mapping[str, int]],
    same: str | None,
    mesh: Mapping[str, int],
) -> None:
    """Raises `ProgramError` if operations inside the step name another mesh than
    `mesh`. `same` is the name of the declared mesh with the axes of `mesh`.
    """
    inside = _sharded_inside(module)
    if not inside or not declared:
        return
    if same is not None and len(declared) == 1:
        # Constraints name axes, so another mesh with the same axes may have other
        # sizes. The body of a `shard_map` has local shapes.
        if declared[same] == dict(mesh) or _MANUAL not in inside:
            return
    raise ProgramError(
        f"the step constrains its arrays over a mesh of its own, {declared}, so it"
        f" cannot be laid out on {dict(mesh)}; take the constraints out, or let"
        " them follow the mesh."
    )


def _declare_mesh(
    module: Op,
    name: str,
    mesh: Mapping[str, int],
    *,
    is_new: bool,
) -> None:
    """Gives the module's mesh of this name the axes and sizes of `mesh`; with `is_new`,
    adds it.
    """
    axes = [sdy.MeshAxisAttr.get(axis, size) for axis, size in mesh.items()]
    attribute = sdy.MeshAttr.get(axes)
    block = module.regions[0].blocks[0]
    for op in block:
        is_mesh = op.operation.name == "sdy.mesh"
        if is_mesh and text_attribute(op, "sym_name") == name:
            op.attributes["mesh"] = attribute
    if is_new:
        with ir.InsertionPoint.at_block_begin(block):
            sdy.MeshOp(name, attribute)


def _main(module: Module) -> Op:
    """The function `main` of a module. Raises `ProgramError` if it has none."""
    for op in module.operation.regions[0].blocks[0]:
        is_function = op.operation.name == "func.func"
        if is_function and text_attribute(op, "sym_name") == "main":
            return op.operation
    raise ProgramError("the lowered module has no function `main`.")


def _attributes_of_arrays(main: Op, attribute: str) -> list[dict[str, ir.Attribute]]:
    """The MLIR attributes of each argument ("arg_attrs") or result ("res_attrs") of
    `main`.
    """
    if attribute not in main.attributes:
        kind = _type_of(main)
        arrays = kind.inputs if attribute == "arg_attrs" else kind.results
        return [{} for _ in arrays]
    rows = []
    for attrs in ir.ArrayAttr(main.attributes[attribute]):
        rows.append({entry.name: entry.attr for entry in ir.DictAttr(attrs)})
    return rows


def _parameter(
    name: str,
    kind: ir.Type,
    attrs: Mapping[str, ir.Attribute],
) -> Parameter:
    """An argument or result of a module, from its MLIR type and attributes."""
    dims = None
    if "sdy.sharding" in attrs:
        dims = _dims(attrs["sdy.sharding"])
    memory_kind = "device"
    if "mhlo.memory_kind" in attrs:
        memory_kind = ir.StringAttr(attrs["mhlo.memory_kind"]).value
    return Parameter(
        name=name,
        shape=tuple(ir.RankedTensorType(kind).shape),
        dims=dims,
        donated="tf.aliasing_output" in attrs or "jax.buffer_donor" in attrs,
        on_host=memory_kind != "device",
    )


def _dims(sharding: ir.Attribute) -> Dims:
    """The mesh axes of each dimension, from Shardy's attribute of a sharding."""
    dims = []
    for axes in _axes_of_dims(sharding):
        dims.append(tuple(sdy.AxisRefAttr(axis).name for axis in axes))
    return tuple(dims)


def _axes_of_dims(sharding: ir.Attribute) -> Iterator[Sequence[ir.Attribute]]:
    """Yields the axes that shard each dimension, as Shardy's attributes."""
    for dim in sdy.TensorShardingAttr(sharding).dimension_shardings:
        yield sdy.DimensionShardingAttr(dim).axes


def argument_shardings(function: Op) -> list[ArraySharding | None]:
    """The shardings of a function's arguments after Shardy's propagation."""
    attributes = _attributes_of_arrays(function, "arg_attrs")
    return [
        _sharding(entry.get("sdy.sharding"), entry.get("sdy.sharding_origins"))
        for entry in attributes
    ]


def result_shardings(operation: Op) -> list[ArraySharding | None]:
    """The shardings of an operation's results in a module after Shardy's propagation.
    The results of a callback are on one device, and have none.
    """
    attributes = operation.attributes
    if is_callback(operation):
        return []
    origins = None
    if "sdy.sharding_origins" in attributes:
        origins = attributes["sdy.sharding_origins"]
    if operation.name == "sdy.sharding_constraint":
        name = ""
        if origins is not None:
            name = text_attribute(operation, "sdy.sharding_origin_name")
        return [_sharding(attributes["sharding"], origins, name)]
    if "sdy.sharding" not in attributes:
        return []
    per_value = sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"])
    shardings = list(per_value.shardings)
    origins_of_results: list[ir.Attribute | None] = [None] * len(shardings)
    if _OF_LOOPS in attributes:
        origins_of_results = _origins_of_loop(attributes[_OF_LOOPS], shardings)
    elif origins is not None:
        origins_of_results = list(ir.ArrayAttr(origins))
    pairs = zip(shardings, origins_of_results, strict=True)
    return [_sharding(sharding, origin) for sharding, origin in pairs]


def _origins_of_loop(
    attribute: ir.Attribute,
    shardings: Sequence[ir.Attribute],
) -> list[ir.Attribute | None]:
    """The origins of each of a loop's results."""
    origins = list(ir.ArrayAttr(attribute))
    if len(origins) == len(shardings):
        return [*origins]
    # Before JAX 0.12, only sharded values have origins.
    remaining = iter(origins)
    filled: list[ir.Attribute | None] = []
    for sharding in shardings:
        is_sharded = any(_dims(sharding))
        filled.append(next(remaining, None) if is_sharded else None)
    return filled


def _sharding(
    sharding: ir.Attribute | None,
    origins: ir.Attribute | None,
    name: str = "",
) -> ArraySharding | None:
    """The sharding in Shardy's attribute, with the origin of each axis; `None` without
    one. `name` is the origin for "self" in a constraint.
    """
    if sharding is None:
        return None
    dims = [tuple(map(_axis_text, axes)) for axes in _axes_of_dims(sharding)]
    origins_of_axes: dict[str, str] = {}
    if origins is not None:
        for entry in ir.DictAttr(origins):
            origin = ir.StringAttr(entry.attr).value
            if origin == "self" and name:
                origin = name
            origins_of_axes[entry.name] = origin
    return ArraySharding(dims=tuple(dims), origins=origins_of_axes)


def _axis_text(axis: ir.Attribute) -> str:
    """A mesh axis as text: its name, or Shardy's notation "fsdp:(1)2" for a sub-axis."""
    reference = sdy.AxisRefAttr(axis)
    info = reference.sub_axis_info
    if info is None:
        return reference.name
    sub_axis = sdy.SubAxisInfoAttr(info)
    return f"{reference.name}:({sub_axis.pre_size}){sub_axis.size}"


def _name_in_location(location: ir.Location) -> str:
    """The name in an MLIR location; "" if it has none."""
    match = _LOCATION.match(str(location))
    if match is None:
        return ""
    return re.sub(r"\\(.)", r"\1", match[1])


def _with_sharding(
    attrs: Mapping[str, ir.Attribute],
    mesh: str,
    dims: Dims | None,
) -> dict[str, ir.Attribute]:
    """The attributes of an argument, with the sharding `dims` over the mesh named
    `mesh`. Input-output aliasing becomes plain donation, since aliasing depends on the
    old sharding.
    """
    attributes = dict(attrs)
    attributes.pop("sdy.sharding", None)
    if attributes.pop("tf.aliasing_output", None) is not None:
        attributes["jax.buffer_donor"] = ir.BoolAttr.get(True)
    if dims is not None:
        dim_shardings: list[ir.Attribute] = []
        for axes in dims:
            references = [sdy.AxisRefAttr.get(axis) for axis in axes]
            dim_shardings.append(sdy.DimensionShardingAttr.get(references, True))
        sharding = sdy.TensorShardingAttr.get(mesh, dim_shardings)
        attributes["sdy.sharding"] = sharding
    return attributes


def _sharded_inside(module: Module) -> set[str]:
    """The names of the operations inside the step that have a sharding attribute."""
    names_of_sharded: set[str] = set()
    for op in operations(module):
        # A callback's sharding is one device, on any mesh.
        if is_callback(op) or op.name in ("func.func", "sdy.mesh"):
            continue
        for name in op.attributes:
            text = name if isinstance(name, str) else name.name
            if "shard" in text:
                names_of_sharded.add(op.name)
    return names_of_sharded


class Frame(NamedTuple):
    """A source line of a traced program."""

    __module__ = "shardfx.cost"

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file's name without its folder, and the line number: "train.py:41"."""
        _, _, name = self.file.replace("\\", "/").rpartition("/")
        return printable(f"{name}:{self.line}")


# Frames of these packages are not the user's own program; the demo counts as a user's
# program.
_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages)[/\\]|[/\\]shardfx[/\\](?!_cli[/\\]demo)|^<frozen"
)
# The text of an MLIR location: `"function"("file":line:column)`, and the name stack
# before the calls.
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+)')
_STACK = re.compile(r'loc\("([^"]*)"')


@ft.lru_cache(maxsize=2**14)
def lines_of(locations: tuple[ir.Location, ...]) -> tuple[Frame, ...]:
    """The source lines of an operation and of the calls around it, the innermost first."""
    frames = []
    for location in locations:
        for function, file, line in _FRAME.findall(str(location)):
            frames.append(Frame(file=file, line=int(line), function=function))
    return tuple(frames)


def name_stacks(locations: tuple[ir.Location, ...]) -> tuple[str, ...]:
    """JAX's name stacks of an operation and of the calls around it, such as
    `jit(step)/while/body/dot_general`.
    """
    stacks = []
    for location in locations:
        match = _STACK.match(str(location))
        if match is not None:
            stacks.append(match[1])
    return tuple(stacks)


def is_library(frame: Frame) -> bool:
    """Whether a source line belongs to an installed library or to shardfx, and not to
    the user's own program.
    """
    return _LIBRARY.search(frame.file) is not None


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost source line of the user's own program; the innermost line of all if
    there is no such line.
    """
    for frame in stack:
        if not is_library(frame):
            return frame
    if stack:
        return stack[0]
    return None


def place_text(source: Frame | None) -> str:
    """A source line and its function as text for a table; "-" for `None`."""
    if source is None:
        return "-"
    if not source.function:
        return source.place
    return f"{source.place} {printable(source.function)}"


def frames_of(equation: jex.JaxprEqn) -> tuple[Frame, ...]:
    """The source lines of an equation and of the calls around it, the innermost first."""
    traceback = equation.source_info.traceback
    if traceback is None:
        return ()
    frames = []
    for frame in traceback.frames:
        frames.append(
            Frame(
                file=frame.file_name,
                line=frame.line_num,
                function=frame.function_name,
            )
        )
    return tuple(frames)
