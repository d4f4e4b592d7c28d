"""The largest arrays in the memory of a step."""

import dataclasses
import itertools
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from .._ground.spec import canonical_entry
from .._ground.text import (
    between_numbers,
    joined,
)
from .._step import MOVING, Frame
from ._array_rows import Origin
from ._counted import StepOnChip
from ._memory import LiveArray
from ._purpose import ArgumentPurpose


@dataclasses.dataclass(frozen=True)
class LargeArray:
    """A large array in memory at the peak, or several arrays of equal size whose paths
    differ only in numbers.

    **Arguments:**

    - `what`: the path of an argument; for a temporary, its dtype and its shape on one
      device.
    - `bytes`: the bytes on one device.
    - `group`: the name of its group, such as "activations". [`shardfx.cost.FitRow`][]
      lists the names.
    - `source`: the line of your program that computes the array; `None` for an
      argument.
    - `phase`: the pass that computes the array: "forward", "backward" or "recomputed";
      "" if it is not known.
    - `spec`, `origins`, `why`: the spec of the array, the origin of each of its mesh
      axes, and a sentence that says why it is not sharded further. Only
      `Fit.peak_arrays` has them.
    """

    __module__ = "shardfx.cost"

    what: str
    bytes: int
    group: str
    source: Frame | None = None
    phase: str = ""
    spec: PartitionSpec | None = None
    origins: tuple[Origin, ...] = ()
    why: str = ""


# The group of arrays whose numbers are part of the program.
CONSTANTS = "constants and scalars"
# Operations whose results are copies of an array, in another layout or dtype.
_COPIES = MOVING | {"convert"}


def gradient_shapes(chip_step: StepOnChip) -> set[tuple[int, ...]]:
    """The shapes that a gradient can have: those of all parameters and of their shards.
    Their dimensions are sorted, since a gradient can be transposed.
    """
    shapes: set[tuple[int, ...]] = set()
    for number in chip_step.in_group("parameters"):
        shapes |= {
            tuple(sorted(chip_step.purposes[number].argument.shape)),
            tuple(sorted(chip_step.shards[number])),
        }
    return shapes


def peak_arrays(chip_step: StepOnChip) -> tuple[LargeArray, ...]:
    """The arrays in memory at the peak, the largest first, each with its sharding. An
    array that is not sharded further has the reason, `why`.
    """
    memory = chip_step.memory
    arrays = [
        _argument(purpose, nbytes)
        for purpose, nbytes in zip(chip_step.purposes, memory.arguments, strict=True)
    ]
    shapes = gradient_shapes(chip_step)
    for live_array in memory.arrays:
        array = large_array(live_array, shapes)
        row, why = chip_step.shardings.of_held(live_array)
        if row is not None:
            array = dataclasses.replace(array, spec=row.spec, origins=row.origins)
        arrays.append(dataclasses.replace(array, why=why))
    return tuple(sorted(arrays, key=lambda array: -array.bytes))


def _argument(purpose: ArgumentPurpose, nbytes: int) -> LargeArray:
    """An argument of the step, which is the origin of its own mesh axes. An argument
    whose sharding the compiler chooses has none here. `nbytes` are those of its shard
    on one device.
    """
    argument = purpose.argument
    name = argument.path or argument.name
    dims = argument.dims or ()
    return LargeArray(
        what=name,
        bytes=nbytes,
        group=purpose.group,
        spec=PartitionSpec(*map(canonical_entry, dims)),
        origins=tuple(Origin(axis, name, ()) for axis in itertools.chain(*dims)),
    )


def large_array(array: LiveArray, sorted_shapes: set[tuple[int, ...]]) -> LargeArray:
    """A temporary array. It is a gradient if the backward pass computes it, and its
    sizes in ascending order are one of `sorted_shapes`: those of parameters and of
    their shards.
    """
    group = "activations"
    if array.opcode in _COPIES:
        group = "copies in other layouts"
    is_matrix = len(array.buffer.shape) > 1
    if array.phase == "backward" and is_matrix:
        if tuple(sorted(array.buffer.shape)) in sorted_shapes:
            group = "gradients"
    if array.opcode == "constant":
        group = CONSTANTS
    return LargeArray(
        what=str(array.buffer),
        bytes=array.bytes,
        group=group,
        source=array.source,
        phase=array.phase,
    )


def merged_arrays(arrays: Sequence[LargeArray]) -> list[LargeArray]:
    """The arrays, the largest first, with one entry for arrays of equal size whose
    paths differ only in numbers.
    """
    alike: dict[tuple[object, ...], list[LargeArray]] = {}
    for array in arrays:
        kind = (between_numbers(array.what), array.bytes, array.group)
        alike.setdefault(kind, []).append(array)
    merged = []
    for members in alike.values():
        entry = LargeArray(
            what=joined([array.what for array in members]),
            bytes=sum(array.bytes for array in members),
            group=members[0].group,
        )
        merged.append(entry)
    return sorted(merged, key=lambda array: -array.bytes)
