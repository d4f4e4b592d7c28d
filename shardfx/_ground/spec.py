"""Algebra of PartitionSpecs over plain axis sizes, without meshes, devices or arrays.

Along an unreduced mesh axis of a spec, devices hold partial results: the array is their
sum, maximum or minimum. Along a reduced axis, they hold the result, and its gradient is
unreduced.
"""

import functools as ft
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .errors import SpecError
from .keys import key_data_struct


# A dtype of NumPy, or JAX's dtype of a PRNG key: no public type covers both.
DType: TypeAlias = Any

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
# JAX 0.9 has no `spec.partitions`; later versions refuse to iterate over a spec with
# unreduced axes.
_HAS_PARTITIONS = "partitions" in dir(PartitionSpec)
# In JAX 0.11 and later a spec can be unreduced by maximum or minimum; before, always by
# sum.
_HAS_KINDS = "unreduced_kind" in dir(PartitionSpec)


def entries_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a PartitionSpec as a tuple, in every supported version of JAX."""
    if _HAS_PARTITIONS:
        return spec.partitions
    return tuple(spec)


def entries_at(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    """The entries of a PartitionSpec for an array of rank `rank`. Dimensions that the
    spec leaves out have `None`.
    """
    entries = entries_of(spec)[:rank]
    missing = [None] * (rank - len(entries))
    return (*entries, *missing)


def entry_axes(entry: object) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names, in order. `None` and
    UNCONSTRAINED name no axes.
    """
    if entry is None or entry is UNCONSTRAINED:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise SpecError(
        f"{entry!r} is no entry of a PartitionSpec; it must be a mesh axis, a tuple of"
        " mesh axes, `None` or `PartitionSpec.UNCONSTRAINED`."
    )


def axes_of_entries(entries: Iterable[object]) -> list[str]:
    """The mesh axes that several entries name, in order."""
    axes: list[str] = []
    for entry in entries:
        axes += entry_axes(entry)
    return axes


def canonical_entry(entry: object) -> Any:
    """`entry` in its shortest form: `None` for `()`, and the element for a tuple of one
    element.
    """
    if entry is UNCONSTRAINED:
        return entry
    axes = entry_axes(entry)
    if len(axes) > 1:
        return axes
    if axes:
        return axes[0]
    return None


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """`spec` without trailing `None`s and one-element tuples, so that equal shardings
    compare equal.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx._ground.spec import canonical

        assert canonical(P(("data",), None, None)) == P("data")
        ```
    """
    return trimmed(entries_of(spec), spec)


def trimmed(
    entries: Iterable[object],
    like: PartitionSpec | None = None,
) -> PartitionSpec:
    """The PartitionSpec of `entries` without trailing `None`s.

    With `like`, the result has the unreduced and reduced axes of `like`.
    """
    short = [canonical_entry(entry) for entry in entries]
    while short and short[-1] is None:
        short.pop()
    if like is not None and (like.unreduced or like.reduced):
        return with_reductions(
            short, like.unreduced, like.reduced, unreduced_kind(like)
        )
    return PartitionSpec(*short)


def unreduced_kind(spec: PartitionSpec) -> str:
    """The reduction that the values along the unreduced axes of a spec still need:
    "sum", "max" or "min".
    """
    kind = spec.unreduced_kind if _HAS_KINDS else None  # pyright: ignore[reportAttributeAccessIssue]
    if kind is None:
        return "sum"
    return kind.name


def with_reductions(
    entries: Iterable[object],
    unreduced: Iterable[str],
    reduced: Iterable[str],
    kind: str,
) -> PartitionSpec:
    """The PartitionSpec of `entries` with these unreduced and reduced axes. `kind` is
    "sum", "max" or "min".
    """
    reductions: dict[str, Any] = {
        "unreduced": frozenset(unreduced),
        "reduced": frozenset(reduced),
    }
    if reductions["unreduced"] and kind != "sum":
        if not _HAS_KINDS:
            raise SpecError(
                f"a spec leaves out a {kind}, which JAX {jax.__version__} cannot say;"
                " use 0.11 or later."
            )
        reductions["unreduced_kind"] = jax.sharding.UnreducedKind[kind]  # pyright: ignore[reportAttributeAccessIssue]
    return PartitionSpec(*entries, **reductions)


def without_unconstrained(spec: PartitionSpec) -> PartitionSpec:
    """`spec` with `None` in place of UNCONSTRAINED entries, which JAX refuses at
    `device_put` and at jit boundaries.
    """
    if not any(entry is UNCONSTRAINED for entry in entries_of(spec)):
        return spec
    entries = list(entries_of(spec))
    for dim, entry in enumerate(entries):
        if entry is UNCONSTRAINED:
            entries[dim] = None
    return trimmed(entries, spec)


def shards_over(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of shards into which mesh axes divide a dimension, on a mesh with the
    axis sizes `sizes`.
    """
    return math.prod(sizes[axis] for axis in axes)


def shard_counts(
    spec: PartitionSpec,
    rank: int,
    sizes: Mapping[str, int],
) -> tuple[int, ...]:
    """The number of shards along each of `rank` dimensions under `spec`, on a mesh with
    the axis sizes `sizes`.
    """
    entries = entries_at(spec, rank)
    return tuple(shards_over(entry_axes(entry), sizes) for entry in entries)


def shard_shape(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    sizes: Mapping[str, int],
) -> tuple[int, ...]:
    """The shape of one device's shard of an array of `shape` under `spec`, on a mesh
    with the axis sizes `sizes`.

    The spec must divide the shape evenly.
    """
    counts = shard_counts(spec, len(shape), sizes)
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


@ft.lru_cache(maxsize=256)
def bits(dtype: DType) -> int:
    """The number of bits that one element of `dtype` takes on a device: 4 for `int4`,
    64 for a threefry PRNG key.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = key_data_struct(dtype)
        return math.prod(data.shape) * data.dtype.itemsize * 8
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return dtype.itemsize * 8


_DTYPE = re.compile(
    r"bool|u?int(1|2|4|8|16|32|64)|bfloat16|float(16|32|64|[468]_\w+)|complex(64|128)"
)


def dtype_named(name: str) -> DType | None:
    """The dtype named `name`, if arrays on devices can have it in this version of JAX;
    else `None`.
    """
    # NumPy also takes aliases of other types ("a", "O", "datetime64"), and evaluates
    # parts of a text.
    if not _DTYPE.fullmatch(name):
        return None
    try:
        return jnp.dtype(name)
    except TypeError:
        return None


def array_bytes(shape: tuple[int, ...], dtype: object) -> int:
    """The bytes that XLA allocates for a whole array. Elements of fewer than 8 bits are
    packed.
    """
    return -(-math.prod(shape) * bits(dtype) // 8)
