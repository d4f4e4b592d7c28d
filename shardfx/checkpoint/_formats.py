"""The formats of checkpoints: which one a directory has, and its index."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.misuse import called
from .._ground.text import quoted
from .._plan import ShardPlan
from . import (
    _safetensors as safetensors,
    _store_lists as lists,
    _stores as stores,
    _t5x as t5x,
)
from ._address import Address, Where, address_of
from ._entry import ArrayEntry, FileArray, StoreArray
from ._files import FilePlace, local_place, member, read_json
from ._index import (
    Format,
    Index,
    below,
    first_paths_text,
    is_unreadable,
    nested,
    struct,
)
from ._kinds import recognised_files
from ._left_over import DATA_NAME
from ._metadata import NUMBERS_KEY
from ._objects import TIMEOUT_SECONDS, ObjectPlace
from ._packed import raw_entry
from ._parts import FILES_KEY, SET_INDEX, joined
from ._place import MissingError, Place
from ._table import FileTable, all_tables, one_table


@called("read_index(path)")
def read_index(
    path: Where,
    *,
    root: str | os.PathLike[str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Index:
    """The content of a checkpoint from its headers alone. No weight is read, and no
    device is needed.

    **Arguments:**

    - `path`: a safetensors file; the index of a sharded set
      (`model.safetensors.index.json`); or a directory with either of them, with an
      eformer `tensorstore_index.json`, with an Orbax checkpoint, with an OCDBT
      database, with a T5X checkpoint, with zarr arrays, or with a msgpack file of flax.
      A directory is checked for these in this order. Each may be in a store:
      `gs://bucket/path`, `s3://bucket/path`, or
      `s3://bucket/path?endpoint=https://host` for other servers of S3's kind, or a spec
      of TensorStore, such as `{"driver": "s3", "bucket": "bucket"}`.
    - `root`: a further directory that symbolic links in the checkpoint may lead to. The
      cache of the Hugging Face hub is such a case: its snapshots are links to
      `../../blobs`.
    - `timeout_seconds`: seconds after which a store that does not answer is an error.

    **Returns:**

    An `Index`: for every array its path, shape, dtype, file and chunks.

    **Raises:**

    `CheckpointError`, with the file, if a file is missing, truncated or damaged, or if
    its path leads out of the directory.

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
    return _index_at(path, root, timeout_seconds)


def _index_at(
    path: Where,
    root: str | os.PathLike[str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Index:
    """The index of the checkpoint that `path` names: `read_index` explains the
    arguments.
    """
    address = address_of(path)
    if isinstance(address, Address):
        return _store_index(address, timeout_seconds)
    return _local_index(address, root)


def _local_index(path: str, root: str | os.PathLike[str] | None) -> Index:
    """The index of a local directory or file. `root` is a further directory into which
    its links may lead.
    """
    if os.path.isdir(path):
        set_place = local_place(path, root)
        try:
            names_inside = set_place.names()
        except FileNotFoundError:
            # A writer has just moved the directory away.
            raise _error_for_nothing(path) from None
        return _index_of_directory(set_place, path, names_inside)
    if not os.path.isfile(path):
        raise _error_for_nothing(path)
    directory = os.path.dirname(os.path.abspath(path))
    set_place = local_place(directory, root)
    name = os.path.basename(path)
    # The caller named this file, so its link may lead anywhere. Those of the files that
    # it names in turn may not.
    file_path = os.path.realpath(path)
    file_place = FilePlace(
        directory=set_place.directory,
        roots=(*set_place.roots, os.path.dirname(file_path)),
        stamps=set_place.stamps,
    )
    return _index_of_file(set_place, file_place, file_path, name)


def _index_of_file(
    set_place: Place,
    file_place: Place,
    file_path: str,
    name: str,
) -> Index:
    """The index of a file that the caller named, or of the set that it indexes.

    `file_place` may read the file itself, wherever its link leads, and `set_place` the
    files that an index names. `file_path` is its path, and `name` its name, whose end
    tells the format.
    """
    if name.endswith(".json"):
        return _index_of_set_at(set_place, file_place, file_path)
    if name.endswith(t5x.MSGPACK) or name == t5x.STATE_FILE:
        return _index_of_flax(file_place, file_path)
    return _index_of_files(file_place, [file_path])


def _error_for_nothing(path: str) -> CheckpointError:
    """The error for a path at which there is nothing. It has advice if the path may be
    the name of a model on the hub: two parts with one slash.
    """
    is_on_hub = path.count("/") == 1 and all(path.split("/")) and path[0] not in "./~"
    hub = ""
    if is_on_hub:
        hub = (
            " A model of the Hugging Face hub is downloaded first: `hf download"
            f" {path}`."
        )
    return CheckpointError(
        f"there is no checkpoint at {path!r}; give a directory, or a .safetensors"
        f" file.{hub}"
    )


def _index_of_directory(place: Place, path: str, names: list[str]) -> Index:
    """The index of the checkpoint in a directory, in the first of the formats, in the
    order of `read_index`, whose files are there.

    `names` are the files and directories at the top of `place`. `path` is the directory
    as the caller named it, for errors.
    """
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    weights = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in weights:
        return _index_of_files(place, [place.inside("model.safetensors")])
    if len(indices) > 1:
        raise CheckpointError(
            f"{path!r} holds several safetensors sets, {first_paths_text(indices)};"
            " name one of these files."
        )
    if indices:
        return _index_of_set_at(place, place, place.inside(indices[0]))
    if lists.EFORMER_INDEX in names:
        return _index_of_entries("eformer", place, lists.eformer_entries(place))
    if lists.ORBAX_METADATA in names:
        return _index_of_entries("orbax", place, lists.orbax_entries(place))
    lists.raise_if_no_tree(place, names)
    if stores.OCDBT_MANIFEST in names:
        return _index_of_entries("ocdbt", place, stores.ocdbt_entries(place))
    if weights:
        files = [place.inside(name) for name in weights]
        return _index_of_files(place, files)
    state = os.path.join(place.directory, t5x.STATE_FILE)
    entries = stores.zarr_entries(place)
    if place.has_file(state) and (entries or t5x.is_state(place)):
        content = t5x.t5x_content(place)
        return _index_of_entries("t5x", place, content.entries, content.metadata)
    # The arrays of a T5X checkpoint whose file with all else is lost are no zarr
    # checkpoint.
    t5x.raise_if_half(place, entries)
    msgpacks = []
    for name in names:
        if name.endswith(t5x.MSGPACK):
            msgpacks.append(name)
    if not entries and len(msgpacks) == 1:
        return _index_of_flax(place, place.inside(msgpacks[0]))
    if not entries:
        raise _error_for_no_checkpoint(place, path, names)
    _require_no_other_weights(place, names)
    return _index_of_entries("zarr", place, entries)


def _index_of_flax(place: Place, file_path: str) -> Index:
    """The index of one msgpack file of flax."""
    content = t5x.flax_content(place, file_path)
    return _index_of_entries("flax", place, content.entries, content.metadata)


def _require_no_other_weights(place: Place, names: list[str]) -> None:
    """Raises `CheckpointError` if weights of another format are beside zarr arrays, as
    such a checkpoint may be in two halves. `names` are the files of the directory.
    """
    other_weights = recognised_files(place, names)
    if other_weights:
        raise CheckpointError(
            f"{place.directory!r} holds zarr arrays, and {other_weights[0]}. Nothing"
            " says which"
            " of them are the checkpoint; move the other files to another directory."
        )


def _error_for_no_checkpoint(
    place: Place,
    path: str,
    names: list[str],
) -> CheckpointError:
    """The error for a directory in which no format is recognised. It says what the
    directory holds instead: files of other formats, data of an unfinished save, or
    steps of a run.
    """
    other_files = recognised_files(place, names)
    steps = [os.path.join(path, name) for name in names if name[-1].isdigit()]
    hint = ""
    if other_files:
        hint = f" It holds other files: {'; '.join(other_files[:3])}."
    elif names and all(map(DATA_NAME.fullmatch, names)):
        hint = (
            " It holds the data of a save that has not ended, or was killed: take an"
            f" earlier step. `shardfx clean {path} --remove` removes what killed saves"
            " left."
        )
    elif steps:
        hint = f" It holds {first_paths_text(steps)}: if these are steps of a run, name one."
    elif names:
        hint = f" It holds {first_paths_text(names)}."
    return CheckpointError(
        f"{path!r} holds no checkpoint: no .safetensors file, no"
        f" {lists.EFORMER_INDEX}, no Orbax {lists.ORBAX_METADATA}, no"
        f" {stores.OCDBT_MANIFEST}, no zarr array and no msgpack file of flax.{hint}"
    )


def _index_of_entries(
    kind: Format,
    place: Place,
    entries: tuple[ArrayEntry, ...],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Index:
    """The index of a directory with these arrays. Raises `CheckpointError` if two
    arrays at different locations have one path.
    """
    entry_by_path: dict[str, ArrayEntry] = {}
    for entry in entries:
        other = entry_by_path.setdefault(entry.path, entry)
        # eformer may list one array under two prefixes.
        if _location_of(other) != _location_of(entry):
            raise CheckpointError(
                f"checkpoint {place.directory!r} has two arrays with the path"
                f" {quoted(entry.path)}, in {quoted(_location_of(other))} and in"
                f" {quoted(_location_of(entry))}; a path names one array. Rename one of"
                " them where the checkpoint is made."
            )
    return Index(
        format=kind,
        directory=place.directory,
        entries=entries,
        metadata=metadata,
        place=place,
    )


def _location_of(entry: ArrayEntry) -> str:
    """The key of an array in its database, or the file or directory that holds it."""
    if isinstance(entry, StoreArray) and entry.key is not None:
        return entry.key
    return entry.file


def _store_index(address: Address, timeout_seconds: float) -> Index:
    """The index of the checkpoint at an address of a store. The address is that of a
    file, or a directory: a prefix of the keys.
    """
    endings = (".safetensors", ".json", t5x.MSGPACK)
    parent_place = ObjectPlace(address.parent, timeout_seconds)
    if address.name.endswith(endings):
        return _index_of_file(parent_place, parent_place, address.shown, address.name)
    place = ObjectPlace(address, timeout_seconds)
    index_path = place.inside(SET_INDEX)
    # This object makes a saved step exist. It is asked for, since a listing may lag.
    content = None
    with contextlib.suppress(MissingError):
        content = read_json(place, index_path)
    if content is not None and _saved_file_names(content) is not None:
        return _index_of_set(place, content, index_path)
    try:
        names = place.names()
    except CheckpointError:
        if content is None:
            raise
        # Who may read objects may not always list them.
        return _index_of_set(place, content, index_path)
    if content is not None:
        names = sorted({*names, SET_INDEX})
    if not names and address.path and parent_place.holds(address.path):
        return _index_of_file(parent_place, parent_place, address.shown, address.name)
    if not names:
        raise CheckpointError(
            f"there is no checkpoint at {place.directory!r}: no object's key begins"
            f" with {quoted(f'{address.path}/')}. Give the address of a directory, or"
            " of a .safetensors file."
        )
    return _index_of_directory(place, place.directory, names)


def _index_of_set_at(place: Place, index_place: Place, index_path: str) -> Index:
    """The index of the safetensors set whose index is the file `index_path`, which
    `index_place` may read. `place` may read the other files.
    """
    return _index_of_set(place, read_json(index_place, index_path), index_path)


def _saved_file_names(content: object) -> list[str] | None:
    """The names of all files of a set that `save` wrote to a store, by its index;
    `None` for the index of another set.
    """
    names = member(content, "metadata", FILES_KEY)
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    return None


def _index_of_set(place: Place, content: object, index_path: str) -> Index:
    """The index of a safetensors set, from the JSON `content` of its index,
    `index_path`.

    Raises `CheckpointError` if the set is not complete.
    """
    weight_map = member(content, "weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CheckpointError(
            f"{index_path!r} has no `weight_map` from tensor names to file names, so it"
            " indexes no safetensors; give the checkpoint's directory. A plan's JSON"
            " is read by `ShardPlan.from_json(text)`."
        )
    saved_files = _saved_file_names(content)
    if saved_files is not None:
        return _index_of_saved_set(place, weight_map, saved_files)
    file_names = dict.fromkeys(weight_map.values())
    file_paths = {}
    for file_name in file_names:
        file_paths[file_name] = place.inside(file_name)
    headers = safetensors.read_headers(place, file_paths.values())
    arrays_by_file_name = {}
    for file_name, file_path in file_paths.items():
        arrays_by_file_name[file_name] = headers[file_path].arrays
    table = _table_of_set(weight_map, arrays_by_file_name)
    if table is not None:
        return _index_of_headers(place, headers.values(), table)
    array_by_path_by_file_name = {
        file_name: {array.path: array for array in arrays}
        for file_name, arrays in arrays_by_file_name.items()
    }
    entries = []
    for tensor_name, file_name in weight_map.items():
        array = array_by_path_by_file_name[file_name].get(tensor_name)
        if array is None:
            raise CheckpointError(
                f"{index_path!r} says that tensor {quoted(tensor_name)} is in"
                f" {quoted(file_name)}, but that file does not hold it."
            )
        entries.append(array)
    return _index_of_headers(place, headers.values(), tuple(entries))


def _index_of_headers(
    place: Place,
    headers: Iterable[safetensors.Header],
    entries: Sequence[FileArray],
) -> Index:
    """The index of safetensors files with these headers."""
    metadata: dict[str, str] = {}
    for header in headers:
        numbers = header.metadata.get(NUMBERS_KEY)
        if numbers is not None and metadata.get(NUMBERS_KEY, numbers) != numbers:
            raise CheckpointError(
                f"two files of checkpoint {place.directory!r} have other Python numbers"
                f" of the tree, such as its step, in `{NUMBERS_KEY}`: one of them is"
                " damaged, or of another save. Copy the whole checkpoint again, or load"
                " another one."
            )
        metadata |= header.metadata
    return Index(
        format="safetensors",
        directory=place.directory,
        entries=entries,
        metadata=metadata,
        place=place,
    )


def _table_of_set(
    weight_map: Mapping[str, str],
    arrays_by_file_name: Mapping[str, Sequence[FileArray]],
) -> FileTable | None:
    """The arrays of a set as one table (arrays as columns), in the order of
    `weight_map`; `None` if the arrays of a file are no table, or if the map does not
    name exactly the arrays of the files.

    `weight_map` has the name of a file by the name of a tensor, and
    `arrays_by_file_name` the arrays of each file.
    """
    file_tables = list(arrays_by_file_name.values())
    if not all_tables(file_tables):
        return None
    file_name_by_path = {}
    for file_name, table in zip(arrays_by_file_name, file_tables, strict=True):
        file_name_by_path |= dict.fromkeys(table.paths, file_name)
    array_count = sum(map(len, file_tables))
    if file_name_by_path != weight_map or array_count != len(file_name_by_path):
        return None
    return one_table(file_tables).with_paths(list(weight_map))


def _index_of_saved_set(
    place: Place,
    weight_map: Mapping[str, str],
    names: list[str],
) -> Index:
    """The index of a set that `save` wrote to a store. `names` are all its files."""
    files = [place.inside(name) for name in names]
    headers = safetensors.read_headers(place, files)
    arrays = joined(headers)
    if arrays.keys() != weight_map.keys():
        differing = sorted(arrays.keys() ^ weight_map.keys())
        raise CheckpointError(
            f"the index of {place.directory!r} and its files differ in"
            f" {first_paths_text(differing)}; files of several saves are mixed, or one"
            " is lost. Copy the whole checkpoint."
        )
    entries = tuple(arrays[name] for name in weight_map)
    return _index_of_headers(place, headers.values(), entries)


def _index_of_files(place: Place, files: list[str]) -> Index:
    """The index of safetensors files that no index names. Raises `CheckpointError` if
    two of them have a tensor of one name.
    """
    headers = list(safetensors.read_headers(place, files).values())
    tables = [header.arrays for header in headers]
    if all_tables(tables):
        table = one_table(tables)
        if len(table.position_by_path) == len(table):
            # All paths differ.
            return _index_of_headers(place, headers, table)
    arrays: dict[str, FileArray] = {}
    for array in itertools.chain.from_iterable(tables):
        other = arrays.setdefault(array.path, array)
        if other is not array:
            raise CheckpointError(
                f"tensor {quoted(array.path)} is in {other.file!r} and in"
                f" {array.file!r}; name one of the files, or add the"
                " `model.safetensors.index.json` of the set."
            )
    return _index_of_headers(place, headers, tuple(arrays.values()))


@called("structs(path)")
def structs(index: Index | Where, *, prefix: str | None = None) -> dict[str, Any]:
    """The checkpoint's arrays as a tree of `jax.ShapeDtypeStruct`s for
    [`shardfx.plan`][], from headers alone.

    **Arguments:**

    - `index`: an Index from `read_index`, or the path or address of a checkpoint.
    - `prefix`: only the arrays below `prefix/` are returned, by their path relative to
      `prefix`. In an eformer index of version 2, these are the arrays that it lists
      under this prefix.

    **Returns:**

    Nested dicts, one level for each "/" in a path. A name without a slash, as most
    safetensors have, is a key of the top level.

    **Raises:**

    `CheckpointError` for an array whose shape or dtype is not in the checkpoint.

    A safetensors array of 6 bits, a dtype that JAX lacks, is a struct of its bytes, of
    dtype uint8. An array of a store with a dtype that JAX lacks is left out; `load`
    names it, unless `unread="allow"`.

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
    if isinstance(index, ShardPlan):
        raise LeafTypeError(
            "a ShardPlan is no checkpoint: the structs of its arrays are"
            " `plan.structs`."
        )
    if not isinstance(index, Index):
        index = _index_at(index)
    rows = []
    for path, entry in below(index, prefix):
        if is_unreadable(entry):
            continue
        if isinstance(entry, FileArray) and entry.dtype is None:
            entry = raw_entry(entry)
        rows.append((path, struct(entry, index)))
    return nested(rows)
