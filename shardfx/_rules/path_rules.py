"""Ordered rules that map a regex to a PartitionSpec, logical names or a strategy. The
first rule whose regex matches a leaf's path says how the leaf is sharded. `parsing.py`
reads their compact form, `"attention|mlp->data.model, .*->fsdp(data)"`.
"""

import functools as ft
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import PyTree

from .._ground.errors import RuleError, check_type
from .._ground.misuse import called, lacking, refused
from .._ground.spec import UNCONSTRAINED, axes_of_entries, entries_of
from .._ground.tree import flatten
from .axis_rules import (
    AxisRules,
    check_axis_rules,
    check_positions,
    without_positions,
)
from .pairs import declared_axes, repeated
from .parsing import parse_rule, split
from .strategies import (
    Atomic,
    Optional,
    Pipeline,
    Replicate,
    Strategy,
    bare,
    fsdp,
    replicate,
    steps_of,
)


class PathRules(eqx.Module):
    """Ordered rules that map the paths of leaves to shardings. The first rule that
    matches a leaf's path is used.

    A path joins dict keys, attribute names and indices by "/", as in
    `layers/0/attn/q_proj/weight`. A rule matches if `re.search` finds its regex in the
    path. `mesh_axes` are the mesh axes that a mesh may lack without an error.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import PathRules, fsdp

        rules = PathRules(
            [
                (r"(q|k|v|up|gate)_proj/weight", P("tensor", "fsdp")),
                (r"(o|down)_proj/weight", P("fsdp", "tensor")),
                (r"embed", ("vocab", "embed")),  # logical names: AxisRules decide
                (r".*", fsdp("fsdp", min_bytes=4096)),
            ]
        )
        ```
    """

    __module__ = "shardfx"

    rules: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    mesh_axes: tuple[str, ...] = eqx.field(static=True)

    if not TYPE_CHECKING:
        __getitem__ = refused("rules[{}]", "`rules.rules[{}]`")
        __iter__ = refused("iter(rules)", "`rules.rules`, a tuple of pairs")
        __class_getitem__ = classmethod(
            refused("PathRules[{}]", "`PathRules([{}])`, with parentheses")
        )
        __add__ = refused(
            "rules + {}",
            "`rules.extend({})`, or of other PathRules `rules.extend(other.rules)`",
        )
        __getattr__ = lacking(
            {
                "append": "`rules.extend([(regex, target)])`, which returns new rules",
                "add": "`rules.extend([(regex, target)])`, which returns new rules",
                "items": "`rules.rules`, a tuple of pairs",
            }
        )

    @called("PathRules([('mlp', P('data')), ('.*', P())])", axes="`mesh_axes=`")
    def __init__(self, rules: Iterable[object], *, mesh_axes: Iterable[object] = ()):
        """**Arguments:**

        - `rules`: pairs of a regex and a target, or a mapping. A target is a
          PartitionSpec; a tuple of logical names; a strategy ([`shardfx.fsdp`][],
          [`shardfx.replicate`][]); several of these combined with `|`; any of them in
          [`shardfx.atomic`][] or [`shardfx.optional`][]; or a callable
          `(path, leaf) -> PartitionSpec`, which may also return
          `atomic(PartitionSpec, units)`. Dimensions beyond the end of a PartitionSpec
          are not sharded. A tuple has one name per dimension; `...` stands for all
          unsharded dimensions. `()` and `None` replicate.
        - `mesh_axes`: the mesh axes that a mesh may lack; see [`shardfx.AxisRules`][].

        **Raises:**

        `RuleError` for a rule that is no pair, a regex that does not compile, or an
        invalid target. It has the index of the rule.
        """
        if isinstance(rules, str):
            raise RuleError(
                f"`PathRules({rules!r:.60})` is given a text; write"
                f" `PathRules.parse({rules!r:.60})`."
            )
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        fix = "write pairs of a regex and a target: `PathRules([(regex, target)])`"
        check_type(
            what="rules", value=pairs, expected=Iterable, error=RuleError, fix=fix
        )
        self.rules = tuple(
            _checked_rule(index, rule) for index, rule in enumerate(pairs)
        )
        self.mesh_axes = declared_axes(mesh_axes)

    @called("rules.prepend([('mlp', P('data'))])")
    def prepend(self, rules: Iterable[object]) -> "PathRules":
        """New PathRules with `rules` before these, so that `rules` override them.

        **Arguments:**

        - `rules`: pairs of a regex and a target, or a mapping, as in `PathRules(...)`.

        **Returns:**

        New PathRules with the same `mesh_axes`.

        !!! Example

            ```python
            from shardfx import presets, replicate

            rules = presets.llama().prepend([(r"layers.0.mlp", replicate)])
            ```
        """
        # `PathRules` reads a mapping too, and says what is wrong with another value.
        added = PathRules(rules)
        return PathRules([*added.rules, *self.rules], mesh_axes=self.mesh_axes)

    @called("rules.extend([('mlp', P('data'))])")
    def extend(
        self,
        rules: Iterable[object] = (),
        *,
        mesh_axes: Iterable[object] = (),
    ) -> "PathRules":
        """New PathRules with `rules` after these, for paths that none of these matches.

        **Arguments:**

        - `rules`: pairs of a regex and a target, or a mapping, as in `PathRules(...)`.
        - `mesh_axes`: more mesh axes that a mesh may lack without an error, besides those in
          these PathRules.

        **Returns:**

        New PathRules.

        !!! Example

            ```python
            from shardfx import PathRules, fsdp

            rules = PathRules.parse("embed->tensor.fsdp").extend([(".*", fsdp("fsdp"))])
            assert [regex for regex, _ in rules.rules] == ["embed", ".*"]
            ```
        """
        added = PathRules(rules, mesh_axes=mesh_axes)
        return PathRules(
            [*self.rules, *added.rules],
            mesh_axes=(*self.mesh_axes, *added.mesh_axes),
        )

    def drop(self, *numbers: int) -> "PathRules":
        """New PathRules without the rules at these positions. [`shardfx.lint`][]
        reports rules that never apply.

        **Arguments:**

        - `numbers`: positions of rules, counted from 0.

        **Returns:**

        New PathRules with the same `mesh_axes`.

        **Raises:**

        `RuleError` for a position without a rule.

        !!! Example

            ```python
            from shardfx import PathRules

            rules = PathRules.parse("attn->tensor, q_proj->fsdp, mlp->fsdp").drop(1)
            assert [regex for regex, _ in rules.rules] == ["attn", "mlp"]
            ```
        """
        check_positions(len(self.rules), numbers, "drop")
        return PathRules(
            without_positions(self.rules, numbers), mesh_axes=self.mesh_axes
        )

    def replace(self, number: int, target: object) -> "PathRules":
        """New PathRules with another target for the rule at one position.

        **Arguments:**

        - `number`: the position of the rule, counted from 0.
        - `target`: a PartitionSpec, a tuple of logical names, a strategy, or another
          target of `PathRules(...)`.

        **Returns:**

        New PathRules with the same `mesh_axes`.

        **Raises:**

        `RuleError` for a position without a rule, and for an invalid target.

        !!! Example

            ```python
            from jax.sharding import PartitionSpec as P
            from shardfx import PathRules

            rules = PathRules.parse("attn->tensro, mlp->fsdp").replace(0, P("tensor"))
            assert rules == PathRules.parse("attn->tensor, mlp->fsdp")
            ```
        """
        check_positions(len(self.rules), (number,), "replace")
        rules = list(self.rules)
        regex, _ = rules[number]
        rules[number] = (regex, target)
        return PathRules(rules, mesh_axes=self.mesh_axes)

    @classmethod
    def parse(cls, text: str) -> "PathRules":
        """Parses the compact form of rules,
        `"attention|mlp->data.model, .*->fsdp(data)"`.

        Rules are separated by commas. Left of `->` is a regex. Right of it are mesh
        axes: "." separates dimensions, "+" joins several axes on one dimension, `None`
        is a replicated dimension. The right side may also be `replicate`, or
        `fsdp(axis)`, alone or after `|`.

        **Arguments:**

        - `text`: the rules.

        **Returns:**

        PathRules.

        **Raises:**

        `RuleError` that shows the position where the text is malformed.

        !!! Example

            ```python
            from shardfx import PathRules

            rules = PathRules.parse(
                "attn|mlp -> data.model, embed -> None.data+model, .* -> fsdp(data)"
            )
            assert rules.rules[0][0] == "attn|mlp"
            ```
        """
        if not isinstance(text, str):
            raise RuleError(
                f"`PathRules.parse({text!r:.60})` reads text, such as `attn->tensor`;"
                " pairs of a regex and a target go into `PathRules(pairs)`."
            )
        return cls(
            [
                parse_rule(text, start, stop)
                for start, stop in split(text, 0, len(text), ",")
            ]
        )


@called("match(tree, rules)")
def match(tree: object, rules: PathRules) -> PyTree:
    """The index of the rule that matches each array of a tree.

    **Arguments:**

    - `tree`: any tree of arrays or ShapeDtypeStructs.
    - `rules`: the rules.

    **Returns:**

    A tree of the same structure. At each array it has the index of the first matching
    rule; at arrays without a matching rule and at leaves that are no arrays it has
    `None`.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import PathRules, match

        rules = PathRules([("weight", ("embed",)), ("bias", ())])
        assert match({"weight": jnp.ones((4, 4)), "scale": jnp.ones(4)}, rules) == {
            "weight": 0,
            "scale": None,
        }
        ```
    """
    if isinstance(tree, PathRules):
        raise RuleError(
            "the rules are given first, of type PathRules: write `match(tree, rules)`."
        )
    check_rules(rules, what="rules")
    check_type(
        what="rules",
        value=rules,
        expected=PathRules,
        error=RuleError,
        fix=_wrapped(rules),
    )
    flat = flatten(tree)
    patterns = compiled(rules)
    indices = []
    for path, is_array in zip(flat.paths, flat.is_array, strict=True):
        index = first_match(path, patterns) if is_array else None
        indices.append(index)
    return jax.tree.unflatten(flat.treedef, indices)


def _wrapped(value: object) -> str:
    """What to write for a value that is given as path rules."""
    if isinstance(value, PartitionSpec | Strategy | Replicate | Pipeline):
        return f"for all arrays write `PathRules([('.*', {value!r})])`"
    if inspect.isfunction(value):
        return f"call it: `{value.__name__}()`"
    return 'wrap it: `PathRules([...])`, or `PathRules.parse("...")` for text'


def check_rules(paths: object, axes: object = None, what: str = "paths") -> None:
    """Raises `RuleError` unless `paths` is PathRules or `None`, and `axes` is AxisRules
    or `None`. `what` is the name of the argument `paths` in the message.
    """
    is_swapped = isinstance(paths, AxisRules)
    if is_swapped or (axes is not None and isinstance(axes, PathRules)):
        if is_swapped:
            kind = "AxisRules"
            given_as = what
            fix = "axes"
        else:
            kind = "PathRules"
            given_as = "axes"
            fix = what
        raise RuleError(
            f"PathRules are for `{what}`, by the paths of arrays, and AxisRules for"
            f" `axes`, by their logical names; here {kind}"
            f" are given as `{given_as}`; write"
            f" `{fix}=` for them."
        )
    if paths is not None:
        check_type(
            what=what,
            value=paths,
            expected=PathRules,
            error=RuleError,
            fix=_wrapped(paths),
        )
    if axes is not None:
        check_axis_rules("axes", axes)


def compiled(rules: PathRules) -> tuple[re.Pattern[str], ...]:
    """The compiled regexes of the rules."""
    return tuple(re.compile(pattern) for pattern, _ in rules.rules)


def first_match(path: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    """The index of the first regex that matches somewhere in `path`; `None` if none
    does.
    """
    for index, pattern in enumerate(patterns):
        if pattern.search(path):
            return index
    return None


# Elements of a regex that can distinguish digits: a digit, a character by its name, and
# a group that must occur again. The ends of a range are characters too: a range without
# a digit at either end contains all ten digits or none.
_TELLS_DIGITS = re.compile(r"\d|\\N|\(\?P=")
_ALL_DIGITS = re.compile(r"(?<!\\)\[0-9\]")


@ft.lru_cache(maxsize=1024)
def is_digit_blind(regex: str) -> bool:
    """Whether a regex cannot distinguish digits: of paths that differ only in digits,
    it matches all or none. The paths of repeated layers are then matched once. The
    result may be `False` for a regex that is hard to analyse.
    """
    return not _TELLS_DIGITS.search(_ALL_DIGITS.sub("", regex))


class Matcher:
    """Compiled path rules, with `used`, the indices of the rules that have matched a
    path. `needs_paths` is false if no rule distinguishes paths that differ only in
    digits. Such paths may share a plan.
    """

    def __init__(self, rules: PathRules | None):
        """Compiles the rules; `None` stands for no rules, so that no path matches.

        `rules` has pairs of a regex and a target, and `patterns` the compiled regexes.
        `declared` has the mesh axes that the rules declare with `mesh_axes=`.
        """
        if rules is None:
            rules = PathRules(())
        self.rules = rules.rules
        self.declared = rules.mesh_axes
        self.patterns = compiled(rules)
        # For each rule, whether its target is a function of the path and the leaf.
        self.has_function = [is_callable(target) for _, target in rules.rules]

        # Whether paths that differ only in digits match the same rules.
        is_blind = all(is_digit_blind(regex) for regex, _ in rules.rules)
        self.needs_paths = any(self.has_function) or not is_blind
        self.used: dict[int, None] = {}

    def first(self, path: str) -> int | None:
        """The index of the first rule that matches `path`; `None` if no rule matches.
        The rule is recorded as used.
        """
        rule_index = first_match(path, self.patterns)
        if rule_index is not None:
            self.used[rule_index] = None
        return rule_index

    def text(self, rule_index: int) -> str:
        """The name, in a plan, of the rule with the index `rule_index`, such as
        "paths[0] embed".
        """
        return f"paths[{rule_index}] {self.rules[rule_index][0]}"


def is_callable(target: object) -> bool:
    """Whether the target of a rule is a callable `(path, leaf) -> PartitionSpec`."""
    first, *_ = steps_of(bare(target))
    return callable(first) and not isinstance(first, PartitionSpec | Replicate)


def _checked_rule(index: int, rule: object) -> tuple[str, Any]:
    """The regex and the target of a path rule. Raises `RuleError`, with the rule's
    `index`, if it is no pair, its regex does not compile, or its target is invalid.
    """
    if not (
        isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
    ):
        raise RuleError(
            f"rule {index} is {rule!r}; a path rule is a pair of a regex"
            " and a target, `(regex, target)`, in a list: `PathRules([(regex,"
            " target)])`."
        )
    pattern, target = rule
    try:
        re.compile(pattern)
    except re.error as error:
        position = error.pos or 0
        raise RuleError(
            f"rule {index}: the regex does not compile: {error.msg} at position"
            f" {position}:\n    {pattern}\n    {' ' * position}^{_glob_hint(pattern)}"
        ) from error
    return pattern, _checked_target(index, pattern, target)


def _glob_hint(pattern: str) -> str:
    """What to write for a glob, which is no regex; empty if a pattern has no star."""
    if not re.search(r"(^|[/.|(])\*", pattern):
        return ""
    return f"\n  a rule is a regex: write {re.sub(r'(?<![.])[*]+', '.*', pattern)!r}."


def _checked_target(index: int, pattern: str, target: object) -> Any:
    """The target of the rule with this index and regex, where `None` is `replicate` and
    a list a tuple. Raises `RuleError` for an invalid target.
    """
    if target is None:
        return replicate
    if isinstance(target, Optional):
        return Optional(_checked_target(index, pattern, target.target))
    if isinstance(target, list):
        target = tuple(target)
    # The target on the left of all `|`; those on the right are strategies.
    first, *_ = steps_of(target)
    # What `atomic` holds is checked like a target without it.
    inner = first.target if isinstance(first, Atomic) else first
    if inner is fsdp:
        raise RuleError(
            f"rule {index} ({pattern!r}) has the function `fsdp` as its target; call it"
            ' with the mesh axis: `fsdp("data")`.'
        )
    if isinstance(inner, tuple):
        _check_names(index, pattern, inner)
    elif isinstance(inner, PartitionSpec):
        check_once(inner, f"rule {index} ({pattern!r})")
    elif not isinstance(inner, Strategy | Replicate | Pipeline) and not callable(inner):
        fix = f"For one mesh axis write `P({target!r})`"
        if isinstance(inner, Sharding):
            fix = "Of a sharding write the spec, `sharding.spec`"
        raise RuleError(
            f"rule {index} ({pattern!r}) has the target {target!r}; it must be a"
            " PartitionSpec, a tuple of logical names, `fsdp(...)`, `replicate`, or a"
            f" callable `(path, leaf) -> PartitionSpec`. {fix}."
        )
    return target


def check_once(spec: PartitionSpec, head: str) -> None:
    """Raises `RuleError` if a spec has a mesh axis twice, which JAX does not accept.
    `head` begins the message.
    """
    used = axes_of_entries(entries_of(spec))
    if duplicates := repeated(used):
        raise RuleError(
            f"{head} has the target {spec}, which uses mesh axis `{duplicates[0]}` twice;"
            " use it once."
        )


def _check_names(index: int, pattern: str, names: tuple[object, ...]) -> None:
    """Raises `RuleError` if an entry of `names`, the target of the rule with this index
    and regex, is no logical name, tuple of names, `None`, `...` or UNCONSTRAINED.
    """
    for name in names:
        if name is ...:
            continue
        members = name if isinstance(name, tuple) else (name,)
        for member in members:
            is_no_name = member is None or member is UNCONSTRAINED
            if not is_no_name and not isinstance(member, str | Atomic):
                raise RuleError(
                    f"rule {index} ({pattern!r}): {name!r} in {names!r} is no logical"
                    " name; use a string, `None`, `...`, UNCONSTRAINED, `atomic(name, unit)`,"
                    " or a tuple of names."
                )
