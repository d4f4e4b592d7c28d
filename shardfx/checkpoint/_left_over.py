"""What saves that were killed left beside their targets."""

import dataclasses
import os
import re
import shutil
import stat
import time

from .._ground.text import quoted


# As `save` names what it writes: `.step-100.partial-` and a token that only this save has.
_NAME = re.compile(r"\.(.+)\.partial-[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """A file or directory that a save has not finished.

    **Arguments:**

    - `path`: of it.
    - `target`: what it was to become.
    - `nbytes`: how much of the disk it takes.
    - `age_seconds`: since something was last written to it.
    """

    path: str
    target: str
    nbytes: int
    age_seconds: float

    def __str__(self) -> str:
        return f"{quoted(self.path)}, {self.nbytes} bytes, written to {self.age_seconds:.0f} s ago"


def left_over(
    directory: str | os.PathLike[str], *, older_than_seconds: float | int = 3600.0, remove: bool = False
) -> tuple[LeftOver, ...]:
    """Finds what saves that were killed left in a directory, and removes it if asked.

    **Arguments:**

    - `directory`: the one in which checkpoints are saved; those below it are not looked at.
    - `older_than_seconds`: only what nothing was written to for so long. A save that is under way writes all the time.
    - `remove`: whether to remove what is found.

    **Returns:**

    What was found, by name.

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
            one = _looked_at(path, os.path.join(directory, match[1]), now)
        except FileNotFoundError:  # the save has ended in this moment
            continue
        if one.age_seconds >= older_than_seconds:
            found.append(one)
    for one in found if remove else ():
        remove_partial(one.path)
    return tuple(found)


def _looked_at(path: str, target: str, now: float) -> LeftOver:
    files = [path] + ([entry.path for entry in os.scandir(path)] if os.path.isdir(path) else [])
    stats = [os.lstat(file) for file in files]
    # Files have their full size from the start; blocks are what was written.
    nbytes = sum(one.st_blocks * 512 for one in stats if stat.S_ISREG(one.st_mode))
    return LeftOver(path, target, nbytes, max(0.0, now - max(one.st_mtime for one in stats)))


def remove_partial(path: str) -> None:
    """Removes what a save has written and not finished."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.unlink(path)
