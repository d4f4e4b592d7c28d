"""The safetensors format: a length, a JSON header and a buffer. A header is checked
before it is used.

The buffer has the bytes of all tensors, one after the other.
"""

import dataclasses
import functools as ft
import itertools as it
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ground.errors import CheckpointError
from .._ground.spec import DType
from .._ground.text import quoted
from ._entry import PACKED_BITS, FileArray
from ._files import is_shape, is_sizes, parsed_json
from ._header_table import header_table
from ._kinds import kind_of
from ._metadata import key_named, of_bits
from ._place import Place
from ._table import ArrayKind, FileTable


# The format's own limit for the header.
HEADER_LIMIT_BYTES = 100_000_000
_FIELDS = {"dtype", "shape", "data_offsets"}
# The depth to which the format's library reads JSON: the header and a tensor's entry
# are the first two levels.
_MOST_NESTED = 127

_NAMES_TEXT = (
    "BOOL bool, U8 uint8, I8 int8, U16 uint16, I16 int16, U32 uint32, I32 int32, U64"
    " uint64, I64 int64, F16 float16, BF16 bfloat16, F32 float32, F64 float64, C64"
    " complex64, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, F8_E8M0 float8_e8m0fnu,"
    " F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz"
)
NAMES = {
    jnp.dtype(name): stored for stored, name in map(str.split, _NAMES_TEXT.split(", "))
}
# By the name in the file: the bits of an element, and the JAX dtype if there is one.
DTYPES: dict[str, tuple[int, Any]] = {
    stored: (8 * dtype.itemsize, dtype) for dtype, stored in NAMES.items()
}
# Several elements are packed in a byte. JAX has a dtype for one of these.
DTYPES |= {name: (each, None) for name, each in PACKED_BITS.items()}
DTYPES["F4"] = (PACKED_BITS["F4"], np.dtype(jnp.float4_e2m1fn))
# Other one-byte dtypes are stored as U8, PRNG keys as U32; the file's metadata names
# their dtypes.
DTYPES_KEY = "shardfx.dtypes"
METADATA = "__metadata__"
# The text of the plan, in the metadata of a file, or the plan's digest.
PLAN_KEY = "shardfx.plan"
ONE_BYTE_DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        jnp.int4,
        jnp.uint4,
        jnp.float8_e4m3b11fnuz,
        jnp.float8_e3m4,
        jnp.float8_e4m3,
        jnp.float4_e2m1fn,
    )
}


@ft.lru_cache(maxsize=64)
def stored_name(dtype: DType) -> str | None:
    """The name of a dtype in the safetensors format; `None` if safetensors cannot store
    it.
    """
    dtype = np.dtype(dtype)
    if dtype in NAMES:
        return NAMES[dtype]
    if dtype.name in ONE_BYTE_DTYPES:
        return "U8"
    return None


class Header(NamedTuple):
    """The arrays and metadata of a file. The arrays are in the order of the buffer."""

    arrays: Sequence[FileArray]
    metadata: dict[str, str]


def read_headers(place: Place, files: Iterable[str]) -> dict[str, Header]:
    """The checked header of each safetensors file, by its file name; no weight is
    read.
    """
    names = list(dict.fromkeys(files))
    headers = place.each(lambda file_path: read_header(place, file_path), names)
    return dict(zip(names, headers, strict=True))


def read_header(place: Place, file_path: str) -> Header:
    """The checked header of the safetensors file `file_path`; no weight is read.

    A load finds out if an object, whose size is unknown, is too short or too long.
    """
    with place.opened(file_path) as file:
        size = file.known_size
        head = file.read(32, 0)
        length = int.from_bytes(head[:8], "little")
        most_bytes = HEADER_LIMIT_BYTES
        if size is not None:
            most_bytes = min(HEADER_LIMIT_BYTES, size - 8)
        if length > most_bytes or len(head) < 8:
            raise _no_header(file_path, head, length, size)
        data = file.read(length, 8)
        if len(data) < length:
            raise _no_header(file_path, head, length, 8 + len(data))
    buffer_bytes = None if size is None else size - 8 - length
    return parse_header(data, buffer_bytes, file_path)


def _no_header(
    file_path: str,
    head: bytes,
    length: int,
    size: int | None,
) -> CheckpointError:
    """The error for a file `file_path` that begins with `head` and has no whole header.
    `length` is the length that it claims, and `size` its own size, if it is known.
    """
    kind = kind_of(head)
    if kind is not None:
        return CheckpointError(f"{file_path!r} is {kind.name}; {kind.fix}.")
    of_bytes = "" if size is None else f" of {size} bytes"
    return CheckpointError(
        f"safetensors file {file_path!r}{of_bytes} claims a header of {length} bytes;"
        " the file is truncated, damaged, or of another format (a header has at most"
        f" {HEADER_LIMIT_BYTES} bytes)."
    )


def parse_header(data: bytes, buffer_bytes: int | None, file: str) -> Header:
    """The header of `file` from its JSON text `data`. `buffer_bytes` is the number of
    bytes after the header, if it is known.

    Raises `CheckpointError` for anything that the format forbids: duplicate names,
    unknown dtypes, invalid or inconsistent shapes and offsets, and tensors that
    overlap, lie outside of the buffer or leave gaps in it.
    """
    table = header_table(data, buffer_bytes, file, _array_kind)
    if table is not None:
        renamed_arrays = retyped_arrays(table.arrays, table.metadata)
        return Header(renamed_arrays, table.metadata)
    content = parsed_json(data, f"the header of {file!r}")
    if not isinstance(content, dict):
        raise CheckpointError(
            f"the header of {file!r} is no JSON object; the file is of another format."
        )
    metadata = content.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise CheckpointError(
            f"`__metadata__` in the header of {file!r} must map strings to strings."
        )
    # Where the buffer begins in the file: 8 bytes have the length of the header.
    base = 8 + len(data)
    arrays = [_array(name, row, base, file) for name, row in content.items()]
    stops = {}
    for name, entry in content.items():
        stops[name] = base + entry["data_offsets"][1]
    if any(array.offset > after.offset for array, after in it.pairwise(arrays)):
        arrays.sort(key=lambda array: (array.offset, stops[array.path]))
    reached = base
    for array in arrays:
        if array.offset != reached:
            problem = "leaves a hole before it"
            if array.offset < reached:
                problem = "overlaps the one before it"
            raise CheckpointError(
                f"tensor {quoted(array.path)} in {file!r} starts at byte"
                f" {array.offset - base} of the buffer and {problem}, which ends at"
                f" {reached - base}; the file is damaged or forged."
            )
        reached = stops[array.path]
    if buffer_bytes is not None and reached != base + buffer_bytes:
        raise CheckpointError(
            f"the tensors of {file!r} take {reached - base} bytes, but {buffer_bytes}"
            " follow the header; the file is truncated or damaged."
        )
    return Header(retyped_arrays(arrays, metadata), metadata)


def _array_kind(stored: str, shape: object) -> ArrayKind | None:
    """The kind of tensors with this name of a dtype and this shape in JSON; `None` if
    the format forbids them.
    """
    if stored not in DTYPES or not is_shape(shape):
        return None
    bits_each, dtype = DTYPES[stored]
    nbits = _element_count(shape) * bits_each
    if nbits % 8 or nbits >= 2**63:
        return None
    return ArrayKind(
        shape=tuple(shape),
        dtype=dtype,
        stored_name=stored,
        nbytes=nbits // 8,
    )


def _array(name: str, entry: object, base: int, file: str) -> FileArray:
    """The array `name` from `entry`, its JSON in the header of `file`. Unknown fields
    of the entry are ignored.

    `base` is the buffer's position in the file. Raises `CheckpointError` for an invalid
    entry.
    """
    if not isinstance(entry, dict) or not _FIELDS <= entry.keys():
        raise CheckpointError(
            f"tensor {quoted(name)} in {file!r} must have `dtype`, `shape` and"
            " `data_offsets`."
        )
    if len(entry) > len(_FIELDS) and _depth(entry) + 1 > _MOST_NESTED:
        raise CheckpointError(
            f"tensor {quoted(name)} in {file!r} has a field nested more than"
            f" {_MOST_NESTED} deep, which the format's library does not read; the file"
            " is damaged or forged."
        )
    stored = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(stored, str) or stored not in DTYPES:
        raise CheckpointError(
            f"tensor {quoted(name)} in {file!r} has the dtype {_short_text(stored)},"
            f" which is none of {', '.join(DTYPES)}."
        )
    if not is_shape(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"tensor {quoted(name)} in {file!r} has shape {_short_text(shape)} and"
            f" offsets {_short_text(offsets)}; both must be lists of at most 64"
            " non-negative integers below 2**63, the offsets two. The sizes that are"
            " not 0 must have a product below 2**59."
        )
    begin, end = offsets
    bits_each, dtype = DTYPES[stored]
    expected_bits = _element_count(shape) * bits_each
    if expected_bits != 8 * (end - begin):
        raise CheckpointError(
            f"tensor {quoted(name)} in {file!r} has dtype {stored} and shape"
            f" {_short_text(shape)}, which needs {-(-expected_bits // 8)} bytes, but"
            f" the offsets [{begin}, {end}]; the file is damaged or forged."
        )
    return FileArray(
        path=name,
        shape=tuple(shape),
        dtype=dtype,
        file=file,
        stored=stored,
        offset=base + begin,
    )


def _depth(value: object) -> int:
    """The number of levels of nested dicts and lists, without recursion; 0 for any
    other value.
    """
    depth = 0
    level = [value]
    while True:
        containers = []
        for node in level:
            if isinstance(node, dict | list):
                containers.append(node)
        if not containers:
            return depth
        depth += 1
        level = []
        for node in containers:
            level += node.values() if isinstance(node, dict) else node


def _element_count(shape: list[int]) -> int:
    """The number of elements of a shape. But if the product of some first sizes exceeds
    64 bits, it is that product.

    For the shape [2**62, 4, 0] the result is 2**64, so that the check of the array's
    size fails.
    """
    partial = list(it.accumulate(shape, operator.mul, initial=1))
    if max(partial) >= 2**64:
        return max(partial)
    return partial[-1]


def retyped_arrays(
    arrays: Sequence[FileArray],
    metadata: dict[str, str],
) -> Sequence[FileArray]:
    """The arrays. Some get a dtype of one byte or of PRNG keys, which
    `metadata[DTYPES_KEY]` names by their path.
    """
    if DTYPES_KEY not in metadata:
        if isinstance(arrays, FileTable):
            return arrays
        return tuple(arrays)
    # The name of a dtype by the path of an array.
    named = parsed_json(metadata[DTYPES_KEY].encode(), f"`{DTYPES_KEY}` in a header")
    retyped = []
    for array in arrays:
        name = None
        if isinstance(named, dict):
            name = named.get(array.path)
        if array.stored == "U8" and isinstance(name, str) and name in ONE_BYTE_DTYPES:
            array = dataclasses.replace(array, dtype=ONE_BYTE_DTYPES[name])
        elif (key_dtype := key_named(name)) is not None:
            array = of_bits(array, key_dtype)
        retyped.append(array)
    return tuple(retyped)


def _short_text(value: object) -> str:
    text = repr(value)
    if len(text) < 80:
        return text
    return f"{text[:80]}..."


def metadata_of_dtypes(
    paths: Iterable[str],
    dtype_names: Mapping[str, str],
) -> dict[str, str]:
    """The metadata of a file with the arrays `paths` that names the dtypes, of PRNG
    keys among them, which the format cannot. `dtype_names` has them by path, for the
    arrays of all files.
    """
    named = {path: dtype_names[path] for path in paths if path in dtype_names}
    if not named:
        return {}
    return {DTYPES_KEY: json.dumps(named)}


def write_header(
    tensors: Sequence[tuple[str, Any]],
    metadata: dict[str, str],
) -> tuple[bytes, list[int]]:
    """The bytes before a file's buffer, and each array's offset in the file. `tensors`
    are pairs of name and array.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    encode = encoder.encode
    # By shape and dtype, the text before the offsets, and the bytes.
    texts_by_kind: dict[object, tuple[str, int]] = {}
    texts = []
    sizes = []
    for _, value in tensors:
        kind = (value.shape, value.dtype)
        if kind not in texts_by_kind:
            row = {"dtype": stored_name(value.dtype), "shape": value.shape}
            nbytes = math.prod(value.shape) * value.dtype.itemsize
            texts_by_kind[kind] = (f'{encode(row)[:-1]},"data_offsets":', nbytes)
        text, nbytes = texts_by_kind[kind]
        texts.append(text)
        sizes.append(nbytes)
    stops = list(it.accumulate(sizes))
    starts = [0, *stops[:-1]]

    members = []
    if metadata:
        members.append(f"{encode(METADATA)}:{encode(metadata)}")
    names = [json.encoder.encode_basestring(name) for name, _ in tensors]
    # Without tensors there is one start, and no stop.
    for name, text, start, stop in zip(names, texts, starts, stops, strict=False):
        members.append(f"{name}:{text}[{start},{stop}]}}")
    header = f"{{{','.join(members)}}}".encode()
    # The buffer begins at a multiple of 64 bytes.
    header += b" " * (-(8 + len(header)) % 64)
    if len(header) > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"a safetensors header of {len(header)} bytes is over the format's limit;"
            " use more files."
        )
    base = 8 + len(header)
    offsets = [base + start for start in starts[: len(names)]]
    return len(header).to_bytes(8, "little") + header, offsets
