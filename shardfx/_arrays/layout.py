"""Where the arrays of a call are among all its leaves, for one structure of the arguments."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from .shallow import Form
from .static import Recent, Static, data_needs_marks, is_float, is_traced, marker


class Layout:
    """Where arrays and static leaves are among the leaves of all arguments, for one structure of these."""

    def __init__(
        self,
        treedef: Any,
        kinds: tuple[type, ...],
        groups: list[list[int]],
        with_entry: Sequence[int],
        donated: Sequence[int],
        form: Form | None,
    ):
        self.treedef, self.given, self.groups, self.form = treedef, kinds, groups, form
        self.kinds = tuple([None if is_traced(kind) else kind for kind in kinds])
        self.lists = _taken(groups)
        self.statics = [at for at, kind in enumerate(self.kinds) if kind is not None]
        self.has_marks = any(marker(kinds[at]) is not None for at in self.statics)
        self.has_floats = any(is_float(kinds[at]) for at in self.statics)
        self.has_data = data_needs_marks(treedef)
        self.recent = Recent(treedef, self.has_data)
        # Where there are arrays alone, all calls have the same static part.
        self.alone = None if self.statics or self.has_data else Static(treedef, self, ())
        # Whether all arrays lie on the devices of their entries is looked at once; at every call the first of each
        # entry is, since JAX does not.
        self.is_checked = False
        placed = [[at for at in group if _is_placed(kinds[at])] for group in groups]
        self.watched = [(slot, group[0]) for slot, group in enumerate(placed) if group and slot in with_entry]
        # What is donated is gone as a whole, mostly: where nothing is at stake the first of each list tells.
        self.donates = any(placed[slot] for slot in donated)
        self.placed = [at for group in placed for at in (group if self.donates else group[:1])]

    def joined(self, static: Static, lists: tuple[Sequence[Any], ...]) -> Any:
        leaves: list[Any] = [None] * len(self.kinds)
        for at, value in zip(self.statics, static.values, strict=True):
            leaves[at] = value
        for group, arrays in zip(self.groups, lists, strict=True):
            for at, array in zip(group, arrays, strict=True):
                leaves[at] = array
        return jax.tree.unflatten(static.treedef, leaves)


def _is_placed(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def _taken(groups: list[list[int]]) -> Callable[[list[Any]], Sequence[Sequence[Any]]]:
    """Takes lists of what is at the positions of each group out of a list."""
    getters = [_getter(positions) for positions in groups]
    slices = [getter for getter in getters if isinstance(getter, slice)]
    if len(slices) == len(getters) > 1:
        return operator.itemgetter(*slices)
    parts = [operator.itemgetter(getter) if isinstance(getter, slice) else getter for getter in getters]
    return lambda leaves: [part(leaves) for part in parts]


def _getter(positions: list[int]) -> slice | operator.itemgetter:
    if len(positions) > 1 and positions[-1] - positions[0] + 1 > len(positions):
        return operator.itemgetter(*positions)
    start = positions[0] if positions else 0
    return slice(start, start + len(positions))
