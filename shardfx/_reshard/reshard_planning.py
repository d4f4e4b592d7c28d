"""Plans a move without data: `plan_reshard`."""

import collections
import functools as ft
import itertools as it
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .._convert import (
    NumberCopies,
    TreeMap,
    hull,
    number_copies,
    number_paths,
    once,
    swapped,
)
from .._ground.boxes import common
from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.spec import array_bytes
from .._ground.text import (
    together,
)
from .._ground.tree import flatten
from .._plan import NUMBER, ShardPlan
from .move import Move, balanced, move_of, shares_memory
from .mover import lost_devices, targets
from .pieces.assembly import Assembly, MovedLeaf, leaves_of_plan
from .pieces.planning import target_arrays
from .pieces.shard_part import Links
from .reshard_plan import LeafMove, ReshardPlan
from .shardings import in_host_memory, leaf_name, naming


def plan_reshard(
    src: object, dst: object, *, map: TreeMap | None = None, lost: Iterable[object] = ()
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
    lost = lost_devices(lost)
    ours = _leaves_of(src, "src")
    if map is not None:
        if lost:
            raise LeafTypeError(
                "`plan_reshard` with a map takes no `lost`; move the tree as it is"
                " first."
            )
        own_numbers = dict.fromkeys(_number_paths(src), 0)
        numbers = number_copies(map.steps, own_numbers, _number_paths(dst))
        theirs = _leaves_of(dst, "dst")
        return ReshardPlan(tuple(_moves_by_map(map, ours, theirs, numbers)))
    theirs = (
        _leaves_of(dst, "dst")
        if isinstance(dst, ShardPlan) or isinstance(src, ShardPlan)
        else _targets(src, dst, ours)
    )
    if [leaf.path for leaf in ours] != [leaf.path for leaf in theirs]:
        our_paths, their_paths = (
            {leaf.path for leaf in leaves} for leaves in (ours, theirs)
        )
        odd = next(
            (
                leaf.path
                for leaf in (*ours, *theirs)
                if (leaf.path in our_paths) != (leaf.path in their_paths)
            ),
            None,
        )
        what = (
            "their leaves are in another order"
            if odd is None
            else f"{leaf_name(odd)} is only in one of them"
        )
        raise PlanMismatchError(
            f"`src` and `dst` are of different trees: {what}; plan one tree for both"
            " meshes."
        )
    moves = [_move(*pair, lost) for pair in zip(ours, theirs, strict=True)]
    chosen = balanced(collections.Counter(moves))
    rows = zip(ours, moves, strict=True)
    return ReshardPlan(
        tuple(
            LeafMove(leaf.path, leaf.shape, leaf.dtype, **_move_fields(chosen[move]))
            for leaf, move in rows
        )
    )


def _number_paths(form: object) -> list[str]:
    """The paths of the Python numbers of a plan or a tree."""
    if isinstance(form, ShardPlan):
        return [path for path, code in form.content.numbered if code == NUMBER]
    return number_paths(form)


def _moves_by_map(
    map: TreeMap,
    ours: Sequence[MovedLeaf],
    theirs: Sequence[MovedLeaf],
    numbers: NumberCopies,
) -> Iterable[LeafMove]:
    """Yields the move of each array of `theirs`, which a `TreeMap` makes of the arrays
    `ours`. `numbers` are the Python numbers of the source.
    """
    source = {leaf.path: leaf for leaf in ours}
    # The costs are those of devices with separate memories. `live` says whether
    # `reshard` copies instead.
    works, live = (
        target_arrays(map, tuple(ours), tuple(theirs), copies, numbers)
        for copies in (False, True)
    )
    most_bytes = max(
        [0, *[work.assembly.most_bytes for work in works if work.assembly is not None]]
    )
    order = sorted(works, key=lambda work: work.assembly is not None)
    last = {name: work.leaf.path for work in order for name in work.sources}
    moves = {
        work.leaf.path: _move(
            source[work.sources[0]], work.leaf._replace(path=work.sources[0]), ()
        )
        for work in works
        if work.assembly is None
    }
    chosen = balanced(collections.Counter(moves.values()))
    for work, other in zip(works, live, strict=True):
        path = work.leaf.path
        if work.assembly is None or other.assembly is None:
            costs = _move_fields(chosen[moves[path]])
        else:
            assembly = work.assembly
            costs = {
                "dst": assembly.sharding,
                "how": "pieces",
                "copied": assembly.method != other.assembly.method,
            }
            costs |= _assembly_fields(assembly, most_bytes)
            costs["src"] = (
                source[work.sources[0]].sharding if work.sources else work.leaf.sharding
            )
            read = [source[name] for name in work.sources if last[name] == path]
            costs["source_bytes"] = sum(_shard_bytes(leaf) for leaf in read)
            costs["peak_bytes"] = (
                costs["source_bytes"] + costs["target_bytes"] + costs.pop("extra_bytes")
            )
        yield LeafMove(
            path, work.leaf.shape, work.leaf.dtype, made_of=work.sources, **costs
        )


def _shard_bytes(leaf: MovedLeaf) -> int:
    assert leaf.sharding is not None
    return array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _leaves_of(form: object, what: str) -> list[MovedLeaf]:
    if isinstance(form, ShardPlan):
        return leaves_of_plan(form)
    flat = flatten(form)
    arrays = [
        (path, leaf)
        for path, leaf, shaped in zip(
            flat.paths, flat.leaves, flat.is_array, strict=True
        )
        if shaped
    ]
    for path, leaf in arrays:
        if (
            not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            or leaf.sharding is None
        ):
            raise LeafTypeError(
                f"{leaf_name(path)} of `{what}` has no sharding; give a plan, or"
                " `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`."
            )
    return [
        MovedLeaf(path, tuple(leaf.shape), leaf.dtype, leaf.sharding)
        for path, leaf in arrays
    ]


def _targets(src: object, dst: object, ours: Sequence[MovedLeaf]) -> list[MovedLeaf]:
    """The arrays of `src`, listed in `ours`, each with the sharding that `dst` gives
    it, or with its own where `dst` has `None`. Raises `PlanMismatchError` if `dst` has
    arrays of other shapes or dtypes.
    """
    flat = flatten(src)
    kinds = jax.Array | jax.ShapeDtypeStruct
    shardings = [
        end
        for leaf, end in zip(flat.leaves, targets(dst, flat, "dst"), strict=True)
        if isinstance(leaf, kinds)
    ]
    arrays = [leaf for leaf in jax.tree.leaves(dst) if isinstance(leaf, kinds)]
    if len(arrays) == len(ours):
        for leaf, other in zip(ours, arrays, strict=True):
            _require_same(leaf, other.shape, other.dtype)
    return [
        leaf._replace(sharding=end or leaf.sharding)
        for leaf, end in zip(ours, shardings, strict=True)
    ]


def _require_same(leaf: MovedLeaf, shape: tuple[int, ...], dtype: object) -> None:
    if (leaf.shape, leaf.dtype) != (tuple(shape), dtype):
        raise PlanMismatchError(
            f"{leaf_name(leaf.path)} is {leaf.dtype}{list(leaf.shape)} in `src` and"
            f" {dtype}{list(shape)} in `dst`; a move changes neither: plan one tree for"
            " both."
        )


def _move(ours: MovedLeaf, theirs: MovedLeaf, lost: tuple[object, ...]) -> Move:
    _require_same(ours, theirs.shape, theirs.dtype)
    shardings = (ours.sharding, theirs.sharding)
    meshes = (ours.mesh, theirs.mesh)
    with naming(str, ours.path):
        return move_of(ours.shape, ours.dtype, *shardings, lost, False, meshes)


@ft.lru_cache(maxsize=4096)
def _move_fields(move: Move) -> dict[str, Any]:
    """The fields of a `LeafMove` that are the same for all arrays of one move, by name."""
    end_bytes = (move.source_bytes, move.target_bytes)
    fields: dict[str, Any] = {"src": move.src, "dst": move.dst, "how": move.how}
    fields |= {"source_bytes": end_bytes[0], "target_bytes": end_bytes[1]}
    if move.plan is not None:
        plan = move.plan
        wire = {
            "wire_bytes": plan.wire_bytes,
            "dcn_bytes": plan.dcn_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
        }
        # Programs compute on devices, so a shard in host memory has a copy in device
        # memory.
        peak = max(plan.peak_bytes, *end_bytes)
        return {
            **fields,
            **wire,
            "steps": plan.steps,
            "copied": shares_memory(move),
            "peak_bytes": peak,
        }
    if move.assembly is not None:
        parts = move.assembly.parts
        wire = -(-parts.wire_bytes // max(1, move.dst.num_devices))
        # While parts of shards are sliced and received, a device holds two copies of
        # them besides its shards.
        fields |= {
            "peak_bytes": sum(end_bytes) + 2 * max([0, *parts.links.values()]),
            "missing": parts.missing,
        }
        return fields | {
            "wire_bytes": wire,
            "lower_bound_bytes": wire,
            "links": _links_by_id(move.assembly),
        }
    host_sizes = [
        size
        for end, size in zip((move.src, move.dst), end_bytes, strict=True)
        if not in_host_memory(end)
    ]
    return {**fields, "peak_bytes": max([0, *host_sizes])}


@ft.lru_cache(maxsize=4096)
def _assembly_fields(assembly: Assembly, most_bytes: int) -> dict[str, Any]:
    """The fields of a `LeafMove`, by name, that say the cost of assembling an array of
    parts of other arrays. The dict also has "extra_bytes", the most bytes in one memory
    besides the shards of source and target. `most_bytes` is the most bytes that
    programs may use on a device if source and target are on different devices.
    """
    steps = assembly.exchanges(None, most_bytes)
    count = max(1, assembly.sharding.num_devices)
    return {
        "wire_bytes": -(-assembly.parts.wire_bytes // count),
        "lower_bound_bytes": -(-_least_bytes(assembly) // count),
        "target_bytes": array_bytes(assembly.shard_shape, assembly.dtype),
        "links": _links_by_id(assembly),
        "rounds": sum(len(step.rounds) for step in steps),
        "extra_bytes": assembly.extra_bytes(steps),
    }


def _links_by_id(assembly: Assembly) -> Links:
    """The bytes that each sender of an assembly sends to each receiver, by (sender,
    receiver). A device is given by its id. If two devices have equal ids, as on two
    platforms, all are given by their positions.
    """
    ids = [getattr(device, "id", device) for device in assembly.devices]
    names = ids if len({*ids}) == len(ids) else list(range(len(ids)))
    return {
        (names[sender], names[receiver]): size
        for (sender, receiver), size in assembly.parts.links.items()
    }


def _least_bytes(assembly: Assembly) -> int:
    """A lower bound on the bytes that all devices together receive to assemble an
    array. It is the sum of the parts of source arrays that each device needs and does
    not hold. If parts of a source array may have common elements, only the largest part
    of this source that a device receives counts.
    """
    by_source = together(assembly.pieces, lambda piece: piece.value.path)
    pairs = {
        key: it.combinations(
            [hull(swapped(once(part_piece))) for part_piece in parts], 2
        )
        for key, parts in by_source.items()
    }
    repeated = {
        key
        for key, boxes in pairs.items()
        if any(common(*pair) is not None for pair in boxes)
    }
    sent = [part for part in assembly.parts.all if part.sender != part.receiver]
    by_receiver = together(sent, lambda part: (part.receiver, part.piece.value.path))
    sizes = {key: [part.bytes for part in parts] for key, parts in by_receiver.items()}
    least_bytes = 0
    for (_, key), part_sizes in sizes.items():
        is_repeated = key in repeated
        least_bytes += max(part_sizes) if is_repeated else sum(part_sizes)
    return least_bytes
