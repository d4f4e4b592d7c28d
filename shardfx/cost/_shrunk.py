"""Traffic on more devices than XLA partitions for: read on meshes with shorter axes, and carried on along each axis.

The longest axes are halved. The step is partitioned for that mesh, and once more for each such axis doubled. When an
axis doubles, the bytes of a collective and its group double, halve or stay: as often as it takes to reach the mesh
that was asked for. Where the programs differ in more than sizes there is no such rule, and that is an error.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from .._ground.errors import ProgramError
from ..topology import MeshSpec
from ._traffic_rows import Traffic, TrafficRow, largest_first


# An axis keeps so many devices where its size allows: groups within an axis, and what divides, are then the same.
_LEAST = 4


def shrunk(mesh: MeshSpec, most: int) -> MeshSpec:
    """The mesh with its longest axes halved until one of them can double within `most` devices."""
    sizes = dict(mesh.shape)
    while math.prod(sizes.values()) > most // 2:
        name = max(sizes, key=lambda axis: sizes[axis] if sizes[axis] % 2 == 0 else 0)
        if sizes[name] % 2 or sizes[name] <= _LEAST:
            raise ProgramError(
                f"XLA partitions for at most {most} devices, and the axes of {mesh} cannot be halved to fewer; use "
                "axes whose sizes are powers of 2."
            )
        sizes[name] //= 2
    return _with_sizes(mesh, sizes)


def carried_on(mesh: MeshSpec, most: int, rows_on: Callable[[MeshSpec], Sequence[TrafficRow]]) -> Traffic:
    """The traffic on a mesh, from that on shrunken ones.

    **Arguments:**

    - `mesh`: with more than `most` devices.
    - `rows_on`: the rows of the step on a mesh, in the order of its program.

    **Raises:**

    `ProgramError` where the programs on shrunken meshes differ in more than sizes.
    """
    small = shrunk(mesh, most)
    first = list(rows_on(small))
    doublings = {
        axis: round(math.log2(mesh.shape[axis] / size))
        for axis, size in small.shape.items()
        if mesh.shape[axis] != size
    }
    others: dict[str, list[TrafficRow]] = {}
    for axis in doublings:
        found = list(rows_on(_with_sizes(small, {**small.shape, axis: 2 * small.shape[axis]})))
        if [_form(row) for row in found] != [_form(row) for row in first]:
            raise ProgramError(
                f"XLA partitions for at most {most} devices. On {small} the step is another program than on one with "
                f"twice as many along {axis}, so what it sends on {mesh} cannot be carried on from there."
            )
        others[axis] = found
    note = f"carried on from {small}: XLA partitions for at most {most:,} devices."
    rows = [
        _row(row, [(others[axis][at], times) for axis, times in doublings.items()], note)
        for at, row in enumerate(first)
    ]
    return largest_first(Traffic(tuple(rows), mesh.size))


def _with_sizes(mesh: MeshSpec, sizes: dict[str, int]) -> MeshSpec:
    dcn = {axis: min(slices, sizes[axis]) for axis, slices in zip(mesh.axis_names, mesh.dcn_sizes, strict=True)}
    return MeshSpec(sizes, axis_types=dict(zip(mesh.axis_names, mesh.axis_types, strict=True)), dcn=dcn)


def _form(row: TrafficRow) -> object:
    """What is the same on meshes of all sizes."""
    return row.kind, row.axes, row.dtype, row.source, row.calls is None, row.calls == 0


def _row(row: TrafficRow, doubled: Sequence[tuple[TrafficRow, int]], note: str) -> TrafficRow:
    """A row with each axis doubled as often as its number says."""
    group, bytes_each, calls = row.group_size, _payload(row), row.calls
    for other, times in doubled:
        group *= _power(other.group_size, row.group_size, times)
        bytes_each *= _power(_payload(other), _payload(row), times)
        if calls and other.calls and row.calls:
            calls *= _power(other.calls, row.calls, times)
    wire = round((1 if calls is None else calls) * bytes_each * _share(row.kind, int(group)))
    dcn = round(wire * row.dcn_bytes / row.wire_bytes) if row.wire_bytes else 0
    return dataclasses.replace(
        row,
        wire_bytes=wire,
        dcn_bytes=dcn,
        calls=None if calls is None else round(calls),
        group_size=round(group),
        shares=tuple((leaf, round(wire * part / row.wire_bytes) if row.wire_bytes else 0) for leaf, part in row.shares),
        note=" ".join(one for one in (row.note, note) if one),
    )


def _payload(row: TrafficRow) -> float:
    """The bytes of one call, of which a device receives a share that depends on the group."""
    return row.wire_bytes / ((row.calls or 1) * _share(row.kind, row.group_size))


def _share(kind: str, group: int) -> float:
    return 1.0 if kind == "collective-permute" else (group - 1) / group if group > 1 else 1.0


def _power(other: float | int, one: float | int, times: int) -> float:
    """By how much a number grows where its axis doubles so often: as much each time as the first time."""
    return (2.0 ** round(math.log2(other / one))) ** times if one and other else 1.0
