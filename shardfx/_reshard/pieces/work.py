"""The plan for assembling each array from shards of others, from shapes and shardings alone."""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
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
from ..._ground.boxes import Box, shard_boxes
from ..._ground.errors import MeshError
from ..._ground.spec import array_bytes
from ..._plan import ShardPlan
from ...topology import MeshSpec
from ..destinations import data_of, has_devices, naming, require_movable, require_reduced, sharers
from .cuts import Cut, Cuts, cuts_of, least_room_bytes, smaller
from .exchange import Exchange, exchanges
from .host import Filling, filling


# For smaller trees, more programs would cost more time than the memory that they save is worth.
_LEAST_BYTES = 1 << 20
# The holder of a NumPy array.
_NOBODY = -1


class MovedLeaf(NamedTuple):
    """An array before or after a move: its path, shape, dtype and sharding. A NumPy array has no sharding.

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
    """A source multiplied by its scales, which is computed before it moves."""

    source: str
    scale: Scale
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """The plan for assembling one array from shards of its sources.

    It names the sources by their numbers, "0", "1", ..., so that arrays whose sources differ only in their paths have
    one assembly.

    **Arguments:**

    - `sharding`: the sharding of the array.
    - `shape`, `dtype`: those of the array; of PRNG keys those of their key data.
    - `shard_shape`: the shape of one shard of it.
    - `way`: "programs" (over all devices of both sides) or "host" (NumPy copies in this process's memory, if CPU
        devices share it or no program spans the devices).
    - `pieces`: the array as pieces of the sources.
    - `scaled`: by key, the scaled sources that programs compute first.
    - `cuts`: the cuts. Their devices are positions in `devices`.
    - `devices`: the devices of both sides. If an end has no devices, all are integers: a device's id, or its position
        in the abstract mesh.
    - `target_devices`: the devices of the array.
    - `source_devices`, `source_shapes`: for each array that is read, its devices, and the shape and dtype of its shard.
    - `targets`: for "host", the different boxes of the array in this process.
    - `fillings`: the copies that fill each of these boxes.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: Any
    shard_shape: tuple[int, ...]
    way: Literal["programs", "host"]
    pieces: tuple[Piece, ...]
    scaled: Mapping[str, ScaledArray]
    cuts: Cuts
    devices: tuple[Any, ...]
    target_devices: tuple[Any, ...]
    source_devices: Mapping[str, tuple[Any, ...]]
    source_shapes: Mapping[str, tuple[tuple[int, ...], Any]]
    targets: tuple[Box, ...] = ()
    fillings: tuple[Filling, ...] = ()

    @ft.cached_property
    def sharers(self) -> int:
        """The number of devices that allocate from one memory. Devices of a mesh without devices count as separate
        memories.
        """
        return sharers([device for device in self.devices if isinstance(device, jax.Device)])

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The array to assemble; for PRNG keys the array of their key data."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @ft.cached_property
    def is_elsewhere(self) -> bool:
        """Whether this process owns none of the devices that take part."""
        own = jax.process_index()
        if self.way == "programs":
            return all(device.process_index != own for device in self.devices)
        return not self.sharding.addressable_devices

    @ft.cached_property
    def is_apart(self) -> bool:
        """Whether source and target are on different devices, at least in part."""
        count = len(self.devices)
        return any(len(ends) < count for ends in (self.target_devices, *self.source_devices.values()))

    @ft.cached_property
    def most_bytes(self) -> int:
        """The bytes that programs may take on a device besides source and target: one shard of the target.

        For small arrays it is more, since each program takes time.
        """
        return max(_LEAST_BYTES, array_bytes(self.shard_shape, self.dtype))

    def exchanges(self, limit_bytes: int | None = None, most_bytes: int | None = None) -> list[Exchange]:
        """The programs, in order, divided so that their pieces fit into the limits.

        **Arguments:**

        - `limit_bytes`: the most bytes of a memory.
        - `most_bytes`: without a limit, the most bytes of a device if the two sides have different devices, which hold
            the pieces that they send twice. By default the array's own `most_bytes`.
        """
        if self.way != "programs":
            return []
        cuts, room = [cut for cut in self.cuts.made if cut.piece.value.path is not None], None
        if limit_bytes is not None:
            room = max(1, limit_bytes // (self._times * self.sharers))
        elif self.is_apart:
            room = max(1, (most_bytes or self.most_bytes) // self._times)
        if room is not None:
            cuts = [part for cut in cuts for part in smaller(cut, room)]
        homes = {key: (here, self.source_shapes[key][1]) for key, here in self.source_devices.items()}
        return exchanges(cuts, len(self.devices), len(self.target_devices), room, homes)

    @property
    def _times(self) -> int:
        """How many copies of a program's pieces one memory holds at its worst moment.

        If the sides have different devices, the last step holds the received pieces beside the target's old and new
        values.
        """
        return 4 if self.is_apart else 3

    def extra_bytes(self, steps: Sequence[Exchange]) -> int:
        """The most bytes that one memory holds besides source and target, if the programs run one after the other."""
        # The CPU's compiler drops the barriers between rounds, and may cut out all pieces before it sends the first.
        of_step = sum if self.is_apart or self.sharers > 1 else max
        return self._times * self.sharers * max([0, *[of_step(step.sizes) for step in steps]])

    @ft.cached_property
    def least_bytes(self) -> int:
        """The smallest memory limit under which the array can be assembled."""
        if self.way != "programs":
            return 0
        return self._times * self.sharers * max([1, *map(least_room_bytes, self.cuts.made)])


class Work(NamedTuple):
    """An array of the target, the paths of the arrays that it is made of, and its assembly.

    The assembly is `None` if the array is one of the source's arrays, which moves unchanged.
    """

    leaf: MovedLeaf
    sources: tuple[str, ...]
    assembly: Assembly | None


@ft.lru_cache(maxsize=16)
def works_of(
    map: TreeMap, sources: tuple[MovedLeaf, ...], targets: tuple[MovedLeaf, ...], copies: bool
) -> tuple[Work, ...]:
    """How each array of the target moves or is assembled, for the move of a tree through a map. The result is
    cached.
    """
    here, there = ({leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in side} for side in (sources, targets))
    made, by_path = bound(map, here, there), {leaf.path: leaf for leaf in sources}
    known: dict[object, Assembly] = {}
    found = []
    for leaf in targets:
        names = tuple(dict.fromkeys(name for piece in made[leaf.path].pieces for name in names_of(piece)))
        ends = [by_path[name] for name in names]
        assert leaf.sharding is not None
        with naming(str, leaf.path):
            require_movable(leaf.shape, leaf.dtype, leaf.sharding)
            require_reduced(leaf.sharding, *[end.sharding for end in ends if end.sharding is not None])
            is_plain = len(names) == 1 and made[leaf.path] == _unchanged(ends[0])
            assembly = None if is_plain else _known_assembly(leaf, made[leaf.path], ends, copies, known)
        found.append(Work(leaf, names, assembly))
    return tuple(found)


def _unchanged(leaf: MovedLeaf) -> Made:
    made = leaf_made(leaf.path, Struct(leaf.shape, leaf.dtype))
    return dataclasses.replace(made, pieces=tuple(map(simplified, made.pieces)))


def _known_assembly(
    leaf: MovedLeaf, made: Made, sources: Sequence[MovedLeaf], copies: bool, known: dict[object, Assembly]
) -> Assembly:
    """The assembly of an array, from `known` if an array of the same kind has one."""
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    more = shape[len(leaf.shape) :]
    pieces = numbered([extended(piece, more) if more else piece for piece in made.pieces], [x.path for x in sources])
    # Their texts tell apart constants that are equal: 0.0 and -0.0.
    key = leaf[1:], pieces, str([piece.value.number for piece in pieces]), tuple(one[1:] for one in sources)
    if key not in known:
        ends = [one._replace(path=str(at)) for at, one in enumerate(sources)]
        known[key] = _assembly(leaf, Made(shape, dtype, pieces), ends, copies)
    return known[key]


def numbered(pieces: Sequence[Piece], names: Sequence[str]) -> tuple[Piece, ...]:
    """The pieces with each source's path replaced by its number, as text."""
    numbers, found = {name: str(number) for number, name in enumerate(names)}, []
    for piece in pieces:
        value = piece.value
        scale = None if value.scale is None else value.scale._replace(path=numbers[value.scale.path])
        path = None if value.path is None else numbers[value.path]
        found.append(piece._replace(value=value._replace(path=path, scale=scale)))
    return tuple(found)


def assembly_between(
    shape: tuple[int, ...],
    dtype: object,
    src: Sharding,
    dst: Sharding,
    lost: tuple[object, ...],
    copies: bool,
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Assembly:
    """The plan for moving an array between device sets without a map.

    **Arguments:**

    - `shape`, `dtype`: those of the whole array; for typed PRNG keys those of their `key_data`.
    - `src`, `dst`: any shardings.
    - `lost`: devices whose shards are not to be read. Elements that they alone hold are `cuts.missing`.
    - `copies`: whether devices of the CPU may copy in the memory that they share.
    - `sent_before`: senders, and the bytes that they have sent more than other replicas of their shards, of other
        arrays.

    **Returns:**

    The Assembly.

    **Raises:**

    `MeshError` if no program spans the devices and no host can reach the shards.
    """
    made, source = leaf_made("0", Struct(shape, dtype)), MovedLeaf("0", shape, dtype, src)
    return _assembly(MovedLeaf("", shape, dtype, dst), made, [source], copies, lost, sent_before)


def _assembly(
    leaf: MovedLeaf,
    made: Made,
    sources: Sequence[MovedLeaf],
    copies: bool,
    lost: tuple[object, ...] = (),
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Assembly:
    devices = _Devices(leaf, sources, lost)
    cuts, scaled = _cuts(made, sources, devices, sent_before), dict[str, ScaledArray]()
    way = _way(made, [one.sharding for one in sources], leaf.sharding, copies, cuts, devices)
    if way == "programs" and any(piece.value.scale is not None for piece in made.pieces):
        made, scaled = _scaled_first(made)
        ends = {one.path: one for one in sources}
        ends |= {key: ends[one.source]._replace(path=key, dtype=one.dtype) for key, one in scaled.items()}
        sources = [ends[key] for key in dict.fromkeys(name for piece in made.pieces for name in names_of(piece))]
        devices = _Devices(leaf, sources, lost)
        cuts = _cuts(made, sources, devices, sent_before)
    assert leaf.sharding is not None
    here, shapes = {path: devices.left(own) for path, own in devices.sources.items()}, map(shard_of, sources)
    ends = (devices.every, devices.left(devices.target), here, dict(zip(here, shapes, strict=True)))
    found = Assembly(leaf.sharding, made.shape, made.dtype, shard_of(leaf)[0], way, made.pieces, scaled, cuts, *ends)
    return _filled(found, sources, devices) if way == "host" and devices.are_named else found


class _Devices:
    """The devices of an array and of its sources, numbered, without the lost devices.

    If one sharding has no devices, ids identify the devices. `target` and `sources` are the device and the box of each
    shard of these arrays; a NumPy array has the device `None`.
    """

    def __init__(self, leaf: MovedLeaf, sources: Sequence[MovedLeaf], lost: Sequence[object]):
        self.are_named = all(has_devices(one.sharding) for one in (*sources, leaf) if one.sharding is not None)
        key_of = (lambda device: device) if self.are_named else (lambda device: getattr(device, "id", device))
        self.lost = {*map(key_of, lost)}
        ends = [[(key_of(device), box) for device, box in device_boxes(one).items()] for one in (*sources, leaf)]
        self.target, self.sources = ends[-1], dict(zip([one.path for one in sources], ends, strict=False))
        left = [device for own in ends[:-1] for device, _ in own if device not in self.lost and device is not None]
        self.every = tuple(dict.fromkeys((*left, *[device for device, _ in self.target])))
        self.places = {None: _NOBODY} | {device: at for at, device in enumerate(self.every)}

    def left(self, shards: Sequence[tuple[Any, Box]]) -> tuple[Any, ...]:
        """The devices of these shards that are not lost."""
        return tuple(device for device, _ in shards if device is not None and device in self.places)

    def holders(self, path: str) -> dict[Box, list[int]]:
        """The devices that hold each box of a source, by number. No device holds a NumPy array."""
        held: dict[Box, list[int]] = {}
        for device, box in self.sources[path]:
            held.setdefault(box, []).extend([] if device in self.lost else [self.places[device]])
        return held


def _way(
    made: Made,
    sources: Sequence[Sharding | None],
    target: Sharding | None,
    copies: bool,
    cuts: Cuts,
    devices: _Devices,
) -> Literal["programs", "host"]:
    """Whether programs on devices or NumPy copies on the host assemble an array. All processes decide alike."""
    if not devices.are_named:
        return "programs" if sources else "host"
    every = {device for end in (*sources, target) if end is not None for device in end.device_set}
    platforms = {device.platform for device in every}
    has_program = len(platforms) == 1 and bool(sources) and None not in sources and 0 not in made.shape
    if has_program and not (copies and platforms == {"cpu"}):
        return "programs"
    process = [device.process_index for device in devices.every]
    is_in_one = {*sources} <= {None} or len({device.process_index for device in every}) == 1
    # Whether a process needs elements that another process holds. Scaled arrays are needed whole.
    travels = any(process[cut.sender] != process[cut.receiver] for cut in cuts.made if cut.sender != _NOBODY)
    if is_in_one or not (travels or any(piece.value.scale is not None for piece in made.pieces)):
        return "host"
    if has_program:
        return "programs"
    raise MeshError(
        f"no program spans {' and '.join(sorted(platforms))} devices of several processes, or NumPy arrays beside "
        "them; move to devices of one platform within each process first."
    )


def _cuts(
    made: Made, sources: Sequence[MovedLeaf], devices: _Devices, sent_before: tuple[tuple[int, int], ...]
) -> Cuts:
    alike = {one[1:]: (data_of(one.shape, one.dtype)[1], devices.holders(one.path)) for one in sources}
    targets = [(devices.places[device], box) for device, box in devices.target]
    process_of = {at: one.process_index for at, one in enumerate(devices.every) if devices.are_named}
    return cuts_of(made, targets, {one.path: alike[one[1:]] for one in sources}, process_of, sent_before)


def device_boxes(leaf: MovedLeaf) -> dict[Any, Box]:
    """The box of each device's shard of an array or of its key data; the key `None` stands for a NumPy array."""
    shape, _ = data_of(leaf.shape, leaf.dtype)
    if leaf.sharding is None:
        return {None: tuple((0, size) for size in shape)}
    found, more = shard_boxes(leaf.sharding, leaf.shape), tuple((0, size) for size in shape[len(leaf.shape) :])
    return {device: (*found[device], *more) for device in _ordered(leaf.sharding)}


def _filled(found: Assembly, sources: Sequence[MovedLeaf], devices: _Devices) -> Assembly:
    """The plan with the NumPy copies of this process: one shard for each box, since replicas share it."""
    first: dict[Box, int] = {}
    for device, box in devices.target:
        if device.process_index == jax.process_index():
            first.setdefault(box, devices.places[device])
    cuts: dict[int, list[Cut]] = {at: [] for at in first.values()}
    for cut in found.cuts.made:
        if cut.receiver in cuts:
            cuts[cut.receiver].append(cut)
    shapes, orders = [found.source_shapes[one.path] for one in sources], list[Mapping[int, int]]()
    for one in sources:  # for each device, the number of its shard among those of this process
        here = () if one.sharding is None else one.sharding.addressable_devices_indices_map(one.shape)
        orders.append({devices.places.get(device, _NOBODY): at for at, device in enumerate(here)} or {_NOBODY: _NOBODY})
    fillings = [filling(cuts[at], found.dtype, box, shapes, orders) for box, at in first.items()]
    return dataclasses.replace(found, targets=tuple(first), fillings=tuple(fillings))


def shard_of(leaf: MovedLeaf) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of a shard, or of its key data."""
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    own = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return (*own, *shape[len(leaf.shape) :]), dtype


def _ordered(end: Sharding) -> list[Any]:
    """The devices of a sharding in an order that is equal on every process; for an abstract mesh, positions in it."""
    if isinstance(end, NamedSharding):
        return list(end.mesh.devices.flat if isinstance(end.mesh, Mesh) else range(end.mesh.size))
    return sorted(end.device_set, key=lambda device: device.id)


def _scaled_first(made: Made) -> tuple[Made, dict[str, ScaledArray]]:
    """Separates scales from a map: each source times its scales becomes one array, and the returned pieces read that
    array.
    """
    scaled: dict[str, ScaledArray] = {}
    pieces = []
    for piece in made.pieces:
        value = piece.value
        if value.scale is not None:
            assert value.path is not None
            to, casts = jnp.dtype("float32"), value.casts
            if casts and not isinstance(casts[0], Arithmetic):
                to, casts = casts[0], casts[1:]
            key = f"{value.path} * {value.scale.path} in {to}"
            scaled[key] = ScaledArray(value.path, value.scale, to)
            value = Value(key, None, None, casts)
        pieces.append(piece._replace(value=value))
    return dataclasses.replace(made, pieces=tuple(pieces)), scaled
