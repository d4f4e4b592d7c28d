"""Plans how each array is assembled from shards of other arrays, from shapes and
shardings alone.

`copies` says whether CPU devices of one process may copy shards in the memory that they
share. `lost` are devices whose shards are not to be read.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._convert import (
    NO_NUMBERS,
    Arithmetic,
    Made,
    NumberCopies,
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
from ..shardings import (
    data_of,
    has_devices,
    naming,
    require_movable,
    require_reduced,
    sharers,
)
from .exchange import Exchange, exchanges
from .host import HostCopies, host_copies
from .parts import ShardPart, ShardParts, divided, least_memory_bytes, shard_parts


# The memory that programs may use for small arrays, since dividing them into more
# programs takes more time.
_LEAST_BYTES = 1 << 20
# The number that stands for the host, which holds NumPy arrays.
_HOST = -1


class MovedLeaf(NamedTuple):
    """An array before or after a move. A NumPy array has no `sharding`. `mesh` is given
    if the array's plan has no devices: it says how many TPU slices (or GPU nodes) each
    mesh axis spans.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    mesh: MeshSpec | None = None


def leaves_of_plan(plan: ShardPlan) -> list[MovedLeaf]:
    """The arrays of a plan, in the plan's order. Leaves that are not arrays are left
    out.
    """
    rows = list(zip(plan.content.rows, plan.content.row_shardings, strict=True))
    found = [(path, *rows[at]) for path, at in plan.content.numbered if at >= 0]
    mesh = None if plan.jax_mesh else plan.mesh
    return [
        MovedLeaf(path, row.shape, row.dtype, sharding, mesh)
        for path, row, sharding in found
    ]


class ScaledArray(NamedTuple):
    """A quantised array that is multiplied by its scales and cast to `dtype` before it
    moves. There is one scale for each block of elements. `source` and `scale.path` are
    the numbers of the two arrays among the sources, as text.
    """

    source: str
    scale: Scale
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """The plan for assembling one array from shards of other arrays, its sources.

    The sources are named by their numbers, "0", "1", ..., so that arrays whose sources
    differ only in their paths have one plan.

    **Arguments:**

    - `sharding`: the sharding of the array.
    - `shape`, `dtype`: the shape and dtype of the array, or of the key data of PRNG
      keys.
    - `shard_shape`: the shape of one shard of the array.
    - `method`: "programs" (collective permutes between the devices) or "host" (NumPy
      copies in this process's memory).
        "host" is for CPU devices that share this memory, and for devices that no
        program spans.
    - `pieces`: the pieces that fill the array.
    - `scaled`: the products of quantised sources and their scales, which programs
      compute first. The keys are the names
        by which `pieces` read the products.
    - `parts`: the parts of shards that devices send. Their senders and receivers are
      positions in `devices`.
    - `devices`: the devices of the array and of its sources. If a sharding is on a mesh
      without devices, these are
        integers: a device's id, or a position in the abstract mesh.
    - `target_devices`: the devices of the array.
    - `source_devices`, `source_shapes`: for each source, its devices, and the shape and
      dtype of its shard.
    - `targets`: for "host", the distinct boxes of this process's shards of the array.
    - `host_copies`: for "host", the copies that assemble each of these boxes.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: Any
    shard_shape: tuple[int, ...]
    method: Literal["programs", "host"]
    pieces: tuple[Piece, ...]
    scaled: Mapping[str, ScaledArray]
    parts: ShardParts
    devices: tuple[Any, ...]
    target_devices: tuple[Any, ...]
    source_devices: Mapping[str, tuple[Any, ...]]
    source_shapes: Mapping[str, tuple[tuple[int, ...], Any]]
    targets: tuple[Box, ...] = ()
    host_copies: tuple[HostCopies, ...] = ()

    @ft.cached_property
    def sharers(self) -> int:
        """The largest number of devices that share one memory; 1 if a mesh has no
        devices.
        """
        return sharers(
            [device for device in self.devices if isinstance(device, jax.Device)]
        )

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @ft.cached_property
    def is_remote(self) -> bool:
        """Whether this process owns no device that takes part in the assembly."""
        own = jax.process_index()
        if self.method == "programs":
            return all(device.process_index != own for device in self.devices)
        return not self.sharding.addressable_devices

    @ft.cached_property
    def changes_devices(self) -> bool:
        """Whether some device holds the source but not the target, or the target but
        not the source.
        """
        count = len(self.devices)
        return any(
            len(ends) < count
            for ends in (self.target_devices, *self.source_devices.values())
        )

    @ft.cached_property
    def most_bytes(self) -> int:
        """The default limit of programs' memory on a device: the bytes of a shard, but
        at least 1 MiB.
        """
        return max(_LEAST_BYTES, array_bytes(self.shard_shape, self.dtype))

    def exchanges(
        self, limit_bytes: int | None = None, most_bytes: int | None = None
    ) -> list[Exchange]:
        """The programs that assemble the array, in order. Parts of shards are divided
        to keep within the limits.

        `limit_bytes` is the most bytes that programs may use in one memory, besides
        source and target. CPU devices of one process share one memory; every other
        device has its own. If `limit_bytes` is `None`, the limit depends on the
        devices. If source and target are on different devices, programs may use
        `most_bytes` on a device (`None` for the value of the property `most_bytes`).
        Otherwise they have no limit.
        """
        if self.method != "programs":
            return []
        parts, room = (
            [part for part in self.parts.all if part.piece.value.path is not None],
            None,
        )
        if limit_bytes is not None:
            room = max(1, limit_bytes // (self._buffers * self.sharers))
        elif self.changes_devices:
            room = max(1, (most_bytes or self.most_bytes) // self._buffers)
        if room is not None:
            parts = [smaller for part in parts for smaller in divided(part, room)]
        kinds = {
            key: (here, self.source_shapes[key][1])
            for key, here in self.source_devices.items()
        }
        return exchanges(
            parts, len(self.devices), len(self.target_devices), room, kinds
        )

    @property
    def _buffers(self) -> int:
        """How many buffers, each as large as a part of a shard, a program needs on a
        device at the same time. It is one more if source and target are on different
        devices: a program then holds the received part besides the old and the new
        values of the elements that it writes.
        """
        return 4 if self.changes_devices else 3

    def extra_bytes(self, steps: Sequence[Exchange]) -> int:
        """The most bytes that the programs `steps`, which run one after another, use in
        one memory besides source and target.
        """
        # The CPU's compiler drops the barriers between rounds, and may slice all parts
        # before it sends the first.
        of_step = sum if self.changes_devices or self.sharers > 1 else max
        return (
            self._buffers
            * self.sharers
            * max([0, *[of_step(step.sizes) for step in steps]])
        )

    @ft.cached_property
    def least_bytes(self) -> int:
        """The smallest `limit_bytes` under which the array can be assembled."""
        if self.method != "programs":
            return 0
        return (
            self._buffers
            * self.sharers
            * max([1, *map(least_memory_bytes, self.parts.all)])
        )


class TargetArray(NamedTuple):
    """An array that a `TreeMap` makes, the paths of its sources, and the plan for
    assembling it. `assembly` is `None` if the array is an unchanged source array, which
    moves as it would without a map.
    """

    leaf: MovedLeaf
    sources: tuple[str, ...]
    assembly: Assembly | None


@ft.lru_cache(maxsize=16)
def target_arrays(
    map: TreeMap,
    sources: tuple[MovedLeaf, ...],
    targets: tuple[MovedLeaf, ...],
    copies: bool,
    numbers: NumberCopies = NO_NUMBERS,
) -> tuple[TargetArray, ...]:
    """Plans how each array of `targets`, which `map` makes, is assembled from `sources`
    or moved. `numbers` are the Python numbers of the source. It caches results.
    """
    here, there = (
        {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in leaves}
        for leaves in (sources, targets)
    )
    made = bound(map, here, there, numbers)
    by_path = {leaf.path: leaf for leaf in sources}
    known: dict[object, Assembly] = {}
    found = []
    for leaf in targets:
        names = tuple(
            dict.fromkeys(
                name for piece in made[leaf.path].pieces for name in names_of(piece)
            )
        )
        ends = [by_path[name] for name in names]
        assert leaf.sharding is not None
        with naming(str, leaf.path):
            require_movable(leaf.shape, leaf.dtype, leaf.sharding)
            require_reduced(
                leaf.sharding,
                *[end.sharding for end in ends if end.sharding is not None],
            )
            is_plain = len(names) == 1 and made[leaf.path] == _unchanged(ends[0])
            assembly = (
                None
                if is_plain
                else _known_assembly(leaf, made[leaf.path], ends, copies, known)
            )
        found.append(TargetArray(leaf, names, assembly))
    return tuple(found)


def _unchanged(leaf: MovedLeaf) -> Made:
    made = leaf_made(leaf.path, Struct(leaf.shape, leaf.dtype))
    return dataclasses.replace(made, pieces=tuple(map(simplified, made.pieces)))


def _known_assembly(
    leaf: MovedLeaf,
    made: Made,
    sources: Sequence[MovedLeaf],
    copies: bool,
    known: dict[object, Assembly],
) -> Assembly:
    """The plan for assembling `leaf` from `sources`. `made` has the pieces of the
    sources that fill it. `known` is a cache of plans, since arrays that differ only in
    paths share one.
    """
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    more = shape[len(leaf.shape) :]
    pieces = numbered(
        [extended(piece, more) if more else piece for piece in made.pieces],
        [x.path for x in sources],
    )
    # 0.0 and -0.0 are equal as numbers, but not as text.
    key = (
        leaf[1:],
        pieces,
        str([piece.value.number for piece in pieces]),
        tuple(one[1:] for one in sources),
    )
    if key not in known:
        ends = [one._replace(path=str(at)) for at, one in enumerate(sources)]
        known[key] = _assembly(leaf, Made(shape, dtype, pieces), ends, copies)
    return known[key]


def numbered(pieces: Sequence[Piece], names: Sequence[str]) -> tuple[Piece, ...]:
    """Returns `pieces` with the path of each source replaced by its position in
    `names`: "b" in ("w", "b") by "1".
    """
    numbers, found = {name: str(number) for number, name in enumerate(names)}, []
    for piece in pieces:
        value = piece.value
        scale = (
            None
            if value.scale is None
            else value.scale._replace(path=numbers[value.scale.path])
        )
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
    """The plan for moving an array without a map to another sharding, on any devices.
    For typed PRNG keys, `shape` and `dtype` are those of their `key_data`.

    `parts.missing` of the plan has the boxes of the elements that only `lost` devices
    hold. `sent_before` has pairs: the number of a device, and how many more bytes it
    has sent in earlier moves than the device with the same shard that has sent the
    fewest. Raises `MeshError` if no program spans the devices and no process can
    address all shards.
    """
    made, source = (
        leaf_made("0", Struct(shape, dtype)),
        MovedLeaf("0", shape, dtype, src),
    )
    return _assembly(
        MovedLeaf("", shape, dtype, dst), made, [source], copies, lost, sent_before
    )


def _assembly(
    leaf: MovedLeaf,
    made: Made,
    sources: Sequence[MovedLeaf],
    copies: bool,
    lost: tuple[object, ...] = (),
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Assembly:
    devices = _Devices(leaf, sources, lost)
    parts, scaled = (
        _parts(made, sources, devices, sent_before),
        dict[str, ScaledArray](),
    )
    method = _method(
        made, [one.sharding for one in sources], leaf.sharding, copies, parts, devices
    )
    if method == "programs" and any(
        piece.value.scale is not None for piece in made.pieces
    ):
        made, scaled = _scaled_first(made)
        ends = {one.path: one for one in sources}
        ends |= {
            key: ends[one.source]._replace(path=key, dtype=one.dtype)
            for key, one in scaled.items()
        }
        sources = [
            ends[key]
            for key in dict.fromkeys(
                name for piece in made.pieces for name in names_of(piece)
            )
        ]
        devices = _Devices(leaf, sources, lost)
        parts = _parts(made, sources, devices, sent_before)
    assert leaf.sharding is not None
    here = {path: devices.remaining(own) for path, own in devices.sources.items()}
    ends = (devices.all, devices.remaining(devices.target), here, devices.source_shapes)
    own = (leaf.sharding, made.shape, made.dtype, devices.shard_shape)
    found = Assembly(*own, method, made.pieces, scaled, parts, *ends)
    return (
        _with_host_copies(found, sources, devices)
        if method == "host" and devices.are_named
        else found
    )


class _Devices:
    """The devices of an array and of its sources, without the lost devices, each with a
    number.

    `target` and `sources` list the device and the box of each shard. In a mesh without
    devices, ids or positions stand for devices. A NumPy array has the device `None`.
    """

    def __init__(
        self, leaf: MovedLeaf, sources: Sequence[MovedLeaf], lost: Sequence[object]
    ):
        self.are_named = all(
            has_devices(one.sharding)
            for one in (*sources, leaf)
            if one.sharding is not None
        )
        key_of = (
            (lambda device: device)
            if self.are_named
            else (lambda device: getattr(device, "id", device))
        )
        self.lost = {*map(key_of, lost)}
        *given, made = map(shards_of, (*sources, leaf))
        self.source_shapes = {
            one.path: own[:2] for one, own in zip(sources, given, strict=True)
        }
        self.shard_shape = made.shape
        ends = [
            [(key_of(device), box) for device, box in own.boxes.items()]
            for own in (*given, made)
        ]
        self.target, self.sources = (
            ends[-1],
            dict(zip(self.source_shapes, ends, strict=False)),
        )
        left = [
            device
            for own in ends[:-1]
            for device, _ in own
            if device not in self.lost and device is not None
        ]
        self.all = tuple(dict.fromkeys((*left, *[device for device, _ in self.target])))
        self.numbers = {None: _HOST} | {
            device: at for at, device in enumerate(self.all)
        }

    def remaining(self, shards: Sequence[tuple[Any, Box]]) -> tuple[Any, ...]:
        """The devices of `shards`, without the lost ones. A shard is given as its
        device and its box.
        """
        return tuple(
            device
            for device, _ in shards
            if device is not None and device in self.numbers
        )

    def holders(self, path: str) -> dict[Box, list[int]]:
        """The numbers of the devices that hold each box of the source `path`. Lost
        devices are left out.
        """
        held: dict[Box, list[int]] = {}
        for device, box in self.sources[path]:
            held.setdefault(box, []).extend(
                [] if device in self.lost else [self.numbers[device]]
            )
        return held


def _method(
    made: Made,
    sources: Sequence[Sharding | None],
    target: Sharding | None,
    copies: bool,
    parts: ShardParts,
    devices: _Devices,
) -> Literal["programs", "host"]:
    """Decides whether programs on devices or NumPy copies on the host assemble an
    array. All processes decide alike. `made` has the pieces of the sources that fill
    the array, and `parts` are the parts of shards in them. `sources` and `target` are
    the shardings of the sources and of the array, `None` for NumPy arrays.
    """
    if not devices.are_named:
        return "programs" if sources else "host"
    every = {
        device
        for end in (*sources, target)
        if end is not None
        for device in end.device_set
    }
    platforms = {device.platform for device in every}
    has_program = (
        len(platforms) == 1
        and bool(sources)
        and None not in sources
        and 0 not in made.shape
    )
    if has_program and not (copies and platforms == {"cpu"}):
        return "programs"
    process = [device.process_index for device in devices.all]
    is_in_one = {*sources} <= {None} or len(
        {device.process_index for device in every}
    ) == 1
    # Whether a process needs elements that another process holds. Scales are always
    # read as whole arrays.
    travels = any(
        process[part.sender] != process[part.receiver]
        for part in parts.all
        if part.sender != _HOST
    )
    if is_in_one or not (
        travels or any(piece.value.scale is not None for piece in made.pieces)
    ):
        return "host"
    if has_program:
        return "programs"
    raise MeshError(
        f"no program spans {' and '.join(sorted(platforms))} devices of several"
        " processes, or NumPy arrays beside them; move to devices of one platform"
        " within each process first."
    )


def _parts(
    made: Made,
    sources: Sequence[MovedLeaf],
    devices: _Devices,
    sent_before: tuple[tuple[int, int], ...],
) -> ShardParts:
    alike = {
        one[1:]: (devices.source_shapes[one.path][1], devices.holders(one.path))
        for one in sources
    }
    targets = [(devices.numbers[device], box) for device, box in devices.target]
    process_of = {
        at: one.process_index for at, one in enumerate(devices.all) if devices.are_named
    }
    return shard_parts(
        made,
        targets,
        {one.path: alike[one[1:]] for one in sources},
        process_of,
        sent_before,
    )


class LeafShards(NamedTuple):
    """The shards of an array: the shape and dtype of one shard, and by device the box
    of its shard. A NumPy array has one box, with the key `None`. An array of PRNG keys
    has the shards of its key data.
    """

    shape: tuple[int, ...]
    dtype: Any
    boxes: dict[Any, Box]


def shards_of(leaf: MovedLeaf) -> LeafShards:
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    rest = tuple((0, size) for size in shape[len(leaf.shape) :])
    if leaf.sharding is None:
        return LeafShards(shape, dtype, {None: tuple((0, size) for size in shape)})
    found, own = (
        shard_boxes(leaf.sharding, leaf.shape),
        leaf.sharding.shard_shape(leaf.shape),
    )
    boxes = {device: (*found[device], *rest) for device in _ordered(leaf.sharding)}
    return LeafShards((*own, *shape[len(leaf.shape) :]), dtype, boxes)


def _with_host_copies(
    plan: Assembly, sources: Sequence[MovedLeaf], devices: _Devices
) -> Assembly:
    """Returns `plan` with the NumPy copies that this process makes. Replicas share
    memory and are copied once.
    """
    first: dict[Box, int] = {}
    for device, box in devices.target:
        if device.process_index == jax.process_index():
            first.setdefault(box, devices.numbers[device])
    parts: dict[int, list[ShardPart]] = {at: [] for at in first.values()}
    for part in plan.parts.all:
        if part.receiver in parts:
            parts[part.receiver].append(part)
    shapes, orders = (
        [plan.source_shapes[one.path] for one in sources],
        list[Mapping[int, int]](),
    )
    for one in (
        sources
    ):  # for each device, the number of its shard among the shards of this process
        here = (
            ()
            if one.sharding is None
            else one.sharding.addressable_devices_indices_map(one.shape)
        )
        orders.append(
            {devices.numbers.get(device, _HOST): at for at, device in enumerate(here)}
            or {_HOST: _HOST}
        )
    copies = [
        host_copies(parts[at], plan.dtype, box, shapes, orders)
        for box, at in first.items()
    ]
    return dataclasses.replace(plan, targets=tuple(first), host_copies=tuple(copies))


def _ordered(end: Sharding) -> list[Any]:
    """The devices of a sharding, in the same order on every process; for an abstract
    mesh, the positions in it.
    """
    if isinstance(end, NamedSharding):
        return list(
            end.mesh.devices.flat
            if isinstance(end.mesh, Mesh)
            else range(end.mesh.size)
        )
    return sorted(end.device_set, key=lambda device: device.id)


def _scaled_first(made: Made) -> tuple[Made, dict[str, ScaledArray]]:
    """Replaces each source that is multiplied by scales by a new array, the product.
    Returns `made`, the pieces that fill an array, with the products as sources, and, by
    the name of each product, how to compute it.
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
