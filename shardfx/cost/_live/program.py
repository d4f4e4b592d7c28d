"""An HLO program as a flat list of operations on numbered values.

Tuples, copies, calls and fusions are expanded. Loops and branches are nested bodies. A
value is one array, and two values never share a number.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax

from ..._step import Array, HloModule, Instruction, Result, index_of, result_of


# The numbers of the values of an instruction: one number, or a tuple of them.
Values: TypeAlias = "int | tuple[Values, ...]"

# Operations whose result is their operand, so they make no new array.
_SAME = frozenset(
    [
        "bitcast",
        "copy",
        "reshape",
        "opt-barrier",
        "add-dependency",
        "domain",
        "copy-done",
        "after-all",
        "async-update",
    ]
)
# Operations that run a computation on their operands. An asynchronous one has a second
# instruction for its end.
_CALLS = ("call", "fusion")
_BEGIN, _END = ("async-start", "fusion-start"), ("async-done", "fusion-done")
_IDENTITIES = re.compile(
    r'custom_call_target="(Sharding|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint)"'
)


@dataclasses.dataclass(eq=False)
class FlatOp:
    """An operation: the values that it reads and makes, and the bodies of a loop or
    conditional.

    - `instruction`: the HLO instruction.
    - `reads`, `makes`: the numbers of the values that it reads and makes. A loop reads
      the initial values of the
        loop-carried values that it changes.
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
      loop-carried values that the loop
        changes. A branch has none.
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


class Uses:
    """The operation that makes each value of a program, and the operations that read
    it.

    - `ops`: all operations, with those of nested bodies.
    - `maker`: for a value, the operation that makes it.
    - `home`: for a value, the body in which it is made or carried.
    - `users`: for a value, each operation that reads it, the number of the operand, and
      the body of that operation.
    - `results`: the values that any of the bodies returns.
    """

    def __init__(self, program: FlatProgram):
        self.ops: list[FlatOp] = []
        self.maker: dict[int, FlatOp] = {}
        self.home: dict[int, Body] = {}
        self.users: dict[int, list[tuple[FlatOp, int, Body]]] = {}
        self.results: set[int] = set()
        self.read(program.entry)

    def read(self, body: Body) -> None:
        self.results.update(body.results)
        self.home.update(dict.fromkeys(body.carried, body))
        for op in body.ops:
            self.ops.append(op)
            for at, value in enumerate(op.reads):
                self.users.setdefault(value, []).append((op, at, body))
            for value in op.makes:
                self.maker[value], self.home[value] = op, body
            for inner in op.bodies:
                self.read(inner)


_T = TypeVar("_T", bound=Hashable)


def reached(
    starts: Iterable[_T], next_of: Callable[[_T], Iterable[_T]]
) -> Iterator[_T]:
    """Yields the items that a breadth-first search from `starts` reaches, with
    `starts`, each once, the nearest first. `next_of` returns the items to which the
    search goes from an item.
    """
    queue = collections.deque(dict.fromkeys(starts))
    seen = set(queue)
    while queue:
        one = queue.popleft()
        yield one
        new = [other for other in dict.fromkeys(next_of(one)) if other not in seen]
        seen.update(new)
        queue += new


def program_of(module: HloModule) -> FlatProgram:
    """Flattens an HLO module."""
    return _Flattener(module).flattened()


class _Flattener:
    """Flattens an HLO module. Its methods add operations to a list `ops`. `bound` has
    the values of the parameters of the computation whose operations are added.
    """

    def __init__(self, module: HloModule):
        self.module = module
        self.buffers: list[Array] = []
        self.results: dict[str, Result] = {}
        self.calls: tuple[Instruction, ...] = ()

    def flattened(self) -> FlatProgram:
        entry = self.module.computations[self.module.entry]
        parameters = sorted(
            (one for one in entry.values() if one.opcode == "parameter"), key=_number
        )
        bound = [self.new(self.result(one.result)) for one in parameters]
        ops: list[FlatOp] = []
        made = self.read(self.module.entry, bound, ops)
        named = {
            leaf: one
            for one, values in zip(parameters, bound, strict=True)
            for leaf in jax.tree.leaves(values)
        }
        return FlatProgram(
            self.buffers,
            Body((*named,), tuple(jax.tree.leaves(made)), ops),
            (*named.values(),),
        )

    def new(self, result: Result) -> Values:
        """Adds a value for each array of an instruction's result, and returns the
        numbers of the values.
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
        """Adds the operations of the computation `name`, and returns the values of its
        root.
        """
        known: dict[str, Values] = {}
        root: Values = ()
        for instruction in self.module.computations[name].values():
            known[instruction.name] = self.add(instruction, bound, known, ops)
            if instruction.is_root:
                root = known[instruction.name]
        return root

    def add(
        self,
        one: Instruction,
        bound: Sequence[Values],
        known: dict[str, Values],
        ops: list[FlatOp],
    ) -> Values:
        """Adds the operations of the instruction `one`, and returns the values of its
        result. `known` has the values of earlier instructions, by the instruction's
        name.
        """
        operands = [known[name] for name in one.operands if name in known]
        if one.opcode == "parameter":
            return bound[_number(one)]
        if one.opcode == "tuple":
            return tuple(operands)
        first = operands[0] if operands else None
        if (index := index_of(one)) is not None and isinstance(first, tuple):
            return first[index]
        if one.opcode in _END and isinstance(first, tuple):
            return first[1]
        is_same = one.opcode in _SAME or (
            one.opcode == "custom-call" and _IDENTITIES.search(one.attributes)
        )
        if (
            is_same
            and operands
            and isinstance(operands[0], int)
            == isinstance(self.result(one.result), Array)
        ):
            return operands[0]
        called = [target for _, target in one.called]
        if one.opcode in _CALLS:
            return self.inlined(one, called[0], operands, ops)
        if one.opcode in _BEGIN:
            return (tuple(operands), self.inlined(one, called[0], operands, ops))
        if one.opcode == "while":
            return self.loop(one, operands[0], ops)
        makes = self.new(self.result(one.result))
        bodies: list[Body] = []
        for target, own in (
            zip(called, operands[1:], strict=True)
            if one.opcode == "conditional"
            else ()
        ):
            inner: list[FlatOp] = []
            bodies.append(
                Body((), tuple(jax.tree.leaves(self.read(target, [own], inner))), inner)
            )
        reads = tuple(jax.tree.leaves(operands))
        ops.append(
            FlatOp(one, reads, tuple(jax.tree.leaves(makes)), (*bodies,), self.calls)
        )
        return makes

    def inlined(
        self, call: Instruction, name: str, bound: Sequence[Values], ops: list[FlatOp]
    ) -> Values:
        """Adds the operations of the computation `name`, which `call` calls, and
        returns the values of its root.
        """
        self.calls, before = (call, *self.calls), self.calls
        made = self.read(name, bound, ops)
        self.calls = before
        return made

    def loop(self, one: Instruction, initial: Values, ops: list[FlatOp]) -> Values:
        """Adds the loop `one` with these initial values, and returns the values of its
        result. A value that the loop never changes has one number before, in and after
        the loop.
        """
        body = dict(one.called)["body"]
        changes = self.changes(body)
        entries = initial if isinstance(initial, tuple) else (initial,)
        shapes = self.result(one.result)
        assert not isinstance(shapes, Array)

        def with_new_values() -> tuple[Values, ...]:
            """The loop-carried values, with a new number for each value that the loop
            changes.
            """
            return tuple(
                given if at not in changes else self.new(shapes[at])
                for at, given in enumerate(entries)
            )

        inside, outside = with_new_values(), with_new_values()

        def changed(values: Sequence[Values]) -> tuple[int, ...]:
            return tuple(jax.tree.leaves([values[at] for at in changes]))

        turn: list[FlatOp] = []
        root = self.read(body, [inside], turn)
        assert isinstance(root, tuple)
        made = Body(changed(inside), changed(root), turn)
        ops.append(FlatOp(one, changed(entries), changed(outside), (made,), self.calls))
        return outside

    def changes(self, name: str) -> tuple[int, ...]:
        """The indices of the loop-carried values that a loop changes. `name` is the
        computation of the loop's body.
        """
        body = self.module.computations[name]
        root = next(one for one in body.values() if one.is_root)
        if root.opcode != "tuple":
            result = self.result(root.result)
            return (0,) if isinstance(result, Array) else tuple(range(len(result)))
        return tuple(
            at
            for at, operand in enumerate(root.operands)
            if not self.returns_unchanged(body, operand, at)
        )

    def returns_unchanged(
        self, body: dict[str, Instruction], made: str, at: int
    ) -> bool:
        """Whether the instruction named `made` of a loop's `body` is element `at` of
        the body's parameter, unchanged. It can be a copy of the element, or come
        unchanged through nested loops.
        """
        one = body[made]
        while one.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
            one = body[one.operands[0]]
        if (index := index_of(one)) is None:
            return False
        holder = body[one.operands[0]]
        if holder.opcode != "while":
            return holder.opcode == "parameter" and index == at
        given = body[holder.operands[0]]
        is_kept = given.opcode == "tuple" and index not in self.changes(
            dict(holder.called)["body"]
        )
        return is_kept and self.returns_unchanged(body, given.operands[index], at)


def _number(parameter: Instruction) -> int:
    return int(parameter.inside)
