"""Operations of which each device computes the whole, along the dimensions that they
do not treat element by element: sorts, searches for an extremum, and all that have no
rule of their own.
"""

from collections.abc import Sequence

from ..hlo_text import Instruction, arrays_in
from .choices import part_of
from .cuts import Cut
from .forms import numbers
from .held import Axis, Context, Held, require_finished
from .joining import form_in, joined_cut
from .matching import matched_operands, placed
from .values import Node
from .verdict import Unjudged
from .windows import Window, window_of


def whole_operation(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held | tuple[Held, ...]:
    """Any other operation is right where each device computes the whole of it; a sort,
    also where its other dimensions are cut.
    """
    results = arrays_in(instruction.result)
    for operand in operands:
        require_finished(operand, instruction.opcode)
    matched = matched_operands(context, instruction, operands)
    for number, seen in matched:
        node = context.values.nodes[number]
        if node.instruction is None:
            continue
        axes = _whole_cuts(context, instruction, seen, node)
        if axes is None:
            continue
        shape = results[0].shape
        found = form_in(context, instruction, seen, shape)
        if not instruction.result.startswith("("):
            return placed(context, found, instruction, shape, axes, number)
        parts = []
        for place, array in enumerate(results):
            cuts: list[Cut | None] = axes
            if len(axes) != len(array.shape):
                cuts = [context.cuts.whole(size) for size in array.shape]
            parts.append(part_of(context, instruction, found, place, cuts, array.shape))
        return tuple(parts)
    raise Unjudged(f"no rule for this {instruction.opcode}")


def _whole_cuts(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
) -> list[Cut | None] | None:
    """The cuts of the results, if each device computes the whole along each dimension
    that the operation does not treat element by element, or window by window.
    """
    shape = arrays_in(instruction.result)[0].shape
    free: set[int] = set()
    tiled: dict[int, int] = {}
    if instruction.opcode == "sort":
        free = set(range(len(shape))) - set(numbers(instruction, "dimensions"))
    if instruction.opcode == "custom-call" and "TopK" in instruction.attributes:
        free = set(range(len(shape) - 1))
    if instruction.opcode == "select-and-scatter":
        assert node.instruction is not None
        windows = window_of(instruction, len(shape))
        if windows != window_of(node.instruction, len(shape)):
            return None
        # A dimension along which windows have one element is treated by element.
        free = {at for at, window in enumerate(windows) if window.is_trivial}
        tiled = _tiled(windows, node)
    cuts: list[Cut | None] = []
    for at, size in enumerate(shape):
        axes = [operand.axes[at] for operand in operands if operand.shape]
        if at in free:
            cut = joined_cut(context, instruction.opcode, at, axes)
            if cut is None and size == node.shape[at]:
                cut = context.cuts.whole(size)
            cuts.append(cut)
        elif _are_whole(context, operands, node, at):
            cuts.append(context.cuts.whole(size))
        elif at in tiled and (cut := _cut_in_tiles(axes, tiled[at])) is not None:
            cuts.append(cut)
        else:
            return None
    if not free and not tiled and shape != node.shape:
        return None
    return cuts


def _are_whole(context: Context, operands: Sequence[Held], node: Node, at: int) -> bool:
    for operand, array in zip(operands, node.operands, strict=True):
        if at >= len(array.shape):
            continue
        axis, size = operand.axes[at], array.shape[at]
        if operand.shape[at] != size:
            return False
        if axis is not None and not context.cuts.is_whole(axis.cut, size):
            return False
    return True


def _tiled(windows: Sequence[Window], node: Node) -> dict[int, int]:
    """The dimensions that the windows of a `select-and-scatter` divide into tiles, with
    the size of a tile.
    """
    image, source = node.operands[0].shape, node.operands[1].shape
    tiled = {}
    for at, window in enumerate(windows):
        tile = Window(window.size, window.size, 0, 0, 1, 1, False)
        if window == tile and image[at] == source[at] * window.size:
            tiled[at] = window.size
    return tiled


def _cut_in_tiles(axes: Sequence[Axis | None], tile: int) -> Cut | None:
    """The cut of an image that is cut into whole tiles, as the tiles' array is; `None`
    for other cuts.
    """
    image, source = axes
    if image is None or source is None:
        return None
    cuts = (image.cut, source.cut)
    if any(len(cut.lengths) != 1 or cut.has_holes or cut.step != 1 for cut in cuts):
        return None
    if (image.cut.starts != source.cut.starts * tile).any():
        return None
    return image.cut if image.cut.size == source.cut.size * tile else None
