"""A step after Shardy's propagation as a graph: the operations over which a mesh axis reached an array, and the
conflicts between them.
"""

import functools as ft
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._step import Laid, Operation, Program


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


class Holder(NamedTuple):
    """One dimension of one array."""

    value: int
    dim: int


class Lost(NamedTuple):
    """A mesh axis that an array lacks on a dimension, although a neighbouring array has it on the corresponding
    dimension.

    `holder` is the array that has the axis, `last` the array next to it that does not, and `operation` is between them.
    `near` is the nearest array that a program can name: `last`, or the value that a loop reads from it if `last` is a
    stack.
    """

    dim: int
    holder: Holder
    last: Holder
    operation: int
    near: Holder


class Conflict(NamedTuple):
    """An operation whose arrays have one mesh axis on two factors. The arrays of `kept` keep it, those of `moved` are
    gathered.
    """

    operation: int
    axis: str
    kept: Holder
    moved: Holder


class Graph:
    """The arrays of a propagated program, and the operations between them."""

    def __init__(self, program: Program):
        self.program = program
        self.laid = [value.laid or _NONE for value in program.values]
        self.ways: dict[tuple[str, str], Mapping[int, tuple[int, int] | None]] = {}

    @ft.cached_property
    def operations_of(self) -> list[list[int]]:
        """For each array, the operations that make it or read it."""
        found: list[list[int]] = [[] for _ in self.program.values]
        for at, made in enumerate(self.program.operations):
            for value in {*made.ins, *made.outs}:
                found[value].append(at)
        return found

    @ft.cached_property
    def factors(self) -> list[list[tuple[Holder, int]]]:
        """For each operation, the dimensions of its arrays, each with its major-most factor, the one that a mesh axis
        shards.
        """
        return [
            [
                (Holder(value, dim), own[0])
                for values, dims in ((made.ins, made.factors.ins), (made.outs, made.factors.outs))
                for value, each in zip(values, dims, strict=False)
                for dim, own in enumerate(each)
                if own
            ]
            for made in self.program.operations
        ]

    @ft.cached_property
    def makers(self) -> dict[int, int]:
        """For each array, the operation that makes it."""
        pairs = enumerate(self.program.operations)
        return {out: at for at, made in reversed(list(pairs)) for out in made.outs}

    @ft.cached_property
    def ended(self) -> dict[int, int]:
        """For each loop-carried array, the array that one iteration hands to the next in its place."""
        return {made.ins[1]: made.ins[0] for made in self.program.operations if made.name == "return"}

    def axes_of(self, holder: Holder) -> tuple[str, ...]:
        """The mesh axes that shard one dimension of an array."""
        dims = self.laid[holder.value].dims
        return dims[holder.dim] if holder.dim < len(dims) else ()

    def chain(self, value: int, axis: str) -> list[int]:
        """The operations on a shortest path from the origin of a mesh axis to an array."""
        origin = self.laid[value].origins.get(axis, "")
        before, way = self._ways(axis, origin), []
        while value in before and (step := before[value]) is not None:
            operation, value = step
            way.append(operation)
        return way[::-1]

    def _ways(self, axis: str, origin: str) -> Mapping[int, tuple[int, int] | None]:
        """For each array with this axis from this origin, the operation and the array from which it got the axis."""
        if (axis, origin) not in self.ways:
            self.ways[axis, origin] = self._found(axis, origin)
        return self.ways[axis, origin]

    def _found(self, axis: str, origin: str) -> Mapping[int, tuple[int, int] | None]:
        found: dict[int, tuple[int, int] | None] = dict.fromkeys(self._sources(origin))
        queue = deque(found)
        while queue:
            value = queue.popleft()
            for at in self.operations_of[value]:
                made = self.program.operations[at]
                for other in (*made.outs, *made.ins):
                    if other not in found and self.laid[other].origins.get(axis) == origin:
                        found[other] = (at, value)
                        queue.append(other)
        return found

    def _sources(self, origin: str) -> Sequence[int]:
        kind, _, number = origin.partition(": ")
        if kind in ("input", "output"):
            arrays = self.program.arguments if kind == "input" else self.program.results
            return arrays[int(number) : int(number) + 1]
        return [value for value in self.constraints.get(origin, ())]

    @ft.cached_property
    def constraints(self) -> dict[str, list[int]]:
        """For each constraint's name, the arrays that the constraint made."""
        found: dict[str, list[int]] = {}
        for made in self.program.operations:
            if made.name == "sharding_constraint":
                for origin in {*self.laid[made.outs[0]].origins.values()}:
                    found.setdefault(origin, []).append(made.outs[0])
        return found

    def lost(self, value: int, axis: str) -> Lost | None:
        """The nearest array that has the axis on a corresponding dimension, for an array that lacks it there; `None`
        without one.
        """
        shape = self.program.values[value].shape
        starts = [Holder(value, dim) for dim in range(len(shape)) if axis not in self.axes_of(Holder(value, dim))]
        before: dict[Holder, Holder] = {one: one for one in starts}
        queue = deque(starts)
        while queue and len(before) < _FAR:
            here = queue.popleft()
            for at, there in self._beside(here):
                if there in before:
                    continue
                if axis in self.axes_of(there):
                    return self._lost(before, there, here, at)
                before[there] = here
                queue.append(there)
        return None

    def _lost(self, before: Mapping[Holder, Holder], holder: Holder, last: Holder, operation: int) -> Lost:
        way = [last]
        while before[way[-1]] != way[-1]:
            way.append(before[way[-1]])
        named = (one for one in map(self._ended, way) if not self._is_of_loop(one.value))
        return Lost(way[-1].dim, holder, last, operation, next(named, self._put(last)))

    def _ended(self, one: Holder) -> Holder:
        """The dimension of the array that an iteration hands on in place of a loop-carried array; other dimensions as
        they are.
        """
        return Holder(self.ended.get(one.value, one.value), one.dim)

    def _is_of_loop(self, value: int) -> bool:
        """Whether an array is made by a loop's bookkeeping rather than by a line of the program."""
        made = self.program.operations[self.makers[value]] if value in self.makers else None
        if made is None or made.name in _RESHAPED:
            return made is not None and all(map(self._is_of_loop, made.ins))
        return made.name in _OF_LOOPS

    def _put(self, stack: Holder) -> Holder:
        """The dimension of the value that a loop's body writes into a stack, for a dimension of the stack."""
        here = stack
        for _ in range(_DEEP):
            here = self._ended(here)
            if not self._is_of_loop(here.value):
                return here
            at = self.makers[here.value]
            made = self.program.operations[at]
            source = made.ins[made.name == "dynamic_update_slice"] if made.ins else None
            put = (there for own, there in self._beside(here) if own == at and there.value == source)
            if (here := next(put, None)) is None:
                break
        return self._ended(stack)

    def _beside(self, here: Holder) -> Iterator[tuple[int, Holder]]:
        """The dimensions that share a factor with `here` in an operation, each with that operation."""
        for at in self.operations_of[here.value]:
            factors = {factor for one, factor in self.factors[at] if one == here}
            for one, factor in self.factors[at]:
                if factor in factors and one != here:
                    yield at, one

    @ft.cached_property
    def conflicts(self) -> list[Conflict]:
        """The operations whose arrays have one mesh axis on two factors."""
        return [one for at, made in enumerate(self.program.operations) for one in self._conflicts(at, made)]

    def _conflicts(self, at: int, made: Operation) -> Iterator[Conflict]:
        if made.name in _HANDED or made.name == "opaque":
            return
        held: dict[str, list[tuple[Holder, int]]] = {}
        for one, factor in self.factors[at]:
            for axis in self.axes_of(one):
                held.setdefault(axis, []).append((one, factor))
        for axis, pairs in held.items():
            if len({factor for _, factor in pairs}) < 2:
                continue
            kept, keeper = next(((one, f) for one, f in pairs if one.value in made.outs), pairs[0])
            for one, factor in pairs:
                if factor != keeper and one.value in made.ins:
                    yield Conflict(at, axis, kept, one)
