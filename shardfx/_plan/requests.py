"""The sharding that a rule or logical names request for an array, before it is corrected
to the mesh and the shape.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, SpecError
from .._ground.reason import Reason
from .._ground.spec import (
    entries_at,
)
from .._rules import (
    Atomic,
    AxisRules,
    Replicate,
    Strategy,
    Units,
    bare,
    check_once,
    is_callable,
    names_text,
    one_per_dim,
    resolve,
    steps_of,
    units_of,
)


class Request(NamedTuple):
    """The sharding that a rule or logical names request for an array. It may not fit
    the mesh and the shape.

    `names` is `None` if no logical names request it. `strategies` add axes to `spec`
    once it is corrected. `rule` says in a plan where the request comes from, such as
    `paths[0]`. `reasons` say why names got no mesh axis. The first `stacked` dimensions
    index stacked layers.
    """

    names: tuple[Any, ...] | None = None
    spec: PartitionSpec = PartitionSpec()
    rule: str | None = None
    units: Units | None = None
    strategies: tuple[Strategy, ...] = ()
    reasons: tuple[Reason, ...] = ()
    stacked: int = 0


# The request of an array that neither a rule nor names shard.
NOTHING = Request()


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
    # A spec, logical names, a callable or a strategy; then the strategies after `|`.
    first, *steps = steps_of(bare(target))
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
            names=first,
            shape=tuple(leaf.shape),
            rule=rule,
            axes=axes,
            mode=mode,
            units=units,
            strategies=strategies,
        )
    spec: Any = PartitionSpec() if isinstance(first, Replicate) else first
    units = padded_units(units, len(leaf.shape))
    return Request(spec=spec, rule=rule, units=units, strategies=strategies)


def _called(function: Any, path: str, leaf: Any, rule: str) -> Any:
    """Returns the target that a user's function returns for the array `leaf` at `path`.
    Raises `RuleError` if the function fails, or returns neither a PartitionSpec nor
    `atomic` of one.
    """
    try:
        target = function(path, leaf)
    except (SpecError, RuleError):
        raise
    # Any type: whatever a user's function raises, it is about this rule and this leaf.
    except Exception as error:
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
        units = padded_units(units, len(shape))
        return Request(rule=rule, units=units, strategies=strategies)
    if axes is None:
        raise RuleError(
            f"the names {names_text(names)} need rules that say which mesh axes they"
            " use; pass `axes=AxisRules([...])`. For mesh axes give PartitionSpecs by"
            " path: `paths=PathRules([(regex, spec)])`."
        )
    decision = resolve(named, axes, mode=mode)
    if strategies:
        # A dimension whose name has the target `None` is never sharded. A name that got
        # no axis for another cause has a reason.
        explained_dims = {why.dim for why in decision.reasons}
        entries = entries_at(decision.spec, len(named))
        whole_dims = []
        for dim, (name, entry) in enumerate(zip(named, entries, strict=True)):
            if name is not None and entry is None and dim not in explained_dims:
                whole_dims.append(dim)
        strategies = skipping(strategies, whole_dims)
    if units is None:
        units = units_of(named, axes)
    units = padded_units(units, len(shape))
    return Request(
        names=named,
        spec=decision.spec,
        rule=rule,
        units=units,
        strategies=strategies,
        reasons=decision.reasons,
    )


def skipping(
    strategies: Iterable[Strategy],
    dims: Iterable[int],
) -> tuple[Strategy, ...]:
    """Returns the strategies with `dims` added to the dimensions that each strategy
    never shards.
    """
    steps = []
    for step in strategies:
        skip_dims = tuple(sorted({*step.skip_dims, *dims}))
        steps.append(dataclasses.replace(step, skip_dims=skip_dims))
    return tuple(steps)


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

    def counts_units(name: Any, size: int, unit: int) -> bool:
        """Whether a dimension of this size and name holds one element for each unit."""
        if unit == 1 or not isinstance(name, str):
            return False
        if 0 < size < unit:
            return True
        other_sizes = sizes_of(name)
        if size in other_sizes:
            return False
        if size % unit:
            return any(other % unit == 0 for other in other_sizes)
        return size * unit in other_sizes

    new_units = []
    for name, size, unit in zip(names, shape, units, strict=True):
        if counts_units(name, size, unit):
            unit = 1
        new_units.append(unit)
    return tuple(new_units)


def units_for(request: Request, shape: tuple[int, ...]) -> Units | None:
    """Returns for each dimension of an array of the shape `shape` the number of
    elements that no shard may split, as `request` has them; `None` for 1 everywhere.
    """
    if request.units is None or not request.names:
        return request.units
    # The unit of a name is in elements; a dimension of this name may count whole units.
    return units_at(request.names, shape, request.units)
