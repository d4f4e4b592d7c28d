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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
      the array of `last` is a
        loop-carried array or a stack, it is a dimension of the nearest array that a
        line of the program computes.
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
        self.program, self.values, self.operations = (
            program,
            program.values,
            program.operations,
        )
        self.shardings = [value.sharding or _NONE for value in self.values]
        # The operations that compute or read each array, and the operation that
        # computes each array.
        self.operations_of: list[list[int]] = [[] for _ in self.values]
        self.makers: dict[int, int] = {}
        for at, made in enumerate(self.operations):
            for value in {*made.ins, *made.outs}:
                self.operations_of[value].append(at)
            for out in made.outs:
                self.makers.setdefault(out, at)
        # For each loop-carried array, the array that the loop's body returns as its
        # next value.
        self.next_carried = {
            made.ins[1]: made.ins[0]
            for made in self.operations
            if made.name == "return"
        }
        self.paths = ft.lru_cache(maxsize=4096)(self._paths)

    @ft.cached_property
    def factors(self) -> list[list[tuple[DimKey, int]]]:
        """For each operation, the dimensions of its arrays, each with its factor. A
        dimension with several factors has only the major-most here, since a mesh axis
        shards that one.
        """
        found = []
        for made in self.operations:
            pairs = [
                *zip(made.ins, made.factors.ins, strict=False),
                *zip(made.outs, made.factors.outs, strict=False),
            ]
            found.append(
                [
                    (DimKey(value, dim), own[0])
                    for value, dims in pairs
                    for dim, own in enumerate(dims)
                    if own
                ]
            )
        return found

    def axes_of(self, one: DimKey) -> tuple[str, ...]:
        """The mesh axes that shard one dimension of an array."""
        dims = self.shardings[one.value].dims
        return dims[one.dim] if one.dim < len(dims) else ()

    def chain(self, value: int, axis: str) -> list[int]:
        """The operations on a shortest path from the origin of the mesh axis `axis` to
        array number `value`.
        """
        before, chain = (
            self.paths(axis, self.shardings[value].origins.get(axis, "")),
            [],
        )
        while (step := before.get(value)) is not None:
            operation, value = step
            chain.append(operation)
        return chain[::-1]

    def _paths(self, axis: str, origin: str) -> Steps[int]:
        """The shortest paths on which a mesh axis propagated from one origin: an
        argument, a result or a constraint. `origin` is Shardy's text for it, such as
        "input: 0". The items of the paths are numbers of arrays.
        """
        kind, _, number = origin.partition(": ")
        sources = self.constraints.get(origin, ())
        if kind in ("input", "output"):
            arrays = self.program.arguments if kind == "input" else self.program.results
            sources = arrays[int(number) : int(number) + 1]

        def neighbours(value: int) -> Iterator[tuple[int, int]]:
            for at in self.operations_of[value]:
                for other in (*self.operations[at].outs, *self.operations[at].ins):
                    if self.shardings[other].origins.get(axis) == origin:
                        yield at, other

        before: dict[int, tuple[int, int] | None] = dict.fromkeys(sources)
        deque(_search(before, neighbours), maxlen=0)
        return before

    @ft.cached_property
    def constraints(self) -> dict[str, list[int]]:
        """For each sharding constraint that is the origin of a mesh axis, the arrays
        that it returns. The keys are Shardy's names of the constraints.
        """
        found: dict[str, list[int]] = {}
        for made in self.operations:
            if made.name == "sharding_constraint":
                for origin in {*self.shardings[made.outs[0]].origins.values()}:
                    found.setdefault(origin, []).append(made.outs[0])
        return found

    def stop_of(self, value: int, axis: str) -> Stop | None:
        """The nearest operation where a mesh axis stopped propagating to the array
        number `value`; `None` if the axis shards no array from which it could have
        propagated.
        """
        shape = self.values[value].shape
        starts = [
            DimKey(value, dim)
            for dim in range(len(shape))
            if axis not in self.axes_of(DimKey(value, dim))
        ]
        before: dict[DimKey, tuple[int, DimKey] | None] = dict.fromkeys(starts)
        near = itertools.islice(_search(before, self._neighbours), _FAR)
        with_axis = next((one for one in near if axis in self.axes_of(one)), None)
        if with_axis is None or (step := before[with_axis]) is None:
            return None
        operation, last = step
        back = [last]
        while (step := before[back[-1]]) is not None:
            back.append(step[1])
        named = (
            one
            for one in map(self._as_carried, back)
            if not self._is_of_loop(one.value)
        )
        return Stop(
            back[-1].dim, with_axis, last, operation, next(named, self._stacked(last))
        )

    def _as_carried(self, one: DimKey) -> DimKey:
        """The dimension `one`; for a loop-carried array, the same dimension of the
        array's next value in the loop.
        """
        return DimKey(self.next_carried.get(one.value, one.value), one.dim)

    def _is_of_loop(self, value: int) -> bool:
        """Whether an array is a loop-carried array, a stack, or a slice of a stack."""
        made = self.operations[self.makers[value]] if value in self.makers else None
        if made is None or made.name in _RESHAPED:
            return made is not None and all(map(self._is_of_loop, made.ins))
        return made.name in _LOOP_OPERATIONS

    def _stacked(self, stack: DimKey) -> DimKey:
        """A loop's body writes slices into a stack. The result is the dimension of the
        slice that corresponds to the dimension `stack` of the stack. If the slice is
        not found, it is the dimension of the stack.
        """
        here = stack
        for _ in range(_DEEP):
            here = self._as_carried(here)
            if not self._is_of_loop(here.value):
                return here
            at = self.makers[here.value]
            made = self.operations[at]
            source = made.ins[made.name == "dynamic_update_slice"] if made.ins else None
            written = (
                there
                for own, there in self._neighbours(here)
                if own == at and there.value == source
            )
            if (here := next(written, None)) is None:
                break
        return self._as_carried(stack)

    def _neighbours(self, here: DimKey) -> Iterator[tuple[int, DimKey]]:
        """Yields the dimensions that share a factor with `here` in an operation, each
        with the operation's number.
        """
        for at in self.operations_of[here.value]:
            factors = {factor for one, factor in self.factors[at] if one == here}
            for one, factor in self.factors[at]:
                if factor in factors and one != here:
                    yield at, one

    @ft.cached_property
    def conflicts(self) -> list[Conflict]:
        """The operations in which a mesh axis shards dimensions of two different
        factors.
        """
        found: list[Conflict] = []
        for at, made in enumerate(self.operations):
            dims_of: dict[str, list[tuple[DimKey, int]]] = {}
            for one, factor in (
                self.factors[at] if made.name not in (*_IDENTITIES, "opaque") else ()
            ):
                for axis in self.axes_of(one):
                    dims_of.setdefault(axis, []).append((one, factor))
            for axis, pairs in dims_of.items():
                kept, keeper = next(
                    (pair for pair in pairs if pair[0].value in made.outs), pairs[0]
                )
                moved = (
                    one
                    for one, factor in pairs
                    if factor != keeper and one.value in made.ins
                )
                found += [Conflict(at, axis, kept, one) for one in moved]
        return found


def _search(
    before: dict[_T, tuple[int, _T] | None],
    edges: Callable[[_T], Iterable[tuple[int, _T]]],
) -> Iterator[_T]:
    """Yields the items that a breadth-first search from the keys of `before` reaches.
    Each is added to `before`, with the operation and the item over which it was
    reached. `edges` returns the neighbours of an item, each with the number of the
    operation between the two.
    """
    queue = deque(before)
    while queue:
        item = queue.popleft()
        for at, other in edges(item):
            if other not in before:
                before[other] = (at, item)
                queue.append(other)
                yield other
