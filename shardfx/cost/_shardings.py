"""The sharding of every array of a step, and the origin of each of its mesh axes: an
argument, result or constraint.
"""

import dataclasses
import functools as ft
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._ground.errors import UnknownPathError
from .._ground.spec import DType, bits, canonical_entry, entries_of, entry_axes
from .._ground.text import (
    array_text,
    bytes_text,
    first_lines,
    html_text,
    plural,
    printable,
    spec_text,
    table,
    together,
)
from .._rules import near
from .._step import (
    Fault,
    Frame,
    Phase,
    Platform,
    Step,
    fault_records,
    lines_of,
    matches_operation,
    name_stacks,
    own_line,
    phase_of,
    place_text,
    platform_of,
    program_of,
    step_of,
)
from ..topology import MeshSpec
from ._memory import LiveArray
from ._propagation import Conflict, DimKey, Graph, Stop
from ._traffic_rows import Traffic, TrafficRow


# The largest number of rows in a printed table.
_MOST = 20


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of one mesh axis in the sharding of an array.

    **Arguments:**

    - `axis`: the mesh axis. A sub-axis has Shardy's notation, "fsdp:(1)2".
    - `by`: the argument, result or constraint whose sharding has the axis:
      "params/layers/up", "the constraint at
        train.py:41".
    - `chain`: the lines of your program over which the axis propagated, from the origin
      to the array.
    """

    __module__ = "shardfx.cost"

    axis: str
    by: str
    chain: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class MissedAxis:
    """A mesh axis that could shard a dimension of an array and does not.

    **Arguments:**

    - `axis`, `dim`: the mesh axis, and the number of the dimension.
    - `by`: the argument, result or constraint whose sharding has the axis on this
      dimension.
    - `first`: the argument, result or constraint from which the axis shards another
      dimension instead; "" if the axis
        shards no dimension.
    - `line`: the line of your program that computes the array to constrain, where the
      axis stopped propagating.
    - `shape`, `dtype`, `spec`: the shape and dtype of this array, and its spec with the
      axis added.
    """

    __module__ = "shardfx.cost"

    axis: str
    dim: int
    by: str
    first: str
    line: Frame | None
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec

    @property
    def change(self) -> str:
        """The sharding constraint that shards the array over the mesh axis, as code."""
        return f"constrain(x, jax.P{entries_of(self.spec)!r}, plan)"

    @property
    def where(self) -> str:
        """The text of the array to constrain, with the line of your program that
        computes it.
        """
        return f"{array_text(self.dtype, self.shape)} of {place_text(self.line)}"

    def __str__(self) -> str:
        lost = f"{self.first} took it first" if self.first else "it did not propagate"
        return (
            f"{self.axis} could shard dimension {self.dim}: {self.by} has it there, and"
            f" {lost}. Constrain the {self.where}: {self.change}"
        )


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array of a step, and its sharding.

    **Arguments:**

    - `source`: the innermost line of your own program that computes the array; `None`
      if it is not known.
    - `operation`: StableHLO's name of the operation that computes the array, such as
      "dot_general".
    - `phase`: "forward", "backward" or "recomputed"; "" if JAX does not name the pass.
    - `loop`: the line of the innermost loop that computes the array in each iteration;
      `None` outside of loops.
    - `shape`, `dtype`, `spec`: the shape of the whole array, its dtype, and its
      PartitionSpec.
    - `bytes_per_device`: the bytes of one device's shard.
    - `origins`: the origin of each mesh axis in `spec`.
    - `number`: the number of the array in the step.
    """

    __module__ = "shardfx.cost"

    source: Frame | None
    operation: str
    phase: Phase
    loop: Frame | None
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec
    bytes_per_device: int
    origins: tuple[Origin, ...]
    number: int = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class StepShardings:
    """The sharding of every array of a step, a row for each array; returned by
    [`shardfx.cost.shardings`][].

    `str(...)` is a table with a row for each line of your program, the largest first.

    **Arguments:**

    - `rows`: the arrays that operations compute, sorted by their bytes on one device,
      the largest first.
    - `mesh`: the mesh of the step.
    - `notes`: further notes.
    """

    __module__ = "shardfx.cost"

    rows: tuple[ArrayRow, ...]
    mesh: MeshSpec
    notes: tuple[str, ...]
    _known: "_Explainer" = dataclasses.field(repr=False, compare=False)

    def at(self, line: str) -> "StepShardings":
        """The rows of the arrays that one source line computes.

        **Arguments:**

        - `line`: a file and a line, "train.py:41".

        **Raises:**

        `UnknownPathError` if that line computes no array.
        """
        lines: dict[str, list[ArrayRow]] = together(
            self.rows, lambda row: row.source.place if row.source else ""
        )
        if line not in lines:
            raise UnknownPathError(
                "no array of the step is made at"
                f" {line!r:.80}{near(line, [*filter(None, lines)])}."
            )
        return dataclasses.replace(self, rows=tuple(lines[line]))

    def of(self, path: str) -> "StepShardings":
        """The rows of the arrays that have a mesh axis from one argument or result.

        **Arguments:**

        - `path`: the path of the argument or result, such as "params/layers/up".

        **Raises:**

        `UnknownPathError` if no array has a mesh axis from this argument or result.
        """
        names = {origin.by for row in self.rows for origin in row.origins}
        if path not in names:
            raise UnknownPathError(
                "no array of the step has an axis from"
                f" {path!r:.80}{near(path, sorted(names))}."
            )
        found = (
            row for row in self.rows if any(origin.by == path for origin in row.origins)
        )
        return dataclasses.replace(self, rows=tuple(found))

    def replicated(self, *, least_bytes: int = 0) -> "StepShardings":
        """The rows of the arrays that are replicated over at least one mesh axis, the
        largest first.

        **Arguments:**

        - `least_bytes`: the fewest bytes of an array on one device; smaller arrays are
          left out.
        """
        axes = {axis for axis, size in self.mesh.shape.items() if size > 1}
        large = (row for row in self.rows if row.bytes_per_device >= least_bytes)
        found = (row for row in large if axes > {origin.axis for origin in row.origins})
        return dataclasses.replace(self, rows=tuple(found))

    def missed_axes(self, row: ArrayRow) -> tuple[MissedAxis, ...]:
        """The mesh axes that could shard the array of a row and do not, each with the
        constraint that would add it.
        """
        return tuple(self._known.missed_axes(row))

    @property
    def conflicts(self) -> tuple[str, ...]:
        """A sentence for each operation in which a mesh axis shards two dimensions that
        cannot both be sharded over it. One of the two arrays is gathered.
        """
        return self._known.conflicts

    @property
    def known_faults(self) -> tuple[str, ...]:
        """A sentence for each source line with an operation that XLA's partitioner is
        known to compute wrongly where arrays are sharded in this way, in some programs.

        A fault that was run with the installed JAX and was right is left out.
        [`shardfx.testing.check_step`][] says whether this step is wrong.
        """
        return self._known.known_faults

    def annotate(self, traffic: Traffic) -> Traffic:
        """A copy of the traffic in which each row's note gives the reason for the
        collective.

        **Arguments:**

        - `traffic`: the traffic of the same step, from [`shardfx.cost.estimate`][] or
          [`shardfx.cost.traffic`][]. The
            reason for a row is found by its source line and mesh axes.
        """
        return dataclasses.replace(
            traffic, rows=tuple(map(self._known.annotated, traffic.rows))
        )

    def of_held(self, array: LiveArray) -> tuple[ArrayRow | None, str]:
        """The row of an array in memory, by source line and size, and the reason why
        the array is not sharded further. `None` and "" if they are not found.
        """
        size, own = (
            math.prod(array.buffer.shape),
            (row for row in self.rows if row.source == array.source),
        )
        alike = (
            row for row in own if row.bytes_per_device * 8 // bits(row.dtype) == size
        )
        row = min(alike, key=lambda row: row.phase != array.phase, default=None)
        if row is None:
            return None, self._known.gathered(array.source)
        return row, next(map(str, self.missed_axes(row)), "")

    def to_json(self) -> str:
        """The rows as JSON text: a list with an object for each row."""
        return json.dumps([_json_row(row) for row in self.rows])

    def __str__(self) -> str:
        lines = {row.source for row in self.rows}
        # For one line, a row for each kind of array; for several lines, the largest
        # array of each.
        kinds: dict[object, ArrayRow] = {}
        for row in self.rows:
            kinds.setdefault(
                (row.shape, row.spec, row.phase) if len(lines) == 1 else row.source, row
            )
        shown = [*kinds.values()][:_MOST]
        header = ("bytes/device", "array", "spec", "axes from", "pass", "source")
        below = (
            f"{plural(len(self.rows), 'array')} of {plural(len(lines), 'line')} on"
            f" {self.mesh}"
        )
        missed = self.missed_axes(shown[0]) if len(lines) == 1 else ()
        text = [
            *table([header, *map(_cells, shown)], right={"bytes/device"}),
            below,
            *self.notes,
        ]
        return "\n".join([*text, *(f"  {one}" for one in missed)])

    __repr__ = first_lines

    _repr_html_ = html_text


def shardings(
    step: object,
    *args: object,
    compiler: Platform | str = "tpu",
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> StepShardings:
    """The sharding of every array of a step. Each of its mesh axes comes from an
    argument, a result or a constraint.

    XLA's own Shardy pass runs on the step as XLA receives it. Nothing is compiled, and
    no device is needed.

    **Arguments:**

    - `step`, `args`, `compiler`, `mesh`: the step, its arguments, the platform and the
      mesh, as in
        [`shardfx.cost.estimate`][].

    **Returns:**

    A [`shardfx.cost.StepShardings`][].

    **Raises:**

    The errors of [`shardfx.cost.estimate`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.cost import shardings

        mesh = MeshSpec({"fsdp": 8})  # no devices
        w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        w, x = (plan(a, mesh, paths=PathRules.parse(".*->fsdp")).structs for a in (w, x))
        (row,) = shardings(lambda w, x: x @ w, w, x, compiler="cpu").rows
        assert row.spec[0] == "fsdp" and row.origins[0].by == "x"
        ```
    """
    return shardings_of(step_of(step, args, mesh), platform_of(compiler))


def shardings_of(
    step: Step, platform: Platform, module: object = None
) -> StepShardings:
    """The shardings of a traced step. If `module` is given, it replaces the step's own
    StableHLO module.
    """
    known = _Explainer(
        step, Graph(program_of(step.propagated(platform, module=module)))
    )
    notes = (_INSIDE,) if None in known.array_rows else ()
    rows = sorted(
        (row for row in known.array_rows if row and row.shape),
        key=lambda row: -row.bytes_per_device,
    )
    return StepShardings(tuple(rows), step.mesh, notes, known)


class _Explainer:
    """A step after Shardy's propagation, with methods that explain its shardings in
    sentences. In a conflict, two arrays are sharded over one mesh axis, and one of them
    is gathered.
    """

    def __init__(self, step: Step, graph: Graph):
        self.step, self.graph = step, graph
        self.sizes = dict(step.mesh.shape)
        # The line of the user's program for each operation; `None` if it is not known.
        self.lines = [own_line(lines_of(one.location)) for one in graph.operations]

    @ft.cached_property
    def array_rows(self) -> list[ArrayRow | None]:
        """A row for each array that an operation computes, or `None` for an array
        inside a `shard_map`.
        """
        made = enumerate(zip(self.graph.operations, self.loops, strict=True))
        return [
            self._row(at, out, loop)
            for at, (one, loop) in made
            if one.name not in _NO_ROW
            for out in one.outs
        ]

    def _row(self, at: int, out: int, loop: Frame | None) -> ArrayRow | None:
        value, made, shardy = (
            self.graph.values[out],
            self.graph.operations[at],
            self.graph.shardings[out],
        )
        stack = " ".join(name_stacks(made.location))
        if value.sharding is None and "shard_map" in stack:
            return None
        axes = [axis for own in shardy.dims for axis in own]
        origins = tuple(
            Origin(
                axis, self.name(shardy.origins.get(axis, "")), self._chain(out, axis)
            )
            for axis in axes
        )
        spec = PartitionSpec(
            *(canonical_entry(tuple(map(_axis_of, own))) for own in shardy.dims)
        )
        described = (value.shape, value.dtype, spec, self._bytes(out), origins, out)
        return ArrayRow(self.lines[at], made.name, phase_of(stack), loop, *described)

    def _bytes(self, number: int) -> int:
        """The bytes of one device's shard of an array, with padding if the shards do
        not divide the shape evenly.
        """
        value = self.graph.values[number]
        cuts = [
            math.prod(map(self._size, own)) for own in self.graph.shardings[number].dims
        ] or [1] * len(value.shape)
        part = math.prod(
            -(-size // cut) for size, cut in zip(value.shape, cuts, strict=True)
        )
        return -(-part * bits(value.dtype) // 8)

    def _size(self, axis: str) -> int:
        return int(axis.rpartition(")")[2]) if ":" in axis else self.sizes[axis]

    @property
    def loops(self) -> Iterator[Frame | None]:
        """Yields the source line of the innermost loop around each operation; `None`
        outside of loops.
        """
        around = []
        for made in self.graph.operations:
            is_within = made.location in around
            if made.name == "return" and is_within:
                del around[around.index(made.location) :]
            elif (
                made.name == "carry"
                and not is_within
                and "while" in "".join(name_stacks(made.location))
            ):
                around.append(made.location)
            yield own_line(lines_of(around[-1])) if around else None

    def _chain(self, number: int, axis: str) -> tuple[Frame, ...]:
        lines = (self.lines[at] for at in self.graph.chain(number, axis))
        return tuple(line for line, _ in itertools.groupby(lines) if line is not None)

    def name(self, origin: str) -> str:
        """The name of a mesh axis's origin, such as "params/w", "result 0/w" or "the
        constraint at a.py:4". `origin` is Shardy's text for it, such as "input: 0".
        """
        kind, _, number = origin.partition(": ")
        if kind == "input":
            one = self.step.arguments[int(number)]
            return one.path or one.name
        if kind == "output":
            return f"result {self.results[int(number)]}".rstrip()
        if origin in self.graph.constraints:
            return self._constraint(self.graph.constraints[origin][0])
        return origin

    def _constraint(self, value: int) -> str:
        return f"the constraint at {place_text(self.lines[self.graph.makers[value]])}"

    @ft.cached_property
    def results(self) -> tuple[str, ...]:
        return self.step.result_paths

    def origin_of(self, value: int, axis: str) -> str:
        """The name of the argument, result or constraint from which array number
        `value` has a mesh axis.
        """
        origin = self.graph.shardings[value].origins.get(axis, "")
        if origin != "self":
            return self.name(origin)
        is_made = value in self.graph.makers
        return (
            self._constraint(value)
            if is_made
            else self.name(f"input: {self.graph.program.arguments.index(value)}")
        )

    def missed_axes(self, row: ArrayRow) -> Iterator[MissedAxis]:
        for axis, size in self.sizes.items():
            stop = self.graph.stop_of(row.number, axis) if size > 1 else None
            if stop is not None:
                others = math.prod(
                    self._size(own)
                    for own in self.graph.axes_of(stop.last)
                    if own != axis
                )
                if (
                    self.graph.values[stop.last.value].shape[stop.last.dim]
                    % (others * size)
                    == 0
                ):
                    yield self._missed_axis(axis, stop)

    def _missed_axis(self, axis: str, stop: Stop) -> MissedAxis:
        last, near = stop.last.value, stop.near.value
        first = (
            self.origin_of(last, axis)
            if any(axis in own for own in self.graph.shardings[last].dims)
            else ""
        )
        value, dims = self.graph.values[near], self.graph.shardings[near].dims
        entries = [
            [_axis_of(one) for one in own if _axis_of(one) != axis]
            for own in dims or [()] * len(value.shape)
        ]
        entries[stop.near.dim].append(axis)
        spec = PartitionSpec(*map(canonical_entry, entries))
        line = self.lines[self.graph.makers.get(near, stop.operation)]
        by = self.origin_of(stop.with_axis.value, axis)
        return MissedAxis(
            axis, stop.dim, by, first, line, value.shape, value.dtype, spec
        )

    @ft.cached_property
    def conflicts(self) -> tuple[str, ...]:
        largest = sorted(
            self.graph.conflicts, key=lambda one: -self._bytes(one.moved.value)
        )
        return tuple(
            dict.fromkeys(
                f"{place_text(self.lines[one.operation])}: {self.sentence(one)}"
                for one in largest
            )
        )

    @ft.cached_property
    def known_faults(self) -> tuple[str, ...]:
        cuts = {number: one.dims for number, one in enumerate(self.graph.shardings)}
        sentences: dict[str, None] = {}
        for fault in fault_records():
            if fault.operation is None or fault.is_right_with(jax.__version__):
                continue
            for at, made in enumerate(self.graph.operations):
                is_named = made.name in fault.operations
                if is_named and matches_operation(
                    fault.operation, made, self.graph.values, cuts, self.sizes
                ):
                    sentences[self._fault_sentence(fault, at)] = None
        return tuple(sentences)

    def _fault_sentence(self, fault: Fault, at: int) -> str:
        return (
            f"{place_text(self.lines[at])}: {self.graph.operations[at].name}:"
            f" {fault.pattern} is computed wrongly in some programs"
            f" ({fault.versions_text}); run `shardfx.testing.check_step`. It is mended"
            f" by {fault.mended_by}"
        )

    def sentence(self, one: Conflict) -> str:
        """A sentence about a conflict, with the two arrays that are sharded over one
        mesh axis.
        """
        made = self.graph.operations[one.operation]
        both = " and ".join(self._text(dim, one.axis) for dim in (one.kept, one.moved))
        return (
            f"gathered over {one.axis}: {both} are sharded over it, and the {made.name}"
            " keeps the first"
        )

    def _text(self, dim: DimKey, axis: str) -> str:
        value = self.graph.values[dim.value]
        by = self.origin_of(dim.value, axis)
        return (
            f"dimension {dim.dim} of"
            f" {array_text(value.dtype, value.shape)}{f' (from {by})' if by else ''}"
        )

    def gathered(self, source: Frame | None, axes: Sequence[str] | None = None) -> str:
        """A sentence about the largest conflict at a source line, over any of `axes`
        (`None`: of all mesh axes); "" if the line has no such conflict.
        """
        own = [
            one for one in self.graph.conflicts if self.lines[one.operation] == source
        ]
        own = [one for one in own if axes is None or one.axis in axes]
        return (
            self.sentence(max(own, key=lambda one: self._bytes(one.moved.value)))
            if own
            else ""
        )

    def annotated(self, row: TrafficRow) -> TrafficRow:
        gathered, summed = (
            self.gathered(row.source, row.axes),
            self._summed(row.source, row.axes),
        )
        why = (
            summed or gathered if row.kind == "all-reduce" else gathered or summed
        ) or "why: not known at its line"
        return dataclasses.replace(row, note="; ".join(filter(None, (row.note, why))))

    def _summed(self, source: Frame | None, axes: Sequence[str]) -> str:
        """A sentence about an all-reduce at a source line. It names a dimension that is
        summed and is sharded over one of `axes`. It is "" if the line has no such
        dimension.
        """
        for at, made in enumerate(self.graph.operations):
            if made.factors.reduction and self.lines[at] == source:
                for dim, factor in self.graph.factors[at]:
                    axis = next(
                        (one for one in self.graph.axes_of(dim) if one in axes), None
                    )
                    if axis is not None and factor in made.factors.reduction:
                        return (
                            f"summed over {axis}: {self._text(dim, axis)} is sharded"
                            f" over it; {made.name} sums it"
                        )
        return ""


_INSIDE = "Arrays inside a `shard_map` are sharded by its specs, and have no rows."
# Operations that compute no new array.
_NO_ROW = ("carry", "return", "use", "sharding_constraint", "data_flow_edge")


def _axis_of(axis: str) -> str:
    """The mesh axis that contains a sub-axis: `data` for `data:(1)2`."""
    return axis.partition(":")[0]


def _cells(row: ArrayRow) -> tuple[str, ...]:
    by = together(row.origins, lambda one: printable(one.by))
    origins = "; ".join(
        f"{', '.join(one.axis for one in own)}: {name or '?'}"
        for name, own in by.items()
    )
    array = (
        array_text(row.dtype, row.shape),
        spec_text(entries_of(row.spec)),
        origins or "-",
    )
    phase = ", loop ".join(
        filter(None, (row.phase or "-", row.loop and row.loop.place))
    )
    return bytes_text(row.bytes_per_device), *array, phase, place_text(row.source)


def _json_row(row: ArrayRow) -> dict[str, Any]:
    return {
        "line": row.source.place if row.source else None,
        "operation": row.operation,
        "phase": row.phase,
        "loop": row.loop.place if row.loop else None,
        "shape": row.shape,
        "dtype": str(row.dtype),
        "spec": [list(entry_axes(entry)) for entry in entries_of(row.spec)],
        "bytes_per_device": row.bytes_per_device,
        "origins": {
            one.axis: {"by": one.by, "chain": [frame.place for frame in one.chain]}
            for one in row.origins
        },
    }
