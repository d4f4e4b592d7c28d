"""The plan for assembling each array from shards of others, from shapes and shardings alone."""

import dataclasses
import functools as ft
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._convert import (
    Arithmetic,
    Made,
    Piece,
    Scale,
    Struct,
    TreeMap,
    Value,
    bound,
    extended,
    leaf_made,
    names_of,
    simplified,
)
from ..._ground.boxes import Box, boxes
from ..._ground.errors import LeafTypeError, MeshError, SpecError
from ..._ground.spec import array_bytes
from ..._plan import ShardPlan
from ...topology import MeshSpec
from ..destinations import data_of, has_devices, require_movable, require_reduced, sharers
from .cuts import Cut, Cuts, Held, cuts_of, least_room_bytes, smaller
from .exchange import Exchange, exchanges
from .host import Filling, filling


# For smaller trees, more programs would cost more time than the memory that they save is worth.
_LEAST_BYTES = 1 << 20
# The holder of a NumPy array.
_NOBODY = -1
Way = Literal["plain", "programs", "host"]


class MovedLeaf(NamedTuple):
    """An array of either tree: its path, shape, dtype and sharding. NumPy arrays have no sharding.

    For a plan without devices, `mesh` says how it spans slices.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    mesh: MeshSpec | None = None


def leaves_of_plan(plan: ShardPlan) -> list[MovedLeaf]:
    """The arrays of a plan."""
    rows = list(zip(plan.content.rows, plan.content.row_shardings, strict=True))
    found = [(path, *rows[at]) for path, at in plan.content.numbered if at >= 0]
    mesh = None if plan.jax_mesh else plan.mesh
    return [MovedLeaf(path, row.shape, row.dtype, sharding, mesh) for path, row, sharding in found]


class ScaledArray(NamedTuple):
    """An array multiplied by its scales, computed before it moves."""

    name: str
    path: str
    scale: Scale
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The plan for assembling one array of the target.

    **Arguments:**

    - `leaf`: the array.
    - `way`: "plain" (it is an array of the source, which moves as it is), "programs" (over all devices of both sides)
        or "host" (NumPy copies in this process's memory, where CPU devices share it or no program spans the devices).
    - `shape`, `dtype`: those of the array that moves; for PRNG keys those of their key data.
    - `made`: the value of the array, as pieces of others.
    - `sources`: the arrays that are read, in order.
    - `scaled`: the scaled arrays that are made first.
    - `targets`: for "host", its different boxes, those of this process.
    - `fillings`: the copies that fill each box.
    - `cuts`: the cuts. Their numbers are positions in `devices`.
    - `devices`: the devices of both sides. If an end has no devices, all are integers: a device's id, or its position
        in the abstract mesh.
    - `target_devices`, `source_devices`: the devices of the array, and of each array that is read.
    - `source_shapes`: shape and dtype of a shard of each array that is read.
    - `kind`: a key shared by arrays whose cuts differ only in the names of their sources.
    """

    leaf: MovedLeaf
    way: Way
    shape: tuple[int, ...]
    dtype: Any
    made: Made
    sources: tuple[str, ...]
    scaled: tuple[ScaledArray, ...] = ()
    cuts: Cuts = Cuts(())
    devices: tuple[Any, ...] = ()
    target_devices: tuple[Any, ...] = ()
    source_devices: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    source_shapes: Mapping[str, tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=dict)
    targets: tuple[Box, ...] = ()
    fillings: tuple[Filling, ...] = ()
    kind: Any = None

    @ft.cached_property
    def sharers(self) -> int:
        """The number of devices that allocate from one memory. Devices of a mesh without devices count as separate
        memories.
        """
        return sharers([device for device in self.devices if isinstance(device, jax.Device)])

    @ft.cached_property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The array to assemble; for PRNG keys the array of their key data."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.leaf.sharding)

    @ft.cached_property
    def is_elsewhere(self) -> bool:
        """Whether this process has no device that takes part."""
        own = jax.process_index()
        if self.way == "programs":
            return all(device.process_index != own for device in self.devices)
        return self.leaf.sharding is not None and not self.leaf.sharding.addressable_devices

    @ft.cached_property
    def is_apart(self) -> bool:
        """Whether some of the devices hold shards of one side only."""
        count = len(self.devices)
        return any(len(ends) < count for ends in (self.target_devices, *self.source_devices.values()))

    @ft.cached_property
    def most_bytes(self) -> int:
        """The bytes that programs may take on a device beside source and target: one shard of the target.

        For small arrays it is more, since each program takes time.
        """
        end = self.leaf.sharding
        return max(_LEAST_BYTES, 0 if end is None else array_bytes(end.shard_shape(self.shape), self.dtype))

    def exchanges(self, limit_bytes: int | None = None, most_bytes: int | None = None) -> list[Exchange]:
        """The programs, in order, divided so that their pieces fit into the limits.

        **Arguments:**

        - `limit_bytes`: within so many bytes of a memory.
        - `most_bytes`: without a limit so many of a device, where the sides are apart: those hold what they send twice.
            By default the array's own `most_bytes`.
        """
        if self.way != "programs":
            return []
        pieces = [cut for cut in self.cuts.made if cut.piece.value.path is not None]
        room = self._room(limit_bytes, most_bytes or self.most_bytes)
        if room is not None:
            pieces = [part for cut in pieces for part in smaller(cut, room)]
        homes = {path: (here, self.source_shapes[path][1]) for path, here in self.source_devices.items()}
        counts = (len(self.devices), len(self.target_devices))
        return exchanges(pieces, *counts, room, homes if self.is_apart else None)

    def _room(self, limit_bytes: int | None, most_bytes: int) -> int | None:
        """The bytes that the pieces of one program may have in total."""
        if limit_bytes is not None:
            return max(1, limit_bytes // (self._times * self.sharers))
        return max(1, most_bytes // self._times) if self.is_apart else None

    @property
    def _times(self) -> int:
        """The largest number of copies of a program's pieces in one memory at a time.

        If the sides have different devices, the last step holds the received pieces beside the target's old and new
        values.
        """
        return 4 if self.is_apart else 3

    def extra_bytes(self, steps: Sequence[Exchange]) -> int:
        """The most bytes that the programs take in one memory beside source and target. They run one after
        the other.
        """
        # The CPU's compiler drops the barriers between rounds, and may cut out all pieces before it sends the first.
        of_step = sum if self.is_apart or self.sharers > 1 else max
        return self._times * self.sharers * max([0, *[of_step(step.sizes) for step in steps]])

    @ft.cached_property
    def least_bytes(self) -> int:
        """The smallest memory limit under which the array can be assembled."""
        if self.way != "programs":
            return 0
        return self._times * self.sharers * max([1, *map(least_room_bytes, self.cuts.made)])


@ft.lru_cache(maxsize=16)
def works_of(
    map: TreeMap, sources: tuple[MovedLeaf, ...], targets: tuple[MovedLeaf, ...], copies: bool
) -> tuple[Work, ...]:
    """The plan for moving one tree into another, from a bounded cache."""
    here = {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in sources}
    there = {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in targets}
    made = bound(map, here, there)
    by_path = {leaf.path: leaf for leaf in sources}
    known: dict[object, tuple[tuple[str, ...], Any]] = {}
    return tuple([_work(leaf, made[leaf.path], by_path, copies, known) for leaf in targets])


def _work(leaf: MovedLeaf, made: Made, sources: Mapping[str, MovedLeaf], copies: bool, known: dict[Any, Any]) -> Work:
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
    try:
        return _planned(leaf, Made(shape, dtype, pieces), names, sources, known, copies)
    except MeshError as error:
        raise MeshError(f"leaf `{leaf.path}`: {error}") from error


def work_between(
    shape: tuple[int, ...],
    dtype: object,
    src: Sharding,
    dst: Sharding,
    lost: tuple[object, ...],
    copies: bool,
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Work:
    """The plan for moving an array between device sets without a map.

    **Arguments:**

    - `shape`, `dtype`: those of the whole array; for typed PRNG keys those of their `key_data`.
    - `src`, `dst`: any shardings.
    - `lost`: devices whose shards are not to be read. Elements that they alone hold are `cuts.missing`.
    - `copies`: whether devices of the CPU may copy in the memory that they share.
    - `sent_before`: senders, and the bytes that they have sent more than other replicas of their shards, of other
        arrays.

    **Returns:**

    The Work.

    **Raises:**

    `MeshError` if no way leads there.
    """
    leaf, source = MovedLeaf("", shape, dtype, dst), MovedLeaf("", shape, dtype, src)
    made = leaf_made("", Struct(shape, dtype))
    return _planned(leaf, made, ("",), {"": source}, {}, copies, lost, sent_before)


def _as_it_is(leaf: MovedLeaf) -> Made:
    made = leaf_made(leaf.path, Struct(leaf.shape, leaf.dtype))
    return Made(made.shape, made.dtype, tuple(simplified(piece) for piece in made.pieces))


class _Devices(NamedTuple):
    """The devices of some shardings, and the position of each. If one sharding has no devices, ids identify them."""

    every: tuple[Any, ...]
    places: Mapping[Any, int]
    are_named: bool

    def place(self, device: object) -> int | None:
        """The position of a device; `None` if it is not among them."""
        return self.places.get(device if self.are_named else getattr(device, "id", device))

    def places_of(self, sharding: Sharding) -> list[int]:
        """The positions of a sharding's devices."""
        return [at for device in _ordered(sharding) if (at := self.place(device)) is not None]


def _devices_of(sources: Sequence[Sharding], target: Sharding, lost: Sequence[object]) -> _Devices:
    are_named = all(map(has_devices, (*sources, target)))
    key_of = (lambda device: device) if are_named else (lambda device: getattr(device, "id", device))
    gone = {key_of(device) for device in lost}
    left = [device for end in sources for device in _ordered(end) if key_of(device) not in gone]
    every = {key_of(device): device for device in (*left, *_ordered(target))}
    return _Devices(tuple(every.values()), {key: at for at, key in enumerate(every)}, are_named)


def _planned(
    leaf: MovedLeaf,
    made: Made,
    names: tuple[str, ...],
    sources: Mapping[str, MovedLeaf],
    known: dict[object, object],
    copies: bool,
    lost: tuple[object, ...] = (),
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Work:
    """The plan for one array. `known` caches the cuts of arrays of the same kind."""
    plan = ft.partial(_cuts, leaf, known=known, lost=lost, sent_before=sent_before)
    ends = [sources[name].sharding for name in names]
    way = _way(leaf, made, ends, copies, lambda: plan(made, names, sources)[:2])
    every, scaled, read = {**sources}, (), names
    if way == "programs":
        made, scaled = _scaled_first(made)
        for one in scaled:
            every[one.name] = sources[one.path]._replace(path=one.name, dtype=one.dtype)
        read = tuple(dict.fromkeys(name for piece in made.pieces for name in names_of(piece)))
    cuts, devices, kind = plan(made, read, every)
    shapes = {name: _shard_of(every[name]) for name in read}
    all_of = lambda end: () if end is None else tuple(devices.every[at] for at in devices.places_of(end))
    there, here = all_of(leaf.sharding), {name: all_of(every[name].sharding) for name in read}
    work = Work(
        leaf, way, made.shape, made.dtype, made, names, scaled, cuts, devices.every, there, here, shapes, kind=kind
    )
    return _filled(work, sources, devices, known) if way == "host" and devices.are_named else work


def _way(
    leaf: MovedLeaf,
    made: Made,
    sources: Sequence[Sharding | None],
    copies: bool,
    plan: Callable[[], tuple[Cuts, _Devices]],
) -> Way:
    """The way to assemble an array: "plain", "programs" or "host". It is the same on every process."""
    ends = [end for end in (*sources, leaf.sharding) if end is not None]
    if not all(map(has_devices, ends)):
        return "programs" if sources else "host"
    devices = {device for end in ends for device in end.device_set}
    platforms = {device.platform for device in devices}
    has_program = len(platforms) == 1 and bool(sources) and None not in sources and 0 not in made.shape
    if has_program and not (copies and platforms == {"cpu"}):
        return "programs"
    is_in_one = len(ends) == 1 or len({device.process_index for device in devices}) == 1
    if is_in_one or not _crosses(made, *plan()):
        return "host"
    if has_program:
        return "programs"
    raise MeshError(
        f"no program spans {' and '.join(sorted(platforms))} devices of several processes, or NumPy arrays beside "
        "them; move to devices of one platform within each process first."
    )


def _crosses(made: Made, cuts: Cuts, devices: _Devices) -> bool:
    """Whether a process needs elements that another process holds. Scaled arrays are needed whole."""
    process = [device.process_index for device in devices.every]
    travels = any(process[cut.sender] != process[cut.receiver] for cut in cuts.made if cut.sender != _NOBODY)
    return travels or any(piece.value.scale is not None for piece in made.pieces)


def _cuts(
    leaf: MovedLeaf,
    made: Made,
    names: tuple[str, ...],
    sources: Mapping[str, MovedLeaf],
    *,
    known: dict[Any, Any],
    lost: tuple[object, ...],
    sent_before: tuple[tuple[int, int], ...],
) -> tuple[Cuts, _Devices, Any]:
    """The cuts of an array, their devices, and the key of arrays whose cuts differ only in the names of
    their sources.
    """
    assert leaf.sharding is not None
    ends = [end for name in names if (end := sources[name].sharding) is not None]
    devices = _devices_of(ends, leaf.sharding, lost)
    kind = (leaf[1:], *kind_of(made, names, sources))
    if kind not in known:
        gone, alike = {devices.place(device) for device in lost}, dict[Any, Held]()
        targets = [(at, box) for at, box in _boxes(leaf, devices) if at is not None]
        for name in names:
            one = sources[name]
            if one[1:] not in alike:
                alike[one[1:]] = data_of(one.shape, one.dtype)[1], _holders(one, devices, gone)
        process_of = {at: one.process_index for at, one in enumerate(devices.every) if isinstance(one, jax.Device)}
        held = {name: alike[sources[name][1:]] for name in names}
        known[kind] = names, cuts_of(made, targets, held, process_of, sent_before)
    first, cuts = known[kind]
    return _renamed(cuts, first, names), devices, kind


def _boxes(leaf: MovedLeaf, devices: _Devices) -> list[tuple[int | None, Box]]:
    """The device position and the box of each shard of an array, or of its key data. A NumPy array is held
    by no device.
    """
    return [(_NOBODY if device is None else devices.place(device), box) for device, box in device_boxes(leaf).items()]


def device_boxes(leaf: MovedLeaf) -> dict[Any, Box]:
    """The box of each device's shard of an array or of its key data; the key `None` stands for a NumPy array."""
    shape, _ = data_of(leaf.shape, leaf.dtype)
    if leaf.sharding is None:
        return {None: tuple((0, size) for size in shape)}
    found, more = boxes(leaf.sharding, leaf.shape), tuple((0, size) for size in shape[len(leaf.shape) :])
    return {device: (*found[device], *more) for device in _ordered(leaf.sharding)}


def _holders(leaf: MovedLeaf, devices: _Devices, lost: Container[int | None]) -> dict[Box, list[int]]:
    held: dict[Box, list[int]] = {}
    for at, box in _boxes(leaf, devices):
        held.setdefault(box, []).extend([] if at is None or at in lost else [at])
    return held


def _filled(work: Work, sources: Mapping[str, MovedLeaf], devices: _Devices, known: dict[Any, Any]) -> Work:
    """The plan with the NumPy copies of this process: one shard for each box, since replicas share it."""
    if (work.kind, "filled") not in known:
        first: dict[Box, int] = {}
        for at, box in _boxes(work.leaf, devices):
            if at is not None and devices.every[at].process_index == jax.process_index():
                first.setdefault(box, at)
        cuts: dict[int, list[Cut]] = {at: [] for at in first.values()}
        for cut in work.cuts.made:
            if cut.receiver in cuts:
                cuts[cut.receiver].append(cut)
        orders = {name: _order(sources[name], devices) for name in work.sources}
        numbers = {name: number for number, name in enumerate(work.sources)}
        shapes = [work.source_shapes[name] for name in work.sources]
        fillings = [filling(cuts[at], work.dtype, box, numbers, shapes, orders) for box, at in first.items()]
        known[work.kind, "filled"] = work.sources, tuple(first), tuple(fillings)
    names, targets, fillings = known[work.kind, "filled"]
    if names != work.sources:
        fillings = tuple(
            [one._replace(others=_renamed(Cuts(one.others), names, work.sources).made) for one in fillings]
        )
    return dataclasses.replace(work, targets=targets, fillings=fillings)


def _order(leaf: MovedLeaf, devices: _Devices) -> dict[int, int]:
    """For each device, the number of its shard of an array among the shards of this process."""
    if leaf.sharding is None:
        return {_NOBODY: _NOBODY}
    here = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {place: at for at, device in enumerate(here) if (place := devices.place(device)) is not None}


def _shard_of(leaf: MovedLeaf) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of a shard, or of its key data."""
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    own = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return (*own, *shape[len(leaf.shape) :]), dtype


def kind_of(made: Made, names: tuple[str, ...], sources: Mapping[str, MovedLeaf]) -> tuple[Any, ...]:
    """A key that is equal for arrays whose cuts differ only in the names of their sources."""
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


def _ordered(end: Sharding) -> list[Any]:
    """Devices in an order that is the same on every process; of a mesh without any, their places in it."""
    if isinstance(end, NamedSharding):
        return list(end.mesh.devices.flat if isinstance(end.mesh, Mesh) else range(end.mesh.size))
    return sorted(end.device_set, key=lambda device: device.id)


def _scaled_first(made: Made) -> tuple[Made, tuple[ScaledArray, ...]]:
    """A leaf whose scaled source is an array of its own, made before the leaf."""
    scaled: dict[object, ScaledArray] = {}
    pieces = []
    for piece in made.pieces:
        value = piece.value
        if value.scale is not None:
            assert value.path is not None
            to, casts = jnp.dtype("float32"), value.casts
            if casts and not isinstance(casts[0], Arithmetic):
                to, casts = casts[0], casts[1:]
            name = f"{value.path} * {value.scale.path} in {to}"
            scaled[name] = ScaledArray(name, value.path, value.scale, to)
            value = Value(name, None, None, casts)
        pieces.append(piece._replace(value=value))
    return Made(made.shape, made.dtype, tuple(pieces)), tuple(scaled.values())
