"""TPU slices by name: how many devices they have, and how a mesh would lie on them. No TPU is needed."""

import itertools
import types
from typing import NamedTuple

from shardfx import MeshSpec, chips
from shardfx.errors import ChipError, MeshError

from .._ground.text import printable
from ._usage import UsageError


class Slice(NamedTuple):
    """A TPU slice: its name, and its devices as JAX would describe them."""

    name: str
    devices: tuple[types.SimpleNamespace, ...]


def parse_slice(text: str) -> Slice:
    """Reads `tpu:v5p:8x8x8`.

    **Arguments:**

    - `text`: as [`shardfx.chips.parse_slice`][] takes it.

    **Returns:**

    The slice.

    **Raises:**

    `UsageError` that says which part is wrong, and what may stand there.
    """
    try:
        made = chips.parse_slice(text)
    except (MeshError, ChipError) as error:
        raise UsageError(f"--target: {error}") from error
    if not made.chip.torus_dims:
        raise UsageError(f"--target {text!r:.60}: a switch joins its chips, so there is no order to choose")
    places = itertools.product(*[range(size) for size in reversed(made.extents)], range(made.chip.devices_per_chip))
    devices = tuple(
        types.SimpleNamespace(
            id=number,
            process_index=0,
            platform="tpu",
            device_kind=made.chip.kinds[0],
            coords=(*reversed(place[:-1]), 0)[:3] if made.chip.torus_dims < 3 else (*reversed(place[:-1]),),
            core_on_chip=place[-1],
            slice_index=0,
        )
        for number, place in enumerate(places)
    )
    return Slice(made.name, devices)


def order_text(target: Slice, mesh: MeshSpec) -> str:
    """In what order the mesh would take the slice's devices, and how far apart neighbours then are."""
    order = mesh.order(target.devices)
    hops = zip(mesh.axis_names, order.mean_hops or (), strict=False)
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in hops)
    first = f"On {target.name}: {len(target.devices):,} devices, ordered by {order.method}; mean hops: {told}."
    return "\n".join(map(printable, [first, *order.reasons]))
