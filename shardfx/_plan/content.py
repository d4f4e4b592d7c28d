"""The content of a plan: its rows, which equally planned leaves share, and values computed from them."""

import collections
import dataclasses
import functools as ft
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from .._ground.errors import PlanFormatError, PlanMismatchError
from .._ground.text import between_numbers, joined, plural
from .._ground.tree import Flat, flatten
from .._rules import AxisRules
from ..topology import MeshSpec
from . import plan_json
from .leaf import LeafPlan, Row, Skeleton, canonical_dtype, named_sharding


_ZEROS = str.maketrans("123456789", "000000000")
# A digit that is part of a name, as in `fc1`, tells paths apart.
_IN_A_NAME = re.compile(r"[A-Za-z]0|0[A-Za-z]")


class Group(NamedTuple):
    """Equally planned arrays whose paths differ in numbers only, with the number of their row and the row."""

    paths: tuple[str, ...]
    number: int
    row: Row

    @property
    def where(self) -> str:
        return joined(self.paths)


@dataclasses.dataclass(eq=False, repr=False)
class Content:
    """The content of a plan, compared and hashed by its digest, so that an equal plan costs JAX nothing.

    Leaves that are planned alike share one row; `index` says which row each leaf of the tree has, and is -1 at
    leaves that are no arrays. Everything below the fields is made on first use.
    """

    mesh: MeshSpec
    jax_mesh: Mesh | None
    axes: AxisRules | None
    mode: str | None
    rows: Sequence[Row]
    index: Sequence[int]
    skeleton: Skeleton
    strict: bool = False

    def __post_init__(self):
        self.rows, self.index = _in_order_of_use(self.rows, self.index)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Content) and self.digest == other.digest and self.jax_mesh == other.jax_mesh

    def __hash__(self) -> int:
        return self._hash

    @ft.cached_property
    def _hash(self) -> int:
        return hash((self.digest, self.jax_mesh))

    def __deepcopy__(self, memo: object) -> "Content":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The sentinels within an Equinox treedef do not survive being pickled; those of a tree are made anew.
        tree, order = self.skeleton.numbered, self.skeleton.order
        devices = None if self.jax_mesh is None else [(d.platform, d.id) for d in self.jax_mesh.devices.flat]
        return _unpickled, (self.to_json(), tree, order, devices)

    @property
    def numbered(self) -> Iterable[tuple[str, int]]:
        """For each leaf, its path and the number of its row, which is -1 for leaves that are no arrays."""
        return zip(self.skeleton.paths, self.index, strict=True)

    @ft.cached_property
    def digest(self) -> str:
        return hashlib.sha256(plan_json.written(self._payload()).encode()).hexdigest()

    def to_json(self) -> str:
        return plan_json.written({**self._payload(), "digest": self.digest})

    def _payload(self) -> dict[str, Any]:
        """The content of the plan's JSON, without its digest."""
        # Most plans are not strict; the text of those stays what it was before plans could say so.
        return ({"strict": True} if self.strict else {}) | {
            **plan_json.HEADER,
            "mesh": plan_json.encode_mesh(self.mesh),
            "axes": plan_json.encode_rules(self.axes),
            "mode": self.mode,
            "rows": [plan_json.encode_row(row) for row in self.rows],
            "leaves": [list(pair) for pair in self.numbered],
            "structure": self.skeleton.encoded,
        }

    @ft.cached_property
    def leaves(self) -> tuple[LeafPlan, ...]:
        return tuple(self.leaf(path, i) for path, i in self.numbered if i >= 0)

    def leaf(self, path: str, number: int) -> LeafPlan:
        """The LeafPlan of the array at `path`, whose row has this number."""
        return LeafPlan(path, *self.rows[number], *self.byte_counts[number])

    @ft.cached_property
    def groups(self) -> "tuple[Group, ...]":
        """The arrays in the tree's order, with equal arrays of repeated layers as one group. Every view of a plan uses
        it.
        """
        found: dict[tuple[Any, ...], list[str]] = {}
        # Few paths differ in more than their digits; what is between the numbers is worked out once for those.
        between: dict[str, tuple[str, ...]] = {}
        for path, number in self.numbered:
            if number >= 0:
                template = path.translate(_ZEROS)
                parts = between.get(template)
                if parts is None:
                    parts = between[template] = () if _IN_A_NAME.search(template) else between_numbers(template)
                found.setdefault((parts or between_numbers(path), number), []).append(path)
        return tuple(Group(tuple(paths), number, self.rows[number]) for (_, number), paths in found.items())

    @ft.cached_property
    def byte_counts(self) -> tuple[tuple[int, int], ...]:
        """For each row, the bytes of an array and the bytes of one shard."""
        return tuple(row.byte_counts(self.mesh.shape) for row in self.rows)

    @ft.cached_property
    def total_bytes(self) -> tuple[int, int]:
        """The bytes of all arrays, and the bytes of all shards on one device."""
        counts = collections.Counter(self.index)
        pairs = [(whole * counts[i], shard * counts[i]) for i, (whole, shard) in enumerate(self.byte_counts)]
        return sum(whole for whole, _ in pairs), sum(shard for _, shard in pairs)

    @ft.cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    @property
    def any_mesh(self) -> Mesh | AbstractMesh:
        """The plan's mesh with devices, or else an abstract mesh."""
        return self.mesh.abstract() if self.jax_mesh is None else self.jax_mesh

    @property
    def row_shardings(self) -> list[NamedSharding]:
        """The sharding of each row, on the plan's devices if it has any."""
        mesh = self.any_mesh
        return [named_sharding(mesh, row.spec, row.memory_kind) for row in self.rows]

    @ft.cached_property
    def shardings(self) -> PyTree:
        return self.tree(self.row_shardings)

    @ft.cached_property
    def specs(self) -> PyTree:
        return self.tree([row.spec for row in self.rows])

    def tree(self, values: Sequence[object], other: object = None) -> PyTree:
        """The planned tree with `values[i]` at each leaf of row `i`, and `other` at leaves that are no arrays."""
        table = [*values, other]
        return self.skeleton.filled([table[i] for i in self.index])

    def replaced(self, **changes: object) -> "Content":
        return dataclasses.replace(self, **changes)


def _in_order_of_use(rows: Sequence[Row], index: Sequence[int]) -> tuple[tuple[Row, ...], tuple[int, ...]]:
    """The rows that leaves use, each once, in the order in which leaves first use them."""
    merged: dict[Row, int] = {}
    renumbered = {-1: -1}
    for i in dict.fromkeys(index):
        if i >= 0:
            renumbered[i] = merged.setdefault(rows[i], len(merged))
    if all(i == number for i, number in renumbered.items()):
        return tuple(merged), tuple(index)
    return tuple(merged), tuple([renumbered[i] for i in index])


def read_json(text: str) -> Content:
    """The content of a plan from its JSON text."""
    with plan_json.refused_as_invalid():
        data = plan_json.parsed(text)
        content = Content(*plan_json.decoded(data))
        is_whole = data.get("digest", content.digest) == content.digest
    if not is_whole:
        raise PlanFormatError(
            "the plan's JSON was edited: its digest is not that of its content; write it with `plan.to_json()`, or "
            "take out its `digest` to accept the edit."
        )
    return content


def _unpickled(text: str, tree: object, order: Sequence[int] | None, devices: list[tuple[str, int]] | None) -> Content:
    content = read_json(text)
    jax_mesh = None if devices is None else _mesh_again(content.mesh, devices)
    skeleton = dataclasses.replace(content.skeleton, treedef=jax.tree.structure(tree), order=order)
    return content.replaced(jax_mesh=jax_mesh, skeleton=skeleton)


def _mesh_again(mesh: MeshSpec, devices: list[tuple[str, int]]) -> Mesh:
    """The mesh of this process's devices with the same platforms and ids."""
    try:
        here = {(d.platform, d.id): d for platform in dict(devices) for d in jax.devices(platform)}
        found = np.array([here[device] for device in devices])
    except (KeyError, RuntimeError) as error:
        raise PlanMismatchError(
            f"the plan was pickled on devices that this process does not have ({error}); pickle `plan.off()`, and put "
            "it on the devices here with `plan.on(plan.mesh.build(jax.devices()))`."
        ) from error
    return Mesh(found.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def shaped_like(content: Content, like: object) -> Content:
    flat = flatten(like)
    index = rows_of(content, flat)
    if flat.paths == content.skeleton.paths:
        # A structure that was read stays, and with it the digest.
        return content.replaced(skeleton=dataclasses.replace(content.skeleton, treedef=flat.treedef, order=None))
    return content.replaced(skeleton=Skeleton(flat.paths, flat.treedef), index=index)


def rows_of(content: Content, flat: Flat) -> Sequence[int]:
    """The number of each leaf's row in a plan; -1 at leaves that the plan has no row for.

    Arrays alone are compared. Leaves that are no arrays, the functions of a module for one, may be missing in the tree
    or in the plan: `equinox.partition(model, equinox.is_array)[0]` fits the plan of `model`, and the other way round.

    **Raises:**

    `PlanMismatchError` that names the first array that differs.
    """
    index = aligned(content, flat)
    for path, leaf, shaped, i in zip(flat.paths, flat.leaves, flat.is_array, index, strict=True):
        if i < 0:
            continue
        row = content.rows[i]
        if not shaped:
            raise PlanMismatchError(
                f"leaf `{path}` is {type(leaf).__name__} {leaf!r:.60}, but the plan has an array of shape {row.shape} "
                "there; plan the tree that you use."
            )
        if tuple(leaf.shape) != row.shape or not _same_dtype(leaf.dtype, row.dtype):
            raise PlanMismatchError(
                f"leaf `{path}` is {leaf.dtype}{list(leaf.shape)}, but the plan is for {row.dtype}{list(row.shape)}; "
                "plan the tree that you use."
            )
    return index


def aligned(content: Content, flat: Flat) -> Sequence[int]:
    """As `rows_of`, without comparing shapes and dtypes."""
    if flat.paths == content.skeleton.paths:
        return content.index
    planned = list(content.numbered)
    kept = {path for path, i in planned if i >= 0}
    index: list[int] = []
    at = 0
    for path, shaped in zip(flat.paths, flat.is_array, strict=True):
        if not shaped and path not in kept:
            index.append(-1)
            continue
        while at < len(planned) and planned[at][1] < 0 and planned[at][0] != path:
            at += 1
        if at == len(planned) or planned[at][0] != path:
            _raise_other_tree(content, flat)
        index.append(planned[at][1])
        at += 1
    if any(i >= 0 for _, i in planned[at:]):
        _raise_other_tree(content, flat)
    return index


def _same_dtype(leaf: object, planned: object) -> bool:
    return leaf == planned or canonical_dtype(leaf) == planned


def _raise_other_tree(content: Content, flat: Flat) -> NoReturn:
    planned = [path for path, i in content.numbered if i >= 0]
    given = [path for path, shaped in zip(flat.paths, flat.is_array, strict=True) if shaped]
    known, present = set(content.skeleton.paths), set(flat.paths)
    extra = [path for path in given if path not in known]
    missing = [path for path in planned if path not in present]
    # A tree that is one array has no path.
    alone = f"this is one array, and the plan is for {'no array' if not planned else f'a tree, as of `{planned[0]}`'}"
    found = [f"the plan has no `{path}`{_tied_to(path, flat)}" if path else alone for path in extra[:1]]
    found += [f"the tree has no `{path}`" if path else "the plan is for one array" for path in missing[:1]]
    raise PlanMismatchError(
        f"this tree is not the one that was planned ({plural(len(extra), 'array')} more, {len(missing)} missing): "
        f"{'; '.join(found) or 'the arrays are in another order'}. Plan the tree that you use."
    )


def _tied_to(path: str, flat: Flat) -> str:
    """A sentence about an array that the tree also holds under another path."""
    leaf = flat.leaves[flat.paths.index(path)]
    pairs = zip(flat.paths, flat.leaves, strict=True)
    other = next((name for name, one in pairs if one is leaf and name != path), None)
    # One struct may stand for many arrays.
    if other is None or not isinstance(leaf, jax.Array):
        return ""
    return f", which is the same array as `{other}`: give a tree that holds it once, as `nnx.state(module)` does"


def joined_contents(contents: dict[str, Content]) -> Content:
    """The content of the plan of a dict of trees; see `shardfx.ShardPlan.join`."""
    first = next(iter(contents.values()))
    for what in ("mesh", "jax_mesh", "mode"):
        _require_same(what, {name: vars(content)[what] for name, content in contents.items()})
    axes = {name: content.axes for name, content in contents.items() if content.axes is not None}
    _require_same("axes", axes)
    rows, index, paths = [], [], []
    for name, content in contents.items():
        for path, i in content.skeleton.in_order(list(content.numbered)):
            paths.append(f"{name}/{path}" if path else name)
            index.append(i + len(rows) if i >= 0 else -1)
        rows += content.rows
    treedef = jax.tree.structure({name: content.skeleton.numbered for name, content in contents.items()})
    joined_axes = next(iter(axes.values()), None)
    strict = any(content.strict for content in contents.values())
    skeleton = Skeleton(tuple(paths), treedef)
    return Content(first.mesh, first.jax_mesh, joined_axes, first.mode, rows, index, skeleton, strict)


def _require_same(what: str, values: dict[str, Any]) -> None:
    (first, expected), *rest = values.items() or [("", None)]
    for name, value in rest:
        if value != expected:
            one, two = _told_apart(expected, value)
            raise PlanMismatchError(
                f"`join`: the plans `{first}` and `{name}` differ in their {_WORDS[what]} ({one} and {two}); "
                "make both for the same mesh, rules and mode, on the same devices or both without (`plan.off()`)."
            )


_WORDS = {"mesh": "mesh", "jax_mesh": "devices", "mode": "mode", "axes": "axes"}


def _told_apart(one: object, two: object) -> tuple[str, str]:
    """The texts of two values, long enough to show how they differ."""
    if isinstance(one, MeshSpec) and isinstance(two, MeshSpec):
        if one.axis_types != two.axis_types:
            return f"{one} of axis types {type_names(one)}", f"{two} of {type_names(two)}"
        return (str(one), str(two)) if str(one) != str(two) else (repr(one), repr(two))
    if isinstance(one, Mesh | None) and isinstance(two, Mesh | None):
        return _devices_text(one), _devices_text(two)
    return repr(one), repr(two)


def _devices_text(mesh: Mesh | None) -> str:
    ids = [] if mesh is None else [device.id for device in mesh.devices.flat]
    return "none" if mesh is None else str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ...]"


def type_names(mesh: MeshSpec) -> str:
    """The names of a mesh's axis types."""
    return "(" + ", ".join(kind.name for kind in mesh.axis_types) + ")"
