"""The results of a search: candidates, and the code of their meshes and rules."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from .._ground.spec import entry_axes
from .._ground.text import bytes_text, html_text
from .._plan import ShardPlan
from .._rules import AxisRules
from ..cost import Comparison, Traffic
from ..cost._traffic_rows import text_of
from ..topology import MeshSpec
from ._core import Estimate


By = Literal["estimate", "schedule", "compile", "run"]
# The origin of a candidate's numbers in words.
_SOURCE_TEXTS: dict[By, str] = {
    "estimate": "by the partitioned program",
    "schedule": "by libtpu's own program",
    "compile": "by the compiled program",
    "run": "as measured",
}
# The number of collectives that the text of a candidate shows.
_MOST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and rules for a step, with the cost of the step under them.

    **Arguments:**

    - `mesh`, `rules`: the mesh, and the rules from logical names to its axes.
    - `assignments`: pairs of a mesh axis and the logical names that it shards, in the
      axis's order of preference.
    - `plans`: a plan for each argument of the step.
    - `seconds`: the seconds of one step, measured after a run; else `compute_seconds`,
      plus the `exposed_seconds` of collectives that computation waits for, plus the
      `hidden_seconds` of others as far as they do not overlap.
    - `memory_bytes`, `limit_bytes`: the bytes that the step takes on one device, and
      the bytes that it may take.
    - `by`: the origin of these numbers. "estimate": the program of one device from
      XLA's own partitioner. "schedule": bytes and memory are libtpu's, computation is
      that of the partitioned program. "compile": the compiled program. "run": `seconds`
      is measured.
    - `traffic`: the collectives of the step, with their bytes and mesh axes.
    - `constrained`: whether the step is faster if [`shardfx.auto.constrain_step`][]
      constrains its intermediate values. Then all numbers, and `code()`, describe the
      constrained step.
    - `donated`: the numbers of the arguments that the step donates. If the step does
      not fit otherwise, also the arguments for which it returns an updated value.
    - `results`: for each result the number of the argument that has the same shardings,
      or `None`.
    - `state_over`, `states`: the mesh axes that shard the optimizer's state in addition
      to the axes of its parameters (ZeRO-1), and the numbers of the arguments with this
      state. `plans` has these axes, `rules` do not.
    - `reasons`: one text for each of the next two candidates, with its additional
      seconds and bytes. If no candidate fits in memory, a text that says so.
    - `notes`: one text for each kind of operation that was not understood.
    - `comparison`: the differences between the compiled and the partitioned program.
    """

    __module__ = "shardfx.auto"

    mesh: MeshSpec
    rules: AxisRules
    assignments: tuple[tuple[str, tuple[str, ...]], ...]
    plans: tuple[ShardPlan, ...]
    seconds: float
    memory_bytes: int
    limit_bytes: int
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    by: By = "estimate"
    traffic: Traffic = Traffic((), 1)
    constrained: bool = False
    donated: tuple[int, ...] = ()
    results: tuple[int | None, ...] = ()
    state_over: tuple[str, ...] = ()
    states: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def wire_bytes(self) -> int:
        """The bytes that one device receives in one step."""
        return self.traffic.wire_bytes

    @property
    def fits(self) -> bool:
        """Whether `memory_bytes` is at most `limit_bytes`."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def title(self) -> str:
        """A text with the mesh axes and the logical names that each shards:
        `data=4 (batch), tensor=2 (heads, mlp)`.
        """
        assignments = dict(self.assignments)
        parts = []
        for axis, size in self.mesh.shape.items():
            names = ", ".join(assignments[axis])
            parts.append(f"{axis}={size} ({names})")
        if self.state_over:
            parts.append(f"ZeRO-1 over {' x '.join(self.state_over)}")
        if self.constrained:
            parts.append("constrained")
        return ", ".join(parts)

    def code(self) -> str:
        """The text of a Python module with the mesh, the rules, and everything else
        that the numbers depend on.

        The module defines two functions. `plans_of(step, *args)` returns the plans of
        this candidate. `jitted(step, plans)` returns the jitted step, with constraints,
        donation and the shardings of the results.
        """
        return _code_of(self)

    def explain(self) -> str:
        """All collectives of the step as text, with their bytes, mesh axes and source
        lines.

        After `verify`, the text includes the differences between the compiled program
        and the estimate.
        """
        parts = [self._headline(), str(self.traffic), *self._lines_below()]
        if self.comparison is not None:
            parts.append(str(self.comparison))
        return "\n".join(parts)

    def __str__(self) -> str:
        lines = [
            self._headline(),
            *text_of(self.traffic, _MOST_ROWS),
            *self._lines_below(),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Candidate({self._headline()})"

    _repr_html_ = html_text

    def _headline(self) -> str:
        """The mesh, the seconds of a step, the bytes of a device, and the origin of
        these numbers. The parts of seconds that were measured are not known.
        """
        parts = ""
        if self.by != "run":
            computation = ms(self.compute_seconds)
            exposed = ms(self.exposed_seconds)
            hidden = ms(self.hidden_seconds)
            parts = (
                f" (computation {computation}, sending {exposed} and {hidden} beside"
                " computation)"
            )
        time = f"{ms(self.seconds)} a step{parts}"
        memory = f"{bytes_text(self.memory_bytes)} of {bytes_text(self.limit_bytes)}"
        return f"{self.title}: {time}, {memory}, {_SOURCE_TEXTS[self.by]}"

    def _lines_below(self) -> list[str]:
        """The lines below the collectives: ZeRO-1, donation, notes and reasons."""
        lines = []
        if self.state_over:
            # A name or a tuple of names, as `follow` takes them.
            over = self.state_over
            if len(self.state_over) == 1:
                over = self.state_over[0]
            lines.append(
                "ZeRO-1: the optimizer's state is cut over"
                f" {' x '.join(self.state_over)} too, the parameters are not:"
                " `shardfx.follow(optimizer.init, params_plan,"
                f" over={over!r})`"
            )
        if self.donated:
            donated = ", ".join(map(str, self.donated))
            lines.append(
                "it fits where results take over the memory of arguments: `jitted` in"
                f" `code()` donates {donated}"
            )
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, *self.reasons]


def rank(candidate: Candidate) -> tuple[bool, float]:
    """A sort key: candidates that fit in memory come first, the fastest first."""
    return not candidate.fits, candidate.seconds


def ms(seconds: float) -> str:
    """A number of seconds as text, in milliseconds with three digits."""
    if seconds >= 1:
        return f"{seconds * 1e3:,.0f} ms"
    return f"{seconds * 1e3:.3g} ms"


def without_twins(
    candidates: Iterable[Candidate],
    earlier: Iterable[Candidate] = (),
) -> Iterator[Candidate]:
    """Yields the candidates of `candidates` that are no duplicates of earlier ones or of
    `earlier`. Two candidates are duplicates if they divide all arguments into the same
    shards, and the same dimensions share a mesh axis.
    """
    seen = {_twin_key(candidate) for candidate in earlier}
    for candidate in candidates:
        key = _twin_key(candidate)
        if key not in seen:
            seen.add(key)
            yield candidate


def _twin_key(candidate: Candidate) -> object:
    """A key that is equal for two candidates if, and only if, they are duplicates.

    It has the slices that each mesh axis spans. For each dimension of each argument of
    the step, it has the sizes of the mesh axes that shard it, each with a number in the
    place of the axis's name: axes are numbered in the order of their first use.
    """
    mesh = candidate.mesh
    numbers: dict[str, int] = {}
    shards_of_leaves = []
    for plan in candidate.plans:
        for leaf in plan.leaves:
            shards_of_dims = []
            for dim, entry in enumerate(leaf.spec):
                for axis in entry_axes(entry):
                    size = mesh.axis_size((axis,))
                    if size > 1:
                        number = numbers.setdefault(axis, len(numbers))
                        shards_of_dims.append((dim, number, size))
            shards_of_leaves.append(tuple(shards_of_dims))
    return mesh.dcn_sizes, tuple(shards_of_leaves)


def comparison_texts(
    candidate: Candidate,
    others: Iterable[Candidate],
) -> Iterator[str]:
    """Yields, for each of `others`, a text that compares its seconds, traffic and
    memory with those of `candidate`.
    """
    for other in others:
        difference = _difference_text(
            other.seconds - candidate.seconds, candidate.seconds
        )
        differences = [difference]
        computation = _difference_text(
            other.compute_seconds - candidate.compute_seconds, candidate.seconds
        )
        if computation != _AS_FAST:
            differences.append(f"{computation} of it computation")
        wire = bytes_text(other.wire_bytes)
        if wire != bytes_text(candidate.wire_bytes):
            differences.append(f"{wire} sent")
        memory = bytes_text(other.memory_bytes)
        if memory != bytes_text(candidate.memory_bytes):
            differences.append(f"{memory} a device")
        yield f"{other.title}: {', '.join(differences)}"


_AS_FAST = "as fast"


def _difference_text(seconds: float, total_seconds: float) -> str:
    """A difference in seconds as text: "3 ms more", or "as fast" for at most a
    thousandth of `total_seconds`.
    """
    if abs(seconds) <= 1e-3 * total_seconds:
        return _AS_FAST
    comparison = "more" if seconds > 0 else "less"
    return f"{ms(abs(seconds))} {comparison}"


# The logical names by which a mesh axis is one of tensor parallelism.
_TENSOR_NAMES = frozenset("heads kv_heads query_groups mlp hidden vocab".split())
# The order of the axes in the mesh: tensor parallelism is innermost, and axes with
# other names are next to it.
_RANK_OF_AXIS = {"data": 0, "fsdp": 1, "context": 2, "expert": 3, "tensor": 5}
_RANK_OF_OTHERS = 4


def axis_name(order: Sequence[str]) -> str:
    """The usual name of a mesh axis, such as "fsdp". `order` are the logical names that
    it shards, by preference.
    """
    first = order[0]
    if first == "batch":
        return "data" if len(order) == 1 else "fsdp"
    if first == "experts":
        return "expert"
    if first == "sequence":
        return "context"
    if _TENSOR_NAMES.isdisjoint(order):
        return f"{first}_axis"
    return "tensor"


class MeshAndRules(NamedTuple):
    """The mesh and the rules of an estimate. `axes` are the names of the mesh axes in
    the order of the estimate, which may differ from that in the mesh.
    """

    mesh: MeshSpec
    rules: AxisRules
    axes: tuple[str, ...]


def mesh_and_rules(
    orders: Sequence[Sequence[str]],
    estimate: Estimate,
    names: Iterable[str],
) -> MeshAndRules | None:
    """The mesh and the rules of the estimate `estimate`.

    `orders` has, for each mesh axis, the logical names that it shards, in its order of
    preference. Rules list the names in one order. If the orders of two mesh axes
    contradict each other, the result is `None`. `names` are all names of the step;
    names that no mesh axis shards get a rule with the target `None`.
    """
    usual_names = [axis_name(order) for order in orders]
    axes = _distinct_names(usual_names)

    def mesh_rank(axis: int) -> tuple[int, int, int]:
        """A sort key: the outermost axis of the mesh comes first."""
        rank = _RANK_OF_AXIS.get(usual_names[axis], _RANK_OF_OTHERS)
        return (-estimate.slices[axis], rank, axis)

    in_mesh = sorted(range(len(axes)), key=mesh_rank)
    sizes = {}
    slices = {}
    for axis in in_mesh:
        sizes[axes[axis]] = estimate.sizes[axis]
        if estimate.slices[axis] > 1:
            slices[axes[axis]] = estimate.slices[axis]
    mesh = MeshSpec(sizes, dcn=slices or None)

    names_in_order = _merged_order(orders)
    if names_in_order is None:
        return None
    entries: list[tuple[str, object]] = []
    for name in names_in_order:
        # The mesh axis that prefers the name least is innermost.
        sharding = [axis for axis in in_mesh if name in orders[axis]]
        sharding.sort(key=lambda axis: orders[axis].index(name))
        # Then no other name has taken one of these axes before.
        is_always_first = all(orders[axis][0] == name for axis in sharding)
        sharding_axes = [axes[axis] for axis in sharding]
        entries += _rules_of(name, sharding_axes, with_fewer=not is_always_first)
    for name in sorted(set(names).difference(names_in_order)):
        entries.append((name, None))
    rules = AxisRules(entries, mesh_axes=mesh.axis_names)
    return MeshAndRules(mesh=mesh, rules=rules, axes=axes)


def _rules_of(
    name: str,
    axes: Sequence[str],
    *,
    with_fewer: bool,
) -> Iterator[tuple[str, object]]:
    """Yields the rule that shards a name over the mesh axes `axes`; `with_fewer`, then
    rules for fewer of these axes, in case that another name takes one. For a name over
    ("data", "tensor") and `with_fewer`, these are the rules for both, for "data" and
    for "tensor".
    """
    least = 1 if with_fewer else len(axes)
    for count in range(len(axes), least - 1, -1):
        for group in itertools.combinations(axes, count):
            yield name, group[0] if count == 1 else group


def _distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number after each that was there before: "data", "data_2"."""
    numbered = []
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        numbered.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return tuple(numbered)


def _merged_order(orders: Sequence[Sequence[str]]) -> list[str] | None:
    """Merges orders of names into one order that keeps each of them; `None` if they
    contradict each other. For (a, b) and (b, c): (a, b, c). For (a, b) and (b, a):
    `None`.
    """
    remaining = [list(order) for order in orders]
    names_in_order: list[str] = []
    while any(remaining):
        followers: set[str] = set()
        for order in remaining:
            followers.update(order[1:])
        heads = [order[0] for order in remaining if order]
        free = [head for head in heads if head not in followers]
        if not free:
            return None
        first = free[0]
        names_in_order.append(first)
        for order in remaining:
            if first in order:
                order.remove(first)
    return names_in_order


def _code_of(candidate: Candidate) -> str:
    """Python code that makes the plans of a candidate, and the jitted step."""
    mesh = candidate.mesh
    # Imports and lines that only some candidates need are empty for the others.
    follow = "follow, " if candidate.state_over else ""
    constrain_step = ""
    constrain_line = ""
    if candidate.constrained:
        constrain_step = "constrain_step, "
        constrain_line = (
            "    step = constrain_step(step, plans[0].jax_mesh or MESH, RULES)\n"
        )
    rules = [
        f"        ({_source_text(name)}, {_source_text(target)}),\n"
        for name, target in candidate.rules.rules
    ]
    follow_lines = []
    if candidate.state_over:
        follow_lines = [
            f"    plans[{which}] = follow(lambda state: state, plans[{which}],"
            f" over={_source_text(candidate.state_over)})\n"
            for which in candidate.states
        ]
    slices = {}
    for name, count in zip(mesh.axis_names, mesh.dcn_sizes, strict=True):
        if count > 1:
            slices[name] = count
    dcn = f", dcn={_source_text(slices)}" if slices else ""
    out_shardings = _out_shardings_of(candidate)
    donate = f", donate={_source_text(candidate.donated)}" if candidate.donated else ""
    comments = "\n# ".join(_comments_of(candidate))
    return f'''\
from shardfx import AxisRules, MeshSpec, filter_jit, {follow}plan
from shardfx.auto import {constrain_step}name_axes


# Chosen by shardfx.auto.search: {comments}
MESH = MeshSpec({_source_text(dict(mesh.shape))}{dcn})
RULES = AxisRules(
    [
{"".join(rules)}    ],
    mesh_axes={_source_text(mesh.axis_names)},
)


def plans_of(step, *args):
    """A plan for each argument of the step: arrays, or structs of them."""
    names = name_axes(step, *args).names
    pairs = zip(args, names, strict=True)
    plans = [plan(arg, MESH, names=tree, axes=RULES, unused="allow") for arg, tree in pairs]
{"".join(follow_lines)}    return tuple(plans)


def jitted(step, plans):
    """The step as it was searched. To call it, put the plans of `plans_of` on devices: `plan.on(mesh)`."""
{constrain_line}    return filter_jit(step, in_shardings=tuple(plans){out_shardings}{donate})
'''


def _comments_of(candidate: Candidate) -> list[str]:
    """The comment lines at the head of a candidate's code."""
    time = f"{ms(candidate.seconds)} a step {_SOURCE_TEXTS[candidate.by]}"
    comments = [f"{time}, {bytes_text(candidate.memory_bytes)} a device."]
    assignments = dict(candidate.assignments)
    for axis, size in candidate.mesh.shape.items():
        comments.append(f"{axis}={size} cuts {', '.join(assignments[axis])}.")
    if candidate.state_over:
        over = " x ".join(candidate.state_over)
        comments.append(f"ZeRO-1: {over} cuts the optimizer's state, too.")
    # Of a candidate that does not fit, the reason says so.
    if candidate.fits and candidate.reasons:
        comments.append(f"Not {candidate.reasons[0]}.")
    return comments


def _out_shardings_of(candidate: Candidate) -> str:
    """The argument `out_shardings` of a candidate's step as code; empty without one.
    `candidate.results` has, for each result, the argument whose plan it gets, or
    `None`.
    """
    if all(which is None for which in candidate.results):
        return ""
    plans = []
    for which in candidate.results:
        plans.append("None" if which is None else f"plans[{which}]")
    if len(plans) == 1:
        return f", out_shardings={plans[0]}"
    return f", out_shardings=({', '.join(plans)})"


def _source_text(value: object) -> str:
    """A value as Python source code, with strings in double quotes."""
    if isinstance(value, tuple):
        inner = ", ".join(map(_source_text, value))
        if len(value) == 1:
            return f"({inner},)"
        return f"({inner})"
    if isinstance(value, str | dict):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
