"""What `Tape` records of the equations of a step."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType
from .._step import Frame


# Primitives whose results need all bits of their dtype, and those whose results are
# whole numbers.
_ROUGH = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc
    exp exp2 expm1 fft lgamma log log1p logistic pow rsqrt sin sinh sqrt tan tanh
    """.split()
)
_WHOLE = frozenset("ceil floor round sign".split())
# The name of the records for the values with which an iteration of a loop starts.
CARRY = "carry"
# For each array, the index in `Tape.records` of the record of the equation that made
# it. It is negative if no equation made the array: an argument, a literal or a
# constant.
Numbers: TypeAlias = Sequence[int]


class Record(NamedTuple):
    """One result of an equation of a step that was evaluated. Its number is its index
    in `Tape.records`.

    - `primitive`: JAX's name for the equation's primitive, or "carry" for a value with
      which a loop iteration starts.
    - `frames`: the source lines of the user, the innermost first.
    - `reads`: the numbers of the operands.
    - `leading`: an entry for each leading dimension that the loops and `shard_map`s
      around the equation add to its result. The entry of a loop is 1, or -1 if it runs
      backwards; its dimension has the iterations. The entry of a `shard_map` has its
      mesh axes and their sizes; its dimension stacks the devices' results. For a loop
      in a `shard_map` over 4 devices of "x": `((("x", 4),), 1)`.
    - `dtype`: the dtype of the result in the step.
    - `key`: equal for equations that do the same with the same arrays.
    - `is_rough`: whether its numbers need all bits of their dtype, as those of `exp`
      do. Others may be integers, whose sums are exact.
    - `loop`: the number of the first record in the outermost loop around the equation;
      `None` outside of loops.
    - `axes`: the mesh axes of a collective; empty for other primitives.
    - `counted`: for an `iota`, the size of the dimension that it counts; else 0.
    """

    primitive: str
    frames: tuple[Frame, ...]
    reads: Numbers
    leading: tuple[tuple[tuple[str, int], ...] | int, ...]
    dtype: DType
    key: int
    is_rough: bool
    loop: int | None = None
    axes: frozenset[str] = frozenset()
    counted: int = 0

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop is around the equation."""
        return any(isinstance(entry, int) for entry in self.leading)

    @property
    def manual_axes(self) -> list[tuple[str, int]]:
        """The mesh axes of the `shard_map`s around the equation, with their sizes."""
        axes: list[tuple[str, int]] = []
        for entry in self.leading:
            if not isinstance(entry, int):
                axes += entry
        return axes


class ShardMapBody(NamedTuple):
    """A `shard_map` of a step that was evaluated.

    - `equation`: the `shard_map` itself.
    - `reads`, `results`: the numbers of its operands and results.
    - `numbers`: the numbers of the records inside of it.
    """

    equation: jex.JaxprEqn
    reads: Numbers
    results: Numbers
    numbers: range


def key_of(
    name: str,
    params: Mapping[str, object],
    reads: Numbers,
    records: Sequence[Record],
) -> int:
    """The key of an equation: equal for equations that do the same with the same
    arrays, as a forward pass and its recomputation do.

    **Arguments:**

    - `name`, `params`: the name and the parameters of the equation's primitive.
    - `reads`: the numbers of the operands in `records`.
    """
    plain_params = {}
    for param_name, param in params.items():
        if _is_plain(param):
            plain_params[param_name] = param
    operand_keys = []
    for number in reads:
        operand_keys.append(records[number].key if number >= 0 else number)
    return zlib.crc32(repr((name, plain_params, operand_keys)).encode())


def _is_plain(param: object) -> bool:
    """Whether a parameter of an equation is a number, a text, or a tuple of these."""
    if isinstance(param, tuple):
        return all(map(_is_plain, param))
    return param is None or isinstance(param, int | str)


def is_rough(
    name: str,
    dtype: DType,
    reads: Numbers,
    records: Sequence[Record],
) -> bool:
    """Whether the result of an equation needs all bits of its `dtype`. The arguments
    are those of `key_of`.
    """
    if not jnp.issubdtype(dtype, np.inexact) or name in _WHOLE:
        return False
    if name in _ROUGH:
        return True
    return any(number >= 0 and records[number].is_rough for number in reads)
