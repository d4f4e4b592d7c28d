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

from .._step import CALLBACKS, MOVING, PRODUCTS, VIEWS, Frame, HloModule, Instruction
from ._live.program import FlatOp, Uses, program_of, reached


# Operations whose result is the operand, or a slice or reshape of it. With several
# operands, each has its own result.
_SLICES = frozenset(
    "copy copy-start copy-done convert bitcast bitcast-convert reshape transpose slice"
    " dynamic-slice pad opt-barrier slice-start slice-done recv-done while".split()
) | {kind + stage for kind in MOVING for stage in ("", "-start", "-done")}
_GATHERS = ("all-gather", "all-gather-done")
# A custom call that concatenates slices of an array into one.
_CONCATENATES = 'custom_call_target="ConcatBitcast"'
# Operations whose result is never the same gradient as the operand, even if the shapes
# are equal.
_RENEWING = PRODUCTS | frozenset(
    "custom-call reduce reduce-window gather scatter sort while conditional send".split()
)
_ARGUMENT = re.compile(r"^[A-Za-z_]\w*")
_KEY = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]|\.([A-Za-z_]\w*)")
# A custom call to Python on CPUs and GPUs; on TPUs, an array is sent to the host.
_CALLS_BACK = re.compile(
    r'custom_call_target="xla_ffi_(?:partitioned_)?python_\w+_callback"'
    r"|is_host_transfer=true"
)
# Operations that hand a callback's result from one device to all.
_SPREADS = VIEWS | {"select", "convert"}
# The largest number of operations on a path backwards from a value, and of values that
# are visited forwards from it.
_FAR, _MANY = 64, 2000


class Origins:
    """Finds the argument that a collective gathers or reduces, and the source line that
    causes the collective.

    The search goes backwards from the collective's operand to an argument, or forwards
    from its result to the operation that adds the result to an argument.
    """

    def __init__(self, module: HloModule):
        self._module = module
        self._program = program_of(module)
        self._uses = uses = Uses(self._program)
        self._names = dict(
            zip(self._program.entry.carried, self._program.parameters, strict=True)
        )
        self._results = frozenset(self._program.entry.results)
        self._ops: dict[int, FlatOp] = {}
        self._onward = ft.lru_cache(maxsize=65536)(self._next)
        # For a loop-carried value, its loop and its index. For the result of a loop's
        # body or the operand of a `send`, the values that are equal to it outside the
        # body or after the `recv`.
        self._carried: dict[int, tuple[FlatOp, int]] = {}
        self._becomes: dict[int, list[int]] = collections.defaultdict(list)
        transfers: dict[tuple[str, str], FlatOp] = {}
        for op in uses.ops:
            self._ops.setdefault(id(op.instruction), op)
            for body in op.bodies:
                self._carried |= {
                    value: (op, number) for number, value in enumerate(body.carried)
                }
                for value, carried in zip(body.results, op.makes, strict=False):
                    self._becomes[value].append(carried)
            if (meets := op.instruction.rendezvous) is not None:
                transfers[op.opcode, meets] = op
        self._senders: dict[FlatOp, FlatOp] = {}
        for (opcode, meets), op in transfers.items():
            if (
                opcode == "recv"
                and (sender := transfers.get(("send", meets))) is not None
            ):
                self._senders[op] = sender
                self._becomes[sender.reads[0]].append(op.makes[0])

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The call stack of the operation that causes a collective's instruction,
        innermost frame first. A collective that reshards a value has no source line. It
        gets the call stack of the operation that computes the value, or else of one
        that reads the result.
        """
        op = self._ops.get(id(instruction))
        if op is None:
            return self._module.frames(instruction)
        uses = self._uses.users
        users = reached(
            [op],
            lambda op: (
                user for value in op.makes for user, _, _ in uses.get(value, ())
            ),
        )
        near = itertools.chain(self._before(op), itertools.islice(users, _FAR))
        stacks = (
            self._module.frames(source)
            for op in near
            for source in (op.instruction, *op.calls)
        )
        return next(filter(None, stacks), ())

    def _before(self, op: FlatOp | None) -> Iterator[FlatOp]:
        """Yields `op`, then the operation that computes the first operand of `op`, and
        so on backwards.
        """
        for _ in range(_FAR):
            if op is None:
                return
            yield op
            op = self._senders.get(op, op)
            value = op.reads[0] if op.reads else -1
            if value in self._names:
                yield FlatOp(self._names[value], (), (value,))
            op = (
                self._carried[value][0]
                if value in self._carried
                else self._uses.maker.get(value)
            )

    def gathered(self, instruction: Instruction, element: int) -> str | None:
        """JAX's name of the argument that a collective sends; `None` if it sends a
        computed value. The argument, or a slice of it, is operand number `element` of
        the collective.
        """
        op = self._ops.get(id(instruction))
        moved = () if op is None else self._senders.get(op, op).reads[element:]
        return self._argument(moved[0]) if moved else None

    def updated(self, instruction: Instruction, element: int) -> str | None:
        """JAX's name of the argument whose gradient a collective reduces; `None` if
        there is none. The gradient is result number `element` of the collective. The
        program adds it, or a value computed from it, to the argument.
        """
        op = self._ops.get(id(instruction))
        for gradient in () if op is None else _results_of(op, element):
            for value in self._same_gradient(gradient):
                for user, number, _ in self._uses.users.get(value, ()):
                    if user.opcode in ("add", "subtract") and len(user.reads) == 2:
                        argument = self._argument(user.reads[1 - number])
                        # The sum is an updated weight only if it is a result of the
                        # program.
                        if argument is not None and not self._results.isdisjoint(
                            self._same_gradient(user.makes[0])
                        ):
                            return argument
        return None

    def _same_gradient(self, gradient: int) -> Iterator[int]:
        """Yields a gradient, and the values computed from it that may be the same or
        its shard, the nearest first.
        """
        return itertools.islice(reached([gradient], self._onward), _MANY)

    def _next(self, value: int) -> tuple[int, ...]:
        """For a value that is a gradient, the results of operations that read it and
        may return the same gradient. Such a result has the shape of the value or of its
        shard, or is a larger array into which the value is written.
        """
        following = [*self._becomes.get(value, ())]
        for op, number, _ in self._uses.users.get(value, ()):
            outputs = () if op.opcode in _RENEWING else _results_of(op, number)
            following += [
                output
                for output in outputs
                if op.opcode == "dynamic-update-slice" or self._is_shard(output, value)
            ]
        return tuple(following)

    def _argument(self, value: int) -> str | None:
        """If a value is an argument or a slice of one, JAX's name of the argument;
        otherwise `None`.
        """
        for _ in range(_FAR):
            if value in self._names:
                return self._names[value].op_name or None
            op = self._uses.maker.get(value)
            if op is None or not (
                op.opcode in _SLICES or _CONCATENATES in op.instruction.attributes
            ):
                return None
            op, number = self._senders.get(op, op), op.makes.index(value)
            if not op.reads:
                return None
            value = op.reads[number if number < len(op.reads) else 0]
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
        name = ""
        for value in itertools.islice(reached(op.makes, self._forms_of), _MANY):
            if value in self._uses.results:
                return ""
            for user, _, _ in self._uses.users.get(value, ()):
                # The branches of a conditional read its operands.
                if user.opcode in _SPREADS or user.opcode == "conditional":
                    continue
                name = _callback_name(user)
                if not name:
                    return ""
        return name

    def _forms_of(self, value: int) -> Iterator[int]:
        """The other forms of a value, such as its transpose."""
        for user, _, _ in self._uses.users.get(value, ()):
            if user.opcode in _SPREADS:
                yield from user.makes

    def _made_by_callback(self, op: FlatOp) -> str:
        values = itertools.islice(reached(op.reads, self._unspread), _FAR)
        makers = (self._uses.maker.get(value) for value in values)
        names = (_callback_name(maker) for maker in makers if maker is not None)
        return next(filter(None, names), "")

    def _unspread(self, value: int) -> Iterable[int]:
        """The values of which one device's copy of a value is made."""
        maker = self._uses.maker.get(value)
        if maker is None:
            return ()
        if maker.opcode == "conditional":
            position = maker.makes.index(value)
            return (body.results[position] for body in maker.bodies)
        return maker.reads if maker.opcode in _SPREADS else ()

    def is_sum_of_products(self, instruction: Instruction) -> bool:
        """Whether a permute sends partial sums of a matrix product. The permutes that
        replace a reduce-scatter send them. Those that replace an all-gather send an
        operand of the product. A value counts as a partial sum if it is computed from a
        matrix product, or from constants alone.
        """
        op = self._ops.get(id(instruction))
        values = itertools.islice(
            reached(() if op is None else op.reads, self._operands_of), _FAR
        )
        makers = [self._uses.maker.get(value) for value in values]
        opcodes = {None if maker is None else maker.opcode for maker in makers}
        return not opcodes.isdisjoint(PRODUCTS) or opcodes.isdisjoint((None, *_GATHERS))

    def _operands_of(self, value: int) -> Iterable[int]:
        """The values from which a value is computed. There are none for the result of
        an all-gather. A loop-carried value has one: its next value, which the loop's
        body returns.
        """
        if value in self._carried:
            loop, number = self._carried[value]
            return (loop.bodies[0].results[number],)
        maker = self._uses.maker.get(value)
        return () if maker is None or maker.opcode in _GATHERS else maker.reads

    def _is_shard(self, part: int, whole: int) -> bool:
        """Whether value `part` has as many elements as value `whole`, or the shape of a
        shard of `whole`.
        """
        sizes, limits = (self._program.buffers[value].shape for value in (part, whole))
        if not sizes or not limits or math.prod(sizes) == math.prod(limits):
            return bool(sizes and limits)
        return len(sizes) == len(limits) and all(
            size and not limit % size for size, limit in zip(sizes, limits, strict=True)
        )


def _callback_name(op: FlatOp) -> str:
    """The user's name of the callback that an operation runs; "" for other operations."""
    if op.opcode not in ("custom-call", "send"):
        return ""
    if not _CALLS_BACK.search(op.instruction.attributes):
        return ""
    primitive = op.instruction.op_name.rpartition("/")[2]
    return CALLBACKS.get(primitive, primitive) or "a callback"


def _results_of(op: FlatOp, number: int) -> tuple[int, ...]:
    """The results of an operation that correspond to its operand number `at`. There can
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
