"""Decides how one array is sharded. A rule or logical names request a sharding, which
is corrected to the mesh and the shape and then extended by strategies.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._ground.errors import RuleError, SpecError
from .._ground.reason import Code, Decision, Reason, nothing_to_shard, reason_for
from .._ground.spec import (
    UNCONSTRAINED,
    DType,
    array_bytes,
    canonical_entry,
    entries_at,
    entries_of,
    entry_axes,
    shard_counts,
    trimmed,
    unreduced_kind,
    with_reductions,
)
from .._ground.text import plural
from .._rules import (
    Atomic,
    AxisRules,
    Pipeline,
    Replicate,
    Strategy,
    Units,
    bare,
    check_once,
    is_callable,
    names_text,
    one_per_dim,
    resolve,
    units_of,
)
from ..topology import MeshSpec
from .leaf import Row


class Request(NamedTuple):
    """The sharding that a rule or logical names request for an array. It may not fit
    the mesh and the shape.

    `names` is `None` if no logical names request it. `strategies` add axes to `spec`
    once it is corrected. `rule` says in a plan where the request comes from, such as
    `paths[0]`. `reasons` say why names got no mesh axis.
    """

    names: tuple[Any, ...] | None
    spec: PartitionSpec
    rule: str | None
    units: Units | None
    strategies: tuple[Strategy, ...]
    reasons: tuple[Reason, ...]


# The request of an array that neither a rule nor names shard.
NOTHING = Request(None, PartitionSpec(), None, None, (), ())


class Axes(NamedTuple):
    """The sizes of the mesh axes, whether any axis is Auto, and the size in bytes below
    which arrays are replicated.
    """

    sizes: Mapping[str, int]
    has_auto: bool
    min_bytes: int = 0


def axes_of(mesh: MeshSpec, min_bytes: int = 0) -> Axes:
    return Axes(mesh.shape, AxisType.Auto in mesh.axis_types, min_bytes)


class Leaf(NamedTuple):
    """The shape, dtype and units of an array."""

    shape: tuple[int, ...]
    dtype: DType
    units: Units


def leaf_of(shape: tuple[int, ...], dtype: DType, units: Units | None) -> Leaf:
    return Leaf(shape, dtype, (1,) * len(shape) if units is None else units)


def request_of_target(
    target: object,
    path: str,
    leaf: Any,
    rule: str,
    axes: AxisRules | None,
    mode: str | None,
    stacked: int = 0,
) -> Request:
    """Returns the request that `target`, the target of a path rule, makes for the array
    `leaf` at `path`.

    `rule` is the rule as text, such as `paths[0]`. `axes` and `mode` resolve logical
    names in the target. No strategy may shard the first `stacked` dimensions, which
    index stacked layers.
    """
    target = bare(target)
    first, *steps = target.steps if isinstance(target, Pipeline) else (target,)
    if is_callable(target):
        first = _called(first, path, leaf, rule)
    units = None
    if isinstance(first, Atomic):
        units = first.units
        first = first.target
    if isinstance(first, Strategy):
        steps = [first, *steps]
        first = PartitionSpec()
    strategies = skipping(steps, range(stacked))
    if isinstance(first, tuple):
        return request_of_names(
            first, tuple(leaf.shape), rule, axes, mode, units, strategies
        )
    spec: Any = PartitionSpec() if isinstance(first, Replicate) else first
    return Request(
        None, spec, rule, padded_units(units, len(leaf.shape)), strategies, ()
    )


def _called(function: Any, path: str, leaf: Any, rule: str) -> Any:
    """Returns the target that a user's function returns for the array `leaf` at `path`.
    Raises `RuleError` if the function fails, or returns neither a PartitionSpec nor
    `atomic` of one.
    """
    try:
        target = function(path, leaf)
    except (SpecError, RuleError):
        raise
    except Exception as error:  # whatever a user's function raises, it is about this rule and this leaf
        raise RuleError(
            f"{rule} is a callable that failed for the path {path!r} and shape"
            f" {tuple(leaf.shape)}: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    spec = target.target if isinstance(target, Atomic) else target
    if not isinstance(spec, PartitionSpec):
        raise RuleError(
            f"{rule} is a callable that returned {target!r}; it must return a"
            " PartitionSpec."
        )
    check_once(spec, f"{rule}, a callable,")
    return target


def request_of_names(
    names: Any,
    shape: tuple[int, ...],
    rule: str,
    axes: AxisRules | None,
    mode: str | None,
    units: Units | None = None,
    strategies: tuple[Strategy, ...] = (),
) -> Request:
    """Returns the request that the logical names `names` make for an array, as `axes`
    resolve them in the mode `mode`.

    `rule` says in a plan where the request comes from. `units` and `strategies` come
    from a path rule with these names. If `units` is `None`, the units of `axes` are
    used.
    """
    named = one_per_dim(names, shape)
    if axes is None and all(name is None for name in named):
        return Request(
            None, PartitionSpec(), rule, padded_units(units, len(shape)), strategies, ()
        )
    if axes is None:
        raise RuleError(
            f"the names {names_text(names)} need rules that say which mesh axes they"
            " use; pass `axes=AxisRules([...])`. For mesh axes give PartitionSpecs by"
            " path: `paths=PathRules([(regex, spec)])`."
        )
    decision = resolve(named, axes, mode=mode)
    if strategies:
        # A dimension whose name has the target `None` is never sharded.
        explained_dims = {why.dim for why in decision.reasons}
        entries = entries_at(decision.spec, len(named))
        open_dims = [
            dim
            for dim, name in enumerate(named)
            if name is None or entries[dim] is not None or dim in explained_dims
        ]
        strategies = skipping(strategies, set(range(len(named))).difference(open_dims))
    units = padded_units(units_of(named, axes) if units is None else units, len(shape))
    return Request(named, decision.spec, rule, units, strategies, decision.reasons)


def skipping(
    strategies: Iterable[Strategy], dims: Iterable[int]
) -> tuple[Strategy, ...]:
    """Returns the strategies with `dims` added to the dimensions that each strategy
    never shards.
    """
    return tuple(
        dataclasses.replace(step, skip_dims=tuple(sorted({*step.skip_dims, *dims})))
        for step in strategies
    )


def padded_units(units: Units | None, rank: int) -> Units | None:
    """Returns `units` with one entry for each of `rank` dimensions; missing entries
    become 1. Raises `SpecError` if a further entry is not 1.
    """
    if units is None:
        return None
    if any(unit > 1 for unit in units[rank:]):
        raise SpecError(
            f"the units {units} are for rank {len(units)}, and the array has rank"
            f" {rank}."
        )
    return (*units[:rank], *[1] * (rank - len(units)))


def units_at(
    names: tuple[object, ...],
    shape: tuple[int, ...],
    units: Units,
    sizes_of: Callable[[str], Collection[int]] = lambda name: (),
) -> Units:
    """Returns `units` with 1 for each dimension whose size counts units, such as 8
    heads.

    For a unit of 128, a size of 1024 is a number of elements, so the unit stays; a size
    of 8 counts units, so each of them may be on another device. If a size could be
    either, other arrays decide. `sizes_of` maps a logical name to the sizes that it has
    in them: with 1024 among these, a size of 1024 is a number of elements.
    """

    def counts(name: Any, size: int, unit: int) -> bool:
        others = sizes_of(name) if unit > 1 and isinstance(name, str) else None
        if others is None or size in others:
            return False
        if size % unit:
            return size < unit or any(other % unit == 0 for other in others)
        return size * unit in others

    columns = zip(names, shape, units, strict=True)
    return tuple(
        1 if counts(name, size, unit) else unit for name, size, unit in columns
    )


def row_of(
    request: Request,
    shape: tuple[int, ...],
    dtype: object,
    mesh: Axes,
    memory_kind: str | None,
) -> Row:
    """Returns the plan of an array: the spec of `request` without axes that do not fit,
    plus its strategies' axes.
    """
    names = request.names
    units = request.units
    units = units if units is None or names is None else units_at(names, shape, units)
    leaf = leaf_of(shape, dtype, units)
    decision = corrected(request.spec, leaf, mesh)
    reasons = [
        *request.reasons,
        *[
            _with_advice(why, leaf) if names and units else why
            for why in decision.reasons
        ],
    ]
    least = mesh.min_bytes
    steps = request.strategies
    strategies = tuple(
        dataclasses.replace(step, min_bytes=max(step.min_bytes, least))
        for step in steps
    )
    for step in strategies:
        decision = apply_strategy(decision.spec, leaf, mesh, step)
        reasons += decision.reasons
    columns = (request.rule, tuple(reasons), memory_kind, units, strategies)
    return Row(shape, dtype, names, request.spec, decision.spec, *columns)


def _with_advice(why: Reason, leaf: Leaf) -> Reason:
    """Returns the reason `why`. If it says that a unit keeps a dimension unsharded, but
    the size of the dimension may be a number of units, such as 8 heads, its message
    gets advice.
    """
    if why.code is not Code.unit or why.dim is None:
        return why
    size = leaf.shape[why.dim]
    unit = leaf.units[why.dim]
    # A later dimension of the unit's size, as in `(heads, head_dim)`, hints at heads
    # with a dimension of their own.
    if size % unit or unit not in leaf.shape[why.dim + 1 :]:
        return why
    doubt = f", or, if these are {size} units already, a name without a unit"
    return dataclasses.replace(why, message=why.message + doubt)


def correct(
    spec: object,
    shape: Sequence[int],
    mesh: MeshSpec | Mesh | AbstractMesh,
    *,
    units: Sequence[int] | None = None,
    min_bytes: int = 0,
    dtype: object = None,
    strict: bool = False,
) -> Decision:
    """Makes a PartitionSpec valid for an array on a mesh, and drops as few mesh axes as
    possible.

    For each dimension in order, it drops the axes that the mesh lacks and the axes that
    an earlier dimension uses. Axes of size 1 stay. Of the other axes it keeps the
    subset with the largest product that divides the dimension; of several such subsets,
    the one whose axes come first. The function is idempotent.

    **Arguments:**

    - `spec`: the requested PartitionSpec. Dimensions beyond its end are not sharded.
      Extra entries must be `None`.
    - `shape`: the shape of the array.
    - `mesh`: any mesh; only its axis names, sizes and types are read.
    - `units`: one int per dimension: a dimension of `n * unit` elements is sharded only
      between units, such as the
        heads of an attention layer. `None` allows any split.
    - `min_bytes`: arrays of fewer bytes are replicated. Needs `dtype`.
    - `dtype`: the dtype of the array; `None` is enough without `min_bytes`.
    - `strict`: raise if any axis would be dropped.

    **Returns:**

    A [`shardfx.Decision`][]: a spec that JAX accepts for this shape on this mesh, and
    the reasons why axes were dropped. UNCONSTRAINED dimensions stay if the mesh has an
    Auto axis; only [`shardfx.constrain`][] accepts them.

    **Raises:**

    `SpecError` if the spec does not fit the rank, and under `strict` if anything would
    be dropped.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, correct

        mesh = MeshSpec({"data": 2, "tensor": 4})
        decision = correct(P(("data", "tensor"), "pipe"), (4, 16), mesh)
        assert decision.spec == P("tensor")
        # dim 0: size 4 is not divisible by `data` (2) x `tensor` (4); ...
        print(decision.reasons[0])
        ```
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(
            f"expected a PartitionSpec, not {spec!r}; write `PartitionSpec({spec!r})`,"
            " or use `resolve`."
        )
    if min_bytes and dtype is None:
        raise SpecError("`min_bytes` needs the array's dtype: pass `dtype=`.")
    leaf = leaf_of(
        tuple(map(int, shape)), dtype, None if units is None else tuple(units)
    )
    if len(leaf.units) != len(leaf.shape) or min(leaf.units, default=1) < 1:
        raise SpecError(
            "`units` must hold one positive int for each dimension of shape"
            f" {leaf.shape}, not {leaf.units}; use 1 where any cut will do."
        )
    mesh = MeshSpec.of(mesh)
    decision = corrected(spec, leaf, axes_of(mesh, min_bytes))
    if strict and decision.reasons:
        raise SpecError(
            f"{spec} for shape {leaf.shape} on mesh {mesh}:"
            f" {'; '.join(map(str, decision.reasons))}"
        )
    return decision


def corrected(spec: PartitionSpec, leaf: Leaf, axes: Axes) -> Decision:
    """Returns `spec` without the axes that do not fit the array `leaf` on a mesh with
    the axes `axes`, and the reasons; the same as [`shardfx.correct`][], for arguments
    that are already checked.
    """
    entries = _fitted(spec, leaf.shape)
    sizes = axes.sizes
    if axes.min_bytes and (
        asked := tuple(
            dict.fromkeys(axis for entry in entries for axis in entry_axes(entry))
        )
    ):
        if dim_reasons := _too_small(leaf, asked, axes.min_bytes):
            return Decision(PartitionSpec(), dim_reasons)
    used: dict[str, int] = dict.fromkeys((*spec.unreduced, *spec.reduced), -1)
    kept_entries = []
    reasons = []
    for dim, (entry, size, unit) in enumerate(
        zip(entries, leaf.shape, leaf.units, strict=True)
    ):
        if entry is None or (entry is UNCONSTRAINED and axes.has_auto):
            pass
        elif entry in sizes and entry not in used and size % (unit * sizes[entry]) == 0:
            used[entry] = (
                dim  # by far the most frequent case: a single axis that is unused and divides
            )
        elif entry is UNCONSTRAINED:
            what = "Auto axis that the compiler could choose for UNCONSTRAINED"
            entry = None
            reasons.append(reason_for(Code.absent, dim, (), what=what))
        else:
            axes_asked = entry_axes(entry)
            free, dim_reasons = _free(axes_asked, dim, sizes, used)
            axes_kept = _divisors(free, size, unit, sizes)
            used.update(dict.fromkeys(axes_kept, dim))
            reasons += (
                dim_reasons
                if axes_kept == free
                else [
                    *dim_reasons,
                    _indivisible(free, axes_kept, dim, size, unit, sizes),
                ]
            )
            entry = canonical_entry(axes_kept)
        kept_entries.append(entry)
    if not (spec.unreduced or spec.reduced):
        return Decision(trimmed(kept_entries), tuple(reasons))
    absent = tuple(
        sorted(axis for axis in (*spec.unreduced, *spec.reduced) if axis not in sizes)
    )
    if absent:
        reasons.append(
            reason_for(Code.absent, None, absent, what=f"axis `{'`, `'.join(absent)}`")
        )
    unreduced, reduced = (
        [axis for axis in axes if axis in sizes]
        for axes in (spec.unreduced, spec.reduced)
    )
    return Decision(
        trimmed(
            kept_entries, with_reductions((), unreduced, reduced, unreduced_kind(spec))
        ),
        tuple(reasons),
    )


def _fitted(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns an entry of `spec` for each dimension of `shape`. Raises `SpecError` if a
    further entry is not `None`.
    """
    entries = entries_of(spec)
    if any(entry is not None for entry in entries[len(shape) :]):
        few = "the first is" if len(shape) == 1 else f"the first {len(shape)} are"
        raise SpecError(
            f"{spec} has {plural(len(entries), 'entry', 'entries')}, but shape {shape}"
            f" has {plural(len(shape), 'dimension')}; write"
            f" `{trimmed(entries[: len(shape)])}` if {few} meant."
        )
    return entries if len(entries) == len(shape) else entries_at(spec, len(shape))


def _too_small(leaf: Leaf, axes: tuple[str, ...], min_bytes: int) -> tuple[Reason, ...]:
    size = array_bytes(leaf.shape, leaf.dtype) if min_bytes else 0
    return (
        (reason_for(Code.small, None, axes, size=size, limit=min_bytes),)
        if size < min_bytes
        else ()
    )


def _free(
    axes: tuple[str, ...],
    dim: int | None,
    sizes: Mapping[str, int],
    used: Container[str],
) -> tuple[tuple[str, ...], list[Reason]]:
    """Returns those of `axes` that are free to shard a dimension, and the reasons why
    others are not: the mesh, whose axes have these `sizes`, lacks them; `used` has
    them; or they occur twice. The reasons name `dim` if it is known.
    """
    absent = tuple(axis for axis in axes if axis not in sizes)
    taken = [axis for axis in axes if axis in sizes]
    free = tuple(dict.fromkeys(axis for axis in taken if axis not in used))
    for axis in free:
        taken.remove(axis)
    reasons = (
        [reason_for(Code.absent, dim, absent, what=f"axis `{'`, `'.join(absent)}`")]
        if absent
        else []
    )
    if taken:
        reasons.append(
            reason_for(
                Code.duplicate,
                dim,
                tuple(taken),
                what=f"`{'`, `'.join(dict.fromkeys(taken))}`",
            )
        )
    return free, reasons


def _divisors(
    axes: tuple[str, ...], size: int, unit: int, sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the subset of `axes` with the largest product that divides `size / unit`.
    Axes of size 1 stay. For size 12, unit 1 and axes of sizes 8, 2 and 3 it is the axes
    of sizes 2 and 3.
    """
    whole = 1 if size % unit else size // unit
    # All sizes are above 1, so a subset's product exceeds that of each of its prefixes.
    # Of two subsets with equal products, the first stays first whichever axes are added
    # to both: one candidate per product is enough.
    best: dict[int, tuple[int, ...]] = {1: ()}
    for position, axis in enumerate(axes):
        if sizes[axis] == 1:
            continue
        for product, positions in list(best.items()):
            larger = product * sizes[axis]
            candidate = (*positions, position)
            if whole % larger == 0 and candidate < best.get(larger, (len(axes),)):
                best[larger] = candidate
    chosen = best[max(best)]
    return tuple(
        axis
        for position, axis in enumerate(axes)
        if sizes[axis] == 1 or position in chosen
    )


def _indivisible(
    axes: tuple[str, ...],
    kept_axes: tuple[str, ...],
    dim: int | None,
    size: int,
    unit: int,
    sizes: Mapping[str, int],
) -> Reason:
    """Returns the reason why only `kept_axes` of `axes` shard a dimension of this size and
    unit. It names `dim` if known.
    """
    dropped = tuple(axis for axis in axes if axis not in kept_axes)
    what = _product([axis for axis in axes if sizes[axis] > 1], sizes)
    if unit > 1 and size % unit:
        fix = (
            "use a name without a unit, else correct the unit to one that divides"
            f" {size}"
        )
        text = (
            f"size {size} is no whole number of units of {unit}, so nothing may cut it;"
            " if it counts units already, "
        )
        return Reason(Code.unit, dim, dropped, text + fix)
    count = size // unit
    units_text = plural(size // unit, "unit")
    if unit > 1 and _divisors(axes, size, 1, sizes) != kept_axes:
        return reason_for(
            Code.unit,
            dim,
            dropped,
            size=size,
            units=units_text,
            count=count,
            unit=unit,
            what=what,
        )
    pad = _advice_to_pad(size, math.prod(sizes[axis] for axis in axes) * unit)
    text = f"{size} ({units_text} of {unit})" if unit > 1 else size
    return reason_for(
        Code.indivisible, dim, dropped, size=text, what=what, pad=pad, whole=count
    )


def _advice_to_pad(size: int, product: int) -> str:
    """Returns "pad it to N, or ", where N is the next multiple of `product`; "" if
    `size` would grow by over 1/64.
    """
    padded = -(-size // product) * product
    # A vocabulary can be padded, a width of 64 cannot.
    return f"pad it to {padded}, or " if (padded - size) * 64 <= size else ""


def apply_strategy(
    spec: PartitionSpec, leaf: Leaf, mesh: Axes, strategy: Strategy
) -> Decision:
    """Returns `spec` with axes of `strategy` added to the unsharded dimension that they
    divide into the most shards.

    If several dimensions tie, the strategy's preference decides. Axes that `spec` uses
    and axes that the mesh lacks are dropped with a reason. `spec` must be valid for the
    array and the mesh.
    """
    if small_reasons := _too_small(leaf, strategy.axes, strategy.min_bytes):
        return Decision(spec, small_reasons)
    if strategy.max_bytes:
        return _until_small(spec, leaf, mesh, strategy)
    sizes = mesh.sizes
    entries = [*_fitted(spec, leaf.shape)]
    used = {axis for entry in entries for axis in entry_axes(entry)}
    free, reasons = _free(strategy.axes, None, sizes, used)
    cutting = tuple(axis for axis in free if sizes[axis] > 1)
    open_dims = strategy.open_dims(leaf.shape)
    if cutting and entries and not open_dims:
        reasons.append(_skipped(strategy, cutting, len(entries)))
    if not free or not open_dims:
        return Decision(spec, tuple(reasons))
    dims = [dim for dim in open_dims if entries[dim] is None]
    dim, new_axes = _best_dim(strategy, free, entries, leaf, sizes, dims)
    if cutting and not dims:
        text = (
            f"no dimension is free for {_product(free, sizes)}: all that may be cut are"
            " sharded already"
        )
        reasons.append(
            Reason(
                Code.indivisible,
                None,
                free,
                f"{text}; put the axes into the rule's spec",
            )
        )
    elif dims and len(new_axes) < len(free):
        shown_dim = max(dims, key=leaf.shape.__getitem__) if dim is None else dim
        size = leaf.shape[shown_dim]
        unit = leaf.units[shown_dim]
        reasons.append(_indivisible(free, new_axes, dim, size, unit, sizes))
    if dim is not None:
        entries[dim] = canonical_entry(new_axes)
    return Decision(trimmed(entries, spec), tuple(reasons))


def _until_small(
    spec: PartitionSpec, leaf: Leaf, mesh: Axes, strategy: Strategy
) -> Decision:
    """Returns `spec` with the first axes of `strategy` added, as many as are needed for
    a device to hold at most `strategy.max_bytes` bytes of the array.
    """
    decision = Decision(spec)
    absent = tuple(_free(strategy.axes, None, mesh.sizes, ())[1])
    size = _shard_bytes(spec, leaf, mesh)
    for count in range(len(strategy.axes) + 1):
        if count:
            axes = strategy.axes[:count]
            step = dataclasses.replace(strategy, axes=axes, max_bytes=0)
            decision = apply_strategy(spec, leaf, mesh, step)
        size = _shard_bytes(decision.spec, leaf, mesh)
        if size <= strategy.max_bytes:
            return Decision(decision.spec, absent)
    reason = _too_large(size, strategy)
    return Decision(decision.spec, (*decision.reasons, reason))


def _too_large(size: int, strategy: Strategy) -> Reason:
    limit = strategy.max_bytes
    return reason_for(Code.large, None, strategy.axes, size=size, limit=limit)


def _shard_bytes(spec: PartitionSpec, leaf: Leaf, mesh: Axes) -> int:
    counts = shard_counts(spec, len(leaf.shape), mesh.sizes)
    pairs = zip(leaf.shape, counts, strict=True)
    return array_bytes(tuple(size // count for size, count in pairs), leaf.dtype)


def _skipped(strategy: Strategy, axes: tuple[str, ...], rank: int) -> Reason:
    """Returns the reason why `strategy`, which may shard none of the `rank` dimensions
    of an array, does not shard it over `axes`.
    """
    dims = f"dim{'s' if rank > 1 else ''} {', '.join(map(str, range(rank)))}"
    return reason_for(Code.skipped, None, axes, strategy=strategy.text, dims=dims)


def shard_over(
    request: Request,
    shape: tuple[int, ...],
    dtype: object,
    mesh: MeshSpec,
    over: Strategy,
) -> Request:
    """Returns `request` with the unused axes of the strategy `over` added, as ZeRO
    shards an optimizer's state.

    The axes are added to the dimension that they divide into the most shards. Axes that
    do not divide this dimension are added to other dimensions in the same manner. A
    dimension that is already sharded is split further. Axes that divide no dimension
    are dropped with a reason.
    """
    sizes = mesh.shape
    leaf = leaf_of(shape, dtype, request.units)
    if over.max_bytes:
        return _over_until_small(request, leaf, mesh, over)
    base_spec = corrected(request.spec, leaf, axes_of(mesh)).spec
    entries = [*_fitted(base_spec, shape)]
    used = {axis for entry in entries for axis in entry_axes(entry)}
    asked = tuple(axis for axis in over.axes if axis not in used)
    free, reasons = _free(asked, None, sizes, ())
    free = tuple(axis for axis in free if sizes[axis] > 1)
    if free and math.prod(shape) <= 1:
        is_told = any(why.code.is_expected for why in request.reasons)
        reasons += [] if is_told else [nothing_to_shard(shape)]
        free = ()
    if free and (small := _too_small(leaf, free, over.min_bytes)):
        reasons += small
        free = ()
    dims = over.open_dims(shape)
    added: tuple[str, ...] = ()
    while free:
        dim, divisors = _best_dim(over, free, entries, leaf, sizes, dims)
        if dim is None:
            reasons.append(_no_room(over, free, leaf, sizes, dims))
            break
        entries[dim] = (*entry_axes(entries[dim]), *divisors)
        free = tuple(axis for axis in free if axis not in divisors)
        added = (*added, *divisors)
    request = request._replace(reasons=(*request.reasons, *reasons))
    if not added:
        return request
    rule = f"{request.rule + ', ' if request.rule else ''}over {', '.join(added)}"
    return request._replace(spec=trimmed(entries, base_spec), rule=rule)


def _over_until_small(
    request: Request, leaf: Leaf, mesh: MeshSpec, over: Strategy
) -> Request:
    """Returns `request` with the first axes of `over` added, as many as are needed for
    a device to hold at most `over.max_bytes` bytes of the array.
    """
    axes = axes_of(mesh)
    further = request
    size = array_bytes(leaf.shape, leaf.dtype)
    for count in range(len(over.axes) + 1):
        if count:
            step = dataclasses.replace(over, axes=over.axes[:count], max_bytes=0)
            further = shard_over(request, leaf.shape, leaf.dtype, mesh, step)
        spec = corrected(further.spec, leaf, axes).spec
        size = _shard_bytes(spec, leaf, axes)
        if size <= over.max_bytes:
            return further._replace(reasons=request.reasons)
    return further._replace(reasons=(*further.reasons, _too_large(size, over)))


def _no_room(
    over: Strategy,
    axes: tuple[str, ...],
    leaf: Leaf,
    sizes: Mapping[str, int],
    dims: Sequence[int],
) -> Reason:
    """Returns the reason why the strategy `over` adds `axes` to none of `dims`, the
    dimensions that it may shard.
    """
    if not dims:
        return _skipped(over, axes, len(leaf.shape))
    size = max(leaf.shape[dim] for dim in dims)
    product = math.prod(sizes[axis] for axis in axes)
    what = (
        f"{_product(axes, sizes)} beside the axes that shard it already, and no other"
        " dimension is"
    )
    return reason_for(
        Code.indivisible,
        None,
        axes,
        size=size,
        what=what,
        pad=_advice_to_pad(size, math.lcm(size, product)),
        whole=size,
    )


def _best_dim(
    strategy: Strategy,
    axes: tuple[str, ...],
    entries: Sequence[object],
    leaf: Leaf,
    sizes: Mapping[str, int],
    dims: Iterable[int],
) -> tuple[int | None, tuple[str, ...]]:
    """Returns the dimension in `dims` that `axes` divide into the most shards, and the
    axes that divide it.

    If no axis divides any of `dims`, it returns `None` and no axes. If several tie, an
    unsharded dimension is preferred, then the one that the strategy prefers, then the
    first. `entries` are the entries of the array's spec: if they shard a dimension
    already, the axes must divide its shards.
    """
    choices: list[tuple[Any, ...]] = [(0, None, ())]
    for dim in dims:
        shard_size = leaf.shape[dim] // math.prod(
            sizes[axis] for axis in entry_axes(entries[dim])
        )
        if new_axes := _divisors(axes, shard_size, leaf.units[dim], sizes):
            rank = (
                math.prod(sizes[axis] for axis in new_axes),
                entries[dim] is None,
                strategy.preference(shard_size),
                -dim,
            )
            choices.append((rank, dim, new_axes))
    return max(choices[1:], default=choices[0])[1:]


def _product(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    return " x ".join(f"`{axis}` ({sizes[axis]})" for axis in axes)
