"""A propagated step as a graph: over which operations an axis came, and who else wanted it."""

import functools as ft
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._step import Laid, Operation, Program


# Arrays looked at for one that has the axis: what is further away has little to do with it.
_FAR = 4000
_NONE = Laid((), {})
# What hands an array on as it is.
_HANDED = ("carry", "return", "use")


class Holder(NamedTuple):
    """One dimension of one array."""

    value: int
    dim: int


class Lost(NamedTuple):
    """An axis that an array does not have on one of its dimensions, while a neighbour has it there.

    `holder` has it, `last` is the array next to it that has not, and `operation` is between the two.
    """

    dim: int
    holder: Holder
    last: Holder
    operation: int


class Conflict(NamedTuple):
    """An operation whose arrays have one axis on two factors: those of `kept` stay, those of `moved` are gathered."""

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
        """By array the operations that make or take it."""
        found: list[list[int]] = [[] for _ in self.program.values]
        for at, made in enumerate(self.program.operations):
            for value in {*made.ins, *made.outs}:
                found[value].append(at)
        return found

    @ft.cached_property
    def factors(self) -> list[list[tuple[Holder, int]]]:
        """By operation each dimension of its arrays with its slowest factor: that is where an axis cuts it."""
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
        """By array the operation that makes it."""
        pairs = enumerate(self.program.operations)
        return {out: at for at, made in reversed(list(pairs)) for out in made.outs}

    @ft.cached_property
    def ended(self) -> dict[int, int]:
        """By array that a loop carries what an iteration makes of it."""
        return {made.ins[1]: made.ins[0] for made in self.program.operations if made.name == "return"}

    def axes_of(self, holder: Holder) -> tuple[str, ...]:
        """The mesh axes on one dimension."""
        dims = self.laid[holder.value].dims
        return dims[holder.dim] if holder.dim < len(dims) else ()

    def chain(self, value: int, axis: str) -> list[int]:
        """The operations from the origin of an axis to this array, a shortest way."""
        origin = self.laid[value].origins.get(axis, "")
        before, way = self._ways(axis, origin), []
        while value in before and (step := before[value]) is not None:
            operation, value = step
            way.append(operation)
        return way[::-1]

    def _ways(self, axis: str, origin: str) -> Mapping[int, tuple[int, int] | None]:
        """By array with this axis of this origin the operation and the array that it came from."""
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
        """By name of a constraint the arrays that it made."""
        found: dict[str, list[int]] = {}
        for made in self.program.operations:
            if made.name == "sharding_constraint":
                for origin in {*self.laid[made.outs[0]].origins.values()}:
                    found.setdefault(origin, []).append(made.outs[0])
        return found

    def lost(self, value: int, axis: str) -> Lost | None:
        """The nearest array that has the axis on a dimension which goes with one that has it not here."""
        shape = self.program.values[value].shape
        starts = [Holder(value, dim) for dim in range(len(shape)) if axis not in self.axes_of(Holder(value, dim))]
        seen, queue = {one: one.dim for one in starts}, deque(starts)
        while queue and len(seen) < _FAR:
            here = queue.popleft()
            for at, there in self._beside(here):
                if there in seen:
                    continue
                if axis in self.axes_of(there):
                    return Lost(seen[here], there, here, at)
                seen[there] = seen[here]
                queue.append(there)
        return None

    def _beside(self, here: Holder) -> Iterator[tuple[int, Holder]]:
        """The dimensions that operations walk together with one."""
        for at in self.operations_of[here.value]:
            factors = {factor for one, factor in self.factors[at] if one == here}
            for one, factor in self.factors[at]:
                if factor in factors and one != here:
                    yield at, one

    @ft.cached_property
    def conflicts(self) -> list[Conflict]:
        """Every operation whose arrays have an axis on two factors."""
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
