"""Programs that send parts of shards between the devices of the source and of the
target.

A program has rounds: in each round every device sends at most one part and receives at
most one part. The positions of the parts in their shards are an argument of the
program, so that all layers of a model share one program.
"""

import functools as ft
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
    strided_copy,
    transposed,
)
from ..steps.programs import is_small_float
from .shard_part import Block, ShardPart, first_casts


AXIS = "device"
# The number of arrays that a program takes as arguments; a stack of thousands takes
# several calls of one program.
_MOST_SOURCES = 8


class Round(NamedTuple):
    """One round of a program: a collective permute, or a copy on each device. Its parts
    have one shape, and come from one array.

    - `number`: the number of this array among the arrays that the program reads.
    - `form`: the shape, strides and casts of each part.
    - `pairs`: the sender and the receiver of each part; empty for copies.
    - `is_full`: whether every device of the target receives a part.
    """

    number: int
    form: StridedCopy
    pairs: tuple[tuple[int, int], ...]
    is_full: bool


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


class PartsKind(NamedTuple):
    """What the parts of one round have in common: the name of their array, their shape,
    strides and casts, and whether each device copies its own elements.
    """

    key: str
    form: StridedCopy
    is_local: bool


def exchanges(
    parts: Sequence[ShardPart],
    count: int,
    receivers: int,
    most_bytes: int | None,
    kinds: Mapping[str, object],
) -> list[Exchange]:
    """The programs that send `parts` of shards, without constants, to the devices of
    one array.

    Devices are numbered from 0 to `count - 1`, and `receivers` of them are the
    target's. The parts of one program take at most `most_bytes`, unless it has a single
    round. `kinds` has, by name, a value for each array that is read, such as its
    devices and dtype. Arrays with different values are read by different programs.
    """
    alike: dict[PartsKind, list[ShardPart]] = {}
    for part in parts:
        kind = PartsKind(
            key=str(part.piece.value.path),
            form=strided_copy(part.piece),
            is_local=part.sender == part.receiver,
        )
        alike.setdefault(kind, []).append(part)

    # The rounds of one array are neighbours, so that a program reads few arrays.
    key_numbers = {key: number for number, key in enumerate(kinds)}
    in_order = sorted(alike, key=lambda kind: key_numbers[kind.key])
    groups: list[list[RoundParts]] = []
    group_keys: set[str] = set()
    group_bytes = 0
    group_home: object = None
    for kind in in_order:
        home = (kinds[kind.key], kind.form.casts)
        for sent in matchings(alike[kind]):
            size = max(part.memory_bytes for part in sent)
            is_much = most_bytes is not None and group_bytes + size > most_bytes
            has_many_keys = len(group_keys | {kind.key}) > _MOST_SOURCES
            if not groups or is_much or home != group_home or has_many_keys:
                groups.append([])
                group_keys = set()
                group_bytes = 0
            groups[-1].append(RoundParts(kind, sent, size))
            group_keys.add(kind.key)
            group_bytes += size
            group_home = home
    return [_exchange(group, count, receivers) for group in groups]


class RoundParts(NamedTuple):
    """The parts of one round, and the memory of the largest one, in bytes."""

    kind: PartsKind
    parts: Sequence[ShardPart]
    size: int


def _exchange(group: Sequence[RoundParts], count: int, receivers: int) -> Exchange:
    """The program of the rounds in `group`. There are `count` devices, and `receivers`
    of them are the target's.
    """
    keys = tuple(dict.fromkeys(entry.kind.key for entry in group))
    source_rank = max(len(entry.kind.form.source) for entry in group)
    target_rank = len(group[0].kind.form.target)
    places = np.zeros((count, len(group), source_rank + target_rank + 1), np.int32)
    rounds = []
    for number, entry in enumerate(group):
        kind = entry.kind
        pairs: list[tuple[int, int]] = []
        if not kind.is_local:
            pairs = sorted((part.sender, part.receiver) for part in entry.parts)
        step = Round(
            number=keys.index(kind.key),
            form=kind.form,
            pairs=tuple(pairs),
            is_full=len(entry.parts) == receivers,
        )
        rounds.append(step)
        for part in entry.parts:
            source = part.piece.source
            places[part.sender, number, : len(source)] = source
            places[part.receiver, number, source_rank:-1] = part.piece.target
            places[part.receiver, number, -1] = 1
    return Exchange(
        keys=keys,
        rounds=tuple(rounds),
        places=places,
        sizes=tuple(entry.size for entry in group),
    )


def per_device(
    devices: tuple[object, ...], body: Any, count: int, *donated: int
) -> Any:
    """A jitted function of `count` arrays, each sharded along dimension 0 over
    `devices`. Each device calls `body` with its own shards. `donated` are the positions
    of the arrays that are donated.
    """
    mesh = sharding_of(devices).mesh
    spec = PartitionSpec(AXIS)
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(spec,) * count, out_specs=spec, check_vma=False
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
    is_moved = not has_casts and all(source.dtype == target.dtype for source in sources)
    # Elements that are only moved can be moved as integers of the same bits.
    dtype = program_dtype(target.dtype, devices) if is_moved else target.dtype

    def run(places: jax.Array, *arrays: jax.Array) -> jax.Array:
        shards = [
            array.reshape(source.shape)
            for array, source in zip(arrays, sources, strict=False)
        ]
        if is_moved:
            shards = [bitcast(shard, dtype) for shard in shards]
        out = first_shard(target.shape, dtype, None if makes_shards else arrays[-1])
        for number, step in enumerate(rounds):
            # Without the barrier XLA could slice and keep all parts before it sends the
            # first.
            shards, out = jax.lax.optimization_barrier((shards, out))
            shard = shards[step.number]
            place = places[0, number]
            part = slice_part(step.form, shard, place)
            if step.pairs:
                part = jax.lax.ppermute(part, AXIS, step.pairs)
            out = write_part(step, out, part, shard.dtype, place)
        return bitcast(out.reshape(block_shape(target.shape)), target.dtype)

    count = len(sources) + 1
    if makes_shards:
        return per_device(devices, run, count)
    return per_device(devices, run, count + 1, count)


def first_shard(
    shape: tuple[int, ...], dtype: Any, earlier: jax.Array | None
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
    return (dtype, *form.casts)[first_casts(form.casts, dtype)]


def slice_part(form: StridedCopy, block: jax.Array, place: jax.Array) -> jax.Array:
    """Slices a part out of `block`, a device's shard, and casts it to the dtype in
    which it is sent. `form` has the part's shape, strides and casts. `place` is the
    device's row of `Exchange.places` for this round.
    """
    starts = source_start(place, form)
    sizes = [size for size, _ in form.source]
    box = jax.lax.dynamic_slice(block, starts, sizes)
    casts = form.casts[: first_casts(form.casts, block.dtype)]
    return _cast(gathered(box, form.source), casts)


def _cast(piece: jax.Array, casts: Sequence[object]) -> jax.Array:
    for number, to in enumerate(casts):
        # Without the barrier XLA may leave out a cast to a narrower dtype and back.
        if number > 0:
            piece = jax.lax.optimization_barrier(piece)
        piece = changed(piece, to)
    return piece


def write_part(
    step: Round, out: jax.Array, piece: jax.Array, dtype: object, place: jax.Array
) -> jax.Array:
    """Writes `piece`, the part that a device received in the round `step`, into its
    shard `out`, and returns the shard. `dtype` is the dtype of the source. `place` is
    the device's row of `Exchange.places` for this round.
    """
    form = step.form
    casts = form.casts[first_casts(form.casts, dtype) :]
    piece = transposed(bitcast(_cast(piece, casts), out.dtype), form)
    starts = target_start(place, form)
    sizes = [size for size, _ in form.target]
    if step.is_full and all(is_dense(size, digits) for size, digits in form.target):
        return jax.lax.dynamic_update_slice(out, piece.reshape(sizes), starts)

    before = jax.lax.dynamic_slice(out, starts, sizes)
    after = scattered(before, form.target, piece, 0)
    written = jnp.where(is_received(place), after, before)
    return jax.lax.dynamic_update_slice(out, written, starts)


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
    return NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec(AXIS))


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


# For each device, the part that it sends (or receives) in each round. A round has a
# number, its colour.
Colours = dict[int, dict[int, ShardPart]]


def matchings(parts: Sequence[ShardPart]) -> list[tuple[ShardPart, ...]]:
    """Groups parts into rounds, so that each device sends at most one part and receives
    at most one part in a round.

    The parts are the edges of a bipartite graph from senders to receivers. The rounds
    are colours of the edges, and no two edges of a device's node have one colour. By
    Konig's theorem, as many colours are needed as the largest number of parts that a
    device sends or receives. For device 0 sending to 1 and 2, and device 1 sending to
    2, these are two rounds: 0 to 1 and 1 to 2 in the first, 0 to 2 in the second.
    """
    at_sender: Colours = {}
    at_receiver: Colours = {}
    for part in parts:
        outgoing = at_sender.setdefault(part.sender, {})
        incoming = at_receiver.setdefault(part.receiver, {})
        colour = _first_free(outgoing)
        if colour in incoming:
            free = _first_free(incoming)
            _swap_colours(part.receiver, colour, free, at_sender, at_receiver)
        outgoing[colour] = part
        incoming[colour] = part
    colours: dict[int, list[ShardPart]] = {}
    for used in at_sender.values():
        for colour, part in used.items():
            colours.setdefault(colour, []).append(part)
    return [tuple(colours[colour]) for colour in sorted(colours)]


def _swap_colours(
    receiver: int, a: int, b: int, at_sender: Colours, at_receiver: Colours
) -> None:
    """Changes colours of parts, in place, so that no part that `receiver` receives has
    the colour `a`. None has the colour `b` before. For this, the parts on a path swap
    the two colours. The path starts at `receiver` with the part of colour `a`. Each
    next part shares a device with the one before, and has the other colour. `at_sender`
    and `at_receiver` have for each device the parts that it sends or receives, by
    colour.
    """
    path: list[tuple[ShardPart, int]] = []
    parts_of_node = at_receiver[receiver]
    colour = a
    while (part := parts_of_node.get(colour)) is not None:
        path.append((part, colour))
        # The path alternates between receivers and senders.
        is_at_sender = len(path) % 2 == 1
        parts_of_node = (
            at_sender[part.sender] if is_at_sender else at_receiver[part.receiver]
        )
        colour = b if colour == a else a
    for part, colour in path:
        del at_sender[part.sender][colour]
        del at_receiver[part.receiver][colour]
    for part, colour in path:
        other = b if colour == a else a
        at_sender[part.sender][other] = part
        at_receiver[part.receiver][other] = part


def _first_free(used: Mapping[int, ShardPart]) -> int:
    colour = 0
    while colour in used:
        colour += 1
    return colour
