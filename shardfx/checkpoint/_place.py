"""The interface for the bytes of a checkpoint: files of a directory (`FilePlace`) and
objects of a store (`ObjectPlace`) have the same operations.

A *name* is relative to the place: `model-00001.safetensors`. A *file path* is complete,
as errors show it: `/data/llama/model-00001.safetensors`, or
`s3://bucket/llama/model-00001.safetensors`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from .._ground.errors import CheckpointError


class MissingError(CheckpointError):
    """The error for a file or an object of a checkpoint that is not there."""


T = TypeVar("T")
S = TypeVar("S")


@runtime_checkable
class OpenFile(Protocol):
    """A file or an object that is open for reading."""

    @property
    def known_size(self) -> int | None:
        """The number of bytes; `None` if nothing tells it."""
        ...

    def read(self, count: int, offset: int) -> bytes:
        """The `count` bytes from `offset` on; fewer bytes at the end."""
        ...

    def tail(self, count: int) -> bytes:
        """The last `count` bytes; fewer or none of a file that is shorter."""
        ...


@runtime_checkable
class Place(Protocol):
    """A directory of files, or a prefix of a store's keys, that holds a checkpoint.

    Nothing outside of it is read. A file that changes between two reads raises
    `ChangedError`.
    """

    @property
    def directory(self) -> str:
        """The file path of the place, without a slash at its end."""
        ...

    @property
    def gap_bytes(self) -> int:
        """The least number of consecutive bytes that are worth skipping in a read."""
        ...

    def timeout(self, nbytes: int) -> float | None:
        """The seconds after which a read of `nbytes` without a result is an error;
        `None` where reads do not stall.
        """
        ...

    def names(self) -> list[str]:
        """The sorted names of the files and directories at the top of the place."""
        ...

    def directories(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the file path of the place and of each directory below
        it. The name of the place is ".".
        """
        ...

    def has_file(self, file_path: str) -> bool:
        """Whether there is a file with the path `file_path`."""
        ...

    def inside(self, name: str) -> str:
        """The file path of `name`, a name that an untrusted checkpoint mentions.

        Raises `CheckpointError` if it leads out of the place.
        """
        ...

    def opened(self, file_path: str) -> AbstractContextManager[OpenFile]:
        """A context with the file `file_path`, open for reading."""
        ...

    def chunk(self, file_path: str) -> AbstractContextManager[OpenFile]:
        """A context with a stored chunk, which tensorstore reads again. It may change."""
        ...

    def each(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The results of `call` for all items; at the same time, where each waits for a
        network.
        """
        ...

    def require_unchanged(self) -> None:
        """Raises `ChangedError` if a file that was opened has changed, as far as this
        can be told without reading it.
        """
        ...

    def require_plain_tree(self, directory: str) -> None:
        """Raises `CheckpointError` if anything but files is below the directory
        `directory`.
        """
        ...

    def kvstore(self, directory: str) -> dict[str, Any]:
        """TensorStore's spec of the key-value store of the files in the directory
        `directory`.
        """
        ...
