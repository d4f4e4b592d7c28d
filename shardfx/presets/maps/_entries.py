"""Parses the entries of a layout: `"query: layers[:3] embed (heads dim)"` names the
kind of weight and the axes of an array. An axis is a named dimension. Axes in
parentheses form one dimension of the array, major to minor.
"""

import dataclasses
import itertools as it
import re
from collections.abc import Sequence
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
      array is `[q0 k0 v0 q1 k1 v1]`, so that each of 2 devices gets its own query, key
      and value.

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
        shards = f" x {self.shards}" if self.shards != 1 else ""
        return f"[{' | '.join(self.parts)}] along {self.dim}{shards}"


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
        plus = f", plus {self.plus:g}" if self.plus else ""
        return f"{self.part}{times}{plus}"


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

    def __str__(self) -> str:
        if not self.step:
            return f"{self.axis}[{self.start}]"
        stop = "" if self.stop is None else self.stop
        step = f":{self.step}" if self.step > 1 else ""
        return f"{self.axis}[{self.start}:{stop}{step}]"

    def entries(self, size: int | None) -> int | None:
        """Returns the number of entries; `None` if the range has no stop and the `size`
        of the axis is unknown.
        """
        end = size if self.stop is None else self.stop
        if end is None:
            return None
        return len(range(self.start, end, self.step or 1))


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
        return tuple(it.chain.from_iterable(self.dims))


def groups_of(axes: str) -> list[str]:
    """Returns the text of each dimension. For `"embed (heads dim)"`:
    `["embed", "(heads dim)"]`.
    """
    return re.findall(r"\([^)]*\)|\S+", axes)


_LINE = re.compile(r"\s*(?P<kind>\w+)\s*:(?P<axes>.*)", re.DOTALL)
# A group `(heads dim)`, or an axis, with a range `[0:4:2]` or an entry `[3]` if any.
_DIM = re.compile(
    r"\s*(?:\(\s*(?P<group>\w[\w\s]*)\)|(?P<axis>[A-Za-z_]\w*)"
    r"(?:\[(?:(?P<start>\d*):(?P<stop>\d*)(?::(?P<step>[1-9]\d*))?"
    r"|(?P<entry>\d+))\])?)\s*"
)


def weights_of(path: str, entry: Entry) -> list[Weight]:
    """Returns a `Weight` for each kind of weight in the array at `path`. Only a `Fused`
    array has several. Raises `MapError` for an entry that cannot be read.
    """
    if isinstance(entry, Fused):
        weights = []
        for number, text in enumerate(entry.parts):
            weights.append(_weight(path, text, entry, number))
        _require_concatenable(path, entry, weights)
        return weights
    if not isinstance(entry, str | Scaled | Counted):
        raise MapError(
            f"{quoted(path)}: {entry!r:.80} is no entry of a layout; write the kind and"
            ' its axes, as in "query: embed (heads dim)", or `Fused`, `Scaled` or'
            " `Counted`."
        )
    part = entry if isinstance(entry, str) else entry.part
    return [_weight(path, part, entry, number=0)]


def _require_concatenable(path: str, entry: Fused, weights: Sequence[Weight]) -> None:
    """Raises `MapError` if the parts of an array cannot be concatenated."""
    if not weights:
        raise MapError(f"{quoted(path)}: a `Fused` array has parts, and this has none.")
    if len({len(weight.dims) for weight in weights}) != 1:
        raise MapError(
            f"{quoted(path)}: parts along one dimension have as many dimensions each:"
            f" {entry}."
        )
    if not 0 <= entry.dim < len(weights[0].dims):
        raise MapError(f"{quoted(path)}: the parts have no dim {entry.dim}: {entry}.")


class _Dimensions(NamedTuple):
    """The axes of each dimension of an array, and the ranges of its axes."""

    dims: tuple[tuple[str, ...], ...]
    ranges: tuple[Range, ...]


def _dimensions(text: str) -> _Dimensions | None:
    """Reads the axes of an array, such as `layers[:3] embed (heads dim)`; `None` if
    they cannot be read.
    """
    dims: list[tuple[str, ...]] = []
    ranges: list[Range] = []
    position = 0
    while position < len(text):
        dim = _DIM.match(text, position)
        if dim is None:
            return None
        position = dim.end()
        axis = dim["axis"]
        if dim["entry"] is not None:
            entry = int(dim["entry"])
            ranges.append(Range(axis, start=entry, stop=entry + 1, step=0))
            continue
        if axis is None:
            dims.append(tuple(dim["group"].split()))
            continue
        dims.append((axis,))
        if dim["start"] is not None:
            start = int(dim["start"] or 0)
            stop = int(dim["stop"]) if dim["stop"] else None
            step = int(dim["step"] or 1)
            axis_range = Range(
                axis=axis,
                start=start,
                stop=stop,
                step=step,
            )
            ranges.append(axis_range)
    return _Dimensions(tuple(dims), tuple(ranges))


def _weight(path: str, text: str, entry: Entry, number: int) -> Weight:
    """Reads one kind of weight from `text`, such as `"query: embed (heads dim)"`, of
    the array at `path`. `number` is its index among the kinds of the array, whose entry
    in the layout is `entry`. Raises `MapError` if it cannot be read or has an axis
    twice.
    """
    line = _LINE.fullmatch(text)
    dimensions = _dimensions(line["axes"].strip()) if line is not None else None
    if line is None or dimensions is None or len(dimensions.ranges) > 1:
        raise MapError(
            f"{quoted(path)}: {quoted(text)} cannot be read; write the kind and its"
            ' axes, as in "query: layers[:3] embed (heads dim)", where at most one'
            " axis has a range."
        )
    span = dimensions.ranges[0] if dimensions.ranges else None
    weight = Weight(
        kind=line["kind"],
        path=path,
        dims=dimensions.dims,
        range=span,
        in_path=pattern(path).names,
        entry=entry,
        number=number,
    )
    axes = [*weight.axes, *weight.in_path]
    axes += [span.axis for span in dimensions.ranges if not span.step]
    for axis in axes:
        if axes.count(axis) > 1:
            raise MapError(
                f"{quoted(path)}: {quoted(text)} has the axis `{axis}` twice, in braces"
                " or without."
            )
    return weight
