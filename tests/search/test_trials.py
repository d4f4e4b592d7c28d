"""Which candidates of a search XLA partitions the step for."""

import dataclasses
from typing import Any, cast

import pytest
from models import mlp_step, space_of
from parts_of_search import by_hand, fastest

from shardfx import auto
from shardfx.auto._trials import Trials


class Lowered:
    """A step whose programs take `factor` times their estimated time."""

    def __init__(self, factor: float, *, fits: bool):
        self.factor = factor
        self.fits = fits

    def partitioned(self, candidate: auto.Candidate) -> auto.Candidate:
        memory_bytes = 0 if self.fits else candidate.limit_bytes + 1
        return dataclasses.replace(
            candidate,
            seconds=self.factor * candidate.seconds,
            memory_bytes=memory_bytes,
        )


def trials_of(lowered: Lowered) -> Trials:
    return Trials(lowered=cast(Any, lowered), states=(), tell=lambda _: None)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_only_estimates_close_to_the_fastest_are_tried(factor: float):
    """Errors of the estimate that all candidates share do not count."""
    space = space_of(mlp_step(64, 256, 512), 8, "v5e")
    usual = list(by_hand(space, space.usual))
    others = [candidate for candidate in fastest(space, 12) if candidate not in usual]
    trials = trials_of(Lowered(factor, fits=True))
    trials.add(usual)
    assert list(trials.partitioned) == usual
    shortest = min(candidate.seconds for candidate in [*usual, *others])
    trials.add_close(others, least=0)
    tried = list(trials.partitioned)[len(usual) :]
    close = [other for other in others if other.seconds <= 1.1 * shortest]
    assert set(close) <= set(tried)
    assert len(tried) < len(others)
    first_seconds = min(candidate.seconds for candidate in usual)
    assert all(candidate.seconds <= 1.1 * first_seconds for candidate in tried)


def test_enough_candidates_are_tried_however_slow():
    space = space_of(mlp_step(64, 256, 512), 8, "v5e")
    candidates = fastest(space, 12)
    trials = trials_of(Lowered(1.0, fits=True))
    trials.add_close(candidates, least=8)
    assert len(trials.partitioned) >= 8
    without_room = trials_of(Lowered(1.0, fits=False))
    without_room.add_close(candidates, least=0)
    assert len(without_room.partitioned) == len(candidates)
