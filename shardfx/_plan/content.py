"""`Content`, the data of a ShardPlan. Arrays that are planned alike share one `Row`,
and every leaf of the tree has the index of its row.
"""

import collections
import dataclasses
import functools as ft
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from .._ground.errors import PlanFormatError, PlanMismatchError
from .._ground.text import between_numbers, joined
from .._rules import AxisRules
from ..topology import MeshSpec
from . import plan_json
from .leaf import LeafPlan, PathTree, Row, named_sharding


# For each leaf of a tree, the index of its plan in a list of Rows, or one of the
# negative numbers below.
RowIndices = Sequence[int]
# A leaf that is neither an array nor a number, such as a function.
NO_ARRAY = -1
# A Python number, such as a step counter.
NUMBER = -2
# An array that `ShardPlan.select` left out.
LEFT_OUT = -3


class Group(NamedTuple):
    """Arrays that are planned alike and whose paths differ only in numbers, such as
    those of repeated layers.

    `row` is the plan of each array, with the index `number` in `Content.rows`. `bytes`
    are the bytes of all these arrays, and `bytes_per_device` those of their shards on
    one device.
    """

    paths: tuple[str, ...]
    number: int
    row: Row
    bytes: int
    bytes_per_device: int

    @property
    def where(self) -> str:
        """The path of the array, or one text with number ranges for all paths:
        `layers/{0..31}/attn/q_proj/weight`.
        """
        return joined(self.paths)


@dataclasses.dataclass(eq=False, repr=False)
class Content:
    """The data of a plan. Plans with equal digests are equal, so JAX does not recompile
    a function for an equal plan. `rows` holds one plan for all arrays that are planned
    alike, and `index` the row of each leaf. `jax_mesh` is the mesh of devices, `None`
    for a plan without devices. `mode` is the mode of the rules `axes`, such as
    "decode", in which logical names are resolved; `None` for the rules without a mode.
    `strict` forbids to drop requested mesh axes.
    """

    mesh: MeshSpec
    jax_mesh: Mesh | None
    axes: AxisRules | None
    mode: str | None
    rows: Sequence[Row]
    index: RowIndices
    path_tree: PathTree
    strict: bool = False

    def __post_init__(self):
        self.rows, self.index = _in_order_of_use(self.rows, self.index)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Content)
            and self.digest == other.digest
            and self.jax_mesh == other.jax_mesh
        )

    def __hash__(self) -> int:
        return self._hash

    @ft.cached_property
    def _hash(self) -> int:
        return hash((self.digest, self.jax_mesh))

    def __deepcopy__(self, memo: object) -> "Content":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the plan as the arguments of `_unpickled`: its JSON text; its tree,
        with 0, 1, and so on at the leaves; for each leaf of this tree its index in the
        plan's paths, `None` if the order is the same; and its devices as pairs of a
        platform and an id, `None` without devices.
        """
        # The sentinels in an Equinox treedef do not survive pickling. Flattening the
        # unpickled tree makes new ones.
        tree = self.path_tree.indices
        order = self.path_tree.order
        if self.jax_mesh is None:
            devices = None
        else:
            devices = []
            for device in self.jax_mesh.devices.flat:
                devices.append((device.platform, device.id))
        return _unpickled, (self.to_json(), tree, order, devices)

    @property
    def paths_and_rows(self) -> Iterable[tuple[str, int]]:
        """For each leaf of the tree, its path and its entry of `index`."""
        return zip(self.path_tree.paths, self.index, strict=True)

    @ft.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._text().encode()).hexdigest()

    def to_json(self) -> str:
        return self._text(digest=self.digest)

    def _text(self, **more: str) -> str:
        """Returns the plan as JSON text, with the fields `more`. Raises
        `PlanFormatError` for a tree of too many levels.
        """
        try:
            return plan_json.written({**self._payload(), **more})
        except RecursionError as error:
            raise plan_json.too_deep() from error

    def _payload(self) -> dict[str, Any]:
        """Returns the plan as a JSON value, without its digest."""
        # `strict` is left out unless true, so that the text and digest of older plans
        # stay the same.
        strict = {"strict": True} if self.strict else {}
        return {
            **strict,
            **plan_json.HEADER,
            "mesh": plan_json.encode_mesh(self.mesh),
            "axes": plan_json.encode_rules(self.axes),
            "mode": self.mode,
            "rows": [plan_json.encode_row(row) for row in self.rows],
            "leaves": [list(pair) for pair in self.paths_and_rows],
            "structure": self.path_tree.encoded,
        }

    @ft.cached_property
    def leaves(self) -> tuple[LeafPlan, ...]:
        """The plan of each array, in the order of the paths: its path, the fields of
        its row, the bytes of the whole array and those of one shard.
        """
        # By field name this takes 2.4 times as long, and a plan has thousands of leaves.
        return tuple(
            LeafPlan(path, *self.rows[i], *self.byte_counts[i])
            for path, i in self.paths_and_rows
            if i >= 0
        )

    @ft.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The arrays in the tree's order. Arrays of repeated layers that are planned
        alike are one group.
        """
        # A key has the parts of a path between its numbers, and the index of a row.
        paths_by_key: dict[tuple[Any, ...], list[str]] = {}
        for path, row_number in self.paths_and_rows:
            if row_number >= 0:
                key = (between_numbers(path), row_number)
                paths_by_key.setdefault(key, []).append(path)

        groups = []
        for (_, row_number), paths in paths_by_key.items():
            whole_bytes, shard_bytes = self.byte_counts[row_number]
            group = Group(
                paths=tuple(paths),
                number=row_number,
                row=self.rows[row_number],
                bytes=whole_bytes * len(paths),
                bytes_per_device=shard_bytes * len(paths),
            )
            groups.append(group)
        return tuple(groups)

    @ft.cached_property
    def byte_counts(self) -> tuple[tuple[int, int], ...]:
        """For each entry of `rows`, the bytes of one whole array and of one shard."""
        return tuple(row.byte_counts(self.mesh.shape) for row in self.rows)

    @ft.cached_property
    def total_bytes(self) -> tuple[int, int]:
        """The bytes of all whole arrays, and the bytes of the shards that one device
        holds.
        """
        # How many arrays have the plan `rows[i]`, by `i`.
        array_counts = collections.Counter(self.index)
        whole_bytes = 0
        shard_bytes = 0
        for i, (whole, shard) in enumerate(self.byte_counts):
            whole_bytes += whole * array_counts[i]
            shard_bytes += shard * array_counts[i]
        return whole_bytes, shard_bytes

    @ft.cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        """The plan of each array, by the array's path."""
        return {leaf.path: leaf for leaf in self.leaves}

    @ft.cached_property
    def any_mesh(self) -> Mesh | AbstractMesh:
        """The jax Mesh if the plan has devices, else an AbstractMesh."""
        if self.jax_mesh is None:
            return self.mesh.abstract()
        return self.jax_mesh

    @property
    def row_shardings(self) -> list[NamedSharding]:
        """The sharding of each entry of `rows`, on the plan's devices if it has some,
        else on an AbstractMesh.
        """
        mesh = self.any_mesh
        return [named_sharding(mesh, row.spec, row.memory_kind) for row in self.rows]

    @ft.cached_property
    def shardings(self) -> PyTree:
        return self.tree(self.row_shardings)

    @ft.cached_property
    def specs(self) -> PyTree:
        return self.tree([row.spec for row in self.rows])

    def tree(
        self,
        values: Sequence[object],
        other: object = None,
        number: object = None,
    ) -> PyTree:
        """Returns the planned tree with `values[i]` at arrays with the plan `rows[i]`,
        `number` at Python numbers, and `other` at other leaves.
        """
        # A negative index counts from the end: LEFT_OUT is -3, NUMBER -2, NO_ARRAY -1.
        table = [*values, other, number, other]
        return self.path_tree.filled([table[i] for i in self.index])

    def replaced(self, **changes: object) -> "Content":
        """Returns the data with other values of some fields."""
        return dataclasses.replace(self, **changes)


def at_leaves(values: Sequence[object], index: RowIndices) -> list[Any]:
    """Returns for each leaf the entry of `values` for its row; `None` for a leaf
    without a row. `values` has an entry for each row, `index` the row of each leaf.
    """
    # A negative index counts from the end: LEFT_OUT is -3, NUMBER -2, NO_ARRAY -1.
    table = [*values, None, None, None]
    return [table[i] for i in index]


def _in_order_of_use(
    rows: Sequence[Row],
    index: RowIndices,
) -> tuple[tuple[Row, ...], RowIndices]:
    """Returns `rows` without duplicates, in the order in which leaves first use them,
    and for each leaf the index of its row in them. A leaf without a row keeps its
    negative number.
    """
    number_by_row: dict[Row, int] = {}
    new_numbers = {code: code for code in (NO_ARRAY, NUMBER, LEFT_OUT)}
    for i in dict.fromkeys(index):
        if i >= 0:
            new_numbers[i] = number_by_row.setdefault(rows[i], len(number_by_row))
    # Most plans are in order already, and the index of a large tree is long.
    if all(old == new for old, new in new_numbers.items()):
        return tuple(number_by_row), tuple(index)
    return tuple(number_by_row), tuple([new_numbers[i] for i in index])


def read_json(text: str) -> Content:
    """Parses the data of a plan. Raises `PlanFormatError` if the JSON text is invalid
    or does not match its digest.
    """
    try:
        data = plan_json.parsed(text)
        content = Content(**plan_json.decoded(data))
        has_own_digest = data.get("digest", content.digest) == content.digest
    except PlanFormatError:
        raise
    except RecursionError as error:
        raise plan_json.too_deep() from error
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise PlanFormatError(
            f"the plan's JSON is invalid: {type(error).__name__}: {error}"
        ) from error
    if not has_own_digest:
        raise PlanFormatError(
            "the plan's JSON was edited: its digest is not that of its content; write"
            " it with `plan.to_json()`, or take out its `digest` to accept the edit."
        )
    return content


def _unpickled(
    text: str,
    tree: object,
    order: Sequence[int] | None,
    devices: list[tuple[str, int]] | None,
) -> Content:
    """Returns the data of a plan from what `Content.__reduce__` gives: the JSON text;
    the tree, whose leaves do not count; `order`, for each leaf of the tree its index in
    the plan's paths, `None` for the same order; and pairs of a platform and an id for
    the devices, `None` without devices.
    """
    content = read_json(text)
    jax_mesh = None if devices is None else _mesh_of_ids(content.mesh, devices)
    path_tree = dataclasses.replace(
        content.path_tree,
        treedef=jax.tree.structure(tree),
        order=order,
    )
    return content.replaced(jax_mesh=jax_mesh, path_tree=path_tree)


def _mesh_of_ids(mesh: MeshSpec, devices: list[tuple[str, int]]) -> Mesh:
    """Returns the jax Mesh of `mesh` on `devices`, pairs of a platform and an id.
    Raises `PlanMismatchError` if this process lacks one of these devices.
    """
    fix = (
        "pickle `plan.off()`, and put it on the devices here with"
        " `plan.on(plan.mesh.build(jax.devices()))`"
    )
    device_array = np.array(devices_named(devices, fix)).reshape(mesh.axis_sizes)
    return Mesh(device_array, mesh.axis_names, axis_types=mesh.axis_types)


def devices_named(devices: Sequence[tuple[str, int]], fix: str) -> list[Any]:
    """Returns the devices with these pairs of a platform and an id. Raises
    `PlanMismatchError`, with the advice `fix`, if this process lacks one of them.
    """
    try:
        device_by_id = {}
        for platform in dict(devices):
            for device in jax.devices(platform):
                device_by_id[device.platform, device.id] = device
        return [device_by_id[device] for device in devices]
    except (KeyError, RuntimeError) as error:
        raise PlanMismatchError(
            "the plan was pickled on devices that this process does not have"
            f" ({error}); {fix}."
        ) from error


def joined_contents(contents: dict[str, Content]) -> Content:
    """Returns the data of the plan of a dict of trees. `contents` maps each key to the
    data of the plan of its tree.
    """
    mesh = _common("mesh", contents)
    jax_mesh = _common("jax_mesh", contents)
    mode = _common("mode", contents)
    axes = _common("axes", contents)
    rows = []
    index = []
    paths = []
    for name, content in contents.items():
        # In the order of `jax.tree.leaves`, which the joined tree has too.
        for path, i in content.path_tree.in_order(list(content.paths_and_rows)):
            # The path of a tree that is one array is empty.
            joined_path = f"{name}/{path}" if path else name
            paths.append(joined_path)
            # Negative numbers stand for leaves without a row.
            if i >= 0:
                i += len(rows)
            index.append(i)
        rows += content.rows
    trees = {name: content.path_tree.indices for name, content in contents.items()}
    return Content(
        mesh=mesh,
        jax_mesh=jax_mesh,
        axes=axes,
        mode=mode,
        rows=rows,
        index=index,
        path_tree=PathTree(tuple(paths), jax.tree.structure(trees)),
        strict=any(content.strict for content in contents.values()),
    )


def _shown(value: object) -> str:
    """A field of a plan as text; the devices of a mesh."""
    if isinstance(value, Mesh):
        return str(value.device_ids.tolist())
    return repr(value)


def _common(what: str, contents: dict[str, Content]) -> Any:
    """Returns the value of the field `what`, which must be equal in all plans. Raises
    `PlanMismatchError` if it is not. `contents` maps names of plans, for the message,
    to plans. For "axes" and "mode", plans without axis rules do not count.
    """
    values = {}
    for name, content in contents.items():
        if what not in ("axes", "mode") or content.axes is not None:
            values[name] = vars(content)[what]
    if not values:
        return None
    (first, expected), *others = values.items()
    for name, value in others:
        if value != expected:
            raise PlanMismatchError(
                f"`join`: the plans `{first}` and `{name}` differ in `{what}`"
                f" ({_shown(expected):.200} and {_shown(value):.200}); make both for"
                " the same mesh, rules and"
                " mode, on the same devices or both without (`plan.off()`)."
            )
    return expected
