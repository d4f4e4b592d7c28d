"""The header of a safetensors file as a table, where it is written as the format's own
library and `save` write it: without spaces, and the tensors in the order of the buffer.

Such text is checked column by column, which takes a tenth of the time of parsing it.
Any other header gives `None`, and is then parsed and checked member by member.
"""

import itertools as it
import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ._files import unique_members
from ._table import ArrayKind, FileTable


# A tensor is `"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},`: these are
# the texts between quotation marks, from the name of one tensor to the next.
_NAME, _BEFORE_DTYPE, _DTYPE_KEY, _COLON, _DTYPE = range(5)
_COMMA, _SHAPE_KEY, _SHAPE, _OFFSETS_KEY, _OFFSETS = range(5, 10)
_CONSTANT = {
    _BEFORE_DTYPE: ":{",
    _DTYPE_KEY: "dtype",
    _COLON: ":",
    _COMMA: ",",
    _SHAPE_KEY: "shape",
    _OFFSETS_KEY: "data_offsets",
}
_TEXTS_PER_TENSOR = 10
_SHAPE_TEXT = re.compile(r":(\[[0-9,]*\]),")
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_OFFSETS_TEXT = re.compile(rf"(?::\[{_NUMBER},{_NUMBER}\]\}},)*+")
_METADATA = '{"__metadata__":'
# The kind of a tensor, from the name of its dtype and from its shape in JSON; `None` if
# the format forbids it.
KindOf = Callable[[str, object], ArrayKind | None]


class HeaderTable(NamedTuple):
    """The arrays and metadata of a header."""

    arrays: FileTable
    metadata: dict[str, str]


def header_table(
    data: bytes,
    buffer_bytes: int | None,
    file: str,
    kind_of: KindOf,
) -> HeaderTable | None:
    """The table of `data`, the header of `file`; `None` for a header that is written in
    another way or that the format forbids.

    `buffer_bytes` is the number of bytes after the header, if it is known. `kind_of`
    gives the kind (dtype, shape and bytes) for the name of a dtype and a shape.

    The text is cut at its quotation marks. A tensor, `"w":{"dtype":"F32","shape":[2],`
    `"data_offsets":[0,8]},`, gives ten texts: its name, dtype, shape and offsets, and
    six that are the same for each tensor.
    """
    try:
        text = data.decode("utf-8").rstrip(" ")
        metadata, tensors_text = _metadata_and_tensors(text)
    except (ValueError, RecursionError):
        # The parser of all headers says what is wrong.
        return None
    # A control character would be no JSON.
    if metadata is None or "\\" in tensors_text or not tensors_text.isprintable():
        return None
    # Without a backslash, every second text is inside quotation marks.
    text_before, *texts = tensors_text.split('"')
    if (
        text_before
        or not texts
        or len(texts) % _TEXTS_PER_TENSOR
        or not texts[-1].endswith("]}}")
    ):
        return None
    # The last tensor ends with the brace of the header in place of a comma.
    texts[-1] = f"{texts[-1][:-1]},"
    for position, constant in _CONSTANT.items():
        if set(texts[position::_TEXTS_PER_TENSOR]) != {constant}:
            return None

    names = texts[_NAME::_TEXTS_PER_TENSOR]
    if len(set(names)) < len(names) or "__metadata__" in names:
        return None
    dtypes = texts[_DTYPE::_TEXTS_PER_TENSOR]
    shapes = texts[_SHAPE::_TEXTS_PER_TENSOR]
    kinds = _kind_of_each(dtypes, shapes, kind_of)
    offsets = _offsets(texts[_OFFSETS::_TEXTS_PER_TENSOR])
    if kinds is None or offsets is None:
        return None
    starts = offsets[:, 0]
    stops = offsets[:, 1]
    bytes_of_kinds = [kind.nbytes for kind in kinds.different]
    bytes_of_each = np.array(bytes_of_kinds, np.int64)[kinds.position_of_each]
    is_dense = starts[0] == 0 and np.array_equal(starts[1:], stops[:-1])
    if not is_dense or not np.array_equal(stops - starts, bytes_of_each):
        return None
    if buffer_bytes is not None and stops[-1] != buffer_bytes:
        return None
    arrays = FileTable(
        paths=names,
        kinds=kinds.different,
        kind_numbers=kinds.position_of_each,
        files=[file],
        file_numbers=np.zeros(len(names), np.int64),
        offsets=starts + (8 + len(data)),
    )
    return HeaderTable(arrays, metadata)


def _metadata_and_tensors(text: str) -> tuple[dict[str, str] | None, str]:
    """The metadata of a header, and the text after it, from the first tensor on.
    Instead of the metadata it is `None` if the header is written in another way.
    """
    if text[:1] != "{":
        return None, ""
    if not text.startswith(_METADATA):
        return {}, text[1:]
    decoder = json.JSONDecoder(object_pairs_hook=unique_members)
    metadata, end = decoder.raw_decode(text, len(_METADATA))
    are_texts = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    if not are_texts or text[end : end + 1] != ",":
        return None, ""
    # An escaped half of a character is an error.
    for member in it.chain.from_iterable(metadata.items()):
        member.encode("utf-8")
    return metadata, text[end + 1 :]


class _Kinds(NamedTuple):
    """The different kinds of some tensors, and the position in them of the kind of each
    tensor.
    """

    different: list[ArrayKind]
    position_of_each: np.ndarray


def _kind_of_each(
    dtypes: Sequence[str],
    shapes: Sequence[str],
    kind_of: KindOf,
) -> _Kinds | None:
    """The different kinds (dtype and shape) of tensors, and the position in them of
    each tensor's kind. `dtypes` has the name of each tensor's dtype, and `shapes` the
    text of its shape with the punctuation around it: `:[2,3],`.

    The result is `None` if a shape is written in another way, or if the format forbids
    a kind.
    """
    kind_texts = list(map(operator.add, dtypes, shapes))
    position_by_text: dict[str, int] = {}
    kinds = []
    for text in dict.fromkeys(kind_texts):
        dtype_name, colon, shape = text.partition(":")
        match = _SHAPE_TEXT.fullmatch(f"{colon}{shape}")
        if match is None:
            return None
        try:
            kind = kind_of(dtype_name, json.loads(match[1]))
        except ValueError:
            # `[1,,2]`, or more digits than Python reads.
            return None
        if kind is None:
            return None
        position_by_text[text] = len(kinds)
        kinds.append(kind)
    position_of_each = map(position_by_text.__getitem__, kind_texts)
    positions = np.fromiter(position_of_each, np.int64, len(kind_texts))
    return _Kinds(kinds, positions)


def _offsets(texts: Sequence[str]) -> np.ndarray | None:
    """The first byte of each tensor in the buffer, and the byte behind its last, as an
    array with two columns; `None` if they are written in another way.
    """
    joined = "".join(texts)
    if _OFFSETS_TEXT.fullmatch(joined) is None:
        return None
    # Each tensor's text ends with a comma, and a last 0 is cut off again.
    numbers = joined.replace(":[", "").replace("]}", "")
    number_list = json.loads(f"[{numbers}0]")
    return np.array(number_list[:-1], np.int64).reshape(-1, 2)
