"""What a plan asks of a checkpoint: per leaf the arrays it is made of, and the boxes that this process holds."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .._convert import Made, Piece, Struct, TreeMap, bound_before
from .._convert.evaluate import ON_SHAPES, cast, leaf_made
from .._convert.pieces import extended, names_of
from .._ground.boxes import Box, volume
from .._ground.errors import CheckpointError, PlanMismatchError, UnknownPathError
from .._ground.text import printable, quoted
from .._plan.target import Target, target_of
from . import _keys as prng
from ._entry import FileArray, ListedArray, StoreArray, itemsize
from ._index import Index, some, struct
from ._numbers import from_metadata, is_number


@dataclasses.dataclass(frozen=True)
class Take:
    """Where a leaf's values are in a checkpoint, if not in one array of the leaf's own shape.

    **Arguments:**

    - `names`: the array's name; or a tuple of names, whose arrays are stacked along a new first dimension, as a model
        that scans over its layers has them.
    - `transpose`: the order in which the dimensions of (each of) the arrays become the leaf's, as in `numpy.transpose`:
        `(1, 0)` for the weights that torch keeps as `[out, in]`.

    !!! Example

        ```python
        from shardfx import checkpoint

        checkpoint.Take(
            tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(32)), transpose=(1, 0)
        )
        ```
    """

    names: str | tuple[str, ...]
    transpose: tuple[int, ...] | None = None

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the arrays; one, or those of a stack."""
        return (self.names,) if isinstance(self.names, str) else self.names


_SHOWN = 20
Unread = Literal["raise", "allow"]
Rename = Mapping[str, str | Take] | Callable[[str], str | Take] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One leaf: what it will be, and what it is made of. A leaf of PRNG keys is read as their bits.

    **Arguments:**

    - `path`, `shape`, `dtype`, `sharding`: of what is read.
    - `entries`: the arrays that it is made of.
    - `pieces`: which parts of them, and where each belongs; `None` where the leaf is the array as it is.
    - `keys`: the dtype of the PRNG keys that the bits are of, if they are.
    - `is_cast_by_map`: whether a map says all casts, so that no number is refused for what a cast makes of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    entries: tuple[FileArray | StoreArray, ...]
    pieces: tuple[Piece, ...] | None
    keys: Any = None
    is_cast_by_map: bool = False


def wanted(
    index: Index, plan: Any, rename: Rename, dtype: Any, map: TreeMap | None = None, unread: Unread = "raise"
) -> tuple[list[Wanted], Callable[[Sequence[Any]], Any]]:
    """What each array of the plan is made of, and a function from the arrays to the tree.

    Every leaf that cannot be read is named in one error, or every array that no leaf is made of.
    """
    target = target_of(plan, "load")
    if map is not None:
        if rename is not None:
            raise CheckpointError("give `rename` or `map`, not both: a map names the arrays itself.")
        return _by_map(index, target, map, dtype), lambda values: target.filled(values, {})
    found: list[Wanted] = []
    problems: list[tuple[str, CheckpointError | str]] = []
    # A model has many leaves and few kinds of them: what was found out of one holds for all of its kind.
    known: dict[Any, Any] = {}
    for path, leaf in target.arrays:
        entry = index.by_path.get(path) if rename is None else None
        kind = None if entry is None else (entry.shape, entry.dtype, leaf.shape, leaf.dtype)
        if kind in known and isinstance(entry, FileArray | StoreArray):
            found.append(Wanted(path, leaf.shape, known[kind], leaf.sharding, (entry,), None))
            continue
        try:
            take = _take(rename, path)
            absent = [name for name in take.all_names if name not in index.by_path]
            if absent:
                # What to say of it takes a while to find, and there may be thousands.
                problems.append((path, absent[0]))
            else:
                found.append(_wanted(index, path, leaf, take, dtype))
                if kind is not None and found[-1].keys is None:
                    known[kind] = found[-1].dtype
        except CheckpointError as error:
            problems.append((path, error))
    kept = _numbers(index, target, rename, problems)
    if problems:
        shown = [f"leaf `{printable(path)}`: {_text(index, problem)}" for path, problem in problems[:_SHOWN]]
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{len(problems)} of {len(target.arrays)} leaves cannot be read from {index.directory!r}; nothing was "
            "read:\n  " + "\n  ".join(shown) + more
        )
    if unread != "allow":
        _require_all_read(index, target, found, rename)
    return found, lambda values: target.filled(values, kept)


def _require_all_read(index: Index, target: Target, found: Sequence[Wanted], rename: Rename) -> None:
    """Raises for arrays that no leaf is made of, such as the fourth layer's where the plan has three."""
    read = {entry.path for leaf in found for entry in leaf.entries}
    if len(read) == len(index.by_path):
        return
    # A plan knows the paths of the arrays that `plan.select` left out.
    read.update(name for _, path, _ in target.others for name in _take(rename, path).all_names)
    left = [path for path in index.by_path if path not in read]
    if left:
        raise CheckpointError(
            f"the checkpoint {index.directory!r} has {len(left)} of its {len(index.by_path)} arrays in no leaf of the "
            f"plan: {some(left)}; nothing was read. Plan the whole tree, and load a part of it by `plan.select(...)`; "
            'or pass `unread="allow"` if the others are not needed.'
        )


def _by_map(index: Index, target: Target, map: TreeMap, dtype: Any) -> list[Wanted]:
    """What each array is made of where a map says so."""
    source = {entry.path: Struct(entry.shape or (), entry.dtype) for entry in index.entries}
    # What dtype a leaf gets is decided below, by the rules of all loading.
    leaves = {path: Struct(tuple(leaf.shape), leaf.dtype if dtype is None else None) for path, leaf in target.arrays}
    made_by = bound_before(map, tuple(source.items()), tuple(leaves.items()))
    found = []
    for (path, leaf), made in zip(target.arrays, made_by.values(), strict=True):
        names = dict.fromkeys(name for piece in made.pieces for name in names_of(piece))
        entries = tuple([_loadable(index, name) for name in names])
        for entry in entries:
            struct(entry, index)
        if _is_keys(leaf.dtype, [made.dtype], f"leaf `{printable(path)}`"):
            found.append(_wanted_bits(Wanted(path, made.shape, leaf.dtype, leaf.sharding, entries, made.pieces)))
            continue
        to = _dtype(leaf.dtype, [made.dtype], dtype, f"leaf `{printable(path)}`")
        found.append(
            Wanted(path, made.shape, to, leaf.sharding, entries, cast(made, to).pieces, None, made.dtype == to)
        )
    return found


def _numbers(
    index: Index, target: Target, rename: Rename, problems: list[tuple[str, CheckpointError | str]]
) -> dict[int, Any]:
    """By position the Python numbers that the checkpoint has for the tree; what it lacks becomes a problem."""
    saved = from_metadata(index.metadata, index.directory)
    kept: dict[int, Any] = {}
    for at, path, value in target.others:
        if saved is None and not (is_number(value) and path in index.by_path):
            # A checkpoint of another origin knows no Python numbers: the tree keeps its own, as it keeps functions.
            continue
        name = _take(rename, path).all_names[0] if saved else path
        if saved is not None and name in saved:
            kept[at] = saved[name]
        elif is_number(value):
            lacks = "has an array" if name in index.by_path else "has no number"
            fix = "plan it as `jnp.asarray(...)`" if name in index.by_path else "take it out of the tree"
            problems.append((path, CheckpointError(f"it is {value!r} here, and the checkpoint {lacks} there; {fix}.")))
    return kept


def _text(index: Index, problem: CheckpointError | str) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    if problem in (from_metadata(index.metadata, index.directory) or {}):
        return "the checkpoint has a Python number there, and no array; give the tree a number, as in `int(step)`."
    try:
        index[problem]
    except UnknownPathError as error:
        return str(error)
    raise AssertionError(problem)


def _take(rename: Rename, path: str) -> Take:
    if rename is None:
        return Take(path)
    found = rename.get(path, path) if isinstance(rename, Mapping) else rename(path)
    if isinstance(found, str):
        return Take(found)
    if not isinstance(found, Take):
        raise CheckpointError(
            f"`rename` gives {found!r}; it must give a name in the checkpoint, or a `checkpoint.Take`."
        )
    return found


def _wanted(index: Index, path: str, leaf: Any, take: Take, dtype: Any) -> Wanted:
    is_stacked, names = not isinstance(take.names, str), take.all_names
    if not names:
        raise CheckpointError("`Take(())` names no array; give at least one name.")
    entries = tuple([_loadable(index, name) for name in names])
    given = [struct(entry, index) for entry in entries]
    shapes = {one.shape for one in given}
    if len(shapes) > 1:
        raise CheckpointError(f"the arrays to stack have different shapes, {sorted(shapes)}.")
    is_keys = _is_keys(leaf.dtype, [one.dtype for one in given], _named(names))
    pieces, shape = None, given[0].shape
    if is_stacked or take.transpose is not None:
        made = _taken(names, given, take, is_stacked)
        pieces, shape = made.pieces, made.shape
    if shape != tuple(leaf.shape):
        raise CheckpointError(
            f"{_named(names)} gives shape {shape}, but the plan has {tuple(leaf.shape)}"
            + (
                f"; torch keeps weights as [out, in]: `Take({quoted(names[0])}, transpose=(1, 0))`."
                if shape[::-1] == tuple(leaf.shape) and len(shape) == 2
                else "; plan from the checkpoint's own shapes with `checkpoint.structs(index)`."
            )
        )
    if is_keys:
        return _wanted_bits(Wanted(path, shape, leaf.dtype, leaf.sharding, entries, pieces))
    to = _dtype(leaf.dtype, [one.dtype for one in given], dtype, _named(names))
    return Wanted(path, shape, to, leaf.sharding, entries, pieces)


def _taken(names: Sequence[str], given: Sequence[Any], take: Take, is_stacked: bool) -> Made:
    """What a Take makes of arrays: a case of what maps make."""
    order, rank = take.transpose, len(given[0].shape)
    if order is not None and sorted(order) != list(range(rank)):
        raise CheckpointError(f"`transpose={order}` is no order of the {rank} dimensions of {names[0]!r}.")
    # Of other dtypes it is said below what can be done.
    parts = [leaf_made(name, Struct(one.shape, given[0].dtype)) for name, one in zip(names, given, strict=True)]
    if order is not None:
        parts = [ON_SHAPES["transpose"]([part], *order) for part in parts] if rank else parts
    return ON_SHAPES["stacked"](parts, 0) if is_stacked else parts[0]


def _loadable(index: Index, name: str) -> FileArray | StoreArray:
    entry = index[name]
    if isinstance(entry, ListedArray):
        raise CheckpointError(
            f"the checkpoint lists {quoted(name)}, but there is no .zarray and no zarr.json in {quoted(entry.file)}; "
            "the array was lost, or never written. Copy the whole checkpoint."
        )
    return entry


def _is_keys(planned: Any, stored: list[Any], what: str) -> bool:
    """Whether a leaf holds PRNG keys; they are never cast."""
    different = [one for one in stored if one != planned]
    if not different or not any(prng.is_key(one) for one in (*stored, planned)):
        return prng.is_key(planned)
    if all(prng.is_key(one) for one in (*stored, planned)):
        there, here = prng.implementation(different[0]), prng.implementation(planned)
        raise CheckpointError(
            f"{what} holds PRNG keys of {there}, but the plan has keys of {here}; a key means something to its own "
            f'implementation alone. Plan the state with `jax.random.key(seed, impl="{there}")`.'
        )
    bits = "jax.random.key_data(keys)"
    raise CheckpointError(
        f"{what} is {different[0]}, but the plan has {planned}; of PRNG keys and integers one does not become the "
        f"other here. Plan the leaf as it is stored, and use `{bits}` or `jax.random.wrap_key_data(bits)` before or "
        "after."
    )


def _wanted_bits(leaf: Wanted) -> Wanted:
    """A leaf of keys as the integers that are read for it."""
    prng.require_whole_keys(leaf.sharding, leaf.path)
    one = prng.bits_of(leaf.dtype)
    return dataclasses.replace(
        leaf,
        shape=(*leaf.shape, *one.shape),
        dtype=np.dtype(one.dtype),
        entries=tuple([prng.as_bits(entry) for entry in leaf.entries]),
        pieces=None if leaf.pieces is None else tuple([extended(piece, one.shape) for piece in leaf.pieces]),
        keys=leaf.dtype,
    )


def _named(names: Sequence[str]) -> str:
    return quoted(names[0]) if len(names) == 1 else f"the stack of {quoted(names[0])} to {quoted(names[-1])}"


def _dtype(planned: Any, stored: list[Any], asked: Any, what: str) -> Any:
    """The dtype that a leaf gets: nothing is cast that was not asked for."""
    both = all(jnp.issubdtype(one, jnp.floating) for one in (*stored, planned))
    if asked == "plan":
        to = planned
    elif asked is not None and both:
        to = jnp.dtype(asked)
    else:
        to = planned
        different = [one for one in stored if one != planned]
        if different:
            raise CheckpointError(
                f'{what} is {different[0]}, but the plan has {planned}; pass `dtype="plan"` to cast to the plan\'s '
                "dtypes, or `dtype=...` for all floating-point arrays."
            )
    if jax.dtypes.canonicalize_dtype(to) != to:
        raise CheckpointError(
            f'{what} would be {to}, which JAX holds only under `jax.config.update("jax_enable_x64", True)`; set it, or '
            'plan a 32-bit dtype and pass `dtype="plan"`.'
        )
    if any(_is_complex(one) and not _is_complex(to) for one in stored):
        raise CheckpointError(f"{what} is complex and would be cast to {to}; its imaginary part would be lost.")
    return np.dtype(to)


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def require_devices(shardings: Iterable[Sharding]) -> None:
    """Raises for a sharding that lies on an AbstractMesh."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, jax.sharding.AbstractMesh):
            raise PlanMismatchError(
                "the plan has no devices, so there is nowhere to load to; put it on some: "
                "`plan.on(plan.mesh.build(jax.devices()))`."
            )


def box_bytes(box: Box, dtype: Any) -> int:
    """Bytes of a box in memory."""
    return volume(box) * itemsize(dtype)
