"""The safetensors format: a length, a JSON header, and one buffer; checked in full before anything is believed."""

import json
import math
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._errors import CheckpointError
from ._files import Place, opened, parsed_json


# The format's own limit on the header.
HEADER_LIMIT_BYTES = 100_000_000

# Name in the file: bits of one element, and the dtype that it has in JAX, if it has one.
DTYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (8, np.dtype(bool)),
    "U8": (8, np.dtype("uint8")),
    "I8": (8, np.dtype("int8")),
    "U16": (16, np.dtype("uint16")),
    "I16": (16, np.dtype("int16")),
    "U32": (32, np.dtype("uint32")),
    "I32": (32, np.dtype("int32")),
    "U64": (64, np.dtype("uint64")),
    "I64": (64, np.dtype("int64")),
    "F16": (16, np.dtype("float16")),
    "BF16": (16, np.dtype(jnp.bfloat16)),
    "F32": (32, np.dtype("float32")),
    "F64": (64, np.dtype("float64")),
    "C64": (64, np.dtype("complex64")),
    "F8_E4M3": (8, np.dtype(jnp.float8_e4m3fn)),
    "F8_E5M2": (8, np.dtype(jnp.float8_e5m2)),
    "F8_E8M0": (8, np.dtype(jnp.float8_e8m0fnu)),
    "F8_E4M3FNUZ": (8, np.dtype(jnp.float8_e4m3fnuz)),
    "F8_E5M2FNUZ": (8, np.dtype(jnp.float8_e5m2fnuz)),
    # Packed several to a byte, which no JAX array can be on the host.
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}
# Further one-byte dtypes are kept as U8, and named in the file's metadata.
DTYPES_KEY = "shardfx.dtypes"
OTHER = {
    np.dtype(name).name: np.dtype(name)
    for name in (jnp.int4, jnp.uint4, jnp.float8_e4m3b11fnuz, jnp.float8_e3m4, jnp.float8_e4m3, jnp.float4_e2m1fn)
}
NAMES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}


def stored_name(dtype: Any) -> str | None:
    """What the format calls a dtype; `None` if it cannot hold it."""
    dtype = np.dtype(dtype)
    return NAMES.get(dtype, "U8" if dtype.name in OTHER else None)


class Tensor(NamedTuple):
    """One tensor of a file: `offset` counts from the file's first byte."""

    name: str
    stored: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What a file holds, in the order of the buffer."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]

    def dtypes(self) -> dict[str, Any]:
        """The dtypes, by tensor, that `DTYPES_KEY` names; what it says about tensors of other sizes is ignored."""
        text = self.metadata.get(DTYPES_KEY, "{}")
        named = parsed_json(text.encode("utf-8", "surrogatepass"), f"`{DTYPES_KEY}` in a header")
        bytes_only = {tensor.name for tensor in self.tensors if tensor.stored == "U8"}
        pairs = named.items() if isinstance(named, dict) else ()
        return {
            name: OTHER[kind] for name, kind in pairs if name in bytes_only and isinstance(kind, str) and kind in OTHER
        }


def read_header(where: Place, real: str) -> Header:
    """The checked header of the safetensors file `real`; no weight is read."""
    with opened(where, real) as descriptor:
        size = os.fstat(descriptor).st_size
        prefix = _read(descriptor, 8, 0, real)
        length = int.from_bytes(prefix, "little")
        if length > min(HEADER_LIMIT_BYTES, size - 8):
            raise CheckpointError(
                f"safetensors file {real!r} of {size} bytes claims a header of {length} bytes; the file is truncated, "
                f"damaged, or of another format (a header has at most {HEADER_LIMIT_BYTES} bytes)."
            )
        return parse_header(_read(descriptor, length, 8, real), size - 8 - length, repr(real))


def _read(descriptor: int, count: int, offset: int, real: str) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.pread(descriptor, count - len(data), offset + len(data))
        if not piece:
            raise CheckpointError(f"safetensors file {real!r} ends within its header; copy the whole file.")
        data += piece
    return data


def parse_header(data: bytes, buffer_bytes: int, where: str) -> Header:
    """The tensors that a header describes, in the order of the buffer.

    **Arguments:**

    - `data`: the JSON text, without its length.
    - `buffer_bytes`: how many bytes of the file come after it.
    - `where`: what an error calls the file.

    **Returns:**

    A Header.

    **Raises:**

    `CheckpointError` for anything that the format forbids: duplicate names, unknown dtypes, shapes and offsets that
    are no sizes or do not agree, tensors that overlap, lie outside the buffer or leave holes in it.
    """
    content = parsed_json(data, f"the header of {where}")
    if not isinstance(content, dict):
        raise CheckpointError(f"the header of {where} is no JSON object; the file is of another format.")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"`__metadata__` in the header of {where} must map strings to strings.")
    base = 8 + len(data)
    tensors = [_tensor(name, entry, base, where) for name, entry in content.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    reached = base
    for tensor in tensors:
        if tensor.offset != reached:
            problem = "overlaps the one before it" if tensor.offset < reached else "leaves a hole before it"
            raise CheckpointError(
                f"tensor {tensor.name!r} in {where} starts at byte {tensor.offset - base} of the buffer and {problem}, "
                f"which ends at {reached - base}; the file is damaged or forged."
            )
        reached += tensor.nbytes
    if reached != base + buffer_bytes:
        raise CheckpointError(
            f"the tensors of {where} take {reached - base} bytes, but {buffer_bytes} follow the header; the file is "
            "truncated or damaged."
        )
    return Header(tuple(tensors), metadata)


def _tensor(name: str, entry: Any, base: int, where: str) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r} in {where} must have exactly `dtype`, `shape` and `data_offsets`.")
    stored, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(stored, str) or stored not in DTYPES:
        raise CheckpointError(
            f"tensor {name!r} in {where} has the dtype {stored!r}, which is none of {', '.join(DTYPES)}."
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"tensor {name!r} in {where} has shape {_short(shape)} and offsets {_short(offsets)}; both must be "
            f"lists of "
            "non-negative integers below 2**63, the offsets two."
        )
    begin, end = offsets
    # Sizes are below 2**63, so that a rank of thousands is the one thing left that makes the product slow.
    expected_bits = math.prod(shape[:64]) * DTYPES[stored][0]
    if len(shape) > 64 or expected_bits != 8 * (end - begin):
        raise CheckpointError(
            f"tensor {name!r} in {where} has dtype {stored} and shape {_short(shape)}, which needs "
            f"{-(-expected_bits // 8)} bytes and at most 64 dimensions, but the offsets [{begin}, {end}]; the file is "
            "damaged or forged."
        )
    return Tensor(name, stored, tuple(shape), base + begin, end - begin)


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."


def write_header(
    tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """The first bytes of a file, padded so that the buffer starts at a multiple of 64, and each tensor's offset in it.

    **Arguments:**

    - `tensors`: name, dtype as the format calls it, shape, and bytes, in the order that they will have.
    - `metadata`: strings to strings.

    **Returns:**

    The bytes, and per tensor its offset from the first byte of the file.
    """
    content: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    reached, starts = 0, []
    for name, stored, shape, nbytes in tensors:
        content[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [reached, reached + nbytes]}
        starts.append(reached)
        reached += nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)
    if len(text) > HEADER_LIMIT_BYTES:
        raise CheckpointError(f"a safetensors header of {len(text)} bytes is over the format's limit; use more files.")
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]
