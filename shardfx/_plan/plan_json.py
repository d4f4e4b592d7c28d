"""Converts a plan to JSON text and back. The text has a version, and reading it checks
every field.

The first functions handle the text as a whole. The `encode_` and `decode_` functions
below them convert meshes, specs, names, rules and dtypes.
"""

import functools as ft
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .._ground.errors import LeafTypeError, MeshError, PlanFormatError
from .._ground.keys import key_dtypes
from .._ground.reason import Code, Reason
from .._ground.spec import (
    UNCONSTRAINED,
    DType,
    dtype_named,
    entries_of,
    unreduced_kind,
    with_reductions,
)
from .._rules import (
    STRATEGIES,
    Atomic,
    AxisRules,
    Fsdp,
    Strategy,
    Units,
    resolve,
    strategy_of,
)
from ..topology import MeshSpec
from .decide import correct
from .leaf import MEMORY_KINDS, PathTree, Row, decode_structure


HEADER = {"format": "shardfx.plan", "version": 1}
# A longer text that is no JSON is no path of a file.
_LONGEST_PATH = 300


def written(payload: dict[str, object]) -> str:
    """The JSON text of a plan's fields, without spaces, in ASCII."""
    return json.dumps(payload, separators=(",", ":"), ensure_ascii=True)


def too_deep() -> PlanFormatError:
    """The error for a plan's JSON whose nesting exhausts the stack."""
    return PlanFormatError(
        "the plan's tree is nested too deeply for JSON: Python reads and writes about"
        " 300 levels of dicts. Nest it less: put layers into one list or dict, and not"
        " each into the one before."
    )


def _fits(value: Any, valid: Any) -> bool:
    """Whether a JSON value is one of the valid values.

    `valid` is `None` or a Python type, where `int` excludes negative numbers. `[type]`
    is a list of values of this type, and a tuple has alternatives: `([int], None)` is a
    list of integers from 0, or null.
    """
    if isinstance(valid, tuple):
        return any(_fits(value, alternative) for alternative in valid)
    if isinstance(valid, list):
        return isinstance(value, list) and all(_fits(part, valid[0]) for part in value)
    if valid is int:
        return type(value) is int and value >= 0
    if valid is None:
        return value is None
    return isinstance(value, valid)


def _require(what: str, value: Any, valid: Any, description: str) -> None:
    """Raises `PlanFormatError` unless `value` is one of the valid values, as `_fits`
    reads `valid`. The message begins with `what`, and `description` says what is valid.
    """
    if not _fits(value, valid):
        raise PlanFormatError(f"{what} is {value!r:.60}; it must be {description}.")


def _may_be_path(text: str | bytes) -> bool:
    """Whether a text that is no JSON may be the path of a file."""
    if not isinstance(text, str) or not text.isprintable():
        return False
    return 0 < len(text) < _LONGEST_PATH


def _refused(number: str) -> NoReturn:
    """Raises `PlanFormatError` for a number that is none of a plan: they are whole."""
    raise PlanFormatError(
        f"the plan's JSON has {number:.60}, and its numbers are whole."
    )


def parsed(text: str) -> dict[str, Any]:
    """Parses the JSON text of a plan. Raises `PlanFormatError` if it is not JSON, not a
    plan, or of another version.
    """
    if not isinstance(text, str | bytes):
        raise PlanFormatError(
            f"`from_json` reads the text that `plan.to_json()` returned, not"
            f" {type(text).__name__}."
        )
    try:
        data = json.loads(text, parse_constant=_refused, parse_float=_refused)
    except json.JSONDecodeError as error:
        if error.pos == 0 and _may_be_path(text):
            raise PlanFormatError(
                f"{text!r} is no JSON; for a file read its text:"
                f" `ShardPlan.from_json(pathlib.Path({text!r}).read_text())`."
            ) from error
        raise PlanFormatError(
            f"this is no whole JSON text ({error.msg} at character {error.pos} of"
            f" {len(text)}); was the file truncated?"
        ) from error
    if not isinstance(data, dict) or data.get("format") != HEADER["format"]:
        raise PlanFormatError(
            f"this JSON is no plan: its `format` is not {HEADER['format']!r}; write"
            " plans with `plan.to_json()`."
        )
    if data.get("version") != HEADER["version"]:
        raise PlanFormatError(
            f"the plan has version {data.get('version')!r}, and this shardfx reads"
            f" version {HEADER['version']}; update shardfx, or write the plan again."
        )
    return data


def decoded(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Content` by name, without devices, from the parsed JSON
    of a plan.
    """
    mesh = decode_mesh(data["mesh"])
    if -1 in mesh.axis_sizes:
        raise MeshError("the mesh has an axis of unknown size")
    rows = [decode_row(number, row, mesh) for number, row in enumerate(data["rows"])]
    paths = [path for path, _ in data["leaves"]]
    index = [i for _, i in data["leaves"]]
    # -1, -2 and -3 stand for leaves without a row.
    is_index = all(type(i) is int and -3 <= i < len(rows) for i in index)
    if not _fits(paths, [str]) or not is_index:
        raise PlanFormatError(
            "`leaves` must hold pairs of a path and the number of a row"
        )
    # The index in `paths` of each leaf of the tree. JAX sorts the keys of dicts, and
    # the JSON need not have them in this order.
    order, treedef = jax.tree.flatten(decode_structure(data["structure"], paths))
    if sorted(order) != list(range(len(paths))):
        raise PlanFormatError(
            f"`structure` has {len(order)} leaves, but `leaves` has {len(paths)}"
        )
    mode = data["mode"]
    axes = decode_rules(data["axes"])
    strict = data.get("strict", False)
    _require("`mode`", mode, (str, None), "a string or null")
    _require("`strict`", strict, bool, "true or left out")
    if axes is not None:
        _require_names(rows, axes, mode)
    path_tree = PathTree(
        paths=tuple(paths),
        treedef=treedef,
        order=order,
        structure=data["structure"],
    )
    return {
        "mesh": mesh,
        "jax_mesh": None,
        "axes": axes,
        "mode": mode,
        "rows": rows,
        "index": index,
        "path_tree": path_tree,
        "strict": strict,
    }


def encode_mesh(mesh: MeshSpec) -> object:
    """The mesh as a list with [name, size, axis type, slices] for each axis."""
    types = [kind.name for kind in mesh.axis_types]
    columns = (mesh.axis_names, mesh.axis_sizes, types, mesh.dcn_sizes)
    return [list(row) for row in zip(*columns, strict=True)]


def _require_names(rows: Iterable[Row], axes: AxisRules, mode: str | None) -> None:
    """Raises `RuleError` or `SpecError`, which `read_json` converts, if the rules
    `axes` cannot resolve the logical names of an array in the mode `mode`.
    """
    # Many rows have the same names.
    for names in dict.fromkeys(row.names for row in rows):
        if names:
            resolve(names, axes, mode=mode)


def decode_mesh(data: Any) -> MeshSpec:
    """The mesh from a list with [name, size, axis type, slices] for each axis. Raises
    `PlanFormatError` unless it is a list of such lists; `read_json` converts the other
    errors.
    """
    if not _fits(data, [list]) or any(len(row) != 4 for row in data):
        raise PlanFormatError(
            "`mesh` must hold a list [name, size, axis type, slices] for each axis."
        )
    return MeshSpec(
        [(name, size) for name, size, _, _ in data],
        axis_types={name: AxisType[kind] for name, _, kind, _ in data},
        dcn={name: slices for name, _, _, slices in data},
    )


def encode_entry(entry: object) -> object:
    """Encodes one entry of a spec or of logical names, or the target of a rule, as a
    JSON value.
    """
    if entry is UNCONSTRAINED:
        return {"unconstrained": True}
    if isinstance(entry, Atomic):
        return {"atomic": encode_entry(entry.target), "unit": entry.unit}
    if isinstance(entry, tuple):
        return [encode_entry(part) for part in entry]
    return entry


def decode_entry(data: object) -> Any:
    """Returns the entry of a spec or of logical names, or the target of a rule, that
    `encode_entry` made a JSON value of. Raises `PlanFormatError` for any other value.
    """
    if isinstance(data, dict):
        if "unconstrained" in data:
            return UNCONSTRAINED
        if data.keys() == {"atomic", "unit"}:
            return Atomic(decode_entry(data["atomic"]), _decode_unit(data["unit"]))
    if isinstance(data, list):
        return tuple(decode_entry(part) for part in data)
    if data is None or isinstance(data, str):
        return data
    raise PlanFormatError(
        f"{data!r} is no entry of a spec; it must be null, a name, or a list of names."
    )


def _decode_unit(data: Any) -> int | tuple[int, ...]:
    """The unit of an `Atomic`: the number of elements that no shard may split, or one
    for each dimension. Raises `PlanFormatError` for anything but numbers from 1 on.
    """
    sizes = data if isinstance(data, list) else [data]
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise PlanFormatError(
            f"{data!r:.60} is no unit; it must be a number of elements from 1 on, or a"
            " list with one for each dimension."
        )
    if isinstance(data, list):
        return tuple(sizes)
    return sizes[0]


def encode_spec(spec: PartitionSpec) -> object:
    """A spec as a JSON value: the list of its entries; with unreduced or reduced mesh
    axes, an object that has them too.
    """
    entries = [encode_entry(entry) for entry in entries_of(spec)]
    if not (spec.unreduced or spec.reduced):
        return entries
    encoded = {
        "entries": entries,
        "unreduced": sorted(spec.unreduced),
        "reduced": sorted(spec.reduced),
    }
    kind = unreduced_kind(spec)
    if kind != "sum":
        encoded["kind"] = kind
    return encoded


def decode_spec(data: Any) -> PartitionSpec:
    """The spec that `encode_spec` made a JSON value of. Raises `PlanFormatError` for a
    value of another form.
    """
    if isinstance(data, dict):
        entries = [decode_entry(entry) for entry in data["entries"]]
        kind = data.get("kind", "sum")
        if kind not in ("sum", "max", "min"):
            raise PlanFormatError(
                f"the kind of a reduction is {kind!r:.60}; it must be sum, max or min."
            )
        return with_reductions(entries, data["unreduced"], data["reduced"], kind)
    return PartitionSpec(*[decode_entry(entry) for entry in data])


def encode_rules(rules: AxisRules | None) -> object:
    """AxisRules as a JSON object; `None` if there are none."""
    if rules is None:
        return None
    encoded = {
        "rules": encode_entry(rules.rules),
        "modes": encode_entry(rules.modes),
        "units": [list(pair) for pair in rules.units],
        "aliases": [list(pair) for pair in rules.aliases],
    }
    # `axes` is left out if empty, so that the text and digest of older plans stay the
    # same.
    if rules.mesh_axes:
        encoded["axes"] = list(rules.mesh_axes)
    return encoded


def decode_rules(data: Any) -> AxisRules | None:
    """The AxisRules that `encode_rules` made a JSON value of; `None` for null."""
    if data is None:
        return None
    return AxisRules(
        decode_entry(data["rules"]),
        modes=decode_entry(data["modes"]),
        units=[tuple(pair) for pair in data["units"]],
        aliases=[tuple(pair) for pair in data["aliases"]],
        mesh_axes=data.get("axes", ()),
    )


def encode_reason(reason: Reason) -> object:
    return [reason.code.name, reason.dim, list(reason.axes), reason.message]


def decode_reason(data: Any) -> Reason:
    """The reason from a list [code, dimension, axes, message], in which the code is the
    name of a `Code`, and the dimension is null if it is not known. Raises
    `PlanFormatError` for values of other types.
    """
    code, dim, axes, message = data
    is_valid_dim = _fits(dim, (int, None))
    if not is_valid_dim or not _fits(axes, [str]) or not isinstance(message, str):
        raise PlanFormatError(
            f"{data!r} is no reason; it must be [code, dimension or null, list of axes,"
            " message]."
        )
    return Reason(code=Code[code], dim=dim, axes=tuple(axes), message=message)


def encode_strategy(strategy: Strategy) -> object:
    """A strategy as a list [name, axes, min_bytes, skip_dims, max_bytes]. The name is
    left out for "fsdp", and the last two where they are empty.
    """
    fields: list[object] = [list(strategy.axes), strategy.min_bytes]
    if not isinstance(strategy, Fsdp):
        fields = [type(strategy).__name__.lower(), *fields]
    # Further fields are left out if empty, so that the text and digest of older plans
    # stay the same.
    if strategy.skip_dims or strategy.max_bytes:
        fields.append(list(strategy.skip_dims))
    if strategy.max_bytes:
        fields.append(strategy.max_bytes)
    return fields


def decode_strategy(data: Any) -> Strategy:
    """The strategy that `encode_strategy` made a list of. Raises `PlanFormatError` for
    a value of another form.
    """
    has_name = str(data[0]) in STRATEGIES
    name, *fields = data if has_name else ["fsdp", *data]
    defaults = [None, None, [], 0]
    axes, min_bytes, skip_dims, max_bytes = [*fields, *defaults[len(fields) :]][:4]
    if not (
        _fits(axes, [str])
        and _fits(min_bytes, int)
        and _fits(skip_dims, [int])
        and _fits(max_bytes, int)
        and len(fields) <= len(defaults)
    ):
        raise PlanFormatError(
            f"{data!r} is no strategy; it must be [list of axes, bytes, list of whole"
            " dimensions, bytes]."
        )
    return strategy_of(
        name=name,
        axes=axes,
        min_bytes=min_bytes,
        skip_dims=skip_dims,
        max_bytes=max_bytes,
    )


@ft.lru_cache(maxsize=1)
def _key_dtypes() -> dict[str, DType]:
    """The dtypes of PRNG keys by their names in JSON."""
    return {f"key<{kind}>": dtype for kind, dtype in key_dtypes().items()}


@ft.lru_cache(maxsize=256)
def encode_dtype(dtype: DType) -> str:
    """The name of a dtype. Raises `LeafTypeError` for one that has no name in JSON,
    such as that of PRNG keys of an unknown kind.
    """
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return np.dtype(dtype).name
    for name, key_dtype in _key_dtypes().items():
        if key_dtype == dtype:
            return name
    raise LeafTypeError(
        f"dtype {dtype} has no name in a plan's JSON; PRNG keys of"
        f" {', '.join(_key_dtypes())} have one."
    )


@ft.lru_cache(maxsize=256)
def decode_dtype(name: str) -> DType:
    """The dtype with a name. Raises `PlanFormatError` for an unknown one."""
    dtype = _key_dtypes()[name] if name in _key_dtypes() else dtype_named(name)
    if dtype is None:
        raise PlanFormatError(f"dtype {name!r:.60} is unknown to this version of JAX.")
    return dtype


class _Field(NamedTuple):
    """The JSON form of a field of an array's plan.

    `valid` has the valid JSON values: `[int]` for lists of integers from 0, a tuple for
    alternatives. `description` says this in words, for messages. `decode` makes the
    field's value from a JSON value, `encode` the reverse.
    """

    valid: Any
    description: str
    decode: Callable[[Any], Any] = decode_entry
    encode: Callable[[Any], object] = encode_entry


def _encode_all(encode: Callable[[Any], object], values: Iterable[Any]) -> object:
    return [encode(value) for value in values]


def _decode_all(decode: Callable[[Any], Any], values: Iterable[Any]) -> Any:
    return tuple(decode(value) for value in values)


def _decode_units(units: list[int] | None) -> Units | None:
    """The units of a plan from a list; `None` for null."""
    if units is None:
        return None
    return tuple(units)


_SPEC = _Field(
    valid=(list, dict),
    description="a list of entries",
    decode=decode_spec,
    encode=encode_spec,
)
_ROW = {
    "shape": _Field(
        valid=[int],
        description="a list of sizes",
        decode=tuple,
    ),
    "dtype": _Field(
        valid=str,
        description="a dtype's name",
        decode=decode_dtype,
        encode=encode_dtype,
    ),
    "names": _Field((list, None), "null or a list of logical names"),
    "requested": _SPEC,
    "spec": _SPEC,
    "rule": _Field((str, None), "a string or null"),
    "reasons": _Field(
        valid=list,
        description="a list",
        decode=ft.partial(_decode_all, decode_reason),
        encode=ft.partial(_encode_all, encode_reason),
    ),
    "memory_kind": _Field((str, None), "a string or null"),
    "units": _Field(
        valid=([int], None),
        description="null or a list of positive integers",
        decode=_decode_units,
    ),
    "strategies": _Field(
        valid=list,
        description="a list",
        decode=ft.partial(_decode_all, decode_strategy),
        encode=ft.partial(_encode_all, encode_strategy),
    ),
    "stacked": _Field(int, "a number of dimensions", decode=int),
}
# Fields that are left out where they have this value, so that the text and digest of
# older plans stay the same.
_LEFT_OUT = {"stacked": 0}


def encode_row(row: Row) -> dict[str, Any]:
    """The plan of an array as a JSON object, field by field."""
    encoded = {}
    for (name, field), value in zip(_ROW.items(), row, strict=True):
        if name not in _LEFT_OUT or value != _LEFT_OUT[name]:
            encoded[name] = field.encode(value)
    return encoded


def decode_row(number: int, data: Any, mesh: MeshSpec) -> Row:
    """Decodes and checks the plan of an array from `data`, a JSON object. Its spec must
    be valid on `mesh`. `number` is the plan's index in the JSON, for messages.

    `_ROW` has, by the name of each field of a `Row`, which JSON values are valid for it
    and how they are decoded.
    """
    _require(f"row {number}", data, dict, "an object")
    data = {**_LEFT_OUT, **data}
    if missing := [name for name in _ROW if name not in data]:
        raise PlanFormatError(f"row {number} has no `{missing[0]}`.")
    for name, field in _ROW.items():
        _require(f"row {number}: `{name}`", data[name], field.valid, field.description)
    row = Row(**{name: field.decode(data[name]) for name, field in _ROW.items()})
    if row.memory_kind not in (None, *MEMORY_KINDS):
        raise PlanFormatError(
            f"memory kind {row.memory_kind!r} is none of {', '.join(MEMORY_KINDS)}."
        )
    if row.names and len(row.names) != len(row.shape):
        raise PlanFormatError(
            f"row {number}: shape {row.shape} needs one name for each dimension, not"
            f" {row.names!r:.60}."
        )
    if row.stacked > len(row.shape):
        raise PlanFormatError(
            f"row {number}: shape {row.shape} has no {row.stacked} stacked dimensions."
        )
    if row.requested != row.spec:
        # Raises an error if the requested spec has another rank or an invalid entry.
        correct(row.requested, row.shape, mesh, units=row.units)
    decision = correct(row.spec, row.shape, mesh, units=row.units)
    if decision.spec != row.spec:
        reason = decision.reasons[0]
        raise PlanFormatError(
            f"the spec {row.spec} is invalid for shape {row.shape} on mesh {mesh}:"
            f" {reason}."
        )
    return row
