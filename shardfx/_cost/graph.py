"""A traced step as one flat list of operations over numbered values: what estimates and searches read.

Calls are written out where they are called, so that a value is one array of one call. Loops are written out once: the
operations of a body are in a `Scope` that says how often they run. What a loop carries is one value, with an
operation "carry" from what the body makes to what the next trip takes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._ground.spec import bits
from .factors import Rule, Shape


class Value(NamedTuple):
    """One array.

    **Arguments:**

    - `shape`, `dtype`: of the whole of it; inside a `shard_map` of what a device holds along its manual axes.
    - `path`: the leaf that it is, for an argument.
    - `is_free`: whether every device has it, or can make its part, without being sent anything: constants, positions,
        random numbers, and what is made of these alone.
    """

    shape: Shape
    dtype: Any
    path: str | None = None
    is_free: bool = False

    @property
    def itemsize(self) -> float:
        """Bytes per element."""
        return bits(self.dtype) / 8


class Scope(NamedTuple):
    """A place where operations run.

    **Arguments:**

    - `parent`: the scope around it, by its number; the first is its own.
    - `trips`: how often it runs each time that the one around it runs; `None` where that depends on values.
    - `branch`: the number of the conditional and of its branch, or `None`.
    """

    parent: int
    trips: int | None = 1
    branch: tuple[int, int] | None = None


# A variable of a jaxpr, and the way to it: the equations around it by position, and which of their programs.
Bound = tuple[tuple[int, ...], Any]


class Pin(NamedTuple):
    """A layout that is asked for.

    **Arguments:**

    - `entries`: for each dimension its mesh axes, or UNCONSTRAINED.
    - `among`: the mesh axes that it is about; `None` for all. Others may cut what it says nothing of.
    """

    entries: tuple[Any, ...]
    among: frozenset[str] | None = None


class Op(NamedTuple):
    """One operation.

    **Arguments:**

    - `name`: of its primitive; "carry", "layer" and "stack" hand values into and out of loops.
    - `operands`, `results`: values, by number.
    - `rule`: which of their dimensions belong together.
    - `scope`: where it runs, by number.
    - `pin`: the layout that its result is constrained to, if it is.
    - `sources`: where it was traced, innermost first: JAX's `source_info` of its equation and of the calls around it.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule
    scope: int
    sources: tuple[Any, ...]
    pin: Pin | None = None


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step without its shardings, but for the constraints in it; made once by `traced`, read under many plans.

    `values`, `ops` and `scopes` are numbered by their positions; `ops` are in an order in which each value is made
    before it is used. `arguments` and `results` are the numbers of the values that go in and come out, in the order of
    the leaves of the step's arguments and results that are arrays.

    `bound` says which value each variable of the jaxpr is.

    What `Rule` says of an operation is enough to follow a name from dimension to dimension: two dimensions with a
    factor in common have the same name. To have constraints by logical name and not by mesh axis, trace the step under
    a plan on a mesh with an axis of size 1 for each name.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    scopes: tuple[Scope, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    bound: Mapping[Bound, int] = dataclasses.field(default_factory=dict)

    def calls(self, scope: int) -> tuple[int, bool]:
        """How often a scope runs in one step, and whether that is known; a loop without a known end counts once."""
        count, known = 1, True
        while scope:
            trips = self.scopes[scope].trips
            count, known = count * (1 if trips is None else trips), known and trips is not None
            scope = self.scopes[scope].parent
        return count, known

    def branches(self, scope: int) -> tuple[tuple[int, int], ...]:
        """The conditionals that a scope is in, each with the number of its branch, outermost first."""
        found = []
        while scope:
            if self.scopes[scope].branch is not None:
                found.append(self.scopes[scope].branch)
            scope = self.scopes[scope].parent
        return tuple(reversed(found))

    def is_within(self, inner: int, outer: int) -> bool:
        """Whether a scope is another one, or in it."""
        while inner > outer:
            inner = self.scopes[inner].parent
        return inner == outer

    def uses(self) -> list[int]:
        """How often each value is used, results of the step included."""
        counts = [0] * len(self.values)
        for op in self.ops:
            for value in op.operands:
                counts[value] += 1
        for value in self.results:
            counts[value] += 1
        return counts
