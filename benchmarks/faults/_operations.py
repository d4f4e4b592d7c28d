"""How a random operation is declared: what it draws, and what it computes.

`draw(draws, shape)` gives the parameters and the operands beside the first array, for
a first array of this shape. `apply(x, *operands, **parameters)` computes the result.
Parameters are JSON.
"""

import dataclasses
import math
import random
import re
from collections.abc import Callable
from typing import Any

from ._data import Operand


Shape = tuple[int, ...]
Drawn = tuple[dict[str, Any], list[Operand]]

FLOATS = ("float32", "bfloat16")
NUMBERS = (*FLOATS, "int32")
ALL = (*NUMBERS, "complex64")


@dataclasses.dataclass(frozen=True)
class RandomOperation:
    """An operation that random programs are made of.

    **Arguments:**

    - `draw`, `apply`: see the module.
    - `ranks`: the smallest and the largest rank of the first array.
    - `dtypes`: the dtypes that it takes.
    - `gradient`: whether it has a gradient that is of use.
    - `weight`: how often it is drawn, beside the others.
    """

    name: str
    draw: Callable[[random.Random, Shape], Drawn]
    apply: Callable[..., Any]
    ranks: tuple[int, int]
    dtypes: tuple[str, ...]
    gradient: bool
    weight: float


OPERATIONS: dict[str, RandomOperation] = {}


def operation(
    ranks: tuple[int, int] = (1, 4),
    dtypes: tuple[str, ...] = NUMBERS,
    *,
    gradient: bool = True,
    weight: float = 1.0,
) -> Callable[[Any], Any]:
    """Adds the decorated class, which holds `draw` and `apply`, to the operations."""

    def add(form: Any) -> Any:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", form.__name__).lower()
        OPERATIONS[name] = RandomOperation(
            name=name,
            draw=form.draw,
            apply=form.apply,
            ranks=ranks,
            dtypes=dtypes,
            gradient=gradient,
            weight=weight,
        )
        return form

    return add


def size(draws: random.Random) -> int:
    """The size of a dimension, mostly one that divides."""
    if draws.random() < 0.75:
        return draws.choice((2, 4, 4, 8, 8, 16, 12, 6))
    return draws.choice((1, 3, 5, 7, 9))


def dimension(draws: random.Random, shape: Shape) -> int:
    """One of the shape's dimensions."""
    return draws.randrange(len(shape))


def count(shape: Shape) -> int:
    """How many elements the shape has."""
    return math.prod(shape)


def index_values(draws: random.Random, limit: int) -> str:
    """The values of indices, in range or not."""
    return f"{draws.choice(('below', 'loose'))}:{limit}"


def with_size(shape: Shape, dim: int, size: int) -> Shape:
    """The shape with another size at one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def at(rank: int, dim: int, index: Any) -> tuple[Any, ...]:
    """An index of one dimension, all others whole."""
    entries: list[Any] = [slice(None)] * rank
    entries[dim] = index
    return tuple(entries)
