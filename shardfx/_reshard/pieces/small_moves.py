"""Moves small arrays of one kind by NumPy copies in this process's memory, one array
after another. What depends on the kind alone is computed once: a tree may have thousands
of arrays that take less time to copy than to look at.
"""

import functools as ft

import jax
import numpy as np

from ..._convert import as_bits
from ..._ground.boxes import ArrayMaker, box_shape
from ..._ground.copying import buffers, copy_along
from .assembly import Assembly
from .copies import Copy, shard_starts
from .host import are_slices, is_guarded, views_of


class SmallMover:
    """Moves arrays as the plan `assembly` says, whose `joint_copies` assemble all new
    shards in one memory.
    """

    def __init__(self, assembly: Assembly):
        dtype = np.dtype(assembly.dtype)
        starts = shard_starts(assembly.targets, dtype)
        self._dtype = dtype
        self._copied_dtype = as_bits(np.empty(0, dtype)).dtype
        self._memory_shape = (starts[-1] // dtype.itemsize,)
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
        self._make = ArrayMaker(
            assembly.shape, dtype, assembly.sharding, assembly.targets
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The array `x` in the new sharding."""
        dtype = self._copied_dtype
        old_shards = self._old_shards(x)
        (memory,) = buffers([(self._memory_shape, self._dtype)])
        copied_memory = memory
        if dtype != self._dtype:
            copied_memory = memory.view(dtype)
        for copy in self._copies:
            views = views_of(copy, dtype, copied_memory, old_shards[copy.shard])
            copy_along(views.target, views.source, views.block_dim)
        new_shards: list[np.ndarray] = []
        for shape, start in self._shards:
            new_shards.append(np.ndarray(shape, self._dtype, memory, start))
        return self._make(new_shards)

    def _old_shards(self, x: jax.Array) -> list[np.ndarray]:
        """The old shards that are read, in the order of `_shard_numbers`."""
        old_shards: list[np.ndarray] = []
        for number in self._shard_numbers:
            # All shards of a replicated array are equal.
            shard = np.asarray(x.addressable_data(number))
            if not shard.flags.c_contiguous:
                shard = shard.copy()
            if self._copied_dtype != self._dtype:
                shard = shard.view(self._copied_dtype)
            old_shards.append(shard)
        return old_shards


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
