"""Products, reductions and windows: operations that sum over dimensions.

A sum over a dimension that is cut is not finished: each device has the term of its own
part. `Cuts.terms` says which devices have which term.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .forms import (
    Form,
    attribute,
    dot_dims,
    numbers,
    reducer_of,
)
from .held import (
    Axis,
    Context,
    Held,
    Number,
    product_of_terms,
    require_finished,
)
from .joining import (
    constant_number,
    different,
    form_in,
    is_identity,
    joined_cut,
)
from .matching import are_same, candidates, matched_operands, placed
from .values import Node
from .verdict import Unjudged, Wrong
from .windows import Window, window_of, windowed_cut


def dot(context: Context, instruction: Instruction, operands: Sequence[Held]) -> Held:
    for operand in operands:
        if operand.terms is not None and operand.kind != "add":
            require_finished(operand, "dot")
    matched = matched_operands(context, instruction, operands)
    fault: Wrong | None = None
    for number, seen in matched:
        try:
            return _dot(context, instruction, seen, number)
        except Wrong as error:
            fault = error if are_same(seen, operands) else fault
    if fault is not None:
        raise fault
    try:
        return _dot(context, instruction, operands, None)
    except Wrong as error:
        raise Unjudged(f"unlike any operation of the whole program: {error}") from error


def _dot(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    number: int | None,
) -> Held:
    shape = arrays_in(instruction.result)[0].shape
    one, other = operands
    dims = dot_dims(instruction, (len(one.shape), len(other.shape)))
    node = None if number is None else context.values.nodes[number]
    terms = None
    scale = Fraction(1)
    for left, right in dims.contracted:
        axes = [one.axes[left], other.axes[right]]
        if axes == [None, None]:
            if node is None:
                raise Unjudged("a product of broadcasts")
            size = node.operands[0].shape[left]
            scale *= Fraction(one.shape[left], size)
            continue
        cut = _contracted(context, operands, axes, left)
        size = _contracted_size(context, node, one, other, left, right)
        part = context.cuts.terms(cut, size)
        terms = product_of_terms(context.everywhere, terms, part)
    cuts = [
        joined_cut(context, "dot", at, [one.axes[left], other.axes[right]])
        for at, (left, right) in enumerate(dims.batch)
    ]
    for operand, free in zip(operands, dims.free, strict=True):
        cuts += [_cut(operand.axes[at]) for at in free]
    held = placed(
        context,
        form_in(context, instruction, operands, shape),
        instruction,
        shape,
        cuts,
        number,
    )
    fill = 0 if _fills_are(operands, 0) else None
    return _with_sums(context, held, operands, terms, scale, fill)


def _contracted(
    context: Context, operands: Sequence[Held], axes: Sequence[Axis | None], place: int
) -> Cut:
    """The cut of a contracted dimension. Where one operand has zeros in holes, the other
    may have anything finite.
    """
    real = [axis.cut for axis in axes if axis is not None]
    if len(real) == 2 and any(cut.has_holes for cut in real):
        if not _fills_are(operands, 0):
            raise Unjudged("a product over padding")
        both = context.cuts.joined(*real)
        if both is None:
            raise different("dot", place, *real)
        return both
    if any(cut.has_holes for cut in real) and not _fills_are(operands, 0):
        raise Unjudged("a product over padding")
    cut = joined_cut(context, "dot, over a contracted dimension,", place, axes)
    assert cut is not None
    return cut


def _fills_are(operands: Sequence[Held], number: Number) -> bool:
    return all(one.fill == number for one in operands if one.has_holes)


def _contracted_size(
    context: Context,
    node: Node | None,
    one: Held,
    other: Held,
    left: int,
    right: int,
) -> int:
    if node is not None:
        return node.operands[0].shape[left]
    for held, place in ((one, left), (other, right)):
        axis = held.axes[place]
        if axis is not None:
            shape = context.values.nodes[held.root].shape
            if axis.dim < len(shape) and (size := shape[axis.dim]) is not None:
                return size
    raise Unjudged("a product over a dimension of unknown size")


def _cut(axis: Axis | None) -> Cut | None:
    return None if axis is None else axis.cut


def _with_sums(
    context: Context,
    held: Held,
    operands: Sequence[Held],
    terms: tuple[int, ...] | None,
    scale: Fraction,
    fill: Number | None,
) -> Held:
    """The result of an operation that is linear in each operand, with the sums that its
    operands leave unfinished.
    """
    for operand in operands:
        terms = product_of_terms(context.everywhere, terms, operand.terms)
        scale *= operand.scale
    return dataclasses.replace(
        held,
        terms=terms,
        kind="add",
        scale=1 if scale == 1 else scale,
        fill=fill if held.has_holes else None,
    )


def reduce(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> Held:
    """The reduction of one array."""
    operand, start = operands
    how = reducer_of(context.module, instruction)
    if operand.terms is not None and operand.kind != how:
        require_finished(operand, "reduce")
    if operand.scale != 1 and how != "add":
        require_finished(operand, "reduce")
    require_finished(start, "reduce")
    fault: Wrong | None = None
    for number, seen in matched_operands(context, instruction, operands):
        try:
            return _reduced(context, instruction, seen, how, number)
        except Wrong as error:
            fault = error if are_same(seen, operands) else fault
    if fault is not None:
        raise fault
    try:
        return _reduced(context, instruction, operands, how, None)
    except Wrong as error:
        raise Unjudged(f"unlike any operation of the whole program: {error}") from error


def _reduced(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Held],
    how: str,
    number: int | None,
) -> Held:
    operand, start = operands
    result = arrays_in(instruction.result)[0]
    shape, dtype = result.shape, result.dtype
    over = numbers(instruction, "dimensions")
    node = None if number is None else context.values.nodes[number]
    terms = operand.terms
    scale = Fraction(operand.scale)
    for place in over:
        axis = operand.axes[place]
        if axis is None:
            terms, scale = _broadcast_sum(operand, place, node, how, terms, scale)
            continue
        size = _size(context, operand, place, node)
        if axis.cut.has_holes and not is_identity(operand.fill, how, dtype):
            raise Unjudged("a reduction over padding")
        part = context.cuts.terms(axis.cut, size)
        if part is not None and not how:
            raise Unjudged("a reduction, by another function, over a cut dimension")
        terms = product_of_terms(context.everywhere, terms, part)
    if terms is not None and not is_identity(constant_number(start), how, dtype):
        raise Unjudged("a reduction that starts with a number on each device")
    rest = [axis for at, axis in enumerate(operand.axes) if at not in over]
    found = form_in(context, instruction, operands, shape)
    held = placed(
        context, found, instruction, shape, [_cut(axis) for axis in rest], number
    )
    fill = operand.fill if held.has_holes and operand.fill in (0,) else None
    return dataclasses.replace(
        held,
        terms=terms,
        kind=how,
        scale=1 if scale == 1 else scale,
        fill=fill if how == "add" else None,
    )


def _size(context: Context, operand: Held, place: int, node: Node | None) -> int:
    if node is not None:
        return node.operands[0].shape[place]
    axis = operand.axes[place]
    assert axis is not None
    shape = context.values.nodes[operand.root].shape
    size = shape[axis.dim] if axis.dim < len(shape) else None
    if size is None:
        raise Unjudged("a reduction over a dimension of unknown size")
    return size


def _broadcast_sum(
    operand: Held,
    place: int,
    node: Node | None,
    how: str,
    terms: tuple[int, ...] | None,
    scale: Fraction,
) -> tuple[tuple[int, ...] | None, Fraction]:
    """The sum of equal elements: each device has its own share of the whole sum."""
    if node is None:
        raise Unjudged("a reduction of a broadcast")
    size = node.operands[0].shape[place]
    if operand.shape[place] == size or how in ("maximum", "minimum", "and", "or"):
        return terms, scale
    if how != "add":
        raise Unjudged("a reduction of a broadcast")
    return terms, scale * Fraction(operand.shape[place], size)


def convolution(
    context: Context, instruction: Instruction, operands: Sequence[Held]
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


def _groups(instruction: Instruction) -> tuple[int, int]:
    features = attribute(instruction, "feature_group_count") or "1"
    batch = attribute(instruction, "batch_group_count") or "1"
    return int(features), int(batch)


def _convolved(
    context: Context, instruction: Instruction, operands: Sequence[Held], number: int
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
            image.axes[labels.image.index("f")],
            kernel.axes[labels.kernel.index("i")],
        ]
        size = node.operands[0].shape[labels.image.index("f")]
        if axes != [None, None]:
            cut = _contracted(context, operands, axes, labels.image.index("f"))
            terms = context.cuts.terms(cut, size)
        elif image.shape[labels.image.index("f")] != size:
            raise Unjudged("a convolution of broadcasts")
        cuts["b"] = _cut(image.axes[labels.image.index("b")])
        cuts["f"] = _cut(kernel.axes[labels.kernel.index("o")])
    else:
        terms = _grouped(context, instruction, operands, node, labels, cuts)
    for at, letter in enumerate(labels.spatial):
        places = labels.image.index(letter), labels.kernel.index(letter)
        cut, part = _spatial(
            context,
            (image, kernel),
            places,
            (windows[0][at], windows[1][at]),
            node,
            (
                shape[labels.out.index(letter)],
                _int(node.shape[labels.out.index(letter)]),
            ),
        )
        cuts[letter] = cut
        terms = product_of_terms(context.everywhere, terms, part)
    ordered = [cuts[labels.out[at]] for at in range(rank)]
    found = form_in(context, instruction, operands, shape)
    held = placed(context, found, instruction, shape, ordered, number)
    return _with_sums(context, held, operands, terms, Fraction(1), None)


def _int(size: int | None) -> int:
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
    local, whole = _groups(instruction), _groups(node.instruction)
    is_batch = whole[1] > 1
    letter = "b" if is_batch else "f"
    at, beside = labels.image.index(letter), labels.kernel.index("o")
    shapes = node.operands[0].shape[at], node.operands[1].shape[beside]
    count, local_count = (whole[1], local[1]) if is_batch else (whole[0], local[0])
    axes = image.axes[at], kernel.axes[beside]
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
        raise different("convolution", at, axes[0].cut, axes[1].cut)
    cuts["f"] = axes[1].cut
    if is_batch:
        per_group = sizes[0]
        cuts["b"] = context.cuts.whole(per_group)
        if per_group != _int(node.shape[labels.out.index("b")]):
            raise Unjudged("a convolution in groups of the batch")
        features = labels.image.index("f"), labels.kernel.index("i")
        pair = [image.axes[features[0]], kernel.axes[features[1]]]
        if pair == [None, None]:
            raise Unjudged("a convolution of broadcasts")
        cut = _contracted(context, operands, pair, features[0])
        return context.cuts.terms(cut, node.operands[0].shape[features[0]])
    cuts["b"] = _cut(image.axes[labels.image.index("b")])
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
    at, beside = places
    local, whole = windows
    image_size, kernel_size = node.operands[0].shape[at], node.operands[1].shape[beside]
    axis, taps = image.axes[at], kernel.axes[beside]
    is_whole = (
        image.shape[at] == image_size
        and (axis is None or context.cuts.is_whole(axis.cut, image_size))
        and kernel.shape[beside] == kernel_size
        and (taps is None or context.cuts.is_whole(taps.cut, kernel_size))
    )
    if is_whole and local == whole:
        return context.cuts.whole(sizes[0]), None
    if axis is None:
        if image.shape[at] != 1 or image_size != 1:
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
    context: Context, instruction: Instruction, operands: Sequence[Held]
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
    operand = operands[0]
    node = context.values.nodes[number]
    assert node.instruction is not None
    rank = len(shape)
    dtype = arrays_in(instruction.result)[0].dtype
    local, whole = window_of(instruction, rank), window_of(node.instruction, rank)
    cuts: list[Cut | None] = []
    for at in range(rank):
        axis, size = operand.axes[at], node.operands[0].shape[at]
        if local[at].is_trivial and whole[at].is_trivial:
            cuts.append(_cut(axis))
            continue
        if axis is None or context.cuts.is_whole(axis.cut, size):
            if operand.shape[at] != size or local[at] != whole[at]:
                raise Unjudged("a window over a broadcast")
            cuts.append(context.cuts.whole(shape[at]))
            continue
        if axis.cut.has_holes and not is_identity(operand.fill, how, dtype):
            raise Unjudged("a window over padding")
        taps = context.cuts.whole(whole[at].size)
        cut, part = windowed_cut(
            context.cuts,
            (context.cuts.indices(axis.cut), context.cuts.indices(taps)),
            (local[at], whole[at]),
            (size, whole[at].size),
            (shape[at], _int(node.shape[at])),
        )
        if part is not None:
            raise Unjudged("a window over parts")
        cuts.append(cut)
    found = form_in(context, instruction, operands, shape)
    held = placed(context, found, instruction, shape, cuts, number)
    return dataclasses.replace(
        held, terms=operand.terms, kind=operand.kind, scale=operand.scale
    )


def whole_operation(
    context: Context, instruction: Instruction, operands: Sequence[Held]
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
        axes = _whole_axes(context, instruction, seen, node)
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
            parts.append(
                _part_of(context, instruction, found, place, cuts, array.shape)
            )
        return tuple(parts)
    raise Unjudged(f"no rule for this {instruction.opcode}")


def reduce_several(
    context: Context, instruction: Instruction, operands: Sequence[Held]
) -> tuple[Held, ...]:
    """The reduction of several arrays together, as for an argmax, over dimensions that
    are not cut.
    """
    arrays = operands[: len(operands) // 2]
    over = numbers(instruction, "dimensions")
    results = arrays_in(instruction.result)
    for operand in operands:
        require_finished(operand, "reduce")
    for number, seen in matched_operands(context, instruction, operands):
        node = context.values.nodes[number]
        own = seen[: len(arrays)]
        if any(
            operand.shape[at] != array.shape[at]
            or not _is_whole(context, operand.axes[at], array.shape[at])
            for operand, array in zip(own, node.operands, strict=False)
            for at in over
        ):
            continue
        cuts = []
        for at in range(len(own[0].shape)):
            if at in over:
                continue
            axes = [operand.axes[at] for operand in own]
            cuts.append(joined_cut(context, "reduce", at, axes))
        found = form_in(context, instruction, seen, results[0].shape)
        return tuple(
            _part_of(context, instruction, found, place, cuts, results[place].shape)
            for place in range(len(results))
        )
    raise Unjudged("a reduction of several arrays over a dimension that is cut")


def _is_whole(context: Context, axis: Axis | None, size: int) -> bool:
    return axis is None or context.cuts.is_whole(axis.cut, size)


def _part_of(
    context: Context,
    instruction: Instruction,
    found: Form,
    place: int,
    cuts: Sequence[Cut | None],
    shape: tuple[int, ...],
) -> Held:
    """One of the results of an operation with several."""
    dims = tuple(range(len(shape)))
    keyed = Form((*found.key, place), dims, dims)
    parts = candidates(context, keyed, instruction)
    if not parts:
        raise Unjudged(f"{instruction.opcode} that the whole program has not")
    return placed(context, keyed, instruction, shape, cuts, parts[0])


def _whole_axes(
    context: Context, instruction: Instruction, operands: Sequence[Held], node: Node
) -> list[Cut | None] | None:
    """The cuts of the results, if each device computes the whole along each dimension
    that the operation does not treat element by element.
    """
    shape = arrays_in(instruction.result)[0].shape
    free: set[int] = set()
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
    for operand, array in zip(operands, node.operands, strict=True):
        for at, (axis, size) in enumerate(zip(operand.axes, array.shape, strict=True)):
            if at in free:
                continue
            if operand.shape[at] != size:
                return None
            if axis is not None and not context.cuts.is_whole(axis.cut, size):
                return None
    cuts: list[Cut | None] = []
    for at, size in enumerate(shape):
        if at not in free:
            cuts.append(context.cuts.whole(size))
            continue
        axes = [operand.axes[at] for operand in operands if operand.shape]
        cuts.append(joined_cut(context, instruction.opcode, at, axes))
        if cuts[-1] is None:
            cuts[-1] = context.cuts.whole(size) if size == node.shape[at] else None
    if not free and shape != node.shape:
        return None
    return cuts
