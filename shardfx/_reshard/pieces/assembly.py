"""The plan for assembling one array from shards of other arrays, and the arrays that
take part. `planning` makes it.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._convert import (
    Arithmetic,
    Piece,
    Scale,
)
from ..._ground.boxes import Box, shard_boxes, whole_box
from ..._ground.keys import data_of
from ..._ground.spec import array_bytes
from ..._plan import ShardPlan
from ...topology import MeshSpec
from ..shardings import sharers, slices_of
from .copies import Copy, HostCopies
from .exchange import Exchange, exchanges
from .parts import ShardParts
from .shard_part import Block


# The memory that programs may use for small arrays, since dividing them into more
# programs takes more time.
_LEAST_BYTES = 1 << 20


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
    mesh = None if plan.jax_mesh else plan.mesh
    leaves = []
    for path, number in plan.content.paths_and_rows:
        if number < 0:
            continue
        row = plan.content.rows[number]
        leaf = MovedLeaf(
            path=path,
            shape=row.shape,
            dtype=row.dtype,
            sharding=plan.content.row_shardings[number],
            mesh=mesh,
        )
        leaves.append(leaf)
    return leaves


class LeafShards(NamedTuple):
    """The shards of an array: the shape and dtype of one shard, and by device the box
    of its shard. A NumPy array has one box, with the key `None`. An array of PRNG keys
    has the shards of its key data.
    """

    shape: tuple[int, ...]
    dtype: Any
    boxes: dict[Any, Box]


def shards_of(leaf: MovedLeaf) -> LeafShards:
    """The shape and dtype of a shard of an array, and the box of each device's shard. A
    NumPy array has one box, with the key `None`. Of PRNG keys it is their key data.
    """
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    if leaf.sharding is None:
        return LeafShards(shape=shape, dtype=dtype, boxes={None: whole_box(shape)})
    # PRNG keys have further dimensions, which are not sharded.
    key_sizes = shape[len(leaf.shape) :]
    key_box = whole_box(key_sizes)
    box_of = shard_boxes(leaf.sharding, leaf.shape)
    boxes: dict[Any, Box] = {}
    for device in _devices_in_order(leaf.sharding):
        boxes[device] = box_of[device] + key_box
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    return LeafShards(shape=(*shard_shape, *key_sizes), dtype=dtype, boxes=boxes)


def _devices_in_order(sharding: Sharding) -> list[Any]:
    """The devices of a sharding, in the same order on every process; for an abstract
    mesh, the positions in it.
    """
    if not isinstance(sharding, NamedSharding):
        return sorted(sharding.device_set, key=lambda device: device.id)
    if isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return list(range(sharding.mesh.size))


def with_numbered_sources(
    pieces: Sequence[Piece],
    paths: Sequence[str],
) -> tuple[Piece, ...]:
    """Returns `pieces` with the path of each source replaced by its position in
    `paths`: "b" in ("w", "b") by "1".
    """
    numbers: dict[str, str] = {}
    for number, path in enumerate(paths):
        numbers[path] = str(number)
    numbered_pieces = []
    for piece in pieces:
        value = piece.value
        if value.scale is not None:
            scale = value.scale._replace(path=numbers[value.scale.path])
            value = value._replace(scale=scale)
        if value.path is not None:
            value = value._replace(path=numbers[value.path])
        numbered_pieces.append(piece._replace(value=value))
    return tuple(numbered_pieces)


def numbers_text(pieces: Sequence[Piece]) -> str:
    """The text of the numbers of constants and of arithmetic in `pieces`. Keys need it
    beside the pieces: 0.0 and -0.0 are equal as numbers, but not as text.
    """
    numbers: list[object] = []
    for piece in pieces:
        numbers.append(piece.value.number)
        for operation in piece.value.casts:
            if isinstance(operation, Arithmetic):
                numbers.append(operation.number)
    return str(numbers)


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

    - `target`: the sharding of the array.
    - `sharding`: the sharding in which it is assembled: `target`, or one that divides its
      shards inside TPU slices (or nodes), so that each element enters a slice once. An
      all-gather inside the slices then follows.
    - `shape`, `dtype`: the shape and dtype of the array, or of the key data of PRNG
      keys.
    - `shard_shape`: the shape of one shard of the array.
    - `method`: "programs" (collective permutes between the devices) or "host" (NumPy
      copies in this process's memory). "host" is for CPU devices that share this
      memory, and for devices that no program spans.
    - `pieces`: the pieces that fill the array.
    - `scaled`: the products of quantised sources and their scales, which programs
      compute first. The keys are the names by which `pieces` read the products.
    - `parts`: the parts of shards that devices send. Their senders and receivers are
      positions in `devices`.
    - `devices`: the devices of the array and of its sources. If a sharding is on a mesh
      without devices, these are integers: a device's id, or a position in the abstract
      mesh.
    - `target_devices`: the devices of the array.
    - `source_devices`, `source_shapes`: for each source, its devices, and the shape and
      dtype of its shard.
    - `targets`: for "host", the distinct boxes of this process's shards of the array.
    - `host_copies`: for "host", the copies that assemble each of these boxes.
    - `joint_copies`: for "host" and small arrays, the copies that assemble all of them
      in one memory.
    - `relay`: if devices of a slice share what enters it, the plan by which they send it
      to each other. Its source is the array without these elements.
    """

    target: Sharding
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
    source_shapes: Mapping[str, Block]
    targets: tuple[Box, ...] = ()
    host_copies: tuple[HostCopies, ...] = ()
    joint_copies: tuple[Copy, ...] = ()
    relay: "Assembly | None" = None

    @ft.cached_property
    def dcn_bytes(self) -> int:
        """The bytes that all devices together receive from other TPU slices (or nodes);
        0 if a mesh has no devices, and without programs.
        """
        has_devices = not any(isinstance(device, int) for device in self.devices)
        if self.method != "programs" or not has_devices:
            return 0
        slices = slices_of(self.devices)
        if len(set(slices)) == 1:
            return 0
        total = 0
        for (sender, receiver), nbytes in self.parts.links.items():
            if slices[sender] != slices[receiver]:
                total += nbytes
        return total

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
        """The array as it is assembled, before an all-gather."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @ft.cached_property
    def is_remote(self) -> bool:
        """Whether this process owns no device that takes part in the assembly."""
        if self.method == "programs":
            processes = {device.process_index for device in self.devices}
            return jax.process_index() not in processes
        return not self.sharding.addressable_devices

    @ft.cached_property
    def changes_devices(self) -> bool:
        """Whether some device holds the source but not the target, or the target but
        not the source.
        """
        # `devices` has the devices of all these arrays.
        device_lists = [self.target_devices, *self.source_devices.values()]
        return min(map(len, device_lists)) < len(self.devices)

    @ft.cached_property
    def most_bytes(self) -> int:
        """The default limit of programs' memory on a device: the bytes of a shard, but
        at least 1 MiB.
        """
        return max(_LEAST_BYTES, array_bytes(self.shard_shape, self.dtype))

    def exchanges(
        self,
        limit_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> list[Exchange]:
        """The programs that send the parts of shards and assemble the array, in order.
        Parts are divided to keep within the limits.

        `limit_bytes` is the most bytes that programs may use in one memory, besides
        source and target. CPU devices of one process share one memory; every other
        device has its own. If `limit_bytes` is `None`, the limit depends on the
        devices. If source and target are on different devices, programs may use
        `most_bytes` on a device (`None` for the value of the property `most_bytes`).
        Otherwise they have no limit.
        """
        if self.method != "programs":
            return []
        part_bytes = None
        if limit_bytes is not None:
            part_bytes = max(1, limit_bytes // (self._buffers * self.sharers))
        elif self.changes_devices:
            part_bytes = max(1, (most_bytes or self.most_bytes) // self._buffers)

        # One program reads arrays on the same devices and of the same dtype. A key is
        # the number of a source as text: "0".
        kinds: dict[str, object] = {}
        for key, devices in self.source_devices.items():
            kinds[key] = (devices, self.source_shapes[key].dtype)
        return exchanges(
            self.parts.rows.groups(part_bytes),
            count=len(self.devices),
            receivers=len(self.target_devices),
            most_bytes=part_bytes,
            flight_bytes=part_bytes or self.most_bytes,
            kinds=kinds,
        )

    @property
    def _buffers(self) -> int:
        """How many buffers, each as large as a part of a shard, a program needs on a
        device at the same time. It is one more if source and target are on different
        devices: a program then holds the received part besides the old and the new
        values of the elements that it writes.
        """
        return 4 if self.changes_devices else 3

    def extra_bytes(self, programs: Sequence[Exchange]) -> int:
        """The most bytes that `programs`, which run one after another, use in one
        memory besides source and target.
        """
        most_buffer_bytes = 0
        for program in programs:
            buffer_bytes = program.flight_bytes
            # The CPU's compiler drops the barriers between rounds, and may slice all
            # parts before it sends the first.
            if self.changes_devices or self.sharers > 1:
                buffer_bytes = sum(program.sizes)
            most_buffer_bytes = max(most_buffer_bytes, buffer_bytes)
        return self._buffers * self.sharers * most_buffer_bytes

    @ft.cached_property
    def least_bytes(self) -> int:
        """The smallest `limit_bytes` under which the array can be assembled."""
        if self.method != "programs":
            return 0
        smallest_part_bytes = max(1, self.parts.rows.least_memory_bytes)
        return self._buffers * self.sharers * smallest_part_bytes
