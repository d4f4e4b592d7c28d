"""Chooses an owner device for each matrix of a plan, and the groups of matrices that
share an all-to-all, before any tracing.

A *stack* is the matrices of equal shape, dtype and sharding. A *unit* is a block of
elements in which sent elements are counted: a device's shard of a matrix, or a part of
it.
"""

import heapq
import itertools as it
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int

from .._ground.errors import (
    LeafTypeError,
    MoveError,
    RuleError,
    SpecError,
    check_type,
)
from .._ground.spec import DType, entries_at, entry_axes
from .._ground.text import together
from .._plan import LeafPlan, ShardPlan


# The number of leading dimensions that count matrices, and the number of dimensions
# after them that are rows.
MatrixDims = tuple[int, int]
# A function that is applied to a whole array; `None` leaves the array unchanged.
ArrayFn = Callable[[Any], Any] | None
# From a regex of paths to what is done with an array: it is divided into matrices, or a
# function is applied to it.
Where = Mapping[str, MatrixDims | ArrayFn]
# Names of leading dimensions that count matrices.
_COUNTED = frozenset(
    {"layers", "layer", "stages", "stage", "blocks", "experts", "expert"}
)


class Matrices(NamedTuple):
    """The matrices of one array. Each index into its leading dimensions gives one
    matrix.

    **Arguments:**

    - `array_number`: the number of the array in the plan.
    - `lead_shape`: the sizes of its leading dimensions, which count matrices.
    - `inner_shape`: the sizes of its other dimensions, which are rows and columns.
    - `lead_axes`: the mesh axes that shard the first leading dimension.
    - `axes_in_plan`: for each inner dimension, the mesh axes that shard it in the plan.
    - `axes_when_sent`: for each inner dimension, the mesh axes that shard it just
      before the all-to-all.
    - `matrix_shape`: the number of rows and the number of columns.
    - `dtype`: the dtype of the array.
    """

    array_number: int
    lead_shape: tuple[int, ...]
    inner_shape: tuple[int, ...]
    lead_axes: tuple[str, ...]
    axes_in_plan: tuple[tuple[str, ...], ...]
    axes_when_sent: tuple[tuple[str, ...], ...]
    matrix_shape: tuple[int, int]
    dtype: DType

    @property
    def matrix_count(self) -> int:
        """The number of matrices in the array."""
        return math.prod(self.lead_shape)

    def spec(self, axes_of_dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """The array's PartitionSpec. `axes_of_dims` has the mesh axes that shard each
        dimension after the leading ones.
        """
        return PartitionSpec(
            self.lead_axes or None,
            *[None] * (len(self.lead_shape) - 1),
            *(axes or None for axes in axes_of_dims),
        )


class Stack(NamedTuple):
    """Matrices of equal shape, dtype and sharding, which the `arrays` hold.
    `shard_shape` is the shape of one device's shard of a matrix, and `units_per_shard`
    the number of units in it.
    """

    arrays: tuple[Matrices, ...]
    shard_shape: tuple[int, ...]
    units_per_shard: int

    @property
    def name(self) -> str:
        """The key of this stack in the dict of the states that `map_matrices` keeps."""
        first = self.arrays[0]
        shape = "x".join(map(str, first.matrix_shape))
        return f"{first.array_number}_{shape}_{np.dtype(first.dtype).name}"


class OwnedMatrix(NamedTuple):
    """A matrix that an owner device computes: the number of its stack in the exchange,
    and its position in the stack.
    """

    stack_number: int
    position: int


class OwnerExchange(NamedTuple):
    """Stacks of matrices of one dtype that one all-to-all sends to their owner devices,
    which compute them.

    **Arguments:**

    - `stacks`: the stacks.
    - `lead_axes`: the mesh axes that shard the dimension which counts matrices.
      Matrices do not move along these axes.
    - `axes`: the mesh axes along which the owner devices lie.
    - `unit`: the shape of a unit, a block of elements: a device's shard of a matrix, or
      a part of it.
    - `owned`: for each owner the matrices that it computes, in order.
    - `sizes`: the sizes of the mesh axes.
    """

    stacks: tuple[Stack, ...]
    lead_axes: tuple[str, ...]
    axes: tuple[str, ...]
    unit: tuple[int, ...]
    owned: tuple[tuple[OwnedMatrix, ...], ...]
    sizes: Mapping[str, int]

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along the mesh axes `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def arrays(self) -> list[Matrices]:
        """The arrays that hold the matrices of all stacks."""
        arrays: list[Matrices] = []
        for stack in self.stacks:
            arrays += stack.arrays
        return arrays

    @property
    def units_per_owner(self) -> int:
        """The number of units that each device sends to each owner, padding included."""
        most_units = 0
        for matrices in self.owned:
            units = 0
            for matrix in matrices:
                units += self.stacks[matrix.stack_number].units_per_shard
            most_units = max(most_units, units)
        return most_units

    def starts(self, stack_number: int) -> Int[np.ndarray, "owners slots"]:
        """Where each matrix of the stack `stack_number` begins, in units, in the row
        that a device sends to the matrix's owner. There is a row for each owner, with a
        position for each of its matrices of the stack, and -1 in the remaining places.
        """
        starts_of_owners: list[list[int]] = []
        for matrices in self.owned:
            starts: list[int] = []
            start = 0
            for matrix in matrices:
                if matrix.stack_number == stack_number:
                    starts.append(start)
                start += self.stacks[matrix.stack_number].units_per_shard
            starts_of_owners.append(starts)

        slot_count = max(map(len, starts_of_owners))
        rows = np.full((len(self.owned), slot_count), -1)
        for owner, starts in enumerate(starts_of_owners):
            rows[owner, : len(starts)] = starts
        return rows


def exchanges_of(
    plan: ShardPlan,
    over: Sequence[str] | None,
    where: Where,
    limit: int | None,
) -> tuple[tuple[OwnerExchange, ...], dict[int, ArrayFn]]:
    """Returns the all-to-alls that send the matrices of a plan to their owner devices,
    and a dict for the arrays that `where` does not divide into matrices: from the
    number of the array to the function or `None` in `where`.

    `over` are the mesh axes along which owners lie; `None` for the axes that shard a
    matrix, and those of the logical name "batch". A value of `where` is `(many, rows)`
    (the first `many` dimensions count matrices, the next `rows` are rows), a function
    of the array, or `None`. `limit` is the most bytes per device; `None` for no limit.
    """
    fix = 'write `where={"experts": (1, 1)}`'
    check_type(what="where", value=where, expected=Mapping, error=RuleError, fix=fix)
    if over is not None and not isinstance(over, Iterable):
        raise SpecError(
            f"`over` takes the name of a mesh axis, or several, not {over!r:.40}; the"
            f" mesh has the axes {', '.join(plan.mesh.axis_names)}."
        )
    matrices, others = _matrices_of_plan(plan, where)
    sizes = dict(plan.mesh.shape)
    if over is None:
        over = _default_owner_axes(plan, matrices)
    elif unknown := [axis for axis in over if axis not in sizes]:
        raise SpecError(
            f"`over` has {unknown[0]!r}, and the mesh has the axes {', '.join(sizes)};"
            " name some of these."
        )
    # Matrices with the largest products are assigned first, so that small ones even out
    # the load of the owners.
    order = sorted(matrices, key=lambda array: (-_cost(array), array.array_number))
    exchanges: list[OwnerExchange] = []
    # `together` groups arrays of one dtype whose leading dimension is sharded alike.
    kinds = together(order, lambda array: (array.dtype, array.lead_axes))
    for (_, lead_axes), arrays in kinds.items():
        owner_axes = [axis for axis in over if axis not in lead_axes]
        owners = _Owners(lead_axes=lead_axes, axes=tuple(owner_axes), sizes=sizes)
        sharded_arrays = list(map(owners.sharded, arrays))
        for group in owners.grouped(sharded_arrays):
            exchanges += map(owners.exchange, owners.limited(group, limit))
    return tuple(exchanges), others


def _default_owner_axes(plan: ShardPlan, matrices: Iterable[Matrices]) -> list[str]:
    """The mesh axes that shard some matrix, and those of the logical name "batch"."""
    used: set[str] = set()
    for array in matrices:
        used.update(array.lead_axes)
        for axes in array.axes_in_plan:
            used.update(axes)
    rules = () if plan.axes is None else plan.axes.rules
    for name, target in rules:
        if name == "batch":
            used.update(entry_axes(target))
            break
    return [axis for axis in plan.mesh.shape if axis in used]


def _matrices_of_plan(
    plan: ShardPlan,
    where: Where,
) -> tuple[list[Matrices], dict[int, ArrayFn]]:
    """Returns the arrays of a plan that are divided into matrices, and for each other
    array that `where` names, by its number, the function or `None` in `where`. Raises
    `RuleError` if a regex of `where` decides about no array.
    """
    unused: dict[str | None, None] = dict.fromkeys(where)
    matrices: list[Matrices] = []
    others: dict[int, ArrayFn] = {}
    for number, leaf in enumerate(plan.leaves):
        regex = _first_match(where, leaf.path)
        if regex is None and len(leaf.shape) < 2:
            continue
        unused.pop(regex, None)
        dims_or_function = _dims(leaf) if regex is None else where[regex]
        if isinstance(dims_or_function, tuple):
            matrices.append(_matrices(number, leaf, dims_or_function))
        else:
            others[number] = dims_or_function
    if unused:
        raise RuleError(
            f"`where`: {next(iter(unused))!r} decides about no array of the plan;"
            " correct it, or take it out."
        )
    return matrices, others


def _first_match(regexes: Iterable[str], path: str) -> str | None:
    """The first of `regexes` that matches a part of `path`; `None` if none does."""
    for regex in regexes:
        if re.search(regex, path):
            return regex
    return None


def _dims(leaf: LeafPlan) -> MatrixDims:
    """The number of leading dimensions of an array that count matrices, and 1, the
    number of dimensions that are rows. Raises `SpecError` if an array of more than two
    dimensions has no names that say which of them count matrices.
    """
    many = len(leaf.shape) - 2
    names = (leaf.names or ())[:many]
    are_counted = len(names) == many and all(name in _COUNTED for name in names)
    if many and not are_counted:
        raise SpecError(
            f"`{leaf.path}` has the shape {leaf.shape}, and nothing says which of its"
            f" dimensions are a matrix; pass `where={{{leaf.path!r}: ({many}, 1)}}` for"
            f" {math.prod(leaf.shape[:many])} matrices of {leaf.shape[-2]} x"
            f" {leaf.shape[-1]}, (0, {len(leaf.shape) - 1}) for one with all dimensions"
            " but the last as rows, or None to leave it as it is."
        )
    return many, 1


def _matrices(number: int, leaf: LeafPlan, dims: MatrixDims) -> Matrices:
    """Returns the matrices of an array, the leaf `number` of a plan. Of its dimensions,
    the first `dims[0]` count matrices, and the next `dims[1]` are rows. Raises
    `LeafTypeError` for dtypes that are not real floats, and `SpecError` if the array
    has too few dimensions, or if a second one that counts matrices is sharded.
    """
    many, rows = dims
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise LeafTypeError(
            f"`{leaf.path}` is of dtype {leaf.dtype}, and only matrices of real"
            " floating-point numbers are mapped; leave it as it is:"
            f" `where={{{leaf.path!r}: None}}`."
        )
    if many < 0 or rows < 1 or many + rows >= len(leaf.shape):
        raise SpecError(
            f"`{leaf.path}` has the shape {leaf.shape}, which ({many}, {rows}) does not"
            " make matrices of: leading dimensions that count, then at least one for"
            " rows, and at least one for columns."
        )
    entries = list(map(entry_axes, entries_at(leaf.spec, len(leaf.shape))))
    lead_shape = leaf.shape[:many]
    inner_shape = leaf.shape[many:]
    if any(entries[1:many]):
        raise SpecError(
            f"`{leaf.path}`: `{leaf.spec}` cuts a second dimension that counts"
            " matrices; cut the first alone."
        )
    matrix_entries = tuple(entries[many:])
    return Matrices(
        array_number=number,
        lead_shape=lead_shape or (1,),
        inner_shape=inner_shape,
        lead_axes=entries[0] if many else (),
        axes_in_plan=matrix_entries,
        axes_when_sent=matrix_entries,
        matrix_shape=(math.prod(inner_shape[:rows]), math.prod(inner_shape[rows:])),
        dtype=leaf.dtype,
    )


def _cost(array: Matrices) -> float:
    """The multiplications in `M @ M.T` or `M.T @ M`, whichever has fewer, for a matrix
    `M` of `array`.
    """
    rows, columns = array.matrix_shape
    return float(rows) * columns * min(rows, columns)


def _by_shape(arrays: Iterable[Matrices]) -> dict[Any, list[Matrices]]:
    """Groups arrays by the shape of their matrices, and by the sharding of the matrices
    during the all-to-all.
    """
    return together(
        arrays,
        lambda array: (array.inner_shape, array.matrix_shape, array.axes_when_sent),
    )


class _Owners:
    """Assigns matrices to owner devices along the mesh axes `axes`. Matrices do not
    move along the axes `lead_axes`. `sizes` has the size of each mesh axis. `loads` has
    the multiplications (`_cost`) of each of the `owner_count` owners so far.
    """

    def __init__(
        self,
        lead_axes: tuple[str, ...],
        axes: tuple[str, ...],
        sizes: Mapping[str, int],
    ):
        self.lead_axes = lead_axes
        # The mesh axes along which the owners lie.
        self.axes = axes
        # The size of each mesh axis.
        self.sizes = sizes
        self.owner_count = self.size(axes)
        # What each owner computes so far, in multiplications.
        self.loads = [0.0] * self.owner_count

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along the mesh axes `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def count(self, array: Matrices) -> int:
        """The number of matrices of `array` that one group of owners computes. Owners
        with the same coordinates along `lead_axes` are a group.
        """
        return array.matrix_count // self.size(self.lead_axes)

    def sharded(self, array: Matrices) -> Matrices:
        """Returns `array` with other `axes_when_sent`. These shard the rows and columns
        over the owners' axes. Axes of the plan stay on their dimension. Each other axis
        goes to the first dimension that it divides, or to none.
        """
        axes_of_dims: list[tuple[str, ...]] = []
        used: set[str] = set()
        for dim_axes in array.axes_in_plan:
            owner_axes = [axis for axis in dim_axes if axis in self.axes]
            axes_of_dims.append(tuple(owner_axes))
            used.update(owner_axes)
        for axis in self.axes:
            if axis in used:
                continue
            for dim, size in enumerate(array.inner_shape):
                with_axis = (*axes_of_dims[dim], axis)
                if size % self.size(with_axis) == 0:
                    axes_of_dims[dim] = with_axis
                    break
        return array._replace(axes_when_sent=tuple(axes_of_dims))

    def shard_shape(self, array: Matrices) -> tuple[int, ...]:
        """The shape of a device's shard of a matrix of `array` during the all-to-all."""
        shape: list[int] = []
        for size, axes in zip(array.inner_shape, array.axes_when_sent, strict=True):
            shape.append(size // self.size(axes))
        return tuple(shape)

    def exchange(self, arrays: Sequence[Matrices]) -> OwnerExchange:
        """The all-to-all of `arrays`, with an owner for each of their matrices. The
        matrices are assigned one by one, those with the largest shards first. Each goes
        to the owner that receives the fewest elements so far, and among such owners to
        the one with the least to compute.
        """
        largest_first = sorted(
            arrays,
            key=lambda array: (-math.prod(self.shard_shape(array)), -_cost(array)),
        )
        groups = list(_by_shape(largest_first).values())
        shard_shapes = [self.shard_shape(group[0]) for group in groups]
        unit = _unit(shard_shapes)
        stacks: list[Stack] = []
        for group, shard_shape in zip(groups, shard_shapes, strict=True):
            stack = Stack(
                arrays=tuple(group),
                shard_shape=shard_shape,
                units_per_shard=math.prod(shard_shape) // math.prod(unit),
            )
            stacks.append(stack)

        owned: list[list[OwnedMatrix]] = [[] for _ in range(self.owner_count)]
        # A heap of owners: the units that each receives, what it computes, its number.
        owner_heap = [(0, load, owner) for owner, load in enumerate(self.loads)]
        heapq.heapify(owner_heap)
        for stack_number, stack in enumerate(stacks):
            for position in range(sum(map(self.count, stack.arrays))):
                units, load, owner = owner_heap[0]
                owned[owner].append(OwnedMatrix(stack_number, position))
                self.loads[owner] = load + _cost(stack.arrays[0])
                entry = (units + stack.units_per_shard, self.loads[owner], owner)
                heapq.heapreplace(owner_heap, entry)
        return OwnerExchange(
            stacks=tuple(stacks),
            lead_axes=self.lead_axes,
            axes=self.axes,
            unit=unit,
            owned=tuple(map(tuple, owned)),
            sizes=self.sizes,
        )

    def sent_elements(self, arrays: Sequence[Matrices]) -> int:
        """The number of elements that each device sends to each owner if one all-to-all
        sends all of `arrays`.
        """
        if not arrays:
            return 0
        # Other owners, so that the loads of these stay as they are.
        exchange = _Owners(
            lead_axes=self.lead_axes, axes=self.axes, sizes=self.sizes
        ).exchange(arrays)
        return exchange.units_per_owner * math.prod(exchange.unit)

    def grouped(self, arrays: Sequence[Matrices]) -> Iterator[Sequence[Matrices]]:
        """Yields groups of arrays, each with an all-to-all of its own. Arrays share an
        all-to-all if each device then sends fewer elements. That is so if some owners
        have no large matrix: small matrices then take the place of padding. Otherwise
        separate all-to-alls take less memory.
        """
        remaining = _by_shape(arrays)
        least_elements = self.sent_elements(arrays)
        for kind, arrays_of_kind in [*remaining.items()]:
            others: list[Matrices] = []
            for other_kind, other_arrays in remaining.items():
                if other_kind != kind:
                    others += other_arrays
            sent_by_others = self.sent_elements(others)
            if sent_by_others + self.sent_elements(arrays_of_kind) <= least_elements:
                yield arrays_of_kind
                del remaining[kind]
                least_elements = sent_by_others
        if remaining:
            yield list(it.chain.from_iterable(remaining.values()))

    def limited(
        self,
        arrays: Sequence[Matrices],
        limit: int | None,
    ) -> Iterator[Sequence[Matrices]]:
        """Yields groups of `arrays`, each with its own all-to-all, that take at most
        `limit` bytes on a device: the elements that it sends, those that it receives,
        and one whole matrix. `None` sets no limit. Raises `MoveError` if a single array
        needs more.
        """
        group: list[Matrices] = []
        limit_or_inf = math.inf if limit is None else limit
        for array in arrays:
            if (need := self.needed_bytes([array])) > limit_or_inf:
                raise MoveError(
                    f"`memory_limit_bytes={limit}`: {self.count(array)} matrices of"
                    f" {array.matrix_shape[0]} x {array.matrix_shape[1]} on"
                    f" {self.owner_count} owners need {need} bytes; allow as much, or"
                    " name more axes in `over`."
                )
            if group and self.needed_bytes([*group, array]) > limit_or_inf:
                yield group
                group = []
            group = [*group, array]
        yield group

    def needed_bytes(self, arrays: Sequence[Matrices]) -> int:
        """The bytes that one all-to-all of `arrays` takes on a device: the elements
        that it sends, those that it receives, and one whole matrix.
        """
        sent_elements = self.owner_count * self.sent_elements(arrays)
        matrix_elements = max(math.prod(array.matrix_shape) for array in arrays)
        # As many elements are received as are sent.
        elements = 2 * sent_elements + matrix_elements
        return elements * np.dtype(arrays[0].dtype).itemsize


def _unit(shard_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the largest unit that divides all shards, since compilers copy whole
    rows with less work than elements: a whole shard if all are alike, else a part of a
    row.
    """
    if len(set(shard_shapes)) == 1:
        return shard_shapes[0]
    last_sizes = [shape[-1] for shape in shard_shapes]
    return (math.gcd(*last_sizes),)
