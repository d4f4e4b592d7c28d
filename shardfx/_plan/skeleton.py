"""A planned tree without its arrays: where its leaves are, and what puts them together again."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax

from . import codec


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Skeleton:
    """Where the leaves of a planned tree are.

    **Arguments:**

    - `paths`: of the leaves, in the order in which the plan lists them.
    - `treedef`: the tree's structure.
    - `order`: per leaf of `treedef` its place in `paths`; `None` where both have one order. A plan that was read back
        lists its leaves as they were planned, while JAX sorts the keys of the dicts that it is read into.
    - `structure`: the tree's structure as a plan's JSON has it; `None` if it is to be made from `treedef`.
    """

    paths: tuple[str, ...]
    treedef: Any
    order: Sequence[int] | None = None
    structure: Any = None

    @ft.cached_property
    def encoded(self) -> Any:
        """The tree's structure as a plan's JSON has it."""
        return codec.encode_structure(self.treedef) if self.structure is None else self.structure

    @property
    def numbered(self) -> Any:
        """The tree with the number of each leaf, in the tree's order."""
        return jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))

    def in_order(self, column: Sequence[Any]) -> Sequence[Any]:
        """What belongs to the leaves, brought from the order of `paths` into that of the tree."""
        return column if self.order is None else [column[i] for i in self.order]

    def filled(self, column: Sequence[Any]) -> Any:
        """The tree with these leaves, which are in the order of `paths`."""
        return jax.tree.unflatten(self.treedef, self.in_order(column))
