"""What there is to do for each array of a tree that is made of another tree's: planned once, from shapes alone."""

import collections
import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._convert import Made, Piece, Struct, TreeMap, bound
from ..._convert.evaluate import leaf_made
from ..._convert.pieces import Counted, Scale, Value, extended, names_of, simplified
from ..._ground.boxes import Box, boxes
from ..._ground.errors import LeafTypeError, MeshError, SpecError
from ..._ground.spec import array_bytes
from ..move import data_of, has_devices, require_movable, require_reduced
from ..tiles.transfer import sharers
from .copies import Filling, filling
from .cuts import Cuts, cuts_of, least_room_bytes, smaller
from .exchange import Exchange, exchanges


# Of trees that are smaller than this, more programs would cost more than the memory that they spare.
_LEAST_BYTES = 1 << 20
Way = Literal["plain", "copies", "programs", "host"]


class Leaf(NamedTuple):
    """An array of either tree: its path, its shape and dtype, and where it lies; NumPy arrays lie nowhere."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None


class Scaled(NamedTuple):
    """An array times its scales, made before it moves."""

    name: str
    path: str
    scale: Scale
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """How one array of the target is made.

    **Arguments:**

    - `leaf`: the array.
    - `way`: "plain" (it is an array of the source, which moves as it is), "copies" (NumPy copies between the shards
        that the devices of this process's CPU hold), "programs" (over all devices of both sides) or "host" (put
        together in this process's memory, where no program spans the devices).
    - `shape`, `dtype`: of the numbers that move; of PRNG keys, their bits.
    - `made`: what it is made of.
    - `sources`: the arrays that are read, in order.
    - `scaled`: what is made of them before.
    - `targets`: its different boxes, those of this process.
    - `fillings`: what each of them is made of.
    - `cuts`: for "programs", who takes what from whom.
    - `devices`: for "programs", those of both sides.
    - `target_devices`, `source_devices`: those of the array, and of each that is read.
    - `source_shapes`: for "programs", shape and dtype of a shard of each array that is read.
    - `kind`: for "programs", what arrays have in common whose cuts differ in the names of what they read alone.
    """

    leaf: Leaf
    way: Way
    shape: tuple[int, ...]
    dtype: Any
    made: Made
    sources: tuple[str, ...]
    scaled: tuple[Scaled, ...] = ()
    targets: tuple[Box, ...] = ()
    fillings: tuple[Filling, ...] = ()
    cuts: Cuts = Cuts(())
    devices: tuple[Any, ...] = ()
    target_devices: tuple[Any, ...] = ()
    source_devices: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    source_shapes: Mapping[str, tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=dict)
    kind: Any = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter all devices of the target together."""
        return self.cuts.wire_bytes

    @ft.cached_property
    def sharers(self) -> int:
        """How many devices allocate from one memory; those of a mesh without any have memories of their own."""
        return sharers([device for device in self.devices if isinstance(device, jax.Device)])

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process has no part in it."""
        own = jax.process_index()
        if self.way == "programs":
            return all(device.process_index != own for device in self.devices)
        return self.leaf.sharding is not None and not self.leaf.sharding.addressable_devices

    @ft.cached_property
    def is_apart(self) -> bool:
        """Whether some of the devices hold one side only."""
        count = len(self.devices)
        return any(len(ends) < count for ends in (self.target_devices, *self.source_devices.values()))

    def exchanges(self, limit_bytes: int | None, most_bytes: int | None = None) -> list[Exchange]:
        """The programs, in order, with pieces that leave room for themselves.

        **Arguments:**

        - `limit_bytes`: within so many bytes of a memory.
        - `most_bytes`: without a limit so many of a device, where the sides are apart: those hold what they send twice.
        """
        pieces = [cut for cut in self.cuts.made if cut.piece.value.path is not None]
        room = self._room(limit_bytes, most_bytes)
        if room is not None:
            pieces = [part for cut in pieces for part in smaller(cut, room)]
        homes = {path: (here, self.source_shapes[path][1]) for path, here in self.source_devices.items()}
        counts = (len(self.devices), len(self.target_devices))
        return exchanges(pieces, *counts, room, homes if self.is_apart else None)

    def _room(self, limit_bytes: int | None, most_bytes: int | None) -> int | None:
        """How many bytes the pieces of a program may have."""
        if limit_bytes is not None:
            return max(1, limit_bytes // (self._times * self.sharers))
        return None if most_bytes is None or not self.is_apart else max(1, most_bytes // self._times)

    @property
    def _times(self) -> int:
        """How often a memory has the pieces of a program, at most: cut, received, and put in the target's order.

        Apart the last step has them as they were received, beside what the target had there and will have.
        """
        return 4 if self.is_apart else 3

    def extra_bytes(self, steps: Sequence[Exchange]) -> int:
        """What its programs take of a memory beside source and target, one after the other."""
        of_step = sum if self.is_apart else max
        return self._times * self.sharers * max([0, *[of_step(step.sizes) for step in steps]])

    @ft.cached_property
    def least_bytes(self) -> int:
        """The least memory limit under which it can be made."""
        if self.way != "programs":
            return 0
        return self._times * self.sharers * max([1, *map(least_room_bytes, self.cuts.made)])


@dataclasses.dataclass(frozen=True, eq=False)
class Works:
    """What there is to do for a tree.

    **Arguments:**

    - `works`: one per array of the target, in its order.
    - `readers`: how many of them read each array of the source.
    """

    works: tuple[Work, ...]
    readers: Mapping[str, int]

    @ft.cached_property
    def most_bytes(self) -> int:
        """What programs may take of a device beside source and target, if nothing else is asked for: one shard.

        Of trees of small arrays more, as each program takes time.
        """
        ends = [(work, work.leaf.sharding) for work in self.works if work.leaf.sharding is not None]
        return max([_LEAST_BYTES, *[array_bytes(end.shard_shape(work.shape), work.dtype) for work, end in ends]])

    @property
    def wire_bytes(self) -> int:
        """Bytes that enter all devices of the target together, those of plain moves left out."""
        return sum(work.wire_bytes for work in self.works)


@ft.lru_cache(maxsize=16)
def works_of(map: TreeMap, sources: tuple[Leaf, ...], targets: tuple[Leaf, ...], copies: bool) -> Works:
    """Plans the move of one tree into another; from a bounded cache where the same was asked before."""
    here = {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in sources}
    there = {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in targets}
    made = bound(map, here, there).made
    by_path = {leaf.path: leaf for leaf in sources}
    known: dict[Any, tuple[tuple[str, ...], Any]] = {}
    works = [_work(leaf, made[leaf.path], by_path, copies, known) for leaf in targets]
    readers = collections.Counter(path for work in works for path in work.sources)
    return Works(tuple(works), readers)


def _work(leaf: Leaf, made: Made, sources: Mapping[str, Leaf], copies: bool, known: dict[Any, Any]) -> Work:
    names = tuple(dict.fromkeys(name for piece in made.pieces for name in names_of(piece)))
    assert leaf.sharding is not None
    try:
        require_movable(leaf.shape, leaf.dtype, leaf.sharding)
        require_reduced(leaf.sharding, *[end for name in names if (end := sources[name].sharding) is not None])
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"leaf `{leaf.path}`: {error}") from error
    if len(names) == 1 and made == _as_it_is(sources[names[0]]):
        return Work(leaf, "plain", leaf.shape, leaf.dtype, made, names)
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    more = shape[len(leaf.shape) :]
    pieces = tuple(extended(piece, more) for piece in made.pieces) if more else made.pieces
    made = Made(shape, dtype, pieces)
    way = _way(leaf, [sources[name].sharding for name in names], copies)
    if way == "programs":
        return _by_programs(leaf, made, names, sources, known)
    return _by_copies(leaf, way, made, names, sources, known)


def _as_it_is(leaf: Leaf) -> Made:
    made = leaf_made(leaf.path, Struct(leaf.shape, leaf.dtype))
    return Made(made.shape, made.dtype, tuple(simplified(piece) for piece in made.pieces))


def _way(leaf: Leaf, sources: Sequence[Sharding | None], copies: bool) -> Way:
    """How an array is made: the same on every process, whichever devices are its own."""
    ends = [end for end in (*sources, leaf.sharding) if end is not None]
    if not all(map(has_devices, ends)):
        return "programs" if sources else "host"
    devices = {device for end in ends for device in end.device_set}
    platforms = {device.platform for device in devices}
    is_in_one = len({device.process_index for device in devices}) == 1
    if is_in_one and platforms == {"cpu"} and copies:
        return "copies"
    if len(platforms) == 1 and len(ends) == len(sources) + 1 and sources:
        return "programs"
    if is_in_one or len(ends) == 1:
        return "host"
    raise MeshError(
        f"leaf `{leaf.path}` is made of arrays on {' and '.join(sorted(platforms))} devices of several processes, or "
        "of NumPy arrays beside them, which no program spans; move the source to the target's platform first: "
        "`reshard(tree, plan)`."
    )


def _number(device: Any) -> int:
    """A device's id; on a mesh without devices they have numbers alone. Programs are of one platform, as ids are."""
    return getattr(device, "id", device)


def _holders(leaf: Leaf, place: Mapping[int, int]) -> dict[Box, list[int]]:
    """Who holds which box of an array, bits of keys included."""
    shape, _ = data_of(leaf.shape, leaf.dtype)
    if leaf.sharding is None:
        return {tuple((0, size) for size in shape): [-1]}
    held: dict[Box, list[int]] = {}
    more = tuple((0, size) for size in shape[len(leaf.shape) :])
    for device, box in boxes(leaf.sharding, leaf.shape).items():
        held.setdefault((*box, *more), []).append(place[_number(device)])
    return held


def _by_copies(
    leaf: Leaf, way: Way, made: Made, names: tuple[str, ...], sources: Mapping[str, Leaf], known: dict[Any, Any]
) -> Work:
    assert leaf.sharding is not None
    if not leaf.sharding.addressable_devices:  # another process makes it
        return Work(leaf, way, made.shape, made.dtype, made, names)
    # Devices are numbered by their place in each array, which is how its shards are found.
    more = tuple((0, size) for size in made.shape[len(leaf.shape) :])
    mine = leaf.sharding.addressable_devices
    targets = tuple(
        dict.fromkeys((*box, *more) for device, box in boxes(leaf.sharding, leaf.shape).items() if device in mine)
    )
    key = ("copies", leaf.sharding, *_kind(made, names, sources))
    if key not in known:
        # All of them share one memory, so that one replica is as good as another.
        held = _of_alike(names, sources, lambda one: {box: own[:1] for box, own in _own_holders(one).items()})
        shapes = [_shard_of(sources[name]) for name in names]
        numbers = {name: number for number, name in enumerate(names)}
        cuts = [cuts_of(made, [(-2, box)], held, {}).made for box in targets]
        pairs = zip(cuts, targets, strict=True)
        known[key] = (names, [filling(own, made.dtype, box, numbers, shapes) for own, box in pairs])
    first, fillings = known[key]
    if first != names:
        fillings = [Filling(one.copies, _renamed(Cuts(one.others), first, names).made) for one in fillings]
    return Work(leaf, way, made.shape, made.dtype, made, names, targets=targets, fillings=tuple(fillings))


def _of_alike(
    names: Sequence[str], sources: Mapping[str, Leaf], holders_of: Callable[[Leaf], dict[Box, list[int]]]
) -> dict[str, tuple[Any, Mapping[Box, Sequence[int]]]]:
    """The dtype and the holders of each array, found once for all of one shape, dtype and sharding."""
    known: dict[Any, tuple[Any, Mapping[Box, Sequence[int]]]] = {}
    for name in names:
        one = sources[name]
        if one[1:] not in known:
            known[one[1:]] = (data_of(one.shape, one.dtype)[1], holders_of(one))
    return {name: known[sources[name][1:]] for name in names}


def _own_holders(leaf: Leaf) -> dict[Box, list[int]]:
    """Who holds which box of an array, by the numbers of its own devices."""
    return _holders(leaf, {} if leaf.sharding is None else _numbers(leaf))


def _shard_of(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of a shard, of PRNG keys that of their bits."""
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    own = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return (*own, *shape[len(leaf.shape) :]), dtype


def _numbers(leaf: Leaf) -> dict[int, int]:
    assert leaf.sharding is not None
    return {_number(device): at for at, device in enumerate(leaf.sharding.addressable_devices_indices_map(leaf.shape))}


def _kind(made: Made, names: tuple[str, ...], sources: Mapping[str, Leaf]) -> tuple[Any, ...]:
    """What arrays have in common whose cuts differ in the names of what they read alone."""
    numbers = {name: number for number, name in enumerate(names)}
    pieces = tuple(_numbered(piece, numbers) for piece in made.pieces)
    return made.shape, made.dtype, pieces, tuple(sources[name][1:] for name in names)


def _numbered(piece: Piece, numbers: Mapping[str, int]) -> Any:
    value = piece.value
    scale = None if value.scale is None else (numbers[value.scale.path], value.scale.block)
    path = None if value.path is None else numbers[value.path]
    return path, value.number, scale, value.casts, piece.source, piece.target, piece.factors


def _renamed(cuts: Cuts, first: tuple[str, ...], own: tuple[str, ...]) -> Cuts:
    """Cuts of another array of the same kind."""
    if first == own:
        return cuts
    names = dict(zip(first, own, strict=True))
    made = []
    for cut in cuts.made:
        value = cut.piece.value
        scale = None if value.scale is None else value.scale._replace(path=names[value.scale.path])
        path = None if value.path is None else names[value.path]
        made.append(cut._replace(piece=cut.piece._replace(value=value._replace(path=path, scale=scale))))
    return Cuts(tuple(made))


def _by_programs(
    leaf: Leaf, made: Made, names: tuple[str, ...], sources: Mapping[str, Leaf], known: dict[Any, Any]
) -> Work:
    assert leaf.sharding is not None
    made, scaled = _scaled_first(made)
    every = {**sources}
    for one in scaled:
        every[one.name] = sources[one.path]._replace(path=one.name, dtype=one.dtype)
    read = tuple(dict.fromkeys(name for piece in made.pieces for name in names_of(piece)))
    ends = [end for name in read if (end := every[name].sharding) is not None]
    by_number = {_number(device): device for end in (*ends, leaf.sharding) for device in _ordered(end)}
    devices, place = tuple(by_number.values()), {number: at for at, number in enumerate(by_number)}
    more = tuple((0, size) for size in made.shape[len(leaf.shape) :])
    targets = [(place[_number(device)], (*box, *more)) for device, box in boxes(leaf.sharding, leaf.shape).items()]
    key = ("programs", leaf.sharding, *_kind(made, read, every))
    if key not in known:
        held = _of_alike(read, every, lambda one: _holders(one, place))
        process_of = {place[_number(d)]: d.process_index for d in devices if isinstance(d, jax.Device)}
        known[key] = (read, cuts_of(made, targets, held, process_of))
    cuts = _renamed(known[key][1], known[key][0], read)
    shapes = {name: _shard_of(every[name]) for name in read}
    here = {name: tuple(devices[at] for at in _places(every[name], place)) for name in read}
    there = tuple(devices[at] for at in _places(leaf, place))
    rest = {"cuts": cuts, "devices": devices, "source_devices": here, "target_devices": there, "source_shapes": shapes}
    return Work(leaf, "programs", made.shape, made.dtype, made, names, scaled, **rest, kind=key)


def _places(leaf: Leaf, place: Mapping[int, int]) -> list[int]:
    """The devices of an array, by their places among all."""
    assert leaf.sharding is not None
    return list(dict.fromkeys(place[_number(device)] for device in _ordered(leaf.sharding)))


def _ordered(end: Sharding) -> list[Any]:
    """Devices in an order that is the same on every process; of a mesh without any, their places in it."""
    if isinstance(end, NamedSharding):
        return list(end.mesh.devices.flat if isinstance(end.mesh, Mesh) else range(end.mesh.size))
    return sorted(end.device_set, key=lambda device: device.id)


def _scaled_first(made: Made) -> tuple[Made, tuple[Scaled, ...]]:
    """A leaf of which what is scaled is an array of its own."""
    scaled: dict[Any, Scaled] = {}
    pieces = []
    for piece in made.pieces:
        value = piece.value
        if value.scale is not None:
            assert value.path is not None
            to, casts = jnp.dtype("float32"), value.casts
            if casts and not isinstance(casts[0], Counted):
                to, casts = casts[0], casts[1:]
            name = f"{value.path} * {value.scale.path} in {to}"
            scaled[name] = Scaled(name, value.path, value.scale, to)
            value = Value(name, None, None, casts)
        pieces.append(piece._replace(value=value))
    return Made(made.shape, made.dtype, tuple(pieces)), tuple(scaled.values())
