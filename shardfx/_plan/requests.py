"""What the names of an array, or the target of a rule, ask for it, before the mesh and the shape have their say."""

import dataclasses
import traceback
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, SpecError
from .._ground.reason import Decision
from .._ground.spec import entries_of
from .._rules.axis_rules import AxisRules
from .._rules.path_rules import check_once, is_callable
from .._rules.resolution import names_text, one_per_dim, resolve, units_of
from .._rules.strategies import Atomic, Fsdp, Pipeline, Replicate, bare
from .correction import padded_units
from .decide import Request


def asked_by_target(
    target: Any, path: str, leaf: Any, rule: str, axes: AxisRules | None, mode: str | None, stacked: int = 0
) -> Request:
    """What the target of a path rule asks for the array at `path`; `rule` is how a plan calls the rule.

    The first `stacked` dimensions are those of stacked layers, which no strategy may cut.
    """
    asked = _asked(bare(target), path, leaf, rule, axes, mode)
    whole = range(stacked)
    return asked._replace(strategies=skipping(asked.strategies, whole)) if asked.strategies and stacked else asked


def skipping(strategies: tuple[Fsdp, ...], dims: Iterable[int]) -> tuple[Fsdp, ...]:
    """The strategies, which leave these dimensions whole too."""
    return tuple(dataclasses.replace(step, skip=tuple(sorted({*step.skip, *dims}))) for step in strategies)


def _asked(target: Any, path: str, leaf: Any, rule: str, axes: AxisRules | None, mode: str | None) -> Request:
    first, *strategies = target.steps if isinstance(target, Pipeline) else (target,)
    if is_callable(target):
        first = _called(first, path, leaf, rule)
        check_once(first.target if isinstance(first, Atomic) else first, f"{rule}, a callable,")
    units = None
    if isinstance(first, Atomic):
        first, units = first.target, first.units
    if isinstance(first, tuple):
        return asked_by_names(first, tuple(leaf.shape), rule, axes, mode, units, tuple(strategies))
    if isinstance(first, Replicate):
        first = PartitionSpec()
    elif not isinstance(first, PartitionSpec):
        strategies, first = [first, *strategies], PartitionSpec()
    return Request(None, first, rule, padded_units(units, len(leaf.shape)), tuple(strategies), ())


def asked_by_names(
    names: Any,
    shape: tuple[int, ...],
    rule: str,
    axes: AxisRules | None,
    mode: str | None,
    units: tuple[int, ...] | None = None,
    strategies: tuple[Any, ...] = (),
    declared: bool = False,
) -> Request:
    """What the logical names of an array ask for it. A plan keeps them with one entry per dimension.

    `declared` says that a module's field has them: then the advice for stacked layers is about fields.
    """
    rank = len(shape)
    named = one_per_dim(names, shape, lambda: _length_fix(tuple(names), rank, declared))
    if axes is None and all(name is None for name in named):
        return Request(None, PartitionSpec(), rule, padded_units(units, rank), strategies, ())
    if axes is None:
        raise RuleError(
            f"the names {names_text(names)} need rules that say which mesh axes they use; pass "
            "`axes=AxisRules([...])`. For mesh axes give PartitionSpecs by path: `paths=PathRules([(regex, spec)])`."
        )
    found = resolve(named, axes, mode=mode)
    units = padded_units(units_of(named, axes) if units is None else units, rank)
    if strategies:
        strategies = skipping(strategies, _whole(named, found))
    return Request(named, found.spec, rule, units, strategies, found.reasons)


def _whole(names: tuple[Any, ...], found: Decision) -> list[int]:
    """The dimensions that rules keep whole: their names have the target `None`."""
    told = {why.dim for why in found.reasons}
    entries = (*entries_of(found.spec), *[None] * len(names))
    return [dim for dim, name in enumerate(names) if name is not None and entries[dim] is None and dim not in told]


def _length_fix(names: tuple[Any, ...], rank: int, declared: bool) -> str:
    if len(names) > rank:
        return "Take out those of dimensions that the array lacks."
    listed = names_text(names).strip("()").rstrip(",")
    fix = f"Write `(..., {listed})` if the dimensions before are whole, `({listed}, ...)` if those after are."
    if not declared:
        return fix
    return (
        f"{fix} Where `vmap` stacks layers, name the dimension that it adds on the field above: "
        '`field(stacked=("layers",))`.'
    )


def _called(function: Any, path: str, leaf: Any, rule: str) -> Any:
    try:
        result = function(path, leaf)
    except (SpecError, RuleError):
        raise
    except Exception as error:  # whatever a user's function raises, it is about this rule and this leaf
        why = f"{type(error).__name__}: {error}"[:300].removesuffix(".")
        inside = traceback.extract_tb(error.__traceback__)[1:2]
        where = "".join(f" in {frame.filename}, line {frame.lineno}" for frame in inside)
        raise RuleError(
            f"{rule} is a callable that failed for the path {path!r} and shape {tuple(leaf.shape)}{where}: {why}."
        ) from error
    if not isinstance(result.target if isinstance(result, Atomic) else result, PartitionSpec):
        raise RuleError(f"{rule} is a callable that returned {result!r}; it must return a PartitionSpec.")
    return result
