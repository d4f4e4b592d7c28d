import dataclasses
import functools as ft
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from . import _codec as codec
from ._correct import correct
from ._errors import MeshError, PlanFormatError, PlanMismatchError, RuleError
from ._mesh import MeshSpec
from ._reason import Reason
from ._rules import AxisRules
from ._spec import array_bytes, pinned, shard_shape
from ._tree import flatten


# The kinds of memory that XLA has; which of them a device has, only the device knows.
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
_FORMAT = "shardfx.plan"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one array of a tree is placed, and why.

    **Arguments:**

    - `path`: where it is in the tree, as `layers/0/attn/q_proj/weight`.
    - `shape`, `dtype`: of the whole array.
    - `names`: its logical names, if names decided.
    - `requested`: the spec that the rule asked for.
    - `spec`: the spec that it gets, in canonical form.
    - `rule`: what decided: a path rule by index and regex, `names`, or what it follows; `None` where nothing did.
    - `reasons`: why `spec` is not `requested`; see [`shardfx.Reason`][].
    - `memory_kind`: `None` for the device's default memory.
    - `units`: per dimension, how many elements may not be cut apart; `None` where any cut will do.
    - `strategies`: the `fsdp(...)` steps that refined `requested`.
    - `bytes`, `bytes_per_device`: of the whole array, and of one shard.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None
    requested: PartitionSpec
    spec: PartitionSpec
    rule: str | None
    reasons: tuple[Reason, ...]
    memory_kind: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    bytes: int
    bytes_per_device: int


class Content:
    """What a plan holds: compared and hashed by its digest, so that an equal plan costs JAX nothing.

    Leaves that are planned alike share one row; `index` says which row each leaf of the tree has, and is -1 at
    leaves that are no arrays. Everything below is made on first use.
    """

    def __init__(
        self,
        mesh: MeshSpec,
        jax_mesh: Mesh | None,
        axes: AxisRules | None,
        mode: str | None,
        rows: Sequence[LeafPlan],
        index: Sequence[int],
        paths: Sequence[str],
        treedef: Any,
        order: Sequence[int] | None = None,
        structure: Any = None,
    ):
        self.mesh, self.jax_mesh, self.axes, self.mode = mesh, jax_mesh, axes, mode
        self.rows, self.index = _in_order_of_use(rows, index)
        self.paths, self.treedef, self.order, self._structure = paths, treedef, order, structure

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Content) and self.digest == other.digest and self.jax_mesh == other.jax_mesh

    def __hash__(self) -> int:
        return self._hash

    @ft.cached_property
    def _hash(self) -> int:
        return hash((self.digest, self.jax_mesh))

    @ft.cached_property
    def structure(self) -> Any:
        return codec.encode_structure(self.treedef) if self._structure is None else self._structure

    def payload(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "mesh": codec.encode_mesh(self.mesh),
            "axes": codec.encode_rules(self.axes),
            "mode": self.mode,
            "rows": [_encode_row(row) for row in self.rows],
            "leaves": [list(pair) for pair in zip(self.paths, self.index, strict=True)],
            "structure": self.structure,
        }

    @ft.cached_property
    def digest(self) -> str:
        return hashlib.sha256(_text(self.payload()).encode()).hexdigest()

    def to_json(self) -> str:
        return _text({**self.payload(), "digest": self.digest})

    @ft.cached_property
    def leaves(self) -> tuple[LeafPlan, ...]:
        # `dataclasses.replace` validates what is known to be right, and takes five times as long.
        rows = [dict(vars(row)) for row in self.rows]
        return tuple(
            LeafPlan(**{**rows[i], "path": path}) for i, path in zip(self.index, self.paths, strict=True) if i >= 0
        )

    @ft.cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    @ft.cached_property
    def shardings(self) -> Any:
        mesh = self.mesh.abstract() if self.jax_mesh is None else self.jax_mesh
        return self.tree([named_sharding(mesh, row.spec, row.memory_kind) for row in self.rows])

    @ft.cached_property
    def specs(self) -> Any:
        return self.tree([row.spec for row in self.rows])

    def tree(self, values: Sequence[Any], other: Any = None) -> Any:
        """The planned tree with `values[i]` at each leaf of row `i`, and `other` at leaves that are no arrays."""
        table = [*values, other]
        column = [table[i] for i in self.index]
        if self.order is not None:
            column = [column[i] for i in self.order]
        return jax.tree.unflatten(self.treedef, column)

    def replaced(self, **changes: Any) -> "Content":
        names = ("mesh", "jax_mesh", "axes", "mode", "rows", "index", "paths", "treedef", "order")
        return Content(**{**{name: vars(self)[name] for name in names}, "structure": self._structure, **changes})


def memory_kind_pairs(given: Iterable[tuple[str, str]] | None) -> tuple[tuple[str, str], ...]:
    """The pairs of a regex and a memory kind, each of a kind that exists."""
    pairs = tuple(given or ())
    for regex, kind in pairs:
        if kind not in MEMORY_KINDS:
            raise RuleError(
                f"`memory_kinds` maps {regex!r} to {kind!r}; a memory kind is one of {', '.join(MEMORY_KINDS)}."
            )
    return pairs


def leaf_plan(
    sizes: Mapping[str, int], *, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any, **fields: Any
) -> LeafPlan:
    """A LeafPlan without its path, its bytes counted."""
    shard = shard_shape(shape, pinned(spec), sizes)
    return LeafPlan(
        path="",
        spec=spec,
        shape=shape,
        dtype=dtype,
        bytes=array_bytes(shape, dtype),
        bytes_per_device=array_bytes(shard, dtype),
        **fields,
    )


@ft.lru_cache(maxsize=4096)
def named_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    """The sharding that JAX gets for a planned array; making one costs more than planning the array."""
    return NamedSharding(mesh, pinned(spec), memory_kind=memory_kind)


def _in_order_of_use(rows: Sequence[LeafPlan], index: Sequence[int]) -> tuple[tuple[LeafPlan, ...], tuple[int, ...]]:
    """The rows that are used, each once, in the order in which leaves first use them."""
    merged: dict[LeafPlan, int] = {}
    renumbered = {-1: -1}
    for i in dict.fromkeys(index):
        if i >= 0:
            renumbered[i] = merged.setdefault(rows[i], len(merged))
    if all(i == number for i, number in renumbered.items()):
        return tuple(merged), tuple(index)
    return tuple(merged), tuple([renumbered[i] for i in index])


def _text(payload: dict[str, Any]) -> str:
    return json.dumps(payload, separators=(",", ":"), ensure_ascii=True)


def _encode_row(row: LeafPlan) -> dict[str, Any]:
    return {
        "shape": list(row.shape),
        "dtype": codec.encode_dtype(row.dtype),
        "names": None if row.names is None else codec.encode_entry(row.names),
        "requested": codec.encode_spec(row.requested),
        "spec": codec.encode_spec(row.spec),
        "rule": row.rule,
        "reasons": [codec.encode_reason(why) for why in row.reasons],
        "memory_kind": row.memory_kind,
        "units": row.units if row.units is None else list(row.units),
        "strategies": [codec.encode_strategy(strategy) for strategy in row.strategies],
    }


def _decode_row(data: dict[str, Any], mesh: MeshSpec) -> LeafPlan:
    spec, shape = codec.decode_spec(data["spec"]), tuple(data["shape"])
    if data["memory_kind"] not in (None, *MEMORY_KINDS):
        raise PlanFormatError(f"memory kind {data['memory_kind']!r} is none of {', '.join(MEMORY_KINDS)}.")
    valid = correct(spec, shape, mesh)
    if valid.spec != spec:
        raise PlanFormatError(f"the spec {spec} is invalid for shape {shape} on mesh {mesh}: {valid.reasons[0]}.")
    return leaf_plan(
        mesh.shape,
        spec=spec,
        shape=shape,
        dtype=codec.decode_dtype(data["dtype"]),
        names=None if data["names"] is None else codec.decode_entry(data["names"]),
        requested=codec.decode_spec(data["requested"]),
        rule=data["rule"],
        reasons=tuple(codec.decode_reason(why) for why in data["reasons"]),
        memory_kind=data["memory_kind"],
        units=None if data["units"] is None else tuple(data["units"]),
        strategies=tuple(codec.decode_strategy(strategy) for strategy in data["strategies"]),
    )


def read_json(text: str) -> Content:
    try:
        data = json.loads(text)
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
    try:
        content = _decode(data)
    except PlanFormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise PlanFormatError(f"the plan's JSON is invalid: {type(error).__name__}: {error}") from error
    if "digest" in data and data["digest"] != content.digest:
        raise PlanFormatError(
            "the plan's JSON was edited: its digest is not that of its content; write it with `plan.to_json()`, or "
            "take out its `digest` to accept the edit."
        )
    return content


def _decode(data: dict[str, Any]) -> Content:
    mesh = codec.decode_mesh(data["mesh"])
    if -1 in mesh.axis_sizes:
        raise MeshError("the mesh has an axis of unknown size")
    if mesh.size >= 2**31:
        raise MeshError(f"the mesh {mesh} has more devices than JAX can number")
    rows = [_decode_row(codec.checked_row(number, row), mesh) for number, row in enumerate(data["rows"])]
    paths, index = [path for path, _ in data["leaves"]], [i for _, i in data["leaves"]]
    if not all(isinstance(path, str) for path in paths) or not all(
        type(i) is int and -1 <= i < len(rows) for i in index
    ):
        raise PlanFormatError("`leaves` must hold pairs of a path and the number of a row")
    order, treedef = jax.tree.flatten(codec.decode_structure(data["structure"], paths))
    if sorted(order) != list(range(len(paths))):
        raise PlanFormatError(f"`structure` has {len(order)} leaves, but `leaves` has {len(paths)}")
    if data["mode"] is not None and not isinstance(data["mode"], str):
        raise PlanFormatError(f"`mode` is {data['mode']!r}; it must be a string or null")
    axes = codec.decode_rules(data["axes"])
    return Content(mesh, None, axes, data["mode"], rows, index, paths, treedef, order, data["structure"])


def shaped_like(content: Content, like: Any) -> Content:
    flat = flatten(like)
    check_columns(content, flat.paths, flat.leaves, flat.is_array)
    return content.replaced(treedef=flat.treedef, order=None)


def check_columns(
    content: Content,
    paths: Sequence[str],
    leaves: Sequence[Any],
    is_array: Iterable[bool],
    *,
    dtypes: bool = True,
) -> None:
    """Raises unless a tree has the plan's leaves; names the first one that differs."""
    if list(content.paths) != list(paths):
        _raise_other_tree(content.paths, paths)
    for path, leaf, shaped, i in zip(paths, leaves, is_array, content.index, strict=True):
        row = content.rows[i] if i >= 0 else None
        if row is None:
            continue
        if not shaped:
            raise PlanMismatchError(
                f"leaf `{path}` is {type(leaf).__name__} {leaf!r:.60}, but the plan has an array of shape {row.shape} "
                "there; plan the tree that you use."
            )
        if tuple(leaf.shape) != row.shape or (dtypes and not _same_dtype(leaf.dtype, row.dtype)):
            raise PlanMismatchError(
                f"leaf `{path}` is {leaf.dtype}{list(leaf.shape)}, but the plan is for {row.dtype}{list(row.shape)}; "
                "plan the tree that you use."
            )


def _same_dtype(leaf: Any, planned: Any) -> bool:
    return leaf == planned or canonical_dtype(leaf) == planned


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX gives to a NumPy array of `dtype`."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _raise_other_tree(planned: Sequence[str], given: Sequence[str]) -> None:
    known, present = set(planned), set(given)
    extra = [path for path in given if path not in known]
    missing = [path for path in planned if path not in present]
    found = [f"the plan has no `{path}`" for path in extra[:1]] + [f"the tree has no `{path}`" for path in missing[:1]]
    raise PlanMismatchError(
        f"this tree is not the one that was planned ({len(extra)} leaves more, {len(missing)} missing): "
        f"{'; '.join(found) or 'the leaves are in another order'}. Plan the tree that you use."
    )
