"""The dimensions that a plan without rules does not shard: heads, experts and stacked
layers. Tensor parallelism shards between heads and between experts.

Names that the caller or a module declares decide. Arrays without names are judged by
the usual names in their paths, as [`shardfx.lint`][] does.
"""

import dataclasses
import itertools as it
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._ground.errors import SpecError
from .._plan import FUSED, ROLES, fused_dimension, head_dimension
from .._rules import Atomic, one_per_dim


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


class _Heads(NamedTuple):
    """A dimension of attention heads, and the number of elements of each head; `None`
    if that is not known.
    """

    dim: int
    unit: int | None


@dataclasses.dataclass(slots=True)
class ShardableArray:
    """An array of a tree, with the dimensions that must not be sharded. `note_whole_dims`
    fills the fields that have a default.

    - `names`: its logical names, or `None`.
    - `stacked`: the number of leading dimensions that modules declare as stacked layers.
    - `whole`: the dimensions that FSDP must not shard. Tensor parallelism may shard one
      of them: `heads` or `experts`, between its parts.
    - `results`: for the weights of an attention layer's output, or their bias, the
      dimension of the results. FSDP must not shard it where each shard of `output_size`,
      the elements of all heads, has whole heads: it would shard all activations, in
      place of the batch. Else it must not shard `heads`; a bias has none.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Any, ...] | None = None
    stacked: int = 0
    whole: set[int] = dataclasses.field(default_factory=set)
    heads: _Heads | None = None
    experts: int | None = None
    results: int | None = None
    output_size: int = 0

    def whole_by_fsdp(self, shards: int) -> set[int]:
        """The dimensions that FSDP over `shards` devices must not shard: those of
        `whole`, and of an attention layer's output also the one of its results or of
        its heads. `output_size` is the number of elements of all heads.
        """
        if self.results is None:
            return self.whole
        if _has_whole_heads(self.output_size, shards):
            return self.whole | {self.results}
        if self.heads is not None:
            return self.whole | {self.heads.dim}
        return self.whole

    def whole_by_tensor(self, shards: int) -> set[int]:
        """The dimensions that tensor parallelism over `shards` devices must not shard:
        all but the heads or the experts, if the array has them. All, if a shard would
        split a head.
        """
        dims = set(range(len(self.shape)))
        if self.experts is not None:
            is_even = self.shape[self.experts] % shards == 0
            return dims - {self.experts} if is_even else self.whole
        if self.heads is None:
            return self.whole
        size = self.shape[self.heads.dim]
        if _is_between_heads(size, self.heads.unit, shards):
            return dims - {self.heads.dim}
        return dims

    @property
    def long_side(self) -> int:
        """The number of its elements for each element of the activations that tensor
        parallelism reduces: those of its longest dimension, times the experts.
        """
        sizes = list(self.shape)
        count = 1
        if self.experts is not None:
            count = sizes.pop(self.experts)
        return max(1, count * max(sizes, default=1))


def note_whole_dims(arrays: Sequence[ShardableArray]) -> None:
    """Fills the fields of the arrays of a tree that say which dimensions must not be
    sharded. Raises `SpecError` for names that do not fit a shape.
    """
    unnamed = []
    for array in arrays:
        array.whole.update(range(array.stacked))
        if array.names is None:
            unnamed.append(array)
        else:
            _note_names(array, array.names)
    _note_stacks(unnamed)
    _note_experts(unnamed)
    _note_heads(unnamed)


def _note_names(array: ShardableArray, names: tuple[Any, ...]) -> None:
    """Notes the dimensions of an array that its logical names forbid to shard, and which
    of them hold heads or experts. `_Heads` has the dimension of heads, and the elements
    of one head in it, `None` if that is not known.
    """
    try:
        names = one_per_dim(names, array.shape)
    except SpecError as error:
        raise SpecError(f"leaf `{array.path}`: {error}") from None
    for dim, name in enumerate(names):
        parts = name if isinstance(name, tuple) else (name,)
        if not any(map(_forbids_sharding, parts)):
            continue
        array.whole.add(dim)
        if isinstance(name, Atomic) and isinstance(name.unit, int):
            array.heads = _Heads(dim, name.unit)
        elif name in _HEAD_NAMES:
            unit = 1 if _has_head_elements(names[array.stacked :]) else None
            array.heads = _Heads(dim, unit)
        elif name in _EXPERT_NAMES:
            array.experts = dim


def _has_head_elements(names: tuple[Any, ...]) -> bool:
    """Whether an array has a dimension for the elements of a head, beside the one for
    the heads. It may have no name, where the array has one for its inputs or results
    too. If there is none, the dimension of the heads may hold all their elements.
    """
    if not _HEAD_ELEMENT_NAMES.isdisjoint(names):
        return True
    unstacked = [name for name in names if name not in _STACK_NAMES]
    return None in unstacked and len(unstacked) > 2


def _forbids_sharding(name: object) -> bool:
    # An atomic name has units, such as the heads in `heads * head_dim`.
    return isinstance(name, Atomic) or name in _NAMES


def _note_stacks(arrays: Sequence[ShardableArray]) -> None:
    """Notes the dimension of stacked layers: the first one of all arrays below a part
    such as `layers`, if no number follows, their sizes are equal, and they have several
    ranks.
    """
    stacks: dict[str, list[ShardableArray]] = {}
    for array in arrays:
        parts = array.path.split("/")
        for depth, (part, following) in enumerate(it.pairwise(parts), 1):
            if _STACK.fullmatch(part) and not following.isdigit():
                prefix = "/".join(parts[:depth])
                stacks.setdefault(prefix, []).append(array)

    for stack in stacks.values():
        first_sizes = {array.shape[:1] for array in stack}
        ranks = {len(array.shape) for array in stack}
        if len(first_sizes) == 1 and () not in first_sizes and len(ranks) > 1:
            for array in stack:
                array.whole.add(0)


def _note_experts(arrays: Sequence[ShardableArray]) -> None:
    """Notes the dimension of experts: in an array of three or more dimensions below
    `experts`, or beside a router for as many experts, the one before the last two.
    """
    counts_of_layers: dict[str, set[int]] = {}
    for array in arrays:
        parts = array.path.split("/")
        for depth, part in enumerate(parts):
            if part in _ROUTERS:
                layer = "/".join(parts[:depth])
                counts_of_layers.setdefault(layer, set()).update(array.shape[-2:])

    for array in arrays:
        dim = len(array.shape) - 3
        if dim < 0:
            continue
        parts = array.path.split("/")
        layers = ["/".join(parts[:depth]) for depth in range(len(parts))]
        counts = set().union(*[counts_of_layers.get(layer, ()) for layer in layers])
        # A number after `experts` is that of one expert.
        is_one_expert = any(
            part in _EXPERTS and following.isdigit()
            for part, following in it.pairwise(parts)
        )
        are_experts = array.shape[dim] in counts or not _EXPERTS.isdisjoint(parts)
        if are_experts and not is_one_expert:
            array.whole.add(dim)
            array.experts = dim


class _Projection(NamedTuple):
    """An array of an attention layer, and its role, such as "q"."""

    role: str
    array: ShardableArray


def _note_heads(arrays: Sequence[ShardableArray]) -> None:
    """Notes the dimensions with attention heads, or with the elements of a head.

    `ROLES` has the role of a projection ("q", "k", "v" or "o") by the part of a path
    that names it, and `FUSED` the parts that name several projections in one array.
    """
    # By the path of the layer, and by the path within a projection.
    layers: dict[tuple[tuple[str, ...], str], list[_Projection]] = {}
    for array in arrays:
        parts = tuple(re.split("[/.]", array.path))
        layer = None
        role = ""
        for depth, part in enumerate(parts):
            suffix = "/".join(parts[depth + 1 :])
            if part in FUSED:
                dim = fused_dimension(part, suffix, array.shape)
                if dim is not None:
                    array.whole.add(dim)
                    # A shard would hold parts of different projections.
                    array.heads = _Heads(dim, unit=array.shape[dim])
            if part in ROLES:
                layer = (parts[:depth], suffix)
                role = ROLES[part]
        if layer is not None:
            layers.setdefault(layer, []).append(_Projection(role, array))

    for (_, suffix), projections in layers.items():
        _note_heads_of_layer(suffix, projections)


def _note_heads_of_layer(suffix: str, projections: Sequence[_Projection]) -> None:
    """As `_note_heads`, for the projections of one layer, whose paths end in `suffix`.
    `inputs` are the shapes of the query, key and value weights, and `joined_dim` is the
    dimension in which their heads lie one after the other.
    """
    shapes = {role: array.shape for role, array in projections}
    inputs = [shapes[role] for role in "qkv" if role in shapes]
    if len(inputs) < 2 or not inputs[0]:
        return
    joined_dim = head_dimension(suffix, inputs)
    if joined_dim is None and not suffix and len(set(inputs)) == 1:
        # Weights without a name of their own are mostly those of `x @ w`.
        joined_dim = len(inputs[0]) - 1
    for role, array in projections:
        rank = len(array.shape)
        separate_dims = _separate_dims(role, array.shape, shapes)
        if separate_dims:
            array.whole.update(separate_dims)
            array.heads = _Heads(separate_dims[0], unit=1)
        elif joined_dim is None or rank != len(inputs[0]):
            continue
        elif role != "o":
            array.whole.add(joined_dim)
            array.heads = _Heads(joined_dim, unit=None)
        else:
            # The weights of the output have the opposite order; a bias has no heads.
            dim = 2 * rank - 3 - joined_dim
            if dim >= rank:
                continue
            if dim >= 0:
                array.heads = _Heads(dim, unit=None)
            array.results = joined_dim
            array.output_size = array.shape[dim]


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
    in `[embed, heads, head_dim]`; else none. `shapes` has the shape of each role. A
    role is "q", "k", "v" or "o", the projection of queries, keys, values or the output.
    """
    if "q" not in shapes or "o" not in shapes:
        return ()
    # An array of fewer dimensions is a scale or a bias.
    least_rank = 3 if role == "o" else 2
    if len(shape) < least_rank:
        return ()
    output = shapes["o"]
    if len(output) < _MOST_HEAD_DIMS or shapes["q"][-2:] != output[-3:-1]:
        return ()
    rank = len(shape)
    if role == "o":
        return (rank - 3, rank - 2)
    return (rank - 2, rank - 1)
