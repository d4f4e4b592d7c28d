"""The float32 values that the TPU's compiler stores as bfloat16, since no operation
reads them at a higher precision.

A TPU multiplies float32 in bfloat16 unless a precision is requested. So the compiler
stores an array that only products read as bfloat16. Examples are gathered arrays, and
arrays that a loop stacks for the backward pass. If a loop reads an array only in
bfloat16, such as its weights, the compiler converts the array once before the loop, and
keeps both until the last such loop ends. These rules were read off programs that libtpu
0.0.42 compiles for v5e.
"""

import math
import re
from collections.abc import Iterator

from ..._step import MOVING, PIECES, VIEWS
from .program import Body, FlatOp, FlatProgram, Uses


_PRECISE = re.compile(r"operand_precision=\{[^}]*hig|algorithm=dot_(?!bf16_bf16_f32\b)")
_BATCHED = re.compile(r"lhs_batch_dims=\{([\d,]+)\}")
# The results of these operations need no higher precision than their operands.
_MOVES = frozenset(
    "concatenate optimization-barrier maximum minimum clamp sort gather select".split()
)
_MOVES |= MOVING | VIEWS | PIECES


def narrowed(program: FlatProgram) -> FlatProgram:
    """Changes the program in place, and returns it. Each value gets the dtype in which
    the TPU's compiler stores it, and each loop that reads an array only as bfloat16
    gets a conversion before it.
    """
    _Narrowing(program).run()
    return program


def narrow_values(program: FlatProgram) -> set[int]:
    """The numbers of the float32 values that only matrix products at the default
    precision read, as XLA's BFloat16Propagation finds them:
    `xla/service/bfloat16_propagation.cc`, in the libtpu that jaxlib 0.10.2 pins.
    """
    return _Narrowing(program).values()


class _Narrowing:
    """Finds the values that are stored as bfloat16. A value is the number of an array.

    The operations that read a value decide whether it is stored as bfloat16. If one of
    them only moves elements, such as a transpose, the search goes on to the operations
    that read its result. A value is undecided until its search ends. In a loop, the
    search can come back to an undecided value.
    """

    def __init__(self, program: FlatProgram):
        self.program, self.uses = program, Uses(program)
        self.known: dict[int, bool | None] = {}
        self.loops = {}  # the loop that carries a value, and its index among the carried values
        for op in self.uses.ops:
            for body in op.bodies if op.opcode == "while" else ():
                for at, value in enumerate(body.carried):
                    self.loops[value] = (op, at)
        self.leaves: dict[
            int, list[int]
        ] = {}  # the carried values that are the results of a body
        for op in self.uses.ops:
            for body in op.bodies:
                kept = body.carried or op.makes
                for at, value in enumerate(body.results):
                    self.leaves.setdefault(value, []).append(kept[at])

    def values(self) -> set[int]:
        return {
            value
            for value in reversed(range(len(self.program.buffers)))
            if self.is_narrow(value)
        }

    def run(self) -> None:
        found, buffers = self.values(), self.program.buffers
        self.convert_before_loops(self.program.entry)
        for value in found:
            buffers[value] = buffers[value]._replace(dtype="bf16")

    def is_narrow(self, value: int) -> bool | None:
        """Whether a value is stored as bfloat16; `None` if it is undecided."""
        if value not in self.known:
            self.known[value] = None
            self.known[value] = self._is_narrow(value)
        return self.known[value]

    def _is_narrow(self, value: int) -> bool:
        entry = self.program.entry
        if (
            self.program.buffers[value].dtype != "f32"
            or value in entry.carried
            or value in entry.results
        ):
            return False
        reads = [
            self.reads_narrow(op, at) for op, at, _ in self.uses.users.get(value, ())
        ]
        reads += [self.is_narrow(kept) for kept in self.leaves.get(value, ())]
        if value in self.loops:
            op, at = self.loops[value]
            reads.append(
                self.is_narrow(op.makes[at])
                if op.makes[at] in self.uses.users
                else None
            )
        return False not in reads and True in reads

    def reads_narrow(self, op: FlatOp, at: int) -> bool | None:
        """Whether an operation reads operand number `at` as bfloat16; `None` if that
        depends on an undecided value.
        """
        if op.opcode in ("dot", "convolution"):
            return not _PRECISE.search(
                op.instruction.attributes
            ) and not self.is_by_vector(op)
        if op.opcode == "convert":
            return self.program.buffers[op.makes[0]].dtype == "bf16"
        if op.opcode in _MOVES or (op.opcode == "dynamic-update-slice" and at < 2):
            return self.is_narrow(op.makes[min(at, len(op.makes) - 1)])
        if op.opcode == "while":
            return self.is_narrow(op.bodies[0].carried[at])
        return False

    def is_by_vector(self, product: FlatOp) -> bool:
        """Whether one operand of a matrix product is a vector: it has only contracted
        and batch dimensions. The TPU computes such products in float32.
        """
        # A product that is fused with the operations of its operands reads more than
        # two arrays.
        if product.opcode != "dot" or len(product.reads) != 2:
            return False
        # An operand can be a reshape of the value that is read: its shape can differ,
        # but not its size.
        left, right, made = (
            self.program.buffers[value].shape
            for value in (*product.reads, *product.makes)
        )
        found = _BATCHED.search(product.instruction.attributes)
        batch = math.prod(made[: found[1].count(",") + 1]) if found else 1
        sizes = math.prod(left), math.prod(right)
        added = math.isqrt(math.prod(sizes) // max(1, math.prod(made) * batch))
        return batch * added in sizes

    def convert_before_loops(self, body: Body) -> None:
        """Adds a conversion to bfloat16 before each loop that reads a value of `body`
        only as bfloat16.
        """
        copies: dict[int, int] = {}
        ops: list[FlatOp] = []
        for op in body.ops:
            reads: dict[int, list[tuple[FlatOp, int]]] = {}
            for one in _inside(op) if op.opcode == "while" else ():
                for at, value in enumerate(one.reads):
                    if (
                        self.uses.home[value] is body
                        and self.program.buffers[value].dtype == "f32"
                    ):
                        reads.setdefault(value, []).append((one, at))
            for value, readers in reads.items():
                if self.known.get(value) or not self.program.buffers[value].shape:
                    continue
                if all(self.reads_narrow(one, at) for one, at in readers):
                    if value not in copies:
                        self.program.buffers.append(
                            self.program.buffers[value]._replace(dtype="bf16")
                        )
                        copies[value] = len(self.program.buffers) - 1
                        convert = op.instruction._replace(opcode="convert", operands=())
                        ops.append(FlatOp(convert, (value,), (copies[value],)))
                    for one, at in readers:
                        if one.opcode != "while":
                            one.reads = (
                                *one.reads[:at],
                                copies[value],
                                *one.reads[at + 1 :],
                            )
            ops.append(op)
        body.ops[:] = ops


def _inside(op: FlatOp) -> Iterator[FlatOp]:
    """Yields the operations in the bodies of a loop or conditional, and in nested
    bodies.
    """
    for body in op.bodies:
        for inner in body.ops:
            yield from (inner, *_inside(inner))
