"""The results of operations: trees of what devices hold, and their forms."""

from collections.abc import Iterator, Sequence

from ..hlo_text import Instruction, arrays_in, parts_of
from .cuts import Cut
from .forms import View
from .held import Axis, Faulty, Held, Result, Unknown
from .values import Global
from .verdict import Unjudged


def check(instruction: Instruction, result: Result) -> None:
    """Every rule ends here: raises `Unjudged` if the axes do not fit the array of one
    device.
    """
    arrays = arrays_in(instruction.result)
    leaves = leaves_in([result])
    if len(leaves) != len(arrays):
        raise Unjudged(f"a {instruction.opcode} with other results than its rule says")
    for held, array in zip(leaves, arrays, strict=True):
        assert isinstance(held, Held)
        if not _has_shape(held, array.shape):
            raise Unjudged(f"a {instruction.opcode} in a form that its rule has not")


def _has_shape(held: Held, shape: tuple[int, ...]) -> bool:
    if held.shape != shape or len(held.axes) != len(shape):
        return False
    for axis, size in zip(held.axes, shape, strict=True):
        if axis is not None and axis.cut.size != size:
            return False
    return held.known is None or held.known.ndim == 1 + len(shape)


def held_of(array: Global, shape: tuple[int, ...], cuts: Sequence[Cut]) -> Held:
    axes: list[Axis | None] = []
    for dim, cut in zip(array.view.dims, cuts, strict=True):
        axis = None if dim is None else Axis(dim, cut)
        axes.append(axis)
    return Held(array.view.root, shape, tuple(axes))


def required_view(held: Held, array: Global) -> View:
    """The view that `held` has to have to be `array`."""
    dims: list[int | None] = []
    for axis, dim, size in zip(held.axes, array.view.dims, array.shape, strict=True):
        is_first = axis is None or axis.cut.is_first
        dim_of_held = None if is_first and size == 1 else dim
        dims.append(dim_of_held)
    return array.view._replace(dims=tuple(dims))


def leaves_in(results: Sequence[Result]) -> Sequence[Held | Faulty | Unknown]:
    """The leaves of several results. Most results are arrays, and leaves."""
    arrays = [result for result in results if isinstance(result, Held)]
    if len(arrays) == len(results):
        return arrays
    leaves: list[Held | Faulty | Unknown] = []
    for result in results:
        leaves += leaves_of(result)
    return leaves


def leaves_of(result: Result) -> Iterator[Held | Faulty | Unknown]:
    if isinstance(result, tuple) and not isinstance(result, Faulty | Unknown):
        for part in result:
            yield from leaves_of(part)
    else:
        yield result


def each_result(instruction: Instruction, leaf: Faulty | Unknown) -> Result:
    """The same for each result of an instruction."""
    return _tree(instruction.result, leaf)


def _tree(result: str, leaf: Faulty | Unknown) -> Result:
    if result.startswith("("):
        return tuple(_tree(part, leaf) for part in parts_of(result) if part)
    return leaf
