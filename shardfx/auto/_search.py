"""The search for the fastest mesh and rules of a step that fit in memory, and for
several batches and devices.
"""

import concurrent.futures
import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jaxtyping import PyTree

from .. import chips
from .._ground.errors import MeshError, ProgramError, RuleError
from .._ground.text import bytes_text, first_lines, html_text, table
from .._rules import AxisRules
from .._step import bytecode
from ..cost._estimate import DIRECT, LARGEST
from ._asked import (
    SearchOptions,
    asked_for,
    noted,
    require_arrays,
    require_options,
    trace,
)
from ._candidate import Candidate, against, ms, rank, without_twins
from ._name_axes import name_axes, named_classes
from ._programs import LoweredStep, Tell, devices_for, measured, zero_1
from ._space import MODEL, Limits, Space, by_hand, fastest, near


# The seconds that partitioning may take on two cores, and the smallest and the largest
# number of programs: for the step without constraints, and for the constrained step,
# which is also traced and lowered again.
_WRITTEN_SECONDS, _WRITTEN = 15.0, (6, 36)
_CONSTRAINED_SECONDS, _CONSTRAINED = 8.0, (2, 6)
# The seconds of one program: a fixed part; per byte of StableHLO, for partitioning and
# for constraining; per device. These numbers are not measured by each search, so that
# two hosts partition the same candidates.
_EACH, _BYTE, _CONSTRAINED_BYTE, _DEVICE = 0.1, 1 / 42_000, 1 / 20_000, 1 / 2_700
_THREADS = 2
# The number of candidates by estimate that join the well-known ones; of programs
# reserved for other mesh axis sizes; of best candidates for which other sizes are
# tried.
_DRAWN, _NEAR, _BEST = 12, 8, 3
# A constrained step must be this much faster to be preferred.
_WORTH = 0.99
_LESS = "use more devices, a smaller batch, or remat"
# The number of candidates that are compiled on request.
COMPILED = 12
_NO_LIMITS = Limits()


def search(
    step: Callable[..., object],
    *args: PyTree,
    devices: int | str | Sequence[object],
    chip: str | chips.Chip | None = None,
    slices: int = 1,
    keep: int = 5,
    verify: Literal["compile", "run"] | None = None,
    also: Sequence[AxisRules] = (),
    closely: int = COMPILED,
    limits: Limits = _NO_LIMITS,
    progress: Tell | None = None,
) -> tuple[Candidate, ...]:
    """Finds the fastest meshes and rules for a step that fit in memory.

    The search names the step's dimensions as [`shardfx.auto.name_axes`][] does, and
    estimates the time and memory of all meshes of up to four axes. Then XLA partitions
    the step for the best meshes and for well-known strategies such as data and tensor
    parallelism. The best few are also partitioned with intermediate values constrained
    by [`shardfx.auto.constrain_step`][], and the faster program is kept. A candidate
    has the numbers of its program.

    **Arguments:**

    - `step`: a function, or a function jitted by `jax.jit`, `equinox.filter_jit` or
      [`shardfx.filter_jit`][]. Its
        donation counts; its shardings do not, since the search chooses them.
    - `args`: the arguments of the step: arrays or structs, in any trees.
    - `devices`: the number of devices; a slice as "tpu:v5p:4x4x4", which names the chip
      too, or two slices as
        "tpu:v5p:4x4x4*2"; emulated CPU devices as "cpu:8"; or JAX's own, as
        `jax.devices()`.
    - `chip`: the kind of the devices; see [`shardfx.chips.find`][].
    - `slices`: the number of slices (or nodes of GPUs) that the hosts' network
      connects, if `devices` does not say it.
    - `keep`: the largest number of candidates to return.
    - `verify`: "compile" compiles the best candidates and the well-known strategies:
      for the slice if `devices` names
        one and libtpu is installed, else for as many of JAX's devices. Candidates that
        do not fit are dropped, and the others are sorted by the time of their compiled
        programs. "run" also runs the candidates in turn on the devices, with new
        arrays, and sorts them by the measured time.
    - `also`: rules for names that [`shardfx.auto.name_axes`][] finds. The search treats
      them as well-known strategies,
        and chooses the sizes of their mesh axes.
    - `closely`: the number of candidates to compile in addition to the well-known
      strategies and those of `also`.
    - `limits`: see [`shardfx.auto.Limits`][].
    - `progress`: a function that receives a line of text for each candidate that is
      partitioned, compiled or run.

    **Returns:**

    The candidates, the fastest first. If none fits in memory, the result is the one
    candidate that needs the least memory, with a reason. Above 2,048 devices, numbers
    are extrapolated from programs for smaller meshes.

    **Raises:**

    `MeshError` for devices that cannot be read or slices that do not divide them;
    `RuleError` for limits with names that the step lacks; `SpecError` if no mesh of
    these devices divides the step's dimensions; `LeafTypeError` for arguments without
    arrays; `ProgramError` if XLA cannot partition the step at all, for example because
    the step constrains arrays over a mesh of its own; the errors of tracing the step,
    with a note.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx

        def loss(params, x):
            hidden = jax.nn.relu(x @ params["up"])
            return jnp.mean((x + hidden @ params["down"]) ** 2)

        def step(params, x):
            grads = jax.grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        struct = jax.ShapeDtypeStruct
        up, down = struct((1024, 8192), "float32"), struct((8192, 1024), "float32")
        params = {"up": up, "down": down}
        x = struct((65536, 1024), "float32")
        best, *others = shardfx.auto.search(step, params, x, devices="tpu:v5e:2x4")
        print(best)
        print(best.code())
        assert best.mesh.size == 8 and best.fits and best.seconds <= others[0].seconds
        ```
    """
    tell = progress or (lambda _: None)
    require_options(keep, closely, verify)
    asked = asked_for(devices, chip, slices)
    given = None if isinstance(devices, int | str) else devices
    targets = () if verify is None else devices_for(verify, asked, given)
    space, lowered = opened(step, args, asked, limits, also, tell)
    tell(f"estimating meshes of {asked.total} devices")
    found, usual = candidates_of(space, lowered, keep, tell)
    if verify is not None and found[0].fits:
        chosen = [
            one
            for at, one in enumerate(found)
            if one.fits and (at < closely or one.title in usual)
        ]
        found = measured(lowered, chosen, targets, tell, runs=verify == "run")
    if not found[0].fits:
        least = min(found, key=lambda one: one.memory_bytes)
        held = f"{bytes_text(least.memory_bytes)} of {bytes_text(least.limit_bytes)}"
        return (
            dataclasses.replace(
                least, reasons=(f"nothing fits: this takes least, {held}; {_LESS}",)
            ),
        )
    fitting = [one for one in found if one.fits]
    return tuple(
        dataclasses.replace(one, reasons=tuple(against(one, fitting[at + 1 : at + 3])))
        for at, one in enumerate(fitting[:keep])
    )


def opened(
    step: Callable[..., object],
    args: Sequence[PyTree],
    asked: SearchOptions,
    limits: Limits,
    also: Sequence[AxisRules],
    tell: Tell,
) -> tuple[Space, LoweredStep]:
    """The search space of a step on the devices `asked`, and the step lowered for XLA
    to partition. Each of the rules `also` gives a strategy that the search tries like
    the usual ones.
    """
    if asked.total == 1:
        raise MeshError(
            "one device needs no plan: `search` chooses how several share the work."
        )
    require_arrays(args)
    tell("propagating axis assignments through the step")
    with noted(args):
        traced = trace(step, *args)
    return Space(named_classes(traced), asked, limits, also), LoweredStep(
        step, traced, asked.chip, MODEL
    )


def candidates_of(
    space: Space, lowered: LoweredStep, keep: int, tell: Tell
) -> tuple[list[Candidate], set[str]]:
    """The candidates of a search, with the numbers of their partitioned programs, and a
    set of titles.

    Candidates that fit in memory come first, the fastest first. At least `keep`
    candidates are tried. The titles are those of the candidates that come from usual
    strategies or from the caller's rules.
    """
    most, constrained = _counts(
        len(bytecode(lowered.plain.module(lowered.platform))), space.devices
    )
    drawn = fastest(space, max(keep, min(_DRAWN, most)))
    usual = [*by_hand(space, space.usual)]
    others = itertools.chain(
        drawn, by_hand(space, space.usual, 1), by_hand(space, space.known)
    )
    states = lowered.states(space.classes)
    # For each candidate as it is estimated, the candidate with the numbers of its
    # program, or XLA's error.
    made: dict[Candidate, Candidate] = {}
    refused: dict[Candidate, ProgramError] = {}

    def has_room(one: Candidate) -> bool:
        """Whether the shards of the arguments fit in a device's memory. If not, XLA
        need not partition the step.
        """
        return (
            sum(plan.bytes_per_device for plan in (zero_1(one, states) or one).plans)
            <= one.limit_bytes
        )

    def partitioned(one: Candidate) -> Candidate | ProgramError:
        """The candidate with the numbers of its program, under ZeRO-1 if only so it
        fits in memory; or XLA's error.
        """
        try:
            found = lowered.partitioned(one)
            less = None if found.fits else zero_1(found, states)
            return (
                found
                if less is None or not less.fits
                else min(found, lowered.partitioned(less), key=rank)
            )
        except ProgramError as error:
            return error

    def add(ones: Sequence[Candidate]) -> None:
        # XLA partitions one program while another one is parsed.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for one, found in zip(ones, pool.map(partitioned, ones), strict=True):
                if isinstance(found, ProgramError):
                    refused[one] = found
                else:
                    made[one] = found
                tell(f"partitioned candidate {len(made) + len(refused)}: {one.title}")

    def ranked() -> list[Candidate]:
        return sorted(made, key=lambda one: rank(made[one]))

    first = [*without_twins(filter(has_room, usual))]
    more = without_twins(filter(has_room, others), first)
    first += itertools.islice(more, max(0, most - min(_NEAR, most // 3) - len(first)))
    add(first or [*usual, *drawn][:most])
    # The sizes are those of the estimate. Sizes next to those of the best few are tried
    # until nothing is new.
    while (left := most - len(made)) > 0:
        nearby = (other for one in ranked()[:_BEST] for other in near(space, one))
        new = [
            *itertools.islice(
                without_twins(filter(has_room, nearby), [*made, *refused]), left
            )
        ]
        if not new:
            break
        add(new)
    if not made:
        raise next(iter(refused.values()))
    by_seconds = sorted(ranked(), key=lambda one: one.seconds)
    # Constraints reduce communication. Under plain data parallelism, XLA's own choice
    # is good.
    worth = dict.fromkeys([*ranked()[:2], *by_seconds, *ranked()])
    worth = [
        one for one in worth if any(names != ("batch",) for _, names in one.assignments)
    ][:constrained]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        better = pool.map(ft.partial(_better, lowered), [made[one] for one in worth])
        for number, (one, other) in enumerate(zip(worth, better, strict=True), start=1):
            tell(f"constrained candidate {number} of {len(worth)}: {one.title}")
            made[one] = other
    names = {one.title for one in usual}
    return sorted(made.values(), key=rank), {
        other.title for one, other in made.items() if one.title in names
    }


def _counts(size: int, devices: int) -> tuple[int, int]:
    """The number of programs that a search partitions: without constraints on
    intermediate values, and with them. `size` is the number of bytes of the step's
    StableHLO.
    """
    # Larger meshes are extrapolated from three smaller ones.
    each = _EACH + size * _BYTE + devices * _DEVICE
    each = each if devices <= DIRECT else 3 * (_EACH + size * _BYTE + LARGEST * _DEVICE)
    pairs = (
        (_WRITTEN_SECONDS / each, _WRITTEN),
        (_CONSTRAINED_SECONDS / (each + size * _CONSTRAINED_BYTE), _CONSTRAINED),
    )
    written, constrained = (
        min(most, max(least, int(room))) for room, (least, most) in pairs
    )
    return written, constrained


def _better(lowered: LoweredStep, one: Candidate) -> Candidate:
    """The candidate `one`, or the same with the step's intermediate values constrained.
    Constraints must make the step faster by a hundredth, or make it fit in memory.
    """
    try:
        other = lowered.partitioned(one, constrained=True)
    except ProgramError:
        return one
    if one.fits != other.fits:
        return one if one.fits else other
    return other if other.seconds < _WORTH * one.seconds else one


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """A candidate that no other candidate for the same devices and batch size beats in
    both time and memory.
    """

    __module__ = "shardfx.auto"

    batch: int
    candidate: Candidate

    @property
    def devices(self) -> int:
        """The number of devices of the candidate's mesh."""
        return self.candidate.mesh.size

    @property
    def per_second(self) -> float:
        """The number of examples per second of training."""
        return self.batch / self.candidate.seconds


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The points of [`shardfx.auto.frontier`][], sorted by devices, batch size and
    seconds. `str(...)` is a table.
    """

    __module__ = "shardfx.auto"

    points: tuple[FrontierPoint, ...]

    def of(self, devices: int, batch: int) -> tuple[FrontierPoint, ...]:
        """The points for these numbers of devices and examples, the fastest first; each
        next one takes less memory.
        """
        return tuple(
            point
            for point in self.points
            if (point.devices, point.batch) == (devices, batch)
        )

    def fastest(self) -> tuple[FrontierPoint, ...]:
        """The fastest point that fits in memory, for each number of devices and batch
        size that has one.
        """
        found: dict[tuple[int, int], FrontierPoint] = {}
        for point in self.points:
            if point.candidate.fits:
                found.setdefault((point.devices, point.batch), point)
        return tuple(found.values())

    def __str__(self) -> str:
        rows = [
            ("devices", "batch", "a step", "examples/s", "a device", "fits", "mesh")
        ]
        for point in self.points:
            one = point.candidate
            counts = (
                str(point.devices),
                str(point.batch),
                ms(one.seconds),
                f"{point.per_second:.4g}",
            )
            rows.append(
                (
                    *counts,
                    bytes_text(one.memory_bytes),
                    "yes" if one.fits else "no",
                    one.title,
                )
            )
        return "\n".join(
            table(rows, right={"devices", "batch", "a step", "examples/s", "a device"})
        )

    __repr__ = first_lines
    _repr_html_ = html_text


def frontier(
    step: Callable[..., object],
    *args: PyTree,
    devices: Sequence[int | str],
    chip: str | chips.Chip | None = None,
    slices: int = 1,
    batches: Sequence[int] = (),
    limits: Limits = _NO_LIMITS,
) -> Frontier:
    """The time and memory of a step's best candidates, for several numbers of devices
    and batch sizes.

    Each pair of a batch size and a number of devices is searched as by
    [`shardfx.auto.search`][].

    **Arguments:**

    - `step`, `args`: the function that is jitted, and its arguments: arrays or structs,
      in any trees.
    - `devices`: numbers of devices, or slices such as "tpu:v5e:4x4".
    - `chip`, `slices`: the kind of the devices, if `devices` does not name it, and the
      number of slices.
    - `limits`: see [`shardfx.auto.Limits`][]. Candidates that do not fit in memory
      stay, and the table marks them.
    - `batches`: sizes of the dimension that [`shardfx.auto.name_axes`][] names "batch";
      the step is traced for each. By
        default the batch size of the arguments.

    **Returns:**

    A [`shardfx.auto.Frontier`][].

    **Raises:**

    `RuleError` for batch sizes if no argument has a dimension with the name of the
    batch; `MeshError` for no devices, or for devices that cannot be read.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx

        def loss(params, x):
            return jnp.mean((x + jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

        def step(params, x):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

        struct = jax.ShapeDtypeStruct
        up, down = struct((1024, 8192), "bfloat16"), struct((8192, 1024), "bfloat16")
        params, x = {"up": up, "down": down}, struct((4096, 1024), "bfloat16")
        drawn = shardfx.auto.frontier(
            step, params, x, devices=("tpu:v5e:2x2", "tpu:v5e:4x4"), batches=(65536,)
        )
        print(drawn)
        few, many = drawn.of(4, 65536)[0], drawn.of(16, 65536)[0]
        assert many.candidate.seconds < few.candidate.seconds
        ```
    """
    asked = [asked_for(one, chip, slices) for one in devices]
    if not asked:
        raise MeshError(
            "`devices` is empty; give numbers or slices, as `devices=(8, 16, 32)`."
        )
    points: list[FrontierPoint] = []
    names = name_axes(step, *args).names if batches else ()
    for these in asked:
        for given in [_resized(args, names, size) for size in batches] or [args]:
            space, lowered = opened(step, given, these, limits, (), lambda _: None)
            found, _ = candidates_of(space, lowered, _DRAWN, lambda _: None)
            size = next(
                (
                    logical.size
                    for logical in space.classes.live()
                    if logical.name == "batch"
                ),
                0,
            )
            least = math.inf
            for one in sorted(found, key=lambda one: (one.seconds, one.memory_bytes)):
                points += [FrontierPoint(size, one)] if one.memory_bytes < least else []
                least = min(least, one.memory_bytes)
    return Frontier(
        tuple(
            sorted(
                points,
                key=lambda point: (point.devices, point.batch, point.candidate.seconds),
            )
        )
    )


def _resized(
    args: Sequence[PyTree], names: Sequence[PyTree], size: int
) -> list[PyTree]:
    """The arguments of a step with `size` elements in each dimension with the name
    "batch". `names` has for each argument the tree of its arrays' logical names. Raises
    `RuleError` if no dimension has this name.
    """
    found = False

    def resized(leaf: object, called: tuple[object, ...] | None) -> object:
        nonlocal found
        if (
            not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            or called is None
            or "batch" not in called
        ):
            return leaf
        found = True
        shape = (
            size if name == "batch" else old
            for name, old in zip(called, leaf.shape, strict=True)
        )
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    made = [
        jax.tree.map(resized, arg, called)
        for arg, called in zip(args, names, strict=True)
    ]
    if not found:
        raise RuleError(
            '`batches` needs a dimension called "batch", and `name_axes` finds none;'
            " leave `batches` out."
        )
    return made
