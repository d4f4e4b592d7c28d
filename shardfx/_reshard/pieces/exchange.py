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
from .parts import ShardPart, first_casts


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
    - `places`: one row of integers for each device and round. The first integers are
      the position, in the source's
        shard, of the part that the device sends. The next are the position, in the
        target's shard, of the part that the device receives. The last is 1 if the
        device receives a part, else 0.
    - `sizes`: for each round, the memory of its largest part, in bytes.
    """

    keys: tuple[str, ...]
    rounds: tuple[Round, ...]
    places: np.ndarray
    sizes: tuple[int, ...]


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
    alike: dict[tuple[str, StridedCopy, bool], list[ShardPart]] = {}
    for part in parts:
        kind_of = (
            str(part.piece.value.path),
            strided_copy(part.piece),
            part.sender == part.receiver,
        )
        alike.setdefault(kind_of, []).append(part)
    groups: list[list[RoundParts]] = []
    filled, keys, kind = 0, set[str](), None
    # The rounds of one array are neighbours, so that a program reads few arrays.
    for (key, form, is_local), own in sorted(
        alike.items(), key=lambda item: [*kinds].index(item[0][0])
    ):
        for sent in matchings(own):
            size, home = (
                max(part.memory_bytes for part in sent),
                (kinds[key], form.casts),
            )
            is_much = most_bytes is not None and filled + size > most_bytes
            if (
                not groups
                or is_much
                or home != kind
                or len(keys | {key}) > _MOST_SOURCES
            ):
                groups.append([])
                filled, keys = 0, set()
            groups[-1].append((key, form, is_local, size, sent))
            filled, keys, kind = filled + size, keys | {key}, home
    return [_exchange(group, count, receivers) for group in groups]


# The parts of one round: the key of the array, the shape and casts of the parts,
# whether each device copies its own elements, the bytes of the largest part, and the
# parts.
RoundParts = tuple[str, StridedCopy, bool, int, Sequence[ShardPart]]


def _exchange(group: Sequence[RoundParts], count: int, receivers: int) -> Exchange:
    keys = tuple(dict.fromkeys(key for key, *_ in group))
    rank = max(len(form.source) for _, form, *_ in group)
    places = np.zeros((count, len(group), rank + len(group[0][1].target) + 1), np.int32)
    rounds = []
    for at, (key, form, is_local, _, sent) in enumerate(group):
        pairs = (
            ()
            if is_local
            else tuple(sorted((part.sender, part.receiver) for part in sent))
        )
        rounds.append(Round(keys.index(key), form, pairs, len(sent) == receivers))
        for part in sent:
            places[part.sender, at, : len(part.piece.source)] = part.piece.source
            places[part.receiver, at, rank:] = (*part.piece.target, 1)
    return Exchange(keys, tuple(rounds), places, tuple(size for *_, size, _ in group))


# The shape and dtype of one device's shard.
Block = tuple[tuple[int, ...], Any]


def per_device(
    devices: tuple[object, ...], body: Any, count: int, *donated: int
) -> Any:
    """A jitted function of `count` arrays, each sharded along dimension 0 over
    `devices`. Each device calls `body` with its own shards. `donated` are the positions
    of the arrays that are donated.
    """
    mesh, spec = sharding_of(devices).mesh, PartitionSpec(AXIS)
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
    is_moved = not any(step.form.casts for step in rounds) and all(
        dtype == target[1] for _, dtype in sources
    )
    own = program_dtype(target[1], devices) if is_moved else target[1]

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        blocks = [
            one.reshape(shape) for one, (shape, _) in zip(given, sources, strict=False)
        ]
        blocks = [bitcast(one, own) for one in blocks] if is_moved else blocks
        out = (
            jnp.zeros(target[0], own)
            if makes_shards
            else bitcast(given[-1].reshape(target[0]), own)
        )
        for at, step in enumerate(rounds):
            # Without the barrier XLA could slice and keep all parts before it sends the
            # first.
            blocks, out = jax.lax.optimization_barrier((blocks, out))
            block, place = blocks[step.number], places[0, at]
            piece = slice_part(step.form, block, place)
            piece = jax.lax.ppermute(piece, AXIS, step.pairs) if step.pairs else piece
            out = write_part(step, out, piece, block.dtype, place)
        return bitcast(out.reshape(block_shape(target[0])), target[1])

    count = len(sources) + 1
    return (
        per_device(devices, run, count)
        if makes_shards
        else per_device(devices, run, count + 1, count)
    )


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
    device's row of integers in `Exchange.places`: the first ones are the part's
    position in the shard, and the others are for the receiver (`write_part`).
    """
    piece = jax.lax.dynamic_slice(
        block, list(place[: len(form.source)]), [size for size, _ in form.source]
    )
    return _cast(
        gathered(piece, form.source), form.casts[: first_casts(form.casts, block.dtype)]
    )


def _cast(piece: jax.Array, casts: Sequence[object]) -> jax.Array:
    for at, to in enumerate(casts):
        # Without the barrier XLA may leave out a cast to a narrower dtype and back.
        piece = changed(jax.lax.optimization_barrier(piece) if at else piece, to)
    return piece


def write_part(
    step: Round, out: jax.Array, piece: jax.Array, dtype: object, place: jax.Array
) -> jax.Array:
    """Writes `piece`, the part that a device received in the round `step`, into its
    shard `out`, and returns the shard. `dtype` is the dtype of the source. `place` is
    the device's row of integers for this round in `Exchange.places`. Its last integers
    are the position in the shard, and then 1 if the device received a part, else 0.
    """
    form = step.form
    piece = transposed(
        bitcast(_cast(piece, form.casts[first_casts(form.casts, dtype) :]), out.dtype),
        form,
    )
    starts, sizes = (
        list(place[-1 - len(form.target) : -1]),
        [size for size, _ in form.target],
    )
    if step.is_full and all(is_dense(size, digits) for size, digits in form.target):
        return jax.lax.dynamic_update_slice(out, piece.reshape(sizes), starts)
    before = jax.lax.dynamic_slice(out, starts, sizes)
    after = scattered(before, form.target, piece, 0)
    return jax.lax.dynamic_update_slice(
        out, jnp.where(place[-1] > 0, after, before), starts
    )


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
    own = [device for device in devices if device.process_index == jax.process_index()]
    found = [
        (
            shards[device].reshape(block)
            if device in shards
            else jnp.zeros(block, dtype, device=device)
        )
        for device in own
    ]
    whole = (len(devices) * block[0], *block[1:])
    return jax.make_array_from_single_device_arrays(
        whole, sharding_of(devices), found, dtype=dtype
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
        out, into = (
            at_sender.setdefault(part.sender, {}),
            at_receiver.setdefault(part.receiver, {}),
        )
        free_out, free_into = _first_free(out), _first_free(into)
        if free_out in into:
            _swap_colours(part.receiver, free_out, free_into, at_sender, at_receiver)
        out[free_out] = into[free_out] = part
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
    path, sides, node, colour = [], (at_receiver, at_sender), receiver, a
    while (part := sides[len(path) % 2][node].get(colour)) is not None:
        path.append((part, colour))
        node = part.sender if len(path) % 2 else part.receiver
        colour = b if colour == a else a
    for part, colour in path:
        del at_sender[part.sender][colour], at_receiver[part.receiver][colour]
    for part, colour in path:
        other = b if colour == a else a
        at_sender[part.sender][other] = at_receiver[part.receiver][other] = part


def _first_free(used: Mapping[int, ShardPart]) -> int:
    colour = 0
    while colour in used:
        colour += 1
    return colour
