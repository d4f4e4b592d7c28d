import collections
import dataclasses
import difflib
import functools as ft
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from . import _codec as codec
from ._correct import correct
from ._errors import MeshError, PlanFormatError, PlanMismatchError, RuleError, UnknownPathError
from ._mesh import MeshSpec
from ._reason import Reason
from ._rules import AxisRules
from ._spec import array_bytes, pinned, shard_shape
from ._tree import flatten


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

    @ft.cached_property
    def leaves(self) -> tuple[LeafPlan, ...]:
        # `dataclasses.replace` validates what is known to be right, and takes five times as long.
        rows = [dict(vars(row)) for row in self.rows]
        return tuple(
            LeafPlan(**{**rows[i], "path": path})
            for i, path in zip(self.index, self.paths, strict=True)
            if i >= 0
        )

    @ft.cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    @ft.cached_property
    def shardings(self) -> Any:
        mesh = self.mesh.abstract() if self.jax_mesh is None else self.jax_mesh
        return self.tree(
            [NamedSharding(mesh, pinned(row.spec), memory_kind=row.memory_kind) for row in self.rows]
        )

    @ft.cached_property
    def specs(self) -> Any:
        return self.tree([row.spec for row in self.rows])

    def tree(self, values: Sequence[Any]) -> Any:
        """The planned tree with `values[i]` at each leaf of row `i`, and `None` at leaves that are no arrays."""
        table = [*values, None]
        column = [table[i] for i in self.index]
        if self.order is not None:
            column = [column[i] for i in self.order]
        return jax.tree.unflatten(self.treedef, column)

    def replaced(self, **changes: Any) -> "Content":
        names = ("mesh", "jax_mesh", "axes", "mode", "rows", "index", "paths", "treedef", "order")
        return Content(
            **{**{name: vars(self)[name] for name in names}, "structure": self._structure, **changes}
        )


class ShardPlan(eqx.Module):
    """For every array of a tree: its PartitionSpec, the reason for it, its bytes per device. Made by [`shardfx.plan`][].

    A value: it can be printed, stored, compared, hashed, closed over, and passed to a jitted function as an
    argument, where an equal plan (one read back from JSON, for example) does not compile again.
    """

    content: Content = eqx.field(static=True)

    @property
    def mesh(self) -> MeshSpec:
        """The mesh that the plan is for."""
        return self.content.mesh

    @property
    def jax_mesh(self) -> Mesh | None:
        """The mesh of devices, if the plan has one; see [`shardfx.ShardPlan.on`][]."""
        return self.content.jax_mesh

    @property
    def axes(self) -> AxisRules | None:
        """The rules by which [`shardfx.constrain`][] resolves logical names."""
        return self.content.axes

    @property
    def mode(self) -> str | None:
        """The mode in which names are resolved."""
        return self.content.mode

    @property
    def leaves(self) -> tuple[LeafPlan, ...]:
        """One [`shardfx.LeafPlan`][] per array, in the tree's order."""
        return self.content.leaves

    @property
    def specs(self) -> Any:
        """The tree with a PartitionSpec at each array, and `None` at leaves that are no arrays."""
        return self.content.specs

    @property
    def shardings(self) -> Any:
        """The tree with a NamedSharding at each array: on the plan's jax Mesh, or else on an AbstractMesh."""
        return self.content.shardings

    @property
    def structs(self) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` at each array that has the array's sharding."""
        mesh = self.mesh.abstract() if self.jax_mesh is None else self.jax_mesh
        return self.content.tree([_struct(row, mesh) for row in self.content.rows])

    @property
    def bytes_total(self) -> int:
        """How many bytes all the arrays have, each counted once."""
        return sum(row.bytes * count for row, count in self._counts())

    @property
    def bytes_per_device(self) -> int:
        """How many bytes each device holds; all hold the same."""
        return sum(row.bytes_per_device * count for row, count in self._counts())

    @property
    def digest(self) -> str:
        """The sha256 of the plan, in hex: the same on every process."""
        return self.content.digest

    def _counts(self) -> list[tuple[LeafPlan, int]]:
        counts = collections.Counter(self.content.index)
        return [(row, counts[i]) for i, row in enumerate(self.content.rows)]

    def __getitem__(self, path: str) -> LeafPlan:
        found = self.content.by_path.get(path)
        if found is None:
            near = difflib.get_close_matches(path, self.content.by_path, n=3, cutoff=0.5)
            raise UnknownPathError(
                f"the plan has no leaf `{path}`"
                + (f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ".")
            )
        if collections.Counter(self.content.paths)[path] > 1:
            raise UnknownPathError(f"several leaves have the path `{path}`; read them from `plan.leaves`.")
        return found

    def on(self, jax_mesh: Mesh) -> "ShardPlan":
        """The same plan on a mesh of devices, so that `plan.shardings` can be used with arrays.

        **Arguments:**

        - `jax_mesh`: a mesh with the plan's axes, sizes and axis types; `plan.mesh.build(devices)` makes one.

        **Returns:**

        A plan with the same digest, on these devices.

        **Raises:**

        `PlanMismatchError` if the mesh is another one.
        """
        mesh = MeshSpec.of(jax_mesh)
        if mesh.axis_names != self.mesh.axis_names or mesh.axis_sizes != self.mesh.axis_sizes:
            raise PlanMismatchError(
                f"the plan is for the mesh {self.mesh}, not for {mesh}; make the mesh with `plan.mesh.build(devices)`, "
                "or plan again for this one."
            )
        if mesh.axis_types != self.mesh.axis_types:
            raise PlanMismatchError(
                f"the plan's mesh has the axis types {_type_names(self.mesh)}, this one {_type_names(mesh)} (`jax.make_mesh` "
                "makes Explicit axes, `jax.sharding.Mesh` Auto ones); make the mesh with `plan.mesh.build(devices)`, or "
                "plan with `MeshSpec(..., axis_types=...)`."
            )
        return ShardPlan(self.content.replaced(jax_mesh=jax_mesh))

    @staticmethod
    def join(**plans: "ShardPlan") -> "ShardPlan":
        """One plan of a dict of trees, from the plans of the trees.

        **Arguments:**

        - `plans`: plans for the same mesh, by the key that their tree has in the dict.

        **Returns:**

        The plan of `{"params": ..., "opt": ...}` for `ShardPlan.join(params=..., opt=...)`.

        **Raises:**

        `PlanMismatchError` if the plans are for different meshes, rules or modes.
        """
        if not plans:
            raise PlanMismatchError(
                "`join` needs at least one plan: `ShardPlan.join(params=params_plan, opt=opt_plan)`."
            )
        contents = {name: plans[name].content for name in sorted(plans)}
        first = next(iter(contents.values()))
        for what in ("mesh", "jax_mesh", "mode"):
            _require_same(what, {name: vars(content)[what] for name, content in contents.items()})
        axes = {name: content.axes for name, content in contents.items() if content.axes is not None}
        _require_same("axes", axes)
        rows, index, paths = [], [], []
        for name, content in contents.items():
            index += [i + len(rows) if i >= 0 else -1 for i in _ordered(content, content.index)]
            paths += [f"{name}/{path}" if path else name for path in _ordered(content, content.paths)]
            rows += content.rows
        trees = {
            name: jax.tree.unflatten(c.treedef, range(c.treedef.num_leaves)) for name, c in contents.items()
        }
        treedef = jax.tree.structure(trees)
        joined_axes = next(iter(axes.values()), None)
        return ShardPlan(
            Content(first.mesh, first.jax_mesh, joined_axes, first.mode, rows, index, paths, treedef)
        )

    def select(self, regex: str) -> "ShardPlan":
        """The plan of the same tree with only the arrays whose path matches.

        **Arguments:**

        - `regex`: searched in each path with `re.search`.

        **Returns:**

        A plan with `None` in the place of all other arrays.

        **Raises:**

        `RuleError` if the regex does not compile, or matches no path.
        """
        pattern = _compile(regex)
        index = [
            i if pattern.search(path) else -1
            for i, path in zip(self.content.index, self.content.paths, strict=True)
        ]
        if max(index, default=-1) < 0:
            raise RuleError(
                f"`select({regex!r})` matches no path of the plan; paths look like `{self._example()}`."
            )
        return ShardPlan(self.content.replaced(index=index))

    def _example(self) -> str:
        return next(
            (path for path, i in zip(self.content.paths, self.content.index, strict=True) if i >= 0), ""
        )

    def to_json(self) -> str:
        """The plan as JSON text: versioned, with its digest; the devices of a jax Mesh are left out."""
        return _text({**self.content.payload(), "digest": self.digest})

    @staticmethod
    def from_json(text: str, like: Any = None) -> "ShardPlan":
        """Reads what [`shardfx.ShardPlan.to_json`][] wrote.

        **Arguments:**

        - `text`: the JSON.
        - `like`: a tree of the planned structure, arrays or ShapeDtypeStructs. Without it, dicts, lists and tuples
            come back as they were, and nodes of other kinds, modules for example, as dicts.

        **Returns:**

        A plan that equals the one that was written.

        **Raises:**

        `PlanFormatError` if the text is truncated, of another version, or was edited into something invalid;
        `PlanMismatchError` if `like` is another tree.
        """
        content = _read(text)
        return ShardPlan(content if like is None else _shaped_like(content, like))

    def __repr__(self) -> str:
        return (
            f"ShardPlan({sum(i >= 0 for i in self.content.index)} arrays, mesh {self.mesh}, {self.bytes_total} bytes, "
            f"{self.bytes_per_device} per device{'' if self.jax_mesh is None else ', on devices'})"
        )


def leaf_plan(
    mesh: MeshSpec, *, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any, **fields: Any
) -> LeafPlan:
    """A LeafPlan without its path, its bytes counted."""
    shard = shard_shape(shape, pinned(spec), mesh.shape)
    return LeafPlan(
        path="",
        spec=spec,
        shape=shape,
        dtype=dtype,
        bytes=array_bytes(shape, dtype),
        bytes_per_device=array_bytes(shard, dtype),
        **fields,
    )


def differences(a: ShardPlan, b: ShardPlan) -> tuple[str, ...]:
    """How two plans differ, a line for each leaf; empty exactly if their digests are equal.

    **Arguments:**

    - `a`, `b`: the plans.

    **Returns:**

    Lines such as "leaf `w`: spec is P('data',) in one, P() in the other", in the order of `a`.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, differences, plan

        mesh, tree = MeshSpec({"data": 2}), {"w": jnp.ones((4, 4))}
        a = plan(tree, mesh, paths=PathRules.parse("w->data"))
        b = plan(tree, mesh, paths=PathRules.parse("w->None.data"))
        print(*differences(a, b), sep="\\n")
        ```
    """
    if a.digest == b.digest:
        return ()
    lines = [
        f"{what} is {one} in one plan, {other} in the other"
        for what, one, other in (
            ("the mesh", a.mesh, b.mesh),
            ("the mode", a.mode, b.mode),
            ("axes", a.axes, b.axes),
        )
        if one != other
    ]
    there, here = b.content.by_path, a.content.by_path
    for leaf in a.leaves:
        lines += _leaf_differences(leaf, there.get(leaf.path))
    lines += [f"leaf `{path}` is only in the other plan" for path in there if path not in here]
    return tuple(lines) or ("the trees are built of other containers, or their leaves are in another order",)


def _leaf_differences(leaf: LeafPlan, other: LeafPlan | None) -> list[str]:
    if other is None:
        return [f"leaf `{leaf.path}` is only in one plan"]
    pairs = (
        (field.name, vars(leaf)[field.name], vars(other)[field.name])
        for field in dataclasses.fields(LeafPlan)
    )
    return [
        f"leaf `{leaf.path}`: {name} is {one} in one, {two} in the other"
        for name, one, two in pairs
        if one != two
    ]


def _in_order_of_use(
    rows: Sequence[LeafPlan], index: Sequence[int]
) -> tuple[tuple[LeafPlan, ...], tuple[int, ...]]:
    """The rows that are used, each once, in the order in which leaves first use them."""
    merged: dict[LeafPlan, int] = {}
    renumbered = {-1: -1}
    for i in dict.fromkeys(index):
        if i >= 0:
            renumbered[i] = merged.setdefault(rows[i], len(merged))
    return tuple(merged), tuple([renumbered[i] for i in index])


def _ordered(content: Content, column: Sequence[Any]) -> Sequence[Any]:
    return column if content.order is None else [column[i] for i in content.order]


def _require_same(what: str, values: dict[str, Any]) -> None:
    (first, expected), *rest = values.items() or [("", None)]
    for name, value in rest:
        if value != expected:
            raise PlanMismatchError(
                f"`join`: the plans `{first}` and `{name}` differ in their {what} ({expected} and {value}); "
                "make both for the same mesh, rules and mode."
            )


def _type_names(mesh: MeshSpec) -> str:
    return "(" + ", ".join(kind.name for kind in mesh.axis_types) + ")"


def _struct(row: LeafPlan, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, pinned(row.spec), memory_kind=row.memory_kind)
    return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)


def _compile(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise RuleError(f"the regex {regex!r} does not compile: {error}") from error


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


def _decode_row(data: Any, mesh: MeshSpec) -> LeafPlan:
    spec, shape = codec.decode_spec(data["spec"]), tuple(data["shape"])
    valid = correct(spec, shape, mesh)
    if valid.spec != spec:
        raise PlanFormatError(
            f"the spec {spec} is invalid for shape {shape} on mesh {mesh}: {valid.reasons[0]}."
        )
    return leaf_plan(
        mesh,
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


def _read(text: str) -> Content:
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
            "the plan's JSON was edited: its digest is not that of its content; write it with `plan.to_json()`, or take "
            "out its `digest` to accept the edit."
        )
    return content


def _decode(data: dict[str, Any]) -> Content:
    mesh = codec.decode_mesh(data["mesh"])
    if -1 in mesh.axis_sizes:
        raise MeshError("the mesh has an axis of unknown size")
    rows = [_decode_row(row, mesh) for row in data["rows"]]
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


def _shaped_like(content: Content, like: Any) -> Content:
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
                f"leaf `{path}` is {type(leaf).__name__} {leaf!r:.60}, but the plan has an array of shape {row.shape} there; "
                "plan the tree that you use."
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
    found = [f"the plan has no `{path}`" for path in extra[:1]] + [
        f"the tree has no `{path}`" for path in missing[:1]
    ]
    raise PlanMismatchError(
        f"this tree is not the one that was planned ({len(extra)} leaves more, {len(missing)} missing): "
        f"{'; '.join(found) or 'the leaves are in another order'}. Plan the tree that you use."
    )
