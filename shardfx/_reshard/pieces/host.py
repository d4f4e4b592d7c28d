"""Assembles shards by NumPy copies in this process's memory.

On the CPU backend NumPy can view a shard, which is host memory, and JAX can adopt an
aligned NumPy buffer. So each byte is copied once, from the old shard to the new one.
"""

import contextlib
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._convert import (
    NOWHERE,
    as_bits,
    chunks,
    fill,
    source_view,
    strides_of,
    target_view,
    write,
)
from ..._ground.boxes import Box, array_of, as_box, first_with, read_box, volume
from ..._ground.copying import block_dim, buffers, copy_along
from ..._ground.errors import SyncError
from .parts import ShardPart


# Below this size, starting another thread costs more than the copy.
_TASK_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 20
# The kernel backs large buffers with huge pages of this size. A smaller write allocates
# a whole page.
_PAGE_BYTES = 2 << 20


class Copy(NamedTuple):
    """A copy of unchanged elements from an old shard to a new one, as strided views of
    both memories.

    **Arguments:**

    - `array`, `shard`: the number of the array that is read, and the number of its
      shard.
    - `shape`: the shape of the two views.
    - `source_start`, `source_strides`: the byte at which the view of the old shard
      starts, and its strides in bytes.
    - `target_start`, `target_strides`: the same for the view of the new shard.
    - `block_dim`: the dimension along which the elements are copied in blocks; `None`
      for a copy without blocks.
    """

    array: int
    shard: int
    shape: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]
    block_dim: int | None

    @property
    def elements(self) -> int:
        """The number of copied elements."""
        return math.prod(self.shape)


class HostCopies(NamedTuple):
    """The parts from which the host assembles one new shard. `copies` are copied
    unchanged. The elements of `computed` are cast, constant, or multiplied by the
    scales of a quantised array. With `is_slice`, the new shard is a contiguous part of
    one old shard.
    """

    copies: tuple[Copy, ...]
    computed: tuple[ShardPart, ...]
    is_slice: bool


def host_copies(
    parts: Sequence[ShardPart],
    dtype: Any,
    box: Box,
    shapes: Sequence[tuple[tuple[int, ...], object]],
    orders: Sequence[Mapping[int, int]],
) -> HostCopies:
    """Decides for each part of a new shard whether its elements are copied unchanged or
    computed.

    `dtype` and `box` are those of the new shard. `shapes` has the shape and dtype of a
    shard of each array that is read. `orders` has a dict for each of these arrays: from
    the number of a device to the number of its shard among this process's shards of the
    array.
    """
    copies, computed, itemsize = (
        list[Copy](),
        list[ShardPart](),
        np.dtype(dtype).itemsize,
    )
    new = strides_of(_sizes(box), itemsize)
    for part in parts:
        value, piece = part.piece.value, part.piece
        if value.path is None or value.scale is not None:
            computed.append(part)
            continue
        number = int(value.path)
        part = part._replace(sender=orders[number][part.sender])
        if value.casts or shapes[number][1] != dtype:
            computed.append(part)
            continue
        old, shape = (
            strides_of(shapes[number][0], itemsize),
            tuple(f.size for f in piece.factors),
        )
        read = tuple(
            0 if f.source_dim == NOWHERE else old[f.source_dim] * f.source_step
            for f in piece.factors
        )
        written = tuple(new[f.target_dim] * f.target_step for f in piece.factors)
        here, there = (
            sum(map(operator.mul, at, by))
            for at, by in ((piece.source, old), (piece.target, new))
        )
        copies.append(
            Copy(
                number,
                part.sender,
                shape,
                here,
                read,
                there,
                written,
                block_dim(shape, written, read),
            )
        )
    in_row = (
        strides_of(copies[0].shape, itemsize)
        if len(copies) == 1 and not computed
        else None
    )
    is_slice = (
        in_row is not None
        and copies[0].source_strides == copies[0].target_strides == in_row
    )
    return HostCopies(tuple(copies), tuple(computed), is_slice)


class LocalShards:
    """This process's shards of `arrays`, as NumPy arrays, by the array's path and the
    shard's number. An array that is a NumPy array itself counts as one shard with the
    number -1. With `keeps_replicas`, each replica is read and deleted separately. By
    default the first shard of a fully replicated array is read in place of all its
    shards.
    """

    def __init__(self, arrays: Mapping[str, Any], keeps_replicas: bool = False):
        self._arrays = arrays
        self._bits: dict[str, Any] = {}
        self._boxes: dict[str, list[Box]] = {}
        self._known: dict[tuple[str, int], np.ndarray] = {}
        own = arrays if keeps_replicas else {}
        self._owned = {
            path: [shard.data for shard in leaf.addressable_shards]
            for path, leaf in own.items()
        }

    def typed(self, path: str, number: int) -> np.ndarray:
        """The shard number `number` of the array at `path`, as a NumPy array. It is
        cached.
        """
        found = self._known.get((path, number))
        if found is None:
            given = np.asarray(self._shard(path, number))
            found = self._known[path, number] = (
                given if given.flags.c_contiguous else given.copy()
            )
        return found

    def leaf(self, path: str) -> Any:
        """The array at a path; for PRNG keys, the array of their key data."""
        if path not in self._bits:
            leaf = self._arrays[path]
            self._bits[path] = (
                jax.random.key_data(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else leaf
            )
        return self._bits[path]

    def boxes(self, path: str) -> list[Box]:
        """The boxes of this process's shards of the array at `path`."""
        if path not in self._boxes:
            leaf = self.leaf(path)
            own = (
                [one.index for one in leaf.addressable_shards]
                if isinstance(leaf, jax.Array)
                else [()]
            )
            self._boxes[path] = [as_box(index, leaf.shape) for index in own]
        return self._boxes[path]

    def containing(self, path: str, box: Box) -> int | None:
        """The number of the first shard of the array at `path` that contains the whole
        `box`; `None` if none does.
        """
        return first_with(box, self.boxes(path))

    def read(self, path: str, box: Box) -> np.ndarray:
        """The elements in `box` of the array at `path`, from several shards if no shard
        contains the whole box.
        """
        found = read_box(box, self.boxes(path), ft.partial(self.typed, path))
        if found is None:
            raise SyncError(
                f"leaf `{path}`: this process holds a part of {list(box)} only; scales"
                " must lie beside."
            )
        return found

    def _shard(self, path: str, number: int) -> Any:
        if path in self._owned:
            return self._owned[path][number]
        leaf = self.leaf(path)
        # All shards of a replicated array are equal, and NumPy can view the first
        # without a copy.
        if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated:
            return leaf
        # `addressable_shards` makes an object per shard, and a tree of small arrays has
        # many.
        return leaf.addressable_data(number)

    def forget(self, path: str) -> None:
        """Drops all references to the array at a path and to its shards."""
        self._bits.pop(path, None)
        for key in [key for key in self._known if key[0] == path]:
            del self._known[key]

    def delete(self, but: Container[int] = (), only: int | None = None) -> None:
        """Deletes shards; there must be only one array. All shards are deleted but
        those whose numbers are in `but`, or just the shard with the number `only`.
        """
        (path,) = self._owned
        for number, shard in enumerate(self._owned[path]):
            if only in (None, number) and number not in but and not shard.is_deleted():
                self._known.pop((path, number), None)
                shard.delete()


def start_on_host(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    names: Sequence[str],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> Callable[[], jax.Array]:
    """Starts to assemble the array `wanted` from shards in this process's memory, by
    NumPy copies or as views. Returns a function that waits for the copies and returns
    the array.

    `targets` are the distinct boxes of this process's shards of the array, and `copies`
    the parts of each. `names` are the paths of the arrays that are read; `copies` give
    an array by its position in `names`. Without `pool`, the calling thread copies.

    The new shards are views of old shards on two conditions: each new shard is a
    contiguous part of one old shard, and these old shards, which views keep alive, have
    no more bytes than copies would have. Source and target then share memory. JAX does
    not write to shared memory if one of the two arrays is donated.
    """
    shared = _shared(targets, copies, names, shards, np.dtype(wanted.dtype))
    if shared is not None:
        return ft.partial(_finished, wanted, targets, shared, ())
    sizes = [(_sizes(box), wanted.dtype) for box in targets]
    # One buffer for all shards of a small array takes less time to allocate.
    is_small = sum(map(volume, targets)) * np.dtype(wanted.dtype).itemsize < _TASK_BYTES
    built = buffers(sizes) if is_small else [buffers([one])[0] for one in sizes]
    pairs = list(zip(built, copies, strict=True))
    views = _views([(to, one.copies) for to, one in pairs], names, shards)
    tasks = _run_copies(views, sum(buffer.nbytes for buffer in built), pool)
    for buffer, one in pairs:
        for part in one.computed:
            _compute(buffer, part, names, shards)
    return ft.partial(_finished, wanted, targets, built, tasks)


def _finished(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    built: Sequence[np.ndarray],
    tasks: Sequence[Future[None]],
) -> jax.Array:
    for task in tasks:
        task.result()
    guard = jax.config.jax_transfer_guard_host_to_device or ""  # pyright: ignore[reportAttributeAccessIssue]
    # A transfer guard forbids explicit transfers, but this copy stays within host
    # memory.
    is_excused = "explicit" in guard and all(
        device.platform == "cpu" for device in wanted.sharding.device_set
    )
    with (
        jax.transfer_guard_host_to_device("allow")
        if is_excused
        else contextlib.nullcontext()
    ):
        return array_of(wanted.shape, wanted.dtype, wanted.sharding, targets, built)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _shared(
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    names: Sequence[str],
    shards: LocalShards,
    dtype: np.dtype,
) -> list[np.ndarray] | None:
    """The new shards as views of old shards. `None` if a new shard is not a contiguous
    part of one old shard, or if the old shards, which views would keep alive, have more
    bytes than copies would have. `targets` are the boxes of the new shards, and
    `copies` the parts of each. These give an array by its position in `names`, which
    has the paths.
    """
    if not all(one.is_slice for one in copies):
        return None
    parts, kept = [], dict[int, int]()
    for box, one in zip(targets, copies, strict=True):
        (copy,) = one.copies
        whole = shards.typed(names[copy.array], copy.shard).reshape(-1)
        first = copy.source_start // dtype.itemsize
        parts.append(whole[first : first + copy.elements].reshape(_sizes(box)))
        # Replicas share memory, so they count once.
        kept[whole.__array_interface__["data"][0]] = whole.nbytes
    return parts if sum(kept.values()) <= sum(part.nbytes for part in parts) else None


def assemble_and_delete(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> jax.Array:
    """Assembles the array `wanted` from the only array in `shards`, and deletes each
    old shard as soon as it has been read. `targets` are the boxes of the new shards,
    and `copies` the parts of each. Without `pool`, the calling thread copies.
    """
    itemsize = np.dtype(wanted.dtype).itemsize
    if math.prod(wanted.shape) * itemsize < _PAGE_BYTES or all(
        one.is_slice for one in copies
    ):
        made = start_on_host(wanted, targets, copies, ("",), shards, pool)()
        shards.delete()
        return made
    # The kernel allocates a page when it is first written, so an empty buffer uses no
    # memory.
    built = [buffers([(_sizes(box), wanted.dtype)])[0] for box in targets]
    rows = [(at, copy) for at, one in enumerate(copies) for copy in one.copies]
    shards.delete(but={copy.shard for _, copy in rows})
    by_sender = lambda pair: pair[1].shard
    for sender, group in it.groupby(sorted(rows, key=by_sender), by_sender):
        views = list(_views([(built[at], [copy]) for at, copy in group], ("",), shards))
        for task in _run_copies(
            views, sum(target.nbytes for target, *_ in views), pool
        ):
            task.result()
        shards.delete(only=sender)
    return _finished(wanted, targets, built, ())


# A view of a new shard, a view of an old shard, and the dimension along which elements
# are copied in blocks.
Views = tuple[np.ndarray, np.ndarray, int | None]


def _views(
    pairs: Sequence[tuple[np.ndarray, Sequence[Copy]]],
    names: Sequence[str],
    shards: LocalShards,
) -> Iterator[Views]:
    sources: dict[tuple[int, int], np.ndarray] = {}
    for buffer, copies in pairs:
        memory, kind = as_bytes(buffer), as_bits(buffer).dtype
        for one in copies:
            source = sources.get(one[:2])
            if source is None:
                source = sources[one[:2]] = as_bytes(
                    shards.typed(names[one.array], one.shard)
                )
            new = np.ndarray(
                one.shape, kind, memory, one.target_start, one.target_strides
            )
            yield (
                new,
                np.ndarray(
                    one.shape, kind, source, one.source_start, one.source_strides
                ),
                one.block_dim,
            )


def as_bytes(buffer: np.ndarray) -> np.ndarray:
    """A view of a buffer as bytes, from which views of other shapes and dtypes can be
    made.
    """
    flat = buffer.reshape(-1)
    return flat.view(np.uint8) if flat.size else flat


def _run_copies(
    views: Iterable[Views], nbytes: int, pool: ThreadPoolExecutor | None
) -> list[Future[None]]:
    """Copies the elements of `views`, which have `nbytes` bytes in total. If these are
    few, or without `pool`, the calling thread copies. Otherwise threads of `pool` do,
    and the futures of their tasks are returned.
    """
    if pool is None or nbytes < 2 * _TASK_BYTES:
        _copy_all(views)
        return []
    tasks, batch, size = list[Future[None]](), list[Views](), 0
    for one in views:
        batch.append(one)
        size += one[0].nbytes
        if size >= _TASK_BYTES:
            tasks.append(pool.submit(_copy_all, batch))
            batch, size = [], 0
    return [*tasks, pool.submit(_copy_all, batch)]


def _copy_all(batch: Iterable[Views]) -> None:
    for target, source, dim in batch:
        copy_along(target, source, dim)


def _compute(
    buffer: np.ndarray, part: ShardPart, names: Sequence[str], shards: LocalShards
) -> None:
    value, piece = part.piece.value, part.piece
    if value.path is not None and value.scale is None:
        shard = shards.typed(names[int(value.path)], part.sender)
        write(target_view(buffer, piece), source_view(shard, piece), piece)
        return
    whole = tuple((0, size) for size in buffer.shape)
    for chunk in chunks(piece, _CHUNK_ELEMENTS):
        fill(buffer, whole, chunk, lambda key, box: shards.read(names[int(key)], box))
