"""Decides the sharding of one array under an existing plan: of a batch, of an
activation, or of a planned array that gets another target.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec, Sharding

from .._ground.errors import RuleError, SpecError, UnknownPathError, UnmatchedError
from .._ground.reason import Code, Decision, Reason
from .._ground.spec import (
    UNCONSTRAINED,
    entries_of,
    entry_axes,
    shards_over,
    trimmed,
)
from .._ground.text import plural
from .._ground.tree import leaves_at
from .._rules import (
    AxisRules,
    PathRules,
    Units,
    check_known,
    near,
    one_per_dim,
    resolve,
    units_of,
)
from ..topology import MeshSpec
from .complaints import raise_errors
from .content import Content
from .decide import correct, row_of
from .fitting import axes_of
from .leaf import Row
from .requests import padded_units, request_of_target, skipping, units_at


Policy: TypeAlias = Literal["raise", "replicate"]


def decision_for(
    names_or_spec: Any,
    shape: tuple[int, ...] | None,
    plan: Content,
    mesh: MeshSpec,
    strict: bool,
    unmatched: Policy,
) -> Decision:
    """Returns the spec of a batch or an activation under a plan, with a reason for each
    difference from the request.

    `shape` is `None` for any shape that the sharding divides. Axes of the plan's mesh
    that `mesh` lacks, such as Manual ones, are dropped without a reason. `strict` makes
    each reason a `SpecError`. `unmatched="raise"` makes a name without a rule an
    `UnmatchedError`, and any other axis that the mesh lacks and no rule declares a
    `SpecError`.
    """
    if unmatched not in ("raise", "replicate"):
        raise RuleError(
            f'`unmatched={unmatched!r}` is no policy for an array; use "raise" or'
            ' "replicate".'
        )
    if isinstance(names_or_spec, PartitionSpec):
        _require_rank(names_or_spec, shape)
        requested = Decision(names_or_spec)
        units = None
        names_by_dim = ()
    else:
        names_by_dim, requested, units = _resolved(
            names_or_spec, shape, plan, unmatched
        )
    # Such as Manual axes, of which a `shard_map` around the call disposes.
    held_back = [axis for axis in plan.mesh.axis_names if axis not in mesh.axis_names]
    spec = _without_axes(requested.spec, held_back)
    if shape is None:
        units = units or (1,) * len(entries_of(spec))
        if not isinstance(names_or_spec, PartitionSpec):
            _require_whole_units(
                names=tuple(names_or_spec), spec=spec, units=units, plan=plan, mesh=mesh
            )
        # Every set of mesh axes divides these sizes. No unit is ambiguous in them, so
        # the names are not checked below.
        shape = tuple(mesh.size * unit for unit in units)
        names_by_dim = ()
    elif units is not None:
        units = units_at(names_by_dim, shape, units, lambda name: _sizes_of(name, plan))
    decision = correct(spec, shape, mesh, units=padded_units(units, len(shape)))
    if units is not None and names_by_dim:
        _refuse_ambiguous_unit(
            names=names_by_dim,
            shape=shape,
            units=units,
            reasons=decision.reasons,
            plan=plan,
        )
    # `plan` has checked the rules, which may name axes of other meshes. A spec is
    # written for this mesh.
    if isinstance(names_or_spec, PartitionSpec) and unmatched == "raise":
        check_absent(decision.reasons, mesh, plan.axes)
    reasons = (*requested.reasons, *decision.reasons)
    if strict and reasons:
        raise SpecError(
            f"`strict=True`, and {names_or_spec} would not shard as asked:"
            f" {'; '.join(map(str, reasons))}"
        )
    return Decision(decision.spec, reasons)


def _require_rank(spec: PartitionSpec, shape: tuple[int, ...] | None) -> None:
    """Raises `SpecError` if `spec` has more entries than an array of the shape `shape`
    has dimensions; `None` for an unknown shape.
    """
    count = len(entries_of(spec))
    if shape is not None and count > len(shape):
        raise SpecError(
            f"{spec} has {count} entries, but shape {shape} has"
            f" {plural(len(shape), 'dimension')}. Inside `jax.vmap` an array lacks the"
            " mapped dimension: pass `jax.vmap(..., spmd_axis_name=...)`."
        )


def _without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns `spec` without these mesh axes in its entries."""
    entries: list[Any] = []
    for entry in entries_of(spec):
        if entry is not UNCONSTRAINED:
            entry = tuple([axis for axis in entry_axes(entry) if axis not in axes])
        entries.append(entry)
    return trimmed(entries, spec)


def _require_whole_units(
    names: tuple[object, ...],
    spec: PartitionSpec,
    units: Units,
    plan: Content,
    mesh: MeshSpec,
) -> None:
    """Raises `SpecError` if a shard of an array of unknown shape could split a unit of
    a name in `names`. The mesh axes in `spec` must divide the number of units in every
    array of the plan with this name; there must be one.
    """
    for name, entry, unit in zip(names, entries_of(spec), units, strict=False):
        if entry is UNCONSTRAINED:
            axes = ()
        else:
            axes = [axis for axis in entry_axes(entry) if axis in mesh.axis_names]
        shards = shards_over(axes, mesh.shape)
        if unit == 1 or shards == 1:
            continue
        sizes = _sizes_of(name, plan)
        if not sizes or any(size % (unit * shards) for size in sizes):
            counts = " or ".join(map(str, sorted({size // unit for size in sizes})))
            if counts:
                known_counts = f"the plan's arrays have {counts}"
            else:
                known_counts = "no array of the plan has it"
            raise SpecError(
                f"{name!r} is made of units of {unit}, and"
                f" {' x '.join(f'`{axis}`' for axis in axes)} ({shards}) may cut inside"
                f" one: {known_counts}. Say how large the array is: `plan.sharding(names,"
                " shape)`."
            )


def _sizes_of(name: object, plan: Content) -> list[int]:
    """Returns the sizes of all dimensions with this logical name in the plan's arrays."""
    sizes = []
    for row in plan.rows:
        for row_name, size in zip(row.names or (), row.shape, strict=False):
            if row_name == name:
                sizes.append(size)
    return sizes


def _refuse_ambiguous_unit(
    names: tuple[object, ...],
    shape: tuple[int, ...],
    units: Units,
    reasons: Iterable[Reason],
    plan: Content,
) -> None:
    """Raises `SpecError` for a dimension that a unit keeps whole, as `reasons` say, if
    its size may count units: no array of the plan has this size by its name, and the
    unit does not divide it or is a later dimension's size.
    """
    for why in reasons:
        dim = why.dim
        if why.code is not Code.unit or dim is None:
            continue
        name = names[dim]
        size = shape[dim]
        unit = units[dim]
        if not isinstance(name, str) or size in _sizes_of(name, plan):
            continue
        if size % unit or unit in shape[dim + 1 :]:
            raise SpecError(
                f"dim {dim} of shape {shape} has {size} elements by the name {name!r},"
                f" which is made of units of {unit}, and no array of the plan has this"
                " size. If the dimension counts units, use a name without a unit,"
                f" `axes.extend([({name + '_apart'!r}, axis)])`; if it is fused,"
                " correct the unit, or write a PartitionSpec."
            )


def require_constrained(requested: object, spec: PartitionSpec) -> None:
    """Raises `SpecError` if a dimension of `spec` is UNCONSTRAINED, since only the
    compiler could choose its sharding. `requested` is what the user passed, for the
    message.
    """
    entries = entries_of(spec)
    open_dims = [dim for dim, entry in enumerate(entries) if entry is UNCONSTRAINED]
    if open_dims:
        raise SpecError(
            f"{requested} leaves dim {open_dims[0]} to the compiler (UNCONSTRAINED), which"
            " no sharding at `device_put` or at the boundary of `jit` can say; write"
            " `None` there if it is to be whole, or use `constrain` inside the"
            " function."
        )


def check_absent(
    reasons: Iterable[Reason],
    mesh: MeshSpec,
    axes: AxisRules | None,
) -> None:
    """Raises `SpecError` if `reasons` say that a spec lost an axis that `mesh` lacks
    and that `axes` do not declare.
    """
    declared = () if axes is None else axes.mesh_axes
    absent: list[str] = []
    for why in reasons:
        if why.code is Code.absent:
            absent += why.axes
    for axis in absent:
        if axes is not None and axis in axes.names:
            raise SpecError(
                f"the plan's mesh {mesh} has no axis {axis!r}, which is a logical name"
                f" of `axes`: names are a tuple, `({axis!r}, ...)`, and `P(...)` holds"
                " mesh axes."
            )
        if axis not in declared:
            raise SpecError(
                f"the plan's mesh {mesh} has no axis"
                f" {axis!r}{near(axis, mesh.axis_names)}. Use one of its axes; if"
                f" {axis!r} is one of other meshes, declare it with `AxisRules(...,"
                f" mesh_axes=({axis!r},))`."
            )


def _resolved(
    names: Any,
    shape: tuple[int, ...] | None,
    content: Content,
    unmatched: Policy,
) -> tuple[tuple[Any, ...], Decision, Units | None]:
    """Returns an array's logical names with one entry per dimension, the spec that they
    resolve to, and the unit of each dimension that no shard may split, `None` if all
    are 1. `shape` is `None` if it is not known. `unmatched="raise"` makes a name
    without a rule an `UnmatchedError`.
    """
    if isinstance(names, Sharding):
        raise SpecError(
            "a plan has its own mesh; pass `sharding.spec`, or use `reshard(x,"
            f" sharding)`, for {names}."
        )
    if isinstance(names, str) and content.axes is None:
        raise RuleError(
            f"{names!r} is one text, and an array has one entry per dimension: write"
            f" `P({names!r})` for a mesh axis; the sharding of a planned leaf"
            f" is `plan[path].spec`, or in the tree `plan.shardings`."
        )
    if content.axes is None:
        raise RuleError(
            f"the plan has no `axes` to resolve the names {names} with; plan with"
            " `axes=AxisRules([...])`, or pass a PartitionSpec."
        )
    if isinstance(names, tuple | list) and shape is not None:
        names = one_per_dim(names, shape)
    elif isinstance(names, tuple | list):
        # For arrays of any rank, dimensions beyond the end of the names are not sharded
        # anyway.
        names = tuple(names)
        if names and names[-1] is ...:
            names = names[:-1]
        if any(name is ... for name in names):
            raise SpecError(
                f"which dimensions `...` stands for in {names} depends on the rank;"
                " pass `shape=`."
            )
    decision = resolve(names, content.axes, mode=content.mode)
    if unmatched == "raise":
        check_known(names, content.axes)
    return tuple(names), decision, units_of(names, content.axes)


_BY_HAND = "replaced by hand"


def replaced(content: Content, where: str, target: object) -> Content:
    """Returns the plan with `target` for the array at `where`: a path, or a regex that
    is searched in each path.
    """
    if not isinstance(where, str):
        raise UnknownPathError(
            "`replace` takes the path of an array, or a regex, as in"
            f' `plan.replace("layers/0/w", spec)`, and not {where!r:.60}.'
        )
    # PathRules check the target.
    ((_, checked_target),) = PathRules([(re.escape(where), target)]).rules
    is_array = [number >= 0 for number in content.index]
    paths = content.path_tree.paths
    chosen = leaves_at(
        where, paths, is_array, f"`replace({where!r}, ...)`: no array of the plan"
    )
    rows = list(content.rows)
    index = list(content.index)
    errors = []
    for position in chosen:
        path = paths[position]
        row = content.rows[content.index[position]]
        try:
            rows.append(_row_by_hand(content, path, row, checked_target))
        except (RuleError, SpecError, UnmatchedError) as error:
            errors.append((path, error))
        index[position] = len(rows) - 1
    raise_errors(errors)
    return content.replaced(rows=rows, index=index)


def _row_by_hand(content: Content, path: str, row: Row, target: object) -> Row:
    """Returns the plan of the array at `path` with another `target`, that of a path
    rule. `row` is its plan in `content`.

    Raises `SpecError` or `UnmatchedError` for a mesh axis or logical name that is
    unknown, and `SpecError` if the target does not fit and the plan is strict.
    """
    mesh = content.mesh
    request = request_of_target(
        target=target,
        path=path,
        leaf=row,
        rule=_BY_HAND,
        axes=content.axes,
        mode=content.mode,
        stacked=row.stacked,
    )
    request = request._replace(stacked=row.stacked)
    # Units stay indivisible under another spec.
    if request.units is None and request.names is None:
        request = request._replace(units=row.units)
    # Another strategy skips the same dimensions.
    skipped_dims: set[int] = set()
    for step in row.strategies:
        skipped_dims.update(step.skip_dims)
    request = request._replace(strategies=skipping(request.strategies, skipped_dims))
    if request.names is not None and content.axes is not None:
        # A plan that is made has no argument `unmatched`.
        check_known(request.names, content.axes, or_pass="")
    new_row = row_of(
        request=request,
        shape=row.shape,
        dtype=row.dtype,
        mesh=axes_of(mesh),
        memory_kind=row.memory_kind,
    )
    check_absent(new_row.reasons, mesh, content.axes)
    losses = [why for why in new_row.reasons if not why.code.is_expected]
    if content.strict and losses:
        raise SpecError(
            f"the plan is strict, and {target} would be cut down:"
            f" {'; '.join(map(str, losses))}"
        )
    return new_row
