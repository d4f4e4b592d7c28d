"""Which reader reads the files of a checkpoint."""

import contextlib
from collections.abc import Iterable, Iterator

from ._files import FilePlace
from ._object_reads import READ_LIMIT_BYTES, ObjectFiles, open_objects
from ._objects import ObjectPlace
from ._place import Place
from ._reader import Files, open_files as open_local


# What reads spans of the arrays of a checkpoint.
Reader = Files | ObjectFiles


@contextlib.contextmanager
def open_files(
    place: Place,
    names: Iterable[str],
    threads: int,
    gap_bytes: int,
    read_limit_bytes: int | None,
) -> Iterator[Reader]:
    """A context in which the named files are open, for reads in `threads` threads.

    `read_limit_bytes` bounds the bytes of requests to a store that are under way.
    """
    if isinstance(place, ObjectPlace):
        limit_bytes = read_limit_bytes
        if limit_bytes is None:
            limit_bytes = READ_LIMIT_BYTES
        with open_objects(place, limit_bytes, gap_bytes) as objects:
            yield objects
        return
    assert isinstance(place, FilePlace)
    with open_local(place, names, threads) as files:
        yield files
