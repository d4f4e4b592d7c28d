"""How long a step takes, from what its program computes and sends."""

import dataclasses

from .. import chips
from ..cost import Traffic, seconds as seconds_of
from ..cost._work import Work
from ..topology import MeshSpec
from ._core import CostModel


# Products that a core's units make in one cycle, for the chips whose clock this tells.
_UNITS = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2}


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step: computation, and sending that computation waits for, or that can go on beside it."""

    compute: float
    exposed: float
    hidden: float
    seconds: float


def times_of(sent: Traffic, work: Work, chip: chips.Chip, mesh: MeshSpec, model: CostModel) -> Times:
    """The one model of time: for a partitioned program, and for a compiled one that does not tell its cycles.

    Computation is products at the peak, or memory traffic at its bandwidth, whichever is longer. What is sent takes
    [`shardfx.cost.seconds`][], and each call some microseconds. Gathers of parameters and sums of gradients, which the
    rows tell by their leaf, hide behind a part of the computation; what is sent of activations does not.
    """
    clock = _clock(chip)
    per_device = model.compute / chip.devices_per_chip
    compute = max(
        work.flops / (float(chip.flops("bfloat16")) * per_device),
        work.bytes / (float(chip.hbm_bytes_per_second) / chip.devices_per_chip * model.memory),
    )
    if work.cycles and clock:
        compute = work.cycles / clock
    exposed = hidden = 0.0
    for row in seconds_of(sent, chip, mesh).rows:
        calls = 1 if row.traffic.calls is None else row.traffic.calls
        taken = row.seconds / model.network + calls * model.call_seconds
        if row.traffic.leaf is None:
            exposed += taken
        else:
            hidden += taken
    return Times(compute, exposed, hidden, compute + exposed + max(0.0, hidden - model.overlap * compute))


def _clock(chip: chips.Chip) -> float:
    """Cycles per second of a TPU's core, from its peak: each of its units makes 128 x 128 products in a cycle."""
    units = _UNITS.get(chip.name)
    return float(chip.flops("bfloat16")) / (units * 2) if units else 0.0
