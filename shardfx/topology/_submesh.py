"""The data x model meshes of T5X, as functions of integers."""

import math
import operator
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from .._ground.errors import MeshError
from ._torus import divisors, feasible_submeshes, preferred


# T5X's boxes by the number of partitions: (x, y, z, cores). T5X takes the first box
# that is nowhere longer than the hardware, else the last one.
_V2_V3 = {
    1: [(1, 1, 1, 1)],
    2: [(1, 1, 1, 2)],
    4: [(2, 1, 1, 2)],
    8: [(2, 2, 1, 2)],
    16: [(4, 2, 1, 2)],
}
_V4 = {
    1: [(1, 1, 1, 1)],
    2: [(1, 2, 1, 1)],
    4: [(4, 1, 1, 1), (2, 2, 1, 1)],
    8: [(1, 1, 8, 1), (4, 2, 1, 1)],
    16: [(1, 1, 16, 1), (8, 2, 1, 1), (4, 4, 1, 1), (2, 2, 4, 1)],
}
_TABLES = {"TPU v2": _V2_V3, "TPU v3": _V2_V3, "TPU v4": _V4, "TPU v4 lite": _V4}


def default_submesh(
    device_kind: str,
    num_partitions: int,
    bounds: Sequence[int],
) -> tuple[int, ...]:
    """The box of devices that holds the `num_partitions` shards of a model.

    TPU v2, v3 and v4 (one core per chip) use the entry of T5X's table if it divides the
    hardware. In all other cases one rule applies. Among the boxes whose sizes divide
    `bounds`, the rule prefers, in this order:

    1. the most cores of a chip (the last dimension);
    2. the most devices in dimensions that the box spans wholly, since links close such
       a dimension into a ring;
    3. the most such dimensions, since a torus has more links than a ring of the same
       size;
    4. the smallest sum of sizes, since the devices of a compact box can form a ring of
       neighbours, unlike an open line;
    5. the larger size in the earlier dimension.

    **Arguments:**

    - `device_kind`: JAX's name for the kind of device.
    - `num_partitions`: the number of devices that hold one copy of the model.
    - `bounds`: the extents of the hardware, as [`shardfx.topology.bounds`][] returns
      them.

    **Returns:**

    The box: a size for each dimension of `bounds`, which divides it. The product of the
    sizes is `num_partitions`.

    **Raises:**

    `MeshError`, with the numbers of partitions that have boxes, if no box of
    `num_partitions` devices divides `bounds`.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.default_submesh("TPU v4", 16, (4, 4, 4, 1)) == (4, 4, 1, 1)
        assert topology.default_submesh("TPU v5p", 32, (4, 4, 8, 1)) == (4, 1, 8, 1)
        ```
    """
    bounds = _checked_sizes("bounds", bounds)
    box_of_t5x = _box_of_t5x(device_kind, num_partitions, bounds)
    candidates = feasible_submeshes(num_partitions, bounds)
    if box_of_t5x in candidates:
        return box_of_t5x
    if not candidates:
        raise MeshError(
            f"no box of {num_partitions} devices divides the {device_kind} hardware of"
            f" bounds {bounds};"
            f" {_fix_of_count(num_partitions, bounds, '`num_partitions`')}."
        )
    return preferred(candidates, bounds, (1,) * len(bounds))


def submesh_order(
    bounds: Sequence[int],
    host_bounds: Sequence[int],
    submesh: Sequence[int],
    *,
    tile_by_host: bool = True,
) -> Int[np.ndarray, "data model dims"]:
    """The device order of T5X's data x model mesh. Each row is one copy of the model,
    in a box of shape `submesh`.

    With host tiling, the devices of a host are a contiguous part of the mesh, so that a
    host loads one range of rows. Without it, the boxes are in the order of their
    coordinates: the last dimension varies fastest. As in T5X, some boxes have no host
    tiling and another order of dimensions, from the slowest to the fastest: X, Z, Y,
    cores for a whole line along X or a whole plane of Y and Z; Z, Y, X, cores for a
    whole line along Y or plane of X and Z.

    **Arguments:**

    - `bounds`: the extents of the hardware: (x, y, z, cores) or (hosts, devices per
      host).
    - `host_bounds`: the extents of one host's devices.
    - `submesh`: the box that holds one copy of the model.
    - `tile_by_host`: whether to keep each host's devices together.

    **Returns:**

    An integer array (data, model, len(bounds)) of coordinates, which has each position
    once.

    **Raises:**

    `MeshError`, with boxes that fit, if `submesh` or `host_bounds` does not divide
    `bounds`; if such a line or plane lacks cores of its chips; or, with host tiling, if
    in some dimension neither of box and host divides the other.

    !!! Example

        ```python
        from shardfx import topology

        order = topology.submesh_order((4, 4, 1, 2), (2, 2, 1, 2), (1, 1, 1, 2))
        assert order.shape == (16, 2, 4)
        assert order[4].tolist() == [[0, 2, 0, 0], [0, 2, 0, 1]]
        ```
    """
    bounds = _checked_sizes("bounds", bounds)
    submesh = _checked_sizes("submesh", submesh)
    host_bounds = _checked_sizes("host_bounds", host_bounds)
    _check_divides(bounds, host_bounds, submesh)
    rank = len(bounds)
    dims = list(range(rank))
    # The dimension that changes its place with Z in the order, if any.
    beside_z = _beside_z(bounds, submesh)
    if beside_z is not None:
        dims[beside_z] = 2
        dims[2] = beside_z
    # Boxes of one device tile nothing.
    if not tile_by_host or beside_z is not None:
        host_bounds = (1,) * rank
    if not _fits_hosts(submesh, host_bounds):
        boxes = feasible_submeshes(math.prod(submesh), bounds)
        fitting = [box for box in boxes if _fits_hosts(box, host_bounds)]
        raise MeshError(
            f"submesh {submesh} neither divides nor is a multiple of the host bounds"
            f" {host_bounds} in every dimension; pass `tile_by_host=False`, or one of"
            f" the submeshes {fitting}."
        )
    extents = [bounds[dim] for dim in dims]
    all_places = np.indices(tuple(extents))
    places = np.moveaxis(all_places, 0, -1)
    places = places[..., np.argsort(dims)]

    # Each dimension is split into four: copies of the model over hosts and in a host,
    # then devices of one copy over hosts and in a host. The first parts of all
    # dimensions become the slowest, and the last parts the fastest.
    tile_sizes: list[int] = []
    for dim in dims:
        tile_sizes += _tiles(bounds[dim], submesh[dim], host_bounds[dim])
    split = places.reshape(*tile_sizes, rank)
    order = np.arange(4 * rank).reshape(rank, 4).T.ravel()
    grouped = split.transpose(*order, 4 * rank)
    return grouped.reshape(-1, math.prod(submesh), rank)


def hybrid_shape(
    num_partitions: int,
    local_devices: int,
    processes: int,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (data, model) mesh of GPUs within a node and across nodes. The model stays
    within a node if it fits.

    **Arguments:**

    - `num_partitions`: the number of devices that hold one copy of the model.
    - `local_devices`: the number of devices of a process (node).
    - `processes`: the number of processes.

    **Returns:**

    `(ici_shape, dcn_shape)`: the shape within a node, and the shape over nodes; each is
    (data, model).

    **Raises:**

    `MeshError` if a device would be unused; it names the feasible numbers of
    partitions.

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
    _, *several_nodes = divisors(processes)
    within_node = divisors(local_devices)
    across_nodes = [local_devices * nodes for nodes in several_nodes]
    feasible = [*within_node, *across_nodes]
    if num_partitions not in feasible:
        raise MeshError(
            f"{num_partitions} partitions do not tile {processes} processes of"
            f" {local_devices} devices; use one of {feasible}."
        )
    model = min(num_partitions, local_devices)
    nodes = num_partitions // model
    return (local_devices // model, model), (processes // nodes, nodes)


def _box_of_t5x(
    kind: str,
    partitions: int,
    bounds: tuple[int, ...],
) -> tuple[int, ...] | None:
    """The box in T5X's table for `partitions` devices of this kind; `None` if there is
    none.

    Of several boxes, it is the first within the hardware's extents `bounds`, else the
    last, which may not fit.
    """
    table = _TABLES.get(kind, {})
    # The table is for (x, y, z, cores), and for v4 with one core a chip.
    if len(bounds) != 4 or partitions not in table:
        return None
    if table is _V4 and bounds[3] != 1:
        return None
    *preferred_boxes, last_box = table[partitions]
    for box in preferred_boxes:
        if all(map(operator.le, box, bounds)):
            return box
    return last_box


def _beside_z(bounds: tuple[int, ...], submesh: tuple[int, ...]) -> int | None:
    """The dimension, X (0) or Y (1), that varies faster than Z in T5X's mesh; `None` if
    neither does.

    It is Y if the box `submesh` is a whole line of the hardware along X or a whole
    plane of Y and Z. It is X for a line along Y or a plane of X and Z. Raises
    `MeshError` if such a box lacks cores of its chips.
    """
    # (hosts, devices per host) have no X, Y and Z.
    if len(bounds) != 4:
        return None

    def covers(dim: int) -> bool:
        return submesh[dim] == bounds[dim] > 1

    def is_single(dim: int) -> bool:
        return submesh[dim] == 1

    for dim, other in ((0, 1), (1, 0)):
        is_line = covers(dim) and is_single(other) and is_single(2)
        is_plane = is_single(dim) and covers(other) and covers(2)
        if not (is_line or is_plane):
            continue
        if submesh[3] != bounds[3]:
            spanned = dim if is_line else other
            raise MeshError(
                f"submesh {submesh} spans dim {spanned} of {bounds} but"
                f" {submesh[3]} of {bounds[3]} cores (dim 3); use"
                f" {(*submesh[:3], bounds[3])}, or a box without a whole line."
            )
        return other
    return None


def _tiles(size: int, model: int, host: int) -> tuple[int, ...]:
    """The four sizes into which a dimension of `size` devices splits: copies of the
    model over hosts and in a host, then devices of one copy over hosts and in a host.

    `model` and `host` are the sizes of the model's box and of a host's devices in this
    dimension. For size 8, model 2 and host 4, the sizes are (2, 2, 1, 2).
    """
    if model % host == 0:
        return (size // model, 1, model // host, host)
    return (size // host, host // model, 1, model)


def _fits_hosts(submesh: tuple[int, ...], host_bounds: tuple[int, ...]) -> bool:
    """Whether in each dimension one of model's box and host's devices divides the
    other.
    """
    for model, host in zip(submesh, host_bounds, strict=True):
        if model % host and host % model:
            return False
    return True


def _checked_sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The argument `name`, which is `sizes`, as whole numbers. Raises `MeshError` for
    one below 1.
    """
    whole_sizes = tuple(map(int, sizes))
    for dim, size in enumerate(whole_sizes):
        if size < 1:
            raise MeshError(
                f"`{name}` {whole_sizes} has size {size} in dim {dim}; every size is"
                " at least 1."
            )
    return whole_sizes


def _check_divides(
    bounds: tuple[int, ...],
    host_bounds: tuple[int, ...],
    submesh: tuple[int, ...],
) -> None:
    """Raises `MeshError` unless `submesh` and `host_bounds` divide `bounds` in each
    dimension.
    """
    for name, sizes in (("submesh", submesh), ("host_bounds", host_bounds)):
        if len(sizes) != len(bounds):
            raise MeshError(
                f"`{name}` {sizes} has {len(sizes)} dimensions, but `bounds` {bounds}"
                f" has {len(bounds)}; give one size per dimension."
            )
        for dim, (bound, size) in enumerate(zip(bounds, sizes, strict=True)):
            if bound % size == 0:
                continue
            argument = f"a `{name}` with a number of devices"
            raise MeshError(
                f"`{name}` {sizes} does not divide the hardware bounds {bounds}: dim"
                f" {dim} of size {bound} is no multiple of {size};"
                f" {_fix_of_count(math.prod(sizes), bounds, argument)}."
            )


def _fix_of_count(count: int, bounds: tuple[int, ...], argument: str) -> str:
    """What an error says to write: the boxes of `count` devices that divide `bounds`,
    or, without any, the counts that have boxes. `argument` names the argument that the
    caller gave, to which a count belongs.
    """
    fitting = feasible_submeshes(count, bounds)
    if fitting:
        return f"boxes of {count} devices that fit are {[*fitting]}"
    counts = divisors(math.prod(bounds))
    with_boxes = [number for number in counts if feasible_submeshes(number, bounds)]
    return f"use {argument} out of {with_boxes}"
