"""Either end of a transfer: pieces read from the shards of arrays, and written into spare memory."""

from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..._convert import NOWHERE, Piece, constant, fill, hull, once, source_view, swapped, target_view, write
from ..._ground.boxes import Box, as_box
from ..._ground.copying import buffers
from ..._ground.errors import SyncError
from ..._plan import ShardPlan, encode_dtype
from ..pieces.host import data_of_keys
from .channel import Channel
from .transfer import Buffer, Step, Transfer, TransferPlan


def send(
    plan: TransferPlan, arrays: Mapping[str, jax.Array], channel: Channel, revision: int, *, sender: int, receiver: int
) -> None:
    """Sends one process's pieces of a revision to another process.

    **Arguments:**

    - `plan`: the transfer.
    - `arrays`: the sender's arrays by path.
    - `channel`: to the receiver.
    - `revision`: the number of the arrays.
    - `sender`, `receiver`: the two processes.
    """
    shards = _Shards(arrays)
    for number, steps in enumerate(plan.rounds(sender, receiver)):
        channel.put(number, (_packed(step.transfer, shards) for step in steps))
    channel.commit(revision)


def receive(
    plan: TransferPlan, dst: ShardPlan, channels: Mapping[int, Channel], *, receiver: int
) -> tuple[dict[str, jax.Array], int]:
    """Receives a revision into spare memory.

    **Arguments:**

    - `plan`: the transfer.
    - `dst`: the receiver's plan, made for its devices.
    - `channels`: from each sending process.
    - `receiver`: this process.

    **Returns:**

    The arrays by path, and their revision. Until then nothing is changed.

    **Raises:**

    `SyncError` if a piece is damaged or missing, or if senders sent different revisions.
    """
    spare = [
        {at: _empty(buffer.box, leaf.dtype) for at, buffer in enumerate(plan.kinds[leaf.kind].buffers)
         if buffer.process == receiver}
        for leaf in plan.leaves
    ]  # fmt: skip
    for leaf, one in plan.steps(-1, receiver):
        with np.errstate(over="ignore", invalid="ignore"):
            target_view(spare[leaf][one.buffer], one.piece)[...] = constant(one.piece)
    for sender in plan.senders_to(receiver):
        for number, steps in enumerate(plan.rounds(sender, receiver)):
            channels[sender].get(number, _memories(steps, spare))
    revisions = {channels[sender].commit() for sender in channels}
    if len(revisions) != 1:
        raise SyncError(f"the senders sent the revisions {sorted(revisions)}; publish one revision on all of them.")
    return _arrays(plan, dst, spare), revisions.pop()


def _empty(box: Box, dtype: np.dtype) -> np.ndarray:
    # JAX takes memory that is aligned as its own; other memory it copies.
    return buffers([(tuple(stop - start for start, stop in box), dtype)])[0]


def _packed(transfer: Transfer, shards: "_Shards") -> np.ndarray:
    """A piece as it is sent: without repeats, scaled and cast as far as that makes it smaller."""
    piece = once(transfer.piece)
    shape = transfer.shape
    factors = tuple(f._replace(target_dim=dim, target_step=1) for dim, f in enumerate(piece.factors))
    value = piece.value._replace(casts=piece.value.casts[: transfer.casts])
    if value.path is not None and value.scale is None and not value.casts:
        first = hull(swapped(piece))
        view = source_view(shards.read(value.path, first), piece, [low for low, _ in first])
        if view.flags.c_contiguous:
            return view
    memory = np.empty(shape, transfer.sent)
    zero = (0,) * len(shape)
    fill(memory, tuple((0, size) for size in shape), Piece(value, piece.source, zero, factors), shards.read)
    return memory


def _memories(steps: Sequence[Step], spare: Sequence[Mapping[int, np.ndarray]]) -> Iterator[np.ndarray]:
    """Where the pieces of a round are received: in the spare shard itself, if a piece lies there as it is sent."""
    for leaf, one in steps:
        there = target_view(spare[leaf][one.buffer], one.piece)
        left = one.piece.value._replace(casts=one.piece.value.casts[one.casts :])
        if (
            there.dtype == one.sent
            and not left.casts
            and there.size * there.itemsize == one.bytes
            and there.flags.c_contiguous
        ):
            yield there
            continue
        raw = np.empty(tuple(1 if f.source_dim == NOWHERE else f.size for f in one.piece.factors), one.sent)
        yield raw
        write(there, np.broadcast_to(raw, there.shape), one.piece._replace(value=left))


class _Shards:
    """The shards of this process, by path: `read` gives a box of a whole array."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        self._arrays = arrays
        self._known: dict[str, list[tuple[Box, np.ndarray]]] = {}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of an array; where no shard holds all of it, put together."""
        own = self._shards(path)
        for held, shard in own:
            if all(low <= start and stop <= high for (start, stop), (low, high) in zip(box, held, strict=True)):
                return shard[_inside(box, held)]
        made, there = _empty(box, own[0][1].dtype), _empty(box, np.dtype(bool))
        there[...] = False
        for held, shard in own:
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held, strict=True))
            if all(start < stop for start, stop in both):
                made[_inside(both, box)] = shard[_inside(both, held)]
                there[_inside(both, box)] = True
        if not there.all():
            raise SyncError(f"leaf `{path}`: this process holds a part of {list(box)} only; scales must lie beside.")
        return made

    def _shards(self, path: str) -> list[tuple[Box, np.ndarray]]:
        if path not in self._known:
            bits = data_of_keys(self._arrays[path])
            found = {as_box(one.index, bits.shape): one.data for one in bits.addressable_shards}
            self._known[path] = [(box, np.asarray(data)) for box, data in found.items()]
        return self._known[path]


def _inside(box: Box, held: Box) -> tuple[slice | EllipsisType, ...]:
    return tuple([slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, held, strict=True)]) or (...,)


def _arrays(plan: TransferPlan, dst: ShardPlan, spare: Sequence[Mapping[int, np.ndarray]]) -> dict[str, jax.Array]:
    rows = list(zip(dst.content.rows, dst.content.row_shardings, strict=True))
    by_path = {path: (rows[at][0].dtype, rows[at][1]) for path, at in dst.content.numbered if at >= 0}
    return {
        leaf.path: _array(leaf.shape, plan.kinds[leaf.kind].buffers, own, *by_path[leaf.path])
        for leaf, own in zip(plan.leaves, spare, strict=True)
    }


def _array(
    shape: tuple[int, ...],
    buffers: Sequence[Buffer],
    own: Mapping[int, np.ndarray],
    planned: jax.typing.DTypeLike,
    sharding: NamedSharding,
) -> jax.Array:
    by_box = {buffers[number].box: memory for number, memory in own.items()}
    dtype = next(iter(own.values())).dtype

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return by_box[as_box(index or (), shape)]

    made = jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)
    if not jnp.issubdtype(planned, jax.dtypes.prng_key):
        return made
    return jax.random.wrap_key_data(made, impl=encode_dtype(planned)[len("key<") : -1])
