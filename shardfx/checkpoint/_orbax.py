"""Orbax directories: their own metadata names the arrays, which are zarr, in directories or in an OCDBT database."""

import dataclasses
import os
from typing import Any

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from . import _stores as stores
from ._entry import StoreArray
from ._files import Place, inside, read_json


METADATA = "_METADATA"
# What Orbax writes beside the arrays.
_TRACES = ("_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "ocdbt.process_0")
# What Orbax calls a value that it keeps as an array. Others, strings and empty containers, are no arrays.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def raise_if_step(where: Place, names: list[str]) -> None:
    """A step of Orbax's CheckpointManager is no tree but holds some, each in a directory of its own."""
    items = [name for name in names if os.path.isfile(os.path.join(where.directory, name, METADATA))]
    if items:
        raise CheckpointError(
            f"{where.directory!r} is a step of Orbax's CheckpointManager with the items {items[:20]}; name one, as in "
            f"`read_index({os.path.join(where.directory, items[0])!r})`."
        )


def require_finished(where: Place, names: list[str]) -> None:
    """Raises for a directory that Orbax has written, and that lacks its metadata: arrays may be missing, too."""
    traces = [name for name in names if name in _TRACES]
    if traces and not any(os.path.isfile(os.path.join(where.directory, name, METADATA)) for name in names):
        raise CheckpointError(
            f"{where.directory!r} is a checkpoint of Orbax, as {quoted(traces[0])} shows, without {METADATA}: its save "
            "was interrupted, or files were lost, and nothing says which arrays it had. Copy the whole checkpoint, or "
            "take an earlier step."
        )


def entries(where: Place) -> tuple[StoreArray, ...]:
    """The arrays of an Orbax PyTree checkpoint; paths are its keys joined by "/".

    Orbax's own reader opens the files that the metadata names before it looks at the names, so this one reads.
    """
    real = inside(where, METADATA)
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


def _keys(real: str, name: str, row: Any) -> tuple[list[str], bool]:
    """The keys of a value from the tree's root on, and whether it must be an array."""
    keys = row.get("key_metadata") if isinstance(row, dict) else None
    value = row.get("value_metadata") if isinstance(row, dict) else None
    names = [key.get("key") for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []
    texts = [str(key) for key in names if isinstance(key, str | int)]
    if not isinstance(value, dict) or not isinstance(keys, list) or len(texts) != len(keys):
        raise CheckpointError(f"{real!r}: {quoted(name)} in `tree_metadata` has no keys and value that Orbax writes.")
    return texts, value.get("value_type") in _ARRAYS and value.get("skip_deserialize") is not True


def _directory_entry(where: Place, name: str) -> StoreArray | None:
    if not name:
        return None
    directory = inside(where, name)
    for file in stores.METADATA:
        if os.path.isfile(os.path.join(directory, file)):
            return stores.array_entry(where, name, directory, file)
    return None
