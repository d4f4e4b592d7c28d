"""A transfer plan as JSON, and what is checked when it is read."""

import hashlib
import itertools as it
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._convert import NOWHERE, Counted, Factor, Piece, Scale, Struct, Value, dense, dtypes_of, hull, swapped
from ..._ground.boxes import Box, volume
from ..._ground.errors import PlanFormatError
from ..._plan import decode_dtype
from .transfer import Buffer, Kind, SentLeaf, Transfer, TransferPlan


_VERSION = 1
# Pieces of one shard meet a grid of so many cells at most; more is no plan that this package makes.
_MOST_CELLS = 1 << 24


class _Table:
    """Each different thing once, by number: pieces share few values and factors."""

    def __init__(self):
        self.numbers: dict[object, int] = {}

    def __call__(self, thing: object) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def to_json(plan: TransferPlan) -> str:
    """A transfer plan as JSON text, with a checksum; [`shardfx._reshard.sync.from_json`][] reads it.

    **Arguments:**

    - `plan`: the plan, or one receiver's part.
    """
    values, factors = _Table(), _Table()
    kinds = [
        {
            "names": list(kind.names),
            "buffers": [list(buffer) for buffer in kind.buffers],
            "transfers": [
                [one.process, one.device, one.buffer, values((one.piece.value, one.casts, one.sent)),
                 factors(one.piece.factors), one.piece.source, one.piece.target]
                for one in kind.transfers
            ],
        }
        for kind in plan.kinds
    ]  # fmt: skip
    body = {
        "settings": plan.settings,
        "senders": plan.senders,
        "receivers": plan.receivers,
        "receiver": plan.receiver,
        "limit_bytes": plan.limit_bytes,
        "sources": [[path, one.shape, str(one.dtype)] for path, one in plan.sources.items()],
        "leaves": [[*leaf[:2], str(leaf.dtype), *leaf[3:]] for leaf in plan.leaves],
        "values": [[_value_data(value), casts, str(sent)] for value, casts, sent in values.numbers],  # pyright: ignore
        "factors": list(factors.numbers),
        "kinds": kinds,
    }
    text = json.dumps(body, separators=(",", ":"))
    return json.dumps({"version": _VERSION, "digest": plan.digest, "checksum": _checksum(text), "plan": text})


def from_json(text: str) -> TransferPlan:
    """The plan that `to_json` wrote, with proof that each element of each shard is written once.

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


def _value_data(value: Value) -> list[object]:
    casts = [list(to) if isinstance(to, Counted) else str(np.dtype(to)) for to in value.casts]
    return [value.path, value.number, value.scale, casts]


def _value(data: Any) -> Value:
    path, number, scale, casts = data
    made = None if scale is None else Scale(_text(scale[0]), _ints(scale[1], 1))
    if not isinstance(number, int | float | None) or (path is None) == (number is None):
        raise ValueError(f"the value {data!r:.80}")
    read = [_dtype(to) if isinstance(to, str) else _counted(*to) for to in casts]
    return Value(None if path is None else _text(path), number, made, tuple(read))


def _counted(sign: Any, number: Any) -> Counted:
    if sign not in ("*", "/", "+", "-") or not isinstance(number, int | float):
        raise ValueError(f"arithmetic {sign!r:.20} {number!r:.20}")
    return Counted(sign, number)


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
    if type(given) is not int or not least <= given < 1 << 62:
        raise ValueError(f"{given!r:.40} is no whole number from {least} on")
    return given


def _ints(given: Any, least: int = 0) -> tuple[int, ...]:
    return tuple([_int(one, least) for one in given])


def _read(data: Any) -> TransferPlan:
    values = [(_value(value), _int(casts), _dtype(sent)) for value, casts, sent in data["values"]]
    factors = [tuple([_factor(*one) for one in row]) for row in data["factors"]]
    kinds = []
    for kind in data["kinds"]:
        buffers = tuple(
            Buffer(_int(process), _ints(devices), tuple((_int(a), _int(b)) for a, b in box))
            for process, devices, box in kind["buffers"]
        )
        transfers = []
        for process, device, buffer, value, own, source, target in kind["transfers"]:
            made, casts, sent = values[_int(value)]
            piece = Piece(made, _ints(source), _ints(target), factors[_int(own)])
            transfers.append(Transfer(_int(process, -1), _int(device, -1), _int(buffer), piece, casts, sent))
        kinds.append(Kind(tuple(map(_text, kind["names"])), buffers, tuple(transfers)))
    leaves = tuple(
        SentLeaf(_text(path), _ints(shape), _dtype(dtype), _text(digest), _int(kind), tuple(map(_text, names)))
        for path, shape, dtype, digest, kind, names in data["leaves"]
    )
    sources = {_text(path): Struct(_ints(shape), _dtype(dtype)) for path, shape, dtype in data["sources"]}
    ends = _ints(data["senders"]), _ints(data["receivers"])
    only = None if data["receiver"] is None else _int(data["receiver"])
    return TransferPlan(
        _text(data["settings"]), *ends, only, _int(data["limit_bytes"], 1), sources, tuple(kinds), leaves
    )


def _factor(size: Any, source_dim: Any, source_step: Any, target_dim: Any, target_step: Any) -> Factor:
    dims = (_int(source_dim, NOWHERE), _int(target_dim))
    steps = (_int(source_step, 0 if dims[0] == NOWHERE else 1), _int(target_step, 1))
    return Factor(_int(size, 2), dims[0], steps[0], dims[1], steps[1])


def _check(plan: TransferPlan) -> None:
    """Raises unless each leaf's pieces fit their arrays, and each device gets each element of its shard once."""
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


def _check_kind(plan: TransferPlan, leaf: SentLeaf, kind: Kind) -> None:
    sources = {name: plan.sources[own] for name, own in zip(kind.names, leaf.names, strict=True)}
    wanted = sorted(process for process in plan.receivers if plan.receiver in (None, process))
    given = sorted((buffer.process, device) for buffer in kind.buffers for device in buffer.devices)
    if [process for process, _ in given] != wanted or len({*given}) < len(given):
        raise ValueError(f"leaf `{leaf.path}` is not for every device once")
    pieces: list[list[Piece]] = [[] for _ in kind.buffers]
    for one in kind.transfers:
        is_local = one.piece.value.path is None
        if is_local != (one.process == -1) or (not is_local and one.process not in plan.senders):
            raise ValueError(f"leaf `{leaf.path}` has a piece from process {one.process}")
        if not is_local:
            _check_source(leaf, one, sources)
        pieces[one.buffer].append(one.piece)
    for buffer, own in zip(kind.buffers, pieces, strict=True):
        if len(buffer.box) != len(leaf.shape) or any(
            not low <= high <= size for (low, high), size in zip(buffer.box, leaf.shape, strict=True)
        ):
            raise ValueError(f"leaf `{leaf.path}` has the box {buffer.box} in shape {leaf.shape}")
        sizes = tuple(high - low for low, high in buffer.box)
        if not is_covered(sizes, own):
            raise ValueError(f"leaf `{leaf.path}`: the elements of {buffer.box} are not each written once")


def _check_source(leaf: SentLeaf, one: Transfer, sources: dict[str, Struct]) -> None:
    value = one.piece.value
    source = sources[value.path or ""]
    shape, start = source.shape, np.dtype("float32") if value.scale else source.dtype
    if not _fits(swapped(one.piece), shape) or not one.casts <= len(value.casts):
        raise ValueError(f"leaf `{leaf.path}` has a piece outside of `{value.path}`")
    if value.scale is not None:
        blocks = tuple(-(-size // each) for size, each in zip(shape, value.scale.block, strict=True))
        if sources[value.scale.path].shape != blocks:
            raise ValueError(f"leaf `{leaf.path}` has scales of another shape")
    if np.dtype([start, *dtypes_of(value.casts[: one.casts])][-1]) != one.sent:
        raise ValueError(f"leaf `{leaf.path}` is sent as {one.sent}, which its casts do not give")
    if np.dtype([start, *dtypes_of(value.casts)][-1]) != leaf.dtype:
        raise ValueError(f"leaf `{leaf.path}` is {leaf.dtype}, which its casts do not give")


def _fits(piece: Piece, shape: Sequence[int]) -> bool:
    if len(piece.target) != len(shape) or any(factor.target_dim >= len(shape) for factor in piece.factors):
        return False
    return all(high <= size for (_, high), size in zip(hull(piece), shape, strict=True))


def is_covered(sizes: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Whether pieces write each element of an array of these sizes exactly once."""
    if not all(_fits(piece, sizes) for piece in pieces) or sum(piece.elements for piece in pieces) != math.prod(sizes):
        return False
    boxes = [hull(part) for piece in pieces for part in it.islice(dense(piece), _MOST_CELLS)]
    return sum(map(volume, boxes)) == math.prod(sizes) and not _overlap(sizes, boxes)


def _overlap(sizes: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element: each is drawn on the grid of all their edges."""
    if len(boxes) < 2:
        return False
    edges = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(sizes))]
    places = [{edge: at for at, edge in enumerate(own)} for own in edges]
    shape = [len(own) - 1 for own in edges]
    if math.prod(shape) > _MOST_CELLS:
        raise ValueError(f"the pieces of a shard form a grid of {math.prod(shape)} cells")
    grid = np.zeros(shape, bool)
    for box in boxes:
        part = grid[tuple(slice(at[low], at[high]) for (low, high), at in zip(box, places, strict=True))]
        if part.any():
            return True
        part[...] = True
    return False
