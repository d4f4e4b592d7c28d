"""What it takes to bring an array from one layout to another: the collectives, and the bytes that enter a device."""

import math
from typing import NamedTuple

from .layout import Layout, MeshParts, Parts


class Move(NamedTuple):
    """One collective: `wire_bytes` enter each device, `dcn_bytes` of them from other slices."""

    kind: str
    parts: Parts
    wire_bytes: float
    dcn_bytes: float


class Prices:
    """Prices of moves on one mesh; `scatters` says whether a sum that is cut afterwards is scattered at once."""

    def __init__(self, axes: MeshParts, *, scatters: bool):
        self.axes, self.scatters = axes, scatters
        self._known: dict[tuple[float, Layout, Parts, Layout], tuple[Move, ...]] = {}

    def moves(self, size: float, source: Layout, partial: Parts, target: Layout) -> tuple[Move, ...]:
        """The collectives for one array.

        **Arguments:**

        - `size`: bytes of the whole of it.
        - `source`: how it lies.
        - `partial`: the parts of the mesh along which devices hold sums that are yet to be added up.
        - `target`: how it is to lie, complete.
        """
        if source == target and not partial:
            return ()
        key = (size, source, partial, target)
        if key not in self._known:
            self._known[key] = tuple(self._moved(size, source, partial, target))
        return self._known[key]

    def _moved(self, size: float, source: Layout, partial: Parts, target: Layout) -> list[Move]:
        count, made = self.axes.count, []
        local = size / self.axes.shards(source)
        wanted = {part: at for at, parts in enumerate(target) for part in parts}
        held = {part: at for at, parts in enumerate(source) for part in parts}
        if partial:
            scattered = tuple(part for part in partial if part in wanted) if self.scatters else ()
            rest = tuple(part for part in partial if part not in scattered)
            if scattered:
                made.append(self.made("reduce-scatter", scattered, local / count(scattered)))
                local /= count(scattered)
            if rest:
                made.append(self.made("all-reduce", rest, local))
                local /= count(part for part in rest if part in wanted)
        local /= count(part for part in wanted if part not in held and part not in partial)
        if self._turns(source, target):
            made.append(self.made("collective-permute", tuple(held), local))
        ways: dict[tuple[int, int], Parts] = {}
        for part, at in held.items():
            if wanted.get(part, at) != at:
                ways[at, wanted[part]] = (*ways.get((at, wanted[part]), ()), part)
        # XLA exchanges between one dimension and one other; between one and two it gathers, and cuts again.
        is_forked = len(ways) > 1 and any(len({way[end] for way in ways}) < len(ways) for end in (0, 1))
        if not is_forked:
            made += [self.made("all-to-all", parts, local) for parts in ways.values()]
        for parts in source:
            gone = tuple(part for part in parts if part not in wanted or (is_forked and wanted[part] != held[part]))
            if gone:
                local *= count(gone)
                made.append(self.made("all-gather", gone, local))
        return made

    def _turns(self, source: Layout, target: Layout) -> bool:
        """Whether what stays on a dimension has to change places: what comes or goes is major to it."""
        for before, after in zip(source, target, strict=True):
            kept = [part for part in before if part in after]
            if kept and (list(before[: len(kept)]) != kept or list(after[: len(kept)]) != kept):
                return True
        return False

    def made(self, kind: str, parts: Parts, size: float, share: float | None = None) -> Move:
        """A collective whose result has `size` bytes on one device; of a permute, `share` of the devices receive."""
        n, m = self.axes.count(parts), self.axes.slices(parts)
        if kind == "collective-permute":
            part = 1 - 1 / n if share is None else share / n
            return Move(kind, parts, size * part, size * part * (1 - 1 / m))
        if kind in ("all-to-all", "ragged-all-to-all"):
            return Move(kind, parts, size * (n - 1) / n, size * (n - n / m) / n)
        times = {"all-reduce": 2 / n, "reduce-scatter": 1.0}.get(kind, 1 / n)
        return Move(kind, parts, size * (n - 1) * times, size * (m - 1) * times)


def total(moves: tuple[Move, ...]) -> float:
    """The bytes of several moves."""
    return math.fsum(move.wire_bytes for move in moves) if moves else 0.0
