"""The msgpack files of flax and T5X: a tree of arrays and numbers, read from its
headers.

flax/serialization.py writes an array as an extension whose content is msgpack again:
the shape, the dtype's name and the bytes. So the bytes lie in the file as they are, and
a load reads them like those of safetensors. Nothing is trusted: names are short, and
the bytes of arrays are skipped.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import quoted
from ._entry import FileArray
from ._files import is_shape
from ._place import OpenFile, Place
from ._stores import dtype_named


# flax/serialization.py, `_MsgpackExtType`.
_NDARRAY = 1
_COMPLEX = 2
_NPSCALAR = 3
# flax divides arrays of more than 1 GiB; the dict that holds the parts has this key.
_CHUNKED = "__msgpack_chunked_array__"
_BLOCK_BYTES = 64 * 1024
_TEXT_BYTES = 2**20
_MOST_NESTED = 100
# The format of a number by its first byte, as `struct` writes it.
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
# The width of the length that follows, by the first byte.
_BINS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class Bytes(NamedTuple):
    """Bytes in the file: their position and their number."""

    offset: int
    nbytes: int


class Array(NamedTuple):
    """An array in the file."""

    shape: tuple[int, ...]
    dtype: str
    data: Bytes


@dataclasses.dataclass
class _Cursor:
    """A position in an open file up to which it was parsed, and a block of the file."""

    opened: OpenFile
    file: str
    offset: int = 0
    block: bytes = b""
    block_offset: int = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises `CheckpointError` if the file ends before."""
        start = self.offset - self.block_offset
        if start < 0 or start + count > len(self.block):
            block_bytes = max(count, _BLOCK_BYTES)
            self.block = self.opened.read(block_bytes, self.offset)
            self.block_offset = self.offset
            start = 0
            if len(self.block) < count:
                raise self.damaged("it ends too early")
        self.offset += count
        return self.block[start : start + count]

    def number(self, width: int) -> int:
        """The next `width` bytes as an unsigned integer."""
        return int.from_bytes(self.take(width), "big")

    def skip(self, count: int) -> Bytes:
        """Passes over the next `count` bytes without reading them, and returns their
        position.
        """
        self.offset += count
        return Bytes(self.offset - count, count)

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"msgpack file {self.file!r} cannot be read: {why}, at byte"
            f" {self.offset}. It is damaged, or no file of flax or T5X; copy it again."
        )


def read_tree(place: Place, file_path: str) -> Any:
    """The content of the msgpack file `file_path`: dicts, lists, numbers, text, `None`,
    and an `Array` for each array.
    """
    with place.opened(file_path) as file:
        cursor = _Cursor(opened=file, file=file_path)
        tree = _value(cursor, 0)
        # The bytes of arrays were skipped, and they may be last.
        if not file.read(1, cursor.offset - 1):
            raise cursor.damaged("it ends too early")
        if file.read(1, cursor.offset):
            raise cursor.damaged("more follows the tree")
        return tree


def _value(cursor: _Cursor, depth: int) -> Any:
    """The value that begins at the cursor, which is `depth` levels below the root. The
    first byte is the kind of the value; it also holds a small number, or the length of
    a short map, list or text. The bytes of an array are skipped: the value is their
    position and their number.
    """
    if depth > _MOST_NESTED:
        raise cursor.damaged(f"it is nested more than {_MOST_NESTED} deep")
    code = cursor.number(1)
    if code <= 0x7F or code >= 0xE0:
        if code <= 0x7F:
            return code
        return code - 256
    if code <= 0x8F:
        return _map(cursor, code & 15, depth)
    if code <= 0x9F:
        return _list(cursor, code & 15, depth)
    if code <= 0xBF:
        return _text(cursor, code & 31)
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code]
    if code in _NUMBERS:
        form = _NUMBERS[code]
        count = struct.calcsize(form)
        return struct.unpack(form, cursor.take(count))[0]
    if code in _BINS:
        return cursor.skip(cursor.number(_BINS[code]))
    if code in _TEXTS:
        return _text(cursor, cursor.number(_TEXTS[code]))
    if code in _EXTENSIONS:
        return _extension(cursor, cursor.number(_EXTENSIONS[code]), depth)
    if code in _FIXED_EXTENSIONS:
        return _extension(cursor, _FIXED_EXTENSIONS[code], depth)
    if code in _LISTS:
        return _list(cursor, cursor.number(_LISTS[code]), depth)
    if code in _MAPS:
        return _map(cursor, cursor.number(_MAPS[code]), depth)
    raise cursor.damaged(f"the byte {code:#x} begins no value")


def _text(cursor: _Cursor, nbytes: int) -> str:
    if nbytes > _TEXT_BYTES:
        raise cursor.damaged(f"a text of {nbytes} bytes is too long for a name")
    try:
        return cursor.take(nbytes).decode()
    except UnicodeDecodeError:
        raise cursor.damaged("a text is not UTF-8") from None


def _list(cursor: _Cursor, count: int, depth: int) -> list[Any]:
    return [_value(cursor, depth + 1) for _ in range(count)]


def _map(cursor: _Cursor, count: int, depth: int) -> dict[str, Any]:
    """The map of `count` keys and values that begins at the cursor."""
    members: dict[str, Any] = {}
    for _ in range(count):
        key = _value(cursor, depth + 1)
        if not isinstance(key, str | int) or str(key) in members:
            raise cursor.damaged("a key is no text, or occurs twice")
        members[str(key)] = _value(cursor, depth + 1)
    return members


def _extension(cursor: _Cursor, nbytes: int, depth: int) -> Any:
    """The array or number of an extension of flax: a code for its kind, and `nbytes`
    bytes that are msgpack again. Those of an array are a list of its shape, its dtype
    and its `Bytes`, which are skipped; those of a complex number its two parts.
    """
    code = cursor.number(1)
    start = cursor.offset
    if code not in (_NDARRAY, _COMPLEX, _NPSCALAR):
        raise cursor.damaged(f"it has an extension {code}, which flax does not write")
    content = _value(cursor, depth + 1)
    if cursor.offset != start + nbytes:
        raise cursor.damaged("an array has another length than it says")
    match content:
        case [int() | float() as real, int() | float() as imaginary] if (
            code == _COMPLEX
        ):
            return complex(real, imaginary)
        case [list() as shape, str() as dtype, Bytes() as data] if code != _COMPLEX:
            return _array(cursor, shape, dtype, data)
        case [list() as shape, Bytes() as name, Bytes() as data] if code != _COMPLEX:
            length = min(name.nbytes, 64)
            text = cursor.opened.read(length, name.offset)
            return _array(cursor, shape, text.decode("ascii", "replace"), data)
    raise cursor.damaged("an array has no shape, dtype and bytes")


def _array(cursor: _Cursor, shape: list[Any], dtype: str, data: Bytes) -> Array:
    """An array of flax from its parts. Raises `CheckpointError` if they do not fit
    together.
    """
    named = _dtype_of_bytes(dtype)
    if not is_shape(shape):
        raise cursor.damaged("an array's shape is no list of sizes")
    if named is not None and math.prod(shape) * named.itemsize != data.nbytes:
        raise cursor.damaged(f"an array has {data.nbytes} bytes for the shape {shape}")
    return Array(
        shape=tuple(shape),
        dtype=dtype,
        data=data,
    )


def _dtype_of_bytes(text: str) -> DType:
    """The dtype of an array's bytes, by its name; `None` if they cannot be read as they
    are: if JAX lacks the dtype, or if the first byte of an element is its highest.
    """
    return None if text.startswith(">") else dtype_named(text)


def _is_spec(node: object) -> bool:
    """Whether a dict is a spec of tensorstore, in the place of an array."""
    if not isinstance(node, dict):
        return False
    is_cast = node.get("driver") == "cast" and _is_spec(node.get("base"))
    return is_cast or {"driver", "kvstore"} <= node.keys()


class Leaves(NamedTuple):
    """The leaves of a msgpack tree: its arrays, its Python numbers by path, and for
    each array that is elsewhere its path and its description.
    """

    arrays: list[FileArray]
    numbers: dict[str, Any]
    elsewhere: list[tuple[str, dict[str, Any]]]


def leaves_of(tree: Any, file: str) -> Leaves:
    """The leaves of a tree from the msgpack file `file`. Text and `None` are passed
    over. Raises `CheckpointError` if two leaves have one path: a key may contain "/".
    """
    leaves = Leaves(
        arrays=[],
        numbers={},
        elsewhere=[],
    )
    paths: set[str] = set()
    for path, leaf in _nodes_of_leaves(tree, ""):
        if path in paths:
            raise CheckpointError(
                f"{file!r} has two leaves with the path {quoted(path)}, since a key"
                ' contains "/"; a path names one leaf. Rename one of them where the'
                " checkpoint is made."
            )
        paths.add(path)
        if isinstance(leaf, Array):
            array = FileArray(
                path=path,
                shape=leaf.shape,
                dtype=_dtype_of_bytes(leaf.dtype),
                file=file,
                stored=leaf.dtype,
                offset=leaf.data.offset,
            )
            leaves.arrays.append(array)
        elif not isinstance(leaf, dict):
            leaves.numbers[path] = leaf
        elif _CHUNKED in leaf:
            leaves.arrays.append(_array_in_parts(leaf, path, file))
        else:
            leaves.elsewhere.append((path, leaf))
    return leaves


def _nodes_of_leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the path and the node of each leaf at or below the node `node` of a
    msgpack tree: an array, a number, or the dict of an array that is in parts or
    elsewhere. `path` is the path of `node`; "" for the root.
    """
    if isinstance(node, Array | bool | int | float | complex):
        yield path, node
    elif isinstance(node, dict) and (_CHUNKED in node or _is_spec(node)):
        yield path, node
    elif isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for name, below in pairs:
            path_below = f"{path}/{name}" if path else str(name)
            yield from _nodes_of_leaves(below, path_below)


def _array_in_parts(node: dict[str, Any], path: str, file: str) -> FileArray:
    """The array that flax has divided, from its dict in the msgpack file `file`."""
    sizes = node.get("shape")
    shape = list(sizes.values()) if isinstance(sizes, dict) else []
    if not is_shape(shape):
        raise CheckpointError(
            f"{quoted(path)} in {file!r} is an array in parts without a shape; the"
            " file is damaged."
        )
    return FileArray(
        path=path,
        shape=tuple(shape),
        dtype=None,
        file=file,
        stored="an array in parts",
        offset=0,
    )
