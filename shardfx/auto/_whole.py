"""The dimensions that a plan without rules does not shard: heads, experts and stacked
layers. Tensor parallelism shards between heads and between experts.

Names that the caller or a module declares decide. Arrays without names are judged by
the usual names in their paths, as [`shardfx.lint`][] does.
"""

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
_STACK_NAMES = frozenset(_STACKS.split())
_NAMES = _STACK_NAMES | frozenset(_HEADS.split())
_HEAD_NAMES = frozenset(("heads", "kv_heads", "q_heads", "num_heads"))
_HEAD_ELEMENT_NAMES = frozenset(("head", "kv", "head_dim", "head_size"))
_EXPERT_NAMES = frozenset(("experts", "expert", "num_experts"))
# Parts of paths below which arrays have a dimension for layers, if no number follows.
_STACK = re.compile(r"(\w*_)?(layers?|blocks?|stack|stacked|h|stages?)")
_EXPERTS = frozenset(("experts", "expert", "local_experts"))
# The weights that choose the experts of a token. One of their dimensions is the number
# of experts.
_ROUTERS = frozenset(("router", "gate", "gating"))
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


class _Heads(NamedTuple):
    """A dimension of attention heads, and the number of elements of each head; `None`
    if that is not known.
    """

    dim: int
    unit: int | None


class WholeDims(NamedTuple):
    """The dimensions that must not be sharded.

    - `arrays`: all arrays.
    - `dims`: for each array, those for any number of devices.
    - `outputs`: the arrays in which the number of devices decides on another one.
    - `heads`, `experts`: the dimensions between whose parts tensor parallelism may
      shard, by the positions of the arrays.
    """

    arrays: Sequence[NamedShape]
    dims: list[set[int]]
    outputs: list[_OutputDims]
    heads: dict[int, _Heads]
    experts: dict[int, int]

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

    def of_tensor(self, shards: int) -> list[tuple[int, ...]]:
        """For each array, the dimensions that tensor parallelism over `shards` devices
        must not shard, in ascending order: all but the heads or the experts, where an
        array has them. An array is whole if a shard would split a head.
        """
        dims = []
        for position, array in enumerate(self.arrays):
            whole = self.dims[position]
            between = None
            if position in self.experts:
                dim = self.experts[position]
                if array.shape[dim] % shards == 0:
                    between = dim
            elif position in self.heads:
                heads = self.heads[position]
                whole = set(range(len(array.shape)))
                if _is_between_heads(array.shape[heads.dim], heads.unit, shards):
                    between = heads.dim
            if between is not None:
                whole = set(range(len(array.shape))) - {between}
            dims.append(tuple(sorted(whole)))
        return dims

    def long_sides(self) -> list[int]:
        """For each array, its elements for each element of the activations that tensor
        parallelism reduces: those of its longest dimension, times the experts.
        """
        sides = []
        for position, array in enumerate(self.arrays):
            experts = self.experts.get(position)
            others = [size for dim, size in enumerate(array.shape) if dim != experts]
            longest = max(others, default=1)
            sides.append(longest if experts is None else longest * array.shape[experts])
        return sides


def whole_dims(arrays: Sequence[NamedShape]) -> WholeDims:
    """The dimensions of the arrays that must not be sharded."""
    dims = [set(range(array.stacked)) for array in arrays]
    whole = WholeDims(arrays, dims, outputs=[], heads={}, experts={})
    unnamed: dict[int, NamedShape] = {}
    for position, array in enumerate(arrays):
        if array.names is None:
            unnamed[position] = array
        else:
            names = _one_per_dim(array.names, len(array.shape))
            _add_named_dims(whole, position, names[: len(array.shape)])

    for position, dim in _stacked_dims(unnamed):
        dims[position].add(dim)
    for position, dim in _expert_dims(unnamed):
        dims[position].add(dim)
        whole.experts[position] = dim
    _add_head_dims(whole, unnamed)
    return whole


def _add_named_dims(whole: WholeDims, position: int, names: tuple[Any, ...]) -> None:
    """Notes the dimensions of an array that their logical names forbid to shard, and
    which of them hold heads or experts, between which tensor parallelism may shard.
    """
    for dim, name in enumerate(names):
        parts = name if isinstance(name, tuple) else (name,)
        if not any(map(_forbids_sharding, parts)):
            continue
        whole.dims[position].add(dim)
        if isinstance(name, Atomic) and isinstance(name.unit, int):
            whole.heads[position] = _Heads(dim, name.unit)
        elif name in _HEAD_NAMES:
            stacked = whole.arrays[position].stacked
            unit = 1 if _has_head_elements(names[stacked:]) else None
            whole.heads[position] = _Heads(dim, unit)
        elif name in _EXPERT_NAMES:
            whole.experts[position] = dim


def _has_head_elements(names: tuple[Any, ...]) -> bool:
    """Whether an array has a dimension for the elements of a head, beside the one for
    the heads. It may have no name, where the array has one for its inputs or results
    too. If there is none, the dimension of the heads may hold all their elements.
    """
    if not _HEAD_ELEMENT_NAMES.isdisjoint(names):
        return True
    unstacked = [name for name in names if name not in _STACK_NAMES]
    return None in unstacked and len(unstacked) > 2


def _one_per_dim(names: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The names with `None` for each dimension for which `...` stands."""
    if ... not in names:
        return names
    start = names.index(...)
    before = names[:start]
    after = names[start + 1 :]
    open_count = rank - len(before) - len(after)
    return before + (None,) * open_count + after


def _forbids_sharding(name: object) -> bool:
    # An atomic name has units, such as the heads in `heads * head_dim`.
    return isinstance(name, Atomic) or name in _NAMES


def _stacked_dims(arrays: Mapping[int, NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for stacked layers: the first one
    of all arrays below a part such as `layers`, if no number follows and their sizes
    are equal.
    """
    positions_below: dict[str, list[int]] = {}
    for position, array in arrays.items():
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


def _expert_dims(arrays: Mapping[int, NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for experts: in an array of three
    or more dimensions below `experts`, or beside a router for as many experts, the one
    before the last two.
    """
    counts_beside: dict[str, set[int]] = {}
    for array in arrays.values():
        parts = array.path.split("/")
        for depth, part in enumerate(parts):
            if part in _ROUTERS:
                layer = "/".join(parts[:depth])
                counts_beside.setdefault(layer, set()).update(array.shape[-2:])

    for position, array in arrays.items():
        rank = len(array.shape)
        if rank < 3:
            continue
        parts = array.path.split("/")
        layers = ["/".join(parts[:depth]) for depth in range(len(parts))]
        counts = set().union(*[counts_beside.get(layer, ()) for layer in layers])
        if _EXPERTS.isdisjoint(parts) and array.shape[-3] not in counts:
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


def _add_head_dims(whole: WholeDims, arrays: Mapping[int, NamedShape]) -> None:
    """Adds the dimensions with attention heads, or with the elements of a head, of
    arrays without names.
    """
    # By the path of the layer, and by the path within a projection.
    layers: dict[tuple[tuple[str, ...], str], list[_Projection]] = {}
    for position, array in arrays.items():
        parts = tuple(re.split("[/.]", array.path))
        layer = None
        role = ""
        for depth, part in enumerate(parts):
            suffix = "/".join(parts[depth + 1 :])
            if part in FUSED and array.shape:
                dim = fused_dimension(part, suffix, array.shape)
                if dim is not None:
                    whole.dims[position].add(dim)
                    # A shard would hold parts of different projections.
                    whole.heads[position] = _Heads(dim, unit=array.shape[dim])
            if part in ROLES:
                layer = (parts[:depth], suffix)
                role = ROLES[part]
        if layer is not None:
            layers.setdefault(layer, []).append(_Projection(role, position))

    for (_, suffix), projections in layers.items():
        _add_head_dims_of_layer(whole, suffix, projections)


def _add_head_dims_of_layer(
    whole: WholeDims,
    suffix: str,
    projections: Sequence[_Projection],
) -> None:
    """As `_add_head_dims`, for the projections of one layer. Their paths end in
    `suffix`.
    """
    shapes = {
        projection.role: whole.arrays[projection.position].shape
        for projection in projections
    }
    inputs = [shapes[role] for role in "qkv" if role in shapes]
    if len(inputs) < 2:
        return
    joined_dim = head_dimension(suffix, inputs)
    if joined_dim is None and not suffix and len(set(inputs)) == 1:
        # Weights without a name of their own are mostly those of `x @ w`.
        joined_dim = len(inputs[0]) - 1
    for role, position in projections:
        shape = whole.arrays[position].shape
        separate_dims = _separate_dims(role, shape, shapes)
        if separate_dims:
            whole.dims[position].update(separate_dims)
            whole.heads[position] = _Heads(separate_dims[0], unit=1)
        elif joined_dim is not None and len(shape) == len(inputs[0]):
            if role != "o":
                whole.dims[position].add(joined_dim)
                whole.heads[position] = _Heads(joined_dim, unit=None)
                continue
            # The weights of the output have the opposite order.
            dim = 2 * len(shape) - 3 - joined_dim
            if dim < len(shape):
                if dim >= 0:
                    whole.heads[position] = _Heads(dim, unit=None)
                output = _OutputDims(
                    position=position,
                    heads=dim if dim >= 0 else None,
                    size=shape[dim],
                    results=joined_dim,
                )
                whole.outputs.append(output)


def _is_between_heads(size: int, unit: int | None, shards: int) -> bool:
    """Whether `shards` equal shards of a dimension of heads have whole heads, of `unit`
    elements each.
    """
    if unit is None:
        return _has_whole_heads(size, shards)
    return size % (shards * unit) == 0


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
