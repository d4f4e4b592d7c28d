"""Random maps over random trees, for laws."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from shardfx import From, TreeMap, _convert as convert


class Recipe:
    """A `From` that is yet to be made: what hypothesis draws must not call functions
    whose types are checked.
    """

    def __init__(self, make):
        self.make = make

    @property
    def T(self):
        return Recipe(lambda name: self.make(name).T)

    def __getattr__(self, method):
        return lambda *args, **kwargs: Recipe(
            lambda name: getattr(self.make(name), method)(*args, **kwargs)
        )


def leaf(path):
    """A leaf of the source, whose path may have the number of a part, `{i}`."""

    def make(number):
        if number is None:
            return From(path)
        return From(path.replace("{i}", str(number)))

    return Recipe(make)


def written(case):
    """The map of a case, and its arrays."""
    recipe_by_path, arrays = case
    rules = {path: recipe.make(None) for path, recipe in recipe_by_path.items()}
    return TreeMap(rules), arrays


DTYPES = (
    "float32",
    "int32",
    "bfloat16",
    "int8",
    "float16",
    "bool",
    "float8_e5m2",
    "int4",
    "complex64",
)


@st.composite
def chains(draw, start, shape, steps=4, keeps_all=False):
    """An expression over `start`, and its shape; with `keeps_all` nothing of the leaf
    gets lost.
    """
    kinds = ["T", "transpose", "reshape", "merge", "split", "repeat", "pad"]
    if not keeps_all:
        kinds += ["slice", "at"]
    expression = start
    for _ in range(draw(st.integers(0, steps))):
        kind = draw(st.sampled_from(kinds))
        expression, shape = draw(_next(expression, shape, kind))
    return expression, shape


def resized(shape, dim, *sizes):
    """The shape with other sizes, or none, in the place of one dimension."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def divisors_of(size):
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def _next(draw, expression, shape, kind):
    rank = len(shape)
    dim = draw(st.integers(0, max(0, rank - 1)))
    if kind == "T":
        return expression.T, shape[::-1]
    if kind == "transpose" and rank:
        order = draw(st.permutations(range(rank)))
        return expression.transpose(*order), tuple(shape[dim] for dim in order)
    if kind == "reshape":
        sizes = [math.prod(shape)]
        for _ in range(draw(st.integers(0, 2))):
            factors = divisors_of(sizes[-1]) or [1, 2]
            factor = draw(st.sampled_from(factors))
            sizes[-1:] = [factor, sizes[-1] // factor]
        return expression.reshape(*sizes), tuple(sizes)
    if kind == "merge" and rank > 1:
        dim = min(dim, rank - 2)
        merged = shape[dim] * shape[dim + 1]
        return expression.merge(dim), (*shape[:dim], merged, *shape[dim + 2 :])
    if not rank:
        return expression, shape
    return draw(_along(expression, shape, kind, dim))


@st.composite
def _along(draw, expression, shape, kind, dim):
    """What changes one dimension alone."""
    size = shape[dim]
    divisors = divisors_of(size) or [1]
    is_small = math.prod(shape) < 300
    if kind == "split" and len(shape) < 6:
        divisor = draw(st.sampled_from(divisors))
        parts = expression.split(dim, divisor, -1)
        return parts, resized(shape, dim, divisor, size // divisor)
    if kind == "repeat" and is_small:
        unit = draw(st.sampled_from(divisors))
        count = draw(st.integers(1, 3))
        repeated = expression.repeat(count, dim=dim, unit=unit)
        return repeated, resized(shape, dim, size * count)
    if kind == "pad" and is_small:
        padded_size = size + draw(st.integers(0, 3))
        value = draw(st.integers(0, 1))
        padded = expression.pad_to(padded_size, dim=dim, value=value)
        return padded, resized(shape, dim, padded_size)
    if kind == "slice" and size > 1:
        low = draw(st.integers(0, size - 1))
        high = draw(st.integers(low + 1, size))
        return expression.slice(low, high, dim=dim), resized(shape, dim, high - low)
    if kind == "at" and len(shape) > 1 and size:
        index = draw(st.integers(0, size - 1))
        return expression.at(index, dim=dim), resized(shape, dim)
    return expression, shape


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 0]), max_size=3)))


class DrawnRule(NamedTuple):
    """The recipe of a target's array, and the arrays that it takes."""

    recipe: Recipe
    sources: dict[str, np.ndarray]


@st.composite
def rules(draw, name, keeps_all=False, dtypes=DTYPES):
    """A rule for a target `name`: of one part, or of several that are stacked or
    joined.
    """
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    count = draw(st.integers(1, 3))
    part_shape = draw(shapes())
    start = leaf(f"{name}.{{i}}")
    part, shape = draw(chains(start, part_shape, keeps_all=keeps_all))
    kind = draw(st.sampled_from(["one", "stack", "concat", "shards"]))
    if kind == "one" or not shape:
        count = 1
        recipe = Recipe(lambda _: part.make(0))
    elif kind == "stack":
        dim = draw(st.integers(0, len(shape)))
        recipe = part.stack("i", dim=dim)
        shape = (*shape[:dim], count, *shape[dim:])
    else:
        dim = draw(st.integers(0, len(shape) - 1))
        has_shards = kind == "shards" and shape[dim] % 2 == 0
        recipe = _joined(part, count, dim, shards=2 if has_shards else 1)
        shape = resized(shape, dim, shape[dim] * count)
    recipe, _ = draw(chains(recipe, shape, 3, keeps_all))
    sources = {}
    for number in range(count):
        seed = draw(st.integers(0, 9))
        sources[f"{name}.{number}"] = filled(part_shape, dtype, seed)
    return DrawnRule(recipe, sources)


def _joined(part, count, dim, shards):
    def make(_):
        parts = [part.make(number) for number in range(count)]
        return From.concat(parts, dim=dim, shards=shards)

    return Recipe(make)


def filled(shape, dtype, seed=0):
    """An array whose elements tell where they are."""
    numbers = np.arange(math.prod(shape)).reshape(shape) + 37 * seed
    modulus = 2 if dtype.kind == "b" else 101
    return np.asarray(numbers % modulus).astype(dtype)


@st.composite
def maps(draw, keeps_all=False, dtypes=DTYPES):
    """A map that is yet to be `written`, and the arrays of its source."""
    recipe_by_path = {}
    arrays = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        rule = draw(rules(name, keeps_all, dtypes))
        recipe_by_path[f"to/{name}"] = rule.recipe
        arrays |= rule.sources
    return recipe_by_path, arrays


def pieces_of(map, arrays, target=None):
    """What the map makes of the arrays, as pieces of them."""
    return convert.bound(map, convert.structs_of(arrays, arrays.values()), target)


def same(actual, expected):
    """Asserts that shape, dtype and all bytes are equal."""
    actual = np.asarray(actual)
    expected = np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.tobytes() == expected.tobytes()
