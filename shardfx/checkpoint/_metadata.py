"""The metadata of a file: which integer arrays are the key data of PRNG keys, and the
Python numbers in a state.

An entry describes one array of a checkpoint in its index.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._ground.errors import CheckpointError, PlanFormatError
from .._ground.keys import is_key, key_data_struct
from .._ground.spec import DType
from .._ground.text import quoted
from .._plan import decode_dtype, encode_dtype
from ._entry import FileArray
from ._files import parsed_json


_PREFIX = "key<"


def implementation(dtype: object) -> str:
    """JAX's name for the implementation of a key dtype, such as `threefry2x32`."""
    return encode_dtype(dtype).removeprefix(_PREFIX).removesuffix(">")


def key_named(name: object) -> DType:
    """The dtype of PRNG keys with the given name, such as `key<threefry2x32>`; `None`
    if JAX has no such dtype.
    """
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    try:
        return decode_dtype(name)
    except PlanFormatError:
        return None


def are_keys(planned: object, stored: object, what: str) -> bool:
    """Whether a leaf holds PRNG keys, from its dtypes in the plan and in the
    checkpoint. `what` names it in errors.

    Raises `CheckpointError` if only one of them is a dtype of keys, or if the keys
    differ: keys are never cast.
    """
    is_planned = is_key(planned)
    is_stored = is_key(stored)
    if stored == planned or not (is_planned or is_stored):
        return is_planned
    if is_planned and is_stored:
        stored_name = implementation(stored)
        planned_name = implementation(planned)
        raise CheckpointError(
            f"{what} holds PRNG keys of {stored_name}, but the plan has keys of"
            f" {planned_name}; a key means something to its own implementation alone."
            " Plan the state with `jax.random.key(seed,"
            f' impl="{stored_name}")`.'
        )
    bits = "jax.random.key_data(keys)"
    raise CheckpointError(
        f"{what} is {stored}, but the plan has {planned}; of PRNG keys and integers one"
        " does not become the other here. Plan the leaf as it is stored, and use"
        f" `{bits}` or `jax.random.wrap_key_data(bits)` before or after."
    )


def of_bits(entry: FileArray, dtype: object) -> FileArray:
    """The entry of an array of PRNG keys of dtype `dtype`, from the entry of its key
    data.

    An entry whose shape is not that of key data is returned unchanged.
    """
    data_of_key = key_data_struct(dtype)
    rank = len(entry.shape) - len(data_of_key.shape)
    if rank < 0 or entry.shape[rank:] != data_of_key.shape:
        return entry
    if entry.dtype != data_of_key.dtype:
        return entry
    return dataclasses.replace(entry, shape=entry.shape[:rank], dtype=dtype)


def as_bits(entry: object) -> Any:
    """For the entry of an array of PRNG keys, the entry of its key data. Other entries
    are returned unchanged.
    """
    if not isinstance(entry, FileArray) or not is_key(entry.dtype):
        return entry
    data_of_key = key_data_struct(entry.dtype)
    return dataclasses.replace(
        entry,
        shape=(*entry.shape, *data_of_key.shape),
        dtype=np.dtype(data_of_key.dtype),
    )


NUMBERS_KEY = "shardfx.numbers"
_KINDS = {"bool": bool, "int": int, "float": float, "complex": complex}
# Above 64 bits, Python's conversion of an integer to text takes quadratic time.
_WIDE = 2**63


def to_text(numbers: Mapping[str, object]) -> str:
    """The text that stores Python numbers in a file's metadata. `numbers` has each
    number by its path in the state.
    """
    rows: dict[str, list[str]] = {}
    for path, value in numbers.items():
        text = hex(value) if type(value) is int and abs(value) >= _WIDE else repr(value)
        rows[path] = [type(value).__name__, text]
    return json.dumps(rows, separators=(",", ":"))


def from_metadata(metadata: Mapping[str, str], directory: str) -> dict[str, Any] | None:
    """The Python numbers of a checkpoint by path; `None` if `save` did not write the
    checkpoint.

    `metadata` is that of the checkpoint's files, and `directory` its directory, for
    errors.
    """
    text = metadata.get(NUMBERS_KEY)
    if text is None:
        return None
    text_name = f"`{NUMBERS_KEY}` in {directory!r}"
    rows = parsed_json(text.encode(), text_name)
    if not isinstance(rows, dict):
        raise CheckpointError(
            f"{text_name} must map paths to numbers; the file is damaged."
        )
    numbers = {}
    for path, row in rows.items():
        numbers[path] = _number(row, path, text_name)
    return numbers


def _number(row: object, path: str, text_name: str) -> Any:
    """The Python number that a row of the metadata has: the name of its type and its
    text. `path` and `text_name` are for errors.
    """
    match row:
        case [str() as kind, str() as text] if kind in _KINDS:
            try:
                if kind == "bool":
                    return {"True": True, "False": False}[text]
                if kind == "int":
                    return int(text, 0)
                return _KINDS[kind](text)
            except (ValueError, KeyError):
                pass
    raise CheckpointError(
        f"{text_name} has no number for {quoted(path)}; the file is damaged."
    )
