"""Orbax directories: Orbax says what is in them; the arrays are zarr, in directories or in an OCDBT database."""

import os
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError
from . import _stores as stores
from ._entry import ArrayEntry
from ._files import Place, inside, read_json, require_tree_inside


METADATA = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"


def raise_if_step(where: Place, names: list[str]) -> None:
    """A step of Orbax's CheckpointManager is no tree but holds some, each in a directory of its own."""
    items = [name for name in names if os.path.isfile(os.path.join(where.directory, name, METADATA))]
    if items:
        raise CheckpointError(
            f"{where.directory!r} is a step of Orbax's CheckpointManager with the items {items}; name one, as in "
            f"`read_index({os.path.join(where.directory, items[0])!r})`."
        )


def entries(where: Place) -> tuple[ArrayEntry, ...]:
    """The arrays of an Orbax PyTree checkpoint; paths are its keys joined by "/"."""
    import orbax.checkpoint as ocp

    real = inside(where, METADATA)
    content = read_json(where, real)
    rows = content.get("tree_metadata") if isinstance(content, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise CheckpointError(f"{real!r} has no `tree_metadata` that describes arrays; it is damaged, or not Orbax's.")
    require_tree_inside(where, where.directory)
    try:
        with ocp.PyTreeCheckpointer() as reader:
            found = reader.metadata(where.directory)
        tree = found.item_metadata.tree
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        # Orbax believes what the file says, and fails in as many ways as that can be wrong.
        raise stores.unreadable(where.directory, error) from error
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    database = os.path.isfile(os.path.join(where.directory, stores.OCDBT_MANIFEST))
    return tuple(_entry(where, path, leaf, database, found.item_metadata.use_zarr3) for path, leaf in leaves)


def _entry(where: Place, path: Any, leaf: Any, database: bool, zarr3: bool) -> ArrayEntry:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shape = getattr(leaf, "shape", None)
    stored = str(leaf.dtype) if shape is not None else type(leaf).__name__
    dtype = stores.dtype_named(stored) if shape is not None else None
    storage = getattr(leaf, "storage", None)
    chunks = tuple(storage.chunk_shape) if storage is not None and storage.chunk_shape is not None else None
    driver = "zarr3" if zarr3 else "zarr"
    file = where.directory if database else inside(where, leaf.name)
    key = leaf.name if database else None
    shape = None if shape is None else tuple(int(size) for size in shape)
    return ArrayEntry(name, shape, dtype and np.dtype(dtype), file, stored, chunks=chunks, key=key, driver=driver)
