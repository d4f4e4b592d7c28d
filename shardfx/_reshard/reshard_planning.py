"""Plans a move without data: `plan_reshard`."""

import collections
import functools as ft
import itertools as it
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from .._convert import (
    NumberCopies,
    TreeMap,
    check_map,
    hull,
    number_copies,
    number_paths,
    once,
    swapped,
)
from .._ground.boxes import Box, common
from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.misuse import called
from .._ground.spec import array_bytes
from .._ground.text import (
    together,
)
from .._ground.tree import flatten
from .._plan import NUMBER, ShardPlan
from .movable import leaf_name, naming
from .move import Move, balanced, move_of, shares_memory, spread_of
from .mover import lost_devices, targets
from .pieces.assembly import Assembly, MovedLeaf, leaves_of_plan
from .pieces.planning import TargetArray, target_arrays
from .pieces.shard_part import Links
from .reshard_plan import LeafMove, ReshardPlan
from .shardings import in_host_memory
from .steps.redistribution import MoveStep


@called("plan_reshard(src, dst)")
def plan_reshard(
    src: object,
    dst: object,
    *,
    map: TreeMap | None = None,
    lost: Iterable[object] = (),
) -> ReshardPlan:
    """Plans a move of a tree without moving an array: the steps, bytes and memory of
    each array and in total.

    The plan is for devices with separate memories. If all devices are CPU devices of
    this process, as in tests, `reshard` copies between shards in the shared memory and
    runs no collectives. `LeafMove.copied` is then true.

    **Arguments:**

    - `src`, `dst`: plans, or trees of arrays or ShapeDtypeStructs with shardings (one
      struct is a tree). Meshes need no devices. In a mesh without devices, positions in
      the mesh stand for device ids, and the `dcn` of a plan's MeshSpec says how the
      mesh spans TPU slices.
    - `map`: a [`shardfx.TreeMap`][] that makes the arrays of `dst` from those of `src`,
      if `dst` is another tree.
    - `lost`: jax devices whose shards are not to be read.

    **Returns:**

    A `ReshardPlan`.

    **Raises:**

    `MapError` with all problems of a map that does not fit; `PlanMismatchError` if
    `src` and `dst` have different trees, shapes or dtypes; `SpecError` if a sharding
    does not divide its array, or if an array with unreduced axes would move;
    `LeafTypeError` for a leaf without a sharding, for a dtype that JAX moves wrongly,
    and if `lost` holds anything other than devices.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, plan, plan_reshard

        tree = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
        trainer = plan(tree, MeshSpec({"fsdp": 16}), paths=PathRules([("w", P("fsdp"))]))
        server = plan(
            tree,
            MeshSpec({"data": 4, "tensor": 4}),
            paths=PathRules([("w", P(None, "tensor"))]),
        )
        moving = plan_reshard(trainer, server)
        assert moving.wire_bytes <= 1.25 * moving.lower_bound_bytes
        print(moving)
        ```
    """
    check_map(map)
    lost = lost_devices(lost)
    source_leaves = _leaves_of(src, "src")
    if map is not None:
        if lost:
            raise LeafTypeError(
                "`plan_reshard` with a map takes no `lost`; move the tree as it is"
                " first."
            )
        # The Python numbers of `src`, by path. A plan does not have their values.
        python_numbers = dict.fromkeys(_number_paths(src), 0)
        copied_numbers = number_copies(map.steps, python_numbers, _number_paths(dst))
        target_leaves = _leaves_of(dst, "dst")
        moves_by_map = _moves_by_map(map, source_leaves, target_leaves, copied_numbers)
        return ReshardPlan(tuple(moves_by_map))
    if isinstance(dst, ShardPlan) or isinstance(src, ShardPlan):
        target_leaves = _leaves_of(dst, "dst")
    else:
        target_leaves = _targets(src, dst, source_leaves)
    _require_same_paths(source_leaves, target_leaves)

    pairs = zip(source_leaves, target_leaves, strict=True)
    moves = [_move(*pair, lost) for pair in pairs]
    # From each move to the same move with the replicas that send.
    chosen = balanced(collections.Counter(moves))
    leaf_moves: list[LeafMove] = []
    for leaf, move in zip(source_leaves, moves, strict=True):
        fields = _move_fields(chosen[move])
        leaf_moves.append(
            LeafMove(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype, **fields)
        )
    return ReshardPlan(tuple(leaf_moves))


def _require_same_paths(
    source_leaves: Sequence[MovedLeaf],
    target_leaves: Sequence[MovedLeaf],
) -> None:
    """Raises `PlanMismatchError` unless source and target have the same paths, in one
    order.
    """
    our_paths = [leaf.path for leaf in source_leaves]
    their_paths = [leaf.path for leaf in target_leaves]
    if our_paths == their_paths:
        return
    what = "their leaves are in another order"
    shared_paths = {*our_paths} & {*their_paths}
    for path in (*our_paths, *their_paths):
        if path not in shared_paths:
            what = f"{leaf_name(path)} is only in one of them"
            break
    raise PlanMismatchError(
        f"`src` and `dst` are of different trees: {what}; plan one tree for both"
        " meshes."
    )


def _number_paths(form: object) -> list[str]:
    """The paths of the Python numbers of a plan or a tree."""
    if isinstance(form, ShardPlan):
        return [path for path, code in form.content.paths_and_rows if code == NUMBER]
    return number_paths(form)


def _moves_by_map(
    map: TreeMap,
    source_leaves: Sequence[MovedLeaf],
    target_leaves: Sequence[MovedLeaf],
    numbers: NumberCopies,
) -> Iterable[LeafMove]:
    """Yields the move of each array of `target_leaves`, which a `TreeMap` makes of the
    arrays `source_leaves`. `numbers` are the Python numbers of the source.
    """
    source_by_path = {leaf.path: leaf for leaf in source_leaves}
    # The costs are those of `arrays`, for devices with separate memories. `live_arrays`
    # say whether `reshard` copies instead.
    arrays, live_arrays = [
        target_arrays(
            tree_map=map,
            sources=tuple(source_leaves),
            targets=tuple(target_leaves),
            may_copy_on_host=copies,
            numbers=numbers,
        )
        for copies in (False, True)
    ]
    unassembled = [array for array in arrays if array.assembly is None]
    assembled = [array for array in arrays if array.assembly is not None]
    most_bytes = 0
    for array in assembled:
        assert array.assembly is not None
        most_bytes = max(most_bytes, array.assembly.most_bytes)
    # Arrays that move as they are go first. The last array that reads a source counts
    # the source's bytes.
    last_reader: dict[str, str] = {}
    for array in (*unassembled, *assembled):
        last_reader.update(dict.fromkeys(array.sources, array.leaf.path))

    moves: dict[str, Move] = {}
    for array in unassembled:
        (source_path,) = array.sources
        moves[array.leaf.path] = _move(
            source_by_path[source_path], array.leaf._replace(path=source_path), lost=()
        )
    chosen = balanced(collections.Counter(moves.values()))
    for array, live_array in zip(arrays, live_arrays, strict=True):
        leaf = array.leaf
        if array.assembly is None or live_array.assembly is None:
            costs = _move_fields(chosen[moves[leaf.path]])
        else:
            src = leaf.sharding
            if array.sources:
                src = source_by_path[array.sources[0]].sharding
            source_bytes = _last_read_bytes(array, source_by_path, last_reader)
            costs = {
                "src": src,
                "dst": array.assembly.target,
                "how": "pieces",
                "copied": array.assembly.method != live_array.assembly.method,
                "source_bytes": source_bytes,
            }
            costs |= _assembly_fields(array.assembly, most_bytes)
            extra_bytes = costs.pop("extra_bytes")
            costs["peak_bytes"] = source_bytes + costs["target_bytes"] + extra_bytes
        yield LeafMove(
            path=leaf.path,
            shape=leaf.shape,
            dtype=leaf.dtype,
            made_of=array.sources,
            **costs,
        )


def _last_read_bytes(
    array: TargetArray,
    source_by_path: Mapping[str, MovedLeaf],
    last_reader: Mapping[str, str],
) -> int:
    """The bytes of one shard of each source that no array reads after `array`.
    `last_reader` has the path of the last array that reads each source.
    """
    nbytes = 0
    for path in array.sources:
        if last_reader[path] == array.leaf.path:
            nbytes += _shard_bytes(source_by_path[path])
    return nbytes


def _shard_bytes(leaf: MovedLeaf) -> int:
    """The bytes of one shard of an array."""
    assert leaf.sharding is not None
    return array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _leaves_of(form: object, argument_name: str) -> list[MovedLeaf]:
    """The arrays of `form`, a plan or a tree. `argument_name` is its name in messages.
    Raises `LeafTypeError` for an array without a sharding.
    """
    if isinstance(form, ShardPlan):
        return leaves_of_plan(form)
    flat = flatten(form)
    leaves: list[MovedLeaf] = []
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    for path, leaf, has_shape in rows:
        if not has_shape:
            continue
        sharding = None
        if isinstance(leaf, _SHARDED):
            sharding = leaf.sharding
        if sharding is None:
            raise LeafTypeError(
                f"{leaf_name(path)} of `{argument_name}` has no sharding; give a plan,"
                " or `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`."
            )
        leaves.append(
            MovedLeaf(
                path=path, shape=tuple(leaf.shape), dtype=leaf.dtype, sharding=sharding
            )
        )
    return leaves


# The leaves that can have a sharding.
_SHARDED = (jax.Array, jax.ShapeDtypeStruct)


def _targets(
    src: object,
    dst: object,
    source_leaves: Sequence[MovedLeaf],
) -> list[MovedLeaf]:
    """The arrays of `src`, listed in `source_leaves`, each with the sharding that `dst`
    gives it, or with its own where `dst` has `None`. Raises `PlanMismatchError` if
    `dst` has arrays of other shapes or dtypes.
    """
    flat = flatten(src)
    shardings: list[Sharding | None] = []
    for leaf, sharding in zip(flat.leaves, targets(dst, flat, "dst"), strict=True):
        if isinstance(leaf, _SHARDED):
            shardings.append(sharding)
    arrays = [leaf for leaf in jax.tree.leaves(dst) if isinstance(leaf, _SHARDED)]
    if len(arrays) == len(source_leaves):
        for leaf, array in zip(source_leaves, arrays, strict=True):
            _require_same(leaf, array.shape, array.dtype)
    moved: list[MovedLeaf] = []
    for leaf, sharding in zip(source_leaves, shardings, strict=True):
        moved.append(leaf._replace(sharding=sharding or leaf.sharding))
    return moved


def _require_same(leaf: MovedLeaf, shape: tuple[int, ...], dtype: object) -> None:
    """Raises `PlanMismatchError` unless the target of `leaf` has its shape and dtype."""
    if (leaf.shape, leaf.dtype) != (tuple(shape), dtype):
        raise PlanMismatchError(
            f"{leaf_name(leaf.path)} is {leaf.dtype}{list(leaf.shape)} in `src` and"
            f" {dtype}{list(shape)} in `dst`; a move changes neither: plan one tree for"
            " both."
        )


def _move(source: MovedLeaf, target: MovedLeaf, lost: tuple[object, ...]) -> Move:
    """Decides the move of one array, for devices with separate memories. `lost` are
    devices whose shards are not to be read.
    """
    _require_same(source, target.shape, target.dtype)
    assert source.sharding is not None
    assert target.sharding is not None
    with naming(str, source.path):
        return move_of(
            source.shape,
            source.dtype,
            src=source.sharding,
            dst=target.sharding,
            lost=lost,
            copies=False,
            meshes=(source.mesh, target.mesh),
        )


@ft.lru_cache(maxsize=4096)
def _move_fields(move: Move) -> dict[str, Any]:
    """The fields of a `LeafMove` that are the same for all arrays of one move, by name."""
    source_bytes = move.source_bytes
    target_bytes = move.target_bytes
    fields: dict[str, Any] = {
        "src": move.src,
        "dst": move.dst,
        "how": move.how,
        "source_bytes": source_bytes,
        "target_bytes": target_bytes,
    }
    if move.plan is not None:
        plan = move.plan
        return {
            **fields,
            "wire_bytes": plan.wire_bytes,
            "dcn_bytes": plan.dcn_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
            "steps": plan.steps,
            "copied": shares_memory(move),
            # Programs compute on devices, so a shard in host memory has a copy in
            # device memory.
            "peak_bytes": max(plan.peak_bytes, source_bytes, target_bytes),
        }
    if move.assembly is not None:
        parts = move.assembly.parts
        # Means over the target's devices.
        receivers = max(1, move.dst.num_devices)
        wire_bytes = -(-parts.wire_bytes // receivers)
        largest_link_bytes = max(parts.links.values(), default=0)
        # While parts of shards are sliced and received, a device holds two copies of
        # them besides its shards.
        extra_bytes = 2 * largest_link_bytes
        spread = spread_of(move.assembly)
        if spread is not None:
            if spread.plan is not None:
                fields["steps"] = spread.plan.steps
            wire_bytes += _spread_bytes(spread)
            extra_bytes = max(extra_bytes, spread.source_bytes)
        return {
            **fields,
            "peak_bytes": source_bytes + target_bytes + extra_bytes,
            "dcn_bytes": -(-move.assembly.dcn_bytes // receivers),
            "missing": parts.missing,
            "wire_bytes": wire_bytes,
            "lower_bound_bytes": wire_bytes,
            "links": _links_by_id(move.assembly),
        }
    # A copy from one memory to another, or none at all.
    peak_bytes = 0
    if not in_host_memory(move.src):
        peak_bytes = source_bytes
    if not in_host_memory(move.dst):
        peak_bytes = max(peak_bytes, target_bytes)
    return {**fields, "peak_bytes": peak_bytes}


def _spread_bytes(spread: Move) -> int:
    """The bytes that enter a device in the move inside slices that follows an assembly:
    a mean if it is by parts.
    """
    if spread.plan is not None:
        return spread.plan.wire_bytes
    assert spread.assembly is not None
    return -(-spread.assembly.parts.wire_bytes // spread.dst.num_devices)


@ft.lru_cache(maxsize=4096)
def _assembly_fields(assembly: Assembly, most_bytes: int) -> dict[str, Any]:
    """The fields of a `LeafMove`, by name, that say the cost of assembling an array of
    parts of other arrays. The dict also has "extra_bytes", the most bytes in one memory
    besides the shards of source and target. `most_bytes` is the most bytes that
    programs may use on a device if source and target are on different devices.
    """
    exchanges = assembly.exchanges(None, most_bytes)
    # Bytes that are received are means over the target's devices.
    device_count = max(1, assembly.target.num_devices)
    wire_bytes = -(-assembly.parts.wire_bytes // device_count)
    lower_bound_bytes = -(-_least_bytes(assembly) // device_count)
    extra_bytes = assembly.extra_bytes(exchanges)
    steps: tuple[MoveStep, ...] = ()
    spread = spread_of(assembly)
    if spread is not None:
        if spread.plan is not None:
            steps = spread.plan.steps
        wire_bytes += _spread_bytes(spread)
        lower_bound_bytes += _spread_bytes(spread)
        extra_bytes = max(
            extra_bytes, spread.source_bytes_in_memory + spread.extra_bytes
        )
    target_shape = assembly.target.shard_shape(assembly.shape)
    return {
        "wire_bytes": wire_bytes,
        "dcn_bytes": -(-assembly.dcn_bytes // device_count),
        "lower_bound_bytes": lower_bound_bytes,
        "target_bytes": array_bytes(target_shape, assembly.dtype),
        "links": _links_by_id(assembly),
        "rounds": sum(len(exchange.rounds) for exchange in exchanges),
        "steps": steps,
        "extra_bytes": extra_bytes,
    }


def _links_by_id(assembly: Assembly) -> Links:
    """The bytes that each sender of an assembly sends to each receiver, by (sender,
    receiver). A device is given by its id. If two devices have equal ids, as on two
    platforms, all are given by their positions.
    """
    names = [getattr(device, "id", device) for device in assembly.devices]
    if len({*names}) < len(names):
        names = list(range(len(names)))
    links: Links = {}
    for (sender, receiver), nbytes in assembly.parts.links.items():
        links[names[sender], names[receiver]] = nbytes
    return links


def _least_bytes(assembly: Assembly) -> int:
    """A lower bound on the bytes that all devices together receive to assemble an
    array. It is the sum of the parts of source arrays that each device needs and does
    not hold. If parts of a source array may have common elements, only the largest part
    of this source that a device receives counts.
    """
    pieces_by_source = together(assembly.pieces, lambda piece: piece.value.path)
    may_overlap: dict[str | None, bool] = {}
    for source, pieces in pieces_by_source.items():
        source_boxes = [hull(swapped(once(piece))) for piece in pieces]
        may_overlap[source] = _have_common_elements(source_boxes)

    # The bytes of each part, by receiver and source.
    received: dict[tuple[int, str | None], list[int]] = {}
    for part in assembly.parts.all:
        if part.sender != part.receiver:
            key = (part.receiver, part.piece.value.path)
            received.setdefault(key, []).append(part.bytes)
    least_bytes = 0
    for (_, source), part_bytes in received.items():
        if may_overlap[source]:
            least_bytes += max(part_bytes)
        else:
            least_bytes += sum(part_bytes)
    return least_bytes


def _have_common_elements(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes intersect."""
    for box, other in it.combinations(boxes, 2):
        if common(box, other) is not None:
            return True
    return False
