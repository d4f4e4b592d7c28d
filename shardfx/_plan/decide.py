"""What each distinct array gets of what was asked for it: a `Row`."""

import dataclasses
import functools as ft
import operator
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Reason
from .correct import Axes, Fit, Leaf, corrected, fit, spread
from .leaf import Row


class Request(NamedTuple):
    """What a rule asks for a leaf, before the mesh and the shape have their say."""

    names: tuple[Any, ...] | None
    spec: PartitionSpec
    rule: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    reasons: tuple[Reason, ...]


def row_of(
    request: Request, shape: tuple[int, ...], dtype: Any, mesh: Axes, min_bytes: int, memory_kind: str | None
) -> Row:
    """What the mesh and the shape leave of a request."""
    leaf = Leaf(shape, dtype, request.units)
    found = corrected(request.spec, leaf, mesh, min_bytes)
    reasons = (*request.reasons, *found.reasons)
    asked = request.strategies
    strategies = tuple(dataclasses.replace(step, min_bytes=max(step.min_bytes, min_bytes)) for step in asked)
    for step in strategies:
        found = spread(found.spec, leaf, mesh, step)
        reasons += found.reasons
    columns = (request.rule, reasons, memory_kind, request.units, strategies)
    return Row(shape, dtype, request.names, request.spec, found.spec, *columns)


class Asked:
    """What has been asked for arrays of one rank, and planned for one of them at least.

    Most arrays are cut evenly: what becomes of those is worked out once, and holds for every such shape.
    """

    def __init__(self, request: Request, rank: int, mesh: Axes, min_bytes: int):
        self.request, self.rank, self.mesh, self.min_bytes = request, rank, mesh, min_bytes
        self.by_size_alone = not (min_bytes or request.strategies)

    @ft.cached_property
    def fit(self) -> Fit:
        return fit(self.request.spec, self.rank, self.request.units, self.mesh)

    def row(self, shape: tuple[int, ...], dtype: Any, memory_kind: str | None) -> Row:
        asked = self.request
        if not self.by_size_alone or any(map(operator.mod, shape, self.fit.cuts)):
            return row_of(asked, shape, dtype, self.mesh, self.min_bytes, memory_kind)
        found = self.fit.decision
        reasons = asked.reasons + found.reasons
        return Row(shape, dtype, asked.names, asked.spec, found.spec, asked.rule, reasons, memory_kind, asked.units, ())
