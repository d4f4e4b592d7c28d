"""What is suspicious in shard_map bodies that JAX does not check, read off the records of their equations."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground.spec import entries_of, entry_axes
from .._step import opened, place_text
from ._tape import Body, Record, Tape


_SUMS = ("psum", "psum2", "psum_invariant")
_ALIKE = (*_SUMS, "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant")
_APART = ("ppermute", "all_to_all", "psum_scatter", "reduce_scatter", "axis_index")
_Axes = frozenset[str]


def suspects(tape: Tape) -> tuple[str, ...]:
    """What is suspicious, in words, each once."""
    found: dict[str, None] = {}
    for body in tape.bodies:
        if not body.equation.params["check_vma"]:
            for one, what in _said(tape, body):
                found[f"`{one.primitive}` at {place_text(next(iter(one.frames), None))}: {what}"] = None
    return tuple(found)


def _said(tape: Tape, body: Body) -> Iterator[tuple[Record, str]]:
    """The records of a body that are suspicious, and why."""
    params, records = body.equation.params, [tape.records[at] for at in body.numbers]
    axes = [axis for axis, size in params["mesh"].shape.items() if size > 1]
    cuts: dict[int, _Axes] = {}
    lengths: dict[int, str] = {}
    for var, number, spec in zip(opened(params["jaxpr"])[0].invars, body.reads, params["in_specs"], strict=True):
        cuts[number] = cuts.get(number, _Axes()) | _cut(spec)
        parts = zip(var.aval.shape, entries_of(spec), strict=False)
        lengths |= {size: axis for size, entry in parts for axis in entry_axes(entry)}
    differs = _differing(tape, body, cuts)
    offset = _Axes().union(*(one.axes for one in records if one.primitive == "axis_index"))
    for one in records:
        if one.primitive in _ALIKE:
            for axis in [axis for axis in axes if axis in one.axes - _taken(one, differs)]:
                yield one, f"is over {axis}, along which all devices have the same: is it doubled?"
        if one.primitive in _SUMS and jnp.issubdtype(one.dtype, np.floating) and jnp.finfo(one.dtype).bits < 32:
            yield one, f"adds up in {one.dtype}: its error grows with the devices"
        axis = lengths.get(one.counted)
        if axis in axes and axis not in offset:
            yield one, f"counts from 0 on every device along {axis}, and no axis_index offsets it"
    for number, spec in zip(body.results, params["out_specs"], strict=True):
        left = [axis for axis in axes if axis in differs.get(number, _Axes()) - _cut(spec)]
        if left and number >= 0:
            what = f"may differ along {', '.join(left)}, and `out_specs` say that it does not"
            yield tape.records[number], f"{what}: is a psum missing?"


def _differing(tape: Tape, body: Body, cuts: Mapping[int, _Axes]) -> dict[int, _Axes]:
    """Along which mesh axes the devices' values of each record may differ."""
    differs = dict(cuts)
    for _ in range(len(body.equation.params["mesh"].shape) + 1):  # what a turn of a loop makes the next one takes
        for at in body.numbers:
            one = tape.records[at]
            taken = _taken(one, differs) | differs.get(tape.carried.get(at, at), _Axes())
            is_alike, is_apart = one.primitive in _ALIKE, one.primitive in _APART
            differs[at] = _taken(one, differs) - one.axes if is_alike else taken | one.axes if is_apart else taken
    return differs


def _taken(record: Record, differs: Mapping[int, _Axes]) -> _Axes:
    return _Axes().union(*(differs.get(one, _Axes()) for one in record.reads))


def _cut(spec: Any) -> _Axes:
    return _Axes(axis for entry in entries_of(spec) for axis in entry_axes(entry))
