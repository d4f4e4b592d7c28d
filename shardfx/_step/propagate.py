"""Shardy's sharding of each array of a step, and the origin of each of its mesh axes;
`worker.py` runs this file. `libtpu_worker.py` reads modules with its dialects.

XLA runs Shardy on StableHLO that was converted from HLO. There, Shardy can choose
between equally good shardings differently than on the module that JAX lowers. So this
file converts XLA's HLO as it is right before XLA's own Shardy pass
(`xla/service/spmd/shardy/shardy_xla_pass.cc`), and runs the same propagation on it. The
option `debug-sharding-origins` writes, beside each sharding, the argument, result or
constraint from which each mesh axis comes. The option can abort a process, so a forked
child runs it. After an abort, the shardings have no origins.

This file imports jaxlib, but neither JAX nor shardfx.
"""

import io
import os
import re
import signal
import tempfile
from typing import Any

from jaxlib import _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo


_PASSES = (
    "sdy-import-pipeline",
    "sdy-user-priority-propagate{debug-sharding-origins=%s}",
    "func.func(sdy-sink-data-flow-edges{sink-debug-sharding-origins=%s})",
)
# The custom calls that have shardings as attributes: a constraint, and those at the
# arguments and at the results of a `shard_map`.
_CONSTRAINT = "Sharding"
_INTO = "xla.sdy.GlobalToLocalShape"
_OUT = "xla.sdy.LocalToGlobalShape"
# The shardings of a custom call: `<@mesh, [{"a"}, {}]>`, or from JAX 0.12 on
# `mesh['a'=2], [{'a'}, {}]`.
_SAID = ("xla.sdy.sharding", "xla.sdy.in_shardings", "xla.sdy.out_shardings")
_DIMS = re.compile(r"(?:<@\w+, |mesh\[[^\]]*\], )\[([^\]]*)\]")
_MESH = "mesh"
_CLIENT: Any = xla_client
_READER = getattr(_CLIENT, "hlo", None) or _CLIENT._xla  # the form in JAX 0.9


def propagated(hlo: bytes, request: dict[str, Any]) -> tuple[bytes, str]:
    """The bytecode of the StableHLO module with a sharding on each operation, and an
    error text. One of them is empty. `hlo` is the text of the program.
    `request["mesh"]` has the size of each mesh axis. `request["arguments"]` and
    `request["results"]` have, for each array, the mesh axes of each dimension, or
    `None` if Shardy may choose them.
    """
    error = ""
    for origins in ("true", "false"):
        with tempfile.TemporaryFile() as file:
            child = os.fork()
            if not child:
                signal.alarm(int(request["seconds"]) + 1)
                _run(hlo, request, origins, file)
            status = os.waitpid(child, 0)[1]
            file.seek(0)
            text = file.read()
        if status == 0:
            return text, ""
        error = text.decode(errors="replace") or f"Shardy aborted ({status})"
    return b"", error


def _run(hlo: bytes, request: dict[str, object], origins: str, file: Any) -> None:
    """Runs Shardy on the program with the text `hlo`, under the mesh and shardings in
    `request`. Writes the module or an error text to `file`, and ends the process.
    `origins` says whether Shardy writes origins: "true" or "false".
    """
    status = 1
    try:
        sink = io.BytesIO()
        with context_with_dialects() as context, ir.Location.unknown(context):
            _module(hlo, request, origins).operation.write_bytecode(sink)
        file.write(sink.getvalue())
        status = 0
    except (RuntimeError, ValueError, TypeError, ir.MLIRError) as error:
        file.write(str(error).encode()[:60_000])
    finally:
        file.flush()
        os._exit(status)


def context_with_dialects() -> Any:
    """An MLIR context with the dialects of JAX's own context."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    mhlo.register_mhlo_dialect(context)
    for dialect in (sdy, stablehlo, chlo):
        dialect.register_dialect(context)
    return context


def _module(hlo: bytes, request: dict[str, Any], origins: str) -> Any:
    """The StableHLO module of the program `hlo`, after Shardy's propagation under the
    mesh and the shardings in `request`. `origins` says whether Shardy writes origins:
    "true" or "false".
    """
    proto = _READER.hlo_module_from_text(hlo.decode()).as_serialized_hlo_module_proto()
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto))
    block = module.operation.regions[0].blocks[0]
    # The step's own mesh, whose axes have names, takes the place of XLA's.
    for op in list(block):
        if op.operation.name == "sdy.mesh":
            op.operation.erase()
    with ir.InsertionPoint.at_block_begin(block):
        sizes = request["mesh"].items()
        axes = [sdy.MeshAxisAttr.get(axis, size) for axis, size in sizes]
        sdy.MeshOp(_MESH, sdy.MeshAttr.get(axes))
    main = _main(block)
    dims_by_attribute = {
        "arg_attrs": request["arguments"],
        "res_attrs": request["results"],
    }
    for name, dims_of_arrays in dims_by_attribute.items():
        attributes = [ir.DictAttr.get(_sharded(dims)) for dims in dims_of_arrays]
        main.attributes[name] = ir.ArrayAttr.get(attributes)
    for call in _custom_calls(module):
        _with_constraints(_without_tuple(call))
    for pass_text in _PASSES:
        passes = pass_text.replace("%s", origins)
        passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
    return module


def _main(block: Any) -> Any:
    """The function `main` of a module's block."""
    for op in block:
        if op.operation.name == "func.func" and str(op.name) == '"main"':
            return op.operation
    raise ValueError("the module has no function `main`")


def _sharded(dims: Any) -> dict[str, Any]:
    """The attributes of an argument or result. `dims` has the mesh axes of each
    dimension. If it is `None`, Shardy may choose them, and there are no attributes.
    """
    if dims is None:
        return {}
    dim_shardings = []
    for axes in dims:
        references = [sdy.AxisRefAttr.get(axis) for axis in axes]
        dim_shardings.append(sdy.DimensionShardingAttr.get(references, True))
    return {"sdy.sharding": sdy.TensorShardingAttr.get(_MESH, dim_shardings)}


def _custom_calls(module: Any) -> list[Any]:
    """The custom calls in a module, at any depth."""
    calls = []

    def look(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            calls.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return calls


def _without_tuple(call: Any) -> Any:
    """Replaces a custom call that returns a tuple by one with several results, since
    Shardy takes no tuples.
    """
    result_types = [result.type for result in call.results]
    if len(result_types) != 1 or not isinstance(result_types[0], ir.TupleType):
        return call
    tuple_type = ir.TupleType(result_types[0])
    types = [tuple_type.get_type(number) for number in range(tuple_type.num_types)]
    attributes = {}
    for attribute in call.attributes:
        name = attribute if isinstance(attribute, str) else attribute.name
        if name != "xla_shape":
            attributes[name] = call.attributes[name]
    tuple_less = ir.Operation.create(
        call.name,
        types,
        list(call.operands),
        attributes,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    for use in list(call.results[0].uses):
        element_op = use.owner
        number = ir.IntegerAttr(element_op.attributes["index"]).value
        element_op.results[0].replace_all_uses_with(tuple_less.results[number])
        element_op.operation.erase()
    call.erase()
    return tuple_less


def _with_constraints(call: Any) -> None:
    """Replaces a custom call that has shardings as attributes by sharding constraints."""
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if target not in (_CONSTRAINT, _INTO, _OUT):
        return
    dims_of_arrays = _shardings_in(call)
    if target == _OUT:
        after = ir.InsertionPoint.after(call)
        for result, dims in zip(call.results, dims_of_arrays, strict=False):
            op = _constraint(result, dims, after, call.location)
            result.replace_all_uses_except(op.results[0], op)
        return
    # From JAX 0.12 on, the arguments of a `shard_map` have their own constraints.
    before = ir.InsertionPoint(call)
    for number, dims in enumerate(dims_of_arrays):
        op = _constraint(call.operands[number], dims, before, call.location)
        call.operands[number] = op.results[0]
    if target == _CONSTRAINT:
        call.results[0].replace_all_uses_with(call.operands[0])
        call.erase()


def _constraint(value: Any, dims: str, point: Any, location: Any) -> Any:
    """A new sharding constraint on `value` at the insertion point `point`. `dims` is
    the text of the mesh axes of its dimensions.
    """
    attribute = ir.Attribute.parse(f"#sdy.sharding<@{_MESH}, [{dims}]>")
    constraint = ir.Operation.create(
        "sdy.sharding_constraint",
        [value.type],
        [value],
        {"sharding": attribute},
        loc=location,
        ip=point,
    )
    return constraint.operation


def _shardings_in(call: Any) -> list[str]:
    """The shardings in the attributes of a custom call. Each is a text with the mesh
    axes of each dimension.
    """
    texts = []
    if "mhlo.frontend_attributes" in call.attributes:
        attributes = ir.DictAttr(call.attributes["mhlo.frontend_attributes"])
        for name in _SAID:
            if name in attributes:
                texts.append(ir.StringAttr(attributes[name]).value)
    if not texts and "mhlo.sharding" in call.attributes:
        texts.append(ir.StringAttr(call.attributes["mhlo.sharding"]).value)
    dims: list[str] = []
    for text in texts:
        dims += [dims_text.replace("'", '"') for dims_text in _DIMS.findall(text)]
    return dims
