"""An estimate of the time that the collectives of a step take on a chip's network
links.
"""

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from .. import chips
from .._ground.errors import LeafTypeError, MeshError, check_type
from .._ground.misuse import called
from .._ground.text import bytes_text, first_lines, html_text, table, together
from .._step import KINDS
from ..chips._chip import Ring, axes_on, extents_of, hops_across, rounds_of
from ..chips._routes import (
    Torus,
    links_of,
    longest_of,
    rings_spanned,
    route_of,
    torus_of,
)
from ..topology import MeshSpec
from ._traffic_rows import Traffic, TrafficRow, axes_text


@dataclasses.dataclass(frozen=True)
class SecondsRow:
    """The time that one collective takes in a step.

    **Arguments:**

    - `traffic`: the traffic row of the collective.
    - `seconds`, `dcn_seconds`: the seconds of all calls in one step, and the part of
      them between slices.
    - `latency_seconds`: the part of `seconds` that does not depend on the bytes: the
      hops of all calls.
    - `bytes_per_second`, `why`: the rate at which bytes enter a device, and a
      description of the links that limit it.
    """

    __module__ = "shardfx.cost"

    traffic: TrafficRow
    seconds: float
    dcn_seconds: float
    bytes_per_second: float
    why: str
    latency_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Seconds:
    """An estimate of the time that a step's collectives take; returned by
    [`shardfx.cost.seconds`][].

    The time is bytes divided by bandwidth, and the latency of each hop. It leaves out
    that collectives may run at the same time, beside each other or beside arithmetic.
    `str(...)` is a table.

    **Arguments:**

    - `rows`: one row for each collective, the longest time first.
    - `chip`: the chip.
    """

    __module__ = "shardfx.cost"

    rows: tuple[SecondsRow, ...]
    chip: chips.Chip

    @property
    def seconds(self) -> float:
        """The seconds of all collectives, if they run one after the other."""
        return math.fsum(row.seconds for row in self.rows)

    def by_axes(self) -> dict[tuple[str, ...], float]:
        """The seconds of all collectives along each tuple of mesh axes, the longest
        time first.
        """
        rows_by_axes = together(self.rows, lambda row: row.traffic.axes)
        sums = {}
        for axes, rows in rows_by_axes.items():
            sums[axes] = math.fsum(row.seconds for row in rows)
        longest_first = sorted(sums, key=lambda axes: -sums[axes])
        return {axes: sums[axes] for axes in longest_first}

    def __str__(self) -> str:
        header = ("ms/step", "bytes/step", "kind", "axes", "GB/s", "over")
        cells: list[tuple[str, ...]] = [header]
        for row in self.rows:
            milliseconds = f"{1e3 * row.seconds:.3f}"
            sent = bytes_text(row.traffic.wire_bytes)
            axes = axes_text(row.traffic.axes)
            rate = f"{row.bytes_per_second / 1e9:.1f}"
            cells.append((milliseconds, sent, row.traffic.kind, axes, rate, row.why))
        lines = table(cells, right={"ms/step", "bytes/step", "GB/s"})
        sums = []
        for axes, seconds_of_axes in self.by_axes().items():
            sums.append(f"{axes_text(axes)} {1e3 * seconds_of_axes:.3f} ms")
        listed = ", ".join(sums) or "no traffic"
        lines.append(
            f"About {1e3 * self.seconds:.3f} ms of a step on {self.chip.name}"
            f" ({listed})."
        )
        lines.append(
            "An estimate: bytes over bandwidth and the latency of hops, as if nothing"
            " ran beside it."
        )
        return "\n".join(lines)

    __repr__ = first_lines
    _repr_html_ = html_text


@called('seconds(traffic, chip="v5e")')
def seconds(
    traffic: Traffic,
    chip: str | chips.Chip,
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
    *,
    slice: str = "",
) -> Seconds:
    """An estimate of the time that each collective of a step takes on the chip's
    network links.

    On a torus, a mesh axis spans dimensions of the slice. A collective uses the links
    of all dimensions that its axes span: in both directions along a dimension that is a
    closed ring, and in one direction along an open one, or if its groups span a part of
    an axis. An all-to-all is limited by the links in the middle of its longest
    dimension, since half of its bytes cross them. The messages of a permute go along
    one dimension after another, and the busiest link limits them. Each hop takes the
    chip's `hop_seconds`. If a switch connects the chips, each chip sends over all of
    its links. Bytes from another slice, or from chips of another switch, use the
    data-center network.

    **Arguments:**

    - `traffic`: the traffic from [`shardfx.cost.traffic`][].
    - `chip`: the chip's name, or a [`shardfx.chips.Chip`][].
    - `mesh`: the mesh whose axes the rows name. Without a mesh, each collective on a
      torus uses one link in one direction.
    - `slice`: the slice's extents in chips, such as "4x4x8"; by default the extents
      nearest to a cube. Mesh axes are assigned to dimensions of the slice in order, the
      last axis innermost, as [`shardfx.MeshSpec.build`][] does. Chips on a switch
      have no slices, and none is read for them.

    **Returns:**

    A [`shardfx.cost.Seconds`][].

    **Raises:**

    `MeshError` for extents that do not match the mesh, or without a mesh, and for a
    mesh that lacks an axis of a row; `ChipError` for an unknown chip.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.cost import compile_for, seconds, traffic

        mesh = MeshSpec({"data": 8})
        x = jax.ShapeDtypeStruct((8 * 1024, 1024), jnp.float32)
        batch = plan(x, mesh, paths=PathRules.parse(".*->data"))
        whole = jax.NamedSharding(mesh.abstract(), P())
        step = jax.jit(jnp.sin, out_shardings=whole)
        made = compile_for(step, batch.structs, target="cpu")
        found = seconds(traffic(made), "v5p", mesh)
        assert 0 < found.seconds < 1e-3
        print(found)
        ```
    """
    check_type(
        what="traffic",
        value=traffic,
        expected=Traffic,
        error=LeafTypeError,
        fix="give what `cost.traffic` returns",
    )
    chip = chips.find(chip)
    if slice and mesh is None:
        raise MeshError(
            f"`slice={slice!r:.40}` says along which dimensions of a slice the axes of the"
            " mesh lie, and there is no mesh; write `seconds(traffic, chip, mesh,"
            f" slice={slice!r:.40})`."
        )
    if mesh is not None:
        _require_axes(traffic, MeshSpec.of(mesh))
    axes: Mapping[str, tuple[Ring, ...]] = {}
    torus = None
    if mesh is not None and chip.torus_dims:
        spec = MeshSpec.of(mesh).require_sizes()
        sizes = zip(spec.axis_names, spec.axis_sizes, spec.dcn_sizes, strict=True)
        inside = {name: size // dcn for name, size, dcn in sizes}
        extents = extents_of(chip, math.prod(inside.values()))
        if slice:
            extents = _extents(slice, extents, chip)
        axes = axes_on(chip, extents, inside)
        if axes and spec.size == traffic.devices:
            rings = [axes.get(name, ()) for name in spec.axis_names]
            torus = torus_of(spec.axis_sizes, spec.dcn_sizes, rings)
    rows = [_row(row, axes, torus, chip) for row in traffic.rows]
    rows.sort(key=lambda row: -row.seconds)
    return Seconds(rows=tuple(rows), chip=chip)


def _require_axes(traffic: Traffic, mesh: MeshSpec) -> None:
    """Raises `MeshError` if a collective runs along an axis that `mesh` lacks."""
    for row in traffic.rows:
        for axis in row.axes:
            if axis not in mesh.axis_names:
                raise MeshError(
                    f"the {row.kind} along {axes_text(row.axes)} is of another mesh:"
                    f" {mesh} has no axis {axis!r}; pass the mesh of the step,"
                    " `seconds(traffic, chip, mesh)`."
                )


def _extents(
    slice_text: object,
    usual: tuple[int, ...],
    chip: chips.Chip,
) -> tuple[int, ...]:
    """The extents of a slice from their text: (4, 8) for "4x8". Raises `MeshError` for
    what is no text, and if their number or their product is not that of the default
    extents `usual`.
    """
    parts = ["?"]
    if isinstance(slice_text, str):
        parts = slice_text.lower().split("x")
    extents = tuple(int(part) for part in parts if part.isdecimal())
    are_numbers = len(extents) == len(parts)
    has_rank = len(extents) == len(usual)
    if not are_numbers or not has_rank or math.prod(extents) != math.prod(usual):
        raise MeshError(
            f"`slice={slice_text!r:.40}` must have {len(usual)} extents that hold"
            f" {math.prod(usual)} chips of {chip.name}, as in"
            f" {'x'.join(map(str, usual))!r}."
        )
    return extents


def _row(
    row: TrafficRow,
    axes: Mapping[str, tuple[Ring, ...]],
    torus: Torus | None,
    chip: chips.Chip,
) -> SecondsRow:
    """The time of one collective. `axes` has the dimensions of the slice that each mesh
    axis spans. `torus` has the place of each device of the mesh; `None` if it is not
    known: then the messages of a permute are not routed over links. A route's
    `messages` are those that pass the busiest link.

    Bytes are near within a slice, and far between slices or islands.
    """
    near_bytes = row.wire_bytes - row.dcn_bytes
    rate, why = _rate(row, axes, chip)
    # One hop through a switch, and where the dimensions are not known.
    hops = max(1, hops_across(_rings_of(row, axes))) * rounds_of(row.kind)
    near_seconds = near_bytes / rate
    if row.pairs and row.axes and torus is not None and near_bytes:
        route = route_of(row.pairs, torus)
        # `wire_bytes` is the mean over all devices, also of those that receive nothing.
        device_count = len(torus.slices)
        message_bytes = row.wire_bytes * device_count / len(row.pairs)
        near_seconds = route.messages * message_bytes / chip.link_bytes_per_second
        hops = route.hops
        if near_seconds:
            rate = near_bytes / near_seconds
        why = f"{route.messages:g} messages on a link, up to {hops} hops"

    far_seconds = row.dcn_bytes / chip.dcn_bytes_per_second * chip.devices_per_chip
    if not chip.torus_dims and row.group_size > chip.island_chips:
        # A replica group with more chips than one switch connects also uses the network
        # between switches.
        far_seconds += row.wire_bytes / chip.island_chips / chip.dcn_bytes_per_second
        why += f", and the network between islands of {chip.island_chips}"

    calls = 1 if row.calls is None else row.calls
    latency_seconds = calls * hops * chip.hop_seconds
    return SecondsRow(
        traffic=row,
        seconds=near_seconds + far_seconds + latency_seconds,
        dcn_seconds=far_seconds,
        bytes_per_second=rate,
        why=why,
        latency_seconds=latency_seconds,
    )


def _rings_of(row: TrafficRow, axes: Mapping[str, tuple[Ring, ...]]) -> list[Ring]:
    """The dimensions of the slice that the mesh axes of a row span."""
    rings: list[Ring] = []
    for axis in row.axes:
        rings += axes.get(axis, ())
    return rings_spanned(rings, row.group_size)


def _rate(
    row: TrafficRow,
    axes: Mapping[str, tuple[Ring, ...]],
    chip: chips.Chip,
) -> tuple[float, str]:
    """The bytes per second that enter a device during a collective, and a description
    of the links that limit them. `axes` has the dimensions of the slice (rings) that
    each mesh axis spans. `KINDS` says how each kind uses links: "one", "middle" or all.
    """
    link_rate = chip.link_bytes_per_second
    if not chip.torus_dims:
        return link_rate, "a switch"
    rings = _rings_of(row, axes)
    if not rings:
        return float(link_rate), "one link one way"
    link_use = KINDS[row.kind].links
    rate = link_rate * links_of(link_use, rings)
    if link_use == "middle":
        return rate, f"the middle of a {_ring_text(longest_of(rings))}"
    shape = " + ".join(map(_ring_text, rings))
    if link_use == "one":
        return rate, f"one link one way ({shape})"
    return rate, shape


def _ring_text(ring: Ring) -> str:
    form = "ring" if ring.closed else "line"
    return f"{form} of {ring.size}"
