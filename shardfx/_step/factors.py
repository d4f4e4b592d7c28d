"""The operations of a lowered step over numbered values, each with the factors of its
dimensions.

A factor is a dimension of an operation's sharding rule. For a matrix product, the
factors are the rows, the columns and the contracted dimension. Shardy's rules are in
`op_sharding_rule_registry.cc` of openxla/shardy; the pass
`sdy-populate-op-sharding-rules` of the installed jaxlib writes them. This file has
those of further operations.
"""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from .._ground.spec import DType, bits
from .lowered import ArraySharding, Op


# The factors of each dimension of each array, the major-most first.
FactorDims = tuple[tuple[tuple[int, ...], ...], ...]


class Factors(NamedTuple):
    """An operation's sharding rule, as Shardy defines it. Dimensions with a common
    factor have the same sharding.

    A dimension of size 12 with the factors 3 and 4 is a reshape of two dimensions of
    these sizes. A dimension that is shorter than the product of its factors is a slice.

    - `sizes`: the size of each factor.
    - `ins`, `outs`: the factors of the operands and of the results.
    - `reduction`: the factors that the operation sums over, or along which it looks up
      elements. If one of them is sharded, the result is unreduced: the devices' results
      must be summed.
    - `replicated`: the factors that must be replicated, or whose shards must be
      permuted.
    """

    sizes: tuple[int, ...]
    ins: FactorDims
    outs: FactorDims
    reduction: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class StepValue:
    """One array of the step. `free` is true if the array is computed from constants and
    scalars only, so that every device can compute any shard of it. `sharding` is what
    Shardy propagated; `None` if Shardy has not run.
    """

    shape: tuple[int, ...]
    dtype: DType
    free: bool = False
    sharding: ArraySharding | None = None

    @property
    def bytes(self) -> float:
        return float(math.prod(self.shape)) * bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step.

    - `name`: StableHLO's name, or one of four others. "carry" passes an array into a
      loop or out of a branch. "return" passes the result of one iteration to the next;
      its operands are that result, and the value that the iteration received. "use"
      marks the arrays that a loop reads until it ends. "opaque" is an unknown
      operation.
    - `ins`, `outs`: the numbers of its operands and of its results.
    - `factors`: the operation's sharding rule.
    - `times`: how often it runs in one step.
    - `flops`: for matrix products and convolutions, the floating-point operations of
      one run.
    - `location`: the source lines of the operation and of the calls around it, the
      innermost first.
    - `counted`: pairs of a dimension of the first operand that a loop counter indexes,
      and the counter's number.
    - `dimension_numbers`: StableHLO's attribute of a convolution, with its batch,
      feature and window dimensions; `None` for other operations.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    factors: Factors
    times: float
    flops: float
    location: tuple[ir.Location, ...]
    counted: tuple[tuple[int, int], ...] = ()
    dimension_numbers: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The operations of a whole step.

    - `values`: the arrays of the step. The number of an array is its position in this
      list.
    - `operations`: the operations, in the order of the program.
    - `arguments`, `results`: the numbers of the arrays that the step takes and returns.
    - `notes`: a sentence for each kind of operation that is not modelled exactly, and
      how often it occurs.
    """

    values: list[StepValue]
    operations: list[Operation]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    notes: dict[str, int]


_COMPLEX = {"complex<f32>": "complex64", "complex<f64>": "complex128"}
_FLOATS = {"bf": "bfloat", "f": "float"}


@ft.lru_cache(maxsize=128)
def dtype_of(name: str) -> DType:
    """The dtype for the name of an MLIR element type, such as "bf16", "ui8" or
    "f8E4M3FN".
    """
    if name == "i1":
        return jnp.dtype("bool")
    if name in _COMPLEX:
        return jnp.dtype(_COMPLEX[name])
    if match := re.fullmatch(r"(u?)i(\d+)", name):
        return jnp.dtype(f"{match[1]}int{match[2]}")
    if match := re.fullmatch(r"f(\d+)(E.*)", name):
        return jnp.dtype(f"float{match[1]}_{match[2].lower()}")
    kind = _FLOATS[name.rstrip("0123456789")]
    width = name.lstrip("bf")
    return jnp.dtype(kind + width)


Shape = tuple[int, ...]
# The shapes of an operation's operands, or of its results.
Shapes = Sequence[Shape]
RULE = "sdy.sharding_rule"


@ft.lru_cache(maxsize=4096)
def of_rule(rule: ir.Attribute) -> Factors:
    """The sharding rule of an operation, from the MLIR attribute in which Shardy writes
    it.
    """
    attribute = sdy.OpShardingRuleAttr(rule)
    replicated = {
        *attribute.need_replication_factors,
        *attribute.permutation_factors,
    }
    return Factors(
        sizes=tuple(attribute.factor_sizes),
        ins=_mapped(attribute.operand_mappings),
        outs=_mapped(attribute.result_mappings),
        reduction=frozenset(attribute.reduction_factors),
        replicated=frozenset(replicated),
    )


def _mapped(mappings: Iterable[ir.Attribute]) -> FactorDims:
    """The factors of each dimension of each array, from Shardy's mappings."""
    arrays = []
    for mapping in map(sdy.TensorMappingAttr, mappings):
        dims = map(sdy.DimMappingAttr, mapping.dim_mappings)
        arrays.append(tuple(tuple(dim.factor_indices) for dim in dims))
    return tuple(arrays)


def _one_each(start: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """The factors of each dimension of an array of this rank, one for each: ((3,),
    (4,)) for the rank 2, from factor 3 on.
    """
    return tuple((factor,) for factor in range(start, start + rank))


def elementwise(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of an elementwise operation. Each dimension of the results has
    the same factor as this dimension of operands of the same shape. The dimensions of
    other operands must be replicated.
    """
    shape = outs[0]
    sizes = list(shape)
    dims = []
    for other_shape in (*ins, *outs):
        if other_shape == shape:
            dims.append(_one_each(0, len(shape)))
        else:
            dims.append(_one_each(len(sizes), len(other_shape)))
            sizes += other_shape
    return Factors(
        sizes=tuple(sizes),
        ins=tuple(dims[: len(ins)]),
        outs=tuple(dims[len(ins) :]),
        replicated=frozenset(range(len(shape), len(sizes))),
    )


def identity(shape: Shape, arrays: int = 2) -> Factors:
    """The sharding rule of an operation that passes an array on unchanged. Its operands
    and its result, `arrays` arrays in total, have one shape and the same factors.
    """
    dims = _one_each(0, len(shape))
    return Factors(sizes=shape, ins=(dims,) * (arrays - 1), outs=(dims,))


def opaque(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of an unknown operation. Each dimension has its own factor,
    which must be replicated, so a sharded operand is gathered.
    """
    sizes: list[int] = []
    dims = []
    for shape in (*ins, *outs):
        dims.append(_one_each(len(sizes), len(shape)))
        sizes += shape
    return Factors(
        sizes=tuple(sizes),
        ins=tuple(dims[: len(ins)]),
        outs=tuple(dims[len(ins) :]),
        replicated=frozenset(range(len(sizes))),
    )


def _top_k(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of a top-k. The last dimension must be replicated, and is
    shorter in the results.
    """
    shape = ins[0]
    dims = _one_each(0, len(shape))
    return Factors(
        sizes=shape,
        ins=(dims,),
        outs=(dims,) * len(outs),
        replicated=frozenset([len(shape) - 1]),
    )


def _ragged_dot(operation: Op, ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of a `ragged_dot`, which multiplies each group of rows by the
    matrix of the group. If the groups are sharded, the result is unreduced: a device
    computes the rows of its own groups, and zeros for all others.
    """
    left, right, groups = ins
    dimension_numbers = _RaggedNumbers(operation)
    left_factors = list(range(len(left)))
    # The factor of the groups comes after those of the left operand.
    group_factor = len(left)
    sizes = [*left, groups[-1]]
    factor_of_dim: dict[int, int] = {}
    for left_dim, right_dim in dimension_numbers.pairs:
        factor_of_dim[right_dim] = left_dim
    for dim in dimension_numbers.grouped:
        factor_of_dim[dim] = group_factor
    columns = []
    for dim, size in enumerate(right):
        if dim not in factor_of_dim:
            factor_of_dim[dim] = len(sizes)
            columns.append(len(sizes))
            sizes.append(size)
    right_factors = [factor_of_dim[dim] for dim in range(len(right))]

    paired = {left_dim for left_dim, _ in dimension_numbers.pairs}
    rows = [factor for factor in left_factors if factor not in paired]
    out_factors = [*dimension_numbers.batch, *rows, *columns]
    if not dimension_numbers.grouped:
        out_factors = [group_factor, *out_factors]
    if [sizes[factor] for factor in out_factors] != list(outs[0]) or len(groups) != 1:
        return opaque(ins, outs)
    reduction = set(dimension_numbers.contracted)
    if dimension_numbers.grouped:
        reduction.add(group_factor)
    dims = []
    for factors in (left_factors, right_factors, [group_factor], out_factors):
        dims.append(tuple((factor,) for factor in factors))
    return Factors(
        sizes=tuple(sizes),
        ins=tuple(dims[:3]),
        outs=(dims[3],),
        reduction=frozenset(reduction),
    )


class _RaggedNumbers:
    """The dimension numbers of a `ragged_dot`.

    - `batch`, `contracted`: the batch and the contracted dimensions of the left
      operand.
    - `pairs`: each of these, with the dimension of the right operand to which it
      corresponds.
    - `grouped`: the dimensions of the right operand over groups.
    """

    def __init__(self, operation: Op):
        text = str(operation.attributes["ragged_dot_dimension_numbers"])
        numbers: dict[str, list[int]] = {}
        for name, dims in re.findall(r"(\w+) = \[([\d, ]*)\]", text):
            numbers[name] = [int(dim) for dim in dims.split(",") if dim]
        self.batch = numbers.get("lhs_batching_dimensions", [])
        self.contracted = numbers.get("lhs_contracting_dimensions", [])
        right_batch = numbers.get("rhs_batching_dimensions", [])
        right_contracted = numbers.get("rhs_contracting_dimensions", [])
        self.pairs = [
            *zip(self.batch, right_batch, strict=True),
            *zip(self.contracted, right_contracted, strict=True),
        ]
        self.grouped = numbers.get("rhs_group_dimensions", [])


def factors_without_rule(
    operation: Op,
    name: str,
    ins: Shapes,
    outs: Shapes,
) -> Factors | None:
    """The sharding rule of an operation for which Shardy has none, such as a top-k;
    `None` if it is not known.
    """
    if name == "chlo.top_k":
        return _top_k(ins, outs)
    if name == "chlo.ragged_dot":
        return _ragged_dot(operation, ins, outs)
    if name.startswith("chlo.") and ins:
        # The other operations of `chlo`, StableHLO's client dialect, are elementwise.
        return elementwise(ins, outs)
    return None


def flops_of(
    name: str,
    operation: Op,
    factors: Factors,
    ins: Shapes,
    outs: Shapes,
) -> float:
    """The floating-point operations of a matrix product ("dot_general") or convolution;
    0 for other operations.
    """
    if name == "convolution":
        dims = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        kernel = ins[1]
        channels = max(1, kernel[dims.kernel_output_feature_dimension])
        return 2.0 * math.prod(outs[0]) * math.prod(kernel) / channels
    if name == "ragged_dot":
        # Each row belongs to one group.
        groups = max(1, ins[2][-1])
        return 2.0 * math.prod(factors.sizes) / groups
    if name in ("dot_general", "dot"):
        return 2.0 * math.prod(factors.sizes)
    return 0.0
