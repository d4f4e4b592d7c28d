"""A program as the TPU's compiler keeps its arrays: in bfloat16 where nothing reads more than that.

A TPU multiplies float32 in bfloat16, unless a precision is asked for. So an array that products alone read is kept in
bfloat16, what a loop stacks for the backward pass among it. And what a loop reads in bfloat16 alone, its weights, is
converted once before the loop: a copy in bfloat16 lies beside the weights until the last loop is done.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..nested import scan_parts
from .kinds import VIEWS
from .program import Block, Op, Program


_PRODUCTS = ("dot_general", "conv_general_dilated")
_AS_ROUNDED = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)


def as_on_tpu(program: Program) -> Program:
    """The program with arrays in the dtypes in which they are kept, and conversions before loops."""
    return _Narrowing(program).program()


class _Narrowing:
    def __init__(self, program: Program):
        self.given, self.values, self.variables = program, list(program.values), dict(program.variables)
        self.readers: dict[int, list[tuple[Op, int]]] = {}
        self.leaves: dict[int, list[int | None]] = {out: [None] for out in program.block.outs if out is not None}
        self.known: dict[int, Any] = {}
        self.read(program.block)

    def read(self, block: Block) -> None:
        """Notes who reads each value, and as which value it leaves a loop; `None` where it must stay as it is."""
        for op in block.ops:
            for at, number in enumerate(op.ins):
                if number is not None:
                    self.readers.setdefault(number, []).append((op, at))
            for inner in op.blocks:
                carried = scan_parts(op.params)[1] if op.name == "scan" else len(inner.outs)
                for at, number in enumerate(inner.outs):
                    if number is not None:
                        self.leaves.setdefault(number, []).append(op.outs[at] if at >= carried else None)
                self.read(inner)

    def program(self) -> Program:
        for number in reversed(range(len(self.values))):  # readers first, so that no long chain is followed
            self.kept(number)
        stay = {*self.given.block.ins, *self.given.constants}
        block = self.block(self.given.block, stay)
        for number, dtype in self.known.items():
            if number not in stay:
                self.values[number] = self.values[number]._replace(dtype=dtype)
        return dataclasses.replace(self.given, values=self.values, block=block, variables=self.variables)

    def kept(self, number: int) -> Any:
        """The dtype in which a value is kept where it is made: the one in which all read it, if that is a smaller."""
        if number not in self.known:
            own = self.values[number].dtype
            self.known[number] = own  # what a loop hands to itself stays as it is
            found = {self.read_as(number, op, at) for op, at in self.readers.get(number, ())}
            found |= {own if out is None else self.kept(out) for out in self.leaves.get(number, ())}
            self.known[number] = _smaller(own, found)
        return self.known[number]

    def read_as(self, number: int, op: Op, at: int) -> Any:
        """The dtype in which an operation reads an operand."""
        own = self.values[number].dtype
        if op.name in _PRODUCTS and own == np.float32:
            return jnp.dtype(jnp.bfloat16) if _is_rounded(op.params.get("precision")) else own
        if op.name == "convert_element_type" or op.name in VIEWS:
            return self.kept(op.outs[0]) if op.name in VIEWS else self.values[op.outs[0]].dtype
        if op.name == "scan":
            first, carried = scan_parts(op.params)
            return own if first <= at < first + carried else self.kept(op.blocks[0].ins[at])
        return own

    def block(self, given: Block, stay: set[int]) -> Block:
        """The block with conversions before the loops that read values in a smaller dtype than they have."""
        copies: dict[int, int] = {}
        ops: list[Op] = []
        for op in given.ops:
            ins = list(op.ins)
            if op.name == "scan":
                for at, number in enumerate(op.ins):
                    if number is None:
                        continue
                    own = self.values[number].dtype if number in stay else self.known[number]
                    wanted = self.read_as(number, op, at)
                    if _smaller(own, {wanted}) == own:
                        continue
                    if number not in copies:
                        copies[number] = self.copy(number, wanted)
                        made = (copies[number],)
                        ops.append(Op("convert_element_type", {"new_dtype": wanted}, (number,), made, source=op.source))
                    ins[at] = copies[number]
            blocks = tuple(self.block(inner, set()) for inner in op.blocks)
            ops.append(dataclasses.replace(op, ins=tuple(ins), blocks=blocks))
        return Block(given.ins, given.outs, ops)

    def copy(self, number: int, dtype: Any) -> int:
        """A value like another, which lies as that one does."""
        self.values.append(self.values[number]._replace(dtype=dtype))
        if number in self.variables:
            self.variables[len(self.values) - 1] = self.variables[number]
        return len(self.values) - 1


def _smaller(own: Any, found: set[Any]) -> Any:
    """The one dtype in which a value is read, where that is smaller than its own."""
    if len(found) != 1 or own is None or not jnp.issubdtype(own, jnp.floating):
        return own
    (only,) = found
    return only if jnp.issubdtype(only, jnp.floating) and jnp.dtype(only).itemsize < own.itemsize else own


def _is_rounded(precision: Any) -> bool:
    """Whether a product of float32 is computed in bfloat16."""
    return all(one in _AS_ROUNDED for one in (precision if isinstance(precision, tuple) else (precision,)))
