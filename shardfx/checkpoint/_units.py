"""What of a checkpoint is read together, and then moved together: boxes of one leaf, in the order of the files."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._ground.boxes import Box, boxes_here
from .._ground.errors import CheckpointError
from ._entry import FileArray
from ._reader import spans_of
from ._spans import Span
from ._wanted import Wanted, box_bytes


# Per device the box that it holds of an array.
BoxesOf = Callable[[Sharding, tuple[int, ...]], dict[Any, Box]]
_STAGING_BYTES = 2**30


def is_final(sharding: Sharding) -> bool:
    """Whether the host memory that an array is read into becomes the array's."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def moved(filled: np.ndarray, devices: Sequence[object], sharding: Sharding) -> list[Any]:
    """A box in host memory, on its way to each of the devices that hold it."""
    kind = sharding.memory_kind
    return [jax.device_put(filled, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]


@dataclasses.dataclass(frozen=True)
class Host:
    """What a load asks of the process that it runs in; a test may be another one.

    **Arguments:**

    - `boxes_here`: which device of this process holds which box.
    - `is_final`: whether memory that is read into becomes the array's, so that nothing is on its way to a device.
    - `move`: moves a box to its devices, where it does not.
    """

    boxes_here: BoxesOf = boxes_here
    is_final: Callable[[Sharding], bool] = is_final
    move: Callable[[np.ndarray, Sequence[Any], Sharding], list[Any]] = moved


@dataclasses.dataclass(frozen=True)
class Kind:
    """What leaves of one shape, dtype and sharding have in common; a model has many leaves and few kinds.

    **Arguments:**

    - `boxes`: the boxes of the leaf that this process holds.
    - `devices`: per box the devices that hold it.
    - `shapes`, `sizes`: per box its shape and its bytes.
    - `is_final`: as in `Host`.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    is_final: bool

    @property
    def staging_bytes(self) -> int:
        """The bytes that are on their way to devices at once, if all boxes are read at once."""
        return 0 if self.is_final else sum(self.sizes)

    def alone(self, number: int) -> "Kind":
        """One of the boxes."""
        part = slice(number, number + 1)
        return Kind(self.boxes[part], self.devices[part], self.shapes[part], self.sizes[part], self.is_final)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Some boxes of one leaf.

    **Arguments:**

    - `number`: of the leaf.
    - `leaf`, `kind`: what is read, and which boxes of it.
    - `nbytes`: of the boxes.
    - `direct`: an array in a file, and the reads that fill the boxes as they are there; `None` where none do.
    """

    number: int
    leaf: Wanted
    kind: Kind
    nbytes: int
    direct: tuple[FileArray, tuple[Span, ...]] | None = None


def units_of(leaves: Sequence[Wanted], host: Host, asked_limit: int | None) -> tuple[list[Unit], int]:
    """The units of leaves in the order of the files, and how many bytes may be on their way at once."""
    known: dict[object, Kind] = {}
    kinds = [_kind(leaf, host, known) for leaf in leaves]
    limit = _limit(leaves, kinds, asked_limit)
    numbers = sorted(range(len(leaves)), key=lambda number: _position(leaves[number]))
    return [unit for number in numbers for unit in _units(number, leaves[number], kinds[number], limit)], limit


def _position(leaf: Wanted) -> tuple[str, int]:
    if not leaf.entries:  # constants alone
        return "", 0
    entry = leaf.entries[0]
    return entry.file, entry.offset if isinstance(entry, FileArray) else 0


def _kind(leaf: Wanted, host: Host, known: dict[object, Kind]) -> Kind:
    key = (leaf.shape, leaf.dtype, leaf.sharding)
    found = known.get(key)
    if found is None:
        holders: dict[Box, tuple[Any, ...]] = {}
        for device, box in host.boxes_here(leaf.sharding, leaf.shape).items():
            holders[box] = (*holders.get(box, ()), device)
        shapes = tuple(tuple(stop - start for start, stop in box) for box in holders)
        sizes = tuple(box_bytes(box, leaf.dtype) for box in holders)
        is_last = host.is_final(leaf.sharding)
        found = known[key] = Kind(tuple(holders), tuple(holders.values()), shapes, sizes, is_last)
    return found


def _limit(leaves: Sequence[Wanted], kinds: Sequence[Kind], asked: int | None) -> int:
    largest, path = 0, ""
    for leaf, kind in zip(leaves, kinds, strict=True):
        if not kind.is_final and max(kind.sizes, default=0) > largest:
            largest, path = max(kind.sizes), leaf.path
    if asked is None:
        return max(_STAGING_BYTES, largest)
    if asked < largest:
        raise CheckpointError(
            f"`memory_limit_bytes={asked}` is less than one shard of leaf `{path}`, {largest} bytes; allow at least "
            "that, or cut the leaf over more devices."
        )
    return asked


@ft.lru_cache(maxsize=256)
def _direct(shape: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...]) -> tuple[Span, ...] | None:
    spans = spans_of(shape, itemsize, boxes, True)
    is_direct = all(span.is_direct and span.runs == 1 for span in spans)
    is_whole = all(part.where == boxes[part.number] for span in spans for part in span.parts)
    return spans if is_direct and is_whole else None


def _units(number: int, leaf: Wanted, kind: Kind, limit: int) -> Iterator[Unit]:
    if kind.staging_bytes > limit:
        for one in map(kind.alone, range(len(kind.boxes))):
            yield Unit(number, leaf, one, sum(one.sizes))
        return
    entry, direct = leaf.entries[0] if leaf.entries else None, None
    if leaf.pieces is None and isinstance(entry, FileArray) and entry.dtype == leaf.dtype:
        spans = _direct(leaf.shape, leaf.dtype.itemsize, kind.boxes)
        direct = None if spans is None else (entry, spans)
    yield Unit(number, leaf, kind, sum(kind.sizes), direct)
