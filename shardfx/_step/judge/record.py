"""What the judge finds on its way through a program."""

from typing import NamedTuple

from ..hlo_text import HloModule, Instruction
from .held import Faulty, Unknown
from .origins import origin_of
from .verdict import Refutation, Wrong


# An operation, by the names of its computation and of its instruction.
OperationName = tuple[str, str]


class Cause(NamedTuple):
    """An operation that no rule follows, and why."""

    instruction: Instruction
    reason: str


class Failures(NamedTuple):
    """How many operations are not judged or wrong."""

    causes: int
    faults: int


class Record:
    """The operations of a program that the judge has met.

    - `faults`, `causes`: what is wrong and what is not judged, by number.
    - `states`: for each operation, the number of the cause for which it is not judged,
      or `None`.
    """

    def __init__(self, module: HloModule):
        self.module = module
        self.faults: list[Refutation] = []
        self.causes: list[Cause] = []
        self.states: dict[OperationName, int | None] = {}
        # The indices in `faults` and in `causes`, by operation.
        self._fault_numbers: dict[OperationName, int] = {}
        self._cause_numbers: dict[OperationName, int] = {}

    def judged(self, name: OperationName) -> None:
        """Notes that an operation is judged."""
        self.states[name] = None

    def fault(
        self,
        name: OperationName,
        instruction: Instruction,
        error: Wrong,
    ) -> Faulty:
        """Notes what is wrong with an operation, if it is its first fault, and returns
        the result that stands for it.
        """
        if name not in self._fault_numbers:
            self._fault_numbers[name] = len(self.faults)
            origin = origin_of(self.module.frames(instruction))
            refutation = Refutation(
                operation=f"%{instruction.name} ({instruction.opcode})",
                source=origin.source,
                caller=origin.caller,
                first_traced=origin.first_traced,
                fault=error.fault,
                right=error.right,
                mend=error.mend,
            )
            self.faults.append(refutation)
        return Faulty(self._fault_numbers[name])

    def unknown(
        self,
        name: OperationName,
        instruction: Instruction,
        reason: str,
    ) -> Unknown:
        """Notes that no rule follows an operation, and why, if it is its first cause.
        Returns the result that stands for it.
        """
        if name not in self._cause_numbers:
            self._cause_numbers[name] = len(self.causes)
            self.causes.append(Cause(instruction, reason))
        number = self._cause_numbers[name]
        self.states[name] = number
        return Unknown(number)

    def failures_since(self, before: "Record") -> Failures:
        """How many operations were noted as wrong or not judged after `before` was
        copied.
        """
        causes = len(self.causes) - len(before.causes)
        faults = len(self.faults) - len(before.faults)
        return Failures(causes, faults)

    def copy(self) -> "Record":
        """What is noted now, for `restore`."""
        copied = Record(self.module)
        copied.restore(self)
        return copied

    def restore(self, before: "Record") -> None:
        """Forgets what was noted after `before` was copied."""
        self.faults = list(before.faults)
        self.causes = list(before.causes)
        self.states = dict(before.states)
        self._fault_numbers = dict(before._fault_numbers)
        self._cause_numbers = dict(before._cause_numbers)
