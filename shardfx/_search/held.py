"""Memory: candidates that do not fit as the step is written, and the state of an optimizer that is cut further."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax

from .. import chips
from .._cost.estimate import Prepared
from .._plan import follow
from .candidate import Candidate
from .checked import as_priced, fits, with_check
from .classes import Classes
from .reasons import is_new


# So many candidates are weighed before the step is to be laid out.
_WEIGHED = 24


def states_of(classes: Classes) -> tuple[int, ...]:
    """Which arguments are the state of an optimizer: they lie as the model does, and come out of the step anew."""
    traced = classes.traced
    members = {traced.places[argument][0] for argument in classes.model} - {classes.main}
    made = traced.out[0]
    results = [_kind(part) for part in (made if isinstance(made, tuple) else (made,))]
    return tuple(sorted(which for which in members if _kind(traced.structs[which]) in results))


def _kind(tree: Any) -> Any:
    arrays = eqx.filter(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def zero_1(one: Candidate, states: Sequence[int]) -> Candidate | None:
    """The candidate with the optimizer's state cut over its data axes, too; `None` where that changes nothing."""
    axes = tuple(axis for axis, names in one.roles if names[0] == "batch")
    if not states or not axes or one.state_over:
        return None
    plans = list(one.plans)
    for which in states:
        plans[which] = follow(_same, plans[which], over=axes)
    saved = sum(one.plans[which].bytes_per_device - plans[which].bytes_per_device for which in states)
    if not saved:
        return None
    return dataclasses.replace(
        one,
        plans=tuple(plans),
        memory_bytes=one.memory_bytes - saved,
        state_over=axes,
        states=tuple(states),
        checks=(),
        reasons=(),
    )


def _same(tree: Any) -> Any:
    return tree


def weighed(prepared: Prepared, one: Candidate, chip: chips.Chip) -> Candidate:
    """The candidate with the memory that the step takes as it is written, in its last look."""
    look = dataclasses.replace(one.checks[-1], memory_bytes=prepared.held(one.plans, chip))
    return dataclasses.replace(one, checks=(*one.checks[:-1], look))


def holding(
    found: Iterable[Candidate], most: int, weigh: Callable[[Candidate], Candidate], other: Callable[[Candidate], Any]
) -> list[Candidate]:
    """The first few that fit as the step is written; where none does, they are to be laid out.

    **Arguments:**

    - `found`: the fastest first.
    - `most`: how many to return, at most.
    - `weigh`: gives a candidate the memory of the step as it is written.
    - `other`: the same candidate in less memory, looked at and weighed, or `None`.
    """
    kept: list[Candidate] = []
    seen: list[Candidate] = []
    for one in found:
        if len(kept) == most or (len(seen) >= _WEIGHED and not kept):
            break
        if not is_new(one, seen):
            continue
        seen.append(one)
        tried = weigh(one)
        if not fits(tried):
            tried = other(one)
        if tried is not None and fits(tried) and is_new(tried, kept):
            kept.append(tried)
    if kept:
        return sorted(kept, key=lambda one: one.checks[-1].seconds)
    laid = [dataclasses.replace(with_check(one, as_priced(one)), laid_out=True) for one in seen]
    return sorted((one for one in laid if one.fits), key=lambda one: one.seconds)[:most] or seen[:most]
