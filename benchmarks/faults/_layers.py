"""How a layer of the bank is declared: a function, and the shapes of its arrays in
letters.

`@layer("attention", q="b t h k", v="b s h k")` says which arrays the function takes.
A letter is a size that is drawn once for the layer, `4` is itself, `2*d` a product.
Values other than normal ones follow a colon: `tokens="b t : below v"` are integers
below `v`.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from ._data import Operand, Operation, Program


# What a letter may be. A layer is drawn for meshes whose axes are powers of two, or for
# all meshes; uneven sizes meet constraints that JAX pads.
EVEN: dict[str, tuple[int, ...]] = {
    "b": (4, 8),
    "t": (8, 16),
    "s": (8, 16),
    "d": (8, 16, 32),
    "f": (16, 32),
    "h": (4, 8),
    "k": (4, 8),
    "v": (16, 32),
    "c": (8, 16),
    "o": (8, 16),
    "y": (8, 16),
    "x": (8,),
    "e": (4, 8),
    "n": (2, 4),
    "g": (2, 4),
    "r": (2, 4),
}
# For the mesh of 3 x 2.
SIXES = {letter: (6, 12) for letter in EVEN} | {"x": (6,), "n": (2, 3), "g": (2, 3)}
ODD = {
    "b": (3, 4, 5),
    "t": (7, 8, 9),
    "s": (6, 8, 9),
    "d": (6, 8, 10),
    "f": (9, 12),
    "h": (3, 4),
    "k": (4, 6),
    "v": (10, 13, 16),
    "c": (5, 6, 8),
    "o": (6, 7, 8),
    "y": (7, 8, 9),
    "x": (6, 8),
    "e": (3, 4),
    "n": (2, 3),
    "g": (2,),
    "r": (2, 3),
}
SIZES: dict[str, Mapping[str, tuple[int, ...]]] = {
    "even": EVEN,
    "sixes": SIXES,
    "odd": ODD,
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of the bank.

    **Arguments:**

    - `name`, `family`: its name and the kind of model part that it is.
    - `function`: takes the arrays, and the mesh if `takes_mesh`.
    - `arrays`: shape and values of each array, in letters.
    - `gradient`: whether its gradient is of use.
    """

    name: str
    family: str
    function: Callable[..., Any]
    arrays: tuple[str, ...]
    gradient: bool
    takes_mesh: bool


LAYERS: dict[str, Layer] = {}


def layer(
    family: str, *, gradient: bool = True, takes_mesh: bool = False, **arrays: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the decorated function to the bank."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        assert name not in LAYERS, f"two layers are called {name}"
        LAYERS[name] = Layer(
            name=name,
            family=family,
            function=function,
            arrays=tuple(arrays.values()),
            gradient=gradient,
            takes_mesh=takes_mesh,
        )
        return function

    return add


def draw(entry: Layer, draws: random.Random, sizes: str) -> Program:
    """A program of this layer with sizes drawn from `SIZES[sizes]`."""
    chosen = {letter: draws.choice(choice) for letter, choice in SIZES[sizes].items()}
    text = " ".join(entry.arrays)
    used = {letter: size for letter, size in chosen.items() if letter in text}
    is_gradient = entry.gradient and draws.random() < 0.6
    return sized(entry, used, is_gradient)


def sized(entry: Layer, sizes: Mapping[str, int], gradient: bool) -> Program:
    """The layer with these sizes of its letters."""
    operands = [_operand(array, sizes) for array in entry.arrays]
    layer_op = Operation(entry.name, {"sizes": dict(sizes)}, tuple(operands[1:]))
    return Program(
        dtype="float32", first=operands[0], operations=(layer_op,), gradient=gradient
    )


def _operand(array: str, sizes: Mapping[str, int]) -> Operand:
    shape_text, _, values_text = array.partition(":")
    shape = tuple(_size(token, sizes) for token in shape_text.split())
    if not values_text:
        return Operand(shape)
    kind, *limit = values_text.split()
    values = f"{kind}:{_size(limit[0], sizes)}" if limit else kind
    return Operand(shape, values)


def _size(token: str, sizes: Mapping[str, int]) -> int:
    """The size that a token such as `b`, `4`, `2*d` or `t+1` stands for."""
    size_by_factor = {str(size): size for size in range(100)} | dict(sizes)
    return sum(
        math.prod(size_by_factor[factor] for factor in term.split("*"))
        for term in token.split("+")
    )
