"""`plan_reshard`: plans the move of a tree as a value. No array is moved, and no device
is needed.
"""

import collections
import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import Sharding

from .._ground.boxes import Box
from .._ground.spec import DType
from .._ground.text import (
    between_numbers,
    first_lines,
    html_text,
    joined,
    plural,
    table,
    together,
)
from .packing import packed, unpacked
from .pieces.shard_part import Links
from .shardings import in_host_memory
from .steps.redistribution import MoveStep


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LeafMove:
    """How one array of a tree moves, and the cost of its move.

    **Arguments:**

    - `path`, `shape`, `dtype`: the path, shape and dtype of the array.
    - `src`, `dst`: the shardings before and after the move. For "pieces", `src` is the
      sharding of the first source array.
    - `how`: "in place" (nothing changes), "relabel" (every device already holds its
      shard, and only the mesh or the spec changes), "memory kind" (each device copies
      its shard to another of its memories), "steps" (collectives among the same
      devices), "tiles" (between two sets of devices, each new shard is assembled from
      the old shards that overlap it), or "pieces" (a `TreeMap` makes the array of parts
      of other arrays).
    - `source_bytes`, `target_bytes`: the bytes of a device's shard before and after the
      move. If a map makes several arrays of one source array, the source's bytes are
      counted for the last of them only.
    - `peak_bytes`: the most bytes of this array in a device's memory during the move,
      source and target included. A shard in host memory does not count, but its copy in
      device memory does.
    - `steps`: for "steps", the collectives in order. For "tiles" and "pieces" between
      TPU slices, the all-gathers inside each slice that follow.
    - `links`: for "tiles" and "pieces", the bytes that each sender sends to each
      receiver, by (sender, receiver). A device is given by its id, or in a mesh without
      devices by its position.
    - `missing`: the elements that only devices in `lost` hold, as boxes of (start,
      stop) per dimension.
    - `copied`: whether `reshard` copies between shards and runs no collectives, since
      all devices are CPU devices of this process and share its memory. The costs in
      this plan are those of devices with separate memories.
    - `wire_bytes`: the bytes that a device receives, as the mean over the target's
      devices.
    - `dcn_bytes`: the part of `wire_bytes` that comes from another slice (or node). For
      "steps" it is an upper bound if slices do not line up with mesh axes.
    - `lower_bound_bytes`: a lower bound on `wire_bytes` for any algorithm.
    - `made_of`: with a map, the paths of the source arrays of which this array is made.
    - `rounds`: for "pieces", the number of rounds in which shards are exchanged. In a
      round a device sends at most one part of a shard and receives at most one.
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
        hash=False,
        default_factory=dict,
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
        shardings = {"src": packed(self.src), "dst": packed(self.dst)}
        fields = {**vars(self), **shardings}
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
        source_bytes = 0 if in_host_memory(self.src) else self.source_bytes
        target_bytes = 0 if in_host_memory(self.dst) else self.target_bytes
        return source_bytes, target_bytes


def _unpickled(fields: dict[str, Any]) -> LeafMove:
    """The `LeafMove` whose fields `__reduce__` has written."""
    shardings = {"src": unpacked(fields["src"]), "dst": unpacked(fields["dst"])}
    return LeafMove(**{**fields, **shardings})


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
        """For each array that moves by collectives, these in order, by the array's
        path.
        """
        return {leaf.path: leaf.steps for leaf in self.leaves if leaf.steps}

    @property
    def moves(self) -> int:
        """The number of distinct moves. Arrays of equal shape, dtype, `src` and `dst`
        share a move.
        """
        kinds: set[object] = set()
        for leaf in self.leaves:
            if not leaf.idle:
                kinds.add((leaf.shape, str(leaf.dtype), leaf.src, leaf.dst))
        return len(kinds)

    @property
    def wire_bytes(self) -> int:
        """The bytes that a device receives of all arrays, as the mean over devices."""
        return sum(leaf.wire_bytes for leaf in self.leaves)

    @property
    def dcn_bytes(self) -> int:
        """The bytes that a device receives from other TPU slices (or nodes), of all
        arrays.
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
        held_bytes = 0
        extra_bytes = 0
        for leaf in self.leaves:
            source_bytes, target_bytes = leaf.held_bytes
            held_bytes += source_bytes
            if not leaf.idle:
                held_bytes += target_bytes
                leaf_bytes = source_bytes + target_bytes
                extra_bytes = max(extra_bytes, leaf.peak_bytes - leaf_bytes)
        return held_bytes + extra_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes of one device's shards in host memory, of all sources and targets.
        An array that does not move counts once.
        """
        total = 0
        for leaf in self.leaves:
            source_on_device, target_on_device = leaf.held_bytes
            total += leaf.source_bytes - source_on_device
            if leaf.target_bytes and not leaf.idle:
                total += leaf.target_bytes - target_on_device
        return total

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


def _lines(plan: ReshardPlan) -> Iterable[str]:
    """Yields the lines of a plan: a table with a row for arrays that move alike, a
    summary, and what else there is to say.
    """
    moving = [leaf for leaf in plan.leaves if not leaf.idle]
    groups = together(moving, _kind_of)
    head = ("array", "count", "shape", "move", "wire", "bound", "peak")
    yield from table([head, *map(_row, groups.values())], right=set())
    yield _summary(plan)
    idle = plan.in_place
    copied = sum(leaf.copied for leaf in plan.leaves)
    if copied:
        subject = "1 array takes" if copied == 1 else f"{copied} arrays take"
        yield (
            f"{subject} no steps here, where this CPU plays all devices: its memory holds"
            " both sides"
        )
    if idle:
        yield f"nothing to do for {plural(len(idle), 'array')}: {_listed(idle, 5, str)}"
    if plan.links:
        links = sorted(plan.links.items(), key=lambda link: -link[1])
        yield f"{len(links)} links: {_listed(links, 8, _link_text)}"
    for path, boxes in plan.missing.items():
        yield f"lost: `{path}` {_listed(boxes, 3, _box_text)}"


def _kind_of(leaf: LeafMove) -> tuple[object, ...]:
    """What the arrays of one row of the table have in common: their path but for the
    numbers in it, and their move.
    """
    return (
        between_numbers(leaf.path),
        leaf.shape,
        str(leaf.dtype),
        leaf.src,
        leaf.dst,
        leaf.rounds,
    )


def _summary(plan: ReshardPlan) -> str:
    """One sentence: the number of moves, what a device receives, and its memory."""
    count = len(plan.leaves) - len(plan.in_place)
    verb = "moves" if count == 1 else "move"
    moves = f"{plan.moves} different moves"
    if plan.moves == 1:
        moves = "1 move"
    text = (
        f"{plural(count, 'array')} {verb} by {moves}; per device"
        f" {_size(plan.wire_bytes)} enter (at least {_size(plan.lower_bound_bytes)}"
        f" must), {_size(plan.peak_bytes)} at the peak"
    )
    if plan.dcn_bytes:
        text += f"; {_size(plan.dcn_bytes)} of what enters come from other slices"
    return text


def _listed(values: Sequence[T], most: int, text_of: Callable[[T], str]) -> str:
    """The texts of the first `most` values, and an ellipsis for the others."""
    shown = ", ".join(map(text_of, values[:most]))
    if len(values) > most:
        shown += ", ..."
    return shown


def _link_text(link: tuple[tuple[int, int], int]) -> str:
    """A pair of devices and the bytes between them as text: `0 -> 4: 2 MiB`."""
    (sender, receiver), nbytes = link
    return f"{sender} -> {receiver}: {_size(nbytes)}"


def _box_text(box: Box) -> str:
    """A box as text: `[0:4, 8:16]`."""
    intervals = [f"{start}:{stop}" for start, stop in box]
    return f"[{', '.join(intervals)}]"


def _row(leaves: list[LeafMove]) -> tuple[str, ...]:
    """The cells of the table's row for `leaves`, which have one shape, dtype and move."""
    leaf = leaves[0]
    kinds = [step.kind for step in leaf.steps]
    if leaf.how != "steps":
        kinds.insert(0, leaf.how)
    how = " > ".join(kinds)
    if leaf.rounds:
        how = f"{plural(leaf.rounds, 'round')} of {how}"
    group = ReshardPlan(tuple(leaves))
    return (
        joined([other.path for other in leaves]),
        str(len(leaves)),
        f"{leaf.dtype}{list(leaf.shape)}",
        how,
        _size(group.wire_bytes),
        _size(group.lower_bound_bytes),
        _size(leaf.peak_bytes),
    )


def _size(count: int) -> str:
    """A number of bytes as text, in the largest unit of which there is one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"
