"""Moves small arrays of one kind by NumPy copies in this process's memory, several
arrays at a time. What depends on the kind alone is computed once: a tree may have
thousands of arrays that take less time to copy than to look at.
"""

import functools as ft
from collections.abc import Sequence

import jax
import numpy as np

from ..._convert import as_bits, strides_of
from ..._ground.boxes import ArrayMaker, box_shape
from ..._ground.copying import buffers, copy_along
from .assembly import Assembly
from .copies import Copy, shard_starts
from .host import are_slices, is_guarded, views_of


# Arrays that move together share one memory, which lives as long as one of them does.
_MOST_TOGETHER = 64
_MOST_BYTES_TOGETHER = 1 << 17


class SmallMover:
    """Moves arrays as the plan `assembly` says, whose `joint_copies` assemble all new
    shards of an array in one memory. At most `most_together` arrays move in one call.
    """

    def __init__(self, assembly: Assembly):
        dtype = np.dtype(assembly.dtype)
        starts = shard_starts(assembly.targets, dtype)
        self._dtype = dtype
        self._copied_dtype = as_bits(np.empty(0, dtype)).dtype
        # The bytes of the memory of one array.
        self._memory_bytes = starts[-1]
        self._shard_numbers = sorted({copy.shard for copy in assembly.joint_copies})
        # The shard of each copy is its position in `_shard_numbers` here.
        self._copies: list[Copy] = []
        for copy in assembly.joint_copies:
            position = self._shard_numbers.index(copy.shard)
            self._copies.append(copy._replace(shard=position))
        # The shape and the first byte of each new shard. `starts` has the bytes of the
        # whole memory as well.
        self._shards: list[tuple[tuple[int, ...], int]] = []
        for box, start in zip(assembly.targets, starts, strict=False):
            self._shards.append((box_shape(box), start))
        fitting_count = _MOST_BYTES_TOGETHER // max(1, self._memory_bytes)
        self.most_together = min(_MOST_TOGETHER, max(1, fitting_count))
        self._make = ArrayMaker(
            shape=assembly.shape,
            dtype=dtype,
            sharding=assembly.sharding,
            boxes=assembly.targets,
        )

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays `arrays` in the new sharding. The new shards of all arrays lie in
        one memory, array after array.
        """
        count = len(arrays)
        memory_shape = (count * self._memory_bytes // self._dtype.itemsize,)
        (memory,) = buffers([(memory_shape, self._dtype)])
        copied_memory = memory
        if self._copied_dtype != self._dtype:
            copied_memory = memory.view(self._copied_dtype)
        # For each old shard that is read: this shard of every array, one after another.
        old_shards = [
            self._old_shards(arrays, number) for number in self._shard_numbers
        ]
        for copy in self._copies:
            sources = old_shards[copy.shard]
            # The same copy for all arrays at once.
            source_bytes = sources.nbytes // count
            views = views_of(
                _of_arrays(copy, count, self._memory_bytes, source_bytes),
                self._copied_dtype,
                copied_memory,
                sources,
            )
            copy_along(views.target, views.source, views.block_dim)

        new_shards: list[list[np.ndarray]] = []
        for shape, start in self._shards:
            strides = strides_of(shape, self._dtype.itemsize)
            shards_of_arrays = np.ndarray(
                (count, *shape),
                self._dtype,
                memory,
                start,
                (self._memory_bytes, *strides),
            )
            new_shards.append(list(shards_of_arrays))
        return list(map(self._make, zip(*new_shards, strict=True)))

    def _old_shards(self, arrays: Sequence[jax.Array], number: int) -> np.ndarray:
        """The shards with the number `number` of all arrays, one after another in
        memory.
        """
        shards: list[np.ndarray] = []
        for x in arrays:
            shard = np.asarray(x.addressable_data(number))
            if self._copied_dtype != self._dtype:
                shard = shard.view(self._copied_dtype)
            shards.append(shard)
        first = shards[0]
        if len(shards) == 1 and first.flags.c_contiguous:
            return first
        rows, *others = first.shape
        together = np.empty((len(shards) * rows, *others), self._copied_dtype)
        return np.concatenate(shards, out=together)


def _of_arrays(copy: Copy, count: int, target_bytes: int, source_bytes: int) -> Copy:
    """The copy that does what `copy` does, for `count` arrays that lie one after another
    in both memories. Each takes `target_bytes` of the new memory and `source_bytes` of
    the old one.
    """
    dim = copy.block_dim
    return copy._replace(
        shape=(count, *copy.shape),
        source_strides=(source_bytes, *copy.source_strides),
        target_strides=(target_bytes, *copy.target_strides),
        block_dim=None if dim is None else dim + 1,
    )


def small_mover(assembly: Assembly) -> SmallMover | None:
    """Returns the mover of small arrays by the plan `assembly`. `None` if new shards
    are large, computed, or may be views of old ones; or if a transfer guard forbids
    explicit transfers, which needs care.
    """
    if not assembly.joint_copies or is_guarded():
        return None
    return _mover(assembly)


@ft.lru_cache(maxsize=4096)
def _mover(assembly: Assembly) -> SmallMover | None:
    """`small_mover` for a plan with joint copies, without a transfer guard."""
    copies = assembly.host_copies
    is_computed = any(shard_copies.computed for shard_copies in copies)
    has_one_source = set(assembly.source_shapes) == {"0"}
    is_local = assembly.sharding.is_fully_addressable
    if are_slices(copies) or is_computed or not has_one_source or not is_local:
        return None
    return SmallMover(assembly)
