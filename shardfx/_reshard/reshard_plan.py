"""`plan_reshard`: plans the move of a tree as a value. No array is moved, and no device
is needed.
"""

import collections
import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from .._convert import (
    NumberCopies,
    TreeMap,
    hull,
    number_copies,
    number_paths,
    once,
    swapped,
)
from .._ground.boxes import Box, common
from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.spec import DType, array_bytes
from .._ground.text import (
    between_numbers,
    first_lines,
    html_text,
    joined,
    plural,
    table,
    together,
)
from .._ground.tree import flatten
from .._plan import NUMBER, ShardPlan
from .move import Move, balanced, move_of, shares_memory
from .mover import lost_devices, targets
from .packing import packed, unpacked
from .pieces.assembly import Assembly, MovedLeaf, leaves_of_plan
from .pieces.parts import Links
from .pieces.planning import target_arrays
from .shardings import in_host_memory, leaf_name, naming
from .steps.redistribution import MoveStep


@dataclasses.dataclass(frozen=True)
class LeafMove:
    """How one array of a tree moves, and the cost of its move.

    **Arguments:**

    - `path`, `shape`, `dtype`: the path, shape and dtype of the array.
    - `src`, `dst`: the shardings before and after the move. For "pieces", `src` is the
      sharding of the first source
        array.
    - `how`: "in place" (nothing changes), "relabel" (every device already holds its
      shard, and only the mesh or the
        spec changes), "memory kind" (each device copies its shard to another of its
        memories), "steps" (collectives among the same devices), "tiles" (between two
        sets of devices, each new shard is assembled from the old shards that overlap
        it), or "pieces" (a `TreeMap` makes the array of parts of other arrays).
    - `source_bytes`, `target_bytes`: the bytes of a device's shard before and after the
      move. If a map makes several
        arrays of one source array, the source's bytes are counted for the last of them
        only.
    - `peak_bytes`: the most bytes of this array in a device's memory during the move,
      source and target included. A
        shard in host memory does not count, but its copy in device memory does.
    - `steps`: for "steps", the collectives in order.
    - `links`: for "tiles" and "pieces", the bytes that each sender sends to each
      receiver, by (sender, receiver). A
        device is given by its id, or in a mesh without devices by its position.
    - `missing`: the elements that only devices in `lost` hold, as boxes of (start,
      stop) per dimension.
    - `copied`: whether `reshard` copies between shards and runs no collectives, since
      all devices are CPU devices of
        this process and share its memory. The costs in this plan are those of devices
        with separate memories.
    - `wire_bytes`: the bytes that a device receives, as the mean over the target's
      devices.
    - `dcn_bytes`: for "steps", the part of `wire_bytes` that comes from another slice
      (or node). If slices do not line
        up with mesh axes, it is an upper bound.
    - `lower_bound_bytes`: a lower bound on `wire_bytes` for any algorithm.
    - `made_of`: with a map, the paths of the source arrays of which this array is made.
    - `rounds`: for "pieces", the number of rounds in which shards are exchanged. In a
      round a device sends at most one
        part of a shard and receives at most one.
    """

    __module__ = "shardfx.results"

    path: str
    shape: tuple[int, ...]
    dtype: DType
    src: Sharding
    dst: Sharding
    how: str
    source_bytes: int
    target_bytes: int
    peak_bytes: int
    steps: tuple[MoveStep, ...] = ()
    links: Mapping[tuple[int, int], int] = dataclasses.field(
        hash=False, default_factory=dict
    )
    missing: tuple[Box, ...] = ()
    copied: bool = False
    wire_bytes: int = 0
    dcn_bytes: int = 0
    lower_bound_bytes: int = 0
    made_of: tuple[str, ...] = ()
    rounds: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # JAX's devices cannot be pickled.
        fields = {**vars(self), "src": packed(self.src), "dst": packed(self.dst)}
        return _unpickled, (fields,)

    @property
    def idle(self) -> bool:
        """Whether no byte of the array is copied or sent."""
        return self.how in ("in place", "relabel")

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The bytes of a device's shard in device memory, before and after the move: 0
        for a shard in host memory.
        """
        source, target = (
            0 if in_host_memory(end) else 1 for end in (self.src, self.dst)
        )
        return source * self.source_bytes, target * self.target_bytes


def _unpickled(fields: dict[str, Any]) -> LeafMove:
    ends = {"src": unpacked(fields["src"]), "dst": unpacked(fields["dst"])}
    return LeafMove(**{**fields, **ends})


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """The moves that [`shardfx.reshard`][] would make of a tree, as
    [`shardfx.plan_reshard`][] returns them. `print` shows them as a table.

    **Arguments:**

    - `leaves`: one `LeafMove` for each array, in the tree's order.
    """

    __module__ = "shardfx.results"

    leaves: tuple[LeafMove, ...]

    @property
    def in_place(self) -> tuple[str, ...]:
        """The paths of the arrays that do not move."""
        return tuple(leaf.path for leaf in self.leaves if leaf.idle)

    @property
    def steps(self) -> dict[str, tuple[MoveStep, ...]]:
        """For each array that moves by "steps", its collectives in order, by the
        array's path.
        """
        return {leaf.path: leaf.steps for leaf in self.leaves if leaf.steps}

    @property
    def moves(self) -> int:
        """The number of distinct moves. Arrays of equal shape, dtype, `src` and `dst`
        share a move.
        """
        return len(
            {
                (leaf.shape, str(leaf.dtype), leaf.src, leaf.dst)
                for leaf in self.leaves
                if not leaf.idle
            }
        )

    @property
    def wire_bytes(self) -> int:
        """The bytes that a device receives of all arrays, as the mean over devices."""
        return sum(leaf.wire_bytes for leaf in self.leaves)

    @property
    def dcn_bytes(self) -> int:
        """The bytes that a device receives from other TPU slices (or nodes), of all
        arrays that move by "steps".
        """
        return sum(leaf.dcn_bytes for leaf in self.leaves)

    @property
    def lower_bound_bytes(self) -> int:
        """A lower bound on `wire_bytes` for any algorithm."""
        return sum(leaf.lower_bound_bytes for leaf in self.leaves)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in a device's memory if one array moves at a time, with all
        sources and targets included.
        """
        held = [(leaf, sum(leaf.held_bytes)) for leaf in self.leaves if not leaf.idle]
        idle = sum(leaf.held_bytes[0] for leaf in self.leaves if leaf.idle)
        return (
            idle
            + sum(size for _, size in held)
            + max([0, *[leaf.peak_bytes - size for leaf, size in held]])
        )

    @property
    def host_bytes(self) -> int:
        """The bytes of one device's shards in host memory, of all sources and targets."""
        bytes_of_leaves = [
            (leaf.source_bytes, 0 if leaf.idle else leaf.target_bytes, leaf.held_bytes)
            for leaf in self.leaves
        ]
        return sum(
            source - held[0] + (target - held[1] if target else 0)
            for source, target, held in bytes_of_leaves
        )

    @ft.cached_property
    def links(self) -> Links:
        """The bytes between devices, by (sender, receiver), of all arrays that move by
        "tiles" or "pieces".
        """
        links = collections.Counter[tuple[int, int]]()
        for leaf in self.leaves:
            links.update(leaf.links)
        return dict(links)

    @property
    def missing(self) -> dict[str, tuple[Box, ...]]:
        """The elements of each array, by path, that only lost devices hold: those in
        `lost` of `plan_reshard`. A box has (start, stop) for each dimension.
        """
        return {leaf.path: leaf.missing for leaf in self.leaves if leaf.missing}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = first_lines
    _repr_html_ = html_text


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
      struct is a tree). Meshes need no
        devices. In a mesh without devices, positions in the mesh stand for device ids,
        and the `dcn` of a plan's MeshSpec says how the mesh spans TPU slices.
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
    return sum(
        max(parts) if key in repeated else sum(parts)
        for (_, key), parts in sizes.items()
    )


def _lines(plan: ReshardPlan) -> Iterable[str]:
    kind_of = lambda leaf: (
        between_numbers(leaf.path),
        leaf.shape,
        str(leaf.dtype),
        leaf.src,
        leaf.dst,
        leaf.rounds,
    )
    groups = together([leaf for leaf in plan.leaves if not leaf.idle], kind_of)
    head = ("array", "count", "shape", "move", "wire", "bound", "peak")
    yield from table([head, *map(_row, groups.values())], right=set())
    idle = plan.in_place
    count = len(plan.leaves) - len(plan.in_place)
    moves = (
        plural(plan.moves, "move")
        if plan.moves == 1
        else f"{plan.moves} different moves"
    )
    yield (
        f"{plural(count, 'array')} {'moves' if count == 1 else 'move'} by {moves}; per"
        f" device {_size(plan.wire_bytes)} enter (at least"
        f" {_size(plan.lower_bound_bytes)} must), {_size(plan.peak_bytes)} at the peak"
        + (
            f"; {_size(plan.dcn_bytes)} of what enters come from other slices"
            if plan.dcn_bytes
            else ""
        )
    )
    copied = sum(leaf.copied for leaf in plan.leaves)
    if copied:
        subject = "1 array takes" if copied == 1 else f"{copied} arrays take"
        yield (
            f"{subject} no steps here, where this CPU plays all devices: its memory holds"
            " both sides"
        )
    if idle:
        shown = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        yield f"nothing to do for {plural(len(idle), 'array')}: {shown}"
    if plan.links:
        links = sorted(plan.links.items(), key=lambda link: -link[1])
        shown = ", ".join(
            f"{sender} -> {receiver}: {_size(count)}"
            for (sender, receiver), count in links[:8]
        )
        yield f"{len(links)} links: {shown}" + (", ..." if len(links) > 8 else "")
    for path, boxes in plan.missing.items():
        text = ", ".join(
            "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]" for box in boxes[:3]
        )
        yield f"lost: `{path}` {text}" + (", ..." if len(boxes) > 3 else "")


def _row(leaves: list[LeafMove]) -> tuple[str, ...]:
    leaf = leaves[0]
    name = joined([other.path for other in leaves])
    how = " > ".join(step.kind for step in leaf.steps) or leaf.how
    if leaf.rounds:
        how = f"{plural(leaf.rounds, 'round')} of {how}"
    sizes = (
        sum(leaf_move.wire_bytes for leaf_move in leaves),
        sum(leaf_move.lower_bound_bytes for leaf_move in leaves),
        leaf.peak_bytes,
    )
    return (
        name,
        str(len(leaves)),
        f"{leaf.dtype}{list(leaf.shape)}",
        how,
        *map(_size, sizes),
    )


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"
