"""The leaves that a map copies unchanged, found from the paths alone.

A Python number has no shape and no sharding, so a map moves it only by a rule that
copies a leaf. A number that no such rule names stays behind, as functions do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ground.errors import MapError
from .._ground.text import printable
from .._ground.tree import Flat, flatten, is_number
from .binding import bound_steps, structs_of_flat
from .columns import read_paths
from .expression import Rules
from .patterns import pattern
from .pieces import Made, Struct


class NumberCopies(NamedTuple):
    """The Python numbers of a source, and which of them a map copies.

    - `kinds`: pairs of a number's path in the source and its type.
    - `routes`: pairs of a path in the target and the path in the source.
    """

    kinds: tuple[tuple[str, type], ...]
    routes: tuple[tuple[str, str], ...]


NO_NUMBERS = NumberCopies((), ())


def copied_from(steps: Sequence[Rules], path: str) -> str | None:
    """The path of the leaf of the source that a map of `steps` copies unchanged to the
    leaf `path` of its target; `None` if it makes that leaf in another way or not at
    all.
    """
    route: str | None = path
    for step in reversed(steps):
        if route is None:
            return None
        route = _copied_from(step, route)
    return route


def copied_to(steps: Sequence[Rules], path: str) -> str | None:
    """The path of the leaf of the target to which a map of `steps` copies the leaf
    `path` of its source unchanged, or `None`.
    """
    route: str | None = path
    for step in steps:
        if route is None:
            return None
        route = _copied_to(step, route)
    return route


def _copied_from(step: Rules, path: str) -> str | None:
    """The result of `copied_from` for one step."""
    for target, source in _copies(step):
        binding = pattern(target).matched(path)
        if binding is not None:
            return pattern(source).filled(binding)
    return None


def _copied_to(step: Rules, path: str) -> str | None:
    """The result of `copied_to` for one step."""
    for target, source in _copies(step):
        binding = pattern(source).matched(path)
        if binding is not None:
            return pattern(target).filled(binding)
    return None


def _copies(step: Rules) -> list[tuple[str, str]]:
    """For each rule of a step that copies a leaf: the path pattern of the target, and
    that of the source.
    """
    pairs = []
    for target, rule in step.rules:
        if rule.op == "leaf":
            pairs.append((rule.path, target) if step.inverted else (target, rule.path))
    return pairs


def number_paths(tree: object) -> list[str]:
    """The paths of the Python numbers of a tree."""
    return _numbers_of(flatten(tree))


def _numbers_of(flat: Flat) -> list[str]:
    """The paths of the Python numbers of a tree that was flattened."""
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    paths = []
    for path, leaf, is_array in rows:
        if not is_array and is_number(leaf):
            paths.append(path)
    return paths


class TargetLeaves(NamedTuple):
    """The leaves of a tree that a map is to make: the shape and dtype of each array by
    path, and the paths of the Python numbers.
    """

    structs: dict[str, Struct]
    numbers: list[str]


def target_leaves(tree: object) -> TargetLeaves:
    """The leaves of a tree that a map is to make."""
    flat = flatten(tree)
    return TargetLeaves(structs=structs_of_flat(flat), numbers=_numbers_of(flat))


def number_copies(
    steps: Sequence[Rules],
    numbers: Mapping[str, Any],
    targets: Iterable[str] | None = None,
) -> NumberCopies:
    """The Python numbers that a map of `steps` copies: the path and the type of each
    number of the source, and for each number that the target gets its path there and
    its path in the source.

    `numbers` has those of the source by path, and `targets` the paths of those of the
    target; `None` if the target has whatever the map makes.
    """
    kinds = tuple((path, type(number)) for path, number in numbers.items())
    if targets is None:
        pairs = [(copied_to(steps, path), path) for path in numbers]
    else:
        pairs = [(path, copied_from(steps, path)) for path in targets]
    routes: list[tuple[str, str]] = []
    for target, source in pairs:
        if target is not None and source is not None and source in numbers:
            routes.append((target, source))
    return NumberCopies(kinds, tuple(routes))


def bound_with(
    numbers: NumberCopies,
    steps: Sequence[Rules],
    source: Mapping[str, Struct],
    target: Mapping[str, Struct] | None,
) -> Mapping[str, Made]:
    """The arrays that a map of `steps` makes. Its rules find the Python numbers of the
    source as arrays of rank 0, which need not be used. `numbers` has the path and the
    type of each, and pairs of a path of the target and the one that is copied to it.

    Raises `MapError` if the map does not fit, or makes an array of a number.
    """
    if not numbers.kinds:
        return bound_steps(steps, source, target)
    # An array of rank 0 for each number of the source, by path.
    scalars = {path: Struct((), np.dtype(kind)) for path, kind in numbers.kinds}
    if steps[0].inverted:
        # An inverted step has a rule for each leaf of its source.
        scalars = {path: scalars[path] for _, path in numbers.routes}
    # The same, by the path that the number gets in the target.
    copied = {path: scalars[route] for path, route in numbers.routes}
    if target is not None:
        target = {**target, **copied}
    with_scalars = {**source, **scalars}
    leaves = bound_steps(steps, with_scalars, target, may_be_unused=scalars)
    arrays = {}
    for path, leaf in leaves.items():
        if path not in copied:
            arrays[path] = leaf
    for path, leaf in arrays.items():
        for name in dict.fromkeys(read_paths(leaf.pieces)):
            if name in scalars:
                raise MapError(
                    f"`{printable(path)}` would be made of `{printable(name)}`, which"
                    " is a Python number and no array; a rule copies a number as it is."
                    " Give the source an array there: `jnp.asarray(...)`."
                )
    return arrays
