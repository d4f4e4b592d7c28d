"""What it takes to bring an array from one layout to another: the collectives, and the bytes that enter a device."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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
        self._shares: dict[Any, float] = {}
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
            # For each dimension that is cut afterwards all is added up; what remains, once that is cut.
            by_dim = [tuple(part for part in rest if part in parts) for parts in target]
            made += [self.made("all-reduce", parts, local) for parts in by_dim if parts]
            local /= count(part for part in rest if part in wanted)
            if last := tuple(part for part in rest if part not in wanted):
                made.append(self.made("all-reduce", last, local))
        ways: dict[tuple[int, int], Parts] = {}
        for part, at in held.items():
            if wanted.get(part, at) != at:
                ways[at, wanted[part]] = (*ways.get((at, wanted[part]), ()), part)
        # XLA exchanges between one dimension and one other; between one and two it gathers, and cuts again.
        is_forked = len(ways) > 1 and any(len({way[end] for way in ways}) < len(ways) for end in (0, 1))
        gone = [tuple(part for part in parts if part not in wanted) for parts in source]
        new = [tuple(part for part in parts if part not in held and part not in partial) for parts in target]
        local /= math.prod(max(1, count(more) / count(less)) for more, less in zip(new, gone, strict=True))
        parts, share = self._traded(source, target, gone, new)
        if share:
            made.append(self.made("collective-permute", parts, local, share * count(parts)))
        if not is_forked:
            for at in {to for _, to in ways if gone[to] and not new[to]}:
                # What is to leave a dimension does so before others come.
                local *= count(gone[at])
                made.append(self.made("all-gather", gone[at], local))
                gone[at] = ()
            made += [self.made("all-to-all", parts, local) for parts in ways.values()]
        for parts, less, more in zip(source, gone, new, strict=True):
            forked = tuple(part for part in parts if is_forked and wanted.get(part, held[part]) != held[part])
            left = max(1, count(less) / count(more)) * count(forked)
            if left > 1:
                local *= left
                less = (*less, *forked)
                made.append(self.made("all-gather", less, local * (1 - 1 / left) / (1 - 1 / count(less))))
        return made

    def _traded(
        self, source: Layout, target: Layout, gone: Sequence[Parts], new: Sequence[Parts]
    ) -> tuple[Parts, float]:
        """The parts along which devices trade places, and the share of devices that do.

        What stays on a dimension may come behind what goes, or before what comes; and what comes may take the place of
        what goes.
        """
        orders: list[tuple[Parts, Parts]] = []
        least = 0.0
        for own, after, less, more in zip(source, target, gone, new, strict=True):
            stays = tuple(part for part in own if part in after or part in less)
            wanted = tuple(part for part in after if part in own or part in more)
            if not (less and more):
                orders.append(((*stays, *more), (*wanted, *less)))
            elif self.axes.count(less) == self.axes.count(more):
                orders.append((stays, wanted))
            else:
                least = 1 - 1 / max(self.axes.count(less), self.axes.count(more))
                orders.append(((), ()))
        moved = [pair for pair in orders if pair[0] != pair[1]]
        parts = tuple(dict.fromkeys(part for pair in moved for order in pair for part in order))
        if least:
            traded = (part for less, more in zip(gone, new, strict=True) if less and more for part in (*less, *more))
            parts = tuple(dict.fromkeys((*parts, *traded)))
        return parts, max(least, self._moving(parts, moved))

    def _moving(self, parts: Parts, orders: Sequence[tuple[Parts, Parts]]) -> float:
        """The share of devices whose piece is another in the second of each pair of orders."""
        if not orders:
            return 0.0
        key = (parts, tuple(orders))
        if key not in self._shares:
            sizes = [self.axes.sizes[part] for part in parts]
            where = dict(zip(parts, np.indices(sizes).reshape(len(sizes), -1), strict=True))

            def piece(order: Parts) -> np.ndarray:
                number = np.zeros(math.prod(sizes), dtype=np.int64)
                for part in order:
                    number = number * self.axes.sizes[part] + where[part]
                return number

            moves = np.any([piece(first) != piece(second) for first, second in orders], axis=0)
            self._shares[key] = float(moves.mean())
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
