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

from .._ground.errors import LeafTypeError, MoveError, RuleError, SpecError
from .._ground.spec import DType, entries_of, entry_axes
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

    - `at`: the number of the array in the plan.
    - `many`, `rest`: the sizes of its leading dimensions, and of its other dimensions.
    - `lead_axes`: the mesh axes that shard the first leading dimension.
    - `entries`: for each other dimension, the mesh axes that shard it in the plan.
    - `sent_entries`: for each other dimension, the mesh axes that shard it just before
      the all-to-all.
    - `matrix`: the number of rows and the number of columns.
    - `dtype`: the dtype of the array.
    """

    at: int
    many: tuple[int, ...]
    rest: tuple[int, ...]
    lead_axes: tuple[str, ...]
    entries: tuple[tuple[str, ...], ...]
    sent_entries: tuple[tuple[str, ...], ...]
    matrix: tuple[int, int]
    dtype: DType

    @property
    def number(self) -> int:
        """The number of matrices in the array."""
        return math.prod(self.many)

    def spec(self, entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """The array's PartitionSpec. `entries` has the mesh axes that shard each
        dimension after the leading ones.
        """
        return PartitionSpec(
            self.lead_axes or None,
            *[None] * (len(self.many) - 1),
            *(axes or None for axes in entries),
        )


class Stack(NamedTuple):
    """Matrices of equal shape, dtype and sharding, which the `arrays` hold.
    `shard_shape` is the shape of one device's shard of a matrix, and `width` the number
    of units in it.
    """

    arrays: tuple[Matrices, ...]
    shard_shape: tuple[int, ...]
    width: int

    @property
    def name(self) -> str:
        """The key of this stack in the dict of the states that `map_matrices` keeps."""
        first = self.arrays[0]
        return f"{first.at}_{'x'.join(map(str, first.matrix))}_{np.dtype(first.dtype).name}"


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
    - `owned`: for each owner the matrices that it computes, in order. Each is given by
      the number of its stack and its index in the stack.
    - `sizes`: the sizes of the mesh axes.
    """

    stacks: tuple[Stack, ...]
    lead_axes: tuple[str, ...]
    axes: tuple[str, ...]
    unit: tuple[int, ...]
    owned: tuple[tuple[tuple[int, int], ...], ...]
    sizes: Mapping[str, int]

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def arrays(self) -> list[Matrices]:
        """The arrays that hold the matrices of all stacks."""
        return [array for stack in self.stacks for array in stack.arrays]

    @property
    def width(self) -> int:
        """The number of units that each device sends to each owner, padding included."""
        return max(
            sum(self.stacks[stack].width for stack, _ in owned_stacks)
            for owned_stacks in self.owned
        )

    def starts(self, number: int) -> Int[np.ndarray, "owners slots"]:
        """Where each matrix of the stack `number` begins, in units, in the row that a
        device sends to the matrix's owner. There is a row for each owner, with a
        position for each of its matrices of the stack, and -1 in the remaining places.
        """
        rows: list[list[int]] = []
        for owned_stacks in self.owned:
            stacks = [stack for stack, _ in owned_stacks]
            starts = np.cumsum([0, *[self.stacks[stack].width for stack in stacks]])
            rows.append(
                [
                    int(starts[position])
                    for position, stack in enumerate(stacks)
                    if stack == number
                ]
            )
        slots = max(map(len, rows))
        return np.array([[*row, *[-1] * (slots - len(row))] for row in rows])


def exchanges_of(
    plan: ShardPlan, over: Sequence[str] | None, where: Where, limit: int | None
) -> tuple[tuple[OwnerExchange, ...], dict[int, ArrayFn]]:
    """Returns the all-to-alls that send the matrices of a plan to their owner devices,
    and a dict for the arrays that `where` does not divide into matrices: from the
    number of the array to the function or `None` in `where`.

    `over` are the mesh axes along which owners lie; `None` for the axes that shard a
    matrix, and those of the logical name "batch". A value of `where` is `(many, rows)`
    (the first `many` dimensions count matrices, the next `rows` are rows), a function
    of the array, or `None`. `limit` is the most bytes per device; `None` for no limit.
    """
    matrices, others = _matrices_of_plan(plan, where)
    sizes = dict(plan.mesh.shape)
    if over is None:
        used = {
            axis
            for array in matrices
            for axes in (array.lead_axes, *array.entries)
            for axis in axes
        }
        rules = () if plan.axes is None else plan.axes.rules
        batch = next(
            (entry_axes(target) for name, target in rules if name == "batch"), ()
        )
        over = [axis for axis in sizes if axis in used or axis in batch]
    elif unknown := [axis for axis in over if axis not in sizes]:
        raise SpecError(
            f"`over` has {unknown[0]!r}, and the mesh has the axes {', '.join(sizes)};"
            " name some of these."
        )
    # Matrices with the largest products are assigned first, so that small ones even out
    # the load of the owners.
    order = sorted(matrices, key=lambda array: (-_cost(array), array.at))
    exchanges: list[OwnerExchange] = []
    for (_, lead_axes), arrays in together(
        order, lambda array: (array.dtype, array.lead_axes)
    ).items():
        owners = _Owners(
            lead_axes, tuple(axis for axis in over if axis not in lead_axes), sizes
        )
        groups = owners.grouped([*map(owners.sharded, arrays)])
        for group in groups:
            exchanges += map(owners.exchange, owners.limited(group, limit))
    return tuple(exchanges), others


def _matrices_of_plan(
    plan: ShardPlan, where: Where
) -> tuple[list[Matrices], dict[int, ArrayFn]]:
    unused: dict[str | None, None] = dict.fromkeys(where)
    matrices: list[Matrices] = []
    others: dict[int, ArrayFn] = {}
    for number, leaf in enumerate(plan.leaves):
        regex = next(
            (pattern for pattern in where if re.search(pattern, leaf.path)), None
        )
        if regex is None and len(leaf.shape) < 2:
            continue
        unused.pop(regex, None)
        asked = _dims(leaf) if regex is None else where[regex]
        if isinstance(asked, tuple):
            matrices.append(_matrices(number, leaf, asked))
        else:
            others[number] = asked
    if unused:
        raise RuleError(
            f"`where`: {next(iter(unused))!r} decides about no array of the plan;"
            " correct it, or take it out."
        )
    return matrices, others


def _dims(leaf: LeafPlan) -> MatrixDims:
    """The number of leading dimensions of an array that count matrices, and 1, the
    number of dimensions that are rows. Raises `SpecError` if an array of more than two
    dimensions has no names that say which of them count matrices.
    """
    many = len(leaf.shape) - 2
    names = (leaf.names or ())[:many]
    if many and (len(names) < many or any(name not in _COUNTED for name in names)):
        raise SpecError(
            f"`{leaf.path}` has the shape {leaf.shape}, and nothing says which of its"
            f" dimensions are a matrix; pass `where={{{leaf.path!r}: ({many}, 1)}}` for"
            f" {math.prod(leaf.shape[:many])} matrices of {leaf.shape[-2]} x"
            f" {leaf.shape[-1]}, (0, {len(leaf.shape) - 1}) for one with all dimensions"
            " but the last as rows, or None to leave it as it is."
        )
    return many, 1


def _matrices(number: int, leaf: LeafPlan, dims: MatrixDims) -> Matrices:
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
    entries = [
        entry_axes(entry)
        for entry, _ in it.zip_longest(entries_of(leaf.spec), leaf.shape)
    ]
    lead = leaf.shape[:many]
    rest = leaf.shape[many:]
    if any(entries[1:many]):
        raise SpecError(
            f"`{leaf.path}`: `{leaf.spec}` cuts a second dimension that counts"
            " matrices; cut the first alone."
        )
    matrix = math.prod(rest[:rows]), math.prod(rest[rows:])
    row_entries = tuple(entries[many:])
    return Matrices(
        number,
        lead or (1,),
        rest,
        entries[0] if many else (),
        row_entries,
        row_entries,
        matrix,
        leaf.dtype,
    )


def _cost(array: Matrices) -> float:
    """The multiplications in `M @ M.T` or `M.T @ M`, whichever has fewer, for a matrix
    `M` of `array`.
    """
    rows, columns = array.matrix
    return float(rows) * columns * min(rows, columns)


def _by_shape(arrays: Iterable[Matrices]) -> dict[Any, list[Matrices]]:
    """Groups arrays by the shape of their matrices, and by the sharding of the matrices
    during the all-to-all.
    """
    return together(
        arrays, lambda array: (array.rest, array.matrix, array.sent_entries)
    )


class _Owners:
    """Assigns matrices to owner devices along the mesh axes `axes`. Matrices do not
    move along the axes `lead_axes`. `sizes` has the size of each mesh axis.
    """

    def __init__(
        self,
        lead_axes: tuple[str, ...],
        axes: tuple[str, ...],
        sizes: Mapping[str, int],
    ):
        self.lead_axes = lead_axes
        self.axes = axes
        self.sizes = sizes
        self.owners = self.size(axes)
        self.loads = [0.0] * self.owners

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def count(self, array: Matrices) -> int:
        """The number of matrices of `array` that one group of owners computes. Owners
        with the same coordinates along `lead_axes` are a group.
        """
        return array.number // self.size(self.lead_axes)

    def sharded(self, array: Matrices) -> Matrices:
        """Returns `array` with other `sent_entries`, which shard it over as many of the
        owners' axes as possible.
        """
        entries = [
            [axis for axis in dim_axes if axis in self.axes]
            for dim_axes in array.entries
        ]
        for axis in self.axes:
            dims = (
                dim
                for dim, size in enumerate(array.rest)
                if size % self.size((*entries[dim], axis)) == 0
            )
            if (
                not any(axis in dim_axes for dim_axes in entries)
                and (dim := next(dims, None)) is not None
            ):
                entries[dim].append(axis)
        return array._replace(sent_entries=tuple(map(tuple, entries)))

    def shard_shape(self, array: Matrices) -> tuple[int, ...]:
        return tuple(
            size // self.size(axes)
            for size, axes in zip(array.rest, array.sent_entries, strict=True)
        )

    def exchange(self, arrays: Sequence[Matrices]) -> OwnerExchange:
        """The all-to-all of `arrays`, with an owner for each of their matrices. The
        matrices are assigned one by one, those with the largest shards first. Each goes
        to the owner that receives the fewest elements so far, and among such owners to
        the one with the least to compute.
        """
        widest = sorted(
            arrays,
            key=lambda array: (-math.prod(self.shard_shape(array)), -_cost(array)),
        )
        alike = [
            (tuple(same), self.shard_shape(same[0]))
            for same in _by_shape(widest).values()
        ]
        shapes = {shape for _, shape in alike}
        # The largest unit that divides all shards, since compilers copy whole rows with
        # less work than elements.
        unit = (
            shapes.pop()
            if len(shapes) == 1
            else (math.gcd(*(shape[-1] for shape in shapes)),)
        )
        stacks = tuple(
            Stack(same, shape, math.prod(shape) // math.prod(unit))
            for same, shape in alike
        )
        owned: list[list[tuple[int, int]]] = [[] for _ in range(self.owners)]
        waiting = [(0, load, owner) for owner, load in enumerate(self.loads)]
        heapq.heapify(waiting)
        for number, stack in enumerate(stacks):
            for matrix in range(sum(map(self.count, stack.arrays))):
                width, load, owner = waiting[0]
                owned[owner].append((number, matrix))
                self.loads[owner] = load + _cost(stack.arrays[0])
                heapq.heapreplace(
                    waiting, (width + stack.width, self.loads[owner], owner)
                )
        return OwnerExchange(
            stacks,
            self.lead_axes,
            self.axes,
            unit,
            tuple(map(tuple, owned)),
            self.sizes,
        )

    def sent_elements(self, arrays: Sequence[Matrices]) -> int:
        """The number of elements that each device sends to each owner if one all-to-all
        sends all of `arrays`.
        """
        if not arrays:
            return 0
        exchange = _Owners(self.lead_axes, self.axes, self.sizes).exchange(arrays)
        return exchange.width * math.prod(exchange.unit)

    def grouped(self, arrays: Sequence[Matrices]) -> Iterator[Sequence[Matrices]]:
        """Yields groups of arrays, each with an all-to-all of its own. Arrays share an
        all-to-all if each device then sends fewer elements. That is so if some owners
        have no large matrix: small matrices then take the place of padding. Otherwise
        separate all-to-alls take less memory.
        """
        remaining = _by_shape(arrays)
        least = self.sent_elements(arrays)
        for kind, parts_of_kind in [*remaining.items()]:
            others = []
            for other, parts in remaining.items():
                if other != kind:
                    others += parts
            if (rest := self.sent_elements(others)) + self.sent_elements(
                parts_of_kind
            ) <= least:
                yield parts_of_kind
                del remaining[kind]
                least = rest
        if remaining:
            yield [array for parts in remaining.values() for array in parts]

    def limited(
        self, arrays: Sequence[Matrices], limit: int | None
    ) -> Iterator[Sequence[Matrices]]:
        """Yields groups of `arrays`, each with its own all-to-all, that take at most
        `limit` bytes on a device: the elements that it sends, those that it receives,
        and one whole matrix. `None` sets no limit. Raises `MoveError` if a single array
        needs more.
        """
        some: list[Matrices] = []
        most = math.inf if limit is None else limit
        for array in arrays:
            if (need := self.needed_bytes([array])) > most:
                raise MoveError(
                    f"`memory_limit_bytes={limit}`: {self.count(array)} matrices of"
                    f" {array.matrix[0]} x {array.matrix[1]} on {self.owners} owners need"
                    f" {need} bytes; allow as much, or name more axes in `over`."
                )
            if some and self.needed_bytes([*some, array]) > most:
                yield some
                some = []
            some = [*some, array]
        yield some

    def needed_bytes(self, arrays: Sequence[Matrices]) -> int:
        elements = 2 * self.owners * self.sent_elements(arrays) + max(
            math.prod(array.matrix) for array in arrays
        )
        return elements * np.dtype(arrays[0].dtype).itemsize
