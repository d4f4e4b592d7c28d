"""Finds arrays whose logical names stand at each other's dimensions, as the names of
weights that are stored transposed do. The sizes of other arrays with these names tell.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._plan import Group


# The logical names of the dimensions of an array.
Names = tuple[Any, ...]


class Turned(NamedTuple):
    """The names of an array in the right order, and the group and the name that say
    so: in this group's arrays, the name has another size.
    """

    names: Names
    witness: Group
    name: str


def turned_names(groups: Sequence[Group], names: Sequence[Names]) -> dict[int, Turned]:
    """Maps the indices of groups whose names are turned to their right order. `names`
    has the logical names of each group.

    The arrays that have only one of two names decide, such as biases and norms: those
    of one module, and then those of the whole tree.
    """
    turned: dict[int, Turned] = {}
    scopes = dict.fromkeys(_modules(groups))
    for scope in (*scopes, tuple(range(len(groups)))):
        for number, turned_of_group in _turned_in(scope, groups, names):
            turned.setdefault(number, turned_of_group)
    return turned


def _modules(groups: Sequence[Group]) -> Iterator[tuple[int, ...]]:
    """Yields for each module of more than one array the indices of its groups."""
    numbers_by_module: dict[str, dict[int, None]] = {}
    for number, group in enumerate(groups):
        for path in group.paths:
            # A regex would take three times as long for the thousands of paths.
            stop = max(path.rfind("/"), path.rfind("."))
            if stop > 0:
                numbers_by_module.setdefault(path[:stop], {})[number] = None
    for numbers in numbers_by_module.values():
        if len(numbers) > 1:
            yield tuple(numbers)


def _turned_in(
    scope: Sequence[int],
    groups: Sequence[Group],
    names: Sequence[Names],
) -> Iterator[tuple[int, Turned]]:
    """Yields the index of each group of a scope whose names are turned, with their
    right order.

    `scope` has the indices of the groups that are compared. Take two names, such as
    "in" and "out". The weights have both, at one size each; a bias has only "out". If
    "out" has in every bias the size that "in" has in the weights, the names of the
    weights stand at each other's dimensions.
    """
    # By index of a group, the size of each of its names.
    sizes = {number: _sizes(names[number], groups[number]) for number in scope}
    numbers_by_pair: dict[tuple[str, str], list[int]] = {}
    for number, size_by_name in sizes.items():
        for pair in itertools.combinations(sorted(size_by_name), 2):
            numbers_by_pair.setdefault(pair, []).append(number)

    for (first, second), numbers in numbers_by_pair.items():
        first_sizes = {sizes[number][first] for number in numbers}
        second_sizes = {sizes[number][second] for number in numbers}
        # Arrays of several sizes, or square ones, say nothing about the order.
        if len(first_sizes) > 1 or len(second_sizes) > 1 or first_sizes == second_sizes:
            continue
        # The names are turned if each other array that has one of the two names has it
        # at the size that the other name has here. At least one such array, a witness,
        # must be there.
        expected = {first: second_sizes, second: first_sizes}
        witnesses: list[tuple[int, str]] = []
        is_turned = True
        for number in scope:
            if number in numbers:
                continue
            for name, turned_sizes in expected.items():
                size = sizes[number].get(name)
                if size is not None:
                    witnesses.append((number, name))
                    is_turned = is_turned and size in turned_sizes
        if witnesses and is_turned:
            witness, name = witnesses[0]
            for number in numbers:
                order = _exchanged(names[number], first, second)
                turned = Turned(
                    names=order,
                    witness=groups[witness],
                    name=name,
                )
                yield number, turned


def _sizes(names: Names, group: Group) -> dict[str, int]:
    """The size of each logical name of an array, but for empty dimensions and those of
    several names.
    """
    sizes = {}
    for name, size in zip(names, group.row.shape, strict=False):
        if isinstance(name, str) and size:
            sizes[name] = size
    return sizes


def _exchanged(names: Names, first: str, second: str) -> Names:
    """The names of an array with two of them in each other's place."""
    exchanged = {first: second, second: first}
    order = []
    for name in names:
        is_name = isinstance(name, str)
        order.append(exchanged.get(name, name) if is_name else name)
    return tuple(order)
