"""What each distinct array gets of what was asked for it: a `Row`."""

import dataclasses
import functools as ft
import operator
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.reason import Code, Reason
from .correction import Axes, Fit, Leaf, corrected, counts_units, fit, looks_apart, spread
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
    units = _units_at(request, shape)
    leaf = Leaf(shape, dtype, units)
    found = corrected(request.spec, leaf, mesh, min_bytes)
    reasons = (*request.reasons, *[_with_doubt(why, shape, request, units) for why in found.reasons])
    asked = request.strategies
    strategies = tuple(dataclasses.replace(step, min_bytes=max(step.min_bytes, min_bytes)) for step in asked)
    for step in strategies:
        found = spread(found.spec, leaf, mesh, step)
        reasons += found.reasons
    columns = (request.rule, reasons, memory_kind, units, strategies)
    return Row(shape, dtype, request.names, request.spec, found.spec, *columns)


def _units_at(request: Request, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The units of an array: 1 at a dimension that is smaller than the unit of its name, since it counts units."""
    if request.units is None or request.names is None:
        return request.units
    named = zip(request.names, shape, request.units, strict=True)
    return tuple([1 if isinstance(name, str) and counts_units(size, unit) else unit for name, size, unit in named])


def _with_doubt(why: Reason, shape: tuple[int, ...], request: Request, units: tuple[int, ...] | None) -> Reason:
    """A reason that says what else the dimension may be, where a unit stands in the way of heads that look apart."""
    if why.code is not Code.unit or why.dim is None or not request.names or not units:
        return why
    if shape[why.dim] % units[why.dim] or not looks_apart(why.dim, shape, units[why.dim]):
        return why
    doubt = f", or, if these are {shape[why.dim]} units already, a name without a unit"
    return dataclasses.replace(why, message=why.message + doubt)


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
