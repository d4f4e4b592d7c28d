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
    - `windows`: for a convolution, StableHLO's `dimension_numbers`: its batch, feature
      and window dimensions.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    factors: Factors
    times: float
    flops: float
    location: tuple[ir.Location, ...]
    counted: tuple[tuple[int, int], ...] = ()
    windows: Any = None


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
    return jnp.dtype(
        {"bf": "bfloat", "f": "float"}[name.rstrip("0123456789")] + name.lstrip("bf")
    )


Shape = tuple[int, ...]
# The shapes of an operation's operands, or of its results.
Shapes = Sequence[Shape]
RULE = "sdy.sharding_rule"


@ft.lru_cache(maxsize=4096)
def of_rule(rule: ir.Attribute) -> Factors:
    """The sharding rule of an operation, from the MLIR attribute in which Shardy writes
    it.
    """
    read = sdy.OpShardingRuleAttr(rule)
    return Factors(
        tuple(read.factor_sizes),
        _mapped(read.operand_mappings),
        _mapped(read.result_mappings),
        frozenset(read.reduction_factors),
        frozenset((*read.need_replication_factors, *read.permutation_factors)),
    )


def _mapped(mappings: Iterable[ir.Attribute]) -> FactorDims:
    read = map(sdy.TensorMappingAttr, mappings)
    return tuple(
        tuple(
            tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in tensor.dim_mappings
        )
        for tensor in read
    )


def elementwise(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of an elementwise operation. Each dimension of the results has
    the same factor as this dimension of operands of the same shape. The dimensions of
    other operands must be replicated.
    """
    shape = outs[0]
    same = tuple((dim,) for dim in range(len(shape)))
    others = len(shape)
    sizes, dims = list(shape), []
    for sizes_of_array in (*ins, *outs):
        if sizes_of_array == shape:
            dims.append(same)
        else:
            dims.append(tuple((others + dim,) for dim in range(len(sizes_of_array))))
            others += len(sizes_of_array)
            sizes += sizes_of_array
    replicated = frozenset(range(len(shape), others))
    return Factors(
        tuple(sizes),
        tuple(dims[: len(ins)]),
        tuple(dims[len(ins) :]),
        replicated=replicated,
    )


def identity(shape: Shape, arrays: int = 2) -> Factors:
    """The sharding rule of an operation that passes an array on unchanged. Its operands
    and its result, `arrays` arrays in total, have one shape and the same factors.
    """
    dims = tuple((dim,) for dim in range(len(shape)))
    return Factors(shape, (dims,) * (arrays - 1), (dims,))


def opaque(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of an unknown operation. Each dimension has its own factor,
    which must be replicated, so a sharded operand is gathered.
    """
    sizes: list[int] = []
    dims = []
    for shape in (*ins, *outs):
        dims.append(tuple((len(sizes) + dim,) for dim in range(len(shape))))
        sizes += shape
    whole = frozenset(range(len(sizes)))
    return Factors(
        tuple(sizes), tuple(dims[: len(ins)]), tuple(dims[len(ins) :]), replicated=whole
    )


def _top_k(ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of a top-k. The last dimension must be replicated, and is
    shorter in the results.
    """
    dims = tuple((dim,) for dim in range(len(ins[0])))
    return Factors(
        ins[0], (dims,), (dims,) * len(outs), replicated=frozenset({len(dims) - 1})
    )


def _ragged_dot(operation: Op, ins: Shapes, outs: Shapes) -> Factors:
    """The sharding rule of a `ragged_dot`, which multiplies each group of rows by the
    matrix of the group. If the groups are sharded, the result is unreduced: a device
    computes the rows of its own groups, and zeros for all others.
    """
    text = str(operation.attributes["ragged_dot_dimension_numbers"])
    asked = {
        name: [int(dim) for dim in dims.split(",") if dim]
        for name, dims in re.findall(r"(\w+) = \[([\d, ]*)\]", text)
    }
    both = [
        asked.get(f"{side}_{kind}_dimensions", [])
        for side in ("lhs", "rhs")
        for kind in ("batching", "contracting")
    ]
    grouped = asked.get("rhs_group_dimensions", [])
    left_dims = list(range(len(ins[0])))
    right = [-1] * len(ins[1])
    for mine, its in (
        *zip(both[0], both[2], strict=True),
        *zip(both[1], both[3], strict=True),
    ):
        right[its] = mine
    group, sizes = len(left_dims), [*ins[0], ins[2][-1]]
    for dim in grouped:
        right[dim] = group
    for dim in range(len(right)):
        if right[dim] < 0:
            right[dim] = len(sizes)
            sizes.append(ins[1][dim])
    free = [dim for dim in left_dims if dim not in both[0] + both[1]]
    own_of_right = [factor for factor in right if factor > group]
    out = [*([] if grouped else [group]), *both[0], *free, *own_of_right]
    if [sizes[factor] for factor in out] != list(outs[0]) or len(ins[2]) != 1:
        return opaque(ins, outs)
    dims = [
        tuple((factor,) for factor in array_dims)
        for array_dims in (left_dims, right, [group], out)
    ]
    summed = frozenset([*both[1], group] if grouped else both[1])
    return Factors(tuple(sizes), tuple(dims[:3]), (dims[3],), summed)


def without_rule(operation: Op, name: str, ins: Shapes, outs: Shapes) -> Factors | None:
    """The sharding rule of an operation for which Shardy has none, such as a top-k;
    `None` if it is not known.
    """
    if name == "chlo.top_k":
        return _top_k(ins, outs)
    if name == "chlo.ragged_dot":
        return _ragged_dot(operation, ins, outs)
    # The other operations of `chlo`, StableHLO's client dialect, are elementwise.
    return elementwise(ins, outs) if name.startswith("chlo.") and ins else None


def flops_of(
    name: str, operation: Op, factors: Factors, ins: Shapes, outs: Shapes
) -> float:
    """The floating-point operations of a matrix product ("dot_general") or convolution;
    0 for other operations.
    """
    if name == "convolution":
        numbers = stablehlo.ConvDimensionNumbers(
            operation.attributes["dimension_numbers"]
        )
        return (
            2.0
            * math.prod(outs[0])
            * math.prod(ins[1])
            / max(1, ins[1][numbers.kernel_output_feature_dimension])
        )
    if name == "ragged_dot":
        # Each row belongs to one group.
        return 2.0 * math.prod(factors.sizes) / max(1, ins[2][-1])
    return 2.0 * math.prod(factors.sizes) if name in ("dot_general", "dot") else 0.0
