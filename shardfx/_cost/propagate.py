"""How every array of a step lies, from how its arguments and constraints do: as the compilers decide it."""

import math
from collections.abc import Mapping, Sequence

from .._ground.spec import UNCONSTRAINED
from .factors import Dim
from .graph import Op, Pin, Traced
from .layout import Layout, MeshParts, Parts


# What decides first: arrays that are another array in all but shape, then those that are larger or smaller, and
# products last, whose two sides may want different things.
_SIMPLE, _OTHERS, _PRODUCTS = range(3)
_CONSTRAINTS = ("sharding_constraint", "reshard", "result")
# What hands values on between a loop and what is around it.
_PASSED = ("carry", "layer", "stack", "branch", "enter", "leave", "again", "shard_map")


def propagated(traced: Traced, axes: MeshParts, arguments: Mapping[int, Pin]) -> list[Layout]:
    """The layout of each value.

    **Arguments:**

    - `traced`: the step.
    - `axes`: of the mesh.
    - `arguments`: how arguments lie, by the number of the value; those left out may lie in any way.

    **Returns:**

    A layout for each value, by its number. Nothing is changed that is given or constrained; everything else takes on
    what it is made of and what is made of it, until nothing more can be taken on.
    """
    flow = _Flow(traced, axes)
    for value, pin in arguments.items():
        flow.pin(value, pin)
    for op in traced.ops:
        if op.pin is not None:
            flow.pin(op.results[0], op.pin)
    for value, pin in _made_so(traced).items():
        flow.pin(value, pin)
    flow.run()
    return [tuple(layout) for layout in flow.layouts]


def _made_so(traced: Traced) -> dict[int, Pin]:
    """The values that are constrained right where they are made: they are made in that layout."""
    made = {value for op in traced.ops if op.pin is None and op.name not in _PASSED for value in op.results}
    found: dict[int, Pin] = {}
    others: set[int] = set()
    for op in traced.ops:
        if op.pin is None or op.pin.among is not None or op.name not in _CONSTRAINTS or op.operands[0] not in made:
            continue
        if found.setdefault(op.operands[0], op.pin) != op.pin:
            others.add(op.operands[0])
    return {value: pin for value, pin in found.items() if value not in others}


class _Flow:
    def __init__(self, traced: Traced, axes: MeshParts):
        self.traced, self.axes = traced, axes
        self.layouts: list[list[Parts]] = [[()] * len(value.shape) for value in traced.values]
        self.weights = [float(math.prod(value.shape)) for value in traced.values]
        self.closed: dict[int, tuple[bool, ...]] = {}
        self.barred: dict[int, frozenset[int]] = {}
        self.neighbours: list[list[int]] = [[] for _ in traced.values]
        for at, op in enumerate(traced.ops):
            for value in (*op.operands, *op.results):
                self.neighbours[value].append(at)
        self.levels = [_level(op) for op in traced.ops]
        self.is_open = bytearray(len(traced.ops))

    def pin(self, value: int, pin: Pin) -> None:
        self.layouts[value] = [() if e is UNCONSTRAINED else self.axes.of(e) for e in pin.entries]
        if pin.among is None:
            self.closed[value] = tuple(e is not UNCONSTRAINED for e in pin.entries)
        else:
            self.barred[value] = frozenset(self.axes.of(pin.among))
        self.reopen(value)

    def reopen(self, value: int) -> None:
        for at in self.neighbours[value]:
            self.is_open[at] = 1

    def run(self) -> None:
        order = range(len(self.traced.ops))
        for level in (_SIMPLE, _OTHERS, _PRODUCTS):
            moving = True
            while moving:
                moving = False
                for way in (order, reversed(order)):
                    for at in way:
                        if self.is_open[at] and self.levels[at] <= level:
                            self.is_open[at] = 0
                            self.visit(self.traced.ops[at])
                            moving = True

    def visit(self, op: Op) -> None:
        """Hands on what any array of an operation knows about a factor to all others."""
        rule, values = op.rule, self.traced.values
        best: dict[int, tuple[float, Parts]] = {}
        sides = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
        for value, dims in sides:
            if values[value].is_free:
                continue
            for dim, parts in zip(dims, self.layouts[value], strict=True):
                for factor, own in self.axes.split(parts, dim, rule.sizes) if parts else ():
                    if rule.kinds[factor] != "whole":
                        _merge(best, factor, own, self.weights[value])
        if not best:
            return
        found = {factor: parts for factor, (_, parts) in best.items()}
        for value, dims in sides:
            if not values[value].is_free:
                self.extend(value, dims, found, best, op)

    def extend(
        self, value: int, dims: Sequence[Dim], found: dict[int, Parts], best: dict[int, tuple[float, Parts]], op: Op
    ) -> None:
        layout, closed = self.layouts[value], self.closed.get(value)
        wanted = []
        for at, dim in enumerate(dims):
            if not found.keys().isdisjoint(dim) and not (closed and closed[at]):
                parts = found[dim[0]] if len(dim) == 1 else self.axes.joined(found, dim, op.rule.sizes)
                if len(parts) > len(layout[at]) and parts[: len(layout[at])] == layout[at]:
                    weight = max(best[factor][0] for factor in dim if factor in best)
                    wanted.append((-weight, at, parts))
        for _, at, parts in sorted(wanted):
            new = parts[len(layout[at]) :]
            others = {part for own in layout for part in own} | self.barred.get(value, frozenset())
            if others.isdisjoint(new):
                layout[at] = parts
                self.reopen(value)


def _level(op: Op) -> int:
    if op.rule.is_simple or op.pin is not None:
        return _SIMPLE
    return _PRODUCTS if op.rule.is_product else _OTHERS


def _merge(best: dict[int, tuple[float, Parts]], factor: int, parts: Parts, weight: float) -> None:
    """Keeps the longer of two that agree, and of two that do not that of the larger array."""
    before = best.get(factor)
    if before is None:
        best[factor] = weight, parts
        return
    heavy, old = before
    if parts[: len(old)] == old:
        best[factor] = max(heavy, weight), parts
    elif old[: len(parts)] != parts and weight > heavy:
        best[factor] = weight, parts
