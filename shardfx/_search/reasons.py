"""Candidates against each other: which are twins, and why one stands before the next."""

from collections.abc import Iterable, Sequence

from .._ground.spec import entry_axes
from .._ground.text import bytes_text
from .candidate import MUCH, Candidate, ms


def without_twins(found: Iterable[Candidate], most: int) -> list[Candidate]:
    """The first of those whose plans are alike."""
    kept: list[Candidate] = []
    for one in found:
        if len(kept) < most and is_new(one, kept):
            kept.append(one)
    return kept


def is_new(one: Candidate, kept: Iterable[Candidate]) -> bool:
    """Whether no other has the same plans."""
    return not any(_alike(one, other) for other in kept)


def various(found: Iterable[Candidate], most: int, each: int = 2) -> list[Candidate]:
    """The first few: at most so many with one mesh, as far as there are others, because an estimate errs for a mesh."""
    ones = list(found)
    count: dict[object, int] = {}
    places = []
    for at, one in enumerate(ones):
        mesh = tuple(one.mesh.shape.items())
        count[mesh] = count.get(mesh, 0) + 1
        places.append((count[mesh] > each, at))
    return [ones[at] for at in sorted(at for _, at in sorted(places)[:most])]


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


def by_look(mine: Candidate, others: Iterable[Candidate]) -> Iterable[str]:
    """Why a candidate stands before the next ones, by the look that ordered them."""
    look = mine.checks[-1]
    for other in others:
        theirs = other.checks[-1]
        parts = [("computation", theirs.compute_seconds - look.compute_seconds)] if look.by == "compile" else []
        told = [f"{more(change)} of {what}" for what, change in parts if abs(change) > 1e-3 * look.seconds]
        told.append(f"{bytes_text(round(theirs.wire_bytes))} sent, not {bytes_text(round(look.wire_bytes))}")
        yield f"{other.title} by {look.by}: {more(theirs.seconds - look.seconds)}: {', '.join(told)}"


def worth_laying_out(first: Candidate, found: Iterable[Candidate]) -> tuple[str, ...]:
    """Says so where another candidate is clearly faster than the first once the step is laid out as it was priced."""
    best, look = min(found, key=lambda one: one.seconds), first.checks[-1]
    if first.laid_out or look.seconds < MUCH * best.seconds:
        return ()
    return (
        f"{best.title} takes {ms(best.seconds)} where the step is laid out, by its own constraints or by "
        f"`shardfx.lay_out`, and this one {ms(look.seconds)} as it is written: search with `laid_out=True`",
    )


def parts_of(parts: Sequence[float], mine: Candidate) -> str:
    named = (
        ("computation", parts[2] - mine.compute_seconds),
        ("sending that computation waits for", parts[3] - mine.exposed_seconds),
        ("sending beside computation", parts[4] - mine.hidden_seconds),
    )
    told = [f"{more(change)} of {what}" for what, change in named if abs(change) > 1e-3 * mine.seconds]
    return ", ".join(told) or "all alike"


def more(seconds: float) -> str:
    return f"{ms(abs(seconds))} {'more' if seconds >= 0 else 'less'}"
