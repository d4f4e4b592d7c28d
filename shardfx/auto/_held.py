"""Less memory for a candidate that does not fit: donation, and the state of an optimizer cut further (ZeRO-1)."""

import dataclasses

from .._plan import follow
from ._candidate import Candidate
from ._classes import Classes
from ._priced import kind_of


def states_of(classes: Classes) -> tuple[int, ...]:
    """Which arguments are the state of an optimizer: they lie as the model does, and come out of the step anew."""
    traced = classes.traced
    members = {traced.places[argument][0] for argument in classes.model} - {classes.main}
    made = traced.out
    results = [kind_of(part) for part in (made if isinstance(made, tuple) else (made,))]
    return tuple(sorted(which for which in members if kind_of(traced.structs[which]) in results))


def zero_1(one: Candidate, states: tuple[int, ...]) -> Candidate | None:
    """The candidate with the optimizer's state cut over its data axes, too; `None` where that changes nothing."""
    axes = tuple(axis for axis, names in one.assignments if names[0] == "batch")
    if not states or not axes or one.state_over:
        return None
    plans = list(one.plans)
    for which in states:
        plans[which] = follow(lambda state: state, plans[which], over=axes)
    saved = sum(one.plans[which].bytes_per_device - plans[which].bytes_per_device for which in states)
    if not saved:
        return None
    return dataclasses.replace(
        one, plans=tuple(plans), memory_bytes=one.memory_bytes - saved, state_over=axes, states=states
    )
