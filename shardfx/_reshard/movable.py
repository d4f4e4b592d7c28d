"""Checks that an array can move between two shardings, and the names of leaves in their
messages.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from .._ground.errors import LeafTypeError, MeshError, SpecError
from .._ground.spec import DType, bits, entries_of, shard_counts


def leaf_name(path: str) -> str:
    """Returns the name of a leaf for a message, from its path. The path of a tree that
    is one array is empty.
    """
    return f"leaf `{path}`" if path else "the array"


# The errors that say what is wrong with one leaf.
LEAF_ERRORS = (SpecError, MeshError, LeafTypeError)


@contextlib.contextmanager
def naming(path_of: Callable[[Any], str], key: object) -> Iterator[None]:
    """Returns a context manager that puts the path of a leaf in front of the message of
    an error that is raised inside it. `path_of` returns the path for `key`, the leaf's
    number or path.
    """
    try:
        yield
    except LEAF_ERRORS as error:
        raise with_path(error, path_of(key)) from error


def with_path(error: Exception, path: str) -> Exception:
    """Returns an error of the same type that has the path of a leaf in front of its
    message.
    """
    return type(error)(f"{leaf_name(path)}: {error}")


def require_movable(shape: tuple[int, ...], dtype: DType, *shardings: Sharding) -> None:
    """Raises `LeafTypeError` for dtypes that JAX moves wrongly, and `SpecError` if one
    of the shardings `shardings` does not divide the shape.
    """
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard"
            " corrupts memory with it; move `x.astype(jnp.int4)` and convert it back."
        )
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            _require_dividing(sharding, shape)


def _require_dividing(sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    """Raises `SpecError` if a sharding has more entries than the shape has dimensions,
    or does not divide one of them.
    """
    spec = sharding.spec
    axis_sizes = sharding.mesh.shape
    if len(entries_of(spec)) > len(shape):
        raise SpecError(
            f"{spec} has more entries than the shape {shape}; drop those at the end."
        )
    counts = shard_counts(spec, len(shape), axis_sizes)
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            raise SpecError(
                f"dim {dim} of shape {shape} does not divide into the {count}"
                f" shards that {spec} wants on mesh {dict(axis_sizes)}; pad it to"
                f" {-(-size // count) * count}, or take the spec from"
                " `shardfx.correct(spec, shape, mesh)`."
            )


def require_reduced(*shardings: Sharding) -> None:
    """Raises `SpecError` if a sharding in `shardings` has unreduced axes: devices then
    hold summands instead of elements.
    """
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
            raise SpecError(
                f"{sharding.spec} has the unreduced axes"
                f" {sorted(sharding.spec.unreduced)}, and a"
                " move adds up no summands; add the array up first with"
                " `jax.sharding.reshard(x, NamedSharding(mesh, P(...)))`."
            )
