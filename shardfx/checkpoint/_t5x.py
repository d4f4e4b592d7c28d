"""The checkpoints of T5X: large arrays in zarr directories, all else in a msgpack file
`checkpoint`, which also says where the large arrays are (t5x/checkpoints.py, version
3).
"""

import os
import posixpath
from typing import Any, NamedTuple

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import FileArray, StoreArray
from ._files import member
from ._kinds import is_msgpack_map, kind_of
from ._metadata import NUMBERS_KEY, to_text
from ._msgpack import Leaves, leaves_of, read_tree
from ._place import Place
from ._stores import entry_in, zarr_entries


STATE_FILE = "checkpoint"
MSGPACK = ".msgpack"
_STATE_KEY = "optimizer"
_HEAD_BYTES = 32
# The beginnings of the names that T5X gives to its zarr directories.
_PREFIXES = ("target.", "state.", "flax_mutables.")


class Content(NamedTuple):
    """The arrays of a checkpoint, and its metadata, which has the Python numbers."""

    entries: tuple[FileArray | StoreArray, ...]
    metadata: dict[str, str]


def flax_content(place: Place, file_path: str) -> Content:
    """The content of the msgpack file `file_path`, as flax writes it."""
    leaves = leaves_of(read_tree(place, file_path), file_path)
    if leaves.elsewhere:
        path, _ = leaves.elsewhere[0]
        raise CheckpointError(
            f"{file_path!r} is the file `{STATE_FILE}` of a checkpoint of T5X, and"
            f" {quoted(path)} is in a directory beside it; give the directory,"
            f" {os.path.dirname(file_path)!r}."
        )
    return _content_of(leaves, ())


def is_state(place: Place) -> bool:
    """Whether the file `checkpoint` of a directory is a msgpack file."""
    with place.opened(place.inside(STATE_FILE)) as file:
        return is_msgpack_map(file.read(_HEAD_BYTES, 0))


def t5x_content(place: Place) -> Content:
    """The content of a checkpoint of T5X, from both of its halves."""
    file_path = place.inside(STATE_FILE)
    if not is_state(place):
        with place.opened(file_path) as file:
            raise _error_for_damaged(place, kind_of(file.read(_HEAD_BYTES, 0)))
    tree = read_tree(place, file_path)
    state = member(tree, _STATE_KEY)
    leaves = leaves_of(tree if state is None else state, file_path)
    rest = {entry.path: entry for entry in zarr_entries(place)}
    arrays = []
    for path, spec in leaves.elsewhere:
        name = _directory_name(spec)
        if name is None:
            raise CheckpointError(
                f"{file_path!r} says of {quoted(path)} that it is in another file, and"
                " not in which; the file is damaged."
            )
        entry = entry_in(place, path, place.inside(name))
        if entry is None:
            raise CheckpointError(
                f"{file_path!r} says that {quoted(path)} is in {quoted(name)}, but"
                f" {place.directory!r} holds no such zarr array; it has"
                f" {_listed_names(place)}. Copy the whole checkpoint."
            )
        rest.pop(name, None)
        arrays.append(entry)
    # Arrays of which the file says nothing keep the names of their directories.
    return _content_of(leaves, (*arrays, *rest.values()))


def raise_if_half(place: Place, entries: tuple[StoreArray, ...]) -> None:
    """Raises `CheckpointError` if zarr arrays have the names that T5X gives them, and
    its file with all else is not there.
    """
    if entries and all(entry.path.startswith(_PREFIXES) for entry in entries):
        raise CheckpointError(
            f"{place.directory!r} holds {len(entries)} zarr arrays with the names of a"
            f" checkpoint of T5X, such as {quoted(entries[0].path)}, and not its file"
            f" `{STATE_FILE}`, which has the small arrays and the step; it has"
            f" {_listed_names(place)}. Copy the whole checkpoint."
        )


def _error_for_damaged(place: Place, kind: Any) -> CheckpointError:
    """The error for a directory of zarr arrays whose file `checkpoint` is no msgpack.
    `kind` is what the file is by its first bytes, if they tell.
    """
    what = "which is no msgpack" if kind is None else f"which is {kind.name}"
    return CheckpointError(
        f"{place.directory!r} holds zarr arrays and a file `{STATE_FILE}`, {what}."
        " T5X keeps the small arrays and the step in a msgpack file of this name, so"
        f" half of the checkpoint is damaged; it has {_listed_names(place)}. Copy the"
        " whole checkpoint, or take the file away to load the zarr arrays alone."
    )


def _listed_names(place: Place) -> str:
    """The first names in a directory, as text."""
    names = place.names()
    shown = ", ".join(map(quoted, names[:8]))
    if len(names) > 8:
        return f"{shown} and {len(names) - 8} more"
    return shown


def _directory_name(spec: dict[str, Any]) -> str | None:
    """The name of the zarr directory that a spec of tensorstore names."""
    base = spec.get("base")
    if spec.get("driver") == "cast" and isinstance(base, dict):
        return _directory_name(base)
    # Older versions of tensorstore have the path outside of `kvstore`.
    for path in (member(spec, "kvstore", "path"), spec.get("path")):
        if isinstance(path, str) and path.strip("/"):
            return posixpath.basename(path.rstrip("/"))
    return None


def _content_of(leaves: Leaves, others: tuple[StoreArray, ...]) -> Content:
    """The content with the arrays in the msgpack file and the zarr arrays `others`."""
    metadata = {NUMBERS_KEY: to_text(leaves.numbers)}
    entries = (*leaves.arrays, *others)
    return Content(entries, metadata)
