"""Which boxes of which arrays fill a leaf, and where in its memory each belongs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .._convert.pieces import Piece, within
from .._convert.views import Landing, landing_count, landings, seen
from .._ground.boxes import Box
from ._entry import FileArray, StoreArray
from ._wanted import Wanted


# A piece that comes apart into more boxes than these is read as a whole, and taken apart in memory.
_MOST_LANDINGS = 512


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Boxes of one array, in the array's own order of dimensions, and where each belongs.

    **Arguments:**

    - `entry`: the array.
    - `boxes`: parts of it.
    - `homes`: per box the number of the leaf's box that it is part of, and where it is in that box's memory; `None`
        where it is all of it.
    """

    entry: FileArray | StoreArray
    boxes: tuple[Box, ...]
    homes: tuple[tuple[int, Landing | None], ...]

    def targets(self, memory: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The memory of each box, seen with the dimensions of the checkpoint's array."""
        return [memory[number] if home is None else seen(memory[number], home) for number, home in self.homes]

    def fills_rows(self) -> bool:
        """Whether the bytes of each box lie in the memory as they do in the file."""
        for box, (_, home) in zip(self.boxes, self.homes, strict=True):
            if home is None:
                continue
            step = 1
            for (start, stop), stride in zip(reversed(box), reversed(home.strides), strict=True):
                if stop - start > 1 and stride != step:
                    return False
                step *= stop - start
        return True


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A piece whose numbers are looked at on the way: scaled, cast twice, constant, or scattered too finely.

    **Arguments:**

    - `number`: of the leaf's box that it lies in.
    - `piece`: the piece.
    """

    number: int
    piece: Piece


def fetches(leaf: Wanted, boxes: Sequence[Box]) -> tuple[list[Fetch], list[Gathered]]:
    """What fills `boxes` of a leaf: boxes that are read into place, and what takes more."""
    if leaf.pieces is None:
        homes = tuple((number, None) for number in range(len(boxes)))
        return [Fetch(leaf.entries[0], tuple(boxes), homes)], []
    found: dict[str, tuple[list[Box], list[tuple[int, Landing | None]]]] = {}
    gathered = []
    entries = {entry.path: entry for entry in leaf.entries}
    for piece in leaf.pieces:
        for number, box in enumerate(boxes):
            for part in within(piece, box):
                if not _is_plain(part, leaf) or landing_count(part, box) > _MOST_LANDINGS:
                    gathered.append(Gathered(number, part))
                    continue
                own, homes = found.setdefault(str(part.value.path), ([], []))
                for landing in landings(part, box):
                    own.append(landing.source)
                    homes.append((number, landing))
    return [Fetch(entries[path], tuple(own), tuple(homes)) for path, (own, homes) in found.items()], gathered


def _is_plain(piece: Piece, leaf: Wanted) -> bool:
    """Whether the numbers are those of the file, in the leaf's dtype."""
    value = piece.value
    return value.path is not None and value.scale is None and all(to == leaf.dtype for to in value.casts)
