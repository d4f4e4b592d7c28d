"""Meshes and rules that engineers write by hand, as roles of a step: a search looks at them too."""

from collections.abc import Iterable

from .classes import Classes
from .layouts import Layouts, Role
from .roles import is_behind


# What Megatron, T5X and MaxText cut by tensor parallelism, in the order in which an axis prefers them.
_TENSOR = ("experts", "heads", "kv_heads", "mlp", "hidden", "vocab", "classes")
_NEVER = ("layers", "embed", "norm", "positions", "head_dim", "query_groups")


def seeds(layouts: Layouts, never: frozenset[int] = frozenset()) -> list[tuple[Role, ...]]:
    """Well-known ways to share a step, as far as it has what they cut.

    They are data parallelism, fully sharded, tensor parallelism and their pairs, each with and without sequences cut
    too, and experts apart. T5X's, MaxText's and Megatron's rules are among them.

    **Arguments:**

    - `layouts`: the step.
    - `never`: classes that are not cut.

    **Returns:**

    A role for each mesh axis of each way; no way stands there twice.
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
    alone = [batch, stored, whole, cut, cut_too, by_sequence, experts]
    pairs = [(data, other) for data in (batch, stored) for other in (cut, cut_too, by_sequence, experts)]
    ways = [*((one,) for one in alone), *pairs, (stored, experts, cut), (batch, by_sequence, cut)]
    made = [tuple(role for role in way if role is not None) for way in ways]
    return list(dict.fromkeys(way for way, asked in zip(made, ways, strict=True) if way and len(way) == len(asked)))


def distinct(ways: Iterable[tuple[Role, ...]]) -> list[Role]:
    """All roles of these ways, each once."""
    return list(dict.fromkeys(role for way in ways for role in way))


def _is_model(classes: Classes, number: int) -> bool:
    return any(place.argument in classes.model for place in classes.groups[number].places)
