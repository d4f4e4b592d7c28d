"""The shardings and collectives of a whole step under one axis assignment: the logical
axes that one mesh axis shards, in order of preference.

The mesh axis shards each array along the first logical axis of the assignment that the
array has. It shards the work of each operation along the first one that the operation
has. Operands with another sharding are resharded. Sums over a sharded dimension stay
unreduced until an operation needs the reduced value.

A sub-dimension is a factor of a dimension that a reshape splits. Dimensions that must
be sharded alike are an equivalence class; a logical axis is one or several classes.
Values, operations and logical axes are given by number.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from .._step import Operation
from ._classes import Classes
from ._program import must_stay_whole


WHOLE = -1
UNREDUCED = -2
_GATHER = "all-gather"
_SCATTER = "reduce-scatter"
_REDUCE = "all-reduce"
_EXCHANGE = "all-to-all"
# Operations that may run on an unreduced operand if the other operand is a scalar.
_SCALED = frozenset("multiply divide".split())
# Operations that add, reorder or cast: they may run on unreduced operands.
_LINEAR = frozenset(
    "add subtract negate convert copy reduce_precision sharding_constraint transpose"
    " reshape".split()
)
_PRODUCTS = frozenset("dot_general convolution ragged_dot".split())


# The logical axes that a mesh axis shards, by number, in its order of preference.
Assignment = tuple[int, ...]
# The sharding of a value: the position of its sharded sub-dimension among those of all
# its dimensions, `WHOLE`, or `UNREDUCED`.
_State = int


class _Effect(NamedTuple):
    """Whether the mesh axis divides an operation, and the shardings that its operands
    must get and that its results have.
    """

    is_divided: bool
    ins: tuple[_State, ...]
    outs: tuple[_State, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A collective of the step, such as an "all-gather" of `value` for `operation`. A
    step runs it `times` times.
    """

    kind: str
    value: int
    times: float
    operation: int


@dataclasses.dataclass(frozen=True, slots=True)
class AssignedLayout:
    """The shardings of a step under an axis assignment, and the collectives that they
    need.

    - `events`: the collectives.
    - `positions`: for each value, the position of its sharded sub-dimension among those
      of all its dimensions; `WHOLE` for a replicated value.
    - `divided`: for each operation, whether the mesh axis divides its work.
    - `used`: the logical axes that are sharded.
    - `unreduced`: the values that an operation leaves unreduced.
    """

    assignment: Assignment
    events: tuple[Event, ...]
    positions: tuple[int, ...]
    divided: tuple[bool, ...]
    used: frozenset[int]
    unreduced: frozenset[int]


class _Labelled(NamedTuple):
    """An operation with a label for each sub-dimension of its operands and results,
    such as the letters of an `einsum`.

    Sub-dimensions that must be sharded alike have equal labels: the operation's Shardy
    sharding rule has the same factor for them. Equal operations of equal layers compare
    equal.

    - `ins`, `outs`: the labels of each operand and each result; -1 for a dimension that
      cannot be sharded.
    - `shardable`: pairs of a label that a mesh axis may shard, and the number of its
      logical axis.
    - `minor`: the labels of sub-dimensions that are not the major-most of their
      dimension.
    - `bytes`: the bytes of each operand; 0 for scalars and values made of constants.
    """

    name: str
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    shardable: tuple[tuple[int, int], ...]
    minor: frozenset[int]
    bytes: tuple[float, ...]


class Layouts:
    """A program with the logical axes of its dimensions. `under` shards it by any axis
    assignment.

    - `axis_of_root`: a dict from each equivalence class that a mesh axis may shard to the
      number of its logical axis.
    - `minor`: the logical axes that are a minor sub-dimension of some argument's
      dimension. Only an assignment with one of them shards minor sub-dimensions. Then
      other mesh axes must shard the major ones completely.
    - `roots`: the equivalence classes of each dimension of each value.
    - `sub_dims`: for each sub-dimension of each value, the number of its logical axis,
      and its index within the dimension. The number is -1 if no mesh axis may shard it.
    - `labelled`, `labelled_numbers`: the distinct operations with labels, and for each
      operation its index in `labelled`.
    """

    def __init__(self, classes: Classes, devices: int):
        """Numbers the sub-dimensions and the distinct operations of a program. `classes`
        are its logical axes, of which a mesh of `devices` devices may shard some.

        `minor` has the logical axes that are not the major-most sub-dimension of some
        dimension. `sub_dims` has, for each sub-dimension of each value, its logical
        axis (-1 for none) and its index within the dimension.
        """
        self.classes = classes
        self.tied = classes.tied
        self.program = classes.program
        self.roots = self.tied.roots
        scanned = classes.marked["scanned"]
        sizes = self.tied.sizes
        self.axis_of_root: dict[int, int] = {}
        self.minor: set[int] = set()
        for number, logical in enumerate(classes.axes):
            for root in logical.roots:
                # A loop reads one element of such a dimension at a time, and a mesh
                # axis has a divisor of `devices` as its size.
                if root not in scanned and math.gcd(sizes[root], devices) > 1:
                    self.axis_of_root[root] = number
            for place in logical.places:
                roots = classes.dims[place.array][place.dim]
                if 0 < place.index < classes.shardable_count(roots):
                    self.minor.add(number)

        self.sub_dims: list[list[tuple[int, int]]] = []
        for dims in self.roots:
            numbered = []
            for dim in dims:
                for index, root in enumerate(dim):
                    axis_number = self.axis_of_root.get(root, -1)
                    numbered.append((axis_number, index))
            self.sub_dims.append(numbered)
        numbers_of_labelled: dict[_Labelled, int] = {}
        self.labelled_numbers: list[int] = []
        for operation in self.program.operations:
            labelled = _labelled(self, operation)
            number = numbers_of_labelled.setdefault(labelled, len(numbers_of_labelled))
            self.labelled_numbers.append(number)
        self.labelled = list(numbers_of_labelled)

    def under(self, assignment: Assignment) -> AssignedLayout:
        """The shardings and collectives of the step under an axis assignment."""
        return _Propagation(self, assignment).layout()


def _labelled(layouts: Layouts, operation: Operation) -> _Labelled:
    """The operation `operation` with a label for each sub-dimension of its operands and
    results. A dimension with several sub-dimensions gets several labels for one factor
    of the operation's Shardy sharding rule. The labels are as the letters of an
    `einsum`; `shardable` has the logical axis of each label that a mesh axis may shard.
    """
    # It marks arrays, and computes nothing.
    if operation.name == "use":
        return _Labelled(
            name=operation.name,
            ins=(),
            outs=(),
            shardable=(),
            minor=frozenset(),
            bytes=(),
        )
    values = layouts.program.values
    labels = _Labels(layouts, operation)
    ins = []
    for number, dims in zip(operation.ins, operation.factors.ins, strict=True):
        ins.append(labels.of(number, dims))
    outs = []
    for number, dims in zip(operation.outs, operation.factors.outs, strict=True):
        outs.append(labels.of(number, dims))
    operand_bytes = []
    for number in operation.ins:
        value = values[number]
        is_free = value.free or not value.shape
        operand_bytes.append(0.0 if is_free else value.bytes)
    return _Labelled(
        name=operation.name,
        ins=tuple(ins),
        outs=tuple(outs),
        shardable=tuple(labels.shardable.items()),
        minor=frozenset(labels.minor),
        bytes=tuple(operand_bytes),
    )


class _Labels:
    """The labels of an operation's sub-dimensions, in the order in which they are asked
    for.

    - `roots`: the classes of the sub-dimensions of each factor.
    - `label_of_factor`: the label of each sub-dimension of a factor, by the factor and
      the index of the sub-dimension.
    - `shardable`, `minor`: as those of `_Labelled`, for the labels so far.
    """

    def __init__(self, layouts: Layouts, operation: Operation):
        """Finds the classes of the sub-dimensions of each factor of an operation: those
        of a dimension that is this factor alone. `roots` has these classes by the
        factor's number, and `label_of_factor` gets a label for each sub-dimension of a
        factor.
        """
        self.layouts = layouts
        self.operation = operation
        self.label_of_factor: dict[tuple[int, int], int] = {}
        self.shardable: dict[int, int] = {}
        self.minor: set[int] = set()
        self.roots: dict[int, list[int]] = {}
        numbers = (*operation.ins, *operation.outs)
        sides = (*operation.factors.ins, *operation.factors.outs)
        for number, dims in zip(numbers, sides, strict=True):
            for roots_of_dim, dim in zip(layouts.roots[number], dims, strict=True):
                if len(dim) == 1:
                    self.roots.setdefault(dim[0], roots_of_dim)

    def of(self, value: int, dims: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The labels of the sub-dimensions of a value. `dims` are the factors of each of
        its dimensions.
        """
        shape = self.layouts.program.values[value].shape
        roots = self.layouts.roots[value]
        labels: list[int] = []
        for size, roots_of_dim, dim in zip(shape, roots, dims, strict=True):
            labels += self.of_dim(size, roots_of_dim, dim)
        return tuple(labels)

    def of_dim(
        self,
        size: int,
        roots_of_dim: Sequence[int],
        factors: tuple[int, ...],
    ) -> list[int]:
        """The labels of one dimension of `size` elements; -1 for all its sub-dimensions
        if they are not those of its factors, or cannot be sharded. `roots_of_dim` has
        the classes of its sub-dimensions, and `factors` those of the operation's
        sharding rule.
        """
        # The keys of `label_of_factor`, and the classes of these sub-dimensions.
        keys: list[tuple[int, int]] = []
        roots_of_factors: list[int] = []
        for factor in factors:
            roots_of_factor = self.roots.get(factor, ())
            for index, root in enumerate(roots_of_factor):
                keys.append((factor, index))
                roots_of_factors.append(root)
        are_roots_of_dim = roots_of_factors == roots_of_dim
        if not are_roots_of_dim or must_stay_whole(self.operation, factors, size):
            return [-1] * len(roots_of_dim)

        labels = []
        for key, root in zip(keys, roots_of_dim, strict=True):
            label = self.label_of_factor.setdefault(key, len(self.label_of_factor))
            labels.append(label)
            if root in self.layouts.axis_of_root:
                self.shardable[label] = self.layouts.axis_of_root[root]
        self.minor.update(labels[1:])
        return labels


class _Propagation:
    """Propagates shardings under one axis assignment through a program, operation by
    operation.

    - `shards_minor`: whether the assignment has an axis of `Layouts.minor`.
    - `rank`: the rank of each logical axis in the assignment's order of preference.
    - `state`, `positions`: the sharding of each value so far; `positions` has that of an
      unreduced value once it is reduced.
    - `copies`: pairs of a value and a sharding that it has been resharded to. The copy
      is used again.
    - `events`, `used`, `unreduced`: as those of `AssignedLayout`, so far.
    - `effects`: the effect of each distinct operation on operands with given shardings.
    """

    def __init__(self, layouts: Layouts, assignment: Assignment):
        """Starts with all values replicated, and no collectives. A state is a position
        of a value's sub-dimensions, `WHOLE` (replicated) or `UNREDUCED`. `copies` has
        pairs of a value and a state to which it was resharded, and `effects` keeps the
        effect of each distinct operation on operands of given states.
        """
        self.layouts = layouts
        self.assignment = assignment
        self.shards_minor = not layouts.minor.isdisjoint(assignment)
        self.rank = {number: rank for rank, number in enumerate(assignment)}
        count = len(layouts.program.values)
        self.state = [WHOLE] * count
        self.positions: list[int] = [WHOLE] * count
        self.copies: set[tuple[int, int]] = set()
        self.events: list[Event] = []
        self.used: set[int] = set()
        self.unreduced: set[int] = set()
        self.effects: dict[tuple[int, tuple[int, ...]], _Effect] = {}

    def layout(self) -> AssignedLayout:
        """The shardings and collectives of the whole program. A value's state is its
        sharding so far.
        """
        program = self.layouts.program
        for value in program.arguments:
            self.set_state(value, self.preferred(value))
        divided = []
        for number, operation in enumerate(program.operations):
            divided.append(self.propagate(number, operation))
        # A result has the sharding of the argument that it replaces, such as the weight
        # that it updates.
        last = len(program.operations) - 1
        for value in program.results:
            if self.state[value] == UNREDUCED:
                self.move(value, self.preferred(value), times=1.0, operation=last)
        return AssignedLayout(
            assignment=self.assignment,
            events=tuple(self.events),
            positions=tuple(self.positions),
            divided=tuple(divided),
            used=frozenset(self.used),
            unreduced=frozenset(self.unreduced),
        )

    def preferred(self, value: int) -> _State:
        """The position of the sub-dimension of a value that the assignment prefers to
        shard; `WHOLE` if there is none. A minor sub-dimension counts only if mesh axes
        may shard the major ones before it. `sub_dims` has the logical axis of each
        sub-dimension, and its index within its dimension.
        """
        sub_dims = self.layouts.sub_dims[value]
        for axis in self.assignment:
            for position, (number, index) in enumerate(sub_dims):
                if number != axis:
                    continue
                before = sub_dims[position - index : position]
                major_axes = [major for major, _ in before]
                may_shard_major = all(major >= 0 for major in major_axes)
                if index == 0 or (self.shards_minor and may_shard_major):
                    return position
        return WHOLE

    def set_state(self, value: int, state: _State) -> None:
        """Notes that a value now has a sharding. The state is the position of its
        sharded sub-dimension, `WHOLE` (replicated) or `UNREDUCED`.
        """
        self.state[value] = state
        position = state
        if state == UNREDUCED:
            self.unreduced.add(value)
            # An unreduced value gets the sharding that the assignment prefers when it
            # is reduced.
            position = self.preferred(value)
        self.positions[value] = position
        if position >= 0:
            number, _ = self.layouts.sub_dims[value][position]
            self.used.add(number)

    def propagate(self, number: int, operation: Operation) -> bool:
        """Adds the collectives that the operands of `operation`, the one with this number,
        need, and sets the shardings of its results. Returns whether the mesh axis divides
        the operation's work. Equal operations share a number of `labelled_numbers`.
        """
        if operation.name == "use":
            return False
        values = self.layouts.program.values
        # Every device computes its shard of such results from constants.
        if all(values[value].free for value in operation.outs):
            return False
        if operation.name in ("carry", "return"):
            self.hand_on(number, operation)
            return False
        labelled_number = self.layouts.labelled_numbers[number]
        states = tuple(self.state[value] for value in operation.ins)
        effect = self.effects.get((labelled_number, states))
        if effect is None:
            effect = self.effect(self.layouts.labelled[labelled_number], states)
            self.effects[labelled_number, states] = effect
        for value, needed_state in zip(operation.ins, effect.ins, strict=True):
            self.move(value, needed_state, operation.times, number)
        for value, state in zip(operation.outs, effect.outs, strict=True):
            self.set_state(value, state)
        return effect.is_divided

    def hand_on(self, number: int, operation: Operation) -> None:
        """Reshards a loop-carried value at `operation`, the one with this number, which is
        the start ("carry") or the end ("return") of a loop's body.

        At the start of the loop the value gets the sharding that the assignment
        prefers. At the end of the body it gets back the sharding from the start of the
        body: a "return" has the next value and the value at the start as operands.
        """
        carried = operation.ins[0]
        if operation.name == "return":
            new_state = self.state[operation.ins[1]]
        else:
            new_state = self.preferred(operation.outs[0])
        # A reshape in the body may split a dimension that is one outside of the loop.
        # Such a value is replicated.
        rank = len(self.layouts.sub_dims[carried])
        if operation.name == "carry" and new_state >= rank:
            new_state = WHOLE
        self.move(carried, new_state, operation.times, number)
        self.set_state(operation.outs[0], new_state)

    def effect(self, operation: _Labelled, states: tuple[_State, ...]) -> _Effect:
        """The effect of an operation whose operands have the shardings `states`. If it
        is divided along a label, all its arrays are sharded along this label; a result
        without the label is then a sum over it, which stays unreduced. The operation
        has, for each operand and result, the labels of its sub-dimensions; a state is a
        position among them, `WHOLE` or `UNREDUCED`.
        """
        if UNREDUCED in states and _stays_unreduced(operation, states):
            unreduced = (UNREDUCED,) * len(operation.outs)
            return _Effect(is_divided=False, ins=states, outs=unreduced)
        label = self.label(operation, states)
        is_divided = label is not None
        is_summed = is_divided and any(label in labels for labels in operation.ins)
        ins = tuple(_position(labels, label) for labels in operation.ins)
        outs = []
        for labels in operation.outs:
            position = _position(labels, label)
            is_unreduced = is_summed and position == WHOLE
            outs.append(UNREDUCED if is_unreduced else position)
        return _Effect(is_divided=is_divided, ins=ins, outs=tuple(outs))

    def label(self, operation: _Labelled, states: tuple[_State, ...]) -> int | None:
        """The label of `operation` along which the mesh axis divides the operation; `None`
        if it is not divided.

        It is a label of the logical axis that the assignment prefers most. Of several
        such labels, it is the one for which the fewest bytes of operands are resharded.
        `states` has the state of each operand: a position among its labels, `WHOLE` or
        `UNREDUCED`. The operation's `shardable` has pairs of a label and its logical
        axis, and `minor` the labels of minor sub-dimensions.
        """

        def moved_bytes(label: int) -> float:
            """The bytes of the operands that are sharded, but not along this label."""
            sides = zip(operation.ins, states, operation.bytes, strict=True)
            return math.fsum(
                nbytes
                for labels, state, nbytes in sides
                if state not in (WHOLE, _position(labels, label))
            )

        # The rank of each label's logical axis in the order of preference.
        ranks: dict[int, int] = {}
        for label, number in operation.shardable:
            if number not in self.rank:
                continue
            if label in operation.minor and not self.shards_minor:
                continue
            if _is_worth_it(operation, states, label):
                ranks[label] = self.rank[number]
        return min(
            ranks,
            key=lambda label: (ranks[label], moved_bytes(label)),
            default=None,
        )

    def move(self, value: int, new_state: _State, times: float, operation: int) -> None:
        """Adds the collective that reshards a value for the operation with this number,
        which runs `times` times. A replicated value, and one that was resharded so
        before, needs none. An unreduced value is reduced once for all its readers; of
        another value, the reader gets a copy. A state is the position of the sharded
        sub-dimension, `WHOLE` (replicated) or `UNREDUCED`.
        """
        state = self.state[value]
        if state in (new_state, WHOLE):
            return
        is_gathered = new_state == WHOLE
        if state == UNREDUCED:
            kind = _REDUCE if is_gathered else _SCATTER
            self.set_state(value, new_state)
        elif (value, new_state) not in self.copies:
            kind = _GATHER if is_gathered else _EXCHANGE
            self.copies.add((value, new_state))
        else:
            return
        event = Event(kind=kind, value=value, times=times, operation=operation)
        self.events.append(event)


def _is_worth_it(operation: _Labelled, states: tuple[_State, ...], label: int) -> bool:
    """Whether to divide an operation along a label. `states` are the shardings of the
    operands.

    An operation whose result has the label is always divided, and so is a matrix
    product or a convolution. Another operation reduces over the label. It is divided
    only if an operand is sharded along it. The operation has labels for the
    sub-dimensions of each operand and result; a state is a position among them.
    """
    if operation.name in _PRODUCTS:
        return True
    if any(label in labels for labels in operation.outs):
        return True
    for labels, state in zip(operation.ins, states, strict=True):
        if label in labels and state != WHOLE:
            return True
    return False


def _stays_unreduced(operation: _Labelled, states: tuple[_State, ...]) -> bool:
    """Whether an operation may read unreduced operands and return an unreduced result,
    because it is linear in them, or multiplies or divides them by a scalar. `states`
    are the shardings of the operands. The operation's `bytes` are those of each
    operand.
    """
    if operation.name in _LINEAR:
        return all(state == UNREDUCED for state in states)
    if operation.name not in _SCALED:
        return False
    reduced = []
    for number, state in enumerate(states):
        if state != UNREDUCED:
            reduced.append(number)
    # A quotient is linear in its first operand alone.
    if operation.name != "multiply" and states[0] != UNREDUCED:
        return False
    if len(reduced) != 1:
        return False
    # Scalars, and values made of constants, count no bytes.
    return operation.bytes[reduced[0]] == 0


def _position(labels: tuple[int, ...], label: int | None) -> int:
    """The position of a label in those of an array; `WHOLE` without it."""
    if label in labels:
        return labels.index(label)
    return WHOLE
