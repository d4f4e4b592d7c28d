"""The leaves that a load makes, each with the stored arrays from which it is made.

A leaf may have one dtype in the plan and another one in the checkpoint. The argument
`dtype` of `load` decides about casts: `None` allows none, `"plan"` allows casts to the
plan's dtypes, and with a dtype such as bfloat16, all floating-point arrays are cast to
it.

A `Target` is the tree that a load makes: the path, shape, dtype and sharding of each
array, and its other leaves.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    copied_from,
    extended,
    leaf_made,
    names_of,
    without_rest,
)
from .._ground.boxes import Box, volume
from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.spec import DType
from .._ground.text import plural, printable, quoted
from .._plan import Target, branch_of, target_of
from . import _metadata as prng
from ._entry import FileArray, ListedArray, StoreArray, itemsize
from ._index import Index, some, struct
from ._numbers import (
    Scalar,
    numbers_of,
    routed_numbers,
    saved_numbers,
    unread_numbers,
)
from ._packed import is_packed, raw_entry


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


@dataclasses.dataclass(frozen=True)
class ToLoad:
    """What a load reads, and the tree that it makes.

    **Arguments:**

    - `leaves`: the arrays to load, in the order of the tree.
    - `scalars`: the Python numbers of the tree that are arrays in the checkpoint.
    - `numbers`: the Python numbers of the tree that are in the checkpoint's metadata,
      by their positions among all leaves.
    - `target`: the tree.
    """

    leaves: list[LeafToLoad]
    scalars: list[Scalar]
    numbers: Mapping[int, Any]
    target: Target


def leaves_to_load(
    index: Index,
    plan: object,
    dtype: object,
    map: TreeMap | None = None,
    unread: Unread = "raise",
) -> ToLoad:
    """The leaves to load for a plan.

    `plan` is a plan, or a tree of arrays or structs with shardings. Raises one
    `CheckpointError` with every leaf that cannot be read, or with the stored arrays
    and numbers that no leaf uses. With a map, raises `MapError` if the map does not
    fit, or `CheckpointError` with the first leaf that cannot be read.
    """
    target = target_of(plan, "load")
    if map is not None:
        return _by_map(index, target, map, dtype, unread)
    found: list[LeafToLoad] = []
    problems: list[tuple[str, str | None]] = []
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
            problems.append((path, str(error)))
            continue
        if found[-1].keys is None and found[-1].pieces is None:
            known[kind] = found[-1].dtype
    numbers = numbers_of(index, target, is_lenient=unread == "allow")
    _raise_unreadable(index, target, [*problems, *numbers.problems])
    if unread != "allow":
        _require_all_read(index, target)
    return ToLoad(found, numbers.scalars, numbers.values, target)


def _raise_unreadable(
    index: Index, target: Target, problems: Sequence[tuple[str, str | None]]
) -> None:
    """Raises `CheckpointError` if there are problems: a path, and the text of what is
    wrong with its leaf; `None` if the checkpoint has no array there.
    """
    if not problems:
        return
    shown = []
    for path, problem in problems[:_SHOWN]:
        text = _absent(index, path) if problem is None else problem
        shown.append(f"leaf `{printable(path)}`: {text}")
    key = branch_of([path for path, _ in target.arrays], index.by_path)
    hint = ""
    if key is not None:
        hint = (
            f"\nThe checkpoint has these arrays below `{key}`: load"
            f' `ShardPlan.join({key}=plan)` with `unread="allow"`.'
        )
    elif len(problems) < len(target.arrays) and any(
        text is None for _, text in problems
    ):
        hint = (
            "\nOf what it lacks nothing can be read: load the others by"
            " `plan.select(...)`, and combine them with a new tree."
        )
    rest = len(problems) - _SHOWN
    count = len(target.arrays) + len(target.others)
    raise CheckpointError(
        f"{len(problems)} of {count} leaves cannot be read from"
        f" {index.directory!r}; nothing was read:\n  "
        + "\n  ".join(shown)
        + (f"\n  and {rest} more" if rest > 0 else "")
        + hint
    )


def _require_all_read(index: Index, target: Target) -> None:
    """Raises `CheckpointError` for stored arrays and numbers that no leaf uses, such as
    those of a layer that the plan lacks.
    """
    # `target.others` has the paths of the arrays that `plan.select` left out.
    read = {path for path, _ in target.arrays} | {leaf.path for leaf in target.others}
    arrays = [path for path in index.by_path if path not in read]
    numbers = unread_numbers(index, target)
    kinds = []
    if arrays:
        kinds.append(f"{len(arrays)} of its {len(index.by_path)} arrays")
    if numbers:
        kinds.append(plural(len(numbers), "Python number"))
    if kinds:
        raise CheckpointError(
            f"the checkpoint {index.directory!r} has {' and '.join(kinds)} in no leaf"
            f" of the plan: {some([*arrays, *numbers])}; nothing was read. Plan the"
            " whole tree, and load a part of it by `plan.select(...)`; or pass"
            ' `unread="allow"` if the others are not needed.'
        )


def _by_map(
    index: Index, target: Target, map: TreeMap, dtype: object, unread: Unread
) -> ToLoad:
    """The leaves of `target`, each with the stored arrays from which the map makes it."""
    saved = saved_numbers(index) or {}
    source = {
        entry.path: Struct(entry.shape or (), entry.dtype) for entry in index.entries
    }
    source |= {path: Struct((), np.dtype(type(saved[path]))) for path in saved}
    # The dtype of a leaf is decided below, by the rules of all loading.
    leaves = {
        path: Struct(tuple(leaf.shape), leaf.dtype if dtype is None else None)
        for path, leaf in target.arrays
    }
    routes: dict[int, str] = {}
    for leaf in target.others:
        route = copied_from(map.steps, leaf.path) if leaf.is_number else None
        if route is not None and route in source:
            routes[leaf.position] = route
            leaves[leaf.path] = Struct((), source[route].dtype)
    if unread == "allow":
        map = without_rest(map)
    made_by = bound_before(map, tuple(source.items()), tuple(leaves.items()))
    numbers = routed_numbers(index, target, routes)
    _raise_unreadable(index, target, numbers.problems)
    found = []
    for path, leaf in target.arrays:
        made = made_by[path]
        names = dict.fromkeys(_names_in(made))
        if saved:
            _require_arrays(path, names, saved)
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
    return ToLoad(found, numbers.scalars, numbers.values, target)


def _names_in(made: Made) -> Iterator[str]:
    """Yields the paths of the arrays from which a map makes a leaf."""
    for piece in made.pieces:
        if piece.value.scale is not None:
            yield from names_of(piece)
        elif piece.value.path is not None:
            yield piece.value.path


def _require_arrays(
    path: str, names: Iterable[str], saved: Mapping[str, object]
) -> None:
    for name in names:
        if name in saved:
            raise CheckpointError(
                f"leaf `{printable(path)}` would be made of {quoted(name)}, which is the"
                f" Python number {saved[name]!r:.60} in the checkpoint and no array;"
                f" give the tree a number there, as in `int(step)`, and copy it:"
                f" `{{{quoted(path)}: {quoted(name)}}}`."
            )


def _absent(index: Index, path: str) -> str:
    if path in (saved_numbers(index) or {}):
        return (
            "the checkpoint has a Python number there, and no array; give the tree a"
            " number, as in `int(step)`."
        )
    return str(index.unknown(path))


def _unmapped_leaf(index: Index, path: str, leaf: Any, dtype: DType) -> LeafToLoad:
    listed = index[path]
    if isinstance(listed, FileArray) and is_packed(listed):
        # The plan says whether the elements or the bytes are loaded.
        raw = raw_entry(listed)
        if (raw.dtype, raw.shape) == (leaf.dtype, tuple(leaf.shape)):
            return _leaf(path, leaf, raw.shape, raw.dtype, (raw,), dtype, quoted(path))
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
    if made is None and is_packed(entries[0]):
        # The elements are unpacked piece by piece.
        made = leaf_made(entries[0].path, Struct(shape, stored))
    if not _is_keys(planned.dtype, stored, what):
        to = _dtype(planned.dtype, stored, dtype, what)
        pieces, is_cast = None, False
        if made is not None:
            pieces, is_cast = cast(made, to).pieces, made.dtype == to
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
    if isinstance(entry, FileArray) and entry.dtype is not None:
        return entry
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
