"""Cuts as programs over the devices of both sides: in each round every device sends at most one piece and receives at
most one.

The positions at which pieces begin are data of a program, so that the layers of a stack, and all layers of a model,
share one program.
"""

import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._convert import PieceForm, changed, form_of, is_dense, ordered, put, taken
from ..steps.program import is_small_float
from .cuts import Cut, first_casts


AXIS = "device"
# The number of arrays that a program takes as arguments; a stack of thousands takes several calls of one program.
_MOST_SOURCES = 8


class Round(NamedTuple):
    """Pieces of one form, with no sender and no receiver occurring twice.

    **Arguments:**

    - `number`: the number of the array that is read, among those of the program.
    - `form`: the form of the pieces.
    - `pairs`: pairs of sender and receiver; empty if each device takes its own.
    - `is_full`: whether every device of the target receives.
    """

    number: int
    form: PieceForm
    pairs: tuple[tuple[int, int], ...]
    is_full: bool


class Exchange(NamedTuple):
    """A program that copies pieces of some arrays into another array, and the positions of the pieces of each round.

    **Arguments:**

    - `keys`: the keys of the arrays that are read.
    - `rounds`: the rounds in order.
    - `places`: for each device and round, the position of the piece in the source (first) and in the target (last), and
        whether it is received.
    - `sizes`: for each round, the bytes of memory of its largest piece.
    """

    keys: tuple[str, ...]
    rounds: tuple[Round, ...]
    places: np.ndarray
    sizes: tuple[int, ...]


def exchanges(
    cuts: Sequence[Cut], count: int, receivers: int, most_bytes: int | None, homes: Mapping[str, object]
) -> list[Exchange]:
    """The programs that carry out cuts. Devices are numbered from 0 to `count - 1`.

    **Arguments:**

    - `cuts`: the cuts of one target, without those of constants.
    - `receivers`: the number of devices that hold the target.
    - `most_bytes`: the most that the pieces of one program take in total, if it has more than one round.
    - `homes`: for each array that is read, a key that all arrays of one program have in common.
    """
    alike: dict[tuple[str, PieceForm, bool], list[Cut]] = {}
    for cut in cuts:
        alike.setdefault((str(cut.piece.value.path), form_of(cut.piece), cut.sender == cut.receiver), []).append(cut)
    groups: list[list[Sending]] = []
    filled, keys, kind = 0, set[str](), None
    # The rounds of one array are neighbours, so that a program reads few arrays.
    for (key, form, is_local), own in sorted(alike.items(), key=lambda item: [*homes].index(item[0][0])):
        for tiles in matchings(own):
            size, home = max(cut.room_bytes for cut in tiles), (homes[key], form.casts)
            is_much = most_bytes is not None and filled + size > most_bytes
            if not groups or is_much or home != kind or len(keys | {key}) > _MOST_SOURCES:
                groups.append([])
                filled, keys = 0, set()
            groups[-1].append((key, form, is_local, size, tiles))
            filled, keys, kind = filled + size, keys | {key}, home
    return [_exchange(group, count, receivers) for group in groups]


# The key of an array, the form of its pieces, whether each device takes its own, the bytes of the largest piece, and
# the pieces.
Sending = tuple[str, PieceForm, bool, int, Sequence[Cut]]


def _exchange(group: Sequence[Sending], count: int, receivers: int) -> Exchange:
    keys = tuple(dict.fromkeys(key for key, *_ in group))
    rank = max(len(form.source) for _, form, *_ in group)
    places = np.zeros((count, len(group), rank + len(group[0][1].target) + 1), np.int32)
    rounds = []
    for at, (key, form, is_local, _, tiles) in enumerate(group):
        pairs = () if is_local else tuple(sorted((cut.sender, cut.receiver) for cut in tiles))
        rounds.append(Round(keys.index(key), form, pairs, len(tiles) == receivers))
        for cut in tiles:
            places[cut.sender, at, : len(cut.piece.source)] = cut.piece.source
            places[cut.receiver, at, rank:] = (*cut.piece.target, 1)
    return Exchange(keys, tuple(rounds), places, tuple(size for *_, size, _ in group))


# The shape and dtype of one device's shard.
Block = tuple[tuple[int, ...], Any]


def mapped(devices: tuple[object, ...], body: Any, count: int, *donated: int) -> Any:
    """A jitted function in which each device applies `body` to its blocks of `count` arrays.

    Each array has its devices' blocks along its first dimension. `donated` are the arrays whose memory it reuses.
    """
    mesh, spec = sharding_of(devices).mesh, PartitionSpec(AXIS)
    run = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * count, out_specs=spec, check_vma=False)
    return jax.jit(run, donate_argnums=donated)


@ft.lru_cache(maxsize=256)
def program(
    devices: tuple[Any, ...], rounds: tuple[Round, ...], sources: tuple[Block, ...], target: Block, begins: bool
) -> Any:
    """A jitted function that writes pieces of some arrays into another array's shards.

    **Arguments:**

    - `devices`: the devices of both sides, in the order of their numbers.
    - `rounds`: the rounds to carry out.
    - `sources`, `target`: shape and dtype of one shard of each.
    - `begins`: whether it makes the shards. If not, it takes them as its last argument and returns them.
    """
    is_moved = not any(step.form.casts for step in rounds) and all(dtype == target[1] for _, dtype in sources)
    own = carried(target[1], devices) if is_moved else target[1]

    def run(places: jax.Array, *given: jax.Array) -> jax.Array:
        blocks = [one.reshape(shape) for one, (shape, _) in zip(given, sources, strict=False)]
        blocks = [bitcast(one, own) for one in blocks] if is_moved else blocks
        out = jnp.zeros(target[0], own) if begins else bitcast(given[-1].reshape(target[0]), own)
        for at, step in enumerate(rounds):
            # Without the barrier XLA could cut out and keep all pieces before it sends the first.
            blocks, out = jax.lax.optimization_barrier((blocks, out))
            block, place = blocks[step.number], places[0, at]
            piece = cut_out(step.form, block, place)
            piece = jax.lax.ppermute(piece, AXIS, step.pairs) if step.pairs else piece
            out = put_in(step, out, piece, block.dtype, place)
        return bitcast(out.reshape(joined(target[0])), target[1])

    count = len(sources) + 1
    return mapped(devices, run, count) if begins else mapped(devices, run, count + 1, count)


def carried(dtype: Any, devices: Sequence[Any]) -> Any:
    """The dtype in which devices send numbers and write them into new shards.

    On CPUs small floats are integers of the same bits, for the reason that `on_bits` gives.
    """
    if devices[0].platform != "cpu" or not is_small_float(dtype):
        return dtype
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array's bits, interpreted as another dtype of the same width."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def sent_dtype(form: PieceForm, dtype: object) -> Any:
    """The dtype in which elements of an array are sent."""
    return (dtype, *form.casts)[first_casts(form.casts, dtype)]


def cut_out(form: PieceForm, block: jax.Array, place: jax.Array) -> jax.Array:
    """Slices a piece out of a shard, as it is sent: with one dimension for each digit of the source."""
    piece = jax.lax.dynamic_slice(block, list(place[: len(form.source)]), [size for size, _ in form.source])
    return _cast(taken(piece, form.source), form.casts[: first_casts(form.casts, block.dtype)])


def _cast(piece: jax.Array, casts: Sequence[object]) -> jax.Array:
    for at, to in enumerate(casts):
        # Without the barrier XLA may leave out a cast to a narrower dtype and back.
        piece = changed(jax.lax.optimization_barrier(piece) if at else piece, to)
    return piece


def put_in(step: Round, out: jax.Array, piece: jax.Array, dtype: object, place: jax.Array) -> jax.Array:
    """Returns the shard `out` with a received piece written into it. `dtype` is the source's."""
    form = step.form
    piece = ordered(bitcast(_cast(piece, form.casts[first_casts(form.casts, dtype) :]), out.dtype), form)
    starts, sizes = list(place[-1 - len(form.target) : -1]), [size for size, _ in form.target]
    if step.is_full and all(is_dense(size, digits) for size, digits in form.target):
        return jax.lax.dynamic_update_slice(out, piece.reshape(sizes), starts)
    before = jax.lax.dynamic_slice(out, starts, sizes)
    after = put(before, form.target, piece, 0)
    return jax.lax.dynamic_update_slice(out, jnp.where(place[-1] > 0, after, before), starts)


def joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one shard where all shards are concatenated along dimension 0. A scalar becomes `(1,)`."""
    return shape or (1,)


@ft.lru_cache(maxsize=64)
def sharding_of(devices: tuple[object, ...]) -> NamedSharding:
    """The sharding of the arrays in an exchange program: the first dimension is sharded over all devices."""
    return NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec(AXIS))


def blocks(devices: tuple[Any, ...], shape: tuple[int, ...], dtype: Any, shards: Mapping[Any, jax.Array]) -> jax.Array:
    """Shards as one array on a program's mesh. A device without a shard contributes zeros."""
    block = joined(shape)
    own = [device for device in devices if device.process_index == jax.process_index()]
    found = [
        shards[device].reshape(block) if device in shards else jnp.zeros(block, dtype, device=device) for device in own
    ]
    whole = (len(devices) * block[0], *block[1:])
    return jax.make_array_from_single_device_arrays(whole, sharding_of(devices), found, dtype=dtype)


Colours = dict[int, dict[int, Cut]]


def matchings(cuts: Sequence[Cut]) -> list[tuple[Cut, ...]]:
    """The cuts divided into rounds: an edge colouring of a bipartite graph with as many colours as its largest degree
    (Konig's theorem).
    """
    at_sender: Colours = {}
    at_receiver: Colours = {}
    for cut in cuts:
        out, into = at_sender.setdefault(cut.sender, {}), at_receiver.setdefault(cut.receiver, {})
        free_out, free_into = _first_free(out), _first_free(into)
        if free_out in into:
            _swap(cut.receiver, free_out, free_into, at_sender, at_receiver)
        out[free_out] = into[free_out] = cut
    colours: dict[int, list[Cut]] = {}
    for used in at_sender.values():
        for colour, cut in used.items():
            colours.setdefault(colour, []).append(cut)
    return [tuple(colours[colour]) for colour in sorted(colours)]


def _swap(receiver: int, a: int, b: int, at_sender: Colours, at_receiver: Colours) -> None:
    """Exchanges the colours on the path of `a` and `b` edges that starts at `receiver`, so that `a` becomes
    free there.
    """
    path, sides, node, colour = [], (at_receiver, at_sender), receiver, a
    while (cut := sides[len(path) % 2][node].get(colour)) is not None:
        path.append((cut, colour))
        node = cut.sender if len(path) % 2 else cut.receiver
        colour = b if colour == a else a
    for cut, colour in path:
        del at_sender[cut.sender][colour], at_receiver[cut.receiver][colour]
    for cut, colour in path:
        other = b if colour == a else a
        at_sender[cut.sender][other] = at_receiver[cut.receiver][other] = cut


def _first_free(used: Mapping[int, Cut]) -> int:
    colour = 0
    while colour in used:
        colour += 1
    return colour
