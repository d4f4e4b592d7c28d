"""How far numbers that are foreseen without libtpu are from libtpu's own, measured."""

from typing import NamedTuple


class Range(NamedTuple):
    """libtpu's bytes are between `least` times the foreseen ones, less `on_chip_bytes`,
    and `most` times the foreseen ones, with a probability of 95 % for a step like the
    `steps` measured ones.
    """

    least: float
    most: float
    steps: int
    on_chip_bytes: int = 0

    def of(self, foreseen_bytes: int) -> tuple[int, int]:
        """The least and the most bytes to expect from libtpu for foreseen bytes."""
        least_bytes = max(0, int(self.least * foreseen_bytes) - self.on_chip_bytes)
        return least_bytes, int(self.most * foreseen_bytes)


# Measured by `python -m benchmarks.unseen.foreseen` on v5e:4x4, with JAX 0.10.2 and
# libtpu 0.0.42.1. Two of the steps lie below and two above.
# `tests/house/test_benchmarks.py` holds them against its results.
WIRE = Range(0.2, 1.14, steps=97)
# libtpu places temporaries in on-chip memory, too: 112 MiB at most on v5e.
TEMPORARIES = Range(0.68, 1.54, steps=97, on_chip_bytes=2**27)
