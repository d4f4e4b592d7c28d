"""The types that HLO writes: arrays with their element types, dimensions and bytes, and tuples; kinds of operations."""

import functools as ft
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from .._ground.errors import ProgramError
from ._hlo_text import Instruction


_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_BITS = re.compile(r"^(?:[suf](\d+)\w*|bf(16)|c(64|128))$")
# A size with a bound counts as its bound.
_SIZES = re.compile(r"^(?:<=)?\d+(?:,(?:<=)?\d+)*$|^$")
_INDEX = re.compile(r"\bindex=(\d+)")
_NO_MEMORY = ("token", "opaque")
_LAYOUT = re.compile(r"\{[^}]*\}")
_TUPLE = re.compile(r"\(|\)|[a-z]\w*\[[^\]]*\]|token")


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


# What an instruction makes: a buffer, or a tuple of such.
Result: TypeAlias = "Array | tuple[Result, ...]"


def result_of(text: str) -> Result:
    """The buffers that an instruction makes, from the type that HLO writes: a tuple nests as the type does."""
    if not text.startswith("(") and (alone := arrays_in(text)):
        return alone[0]
    open_: list[list[Result]] = [[]]
    for part in _TUPLE.findall(_LAYOUT.sub("", text)):
        if part == "(":
            open_.append([])
        elif part == ")":
            closed = tuple(open_.pop())
            open_[-1].append(closed)
        else:
            open_[-1].append(next(iter(arrays_in(part)), Array("token", ())))
    if len(open_[0]) != 1:
        raise ProgramError(f"the type `{text:.200}` of an HLO instruction cannot be read.")
    return open_[0][0]


@ft.lru_cache(maxsize=65536)
def bytes_of(buffer: Array, tile: tuple[int, int] | None) -> int:
    """Bytes of an array in a memory of tiles; sub-byte types are packed."""
    return -(-math.prod(padded(buffer.shape, tile)) * buffer.bits // 8)


def padded(shape: tuple[int, ...], tile: tuple[int, int] | None) -> tuple[int, ...]:
    """A shape as it lies in memory that is cut into tiles: the two dimensions that pad least are the last ones.

    A dimension shorter than the tile's rows is padded to a power of two alone, as the compiler for TPUs does.
    """
    if tile is None or not shape or 0 in shape:
        return shape
    rows, columns = tile
    if len(shape) == 1:
        return (_up(shape[0], columns),)
    return min(
        (
            _tiled(shape, last, second, rows, columns)
            for last in range(len(shape))
            for second in range(len(shape))
            if last != second
        ),
        key=math.prod,
    )


def _tiled(shape: tuple[int, ...], last: int, second: int, rows: int, columns: int) -> tuple[int, ...]:
    sizes = list(shape)
    sizes[last] = _up(sizes[last], columns)
    sizes[second] = _up(sizes[second], min(rows, 1 << max(0, sizes[second] - 1).bit_length()))
    return tuple(sizes)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# These read each element once and write each once.
ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast-convert cbrt ceil clamp compare complex convert cosine count-leading-zeros divide erf "
    "exponential exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum multiply "
    "negate not or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh "
    "xor".split()
)
# These only say the same elements in another order, or more often, or none at all.
VIEWS = frozenset(["broadcast", "transpose", "reverse", "reshape", "copy", "pad"])
# Constants are made where they are read.
CONSTANTS = frozenset(["constant", "iota", "partition-id", "replica-id"])
# Pieces of an array: a fusion reads them in place.
PIECES = frozenset(["slice", "dynamic-slice"])
PRODUCTS = frozenset(["dot", "convolution", "ragged-dot"])
# The result may take over the memory of an operand that dies.
IN_PLACE = ELEMENTWISE | {"dynamic-update-slice", "scatter", "all-reduce", "sort"}
