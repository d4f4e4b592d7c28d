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
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..._convert import Factor, Piece, Read, chunks, fill, swapped, within
from ..._ground.boxes import Box, as_box, first_holder_by_box, shard_boxes, whole_box
from ..._ground.errors import SyncError
from ..._ground.keys import raw
from .kinds import SentLeaf, SourceLeaf, TransferKind, with_paths
from .transfer import TransferPlan


# Elements that are summed at a time.
_CHUNK_ELEMENTS = 1 << 20
# Sums of 1 GiB take a process 2 to 5 s of processor time.
SUM_ROUND_BYTES = 256 << 20
# The columns of sums: the number of elements, and their checksum.
_COLUMNS = 2


def sum_rounds(plan: TransferPlan) -> list[range]:
    """The numbers of the leaves whose sums are sent in each round. A sender is silent
    while it computes them, and so for a part of the time-out only.
    """
    rounds = []
    start = 0
    nbytes = 0
    for number, leaf in enumerate(plan.leaves):
        leaf_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if number > start and nbytes + leaf_bytes > SUM_ROUND_BYTES:
            rounds.append(range(start, number))
            start = number
            nbytes = 0
        nbytes += leaf_bytes
    rounds.append(range(start, len(plan.leaves)))
    return rounds


# NumPy warns of single numbers that wrap around, which these sums do on purpose.
@np.errstate(over="ignore")
def sent_sums(
    plan: TransferPlan,
    read: Read,
    sender: int,
    receiver: int,
    numbers: Sequence[int],
) -> np.ndarray:
    """For each leaf of the given numbers, the number of elements of the receiving
    process that come from the sending process, and their checksum. A row of two numbers
    for each leaf.

    An element that several processes have counts for the first of them. Constants count
    for the first process that sends to the receiver. `read` returns the elements of a
    source, given by its path, in a box.
    """
    is_first = sender == plan.senders_to(receiver)[0]
    sums = np.zeros((len(numbers), _COLUMNS), np.uint64)
    for row, number in enumerate(numbers):
        leaf = plan.leaves[number]
        kind = plan.kinds[leaf.kind]
        # From the paths of the sources of the kind's first leaf to those of this leaf.
        names = dict(zip(kind.source_paths, leaf.source_paths, strict=True))
        weights = _Weights(leaf)
        pieces = [
            piece._replace(value=with_paths(piece.value, names))
            for piece in kind.pieces
        ]
        for box in _boxes_received(kind, receiver):
            for part in _parts_within(pieces, box):
                path = part.value.path
                if path is None:
                    counted_parts = [part] if is_first else []
                else:
                    counted_boxes = _counted_boxes(plan, path, sender)
                    counted_parts = _inside_source(part, counted_boxes)
                for counted_part in counted_parts:
                    _add_checksum(
                        sums=sums[row],
                        piece=counted_part,
                        leaf=leaf,
                        weights=weights,
                        read=read,
                    )
    return sums


def _parts_within(pieces: Sequence[Piece], box: Box) -> Iterator[Piece]:
    """Yields the parts of all pieces that fill a box of the target."""
    for piece in pieces:
        yield from within(piece, box)


def _boxes_received(kind: TransferKind, receiver: int) -> list[Box]:
    """The boxes that a receiving process fills, each once."""
    boxes = [buffer.box for buffer in kind.buffers if buffer.process == receiver]
    return [*dict.fromkeys(boxes)]


def _counted_boxes(plan: TransferPlan, path: str, sender: int) -> tuple[Box, ...]:
    """The boxes of a source whose first holder is the process `sender`. The plan caches
    them in `known`.
    """
    key = ("counted boxes", path, sender)
    if key not in plan.known:
        source_boxes = _source_boxes(plan.mesh, plan.sources[path])
        # From a box to the position of the first device that holds it. `senders` has
        # the process of the device at each position.
        first = first_holder_by_box(enumerate(source_boxes))
        plan.known[key] = tuple(
            [box for box, position in first.items() if plan.senders[position] == sender]
        )
    boxes: Any = plan.known[key]
    return boxes


def _source_boxes(
    mesh: tuple[tuple[str, int], ...],
    source: SourceLeaf,
) -> Sequence[Box]:
    """The box of a source that each device of the sending job holds. `mesh` has the
    axes of the job's mesh with their sizes.
    """
    names = tuple([axis for axis, _ in mesh])
    sizes = tuple([size for _, size in mesh])
    abstract_mesh = AbstractMesh(sizes, names)
    spec = PartitionSpec(*source.axes)
    sharding = NamedSharding(abstract_mesh, spec)
    boxes = shard_boxes(sharding, source.data.shape)
    return list(boxes.values())


def _inside_source(part: Piece, boxes: Sequence[Box]) -> list[Piece]:
    """The parts of a piece whose elements come from the boxes of its source."""
    reading = swapped(part)
    parts = []
    for box in boxes:
        for inside in within(reading, box):
            parts.append(swapped(inside))
    return parts


def _add_checksum(
    sums: np.ndarray,
    piece: Piece,
    leaf: SentLeaf,
    weights: "_Weights",
    read: Read,
) -> None:
    """Adds the number of elements of a piece, and their checksum, to `sums`, in place.
    The piece writes elements of `leaf`, whose `weights` multiply them in the checksum.
    `read` returns the elements of a source in a box.
    """
    for chunk in chunks(piece, _CHUNK_ELEMENTS):
        elements = _elements_of(chunk, leaf.dtype, read)
        # For each dimension of the leaf, the elements' positions along it.
        positions = [
            _positions(start, chunk.factors, dim)
            for dim, start in enumerate(chunk.target)
        ]
        sums[0] += np.uint64(elements.size)
        sums[1] += weights.sum(elements, positions)


def _elements_of(piece: Piece, dtype: np.dtype, read: Read) -> np.ndarray:
    """The elements that a piece writes, with one dimension per factor."""
    sizes = []
    factors = []
    for dim, factor in enumerate(piece.factors):
        sizes.append(factor.size)
        factors.append(factor._replace(target_dim=dim, target_step=1))
    elements = np.empty(sizes, dtype)
    compact = Piece(
        value=piece.value,
        source=piece.source,
        target=(0,) * len(sizes),
        factors=tuple(factors),
    )
    box = whole_box(sizes)
    fill(elements, box, compact, read)
    return elements


def _positions(start: int, factors: Sequence[Factor], dim: int) -> np.ndarray:
    """The position along `dim` of each element, with one dimension per factor. It has
    size 1 along the factors of other dimensions.
    """
    rank = len(factors)
    positions = np.full((1,) * rank, start, np.int64)
    for number, factor in enumerate(factors):
        if factor.target_dim == dim:
            iterations = np.arange(factor.size, dtype=np.int64)
            steps = iterations * factor.target_step
            positions = positions + _along(steps, number, rank)
    return positions


class _Weights:
    """The numbers by which the elements of a leaf are multiplied."""

    def __init__(self, leaf: SentLeaf):
        path = leaf.path.encode("utf-8", "surrogatepass")
        self._seeds = []
        for dim in range(len(leaf.shape)):
            digest = hashlib.sha256(b"%d " % dim + path).digest()
            self._seeds.append(int.from_bytes(digest[:8]))

    def sum(self, elements: np.ndarray, positions: Sequence[np.ndarray]) -> np.uint64:
        """The sum of the elements' bits, each multiplied by the number of its position.
        `positions` has for each dimension of the leaf the elements' positions along it.
        """
        products = _bits_of(elements)
        for seed, along_dim in zip(self._seeds, positions, strict=True):
            products = products * _mixed(along_dim, seed)
        return products.sum(dtype=np.uint64)


def _bits_of(elements: np.ndarray) -> np.ndarray:
    """The bits of each element as a number of 64 bits. An element of 16 bytes, such as
    a complex128, gives one number for both halves.
    """
    elements = np.ascontiguousarray(elements)
    if elements.dtype.name in ("int4", "uint4"):
        low_bits = elements.view(np.uint8) & 15
        return low_bits.astype(np.uint64)
    if elements.dtype.itemsize > 8:
        flat_halves = elements.reshape(-1).view(np.uint64)
        halves = flat_halves.reshape(*elements.shape, 2)
        return halves[..., 0] + halves[..., 1] * _ODD
    unsigned = np.dtype(f"uint{8 * elements.dtype.itemsize}")
    return elements.view(unsigned).astype(np.uint64)


_ODD = np.uint64(0x9E3779B97F4A7C15)
# The shifts and factors of SplitMix64.
_MIXING = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def _mixed(positions: np.ndarray, seed: int) -> np.ndarray:
    """An odd number for each position that looks random, as SplitMix64 makes them
    (https://doi.org/10.1145/2714064.2660195).
    """
    numbers = positions.astype(np.uint64) + np.uint64(1)
    mixed = numbers * _ODD + np.uint64(seed)
    for shift, factor in _MIXING:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


@np.errstate(over="ignore")
def received_sums(
    leaves: Sequence[SentLeaf],
    arrays: Mapping[str, jax.Array],
) -> np.ndarray:
    """For each leaf, the number of this process's elements, and their checksum."""
    sums = np.zeros((len(leaves), _COLUMNS), np.uint64)
    for number, leaf in enumerate(leaves):
        array = raw(arrays[leaf.path])
        weights = _Weights(leaf)
        data_by_box: dict[Box, Any] = {}
        for shard in array.addressable_shards:
            box = as_box(shard.index, array.shape)
            data_by_box.setdefault(box, shard.data)
        for box, data in data_by_box.items():
            elements = np.asarray(data)
            sums[number, 0] += np.uint64(elements.size)
            sums[number, 1] += _sum_of_box(elements, box, weights)
    return sums


def _sum_of_box(elements: np.ndarray, box: Box, weights: _Weights) -> np.uint64:
    """The checksum of `elements`, which fill a box of a leaf with these weights. Rows
    of many elements are summed one group after another.
    """
    positions = []
    for dim, (start, stop) in enumerate(box):
        along_dim = np.arange(start, stop, dtype=np.int64)
        positions.append(_along(along_dim, dim, len(box)))
    if elements.ndim == 0 or elements.size <= _CHUNK_ELEMENTS:
        return weights.sum(elements, positions)

    total = np.uint64(0)
    row_count = max(1, _CHUNK_ELEMENTS * len(elements) // elements.size)
    for start in range(0, len(elements), row_count):
        rows = slice(start, start + row_count)
        positions_of_rows = [positions[0][rows], *positions[1:]]
        total += weights.sum(elements[rows], positions_of_rows)
    return total


def _along(positions: np.ndarray, dim: int, rank: int) -> np.ndarray:
    """A vector as an array with `rank` dimensions, along the dimension `dim`."""
    shape = [1] * rank
    shape[dim] = len(positions)
    return positions.reshape(shape)


def require_equal(
    leaves: Sequence[SentLeaf],
    sent: np.ndarray,
    received: np.ndarray,
) -> None:
    """Raises `SyncError` with the first leaf whose sums differ."""
    differs = np.flatnonzero((sent != received).any(axis=1))
    if not len(differs):
        return
    number = int(differs[0])
    sent_count, sent_sum = sent[number].tolist()
    count, total = received[number].tolist()
    raise SyncError(
        f"leaf `{leaves[number].path}`: its {count:,} elements have the checksum"
        f" {total:016x}, and the senders' {sent_count:,} elements {sent_sum:016x}"
        f" ({len(differs)} leaves differ); the arrays were not changed. Its bytes came"
        " as they were sent, so a plan or a channel takes them from a wrong place:"
        " compare `plan.digest` of all processes, and the order of the addresses."
    )
