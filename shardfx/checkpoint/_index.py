"""The content of a checkpoint, read from its headers alone."""

import dataclasses
import functools as ft
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from .._convert import near_names
from .._ground.errors import CheckpointError, UnknownPathError
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    first_lines,
    html_text,
    joined,
    plural,
    printable,
    quoted,
    table,
)
from ._entry import ArrayEntry, FileArray, ListedArray
from ._files import FilePlace
from ._packed import is_packed, raw_entry
from ._place import Place
from ._table import by_path


_SHOWN_ROWS = 24
_SHOWN_CHARACTERS = 120
# Trees deeper than any model's would exhaust the stack of recursive functions.
_DEEPEST = 100


# What a checkpoint is written in.
Format = Literal["safetensors", "eformer", "zarr", "ocdbt", "orbax", "t5x", "flax"]


@dataclasses.dataclass(frozen=True)
class Index:
    """The arrays of a checkpoint, read from its headers alone.
    [`shardfx.checkpoint.read_index`][] makes an index.

    `print` shows an index as a table, with repeated layers in one row. `index["norm"]`
    is the entry of an array: its shape, dtype and file. `"norm" in index`,
    `for path in index` and `len(index)` work as for a dict of paths.

    **Arguments:**

    - `format`: "safetensors", "eformer", "zarr", "ocdbt", "orbax", "t5x" or "flax".
    - `directory`: the real path of the directory.
    - `entries`: one `ArrayEntry` per array, in the checkpoint's order.
    - `metadata`: the metadata in a safetensors header, and the Python numbers of the
      checkpoint.
    - `place`: the directories in which the checkpoint's files may be, for later reads.
    """

    __module__ = "shardfx.checkpoint"

    format: Format
    directory: str
    entries: Sequence[ArrayEntry]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    place: Place = dataclasses.field(
        default_factory=lambda: FilePlace("", ()),
        repr=False,
        compare=False,
    )

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_path)

    def __len__(self) -> int:
        return len(self.by_path)

    def __contains__(self, path: object) -> bool:
        return path in self.by_path

    def __getitem__(self, path: str) -> ArrayEntry:
        entry = self.by_path.get(path)
        if entry is None:
            raise self.unknown(path)
        return entry

    def unknown(self, path: str) -> UnknownPathError:
        """The error for a path that the index lacks, with similar paths that it has."""
        similar_paths = near_names(path, self.by_path, most=3, cutoff=0.5)
        if similar_paths:
            hint = f"; did you mean {' or '.join(map(quoted, similar_paths))}?"
        else:
            hint = f"; it has {first_paths_text(self.by_path)}."
        return UnknownPathError(
            f"checkpoint {self.directory!r} has no array {quoted(path)}{hint}"
        )

    @ft.cached_property
    def by_path(self) -> Mapping[str, ArrayEntry]:
        """The entry of each array by its path."""
        return by_path(self.entries)

    @property
    def bytes_total(self) -> int:
        """The number of bytes of all arrays, uncompressed. An array without a known
        shape or dtype counts as 0.
        """
        return sum(entry.nbytes or 0 for entry in self.entries)

    def tree(self, prefix: str | None = None) -> dict[str, Any]:
        """The entries as nested dicts, one level for each "/" in a path; with `prefix`,
        only the entries below it.
        """
        return nested(below(self, prefix))

    def __str__(self) -> str:
        # Arrays whose paths differ only in numbers, such as those of layers, are a row.
        entries_by_kind: dict[object, list[ArrayEntry]] = {}
        for entry in self.entries:
            kind = (between_numbers(entry.path), entry.shape, entry.stored)
            entries_by_kind.setdefault(kind, []).append(entry)
        groups = list(entries_by_kind.values())
        shown = groups[:_SHOWN_ROWS]
        lines = table(
            [("path", "arrays", "shape", "bytes"), *map(_row, shown)],
            right={"arrays", "bytes"},
        )
        hidden = groups[_SHOWN_ROWS:]
        if hidden:
            lines.append(f"... {sum(map(len, hidden)):,} arrays more")
        size = f"{plural(len(self.entries), 'array')}, {bytes_text(self.bytes_total)}"
        lines.append(f"{size}, in {self.format} at {self.directory!r}")
        return "\n".join(lines)

    __repr__ = first_lines
    _repr_html_ = html_text


def _row(entries: list[ArrayEntry]) -> tuple[str, ...]:
    """The row of the table for arrays that are shown together: their joined path, their
    number, the dtype and shape of one, and the bytes of all.
    """
    first = entries[0]
    if first.shape is not None and first.nbytes is not None:
        array = array_text(first.dtype, first.shape)
        nbytes = bytes_text(first.nbytes * len(entries))
    else:
        sizes = "?" if first.shape is None else ",".join(map(str, first.shape))
        array = printable(f"{first.stored}[{sizes}]")
        nbytes = "?"
    path = printable(joined([entry.path for entry in entries]))
    if len(path) > _SHOWN_CHARACTERS:
        # The first 30 characters and the last ones, with dots between them.
        path = f"{path[:30]}...{path[33 - _SHOWN_CHARACTERS :]}"
    return path, str(len(entries)), array, nbytes


def is_unreadable(entry: ArrayEntry) -> bool:
    """Whether the values of an array in a checkpoint cannot be read in any form, since
    JAX has no such dtype and the checkpoint does not keep the bytes as they are.
    """
    return (
        entry.dtype is None
        and not isinstance(entry, ListedArray)
        and not is_packed(entry)
    )


def struct(entry: ArrayEntry, index: Index) -> jax.ShapeDtypeStruct:
    """The `jax.ShapeDtypeStruct` of an array of the checkpoint `index`.

    Raises `CheckpointError` if the array's shape or dtype is unknown.
    """
    if entry.shape is not None and entry.dtype is not None:
        return jax.ShapeDtypeStruct(entry.shape, entry.dtype)
    name = f"array {quoted(entry.path)} of checkpoint {index.directory!r}"
    stored = printable(entry.stored)
    if entry.shape is None:
        raise CheckpointError(f"{name} has no known shape.")
    if isinstance(entry, FileArray) and is_packed(entry):
        raw = raw_entry(entry)
        raise CheckpointError(
            f"{name} is stored as {stored}, a dtype that JAX lacks; load its bytes:"
            f" plan it as `jax.ShapeDtypeStruct({raw.shape}, 'uint8')`."
        )
    raise CheckpointError(
        f"{name} has no known dtype that JAX has (it is stored as {stored}); leave it"
        ' out of the plan, and load the others with `unread="allow"`, or by a map with'
        f" `drop=[{quoted(entry.path)}]`."
    )


def below(index: Index, prefix: str | None) -> list[tuple[str, ArrayEntry]]:
    """The entries below `prefix`, each with its path relative to `prefix`; all entries
    if it is `None`. An entry with a `group`, the prefix under which an eformer index
    lists it, is below this prefix alone.

    Raises `CheckpointError` if there is no entry.
    """
    if prefix is None:
        return [(entry.path, entry) for entry in index.entries]
    selected = []
    prefixes: dict[str, None] = {}
    for entry in index.entries:
        group = None
        if not isinstance(entry, FileArray):
            group = entry.group
        prefixes[group or entry.path.split("/")[0]] = None
        is_below = group is None and entry.path.startswith(f"{prefix}/")
        if group == prefix or is_below:
            selected.append((entry.path.removeprefix(f"{prefix}/"), entry))
    if not selected:
        raise CheckpointError(
            f"Prefix {prefix!r} not found. Available: [{first_paths_text(prefixes)}],"
            f" in {index.directory!r}."
        )
    return selected


def nested(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    """Nested dicts from pairs of a path and a value: `{"a": {"b": x}}` for
    `("a/b", x)`. No value may be a dict.

    Raises `CheckpointError` for a path that is both a leaf and a branch (`a` beside
    `a/b`), or too deep for a tree.
    """
    tree: dict[str, Any] = {}
    for path, value in pairs:
        parts = path.split("/", _DEEPEST)
        if len(parts) > _DEEPEST:
            raise CheckpointError(
                f"array {quoted(path)} has more than {_DEEPEST} parts between"
                " slashes; no tree is that deep. Load it by a plan of your own, with"
                " `map=`."
            )
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if type(node) is not dict:
                break
        if type(node) is not dict or parts[-1] in node:
            raise _collision(path, [other for other, _ in pairs])
        node[parts[-1]] = value
    return tree


def _collision(path: str, paths: Sequence[str]) -> CheckpointError:
    """The error for the path `path`, which two of the arrays `paths` have, or which has
    another one's path as its beginning.
    """
    if paths.count(path) > 1:
        return CheckpointError(
            f"the checkpoint has two arrays {quoted(path)}; a path names one array."
        )
    above = [other for other in paths if path.startswith(f"{other}/")]
    if above:
        leaf = above[0]
        branch = path
    else:
        leaf = path
        branch = next(other for other in paths if other.startswith(f"{path}/"))
    return CheckpointError(
        f"the checkpoint has an array {quoted(leaf)} and an array {quoted(branch)}"
        " below it; a tree cannot hold both. Rename one of them, or read one with"
        " `prefix=`."
    )


def first_paths_text(paths: Iterable[str]) -> str:
    """The first five of the paths as text, and the number of the others."""
    names = list(paths)
    shown = ", ".join(map(quoted, names[:5]))
    if len(names) > 5:
        return f"{shown} and {len(names) - 5} more"
    return shown or "no arrays"
