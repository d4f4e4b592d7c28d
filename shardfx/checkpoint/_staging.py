"""The files of a save under their temporary name: made at the start, renamed at the
end, found after a killed save.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping

from .._ground.errors import CheckpointError
from .._ground.text import quoted


PLAN = "plan.json"
# The temporary names of `save`: `.step-100.partial-` and a token unique to the save.
_NAME = re.compile(r"\.(.+)\.partial-[0-9a-f]{16}")
# For each file its header, its size and the names of its tensors.
Headers = Mapping[str, tuple[bytes, int, list[str]]]


def begin(
    path: str,
    staging: str,
    headers: Headers,
    is_file: bool,
    overwrite: bool,
    plan: str | None,
) -> None:
    """Creates the files of a save to `path` under the name `staging`, at their full
    size, without the arrays' bytes.

    Raises `OSError` if the disk has too little space, and `CheckpointError` if `path`
    exists and may not be replaced; nothing is written then. `overwrite` allows to
    replace a file. If `is_file`, the save is one file. Otherwise it is a directory,
    which also gets the text `plan`, if there is one.
    """
    if os.path.lexists(path) and not (
        is_file and overwrite and not os.path.isdir(path)
    ):
        hint = (
            "pass `overwrite=True` to replace it"
            if is_file and os.path.isfile(path)
            else "save to a new name"
        )
        why = (
            " `overwrite=True` replaces .safetensors files: a directory cannot be"
            " replaced at once."
        )
        text = (
            f"{path!r} exists, and nothing was changed; {hint}, or remove it"
            f" first.{why if overwrite else ''}"
        )
        raise CheckpointError(text)
    needed, parent = sum(size for _, size, _ in headers.values()), os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed > free:
        message = (
            f"saving takes {needed} bytes and {free} are free; nothing was written."
            " Free some, or save elsewhere"
        )
        raise OSError(errno.ENOSPC, message, path)
    if not is_file:
        os.mkdir(staging)
    if not is_file and plan is not None:
        _write_file(os.path.join(staging, PLAN), plan.encode())
    for file, (header, size, _) in headers.items():
        _write_file(file, header, size)
    if len(headers) > 1:
        weight_map = {
            name: os.path.basename(file)
            for file, (_, _, names) in headers.items()
            for name in names
        }
        total = sum(size - len(header) for header, size, _ in headers.values())
        content = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1
        )
        _write_file(
            os.path.join(staging, "model.safetensors.index.json"), content.encode()
        )


def _write_file(file: str, data: bytes, size: int | None = None) -> None:
    with open(file, "xb") as out:
        out.write(data)
        if size is not None:
            out.truncate(size)
        out.flush()
        os.fsync(out.fileno())


def commit(staging: str, path: str, is_file: bool, overwrite: bool) -> None:
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
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """A file or directory of a save that did not finish.

    **Arguments:**

    - `path`: the path of the file or directory.
    - `target`: the path to which the save would have renamed it.
    - `nbytes`: the number of bytes on the disk.
    - `age_seconds`: the seconds since the last write.
    """

    __module__ = "shardfx.checkpoint"

    path: str
    target: str
    nbytes: int
    age_seconds: float

    def __str__(self) -> str:
        return (
            f"{quoted(self.path)}, {self.nbytes} bytes, written to"
            f" {self.age_seconds:.0f} s ago"
        )


def left_over(
    directory: str | os.PathLike[str],
    *,
    older_than_seconds: float | int = 3600.0,
    remove: bool = False,
) -> tuple[LeftOver, ...]:
    """Finds the files that killed saves left in a directory, and removes them if asked
    to.

    **Arguments:**

    - `directory`: the directory in which checkpoints are saved. Directories below it
      are not searched.
    - `older_than_seconds`: files and directories that were written to more recently
      than this are left out, since a
        save that is under way writes all the time.
    - `remove`: whether to remove the files and directories that are found.

    **Returns:**

    A [`shardfx.checkpoint.LeftOver`][] for each, in the order of their names.

    !!! Example

        ```python
        import pathlib
        import tempfile
        from shardfx import checkpoint

        directory = pathlib.Path(tempfile.mkdtemp())
        (directory / ".step-100.partial-0123456789abcdef").mkdir()
        (found,) = checkpoint.left_over(directory, older_than_seconds=0, remove=True)
        assert found.target.endswith("step-100") and not list(directory.iterdir())
        ```
    """
    directory, now = os.fspath(directory), time.time()
    found = []
    for name in sorted(os.listdir(directory)):
        match, path = _NAME.fullmatch(name), os.path.join(directory, name)
        if match is None or os.path.islink(path):
            continue
        try:
            files = [path] + (
                [entry.path for entry in os.scandir(path)]
                if os.path.isdir(path)
                else []
            )
            stats = [os.lstat(file) for file in files]
        except FileNotFoundError:  # the save has just ended
            continue
        # Files have their full size from the start; the blocks show what was written.
        nbytes = sum(one.st_blocks * 512 for one in stats if stat.S_ISREG(one.st_mode))
        age_seconds = max(0.0, now - max(one.st_mtime for one in stats))
        if age_seconds >= older_than_seconds:
            found.append(
                LeftOver(path, os.path.join(directory, match[1]), nbytes, age_seconds)
            )
    for one in found if remove else ():
        remove_partial(one.path)
    return tuple(found)


def remove_partial(path: str) -> None:
    """Removes `path`, the file or directory of an unfinished save, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.unlink(path)
