"""The data x model meshes of T5X, as functions of integers."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from .._ground.errors import MeshError
from ._torus import boxes, preferred


# T5X's choices for TPU v2 and v3, by number of partitions: (x, y, z, cores).
_V2_V3 = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}


def default_submesh(device_kind: str, num_partitions: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """The box of the hardware for the `num_partitions` shards of a model.

    TPU v2, v3 and v4 (one core per chip) use T5X's table if its entry divides the hardware. In all other cases one rule
    applies. Of the boxes whose sizes divide `bounds`, it takes the one with, in this order:

    1. the most cores of a chip (the last dimension);
    2. the most devices in dimensions that it spans wholly: a whole ring is closed by a link;
    3. the most such dimensions: a torus has more links than a ring of the same size;
    4. the smallest sum of sizes: compact boxes have closed walks of single hops, lines that are not whole have none;
    5. the larger size in the earlier dimension.

    **Arguments:**

    - `device_kind`: JAX's name for the kind of device.
    - `num_partitions`: the number of devices that hold one copy of the model.
    - `bounds`: the extents of the hardware, as from [`shardfx.topology.bounds`][].

    **Returns:**

    The box: one size per dimension of `bounds`, each a divisor of it, `num_partitions` in product.

    **Raises:**

    `MeshError` that names the numbers of partitions that are feasible.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.default_submesh("TPU v4", 16, (4, 4, 4, 1)) == (4, 4, 1, 1)
        assert topology.default_submesh("TPU v5p", 32, (4, 4, 8, 1)) == (4, 1, 8, 1)
        ```
    """
    bounds = _sizes("bounds", bounds)
    listed = _table(device_kind, num_partitions, bounds)
    candidates = feasible_submeshes(num_partitions, bounds)
    if listed in candidates:
        return listed
    if not candidates:
        raise MeshError(
            f"no box of {num_partitions} devices divides the {device_kind} hardware of bounds {bounds}; "
            f"{_feasible(num_partitions, bounds)}."
        )
    return preferred(candidates, bounds, (1,) * len(bounds))


def feasible_submeshes(num_partitions: int, bounds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every box of `num_partitions` devices whose sizes divide `bounds`, in lexicographic order.

    **Arguments:**

    - `num_partitions`: the number of devices in a box.
    - `bounds`: the extents of the hardware.

    **Returns:**

    The boxes; none if no box has that many devices.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.feasible_submeshes(4, (2, 4)) == ((1, 4), (2, 2))
        ```
    """
    return tuple(boxes(num_partitions, bounds)) if num_partitions > 0 else ()


def submesh_order(
    bounds: Sequence[int],
    host_bounds: Sequence[int],
    submesh: Sequence[int],
    *,
    tile_by_host: bool = True,
) -> Int[np.ndarray, "data model dims"]:
    """The device order of T5X's data x model mesh: each row is one copy of the model, in a box of shape `submesh`.

    With host tiling, the devices of a host are a contiguous part of the mesh, so that a host loads one range of rows.
    Without it, rows follow the hardware. As in T5X, a model that fills a line of X or Y, or a plane with Z, has no host
    tiling; then Z is slower than the dimension beside it.

    **Arguments:**

    - `bounds`: the extents of the hardware: (x, y, z, cores) or (hosts, devices per host).
    - `host_bounds`: the extents of one host's devices.
    - `submesh`: the box that holds one copy of the model.
    - `tile_by_host`: whether to keep each host's devices together.

    **Returns:**

    An integer array (data, model, len(bounds)) of coordinates, with each place once.

    **Raises:**

    `MeshError` that names the dimension which does not fit, and the boxes of that size that fit.

    !!! Example

        ```python
        from shardfx import topology

        order = topology.submesh_order((4, 4, 1, 2), (2, 2, 1, 2), (1, 1, 1, 2))
        assert order.shape == (16, 2, 4)
        assert order[4].tolist() == [[0, 2, 0, 0], [0, 2, 0, 1]]
        ```
    """
    bounds, submesh = _sizes("bounds", bounds), _sizes("submesh", submesh)
    host_bounds = _sizes("host_bounds", host_bounds)
    _check_divides(bounds, host_bounds, submesh)
    dims = list(range(len(bounds)))
    swapped = _z_major(bounds, submesh)
    if swapped is not None:
        first, second = swapped
        dims[first], dims[second] = dims[second], dims[first]
        tile_by_host = False
    parts = [
        _tiles(bounds[dim], submesh[dim], host_bounds[dim])
        if tile_by_host
        else (bounds[dim] // submesh[dim], 1, 1, submesh[dim])
        for dim in dims
    ]
    if any(math.prod(part) != bounds[dim] for part, dim in zip(parts, dims, strict=True)):
        fitting = [box for box in boxes(math.prod(submesh), bounds) if _fits_hosts(bounds, box, host_bounds)]
        raise MeshError(
            f"submesh {submesh} neither divides nor is a multiple of the host bounds {host_bounds} in every "
            f"dimension; pass `tile_by_host=False`, or one of the submeshes {fitting}."
        )
    places = np.moveaxis(np.indices(tuple(bounds[dim] for dim in dims)), 0, -1)[..., np.argsort(dims)]
    split = places.reshape(*[size for part in parts for size in part], len(bounds))
    grouped = split.transpose(*[4 * dim + part for part in range(4) for dim in range(len(dims))], 4 * len(dims))
    return grouped.reshape(-1, math.prod(submesh), len(bounds))


def hybrid_shape(num_partitions: int, local_devices: int, processes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (data, model) mesh of GPUs within a node and across nodes. The model stays within a node if it fits.

    **Arguments:**

    - `num_partitions`: the number of devices that hold one copy of the model.
    - `local_devices`: devices per process (node).
    - `processes`: the number of processes.

    **Returns:**

    `(ici_shape, dcn_shape)`: the shape within a node, and the shape over nodes; each is (data, model).

    **Raises:**

    `MeshError` if a device would be unused; it names the feasible numbers of partitions.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.hybrid_shape(4, 8, 2) == ((2, 4), (2, 1))
        assert topology.hybrid_shape(16, 8, 4) == ((1, 8), (2, 2))
        ```
    """
    for name, value in (("local_devices", local_devices), ("processes", processes)):
        if value < 1:
            raise MeshError(f"`{name}` is {value}; it must be at least 1.")
    within = [n for n in range(1, local_devices + 1) if local_devices % n == 0]
    across = [local_devices * n for n in range(2, processes + 1) if processes % n == 0]
    if num_partitions not in within + across:
        raise MeshError(
            f"{num_partitions} partitions do not tile {processes} processes of {local_devices} devices; use "
            f"one of {within + across}."
        )
    model = min(num_partitions, local_devices)
    nodes = num_partitions // model
    return (local_devices // model, model), (processes // nodes, nodes)


def _table(kind: str, partitions: int, bounds: tuple[int, ...]) -> tuple[int, ...] | None:
    if kind in ("TPU v2", "TPU v3"):
        return _V2_V3.get(partitions)
    if kind not in ("TPU v4", "TPU v4 lite") or len(bounds) != 4 or bounds[3] != 1:
        return None
    x, _, z, _ = bounds
    match partitions:
        case 1:
            return (1, 1, 1, 1)
        case 2:
            return (1, 2, 1, 1)
        case 4:
            return (4, 1, 1, 1) if x >= 4 else (2, 2, 1, 1)
        case 8:
            return (1, 1, 8, 1) if z >= 8 else (4, 2, 1, 1)
        case 16:
            wide = (8, 2, 1, 1) if x >= 8 else (4, 4, 1, 1) if x >= 4 else (2, 2, 4, 1)
            return (1, 1, 16, 1) if z >= 16 else wide
    return None


def _z_major(bounds: tuple[int, ...], submesh: tuple[int, ...]) -> tuple[int, int] | None:
    if len(bounds) != 4:
        return None
    covered = [size == bound > 1 for size, bound in zip(submesh, bounds, strict=True)]
    single = [size == 1 for size in submesh]
    for dim, other in ((0, 1), (1, 0)):
        line = covered[dim] and single[other] and single[2]
        plane = single[dim] and covered[other] and covered[2]
        if not (line or plane):
            continue
        if submesh[3] != bounds[3]:
            raise MeshError(
                f"submesh {submesh} spans dim {dim if line else other} of {bounds} but {submesh[3]} of "
                f"{bounds[3]} cores (dim 3); use {(*submesh[:3], bounds[3])}, or a box without a whole line."
            )
        return (other, 2)
    return None


def _tiles(size: int, model: int, host: int) -> tuple[int, ...]:
    """How a dimension splits into (data over hosts, data in a host, model over hosts, model in a host)."""
    if model % host == 0:
        return (size // model, 1, model // host, host)
    if host % model == 0:
        return (size // host, host // model, 1, model)
    return (0,) * 4


def _fits_hosts(bounds: tuple[int, ...], submesh: tuple[int, ...], host_bounds: tuple[int, ...]) -> bool:
    sizes = zip(bounds, submesh, host_bounds, strict=True)
    return all(math.prod(_tiles(*size)) == size[0] for size in sizes)


def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    out = tuple(int(size) for size in sizes)
    wrong = [dim for dim, size in enumerate(out) if size < 1]
    if wrong:
        raise MeshError(f"`{name}` {out} has size {out[wrong[0]]} in dim {wrong[0]}; every size is at least 1.")
    return out


def _check_divides(bounds: tuple[int, ...], host_bounds: tuple[int, ...], submesh: tuple[int, ...]) -> None:
    for name, sizes in (("submesh", submesh), ("host_bounds", host_bounds)):
        if len(sizes) != len(bounds):
            raise MeshError(
                f"`{name}` {sizes} has {len(sizes)} dimensions, but `bounds` {bounds} has {len(bounds)}; "
                "give one size per dimension."
            )
        wrong = [dim for dim, size in enumerate(sizes) if bounds[dim] % size]
        if wrong:
            raise MeshError(
                f"`{name}` {sizes} does not divide the hardware bounds {bounds}: dim {wrong[0]} of size "
                f"{bounds[wrong[0]]} is no multiple of {sizes[wrong[0]]}; {_feasible(math.prod(sizes), bounds)}."
            )


def _feasible(count: int, bounds: tuple[int, ...]) -> str:
    fitting = boxes(count, bounds)
    if fitting:
        return f"boxes of {count} devices that fit are {fitting}"
    divisors = [n for n in range(1, math.prod(bounds) + 1) if math.prod(bounds) % n == 0]
    return f"use `num_partitions` out of {[n for n in divisors if boxes(n, bounds)]}"
