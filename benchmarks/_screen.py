"""Candidates of one step, compiled: all of them in a hurry, then the best of each kind with all care."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax

import shardfx as sfx
from shardfx._search.checked import Verifier, fits


# A TPU's compiler takes a fifth of its time so; what the program sends is the same, its cycles are more.
_HURRY = -1.0
# How many of a kind are compiled with care at most, and how much slower the next may seem and still be one of them:
# where that takes long, and where a program takes less than so many seconds.
_MOST, _NEAR = (3, 6), (1.2, 1.5)
_SOON = 15.0


@dataclasses.dataclass(eq=False)
class Row:
    """One candidate: as it was given, as it was compiled in a hurry, and with care."""

    given: sfx.Candidate
    quickly: sfx.Candidate
    fully: sfx.Candidate | None = None

    def told(self, by_hand: bool) -> dict[str, object]:
        """The row of the table. Where it was compiled in a hurry alone, what it sends is told, but no time."""
        one = self.fully or self.quickly
        look = one.checks[-1]
        return {
            "candidate": one.title,
            "by hand": by_hand,
            "seconds": look.seconds if self.fully else None,
            "computation": look.compute_seconds if self.fully else None,
            "MB": look.wire_bytes / 1e6,
            "estimated MB": one.checks[0].wire_bytes / 1e6,
            "priced MB": one.wire_bytes / 1e6,
            "estimated seconds": one.seconds,
            "quick computation": self.quickly.checks[-1].compute_seconds,
            "GiB": (look.memory_bytes or 0) / 2**30,
            "laid out": one.laid_out,
            "fits": fits(one) if self.fully else None,
        }


class Table:
    """All candidates of a step as rows."""

    def __init__(self, verifier: Verifier, hurry: bool, found: Sequence[sfx.Candidate]):
        self.verifier, self.slowest = _with_own_cache(verifier, "carefully"), 0.0
        with _in_a_hurry() if hurry else contextlib.nullcontext():
            quickly = _with_own_cache(verifier, "quickly") if hurry else self.verifier
            self.rows = [Row(one, looked) for one, (looked, _) in zip(found, quickly.looked_at(found), strict=True)]
        for row in self.rows:
            row.fully = None if hurry else row.quickly
        # How much faster the program is that was compiled with care; of all others it is taken to be as much.
        first = min(self.rows, key=lambda row: not fits(row.quickly))
        self.faster = (
            self.full(first).checks[-1].compute_seconds / first.quickly.checks[-1].compute_seconds if hurry else 1.0
        )

    def full(self, row: Row) -> sfx.Candidate:
        """The candidate, compiled with care."""
        if row.fully is None:
            self.verifier.progress(f"with care: {row.given.title}")
            begin = time.perf_counter()
            row.fully = self.verifier.look(row.given, laid_out=row.quickly.laid_out)
            self.slowest = max(self.slowest, time.perf_counter() - begin)
        return row.fully

    def best(self, suits: Callable[[sfx.Candidate], bool]) -> sfx.Candidate:
        """The fastest that fits in memory of those that suit."""
        done: list[sfx.Candidate] = []
        for row in sorted((row for row in self.rows if suits(row.given)), key=self.rank):
            if row.fully is not None or self.is_worth_care(row, [one for one in done if fits(one)]):
                done.append(self.full(row))
        return min(filter(fits, done), key=lambda one: one.checks[-1].seconds)

    def is_worth_care(self, row: Row, done: Sequence[sfx.Candidate]) -> bool:
        """Whether it may still be the fastest, and there is time to find out."""
        soon = self.slowest < _SOON
        best = min((one.checks[-1].seconds for one in done), default=math.inf)
        return not done or (len(done) < _MOST[soon] and self.seems(row) < _NEAR[soon] * best)

    def rank(self, row: Row) -> tuple[bool, float]:
        """What fits first, then what seems fastest."""
        return not fits(row.quickly), self.seems(row)

    def seems(self, row: Row) -> float:
        """How long a step seems to take."""
        look = (row.fully or row.quickly).checks[-1]
        return look.seconds - (0.0 if row.fully else (1 - self.faster) * look.compute_seconds)


def _with_own_cache(verifier: Verifier, name: str) -> Verifier:
    """A program's key does not say how much care was taken."""
    return verifier if verifier.cache is None else dataclasses.replace(verifier, cache=verifier.cache / name)


@contextlib.contextmanager
def _in_a_hurry() -> Iterator[None]:
    jax.config.update("jax_exec_time_optimization_effort", _HURRY)
    try:
        yield
    finally:
        jax.config.update("jax_exec_time_optimization_effort", 0.0)
