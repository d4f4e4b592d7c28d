"""What a checkpoint holds, read from its headers alone."""

import dataclasses
import difflib
import functools as ft
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .._errors import CheckpointError, UnknownPathError
from .._text import array_text, between_numbers, bytes_text, joined, table
from . import _eformer as eformer, _orbax as orbax, _safetensors as safetensors, _stores as stores
from ._entry import ArrayEntry
from ._files import Place, inside, place, read_json


_SHOWN_ROWS = 24


@dataclasses.dataclass(frozen=True)
class Index:
    """What a checkpoint holds: a value that was read from headers, without a weight. Made by `read_index`.

    `print` shows it as a table, repeated layers as one row.

    **Arguments:**

    - `format`: "safetensors", "eformer", "zarr", "ocdbt" or "orbax".
    - `directory`: the real path of the directory.
    - `entries`: one `ArrayEntry` per array, in the checkpoint's order.
    - `metadata`: what a safetensors header says about the file.
    """

    format: str
    directory: str
    entries: tuple[ArrayEntry, ...]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    place: Place = dataclasses.field(default=Place("", ()), repr=False, compare=False)

    def __getitem__(self, path: str) -> ArrayEntry:
        found = self.by_path.get(path)
        if found is None:
            near = difflib.get_close_matches(path, self.by_path, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; it has {_some(self.by_path)}."
            raise UnknownPathError(f"checkpoint {self.directory!r} has no array {path!r}{hint}")
        return found

    @ft.cached_property
    def by_path(self) -> dict[str, ArrayEntry]:
        """The entries by path."""
        return {entry.path: entry for entry in self.entries}

    @property
    def bytes_total(self) -> int:
        """How many bytes the arrays have, uncompressed; those without a known shape or dtype count as 0."""
        return sum(entry.nbytes or 0 for entry in self.entries)

    def __str__(self) -> str:
        groups: dict[Any, list[ArrayEntry]] = {}
        for entry in self.entries:
            groups.setdefault((between_numbers(entry.path), entry.shape, entry.stored), []).append(entry)
        rows, rest = list(groups.values())[:_SHOWN_ROWS], list(groups.values())[_SHOWN_ROWS:]
        lines = table([("path", "arrays", "shape", "bytes"), *map(_row, rows)], right={"arrays", "bytes"})
        more = [f"... {sum(map(len, rest)):,} arrays more"] if rest else []
        total = f"{len(self.entries):,} arrays, {bytes_text(self.bytes_total)}, in {self.format} at {self.directory!r}"
        return "\n".join([*lines, *more, total])


def _row(entries: list[ArrayEntry]) -> tuple[str, ...]:
    first = entries[0]
    if first.shape is None or first.dtype is None or first.nbytes is None:
        array, nbytes = f"{first.stored}[{'?' if first.shape is None else ','.join(map(str, first.shape))}]", "?"
    else:
        array, nbytes = array_text(first.dtype, first.shape), bytes_text(first.nbytes * len(entries))
    return joined([entry.path for entry in entries]), str(len(entries)), array, nbytes


def read_index(path: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> Index:
    """What a checkpoint holds, from its headers alone: no weight is read, and no device is needed.

    **Arguments:**

    - `path`: a safetensors file; the index of a sharded set (`model.safetensors.index.json`); or a directory with
        either of them, with an eformer `tensorstore_index.json`, with an Orbax checkpoint, with an OCDBT database, or
        with zarr arrays. A directory is asked in this order.
    - `root`: a further directory that symbolic links in the checkpoint may lead to. The cache of the Hugging Face
        hub is such a case: its snapshots are links to `../../blobs`.

    **Returns:**

    An `Index`: for every array its path, shape, dtype, file and chunks.

    **Raises:**

    `CheckpointError` that names the file, for one that is missing, truncated, damaged, or leads out of the directory.

    !!! Example

        ```python
        import tempfile
        import numpy as np
        from safetensors.numpy import save_file
        from shardfx import checkpoint

        directory = tempfile.mkdtemp()
        save_file({"embed": np.ones((64, 8), np.float32)}, f"{directory}/model.safetensors")
        index = checkpoint.read_index(directory)
        assert index["embed"].shape == (64, 8) and index.bytes_total == 2048
        ```
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        return _read_directory(place(path, root), path)
    if not os.path.isfile(path):
        raise CheckpointError(f"there is no checkpoint at {path!r}; give a directory, or a .safetensors file.")
    where, name = place(os.path.dirname(os.path.abspath(path)), root), os.path.basename(path)
    # The caller named this file, so where it leads is the caller's wish.
    real = os.path.realpath(path)
    trusted = Place(where.directory, (*where.roots, os.path.dirname(real)))
    if name.endswith(".json"):
        return _read_set(where, trusted, real)
    return _of_files(trusted, [real])


def _read_directory(where: Place, path: str) -> Index:
    names = sorted(os.listdir(where.directory))
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    weights = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in weights:
        return _of_files(where, [inside(where, "model.safetensors")])
    if len(indices) > 1:
        raise CheckpointError(f"{path!r} holds several safetensors sets, {indices}; name one of these files.")
    if indices:
        return _read_set(where, where, inside(where, indices[0]))
    if eformer.INDEX in names:
        return Index("eformer", where.directory, eformer.entries(where), place=where)
    if orbax.METADATA in names:
        return Index("orbax", where.directory, orbax.entries(where), place=where)
    if stores.OCDBT_MANIFEST in names:
        return Index("ocdbt", where.directory, stores.ocdbt_entries(where), place=where)
    if weights:
        return _of_files(where, [inside(where, name) for name in weights])
    entries = stores.zarr_entries(where)
    if not entries:
        orbax.raise_if_step(where, names)
        raise CheckpointError(
            f"{path!r} holds no checkpoint: no .safetensors file, no {eformer.INDEX}, no Orbax {orbax.METADATA}, no "
            f"{stores.OCDBT_MANIFEST} and no zarr array."
        )
    return Index("zarr", where.directory, entries, place=where)


def _read_set(where: Place, trusted: Place, real: str) -> Index:
    content = read_json(trusted, real)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{real!r} has no `weight_map` from tensor names to file names; it indexes no safetensors."
        )
    files = {name: inside(where, name) for name in dict.fromkeys(weight_map.values())}
    headers = {name: safetensors.read_header(where, file) for name, file in files.items()}
    found = {name: {entry.path: entry for entry in _entries(header, files[name])} for name, header in headers.items()}
    for name, file in weight_map.items():
        if name not in found[file]:
            raise CheckpointError(f"{real!r} says that tensor {name!r} is in {file!r}, but that file does not hold it.")
    entries = tuple(found[file][name] for name, file in weight_map.items())
    return Index("safetensors", where.directory, entries, _joined(headers.values()), where)


def _of_files(where: Place, files: list[str]) -> Index:
    headers = [safetensors.read_header(where, file) for file in files]
    entries: dict[str, ArrayEntry] = {}
    for file, header in zip(files, headers, strict=True):
        for entry in _entries(header, file):
            if entry.path in entries:
                raise CheckpointError(
                    f"tensor {entry.path!r} is in {entries[entry.path].file!r} and in {file!r}; name one of the files, "
                    "or add the `model.safetensors.index.json` of the set."
                )
            entries[entry.path] = entry
    return Index("safetensors", where.directory, tuple(entries.values()), _joined(headers), where)


def _joined(headers: Iterable[safetensors.Header]) -> dict[str, str]:
    return {name: value for header in headers for name, value in header.metadata.items()}


def _entries(header: safetensors.Header, file: str) -> list[ArrayEntry]:
    known = header.dtypes()
    return [
        ArrayEntry(
            tensor.name,
            tensor.shape,
            known.get(tensor.name, safetensors.DTYPES[tensor.stored][1]),
            file,
            tensor.stored,
            offset=tensor.offset,
        )
        for tensor in header.tensors
    ]


def structs(index: Index, *, prefix: str | None = None) -> dict[str, Any]:
    """The checkpoint's arrays as a tree of `jax.ShapeDtypeStruct`s: what [`shardfx.plan`][] plans, from headers alone.

    **Arguments:**

    - `index`: from `read_index`.
    - `prefix`: only arrays below it; see `shardings`.

    **Returns:**

    Nested dicts, one level for each "/" in a path; names without one, as most safetensors have, stay as they are.

    **Raises:**

    `CheckpointError` for an array whose shape or dtype the checkpoint does not say, or whose dtype JAX lacks.

    !!! Example

        ```python
        import tempfile
        import numpy as np
        from safetensors.numpy import save_file
        import shardfx
        from shardfx import MeshSpec, PathRules, checkpoint

        directory = tempfile.mkdtemp()
        save_file({"embed": np.ones((64, 8), np.float32)}, f"{directory}/model.safetensors")
        tree = checkpoint.structs(checkpoint.read_index(directory))
        made = shardfx.plan(tree, MeshSpec({"fsdp": 8}), paths=PathRules.parse(".*->fsdp"))
        assert made.bytes_per_device == 256
        ```
    """
    return nested([(path, struct(entry, index)) for path, entry in below(index, prefix)])


def struct(entry: ArrayEntry, index: Index) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array; an error where one is unknown."""
    if entry.shape is None or entry.dtype is None:
        what = "shape" if entry.shape is None else f"dtype that JAX has (it is stored as {entry.stored})"
        raise CheckpointError(f"array {entry.path!r} of checkpoint {index.directory!r} has no known {what}.")
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype)


def _struct(entry: ArrayEntry, index: Index) -> jax.ShapeDtypeStruct:
    if entry.shape is None or entry.dtype is None:
        what = "shape" if entry.shape is None else f"dtype ({entry.stored}) that JAX has, or any dtype"
        raise CheckpointError(f"array {entry.path!r} of checkpoint {index.directory!r} has no known {what}.")
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype)


def below(index: Index, prefix: str | None) -> list[tuple[str, ArrayEntry]]:
    """The entries below `prefix`, each with its path relative to it."""
    if prefix is None:
        return [(entry.path, entry) for entry in index.entries]
    chosen = [
        (entry.path.removeprefix(f"{prefix}/"), entry)
        for entry in index.entries
        if entry.group == prefix or (entry.group is None and entry.path.startswith(f"{prefix}/"))
    ]
    if not chosen:
        known = dict.fromkeys(entry.group or entry.path.split("/")[0] for entry in index.entries)
        raise CheckpointError(f"Prefix {prefix!r} not found. Available: {list(known)}, in {index.directory!r}.")
    return chosen


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """`("a/b", x)` pairs as `{"a": {"b": x}}`; a path that is a leaf and a branch at once is an error."""
    tree: dict[str, Any] = {}
    leaves: dict[tuple[str, ...], str] = {}
    for path, value in pairs:
        parts = tuple(path.split("/"))
        for length in range(1, len(parts)):
            if parts[:length] in leaves:
                raise _collision(leaves[parts[:length]], path)
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        if parts in leaves:
            raise CheckpointError(f"the checkpoint has two arrays {path!r}; a path names one array.")
        if parts[-1] in node:
            raise _collision(path, next(other for key, other in leaves.items() if key[: len(parts)] == parts))
        node[parts[-1]] = value
        leaves[parts] = path
    return tree


def _collision(leaf: str, branch: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has an array {leaf!r} and an array {branch!r} below it; a tree cannot hold both. "
        "Rename one of them, or read one with `prefix=`."
    )


def _some(paths: Mapping[str, Any]) -> str:
    shown = ", ".join(map(repr, list(paths)[:5]))
    return f"{shown} and {len(paths) - 5} more" if len(paths) > 5 else shown or "no arrays"
