"""Well-known sharding strategies, and the axis assignments that a search tries.

An axis assignment is the logical axes that one mesh axis shards, in order of
preference. A strategy is one axis assignment per mesh axis.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._ground.spec import entry_axes
from .._rules import AxisRules
from ._classes import Classes
from ._layouts import Assignment, Layouts


# The dimensions that tensor parallelism shards in Megatron, T5X and MaxText, in the
# order in which an axis prefers them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")
# Names that `name_axes` gives dimensions of usual models. A rule for one of them is no
# misspelling, even if the step has another of them.
USUAL_NAMES = ("batch", "sequence", *_TENSOR, *_NEVER)
# The number of sets of logical axes that assignments are made of: the sets with the
# most bytes.
_MOST_SETS = 9


def assignments_of_rules(
    rules: AxisRules,
    classes: Classes,
    never: frozenset[int] = frozenset(),
) -> dict[str, Assignment]:
    """The axis assignment of each mesh axis under given rules, in the order of the
    rules. The logical axes `never` are not sharded, whatever the rules say.
    """
    numbers: dict[str, int] = {}
    for number, logical in enumerate(classes.axes):
        # An axis without roots was merged into another one.
        if logical.roots and number not in never:
            numbers[logical.name] = number

    # Dicts keep the order of the rules.
    orders: dict[str, dict[int, None]] = {}
    for name, target in rules.rules:
        if name not in numbers:
            continue
        for axis in entry_axes(target):
            orders.setdefault(axis, {})[numbers[name]] = None
    return {axis: tuple(order) for axis, order in orders.items()}


class Strategies(NamedTuple):
    """Well-known sharding strategies: usual ones, and others. A strategy is one axis
    assignment per mesh axis.
    """

    usual: list[tuple[Assignment, ...]]
    others: list[tuple[Assignment, ...]]


def well_known_strategies(
    layouts: Layouts,
    never: frozenset[int] = frozenset(),
) -> Strategies:
    """Well-known sharding strategies for the logical axes that the step has, without
    `never`.

    The usual ones are data parallelism, fully sharded data parallelism, tensor
    parallelism, expert parallelism, and pairs of these. The others shard sequences too.
    Together they include the rules of T5X, MaxText and Megatron.
    """
    classes = layouts.classes
    free_axes = set(layouts.axis_of_root.values()) - never
    numbers: dict[str, int] = {}
    # Dimensions of the model that no well-known strategy names.
    other_names: list[str] = []
    for number in sorted(free_axes, reverse=True):
        numbers[classes.axes[number].name] = number
    for name, number in numbers.items():
        is_of_model = classes.in_model(classes.axes[number])
        if is_of_model and name not in _TENSOR and name not in _NEVER:
            other_names.append(name)

    batch = ("batch",)
    fsdp = ("batch", "embed")
    sequence = ("sequence",)
    experts = ("experts",)
    # Without the first, "experts".
    tensor = (*_TENSOR[1:], *sorted(other_names))
    tensor_or_sequence = tensor + sequence
    everything = (*fsdp, *_TENSOR, *other_names)
    usual_names = [
        (batch,),
        (fsdp,),
        (tensor,),
        (experts,),
        *itertools.product((fsdp, batch), (tensor, experts)),
    ]
    names_of_others = [
        (everything,),
        (tensor_or_sequence,),
        (sequence,),
        *itertools.product((fsdp, batch), (tensor_or_sequence, sequence)),
        (fsdp, experts, tensor),
        (batch, sequence, tensor),
    ]
    usual = _by_number(usual_names, numbers)
    others = _by_number(names_of_others, numbers)
    others = [strategy for strategy in others if strategy not in usual]
    return Strategies(usual=usual, others=others)


def _by_number(
    strategies: Sequence[tuple[tuple[str, ...], ...]],
    numbers: Mapping[str, int],
) -> list[tuple[Assignment, ...]]:
    """The strategies with each name replaced by the number of its logical axis, without
    duplicates. Names that the step lacks are left out. A strategy is left out if the
    step has none of the names for one of its mesh axes. A strategy has names of logical
    axes for each of its mesh axes.
    """
    numbered: dict[tuple[Assignment, ...], None] = {}
    for strategy in strategies:
        assignments = []
        for names in strategy:
            assignment = [numbers[name] for name in names if name in numbers]
            assignments.append(tuple(dict.fromkeys(assignment)))
        if all(assignments):
            numbered[tuple(assignments)] = None
    return list(numbered)


def assignments_of(
    layouts: Layouts,
    never: frozenset[int] = frozenset(),
) -> Iterator[Assignment]:
    """Yields the axis assignments to try, simple ones first, without the logical axes
    `never`. Each assignment concatenates one to three sets of logical axes that one
    mesh axis can shard together, if they have no axis in common.
    """
    numbers = [number for number in _by_bytes(layouts) if number not in never]
    sets = _sets(layouts, numbers)[:_MOST_SETS]
    for order in _orders(layouts, sets):
        flat = tuple(itertools.chain.from_iterable(order))
        if len(set(flat)) == len(flat):
            yield flat


def _by_bytes(layouts: Layouts) -> list[int]:
    """The numbers of the logical axes, those of the values with the most bytes first."""
    # For each axis, the bytes of all values that have it. The sub-dimensions of a value
    # are pairs of a logical axis (-1 for none) and an index.
    bytes_of_axes = Counter[int]()
    for value, sub_dims in zip(layouts.program.values, layouts.sub_dims, strict=True):
        axes = {number for number, _ in sub_dims if number >= 0}
        bytes_of_axes.update(dict.fromkeys(axes, value.bytes))
    return [number for number, _ in bytes_of_axes.most_common()]


def _orders(
    layouts: Layouts,
    sets: Sequence[tuple[int, ...]],
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields each set alone, each pair of sets, and triples: two sets of the data and
    one of the parameters, or one of the data and two of the parameters. A set is
    logical axes that one mesh axis can shard together.
    """
    classes = layouts.classes
    data = []
    model = []
    for group in sets:
        axes = [classes.axes[number] for number in group]
        if any(map(classes.in_model, axes)):
            model.append(group)
        else:
            data.append(group)

    for group in sets:
        yield (group,)
    yield from itertools.permutations(sets, 2)
    for first, second, third in itertools.product(model, data, model):
        if first != third:
            yield first, second, third
    for first, second, third in itertools.product(data, data, model):
        if first != second:
            yield first, second, third


def _sets(layouts: Layouts, numbers: list[int]) -> list[tuple[int, ...]]:
    """The largest sets of the logical axes `numbers` that one mesh axis can shard
    together: no array has two axes of one set.

    The size of the mesh axis must divide the sizes of all logical axes in the set. So a
    logical axis with few factors of 2 in its size limits the set. Smaller sets without
    such axes follow the largest ones.
    """
    # For each axis, those of the arrays that have it, itself included.
    beside: dict[int, set[int]] = {}
    for sub_dims in layouts.sub_dims:
        axes_of_array = {number for number, _ in sub_dims}
        for number in axes_of_array:
            beside.setdefault(number, set()).update(axes_of_array)
    sets: dict[tuple[int, ...], None] = {}
    for seed in numbers:
        group = [seed]
        for number in numbers:
            if beside[number].isdisjoint(group):
                group.append(number)
        group.sort(key=numbers.index)
        sets[tuple(group)] = None

    # The largest power of 2 that divides the size of each logical axis.
    powers = [logical.size & -logical.size for logical in layouts.classes.axes]
    for group in list(sets):
        powers_of_group = {powers[number] for number in group}
        for least in sorted(powers_of_group)[1:]:
            smaller = [number for number in group if powers[number] >= least]
            sets[tuple(smaller)] = None
    return list(sets)
