"""Meshes and rules that engineers write by hand, as roles of a step: a search looks at them too."""

from collections.abc import Iterable

from ._classes import Classes
from ._layouts import Layouts, Role
from ._roles import is_behind


# What Megatron, T5X and MaxText cut by tensor parallelism, in the order in which an axis prefers them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")


def seeds(
    layouts: Layouts, never: frozenset[int] = frozenset()
) -> tuple[list[tuple[Role, ...]], list[tuple[Role, ...]]]:
    """Well-known ways to share a step, as far as it has what they cut.

    They are data parallelism, fully sharded, tensor parallelism, experts apart, and their pairs; then the same with
    sequences cut too. T5X's, MaxText's and Megatron's rules are among them.

    **Arguments:**

    - `layouts`: the step.
    - `never`: classes that are not cut.

    **Returns:**

    A role for each mesh axis of each way: of those that most people write, and of the others.
    """
    classes = layouts.classes
    free = set(layouts.numbers.values()) - never
    known = {classes.groups[number].name: number for number in sorted(free, reverse=True)}

    def role(*names: str) -> Role | None:
        order = tuple(dict.fromkeys(known[name] for name in names if name in known))
        return Role(order, any(is_behind(classes, number) for number in order)) if order else None

    own = [name for name in known if _is_model(classes, known[name]) and name not in (*_TENSOR, *_NEVER)]
    tensor = (*(name for name in _TENSOR[1:] if name in known), *sorted(own))
    batch, stored, whole = role("batch"), role("batch", "embed"), role("batch", "embed", *_TENSOR, *own)
    by_sequence, experts = role("sequence"), role("experts")
    cut, cut_too = role(*tensor), role(*tensor, "sequence")
    pairs = [(data, other) for data in (stored, batch) for other in (cut, experts)]
    usual = [(batch,), (stored,), (cut,), (experts,), *pairs]
    more = [(data, other) for data in (stored, batch) for other in (cut_too, by_sequence)]
    others = [(whole,), (cut_too,), (by_sequence,), *more, (stored, experts, cut), (batch, by_sequence, cut)]
    first = _whole_ways(usual)
    return first, [way for way in _whole_ways(others) if way not in first]


def _whole_ways(ways: Iterable[tuple[Role | None, ...]]) -> list[tuple[Role, ...]]:
    """The ways of which the step has all roles, each once."""
    made = [(way, tuple(role for role in way if role is not None)) for way in ways]
    return list(dict.fromkeys(roles for way, roles in made if len(roles) == len(way)))


def _is_model(classes: Classes, number: int) -> bool:
    return any(place.argument in classes.model for place in classes.groups[number].places)
