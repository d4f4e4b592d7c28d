"""What `Tape` records of the equations of a step."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.extend.core as jex

from .._ground.spec import DType
from .._step import Frame


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
