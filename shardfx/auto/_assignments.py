"""Which assignments a mesh axis may have in a step: those of rules by hand, and orders of classes worth a look."""

import itertools
from collections.abc import Iterator

from .._ground.spec import entry_axes
from .._rules import AxisRules
from ._classes import Classes
from ._layouts import Assignment, Layouts


# What Megatron, T5X and MaxText cut by tensor parallelism, in the order in which an axis prefers them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")
# How many sets of classes lead an assignment, at most: those that most bytes have.
_SETS = 9


def assignments_of_rules(
    rules: AxisRules, classes: Classes, never: frozenset[int] = frozenset()
) -> dict[str, Assignment]:
    """The assignment that each mesh axis has by given rules: the names that it cuts, those of the first rules first.

    The classes `never` are not cut, whatever the rules say.
    """
    known = {group.name: number for number, group in enumerate(classes.groups) if group.roots and number not in never}
    orders: dict[str, dict[int, None]] = {}
    for name, target in rules.rules:
        for axis in entry_axes(target) if name in known else ():
            orders.setdefault(axis, {})[known[name]] = None
    return {axis: _assignment(tuple(order), classes) for axis, order in orders.items()}


def seeds(
    layouts: Layouts, never: frozenset[int] = frozenset()
) -> tuple[list[tuple[Assignment, ...]], list[tuple[Assignment, ...]]]:
    """Well-known ways to share a step, as far as it has what they cut.

    They are data parallelism, fully sharded, tensor parallelism, experts apart, and their pairs; then the same with
    sequences cut too. T5X's, MaxText's and Megatron's rules are among them.

    **Returns:**

    An assignment for each mesh axis of each way: of those that most people write, and of the others.
    """
    classes, free = layouts.classes, sorted({*layouts.numbers.values()} - never, reverse=True)
    known = {classes.groups[number].name: number for number in free}

    def ways(*each: tuple[tuple[str, ...], ...]) -> list[tuple[Assignment, ...]]:
        """The ways of which the step has all assignments, each once."""
        orders = [[tuple(dict.fromkeys(known[n] for n in names if n in known)) for names in way] for way in each]
        return list(dict.fromkeys(tuple(_assignment(order, classes) for order in way) for way in orders if all(way)))

    own = [name for name, n in known.items() if classes.in_model(classes.groups[n]) and name not in (*_TENSOR, *_NEVER)]
    batch, stored, sequence, experts = ("batch",), ("batch", "embed"), ("sequence",), ("experts",)
    cut = (*_TENSOR[1:], *sorted(own))
    pairs = itertools.product((stored, batch), (cut, experts))
    usual = ways((batch,), (stored,), (cut,), (experts,), *pairs)
    whole, cut_too = (*stored, *_TENSOR, *own), (*cut, *sequence)
    pairs = itertools.product((stored, batch), (cut_too, sequence))
    others = ways((whole,), (cut_too,), (sequence,), *pairs, (stored, experts, cut), (batch, sequence, cut))
    return usual, [way for way in others if way not in usual]


def _assignment(order: tuple[int, ...], classes: Classes) -> Assignment:
    return Assignment(order, any(is_behind(classes, number) for number in order))


def assignments_of(layouts: Layouts, never: frozenset[int] = frozenset()) -> Iterator[Assignment]:
    """Assignments by how many sets they try in turn: one, two, three. The most usual come first."""
    classes, weights = layouts.classes, _weights(layouts)
    numbers = [number for number in sorted(weights, key=lambda n: -weights[n]) if number not in never]
    sets = _sets(layouts, numbers)[:_SETS]
    # Three in turn: data that are cut in two ways, then what the parameters have.
    data = [group for group in sets if not any(classes.in_model(classes.groups[number]) for number in group)]
    model = [group for group in sets if group not in data]
    triples = [(a, b, c) for a in model for b in data for c in model if a != c]
    triples += [(a, b, c) for a in data for b in data for c in model if a != b]
    for order in itertools.chain(((group,) for group in sets), itertools.permutations(sets, 2), triples):
        flat = tuple(itertools.chain(*order))
        if len(set(flat)) == len(flat):
            yield _assignment(flat, classes)


def _weights(layouts: Layouts) -> dict[int, float]:
    """For each class how many bytes the arrays have, in sum, that it is in."""
    found = dict[int, float]()
    for value, parts in zip(layouts.program.values, layouts.flat, strict=True):
        for number in {number for number, _ in parts if number >= 0}:
            found[number] = found.get(number, 0.0) + value.bytes
    return found


def _sets(layouts: Layouts, numbers: list[int]) -> list[tuple[int, ...]]:
    """Classes that no array has two of, so that one axis can cut all of them: as many together as can be.

    The smallest powers of two limit how far a set can be cut, so sets without their least divisible classes follow.
    """
    together: set[tuple[int, int]] = set()
    for parts in layouts.flat:
        known = sorted({number for number, _ in parts if number >= 0})
        together.update(itertools.combinations(known, 2))

    def fits(group: list[int], number: int) -> bool:
        return all((min(a, number), max(a, number)) not in together for a in group)

    found: dict[tuple[int, ...], None] = {}
    for seed in numbers:
        group = [seed]
        for number in numbers:
            if number not in group and fits(group, number):
                group.append(number)
        found[tuple(sorted(group, key=numbers.index))] = None
    for group in list(found):
        by_size = sorted(group, key=lambda number: _twos(layouts.classes.groups[number].size))
        for count in range(1, len(group)):
            if _twos(layouts.classes.groups[by_size[count]].size) > _twos(
                layouts.classes.groups[by_size[count - 1]].size
            ):
                found[tuple(number for number in group if number not in by_size[:count])] = None
    return list(found)


def _twos(size: int) -> int:
    return (size & -size).bit_length()


def is_behind(classes: Classes, number: int) -> bool:
    """Whether the class stands behind another in an argument, and is no unit."""
    return any(
        place.at and place.at < classes.kept(classes.dims[place.argument][place.dim])
        for place in classes.groups[number].places
    )
