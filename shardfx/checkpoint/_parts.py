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
from ._safetensors import Header, retyped_arrays


# The index of a set of safetensors files, which makes a step in a store exist.
SET_INDEX = "model.safetensors.index.json"
# The members of the index's metadata: all files of the set, and that of the plan.
FILES_KEY = "shardfx.files"
PLAN_FILE_KEY = "shardfx.plan"
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
    arrays: dict[str, FileArray] = {}
    parts: dict[str, list[tuple[SavedPart, FileArray]]] = {}
    for file, header in headers.items():
        saved_parts = _saved_parts(file, header)
        for array in header.arrays:
            part = saved_parts.get(array.path)
            if part is not None:
                parts.setdefault(part.path, []).append((part, array))
                continue
            first = arrays.setdefault(array.path, array)
            if first is not array:
                raise CheckpointError(
                    f"tensor {quoted(array.path)} is in {first.file!r} and"
                    f" in {file!r}; the set is damaged."
                )
    for path, members in parts.items():
        if path in arrays:
            _, first = members[0]
            raise _damaged(path, first.file, "it is there in parts and whole")
        whole = _array_of_parts(path, members)
        (arrays[path],) = retyped_arrays([whole], headers[whole.file].metadata)
    return arrays


def _saved_parts(file: str, header: Header) -> dict[str, SavedPart]:
    """The tensors of a file that are parts of arrays, by name."""
    text = header.metadata.get(PARTS_KEY)
    if text is None:
        return {}
    content = parsed_json(text.encode(), f"`{PARTS_KEY}` in the header of {file!r}")
    if not isinstance(content, dict):
        return {}
    sizes = {array.path: array.shape for array in header.arrays}
    parts = {}
    for name, row in content.items():
        part = None
        if name in sizes:
            part = _saved_part(row, sizes[name])
        if part is None:
            raise _damaged(name, file, "its entry says of no array where it is a part")
        parts[name] = part
    return parts


def _saved_part(row: object, size: tuple[int, ...]) -> SavedPart | None:
    """The part of an array that a file describes in `row`, a path, a shape and a start;
    `None` if that is no part. `size` is the shape of the tensor that holds the part.
    """
    match row:
        case [str() as path, list() as shape, list() as start]:
            if not is_shape(shape) or not is_sizes(start):
                return None
            part = SavedPart(
                path=path,
                shape=tuple(shape),
                start=tuple(start),
                size=size,
            )
            if _is_inside(part):
                return part
            return None
    return None


def _is_inside(part: SavedPart) -> bool:
    """Whether the part lies in its array and has as many dimensions."""
    if not len(part.shape) == len(part.start) == len(part.size):
        return False
    rows = zip(part.shape, part.start, part.size, strict=True)
    return all(start + size <= whole for whole, start, size in rows)


def _array_of_parts(
    path: str,
    members: Sequence[tuple[SavedPart, FileArray]],
) -> FileArray:
    """The array `path` from all its parts, each with the tensor that holds it. Raises
    `CheckpointError` if they do not make up the array exactly once.
    """
    part, first = members[0]
    kinds = {(part.shape, array.stored) for part, array in members}
    if len(kinds) > 1:
        raise _damaged(path, first.file, "its parts have several shapes or dtypes")
    if len(members) > _MOST_PARTS:
        raise _damaged(path, first.file, f"it has {len(members)} parts")
    sizes = [part.size for part, _ in members]
    starts = np.array([part.start for part, _ in members], np.int64)
    stops = starts + np.array(sizes, np.int64)
    is_complete = sum(map(math.prod, sizes)) == math.prod(part.shape)
    if not is_complete or _overlap(starts, stops):
        raise _damaged(path, first.file, "its parts overlap, or some are missing")

    parts = []
    for start, stop, (_, array) in zip(
        starts.tolist(), stops.tolist(), members, strict=True
    ):
        box = tuple(zip(start, stop, strict=True))
        array_part = ArrayPart(box=box, file=array.file, offset=array.offset)
        parts.append(array_part)
    return dataclasses.replace(first, path=path, shape=part.shape, parts=tuple(parts))


def _overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether two of some boxes have a common element."""
    for number in range(len(starts)):
        low = np.maximum(starts[number], starts[number + 1 :])
        high = np.minimum(stops[number], stops[number + 1 :])
        is_shared = low < high
        if is_shared.all(axis=-1).any():
            return True
    return False


def _damaged(path: str, file: str, why: str) -> CheckpointError:
    """The error for an array whose parts in the set of `file` do not fit together, as
    `why` says.
    """
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
