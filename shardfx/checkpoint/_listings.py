"""Lists of arrays beside the zarr arrays themselves: eformer's `tensorstore_index.json`, and Orbax's metadata."""

import dataclasses
import os
from typing import Any

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from . import _stores as stores
from ._entry import ListedArray, StoreArray
from ._files import FilePlace, inside, read_json


EFORMER_INDEX = "tensorstore_index.json"


def eformer_entries(where: FilePlace) -> tuple[StoreArray | ListedArray, ...]:
    """The arrays that the index lists, of all its prefixes, in its order.

    Version 1 has one list, `arrays`; version 2 has one list per prefix, and may have `arrays` beside them. The two are
    told apart by these names: what eformer writes as `version` is the version of its package.
    """
    real = inside(where, EFORMER_INDEX)
    content = read_json(where, real)
    if not isinstance(content, dict) or content.get("format") != "tensorstore":
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"Unsupported index format: {str(found)[:80]}, in {real!r}; it must be 'tensorstore'.")
    lists = [(None, content.get("arrays", []))]
    prefixes = content.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise CheckpointError(f"{real!r}: `prefixes` must map each prefix to a list of arrays.")
    lists += prefixes.items()
    return tuple(_listed(where, real, group, row) for group, rows in lists for row in _rows(real, group, rows))


def _rows(real: str, group: str | None, rows: object) -> list[Any]:
    if not isinstance(rows, list):
        raise CheckpointError(f"{real!r}: {'`arrays`' if group is None else f'prefix {quoted(group)}'} must be a list.")
    return rows


def _listed(where: FilePlace, real: str, group: str | None, row: object) -> StoreArray | ListedArray:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str):
        raise CheckpointError(f"{real!r} lists {quoted(str(row), 80)}, which has no `path`.")
    path, shape, dtype = row["path"], row.get("shape"), row.get("dtype")
    directory = inside(where, path)
    # What the array itself says is what a read will give; the index is a copy that may be out of date.
    for name in stores.METADATA:
        if os.path.isfile(os.path.join(directory, name)):
            found = stores.array_entry(where, path, directory, name)
            if found is None:
                continue
            if shape is not None and list(found.shape) != shape:
                raise CheckpointError(
                    f"{real!r} gives {quoted(path)} the shape {str(shape)[:80]}, but its own {name} says {found.shape}."
                )
            return dataclasses.replace(found, group=group)
    if shape is not None and not stores.is_sizes(shape):
        raise CheckpointError(f"{real!r} gives {quoted(path)} the shape {str(shape)[:80]}; it must be a list of sizes.")
    known = stores.dtype_named(dtype) if isinstance(dtype, str) else None
    stored = dtype if isinstance(dtype, str) else "unknown"
    return ListedArray(path, None if shape is None else tuple(shape), known, directory, stored, group)


ORBAX_METADATA = "_METADATA"
# What Orbax writes beside the arrays.
_TRACES = ("_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "ocdbt.process_0")
# What Orbax calls a value that it keeps as an array. Others, strings and empty containers, are no arrays.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def raise_if_step(where: FilePlace, names: list[str]) -> None:
    """A step of Orbax's CheckpointManager is no tree but holds some, each in a directory of its own."""
    items = [name for name in names if os.path.isfile(os.path.join(where.directory, name, ORBAX_METADATA))]
    if items:
        raise CheckpointError(
            f"{where.directory!r} is a step of Orbax's CheckpointManager with the items {items[:20]}; name one, as in "
            f"`read_index({os.path.join(where.directory, items[0])!r})`."
        )


def require_finished(where: FilePlace, names: list[str]) -> None:
    """Raises for a directory that Orbax has written, and that lacks its metadata: arrays may be missing, too."""
    traces = [name for name in names if name in _TRACES]
    if traces and not any(os.path.isfile(os.path.join(where.directory, name, ORBAX_METADATA)) for name in names):
        raise CheckpointError(
            f"{where.directory!r} is a checkpoint of Orbax, as {quoted(traces[0])} shows, without {ORBAX_METADATA}: "
            "its save was interrupted, or files were lost, and nothing says which arrays it had. Copy the whole "
            "checkpoint, or take an earlier step."
        )


def orbax_entries(where: FilePlace) -> tuple[StoreArray, ...]:
    """The arrays of an Orbax PyTree checkpoint; paths are its keys joined by "/".

    Orbax's own reader opens the files that the metadata names before it looks at the names, so this one reads.
    """
    real = inside(where, ORBAX_METADATA)
    content = read_json(where, real)
    rows = content.get("tree_metadata") if isinstance(content, dict) else None
    if not isinstance(rows, dict):
        raise CheckpointError(f"{real!r} has no `tree_metadata` that describes arrays; it is damaged, or not Orbax's.")
    named = [_keys(real, name, row) for name, row in rows.items()]
    if os.path.lexists(os.path.join(where.directory, stores.OCDBT_MANIFEST)):
        database = {entry.key: entry for entry in stores.ocdbt_entries(where)}
        found = [(keys, must, database.get(".".join(keys))) for keys, must in named]
    else:
        found = [(keys, must, _directory_entry(where, ".".join(keys))) for keys, must in named]
    names: dict[str, list[str]] = {}
    for keys, must, entry in found:
        if names.setdefault(".".join(keys), keys) != keys and entry is not None:
            raise CheckpointError(
                f"{real!r} names arrays by {keys} and by {names['.'.join(keys)]}, which Orbax keeps under one name, so "
                "one of them was lost when it was written; rename one of them and save again."
            )
        if must and entry is None:
            raise CheckpointError(
                f"{real!r} names the array {quoted('/'.join(keys))}, but {where.directory!r} does not hold it; copy "
                "the whole checkpoint."
            )
    return tuple(dataclasses.replace(entry, path="/".join(keys)) for keys, _, entry in found if entry is not None)


def _keys(real: str, name: str, row: object) -> tuple[list[str], bool]:
    """The keys of a value from the tree's root on, and whether it must be an array."""
    keys = row.get("key_metadata") if isinstance(row, dict) else None
    value = row.get("value_metadata") if isinstance(row, dict) else None
    names = [key.get("key") for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []
    texts = [str(key) for key in names if isinstance(key, str | int)]
    if not isinstance(value, dict) or not isinstance(keys, list) or len(texts) != len(keys):
        raise CheckpointError(f"{real!r}: {quoted(name)} in `tree_metadata` has no keys and value that Orbax writes.")
    return texts, value.get("value_type") in _ARRAYS and value.get("skip_deserialize") is not True


def _directory_entry(where: FilePlace, name: str) -> StoreArray | None:
    if not name:
        return None
    directory = inside(where, name)
    for file in stores.METADATA:
        if os.path.isfile(os.path.join(directory, file)):
            return stores.array_entry(where, name, directory, file)
    return None
