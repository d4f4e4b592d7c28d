"""The logical axes of a step's arguments, found from its operations: dimensions that
must be sharded alike get one name.

A logical axis is an equivalence class of dimensions (`_program.py`), or the classes at
one position of equal layers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .._ground.text import between_numbers
from .._rules import Atomic
from .._step import Operation
from ._asked import TracedStep
from ._program import Root, Tied


_COPIES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentDim:
    """A dimension of an array that the step takes, or a sub-dimension: a factor of a
    dimension that a reshape splits.

    - `argument`: the number of the array among all arrays of the step's arguments.
    - `dim`: the number of the dimension within the array.
    - `index`, `of`: the index of the sub-dimension, major-most first, and their number; 0
      and 1 for a whole dimension.
    """

    argument: int
    dim: int
    index: int
    of: int


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
    """The logical axes of a step's arguments. `_name_axes.py` names them.

    - `dims`: for each array and each of its dimensions, the equivalence classes of the
      sub-dimensions.
    - `axes`: all logical axes. An axis that was merged into another has no classes.
    - `of_root`: the number of the logical axis of each class.
    - `main`: the number of the argument that is the model.
    - `model`: the numbers of the arrays of the model and of its optimizer.
    """

    def __init__(self, traced: TracedStep):
        self.traced = traced
        self.tied = traced.tied
        self.program = traced.tied.program
        self.marked = self.tied.marked
        # The words of a random key are no dimensions of its array.
        arrays = zip(self.program.arguments, traced.arrays, strict=True)
        self.dims = [self.tied.roots[value][: array.rank] for value, array in arrays]
        self.axes: list[LogicalAxis] = []
        self.of_root: dict[int, int] = {}
        placed = []
        for argument, dims in enumerate(self.dims):
            for dim, roots in enumerate(dims):
                for index, root in enumerate(roots):
                    place = ArgumentDim(argument, dim, index, len(roots))
                    placed.append((place, root))
        for place, root in placed:
            if root not in self.of_root:
                self.of_root[root] = len(self.axes)
                self.axes.append(LogicalAxis([root], self.tied.sizes[root], []))
            self.of(root).places.append(place)
        # Dimensions at the same position of layers that differ only in their number
        # have one name.
        keys: dict[object, int] = {}
        alike = [between_numbers(array.path) for array in traced.arrays]
        for place, root in placed:
            key = (
                alike[place.argument],
                place.dim,
                place.index,
                place.of,
                self.tied.sizes[root],
            )
            self.tie(self.of_root[keys.setdefault(key, root)], self.of_root[root])
        self.main, self.model = _model_arguments(traced)

    def of(self, root: Root) -> LogicalAxis:
        """The logical axis that contains the class `root`."""
        return self.axes[self.of_root[root]]

    def flat(self, array: int) -> list[LogicalAxis]:
        """The logical axes of all sub-dimensions of the array with the number `array`,
        in order. A dimension that no reshape splits has one sub-dimension.
        """
        return [self.of(root) for roots in self.dims[array] for root in roots]

    def kept(self, roots: Sequence[Root]) -> int:
        """The number of a dimension's major-most sub-dimensions that may be sharded. No
        shard splits the other ones.

        `roots` are the classes of the sub-dimensions. The minor-most of several is not
        sharded, since it counts as the width of one head. A batch dimension of a matrix
        product is the exception.
        """
        count = len(roots)
        # If slices separate queries, keys and values, each of the three is a unit.
        taken = next(
            (
                index + 1
                for index, root in enumerate(roots[:-1])
                if root in self.marked["sliced"]
            ),
            count,
        )
        return min(
            taken, count - (count > 1 and roots[-1] not in self.marked["batched"])
        )

    def names_of(self, array: int) -> tuple[object, ...]:
        """The logical names of the dimensions of the array with the number `array`, for
        `plan(..., names=...)`. A name that an earlier dimension has becomes `None`.
        """
        used: set[str] = set()
        entries: list[object] = []
        for roots in self.dims[array]:
            count = self.kept(roots)
            names: list[Any] = []
            for root in roots[:count]:
                name = self.of(root).name
                if name not in used:
                    used.add(name)
                    names.append(name)
            unit = math.prod(self.tied.sizes[root] for root in roots[count:])
            if names and unit > 1:
                names[-1] = Atomic(names[-1], unit)
            if len(names) > 1:
                entries.append(tuple(names))
            else:
                entries.append(names[0] if names else None)
        return tuple(entries)

    def tie(self, first: int, second: int) -> bool:
        """Merges the logical axes with the numbers `first` and `second`, unless their
        sizes differ or an array has both. Returns whether they are now one axis.
        """
        if first == second:
            return True
        axis = self.axes[first]
        merged = self.axes[second]
        arguments = {place.argument for place in axis.places}
        merged_arguments = {place.argument for place in merged.places}
        if axis.size != merged.size or arguments & merged_arguments:
            return False
        axis.roots += merged.roots
        axis.places += merged.places
        for root in merged.roots:
            self.of_root[root] = first
        merged.roots = []
        merged.places = []
        return True

    def tie_names(self) -> None:
        """Merges logical axes with equal names. If two cannot be merged, the second
        gets a number, as in `mlp_2`.
        """
        numbers_of_name: dict[str, list[int]] = {}
        for number, axis in enumerate(self.axes):
            if axis.roots:
                numbers_of_name.setdefault(axis.name, []).append(number)
        for name, numbers in numbers_of_name.items():
            tied: list[int] = []
            for number in numbers:
                if not any(self.tie(other, number) for other in tied):
                    tied.append(number)
                    if len(tied) == 1:
                        self.axes[number].name = name
                    else:
                        self.axes[number].name = f"{name}_{len(tied)}"

    @property
    def own(self) -> set[Root]:
        """The classes of all dimensions of the model and its optimizer."""
        return {
            root for axis in self.axes if self.in_model(axis) for root in axis.roots
        }

    def in_model(self, axis: LogicalAxis) -> list[ArgumentDim]:
        """The dimensions of a logical axis that belong to arrays of the model or of its
        optimizer.
        """
        return [place for place in axis.places if place.argument in self.model]

    def live(self) -> list[LogicalAxis]:
        """The logical axes that were not merged into others."""
        return [axis for axis in self.axes if axis.roots]


def _model_arguments(traced: TracedStep) -> tuple[int, set[int]]:
    """The number of the argument that is the model, and the numbers of all arrays of
    the model and its optimizer.

    The first argument with many arrays is the model. Another argument is a part of it
    if, in most of its arrays, all dimensions are equivalent to dimensions of the model.
    Examples are an optimizer's moments, and the frozen base of adapters (as in LoRA). A
    batch of data has a dimension that is equivalent to none of the model.
    """
    counts = [sum(flat.is_array) for flat in traced.flats]
    # An optimizer may hold several arrays for each array of the model.
    model = next(
        (which for which, count in enumerate(counts) if _COPIES * count >= max(counts)),
        0,
    )
    owned: set[int] = set()
    of: dict[int, list[set[int]]] = {}
    for value, array in zip(traced.tied.program.arguments, traced.arrays, strict=True):
        dims = traced.tied.roots_of(value)
        of.setdefault(array.which, []).append(dims)
        if array.which == model:
            owned |= dims
    members = {
        which
        for which, each in of.items()
        if 2 * sum(dims <= owned for dims in each) > len(each)
    }
    return model, {
        argument
        for argument, array in enumerate(traced.arrays)
        if array.which in members
    }


_FAR = 400


def residual(tied: Tied, parameter_roots: set[Root]) -> set[Root]:
    """The classes of the dimensions of residual streams. A residual stream is `x` in a
    sum `x + f(x)`, where `f` has a matrix product. A sum whose dimensions are all in
    `parameter_roots`, the classes of the model's dimensions, updates parameters instead.
    """
    operations = tied.program.operations
    maker = {out: operation for operation in operations for out in operation.outs}
    spread = {
        out
        for operation in operations
        if operation.name == "broadcast_in_dim"
        for out in operation.outs
    }
    residual_roots: set[int] = set()
    for operation in operations:
        if operation.name != "add" or not spread.isdisjoint(operation.ins):
            continue
        roots = tied.roots_of(operation.outs[0])
        if roots <= residual_roots or roots <= parameter_roots:
            continue
        first, second = operation.ins
        if _is_made_of(second, first, maker) or _is_made_of(first, second, maker):
            residual_roots |= roots
    return residual_roots


def _is_made_of(value: int, source: int, maker: dict[int, Operation]) -> bool:
    """Whether `value` is computed from `source` through a matrix product. The search
    goes back at most 400 operations. `maker` maps each value of the program to the
    operation that makes it.
    """
    queue = [(value, False)]
    seen = {(value, False)}
    while queue and len(seen) < _FAR:
        current, by_product = queue.pop(0)
        operation = maker.get(current)
        if operation is None:
            continue
        by_product |= operation.flops > 0
        if by_product and source in operation.ins:
            return True
        new = [
            (before, by_product)
            for before in operation.ins
            if (before, by_product) not in seen
        ]
        queue += new
        seen.update(new)
    return False
