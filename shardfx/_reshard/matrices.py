"""A function of whole matrices over a tree of sharded matrices: each matrix goes to one owner device and comes back.

On the wire, each device sends one row of `OwnerExchange.width` units to each owner: its pieces of the owner's matrices,
concatenated. So an owner receives a row from each device, and the columns of a matrix in these rows are all of its
pieces.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError
from .._ground.tree import flatten
from .._plan import ShardPlan, check_plan, plan as plan_of, rows_of
from .._rules import PathRules
from .shardings import placed
from .stacks import Other, OwnerExchange, Stack, Where, exchanges_of
from .traced import move_traced


@dataclasses.dataclass(frozen=True, eq=False)
class MappedMatrices:
    """The function that [`shardfx.map_matrices`][] returns, from a tree to a tree of the same structure.

    **Arguments:**

    - `plan`: the plan of the tree, before and after the call.
    - `exchanges`: the groups of matrices that share an all-to-all.
    """

    plan: ShardPlan
    exchanges: tuple[OwnerExchange, ...]
    _fn: Callable[..., Any]
    _others: Mapping[int, Other]
    _state: Callable[[Any], Any] | None

    def __call__(self, tree: object, states: PyTree = None) -> PyTree:
        """The tree with `fn` applied to every matrix; with `state=`, the tree and the new states."""
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
        """The initial states of all matrices, one stack each. Call it inside `jit` with `states.shardings`."""
        if self._state is None:
            raise LeafTypeError("these matrices have no states; pass `map_matrices(..., state=init)`.")
        init, made = self._state, {}
        for exchange, number, stack in self._stacks():
            slots, first = exchange.starts(number).size * exchange.size(exchange.cut), stack.parts[0]
            made[stack.name] = jax.vmap(lambda _, one=first: init(jnp.zeros(one.matrix, one.dtype)))(jnp.zeros(slots))
        return made

    @property
    def states(self) -> ShardPlan:
        """The plan of the states. Each state is on the owner device of its matrix."""
        shapes = jax.eval_shape(self.init)
        mesh = self.plan.mesh if self.plan.jax_mesh is None else self.plan.jax_mesh
        rules = [(f"^{one.name}(/|$)", PartitionSpec((*by.cut, *by.axes))) for by, _, one in self._stacks()]
        return plan_of(shapes, mesh, paths=PathRules(rules), strict=True)

    def _stacks(self) -> list[tuple[OwnerExchange, int, Stack]]:
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
    """A function that applies `fn` to every whole matrix of a tree, each on one device, for use inside a jitted step.

    Muon, Shampoo and clipping by a spectral norm compute on whole matrices. If the matrices are sharded, XLA gathers
    every matrix on every device, and each device computes all of them. This function sends each matrix to one owner
    device by an all-to-all. It assigns large matrices first, so that all owners get about equally much. Each owner
    computes its own matrices, and another all-to-all sends them back. Matrices of different shapes and shardings share
    an all-to-all if it then sends less.

    Arrays come and go with the plan's shardings. An array of two dimensions is a matrix. Leading dimensions that the
    plan's names call layers, stages, blocks or experts count matrices. Vectors and scalars stay unchanged. No matrix is
    divided: if there are fewer matrices than owners, some owners have none.

    Arrays that concatenate several matrices (q, k and v in one) are split by a [`shardfx.TreeMap`][]. With `plan` of
    the parts, call `map.inverse().apply(mapped(map.apply(tree)), like=tree)`.

    **Arguments:**

    - `fn`: a function from a matrix to one of the same shape and dtype; with `state`, from a matrix and its state to
        both.
    - `plan`: the plan of the tree.
    - `over`: the mesh axes whose devices own matrices. Without it: all that cut any of the matrices, and those of the
        logical name "batch".
    - `where`: a dict from a regex that is searched in an array's path, the first match counts, to a treatment. `(many,
        rows)`: the first `many` dimensions count matrices, the next `rows` ones are rows, and the others columns. A
        function: it is applied to the array, whose sharding stays. `None`: the array is left unchanged.
    - `state`: a function from a matrix to the state that `fn` takes with it and returns. The result then is a function
        from a tree and states to both; `.init()` makes the states, and `.states` is their plan. States stay with the
        owners.
    - `memory_limit_bytes`: bytes per device for what it sends and receives at a time. More all-to-alls need less at a
        time.

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
    """The mesh of the program: the mesh in the arrays' types if these are Explicit, else the plan's mesh."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types):
            return mesh
    return plan.mesh.abstract() if plan.jax_mesh is None else plan.jax_mesh


def _moved(x: Any, src: NamedSharding, dst: NamedSharding) -> Any:
    x = placed(x, src)
    return x if src.spec == dst.spec else move_traced(x, dst, src)


def _mapped(
    fn: Callable[..., object], exchange: OwnerExchange, arrays: Sequence[Any], states: PyTree, mesh: Any
) -> tuple[list[Any], Any]:
    """Applies `fn` to all matrices of an exchange in one `shard_map`, and returns the arrays and the new states."""
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


def _owned(fn: Callable[..., Any], exchange: OwnerExchange, number: int, owned: Any, states: PyTree) -> tuple[Any, Any]:
    """Applies `fn`, one matrix after another in a scan, to the matrices of one stack that a device owns. Returns the
    rows and the new states.
    """
    starts, stack = exchange.starts(number), exchange.stacks[number]

    def turn(owned: Any, slot: Any) -> Any:
        start, state = slot

        def called() -> Any:
            pieces = jax.lax.dynamic_slice_in_dim(owned, start, stack.width, axis=1)
            matrix = joined(exchange, stack, pieces)
            given = (matrix,) if state is None else (matrix, state)
            made = fn(*given)
            wanted, found = (
                jax.tree.map(lambda one: (one.shape, one.dtype), tree)
                for tree in (matrix if state is None else given, made)
            )
            if not eqx.tree_equal(wanted, found):
                raise LeafTypeError(
                    f"`fn` makes {found} of {wanted}, each a shape and a dtype; return the same shapes, dtypes and "
                    "structure, for example with `.astype(matrix.dtype)`."
                )
            made, new = (made, None) if state is None else made
            return jax.lax.dynamic_update_slice_in_dim(owned, apart(exchange, stack, made), start, axis=1), new

        # A slot without a matrix costs nothing.
        return called() if starts.min() >= 0 else jax.lax.cond(start >= 0, called, lambda: (owned, state))

    is_same = (starts == starts[0]).all()
    row = jnp.asarray(starts[0]) if is_same else jnp.asarray(starts)[jax.lax.axis_index(exchange.axes)]
    return jax.lax.scan(turn, owned, (row, states))


def packed(exchange: OwnerExchange, arrays: Sequence[jax.Array]) -> jax.Array:
    """The row of elements that a device sends to each owner: its pieces of all arrays."""
    column, unit = iter(arrays), exchange.unit
    pieces = [
        jnp.concatenate([next(column).reshape(-1, *stack.piece) for _ in stack.parts]) for stack in exchange.stacks
    ]
    made, order = [], []
    for owners, held in _alike(exchange):
        blocks = [_taken(pieces[at], own.ravel()).reshape(len(owners), -1, *unit) for at, own in held]
        left = exchange.width - sum(block.shape[1] for block in blocks)
        blocks.append(jnp.zeros((len(owners), left, *unit), pieces[0].dtype))
        made.append(jnp.concatenate(blocks, axis=1))
        order += [*owners]
    return _taken(jnp.concatenate(made), np.argsort(order))


def unpacked(exchange: OwnerExchange, rows: jax.Array) -> list[jax.Array]:
    """The arrays' shards, from the rows that owners send back: the inverse of `packed`."""
    pieces: list[list[jax.Array]] = [[] for _ in exchange.stacks]
    order: list[list[int]] = [[] for _ in exchange.stacks]
    for owners, held in _alike(exchange):
        ends = np.cumsum([own.shape[1] * exchange.stacks[at].width for at, own in held])
        blocks = jnp.split(_taken(rows, owners), ends.tolist(), axis=1)
        for (at, own), block in zip(held, blocks, strict=False):  # the last one is padding
            pieces[at].append(block.reshape(own.size, *exchange.stacks[at].piece))
            order[at] += own.ravel().tolist()
    made = []
    for stack, own, numbers in zip(exchange.stacks, pieces, order, strict=True):
        shapes = [(part.many[0] // exchange.size(part.cut), *part.many[1:]) for part in stack.parts]
        ends = np.cumsum([*map(math.prod, shapes)])[:-1].tolist()
        parts = jnp.split(_taken(jnp.concatenate(own), np.argsort(numbers)), ends)
        made += [one.reshape(*shape, *stack.piece) for one, shape in zip(parts, shapes, strict=True)]
    return made


def _alike(exchange: OwnerExchange) -> Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]]:
    """Yields groups of owners that hold equally many matrices of each stack: the owners' numbers, and for each stack
    the matrices of each owner.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for owner, own in enumerate(exchange.holds):
        found.setdefault(tuple(stack for stack, _ in own), []).append(owner)
    for stacks, owners in found.items():
        held = np.array([exchange.holds[owner] for owner in owners], int).reshape(len(owners), -1, 2)
        yield np.array(owners), [(stack, held[:, held[0, :, 0] == stack, 1]) for stack in dict.fromkeys(stacks)]


def _taken(rows: jax.Array, numbers: np.ndarray) -> jax.Array:
    """The rows with these numbers. Consecutive rows are a slice instead of a gather."""
    first, count = int(numbers[0]), len(numbers)
    if not np.array_equal(numbers, np.arange(first, first + count)):
        return rows[numbers]
    return rows if count == len(rows) else rows[first : first + count]


def sent(exchange: OwnerExchange, rows: jax.Array) -> jax.Array:
    """Sends each row to its owner, or back to its sender, by an all-to-all."""
    return jax.lax.all_to_all(rows, exchange.axes, 0, 0, tiled=True) if len(exchange.holds) > 1 else rows


def joined(exchange: OwnerExchange, stack: Stack, pieces: jax.Array) -> jax.Array:
    """Assembles a whole matrix from the pieces of all devices: the inverse of `apart`."""
    every, grid, order = _grid(exchange, stack)
    # Of the devices that hold the same piece, the first one's copy is taken.
    pieces = pieces.reshape(*every, *stack.piece)[tuple(slice(size) for size in grid)]
    return pieces.transpose(order).reshape(stack.parts[0].matrix)


def apart(exchange: OwnerExchange, stack: Stack, matrix: jax.Array) -> jax.Array:
    """Splits a whole matrix into the piece of each device: the inverse of `joined`."""
    every, grid, order = _grid(exchange, stack)
    pieces = matrix.reshape([(*grid, *stack.piece)[at] for at in order]).transpose(np.argsort(order))
    pieces = jnp.broadcast_to(pieces, (*every, *stack.piece))
    return pieces.reshape(len(exchange.holds), -1, *exchange.unit)


def _grid(exchange: OwnerExchange, stack: Stack) -> tuple[list[int], list[int], list[int]]:
    """How a stack's pieces form a matrix: the size of each of the owners' axes, the number of parts into which it
    divides a matrix, and the order for `transpose`.
    """
    axes, laid = exchange.axes, stack.parts[0].laid
    cuts = {axis for own in laid for axis in own}
    every = [exchange.sizes[axis] for axis in axes]
    grid = [size if axis in cuts else 1 for axis, size in zip(axes, every, strict=True)]
    order = [at for dim, own in enumerate(laid) for at in (*map(axes.index, own), len(axes) + dim)]
    return every, grid, [at for at in range(len(axes)) if at not in order] + order
