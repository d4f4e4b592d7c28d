"""Writes a transfer plan as JSON text, reads it back and checks it."""

import hashlib
import itertools as it
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._convert import NOWHERE, Arithmetic, Factor, Piece, Scale, Struct, Value, dense, dtypes_of, hull, swapped
from ..._ground.errors import PlanFormatError
from ..._plan import decode_dtype
from .planning import form_of, sent_of
from .transfer import BUFFER, FORM, PLACE, PROCESS, Buffer, SentLeaf, TransferKind, TransferPlan, WireForm


_VERSION = 1
# Limits for numbers, boxes of one array and their corners; no plan of this package exceeds them.
_MOST, _MOST_BOXES, _MOST_CORNERS = 1 << 48, 1 << 22, 1 << 26


def to_json(plan: TransferPlan) -> str:
    """A transfer plan as JSON text, with a checksum; [`shardfx._reshard.sync.from_json`][] reads it.

    **Arguments:**

    - `plan`: the plan, or one receiver's part.
    """
    body = {
        "settings": plan.settings,
        "senders": plan.senders,
        "receivers": plan.receivers,
        "receiver": plan.receiver,
        "limit_bytes": plan.limit_bytes,
        "sources": [[path, one.shape, str(one.dtype)] for path, one in plan.sources.items()],
        "leaves": [[*leaf[:2], str(leaf.dtype), *leaf[3:]] for leaf in plan.leaves],
        "kinds": [
            {
                "names": kind.names,
                "rank": kind.rank,
                "buffers": kind.buffers,
                "forms": [_form_data(form) for form in kind.forms],
                "columns": kind.rows.T.tolist(),
            }
            for kind in plan.kinds
        ],
    }
    text = json.dumps(body, separators=(",", ":"))
    return json.dumps({"version": _VERSION, "digest": plan.digest, "checksum": _checksum(text), "plan": text})


def from_json(text: str) -> TransferPlan:
    """The plan that `to_json` wrote, checked so that each element of each shard is written exactly once.

    **Arguments:**

    - `text`: the JSON text.

    **Raises:**

    `PlanFormatError` for text that is no such plan.
    """
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise PlanFormatError(f"a TransferPlan of version {data['version']!r:.20}; this reads version {_VERSION}.")
        if data["checksum"] != _checksum(data["plan"]):
            raise ValueError("its checksum is another")
        plan = _read(json.loads(data["plan"]))
        if plan.digest != data["digest"]:
            raise ValueError("its digest is another")
        _check(plan)
    except PlanFormatError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise PlanFormatError(
            f"this is no TransferPlan's JSON ({type(error).__name__}: {error}); write it with `shardfx.sync.to_json`."
        ) from error
    return plan


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _form_data(form: WireForm) -> list[object]:
    value = form.value
    casts = [list(to) if isinstance(to, Arithmetic) else str(np.dtype(to)) for to in value.casts]
    scales = None if form.scales is None else str(form.scales)
    own = [value.path, value.number, value.scale, casts]
    return [own, form.factors, form.rank, form.casts, str(form.sent), scales]


def _form(data: Any) -> WireForm:
    value, factors, rank, casts, sent, scales = data
    made = tuple([_factor(*one) for one in factors])
    return WireForm(
        _value(value), made, _int(rank), _int(casts), _dtype(sent), None if scales is None else _dtype(scales)
    )


def _value(data: Any) -> Value:
    path, number, scale, casts = data
    made = None if scale is None else Scale(_text(scale[0]), _ints(scale[1], 1))
    if not isinstance(number, int | float | None) or (path is None) == (number is None):
        raise ValueError(f"the value {data!r:.80}")
    read = [_dtype(to) if isinstance(to, str) else _counted(*to) for to in casts]
    return Value(None if path is None else _text(path), number, made, tuple(read))


def _counted(sign: Any, number: Any) -> Arithmetic:
    if sign not in ("*", "/", "+", "-") or not isinstance(number, int | float):
        raise ValueError(f"arithmetic {sign!r:.20} {number!r:.20}")
    return Arithmetic(sign, number)


def _dtype(name: Any) -> np.dtype:
    made = decode_dtype(_text(name))
    if not isinstance(made, np.dtype):
        raise ValueError(f"the dtype {name!r:.40}")
    return made


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{given!r:.40} is no text")
    return given


def _int(given: Any, least: int = 0) -> int:
    if type(given) is not int or not least <= given < _MOST:
        raise ValueError(f"{given!r:.40} is no whole number from {least} on")
    return given


def _ints(given: Any, least: int = 0) -> tuple[int, ...]:
    return tuple([_int(one, least) for one in given])


def _read(data: Any) -> TransferPlan:
    leaves = tuple(
        SentLeaf(_text(path), _ints(shape), _dtype(dtype), _text(digest), _int(kind), tuple(map(_text, names)))
        for path, shape, dtype, digest, kind, names in data["leaves"]
    )
    shapes = {leaf.kind: leaf.shape for leaf in leaves}
    kinds = tuple(_kind(kind, len(shapes[at])) for at, kind in enumerate(data["kinds"]))
    sources = {_text(path): Struct(_ints(shape), _dtype(dtype)) for path, shape, dtype in data["sources"]}
    ends = _ints(data["senders"]), _ints(data["receivers"])
    only = None if data["receiver"] is None else _int(data["receiver"])
    return TransferPlan(_text(data["settings"]), *ends, only, _int(data["limit_bytes"], 1), sources, kinds, leaves)


def _kind(data: Any, dims: int) -> TransferKind:
    buffers = tuple(
        Buffer(_int(process), _ints(devices), tuple((_int(a), _int(b)) for a, b in box))
        for process, devices, box in data["buffers"]
    )
    rank, columns = _int(data["rank"]), data["columns"]
    if len(columns) != PLACE + rank + dims:
        raise ValueError(f"{len(columns)} columns of pieces")
    rows = np.array(columns).T
    if rows.size and (rows.dtype != np.int64 or rows.ndim != 2 or not -1 <= rows.min() <= rows.max() < _MOST):
        raise ValueError("pieces that are no table of whole numbers")
    rows = rows.reshape(-1, len(columns)).astype(np.int64)
    forms = tuple(map(_form, data["forms"]))
    within = rows[:, BUFFER:] >= 0
    if not within.all() or (rows[:, BUFFER] >= len(buffers)).any() or (rows[:, FORM] >= len(forms)).any():
        raise ValueError("pieces of no buffer or no form")
    return TransferKind(tuple(map(_text, data["names"])), rank, buffers, forms, rows)


def _factor(size: Any, source_dim: Any, source_step: Any, target_dim: Any, target_step: Any) -> Factor:
    dims = (_int(source_dim, NOWHERE), _int(target_dim))
    steps = (_int(source_step, 0 if dims[0] == NOWHERE else 1), _int(target_step, 1))
    return Factor(_int(size, 2), dims[0], steps[0], dims[1], steps[1])


def _check(plan: TransferPlan) -> None:
    """Raises unless each leaf's pieces fit their arrays, and each device receives each element of its shard exactly
    once.
    """
    checked: set[int] = set()
    first: dict[int, SentLeaf] = {}
    if len({leaf.path for leaf in plan.leaves}) < len(plan.leaves):
        raise ValueError("a leaf is there twice")
    for leaf in plan.leaves:
        kind, one = plan.kinds[leaf.kind], first.setdefault(leaf.kind, leaf)
        alike = [plan.sources[name] for name in leaf.names] == [plan.sources[name] for name in one.names]
        if one[1:3] != leaf[1:3] or len(leaf.names) != len(kind.names) or not alike:
            raise ValueError(f"leaf `{leaf.path}` is not of its kind")
        if leaf.kind not in checked:
            checked.add(leaf.kind)
            _check_kind(plan, leaf, kind)


def _check_kind(plan: TransferPlan, leaf: SentLeaf, kind: TransferKind) -> None:
    sources = {name: plan.sources[own] for name, own in zip(kind.names, leaf.names, strict=True)}
    wanted = sorted(process for process in plan.receivers if plan.receiver in (None, process))
    given = sorted((buffer.process, device) for buffer in kind.buffers for device in buffer.devices)
    if [process for process, _ in given] != wanted or len({*given}) < len(given):
        raise ValueError(f"leaf `{leaf.path}` is not for every device once")
    for buffer in kind.buffers:
        if len(buffer.box) != len(leaf.shape) or any(
            not low <= high <= size for (low, high), size in zip(buffer.box, leaf.shape, strict=True)
        ):
            raise ValueError(f"leaf `{leaf.path}` has the box {buffer.box} in shape {leaf.shape}")
    for number, form in enumerate(kind.forms):
        start = Piece(form.value, (0,) * form.rank, (0,) * len(leaf.shape), form.factors)
        if any(factor.target_dim >= len(leaf.shape) for factor in form.factors) or not _fits(start, leaf.shape):
            raise ValueError(f"leaf `{leaf.path}` has a piece that does not fit its shape {leaf.shape}")
        own, is_local = kind.rows[kind.rows[:, FORM] == number], form.value.path is None
        if not np.isin(own[:, PROCESS], [-1] if is_local else plan.senders).all():
            raise ValueError(f"leaf `{leaf.path}` has a piece from no process of the senders")
        dtypes = {name: source.dtype for name, source in sources.items()}
        if form != form_of(None if is_local else sent_of(form.value, dtypes), start, form.rank, leaf.dtype):
            raise ValueError(f"leaf `{leaf.path}` is sent otherwise than its casts and scales say")
        if not is_local:
            _check_source(leaf, form, sources, own[:, PLACE : PLACE + form.rank])
    if not _is_covered(kind, len(leaf.shape)):
        raise ValueError(f"leaf `{leaf.path}`: the elements of its shards are not each written once")


def _check_source(leaf: SentLeaf, form: WireForm, sources: Mapping[str, Struct], places: np.ndarray) -> None:
    value = form.value
    source = sources[value.path or ""]
    shape, dtype = source.shape, source.dtype
    if value.scale is not None:
        dtype, scales = np.dtype("float32"), sources[value.scale.path].shape
        if scales != tuple(-(-size // each) for size, each in zip(shape, value.scale.block, strict=True)):
            raise ValueError(f"leaf `{leaf.path}` has scales of another shape")
    if form.rank != len(shape) or any(factor.source_dim >= len(shape) for factor in form.factors):
        raise ValueError(f"leaf `{leaf.path}` has a piece of more dimensions than `{value.path}`")
    start = swapped(Piece(value, (0,) * len(shape), (0,) * len(leaf.shape), form.factors))
    ends = [high for _, high in hull(start)]
    if not _fits(start, shape) or (places + np.array(ends, np.int64) > np.array(shape, np.int64)).any():
        raise ValueError(f"leaf `{leaf.path}` has a piece outside of `{value.path}`")
    if np.dtype([dtype, *dtypes_of(value.casts)][-1]) != leaf.dtype:
        raise ValueError(f"leaf `{leaf.path}` is {leaf.dtype}, which its casts do not give")


def _fits(piece: Piece, shape: Sequence[int]) -> bool:
    return all(high <= size for (_, high), size in zip(hull(piece), shape, strict=True))


def _is_covered(kind: TransferKind, rank: int) -> bool:
    """Whether pieces write each element of each buffer exactly once.

    Boxes form a partition of a box if their corners cancel: each corner counts 1, or -1 if an odd number of its
    coordinates are ends. All corners at one position must add up to the buffer's own corner there.
    """
    lows = [np.zeros((len(kind.buffers), rank), np.int64)]
    highs = [np.array([[high - low for low, high in buffer.box] for buffer in kind.buffers]).reshape(lows[0].shape)]
    owners, signs = [np.arange(len(kind.buffers))], [np.full(len(kind.buffers), -1)]
    left = _MOST_BOXES
    for number, form in enumerate(kind.forms):
        own = kind.rows[kind.rows[:, FORM] == number]
        start = Piece(form.value, (0,) * form.rank, (0,) * rank, form.factors)
        for part in dense(start) if len(own) else ():
            left -= len(own)
            if left < 0:
                raise ValueError(f"pieces of more than {_MOST_BOXES} boxes")
            ends = np.array(hull(part), np.int64).reshape(rank, 2)
            places = own[:, PLACE + kind.rank :]
            lows.append(places + ends[:, 0])
            highs.append(places + ends[:, 1])
            owners.append(own[:, BUFFER])
            signs.append(np.ones(len(own), np.int64))
    low, high, owner, sign = map(np.concatenate, (lows, highs, owners, signs))
    count = len(kind.buffers)
    keys, weights = [], []
    sides = [np.unique(np.stack([low[:, dim], high[:, dim]]), return_inverse=True) for dim in range(rank)]
    if count * math.prod(len(values) for values, _ in sides) >= _MOST or len(low) << rank > _MOST_CORNERS:
        raise ValueError(f"the pieces of an array have {len(low) << rank} corners")
    for corner in it.product((0, 1), repeat=rank):
        key = owner
        for (values, places), side in zip(sides, corner, strict=True):
            key = key * len(values) + places.reshape(2, -1)[side]
        keys.append(key)
        weights.append(sign * (-1) ** sum(corner))
    _, at = np.unique(np.concatenate(keys), return_inverse=True)
    return not np.bincount(at, np.concatenate(weights)).any()
