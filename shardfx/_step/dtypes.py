"""JAX's dtypes by MLIR's names of them."""

import functools as ft
import re
from typing import Any

import jax.numpy as jnp


_COMPLEX = {"complex<f32>": "complex64", "complex<f64>": "complex128"}


@ft.lru_cache(maxsize=128)
def dtype_of(name: str) -> Any:
    """The dtype of an element type, as "bf16" or "ui8" or "f8E4M3FN"."""
    if name == "i1":
        return jnp.dtype("bool")
    if name in _COMPLEX:
        return jnp.dtype(_COMPLEX[name])
    if found := re.fullmatch(r"(u?)i(\d+)", name):
        return jnp.dtype(f"{found[1]}int{found[2]}")
    if found := re.fullmatch(r"f(\d+)(E.*)", name):
        return jnp.dtype(f"float{found[1]}_{found[2].lower()}")
    return jnp.dtype({"bf": "bfloat", "f": "float"}[name.rstrip("0123456789")] + name.lstrip("bf"))
