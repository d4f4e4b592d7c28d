"""A step after Shardy's propagation as a graph: the operations over which a mesh axis reached an array, and the
conflicts between them.
"""

import functools as ft
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from .._step import Laid, Program


# The number of arrays that are searched for one with the axis. Arrays further away have little to do with it.
_FAR = 4000
_NONE = Laid((), {})
# The number of operations allowed between a stack and a value that is written to it.
_DEEP = 8
# The operations by which loops read and write stacks, and that reshape a slice of one.
_OF_LOOPS = ("carry", "return", "use", "dynamic_slice", "dynamic_update_slice")
_RESHAPED = ("reshape", "broadcast_in_dim", "constant")
# The operations that return their operand unchanged.
_HANDED = ("carry", "return", "use")


_T = TypeVar("_T", bound=Hashable)
# For each item that a walk reached, the operation and the item that led to it; `None` for the items it started from.
Steps = Mapping[_T, tuple[int, _T] | None]


class Holder(NamedTuple):
    """One dimension of one array, as a key."""

    value: int
    dim: int


class Lost(NamedTuple):
    """The operation where a mesh axis stopped propagating: one of its arrays is sharded over the axis, and the other
    has the corresponding dimension without it.

    `holder` is the array with the axis, and `last` the neighbour without it. `near` is the array to constrain: `last`,
    or the value that a loop reads from `last` if that is a stack.
    """

    dim: int
    holder: Holder
    last: Holder
    operation: int
    near: Holder


class Conflict(NamedTuple):
    """An operation two of whose factors have the same mesh axis in different arrays. The arrays of `kept` keep it;
    those of `moved` are gathered.
    """

    operation: int
    axis: str
    kept: Holder
    moved: Holder


class Graph:
    """The arrays of a propagated program, and the operations between them."""

    def __init__(self, program: Program):
        self.program, self.values, self.operations = program, program.values, program.operations
        self.laid = [value.laid or _NONE for value in self.values]
        # For each array, the operations that make it or read it; for each made array, the operation that makes it.
        self.operations_of: list[list[int]] = [[] for _ in self.values]
        self.makers: dict[int, int] = {}
        for at, made in enumerate(self.operations):
            for value in {*made.ins, *made.outs}:
                self.operations_of[value].append(at)
            for out in made.outs:
                self.makers.setdefault(out, at)
        # For each loop-carried array, the array that one iteration gives the next in its place.
        self.ended = {made.ins[1]: made.ins[0] for made in self.operations if made.name == "return"}
        self.paths = ft.lru_cache(maxsize=4096)(self._paths)

    @ft.cached_property
    def factors(self) -> list[list[tuple[Holder, int]]]:
        """For each operation, the dimensions of its arrays, each with its major-most factor, the one that a mesh axis
        shards.
        """
        found = []
        for made in self.operations:
            pairs = [*zip(made.ins, made.factors.ins, strict=False), *zip(made.outs, made.factors.outs, strict=False)]
            found.append([(Holder(value, dim), own[0]) for value, dims in pairs for dim, own in enumerate(dims) if own])
        return found

    def axes_of(self, holder: Holder) -> tuple[str, ...]:
        """The mesh axes that shard one dimension of an array."""
        dims = self.laid[holder.value].dims
        return dims[holder.dim] if holder.dim < len(dims) else ()

    def chain(self, value: int, axis: str) -> list[int]:
        """The operations on a shortest path from the origin of a mesh axis to an array."""
        before, chain = self.paths(axis, self.laid[value].origins.get(axis, "")), []
        while (step := before.get(value)) is not None:
            operation, value = step
            chain.append(operation)
        return chain[::-1]

    def _paths(self, axis: str, origin: str) -> Steps[int]:
        """For each array with this axis from this origin, the previous array on a shortest path from the origin, and
        the operation between the two.
        """
        kind, _, number = origin.partition(": ")
        sources = self.constraints.get(origin, ())
        if kind in ("input", "output"):
            arrays = self.program.arguments if kind == "input" else self.program.results
            sources = arrays[int(number) : int(number) + 1]

        def beside(value: int) -> Iterator[tuple[int, int]]:
            for at in self.operations_of[value]:
                for other in (*self.operations[at].outs, *self.operations[at].ins):
                    if self.laid[other].origins.get(axis) == origin:
                        yield at, other

        before: dict[int, tuple[int, int] | None] = dict.fromkeys(sources)
        deque(_walked(before, beside), maxlen=0)
        return before

    @ft.cached_property
    def constraints(self) -> dict[str, list[int]]:
        """For each sharding constraint, by its name, the arrays that the constraint returns."""
        found: dict[str, list[int]] = {}
        for made in self.operations:
            if made.name == "sharding_constraint":
                for origin in {*self.laid[made.outs[0]].origins.values()}:
                    found.setdefault(origin, []).append(made.outs[0])
        return found

    def lost(self, value: int, axis: str) -> Lost | None:
        """Where the mesh axis stopped propagating to an array that lacks it: the nearest operation with an array that
        has the axis; `None` if no array has it.
        """
        shape = self.values[value].shape
        starts = [Holder(value, dim) for dim in range(len(shape)) if axis not in self.axes_of(Holder(value, dim))]
        before: dict[Holder, tuple[int, Holder] | None] = dict.fromkeys(starts)
        near = itertools.islice(_walked(before, self._beside), _FAR)
        holder = next((one for one in near if axis in self.axes_of(one)), None)
        if holder is None or (step := before[holder]) is None:
            return None
        operation, last = step
        back = [last]
        while (step := before[back[-1]]) is not None:
            back.append(step[1])
        named = (one for one in map(self._ended, back) if not self._is_of_loop(one.value))
        return Lost(back[-1].dim, holder, last, operation, next(named, self._put(last)))

    def _ended(self, one: Holder) -> Holder:
        """For a loop-carried array, the same dimension of the array that the body returns in its place; other arrays
        unchanged.
        """
        return Holder(self.ended.get(one.value, one.value), one.dim)

    def _is_of_loop(self, value: int) -> bool:
        """Whether an array is made by a loop's bookkeeping rather than by a line of the program."""
        made = self.operations[self.makers[value]] if value in self.makers else None
        if made is None or made.name in _RESHAPED:
            return made is not None and all(map(self._is_of_loop, made.ins))
        return made.name in _OF_LOOPS

    def _put(self, stack: Holder) -> Holder:
        """For a dimension of a stack that a loop writes, the dimension of the value that the loop's body writes into
        it.
        """
        here = stack
        for _ in range(_DEEP):
            here = self._ended(here)
            if not self._is_of_loop(here.value):
                return here
            at = self.makers[here.value]
            made = self.operations[at]
            source = made.ins[made.name == "dynamic_update_slice"] if made.ins else None
            put = (there for own, there in self._beside(here) if own == at and there.value == source)
            if (here := next(put, None)) is None:
                break
        return self._ended(stack)

    def _beside(self, here: Holder) -> Iterator[tuple[int, Holder]]:
        """Yields the dimensions that have a factor in common with `here` in some operation, each with the operation."""
        for at in self.operations_of[here.value]:
            factors = {factor for one, factor in self.factors[at] if one == here}
            for one, factor in self.factors[at]:
                if factor in factors and one != here:
                    yield at, one

    @ft.cached_property
    def conflicts(self) -> list[Conflict]:
        """The operations whose arrays have one mesh axis on two factors."""
        found: list[Conflict] = []
        for at, made in enumerate(self.operations):
            held: dict[str, list[tuple[Holder, int]]] = {}
            for one, factor in self.factors[at] if made.name not in (*_HANDED, "opaque") else ():
                for axis in self.axes_of(one):
                    held.setdefault(axis, []).append((one, factor))
            for axis, pairs in held.items():
                kept, keeper = next((pair for pair in pairs if pair[0].value in made.outs), pairs[0])
                moved = (one for one, factor in pairs if factor != keeper and one.value in made.ins)
                found += [Conflict(at, axis, kept, one) for one in moved]
        return found


def _walked(before: dict[_T, tuple[int, _T] | None], beside: Callable[[_T], Iterable[tuple[int, _T]]]) -> Iterator[_T]:
    """Yields the items that a breadth-first search from the keys of `before` reaches. It records the predecessor of
    each in `before`.

    `beside` gives the neighbours of an item, each with the operation between them.
    """
    queue = deque(before)
    while queue:
        item = queue.popleft()
        for at, other in beside(item):
            if other not in before:
                before[other] = (at, item)
                queue.append(other)
                yield other
