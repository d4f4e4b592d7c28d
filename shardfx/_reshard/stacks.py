"""The matrices of a plan, the device that owns each, and the groups that share an all-to-all, all known
before tracing.
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
from .._plan import LeafPlan, ShardPlan


# The treatment of an array: the number of leading dimensions that count matrices, and the number after them that are
# rows; or a function of the array; or `None`.
MatrixDims = tuple[int, int]
Other = Callable[[Any], Any] | None
Where = Mapping[str, MatrixDims | Other]
# Names of leading dimensions that count matrices.
_COUNTED = frozenset({"layers", "layer", "stages", "stage", "blocks", "experts", "expert"})


class Matrices(NamedTuple):
    """The matrices of one array: one for each index of its leading dimensions.

    - `at`: the number of the array in the plan.
    - `many`, `rest`: the sizes of its leading dimensions, and of the others.
    - `cut`: the mesh axes that shard the first leading dimension.
    - `entries`, `laid`: the mesh axes that shard each other dimension, in the plan and during the exchange.
    - `matrix`: the numbers of rows and columns.
    """

    at: int
    many: tuple[int, ...]
    rest: tuple[int, ...]
    cut: tuple[str, ...]
    entries: tuple[tuple[str, ...], ...]
    laid: tuple[tuple[str, ...], ...]
    matrix: tuple[int, int]
    dtype: DType

    @property
    def number(self) -> int:
        """The number of matrices in the array."""
        return math.prod(self.many)

    def spec(self, entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """The spec of the array with all its leading dimensions."""
        return PartitionSpec(self.cut or None, *[None] * (len(self.many) - 1), *(axes or None for axes in entries))


class Stack(NamedTuple):
    """Matrices of equal shape, dtype and layout.

    - `parts`: the arrays that hold the matrices.
    - `piece`: the shape of one device's shard of a matrix.
    - `width`: the number of units in the piece.
    """

    parts: tuple[Matrices, ...]
    piece: tuple[int, ...]
    width: int

    @property
    def name(self) -> str:
        """The stack's key in a tree of states."""
        one = self.parts[0]
        return f"{one.at}_{'x'.join(map(str, one.matrix))}_{np.dtype(one.dtype).name}"


class OwnerExchange(NamedTuple):
    """Stacks of one dtype whose matrices go to their owners in one all-to-all.

    - `stacks`: the stacks to exchange.
    - `cut`: the mesh axes that shard the dimension that counts matrices. Matrices do not move along these axes.
    - `axes`: the mesh axes whose devices are the owners.
    - `unit`: the shape of one unit of the sent rows: a device's piece of a matrix, or some elements of a row.
    - `holds`: for each owner its matrices in order, each as the number of its stack and its index in the stack.
    - `sizes`: the sizes of the mesh axes.
    """

    stacks: tuple[Stack, ...]
    cut: tuple[str, ...]
    axes: tuple[str, ...]
    unit: tuple[int, ...]
    holds: tuple[tuple[tuple[int, int], ...], ...]
    sizes: Mapping[str, int]

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along some mesh axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def parts(self) -> list[Matrices]:
        """The arrays whose matrices the exchange sends."""
        return [part for stack in self.stacks for part in stack.parts]

    @property
    def width(self) -> int:
        """The number of units that a device sends to each owner, padding included."""
        return max(sum(self.stacks[stack].width for stack, _ in own) for own in self.holds)

    def starts(self, number: int) -> Int[np.ndarray, "owners slots"]:
        """The position of each matrix of a stack in the rows that its owner receives; -1 for an empty slot."""
        rows: list[list[int]] = []
        for own in self.holds:
            stacks = [stack for stack, _ in own]
            starts = np.cumsum([0, *[self.stacks[stack].width for stack in stacks]])
            rows.append([int(starts[at]) for at, stack in enumerate(stacks) if stack == number])
        slots = max(map(len, rows))
        return np.array([[*row, *[-1] * (slots - len(row))] for row in rows])


def exchanges_of(
    plan: ShardPlan, over: Sequence[str] | None, where: Where, limit: int | None
) -> tuple[tuple[OwnerExchange, ...], dict[int, Other]]:
    """The exchanges of a plan's matrices, and the function for each other array that changes, by the array's number."""
    found, others = _sorted_out(plan, where)
    sizes = dict(plan.mesh.shape)
    if over is None:
        used = {axis for one in found for axes in (one.cut, *one.entries) for axis in axes}
        rules = () if plan.axes is None else plan.axes.rules
        batch = next((entry_axes(target) for name, target in rules if name == "batch"), ())
        over = [axis for axis in sizes if axis in used or axis in batch]
    elif unknown := [axis for axis in over if axis not in sizes]:
        raise SpecError(f"`over` has {unknown[0]!r}, and the mesh has the axes {', '.join(sizes)}; name some of these.")
    groups: dict[tuple[Any, ...], list[Matrices]] = {}
    # Large products first, so that small ones even out the owners.
    for one in sorted(found, key=lambda one: (-_cost(one), one.at)):
        groups.setdefault((one.dtype, one.cut), []).append(one)
    made: list[OwnerExchange] = []
    for (_, cut), arrays in groups.items():
        dealer = _Dealer(cut, tuple(axis for axis in over if axis not in cut), sizes)
        groups_of = dealer.apart([*map(dealer.laid, arrays)])
        made += [dealer.dealt(some) for own in groups_of for some in dealer.within(own, limit)]
    return tuple(made), others


def _sorted_out(plan: ShardPlan, where: Where) -> tuple[list[Matrices], dict[int, Other]]:
    unused: dict[str | None, None] = dict.fromkeys(where)
    found: list[Matrices] = []
    others: dict[int, Other] = {}
    for at, leaf in enumerate(plan.leaves):
        regex = next((one for one in where if re.search(one, leaf.path)), None)
        if regex is None and len(leaf.shape) < 2:
            continue
        unused.pop(regex, None)
        asked = _dims(leaf) if regex is None else where[regex]
        if isinstance(asked, tuple):
            found.append(_matrices(at, leaf, asked))
        else:
            others[at] = asked
    if unused:
        raise RuleError(
            f"`where`: {next(iter(unused))!r} decides about no array of the plan; correct it, or take it out."
        )
    return found, others


def _dims(leaf: LeafPlan) -> MatrixDims:
    """An array of two dimensions as a matrix; one with more dimensions as a stack if its names say that the leading
    ones count.
    """
    many = len(leaf.shape) - 2
    names = (leaf.names or ())[:many]
    if many and (len(names) < many or any(name not in _COUNTED for name in names)):
        raise SpecError(
            f"`{leaf.path}` has the shape {leaf.shape}, and nothing says which of its dimensions are a matrix; pass "
            f"`where={{{leaf.path!r}: ({many}, 1)}}` for {math.prod(leaf.shape[:many])} matrices of "
            f"{leaf.shape[-2]} x {leaf.shape[-1]}, (0, {len(leaf.shape) - 1}) for one with all "
            "dimensions but the last as rows, or None to leave it as it is."
        )
    return many, 1


def _matrices(at: int, leaf: LeafPlan, dims: MatrixDims) -> Matrices:
    many, rows = dims
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise LeafTypeError(
            f"`{leaf.path}` is of dtype {leaf.dtype}, and only matrices of real floating-point numbers are mapped; "
            f"leave it as it is: `where={{{leaf.path!r}: None}}`."
        )
    if many < 0 or rows < 1 or many + rows >= len(leaf.shape):
        raise SpecError(
            f"`{leaf.path}` has the shape {leaf.shape}, which ({many}, {rows}) does not make matrices of: leading "
            "dimensions that count, then at least one for rows, and at least one for columns."
        )
    entries = [entry_axes(entry) for entry, _ in it.zip_longest(entries_of(leaf.spec), leaf.shape)]
    lead, rest = leaf.shape[:many], leaf.shape[many:]
    if any(entries[1:many]):
        raise SpecError(
            f"`{leaf.path}`: `{leaf.spec}` cuts a second dimension that counts matrices; cut the first alone."
        )
    matrix = math.prod(rest[:rows]), math.prod(rest[rows:])
    own = tuple(entries[many:])
    return Matrices(at, lead or (1,), rest, entries[0] if many else (), own, own, matrix, leaf.dtype)


def _cost(one: Matrices) -> float:
    """The multiplications in a product of a matrix with its transpose."""
    rows, columns = one.matrix
    return float(rows) * columns * min(rows, columns)


def _alike(arrays: Iterable[Matrices]) -> dict[Any, list[Matrices]]:
    """The arrays grouped by the shape and sharding of their matrices."""
    found: dict[tuple[Any, ...], list[Matrices]] = {}
    for one in arrays:
        found.setdefault((one.rest, one.matrix, one.laid), []).append(one)
    return found


class _Dealer:
    """Chooses an owner device for each matrix, among the devices along some mesh axes."""

    def __init__(self, cut: tuple[str, ...], axes: tuple[str, ...], sizes: Mapping[str, int]):
        self.cut, self.axes, self.sizes = cut, axes, sizes
        self.owners = self.size(axes)
        self.loads = [0.0] * self.owners

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def count(self, one: Matrices) -> int:
        """The number of matrices of an array in one group of owners."""
        return one.number // self.size(self.cut)

    def laid(self, one: Matrices) -> Matrices:
        """The array sharded, for the exchange, over as many of the owners' axes as its sizes allow, and over no other
        axis.
        """
        entries = [[axis for axis in own if axis in self.axes] for own in one.entries]
        for axis in self.axes:
            dims = (dim for dim, size in enumerate(one.rest) if size % self.size((*entries[dim], axis)) == 0)
            if not any(axis in own for own in entries) and (dim := next(dims, None)) is not None:
                entries[dim].append(axis)
        return one._replace(laid=tuple(map(tuple, entries)))

    def piece(self, one: Matrices) -> tuple[int, ...]:
        return tuple(size // self.size(axes) for size, axes in zip(one.rest, one.laid, strict=True))

    def dealt(self, arrays: Sequence[Matrices]) -> OwnerExchange:
        """An exchange in which each matrix goes to the owner with the fewest bytes, the widest matrices first."""
        widest = sorted(arrays, key=lambda one: (-math.prod(self.piece(one)), -_cost(one)))
        alike = [(tuple(parts), self.piece(parts[0])) for parts in _alike(widest).values()]
        pieces = {piece for _, piece in alike}
        # The largest unit that divides all pieces: compilers handle whole rows with less work than elements.
        unit = pieces.pop() if len(pieces) == 1 else (math.gcd(*(piece[-1] for piece in pieces)),)
        stacks = tuple(Stack(parts, piece, math.prod(piece) // math.prod(unit)) for parts, piece in alike)
        holds: list[list[tuple[int, int]]] = [[] for _ in range(self.owners)]
        waiting = [(0, load, owner) for owner, load in enumerate(self.loads)]
        heapq.heapify(waiting)
        for number, stack in enumerate(stacks):
            for matrix in range(sum(map(self.count, stack.parts))):
                width, load, owner = waiting[0]
                holds[owner].append((number, matrix))
                self.loads[owner] = load + _cost(stack.parts[0])
                heapq.heapreplace(waiting, (width + stack.width, self.loads[owner], owner))
        return OwnerExchange(stacks, self.cut, self.axes, unit, tuple(map(tuple, holds)), self.sizes)

    def total(self, arrays: Sequence[Matrices]) -> int:
        """The number of elements that a device sends to each owner if one all-to-all sends all these arrays."""
        if not arrays:
            return 0
        made = _Dealer(self.cut, self.axes, self.sizes).dealt(arrays)
        return made.width * math.prod(made.unit)

    def apart(self, arrays: Sequence[Matrices]) -> Iterator[Sequence[Matrices]]:
        """Divides arrays into groups with one all-to-all each, so that padding is least: small arrays fill gaps that
        large ones leave.

        An array that fills no gap has an all-to-all of its own, which takes less memory.
        """
        left, total = _alike(arrays), self.total(arrays)
        for kind, own in [*left.items()]:
            others = [one for other, parts in left.items() if other != kind for one in parts]
            if (rest := self.total(others)) + self.total(own) <= total:
                yield own
                del left[kind]
                total = rest
        if left:
            yield [one for parts in left.values() for one in parts]

    def within(self, arrays: Sequence[Matrices], limit: int | None) -> Iterator[Sequence[Matrices]]:
        """Yields groups of arrays for which two exchanges and one whole matrix fit into the memory limit."""
        some: list[Matrices] = []
        most = math.inf if limit is None else limit
        for one in arrays:
            if self.needed([one]) > most:
                raise MoveError(
                    f"`memory_limit_bytes={limit}`: {self.count(one)} matrices of {one.matrix[0]} x {one.matrix[1]} on "
                    f"{self.owners} owners need {self.needed([one])} bytes; allow as much, or name more axes in `over`."
                )
            if some and self.needed([*some, one]) > most:
                yield some
                some = []
            some = [*some, one]
        yield some

    def needed(self, arrays: Sequence[Matrices]) -> int:
        elements = 2 * self.owners * self.total(arrays) + max(math.prod(one.matrix) for one in arrays)
        return elements * np.dtype(arrays[0].dtype).itemsize
