"""The logical axes of a step's arguments, found from its operations: dimensions that
must be sharded alike get one name.

A logical axis is an equivalence class of dimensions (`_program.py`), or the classes at
one position of equal layers.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._ground.text import between_numbers
from .._rules import Atomic
from .._step import Operation
from ._asked import TracedStep
from ._program import Root, Tied


# How many arrays an optimizer may hold for each array of the model.
_MOST_COPIES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentDim:
    """A dimension of an array that the step takes, or a sub-dimension: a factor of a
    dimension that a reshape splits.

    - `array`: the number of the array among all arrays of the step's arguments.
    - `dim`: the number of the dimension within the array.
    - `index`, `count`: the index of the sub-dimension, major-most first, and the number
      of sub-dimensions of the dimension; 0 and 1 for a whole dimension.
    """

    array: int
    dim: int
    index: int
    count: int


@dataclasses.dataclass(slots=True, eq=False)
class LogicalAxis:
    """The dimensions of a step's arguments that get one name. Each of the dimensions
    `places` has `size` elements. `roots` are their equivalence classes; empty after a
    merge into another logical axis.
    """

    roots: list[Root]
    size: int
    places: list[ArgumentDim]
    name: str = ""


class Classes:
    """The logical axes of a step's arguments. `_namer.py` names them.

    - `traced`, `tied`, `program`: the step, its dimensions with their equivalence
      classes, and its operations. `marked` is that of `tied`.
    - `dims`: for each array, for each of its dimensions, the equivalence classes of the
      dimension's sub-dimensions.
    - `axes`: all logical axes. An axis that was merged into another has no classes.
    - `of_root`: the number of the logical axis of each class.
    - `model_argument`: the number of the argument of the step that is the model.
    - `model_arrays`: the numbers of the arrays of the model and of its optimizer, among
      the arrays of all arguments.
    """

    def __init__(self, traced: TracedStep):
        """Finds the logical axes of a traced step: first one for each class of the
        dimensions of its arguments, then one for equal dimensions of equal layers.

        A root is a class of dimensions that must be sharded alike. `tied.roots` has,
        for each value and each of its dimensions, the roots of the sub-dimensions.
        """
        self.traced = traced
        self.tied = traced.tied
        self.program = traced.tied.program
        self.marked = self.tied.marked
        # The words of a random key are no dimensions of its array.
        arrays = zip(self.program.arguments, traced.arrays, strict=True)
        self.dims = [self.tied.roots[value][: array.rank] for value, array in arrays]
        self.axes: list[LogicalAxis] = []
        self.of_root: dict[int, int] = {}
        # Pairs of a sub-dimension of an argument and its class.
        placed = self._places()
        for place, root in placed:
            if root not in self.of_root:
                self.of_root[root] = len(self.axes)
                axis = LogicalAxis(roots=[root], size=self.tied.sizes[root], places=[])
                self.axes.append(axis)
            self.axis_of(root).places.append(place)
        self._merge_layers(placed)
        model = _model_of(traced)
        self.model_argument = model.argument
        self.model_arrays = model.arrays

    def _places(self) -> list[tuple[ArgumentDim, Root]]:
        """Each sub-dimension of each array that the step takes, and its class."""
        places = []
        for array, dims in enumerate(self.dims):
            for dim, roots in enumerate(dims):
                for index, root in enumerate(roots):
                    place = ArgumentDim(
                        array=array,
                        dim=dim,
                        index=index,
                        count=len(roots),
                    )
                    places.append((place, root))
        return places

    def _merge_layers(self, placed: Sequence[tuple[ArgumentDim, Root]]) -> None:
        """Merges the logical axes of dimensions at the same position of layers that
        differ only in their number.
        """
        # Paths that differ only in numbers are equal here.
        paths = [between_numbers(array.path) for array in self.traced.arrays]
        first_roots: dict[object, Root] = {}
        for place, root in placed:
            key = (
                paths[place.array],
                place.dim,
                place.index,
                place.count,
                self.tied.sizes[root],
            )
            first_root = first_roots.setdefault(key, root)
            self.merge(self.of_root[first_root], self.of_root[root])

    def axis_of(self, root: Root) -> LogicalAxis:
        """The logical axis that contains the class `root`."""
        return self.axes[self.of_root[root]]

    def axes_of_array(self, array: int) -> list[LogicalAxis]:
        """The logical axes of all sub-dimensions of the array with the number `array`,
        in order. A dimension that no reshape splits has one sub-dimension.
        """
        roots = itertools.chain.from_iterable(self.dims[array])
        return list(map(self.axis_of, roots))

    def shardable_count(self, roots: Sequence[Root]) -> int:
        """The number of a dimension's major-most sub-dimensions that may be sharded. No
        shard splits the other ones. `self.marked` has the classes that operations of a
        kind mark: those that slices divide ("sliced"), and batch dimensions of products
        ("batched").

        `roots` are the classes of the sub-dimensions. The minor-most of several is not
        sharded, since it counts as the width of one head. A batch dimension of a matrix
        product is the exception.
        """
        # If slices separate queries, keys and values, each of the three is a unit, and
        # nothing within one is sharded.
        for index, root in enumerate(roots[:-1]):
            if root in self.marked["sliced"]:
                return index + 1
        count = len(roots)
        if count > 1 and roots[-1] not in self.marked["batched"]:
            return count - 1
        return count

    def names_of(self, array: int) -> tuple[object, ...]:
        """The logical names of the dimensions of the array with the number `array`, for
        `plan(..., names=...)`. A name that an earlier dimension has becomes `None`. If
        no shard splits the last sub-dimensions of a dimension, such as head widths of
        64, the name before them is `Atomic(name, 64)`.
        """
        used: set[str] = set()
        # A name, a tuple of those of several sub-dimensions, or `None`.
        entries: list[object] = []
        for roots in self.dims[array]:
            count = self.shardable_count(roots)
            names: list[Any] = []
            for root in roots[:count]:
                name = self.axis_of(root).name
                if name not in used:
                    used.add(name)
                    names.append(name)
            sizes_of_roots = (self.tied.sizes[root] for root in roots[count:])
            unit = math.prod(sizes_of_roots)
            if names and unit > 1:
                names[-1] = Atomic(names[-1], unit)
            if len(names) > 1:
                entries.append(tuple(names))
            else:
                entries.extend(names or [None])
        return tuple(entries)

    def merge(self, first: int, second: int) -> bool:
        """Merges the logical axes with the numbers `first` and `second`, unless their
        sizes differ or an array has both. Returns whether they are now one axis.
        """
        if first == second:
            return True
        axis = self.axes[first]
        merged = self.axes[second]
        arrays = {place.array for place in axis.places}
        merged_arrays = {place.array for place in merged.places}
        if axis.size != merged.size or arrays & merged_arrays:
            return False
        axis.roots += merged.roots
        axis.places += merged.places
        for root in merged.roots:
            self.of_root[root] = first
        merged.roots = []
        merged.places = []
        return True

    def merge_equal_names(self) -> None:
        """Merges logical axes with equal names. If two cannot be merged, the second
        gets a number, as in `mlp_2`.
        """
        numbers_of_name: dict[str, list[int]] = {}
        for number, axis in enumerate(self.axes):
            if axis.roots:
                numbers_of_name.setdefault(axis.name, []).append(number)
        for name, numbers in numbers_of_name.items():
            distinct: list[int] = []
            for number in numbers:
                if not any(self.merge(other, number) for other in distinct):
                    distinct.append(number)
                    if len(distinct) == 1:
                        self.axes[number].name = name
                    else:
                        self.axes[number].name = f"{name}_{len(distinct)}"

    @property
    def model_roots(self) -> set[Root]:
        """The classes of all dimensions of the model and its optimizer."""
        roots: set[Root] = set()
        for axis in self.axes:
            if self.in_model(axis):
                roots.update(axis.roots)
        return roots

    def in_model(self, axis: LogicalAxis) -> list[ArgumentDim]:
        """The dimensions of a logical axis that belong to arrays of the model or of its
        optimizer.
        """
        return [place for place in axis.places if place.array in self.model_arrays]

    def unmerged_axes(self) -> list[LogicalAxis]:
        """The logical axes that were not merged into others."""
        return [axis for axis in self.axes if axis.roots]


class _Model(NamedTuple):
    """The number of the argument of a step that is the model, and the numbers of all
    arrays of the model and its optimizer among the arrays of all arguments.
    """

    argument: int
    arrays: set[int]


def _model_of(traced: TracedStep) -> _Model:
    """The argument of a step that is the model, and the arrays of the model and its
    optimizer.

    The first argument with many arrays is the model. Another argument is a part of it
    if, in most of its arrays, all dimensions are equivalent to dimensions of the model.
    Examples are an optimizer's moments, and the frozen base of adapters (as in LoRA). A
    batch of data has a dimension that is equivalent to none of the model.
    """
    array_counts = [sum(flat.is_array) for flat in traced.flats]
    model = 0
    for which, count in enumerate(array_counts):
        if _MOST_COPIES * count >= max(array_counts):
            model = which
            break

    # For each argument of the step, the classes of the dimensions of each of its arrays.
    roots_by_argument: dict[int, list[set[Root]]] = {}
    roots_of_model: set[Root] = set()
    for value, array in zip(traced.tied.program.arguments, traced.arrays, strict=True):
        roots = traced.tied.roots_of(value)
        roots_by_argument.setdefault(array.which, []).append(roots)
        if array.which == model:
            roots_of_model |= roots

    members = set()
    for which, roots_of_arrays in roots_by_argument.items():
        covered = list(filter(roots_of_model.issuperset, roots_of_arrays))
        if 2 * len(covered) > len(roots_of_arrays):
            members.add(which)
    arrays = set()
    for number, array in enumerate(traced.arrays):
        if array.which in members:
            arrays.add(number)
    return _Model(argument=model, arrays=arrays)


# How many values the search for a matrix product behind a sum visits.
_MOST_VISITED = 400


def residual(tied: Tied, parameter_roots: set[Root]) -> set[Root]:
    """The classes of the dimensions of residual streams. A residual stream is `x` in a
    sum `x + f(x)`, where `f` has a matrix product. A sum whose dimensions are all in
    `parameter_roots`, the classes of the model's dimensions, updates parameters instead.
    """
    makers: dict[int, Operation] = {}
    # A sum with a broadcast value adds a bias.
    broadcasts: set[int] = set()
    for operation in tied.program.operations:
        makers |= dict.fromkeys(operation.outs, operation)
        if operation.name == "broadcast_in_dim":
            broadcasts.update(operation.outs)

    residual_roots: set[Root] = set()
    for operation in tied.program.operations:
        if operation.name != "add" or not broadcasts.isdisjoint(operation.ins):
            continue
        roots = tied.roots_of(operation.outs[0])
        if roots <= residual_roots or roots <= parameter_roots:
            continue
        first, second = operation.ins
        if _is_made_of(second, first, makers) or _is_made_of(first, second, makers):
            residual_roots |= roots
    return residual_roots


def _is_made_of(value: int, source: int, makers: dict[int, Operation]) -> bool:
    """Whether `value` is computed from `source` through a matrix product. The search
    goes back over a limited number of values, the nearest ones first. `makers` maps each
    value of the program to the operation that makes it.
    """
    # Pairs of a value and whether a matrix product is between it and `value`.
    queue = [(value, False)]
    seen = {(value, False)}
    while queue and len(seen) < _MOST_VISITED:
        current, is_after_product = queue.pop(0)
        operation = makers.get(current)
        if operation is None:
            continue
        is_after_product |= operation.flops > 0
        if is_after_product and source in operation.ins:
            return True
        operands = [(operand, is_after_product) for operand in operation.ins]
        unseen = [operand for operand in operands if operand not in seen]
        queue += unseen
        seen.update(unseen)
    return False
