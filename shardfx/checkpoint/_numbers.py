"""The Python numbers of a loaded tree: which number of the checkpoint each one gets.

A checkpoint has a number in its metadata, if `save` wrote it, or as an array of rank 0,
as Orbax writes it. A number is exactly the checkpoint's, or an error that names both
sides.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ground.errors import CheckpointError
from .._ground.keys import is_key
from .._ground.text import printable, quoted
from .._plan import OtherLeaf, Target
from . import _safetensors as safetensors, _stores as stores
from ._entry import ArrayEntry, FileArray, ListedArray, StoreArray
from ._index import Index
from ._metadata import NUMBERS_KEY, from_metadata
from ._opening import open_files
from ._parts import files_of
from ._reader import reads_of, spans_of


# A path, and the text of what is wrong with its leaf.
Problem = tuple[str, str]
_TYPES: Mapping[type, tuple[Any, ...]] = {
    bool: (jnp.bool_,),
    int: (jnp.integer,),
    float: (jnp.floating, jnp.integer),
    complex: (jnp.complexfloating, jnp.floating, jnp.integer),
}


class Scalar(NamedTuple):
    """A Python number of a tree that is an array of rank 0 in the checkpoint.

    - `leaf`: the number.
    - `entry`: the array.
    """

    leaf: OtherLeaf
    entry: FileArray | StoreArray


class Numbers(NamedTuple):
    """The numbers of a tree to load.

    - `values`: those that are in the checkpoint's metadata, by the positions of their
      leaves.
    - `scalars`: those that are still to be read.
    - `problems`: what is wrong with the others.
    """

    values: dict[int, Any]
    scalars: list[Scalar]
    problems: list[Problem]


def saved_numbers(index: Index) -> dict[str, Any] | None:
    """The Python numbers of a checkpoint by path; `None` if `save` did not write it.

    Raises `CheckpointError` if a path names a number and an array, and if `save` wrote
    the checkpoint and its numbers are not there.
    """
    numbers = from_metadata(index.metadata, index.directory)
    if numbers is None:
        _raise_if_numbers_are_lost(index)
    both = []
    for path in numbers or ():
        if path in index.by_path:
            both.append(path)
    if both:
        raise CheckpointError(
            f"checkpoint {index.directory!r} has a number and an array with the path"
            f" {quoted(both[0])}; a path names one of them. The file is damaged or"
            " forged."
        )
    return numbers


def _raise_if_numbers_are_lost(index: Index) -> None:
    """Raises `CheckpointError` for metadata without the key of numbers, where a similar
    key is in its place, or where the plan shows that `save` wrote the checkpoint.
    """
    keys = list(index.metadata)
    similar_keys = difflib.get_close_matches(NUMBERS_KEY, keys, n=1, cutoff=0.8)
    if not similar_keys and safetensors.PLAN_KEY not in index.metadata:
        return
    instead = ""
    if similar_keys:
        instead = f", but {quoted(similar_keys[0])}"
    raise CheckpointError(
        f"the metadata of checkpoint {index.directory!r} has no `{NUMBERS_KEY}`{instead}:"
        " it holds the Python numbers of a tree, such as its step, and `save` writes it"
        " always. The file is damaged; load another checkpoint."
    )


def numbers_of(index: Index, target: Target, is_lenient: bool) -> Numbers:
    """What each leaf of `target` that is no array gets from the checkpoint: numbers by
    the position of the leaf, arrays of rank 0 that are still to be read, and problems.

    A function or a string gets nothing. An array or a number of the checkpoint at its
    path is a problem, unless `is_lenient`: the checkpoint's arrays need not be read.
    """
    saved = saved_numbers(index)
    numbers = Numbers(
        values={},
        scalars=[],
        problems=[],
    )
    for leaf in target.others:
        entry = index.by_path.get(leaf.path)
        if leaf.is_left_out:
            continue
        if not leaf.is_number:
            held = _saved_text(leaf.path, saved or {}, entry)
            if held is not None and not is_lenient:
                text = _unused_text(leaf, held)
                numbers.problems.append((leaf.path, text))
        elif saved is not None and leaf.path in saved:
            numbers.values[leaf.position] = saved[leaf.path]
        elif entry is not None:
            _add_scalar(numbers, leaf, entry)
        elif saved is not None:
            # A checkpoint of another library has no Python numbers: the tree keeps its
            # own, as it keeps functions.
            numbers.problems.append((leaf.path, _missing_text(leaf)))
    return numbers


def routed_numbers(index: Index, target: Target, routes: Mapping[int, str]) -> Numbers:
    """What the numbers of `target` get from the checkpoint through a map. `routes` has
    the path in the checkpoint by the position of the leaf.
    """
    saved = saved_numbers(index) or {}
    numbers = Numbers(
        values={},
        scalars=[],
        problems=[],
    )
    for leaf in target.others:
        path = routes.get(leaf.position)
        if path is None:
            continue
        if path in saved:
            numbers.values[leaf.position] = saved[path]
        else:
            _add_scalar(numbers, leaf, index[path])
    return numbers


def _add_scalar(numbers: Numbers, leaf: OtherLeaf, entry: ArrayEntry) -> None:
    """Adds the number that `leaf` gets from the stored array `entry` to `numbers`, to
    be read later; or a problem, if the array cannot hold a number of the leaf's type.
    """
    if isinstance(entry, ListedArray):
        text = "the checkpoint lists an array there, and its directory holds none"
        numbers.problems.append((leaf.path, f"{_tree_text(leaf)}, and {text}."))
    elif entry.shape != () or not _may_hold_number(leaf, entry.dtype):
        numbers.problems.append((leaf.path, _no_number_text(leaf, entry)))
    else:
        numbers.scalars.append(Scalar(leaf, entry))


def _may_hold_number(leaf: OtherLeaf, dtype: Any) -> bool:
    """Whether an array of rank 0 may hold a number of the leaf's type."""
    if dtype is None or is_key(dtype):
        return False
    if leaf.value is None:
        # A plan knows no types.
        return True
    return any(jnp.issubdtype(dtype, kind) for kind in _TYPES[type(leaf.value)])


def unread_numbers(index: Index, target: Target) -> list[str]:
    """The paths of the checkpoint's numbers at which `target` has no leaf at all."""
    saved = saved_numbers(index) or {}
    paths = {path for path, _ in target.arrays} | {leaf.path for leaf in target.others}
    return [path for path in saved if path not in paths]


def _tree_text(leaf: OtherLeaf) -> str:
    """What the tree has at the leaf, for an error."""
    if leaf.value is not None:
        return f"it is {leaf.value!r:.60} here"
    if leaf.is_number:
        return "it is a Python number in the plan"
    return "it is no array and no number in the plan"


def _saved_text(
    path: str,
    saved: Mapping[str, Any],
    entry: ArrayEntry | None,
) -> str | None:
    """What the checkpoint has at a path, as text: a number of `saved`, or the array
    `entry`; `None` if it has neither.
    """
    if path in saved:
        return f"the number {saved[path]!r:.60}"
    if entry is None:
        return None
    return _array_text(entry)


def _array_text(entry: ArrayEntry) -> str:
    """An array of the checkpoint as text, such as "the array float32[2, 3]"."""
    if entry.shape is None:
        return f"an array of {printable(entry.stored)}"
    dtype = entry.dtype
    if dtype is None:
        dtype = printable(entry.stored)
    return f"the array {dtype}{list(entry.shape)}"


def _unused_text(leaf: OtherLeaf, held: str) -> str:
    return (
        f"{_tree_text(leaf)}, and the checkpoint has {held} there, which nothing would"
        " use; plan the tree as it was saved, or leave out all that no leaf uses by"
        ' `unread="allow"`.'
    )


def _missing_text(leaf: OtherLeaf) -> str:
    return (
        f"{_tree_text(leaf)}, and the checkpoint has no number there; take it out of"
        " the tree, as `equinox.filter(tree, equinox.is_array)` does."
    )


def _no_number_text(leaf: OtherLeaf, entry: FileArray | StoreArray) -> str:
    kind = "number" if leaf.value is None else type(leaf.value).__name__
    struct = "jax.ShapeDtypeStruct"
    return (
        f"{_tree_text(leaf)}, and the checkpoint has {_array_text(entry)} there, which"
        f" is no {kind}; plan an array, `{struct}({entry.shape},"
        f" {str(entry.dtype)!r})`."
    )


def read_scalars(
    index: Index,
    scalars: Sequence[Scalar],
    missing_chunks: stores.MissingChunks,
) -> dict[int, Any]:
    """Reads the numbers of a tree that are arrays of rank 0 in the checkpoint. A key is
    the position of the leaf.

    Raises `CheckpointError` for a number that the type of the leaf does not hold.
    """
    entries = [scalar.entry for scalar in scalars]
    in_stores = [entry for entry in entries if isinstance(entry, StoreArray)]
    stores.require_possible(in_stores, index.place)
    names = files_of([entry for entry in entries if isinstance(entry, FileArray)])
    values = {}
    gap_bytes = index.place.gap_bytes
    with open_files(
        place=index.place,
        names=names,
        threads=1,
        gap_bytes=gap_bytes,
        read_limit_bytes=None,
    ) as files:
        for leaf, entry in scalars:
            scratch = np.empty((), entry.dtype)
            if isinstance(entry, StoreArray):
                stores.read_into(
                    index.place, entry, [()], [scratch], missing_chunks=missing_chunks
                )
            else:
                spans = spans_of((), entry.dtype.itemsize, ((),), True)
                files.read(reads_of(entry, spans, [scratch]))
            values[leaf.position] = _exact_number(leaf, scratch)
    return values


def _exact_number(leaf: OtherLeaf, scratch: np.ndarray) -> Any:
    """The number of `scratch`, an array of rank 0, in the type that the leaf has in the
    tree. Raises `CheckpointError` if that type does not hold it exactly.
    """
    value = _python_number(leaf, scratch)
    if leaf.value is None or type(value) is type(leaf.value):
        return value
    number = type(leaf.value)(value)
    if number != value:
        raise CheckpointError(
            f"leaf `{printable(leaf.path)}`: it is {leaf.value!r} here, and the"
            f" checkpoint has {value!r} there, which no {type(leaf.value).__name__} is"
            f" exactly; give the tree a number as `{type(value).__name__}(...)`."
        )
    return number


def _python_number(leaf: OtherLeaf, scratch: np.ndarray) -> Any:
    """The number of `scratch`, an array of rank 0, as a bool, int, float or complex, by
    its dtype.
    """
    dtype = scratch.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        if scratch.view(np.uint8) > 1:
            raise CheckpointError(
                f"leaf `{printable(leaf.path)}`: a boolean in the checkpoint is neither"
                " 0 nor 1; the file is damaged."
            )
        return bool(scratch)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(scratch)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(scratch)
    return float(scratch)
