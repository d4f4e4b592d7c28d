"""The arrays of a sending process as its sender's threads read them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._ground.boxes import Box, as_box, first_with, read_box, whole_box
from ..._ground.copying import as_bytes
from ..._ground.errors import PlanMismatchError, SyncError
from ..._ground.keys import raw
from ..._ground.tree import flatten, near_paths
from .kinds import SourceLeaf


class PublishedLeaf(NamedTuple):
    """The distinct shards of an array in this process, and the box of each. On CPUs the
    shards are NumPy views. `layout` is equal for arrays with equal boxes.
    """

    boxes: tuple[Box, ...]
    shards: tuple[Any, ...]
    layout: object


class Published:
    """The shards of this process's arrays, by path.

    NumPy views of shards are made here, in the thread that publishes, and not in the
    threads that send: JAX crashes if one thread reads a shard of an array while another
    deletes the array (JAX 0.10.2: `addressable_data` beside `delete` aborts, and
    `numpy.asarray` of a shard is a segmentation fault). A view keeps its memory alive
    and unchanged when its array is deleted or donated.
    """

    def __init__(self, leaves: Mapping[str, PublishedLeaf]):
        self.leaves = leaves
        self._bytes: dict[tuple[str, int], np.ndarray] = {}

    def bytes_of(self, path: str, number: int) -> np.ndarray:
        """The bytes of the shard number `number` of the array at `path`."""
        memory = self._bytes.get((path, number))
        if memory is None:
            memory = as_bytes(self._as_numpy(path, number))
            self._bytes[path, number] = memory
        return memory

    def dtype_of(self, path: str) -> np.dtype:
        """The dtype of the array at `path`."""
        return np.dtype(self.leaves[path].shards[0].dtype)

    def read(self, path: str, box: Box) -> np.ndarray:
        """The elements in `box` of the array at `path`, from several shards if no shard
        contains the whole box.
        """
        leaf = self.leaves[path]
        elements = read_box(
            box, leaf.boxes, lambda number: self._as_numpy(path, number)
        )
        if elements is None:
            raise SyncError(
                f"leaf `{path}`: this process holds a part of {list(box)} only; lay the"
                " array as the plan says, so that each process has what it sends, and"
                " scales lie beside their array."
            )
        return elements

    def containing(self, path: str, box: Box) -> int | None:
        """The number of the first shard that contains the whole `box`, or `None`."""
        return first_with(box, self.leaves[path].boxes)

    def _as_numpy(self, path: str, number: int) -> np.ndarray:
        """The shard number `number` of the array at `path`, contiguous."""
        shard = np.asarray(self.leaves[path].shards[number])
        return shard if shard.flags.c_contiguous else shard.copy()


def publishable(
    tree: object,
    sources: Mapping[str, SourceLeaf],
    cache: dict[object, object],
) -> Published:
    """The arrays of `tree`, which must be as the plan of the sending job says.

    **Arguments:**

    - `tree`: the tree that the plan was made of, or a dict by path.
    - `sources`: the arrays of the plan.
    - `cache`: the boxes of the shards of earlier arrays, which are looked up and added.

    **Raises:**

    `PlanMismatchError` for an array that is missing, not in the plan, or has another
    shape or dtype; `SyncError` for an array that is deleted.
    """
    flat = flatten(tree)
    arrays = {
        path: leaf
        for path, leaf, is_array in zip(
            flat.paths, flat.leaves, flat.is_array, strict=True
        )
        if is_array
    }
    for path in sources:
        if path not in arrays:
            raise PlanMismatchError(
                f"leaf `{path}` of the plan is not in the tree{near_paths(path, arrays)}"
                " Publish the tree that the sending job's plan was made of."
            )
    for path in arrays:
        if path not in sources:
            raise PlanMismatchError(
                f"leaf `{path}` is in the tree, but not in the plan"
                f"{near_paths(path, sources)} Publish the tree that the sending job's"
                " plan was made of."
            )
    for path, leaf in arrays.items():
        _require_planned(path, leaf, sources[path])
    return Published({path: _published(leaf, cache) for path, leaf in arrays.items()})


def _require_planned(path: str, leaf: Any, source: SourceLeaf) -> None:
    """Raises an error unless `leaf` is an array with values, of the planned shape and
    dtype.
    """
    if tuple(leaf.shape) != source.shape or leaf.dtype != source.dtype:
        raise PlanMismatchError(
            f"leaf `{path}` is {leaf.dtype}{list(leaf.shape)}, but the plan is for"
            f" {source.dtype}{list(source.shape)}; plan the tree that you use."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
        raise PlanMismatchError(
            f"leaf `{path}` is a {type(leaf).__name__} without values; publish arrays,"
            " outside of `jit`."
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise SyncError(
            f"leaf `{path}` is deleted or donated; publish the arrays that the step"
            " returned."
        )


def _published(leaf: Any, cache: dict[object, object]) -> PublishedLeaf:
    """The distinct shards of an array in this process, and their boxes. Arrays with
    equal boxes have equal `layout`s. `cache` is that of `publishable`.
    """
    if not isinstance(leaf, jax.Array):
        data = np.asarray(leaf, order="C")
        box = whole_box(data.shape)
        return PublishedLeaf(boxes=(box,), shards=(data,), layout=box)
    leaf = raw(leaf)
    numbers, boxes = _distinct_boxes(leaf, cache)
    if leaf.is_fully_replicated:
        # This makes no array for the shard.
        shards = [leaf if leaf.is_fully_addressable else leaf.addressable_data(0)]
    else:
        shards = [leaf.addressable_data(number) for number in numbers]
    if all(device.platform == "cpu" for device in leaf.sharding.device_set):
        shards = [np.asarray(shard) for shard in shards]
    return PublishedLeaf(boxes=boxes, shards=tuple(shards), layout=boxes)


def _distinct_boxes(
    leaf: jax.Array,
    cache: dict[object, object],
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """The number of the first shard of each box that this process holds, and the boxes.
    `cache` has those of earlier arrays.
    """
    key = ("shards", leaf.sharding, leaf.shape)
    if key not in cache:
        numbers: dict[Box, int] = {}
        for number, shard in enumerate(leaf.addressable_shards):
            numbers.setdefault(as_box(shard.index, leaf.shape), number)
        cache[key] = (tuple(numbers.values()), tuple(numbers))
    numbers_and_boxes: Any = cache[key]
    return numbers_and_boxes
