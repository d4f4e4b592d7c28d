"""Which dimensions of an operation's operands and results belong together.

A rule names *factors*: the loops that an operation runs over. Each dimension of each operand and result is one factor,
or several, major to minor, where a reshape splits or joins it. Devices that share a factor's loop work side by side;
what that costs is decided by the factor's kind.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal


# "pass": whoever holds a part works on it alone. "sum": parts are added up, and the sum may wait. "join": parts are
# combined in another way (a maximum), at once. "whole": every device needs all of it. "window": as "pass", but
# neighbours exchange the margins of their parts. "shift": as "pass", but parts are sent on, since those of one array
# lie elsewhere than those of the other: a piece of an array, and arrays that are put one behind the other.
Kind = Literal["pass", "sum", "join", "whole", "window", "shift"]
Dim = tuple[int, ...]
Dims = tuple[Dim, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sends:
    """What an operation of a `shard_map` sends by its own word: `kind` along the mesh axes `axes`.

    `share` is the part of the devices that receive, where not all do.
    """

    kind: str
    axes: tuple[str, ...]
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of one operation.

    **Arguments:**

    - `sizes`, `kinds`: of each factor.
    - `operands`, `results`: for each array and each of its dimensions the factors that it runs over, major to minor.
    - `is_linear`: whether partial sums in give partial sums out.
    - `moves`: whether the result is the first operand, in another form or a part of it.
    - `is_simple`: whether an array is laid out the same before and after, so that it is asked first.
    - `is_product`: whether it multiplies two arrays and adds up: compilers match before they move.
    - `flops`: what its products and sums come to on one device, if no other shared them.
    - `margins`: of a "window" factor, how many elements a device needs from its neighbours.
    - `sends`: what it sends whatever the layouts are.
    - `note`: what to say on its rows.
    """

    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    is_linear: bool = False
    moves: bool = False
    is_simple: bool = False
    is_product: bool = False
    flops: float = 0.0
    margins: tuple[tuple[int, int], ...] = ()
    sends: Sends | None = None
    note: str = ""


class Loops:
    """Factors as they are found."""

    def __init__(self):
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []

    def new(self, size: int, kind: Kind = "pass") -> Dim:
        self.sizes.append(size)
        self.kinds.append(kind)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = "pass") -> list[Dim]:
        return [self.new(size, kind) for size in shape]

    def rule(self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]], **more: Any) -> Rule:
        return Rule(
            tuple(self.sizes), tuple(self.kinds), tuple(map(tuple, operands)), tuple(map(tuple, results)), **more
        )


def elementwise(
    given: Sequence[Shape], made: Sequence[Shape], *, is_linear: bool = False, moves: bool = False, **more: Any
) -> Rule:
    """Every operand has the shape of the results, or dimensions of size 1, or none."""
    loops = Loops()
    if len(made) > 1 and len(given) == len(made):  # a barrier: one result for each operand, whatever their shapes
        pairs = [loops.dims(shape) for shape in given]
        return loops.rule(pairs, pairs, is_linear=is_linear, moves=moves, is_simple=True, **more)
    whole = max(made, key=len, default=())
    dims = loops.dims(whole)
    operands, results = ([_like(loops, dims, whole, shape) for shape in shapes] for shapes in (given, made))
    return loops.rule(operands, results, is_linear=is_linear, moves=moves, is_simple=True, **more)


def _like(loops: Loops, dims: Sequence[Dim], whole: Shape, shape: Shape) -> list[Dim]:
    """The dimensions of an array beside one of the shape `whole`, which has the dimensions `dims`."""
    if len(shape) != len(whole):
        return loops.dims(shape)
    return [dim if size == full else loops.new(size) for dim, size, full in zip(dims, shape, whole, strict=True)]


def opaque(given: Sequence[Shape], made: Sequence[Shape], note: str) -> Rule:
    loops = Loops()
    operands = [loops.dims(shape, "whole") for shape in given]
    kind: Kind = "whole" if given else "pass"
    return loops.rule(operands, [loops.dims(shape, kind) for shape in made], note=note)


def along(axes: Sequence[int], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """Whole along some dimensions, and alone along all others, which operands and results share."""
    loops, rank = Loops(), len(made[0])
    around = [at % rank for at in axes]
    shared = {at: loops.new(size) for at, size in enumerate(made[0]) if at not in around}

    def of(shape: Shape) -> list[Dim]:
        if len(shape) != rank:
            return loops.dims(shape, "whole")
        return [shared[at] if at in shared else loops.new(size, "whole") for at, size in enumerate(shape)]

    return loops.rule([of(shape) for shape in given], [of(shape) for shape in made])


def shifted(axis: int, given: Sequence[Shape], made: Sequence[Shape], **more: Any) -> Rule:
    """As `along`, but the dimension may be cut too, into as many parts in all arrays; then parts are sent."""
    loops, rank = Loops(), len(made[0])
    alike = [loops.new(size) if at != axis % rank else () for at, size in enumerate(made[0])]
    alike[axis % rank] = loops.new(math.gcd(*(shape[axis] for shape in (*given, *made))), "shift")
    return loops.rule([alike] * len(given), [alike] * len(made), **more)
