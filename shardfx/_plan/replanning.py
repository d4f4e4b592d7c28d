"""Plans the same arrays by the same rules on another mesh: one with other devices, or
one whose axes are split into sub-axes.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._ground.reason import Code
from .._ground.spec import (
    array_bytes,
    axes_of_entries,
    canonical_entry,
    entries_at,
    entries_of,
    entry_axes,
    shards_over,
    trimmed,
    unreduced_kind,
    with_reductions,
)
from .._rules import AxisRules, Strategy, resolve
from ..topology import MeshSpec
from .content import Content
from .decide import row_of
from .fitting import Axes, axes_of
from .leaf import Row
from .requests import Request


def replanned(content: Content, mesh: MeshSpec | Mesh | AbstractMesh) -> Content:
    """Returns the plan of the same arrays by the same rules for another mesh. Axes that
    did not fit on the old mesh are tried again.
    """
    mesh_spec = MeshSpec.of(mesh).require_sizes()
    mesh_axes = axes_of(mesh_spec)
    rows = []
    for row in content.rows:
        # An array that is replicated because it is small is so on every mesh.
        is_replicated = row.spec == PartitionSpec() and row.requested != row.spec
        if not (_is_small_for_plan(row) and is_replicated):
            row = row_on(row, content, mesh_axes)
        rows.append(row)
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    return content.replaced(mesh=mesh_spec, jax_mesh=jax_mesh, rows=rows)


def _is_small_for_plan(row: Row) -> bool:
    """Whether an array has fewer bytes than the argument `min_bytes` of `plan`, which
    then tries no mesh axis for it.

    A strategy has a `min_bytes` of its own, and gives the same reason, `small`. By then
    the axes of the rule's spec have been tried. If one of them did not fit, the array
    has another reason as well.
    """
    codes = [why.code for why in row.reasons]
    has_tried_axes = any(code.is_cut or code is Code.absent for code in codes)
    return Code.small in codes and not has_tried_axes


def row_on(row: Row, content: Content, axes: Axes, **changes: object) -> Row:
    """Returns the plan of an array on the mesh axes `axes`, from `row`, its plan in
    `content`, which is for another mesh. The sharding that its rule requests stays the
    same, except for `changes`, new values of fields of `Request`.
    """
    # The reasons that the rule gave stay; the reasons from the correction to the old
    # mesh are dropped.
    reasons = tuple([why for why in row.reasons if why.code.is_of_request])
    if row.names is not None and content.axes is not None:
        reasons = resolve(row.names, content.axes, mode=content.mode).reasons
    request = Request(
        names=row.names,
        spec=row.requested,
        rule=row.rule,
        units=row.units,
        strategies=row.strategies,
        reasons=reasons,
        stacked=row.stacked,
    )
    changed = request._replace(**changes)
    return row_of(
        request=changed,
        shape=row.shape,
        dtype=row.dtype,
        mesh=axes,
        memory_kind=row.memory_kind,
    )


def refined(content: Content, min_bytes: int) -> Content:
    """Returns the plan on a mesh with some axes split into sub-axes, so that arrays can
    be sharded further.

    A sub-axis helps if its size divides a dimension and the size of the whole axis does
    not. Arrays of fewer than `min_bytes` bytes stay replicated.
    """
    array_counts = collections.Counter(content.index)
    useful_sub_axes: list[dict[str, int]] = []
    # For each mesh axis and size of a sub-axis of it, the bytes that the sub-axis saves
    # on each device.
    saved_bytes: dict[str, collections.Counter[int]] = {}
    for number, row in enumerate(content.rows):
        sub_axes = {}
        if not _is_small_for_plan(row):
            sub_axes = _useful_sub_axes(row, content.mesh.shape)
        useful_sub_axes.append(sub_axes)
        _, shard_bytes = content.byte_counts[number]
        for axis, size in sub_axes.items():
            saved_of_array = shard_bytes * (size - 1) // size
            saved_of_axis = saved_bytes.setdefault(axis, collections.Counter())
            saved_of_axis[size] += saved_of_array * array_counts[number]

    mesh, parts_by_axis = _refined_mesh(content.mesh, saved_bytes)
    if not parts_by_axis:
        return content
    mesh_axes = axes_of(mesh, min_bytes)
    axes = content.axes
    if axes is not None:
        axes = _renamed_rules(axes, parts_by_axis)
    # Names are resolved by the new rules, so that reasons name the sub-axes.
    content = content.replaced(axes=axes)
    rows: list[Row] = []
    for row, sub_axes in zip(content.rows, useful_sub_axes, strict=True):
        steps = [_renamed_strategy(step, parts_by_axis) for step in row.strategies]
        strategies = tuple(steps)
        requested = _renamed(row.requested, parts_by_axis)
        spec = _renamed(row.spec, parts_by_axis)
        new_row = row_on(row, content, mesh_axes, spec=requested, strategies=strategies)
        # Only an array that can use a sub-axis may change its layout.
        if not sub_axes and new_row.spec != spec:
            new_row = row._replace(
                spec=spec,
                requested=requested,
                strategies=strategies,
            )
        rows.append(new_row)
    jax_mesh = None if content.jax_mesh is None else mesh.build(content.jax_mesh)
    return content.replaced(mesh=mesh, jax_mesh=jax_mesh, rows=rows)


def _renamed_strategy(
    strategy: Strategy,
    parts: Mapping[str, tuple[str, ...]],
) -> Strategy:
    """The strategy with each split axis replaced by its sub-axes, `parts`."""
    return dataclasses.replace(strategy, axes=_renamed_axes(strategy.axes, parts))


def _useful_sub_axes(row: Row, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns, for each mesh axis that an array requests and does not get, the size of
    a sub-axis that it can use.

    For example, a dimension of size 8 cannot be sharded over an axis of size 16, but
    over a sub-axis of size 8. Axes without such a sub-axis are left out. `sizes` has
    the sizes of the mesh axes.
    """
    used_axes = set(axes_of_entries(entries_of(row.spec)))
    rank = len(row.shape)
    units = row.units or (1,) * rank
    # For each dimension, the units in a shard.
    unit_counts: list[int] = []
    entries = entries_at(row.spec, rank)
    for size, unit, entry in zip(row.shape, units, entries, strict=True):
        whole_units = 1 if size % unit else size // unit
        unit_count = whole_units // shards_over(entry_axes(entry), sizes)
        unit_counts.append(unit_count)

    sub_axes: dict[str, int] = {}
    requested_entries = entries_at(row.requested, rank)
    for unit_count, entry in zip(unit_counts, requested_entries, strict=True):
        remaining = unit_count
        for axis in entry_axes(entry):
            sub_axis_size = math.gcd(remaining, sizes.get(axis, 1))
            is_taken = axis in used_axes or axis in sub_axes
            if not is_taken and sub_axis_size > 1:
                sub_axes[axis] = sub_axis_size
                remaining //= sub_axis_size
    for step in row.strategies:
        if array_bytes(row.shape, row.dtype) < step.min_bytes:
            continue
        open_dims = step.open_dims(row.shape)
        free_dims = [dim for dim in open_dims if entries[dim] is None]
        for axis in step.axes:
            axis_size = sizes.get(axis, 1)
            sub_axis_size = 1
            for dim in free_dims:
                common_size = math.gcd(unit_counts[dim], axis_size)
                sub_axis_size = max(sub_axis_size, common_size)
            is_taken = axis in used_axes or axis in sub_axes
            if not is_taken and sub_axis_size > 1:
                sub_axes[axis] = sub_axis_size
    return sub_axes


def _refined_mesh(
    mesh: MeshSpec,
    saved: Mapping[str, Mapping[int, int]],
) -> tuple[MeshSpec, dict[str, tuple[str, ...]]]:
    """Returns the mesh with some axes split into sub-axes, and the names of the
    sub-axes of each split axis.

    `saved` maps each axis to a dict from the size of a sub-axis to the bytes that it
    saves on each device. An axis `tensor` of size 16 with a sub-axis of size 8 becomes
    `tensor_0` of size 8 and `tensor_1` of size 2; the order of the devices does not
    change. Two sizes of which none divides the other, such as 4 and 6, cannot both be
    used: the one that saves fewer bytes is reduced to a divisor that fits.
    """
    parts: dict[str, tuple[str, ...]] = {}
    columns = zip(mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, strict=True)
    for axis, size, slices in columns:
        sub_axis_sizes = _sub_axis_sizes(size, slices, saved.get(axis, {}))
        if len(sub_axis_sizes) > 1:
            names = _sub_axis_names(axis, len(sub_axis_sizes), mesh.axis_names)
            parts[axis] = names
            mesh = mesh.split(axis, dict(zip(names, sub_axis_sizes, strict=True)))
    return mesh, parts


def _sub_axis_sizes(
    size: int,
    slices: int,
    saved_by_size: Mapping[int, int],
) -> list[int]:
    """The sizes of the sub-axes into which an axis of `size` devices over `slices`
    slices is split. `saved_by_size` maps the size of a sub-axis that arrays can use to
    the bytes that it saves on each device.
    """
    # Divisors of `size`, each dividing the next. The ratio of two neighbours is the
    # size of a sub-axis.
    chain = [1, size]
    most_saved_first = sorted(
        saved_by_size, key=lambda part: (-saved_by_size[part], part)
    )
    for part in most_saved_first:
        # A size that is incompatible with the chain is reduced to its largest divisor
        # that fits. A sub-axis must lie within one slice or consist of whole slices.
        divisor = part
        while part % divisor or not _divides_or_is_divided(divisor, [slices, *chain]):
            divisor -= 1
        chain = sorted({*chain, divisor})
    return [large // small for small, large in itertools.pairwise(chain)]


def _sub_axis_names(axis: str, count: int, used: Sequence[str]) -> tuple[str, ...]:
    """Names for the sub-axes of `axis` that are not in `used`."""
    stem = axis
    while True:
        names = [f"{stem}_{number}" for number in range(count)]
        if set(names).isdisjoint(used):
            return tuple(names)
        stem += "_"


def _divides_or_is_divided(number: int, others: Iterable[int]) -> bool:
    """Whether of `number` and each of the others one divides the other."""
    for other in others:
        if number % other and other % number:
            return False
    return True


def _renamed_rules(axes: AxisRules, parts: dict[str, tuple[str, ...]]) -> AxisRules:
    """The rules with each split axis replaced by its sub-axes, `parts`."""

    def by_part(rules: Iterable[tuple[str, object]]) -> list[tuple[str, Any]]:
        return [(name, _renamed_entry(target, parts)) for name, target in rules]

    modes = {mode: by_part(rules) for mode, rules in axes.modes}
    return dataclasses.replace(
        axes,
        rules=by_part(axes.rules),
        modes=modes,
        mesh_axes=_renamed_axes(axes.mesh_axes, parts),
    )


def _renamed(
    spec: PartitionSpec,
    parts: Mapping[str, tuple[str, ...]],
) -> PartitionSpec:
    """Returns `spec` on the mesh with split axes, in the same layout. `parts` maps a
    split axis to its sub-axes.
    """
    entries = [_renamed_entry(entry, parts) for entry in entries_of(spec)]
    reductions = with_reductions(
        entries=(),
        unreduced=_renamed_axes(sorted(spec.unreduced), parts),
        reduced=_renamed_axes(sorted(spec.reduced), parts),
        kind=unreduced_kind(spec),
    )
    return trimmed(entries, reductions)


def _renamed_entry(entry: object, parts: Mapping[str, tuple[str, ...]]) -> Any:
    """An entry of a spec, or the target of a rule, with each split axis replaced by its
    sub-axes, `parts`.
    """
    if isinstance(entry, str | tuple):
        return canonical_entry(_renamed_axes(entry, parts))
    return entry


def _renamed_axes(
    entry: object,
    parts: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a spec, with each split axis replaced by its
    sub-axes. `parts` maps a split axis to them.
    """
    renamed: list[str] = []
    for axis in entry_axes(entry):
        renamed += parts.get(axis, (axis,))
    return tuple(renamed)
