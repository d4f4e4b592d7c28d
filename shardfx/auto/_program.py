"""Equivalence classes of the dimensions in a program: an operation makes two dimensions
equivalent if it must see them sharded alike.

The contracted dimensions of the two operands of a `dot_general` are an example. A
reshape may split a dimension into factors, its sub-dimensions: `heads * head_dim` into
`heads` and `head_dim`. Each of these has a class of its own. A factor in the Shardy
sharding rule of an operation is a number. Dimensions with one factor must be sharded
alike.
"""

import math
from collections.abc import Iterable, Sequence

from jax.extend.mlir.dialects import stablehlo

from .._step import Operation, Program


# The number of an equivalence class of dimensions.
Root = int


class UnionFind:
    """A union-find over the dimensions of a program. Its sets are the equivalence
    classes. A node is the number of a dimension or a sub-dimension. The children of a
    node are its sub-dimensions.
    """

    def __init__(self):
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self._children: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """Adds a dimension of `size` elements. Returns its node."""
        self.sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def find(self, node: int) -> int:
        """The node that represents the equivalence class of `node`."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def roots(self, node: int) -> list[Root]:
        """The classes of the sub-dimensions of `node`, major-most first. A dimension of
        size 1 has none.
        """
        node = self.find(node)
        if node in self._children:
            return [
                root for child in self._children[node] for root in self.roots(child)
            ]
        if self.sizes[node] > 1:
            return [node]
        return []

    def align(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Merges the classes of the dimensions of an array before a reshape, `before`,
        and after it, `after`.

        If two dimensions have different sizes, the larger one is split. For the shapes
        (12,) and (4, 3), the 12 is split into 4 and 3, which are merged with the new
        dimensions. If neither size divides the other, merging stops.
        """
        ours = list(reversed(before))
        theirs = list(reversed(after))
        while ours and theirs:
            a = self.find(ours[-1])
            b = self.find(theirs[-1])
            if self.sizes[a] == 1 or a == b:
                ours.pop()
                if a == b:
                    theirs.pop()
            elif self.sizes[b] == 1:
                theirs.pop()
            elif self.sizes[a] == self.sizes[b] and not (
                a in self._children and b in self._children
            ):
                # The node that is split represents both, so that its children are
                # found.
                root, other = (b, a) if b in self._children else (a, b)
                self._parent[other] = root
                ours.pop()
                theirs.pop()
            elif not self._opened(ours, a, b) and not self._opened(theirs, b, a):
                return

    def _opened(self, stack: list[int], node: int, other: int) -> bool:
        """Replaces `node`, the last one of `stack`, by its children, the first child
        last. Returns whether it did.

        It does not if `other` is larger. A node without children is split first: a node
        of size 12 into 4 and 3, if `other` has size 4. It stays if the size of `other`
        is no divisor of 12.
        """
        size = self.sizes[node]
        other_size = self.sizes[other]
        is_multiple = size > other_size and size % other_size == 0
        if node not in self._children and is_multiple:
            self._children[node] = (self.new(other_size), self.new(size // other_size))
        if size < other_size or node not in self._children:
            return False
        stack.pop()
        stack.extend(reversed(self._children[node]))
        return True


# Operations that read neighbours: a stride does not split a dimension.
_WINDOWED = ("convolution", "reduce_window", "select_and_scatter")
_MARKS = (
    "scanned looked_up tokens batched contracted sliced chosen channels windows".split()
)


class Tied:
    """A program and the equivalence classes of its dimensions.

    Two dimensions are equivalent if they have the same factor in the Shardy sharding
    rule of some operation.

    - `roots`: the classes of each dimension of each value, major-most first.
    - `sizes`: the size of each class.
    - `marked`: a dict from each quoted word to a set of classes. Loops iterate over
      "scanned" classes. Gathers look up entries along "looked_up" classes, and along
      "tokens" classes if the indices are sequences. "batched" and "contracted" classes
      are dimensions of matrix products. Slices keep a range of "sliced" classes. Top-k
      runs along "chosen" classes. "channels" and "windows" are dimensions of
      convolutions.
    - `spatial`: a dict from the class of a spatial dimension of a convolution to two
      numbers: its index among the spatial dimensions, and their number.
    """

    def __init__(self, program: Program):
        self.program = program
        self.union = UnionFind()
        self.sizes = self.union.sizes
        self.dims = [
            tuple(map(self.union.new, value.shape)) for value in program.values
        ]
        self.marks: dict[str, list[int]] = {kind: [] for kind in _MARKS}
        # From the node of a spatial dimension to its index and their number.
        self.spatial_nodes: dict[int, tuple[int, int]] = {}
        loops: dict[tuple[int, int], int] = {}
        for operation in program.operations:
            if operation.name == "use":
                continue
            _mark(self, operation, _tie(self, operation))
            for dim, loop in operation.counted:
                node = self.dims[operation.ins[0]][dim]
                # Arrays that one loop iterates over have one length, and share that
                # dimension.
                self.union.align(
                    [loops.setdefault((loop, self.sizes[node]), node)], [node]
                )
                self.marks["scanned"].append(node)
        roots = self.union.roots
        self.roots = [[*map(roots, dims)] for dims in self.dims]
        self.marked = {
            kind: {root for node in nodes for root in roots(node)}
            for kind, nodes in self.marks.items()
        }
        self.spatial = {
            root: place
            for node, place in self.spatial_nodes.items()
            for root in roots(node)[:1]
        }

    def roots_of(self, value: int) -> set[Root]:
        """The classes of all dimensions of a value."""
        return {root for roots in self.roots[value] for root in roots}


def whole(operation: Operation, dim: tuple[int, ...], size: int) -> bool:
    """Whether no mesh axis can shard a dimension, because operation `operation` needs all
    its elements or reads only some. `dim` are the factors of the dimension in the
    operation's Shardy sharding rule, and `size` is its size.
    """
    factors = operation.factors
    short = math.prod(factors.sizes[factor] for factor in dim) != size
    apart = len(dim) > 1 and operation.name in _WINDOWED
    return short or apart or not factors.replicated.isdisjoint(dim)


def _tie(tied: Tied, operation: Operation) -> dict[object, int]:
    """Merges the classes of dimensions with one factor in the sharding rule of `operation`.
    Returns a dict from each factor to its node. If a factor must be replicated, the key
    is a pair: the factor, and the index of the operand or result.
    """
    sizes = operation.factors.sizes
    union = tied.union
    first: dict[object, int] = {}
    fused: list[tuple[int, tuple[int, ...]]] = []
    for values, sides in (
        (operation.ins, operation.factors.ins),
        (operation.outs, operation.factors.outs),
    ):
        for index, (value, dims) in enumerate(zip(values, sides, strict=True)):
            for node, dim in zip(tied.dims[value], dims, strict=True):
                size = union.sizes[node]
                if size == 1 or not dim:
                    continue
                if len(dim) == 1 and sizes[dim[0]] == size:
                    # A sorted or updated dimension is the same in the operand and the
                    # result at the same position.
                    key: object = dim[0]
                    if dim[0] in operation.factors.replicated:
                        key = (dim[0], index)
                    if first.setdefault(key, node) != node:
                        union.align([first[key]], [node])
                elif not whole(operation, dim, size):
                    fused.append((node, dim))
    for node, dim in fused:
        union.align(
            [node],
            [first.setdefault(factor, union.new(sizes[factor])) for factor in dim],
        )
    return first


def batched(operation: Operation) -> tuple[int, ...]:
    """The factors of the batch dimensions of a `dot_general`, or of the groups of a
    `ragged_dot`; else none.
    """
    if operation.name == "ragged_dot":
        return tuple(factor for dim in operation.factors.ins[2] for factor in dim)
    if operation.name != "dot_general":
        return ()
    left_factors, right_factors, out_factors = (
        {f for dim in dims for f in dim}
        for dims in (*operation.factors.ins, *operation.factors.outs)
    )
    return tuple(sorted(left_factors & right_factors & out_factors))


def _mark(tied: Tied, operation: Operation, first: dict[object, int]) -> None:
    def mark(kind: str, factors: Iterable[int]) -> None:
        tied.marks[kind] += [first[factor] for factor in factors if factor in first]

    factors = operation.factors
    if operation.name in ("dot_general", "ragged_dot"):
        groups = batched(operation)
        mark("batched", groups)
        mark("contracted", factors.reduction.difference(groups))
    elif operation.name == "gather" or (
        operation.name == "scatter" and len(operation.ins) == 3
    ):
        batch_factors = {
            factor
            for side in operation.factors.ins[2:]
            for dim in side
            for factor in dim
        }
        if operation.name == "gather":
            searched = factors.reduction
        else:
            searched = [dim_factor for dim in factors.ins[0] for dim_factor in dim]
        looked_up = [factor for factor in searched if factor not in batch_factors]
        mark("looked_up", looked_up)
        # Indices with more dimensions than the batch are the tokens of sequences.
        pairs = zip(tied.dims[operation.ins[1]], factors.ins[1], strict=True)
        rows = [node for node, dim in pairs if factors.replicated.isdisjoint(dim)]
        if sum(len(tied.union.roots(node)) for node in rows) > 1:
            mark("tokens", looked_up)
    elif operation.name == "top_k":
        tied.marks["chosen"].append(tied.dims[operation.ins[0]][-1])
    elif operation.name == "slice":
        pairs = zip(
            *(
                tied.program.values[value].shape
                for value in (*operation.ins, *operation.outs)
            ),
            strict=True,
        )
        cut = [dim for dim, (before, after) in enumerate(pairs) if before != after]
        tied.marks["sliced"] += [tied.dims[operation.ins[0]][dim] for dim in cut]
    elif operation.windows is not None:
        _mark_convolution(tied, operation)


def _mark_convolution(tied: Tied, operation: Operation) -> None:
    numbers = stablehlo.ConvDimensionNumbers(operation.windows)
    image, kernel = (tied.dims[value] for value in operation.ins)
    earlier = {root for node in tied.spatial_nodes for root in tied.union.roots(node)}
    channels = image[numbers.input_feature_dimension]
    # Only the first convolution over an array tells which dimension is its channels:
    # that of a gradient uses batches as channels.
    if earlier.isdisjoint(tied.union.roots(channels)):
        tied.marks["channels"].append(channels)
    tied.marks["contracted"].append(kernel[numbers.kernel_input_feature_dimension])
    tied.marks["windows"] += [kernel[dim] for dim in numbers.kernel_spatial_dimensions]
    for position, dim in enumerate(numbers.input_spatial_dimensions):
        tied.spatial_nodes.setdefault(
            image[dim], (position, len(numbers.input_spatial_dimensions))
        )
