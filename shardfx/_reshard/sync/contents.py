"""Checksums of what leaves contain, as they lie in the target.

Both sides compute them without the rows of the plan: a sender from its shards, the
whole map and its job's sharding, a receiver from the arrays that it made. So they also
differ if the plan itself takes bytes from a wrong place: totals of bytes, and each
piece's own checksum, are then right.

The checksum of a leaf is the sum of its elements' bits, each multiplied by a number
that depends on the leaf and on the element's position, modulo 2**64. Sums over parts of
a leaf add up, so that each process sums what it has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..._convert import Factor, Piece, Read, chunks, fill, swapped, within
from ..._ground.boxes import Box, as_box, shard_boxes
from ..._ground.errors import SyncError
from .kinds import SentLeaf, SourceLeaf, TransferKind, renamed
from .transfer import TransferPlan


# Elements that are summed at a time.
_CHUNK_ELEMENTS = 1 << 20
# The columns of sums: the number of elements, and their checksum.
_COLUMNS = 2


# NumPy warns of single numbers that wrap around, which these sums do on purpose.
@np.errstate(over="ignore")
def sent_sums(plan: TransferPlan, read: Read, sender: int, receiver: int) -> np.ndarray:
    """For each leaf, the number of elements of the receiving process that come from the
    sending process, and their checksum. A row of two numbers for each leaf.

    An element that several processes have counts for the first of them. Constants count
    for the first process that sends to the receiver.
    """
    is_first = sender == plan.senders_to(receiver)[0]
    sums = np.zeros((len(plan.leaves), _COLUMNS), np.uint64)
    for number, leaf in enumerate(plan.leaves):
        kind = plan.kinds[leaf.kind]
        names = dict(zip(kind.names, leaf.names, strict=True))
        weights = _Weights(leaf)
        for box in _boxes_of(kind, receiver):
            for piece in kind.pieces:
                piece = piece._replace(value=renamed(piece.value, names))
                for part in within(piece, box):
                    if part.value.path is None:
                        own_parts = [part] if is_first else []
                    else:
                        own_boxes = _own_boxes(plan, part.value.path, sender)
                        own_parts = _inside_source(part, own_boxes)
                    for own_part in own_parts:
                        _add(sums[number], own_part, leaf, weights, read)
    return sums


def _boxes_of(kind: TransferKind, receiver: int) -> list[Box]:
    boxes = [buffer.box for buffer in kind.buffers if buffer.process == receiver]
    return [*dict.fromkeys(boxes)]


def _own_boxes(plan: TransferPlan, path: str, sender: int) -> tuple[Box, ...]:
    """The boxes of a source whose first holder is the process `sender`."""
    key = ("own boxes", path, sender)
    if key not in plan.known:
        first_holders: dict[Box, int] = {}
        for position, box in enumerate(_source_boxes(plan.mesh, plan.sources[path])):
            first_holders.setdefault(box, plan.senders[position])
        plan.known[key] = tuple(
            box for box, process in first_holders.items() if process == sender
        )
    boxes: Any = plan.known[key]
    return boxes


def _source_boxes(
    mesh: tuple[tuple[str, int], ...], source: SourceLeaf
) -> Sequence[Box]:
    names = tuple(axis for axis, _ in mesh)
    sizes = tuple(size for _, size in mesh)
    sharding = NamedSharding(AbstractMesh(sizes, names), PartitionSpec(*source.axes))
    return list(shard_boxes(sharding, source.data.shape).values())


def _inside_source(part: Piece, boxes: Sequence[Box]) -> list[Piece]:
    """The parts of a piece whose elements come from the boxes of its source."""
    reverse = swapped(part)
    return [swapped(inside) for box in boxes for inside in within(reverse, box)]


def _add(
    sums: np.ndarray, part: Piece, leaf: SentLeaf, weights: "_Weights", read: Read
) -> None:
    for piece in chunks(part, _CHUNK_ELEMENTS):
        sizes = tuple(factor.size for factor in piece.factors)
        box = tuple((0, size) for size in sizes)
        factors = tuple(
            factor._replace(target_dim=dim, target_step=1)
            for dim, factor in enumerate(piece.factors)
        )
        elements = np.empty(sizes, leaf.dtype)
        compact = Piece(piece.value, piece.source, (0,) * len(sizes), factors)
        fill(elements, box, compact, read)
        positions = [
            _positions(start, piece.factors, dim)
            for dim, start in enumerate(piece.target)
        ]
        sums[0] += np.uint64(elements.size)
        sums[1] += weights.sum(elements, positions)


def _positions(start: int, factors: Sequence[Factor], dim: int) -> np.ndarray:
    """The position along `dim` of each element, with one dimension per factor. It has
    size 1 along the factors of other dimensions.
    """
    positions = np.full((1,) * len(factors), start, np.int64)
    for number, factor in enumerate(factors):
        if factor.target_dim == dim:
            shape = [1] * len(factors)
            shape[number] = factor.size
            steps = np.arange(factor.size, dtype=np.int64) * factor.target_step
            positions = positions + steps.reshape(shape)
    return positions


class _Weights:
    """The numbers by which the elements of a leaf are multiplied."""

    def __init__(self, leaf: SentLeaf):
        text = leaf.path.encode("utf-8", "surrogatepass")
        self._seeds = [
            int.from_bytes(hashlib.sha256(b"%d " % dim + text).digest()[:8])
            for dim in range(len(leaf.shape))
        ]

    def sum(self, elements: np.ndarray, positions: Sequence[np.ndarray]) -> np.uint64:
        """The sum of the elements' bits, each multiplied by the number of its position.
        `positions` has for each dimension of the leaf the elements' positions along it.
        """
        products = _bits_of(elements)
        for seed, along_dim in zip(self._seeds, positions, strict=True):
            products = products * _mixed(along_dim, seed)
        return products.sum(dtype=np.uint64)


def _bits_of(elements: np.ndarray) -> np.ndarray:
    """The bits of each element as a number of 64 bits."""
    elements = np.ascontiguousarray(elements)
    if elements.dtype.name in ("int4", "uint4"):
        return (elements.view(np.uint8) & 15).astype(np.uint64)
    if elements.dtype.itemsize > 8:
        halves = elements.reshape(-1).view(np.uint64).reshape(*elements.shape, 2)
        return halves[..., 0] + halves[..., 1] * _ODD
    unsigned = np.dtype(f"uint{8 * elements.dtype.itemsize}")
    return elements.view(unsigned).astype(np.uint64)


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mixed(positions: np.ndarray, seed: int) -> np.ndarray:
    """An odd number for each position that looks random, as SplitMix64 makes them
    (https://doi.org/10.1145/2714064.2660195).
    """
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * _ODD + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


@np.errstate(over="ignore")
def received_sums(
    leaves: Sequence[SentLeaf], arrays: Mapping[str, jax.Array]
) -> np.ndarray:
    """For each leaf, the number of this process's elements, and their checksum."""
    sums = np.zeros((len(leaves), _COLUMNS), np.uint64)
    for number, leaf in enumerate(leaves):
        array = arrays[leaf.path]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        weights = _Weights(leaf)
        shards: dict[Box, Any] = {}
        for shard in array.addressable_shards:
            shards.setdefault(as_box(shard.index, array.shape), shard.data)
        for box, data in shards.items():
            elements = np.asarray(data)
            sums[number, 0] += np.uint64(elements.size)
            sums[number, 1] += _sum_of_box(elements, box, weights)
    return sums


def _sum_of_box(elements: np.ndarray, box: Box, weights: _Weights) -> np.uint64:
    positions = [
        _along(np.arange(start, stop, dtype=np.int64), dim, len(box))
        for dim, (start, stop) in enumerate(box)
    ]
    if elements.ndim == 0 or elements.size <= _CHUNK_ELEMENTS:
        return weights.sum(elements, positions)
    # A few rows at a time.
    total = np.uint64(0)
    step = max(1, _CHUNK_ELEMENTS * len(elements) // elements.size)
    for start in range(0, len(elements), step):
        some = slice(start, start + step)
        total += weights.sum(elements[some], [positions[0][some], *positions[1:]])
    return total


def _along(positions: np.ndarray, dim: int, rank: int) -> np.ndarray:
    shape = [1] * rank
    shape[dim] = len(positions)
    return positions.reshape(shape)


def require_equal(
    leaves: Sequence[SentLeaf], sent: np.ndarray, received: np.ndarray
) -> None:
    """Raises `SyncError` with the first leaf whose sums differ."""
    differs = np.flatnonzero((sent != received).any(axis=1))
    if not len(differs):
        return
    number = int(differs[0])
    (sent_count, sent_sum), (count, total) = (
        sent[number].tolist(),
        received[number].tolist(),
    )
    raise SyncError(
        f"leaf `{leaves[number].path}`: its {count:,} elements have the checksum"
        f" {total:016x}, and the senders' {sent_count:,} elements {sent_sum:016x}"
        f" ({len(differs)} leaves differ); the arrays were not changed. Its bytes came"
        " as they were sent, so a plan or a channel takes them from a wrong place:"
        " compare `plan.digest` of all processes, and the order of the addresses."
    )
