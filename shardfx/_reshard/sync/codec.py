"""Writes a transfer plan as JSON text, and reads and checks such text."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._convert import NOWHERE, Arithmetic, Factor, Piece, Scale, Value
from ..._ground.errors import PlanFormatError
from ..._plan import decode_dtype, encode_dtype
from .coverage import MOST_NUMBER, check_transfer, require
from .encoding import encoding_of, form_of
from .kinds import (
    BUFFER,
    FIRST_POSITION,
    FORM,
    Buffer,
    PlanFields,
    SentLeaf,
    SourceLeaf,
    TransferKind,
    WireForm,
    hash_of,
)


_VERSION = 2
# As `hash_of` writes it. Both sides compare the first bytes of digests.
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(settings: str, leaves: Sequence[SentLeaf]) -> str:
    """The digest of a plan with these settings and leaves."""
    return hash_of([settings, *[leaf.digest for leaf in leaves]])


def text_of(fields: PlanFields) -> str:
    """The fields of a plan as JSON text with a checksum, for `fields_of`."""
    body = _body_text(fields)
    data = {
        "version": _VERSION,
        "digest": digest_of(fields.settings, fields.leaves),
        "checksum": _checksum(body),
        "plan": body,
    }
    return json.dumps(data)


def fields_of(text: str) -> PlanFields:
    """Reads and checks the fields of a plan from the text that `text_of` returned.

    Raises `PlanFormatError` for any other text.
    """
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise PlanFormatError(
                f"a TransferPlan of version {data['version']!r:.20}; this reads version"
                f" {_VERSION}."
            )
        body = data["plan"]
        require(data["checksum"] == _checksum(body), "its checksum is another")
        fields = _fields_of_data(json.loads(body))
        digest = digest_of(fields.settings, fields.leaves)
        require(digest == data["digest"], "its digest is another")
        # Values are read by `int`, `str` and `tuple`. A value that these change is of
        # another type.
        is_unchanged = _body_text(fields) == body
        require(is_unchanged, "a value is not what it says, or of another type")
        check_transfer(fields)
    except PlanFormatError:
        raise
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        ArithmeticError,
    ) as error:
        raise PlanFormatError(
            f"this is no TransferPlan's JSON ({type(error).__name__}: {error}); write"
            " it with `plan.to_json()`."
        ) from error
    return fields


def _checksum(text: str) -> str:
    """The SHA-256 of a text, which may have lone surrogates, as hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _body_text(plan: PlanFields) -> str:
    """The fields as JSON text, without the checksum. Sources may be PRNG keys; leaves are
    raw data.
    """
    sources = [
        [path, leaf.shape, encode_dtype(leaf.dtype), leaf.axes]
        for path, leaf in plan.sources.items()
    ]
    leaves = [
        [
            leaf.path,
            leaf.shape,
            str(leaf.dtype),
            leaf.digest,
            leaf.kind,
            leaf.source_paths,
        ]
        for leaf in plan.leaves
    ]
    kinds = [
        {
            "names": kind.source_paths,
            "pieces": [_piece_data(piece) for piece in kind.pieces],
            "rank": kind.rank,
            "buffers": kind.buffers,
            "forms": [_form_data(form) for form in kind.forms],
            "columns": kind.rows.T.tolist(),
        }
        for kind in plan.kinds
    ]
    body = {
        "settings": plan.settings,
        "mesh": plan.mesh,
        "senders": plan.senders,
        "receivers": plan.receivers,
        "receiver": plan.receiver,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "sources": sources,
        "leaves": leaves,
        "kinds": kinds,
    }
    return json.dumps(body, separators=(",", ":"))


def _piece_data(piece: Piece) -> list[object]:
    """What JSON has for a piece; `_piece_of` reads it."""
    return [_value_data(piece.value), piece.source, piece.target, piece.factors]


def _value_data(value: Value) -> list[object]:
    """What JSON has for a value; `_value_of` reads it."""
    casts = [_cast_data(cast) for cast in value.casts]
    return [value.path, value.number, value.scale, casts]


def _form_data(form: WireForm) -> list[object]:
    """What JSON has for the form of a part; `_form_of` reads it: the value, the loops,
    the rank of the source, the number of casts that the sender makes, and the dtypes in
    which elements and scales are sent.
    """
    scales = None if form.scales_dtype is None else str(form.scales_dtype)
    return [
        _value_data(form.value),
        form.factors,
        form.source_rank,
        form.sender_casts,
        str(form.sent_dtype),
        scales,
    ]


def _cast_data(cast: Any) -> object:
    """What JSON has for a cast, which is a dtype or arithmetic with a number."""
    if isinstance(cast, Arithmetic):
        return [cast.sign, cast.number]
    return str(np.dtype(cast))


def _fields_of_data(data: Any) -> PlanFields:
    """The fields of a plan from the JSON values that `_body_text` wrote. Other values
    raise errors of many kinds, which `fields_of` turns into one. Whether the numbers
    fit each other is left to `check_transfer`.
    """
    sources: dict[str, SourceLeaf] = {}
    for path, shape, dtype, axes in data["sources"]:
        leaf = SourceLeaf(
            shape=_ints(shape),
            dtype=decode_dtype(str(dtype)),
            axes=tuple([_texts(names) for names in axes]),
        )
        sources[str(path)] = leaf

    leaves = []
    first_of_kind: dict[int, SentLeaf] = {}
    for path, shape, dtype, digest, kind, names in data["leaves"]:
        leaf = SentLeaf(
            path=str(path),
            shape=_ints(shape),
            dtype=_dtype(dtype),
            digest=str(digest),
            kind=int(kind),
            source_paths=_texts(names),
        )
        leaves.append(leaf)
        require(_DIGEST.fullmatch(leaf.digest), f"the digest {leaf.digest!r:.80}")
        first_of_kind.setdefault(leaf.kind, leaf)

    dtypes = {path: leaf.data.dtype for path, leaf in sources.items()}
    kinds = [
        _kind_of(kind, first_of_kind[number], dtypes)
        for number, kind in enumerate(data["kinds"])
    ]
    receiver = data["receiver"]
    return PlanFields(
        settings=str(data["settings"]),
        mesh=tuple([(str(axis), int(size)) for axis, size in data["mesh"]]),
        senders=_ints(data["senders"]),
        receivers=_ints(data["receivers"]),
        receiver=None if receiver is None else int(receiver),
        memory_limit_bytes=int(data["memory_limit_bytes"]),
        sources=sources,
        kinds=tuple(kinds),
        leaves=tuple(leaves),
    )


def _kind_of(
    data: Any,
    first_leaf: SentLeaf,
    dtypes: Mapping[str, np.dtype],
) -> TransferKind:
    """Reads a `TransferKind`. `first_leaf` is the first leaf of this kind, and `dtypes`
    has the dtypes of all sources, by path. In a row behind the first columns stand the
    position in the source, of as many numbers as `rank`, and that in the buffer.
    """
    buffers = []
    for process, devices, box in data["buffers"]:
        intervals = tuple((int(low), int(high)) for low, high in box)
        buffer = Buffer(process=int(process), devices=_ints(devices), box=intervals)
        buffers.append(buffer)
    forms = tuple(_form_of(form, dtypes, first_leaf.dtype) for form in data["forms"])
    rank = int(data["rank"])
    return TransferKind(
        source_paths=_texts(data["names"]),
        pieces=tuple([_piece_of(piece) for piece in data["pieces"]]),
        rank=rank,
        buffers=tuple(buffers),
        forms=forms,
        rows=_rows_of(
            data["columns"],
            column_count=FIRST_POSITION + rank + len(first_leaf.shape),
            buffer_count=len(buffers),
            form_count=len(forms),
        ),
    )


def _rows_of(
    columns: Any,
    *,
    column_count: int,
    buffer_count: int,
    form_count: int,
) -> np.ndarray:
    """Reads the rows of a kind from the columns that JSON has: the sending process and
    its device, the number of the buffer, that of the form, and positions. Raises
    `ValueError` unless they are whole numbers from -1, -1 only where a row has no
    sender, and name buffers and forms that there are.
    """
    require(len(columns) == column_count, f"{len(columns)} columns of pieces")
    rows = np.array(columns).T
    is_table = not rows.size or (
        rows.dtype == np.int64
        and rows.ndim == 2
        and -1 <= rows.min()
        and rows.max() < MOST_NUMBER
    )
    require(is_table, "pieces that are no table of whole numbers")
    rows = rows.reshape(-1, column_count).astype(np.int64)
    # `BUFFER` and `FORM` are the numbers of columns. Only the sender stands before.
    is_known = (
        (rows[:, BUFFER:] >= 0).all()
        and (rows[:, BUFFER] < buffer_count).all()
        and (rows[:, FORM] < form_count).all()
    )
    require(is_known, "pieces of no buffer or no form")
    return rows


def _form_of(
    data: Any,
    dtypes: Mapping[str, np.dtype],
    target_dtype: np.dtype,
) -> WireForm:
    """Reads the `WireForm` that `_form_data` wrote, for sources of the dtypes `dtypes`
    and a target of `target_dtype`.
    """
    value_data, factor_data, rank, *_ = data
    value = _value_of(value_data)
    factors = _factors_of(factor_data)
    piece = Piece(value=value, source=(), target=(), factors=factors)
    encoding = None if value.path is None else encoding_of(value, dtypes)
    return form_of(encoding, piece, int(rank), target_dtype)


def _piece_of(data: Any) -> Piece:
    """Reads the piece that `_piece_data` wrote."""
    value, source, target, factors = data
    return Piece(
        value=_value_of(value),
        source=_ints(source),
        target=_ints(target),
        factors=_factors_of(factors),
    )


def _factors_of(data: Any) -> tuple[Factor, ...]:
    """Reads the nested loops of a piece. Raises `ValueError` for loops that no piece
    has.
    """
    factors = tuple([Factor(*map(int, numbers)) for numbers in data])
    for factor in factors:
        require(_is_factor(factor), "a factor that no piece has")
    return factors


def _is_factor(factor: Factor) -> bool:
    """Whether a piece can have this loop: of several iterations that move in the
    target, and in the source unless they repeat an element.
    """
    least_source_step = 0 if factor.source_dim == NOWHERE else 1
    return (
        factor.size > 1
        and factor.source_dim >= NOWHERE
        and factor.source_step >= least_source_step
        and factor.target_dim >= 0
        and factor.target_step > 0
    )


def _value_of(data: Any) -> Value:
    """Reads the value that `_value_data` wrote: a source's path or a constant's number,
    never both.
    """
    path, number, scale, casts = data
    if path is None:
        is_value = isinstance(number, int | float)
    else:
        is_value = number is None
    require(is_value, f"the value {data!r:.80}")
    return Value(
        path=None if path is None else str(path),
        number=number,
        scale=None if scale is None else Scale(str(scale[0]), _ints(scale[1])),
        casts=tuple([_cast_of(cast) for cast in casts]),
    )


def _cast_of(data: Any) -> Any:
    """Reads the cast that `_cast_data` wrote."""
    if isinstance(data, str):
        return _dtype(data)
    sign, number = data
    is_known = sign in ("*", "/", "+", "-") and isinstance(number, int | float)
    require(is_known, f"the cast {data!r:.80}")
    return Arithmetic(sign=sign, number=number)


def _dtype(name: Any) -> np.dtype:
    """The dtype with a name. Raises `ValueError` for the dtypes of PRNG keys."""
    dtype = decode_dtype(str(name))
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"the dtype {name!r:.40}")
    return dtype


def _texts(values: Any) -> tuple[str, ...]:
    """Values of a plan's JSON as texts."""
    return tuple(map(str, values))


def _ints(values: Any) -> tuple[int, ...]:
    """Values of a plan's JSON as integers. Other values raise errors."""
    return tuple(map(int, values))
