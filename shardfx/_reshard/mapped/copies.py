"""Cuts as NumPy copies in the memory that the devices of this process's CPU share."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._convert import Piece
from ..._convert.pieces import NOWHERE
from ..._convert.values import chunks, constant, fill, write
from ..._convert.views import as_bits, source_view, strides_of, target_view
from ..._ground.boxes import Box, as_box
from ..._ground.copying import blocked, copy_along
from ..tiles.host_copies import memory_of
from .cuts import Cut


# Below this handing a copy to another thread costs more than what it spares.
_TASK_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 20
Read = Callable[[str, Box], np.ndarray]


class Copy(NamedTuple):
    """Elements of one shard that are elements of another as they are, as NumPy's views of their memory.

    **Arguments:**

    - `number`, `sender`: which array they are of, and which shard of it.
    - `shape`: one dimension per digit.
    - `here`, `here_strides`: in bytes, where they begin in the sender's shard, and the steps of each digit there.
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


@dataclasses.dataclass(frozen=True)
class Filling:
    """What one new shard is made of.

    **Arguments:**

    - `copies`: what is there as it shall be.
    - `others`: what is cast, scaled or constant.
    """

    copies: tuple[Copy, ...]
    others: tuple[Cut, ...]


def filling(
    cuts: Sequence[Cut], dtype: Any, box: Box, names: Mapping[str, int], shapes: Sequence[tuple[tuple[int, ...], Any]]
) -> Filling:
    """The copies of a new shard.

    **Arguments:**

    - `cuts`: what it is made of.
    - `dtype`, `box`: its dtype, and what it holds.
    - `names`: the number of each array that is read.
    - `shapes`: of a shard of each of them, and its dtype.
    """
    copies, others = [], []
    sizes = tuple(stop - start for start, stop in box)
    for cut in cuts:
        value = cut.piece.value
        number = names.get(value.path, -1) if value.path is not None else -1
        if number < 0 or value.scale is not None or value.casts or shapes[number][1] != dtype:
            others.append(cut)
            continue
        here = _places(cut.piece.source, shapes[number][0], dtype)
        there = _places(cut.piece.target, sizes, dtype)
        copies.append(_copy_of(number, cut.sender, cut.piece, here, there))
    return Filling(tuple(copies), tuple(others))


def _places(first: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> tuple[int, tuple[int, ...]]:
    """Where an element is in the memory of an array, and the steps of its dimensions, in bytes."""
    steps = tuple(step * np.dtype(dtype).itemsize for step in strides_of(shape))
    return sum(at * step for at, step in zip(first, steps, strict=True)), steps


def _copy_of(
    number: int, sender: int, piece: Piece, here: tuple[int, tuple[int, ...]], there: tuple[int, tuple[int, ...]]
) -> Copy:
    shape = tuple(f.size for f in piece.factors)
    read = tuple(0 if f.source_dim == NOWHERE else here[1][f.source_dim] * f.source_step for f in piece.factors)
    written = tuple(there[1][f.target_dim] * f.target_step for f in piece.factors)
    return Copy(number, sender, shape, here[0], read, there[0], written, blocked(shape, written, read))


class Shards:
    """The shards of this process, looked at once each, by path and number; a NumPy array is one shard, of number -1."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays
        self._known: dict[tuple[str, int], np.ndarray] = {}

    def typed(self, path: str, number: int) -> np.ndarray:
        """A shard."""
        found = self._known.get((path, number))
        if found is None:
            leaf = data_of_keys(self._arrays[path])
            # All shards of a replicated array are alike, and NumPy sees the first without a copy.
            is_whole = number < 0 or (isinstance(leaf, jax.Array) and leaf.is_fully_replicated)
            given = np.asarray(leaf if is_whole else leaf.addressable_data(number))
            found = self._known[path, number] = given if given.flags.c_contiguous else given.copy()
        return found

    def raw(self, path: str, number: int) -> np.ndarray:
        """A shard, as memory for views of other shapes."""
        shard = self.typed(path, number)
        # Memory of a dtype that NumPy does not know itself it does not lend.
        return shard if shard.dtype.isbuiltin == 1 else shard.reshape(-1).view(np.uint8)

    def forget(self, path: str) -> None:
        """Lets go of an array."""
        for key in [key for key in self._known if key[0] == path]:
            del self._known[key]


def data_of_keys(leaf: Any) -> Any:
    """The bits of PRNG keys; any other array as it is."""
    if isinstance(leaf.dtype, np.dtype):
        return leaf
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


class Coming(NamedTuple):
    """An array on the CPU that is being put together from the shards of others.

    **Arguments:**

    - `wanted`: its shape, dtype and sharding.
    - `targets`, `built`: its different boxes, and the memory of each; replicas share one.
    - `tasks`: the copies that other threads make.
    """

    wanted: jax.ShapeDtypeStruct
    targets: Sequence[Box]
    built: Sequence[np.ndarray]
    tasks: Sequence[Future[None]]

    def there(self) -> jax.Array:
        """The array, whose shards are buffers that were filled once; waits for it."""
        for task in self.tasks:
            task.result()
        by_box = dict(zip(self.targets, self.built, strict=True))
        shape = self.wanted.shape

        def shard(index: Any) -> np.ndarray:
            return self.built[0] if len(self.built) == 1 else by_box[as_box(index or (), shape)]

        return jax.make_array_from_callback(shape, self.wanted.sharding, shard, dtype=self.wanted.dtype)


def coming(
    wanted: jax.ShapeDtypeStruct,
    targets: Sequence[Box],
    fillings: Sequence[Filling],
    names: Sequence[str],
    shards: Shards,
    read: Read,
    pool: ThreadPoolExecutor,
) -> Coming:
    """Begins to make an array on the CPU from the shards of others.

    **Arguments:**

    - `wanted`: the array's shape, dtype and sharding.
    - `targets`: its different boxes.
    - `fillings`: what each of them is made of.
    - `names`: the arrays that are read, by number.
    - `shards`: of the arrays.
    - `read`: a box of a whole array, for what takes two.
    - `pool`: threads to copy with: NumPy lets others run meanwhile.
    """
    built = memory_of([tuple(stop - start for start, stop in box) for box in targets], np.dtype(wanted.dtype))
    pairs = list(zip(built, fillings, strict=True))
    batches = list(_batches(view for buffer, one in pairs for view in _views(buffer, one.copies, names, shards)))
    tasks = [pool.submit(_copy_all, batch) for batch in batches] if len(batches) > 1 else []
    if not tasks:
        _copy_all(batches[0] if batches else ())
    for buffer, one in pairs:
        for cut in one.others:
            _fill_other(buffer, cut, shards, read)
    return Coming(wanted, targets, built, tasks)


# A part of a new shard, a part of an old one, and along which dimension they are copied in blocks.
Views = tuple[np.ndarray, np.ndarray, int | None]


def _views(buffer: np.ndarray, copies: Sequence[Copy], names: Sequence[str], shards: Shards) -> Iterator[Views]:
    # One that is made of a dtype that NumPy does not know itself it would copy element by element.
    there = as_bits(buffer.reshape(-1))
    kind, target = there.dtype, there.view(np.uint8) if there.size else there
    for one in copies:
        new = np.ndarray(one.shape, kind, target, one.there, one.there_strides)
        source = shards.raw(names[one.number], one.sender)
        yield new, np.ndarray(one.shape, kind, source, one.here, one.here_strides), one.along


def _batches(ready: Iterable[Views]) -> Iterator[list[Views]]:
    batch: list[Views] = []
    nbytes = 0
    for one in ready:
        batch.append(one)
        nbytes += one[0].nbytes
        if nbytes >= _TASK_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _copy_all(batch: Sequence[Views]) -> None:
    for target, source, dim in batch:
        copy_along(target, source, dim)


def _fill_other(buffer: np.ndarray, cut: Cut, shards: Shards, read: Read) -> None:
    piece = cut.piece
    if piece.value.path is None:
        with np.errstate(over="ignore", invalid="ignore"):
            target_view(buffer, piece)[...] = constant(piece)
        return
    if piece.value.scale is not None:
        whole = tuple((0, size) for size in buffer.shape)
        for part in chunks(piece, _CHUNK_ELEMENTS):
            fill(buffer, whole, part, read)
        return
    write(target_view(buffer, piece), source_view(shards.typed(piece.value.path, cut.sender), piece), piece)
