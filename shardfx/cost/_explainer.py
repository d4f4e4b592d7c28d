"""Explains, from Shardy's propagation, how the arrays of a step lie."""

import dataclasses
import functools as ft
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._ground.spec import bits, canonical_entry
from .._ground.text import array_text
from .._step import (
    Fault,
    Frame,
    Operation,
    Step,
    fault_records,
    lines_of,
    matches_operation,
    name_stacks,
    own_line,
    phase_of,
    place_text,
)
from ._array_rows import ArrayRow, MissedAxis, Origin
from ._elsewhere import StepElsewhere
from ._propagation import Conflict, DimKey, Graph, Stop
from ._traffic_rows import TrafficRow


# Operations that compute no new array.
_NO_ROW = ("carry", "return", "use", "sharding_constraint", "data_flow_edge")


class Explainer:
    """A step after Shardy's propagation, with methods that explain its shardings in
    sentences. In a conflict, two arrays are sharded over one mesh axis, and one of them
    is gathered.

    Operations and arrays (values) are numbers of the graph. Beside those of StableHLO,
    the graph has the operations "carry" and "return" at the start and the end of a
    loop.
    """

    def __init__(self, step: Step, graph: Graph):
        """`graph` has the operations and arrays of `step` after the propagation."""
        self.step = step
        self.graph = graph
        self.axis_sizes = dict(step.mesh.shape)
        # The line of the user's program for each operation; `None` if it is not known.
        self.lines = [
            own_line(lines_of(operation.location)) for operation in graph.operations
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepElsewhere, ()

    @ft.cached_property
    def array_rows(self) -> list[ArrayRow | None]:
        """A row for each array that an operation computes, or `None` for an array
        inside a `shard_map`. `operation.outs` has the numbers of its arrays.
        """
        rows = []
        operations = zip(self.graph.operations, self.loops, strict=True)
        for number, (operation, loop) in enumerate(operations):
            if operation.name not in _NO_ROW:
                rows += [self._row(number, value, loop) for value in operation.outs]
        return rows

    def _row(
        self,
        operation_number: int,
        value_number: int,
        loop: Frame | None,
    ) -> ArrayRow | None:
        """The row of an array; `None` inside a `shard_map`, whose arrays have no
        sharding of Shardy's. `loop` is the line of the loop around the operation.

        Of the array's sharding, `dims` has the sub-axes of each dimension, and
        `origins` Shardy's text for the origin of each.
        """
        value = self.graph.values[value_number]
        maker = self.graph.operations[operation_number]
        sharding = self.graph.shardings[value_number]
        stack = " ".join(name_stacks(maker.location))
        # A function of the user may have `shard_map` in its name.
        is_manual = "shard_map" in re.split(r"[/ ()]+", stack)
        if value.sharding is None and is_manual:
            return None
        origins = []
        for axis in itertools.chain(*sharding.dims):
            origin = Origin(
                axis=axis,
                by=self.name(sharding.origins.get(axis, "")),
                chain=self._chain(value_number, axis),
            )
            origins.append(origin)
        entries = [tuple(map(axis_of, axes)) for axes in sharding.dims]
        return ArrayRow(
            source=self.lines[operation_number],
            operation=maker.name,
            phase=phase_of(stack),
            loop=loop,
            shape=value.shape,
            dtype=value.dtype,
            spec=PartitionSpec(*map(canonical_entry, entries)),
            bytes_per_device=self._bytes(value_number),
            origins=tuple(origins),
            number=value_number,
        )

    def _bytes(self, number: int) -> int:
        """The bytes of one device's shard of an array, with padding if the shards do
        not divide the shape evenly.
        """
        value = self.graph.values[number]
        dims = self.graph.shardings[number].dims or [()] * len(value.shape)
        elements = 1
        for size, axes in zip(value.shape, dims, strict=True):
            parts = math.prod(map(self._axis_size, axes))
            elements *= -(-size // parts)
        return -(-elements * bits(value.dtype) // 8)

    def _axis_size(self, axis: str) -> int:
        """The size of a mesh axis, or of a sub-axis such as `data:(1)2`."""
        if ":" in axis:
            return int(axis.rpartition(")")[2])
        return self.axis_sizes[axis]

    @property
    def loops(self) -> Iterator[Frame | None]:
        """Yields the source line of the innermost loop around each operation; `None`
        outside of loops.
        """
        # The locations of the loops that have begun and not ended. A `while` has a
        # carry for each carried value, all at one location.
        around: list[object] = []
        for operation in self.graph.operations:
            location = operation.location
            if location in around:
                if operation.name == "return":
                    del around[around.index(location) :]
            elif operation.name == "carry":
                if "while" in "".join(name_stacks(location)):
                    around.append(location)
            yield own_line(lines_of(around[-1])) if around else None

    def _chain(self, number: int, axis: str) -> tuple[Frame, ...]:
        """The lines over which a mesh axis reached an array, neighbours only once."""
        lines = [self.lines[operation] for operation in self.graph.chain(number, axis)]
        return tuple(line for line, _ in itertools.groupby(lines) if line is not None)

    def name(self, origin: str) -> str:
        """The name of a mesh axis's origin, such as "params/w", "result 0/w" or "the
        constraint at a.py:4". `origin` is Shardy's text for it, such as "input: 0".
        """
        kind, _, number = origin.partition(": ")
        if kind == "input":
            argument = self.step.arguments[int(number)]
            return argument.path or argument.name
        if kind == "output":
            return f"result {self.results[int(number)]}".rstrip()
        if origin in self.graph.constraints:
            return self._constraint(self.graph.constraints[origin][0])
        return origin

    def _constraint(self, value: int) -> str:
        return f"the constraint at {place_text(self.lines[self.graph.makers[value]])}"

    @ft.cached_property
    def results(self) -> tuple[str, ...]:
        """The paths of the step's results."""
        return self.step.result_paths

    def origin_of(self, value: int, axis: str) -> str:
        """The name of the argument, result or constraint from which array number
        `value` has a mesh axis. An array whose origin is "self" is one of these.
        """
        origin = self.graph.shardings[value].origins.get(axis, "")
        if origin != "self":
            return self.name(origin)
        if value in self.graph.makers:
            return self._constraint(value)
        number = self.graph.program.arguments.index(value)
        return self.name(f"input: {number}")

    def missed_axes(self, row: ArrayRow) -> Iterator[MissedAxis]:
        """The mesh axes that could shard the array of a row and do not. Each shards a
        near array instead, and stopped propagating at an operation: `stop.last` is the
        dimension there that it does not shard.
        """
        for axis, axis_size in self.axis_sizes.items():
            if axis_size == 1:
                continue
            stop = self.graph.stop_of(row.number, axis)
            if stop is None:
                continue
            other_axes = [
                other for other in self.graph.axes_of(stop.last) if other != axis
            ]
            # The array is to be divisible with the axis added.
            parts = axis_size * math.prod(map(self._axis_size, other_axes))
            shape = self.graph.values[stop.last.value].shape
            if shape[stop.last.dim] % parts == 0:
                yield self._missed_axis(axis, stop)

    def _missed_axis(self, axis: str, stop: Stop) -> MissedAxis:
        """What adds a mesh axis that stopped propagating: the constraint of the array
        near the stop, with the axis at its dimension and at no other.

        Of the stop, `last` is the dimension that the axis does not shard, `with_axis`
        the one that it shards in the same operation, and `near` the one that a
        constraint could shard. `first` names the origin of the axis if it shards
        another dimension of the array of `last`.
        """
        last = stop.last.value
        near = stop.near.value
        first = ""
        if axis in itertools.chain(*self.graph.shardings[last].dims):
            first = self.origin_of(last, axis)

        value = self.graph.values[near]
        entries = []
        for axes in self.graph.shardings[near].dims or [()] * len(value.shape):
            whole_axes = map(axis_of, axes)
            entries.append([other for other in whole_axes if other != axis])
        entries[stop.near.dim].append(axis)
        maker = self.graph.makers.get(near, stop.operation)
        return MissedAxis(
            axis=axis,
            dim=stop.dim,
            by=self.origin_of(stop.with_axis.value, axis),
            first=first,
            line=self.lines[maker],
            shape=value.shape,
            dtype=value.dtype,
            spec=PartitionSpec(*map(canonical_entry, entries)),
        )

    @ft.cached_property
    def conflicts(self) -> tuple[str, ...]:
        """A sentence for each line with a conflict, the largest gathered arrays first."""
        sentences: dict[str, None] = {}
        largest_first = sorted(
            self.graph.conflicts,
            key=self._gathered_bytes,
            reverse=True,
        )
        for conflict in largest_first:
            place = place_text(self.lines[conflict.operation])
            sentences[f"{place}: {self.sentence(conflict)}"] = None
        return tuple(sentences)

    def _gathered_bytes(self, conflict: Conflict) -> int:
        return self._bytes(conflict.moved.value)

    @ft.cached_property
    def known_faults(self) -> tuple[str, ...]:
        """A sentence for each line that XLA's partitioner may compute wrongly."""
        # The mesh axes of each dimension, by the array's number.
        axes_by_dim = {
            number: sharding.dims
            for number, sharding in enumerate(self.graph.shardings)
        }
        sentences: dict[str, None] = {}
        for fault in fault_records():
            if fault.operation is None or fault.is_right_with(jax.__version__):
                continue
            for number, operation in enumerate(self.graph.operations):
                is_named = operation.name in fault.operations
                if is_named and matches_operation(
                    predicate=fault.operation,
                    operation=operation,
                    values=self.graph.values,
                    cuts=axes_by_dim,
                    sizes=self.axis_sizes,
                ):
                    sentences[self._fault_sentence(fault, number)] = None
        return tuple(sentences)

    def _fault_sentence(self, fault: Fault, operation: int) -> str:
        """A sentence about a known fault of XLA's partitioner that operation number
        `operation` may hit.
        """
        return (
            f"{place_text(self.lines[operation])}:"
            f" {self.graph.operations[operation].name}:"
            f" {fault.pattern} is computed wrongly in some programs"
            f" ({fault.versions_text}); run `shardfx.testing.check_step`. It is mended"
            f" by {fault.mended_by}"
        )

    def sentence(self, conflict: Conflict) -> str:
        """A sentence about a conflict, with the two arrays that are sharded over one
        mesh axis: the first stays so, the second is gathered.
        """
        axis = conflict.axis
        kept = self._dimension_text(conflict.kept, axis)
        moved = self._dimension_text(conflict.moved, axis)
        operation = self.graph.operations[conflict.operation]
        return (
            f"gathered over {axis}: {kept} and {moved} are sharded over it, and the"
            f" {operation.name} keeps the first"
        )

    def _dimension_text(self, key: DimKey, axis: str) -> str:
        """The text of a dimension that a mesh axis shards, and where it has it from.
        `key` is the number of its array, and its number in the array.
        """
        value = self.graph.values[key.value]
        text = f"dimension {key.dim} of {array_text(value.dtype, value.shape)}"
        origin = self.origin_of(key.value, axis)
        if origin:
            return f"{text} (from {origin})"
        return text

    def gathered(self, source: Frame | None, axes: Sequence[str] | None = None) -> str:
        """A sentence about the largest conflict at a source line, over any of `axes`
        (`None`: of all mesh axes); "" if the line has no such conflict.
        """
        conflicts = [
            conflict
            for conflict in self.graph.conflicts
            if self.lines[conflict.operation] == source
        ]
        if axes is not None:
            conflicts = [conflict for conflict in conflicts if conflict.axis in axes]
        if not conflicts:
            return ""
        return self.sentence(max(conflicts, key=self._gathered_bytes))

    def annotated(self, row: TrafficRow) -> TrafficRow:
        """The row with the reason for its collective in the note."""
        gathered = self.gathered(row.source, row.axes)
        summed = self._summed(row.source, row.axes)
        if row.kind == "all-reduce":
            reason = summed or gathered
        else:
            reason = gathered or summed
        reason = reason or "why: not known at its line"
        note = f"{row.note}; {reason}" if row.note else reason
        return dataclasses.replace(row, note=note)

    def _summed(self, source: Frame | None, axes: Sequence[str]) -> str:
        """A sentence about an all-reduce at a source line. It names a dimension that is
        summed and is sharded over one of `axes`. It is "" if the line has no such
        dimension. The graph has, for each operation, its dimensions with their factors
        in the operation's sharding rule; a reduction sums over some factors.
        """
        for number, operation in enumerate(self.graph.operations):
            if self.lines[number] != source or not operation.factors.reduction:
                continue
            for key, factor in self.graph.factors[number]:
                if factor not in operation.factors.reduction:
                    continue
                for axis in self.graph.axes_of(key):
                    if axis in axes:
                        return self._sum_sentence(operation, key, axis)
        return ""

    def _sum_sentence(self, operation: Operation, key: DimKey, axis: str) -> str:
        return (
            f"summed over {axis}: {self._dimension_text(key, axis)} is sharded over it;"
            f" {operation.name} sums it"
        )


def axis_of(axis: str) -> str:
    """The mesh axis that contains a sub-axis: `data` for `data:(1)2`."""
    return axis.partition(":")[0]
