"""Opening files of a checkpoint that nobody vouches for: regular files below one directory, and nothing else."""

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from .._errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Place:
    """A checkpoint's directory, and the directories whose files it may open; real paths, without links."""

    directory: str
    roots: tuple[str, ...]

    def root_of(self, real: str) -> str | None:
        """The one of `roots` that `real` is in."""
        return next((root for root in self.roots if os.path.commonpath([root, real]) == root), None)


def place(directory: str, root: str | os.PathLike[str] | None) -> Place:
    """The place of a checkpoint; `root` is a further directory that its links may lead to."""
    own = os.path.realpath(directory)
    return Place(own, (own,) if root is None else (own, os.path.realpath(root)))


def inside(where: Place, name: str) -> str:
    """The real path of `name`, a file or directory that a checkpoint mentions.

    **Arguments:**

    - `where`: the checkpoint's place.
    - `name`: what the checkpoint calls the file; a relative path.

    **Returns:**

    An absolute path below one of the place's roots, without symbolic links.

    **Raises:**

    `CheckpointError` for an absolute path, one with `..` or a NUL byte, and a symbolic link that leaves the roots.
    """
    directory = where.directory
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name or not name:
        raise CheckpointError(
            f"checkpoint {directory!r} names the file {name!r}, which is not a relative path below the directory; "
            "nothing outside it is opened. Correct the index, or load a checkpoint that you trust."
        )
    real = os.path.realpath(os.path.join(directory, name))
    if where.root_of(real) is None:
        raise CheckpointError(
            f"checkpoint {directory!r}: {name!r} is a symbolic link that leaves the directory, to {real!r}; nothing "
            "outside is opened. If you trust it, allow the directory that holds its target: "
            f"`root={os.path.dirname(real)!r}`."
        )
    return real


@contextlib.contextmanager
def opened(where: Place, real: str) -> Iterator[int]:
    """A descriptor of the regular file `real`, for reading; walked from its root without following any link.

    The path was resolved before; walking it part by part means that a link put there since then is refused, too.
    """
    descriptor = _open(where.root_of(real) or where.directory, real)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open(root: str, real: str) -> int:
    parts = os.path.relpath(real, root).split(os.sep)
    safe = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        here = os.open(root, safe | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                below = os.open(part, safe | os.O_DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
            # Opening a pipe that nobody writes to must fail, not wait.
            descriptor = os.open(parts[-1], safe | os.O_NONBLOCK, dir_fd=here)
        finally:
            os.close(here)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint file {real!r} is missing; copy it there, or point to a whole checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"checkpoint file {real!r} cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"checkpoint file {real!r} is no regular file; a checkpoint holds plain files only.")
    return descriptor


def require_tree_inside(where: Place, real: str) -> None:
    """Raises if a symbolic link below the directory `real` leads out; for libraries that open files themselves."""
    for directory, directories, files in os.walk(real):
        for name in [*directories, *files]:
            if os.path.islink(os.path.join(directory, name)):
                inside(where, os.path.relpath(os.path.join(directory, name), where.directory))


def parsed_json(data: bytes, where: str) -> Any:
    """`data` as strict JSON: no duplicate names, no NaN, no nesting deep enough to exhaust the stack."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply to be a checkpoint's JSON.") from None
    except ValueError as error:
        raise CheckpointError(
            f"{where} is no valid JSON: {error}. The file is damaged, or of another format."
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def read_json(where: Place, real: str, limit_bytes: int = 100_000_000) -> Any:
    """The strict JSON content of the file `real`, of at most `limit_bytes`."""
    with opened(where, real) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise CheckpointError(f"{real!r} has {size} bytes, more than the {limit_bytes} allowed for an index.")
        data = b""
        while piece := os.pread(descriptor, size + 1 - len(data), len(data)):
            data += piece
    return parsed_json(data, repr(real))
