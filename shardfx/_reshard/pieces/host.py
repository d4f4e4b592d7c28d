"""Assembles shards by NumPy copies in this process's memory.

On the CPU backend NumPy can view a shard, which is host memory, and JAX can adopt an
aligned NumPy buffer. So each byte is copied once, from the old shard to the new one.
"""

import contextlib
import functools as ft
import itertools as it
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._convert import (
    as_bits,
    chunks,
    fill,
    source_view,
    strides_of,
    target_view,
    write,
)
from ..._ground.boxes import (
    Box,
    array_of,
    as_box,
    box_shape,
    first_with,
    read_box,
    whole_box,
)
from ..._ground.copying import as_bytes, block_dim, buffers, copy_along
from ..._ground.errors import SyncError
from ..._ground.keys import raw
from .copies import Copy, HostCopies, is_small, joint_copies, shard_starts
from .shard_part import ShardPart


# Below this size, starting another thread costs more than the copy.
_TASK_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 20
# The kernel backs large buffers with huge pages of this size. A smaller write allocates
# a whole page.
_PAGE_BYTES = 2 << 20


class LocalShards:
    """This process's shards of `arrays`, as NumPy arrays, by the array's path and the
    shard's number. An array that is a NumPy array itself counts as one shard with the
    number -1. With `keeps_replicas`, each replica is read and deleted separately. By
    default the first shard of a fully replicated array is read in place of all its
    shards.
    """

    def __init__(self, arrays: Mapping[str, Any], keeps_replicas: bool = False):
        # Keys are paths, and pairs of a path and the number of a shard.
        self._arrays = arrays
        # The arrays, with key data in place of typed PRNG keys.
        self._raw_arrays: dict[str, Any] = {}
        self._boxes: dict[str, list[Box]] = {}
        self._numpy_shards: dict[tuple[str, int], np.ndarray] = {}
        # If replicas are read and deleted separately: every local shard by its number.
        self._replicas: dict[str, list[jax.Array]] = {}
        if keeps_replicas:
            for path, leaf in arrays.items():
                self._replicas[path] = [shard.data for shard in leaf.addressable_shards]

    def as_numpy(self, path: str, number: int) -> np.ndarray:
        """The shard number `number` of the array at `path`, as a NumPy array. It is
        cached.
        """
        array = self._numpy_shards.get((path, number))
        if array is None:
            array = np.asarray(self._shard(path, number))
            if not array.flags.c_contiguous:
                array = array.copy()
            self._numpy_shards[path, number] = array
        return array

    def leaf(self, path: str) -> Any:
        """The array at a path; for PRNG keys, the array of their key data."""
        if path not in self._raw_arrays:
            self._raw_arrays[path] = raw(self._arrays[path])
        return self._raw_arrays[path]

    def boxes(self, path: str) -> list[Box]:
        """The boxes of this process's shards of the array at `path`. A NumPy array is
        one shard.
        """
        if path not in self._boxes:
            leaf = self.leaf(path)
            boxes = [whole_box(leaf.shape)]
            if isinstance(leaf, jax.Array):
                shards = leaf.addressable_shards
                boxes = [as_box(shard.index, leaf.shape) for shard in shards]
            self._boxes[path] = boxes
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
        elements = read_box(box, self.boxes(path), ft.partial(self.as_numpy, path))
        if elements is None:
            raise SyncError(
                f"leaf `{path}`: this process holds a part of {list(box)} only; scales"
                " must lie beside."
            )
        return elements

    def _shard(self, path: str, number: int) -> Any:
        """The shard number `number` of the array at `path`, or an array with the same
        elements.
        """
        if path in self._replicas:
            return self._replicas[path][number]
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
        self._raw_arrays.pop(path, None)
        for key in [key for key in self._numpy_shards if key[0] == path]:
            del self._numpy_shards[key]

    def delete(self, but: Container[int] = (), only: int | None = None) -> None:
        """Deletes shards; there must be only one array, whose replicas are kept apart
        (`keeps_replicas`). All shards are deleted but those whose numbers are in `but`,
        or just the shard with the number `only`.
        """
        (path,) = self._replicas
        for number, shard in enumerate(self._replicas[path]):
            is_spared = number in but or only not in (None, number)
            if not is_spared and not shard.is_deleted():
                self._numpy_shards.pop((path, number), None)
                shard.delete()


def start_on_host(
    struct: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    joint: Sequence[Copy],
    names: Sequence[str],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> Callable[[], jax.Array]:
    """Starts to assemble the array `struct` from shards in this process's memory, by
    NumPy copies or as views. Returns a function that waits for the copies and returns
    the array.

    `targets` are the distinct boxes of this process's shards of the array, and `copies`
    the parts of each. `joint` are the same copies for small shards, which lie in one
    memory. `names` are the paths of the arrays that are read; copies give an array by
    its position in `names`. Without `pool`, the calling thread copies.

    The new shards are views of old shards on two conditions: each new shard is a
    contiguous part of one old shard, and these old shards, which views keep alive, have
    no more bytes than copies would have. Source and target then share memory. JAX does
    not write to shared memory if one of the two arrays is donated.
    """
    dtype = np.dtype(struct.dtype)
    views = _views_of_old_shards(
        targets=targets, copies=copies, names=names, shards=shards, dtype=dtype
    )
    if views is not None:
        return ft.partial(_finished, struct, targets, views, ())

    if is_small(targets, dtype):
        *starts, nbytes = shard_starts(targets, dtype)
        element_count = nbytes // dtype.itemsize
        (memory,) = buffers([((element_count,), struct.dtype)])
        new_shards: list[np.ndarray] = []
        for box, start in zip(targets, starts, strict=True):
            new_shards.append(np.ndarray(box_shape(box), dtype, memory, start))
        copies_into = [CopiesInto(memory, joint)]
    else:
        new_shards = _empty_shards(targets, struct)
        copies_into = []
        nbytes = 0
        for buffer, shard_copies in zip(new_shards, copies, strict=True):
            copies_into.append(CopiesInto(buffer, shard_copies.copies))
            nbytes += buffer.nbytes
    tasks = _run_copies(_views(copies_into, names, shards), nbytes, pool)
    for buffer, shard_copies in zip(new_shards, copies, strict=True):
        for part in shard_copies.computed:
            _compute(buffer, part, names, shards)
    return ft.partial(_finished, struct, targets, new_shards, tasks)


def _empty_shards(
    boxes: Sequence[Box],
    struct: jax.ShapeDtypeStruct,
) -> list[np.ndarray]:
    """A buffer for each box of the array `struct`, each in a memory of its own."""
    return [buffers([(box_shape(box), struct.dtype)])[0] for box in boxes]


def _finished(
    struct: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    shards: Sequence[np.ndarray],
    tasks: Sequence[Future[None]],
) -> jax.Array:
    """Waits for `tasks`, which fill `shards`, and returns the array `struct` of them.
    `targets` are their boxes.
    """
    for task in tasks:
        task.result()
    sharding = struct.sharding
    platforms = {device.platform for device in sharding.device_set}
    with contextlib.ExitStack() as stack:
        # This copy stays within host memory.
        if is_guarded() and platforms == {"cpu"}:
            stack.enter_context(jax.transfer_guard_host_to_device("allow"))
        return array_of(
            shape=struct.shape,
            dtype=struct.dtype,
            sharding=sharding,
            boxes=targets,
            memory=shards,
        )


def is_guarded() -> bool:
    """Whether a transfer guard forbids explicit transfers to devices."""
    guard = jax.config.jax_transfer_guard_host_to_device or ""  # pyright: ignore[reportAttributeAccessIssue]
    return "explicit" in guard


def _views_of_old_shards(
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
    has the paths. `shards` are this process's old shards.
    """
    if not are_slices(copies):
        return None
    new_shards: list[np.ndarray] = []
    # Replicas share memory, so they count once.
    bytes_of_memory: dict[int, int] = {}
    for box, shard_copies in zip(targets, copies, strict=True):
        (copy,) = shard_copies.copies
        path = names[copy.array]
        old_shard = shards.as_numpy(path, copy.shard).reshape(-1)
        start = copy.source_start // dtype.itemsize
        stop = start + copy.elements
        new_shards.append(old_shard[start:stop].reshape(box_shape(box)))
        address = old_shard.__array_interface__["data"][0]
        bytes_of_memory[address] = old_shard.nbytes
    copied_bytes = sum(shard.nbytes for shard in new_shards)
    if sum(bytes_of_memory.values()) > copied_bytes:
        return None
    return new_shards


def are_slices(copies: Iterable[HostCopies]) -> bool:
    """Whether each new shard is a contiguous part of one old shard."""
    return all(shard_copies.is_slice for shard_copies in copies)


def assemble_and_delete(
    struct: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> jax.Array:
    """Assembles the array `struct` from the only array in `shards`, and deletes each
    old shard as soon as it has been read. `targets` are the boxes of the new shards,
    and `copies` the parts of each. Without `pool`, the calling thread copies.
    """
    nbytes = math.prod(struct.shape) * np.dtype(struct.dtype).itemsize
    if nbytes < _PAGE_BYTES or are_slices(copies):
        joint = joint_copies(targets, copies, struct.dtype)
        array = start_on_host(
            struct=struct,
            targets=targets,
            copies=copies,
            joint=joint,
            names=("",),
            shards=shards,
            pool=pool,
        )()
        shards.delete()
        return array

    itemsize = np.dtype(struct.dtype).itemsize
    all_copies = it.chain.from_iterable(shard.copies for shard in copies)
    fills_pages = all(_run_bytes(copy, itemsize) >= _PAGE_BYTES for copy in all_copies)
    if fills_pages:
        return _finished(
            struct,
            targets,
            _copied_by_sender(
                targets=targets, copies=copies, struct=struct, shards=shards, pool=pool
            ),
            (),
        )
    # A copy of short runs writes to pages of the whole new shard. So the copies go to
    # memory where each is one run, and from there to the new shard.
    rows = [
        HostCopies(_in_a_row(shard.copies, itemsize), (), is_slice=False)
        for shard in copies
    ]
    staged = _copied_by_sender(
        targets=targets, copies=rows, struct=struct, shards=shards, pool=pool
    )
    new_shards: list[np.ndarray] = []
    for number, box in enumerate(targets):
        (buffer,) = _empty_shards([box], struct)
        pairs = zip(rows[number].copies, copies[number].copies, strict=True)
        views = [_unstaged(row, copy, staged[number], buffer) for row, copy in pairs]
        for task in _run_copies(views, buffer.nbytes, pool):
            task.result()
        del views
        staged[number] = buffer
        new_shards.append(buffer)
    return _finished(struct, targets, new_shards, ())


def _copied_by_sender(
    targets: Sequence[Box],
    copies: Sequence[HostCopies],
    struct: jax.ShapeDtypeStruct,
    shards: LocalShards,
    pool: ThreadPoolExecutor | None,
) -> list[np.ndarray]:
    """New buffers for the boxes `targets` of the array `struct`, filled by `copies`, old
    shard by old shard. Each of the old `shards` is deleted after its last copy.
    """
    # The kernel allocates a page when it is first written, so an empty buffer uses no
    # memory.
    buffers_of_targets = _empty_shards(targets, struct)
    copies_by_sender: dict[int, list[CopiesInto]] = {}
    for buffer, shard_copies in zip(buffers_of_targets, copies, strict=True):
        for copy in shard_copies.copies:
            into = CopiesInto(buffer, [copy])
            copies_by_sender.setdefault(copy.shard, []).append(into)
    shards.delete(but=copies_by_sender)
    for sender in sorted(copies_by_sender):
        views = list(_views(copies_by_sender[sender], ("",), shards))
        sent_bytes = sum(view.target.nbytes for view in views)
        for task in _run_copies(views, sent_bytes, pool):
            task.result()
        del views
        shards.delete(only=sender)
    return buffers_of_targets


def _run_bytes(copy: Copy, itemsize: int) -> int:
    """How many bytes a copy writes to consecutive addresses of the new shard before it
    skips some.
    """
    run_bytes = itemsize
    dims = zip(reversed(copy.shape), reversed(copy.target_strides), strict=True)
    for size, stride in dims:
        if size > 1 and stride != run_bytes:
            break
        run_bytes *= size
    return run_bytes


def _in_a_row(copies: Sequence[Copy], itemsize: int) -> tuple[Copy, ...]:
    """The copies with targets that lie one after another in one memory, each
    contiguous. An element has `itemsize` bytes.
    """
    rows: list[Copy] = []
    start = 0
    for copy in copies:
        strides = strides_of(copy.shape, itemsize)
        row = copy._replace(
            target_start=start,
            target_strides=strides,
            block_dim=block_dim(copy.shape, strides, copy.source_strides),
        )
        rows.append(row)
        start += copy.elements * itemsize
    return tuple(rows)


def _unstaged(
    row: Copy,
    copy: Copy,
    staged: np.ndarray,
    buffer: np.ndarray,
) -> "Views":
    """The views for a copy from the row in `staged` to its place in the new shard
    `buffer`. `row` is the copy from the old shard to the row, and `copy` the one from
    the old shard to the new one.
    """
    from_row = copy._replace(
        source_start=row.target_start,
        source_strides=row.target_strides,
        block_dim=None,
    )
    dtype = as_bits(buffer).dtype
    return views_of(from_row, dtype, as_bytes(buffer), as_bytes(staged))


class CopiesInto(NamedTuple):
    """A new shard, and copies that write into it."""

    buffer: np.ndarray
    copies: Sequence[Copy]


class Views(NamedTuple):
    """A view of a new shard, a view of an old shard, and the dimension along which
    elements are copied in blocks.
    """

    target: np.ndarray
    source: np.ndarray
    block_dim: int | None


def _views(
    copies_into: Sequence[CopiesInto],
    names: Sequence[str],
    shards: LocalShards,
) -> Iterator[Views]:
    """Yields the views between which elements are copied, for all copies into the new
    shards in `copies_into`. `names` are the paths of the arrays that are read, and
    `shards` this process's shards of them.
    """
    old_shards: dict[tuple[int, int], np.ndarray] = {}
    for buffer, copies in copies_into:
        new_memory = as_bytes(buffer)
        dtype = as_bits(buffer).dtype
        for copy in copies:
            old_memory = old_shards.get((copy.array, copy.shard))
            if old_memory is None:
                old_memory = as_bytes(shards.as_numpy(names[copy.array], copy.shard))
                old_shards[copy.array, copy.shard] = old_memory
            yield views_of(copy, dtype, new_memory, old_memory)


def views_of(
    copy: Copy,
    dtype: np.dtype,
    new_memory: np.ndarray,
    old_memory: np.ndarray,
) -> Views:
    """The views of a new and of an old shard's memory between which `copy` copies.
    `dtype` is that of the elements.
    """
    return Views(
        target=np.ndarray(
            copy.shape, dtype, new_memory, copy.target_start, copy.target_strides
        ),
        source=np.ndarray(
            copy.shape, dtype, old_memory, copy.source_start, copy.source_strides
        ),
        block_dim=copy.block_dim,
    )


def _run_copies(
    views: Iterable[Views],
    nbytes: int,
    pool: ThreadPoolExecutor | None,
) -> list[Future[None]]:
    """Copies the elements of `views`, which have `nbytes` bytes in total. If these are
    few, or without `pool`, the calling thread copies. Otherwise threads of `pool` do,
    and the futures of their tasks are returned.
    """
    if pool is None or nbytes < 2 * _TASK_BYTES:
        _copy_all(views)
        return []
    tasks: list[Future[None]] = []
    batch: list[Views] = []
    batch_bytes = 0
    for view in views:
        batch.append(view)
        batch_bytes += view.target.nbytes
        if batch_bytes >= _TASK_BYTES:
            tasks.append(pool.submit(_copy_all, batch))
            batch = []
            batch_bytes = 0
    return [*tasks, pool.submit(_copy_all, batch)]


def _copy_all(batch: Iterable[Views]) -> None:
    """Copies from the source to the target of each pair of views."""
    for target, source, dim in batch:
        copy_along(target, source, dim)


def _compute(
    buffer: np.ndarray,
    part: ShardPart,
    names: Sequence[str],
    shards: LocalShards,
) -> None:
    """Writes the elements of `part` into `buffer`, a new shard: cast, constant, or
    multiplied by scales. `part.sender` is the number of the old shard, `names` are the
    paths of the arrays that are read, and `shards` this process's shards of them.
    """
    piece = part.piece
    value = piece.value
    if value.path is not None and value.scale is None:
        shard = shards.as_numpy(names[int(value.path)], part.sender)
        write(target_view(buffer, piece), source_view(shard, piece), piece)
        return

    def read(key: str, box: Box) -> np.ndarray:
        return shards.read(names[int(key)], box)

    for chunk in chunks(piece, _CHUNK_ELEMENTS):
        fill(buffer, whole_box(buffer.shape), chunk, read)
