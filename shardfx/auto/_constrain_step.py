"""A step whose intermediate values are constrained to the shardings that a search
assumed.

The step's jaxpr is evaluated twice in the same order. The first evaluation puts each
equation in a name scope with its number. The locations of lowered operations contain
the number, which gives the sharding of each operation to its equation. The second
evaluation constrains the results of the equations.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, MeshError, RuleError, check_type
from .._ground.misuse import called
from .._ground.spec import entry_axes
from .._plan import correct
from .._rules import AxisRules, near
from .._step import (
    Operation,
    PlainStep,
    array_leaves,
    auto_twin,
    explicit_mesh,
    on_auto_axes,
    over,
    plain_step,
)
from ..topology import MeshSpec
from ._asked import results_of, structs_of, trace
from ._classes import Classes
from ._layouts import AssignedLayout, Layouts
from ._namer import named_classes
from ._numbered import equation_of, run_with
from ._program import Root
from ._strategies import USUAL_NAMES, assignments_of_rules


class _Sharded(NamedTuple):
    """A sharded sub-dimension: its position within the dimension, its rank in the mesh
    axis's order of preference, and the mesh axis.
    """

    position: int
    rank: int
    axis: str


@called("constrain_step(step, mesh, rules)")
def constrain_step(
    step: Callable[..., PyTree],
    mesh: MeshSpec | Mesh,
    rules: AxisRules,
) -> Callable[..., PyTree]:
    """The step, with its intermediate values constrained to the shardings that follow
    from rules for its arguments.

    A plan gives the shardings of the arguments. The compiler chooses those of all
    intermediate values, and often sends several times more bytes than necessary. This
    function names the step's dimensions as [`shardfx.auto.name_axes`][] does, and
    propagates the logical axes that the rules give each mesh axis through the
    operations as [`shardfx.auto.search`][] does. Then it constrains the results of the
    operations. The step needs no change and computes the same values.

    **Arguments:**

    - `step`: the whole function that is jitted.
    - `mesh`: a `jax.sharding.Mesh`, or a MeshSpec if the arguments are on devices.
    - `rules`: rules for the logical names that `name_axes` finds, such as the rules of
      a [`shardfx.auto.Candidate`][].

    **Returns:**

    A function of the same arguments, for `jax.jit`. It is traced again for arguments of
    other shapes. Do not differentiate it: pass a step that contains the gradient.

    On a mesh with Explicit axes, such as `jax.make_mesh` makes, the step runs on Auto
    axes, and its results are typed: a result that has the structure of an argument is
    sharded as the argument, and others as they are constrained. The step may know
    nothing of shardings, or be written for Explicit axes, whose shardings are then left
    out.

    **Raises:**

    `LeafTypeError` for a step that is no function; `MeshError` for Manual axes, and for
    Explicit axes if no argument is on the mesh or if they are on another one;
    `RuleError` for mesh axes that the mesh lacks, and, when the step is traced, for
    rules whose names are none of the step's, if nothing is then sharded over their mesh
    axes.

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
        best = shardfx.auto.search(step, params, x, devices=8, chip="v5e")[0]
        mesh = best.mesh.build(jax.devices())
        laid = shardfx.auto.constrain_step(step, mesh, best.rules)
        plans = tuple(plan.on(mesh) for plan in best.plans)
        params, x = (shardfx.shard(arg, plan) for arg, plan in zip((params, x), plans))
        params = shardfx.filter_jit(laid, out_shardings=plans[0])(params, x)
        ```
    """
    if not callable(step):
        raise LeafTypeError(
            f"`step` must be a function, not {type(step).__name__}; pass"
            " `constrain_step(step, mesh, rules)`."
        )
    _require_rules(rules)
    mesh_spec = MeshSpec.of(mesh)
    _require_mesh_axes(rules, mesh_spec)
    _require_no_manual_axes(mesh_spec)
    if isinstance(mesh, Mesh):
        abstract = mesh.abstract_mesh
    else:
        abstract = mesh_spec.abstract()

    # The step for Auto axes.
    @ft.wraps(step)
    def constrained(*args: PyTree) -> PyTree:
        where = mesh if isinstance(mesh, Mesh) else abstract
        return constrainable(step, args).results(where, rules, args)

    # The step for Explicit axes: it runs on Auto axes without its own shardings, and its
    # results are typed.
    @ft.wraps(step)
    def typed(*args: PyTree) -> PyTree:
        explicit_mesh_of_args = explicit_mesh(args)
        if explicit_mesh_of_args is None:
            _raise_unplaced(mesh_spec)
        _require_same_axes(rules, mesh_spec, MeshSpec.of(explicit_mesh_of_args))
        plain = plain_step(step, (args, {}), explicit_mesh_of_args, alone=False)
        structs = structs_of(args)
        specs: list[PartitionSpec] = []

        def run(*arrays: Any) -> list[Any]:
            """The constrained results; fills `specs` with their specs."""
            results = run_with(constrainer, closed, arrays)
            # JAX traces `run` once below, which fills `specs`.
            specs[:] = _result_specs(
                args=args,
                out=plain.out,
                constrainer=constrainer,
                results=results,
                mesh=mesh_spec,
            )
            return results

        auto_mesh = auto_twin(explicit_mesh_of_args)
        with over(auto_mesh):
            closed = jax.make_jaxpr(plain.run)(*array_leaves(structs))
            classes = _named_dims(step, closed, structs)
            constrainer = _constrainer(classes, auto_mesh, rules)
            constrained_closed = jax.make_jaxpr(run)(*array_leaves(structs))
        run_constrained = jex.jaxpr_as_fun(constrained_closed)
        run_typed = on_auto_axes(run_constrained, explicit_mesh_of_args, specs)
        return plain.result(run_typed(*array_leaves(args)))

    if abstract.explicit_axes:
        return typed
    return constrained


def _raise_unplaced(mesh: MeshSpec) -> NoReturn:
    """Raises `MeshError` for a mesh with Explicit axes on which no argument is."""
    axes = [
        f"`{name}`"
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    raise MeshError(
        f"the mesh {mesh} of `constrain_step` has Explicit axes, {', '.join(axes)}, and"
        " no argument of the step is on it: put them there first, `params ="
        " shardfx.shard(params, plan)`; or call the step under `jax.set_mesh(mesh)`; or"
        f" use Auto axes, `MeshSpec({dict(mesh.shape)!r}).build(jax.devices())`."
    )


def _require_same_axes(
    rules: AxisRules,
    mesh: MeshSpec,
    mesh_of_args: MeshSpec,
) -> None:
    """Raises `MeshError` if the arguments of a step are on a mesh on which an axis of
    `mesh` that the rules use is missing, or has another size.
    """
    for _, target in rules.rules:
        for axis in entry_axes(target):
            size = mesh.shape.get(axis)
            if size is not None and mesh_of_args.shape.get(axis) != size:
                raise MeshError(
                    f"`constrain_step` got the mesh {mesh}, and the arguments of the"
                    f" step are on {mesh_of_args}, where the rules find no axis {axis!r}"
                    f" of size {size}; give it the mesh of the arguments, and rules for"
                    " its axes."
                )


@dataclasses.dataclass(frozen=True)
class ConstrainableStep:
    """A step that is traced once, to be constrained on several meshes by several rules.

    - `plain`: the step's jaxpr, and its result.
    - `classes`: the logical axes of its arguments.
    """

    plain: PlainStep
    classes: Classes

    def results(
        self,
        mesh: Mesh | AbstractMesh,
        rules: AxisRules,
        args: Sequence[PyTree],
    ) -> PyTree:
        """The step's result for `args`, with its intermediate values constrained on a
        mesh with Auto axes as `rules` say.
        """
        constrainer = _constrainer(self.classes, mesh, rules)
        return self.plain.result(run_with(constrainer, self.plain.closed, args))


def constrainable(
    step: Callable[..., PyTree],
    args: Sequence[PyTree],
) -> ConstrainableStep:
    """Traces a step on Auto axes for the shapes of its arguments."""
    structs = structs_of(tuple(args))
    closed, out, rest = eqx.filter_make_jaxpr(step)(*structs)
    return ConstrainableStep(
        plain=PlainStep(closed=closed, out=out, rest=rest),
        classes=_named_dims(step, closed, structs),
    )


def _named_dims(
    step: Callable[..., PyTree],
    closed: jex.ClosedJaxpr,
    structs: Sequence[PyTree],
) -> Classes:
    """The logical axes of a step with the jaxpr `closed`. The locations of operations
    have the numbers of the jaxpr's equations.
    """

    @ft.wraps(step)
    def unchanged(*args: PyTree) -> list[Any]:
        return run_with(lambda _number, _name, results: results, closed, args)

    return named_classes(trace(unchanged, *structs))


def _constrainer(
    classes: Classes,
    mesh: Mesh | AbstractMesh,
    rules: AxisRules,
) -> "_Constrainer":
    """What constrains the results of the equations of a step as `rules` say. `classes`
    are those of `_named_dims`. `chosen` has the layout of the step's values along each
    mesh axis that the rules use.
    """
    mesh_spec = MeshSpec.of(mesh)
    assignments = assignments_of_rules(rules, classes)
    _require_dimensions(rules, classes, mesh_spec)
    layouts = Layouts(classes, mesh_spec.size)
    chosen = {}
    for axis in mesh_spec.axis_names:
        if axis in assignments:
            chosen[axis] = layouts.under(assignments[axis])
    return _Constrainer(layouts, chosen, mesh)


def _require_rules(rules: object) -> None:
    """Raises `RuleError` for what is no `AxisRules`."""
    check_type(
        what="rules",
        value=rules,
        expected=AxisRules,
        error=RuleError,
        fix=(
            "pass `AxisRules` for the names that `shardfx.auto.name_axes(step, *args)`"
            " finds"
        ),
    )


def _require_no_manual_axes(mesh: MeshSpec) -> None:
    """Raises `MeshError` for a mesh with Manual axes."""
    manual_axes = []
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind == AxisType.Manual:
            manual_axes.append(repr(name))
    if manual_axes:
        raise MeshError(
            "`constrain_step` constrains arrays along Auto and Explicit axes, and"
            f" {', '.join(manual_axes)} are Manual; call it outside of"
            " `jax.shard_map`, with the mesh of the whole step."
        )


def _require_mesh_axes(rules: AxisRules, mesh: MeshSpec) -> None:
    """Raises `RuleError` for mesh axes that the mesh lacks and the rules do not declare."""
    known = (*mesh.axis_names, *rules.mesh_axes)
    for number, (name, target) in enumerate(rules.rules):
        for axis in entry_axes(target):
            if axis not in known:
                raise RuleError(
                    f"axes.rules[{number}] {name!r} uses the mesh axis {axis!r}"
                    f"{near(axis, mesh.axis_names)}, which the mesh {mesh} lacks; if it"
                    f" is for other meshes, declare it: `AxisRules(..., mesh_axes="
                    f"({axis!r},))`."
                )


def _require_dimensions(rules: AxisRules, classes: Classes, mesh: MeshSpec) -> None:
    """Raises `RuleError` for rules whose names the step does not have, in two cases: the
    name looks like one of the step that no rule is about, so it is misspelled; or a mesh
    axis of the rule shards no other name, so it would shard nothing.
    """
    # A logical axis without roots was merged into another one.
    names = [logical.name for logical in classes.axes if logical.roots and logical.name]
    used_axes: set[str] = set()
    without_dimension: list[_RuleWithoutDimension] = []
    for number, (name, target) in enumerate(rules.rules):
        axes = tuple(axis for axis in entry_axes(target) if axis in mesh.axis_names)
        if name in names:
            used_axes.update(axes)
        else:
            rule_without_dimension = _RuleWithoutDimension(
                number=number,
                name=name,
                axes=axes,
            )
            without_dimension.append(rule_without_dimension)

    free_names = [name for name in names if name not in rules.names]
    lines = []
    refused_names: list[str] = []
    for number, name, axes in without_dimension:
        idle_axes = [axis for axis in axes if axis not in used_axes]
        is_any_idle = any(mesh.axis_size(axis) > 1 for axis in idle_axes)
        hint = "" if name in USUAL_NAMES else near(name, free_names)
        if is_any_idle or (axes and hint):
            lines.append(f"  axes.rules[{number}] {name!r} -> {'+'.join(axes)}{hint}")
            refused_names.append(name)
    if lines:
        listed = "\n".join(lines)
        raise RuleError(
            "`constrain_step` finds no dimension in the step for these rules, so that"
            f" nothing would be sharded by them:\n{listed}\nThe dimensions of this step"
            f" are called {', '.join(dict.fromkeys(names))}, as"
            " `shardfx.auto.name_axes(step, *args)` shows. Rename the rules, or leave"
            f" them out: `rules.without({', '.join(map(repr, refused_names))})`."
        )


class _RuleWithoutDimension(NamedTuple):
    """A rule whose name the step lacks: its number, its name, and its mesh axes."""

    number: int
    name: str
    axes: tuple[str, ...]


def _result_specs(
    args: Sequence[PyTree],
    out: PyTree,
    constrainer: "_Constrainer",
    results: Sequence[Any],
    mesh: MeshSpec,
) -> list[PartitionSpec]:
    """The spec of each array in a step's result, which is `out`.

    A result that has the structure of an argument, such as updated parameters, is
    sharded as the argument is. Another result keeps the sharding to which it was
    constrained. `results` are the constrained arrays of the result, in order.
    """
    specs: list[PartitionSpec] = []
    counts_of_results = results_of(structs_of(tuple(args)), out)
    for which, count in counts_of_results:
        if which is None:
            arrays = results[len(specs) : len(specs) + count]
            specs += map(constrainer.spec_of_result, arrays)
        else:
            arrays = array_leaves(args[which])
            for array in arrays:
                specs.append(jax.typeof(array).sharding.spec)
    corrected = []
    for spec, result in zip(specs, results, strict=True):
        corrected.append(correct(spec, result.shape, mesh).spec)
    return corrected


class _Constrainer:
    """Constrains the results of equations. An equation lowers to operations, and a
    search gives these shardings.

    - `layouts`, `mesh`: the step's program, and the mesh of the constraints.
    - `chosen`: for each mesh axis that shards anything, the shardings along it.
    - `operations`: for each number of an equation, the operations that it lowers to.
    """

    def __init__(
        self,
        layouts: Layouts,
        chosen: Mapping[str, AssignedLayout],
        mesh: Mesh | AbstractMesh,
    ):
        """`chosen` has the shardings along each mesh axis, and `layouts` the program
        that they are about. A layout has the sub-dimension of each value that the mesh
        axis shards.
        """
        self.layouts = layouts
        self.chosen = chosen
        self.mesh = mesh
        # By the number of an equation, the operations that it lowers to.
        self.operations: dict[int, list[Operation]] = {}
        # By the identity of an array: the array, and the spec of its last constraint.
        self.constraints: dict[int, tuple[Any, PartitionSpec]] = {}
        for operation in layouts.program.operations:
            equation = equation_of(operation)
            if equation is not None:
                self.operations.setdefault(equation, []).append(operation)

    def __call__(self, number: int, name: str, outs: Sequence[Any]) -> Sequence[Any]:
        """Constrains `outs`, the results of equation `number`, whose primitive is
        `name`. The sharding of `outs[i]` is that of the equation's last lowered
        operation whose result has this shape. `values[value].free` says that a value is
        made of constants.
        """
        values = self.layouts.program.values
        result_values: list[int] = []
        for operation in self.operations.get(number, ()):
            result_values += operation.outs
        constrained = list(outs)
        for index in reversed(range(len(outs))):
            result_shape = jnp.shape(outs[index])
            value = self.last_of_shape(result_values, result_shape)
            if value is None or values[value].free:
                continue
            result_values.remove(value)
            if name == "gather" and self.is_unreduced(value):
                # XLA's partitioner fails if a lookup in a sharded dimension is to be
                # sharded along the same axis too: "Slice dim size 128 greater than
                # dynamic slice dimension: 64".
                spec = self.spec(value, whole_if_unreduced=True)
                constrained[index] = self.constrained(constrained[index], spec)
            spec = self.spec(value)
            array = self.constrained(constrained[index], spec)
            constrained[index] = array
            self.constraints[id(array)] = (array, spec)
        return constrained

    def last_of_shape(
        self,
        values: Sequence[int],
        shape: tuple[int, ...],
    ) -> int | None:
        """The last of some values of the program that has a shape."""
        for value in reversed(values):
            if self.layouts.program.values[value].shape == shape:
                return value
        return None

    def is_unreduced(self, value: int) -> bool:
        """Whether a mesh axis leaves a value unreduced."""
        return any(value in layout.unreduced for layout in self.chosen.values())

    def spec_of_result(self, array: Any) -> PartitionSpec:
        """The spec to which an array is constrained; replicated if to none."""
        if id(array) not in self.constraints:
            return PartitionSpec()
        _, spec = self.constraints[id(array)]
        return spec

    def spec(self, value: int, *, whole_if_unreduced: bool = False) -> PartitionSpec:
        """The PartitionSpec with the mesh axes over which the search shards each
        dimension of a value of the program. With `whole_if_unreduced`, it lacks the
        mesh axes over which an operation leaves the value unreduced, as a sum whose
        parts are on several devices.

        Under the layout of one mesh axis, `positions[value]` counts over the value's
        sub-dimensions, of all dimensions together, and `assignment` has the logical
        axes that the mesh axis may shard, the preferred one first.
        """
        dims = self.layouts.roots[value]
        # For each sub-dimension, its dimension and its index within the dimension.
        places: list[tuple[int, int]] = []
        for dim, roots in enumerate(dims):
            for index in range(len(roots)):
                places.append((dim, index))
        sharded_dims: list[list[_Sharded]] = [[] for _ in dims]
        for axis, layout in self.chosen.items():
            position = layout.positions[value]
            # A negative position says that the axis does not shard the value.
            is_left_out = whole_if_unreduced and value in layout.unreduced
            if position < 0 or is_left_out:
                continue
            dim, index = places[position]
            logical_axis, _ = self.layouts.sub_dims[value][position]
            # The mesh axis that prefers the sub-dimension least is innermost, as in
            # the rules of a candidate.
            used = [
                assigned for assigned in layout.assignment if assigned in layout.used
            ]
            rank = used.index(logical_axis)
            sharded = _Sharded(position=index, rank=rank, axis=axis)
            sharded_dims[dim].append(sharded)
        return PartitionSpec(*map(self.entry, dims, sharded_dims))

    def entry(self, roots: Sequence[Root], shardings: Sequence[_Sharded]) -> object:
        """The entry of a spec for a dimension, whose sub-dimensions have the classes
        `roots`, and the shardings `shardings`.

        The entry is UNCONSTRAINED if no spec expresses this: in a spec, each mesh axis
        shards the parts that earlier axes leave, so that a minor sub-dimension is
        sharded only after the major ones are sharded completely.
        """
        if not shardings:
            return None
        in_order = sorted(
            shardings, key=lambda sharded: (sharded.position, sharded.rank)
        )
        sizes = [self.layouts.tied.sizes[root] for root in roots]
        shard_counts = [1] * len(roots)
        for sharded in in_order:
            shard_counts[sharded.position] *= self.mesh.shape[sharded.axis]
        last = in_order[-1].position
        is_even = sizes[last] % shard_counts[last] == 0
        if shard_counts[:last] != sizes[:last] or not is_even:
            return PartitionSpec.UNCONSTRAINED
        return tuple(sharded.axis for sharded in in_order)

    def constrained(self, array: Any, spec: PartitionSpec) -> Any:
        """The array with a constraint; scalars, keys and what is no array unchanged."""
        shape = getattr(array, "shape", ())
        if not shape or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        sharding = NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(array, sharding)
