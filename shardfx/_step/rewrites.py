"""Rewrites of a module that libtpu makes before it propagates shardings and partitions
the module.

XLA's partitioner on a host makes none of them. libtpu rewrites a top-k into a sort or a
custom call (`topk_decomposer.cc`, `topk_rewriter.cc`), a Fourier transform into
products, a complex product into three real products, and a roll of one array of a stack
into the maximum of two padded slices. A stack is an array of arrays along dimension 0,
such as the weights of all layers. libtpu also merges equal operations. These rewrites
were read off the programs after each pass of libtpu 0.0.42 for v5e
(`XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_pass_re=.*"`).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from .lowered import Op, bytecode, maker, operations


# libtpu makes a custom call of a top-k if the number of columns divided by k is at
# least this. In 34 programs, the limit is between 68 and 73.
_COLUMNS = 70


def rewritten(module: bytes, context: ir.Context) -> bytes:
    """The bytecode of a StableHLO module after the rewrites that libtpu makes."""
    with context, ir.Location.unknown(context):
        parsed = ir.Module.parse(module)
        _inline_rolls(parsed)
        for op in [op for op in operations(parsed) if op.name in _REWRITES]:
            is_other, written = _REWRITES[op.name]
            if not is_other(op):
                continue
            with ir.InsertionPoint(op), op.location:
                for old, new in zip(op.results, written(op), strict=True):
                    old.replace_all_uses_with(new)
            op.erase()
        passmanager.PassManager.parse("builtin.module(func.func(cse))").run(
            parsed.operation
        )
        return bytecode(parsed)


def _inline_rolls(module: ir.Module) -> None:
    """Inlines the calls of `jnp.roll` in the module. libtpu inlines all calls first,
    and rewrites some rolls.
    """
    functions = {
        ir.StringAttr(one.attributes["sym_name"]).value: one
        for one in module.body.operations
    }
    calls = [op for op in operations(module) if op.name == "func.call"]
    for call in [op for op in calls if _called(op).startswith("_roll_static")]:
        block = functions[_called(call)].regions[0].blocks[0]
        known = dict(zip(block.arguments, call.operands, strict=True))
        *body, last = (one.operation for one in block.operations)
        for inner in body:
            made = ir.Operation.create(
                inner.name,
                results=[one.type for one in inner.results],
                operands=[known[one] for one in inner.operands],
                attributes={name: inner.attributes[name] for name in inner.attributes},
                loc=call.location,
                ip=ir.InsertionPoint(call),
            )
            known |= dict(zip(inner.results, made.results, strict=True))
        for old, new in zip(call.results, last.operands, strict=True):
            old.replace_all_uses_with(known[new])
        call.erase()


def _called(call: Op) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _is_first_rows(op: Op) -> bool:
    """Whether an operation slices the first rows of one array of a stack."""
    outer = _sliced(op.operands[0])
    if outer is None:
        return False
    shape, inner, made = (
        list(ir.RankedTensorType(one.type).shape)
        for one in (outer.results[0], op.operands[0], op.results[0])
    )
    starts = [*ir.DenseI64ArrayAttr(op.attributes["start_indices"])]
    return shape == [1, *inner] and not any(starts) and made[1:] == inner[1:]


def _sliced(value: ir.Value) -> Op | None:
    """The slice operation whose reshaped result is `value`; `None` if another operation
    made the value.
    """
    reshape = maker(value, "reshape")
    return None if reshape is None else maker(reshape.operands[0], "slice")


def _first_rows(op: Op) -> list[ir.Value]:
    """One slice of a stack, and a reshape. They replace two slices: one takes an array
    from the stack, and `op` takes the first rows of this array.
    """
    outer = _sliced(op.operands[0])
    assert outer is not None
    names = ("start_indices", "limit_indices", "strides")
    start, stop, step = (
        [*ir.DenseI64ArrayAttr(outer.attributes[name])] for name in names
    )
    stop[1] = start[1] + ir.RankedTensorType(op.results[0].type).shape[0]
    return [
        stablehlo.reshape(
            op.results[0].type, stablehlo.slice(outer.operands[0], start, stop, step)
        )
    ]


def _is_row_concatenation(op: Op) -> bool:
    """Whether a concatenation has two operands, one or both sliced from a stack. XLA
    would partition it as a roll.
    """
    return len(op.operands) == 2 and any(
        _sliced(one) is not None for one in op.operands
    )


def _row_concatenation(op: Op) -> list[ir.Value]:
    """The elementwise maximum of a concatenation's operands, each padded to the whole
    shape with -inf (integers: 0).
    """
    made = ir.RankedTensorType(op.results[0].type)
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    least = stablehlo.ConstantOp(
        ir.DenseElementsAttr.get_splat(
            ir.RankedTensorType.get([], made.element_type), _least(made.element_type)
        )
    )
    parts, before = [], 0
    for operand in op.operands:
        size = ir.RankedTensorType(operand.type).shape[dim]
        low, high = [0] * made.rank, [0] * made.rank
        low[dim], high[dim] = before, made.shape[dim] - before - size
        parts.append(stablehlo.pad(operand, least.result, low, high, [0] * made.rank))
        before += size
    return [stablehlo.MaxOp(*parts).result]


def _top_k(op: Op) -> list[ir.Value]:
    operand, made = op.operands[0], [one.type for one in op.results]
    kind = ir.RankedTensorType(operand.type)
    shape, (largest, indices) = list(kind.shape), map(ir.RankedTensorType, made)
    count = largest.shape[-1]
    is_float = isinstance(kind.element_type, ir.F32Type | ir.BF16Type)
    if len(shape) == 2 and is_float and shape[1] >= _COLUMNS * count:
        call = ir.Operation.create(
            "stablehlo.custom_call",
            results=made,
            operands=[operand],
            attributes={"call_target_name": ir.StringAttr.get("TopK")},
        )
        values, places = call.results
        # XLA's partitioner drops the locations of operations that only the step's
        # result reads.
        return [values, stablehlo.AddOp(places, places).result]
    numbers = ir.RankedTensorType.get(shape, indices.element_type)
    places = stablehlo.IotaOp(numbers, _integer(len(shape) - 1)).result
    ordered = stablehlo.SortOp(
        [kind, numbers], [operand, places], dimension=len(shape) - 1
    )
    scalars = [
        ir.RankedTensorType.get([], one.element_type)
        for one in (kind, kind, numbers, numbers)
    ]
    block = ordered.regions[0].blocks.append(*scalars)
    with ir.InsertionPoint(block):
        first, other = block.arguments[:2]
        before = stablehlo.CompareOp(
            first, other, stablehlo.ComparisonDirectionAttr.get("GT")
        )
        stablehlo.ReturnOp([before.result])
    stop = [*shape[:-1], count]
    return [
        stablehlo.slice(one, [0] * len(shape), stop, [1] * len(shape))
        for one in ordered.results
    ]


def _fft(op: Op) -> list[ir.Value]:
    """A Fourier transform as one matrix product per dimension. The matrices have
    arbitrary values, since only their shapes change the partitioning.
    """
    value, made = op.operands[0], ir.RankedTensorType(op.results[0].type)
    kind = str(op.attributes["fft_type"])
    lengths = list(ir.DenseI64ArrayAttr(op.attributes["fft_length"]))
    dims = range(made.rank - len(lengths), made.rank)
    if "IRFFT" in kind:
        value = _resized(value, made.rank - 1, lengths[-1])
    for dim in dims if "IRFFT" in kind else reversed(dims):
        value = _by_matrix(value, dim)
        value = _resized(value, dim, made.shape[dim])
    return [stablehlo.RealOp(value).result if "IRFFT" in kind else value]


def _by_matrix(value: ir.Value, dim: int) -> ir.Value:
    """The complex product of an array with a square matrix along dimension `dim`, at
    the highest precision.
    """
    kind = ir.RankedTensorType(value.type)
    size, rank = kind.shape[dim], kind.rank
    shape = [*(one for at, one in enumerate(kind.shape) if at != dim), size]
    numbers = stablehlo.DotDimensionNumbers.get([], [], [dim], [0])
    precision = ir.ArrayAttr.get([stablehlo.PrecisionAttr.get("HIGHEST")] * 2)

    along = itertools.cycle([0, 1])

    def by(part: ir.Value) -> ir.Value:
        element = ir.RankedTensorType(part.type).element_type
        matrix = stablehlo.IotaOp(
            ir.RankedTensorType.get([size, size], element), _integer(next(along))
        ).result
        made = ir.RankedTensorType.get(shape, element)
        return stablehlo.DotGeneralOp(
            made, part, matrix, numbers, precision_config=precision
        ).result

    if _is_complex(value):
        product = _three_products(value, by)
    else:
        product = stablehlo.ComplexOp(by(value), by(value)).result
    order = [*range(dim), rank - 1, *range(dim, rank - 1)]
    return stablehlo.transpose(product, order) if dim < rank - 1 else product


def _complex_dot(op: Op) -> list[ir.Value]:
    """A matrix product of complex arrays as three real matrix products."""
    left, right = op.operands
    made = ir.RankedTensorType(op.results[0].type)
    parts = iter(
        [_added(right), stablehlo.RealOp(right).result, stablehlo.ImagOp(right).result]
    )
    kind = ir.RankedTensorType.get(
        made.shape, ir.ComplexType(made.element_type).element_type
    )
    named = {
        name: op.attributes[name]
        for name in ("dot_dimension_numbers", "precision_config")
        if name in op.attributes
    }

    def by(part: ir.Value) -> ir.Value:
        operands = [part, next(parts)]
        return ir.Operation.create(
            op.name, results=[kind], operands=operands, attributes=named
        ).results[0]

    return [_three_products(left, by)]


def _three_products(value: ir.Value, by: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """The complex matrix product of `value` and another operand, from three real ones,
    which `by` computes. `by` gets the sums of the real and imaginary parts of `value`,
    then the real parts, then the imaginary parts. It multiplies them by the same parts
    of the other operand.
    """
    whole = by(_added(value))
    real, imaginary = (
        by(stablehlo.RealOp(value).result),
        by(stablehlo.ImagOp(value).result),
    )
    return stablehlo.ComplexOp(
        stablehlo.SubtractOp(whole, imaginary).result,
        stablehlo.AddOp(whole, real).result,
    ).result


def _is_complex(value: ir.Value) -> bool:
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.ComplexType)


def _added(value: ir.Value) -> ir.Value:
    return stablehlo.AddOp(
        stablehlo.RealOp(value).result, stablehlo.ImagOp(value).result
    ).result


def _resized(value: ir.Value, dim: int, size: int) -> ir.Value:
    """An array with dimension `dim` truncated to `size`, or extended to `size` by a
    copy of its beginning.
    """
    shape = list(ir.RankedTensorType(value.type).shape)
    if shape[dim] == size:
        return value
    stop = [
        (
            min(size, abs(size - one))
            if at == dim and size > one
            else size
            if at == dim
            else one
        )
        for at, one in enumerate(shape)
    ]
    part = stablehlo.slice(value, [0] * len(shape), stop, [1] * len(shape))
    return part if size < shape[dim] else stablehlo.concatenate([value, part], dim)


def _is_iota_column(op: Op) -> bool:
    iota, kind = maker(op.operands[0], "iota"), ir.RankedTensorType(op.results[0].type)
    if iota is None or str(kind.element_type) != "i32":
        return False
    return (
        math.prod(kind.shape)
        == max(kind.shape)
        == ir.RankedTensorType(iota.results[0].type).shape[0]
    )


def _iota_column(op: Op) -> list[ir.Value]:
    """A constant with the numbers of a reshaped iota. XLA's partitioner does not follow
    an iota through a reshape.
    """
    kind = ir.RankedTensorType(op.results[0].type)
    numbers: Any = np.arange(max(kind.shape), dtype=np.int32).reshape(kind.shape)
    return [stablehlo.ConstantOp(ir.DenseElementsAttr.get(numbers)).result]


def _is_index_wrap(op: Op) -> bool:
    """Whether a `select` tests if an iota is negative, as JAX does to allow negative
    indices.
    """
    test = maker(op.operands[0], "compare")
    if test is None or "LT" not in str(test.attributes["comparison_direction"]):
        return False
    tested, bound = test.operands
    while (spread := maker(bound, "broadcast_in_dim")) is not None:
        bound = spread.operands[0]
    zero = maker(bound, "constant")
    is_zero = zero is not None and "dense<0>" in str(zero.attributes["value"])
    return is_zero and tested == op.operands[2] and maker(tested, "iota") is not None


def _least(element: ir.Type) -> ir.Attribute:
    return (
        ir.FloatAttr.get(element, -math.inf)
        if isinstance(element, ir.FloatType)
        else ir.IntegerAttr.get(element, 0)
    )


def _integer(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


# By the name of an operation: a test whether libtpu rewrites it, and the function that
# does.
_REWRITES: dict[str, tuple[Callable[[Op], bool], Callable[[Op], list[ir.Value]]]] = {
    "chlo.top_k": (lambda op: True, _top_k),
    "stablehlo.fft": (lambda op: True, _fft),
    "stablehlo.dot_general": (lambda op: _is_complex(op.results[0]), _complex_dot),
    "stablehlo.broadcast_in_dim": (_is_iota_column, _iota_column),
    "stablehlo.slice": (_is_first_rows, _first_rows),
    "stablehlo.concatenate": (_is_row_concatenation, _row_concatenation),
    "stablehlo.select": (_is_index_wrap, lambda op: [op.operands[2]]),
}
