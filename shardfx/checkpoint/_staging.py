"""The files of a save under their temporary name: made at the start, renamed at the
end, found after a killed save.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from .._ground.errors import CheckpointError


PLAN = "plan.json"
# The temporary names of `save`: `.step-100.partial-` and a token unique to the save.
PARTIAL_NAME = re.compile(r"\.(.+)\.partial-[0-9a-f]{16}")


class NewFile(NamedTuple):
    """A file to create: its header, its size with the tensors, and their names."""

    header: bytes
    nbytes: int
    tensor_names: list[str]


def create_files(
    path: str,
    staging: str,
    files: Mapping[str, NewFile],
    is_file: bool,
    overwrite: bool,
    plan: str | None,
) -> None:
    """Creates the files of a save to `path` under the name `staging`, at their full
    size, without the arrays' bytes. `files` has them by their paths there.

    Raises `OSError` if the disk has too little space, and `CheckpointError` if `path`
    exists and may not be replaced; nothing is written then. `overwrite` allows to
    replace a file. If `is_file`, the save is one file. Otherwise it is a directory,
    which also gets the text `plan`, if there is one.
    """
    if os.path.lexists(path) and not (
        is_file and overwrite and not os.path.isdir(path)
    ):
        hint = "save to a new name"
        if is_file and os.path.isfile(path):
            hint = "pass `overwrite=True` to replace it"
        why_no_directory = (
            " `overwrite=True` replaces .safetensors files: a directory cannot be"
            " replaced at once."
        )
        text = f"{path!r} exists, and nothing was changed; {hint}, or remove it first."
        if overwrite:
            text += why_no_directory
        raise CheckpointError(text)
    needed_bytes = sum(file.nbytes for file in files.values())
    parent = os.path.dirname(path)
    free_bytes = shutil.disk_usage(_existing_directory(parent)).free
    if needed_bytes > free_bytes:
        message = (
            f"saving takes {needed_bytes} bytes and {free_bytes} are free; nothing was"
            " written."
            " Free some, or save elsewhere"
        )
        raise OSError(errno.ENOSPC, message, path)
    os.makedirs(parent, exist_ok=True)
    if not is_file:
        os.mkdir(staging)
    if not is_file and plan is not None:
        _write_file(os.path.join(staging, PLAN), plan.encode())
    for file_path, file in files.items():
        _write_file(file_path, file.header, file.nbytes)
    if len(files) > 1:
        weight_map = {}
        total_bytes = 0
        for file_path, file in files.items():
            name = os.path.basename(file_path)
            weight_map |= dict.fromkeys(file.tensor_names, name)
            total_bytes += file.nbytes - len(file.header)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        index_path = os.path.join(staging, "model.safetensors.index.json")
        _write_file(index_path, json.dumps(index, indent=1).encode())


def _existing_directory(directory: str) -> str:
    """`directory`, or the innermost directory above it that exists."""
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    return directory


def _write_file(file: str, data: bytes, size: int | None = None) -> None:
    """Writes the new file with the path `file`, and flushes it to the disk. It gets
    `size` bytes, if given, of which `data` are the first.
    """
    with open(file, "xb") as out:
        out.write(data)
        if size is not None:
            out.truncate(size)
        out.flush()
        os.fsync(out.fileno())


def commit(staging: str, path: str, is_file: bool, overwrite: bool) -> None:
    """Renames the files of a save from `staging` to `path`, and flushes the names to
    the disk.

    Raises `CheckpointError` if another writer has made `path` in the meantime. Only a
    file is replaced, with `overwrite`.
    """
    parent = os.path.dirname(path)
    try:
        if not is_file:
            _sync_directory(staging)
            os.rename(staging, path)
        elif overwrite:
            os.replace(staging, path)
        else:
            # Unlike a rename, a link never replaces a file that another writer has made
            # meanwhile.
            os.link(staging, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise CheckpointError(
                f"{path!r} appeared while this was saving, from another writer, and"
                " stays as it is; save to another name."
            ) from error
        raise
    _sync_directory(parent)


def _sync_directory(directory: str) -> None:
    """Flushes the names of the files in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(path: str) -> None:
    """Removes `path`, the file or directory of an unfinished save, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.unlink(path)
