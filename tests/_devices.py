"""Descriptions of TPUs that nobody has."""

import dataclasses

import numpy as np


@dataclasses.dataclass(eq=False)
class Chip:
    """What JAX's TPU devices say about themselves."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    process_index: int
    device_kind: str
    slice_index: int = 0
    platform: str = "tpu"


def chips(bounds, hosts=None, kind="TPU v4", *, slices=1):
    """Devices that fill `bounds`, numbered core first, then x, y, z, then slice; hosts
    are boxes of size `hosts`.
    """
    hosts = bounds if hosts is None else hosts
    nx, ny, nz, nc = bounds
    per = [bound // host for bound, host in zip(bounds, hosts, strict=True)]
    out = []
    for piece, z, y, x, c in np.ndindex(slices, nz, ny, nx, nc):
        hx, hy, hz, hc = (
            coordinate // host
            for coordinate, host in zip((x, y, z, c), hosts, strict=True)
        )
        process = hc + per[3] * (hx + per[0] * (hy + per[1] * (hz + per[2] * piece)))
        out.append(
            Chip(
                len(out),
                coords=(x, y, z),
                core_on_chip=c,
                process_index=process,
                device_kind=kind,
                slice_index=piece,
            )
        )
    return out


def objects(devices):
    """An array of devices, one per entry, whatever sequence protocol they have."""
    out = np.empty(len(devices), object)
    out[:] = devices
    return out
