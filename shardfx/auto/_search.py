"""The search for the fastest mesh and rules of a step that fit in memory, and for several batches and devices."""

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
from ._asked import SearchOptions, asked_for, noted, require_arrays, require_options, trace
from ._candidate import Candidate, against, ms, rank, without_twins
from ._name_axes import name_axes, named_classes
from ._priced import Pricer, Tell, devices_for, measured, zero_1
from ._space import MODEL, Limits, Space, by_hand, fastest, near


# The seconds that all programs of a search may take on two cores, as the step is written, and as it is constrained,
# which also traces and lowers it again; then the smallest and the largest number of programs.
_WRITTEN_SECONDS, _WRITTEN = 15.0, (6, 36)
_CONSTRAINED_SECONDS, _CONSTRAINED = 8.0, (2, 6)
# The seconds of one program: a fixed part, then per byte of StableHLO for partitioning, for constraining, and per
# device of XLA's client. They are measured once, since with a clock two hosts could look at different candidates.
_EACH, _BYTE, _CONSTRAINED_BYTE, _DEVICE = 0.1, 1 / 42_000, 1 / 20_000, 1 / 2_700
_THREADS = 2
# How many of the core's best candidates join those written by hand; how many programs are reserved for other sizes, and
# for how many of the best candidates these are tried.
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
    """Chooses the mesh and rules for a step: the fastest that fits in memory, and the runners-up.

    The step's dimensions are named as [`shardfx.auto.name_axes`][] does. Each mesh axis has an assignment: the order in
    which it prefers dimensions. The step is sharded under every assignment, and a compiled function prices all meshes
    of up to four assignments at once. XLA itself partitions the step as it is written under the best of these and under
    the usual strategies that people write by hand. The best few are also partitioned with the values between the
    arguments constrained, by [`shardfx.auto.constrain_step`][], and the better form is returned. All numbers are read
    off that program of one device.

    **Arguments:**

    - `step`: a function, or what `jax.jit`, `equinox.filter_jit` or [`shardfx.filter_jit`][] returned. Its
        donation counts. The search chooses the shardings of its arguments and results.
    - `args`: its arguments: arrays or structs, in any trees.
    - `devices`: the number of devices; a slice as "tpu:v5p:4x4x4", which names the chip too, or two of them as
        "tpu:v5p:4x4x4*2"; emulated CPU devices as "cpu:8"; or JAX's own, as `jax.devices()`.
    - `chip`: the kind of the devices; see [`shardfx.chips.find`][].
    - `slices`: the number of slices (or nodes of GPUs) of the devices, joined by the hosts' network, if `devices` does
        not say it.
    - `keep`: the largest number of candidates to return.
    - `verify`: "compile" compiles the best candidates and the usual strategies: for the slice if `devices` is one
        and libtpu is installed, else for as many of JAX's devices. The traffic, computation and memory of the compiled
        programs order the candidates, and candidates that do not fit are dropped. "run" also runs the candidates on the
        devices, in turn, with arrays that it makes, and orders them by the measured time.
    - `also`: rules by hand, over names that [`shardfx.auto.name_axes`][] finds, that are partitioned too, as the usual
        ones are. The sizes of their axes are chosen.
    - `closely`: the number of candidates to compile, beside the usual strategies and those of `also`.
    - `limits`: see [`shardfx.auto.Limits`][].
    - `progress`: a function that receives a line of text for each candidate that is partitioned, compiled or run.

    **Returns:**

    The candidates, the fastest first. If none fits in memory, the result is the one candidate that needs least
    memory, with a reason. Above 2,048 devices, programs on smaller meshes are read and extrapolated.

    **Raises:**

    `MeshError` for devices that cannot be read or slices that do not divide them; `RuleError` for limits with names
    that the step lacks; `SpecError` if no mesh of these devices divides the step's dimensions; `LeafTypeError` for
    arguments without arrays; `ProgramError` if XLA cannot partition the step at all, for example because it constrains
    its arrays over its own mesh; the errors of tracing the step, with a note.

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
    space, pricer = opened(step, args, asked, limits, also, tell)
    tell(f"pricing meshes of {asked.total} devices")
    found, usual = candidates_of(space, pricer, keep, tell)
    if verify is not None and found[0].fits:
        chosen = [one for at, one in enumerate(found) if one.fits and (at < closely or one.title in usual)]
        found = measured(pricer, chosen, targets, tell, runs=verify == "run")
    if not found[0].fits:
        least = min(found, key=lambda one: one.memory_bytes)
        held = f"{bytes_text(least.memory_bytes)} of {bytes_text(least.limit_bytes)}"
        return (dataclasses.replace(least, reasons=(f"nothing fits: this takes least, {held}; {_LESS}",)),)
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
) -> tuple[Space, Pricer]:
    """The search space of a step, and the traced step, ready for XLA to partition."""
    if asked.total == 1:
        raise MeshError("one device needs no plan: `search` chooses how several share the work.")
    require_arrays(args)
    tell("laying the step out under assignments")
    with noted(args):
        traced = trace(step, *args)
    return Space(named_classes(traced), asked, limits, also), Pricer(step, traced, asked.chip, MODEL)


def candidates_of(space: Space, pricer: Pricer, keep: int, tell: Tell) -> tuple[list[Candidate], set[str]]:
    """The candidates with the numbers of their partitioned programs: those that fit first, the fastest first. Also the
    titles of the usual and of the caller's strategies.
    """
    most, constrained = _counts(len(bytecode(pricer.plain.module(pricer.platform))), space.devices)
    drawn = fastest(space, max(keep, min(_DRAWN, most)))
    usual = [*by_hand(space, space.usual)]
    others = itertools.chain(drawn, by_hand(space, space.usual, 1), by_hand(space, space.known))
    states = pricer.states(space.classes)
    # Each candidate as the core prices it, with the numbers of its program, or with XLA's refusal.
    made: dict[Candidate, Candidate] = {}
    refused: dict[Candidate, ProgramError] = {}

    def has_room(one: Candidate) -> bool:
        """Whether a device has room for its shards of the arguments. If not, there is no need to partition."""
        return sum(plan.bytes_per_device for plan in (zero_1(one, states) or one).plans) <= one.limit_bytes

    def priced(one: Candidate) -> Candidate | ProgramError:
        """The candidate without constraints, with the optimizer's state sharded further if it does not fit
        otherwise.
        """
        try:
            found = pricer.priced(one)
            less = None if found.fits else zero_1(found, states)
            return found if less is None or not less.fits else min(found, pricer.priced(less), key=rank)
        except ProgramError as error:
            return error

    def add(ones: Sequence[Candidate]) -> None:
        # XLA partitions the next program while this one is read.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for one, found in zip(ones, pool.map(priced, ones), strict=True):
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
    # The core chose the sizes. Other sizes are tried around the best few, until these no longer change.
    while (left := most - len(made)) > 0:
        nearby = (other for one in ranked()[:_BEST] for other in near(space, one))
        new = [*itertools.islice(without_twins(filter(has_room, nearby), [*made, *refused]), left)]
        if not new:
            break
        add(new)
    if not made:
        raise next(iter(refused.values()))
    by_core = sorted(ranked(), key=lambda one: one.seconds)
    # Constraints reduce communication. Without sharded parameters there is little for the compiler to get wrong.
    worth = dict.fromkeys([*ranked()[:2], *by_core, *ranked()])
    worth = [one for one in worth if any(names != ("batch",) for _, names in one.assignments)][:constrained]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        better = pool.map(ft.partial(_better, pricer), [made[one] for one in worth])
        for number, (one, other) in enumerate(zip(worth, better, strict=True), start=1):
            tell(f"constrained candidate {number} of {len(worth)}: {one.title}")
            made[one] = other
    names = {one.title for one in usual}
    return sorted(made.values(), key=rank), {other.title for one, other in made.items() if one.title in names}


def _counts(size: int, devices: int) -> tuple[int, int]:
    """How many programs of `size` bytes the search partitions: without constraints, and with them."""
    # Larger meshes are read on three smaller ones.
    each = _EACH + size * _BYTE + devices * _DEVICE
    each = each if devices <= DIRECT else 3 * (_EACH + size * _BYTE + LARGEST * _DEVICE)
    pairs = (
        (_WRITTEN_SECONDS / each, _WRITTEN),
        (_CONSTRAINED_SECONDS / (each + size * _CONSTRAINED_BYTE), _CONSTRAINED),
    )
    written, constrained = (min(most, max(least, int(room))) for room, (least, most) in pairs)
    return written, constrained


def _better(pricer: Pricer, one: Candidate) -> Candidate:
    """The candidate as it is, or with sharding constraints if these make it clearly faster or make it fit."""
    try:
        other = pricer.priced(one, constrained=True)
    except ProgramError:
        return one
    if one.fits != other.fits:
        return one if one.fits else other
    return other if other.seconds < _WORTH * one.seconds else one


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """A candidate that no other candidate for its devices and batch beats in both time and memory."""

    __module__ = "shardfx.auto"

    batch: int
    candidate: Candidate

    @property
    def devices(self) -> int:
        """The number of devices of the candidate's mesh."""
        return self.candidate.mesh.size

    @property
    def per_second(self) -> float:
        """Examples per second."""
        return self.batch / self.candidate.seconds


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The points that [`shardfx.auto.frontier`][] found, by devices, batch and seconds. `str(...)` is a table."""

    __module__ = "shardfx.auto"

    points: tuple[FrontierPoint, ...]

    def of(self, devices: int, batch: int) -> tuple[FrontierPoint, ...]:
        """The points for these devices and this batch: the fastest first, each next one slower with less memory."""
        return tuple(point for point in self.points if (point.devices, point.batch) == (devices, batch))

    def fastest(self) -> tuple[FrontierPoint, ...]:
        """The fastest point that fits, for each number of devices and batch that has one."""
        found: dict[tuple[int, int], FrontierPoint] = {}
        for point in self.points:
            if point.candidate.fits:
                found.setdefault((point.devices, point.batch), point)
        return tuple(found.values())

    def __str__(self) -> str:
        rows = [("devices", "batch", "a step", "examples/s", "a device", "fits", "mesh")]
        for point in self.points:
            one = point.candidate
            counts = str(point.devices), str(point.batch), ms(one.seconds), f"{point.per_second:.4g}"
            rows.append((*counts, bytes_text(one.memory_bytes), "yes" if one.fits else "no", one.title))
        return "\n".join(table(rows, right={"devices", "batch", "a step", "examples/s", "a device"}))

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
    """The time and memory of a step's best candidates, for several numbers of devices and sizes of the batch.

    Each batch size and number of devices is searched as by [`shardfx.auto.search`][]. A point is a candidate that no
    other partitioned candidate beats in both quantities.

    **Arguments:**

    - `step`, `args`: as of `search`.
    - `devices`: numbers, or slices as "tpu:v5e:4x4".
    - `chip`, `slices`, `limits`: as of `search`. Candidates that do not fit in memory stay in the
        result, and the table marks them.
    - `batches`: sizes of the dimension that [`shardfx.auto.name_axes`][] calls "batch"; the step is traced for each. By
        default the one that the arguments have.

    **Returns:**

    A [`shardfx.auto.Frontier`][].

    **Raises:**

    `RuleError` for batch sizes if no argument has a dimension with the name of the batch; `MeshError` for no devices,
    or for devices that cannot be read.

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
        raise MeshError("`devices` is empty; give numbers or slices, as `devices=(8, 16, 32)`.")
    points: list[FrontierPoint] = []
    names = name_axes(step, *args).names if batches else ()
    for these in asked:
        for given in [_resized(args, names, size) for size in batches] or [args]:
            space, pricer = opened(step, given, these, limits, (), lambda _: None)
            found, _ = candidates_of(space, pricer, _DRAWN, lambda _: None)
            size = next((group.size for group in space.classes.live() if group.name == "batch"), 0)
            least = math.inf
            for one in sorted(found, key=lambda one: (one.seconds, one.memory_bytes)):
                points += [FrontierPoint(size, one)] if one.memory_bytes < least else []
                least = min(least, one.memory_bytes)
    return Frontier(tuple(sorted(points, key=lambda point: (point.devices, point.batch, point.candidate.seconds))))


def _resized(args: Sequence[PyTree], names: Sequence[PyTree], size: int) -> list[PyTree]:
    """The arguments with a batch of another size."""
    found = False

    def resized(leaf: object, called: tuple[object, ...] | None) -> object:
        nonlocal found
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or called is None or "batch" not in called:
            return leaf
        found = True
        shape = (size if name == "batch" else old for name, old in zip(called, leaf.shape, strict=True))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    made = [jax.tree.map(resized, arg, called) for arg, called in zip(args, names, strict=True)]
    if not found:
        raise RuleError('`batches` needs a dimension called "batch", and `name_axes` finds none; leave `batches` out.')
    return made
