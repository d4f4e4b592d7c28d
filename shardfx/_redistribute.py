"""From one layout to another in bounded memory and with little traffic: the pure planner, no devices."""

import dataclasses
from typing import Literal

from ._layout import Layout


StepKind = Literal["slice", "all_to_all", "permute", "all_gather"]


@dataclasses.dataclass(frozen=True)
class Move:
    """A factor of the refined mesh that stops cutting one dimension or starts cutting another.

    **Arguments:**

    - `factor`: index into the sizes of the step's layouts.
    - `source`: the dimension it cut before, `None` if the pieces were copies of each other along it.
    - `target`: the dimension it cuts afterwards, `None` if the pieces become copies along it.
    """

    factor: int
    source: int | None
    target: int | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective (or local slice), over factors of the mesh axes.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after, on meshes whose axes are factors of the given mesh
        axes; the two differ in their mesh only where a permute leads from one factorisation to another.
    - `moves`: which factors change place; empty for a permute, which may send any piece anywhere.
    - `wire_bytes`: bytes that enter a device, the mean over devices, rounded up.
    - `peak_bytes`: bytes of the pieces that a device holds during the step.
    """

    kind: StepKind
    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    wire_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """How one array gets from one layout to another.

    **Arguments:**

    - `steps`: in order; empty if every device already holds what it should.
    - `wire_bytes`: bytes that enter a device over all steps, the mean over devices, rounded up.
    - `peak_bytes`: the most bytes a device holds at one time.
    - `lower_bound_bytes`: bytes that must enter a device, in the mean, whatever the algorithm: what it needs
        less what it has.
    """

    steps: tuple[Step, ...]
    wire_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


def redistribute(shape: tuple[int, ...], itemsize_bits: int, src: Layout, dst: Layout) -> Redistribution:
    """Plans the move of one array: the least traffic whose memory stays bounded.

    No step holds more than the larger of the two ends' pieces, twice (what it reads and what it writes).

    **Arguments:**

    - `shape`: of the whole array; every dimension must divide into the pieces of both layouts.
    - `itemsize_bits`: bits per element, as by `shardfx._spec.bits`.
    - `src`, `dst`: layouts over the same devices, made by [`shardfx.layout`][].

    **Returns:**

    The [`shardfx.Redistribution`][], from a bounded cache where the same move was planned before.

    **Raises:**

    `MeshError` if the two layouts are not over the same devices; `SpecError` if a layout does not fit the shape.
    """
    raise AssertionError("the planner follows")
