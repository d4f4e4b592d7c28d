"""Which rule of a map makes which leaf of the target.

A target's path gives the placeholders of its rule their values. Without a target, its
paths are inferred from those of the source.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._ground.errors import MapError
from .evaluate import evaluated
from .expression import From, Rules, leaves_of
from .patterns import Binding, near_hint, pattern, sum_of
from .problems import Problem, TreeLeaves, two_rules
from .shape_operations import dim_of, leaf_made, on_shapes


def matched_rules(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    problems: list[Problem],
) -> Iterable[tuple[str, From, Binding]]:
    """For each leaf of the target its path, the expression that makes it, and the
    values of the expression's placeholders.

    Leaves that no rule or several rules make, and rules that make no leaf, are appended
    to `problems`. Without a target, its leaves are those that the rules can make of
    `source`.
    """
    if target is None:
        return _inferred_rules(step, source, problems)
    rules = [(pattern(text), rule) for text, rule in step.rules]
    unused = {text: None for text, _ in step.rules}
    placed: list[tuple[str, From, Binding]] = []
    for path in target:
        texts = []
        matching: list[tuple[str, From, Binding]] = []
        for path_pattern, rule in rules:
            binding = path_pattern.matched(path)
            if binding is not None:
                texts.append(path_pattern.text)
                matching.append((path, rule, binding))
                unused.pop(path_pattern.text, None)
        if len(matching) == 1:
            placed += matching
        elif matching:
            problems.append(two_rules(path, texts[0], texts[1]))
        else:
            close = near_hint(path, dict(step.rules), "the rule for")
            problems.append((path, f"no rule makes it{close}"))
    for text in unused:
        close = near_hint(text, target)
        problems.append((text, f"this rule makes no leaf of the target{close}"))
    return placed


def _inferred_rules(
    step: Rules,
    source: TreeLeaves,
    problems: list[Problem],
) -> Iterator[tuple[str, From, Binding]]:
    """Yields, for each leaf that the rules can make of `source`, its path, the
    expression that makes it, and the values of the expression's placeholders. Problems
    are appended to `problems`.

    A rule makes one leaf for each set of values of its placeholders that the source
    has.
    """
    # The path pattern of the rule that makes a path.
    text_by_path: dict[str, str] = {}
    for text, rule in step.rules:
        try:
            bindings = list(_bindings(text, rule, source))
        except MapError as error:
            text_of_error = str(error).removesuffix(".")
            problems.append((text, text_of_error))
            continue
        if not bindings:
            first_leaf = next(iter(leaves_of(rule)), "")
            close = near_hint(first_leaf, source)
            problems.append((text, f"{rule} finds nothing in the source{close}"))
        for binding in bindings:
            path = pattern(text).filled(binding)
            assert path is not None
            if path in text_by_path:
                problems.append(two_rules(path, text_by_path[path], text))
                continue
            text_by_path[path] = text
            yield path, rule, binding


def _bindings(text: str, rule: From, source: TreeLeaves) -> Iterator[dict[str, Any]]:
    """Yields the values of the placeholders in a target's path `text`, one dict for
    each leaf that `rule` can make.

    For the target `w/{i}` made of `layers/{i}`, it yields {"i": 0} and {"i": 1} if the
    source has the leaves `layers/0` and `layers/1`.
    """
    names = pattern(text).names
    bindings: list[dict[str, Any]] = [{}]
    for leaf in leaves_of(rule):
        if set(pattern(leaf).names).isdisjoint(names):
            continue
        bindings = _joined(bindings, _values_in(source, leaf, names))
    # Without duplicates, and without the values of other placeholders in the key.
    unique = {
        tuple((name, binding.get(name)) for name in names): binding
        for binding in bindings
    }
    for binding in unique.values():
        missing = [name for name in names if name not in binding]
        yield from _counted(missing, binding, rule, source)


def _values_in(
    source: TreeLeaves,
    leaf: str,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """The different values of the placeholders `names` for which the source has the
    path pattern `leaf`.
    """
    bindings: dict[tuple[tuple[str, Any], ...], None] = {}
    for path in source:
        binding = pattern(leaf).matched(path)
        if binding is not None:
            items = tuple((name, binding[name]) for name in names if name in binding)
            bindings[items] = None
    return [dict(items) for items in bindings]


def _joined(
    bindings: Sequence[dict[str, Any]],
    others: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Each pair of a binding and another one as one, if both give the same values."""
    pairs = []
    for binding in bindings:
        for other in others:
            if all(binding.get(name, value) == value for name, value in other.items()):
                pairs.append({**binding, **other})
    return pairs


def _counted(
    names: Sequence[str],
    binding: dict[str, Any],
    rule: From,
    source: TreeLeaves,
) -> Iterator[dict[str, Any]]:
    """Yields `binding` extended by values of the placeholders `names`, which occur only
    in `at` operations.

    The operation `at("i")` selects entry i of a dimension, so there is one result for
    each entry. `rule` is the expression that makes the target. For `From("w").at("i")`,
    where `w` has shape (2, 8): i = 0 and i = 1.
    """
    if not names:
        yield binding
        return
    name, selection = _innermost(rule, names)
    if selection is None:
        raise MapError(
            f"nothing in {rule} gives `{{{name}}}` a value; give the target, `like=...`"
        )
    # The array from which `at` selects, for its shape.
    operand = evaluated(
        expression=selection.of[0],
        binding=binding,
        leaves=source,
        value_of_leaf=lambda path: leaf_made(path, source[path]),
        apply_operation=on_shapes,
    )
    index, dim = selection.args
    selected_dim = dim_of(dim, len(operand.shape), "at")
    size = operand.shape[selected_dim]
    others = [other for other in names if other != name]
    for number in range(size):
        solved = sum_of(str(index)).solved(number)
        if solved is not None:
            _, value = solved
            numbered = {**binding, name: value}
            yield from _counted(others, numbered, rule, source)


def _innermost(rule: From, names: Sequence[str]) -> tuple[str, From | None]:
    """Of `names`, the first whose `at` operation has an operand without another one;
    and this operation. The operand's shape is then known.
    """
    for name in names:
        selection = _selection_by(rule, name)
        if selection is None:
            continue
        operand = selection.of[0]
        if all(_selection_by(operand, other) is None for other in names):
            return name, selection
    return names[0], _selection_by(rule, names[0])


def _selection_by(rule: From, name: str) -> From | None:
    """The outermost `at` operation of an expression that selects by the placeholder
    `name`, or `None`.
    """
    if rule.op == "at":
        index = rule.args[0]
        if isinstance(index, str) and name in sum_of(index).names:
            return rule
    for operand in rule.of:
        selection = _selection_by(operand, name)
        if selection is not None:
            return selection
    return None
