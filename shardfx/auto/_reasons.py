"""Candidates against each other: which are twins, and why one stands before the next."""

from collections.abc import Iterable, Iterator

from .._ground.spec import entry_axes
from .._ground.text import bytes_text
from ._candidate import Candidate, megabytes, ms


def without_twins(found: Iterable[Candidate]) -> list[Candidate]:
    """The first of those whose plans are alike."""
    kept: list[Candidate] = []
    for one in found:
        if not any(_alike(one, other) for other in kept):
            kept.append(one)
    return kept


def _alike(one: Candidate, other: Candidate) -> bool:
    """Whether both cut all arguments into the same pieces along the same mesh, whatever its axes are called."""
    if one.mesh.axis_sizes != other.mesh.axis_sizes or one.mesh.dcn_sizes != other.mesh.dcn_sizes:
        return False
    names = dict(zip(one.mesh.axis_names, other.mesh.axis_names, strict=True))
    return all(
        [tuple(names[axis] for axis in entry_axes(entry)) for entry in leaf.spec]
        == [entry_axes(entry) for entry in twin.spec]
        for mine, theirs in zip(one.plans, other.plans, strict=True)
        for leaf, twin in zip(mine.leaves, theirs.leaves, strict=True)
    )


def against(mine: Candidate, others: Iterable[Candidate]) -> Iterator[str]:
    """What the next candidates cost instead."""
    for other in others:
        computation = other.compute_seconds - mine.compute_seconds
        told = [f"{_more(computation)} of it computation"] if abs(computation) > 1e-3 * mine.seconds else []
        if other.wire_bytes != mine.wire_bytes:
            told.append(f"{megabytes(other.wire_bytes)} MB sent")
        if other.memory_bytes != mine.memory_bytes:
            told.append(f"{bytes_text(other.memory_bytes)} a device")
        yield ", ".join([f"{other.title}: {_more(other.seconds - mine.seconds)}", *told])


def _more(seconds: float) -> str:
    return f"{ms(abs(seconds))} {'more' if seconds >= 0 else 'less'}"
