"""Orders of positions on a torus: walks that visit every position in single hops, and
the number of links between neighbours. A box of devices is given by its size in each
dimension.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from .._ground.errors import MeshError


_MULTIPLES_OF_4 = range(4, 2**31, 4)
# The sizes of a slice's dimension that links close into a ring. Cloud TPU's
# documentation: v4 and v5p (and 7x) close every multiple of 4; v5e and v6e only 16; v2
# and v3 only the dimensions of a whole pod.
_RING_SIZES: Mapping[str, Sequence[int]] = {
    "TPU v2": (16,),
    "TPU v3": (32,),
    "TPU v4": _MULTIPLES_OF_4,
    "TPU v5": _MULTIPLES_OF_4,
    "TPU v5p": _MULTIPLES_OF_4,
    "TPU v5 lite": (16,),
    "TPU v5e": (16,),
    "TPU v6 lite": (16,),
    "TPU v6e": (16,),
    "TPU7": _MULTIPLES_OF_4,
    "TPU7x": _MULTIPLES_OF_4,
}


def wraps(device_kind: str, bounds: Sequence[int]) -> tuple[bool, ...]:
    """For each dimension of a slice, whether a link joins its ends to a ring.

    **Arguments:**

    - `device_kind`: JAX's name for the kind of device, such as `"TPU v5 lite"`.
    - `bounds`: the extents of the slice, as [`shardfx.topology.bounds`][] returns them.

    **Returns:**

    A bool for each dimension; all are `False` for unknown kinds. The cores of a chip
    form no ring.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.wraps("TPU v4", (4, 4, 2, 1)) == (True, True, False, False)
        assert topology.wraps("TPU v5 lite", (16, 8)) == (True, False)
        ```
    """
    ring_sizes = _RING_SIZES.get(device_kind, ())
    # Behind x, y and z stand the cores.
    # A range looks up Python's integers at once, and searches for those of NumPy.
    sizes = map(int, bounds)
    return tuple(dim < 3 and size in ring_sizes for dim, size in enumerate(sizes))


def ring_path(
    box: Sequence[int],
    closed: Sequence[bool] | None = None,
) -> Int[np.ndarray, "places dims"]:
    """A walk through every position of a box in single hops, which ends next to its
    start if possible.

    **Arguments:**

    - `box`: the size of the box in each dimension.
    - `closed`: for each dimension, whether links join its ends; none are joined by
      default.

    **Returns:**

    The positions in the order of the walk; successive positions differ by one in one
    dimension. The last position is a neighbour of the first if some dimension has an
    even size, and either links join its ends or another dimension is above 1.

    !!! Example

        ```python
        from shardfx import topology

        assert topology.ring_path((2, 2)).tolist() == [[0, 0], [0, 1], [1, 1], [1, 0]]
        ```
    """
    if not box:
        return np.zeros((1, 0), np.int64)
    closed = _closed(closed, len(box))
    long_dims = [dim for dim, size in enumerate(box) if size > 1]
    even_dims = [dim for dim in long_dims if box[dim] % 2 == 0]
    even_rings = [dim for dim in even_dims if closed[dim]]
    # The walk goes through the other dimensions row by row, each row at one position of
    # the slow dimension.
    slow_dim, *_ = [*even_rings, *even_dims, *long_dims, 0]
    row_count = box[slow_dim]
    row_box = list(box)
    row_box[slow_dim] = 1
    row = _snake(row_box)
    if even_rings or not even_dims or len(long_dims) < 2:
        return _back_and_forth(row, slow_dim, row_count)

    # No link joins the ends of the slow dimension, so one column is left for the way
    # back.
    column = np.repeat(row[:1], row_count, axis=0)
    column[:, slow_dim] = np.arange(row_count)
    there = _back_and_forth(row[1:], slow_dim, row_count)
    back = column[:0:-1]
    return np.concatenate([column[:1], there, back])


def _closed(closed: Sequence[bool] | None, rank: int) -> tuple[bool, ...]:
    """Whether links join the ends of each of `rank` dimensions; none are joined by
    default. Raises `MeshError` for another number of them.
    """
    if closed is None:
        return (False,) * rank
    if len(closed) != rank:
        raise MeshError(
            f"`closed` {tuple(closed)} has {len(closed)} entries, and there are {rank}"
            " dimensions; give one for each."
        )
    return tuple(closed)


def rings_of(
    box: Sequence[int],
    bounds: Sequence[int],
    closed: Sequence[bool],
) -> list[bool]:
    """For each dimension of a box in a torus of extents `bounds`, whether links join
    the ends of the box: the box spans the dimension, whose ends links join.
    """
    rings: list[bool] = []
    for size, bound, is_closed in zip(box, bounds, closed, strict=True):
        rings.append(is_closed and size == bound)
    return rings


def torus_order(
    bounds: Sequence[int],
    sizes: Sequence[int],
    closed: Sequence[bool] | None = None,
) -> Int[np.ndarray, "..."]:
    """The positions of a torus in the order of a mesh. If possible, neighbours on every
    mesh axis are one hop apart.

    The torus is divided into equal boxes for the last axis, which is assumed to
    communicate most. Then these boxes are grouped for the axis before it, and so on.
    [`shardfx.topology.default_submesh`][] has the rule for each box.

    **Arguments:**

    - `bounds`: the extents of the torus, from [`shardfx.topology.bounds`][]; the last
      dimension is the cores.
    - `sizes`: the sizes of the mesh axes, the slowest first. Their product is that of
      `bounds`.
    - `closed`: for each dimension, whether links join its ends; none are joined by
      default.

    **Returns:**

    An integer array of coordinates, of shape `(*sizes, len(bounds))`.

    **Raises:**

    `MeshError` if the products of `bounds` and of `sizes` differ.

    !!! Example

        ```python
        from shardfx import topology

        order = topology.torus_order((4, 4), (4, 4))
        assert order[0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
        ```
    """
    if math.prod(bounds) != math.prod(sizes):
        raise MeshError(
            f"mesh axes of sizes {tuple(sizes)} have {math.prod(sizes)} devices, but"
            f" bounds {tuple(bounds)} hold {math.prod(bounds)}; use sizes whose product"
            f" is {math.prod(bounds)}."
        )
    rank = len(bounds)
    axis_count = len(sizes)
    closed = _closed(closed, rank)
    # The boxes of the axes so far are the positions of the next axis: how many there
    # are in each dimension, and how far they are apart.
    box_counts = list(bounds)
    strides = [1] * rank
    order = np.zeros((*[1] * axis_count, rank), np.int64)
    for axis in reversed(range(axis_count)):
        boxes = feasible_submeshes(sizes[axis], box_counts)
        box = preferred(boxes, bounds, strides)
        rings = rings_of(box, bounds, closed)
        path = ring_path(box, rings) * np.array(strides)
        # The path varies along this axis alone.
        shape = [1] * axis_count
        shape[axis] = len(path)
        order = order + path.reshape((*shape, rank))
        box_counts = list(map(operator.floordiv, box_counts, box))
        strides = list(map(operator.mul, strides, box))
    return order


def mean_hops(
    order: Int[np.ndarray, "..."],
    axis: int,
    bounds: Sequence[int],
    closed: Sequence[bool] | None = None,
) -> float:
    """The mean number of links between neighbours along one axis of a mesh.

    **Arguments:**

    - `order`: the coordinates in mesh order, as [`shardfx.topology.torus_order`][]
      returns them.
    - `axis`: the index of the mesh axis. The step from its last position to its first
      is not counted.
    - `bounds`: the extents of the torus.
    - `closed`: for each dimension, whether links join its ends; none are joined by
      default.

    **Returns:**

    The mean number: 1.0 if links join all neighbours, 0.0 for an axis of size 1.

    !!! Example

        ```python
        from shardfx import topology

        bounds = (4, 4, 1, 1)
        rows = topology.submesh_order(bounds, (2, 2, 1, 1), bounds, tile_by_host=False)
        assert topology.mean_hops(rows, 1, bounds) == 1.6
        snake = topology.torus_order(bounds, (1, 16))
        assert topology.mean_hops(snake, 1, bounds) == 1.0
        ```
    """
    if order.shape[axis] < 2:
        return 0.0
    distances = np.abs(np.diff(order, axis=axis))
    ways_around = np.array(bounds) - distances
    ring_distances = np.minimum(distances, ways_around)
    is_ring = _closed(closed, len(bounds))
    hops = np.where(is_ring, ring_distances, distances)
    return float(hops.sum(axis=-1).mean())


def feasible_submeshes(
    num_partitions: int,
    bounds: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Every box of `num_partitions` devices whose sizes divide `bounds`, in
    lexicographic order.

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
    boxes: list[tuple[int, ...]] = []
    for box in itertools.product(*map(divisors, bounds)):
        if math.prod(box) == num_partitions:
            boxes.append(box)
    return tuple(boxes)


def divisors(number: int) -> list[int]:
    """The divisors of `number`, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def preferred(
    candidates: Sequence[tuple[int, ...]],
    bounds: Sequence[int],
    strides: Sequence[int],
) -> tuple[int, ...]:
    """The box in `candidates` with the best links on hardware of extents `bounds`.

    `strides` has for each dimension the number of hops between positions of the box that
    are next to each other. The rule prefers, in this order: the most cores of a chip,
    the fewest devices along dimensions with strides above 1, the most devices in
    dimensions that the box spans wholly, the most such dimensions, and the smallest sum
    of sizes.
    """

    def preference(box: tuple[int, ...]) -> tuple[object, ...]:
        """A key that is larger for a better box."""
        cores = box[-1]
        strided_devices = 1
        whole_dims = 0
        devices_in_whole_dims = 1
        for size, bound, hops in zip(box, bounds, strides, strict=True):
            if hops > 1:
                strided_devices *= size
            if size == bound > 1:
                whole_dims += 1
                devices_in_whole_dims *= size
        # Of boxes that are equally good, the one that is larger in earlier dimensions.
        return (
            cores,
            -strided_devices,
            devices_in_whole_dims,
            whole_dims,
            -sum(box),
            box,
        )

    return max(candidates, key=preference)


def _snake(box: Sequence[int]) -> Int[np.ndarray, "places dims"]:
    """A walk through all positions of a box in single hops, row by row, every second
    row backwards. The last dimension varies fastest.
    """
    path = np.zeros((1, len(box)), np.int64)
    for dim in reversed(range(len(box))):
        path = _back_and_forth(path, dim, box[dim])
    return path


def _back_and_forth(
    row: Int[np.ndarray, "places dims"],
    slow_dim: int,
    count: int,
) -> Int[np.ndarray, "more dims"]:
    """The path `row`, `count` times, every second time backwards; dimension `slow_dim`
    has the number of the repetition.
    """
    path = np.stack([row] * count)
    path[1::2] = row[::-1]
    if path.size:
        path[:, :, slow_dim] = np.arange(count)[:, None]
    return path.reshape(-1, row.shape[1])
