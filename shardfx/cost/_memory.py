"""The memory of one device while it runs a program, as a value."""

import dataclasses

from .._step import Array, Frame, Phase, phase_of


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """A temporary array that is live at the peak.

    - `buffer`, `bytes`: the array on one device, and its bytes, with tile padding.
    - `opcode`, `op_name`: the opcode of the HLO operation that makes it, and JAX's name
      stack of that operation.
    - `source`: the line of your program that makes it.
    """

    buffer: Array
    bytes: int
    opcode: str
    op_name: str
    source: Frame | None

    @property
    def phase(self) -> Phase:
        """The pass that makes the array: "forward", "backward" or "recomputed"; "" if
        JAX does not name it.
        """
        return phase_of(self.op_name)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one device: the bytes of arguments, results and temporaries.

    - `arguments`: the bytes of each parameter of the entry computation, in order; 0 for
      a parameter in host memory.
    - `results`: the bytes of each result; 0 if it is in host memory, or reuses the
      memory of a donated argument.
    - `temporary_bytes`: the bytes of temporaries at the peak.
    - `arrays`: the temporaries that are live at the peak, the largest first. Some may
      use the memory of later results.
    - `gap_bytes`: the bytes between temporaries that no live array takes.
    - `on_chip_bytes`: the bytes of on-chip memory that the program uses beside.
    - `out_of_memory`: libtpu's error if the program does not fit, or "".
    - `is_counted`: whether libtpu assigned the memory. If not, it is foreseen.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    temporary_bytes: int
    arrays: tuple[LiveArray, ...]
    gap_bytes: int = 0
    on_chip_bytes: int = 0
    out_of_memory: str = ""
    is_counted: bool = False

    @property
    def peak_bytes(self) -> int:
        """The peak: the bytes of arguments and results, and of temporaries where they
        are largest.
        """
        return sum(self.arguments) + sum(self.results) + self.temporary_bytes
