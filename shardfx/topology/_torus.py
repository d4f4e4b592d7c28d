"""Orders of positions on a torus: walks that visit every position in single hops, and
the number of links between neighbours. A box of devices is given by its size in each
dimension.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from .._ground.errors import MeshError


# The sizes of a slice's dimension that links close into a ring. Cloud TPU's
# documentation: v4 and v5p (and 7x) close every multiple of 4; v5e and v6e only 16; v2
# and v3 only the dimensions of a whole pod.
_RING_SIZES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(
        ("TPU v4", "TPU v5p", "TPU v5", "TPU7x", "TPU7"), range(4, 2**31, 4)
    ),
    **dict.fromkeys(
        ("TPU v2", "TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), (16,)
    ),
    "TPU v3": (32,),
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
    rings = _RING_SIZES.get(device_kind, ())
    return tuple(dim < 3 and size in rings for dim, size in enumerate(bounds))


def ring_path(
    box: Sequence[int], closed: Sequence[bool] | None = None
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
    closed = (False,) * len(box) if closed is None else tuple(closed)
    used = [dim for dim, size in enumerate(box) if size > 1]
    turning = [dim for dim in used if box[dim] % 2 == 0]
    joined = [dim for dim in turning if closed[dim]]
    slow = (joined or turning or used or [0])[0]
    row_box = list(box)
    if box:
        row_box[slow] = 1
    rest = _snake(row_box)
    if joined or not turning or len(used) < 2:
        return _back_and_forth(rest, slow, box[slow] if box else 1)
    # No link joins the ends of the slow dimension, so one column is left for the way
    # back.
    there = _back_and_forth(rest[1:], slow, box[slow])
    back = np.repeat(rest[:1], box[slow], axis=0)
    back[:, slow] = np.arange(box[slow])
    return np.concatenate([back[:1], there, back[:0:-1]])


def torus_order(
    bounds: Sequence[int], sizes: Sequence[int], closed: Sequence[bool] | None = None
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
    closed = (False,) * len(bounds) if closed is None else tuple(closed)
    remaining = list(bounds)
    stride = [1] * len(bounds)
    order = np.zeros((*[1] * len(sizes), len(bounds)), np.int64)
    for axis in reversed(range(len(sizes))):
        box = preferred(feasible_submeshes(sizes[axis], remaining), bounds, stride)
        whole = [closed[dim] and box[dim] == bounds[dim] for dim in range(len(bounds))]
        path = ring_path(box, whole) * np.array(stride)
        shape = [1] * (len(sizes) + 1)
        shape[axis] = len(path)
        shape[-1] = len(bounds)
        order = order + path.reshape(shape)
        remaining = [size // part for size, part in zip(remaining, box, strict=True)]
        stride = [step * part for step, part in zip(stride, box, strict=True)]
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
    closed = (False,) * len(bounds) if closed is None else tuple(closed)
    apart = np.abs(np.diff(order, axis=axis))
    ring = np.where(closed, np.minimum(apart, np.array(bounds) - apart), apart)
    return float(ring.sum(axis=-1).mean())


def feasible_submeshes(
    num_partitions: int, bounds: Sequence[int]
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
    sizes = [
        [size for size in range(1, bound + 1) if bound % size == 0] for bound in bounds
    ]
    return tuple(
        box for box in itertools.product(*sizes) if math.prod(box) == num_partitions
    )


def preferred(
    candidates: Sequence[tuple[int, ...]], bounds: Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """The box in `candidates` with the best links on hardware of extents `bounds`.

    `stride` has for each dimension the number of hops between positions of the box that
    are next to each other. The rule prefers, in this order: the most cores of a chip,
    the fewest devices along dimensions with strides above 1, the most devices in
    dimensions that the box spans wholly, the most such dimensions, and the smallest sum
    of sizes.
    """

    def rank(box: tuple[int, ...]) -> tuple:
        whole = [box[dim] for dim in range(len(box)) if box[dim] == bounds[dim] > 1]
        touched = [dim for dim in range(len(box)) if box[dim] > 1]
        strided = math.prod(box[dim] for dim in touched if stride[dim] > 1)
        return (box[-1], -strided, math.prod(whole), len(whole), -sum(box), box)

    return max(candidates, key=rank)


def _snake(box: Sequence[int]) -> Int[np.ndarray, "places dims"]:
    path = np.zeros((1, len(box)), np.int64)
    for dim in reversed(range(len(box))):
        path = _back_and_forth(path, dim, box[dim])
    return path


def _back_and_forth(
    row: Int[np.ndarray, "places dims"], slow: int, count: int
) -> Int[np.ndarray, "more dims"]:
    """The path `row`, `count` times, every second time backwards; dimension `slow` has
    the number of the repetition.
    """
    rows = []
    for index in range(count):
        rows.append(row if index % 2 == 0 else row[::-1])
    out = np.stack(rows)
    if out.size:
        out[:, :, slow] = np.arange(count)[:, None]
    return out.reshape(-1, row.shape[1])
