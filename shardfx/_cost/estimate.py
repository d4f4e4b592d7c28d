"""What a step should send under its plans, from its jaxpr: nothing is compiled."""

import functools as ft
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from .. import chips
from .._arrays.entries import by_parameter, spread
from .._arrays.static import is_traced
from .._ground.errors import MeshError, PlanMismatchError
from .._ground.spec import entries_of, entry_axes
from .._ground.tree import flatten
from .._plan.shard_plan import ShardPlan
from ..topology._mesh import MeshSpec
from .graph import Pin, Traced
from .layout import MeshParts
from .memory.program import Program
from .memory.usage import traced as traced_program, usage_of
from .nested import without_dead
from .propagate import propagated
from .rows import rows_of
from .trace import constrained_results, traced
from .traffic_rows import Traffic
from .walk import Habits, walked


Compiler = Literal["tpu", "gpu", "cpu"]
HABITS: Mapping[str, Habits] = {
    "tpu": Habits(),
    "gpu": Habits(),
    "cpu": Habits(scatters=False, adds_first=False, sends_twice=True, whole=("top_k",)),
}


def estimate(
    step: Callable[..., Any], *args: Any, plans: Any = None, out: Any = "as arguments", compiler: Compiler = "tpu"
) -> Traffic:
    """What a step should send under its plans, row by row, without compiling it.

    The step is traced, and every array in it gets the layout that follows from those of the arguments and from the
    constraints, as a compiler would choose it. What each operation then needs from other devices is priced: the
    backward pass, what is computed again, loops as often as they run, and sums of parts only where someone needs the
    whole. [`shardfx.traffic`][] reads the same off a compiled program; [`shardfx.compare`][] says where the two differ.

    **Arguments:**

    - `step`: a function of trees: plain, or by `jax.jit`, `equinox.filter_jit` or [`shardfx.filter_jit`][].
    - `args`: its arguments; ShapeDtypeStructs do. What is no array is passed on as it is.
    - `plans`: how the arguments are sharded, as the `in_shardings` of [`shardfx.filter_jit`][], but plans need no
        devices. What it leaves out lies as its structs say, or else in any way.
    - `out`: how the results are, in the same form. By default a result that has the structure, shapes and dtypes of an
        argument leaves as that came, as parameters do; everything else in any way. `None` leaves all results free.
    - `compiler`: whose habits count. "tpu" and "gpu" scatter a sum that is cut afterwards; "cpu" sends all of it,
        and gathers what a `top_k` takes.

    **Returns:**

    A [`shardfx.Traffic`][]. What is not known to this estimate counts as if every device took in all of its operands,
    and its row says so.

    **Raises:**

    `PlanMismatchError` for plans that do not fit the arguments; `MeshError` where they are for different meshes, or
    for none; what `step` raises when it is traced.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, estimate, plan

        mesh = MeshSpec({"fsdp": 8})  # no devices
        w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        plans = tuple(plan(a, mesh, paths=PathRules.parse(".*->fsdp")) for a in (w, x))
        (row,) = estimate(lambda w, x: x @ w, w, x, plans=plans).rows
        assert (row.kind, row.axes) == ("all-gather", ("fsdp",))
        assert row.wire_bytes == 64 * 256 * 4 * 7 // 8
        ```
    """
    return Prepared(step, args).under(plans, out, compiler)


class Prepared:
    """A step that is traced once, to be estimated under many plans."""

    def __init__(self, step: Callable[..., Any], args: Sequence[Any]):
        self.step, self.args = step, tuple(args)
        self.leaves, self.treedef = jax.tree.flatten(self.args)
        self.paths = [path for arg in self.args for path in flatten(arg).paths]
        self.arrays = [at for at, leaf in enumerate(self.leaves) if is_traced(type(leaf))]
        self.result: Any = None
        closed = jax.make_jaxpr(self._run)([self.leaves[at] for at in self.arrays])
        self.graph = traced(without_dead(closed), [self.paths[at] for at in self.arrays])

    def _run(self, arrays: list[Any]) -> list[Any]:
        leaves = list(self.leaves)
        for at, array in zip(self.arrays, arrays, strict=True):
            leaves[at] = array
        result = self.step(*jax.tree.unflatten(self.treedef, leaves))
        self.result = result
        return [leaf for leaf in jax.tree.leaves(result) if is_traced(type(leaf))]

    def under(self, plans: Any, out: Any = "as arguments", compiler: Compiler = "tpu") -> Traffic:
        """What [`shardfx.estimate`][] returns for these plans."""
        return self.worked(plans, out, compiler)[0]

    def worked(self, plans: Any, out: Any = "as arguments", compiler: Compiler = "tpu") -> tuple[Traffic, float]:
        """What is sent under these plans, and how many operations of products each device then does."""
        given = _Given(self, plans)
        graph, pins = given.laid_out(out)
        axes = MeshParts(given.mesh)
        layouts = propagated(graph, axes, pins)
        found = walked(graph, axes, layouts, HABITS[compiler])
        return Traffic(rows_of(graph, axes, found.sent), given.mesh.size), found.flops

    def held(self, plans: Any, chip: chips.Chip) -> int:
        """Bytes of a device at the worst moment under these plans; results take over the memory of arguments."""
        given = _Given(self, plans)
        shardings = [given.shardings[at] for at in self.arrays]
        donated = [True] * len(shardings)
        is_tpu = chip.torus_dims > 0
        sizes = dict(given.mesh.shape)
        return usage_of(self.program, shardings, sizes, donated=donated, tile=chip.tile, tpu=is_tpu).bytes

    @ft.cached_property
    def program(self) -> Program:
        """The step as its memory is measured."""
        return traced_program(self.step, self.args)


class _Given:
    """How the arguments of a step lie, and on which mesh."""

    def __init__(self, prepared: Prepared, plans: Any):
        self.prepared, self.args = prepared, prepared.args
        self.mesh = _mesh_of(plans, self.args)
        self.shardings: list[Any] = []
        for which, arg, entry in by_parameter(plans, _signature(prepared.step, len(self.args))).of(self.args, {}):
            places = spread(entry, arg, f"argument {which} of the step")
            leaves = flatten(arg).leaves
            self.shardings += [_own(leaf) if s is None else s for leaf, s in zip(leaves, places, strict=True)]

    def laid_out(self, out: Any) -> tuple[Traced, dict[int, Pin]]:
        """The step as operations that end in the layouts of its results, and the layouts of its arguments."""
        graph, result = self.prepared.graph, self.prepared.result
        pins = {
            value: _pin(self.shardings[at], len(graph.values[value].shape))
            for value, at in zip(graph.arguments, self.prepared.arrays, strict=True)
            if self.shardings[at] is not None
        }
        leaves = jax.tree.leaves(result)
        places = [place for leaf, place in zip(leaves, self.out(out, result), strict=True) if is_traced(type(leaf))]
        wanted = [
            None if place is None else _pin(place, len(graph.values[value].shape))
            for value, place in zip(graph.results, places, strict=True)
        ]
        return constrained_results(graph, wanted), pins

    def out(self, out: Any, result: Any) -> list[Any]:
        """The sharding of each leaf of what the step returned."""
        if out != "as arguments":
            return spread(out, result, "what the step returns")
        known, at = {}, 0
        for arg in self.args:
            count = len(jax.tree.leaves(arg))
            known.setdefault(_kind_of(arg), self.shardings[at : at + count])
            at += count
        found: list[Any] = []
        for part in result if type(result) in (tuple, list) else [result]:
            found += known.get(_kind_of(part), [None] * len(jax.tree.leaves(part)))
        return found


def _signature(step: Callable[..., Any], count: int) -> inspect.Signature:
    try:
        signature = inspect.signature(step)
        signature.bind(*range(count))
    except (ValueError, TypeError):
        parameter = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        return inspect.Signature([parameter])
    return signature


def _mesh_of(plans: Any, args: Any) -> MeshSpec:
    found: list[MeshSpec] = []
    entries = jax.tree.leaves((plans, args), is_leaf=lambda node: isinstance(node, ShardPlan))
    for entry in entries:
        if isinstance(entry, ShardPlan):
            found.append(entry.mesh)
            continue
        sharding = entry if isinstance(entry, NamedSharding) else _own(entry)
        if sharding is not None:
            found.append(MeshSpec.of(sharding.mesh))
    if not found:
        raise MeshError(
            "an estimate needs a mesh, and neither `plans` nor the arguments have one; pass `plans=`, or structs with "
            "shardings, such as `plan.structs`."
        )
    for other in found:
        if dict(other.shape) != dict(found[0].shape):
            raise MeshError(f"the arguments are planned for different meshes, {found[0]} and {other}; use one mesh.")
    return max(found, key=lambda mesh: max(mesh.dcn_sizes, default=1))


def _own(leaf: Any) -> NamedSharding | None:
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _pin(sharding: Any, rank: int) -> Pin:
    if not isinstance(sharding, NamedSharding):
        raise PlanMismatchError(
            f"an estimate reads plans and NamedShardings, not {sharding!r:.120}; use `NamedSharding(mesh, spec)`."
        )
    entries = [*entries_of(sharding.spec), *[None] * rank][:rank]
    return Pin(tuple(entry_axes(entry) for entry in entries))


def _kind_of(tree: Any) -> Any:
    """What two trees have in common that are sharded alike: structure, shapes and dtypes."""
    arrays = eqx.filter(tree, lambda leaf: is_traced(type(leaf)))
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
