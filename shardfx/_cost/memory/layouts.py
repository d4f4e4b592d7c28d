"""How each value of a program lies on a mesh: from arguments and constraints to all that they decide.

What cuts a dimension cuts every dimension that is the same one (see `factors`), as far as an array has that axis free
and its size divides. Operations that go element by element come first, then all others, as in Shardy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from ..._ground.spec import array_bytes, entries_of, entry_axes, pinned
from .factors import Links, links_of, loop_links
from .program import Block, Op, Program, Value


# The mesh axes that cut each dimension of an array.
Dims = tuple[tuple[str, ...], ...]

_CONSTRAINTS = ("sharding_constraint", "reshard")
_SWEEPS = 8


class Layouts:
    """The layout of each value of a program.

    **Arguments:**

    - `program`: the step.
    - `sizes`: of the mesh axes.
    - `given`: of some values, by number, the layouts that are known: those of the arguments.
    - `tile`: what the chip pads the last two dimensions to, whichever those are; see [`shardfx.chips.Chip`][].
    """

    def __init__(
        self,
        program: Program,
        sizes: Mapping[str, int],
        given: Mapping[int, Dims],
        tile: tuple[int, int] | None = None,
    ):
        self.sizes, self.values, self.tile = sizes, program.values, tile
        self.dims: list[Dims] = [((),) * len(value.shape) for value in program.values]
        self.fixed: set[int] = set()
        for number, dims in given.items():
            self._fix(number, dims)
        links = list(self._links(program.block))
        self.links = {id(link.op): link for link in links if link.op is not None}
        passing = [link for link in links if link.passes]
        for these in (passing, links):
            self._settle(these)

    def bytes_of(self, number: int, dims: Dims | None = None) -> int:
        """The bytes of a value in a device's memory, as it lies or as it would."""
        value = self.values[number]
        if value.dtype is None or value.on_host:
            return 0
        own = self.dims[number] if dims is None else dims
        shard = tuple(-(-size // self.count(axes)) for size, axes in zip(value.shape, own, strict=True))
        return array_bytes(padded(shard, self.tile), value.dtype)

    def count(self, axes: Sequence[str]) -> int:
        """Into how many pieces axes cut."""
        return math.prod(self.sizes[axis] for axis in axes)

    def inside(self, op: Op) -> tuple[tuple[int, ...], tuple[Dims, ...]]:
        """How the operands and results of an operation lie while it computes.

        Each factor is cut in one way: by the axes that cut it where it cuts the most bytes. An axis cuts one factor.
        """
        link = self.links[id(op)]
        weight: dict[tuple[int, str], int] = {}
        for number, factors in zip(link.numbers, link.factors, strict=True):
            size = array_bytes(self.values[number].shape, self.values[number].dtype) if factors else 0
            for factor, axes in zip(factors, self.dims[number], strict=True):
                for axis in axes if factor >= 0 else ():
                    weight[factor, axis] = weight.get((factor, axis), 0) + size
        cut: dict[int, tuple[str, ...]] = {}
        taken: set[str] = set()
        for factor, axis in sorted(weight, key=lambda one: -weight[one]):
            if axis not in taken:
                taken.add(axis)
                cut[factor] = (*cut.get(factor, ()), axis)
        found = []
        for number, factors in zip(link.numbers, link.factors, strict=True):
            own = self.dims[number]
            # A dimension that is no factor keeps what no factor takes from it.
            found.append(
                tuple(
                    cut.get(factor, ()) if factor >= 0 else tuple(axis for axis in axes if axis not in taken)
                    for factor, axes in zip(factors, own, strict=True)
                )
            )
        return link.numbers, tuple(found)

    def _fix(self, number: int, dims: Dims) -> None:
        self.dims[number] = dims
        self.fixed.add(number)

    def _links(self, block: Block) -> Iterator[Links]:
        for op in block.ops:
            if op.name in _CONSTRAINTS:
                self._constrain(op)
            elif op.name == "shard_map":
                for out, spec in zip(op.outs, op.params["out_specs"], strict=True):
                    self._fix(out, dims_of(spec, len(self.values[out].shape), self.sizes))
            yield links_of(op, self.values)
            if op.name != "shard_map":  # inside of it, shapes are those of one device
                between = loop_links(op, self.values)
                yield from between
                for inner in op.blocks:
                    yield from self._links(inner)
                yield from between
            else:
                for inner in op.blocks:
                    for link in self._links(inner):
                        if link.op is not None:
                            yield link._replace(factors=tuple((-1,) * len(dims) for dims in link.factors))

    def _constrain(self, op: Op) -> None:
        sharding = op.params.get("sharding", op.params.get("dst_sharding"))
        if isinstance(sharding, NamedSharding):
            (out,) = op.outs
            self._fix(out, dims_of(sharding.spec, len(self.values[out].shape), self.sizes))

    def _settle(self, links: list[Links]) -> None:
        for sweep in range(_SWEEPS):
            changed = False
            for link in links if sweep % 2 == 0 else reversed(links):
                changed |= self._pass(link)
            if not changed and sweep:
                return

    def _pass(self, link: Links) -> bool:
        """Gives what cuts a factor in one array to the others; whether anything changed."""
        best: dict[int, tuple[str, ...]] = {}
        for number, factors in zip(link.numbers, link.factors, strict=True):
            for factor, axes in zip(factors, self.dims[number], strict=True):
                if factor >= 0 and len(axes) > len(best.get(factor, ())):
                    best[factor] = axes
        if not best:
            return False
        changed = False
        for number, factors in zip(link.numbers, link.factors, strict=True):
            if number in self.fixed:
                continue
            for dim, factor in enumerate(factors):
                wanted = best.get(factor, ())
                if factor >= 0 and len(wanted) > len(self.dims[number][dim]) and self._allows(number, dim, wanted):
                    dims = list(self.dims[number])
                    dims[dim] = wanted
                    self.dims[number] = tuple(dims)
                    changed = True
        return changed

    def _allows(self, number: int, dim: int, axes: tuple[str, ...]) -> bool:
        own = self.dims[number]
        if own[dim] != axes[: len(own[dim])]:
            return False
        elsewhere = {axis for other, taken in enumerate(own) if other != dim for axis in taken}
        return not elsewhere & set(axes) and self.values[number].shape[dim] % self.count(axes) == 0


def dims_of(spec: Any, rank: int, sizes: Mapping[str, int]) -> Dims:
    """The axes of a PartitionSpec that cut, per dimension: those that the mesh has, with more than one device."""
    entries = [
        tuple(axis for axis in entry_axes(entry) if sizes.get(axis, 1) > 1) for entry in entries_of(pinned(spec))
    ]
    return (*entries[:rank], *((),) * (rank - len(entries)))


def typed(value: Value, sizes: Mapping[str, int]) -> Dims | None:
    """What the type of a value says of its layout, under Explicit axes; `None` where it says nothing."""
    sharding = getattr(value.aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or not entries_of(sharding.spec):
        return None
    return dims_of(sharding.spec, len(value.shape), sizes)


def padded(shape: tuple[int, ...], tile: tuple[int, int] | None) -> tuple[int, ...]:
    """A shape as it lies in memory that is cut into tiles: the two dimensions that pad least are the last ones.

    A dimension shorter than the tile's rows is padded to a power of two alone, as the compiler for TPUs does.
    """
    if tile is None or not shape or 0 in shape:
        return shape
    rows, columns = tile
    if len(shape) == 1:
        return (_up(shape[0], columns),)
    best = shape
    least = None
    for last in range(len(shape)):
        for second in range(len(shape)):
            if second == last:
                continue
            sizes = list(shape)
            sizes[last] = _up(sizes[last], columns)
            sizes[second] = _up(sizes[second], min(rows, 1 << max(0, sizes[second] - 1).bit_length()))
            count = math.prod(sizes)
            if least is None or count < least:
                best, least = tuple(sizes), count
    return best


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
