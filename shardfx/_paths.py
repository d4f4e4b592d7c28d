import dataclasses
import functools as ft
import re
from collections.abc import Iterable
from re import (
    _constants as sre,  # pyright: ignore[reportAttributeAccessIssue]
    _parser as sre_parser,  # pyright: ignore[reportAttributeAccessIssue]
)
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec

from ._errors import RuleError, check_type
from ._spec import UNCONSTRAINED, Atomic
from ._tree import flatten


@dataclasses.dataclass(frozen=True)
class Fsdp:
    """A strategy: shard the largest free dimension that divides; made by [`shardfx.fsdp`][]."""

    axes: tuple[str, ...]
    min_bytes: int = 0

    def __or__(self, other: Any) -> "Pipeline":
        return _pipeline(self, other)

    def __ror__(self, other: Any) -> "Pipeline":
        return _pipeline(other, self)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """A strategy: every device holds the whole array; its one value is [`shardfx.replicate`][]."""

    def __or__(self, other: Any) -> "Pipeline":
        return _pipeline(self, other)

    def __ror__(self, other: Any) -> "Pipeline":
        return _pipeline(other, self)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Several targets, applied from left to right; made by `|`."""

    steps: tuple[Any, ...]

    def __or__(self, other: Any) -> "Pipeline":
        return _pipeline(self, other)

    def __ror__(self, other: Any) -> "Pipeline":
        return _pipeline(other, self)


replicate = Replicate()


def fsdp(axes: str | Iterable[str], min_bytes: int = 0) -> Fsdp:
    """The strategy of fully sharded data parallelism: cut the largest free dimension that divides.

    **Arguments:**

    - `axes`: the mesh axis, or axes, to shard over.
    - `min_bytes`: arrays of fewer bytes are left as they are.

    **Returns:**

    A target for [`shardfx.PathRules`][]. After another target, `P(None, "tensor") | fsdp("data")`, it adds its
    axes to a dimension that the other one left free.

    !!! Example

        ```python
        from shardfx import PathRules, fsdp

        PathRules([("norm|bias", ()), (".*", fsdp("data", min_bytes=2**20))])
        ```
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if not axes or len(set(axes)) < len(axes) or not all(isinstance(axis, str) and axis for axis in axes):
        raise RuleError(f"`fsdp({axes!r})` needs the name of one mesh axis, or of several different ones.")
    if min_bytes < 0:
        raise RuleError(f"`fsdp(..., min_bytes={min_bytes})`: a number of bytes is not negative.")
    return Fsdp(axes, min_bytes)


def _pipeline(left: Any, right: Any) -> Pipeline:
    steps = tuple(step for side in (left, right) for step in (side.steps if isinstance(side, Pipeline) else (side,)))
    if any(not isinstance(step, Fsdp) for step in steps[1:]):
        raise RuleError(
            f"{' | '.join(map(repr, steps))}: only the first target may be a spec, names, `replicate` or a callable; "
            "the ones after `|` refine it, as `fsdp(...)` does."
        )
    return Pipeline(steps)


class PathRules(eqx.Module):
    """Ordered rules from a leaf's path to how it is sharded; the first rule that matches decides.

    A path joins dict keys, attribute names and indices by "/", as in `layers/0/attn/q_proj/weight`; a rule
    matches if `re.search` finds its regex in it.

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

    rules: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(self, rules: Iterable[Any]):
        """**Arguments:**

        - `rules`: pairs of a regex and a target. A target is a PartitionSpec; a tuple of logical names; a
            strategy ([`shardfx.fsdp`][], [`shardfx.replicate`][]); several of these combined with `|`; any of
            them in [`shardfx.atomic`][]; or a callable `(path, leaf) -> PartitionSpec`. Specs and names
            shorter than the rank leave the rest replicated, so `()` replicates, and so does `None`.

        **Raises:**

        `RuleError` that names the rule by its index, and the position in a regex that does not compile.
        """
        self.rules = tuple(_checked(index, rule) for index, rule in enumerate(rules))

    @classmethod
    def parse(cls, text: str) -> "PathRules":
        """Reads the compact form, `"attention|mlp->data.model, .*->fsdp(data)"`.

        Rules are separated by commas. Left of `->` is a regex; right of it mesh axes, one dimension from the
        next by ".", several on one dimension by "+", `None` for a replicated one; or `replicate`, or
        `fsdp(axis)`, alone or after `|`.

        **Arguments:**

        - `text`: the rules.

        **Returns:**

        The rules.

        **Raises:**

        `RuleError` that shows where the text is malformed.

        !!! Example

            ```python
            from shardfx import PathRules

            rules = PathRules.parse("attn|mlp -> data.model, embed -> None.data+model, .* -> fsdp(data)")
            assert rules.rules[0][0] == "attn|mlp"
            ```
        """
        return cls(_parse_rule(text, start, stop) for start, stop in _split(text, 0, len(text), ","))


def match(tree: Any, rules: PathRules) -> Any:
    """Which rule matches each array of a tree.

    **Arguments:**

    - `tree`: any tree of arrays or ShapeDtypeStructs.
    - `rules`: the rules.

    **Returns:**

    The tree with the index of the first rule that matches at each array, and `None` where none does and at
    leaves that are no arrays.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import PathRules, match

        rules = PathRules([("weight", ("embed",)), ("bias", ())])
        assert match({"weight": jnp.ones((4, 4)), "scale": jnp.ones(4)}, rules) == {"weight": 0, "scale": None}
        ```
    """
    check_path_rules("rules", rules)
    flat, patterns = flatten(tree), compiled(rules)
    indices = [
        first_match(path, patterns) if shaped else None for path, shaped in zip(flat.paths, flat.is_array, strict=True)
    ]
    return jax.tree.unflatten(flat.treedef, indices)


def check_path_rules(what: str, given: Any) -> None:
    """Raises unless the argument named `what` is PathRules."""
    fix = 'wrap it: `PathRules([...])`, or `PathRules.parse("...")` for text'
    check_type(what, given, PathRules, RuleError, fix)


@ft.lru_cache(maxsize=256)
def compiled(rules: PathRules) -> tuple[re.Pattern[str], ...]:
    """The rules' regexes, compiled once."""
    return tuple(re.compile(pattern) for pattern, _ in rules.rules)


def first_match(path: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    """The index of the first regex that is found in `path`."""
    for index, pattern in enumerate(patterns):
        if pattern.search(path):
            return index
    return None


@ft.lru_cache(maxsize=256)
def is_digit_blind(rules: PathRules) -> bool:
    """Whether no regex can tell one digit from another, so that paths that differ only in digits match alike."""
    return all(_blind(sre_parser.parse(pattern)) for pattern, _ in rules.rules)


def is_callable(target: Any) -> bool:
    """Whether a rule's target must be called for each path."""
    first = target.steps[0] if isinstance(target, Pipeline) else target
    return callable(first) and not isinstance(first, PartitionSpec)


_DIGITS = frozenset(map(ord, "0123456789"))
_LEAVES = {sre.ANY, sre.ANY_ALL, sre.AT, sre.FAILURE, sre.CATEGORY}


def _blind(parsed: Any) -> bool:
    """Whether a parsed regex treats the ten digits alike; `False` for what this does not know."""
    return all(_blind_node(code, argument) for code, argument in parsed)


def _blind_node(code: Any, argument: Any) -> bool:
    if code in _LEAVES:
        return True
    if code in (sre.LITERAL, sre.NOT_LITERAL):
        return argument not in _DIGITS
    if code is sre.IN:
        return all(_blind_member(*member) for member in argument)
    if code is sre.BRANCH:
        return all(_blind(branch) for branch in argument[1])
    if code in (
        sre.SUBPATTERN,
        sre.MAX_REPEAT,
        sre.MIN_REPEAT,
        sre.POSSESSIVE_REPEAT,
        sre.ASSERT,
        sre.ASSERT_NOT,
    ):
        return _blind(argument[-1])
    if code is sre.ATOMIC_GROUP:
        return _blind(argument)
    return False


def _blind_member(code: Any, argument: Any) -> bool:
    if code is sre.LITERAL:
        return argument not in _DIGITS
    if code is sre.RANGE:
        inside = [argument[0] <= digit <= argument[1] for digit in sorted(_DIGITS)]
        return all(inside) or not any(inside)
    return code in (sre.NEGATE, sre.CATEGORY)


def _checked(index: int, rule: Any) -> tuple[str, Any]:
    if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
        raise RuleError(f"rule {index} is {rule!r}; a path rule is a pair of a regex and a target.")
    pattern, target = rule
    try:
        re.compile(pattern)
    except re.error as error:
        position = error.pos or 0
        raise RuleError(
            f"rule {index}: the regex does not compile: {error.msg} at position {position}:\n"
            f"    {pattern}\n    {' ' * position}^"
        ) from error
    return pattern, _checked_target(index, pattern, target)


def _checked_target(index: int, pattern: str, target: Any) -> Any:
    if target is None:
        return replicate
    if isinstance(target, list):
        target = tuple(target)
    inner = target.target if isinstance(target, Atomic) else target
    if isinstance(inner, tuple):
        _check_names(index, pattern, inner)
    elif not isinstance(inner, PartitionSpec | Fsdp | Replicate | Pipeline) and not callable(inner):
        raise RuleError(
            f"rule {index} ({pattern!r}) has the target {target!r}; it must be a PartitionSpec, a tuple of logical "
            "names, `fsdp(...)`, `replicate`, or a callable `(path, leaf) -> PartitionSpec`. "
            f"For one mesh axis write `PartitionSpec({target!r})`."
        )
    return target


def _check_names(index: int, pattern: str, names: tuple[Any, ...]) -> None:
    for name in names:
        members = name if isinstance(name, tuple) else (name,)
        if not all(member is None or member is UNCONSTRAINED or isinstance(member, str | Atomic) for member in members):
            raise RuleError(
                f"rule {index} ({pattern!r}): {name!r} in {names!r} is no logical name; use a string, `None`, "
                "UNCONSTRAINED, `atomic(name, unit)`, or a tuple of names."
            )


def _malformed(text: str, position: int, what: str) -> RuleError:
    return RuleError(f"{what} at position {position}:\n    {text}\n    {' ' * position}^")


def _split(text: str, start: int, stop: int, separator: str) -> list[tuple[int, int]]:
    """The stretches of `text[start:stop]` between separators that are not inside brackets or escaped."""
    depth, pieces, begin, position = 0, [], start, start
    while position < stop:
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth <= 0 and text.startswith(separator, position):
            pieces.append((begin, position))
            begin = position + len(separator)
        position += 1
    return [*pieces, (begin, stop)]


def _parse_rule(text: str, start: int, stop: int) -> tuple[str, Any]:
    sides = _split(text, start, stop, "->")
    if len(sides) != 2:
        found = "no `->`" if len(sides) == 1 else "more than one `->`"
        raise _malformed(text, start if len(sides) == 1 else sides[1][1], f"a rule has {found}; write `regex->axes`,")
    pattern = text[slice(*sides[0])].strip()
    if not pattern or not all(text[slice(*piece)].strip() for piece in _split(text, *sides[0], "|")):
        raise _malformed(text, sides[0][0], "an empty alternative would match every path; write `.*` if that is meant,")
    steps = [_parse_step(text, *piece) for piece in _split(text, *sides[1], "|")]
    return pattern, ft.reduce(_pipeline, steps) if len(steps) > 1 else steps[0]


def _parse_step(text: str, start: int, stop: int) -> Any:
    token = text[start:stop].strip()
    if token == "replicate":
        return replicate
    if token.startswith("fsdp(") and token.endswith(")"):
        axes = re.split(r"[,+]", token[len("fsdp(") : -1])
        return fsdp([_parse_axis(text, start, axis) for axis in axes])
    return PartitionSpec(*[_parse_entry(text, *piece) for piece in _split(text, start, stop, ".")])


def _parse_entry(text: str, start: int, stop: int) -> Any:
    if text[start:stop].strip() == "None":
        return None
    return tuple(_parse_axis(text, begin, text[begin:end]) for begin, end in _split(text, start, stop, "+"))


def _parse_axis(text: str, position: int, axis: str) -> str:
    if not re.fullmatch(r"\w+", axis.strip()):
        raise _malformed(
            text, position, f"{axis.strip()!r} is no mesh axis; write axes as in `data.model` or `data+fsdp`,"
        )
    return axis.strip()
