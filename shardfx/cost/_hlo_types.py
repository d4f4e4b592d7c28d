"""The types that HLO writes: arrays with their element types, dimensions and bytes, and parts of tuples."""

import functools as ft
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from .._ground.errors import ProgramError
from ._hlo_text import Instruction


_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_BITS = re.compile(r"^(?:[suf](\d+)\w*|bf(16)|c(64|128))$")
# A size with a bound counts as its bound.
_SIZES = re.compile(r"^(?:<=)?\d+(?:,(?:<=)?\d+)*$|^$")
_INDEX = re.compile(r"\bindex=(\d+)")
_NO_MEMORY = ("token", "opaque")


class Array(NamedTuple):
    """The element type of an array on one device, as HLO writes it, and its dimensions."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bits(self) -> int:
        """Of one element.

        **Raises:**

        `ProgramError` for an element type whose size is not known.
        """
        if self.dtype in _NO_MEMORY:
            return 0
        found = _BITS.match("s8" if self.dtype == "pred" else self.dtype)
        if found is None:
            raise ProgramError(f"the size of `{self}` is not known")
        return int(next(filter(None, found.groups())))

    @property
    def bytes(self) -> Fraction:
        """Of all elements, without padding."""
        return Fraction(self.bits * math.prod(self.shape), 8)


@ft.lru_cache(maxsize=65536)
def arrays_in(result: str) -> tuple[Array, ...]:
    """The arrays in a type, those of a tuple in order.

    **Raises:**

    `ProgramError` for dimensions that cannot be read.
    """
    found = _ARRAY.findall(result)
    for dtype, sizes in found:
        if not _SIZES.match(sizes):
            raise ProgramError(f"the size of `{dtype}[{sizes}]` is not known")
    return tuple(Array(dtype, tuple(map(int, re.findall(r"\d+", sizes)))) for dtype, sizes in found)


def array_of(instruction: Instruction) -> Array:
    """The array that an instruction makes; of a tuple the first one."""
    return next(iter(arrays_in(instruction.result)), Array("", ()))


def index_of(instruction: Instruction) -> int | None:
    """Which element of a tuple a `get-tuple-element` takes; `None` of other instructions."""
    found = _INDEX.search(instruction.structure) if instruction.opcode == "get-tuple-element" else None
    return int(found[1]) if found else None


def root_of(computation: Mapping[str, Instruction]) -> Instruction:
    """The instruction whose result a computation returns."""
    return next(instruction for instruction in computation.values() if instruction.is_root)
