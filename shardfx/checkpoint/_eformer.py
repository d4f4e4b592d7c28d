"""eformer's `tensorstore_index.json`: a list of arrays beside the zarr directories that hold them."""

import dataclasses
import os
from typing import Any

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from . import _stores as stores
from ._entry import ListedArray, StoreArray
from ._files import Place, inside, read_json


INDEX = "tensorstore_index.json"


def entries(where: Place) -> tuple[StoreArray | ListedArray, ...]:
    """The arrays that the index lists, of all its prefixes, in its order.

    Version 1 has one list, `arrays`; version 2 has one list per prefix, and may have `arrays` beside them. The two are
    told apart by these names: what eformer writes as `version` is the version of its package.
    """
    real = inside(where, INDEX)
    content = read_json(where, real)
    if not isinstance(content, dict) or content.get("format") != "tensorstore":
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"Unsupported index format: {str(found)[:80]}, in {real!r}; it must be 'tensorstore'.")
    lists = [(None, content.get("arrays", []))]
    prefixes = content.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise CheckpointError(f"{real!r}: `prefixes` must map each prefix to a list of arrays.")
    lists += prefixes.items()
    return tuple(_entry(where, real, group, row) for group, rows in lists for row in _rows(real, group, rows))


def _rows(real: str, group: str | None, rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise CheckpointError(f"{real!r}: {'`arrays`' if group is None else f'prefix {quoted(group)}'} must be a list.")
    return rows


def _entry(where: Place, real: str, group: str | None, row: Any) -> StoreArray | ListedArray:
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
