"""How many programs a search may have partitioned in its time."""

from typing import NamedTuple

from ..cost._estimate import LARGEST_DIRECT_MESH, LARGEST_SMALL_MESH


class _Budget(NamedTuple):
    """A limit on the programs that are partitioned: the seconds that they may take on two
    cores, and the smallest and the largest number of programs.
    """

    seconds: float
    least: int
    most: int

    def count(self, program_seconds: float) -> int:
        """The number of programs that may be partitioned, if each takes
        `program_seconds`.
        """
        return min(self.most, max(self.least, int(self.seconds / program_seconds)))


# The step without constraints; the constrained one is also traced and lowered again.
_PLAIN = _Budget(seconds=15.0, least=6, most=36)
_CONSTRAINED = _Budget(seconds=8.0, least=2, most=6)
# For libtpu, which is asked about the last candidates.
_SCHEDULED = _Budget(seconds=20.0, least=2, most=8)
# The seconds of one program: a fixed part; per byte of StableHLO, for partitioning and
# for constraining; per device. These numbers are not measured by each search, so that
# two hosts partition the same candidates.
_SECONDS_PER_PROGRAM = 0.1
_SECONDS_PER_BYTE = 1 / 42_000
_CONSTRAINED_SECONDS_PER_BYTE = 1 / 20_000
_SECONDS_PER_DEVICE = 1 / 2_700
_SCHEDULED_SECONDS_PER_BYTE = 1 / 25_000


class ProgramCounts(NamedTuple):
    """The number of programs that a search partitions: without constraints on
    intermediate values, and with them.
    """

    plain: int
    constrained: int


def program_counts(size: int, devices: int) -> ProgramCounts:
    """How many programs can be partitioned in the time of a search, without and with
    constraints. `size` is the number of bytes of the step's StableHLO. A budget counts
    how many programs of so many seconds fit into its time.
    """
    program_seconds = _SECONDS_PER_PROGRAM + size * _SECONDS_PER_BYTE
    if devices <= LARGEST_DIRECT_MESH:
        plain_seconds = program_seconds + devices * _SECONDS_PER_DEVICE
    else:
        # Larger meshes are extrapolated from three smaller ones.
        plain_seconds = 3 * (program_seconds + LARGEST_SMALL_MESH * _SECONDS_PER_DEVICE)
    constrained_seconds = plain_seconds + size * _CONSTRAINED_SECONDS_PER_BYTE
    return ProgramCounts(
        plain=_PLAIN.count(plain_seconds),
        constrained=_CONSTRAINED.count(constrained_seconds),
    )


def scheduled_count(size: int) -> int:
    """How many programs libtpu can be asked about in the time of a search. `size` is
    the number of bytes of the step's StableHLO.
    """
    program_seconds = _SECONDS_PER_PROGRAM + size * _SCHEDULED_SECONDS_PER_BYTE
    return _SCHEDULED.count(program_seconds)
