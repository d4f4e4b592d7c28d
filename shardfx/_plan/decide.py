import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._reason import Reason
from .._spec import array_bytes
from .correct import corrected, spread
from .leaf import LeafPlan, leaf_plan


class Request(NamedTuple):
    """What a rule asks for a leaf, before the mesh and the shape have their say."""

    names: tuple[Any, ...] | None
    spec: PartitionSpec
    rule: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    reasons: tuple[Reason, ...]


def decided(
    request: Request,
    shape: tuple[int, ...],
    dtype: Any,
    sizes: Mapping[str, int],
    has_auto: bool,
    min_bytes: int,
    memory_kind: str | None,
) -> LeafPlan:
    nbytes = array_bytes(shape, dtype)
    found = corrected(request.spec, shape, sizes, has_auto, request.units, nbytes, min_bytes)
    reasons = (*request.reasons, *found.reasons)
    asked = request.strategies
    strategies = tuple(dataclasses.replace(step, min_bytes=max(step.min_bytes, min_bytes)) for step in asked)
    for step in strategies:
        found = spread(found.spec, shape, sizes, step.axes, request.units, nbytes, step.min_bytes)
        reasons += found.reasons
    return leaf_plan(
        sizes,
        spec=found.spec,
        shape=shape,
        dtype=dtype,
        names=request.names,
        requested=request.spec,
        rule=request.rule,
        reasons=reasons,
        memory_kind=memory_kind,
        units=request.units,
        strategies=strategies,
    )
