"""How every array of a step lies, from how its arguments and constraints do: as the compilers decide it.

That is Shardy's propagation, in its order. Operations are asked in turns: first those that change only what an array
looks like, then what passes through others, then what they sum over, and what is broadcast last. In each turn they
are asked from the first to the last, those in a loop before what the loop carries is; and where an array changes, its
neighbours are asked at once, before what comes later. So who comes first decides, where two want different things.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from .._ground.spec import UNCONSTRAINED
from .factors import Dims
from .graph import Op, Pin, Traced
from .layout import Layout, MeshParts, Parts
from .matched import Cut


_CONSTRAINTS = ("sharding_constraint", "reshard")
# What hands values on between a loop and what is around it.
_PASSED = ("carry", "layer", "stack", "branch", "enter", "leave", "again", "shard_map")
# What takes a piece of an array, or puts one there: at first only the array tells the piece.
_PIECES = ("layer", "stack", "dynamic_slice", "dynamic_update_slice")

_Direction = Literal["", "forward", "backward", "both"]
# Where an operation hands on what passes through it, and where what it sums over; a pair for each turn.
_Pair = tuple[_Direction, _Direction]
_Turns = tuple[_Pair, ...]
_NOT: _Pair = ("", "")
_BOTH: _Pair = ("both", "both")
_FORWARD: _Pair = ("forward", "forward")
_ALIKE_ONCE: _Turns = (_BOTH, _BOTH, _BOTH, _BOTH, _BOTH)
_ALIKE: _Turns = (_NOT, _BOTH, _BOTH, _BOTH, _BOTH)
_PIECE_ONCE: _Turns = (_FORWARD, _FORWARD, ("both", "forward"), _BOTH, _BOTH)
_PIECE: _Turns = (_NOT, *_PIECE_ONCE[1:])
_BROADCAST: _Turns = (_NOT, _NOT, ("backward", ""), ("backward", "backward"), _BOTH)
_OTHER: _Turns = (_NOT, _NOT, ("both", ""), _BOTH, _BOTH)
_LAST = 4
# A value, its dimensions by factor, and whether it is a result.
_Side = tuple[int, Dims, bool]


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


def _order(ops: Sequence[Op]) -> list[int]:
    """The operations by number, as they are asked: what a loop carries after all that is in the loop."""
    first: dict[int, int] = {}
    again: dict[int, int] = {}  # for what a trip hands on to the next: how it came into the loop
    for at, op in enumerate(ops):
        if op.name == "carry" and first.setdefault(op.results[0], at) != at:
            again[at] = first[op.results[0]]
    begins, found, carried = set(again.values()), [], []
    for at, op in enumerate(ops):
        if op.name == "result":
            continue
        if at in again:
            carried += [again[at], at]
        elif at not in begins:
            if op.name != "stack":
                found += carried
                carried = []
            found.append(at)
    # What results are to be is known before anything else is.
    return [*(at for at, op in enumerate(ops) if op.name == "result"), *found, *carried]


class _Flow:
    def __init__(self, traced: Traced, axes: MeshParts):
        self.traced, self.axes = traced, axes
        self.layouts: list[list[Parts]] = [[()] * len(value.shape) for value in traced.values]
        self.sizes = [math.prod(value.shape) for value in traced.values]
        self.closed: dict[int, tuple[bool, ...]] = {}
        self.barred: dict[int, frozenset[int]] = {}
        self.makers: list[list[int]] = [[] for _ in traced.values]
        self.users: list[list[int]] = [[] for _ in traced.values]
        self.order = _order(traced.ops)
        for at in self.order:
            for value in traced.ops[at].results:
                self.makers[value].append(at)
            for value in dict.fromkeys(traced.ops[at].operands):
                self.users[value].append(at)
        uses = traced.uses()
        self.turns = [self.turns_of(op, uses) for op in traced.ops]
        self.waiting = bytearray(len(traced.ops))  # whether an operation is to be asked in this turn
        self.changed = bytearray(b"\1" * len(traced.ops))  # whether its arrays changed since it was asked
        self.stack: list[int] = []

    def turns_of(self, op: Op, uses: Sequence[int]) -> _Turns:
        """When an operation hands on what."""
        values = self.traced.values
        once = all(uses[value] <= 1 or values[value].is_free or not values[value].shape for value in op.operands)
        if op.name in _PIECES:
            return _PIECE_ONCE if once else _PIECE
        if op.name == "broadcast_in_dim" and self.sizes[op.operands[0]] < self.sizes[op.results[0]]:
            return _BROADCAST
        if op.rule.is_simple or op.pin is not None or op.name == "broadcast_in_dim":
            return _ALIKE_ONCE if once else _ALIKE
        return _OTHER

    def pin(self, value: int, pin: Pin) -> None:
        self.layouts[value] = [() if e is UNCONSTRAINED else self.axes.of(e) for e in pin.entries]
        if pin.among is None:
            self.closed[value] = tuple(e is not UNCONSTRAINED for e in pin.entries)
        else:
            self.barred[value] = frozenset(self.axes.of(pin.among))

    def run(self) -> None:
        for turn in range(_LAST + 1):
            # All are asked, in order: one whose arrays change while it waits is not asked before its time.
            self.stack = self.order[::-1]
            self.waiting = bytearray(b"\1" * len(self.waiting))
            while self.stack:
                at = self.stack.pop()
                self.waiting[at] = 0
                if self.changed[at] or self.is_new(at, turn):
                    self.changed[at] = 0
                    self.visit(at, turn)

    def is_new(self, at: int, turn: int) -> bool:
        """Whether an operation may have something to say in a turn that it has not said before."""
        op = self.traced.ops[at]
        widens = turn in (2, _LAST) and any(self.is_broadcast(op, value) for value in op.operands)
        return widens or self.turns[at][turn] != self.turns[at][turn - 1]

    def tell(self, value: int, but: int) -> None:
        """Lets those who make and read a value be asked next: who reads it first, then the others, its maker last."""
        for at in (*self.makers[value], *reversed(self.users[value])):
            if at != but:
                self.changed[at] = 1
                if not self.waiting[at]:
                    self.waiting[at] = 1
                    self.stack.append(at)

    def visit(self, at: int, turn: int) -> None:
        """Hands on what the arrays of an operation know of its factors to each other."""
        op, values = self.traced.ops[at], self.traced.values
        passing, others = self.turns[at][turn]
        if not passing and not others:
            return
        rule = op.rule
        sides = [
            (value, dims, is_result)
            for is_result, numbers, all_dims in ((False, op.operands, rule.operands), (True, op.results, rule.results))
            for value, dims in zip(numbers, all_dims, strict=True)
            if not values[value].is_free
        ]
        if not any(any(self.layouts[value]) for value, _, _ in sides):
            return
        cuts = [self.by_factor(op, value, dims) for value, dims, _ in sides]
        small = [turn < _LAST and self.is_broadcast(op, value) for value, _, _ in sides]
        agreed: Cut = {}
        for factor in dict.fromkeys(factor for cut in cuts for factor in cut):
            if rule.kinds[factor] == "whole":
                continue
            direction = passing if rule.kinds[factor] == "pass" else others
            told = [
                (cut.get(factor, ()), is_result, own)
                for cut, (_, dims, is_result), own in zip(cuts, sides, small, strict=True)
                if any(factor in dim for dim in dims)
            ]
            if direction and (parts := _agreed(told, direction)):
                agreed[factor] = parts
        if not agreed:
            return
        order = self.preferred(op, agreed, sides, cuts)
        for number in sorted(range(len(sides)), key=lambda number: not sides[number][2]):  # results first
            value, dims, is_result = sides[number]
            if small[number] and turn < 2:
                continue
            wanted = agreed
            if not is_result and rule.is_simple:
                # What a result cannot take on, operands do not tell each other.
                wanted = {f: self.held_back(f, parts, sides, cuts) for f, parts in agreed.items()}
            if self.extend(op, value, dims, wanted, order):
                cuts[number] = self.by_factor(op, value, dims)
                self.tell(value, at)

    def is_broadcast(self, op: Op, value: int) -> bool:
        """Whether an operation by elements reads a value more than once: compilers broadcast it first."""
        return op.rule.is_simple and op.name not in _PASSED and 1 < self.sizes[value] < self.sizes[op.results[0]]

    def held_back(self, factor: int, parts: Parts, sides: Sequence[_Side], cuts: Sequence[Cut]) -> Parts:
        """What operands may tell each other of a factor: no more than the result takes on."""
        for cut, (_, dims, is_result) in zip(cuts, sides, strict=True):
            own = cut.get(factor, ())
            if is_result and any(factor in dim for dim in dims) and len(own) < len(parts) and parts[: len(own)] == own:
                parts = own
        return parts

    def by_factor(self, op: Op, value: int, dims: Dims) -> Cut:
        found: Cut = {}
        for dim, parts in zip(dims, self.layouts[value], strict=True):
            if parts:
                found.update(self.axes.split(parts, dim, op.rule.sizes))
        return found

    def preferred(self, op: Op, agreed: Cut, sides: Sequence[_Side], cuts: Sequence[Cut]) -> list[int]:
        """The factors, those first that a larger array tells of, then those cut finer, then in order of the arrays."""
        keys = {}
        for factor, parts in agreed.items():
            best = (0, 0)
            for number, (value, _, _) in enumerate(sides):
                if cuts[number].get(factor, ())[: len(parts)] == parts:
                    best = min(best, (-self.sizes[value], number))
            finer = -self.axes.count(parts) if op.rule.is_simple else 0
            keys[factor] = (best[0], finer, best[1], factor)
        return sorted(agreed, key=lambda factor: keys[factor])

    def extend(self, op: Op, value: int, dims: Dims, wanted: Mapping[int, Parts], order: Sequence[int]) -> bool:
        """Cuts an array finer, as its factors are to be; returns whether it did."""
        layout, closed = self.layouts[value], self.closed.get(value)
        barred, moved = self.barred.get(value, frozenset()), False
        for factor in order:
            for at, dim in enumerate(dims):
                if factor not in dim or (closed and closed[at]):
                    continue
                own = self.by_factor(op, value, dims)
                if len(own.get(factor, ())) >= len(wanted[factor]):
                    continue
                taken = {part for parts in layout for part in parts if part not in own.get(factor, ())} | barred
                new = _until(wanted[factor], taken)
                parts = self.axes.joined({**own, factor: new}, dim, op.rule.sizes)
                if len(parts) > len(layout[at]) and parts[: len(layout[at])] == layout[at]:
                    layout[at] = parts
                    moved = True
        return moved


def _agreed(told: Sequence[tuple[Parts, bool, bool]], direction: _Direction) -> Parts:
    """What all arrays agree on that cuts a factor.

    `told` is for each array what cuts it, whether it is a result, and whether it only listens. Where an operation hands
    on in one direction, those on the other side may disagree, but not add anything.
    """
    first = sorted(told, key=lambda one: one[1] != (direction == "backward"))
    found: Parts = ()
    may_add = True
    for parts, is_result, listens in first:
        adds = not listens and (direction == "both" or is_result == (direction == "backward"))
        shared = min(len(parts), len(found))
        if parts[:shared] != found[:shared]:
            at = next(i for i in range(shared) if parts[i] != found[i])
            found, may_add = found[:at], False
        elif may_add and adds and len(parts) > shared:
            found = parts
    return found


def _until(parts: Parts, taken: set[int] | frozenset[int]) -> Parts:
    at = next((at for at, part in enumerate(parts) if part in taken), len(parts))
    return parts[:at]
