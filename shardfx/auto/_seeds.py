"""Meshes and rules that engineers write by hand, as assignments of a step: a search looks at them too."""

from collections.abc import Iterable

from ._assignments import is_behind
from ._classes import Classes
from ._layouts import Assignment, Layouts


# What Megatron, T5X and MaxText cut by tensor parallelism, in the order in which an axis prefers them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")


def seeds(
    layouts: Layouts, never: frozenset[int] = frozenset()
) -> tuple[list[tuple[Assignment, ...]], list[tuple[Assignment, ...]]]:
    """Well-known ways to share a step, as far as it has what they cut.

    They are data parallelism, fully sharded, tensor parallelism, experts apart, and their pairs; then the same with
    sequences cut too. T5X's, MaxText's and Megatron's rules are among them.

    **Arguments:**

    - `layouts`: the step.
    - `never`: classes that are not cut.

    **Returns:**

    An assignment for each mesh axis of each way: of those that most people write, and of the others.
    """
    classes = layouts.classes
    free = set(layouts.numbers.values()) - never
    known = {classes.groups[number].name: number for number in sorted(free, reverse=True)}

    def assignment(*names: str) -> Assignment | None:
        order = tuple(dict.fromkeys(known[name] for name in names if name in known))
        return Assignment(order, any(is_behind(classes, number) for number in order)) if order else None

    own = [name for name in known if classes.in_model(classes.groups[known[name]]) and name not in (*_TENSOR, *_NEVER)]
    tensor = (*(name for name in _TENSOR[1:] if name in known), *sorted(own))
    batch, stored, whole = (
        assignment("batch"),
        assignment("batch", "embed"),
        assignment("batch", "embed", *_TENSOR, *own),
    )
    by_sequence, experts = assignment("sequence"), assignment("experts")
    cut, cut_too = assignment(*tensor), assignment(*tensor, "sequence")
    pairs = [(data, other) for data in (stored, batch) for other in (cut, experts)]
    usual = [(batch,), (stored,), (cut,), (experts,), *pairs]
    more = [(data, other) for data in (stored, batch) for other in (cut_too, by_sequence)]
    others = [(whole,), (cut_too,), (by_sequence,), *more, (stored, experts, cut), (batch, by_sequence, cut)]
    first = _whole_ways(usual)
    return first, [way for way in _whole_ways(others) if way not in first]


def _whole_ways(ways: Iterable[tuple[Assignment | None, ...]]) -> list[tuple[Assignment, ...]]:
    """The ways of which the step has all assignments, each once."""
    made = [(way, tuple(assignment for assignment in way if assignment is not None)) for way in ways]
    return list(dict.fromkeys(assignments for way, assignments in made if len(assignments) == len(way)))
