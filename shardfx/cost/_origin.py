"""The argument of a program that a collective gathers, or whose gradient it reduces,
found by following values.

A value is the number of an array in a program without tuples, calls and fusions
(`FlatProgram`).
"""

import collections
import functools as ft
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from .._ground import opcodes
from .._step import CALLBACKS, MOVING, Frame, HloModule, Instruction
from ._live.program import FlatOp, Use, Uses, program_of, reached


# Operations whose result is the operand, or a slice or reshape of it. With several
# operands, each has its own result.
_SLICES = set(opcodes.PASSING)
for _kind in MOVING:
    _SLICES.update([_kind, f"{_kind}-start", f"{_kind}-done"])
# A custom call that concatenates slices of an array into one.
_CONCATENATES = 'custom_call_target="ConcatBitcast"'
_ARGUMENT = re.compile(r"^[A-Za-z_]\w*")
_KEY = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]|\.([A-Za-z_]\w*)")
# A custom call to Python on CPUs and GPUs; on TPUs, an array is sent to the host.
_CALLS_BACK = re.compile(
    r'custom_call_target="xla_ffi_(?:partitioned_)?python_\w+_callback"'
    r"|is_host_transfer=true"
)
# Operations that hand a callback's result from one device to all.
_HANDING_ON = opcodes.VIEWS | {"select", "convert"}
# The largest number of operations on a path backwards from a value, and of values that
# are visited forwards from it.
_MOST_STEPS_BACK = 64
_MOST_VISITED = 2000

# The number of an array in the flat program.
ValueNumber: TypeAlias = int


class Origins:
    """Finds the argument that a collective gathers or reduces, and the source line that
    causes the collective.

    The search goes backwards from the collective's operand to an argument, or forwards
    from its result to the operation that adds the result to an argument.
    """

    def __init__(self, module: HloModule):
        """Values are numbers of the flat program, and operations are `FlatOp`s of it.
        `_names` has the `parameter` instruction of each argument, and `_ops` the
        operation of each instruction, by its id.
        """
        self._module = module
        self._program = program_of(module)
        self._uses = Uses(self._program)
        entry = self._program.entry
        self._names = dict(zip(entry.carried, self._program.parameters, strict=True))
        self._results = frozenset(entry.results)
        self._ops: dict[int, FlatOp] = {}
        self._onward = ft.lru_cache(maxsize=65536)(self._passed_on)
        # For a loop-carried value, its loop and its index. For the result of a loop's
        # body or the operand of a `send`, the values that are equal to it outside the
        # body or after the `recv`.
        self._carried: dict[ValueNumber, tuple[FlatOp, int]] = {}
        self._equal_outside: dict[ValueNumber, list[ValueNumber]] = (
            collections.defaultdict(list)
        )
        transfers: dict[tuple[str, str], FlatOp] = {}
        for op in self._uses.ops:
            self._ops.setdefault(id(op.instruction), op)
            for body in op.bodies:
                for number, value in enumerate(body.carried):
                    self._carried[value] = (op, number)
                for value, carried in zip(body.results, op.makes, strict=False):
                    self._equal_outside[value].append(carried)
            rendezvous = op.instruction.rendezvous
            if rendezvous is not None:
                transfers[op.opcode, rendezvous] = op
        # The `send` that each `recv` receives from.
        self._senders: dict[FlatOp, FlatOp] = {}
        for (opcode, rendezvous), op in transfers.items():
            sender = transfers.get(("send", rendezvous))
            if opcode == "recv" and sender is not None:
                self._senders[op] = sender
                self._equal_outside[sender.reads[0]].append(op.makes[0])

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The call stack of the operation that causes a collective's instruction,
        innermost frame first. A collective that reshards a value has no source line. It
        gets the call stack of the operation that computes the value, or else of one
        that reads the result.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return self._module.frames(instruction)
        users = itertools.islice(reached([op], self._users_of), _MOST_STEPS_BACK)
        for near in itertools.chain(self._before(op), users):
            for source in (near.instruction, *near.calls):
                frames = self._module.frames(source)
                if frames:
                    return frames
        return ()

    def _users_of(self, op: FlatOp) -> Iterator[FlatOp]:
        """Yields the operations that read a result of `op`."""
        for value in op.makes:
            for use in self._uses.reads_of(value):
                yield use.op

    def _before(self, op: FlatOp | None) -> Iterator[FlatOp]:
        """Yields `op`, then the operation that computes the first operand of `op`, and
        so on backwards.
        """
        for _ in range(_MOST_STEPS_BACK):
            if op is None:
                return
            yield op
            op = self._senders.get(op, op)
            # An argument has no operation: its parameter stands for one. -1 is no value.
            value = op.reads[0] if op.reads else -1
            if value in self._names:
                yield FlatOp(
                    instruction=self._names[value],
                    reads=(),
                    makes=(value,),
                )
            if value in self._carried:
                op, _ = self._carried[value]
            else:
                op = self._uses.maker.get(value)

    def gathered(self, instruction: Instruction, element: int) -> str | None:
        """JAX's name of the argument that a collective sends; `None` if it sends a
        computed value. The argument, or a slice of it, is operand number `element` of
        the collective.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return None
        moved = self._senders.get(op, op).reads[element:]
        if moved:
            return self._argument(moved[0])
        return None

    def updated(self, instruction: Instruction, element: int) -> str | None:
        """JAX's name of the argument whose gradient a collective reduces; `None` if
        there is none. The gradient is result number `element` of the collective. The
        program adds it, or a value computed from it, to the argument.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return None
        for gradient_number in _results_of(op, element):
            for value in self._same_gradient(gradient_number):
                for use in self._uses.reads_of(value):
                    argument = self._updated_by(use)
                    if argument is not None:
                        return argument
        return None

    def _updated_by(self, use: Use) -> str | None:
        """JAX's name of the argument to which an operation adds a value; `None` if it
        does not. `use` is the read of the value: the operation, and the number of the
        operand.
        """
        if use.op.opcode not in ("add", "subtract") or len(use.op.reads) != 2:
            return None
        argument = self._argument(use.op.reads[1 - use.operand])
        # The sum is an updated weight only if it is a result of the program.
        if argument is None or self._results.isdisjoint(
            self._same_gradient(use.op.makes[0])
        ):
            return None
        return argument

    def _same_gradient(self, gradient_number: ValueNumber) -> Iterator[ValueNumber]:
        """Yields a gradient, and the values computed from it that may be the same or
        its shard, the nearest first.
        """
        return itertools.islice(reached([gradient_number], self._onward), _MOST_VISITED)

    def _passed_on(self, value: ValueNumber) -> tuple[ValueNumber, ...]:
        """For a value that is a gradient, the results of operations that read it and
        may return the same gradient. Such a result has the shape of the value or of its
        shard, or is a larger array into which the value is written. Operations of
        `opcodes.RENEWING`, such as products, return no gradient that they read.
        """
        following = [*self._equal_outside.get(value, ())]
        for use in self._uses.reads_of(value):
            opcode = use.op.opcode
            if opcode in opcodes.RENEWING:
                continue
            for output in _results_of(use.op, use.operand):
                is_update = opcode == "dynamic-update-slice"
                if is_update or self._is_shard(output, value):
                    following.append(output)
        return tuple(following)

    def _argument(self, value: ValueNumber) -> str | None:
        """If a value is an argument or a slice of one, JAX's name of the argument;
        otherwise `None`. Result number n of an operation that slices or moves is made
        of its operand number n, or of its first operand if it has fewer.
        """
        for _ in range(_MOST_STEPS_BACK):
            if value in self._names:
                return self._names[value].op_name or None
            maker = self._uses.maker.get(value)
            if maker is None or not _is_slice(maker):
                return None
            number = maker.makes.index(value)
            reads = self._senders.get(maker, maker).reads
            if not reads:
                return None
            if number < len(reads):
                value = reads[number]
            else:
                value = reads[0]
        return None

    def callback(self, instruction: Instruction) -> str:
        """The callback to Python for which alone a collective sends, such as
        "jax.debug.print": it sends the operands to one device, or the results to all.
        "" if there is none.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return ""
        return self._read_by_callback(op) or self._made_by_callback(op)

    def _read_by_callback(self, op: FlatOp) -> str:
        """The callback that alone reads an operation's results; "" if there is none.
        `_forms_of` gives the values to which operations hand a value on, such as views
        of it.
        """
        name = ""
        for value in itertools.islice(reached(op.makes, self._forms_of), _MOST_VISITED):
            if value in self._uses.results:
                return ""
            for use in self._uses.reads_of(value):
                # The branches of a conditional read its operands, and have entries of
                # their own here.
                if use.op.opcode in _HANDING_ON or use.op.opcode == "conditional":
                    continue
                name = _callback_name(use.op)
                if not name:
                    return ""
        return name

    def _forms_of(self, value: ValueNumber) -> Iterator[ValueNumber]:
        """The other forms of a value, such as its transpose."""
        for use in self._uses.reads_of(value):
            if use.op.opcode in _HANDING_ON:
                yield from use.op.makes

    def _made_by_callback(self, op: FlatOp) -> str:
        """The callback whose results an operation hands on; "" if there is none."""
        for value in itertools.islice(
            reached(op.reads, self._unspread), _MOST_STEPS_BACK
        ):
            maker = self._uses.maker.get(value)
            name = "" if maker is None else _callback_name(maker)
            if name:
                return name
        return ""

    def _unspread(self, value: ValueNumber) -> Iterable[ValueNumber]:
        """The values of which a value is a form on another device: what each branch of
        a conditional returns, or the operands that are handed on; else none.
        """
        maker = self._uses.maker.get(value)
        if maker is None:
            return ()
        if maker.opcode == "conditional":
            position = maker.makes.index(value)
            return (body.results[position] for body in maker.bodies)
        if maker.opcode in _HANDING_ON:
            return maker.reads
        return ()

    def is_sum_of_products(self, instruction: Instruction) -> bool:
        """Whether a permute sends partial sums of a matrix product. The permutes that
        replace a reduce-scatter send them. Those that replace an all-gather send an
        operand of the product. A value counts as a partial sum if it is computed from a
        matrix product, or from constants alone.
        """
        op = self._ops.get(id(instruction))
        operands = () if op is None else op.reads
        opcodes_of_makers: set[str] = set()
        for value in itertools.islice(
            reached(operands, self._operands_of), _MOST_STEPS_BACK
        ):
            maker = self._uses.maker.get(value)
            opcode = "parameter" if maker is None else maker.opcode
            opcodes_of_makers.add(opcode)
        has_product = not opcodes_of_makers.isdisjoint(opcodes.PRODUCTS)
        gathered = {"parameter", *opcodes.GATHERS}
        return has_product or opcodes_of_makers.isdisjoint(gathered)

    def _operands_of(self, value: ValueNumber) -> Iterable[ValueNumber]:
        """The values from which a value is computed. There are none for the result of
        an all-gather. A loop-carried value has one: its next value, which the loop's
        body returns.
        """
        if value in self._carried:
            loop, number = self._carried[value]
            return (loop.bodies[0].results[number],)
        maker = self._uses.maker.get(value)
        if maker is None or maker.opcode in opcodes.GATHERS:
            return ()
        return maker.reads

    def _is_shard(self, part: ValueNumber, whole: ValueNumber) -> bool:
        """Whether value `part` has as many elements as value `whole`, or the shape of a
        shard of `whole`.
        """
        part_shape = self._program.buffers[part].shape
        whole_shape = self._program.buffers[whole].shape
        if not part_shape or not whole_shape:
            return False
        if math.prod(part_shape) == math.prod(whole_shape):
            return True
        if len(part_shape) != len(whole_shape):
            return False
        pairs = zip(part_shape, whole_shape, strict=True)
        return all(size and whole_size % size == 0 for size, whole_size in pairs)


def _is_slice(op: FlatOp) -> bool:
    """Whether each result of an operation is one of its operands, or a slice of it."""
    return op.opcode in _SLICES or _CONCATENATES in op.instruction.attributes


def _callback_name(op: FlatOp) -> str:
    """The user's name of the callback that an operation runs; "" for other operations."""
    if op.opcode not in ("custom-call", "send"):
        return ""
    if not _CALLS_BACK.search(op.instruction.attributes):
        return ""
    primitive = op.instruction.op_name.rpartition("/")[2]
    return CALLBACKS.get(primitive, primitive) or "a callback"


def _results_of(op: FlatOp, number: int) -> tuple[int, ...]:
    """The results of an operation that correspond to its operand number `number`. There can
    be several, since the `-start` of an asynchronous collective also returns its
    operands.
    """
    count = max(1, min(len(op.reads), len(op.makes)))
    return op.makes[number % count :: count]


def path_of(argument: str) -> str:
    """The path of a leaf within its argument, from JAX's name of the leaf: `mlp/up/0`
    for `w['mlp'].up[0]`.
    """
    named = _ARGUMENT.match(argument)
    keys = _KEY.findall(argument[named.end() :] if named else argument)
    return "/".join(next(filter(None, key), "") for key in keys) or argument
