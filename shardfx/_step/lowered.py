"""A step's StableHLO module: its parameters, mesh and source lines, and the same module
under other shardings.
"""

import functools as ft
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
    - `path`: its path, which starts with the name of the step's parameter:
      "params/layers/0/w"; empty for results.
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
    owner = None if isinstance(value.owner, ir.Block) else value.owner
    return (
        owner if owner is not None and owner.name.rpartition(".")[2] == name else None
    )


def is_callback(op: Op) -> bool:
    """Whether an operation calls back to Python."""
    if op.name != "stablehlo.custom_call":
        return False
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    return target in (CALLS_BACK, CALLS_BACK_BY_SHARD)


def parameters(module: Module) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """The arrays that the module takes, and those that it returns. JAX has removed
    arguments that nothing reads.
    """
    main = _main(module)
    arguments = main.regions[0].blocks[0].arguments
    attributes = _attrs(main, "arg_attrs")
    taken = [
        _parameter(_name(argument.location), argument.type, attrs)
        for argument, attrs in zip(arguments, attributes, strict=True)
    ]
    types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
    results = [
        _parameter("", kind, attrs)
        for kind, attrs in zip(types, _attrs(main, "res_attrs"), strict=True)
    ]
    return tuple(taken), tuple(results)


def meshes(module: Module) -> dict[str, dict[str, int]]:
    """The axis sizes of each mesh of the module, by the mesh's name."""
    sizes_of = {}
    for op in module.operation.regions[0].blocks[0]:
        if op.operation.name == "sdy.mesh":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            sizes_of[name] = {axis.name: axis.size for axis in axes}
    return sizes_of


def mesh_of_arguments(module: Module) -> str | None:
    """The name of the mesh in the first sharding of an argument or result; `None` if
    none of them has a sharding.
    """
    main = _main(module)
    for attrs in (*_attrs(main, "arg_attrs"), *_attrs(main, "res_attrs")):
        if "sdy.sharding" in attrs:
            match = _REFERENCE.match(
                str(sdy.TensorShardingAttr(attrs["sdy.sharding"]).mesh_or_ref)
            )
            return match[1] if match else None
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
    # Constraints name axes, so another mesh with the same axes may have other sizes.
    # The body of a `shard_map` has local shapes.
    same = next((name for name, sizes in declared.items() if [*sizes] == [*mesh]), None)
    inside = _sharded_inside(module)
    if (
        inside
        and declared
        and (
            same is None
            or len(declared) > 1
            or (declared[same] != dict(mesh) and _MANUAL in inside)
        )
    ):
        raise ProgramError(
            f"the step constrains its arrays over a mesh of its own, {declared}, so it"
            f" cannot be laid out on {dict(mesh)}; take the constraints out, or let"
            " them follow the mesh."
        )
    clone = module.operation.clone()
    with clone.context, ir.Location.unknown(clone.context):
        block = clone.regions[0].blocks[0]
        integer = ir.IntegerType.get_signless(32)
        clone.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(
            integer, math.prod(mesh.values())
        )
        name = same or "_".join(["mesh", *declared])
        mesh_attribute = sdy.MeshAttr.get(
            [sdy.MeshAxisAttr.get(axis, size) for axis, size in mesh.items()]
        )
        for op in block:
            if (
                op.operation.name == "sdy.mesh"
                and ir.StringAttr(op.attributes["sym_name"]).value == name
            ):
                op.attributes["mesh"] = mesh_attribute
        if same is None:
            with ir.InsertionPoint.at_block_begin(block):
                sdy.MeshOp(name, mesh_attribute)
        main = _main(clone)
        for attribute, dims in (("arg_attrs", arguments), ("res_attrs", results)):
            attributes = [
                _with_sharding(attrs, name, array_dims)
                for attrs, array_dims in zip(_attrs(main, attribute), dims, strict=True)
            ]
            main.attributes[attribute] = ir.ArrayAttr.get(
                [ir.DictAttr.get(row) for row in attributes]
            )
        return bytecode(clone)


def _main(module: Module) -> Op:
    for op in module.operation.regions[0].blocks[0]:
        if (
            op.operation.name == "func.func"
            and ir.StringAttr(op.attributes["sym_name"]).value == "main"
        ):
            return op.operation
    raise ProgramError("the lowered module has no function `main`.")


def _attrs(main: Op, attribute: str) -> list[dict[str, ir.Attribute]]:
    """The attributes of each argument ("arg_attrs") or result ("res_attrs") of the
    function `main`, as dicts.
    """
    if attribute not in main.attributes:
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        return [{} for _ in (kind.inputs if attribute == "arg_attrs" else kind.results)]
    return [
        {entry.name: entry.attr for entry in ir.DictAttr(attrs)}
        for attrs in ir.ArrayAttr(main.attributes[attribute])
    ]


def _parameter(
    name: str, kind: ir.Type, attrs: Mapping[str, ir.Attribute]
) -> Parameter:
    sharding = attrs.get("sdy.sharding")
    dims = None if sharding is None else _dims(sharding)
    donated = bool({"tf.aliasing_output", "jax.buffer_donor"} & {*attrs})
    memory = (
        ir.StringAttr(attrs["mhlo.memory_kind"]).value
        if "mhlo.memory_kind" in attrs
        else "device"
    )
    return Parameter(
        name, tuple(ir.RankedTensorType(kind).shape), dims, donated, memory != "device"
    )


def _dims(sharding: ir.Attribute) -> Dims:
    cut = sdy.TensorShardingAttr(sharding).dimension_shardings
    return tuple(
        tuple(
            sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes
        )
        for dim in cut
    )


def argument_shardings(function: Op) -> list[ArraySharding | None]:
    """The shardings of a function's arguments in a module after Shardy's propagation."""
    attributes = _attrs(function, "arg_attrs")
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
    origins = (
        attributes["sdy.sharding_origins"]
        if "sdy.sharding_origins" in attributes
        else None
    )
    if operation.name == "sdy.sharding_constraint":
        name = (
            ir.StringAttr(attributes["sdy.sharding_origin_name"]).value
            if origins is not None
            else ""
        )
        return [_sharding(attributes["sharding"], origins, name)]
    if "sdy.sharding" not in attributes:
        return []
    shardings = list(
        sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
    )
    if _OF_LOOPS in attributes:
        origin_names = list(ir.ArrayAttr(attributes[_OF_LOOPS]))
        if len(origin_names) != len(
            shardings
        ):  # before JAX 0.12, only sharded values have origins
            rest = iter(origin_names)
            origin_names = [
                next(rest, None) if any(_dims(sharding)) else None
                for sharding in shardings
            ]
        return [
            _sharding(sharding, origin)
            for sharding, origin in zip(shardings, origin_names, strict=True)
        ]
    each = [None] * len(shardings) if origins is None else ir.ArrayAttr(origins)
    return [
        _sharding(sharding, origin)
        for sharding, origin in zip(shardings, each, strict=True)
    ]


def _sharding(
    sharding: ir.Attribute | None, origins: ir.Attribute | None, name: str = ""
) -> ArraySharding | None:
    if sharding is None:
        return None
    names = (
        {}
        if origins is None
        else {
            entry.name: ir.StringAttr(entry.attr).value
            for entry in ir.DictAttr(origins)
        }
    )
    cut = sdy.TensorShardingAttr(sharding).dimension_shardings
    dims = tuple(
        tuple(map(_axis_text, sdy.DimensionShardingAttr(dim).axes)) for dim in cut
    )
    return ArraySharding(
        dims,
        {
            axis: name if origin == "self" and name else origin
            for axis, origin in names.items()
        },
    )


def _axis_text(axis: ir.Attribute) -> str:
    """A mesh axis as text: its name, or Shardy's notation "fsdp:(1)2" for a sub-axis."""
    read = sdy.AxisRefAttr(axis)
    part = read.sub_axis_info
    if part is None:
        return read.name
    part = sdy.SubAxisInfoAttr(part)
    return f"{read.name}:({part.pre_size}){part.size}"


def _name(location: ir.Location) -> str:
    match = _LOCATION.match(str(location))
    return re.sub(r"\\(.)", r"\1", match[1]) if match else ""


def _with_sharding(
    attrs: Mapping[str, ir.Attribute], mesh: str, dims: Dims | None
) -> dict[str, ir.Attribute]:
    """The attributes of an argument, with the sharding `dims` over the mesh named
    `mesh`. Input-output aliasing becomes plain donation, since aliasing depends on the
    old sharding.
    """
    attributes = {
        name: entry
        for name, entry in attrs.items()
        if name not in ("sdy.sharding", "tf.aliasing_output")
    }
    if "tf.aliasing_output" in attrs:
        attributes["jax.buffer_donor"] = ir.BoolAttr.get(True)
    if dims is not None:
        cut = [
            sdy.DimensionShardingAttr.get(
                [sdy.AxisRefAttr.get(axis) for axis in axes], True
            )
            for axes in dims
        ]
        attributes["sdy.sharding"] = sdy.TensorShardingAttr.get(mesh, cut)
    return attributes


def _sharded_inside(module: Module) -> set[str]:
    """The names of the operations inside the step that have a sharding attribute."""
    operation_names: set[str] = set()
    for op in operations(module):
        # A callback's sharding is one device, on any mesh.
        if is_callback(op):
            continue
        names = [name if isinstance(name, str) else name.name for name in op.attributes]
        if op.name not in ("func.func", "sdy.mesh") and any(
            "shard" in name for name in names
        ):
            operation_names.add(op.name)
    return operation_names


class Frame(NamedTuple):
    """A source line of a traced program."""

    __module__ = "shardfx.cost"

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file's name without its folder, and the line number: "train.py:41"."""
        return printable(
            f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"
        )


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
    matches = (_FRAME.findall(str(location)) for location in locations)
    return tuple(
        Frame(file, int(line), function)
        for frames in matches
        for function, file, line in frames
    )


def name_stacks(locations: tuple[ir.Location, ...]) -> tuple[str, ...]:
    """JAX's name stacks of an operation and of the calls around it, such as
    `jit(step)/while/body/dot_general`.
    """
    matches = (_STACK.match(str(location)) for location in locations)
    return tuple(match[1] for match in matches if match)


def is_library(frame: Frame) -> bool:
    """Whether a source line belongs to an installed library or to shardfx, and not to
    the user's own program.
    """
    return _LIBRARY.search(frame.file) is not None


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost source line of the user's own program; the innermost line of all if
    there is no such line.
    """
    return next(
        (frame for frame in stack if not is_library(frame)), next(iter(stack), None)
    )


def place_text(source: Frame | None) -> str:
    """A source line and its function as text for a table; "-" for `None`."""
    if source is None:
        return "-"
    return (
        f"{source.place} {printable(source.function)}"
        if source.function
        else source.place
    )


def opened(given: object) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and the constants of a `ClosedJaxpr`. A `Jaxpr` is returned unchanged,
    without constants.
    """
    return (
        (given.jaxpr, given.consts)
        if isinstance(given, jex.ClosedJaxpr)
        else (given, ())
    )


def applied(jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a jaxpr for the operands `ins`, and returns its
    results. The operations get the equation's own name stack and source line.
    """
    arrays = {
        atom: array
        for atom, array in zip(equation.invars, ins, strict=True)
        if not isinstance(atom, jex.Literal)
    }
    alone = jaxpr.replace(
        constvars=[],
        invars=[*arrays],
        outvars=[*equation.outvars],
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*arrays.values())


def carry_of(scan: Any) -> tuple[int, int]:
    """For the jaxpr equation of a scan: the index of the carry's first array among the
    operands, and the number of arrays in the carry.
    """
    # The names of a scan's parameters differ between versions of JAX. Arrays that are
    # scanned over have one more dimension outside of the body.
    inner = opened(scan.params["jaxpr"])[0]
    taken = sum(
        a.aval.shape == b.aval.shape
        for a, b in zip(scan.invars, inner.invars, strict=True)
    )
    carried = sum(
        a.aval.shape == b.aval.shape
        for a, b in zip(scan.outvars, inner.outvars, strict=True)
    )
    return taken - carried, carried


def frames_of(equation: jex.JaxprEqn) -> tuple[Frame, ...]:
    """The source lines of an equation and of the calls around it, the innermost first."""
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return tuple(
        Frame(frame.file_name, frame.line_num, frame.function_name) for frame in frames
    )
