"""The arrays of a live tree whose shardings are not those of their plan."""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from .._ground.misuse import called
from .._ground.spec import array_bytes, canonical, entries_of
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    html_table,
    joined_exactly,
    plural,
    spec_text,
    table,
)
from .._ground.tree import flatten
from .._plan import ShardPlan, canonical_dtype, check_plan
from .given import has_same_shards, memory_kind
from .place import known_sharding


_MOVE = "`shard(tree, plan)`, and keep it with `filter_jit(step, out_shardings=plan)`"
_PLAN_AGAIN = "plan the tree that you use"
_HEADER = ("path", "asked", "found", "too much", "what to do")


@dataclasses.dataclass(frozen=True)
class MisplacedArray:
    """One array whose sharding, shape, dtype or memory kind is not the plan's.

    **Arguments:**

    - `path`: the path of the array in the tree.
    - `asked`, `found`: the dtype, shape, spec and memory kind of the planned and of the
      live array, as texts; "nothing" for a missing array.
    - `excess_bytes`: the bytes by which a shard is larger than the planned shard; 0 if
      it is not larger.
    - `fix`: how to correct the array, as a text.
    """

    __module__ = "shardfx.results"

    path: str
    asked: str
    found: str
    excess_bytes: int
    fix: str


class _Described(NamedTuple):
    """What is compared of an array. `sharding` is `None` for an array on no device."""

    sharding: Sharding | None
    shape: tuple[int, ...]
    dtype: Any


class Misplaced(tuple[MisplacedArray, ...]):
    """A tuple of [`shardfx.results.MisplacedArray`][]s, which `print`, a console and a
    notebook show as a table.

    The tuple is empty, and so false, if every array is as planned.
    """

    __module__ = "shardfx.results"

    __slots__ = ()

    @property
    def excess_bytes(self) -> int:
        """The bytes that each device holds beyond the planned ones."""
        return sum(row.excess_bytes for row in self)

    def __str__(self) -> str:
        lines = table(self._table(), right={"too much"}) if self else []
        return "\n".join([*lines, self._below()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = ()
        if self:
            rows = self._table()
        return html_table(rows, right={"too much"}, below=[self._below()])

    def _below(self) -> str:
        """The text under the table: how many arrays are misplaced, if any."""
        if not self:
            return "every array lies as the plan says"
        return (
            f"{plural(len(self), 'array')} misplaced, {bytes_text(self.excess_bytes)}"
            " too much on each device"
        )

    def _table(self) -> list[tuple[str, ...]]:
        """The rows of the table under its header. Arrays whose paths differ only in
        numbers, and whose other cells are equal, are one row.
        """
        groups: dict[tuple[Any, ...], list[MisplacedArray]] = {}
        for row in self:
            key = (
                # The texts of the path around its numbers.
                between_numbers(row.path),
                row.asked,
                row.found,
                row.excess_bytes,
                row.fix,
            )
            groups.setdefault(key, []).append(row)
        rows: list[tuple[str, ...]] = [_HEADER]
        for (_, asked, found, excess_bytes, fix), alike in groups.items():
            for paths_text, array_count in joined_exactly([row.path for row in alike]):
                excess_text = "-"
                if excess_bytes:
                    excess_text = bytes_text(excess_bytes * array_count)
                rows.append((paths_text, asked, found, excess_text, fix))
        return rows


@called("misplaced(tree, plan)")
def misplaced(tree: object, plan: ShardPlan) -> Misplaced:
    """The arrays of a live tree whose shardings, shapes, dtypes or memory kinds are not
    those of their plan.

    Two shardings are equal if every device holds the same part of the array. The names
    of mesh axes and the order of devices do not matter. If the plan has no devices,
    positions in its mesh stand for devices. Inside `jax.jit`, the sharding of an array
    on Explicit axes is read from its type.

    **Arguments:**

    - `tree`: the planned tree: parameters, the state of an optimizer, a cache.
    - `plan`: the plan of the tree.

    **Returns:**

    A [`shardfx.results.Misplaced`][], with the most excess bytes first. It has the
    arrays with another sharding, shape, dtype or memory kind, and the arrays that are
    missing or not in the plan. It is false if there are none.

    **Raises:**

    `LeafTypeError` for a traced array on Auto axes, whose sharding the compiler has not
    chosen yet.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx
        from jax.sharding import PartitionSpec as P

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        tree = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
        plan = sfx.plan(tree, mesh, paths=sfx.PathRules.parse("w->data, b->replicate"))
        assert not sfx.misplaced(sfx.shard(tree, plan), plan)

        tree = jax.device_put(tree, jax.NamedSharding(mesh, P()))
        (row,) = sfx.misplaced(tree, plan)
        assert (row.path, row.excess_bytes) == ("w", 7 * 16)
        ```
    """
    check_plan("plan", plan)
    content = plan.content
    flat = flatten(tree)
    # A row is the plan of one or more arrays.
    planned_arrays = [
        _Described(sharding=sharding, shape=row.shape, dtype=row.dtype)
        for sharding, row in zip(content.row_shardings, content.rows, strict=True)
    ]
    # For each leaf, the number of its row in the plan; -1 for a leaf without one.
    row_numbers = content.index
    missing_paths = ()
    if flat.paths != content.path_tree.paths:
        number_by_path = dict(content.paths_and_rows)
        present = set(flat.paths)
        row_numbers = [number_by_path.get(path, -1) for path in flat.paths]
        missing_paths = [
            (path, row_number)
            for path, row_number in content.paths_and_rows
            if row_number >= 0 and path not in present
        ]
    found_rows = []
    for path, leaf, is_array, row_number in zip(
        flat.paths, flat.leaves, flat.is_array, row_numbers, strict=True
    ):
        if row_number < 0 and not is_array:
            continue
        live_array = None
        if is_array:
            live_array = _Described(
                sharding=_sharding(path, leaf), shape=leaf.shape, dtype=leaf.dtype
            )
        planned_array = None
        if row_number >= 0:
            planned_array = planned_arrays[row_number]
        found_rows.append(_misplaced_array(path, live_array, planned_array))
    for path, row_number in missing_paths:
        found_rows.append(_misplaced_array(path, None, planned_arrays[row_number]))
    misplaced_rows = [row for row in found_rows if row is not None]
    return Misplaced(sorted(misplaced_rows, key=lambda row: -row.excess_bytes))


def _sharding(path: str, leaf: Any) -> Sharding | None:
    """The sharding of an array; `None` for a NumPy array. Raises `LeafTypeError` for a
    traced array on Auto axes.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    if isinstance(leaf, Tracer):
        return known_sharding((jax.tree_util.DictKey(path),), leaf)
    return leaf.sharding


@ft.lru_cache(maxsize=4096)
def _misplaced_array(
    path: str,
    live: _Described | None,
    asked: _Described | None,
) -> MisplacedArray | None:
    """The array `path` beside its plan; `None` if the array is as planned.

    `live` has the sharding, shape and dtype of the live array, or is `None` if the
    array is missing. `asked` has those of the planned array, or is `None` if the plan
    has no such array.
    """
    fix = _PLAN_AGAIN
    if live is not None and asked is not None and _is_of_type(live, asked):
        if live.sharding is not None and asked.sharding is not None:
            if has_same_shards(live.sharding, asked.sharding, asked.shape):
                return None
        fix = _MOVE
    excess_bytes = _shard_bytes(live) - _shard_bytes(asked)
    return MisplacedArray(
        path=path,
        asked=_text(asked),
        found=_text(live),
        excess_bytes=max(excess_bytes, 0),
        fix=fix,
    )


def _is_of_type(live: _Described, asked: _Described) -> bool:
    """Whether a live array has the shape and the dtype of the planned one."""
    return live.shape == asked.shape and canonical_dtype(live.dtype) == asked.dtype


def _shard_bytes(described: _Described | None) -> int:
    """The bytes of one shard of an array with this sharding, shape and dtype; 0 for a
    missing array, and for one without a sharding.
    """
    if described is None or described.sharding is None:
        return 0
    shard_shape = described.sharding.shard_shape(described.shape)
    return array_bytes(shard_shape, described.dtype)


def _text(described: _Described | None) -> str:
    """The text of an array in the table, from its sharding, shape and dtype."""
    if described is None:
        return "nothing"
    sharding = described.sharding
    text = array_text(described.dtype, described.shape)
    if sharding is None:
        return f"{text} on no device"
    if not isinstance(sharding, NamedSharding):
        return f"{text} on {plural(len(sharding.device_set), 'device')}"
    text += f" {spec_text(entries_of(canonical(sharding.spec)))}"
    if memory_kind(sharding) is None:
        return text
    return f"{text} in {sharding.memory_kind}"
