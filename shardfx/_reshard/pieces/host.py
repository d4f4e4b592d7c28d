"""Cuts as NumPy copies in this process's memory.

On the CPU backend NumPy can view a shard, which is host memory, and JAX can adopt an aligned NumPy buffer. So each byte
is copied once, from the old shard to the new one.
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
from ..._ground.boxes import Box, array_of, as_box, common, slices, volume
from ..._ground.copying import block_dim, buffers, copy_along
from ..._ground.errors import SyncError
from .cuts import Cut


# Below this size, starting another thread costs more than the copy.
_TASK_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 20
# The kernel backs large buffers with huge pages, so that a smaller piece touches a whole page.
_PAGE_BYTES = 2 << 20


class Copy(NamedTuple):
    """Elements that are copied unchanged from one shard to another, as strided views of both memories.

    **Arguments:**

    - `number`, `sender`: the number of the array, and of its shard.
    - `shape`: one dimension per digit.
    - `here`, `here_strides`: in bytes, the position of the first element in the sender's shard, and the stride of each
        digit there.
    - `there`, `there_strides`: the same in the new shard.
    - `along`: the dimension along which it goes in blocks, if it does.
    """

    number: int
    sender: int
    shape: tuple[int, ...]
    here: int
    here_strides: tuple[int, ...]
    there: int
    there_strides: tuple[int, ...]
    along: int | None

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Filling(NamedTuple):
    """The pieces that fill one new shard: plain copies, and pieces whose values change.

    **Arguments:**

    - `copies`: the copies without any change of values.
    - `others`: the pieces that are cast, scaled or constant.
    - `is_part`: whether the shard is a contiguous part of one old shard.
    """

    copies: tuple[Copy, ...]
    others: tuple[Cut, ...]
    is_part: bool


def filling(
    cuts: Sequence[Cut],
    dtype: Any,
    box: Box,
    shapes: Sequence[tuple[tuple[int, ...], object]],
    orders: Sequence[Mapping[int, int]],
) -> Filling:
    """Decides for each piece of a new shard whether it is a plain copy of bytes.

    **Arguments:**

    - `cuts`: the cuts that it is made of.
    - `dtype`, `box`: its dtype, and the range of the array that it holds.
    - `shapes`: the shape and dtype of a shard of each array that is read.
    - `orders`: for each array, the number of this process's shard that each device holds.
    """
    copies, others, itemsize = list[Copy](), list[Cut](), np.dtype(dtype).itemsize
    new = strides_of(_sizes(box), itemsize)
    for cut in cuts:
        value, piece = cut.piece.value, cut.piece
        if value.path is None or value.scale is not None:
            others.append(cut)
            continue
        number = int(value.path)
        cut = cut._replace(sender=orders[number][cut.sender])
        if value.casts or shapes[number][1] != dtype:
            others.append(cut)
            continue
        old, shape = strides_of(shapes[number][0], itemsize), tuple(f.size for f in piece.factors)
        read = tuple(0 if f.source_dim == NOWHERE else old[f.source_dim] * f.source_step for f in piece.factors)
        written = tuple(new[f.target_dim] * f.target_step for f in piece.factors)
        here, there = (sum(map(operator.mul, at, by)) for at, by in ((piece.source, old), (piece.target, new)))
        copies.append(Copy(number, cut.sender, shape, here, read, there, written, block_dim(shape, written, read)))
    in_row = strides_of(copies[0].shape, itemsize) if len(copies) == 1 and not others else None
    is_part = in_row is not None and copies[0].here_strides == copies[0].there_strides == in_row
    return Filling(tuple(copies), tuple(others), is_part)


class LocalShards:
    """The shards of this process by path and number, each viewed as NumPy once. A NumPy array is one shard, number -1.

    **Arguments:**

    - `arrays`: the arrays by path.
    - `one_by_one`: whether shards of a replicated array may differ, or are given up one by one.
    """

    def __init__(self, arrays: Mapping[str, Any], one_by_one: bool = False):
        self._arrays = arrays
        self._bits: dict[str, Any] = {}
        self._boxes: dict[str, list[Box]] = {}
        self._known: dict[tuple[str, int], np.ndarray] = {}
        own = arrays if one_by_one else {}
        self._owned = {path: [shard.data for shard in leaf.addressable_shards] for path, leaf in own.items()}

    def typed(self, path: str, number: int) -> np.ndarray:
        """The shard with this number of an array, as a NumPy array."""
        found = self._known.get((path, number))
        if found is None:
            given = np.asarray(self._shard(path, number))
            found = self._known[path, number] = given if given.flags.c_contiguous else given.copy()
        return found

    def leaf(self, path: str) -> Any:
        """The array at a path. For PRNG keys it is the array of their key data."""
        if path not in self._bits:
            leaf = self._arrays[path]
            self._bits[path] = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return self._bits[path]

    def boxes(self, path: str) -> list[Box]:
        """The box of each shard of an array."""
        if path not in self._boxes:
            leaf = self.leaf(path)
            own = [one.index for one in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [()]
            self._boxes[path] = [as_box(index, leaf.shape) for index in own]
        return self._boxes[path]

    def with_all(self, path: str, box: Box) -> int | None:
        """The number of the first shard that contains all of a box; `None` if none does."""
        return next((number for number, own in enumerate(self.boxes(path)) if common(box, own) == box), None)

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of an array, assembled from several shards if no single one contains it."""
        held, number = self.boxes(path), self.with_all(path, box)
        if number is not None:
            return self.typed(path, number)[slices(box, held[number])]
        made, left = np.empty([stop - start for start, stop in box], self.leaf(path).dtype), volume(box)
        for own, at in {own: at for at, own in enumerate(held)}.items():
            if (both := common(own, box)) is not None:
                made[slices(both, box)] = self.typed(path, at)[slices(both, own)]
                left -= volume(both)
        if left:
            raise SyncError(f"leaf `{path}`: this process holds a part of {list(box)} only; scales must lie beside.")
        return made

    def _shard(self, path: str, number: int) -> Any:
        if path in self._owned:
            return self._owned[path][number]
        leaf = self.leaf(path)
        # All shards of a replicated array are equal, and NumPy can view the first without a copy.
        if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated:
            return leaf
        # `addressable_shards` makes an object per shard, and a tree of small arrays has many.
        return leaf.addressable_data(number)

    def forget(self, path: str) -> None:
        """Drops the references to the array at a path."""
        self._bits.pop(path, None)
        for key in [key for key in self._known if key[0] == path]:
            del self._known[key]

    def give_up(self, but: Container[int] = (), only: int | None = None) -> None:
        """Deletes shards of the array that this object owns: all except those in `but`, or only the shard number
        `only`.
        """
        (path,) = self._owned
        for number, shard in enumerate(self._owned[path]):
            if only in (None, number) and number not in but and not shard.is_deleted():
                self._known.pop((path, number), None)
                shard.delete()


def coming(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    fillings: Sequence[Filling],
    names: Sequence[str],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> Callable[[], jax.Array]:
    """Starts to assemble an array from shards in this process's memory, by NumPy copies or as views.

    **Arguments:**

    - `wanted`: the array's shape, dtype and sharding.
    - `targets`: its different boxes.
    - `fillings`: the copies that fill each box.
    - `names`: the arrays that are read, by number.
    - `shards`: the shards of the arrays.
    - `pool`: threads to copy with: NumPy lets others run meanwhile.

    **Returns:**

    A function that waits for the copies and returns the array. If each new shard is a contiguous part of one old shard,
    and sharing keeps no more memory alive than copies take, the new shards share the source's memory. JAX knows this,
    and does not write to shared memory if one of the two arrays is donated.
    """
    shared = _shared(targets, fillings, names, shards, np.dtype(wanted.dtype))
    if shared is not None:
        return ft.partial(_there, wanted, targets, shared, ())
    sizes = [(_sizes(box), wanted.dtype) for box in targets]
    # The shards of a small array are in one block, which takes less time.
    is_small = sum(map(volume, targets)) * np.dtype(wanted.dtype).itemsize < _TASK_BYTES
    built = buffers(sizes) if is_small else [buffers([one])[0] for one in sizes]
    pairs = list(zip(built, fillings, strict=True))
    views = _views([(to, one.copies) for to, one in pairs], names, shards)
    tasks = _begun(views, sum(buffer.nbytes for buffer in built), pool)
    for buffer, one in pairs:
        for cut in one.others:
            _fill_other(buffer, cut, names, shards)
    return ft.partial(_there, wanted, targets, built, tasks)


def _there(
    wanted: jax.ShapeDtypeStruct, targets: Sequence[Box], built: Sequence[np.ndarray], tasks: Sequence[Future[None]]
) -> jax.Array:
    for task in tasks:
        task.result()
    guard = jax.config.jax_transfer_guard_host_to_device or ""  # pyright: ignore[reportAttributeAccessIssue]
    # A guard against explicit transfers permits copies within host memory.
    is_excused = "explicit" in guard and all(device.platform == "cpu" for device in wanted.sharding.device_set)
    with jax.transfer_guard_host_to_device("allow") if is_excused else contextlib.nullcontext():
        return array_of(wanted.shape, wanted.dtype, wanted.sharding, targets, built)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _shared(
    targets: Sequence[Box], fillings: Sequence[Filling], names: Sequence[str], shards: LocalShards, dtype: np.dtype
) -> list[np.ndarray] | None:
    """The new shards as views of old ones, if that keeps no more memory alive than copies would take; else `None`."""
    if not all(one.is_part for one in fillings):
        return None
    parts, kept = [], dict[int, int]()
    for box, one in zip(targets, fillings, strict=True):
        (copy,) = one.copies
        whole = shards.typed(names[copy.number], copy.sender).reshape(-1)
        first = copy.here // dtype.itemsize
        parts.append(whole[first : first + copy.elements].reshape(_sizes(box)))
        # Replicas in one memory are stored once.
        kept[whole.__array_interface__["data"][0]] = whole.nbytes
    return parts if sum(kept.values()) <= sum(part.nbytes for part in parts) else None


def put_together(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    fillings: Sequence[Filling],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> jax.Array:
    """Does the work of `coming` for one array without a map, and deletes each old shard as soon as it has been read."""
    itemsize = np.dtype(wanted.dtype).itemsize
    if math.prod(wanted.shape) * itemsize < _PAGE_BYTES or all(one.is_part for one in fillings):
        made = coming(wanted, targets, fillings, ("",), shards, pool)()
        shards.give_up()
        return made
    # The kernel gives memory page by page, when it is first written, so that an unfilled buffer takes none.
    built = [buffers([(_sizes(box), wanted.dtype)])[0] for box in targets]
    rows = [(at, copy) for at, one in enumerate(fillings) for copy in one.copies]
    shards.give_up(but={copy.sender for _, copy in rows})
    by_sender = lambda pair: pair[1].sender
    for sender, group in it.groupby(sorted(rows, key=by_sender), by_sender):
        views = list(_views([(built[at], [copy]) for at, copy in group], ("",), shards))
        for task in _begun(views, sum(target.nbytes for target, *_ in views), pool):
            task.result()
        shards.give_up(only=sender)
    return _there(wanted, targets, built, ())


# A part of a new shard, a part of an old one, and the dimension along which they are copied in blocks.
Views = tuple[np.ndarray, np.ndarray, int | None]


def _views(
    pairs: Sequence[tuple[np.ndarray, Sequence[Copy]]], names: Sequence[str], shards: LocalShards
) -> Iterator[Views]:
    sources: dict[tuple[int, int], np.ndarray] = {}
    for buffer, copies in pairs:
        memory, kind = as_bytes(buffer), as_bits(buffer).dtype
        for one in copies:
            source = sources.get(one[:2])
            if source is None:
                source = sources[one[:2]] = as_bytes(shards.typed(names[one.number], one.sender))
            new = np.ndarray(one.shape, kind, memory, one.there, one.there_strides)
            yield new, np.ndarray(one.shape, kind, source, one.here, one.here_strides), one.along


def as_bytes(buffer: np.ndarray) -> np.ndarray:
    """A buffer as bytes, for views of other shapes and of dtypes that NumPy does not know."""
    flat = buffer.reshape(-1)
    return flat.view(np.uint8) if flat.size else flat


def _begun(views: Iterable[Views], nbytes: int, pool: ThreadPoolExecutor | None) -> list[Future[None]]:
    """Starts to copy `nbytes` bytes. Small copies finish at once; large copies run in threads, whose futures it
    returns.
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


def _fill_other(buffer: np.ndarray, cut: Cut, names: Sequence[str], shards: LocalShards) -> None:
    value, piece = cut.piece.value, cut.piece
    if value.path is not None and value.scale is None:
        shard = shards.typed(names[int(value.path)], cut.sender)
        write(target_view(buffer, piece), source_view(shard, piece), piece)
        return
    whole = tuple((0, size) for size in buffer.shape)
    for part in chunks(piece, _CHUNK_ELEMENTS):
        fill(buffer, whole, part, lambda key, box: shards.read(names[int(key)], box))
