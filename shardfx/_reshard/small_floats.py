"""Small floats as the bits that they are, for programs that move and do not compute."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def on_bits(move: Callable[..., Any]) -> Callable[..., Any]:
    """`move`, a function that moves elements of arrays of one dtype, over integers where those are small floats.

    XLA's CPU compiler turns bfloat16 and floats of fewer bits into larger ones, moves those, and turns them back: twice
    the traffic and the memory, and a NaN does not keep its bits.
    """

    def run(x: Any, *others: Any) -> Any:
        if not is_small_float(x.dtype):
            return move(x, *others)
        integer = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        as_bits = [lax.bitcast_convert_type(y, integer) if y.dtype == x.dtype else y for y in (x, *others)]
        return lax.bitcast_convert_type(move(*as_bits), x.dtype)

    return run


def is_small_float(dtype: Any) -> bool:
    """Whether XLA's CPU compiler has no such numbers and works with larger ones."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16 and jnp.finfo(dtype).bits < 32


def moved(move: Callable[..., object], *arrays: object) -> Any:
    """`move(*arrays)`, traced: on bits where it is compiled for the CPU."""
    return lax.platform_dependent(*arrays, cpu=on_bits(move), default=move)
