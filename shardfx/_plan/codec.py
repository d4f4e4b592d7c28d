"""Meshes, specs, names, rules and dtypes as plain JSON values, and back."""

import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .._ground.errors import LeafTypeError, PlanFormatError
from .._ground.reason import Code, Reason
from .._ground.spec import UNCONSTRAINED, entries_of, unreduced_kind, with_reductions
from .._rules.axis_rules import AxisRules
from .._rules.strategies import Atomic, Fsdp, fsdp
from ..topology._mesh import MeshSpec


_DTYPE = re.compile(r"bool|u?int(1|2|4|8|16|32|64)|bfloat16|float(16|32|64|[468]_\w+)|complex(64|128)")
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def encode_mesh(mesh: MeshSpec) -> Any:
    types = [kind.name for kind in mesh.axis_types]
    return [list(row) for row in zip(mesh.axis_names, mesh.axis_sizes, types, mesh.dcn_sizes, strict=True)]


def decode_mesh(data: Any) -> MeshSpec:
    if not isinstance(data, list) or not all(isinstance(row, list) and len(row) == 4 for row in data):
        raise PlanFormatError("`mesh` must hold a list [name, size, axis type, slices] for each axis.")
    return MeshSpec(
        [(name, size) for name, size, _, _ in data],
        axis_types={name: AxisType[kind] for name, _, kind, _ in data},
        dcn={name: slices for name, _, _, slices in data},
    )


def encode_entry(entry: Any) -> Any:
    """One entry of a spec, of names, or a rule's target."""
    if entry is UNCONSTRAINED:
        return {"unconstrained": True}
    if isinstance(entry, Atomic):
        return {"atomic": encode_entry(entry.target), "unit": entry.unit}
    return [encode_entry(part) for part in entry] if isinstance(entry, tuple) else entry


def decode_entry(data: Any) -> Any:
    if isinstance(data, dict):
        return UNCONSTRAINED if "unconstrained" in data else Atomic(decode_entry(data["atomic"]), data["unit"])
    if isinstance(data, list):
        return tuple(decode_entry(part) for part in data)
    if data is None or isinstance(data, str):
        return data
    raise PlanFormatError(f"{data!r} is no entry of a spec; it must be null, a name, or a list of names.")


def encode_spec(spec: PartitionSpec) -> Any:
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


def encode_rules(rules: AxisRules | None) -> Any:
    if rules is None:
        return None
    written = {
        "rules": encode_entry(rules.rules),
        "modes": encode_entry(rules.modes),
        "units": [list(pair) for pair in rules.units],
        "aliases": [list(pair) for pair in rules.aliases],
    }
    # Left out where there are none, so that the text of those rules stays what it was before they could be declared.
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


def encode_reason(reason: Reason) -> Any:
    return [reason.code.name, reason.dim, list(reason.axes), reason.message]


def decode_reason(data: Any) -> Reason:
    code, dim, axes, message = data
    if not (dim is None or _is_count(dim)) or not _are_names(axes) or not isinstance(message, str):
        raise PlanFormatError(f"{data!r} is no reason; it must be [code, dimension or null, list of axes, message].")
    return Reason(Code[code], dim, tuple(axes), message)


def encode_strategy(strategy: Fsdp) -> Any:
    return [list(strategy.axes), strategy.min_bytes, *([list(strategy.skip)] if strategy.skip else [])]


def decode_strategy(data: Any) -> Fsdp:
    axes, min_bytes, *rest = data
    skip = rest[0] if rest else []
    if not _are_names(axes) or not _is_count(min_bytes) or not isinstance(skip, list) or not all(map(_is_count, skip)):
        raise PlanFormatError(f"{data!r} is no strategy; it must be [list of axes, bytes, list of whole dimensions].")
    return fsdp(axes, min_bytes, skip=skip)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text_or_null(value: Any) -> bool:
    return value is None or isinstance(value, str)


# What a row of a plan must hold, in words and as a test; the functions above read what is inside.
_ROW: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "shape": ("a list of sizes", lambda v: isinstance(v, list) and all(map(_is_count, v))),
    "dtype": ("a dtype's name", lambda v: isinstance(v, str)),
    "names": ("null or a list of logical names", lambda v: v is None or isinstance(v, list)),
    "requested": ("a list of entries", lambda v: isinstance(v, list | dict)),
    "spec": ("a list of entries", lambda v: isinstance(v, list | dict)),
    "rule": ("a string or null", _is_text_or_null),
    "reasons": ("a list", lambda v: isinstance(v, list)),
    "memory_kind": ("a string or null", _is_text_or_null),
    "units": (
        "null or a list of positive integers",
        lambda v: v is None or (isinstance(v, list) and all(_is_count(unit) and unit for unit in v)),
    ),
    "strategies": ("a list", lambda v: isinstance(v, list)),
}


def checked_row(number: int, row: Any) -> dict[str, Any]:
    """`row`, once every field of it is there and of its kind."""
    if not isinstance(row, dict):
        raise PlanFormatError(f"row {number} is {row!r:.60}; it must be an object.")
    for field, (what, is_valid) in _ROW.items():
        if field not in row:
            raise PlanFormatError(f"row {number} has no `{field}`.")
        if not is_valid(row[field]):
            raise PlanFormatError(f"row {number}: `{field}` is {row[field]!r:.60}; it must be {what}.")
    return row


@ft.lru_cache(maxsize=256)
def encode_dtype(dtype: Any) -> str:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return np.dtype(dtype).name
    for name in _KEY_IMPLEMENTATIONS:
        if key_dtype(name) == dtype:
            return f"key<{name}>"
    raise LeafTypeError(
        f"dtype {dtype} has no name in a plan's JSON; PRNG keys of {', '.join(_KEY_IMPLEMENTATIONS)} have one."
    )


@ft.lru_cache(maxsize=256)
def decode_dtype(name: str) -> Any:
    if name.startswith("key<") and name.removeprefix("key<").removesuffix(">") in _KEY_IMPLEMENTATIONS:
        return key_dtype(name.removeprefix("key<").removesuffix(">"))
    try:
        # NumPy would take its aliases too ("a", "O", "datetime64"), none of which is a dtype of arrays on devices.
        if not _DTYPE.fullmatch(name):
            raise TypeError(name)
        return jnp.dtype(name)
    except TypeError as error:
        raise PlanFormatError(f"dtype {name!r} is unknown to this version of JAX.") from error


@ft.lru_cache(maxsize=8)
def key_dtype(implementation: str) -> Any:
    """The dtype of a PRNG key array, without making one."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def encode_structure(treedef: Any) -> Any:
    """A treedef as JSON: containers that JSON-like trees are made of by kind, others by their class's name."""
    return _encode_structure(treedef, {})


def _encode_structure(treedef: Any, seen: dict[Any, Any]) -> Any:
    data = treedef.node_data()
    if data is None:
        return "leaf" if treedef.num_leaves else None
    if treedef not in seen:  # layers and experts repeat: one value stands for all that are alike
        kind, aux = data
        seen[treedef] = _encode_node(kind, aux, [_encode_structure(child, seen) for child in treedef.children()])
    return seen[treedef]


def _encode_node(kind: type, aux: Any, children: list[Any]) -> Any:
    if kind is dict:
        return {"dict": [[_encode_key(key), child] for key, child in zip(aux, children, strict=True)]}
    if kind is list or kind is tuple:
        return {kind.__name__: children}
    if kind is type(None):
        return None
    return {"node": f"{kind.__module__}.{kind.__qualname__}", "children": children}


def _encode_key(key: Any) -> Any:
    return key if isinstance(key, str) else {type(key).__name__: repr(key)}


def decode_structure(data: Any, paths: list[str]) -> Any:
    """The tree that `data` describes, with at each leaf its index; nodes of other libraries become dicts."""
    return _decode_structure(data, paths, 0, "")[0]


def _decode_structure(data: Any, paths: list[str], index: int, prefix: str) -> tuple[Any, int]:
    if data is None:
        return None, index
    if data == "leaf":
        return index, index + 1
    ((kind, parts), *_) = data.items()
    if kind in ("list", "tuple"):
        items = []
        for position, part in enumerate(parts):
            item, index = _decode_structure(part, paths, index, f"{prefix}{position}/")
            items.append(item)
        return (tuple(items) if kind == "tuple" else items), index
    named: dict[Any, Any] = {}
    for position, part in enumerate(parts if kind == "dict" else data["children"]):
        key, part = part if kind == "dict" else (None, part)
        key = _decode_key(key) if kind == "dict" else _key_at(paths, index, prefix, position)
        child, after = _decode_structure(part, paths, index, f"{prefix}{key}/")
        # An attribute without leaves has no path that says its name.
        if kind == "dict" or after > index:
            named[key] = child
        index = after
    return named, index


def _decode_key(key: Any) -> Any:
    if isinstance(key, str):
        return key
    ((kind, text),) = key.items()
    return int(text) if kind == "int" else text


def _key_at(paths: list[str], index: int, prefix: str, position: int) -> str:
    """The attribute under which a node of another library holds the leaf `index`, read off the leaf's path."""
    path = paths[index] if index < len(paths) else ""
    return path.removeprefix(prefix).split("/")[0] if path.startswith(prefix) else str(position)
