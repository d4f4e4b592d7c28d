"""The dimensions that a plan without rules does not shard: heads, experts and stacked
layers.

Names that the caller or a module declares decide. Arrays without names are judged by
the usual names in their paths, as [`shardfx.lint`][] does.
"""

import functools as ft
import itertools as it
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._plan import FUSED, ROLES, fused_dimension, head_dimension
from .._rules import Atomic


# Logical names of dimensions that are not sharded, in the words of flax, T5X, MaxText,
# Levanter and `name_axes`.
_HEADS = "heads kv_heads q_heads num_heads head kv joined_kv head_dim head_size"
_STACKS = "experts expert num_experts layers layer blocks block stages query_groups"
_NAMES = frozenset((*_HEADS.split(), *_STACKS.split()))
# Parts of paths below which arrays have a dimension for layers, if no number follows.
_STACK = re.compile(r"(\w*_)?(layers?|blocks?|stack|stacked|h|stages?)")
_EXPERTS = frozenset(("experts", "expert", "local_experts"))
# A shard of a multiple of these elements holds whole heads, if there are a power of two
# of shards: a usual head has this many elements, or an odd number times fewer.
_HEAD_ELEMENTS = 256
# A convolution's weights have as many dimensions as those of separate heads.
_MOST_HEAD_DIMS = 3


class NamedShape(NamedTuple):
    """An array of a tree: its path, its shape, its logical names or `None`, and the
    number of leading dimensions that modules declare as stacked layers.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Any, ...] | None = None
    stacked: int = 0


class _OutputDims(NamedTuple):
    """The dimensions of the weights of an attention layer's output, or of its bias, of
    which one must not be sharded.

    - `position`: the position of the array among all.
    - `heads`: the dimension of the heads, `None` in a bias. It must not be sharded if a
      shard would split a head.
    - `size`: the number of elements of all heads.
    - `results`: the dimension of the results, which else must not be sharded.
    """

    position: int
    heads: int | None
    size: int
    results: int


class WholeDims(NamedTuple):
    """The dimensions that must not be sharded.

    - `dims`: for each array, those for any number of devices.
    - `outputs`: the arrays in which the number of devices decides on another one.
    """

    dims: list[set[int]]
    outputs: list[_OutputDims]

    def whole_heads(self, shards: int) -> frozenset[int]:
        """The sizes in `outputs` of which each of `shards` shards has whole heads."""
        sizes = {output.size for output in self.outputs}
        return frozenset(size for size in sizes if _has_whole_heads(size, shards))

    def of_arrays(self, whole_heads: frozenset[int]) -> list[tuple[int, ...]]:
        """For each array, the dimensions that must not be sharded, in ascending order.
        `whole_heads` are the sizes of which each shard has whole heads.
        """
        dims = list(map(set, self.dims))
        for output in self.outputs:
            if output.size in whole_heads:
                # A sharded dimension of the results would shard all activations, in
                # place of the batch.
                dims[output.position].add(output.results)
            elif output.heads is not None:
                dims[output.position].add(output.heads)
        return [tuple(sorted(of_array)) for of_array in dims]


def whole_dims(arrays: Sequence[NamedShape]) -> WholeDims:
    """The dimensions of the arrays that must not be sharded."""
    dims = [set(range(array.stacked)) for array in arrays]
    is_open = []
    for number, array in enumerate(arrays):
        if array.names is None:
            is_open.append(number)
        else:
            dims[number].update(_named_dims(array.names, len(array.shape)))

    unnamed = [arrays[number] for number in is_open]
    outputs: list[_OutputDims] = []
    head_dims = ft.partial(_head_dims, outputs=outputs)
    for find in (_stacked_dims, _expert_dims, head_dims):
        for position, dim in find(unnamed):
            dims[is_open[position]].add(dim)
    outputs = [output._replace(position=is_open[output.position]) for output in outputs]
    return WholeDims(dims, outputs)


def _named_dims(names: tuple[Any, ...], rank: int) -> Iterable[int]:
    """The dimensions whose logical name says that they are whole. `...` stands for
    dimensions without a name.
    """
    names_of_dims = _one_per_dim(names, rank)
    for dim, name in enumerate(names_of_dims[:rank]):
        parts = name if isinstance(name, tuple) else (name,)
        if any(map(_says_whole, parts)):
            yield dim


def _one_per_dim(names: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The names with `None` for each dimension for which `...` stands."""
    if ... not in names:
        return names
    start = names.index(...)
    before = names[:start]
    after = names[start + 1 :]
    open_count = rank - len(before) - len(after)
    return before + (None,) * open_count + after


def _says_whole(name: object) -> bool:
    # An atomic name has units, such as the heads in `heads * head_dim`.
    return isinstance(name, Atomic) or name in _NAMES


def _stacked_dims(arrays: Sequence[NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for stacked layers: the first one
    of all arrays below a part such as `layers`, if no number follows and their sizes
    are equal.
    """
    positions_below: dict[str, list[int]] = {}
    for position, array in enumerate(arrays):
        parts = array.path.split("/")
        for depth, (part, following) in enumerate(it.pairwise(parts), 1):
            if _STACK.fullmatch(part) and not following.isdigit():
                prefix = "/".join(parts[:depth])
                positions_below.setdefault(prefix, []).append(position)

    for positions in positions_below.values():
        shapes = [arrays[position].shape for position in positions]
        first_sizes = {shape[:1] for shape in shapes}
        ranks = set(map(len, shapes))
        is_equal = len(first_sizes) == 1 and () not in first_sizes
        if is_equal and len(ranks) > 1:
            for position in positions:
                yield position, 0


def _expert_dims(arrays: Sequence[NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for experts: in an array of three
    or more dimensions below `experts`, the one before the last two.
    """
    for position, array in enumerate(arrays):
        rank = len(array.shape)
        parts = array.path.split("/")
        if rank < 3 or _EXPERTS.isdisjoint(parts):
            continue
        # A number after `experts` is that of one expert.
        followers = {
            following for part, following in it.pairwise(parts) if part in _EXPERTS
        }
        if not any(map(str.isdigit, followers)):
            yield position, rank - 3


class _Projection(NamedTuple):
    """An array of an attention layer: its role, such as "q", and its position."""

    role: str
    position: int


def _head_dims(
    arrays: Sequence[NamedShape],
    outputs: list[_OutputDims],
) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and a dimension with attention heads, or with the
    elements of a head. The weights of outputs with such a dimension are appended to
    `outputs`, if the heads and their elements share it.
    """
    # By the path of the layer, and by the path within a projection.
    layers: dict[tuple[tuple[str, ...], str], list[_Projection]] = {}
    for position, array in enumerate(arrays):
        parts = tuple(re.split("[/.]", array.path))
        layer = None
        role = ""
        for depth, part in enumerate(parts):
            suffix = "/".join(parts[depth + 1 :])
            if part in FUSED and array.shape:
                dim = fused_dimension(part, suffix, array.shape)
                if dim is not None:
                    yield position, dim
            if part in ROLES:
                layer = (parts[:depth], suffix)
                role = ROLES[part]
        if layer is not None:
            layers.setdefault(layer, []).append(_Projection(role, position))

    for (_, suffix), projections in layers.items():
        yield from _head_dims_of_layer(suffix, projections, arrays, outputs)


def _head_dims_of_layer(
    suffix: str,
    projections: Sequence[_Projection],
    arrays: Sequence[NamedShape],
    outputs: list[_OutputDims],
) -> Iterable[tuple[int, int]]:
    """As `_head_dims`, for the projections of one layer. Their paths end in `suffix`."""
    shapes = {
        projection.role: arrays[projection.position].shape for projection in projections
    }
    inputs = [shapes[role] for role in "qkv" if role in shapes]
    if len(inputs) < 2:
        return
    joined_dim = head_dimension(suffix, inputs)
    for role, position in projections:
        shape = arrays[position].shape
        separate_dims = _separate_dims(role, shape, shapes)
        if separate_dims:
            for dim in separate_dims:
                yield position, dim
        elif joined_dim is not None and len(shape) == len(inputs[0]):
            if role != "o":
                yield position, joined_dim
                continue
            # The weights of the output have the opposite order.
            dim = 2 * len(shape) - 3 - joined_dim
            if dim < len(shape):
                output = _OutputDims(
                    position=position,
                    heads=dim if dim >= 0 else None,
                    size=shape[dim],
                    results=joined_dim,
                )
                outputs.append(output)


def _has_whole_heads(size: int, shards: int) -> bool:
    """Whether each of the equal shards of a dimension with heads has whole heads, of
    any usual number of elements.
    """
    return shards & (shards - 1) == 0 and size % (shards * _HEAD_ELEMENTS) == 0


def _separate_dims(
    role: str,
    shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int, ...]:
    """The dimensions of the heads and of their elements, if each has one of its own, as
    in `[embed, heads, head_dim]`; else none. `shapes` has the shape of each role.
    """
    if "q" not in shapes or "o" not in shapes:
        return ()
    output = shapes["o"]
    if len(output) < _MOST_HEAD_DIMS or shapes["q"][-2:] != output[-3:-1]:
        return ()
    rank = len(shape)
    if role == "o":
        return (rank - 3, rank - 2)
    return (rank - 2, rank - 1)
