"""Finds mistakes in a draft of a plan. Some functions return the mistakes as data, and
others raise an error with all mistakes of one sort.
"""

import collections
import difflib
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from .._ground.errors import LeafTypeError, RuleError, SpecError, UnmatchedError
from .._ground.reason import Code
from .._ground.spec import array_bytes
from .._ground.text import plural
from .._ground.tree import Flat
from .._rules import (
    AxisRules,
    Matcher,
    Optional,
    axes_in,
    axes_of_target,
    first_match,
    names_text,
    near,
    nearest,
    unknown_names,
)
from ..topology import MeshSpec
from .leaf import Row
from .names import has_named_arrays


class Draft(NamedTuple):
    """The plans of all arrays of a tree. `plan` then raises errors for mistakes in
    them, and `lint` lists the mistakes.

    - `flat`: the leaves of the tree, their paths and their logical names.
    - `paths`, `kinds`: the path rules, and the memory kinds by path.
    - `declared`: the mesh axes that the rules declare with `mesh_axes=`, so that the
      mesh may lack them.
    - `row_indices`: for each leaf the index of its plan in `rows`; -1 if the leaf is
      not an array; `-2 - n` if planning it failed with the error `errors[n]`.
    - `rows`: the plans, one for all arrays that are planned alike.
    - `errors`: pairs of a leaf's path and its error.
    """

    flat: Flat
    mesh: MeshSpec
    paths: Matcher
    kinds: Matcher
    axes: AxisRules | None
    declared: tuple[str, ...]
    row_indices: Sequence[int]
    rows: Sequence[Row]
    errors: list[tuple[str, Any]]

    def arrays(self, chosen: Container[int]) -> Iterator[tuple[str, int, Row]]:
        """Yields the path, the index in `rows` and the plan of each array whose index
        in `rows` is in `chosen`.
        """
        for i, path in zip(self.row_indices, self.flat.paths, strict=True):
            if i in chosen:
                yield path, i, self.rows[i]


_SHOWN = 40


def _refuse(
    error: type[Exception],
    head: str,
    lines: Sequence[str],
    cause: Exception | None = None,
) -> None:
    """Raises `error` unless `lines`, one for each mistake, is empty. The message is
    `head` and the first 40 lines. `cause` is the exception from which the error is
    raised.
    """
    if lines:
        shown = [head, *lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            shown.append(f"  and {len(lines) - _SHOWN} more")
        raise error("\n".join(shown)) from cause


def check_policy(function: str, what: str, policy: object, other: str) -> None:
    """Raises `RuleError` unless `policy`, the argument `what` of the function with the
    name `function`, is "raise" or `other`.
    """
    if policy not in ("raise", other):
        raise RuleError(
            f"`{what}={policy!r}` is no policy of `{function}`; use"
            f' "raise" or "{other}".'
        )


def raise_errors(errors: list[tuple[str, Any]]) -> None:
    """Raises one error that lists `errors`, pairs of a leaf's path and its error. It
    has the type of the first.
    """
    if errors:
        head = (
            f"{plural(len(errors), 'leaf', 'leaves, or groups of alike ones,')} cannot"
            " be planned:"
        )
        # Where a rule is a user's function, the cause is the exception that the
        # function raised.
        causes = [error.__cause__ for _, error in errors]
        first_cause = next((cause for cause in causes if cause is not None), None)
        _, first_error = errors[0]
        lines = [f"  leaf `{path}`: {error}" for path, error in errors]
        _refuse(type(first_error), head, lines, first_cause)


def raise_empty(tree: object, flat: Flat, paths: object) -> None:
    """Raises `LeafTypeError` if a tree has no arrays, such as a class or a function
    passed instead of a model.

    An empty container is accepted if `paths`, the path rules, is `None`: its plan
    serves to shard activations only.
    """
    if not any(flat.is_array) and (flat.leaves or tree is None or paths is not None):
        _raise_other_argument(tree, flat)
        first = ""
        if flat.leaves:
            kind = type(flat.leaves[0]).__name__
            first = f", and its leaf `{flat.paths[0]}` is of type {kind}"
        raise LeafTypeError(
            f"the tree has no arrays: it is of type {type(tree).__name__}{first}; pass"
            " the model's own tree of arrays or `jax.ShapeDtypeStruct`s, such as"
            " `eqx.filter_eval_shape(make, ...)` gives for a class or function `make`."
            ' If there may be none, pass `unused="allow"`.'
        )


def _raise_other_argument(tree: object, flat: Flat) -> None:
    """Raises `LeafTypeError` for a tree without arrays that is a mesh or holds shapes."""
    if isinstance(tree, MeshSpec | Mesh | AbstractMesh):
        raise LeafTypeError(
            "the tree is a mesh: the model comes first, `plan(tree, mesh, ...)`."
        )
    if flat.leaves and all(isinstance(leaf, int) for leaf in flat.leaves):
        raise LeafTypeError(
            "the tree has no arrays but numbers, as shapes have: write"
            " `jax.ShapeDtypeStruct(shape, dtype)` in place of each shape."
            ' If there may be none, pass `unused="allow"`.'
        )


def raise_repeated(flat: Flat) -> None:
    """Raises `RuleError` if two arrays have one path, because a rule could not
    distinguish them.
    """
    if len(set(flat.paths)) == len(flat.paths):
        return
    counts = collections.Counter(itertools.compress(flat.paths, flat.is_array))
    for path, count in counts.items():
        if count > 1:
            raise RuleError(
                f"two arrays of the tree have the path `{path}`: a key that holds a"
                " slash, or a node that names two of its children alike. Rename one of"
                " them, so that rules can tell them apart."
            )


def uncovered(draft: Draft) -> list[tuple[str, Row]]:
    """Returns the path and the plan of each array that no rule covers, the largest
    array first.
    """
    uncovered_rows = set()
    for i, row in enumerate(draft.rows):
        # A scalar has no dimension to shard: it needs no rule.
        if row.rule is None and row.shape:
            uncovered_rows.add(i)
    # Most drafts have none, and many leaves.
    if not uncovered_rows:
        return []
    leaves = [(path, row) for path, _, row in draft.arrays(uncovered_rows)]
    return sorted(leaves, key=lambda leaf: -_whole_bytes(leaf[1]))


def _whole_bytes(row: Row) -> int:
    """The bytes of the whole array that `row` plans."""
    return array_bytes(row.shape, row.dtype)


def raise_unmatched(draft: Draft) -> None:
    """Raises `UnmatchedError` if no rule covers some arrays. For each of these, the
    message has the path rule whose regex is most similar to the path.
    """
    leaves = uncovered(draft)
    patterns = [pattern for pattern, _ in draft.paths.rules]
    if not leaves:
        return
    lines = []
    for position, (path, row) in enumerate(leaves):
        array = f"{row.dtype}{list(row.shape)}, {_whole_bytes(row)} bytes"
        line = f"  `{path}`: {array}"
        # Similarity is slow, and no more lines are shown.
        if position < _SHOWN:
            line += _near_rule(path, patterns)
        lines.append(line)
    # The names that modules declare are read only if `axes` is given.
    has_names = any(names is not None for names in draft.flat.names)
    carried = (
        "The names that haliax's arrays carry are read by"
        " `names=shardfx.interop.haliax.names_of(tree), axes=AxisRules(...)`. "
    )
    head = (
        f"no rule covers {len(leaves)} of {sum(draft.flat.is_array)} leaves; add path"
        ' rules or names for them, end the path rules with `(".*", fsdp(...))`, or'
        ' pass `unmatched="replicate"`. '
    )
    if has_names and draft.axes is None:
        head += "The names that fields of the tree declare need `axes=AxisRules(...)`. "
    if has_named_arrays(draft.flat.treedef):
        head += carried
    head += "Largest first:"
    _refuse(UnmatchedError, head, lines)


# Spellings of paths in other libraries: `layers.0.w`, `['layers'][0]['w']`.
_DOTS = re.compile(r"\\?\.")
_BRACKETS = re.compile(r"\\?\['?([^'\]\\]+)'?\\?\]")


def _near_rule(path: str, patterns: Sequence[str]) -> str:
    """The rule that is nearest to a path, as the end of a line; empty without rules."""
    for pattern in patterns:
        # The attributes and indices of `layers[0].w` as in a path, `layers/0/w`.
        slashed = _BRACKETS.sub(r"/\1", _DOTS.sub("/", pattern)).strip("/")
        if slashed != pattern and slashed and slashed in path:
            return (
                f"; a path is joined by `/`: write {slashed!r} in place of {pattern!r}"
            )
    for pattern in difflib.get_close_matches(path, patterns, n=1, cutoff=0.0):
        return f"; the nearest rule is {pattern!r}"
    return ""


def unknown_units(axes: AxisRules) -> tuple[str, ...]:
    """Returns the logical names that `axes.units` mentions and that have no rule in
    `axes`.
    """
    return tuple(name for name, _ in axes.units if name not in axes.names)


def unknown_of_rows(rows: Sequence[Row], axes: AxisRules) -> dict[int, tuple[str, ...]]:
    """Returns a dict from the index of a plan in `rows` to its logical names that have
    no rule in `axes`. Plans whose names all have a rule are left out.
    """
    unknown_by_row = {}
    for i, row in enumerate(rows):
        if row.names is not None and _axes_of(Code.unmatched, row):
            unknown = unknown_names(row.names, axes)
            if unknown:
                unknown_by_row[i] = unknown
    return unknown_by_row


def raise_unknown(draft: Draft) -> None:
    """Raises `UnmatchedError` if an array, or `units` of the axis rules, has a logical
    name that no rule is about.
    """
    axes = draft.axes
    if axes is None:
        return
    names_of_units = unknown_units(axes)
    names_by_row = unknown_of_rows(draft.rows, axes)
    lines = []
    for name in names_of_units:
        lines.append(f"  `units`: {name!r}{near(name, axes.names)}")
    for path, i, row in draft.arrays(names_by_row):
        texts = [f"{name!r}{near(name, axes.names)}" for name in names_by_row[i]]
        array = f"shape {row.shape}, names {names_text(row.names)}"
        lines.append(f"  leaf `{path}`, {array}: {', '.join(texts)}")
    # The advice is about the first of these names.
    for name in [*names_of_units, *itertools.chain(*names_by_row.values())][:1]:
        fix = (
            f"declare a name that is to be replicated with `axes.extend([({name!r},"
            " None)])`"
        )
        if name in draft.mesh.axis_names:
            fix = (
                f"{name!r} is a mesh axis: for mesh axes give PartitionSpecs by path,"
                " `paths=PathRules([...])`"
            )
        if axes.names and set(axes.names) <= set(draft.mesh.axis_names):
            fix = "these are mesh axes, and a rule is a pair `(name, mesh axis)`"
        head = (
            "no rule of `axes` is about these logical names. The rules have"
            f" {axes.names}; {fix}, or pass "
        )
        _refuse(UnmatchedError, head + '`unmatched="replicate"`:', lines)


def absent_axes(draft: Draft) -> dict[str, str]:
    """Returns the mesh axes that rules name and the mesh lacks, each with a text that
    names the first rule or leaf that uses the axis. Axes that the rules declare with
    `mesh_axes=` are left out.
    """
    users: dict[str, str] = {}
    pairs = () if draft.axes is None else axes_in(draft.axes)
    # The first rule of an axis overwrites the others.
    for name, axis in reversed(pairs):
        if axis not in draft.mesh.axis_names:
            users[axis] = f"the rule of {name!r}"

    # By the index of a plan in `rows`, the axes of its path rule that the mesh lacks.
    # Those of an array with logical names come from `axes` and are collected above.
    absent_by_row = {}
    for i, row in enumerate(draft.rows):
        if row.reasons and row.names is None:
            absent = _axes_of(Code.absent, row)
            if absent:
                absent_by_row[i] = absent
    # Most drafts have none, and many leaves.
    if absent_by_row:
        for path, i, row in draft.arrays(absent_by_row):
            for axis in absent_by_row[i]:
                users.setdefault(axis, f"leaf `{path}` ({row.rule})")

    return {axis: user for axis, user in users.items() if axis not in draft.declared}


def raise_absent(draft: Draft) -> None:
    """Raises `RuleError` if rules name a mesh axis that the mesh lacks and that they do
    not declare with `mesh_axes=`.
    """
    user_by_axis = absent_axes(draft)
    mesh = draft.mesh
    lines = []
    for axis, user in user_by_axis.items():
        hint = near(axis, mesh.axis_names)
        parts = [part.strip() for part in axis.split(",")]
        if len(parts) > 1:
            hint = f"; for several axes write a tuple, {tuple(parts)}"
        if draft.axes is not None and axis in draft.axes.names:
            hint = (
                ", which is a logical name of `axes`: a tuple holds names,"
                f" `({axis!r}, ...)`, and `P(...)` mesh axes"
            )
        lines.append(f"  {user} uses the mesh axis {axis!r}{hint}")
    declaration = f"mesh_axes={tuple(user_by_axis)}"
    head = (
        f"the mesh {mesh} lacks mesh axes that the rules use. If they are for other"
        f" meshes, declare them, `AxisRules(..., {declaration})` or"
        f" `PathRules(..., {declaration})`; or give the mesh the axis with size"
        ' 1; or pass `unmatched="replicate"`:'
    )
    _refuse(RuleError, head, lines)


def axes_used(
    rows: Sequence[Row],
    rules: Sequence[Any],
    axes: AxisRules | None,
) -> dict[str, None]:
    """Returns the mesh axes that path rules, axis rules, or the specs requested in
    `rows` name, as keys.

    `rules` has pairs of a regex and its target. If a target is a function, only the
    requested specs show its axes.
    """
    used: list[str] = []
    for _, target in rules:
        used += axes_of_target(target)
    for row in rows:
        used += axes_of_target(row.requested)
    if axes is not None:
        used += [axis for _, axis in axes_in(axes)]
    return dict.fromkeys(used)


def misspelled_axes(
    mesh: MeshSpec,
    declared: Iterable[str],
    used: Iterable[str],
) -> dict[str, str]:
    """Returns the mesh axes that are probably misspelled, each with the similar name
    that is probably meant.

    `declared` and `used` are the axes that the rules declare with `mesh_axes=` and that
    they use. For example, the mesh has the axis `tensr`, which is in neither, and lacks
    `tensor`, which is in `used`: the result is {"tensr": "tensor"}.
    """
    named_axes = {*declared, *used}
    lacking = sorted(named_axes.difference(mesh.axis_names))
    meant_by_axis = {}
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in named_axes:
            for similar in nearest(axis, lacking)[:1]:
                meant_by_axis[axis] = similar
    return meant_by_axis


def raise_misspelled(draft: Draft) -> None:
    """Raises `RuleError` if the name of a mesh axis is probably a misspelling of an
    axis that the rules use.
    """
    if not draft.declared and draft.axes is None:
        return
    mesh = draft.mesh
    used = axes_used(draft.rows, draft.paths.rules, draft.axes)
    for axis, meant in misspelled_axes(mesh, draft.declared, used).items():
        sizes = {}
        for name, size in mesh.shape.items():
            corrected = meant if name == axis else name
            sizes[corrected] = size
        raise RuleError(
            f"no rule uses the mesh axis {axis!r} of size {mesh.shape[axis]}, and the"
            f" mesh {mesh} lacks {meant!r}, which the rules use: did you mean"
            f" `MeshSpec({sizes!r})`? If {axis!r} is for the batch alone, declare it:"
            f" `PathRules(..., mesh_axes=({axis!r},))`."
        )


class Unused(NamedTuple):
    """A path rule that shards no array, because no path matches it or because other
    rules come first.

    `number` is the rule's index. If the regex matches no path, `nearest` is the most
    similar path. Otherwise `arrays` are the paths that it matches, and `deciders` has a
    text for each of the rules that shard these arrays.
    """

    number: int
    nearest: str | None
    arrays: tuple[str, ...]
    deciders: tuple[str, ...]

    @property
    def text(self) -> str:
        """A phrase that says why the rule shards no array: it matches no path, and
        `nearest` is the nearest one; or `arrays`, the paths that it matches, go to
        `deciders`, such as "rule 0 ('attn')".
        """
        if self.nearest is not None:
            return f"matches no path of the tree; the nearest path is `{self.nearest}`"
        first, *others = self.arrays
        others_text = f" and {len(others)} more" if others else ""
        return (
            f"is shadowed: all that it matches (`{first}`{others_text}) goes to"
            f" {' and '.join(self.deciders)}"
        )


# Strings that are no path of any tree: only a regex that matches every path matches
# them.
_NO_PATHS = ("\0", "\0/\0")


def unused_rules(
    rules: Sequence[tuple[str, Any]],
    used: Mapping[Any, Any],
    flat: Flat,
    decided: Sequence[Any] | None = None,
    by: str = "",
) -> Iterator[Unused]:
    """Yields the path rules that shard no array of the tree `flat`. `rules` has pairs
    of a regex and a target. The keys of `used` are the indices of the rules that shard
    arrays.

    Rules that are no mistake are left out: an `optional` rule, a last rule that matches
    all paths, and a rule that matches only leaves that are not arrays. If the tree has
    no leaves, as the state of plain SGD, all are left out.

    `decided` has one entry per leaf, such as its logical names. Path rules do not apply
    to a leaf whose entry is not `None`. `by` is the phrase in messages for what shards
    such a leaf instead.
    """
    unused = []
    for number, (_, target) in enumerate(rules):
        if number not in used and not isinstance(target, Optional):
            unused.append(number)
    if not unused or not flat.leaves:
        return
    patterns = tuple(re.compile(regex) for regex, _ in rules)

    def decider(position: int) -> str:
        """The text for what shards the leaf at this index."""
        if decided is not None and decided[position] is not None:
            return by
        number = first_match(flat.paths[position], patterns)
        if number is None:
            return "no rule"
        return f"rule {number} ({rules[number][0]!r})"

    for number in unused:
        search = patterns[number].search
        regex = rules[number][0]
        matches = [position for position, path in enumerate(flat.paths) if search(path)]
        arrays = [position for position in matches if flat.is_array[position]]
        is_last = number == len(rules) - 1
        if not matches:
            nearest_path, *_ = difflib.get_close_matches(
                regex, flat.paths, n=1, cutoff=0.0
            )
            yield Unused(number=number, nearest=nearest_path, arrays=(), deciders=())
        # Only a regex that matches every path matches `_NO_PATHS`.
        elif arrays and not (is_last and all(map(search, _NO_PATHS))):
            deciders = tuple(dict.fromkeys(map(decider, arrays)))
            yield Unused(
                number=number,
                nearest=None,
                arrays=tuple([flat.paths[position] for position in arrays]),
                deciders=deciders,
            )


def raise_unused(
    what: str,
    rules: Matcher,
    flat: Flat,
    decided: Sequence[Any] | None = None,
    by: str = "",
) -> None:
    """Raises `RuleError` if a path rule in `rules` shards no array of the tree `flat`.
    `what` is the word for a rule in the message.

    Path rules do not apply to a leaf whose entry in `decided`, such as its logical
    names, is not `None`. `by` is the phrase in the message for what shards such a leaf.
    """
    unused = unused_rules(
        rules=rules.rules, used=rules.used, flat=flat, decided=decided, by=by
    )
    head = (
        "rules that never apply are mostly mistakes. Correct them, move them ahead of"
        " the rules that shadow them, take them out, mark those that other trees need"
        ' with `optional(target)`, or pass `unused="allow"`:'
    )
    texts = []
    for why in unused:
        regex = rules.rules[why.number][0]
        text = why.text
        empty = _first_empty(flat, regex)
        if why.nearest is not None and empty is not None:
            text = f"matches `{empty}`, which is `None` and no array"
        texts.append(f"  {what} {why.number}, the regex {regex!r}, {text}.")
    _refuse(RuleError, head, texts)


def _first_empty(flat: Flat, regex: str) -> str | None:
    """The first path of a tree that a regex matches and that holds `None`; `None` if
    there is no such path.
    """
    tree = jax.tree.unflatten(flat.treedef, flat.leaves)
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is None
    )
    for keys, node in nodes:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if node is None and re.search(regex, path):
            return path
    return None


def _axes_of(code: Code, row: Row) -> list[str]:
    """Returns the mesh axes in those reasons of the plan `row` that have the code
    `code`; for `Code.unmatched`, the logical names.
    """
    axes: list[str] = []
    for why in row.reasons:
        if why.code is code:
            axes += why.axes
    return axes


def raise_strict(arrays: Iterable[tuple[str, Row]], advice: str = "") -> None:
    """Raises `SpecError` if an array is not sharded as its rule requests. `arrays` has
    pairs of a path and a plan. `advice` is added to the first line of the message.
    """
    lines = []
    for path, row in arrays:
        for why in row.reasons:
            if not why.code.is_expected:
                lines.append(f"  leaf `{path}`, shape {row.shape}: {why}")
    _refuse(
        SpecError,
        f"`strict=True`, and these leaves are not sharded as asked{advice}:",
        lines,
    )
