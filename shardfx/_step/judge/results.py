"""The results of operations: trees of what devices hold, and their forms."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..hlo_text import Instruction, arrays_in, parts_of
from .cuts import Cut
from .forms import View
from .held import Axis, Faulty, Held, Result, Unknown
from .values import Global
from .verdict import Unjudged


# What is said of an array in place of what devices hold of it.
Failed: TypeAlias = Faulty | Unknown
# A result that is one array.
Leaf: TypeAlias = Held | Failed


def dtypes_of(instruction: Instruction) -> list[str]:
    """The types of the numbers in the arrays that an instruction returns."""
    return [array.dtype for array in arrays_in(instruction.result)]


def require_shapes(instruction: Instruction, result: Result) -> None:
    """Raises `Unjudged` if a rule returned other arrays than the instruction has, by
    their number, shape or axes. The result of every rule is checked here.
    """
    opcode = instruction.opcode
    arrays = arrays_in(instruction.result)
    leaves = leaves_in([result])
    if len(leaves) != len(arrays):
        raise Unjudged(f"a {opcode} with other results than its rule says")
    for held, array in zip(leaves, arrays, strict=True):
        assert isinstance(held, Held)
        if not _has_shape(held, array.shape):
            raise Unjudged(f"a {opcode} in a form that its rule has not")


def _has_shape(held: Held, shape: tuple[int, ...]) -> bool:
    """Whether axes and known numbers fit an array of this shape on one device."""
    rank = len(shape)
    if held.shape != shape:
        return False
    if len(held.axes) != rank:
        return False
    for axis, size in zip(held.axes, shape, strict=True):
        if axis is None:
            continue
        if axis.cut.size != size:
            return False
    if held.known_numbers is None:
        return True
    return held.known_numbers.ndim == 1 + rank


def held_of(array: Global, shape: tuple[int, ...], cuts: Sequence[Cut]) -> Held:
    """What devices hold of an array of the whole program, which has the shape `shape`
    on one device and whose dimensions have these cuts. Raises `Unjudged` if a dimension
    of size 1 is cut: its view has no place for the padding of the other devices.
    """
    axes: list[Axis | None] = []
    for dim, cut in zip(array.view.dims, cuts, strict=True):
        if dim is None:
            if cut.has_holes:
                raise Unjudged("a dimension of size 1 that is cut")
            axes.append(None)
        else:
            axes.append(Axis(dim, cut))
    return Held(root=array.view.root, shape=shape, axes=tuple(axes))


def required_view(held: Held, array: Global) -> View:
    """The view that `held` has if it is `array`: as `view_of` makes it, dimensions of
    size 1 in which each device holds the first element count as unchanging.
    """
    dims: list[int | None] = []
    columns = zip(held.axes, array.view.dims, array.shape, strict=True)
    for axis, dim, size in columns:
        is_first_element = axis is None or axis.cut.is_first_element
        if is_first_element and size == 1:
            dims.append(None)
        else:
            dims.append(dim)
    return array.view._replace(dims=tuple(dims))


def leaves_in(results: Sequence[Result]) -> Sequence[Leaf]:
    """The leaves of several results. Most results are arrays, and leaves."""
    arrays = [result for result in results if isinstance(result, Held)]
    if len(arrays) == len(results):
        return arrays
    leaves: list[Leaf] = []
    for result in results:
        leaves += leaves_of(result)
    return leaves


def leaves_of(result: Result) -> Iterator[Leaf]:
    """The leaves of a tree of results, from left to right."""
    if isinstance(result, Held | Faulty | Unknown):
        yield result
        return
    for part in result:
        yield from leaves_of(part)


def each_result(instruction: Instruction, leaf: Failed) -> Result:
    """The same leaf for each result of an instruction."""
    return _tree(instruction.result, leaf)


def _tree(result_text: str, leaf: Failed) -> Result:
    """The same leaf for each array in the text of a result, such as "(f32[2],
    (s32[]))".
    """
    if not result_text.startswith("("):
        return leaf
    trees: list[Result] = []
    for part_text in parts_of(result_text):
        if part_text:
            trees.append(_tree(part_text, leaf))
    return tuple(trees)
