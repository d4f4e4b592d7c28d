"""The dimensions that a plan without rules does not shard: heads, experts and stacked
layers.

Names that the caller or a module declares decide. Arrays without names are judged by
the usual names in their paths, as [`shardfx.lint`][] does.
"""

import itertools as it
import re
from collections.abc import Iterable, Sequence
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


def whole_dims(arrays: Sequence[NamedShape]) -> list[tuple[int, ...]]:
    """For each array, the dimensions that must not be sharded, in ascending order."""
    dims = [set(range(array.stacked)) for array in arrays]
    is_open = []
    for number, array in enumerate(arrays):
        if array.names is None:
            is_open.append(number)
        else:
            dims[number].update(_named_dims(array.names, len(array.shape)))

    unnamed = [arrays[number] for number in is_open]
    for find in (_stacked_dims, _expert_dims, _head_dims):
        for position, dim in find(unnamed):
            dims[is_open[position]].add(dim)
    return [tuple(sorted(of_array)) for of_array in dims]


def _named_dims(names: tuple[Any, ...], rank: int) -> Iterable[int]:
    """The dimensions whose logical name says that they are whole. `...` stands for
    dimensions without a name.
    """
    if ... in names:
        start = names.index(...)
        after = len(names) - start - 1
        names = (*names[:start], *[None] * (rank - start - after), *names[start + 1 :])
    for dim, name in enumerate(names[:rank]):
        parts = name if isinstance(name, tuple) else (name,)
        # An atomic name has units, such as the heads in `heads * head_dim`.
        if any(isinstance(part, Atomic) or part in _NAMES for part in parts):
            yield dim


def _stacked_dims(arrays: Sequence[NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for stacked layers: the first one
    of all arrays below a part such as `layers`, if no number follows and their sizes
    are equal.
    """
    below: dict[str, list[int]] = {}
    for position, array in enumerate(arrays):
        parts = array.path.split("/")
        for depth, (part, after) in enumerate(it.pairwise(parts), 1):
            if _STACK.fullmatch(part) and not after.isdigit():
                below.setdefault("/".join(parts[:depth]), []).append(position)
    for positions in below.values():
        sizes = {arrays[position].shape[:1] for position in positions}
        ranks = {len(arrays[position].shape) for position in positions}
        if len(sizes) == 1 and () not in sizes and len(ranks) > 1:
            yield from ((position, 0) for position in positions)


def _expert_dims(arrays: Sequence[NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and its dimension for experts: in an array of three
    or more dimensions below `experts`, the one before the last two.
    """
    for position, array in enumerate(arrays):
        parts = array.path.split("/")
        has_part = not _EXPERTS.isdisjoint(parts)
        has_number = any(
            part in _EXPERTS and following.isdigit()
            for part, following in zip(parts, parts[1:], strict=False)
        )
        if has_part and not has_number and len(array.shape) >= 3:
            yield position, len(array.shape) - 3


def _head_dims(arrays: Sequence[NamedShape]) -> Iterable[tuple[int, int]]:
    """Pairs of an array's position and a dimension with attention heads, or with the
    elements of a head.
    """
    layers: dict[tuple[tuple[str, ...], str], list[tuple[str, int]]] = {}
    for position, array in enumerate(arrays):
        parts = tuple(re.split("[/.]", array.path))
        rank = len(array.shape)
        last_role = None
        for depth, part in enumerate(parts):
            suffix = "/".join(parts[depth + 1 :])
            if part in FUSED and rank:
                dim = fused_dimension(part, suffix, array.shape)
                if dim is not None:
                    yield position, dim
            if part in ROLES:
                last_role = (parts[:depth], suffix, ROLES[part])
        if last_role is not None:
            prefix, suffix, role = last_role
            layers.setdefault((prefix, suffix), []).append((role, position))

    for (_, suffix), members in layers.items():
        roles = dict(members)
        inputs = [arrays[roles[role]].shape for role in "qkv" if role in roles]
        if len(inputs) < 2:
            continue
        dim = head_dimension(suffix, inputs)
        for role, position in members:
            shape = arrays[position].shape
            separate = _separate_dims(role, shape, roles, arrays)
            if separate:
                yield from ((position, each) for each in separate)
            elif dim is not None and len(shape) == len(inputs[0]):
                # The weights of the output have the opposite order.
                opposite = 2 * len(shape) - 3 - dim
                head_dim = opposite if role == "o" else dim
                if 0 <= head_dim < len(shape):
                    yield position, head_dim


def _separate_dims(
    role: str,
    shape: tuple[int, ...],
    roles: dict[str, int],
    arrays: Sequence[NamedShape],
) -> tuple[int, ...]:
    """The dimensions of the heads and of their elements, if each has one of its own, as
    in `[embed, heads, head_dim]`; else none.
    """
    if "q" not in roles or "o" not in roles:
        return ()
    query = arrays[roles["q"]].shape
    output = arrays[roles["o"]].shape
    if len(output) < _MOST_HEAD_DIMS or query[-2:] != output[-3:-1]:
        return ()
    rank = len(shape)
    if role == "o":
        return (rank - 3, rank - 2)
    return (rank - 2, rank - 1)
