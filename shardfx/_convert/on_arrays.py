"""The operations of a map on whole arrays, as anybody would write them: what all faster ways must agree with."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from .casts import cast_array
from .evaluate import check_counted, dim_of, sizes_of


def on_arrays(xp: Any, leaves: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """What each operation does with arrays of `xp`, which is `numpy` or `jax.numpy`."""

    def constant(_: Sequence[Any], value: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return xp.full(shape, value, jnp.dtype(dtype))

    def transpose(parts: Sequence[Any], *order: int) -> Any:
        return xp.transpose(parts[0], order or None)

    def reshape(parts: Sequence[Any], *sizes: int) -> Any:
        return parts[0].reshape(sizes_of(sizes, parts[0].size, "`reshape`"))

    def split(parts: Sequence[Any], dim: int, *sizes: int) -> Any:
        (x,) = parts
        dim = dim_of(dim, x.ndim, "split")
        return x.reshape(*x.shape[:dim], *sizes_of(sizes, x.shape[dim], "`split`"), *x.shape[dim + 1 :])

    def merge(parts: Sequence[Any], dim: int, count: int) -> Any:
        (x,) = parts
        dim = dim_of(dim, x.ndim, "merge")
        return x.reshape(*x.shape[:dim], math.prod(x.shape[dim : dim + count]), *x.shape[dim + count :])

    def stacked(parts: Sequence[Any], dim: int) -> Any:
        return xp.stack(list(parts), axis=dim)

    def concat(parts: Sequence[Any], dim: int, shards: int) -> Any:
        pieces = [xp.split(part, shards, axis=dim) for part in parts]
        return xp.concatenate([pieces[at][shard] for shard in range(shards) for at in range(len(parts))], axis=dim)

    def at(parts: Sequence[Any], index: int, dim: int) -> Any:
        return parts[0][(slice(None),) * dim_of(dim, parts[0].ndim, "at") + (index,)]

    def cut(parts: Sequence[Any], start: int, stop: int | None, dim: int) -> Any:
        return parts[0][(slice(None),) * dim_of(dim, parts[0].ndim, "slice") + (slice(start, stop),)]

    def repeat(parts: Sequence[Any], count: int, dim: int, unit: int) -> Any:
        (x,) = parts
        dim = dim_of(dim, x.ndim, "repeat")
        units = x.reshape(*x.shape[:dim], x.shape[dim] // unit, unit, *x.shape[dim + 1 :])
        return xp.repeat(units, count, axis=dim).reshape(*x.shape[:dim], x.shape[dim] * count, *x.shape[dim + 1 :])

    def pad_to(parts: Sequence[Any], size: int, dim: int, value: Any) -> Any:
        (x,) = parts
        dim = dim_of(dim, x.ndim, "pad_to")
        more = xp.full((*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]), value, x.dtype)
        return xp.concatenate([x, more], axis=dim)

    def cast(parts: Sequence[object], dtype: str) -> Any:
        return cast_array(parts[0], jnp.dtype(dtype))

    def scale(parts: Sequence[Any], block: tuple[int, ...]) -> Any:
        x, by = (part.astype(jnp.float32) for part in parts)
        for dim, size in enumerate(block):
            by = xp.repeat(by, size, axis=dim)
        return x * by[tuple(slice(size) for size in x.shape)]

    def counted(sign: Literal["*", "+"]) -> Callable[..., Any]:
        def run(parts: Sequence[Any], number: float) -> Any:
            (x,) = parts
            wide = x.astype(xp.float64 if x.dtype == xp.float64 else xp.float32)
            by = wide.dtype.type(check_counted(number, x.dtype))
            return (wide * by if sign == "*" else wide + by).astype(x.dtype)

        return run

    return {
        "leaf": leaves.__getitem__,
        "constant": constant,
        "transpose": transpose,
        "reshape": reshape,
        "split": split,
        "merge": merge,
        "stacked": stacked,
        "concat": concat,
        "at": at,
        "slice": cut,
        "repeat": repeat,
        "pad_to": pad_to,
        "cast": cast,
        "scale": scale,
        "times": counted("*"),
        "plus": counted("+"),
    }
