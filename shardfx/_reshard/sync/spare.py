"""The memory of a new revision (version of all weights), until it is whole and becomes
arrays.
"""

import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..._ground.boxes import Box, array_of, box_shape, boxes_here, volume
from ..._ground.copying import as_bytes, buffers
from ..._ground.errors import PlanMismatchError
from ..._ground.keys import as_keys_of_dtype, data_of
from ..._plan import ShardPlan
from ..pieces.assembly import MovedLeaf, leaves_of_plan
from .kinds import TransferKind
from .transfer import TransferPlan


# The memory of leaves is allocated in blocks of this size: the kernel allocates large
# blocks in large pages, which takes less time.
_GROUP_BYTES = 64 << 20


class SpareMemory:
    """The memory of a new revision of the arrays in the receiving process number
    `receiver`. When the last row of a group of leaves has arrived, their memory becomes
    JAX arrays with the leaves' shardings in `dst`.

    Raises `PlanMismatchError` if `dst` has other arrays than the transfer's plan,
    before memory is allocated.
    """

    def __init__(self, plan: TransferPlan, dst: ShardPlan, receiver: int):
        self._layout = layout_of(plan, dst, receiver)
        self._plan = plan
        self._dst = dst
        self._lock = threading.Lock()
        # For each group the number of rows that have not arrived.
        self._remaining = [0] * (max(self._layout.groups, default=0) + 1)
        # By the number of a leaf, and then of its buffer.
        self._memory: dict[int, dict[int, np.ndarray]] = {}
        self._bytes: dict[tuple[int, int], np.ndarray] = {}
        # The finished arrays, by the numbers of their leaves.
        self._arrays: dict[int, jax.Array] = {}

    def begin(self, row_counts: Sequence[Sequence[int]]) -> None:
        """Says how many rows come for each leaf, from each sender."""
        for counts in row_counts:
            for leaf, count in enumerate(counts):
                self._remaining[self._layout.groups[leaf]] += count

    def arrays(self) -> dict[str, jax.Array]:
        """All arrays by path. Every row of every leaf must have been written."""
        for leaf in range(len(self._plan.leaves)):
            if leaf not in self._arrays:
                self._make_array(leaf)
        self._layout.blocks.end_revision()
        return {
            leaf.path: self._arrays[number]
            for number, leaf in enumerate(self._plan.leaves)
        }

    def tree(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The arrays as the tree that `dst` was made of."""
        path_tree = self._dst.content.path_tree
        return path_tree.filled([arrays.get(path) for path in path_tree.paths])

    def memory(self, leaf: int, buffer: int) -> np.ndarray:
        """The memory of the buffer number `buffer` of the leaf number `leaf`. It is
        allocated at the first call.
        """
        memory = self._memory.get(leaf)
        if memory is None:
            with self._lock:
                if leaf not in self._memory:
                    self._allocate(self._layout.groups[leaf])
                memory = self._memory[leaf]
        return memory[buffer]

    def bytes_of(self, leaf: int, buffer: int) -> np.ndarray:
        """The memory of the buffer number `buffer` of the leaf number `leaf`, as bytes."""
        memory = self._bytes.get((leaf, buffer))
        if memory is None:
            memory = as_bytes(self.memory(leaf, buffer))
            self._bytes[leaf, buffer] = memory
        return memory

    def wrote(self, leaf: int) -> None:
        """Counts one written row of the leaf number `leaf`. After the last row of its
        group, the memory of the group's leaves becomes JAX arrays. Made one after
        another, these take less time than between copies, which empty the processor's
        caches.
        """
        group = self._layout.groups[leaf]
        with self._lock:
            self._remaining[group] -= 1
            is_whole = self._remaining[group] == 0
        if is_whole:
            for number in self._layout.leaves_of_group[group]:
                self._make_array(number)

    def _allocate(self, group: int) -> None:
        """Allocates one block of memory for all leaves of a group."""
        places = self._layout.places_of_group[group]
        shapes = [(place.shape, place.dtype) for place in places]
        views = buffers(shapes, self._layout.blocks.take)
        memory_of_leaves: dict[int, dict[int, np.ndarray]] = {}
        for place, view in zip(places, views, strict=True):
            buffers_of_leaf = memory_of_leaves.setdefault(place.leaf_number, {})
            buffers_of_leaf[place.buffer_number] = view
        # `memory` looks a leaf up without the lock, so it must find all its buffers.
        self._memory.update(memory_of_leaves)

    def _make_array(self, number: int) -> None:
        """Makes the array of the leaf number `number` of its memory, which is then no
        longer handed out.
        """
        layout = self._layout
        boxes = layout.boxes_of_leaf[number]
        # A leaf for which no rows come has no memory yet.
        if boxes:
            self.memory(number, next(iter(boxes)))
        memory = self._memory.pop(number, {})
        for buffer in memory:
            self._bytes.pop((number, buffer), None)
        leaf = self._plan.leaves[number]
        target = layout.targets[number]
        assert target.sharding is not None
        array = array_of(
            shape=leaf.shape,
            dtype=leaf.dtype,
            sharding=target.sharding,
            boxes=[boxes[buffer] for buffer in memory],
            memory=list(memory.values()),
        )
        self._arrays[number] = as_keys_of_dtype(array, target.dtype)


class _Place:
    """The shape and dtype of a buffer in a group's block, with the numbers of its leaf
    and of the buffer.
    """

    def __init__(self, leaf_number: int, buffer_number: int, box: Box, dtype: np.dtype):
        self.leaf_number = leaf_number
        self.buffer_number = buffer_number
        self.shape = box_shape(box)
        self.dtype = dtype


class MemoryLayout:
    """What all revisions have in common: the arrays that are made, and the blocks of
    memory in which their buffers lie.
    """

    def __init__(self, plan: TransferPlan, targets: Sequence[MovedLeaf], receiver: int):
        # The arrays that are made, in the order of the plan's leaves, and memory blocks
        # that revisions reuse.
        self.targets = targets
        self.blocks = Blocks()
        # For each leaf the boxes that this process fills, by the numbers of their
        # buffers.
        boxes_of_kind = [_boxes_of_kind(kind, receiver) for kind in plan.kinds]
        self.boxes_of_leaf = [boxes_of_kind[leaf.kind] for leaf in plan.leaves]

        # A group is leaves whose memory would start in the same 64 MiB if all leaves
        # lay one after another. `groups` has the group of each leaf, and
        # `places_of_group` the buffers of a group's leaves.
        self.groups: list[int] = []
        self.leaves_of_group: dict[int, list[int]] = {}
        self.places_of_group: dict[int, list[_Place]] = {}
        start_bytes = 0
        for number, leaf in enumerate(plan.leaves):
            group = start_bytes // _GROUP_BYTES
            self.groups.append(group)
            self.leaves_of_group.setdefault(group, []).append(number)
            places = self.places_of_group.setdefault(group, [])
            for buffer, box in self.boxes_of_leaf[number].items():
                places.append(
                    _Place(
                        leaf_number=number,
                        buffer_number=buffer,
                        box=box,
                        dtype=leaf.dtype,
                    )
                )
                start_bytes += volume(box) * leaf.dtype.itemsize

    def warm(self, states: int) -> None:
        """Allocates and touches the memory of `states` revisions that are alive at the
        same time.
        """
        # The sizes of the blocks of one revision.
        sizes: list[int] = []
        for places in self.places_of_group.values():
            shapes = [(place.shape, place.dtype) for place in places]
            # This asks for the same sizes as a revision does.
            buffers(shapes, lambda nbytes: _noted_block(sizes, nbytes))
        self.blocks.warm(sizes * states)


def _boxes_of_kind(kind: TransferKind, receiver: int) -> dict[int, Box]:
    """The boxes of a kind that a receiving process fills, by the numbers of their
    buffers.
    """
    boxes = {}
    for number, buffer in enumerate(kind.buffers):
        if buffer.process == receiver:
            boxes[number] = buffer.box
    return boxes


def _noted_block(sizes: list[int], nbytes: int) -> np.ndarray:
    """A block of `nbytes` bytes, whose size is added to `sizes`."""
    sizes.append(nbytes)
    return np.empty(nbytes, np.uint8)


def layout_of(plan: TransferPlan, dst: ShardPlan, receiver: int) -> MemoryLayout:
    """The layout of memory for the arrays of `dst`, from the plan's cache."""
    key = ("memory", receiver)
    layouts: Any = plan.known.setdefault(key, {})
    # Another thread may clear the cache at any time.
    layout = layouts.get(dst)
    if layout is None:
        targets = {leaf.path: leaf for leaf in leaves_of_plan(dst)}
        _require_same(plan, targets, receiver)
        layout = MemoryLayout(
            plan, [targets[leaf.path] for leaf in plan.leaves], receiver
        )
        layouts.clear()
        layouts[dst] = layout
    return layout


def _require_same(
    plan: TransferPlan,
    targets: Mapping[str, MovedLeaf],
    receiver: int,
) -> None:
    """Raises `PlanMismatchError` unless the arrays lie as the transfer's plan says."""
    paths = [leaf.path for leaf in plan.leaves]
    if paths != list(targets):
        different_paths = sorted({*paths} ^ {*targets})
        # In another order there may be no other paths.
        (other, *_) = different_paths or paths
        raise PlanMismatchError(
            f"leaf `{other}` is in only one of `dst` and the transfer's plan; give the"
            " plan from which `plan_transfer` made it."
        )
    boxes_by_key: dict[object, set[Box]] = {}
    for leaf in plan.leaves:
        target = targets[leaf.path]
        shape, dtype = data_of(target.shape, target.dtype)
        key = (target.sharding, shape)
        if key not in boxes_by_key:
            boxes_by_key[key] = _boxes_of(target.sharding, shape)
        planned_boxes = _boxes_of_kind(plan.kinds[leaf.kind], receiver)
        is_same_array = shape == leaf.shape and dtype == leaf.dtype
        lies_alike = boxes_by_key[key] == {*planned_boxes.values()}
        if not is_same_array or not lies_alike:
            raise PlanMismatchError(
                f"leaf `{leaf.path}` lies in `dst` otherwise than in the transfer's"
                " plan; give the plan from which `plan_transfer` made it."
            )


def _boxes_of(sharding: Sharding | None, shape: tuple[int, ...]) -> set[Box]:
    """The boxes of an array that this process's devices hold."""
    assert sharding is not None
    return {*boxes_here(sharding, shape).values()}


class Blocks:
    """Large memory blocks that are reused for later revisions, since the kernel
    allocates memory slowly. Several pulls may take blocks at the same time.
    """

    def __init__(self):
        self._lock = threading.Lock()
        # The number of blocks that the current revision has taken.
        self._taken = 0
        # The blocks, each with a weak reference to the base of all arrays in it, a view
        # through the buffer protocol. If the base is deleted, no array is left.
        self._blocks: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> np.ndarray:
        """A memory block of `nbytes` bytes that no array uses."""
        with self._lock:
            block = self._free_block(nbytes)
            if block is None:
                # JAX lets go of a deleted array's memory at its next operation or at
                # Python's next collection of garbage.
                gc.collect(0)
                block = self._free_block(nbytes)
            if block is None:
                block = np.empty(nbytes, np.uint8)
            # All arrays in the block are views of `base`, so the block is free once
            # `base` is deleted.
            base = np.frombuffer(block.data, np.uint8)
            self._blocks.append((block, weakref.ref(base)))
            self._taken += 1
        return base

    def _free_block(self, nbytes: int) -> np.ndarray | None:
        """A block of `nbytes` bytes without arrays, which is taken off the list; `None`
        if there is none.
        """
        for position, (block, base_ref) in enumerate(self._blocks):
            is_free = base_ref() is None
            if is_free and len(block) == nbytes:
                del self._blocks[position]
                return block
        return None

    def warm(self, sizes: Sequence[int]) -> None:
        """Allocates blocks of these sizes and writes to each page, so that the kernel
        backs them with memory.
        """
        bases = [self.take(nbytes) for nbytes in sizes]
        for base in bases:
            base[::_PAGE_BYTES] = 0

    def end_revision(self) -> None:
        """Drops memory blocks that no array uses. As many as this revision took are
        kept for the next one.
        """
        with self._lock:
            blocks = []
            spare_count = self._taken
            for block, base_ref in self._blocks:
                is_used = base_ref() is not None
                if not is_used:
                    spare_count -= 1
                if is_used or spare_count >= 0:
                    blocks.append((block, base_ref))
            self._blocks = blocks
            self._taken = 0


_PAGE_BYTES = 4096
