"""What it takes to bring an array from one layout to another: the collectives, and the bytes that enter a device."""

import math
from typing import Any, NamedTuple

import numpy as np

from .layout import Layout, MeshParts, Parts
from .relaid import Step, steps


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
        self._shares: dict[Any, float] = {}
        self._ways: dict[tuple[Layout, Layout], list[Step]] = {}
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
        made = self._added_up(size / self.axes.shards(source), partial, target) if partial else []
        for step in self._steps(self._now(source, partial, target), target):
            share = self._moving(step) * self.axes.count(step.parts) if step.kind == "collective-permute" else None
            made.append(self.made(step.kind, step.parts, size / self.axes.shards(step.result), share))
        return made

    def _added_up(self, local: float, partial: Parts, target: Layout) -> list[Move]:
        """Sums of which each device has `local` bytes, made for a layout."""
        count, made = self.axes.count, []
        wanted = {part for parts in target for part in parts}
        scattered = tuple(part for part in partial if part in wanted) if self.scatters else ()
        rest = tuple(part for part in partial if part not in scattered)
        if scattered:
            local /= count(scattered)
            made.append(self.made("reduce-scatter", scattered, local))
        # For each dimension that is cut afterwards all is added up; what remains, once that is cut.
        by_dim = [tuple(part for part in rest if part in parts) for parts in target]
        made += [self.made("all-reduce", parts, local) for parts in by_dim if parts]
        local /= count(part for part in rest if part in wanted)
        if last := tuple(part for part in rest if part not in wanted):
            made.append(self.made("all-reduce", last, local))
        return made

    def _now(self, source: Layout, partial: Parts, target: Layout) -> Layout:
        """How a sum lies once it is made: cut along the parts that it was added up along, where it is to be."""
        found = []
        for own, wanted in zip(source, target, strict=True):
            new = tuple(part for part in wanted if part in partial)
            if new and set(own) <= set(wanted):
                found.append(tuple(part for part in wanted if part in own or part in new))
            else:
                found.append((*own, *new))
        return tuple(found)

    def _steps(self, source: Layout, target: Layout) -> list[Step]:
        if (source, target) not in self._ways:
            self._ways[source, target] = steps(self.axes, source, target)
        return self._ways[source, target]

    def _moving(self, step: Step) -> float:
        """The share of devices that hold another piece, or copy, after a collective-permute."""
        key = (step.before, step.result)
        if key not in self._shares:
            parts = step.parts
            sizes = [self.axes.sizes[part] for part in parts]
            where = dict(zip(parts, np.indices(sizes).reshape(len(sizes), -1), strict=True))

            def number(layout: Layout) -> np.ndarray:
                found = np.zeros(math.prod(sizes), dtype=np.int64)
                order = [part for own in layout for part in own if part in where]
                for part in (*order, *sorted(where.keys() - set(order))):
                    found = found * self.axes.sizes[part] + where[part]
                return found

            self._shares[key] = float(np.mean(number(step.before) != number(step.result)))
        return self._shares[key]

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
