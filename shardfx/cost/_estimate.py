"""An estimate of the bytes that a step sends, from the program of XLA's own
partitioner, without compilation.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, Mesh

from .. import chips
from .._ground.errors import ProgramError
from .._ground.misuse import called
from .._ground.text import bytes_text
from .._step import (
    KINDS,
    MOST_DEVICES,
    HloModule,
    Platform,
    Step,
    parse_hlo,
    platform_of,
    step_of,
)
from ..topology import MeshSpec
from ._foreseen import WIRE
from ._libtpu import chip_of, tpu_program, why_foreseen
from ._refuted import module_of, programs_to_judge, warn_if_refuted
from ._scatters import with_reduce_scatters
from ._traffic import read
from ._traffic_rows import Traffic, TrafficRow, largest_first


# Mesh axes of at most this size are not halved.
_SHORT_AXIS = 4


def shrunk(mesh: MeshSpec, most: int) -> MeshSpec:
    """A smaller mesh with the same axes: the longest even axes are halved until it
    has at most `most // 2` devices, so that one axis can be doubled for a second
    program. Raises `ProgramError` if the sizes cannot be halved so far.
    """
    sizes = dict(mesh.shape)
    while math.prod(sizes.values()) > most // 2:
        name = max(sizes, key=lambda axis: sizes[axis] if sizes[axis] % 2 == 0 else 0)
        if sizes[name] % 2 or sizes[name] <= _SHORT_AXIS:
            fix = f"use fewer axes, since axes of {_SHORT_AXIS} are not halved"
            if max(sizes.values()) > _SHORT_AXIS:
                fix = "use axes whose sizes are powers of 2"
            raise ProgramError(
                f"XLA partitions for at most {most} devices, and the axes of {mesh}"
                f" cannot be halved to fewer; {fix}."
            )
        sizes[name] //= 2
    return _with_sizes(mesh, sizes)


def extrapolated(
    mesh: MeshSpec,
    most: int,
    rows_on: Callable[[MeshSpec], Sequence[TrafficRow]],
) -> Traffic:
    """The traffic of a step on a large mesh, extrapolated from its traffic on smaller
    meshes.

    The step is partitioned for a smaller mesh, on which some axes of `mesh` are
    shorter. For each of these axes, the step is partitioned again, with this axis twice
    as long, for at most `most` devices. `rows_on` returns the traffic rows on a mesh,
    in the order of the program. Raises `ProgramError` if the programs differ in more
    than sizes.
    """
    small = shrunk(mesh, most)
    rows_of_small = rows_on(small)
    # For each axis that was halved, the rows of the mesh with this axis doubled once,
    # and the number of doublings.
    doubled: list[tuple[Sequence[TrafficRow], int]] = []
    for axis, size in small.shape.items():
        if mesh.shape[axis] == size:
            continue
        rows_of_doubled = rows_on(_with_sizes(small, {**small.shape, axis: 2 * size}))
        fields_of_doubled = list(map(_size_free_fields, rows_of_doubled))
        if fields_of_doubled != list(map(_size_free_fields, rows_of_small)):
            raise ProgramError(
                f"XLA partitions for at most {most} devices. On {small} the step is"
                f" another program than on one with twice as many along {axis}, so what"
                f" it sends on {mesh} cannot be extrapolated."
            )
        doubled.append((rows_of_doubled, round(math.log2(mesh.shape[axis] / size))))
    note = f"extrapolated from {small}: XLA partitions for at most {most:,} devices."
    rows = []
    for number, row in enumerate(rows_of_small):
        doubled_rows = [
            (rows_of_doubled[number], doublings)
            for rows_of_doubled, doublings in doubled
        ]
        rows.append(_larger_row(row, doubled_rows, note))
    return largest_first(Traffic(tuple(rows), mesh.size))


def _with_sizes(mesh: MeshSpec, sizes: dict[str, int]) -> MeshSpec:
    """The mesh with other sizes of its axes. An axis spans no more slices than it has
    devices.
    """
    dcn = {
        axis: min(slices, sizes[axis])
        for axis, slices in zip(mesh.axis_names, mesh.dcn_sizes, strict=True)
    }
    return MeshSpec(
        sizes,
        axis_types=dict(zip(mesh.axis_names, mesh.axis_types, strict=True)),
        dcn=dcn,
    )


def _size_free_fields(row: TrafficRow) -> object:
    """What two rows of one collective have in common on meshes of two sizes."""
    return row.kind, row.axes, row.dtype, row.source, row.calls is None, row.calls == 0


def _larger_row(
    row: TrafficRow,
    doubled: Sequence[tuple[TrafficRow, int]],
    note: str,
) -> TrafficRow:
    """The traffic row `row` of a small mesh, extrapolated to a large mesh, with the
    text `note` added. For each axis that is longer in the large mesh, `doubled` has the
    row after one doubling of this axis alone, and the number of doublings from the
    small mesh to the large mesh.
    """
    group_size = row.group_size
    payload_bytes = _payload_bytes(row)
    calls = row.calls
    for doubled_row, doublings in doubled:
        group_size *= _growth(doubled_row.group_size, row.group_size, doublings)
        payload_bytes *= _growth(
            _payload_bytes(doubled_row), _payload_bytes(row), doublings
        )
        if calls and doubled_row.calls and row.calls:
            calls *= _growth(doubled_row.calls, row.calls, doublings)
    counted_calls = 1 if calls is None else calls
    received_share = _received_share(row.kind, int(group_size))
    wire_bytes = round(counted_calls * payload_bytes * received_share)

    dcn_bytes = 0
    shares: list[tuple[str | None, int]] = []
    for leaf, share_bytes in row.shares:
        larger_share = 0
        if row.wire_bytes:
            larger_share = round(wire_bytes * share_bytes / row.wire_bytes)
        shares.append((leaf, larger_share))
    if row.wire_bytes:
        dcn_bytes = round(wire_bytes * row.dcn_bytes / row.wire_bytes)
    return dataclasses.replace(
        row,
        wire_bytes=wire_bytes,
        dcn_bytes=dcn_bytes,
        calls=None if calls is None else round(calls),
        group_size=round(group_size),
        shares=tuple(shares),
        note=" ".join(filter(None, (row.note, note))),
    )


def _payload_bytes(row: TrafficRow) -> float:
    """The `wire_bytes` of one call of a collective, divided by (n - 1) / n: of an array
    over n devices, a device receives all shards but its own. A permute sends whole
    arrays, so its bytes are not divided.
    """
    return row.wire_bytes / (
        (row.calls or 1) * _received_share(row.kind, row.group_size)
    )


def _received_share(kind: str, group_size: int) -> float:
    """The part of an array that a device receives in a collective: all but its own
    shard. A permute ("one" link) sends whole arrays.
    """
    if KINDS[kind].links == "one" or group_size < 2:
        return 1.0
    return (group_size - 1) / group_size


def _growth(doubled: float | int, first: float | int, doublings: int) -> float:
    """The factor by which a number grows in `doublings` doublings of a mesh axis, if it
    is `first` before a doubling and `doubled` after it. Their ratio is rounded to a
    power of two: for 210 after 100, and 3 times, it is 2 ** 3 = 8. A number that is 0
    does not grow.
    """
    if first and doubled:
        return (2.0 ** round(math.log2(doubled / first))) ** doublings
    return 1.0


# The largest mesh for which a step is partitioned directly, and the largest one from
# which an estimate is extrapolated. XLA takes 0.8 s for 8,192 devices, and 0.1 s for
# 2,048.
LARGEST_DIRECT_MESH = 2048
LARGEST_SMALL_MESH = 512


@called(
    "estimate(step, *args)",
    chip='`compiler="tpu:v5p"`; `fit(step, *args, chip="v5p")` has the memory',
    target='`compiler="tpu:v5p:4x4x4"`',
    platform='`compiler="gpu"`',
)
def estimate(
    step: object,
    *args: object,
    compiler: Platform | str = "tpu",
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Traffic:
    """The bytes that a step sends, a row for each collective, without devices and
    without a whole compilation.

    For TPUs, libtpu itself is asked where it is installed (`pip install
    "shardfx[aot]"`): it optimizes and schedules the program for a slice that is not
    there, and its code generation, which takes most of the time, is left out. The bytes
    are those of the compiled program. For CPUs, XLA makes the program itself.

    Otherwise the bytes are foreseen: XLA's own partitioner makes the program of one
    device. [`shardfx.cost.compare`][] shows where they and a compiled program differ.

    **Arguments:**

    - `step`: a function; or the result of `jax.jit`, `equinox.filter_jit` or
      [`shardfx.filter_jit`][], with its shardings and donation; or the result of its
      `.trace`, without `args`.
    - `args`: the arguments of the step: arrays, or structs with shardings such as
      `plan.structs`, and any other values. As in JAX, the compiler chooses the
      shardings of results that have none.
    - `compiler`: the platform: "tpu", "gpu" or "cpu"; or a slice or a chip of TPUs, such
      as "tpu:v5p:4x4x4" or "tpu:v5p". "tpu" is v5e, or v5p for a mesh of more than 256
      devices.
    - `mesh`: the mesh whose axes the rows name; by default the mesh of the arguments.
      With a MeshSpec that has `dcn`, the rows also count the bytes between slices.

    **Returns:**

    A [`shardfx.cost.Traffic`][].

    It warns with a `WrongNumbersWarning` if [`shardfx.testing.verify`][] refutes the
    program that the partitioner made. Programs for TPUs and GPUs of at most 4,000
    operations on at most 2,048 devices are verified.

    **Raises:**

    `MeshError` if no argument or plan has a mesh; `PlanMismatchError` for a plan that
    is passed as an argument of the step; `ProgramError` if XLA cannot partition the
    step; any error of the step's code during tracing.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.cost import estimate

        mesh = MeshSpec({"fsdp": 8})  # no devices
        w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        w, x = (plan(a, mesh, paths=PathRules.parse(".*->fsdp")).structs for a in (w, x))
        (row,) = estimate(lambda w, x: x @ w, w, x, compiler="cpu").rows
        assert (row.kind, row.axes) == ("all-gather", ("fsdp",))
        assert row.wire_bytes == 64 * 256 * 4 * 7 // 8
        ```
    """
    platform = platform_of(compiler)
    traced = step_of(step, args, mesh)
    judged_programs = programs_to_judge(traced, platform, LARGEST_DIRECT_MESH)
    module = None
    if judged_programs is not None:
        module = module_of(judged_programs, traced.mesh.size)
        warn_if_refuted(judged_programs, module)
    libtpu_traffic = None
    if platform == "tpu":
        libtpu_traffic = asked_traffic(traced, chip_of(compiler, traced.mesh))
    if libtpu_traffic is not None:
        return libtpu_traffic
    if module is None:
        foreseen_traffic = estimated(traced, platform)
    else:
        sent = as_sent(module, platform)
        foreseen_traffic = largest_first(read(sent, traced.jax_mesh, traced.leaves))
    if platform == "cpu":
        return foreseen_traffic
    notes: tuple[str, ...] = (_GPU_NOTE,)
    if platform == "tpu":
        notes = (
            _tpu_note(foreseen_traffic),
            why_foreseen(traced, chip_of(compiler, traced.mesh)),
        )
    return dataclasses.replace(foreseen_traffic, basis="foreseen", notes=notes)


_GPU_NOTE = "Foreseen: the compiler for GPUs may send other bytes."


def _tpu_note(foreseen_traffic: Traffic) -> str:
    """A sentence about the bytes to expect in the place of foreseen ones."""
    least, most = map(bytes_text, WIRE.of(foreseen_traffic.wire_bytes))
    return (
        f"Foreseen: expect {least} to {most}. libtpu sends between {WIRE.least:g} and"
        f" {WIRE.most:g} times the foreseen bytes in 95 % of steps, by {WIRE.steps} measured"
        " steps."
    )


def asked_traffic(step: Step, chip: chips.Chip) -> Traffic | None:
    """The traffic of libtpu's own program of a step, the largest rows first; `None` if
    libtpu cannot be asked.
    """
    program = tpu_program(step, chip)
    if program is None:
        return None
    return largest_first(
        read(program.module, step.jax_mesh, step.leaves, program.target.order)
    )


def estimated(step: Step, compiler: Platform) -> Traffic:
    """The estimated traffic of a traced step, the largest rows first. It is
    extrapolated from smaller meshes where the mesh is too large to partition for.
    """
    if step.mesh.size > LARGEST_DIRECT_MESH:
        try:
            return extrapolated(
                step.mesh,
                LARGEST_SMALL_MESH,
                lambda mesh: _read(step, compiler, mesh).rows,
            )
        except ProgramError:
            if step.mesh.size > MOST_DEVICES:
                raise
    return largest_first(_read(step, compiler, step.jax_mesh))


def _read(
    step: Step,
    compiler: Platform,
    mesh: MeshSpec | Mesh | AbstractMesh,
) -> Traffic:
    """The estimated traffic of a step on `mesh`, in the order of the program: that of
    XLA's partitioned program, changed as the compiler for `compiler` sends it.
    """
    spec = MeshSpec.of(mesh)
    module = parse_hlo(step.partitioned(compiler, mesh=spec))
    module = dataclasses.replace(module, partitions=spec.size)
    return read(as_sent(module, compiler), mesh, step.leaves)


def as_sent(module: HloModule, platform: Platform) -> HloModule:
    """A partitioned program, with the reduce-scatters that the compiler for GPUs makes.
    XLA itself finishes programs for CPUs, and libtpu is asked for those for TPUs.
    """
    if platform == "gpu":
        return with_reduce_scatters(module)
    return module
