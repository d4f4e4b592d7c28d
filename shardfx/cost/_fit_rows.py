"""The rows of a step's memory: the bytes of each group of its arrays on one device."""

import dataclasses
from collections.abc import Sequence

from .. import chips
from .._ground.text import bytes_text
from ._compile_for import MemoryAnalysis
from ._counted import StepOnChip
from ._large_arrays import CONSTANTS, LargeArray, merged_arrays
from ._memory import Memory


@dataclasses.dataclass(frozen=True)
class FitRow:
    """The bytes of one group of arrays on one device.

    **Arguments:**

    - `group`: the name of the group: "parameters", "gradients", "optimizer: mu" (one
      group for each moment), "batch", "KV cache", "other", "results" (without the
      donated arguments' memory), "activations", "copies in other layouts",
      "constants and scalars" (arrays that the step closes over, whole on each device,
      are among them) or "temporaries". For a plan without a step, the first name of the
      arrays' paths: "params".
    - `bytes`: the bytes in the chip's memory, including the padding of tiles.
    - `host_bytes`: the bytes in host memory, if the plan's memory kinds say so.
    - `exact`: whether the bytes follow from shardings or from the compiler's count. If
      not, they are foreseen.
    """

    __module__ = "shardfx.cost"

    group: str
    bytes: int
    host_bytes: int = 0
    exact: bool = False


class GroupBytes:
    """The bytes of the arrays of each group, on the device and in host memory."""

    def __init__(self):
        self.on_device: dict[str, int] = {}
        self.on_host: dict[str, int] = {}

    def add(self, group: str, nbytes: int, *, on_host: bool) -> None:
        """Adds the bytes of an array in one of the memories. The group is then known in
        both. `on_host` says in which: host memory or device memory.
        """
        sums = self.on_host if on_host else self.on_device
        others = self.on_device if on_host else self.on_host
        sums[group] = sums.get(group, 0) + nbytes
        others.setdefault(group, 0)

    @property
    def rows(self) -> list[FitRow]:
        """A row for each group, with its exact bytes in both memories."""
        rows = []
        for group, nbytes in self.on_device.items():
            row = FitRow(
                group=group,
                bytes=nbytes,
                host_bytes=self.on_host[group],
                exact=True,
            )
            rows.append(row)
        return rows


def argument_rows(chip_step: StepOnChip) -> tuple[list[FitRow], list[LargeArray]]:
    """A row for each group of arguments, and a `LargeArray` for each argument in device
    memory, the largest first.
    """
    sums = GroupBytes()
    largest: list[LargeArray] = []
    sizes = zip(chip_step.purposes, chip_step.memory.arguments, strict=True)
    for number, (purpose, nbytes) in enumerate(sizes):
        if purpose.argument.on_host:
            sums.add(purpose.group, chip_step.host_bytes(number), on_host=True)
        else:
            sums.add(purpose.group, nbytes, on_host=False)
            largest.append(
                LargeArray(
                    what=purpose.argument.path, bytes=nbytes, group=purpose.group
                )
            )
    return sums.rows, merged_arrays(largest)


def tiles_notes(
    plain_bytes: int,
    rows: Sequence[FitRow],
    chip: chips.Chip,
) -> tuple[str, ...]:
    """A note if the parameters take more memory in the chip's tiles than a plan reports,
    `plain_bytes`.
    """
    tiled_bytes = sum(row.bytes for row in rows if row.group == "parameters")
    if chip.tile is None or bytes_text(plain_bytes) == bytes_text(tiled_bytes):
        return ()
    tile = " x ".join(map(str, chip.tile))
    return (
        f"the parameters are {bytes_text(plain_bytes)}, as their plan says, and take"
        f" {bytes_text(tiled_bytes)} in the chip's tiles of {tile}.",
    )


def temporary_rows(arrays: Sequence[LargeArray], memory: Memory) -> list[FitRow]:
    """A row for each group of the temporary arrays. Temporaries can reuse the memory of
    the results: the bytes that they reuse are subtracted from the largest groups.
    Constants reuse none. `memory` has the peak bytes of all temporaries, and the bytes
    of gaps between them.
    """
    sums: dict[str, int] = {}
    for array in arrays:
        sums[array.group] = sums.get(array.group, 0) + array.bytes
    if memory.gap_bytes:
        sums["gaps between arrays"] = memory.gap_bytes
    reused_bytes = sum(sums.values()) - memory.temporary_bytes
    largest_first = sorted(sums, key=lambda group: -sums[group])
    for group in largest_first:
        if group == CONSTANTS:
            continue
        shared_bytes = min(max(reused_bytes, 0), sums[group])
        sums[group] -= shared_bytes
        reused_bytes -= shared_bytes
    # libtpu names no arrays for what is left.
    if reused_bytes < 0:
        sums[CONSTANTS] = sums.get(CONSTANTS, 0) - reused_bytes
    rows = []
    for group, nbytes in sums.items():
        rows.append(FitRow(group, nbytes, exact=memory.is_counted))
    return rows


def compiled_rows(
    rows: Sequence[FitRow],
    memory: MemoryAnalysis,
) -> tuple[tuple[FitRow, ...], tuple[str, ...]]:
    """The rows and the notes of a compiled step. `rows` are those of the groups of its
    arguments; empty if they are not known. The compiler counts all arguments together:
    where that is not the sum of the groups, a row has the difference.
    """
    fit_rows = list(rows)
    notes = []
    other_bytes = memory.argument_size_in_bytes - sum(row.bytes for row in rows)
    if not rows:
        fit_rows.append(FitRow("arguments", other_bytes, exact=True))
    elif other_bytes > 0:
        fit_rows.append(FitRow("arguments, the rest", other_bytes, exact=True))
    elif other_bytes < 0:
        # The compiler drops arguments that the step does not read.
        notes.append(
            f"the program takes {bytes_text(-other_bytes)} less than its arguments: it"
            " does not read all of them."
        )
        fit_rows.append(FitRow("arguments, not read", other_bytes, exact=True))
    result_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    fit_rows.append(FitRow("results", result_bytes, exact=True))
    temporary_bytes = memory.needed_bytes - sum(row.bytes for row in fit_rows)
    fit_rows.append(FitRow("temporaries", temporary_bytes, exact=True))
    return largest_rows_first(fit_rows), tuple(notes)


def largest_rows_first(rows: Sequence[FitRow]) -> tuple[FitRow, ...]:
    """The rows that have bytes, the largest first."""
    filled = [row for row in rows if row.bytes or row.host_bytes]
    return tuple(sorted(filled, key=lambda row: -row.bytes))
