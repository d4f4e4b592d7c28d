"""Moving one array, live or traced, through the steps of a Redistribution."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding


def move(
    x: jax.Array, dst: NamedSharding, *, src: NamedSharding | None = None, donate: bool = False
) -> jax.Array:
    """`x` in the sharding `dst`: bounded memory, little traffic, bitwise the same values.

    **Arguments:**

    - `x`: a live array, or a traced value inside `jit`. Differentiable: the cotangent is moved back.
    - `dst`: a NamedSharding on a mesh of the same devices (for a live array in any order; inside `jit` the
        order must be the one of the other shardings, as JAX demands).
    - `src`: where `x` lies; read from live arrays and from Explicit types. Inside `jit` under Auto axes it has
        to be given; a wrong one costs a reshard and is no error.
    - `donate`: gives the buffers of a live `x` up; no effect inside `jit`.

    **Returns:**

    The array. Of a live array the sharding is checked to be `dst`.

    **Raises:**

    `LeafTypeError` for dtypes that JAX itself moves wrongly (int2, uint2); `SpecError` where `src` is needed
    and missing, or a sharding does not divide the shape; `MeshError` for meshes over different devices.
    """
    raise AssertionError("the executor follows")


def move_group(
    xs: Sequence[jax.Array], dst: NamedSharding, *, src: NamedSharding | None = None, donate: bool = False
) -> list[jax.Array]:
    """`move` for several arrays of one shape, dtype and source, each by the same compiled program.

    **Arguments:**

    - `xs`: arrays, all live or all traced, of the same shape and dtype and in the same sharding.
    - `dst`, `src`, `donate`: as for `move`.

    **Returns:**

    The arrays in `dst`, in order.
    """
    raise AssertionError("the executor follows")


def compiled_move(shape: tuple[int, ...], dtype, src: NamedSharding, dst: NamedSharding) -> str:
    """Which program a move uses: "none" (nothing to do), "xla" (XLA's own is within the bound) or "steps"."""
    raise AssertionError("the executor follows")
