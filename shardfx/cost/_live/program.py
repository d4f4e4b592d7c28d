"""An HLO program as a flat list of operations on numbered values.

Tuples, copies, calls and fusions are expanded. Loops and branches are nested bodies. A
value is one array, and two values never share a number.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax

from ..._ground import opcodes
from ..._step import Array, HloModule, Instruction, Result, index_of, result_of, root_of


# The numbers of the values of an instruction: one number, or a tuple of them.
Values: TypeAlias = "int | tuple[Values, ...]"

# A loop-carried value may pass through these operations unchanged.
_UNCHANGED = opcodes.COPIES | {"bitcast"}
_IDENTITIES = re.compile(
    r'custom_call_target="(Sharding|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint)"'
)


@dataclasses.dataclass(eq=False)
class FlatOp:
    """An operation: the values that it reads and makes, and the bodies of a loop or
    conditional.

    - `instruction`: the HLO instruction.
    - `reads`, `makes`: the numbers of the values that it reads and makes. A loop reads
      the initial values of the loop-carried values that it changes.
    - `bodies`: the body of a loop, or the branches of a conditional.
    - `calls`: the calls and fusions around the operation, innermost first.
    """

    instruction: Instruction
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    bodies: "tuple[Body, ...]" = ()
    calls: tuple[Instruction, ...] = ()

    @property
    def opcode(self) -> str:
        return self.instruction.opcode


@dataclasses.dataclass(eq=False)
class Body:
    """The operations of the entry computation, of a loop's body or of a branch.

    - `carried`: the numbers of the parameters. In a loop's body, these are the
      loop-carried values that the loop changes. A branch has none.
    - `results`: the numbers of the values that it returns.
    - `ops`: the operations, in the order of the text.
    """

    carried: tuple[int, ...]
    results: tuple[int, ...]
    ops: list[FlatOp]


@dataclasses.dataclass(eq=False)
class FlatProgram:
    """A program without calls, tuples and fusions, whose values are numbered.

    - `buffers`: the dtype and shape of each value, by the value's number.
    - `entry`: the entry computation. Its `carried` are the parameters in order, one
      value for each array of a tuple.
    - `parameters`: the `parameter` instruction of each value in `entry.carried`.
    """

    buffers: list[Array]
    entry: Body
    parameters: tuple[Instruction, ...] = ()


class Use(NamedTuple):
    """The read of a value.

    - `op`, `operand`: the operation that reads it, and the number of the operand.
    - `body`: the body of the operation.
    """

    op: FlatOp
    operand: int
    body: Body


class Uses:
    """The operation that makes each value of a program, and the operations that read
    it.

    - `ops`: all operations, with those of nested bodies.
    - `maker`: for a value, the operation that makes it.
    - `home`: for a value, the body in which it is made or carried.
    - `users`: for a value, each read of it.
    - `results`: the values that any of the bodies returns.
    """

    def __init__(self, program: FlatProgram):
        """Reads the operations of `program`, with those of nested bodies."""
        self.ops: list[FlatOp] = []
        self.maker: dict[int, FlatOp] = {}
        self.home: dict[int, Body] = {}
        self.users: dict[int, list[Use]] = {}
        self.results: set[int] = set()
        self.read(program.entry)

    def reads_of(self, value: int) -> Sequence[Use]:
        return self.users.get(value, ())

    def read(self, body: Body) -> None:
        """Notes the operations of a body, and of the bodies in it: for each value
        (number), its maker, its home body and its reads.
        """
        self.results.update(body.results)
        self.home.update(dict.fromkeys(body.carried, body))
        for op in body.ops:
            self.ops.append(op)
            for operand, value in enumerate(op.reads):
                use = Use(
                    op=op,
                    operand=operand,
                    body=body,
                )
                self.users.setdefault(value, []).append(use)
            for value in op.makes:
                self.maker[value] = op
                self.home[value] = body
            for inner in op.bodies:
                self.read(inner)


_T = TypeVar("_T", bound=Hashable)


def reached(
    starts: Iterable[_T],
    next_of: Callable[[_T], Iterable[_T]],
) -> Iterator[_T]:
    """Yields the items that a breadth-first search from `starts` reaches, with
    `starts`, each once, the nearest first. `next_of` returns the items to which the
    search goes from an item.
    """
    queue = collections.deque(dict.fromkeys(starts))
    seen = set(queue)
    while queue:
        item = queue.popleft()
        yield item
        new_items = [
            other for other in dict.fromkeys(next_of(item)) if other not in seen
        ]
        seen.update(new_items)
        queue += new_items


def program_of(module: HloModule) -> FlatProgram:
    """Flattens an HLO module."""
    return _Flattener(module).flattened()


class _Flattener:
    """Flattens an HLO module. Its methods add operations to a list `ops`. `bound` has
    the values of the parameters of the computation whose operations are added.

    - `buffers`: the dtype and shape of each value so far.
    - `results`: the parsed type of each text of a result.
    - `calls`: the calls and fusions around the computation that is read.
    """

    def __init__(self, module: HloModule):
        self.module = module
        self.buffers: list[Array] = []
        self.results: dict[str, Result] = {}
        self.calls: tuple[Instruction, ...] = ()

    def flattened(self) -> FlatProgram:
        """The flat program. Each array of a parameter that is a tuple is a value."""
        entry = self.module.computations[self.module.entry]
        parameters = [
            instruction
            for instruction in entry.values()
            if instruction.opcode == "parameter"
        ]
        parameters.sort(key=_number)
        bound = [self.new(self.result(parameter.result)) for parameter in parameters]
        ops: list[FlatOp] = []
        root_values = self.read(self.module.entry, bound, ops)

        parameter_of: dict[int, Instruction] = {}
        for parameter, values in zip(parameters, bound, strict=True):
            parameter_of.update(dict.fromkeys(_numbers_in(values), parameter))
        body = Body(
            carried=tuple(parameter_of),
            results=_numbers_in(root_values),
            ops=ops,
        )
        return FlatProgram(
            buffers=self.buffers,
            entry=body,
            parameters=tuple(parameter_of.values()),
        )

    def new(self, result: Result) -> Values:
        """Adds a value for each array of an instruction's result, and returns the
        numbers of the values: 7 for an array, (7, (8, 9)) for a nested tuple.
        """
        if isinstance(result, Array):
            self.buffers.append(result)
            return len(self.buffers) - 1
        return tuple(map(self.new, result))

    def result(self, text: str) -> Result:
        if text not in self.results:
            self.results[text] = result_of(text)
        return self.results[text]

    def read(self, name: str, bound: Sequence[Values], ops: list[FlatOp]) -> Values:
        """Adds the operations of the computation `name` to `ops`, and returns the values
        of its root. `bound` has the values of its parameters, by their numbers.
        """
        values: dict[str, Values] = {}
        root: Values = ()
        for instruction in self.module.computations[name].values():
            values[instruction.name] = self.add(instruction, bound, values, ops)
            if instruction.is_root:
                root = values[instruction.name]
        return root

    def add(
        self,
        instruction: Instruction,
        bound: Sequence[Values],
        values: dict[str, Values],
        ops: list[FlatOp],
    ) -> Values:
        """Adds the operations of an instruction to `ops`, and returns the values of its
        result. `values` has those of earlier instructions, by the instruction's name;
        `bound` has those of the computation's parameters, by their numbers.
        """
        opcode = instruction.opcode
        operands = [values[name] for name in instruction.operands if name in values]
        if opcode == "parameter":
            return bound[_number(instruction)]
        if opcode == "tuple":
            return tuple(operands)
        first = operands[0] if operands else None
        index = index_of(instruction)
        if index is not None and isinstance(first, tuple):
            return first[index]
        if opcode in opcodes.CALL_ENDS and isinstance(first, tuple):
            # The tuple of a start: its operands, and its results.
            return first[1]
        if first is not None and self.returns_operand(instruction, first):
            return first
        if opcode == "while":
            return self.loop(instruction, operands[0], ops)

        called = [target for _, target in instruction.called]
        if opcode in opcodes.CALLS:
            return self.inlined(instruction, called[0], operands, ops)
        if opcode in opcodes.CALL_STARTS:
            result = self.inlined(instruction, called[0], operands, ops)
            return (tuple(operands), result)
        results = self.new(self.result(instruction.result))
        bodies: tuple[Body, ...] = ()
        if opcode == "conditional":
            branches = zip(called, operands[1:], strict=True)
            bodies = tuple(self.branch(name, operand) for name, operand in branches)
        op = FlatOp(
            instruction=instruction,
            reads=_numbers_in(tuple(operands)),
            makes=_numbers_in(results),
            bodies=bodies,
            calls=self.calls,
        )
        ops.append(op)
        return results

    def returns_operand(self, instruction: Instruction, operand: Values) -> bool:
        """Whether the result of an instruction is its first operand."""
        is_same = instruction.opcode in opcodes.ALIASES
        if instruction.opcode == "custom-call":
            is_same = _IDENTITIES.search(instruction.attributes) is not None
        is_array = isinstance(self.result(instruction.result), Array)
        return is_same and isinstance(operand, int) == is_array

    def branch(self, name: str, operand: Values) -> Body:
        """The body of a branch of a conditional."""
        ops: list[FlatOp] = []
        result = self.read(name, [operand], ops)
        return Body(carried=(), results=_numbers_in(result), ops=ops)

    def inlined(
        self,
        call: Instruction,
        name: str,
        bound: Sequence[Values],
        ops: list[FlatOp],
    ) -> Values:
        """Adds the operations of the computation `name`, which `call` calls with the
        values `bound`, and returns the values of its root. `self.calls` has the calls
        around the operations, innermost first.
        """
        outer_calls = self.calls
        self.calls = (call, *outer_calls)
        root_values = self.read(name, bound, ops)
        self.calls = outer_calls
        return root_values

    def loop(
        self,
        instruction: Instruction,
        initial: Values,
        ops: list[FlatOp],
    ) -> Values:
        """Adds a loop with these initial values, and returns the values of its result.
        A value that the loop never changes has one number before, in and after the
        loop.
        """
        body = dict(instruction.called)["body"]
        changed_indices = self.changes(body)
        before = initial if isinstance(initial, tuple) else (initial,)
        result = self.result(instruction.result)
        assert not isinstance(result, Array)
        # A changed value has one number inside of the loop, and one after it.
        inside = list(before)
        after = list(before)
        for index in changed_indices:
            inside[index] = self.new(result[index])
        for index in changed_indices:
            after[index] = self.new(result[index])

        # Of all loop-carried values, the numbers of those that the loop changes.
        def changed(values: Sequence[Values]) -> tuple[int, ...]:
            return _numbers_in(tuple(values[index] for index in changed_indices))

        body_ops: list[FlatOp] = []
        root = self.read(body, [tuple(inside)], body_ops)
        assert isinstance(root, tuple)
        op = FlatOp(
            instruction=instruction,
            reads=changed(before),
            makes=changed(after),
            bodies=(
                Body(
                    carried=changed(inside),
                    results=changed(root),
                    ops=body_ops,
                ),
            ),
            calls=self.calls,
        )
        ops.append(op)
        return tuple(after)

    def changes(self, name: str) -> tuple[int, ...]:
        """The indices of the loop-carried values that a loop changes. `name` is the
        computation of the loop's body.
        """
        body = self.module.computations[name]
        root = root_of(body)
        if root.opcode != "tuple":
            result = self.result(root.result)
            if isinstance(result, Array):
                return (0,)
            return tuple(range(len(result)))
        return tuple(
            index
            for index, operand in enumerate(root.operands)
            if not self.returns_unchanged(body, operand, index)
        )

    def returns_unchanged(
        self,
        body: dict[str, Instruction],
        name: str,
        index: int,
    ) -> bool:
        """Whether the instruction `name` of a loop's `body` is element `index` of the
        body's parameter, unchanged. It can be a copy of the element, or come unchanged
        through nested loops.
        """
        instruction = body[name]
        while instruction.opcode in _UNCHANGED:
            instruction = body[instruction.operands[0]]
        own_index = index_of(instruction)
        if own_index is None:
            return False
        holder = body[instruction.operands[0]]
        if holder.opcode != "while":
            return holder.opcode == "parameter" and own_index == index
        initial = body[holder.operands[0]]
        if initial.opcode != "tuple":
            return False
        if own_index in self.changes(dict(holder.called)["body"]):
            return False
        return self.returns_unchanged(body, initial.operands[own_index], index)


def _numbers_in(values: Values) -> tuple[int, ...]:
    """The numbers of all values in a tuple of them."""
    return tuple(jax.tree.leaves(values))


def _number(parameter: Instruction) -> int:
    """The number of a parameter, which stands in its parentheses."""
    return int(parameter.inside)
