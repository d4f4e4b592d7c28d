"""A function of whole matrices over a tree whose matrices are cut: each goes to one owner and comes back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError
from .._ground.tree import flatten
from .._plan import ShardPlan, check_plan, plan as plan_of, rows_of
from .._rules import PathRules
from .owners import apart, joined, packed, row_of_owner, sent, unpacked
from .stacks import Exchange, Other, Stack, Where, exchanges_of
from .steps.program import placed
from .traced import traced


@dataclasses.dataclass(frozen=True, eq=False)
class MappedMatrices:
    """What [`shardfx.map_matrices`][] returns: a function from a tree to a tree of the same structure.

    **Arguments:**

    - `plan`: how the arrays of the tree lie, before and afterwards.
    - `exchanges`: which matrices go to their owners together.
    """

    plan: ShardPlan
    exchanges: tuple[Exchange, ...]
    _fn: Callable[..., Any]
    _others: Mapping[int, Other]
    _state: Callable[[Any], Any] | None

    def __call__(self, tree: object, states: PyTree = None) -> PyTree:
        """The tree with `fn` applied to every matrix; with `state=`, that and the new states."""
        flat = flatten(tree)
        rows_of(self.plan.content, flat)
        leaves, places = [*flat.leaves], [at for at, is_array in enumerate(flat.is_array) if is_array]
        mesh = _mesh_of(self.plan, [leaves[at] for at in places])
        new_states = {}
        for at, other in self._others.items():
            leaves[places[at]] = leaves[places[at]] if other is None else other(leaves[places[at]])
        for exchange in self.exchanges:
            own = {one.name: None if self._state is None else states[one.name] for one in exchange.stacks}
            arrays = [leaves[places[part.at]] for part in exchange.parts]
            results, kept = _mapped(self._fn, exchange, arrays, own, mesh)
            new_states |= kept
            for part, result in zip(exchange.parts, results, strict=True):
                leaves[places[part.at]] = result
        result = jax.tree.unflatten(flat.treedef, leaves)
        return result if self._state is None else (result, new_states)

    def init(self) -> dict[str, Any]:
        """The states of all matrices as they begin, one stack each; call it inside `jit` with `states.shardings`."""
        if self._state is None:
            raise LeafTypeError("these matrices have no states; pass `map_matrices(..., state=init)`.")
        init, made = self._state, {}
        for exchange, number, stack in self._stacks():
            slots, first = exchange.starts(number).size * exchange.size(exchange.cut), stack.parts[0]
            made[stack.name] = jax.vmap(lambda _, one=first: init(jnp.zeros(one.matrix, one.dtype)))(jnp.zeros(slots))
        return made

    @property
    def states(self) -> ShardPlan:
        """The plan of the states: each lies with the owner of its matrix."""
        shapes = jax.eval_shape(self.init)
        mesh = self.plan.mesh if self.plan.jax_mesh is None else self.plan.jax_mesh
        rules = [(f"^{one.name}(/|$)", PartitionSpec((*by.cut, *by.axes))) for by, _, one in self._stacks()]
        return plan_of(shapes, mesh, paths=PathRules(rules), strict=True)

    def _stacks(self) -> list[tuple[Exchange, int, Stack]]:
        return [(by, number, one) for by in self.exchanges for number, one in enumerate(by.stacks)]


def map_matrices(
    fn: Callable[..., object],
    plan: ShardPlan,
    *,
    over: str | Sequence[str] | None = None,
    where: Where | None = None,
    state: Callable[[Any], Any] | None = None,
    memory_limit_bytes: int | None = None,
) -> MappedMatrices:
    """A function that applies `fn` to every matrix of a tree whole, each on one device, for use inside a jitted step.

    Muon, Shampoo and clipping by a spectral norm compute on whole matrices. If the matrices are cut, XLA gathers every
    matrix on every device, and each device computes all of them. Here one all-to-all deals the matrices to owners,
    large ones first, so that all owners get about as much. Each owner computes its own. Another all-to-all brings them
    back. Matrices of different shapes and layouts share an all-to-all where it then sends less.

    Arrays come and go as the plan lays them out. An array of two dimensions is a matrix. Leading dimensions that the
    plan's names call layers, stages, blocks or experts count matrices. Vectors and scalars stay as they are. No matrix
    is cut: if there are fewer matrices than owners, some owners have none.

    Arrays that hold several matrices side by side (q, k and v in one) are split by a [`shardfx.TreeMap`][]. With `plan`
    of the parts, call `map.inverse().apply(mapped(map.apply(tree)), like=tree)`.

    **Arguments:**

    - `fn`: from a matrix to one of the same shape and dtype; with `state`, from a matrix and its state to both.
    - `plan`: the plan of the tree.
    - `over`: the mesh axes whose devices own matrices. Without it: all that cut any of the matrices, and those of the
        logical name "batch".
    - `where`: by a regex that is searched in an array's path, first match first. `(many, rows)`: so many leading
        dimensions count matrices, the next ones are rows, and the others columns. A function: what the array goes
        through as it lies. `None`: it stays as it is.
    - `state`: from a matrix to the state that `fn` takes with it and returns. The result then is a function from a tree
        and states to both; `.init()` makes the states, and `.states` is their plan. States stay with the owners.
    - `memory_limit_bytes`: per device, for what it sends and receives at a time. More all-to-alls take less.

    **Returns:**

    A function from a tree to a tree of the same structure.

    **Raises:**

    `SpecError` for an array of more dimensions that nothing explains; `LeafTypeError` for matrices of integers or of
    complex numbers; `RuleError` for a regex that decides about no array; `MoveError` for a limit that cannot be kept;
    when it is called, `PlanMismatchError` for another tree.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, fsdp, map_matrices, plan, shard

        tree = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8)), "bias": jnp.ones(16)}
        mesh = MeshSpec({"fsdp": 4}).build(jax.devices()[:4])
        made = plan(tree, mesh, paths=PathRules([(".*", fsdp("fsdp"))]))
        normed = map_matrices(lambda one: one / jnp.linalg.norm(one, ord=2), made)
        result = jax.jit(normed, out_shardings=made.shardings)(shard(tree, made))
        assert jnp.allclose(jnp.linalg.norm(result["up"], ord=2), 1.0)
        ```
    """
    check_plan("plan", plan)
    over = (over,) if isinstance(over, str) else over
    exchanges, others = exchanges_of(plan, over, where or {}, memory_limit_bytes)
    return MappedMatrices(plan, exchanges, fn, others, state)


def _mesh_of(plan: ShardPlan, arrays: Sequence[object]) -> Any:
    """The mesh of the program: that of Explicit types, or the plan's."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types):
            return mesh
    return plan.mesh.abstract() if plan.jax_mesh is None else plan.jax_mesh


def _moved(x: Any, src: NamedSharding, dst: NamedSharding) -> Any:
    x = placed(x, src)
    return x if src.spec == dst.spec else traced(x, dst, src)


def _mapped(
    fn: Callable[..., object], exchange: Exchange, arrays: Sequence[Any], states: PyTree, mesh: Any
) -> tuple[list[Any], Any]:
    """The arrays of an exchange after `fn`, and the new states: one program of each device."""
    parts = exchange.parts
    here = [NamedSharding(mesh, part.spec(part.entries)) for part in parts]
    specs = [part.spec(part.laid) for part in parts]
    there = [NamedSharding(mesh, spec) for spec in specs]
    whole = [jnp.reshape(one, (*part.many, *part.rest)) for one, part in zip(arrays, parts, strict=True)]

    def run(arrays: list[Any], states: dict[str, object]) -> Any:
        held, made = sent(exchange, packed(exchange, arrays)), {}
        for number, stack in enumerate(exchange.stacks):
            held, made[stack.name] = _owned(fn, exchange, number, held, states[stack.name])
        return unpacked(exchange, sent(exchange, held)), made

    owners = PartitionSpec((*exchange.cut, *exchange.axes))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs, owners), out_specs=(specs, owners), check_vma=False)
    results, states = mapped([*map(_moved, whole, here, there)], states)
    back = map(_moved, results, there, here)
    return [jnp.reshape(one, array.shape) for one, array in zip(back, arrays, strict=True)], states


def _owned(fn: Callable[..., Any], exchange: Exchange, number: int, owned: Any, states: PyTree) -> tuple[Any, Any]:
    """What a device owns after `fn` of the matrices of one stack, and their states, one after the other in a loop."""
    starts, stack = exchange.starts(number), exchange.stacks[number]

    def turn(owned: Any, slot: Any) -> Any:
        start, state = slot

        def called() -> Any:
            pieces = jax.lax.dynamic_slice_in_dim(owned, start, stack.width, axis=1)
            matrix = joined(exchange, stack, pieces)
            given = (matrix,) if state is None else (matrix, state)
            made = fn(*given)
            _check_result(made, matrix if state is None else given)
            made, new = (made, None) if state is None else made
            return jax.lax.dynamic_update_slice_in_dim(owned, apart(exchange, stack, made), start, axis=1), new

        # A slot without a matrix costs nothing.
        return called() if starts.min() >= 0 else jax.lax.cond(start >= 0, called, lambda: (owned, state))

    return jax.lax.scan(turn, owned, (row_of_owner(exchange, starts), states))


def _check_result(made: object, same: object) -> None:
    wanted, found = (jax.tree.map(lambda one: (one.shape, one.dtype), tree) for tree in (same, made))
    if not eqx.tree_equal(wanted, found):
        raise LeafTypeError(
            f"`fn` makes {found} of {wanted}, each a shape and a dtype; return the same shapes, dtypes and structure, "
            "for example with `.astype(matrix.dtype)`."
        )
