"""Adapters and scales of planned arrays: the base array of each, and the dimensions that it shares with it."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from .._ground.errors import RuleError
from .._rules import near
from .leaf import LeafPlan
from .shard_plan import ShardPlan


class Beside(NamedTuple):
    """How the path of a base array is made of the path of an array beside it.

    **Arguments:**

    - `kind`: "adapters" have some of the base's dimensions, "scales" a number per block of its elements.
    - `number`: of the pair among those of its kind.
    - `pattern`, `base`: what of the path is replaced, and by what, as in `re.sub`.
    """

    kind: Literal["adapters", "scales"]
    number: int
    pattern: re.Pattern[str]
    base: str


def besides(kind: Literal["adapters", "scales"], pairs: Iterable[tuple[str, str]]) -> list[Beside]:
    """The pairs of regex and replacement that `follow` is given."""
    found = []
    for number, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2:
            raise RuleError(f'`{kind}[{number}]` is {pair!r}; give pairs, as in `{kind}=[("lora_[ab]$", "weight")]`.')
        try:
            found.append(Beside(kind, number, re.compile(pair[0]), pair[1]))
        except re.error as error:
            raise RuleError(f"`{kind}[{number}]`: {pair[0]!r} is no regex: {error}.") from error
    return found


def base_of(
    path: str, shape: tuple[int, ...], plan: ShardPlan, pairs: Sequence[Beside]
) -> tuple[Beside, LeafPlan, tuple[int | None, ...]] | None:
    """The base array of the one at `path`, and per dimension the base's dimension whose shards it has, if one."""
    one = next((one for one in pairs if one.pattern.search(path)), None)
    if one is None:
        return None
    name, planned = one.pattern.sub(one.base, path), plan.content.by_path
    base = planned.get(name)
    if base is None:
        raise RuleError(
            f"`{one.kind}[{one.number}]` makes `{name}` of this path, and the plan has no such array"
            f"{near(name, list(planned))}; give the path of the base array."
        )
    return one, base, _dims(base.shape, shape, one.kind == "scales")


def _dims(base: tuple[int, ...], shape: tuple[int, ...], in_blocks: bool) -> tuple[int | None, ...]:
    """Dimensions correspond by their place, counted from the first, or else from the last."""
    taken: list[int | None] = []
    for dim, size in enumerate(shape):
        places = (dim, dim - len(shape) + len(base))
        fits = [at for at in places if 0 <= at < len(base) and at not in taken and _fits(base[at], size, in_blocks)]
        taken.append(fits[0] if fits else None)
    return tuple(taken)


def _fits(base: int, size: int, in_blocks: bool) -> bool:
    return base == size or (in_blocks and size > 1 and base % size == 0)
