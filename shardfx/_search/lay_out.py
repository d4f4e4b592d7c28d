"""A step with every array laid out as the search priced it: the decision, carried to the compiler."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._cost.nested import CALLS
from .._ground.errors import MeshError
from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from .classes import Classes
from .layouts import Layout, Layouts
from .program import Body
from .roles import roles_of_rules
from .trace import Traced, trace


# Calls whose own rules of differentiation are kept, so that what they hold is left to the compiler.
_CUSTOM = frozenset(name for name in CALLS if name.startswith("custom_"))
# A cut of one dimension: which part of it, how late the axis prefers it, how much the axis moves, and which axis it is.
_Cut = tuple[int, int, int, int]
_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))


def lay_out(step: Callable[..., Any], mesh: MeshSpec | Mesh, rules: AxisRules) -> Callable[..., Any]:
    """The same step with its arrays constrained to where rules for its arguments want them.

    A plan says how arguments lie. How everything between them lies is left to the compiler, which often sends several
    times more than it need. This names the step's dimensions as [`shardfx.name_axes`][] does. It lays out every
    operation under the role that the rules give each mesh axis, as [`shardfx.search`][] prices it. Then it constrains
    what the operations take and make. The step needs no change, and what it computes stays the same.

    **Arguments:**

    - `step`: the whole step that is jitted.
    - `mesh`: with devices, or a MeshSpec where the arguments bring them.
    - `rules`: for the logical names that `name_axes` finds, as those of a [`shardfx.Candidate`][].

    **Returns:**

    A function of the same arguments, to be jitted. It traces the step anew for arguments of other shapes. It is not to
    be differentiated: lay out the step that has the gradient in it.

    **Raises:**

    `MeshError` for axes that are not Auto: constraints say nothing about those.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx

        def loss(params, x):
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

        def step(params, x):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

        params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
        x = jnp.ones((128, 64))
        best = shardfx.search(step, params, x, devices=8, chip="v5e")[0]
        mesh = best.mesh.build(jax.devices())
        laid = shardfx.lay_out(step, mesh, best.rules)
        plans = tuple(plan.on(mesh) for plan in best.plans)
        params, x = (shardfx.shard(arg, plan) for arg, plan in zip((params, x), plans))
        params = shardfx.filter_jit(laid, out_shardings=plans[0])(params, x)
        ```
    """
    spec = MeshSpec.of(mesh)
    other = [name for name, kind in zip(spec.axis_names, spec.axis_types, strict=True) if kind != AxisType.Auto]
    if other:
        raise MeshError(
            f"`lay_out` constrains arrays along Auto axes, and {', '.join(map(repr, other))} are not; "
            "build the mesh without `axis_types`, or constrain the step yourself."
        )
    where = mesh if isinstance(mesh, Mesh) else spec.abstract()

    def laid(*args: Any) -> Any:
        traced = trace(step, *args)
        classes = Classes(traced)
        roles = roles_of_rules(rules, classes)
        layouts = Layouts(classes, spec.size)
        chosen = [layouts.under(roles[axis]) for axis in spec.axis_names if axis in roles]
        axes = [axis for axis in spec.axis_names if axis in roles]
        columns = [zip(flat.leaves, flat.is_array, strict=True) for flat in traced.flats]
        arrays = [leaf for column in columns for leaf, is_array in column if is_array]
        return traced.result(_Carrier(layouts, chosen, axes, where, traced).outcome(arrays))

    return laid


class _Carrier:
    """Walks through a step again, as it was walked for its layout, and constrains what is on the way."""

    def __init__(
        self,
        layouts: Layouts,
        chosen: Sequence[Layout],
        axes: Sequence[str],
        mesh: Mesh | AbstractMesh,
        traced: Traced,
    ):
        self.layouts, self.chosen, self.axes, self.mesh, self.traced = layouts, chosen, axes, mesh, traced
        self.places = [
            {number: place for place, number in enumerate(n for n in made.role.order if n in made.used)}
            for made in chosen
        ]

    def outcome(self, arrays: list[Any]) -> list[Any]:
        closed = self.traced.closed
        return self.run(closed.jaxpr, closed.consts, self.layouts.program.body, arrays)

    def run(self, jaxpr: Any, consts: Sequence[Any], body: Body, arguments: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        arrays: dict[Any, Any] = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*arguments, *consts), strict=True))
        values: dict[Any, int] = dict(zip(jaxpr.invars, body.arguments, strict=True))
        copies: dict[tuple[Any, PartitionSpec], Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else arrays[atom]

        def taken(atom: Any, operation: int) -> Any:
            """What an operation takes: a copy that lies as it needs, made once."""
            value = None if isinstance(atom, jex.Literal) else values.get(atom)
            if value is None or not any((value, operation) in made.moved for made in self.chosen):
                return read(atom)
            spec = self.spec(value, operation)
            if (atom, spec) not in copies:
                copies[atom, spec] = self.constrained(arrays[atom], spec)
            return copies[atom, spec]

        for equation, visit in zip(jaxpr.eqns, body.visits, strict=True):
            name = equation.primitive.name
            # A call's or loop's own operations say what they take; a reshape takes what it is given.
            simple = not visit.bodies and name != "reshape"
            ins = [taken(atom, visit.operation) if simple else read(atom) for atom in equation.invars]
            if visit.bodies and name in _INLINED:
                inner = equation.params[CALLS[name]]
                outs = self.run(*_opened(inner), visit.bodies[0], ins)
            elif visit.bodies and name not in _CUSTOM:
                outs = _applied(jaxpr, self.rewritten(equation, visit.bodies), ins)
            else:
                outs = _applied(jaxpr, equation, ins)
            for var, value, out in zip(equation.outvars, visit.outs, outs, strict=True):
                if name == "gather" and any(value in made.summed for made in self.chosen):
                    # XLA's partitioner fails where a lookup in a cut dimension is to be cut along the same axis at
                    # once: "Slice dim size 128 greater than dynamic slice dimension: 64".
                    out = self.constrained(out, self.spec(value, whole_where_summed=True))
                arrays[var], values[var] = self.constrained(out, self.spec(value)), value
        return [read(atom) for atom in jaxpr.outvars]

    def rewritten(self, equation: Any, bodies: Sequence[Body]) -> Any:
        """The equation with the programs that it holds constrained."""
        name, params = equation.primitive.name, dict(equation.params)
        keys = {"scan": ("jaxpr",), "while": ("body_jaxpr", "cond_jaxpr")}.get(name)
        if name == "cond":
            branches = zip(params["branches"], bodies, strict=True)
            params["branches"] = tuple(self.anew(branch, body, False) for branch, body in branches)
        else:
            for key, body in zip(keys or (CALLS[name],), bodies, strict=True):
                params[key] = self.anew(params[key], body, keys is not None)
        return equation.replace(params=params)

    def anew(self, given: Any, body: Body, is_loop: bool) -> Any:
        """A jaxpr of the same form with constraints in it; what a loop takes up lies so each time."""
        jaxpr, consts = _opened(given)

        def run(*arrays: Any) -> list[Any]:
            if is_loop:
                arrays = tuple(
                    self.constrained(array, self.spec(value))
                    for value, array in zip(body.arguments, arrays, strict=True)
                )
            return self.run(jaxpr, consts, body, arrays)

        made = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars))
        return made if isinstance(given, jex.ClosedJaxpr) else made.jaxpr

    def spec(self, value: int, operation: int | None = None, *, whole_where_summed: bool = False) -> PartitionSpec:
        """How a value lies, or how an operation takes it."""
        dims = self.layouts.parts[value]
        flat = [(dim, at) for dim, leaves in enumerate(dims) for at in range(len(leaves))]
        found: list[list[_Cut]] = [[] for _ in dims]
        for number, made in enumerate(self.chosen):
            if whole_where_summed and value in made.summed:
                continue
            position = made.cuts[value]
            if operation is not None:
                position = made.moved.get((value, operation), position)
            if position >= 0:
                dim, at = flat[position]
                place = self.places[number].get(self.layouts.flat[value][position][0], 0)
                # What an axis cuts as its last resort it gives up first, so it stands innermost; of two that are
                # alike, the one that moves more.
                found[dim].append((at, place, len(made.moved), number))
        return PartitionSpec(*(self.entry(leaves, sorted(cut)) for leaves, cut in zip(dims, found, strict=True)))

    def entry(self, leaves: Sequence[int], cut: Sequence[_Cut]) -> Any:
        """What cuts a dimension, slowest first; left to the compiler where its parts cannot be cut so."""
        sizes = [self.layouts.program.parts.sizes[leaf] for leaf in leaves]
        counts = [math.prod(self.mesh.shape[self.axes[number]] for at, _, _, number in cut if at == part)
                  for part in range(len(leaves))]  # fmt: skip
        last = max((at for at, *_ in cut), default=0)
        if any(counts[at] != sizes[at] for at in range(last)) or (cut and sizes[last] % counts[last]):
            return PartitionSpec.UNCONSTRAINED
        return tuple(self.axes[number] for *_, number in cut) or None

    def constrained(self, array: Any, spec: PartitionSpec) -> Any:
        shaped = getattr(array, "shape", ())
        if not shaped or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))


def _opened(given: Any) -> tuple[Any, Sequence[Any]]:
    return (given.jaxpr, given.consts) if isinstance(given, jex.ClosedJaxpr) else (given, ())


def _applied(jaxpr: Any, equation: Any, ins: Sequence[Any]) -> list[Any]:
    """One equation carried out, with the name and the line that it came from."""
    known = {atom: array for atom, array in zip(equation.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=[*known],
        outvars=[*equation.outvars],
        eqns=[equation],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*known.values())
