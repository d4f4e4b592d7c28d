"""The leaves that a load makes, each with the stored arrays from which it is made.

A leaf may have one dtype in the plan and another one in the checkpoint. The argument
`dtype` of `load` decides about casts: `None` allows none, `"plan"` allows casts to the
plan's dtypes, and with a dtype such as bfloat16, all floating-point arrays are cast to
it.

A `Target` is the tree that a load makes: the path, shape, dtype and sharding of each
array, and its other leaves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from .._convert import (
    Made,
    Piece,
    Struct,
    TreeMap,
    bound_before,
    cast,
    extended,
    names_of,
)
from .._ground.boxes import Box, volume
from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.spec import DType
from .._ground.text import printable, quoted
from .._plan import Target, target_of
from . import _metadata as prng
from ._entry import FileArray, ListedArray, StoreArray, itemsize
from ._index import Index, some, struct
from ._metadata import from_metadata, is_number


_SHOWN = 20
# The treatment of stored arrays from which no leaf is made: an error, or they are left
# out.
Unread = Literal["raise", "allow"]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafToLoad:
    """One leaf to load, and the stored arrays from which it is made. A leaf of PRNG
    keys is read as key data.

    **Arguments:**

    - `path`, `shape`, `dtype`, `sharding`: those of the array that is read.
    - `entries`: the stored arrays.
    - `pieces`: the copies from the stored arrays that fill the leaf; `None` if the leaf
      is one stored array.
    - `keys`: for key data, the dtype of the PRNG keys; `None` for all other arrays.
    - `is_cast_by_map`: whether a map states every cast. Then no value is refused
      because a cast changes it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DType
    sharding: Any
    entries: tuple[FileArray | StoreArray, ...]
    pieces: tuple[Piece, ...] | None
    keys: Any = None
    is_cast_by_map: bool = False


def leaves_to_load(
    index: Index,
    plan: object,
    dtype: object,
    map: TreeMap | None = None,
    unread: Unread = "raise",
) -> tuple[list[LeafToLoad], Callable[[Sequence[Any]], Any]]:
    """The leaves to load for a plan, and a function that makes the tree from their
    loaded arrays.

    `plan` is a plan, or a tree of arrays or structs with shardings. Raises one
    `CheckpointError` with every leaf that cannot be read, or with the stored arrays
    that no leaf uses. With a map, raises `MapError` if the map does not fit, or
    `CheckpointError` with the first leaf that cannot be read.
    """
    target = target_of(plan, "load")
    if map is not None:
        return _by_map(index, target, map, dtype), lambda values: target.filled(
            values, {}
        )
    found: list[LeafToLoad] = []
    problems: list[tuple[str, CheckpointError | None]] = []
    # A model has many leaves of few kinds: a result for one leaf holds for all of its
    # kind.
    known: dict[object, Any] = {}
    for path, leaf in target.arrays:
        entry = index.by_path.get(path)
        if entry is None:
            # The texts of the problems take time to make, and there may be thousands.
            problems.append((path, None))
            continue
        kind = (entry.shape, entry.dtype, leaf.shape, leaf.dtype)
        if kind in known and isinstance(entry, FileArray | StoreArray):
            found.append(
                LeafToLoad(path, leaf.shape, known[kind], leaf.sharding, (entry,), None)
            )
            continue
        try:
            found.append(_unmapped_leaf(index, path, leaf, dtype))
        except CheckpointError as error:
            problems.append((path, error))
            continue
        if found[-1].keys is None:
            known[kind] = found[-1].dtype
    kept = _numbers(index, target, problems)
    if problems:
        shown = [
            f"leaf `{printable(path)}`: {_text(index, path, problem)}"
            for path, problem in problems[:_SHOWN]
        ]
        more = (
            f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        )
        raise CheckpointError(
            f"{len(problems)} of {len(target.arrays)} leaves cannot be read from"
            f" {index.directory!r}; nothing was read:\n  " + "\n  ".join(shown) + more
        )
    if unread != "allow":
        _require_all_read(index, target)
    return found, lambda values: target.filled(values, kept)


def _require_all_read(index: Index, target: Target) -> None:
    """Raises `CheckpointError` for stored arrays that no leaf uses, such as those of a
    layer that the plan lacks.
    """
    # `target.others` has the paths of the arrays that `plan.select` left out.
    read = {path for path, _ in target.arrays} | {path for _, path, _ in target.others}
    left = [path for path in index.by_path if path not in read]
    if left:
        raise CheckpointError(
            f"the checkpoint {index.directory!r} has {len(left)} of its"
            f" {len(index.by_path)} arrays in no leaf of the plan: {some(left)};"
            " nothing was read. Plan the whole tree, and load a part of it by"
            ' `plan.select(...)`; or pass `unread="allow"` if the others are not'
            " needed."
        )


def _by_map(
    index: Index, target: Target, map: TreeMap, dtype: object
) -> list[LeafToLoad]:
    """The leaves of `target`, each with the stored arrays from which the map makes it."""
    source = {
        entry.path: Struct(entry.shape or (), entry.dtype) for entry in index.entries
    }
    # The dtype of a leaf is decided below, by the rules of all loading.
    leaves = {
        path: Struct(tuple(leaf.shape), leaf.dtype if dtype is None else None)
        for path, leaf in target.arrays
    }
    made_by = bound_before(map, tuple(source.items()), tuple(leaves.items()))
    found = []
    for (path, leaf), made in zip(target.arrays, made_by.values(), strict=True):
        names = dict.fromkeys(name for piece in made.pieces for name in names_of(piece))
        entries = tuple([_loadable(index, name) for name in names])
        found.append(
            _leaf(
                path,
                leaf,
                made.shape,
                made.dtype,
                entries,
                dtype,
                f"leaf `{printable(path)}`",
                made,
            )
        )
    return found


def _numbers(
    index: Index, target: Target, problems: list[tuple[str, CheckpointError | None]]
) -> dict[int, Any]:
    """The Python numbers that a checkpoint has for the tree of `target`. A key is a
    number's position among all leaves.

    For a number that the checkpoint lacks, its path and an error are added to
    `problems`.
    """
    saved = from_metadata(index.metadata, index.directory)
    kept: dict[int, Any] = {}
    for at, path, value in target.others:
        if saved is not None and path in saved:
            kept[at] = saved[path]
        # A checkpoint from another library has no Python numbers: the tree keeps its
        # own, as it keeps functions.
        elif is_number(value) and (saved is not None or path in index.by_path):
            lacks = "has an array" if path in index.by_path else "has no number"
            fix = (
                "plan it as `jnp.asarray(...)`"
                if path in index.by_path
                else "take it out of the tree"
            )
            problems.append(
                (
                    path,
                    CheckpointError(
                        f"it is {value!r} here, and the checkpoint {lacks} there;"
                        f" {fix}."
                    ),
                )
            )
    return kept


def _text(index: Index, path: str, problem: CheckpointError | None) -> str:
    if problem is not None:
        return str(problem)
    if path in (from_metadata(index.metadata, index.directory) or {}):
        return (
            "the checkpoint has a Python number there, and no array; give the tree a"
            " number, as in `int(step)`."
        )
    return str(index.unknown(path))


def _unmapped_leaf(index: Index, path: str, leaf: Any, dtype: DType) -> LeafToLoad:
    entry = _loadable(index, path)
    one, name = struct(entry, index), quoted(path)
    # This error says more than the difference of the shapes.
    _is_keys(leaf.dtype, one.dtype, name)
    if one.shape != tuple(leaf.shape):
        fix = "plan from the checkpoint's own shapes with `checkpoint.structs(index)`"
        if one.shape[::-1] == tuple(leaf.shape) and len(one.shape) == 2:
            fix = (
                f"torch keeps weights as [out, in]: `map=TreeMap({{{name}:"
                f" From({name}).T}})`"
            )
        raise CheckpointError(
            f"{name} gives shape {one.shape}, but the plan has {tuple(leaf.shape)};"
            f" {fix}."
        )
    return _leaf(path, leaf, one.shape, one.dtype, (entry,), dtype, name)


def _leaf(
    path: str,
    planned: Any,
    shape: tuple[int, ...],
    stored: DType,
    entries: tuple[FileArray | StoreArray, ...],
    dtype: object,
    what: str,
    made: Made | None = None,
) -> LeafToLoad:
    """The leaf to load for `planned`, the plan's leaf. Raises `CheckpointError` for a
    cast that `dtype` does not allow.

    `shape` and `stored` are the shape and the dtype before the cast, and `what` is the
    name of the leaf in errors. `made` is the leaf as a map makes it; without a map, the
    leaf is the only array in `entries`.
    """
    if not _is_keys(planned.dtype, stored, what):
        to = _dtype(planned.dtype, stored, dtype, what)
        pieces, is_cast = (
            (None, False) if made is None else (cast(made, to).pieces, made.dtype == to)
        )
        return LeafToLoad(
            path, shape, to, planned.sharding, entries, pieces, None, is_cast
        )
    if not isinstance(planned.sharding, NamedSharding | SingleDeviceSharding):
        # The key data has more dimensions than the keys, and other shardings might
        # divide these.
        raise LeafTypeError(
            f"leaf `{path}` holds PRNG keys under a {type(planned.sharding).__name__};"
            " give a NamedSharding, or a SingleDeviceSharding."
        )
    one = prng.bits_of(planned.dtype)
    bits = tuple([prng.as_bits(entry) for entry in entries])
    pieces = (
        None
        if made is None
        else tuple([extended(piece, one.shape) for piece in made.pieces])
    )
    own = (*shape, *one.shape)
    return LeafToLoad(
        path, own, np.dtype(one.dtype), planned.sharding, bits, pieces, planned.dtype
    )


def _loadable(index: Index, name: str) -> FileArray | StoreArray:
    entry = index[name]
    if isinstance(entry, ListedArray):
        raise CheckpointError(
            f"the checkpoint lists {quoted(name)}, but there is no .zarray and no"
            f" zarr.json in {quoted(entry.file)}; the array was lost, or never written."
            " Copy the whole checkpoint."
        )
    struct(entry, index)
    return entry


def _is_keys(planned: object, stored: object, what: str) -> bool:
    """Whether a leaf holds PRNG keys, from its dtypes in the plan and in the
    checkpoint. `what` names it in errors.

    Raises `CheckpointError` if only one of them is a dtype of keys, or if the keys
    differ: keys are never cast.
    """
    kinds = [prng.is_key(planned), prng.is_key(stored)]
    if stored == planned or not any(kinds):
        return kinds[0]
    if all(kinds):
        there, here = prng.implementation(stored), prng.implementation(planned)
        raise CheckpointError(
            f"{what} holds PRNG keys of {there}, but the plan has keys of {here}; a key"
            " means something to its own "
            "implementation alone. Plan the state with `jax.random.key(seed,"
            f' impl="{there}")`.'
        )
    bits = "jax.random.key_data(keys)"
    raise CheckpointError(
        f"{what} is {stored}, but the plan has {planned}; of PRNG keys and integers one"
        " does not become the other here. Plan the leaf as it is stored, and use"
        f" `{bits}` or `jax.random.wrap_key_data(bits)` before or after."
    )


def _dtype(planned: Any, stored: Any, asked: Any, what: str) -> DType:
    """The dtype in which a leaf is read, from its dtypes in the plan and in the
    checkpoint. `what` names it in errors.

    Raises `CheckpointError` for a cast that `asked`, the argument `dtype` of `load`,
    does not allow, for a 64-bit dtype that JAX does not hold, and for the loss of an
    imaginary part.
    """
    both = jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(
        planned, jnp.floating
    )
    to = jnp.dtype(asked) if asked != "plan" and asked is not None and both else planned
    if asked != "plan" and (asked is None or not both) and stored != planned:
        raise CheckpointError(
            f'{what} is {stored}, but the plan has {planned}; pass `dtype="plan"` to'
            " cast to the plan's dtypes, or `dtype=...` for all floating-point"
            " arrays."
        )
    if jax.dtypes.canonicalize_dtype(to) != to:
        raise CheckpointError(
            f"{what} would be {to}, which JAX holds only under"
            ' `jax.config.update("jax_enable_x64", True)`; set it, or plan a 32-bit'
            ' dtype and pass `dtype="plan"`.'
        )
    if jnp.issubdtype(stored, jnp.complexfloating) and not jnp.issubdtype(
        to, jnp.complexfloating
    ):
        raise CheckpointError(
            f"{what} is complex and would be cast to {to}; its imaginary part would be"
            " lost."
        )
    return np.dtype(to)


def box_bytes(box: Box, dtype: object) -> int:
    """The number of bytes of a box in host memory."""
    return volume(box) * itemsize(dtype)
