"""Checks of rules: compares rules with each other, with the axes of a mesh, and with
the sizes of the dimensions that they name. A `Group` is arrays that are planned alike
and whose paths differ only in numbers.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._ground.spec import entry_axes
from .._ground.text import between_numbers, entry_text
from .._plan import Group, axes_used, misspelled_axes
from .._rules import AxisRules, alias_chain, axes_in
from .finding import Finding, Severity
from .subject import Subject, mode_argument, rules_text
from .transposed import Names, Turned, turned_names


def dead_rules(subject: Subject) -> Iterator[Finding]:
    """Findings for axis rules that can never apply.

    A rule is blocked if another dimension of the array uses one of its mesh axes. It is
    tried only if all earlier rules of its logical name were blocked. A rule that has
    all mesh axes of an earlier rule of its name can therefore never apply: after
    `("mlp", "tensor")`, the rule `("mlp", ("data", "tensor"))` is always blocked. A
    rule without axes is never blocked, so no later rule of its name can apply.
    """
    if subject.axes is None:
        return
    for mode, rules in ((None, subject.axes.rules), *subject.axes.modes):
        # For each logical name, the rules that can apply, each with its mesh axes.
        rules_by_name: dict[str, list[tuple[int, frozenset[str]]]] = {}
        for number, (name, target) in enumerate(rules):
            axes = frozenset(entry_axes(target))
            effective_rules = rules_by_name.setdefault(name, [])
            deciders = [
                other for other, other_axes in effective_rules if other_axes <= axes
            ]
            if deciders:
                yield _dead_rule(mode, rules, number, deciders[0])
            else:
                effective_rules.append((number, axes))


def _dead_rule(
    mode: str | None,
    rules: Sequence[tuple[str, Any]],
    number: int,
    decider: int,
) -> Finding:
    """The finding for a rule of `mode` that never applies, because of the earlier rule
    `decider`.
    """
    name, target = rules[number]
    _, decider_target = rules[decider]
    table = rules_text(mode)
    why = "which applies wherever it could"
    if not entry_axes(decider_target):
        why = "which is never blocked"
    message = (
        f"the rule stands after rule {decider} of the same name, {name!r} ->"
        f" {entry_text(decider_target)}, {why}"
    )
    where = f"{table}[{number}] {name!r} -> {entry_text(target)}"
    fix = f"axes = axes.drop({number}{mode_argument(mode)})"
    return Finding(
        code="dead-rule",
        severity="warning",
        where=where,
        bytes=0,
        message=message,
        fix=fix,
    )


def unused_axes(subject: Subject, misspelled: Severity) -> Iterator[Finding]:
    """Findings for mesh axes of more than one device that no rule uses.

    If the rules use a similar name that the mesh lacks, the axis is probably
    misspelled. The finding then has the severity `misspelled`.
    """
    if subject.axes is None and subject.paths is None:
        return
    mesh = subject.content.mesh
    path_rules = () if subject.paths is None else subject.paths.rules
    declared: list[str] = []
    for rules in (subject.paths, subject.axes):
        if rules is not None:
            declared += rules.mesh_axes
    used = axes_used(subject.content.rows, path_rules, subject.axes)
    misspellings = misspelled_axes(mesh, declared, used)
    # Axis rules are for activations too; path rules alone do not say which axis shards
    # the batch.
    variable = "axes"
    severity: Severity = "warning"
    if subject.axes is None:
        variable = "paths"
        severity = "info"

    _, shard_bytes = subject.content.total_bytes
    for axis, size in mesh.shape.items():
        if size == 1 or axis in declared or axis in used:
            continue
        fix = f"{variable} = {variable}.extend(mesh_axes=({axis!r},))"
        advice = f"If it is for the batch alone, declare it: `{fix}`"
        if axis in misspellings:
            renamed = {}
            for name, count in mesh.shape.items():
                renamed[misspellings.get(name, name)] = count
            fix = f"mesh = MeshSpec({renamed!r})"
            advice = (
                f"The rules use {misspellings[axis]!r}, which the mesh lacks: if that"
                f" is meant, `{fix}`"
            )
        message = (
            f"no rule uses the mesh axis {axis!r} of size {size}: devices along it"
            f" hold the same. {advice}"
        )
        lost_bytes = shard_bytes - shard_bytes // size
        severity_of_axis = misspelled if axis in misspellings else severity
        yield Finding(
            code="unused-axis",
            severity=severity_of_axis,
            where=f"mesh axis {axis!r}",
            bytes=lost_bytes,
            message=message,
            fix=fix,
        )


# For each logical name, the sizes of its dimensions, each with the number of arrays
# that have it.
Counts = dict[str, collections.Counter[int]]


def contradicted_names(subject: Subject) -> Iterator[Finding]:
    """Findings for logical names that arrays use for dimensions of contradictory sizes.

    The sizes of two dimensions with one name contradict each other if neither divides
    the other, such as 512 and 768. One of the dimensions then probably has a wrong
    name, or the names of an array are in a wrong order.

    A name may stand for two axes on purpose, such as the inner widths of dense layers
    and of experts. Therefore a size is not reported if two arrays of one module have a
    dimension of this name and size, and no dimension with another name has this size. A
    size is not reported either if no rule maps the name to a mesh axis.
    """
    groups = [group for group in subject.content.groups if group.row.names is not None]
    names = [group.row.names or () for group in groups]
    # By the number of a group in `groups`, the right order of names in a wrong one.
    turned = turned_names(groups, names)
    right_orders = _orders(groups, names, turned)

    # Arrays whose names are in the wrong order are counted in the right order.
    right_names = [
        right_orders.get(number, order) for number, order in enumerate(names)
    ]
    # For each name, how many arrays have each size, and the size of most arrays.
    counts = _size_counts(groups, right_names)
    usual_sizes = _usual_sizes(counts)
    # The groups with a dimension of this name and size, if the usual size contradicts.
    contradictions: dict[tuple[str, int], list[Group]] = {}
    for number, group in enumerate(groups):
        if number in right_orders:
            right_order = right_orders[number]
            yield _wrong_order(subject, group, right_order, turned.get(number))
            continue
        for name, size in _named_sizes(names[number], group.row.shape):
            is_contradicted = size % usual_sizes[name] and usual_sizes[name] % size
            if is_contradicted and _is_sharded(name, subject.axes):
                contradictions.setdefault((name, size), []).append(group)

    for (name, size), contradicting in contradictions.items():
        names_of_size = {other for other, sizes in counts.items() if size in sizes}
        has_another_name = bool(names_of_size - {name})
        if not has_another_name and _in_one_module(contradicting):
            continue
        message = (
            f"{name!r} is {size} here, and {usual_sizes[name]} elsewhere; neither"
            " divides the other, so one name stands for two axes; give one of them a name of"
            " its own"
        )
        for group in contradicting:
            where = f"{group.where}, name {name!r}"
            fix = _own_name(subject, group, name, size)
            yield Finding(
                code="contradicted-name",
                severity="warning",
                where=where,
                bytes=0,
                message=message,
                fix=fix,
            )


def _wrong_order(
    subject: Subject,
    group: Group,
    right_order: Names,
    turned: Turned | None,
) -> Finding:
    """The finding about arrays whose logical names are in a wrong order. `turned` says
    which other array tells, if their names are exchanged.
    """
    names = group.row.names or ()
    message = (
        f"the names {names} stand on shape {group.row.shape}; elsewhere"
        " these names have the sizes that they would have here in the order"
        f" {right_order}"
    )
    if turned is not None:
        message = _turned_text(names, group, turned)
    return Finding(
        code="contradicted-name",
        severity="warning",
        where=group.where,
        bytes=0,
        message=message,
        fix=subject.fix(group, right_order, right_order),
    )


def _orders(
    groups: list[Group],
    names: list[Names],
    turned: Mapping[int, Turned],
) -> dict[int, Names]:
    """The right order of the names of each group whose names are in a wrong one, by the
    group's number in `groups`. `turned` has those that `turned_names` found.
    """
    usual_sizes = _usual_sizes(_size_counts(groups, names))
    orders = {number: turned_group.names for number, turned_group in turned.items()}
    for number, group in enumerate(groups):
        if number in orders:
            continue
        order = _order_of_usual_sizes(names[number], group.row.shape, usual_sizes)
        if order:
            orders[number] = order
    return orders


def _turned_text(names: Names, group: Group, turned: Turned) -> str:
    """The message about arrays whose names are turned, with the witness."""
    size = turned.witness.row.shape[_position(turned)]
    return (
        f"the names {names} stand on shape {group.row.shape}, and {turned.name!r} is"
        f" {size} in {turned.witness.where}: the array is stored as {turned.names}"
    )


def _position(turned: Turned) -> int:
    """The dimension of the witness that has the name."""
    return [*(turned.witness.row.names or ())].index(turned.name)


def _named_sizes(names: Names, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """The logical names of an array that are strings, each with the size of its
    dimension.
    """
    named = []
    for name, size in zip(names, shape, strict=False):
        if isinstance(name, str) and size:
            named.append((name, size))
    return named


def _size_counts(groups: list[Group], names: list[Names]) -> Counts:
    """How many arrays have each size of each logical name. `names` has the names of
    each group.
    """
    counts: Counts = {}
    for group, group_names in zip(groups, names, strict=True):
        for name, size in _named_sizes(group_names, group.row.shape):
            counts.setdefault(name, collections.Counter())[size] += len(group.paths)
    return counts


def _usual_sizes(counts: Counts) -> dict[str, int]:
    """The most frequent size of each logical name."""
    return {name: sizes.most_common(1)[0][0] for name, sizes in counts.items()}


def _order_of_usual_sizes(
    names: Names,
    shape: tuple[int, ...],
    usual_sizes: Mapping[str, int],
) -> Names | None:
    """The names of an array in another order, in which each name stands at a dimension
    of its size in `usual_sizes`.

    It is `None` if there is no such order, or if the present order is one. It is also
    `None` if the only name stands at a multiple of its usual size: such an array holds
    several projections in one, as queries, keys and values.
    """
    named_sizes = _named_sizes(names, shape)
    if len(named_sizes) == 1:
        name, size = named_sizes[0]
        if size % usual_sizes[name] == 0:
            return None
    # Five names have 120 orders; arrays of so many dimensions are rare.
    orders = itertools.permutations(names) if len(names) <= 4 else [names]
    fitting_orders = []
    for order in orders:
        # A name that stands only at dimensions of size 0 has no usual size.
        named_sizes = _named_sizes(order, shape)
        if all(usual_sizes.get(name) == size for name, size in named_sizes):
            fitting_orders.append(order)
    if not fitting_orders or names in fitting_orders:
        return None
    return fitting_orders[0]


def _is_sharded(name: str, axes: AxisRules | None) -> bool:
    """Whether a rule in `axes` maps the logical name to a mesh axis, in any mode
    ("decode"). `axes` may be `None`.
    """
    if axes is None:
        return False
    mapped_name = alias_chain(name, axes)[-1]
    return mapped_name in [name for name, _ in axes_in(axes)]


# The end of a path that names the array of a module, such as a projection's matrix.
_PARAMETER_OF_MODULE = re.compile(r"[/.](kernel|weight|scale|bias|embedding|value)$")


def _in_one_module(groups: list[Group]) -> bool:
    """Whether one module holds two or more different arrays of `groups`, as a layer
    holds its projections.
    """
    arrays = set()
    for group in groups:
        path = _PARAMETER_OF_MODULE.sub("", group.paths[0])
        module, _, name = path.rpartition("/")
        if module:
            arrays.add((between_numbers(module), between_numbers(name)))
    modules = {module for module, _ in arrays}
    return len(arrays) > len(modules)


def _own_name(subject: Subject, group: Group, name: str, size: int) -> str:
    """Code that renames the logical name `name` of dimensions of this size in the
    arrays of `group`, such as `mlp` to `mlp_768`. The new name has the same rules.

    A finished plan has no names, so the code sets the spec of the arrays instead.
    """
    if subject.is_plan:
        return subject.rule_fix(group.paths, group.row.spec)
    new_name = f"{name}_{size}"
    names: list[Any] = [*(group.row.names or ())]
    for dim, present in enumerate(names):
        if present == name:
            names[dim] = new_name
    lines = [subject.fix(group, tuple(names), tuple(names))]
    if subject.axes is None or new_name not in subject.axes.names:
        lines.append(f"axes = axes.with_alias({new_name!r}, of={name!r})")
    return "\n".join(lines)
