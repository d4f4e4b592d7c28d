"""Random operations that index: gathers, scatters, dynamic slices and updates."""

import random

import jax
import jax.numpy as jnp
from jax import lax

from ._data import Operand
from ._operations import (
    NUMBERS,
    Drawn,
    Shape,
    at,
    dimension,
    index_values,
    operation,
    size,
    with_size,
)


@operation(weight=2)
class Take:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dim = dimension(draws, shape)
        rank = draws.choice((1, 1, 2)) if len(shape) < 4 else 1
        index_shape = tuple(size(draws) for _ in range(rank))
        mode = draws.choice(("clip", "fill", "wrap", None))
        index = Operand(index_shape, index_values(draws, shape[dim]))
        return {"dim": dim, "mode": mode}, [index]

    @staticmethod
    def apply(x, index, dim, mode):
        return jnp.take(x, index, axis=dim, mode=mode)


@operation((1, 3))
class TakeAlong:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dim = dimension(draws, shape)
        index_shape = with_size(shape, dim, size(draws))
        mode = draws.choice(("clip", "fill", None))
        index = Operand(index_shape, index_values(draws, shape[dim]))
        return {"dim": dim, "mode": mode}, [index]

    @staticmethod
    def apply(x, index, dim, mode):
        return jnp.take_along_axis(x, index, axis=dim, mode=mode)


@operation((2, 4), weight=1.5)
class GatherPairs:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dims = draws.sample(range(len(shape)), 2)
        length = size(draws)
        mode = draws.choice(("clip", "fill", None))
        indices = [Operand((length,), index_values(draws, shape[dim])) for dim in dims]
        return {"dims": dims, "mode": mode}, indices

    @staticmethod
    def apply(x, first, second, dims, mode):
        entries = list(at(x.ndim, dims[0], first))
        entries[dims[1]] = second
        return x.at[tuple(entries)].get(mode=mode)


@operation(weight=3)
class Scatter:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dim = dimension(draws, shape)
        kind = draws.choice(("set", "set", "add", "add", "max", "min", "mul"))
        mode = draws.choice(("drop", "clip", None))
        length = size(draws)
        values = index_values(draws, shape[dim])
        if kind in ("set", "mul"):
            length = min(length, shape[dim])
            values = f"permuted:{shape[dim]}"
        if kind == "set" and draws.random() < 0.4:
            values = f"apart:{shape[dim]}"
            mode = "drop"
        update = Operand(with_size(shape, dim, length))
        parameters = {"dim": dim, "kind": kind, "mode": mode}
        return parameters, [Operand((length,), values), update]

    @staticmethod
    def apply(x, index, update, dim, kind, mode):
        # A product has a gradient where each index occurs once.
        is_unique = kind == "mul"
        place = x.at[at(x.ndim, dim, index)]
        return getattr(place, kind)(update, mode=mode, unique_indices=is_unique)


@operation(weight=1.5)
class ScatterSlice:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dim = dimension(draws, shape)
        low = draws.randrange(shape[dim])
        parameters = {
            "dim": dim,
            "kind": draws.choice(("set", "add", "mul", "max")),
            "low": low,
            "high": draws.choice((None, low + 1)),
            "stride": draws.choice((1, 1, 2)),
        }
        return parameters, []

    @staticmethod
    def apply(x, dim, kind, low, high, stride):
        place = x.at[at(x.ndim, dim, slice(low, high, stride))]
        return getattr(place, kind)(2)


@operation((2, 4), weight=2)
class ScatterPairs:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        first, second = sorted(draws.sample(range(len(shape)), 2))
        kind = draws.choice(("add", "max", "set"))
        length = size(draws)
        values = index_values(draws, shape[first])
        mode = draws.choice(("drop", "clip", None))
        if kind == "set":
            length = min(length, shape[first])
            values = f"permuted:{shape[first]}"
            mode = draws.choice(("drop", None))
        rest = tuple(
            extent for dim, extent in enumerate(shape) if dim not in (first, second)
        )
        is_adjacent = second == first + 1
        update_shape = (length, *rest)
        if is_adjacent:
            update_shape = (*shape[:first], length, *shape[second + 1 :])
        operands = [
            Operand((length,), values),
            Operand((length,), index_values(draws, shape[second])),
            Operand(update_shape),
        ]
        return {"dims": [first, second], "kind": kind, "mode": mode}, operands

    @staticmethod
    def apply(x, first, second, update, dims, kind, mode):
        entries = list(at(x.ndim, dims[0], first))
        entries[dims[1]] = second
        return getattr(x.at[tuple(entries)], kind)(update, mode=mode)


@operation((1, 3), weight=1.5)
class Segment:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        segments = size(draws)
        kind = draws.choice(("sum", "sum", "max", "min", "prod"))
        index = Operand((shape[0],), index_values(draws, segments))
        return {"segments": segments, "kind": kind}, [index]

    @staticmethod
    def apply(x, index, segments, kind):
        reduce = getattr(jax.ops, f"segment_{kind}")
        result = reduce(x, index, num_segments=segments)
        # An empty segment is an infinity or the smallest integer.
        return jnp.clip(result, -1000, 1000)


def _slice_sizes(draws: random.Random, shape: Shape) -> list[int]:
    """The sizes of a random slice: about half of them take a whole dimension."""
    sizes = []
    for extent in shape:
        is_whole = draws.random() < 0.5
        sizes.append(extent if is_whole else draws.randint(1, extent))
    return sizes


@operation(weight=2)
class DynamicSlice:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        sizes = _slice_sizes(draws, shape)
        return {"sizes": sizes}, [Operand((len(shape),), f"loose:{max(shape)}")]

    @staticmethod
    def apply(x, start, sizes):
        return lax.dynamic_slice(x, [start[dim] for dim in range(x.ndim)], sizes)


@operation(weight=2)
class DynamicUpdate:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        sizes = _slice_sizes(draws, shape)
        start = Operand((len(shape),), f"loose:{max(shape)}")
        return {}, [start, Operand(tuple(sizes))]

    @staticmethod
    def apply(x, start, update):
        starts = [start[dim] for dim in range(x.ndim)]
        return lax.dynamic_update_slice(x, update, starts)


@operation((2, 3), ("float32",))
class MappedUpdate:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        sizes = tuple(draws.randint(1, extent) for extent in shape[1:])
        start = Operand((shape[0], len(shape) - 1), f"loose:{max(shape)}")
        return {}, [start, Operand((shape[0], *sizes))]

    @staticmethod
    def apply(x, start, update):
        def one_row(row, start, update):
            starts = [start[dim] for dim in range(row.ndim)]
            return lax.dynamic_update_slice(row, update, starts)

        return jax.vmap(one_row)(x, start, update)


@operation((2, 3), ("float32",))
class MappedSlice:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        sizes = [draws.randint(1, extent) for extent in shape[1:]]
        start = Operand((shape[0], len(shape) - 1), f"loose:{max(shape)}")
        return {"sizes": sizes}, [start]

    @staticmethod
    def apply(x, start, sizes):
        def one_row(row, start):
            return lax.dynamic_slice(row, [start[d] for d in range(row.ndim)], sizes)

        return jax.vmap(one_row)(x, start)


@operation((1, 3), ("float32", "int32"))
class DynamicRoll:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        return {"dim": dimension(draws, shape)}, [Operand((1,), "loose:8")]

    @staticmethod
    def apply(x, amount, dim):
        return jnp.roll(x, amount[0], dim)


@operation(weight=1.5)
class Sort:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kinds = ("sort", "argsort", "top_k", "argmax", "argmin", "by_key", "median")
        parameters = {
            "dim": dimension(draws, shape),
            "kind": draws.choice(kinds),
            "largest": draws.randint(1, shape[-1]),
        }
        return parameters, []

    @staticmethod
    def apply(x, dim, kind, largest):
        if kind == "top_k":
            return lax.top_k(x, largest)[0]
        if kind == "by_key":
            key = jnp.abs(x).astype(jnp.int32)
            return lax.sort((key, x), dimension=dim, num_keys=2)[1]
        return getattr(jnp, kind)(x, axis=dim)


@operation((1, 2), ("int32",), gradient=False)
class OneHot:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        classes = size(draws)
        return {"classes": classes}, [Operand((classes, size(draws)), "positive")]

    @staticmethod
    def apply(x, table, classes):
        return jax.nn.one_hot(x, classes, dtype=table.dtype) @ table


@operation((1, 1), ("int32",), gradient=False)
class Count:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        kind = draws.choice(("bincount", "searchsorted", "unique", "nonzero"))
        length = size(draws)
        return {"kind": kind, "length": length}, [Operand((length,))]

    @staticmethod
    def apply(x, other, kind, length):
        positive = jnp.abs(x)
        if kind == "bincount":
            return jnp.bincount(positive, length=length)
        if kind == "searchsorted":
            return jnp.searchsorted(jnp.sort(other), positive)
        if kind == "unique":
            return jnp.unique(positive, size=length, fill_value=0)
        return jnp.nonzero(positive > 3, size=length, fill_value=0)[0]


@operation((2, 4), NUMBERS)
class Mask:
    @staticmethod
    def draw(draws: random.Random, shape: Shape) -> Drawn:
        dims = draws.sample(range(len(shape)), 2)
        kind = draws.choice(("triangle", "equal", "modulo"))
        return {"dims": dims, "kind": kind}, [Operand(shape)]

    @staticmethod
    def apply(x, other, dims, kind):
        rows = lax.broadcasted_iota(jnp.int32, x.shape, dims[0])
        columns = lax.broadcasted_iota(jnp.int32, x.shape, dims[1])
        masks = {
            "triangle": rows >= columns,
            "equal": rows == columns,
            "modulo": (rows + 3 * columns) % 4 == 1,
        }
        return jnp.where(masks[kind], x, other.astype(x.dtype))
