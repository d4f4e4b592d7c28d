"""Writes a transfer plan as JSON text, and reads and checks such text."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._convert import NOWHERE, Arithmetic, Factor, Piece, Scale, Struct, Value
from ..._ground.errors import PlanFormatError
from ..._plan import decode_dtype
from .coverage import MOST_NUMBER, check_plan, require
from .encoding import encoding_of, form_of
from .kinds import BUFFER, FORM, PLACE, Buffer, SentLeaf, TransferKind, WireForm
from .transfer import TransferPlan


_VERSION = 1


def to_json(plan: TransferPlan) -> str:
    """A transfer plan as JSON text with a checksum, which
    [`shardfx._reshard.sync.from_json`][] reads.

    **Arguments:**

    - `plan`: the plan for all receivers or for one.
    """
    text = _body_text(plan)
    data = {
        "version": _VERSION,
        "digest": plan.digest,
        "checksum": _checksum(text),
        "plan": text,
    }
    return json.dumps(data)


def from_json(text: str) -> TransferPlan:
    """Reads a transfer plan from JSON text. It checks that the plan writes each element
    of each shard exactly once.

    **Arguments:**

    - `text`: the text that [`shardfx._reshard.sync.to_json`][] returned.

    **Raises:**

    `PlanFormatError` for any other text.
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
        plan = _plan_of(json.loads(body))
        require(plan.digest == data["digest"], "its digest is another")
        # Values are read by `int`, `str` and `tuple`. A value that these change is of
        # another type.
        is_unchanged = _body_text(plan) == body
        require(is_unchanged, "a value is not what it says, or of another type")
        check_plan(plan)
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
            " it with `shardfx.sync.to_json`."
        ) from error
    return plan


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _body_text(plan: TransferPlan) -> str:
    sources = [
        [path, struct.shape, str(struct.dtype)] for path, struct in plan.sources.items()
    ]
    leaves = [
        [leaf.path, leaf.shape, str(leaf.dtype), leaf.digest, leaf.kind, leaf.names]
        for leaf in plan.leaves
    ]
    kinds = [
        {
            "names": kind.names,
            "rank": kind.rank,
            "buffers": kind.buffers,
            "forms": [_form_data(form) for form in kind.forms],
            "columns": kind.rows.T.tolist(),
        }
        for kind in plan.kinds
    ]
    body = {
        "settings": plan.settings,
        "senders": plan.senders,
        "receivers": plan.receivers,
        "receiver": plan.receiver,
        "limit_bytes": plan.limit_bytes,
        "sources": sources,
        "leaves": leaves,
        "kinds": kinds,
    }
    return json.dumps(body, separators=(",", ":"))


def _form_data(form: WireForm) -> list[object]:
    value = form.value
    scales = None if form.scales is None else str(form.scales)
    return [
        [value.path, value.number, value.scale, [_cast_data(to) for to in value.casts]],
        form.factors,
        form.rank,
        form.casts,
        str(form.sent),
        scales,
    ]


def _cast_data(to: Any) -> object:
    if isinstance(to, Arithmetic):
        return [to.sign, to.number]
    return str(np.dtype(to))


def _plan_of(data: Any) -> TransferPlan:
    sources: dict[str, Struct] = {}
    for path, shape, dtype in data["sources"]:
        sources[str(path)] = Struct(_ints(shape), _dtype(dtype))

    leaves = []
    first_of_kind: dict[int, SentLeaf] = {}
    for path, shape, dtype, digest, kind, names in data["leaves"]:
        leaf = SentLeaf(
            path=str(path),
            shape=_ints(shape),
            dtype=_dtype(dtype),
            digest=str(digest),
            kind=int(kind),
            names=tuple(map(str, names)),
        )
        leaves.append(leaf)
        first_of_kind.setdefault(leaf.kind, leaf)

    dtypes = {path: struct.dtype for path, struct in sources.items()}
    kinds = [
        _kind_of(kind, first_of_kind[number], dtypes)
        for number, kind in enumerate(data["kinds"])
    ]
    receiver = data["receiver"]
    return TransferPlan(
        settings=str(data["settings"]),
        senders=_ints(data["senders"]),
        receivers=_ints(data["receivers"]),
        receiver=None if receiver is None else int(receiver),
        limit_bytes=int(data["limit_bytes"]),
        sources=sources,
        kinds=tuple(kinds),
        leaves=tuple(leaves),
    )


def _kind_of(data: Any, leaf: SentLeaf, dtypes: Mapping[str, np.dtype]) -> TransferKind:
    buffers = []
    for process, devices, box in data["buffers"]:
        intervals = tuple((int(low), int(high)) for low, high in box)
        buffer = Buffer(process=int(process), devices=_ints(devices), box=intervals)
        buffers.append(buffer)
    forms = tuple(_form_of(form, dtypes, leaf.dtype) for form in data["forms"])
    rank = int(data["rank"])
    return TransferKind(
        names=tuple(map(str, data["names"])),
        rank=rank,
        buffers=tuple(buffers),
        forms=forms,
        rows=_rows_of(
            data["columns"],
            column_count=PLACE + rank + len(leaf.shape),
            buffer_count=len(buffers),
            form_count=len(forms),
        ),
    )


def _rows_of(
    columns: Any, *, column_count: int, buffer_count: int, form_count: int
) -> np.ndarray:
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
    is_known = (
        (rows[:, BUFFER:] >= 0).all()
        and (rows[:, BUFFER] < buffer_count).all()
        and (rows[:, FORM] < form_count).all()
    )
    require(is_known, "pieces of no buffer or no form")
    return rows


def _form_of(
    data: Any, dtypes: Mapping[str, np.dtype], target_dtype: np.dtype
) -> WireForm:
    """Reads the `WireForm` that `_form_data` wrote, for sources of the dtypes `dtypes`
    and a target of `target_dtype`.
    """
    value_data, factor_data, rank, *_ = data
    value = _value_of(value_data)
    factors = tuple(Factor(*map(int, numbers)) for numbers in factor_data)
    for factor in factors:
        require(_is_factor(factor), "a factor that no piece has")
    piece = Piece(value, (), (), factors)
    encoding = None if value.path is None else encoding_of(value, dtypes)
    return form_of(encoding, piece, int(rank), target_dtype)


def _is_factor(factor: Factor) -> bool:
    least_source_step = 0 if factor.source_dim == NOWHERE else 1
    return (
        factor.size > 1
        and factor.source_dim >= NOWHERE
        and factor.source_step >= least_source_step
        and factor.target_dim >= 0
        and factor.target_step > 0
    )


def _value_of(data: Any) -> Value:
    path, number, scale, casts = data
    is_value = (path is None) == isinstance(number, int | float)
    require(is_value, f"the value {data!r:.80}")
    return Value(
        path=None if path is None else str(path),
        number=number,
        scale=None if scale is None else Scale(str(scale[0]), _ints(scale[1])),
        casts=tuple([_cast_of(to) for to in casts]),
    )


def _cast_of(data: Any) -> Any:
    if isinstance(data, str):
        return _dtype(data)
    operation = Arithmetic(*data)
    is_known = operation.sign in ("*", "/", "+", "-") and isinstance(
        operation.number, int | float
    )
    require(is_known, f"the cast {data!r:.80}")
    return operation


def _dtype(name: Any) -> np.dtype:
    dtype = decode_dtype(str(name))
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"the dtype {name!r:.40}")
    return dtype


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))
