"""Many arrays of safetensors files as columns. A checkpoint of experts has tens of
thousands of arrays of a few kinds, and a Python object for each takes longer than all
else that a load does with them.
"""

import dataclasses
import functools as ft
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard, TypeVar, overload

import numpy as np

from .._ground.spec import DType
from ._entry import ArrayEntry, FileArray


E = TypeVar("E", bound=ArrayEntry)
T = TypeVar("T")


class ArrayKind(NamedTuple):
    """The dtype and the shape that many arrays have in common.

    - `shape`: the shape, which was checked.
    - `dtype`: the dtype in JAX; `None` if JAX lacks it.
    - `stored_name`: the name of the dtype in the file.
    - `nbytes`: the number of bytes of one array in the file.
    """

    shape: tuple[int, ...]
    dtype: DType
    stored_name: str
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class FileTable(Sequence[FileArray]):
    """A sequence of arrays in files, none of them in parts. A `FileArray` is made when
    it is asked for.

    **Arguments:**

    - `paths`: the name of each array.
    - `kinds`: the kinds of the arrays.
    - `kind_numbers`: the position in `kinds` of the kind of each array.
    - `files`: the real paths of the files.
    - `file_numbers`: the position in `files` of the file of each array.
    - `offsets`: the position of the first byte of each array in its file.
    """

    paths: Sequence[str]
    kinds: Sequence[ArrayKind]
    kind_numbers: np.ndarray
    files: Sequence[str]
    file_numbers: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, number: int) -> FileArray: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[FileArray]: ...

    def __getitem__(self, number: int | slice) -> FileArray | Sequence[FileArray]:
        if isinstance(number, slice):
            positions = np.arange(len(self))[number]
            return self._rows(positions, self.paths[number])
        kind = self.kinds[int(self.kind_numbers[number])]
        return FileArray(
            path=self.paths[number],
            shape=kind.shape,
            dtype=kind.dtype,
            file=self.files[int(self.file_numbers[number])],
            stored=kind.stored_name,
            offset=int(self.offsets[number]),
        )

    def __iter__(self) -> Iterator[FileArray]:
        kind_numbers: list[int] = self.kind_numbers.tolist()
        file_numbers: list[int] = self.file_numbers.tolist()
        offsets: list[int] = self.offsets.tolist()
        rows = zip(self.paths, kind_numbers, file_numbers, offsets, strict=True)
        for path, kind_number, file_number, offset in rows:
            kind = self.kinds[kind_number]
            file = self.files[file_number]
            yield FileArray(
                path=path,
                shape=kind.shape,
                dtype=kind.dtype,
                file=file,
                stored=kind.stored_name,
                offset=offset,
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | FileTable):
            return NotImplemented
        return self is other or tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @ft.cached_property
    def position_by_path(self) -> Mapping[str, int]:
        """The position of each array by its path."""
        return dict(zip(self.paths, range(len(self.paths)), strict=True))

    def with_paths(self, paths: Sequence[str]) -> "FileTable":
        """The arrays with these paths, in their order."""
        if paths is self.paths:
            return self
        position_of_each = map(self.position_by_path.__getitem__, paths)
        positions = np.fromiter(position_of_each, np.int64, len(paths))
        return self._rows(positions, paths)

    def at_positions(self, positions: np.ndarray) -> "FileTable":
        """The arrays at these positions of the table."""
        if len(positions) == len(self) and np.array_equal(
            positions, np.arange(len(self))
        ):
            return self
        position_list: list[int] = positions.tolist()
        paths = [self.paths[position] for position in position_list]
        return self._rows(positions, paths)

    def _rows(self, positions: np.ndarray, paths: Sequence[str]) -> "FileTable":
        """The arrays at these positions of the table, whose paths are `paths`. The
        columns have a row for each array; `kinds` and `files` are shared.
        """
        return FileTable(
            paths=paths,
            kinds=self.kinds,
            kind_numbers=self.kind_numbers[positions],
            files=self.files,
            file_numbers=self.file_numbers[positions],
            offsets=self.offsets[positions],
        )

    def used_kinds(self) -> list[ArrayKind]:
        """The kinds that some array has."""
        used_numbers = np.unique(self.kind_numbers)
        return [self.kinds[kind_number] for kind_number in used_numbers]

    def used_files(self) -> list[str]:
        """The files that hold some array, in the order of their first arrays."""
        used_numbers, first_arrays = np.unique(self.file_numbers, return_index=True)
        in_order: list[int] = used_numbers[np.argsort(first_arrays)].tolist()
        return [self.files[file_number] for file_number in in_order]


class ByPath(Mapping[str, FileArray]):
    """The arrays of a table by path, which are all different."""

    def __init__(self, table: FileTable):
        self._table = table

    def __getitem__(self, path: str) -> FileArray:
        return self._table[self._table.position_by_path[path]]

    def __contains__(self, path: object) -> bool:
        return path in self._table.position_by_path

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.position_by_path)

    def __len__(self) -> int:
        return len(self._table.position_by_path)


def by_path(entries: Sequence[E]) -> Mapping[str, E | FileArray]:
    """The entries of arrays by path."""
    if isinstance(entries, FileTable):
        return ByPath(entries)
    return {entry.path: entry for entry in entries}


def all_tables(
    arrays: Sequence[Sequence[FileArray]],
) -> TypeGuard[Sequence[FileTable]]:
    """Whether the arrays of each file are a table, and there is a file."""
    return bool(arrays) and all(isinstance(table, FileTable) for table in arrays)


def one_table(tables: Sequence[FileTable]) -> FileTable:
    """The arrays of several tables, one table after the other."""
    if len(tables) == 1:
        return tables[0]
    paths: list[str] = []
    number_by_kind: dict[ArrayKind, int] = {}
    number_by_file: dict[str, int] = {}
    kind_numbers = []
    file_numbers = []
    for table in tables:
        paths += table.paths
        # Numbers of kinds and files in this table become those in the joined one.
        kind_numbers.append(
            _renumbered(table.kind_numbers, table.kinds, number_by_kind)
        )
        file_numbers.append(
            _renumbered(table.file_numbers, table.files, number_by_file)
        )
    return FileTable(
        paths=paths,
        kinds=list(number_by_kind),
        kind_numbers=np.concatenate(kind_numbers),
        files=list(number_by_file),
        file_numbers=np.concatenate(file_numbers),
        offsets=np.concatenate([table.offsets for table in tables]),
    )


def _renumbered(
    old_numbers: np.ndarray,
    values: Iterable[T],
    number_by_value: dict[T, int],
) -> np.ndarray:
    """The numbers in `number_by_value`, to which new values are added, of the values at
    `old_numbers` in `values`.

    For `[1, 0, 1]`, the values `["a", "b"]` and `{"b": 0}` they are `[0, 1, 0]`.
    """
    new_numbers = []
    for value in values:
        new_number = number_by_value.setdefault(value, len(number_by_value))
        new_numbers.append(new_number)
    return np.array(new_numbers, np.int64)[old_numbers]
