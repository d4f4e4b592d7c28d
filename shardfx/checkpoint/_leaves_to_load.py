"""The leaves that a load makes, each with the stored arrays from which it is made.

A leaf may have one dtype in the plan and another one in the checkpoint. The argument
`dtype` of `load` decides about casts: `None` allows none, `"plan"` allows casts to the
plan's dtypes, and with a dtype such as bfloat16, all floating-point arrays are cast to
it.

A `Target` is the tree that a load makes: the path, shape, dtype and sharding of each
array, and its other leaves.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from .._convert import (
    Made,
    Piece,
    Struct,
    TreeMap,
    bound,
    cast,
    copied_from,
    extended,
    leaf_made,
    read_paths,
    without_rest,
)
from .._ground.boxes import Box, volume
from .._ground.errors import CheckpointError, LeafTypeError, check_type
from .._ground.keys import key_data_struct
from .._ground.spec import DType
from .._ground.text import plural, printable, quoted
from .._plan import Target, branch_of, target_of
from . import _metadata as prng
from ._entry import FileArray, ListedArray, StoreArray, itemsize
from ._index import Index, first_paths_text, struct
from ._loaded_dtype import loaded_dtype
from ._numbers import (
    Scalar,
    numbers_of,
    routed_numbers,
    saved_numbers,
    unread_numbers,
)
from ._packed import is_packed, raw_entry
from ._table import FileTable


_SHOWN = 20
_DIGITS = re.compile(r"\d+")
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
    entries: Sequence[FileArray | StoreArray]
    pieces: Sequence[Piece] | None
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
    if unread not in get_args(Unread):
        raise LeafTypeError(
            f'`unread={unread!r}`: use "raise", or "allow" to leave out what the plan'
            " lacks."
        )
    target = target_of(plan, "load")
    if map is not None:
        return _mapped_leaves_to_load(
            index=index,
            target=target,
            map=map,
            dtype=dtype,
            unread=unread,
        )
    leaves: list[LeafToLoad] = []
    problems: list[tuple[str, str | None]] = []
    # A model has many leaves of few kinds: the dtype in which one leaf is loaded holds
    # for all of its kind.
    dtypes_by_kind: dict[object, Any] = {}
    for path, planned in target.arrays:
        entry = index.by_path.get(path)
        if entry is None:
            # The texts of the problems take time to make, and there may be thousands.
            problems.append((path, None))
            continue
        stored = (entry.shape, entry.dtype, is_packed(entry))
        kind = (*stored, planned.shape, planned.dtype)
        if kind in dtypes_by_kind and isinstance(entry, FileArray | StoreArray):
            leaf = LeafToLoad(
                path=path,
                shape=planned.shape,
                dtype=dtypes_by_kind[kind],
                sharding=planned.sharding,
                entries=(entry,),
                pieces=None,
            )
            leaves.append(leaf)
            continue
        try:
            leaf = _unmapped_leaf(index, path, planned, dtype)
        except CheckpointError as error:
            problems.append((path, str(error)))
            continue
        leaves.append(leaf)
        # Leaves of PRNG keys, or of the elements or the bytes of a packed array, are
        # more than one cast array.
        if leaf.keys is None and leaf.pieces is None and not is_packed(entry):
            dtypes_by_kind[kind] = leaf.dtype
    numbers = numbers_of(index, target, is_lenient=unread == "allow")
    _raise_unreadable(index, target, [*problems, *numbers.problems])
    if unread != "allow":
        _require_all_read(index, target)
    return ToLoad(
        leaves=leaves,
        scalars=numbers.scalars,
        numbers=numbers.values,
        target=target,
    )


def _raise_unreadable(
    index: Index,
    target: Target,
    problems: Sequence[tuple[str, str | None]],
) -> None:
    """Raises `CheckpointError` if there are problems: a path, and the text of what is
    wrong with its leaf; `None` if the checkpoint has no array there.
    """
    if not problems:
        return
    causes = _causes(index, problems)
    lines = []
    for first_path, text, others in causes[:_SHOWN]:
        lines.append(f"leaf `{printable(first_path)}`: {text}")
        if others:
            lines.append(
                f"and so for {len(others)} more leaves: {first_paths_text(others)}"
            )
    if len(causes) > _SHOWN:
        lines.append(f"and {len(causes) - _SHOWN} more")
    count = len(target.arrays) + len(target.others)
    raise CheckpointError(
        f"{len(problems)} of {count} leaves cannot be read from"
        f" {index.directory!r}; nothing was read:\n  "
        + "\n  ".join(lines)
        + _hint_for_unreadable(index, target, problems)
    )


class _Cause(NamedTuple):
    """What is wrong with leaves that cannot be read: the path of the first, its text,
    and the paths of the other leaves with the same text but for the path.
    """

    first_path: str
    text: str
    others: list[str]


def _causes(index: Index, problems: Sequence[tuple[str, str | None]]) -> list[_Cause]:
    """The causes of `problems`, each once, in the order of their first leaves. Leaves
    of repeated layers that the checkpoint lacks have one cause.
    """
    causes: dict[str, _Cause] = {}
    numbers = saved_numbers(index) or {}
    for path, problem in problems:
        kind_of_problem = _DIGITS.sub("", path)
        if problem is not None:
            kind_of_problem = problem.replace(path, "")
        elif path in numbers:
            kind_of_problem = path
        if kind_of_problem in causes:
            causes[kind_of_problem].others.append(path)
        else:
            text = _absence_text(index, path) if problem is None else problem
            causes[kind_of_problem] = _Cause(
                first_path=path,
                text=text,
                others=[],
            )
    return list(causes.values())


def _hint_for_unreadable(
    index: Index,
    target: Target,
    problems: Sequence[tuple[str, str | None]],
) -> str:
    """What to do about leaves that cannot be read, as a line of the error; empty if
    nothing is known.
    """
    key = branch_of([path for path, _ in target.arrays], index.by_path)
    if key is not None:
        return (
            f"\nThe checkpoint has these arrays below `{key}`: load"
            f' `ShardPlan.join({key}=plan)` with `unread="allow"`.'
        )
    key = branch_of([*index.by_path], [path for path, _ in target.arrays])
    if key is not None:
        return (
            f"\nThe checkpoint is that of the part `{key}` of this plan's tree, without"
            f" `{key}/` in its paths: load it by the plan of that part, the plan that"
            f" `ShardPlan.join({key}=plan, ...)` was given."
        )
    is_lacking = any(text is None for _, text in problems)
    if is_lacking and len(problems) < len(target.arrays):
        return (
            "\nOf what it lacks nothing can be read: load the others by"
            " `plan.select(...)`, and combine them with a new tree."
        )
    return ""


def _require_all_read(index: Index, target: Target) -> None:
    """Raises `CheckpointError` for stored arrays and numbers that no leaf uses, such as
    those of a layer that the plan lacks.
    """
    # `target.others` has the paths of the arrays that `plan.select` left out.
    read_paths_of_plan = {path for path, _ in target.arrays} | {
        leaf.path for leaf in target.others
    }
    arrays = [path for path in index.by_path if path not in read_paths_of_plan]
    numbers = unread_numbers(index, target)
    leftover_texts = []
    if arrays:
        leftover_texts.append(f"{len(arrays)} of its {len(index.by_path)} arrays")
    if numbers:
        leftover_texts.append(plural(len(numbers), "Python number"))
    if leftover_texts:
        raise CheckpointError(
            f"the checkpoint {index.directory!r} has {' and '.join(leftover_texts)} in"
            f" no leaf of the plan: {first_paths_text([*arrays, *numbers])}; nothing"
            " was read. Plan the whole tree, and load a part of it by"
            " `plan.select(...)`; or pass"
            ' `unread="allow"` if the others are not needed.'
        )


def _mapped_leaves_to_load(
    index: Index,
    target: Target,
    map: TreeMap,
    dtype: object,
    unread: Unread,
) -> ToLoad:
    """The leaves of `target`, each with the stored arrays from which the map makes it.
    The arguments are those of `leaves_to_load`.
    """
    check_type(
        what="map",
        value=map,
        expected=TreeMap,
        error=LeafTypeError,
        fix="write `map=TreeMap({...})`",
    )
    # The Python numbers of the checkpoint by path. A map uses them like arrays.
    saved = saved_numbers(index) or {}
    source = _structs_by_path(index)
    source |= {path: Struct((), np.dtype(type(saved[path]))) for path in saved}
    # The dtype of a leaf is decided below, by the rules of all loading.
    structs = {}
    for path, planned in target.arrays:
        leaf_dtype = None
        if dtype is None:
            leaf_dtype = planned.dtype
        structs[path] = Struct(tuple(planned.shape), leaf_dtype)
    # The path in the checkpoint by the position of a leaf that is a Python number.
    routes: dict[int, str] = {}
    for other in target.others:
        route = None
        if other.is_number:
            route = copied_from(map.steps, other.path)
        if route is not None and route in source:
            routes[other.position] = route
            structs[other.path] = Struct((), source[route].dtype)
    if unread == "allow":
        # The map need not say what it does with all arrays of the checkpoint.
        map = without_rest(map)
    mapped_leaves = bound(map, source, structs)
    numbers = routed_numbers(index, target, routes)
    _raise_unreadable(index, target, numbers.problems)

    leaves = []
    for path, planned in target.arrays:
        mapped = mapped_leaves[path]
        names = list(dict.fromkeys(read_paths(mapped.pieces)))
        if saved:
            _require_no_numbers(path, names, saved)
        leaf = _leaf_to_load(
            path=path,
            planned=planned,
            shape=mapped.shape,
            stored=mapped.dtype,
            entries=_loadable_entries(index, names),
            dtype=dtype,
            what=f"leaf `{printable(path)}`",
            mapped=mapped,
        )
        leaves.append(leaf)
    return ToLoad(
        leaves=leaves,
        scalars=numbers.scalars,
        numbers=numbers.values,
        target=target,
    )


def _structs_by_path(index: Index) -> dict[str, Struct]:
    """The shape and dtype of each array of a checkpoint by path."""
    entries = index.entries
    if not isinstance(entries, FileTable):
        return {entry.path: Struct(entry.shape or (), entry.dtype) for entry in entries}
    structs = [Struct(kind.shape, kind.dtype) for kind in entries.kinds]
    structs_of_arrays = map(structs.__getitem__, entries.kind_numbers.tolist())
    return dict(zip(entries.paths, structs_of_arrays, strict=True))


def _require_no_numbers(
    path: str,
    names: Iterable[str],
    saved: Mapping[str, object],
) -> None:
    """Raises `CheckpointError` if one of the stored arrays `names`, of which a map
    makes the leaf `path`, is a Python number in the checkpoint. `saved` has these
    numbers by path.
    """
    for name in names:
        if name in saved:
            raise CheckpointError(
                f"leaf `{printable(path)}` would be made of {quoted(name)}, which is"
                f" the Python number {saved[name]!r:.60} in the checkpoint and no"
                f" array; give the tree a number there, as in `int(step)`, and copy it:"
                f" `{{{quoted(path)}: {quoted(name)}}}`."
            )


def _absence_text(index: Index, path: str) -> str:
    """What is wrong with a leaf whose path no stored array has."""
    if path in (saved_numbers(index) or {}):
        return (
            "the checkpoint has a Python number there, and no array; give the tree a"
            " number, as in `int(step)`."
        )
    return str(index.unknown(path))


def _unmapped_leaf(index: Index, path: str, planned: Any, dtype: DType) -> LeafToLoad:
    """The leaf to load at `path` from the stored array with the same path. `planned` is
    the plan's leaf, and `dtype` the argument of `load`.

    Raises `CheckpointError` if the array has another shape, or needs a cast that
    `dtype` does not allow.
    """
    planned_shape = tuple(planned.shape)
    name = quoted(path)
    listed_entry = index[path]
    if isinstance(listed_entry, FileArray) and is_packed(listed_entry):
        # The plan says whether the elements or the bytes are loaded.
        raw_bytes = raw_entry(listed_entry)
        if raw_bytes.dtype == planned.dtype and raw_bytes.shape == planned_shape:
            return _leaf_to_load(
                path=path,
                planned=planned,
                shape=raw_bytes.shape,
                stored=raw_bytes.dtype,
                entries=(raw_bytes,),
                dtype=dtype,
                what=name,
            )
    entry = _loadable_entry(index, path)
    stored = struct(entry, index)
    # This error says more than the difference of the shapes.
    prng.are_keys(planned.dtype, stored.dtype, name)
    if stored.shape != planned_shape:
        fix = "plan from the checkpoint's own shapes with `checkpoint.structs(index)`"
        if stored.shape[::-1] == planned_shape and len(planned_shape) == 2:
            fix = (
                f"torch keeps weights as [out, in]: `map=TreeMap({{{name}:"
                f" From({name}).T}})`"
            )
        raise CheckpointError(
            f"{name} gives shape {stored.shape}, but the plan has {planned_shape};"
            f" {fix}."
        )
    return _leaf_to_load(
        path=path,
        planned=planned,
        shape=stored.shape,
        stored=stored.dtype,
        entries=(entry,),
        dtype=dtype,
        what=name,
    )


def _leaf_to_load(
    path: str,
    planned: Any,
    shape: tuple[int, ...],
    stored: DType,
    entries: Sequence[FileArray | StoreArray],
    dtype: object,
    what: str,
    mapped: Made | None = None,
) -> LeafToLoad:
    """The leaf to load for `planned`, the plan's leaf. Raises `CheckpointError` for a
    cast that `dtype` does not allow.

    `shape` and `stored` are the shape and the dtype before the cast, and `what` is the
    name of the leaf in errors. `mapped` is the leaf as a map makes it; without a map,
    the leaf is the only array in `entries`.
    """
    if mapped is None and is_packed(entries[0]):
        # The elements are unpacked piece by piece.
        mapped = leaf_made(entries[0].path, Struct(shape, stored))
    if prng.are_keys(planned.dtype, stored, what):
        return _key_leaf(
            path=path,
            planned=planned,
            shape=shape,
            entries=entries,
            mapped=mapped,
        )
    leaf_dtype = loaded_dtype(planned.dtype, stored, dtype, what)
    pieces = None
    is_cast_by_map = False
    if mapped is not None:
        pieces = cast(mapped, leaf_dtype).pieces
        is_cast_by_map = mapped.dtype == leaf_dtype
    return LeafToLoad(
        path=path,
        shape=shape,
        dtype=leaf_dtype,
        sharding=planned.sharding,
        entries=entries,
        pieces=pieces,
        is_cast_by_map=is_cast_by_map,
    )


def _key_leaf(
    path: str,
    planned: Any,
    shape: tuple[int, ...],
    entries: Sequence[FileArray | StoreArray],
    mapped: Made | None,
) -> LeafToLoad:
    """The leaf to load for `planned`, PRNG keys of this shape, as key data."""
    if not isinstance(planned.sharding, NamedSharding | SingleDeviceSharding):
        # The key data has more dimensions than the keys, and other shardings might
        # divide these.
        raise LeafTypeError(
            f"leaf `{path}` holds PRNG keys under a {type(planned.sharding).__name__};"
            " give a NamedSharding, or a SingleDeviceSharding."
        )
    key_data = key_data_struct(planned.dtype)
    pieces = None
    if mapped is not None:
        pieces = tuple([extended(piece, key_data.shape) for piece in mapped.pieces])
    return LeafToLoad(
        path=path,
        shape=(*shape, *key_data.shape),
        dtype=np.dtype(key_data.dtype),
        sharding=planned.sharding,
        entries=tuple([prng.as_bits(entry) for entry in entries]),
        pieces=pieces,
        keys=planned.dtype,
    )


def _loadable_entries(
    index: Index,
    names: Sequence[str],
) -> Sequence[FileArray | StoreArray]:
    """The stored arrays with these names. Raises `CheckpointError` for one that cannot
    be read.
    """
    if isinstance(index.entries, FileTable):
        table = index.entries.with_paths(names)
        if all(kind.dtype is not None for kind in table.used_kinds()):
            return table
    return tuple([_loadable_entry(index, name) for name in names])


def _loadable_entry(index: Index, name: str) -> FileArray | StoreArray:
    """The stored array `name`. Raises `CheckpointError` if the checkpoint only lists
    it, or if JAX lacks its dtype.
    """
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


def box_bytes(box: Box, dtype: object) -> int:
    """The number of bytes of a box in host memory."""
    return volume(box) * itemsize(dtype)
