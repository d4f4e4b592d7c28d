"""Equivalence classes of the dimensions in a program: an operation makes two dimensions
equivalent if it must see them sharded alike.

The contracted dimensions of the two operands of a `dot_general` are an example. A
reshape may split a dimension into factors, its sub-dimensions: `heads * head_dim` into
`heads` and `head_dim`. Each of these has a class of its own. A factor in the Shardy
sharding rule of an operation is a number. Dimensions with one factor must be sharded
alike.
"""

import itertools as it
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
            grandparent = self._parent[self._parent[node]]
            self._parent[node] = grandparent
            node = self._parent[node]
        return node

    def roots(self, node: int) -> list[Root]:
        """The classes of the sub-dimensions of `node`, major-most first. A dimension of
        size 1 has none.
        """
        node = self.find(node)
        if node in self._children:
            roots = []
            for child in self._children[node]:
                roots += self.roots(child)
            return roots
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
        # The dimensions to merge, the major-most last.
        left_stack = list(reversed(before))
        right_stack = list(reversed(after))
        while left_stack and right_stack:
            left = self.find(left_stack[-1])
            right = self.find(right_stack[-1])
            if left == right:
                left_stack.pop()
                right_stack.pop()
            elif self.sizes[left] == 1:
                left_stack.pop()
            elif self.sizes[right] == 1:
                right_stack.pop()
            elif self._can_merge(left, right):
                self._merge(left, right)
                left_stack.pop()
                right_stack.pop()
            elif self._replace_by_children(left_stack, left, right):
                continue
            elif not self._replace_by_children(right_stack, right, left):
                return

    def _can_merge(self, left: int, right: int) -> bool:
        """Whether two nodes have one size, and at most one of them is split."""
        are_split = left in self._children and right in self._children
        return self.sizes[left] == self.sizes[right] and not are_split

    def _merge(self, left: int, right: int) -> None:
        """Merges the classes of two nodes."""
        # The node that is split represents both, so that its children are found.
        if right in self._children:
            self._parent[left] = right
        else:
            self._parent[right] = left

    def _replace_by_children(self, stack: list[int], node: int, other: int) -> bool:
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
            major = self.new(other_size)
            minor = self.new(size // other_size)
            self._children[node] = (major, minor)
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

    - `union`, `dims`: the union-find, and the node of each dimension of each value.
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
        """Makes a node for each dimension of each value, merges them operation by
        operation, and then reads the classes of all. A root is the node that stands for
        a class. `operation.counted` has pairs of a dimension of its first operand that
        a loop iterates over, and the loop's number.
        """
        self.program = program
        self.union = UnionFind()
        self.sizes = self.union.sizes
        self.dims = [
            tuple(map(self.union.new, value.shape)) for value in program.values
        ]
        # For each mark the nodes of dimensions; `marked` has their classes.
        self.marks: dict[str, list[int]] = {kind: [] for kind in _MARKS}
        # From the node of a spatial dimension to its index and their number.
        self.spatial_nodes: dict[int, tuple[int, int]] = {}
        # The batches of the images of convolutions.
        self.batch_nodes: list[int] = []
        # From a loop and the length of an array that it iterates over to the array's
        # first dimension.
        loops: dict[tuple[int, int], int] = {}
        for operation in program.operations:
            if operation.name == "use":
                continue
            _mark(self, operation, _tie(self, operation))
            for dim, loop in operation.counted:
                node = self.dims[operation.ins[0]][dim]
                # Arrays that one loop iterates over have one length, and share that
                # dimension.
                shared_node = loops.setdefault((loop, self.sizes[node]), node)
                self.union.align([shared_node], [node])
                self.marks["scanned"].append(node)

        roots = self.union.roots
        self.roots = [list(map(roots, dims)) for dims in self.dims]
        self.marked: dict[str, set[Root]] = {}
        for kind, nodes in self.marks.items():
            marked_roots = map(roots, nodes)
            self.marked[kind] = set(it.chain.from_iterable(marked_roots))
        self.spatial: dict[Root, tuple[int, int]] = {}
        for node, place in self.spatial_nodes.items():
            for root in roots(node)[:1]:
                self.spatial[root] = place

    def roots_of(self, value: int) -> set[Root]:
        """The classes of all dimensions of a value."""
        return set(it.chain.from_iterable(self.roots[value]))


def must_stay_whole(operation: Operation, dim: tuple[int, ...], size: int) -> bool:
    """Whether no mesh axis can shard a dimension, because operation `operation` needs all
    its elements or reads only some. `dim` are the factors of the dimension in the
    operation's Shardy sharding rule, and `size` is its size.
    """
    factors = operation.factors
    if not factors.replicated.isdisjoint(dim):
        return True
    # A stride looks like a split dimension there.
    if len(dim) > 1 and operation.name in _WINDOWED:
        return True
    # A slice is shorter than its factors.
    size_of_factors = math.prod(factors.sizes[factor] for factor in dim)
    return size_of_factors != size


def _tie(tied: Tied, operation: Operation) -> dict[object, int]:
    """Merges the classes of dimensions with one factor in the sharding rule of
    `operation`. Returns a dict from each factor to the node of one of its dimensions.
    If a factor must be replicated, the key is a pair: the factor, and the index of the
    operand or result. A node stands for a dimension of a value (`tied.dims`), and a
    factor for dimensions that a sharding rule shards alike.
    """
    factors = operation.factors
    sizes = factors.sizes
    union = tied.union
    node_of_factor: dict[object, int] = {}
    # The nodes of dimensions with several factors, and these factors.
    fused: list[tuple[int, tuple[int, ...]]] = []
    operands = enumerate(zip(operation.ins, factors.ins, strict=True))
    results = enumerate(zip(operation.outs, factors.outs, strict=True))
    for index, (value, dims) in it.chain(operands, results):
        for node, dim in zip(tied.dims[value], dims, strict=True):
            size = union.sizes[node]
            if size == 1 or not dim:
                continue
            if len(dim) == 1 and sizes[dim[0]] == size:
                # A sorted or updated dimension is the same in the operand and the
                # result at the same position.
                key: object = dim[0]
                if dim[0] in factors.replicated:
                    key = (dim[0], index)
                if node_of_factor.setdefault(key, node) != node:
                    union.align([node_of_factor[key]], [node])
            elif not must_stay_whole(operation, dim, size):
                fused.append((node, dim))
    for node, dim in fused:
        parts = [
            node_of_factor.setdefault(factor, union.new(sizes[factor]))
            for factor in dim
        ]
        union.align([node], parts)
    return node_of_factor


def batched(operation: Operation) -> tuple[int, ...]:
    """The factors of the batch dimensions of a `dot_general`, or of the groups of a
    `ragged_dot`; else none.
    """
    factors = operation.factors
    if operation.name == "ragged_dot":
        # Its third operand has the sizes of the groups.
        return tuple(it.chain.from_iterable(factors.ins[2]))
    if operation.name != "dot_general":
        return ()
    left_factors, right_factors = map(it.chain.from_iterable, factors.ins)
    (result_factors,) = map(it.chain.from_iterable, factors.outs)
    shared = set(left_factors).intersection(right_factors, result_factors)
    return tuple(sorted(shared))


def _mark(tied: Tied, operation: Operation, node_of_factor: dict[object, int]) -> None:
    """Marks the dimensions that an operation contracts, looks up or chooses among, and
    those of its batches. `node_of_factor` is what `_tie` returned. `tied.marks` has
    lists of nodes (dimensions), by the kind of the mark.
    """

    def mark(kind: str, factors: Iterable[int]) -> None:
        """Adds the dimensions of some factors to those of a mark."""
        for factor in factors:
            if factor in node_of_factor:
                tied.marks[kind].append(node_of_factor[factor])

    factors = operation.factors
    if operation.name in ("dot_general", "ragged_dot"):
        batch_factors = batched(operation)
        mark("batched", batch_factors)
        mark("contracted", factors.reduction.difference(batch_factors))
    elif operation.name in ("gather", "scatter"):
        if operation.name == "gather":
            searched = factors.reduction
        elif len(operation.ins) == 3:  # an operand, its indices and its updates
            searched = it.chain.from_iterable(factors.ins[0])
        else:
            return
        looked_up = _without_batch(operation, searched)
        mark("looked_up", looked_up)
        if _has_token_indices(tied, operation):
            mark("tokens", looked_up)
    elif operation.name == "top_k":
        operand_dims = tied.dims[operation.ins[0]]
        tied.marks["chosen"].append(operand_dims[-1])
    elif operation.name == "slice":
        _mark_slice(tied, operation)
    elif operation.dimension_numbers is not None:
        _mark_convolution(tied, operation)


def _without_batch(operation: Operation, searched: Iterable[int]) -> list[int]:
    """The factors `searched` of a lookup that are none of the batches of its updates."""
    batch_factors: set[int] = set()
    # A scatter has updates as its third operand, and a gather has none.
    for dims in operation.factors.ins[2:]:
        batch_factors.update(it.chain.from_iterable(dims))
    return [factor for factor in searched if factor not in batch_factors]


def _has_token_indices(tied: Tied, operation: Operation) -> bool:
    """Whether the indices of a lookup are the tokens of sequences: they have more
    dimensions than the batch. The indices are the second operand.
    """
    factors = operation.factors
    index_nodes = tied.dims[operation.ins[1]]
    dim_count = 0
    for node, dim in zip(index_nodes, factors.ins[1], strict=True):
        # The dimension of the coordinates of one lookup is replicated.
        if factors.replicated.isdisjoint(dim):
            dim_count += len(tied.union.roots(node))
    return dim_count > 1


def _mark_slice(tied: Tied, operation: Operation) -> None:
    """Marks the dimensions of which a slice keeps a range."""
    (operand,) = operation.ins
    (result,) = operation.outs
    values = tied.program.values
    sizes = zip(values[operand].shape, values[result].shape, strict=True)
    for dim, (size_before, size_after) in enumerate(sizes):
        if size_before != size_after:
            tied.marks["sliced"].append(tied.dims[operand][dim])


def _mark_convolution(tied: Tied, operation: Operation) -> None:
    """Marks the dimensions of a convolution: the channels, the dimensions that it sums
    over, and the windows of its kernel. `tied.dims` has a node for each dimension of
    each value.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.dimension_numbers)
    image, kernel = (tied.dims[value] for value in operation.ins)
    # The batch and the spatial dimensions of the convolutions before.
    earlier_roots: set[Root] = set()
    for node in (*tied.spatial_nodes, *tied.batch_nodes):
        earlier_roots.update(tied.union.roots(node))
    channels = image[numbers.input_feature_dimension]
    # The gradient of a kernel is a convolution too. It sums over the batch of an earlier
    # convolution as if the batch were channels, and has the channels as its batch.
    if earlier_roots.isdisjoint(tied.union.roots(channels)):
        tied.marks["channels"].append(channels)
        tied.batch_nodes.append(image[numbers.input_batch_dimension])
    tied.marks["contracted"].append(kernel[numbers.kernel_input_feature_dimension])
    for dim in numbers.kernel_spatial_dimensions:
        tied.marks["windows"].append(kernel[dim])
    spatial_dims = numbers.input_spatial_dimensions
    for position, dim in enumerate(spatial_dims):
        place = (position, len(spatial_dims))
        tied.spatial_nodes.setdefault(image[dim], place)
