"""Finds the positions of devices from their attributes, and the order of devices in a
mesh: JAX's own order, or a documented fallback.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.experimental import mesh_utils

from .._ground.errors import MeshError
from ._devices import Device, Devices, bounds, listed, positions, processes, slices
from ._torus import mean_hops, ring_path, rings_of, torus_order, wraps


# For each position on the torus, the index of its device in a list.
Grid: TypeAlias = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceOrder:
    """Devices in the order of a mesh, with the method and the reasons for this order.

    **Arguments:**

    - `devices`: an array of the mesh's shape that holds every device once.
    - `method`: `"mesh_utils"` (JAX's order), `"mesh_utils, physical axes split"` (JAX's
      order if mesh axes must split a dimension of the torus), `"torus"`
      ([`shardfx.topology.torus_order`][]), or `"as given"` (by id, for TPUs without
      known positions). It begins with `"hybrid: "` if the mesh spans several slices.
    - `reasons`: why the order is not JAX's own, or how it was changed; empty for JAX's
      own order. Those within a slice are of the first slice.
    - `mean_hops`: for each mesh axis, the mean number of links between neighbours
      within the first slice; `None` for devices without coordinates.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec

        order = MeshSpec({"data": 2, "tensor": 4}).order(jax.devices())
        assert order.mean_hops is None  # CPUs have no coordinates
        assert order.reasons == ()
        ```
    """

    __module__ = "shardfx.topology"

    devices: np.ndarray
    method: str
    reasons: tuple[str, ...]
    mean_hops: tuple[float, ...] | None


def device_order(
    devices: Devices,
    sizes: Sequence[int],
    dcn_sizes: Sequence[int] | None = None,
) -> DeviceOrder:
    """The order of devices in a mesh of these sizes, as [`shardfx.MeshSpec.order`][]
    finds it for a MeshSpec.

    **Arguments:**

    - `devices`: devices or objects with their attributes, in any order; see
      [`shardfx.topology.coords`][].
    - `sizes`: the size of each mesh axis, the slowest first.
    - `dcn_sizes`: the number of slices (or nodes) that each axis spans; it must divide
      the size of the axis.

    **Returns:**

    The order, with the reasons for a fallback.

    **Raises:**

    `MeshError` if the product of the sizes is not the number of devices, if the product
    of `dcn_sizes` is not the number of slices, or if `dcn_sizes` do not divide the
    sizes.

    !!! Example

        ```python
        import jax
        from shardfx import topology

        order = topology.device_order(jax.devices(), (4, 2))
        assert order.devices.shape == (4, 2) and order.method == "mesh_utils"
        ```
    """
    sizes = tuple(sizes)
    dcn = (1,) * len(sizes) if dcn_sizes is None else tuple(dcn_sizes)
    devices = listed(devices)
    _require_dividing(sizes, dcn)
    if math.prod(sizes) != len(devices):
        raise MeshError(
            f"mesh axes of sizes {sizes} have {math.prod(sizes)} devices, but"
            f" {len(devices)} were given."
        )
    distinct_ids = {id(device) for device in devices}
    if len(distinct_ids) < len(devices):
        raise MeshError("a device was given twice; pass each device once.")
    # The indices of the devices of each slice, and the slices along each mesh axis.
    indices_by_slice, dcn, reasons = _granules(devices, sizes, dcn)
    counts = list(map(len, indices_by_slice))
    if len(set(counts)) > 1:
        raise MeshError(
            f"the {len(devices)} devices are {counts} per slice; pass the same number"
            " of each slice."
        )
    sizes_in_slice = tuple(map(operator.floordiv, sizes, dcn))
    orders: list[DeviceOrder] = []
    for indices in indices_by_slice:
        devices_of_slice = [devices[index] for index in indices]
        orders.append(_order_within_slice(devices_of_slice, sizes_in_slice))

    # Each axis goes over slices first, then over the devices within a slice: with two
    # axes, dimensions 0 and 2 become the first axis, and 1 and 3 the second.
    by_slice = np.stack([order.devices for order in orders])
    by_slice = by_slice.reshape((*dcn, *sizes_in_slice))
    pairs_of_dims = np.arange(by_slice.ndim).reshape(2, len(sizes))
    dim_order = pairs_of_dims.T.ravel()
    first = orders[0]
    method = first.method
    if len(orders) > 1:
        method = f"hybrid: {method}"
    return DeviceOrder(
        devices=by_slice.transpose(dim_order).reshape(sizes),
        method=method,
        reasons=(*reasons, *first.reasons),
        mean_hops=first.mean_hops,
    )


class _Granules(NamedTuple):
    """Slices or nodes, within which devices share the fast network: the indices of the
    devices of each, the number of slices along each mesh axis, and notes about the
    choice.
    """

    groups: tuple[tuple[int, ...], ...]
    dcn: tuple[int, ...]
    reasons: tuple[str, ...]


def _require_dividing(sizes: tuple[int, ...], dcn_sizes: tuple[int, ...]) -> None:
    """Raises `MeshError` if the slices that an axis spans do not divide its size."""
    if len(dcn_sizes) != len(sizes):
        raise MeshError(
            f"`dcn_sizes={dcn_sizes}` must have one number for each of the sizes {sizes}."
        )
    for size, slice_count in zip(sizes, dcn_sizes, strict=True):
        if slice_count < 1 or size % slice_count:
            raise MeshError(
                f"`dcn_sizes={dcn_sizes}` must divide the sizes {sizes}: {slice_count} is no"
                f" divisor of {size}."
            )


def _granules(
    devices: list[Device],
    sizes: tuple[int, ...],
    dcn: tuple[int, ...],
) -> _Granules:
    """Divides devices into slices or nodes. `dcn` has the number of slices that each
    axis should span. If it is 1 for all axes but there are several slices, the slowest
    axes span them. Groups are tuples of indices in `devices`.
    """
    slice_count = math.prod(dcn)
    groups = slices(devices)
    if slice_count == 1 and len(groups) == 1:
        return _Granules(groups, dcn, reasons=())
    if slice_count == 1:
        spans = _spread(len(groups), sizes)
        if spans is None:
            raise MeshError(
                f"the devices are of {len(groups)} slices, and no axes of sizes {sizes}"
                " can span them; "
                f'say which do, as in `MeshSpec(..., dcn={{"data": {len(groups)}}})`.'
            )
        reason = (
            f"the devices are of {len(groups)} slices and `dcn` spans one: axes span"
            f" {spans} of them"
        )
        return _Granules(groups, spans, reasons=(reason,))
    if len(groups) == 1 and len(nodes := processes(devices)) > 1:
        groups = nodes
    if len(groups) == 1 and devices[0].platform == "cpu":
        per_slice = len(devices) // slice_count
        blocks: list[tuple[int, ...]] = []
        for start in range(0, len(devices), per_slice):
            blocks.append(tuple(range(start, start + per_slice)))
        reason = (
            f"one process emulates {slice_count} slices of {per_slice} devices, in"
            " the order given"
        )
        return _Granules(tuple(blocks), dcn, reasons=(reason,))
    if len(groups) != slice_count:
        raise MeshError(
            f"`dcn` spreads the mesh over {slice_count} slices, but the devices are of"
            f" {len(groups)}; use `dcn` sizes whose product is {len(groups)}."
        )
    return _Granules(groups, dcn, reasons=())


def _spread(count: int, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The number of slices along each mesh axis, if `count` slices are divided among
    the slowest axes; `None` if the sizes do not allow it. For 8 slices and sizes (4,
    6): (4, 2).
    """
    spans: list[int] = []
    remaining = count
    for size in sizes:
        span = math.gcd(remaining, size)
        spans.append(span)
        remaining //= span
    if remaining > 1:
        return None
    return tuple(spans)


def _order_within_slice(devices: list[Device], sizes: tuple[int, ...]) -> DeviceOrder:
    """The order of the devices of one slice in a mesh of `sizes`."""
    if devices[0].platform != "tpu":
        array = mesh_utils.create_device_mesh(sizes, devices)
        return _plain_order(array, "mesh_utils")
    # JAX's orders for small slices depend on the order of the list, which must not
    # depend on the caller.
    devices = sorted(devices, key=lambda device: device.id)
    try:
        grid = positions(devices)
    except MeshError as failure:
        return _torus_mesh(devices, sizes, str(failure))
    return _walked(devices, grid, _torus_mesh(devices, sizes, grid))


def _plain_order(array: np.ndarray, method: str, *reasons: str) -> DeviceOrder:
    """An order without the links between neighbours."""
    return DeviceOrder(
        devices=array,
        method=method,
        reasons=reasons,
        mean_hops=None,
    )


def _torus_mesh(
    devices: list[Device],
    sizes: tuple[int, ...],
    grid: Grid | str,
) -> DeviceOrder:
    """The order of the TPUs of one slice in a mesh of `sizes`, from JAX or else from
    `torus_order`.

    If the positions are unknown, `grid` is a text that says why, and the fallback is
    the order of ids.
    """
    if not isinstance(grid, str):
        cores_first = _cores_first(devices, sizes, grid)
        if cores_first is not None:
            return _plain_order(cores_first, "mesh_utils")
    try:
        array = mesh_utils.create_device_mesh(sizes, devices)
        return _plain_order(array, "mesh_utils")
    except NotImplementedError:
        reason = (
            f"axes of sizes {sizes} are no products of whole physical dimensions"
            f" {bounds(devices)}"
        )
        try:
            array = mesh_utils.create_device_mesh(
                sizes, devices, allow_split_physical_axes=True
            )
            return _plain_order(array, "mesh_utils, physical axes split", reason)
        except TypeError:
            # If no split fits either (16x20x28 as 140 x 16 x 4), JAX 0.10 fails on its
            # own `None`.
            cause = "no split of their physical axes fits"
    except AssertionError as failure:
        cause = str(failure).split(":")[0]
    flat = _object_array(devices)
    if isinstance(grid, str):
        return _plain_order(flat.reshape(sizes), "as given", f"ordered by id: {grid}")
    closed = wraps(devices[0].device_kind, grid.shape)
    places = torus_order(grid.shape, sizes, closed)
    index = tuple(np.moveaxis(places, -1, 0))
    array = flat[grid[index]]
    return _plain_order(array, "torus", f"JAX has no order for these devices ({cause})")


def _object_array(devices: Sequence[Device]) -> np.ndarray:
    """An array of the devices. `np.array` would look into each for elements."""
    array = np.empty(len(devices), object)
    array[:] = devices
    return array


# The kinds of devices of which a chip has two, on a link faster than those between chips.
_TWO_CORES = ("TPU7x", "TPU7")


def _cores_first(
    devices: list[Device],
    sizes: tuple[int, ...],
    grid: Grid,
) -> np.ndarray | None:
    """The order of devices in a mesh of `sizes` that JAX has since 0.11.1 for chips
    whose cores are separate devices; `None` for other chips, and if `sizes` are no
    products of whole physical dimensions.

    The fastest mesh axis takes the dimension of the cores where it can. Older versions
    of JAX prefer x, y and z. The order of a plan must not depend on the version, so this
    follows `_create_device_mesh_for_nd_torus` in `jax/_src/mesh_utils.py` of 0.12.
    """
    if devices[0].device_kind not in _TWO_CORES or grid.shape[-1] == 1:
        return None
    # For up to four trays of 8 devices, every version of JAX has one table of rings.
    is_tray = len(devices) % 8 == 0 and len(devices) <= 32 and max(grid.shape[:2]) <= 2
    if is_tray:
        return None
    rank = grid.ndim
    dims_in_order = (rank - 1, *range(rank - 1))
    assigned = _dims_of_axes(sizes, grid.shape, dims_in_order)
    if assigned is None:
        return None
    transpose = list(itertools.chain.from_iterable(assigned))
    array = _object_array(devices)[grid]
    return array.transpose(transpose).reshape(sizes)


def _dims_of_axes(
    sizes: tuple[int, ...],
    extents: tuple[int, ...],
    free: tuple[int, ...],
) -> tuple[tuple[int, ...], ...] | None:
    """The dimensions of the torus that each mesh axis takes whole, the last axis first
    to choose; `None` if there is no such choice.

    `sizes` are those of the mesh axes, `extents` those of the torus, and `free` the
    dimensions that no axis has yet. An axis prefers many dimensions, then those that
    come first in `free`. Where that leaves none for the other axes, it takes the next
    choice; JAX splits dimensions there.
    """
    if not sizes:
        return None if free else ()
    for count in range(len(free), -1, -1):
        for dims in itertools.combinations(free, count):
            extents_of_dims = [extents[dim] for dim in dims]
            if math.prod(extents_of_dims) != sizes[-1]:
                continue
            others = [dim for dim in free if dim not in dims]
            before = _dims_of_axes(sizes[:-1], extents, tuple(others))
            if before is not None:
                return (*before, tuple(sorted(dims)))
    return None


def _walked(devices: list[Device], grid: Grid, order: DeviceOrder) -> DeviceOrder:
    """`order` with shorter ways between neighbours on its mesh axes, and with the mean
    hops between them. `grid` has the positions of `devices`.

    If the devices along an axis fill a box of the torus, they are put in an order in
    which neighbours are one hop apart. Those at the first position of the other axes
    decide the order for all.
    """
    array = order.devices
    extents = grid.shape
    rank = len(extents)
    closed = wraps(devices[0].device_kind, extents)
    # The position of each device on the torus.
    place_of = {id(devices[index]): place for place, index in np.ndenumerate(grid)}
    places = np.array([place_of[id(device)] for device in array.flat])
    places = places.reshape(*array.shape, rank)

    def hops_of(places: np.ndarray, axis: int) -> float:
        """The mean hops between neighbours along a mesh axis."""
        return mean_hops(places, axis, extents, closed)

    changed: list[int] = []
    for axis in range(array.ndim):
        along_last = np.moveaxis(places, axis, -2)
        lines = along_last.reshape(-1, array.shape[axis], rank)
        walk = _walk(lines[0], extents, closed)
        if walk is None:
            continue
        walked = np.take(places, walk, axis)
        if hops_of(walked, axis) < hops_of(places, axis):
            places = walked
            array = np.take(array, walk, axis)
            changed.append(axis)

    reasons = order.reasons
    if changed:
        reason = (
            f"axes {tuple(changed)} walk their boxes in single hops instead of row"
            " by row"
        )
        reasons = (*reasons, reason)
    return DeviceOrder(
        devices=array,
        method=order.method,
        reasons=reasons,
        mean_hops=tuple([hops_of(places, axis) for axis in range(array.ndim)]),
    )


def _walk(
    line: np.ndarray,
    extents: tuple[int, ...],
    closed: tuple[bool, ...],
) -> np.ndarray | None:
    """The indices of the positions in `line`, in an order in which each is one hop from
    the one before; `None` if the positions do not fill a box of the torus.

    The box may be strided, such as the x coordinates 0, 2 and 4; a hop is then such a
    step. `line` has the coordinates of the devices along one mesh axis. For each
    dimension of the torus, `extents` has its size, and `closed` says whether links join
    its ends.
    """
    box: list[int] = []
    # For each dimension, the number of each position among those of the box.
    positions_in_box: list[np.ndarray] = []
    for column in line.T:
        values, numbers = np.unique(column, return_inverse=True)
        box.append(len(values))
        positions_in_box.append(numbers.reshape(-1))
    if math.prod(box) != len(line) or len(line) < 2:
        return None
    index_of = np.empty(box, np.int64)
    index_of[tuple(positions_in_box)] = np.arange(len(line))
    path = ring_path(box, rings_of(box, extents, closed))
    return index_of[tuple(path.T)]
