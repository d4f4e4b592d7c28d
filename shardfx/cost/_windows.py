"""The loops of products and permutes that libtpu makes of a product beside a
collective.

Where XLA's partitioner gathers an operand of a product, or sums its result and keeps a
slice, libtpu's makes a loop (a windowed einsum, `EmitWindowedDotGeneral` in
xla/service/spmd/dot_handler.cc): each step sends pieces in a ring and multiplies those
that it has. An operand that several operations read is gathered once, in one piece.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from .._step import Instruction, array_of
from ._work import flops_of


# A step of a loop multiplies a piece of each direction of the ring.
_PIECES_AT_ONCE = 2
# The least floating-point operations of a product for each byte that is gathered or
# summed: what a v5e computes at its peak while its four links send a byte. In programs
# that libtpu partitioned for a v5e, products with 2,048 and 4,096 are loops, and
# products with 8 and less are not.
_LEAST_FLOPS_PER_BYTE = 1000
_BATCH = re.compile(r"rhs_batch_dims=\{([\d,]*)\}")
_GATHERED_DIM = re.compile(r"dimensions=\{(\d+)\}")
_CONTRACTED = (
    re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"),
    re.compile(r"rhs_contracting_dims=\{([\d,]*)\}"),
)


class Window(NamedTuple):
    """A loop in the place of a matrix product.

    - `operand`: the number of the operand that is in pieces.
    - `pieces`: the number of pieces, one of each device of a replica group.
    - `piece_size`: the size of one piece in the dimension that is divided.
    - `is_contracted`: whether the product sums over this dimension, so that each step
      adds to the whole result.
    - `bytes`: the bytes of all pieces.
    """

    operand: int
    pieces: int
    piece_size: int
    is_contracted: bool
    bytes: float

    @property
    def steps(self) -> int:
        """The number of products that the loop runs."""
        return math.ceil(self.pieces / _PIECES_AT_ONCE)


def windows_of(computation: Mapping[str, Instruction]) -> dict[str, Window]:
    """The loops that libtpu makes of a computation of a partitioned program, by the
    names of the products.
    """
    readers: dict[str, list[Instruction]] = {name: [] for name in computation}
    for instruction in computation.values():
        for operand in instruction.operands:
            readers[operand].append(instruction)
    windows: dict[str, Window] = {}
    for name, instruction in computation.items():
        if instruction.opcode != "dot":
            continue
        window = _summed(instruction, computation, readers)
        for number, operand in enumerate(instruction.operands):
            if window is None and len(readers[operand]) == 1:
                window = _gathered(instruction, number, computation)
        if window is None or window.pieces == 1:
            continue
        if flops_of(computation, instruction) >= _LEAST_FLOPS_PER_BYTE * window.bytes:
            windows[name] = window
    return windows


def _gathered(
    product: Instruction,
    number: int,
    computation: Mapping[str, Instruction],
) -> Window | None:
    """The loop of a product whose operand of this number is gathered; `None` if no
    all-gather makes it.
    """
    gather = computation[product.operands[number]]
    match = _GATHERED_DIM.search(gather.attributes)
    if gather.opcode != "all-gather" or len(gather.operands) != 1 or match is None:
        return None
    dim = int(match[1])
    piece_size = array_of(computation[gather.operands[0]]).shape[dim]
    return Window(
        operand=number,
        pieces=array_of(gather).shape[dim] // piece_size,
        piece_size=piece_size,
        is_contracted=dim in _dims_in(_CONTRACTED[number], product),
        bytes=float(array_of(gather).bytes),
    )


def _summed(
    product: Instruction,
    computation: Mapping[str, Instruction],
    readers: Mapping[str, list[Instruction]],
) -> Window | None:
    """The loop of a product whose result is summed over devices, each of which keeps a
    slice of it; `None` if it is not.
    """
    shard = product
    for opcode in ("all-reduce", "dynamic-slice"):
        if len(readers[shard.name]) != 1:
            return None
        (shard,) = readers[shard.name]
        if shard.opcode != opcode:
            return None
    shape = array_of(product).shape
    shard_shape = array_of(shard).shape
    divided = [dim for dim, size in enumerate(shape) if size != shard_shape[dim]]
    if len(divided) != 1:
        return None
    (dim,) = divided
    # The dimensions of the right operand are the last ones of the result.
    right = array_of(computation[product.operands[1]]).shape
    summed_dims = _dims_in(_CONTRACTED[1], product) + _dims_in(_BATCH, product)
    is_of_right = dim >= len(shape) - (len(right) - len(summed_dims))
    return Window(
        operand=int(is_of_right),
        pieces=shape[dim] // shard_shape[dim],
        piece_size=shard_shape[dim],
        is_contracted=False,
        bytes=float(array_of(product).bytes),
    )


def _dims_in(pattern: re.Pattern[str], product: Instruction) -> list[int]:
    """The dimensions that an attribute of a product names."""
    match = pattern.search(product.attributes)
    if match is None:
        return []
    return [int(dim) for dim in match[1].split(",") if dim]
