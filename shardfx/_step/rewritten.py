"""Operations that libtpu writes as others before it propagates shardings and partitions.

XLA's partitioner on a host knows neither the largest values nor Fourier transforms, and gathers what they read. libtpu
has made sorts or custom calls of the former (`topk_decomposer.cc`, `topk_rewriter.cc` in `xla/hlo/transforms` and
`xla/service`), and products of the latter. Read off the programs behind each pass of libtpu 0.0.42 for v5e.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from .lowered import bytecode


# The largest values of a matrix are a custom call where it has so many columns for each of them. By 34 programs the
# border lies between 68 and 73.
_COLUMNS = 70
# The names of operations as they stand in bytecode.
_WORDS = (b"top_k", b"fft")


def rewritten(module: bytes, context: Any) -> bytes:
    """The bytecode of a StableHLO module with these operations as libtpu writes them."""
    if not any(word in module for word in _WORDS):
        return module
    with context, ir.Location.unknown(context):
        parsed = ir.Module.parse(module)
        found: list[Any] = []

        def look(op: Any) -> Any:
            if op.name in _FORMS:
                found.append(op)
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(look)
        for op in found:
            with ir.InsertionPoint(op), op.location:
                for old, new in zip(op.results, _FORMS[op.name](op), strict=True):
                    old.replace_all_uses_with(new)
            op.erase()
        return bytecode(parsed)


def _top_k(op: Any) -> list[Any]:
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
        return list(call.results)
    numbers = ir.RankedTensorType.get(shape, indices.element_type)
    places = stablehlo.IotaOp(numbers, ir.IntegerAttr.get(_integer(), len(shape) - 1)).result
    ordered = stablehlo.SortOp([kind, numbers], [operand, places], dimension=len(shape) - 1)
    scalars = [ir.RankedTensorType.get([], one.element_type) for one in (kind, kind, numbers, numbers)]
    block = ordered.regions[0].blocks.append(*scalars)
    with ir.InsertionPoint(block):
        first, other = block.arguments[:2]
        before = stablehlo.CompareOp(first, other, stablehlo.ComparisonDirectionAttr.get("GT"))
        stablehlo.ReturnOp([before.result])
    stop = [*shape[:-1], count]
    return [stablehlo.slice(one, [0] * len(shape), stop, [1] * len(shape)) for one in ordered.results]


def _fft(op: Any) -> list[Any]:
    """A product with a matrix for each dimension; what the matrices hold is no matter."""
    value, made = op.operands[0], ir.RankedTensorType(op.results[0].type)
    kind = str(op.attributes["fft_type"])
    count = len(ir.DenseI64ArrayAttr(op.attributes["fft_length"]))
    rank, real = made.rank, isinstance(made.element_type, ir.F32Type | ir.F64Type)
    dims = range(rank - 1, rank - 1 - count, -1)
    for dim in dims if "IRFFT" not in kind else reversed(dims):
        length = made.shape[dim]
        if isinstance(ir.RankedTensorType(value.type).element_type, ir.ComplexType):
            value = _product(value, dim, length)
        else:
            value = stablehlo.ComplexOp(_product(value, dim, length), _product(value, dim, length)).result
    return [stablehlo.RealOp(value).result if real else value]


def _product(value: Any, dim: int, length: int) -> Any:
    """The product of a dimension with a matrix, in full precision; the dimension stays where it is."""
    kind = ir.RankedTensorType(value.type)
    shape, rank = list(kind.shape), kind.rank
    matrix = stablehlo.IotaOp(
        ir.RankedTensorType.get([shape[dim], length], kind.element_type), ir.IntegerAttr.get(_integer(), 1)
    ).result
    rest = [at for at in range(rank) if at != dim]
    product = stablehlo.DotGeneralOp(
        ir.RankedTensorType.get([*(shape[at] for at in rest), length], kind.element_type),
        value,
        matrix,
        stablehlo.DotDimensionNumbers.get([], [], [dim], [0]),
        precision_config=ir.ArrayAttr.get([stablehlo.PrecisionAttr.get("HIGHEST")] * 2),
    ).result
    order = [*range(dim), rank - 1, *range(dim, rank - 1)]
    return stablehlo.transpose(product, order) if dim < rank - 1 else product


def _integer() -> Any:
    return ir.IntegerType.get_signless(64)


_FORMS: dict[str, Callable[[Any], list[Any]]] = {"chlo.top_k": _top_k, "stablehlo.fft": _fft}
