"""Typed PRNG keys and their raw data: an array of integers with further dimensions at
the end, such as two uint32 for a threefry key. Whatever moves, copies or stores keys
does so with their raw data.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@ft.lru_cache(maxsize=64)
def key_data_struct(dtype: object) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the raw data of one key."""
    key = jax.ShapeDtypeStruct((), dtype)
    return jax.eval_shape(jax.random.key_data, key)


def data_of(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of the raw data of an array; for an array that is not of
    keys, its own.
    """
    if not is_key(dtype):
        return shape, np.dtype(dtype)
    data = key_data_struct(dtype)
    return (*shape, *data.shape), np.dtype(data.dtype)


def raw(array: Any) -> Any:
    """The raw data of an array of keys. Other arrays are returned unchanged."""
    if is_key(array.dtype):
        return jax.random.key_data(array)
    return array


def as_keys(data: Any, like: Any) -> Any:
    """Keys of the kind that the array `like` has, from their raw data. If `like` has no
    keys, `data` is returned unchanged.
    """
    if is_key(like.dtype):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    return data


def as_keys_of_dtype(data: Any, dtype: object) -> Any:
    """Keys of dtype `dtype` from their raw data. For another dtype `data` is returned
    unchanged.
    """
    if not is_key(dtype):
        return data
    kind_by_dtype = {key_dtype: kind for kind, key_dtype in key_dtypes().items()}
    return jax.random.wrap_key_data(data, impl=kind_by_dtype[dtype])


@ft.lru_cache(maxsize=1)
def key_dtypes() -> dict[str, Any]:
    """The dtypes of keys by JAX's names of their kinds. They are found without making a
    key.
    """
    dtypes = {}
    for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.eval_shape(ft.partial(jax.random.key, 0, impl=kind))
        dtypes[kind] = key.dtype
    return dtypes
