"""Operations that move elements along a dimension: slices, pads, concatenations and
reverses, as maps from the indices of an operand to those of the result.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut
from .forms import attribute, numbers
from .held import Context, Number
from .values import Node, scalar_constant


@dataclasses.dataclass(frozen=True)
class Move:
    """Index i of the operand is index `(i - start) / stride * spread + offset` of the
    result. `padding` is the number in the result's other elements; `None` if there are
    none or it is not known. `operand_size` is the size of the operand, beyond which an
    index is none of it; 0 if the size of the result says so. With
    `reversed_size`, the size of a dimension that is reversed, index i is index
    `reversed_size - 1 - i`.
    """

    start: int = 0
    stride: int = 1
    spread: int = 1
    offset: int = 0
    padding: Number | None = None
    operand_size: int = 0
    reversed_size: int = 0

    @property
    def is_same(self) -> bool:
        """Whether each index stays as it is."""
        is_moved = self.start or self.offset or self.reversed_size
        return not is_moved and self.stride == 1 and self.spread == 1

    def applied(
        self,
        context: Context,
        cut: Cut,
        size: int,
        fill: Number | None,
    ) -> Cut:
        """The cut of the result, a dimension of `size`, from that of the operand. Holes
        that hold `fill`, the number of the padding, become elements of the padding.
        """
        cuts = context.cuts
        is_continued = self.padding is not None and fill == self.padding
        are_holes_kept = not (is_continued and cut.has_holes)
        operand_size = self.operand_size or size
        is_within = _is_within(cut, min(size, operand_size))
        if self.is_same and are_holes_kept and is_within:
            return cut
        indices = cuts.indices(cut)
        is_element = indices != HOLE
        if self.operand_size:
            is_element &= indices < self.operand_size
        if self.reversed_size:
            moved = self.reversed_size - 1 - indices
        else:
            distances = indices - self.start
            is_element &= distances % self.stride == 0
            moved = distances // self.stride * self.spread + self.offset
        is_element &= (moved >= 0) & (moved < size)
        moved = np.where(is_element, moved, HOLE)
        if is_continued:
            moved = continued(moved, indices == HOLE, size, self)
        return cuts.from_indices(moved)


def _is_within(cut: Cut, size: int) -> bool:
    """Whether all elements of a cut are in a dimension of this size."""
    starts = cut.starts
    spans = (np.array(cut.lengths, np.int64) - 1) * cut.step
    lowest = np.minimum(starts, starts + spans)
    highest = np.maximum(starts, starts + spans)
    return bool(((starts == HOLE) | ((lowest >= 0) & (highest < size))).all())


def continued(
    moved: np.ndarray,
    are_holes: np.ndarray,
    size: int,
    move: Move,
) -> np.ndarray:
    """The indices `moved` of a padded array, an array (devices, positions), where holes
    that hold the padding's number and continue the elements of a device are elements of
    the padding. `are_holes` says which were holes before, and `size` is that of the
    padded array.
    """
    positions = np.arange(moved.shape[1])
    continued_indices = np.full(moved.shape, HOLE)
    for device, device_indices in enumerate(moved):
        # A device's elements are neighbours if each is as far from its position.
        shifts = (device_indices - positions)[device_indices != HOLE]
        if len(shifts) and (shifts == shifts[0]).all():
            continued_indices[device] = positions + shifts[0]
    # The padded array has elements of the operand at these places, and padding between.
    distances = continued_indices - move.offset
    is_operand = (distances >= 0) & (distances < move.operand_size * move.spread)
    is_operand &= distances % move.spread == 0
    is_padding = (
        are_holes & (continued_indices >= 0) & (continued_indices < size) & ~is_operand
    )
    return np.where(is_padding, continued_indices, moved)


def _slice_move(context: Context, node: Node, number: int, dim: int) -> Move | None:
    """The move of the operand of a slice along dimension `dim`."""
    bounds = slice_bounds(_instruction(node))[dim]
    return Move(start=bounds.start, stride=bounds.stride)


class SliceBounds(NamedTuple):
    """The bounds of one dimension of a slice."""

    start: int
    limit: int
    stride: int


class Padding(NamedTuple):
    """The padding of one dimension: at both ends, and between two elements."""

    low: int
    high: int
    interior: int


def slice_bounds(instruction: Instruction) -> list[SliceBounds]:
    """The bounds of each dimension of a slice, from its attribute: "{[0:4],
    [1:8:2]}".
    """
    text = attribute(instruction, "slice")[1:-1]
    bounds = []
    for part in text.replace("[", "").split("],"):
        start, limit, *strides = map(int, part.rstrip("]").strip(", ").split(":"))
        stride = strides[0] if strides else 1
        bounds.append(SliceBounds(start=start, limit=limit, stride=stride))
    return bounds


def padding_of(instruction: Instruction) -> list[Padding]:
    """The padding of each dimension of a pad, from its attribute: "0_1x2_2_1"."""
    paddings = []
    for part in attribute(instruction, "padding").split("x"):
        low, high, *interiors = map(int, part.split("_"))
        interior = interiors[0] if interiors else 0
        paddings.append(Padding(low=low, high=high, interior=interior))
    return paddings


def pad_move(context: Context, node: Node, number: int, dim: int) -> Move | None:
    """The move along dimension `dim` of operand `number` of a pad; `None` for operand
    1, the number of the padding.
    """
    if number != 0:
        return None
    low, high, interior = padding_of(_instruction(node))[dim]
    if not (low or high or interior):
        return Move()
    padding_node = context.values.nodes[node.operands[1].view.root]
    return Move(
        spread=interior + 1,
        offset=low,
        padding=scalar_constant(padding_node),
        operand_size=node.operands[0].shape[dim],
    )


def _instruction(node: Node) -> Instruction:
    """The instruction of a node of the whole program."""
    assert node.instruction is not None
    return node.instruction


def _concatenate_move(
    context: Context,
    node: Node,
    number: int,
    dim: int,
) -> Move | None:
    """The move of operand `number` of a concatenation along dimension `dim`."""
    (along,) = numbers(_instruction(node), "dimensions")
    if dim != along:
        return Move()
    size_before = sum(operand.shape[dim] for operand in node.operands[:number])
    return Move(offset=size_before, operand_size=node.operands[number].shape[dim])


def _reverse_move(context: Context, node: Node, number: int, dim: int) -> Move | None:
    """The move of the operand of a reverse along dimension `dim`."""
    if dim not in numbers(_instruction(node), "dimensions"):
        return Move()
    size = node.shape[dim]
    return None if size is None else Move(reversed_size=size)


# For each operation that moves elements, how those of operand `number` of a node move
# along dimension `dim` of its result; `None` if that is not known.
MOVES_BY_OPCODE = {
    "slice": _slice_move,
    "pad": pad_move,
    "concatenate": _concatenate_move,
    "reverse": _reverse_move,
}
