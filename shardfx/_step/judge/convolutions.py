"""Convolutions: sums over features and over windows."""

import functools as ft
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .cuts import HOLE, Cut
from .forms import attribute
from .held import Axis, Context, Held, cut_of, product_of_terms, require_finished
from .joining import (
    disagreement,
)
from .matching import held_result, judged_match
from .products import contracted_cut, with_sums
from .values import Node
from .verdict import Unjudged
from .windows import (
    WindowedCut,
    WindowedDim,
    known_size,
    window_of,
    windowed_cut,
)


def convolution(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a convolution."""
    for operand in operands:
        if operand.terms is not None and operand.reducer != "add":
            require_finished(operand, "convolution")
    rule = ft.partial(_convolved, context, instruction)
    return judged_match(context, instruction, operands, rule)


class _Labels:
    """The dimensions of a convolution's operands and result by their letters: the batch
    `b` and the features `f` of image and result, the input features `i` and the output
    features `o` of the kernel, and a digit for each spatial dimension.
    """

    def __init__(self, instruction: Instruction):
        operands, self.out = attribute(instruction, "dim_labels").split("->")
        self.image, self.kernel = operands.split("_")
        self.spatial = sorted(letter for letter in self.out if letter.isdigit())


class _Groups(NamedTuple):
    """How many groups a convolution makes of its features, and of its batch."""

    features: int
    batch: int


def _groups(instruction: Instruction) -> _Groups:
    """The numbers of groups in the attributes of a convolution."""
    features = attribute(instruction, "feature_group_count") or "1"
    batch = attribute(instruction, "batch_group_count") or "1"
    return _Groups(features=int(features), batch=int(batch))


class _SpatialDim(NamedTuple):
    """A spatial dimension of a convolution.

    - `image`, `kernel`: its place among the dimensions of the image and of the kernel.
    - `local`, `whole`: the dimension on one device and in the whole program.
    """

    image: int
    kernel: int
    local: WindowedDim
    whole: WindowedDim


def _spatial_dims(
    labels: _Labels,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
) -> dict[str, _SpatialDim]:
    """The spatial dimensions of a convolution by their letters. `node` is its value in
    the whole program.
    """
    assert node.instruction is not None
    image, kernel = operands
    shape = arrays_in(instruction.result)[0].shape
    spatial_count = len(labels.spatial)
    local_windows = window_of(instruction, spatial_count)
    whole_windows = window_of(node.instruction, spatial_count)
    dims: dict[str, _SpatialDim] = {}
    for window_number, letter in enumerate(labels.spatial):
        image_dim = labels.image.index(letter)
        kernel_dim = labels.kernel.index(letter)
        result_dim = labels.out.index(letter)
        dims[letter] = _SpatialDim(
            image=image_dim,
            kernel=kernel_dim,
            local=WindowedDim(
                window=local_windows[window_number],
                image_size=image.shape[image_dim],
                kernel_size=kernel.shape[kernel_dim],
                result_size=shape[result_dim],
            ),
            whole=WindowedDim(
                window=whole_windows[window_number],
                image_size=node.operands[0].shape[image_dim],
                kernel_size=node.operands[1].shape[kernel_dim],
                result_size=known_size(node.shape[result_dim]),
            ),
        )
    return dims


def _convolved(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
) -> Held:
    """The result of a convolution as the value `value_number` of the whole program. A
    sum over features or over a window that is cut is unfinished.
    """
    image, kernel = operands
    labels = _Labels(instruction)
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    # The cuts of the result's dimensions by their letters.
    cuts: dict[str, Cut | None] = {}
    if _groups(node.instruction) == (1, 1) == _groups(instruction):
        terms = _terms_of_features(context, operands, labels, node)
        cuts["b"] = _batch(context, image, labels)
        cuts["f"] = cut_of(kernel.axes[labels.kernel.index("o")])
    else:
        terms = _grouped(
            context=context,
            instruction=instruction,
            operands=operands,
            node=node,
            labels=labels,
            cuts=cuts,
        )
    for letter, dim in _spatial_dims(labels, instruction, operands, node).items():
        windowed = _spatial(context, operands, dim)
        cuts[letter] = windowed.cut
        terms = product_of_terms(context.everywhere, terms, windowed.terms)
    ordered_cuts = [cuts[letter] for letter in labels.out]
    held = held_result(
        context, instruction, operands, ordered_cuts, value_number=value_number
    )
    return with_sums(
        context=context,
        held=held,
        operands=operands,
        terms=terms,
        scale=Fraction(1),
        fill=None,
    )


def _terms_of_features(
    context: Context,
    operands: Sequence[Held],
    labels: _Labels,
    node: Node,
) -> tuple[int, ...] | None:
    """The terms of the sum over the input features, as in `Held.terms`; `None` if each
    device has all. `node` is the value of the convolution.
    """
    image, kernel = operands
    image_dim = labels.image.index("f")
    axes = [
        _features(context, image, kernel, labels),
        kernel.axes[labels.kernel.index("i")],
    ]
    size = node.operands[0].shape[image_dim]
    if axes == [None, None]:
        if image.shape[image_dim] != size:
            raise Unjudged("a convolution of broadcasts")
        return None
    cut = contracted_cut(context, operands, axes, image_dim)
    return context.cuts.terms(cut, size)


def _features(
    context: Context,
    image: Held,
    kernel: Held,
    labels: _Labels,
) -> Axis | None:
    """The axis of the features of an image. A device that slides over zeros alone,
    since no neighbour sends it a row, has any features, such as those of its kernel:
    each term of its sums is zero.
    """
    axis = image.axes[labels.image.index("f")]
    kernel_axis = kernel.axes[labels.kernel.index("i")]
    if axis is None or kernel_axis is None or image.fill != 0:
        return axis
    slides_over_nothing = _slide_over_nothing(context, image, labels)
    if (
        axis.cut.lengths != kernel_axis.cut.lengths
        or axis.cut.step != kernel_axis.cut.step
    ):
        return axis
    starts = np.where(
        slides_over_nothing[:, None], kernel_axis.cut.starts, axis.cut.starts
    )
    return Axis(
        axis.dim, context.cuts.from_segments(axis.cut.lengths, starts, axis.cut.step)
    )


def _batch(context: Context, image: Held, labels: _Labels) -> Cut | None:
    """The cut of the batch of an image. A device that slides over zeros alone has that
    of the others, if they have one: its sums are zero for any.
    """
    axis = image.axes[labels.image.index("b")]
    if axis is None or image.fill != 0 or not axis.cut.has_holes:
        return cut_of(axis)
    slides_over_nothing = _slide_over_nothing(context, image, labels)
    other_starts = axis.cut.starts[~slides_over_nothing]
    if not len(other_starts) or (other_starts != other_starts[:1]).any():
        return axis.cut
    starts = np.where(slides_over_nothing[:, None], other_starts[:1], axis.cut.starts)
    return context.cuts.from_segments(axis.cut.lengths, starts, axis.cut.step)


def _slide_over_nothing(context: Context, image: Held, labels: _Labels) -> np.ndarray:
    """Which devices have no row of an image: in one of its spatial dimensions, all
    positions are holes. A mask of devices.
    """
    have_nothing = np.zeros(context.devices, bool)
    for letter in labels.spatial:
        axis = image.axes[labels.image.index(letter)]
        if axis is not None:
            have_nothing |= (axis.cut.starts == HOLE).all(axis=1)
    return have_nothing


def _grouped(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    node: Node,
    labels: _Labels,
    cuts: dict[str, Cut | None],
) -> tuple[int, ...] | None:
    """The terms of a convolution in groups. Writes the cuts of its batch and of its
    features into `cuts`, by letter.

    With groups of features, group g of the image's features makes group g of the
    result's. With groups of the batch, group g of the image's batch does. Both may be
    cut into whole groups alike.
    """
    image, kernel = operands
    assert node.instruction is not None
    local_groups = _groups(instruction)
    whole_groups = _groups(node.instruction)
    # A convolution in groups of features is none in groups of the batch.
    if whole_groups.batch > 1:
        letter = "b"
        counts = _Counts(local=local_groups.batch, whole=whole_groups.batch)
        other_counts = _Counts(local=local_groups.features, whole=whole_groups.features)
    else:
        letter = "f"
        counts = _Counts(local=local_groups.features, whole=whole_groups.features)
        other_counts = _Counts(local=local_groups.batch, whole=whole_groups.batch)
    if other_counts != (1, 1):
        raise Unjudged("a convolution in groups of two kinds")
    cuts["f"] = _cut_into_groups(
        operands=operands,
        node=node,
        labels=labels,
        letter=letter,
        counts=counts,
    )
    input_dim = labels.kernel.index("i")
    if letter == "b":
        per_group = (
            node.operands[0].shape[labels.image.index("b")] // whole_groups.batch
        )
        cuts["b"] = context.cuts.whole(per_group)
        if per_group != known_size(node.shape[labels.out.index("b")]):
            raise Unjudged("a convolution in groups of the batch")
        image_dim = labels.image.index("f")
        axes = [image.axes[image_dim], kernel.axes[input_dim]]
        if axes == [None, None]:
            raise Unjudged("a convolution of broadcasts")
        cut = contracted_cut(context, operands, axes, image_dim)
        return context.cuts.terms(cut, node.operands[0].shape[image_dim])
    cuts["b"] = cut_of(image.axes[labels.image.index("b")])
    axis = kernel.axes[input_dim]
    size = kernel.shape[input_dim]
    if size != node.operands[1].shape[input_dim]:
        raise Unjudged("a convolution in groups that are cut")
    if axis is not None and not context.cuts.is_whole(axis.cut, size):
        raise Unjudged("a convolution in groups that are cut")
    return None


class _Counts(NamedTuple):
    """How many groups there are on one device, and in the whole program."""

    local: int
    whole: int


def _cut_into_groups(
    operands: Sequence[Held],
    node: Node,
    labels: _Labels,
    letter: str,
    counts: _Counts,
) -> Cut:
    """The cut of the result's features, which is that of the kernel's output features.
    Each device has to have the same whole groups of them and of the image's dimension
    `letter`, "f" or "b". `counts` has the numbers of groups.
    """
    image, kernel = operands
    image_dim = labels.image.index(letter)
    output_dim = labels.kernel.index("o")
    image_axis = image.axes[image_dim]
    output_axis = kernel.axes[output_dim]
    if image_axis is None or output_axis is None:
        raise Unjudged("a convolution, in groups, of broadcasts")
    sizes = (node.operands[0].shape[image_dim], node.operands[1].shape[output_dim])
    # The first group of each device, in the image and in the output features.
    first_groups = []
    for cut, size in zip((image_axis.cut, output_axis.cut), sizes, strict=True):
        group_size = size // counts.whole
        if len(cut.lengths) > 1 or cut.has_holes or cut.step != 1:
            raise Unjudged("a convolution in groups that are cut")
        if (cut.starts % group_size).any() or cut.size != counts.local * group_size:
            raise Unjudged("a convolution in groups that are cut")
        first_groups.append(cut.starts[:, 0] // group_size)
    if (first_groups[0] != first_groups[1]).any():
        raise disagreement("convolution", image_dim, image_axis.cut, output_axis.cut)
    return output_axis.cut


def _spatial(
    context: Context,
    operands: Sequence[Held],
    dim: _SpatialDim,
) -> WindowedCut:
    """The cut of the spatial dimension `dim` of the result, and the terms of the sum
    over its window.
    """
    image, kernel = operands
    local = dim.local
    whole = dim.whole
    image_axis = image.axes[dim.image]
    kernel_axis = kernel.axes[dim.kernel]
    is_image_whole = local.image_size == whole.image_size and (
        image_axis is None or context.cuts.is_whole(image_axis.cut, whole.image_size)
    )
    is_kernel_whole = local.kernel_size == whole.kernel_size and (
        kernel_axis is None or context.cuts.is_whole(kernel_axis.cut, whole.kernel_size)
    )
    if is_image_whole and is_kernel_whole and local.window == whole.window:
        return WindowedCut(context.cuts.whole(local.result_size), None)
    image_cut = cut_of(image_axis)
    if image_cut is None:
        if local.image_size != 1 or whole.image_size != 1:
            raise Unjudged("a convolution of a broadcast along its window")
        image_cut = context.cuts.whole(1)
    if image_cut.has_holes and image.fill != 0:
        raise Unjudged("a convolution over padding")
    if kernel_axis is not None and kernel_axis.cut.has_holes and kernel.fill != 0:
        raise Unjudged("a convolution over padding")
    kernel_cut = cut_of(kernel_axis)
    if kernel_cut is None:
        if local.kernel_size != whole.kernel_size:
            raise Unjudged("a convolution of a broadcast along its window")
        kernel_cut = context.cuts.whole(whole.kernel_size)
    return windowed_cut(
        cuts=context.cuts,
        image_cut=image_cut,
        kernel_cut=kernel_cut,
        local=local,
        whole=whole,
    )
