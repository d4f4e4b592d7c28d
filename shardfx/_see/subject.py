"""What is checked: leaves and their rows, the rules that made them, and how to try other rules."""

import collections
import dataclasses
import functools as ft
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._ground.spec import array_bytes
from .._ground.text import between_numbers
from .._ground.tree import Flat
from .._plan.content import Content, Group
from .._plan.leaf import Row
from .._plan.planner import drafted
from .._plan.replanning import refined
from .._plan.shard_plan import ShardPlan
from .._rules.axis_rules import AxisRules
from .._rules.path_rules import PathRules, compiled, first_match
from .._rules.strategies import Optional, optional
from ..topology._mesh import MeshSpec
from .code import code_of, regex_of


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What `lint` looks at. `mesh` is the given one, that of `content` may be refined.

    `flat` and `given` (the names of each leaf) are `None` where a ready plan is checked, which has no rules by path.
    """

    content: Content
    mesh: MeshSpec
    flat: Flat | None
    given: Sequence[Any] | None
    paths: PathRules | None
    axes: AxisRules | None
    mode: str | None
    min_bytes: int
    strict: bool
    refine: bool

    @property
    def rows(self) -> Sequence[Row]:
        return self.content.rows

    @ft.cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        return () if self.paths is None else compiled(self.paths)

    def first_rules(self, rules: PathRules | None) -> dict[int, None]:
        """The numbers of those of `rules` that decide about a leaf."""
        assert self.flat is not None and self.given is not None
        patterns = () if rules is None else compiled(rules)
        columns = zip(self.flat.paths, self.given, self.flat.is_array, strict=True)
        found = [first_match(path, patterns) for path, names, shaped in columns if shaped and names is None]
        return dict.fromkeys(number for number in found if number is not None)

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.content.groups

    @ft.cached_property
    def uses(self) -> tuple[int, ...]:
        """How many arrays have each row."""
        counts = collections.Counter(self.content.index)
        return tuple(counts[number] for number in range(len(self.rows)))

    def groups_of(self, numbers: Sequence[int]) -> Iterator[Group]:
        """The groups whose row has one of these numbers."""
        yield from (group for number in numbers for group in self._by_number[number])

    @ft.cached_property
    def _by_number(self) -> dict[int, list[Group]]:
        found: dict[int, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.number, []).append(group)
        return found

    def excess(self, group: Group) -> int:
        """How many bytes each device holds of these leaves beyond an even share of them."""
        whole, share = self.content.byte_counts[group.number]
        return (share - -(-whole // self.mesh.size)) * len(group.paths)

    def lost(self, shape: tuple[int, ...], dtype: Any, count: int) -> int:
        """How many bytes each device holds of replicated arrays beyond an even share of them."""
        whole = array_bytes(shape, dtype)
        return (whole - -(-whole // self.mesh.size)) * count

    @ft.cached_property
    def _alike(self) -> collections.Counter[tuple[str, ...]]:
        """How many paths there are that differ in numbers only."""
        return collections.Counter(map(between_numbers, self.content.skeleton.paths))

    def regex(self, paths: Sequence[str]) -> str:
        return regex_of(paths, self._alike)

    def row_with(
        self, path: str, *, paths: PathRules | None = None, axes: AxisRules | None = None, names: Any = None
    ) -> Row | None:
        """The row that the leaf at `path` would have under other rules or names; `None` if it could not be planned."""
        assert self.flat is not None and self.given is not None
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
        """The same leaves where mesh axes are split as `plan(..., refine=True)` does."""
        return refined(ShardPlan(self.content), self.min_bytes).content

    def prepended(self, path: str, target: Any) -> PathRules:
        """The path rules after one for this leaf alone."""
        return (self.paths or PathRules(())).prepend([(f"^{re.escape(path)}$", target)])

    def is_named(self, path: str) -> bool:
        """Whether the leaf at `path` has names of its own, which win over path rules."""
        if self.given is None or self.flat is None:
            return False
        return self.given[self._places[path]] is not None

    def ruled(self, paths: Sequence[str], target: Any, *, last: bool = False) -> str:
        """Code that gives leaves without names of their own this target, before all rules or after them.

        A rule that is for these leaves alone gets the target itself: it would have nothing left to do.
        """
        rule = f"({self.regex(paths)!r}, {code_of(target)})"
        alone = self._rule_for(paths)
        if alone is not None and self.paths is not None:
            was = self.paths.rules[alone][1]
            return (
                f"paths = paths.replace({alone}, {code_of(optional(target) if isinstance(was, Optional) else target)})"
            )
        if self.flat is None:
            return f"tree = tree.replace({self.regex(paths)!r}, {code_of(target)})"
        if self.paths is None:
            return f"paths = PathRules([{rule}])"
        return f"paths = paths.{'extend' if last else 'prepend'}([{rule}])"

    def _rule_for(self, paths: Sequence[str]) -> int | None:
        """The number of the rule that decides about these leaves and no others."""
        if self.flat is None or self.given is None:
            return None
        numbers = {self._deciding.get(path) for path in paths}
        if len(numbers) > 1 or None in numbers:
            return None
        (number,) = numbers
        return number if self._decided[number] == len(set(paths)) else None

    def are_wider(self, paths: Sequence[str]) -> bool:
        """Whether one of the rules that decide about these leaves decides about others too."""
        own = dict.fromkeys(paths)
        numbers = dict.fromkeys(self._deciding[path] for path in paths if path in self._deciding)
        return any(number in numbers and path not in own for path, number in self._deciding.items())

    @ft.cached_property
    def _deciding(self) -> dict[str, int | None]:
        """By the path of each leaf without names of its own, the number of the rule that decides about it."""
        assert self.flat is not None and self.given is not None
        columns = zip(self.flat.paths, self.given, self.flat.is_array, strict=True)
        return {path: first_match(path, self.patterns) for path, names, shaped in columns if shaped and names is None}

    @ft.cached_property
    def _decided(self) -> collections.Counter[int | None]:
        return collections.Counter(self._deciding.values())

    @ft.cached_property
    def _places(self) -> dict[str, int]:
        return {} if self.flat is None else {path: at for at, path in enumerate(self.flat.paths)}

    def renamed(self, paths: Sequence[str], names: Any) -> str:
        """Code that gives leaves other names."""
        return f"names = auto.renamed(tree, {{{self.regex(paths)!r}: {code_of(names)}}}, names=names)"


def asked_by(group: Group) -> str:
    """What asked for the sharding of these leaves."""
    return "its names" if group.row.rule == "names" else str(group.row.rule)
