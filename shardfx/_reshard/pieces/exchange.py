"""Programs that send parts of shards between the devices of the source and of the
target.

A program has rounds: in each round every device sends at most one part and receives at
most one part. The positions of the parts in their shards are an argument of the
program, so that all layers of a model share one program.
"""

import functools as ft
import itertools as it
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._convert import (
    StridedCopy,
    changed,
    gathered,
    is_dense,
    scattered,
    transposed,
)
from ..steps.programs import is_small_float
from .part_table import PartGroup
from .rounds import matchings
from .shard_part import Block, sender_cast_count


AXIS = "device"
# The number of arrays that a program takes as arguments; a stack of thousands takes
# several calls of one program.
_MOST_SOURCES = 8
# The compiler for TPUs keeps at most as many collective permutes in flight.
MOST_IN_FLIGHT = 5


class Round(NamedTuple):
    """One round of a program: a collective permute, or a copy on each device. Its parts
    have one shape, and come from one array.

    - `source_number`: the number of this array among the arrays that the program reads.
    - `form`: the shape, strides and casts of each part.
    - `senders`, `receivers`: the devices of each part; empty for copies.
    - `is_full`: whether every device of the target receives a part.
    - `waits`: whether it begins when the earlier rounds have ended. The rounds up to the
      next one that waits are in flight at the same time.
    """

    source_number: int
    form: StridedCopy
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    is_full: bool
    waits: bool

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The sender and the receiver of each part that is sent."""
        return list(zip(self.senders, self.receivers, strict=True))


class Exchange(NamedTuple):
    """A program that copies parts of some arrays into another array, and the positions
    of the parts in their shards.

    **Arguments:**

    - `keys`: the names of the arrays that are read.
    - `rounds`: the rounds, in the order in which they run.
    - `places`: one row of integers for each device and round: `source_start`, with as
      many integers as the source of highest rank needs, `target_start`, and 1 if the
      device receives a part, else 0.
    - `sizes`: for each round, the memory of its largest part, in bytes.
    """

    keys: tuple[str, ...]
    rounds: tuple[Round, ...]
    places: np.ndarray
    sizes: tuple[int, ...]

    @property
    def flight_bytes(self) -> int:
        """The most memory of parts that are in flight at the same time. The rounds up
        to the next one that waits are in flight together.
        """
        most_bytes = 0
        bytes_in_flight = 0
        for step, part_bytes in zip(self.rounds, self.sizes, strict=True):
            if step.waits:
                bytes_in_flight = 0
            bytes_in_flight += part_bytes
            most_bytes = max(most_bytes, bytes_in_flight)
        return most_bytes


def source_start(row: jax.Array, form: StridedCopy) -> list[jax.Array]:
    """From a row of `Exchange.places`: the position, in the source's shard, of the part
    that the device sends.
    """
    return list(row[: len(form.source)])


def target_start(row: jax.Array, form: StridedCopy) -> list[jax.Array]:
    """From a row of `Exchange.places`: the position, in the target's shard, of the part
    that the device receives.
    """
    return list(row[-1 - len(form.target) : -1])


def is_received(row: jax.Array) -> jax.Array:
    """From a row of `Exchange.places`: whether the device receives a part."""
    return row[-1] > 0


def exchanges(
    groups: Sequence[PartGroup],
    count: int,
    receivers: int,
    most_bytes: int | None,
    flight_bytes: int,
    kinds: Mapping[str, object],
) -> list[Exchange]:
    """The programs that send the parts of shards in `groups` to the devices of one
    array.

    Devices are numbered from 0 to `count - 1`, and `receivers` of them are the
    target's. The parts of one program take at most `most_bytes`, unless it has a single
    round. The parts that are in flight at the same time take at most `flight_bytes`,
    unless they are those of one round. `kinds` has, by name, a value for each array
    that is read, such as its devices and dtype. Arrays with different values are read
    by different programs. Each group has parts of one array and one shape. The array's
    name is the group's `key`.
    """
    # The rounds of one array are neighbours, so that a program reads few arrays.
    key_numbers = {key: number for number, key in enumerate(kinds)}
    in_order = sorted(groups, key=lambda group: key_numbers[group.key])

    programs: list[list[RoundParts]] = []
    keys: set[str] = set()
    program_bytes = 0
    program_kind: object = None
    for group in in_order:
        group_kind = (kinds[group.key], group.form.casts)
        # In each round a device sends and receives at most one part. `rows` are the
        # indices of the round's parts in the group.
        for rows in matchings(group.senders, group.receivers):
            part_bytes = group.memory_bytes
            is_too_large = (
                most_bytes is not None and program_bytes + part_bytes > most_bytes
            )
            has_too_many_keys = len(keys | {group.key}) > _MOST_SOURCES
            does_not_fit = (
                is_too_large or has_too_many_keys or group_kind != program_kind
            )
            if not programs or does_not_fit:
                programs.append([])
                keys = set()
                program_bytes = 0
            programs[-1].append(RoundParts(group, rows))
            keys.add(group.key)
            program_bytes += part_bytes
            program_kind = group_kind
    return [
        _exchange(round_parts, count, receivers, flight_bytes)
        for round_parts in programs
    ]


class RoundParts(NamedTuple):
    """The parts of one round: some rows of a group of parts."""

    group: PartGroup
    rows: np.ndarray


def _exchange(
    round_parts: Sequence[RoundParts],
    count: int,
    receivers: int,
    flight_bytes: int,
) -> Exchange:
    """The program of some rounds: for each round, the rows of a group of parts. There
    are `count` devices, and `receivers` of them are the target's. Parts in flight take
    at most `flight_bytes`.
    """
    groups = [entry.group for entry in round_parts]
    # The names of the arrays that the program reads.
    keys = list(dict.fromkeys([group.key for group in groups]))
    source_rank = max([len(group.form.source) for group in groups])
    target_rank = len(groups[0].form.target)
    # A position in the source's shard, one in the target's, and whether a part is
    # received.
    width = source_rank + target_rank + 1
    places = np.zeros((len(round_parts), count, width), np.int32)
    rounds: list[Round] = []
    in_flight = 0
    bytes_in_flight = 0
    for number, (group, rows) in enumerate(round_parts):
        bytes_in_flight += group.memory_bytes
        waits = in_flight == MOST_IN_FLIGHT or bytes_in_flight > flight_bytes
        if waits:
            in_flight = 0
            bytes_in_flight = group.memory_bytes
        in_flight += 1

        round_senders = group.senders[rows]
        round_receivers = group.receivers[rows]
        step = Round(
            source_number=keys.index(group.key),
            form=group.form,
            senders=(),
            receivers=(),
            is_full=len(rows) == receivers,
            waits=waits,
        )
        if not group.is_local:
            step = step._replace(
                senders=tuple(round_senders.tolist()),
                receivers=tuple(round_receivers.tolist()),
            )
        rounds.append(step)
        # One row for each device; see `Exchange.places`.
        places_in_round = places[number]
        places_in_round[round_senders, : len(group.form.source)] = group.sources[rows]
        places_in_round[round_receivers, source_rank:-1] = group.targets[rows]
        places_in_round[round_receivers, -1] = 1
    return Exchange(
        keys=tuple(keys),
        rounds=tuple(rounds),
        places=places.transpose(1, 0, 2),
        sizes=tuple([group.memory_bytes for group in groups]),
    )


def per_device(
    devices: tuple[object, ...],
    body: Any,
    argument_count: int,
    donated: tuple[int, ...] = (),
) -> Any:
    """A jitted function of `argument_count` arrays, each sharded along dimension 0 over
    `devices`. Each device calls `body` with its own shards. `donated` are the positions
    of the arrays that are donated.
    """
    mesh = sharding_of(devices).mesh
    spec = PartitionSpec(AXIS)
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec,) * argument_count,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=donated)


@ft.lru_cache(maxsize=256)
def program(
    devices: tuple[Any, ...],
    rounds: tuple[Round, ...],
    sources: tuple[Block, ...],
    target: Block,
    makes_shards: bool,
) -> Any:
    """A jitted function that sends parts of some arrays, the sources, between devices
    and writes them into shards of another array, the target.

    Its arguments are the positions of the parts (`Exchange.places`) and the sources. If
    `makes_shards` is true, it makes the target's shards. Otherwise they are its last
    argument, which it writes into and returns. `sources` and `target` have the shape
    and dtype of a shard of each array.
    """
    has_casts = any(step.form.casts for step in rounds)
    has_one_dtype = all(source.dtype == target.dtype for source in sources)
    is_only_moved = has_one_dtype and not has_casts
    dtype = target.dtype
    if is_only_moved:
        # Elements that are only moved can be moved as integers of the same bits.
        dtype = program_dtype(target.dtype, devices)

    def run(places: jax.Array, *arrays: jax.Array) -> jax.Array:
        """A device's shard of the target. `arrays` are its shards of the sources, and
        behind them the shard that earlier programs made, if there is one.
        """
        shards: list[jax.Array] = []
        for source, array in zip(sources, arrays, strict=False):
            shard = array.reshape(source.shape)
            shards.append(bitcast(shard, dtype) if is_only_moved else shard)
        earlier = None if makes_shards else arrays[-1]
        target_shard = first_shard(target.shape, dtype, earlier)
        for number, step in enumerate(rounds):
            # Without the barriers XLA could slice and keep all parts before it sends
            # the first.
            if step.waits:
                shards, target_shard = jax.lax.optimization_barrier(
                    (shards, target_shard)
                )
            shard = shards[step.source_number]
            place = places[0, number]
            part = slice_part(step.form, shard, place)
            if step.senders:
                part = jax.lax.ppermute(part, AXIS, step.pairs)
            target_shard = write_part(
                step=step,
                target_shard=target_shard,
                part=part,
                source_dtype=shard.dtype,
                place=place,
            )
        return bitcast(target_shard.reshape(block_shape(target.shape)), target.dtype)

    # The places and the sources. The target's shards, if given, are donated.
    argument_count = len(sources) + 1
    if makes_shards:
        return per_device(devices, run, argument_count)
    return per_device(devices, run, argument_count + 1, donated=(argument_count,))


def first_shard(
    shape: tuple[int, ...],
    dtype: Any,
    earlier: jax.Array | None,
) -> jax.Array:
    """The shard into which a program writes: the one that earlier programs made, or
    zeros.
    """
    if earlier is None:
        return jnp.zeros(shape, dtype)
    return bitcast(earlier.reshape(shape), dtype)


def program_dtype(dtype: Any, devices: Sequence[Any]) -> Any:
    """The dtype in which devices send elements of `dtype`. On CPUs bfloat16 and smaller
    floats are sent as integers of the same bits, since XLA's CPU compiler would
    otherwise convert them to a larger type.
    """
    if devices[0].platform != "cpu" or not is_small_float(dtype):
        return dtype
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array's bits, interpreted as another dtype of the same width."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def sent_dtype(form: StridedCopy, dtype: object) -> Any:
    """The dtype of sent elements of an array of `dtype`, after the casts of `form` that
    the sender applies.
    """
    dtypes = (dtype, *form.casts)
    return dtypes[sender_cast_count(form.casts, dtype)]


def slice_part(form: StridedCopy, block: jax.Array, place: jax.Array) -> jax.Array:
    """Slices a part out of `block`, a device's shard, and casts it to the dtype in
    which it is sent. `form` has the part's shape, strides and casts. `place` is the
    device's row of `Exchange.places` for this round.
    """
    start = source_start(place, form)
    # The smallest box that contains the part, and then the part without its gaps.
    box = jax.lax.dynamic_slice(block, start, _shape(form.source))
    elements = gathered(box, form.source)
    return _cast(elements, form.casts[: sender_cast_count(form.casts, block.dtype)])


def _shape(factors: Sequence[tuple[int, object]]) -> list[int]:
    """The shape of a box, from its factors along each dimension."""
    return [size for size, _ in factors]


def _cast(elements: jax.Array, casts: Sequence[object]) -> jax.Array:
    """The elements after `casts`: dtypes, and arithmetic with numbers."""
    for number, cast in enumerate(casts):
        # Without the barrier XLA may leave out a cast to a narrower dtype and back.
        if number > 0:
            elements = jax.lax.optimization_barrier(elements)
        elements = changed(elements, cast)
    return elements


def write_part(
    step: Round,
    target_shard: jax.Array,
    part: jax.Array,
    source_dtype: object,
    place: jax.Array,
) -> jax.Array:
    """Writes `part`, which a device received in the round `step`, into its shard
    `target_shard`, and returns the shard. `source_dtype` is the dtype of the array that
    the part is from. `place` is the device's row of `Exchange.places` for this round.
    """
    form = step.form
    part = _cast(part, form.casts[sender_cast_count(form.casts, source_dtype) :])
    part = transposed(bitcast(part, target_shard.dtype), form)
    starts = target_start(place, form)
    shape = _shape(form.target)
    # Every device receives a part, and parts fill their boxes.
    if step.is_full and all(it.starmap(is_dense, form.target)):
        return jax.lax.dynamic_update_slice(target_shard, part.reshape(shape), starts)

    # The part has gaps, or a device received none: what was there stays.
    before = jax.lax.dynamic_slice(target_shard, starts, shape)
    after = scattered(before, form.target, part, 0)
    written = jnp.where(is_received(place), after, before)
    return jax.lax.dynamic_update_slice(target_shard, written, starts)


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one shard in an array that concatenates all shards along dimension
    0: for scalars `(1,)`.
    """
    return shape or (1,)


@ft.lru_cache(maxsize=64)
def sharding_of(devices: tuple[object, ...]) -> NamedSharding:
    """The sharding of an array whose first dimension is sharded over all of these
    devices.
    """
    mesh = Mesh(np.asarray(devices), (AXIS,))
    return NamedSharding(mesh, PartitionSpec(AXIS))


def blocks(
    devices: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: Any,
    shards: Mapping[Any, jax.Array],
) -> jax.Array:
    """One array that concatenates the shards of all `devices` along dimension 0. Each
    shard has the given `shape` and `dtype`. `shards` has this process's shards, by
    device. A device without a shard gets zeros.
    """
    block = block_shape(shape)
    process = jax.process_index()
    arrays = []
    for device in devices:
        if device.process_index != process:
            continue
        if device in shards:
            arrays.append(shards[device].reshape(block))
        else:
            arrays.append(jnp.zeros(block, dtype, device=device))
    whole = (len(devices) * block[0], *block[1:])
    return jax.make_array_from_single_device_arrays(
        whole, sharding_of(devices), arrays, dtype=dtype
    )
