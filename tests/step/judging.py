"""The programs of a step, and what the judge says of them: the tests of the judge
change a program's text and expect another verdict, which no public function takes
without partitioning the step again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardfx._step import Programs, judged
from shardfx._step.judge.whole_program import read_whole
from shardfx.testing import Verdict
from tests.programs import parse_hlo, step_of


def programs_of(step: Callable[..., Any], args: Sequence[Any]):
    """The step before and after XLA's partitioner, for CPUs."""
    return step_of(step, args).programs("cpu")


def verdict_of(programs, partitioned: str | None = None) -> Verdict:
    """The verdict of the judge, with the text `partitioned` in place of XLA's."""
    if partitioned is not None:
        programs = programs._replace(partitioned=partitioned)
    return judged(programs)


def proved_programs(step: Callable[..., Any], args: Sequence[Any]):
    """The programs of a step that the judge proves."""
    programs = programs_of(step, args)
    verdict = verdict_of(programs)
    assert verdict.outcome == "proved", verdict
    return programs


def whole_program_of(text: str):
    """The program before the partitioner, as the judge reads it."""
    return read_whole(parse_hlo(text))


def verdict_of_texts(whole: str, partitioned: str) -> Verdict:
    """The verdict of the judge on the texts of a program before and after the
    partitioner.
    """
    return judged(Programs(whole=whole, partitioned=partitioned))
