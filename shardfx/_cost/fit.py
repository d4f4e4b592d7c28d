"""Whether a step fits a chip: bytes per device by what they are for, and what would make it fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from .. import chips
from .._arrays.entries import Donate
from .._ground.errors import LeafTypeError
from .._ground.html import html_table
from .._ground.text import array_text, between_numbers, bytes_text, joined, printable, table
from .arguments import Arguments, arguments_of
from .changes import Change, Traced, changes_of, held_bytes, largest_batch, traced_step
from .compile_for import MemoryAnalysis, memory_of
from .frames import Frame, frames_of, is_library
from .memory.liveness import Held
from .memory.program import Op
from .memory.usage import Usage


Basis = Literal["compiled", "estimated", "arguments"]

_LARGEST = 8
# An estimate that is nearer to the limit than this share of the peak does not decide: of the steps that the TPU's
# compiler has counted for the benchmark suite `fit` nearly all are less than 12 % off, and the order in which compilers
# place arrays, which leaves gaps, is not estimated.
_CLOSE = 0.15
_ARGUMENTS_ALONE = "no step was given, so activations are not counted; pass `step=`."


@runtime_checkable
class _Measured(Protocol):
    """A compiled step."""

    def memory_analysis(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class FitRow:
    """Bytes of one group on one device.

    **Arguments:**

    - `group`: "parameters", "gradients", "optimizer: 0/mu" (one row for each moment), "batch", "KV cache", "results"
        (new values beside the old ones), "activations", "copies in other layouts", "temporaries".
    - `bytes`: in the chip's memory, with what its tiles pad.
    - `host_bytes`: in the host's memory, where a plan puts them there.
    - `exact`: whether the compiler says so, or the plan; if not, it is estimated.
    """

    group: str
    bytes: int
    host_bytes: int = 0
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Offender:
    """One array, or several that are alike, that takes much memory at the worst moment.

    **Arguments:**

    - `what`: its path; of an activation its dtype and whole shape, and how the mesh cuts it.
    - `bytes`: on one device.
    - `group`: as in [`shardfx.FitRow`][].
    - `source`: the line of your program that makes it; `None` for an argument.
    """

    what: str
    bytes: int
    group: str
    source: Frame | None = None


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a step needs of a chip's memory; made by [`shardfx.fit`][]. `str(...)` is a table.

    **Arguments:**

    - `rows`: bytes by group, largest first; they add up to `peak_bytes`.
    - `chip`: the chip.
    - `how`: "compiled": the compiler's own numbers; "estimated": arguments as the plans say, the rest from the traced
        step; "arguments": no step was given, and nothing else is counted but gradients.
    - `largest`: the arrays that take most at the worst moment.
    - `changes`: single changes that save memory, and what the peak would be, most saving first.
    - `batch`, `largest_batch`: how many examples there are, and how many would fit; `None` where that is not known.
    - `notes`: what else to know.
    """

    rows: tuple[FitRow, ...]
    chip: chips.Chip
    how: Basis
    largest: tuple[Offender, ...] = ()
    changes: tuple[Change, ...] = ()
    batch: int | None = None
    largest_batch: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """On one device, at the worst moment of a step."""
        return sum(row.bytes for row in self.rows)

    @property
    def usable_bytes(self) -> int:
        """What the chip leaves to a program, on one device."""
        return self.chip.usable_hbm_bytes_per_device

    @property
    def headroom_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits; for an estimate, whether it would if the estimate were exact (see `is_close`)."""
        return self.headroom_bytes >= 0

    @property
    def is_close(self) -> bool:
        """Whether only a compiler can say: it is estimated, and less than 15 % of the peak away from the limit.

        Ask this beside `fits`: a step that is close may fail to compile although `fits` says that it fits.
        """
        return self.how != "compiled" and abs(self.headroom_bytes) < _CLOSE * self.peak_bytes

    def bytes_of(self, group: str) -> int:
        """The bytes of a group, "optimizer" for all its parts."""
        return sum(row.bytes for row in self.rows if row.group == group or row.group.startswith(f"{group}: "))

    def __str__(self) -> str:
        # A blank line between one table, with what is said below it, and the next.
        parts = ["\n".join([*table(rows, right=_NUMBERS), *below]) for rows, below in _tables(self)]
        return "\n\n".join(parts) + "".join(f"\n{printable(note)}" for note in self.notes)

    def _repr_html_(self) -> str:
        parts = [html_table(rows, right=_NUMBERS, below=below) for rows, below in _tables(self)]
        return "\n".join([*parts, html_table((), below=self.notes)])


def fit(
    plans: Any,
    *,
    step: Any = None,
    chip: str | chips.Chip = "v5p",
    args: Sequence[Any] | None = None,
    donate: Donate = "none",
    groups: Sequence[tuple[str, str]] = (),
    compiled: Any = None,
) -> Fit:
    """Whether a step fits a chip, and what would make it fit: bytes per device by group, against usable memory.

    Nothing runs. From a compiled step the numbers are the compiler's. From a function they are estimated: it is traced,
    its values are laid out as the plans, constraints and operations say, and what is live at the worst moment is
    counted, remat respected. Arguments are exact either way, with what the chip's tiles pad. A result lies as the
    argument of its shape and dtype, in their order, unless a jitted step says otherwise.

    **Arguments:**

    - `plans`: of what the step takes: a plan for each argument in order, or by name, or one joined plan
        ([`shardfx.ShardPlan.join`][]). A tree of ShapeDtypeStructs with shardings may stand for a plan.
    - `step`: the function, jitted or not; or what it compiled to.
    - `chip`: its name, or a [`shardfx.chips.Chip`][].
    - `args`: the arguments as trees of arrays or structs, where plans are not enough: a model with functions, say.
    - `donate`: whose memory may be reused, as in [`shardfx.filter_jit`][]; a jitted step knows.
    - `groups`: pairs of a regex, searched in the paths of arrays (`opt/0/mu/layers/up`), and the group they belong to.
        Without them the names of arguments tell: "params" and "model", "opt" and "state", "batch" and "tokens",
        "cache". An optimizer's arrays are told apart by what stands before the path of a parameter.
    - `compiled`: what the step compiled to, beside the function: then the peak is the compiler's, and what changes
        would save is estimated.

    **Returns:**

    A [`shardfx.Fit`][].

    **Raises:**

    - `ChipError` for a chip that is not known.
    - `PlanMismatchError` for plans of different meshes, and for arguments that are not the planned ones.
    - `LeafTypeError` for a step that is neither compiled nor a function.
    - What the step raises when it is traced.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, fit, plan

        mesh = MeshSpec({"data": 4})
        w = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        x = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
        params = plan(w, mesh, paths=PathRules.parse("w->replicate"))
        batch = plan(x, mesh, paths=PathRules.parse(".*->data"))


        def step(params, batch):
            grad = jax.grad(lambda p: jnp.sum((batch @ p["w"]) ** 2))(params)
            return {"w": params["w"] - 0.1 * grad["w"]}


        found = fit({"params": params, "batch": batch}, step=step, chip="v5e")
        assert found.fits and found.bytes_of("parameters") == 4096 * 4096 * 4
        print(found)
        ```
    """
    chip = chips.find(chip)
    step, compiled = (None, step) if isinstance(step, _Measured) else (step, compiled)
    if step is not None and not callable(step):
        raise LeafTypeError(
            f"`step` must be a function, or what one compiled to, not {type(step).__name__}; pass "
            "`filter_jit(step, ...)`, or `filter_jit(step, ...).lower(...).compile()`."
        )
    given = arguments_of(plans, args, step, groups)
    known = None if step is None else traced_step(given, step, chip, donate)
    rows, largest, notes = _rows(given, known, compiled, chip)
    found = Fit(rows, chip, "compiled" if compiled is not None else "arguments" if known is None else "estimated")
    found = dataclasses.replace(found, largest=largest, notes=notes)
    if known is None:
        return dataclasses.replace(found, changes=changes_of(given, None, chip, found.peak_bytes))
    batch, most = largest_batch(known, chip, found.peak_bytes)
    made = changes_of(given, known, chip, found.peak_bytes)
    return dataclasses.replace(found, changes=made, batch=batch, largest_batch=most)


def _rows(
    given: Arguments, known: Traced | None, compiled: Any, chip: chips.Chip
) -> tuple[tuple[FitRow, ...], tuple[Offender, ...], tuple[str, ...]]:
    """The rows, the arrays that take most, and notes."""
    laid = _laid_out(given, compiled, chip)
    sizes: dict[str, list[int]] = {}
    largest: dict[tuple[str, str], Offender] = {}
    for leaf in given.leaves:
        here = held_bytes(leaf, given, laid)
        row = sizes.setdefault(leaf.group, [0, 0])
        row[leaf.on_host] += here
        if not leaf.on_host:
            largest[leaf.path, leaf.group] = Offender(leaf.path, here, leaf.group)
    rows = [FitRow(group, here, host, exact=True) for group, (here, host) in sizes.items()]
    offenders, notes = _alike(largest), []
    usage = None if known is None else known.usage()
    if compiled is not None:
        rows, notes = _compiled_rows(rows, memory_of(compiled))
    elif usage is not None:
        rows.append(FitRow("results", usage.outputs - usage.aliased))
        sums: dict[str, int] = {}
        held = [_offender(one, usage, given) for one in usage.peak.held]
        for one in held:
            sums[one.group] = sums.get(one.group, 0) + one.bytes
        over = sum(sums.values()) - usage.peak.bytes
        # Results that take over the memory of operands are listed beside them: what is shared counts once.
        for group in sorted(sums, key=lambda group: -sums[group]):
            shared = min(over, sums[group])
            sums[group], over = sums[group] - shared, over - shared
        rows += [FitRow(group, count) for group, count in sums.items()]
        offenders += held
    else:
        notes.append(_ARGUMENTS_ALONE)
        if any(leaf.group.startswith("optimizer") for leaf in given.leaves):
            rows.append(FitRow("gradients", sum(row.bytes for row in rows if row.group == "parameters")))
    if usage is not None and compiled is not None:
        offenders += [_offender(one, usage, given) for one in usage.peak.held]
    rows = sorted([row for row in rows if row.bytes or row.host_bytes], key=lambda row: -row.bytes)
    offenders = sorted(offenders, key=lambda one: -one.bytes)[:_LARGEST]
    return tuple(rows), tuple(offenders), tuple(notes)


def _laid_out(given: Arguments, compiled: Any, chip: chips.Chip) -> chips.Chip:
    """The chip, without its tiles where a program was compiled for another that pads nothing."""
    if compiled is None or chip.tile is None:
        return chip
    plain = dataclasses.replace(chip, tile=None)
    measured = compiled.memory_analysis().argument_size_in_bytes
    sums = {
        one: sum(held_bytes(leaf, given, one) for leaf in given.leaves if not leaf.on_host) for one in (chip, plain)
    }
    return min(sums, key=lambda one: abs(sums[one] - measured))


def _compiled_rows(rows: list[FitRow], memory: MemoryAnalysis) -> tuple[list[FitRow], list[str]]:
    notes = []
    rest = memory.argument_size_in_bytes - sum(row.bytes for row in rows)
    if rest > 0:
        rows.append(FitRow("arguments, the rest", rest, exact=True))
    elif rest < 0:
        # The compiler leaves out what the step does not read.
        notes.append(
            f"the program takes {bytes_text(-rest)} less than the plans: it does not read all of its arguments."
        )
        rows.append(FitRow("arguments, not read", rest, exact=True))
    rows.append(FitRow("results", memory.output_size_in_bytes - memory.alias_size_in_bytes, exact=True))
    rows.append(FitRow("temporaries", memory.needed_bytes - sum(row.bytes for row in rows), exact=True))
    return rows, notes


def _alike(found: dict[tuple[str, str], Offender]) -> list[Offender]:
    """One for arrays whose paths differ in numbers only, and that are of one size."""
    groups: dict[tuple[Any, ...], list[Offender]] = {}
    for one in found.values():
        groups.setdefault((between_numbers(one.what), one.bytes, one.group), []).append(one)
    return [
        Offender(joined([one.what for one in these]), sum(one.bytes for one in these), these[0].group)
        for these in groups.values()
    ]


def _offender(held: Held, usage: Usage, given: Arguments) -> Offender:
    value, dims = usage.program.values[held.number], usage.layouts.dims[held.number]
    cut = ",".join("+".join(axes) or "-" for axes in dims)
    what = f"{array_text(value.dtype, value.shape)} cut {cut}" if any(dims) else array_text(value.dtype, value.shape)
    # A gradient has the dimensions of a parameter; those of stacked layers may come in another order.
    ours = [leaf.struct.shape for leaf in given.leaves if leaf.group == "parameters" and len(leaf.struct.shape) > 1]
    is_ours = sorted(value.shape) in map(sorted, ours)
    # A conversion that lies in memory is one that the compiler does ahead of a loop.
    is_copy = held.copy or (held.op is not None and held.op.name == "convert_element_type")
    group = "copies in other layouts" if is_copy else "gradients" if is_ours else "activations"
    return Offender(what, held.bytes, group, _line_of(held.op))


def _line_of(op: Op | None) -> Frame | None:
    """The innermost line of the user's own program."""
    frames = () if op is None or op.source is None else frames_of(op.source.traceback)
    return next((frame for frame in frames if not is_library(frame)), None)


_NUMBERS = {"bytes/device", "share", "largest", "saves", "then"}
_Rows: TypeAlias = list[tuple[str, ...]]


def _tables(found: Fit) -> list[tuple[_Rows, list[str]]]:
    """The groups, the largest arrays and the changes that save memory: each a header and rows, and what is below it."""
    groups: _Rows = [("group", "bytes/device", "share", "how")]
    for row in found.rows:
        share = f"{row.bytes / max(1, found.peak_bytes):.0%}"
        host = f", {bytes_text(row.host_bytes)} in host memory" if row.host_bytes else ""
        groups.append((row.group, bytes_text(max(row.bytes, 0)), share, ("exact" if row.exact else "estimated") + host))
    tables = [(groups, _verdict(found))]
    if found.largest:
        cells: _Rows = [
            (bytes_text(one.bytes), one.group, one.what, "-" if one.source is None else one.source.place)
            for one in found.largest
        ]
        tables.append(([("largest", "group", "array", "line"), *cells], []))
    if found.changes:
        cells = [
            (bytes_text(one.saves_bytes), bytes_text(one.peak_bytes), "yes" if one.fits else "no", one.what, one.how)
            for one in found.changes
        ]
        tables.append(([("saves", "then", "fits", "one change", "as code"), *cells], []))
    return tables


def _verdict(found: Fit) -> list[str]:
    verdict = "fits" if found.fits else "does not fit"
    verdict = f"MAY OR MAY NOT fit: as estimated, it {verdict}" if found.is_close else verdict
    left = f"{bytes_text(abs(found.headroom_bytes))} {'left' if found.fits else 'too much'}"
    lines = [
        f"{bytes_text(found.peak_bytes)} at the worst moment: it {verdict} {found.chip.name}, of which a program may "
        f"fill {bytes_text(found.usable_bytes)} ({left})."
    ]
    if found.is_close:
        least, most = (bytes_text(int(share * found.peak_bytes)) for share in (1 - _CLOSE, 1 + _CLOSE))
        lines.append(
            f"That is close for an estimate; `compile_for(step, plans, ...)` decides. Expect {least} to {most}: "
            "most estimates were less than 12 % off where a compiler counted; what it cannot pack comes on top."
        )
    if found.batch is not None and found.largest_batch is not None:
        lines.append(f"The largest batch that fits: {found.largest_batch} (now {found.batch}).")
    return lines
