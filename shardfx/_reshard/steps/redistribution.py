"""Plans the steps that move an array between two shardings over the same devices, from
integers alone.

The kinds of steps are from Rink et al. 2021 (arXiv 2112.01075). `search` finds the
layouts between the steps.
"""

import dataclasses
import functools as ft
import math
from fractions import Fraction
from typing import NamedTuple

from .layout import Counts, StepLayout, missing_share
from .network import Network
from .paths import Path, StepKind, path_along
from .search import Problem, cheapest_route
from .splits import refine
from .times import PathTime, TorusTimes
from .wider_gathers import with_wider_gathers


@dataclasses.dataclass(frozen=True)
class MoveStep:
    """One collective (or local slice) of a move, along sub-axes of the mesh.

    **Arguments:**

    - `kind`: "slice" (local), "all_to_all", "permute" or "all_gather".
    - `source`, `target`: the layouts before and after the step, over sub-axes (parts of
      mesh axes) of the meshes before and after the move. Only a permute or a slice may
      lead from sub-axes of one mesh to sub-axes of the other mesh.
    - `wire_bytes`: the bytes that a device receives, as the mean over devices, rounded
      up.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another TPU slice (or
      node). If slices do not line up with mesh axes, it is an upper bound.
    - `peak_bytes`: the bytes of the shards that a device reads and writes in the step.
    """

    __module__ = "shardfx.results"

    kind: StepKind
    source: StepLayout
    target: StepLayout
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Redistribution:
    """The steps that move one array from one layout to another, with their traffic and
    memory.

    **Arguments:**

    - `steps`: the steps in order; none if every device already holds its target shard.
    - `wire_bytes`: the bytes that a device receives in all steps, as the mean over
      devices.
    - `dcn_bytes`: the bytes among `wire_bytes` that come from another TPU slice (or
      node). If slices do not line up with mesh axes, it is an upper bound.
    - `peak_bytes`: the most bytes of shards that a device holds at one time.
    - `lower_bound_bytes`: the bytes that a device must receive under any algorithm, as
      the mean over devices.
    """

    steps: tuple[MoveStep, ...]
    wire_bytes: int
    dcn_bytes: int
    peak_bytes: int
    lower_bound_bytes: int


@ft.lru_cache(maxsize=4096)
def redistribute(
    shape: tuple[int, ...],
    itemsize_bits: int,
    src: StepLayout,
    dst: StepLayout,
) -> Redistribution:
    """Plans the steps that move one array, with elements of `itemsize_bits`, between
    two layouts over the same devices. In a step a device holds the shard that it reads
    and the one that it writes, at most twice the larger shard of `src` and `dst`. The
    shard counts of both must divide `shape`. The result is cached. Raises `MeshError`
    if the layouts are not over the same devices.
    """
    # The search depends only on which shard counts divide the shape, so leaves of
    # different shapes share cached paths.
    divisible_counts = tuple(math.gcd(size, src.size) for size in shape)
    paths = paths_between(divisible_counts, src, dst)
    array_bits = math.prod(shape) * itemsize_bits
    return _measured(
        array_bits=array_bits,
        path=paths.fastest(array_bits / 8, src.network),
        bound=paths.bound,
        larger_shard=Fraction(1, min(src.shard_count, dst.shard_count)),
    )


# On a torus several messages of a permute may pass one link. So a path is also searched
# for at this price of a permute's byte. Over 300 random moves on a v5p, the faster of
# the two paths takes 0.85 of the time; with the prices 3 and 10 it is 0.85 too.
_PERMUTE_PRICE = 4.0


class Paths(NamedTuple):
    """The paths of a move among which its size decides, and a lower bound on the
    fraction of the array that a device receives.

    The first of the `paths` sends the fewest bytes. `times` has the time of each; it is
    empty where the network is not known.
    """

    paths: list[Path]
    times: list[PathTime]
    bound: Fraction

    def fastest(self, array_bytes: float, network: Network | None) -> Path:
        """The fastest path for an array of so many bytes."""
        if network is None or not self.times:
            return self.paths[0]
        seconds = [time.seconds(array_bytes, network) for time in self.times]
        return self.paths[seconds.index(min(seconds))]


@ft.lru_cache(maxsize=4096)
def paths_between(divisible_counts: Counts, src: StepLayout, dst: StepLayout) -> Paths:
    """Returns cheap paths from layout `src` to layout `dst`. `divisible_counts` has a
    number for each dimension, which the number of shards along it must divide.
    """
    # Both layouts over sub-axes, and the fraction of the array that a device lacks.
    source, target = refine(src, dst)
    bound = missing_share(source, target)
    if not bound:
        # Every device already holds its target shard. At most a slice is due.
        path = path_along([source.layout], [target.layout])
        return Paths(paths=[path], times=[], bound=bound)
    problem = Problem(divisible_counts, source, target)
    route = cheapest_route(problem)
    if not route:
        # `refine` multiplies prime sub-axes, and their product may be too large for
        # `divisible_counts`.
        prime_source, prime_target = refine(src, dst, prime=True)
        problem = Problem(divisible_counts, prime_source, prime_target)
        route = cheapest_route(problem)
    if route is None:
        raise AssertionError(
            "slices, all-to-alls and all-gathers of prime sub-axes lead everywhere;"
            " please report this move"
        )
    paths = [path_along(route.before, route.after)]
    times: list[PathTime] = []
    if src.network is not None:
        other = _path_with_fewer_permutes(paths[0], problem)
        if other is not None:
            paths.append(other)
        torus_times = TorusTimes(src, src.network)
        for path in tuple(paths):
            wider = with_wider_gathers(path, divisible_counts, torus_times)
            if wider != path:
                paths.append(wider)
        times = list(map(torus_times.of_path, paths))
    return Paths(paths=paths, times=times, bound=bound)


def _path_with_fewer_permutes(fewest: Path, problem: Problem) -> Path | None:
    """A path that sends fewer bytes by permutes than the path `fewest`, and more bytes
    in all, which may take less time on a torus. `None` if there is none, or if it sends
    more bytes between slices.
    """
    if all(step.kind != "permute" for step in fewest):
        return None
    priced = dataclasses.replace(problem, permute_price=_PERMUTE_PRICE)
    route = cheapest_route(priced)
    if route is None:
        return None
    path = path_along(route.before, route.after)
    dcn_share = sum(step.dcn_share for step in path)
    if dcn_share > sum(step.dcn_share for step in fewest):
        return None
    return path


def _measured(
    array_bits: int,
    path: Path,
    bound: Fraction,
    larger_shard: Fraction,
) -> Redistribution:
    """The steps of `path` with their bytes. `bound` and `larger_shard` are fractions of
    the array: what a device must receive, and the larger shard of source and target.
    """
    steps = []
    for step in path:
        source_bytes = _bytes(Fraction(array_bits, step.source.shard_count))
        target_bytes = _bytes(Fraction(array_bits, step.target.shard_count))
        move_step = MoveStep(
            kind=step.kind,
            source=step.source,
            target=step.target,
            wire_bytes=_bytes(array_bits * step.wire_share),
            dcn_bytes=_bytes(array_bits * step.dcn_share),
            peak_bytes=source_bytes + target_bytes,
        )
        steps.append(move_step)
    # Without steps a device holds its shard alone.
    peak_bytes = _bytes(array_bits * larger_shard)
    if steps:
        peak_bytes = max(step.peak_bytes for step in steps)
    return Redistribution(
        steps=tuple(steps),
        wire_bytes=_bytes(array_bits * sum(step.wire_share for step in path)),
        dcn_bytes=_bytes(array_bits * sum(step.dcn_share for step in path)),
        peak_bytes=peak_bytes,
        lower_bound_bytes=_bytes(array_bits * bound),
    )


def _bytes(bits: Fraction | int) -> int:
    """The bytes that hold so many bits, rounded up."""
    return math.ceil(Fraction(bits) / 8)
