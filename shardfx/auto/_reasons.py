"""Candidates against each other: which are twins, and why one stands before the next."""

from collections.abc import Iterable, Iterator, Sequence

from .._ground.spec import entry_axes
from .._ground.text import bytes_text
from ._candidate import Candidate, ms


def without_twins(found: Iterable[Candidate], known: Sequence[Candidate] = ()) -> Iterator[Candidate]:
    """The first of those whose plans are alike, without those like a known one."""
    kept = [*known]
    for one in found:
        if not any(_alike(one, other) for other in kept):
            kept.append(one)
            yield one


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
    """What the next candidates cost instead, as far as the texts of their numbers differ."""
    for other in others:
        computation = other.compute_seconds - mine.compute_seconds
        told = [_more(other.seconds - mine.seconds, mine.seconds)]
        told += [f"{_more(computation, mine.seconds)} of it computation"] if _tells(computation, mine.seconds) else []
        pairs = (
            (bytes_text(other.wire_bytes), bytes_text(mine.wire_bytes), " sent"),
            (bytes_text(other.memory_bytes), bytes_text(mine.memory_bytes), " a device"),
        )
        told += [f"{its}{what}" for its, own, what in pairs if its != own]
        yield f"{other.title}: {', '.join(told)}"


def _tells(seconds: float, of: float) -> bool:
    """Whether seconds are more than noise beside a step's."""
    return abs(seconds) > 1e-3 * of


def _more(seconds: float, of: float) -> str:
    return f"{ms(abs(seconds))} {'more' if seconds > 0 else 'less'}" if _tells(seconds, of) else "as fast"
