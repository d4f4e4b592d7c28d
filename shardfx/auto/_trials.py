"""The candidates of a search for which XLA has partitioned the step."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

from .._ground.errors import ProgramError
from ._candidate import Candidate, rank
from ._programs import LoweredStep, Tell, zero_1


_THREADS = 2
# A candidate whose estimated time is this many times that of the fastest program's
# candidate is not close. In eight steps, the best of all programs was estimated at most
# 1.07 times the shortest time. Errors of the estimate that candidates share cancel.
_CLOSE_ESTIMATE = 1.1


@dataclasses.dataclass
class Trials:
    """The candidates for which XLA has partitioned the step.

    **Arguments:**

    - `lowered`: the step, lowered for XLA to partition.
    - `states`: the numbers of the arguments that hold an optimizer's state.
    - `tell`: a function that receives a line of text for each candidate.
    - `partitioned`: for each candidate as it is estimated, the candidate with the
      numbers of its program.
    - `refused`: for each candidate that XLA cannot partition, XLA's error.
    """

    lowered: LoweredStep
    states: tuple[int, ...]
    tell: Tell
    partitioned: dict[Candidate, Candidate] = dataclasses.field(default_factory=dict)
    refused: dict[Candidate, ProgramError] = dataclasses.field(default_factory=dict)

    def has_room(self, candidate: Candidate) -> bool:
        """Whether the shards of the arguments fit in a device's memory, under ZeRO-1 if
        that needs less. If not, XLA need not partition the step.
        """
        smaller = zero_1(candidate, self.states) or candidate
        argument_bytes = sum(plan.bytes_per_device for plan in smaller.plans)
        return argument_bytes <= candidate.limit_bytes

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Lets XLA partition the step for each of the candidates."""
        # XLA partitions one program while another one is parsed.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            results = pool.map(self._partition, candidates)
            for candidate, result in zip(candidates, results, strict=True):
                self._keep(candidate, result)

    def add_close(self, candidates: Sequence[Candidate], least: int) -> None:
        """Lets XLA partition the step for those of the candidates that may be faster
        than all before, the first ones by the estimate first. At least `least`
        candidates are tried in all.
        """
        ordered = sorted(candidates, key=lambda candidate: candidate.seconds)
        for start in range(0, len(ordered), _THREADS):
            pair = ordered[start : start + _THREADS]
            count = len(self.partitioned) + len(self.refused)
            if count >= least:
                pair = list(filter(self.is_close, pair))
            self.add(pair)

    def is_close(self, candidate: Candidate) -> bool:
        """Whether the estimate of a candidate is close to that of the fastest program's
        candidate, or none fits. The keys of `partitioned` are candidates by the
        estimate, and its values have the numbers of their programs.
        """
        fitting = [
            estimated
            for estimated, partitioned in self.partitioned.items()
            if partitioned.fits
        ]
        if not fitting:
            return True
        fastest = min(
            fitting, key=lambda estimated: self.partitioned[estimated].seconds
        )
        return candidate.seconds <= _CLOSE_ESTIMATE * fastest.seconds

    def _keep(self, candidate: Candidate, result: Candidate | ProgramError) -> None:
        """Keeps the numbers of a candidate's program, or XLA's error."""
        if isinstance(result, ProgramError):
            self.refused[candidate] = result
        else:
            self.partitioned[candidate] = result
        count = len(self.partitioned) + len(self.refused)
        self.tell(f"partitioned candidate {count}: {candidate.title}")

    def _partition(self, candidate: Candidate) -> Candidate | ProgramError:
        """The candidate with the numbers of its program, under ZeRO-1 if only so it
        fits in memory; or XLA's error.
        """
        try:
            partitioned = self.lowered.partitioned(candidate)
            if partitioned.fits:
                return partitioned
            smaller = zero_1(partitioned, self.states)
            if smaller is None or not smaller.fits:
                return partitioned
            return min(partitioned, self.lowered.partitioned(smaller), key=rank)
        except ProgramError as error:
            return error

    def ranked(self) -> list[Candidate]:
        """The candidates as they were estimated, the best by their programs first."""
        return sorted(
            self.partitioned, key=lambda candidate: rank(self.partitioned[candidate])
        )
