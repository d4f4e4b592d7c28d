"""The pieces of a map for given leaves of both trees, checked before anything is read
or moved.

A map has one or more steps, each with its rules. `source` and `target` are the leaves
of both trees, by path. If the target is `None`, its leaves are inferred from the
source. A `Made` is a leaf that a map makes: its shape, its dtype, and the pieces
(strided copies) that fill it.
"""

import itertools as it
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._ground.errors import MapError
from .._ground.text import between_numbers
from .._ground.tree import Flat, flatten
from .entries import EntryRule
from .evaluate import LeavesMade
from .expression import From, NamedSizes, Rules, counted_leaf, leaves_of
from .inverse import backward, through
from .patterns import Binding, Pattern, near_hint, pattern
from .pieces import Made, Struct
from .problems import Problem, TreeLeaf, TreeLeaves, joined_paths, raise_problems
from .rule_places import matched_rules
from .shape_operations import cast


def bound_steps(
    steps: Sequence[Rules],
    source: Mapping[str, Struct],
    target: Mapping[str, Struct] | None = None,
    may_be_unused: Collection[str] = (),
) -> Mapping[str, Made]:
    """The leaves that a map makes by path, in the target's order, each with the pieces
    that copy it from leaves of `source`. Raises `MapError` with all problems of the
    map. The leaves `may_be_unused` of the source need not be used.
    """
    first, *others = steps
    first_target, *other_targets = _targets(steps, target)
    # The leaves that a step makes: with the pieces that copy them from the leaves
    # before it, and with those that copy them from the map's source.
    leaves = _leaves_of_step(first, source, first_target, may_be_unused)
    leaves_from_source = leaves
    for step, step_target in zip(others, other_targets, strict=True):
        leaves = _leaves_of_step(step, leaves, step_target, ())
        leaves_from_source = through(leaves, leaves_from_source)
    return leaves_from_source


def _targets(
    steps: Sequence[Rules],
    target: Mapping[str, Struct] | None,
) -> Sequence[Mapping[str, Struct] | None]:
    """The leaves that each step of a map makes; `None` where they are unknown. The last
    step makes `target`.

    Each step but the last makes the source of the next step. This source is known if
    the next step is inverted and its target is known, since the rules of an inverted
    step make its source from its target.
    """
    targets = [target]
    for step in reversed(steps[1:]):
        step_target = targets[-1]
        step_source = None
        if step.inverted and step_target is not None:
            leaves = _leaves_forward(step, step_target, None)
            step_source = structs_of(leaves, leaves.values())
        targets.append(step_source)
    return targets[::-1]


def _leaves_of_step(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    may_be_unused: Collection[str],
) -> Mapping[str, Made]:
    """The leaves that one step of a map makes. The leaves `may_be_unused` of the source
    need not be used; an inverted step uses what its rules make.
    """
    if not step.inverted:
        return _leaves_forward(step, source, target, may_be_unused)
    if target is None:
        raise MapError(
            "an inverted map does not say what its target is, as a concatenation does"
            " not say how long its parts are; give the structs of the target,"
            " `like=...`, or write a map in this direction."
        )
    # The rules of an inverted step make its source from its target.
    forward = _leaves_forward(step, target, source)
    return backward(forward, target)


def _leaves_forward(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    may_be_unused: Collection[str] = (),
) -> Mapping[str, Made]:
    """The leaves that the rules of one step make, in the direction in which they are
    written: those of `target`, or all that the rules can make if it is `None`.

    Raises `MapError` with all problems of the rules, of the sizes that the step
    demands, and of leaves of the source that no rule uses, unless they are in
    `may_be_unused`, `drop` or `rest`.
    """
    texts_left_out = (*step.drop, *step.rest)
    left_out = []
    for text in texts_left_out:
        left_out.append(pattern(text))
    problems = list(_odd_sizes(step.source_sizes, source, left_out))
    leaves: dict[str, Made] = {}
    used: dict[str, None] = dict.fromkeys(may_be_unused)
    leaves_of_failed_rules: list[Pattern] = []
    # Notes in `used` the leaves of the source that the rules ask for.
    leaves_made = LeavesMade(source, used)
    # By identity: the hash of an expression is that of all its operands.
    entry_rules = {id(rule): EntryRule(rule, leaves_made) for _, rule in step.rules}
    for path, rule, binding in matched_rules(step, source, target, problems):
        try:
            leaf = entry_rules[id(rule)].made(binding)
        except MapError as error:
            text = f"{str(error).removesuffix('.')}. It is made by {rule}"
            problems.append((path, text))
            leaves_of_failed_rules += map(pattern, leaves_of(rule))
            continue
        if target is not None:
            leaf = _fitting(
                path=path,
                rule=rule,
                leaf=leaf,
                target=target[path],
                casts=step.casts,
                problems=problems,
            )
        leaves[path] = leaf

    problems += _odd_sizes(step.target_sizes, leaves, [])
    # Leaves that only a failed rule uses are not reported as unused.
    left_out += dict.fromkeys(leaves_of_failed_rules)
    problems += _missing_drops(step, source)
    problems += _behind_gaps(step, source, used)
    problems += _unused(source, used, left_out)
    if problems:
        raise_problems(problems)
    if target is None:
        return leaves
    return {path: leaves[path] for path in target}


def _odd_sizes(
    layout: Sequence[NamedSizes],
    leaves: TreeLeaves,
    left_out: Sequence[Pattern],
) -> Iterator[Problem]:
    """Yields a problem for each leaf whose shape is not that of its layout, unless its
    path matches one of `left_out`. The `layout` has for path patterns the sizes of the
    leaves, and how many values their placeholders have.
    """
    if not layout:
        return
    for path, leaf in leaves.items():
        if _is_matched(path, left_out):
            continue
        for named in layout:
            binding = pattern(named.path).matched(path)
            if binding is None:
                continue
            text = _odd_count(named, binding) or _odd_shape(named, tuple(leaf.shape))
            if text:
                yield path, text


def _is_matched(path: str, patterns: Sequence[Pattern]) -> bool:
    return any(paths.matched(path) is not None for paths in patterns)


def _odd_count(named: NamedSizes, binding: Binding) -> str:
    """What is wrong with the number of a leaf, the value of a placeholder, if the
    layout has fewer; else "". `binding` has the values of the placeholders in the
    leaf's path, and `named.counts` the number of values of each in the layout.
    """
    for name, count in named.counts:
        value = binding.get(name)
        if isinstance(value, int) and value >= count:
            return (
                f"its layout has {count} `{name}`, so the last is {count - 1}; if the"
                f" tree has more, say so: `layout.with_sizes({name}={value + 1})`"
            )
    return ""


def _odd_shape(named: NamedSizes, shape: tuple[int, ...]) -> str:
    """What is wrong with the shape of a leaf, if the layout gives it another; else "".
    A dimension whose size the layout does not say may have any.
    """
    hint = ""
    if len(shape) == len(named.sizes):
        # The axes whose sizes the layout says otherwise, with their sizes.
        odd_axes = [
            (axis, actual)
            for axis, size, actual in zip(named.axes, named.sizes, shape, strict=True)
            if size not in (None, actual)
        ]
        if not odd_axes:
            return ""
        for axis, actual in odd_axes:
            if " " not in axis:
                change = f"layout.with_sizes({axis}={actual})"
                hint = f"; if that is meant, say so: `{change}`"
                break
    axes = ", ".join(named.axes)
    return (
        f"it has shape {shape}, and by the sizes of its layout ({axes}) it would be"
        f" {named.sizes}{hint}"
    )


def _fitting(
    path: str,
    rule: From,
    leaf: Made,
    target: TreeLeaf,
    casts: bool,
    problems: list[Problem],
) -> Made:
    """The leaf `path` in the dtype of the target. What does not fit the target is
    appended to `problems`: a shape, or a dtype without `casts`, which allows any cast.
    """
    shape = tuple(target.shape)
    if leaf.shape != shape:
        hint = ""
        if leaf.shape[::-1] == shape:
            hint = f"; torch keeps weights as [out, in]: {rule}.T"
        elif sorted(leaf.shape) == sorted(shape):
            hint = f"; the same sizes in another order: {rule}.transpose(...)"
        text = f"{rule} has shape {leaf.shape}, and the target {shape}{hint}"
        problems.append((path, text))
        return leaf
    if target.dtype is None or leaf.dtype == target.dtype:
        return leaf
    if not casts:
        text = (
            f"{rule} is {leaf.dtype}, and the target {target.dtype}; write"
            f" {rule}.cast('{target.dtype}'), or `TreeMap(..., casts=True)` for all"
        )
        problems.append((path, text))
        return leaf
    try:
        return cast(leaf, target.dtype)
    except MapError as error:
        problems.append((path, str(error).removesuffix(".")))
    return leaf


def _missing_drops(step: Rules, source: TreeLeaves) -> Iterator[Problem]:
    """Yields a problem for each dropped path that the source does not have."""
    # The target of an inverted map need not have the dropped leaves.
    if step.inverted:
        return
    for text in step.drop:
        if not any(pattern(text).matched(path) is not None for path in source):
            close = near_hint(text, source)
            yield text, f"`drop` names it, and the source has no such leaf{close}"


def _unused(
    source: TreeLeaves,
    used: Mapping[str, None],
    left_out: Sequence[Pattern],
) -> Iterator[Problem]:
    """Yields a problem for each kind of leaf that no rule uses, unless its path matches
    one of `left_out`. The paths of one kind differ only in numbers. `used` has the
    paths of the leaves that rules use.
    """
    paths_by_kind: dict[object, list[str]] = {}
    for path in source:
        if path not in used and not _is_matched(path, left_out):
            paths_by_kind.setdefault(between_numbers(path), []).append(path)
    for paths in paths_by_kind.values():
        yield (
            f"source `{joined_paths(paths)}`",
            f'nothing is made of it; say so if that is meant: `drop=["{paths[0]}"]`',
        )


def _behind_gaps(
    step: Rules,
    source: TreeLeaves,
    used: Mapping[str, None],
) -> Iterator[Problem]:
    """Yields a problem for each `stack` operation that leaves out leaves of the source.

    A `stack` without a count ends at the first number without a leaf. With leaves 0, 1
    and 3, it leaves out leaf 3. `used` has the paths of the leaves that the rules use.
    """
    unused = [path for path in source if path not in used]
    stacks: dict[tuple[str, str], None] = {}
    for _, rule in step.rules:
        stacks |= dict.fromkeys(_endless(rule))
    for placeholder, text in stacks:
        for path in unused:
            binding = pattern(text).matched(path)
            if binding is None:
                continue
            first = pattern(text).filled({**binding, placeholder: 0})
            if first in used:
                problem = (
                    f"`.stack({placeholder!r})` ends before it, at a number without a"
                    f" leaf; give a count: `.stack({placeholder!r}, count=...)`"
                )
                yield path, problem
                break


def _endless(rule: From) -> Iterator[tuple[str, str]]:
    """Yields each placeholder that a `stack` operation without a count iterates over,
    and the first path that has it.

    For `From("layers/{i}/w").stack("i")`: ("i", "layers/{i}/w"). The arguments of
    `stack` are the placeholder, the dimension, and the count if there is one.
    """
    if rule.op == "stack" and len(rule.args) == 2:
        text = counted_leaf(rule)
        if text is not None:
            yield rule.args[0], text
    for operand in rule.of:
        yield from _endless(operand)


def structs_of(paths: Iterable[str], leaves: Iterable[Any]) -> dict[str, Struct]:
    """The shape and dtype of each leaf, by path. Equal ones are one object."""
    shared: dict[object, Struct] = {}
    structs = {}
    for path, leaf in zip(paths, leaves, strict=True):
        kind = (leaf.shape, leaf.dtype)
        struct = shared.get(kind)
        if struct is None:
            struct = shared[kind] = Struct(tuple(leaf.shape), leaf.dtype)
        structs[path] = struct
    return structs


def tree_structs(tree: object) -> dict[str, Struct]:
    """The shape and dtype of each array of a tree, by path. A plan stands for the tree
    that it was made for.
    """
    return structs_of_flat(flatten(tree))


def structs_of_flat(flat: Flat) -> dict[str, Struct]:
    """The shape and dtype of each array of a tree that was flattened, by path."""
    paths = it.compress(flat.paths, flat.is_array)
    leaves = it.compress(flat.leaves, flat.is_array)
    return structs_of(paths, leaves)
