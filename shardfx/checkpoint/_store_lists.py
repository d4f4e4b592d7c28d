"""The lists of arrays in chunks that eformer and Orbax write."""

import dataclasses
import os

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import ListedArray, StoreArray
from ._files import is_shape, member, read_json
from ._place import Place
from ._stores import OCDBT_MANIFEST, dtype_named, entry_in, ocdbt_entries


EFORMER_INDEX = "tensorstore_index.json"


def eformer_entries(place: Place) -> tuple[StoreArray | ListedArray, ...]:
    """The arrays that an eformer index lists, of all its prefixes, in the index's
    order.

    Version 1 has one list, `arrays`; version 2 has one list per prefix, and may have
    `arrays` too. The index's own field `version` does not tell them apart, since it is
    the version of eformer's package.
    """
    file_path = place.inside(EFORMER_INDEX)
    content = read_json(place, file_path)
    if not isinstance(content, dict) or content.get("format") != "tensorstore":
        form = type(content).__name__
        if isinstance(content, dict):
            form = content.get("format")
        raise CheckpointError(
            f"Unsupported index format: {str(form)[:80]}, in {file_path!r}; it must be"
            " 'tensorstore'."
        )
    prefixes = content.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise CheckpointError(
            f"{file_path!r}: `prefixes` must map each prefix to a list of arrays."
        )
    entries: list[StoreArray | ListedArray] = []
    ungrouped = (None, content.get("arrays", []))
    for group, rows in [ungrouped, *prefixes.items()]:
        if not isinstance(rows, list):
            what = "`arrays`" if group is None else f"prefix {quoted(group)}"
            raise CheckpointError(f"{file_path!r}: {what} must be a list.")
        entries += [_entry_of_row(place, file_path, group, row) for row in rows]
    return tuple(entries)


def _entry_of_row(
    place: Place,
    file_path: str,
    group: str | None,
    row: object,
) -> StoreArray | ListedArray:
    """The array that one row of an eformer index lists: the zarr array in its
    directory, or a `ListedArray` if the directory has none.

    `file_path` is the path of the index, for errors, and `group` the prefix under which
    it lists the row. Raises `CheckpointError` if the row and the array's own metadata
    differ.
    """
    if not isinstance(row, dict) or not isinstance(row.get("path"), str):
        raise CheckpointError(
            f"{file_path!r} lists {quoted(str(row), 80)}, which has no `path`."
        )
    path = row["path"]
    shape = row.get("shape")
    dtype = row.get("dtype")
    directory = place.inside(path)
    # The array's own metadata decides what a read returns; the index is a copy that may
    # be out of date.
    entry = entry_in(place, path, directory)
    if entry is not None:
        if shape is not None and list(entry.shape) != shape:
            raise CheckpointError(
                f"{file_path!r} gives {quoted(path)} the shape {str(shape)[:80]}, but"
                f" its own metadata says {entry.shape}."
            )
        return dataclasses.replace(entry, group=group)
    if shape is not None and not is_shape(shape):
        raise CheckpointError(
            f"{file_path!r} gives {quoted(path)} the shape {str(shape)[:80]}; it must"
            " be a list of sizes."
        )
    is_text = isinstance(dtype, str)
    return ListedArray(
        path=path,
        shape=None if shape is None else tuple(shape),
        dtype=dtype_named(dtype) if is_text else None,
        file=directory,
        stored=dtype if is_text else "unknown",
        group=group,
    )


ORBAX_METADATA = "_METADATA"
# The files that Orbax writes beside the arrays.
_UNFINISHED = ".orbax-checkpoint-tmp"
_TRACES = ("_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "ocdbt.process_0")
# The types that Orbax gives to values that it stores as arrays. Strings and empty
# containers have others.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def raise_if_no_tree(place: Place, names: list[str]) -> None:
    """Raises `CheckpointError` if Orbax wrote the checkpoint's directory, and it does
    not contain one tree of arrays.

    It may be a training step, which contains several trees, or an incomplete
    checkpoint. `names` are its files.
    """
    require_finished(place)
    items = [
        name
        for name in names
        if place.has_file(os.path.join(place.directory, name, ORBAX_METADATA))
    ]
    if items:
        raise CheckpointError(
            f"{place.directory!r} is a step of Orbax's CheckpointManager with the items"
            f" {items[:20]}; name one, as in"
            f" `read_index({os.path.join(place.directory, items[0])!r})`."
        )
    traces = [name for name in names if name in _TRACES]
    if traces:
        raise CheckpointError(
            f"{place.directory!r} is a checkpoint of Orbax, as {quoted(traces[0])}"
            f" shows, without {ORBAX_METADATA}: its save was interrupted, or files were"
            " lost, and nothing says which arrays it had. Copy the whole checkpoint,"
            " or take an earlier step."
        )


def require_finished(place: Place) -> None:
    """Raises `CheckpointError` for a directory with the name that Orbax gives to a save
    until it is complete.
    """
    name = os.path.basename(place.directory)
    if _UNFINISHED in name:
        raise CheckpointError(
            f"{place.directory!r} is a save of Orbax that was not finished, as its name"
            " says; take an earlier step. If you know that it is complete, rename it to"
            f" {name.partition(_UNFINISHED)[0]!r}."
        )


def orbax_entries(place: Place) -> tuple[StoreArray, ...]:
    """The arrays of an Orbax PyTree checkpoint. Their paths are Orbax's keys joined by
    "/".

    Orbax's own reader opens the files that the metadata names before it checks the
    names, so it is not used.
    """
    require_finished(place)
    file_path = place.inside(ORBAX_METADATA)
    content = read_json(place, file_path)
    rows = member(content, "tree_metadata")
    if not isinstance(rows, dict):
        raise CheckpointError(
            f"{file_path!r} has no `tree_metadata` that describes arrays; it is"
            " damaged, or not Orbax's."
        )
    named = [_keys_of_value(file_path, name, row) for name, row in rows.items()]
    in_database = None
    if OCDBT_MANIFEST in place.names():
        in_database = {entry.key: entry for entry in ocdbt_entries(place)}
    entries = []
    keys_by_name: dict[str, list[str]] = {}
    for keys, is_array in named:
        # Orbax's name of the directory, or of the key in the database.
        name = ".".join(keys)
        entry = None
        if in_database is not None:
            entry = in_database.get(name)
        elif name:
            entry = entry_in(place, name, place.inside(name))
        if keys_by_name.setdefault(name, keys) != keys and entry is not None:
            raise CheckpointError(
                f"{file_path!r} names arrays by {keys} and by {keys_by_name[name]},"
                " which Orbax keeps under one name, so one of them was lost when it was"
                " written; rename one of them and save again."
            )
        if is_array and entry is None:
            raise CheckpointError(
                f"{file_path!r} names the array {quoted('/'.join(keys))}, but"
                f" {place.directory!r} does not hold it; copy the whole checkpoint."
            )
        if entry is not None:
            entries.append(dataclasses.replace(entry, path="/".join(keys)))
    return tuple(entries)


def _keys_of_value(file_path: str, name: str, row: object) -> tuple[list[str], bool]:
    """The keys from the root to a value in Orbax's `tree_metadata`, and whether the
    value must be an array.

    `file_path` is the path of the metadata file, for errors. `name` and `row` are the
    value's name and metadata.
    """
    keys = member(row, "key_metadata")
    value = member(row, "value_metadata")
    texts = []
    for key in keys if isinstance(keys, list) else ():
        name_of_key = key.get("key") if isinstance(key, dict) else None
        if isinstance(name_of_key, str | int):
            texts.append(str(name_of_key))
    if (
        not isinstance(value, dict)
        or not isinstance(keys, list)
        or len(texts) != len(keys)
    ):
        raise CheckpointError(
            f"{file_path!r}: {quoted(name)} in `tree_metadata` has no keys and value"
            " that Orbax writes."
        )
    is_array = value.get("value_type") in _ARRAYS
    return texts, is_array and value.get("skip_deserialize") is not True
