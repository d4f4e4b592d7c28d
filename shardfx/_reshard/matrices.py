"""`map_matrices`: applies a function to each whole matrix of a tree of sharded
matrices, on one owner device each.

Each device sends one row of elements to each owner: its shards of the owner's matrices,
concatenated. An owner therefore receives one row from each device. The same columns of
all rows hold the shards of one matrix. A *stack* is the matrices of equal shape, dtype
and sharding.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, bytes_or_none
from .._ground.text import together
from .._ground.tree import flatten
from .._plan import ShardPlan, check_plan, plan as plan_of, rows_of
from .._rules import PathRules
from .shardings import placed
from .stacks import ArrayFn, Matrices, OwnerExchange, Stack, Where, exchanges_of
from .traced import move_traced


@dataclasses.dataclass(frozen=True, eq=False)
class MappedMatrices:
    """The function that [`shardfx.map_matrices`][] returns, from a tree to a tree of
    the same structure.

    **Arguments:**

    - `plan`: the plan of the tree. The results have the shardings of the arguments.
    - `exchanges`: the groups of matrices, each of which is sent by one all-to-all.
    """

    __module__ = "shardfx.results"

    plan: ShardPlan
    exchanges: tuple[OwnerExchange, ...]
    _fn: Callable[..., Any]
    _others: Mapping[int, ArrayFn]
    _state: Callable[[Any], Any] | None

    def __call__(self, tree: object, states: PyTree = None) -> PyTree:
        """Returns the tree with the mapped function applied to every matrix. If
        `map_matrices` was given a `state`, the call takes the states of all matrices
        too, as `init` returns them, and returns the tree and the new states.
        """
        flat = flatten(tree)
        # Raises an error if the tree is not the plan's. A row number is negative for a
        # leaf that is no array of the plan, such as one that `select` left out.
        row_numbers = rows_of(self.plan.content, flat)
        leaves = [*flat.leaves]
        number_by_path = {}
        for number, path in enumerate(flat.paths):
            if row_numbers[number] >= 0:
                number_by_path[path] = number
        # For each array of the plan, the number of its leaf in the tree.
        leaf_numbers = [number_by_path[leaf.path] for leaf in self.plan.leaves]
        mesh = _mesh_of(self.plan, [leaves[number] for number in leaf_numbers])
        # Arrays that are not divided into matrices: a function maps the whole array.
        for array_number, function in self._others.items():
            if function is not None:
                leaf_number = leaf_numbers[array_number]
                leaves[leaf_number] = function(leaves[leaf_number])

        has_states = self._state is not None
        new_states: dict[str, Any] = {}
        for exchange in self.exchanges:
            old_states: dict[str, Any] = {}
            for stack in exchange.stacks:
                old_states[stack.name] = states[stack.name] if has_states else None
            leaves_of_exchange = [
                leaf_numbers[array.array_number] for array in exchange.arrays
            ]
            results, states_of_exchange = _map_exchange(
                self._fn,
                exchange,
                arrays=[leaves[number] for number in leaves_of_exchange],
                states=old_states,
                mesh=mesh,
            )
            new_states |= states_of_exchange
            for number, result in zip(leaves_of_exchange, results, strict=True):
                leaves[number] = result

        result = jax.tree.unflatten(flat.treedef, leaves)
        if has_states:
            return result, new_states
        return result

    def init(self) -> dict[str, Any]:
        """Returns the initial states of all matrices, made by the function that
        `map_matrices` took as `state`.

        A stack has the matrices of one shape, dtype and sharding. The dict maps the
        name of each stack to the states of its matrices, stacked along a new first
        dimension. Where this object is `mapped`, the owner devices make them by
        `jax.jit(mapped.init, out_shardings=mapped.states.shardings)()`. Raises
        `LeafTypeError` if `map_matrices` was given no `state`.
        """
        if self._state is None:
            raise LeafTypeError(
                "these matrices have no states; pass `map_matrices(..., state=init)`."
            )
        states: dict[str, Any] = {}
        for exchange, number, stack in self._stacks():
            # `starts` has a slot for each owner and each matrix that it can have. The
            # owners are there once for each index along the axes `lead_axes`.
            slots_of_owners = exchange.starts(number).size
            slot_count = slots_of_owners * exchange.size(exchange.lead_axes)
            state_of = ft.partial(_state_of_zeros, self._state, stack.arrays[0])
            states[stack.name] = jax.vmap(state_of)(jnp.zeros(slot_count))
        return states

    @property
    def states(self) -> ShardPlan:
        """The plan of the states that `init` returns. Each state is on the owner device
        of its matrix.
        """
        shapes = jax.eval_shape(self.init)
        mesh = self.plan.mesh if self.plan.jax_mesh is None else self.plan.jax_mesh
        rules: list[tuple[str, PartitionSpec]] = []
        for exchange, _, stack in self._stacks():
            # The mesh axes whose devices are owners: their states are stacked along
            # the first dimension.
            owner_axes = (*exchange.lead_axes, *exchange.axes)
            rules.append((f"^{stack.name}(/|$)", PartitionSpec(owner_axes)))
        return plan_of(shapes, mesh, paths=PathRules(rules), strict=True)

    def _stacks(self) -> list[tuple[OwnerExchange, int, Stack]]:
        """All stacks, each with its exchange and its number in the exchange."""
        stacks = []
        for exchange in self.exchanges:
            for number, stack in enumerate(exchange.stacks):
                stacks.append((exchange, number, stack))
        return stacks


def _state_of_zeros(
    init: Callable[[Any], Any],
    array: Matrices,
    _slot: jax.Array,
) -> Any:
    """The initial state of a matrix of `array`, made from zeros. `jax.vmap` calls this
    once for each `_slot`, which has no meaning.
    """
    return init(jnp.zeros(array.matrix_shape, array.dtype))


def map_matrices(
    fn: Callable[..., object],
    plan: ShardPlan,
    *,
    over: str | Sequence[str] | None = None,
    where: Where | None = None,
    state: Callable[[Any], Any] | None = None,
    memory_limit_bytes: int | None = None,
) -> MappedMatrices:
    """A function that applies `fn` to every whole matrix of a tree, each on one device,
    for use inside a jitted step.

    Muon, Shampoo and clipping by a spectral norm compute on whole matrices. If the
    matrices are sharded, XLA gathers every matrix on every device, and each device
    computes all of them. This function sends each matrix to one owner device by an
    all-to-all. The owners compute about equally much, since large matrices are assigned
    first. Another all-to-all sends the results back. Matrices of different shapes and
    shardings share an all-to-all if that sends fewer bytes.

    Arguments and results have the plan's shardings. An array of two dimensions is a
    matrix. Leading dimensions count matrices if the plan's names call them layers,
    stages, blocks or experts. Vectors and scalars stay unchanged. No matrix is divided:
    if there are fewer matrices than owners, some owners have none.

    A [`shardfx.TreeMap`][] named `map` can split arrays that concatenate several
    matrices (q, k and v in one). With `mapped` for a plan of the split tree, call
    `map.inverse().apply(mapped(map.apply(tree)), like=tree)`.

    **Arguments:**

    - `fn`: a function from a matrix to a matrix of the same shape and dtype; with
      `state`, from a matrix and its state to a matrix and a state.
    - `plan`: the plan of the tree.
    - `over`: the mesh axes along which matrices are spread over owner devices. By
      default these are all axes that shard a matrix, and the axes of the logical name
      "batch".
    - `where`: a dict from regexes to values. The first regex that matches a part of an
      array's path decides. The value `(many, rows)` says that the first `many`
      dimensions count matrices, the next `rows` dimensions are rows, and the others are
      columns. A value that is a function is applied to the whole array, and must keep
      the sharding. `None` leaves the array unchanged.
    - `state`: a function from a matrix to its initial state. `map_matrices` then
      returns a function that takes a tree and the states, and returns both. Its
      `.init()` makes the states, and its `.states` is their plan. Each state stays on
      the owner device of its matrix.
    - `memory_limit_bytes`: the most bytes per device for the elements that it sends and
      receives at a time and for one whole matrix. A low limit takes more all-to-alls.

    **Returns:**

    A function from a tree to a tree of the same structure.

    **Raises:**

    `SpecError` for an array of more than two dimensions if neither `where` nor its
    names say which of them count matrices; `LeafTypeError` for matrices of integers or
    of complex numbers; `RuleError` for a regex that decides about no array; `MoveError`
    if `memory_limit_bytes` is too low for some matrix. The returned function raises
    `PlanMismatchError` for a tree that is not the plan's.

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
    if not callable(fn):
        raise LeafTypeError(
            f"`fn` is a function of a matrix, not {fn!r:.80}; write `map_matrices(fn,"
            " plan)`."
        )
    over = (over,) if isinstance(over, str) else over
    memory_limit_bytes = bytes_or_none("memory_limit_bytes", memory_limit_bytes)
    exchanges, others = exchanges_of(plan, over, where or {}, memory_limit_bytes)
    return MappedMatrices(
        plan=plan, exchanges=exchanges, _fn=fn, _others=others, _state=state
    )


def _mesh_of(plan: ShardPlan, arrays: Sequence[object]) -> Any:
    """The mesh of the first of `arrays` whose type has a mesh with Explicit axes. If
    there is none, the plan's mesh.
    """
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    if plan.jax_mesh is not None:
        return plan.jax_mesh
    return plan.mesh.abstract()


def _moved(x: Any, src: NamedSharding, dst: NamedSharding) -> Any:
    """A traced array of the sharding `src`, moved to `dst`."""
    x = placed(x, src)
    if src.spec == dst.spec:
        return x
    return move_traced(x, dst, src)


def _map_exchange(
    fn: Callable[..., object],
    exchange: OwnerExchange,
    arrays: Sequence[Any],
    states: PyTree,
    mesh: Any,
) -> tuple[list[Any], Any]:
    """Applies `fn` to the matrices in `arrays`, which one all-to-all sends. `states`
    has the states of each stack by the stack's name, `None` for a stack without states.
    `mesh` is the mesh of the arrays. Returns the results, one for each array and with
    its shape and sharding, and the new states by the stack's name.
    """
    shardings: list[NamedSharding] = []
    sent_shardings: list[NamedSharding] = []
    sent_arrays: list[Any] = []
    for array, matrices in zip(arrays, exchange.arrays, strict=True):
        sharding = NamedSharding(mesh, matrices.spec(matrices.axes_in_plan))
        sent_sharding = NamedSharding(mesh, matrices.spec(matrices.axes_when_sent))
        # An array that is one matrix gets a leading dimension of size 1.
        with_lead = jnp.reshape(array, (*matrices.lead_shape, *matrices.inner_shape))
        shardings.append(sharding)
        sent_shardings.append(sent_sharding)
        sent_arrays.append(_moved(with_lead, sharding, sent_sharding))
    specs = [sharding.spec for sharding in sent_shardings]

    def run(arrays: list[Any], states: dict[str, object]) -> Any:
        """What each device does with its shards, and with the states that it owns. It
        sends one row of elements to each owner, and gets one row from each device.
        """
        rows = exchanged(exchange, packed(exchange, arrays))
        new_states = {}
        for number, stack in enumerate(exchange.stacks):
            rows, new_states[stack.name] = _scan(
                fn=fn,
                exchange=exchange,
                number=number,
                rows=rows,
                states=states[stack.name],
            )
        return unpacked(exchange, exchanged(exchange, rows)), new_states

    owners = PartitionSpec((*exchange.lead_axes, *exchange.axes))
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs, owners),
        out_specs=(specs, owners),
        check_vma=False,
    )
    results, states = mapped(sent_arrays, states)
    received = map(_moved, results, sent_shardings, shardings)
    shapes = [array.shape for array in arrays]
    return list(map(jnp.reshape, received, shapes)), states


def _scan(
    fn: Callable[..., Any],
    exchange: OwnerExchange,
    number: int,
    rows: Any,
    states: PyTree,
) -> tuple[Any, Any]:
    """Applies `fn` to each matrix of the stack `number` that this device owns. `rows`
    has a row from each device, with its shards of these matrices, and `states` the
    states of these matrices, if any. Returns the rows with the results in the place of
    the matrices, and the new states.
    """
    # For each owner, the first unit of each of its matrices in every row. A unit is a
    # block of elements. -1 stands for no matrix.
    starts = exchange.starts(number)
    stack = exchange.stacks[number]

    def map_slot(rows: Any, slot: Any) -> Any:
        """Maps one matrix in the rows. `slot` has its first unit and its state."""
        start, state = slot

        def apply() -> Any:
            shards = jax.lax.dynamic_slice_in_dim(
                rows, start, stack.units_per_shard, axis=1
            )
            matrix = assembled(exchange, stack, shards)
            new_state = None
            if state is None:
                new_matrix = fn(matrix)
                _require_alike(matrix, new_matrix)
            else:
                results = fn(matrix, state)
                _require_alike((matrix, state), results)
                new_matrix, new_state = results
            new_shards = split(exchange, stack, new_matrix)
            new_rows = jax.lax.dynamic_update_slice_in_dim(
                rows, new_shards, start, axis=1
            )
            return new_rows, new_state

        if starts.min() >= 0:
            return apply()
        # `fn` does not run for a slot without a matrix.
        return jax.lax.cond(start >= 0, apply, lambda: (rows, state))

    # A device looks up its own row of `starts`, unless all rows are equal.
    if (starts == starts[0]).all():
        own_starts = jnp.asarray(starts[0])
    else:
        own_starts = jnp.asarray(starts)[jax.lax.axis_index(exchange.axes)]
    return jax.lax.scan(map_slot, rows, (own_starts, states))


def _require_alike(argument: PyTree, result: PyTree) -> None:
    """Raises `LeafTypeError` unless the result of the mapped function has the shapes,
    the dtypes and the structure of its argument.
    """

    def kind_of(leaf: Any) -> tuple[tuple[int, ...], Any]:
        return leaf.shape, leaf.dtype

    expected = jax.tree.map(kind_of, argument)
    actual = jax.tree.map(kind_of, result)
    if not eqx.tree_equal(expected, actual):
        raise LeafTypeError(
            f"`fn` makes {actual} of {expected}, each a shape and a dtype; return"
            " the same shapes, dtypes and structure, for example with"
            " `.astype(matrix.dtype)`."
        )


def packed(exchange: OwnerExchange, arrays: Sequence[jax.Array]) -> jax.Array:
    """The rows that one device sends in the all-to-all, one row for each owner.
    `arrays` are the device's shards. A row holds the shards of all matrices of that
    owner, one after the other, and zeros up to the length of the longest row. Its
    length is counted in units, blocks of elements of the shape `exchange.unit`.
    """
    unit = exchange.unit
    shards_of_stacks: list[jax.Array] = []
    start = 0
    for stack in exchange.stacks:
        stop = start + len(stack.arrays)
        shards = [array.reshape(-1, *stack.shard_shape) for array in arrays[start:stop]]
        shards_of_stacks.append(jnp.concatenate(shards))
        start = stop

    dtype = shards_of_stacks[0].dtype
    rows_of_groups: list[jax.Array] = []
    order: list[int] = []
    # Owners of equally many matrices of each stack get their rows together.
    for owners, indices_by_stack in _owner_groups(exchange):
        blocks: list[jax.Array] = []
        units = 0
        for stack_number, indices in indices_by_stack.items():
            shards = _rows(shards_of_stacks[stack_number], indices.ravel())
            block = shards.reshape(len(owners), -1, *unit)
            blocks.append(block)
            units += block.shape[1]
        padding = exchange.units_per_owner - units
        blocks.append(jnp.zeros((len(owners), padding, *unit), dtype))
        rows_of_groups.append(jnp.concatenate(blocks, axis=1))
        order += [*owners]
    return _rows(jnp.concatenate(rows_of_groups), np.argsort(order))


def unpacked(exchange: OwnerExchange, rows: jax.Array) -> list[jax.Array]:
    """The shards of all arrays on a device, from the rows that the owner devices send
    back. The inverse of `packed`.
    """
    shards_of_stacks: list[list[jax.Array]] = [[] for _ in exchange.stacks]
    order_of_stacks: list[list[int]] = [[] for _ in exchange.stacks]
    for owners, indices_by_stack in _owner_groups(exchange):
        # In the owners' rows, the end of the matrices of each stack, in units.
        stops: list[int] = []
        stop = 0
        for stack_number, indices in indices_by_stack.items():
            # `indices` has a row for each owner, with its matrices of the stack.
            stop += indices.shape[1] * exchange.stacks[stack_number].units_per_shard
            stops.append(stop)
        # The last block is padding.
        *blocks, _ = jnp.split(_rows(rows, owners), stops, axis=1)
        for (stack_number, indices), block in zip(
            indices_by_stack.items(), blocks, strict=True
        ):
            shard_shape = exchange.stacks[stack_number].shard_shape
            shards = block.reshape(indices.size, *shard_shape)
            shards_of_stacks[stack_number].append(shards)
            order_of_stacks[stack_number] += indices.ravel().tolist()

    arrays: list[jax.Array] = []
    for stack, shards, order in zip(
        exchange.stacks, shards_of_stacks, order_of_stacks, strict=True
    ):
        in_order = _rows(jnp.concatenate(shards), np.argsort(order))
        start = 0
        for array in stack.arrays:
            # Of the leading dimensions, which count matrices, only the first is sharded.
            first, *others = array.lead_shape
            matrix_counts = (first // exchange.size(array.lead_axes), *others)
            stop = start + math.prod(matrix_counts)
            shards_of_array = in_order[start:stop]
            shape = (*matrix_counts, *stack.shard_shape)
            arrays.append(shards_of_array.reshape(shape))
            start = stop
    return arrays


class _OwnerGroup(NamedTuple):
    """Owner devices that own equally many matrices of each stack.

    - `owners`: the numbers of the owners.
    - `indices_by_stack`: for the number of each stack, an array of shape `(owners,
      matrices)` with the indices in the stack of the matrices that each owner has.
    """

    owners: np.ndarray
    indices_by_stack: dict[int, np.ndarray]


def _owner_groups(exchange: OwnerExchange) -> Iterator[_OwnerGroup]:
    """Yields the owner devices in groups that own equally many matrices of each stack."""

    def stacks_of(owner: int) -> tuple[int, ...]:
        """The number of the stack of each matrix of an owner."""
        return tuple([matrix.stack_number for matrix in exchange.owned[owner]])

    # `together` groups owners for which `stacks_of` returns the same.
    for stacks, owners in together(range(len(exchange.owned)), stacks_of).items():
        # Each matrix is a pair of the number of its stack and its index in the stack.
        owned = np.array([exchange.owned[owner] for owner in owners], int)
        indices = owned.reshape(len(owners), -1, 2)[:, :, 1]
        indices_by_stack: dict[int, np.ndarray] = {}
        for stack in dict.fromkeys(stacks):
            indices_by_stack[stack] = indices[:, np.array(stacks) == stack]
        yield _OwnerGroup(np.array(owners), indices_by_stack)


def _rows(rows: jax.Array, numbers: np.ndarray) -> jax.Array:
    """The rows of the array `rows` at the indices `numbers`: by a slice if these are
    consecutive, else by a gather.
    """
    first = int(numbers[0])
    count = len(numbers)
    if not np.array_equal(numbers, np.arange(first, first + count)):
        return rows[numbers]
    if count == len(rows):
        return rows
    return rows[first : first + count]


def exchanged(exchange: OwnerExchange, rows: jax.Array) -> jax.Array:
    """The rows that a device has after an all-to-all of `rows`, in which row `i` goes
    to owner device `i`.
    """
    if len(exchange.owned) == 1:
        return rows
    return jax.lax.all_to_all(rows, exchange.axes, 0, 0, tiled=True)


def assembled(exchange: OwnerExchange, stack: Stack, shards: jax.Array) -> jax.Array:
    """A whole matrix of `stack`, from the shards that its owner received, one row from
    each device: the inverse of `split`.
    """
    grid = _grid(exchange, stack)
    # One dimension for each mesh axis of the devices, then those of a shard.
    shards = shards.reshape(*grid.sizes, *stack.shard_shape)
    # Along axes that do not shard the matrix, the first replica is taken.
    shards = shards[tuple(map(slice, grid.shard_counts))]
    return shards.transpose(grid.order).reshape(stack.arrays[0].matrix_shape)


def split(exchange: OwnerExchange, stack: Stack, matrix: jax.Array) -> jax.Array:
    """The shards of a whole matrix of `stack`, as one row for each device: the inverse
    of `assembled`.
    """
    grid = _grid(exchange, stack)
    # One dimension for each mesh axis of the devices (of size 1 if the axis does not
    # shard the matrix), then those of a shard.
    shape = (*grid.shard_counts, *stack.shard_shape)
    # `grid.order` has the mesh axes of each dimension of the matrix in front of it.
    by_dim = matrix.reshape([shape[axis] for axis in grid.order])
    shards = by_dim.transpose(np.argsort(grid.order))
    shards = jnp.broadcast_to(shards, (*grid.sizes, *stack.shard_shape))
    return shards.reshape(len(exchange.owned), -1, *exchange.unit)


class _Grid(NamedTuple):
    """How the shards of a matrix, one from each device, form the matrix.

    - `sizes`: the size of each mesh axis along which owner devices lie. The shards are
      first reshaped to these sizes, followed by the shape of a shard.
    - `shard_counts`: how many shards to keep along each of these axes: its size, or 1
      if the axis does not shard the matrix. All devices along such an axis have the
      same shard.
    - `order`: the order of dimensions for `transpose`. It brings the mesh axes that
      shard a dimension in front of this dimension, so that a last reshape gives the
      matrix.
    """

    sizes: list[int]
    shard_counts: list[int]
    order: list[int]


def _grid(exchange: OwnerExchange, stack: Stack) -> _Grid:
    """How the shards that an owner receives of one matrix of `stack` form the matrix.
    The dimensions to order are first one for each of the exchange's mesh axes, then
    those of a shard.
    """
    axes = exchange.axes
    order: list[int] = []
    # For each dimension of the matrix, the mesh axes that shard it, then itself.
    for dim, dim_axes in enumerate(stack.arrays[0].axes_when_sent):
        order += [*map(axes.index, dim_axes), len(axes) + dim]

    sizes: list[int] = []
    shard_counts: list[int] = []
    replica_positions: list[int] = []
    for position, axis in enumerate(axes):
        size = exchange.sizes[axis]
        sizes.append(size)
        if position in order:
            shard_counts.append(size)
        else:
            shard_counts.append(1)
            replica_positions.append(position)
    return _Grid(
        sizes=sizes,
        shard_counts=shard_counts,
        order=[*replica_positions, *order],
    )
