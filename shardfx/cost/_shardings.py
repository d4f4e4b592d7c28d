"""The sharding of every array of a step, and the origin of each of its mesh axes: an
argument, result or constraint.
"""

import dataclasses
import json
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from .._ground.errors import LeafTypeError, UnknownPathError, check_type
from .._ground.misuse import called
from .._ground.spec import bits, entries_of, entry_axes
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
from .._step import Platform, Step, place_text, platform_of, program_of, step_of
from ..topology import MeshSpec
from ._array_rows import ArrayRow, MissedAxis
from ._elsewhere import StepElsewhere
from ._explainer import Explainer, axis_of
from ._memory import LiveArray
from ._propagation import Graph
from ._traffic_rows import Traffic


# The largest number of rows in a printed table.
_MOST = 20
_INSIDE = "Arrays inside a `shard_map` are sharded by its specs, and have no rows."


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

    It can be pickled. What needs the step, such as `missed_axes` and `conflicts`, raises
    `ProgramError` in another process.
    """

    __module__ = "shardfx.cost"

    rows: tuple[ArrayRow, ...]
    mesh: MeshSpec
    notes: tuple[str, ...]
    _explainer: Explainer | StepElsewhere = dataclasses.field(repr=False, compare=False)

    def __deepcopy__(self, memo: object) -> "StepShardings":
        # Nothing of it changes, and JAX's traces cannot be copied.
        return self

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
                f" {line!r:.80}{near(str(line), [*filter(None, lines)])}."
            )
        return dataclasses.replace(self, rows=tuple(lines[line]))

    def of(self, path: str) -> "StepShardings":
        """The rows of the arrays that have a mesh axis from one argument or result.

        **Arguments:**

        - `path`: the path of the argument or result, such as "params/layers/up".

        **Raises:**

        `UnknownPathError` if no array has a mesh axis from this argument or result.
        """
        names = set().union(*map(_names_of_origins, self.rows))
        if path not in names:
            raise UnknownPathError(
                "no array of the step has an axis from"
                f" {path!r:.80}{near(str(path), sorted(names))}."
            )
        rows = [row for row in self.rows if path in _names_of_origins(row)]
        return dataclasses.replace(self, rows=tuple(rows))

    def replicated(self, *, least_bytes: int = 0) -> "StepShardings":
        """The rows of the arrays that are replicated over at least one mesh axis, the
        largest first.

        **Arguments:**

        - `least_bytes`: the fewest bytes of an array on one device; smaller arrays are
          left out.
        """
        axes = {axis for axis, size in self.mesh.shape.items() if size > 1}
        rows = []
        for row in self.rows:
            sharding_axes = {axis_of(origin.axis) for origin in row.origins}
            is_replicated = not axes <= sharding_axes
            if is_replicated and row.bytes_per_device >= least_bytes:
                rows.append(row)
        return dataclasses.replace(self, rows=tuple(rows))

    def missed_axes(self, row: ArrayRow) -> tuple[MissedAxis, ...]:
        """The mesh axes that could shard the array of a row and do not, each with the
        constraint that would add it.
        """
        return tuple(self._explainer.missed_axes(row))

    @property
    def conflicts(self) -> tuple[str, ...]:
        """A sentence for each operation in which a mesh axis shards two dimensions that
        cannot both be sharded over it. One of the two arrays is gathered.
        """
        return self._explainer.conflicts

    @property
    def known_faults(self) -> tuple[str, ...]:
        """A sentence for each source line with an operation that XLA's partitioner is
        known to compute wrongly where arrays are sharded in this way, in some programs.

        A fault that was run with the installed JAX and was right is left out.
        [`shardfx.testing.check_step`][] says whether this step is wrong.
        """
        return self._explainer.known_faults

    def annotate(self, traffic: Traffic) -> Traffic:
        """A copy of the traffic in which each row's note gives the reason for the
        collective.

        **Arguments:**

        - `traffic`: the traffic of the same step, from [`shardfx.cost.estimate`][] or
          [`shardfx.cost.traffic`][]. The reason for a row is found by its source line
          and mesh axes.
        """
        check_type(
            what="traffic",
            value=traffic,
            expected=Traffic,
            error=LeafTypeError,
            fix="give what `cost.estimate(step, *args)` returns",
        )
        rows = tuple(map(self._explainer.annotated, traffic.rows))
        return dataclasses.replace(traffic, rows=rows)

    def of_held(self, array: LiveArray) -> tuple[ArrayRow | None, str]:
        """The row of an array in memory, by source line and size, and the reason why
        the array is not sharded further. `None` and "" if they are not found. The
        array's shape is that of one shard.
        """
        elements = math.prod(array.buffer.shape)
        alike = []
        for row in self.rows:
            row_elements = row.bytes_per_device * 8 // bits(row.dtype)
            if row.source == array.source and row_elements == elements:
                alike.append(row)
        if not alike:
            return None, self._explainer.gathered(array.source)
        # A row of the array's own pass, if there is one.
        row = min(alike, key=lambda row: row.phase != array.phase)
        missed = self.missed_axes(row)
        return row, str(missed[0]) if missed else ""

    def to_json(self) -> str:
        """The rows as JSON text: a list with an object for each row."""
        return json.dumps([_json_row(row) for row in self.rows])

    def __str__(self) -> str:
        lines = {row.source for row in self.rows}
        # For one line, a row for each kind of array; for several lines, the largest
        # array of each.
        kinds: dict[object, ArrayRow] = {}
        for row in self.rows:
            kind = row.source
            if len(lines) == 1:
                kind = (row.shape, row.spec, row.phase)
            kinds.setdefault(kind, row)
        rows = [*kinds.values()][:_MOST]
        header = ("bytes/device", "array", "spec", "axes from", "pass", "source")
        text = table([header, *map(_cells, rows)], right={"bytes/device"})
        text.append(
            f"{plural(len(self.rows), 'array')} of {plural(len(lines), 'line')} on"
            f" {self.mesh}"
        )
        text += self.notes
        if len(lines) == 1 and isinstance(self._explainer, StepElsewhere):
            text.append("  Axes that are missed are known where the step was traced.")
        elif len(lines) == 1:
            text += [f"  {missed}" for missed in self.missed_axes(rows[0])]
        return "\n".join(text)

    __repr__ = first_lines

    _repr_html_ = html_text


@called(
    "shardings(step, *args)",
    chip='`compiler="tpu"`',
    target='`compiler="tpu"`',
)
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
      mesh, as in [`shardfx.cost.estimate`][].

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
    step: Step,
    platform: Platform,
    module: object = None,
) -> StepShardings:
    """The shardings of a traced step. If `module` is given, it replaces the step's own
    StableHLO module.
    """
    graph = Graph(program_of(step.propagated(platform, module=module)))
    explainer = Explainer(step, graph)
    array_rows = explainer.array_rows
    rows = [row for row in array_rows if row is not None and row.shape]
    rows.sort(key=lambda row: -row.bytes_per_device)
    return StepShardings(
        rows=tuple(rows),
        mesh=step.mesh,
        notes=(_INSIDE,) if None in array_rows else (),
        _explainer=explainer,
    )


def _names_of_origins(row: ArrayRow) -> set[str]:
    return {origin.by for origin in row.origins}


def _cells(row: ArrayRow) -> tuple[str, ...]:
    """The cells of an array's row in the table. Mesh axes of one origin stand together."""
    origins = []
    for name, alike in together(
        row.origins, lambda origin: printable(origin.by)
    ).items():
        axes = ", ".join(origin.axis for origin in alike)
        origins.append(f"{axes}: {name or '?'}")
    phase = row.phase or "-"
    if row.loop is not None:
        phase = f"{phase}, loop {row.loop.place}"
    return (
        bytes_text(row.bytes_per_device),
        array_text(row.dtype, row.shape),
        spec_text(entries_of(row.spec)),
        "; ".join(origins) or "-",
        phase,
        place_text(row.source),
    )


def _json_row(row: ArrayRow) -> dict[str, Any]:
    """A row as data that `json.dumps` takes."""
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
            origin.axis: {
                "by": origin.by,
                "chain": [frame.place for frame in origin.chain],
            }
            for origin in row.origins
        },
    }
