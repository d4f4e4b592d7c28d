"""The search for the fastest mesh and rules of a step that fit in memory."""

import concurrent.futures
import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from jaxtyping import PyTree

from .. import chips
from .._ground.errors import MeshError, ProgramError, RuleError, check_type
from .._ground.misuse import called
from .._ground.text import bytes_text, plural
from .._rules import AxisRules
from .._step import Target, bytecode, explicit_mesh, untraced, without_mesh
from ..cost._foreseen import TEMPORARIES
from ._asked import (
    SearchOptions,
    noted,
    require_arrays,
    require_options,
    search_options,
    trace,
    without_shardings,
)
from ._budget import program_counts, scheduled_count
from ._candidate import Candidate, comparison_texts, rank, without_twins
from ._limits import Limits
from ._measured import devices_for, measured
from ._namer import named_classes
from ._programs import LoweredStep, Tell
from ._scheduled import settled, target_for
from ._space import MODEL, Space, by_hand, fastest, neighbours
from ._trials import Trials


_THREADS = 2
# The number of candidates by estimate that join the well-known ones.
_DRAWN = 12
# The number of programs reserved for other mesh axis sizes, and the number of best
# candidates for which other sizes are tried.
_RESERVED_FOR_SIZES = 8
_BEST_WITH_OTHER_SIZES = 3
# A constrained step must be this much faster to be preferred: the order of two
# programs whose estimates differ by less is not known.
_MOST_OF_UNCONSTRAINED = 0.95
_ADVICE_IF_NOTHING_FITS = "use more devices, a smaller batch, or remat"
# The number of candidates behind those to return that libtpu is asked about.
_BEHIND = 2
# The number of candidates that are compiled on request.
COMPILED = 12
_NO_LIMITS = Limits()
# With the least effort: the largest number of programs; the relative difference of two
# estimated times below which both are partitioned; and the part of a device's memory
# above which foreseen bytes do not say that a step fits.
_MOST_WITH_LEAST_EFFORT = 4
_MOST_OF_FASTEST_ESTIMATE = 1.05
_DOUBTFUL = 1 / TEMPORARIES.most


@called("search(step, *args, devices=8)", mesh="`devices=`", target="`devices=`")
def search(
    step: object,
    *args: PyTree,
    devices: int | str | Sequence[object],
    chip: str | chips.Chip | None = None,
    slices: int | None = None,
    keep: int = 5,
    verify: Literal["compile", "run"] | None = None,
    also: Iterable[AxisRules] = (),
    closely: int = COMPILED,
    limits: Limits = _NO_LIMITS,
    effort: Literal["usual", "least"] = "usual",
    progress: Tell | None = None,
) -> tuple[Candidate, ...]:
    """Finds the fastest meshes and rules for a step that fit in memory.

    The search names the step's dimensions as [`shardfx.auto.name_axes`][] does, and
    estimates the time and memory of all meshes of up to four axes. Then XLA partitions
    the step for the best meshes and for well-known strategies such as data and tensor
    parallelism; for other meshes only if they may be faster by the estimate. The best
    few are also partitioned with intermediate values constrained by
    [`shardfx.auto.constrain_step`][], and the faster program is kept. A candidate has
    the numbers of its program.

    For TPUs, libtpu is asked about the best candidates where it is installed: at most
    eight questions, and fewer for a large step, so that they take about 20 seconds.
    These candidates are then ordered by libtpu's bytes. What does not fit by its
    memory is dropped. `progress` receives a line for each.

    **Arguments:**

    - `step`: a function, or a function jitted by `jax.jit`, `equinox.filter_jit` or
      [`shardfx.filter_jit`][]; or what the `.trace` of the last or of `jax.jit`
      returned, alone. Its donation counts; its shardings do not, since the search
      chooses them.
    - `args`: the arguments of the step: arrays or structs, in any trees. A step that is
      written for a mesh with Explicit axes is searched without its shardings. Call
      `jax.set_mesh` first, or pass arguments on the mesh, so that its axes are known.
    - `devices`: the number of devices; a slice as "tpu:v5p:4x4x4", which names the chip
      too, or two slices as "tpu:v5p:4x4x4*2"; emulated CPU devices as "cpu:8"; or JAX's
      own, as `jax.devices()`.
    - `chip`: the kind of the devices; see [`shardfx.chips.find`][].
    - `slices`: the number of slices (or nodes of GPUs) that the hosts' network
      connects; by default what `devices` says, else 1. Of JAX's own devices it
      has priority over what they say.
    - `keep`: the largest number of candidates to return.
    - `verify`: "compile" compiles the best candidates and the well-known strategies:
      for the slice if `devices` names one and libtpu is installed, else for as many of
      JAX's devices. Candidates that do not fit are dropped, and the others are sorted
      by the time of their compiled programs. "run" also runs the candidates in turn on
      the devices, with new arrays, and sorts them by the measured time.
    - `also`: rules for names that [`shardfx.auto.name_axes`][] finds. The search treats
      them as well-known strategies, and chooses the sizes of their mesh axes.
    - `closely`: the number of best candidates that `verify` compiles. The well-known
      strategies and those of `also` are compiled whatever their rank.
    - `limits`: see [`shardfx.auto.Limits`][].
    - `effort`: "least" partitions one candidate, the fastest by the estimate, and the
      next one only if the first may not fit or is estimated within 5 % of it. It
      neither tries other sizes nor constrains intermediate values, and does not ask
      libtpu.
    - `progress`: a function that receives a line of text for each candidate that is
      partitioned, compiled or run.

    **Returns:**

    The candidates, the fastest first. If none fits in memory, the result is the one
    candidate that needs the least memory, with a reason. Above 2,048 devices, numbers
    are extrapolated from programs for smaller meshes. Up to there, a candidate that
    [`shardfx.testing.verify`][] refutes is dropped, if its program has at most 4,000
    operations: libtpu's own program for those that libtpu is asked about.

    **Raises:**

    `MeshError` for devices that cannot be read or slices that do not divide them;
    `RuleError` for limits with names that the step lacks; `SpecError` if no mesh of
    these devices divides the step's dimensions; `LeafTypeError` for arguments without
    arrays, and for a traced step with keyword arguments, Explicit axes or modules of
    `flax.nnx`; `ProgramError` if XLA cannot partition the step at all, for example
    because the step constrains arrays over a mesh of its own, or computes it wrongly
    under each candidate; the errors of tracing the step, with a note.

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
    function, args = untraced(step, args)
    explicit = explicit_mesh(args)
    if explicit is not None:
        require_arrays(args)
        with noted(args):
            searched = without_shardings(function, args, explicit)
        with without_mesh():
            return search(
                searched.step,
                *searched.args,
                devices=devices,
                chip=chip,
                slices=slices,
                keep=keep,
                verify=verify,
                also=also,
                closely=closely,
                limits=limits,
                effort=effort,
                progress=progress,
            )

    tell = progress or (lambda _: None)
    require_options(keep, closely, verify)
    _require_effort(effort)
    options = search_options(devices, chip, slices)
    compile_targets = _compile_targets(verify, options, devices)
    space, lowered = opened_search(
        step=function,
        args=args,
        options=options,
        limits=limits,
        also=also,
        tell=tell,
    )
    tell(f"estimating meshes of {options.total} devices")
    candidates, usual_titles = _tried(space, lowered, effort, keep=keep, tell=tell)
    if verify is not None and candidates[0].fits:
        chosen = _to_measure(candidates, closely, usual_titles)
        runs = verify == "run"
        candidates = measured(lowered, chosen, compile_targets, tell, runs=runs)
    asks_libtpu = verify is None and effort == "usual"
    # libtpu is not installed, or knows no such devices.
    if asks_libtpu and target_for(lowered, options, candidates[0]) is None:
        asks_libtpu = False
    if asks_libtpu:
        candidates = _asked_of_libtpu(
            lowered=lowered,
            options=options,
            candidates=candidates,
            keep=keep,
            tell=tell,
        )
    return _result(
        lowered=lowered,
        candidates=candidates,
        keep=keep,
        tell=tell,
        asks_libtpu=asks_libtpu,
    )


def _tried(
    space: Space,
    lowered: LoweredStep,
    effort: str,
    *,
    keep: int,
    tell: Tell,
) -> tuple[list[Candidate], set[str]]:
    """The candidates, with the numbers of their programs, and the titles of those that
    come from usual strategies or the caller's rules. With the least effort none do.
    """
    if effort == "least":
        return _few_candidates(space, lowered, tell), set()
    return candidates_of(space, lowered, keep, tell)


def _compile_targets(
    verify: str | None,
    options: SearchOptions,
    devices: int | str | Sequence[object] | None,
) -> tuple[object, ...]:
    """The devices for which candidates are compiled; none without `verify`."""
    if verify is None:
        return ()
    jax_devices = None
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        jax_devices = devices
    return devices_for(verify, options, jax_devices)


def _to_measure(
    candidates: Sequence[Candidate],
    closely: int,
    usual_titles: set[str],
) -> list[Candidate]:
    """The candidates that fit, of the first `closely` and those of usual titles."""
    chosen = []
    for number, candidate in enumerate(candidates):
        is_chosen = number < closely or candidate.title in usual_titles
        if candidate.fits and is_chosen:
            chosen.append(candidate)
    return chosen


def _result(
    lowered: LoweredStep,
    candidates: Sequence[Candidate],
    keep: int,
    tell: Tell,
    asks_libtpu: bool,
) -> tuple[Candidate, ...]:
    """The best `keep` of the candidates that fit, with reasons; the smallest candidate
    if none fits. With `asks_libtpu`, those that are computed wrongly were dropped
    before, by libtpu's programs.
    """
    if not candidates[0].fits:
        return (_smallest(candidates),)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not asks_libtpu:
        fitting = _without_refuted(lowered, fitting, keep, tell)
    return _with_reasons(fitting, keep)


def _require_effort(effort: str) -> None:
    """Raises `RuleError` for an effort that `search` does not know."""
    if effort not in ("usual", "least"):
        raise RuleError(
            f'`effort={effort!r:.40}` is no effort of `search`; use "usual" or "least".'
        )


def _with_reasons(candidates: Sequence[Candidate], keep: int) -> tuple[Candidate, ...]:
    """The first `keep` candidates, each with what the next two cost instead."""
    results = []
    for number, candidate in enumerate(candidates[:keep]):
        reasons = comparison_texts(candidate, candidates[number + 1 : number + 3])
        results.append(dataclasses.replace(candidate, reasons=tuple(reasons)))
    return tuple(results)


def _asked_of_libtpu(
    lowered: LoweredStep,
    options: SearchOptions,
    candidates: Sequence[Candidate],
    keep: int,
    tell: Tell,
) -> list[Candidate]:
    """The candidates that libtpu partitions rightly, the first few with its bytes and
    memory. Candidates that fit in memory come first. libtpu is asked at most as often as
    its time allows (`most`), and until `enough` candidates fit.
    """
    module = lowered.plain.module(lowered.platform)
    most = scheduled_count(len(bytecode(module)))
    enough = min(most, keep + _BEHIND)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        target_of = ft.partial(target_for, lowered, options)
        fitting = _without_refuted(
            lowered=lowered,
            fitting=fitting,
            keep=enough,
            tell=tell,
            target_of=target_of,
        )
    too_large = [candidate for candidate in candidates if not candidate.fits]
    too_large.sort(key=lambda candidate: candidate.memory_bytes)
    answers = settled(
        lowered=lowered,
        options=options,
        candidates=[*fitting, *too_large],
        enough=enough,
        most=most,
        tell=tell,
    )
    return [*answers.fitting, *answers.too_large]


def _without_refuted(
    lowered: LoweredStep,
    fitting: Sequence[Candidate],
    keep: int,
    tell: Tell,
    target_of: Callable[[Candidate], Target | None] = lambda candidate: None,
) -> list[Candidate]:
    """The candidates without those that XLA's partitioner computes wrongly, or libtpu's
    for the slices that `target_of` names. They are judged in order until `keep` are
    right, and the rest follow unjudged. Raises `ProgramError` if none is right.
    """
    right: list[Candidate] = []
    remaining = list(fitting)
    last = ""
    while remaining and len(right) < keep:
        candidate = remaining.pop(0)
        refutations = lowered.refutations(candidate, target_of(candidate))
        if refutations:
            last = str(refutations[0])
            tell(f"dropped {candidate.title}: {last}")
        else:
            right.append(candidate)
    if not right:
        raise ProgramError(
            "XLA's partitioner computes this step wrongly under each of the"
            f" {plural(len(fitting), 'candidate')} that fit in memory, the last one by"
            f" {last}"
        )
    return right + remaining


def _smallest(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that needs the least memory, with the reason that none fits."""
    least = min(candidates, key=lambda candidate: candidate.memory_bytes)
    memory = f"{bytes_text(least.memory_bytes)} of {bytes_text(least.limit_bytes)}"
    reason = f"nothing fits: this takes least, {memory}; {_ADVICE_IF_NOTHING_FITS}"
    return dataclasses.replace(least, reasons=(reason,))


def opened_search(
    step: Callable[..., object],
    args: Sequence[PyTree],
    options: SearchOptions,
    limits: Limits,
    also: Iterable[AxisRules],
    tell: Tell,
) -> tuple[Space, LoweredStep]:
    """The search space of a step on the devices of `options`, and the step lowered for
    XLA to partition. Each of the rules `also` gives a strategy that the search tries
    like the usual ones.
    """
    if options.total == 1:
        raise MeshError(
            "one device needs no plan: `search` chooses how several share the work."
        )
    check_type(
        what="limits",
        value=limits,
        expected=Limits,
        error=RuleError,
        fix="write `limits=shardfx.auto.Limits(never=(...))`",
    )
    # Iterating over one `AxisRules` raises an error that does not name `also`.
    is_collection = isinstance(also, Iterable) and not isinstance(also, AxisRules)
    all_rules = tuple(also) if is_collection else ()
    are_rules = all(isinstance(rules, AxisRules) for rules in all_rules)
    if not is_collection or not are_rules:
        raise RuleError(
            f"`also`, of type {type(also).__name__}, must be a sequence that holds"
            " `AxisRules` alone; write `also=[rules]`."
        )
    require_arrays(args)
    tell("propagating axis assignments through the step")
    with noted(args):
        traced = trace(step, *args)
    space = Space(
        classes=named_classes(traced), hardware=options, limits=limits, also=all_rules
    )
    return space, LoweredStep(step=step, traced=traced, chip=options.chip, model=MODEL)


def candidates_of(
    space: Space,
    lowered: LoweredStep,
    keep: int,
    tell: Tell,
) -> tuple[list[Candidate], set[str]]:
    """The candidates of a search, with the numbers of their partitioned programs, and a
    set of titles.

    Candidates that fit in memory come first, the fastest first. At least `keep`
    candidates are tried. The titles are those of the candidates that come from usual
    strategies or from the caller's rules.

    The usual strategies are partitioned first, then the best by the estimate (`drawn`)
    and other strategies as far as the counts of programs allow, then other sizes.
    """
    module = lowered.plain.module(lowered.platform)
    counts = program_counts(len(bytecode(module)), space.devices)
    trials = Trials(
        lowered=lowered,
        states=lowered.states(space.classes),
        tell=tell,
    )
    # The best by the estimate.
    drawn = fastest(space, max(keep, min(_DRAWN, counts.plain)))
    usual = list(by_hand(space, space.usual))
    first = list(without_twins(filter(trials.has_room, usual)))

    second_best = by_hand(space, space.usual, 1)
    known = by_hand(space, space.known)
    others = itertools.chain(drawn, second_best, known)
    further = without_twins(filter(trials.has_room, others), first)
    reserved = min(_RESERVED_FOR_SIZES, counts.plain // 3)
    free = max(0, counts.plain - reserved - len(first))
    unusual = list(itertools.islice(further, free))
    # Nothing has room: a candidate that does not fit is returned, with a reason.
    if not first and not unusual:
        first = [*usual, *drawn][: counts.plain]
    trials.add(first)
    trials.add_close(unusual, keep)
    _try_other_sizes(space, trials, counts.plain)
    if not trials.partitioned:
        raise next(iter(trials.refused.values()))
    _constrain_best(trials, counts.constrained)

    # The title of a partitioned candidate may name ZeRO-1 and constraints, too.
    usual_titles = {candidate.title for candidate in usual}
    titles = set()
    for estimated, partitioned in trials.partitioned.items():
        if estimated.title in usual_titles:
            titles.add(partitioned.title)
    return sorted(trials.partitioned.values(), key=rank), titles


def _few_candidates(space: Space, lowered: LoweredStep, tell: Tell) -> list[Candidate]:
    """The first candidates by the estimate, with the numbers of their programs: as few
    as are needed to know that one fits and that no other is as fast.
    """
    trials = Trials(
        lowered=lowered,
        states=lowered.states(space.classes),
        tell=tell,
    )
    drawn = fastest(space, _DRAWN)
    with_room = list(filter(trials.has_room, drawn)) or drawn
    most_seconds = _MOST_OF_FASTEST_ESTIMATE * with_room[0].seconds
    for number, candidate in enumerate(with_room[:_MOST_WITH_LEAST_EFFORT]):
        is_close = candidate.seconds < most_seconds
        partitioned = trials.partitioned.values()
        if number and not is_close and any(map(_surely_fits, partitioned)):
            break
        trials.add([candidate])
    if not trials.partitioned:
        raise next(iter(trials.refused.values()))
    return sorted(trials.partitioned.values(), key=rank)


def _surely_fits(candidate: Candidate) -> bool:
    """Whether a candidate fits even if its program takes more than is foreseen."""
    return candidate.memory_bytes <= _DOUBTFUL * candidate.limit_bytes


def _try_other_sizes(space: Space, trials: Trials, most: int) -> None:
    """Tries mesh axis sizes next to those of the best few, until nothing is new or
    `most` programs are partitioned. The sizes are those of the estimate.
    `trials.partitioned` and `trials.refused` have the candidates tried so far.
    """
    while len(trials.partitioned) < most:
        best = trials.ranked()[:_BEST_WITH_OTHER_SIZES]
        nearby = itertools.chain.from_iterable(
            neighbours(space, other) for other in best
        )
        tried = [*trials.partitioned, *trials.refused]
        untried = without_twins(filter(trials.has_room, nearby), tried)
        remaining = most - len(trials.partitioned)
        candidates = list(filter(trials.is_close, untried))[:remaining]
        if not candidates:
            return
        trials.add(candidates)


def _constrain_best(trials: Trials, most: int) -> None:
    """Constrains intermediate values of up to `most` of the best candidates, and keeps
    the constrained step where it is better. `trials.partitioned` has, for each
    candidate by the estimate, the one with the numbers of its program.
    """
    ranked = trials.ranked()
    by_seconds = sorted(ranked, key=lambda candidate: candidate.seconds)
    chosen = []
    for candidate in dict.fromkeys([*ranked[:2], *by_seconds, *ranked]):
        # Constraints reduce communication. Under plain data parallelism, XLA's own
        # choice is good.
        names = {names for _, names in candidate.assignments}
        if names != {("batch",)}:
            chosen.append(candidate)
    chosen = chosen[:most]
    if not chosen:
        return
    _ = trials.lowered.constrainable  # once, and not in each thread
    partitioned = [trials.partitioned[candidate] for candidate in chosen]
    better = ft.partial(_better, trials.lowered)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        results = zip(chosen, pool.map(better, partitioned), strict=True)
        for number, (candidate, constrained) in enumerate(results, start=1):
            trials.tell(
                f"constrained candidate {number} of {len(chosen)}: {candidate.title}"
            )
            trials.partitioned[candidate] = constrained


def _better(lowered: LoweredStep, candidate: Candidate) -> Candidate:
    """`candidate`, or the same with the step's intermediate values constrained.
    Constraints must make the step faster by a twentieth, or make it fit in memory.
    """
    try:
        constrained = lowered.partitioned(candidate, constrained=True)
    except ProgramError:
        return candidate
    if candidate.fits != constrained.fits:
        return candidate if candidate.fits else constrained
    if constrained.seconds < _MOST_OF_UNCONSTRAINED * candidate.seconds:
        return constrained
    return candidate
