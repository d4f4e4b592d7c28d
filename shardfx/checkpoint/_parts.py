"""Arrays that are stored in parts, each a tensor of its own in some file of a set."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._entry import ArrayPart, FileArray
from ._files import is_shape, is_sizes, parsed_json
from ._safetensors import Header, renamed


# The index of a set of safetensors files, which makes a step in a store exist.
SET_INDEX = "model.safetensors.index.json"
# The members of the index's metadata: all files of the set, and that of the plan.
FILES_KEY, PLAN_FILE_KEY = "shardfx.files", "shardfx.plan"
# In the metadata of a file: by the name of a tensor, the array of which it is a part.
PARTS_KEY = "shardfx.parts"
_MOST_PARTS = 8192


class SavedPart(NamedTuple):
    """A part of an array: the array's path and shape, where the part starts, and its
    size.
    """

    path: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    def to_json(self) -> list[Any]:
        return [self.path, self.shape, self.start]


def joined(headers: Mapping[str, Header]) -> dict[str, FileArray]:
    """The arrays of a set of files by path; those in parts are put together.

    Raises `CheckpointError` for parts that do not make up their array.
    """
    found: dict[str, FileArray] = {}
    parts: dict[str, list[tuple[SavedPart, FileArray]]] = {}
    for file, header in headers.items():
        described = _described(file, header)
        for array in header.arrays:
            part = described.get(array.path)
            if part is not None:
                parts.setdefault(part.path, []).append((part, array))
                continue
            if found.setdefault(array.path, array) is not array:
                raise CheckpointError(
                    f"tensor {quoted(array.path)} is in {found[array.path].file!r} and"
                    f" in {file!r}; the set is damaged."
                )
    for path, members in parts.items():
        if path in found:
            raise _damaged(path, members[0][1].file, "it is there in parts and whole")
        whole = _whole(path, members)
        found[path] = renamed([whole], headers[whole.file].metadata)[0]
    return found


def _described(file: str, header: Header) -> dict[str, SavedPart]:
    text = header.metadata.get(PARTS_KEY)
    if text is None:
        return {}
    content = parsed_json(text.encode(), f"`{PARTS_KEY}` in the header of {file!r}")
    described = {}
    sizes = {array.path: array.shape for array in header.arrays}
    for name, row in content.items() if isinstance(content, dict) else ():
        match row:
            case [str() as path, list() as shape, list() as start] if name in sizes:
                part = SavedPart(path, tuple(shape), tuple(start), sizes[name])
                if is_shape(shape) and is_sizes(start) and _is_inside(part):
                    described[name] = part
                    continue
        raise _damaged(name, file, "its entry says of no array where it is a part")
    return described


def _is_inside(part: SavedPart) -> bool:
    if not len(part.shape) == len(part.start) == len(part.size):
        return False
    rows = zip(part.shape, part.start, part.size, strict=True)
    return all(start + size <= whole for whole, start, size in rows)


def _whole(path: str, members: Sequence[tuple[SavedPart, FileArray]]) -> FileArray:
    part, first = members[0]
    same = {(one.shape, array.stored) for one, array in members}
    if len(same) > 1:
        raise _damaged(path, first.file, "its parts have several shapes or dtypes")
    if len(members) > _MOST_PARTS:
        raise _damaged(path, first.file, f"it has {len(members)} parts")
    volumes = [math.prod(one.size) for one, _ in members]
    starts = np.array([one.start for one, _ in members], np.int64)
    stops = starts + np.array([one.size for one, _ in members], np.int64)
    if sum(volumes) != math.prod(part.shape) or _overlap(starts, stops):
        raise _damaged(path, first.file, "its parts overlap, or some are missing")
    boxes = [
        ArrayPart(tuple(zip(low, high, strict=True)), array.file, array.offset)
        for low, high, (_, array) in zip(
            starts.tolist(), stops.tolist(), members, strict=True
        )
    ]
    return dataclasses.replace(first, path=path, shape=part.shape, parts=tuple(boxes))


def _overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether two of some boxes have a common element."""
    for number in range(len(starts)):
        low = np.maximum(starts[number], starts[number + 1 :])
        high = np.minimum(stops[number], stops[number + 1 :])
        if (low < high).all(axis=-1).any():
            return True
    return False


def _damaged(path: str, file: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"array {quoted(path)} of the set with {file!r} cannot be put together: {why}."
        " Files of several saves are mixed, or one is lost; copy the whole checkpoint."
    )


def files_of(entries: Iterable[FileArray]) -> list[str]:
    """The files in which the arrays are, each once."""
    names: dict[str, None] = {}
    for entry in entries:
        names |= dict.fromkeys([part.file for part in entry.parts] or [entry.file])
    return list(names)
