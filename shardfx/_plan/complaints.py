"""Mistakes in a plan and its rules: functions that find them as data, and functions that raise them all in one
error.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._ground.errors import LeafTypeError, RuleError, SpecError, UnmatchedError
from .._ground.reason import Code
from .._ground.spec import array_bytes, entries_of, entry_axes
from .._ground.text import plural
from .._ground.tree import Flat
from .._rules import AxisRules, Optional, axes_in, axes_of_target, first_match, names_text, near, nearest, unknown_names
from ..topology import MeshSpec
from .decide import Draft, Matcher
from .leaf import Row


_SHOWN = 40


def raise_errors(errors: list[tuple[str, Any]]) -> None:
    if not errors:
        return
    many = "leaves, or groups of alike ones,"
    head = f"{plural(len(errors), 'leaf', many)} cannot be planned:"
    text = _listed(head, [f"  leaf `{path}`: {error}" for path, error in errors])
    # Where a rule is a user's function, the cause is the exception that the function raised.
    raise type(errors[0][1])(text) from next((one.__cause__ for _, one in errors if one.__cause__ is not None), None)


def raise_empty(tree: object, flat: Flat, paths: object) -> None:
    """Raises if a tree has no arrays, such as a class or a function passed instead of a model.

    An empty container is accepted if `paths` is `None`: its plan then serves only to shard activations.
    """
    if any(flat.is_array) or (not flat.leaves and tree is not None and paths is None):
        return
    fix = "pass the model's own tree of arrays, or of `jax.ShapeDtypeStruct`s"
    if callable(tree) and not dataclasses.is_dataclass(type(tree)):
        kind = "class" if isinstance(tree, type) else "function"
        name = next((name for name in [getattr(tree, "__name__", None)] if name), "make")
        what, fix = f"it is the {kind} `{name}`", f"pass what it makes, `eqx.filter_eval_shape({name}, ...)`"
    else:
        what = "it is None" if tree is None else f"it is an empty {type(tree).__name__}"
        if flat.leaves:
            what = f"its leaf `{flat.paths[0]}` is of type {type(flat.leaves[0]).__name__}"
    raise LeafTypeError(f'the tree has no arrays: {what}; {fix}. If there may be none, pass `unused="allow"`.')


def raise_repeated(flat: Flat) -> None:
    """Raises if two arrays have one path, since neither rules nor readers of the plan could distinguish them."""
    if len(set(flat.paths)) == len(flat.paths):
        return
    seen: set[str] = set()
    for path, shaped in zip(flat.paths, flat.is_array, strict=True):
        if shaped and path in seen:
            raise RuleError(
                f"two arrays of the tree have the path `{path}`: a key that holds a slash, or a node that names two of "
                "its children alike. Rename one of them, so that rules can tell them apart."
            )
        if shaped:
            seen.add(path)


class Uncovered(NamedTuple):
    """An array that has no names and no path rule."""

    bytes: int
    path: str
    row: Row


def uncovered(draft: Draft) -> list[Uncovered]:
    """Returns the arrays that no rule covers, largest first."""
    open_rows = {i for i, row in enumerate(draft.rows) if row.rule is None and row.shape}
    arrays = draft.arrays(open_rows) if open_rows else ()
    found = [Uncovered(array_bytes(row.shape, row.dtype), path, row) for path, _, row in arrays]
    return sorted(found, key=lambda leaf: -leaf.bytes)


def raise_unmatched(draft: Draft, axes: AxisRules | None) -> None:
    """Raises if no rule covers some array, with the nearest rule for each such array."""
    found = uncovered(draft)
    if not found:
        return
    patterns = [pattern for pattern, _ in draft.paths.rules]
    declared = dict(zip(draft.flat.paths, draft.flat.names, strict=True))
    lines = []
    for nbytes, path, row in found[:_SHOWN]:
        near = difflib.get_close_matches(path, patterns, n=1, cutoff=0.0)
        hint = f"; the nearest rule is {near[0]!r}" if near else ""
        # The names that modules declare are read only if `axes` is given.
        names = declared[path] if axes is None else None
        if names is not None:
            hint += f"; it declares the names {names_text(names)}, which need `axes=AxisRules(...)`"
        lines.append(f"  `{path}`: {row.dtype}{list(row.shape)}, {nbytes} bytes{hint}")
    head = (
        f"no rule covers {len(found)} of {sum(draft.flat.is_array)} leaves; add path rules or names for them, end "
        'the path rules with `(".*", fsdp(...))`, or pass `unmatched="replicate"`. Largest first:'
    )
    raise UnmatchedError(_listed(head, lines, len(found)))


def unknown_units(axes: AxisRules) -> tuple[str, ...]:
    """Returns the logical names in `axes.units` that have no rule in `axes`."""
    return tuple(name for name, _ in axes.units if name not in axes.names)


def unknown_of_rows(rows: Sequence[Row], axes: AxisRules) -> dict[int, tuple[str, ...]]:
    """Returns, by row number, the logical names of the row that have no rule in any mode."""
    by_name = [(i, row) for i, row in enumerate(rows) if row.names is not None and _axes_of(Code.unmatched, row)]
    return {i: found for i, row in by_name if (found := unknown_names(row.names or (), axes))}


def raise_unknown(draft: Draft, axes: AxisRules | None) -> None:
    """Raises if an array, or a unit, has a logical name without a rule in any mode."""
    if axes is None:
        return
    for name in unknown_units(axes):
        raise UnmatchedError(
            f"`units` has {name!r}{near(name, axes.names)}, and no rule of `axes` is about that name, so it keeps "
            f"nothing together. The rules have {axes.names}; correct the name, or take its unit out."
        )
    unknown = unknown_of_rows(draft.rows, axes)
    if not unknown:
        return
    lines = [
        f"  leaf `{path}`, shape {row.shape}, names {names_text(row.names)}: "
        + ", ".join(f"{name!r}{near(name, axes.names)}" for name in unknown[i])
        for path, i, row in draft.arrays(unknown)
    ]
    first = next(iter(unknown.values()))[0]
    fix = f"declare a name that is to be replicated with `axes.extend([({first!r}, None)])`"
    if first in draft.mesh.axis_names:
        fix = f"{first!r} is a mesh axis: for mesh axes give PartitionSpecs by path, `paths=PathRules([(regex, spec)])`"
    count = plural(len(lines), "leaf", "leaves")
    head = f"no rule of `axes` is about the logical names of {count}. The rules have {axes.names}; "
    raise UnmatchedError(_listed(f'{head}{fix}, or pass `unmatched="replicate"`:', lines))


def absent_axes(draft: Draft, axes: AxisRules | None) -> dict[str, str]:
    """Returns the mesh axes of rules that the mesh lacks and nobody declared, each with the first rule or leaf that
    uses it.
    """
    declared, known = draft.declared, draft.mesh.axis_names
    wrong: dict[str, str] = {}
    if axes is not None:
        declared += axes.axes
        wrong = {axis: f"the rule of {name!r}" for name, axis in reversed(axes_in(axes)) if axis not in known}
    by_path = [(i, row) for i, row in enumerate(draft.rows) if row.reasons and row.names is None]
    asked = {i: found for i, row in by_path if (found := _axes_of(Code.absent, row))}
    for path, i, row in draft.arrays(asked) if asked else ():
        for axis in asked[i]:
            wrong.setdefault(axis, f"leaf `{path}` ({row.rule})")
    return {axis: who for axis, who in wrong.items() if axis not in declared}


def raise_absent(draft: Draft, axes: AxisRules | None) -> None:
    """Raises if rules name a mesh axis that the mesh lacks and that is not declared in `axes=`."""
    wrong, mesh = absent_axes(draft, axes), draft.mesh
    missing = tuple(wrong)
    lines = [f"  {who} uses the mesh axis {axis!r}{near(axis, mesh.axis_names)}" for axis, who in wrong.items()]
    if lines:
        head = (
            f"the mesh {mesh} lacks mesh axes that the rules use. If they are for other meshes, declare them, "
            f"`AxisRules(..., axes={missing})` or `PathRules(..., axes={missing})`; or give the mesh the axis with "
            'size 1; or pass `unmatched="replicate"`:'
        )
        raise RuleError(_listed(head, lines))


def axes_used(rows: Sequence[Row], rules: Sequence[Any], axes: AxisRules | None) -> dict[str, None]:
    """Returns the mesh axes that path rules, axis rules, or the results of callable rules name."""
    used = dict.fromkeys(axis for _, target in rules for axis in axes_of_target(target))
    if axes is not None:
        used |= dict.fromkeys(axis for _, axis in axes_in(axes))
    return used | dict.fromkeys(
        axis for row in rows for entry in entries_of(row.requested) for axis in entry_axes(entry)
    )


def misspelled_axes(mesh: MeshSpec, declared: Iterable[str], used: Iterable[str]) -> dict[str, str]:
    """Returns, for each mesh axis that is neither used nor declared, the similar axis name of the rules that the mesh
    lacks.

    Rules may declare axes that a mesh lacks, so a missing axis is a mistake only if the mesh has one spelled like it.
    """
    known = {*declared, *used}
    lacking = sorted(known.difference(mesh.axis_names))
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in known]
    return {axis: close[0] for axis in idle if (close := nearest(axis, lacking))}


def raise_misspelled(draft: Draft, axes: AxisRules | None) -> None:
    """Raises if the name of a mesh axis is probably a misspelling of an axis that the rules use."""
    if not draft.declared and axes is None:
        return
    mesh, declared = draft.mesh, (*draft.declared, *(() if axes is None else axes.axes))
    for axis, meant in misspelled_axes(mesh, declared, axes_used(draft.rows, draft.paths.rules, axes)).items():
        sizes = {meant if name == axis else name: size for name, size in mesh.shape.items()}
        raise RuleError(
            f"no rule uses the mesh axis {axis!r} of size {mesh.shape[axis]}, and the mesh {mesh} lacks {meant!r}, "
            f"which the rules use: did you mean `MeshSpec({sizes!r})`? If {axis!r} is for the batch alone, declare "
            f"it: `PathRules(..., axes=({axis!r},))`."
        )


class Unused(NamedTuple):
    """A rule that decides about no array. `nearest` is the nearest path if no path matches; else `arrays` match, and
    `takers` decide about them.
    """

    number: int
    nearest: str | None
    arrays: tuple[str, ...]
    takers: tuple[str, ...]


def unused_rules(
    rules: Sequence[tuple[str, Any]],
    used: Mapping[Any, Any],
    flat: Flat,
    given: Sequence[Any] | None = None,
    giver: str = "",
) -> list[Unused]:
    """Returns the rules that decide about no array. Where `given` has an entry for a leaf, `giver` decides about it
    instead of a rule.
    """
    # No rule can match in a tree without leaves, such as the state of plain SGD.
    unused = [n for n, (_, target) in enumerate(rules) if n not in used and not isinstance(target, Optional)]
    if not flat.leaves or not unused:
        return []
    patterns = tuple(re.compile(regex) for regex, _ in rules)
    first = [None if given is None or names is None else giver for names in given or flat.leaves]
    found = [_why_unused(number, patterns, flat, first) for number in unused]
    return [why for why in found if why is not None]


def raise_unused(what: str, rules: Matcher, flat: Flat, given: Sequence[Any] | None = None, giver: str = "") -> None:
    """Raises if a rule decides about no array; `what` names the kind of rule, and `given` and `giver` are as in
    `unused_rules`.
    """
    found = unused_rules(rules.rules, rules.used, flat, given, giver)
    lines = [f"  {what} {why.number}, the regex {rules.rules[why.number][0]!r}, {unused_text(why)}." for why in found]
    if lines:
        head = (
            "rules that never apply are mostly mistakes. Correct them, take them out, mark those that other trees need "
            'with `optional(target)`, or pass `unused="allow"`:'
        )
        raise RuleError(_listed(head, lines))


def unused_text(why: Unused) -> str:
    """Returns a phrase that says why a rule decides about no array."""
    if why.nearest is not None:
        return f"matches no path of the tree; the nearest path is `{why.nearest}`"
    first, *others = why.arrays
    more = f" and {len(others)} more" if others else ""
    return f"is shadowed: all that it matches (`{first}`{more}) goes to {' and '.join(why.takers)}"


# Strings that are no path of any tree: only a regex that matches every path matches them.
_PROBES = ("\0", "\0/\0")


def _why_unused(
    number: int, patterns: tuple[re.Pattern[str], ...], flat: Flat, first: Sequence[str | None]
) -> Unused | None:
    """Returns why a rule decides about no array; `None` if that is no mistake: a last rule that matches all paths, or
    one that matches no arrays.
    """
    pattern = patterns[number]
    matches = [at for at, path in enumerate(flat.paths) if pattern.search(path)]
    if not matches:
        nearest = difflib.get_close_matches(pattern.pattern, flat.paths, n=1, cutoff=0.0)[0]
        return Unused(number, nearest, (), ())
    # The last rule often covers all remaining paths, and there may be none.
    is_rest = number == len(patterns) - 1 and all(map(pattern.search, _PROBES))
    arrays = [at for at in matches if flat.is_array[at]]
    if is_rest or not arrays:
        return None
    takers = dict.fromkeys(first[at] or _first_rule(flat.paths[at], patterns) for at in arrays)
    return Unused(number, None, tuple(flat.paths[at] for at in arrays), tuple(takers))


def _first_rule(path: str, patterns: tuple[re.Pattern[str], ...]) -> str:
    number = first_match(path, patterns)
    return "no rule" if number is None else f"rule {number} ({patterns[number].pattern!r})"


def _axes_of(code: Code, row: Row) -> list[str]:
    """Returns the mesh axes, or logical names, of the reasons with this code."""
    return [axis for why in row.reasons if why.code is code for axis in why.axes]


def _listed(head: str, lines: Sequence[str], count: int = 0) -> str:
    """Returns the text of an error: `head`, the first lines, and how many more there are.

    `count` is the total number of lines, if `lines` holds only the first of them.
    """
    more = max(count, len(lines)) - _SHOWN
    return "\n".join([head, *lines[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])])


def raise_cut(draft: Draft, mesh: MeshSpec) -> None:
    """Raises if any array is not sharded as requested; `mesh` is the draft's mesh, or that mesh with some axes
    split.
    """
    whys = {i: [why for why in row.reasons if why.code is not Code.scalar] for i, row in enumerate(draft.rows)}
    lines = [f"  leaf `{path}`, shape {row.shape}: {why}" for path, i, row in draft.arrays(whys) for why in whys[i]]
    if lines:
        text = _listed("`strict=True`, and these leaves are not sharded as asked:", lines)
        if mesh != draft.mesh:
            text += (
                f"\n`refine=True` has split the mesh into {mesh}. If they may be replicated over the rest, plan "
                "on that mesh, made with `MeshSpec.split`, by rules that name the parts; or leave `strict` out."
            )
        raise SpecError(text)


def raise_loose(loose: list[tuple[str, tuple[int, ...], str]]) -> None:
    """Raises if an array made from a strictly planned tree is not sharded as requested, or no rule covers it."""
    if loose:
        head = (
            "the plan was made with `strict=True`, and these leaves are not sharded as asked. Give rules for them, "
            '`follow(..., paths=PathRules([(regex, target)]))`; `(".*", replicate)` may be the last:'
        )
        raise SpecError(_listed(head, [f"  leaf `{path}`, shape {shape}: {why}" for path, shape, why in loose]))
