"""Convolutions and pooling: sums and reductions over windows."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import attribute, reducer_of
from .held import Axis, Context, Held, product_of_terms, require_finished
from .joining import constant_number, different, form_in, is_identity
from .matching import are_same, matched_operands, placed
from .products import contracted_cut, cut_of, with_sums
from .values import Node
from .verdict import Unjudged, Wrong
from .windows import Window, window_of, windowed_cut


def convolution(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    for operand in operands:
        if operand.terms is not None and operand.kind != "add":
            require_finished(operand, "convolution")
    fault: Wrong | None = None
    reason: Unjudged | None = None
    for number, seen in matched_operands(context, instruction, operands):
        try:
            return _convolved(context, instruction, seen, number)
        except Wrong as error:
            fault = error if are_same(seen, operands) else fault
        except Unjudged as error:
            reason = error
    if fault is not None and reason is None:
        raise fault
    if reason is not None:
        raise reason
    raise Unjudged("no convolution of the whole program has these operands")


class _Labels:
    """The dimensions of a convolution's operands and result by their letters."""

    def __init__(self, instruction: Instruction):
        operands, self.out = attribute(instruction, "dim_labels").split("->")
        self.image, self.kernel = operands.split("_")
        self.spatial = sorted(letter for letter in self.out if letter.isdigit())


class _Groups(NamedTuple):
    """How many groups a convolution makes of its features, and of its batch."""

    features: int
    batch: int


def _groups(instruction: Instruction) -> _Groups:
    features = attribute(instruction, "feature_group_count") or "1"
    batch = attribute(instruction, "batch_group_count") or "1"
    return _Groups(features=int(features), batch=int(batch))


def _convolved(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    number: int,
) -> Held:
    image, kernel = operands
    shape = arrays_in(instruction.result)[0].shape
    labels = _Labels(instruction)
    node = context.values.nodes[number]
    assert node.instruction is not None
    cuts: dict[str, Cut | None] = {}
    terms = None
    rank = len(labels.out)
    windows = (
        window_of(instruction, len(labels.spatial)),
        window_of(node.instruction, len(labels.spatial)),
    )
    if _groups(node.instruction) == (1, 1) == _groups(instruction):
        axes = [
            _features(context, image, kernel, labels),
            kernel.axes[labels.kernel.index("i")],
        ]
        size = node.operands[0].shape[labels.image.index("f")]
        if axes != [None, None]:
            cut = contracted_cut(context, operands, axes, labels.image.index("f"))
            terms = context.cuts.terms(cut, size)
        elif image.shape[labels.image.index("f")] != size:
            raise Unjudged("a convolution of broadcasts")
        cuts["b"] = cut_of(image.axes[labels.image.index("b")])
        cuts["f"] = cut_of(kernel.axes[labels.kernel.index("o")])
    else:
        terms = _grouped(context, instruction, operands, node, labels, cuts)
    for number_of_window, letter in enumerate(labels.spatial):
        places = labels.image.index(letter), labels.kernel.index(letter)
        cut, part = _spatial(
            context,
            (image, kernel),
            places,
            (windows[0][number_of_window], windows[1][number_of_window]),
            node,
            (
                shape[labels.out.index(letter)],
                _known_size(node.shape[labels.out.index(letter)]),
            ),
        )
        cuts[letter] = cut
        terms = product_of_terms(context.everywhere, terms, part)
    ordered = [cuts[labels.out[dim]] for dim in range(rank)]
    form = form_in(context, instruction, operands, shape)
    held = placed(context, form, instruction, shape, ordered, number)
    return with_sums(context, held, operands, terms, Fraction(1), None)


def _features(
    context: Context,
    image: Held,
    kernel: Held,
    labels: _Labels,
) -> Axis | None:
    """The features of an image. A device that slides over zeros alone, since no
    neighbour sends it a row, has any features: each term of its sums is zero.
    """
    axis = image.axes[labels.image.index("f")]
    other = kernel.axes[labels.kernel.index("i")]
    if axis is None or other is None or image.fill != 0:
        return axis
    slides_over_nothing = np.zeros(context.devices, bool)
    for letter in labels.spatial:
        rows = image.axes[labels.image.index(letter)]
        if rows is not None:
            slides_over_nothing |= (rows.cut.starts == HOLE).all(axis=1)
    if axis.cut.lengths != other.cut.lengths or axis.cut.step != other.cut.step:
        return axis
    starts = np.where(slides_over_nothing[:, None], other.cut.starts, axis.cut.starts)
    return Axis(axis.dim, context.cuts.made(axis.cut.lengths, starts, axis.cut.step))


def _known_size(size: int | None) -> int:
    if size is None:
        raise Unjudged("a dimension of unknown size")
    return size


def _grouped(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
    labels: _Labels,
    cuts: dict[str, Cut | None],
) -> tuple[int, ...] | None:
    """The terms of a convolution in groups, and the cuts of its batch and features.

    With groups of features, group g of the image's features makes group g of the
    result's. With groups of the batch, group g of the image's batch does. Both may be
    cut into whole groups alike.
    """
    image, kernel = operands
    assert node.instruction is not None
    local = _groups(instruction)
    whole = _groups(node.instruction)
    is_batch = whole.batch > 1
    # A convolution in groups of features is none in groups of the batch.
    if is_batch:
        letter = "b"
        count = whole.batch
        local_count = local.batch
        others = (whole.features, local.features)
    else:
        letter = "f"
        count = whole.features
        local_count = local.features
        others = (whole.batch, local.batch)
    if others != (1, 1):
        raise Unjudged("a convolution in groups of two kinds")
    image_dim = labels.image.index(letter)
    beside = labels.kernel.index("o")
    shapes = node.operands[0].shape[image_dim], node.operands[1].shape[beside]
    axes = image.axes[image_dim], kernel.axes[beside]
    if axes[0] is None or axes[1] is None:
        raise Unjudged("a convolution, in groups, of broadcasts")
    sizes = [size // count for size in shapes]
    firsts = []
    for cut, size in zip((axes[0].cut, axes[1].cut), sizes, strict=True):
        if len(cut.lengths) > 1 or cut.has_holes or cut.step != 1:
            raise Unjudged("a convolution in groups that are cut")
        if (cut.starts % size).any() or cut.size != local_count * size:
            raise Unjudged("a convolution in groups that are cut")
        firsts.append(cut.starts[:, 0] // size)
    if (firsts[0] != firsts[1]).any():
        raise different("convolution", image_dim, axes[0].cut, axes[1].cut)
    cuts["f"] = axes[1].cut
    if is_batch:
        per_group = sizes[0]
        cuts["b"] = context.cuts.whole(per_group)
        if per_group != _known_size(node.shape[labels.out.index("b")]):
            raise Unjudged("a convolution in groups of the batch")
        features = labels.image.index("f"), labels.kernel.index("i")
        pair = [image.axes[features[0]], kernel.axes[features[1]]]
        if pair == [None, None]:
            raise Unjudged("a convolution of broadcasts")
        cut = contracted_cut(context, operands, pair, features[0])
        return context.cuts.terms(cut, node.operands[0].shape[features[0]])
    cuts["b"] = cut_of(image.axes[labels.image.index("b")])
    inner = labels.kernel.index("i")
    axis = kernel.axes[inner]
    if kernel.shape[inner] != node.operands[1].shape[inner]:
        raise Unjudged("a convolution in groups that are cut")
    if axis is not None and not context.cuts.is_whole(axis.cut, kernel.shape[inner]):
        raise Unjudged("a convolution in groups that are cut")
    return None


def _spatial(
    context: Context,
    operands: tuple[Held, Held],
    places: tuple[int, int],
    windows: tuple[Window, Window],
    node: Node,
    sizes: tuple[int, int],
) -> tuple[Cut | None, tuple[int, ...] | None]:
    """The cut of a spatial dimension of the result, and the terms of the sum over the
    window.
    """
    image, kernel = operands
    image_dim, beside = places
    local, whole = windows
    image_size, kernel_size = (
        node.operands[0].shape[image_dim],
        node.operands[1].shape[beside],
    )
    axis, taps = image.axes[image_dim], kernel.axes[beside]
    is_whole = (
        image.shape[image_dim] == image_size
        and (axis is None or context.cuts.is_whole(axis.cut, image_size))
        and kernel.shape[beside] == kernel_size
        and (taps is None or context.cuts.is_whole(taps.cut, kernel_size))
    )
    if is_whole and local == whole:
        return context.cuts.whole(sizes[0]), None
    if axis is None:
        if image.shape[image_dim] != 1 or image_size != 1:
            raise Unjudged("a convolution of a broadcast along its window")
        axis = Axis(0, context.cuts.whole(1))
    if axis.cut.has_holes and image.fill != 0:
        raise Unjudged("a convolution over padding")
    if taps is not None and taps.cut.has_holes and kernel.fill != 0:
        raise Unjudged("a convolution over padding")
    kernel_cut = context.cuts.whole(kernel_size) if taps is None else taps.cut
    if taps is None and kernel.shape[beside] != kernel_size:
        raise Unjudged("a convolution of a broadcast along its window")
    return windowed_cut(
        context.cuts,
        (context.cuts.indices(axis.cut), context.cuts.indices(kernel_cut)),
        windows,
        (image_size, kernel_size),
        sizes,
    )


def reduce_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    operand, start = operands
    require_finished(start, "reduce-window")
    how = reducer_of(context.module, instruction)
    if operand.terms is not None and not (how == operand.kind == "add"):
        require_finished(operand, "reduce-window")
    shape = arrays_in(instruction.result)[0].shape
    reason = Unjudged("no reduction of the whole program has these operands")
    for number, seen in matched_operands(context, instruction, operands):
        try:
            return _reduced_window(context, instruction, seen, number, how, shape)
        except Unjudged as error:
            reason = error
    raise reason


def _reduced_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    number: int,
    how: str,
    shape: tuple[int, ...],
) -> Held:
    operand, start = operands
    node = context.values.nodes[number]
    assert node.instruction is not None
    rank = len(shape)
    dtype = arrays_in(instruction.result)[0].dtype
    local, whole = window_of(instruction, rank), window_of(node.instruction, rank)
    cuts: list[Cut | None] = []
    for dim in range(rank):
        axis, size = operand.axes[dim], node.operands[0].shape[dim]
        if local[dim].is_trivial and whole[dim].is_trivial:
            cuts.append(cut_of(axis))
            continue
        if axis is None or context.cuts.is_whole(axis.cut, size):
            if operand.shape[dim] != size or local[dim] != whole[dim]:
                raise Unjudged("a window over a broadcast")
            cuts.append(context.cuts.whole(shape[dim]))
            continue
        if axis.cut.has_holes and not is_identity(operand.fill, how, dtype):
            raise Unjudged("a window over padding")
        # The window's own padding has this number.
        if not is_identity(constant_number(start), how, dtype):
            raise Unjudged("a window that starts with another number")
        taps = context.cuts.whole(whole[dim].size)
        cut, part = windowed_cut(
            context.cuts,
            (context.cuts.indices(axis.cut), context.cuts.indices(taps)),
            (local[dim], whole[dim]),
            (size, whole[dim].size),
            (shape[dim], _known_size(node.shape[dim])),
        )
        if part is not None:
            raise Unjudged("a window over parts")
        cuts.append(cut)
    form = form_in(context, instruction, operands, shape)
    held = placed(context, form, instruction, shape, cuts, number)
    return dataclasses.replace(
        held,
        terms=operand.terms,
        kind=operand.kind,
        scale=operand.scale,
    )
