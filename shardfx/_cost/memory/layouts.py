"""How each value of a program lies on a mesh, and what that is in bytes: the layouts that estimates of traffic have."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._ground.spec import array_bytes, entries_of, entry_axes, pinned
from ...topology._mesh import MeshSpec
from ..factors import rule_of
from ..graph import Pin
from ..layout import Layout, MeshParts, Parts
from ..propagate import propagated
from ..trace import constrained_results
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
        self.on_one_device = {id(op) for op in _inside_shard_maps(program.block)}

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
        numbers = (*[number for number in op.ins if number is not None], *op.outs)
        arrays = list(zip(numbers, self._factors(op), strict=True))
        weight: dict[tuple[int, str], int] = {}
        for number, factors in arrays:
            size = array_bytes(self.values[number].shape, self.values[number].dtype) if factors else 0
            for factor, axes in zip(factors, self.dims[number], strict=True):
                if factor is not None:
                    for axis in axes:
                        weight[factor, axis] = weight.get((factor, axis), 0) + size
        cut: dict[int, tuple[str, ...]] = {}
        taken: set[str] = set()
        for factor, axis in sorted(weight, key=lambda one: -weight[one]):
            if axis not in taken:
                taken.add(axis)
                cut[factor] = (*cut.get(factor, ()), axis)

        def laid(factor: int | None, axes: tuple[str, ...]) -> tuple[str, ...]:
            # A dimension that is no factor keeps what no factor takes from it.
            return tuple(axis for axis in axes if axis not in taken) if factor is None else cut.get(factor, ())

        return numbers, tuple(tuple(map(laid, factors, self.dims[number])) for number, factors in arrays)

    def _factors(self, op: Op) -> list[list[int | None]]:
        """For each array of an operation the factor of each dimension, where a cut of it is a cut of others.

        A reshape splits or joins dimensions: then the leading factor is what an axis cuts.
        """
        given = [() if number is None else self.values[number].shape for number in op.ins]
        made = [self.values[number].shape for number in op.outs]
        rule = rule_of(op.name, op.params, given, made)
        operands = [dims for number, dims in zip(op.ins, rule.operands, strict=True) if number is not None]
        arrays = [*operands, *rule.results]
        # Inside of a `shard_map` shapes are those of one device.
        apart = id(op) in self.on_one_device
        count = collections.Counter(factor for dims in arrays for dim in dims for factor in dim)

        def leading(dim: Sequence[int]) -> int | None:
            factor = next((one for one in dim if rule.sizes[one] > 1), None)
            return None if apart or factor is None or rule.kinds[factor] == "whole" or count[factor] == 1 else factor

        return [list(map(leading, dims)) for dims in arrays]


def _inside_shard_maps(block: Block, apart: bool = False) -> Iterator[Op]:
    for op in block.ops:
        if apart:
            yield op
        for inner in op.blocks:
            yield from _inside_shard_maps(inner, apart or op.name == "shard_map")


def as_compiled(
    program: Program, sizes: Mapping[str, int], known: Mapping[int, Dims], pins: Mapping[int, Pin]
) -> tuple[dict[str, int], dict[int, Dims]]:
    """How values lie as compilers decide it, where it is known how arguments and results do.

    **Arguments:**

    - `program`: the step.
    - `sizes`: of the mesh axes.
    - `known`: the layouts of arguments and results, by number.
    - `pins`: of values that are constrained beside those that the step constrains, by their numbers in its graph.

    **Returns:**

    The sizes of the mesh axes, and of their parts where a part alone cuts something; and the layouts by number.
    """
    assert program.graph is not None
    axes = MeshParts(MeshSpec(dict(sizes)))
    layouts, names = graph_layouts(program, axes, known, pins), _PartNames(axes)
    found = {
        number: tuple(map(names.of, layouts[program.graph.bound[variable]]))
        for number, variable in program.variables.items()
        if variable in program.graph.bound
    }
    return names.sizes, {**found, **known}


def graph_layouts(
    program: Program, axes: MeshParts, known: Mapping[int, Dims], pins: Mapping[int, Pin]
) -> list[Layout]:
    """How the values of a program's graph lie, by their numbers there; as `as_compiled`."""
    graph = program.graph
    assert graph is not None

    def pin(number: int | None) -> Pin | None:
        return None if number is None or number not in known else Pin(known[number])

    arguments = {value: Pin(known[number]) for value, number in zip(graph.arguments, program.block.ins, strict=True)}
    step = constrained_results(graph, [pin(number) for number in program.block.outs])
    return propagated(step, axes, {**arguments, **pins})


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
