"""The argument of a compiled program that a collective serves: the weight that it gathers, or the weight whose gradient
it reduces.
"""

import collections
import functools as ft
import itertools
import math
import re
from collections.abc import Iterable, Iterator

from .._step import Frame
from ._collective import MOVING
from ._hlo_text import PRODUCTS, HloModule, Instruction
from ._live.program import FlatOp, Uses, program_of, reached


# These return their first operand, or a reshape or slice of it. Those with several operands return each of them.
_PASSES = frozenset(
    "copy copy-start copy-done convert bitcast bitcast-convert reshape transpose slice dynamic-slice pad opt-barrier "
    "slice-start slice-done recv-done while".split()
) | {kind + stage for kind in MOVING for stage in ("", "-start", "-done")}
_WHOLE = ("all-gather", "all-gather-done")
# These make one array of slices that are read one by one.
_JOINED = 'custom_call_target="ConcatBitcast"'
# The results of these are new values, whatever their shape.
_ENDS_HERE = PRODUCTS | frozenset("custom-call reduce reduce-window gather scatter sort while conditional send".split())
_ARGUMENT = re.compile(r"^[A-Za-z_]\w*")
_KEY = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]|\.([A-Za-z_]\w*)")
# The number of instructions that a value is followed, backwards and forwards.
_FAR, _MANY = 64, 2000


class Origins:
    """Finds the argument behind a value: backwards from a collective's operand, or forwards from its result to the
    argument's update.
    """

    def __init__(self, module: HloModule):
        self._module = module
        self._program = program_of(module)
        self._uses = uses = Uses(self._program)
        self._names = dict(zip(self._program.entry.carried, self._program.parameters, strict=True))
        self._results = frozenset(self._program.entry.results)
        self._ops: dict[int, FlatOp] = {}
        self._onward = ft.lru_cache(maxsize=65536)(self._next)
        # The loop that carries a value, with its index; the result of a body that becomes it, or the value that is
        # sent.
        self._carried: dict[int, tuple[FlatOp, int]] = {}
        self._becomes: dict[int, list[int]] = collections.defaultdict(list)
        ends: dict[tuple[str, str], FlatOp] = {}
        for op in uses.ops:
            self._ops.setdefault(id(op.instruction), op)
            for body in op.bodies:
                self._carried |= {value: (op, at) for at, value in enumerate(body.carried)}
                for value, made in zip(body.results, op.makes, strict=False):
                    self._becomes[value].append(made)
            if (meets := op.instruction.rendezvous) is not None:
                ends[op.opcode, meets] = op
        self._senders: dict[FlatOp, FlatOp] = {}
        for (opcode, meets), op in ends.items():
            if opcode == "recv" and (sender := ends.get(("send", meets))) is not None:
                self._senders[op] = sender
                self._becomes[sender.reads[0]].append(op.makes[0])

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The source lines of the operation that was lowered to an instruction.

        A change of a result's sharding has no line of its own. It gets the line that made the value before the change,
        else the line that uses the value after it.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return self._module.frames(instruction)
        uses = self._uses.users
        users = reached([op], lambda one: (user for value in one.makes for user, _, _ in uses.get(value, ())))
        near = itertools.chain(self._before(op), itertools.islice(users, _FAR))
        found = (self._module.frames(own) for one in near for own in (one.instruction, *one.calls))
        return next(filter(None, found), ())

    def _before(self, op: FlatOp | None) -> Iterator[FlatOp]:
        """Yields an operation, then the one that made its first operand, and so on backwards."""
        for _ in range(_FAR):
            if op is None:
                return
            yield op
            op = self._senders.get(op, op)
            value = op.reads[0] if op.reads else -1
            if value in self._names:
                yield FlatOp(self._names[value], (), (value,))
            op = self._carried[value][0] if value in self._carried else self._uses.maker.get(value)

    def gathered(self, instruction: Instruction, element: int) -> str | None:
        """The argument, by JAX's name for it, that an instruction sends, or of which it sends a slice; `None` if it
        sends a computed value.

        `element` is the index of the array among those that the instruction sends.
        """
        op = self._ops.get(id(instruction))
        moved = () if op is None else self._senders.get(op, op).reads[element:]
        return self._argument(moved[0]) if moved else None

    def updated(self, instruction: Instruction, element: int) -> str | None:
        """The argument that a reduction's result is added to in the end, which is the argument whose gradient it is;
        `None` without one.

        `element` is the index of the array in the instruction's result.
        """
        op = self._ops.get(id(instruction))
        for begun in () if op is None else _of_one(op, element):
            for value in self._later(begun):
                for user, at, _ in self._uses.users.get(value, ()):
                    if user.opcode in ("add", "subtract") and len(user.reads) == 2:
                        found = self._argument(user.reads[1 - at])
                        # An updated weight becomes a result of the program, and a difference from data does not.
                        if found is not None and not self._results.isdisjoint(self._later(user.makes[0])):
                            return found
        return None

    def _later(self, begun: int) -> Iterator[int]:
        """Yields a value and the values computed from it that may still be the same gradient or its shards, the nearest
        first.
        """
        return itertools.islice(reached([begun], self._onward), _MANY)

    def _next(self, value: int) -> tuple[int, ...]:
        """The results of a value's readers that have its shape, or that of a shard or a stack of it."""
        found = [*self._becomes.get(value, ())]
        for op, at, _ in self._uses.users.get(value, ()):
            made = () if op.opcode in _ENDS_HERE else _of_one(op, at)
            found += [one for one in made if op.opcode == "dynamic-update-slice" or self._is_like(one, value)]
        return tuple(found)

    def _argument(self, value: int) -> str | None:
        """The name of the argument that a value equals or is a slice of; `None` for a computed value."""
        for _ in range(_FAR):
            if value in self._names:
                return self._names[value].op_name or None
            op = self._uses.maker.get(value)
            if op is None or not (op.opcode in _PASSES or _JOINED in op.instruction.attributes):
                return None
            op, at = self._senders.get(op, op), op.makes.index(value)
            if not op.reads:
                return None
            value = op.reads[at if at < len(op.reads) else 0]
        return None

    def is_sum_of_products(self, instruction: Instruction) -> bool:
        """Whether a permute passes on partial products, to which other products are added.

        Such a sum starts from zeros, and within a loop from the body's last result.
        """
        op = self._ops.get(id(instruction))
        values = itertools.islice(reached(() if op is None else op.reads, self._made_of), _FAR)
        makers = [self._uses.maker.get(value) for value in values]
        opcodes = {None if made is None else made.opcode for made in makers}
        return not opcodes.isdisjoint(PRODUCTS) or opcodes.isdisjoint((None, *_WHOLE))

    def _made_of(self, value: int) -> Iterable[int]:
        """The operands of the operation that made a value. For a loop-carried value, it is the body's result."""
        if value in self._carried:
            loop, at = self._carried[value]
            return (loop.bodies[0].results[at],)
        made = self._uses.maker.get(value)
        return () if made is None or made.opcode in _WHOLE else made.reads

    def _is_like(self, part: int, whole: int) -> bool:
        """Whether a value has as many elements as another, or the shape of a shard of it."""
        sizes, limits = (self._program.buffers[value].shape for value in (part, whole))
        if not sizes or not limits or math.prod(sizes) == math.prod(limits):
            return bool(sizes and limits)
        return len(sizes) == len(limits) and all(
            size and not limit % size for size, limit in zip(sizes, limits, strict=True)
        )


def _of_one(op: FlatOp, at: int) -> tuple[int, ...]:
    """The results of an operation that correspond to operand number `at`. A collective's `-start` also returns its
    operands.
    """
    count = max(1, min(len(op.reads), len(op.makes)))
    return op.makes[at % count :: count]


def path_of(argument: str) -> str:
    """The path of a leaf in its own argument, from the name that JAX gives it: `w['mlp'].up[0]` is `mlp/up/0`."""
    named = _ARGUMENT.match(argument)
    keys = _KEY.findall(argument[named.end() :] if named else argument)
    return "/".join(next(filter(None, key), "") for key in keys) or argument
