"""PRNG keys in files: their bits are saved as integers, and the name of their implementation in the metadata."""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from .._ground.errors import LeafTypeError, PlanFormatError
from .._plan.codec import decode_dtype, encode_dtype
from ._entry import FileArray


_PREFIX = "key<"


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@ft.lru_cache(maxsize=64)
def bits_of(dtype: Any) -> jax.ShapeDtypeStruct:
    """What one key of a dtype is made of: for threefry, two uint32."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))


def key_name(dtype: Any) -> str:
    """The name of a key dtype in metadata: `key<threefry2x32>`."""
    return encode_dtype(dtype)


def implementation(dtype: Any) -> str:
    """What JAX calls the implementation of a key dtype: `threefry2x32`."""
    return key_name(dtype).removeprefix(_PREFIX).removesuffix(">")


def key_named(name: Any) -> Any:
    """The key dtype of a name in metadata; `None` for what names none that JAX has."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    try:
        return decode_dtype(name)
    except PlanFormatError:
        return None


def of_bits(entry: FileArray, dtype: Any) -> FileArray:
    """The keys of `dtype` that an array of integers holds; the array itself if it cannot hold them."""
    one, rank = bits_of(dtype), len(entry.shape) - len(bits_of(dtype).shape)
    if rank < 0 or entry.shape[rank:] != one.shape or entry.dtype != one.dtype:
        return entry
    return dataclasses.replace(entry, shape=entry.shape[:rank], dtype=dtype)


def as_bits(entry: Any) -> Any:
    """An array of keys as the array of integers that is in the file; any other as it is."""
    if not isinstance(entry, FileArray) or not is_key(entry.dtype):
        return entry
    one = bits_of(entry.dtype)
    return dataclasses.replace(entry, shape=(*entry.shape, *one.shape), dtype=np.dtype(one.dtype))


def require_whole_keys(sharding: Sharding, path: str) -> None:
    """Raises for shardings that mean something else for the bits of keys, which have more dimensions than they."""
    if isinstance(sharding, NamedSharding | SingleDeviceSharding):
        return
    raise LeafTypeError(
        f"leaf `{path}` holds PRNG keys under a {type(sharding).__name__}; give a NamedSharding, or a "
        "SingleDeviceSharding."
    )


def keys_from(array: jax.Array, dtype: Any) -> jax.Array:
    """Loaded bits as keys again."""
    return jax.random.wrap_key_data(array, impl=implementation(dtype))
