"""What saves left that were killed."""

import dataclasses
import os
import re
import stat
import time

from .._ground.misuse import called
from .._ground.text import quoted
from ._address import Address, Where, address_of
from ._files import member, read_json
from ._objects import ObjectPlace
from ._parts import FILES_KEY, SET_INDEX
from ._place import MissingError
from ._staging import PARTIAL_NAME, remove_partial


# The directory of a save's data: that of the checkpoint, the second in which the save
# began, and a token that no other save has.
DATA_NAME = re.compile(r"(?:(.*)/)?data-(\d+)-[0-9a-f]{16}")
# An object of a save: the numbers of its process and of the object, and its bytes.
_OBJECT = re.compile(r"\d+-\d+-(\d+)\.safetensors")


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


@called("left_over(directory)")
def left_over(
    directory: Where,
    *,
    older_than_seconds: float | int = 3600.0,
    remove: bool = False,
) -> tuple[LeftOver, ...]:
    """Finds the files that killed saves left in a directory, and removes them if asked
    to.

    **Arguments:**

    - `directory`: the directory in which checkpoints are saved. Directories below it
      are not searched. Or an address in a store, of a checkpoint or of a directory
      above.
    - `older_than_seconds`: files and directories that were written to more recently
      than this are left out, since a save that is under way writes all the time. In a
      store, where nothing tells when an object was written, this counts from the start
      of the save. One whose objects are removed while it is under way fails.
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
    address = address_of(directory)
    now = time.time()
    if isinstance(address, Address):
        return _left_in_store(address, now, older_than_seconds, remove)
    directory = address
    partial_saves = []
    for name in sorted(os.listdir(directory)):
        match = PARTIAL_NAME.fullmatch(name)
        path = os.path.join(directory, name)
        if match is None or os.path.islink(path):
            continue
        try:
            files = [path]
            if os.path.isdir(path):
                files += [entry.path for entry in os.scandir(path)]
            statuses = [os.lstat(file) for file in files]
        except FileNotFoundError:  # the save has just ended
            continue
        # Files have their full size from the start; the blocks show what was written.
        nbytes = sum(
            status.st_blocks * 512
            for status in statuses
            if stat.S_ISREG(status.st_mode)
        )
        last_write = max(status.st_mtime for status in statuses)
        age_seconds = max(0.0, now - last_write)
        if age_seconds >= older_than_seconds:
            target = os.path.join(directory, match[1])
            partial_save = LeftOver(
                path=path,
                target=target,
                nbytes=nbytes,
                age_seconds=age_seconds,
            )
            partial_saves.append(partial_save)
    if remove:
        for partial_save in partial_saves:
            remove_partial(partial_save.path)
    return tuple(partial_saves)


def _left_in_store(
    address: Address,
    now: float,
    older_than_seconds: float,
    remove: bool,
) -> tuple[LeftOver, ...]:
    """The result of `left_over` for an address: the directories of data below it that
    no index names. `now` is the time in seconds.

    Such a directory is `step-100/data-1700000000-...`: in that of the checkpoint, and
    with the second in which the save began. The names of its objects have their bytes.
    """
    place = ObjectPlace(address)
    bytes_by_directory: dict[str, int] = {}
    for key in place.keys_below(address.path):
        directory, _, object_name = key.rpartition("/")
        if DATA_NAME.fullmatch(directory):
            object_match = _OBJECT.fullmatch(object_name)
            nbytes = 0
            if object_match:
                nbytes = int(object_match[1])
            bytes_so_far = bytes_by_directory.get(directory, 0)
            bytes_by_directory[directory] = bytes_so_far + nbytes
    unnamed = []
    for directory in sorted(bytes_by_directory):
        match = DATA_NAME.fullmatch(directory)
        assert match is not None
        checkpoint_path = match[1]
        began_at_seconds = int(match[2])
        target = address
        if checkpoint_path:
            target = address.below(checkpoint_path)
        age_seconds = max(0.0, now - began_at_seconds)
        name = directory.rpartition("/")[2]
        if age_seconds < older_than_seconds or _is_named(target, name):
            continue
        path = address.below(directory)
        partial_save = LeftOver(
            path=path.shown,
            target=target.shown,
            nbytes=bytes_by_directory[directory],
            age_seconds=age_seconds,
        )
        unnamed.append(partial_save)
        if remove:
            place.delete_below(path.path)
    return tuple(unnamed)


def _is_named(target: Address, data: str) -> bool:
    """Whether the index of a checkpoint names files in the directory `data` of it."""
    place = ObjectPlace(target)
    try:
        content = read_json(place, place.inside(SET_INDEX))
    except MissingError:
        return False
    files = member(content, "metadata", FILES_KEY)
    names = files if isinstance(files, list) else []
    return any(str(name).startswith(f"{data}/") for name in names)
