"""Convolutions and pooling: sums and reductions over windows."""

import functools as ft
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction, arrays_in, root_of
from .cuts import HOLE, Cut
from .forms import attribute, reducer_of
from .held import Axis, Context, Held, cut_of, product_of_terms, require_finished
from .joining import (
    constant_number,
    disagreement,
    is_identity,
    joined_cut,
)
from .matching import held_result, judged_match
from .products import contracted_cut, with_sums
from .values import Node
from .verdict import Unjudged
from .windows import Window, scattered_cut, window_of, windowed_cut


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
    """A spatial dimension of a convolution, on one device and in the whole program.

    - `image`, `kernel`: its place among the dimensions of the image and of the kernel.
    - `local_window`, `whole_window`: the window along it.
    - `local_size`, `whole_size`: the size of the result along it.
    """

    image: int
    kernel: int
    local_window: Window
    whole_window: Window
    local_size: int
    whole_size: int


def _spatial_dims(
    labels: _Labels,
    instruction: Instruction,
    node: Node,
) -> dict[str, _SpatialDim]:
    """The spatial dimensions of a convolution by their letters. `node` is its value in
    the whole program.
    """
    assert node.instruction is not None
    shape = arrays_in(instruction.result)[0].shape
    spatial_count = len(labels.spatial)
    local_windows = window_of(instruction, spatial_count)
    whole_windows = window_of(node.instruction, spatial_count)
    dims: dict[str, _SpatialDim] = {}
    for window_number, letter in enumerate(labels.spatial):
        place = labels.out.index(letter)
        dims[letter] = _SpatialDim(
            image=labels.image.index(letter),
            kernel=labels.kernel.index(letter),
            local_window=local_windows[window_number],
            whole_window=whole_windows[window_number],
            local_size=shape[place],
            whole_size=_known_size(node.shape[place]),
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
    for letter, dim in _spatial_dims(labels, instruction, node).items():
        cuts[letter], terms_of_window = _spatial(context, operands, dim, node)
        terms = product_of_terms(context.everywhere, terms, terms_of_window)
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


def _known_size(size: int | None) -> int:
    """The size of a dimension of a value; raises `Unjudged` if it is not known."""
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
        if per_group != _known_size(node.shape[labels.out.index("b")]):
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
    node: Node,
) -> tuple[Cut | None, tuple[int, ...] | None]:
    """The cut of the spatial dimension `dim` of the result, and the terms of the sum
    over its window; `None` if each device has all of them. `node` is the value of the
    convolution.
    """
    image, kernel = operands
    image_size = node.operands[0].shape[dim.image]
    kernel_size = node.operands[1].shape[dim.kernel]
    axis = image.axes[dim.image]
    kernel_axis = kernel.axes[dim.kernel]
    is_whole = (
        image.shape[dim.image] == image_size
        and (axis is None or context.cuts.is_whole(axis.cut, image_size))
        and kernel.shape[dim.kernel] == kernel_size
        and (kernel_axis is None or context.cuts.is_whole(kernel_axis.cut, kernel_size))
    )
    if is_whole and dim.local_window == dim.whole_window:
        return context.cuts.whole(dim.local_size), None
    if axis is None:
        if image.shape[dim.image] != 1 or image_size != 1:
            raise Unjudged("a convolution of a broadcast along its window")
        axis = Axis(0, context.cuts.whole(1))
    if axis.cut.has_holes and image.fill != 0:
        raise Unjudged("a convolution over padding")
    if kernel_axis is not None and kernel_axis.cut.has_holes and kernel.fill != 0:
        raise Unjudged("a convolution over padding")
    kernel_cut = (
        context.cuts.whole(kernel_size) if kernel_axis is None else kernel_axis.cut
    )
    if kernel_axis is None and kernel.shape[dim.kernel] != kernel_size:
        raise Unjudged("a convolution of a broadcast along its window")
    return windowed_cut(
        cuts=context.cuts,
        held=(context.cuts.indices(axis.cut), context.cuts.indices(kernel_cut)),
        windows=(dim.local_window, dim.whole_window),
        sizes=(image_size, kernel_size),
        results=(dim.local_size, dim.whole_size),
    )


def reduce_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The result of a reduction over windows, as of a pool."""
    operand, initial = operands
    require_finished(initial, "reduce-window")
    reducer = reducer_of(context.module, instruction)
    if operand.terms is not None and not (reducer == operand.reducer == "add"):
        require_finished(operand, "reduce-window")
    if operand.scale != 1 and reducer != "add":
        raise Unjudged("a reduction, over windows, of shares of a sum")
    if not operand.is_finished and constant_number(initial) != 0:
        raise Unjudged("windows that start with a number on each device")
    shape = arrays_in(instruction.result)[0].shape
    rule = ft.partial(
        _reduced_window, context, instruction, reducer=reducer, shape=shape
    )
    return judged_match(context, instruction, operands, rule)


def _reduced_window(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
    reducer: str,
    shape: tuple[int, ...],
) -> Held:
    """As `reduce_window`, as the value `value_number` of the whole program, with the
    shape `shape` on one device. Along a dimension that is cut, a window may read holes
    whose number the reduction leaves as it is.
    """
    operand, initial = operands
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    rank = len(shape)
    dtype = arrays_in(instruction.result)[0].dtype
    local_windows = window_of(instruction, rank)
    whole_windows = window_of(node.instruction, rank)
    cuts: list[Cut | None] = []
    for dim in range(rank):
        axis = operand.axes[dim]
        size = node.operands[0].shape[dim]
        if local_windows[dim].is_trivial and whole_windows[dim].is_trivial:
            cuts.append(cut_of(axis))
            continue
        if axis is None or context.cuts.is_whole(axis.cut, size):
            if operand.shape[dim] != size or local_windows[dim] != whole_windows[dim]:
                raise Unjudged("a window over a broadcast")
            cuts.append(context.cuts.whole(shape[dim]))
            continue
        if axis.cut.has_holes and not is_identity(operand.fill_number, reducer, dtype):
            raise Unjudged("a window over padding")
        # The window's own padding has this number.
        if not is_identity(constant_number(initial), reducer, dtype):
            raise Unjudged("a window that starts with another number")
        taps = context.cuts.whole(whole_windows[dim].size)
        cut, terms = windowed_cut(
            cuts=context.cuts,
            held=(context.cuts.indices(axis.cut), context.cuts.indices(taps)),
            windows=(local_windows[dim], whole_windows[dim]),
            sizes=(size, whole_windows[dim].size),
            results=(shape[dim], _known_size(node.shape[dim])),
        )
        if terms is not None:
            raise Unjudged("a window over parts")
        cuts.append(cut)
    held = held_result(context, instruction, operands, cuts, value_number=value_number)
    return held.with_sums_of(operand)


def select_and_scatter(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> Held:
    """The gradient of a pool: each window adds an element to that which it selects."""
    for operand in operands:
        require_finished(operand, "select-and-scatter")
    rule = ft.partial(_scattered, context, instruction)
    return judged_match(context, instruction, operands, rule)


def _scattered(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    value_number: int,
) -> Held:
    """As `select_and_scatter`, as the value `value_number` of the whole program.
    Operand 0 is the image whose windows select an element, operand 1 has what each
    window adds to it, and operand 2 is the number with which each element starts.
    """
    image, source, _ = operands
    shape = arrays_in(instruction.result)[0].shape
    node = context.values.nodes[value_number]
    assert node.instruction is not None
    local_windows = window_of(instruction, len(shape))
    whole_windows = window_of(node.instruction, len(shape))
    cuts: list[Cut | None] = []
    for dim in range(len(shape)):
        axes = (image.axes[dim], source.axes[dim])
        if local_windows[dim].is_trivial and whole_windows[dim].is_trivial:
            cut = joined_cut(context, "select-and-scatter", dim, axes)
            if cut is None and shape[dim] == node.shape[dim]:
                cut = context.cuts.whole(shape[dim])
            cuts.append(cut)
            continue
        whole_operands = node.operands
        sizes = (whole_operands[0].shape[dim], whole_operands[1].shape[dim])
        image_cut = _whole_or_cut(context, axes[0], sizes[0], image.shape[dim])
        source_cut = _whole_or_cut(context, axes[1], sizes[1], source.shape[dim])
        is_whole = context.cuts.is_whole(image_cut, sizes[0])
        is_whole &= context.cuts.is_whole(source_cut, sizes[1])
        if is_whole and local_windows[dim] == whole_windows[dim]:
            cuts.append(context.cuts.whole(sizes[0]))
            continue
        _require_no_effect_of_holes(context, instruction, operands)
        indices = (context.cuts.indices(image_cut), context.cuts.indices(source_cut))
        windows = (local_windows[dim], whole_windows[dim])
        cuts.append(scattered_cut(context.cuts, indices, windows, sizes))
    return held_result(context, instruction, operands, cuts, value_number=value_number)


def _whole_or_cut(
    context: Context,
    axis: Axis | None,
    size: int,
    local_size: int,
) -> Cut:
    """The cut of an axis, or of a dimension along which nothing changes and of which
    each device holds all. Raises `Unjudged` if it holds less.
    """
    if axis is not None:
        return axis.cut
    if size != local_size:
        raise Unjudged("a window over a broadcast")
    return context.cuts.whole(size)


# The number that a window never selects, by the direction of the comparison.
_NEVER_SELECTED = {"GE": -math.inf, "GT": -math.inf, "LE": math.inf, "LT": math.inf}


def _require_no_effect_of_holes(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
) -> None:
    """Raises `Unjudged` if a window may select a hole of the image, or if a hole of the
    source adds something to what its window selects.
    """
    image, source, start = operands
    roots = {
        name: root_of(context.module.computations[_computation_name(instruction, name)])
        for name in ("select", "scatter")
    }
    lowest = _NEVER_SELECTED.get(attribute(roots["select"], "direction"))
    is_compared = roots["select"].opcode == "compare"
    if image.has_holes and not (is_compared and image.fill == lowest):
        raise Unjudged("a window over padding")
    if roots["scatter"].opcode != "add" or constant_number(start) != 0:
        raise Unjudged("windows that do not add what they select")
    if source.has_holes and source.fill != 0:
        raise Unjudged("windows that the whole program has not")


def _computation_name(instruction: Instruction, name: str) -> str:
    """The name of the computation in an attribute, such as `select`."""
    return attribute(instruction, name).lstrip("%")
