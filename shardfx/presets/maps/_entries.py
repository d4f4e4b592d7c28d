"""Parses the entries of a layout: `"query: layers[:3] embed (heads dim)"` names the
kind of weight and the axes of an array. An axis is a named dimension. Axes in
parentheses form one dimension of the array, major to minor.
"""

import dataclasses
import re
from typing import NamedTuple

from ..._convert import pattern
from ..._ground.errors import MapError
from ..._ground.text import quoted


@dataclasses.dataclass(frozen=True, init=False)
class Fused:
    """An array that holds several kinds of weights, concatenated along one dimension.

    **Arguments:**

    - `parts`: the kinds and axes, such as `"query: (heads dim) embed"`; see
      [`shardfx.presets.maps.TreeLayout`][].
    - `dim`: the dimension along which the kinds are concatenated.
    - `shards`: the number of equal parts of each kind. They are interleaved: with 2 the
      array is `[q0 k0 v0 q1 k1 v1]`,
        so that each of 2 devices gets its own query, key and value.

    !!! Example

        ```python
        from shardfx.presets.maps import Fused, TreeLayout

        gate_up = Fused("gate: hidden embed", "up: hidden embed", shards=2)
        engine = TreeLayout({"layers.{layers}.gate_up": gate_up})
        mine = TreeLayout({one: f"{one}: layers embed hidden" for one in ("gate", "up")})
        print(mine.to(engine))
        ```
    """

    __module__ = "shardfx.presets.maps"

    parts: tuple[str, ...]
    dim: int
    shards: int

    def __init__(self, *parts: str, dim: int = 0, shards: int = 1):
        for name, value in (("parts", parts), ("dim", dim), ("shards", shards)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        more = f" x {self.shards}" if self.shards != 1 else ""
        return f"[{' | '.join(self.parts)}] along {self.dim}{more}"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A quantised weight, with one scale for each block of its elements.

    **Arguments:**

    - `part`: the kind and its axes, such as `"up: hidden embed"`; see
      [`shardfx.presets.maps.TreeLayout`][].
    - `by`: the path of the array of scales.
    - `block`: the size of a block along each dimension.
    - `dtype`: the dtype of the weight after multiplication by its scales.

    !!! Example

        ```python
        from shardfx.presets.maps import Scaled, TreeLayout

        stored = Scaled("up: hidden embed", "up.scale", (128, 128), "bfloat16")
        mine = TreeLayout({"up": "up: embed hidden"})
        print(TreeLayout({"up.weight": stored}).to(mine))
        ```
    """

    __module__ = "shardfx.presets.maps"

    part: str
    by: str
    block: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.part}, {self.dtype} in blocks of {self.block}"


@dataclasses.dataclass(frozen=True)
class Counted:
    """A weight that the tree stores as `weight * times + plus`.

    A map rounds the result to the dtype of the weight in both directions. A factor that
    is a power of two is exact.

    **Arguments:**

    - `part`: the kind and its axes, such as `"norm: embed"`; see
      [`shardfx.presets.maps.TreeLayout`][].
    - `times`: the factor; not 0.
    - `plus`: the number added after the multiplication.

    !!! Example

        ```python
        from shardfx.presets.maps import Counted, TreeLayout

        gemma = TreeLayout({"norm.weight": "norm: embed"})
        maxtext = TreeLayout({"norm/scale": Counted("norm: embed", plus=1)})
        assert str(gemma.to(maxtext).rules["norm/scale"]) == "From('norm.weight').plus(1.0)"
        ```
    """

    __module__ = "shardfx.presets.maps"

    part: str
    times: float | int = 1
    plus: float | int = 0

    def __str__(self) -> str:
        times = f", times {self.times:g}" if self.times != 1 else ""
        return f"{self.part}{times}{f', plus {self.plus:g}' if self.plus else ''}"


# The description of one array in a layout, such as `"query: embed (heads dim)"`.
Entry = str | Fused | Scaled | Counted


class Range(NamedTuple):
    """The entries `start:stop:step` of an axis that an array has, such as `layers[3:]`.

    With step 0 the array has only entry `start`, and the axis is no dimension of it.
    """

    axis: str
    start: int
    stop: int | None
    step: int = 1

    def entries(self, size: int | None) -> int | None:
        """Returns the number of entries; `None` if the range has no stop and the `size`
        of the axis is unknown.
        """
        end = size if self.stop is None else self.stop
        return None if end is None else len(range(self.start, end, self.step or 1))


class Weight(NamedTuple):
    """The array of a tree that holds one kind of weight, such as "query".

    - `dims`: the axes of each dimension.
    - `range`: the entries of an axis that the array has; `None` if it has all.
    - `in_path`: the axes in braces in the path. Each entry of these axes has an array
      of its own.
    - `entry`, `number`: the entry of the array in the layout, and the index of this
      kind if the array holds several.
    """

    kind: str
    path: str
    dims: tuple[tuple[str, ...], ...]
    range: Range | None
    in_path: tuple[str, ...]
    entry: Entry
    number: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for group in self.dims for axis in group)


def groups_of(axes: str) -> list[str]:
    """Returns the text of each dimension. For `"embed (heads dim)"`:
    `["embed", "(heads dim)"]`.
    """
    return re.findall(r"\([^)]*\)|\S+", axes)


_LINE = re.compile(r"\s*(\w+)\s*:(.*)", re.DOTALL)
_DIM = re.compile(
    r"\s*(?:\(\s*(\w[\w\s]*)\)|([A-Za-z_]\w*)(?:\[(?:(\d*):(\d*)(?::([1-9]\d*))?|(\d+))\])?)\s*"
)


def weights_of(path: str, entry: Entry) -> list[Weight]:
    """Returns a `Weight` for each kind of weight in the array at `path`. Only a `Fused`
    array has several.
    """
    texts = (
        entry.parts
        if isinstance(entry, Fused)
        else (entry.part if isinstance(entry, Scaled | Counted) else entry,)
    )
    found = [_place(path, text, entry, number) for number, text in enumerate(texts)]
    if isinstance(entry, Fused) and (
        len({len(one.dims) for one in found}) != 1 or not found
    ):
        raise MapError(
            f"{quoted(path)}: parts along one dimension have as many dimensions each:"
            f" {entry}."
        )
    if isinstance(entry, Fused) and not 0 <= entry.dim < len(found[0].dims):
        raise MapError(f"{quoted(path)}: the parts have no dim {entry.dim}: {entry}.")
    return found


def _place(path: str, text: str, entry: Entry, number: int) -> Weight:
    line = _LINE.fullmatch(text)
    dims: list[tuple[str, ...]] = []
    parts: list[Range] = []
    at, axes = 0, line[2].strip() if line else ""
    while line and at < len(axes) and (found := _DIM.match(axes, at)):
        at = found.end()
        if found[6] is not None:
            parts.append(Range(found[2], int(found[6]), int(found[6]) + 1, 0))
            continue
        dims.append(tuple(found[1].split()) if found[1] is not None else (found[2],))
        if found[3] is not None:
            parts.append(
                Range(
                    found[2],
                    int(found[3] or 0),
                    int(found[4]) if found[4] else None,
                    int(found[5] or 1),
                )
            )
    if line is None or at < len(axes) or len(parts) > 1:
        raise MapError(
            f"{quoted(path)}: {quoted(text)} cannot be read; write the kind and its"
            ' axes, as in "query: layers[:3] embed (heads dim)", where at most one'
            " axis has a range."
        )
    in_path = pattern(path).names
    place = Weight(
        line[1], path, tuple(dims), parts[0] if parts else None, in_path, entry, number
    )
    every = (*place.axes, *in_path, *[one.axis for one in parts if not one.step])
    if len(set(every)) != len(every):
        twice = next(axis for axis in every if every.count(axis) > 1)
        raise MapError(
            f"{quoted(path)}: {quoted(text)} has the axis `{twice}` twice, in braces or"
            " without."
        )
    return place
