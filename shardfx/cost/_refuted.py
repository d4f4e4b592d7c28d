"""The warning about a step that XLA's partitioner computes wrongly."""

import dataclasses
import warnings

from .._ground.errors import WrongNumbersWarning
from .._step import (
    HloModule,
    Platform,
    Programs,
    Refutation,
    Step,
    judged,
    judged_text,
    parse_hlo,
)


# The largest number of operations of a partitioned program that is judged. The number
# of operations decides, and not the time, so that every machine says the same.
MOST_JUDGED = 4000


def programs_to_judge(step: Step, platform: Platform, most: int) -> Programs | None:
    """The step's program before and after XLA's partitioner, if it is to be judged:
    on at most `most` devices.

    A step for CPUs is not: its estimate reads the program after all passes, which has
    no program before the partitioner to compare with.
    """
    if platform == "cpu" or step.mesh.size > most:
        return None
    return step.programs(platform)


def module_of(programs: Programs, devices: int) -> HloModule:
    """The partitioned program. XLA's text lacks the number of devices from 32 on."""
    return dataclasses.replace(parse_hlo(programs.partitioned), partitions=devices)


def refutations_of(
    programs: Programs,
    text: str | None = None,
    module: HloModule | None = None,
) -> tuple[Refutation, ...]:
    """What the partitioner computes wrongly; nothing for programs with more than
    `MOST_JUDGED` operations. `text` is the program that another compiler partitioned;
    it is judged in the place of XLA's. `module` is XLA's partitioned program, if the
    caller has read its text.
    """
    partitioned_text = programs.partitioned if text is None else text
    # One operation is one line with an equals sign.
    if partitioned_text.count(" = ") > MOST_JUDGED:
        return ()
    if text is None:
        return judged(programs, module).refutations
    return judged_text(programs.whole, text, "the compiler's program").refutations


def warn_if_refuted(programs: Programs, module: HloModule) -> None:
    """Warns of each operation that the partitioner computes wrongly, for the caller of
    a public function that calls this one. `module` is the partitioned program.
    """
    for refutation in refutations_of(programs, module=module):
        text = (
            f"XLA's partitioner computes this step wrongly: {refutation}\n"
            "    `shardfx.testing.verify(step, *args)` has the whole verdict"
        )
        warnings.warn(text, WrongNumbersWarning, stacklevel=4)
