"""Safe access to the files of an untrusted checkpoint: regular files below one
directory, and nothing else.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._place import MissingError, Place, S, T


# Shorter gaps between the bytes that a process needs are read too, since skipping them
# takes ten times as long.
GAP_BYTES = 64
# An integer with twice as many digits may be too large for a double. Wherever it is in
# a text, one of the text's blocks of this length lies wholly in it.
_BLOCK_DIGITS = 150
# An escaped surrogate; two that form a pair are one character after parsing.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class ChangedError(CheckpointError):
    """The error for a file of a checkpoint that has changed since it was first opened."""


class LocalFile(NamedTuple):
    """A file that is open for reading, by its descriptor."""

    descriptor: int

    @property
    def known_size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, count: int, offset: int) -> bytes:
        return read_at(self.descriptor, count, offset)

    def tail(self, count: int) -> bytes:
        return self.read(count, max(0, self.known_size - count))


@dataclasses.dataclass(frozen=True)
class FilePlace:
    """A checkpoint's directory, and the other directories that its links may lead to,
    as real paths without links.

    Its methods are those of `Place`. `stamps` records each opened file by device,
    inode, size and time of change. Every file must stay unchanged until the checkpoint
    has been read, because the content of one file decides how others are read.
    """

    directory: str
    roots: tuple[str, ...]
    stamps: dict[str, tuple[int, ...]] = dataclasses.field(
        default_factory=dict,
        compare=False,
        repr=False,
    )

    @property
    def gap_bytes(self) -> int:
        return GAP_BYTES

    def timeout(self, nbytes: int) -> None:
        return None

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def directories(self) -> Iterator[tuple[str, str]]:
        for directory, below, _ in os.walk(self.directory):
            below.sort()
            relative = os.path.relpath(directory, self.directory)
            name = relative.replace(os.sep, "/")
            yield name, directory

    def has_file(self, file_path: str) -> bool:
        return os.path.isfile(file_path)

    def inside(self, name: str) -> str:
        return inside(self, name)

    @contextlib.contextmanager
    def opened(self, file_path: str) -> Iterator[LocalFile]:
        with opened(self, file_path) as descriptor:
            yield LocalFile(descriptor)

    @contextlib.contextmanager
    def chunk(self, file_path: str) -> Iterator[LocalFile]:
        with open(file_path, "rb") as file:
            yield LocalFile(file.fileno())

    def each(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        return [call(item) for item in items]

    def require_unchanged(self) -> None:
        for file_path in list(self.stamps):
            try:
                self.require_same(file_path, os.stat(file_path))
            except FileNotFoundError:
                raise _missing(file_path) from None

    def require_plain_tree(self, directory: str) -> None:
        require_plain_tree(self, directory)

    def kvstore(self, directory: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{directory}/"}

    def root_of(self, path: str) -> str | None:
        """The directory of `roots` that contains `path`, or `None`."""
        return next(
            (root for root in self.roots if os.path.commonpath([root, path]) == root),
            None,
        )

    def require_same(self, file_path: str, status: os.stat_result) -> None:
        """Raises `ChangedError` if the file `file_path` has changed since it was first
        opened.

        `status` is the state of the file now. At the first call for a path, it is
        recorded.
        """
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self.stamps.setdefault(file_path, stamp) != stamp:
            raise ChangedError(
                f"checkpoint file {quoted(file_path)} was replaced or written to since"
                " its header was read; nothing was loaded. Read the index again once"
                " the writer is done."
            )


def local_place(directory: str, root: str | os.PathLike[str] | None) -> FilePlace:
    """The `FilePlace` of the checkpoint in a directory. The checkpoint's symbolic links
    may also lead to `root`.
    """
    real_directory = os.path.realpath(directory)
    roots = [real_directory]
    if root is not None:
        roots.append(os.path.realpath(root))
    return FilePlace(real_directory, tuple(roots))


def inside(place: FilePlace, name: str) -> str:
    """The real path of `name`, a relative path that a checkpoint mentions, without
    symbolic links.

    Raises `CheckpointError` for an absolute path, one with `..` or a NUL byte, and a
    link that leaves the roots of `place`.
    """
    require_relative(place.directory, name)
    path = os.path.join(place.directory, name)
    return _resolved_inside(place, path, name)


def require_relative(directory: str, name: str) -> None:
    """Raises `CheckpointError` for an absolute path, and one with `..` or a NUL byte."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise CheckpointError(
            f"checkpoint {directory!r} names the file {quoted(name)}, which is not a"
            " relative path below the directory; nothing outside it is opened. Correct"
            " the index, or load a checkpoint that you trust."
        )


def _resolved_inside(place: FilePlace, path: str, name: str) -> str:
    """The path without symbolic links. Raises `CheckpointError`, with the relative name
    `name`, if it is in none of the roots of `place`.
    """
    file_path = os.path.realpath(path)
    if place.root_of(file_path) is None:
        raise CheckpointError(
            f"checkpoint {place.directory!r}: {quoted(name)} is a symbolic link that"
            f" leaves the directory, to {quoted(file_path)}; nothing outside is opened."
            " If you trust it, allow the directory that holds its target:"
            f" `root={quoted(os.path.dirname(file_path))}`."
        )
    return file_path


@contextlib.contextmanager
def opened(place: FilePlace, file_path: str) -> Iterator[int]:
    """A context with a descriptor for reading the regular file `file_path`, opened
    without following any link.

    The path is opened one directory after the other, so that a link that replaces a
    directory is refused too. On entry and on exit, the context raises `ChangedError` if
    the file has changed since it was first opened.
    """
    descriptor = _open_below(place.root_of(file_path) or place.directory, file_path)
    try:
        place.require_same(file_path, os.fstat(descriptor))
        yield descriptor
        place.require_same(file_path, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _open_below(root: str, file_path: str) -> int:
    """A descriptor of the regular file `file_path` below the directory `root`. Each
    directory between is opened in the one before, and none of them may be a link.
    """
    relative = os.path.relpath(file_path, root)
    parts = relative.split(os.sep)
    safe = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directory = os.open(root, safe | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                below = os.open(part, safe | os.O_DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = below
            # Opening a pipe without a writer must fail instead of wait.
            descriptor = os.open(parts[-1], safe | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)
    except FileNotFoundError:
        raise _missing(file_path) from None
    except OSError as error:
        raise CheckpointError(
            f"checkpoint file {quoted(file_path)} cannot be opened: {error.strerror}."
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(file_path)
    return descriptor


def require_plain_tree(place: FilePlace, directory: str) -> None:
    """Raises `CheckpointError` if `directory` or a directory below it contains anything
    but files and directories, such as a pipe.

    Links must lead to files or directories in the roots of `place`. tensorstore opens
    files itself: it follows every link, and waits for ever at a pipe.
    """
    seen_directories = {directory}
    waiting_directories = [directory]
    while waiting_directories:
        with os.scandir(waiting_directories.pop()) as entries:
            for entry in entries:
                path = entry.path
                if entry.is_symlink():
                    name = os.path.relpath(path, place.directory)
                    path = _resolved_inside(place, path, name)
                    if not os.path.exists(path):
                        raise _missing(path)
                    is_directory = os.path.isdir(path)
                    is_file = os.path.isfile(path)
                else:
                    is_directory = entry.is_dir(follow_symlinks=False)
                    is_file = entry.is_file(follow_symlinks=False)
                if is_directory:
                    if path not in seen_directories:
                        seen_directories.add(path)
                        waiting_directories.append(path)
                elif not is_file:
                    raise _irregular(path)


def _missing(file_path: str) -> MissingError:
    return MissingError(
        f"checkpoint file {quoted(file_path)} is missing; copy it there, or point to a"
        " whole checkpoint."
    )


def _irregular(file_path: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint file {quoted(file_path)} is no regular file; a checkpoint holds"
        " plain files only."
    )


def parsed_json(data: bytes, shown_name: str) -> Any:
    """The content of JSON text in UTF-8. `shown_name` names the text in errors.

    Duplicate names, NaN, unpaired surrogates and nesting that exhausts the stack raise
    `CheckpointError`.
    """
    try:
        text = data.decode("utf-8")
        parse_int = int
        if _may_hold_odd_integers(data):
            parse_int = _integer_or_float
        content = json.loads(
            text,
            object_pairs_hook=unique_members,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=parse_int,
        )
        # An unpaired surrogate has no UTF-8, and the encoder raises.
        if _SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise CheckpointError(
            f"{shown_name} is nested too deeply to be a checkpoint's JSON."
        ) from None
    except ValueError as error:
        # Python's text of the value would escape the character that a terminal cannot
        # show.
        reason = error
        if isinstance(error, UnicodeError):
            reason = "it is not UTF-8"
        raise CheckpointError(
            f"{shown_name} is no valid JSON: {reason}. The file is damaged, or of"
            " another format."
        ) from None
    return content


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object. Raises `ValueError` for a name that occurs twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {quoted(name)} occurs twice")
            seen.add(name)
    return members


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is no number that a double holds")
    return value


def _may_hold_odd_integers(data: bytes) -> bool:
    """Whether JSON text may contain `-0` or a very long integer, which need a check of
    each integer.

    That check takes longer than parsing, so most texts are parsed without it.
    """
    if b"-0" in data:
        return True
    # An integer of twice the length of a block fills a block with digits.
    starts = range(0, len(data), _BLOCK_DIGITS)
    return any(data[start : start + _BLOCK_DIGITS].isdigit() for start in starts)


def _integer_or_float(text: str) -> int | float:
    """The number that an integer in JSON text stands for.

    As in other JSON readers, -0 is a float. A number that is too large for a double is
    an error.
    """
    if text == "-0":
        return -0.0
    if len(text) >= 2 * _BLOCK_DIGITS:
        _finite(text)
    return int(text)


def member(content: object, *names: str) -> Any:
    """The value in nested JSON objects under the given names, one name per level;
    `None` if a name is missing.
    """
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def is_sizes(values: object) -> TypeGuard[list[int]]:
    """Whether `values` is a possible shape of a NumPy array: a list of at most 64
    integers from 0 to 2**63 - 1.
    """
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all([type(v) is int and 0 <= v < 2**63 for v in values])
    )


def is_shape(values: object) -> TypeGuard[list[int]]:
    """Whether `values` is a list of sizes that NumPy takes for an array of any dtype.

    NumPy multiplies the sizes that are not 0, and 16 bytes are the widest element.
    """
    return is_sizes(values) and math.prod(size or 1 for size in values) < 2**59


def read_json(place: Place, file_path: str, limit_bytes: int = 100_000_000) -> Any:
    """The content of the JSON file `file_path`. A file of more than `limit_bytes` bytes
    raises `CheckpointError`.
    """
    with place.opened(file_path) as file:
        size = file.known_size
        if size is not None and size > limit_bytes:
            raise _too_large(file_path, f"{size} bytes", limit_bytes)
        most_bytes = size
        if most_bytes is None:
            most_bytes = limit_bytes
        # With one byte more, a file that is too large is noticed.
        data = file.read(most_bytes + 1, 0)
    if len(data) > limit_bytes:
        raise _too_large(file_path, f"{len(data)} bytes or more", limit_bytes)
    return parsed_json(data, repr(file_path))


def _too_large(file_path: str, what: str, limit_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{file_path!r} has {what}, more than the {limit_bytes} allowed for an index."
    )


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """The `count` bytes of a file from `offset` on; fewer bytes at the end of the file."""
    data = b""
    while piece := os.pread(descriptor, count - len(data), offset + len(data)):
        data += piece
    return data
