"""Which values of a program are arrays in memory, and which a fusion computes where they are read."""

import math
from collections.abc import Iterator

from .buffers import CONSTANTS, ELEMENTWISE, PIECES, PRODUCTS, VIEWS
from .program import Body, LiveOp, OpenedProgram, Uses


class Arrays:
    """What XLA keeps in memory of a program, fusions taken into account.

    On TPUs products are fusions, too. On GPUs and CPUs libraries compute them, which read arrays.
    """

    def __init__(self, program: OpenedProgram, *, tpu: bool):
        self.program, self.uses, self.tpu = program, Uses(program), tpu
        self.maker, self.home = self.uses.maker, self.uses.home
        self.known: dict[int, bool] = {}
        self.sources: dict[int, frozenset[int]] = {}

    def is_array(self, value: int) -> bool:
        """Whether a value lies in memory; parameters and what loops carry do."""
        if value not in self.known:
            self.known[value] = self._is_array(value)
        return self.known[value]

    def _is_array(self, value: int) -> bool:
        op = self.maker.get(value)
        if op is None or value in self.uses.results:
            return True
        if op.opcode in CONSTANTS or (op.opcode == "broadcast" and not self.program.buffers[op.reads[0]].shape):
            return any(self.needs_memory(user, at) for user, at, _ in self.uses.users.get(value, ()))
        if not self.program.buffers[value].shape:
            return True  # a number is computed once, before the many that it is read for
        if self.is_one_hot(op):
            return any(not self.fuses(user, at) for user, at, _ in self.readers(value))
        if op.opcode in VIEWS or op.opcode in PIECES or op.opcode in ELEMENTWISE:
            home = self.home[value]
            return any(
                body is not home
                or self.needs_memory(user, at)
                or (op.opcode in ELEMENTWISE and not self.fuses(user, at))
                for user, at, body in self.readers(value)
            )
        return True

    def is_one_hot(self, op: LiveOp) -> bool:
        """Whether a scatter writes one element of each row of a constant: XLA makes it a comparison with an iota."""
        if op.opcode != "scatter":
            return False
        operand, *_, updates = (self.program.buffers[value].shape for value in op.reads)
        into = self.maker.get(op.reads[0])
        is_constant = into is not None and into.opcode == "broadcast"
        return is_constant and math.prod(updates) * max(operand, default=1) <= math.prod(operand)

    def readers(self, value: int) -> Iterator[tuple[LiveOp, int, Body]]:
        """Who reads a value, also through views of it that are no arrays."""
        for user, at, body in self.uses.users.get(value, ()):
            if user.opcode in VIEWS and not self.is_array(user.makes[0]):
                yield from self.readers(user.makes[0])
            else:
                yield user, at, body

    def read_for(self, value: int) -> frozenset[int]:
        """The arrays that are read to compute a value: itself, if it is one."""
        if self.is_array(value):
            return frozenset([value])
        if value not in self.sources:
            self.sources[value] = frozenset().union(*map(self.read_for, self.maker[value].reads))
        return self.sources[value]

    def reads(self, op: LiveOp) -> set[int]:
        """The arrays that an operation reads, its bodies included."""
        found = {source for value in op.reads for source in self.read_for(value)}
        for body in op.bodies:
            for value in body.results:
                found |= self.read_for(value)
            for inner in body.ops:
                if inner.bodies or any(map(self.is_array, inner.makes)):
                    found |= self.reads(inner)
        return found

    def fuses(self, op: LiveOp, at: int) -> bool:
        """Whether an operation computes an operand while it reads it."""
        if op.opcode == "dynamic-update-slice":
            return at > 0
        return (
            op.opcode in ELEMENTWISE
            or op.opcode in VIEWS
            or op.opcode in PIECES
            or op.opcode == "reduce"
            or (self.tpu and op.opcode in PRODUCTS)
            or self.is_one_hot(op)
        )

    def needs_memory(self, op: LiveOp, at: int) -> bool:
        """Whether an operand lies in memory even where it is a view, a piece or a constant."""
        if op.opcode == "dynamic-update-slice":
            return at == 0
        if op.opcode == "scatter":
            return not self.is_one_hot(op)
        return op.opcode in ("while", "conditional", "sort", "custom-call") or op.opcode.startswith(
            ("all-", "reduce-scatter", "collective-", "ragged-all")
        )
