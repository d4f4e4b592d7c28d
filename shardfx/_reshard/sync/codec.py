"""Writes a transfer plan as JSON text, and reads and checks such text."""

import hashlib
import itertools as it
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._convert import (
    NOWHERE,
    Arithmetic,
    Factor,
    Piece,
    Scale,
    Struct,
    Value,
    dense,
    dtypes_of,
    hull,
    swapped,
)
from ..._ground.errors import PlanFormatError
from ..._plan import decode_dtype
from .planning import encoding_of, form_of
from .transfer import (
    BUFFER,
    FORM,
    PLACE,
    PROCESS,
    Buffer,
    SentLeaf,
    TransferKind,
    TransferPlan,
    WireForm,
)


_VERSION = 1
# Limits for numbers, boxes of one array and their corners; no plan of this package
# exceeds them.
_MOST, _MOST_BOXES, _MOST_CORNERS = 1 << 48, 1 << 22, 1 << 26


def to_json(plan: TransferPlan) -> str:
    """A transfer plan as JSON text with a checksum, which
    [`shardfx._reshard.sync.from_json`][] reads.

    **Arguments:**

    - `plan`: the plan for all receivers or for one.
    """
    text = _text(plan)
    return json.dumps(
        {
            "version": _VERSION,
            "digest": plan.digest,
            "checksum": _checksum(text),
            "plan": text,
        }
    )


def _text(plan: TransferPlan) -> str:
    body = {
        "settings": plan.settings,
        "senders": plan.senders,
        "receivers": plan.receivers,
        "receiver": plan.receiver,
        "limit_bytes": plan.limit_bytes,
        "sources": [
            [path, one.shape, str(one.dtype)] for path, one in plan.sources.items()
        ],
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
    return json.dumps(body, separators=(",", ":"))


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
        _require(data["checksum"] == _checksum(data["plan"]), "its checksum is another")
        plan = _read(json.loads(data["plan"]))
        _require(plan.digest == data["digest"], "its digest is another")
        # Values are read by `int`, `str` and `tuple`. A value that these change is of
        # another type.
        _require(
            _text(plan) == data["plan"],
            "a value is not what it says, or of another type",
        )
        _check(plan)
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


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _form_data(form: WireForm) -> list[object]:
    value = form.value
    casts = [
        list(to) if isinstance(to, Arithmetic) else str(np.dtype(to))
        for to in value.casts
    ]
    scales = None if form.scales is None else str(form.scales)
    own = [value.path, value.number, value.scale, casts]
    return [own, form.factors, form.rank, form.casts, str(form.sent), scales]


def _form(data: Any, dtypes: Mapping[str, np.dtype], dtype: np.dtype) -> WireForm:
    """Reads the `WireForm` that `_form_data` wrote, for sources of the dtypes `dtypes`
    and a target of `dtype`.
    """
    (path, number, scale, casts), digits, rank, *_ = data
    _require(
        (path is None) == isinstance(number, int | float), f"the value {data[0]!r:.80}"
    )
    scale = None if scale is None else Scale(str(scale[0]), _ints(scale[1]))
    read = [_dtype(to) if isinstance(to, str) else Arithmetic(*to) for to in casts]
    counted = [to for to in read if isinstance(to, Arithmetic)]
    are_known = all(
        sign in ("*", "/", "+", "-") and isinstance(number, int | float)
        for sign, number in counted
    )
    _require(are_known, f"the casts {casts!r:.80}")
    value = Value(None if path is None else str(path), number, scale, tuple(read))
    factors = tuple([Factor(*map(int, one)) for one in digits])
    for size, here, step, there, step_there in factors:
        is_digit = (
            size > 1
            and here >= NOWHERE
            and step >= (here != NOWHERE)
            and there >= 0
            and step_there > 0
        )
        _require(is_digit, "a digit that no piece has")
    piece = Piece(value, (), (), factors)
    return form_of(
        None if path is None else encoding_of(value, dtypes), piece, int(rank), dtype
    )


def _dtype(name: Any) -> np.dtype:
    made = decode_dtype(str(name))
    if not isinstance(made, np.dtype):
        raise ValueError(f"the dtype {name!r:.40}")
    return made


def _ints(given: Any) -> tuple[int, ...]:
    return tuple(map(int, given))


def _read(data: Any) -> TransferPlan:
    sources = {
        str(path): Struct(_ints(shape), _dtype(dtype))
        for path, shape, dtype in data["sources"]
    }
    leaves = tuple(
        SentLeaf(
            str(path),
            _ints(shape),
            _dtype(dtype),
            str(digest),
            int(kind),
            tuple(map(str, names)),
        )
        for path, shape, dtype, digest, kind, names in data["leaves"]
    )
    firsts = {leaf.kind: leaf for leaf in reversed(leaves)}
    dtypes = {path: one.dtype for path, one in sources.items()}
    kinds = tuple(
        _kind(kind, firsts[at], dtypes) for at, kind in enumerate(data["kinds"])
    )
    only = None if data["receiver"] is None else int(data["receiver"])
    ends = _ints(data["senders"]), _ints(data["receivers"])
    return TransferPlan(
        str(data["settings"]),
        *ends,
        only,
        int(data["limit_bytes"]),
        sources,
        kinds,
        leaves,
    )


def _kind(data: Any, leaf: SentLeaf, dtypes: Mapping[str, np.dtype]) -> TransferKind:
    buffers = tuple(
        Buffer(
            int(process),
            _ints(devices),
            tuple((int(low), int(high)) for low, high in box),
        )
        for process, devices, box in data["buffers"]
    )
    forms = tuple(_form(one, dtypes, leaf.dtype) for one in data["forms"])
    rank, columns = int(data["rank"]), data["columns"]
    _require(
        len(columns) == PLACE + rank + len(leaf.shape),
        f"{len(columns)} columns of pieces",
    )
    rows = np.array(columns).T
    is_table = not rows.size or (
        rows.dtype == np.int64
        and rows.ndim == 2
        and -1 <= rows.min() <= rows.max() < _MOST
    )
    _require(is_table, "pieces that are no table of whole numbers")
    rows = rows.reshape(-1, len(columns)).astype(np.int64)
    is_known = (rows[:, BUFFER:] >= 0).all() and (
        rows[:, [BUFFER, FORM]] < (len(buffers), len(forms))
    ).all()
    _require(is_known, "pieces of no buffer or no form")
    return TransferKind(tuple(map(str, data["names"])), rank, buffers, forms, rows)


def _check(plan: TransferPlan) -> None:
    """Raises `ValueError` unless all positions are inside their arrays, and each device
    receives each element of its shards once.
    """
    shapes = [one.shape for one in (*plan.leaves, *plan.sources.values())]
    numbers = [
        *plan.senders,
        *plan.receivers,
        plan.limit_bytes - 1,
        *[leaf.kind for leaf in plan.leaves],
    ]
    _require(
        all(0 <= one < _MOST for one in it.chain(numbers, *shapes)),
        "a number that no plan has",
    )
    _require(
        len({leaf.path for leaf in plan.leaves}) == len(plan.leaves),
        "a leaf is there twice",
    )
    firsts: dict[int, SentLeaf] = {}
    for leaf in plan.leaves:
        kind, first = plan.kinds[leaf.kind], firsts.setdefault(leaf.kind, leaf)
        if first is leaf:
            _require(kind.names == leaf.names, f"leaf `{leaf.path}` is not of its kind")
            _check_kind(plan, leaf, kind)
        ends, wanted = (
            [plan.sources[name] for name in one.names] for one in (leaf, first)
        )
        _require(
            leaf[1:3] == first[1:3] and ends == wanted,
            f"leaf `{leaf.path}` is not of its kind",
        )


def _check_kind(plan: TransferPlan, leaf: SentLeaf, kind: TransferKind) -> None:
    path, rank = f"leaf `{leaf.path}`", len(leaf.shape)
    wanted = sorted(
        process for process in plan.receivers if plan.receiver in (None, process)
    )
    given = sorted(
        (buffer.process, device) for buffer in kind.buffers for device in buffer.devices
    )
    is_once = [process for process, _ in given] == wanted and len({*given}) == len(
        given
    )
    _require(is_once, f"{path} is not for every device once")
    for _, _, box in kind.buffers:
        is_inside = len(box) == rank and all(
            0 <= a <= b <= size for (a, b), size in zip(box, leaf.shape, strict=True)
        )
        _require(is_inside, f"{path} has the box {box} in shape {leaf.shape}")
    for number, form in enumerate(kind.forms):
        start = Piece(form.value, (0,) * form.rank, (0,) * rank, form.factors)
        is_inside = all(factor.target_dim < rank for factor in form.factors) and _fits(
            start, leaf.shape
        )
        _require(
            is_inside, f"{path} has a piece that does not fit its shape {leaf.shape}"
        )
        own, is_local = kind.rows[kind.rows[:, FORM] == number], form.value.path is None
        is_sent = np.isin(own[:, PROCESS], [-1] if is_local else plan.senders).all()
        _require(is_sent, f"{path} has a piece from no process of the senders")
        if not is_local:
            _check_source(leaf, form, plan.sources, own[:, PLACE : PLACE + form.rank])
    _require(
        _is_covered(kind, rank),
        f"{path}: the elements of its shards are not each written once",
    )


def _check_source(
    leaf: SentLeaf, form: WireForm, sources: Mapping[str, Struct], places: np.ndarray
) -> None:
    value, path = form.value, f"leaf `{leaf.path}`"
    shape, dtype = sources[value.path or ""]
    if value.scale is not None:
        dtype, scales = np.dtype("float32"), sources[value.scale.path].shape
        wanted = tuple(
            -(-size // each)
            for size, each in zip(shape, value.scale.block, strict=True)
        )
        _require(
            min(value.scale.block, default=1) > 0 and scales == wanted,
            f"{path} has scales of another shape",
        )
    is_alike = form.rank == len(shape) and all(
        factor.source_dim < len(shape) for factor in form.factors
    )
    _require(is_alike, f"{path} has a piece of more dimensions than `{value.path}`")
    start = swapped(
        Piece(value, (0,) * len(shape), (0,) * len(leaf.shape), form.factors)
    )
    ends = [high for _, high in hull(start)]
    is_inside = (
        _fits(start, shape)
        and (places + np.array(ends, np.int64) <= np.array(shape, np.int64)).all()
    )
    _require(is_inside, f"{path} has a piece outside of `{value.path}`")
    is_cast = np.dtype([dtype, *dtypes_of(value.casts)][-1]) == leaf.dtype
    _require(is_cast, f"{path} is {leaf.dtype}, which its casts do not give")


def _fits(piece: Piece, shape: Sequence[int]) -> bool:
    return all(high <= size for (_, high), size in zip(hull(piece), shape, strict=True))


def _is_covered(kind: TransferKind, rank: int) -> bool:
    """Whether the rows of `kind` write each element of each buffer (one box of a target
    array) exactly once.

    `rank` is the number of dimensions of the target. The check compares corners of
    boxes, with signs. A corner has the sign -1 if an odd number of its coordinates are
    ends of their intervals, else 1. The written boxes cover a buffer exactly once if at
    each position their signs have the same sum as the buffer's. For intervals 0 to 2
    and 2 to 5, the signs at 2 cancel, and 1 at 0 and -1 at 5 are left, as for 0 to 5.
    """
    lows = [np.zeros((len(kind.buffers), rank), np.int64)]
    highs = [
        np.array(
            [[high - low for low, high in buffer.box] for buffer in kind.buffers]
        ).reshape(lows[0].shape)
    ]
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
    sides = [
        np.unique(np.stack([low[:, dim], high[:, dim]]), return_inverse=True)
        for dim in range(rank)
    ]
    if (
        count * math.prod(len(values) for values, _ in sides) >= _MOST
        or len(low) << rank > _MOST_CORNERS
    ):
        raise ValueError(f"the pieces of an array have {len(low) << rank} corners")
    for corner in it.product((0, 1), repeat=rank):
        key = owner
        for (values, places), side in zip(sides, corner, strict=True):
            key = key * len(values) + places.reshape(2, -1)[side]
        keys.append(key)
        weights.append(sign * (-1) ** sum(corner))
    _, at = np.unique(np.concatenate(keys), return_inverse=True)
    return not np.bincount(at, np.concatenate(weights)).any()
