"""The search space of a step: axis assignments, their cost terms, and candidates made
of the best of them.

An axis assignment is the logical axes that one mesh axis shards, in order of
preference. A strategy is a tuple of numbers of assignments, one per mesh axis. A cost
term is a sum of work, bytes or traffic that the same assignments divide.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from .._ground.errors import RuleError, SpecError
from .._ground.spec import entry_axes
from .._plan import ShardPlan, plan
from .._rules import AxisRules, near
from ._asked import SearchOptions
from ._candidate import Candidate, axis_name, mesh_and_rules, without_twins
from ._classes import Classes
from ._core import AXES, CostModel, Estimate, Numbers, costs, find, rates_of
from ._cost_terms import CostTerms, cost_terms, sharded_axes
from ._layouts import AssignedLayout, Assignment, Layouts
from ._limits import Limits
from ._mesh_sizes import axis_sizes
from ._name_axes import names_trees, notes_of
from ._strategies import assignments_of, assignments_of_rules, well_known_strategies


# The largest number of axis assignments that are tried.
_MOST_ASSIGNMENTS = 79
MODEL = CostModel()


class Space:
    """The search space of a step: the axis assignments within the user's limits, with
    the step's cost terms.

    - `args`: the arguments of the step as `jax.ShapeDtypeStruct`s without shardings.
    - `hardware`, `devices`, `slices`: the devices, their number, and that of their
      slices.
    - `assigned`: for each axis assignment, by its number, the shardings and collectives
      of the step under it. Assignments with equal ones share a number.
    - `terms`: the arrays of `cost_terms` with the user's limits; empty without any
      assignment.
    - `usual`: the strategies from the caller's rules, and the usual ones, such as data
      parallelism.
    - `known`: other well-known strategies.
    - `limit_bytes`: the memory that the step may take on one device.
    """

    def __init__(
        self,
        classes: Classes,
        hardware: SearchOptions,
        limits: Limits,
        also: Sequence[AxisRules] = (),
    ):
        """Propagates the axis assignments of usual strategies, of the caller's rules
        `also`, and then others up to a number, through the step of `classes`. An axis
        assignment is the logical axes that one mesh axis may shard, the preferred one
        first; `number` numbers it. A strategy is the numbers of several assignments.
        """
        self.classes = classes
        self.hardware = hardware
        self.limits = limits
        self.devices = hardware.total
        self.slices = hardware.slices
        usable_bytes = hardware.chip.usable_hbm_bytes // hardware.chip.devices_per_chip
        self.limit_bytes = usable_bytes - limits.free_bytes
        self.args = classes.traced.structs
        self.names = names_trees(classes)
        self.layouts = Layouts(classes, self.devices)
        self.assigned: list[AssignedLayout] = []
        # The numbers of layouts, and of assignments, once they have one.
        self._number_of_layout: dict[object, int] = {}
        self._number_of_assignment: dict[Assignment, int | None] = {}

        never = frozenset(axis_numbers(limits.never, classes).values())
        whole = never | _never_sharded(classes)
        usual: list[Iterable[Assignment]] = []
        for rules in also:
            usual.append(assignments_of_rules(rules, classes, never).values())
        others: list[tuple[Assignment, ...]] = []
        if limits.rules is None:
            well_known = well_known_strategies(self.layouts, whole)
            usual += well_known.usual
            others = well_known.others
        self.usual = _by_number(usual, self.number)
        numbered_others = _by_number(others, self.number)
        self.known = [
            strategy for strategy in numbered_others if strategy not in self.usual
        ]

        assignments = assignments_of(self.layouts, whole)
        if limits.rules is not None:
            assignments = assignments_of_rules(limits.rules, classes, never).values()
        for assignment in assignments:
            if len(self.assigned) < _MOST_ASSIGNMENTS:
                self.number(assignment)
        self.terms = _limited(self) if self.assigned else {}

    def number(self, assignment: Assignment) -> int | None:
        """The number of an axis assignment, which it gets on first use; `None` for one
        that shards nothing.
        """
        if assignment in self._number_of_assignment:
            return self._number_of_assignment[assignment]
        layout = self.layouts.under(assignment)
        number = None
        if layout.used:
            key = (layout.events, layout.positions, layout.divided)
            number = self._number_of_layout.setdefault(key, len(self.assigned))
            if number == len(self.assigned):
                self.assigned.append(layout)
        self._number_of_assignment[assignment] = number
        return number

    def machine(self, limit_bytes: int | float = math.inf) -> Numbers:
        """The rates of one device of the search, which has at most `limit_bytes` of
        memory.
        """
        return rates_of(
            self.hardware.chip,
            self.devices,
            MODEL,
            limit_bytes=float(limit_bytes),
            extents=self.hardware.extents,
        )

    def names_of(self, layout: AssignedLayout) -> tuple[str, ...]:
        """The logical names that one mesh axis shards under `layout`, in its order of
        preference.
        """
        used = [number for number in layout.assignment if number in layout.used]
        return tuple(self.classes.axes[number].name for number in used)


def _by_number(
    strategies: Iterable[Iterable[Assignment]],
    number: Callable[[Assignment], int | None],
) -> list[tuple[int, ...]]:
    """The distinct strategies as sorted numbers of axis assignments, without
    assignments that shard nothing, for which `number` gives `None`. A strategy is left
    out if it has no assignment, more than four, or the same one twice. An axis
    assignment is the logical axes that one mesh axis may shard.
    """
    distinct: dict[tuple[int, ...], None] = {}
    for strategy in strategies:
        numbers = []
        for assignment in strategy:
            assignment_number = number(assignment)
            if assignment_number is not None:
                numbers.append(assignment_number)
        is_repeated = len(set(numbers)) < len(numbers)
        if 0 < len(numbers) <= AXES and not is_repeated:
            distinct[tuple(sorted(numbers))] = None
    return list(distinct)


def _never_sharded(classes: Classes) -> set[int]:
    """The numbers of the logical axes that are words of a raw key, or windows of
    convolutions.
    """
    numbers = set()
    for number, logical in enumerate(classes.axes):
        first_word, _, _ = logical.name.partition("_")
        if logical.name == "key_words" or first_word == "window":
            numbers.add(number)
    return numbers


def fastest(space: Space, keep: int) -> list[Candidate]:
    """The `keep` candidates with the least estimated time that fit in memory, or else
    with the least memory. Raises `SpecError` if no mesh within the limits divides the
    step's dimensions.
    """
    estimates = _estimates_of_all(space, space.limit_bytes)
    candidates = list(distinct_candidates(space, estimates, keep))
    if not candidates:
        estimates = _estimates_of_all(space)
        estimates.sort(key=lambda estimate: estimate.memory_bytes)
        candidates = list(distinct_candidates(space, estimates, min(keep, 8)))
    if not candidates:
        sizes = [
            f"{logical.name}={logical.size}"
            for logical in space.classes.unmerged_axes()
        ]
        raise SpecError(
            f"no mesh of {space.devices} devices divides the step's dimensions within"
            f" the limits ({', '.join(sizes)}); {_limits_to_loosen(space)}."
        )
    return candidates


def _estimates_of_all(
    space: Space,
    limit_bytes: int | float = math.inf,
) -> list[Estimate]:
    """The fastest estimates of all sets of axis assignments that take at most
    `limit_bytes` of a device; empty if the limits leave no assignment.
    """
    if not space.assigned:
        return []
    machine = space.machine(limit_bytes)
    return find(space.terms, machine, space.devices, space.slices)


def by_hand(
    space: Space,
    strategies: Sequence[tuple[int, ...]],
    place: int = 0,
) -> Iterator[Candidate]:
    """Yields one candidate for each strategy, with the mesh axis sizes that have the
    least estimated time. Sizes that fit in memory come first. `place` is 0 for the best
    sizes of each strategy, 1 for the second best. A strategy with fewer sizes yields
    none. A strategy is the number of an axis assignment for each mesh axis.
    """

    def order(estimate: Estimate) -> tuple[bool, float]:
        """A sort key: sizes that fit in memory come first, the fastest first."""
        is_too_large = estimate.memory_bytes > space.limit_bytes
        return is_too_large, estimate.seconds

    for strategy in strategies:
        sizes = axis_sizes(space.devices, len(strategy))
        ranked = sorted(_estimates(space, strategy, sizes), key=order)
        candidates = list(distinct_candidates(space, ranked, place + 1))
        yield from candidates[place:]


def neighbours(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Yields neighbours of `candidate`: the size of one mesh axis is halved, and that
    of another is doubled. The other axis may be new, with size 2. Its axis assignment
    then comes from a well-known strategy of one mesh axis.
    """
    numbers: dict[tuple[str, ...], int] = {}
    for number, layout in enumerate(space.assigned):
        numbers.setdefault(space.names_of(layout), number)
    # By the number of an axis assignment, the size of its mesh axis.
    sizes_of_candidate: dict[int, int] = {}
    for axis, names in candidate.assignments:
        sizes_of_candidate[numbers[names]] = candidate.mesh.shape[axis]
    if len(sizes_of_candidate) < len(candidate.assignments):
        return  # two axes shard the same names in the same order

    # With the axes that may be new, which have size 1 so far.
    sizes = dict(sizes_of_candidate)
    for strategy in (*space.usual, *space.known):
        if len(strategy) == 1:
            sizes.setdefault(strategy[0], 1)
    estimates: list[Estimate] = []
    for halved, doubled in itertools.product(sizes_of_candidate, sizes):
        if sizes[halved] % 2 != 0 or halved == doubled:
            continue
        new_sizes = dict(sizes)
        new_sizes[halved] //= 2
        new_sizes[doubled] *= 2
        used = tuple(number for number, size in new_sizes.items() if size > 1)
        if len(used) <= AXES:
            row = [new_sizes[number] for number in used]
            estimates += _estimates(space, used, np.array([row]))
    yield from distinct_candidates(space, estimates, len(estimates))


def _limited(space: Space) -> CostTerms:
    """The arrays of `cost_terms` with the user's limits. The array `least` gets the
    smallest numbers of shards. The arrays `limits`, `sizes` and `least` get one more
    row for each mesh axis that must exist. Raises `SpecError` if no mesh axis can shard
    a wanted name, `RuleError` for a mesh axis that no assignment has.
    """
    limits = space.limits
    terms = cost_terms(space.layouts, space.assigned)
    least_counts = dict.fromkeys(limits.always, 2) | dict(limits.least)
    used = sharded_axes(space.assigned)
    for name, number in axis_numbers(tuple(least_counts), space.classes).items():
        if number not in used:
            raise SpecError(
                f"`limits` wants {name!r} sharded, and no mesh axis of {space.devices}"
                " devices within the other limits divides its size"
                f" {space.classes.axes[number].size}; pad it, let `rules` shard it,"
                " take it out of `never`, or do not want it."
            )
        terms["least"][used.index(number)] = least_counts[name]

    # `_core.costs` refuses candidates whose shards do not divide a row's size, or are
    # fewer than its least. A required mesh axis is one more row, with the assignments of
    # its name. An axis of any size has size 0 in the row, since every number divides 0.
    axis_names = [axis_name(space.names_of(layout)) for layout in space.assigned]
    for name, size in limits.wanted_axes:
        if name not in axis_names:
            close = near(name, tuple(dict.fromkeys(axis_names)))
            raise RuleError(
                f"`limits` wants a mesh axis {name!r}, and no assignment of this step"
                f" is called so{close}; there"
                f" are {', '.join(sorted({*axis_names}))}."
            )
        row = {
            "limits": [name == other_name for other_name in axis_names],
            "sizes": size or 0,
            "least": size or 2,
        }
        for key, value in row.items():
            terms[key] = np.concatenate([terms[key], [value]])
    return terms


def axis_numbers(names: tuple[str, ...], classes: Classes) -> dict[str, int]:
    """The number of the logical axis with each of these names. Raises `RuleError` for a
    name that the step lacks.
    """
    numbers: dict[str, int] = {}
    for number, logical in enumerate(classes.axes):
        # An axis without roots was merged into another one.
        if logical.roots:
            numbers[logical.name] = number
    for name in names:
        if name not in numbers:
            raise RuleError(
                f"`limits` names {name!r}, which no dimension of the step's arguments"
                f" has{near(name, tuple(numbers))}; there are"
                f" {', '.join(sorted(numbers))}. `name_axes(step, ...)` shows where"
                " each is."
            )
    return {name: numbers[name] for name in names}


def _limits_to_loosen(space: Space) -> str:
    """A text that names the user's limits without which there would be a candidate, or
    says that none of them alone is at fault.
    """
    loosened = list(_loosened(space.limits))

    def has_any(limits: Limits) -> bool:
        """Whether a mesh of the devices exists within the limits, however much memory
        it takes.
        """
        try:
            return bool(
                _estimates_of_all(
                    Space(classes=space.classes, hardware=space.hardware, limits=limits)
                )
            )
        except (SpecError, RuleError):
            return False

    singly = [text for text, limits in loosened if has_any(limits)]
    if singly:
        return f"without `{'`, or without `'.join(singly)}` there is one"
    if has_any(Limits()):
        texts = ", ".join(text for text, _ in loosened)
        return f"all of the limits together leave none: {texts}"
    return "pad one, or use another number of devices"


def _loosened(limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Yields each limit that is set, as a text, and the limits without it. A limit that
    is a tuple is taken apart: each of its entries is left out alone.
    """
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if isinstance(value, tuple):
            for entry in value:
                others = [other for other in value if other != entry]
                text = f"{field.name}={entry!r}"
                changed = {field.name: tuple(others)}
                yield text, dataclasses.replace(limits, **changed)
        elif value != field.default:
            text = field.name
            if not isinstance(value, AxisRules):
                text = f"{field.name}={value!r}"
            changed = {field.name: field.default}
            yield text, dataclasses.replace(limits, **changed)


def _estimates(
    space: Space,
    strategy: tuple[int, ...],
    sizes: np.ndarray,
) -> list[Estimate]:
    """The estimates of a strategy for each tuple of mesh axis sizes in `sizes` that
    divides its dimensions. The mesh axis that spans the slices is the first one whose
    size the number of slices divides. A strategy is the number of an axis assignment
    for each mesh axis.
    """
    can_span = sizes % space.slices == 0
    is_possible = can_span.any(axis=1)
    sizes = sizes[is_possible]
    first = can_span[is_possible].argmax(axis=1)
    is_spanning = np.arange(len(strategy)) == first[:, None]
    spans = np.where(is_spanning, space.slices, 1)
    # One row, since there is one set of assignments.
    seconds, memory = costs(
        terms=space.terms,
        machine=space.machine(),
        sets=np.array([strategy]),
        sizes=sizes,
        slices=spans,
    )
    estimates = []
    for number, step_seconds in enumerate(seconds[0].tolist()):
        # Sizes that do not divide a dimension have infinite seconds.
        if math.isfinite(step_seconds):
            estimate = Estimate(
                assignments=strategy,
                sizes=tuple(sizes[number].tolist()),
                slices=tuple(spans[number].tolist()),
                seconds=step_seconds,
                memory_bytes=memory[0, number].item(),
            )
            estimates.append(estimate)
    return estimates


def distinct_candidates(
    space: Space,
    estimates: Iterable[Estimate],
    keep: int,
) -> Iterator[Candidate]:
    """Yields up to `keep` candidates, made of the estimates in `estimates` in their
    order. Skips an estimate that no rules express, and one that shards the arguments as
    an earlier candidate does.
    """
    candidates = filter(None, (_candidate(space, estimate) for estimate in estimates))
    return itertools.islice(without_twins(candidates), keep)


def _agrees(
    space: Space,
    estimate: Estimate,
    plans: Sequence[ShardPlan],
    axes: tuple[str, ...],
) -> bool:
    """Whether `plans`, one for each argument of the step, shard the arguments as
    `estimate` assumes. `axes` are the names of the estimate's mesh axes. For each
    value, the `positions` of an assignment's layout have the sub-dimension that it
    shards; it is negative for none.
    """
    leaves = itertools.chain.from_iterable(plan.leaves for plan in plans)
    for value, leaf in zip(space.layouts.program.arguments, leaves, strict=True):
        expected: dict[int, set[str]] = {}
        for assignment, axis in zip(estimate.assignments, axes, strict=True):
            position = space.assigned[assignment].positions[value]
            if position >= 0:
                dim = _dim_at(space.layouts.roots[value], position)
                expected.setdefault(dim, set()).add(axis)
        planned: dict[int, set[str]] = {}
        for dim, entry in enumerate(leaf.spec):
            if entry is not None:
                planned[dim] = set(entry_axes(entry))
        if expected != planned:
            return False
    return True


def _dim_at(roots: Sequence[Sequence[int]], position: int) -> int:
    """The dimension of the sub-dimension at `position`. `roots` are the classes of the
    sub-dimensions of each dimension.
    """
    dims = []
    for dim, roots_of_dim in enumerate(roots):
        dims += [dim] * len(roots_of_dim)
    return dims[position]


def _candidate(space: Space, estimate: Estimate) -> Candidate | None:
    """The candidate of an estimate, with plans and rules; `None` if no rules shard the
    arguments as assumed.
    """
    orders = [space.names_of(space.assigned[number]) for number in estimate.assignments]
    names_of_step = [logical.name for logical in space.classes.unmerged_axes()]
    built = mesh_and_rules(orders, estimate, names_of_step)
    if built is None:
        return None
    mesh = built.mesh
    for name, size in space.limits.wanted_axes:
        # An axis that may have any size must be one of the mesh.
        possible_sizes = (size,) if size else mesh.axis_sizes
        if mesh.shape.get(name) not in possible_sizes:
            return None
    plans = []
    for arg, names in zip(space.args, space.names, strict=True):
        plans.append(plan(arg, mesh, names=names, axes=built.rules, unused="allow"))
    if not _agrees(space, estimate, plans, built.axes):
        return None
    return Candidate(
        mesh=mesh,
        rules=built.rules,
        assignments=tuple(zip(built.axes, orders, strict=True)),
        plans=tuple(plans),
        seconds=estimate.seconds,
        memory_bytes=math.ceil(estimate.memory_bytes),
        limit_bytes=space.limit_bytes,
        notes=notes_of(space.classes),
    )
