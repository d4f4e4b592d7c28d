"""Whether a step fits a chip's memory: the bytes of each group of arrays, and the
changes that would make it fit.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from jax.sharding import AbstractMesh, Mesh

from .. import chips
from .._ground.errors import LeafTypeError
from .._ground.misuse import called
from .._ground.spec import array_bytes, shard_counts
from .._ground.text import bytes_text, first_lines, html_table, printable, table
from .._plan import ShardPlan
from .._step import is_traced, padded, place_text, step_of
from ..topology import MeshSpec
from ._changes import Change, batch_of, changes_of
from ._compile_for import CompiledFor, memory_of
from ._counted import StepOnChip
from ._fit_rows import (
    FitRow,
    GroupBytes,
    argument_rows,
    compiled_rows,
    largest_rows_first,
    temporary_rows,
    tiles_notes,
)
from ._foreseen import TEMPORARIES
from ._large_arrays import (
    LargeArray,
    gradient_shapes,
    large_array,
    merged_arrays,
    peak_arrays,
)
from ._libtpu import why_foreseen
from ._memory import Memory
from ._refuted import warn_if_refuted
from ._shardings import StepShardings


Basis = Literal["compiled", "foreseen", "arguments"]

_LARGEST = 8


@runtime_checkable
class _Measured(Protocol):
    """A compiled step, recognized by its method `memory_analysis`."""

    def memory_analysis(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Fit:
    """The memory that a step needs on a chip; returned by [`shardfx.cost.fit`][].
    `str(...)` is a table.

    **Arguments:**

    - `rows`: the bytes of each group of arrays, the largest first. Their sum is
      `peak_bytes`.
    - `chip`: the chip.
    - `basis`: the source of the numbers. "compiled": the compiler's own assignment of
      memory. "foreseen": live ranges in the program of XLA's partitioner. "arguments":
      a plan without a step, so only the plan's arrays are counted.
    - `largest`: the largest arrays in memory at the peak.
    - `notes`: further notes.
    - `on_chip_bytes`: the bytes of on-chip memory that the program uses beside; 0 if
      they are not known.
    - `out_of_memory`: libtpu's own error for a step that does not fit, or "".

    It can be pickled. `changes` and `peak_arrays` go along if they were read before;
    else, as all that needs the step, they raise `ProgramError` in another process.
    """

    __module__ = "shardfx.cost"

    rows: tuple[FitRow, ...]
    chip: chips.Chip
    basis: Basis
    largest: tuple[LargeArray, ...] = ()
    notes: tuple[str, ...] = ()
    on_chip_bytes: int = 0
    out_of_memory: str = ""
    _chip_step: StepOnChip | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __deepcopy__(self, memo: object) -> "Fit":
        # Nothing of it changes, and JAX's traces cannot be copied.
        return self

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes in one device's memory at one time during a step."""
        return sum(row.bytes for row in self.rows)

    @property
    def usable_bytes(self) -> int:
        """The bytes of one device's memory that a program may use."""
        return self.chip.usable_hbm_bytes_per_device

    @property
    def headroom_bytes(self) -> int:
        """`usable_bytes` minus `peak_bytes`; negative if the step does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the step fits. If `peak_bytes` is foreseen, it can be wrong near the
        limit; see `is_close`.
        """
        return self.headroom_bytes >= 0 and not self.out_of_memory

    @property
    def expected_bytes(self) -> tuple[int, int]:
        """The least and the most bytes of `peak_bytes` as libtpu would count it, for 95
        of 100 steps. Both are `peak_bytes` if it is not foreseen.
        """
        if self.basis != "foreseen":
            return self.peak_bytes, self.peak_bytes
        exact = sum(row.bytes for row in self.rows if row.exact)
        least, most = TEMPORARIES.of(self.peak_bytes - exact)
        return exact + least, exact + most

    @property
    def is_close(self) -> bool:
        """Whether `peak_bytes` is foreseen and `usable_bytes` lies within
        `expected_bytes`.

        Only a compiler's count decides whether such a step fits.
        """
        least, most = self.expected_bytes
        return least <= self.usable_bytes < most

    @ft.cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changes to the step that save memory, each with the peak memory after it. The
        largest saving comes first.

        The first access partitions the changed steps. One change, half the batch, also
        traces the step again.
        """
        if self._chip_step is None:
            return ()
        return changes_of(self._chip_step, self.peak_bytes)

    @ft.cached_property
    def peak_arrays(self) -> tuple[LargeArray, ...]:
        """All arrays in memory at the peak, the largest first, each with its sharding.

        The field `why` of each says why the array is not sharded further, if that is
        known. The first access runs Shardy's propagation, as
        [`shardfx.cost.shardings`][] does.
        """
        if self._chip_step is None:
            return ()
        return peak_arrays(self._chip_step)

    @property
    def shardings(self) -> StepShardings | None:
        """The sharding of every array of the step; `None` if there is no step."""
        if self._chip_step is None:
            return None
        return self._chip_step.shardings

    @property
    def batch(self) -> int | None:
        """The number of examples in the step's batch; `None` if it is not known."""
        if self._chip_step is None:
            return None
        return batch_of(self._chip_step)

    def bytes_of(self, group: str) -> int:
        """The bytes of a group of arrays. The group "optimizer" includes all groups
        "optimizer: ...".
        """
        return sum(
            row.bytes
            for row in self.rows
            if row.group == group or row.group.startswith(f"{group}: ")
        )

    def explain(self) -> str:
        """The text of the table, the reasons for the largest arrays' sizes, and all
        changes.
        """
        parts = [str(self)]
        arrays_of_reason: dict[str, dict[str, None]] = {}
        for array in self.peak_arrays[:_LARGEST]:
            text = f"{array.what} of {place_text(array.source)}"
            if array.why:
                arrays_of_reason.setdefault(array.why, {})[text] = None
        reasons = []
        for why, arrays in arrays_of_reason.items():
            reasons.append(f"{', '.join(arrays)}: {why}")
        if reasons:
            parts.append("\n".join(reasons))
        if self.changes:
            parts.append("\n".join(table(_changes_table(self.changes), right=_NUMBERS)))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        # A blank line separates the tables.
        parts = [
            "\n".join([*table(rows, right=_NUMBERS), *below])
            for rows, below in _tables(self)
        ]
        return "\n\n".join(parts) + "".join(
            f"\n{printable(note)}" for note in self.notes
        )

    __repr__ = first_lines

    def _repr_html_(self) -> str:
        parts = [
            html_table(rows, right=_NUMBERS, below=below)
            for rows, below in _tables(self)
        ]
        return "\n".join([*parts, html_table((), below=self.notes)])


@called("fit(step, *args, chip=chip)", compiler='`chip="v5p"`', target='`chip="v5p"`')
def fit(
    step: object,
    *args: object,
    chip: str | chips.Chip = "v5p",
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
    compiled: object = None,
) -> Fit:
    """The memory that a step needs on one device of a chip, by group of arrays, and
    whether the step fits.

    For TPUs, libtpu itself is asked where it is installed (`pip install
    "shardfx[aot]"`): it schedules the program and assigns its memory for a slice that
    is not there, and its code generation is left out. The number is HBM.

    Otherwise temporaries are foreseen: XLA's own partitioner makes the program of one
    device, and the live range of an array ends with the last operation that reads it.
    An array that a fusion computes where it is read takes no memory. The bytes of
    arguments and results are exact and include the padding of the chip's tiles.

    Nothing runs. The group of an argument ("parameters", "batch") follows from its use
    in the step, not from its name.

    **Arguments:**

    - `step`, `args`: a step and its arguments, as in [`shardfx.cost.estimate`][]. Or a
      compiled step without arguments: the memory is then the compiler's count. Or a
      plan without arguments: only the plan's arrays are counted.
    - `chip`: the chip's name, or a [`shardfx.chips.Chip`][].
    - `mesh`: the mesh of the step; by default the mesh of its arguments. Without any
      mesh, the step is one for a single device.
    - `compiled`: the same step, compiled. The peak memory is then the compiler's count,
      and only the savings of changes are estimated.

    **Returns:**

    A [`shardfx.cost.Fit`][].

    It warns with a `WrongNumbersWarning`, as [`shardfx.cost.estimate`][] does.

    **Raises:**

    `ChipError` for an unknown chip; `LeafTypeError` for a step that is no function, no
    compiled step and no plan, and for further arguments beside one of the last two, but
    for a plan's own mesh; the errors of [`shardfx.cost.estimate`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, filter_jit, plan
        from shardfx.cost import fit

        mesh = MeshSpec({"data": 4})
        w = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        x = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
        params = plan(w, mesh, paths=PathRules.parse("w->replicate"))
        batch = plan(x, mesh, paths=PathRules.parse(".*->data"))


        def step(params, batch):
            grad = jax.grad(lambda p: jnp.sum((batch @ p["w"]) ** 2))(params)
            return {"w": params["w"] - 0.1 * grad["w"]}


        jitted = filter_jit(step, out_shardings=params, donate="params")
        found = fit(jitted, params.structs, batch.structs, chip="v5e")
        assert found.fits and found.bytes_of("parameters") == 4096 * 4096 * 4
        print(found)
        ```
    """
    chip = chips.find(chip)
    _require_alone(step, mesh, [*args, compiled])
    if isinstance(step, ShardPlan):
        return _of_plan(step, chip)
    if isinstance(step, CompiledFor) and step.assigned is not None:
        return _of_assigned(step.assigned, chip)
    if isinstance(step, _Measured):
        rows, notes = compiled_rows([], memory_of(step))
        return Fit(rows=rows, chip=chip, basis="compiled", notes=notes)
    if not callable(step) and not is_traced(step) and not args:
        raise LeafTypeError(
            "`step` must be a function, what one compiled to, or a plan, not"
            f" {type(step).__name__}; pass `fit(step, *args, chip=...)`, as the step is"
            " called."
        )
    if compiled is not None and not isinstance(compiled, _Measured):
        raise LeafTypeError(
            f"`compiled` must be a compiled step, not {type(compiled).__name__}; pass"
            " `compiled=compile_for(step, *args, target=...)`."
        )
    traced = step_of(step, args, mesh)
    notes: tuple[str, ...] = ()
    if traced.is_without_mesh:
        traced = traced.on_one_device
        notes = (_ALONE,)
    assigned = compiled.assigned if isinstance(compiled, CompiledFor) else None
    chip_step = StepOnChip(traced, chip, step if args else None, assigned=assigned)
    if chip_step.programs is not None:
        warn_if_refuted(chip_step.programs, chip_step.module)
    rows, arguments = argument_rows(chip_step)
    notes = (*notes, *tiles_notes(chip_step.parameter_bytes, rows, chip))
    shapes = gradient_shapes(chip_step)
    temporaries = [large_array(array, shapes) for array in chip_step.memory.arrays]
    arrays = sorted([*arguments, *temporaries], key=lambda array: -array.bytes)
    largest = tuple(arrays[:_LARGEST])
    if compiled is not None and assigned is None:
        rows, differences = compiled_rows(rows, memory_of(compiled))
        return Fit(
            rows=rows,
            chip=chip,
            basis="compiled",
            largest=largest,
            notes=(*notes, *differences),
            _chip_step=chip_step,
        )
    memory = chip_step.memory
    rows.append(FitRow("results", sum(memory.results), exact=True))
    rows += temporary_rows(temporaries, memory)
    if not memory.is_counted and chip_step.platform == "tpu":
        notes = (*notes, why_foreseen(traced, chip))
    return Fit(
        rows=largest_rows_first(rows),
        chip=chip,
        basis="compiled" if memory.is_counted else "foreseen",
        largest=largest,
        notes=notes,
        on_chip_bytes=memory.on_chip_bytes,
        out_of_memory=memory.out_of_memory,
        _chip_step=chip_step,
    )


def _require_alone(
    counted: object,
    mesh: MeshSpec | Mesh | AbstractMesh | None,
    others: Sequence[object],
) -> None:
    """Raises `LeafTypeError` if `fit` is given `others` than `None`, or another mesh
    than a plan's, beside a plan or a compiled step: they would have no effect.
    """
    is_alone = all(other is None for other in others)
    if mesh is not None:
        is_plan = isinstance(counted, ShardPlan)
        is_alone &= is_plan and MeshSpec.of(mesh).shape == counted.mesh.shape
    if isinstance(counted, ShardPlan | _Measured) and not is_alone:
        name = "plan" if isinstance(counted, ShardPlan) else "compiled"
        raise LeafTypeError(
            f"`fit({name}, ...)` counts what the {type(counted).__name__} holds, and"
            f" takes only the chip beside it: write `fit({name}, chip=...)`, or pass the"
            " step, `fit(step, *args, chip=...)`."
        )


def _of_assigned(memory: Memory, chip: chips.Chip) -> Fit:
    """The memory of a program that libtpu compiled."""
    arrays = [large_array(array, set()) for array in memory.arrays]
    rows = [
        FitRow("arguments", sum(memory.arguments), exact=True),
        FitRow("results", sum(memory.results), exact=True),
        *temporary_rows(arrays, memory),
    ]
    return Fit(
        rows=largest_rows_first(rows),
        chip=chip,
        basis="compiled",
        largest=tuple(arrays[:_LARGEST]),
        on_chip_bytes=memory.on_chip_bytes,
        out_of_memory=memory.out_of_memory,
    )


def _of_plan(plan: ShardPlan, chip: chips.Chip) -> Fit:
    """The memory of the arrays of a plan, with a row for each first name of the arrays'
    paths.
    """
    sums = GroupBytes()
    on_device: list[LargeArray] = []
    sizes = dict(plan.mesh.shape)
    for leaf in plan.leaves:
        counts = shard_counts(leaf.spec, len(leaf.shape), sizes)
        shard_shape = []
        for size, count in zip(leaf.shape, counts, strict=True):
            shard_shape.append(-(-size // count))
        nbytes = array_bytes(padded(tuple(shard_shape), chip.tile), leaf.dtype)
        group, _, _ = leaf.path.partition("/")
        on_host = leaf.memory_kind not in (None, "device")
        sums.add(group, nbytes, on_host=on_host)
        if not on_host:
            on_device.append(LargeArray(what=leaf.path, bytes=nbytes, group=group))
    return Fit(
        rows=largest_rows_first(sums.rows),
        chip=chip,
        basis="arguments",
        largest=tuple(merged_arrays(on_device)[:_LARGEST]),
    )


_ALONE = (
    "no array of the step has a sharding: this is the memory of the whole step on one"
    " device."
)
_NUMBERS = {"bytes/device", "share", "largest", "saves", "then"}
_Rows: TypeAlias = list[tuple[str, ...]]


def _tables(fitted: Fit) -> list[tuple[_Rows, list[str]]]:
    """The table of the groups of arrays, and the table of the largest arrays, if there
    are any. Each table is a pair: its rows, and the lines of text below it.
    """
    groups: _Rows = [("group", "bytes/device", "share", "how")]
    for row in fitted.rows:
        share = f"{row.bytes / max(1, fitted.peak_bytes):.0%}"
        basis = "exact" if row.exact else "foreseen"
        if row.host_bytes:
            basis += f", {bytes_text(row.host_bytes)} in host memory"
        groups.append((row.group, bytes_text(max(row.bytes, 0)), share, basis))
    tables = [(groups, _verdict(fitted))]
    if fitted.largest:
        arrays: _Rows = [("largest", "group", "pass", "array on one device", "line")]
        for array in fitted.largest:
            line = "-" if array.source is None else array.source.place
            size = bytes_text(array.bytes)
            phase = array.phase or "-"
            arrays.append((size, array.group, phase, array.what, line))
        tables.append((arrays, []))
    return tables


def _changes_table(changes: Sequence[Change]) -> _Rows:
    """The table of changes that save memory, with its header."""
    rows: _Rows = [("saves", "then", "fits", "one change", "as code")]
    for change in changes:
        saves = bytes_text(change.saves_bytes)
        peak = bytes_text(change.peak_bytes)
        fits = "yes" if change.fits else "no"
        rows.append((saves, peak, fits, change.what, change.how))
    return rows


def _verdict(fitted: Fit) -> list[str]:
    """The lines below the table of groups: whether the step fits, and by how much."""
    usable = bytes_text(fitted.usable_bytes)
    peak = bytes_text(fitted.peak_bytes)
    if fitted.basis == "arguments":
        return [
            f"The arrays alone take {peak} of {usable} on {fitted.chip.name};"
            " activations are not counted."
        ]
    verdict = "fits" if fitted.fits else "does not fit"
    if fitted.is_close:
        verdict = f"MAY OR MAY NOT fit: as foreseen, it {verdict}"
    side = "left" if fitted.fits else "too much"
    margin = f"{bytes_text(abs(fitted.headroom_bytes))} {side}"
    lines = [
        f"{peak} at the worst moment: it {verdict} {fitted.chip.name}, where a program"
        f" may fill {usable} ({margin})."
    ]
    if fitted.on_chip_bytes:
        lines.append(
            f"Beside it, {bytes_text(fitted.on_chip_bytes)} of on-chip memory are used."
        )
    if fitted.out_of_memory:
        lines.append(f"libtpu says: {fitted.out_of_memory}")
    if fitted.basis == "foreseen":
        lines.append(_expectation(fitted))
    if fitted.is_close:
        lines.append("`compile_for(step, *args, ...)` decides.")
    return lines


def _expectation(fitted: Fit) -> str:
    """A sentence about the bytes to expect in the place of foreseen ones."""
    least, most = map(bytes_text, fitted.expected_bytes)
    return (
        f"Foreseen: expect {least} to {most}. libtpu's temporaries are between"
        f" {TEMPORARIES.least:g} and {TEMPORARIES.most:g} times the foreseen ones in"
        f" 95 % of steps, less what it keeps on chip, by {TEMPORARIES.steps} measured"
        " steps."
    )
