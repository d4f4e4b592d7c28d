"""One step of a map, as data."""

import dataclasses

from .expression import From


@dataclasses.dataclass(frozen=True)
class Rules:
    """One step of a map.

    **Arguments:**

    - `made`: per pattern of a target's path, what such a leaf is made of.
    - `drop`: patterns of leaves of the source that nothing is made of.
    - `casts`: whether what comes out of another dtype than the target's is cast to it.
    - `rest`: patterns of leaves that the source may have, and that nothing is made of.
    - `inverted`: whether the step goes the other way: from the targets of these rules to their sources.
    """

    made: tuple[tuple[str, From], ...]
    drop: tuple[str, ...] = ()
    casts: bool = False
    inverted: bool = False
    rest: tuple[str, ...] = ()
