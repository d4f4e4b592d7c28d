"""The arrays that `save` writes: a tree's arrays, or arrays that a map makes of them.
PRNG keys are written as key data.

`is_first` tells a process whether it is the first of those that save. The first process
alone writes NumPy arrays, and elements that a map fills with a constant, since all
processes have them.
"""

import dataclasses
import functools as ft
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._convert import (
    Arithmetic,
    Made,
    Piece,
    StridedBox,
    Struct,
    TreeMap,
    bound,
    box_view,
    changed,
    constant,
    dense,
    extended,
    from_start,
    hull,
    number_copies,
    number_paths,
    rows_of_alike,
    shifted,
    strided_boxes,
    strides_of,
    swapped,
    tree_structs,
    within,
)
from .._ground.boxes import Box, shard_boxes
from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.spec import DType
from .._ground.text import printable
from .._ground.tree import flatten, is_number
from .._plan import LEFT_OUT, ShardPlan, canonical_dtype, encode_dtype, plan, rows_of
from .._rules import PathRules
from ..topology import MeshSpec
from . import _metadata as prng, _safetensors as safetensors
from ._entry import may_change


# A box of an array, and the values of its elements.
BoxValues = tuple[Box, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The arrays and Python numbers that a save writes.

    **Arguments:**

    - `arrays`: the path and the value of each array; the value of an array of PRNG keys
      is its key data.
    - `kinds`: the dtype's name by the array's path, only for dtypes that safetensors
      cannot name.
    - `numbers`: the Python numbers by path.
    """

    arrays: Sequence[tuple[str, Any]]
    kinds: Mapping[str, str]
    numbers: Mapping[str, Any]


def plan_of_arrays(tree: object) -> ShardPlan | None:
    """The plan with the shardings of a tree's arrays; `None` unless the arrays are on
    one mesh.
    """
    flat = flatten(tree)
    known = {
        path: leaf.sharding
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    }
    meshes = list(dict.fromkeys(sharding.mesh for sharding in known.values()))
    if len(meshes) != 1 or not isinstance(meshes[0], Mesh):
        return None

    def spec(path: str, leaf: object) -> PartitionSpec:
        return known[path].spec if path in known else PartitionSpec()

    return plan(tree, meshes[0], paths=PathRules([(".*", spec)]))


def leaves_to_save(tree: object, own: ShardPlan | None) -> Leaves:
    """The arrays and Python numbers of a tree. `own` is the tree's plan, if it has one.

    Raises `LeafTypeError` or `CheckpointError` for a leaf that `load` could not read.
    """
    if own is None:  # a plan says which leaves are arrays
        own = plan(
            tree,
            MeshSpec({"device": 1}),
            paths=PathRules([(".*", PartitionSpec())]),
            unused="allow",
        )
    flat = flatten(tree)
    index = rows_of(own.content, flat)
    found: list[tuple[str, Any]] = []
    kept: dict[str, Any] = {}
    rows = zip(flat.paths, flat.leaves, flat.is_array, index, strict=True)
    for path, leaf, is_array, i in rows:
        if i >= 0:
            _check_leaf(path, leaf, own.content.rows[i].dtype)
            found.append((path, leaf))
        elif is_array and i != LEFT_OUT:
            # The plan has a number or a function there, such as the step counter before
            # the first step made an array of it.
            _check_leaf(path, leaf, canonical_dtype(leaf.dtype))
            found.append((path, leaf))
        elif is_number(leaf):
            kept[path] = leaf
    twice = [path for path, _ in found if path in kept]
    if twice:
        raise CheckpointError(
            f"two leaves have the path `{printable(twice[0])}`; a checkpoint needs one"
            " name for each array."
        )
    arrays = [
        (path, jax.random.key_data(leaf) if prng.is_key(leaf.dtype) else leaf)
        for path, leaf in found
    ]
    kinds = {
        path: encode_dtype(leaf.dtype)
        for path, leaf in found
        if leaf.dtype not in safetensors.NAMES
    }
    return Leaves(arrays, kinds, kept)


def _check_leaf(path: str, leaf: object, planned: object) -> None:
    name = printable(path)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise LeafTypeError(
            f"leaf `{name}` is a {type(leaf).__name__}, which holds no values to save."
        )
    if path == safetensors.METADATA:
        raise CheckpointError(
            f"a leaf cannot be saved as `{path}`: safetensors keeps what it says about"
            " a file under this name, and nothing could read the file. Rename it, or"
            " put it into a dict."
        )
    if path.encode("utf-8", "ignore").decode() != path:
        raise CheckpointError(
            f"leaf `{name}`: its path holds half of a character, which no file can;"
            " rename it."
        )
    if prng.is_key(leaf.dtype):
        return
    if safetensors.stored_name(leaf.dtype) is None:
        raise LeafTypeError(
            f"leaf `{name}` is {leaf.dtype}, which safetensors cannot hold; cast it"
            " before saving."
        )
    if leaf.dtype != planned:
        raise LeafTypeError(
            f"leaf `{name}` is {leaf.dtype} in NumPy and {planned} in the plan, which"
            " was made without 64-bit dtypes, so `load` could not give it back under"
            f" this plan. Save `leaf.astype({str(planned)!r})` if its values fit, or"
            ' plan after `jax.config.update("jax_enable_x64", True)`.'
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """An array of which this process holds or computes only the boxes that it writes.

    `pieces` is a function of `is_first` that yields these boxes. Their values are cast
    to `dtype` afterwards. `part` says which part of one array the array is, if it is a
    part of one.
    """

    shape: tuple[int, ...]
    dtype: DType
    pieces: Callable[[bool], Iterator[BoxValues]]
    part: "_Part | None" = None


class _Sources:
    """The arrays from which a map makes others. Thousands of tensors may be parts of
    one array, so its shards are listed once.
    """

    def __init__(self, arrays: Mapping[str, object]):
        self._arrays = arrays
        self._shards: dict[tuple[str, bool], list[BoxValues]] = {}
        self._landings: dict[object, list[StridedBox]] = {}

    def shards(self, path: str, is_first: bool) -> list[BoxValues]:
        """The boxes of an array that this process writes."""
        found = self._shards.get((path, is_first))
        if found is None:
            found = list(shards_of(self._arrays[path], is_first))
            self._shards[path, is_first] = found
        return found

    def landings(self, back: Piece, box: Box) -> list[StridedBox]:
        """The boxes of a tensor that are in `box` of the array that it is a part of, and
        where they are in the memory of that box. `back` is the piece from the tensor to
        the array.
        """
        # The tensors of a stack differ only in their position.
        by = from_start(back, box)
        first = shifted(back, [-more for more in by])
        key = (box, first.source, first.target, first.factors)
        found = self._landings.get(key)
        if found is None:
            parts = within(first, box)
            found = [one for part in parts for one in strided_boxes(part, box)]
            self._landings[key] = found
        strides = strides_of([stop - start for start, stop in box])
        offset = sum(map(operator.mul, by, strides))
        return [
            StridedBox(one.source, one.offset + offset, one.strides) for one in found
        ]


class _Part(NamedTuple):
    """A part of one of the arrays `sources`: the piece from that array to the part."""

    piece: Piece
    sources: _Sources


def _part_of(made: Made, sources: _Sources) -> _Part | None:
    """The part that `made` is of one of `sources`, its elements unchanged; `None` if it
    is made in another way.
    """
    if len(made.pieces) != 1:
        return None
    value = made.pieces[0].value
    if value.path is None or value.casts or value.scale is not None:
        return None
    return _Part(made.pieces[0], sources)


def rows_of_parts(values: Sequence[Any], is_first: bool) -> list[np.ndarray | None]:
    """For each array that `save` writes, its elements as one vector of the memory of
    the array that it is a part of; `None` if it is no such part, or if this process
    does not write all of it.
    """
    groups: dict[object, list[int]] = {}
    for number, value in enumerate(values):
        if isinstance(value, Output) and value.part is not None:
            piece = value.part.piece
            key = (id(piece.factors), piece.value.path, value.shape)
            groups.setdefault(key, []).append(number)
    rows: list[np.ndarray | None] = [None] * len(values)
    for numbers in groups.values():
        first = values[numbers[0]]
        piece = first.part.piece
        count = math.prod(first.shape)
        if any(piece.target) or piece.elements != count:
            continue
        parts = first.part.sources.shards(piece.value.path, is_first)
        boxes = [box for box, _ in parts]
        memory = [values_of_box for _, values_of_box in parts]
        if any(shard.dtype != first.dtype for shard in memory):
            continue
        positions = [values[number].part.piece.source for number in numbers]
        shape = first.shape
        own = rows_of_alike(swapped(piece), positions, shape, boxes, memory)
        for number, row in zip(numbers, own, strict=True):
            rows[number] = row
    return rows


def _pieces_of(made: Made, sources: _Sources, is_first: bool) -> Iterator[BoxValues]:
    """Yields the boxes that this process writes of `made`, an array that a map makes of
    `sources`.
    """
    for piece in made.pieces:
        if piece.value.path is None:
            for part in dense(piece) if is_first else ():
                yield (
                    hull(part),
                    np.broadcast_to(
                        constant(part), [stop - start for start, stop in hull(part)]
                    ),
                )
            continue
        back = swapped(piece)
        for box, memory in sources.shards(piece.value.path, is_first):
            for landing in sources.landings(back, box):
                values = box_view(memory, landing)
                yield landing.source, _cast(values, piece.value.casts)


def _cast(values: np.ndarray, casts: Sequence[Any]) -> np.ndarray:
    """The values after the operations of a map, but for a last cast that the write does."""
    # A cast that is the last operation is done when the value is written, unless it
    # would be refused there.
    for at, to in enumerate(casts, 1):
        if (
            at < len(casts)
            or isinstance(to, Arithmetic)
            or may_change(values.dtype, to)
        ):
            values = changed(values, to)
    return values


def host_copy(value: Any) -> Output:
    """A copy in host memory of the boxes of an array that this process writes. The
    array may then be deleted.
    """
    parts = [(box, np.array(memory)) for box, memory in shards_of(value, True)]
    everywhere = not isinstance(value, jax.Array)
    pieces = lambda is_first: iter(parts if is_first or not everywhere else ())
    return Output(tuple(value.shape), np.dtype(value.dtype), pieces)


def shards_of(value: Any, is_first: bool) -> Iterator[BoxValues]:
    """Yields the boxes of `value` that this process writes: a JAX array, a NumPy array,
    or an `Output`.

    An `Output` is an array of which the process has only these boxes.
    """
    if isinstance(value, Output):
        yield from value.pieces(is_first)
        return
    if not isinstance(value, jax.Array):
        if is_first:
            yield (
                tuple((0, size) for size in value.shape),
                np.ascontiguousarray(value).reshape(value.shape),
            )
        return
    if len(value.sharding.device_set) == 1 and value.is_fully_addressable:
        yield tuple((0, size) for size in value.shape), np.asarray(value)
        return
    first = _first_replicas(value.sharding, tuple(value.shape))
    for shard in value.addressable_shards:
        box = first.get(shard.device)
        if box is not None:
            yield box, np.ascontiguousarray(shard.data)


# A model has many arrays of few kinds, and `Shard.replica_id` is computed anew at each
# access.
@ft.lru_cache(maxsize=256)
def _first_replicas(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """By device, the box of its shard. Of the devices that hold the same box, only the
    first is included.
    """
    devices: dict[Box, Any] = {}
    for device, box in shard_boxes(sharding, shape).items():
        devices.setdefault(box, device)
    return {device: box for box, device in devices.items()}


def exported(leaves: Leaves, map: TreeMap, like: object) -> Leaves:
    """The arrays that `map` makes of the arrays in `leaves`.

    `like` is a tree with the shapes and dtypes of the arrays to make. If it is `None`,
    they follow from the map.
    """
    source = {}
    for path, value in leaves.arrays:
        keys = prng.key_named(leaves.kinds.get(path))
        rank = (
            value.ndim if keys is None else value.ndim - len(prng.bits_of(keys).shape)
        )
        source[path] = Struct(
            tuple(value.shape[:rank]), np.dtype(value.dtype) if keys is None else keys
        )
    target, targets = None, None
    if like is not None:
        target, targets = tree_structs(like), number_paths(like)
    copies = number_copies(map.steps, leaves.numbers, targets)
    made = bound(map, source, target, copies)
    arrays, kinds, found = _Sources(dict(leaves.arrays)), {}, []
    for path, one in made.items():
        if any([piece.value.scale is not None for piece in one.pieces]):
            raise LeafTypeError(
                f"`{printable(path)}` is scaled, which takes two arrays at a time; use"
                " `reshard(tree, plan, map=...)` first, and save what comes out."
            )
        if one.dtype not in safetensors.NAMES:
            kinds[path] = encode_dtype(one.dtype)
        if prng.is_key(one.dtype):
            bits = prng.bits_of(one.dtype)
            pieces = tuple([extended(piece, bits.shape) for piece in one.pieces])
            one = Made((*one.shape, *bits.shape), np.dtype(bits.dtype), pieces)
        elif safetensors.stored_name(one.dtype) is None:
            raise LeafTypeError(
                f"`{printable(path)}` is {one.dtype}, which safetensors cannot hold;"
                " cast it."
            )
        pieces = ft.partial(_pieces_of, one, arrays)
        part = _part_of(one, arrays)
        found.append((path, Output(one.shape, one.dtype, pieces, part)))
    numbers = {path: leaves.numbers[route] for path, route in copies.routes}
    return Leaves(found, kinds, numbers)
