"""`Subject`, the input of every check: the plans of the leaves and the rules that made
them. It also writes the code of fixes. A `Group` is arrays that are planned alike and
whose paths differ only in numbers.
"""

import collections
import dataclasses
import functools as ft
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.reason import Code, Reason
from .._ground.spec import UNCONSTRAINED, array_bytes, entries_of
from .._ground.text import between_numbers, together
from .._ground.tree import Flat
from .._plan import Content, Group, LeafPlan, Row, refined
from .._rules import (
    Atomic,
    AxisRules,
    Optional,
    PathRules,
    Pipeline,
    Strategy,
    compiled,
    first_match,
    fsdp,
    optional,
    replicate,
)


def code_of(value: object) -> str:
    """The Python code of a rule's target, or of a part of it. For a callable it is the
    `repr`.
    """
    match value:
        case PartitionSpec():
            return f"P({', '.join(map(code_of, entries_of(value)))})"
        case Strategy():
            return value.code
        case Atomic():
            return f"atomic({code_of(value.target)}, {value.unit!r})"
        case Optional():
            return f"optional({code_of(value.target)})"
        case Pipeline():
            return " | ".join(map(code_of, value.steps))
        case tuple():
            inner = ", ".join(map(code_of, value))
            if len(value) == 1:
                return f"({inner},)"
            return f"({inner})"
    if value is UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    if value is ...:
        return "..."
    return repr(value)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """The input of a check: the plan in `content`, and the arguments of `lint`. Its
    methods write the code of fixes.

    `flat` has the leaves of the tree, and `leaf_names` their logical names. For a
    finished plan, `is_plan` is true, `paths` is `None`, and `flat` and `leaf_names` are
    empty.
    """

    content: Content
    flat: Flat
    leaf_names: Sequence[Any]
    paths: PathRules | None
    axes: AxisRules | None
    mode: str | None
    min_bytes: int
    strict: bool
    refine: bool
    is_plan: bool = False

    @ft.cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        if self.paths is None:
            return ()
        return compiled(self.paths)

    @ft.cached_property
    def refined(self) -> Content:
        """The plan on a mesh whose axes are split, as `plan(..., refine=True)` splits
        them.
        """
        return refined(self.content, self.min_bytes)

    def bytes_lost_if_replicated(self, shape: tuple[int, ...], dtype: object) -> int:
        """The bytes that each device would save if a replicated array were sharded over
        all devices.
        """
        whole = array_bytes(shape, dtype)
        return whole - -(-whole // self.content.mesh.size)

    def divisible(
        self,
        shape: tuple[int, ...],
        units: tuple[int, ...] | None = None,
    ) -> list[tuple[int, str]]:
        """Pairs of the index of a dimension of an array and a mesh axis that divides
        it, the largest axes first.

        `units` has an entry for each dimension: the number of elements that no shard
        may split. `None` means 1 for all. Dimension 0 of an array of rank 3 or more is
        left out, because it may index stacked layers.
        """
        first_dim = int(len(shape) > 2)
        unit_counts = []
        for size, unit in zip(shape, units or [1] * len(shape), strict=True):
            unit_count = size // unit if size % unit == 0 else 1
            unit_counts.append(unit_count)
        # An axis called "fsdp" comes before all others.
        sizes = sorted(
            self.content.mesh.shape.items(),
            key=lambda item: (item[0] != "fsdp", -item[1]),
        )
        pairs = []
        for axis, size in sizes:
            for dim in range(first_dim, len(shape)):
                if size > 1 and shape[dim] and unit_counts[dim] % size == 0:
                    pairs.append((dim, axis))
        return pairs

    def target_for(
        self,
        shape: tuple[int, ...],
        units: tuple[int, ...] | None = None,
    ) -> Any:
        """The target `fsdp(axis)` of a path rule, with the largest mesh axis that
        divides a dimension of `shape`; if there is none, `replicate`. `units` has for
        each dimension the number of elements that no shard may split.
        """
        pairs = self.divisible(shape, units)
        if not pairs:
            return replicate
        _, axis = pairs[0]
        if len(shape) > 2:
            return fsdp(axis, skip_dims=0)
        return fsdp(axis)

    @property
    def _fsdp_target(self) -> Any:
        """The target `fsdp(axis)` of a rule for all arrays, with a mesh axis of the name
        "fsdp", or else the largest.
        """
        sizes = self.content.mesh.shape
        axis = max(
            sizes, key=lambda name: (sizes[name] > 1, name == "fsdp", sizes[name])
        )
        return fsdp(axis)

    def regex(self, paths: Sequence[str]) -> str:
        r"""A regex that matches these paths of the tree and no others.

        It has `\d+` for numbers if `paths` has all paths of the tree that differ only
        in these numbers.
        """
        regexes = []
        for parts, paths_of_parts in together(paths, between_numbers).items():
            if self._counts_by_parts[parts] == len(paths_of_parts):
                regexes.append(r"\d+".join(map(re.escape, parts)))
            else:
                regexes += map(re.escape, dict.fromkeys(paths_of_parts))
        if len(regexes) == 1:
            return f"^{regexes[0]}$"
        return f"^(?:{'|'.join(regexes)})$"

    @ft.cached_property
    def _counts_by_parts(self) -> collections.Counter[tuple[str, ...]]:
        """Counts the leaves whose paths differ only in numbers. The keys are the parts
        of a path between its numbers: `("layers/", "/w")` for `layers/0/w`.
        """
        return collections.Counter(map(between_numbers, self.content.path_tree.paths))

    def is_named(self, group: Group) -> bool:
        """Whether these leaves have logical names, which take precedence over path
        rules.
        """
        return group.row.rule == "names" and not self.is_plan

    def fix(self, group: Group, names: object, target: object) -> str:
        """Code that gives the leaves in `group` the logical names `names`, if names
        decide how they are sharded. Otherwise the code makes `target` the target of
        their path rule.
        """
        if self.is_named(group):
            return self.names_fix(group.paths, names)
        return self.rule_fix(group.paths, target)

    def names_fix(self, paths: Sequence[str], names: object) -> str:
        """Code that gives the leaves at `paths` the logical names `names`."""
        return (
            f"names = auto.renamed(tree, {{{self.regex(paths)!r}: {code_of(names)}}},"
            " names=names)"
        )

    def rule_fix(
        self,
        paths: Sequence[str],
        target: object,
        *,
        last: bool = False,
    ) -> str:
        """Code that makes `target` the target of the path rule for the leaves at
        `paths`.

        If one rule shards all these leaves and no others, the code replaces its target,
        because a new rule would leave the old one unused. Otherwise the code adds a
        rule before all other rules, or after them if `last`. Of a plan the code replaces
        the specs; without path rules it makes one rule for all arrays, and `target` is
        not used.
        """
        # The rules of these leaves, each with whether it shards others too.
        deciders = self.rules_for(paths)
        number, shards_others = next(iter(deciders.items()))
        is_only_rule = len(deciders) == 1 and number is not None and not shards_others
        if self.paths is not None and number is not None and is_only_rule:
            _, old_target = self.paths.rules[number]
            # A rule that may be unused stays so.
            if isinstance(old_target, Optional):
                target = optional(target)
            return f"paths = paths.replace({number}, {code_of(target)})"
        rule_code = f"{self.regex(paths)!r}, {code_of(target)}"
        if self.is_plan:
            return f"tree = tree.replace({rule_code})"
        if self.paths is None:
            # One rule for all arrays: the fixes of several findings would overwrite
            # each other.
            return f"paths = PathRules([('.*', {code_of(self._fsdp_target)})])"
        method = "extend" if last else "prepend"
        return f"paths = paths.{method}([({rule_code})])"

    def rules_for(self, paths: Sequence[str]) -> dict[int | None, bool]:
        """The path rules that shard the leaves at `paths`, each with whether it shards
        other leaves too.

        The keys are the indices of the rules; `None` stands for leaves without a rule.
        """
        rule_by_path, counts = self._rules_by_path
        counts_of_paths = collections.Counter(
            map(rule_by_path.get, dict.fromkeys(paths))
        )
        also_shards_others = {}
        for number, count in counts_of_paths.items():
            also_shards_others[number] = counts[number] > count
        return also_shards_others

    @ft.cached_property
    def _rules_by_path(
        self,
    ) -> tuple[dict[str, int | None], collections.Counter[int | None]]:
        """For each leaf without logical names, by its path, the index of the first path
        rule that matches it; `None` if no rule does. The second result has the number
        of leaves by this index.
        """
        columns = zip(self.flat.paths, self.leaf_names, self.flat.is_array, strict=True)
        rule_by_path = {}
        for path, names, is_array in columns:
            if is_array and names is None:
                rule_by_path[path] = first_match(path, self.patterns)
        return rule_by_path, collections.Counter(rule_by_path.values())


def rule_of(group: Group) -> str:
    """The text that stands in messages for the rule that shards these arrays; "its
    names" if names decide.
    """
    if group.row.rule == "names":
        return "its names"
    return str(group.row.rule)


def rules_text(mode: str | None) -> str:
    """The code that reads the axis rules of a mode, or those without a mode."""
    if mode is None:
        return "axes.rules"
    return f"axes.modes[{mode!r}]"


def mode_argument(mode: str | None) -> str:
    """The code of the last argument of a method of AxisRules: the mode, if any."""
    if mode is None:
        return ""
    return f", mode={mode!r}"


def name_at(row: Row | LeafPlan, dim: int) -> Any:
    """The logical name of a dimension of an array; `None` if names do not request its
    sharding.
    """
    if not row.names:
        return None
    return row.names[dim]


def has_code(reasons: Iterable[Reason], code: Code) -> bool:
    """Whether any of the reasons has this code."""
    return any(reason.code is code for reason in reasons)
