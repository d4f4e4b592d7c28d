"""Which arrays of a plan are matrices, which of them share a stack, and which device owns which: all before tracing."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ground.errors import LeafTypeError, MoveError, RuleError, SpecError
from .._ground.spec import entries_of, entry_axes
from .._plan.leaf import LeafPlan
from .._plan.shard_plan import ShardPlan


# What `where` gives for a path: how many leading dimensions count matrices, and how many after them are rows; or what
# the array goes through as it lies; or `None`.
Dims = tuple[int, int]
Other = Callable[[Any], Any] | None
Where = Mapping[str, Dims | Other]
# Names of leading dimensions that count things.
_COUNTED = frozenset({"layers", "layer", "stages", "stage", "blocks", "experts", "expert"})


class Matrices(NamedTuple):
    """The matrices of one array: those of its leading dimensions.

    - `at`: the number of the array in the plan.
    - `many`, `rest`: the sizes of its leading dimensions, and of the others.
    - `cut`: the mesh axes that cut the first leading dimension.
    - `entries`: the axes that cut each of the others.
    - `matrix`: rows and columns.
    """

    at: int
    many: tuple[int, ...]
    rest: tuple[int, ...]
    cut: tuple[str, ...]
    entries: tuple[tuple[str, ...], ...]
    matrix: tuple[int, int]
    dtype: Any

    @property
    def number(self) -> int:
        """How many they are."""
        return math.prod(self.many)


class Stack(NamedTuple):
    """Matrices that go to their owners together: alike in shape, dtype and layout.

    - `parts`: the arrays that they come from.
    - `axes`: the mesh axes whose devices own them.
    - `slots`: how many matrices an owner has room for.
    - `order`: for each slot of each owner the number of its matrix, or -1.
    """

    parts: tuple[Matrices, ...]
    axes: tuple[str, ...]
    slots: int
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        """As a key of a tree of states."""
        one = self.parts[0]
        return f"{one.at}_{'x'.join(map(str, one.matrix))}_{np.dtype(one.dtype).name}"


def stacks_of(
    plan: ShardPlan, over: Sequence[str] | None, where: Where, limit: int | None
) -> tuple[tuple[Stack, ...], dict[int, Other]]:
    """The stacks of a plan's matrices, and what each other array that changes goes through, by its number."""
    found, others = _sorted_out(plan, where)
    sizes = dict(plan.mesh.shape)
    if over is None:
        used = {axis for one in found for axes in (one.cut, *one.entries) for axis in axes}
        over = [axis for axis in sizes if axis in used or axis in _batch_axes(plan)]
    elif unknown := [axis for axis in over if axis not in sizes]:
        raise SpecError(f"`over` has {unknown[0]!r}, and the mesh has the axes {', '.join(sizes)}; name some of these.")
    groups: dict[Any, list[Matrices]] = {}
    for one in found:
        key = (one.rest, one.matrix, one.dtype, one.entries, one.cut, one.many[0] if one.cut else 0)
        groups.setdefault(key, []).append(one)
    loads = np.zeros(math.prod(sizes[axis] for axis in over))
    # Large products first: what is left over goes to the owners that have done least.
    order = sorted(groups.values(), key=lambda parts: (-_cost(parts), parts[0].at))
    made = [_stack(some, tuple(over), sizes, loads) for parts in order for some in _within(parts, over, sizes, limit)]
    return tuple(made), others


def _batch_axes(plan: ShardPlan) -> tuple[str, ...]:
    rules = () if plan.axes is None else plan.axes.rules
    return next((entry_axes(target) for name, target in rules if name == "batch"), ())


def _sorted_out(plan: ShardPlan, where: Where) -> tuple[list[Matrices], dict[int, Other]]:
    unused = dict.fromkeys(where)
    found: list[Matrices] = []
    others: dict[int, Other] = {}
    for at, leaf in enumerate(plan.leaves):
        regexes = [regex for regex in where if re.search(regex, leaf.path)][:1]
        for regex in regexes:
            unused.pop(regex, None)
            asked = where[regex]
            if isinstance(asked, tuple):
                found.append(_matrices(at, leaf, asked))
            else:
                others[at] = asked
        if not regexes and len(leaf.shape) > 1:
            found.append(_matrices(at, leaf, _dims(leaf)))
    if unused:
        raise RuleError(
            f"`where`: {next(iter(unused))!r} decides about no array of the plan; correct it, or take it out."
        )
    return found, others


def _dims(leaf: LeafPlan) -> Dims:
    """A matrix as it is; more dimensions only where names say that the leading ones count."""
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


def _matrices(at: int, leaf: LeafPlan, dims: Dims) -> Matrices:
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
    entries = [*map(entry_axes, entries_of(leaf.spec))]
    entries += [()] * (len(leaf.shape) - len(entries))
    lead, rest = leaf.shape[:many], leaf.shape[many:]
    if any(entries[1:many]):
        raise SpecError(
            f"`{leaf.path}`: `{leaf.spec}` cuts a second dimension that counts matrices; cut the first alone."
        )
    matrix = math.prod(rest[:rows]), math.prod(rest[rows:])
    return Matrices(at, lead or (1,), rest, entries[0] if many else (), tuple(entries[many:]), matrix, leaf.dtype)


def _cost(parts: Sequence[Matrices]) -> float:
    """Multiplications of one product of a matrix with itself turned."""
    rows, columns = parts[0].matrix
    return float(rows) * columns * min(rows, columns)


def _within(
    parts: list[Matrices], over: Sequence[str], sizes: Mapping[str, int], limit: int | None
) -> Iterator[list[Matrices]]:
    """Some of the arrays at a time, so that a device's part of two stacks and one matrix stay within the limit."""
    one = math.prod(parts[0].matrix) * np.dtype(parts[0].dtype).itemsize
    owners = math.prod(sizes[axis] for axis in over)
    some: list[Matrices] = []
    for part in parts:
        needed = [(2 * -(-sum(p.number for p in group) // owners) + 1) * one for group in ([part], [*some, part])]
        if limit is not None and needed[0] > limit:
            raise MoveError(
                f"`memory_limit_bytes={limit}`: {part.number} matrices of {part.matrix[0]} x {part.matrix[1]} on "
                f"{owners} owners need {needed[0]} bytes; allow as much, or name more axes in `over`."
            )
        if limit is not None and some and needed[1] > limit:
            yield some
            some = []
        some = [*some, part]
    yield some


def _stack(parts: list[Matrices], over: tuple[str, ...], sizes: Mapping[str, int], loads: np.ndarray) -> Stack:
    """Deals the matrices of a stack to owners: as many to each, and what is left to those that have done least."""
    count, cut = sum(part.number for part in parts), parts[0].cut
    if cut:
        # The dimension that counts is cut already. Its owners are what divides the number, these axes first.
        axes = cut
        for axis in over:
            if axis not in axes and count % math.prod(sizes[one] for one in (*axes, axis)) == 0:
                axes = (*axes, axis)
        slots = count // math.prod(sizes[axis] for axis in axes)
        return Stack(tuple(parts), axes, slots, tuple(range(count)))
    owners = len(loads)
    whole, left = divmod(count, owners)
    own = np.full(owners, whole)
    own[np.argsort(loads, kind="stable")[:left]] += 1
    loads += own * _cost(parts)
    slots, first = int(own.max()), np.concatenate([[0], np.cumsum(own)[:-1]])
    order = [int(first[at]) + slot if slot < own[at] else -1 for at in range(owners) for slot in range(slots)]
    return Stack(tuple(parts), over, slots, tuple(order))
