"""What each operation of a step sends, given how every array lies: partial sums wait until someone needs the whole."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .factors import Dims
from .graph import Op, Traced
from .layout import Layout, MeshParts, Parts
from .looked_up import added_up, can_look_up, looked_up
from .matched import Side, can_match, matched
from .price import Move, Prices, total


# Beyond so many ways of carrying an operation out, only those that its arrays agree on are looked at.
_MOST_WAYS = 256
# What says how an array is to lie, and does nothing else.
_PLACED = ("sharding_constraint", "reshard", "shard_map")


class Sent(NamedTuple):
    """One collective of one operation.

    **Arguments:**

    - `move`: what is sent, by one call.
    - `op`: the operation that causes it, by its number.
    - `scope`: where it runs.
    - `value`: the array that is sent.
    - `note`: what to say on its row, or "".
    """

    move: Move
    op: int
    scope: int
    value: int
    note: str


class Habits(NamedTuple):
    """What a compiler does where there is a choice.

    **Arguments:**

    - `scatters`: whether a sum that is cut afterwards is scattered at once; else all of it is sent.
    - `adds_first`: whether partial sums that are added to each other are, before anything is sent.
    - `sends_twice`: whether what is brought to one place among all devices, and again among those that a product left,
        is sent twice: where two collectives are compared by how their groups are written.
    - `whole`: the operations that every device carries out on all of their operands.
    """

    scatters: bool = True
    adds_first: bool = True
    sends_twice: bool = False
    whole: tuple[str, ...] = ()


class _State(NamedTuple):
    """How an array lies now, the parts along which it is a sum yet to be made, and the operation that made it."""

    layout: Layout
    partial: Parts
    op: int


class _Way(NamedTuple):
    """A way to carry an operation out: the layouts of its arrays meanwhile, and the parts that its result sums over.

    `through` are layouts that its operands are brought into on their way, `among` whether that is done among some of
    the devices: XLA writes the groups of such a collective in another way, and does not see that two are the same.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    partial: Parts
    through: tuple[Layout, ...] = ()
    among: tuple[bool, ...] = ()


class _Bring(NamedTuple):
    """How an operand is brought into the layout that an operation needs; see `_Way`."""

    layout: Layout
    through: Layout | None = None
    among: bool = False


class Walked(NamedTuple):
    """What a step comes to on one device.

    **Arguments:**

    - `sent`: all that it sends.
    - `flops`: of its products, loops as often as they run: what is not shared out, each device does in full.
    """

    sent: list[Sent]
    flops: float


def walked(traced: Traced, axes: MeshParts, layouts: list[Layout], habits: Habits) -> Walked:
    """All that a step sends, and what each device multiplies.

    **Arguments:**

    - `traced`: the step.
    - `axes`: of the mesh.
    - `layouts`: of each value, as by `propagated`.
    - `habits`: of the compiler.
    """
    walk = _Walk(traced, axes, layouts, habits)
    for at, op in enumerate(traced.ops):
        walk.run(at, op)
    for value in traced.results:
        walk.resolve(value, 0)
    return Walked(walk.found, walk.flops)


class _Walk:
    def __init__(self, traced: Traced, axes: MeshParts, layouts: list[Layout], habits: Habits):
        self.traced, self.axes, self.layouts, self.habits = traced, axes, layouts, habits
        self.prices = Prices(axes, scatters=habits.scatters)
        self.states = [_State(layout, (), -1) for layout in layouts]
        # Copies of values in other layouts: for each the scope that made it.
        self.known: dict[tuple[int, Layout, bool], int] = {}
        self.found: list[Sent] = []
        self.flops = 0.0
        self.uses = traced.uses()
        self.sizes = [self.size_of(value) for value in range(len(layouts))]
        self.takers: dict[int, list[Op]] = {}
        for op in traced.ops:
            for value in op.operands:
                self.takers.setdefault(value, []).append(op)

    def size_of(self, value: int) -> float:
        size = self.traced.values[value].itemsize
        for length in self.traced.values[value].shape:
            size *= length
        return size

    def run(self, at: int, op: Op) -> None:
        if op.rule.sends is not None:
            self.send_by_word(at, op)
        partial = self.carried(op)
        way = self.chosen(op, partial)
        if op.rule.flops:
            self.multiply(op, way)
        for number, (value, layout) in enumerate(zip(op.operands, way.operands, strict=True)):
            is_led = number < len(way.through)
            how = _Bring(layout, way.through[number], way.among[number]) if is_led else _Bring(layout)
            self.bring(value, how, partial, at, op)
        # A sum that waits is still that of the operation which left it so.
        made_by = self.states[op.operands[0]].op if partial else at
        for value, layout in zip(op.results, way.results, strict=True):
            self.make(value, layout, (*partial, *way.partial), made_by, op)
        self.exchange_margins(at, op, way)
        self.shift(at, op, way)
        if op.rule.note and not any(sent.op == at for sent in self.found[-len(op.operands) - 1 :]):
            self.found.append(Sent(Move("unknown", (), 0.0, 0.0), at, op.scope, op.results[0], op.rule.note))

    def multiply(self, op: Op, way: _Way) -> None:
        """Counts what a device multiplies; each branch of a conditional counts for its share."""
        shared = {part for layout in (*way.operands, *way.results) for parts in layout for part in parts}
        times = self.traced.calls(op.scope)[0]
        for conditional, _ in self.traced.branches(op.scope):
            labels = {scope.branch for scope in self.traced.scopes if scope.branch and scope.branch[0] == conditional}
            times /= len(labels)
        self.flops += op.rule.flops * times / self.axes.count(shared)

    def carried(self, op: Op) -> Parts:
        """The parts along which the result stays a sum to be made: those of all operands, if they are the same."""
        waiting = [value for value in op.operands if not self.traced.values[value].is_free]
        partials = {self.states[value].partial for value in waiting}
        if not any(partials):
            return ()
        may_wait = op.rule.is_linear and (len(waiting) == 1 or self.habits.adds_first)
        if may_wait and len({tuple(sorted(p)) for p in partials}) == 1:
            return self.states[waiting[0]].partial
        return ()

    def chosen(self, op: Op, partial: Parts) -> _Way:
        """How an operation is carried out: as its arrays agree on, or else in the cheapest way."""
        if op.name in self.habits.whole:
            operands, results = op.rule.operands, op.rule.results
            return _Way(tuple(((),) * len(dims) for dims in operands), tuple(((),) * len(dims) for dims in results), ())
        if op.pin is not None and op.name in _PLACED and not any(self.states[value].partial for value in op.operands):
            # So that who asks for the same once more is not sent it again.
            layout = (self.layouts[op.results[0]],)
            return _Way(layout, layout, ())
        if (found := self.agreed(op, partial)) is not None:
            return found
        if op.rule.is_simple and not any(self.states[value].partial for value in op.operands):
            return min(self.simply(op), key=lambda way: self.cost(op, way, partial))
        return min(self.ways(op, partial), key=lambda way: self.cost(op, way, partial))

    def simply(self, op: Op) -> Iterator[_Way]:
        """Where the result is to lie, or where one of the operands does."""
        wanted: dict[int, Parts] = {}
        for value, dims in zip(op.results, op.rule.results, strict=True):
            wanted.update(self.by_factor(op, self.layouts[value], dims))
        yield self.way(op, wanted)
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if not self.traced.values[value].is_free:
                yield self.way(op, self.by_factor(op, self.states[value].layout, dims))

    def agreed(self, op: Op, partial: Parts) -> _Way | None:
        """The way that needs nothing to be moved, where all arrays already agree on one."""
        if not partial and any(self.states[value].partial for value in op.operands):
            return None
        found: dict[int, Parts] = {}
        rule = op.rule
        for lay, dims in self.sides(op):
            for dim, parts in zip(dims, lay, strict=True):
                if not parts:
                    continue
                split = self.axes.split(parts, dim, rule.sizes)
                if sum(len(own) for _, own in split) != len(parts):
                    return None
                for factor, own in split:
                    if rule.kinds[factor] != "pass" or found.setdefault(factor, own) != own:
                        return None
        if found:
            parts = [part for own in found.values() for part in own]
            if len(set(parts)) != len(parts) or not set(parts).isdisjoint(partial):
                return None
            for lay, dims in self.sides(op):
                if self.axes.layout(found, dims, rule) != lay:
                    return None
        operands = tuple(self.axes.layout(found, dims, rule) for dims in rule.operands)
        return _Way(operands, tuple(self.axes.layout(found, dims, rule) for dims in rule.results), ())

    def sides(self, op: Op) -> Iterator[tuple[Layout, tuple]]:
        for value, dims in zip(op.operands, op.rule.operands, strict=True):
            if not self.traced.values[value].is_free:
                yield self.states[value].layout, dims
        for value, dims in zip(op.results, op.rule.results, strict=True):
            if not self.traced.values[value].is_free:
                yield self.layouts[value], dims

    def ways(self, op: Op, partial: Parts) -> Iterator[_Way]:
        rule, options = op.rule, {}
        if not partial and can_match(rule, (self.by_factor(op, lay, dims) for lay, dims in self.sides(op))):
            yield self.matched(op)
            return
        if can_look_up(op.name, rule) and not partial:
            yield from self.looked_up(op)
            return
        for lay, dims in self.sides(op):
            for dim, parts in zip(dims, lay, strict=True):
                split = dict(self.axes.split(parts, dim, rule.sizes)) if parts else {}
                for factor in dim:
                    if rule.kinds[factor] != "whole":
                        options.setdefault(factor, {})[split.get(factor, ())] = None
        choices = {factor: [*found] for factor, found in options.items() if any(found)}
        if rule.is_product:
            self.follow_result(op, choices)
        for found in choices.values():
            if len(found) != 1 and () not in found:
                found.append(())
        self.with_none(choices, partial)
        for chosen in itertools.islice(itertools.product(*choices.values()), _MOST_WAYS):
            parts = [part for own in chosen for part in own]
            if len({*parts, *partial}) == len(parts) + len(partial):
                yield self.way(op, dict(zip(choices, chosen, strict=True)))

    def matched(self, op: Op) -> _Way:
        """How a product is carried out."""
        rule = op.rule
        sides = [
            Side(self.by_factor(op, state.layout, dims), self.sizes[value] / self.axes.shards(state.layout))
            for value, dims in zip(op.operands[:2], rule.operands[:2], strict=True)
            for state in (self.states[value],)
        ]
        wanted = self.by_factor(op, self.layouts[op.results[0]], rule.results[0])
        found = matched(rule, self.axes, sides[0], sides[1], wanted)
        through = [self.axes.layout(c, d, rule) for c, d in zip(found.sides, rule.operands, strict=False)]
        return self.way(op, found.cut)._replace(through=tuple(through), among=found.among)

    def looked_up(self, op: Op) -> Iterator[_Way]:
        """How rows may be looked up, or added up."""
        cuts = [
            self.by_factor(op, self.states[value].layout, dims)
            for value, dims in zip(op.operands, op.rule.operands, strict=True)
        ]
        wanted = self.by_factor(op, self.layouts[op.results[0]], op.rule.results[0])
        if op.name == "gather":
            found = looked_up(op.rule, self.axes, cuts[0], cuts[1], wanted)
        else:
            found = added_up(op.rule, self.axes, cuts[2], wanted)
        yield from (self.way(op, {factor: parts for factor, parts in cut.items() if parts}) for cut in found)

    def follow_result(self, op: Op, choices: dict[int, list[Parts]]) -> None:
        """What both sides of a product agree on stays; else it is cut as its result is to lie."""
        left, right = (
            self.by_factor(op, self.states[value].layout, dims)
            for value, dims in zip(op.operands[:2], op.rule.operands[:2], strict=True)
        )
        agreed = {factor: parts for factor, parts in left.items() if right.get(factor) == parts}
        kept = {part for parts in agreed.values() for part in parts}
        wanted = self.by_factor(op, self.layouts[op.results[0]], op.rule.results[0])
        for factor in choices:
            if factor in agreed:
                choices[factor] = [agreed[factor]]
            elif op.rule.kinds[factor] != "sum":
                parts = wanted.get(factor, ())
                choices[factor] = [parts if kept.isdisjoint(parts) else ()]
        taken = {part for factor, found in choices.items() if op.rule.kinds[factor] != "sum" for part in found[0]}
        for factor, found in choices.items():
            if op.rule.kinds[factor] == "sum" and factor not in agreed:
                choices[factor] = [*dict.fromkeys((*(parts for parts in found if taken.isdisjoint(parts)), ()))]

    def by_factor(self, op: Op, layout: Layout, dims: Dims) -> dict[int, Parts]:
        found: dict[int, Parts] = {}
        for dim, parts in zip(dims, layout, strict=True):
            found.update(self.axes.split(parts, dim, op.rule.sizes) if parts else ())
        return found

    def with_none(self, choices: dict[int, list[Parts]], partial: Parts) -> None:
        """Where two factors want one part, or one along which sums are yet to be made, any may be left whole."""
        owners: dict[int, set[int]] = {part: {-1} for part in partial}
        for factor, found in choices.items():
            for part in itertools.chain.from_iterable(found):
                owners.setdefault(part, set()).add(factor)
        for factors in owners.values():
            for factor in sorted(factors - {-1}) if len(factors) > 1 else ():
                if () not in choices[factor]:
                    choices[factor].append(())

    def way(self, op: Op, cut: dict[int, Parts]) -> _Way:
        rule = op.rule
        partial = tuple(
            part for factor, parts in cut.items() if rule.kinds[factor] in ("sum", "join") for part in parts
        )
        layouts = [tuple(self.axes.layout(cut, dims, rule) for dims in side) for side in (rule.operands, rule.results)]
        return _Way(layouts[0], layouts[1], partial)

    def cost(self, op: Op, way: _Way, partial: Parts) -> tuple[float, int]:
        """Bytes to bring the operands and to lay out the results; then, the more devices share the work the better."""
        cost, shared = 0.0, 1
        for value, layout in zip(op.operands, way.operands, strict=True):
            cost += total(self.needed(value, _Bring(layout), partial, op.scope))
            shared *= self.axes.shards(layout)
        for value, layout in zip(op.results, way.results, strict=True):
            if not self.traced.values[value].is_free:
                target = self.layouts[value]
                cost += total(self.prices.moves(self.sizes[value], layout, (*partial, *way.partial), target))
        return cost, -shared * self.axes.count(way.partial)

    def needed(self, value: int, how: _Bring, partial: Parts, scope: int) -> tuple[Move, ...]:
        state = self.states[value]
        waiting = () if partial else state.partial
        if self.traced.values[value].is_free or (state.layout == how.layout and not waiting):
            return ()
        made = self.known.get((value, how.layout, self.is_apart(how)))
        if made is not None and self.traced.is_within(scope, made):
            return ()
        if how.through is None or how.through in (state.layout, how.layout):
            return self.prices.moves(self.sizes[value], state.layout, waiting, how.layout)
        first = self.prices.moves(self.sizes[value], state.layout, waiting, how.through)
        return (*first, *self.prices.moves(self.sizes[value], how.through, (), how.layout))

    def bring(self, value: int, how: _Bring, partial: Parts, at: int, op: Op) -> None:
        state = self.states[value]
        for move in self.needed(value, how, partial, op.scope):
            is_sum = move.kind in ("all-reduce", "reduce-scatter")
            self.found.append(Sent(move, state.op if is_sum else at, op.scope, value, op.rule.note))
        self.known[value, how.layout, self.is_apart(how)] = op.scope

    def is_apart(self, how: _Bring) -> bool:
        """Whether a compiler does not see that this is what it sends elsewhere."""
        return self.habits.sends_twice and how.among

    def make(self, value: int, layout: Layout, partial: Parts, at: int, op: Op) -> None:
        if self.traced.values[value].is_free:
            return
        if op.name == "carry" and self.states[value].op >= 0:
            # What the next trip takes lies as the first one took it.
            self.pay(value, _State(layout, partial, at), op.scope)
            return
        self.states[value] = _State(layout, partial, at)
        takers = self.takers.get(value, [])
        kinds = {op.rule.kinds[factor] for dims in op.rule.operands for dim in dims for factor in dim}
        # Who alone needs a sum decides how it is to lie.
        waits = self.uses[value] == len(takers) == 1 and takers[0].scope == op.scope and "join" not in kinds
        if partial and not waits:
            self.layouts[value] = self.wanted(value, takers)
        if not (partial and waits):
            self.resolve(value, op.scope)

    def wanted(self, value: int, takers: list[Op]) -> Layout:
        """How a sum is to lie: finer than it was asked for, where all who use it take the same parts."""
        own, found = self.layouts[value], set()
        for op in takers if len(takers) == self.uses[value] else ():
            cut: dict[int, Parts] = {}
            for result, dims in zip(op.results, op.rule.results, strict=True):
                cut.update(self.by_factor(op, self.layouts[result], dims))
            for operand, dims in zip(op.operands, op.rule.operands, strict=True):
                if operand == value:
                    found.add(self.axes.layout(cut, dims, op.rule))
        if len(found) != 1:
            return own
        (layout,) = found
        is_finer = all(parts[: len(old)] == old for parts, old in zip(layout, own, strict=True))
        return layout if is_finer else own

    def resolve(self, value: int, scope: int) -> None:
        """Brings a value into the layout that it has for all who use it."""
        state = self.states[value]
        if state.partial or state.layout != self.layouts[value]:
            where = self.traced.ops[state.op].scope if state.op >= 0 else scope
            self.pay(value, state, where)
            self.states[value] = _State(self.layouts[value], (), state.op)

    def pay(self, value: int, state: _State, scope: int) -> None:
        for move in self.prices.moves(self.sizes[value], state.layout, state.partial, self.layouts[value]):
            self.found.append(Sent(move, state.op, scope, value, ""))

    def exchange_margins(self, at: int, op: Op, way: _Way) -> None:
        for factor, margin in op.rule.margins:
            for value, dims, layout in zip(op.operands, op.rule.operands, way.operands, strict=True):
                for dim, parts, length in zip(dims, layout, self.traced.values[value].shape, strict=True):
                    if factor in dim and parts and margin:
                        size = self.sizes[value] / self.axes.shards(layout) * self.axes.count(parts) * margin / length
                        move = self.prices.made("collective-permute", parts, size)
                        self.found.append(Sent(move, at, op.scope, value, op.rule.note))

    def shift(self, at: int, op: Op, way: _Way) -> None:
        """Sends the parts of a dimension that lie elsewhere in the result.

        A device sends what it has of the smaller side. Of arrays that are put one behind the other compilers exchange
        each as if it were as large as the result.
        """
        if "shift" not in op.rule.kinds:
            return
        operands = self.shifted(op, op.operands, op.rule.operands, way.operands)
        results = self.shifted(op, op.results, op.rule.results, way.results)
        if op.name == "concatenate":
            moves = [self.prices.made("all-to-all", parts, results[0][1]) for parts, _ in operands if results]
        else:
            side = min(operands, results, key=lambda side: sum(size for _, size in side))
            moves = [self.prices.made("collective-permute", parts, size) for parts, size in side]
        self.found += [Sent(move, at, op.scope, op.results[0], op.rule.note) for move in moves]

    def shifted(
        self, op: Op, values: tuple[int, ...], sides: tuple[Dims, ...], layouts: tuple[Layout, ...]
    ) -> list[tuple[Parts, float]]:
        """What cuts the dimension that is shifted, and the bytes that a device has, of each array that is cut so."""
        found: list[tuple[Parts, float]] = []
        for value, dims, layout in zip(values, sides, layouts, strict=True):
            shifts = [own for dim, own in zip(dims, layout, strict=True) if op.rule.kinds[dim[0]] == "shift"]
            parts = tuple(itertools.chain.from_iterable(shifts))
            if parts and not self.traced.values[value].is_free:
                found.append((parts, self.sizes[value] / self.axes.shards(layout)))
        return found

    def send_by_word(self, at: int, op: Op) -> None:
        sends = op.rule.sends
        assert sends is not None
        parts, permutes = self.axes.of(sends.axes), sends.kind == "collective-permute"
        ends = zip(op.operands, op.results, strict=False)
        for source, target in ends if parts else ():
            value = target if sends.kind in ("all-gather", "reduce-scatter") else source
            size = self.sizes[value] / self.axes.shards(self.layouts[value])
            move = self.prices.made(sends.kind, parts, size, sends.share if permutes else None)
            self.found.append(Sent(move, at, op.scope, value, op.rule.note))
