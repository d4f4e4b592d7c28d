"""A plan as JSON text, and back: versioned, and checked field by field where it is read."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from .._ground.errors import MeshError, PlanFormatError
from .._rules import AxisRules
from ..topology import MeshSpec
from . import codec
from .correction import correct
from .leaf import MEMORY_KINDS, Row, Skeleton, decode_structure


_FORMAT = "shardfx.plan"
_VERSION = 1


def payload(
    mesh: MeshSpec,
    axes: AxisRules | None,
    mode: str | None,
    rows: Sequence[Row],
    leaves: Iterable[tuple[str, int]],
    structure: object,
    strict: bool,
) -> dict[str, Any]:
    """What the text of a plan says, its digest apart; `leaves` are pairs of a path and the number of its row."""
    # Most plans are not strict; the text of those stays what it was before plans could say so.
    return ({"strict": True} if strict else {}) | {
        "format": _FORMAT,
        "version": _VERSION,
        "mesh": codec.encode_mesh(mesh),
        "axes": codec.encode_rules(axes),
        "mode": mode,
        "rows": [codec.encode_row(row) for row in rows],
        "leaves": [list(pair) for pair in leaves],
        "structure": structure,
    }


def written(payload: dict[str, object]) -> str:
    return json.dumps(payload, separators=(",", ":"), ensure_ascii=True)


def _row(number: int, data: object, mesh: MeshSpec) -> Row:
    row = codec.decode_row(number, data)
    if row.memory_kind not in (None, *MEMORY_KINDS):
        raise PlanFormatError(f"memory kind {row.memory_kind!r} is none of {', '.join(MEMORY_KINDS)}.")
    valid = correct(row.spec, row.shape, mesh)
    if valid.spec != row.spec:
        reason = valid.reasons[0]
        raise PlanFormatError(f"the spec {row.spec} is invalid for shape {row.shape} on mesh {mesh}: {reason}.")
    return row


def parsed(text: str) -> dict[str, Any]:
    """The JSON of a plan of this version."""
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN, and for a lone surrogate
    except json.JSONDecodeError as error:
        raise PlanFormatError(
            f"this is no whole JSON text ({error.msg} at character {error.pos} of {len(text)}); was the file truncated?"
        ) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanFormatError(
            f"this JSON is no plan: its `format` is not {_FORMAT!r}; write plans with `plan.to_json()`."
        )
    if data.get("version") != _VERSION:
        raise PlanFormatError(
            f"the plan has version {data.get('version')!r}, and this shardfx reads version {_VERSION}; "
            "update shardfx, or write the plan again."
        )
    return data


@contextlib.contextmanager
def refused_as_invalid() -> Iterator[None]:
    """Makes a PlanFormatError of whatever goes wrong while a text is read."""
    try:
        yield
    except PlanFormatError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise PlanFormatError(f"the plan's JSON is invalid: {type(error).__name__}: {error}") from error


def decoded(data: dict[str, Any]) -> dict[str, Any]:
    """What `payload` was made from: the fields of a plan's content, without devices."""
    mesh = codec.decode_mesh(data["mesh"])
    if -1 in mesh.axis_sizes:
        raise MeshError("the mesh has an axis of unknown size")
    rows = [_row(number, row, mesh) for number, row in enumerate(data["rows"])]
    paths, index = [path for path, _ in data["leaves"]], [i for _, i in data["leaves"]]
    if not all(isinstance(path, str) for path in paths) or not all(
        type(i) is int and -1 <= i < len(rows) for i in index
    ):
        raise PlanFormatError("`leaves` must hold pairs of a path and the number of a row")
    order, treedef = jax.tree.flatten(decode_structure(data["structure"], paths))
    if sorted(order) != list(range(len(paths))):
        raise PlanFormatError(f"`structure` has {len(order)} leaves, but `leaves` has {len(paths)}")
    if data["mode"] is not None and not isinstance(data["mode"], str):
        raise PlanFormatError(f"`mode` is {data['mode']!r}; it must be a string or null")
    strict = data.get("strict", False)
    if not isinstance(strict, bool):
        raise PlanFormatError(f"`strict` is {strict!r}; it must be true or left out")
    return {
        "strict": strict,
        "mesh": mesh,
        "jax_mesh": None,
        "axes": codec.decode_rules(data["axes"]),
        "mode": data["mode"],
        "rows": rows,
        "index": index,
        "skeleton": Skeleton(tuple(paths), treedef, order, data["structure"]),
    }
