"""The effect of one mesh axis on a whole step, given the order in which the axis prefers classes of dimensions: an
assignment.

The axis shards each array along the first class of its assignment that the array has. It shards an operation along the
first class of the assignment among the operation's labels. Operands with another sharding are moved. Sums over a
sharded dimension stay partial until an operation needs the whole. The result has the bytes that are sent and the
sharding of each array.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .._ground.spec import entry_axes
from .._rules import AxisRules
from .._step import Operation
from ._classes import Classes
from ._program import whole


WHOLE, PARTIAL = -1, -2
_GATHER, _SCATTER, _REDUCE, _EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
# Operations that keep a partial sum partial if the other operand is a scalar.
_SCALED = frozenset("multiply divide".split())
# Operations that add, reorder or cast: they may run on partial sums.
_LINEAR = frozenset("add subtract negate convert copy reduce_precision sharding_constraint transpose reshape".split())
_FIRST = frozenset("dot_general convolution ragged_dot".split())


# The classes of dimensions that a mesh axis shards, by number, in its order of preference.
Assignment = tuple[int, ...]
# Whether an assignment divides an operation, and the states of its operands and results.
_Effect = tuple[bool, tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One collective of the step: its kind, the value that it moves, how often it runs, and the operation that needs
    it.
    """

    kind: str
    value: int
    times: float
    operation: int


@dataclasses.dataclass(frozen=True, slots=True)
class AssignedLayout:
    """The result of an assignment: the collectives, the sharded dimension of each value, and which operations are
    divided.
    """

    assignment: Assignment
    events: tuple[Event, ...]
    # For each value, the position of the sharded part among its parts, `WHOLE` or `PARTIAL`.
    cuts: tuple[int, ...]
    shared: tuple[bool, ...]
    # The classes that it shards.
    used: frozenset[int]
    # Values that were partial sums when they were made.
    summed: frozenset[int]


class _Labelled(NamedTuple):
    """An operation with a label for each sub-dimension of its values. Equal operations of equal layers
    compare equal.
    """

    name: str
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    # The labels that an axis may shard, each with its class.
    cuttable: tuple[tuple[int, int], ...]
    # Labels that follow another part of some dimension.
    behind: frozenset[int]
    # The bytes of each operand; 0 for scalars and values made of constants.
    bytes: tuple[float, ...]


class Layouts:
    """The program with its dimensions as classes, from which `under` makes the layout of any assignment."""

    def __init__(self, classes: Classes, devices: int):
        self.classes, self.tied, self.program = classes, classes.tied, classes.program
        scanned, sizes = classes.marked["scanned"], self.tied.sizes
        # The group number of each sub-dimension that a mesh axis may shard.
        self.numbers = {
            root: number
            for number, group in enumerate(classes.groups)
            for root in group.roots
            if root not in scanned and math.gcd(sizes[root], devices) > 1
        }
        # The classes that are a minor sub-dimension of a fused dimension of some argument. An assignment with one of
        # them shards minor sub-dimensions, if other axes shard the major ones completely.
        self.behind = {
            number
            for number, group in enumerate(classes.groups)
            if any(0 < place.at < classes.kept(classes.dims[place.argument][place.dim]) for place in group.places)
        }
        self.parts = self.tied.leaves
        self.flat = [
            [(self.numbers.get(leaf, -1), at) for dim in dims for at, leaf in enumerate(dim)] for dims in self.parts
        ]
        kinds: dict[_Labelled, int] = {}
        # The index of the kind of each operation.
        self.kind = [kinds.setdefault(_labelled(self, made), len(kinds)) for made in self.program.operations]
        self.labelled = list(kinds)

    def under(self, assignment: Assignment) -> AssignedLayout:
        """The layout of the step under this assignment."""
        return _Run(self, assignment).layout()


def _labelled(layouts: Layouts, made: Operation) -> _Labelled:
    """One operation with labels for the dimensions of its operands and results. A factor has one label for each of its
    sub-dimensions.
    """
    if made.name == "use":
        return _Labelled(made.name, (), (), (), frozenset(), ())
    sides = [*zip(made.ins, made.factors.ins, strict=True), *zip(made.outs, made.factors.outs, strict=True)]
    leaves: dict[int, list[int]] = {}
    for value, dims in sides:
        for own, dim in zip(layouts.parts[value], dims, strict=True):
            if len(dim) == 1:
                leaves.setdefault(dim[0], own)
    numbers: dict[tuple[int, int], int] = {}
    cuttable: dict[int, int] = {}
    behind: set[int] = set()
    found: list[tuple[int, ...]] = []
    for value, dims in sides:
        labels: list[int] = []
        for size, own, dim in zip(layouts.program.values[value].shape, layouts.parts[value], dims, strict=True):
            keys = [(factor, at) for factor in dim for at in range(len(leaves.get(factor, ())))]
            if [leaves[factor][at] for factor, at in keys] != own or whole(made, dim, size):
                labels += [-1] * len(own)
                continue
            labels += [numbers.setdefault(key, len(numbers)) for key in keys]
            behind.update(labels[len(labels) - len(own) + 1 :])
            pairs = zip(keys, own, strict=True)
            cuttable |= {numbers[key]: layouts.numbers[leaf] for key, leaf in pairs if leaf in layouts.numbers}
        found.append(tuple(labels))
    values = [layouts.program.values[value] for value in made.ins]
    counts = tuple(0.0 if value.free or not value.shape else value.bytes for value in values)
    ins, outs = tuple(found[: len(values)]), tuple(found[len(values) :])
    return _Labelled(made.name, ins, outs, tuple(cuttable.items()), frozenset(behind), counts)


class _Run:
    """The propagation of one assignment through the program, operation by operation."""

    def __init__(self, layouts: Layouts, assignment: Assignment):
        self.layouts, self.assignment = layouts, assignment
        self.behind = not layouts.behind.isdisjoint(assignment)
        self.rank = {number: place for place, number in enumerate(assignment)}
        count = len(layouts.program.values)
        self.state = [WHOLE] * count
        self.cuts: list[int] = [WHOLE] * count
        self.copies: set[tuple[int, int]] = set()
        self.events: list[Event] = []
        self.used: set[int] = set()
        self.summed: set[int] = set()
        self.effects: dict[tuple[int, tuple[int, ...]], _Effect] = {}

    def layout(self) -> AssignedLayout:
        program = self.layouts.program
        for value in program.arguments:
            self.set(value, self.preferred(value))
        shared = tuple([self.is_divided(number, made) for number, made in enumerate(program.operations)])
        # Results have the sharding of their arguments: an updated weight has that of the weight.
        for value in program.results:
            if self.state[value] == PARTIAL:
                self.move(value, self.preferred(value), 1.0, len(program.operations) - 1)
        sets = frozenset(self.used), frozenset(self.summed)
        return AssignedLayout(self.assignment, tuple(self.events), tuple(self.cuts), shared, *sets)

    def preferred(self, value: int) -> int:
        """The position of the sub-dimension of a value that the assignment prefers to shard; `WHOLE` if it shards
        none.
        """
        flat = self.layouts.flat[value]
        for wanted in self.assignment:
            for position, (number, at) in enumerate(flat):
                before = flat[position - at : position]
                if number == wanted and (not at or (self.behind and all(known >= 0 for known, _ in before))):
                    return position
        return WHOLE

    def set(self, value: int, state: int) -> None:
        self.state[value] = state
        if state == PARTIAL:
            self.summed.add(value)
        # A partial sum gets the sharding that the assignment prefers once it is complete.
        cut = self.cuts[value] = self.preferred(value) if state == PARTIAL else state
        if cut >= 0:
            self.used.add(self.layouts.flat[value][cut][0])

    def is_divided(self, number: int, made: Operation) -> bool:
        """Adds the collectives that an operation's operands need, and sets the sharding of its results. Returns whether
        the mesh axis divides the operation.
        """
        if made.name == "use" or all(self.layouts.program.values[value].free for value in made.outs):
            return False
        if made.name in ("carry", "return"):
            self.hand_on(number, made)
            return False
        kind, states = self.layouts.kind[number], tuple(self.state[value] for value in made.ins)
        if (kind, states) not in self.effects:
            self.effects[kind, states] = self.effect(self.layouts.labelled[kind], states)
        is_divided, ins, outs = self.effects[kind, states]
        for value, wanted in zip(made.ins, ins, strict=True):
            self.move(value, wanted, made.times, number)
        for value, state in zip(made.outs, outs, strict=True):
            self.set(value, state)
        return is_divided

    def hand_on(self, number: int, made: Operation) -> None:
        """Reshards a loop-carried value to the sharding that it has in the loop's body."""
        wanted = self.state[made.ins[1]] if made.name == "return" else self.preferred(made.outs[0])
        # A reshaped dimension may have more parts inside than outside. A value that cannot be followed is whole.
        if made.name == "carry" and wanted >= len(self.layouts.flat[made.ins[0]]):
            wanted = WHOLE
        self.move(made.ins[0], wanted, made.times, number)
        self.set(made.outs[0], wanted)

    def effect(self, made: _Labelled, states: tuple[int, ...]) -> _Effect:
        """Whether an operation is divided, and the shardings of its operands and results, given the operands' present
        shardings.
        """
        if PARTIAL in states and _stays_partial(made, states):
            return False, states, (PARTIAL,) * len(made.outs)
        label = self.label(made, states)
        summed = label is not None and any(label in labels for labels in made.ins)
        outs = [_position(labels, label) for labels in made.outs]
        made_of = tuple(PARTIAL if at == WHOLE and summed else at for at in outs)
        return label is not None, tuple(_position(labels, label) for labels in made.ins), made_of

    def label(self, made: _Labelled, states: tuple[int, ...]) -> int | None:
        """The label along which the operation is divided. Among the labels of the class that the assignment prefers
        most, it is the one that moves the fewest bytes.
        """

        def moved(label: int) -> float:
            sides = zip(made.ins, states, made.bytes, strict=True)
            return math.fsum(count for labels, state, count in sides if state not in (WHOLE, _position(labels, label)))

        def is_worth_it(label: int) -> bool:
            """Whether to divide the operation: a product always, a sum only if an operand is sharded already."""
            if any(label in labels for labels in made.outs) or made.name in _FIRST:
                return True
            return any(label in labels and state != WHOLE for labels, state in zip(made.ins, states, strict=True))

        places = {
            label: self.rank[number]
            for label, number in made.cuttable
            if number in self.rank and (self.behind or label not in made.behind) and is_worth_it(label)
        }
        return min(places, key=lambda label: (places[label], moved(label)), default=None)

    def move(self, value: int, wanted: int, times: float, operation: int) -> None:
        state = self.state[value]
        if state in (wanted, WHOLE):
            return
        if state == PARTIAL:
            self.events.append(Event(_REDUCE if wanted == WHOLE else _SCATTER, value, times, operation))
            self.set(value, wanted)
            return
        if (value, wanted) not in self.copies:
            self.copies.add((value, wanted))
            self.events.append(Event(_GATHER if wanted == WHOLE else _EXCHANGE, value, times, operation))


def _stays_partial(made: _Labelled, states: tuple[int, ...]) -> bool:
    """Whether the operation may read unreduced operands and give an unreduced result, since it is linear in them."""
    if made.name in _LINEAR:
        return all(state == PARTIAL for state in states)
    others = [at for at, state in enumerate(states) if state != PARTIAL]
    first = made.name == "multiply" or states[0] == PARTIAL
    return made.name in _SCALED and first and len(others) == 1 and not made.bytes[others[0]]


def _position(labels: tuple[int, ...], label: int | None) -> int:
    return labels.index(label) if label in labels else WHOLE


# The dimensions that tensor parallelism shards in Megatron, T5X and MaxText, in the order in which an axis prefers
# them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")
# The largest number of sets of classes that start an assignment. The sets with most bytes are taken.
_SETS = 9


def assignments_of_rules(
    rules: AxisRules, classes: Classes, never: frozenset[int] = frozenset()
) -> dict[str, Assignment]:
    """The assignment of each mesh axis under given rules: the names that the axis shards, in the order of the rules.

    The classes in `never` are not sharded, whatever the rules say.
    """
    known = {group.name: number for number, group in enumerate(classes.groups) if group.roots and number not in never}
    orders: dict[str, dict[int, None]] = {}
    for name, target in rules.rules:
        for axis in entry_axes(target) if name in known else ():
            orders.setdefault(axis, {})[known[name]] = None
    return {axis: tuple(order) for axis, order in orders.items()}


def seeds(
    layouts: Layouts, never: frozenset[int] = frozenset()
) -> tuple[list[tuple[Assignment, ...]], list[tuple[Assignment, ...]]]:
    """Well-known strategies, restricted to the dimensions that the step has.

    They are data parallelism, fully sharded, tensor parallelism, separate experts, and pairs of these; then the same
    with sharded sequences. The rules of T5X, MaxText and Megatron are among them.

    **Returns:**

    The usual strategies and the other ones. A strategy is an assignment for each mesh axis.
    """
    classes, free = layouts.classes, sorted({*layouts.numbers.values()} - never, reverse=True)
    known = {classes.groups[number].name: number for number in free}

    def ways(*each: tuple[tuple[str, ...], ...]) -> list[tuple[Assignment, ...]]:
        """The strategies whose assignments all have dimensions of the step, without duplicates."""
        orders = [[tuple(dict.fromkeys(known[n] for n in names if n in known)) for names in way] for way in each]
        return list(dict.fromkeys(tuple(way) for way in orders if all(way)))

    own = [name for name, n in known.items() if classes.in_model(classes.groups[n]) and name not in (*_TENSOR, *_NEVER)]
    batch, stored, sequence, experts = ("batch",), ("batch", "embed"), ("sequence",), ("experts",)
    cut = (*_TENSOR[1:], *sorted(own))
    pairs = itertools.product((stored, batch), (cut, experts))
    usual = ways((batch,), (stored,), (cut,), (experts,), *pairs)
    whole, cut_too = (*stored, *_TENSOR, *own), (*cut, *sequence)
    pairs = itertools.product((stored, batch), (cut_too, sequence))
    others = ways((whole,), (cut_too,), (sequence,), *pairs, (stored, experts, cut), (batch, sequence, cut))
    return usual, [way for way in others if way not in usual]


def assignments_of(layouts: Layouts, never: frozenset[int] = frozenset()) -> Iterator[Assignment]:
    """The assignments to try, ordered by the number of sets of classes in them. The most usual come first."""
    weights = Counter[int]()
    for value, parts in zip(layouts.program.values, layouts.flat, strict=True):
        weights.update(dict.fromkeys({number for number, _ in parts if number >= 0}, value.bytes))
    sets = _sets(layouts, [number for number, _ in weights.most_common() if number not in never])[:_SETS]
    # Triples shard the data along two sets and the parameters along one, or the other way round.
    classes = layouts.classes
    data = [group for group in sets if not any(classes.in_model(classes.groups[number]) for number in group)]
    model = [group for group in sets if group not in data]
    triples = [(a, b, c) for a in model for b in data for c in model if a != c]
    triples += [(a, b, c) for a in data for b in data for c in model if a != b]
    for order in itertools.chain(((group,) for group in sets), itertools.permutations(sets, 2), triples):
        flat = tuple(itertools.chain(*order))
        if len(set(flat)) == len(flat):
            yield flat


def _sets(layouts: Layouts, numbers: list[int]) -> list[tuple[int, ...]]:
    """The largest sets of classes that one mesh axis can shard together. No array has dimensions of two classes in a
    set.

    The smallest power of two in a set limits how far it can be sharded, so sets without their least divisible classes
    follow.
    """
    beside: dict[int, set[int]] = {}
    for parts in layouts.flat:
        known = {number for number, _ in parts}
        for number in known:
            beside.setdefault(number, set()).update(known)
    found: dict[tuple[int, ...], None] = {}
    for seed in numbers:
        group = [seed]
        for number in numbers:
            if beside[number].isdisjoint(group):
                group.append(number)
        found[tuple(sorted(group, key=numbers.index))] = None
    sizes = [group.size & -group.size for group in layouts.classes.groups]
    for group in list(found):
        for least in sorted({sizes[number] for number in group})[1:]:
            found[tuple(number for number in group if sizes[number] >= least)] = None
    return list(found)
