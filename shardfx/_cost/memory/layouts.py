"""How each value of a program lies on a mesh, and what that is in bytes: the layouts that estimates of traffic have."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._ground.spec import array_bytes, entries_of, entry_axes, pinned
from ...topology._mesh import MeshSpec
from ..graph import Pin
from ..layout import MeshParts, Parts
from ..propagate import propagated
from ..trace import constrained_results
from .factors import Links, links_of
from .program import Block, Op, Program


# The mesh axes that cut each dimension of an array.
Dims = tuple[tuple[str, ...], ...]


class Layouts:
    """The layout of each value of a program.

    **Arguments:**

    - `program`: the step.
    - `sizes`: of the mesh axes.
    - `given`: the layouts of values, by number; others are whole.
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
        self.dims = [given.get(number, ((),) * len(value.shape)) for number, value in enumerate(program.values)]
        self.links = {id(link.op): link for link in self._links(program.block)}

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

    def _links(self, block: Block) -> Iterator[Links]:
        for op in block.ops:
            yield links_of(op, self.values)
            for inner in op.blocks:
                for link in self._links(inner):
                    # Inside of a `shard_map` shapes are those of one device.
                    apart = tuple((-1,) * len(dims) for dims in link.factors)
                    yield link._replace(factors=apart) if op.name == "shard_map" else link


def as_compiled(
    program: Program, sizes: Mapping[str, int], known: Mapping[int, Dims]
) -> tuple[dict[str, int], dict[int, Dims]]:
    """How values lie as compilers decide it, where it is known how arguments and results do.

    **Returns:**

    The sizes of the mesh axes, and of their parts where a part alone cuts something; and the layouts by number.
    """
    assert program.graph is not None
    axes = MeshParts(MeshSpec(dict(sizes)))
    graph = program.graph

    def pin(number: int | None) -> Pin | None:
        return None if number is None or number not in known else Pin(known[number])

    pins = {value: Pin(known[number]) for value, number in zip(graph.arguments, program.block.ins, strict=True)}
    layouts = propagated(constrained_results(graph, [pin(number) for number in program.block.outs]), axes, pins)
    names = _PartNames(axes)
    found = {
        number: tuple(map(names.of, layouts[graph.bound[variable]]))
        for number, variable in program.variables.items()
        if variable in graph.bound
    }
    return names.sizes, {**found, **known}


class _PartNames:
    """Names for parts of mesh axes: an axis's own where all of its parts come together."""

    def __init__(self, axes: MeshParts):
        self.axes, self.sizes = axes, dict(axes.mesh.shape)
        self.known: dict[Parts, tuple[str, ...]] = {}

    def of(self, parts: Parts) -> tuple[str, ...]:
        if parts not in self.known:
            self.known[parts] = tuple(self._named(parts))
        return self.known[parts]

    def _named(self, parts: Parts) -> Iterator[str]:
        at = 0
        while at < len(parts):
            axis = self.axes.axis[parts[at]]
            whole = self.axes.of([axis])
            if parts[at : at + len(whole)] == whole:
                at += len(whole)
                yield axis
            else:
                name = f"{axis}/{parts[at] - whole[0]}"
                self.sizes[name] = self.axes.sizes[parts[at]]
                at += 1
                yield name


def dims_of(spec: Any, rank: int, sizes: Mapping[str, int]) -> Dims:
    """The axes of a PartitionSpec that cut, per dimension: those that the mesh has, with more than one device."""
    entries = [
        tuple(axis for axis in entry_axes(entry) if sizes.get(axis, 1) > 1) for entry in entries_of(pinned(spec))
    ]
    return (*entries[:rank], *((),) * (rank - len(entries)))


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
