"""The mesh and rules that a step is fastest under, chosen among all that fit."""

import dataclasses
import functools as ft
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .. import chips
from .._cost.estimate import HABITS, Prepared
from .._cost.walk import Habits
from .._ground.errors import MeshError, RuleError, SpecError
from .._ground.spec import entry_axes
from .._ground.text import bytes_text
from .._plan import ShardPlan, plan
from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from .asked import Tracing, asked_for, require_arrays
from .candidate import Candidate, Check
from .checked import Verifier, devices_for, estimated, fitting, in_order, promising, with_check
from .classes import Classes
from .core import AXES, CostModel, Found, Numbers, costs, find, machine_of, shares
from .emulated import EMULATED
from .held import holding, states_of, weighed, zero_1
from .lay_out import lay_out
from .layouts import Layout, Layouts, Role
from .limits import Limits, blocking, named_roles, numbers_of
from .name_axes import names_trees
from .priced import sent_rows
from .reasons import by_look, more, parts_of, various, without_twins, worth_laying_out
from .roles import layouts_of, nothing_to_cut, roles_of_rules
from .seeds import distinct, seeds
from .terms import Terms, has_data, padded, terms_of
from .trace import trace
from .written import axis_name, mesh_and_rules


# How many candidates get a closer look.
_LOOKED_AT = 32
# How many where each step is laid out, and traced anew.
_LAID_OUT = 12
# With how many sizes each way that is written by hand is looked at.
_SIZES = 2
# With so many roles all searches share one compiled core.
_ROLES = 79
# How many candidates are compiled where that is asked for.
COMPILED = 12
_NO_LIMITS, _USUAL = Limits(), CostModel()


def search(
    step: Any,
    *args: Any,
    devices: int | str | Sequence[Any],
    chip: str | chips.Chip | None = None,
    slices: int = 1,
    keep: int = 5,
    verify: Any = None,
    also: Sequence[AxisRules] = (),
    closely: int = COMPILED,
    limits: Limits = _NO_LIMITS,
    model: CostModel = _USUAL,
    laid_out: bool = False,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Candidate, ...]:
    """Chooses mesh and rules for a step: the fastest by estimate that fit in memory, and the next ones.

    The step's dimensions are named as [`shardfx.name_axes`][] does. Each mesh axis has a role: in which order it
    prefers dimensions. The step is laid out under every role, which gives what it divides and what it sends; then the
    times of all meshes of up to four roles are estimated at once, in a compiled function of arrays.

    **Arguments:**

    - `step`: the function that is jitted, without constraints of its own.
    - `args`: its arguments: arrays or structs, in any trees.
    - `devices`: how many; a slice as "tpu:v5p:4x4x4", which names the chip too, or two of them as "tpu:v5p:4x4x4*2";
        emulated CPU devices as "cpu:8"; or JAX's own, as `jax.devices()`.
    - `chip`: the kind of the devices; see [`shardfx.chips.find`][].
    - `slices`: how many slices (or nodes of TPUs) the devices are in, joined by the hosts' network; where `devices`
        does not say it.
    - `keep`: how many candidates to return, at most.
    - `verify`: "compile" compiles the best candidates, and the usual ways that people write by hand: for the slice if
        `devices` is one and libtpu is installed, else for as many of JAX's devices. What the programs send, compute
        and hold orders them anew, and what does not fit is dropped. Or the devices to compile for. "run" runs them on
        the devices too, in turn, with arrays that it makes, and the clock orders them. Loops are compiled once,
        however long they are.
    - `also`: rules by hand, over names that [`shardfx.name_axes`][] finds, that are looked at too, as the usual ones
        are. The sizes of their axes are chosen.
    - `closely`: how many candidates to compile at most, beside those of `also`.
    - `limits`: see [`shardfx.Limits`][].
    - `laid_out`: whether the step will be run as [`shardfx.lay_out`][] makes it. Then candidates are ordered, and
        verified, so: everything between the arguments lies as the search wants it, too.
    - `model`: what is assumed beside the chip's data sheet; see [`shardfx.CostModel`][].
    - `cache`: a directory that keeps what is compiled; see [`shardfx.compile_for`][].
    - `progress`: is told what is being estimated, compiled or run.

    **Returns:**

    Candidates, the fastest first; of those alike only the first. Where nothing fits in memory, the one that takes
    least is returned alone, with a reason that says so.

    **Raises:**

    `MeshError` for devices that cannot be read or slices that do not divide them; `RuleError` for limits with names
    that the step lacks; `SpecError` if no mesh of these devices divides the step's dimensions; `LeafTypeError` for
    arguments without arrays; what the step raises when it is traced, with a note.

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
        best, *others = shardfx.search(step, params, x, devices="tpu:v5e:2x4")
        print(best)
        print(best.code())
        assert best.mesh.size == 8 and best.fits and best.seconds <= others[0].seconds
        ```
    """
    for_these = asked_for(devices, chip, slices)
    count, kind, slices = for_these.total, for_these.chip, for_these.slices
    tell = progress or (lambda _: None)
    require_arrays(args)
    tell("laying the step out under roles")
    with Tracing(args):
        made = Searched(step, args, count, limits, also, HABITS["cpu" if kind == EMULATED else "tpu"])
    prepared = Prepared(step, made.args)

    def look(number: int, found: Sequence[Candidate]) -> Check:
        tell(f"estimating candidate {number + 1} of {len(found)}")
        one = found[number]
        its = Prepared(lay_out(step, one.mesh, one.rules), made.args) if laid_out else prepared
        return estimated(its, one, kind, model)

    def smaller(one: Candidate) -> Candidate | None:
        other = zero_1(one, made.states)
        return with_check(other, look(0, [other])) if other is not None and other.fits else None

    def smaller_weighed(one: Candidate) -> Candidate | None:
        other = smaller(one)
        return None if other is None else weighed(prepared, other, kind)

    def priced(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
        looked = (with_check(one, look(number, found)) for number, one in enumerate(found))
        # What is compiled may turn out as either estimate says.
        return (in_order if verify is None or laid_out else promising)(looked)

    tell(f"pricing meshes of {count} devices")
    closest, sizes = (_LAID_OUT, 1) if laid_out else (_LOOKED_AT, _SIZES)
    found = priced(made.candidates(kind, slices, max(keep, closest), limits, model))
    if not found[0].fits:
        return found[:keep]
    # The core prices steps that are laid out; as it is written, a step may be fastest under a plain way.
    asked, known = (priced(made.by_hand(ways, kind, slices, limits, model, sizes)) for ways in (made.asked, made.known))
    # Ways that fit with the state of the optimizer cut further alone.
    large = [] if laid_out else made.by_hand(made.known, kind, slices, limits, model, fit=False)
    less = priced([other for one in large if (other := zero_1(one, made.states)) is not None and other.fits])
    if verify is None and laid_out:
        looked = tuple(without_twins(in_order([*found, *asked, *known]), keep + 2))
    elif verify is None:
        every = in_order([*found, *asked, *known, *less])
        looked = tuple(holding(every, keep + 2, ft.partial(weighed, prepared, chip=kind), smaller_weighed))
        better = worth_laying_out(looked[0], every)
        looked = (dataclasses.replace(looked[0], reasons=(*looked[0].reasons, *better)), *looked[1:])
    else:
        targets = devices_for(verify, for_these, None if isinstance(devices, int | str) else devices)
        verifier = Verifier(step, made.args, targets, kind, model, cache, tell, laid_out, smaller)
        closer = [*various(found, (closely + 1) // 2), *asked, *less[: closely // 4], *known]
        closer = without_twins(closer, closely + len(asked))
        looked = verifier.ran(closer) if verify == "run" else fitting(verifier.compiled(closer))
    return tuple(
        dataclasses.replace(one, reasons=(*by_look(one, looked[at + 1 : at + 3]), *one.reasons))
        for at, one in enumerate(looked[:keep])
    )


class Searched:
    """A step that has been laid out under all roles worth a look, ready to be priced for any machine."""

    def __init__(
        self,
        step: Any,
        args: Sequence[Any],
        devices: int,
        limits: Limits,
        also: Sequence[AxisRules] = (),
        habits: Habits = HABITS["tpu"],
    ):
        self.devices = devices
        self.classes = Classes(trace(step, *args))
        # Without the shardings that arrays have: where they lie now is another question.
        self.step, self.args, self.limits = step, self.classes.traced.structs, limits
        self.layouts = Layouts(self.classes, devices, habits)
        if devices == 1:
            raise MeshError("one device needs no plan: `search` chooses how several share the work.")
        never = frozenset(numbers_of(limits.never, self.classes).values())
        given = [roles_of_rules(rules, self.classes, never) for rules in also]
        self.made: list[Layout] = []
        self.asked = self.numbered([tuple(roles.values()) for roles in given])
        self.known = self.numbered(seeds(self.layouts, never) if limits.rules is None else [])
        if limits.rules is None:
            self.add(layouts_of(self.layouts, never=never))
        else:
            self.add(self.layouts.under(role) for role in roles_of_rules(limits.rules, self.classes, never).values())
        if not self.made:
            raise SpecError(nothing_to_cut(self.layouts, limits, devices))
        self.terms = self.limited(limits)
        self.arrays = padded(self.terms)
        self.names = names_trees(self.classes)
        self.states = states_of(self.classes)
        self.data = has_data(self.layouts)

    def add(self, layouts: Iterable[Layout]) -> None:
        """Takes these beside what there is, without twins."""
        keys = {(made.events, made.cuts, made.shared) for made in self.made}
        new = [made for made in layouts if (made.events, made.cuts, made.shared) not in keys]
        self.made += new[: max(0, _ROLES - len(self.made))]

    def numbered(self, ways: Sequence[tuple[Role, ...]]) -> list[tuple[int, ...]]:
        """The numbers of the roles of each way, which are laid out if they were not; ways that cut nothing left out."""
        keys = {(made.events, made.cuts, made.shared): number for number, made in enumerate(self.made)}
        found: dict[Role, int] = {}
        for role in distinct(ways):
            made = self.layouts.under(role)
            if made.used:
                key = (made.events, made.cuts, made.shared)
                if key not in keys:
                    keys[key] = len(self.made)
                    self.made.append(made)
                found[role] = keys[key]
        made_ways = [tuple(sorted(found[role] for role in way if role in found)) for way in ways]
        return list(dict.fromkeys(way for way in made_ways if 0 < len(way) <= AXES and len(set(way)) == len(way)))

    def by_hand(
        self,
        ways: Sequence[tuple[int, ...]],
        chip: chips.Chip,
        slices: int,
        limits: Limits,
        model: CostModel,
        sizes: int = _SIZES,
        *,
        fit: bool = True,
    ) -> list[Candidate]:
        """Each way with the sizes that it is fastest with, and the next; those alone that fit in memory, or do not."""
        limit, machine = self.machine(chip, limits, model)
        found: list[Found] = []
        for way in ways if limits.most_axes == AXES else [way for way in ways if len(way) <= limits.most_axes]:
            ones = [self.found(way, each, slices, machine) for each in shares(self.devices, len(way)).tolist()]
            these = [one for one in ones if one is not None and (one.memory_bytes <= limit) == fit]
            found += sorted(these, key=lambda one: one.seconds)[:sizes]
        return [self.candidate(one, built, machine, limit) for one, built in self.diverse(found, len(found))]

    def found(self, way: tuple[int, ...], sizes: Sequence[int], slices: int, machine: Numbers) -> Found | None:
        """A way with these sizes; `None` where they do not divide. The first axis that can spans the slices."""
        spans = [1] * len(way)
        if slices > 1:
            over = next((at for at, size in enumerate(sizes) if size % slices == 0), None)
            if over is None:
                return None
            spans[over] = slices
        free = {**machine, "limit": np.float32(np.inf)}
        score, seconds, compute, exposed, hidden, memory = self.priced(way, sizes, spans, free)
        if not math.isfinite(score):
            return None
        return Found(way, tuple(sizes), tuple(spans), seconds, compute, exposed, hidden, memory)

    def machine(self, chip: chips.Chip, limits: Limits, model: CostModel) -> tuple[int, Numbers]:
        """The memory that may be used, and the numbers that the core takes."""
        limit = chip.usable_hbm_bytes // chip.devices_per_chip - limits.free_bytes
        return limit, machine_of(chip, self.devices, model, self.dtype(), float(limit))

    def limited(self, limits: Limits) -> Terms:
        terms = terms_of(self.layouts, self.made)
        wanted = {**dict.fromkeys(limits.always, 2), **dict(limits.least)}
        numbers = numbers_of(tuple(wanted), self.classes)
        least = np.ones_like(terms.sizes)
        for name, number in numbers.items():
            if number not in terms.classes:
                size = self.classes.groups[number].size
                raise SpecError(
                    f"`limits` wants {name!r} cut, but its size {size} has no factor in common with {self.devices} "
                    "devices; pad it, or take it out of the limits."
                    if math.gcd(size, self.devices) == 1
                    else f"`limits` wants {name!r} cut, and no mesh axis within the other limits cuts it; let `rules` "
                    "cut it, take it out of `never`, or do not want it."
                )
            least[terms.classes.index(number)] = wanted[name]
        named, sizes = named_roles(limits, [self.called(layout) for layout in self.made])
        return dataclasses.replace(terms, least=least, named=named, named_sizes=sizes)

    def called(self, layout: Layout) -> str:
        """What a mesh axis with this role is called."""
        return axis_name([self.classes.groups[n].name for n in layout.role.order if n in layout.used])

    def can(self, chip: chips.Chip, slices: int, limits: Limits, model: CostModel, least_memory: bool) -> bool:
        """Whether there is a candidate within other limits: one that fits, if `least_memory` is false."""
        try:
            other = Searched(self.step, self.args, self.devices, limits, habits=self.layouts.habits)
        except (SpecError, RuleError):
            return False
        limit = math.inf if least_memory else chip.usable_hbm_bytes // chip.devices_per_chip - limits.free_bytes
        machine = machine_of(chip, self.devices, model, self.dtype(), float(limit))
        return bool(find(other.terms, machine, self.devices, slices, axes=min(limits.most_axes, AXES))[0])

    def candidates(
        self, chip: chips.Chip, slices: int, keep: int, limits: Limits, model: CostModel
    ) -> tuple[Candidate, ...]:
        limit, machine = self.machine(chip, limits, model)
        axes, hint = min(limits.most_axes, AXES), ""
        found, _ = find(self.terms, machine, self.devices, slices, axes=axes)
        if not found:
            # Nothing fits: what takes least memory is the most useful answer.
            anything = {**machine, "limit": np.float32(np.inf)}
            found, _ = find(self.terms, anything, self.devices, slices, axes=axes)
            found = sorted(found, key=lambda one: one.memory_bytes)[:8]
            keep = 1
            hint = self.would_fit(chip, slices, limits, model) if found else ""
        pairs = list(self.diverse(found, keep))
        if not pairs:
            culprits = blocking(limits, lambda other: self.can(chip, slices, other, model, True))
            raise SpecError(
                f"no mesh of {self.devices} devices divides the step's dimensions within the limits "
                f"({', '.join(f'{g.name}={g.size}' for g in self.classes.live())}); {culprits}."
            )
        made = [self.candidate(one, built, machine, limit) for one, built in pairs]
        return tuple(
            dataclasses.replace(mine, reasons=self.reasons(one, mine, machine, hint))
            for mine, (one, _) in zip(made, pairs, strict=True)
        )

    def would_fit(self, chip: chips.Chip, slices: int, limits: Limits, model: CostModel) -> str:
        """How many more devices would be enough, in words."""
        limit = chip.usable_hbm_bytes // chip.devices_per_chip - limits.free_bytes
        # The usual ways are few, and one of them cuts all that can be cut.
        roles = tuple(sorted({number for way in self.known for number in way})) or None
        for times in (2, 4, 8, 16, 32, 64):
            count = self.devices * times
            machine = machine_of(chip, count, model, self.dtype(), float(limit))
            found, _ = find(self.terms, machine, count, slices, axes=min(limits.most_axes, AXES), only=roles)
            if found:
                held = bytes_text(round(found[0].memory_bytes))
                return f"{count} devices would do, with {held} on each; or use a smaller batch or remat"
        return f"{64 * self.devices} devices would not do either; use a smaller batch or remat"

    def dtype(self) -> str:
        """The dtype that most bytes of products are in."""
        found: dict[str, float] = {}
        for made in self.layouts.program.operations:
            if made.labels.flops:
                value = self.layouts.program.values[made.ins[0]]
                found[str(value.dtype)] = found.get(str(value.dtype), 0.0) + made.labels.flops * made.times
        name = max(found, key=lambda key: found[key], default="bfloat16")
        # TPUs multiply float32 in passes of bfloat16; data sheets of others have it.
        return name if name in ("float16", "int8", "float8_e4m3fn") else "bfloat16"

    def diverse(self, found: Iterable[Found], keep: int) -> Iterable[tuple[Found, tuple]]:
        """The best of those that say something different: in what the arguments' axes cut, not in their spelling."""
        seen: dict[object, None] = {}
        for one in found:
            if len(seen) >= keep:
                return
            built = mesh_and_rules(self.made, one, self.classes)
            if built is None or not self.limits.has_axes(built[0]) or not self.agrees(one, *built):
                continue
            key = self.character(one)
            if key not in seen:
                seen[key] = None
                yield one, built

    def character(self, one: Found) -> object:
        """Into how many pieces each class is cut."""
        cuts: dict[int, int] = {}
        for role, size in zip(one.roles, one.sizes, strict=True):
            for number in self.made[role].used:
                cuts[number] = cuts.get(number, 1) * size
        return tuple(sorted(cuts.items()))

    def agrees(self, one: Found, mesh: MeshSpec, rules: AxisRules, axes: tuple[str, ...]) -> bool:
        """Whether the rules cut the arguments as the roles do."""
        plans = self.plans(mesh, rules)
        program = self.layouts.program
        for argument, (which, leaf) in enumerate(self.classes.traced.places):
            path = self.classes.traced.flats[which].paths[leaf]
            spec = plans[which][path].spec
            value = program.arguments[argument]
            dims = [dim for dim, leaves in enumerate(self.layouts.parts[value]) for _ in leaves]
            wanted: dict[int, set[str]] = {}
            for role, axis in zip(one.roles, axes, strict=True):
                position = self.made[role].cuts[value]
                if position >= 0:
                    wanted.setdefault(dims[position], set()).add(axis)
            given = {dim: set(entry_axes(entry)) for dim, entry in enumerate(spec) if entry is not None}
            if wanted != given:
                return False
        return True

    def plans(self, mesh: MeshSpec, rules: AxisRules) -> tuple[ShardPlan, ...]:
        return tuple(plan(arg, mesh, names=names, axes=rules) for arg, names in zip(self.args, self.names, strict=True))

    def candidate(self, one: Found, built: tuple, machine: Numbers, limit: int) -> Candidate:
        mesh, rules, axes = built
        rows = sent_rows(self.layouts, self.made, one, axes, self.data)
        return Candidate(
            mesh=mesh,
            rules=rules,
            roles=tuple(
                (axis, tuple(self.classes.groups[n].name for n in layout.role.order if n in layout.used))
                for axis, layout in zip(axes, [self.made[role] for role in one.roles], strict=True)
            ),
            plans=self.plans(mesh, rules),
            seconds=one.seconds,
            compute_seconds=one.compute_seconds,
            exposed_seconds=one.exposed_seconds,
            hidden_seconds=one.hidden_seconds,
            axis_seconds=self.axis_seconds(one, axes, machine),
            memory_bytes=math.ceil(one.memory_bytes),
            limit_bytes=limit,
            traffic=rows,
        )

    def axis_seconds(self, one: Found, axes: tuple[str, ...], machine: Numbers) -> tuple[tuple[str, float], ...]:
        """What each axis sends, in seconds."""
        *_, by_axis = self.parts(one.roles, one.sizes, one.slices, machine)
        return tuple((axis, float(by_axis[at, 0, 0])) for at, axis in enumerate(axes))

    def priced(
        self, roles: Sequence[int], sizes: Sequence[int], slices: Sequence[int], machine: Numbers
    ) -> list[float]:
        """Score, seconds, computation, exposed, hidden, memory of one candidate."""
        return [float(part[0, 0]) for part in self.parts(roles, sizes, slices, machine)[:-1]]

    def parts(
        self, roles: Sequence[int], sizes: Sequence[int], slices: Sequence[int], machine: Numbers
    ) -> tuple[Any, ...]:
        """What the core says of one candidate."""
        rest = AXES - len(roles)
        sets = np.array([[*roles, *[len(self.made)] * rest]], np.int32)
        share = np.array([[*sizes, *[1] * rest]], np.int32)
        spans = np.array([[*slices, *[1] * rest]], np.int32)
        return costs(self.arrays, machine, sets, share, spans, islands=bool(np.isfinite(machine["island"])))

    def reasons(self, one: Found, mine: Candidate, machine: Numbers, hint: str) -> tuple[str, ...]:
        """Why nothing fits, if so, and what moving a factor of two between its axes would cost."""
        found = []
        if not mine.fits:
            held = f"{bytes_text(mine.memory_bytes)} of {bytes_text(mine.limit_bytes)}"
            found.append(f"nothing fits: this takes least, {held}; {hint}")
        return (*found, *self.near(one, mine, machine))

    def near(self, one: Found, mine: Candidate, machine: Numbers) -> Iterable[str]:
        """What it would cost to move a factor of two from one axis to another."""
        named = mesh_and_rules(self.made, one, self.classes)
        axes = named[2] if named else ()
        for source in range(len(axes)):
            for target in range(len(axes)):
                if source == target or one.sizes[source] % 2 or one.slices[source] > 1:
                    continue
                sizes = list(one.sizes)
                sizes[source] //= 2
                sizes[target] *= 2
                text = f"{axes[target]}={sizes[target]} and {axes[source]}={sizes[source]} instead"
                blocked = self.blocked(one.roles, sizes)
                if blocked:
                    yield f"{text}: {blocked}"
                    continue
                parts = self.priced(one.roles, sizes, one.slices, machine)
                if parts[5] > mine.limit_bytes:
                    yield f"{text}: {bytes_text(round(parts[5]))} do not fit in {bytes_text(mine.limit_bytes)}"
                else:
                    yield f"{text}: {more(parts[1] - mine.seconds)}: {parts_of(parts, mine)}"

    def blocked(self, roles: Sequence[int], sizes: Sequence[int]) -> str:
        """Which names do not divide, in words."""
        found = []
        for row, number in enumerate(self.terms.classes):
            cut = math.prod(size for role, size in zip(roles, sizes, strict=True) if self.terms.limits[row, role])
            if self.terms.sizes[row] % cut:
                found.append(f"{self.classes.groups[number].name} ({self.terms.sizes[row]}) does not divide by {cut}")
        return "; ".join(found)
