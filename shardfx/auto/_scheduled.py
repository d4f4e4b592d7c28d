"""The last candidates of a search, with the bytes and the memory of libtpu's own
programs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from .._ground.errors import MeshError, ProgramError
from .._ground.text import bytes_text, plural
from .._step import Target, step_of, target_named
from ..cost._libtpu import TpuAnswer, target_of, tpu_answer
from ..cost._traffic import read
from ._asked import SearchOptions
from ._candidate import Candidate, rank
from ._programs import LoweredStep, Tell, jitted, with_traffic


class Settled(NamedTuple):
    """The candidates after libtpu is asked. A candidate fits by libtpu's memory; one that
    libtpu was not asked about fits by the foreseen memory.

    - `fitting`: the candidates that fit. Those that libtpu was asked about come first,
      the fastest of them first.
    - `too_large`: the candidates that do not fit.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]


def target_for(
    lowered: LoweredStep,
    options: SearchOptions,
    candidate: Candidate,
) -> Target | None:
    """The slices for which libtpu schedules a candidate's program; `None` if it has
    none, is not installed, or the step calls back to Python. A target is the slices,
    and the ids of their devices in the order of the candidate's mesh.
    """
    mesh = candidate.mesh
    count = math.prod(mesh.dcn_sizes)
    if target_of(options.chip, mesh) is None or lowered.plain.callbacks:
        return None
    # Rules without an axis over slices.
    if count != options.slices:
        return None
    if options.target is None or options.targets != count:
        return target_of(options.chip, mesh)
    try:
        return target_named(options.target, mesh)
    except MeshError:
        return None


def scheduled(lowered: LoweredStep, candidate: Candidate, target: Target) -> Candidate:
    """The candidate with the bytes and the memory of the program that libtpu schedules
    for it. If it does not fit so, arguments for which the step returns an updated value
    are donated, too. Raises `ProgramError` if libtpu cannot compile the program.
    """
    answer = _answer(lowered, candidate, target)
    if not _fits(answer, candidate) and candidate.donated != lowered.donatable:
        donating = dataclasses.replace(candidate, donated=lowered.donatable)
        other = _answer(lowered, donating, target)
        if _fits(other, donating):
            candidate = donating
            answer = other

    needed_bytes = answer.memory.peak_bytes
    # libtpu may refuse a program that by its own number would fit.
    if answer.memory.out_of_memory:
        needed_bytes = max(needed_bytes, candidate.limit_bytes + 1)
    sent = read(answer.module, candidate.mesh, lowered.leaves, target.order)
    timed = with_traffic(candidate, sent, lowered.chip, lowered.model)
    return dataclasses.replace(timed, by="schedule", memory_bytes=needed_bytes)


def _answer(lowered: LoweredStep, candidate: Candidate, target: Target) -> TpuAnswer:
    """The program that libtpu schedules for a candidate, and its memory."""
    step = step_of(jitted(lowered, candidate, candidate.plans), lowered.args)
    return tpu_answer(step, target)


def _fits(answer: TpuAnswer, candidate: Candidate) -> bool:
    """Whether the candidate's program fits in memory by libtpu's answer."""
    memory = answer.memory
    return not memory.out_of_memory and memory.peak_bytes <= candidate.limit_bytes


def settled(
    lowered: LoweredStep,
    options: SearchOptions,
    candidates: Sequence[Candidate],
    enough: int,
    most: int,
    tell: Tell,
) -> Settled:
    """Asks libtpu about candidates in their order, until `enough` of them fit, but at
    most `most` times. If none of the first `enough` fits, those that need the least
    memory are next. Raises `ProgramError` with libtpu's message if it cannot compile
    any program. `tell` takes a line of text for each.
    """
    remaining = list(candidates)
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for number in range(1, most + 1):
        if not remaining or len(fitting) >= enough:
            break
        candidate = remaining[0]
        target = target_for(lowered, options, candidate)
        if target is None:  # libtpu cannot be asked about it, nor about the others
            break
        remaining = remaining[1:]
        tell(f"asking libtpu about candidate {number}: {candidate.title}")
        try:
            answered = scheduled(lowered, candidate, target)
        except ProgramError as error:
            tell(f"dropped {candidate.title}: {error!s:.300}")
            if not (remaining or fitting or too_large):
                raise
            continue
        if answered.fits:
            fitting.append(answered)
        else:
            memory = f"{bytes_text(answered.memory_bytes)} of"
            limit = bytes_text(answered.limit_bytes)
            tell(f"dropped {candidate.title}: libtpu takes {memory} {limit}")
            too_large.append(answered)
        if number == enough and not fitting:
            remaining.sort(key=lambda other: other.memory_bytes)

    foreseen = [candidate for candidate in remaining if candidate.fits]
    foreseen_too_large = [candidate for candidate in remaining if not candidate.fits]
    if too_large and not fitting:
        note = (
            "libtpu was not asked about this candidate, and the"
            f" {plural(len(too_large), 'candidate')} that it was asked about do not fit"
        )
        foreseen = [_noted(candidate, note) for candidate in sorted(foreseen, key=rank)]
    return Settled(
        (*sorted(fitting, key=rank), *foreseen), tuple(too_large or foreseen_too_large)
    )


def _noted(candidate: Candidate, note: str) -> Candidate:
    """The candidate with one more note."""
    return dataclasses.replace(candidate, notes=(*candidate.notes, note))
