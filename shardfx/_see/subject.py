"""The input of every check: leaves and their rows, the rules that made them, and a way to try other rules."""

import collections
import dataclasses
import functools as ft
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._ground.spec import UNCONSTRAINED, array_bytes, entries_of
from .._ground.text import between_numbers, together
from .._ground.tree import Flat
from .._plan import Content, Group, Row, ShardPlan, drafted, refined
from .._rules import (
    Atomic,
    AxisRules,
    Optional,
    PathRules,
    Pipeline,
    Replicate,
    Strategy,
    compiled,
    first_match,
    optional,
)
from ..topology import MeshSpec


def code_of(target: object) -> str | None:
    """The target of a rule, or a value in one, as code; `None` for a callable, which has none."""
    if isinstance(target, PartitionSpec):
        return f"PartitionSpec({', '.join(map(_value, entries_of(target)))})"
    if isinstance(target, Strategy):
        return target.code
    if isinstance(target, Replicate):
        return "replicate"
    if isinstance(target, Atomic | Optional):
        inner = code_of(target.target)
        last = f", {target.unit!r}" if isinstance(target, Atomic) else ""
        return None if inner is None else f"{type(target).__name__.lower()}({inner}{last})"
    if isinstance(target, Pipeline):
        steps = [code_of(step) for step in target.steps]
        return None if None in steps else " | ".join(map(str, steps))
    return None if callable(target) and target is not UNCONSTRAINED else _value(target)


def _value(value: object) -> str:
    if value is UNCONSTRAINED:
        return "PartitionSpec.UNCONSTRAINED"
    if value is ...:
        return "..."
    if isinstance(value, Atomic):
        return f"atomic({_value(value.target)}, {value.unit!r})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def regex_of(paths: Sequence[str], alike: Mapping[tuple[str, ...], int]) -> str:
    r"""A regex that matches these paths and no others, with `\d+` for their numbers if every path of their form is
    among them.

    `alike` is the number of paths with the same text between their numbers.
    """
    found = []
    for parts, own in together(paths, between_numbers).items():
        if alike[parts] == len(own):
            found.append(r"\d+".join(map(re.escape, parts)))
        else:
            found += map(re.escape, dict.fromkeys(own))
    return f"^{found[0]}$" if len(found) == 1 else f"^(?:{'|'.join(found)})$"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """The input of `lint`'s checks. `plain` is planned on the given `mesh`; `content` may be on a refined mesh.

    A finished plan, `is_plan`, has no rules by path; `flat` and `given`, the names of each leaf, are empty then.
    """

    content: Content
    plain: Content
    mesh: MeshSpec
    flat: Flat
    given: Sequence[Any]
    paths: PathRules | None
    axes: AxisRules | None
    mode: str | None
    min_bytes: int
    strict: bool
    refine: bool
    is_plan: bool = False

    @ft.cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        return () if self.paths is None else compiled(self.paths)

    def groups_of(self, numbers: Sequence[int]) -> Iterator[Group]:
        """The groups whose row has one of these numbers."""
        yield from (group for number in numbers for group in self._by_number[number])

    @ft.cached_property
    def _by_number(self) -> dict[int, list[Group]]:
        return together(self.content.groups, lambda group: group.number)

    def excess(self, group: Group) -> int:
        """Bytes that each device holds of these leaves beyond an even distribution over all devices."""
        whole, share = self.content.byte_counts[group.number]
        return (share - -(-whole // self.mesh.size)) * len(group.paths)

    def lost(self, shape: tuple[int, ...], dtype: object) -> int:
        """Bytes of a replicated array that each device holds beyond an even distribution over all devices."""
        whole = array_bytes(shape, dtype)
        return whole - -(-whole // self.mesh.size)

    def plain_row(self, group: Group) -> Row:
        """The row of these leaves on the given mesh. Fixes are written in this mesh's axes."""
        return self.plain.rows[self.plain.index[self._places[group.paths[0]]]]

    @ft.cached_property
    def _alike(self) -> collections.Counter[tuple[str, ...]]:
        """For each form of path, that is the text between its numbers, the number of paths."""
        return collections.Counter(map(between_numbers, self.content.skeleton.paths))

    def regex(self, paths: Sequence[str]) -> str:
        return regex_of(paths, self._alike)

    def row_with(
        self, path: str, *, paths: PathRules | None = None, axes: AxisRules | None = None, names: object = None
    ) -> Row | None:
        """The row of the leaf at `path` under other rules or names; `None` if the leaf could not be planned so."""
        at = self._places[path]
        leaf = self.flat.leaves[at]
        columns = (self.flat.templates[at],), (None,), (self.flat.stacked[at],)
        flat = Flat([leaf], jax.tree.structure(0), (path,), *columns, [True])
        given = [self.given[at] if names is None else names]
        rules = (paths or self.paths, axes or self.axes)
        found = drafted(flat, given, self.mesh, *rules, self.mode, self.min_bytes, ())
        return found.rows[0] if not found.errors else None

    @ft.cached_property
    def refined(self) -> Content:
        """The same leaves on a mesh whose axes are split as `plan(..., refine=True)` does."""
        return refined(ShardPlan(self.content), self.min_bytes).content

    def is_named(self, path: str) -> bool:
        """Whether the leaf at `path` has names of its own, which take precedence over path rules."""
        return not self.is_plan and self.given[self._places[path]] is not None

    def ruled(self, paths: Sequence[str], target: object, *, last: bool = False) -> str:
        """Code that gives leaves without names this target, by a rule before all others or after them.

        If one rule decides about these leaves only, its target is replaced: beside a new rule it would decide about
        nothing.
        """
        ((number, wide), *others) = self.rules_for(paths).items()
        if self.paths is not None and number is not None and not wide and not others:
            is_optional = isinstance(self.paths.rules[number][1], Optional)
            return f"paths = paths.replace({number}, {code_of(optional(target) if is_optional else target)})"
        rule = f"{self.regex(paths)!r}, {code_of(target)}"
        if self.is_plan:
            return f"tree = tree.replace({rule})"
        if self.paths is None:
            return f"paths = PathRules([({rule})])"
        return f"paths = paths.{'extend' if last else 'prepend'}([({rule})])"

    def rules_for(self, paths: Sequence[str]) -> dict[int | None, bool]:
        """The numbers of the rules that decide about these leaves, and whether each rule decides about other leaves
        too.

        `None` stands for the default of leaves without a rule.
        """
        own = collections.Counter(self._deciding.get(path) for path in dict.fromkeys(paths))
        return {number: self._decided[number] > count for number, count in own.items()}

    @ft.cached_property
    def _deciding(self) -> dict[str, int | None]:
        """For the path of each leaf without names, the number of the rule that decides about it."""
        columns = zip(self.flat.paths, self.given, self.flat.is_array, strict=True)
        return {path: first_match(path, self.patterns) for path, names, shaped in columns if shaped and names is None}

    @ft.cached_property
    def _decided(self) -> collections.Counter[int | None]:
        return collections.Counter(self._deciding.values())

    @ft.cached_property
    def _places(self) -> dict[str, int]:
        return {path: at for at, path in enumerate(self.content.skeleton.paths)}

    def mended(self, paths: Sequence[str], names: object, target: object) -> str:
        """Code that gives leaves with names these names, and leaves without names the target."""
        return self.renamed(paths, names) if self.is_named(paths[0]) else self.ruled(paths, target)

    def renamed(self, paths: Sequence[str], names: object) -> str:
        """Code that gives leaves other names."""
        return f"names = auto.renamed(tree, {{{self.regex(paths)!r}: {code_of(names)}}}, names=names)"


def asked_by(group: Group) -> str:
    """The rule that asked for the sharding of these leaves, or "its names"."""
    return "its names" if group.row.rule == "names" else str(group.row.rule)
