"""A step after Shardy's propagation as a graph of arrays and operations.

The graph has the operations over which a mesh axis reached an array, and the operations
where the shardings of two arrays conflict. A factor stands for dimensions of an
operation that have the same sharding: the product `ij,jk->ik` has the factors i, j and
k (see `Factors`). A stack is an array with one slice for each iteration of a loop, as
`jax.lax.scan` has them.
"""

import functools as ft
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .._step import ArraySharding, Program


# The largest number of dimensions that a search for a mesh axis visits. Arrays further
# away are hardly related.
_FAR = 4000
_NONE = ArraySharding((), {})
# The largest number of operations between a stack and the value that a loop writes into
# it.
_DEEP = 8
# The operations by which loops read and write stacks, and the operations that reshape a
# slice of a stack.
_LOOP_OPERATIONS = ("carry", "return", "use", "dynamic_slice", "dynamic_update_slice")
_RESHAPED = ("reshape", "broadcast_in_dim", "constant")
# The operations that return their operand unchanged.
_IDENTITIES = ("carry", "return", "use")


_T = TypeVar("_T", bound=Hashable)
# For each item that a search reached, the operation and the item before it; `None` for
# the items that it started from.
Steps = Mapping[_T, tuple[int, _T] | None]


class DimKey(NamedTuple):
    """One dimension of one array: the number of the array, and the number of the
    dimension.
    """

    value: int
    dim: int


class Stop(NamedTuple):
    """The operation where a mesh axis stopped propagating to an array. The axis shards
    a dimension of one array of the operation, and could shard another dimension with
    the same factor, but does not.

    - `dim`: the dimension of the array that the axis could shard.
    - `with_axis`, `last`: of the operation's arrays, the dimension that the axis
      shards, and the one that it does not.
    - `operation`: the number of the operation.
    - `near`: the dimension that a sharding constraint could shard: usually `last`. If
      the array of `last` is a loop-carried array or a stack, it is a dimension of the
      nearest array that a line of the program computes.
    """

    dim: int
    with_axis: DimKey
    last: DimKey
    operation: int
    near: DimKey


class Conflict(NamedTuple):
    """An operation in which one mesh axis shards dimensions of two factors, which
    cannot both be sharded over it.

    - `operation`, `axis`: the number of the operation, and the mesh axis.
    - `kept`, `moved`: the dimension of the array that stays sharded over the axis, and
      of the array that is gathered.
    """

    operation: int
    axis: str
    kept: DimKey
    moved: DimKey


class Graph:
    """The arrays of a step after Shardy's propagation, and the operations between them."""

    def __init__(self, program: Program):
        """Indexes the operations and arrays of `program`, which are numbered."""
        self.program = program
        self.values = program.values
        self.operations = program.operations
        self.shardings = [value.sharding or _NONE for value in self.values]
        # The operations that compute or read each array, and the operation that
        # computes each array.
        self.operations_of: list[list[int]] = [[] for _ in self.values]
        self.makers: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            for value in {*operation.ins, *operation.outs}:
                self.operations_of[value].append(number)
            for output in operation.outs:
                self.makers.setdefault(output, number)
        # For each loop-carried array, the array that the loop's body returns as its
        # next value.
        self.next_carried: dict[int, int] = {}
        for operation in self.operations:
            if operation.name == "return":
                # A loop's `return` of one value has the carried value beside it.
                next_value, carried = operation.ins[:2]
                self.next_carried[carried] = next_value
        self.paths = ft.lru_cache(maxsize=4096)(self._paths)

    @ft.cached_property
    def factors(self) -> list[list[tuple[DimKey, int]]]:
        """For each operation, the dimensions of its arrays, each with its factor. A
        dimension with several factors has only the major-most here, since a mesh axis
        shards that one.
        """
        factors_of_operations = []
        for operation in self.operations:
            factors: list[tuple[DimKey, int]] = []
            values = (*operation.ins, *operation.outs)
            dims_of_values = (*operation.factors.ins, *operation.factors.outs)
            for value, factors_of_dims in zip(values, dims_of_values, strict=False):
                for dim, factors_of_dim in enumerate(factors_of_dims):
                    if factors_of_dim:
                        factors.append((DimKey(value, dim), factors_of_dim[0]))
            factors_of_operations.append(factors)
        return factors_of_operations

    def axes_of(self, key: DimKey) -> tuple[str, ...]:
        """The mesh axes that shard one dimension of an array."""
        dims = self.shardings[key.value].dims
        if key.dim < len(dims):
            return dims[key.dim]
        return ()

    def chain(self, value: int, axis: str) -> list[int]:
        """The operations on a shortest path from the origin of the mesh axis `axis` to
        array number `value`. `self.paths` has, for each array, the operation and the
        array before it on its path.
        """
        origin = self.shardings[value].origins.get(axis, "")
        steps = self.paths(axis, origin)
        operations = []
        while (step := steps.get(value)) is not None:
            operation, value = step
            operations.append(operation)
        return operations[::-1]

    def _paths(self, axis: str, origin: str) -> Steps[int]:
        """The shortest paths on which a mesh axis propagated from one origin: an
        argument, a result or a constraint. `origin` is Shardy's text for it, such as
        "input: 0". The items of the paths are numbers of arrays.
        """

        def neighbours(value: int) -> Iterator[tuple[int, int]]:
            for number in self.operations_of[value]:
                operation = self.operations[number]
                for other in (*operation.outs, *operation.ins):
                    if self.shardings[other].origins.get(axis) == origin:
                        yield number, other

        sources = self._sources(origin)
        steps: dict[int, tuple[int, int] | None] = dict.fromkeys(sources)
        deque(_search(steps, neighbours), maxlen=0)
        return steps

    def _sources(self, origin: str) -> Sequence[int]:
        """The arrays that Shardy's text for an origin names, such as "input: 0"; none
        if there are none.
        """
        kind, _, number = origin.partition(": ")
        if kind == "input":
            arrays = self.program.arguments
        elif kind == "output":
            arrays = self.program.results
        else:
            return self.constraints.get(origin, ())
        position = int(number)
        return arrays[position : position + 1]

    @ft.cached_property
    def constraints(self) -> dict[str, list[int]]:
        """For each sharding constraint that is the origin of a mesh axis, the arrays
        that it returns. The keys are Shardy's names of the constraints.
        """
        arrays: dict[str, list[int]] = {}
        for operation in self.operations:
            if operation.name == "sharding_constraint":
                constrained = operation.outs[0]
                origins = self.shardings[constrained].origins
                for origin in set(origins.values()):
                    arrays.setdefault(origin, []).append(constrained)
        return arrays

    def stop_of(self, value: int, axis: str) -> Stop | None:
        """The nearest operation where a mesh axis stopped propagating to the array
        number `value`; `None` if the axis shards no array from which it could have
        propagated.

        The search goes from the array's dimensions to those with the same factor in an
        operation, and so on. `steps` has, for each dimension that it reaches, the
        operation and the dimension before it.
        """
        rank = len(self.values[value].shape)
        dims = [DimKey(value, dim) for dim in range(rank)]
        starts = [key for key in dims if axis not in self.axes_of(key)]
        steps: dict[DimKey, tuple[int, DimKey] | None] = dict.fromkeys(starts)
        with_axis = self._nearest_with(axis, steps)
        if with_axis is None:
            return None
        step = steps[with_axis]
        if step is None:
            return None

        # Back from the dimension that the axis shards to the one that was asked for.
        operation, last = step
        path = [last]
        while (step := steps[path[-1]]) is not None:
            _, previous = step
            path.append(previous)
        # No line of the program computes arrays that only a loop passes on.
        near = self._stacked(last)
        for key in map(self._as_carried, path):
            if not self._is_of_loop(key.value):
                near = key
                break
        return Stop(
            dim=path[-1].dim,
            with_axis=with_axis,
            last=last,
            operation=operation,
            near=near,
        )

    def _nearest_with(
        self,
        axis: str,
        steps: dict[DimKey, tuple[int, DimKey] | None],
    ) -> DimKey | None:
        """The nearest dimension that a mesh axis shards, in a search from the keys of
        `steps`, which `_search` fills.
        """
        nearest = itertools.islice(_search(steps, self._neighbours), _FAR)
        for key in nearest:
            if axis in self.axes_of(key):
                return key
        return None

    def _as_carried(self, key: DimKey) -> DimKey:
        """The dimension `key`; for a loop-carried array, the same dimension of the
        array's next value in the loop.
        """
        return DimKey(self.next_carried.get(key.value, key.value), key.dim)

    def _is_of_loop(self, value: int) -> bool:
        """Whether an array is a loop-carried array, a stack, or a slice of a stack. A
        reshape of such arrays is one too.
        """
        if value not in self.makers:
            return False
        maker = self.operations[self.makers[value]]
        if maker.name in _RESHAPED:
            return all(map(self._is_of_loop, maker.ins))
        return maker.name in _LOOP_OPERATIONS

    def _stacked(self, stack: DimKey) -> DimKey:
        """A loop's body writes slices into a stack. The result is the dimension of the
        slice that corresponds to the dimension `stack` of the stack. If the slice is
        not found, it is the dimension of the stack.

        The search goes from `stack` back over operations of the loop (carries, updates
        and reshapes) to the first array that another operation computes.
        """
        current = stack
        for _ in range(_DEEP):
            current = self._as_carried(current)
            if not self._is_of_loop(current.value):
                return current
            maker_number = self.makers[current.value]
            maker = self.operations[maker_number]
            if not maker.ins:
                break
            # A slice is written into the operand before it.
            is_written = maker.name == "dynamic_update_slice"
            previous = maker.ins[1] if is_written else maker.ins[0]
            previous_key = self._neighbour_in(current, maker_number, previous)
            if previous_key is None:
                break
            current = previous_key
        return self._as_carried(stack)

    def _neighbour_in(self, key: DimKey, number: int, value: int) -> DimKey | None:
        """The dimension of array number `value` that shares a factor with `key` in
        operation `number`.
        """
        for operation, neighbour in self._neighbours(key):
            if operation == number and neighbour.value == value:
                return neighbour
        return None

    def _neighbours(self, key: DimKey) -> Iterator[tuple[int, DimKey]]:
        """Yields the dimensions that share a factor with `key` in an operation, each
        with the operation's number.
        """
        for number in self.operations_of[key.value]:
            factors = {factor for other, factor in self.factors[number] if other == key}
            for other, factor in self.factors[number]:
                if factor in factors and other != key:
                    yield number, other

    @ft.cached_property
    def conflicts(self) -> list[Conflict]:
        """The operations in which a mesh axis shards dimensions of two different
        factors.
        """
        conflicts: list[Conflict] = []
        for number, operation in enumerate(self.operations):
            if operation.name in _IDENTITIES or operation.name == "opaque":
                continue
            dims_by_axis: dict[str, list[tuple[DimKey, int]]] = {}
            for key, factor in self.factors[number]:
                for axis in self.axes_of(key):
                    dims_by_axis.setdefault(axis, []).append((key, factor))
            for axis, dims in dims_by_axis.items():
                # An operation keeps the sharding of its result, if the axis shards it.
                result_dims = [dim for dim in dims if dim[0].value in operation.outs]
                kept, kept_factor = (result_dims or dims)[0]
                for moved, factor in dims:
                    if factor != kept_factor and moved.value in operation.ins:
                        conflict = Conflict(
                            operation=number,
                            axis=axis,
                            kept=kept,
                            moved=moved,
                        )
                        conflicts.append(conflict)
        return conflicts


def _search(
    steps: dict[_T, tuple[int, _T] | None],
    edges: Callable[[_T], Iterable[tuple[int, _T]]],
) -> Iterator[_T]:
    """Yields the items that a breadth-first search from the keys of `steps` reaches.
    Each is added to `steps`, with the operation and the item over which it was
    reached. `edges` returns the neighbours of an item, each with the number of the
    operation between the two.
    """
    queue = deque(steps)
    while queue:
        item = queue.popleft()
        for operation, other in edges(item):
            if other not in steps:
                steps[other] = (operation, item)
                queue.append(other)
                yield other
