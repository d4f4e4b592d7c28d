"""What a call may not be given: an array whose buffers are gone, or one that is donated and is there twice.

The runtime finds out, and where a program runs on several CPU devices it ends the process.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from .._ground.errors import PlanMismatchError


class Given(NamedTuple):
    """An array of a call, with its name in messages, its entry of `in_shardings`, and whether it is donated."""

    name: str
    array: Any
    wanted: Any
    is_donated: bool


def raise_deleted(given: Iterable[Given]) -> None:
    """Raises for the first array whose buffers are gone."""
    for one in given:
        if one.array.is_deleted():
            raise PlanMismatchError(
                f"{one.name}, {one.array.dtype}{list(one.array.shape)}, was deleted, or donated to an earlier call, "
                "which may have written over it. Use what that call returned, or leave the argument out of `donate`."
            )


def raise_shared(given: Iterable[Given]) -> None:
    """Raises if an array that is donated is given twice, and the program would take it as it lies."""
    seen: dict[int, Given] = {}
    for one in given:
        first = seen.setdefault(id(one.array), one)
        if first is not one and (first.is_donated or one.is_donated) and not (_is_moved(first) or _is_moved(one)):
            raise PlanMismatchError(
                f"{first.name} and {one.name} are one array, {one.array.dtype}{list(one.array.shape)}, and "
                f"{'both are' if first.is_donated and one.is_donated else 'one of them is'} donated: the program "
                "could write over what it still reads. Copy one of them first: "
                "`jax.tree.map(jax.numpy.copy, tree)`; or leave the argument out of `donate`."
            )


def _is_moved(one: Given) -> bool:
    """Whether JAX puts an array where the program wants it, so that a copy is donated."""
    if not one.array.committed:
        return True
    return one.wanted is not None and not one.array.sharding.is_equivalent_to(one.wanted, one.array.ndim)
