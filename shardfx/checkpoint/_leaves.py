"""The arrays that `save` writes: a tree's arrays, or arrays that a map makes of them.
PRNG keys are written as key data.

`is_first` tells a process whether it is the first of those that save. The first process
alone writes NumPy arrays, and elements that a map fills with a constant, since all
processes have them.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._convert import (
    AlikeParts,
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
    in_parts,
    number_copies,
    offset_of,
    rows_of_alike,
    shifted,
    strided_boxes,
    strides_of,
    swapped,
    target_leaves,
    within,
)
from .._ground.boxes import Box, box_shape, first_holder_by_box, shard_boxes, whole_box
from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.keys import is_key, key_data_struct, raw
from .._ground.spec import DType
from .._ground.text import printable
from .._ground.tree import flatten, is_number
from .._plan import LEFT_OUT, ShardPlan, canonical_dtype, encode_dtype, plan, rows_of
from .._rules import PathRules
from ..topology import MeshSpec
from . import _metadata as prng, _safetensors as safetensors
from ._entry import may_change
from ._unsaved import is_definition, refuse_others


# A box of an array, and the values of its elements.
BoxValues = tuple[Box, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The arrays and Python numbers that a save writes.

    **Arguments:**

    - `arrays`: the path and the value of each array; the value of an array of PRNG keys
      is its key data.
    - `dtype_names`: the dtype's name by the array's path, only for dtypes that
      safetensors cannot name.
    - `numbers`: the Python numbers by path.
    """

    arrays: Sequence[tuple[str, Any]]
    dtype_names: Mapping[str, str]
    numbers: Mapping[str, Any]


def plan_of_arrays(tree: object) -> ShardPlan | None:
    """The plan with the shardings of a tree's arrays; `None` unless the arrays are on
    one mesh.
    """
    flat = flatten(tree)
    shardings: dict[str, NamedSharding] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            shardings[path] = leaf.sharding
    meshes_of_leaves = (sharding.mesh for sharding in shardings.values())
    meshes = list(dict.fromkeys(meshes_of_leaves))
    if len(meshes) != 1 or not isinstance(meshes[0], Mesh):
        return None

    def spec(path: str, leaf: object) -> PartitionSpec:
        if path in shardings:
            return shardings[path].spec
        return PartitionSpec()

    path_rules = PathRules([(".*", spec)])
    return plan(tree, meshes[0], paths=path_rules)


def leaves_to_save(tree: object, tree_plan: ShardPlan | None) -> Leaves:
    """The arrays and Python numbers of a tree. `tree_plan` is the tree's plan, if it
    has one.

    Raises `LeafTypeError` or `CheckpointError` for a leaf that `load` could not read.
    """
    if tree_plan is None:  # a plan says which leaves are arrays
        tree_plan = plan(
            tree,
            MeshSpec({"device": 1}),
            paths=PathRules([(".*", PartitionSpec())]),
            unused="allow",
        )
    flat = flatten(tree)
    plan_rows = tree_plan.content.rows
    row_numbers = rows_of(tree_plan.content, flat, are_put_on_devices=False)
    arrays: list[tuple[str, Any]] = []
    dtype_names: dict[str, str] = {}
    numbers: dict[str, Any] = {}
    others: dict[str, object] = {}
    # A model has many leaves of few kinds: a check of one leaf holds for all of its
    # kind. The value is the name of the dtype that the metadata has for the leaf;
    # `None` for a dtype that safetensors can name itself.
    name_by_kind: dict[object, str | None] = {}
    rows = zip(flat.paths, flat.leaves, flat.is_array, row_numbers, strict=True)
    # `row` is the number of the leaf's row in the plan. It is negative for a leaf that
    # the plan has not as an array, and `LEFT_OUT` for one that `select` left out.
    for path, leaf, is_array, row in rows:
        if row < 0 and (not is_array or row == LEFT_OUT):
            if is_number(leaf):
                if path in numbers:
                    raise _two_leaves_at(path)
                numbers[path] = leaf
            elif row != LEFT_OUT and not is_definition(leaf):
                others[path] = leaf
            continue
        # The plan has a number or a function where it has no row, such as the step
        # counter before the first step made an array of it.
        planned_dtype = None
        if row >= 0:
            planned_dtype = plan_rows[row].dtype
        kind = (type(leaf), getattr(leaf, "dtype", None), planned_dtype)
        if kind not in name_by_kind:
            _check_leaf(path, leaf, planned_dtype)
            is_named = leaf.dtype in safetensors.NAMES
            name_by_kind[kind] = None if is_named else encode_dtype(leaf.dtype)
        name = name_by_kind[kind]
        if name is not None:
            dtype_names[path] = name
            # PRNG keys are saved as their key data.
            leaf = raw(leaf)
        arrays.append((path, leaf))
    if others:
        refuse_others(tree, others)
    for path, _ in arrays:
        if not path.isascii() or path == safetensors.METADATA:
            _check_path(path)
    for path in numbers:
        if not path.isascii():
            _check_characters(path)
    _raise_for_equal_paths(arrays, numbers)
    return Leaves(arrays=arrays, dtype_names=dtype_names, numbers=numbers)


def _raise_for_equal_paths(
    leaves: Sequence[tuple[str, object]],
    numbers: Mapping[str, object],
) -> None:
    """Raises `CheckpointError` if an array has the path of a Python number."""
    if not numbers:
        return
    for path, _ in leaves:
        if path in numbers:
            raise _two_leaves_at(path)


def _two_leaves_at(path: str) -> CheckpointError:
    """The error for two leaves with one path."""
    return CheckpointError(
        f"two leaves have the path `{printable(path)}`; a checkpoint needs one name for"
        " each array and number."
    )


def _check_path(path: str) -> None:
    """Raises `CheckpointError` for the path of an array that safetensors cannot have as
    a name.
    """
    if path == safetensors.METADATA:
        raise CheckpointError(
            f"a leaf cannot be saved as `{path}`: safetensors keeps what it says about"
            " a file under this name, and nothing could read the file. Rename it, or"
            " put it into a dict."
        )
    _check_characters(path)


def _check_characters(path: str) -> None:
    """Raises `CheckpointError` for a path that has no UTF-8."""
    if path.encode("utf-8", "ignore").decode() != path:
        raise CheckpointError(
            f"leaf `{printable(path)}`: its path holds half of a character, which no"
            " file can; rename it."
        )


def _check_leaf(path: str, leaf: object, planned_dtype: object) -> None:
    """Raises `LeafTypeError` for a leaf that `load` could not read. `planned_dtype` is
    its dtype in the plan; `None` if the plan has no array there.
    """
    name = printable(path)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise LeafTypeError(
            f"leaf `{name}` is a {type(leaf).__name__}, which holds no values to save."
        )
    if is_key(leaf.dtype):
        return
    if safetensors.stored_name(leaf.dtype) is None:
        raise LeafTypeError(
            f"leaf `{name}` is {leaf.dtype}, which safetensors cannot hold; cast it"
            " before saving."
        )
    if planned_dtype is None:
        planned_dtype = canonical_dtype(leaf.dtype)
    if leaf.dtype != planned_dtype:
        raise LeafTypeError(
            f"leaf `{name}` is {leaf.dtype} in NumPy and {planned_dtype} in the plan,"
            " which was made without 64-bit dtypes, so `load` could not give it back"
            " under this plan. Save"
            f" `leaf.astype({str(planned_dtype)!r})` if its values fit, or"
            ' plan after `jax.config.update("jax_enable_x64", True)`.'
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """An array of which this process holds or computes only the boxes that it writes.

    `pieces` is a function of `is_first` that yields these boxes. Their values are cast
    to `dtype` afterwards.
    """

    shape: tuple[int, ...]
    dtype: DType
    pieces: Callable[[bool], Iterator[BoxValues]]


class PartOutput(NamedTuple):
    """An array that a map makes of a part of one array.

    - `shape`, `dtype`: those of the part.
    - `owner`: all parts of that array that are alike, and the array.
    - `number`: the number of the part among them.
    """

    shape: tuple[int, ...]
    dtype: DType
    owner: "_Parts"
    number: int


class _Sources:
    """The arrays from which a map makes others. Thousands of tensors may be parts of
    one array, so its shards are listed once, and so are the boxes of tensors that
    differ only in their position.
    """

    def __init__(self, arrays: Mapping[str, object]):
        self._arrays = arrays
        self._shards: dict[tuple[str, bool], list[BoxValues]] = {}
        self._boxes_at_start: dict[object, list[StridedBox]] = {}

    def shards(self, path: str, is_first: bool) -> list[BoxValues]:
        """The boxes of an array that this process writes."""
        shards = self._shards.get((path, is_first))
        if shards is None:
            shards = list(shards_of(self._arrays[path], is_first))
            self._shards[path, is_first] = shards
        return shards

    def strided_boxes_in(self, piece_back: Piece, box: Box) -> list[StridedBox]:
        """The boxes of a tensor that are in `box` of the array that it is a part of,
        each with the strided part of the memory of `box` that holds it. `piece_back`
        copies the tensor to the array: its source is the tensor.
        """
        # The tensors of a stack differ only in their position. So the boxes are found
        # once, for a tensor at the start of `box`, and then moved by the distance of
        # this one, in elements for each dimension.
        distance = from_start(piece_back, box)
        piece_at_start = shifted(piece_back, [-steps for steps in distance])
        key = (
            box,
            piece_at_start.source,
            piece_at_start.target,
            piece_at_start.factors,
        )
        boxes_at_start = self._boxes_at_start.get(key)
        if boxes_at_start is None:
            boxes_at_start = []
            for inside in within(piece_at_start, box):
                boxes_at_start += strided_boxes(inside, box)
            self._boxes_at_start[key] = boxes_at_start
        strides = strides_of(box_shape(box))
        offset = offset_of(distance, strides)
        return [
            StridedBox(
                source=strided_box.source,
                offset=strided_box.offset + offset,
                strides=strided_box.strides,
            )
            for strided_box in boxes_at_start
        ]


class _Parts(NamedTuple):
    """Arrays that a map makes of parts of one of the arrays `sources`."""

    parts: AlikeParts
    sources: _Sources


class PartRows(NamedTuple):
    """Arrays to write whose bytes are rows of one vector of memory.

    - `numbers`: the numbers of the arrays.
    - `nbytes`: the number of bytes of each.
    - `memory`, `starts`: the vector of bytes, and the position of each row in it.
    """

    numbers: np.ndarray
    nbytes: int
    memory: np.ndarray
    starts: np.ndarray


def rows_of_parts(values: Sequence[Any], is_first: bool) -> Iterator[PartRows]:
    """Yields the arrays, of those that `save` writes, whose elements are a row of the
    memory of the array that they are parts of. An array is left out if it is no such
    part, or if this process does not write all of it. `values` are the arrays to write.
    """
    numbers_by_owner: dict[int, list[int]] = {}
    for number, value in enumerate(values):
        if isinstance(value, PartOutput):
            owner_id = id(value.owner)
            numbers_by_owner.setdefault(owner_id, []).append(number)

    for numbers in numbers_by_owner.values():
        owner = values[numbers[0]].owner
        numbers_in_owner = [values[number].number for number in numbers]
        for rows in _rows_in_owner(owner, numbers_in_owner, is_first):
            yield rows._replace(numbers=np.array(numbers)[rows.numbers])


def _rows_in_owner(
    owner: _Parts,
    part_numbers: list[int],
    is_first: bool,
) -> Iterator[PartRows]:
    """Yields those parts of an array whose elements are a row of the array's memory.
    `part_numbers` are the numbers of the parts among those of `owner`, and the
    `numbers` of the result are positions in them.

    `parts.first` is the piece that copies the array to the first part, `parts.shape`
    the shape of each part, and `parts.sources` the position of each part in the array.
    """
    parts, sources = owner
    value = parts.first.value
    # One piece must make the whole part, from its first element on, and without a
    # change of its elements.
    is_whole = parts.first.elements == math.prod(parts.shape)
    if value.casts or any(parts.first.target) or not is_whole:
        return
    shards = sources.shards(str(value.path), is_first)
    if any(shard.dtype != parts.dtype for _, shard in shards):
        return
    # The parts are small arrays, which are copied back to the array.
    for rows in rows_of_alike(
        first=swapped(parts.first),
        positions=parts.sources[part_numbers],
        shape=parts.shape,
        boxes=[box for box, _ in shards],
    ):
        _, shard = shards[rows.box_number]
        memory = shard.reshape(-1)
        yield PartRows(
            numbers=rows.numbers,
            nbytes=parts.first.elements * memory.itemsize,
            memory=memory.view(np.uint8),
            starts=rows.offsets * memory.itemsize,
        )


def _boxes_of_mapped(
    leaf: Made,
    sources: _Sources,
    is_first: bool,
) -> Iterator[BoxValues]:
    """Yields the boxes that this process writes of `leaf`, an array that a map makes of
    `sources`, with their values.
    """
    for piece in leaf.pieces:
        if piece.value.path is None:
            # The map fills these elements with a constant.
            if is_first:
                yield from _constant_boxes(piece)
            continue
        # From the array that the map makes to the one that this process holds.
        piece_back = swapped(piece)
        for box, memory in sources.shards(piece.value.path, is_first):
            for strided_box in sources.strided_boxes_in(piece_back, box):
                values = box_view(memory, strided_box)
                yield strided_box.source, _operated(values, piece.value.casts)


def _constant_boxes(piece: Piece) -> Iterator[BoxValues]:
    """Yields the boxes that a piece without a source fills with its constant."""
    for part in dense(piece):
        box = hull(part)
        yield box, np.broadcast_to(constant(part), box_shape(box))


def _operated(values: np.ndarray, casts: Sequence[Any]) -> np.ndarray:
    """The values after the operations `casts` of a map, but for a last cast that the
    write does.
    """
    for number, operation in enumerate(casts, 1):
        # A cast that is the last operation is done when the value is written, unless it
        # would be refused there.
        is_done_by_write = (
            number == len(casts)
            and not isinstance(operation, Arithmetic)
            and not may_change(values.dtype, operation)
        )
        if not is_done_by_write:
            values = changed(values, operation)
    return values


def host_copy(value: Any) -> Output:
    """A copy in host memory of the boxes of an array that this process writes. The
    array may then be deleted.
    """
    shards = [(box, np.array(memory)) for box, memory in shards_of(value, True)]
    # A NumPy array is whole on all processes, and the first one writes it.
    is_everywhere = not isinstance(value, jax.Array)

    def pieces(is_first: bool) -> Iterator[BoxValues]:
        if is_first or not is_everywhere:
            yield from shards

    return Output(shape=tuple(value.shape), dtype=np.dtype(value.dtype), pieces=pieces)


def shards_of(value: Any, is_first: bool) -> Iterator[BoxValues]:
    """Yields the boxes of `value` that this process writes: a JAX array, a NumPy array,
    an `Output` or a `PartOutput`.

    An `Output` is an array of which the process has only these boxes.
    """
    if isinstance(value, Output):
        yield from value.pieces(is_first)
        return
    if isinstance(value, PartOutput):
        parts, sources = value.owner
        yield from _boxes_of_mapped(parts.made(value.number), sources, is_first)
        return
    whole = whole_box(value.shape)
    if not isinstance(value, jax.Array):
        if is_first:
            yield whole, np.ascontiguousarray(value).reshape(value.shape)
        return
    if len(value.sharding.device_set) == 1 and value.is_fully_addressable:
        yield whole, np.asarray(value)
        return
    boxes = _first_replicas(value.sharding, tuple(value.shape))
    for shard in value.addressable_shards:
        box = boxes.get(shard.device)
        if box is not None:
            yield box, np.ascontiguousarray(shard.data)


# A model has many arrays of few kinds, and `Shard.replica_id` is computed anew at each
# access.
@ft.lru_cache(maxsize=256)
def _first_replicas(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """By device, the box of its shard. Of the devices that hold the same box, only the
    first is included.
    """
    devices = first_holder_by_box(shard_boxes(sharding, shape).items())
    return {device: box for box, device in devices.items()}


def exported(leaves: Leaves, map: TreeMap, target_tree: object) -> Leaves:
    """The arrays that `map` makes of the arrays in `leaves`.

    `target_tree` is a tree with the shapes and dtypes of the arrays to make. If it is
    `None`, they follow from the map. The values of the result are an `Output` or a
    `PartOutput`, which compute their elements when they are written.
    """
    source_structs = {}
    for path, value in leaves.arrays:
        key_dtype = prng.key_named(leaves.dtype_names.get(path))
        source_structs[path] = _struct_of(value, key_dtype)
    target_structs = None
    number_targets = None
    if target_tree is not None:
        target_structs, number_targets = target_leaves(target_tree)
    # The Python numbers that the map copies: pairs of a path in the result and a path
    # in the tree.
    copies = number_copies(map.steps, leaves.numbers, number_targets)
    sources = _Sources(dict(leaves.arrays))
    mapped_arrays = in_parts(bound(map, source_structs, target_structs, copies))
    dtype_names: dict[str, str] = {}
    outputs: dict[str, Output | PartOutput] = {}
    other_arrays = dict(mapped_arrays.others)
    # Arrays that are alike parts of one array come together, in thousands.
    for parts in mapped_arrays.parts:
        if is_key(parts.dtype):
            other_arrays |= {path: mapped_arrays[path] for path in parts.paths}
            continue
        _require_storable(parts.paths[0], parts.dtype)
        if parts.dtype not in safetensors.NAMES:
            dtype_names |= dict.fromkeys(parts.paths, encode_dtype(parts.dtype))
        outputs |= _outputs_of(_Parts(parts, sources))
    for path, leaf in other_arrays.items():
        _raise_if_scaled(path, leaf)
        if leaf.dtype not in safetensors.NAMES:
            dtype_names[path] = encode_dtype(leaf.dtype)
        if is_key(leaf.dtype):
            leaf = _key_data_of(leaf)
        else:
            _require_storable(path, leaf.dtype)
        outputs[path] = Output(
            shape=leaf.shape,
            dtype=leaf.dtype,
            pieces=ft.partial(_boxes_of_mapped, leaf, sources),
        )
    arrays = [(path, outputs[path]) for path in mapped_arrays]
    numbers = {}
    for path, path_in_tree in copies.routes:
        numbers[path] = leaves.numbers[path_in_tree]
    return Leaves(arrays=arrays, dtype_names=dtype_names, numbers=numbers)


def _outputs_of(owner: _Parts) -> Iterator[tuple[str, PartOutput]]:
    """The path and the output of each of the parts that `owner` has of an array. A
    model has many thousands of them, so none is made by a call with keyword arguments.
    """
    parts = owner.parts
    output_of = ft.partial(PartOutput, parts.shape, parts.dtype, owner)
    numbers = range(len(parts.paths))
    return zip(parts.paths, map(output_of, numbers), strict=True)


def _require_storable(path: str, dtype: DType) -> None:
    if safetensors.stored_name(dtype) is None:
        raise LeafTypeError(
            f"`{printable(path)}` is {dtype}, which safetensors cannot hold; cast it."
        )


def _struct_of(value: Any, key_dtype: DType | None) -> Struct:
    """The shape and dtype of an array; for key data those of its keys, of dtype
    `key_dtype`.
    """
    if key_dtype is None:
        return Struct(shape=tuple(value.shape), dtype=np.dtype(value.dtype))
    rank = value.ndim - len(key_data_struct(key_dtype).shape)
    return Struct(shape=tuple(value.shape[:rank]), dtype=key_dtype)


def _key_data_of(leaf: Made) -> Made:
    """The key data of an array of PRNG keys that a map makes: the data of one key are
    further dimensions.
    """
    data_of_key = key_data_struct(leaf.dtype)
    return Made(
        shape=(*leaf.shape, *data_of_key.shape),
        dtype=np.dtype(data_of_key.dtype),
        pieces=tuple([extended(piece, data_of_key.shape) for piece in leaf.pieces]),
    )


def _raise_if_scaled(path: str, leaf: Made) -> None:
    if any([piece.value.scale is not None for piece in leaf.pieces]):
        raise LeafTypeError(
            f"`{printable(path)}` is scaled, which takes two arrays at a time; use"
            " `reshard(tree, plan, map=...)` first, and save what comes out."
        )
