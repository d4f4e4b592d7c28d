"""Converts a plan to JSON text and back. The text has a version, and reading it checks every field.

The first functions handle the text as a whole. The `encode_` and `decode_` functions below them convert meshes, specs,
names, rules and dtypes.
"""

import contextlib
import functools as ft
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .._ground.errors import LeafTypeError, MeshError, PlanFormatError
from .._ground.reason import Code, Reason
from .._ground.spec import UNCONSTRAINED, DType, dtype_named, entries_of, unreduced_kind, with_reductions
from .._rules import Atomic, AxisRules, Fsdp, fsdp
from ..topology import MeshSpec
from .decide import correct
from .leaf import MEMORY_KINDS, Row, Skeleton, decode_structure


HEADER = {"format": "shardfx.plan", "version": 1}


def written(payload: dict[str, object]) -> str:
    return json.dumps(payload, separators=(",", ":"), ensure_ascii=True)


def _row(number: int, data: object, mesh: MeshSpec) -> Row:
    row = decode_row(number, data)
    if row.memory_kind not in (None, *MEMORY_KINDS):
        raise PlanFormatError(f"memory kind {row.memory_kind!r} is none of {', '.join(MEMORY_KINDS)}.")
    for name, column in (("names", row.names), ("units", row.units)):
        if column and len(column) != len(row.shape):
            raise PlanFormatError(
                f"row {number}: `{name}` is {column!r:.60}; shape {row.shape} needs one for each dimension."
            )
    valid = correct(row.spec, row.shape, mesh)
    if valid.spec != row.spec:
        reason = valid.reasons[0]
        raise PlanFormatError(f"the spec {row.spec} is invalid for shape {row.shape} on mesh {mesh}: {reason}.")
    return row


def parsed(text: str) -> dict[str, Any]:
    """Parses the JSON text of a plan; raises if it is not JSON, not a plan, or of another version."""
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN, and for a lone surrogate
    except json.JSONDecodeError as error:
        raise PlanFormatError(
            f"this is no whole JSON text ({error.msg} at character {error.pos} of {len(text)}); was the file truncated?"
        ) from error
    if not isinstance(data, dict) or data.get("format") != HEADER["format"]:
        raise PlanFormatError(
            f"this JSON is no plan: its `format` is not {HEADER['format']!r}; write plans with `plan.to_json()`."
        )
    if data.get("version") != HEADER["version"]:
        raise PlanFormatError(
            f"the plan has version {data.get('version')!r}, and this shardfx reads version {HEADER['version']}; "
            "update shardfx, or write the plan again."
        )
    return data


@contextlib.contextmanager
def refused_as_invalid() -> Iterator[None]:
    """Turns any error while a text is read into a PlanFormatError."""
    try:
        yield
    except PlanFormatError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise PlanFormatError(f"the plan's JSON is invalid: {type(error).__name__}: {error}") from error


def decoded(data: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the fields of a plan's `Content` in their order, without devices, from parsed JSON."""
    mesh = decode_mesh(data["mesh"])
    if -1 in mesh.axis_sizes:
        raise MeshError("the mesh has an axis of unknown size")
    rows = [_row(number, row, mesh) for number, row in enumerate(data["rows"])]
    paths, index = [path for path, _ in data["leaves"]], [i for _, i in data["leaves"]]
    are_numbers = all(type(i) is int and -1 <= i < len(rows) for i in index)
    if not are_numbers or not all(isinstance(path, str) for path in paths):
        raise PlanFormatError("`leaves` must hold pairs of a path and the number of a row")
    order, treedef = jax.tree.flatten(decode_structure(data["structure"], paths))
    if sorted(order) != list(range(len(paths))):
        raise PlanFormatError(f"`structure` has {len(order)} leaves, but `leaves` has {len(paths)}")
    if data["mode"] is not None and not isinstance(data["mode"], str):
        raise PlanFormatError(f"`mode` is {data['mode']!r}; it must be a string or null")
    strict = data.get("strict", False)
    if not isinstance(strict, bool):
        raise PlanFormatError(f"`strict` is {strict!r}; it must be true or left out")
    skeleton = Skeleton(tuple(paths), treedef, order, data["structure"])
    return mesh, None, decode_rules(data["axes"]), data["mode"], rows, index, skeleton, strict


_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def encode_mesh(mesh: MeshSpec) -> object:
    types = [kind.name for kind in mesh.axis_types]
    return [list(row) for row in zip(mesh.axis_names, mesh.axis_sizes, types, mesh.dcn_sizes, strict=True)]


def decode_mesh(data: object) -> MeshSpec:
    if not isinstance(data, list) or not all(isinstance(row, list) and len(row) == 4 for row in data):
        raise PlanFormatError("`mesh` must hold a list [name, size, axis type, slices] for each axis.")
    return MeshSpec(
        [(name, size) for name, size, _, _ in data],
        axis_types={name: AxisType[kind] for name, _, kind, _ in data},
        dcn={name: slices for name, _, _, slices in data},
    )


def encode_entry(entry: object) -> object:
    """Encodes one entry of a spec or of logical names, or the target of a rule, as a JSON value."""
    if entry is UNCONSTRAINED:
        return {"unconstrained": True}
    if isinstance(entry, Atomic):
        return {"atomic": encode_entry(entry.target), "unit": entry.unit}
    return [encode_entry(part) for part in entry] if isinstance(entry, tuple) else entry


def decode_entry(data: object) -> Any:
    if isinstance(data, dict):
        return UNCONSTRAINED if "unconstrained" in data else Atomic(decode_entry(data["atomic"]), data["unit"])
    if isinstance(data, list):
        return tuple(decode_entry(part) for part in data)
    if data is None or isinstance(data, str):
        return data
    raise PlanFormatError(f"{data!r} is no entry of a spec; it must be null, a name, or a list of names.")


def encode_spec(spec: PartitionSpec) -> object:
    entries = [encode_entry(entry) for entry in entries_of(spec)]
    if not (spec.unreduced or spec.reduced):
        return entries
    written = {"entries": entries, "unreduced": sorted(spec.unreduced), "reduced": sorted(spec.reduced)}
    kind = unreduced_kind(spec)
    return written | ({"kind": kind} if kind != "sum" else {})


def decode_spec(data: Any) -> PartitionSpec:
    if isinstance(data, dict):
        entries = [decode_entry(entry) for entry in data["entries"]]
        kind = data.get("kind", "sum")
        if kind not in ("sum", "max", "min"):
            raise PlanFormatError(f"the kind of a reduction is {kind!r:.60}; it must be sum, max or min.")
        return with_reductions(entries, data["unreduced"], data["reduced"], kind)
    return PartitionSpec(*[decode_entry(entry) for entry in data])


def encode_rules(rules: AxisRules | None) -> object:
    if rules is None:
        return None
    written = {
        "rules": encode_entry(rules.rules),
        "modes": encode_entry(rules.modes),
        "units": [list(pair) for pair in rules.units],
        "aliases": [list(pair) for pair in rules.aliases],
    }
    # Left out where no axes are declared, so that the text and digest of older plans stay the same.
    return written | ({"axes": list(rules.axes)} if rules.axes else {})


def decode_rules(data: Any) -> AxisRules | None:
    if data is None:
        return None
    return AxisRules(
        decode_entry(data["rules"]),
        modes=decode_entry(data["modes"]),
        units=[tuple(pair) for pair in data["units"]],
        aliases=[tuple(pair) for pair in data["aliases"]],
        axes=data.get("axes", ()),
    )


def encode_reason(reason: Reason) -> object:
    return [reason.code.name, reason.dim, list(reason.axes), reason.message]


def decode_reason(data: Any) -> Reason:
    code, dim, axes, message = data
    if not (dim is None or _is_count(dim)) or not _are_names(axes) or not isinstance(message, str):
        raise PlanFormatError(f"{data!r} is no reason; it must be [code, dimension or null, list of axes, message].")
    return Reason(Code[code], dim, tuple(axes), message)


def encode_strategy(strategy: Fsdp) -> object:
    return [list(strategy.axes), strategy.min_bytes, *([list(strategy.skip)] if strategy.skip else [])]


def decode_strategy(data: Any) -> Fsdp:
    axes, min_bytes, *rest = data
    skip = rest[0] if rest else []
    if not _are_names(axes) or not _is_count(min_bytes) or not isinstance(skip, list) or not all(map(_is_count, skip)):
        raise PlanFormatError(f"{data!r} is no strategy; it must be [list of axes, bytes, list of whole dimensions].")
    return fsdp(axes, min_bytes, skip=skip)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


@ft.lru_cache(maxsize=256)
def encode_dtype(dtype: DType) -> str:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return np.dtype(dtype).name
    for name in _KEY_IMPLEMENTATIONS:
        if key_dtype(name) == dtype:
            return f"key<{name}>"
    raise LeafTypeError(
        f"dtype {dtype} has no name in a plan's JSON; PRNG keys of {', '.join(_KEY_IMPLEMENTATIONS)} have one."
    )


@ft.lru_cache(maxsize=256)
def decode_dtype(name: str) -> DType:
    if name.startswith("key<") and name.removeprefix("key<").removesuffix(">") in _KEY_IMPLEMENTATIONS:
        return key_dtype(name.removeprefix("key<").removesuffix(">"))
    found = dtype_named(name)
    if found is None:
        raise PlanFormatError(f"dtype {name!r:.60} is unknown to this version of JAX.")
    return found


@ft.lru_cache(maxsize=8)
def key_dtype(implementation: str) -> DType:
    """The dtype of a PRNG key array of this implementation, found without making a key."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


class _Field(NamedTuple):
    """How one field of a row is stored in JSON: a description of valid values, a test for them, and functions to read
    and write one.
    """

    what: str
    is_valid: Callable[[Any], bool]
    decode: Callable[[Any], Any]
    encode: Callable[[Any], object] = encode_entry


def _list_of(decode: Callable[[Any], Any], encode: Callable[[Any], object]) -> _Field:
    return _Field("a list", lambda v: isinstance(v, list), lambda v: tuple(map(decode, v)), lambda v: [*map(encode, v)])


_SPEC = _Field("a list of entries", lambda v: isinstance(v, list | dict), decode_spec, encode_spec)
_TEXT = _Field("a string or null", lambda v: v is None or isinstance(v, str), decode_entry)


_ROW = {
    "shape": _Field("a list of sizes", lambda v: isinstance(v, list) and all(map(_is_count, v)), tuple),
    "dtype": _Field("a dtype's name", lambda v: isinstance(v, str), decode_dtype, encode_dtype),
    "names": _Field("null or a list of logical names", lambda v: v is None or isinstance(v, list), decode_entry),
    "requested": _SPEC,
    "spec": _SPEC,
    "rule": _TEXT,
    "reasons": _list_of(decode_reason, encode_reason),
    "memory_kind": _TEXT,
    "units": _Field(
        "null or a list of positive integers",
        lambda v: v is None or (isinstance(v, list) and all(_is_count(unit) and unit for unit in v)),
        lambda v: None if v is None else tuple(v),
    ),
    "strategies": _list_of(decode_strategy, encode_strategy),
}


def encode_row(row: Row) -> dict[str, Any]:
    return {name: field.encode(value) for (name, field), value in zip(_ROW.items(), row, strict=True)}


def decode_row(number: int, row: object) -> Row:
    """Decodes a row from JSON, after a check that every field is present and has a valid value."""
    if not isinstance(row, dict):
        raise PlanFormatError(f"row {number} is {row!r:.60}; it must be an object.")
    for name, field in _ROW.items():
        if name not in row:
            raise PlanFormatError(f"row {number} has no `{name}`.")
        if not field.is_valid(row[name]):
            raise PlanFormatError(f"row {number}: `{name}` is {row[name]!r:.60}; it must be {field.what}.")
    return Row(**{name: field.decode(row[name]) for name, field in _ROW.items()})
