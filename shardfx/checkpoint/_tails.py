"""Whether the objects of a safetensors checkpoint end where their last tensor does.

A file tells its size. An object of a store does not, so the byte behind the last tensor
is asked for, beside the reads of the arrays.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from .._ground.boxes import volume, whole_box
from .._ground.errors import CheckpointError
from ._entry import FileArray
from ._object_faults import ShortError
from ._objects import ObjectPlace


class Tail(NamedTuple):
    """The position behind the last tensor of an object, and TensorStore's future of the
    byte there.
    """

    key: str
    position: int
    future: Any


def begin_tails(
    place: ObjectPlace,
    entries: Iterable[FileArray],
    files: Collection[str],
) -> list[Tail]:
    """Starts to read the byte behind the last tensor of each of `files`.

    `entries` are all arrays of the checkpoint. A file that has an array whose size is
    unknown, since JAX lacks its dtype, is left out.
    """
    stops = dict.fromkeys(files, 0)
    for entry in entries:
        if entry.nbytes is None:
            stops.pop(entry.file, None)
            continue
        for file, end in _ends(entry, entry.nbytes):
            if file in stops:
                stops[file] = max(stops[file], end)
    return [
        Tail(
            key=place.key_of(file),
            position=end,
            future=place.begin_read(place.key_of(file), end, end + 1),
        )
        for file, end in stops.items()
        if end
    ]


def _ends(entry: FileArray, nbytes: int) -> list[tuple[str, int]]:
    """The files of an array, each with the position behind the array in it."""
    if not entry.parts:
        return [(entry.file, entry.offset + nbytes)]
    count = volume(whole_box(entry.shape))
    return [
        (part.file, part.offset + nbytes * volume(part.box) // count)
        for part in entry.parts
    ]


def require_no_tails(place: ObjectPlace, tails: Iterable[Tail]) -> None:
    """Raises `CheckpointError` if an object goes on behind its last tensor."""
    for tail in tails:
        try:
            answer = place.answer(tail.future, tail.key)
        except ShortError:
            continue
        if answer.value:
            raise CheckpointError(
                f"{place.what(tail.key)} goes on behind its last tensor, which ends at"
                f" byte {tail.position}; it is damaged, or was written over a longer"
                " one. Copy the whole file again."
            )
