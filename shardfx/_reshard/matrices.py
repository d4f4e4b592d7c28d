"""A function of whole matrices over a tree whose matrices are cut: each goes to one owner and comes back."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.tree import flatten
from .._plan import plan as plan_of
from .._plan.shard_plan import ShardPlan, check_plan
from .._rules.path_rules import PathRules
from .mover import reshard
from .stacks import Other, Stack, Where, stacks_of


@dataclasses.dataclass(frozen=True, eq=False)
class MappedMatrices:
    """What [`shardfx.map_matrices`][] returns: a function from a tree to a tree of the same structure.

    **Arguments:**

    - `plan`: how the arrays of the tree lie, before and afterwards.
    - `stacks`: which matrices go to their owners together.
    """

    plan: ShardPlan
    stacks: tuple[Stack, ...]
    _fn: Callable[..., Any]
    _others: Mapping[int, Other]
    _state: Callable[[Any], Any] | None

    def __call__(self, tree: Any, states: Any = None) -> Any:
        """The tree with `fn` applied to every matrix; with `state=`, that and the new states."""
        flat = flatten(tree)
        arrays = [leaf for leaf, yes in zip(flat.leaves, flat.is_array, strict=True) if yes]
        self._check(flat)
        mesh = _mesh_of(self.plan, arrays)
        made: list[Any] = [
            other(array) if (other := self._others.get(at)) is not None else array for at, array in enumerate(arrays)
        ]
        new_states = {}
        for stack in self.stacks:
            own = None if self._state is None else states[stack.name]
            results, new_states[stack.name] = _mapped(self._fn, stack, [arrays[p.at] for p in stack.parts], own, mesh)
            for part, result in zip(stack.parts, results, strict=True):
                made[part.at] = result
        column = iter(made)
        leaves = [next(column) if yes else leaf for leaf, yes in zip(flat.leaves, flat.is_array, strict=True)]
        result = jax.tree.unflatten(flat.treedef, leaves)
        return result if self._state is None else (result, new_states)

    def init(self) -> dict[str, Any]:
        """The states of all matrices as they begin, one stack each; call it inside `jit` with `states.shardings`."""
        if self._state is None:
            raise LeafTypeError("these matrices have no states; pass `map_matrices(..., state=init)`.")
        init = self._state
        return {
            one.name: jax.vmap(lambda _, one=one: init(jnp.zeros(one.parts[0].matrix, one.parts[0].dtype)))(
                jnp.zeros(len(one.order))
            )
            for one in self.stacks
        }

    @property
    def states(self) -> ShardPlan:
        """The plan of the states: each lies with the owner of its matrix."""
        shapes = jax.eval_shape(self.init)
        mesh = self.plan.mesh if self.plan.jax_mesh is None else self.plan.jax_mesh
        rules = [(f"^{one.name}(/|$)", PartitionSpec(one.axes)) for one in self.stacks]
        return plan_of(shapes, mesh, paths=PathRules(rules), strict=True)

    def _check(self, flat: Any) -> None:
        columns = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
        found = [(path, tuple(leaf.shape)) for path, leaf, yes in columns if yes]
        known = [(leaf.path, leaf.shape) for leaf in self.plan.leaves]
        for mine, planned in itertools.zip_longest(found, known):
            if mine != planned:
                here, there = (f"`{one[0]}` of shape {one[1]}" if one else "no more arrays" for one in (mine, planned))
                raise PlanMismatchError(
                    f"`map_matrices`: the tree has {here}, and the plan has {there} there; pass the plan of this tree."
                )


def map_matrices(
    fn: Callable[..., Any],
    plan: ShardPlan,
    *,
    over: str | Sequence[str] | None = None,
    where: Where | None = None,
    state: Callable[[Any], Any] | None = None,
    memory_limit_bytes: int | None = None,
) -> MappedMatrices:
    """A function that applies `fn` to every matrix of a tree whole, each on one device, for use inside a jitted step.

    Muon, Shampoo and clipping by a spectral norm compute on whole matrices. If the matrices are cut, XLA gathers every
    matrix on every device, and each device computes all of them. Here matrices of one shape, dtype and layout become a
    stack. One all-to-all deals its matrices to owners, each owner computes its own, and another brings them back.

    Arrays come and go as the plan lays them out. An array of two dimensions is a matrix. Leading dimensions that the
    plan's names call layers, stages, blocks or experts count matrices. Vectors and scalars stay as they are.

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
    - `memory_limit_bytes`: per device, for two stacks' parts and a matrix. Stacks become smaller to keep it.

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
    stacks, others = stacks_of(plan, over, where or {}, memory_limit_bytes)
    return MappedMatrices(plan, stacks, fn, others, state)


def _mesh_of(plan: ShardPlan, arrays: Sequence[Any]) -> Any:
    """The mesh of the program: that of Explicit types, or the plan's."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types):
            return mesh
    return plan.mesh.abstract() if plan.jax_mesh is None else plan.jax_mesh


def _mapped(
    fn: Callable[..., Any], stack: Stack, arrays: Sequence[Any], states: Any, mesh: Any
) -> tuple[list[Any], Any]:
    """The arrays of a stack after `fn`, and the new states."""
    first = stack.parts[0]
    here = NamedSharding(mesh, PartitionSpec(first.cut or None, *(axes or None for axes in first.entries)))
    owned = NamedSharding(mesh, PartitionSpec(stack.axes))
    dealt = np.array(stack.order)
    # A cut dimension comes first and stays whole in each device's part: the parts of several arrays lie beside it.
    dim = 1 if first.cut else 0
    flat = [
        jnp.reshape(one, (part.many[0], -1, *part.rest) if dim else (part.number, *part.rest))
        for one, part in zip(arrays, stack.parts, strict=True)
    ]
    sizes = [one.shape[dim] for one in flat]
    whole = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=dim)
    whole = jnp.reshape(whole, (-1, *first.rest)) if dim else whole
    is_dealt = not np.array_equal(dealt, np.arange(len(whole)))
    if is_dealt:
        # Rows that no matrix fills are the first one's: no device looks at them.
        whole = whole[np.maximum(dealt, 0)]
    moved = reshard(_laid(whole, here), owned, src=None if _is_typed(mesh) else here)
    results, states = _owned(fn, moved, dealt >= 0, states, owned, first.matrix)
    back = reshard(results, here, src=None if _is_typed(mesh) else owned)
    if is_dealt:
        back = back[np.argsort(np.where(dealt < 0, len(dealt), dealt), kind="stable")[: int((dealt >= 0).sum())]]
    back = jnp.reshape(back, (first.many[0], -1, *first.rest)) if dim else back
    ends = np.cumsum(sizes)[:-1].tolist()
    pieces = [back] if len(sizes) == 1 else jnp.split(back, ends, axis=dim)
    return [jnp.reshape(one, array.shape) for one, array in zip(pieces, arrays, strict=True)], states


def _is_typed(mesh: Any) -> bool:
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def _laid(x: Any, sharding: NamedSharding) -> Any:
    if _is_typed(sharding.mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _owned(
    fn: Callable[..., Any], stacked: Any, valid: np.ndarray, states: Any, sharding: NamedSharding, matrix: Any
) -> tuple[Any, Any]:
    """Each owner's matrices one after the other, in a loop; a slot without a matrix costs nothing."""

    def one(slot: Any) -> Any:
        x, is_there, state = slot
        given = (x.reshape(matrix),) if state is None else (x.reshape(matrix), state)
        same = given[0] if state is None else given

        def called() -> Any:
            made = fn(*given)
            _check_result(made, same)
            return made

        made = called() if valid.all() else jax.lax.cond(is_there, called, lambda: same)
        made, state = (made, None) if state is None else made
        return made.reshape(x.shape), state

    def here(x: Any, is_there: Any, states: Any) -> Any:
        return jax.lax.map(one, (x, is_there, states))

    spec = sharding.spec
    run = jax.shard_map(here, mesh=sharding.mesh, in_specs=(spec, spec, spec), out_specs=(spec, spec), check_vma=False)
    return run(stacked, _laid(jnp.asarray(valid), sharding), states)


def _check_result(made: Any, same: Any) -> None:
    wanted, found = (jax.tree.map(lambda one: (one.shape, one.dtype), tree) for tree in (same, made))
    if not eqx.tree_equal(wanted, found):
        raise LeafTypeError(
            f"`fn` makes {found} of {wanted}, each a shape and a dtype; return the same shapes, dtypes and structure, "
            "for example with `.astype(matrix.dtype)`."
        )
