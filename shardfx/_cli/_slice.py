"""TPU slices by name: how many devices they have, and how a mesh would lie on them. No TPU is needed."""

import itertools
import math
import re
import types
from typing import NamedTuple

from shardfx import MeshSpec

from .._ground.text import printable
from ._usage import UsageError
from ._values import whole_number


# JAX's name for each kind, its cores per chip, and how many dimensions its network has.
_MOST_CHIPS = 2**18
_KINDS = {
    "v2": ("TPU v2", 2, 2),
    "v3": ("TPU v3", 2, 2),
    "v4": ("TPU v4", 1, 3),
    "v5e": ("TPU v5 lite", 1, 2),
    "v5p": ("TPU v5", 1, 3),
    "v6e": ("TPU v6 lite", 1, 2),
}


class Slice(NamedTuple):
    """A TPU slice: its name, and its devices as JAX would describe them."""

    name: str
    devices: tuple[types.SimpleNamespace, ...]


def parse_slice(text: str) -> Slice:
    """Reads `tpu:v5p:8x8x8`.

    **Arguments:**

    - `text`: "tpu", the kind, and the number of chips along each dimension.

    **Returns:**

    The slice.

    **Raises:**

    `UsageError` that says which part is wrong, and what may stand there.
    """
    found = re.fullmatch(r"tpu:(\w+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if found is None:
        raise UsageError(f"--target {text!r} is not of the form tpu:KIND:AxBxC, as in tpu:v5p:8x8x8")
    if found[1] not in _KINDS:
        raise UsageError(f"--target {text!r}: there is no kind {found[1]!r}; there are {', '.join(_KINDS)}")
    kind, cores, dimensions = _KINDS[found[1]]
    chips = [whole_number(size) or _MOST_CHIPS + 1 for size in found[2].split("x")]
    if len(chips) != dimensions:
        raise UsageError(
            f"--target {text!r}: {found[1]} has {dimensions} dimensions, as in {'x'.join('4' * dimensions)}"
        )
    if math.prod(chips) > _MOST_CHIPS:
        raise UsageError(f"--target {text!r:.60} has more than {_MOST_CHIPS:,} chips; no slice is that large")
    places = itertools.product(*[range(size) for size in reversed(chips)], range(cores))
    devices = tuple(
        types.SimpleNamespace(
            id=number,
            process_index=0,
            platform="tpu",
            device_kind=kind,
            coords=(*reversed(place[:-1]), 0)[:3] if dimensions < 3 else (*reversed(place[:-1]),),
            core_on_chip=place[-1],
            slice_index=0,
        )
        for number, place in enumerate(places)
    )
    return Slice(text, devices)


def order_text(target: Slice, mesh: MeshSpec) -> str:
    """In what order the mesh would take the slice's devices, and how far apart neighbours then are."""
    order = mesh.order(target.devices)
    hops = zip(mesh.axis_names, order.mean_hops or (), strict=False)
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in hops)
    first = f"On {target.name}: {len(target.devices):,} devices, ordered by {order.method}; mean hops: {told}."
    return "\n".join(map(printable, [first, *order.reasons]))
