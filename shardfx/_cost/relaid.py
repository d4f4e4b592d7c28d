"""How XLA's partitioner brings an array from one layout to another, step by step.

It looks at how many pieces each dimension has first, and at which devices hold them last. Where it knows no way, every
device gets all of the array and keeps its piece, of which XLA warns as an involuntary full rematerialization.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .layout import Layout, MeshParts, Parts


Counts = tuple[int, ...]


class Step(NamedTuple):
    """One collective.

    **Arguments:**

    - `kind`: of the collective.
    - `parts`: the parts of the mesh along which devices send.
    - `before`, `result`: how the array lies before and afterwards.
    """

    kind: str
    parts: Parts
    before: Layout
    result: Layout


def steps(axes: MeshParts, source: Layout, target: Layout) -> list[Step]:
    """The collectives that bring an array from one layout to another."""
    way, made = _Way(axes), []
    found = way.between(source, target, in_parts=True)
    for step in way.through_all(source) if found is None else found:
        last = made[-1] if made else None
        if last and last.kind == step.kind == "all-to-all" and _changed(last).isdisjoint(_changed(step)):
            # Exchanges that share no dimension are one.
            made[-1] = Step(step.kind, (*last.parts, *step.parts), last.before, step.result)
        else:
            made.append(step)
    return made


class _Way:
    def __init__(self, axes: MeshParts):
        self.axes = axes

    def between(self, source: Layout, target: Layout, *, in_parts: bool = False) -> list[Step] | None:
        """The steps; `None` where all is to be gathered.

        `in_parts` says whether a dimension may be gathered in part.
        """
        mine, theirs = self.counts(source), self.counts(target)
        if mine == theirs:
            return self.permuted(source, target)
        if _divides(mine, theirs):
            return self.sliced(source, target, self.spare(source))
        if _divides(theirs, mine):
            return self.gathered(source, target)
        if (swaps := _swaps(mine, theirs)) is not None:
            return self.exchanged(source, target, swaps)
        for attempt in (self.shifted, self.replicated, self.moved, self.cut):
            if (found := attempt(source, target)) is not None:
                return found
        return self.grouped(source, target, in_parts)

    def permuted(self, source: Layout, target: Layout) -> list[Step]:
        """Where both have as many pieces in every dimension."""
        if source == target:
            return []
        pairs = list(zip((*source, self.spare(source)), (*target, self.spare(target)), strict=True))
        parts = tuple(dict.fromkeys(part for one, other in pairs if one != other for part in (*one, *other)))
        return [Step("collective-permute", parts, source, target)]

    def sliced(self, source: Layout, target: Layout, spare: Parts) -> list[Step]:
        """Where the target has as many pieces or more: without a word where devices have what they are to keep."""
        if all(wanted[: len(own)] == own for own, wanted in zip(source, target, strict=True)):
            return []
        return self.permuted(self.finer(source, self.counts(target), spare), target)

    def gathered(self, source: Layout, target: Layout) -> list[Step]:
        """Where the target has as many pieces or fewer."""
        if all(own[: len(wanted)] == wanted for own, wanted in zip(source, target, strict=True)):
            before = source
        else:
            before = self.finer(target, self.counts(source), self.spare(target))
        gone = [own[len(wanted) :] for own, wanted in zip(before, target, strict=True)]
        return [*self.permuted(source, before), *self.gathers(before, gone)]

    def gathers(self, source: Layout, gone: Sequence[Parts]) -> list[Step]:
        """One gather for each dimension that loses parts, which are behind all others."""
        found, now = [], list(source)
        for at, parts in enumerate(gone):
            if parts:
                before = tuple(now)
                now[at] = now[at][: len(now[at]) - len(parts)]
                found.append(Step("all-gather", parts, before, tuple(now)))
        return found

    def through_all(self, source: Layout) -> list[Step]:
        """Every device gets all."""
        return self.gathers(source, source)

    def exchanged(self, source: Layout, target: Layout, swaps: Sequence[tuple[int, int]]) -> list[Step] | None:
        """Where dimensions trade their numbers of pieces."""
        found: list[Step] = []
        now = source
        for pair in swaps:
            step = self.handed(now, *pair)
            if step is None:
                return None
            found.append(step)
            now = step.result
        return [*found, *self.permuted(now, target)]

    def handed(self, now: Layout, one: int, other: int) -> Step | None:
        """What the dimension with more pieces hands to the other, so that their numbers change places."""
        more, less = (one, other) if self.axes.count(now[one]) >= self.axes.count(now[other]) else (other, one)
        return self.given(now, more, less, self.axes.count(now[more]) / self.axes.count(now[less]))

    def given(self, now: Layout, more: int, less: int, times: float) -> Step | None:
        """One dimension hands so many pieces to another; `None` where no parts of the mesh are as many."""
        own = now[more]
        # The last parts, if they are as many; else those that are.
        spans = [(at, end) for end in range(len(own), 0, -1) for at in range(end)]
        at, end = next((span for span in spans if self.axes.count(own[slice(*span)]) == times), (0, 0))
        kept, handed = (*own[:at], *own[end:]), own[at:end]
        if not handed:
            return None
        result = list(now)
        result[more], result[less] = kept, (*now[less], *handed)
        return Step("all-to-all", handed, now, tuple(result))

    def shifted(self, source: Layout, target: Layout) -> list[Step] | None:
        """Where every dimension takes over the pieces of the one behind it, and the last one is cut anew."""
        spare, parts = self.spare(source), _all(source)
        if source[0] or not spare or (*parts, *spare) != _all(target):
            return None
        if (*self.counts(source)[1:], self.axes.count(spare)) != self.counts(target):
            return None
        return [Step("all-to-all", parts, source, (*source[1:], ()))]

    def replicated(self, source: Layout, target: Layout) -> list[Step] | None:
        """By gathering a dimension that has as many pieces as the target has copies."""
        copies, wanted = (self.axes.count(self.spare(layout)) for layout in (source, target))
        for at, parts in enumerate(source if wanted > 1 else ()):
            if parts and self.axes.count(parts) * copies == wanted:
                now = tuple(() if dim == at else own for dim, own in enumerate(source))
                rest = self.between(now, target)
                return None if rest is None else [Step("all-gather", parts, source, now), *rest]
        return None

    def moved(self, source: Layout, target: Layout) -> list[Step] | None:
        """By handing pieces from one dimension to another, where nothing else has to change its number."""
        mine, theirs = self.counts(source), self.counts(target)
        if math.prod(mine) != math.prod(theirs):
            return None
        differ = [at for at, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
        for i, j in ((i, j) for at, i in enumerate(differ) for j in differ[at + 1 :]):
            if mine[i] * mine[j] != theirs[i] * theirs[j] or [mine[i], mine[j], theirs[i], theirs[j]].count(1) > 1:
                continue
            more, less = (i, j) if mine[i] > theirs[i] else (j, i)
            step = self.given(source, more, less, mine[more] / theirs[more])
            if step is not None:
                rest = self.between(step.result, target)
                return None if rest is None else [step, *rest]
        return None

    def cut(self, source: Layout, target: Layout) -> list[Step] | None:
        """By cutting a whole dimension among all copies first, where the target has none."""
        spare = self.spare(source)
        if not spare or self.spare(target):
            return None
        for at, (own, wanted) in enumerate(zip(source, target, strict=True)):
            if not own and wanted and self.axes.count(wanted) % self.axes.count(spare) == 0:
                return self.between(tuple(spare if dim == at else parts for dim, parts in enumerate(source)), target)
        return None

    def grouped(self, source: Layout, target: Layout, in_parts: bool) -> list[Step] | None:
        """Where some dimensions keep their numbers, only the others are gathered."""
        in_parts &= self.axes.count(self.spare(source)) == self.axes.count(self.spare(target))
        now = tuple(self.common(*pair, in_parts=in_parts) for pair in zip(source, target, strict=True))
        if not any(now):
            return None
        gone = tuple(own[len(stays) :] for own, stays in zip(source, now, strict=True))
        spare = tuple(dict.fromkeys((*_all(gone), *self.spare(now))))
        return [*self.gathers(source, gone), *self.sliced(now, target, spare)]

    def common(self, own: Parts, wanted: Parts, *, in_parts: bool) -> Parts:
        """What of a dimension stays while others are gathered: all or nothing, or as many pieces as are wanted."""
        mine, theirs = self.axes.count(own), self.axes.count(wanted)
        if mine == theirs:
            return own
        return self.major(own, theirs) if in_parts and mine % theirs == 0 else ()

    def major(self, parts: Parts, count: int) -> Parts:
        """The first parts, which make so many pieces; none if no number of them does."""
        return next((parts[:at] for at in range(len(parts)) if self.axes.count(parts[:at]) == count), ())

    def finer(self, layout: Layout, counts: Counts, spare: Parts) -> Layout:
        """A layout with so many pieces: of the parts that are not in use, dimensions take the first."""
        left, found = list(spare), []
        for own, count in zip(layout, counts, strict=True):
            parts, missing = own, count // self.axes.count(own)
            for part in tuple(left):
                if missing % self.axes.sizes[part] == 0 and missing > 1:
                    parts = (*parts, part)
                    missing //= self.axes.sizes[part]
                    left.remove(part)
            found.append(parts)
        return tuple(found)

    def spare(self, layout: Layout) -> Parts:
        """The parts that cut nothing."""
        used = {part for parts in layout for part in parts}
        return tuple(part for part in range(len(self.axes.sizes)) if part not in used)

    def counts(self, layout: Layout) -> Counts:
        return tuple([self.axes.count(parts) for parts in layout])


def _divides(few: Counts, many: Counts) -> bool:
    return all(more % less == 0 for less, more in zip(few, many, strict=True))


def _swaps(mine: Counts, theirs: Counts) -> list[tuple[int, int]] | None:
    """The dimensions that trade their numbers of pieces, pair by pair; `None` where the numbers are not the same."""
    now = list(mine)
    if sorted(mine) != sorted(theirs):
        return None
    found = []
    while (least := min((n for n, t in zip(now, theirs, strict=True) if n != t), default=0)) > 0:
        one = max(at for at, (n, t) in enumerate(zip(now, theirs, strict=True)) if n == least != t)
        others = [at for at, (n, t) in enumerate(zip(now, theirs, strict=True)) if n == theirs[one] != t]
        other = next((at for at in reversed(others) if theirs[at] == least), others[0])
        now[one], now[other] = now[other], now[one]
        found.append((one, other))
    return found


def _changed(step: Step) -> set[int]:
    """The dimensions that are cut otherwise afterwards."""
    return {at for at, pair in enumerate(zip(step.before, step.result, strict=True)) if pair[0] != pair[1]}


def _all(layout: Layout) -> Parts:
    return tuple(part for parts in layout for part in parts)
