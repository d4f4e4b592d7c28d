"""The terms of a sum over a dimension that is cut, against positions written out."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardfx._step.judge import cuts as cut_sets
from shardfx._step.judge.verdict import Unjudged


def written_out(cut: cut_sets.Cut, device: int) -> list[int]:
    """The positions that a device holds, one after another."""
    starts = cut.starts[device].tolist()
    positions: list[int] = []
    for start, length in zip(starts, cut.lengths, strict=True):
        if start != cut_sets.HOLE:
            positions += [start + number * cut.step for number in range(length)]
    return positions


def expected_terms(cut: cut_sets.Cut, size: int, devices: int) -> set[int] | None:
    """The devices of each part as bit masks; `None` if a sum cannot be judged."""
    masks: dict[tuple[int, ...], int] = {}
    for device in range(devices):
        starts = tuple(cut.starts[device].tolist())
        masks.setdefault(starts, 0)
        masks[starts] |= 1 << device
    held: list[int] = []
    terms = set()
    for mask in masks.values():
        positions = written_out(cut, mask.bit_length() - 1)
        if positions:
            terms.add(mask)
            held += positions
    if sorted(held) == list(range(size)):
        return terms
    return None


@st.composite
def segments(draw: st.DrawFn):
    devices = draw(st.integers(1, 4))
    step = draw(st.sampled_from([1, 2, 3, -1, -2]))
    size = draw(st.integers(1, 12))
    if draw(st.booleans()):
        parts = draw(st.integers(1, 3))
        length = max(1, size // parts)
        distance = 1
        if abs(step) == 1:
            distance = length
        lengths = [length]
        starts = [[device % parts * distance] for device in range(devices)]
    else:
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        start = st.sampled_from([cut_sets.HOLE, *range(-1, size + 1)])
        starts = []
        for _ in range(devices):
            starts.append([draw(start) for _ in lengths])
    return lengths, np.array(starts), step, size


@given(segments())
def test_terms_are_those_of_positions_written_out(drawn):
    lengths, starts, step, size = drawn
    cuts = cut_sets.Cuts(len(starts))
    cut = cuts.from_segments(lengths, starts, step)
    expected = expected_terms(cut, size, cuts.devices)
    if expected is None:
        with pytest.raises(Unjudged):
            cuts.terms(cut, size)
        return
    terms = cuts.terms(cut, size)
    if terms is None:
        # Each device holds all.
        terms = [(1 << cuts.devices) - 1]
    assert set(terms) == expected


def test_long_dimensions_are_not_written_out():
    cuts = cut_sets.Cuts(64)
    rows = 2**31 // 64
    cut = cuts.from_starts(np.arange(64) * rows, rows)
    actual = cuts.terms(cut, 2**31)
    assert actual == tuple(1 << device for device in range(64))
