"""A step whose dimensions are tied: each dimension is a part, and an operation merges parts that it treats alike."""

import math
from collections.abc import Iterable, Sequence

from jax.extend.mlir.dialects import stablehlo

from .._step import Operation, Program


class Parts:
    """A union-find over dimensions. A part is one dimension, or one sub-dimension of a fused dimension; tied parts form
    a class.
    """

    def __init__(self):
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self._children: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """Adds a part of `size` elements, and returns its number."""
        self.sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def find(self, part: int) -> int:
        """The root of a part's class, as in any union-find."""
        while self._parent[part] != part:
            self._parent[part] = self._parent[self._parent[part]]
            part = self._parent[part]
        return part

    def leaves(self, part: int) -> list[int]:
        """The classes of a part's sub-dimensions, major-most first; none for a part of size 1."""
        part = self.find(part)
        if part in self._children:
            return [leaf for child in self._children[part] for leaf in self.leaves(child)]
        return [part] if self.sizes[part] > 1 else []

    def align(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Ties two sequences of parts that hold the same elements in the same order. A part is split where the sizes
        differ. Nothing is tied after the first pair of sizes where neither divides the other.
        """
        ours, theirs = list(reversed(left)), list(reversed(right))
        while ours and theirs:
            a, b = self.find(ours[-1]), self.find(theirs[-1])
            if self.sizes[a] == 1 or a == b:
                ours.pop()
                if a == b:
                    theirs.pop()
            elif self.sizes[b] == 1:
                theirs.pop()
            elif self.sizes[a] == self.sizes[b] and not (a in self._children and b in self._children):
                # The class that is split represents both, so that its parts are found.
                root, other = (b, a) if b in self._children else (a, b)
                self._parent[other] = root
                ours.pop()
                theirs.pop()
            elif not self._opened(ours, a, b) and not self._opened(theirs, b, a):
                return

    def _opened(self, stack: list[int], part: int, other: int) -> bool:
        """Replaces `part` by its children on the stack, if it is at least as large as `other`; returns
        whether it did.
        """
        size, least = self.sizes[part], self.sizes[other]
        if part not in self._children and size > least and size % least == 0:
            self._children[part] = self.new(least), self.new(size // least)
        if size < least or part not in self._children:
            return False
        stack.pop()
        stack.extend(reversed(self._children[part]))
        return True


# Operations that read neighbours: a stride does not split a dimension.
_WINDOWED = ("convolution", "reduce_window", "select_and_scatter")
_MARKS = "scanned looked_up tokens batched contracted sliced chosen channels windows".split()


class Tied:
    """A program and the classes of its dimensions. Each operation ties the dimensions that have a factor in common.

    - `leaves`: for each dimension of each value the classes that it consists of, major-most first; `sizes` are the
        sizes of classes by number.
    - `marked`: for each kind of operation, the classes that such operations act on: loops run over them, an index looks
        them up ("tokens": one index for each token of a sequence), products have them as batch or contracted
        dimensions, slices take a part of them, top-k chooses among them, convolutions have them as channels or windows.
    - `spatial`: the spatial dimensions of convolutions, each with its position among them and their number.
    """

    def __init__(self, program: Program):
        self.program, self.parts = program, Parts()
        self.sizes = self.parts.sizes
        self.dims = [tuple(map(self.parts.new, value.shape)) for value in program.values]
        self.marks: dict[str, list[int]] = {kind: [] for kind in _MARKS}
        self.slid: dict[int, tuple[int, int]] = {}
        loops: dict[tuple[int, int], int] = {}
        for made in program.operations:
            if made.name == "use":
                continue
            _mark(self, made, _tie(self, made))
            for dim, loop in made.counted:
                part = self.dims[made.ins[0]][dim]
                # All that one loop iterates over has one length, and is one dimension.
                self.parts.align([loops.setdefault((loop, self.sizes[part]), part)], [part])
                self.marks["scanned"].append(part)
        leaves = self.parts.leaves
        self.leaves = [[*map(leaves, dims)] for dims in self.dims]
        self.marked = {kind: {leaf for part in found for leaf in leaves(part)} for kind, found in self.marks.items()}
        self.spatial = {leaf: place for part, place in self.slid.items() for leaf in leaves(part)[:1]}

    def leaves_of(self, value: int) -> set[int]:
        """The classes of all dimensions of a value."""
        return {leaf for leaves in self.leaves[value] for leaf in leaves}


def whole(made: Operation, dim: tuple[int, ...], size: int) -> bool:
    """Whether an operation needs a dimension unsharded, or reads only a part of the dimension's elements."""
    factors = made.factors
    short = math.prod(factors.sizes[factor] for factor in dim) != size
    apart = len(dim) > 1 and made.name in _WINDOWED
    return short or apart or not factors.replicated.isdisjoint(dim)


def _tie(found: Tied, made: Operation) -> dict[object, int]:
    """Ties the dimensions of one operation that have a factor in common, and returns the part of each factor."""
    sizes, parts = made.factors.sizes, found.parts
    first: dict[object, int] = {}
    fused: list[tuple[int, tuple[int, ...]]] = []
    for values, sides in ((made.ins, made.factors.ins), (made.outs, made.factors.outs)):
        for at, (value, dims) in enumerate(zip(values, sides, strict=True)):
            for part, dim in zip(found.dims[value], dims, strict=True):
                size = parts.sizes[part]
                if size == 1 or not dim:
                    continue
                if len(dim) == 1 and sizes[dim[0]] == size:
                    # A sorted or updated dimension stays the same: operand and result have it at the same position.
                    key = (dim[0], at) if dim[0] in made.factors.replicated else dim[0]
                    if first.setdefault(key, part) != part:
                        parts.align([first[key]], [part])
                elif not whole(made, dim, size):
                    fused.append((part, dim))
    for part, dim in fused:
        parts.align([part], [first.setdefault(one, parts.new(sizes[one])) for one in dim])
    return first


def batched(made: Operation) -> tuple[int, ...]:
    """The factors that are batch dimensions of a product, the groups of a `ragged_dot` included."""
    if made.name == "ragged_dot":
        return tuple(factor for dim in made.factors.ins[2] for factor in dim)
    if made.name != "dot_general":
        return ()
    left, right, out = ({f for dim in dims for f in dim} for dims in (*made.factors.ins, *made.factors.outs))
    return tuple(sorted(left & right & out))


def _mark(found: Tied, made: Operation, first: dict[object, int]) -> None:
    def mark(kind: str, factors: Iterable[int]) -> None:
        found.marks[kind] += [first[factor] for factor in factors if factor in first]

    factors = made.factors
    if made.name in ("dot_general", "ragged_dot"):
        groups = batched(made)
        mark("batched", groups)
        mark("contracted", factors.reduction.difference(groups))
    elif made.name == "gather" or (made.name == "scatter" and len(made.ins) == 3):
        given = {factor for side in made.factors.ins[2:] for dim in side for factor in dim}
        own = factors.reduction if made.name == "gather" else [one for dim in factors.ins[0] for one in dim]
        looked_up = [factor for factor in own if factor not in given]
        mark("looked_up", looked_up)
        # The rows are for the tokens of sequences if the indices have more dimensions than a batch.
        pairs = zip(found.dims[made.ins[1]], factors.ins[1], strict=True)
        rows = [part for part, dim in pairs if factors.replicated.isdisjoint(dim)]
        if sum(len(found.parts.leaves(part)) for part in rows) > 1:
            mark("tokens", looked_up)
    elif made.name == "top_k":
        found.marks["chosen"].append(found.dims[made.ins[0]][-1])
    elif made.name == "slice":
        pairs = zip(*(found.program.values[value].shape for value in (*made.ins, *made.outs)), strict=True)
        cut = [dim for dim, (before, after) in enumerate(pairs) if before != after]
        found.marks["sliced"] += [found.dims[made.ins[0]][dim] for dim in cut]
    elif made.windows is not None:
        _mark_convolution(found, made)


def _mark_convolution(found: Tied, made: Operation) -> None:
    numbers = stablehlo.ConvDimensionNumbers(made.windows)
    image, kernel = (found.dims[value] for value in made.ins)
    known = {leaf for part in found.slid for leaf in found.parts.leaves(part)}
    channels = image[numbers.input_feature_dimension]
    # The first convolution of an array shows its dimensions, since that of a gradient uses batches as channels.
    if known.isdisjoint(found.parts.leaves(channels)):
        found.marks["channels"].append(channels)
    found.marks["contracted"].append(kernel[numbers.kernel_input_feature_dimension])
    found.marks["windows"] += [kernel[dim] for dim in numbers.kernel_spatial_dimensions]
    for at, dim in enumerate(numbers.input_spatial_dimensions):
        found.slid.setdefault(image[dim], (at, len(numbers.input_spatial_dimensions)))
