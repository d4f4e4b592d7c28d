"""A tree made of another one, whose arrays are live: each as soon as there is room for it."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import Tracer

from .._convert import TreeMap
from .._ground.errors import LeafTypeError, MeshError, MoveError
from .._ground.tree import flatten
from .._plan.target import Target, target_of
from .carry_out import least_limit_bytes
from .destinations import is_array
from .mapped.agreement import require_same_map
from .mapped.carry import Means, begun
from .mapped.copies import Shards
from .mapped.work import Leaf, Work, Works, works_of
from .move import has_devices, move_of


# Moves arrays as they are: a tree, its shardings, the limit, whether to give the arrays up, and whether by copies.
Reshard = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Journey:
    """A tree on its way into another.

    **Arguments:**

    - `arrays`: the source's arrays by path.
    - `target`: the tree that is made.
    - `works`: what there is to do for it.
    """

    arrays: Mapping[str, Any]
    target: Target
    works: Works


def journey_of(tree: Any, dst: Any, map: TreeMap, copies: bool) -> Journey:
    """Finds what there is to do, and raises where a map does not fit, before anything is moved."""
    flat = flatten(tree)
    if any(isinstance(leaf, Tracer) for leaf in flat.leaves):
        raise LeafTypeError(
            "`reshard(..., map=...)` moves live arrays, and this tree is traced; inside `jit` use "
            "`map.apply(tree, like)`, and constrain the result."
        )
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    arrays = {path: leaf for path, leaf, is_one in rows if is_one}
    for path, leaf in arrays.items():
        if not is_array(leaf):
            raise LeafTypeError(f"leaf `{path}` is a {type(leaf).__name__}, which holds no values to move.")
    target = target_of(dst, "reshard")
    sources = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype, _sharding(leaf)) for path, leaf in arrays.items())
    for path, leaf in target.arrays:
        if not has_devices(leaf.sharding):
            raise MeshError(
                f"leaf `{path}`: the target's mesh has no devices; use `plan.on(plan.mesh.build(jax.devices()))`."
            )
    targets = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype, leaf.sharding) for path, leaf in target.arrays)
    if jax.process_count() > 1:
        ends = dict.fromkeys(leaf.sharding for leaf in (*sources, *targets) if leaf.sharding is not None)
        require_same_map(map, tuple(sorted({device.process_index for end in ends for device in end.device_set})))
    return Journey(arrays, target, works_of(map, sources, targets, copies))


def _sharding(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf, jax.Array) else None


def through_map(
    tree: Any, dst: Any, map: TreeMap, reshard: Reshard, *, limit_bytes: int | None, donate: bool, copies: bool
) -> Any:
    """As `reshard` with a map.

    **Arguments:**

    - `reshard`: moves arrays as they are: takes a tree, shardings, a limit, and whether to give up the arrays.
    """
    journey = journey_of(tree, dst, map, copies)
    if limit_bytes is not None:
        _require_room(journey, limit_bytes, copies)
    works = journey.works.works
    given_up = _Donation(journey, collections.Counter(journey.works.readers)) if donate else None
    plain, others = ([work for work in works if (work.way == "plain") is is_plain] for is_plain in (True, False))
    with ThreadPoolExecutor(os.cpu_count() or 1, "shardfx-move") as pool:
        means = Means(
            journey.arrays,
            _by(reshard, limit_bytes),
            limit_bytes,
            journey.works.most_bytes,
            pool,
            Shards(journey.arrays),
        )
        making = _Making(means, given_up)
        path = plain[0].leaf.path if plain else ""
        try:
            making.made |= _moved_as_they_are(plain, journey, reshard, limit_bytes, given_up)
            for work in others:
                path = work.leaf.path
                making.begin(work)
            making.finish()
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise _stopped(path, making.whole(), len(works), error, donate) from error
    if given_up is not None:
        given_up.finish()
    return journey.target.filled([making.made[path] for path, _ in journey.target.arrays], {})


class _Making:
    """The arrays of the target, begun in order, a few of them under way at a time."""

    def __init__(self, means: Means, given_up: "_Donation | None"):
        self.made: dict[str, jax.Array] = {}
        self._means, self._given_up = means, given_up
        self._begun: collections.deque[tuple[Work, Callable[[], jax.Array]]] = collections.deque()
        self._under_way: collections.deque[jax.Array] = collections.deque()

    def begin(self, work: Work) -> None:
        """One more; waits for the oldest where too many are copied, and for all where sources are given up."""
        self._begun.append((work, begun(work, self._means)))
        most = _MOST_BEGUN if work.way == "copies" and self._given_up is None else 0
        while len(self._begun) > most:
            self._land()

    def finish(self) -> None:
        """Waits for what other threads copy."""
        while self._begun:
            self._land()

    def whole(self) -> dict[str, jax.Array]:
        """After an error elsewhere: what is there, with what was under way and arrives."""
        with contextlib.suppress(RuntimeError, ValueError, TypeError, MemoryError):
            self.finish()
        return self.made

    def _land(self) -> None:
        work, there = self._begun.popleft()
        array = self.made[work.leaf.path] = there()
        self._under_way.append(array)
        if self._given_up is not None:
            jax.block_until_ready(array)
            for name in self._given_up.read(work):
                self._means.forget(name)
        elif len(self._under_way) > _most_under_way(work):
            jax.block_until_ready(self._under_way.popleft())


# So many arrays keep all threads busy while one is begun.
_MOST_BEGUN = 16


def _most_under_way(work: Work) -> int:
    # Each program that is under way holds a thread per device of the CPU's runtime, which gives up when too many wait.
    return 2 if any(device.platform == "cpu" for device in work.devices) else 32


def _by(reshard: Reshard, limit_bytes: int | None) -> Callable[[jax.Array, Any], jax.Array]:
    return lambda x, sharding: reshard(x, sharding, limit_bytes, False)


class _Donation:
    """Gives up each array of the source when the last of the target that is made of it is there."""

    def __init__(self, journey: Journey, left: collections.Counter):
        self.arrays, self.left, self.kept = journey.arrays, left, set[int]()
        # An array that is in the tree more than once is given up with the last of its places.
        self.places = collections.Counter(id(leaf) for leaf in journey.arrays.values())

    def is_last(self, path: str) -> bool:
        """Whether one more reading of an array is the last, and nothing else in the tree is the same array."""
        return self.left[path] == 1 and self.places[id(self.arrays[path])] == 1

    def read(self, work: Work) -> list[str]:
        """One more array is made; what nothing is made of any more, and has been given up."""
        done = []
        for path in work.sources:
            self.left[path] -= 1
            if not self.left[path]:
                self._give_up(path)
                done.append(path)
        return done

    def keep(self, array: Any) -> None:
        """An array whose buffers a result shares."""
        self.kept.add(id(array))

    def finish(self) -> None:
        """Gives up what nothing was made of."""
        for path in self.arrays:
            if path not in self.left:
                self._give_up(path)

    def _give_up(self, path: str) -> None:
        array = self.arrays[path]
        self.places[id(array)] -= 1
        if isinstance(array, jax.Array) and not self.places[id(array)] and id(array) not in self.kept:
            array.delete()


def _moved_as_they_are(
    works: Sequence[Work], journey: Journey, reshard: Reshard, limit_bytes: int | None, given_up: _Donation | None
) -> dict[str, Any]:
    """The arrays of the target that are arrays of the source, moved together."""
    groups: dict[bool, list[Work]] = {}
    for work in works:
        donate = given_up is not None and given_up.is_last(work.sources[0])
        groups.setdefault(donate, []).append(work)
    made = {}
    for donate, group in groups.items():
        tree = {work.leaf.path: journey.arrays[work.sources[0]] for work in group}
        wanted = {work.leaf.path: work.leaf.sharding for work in group}
        made |= reshard(tree, wanted, limit_bytes, donate)
        for work in group if given_up is not None else ():
            assert given_up is not None
            array = journey.arrays[work.sources[0]]
            if isinstance(array, jax.Array) and work.leaf.sharding is not None:
                # Where nothing had to move, the result has the source's buffers.
                ends = (array.sharding, work.leaf.sharding)
                if move_of(tuple(array.shape), array.dtype, *ends).idle:
                    given_up.keep(array)
            given_up.read(work)
    return made


def _require_room(journey: Journey, limit_bytes: int, copies: bool) -> None:
    """Raises where some array cannot be made within the limit, before any is."""
    least = {work.leaf.path: _least_bytes(work, journey.arrays, copies) for work in journey.works.works}
    worst = max(journey.works.works, key=lambda work: least[work.leaf.path], default=None)
    if worst is not None and least[worst.leaf.path] > limit_bytes:
        bound = least[worst.leaf.path]
        raise MoveError(
            f"leaf `{worst.leaf.path}`, {worst.dtype}{list(worst.shape)}, needs {bound} bytes beside its source and "
            f"target, in the finest of pieces; `memory_limit_bytes={limit_bytes}` is too little. Nothing was moved; "
            f"pass `memory_limit_bytes={bound}` or more."
        )


def _least_bytes(work: Work, arrays: Mapping[str, Any], copies: bool) -> int:
    array = arrays[work.sources[0]] if work.way == "plain" else None
    if not isinstance(array, jax.Array) or work.leaf.sharding is None:
        return work.least_bytes
    return least_limit_bytes(move_of(tuple(array.shape), array.dtype, array.sharding, work.leaf.sharding, (), copies))


def _stopped(path: str, made: Mapping[str, Any], total: int, error: Exception, donate: bool) -> MoveError:
    moved = {**made, **(error.moved if isinstance(error, MoveError) else {})}
    listed = ", ".join(f"`{name}`" for name in list(moved)[:8]) + (", ..." if len(moved) > 8 else "")
    kept = "what these alone were made of was donated" if donate else "the tree itself is untouched"
    return MoveError(
        f"stopped at leaf `{path}` ({type(error).__name__}: {str(error).splitlines()[0][:300]}) after {len(moved)} of "
        f"{total} leaves: {listed or 'none'}; {kept}, and they are in the error's `moved`.",
        moved,
    )
