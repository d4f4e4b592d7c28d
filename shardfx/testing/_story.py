"""What is said of the first equation whose result is wrong under a plan."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from .._ground.text import array_text, spec_text
from .._step import Frame, place_text
from ..cost import traffic
from ._blame import REDUCTIONS, Compared, Fault
from ._played import Played
from ._records import Record


_RANDOM = (
    "random_bits",
    "threefry2x32",
    "rng_bit_generator",
    "rng_uniform",
    "random_gamma",
)


def story_of(
    records: Sequence[Record],
    comparisons: Mapping[int, Compared],
    fault: Fault,
    played: Played,
    values: Mapping[int, Any],
) -> tuple[tuple[Frame, ...], list[str]]:
    """The source lines of the first wrong equation and of the `fault.sources`, and
    sentences that describe them.

    `comparisons` has those of the equations `records` with the reference, and `values`
    their results, by number. `played` is the compiled step; the last sentences name its
    collectives at these source lines.
    """
    comparison = comparisons.get(fault.number, Compared(False))
    equation = _equation_text(records[fault.number], fault.number, values)
    story = [f"the first equation that differs: {equation}"]
    if comparison.is_same:
        # Its values are right, and still need a sum, mean or maximum over devices.
        awaited = " and the ".join(_unreduced_texts(comparison))
        story.append(
            f"    it waits for the {awaited}, and leaves its shard_map as if it were"
            " whole"
        )
    elif math.isfinite(comparison.difference):
        story.append(
            f"    by up to {comparison.difference:.1e}, of numbers up to"
            f" {comparison.scale:.1e}, at {list(comparison.at)}"
        )
    if fault.turn is not None:
        story.append(f"    in turn {fault.turn} of its loop")

    # Earlier equations that say most about the cause.
    for number in fault.sources:
        reductions = []
        if number in comparisons:
            reductions = _unreduced_texts(comparisons[number])
        why = ""
        if reductions:
            why = f", which waits for the {' and the '.join(reductions)}"
        equation = _equation_text(records[number], number, values)
        story.append(f"it takes what comes from {equation}{why}")
    named_records = [records[number] for number in (*fault.sources, fault.number)]
    if any(record.primitive in _RANDOM for record in named_records):
        story.append(
            "random numbers here hang on the layout: make them outside of shard_map,"
            " with threefry keys, and with `jax_threefry_partitionable` on"
        )

    lines: dict[Frame, None] = {}
    for record in named_records:
        lines |= dict.fromkeys(record.frames)
    for collective in _collectives_at(played, lines):
        story.append(f"the plan sends there: {collective}")
    return tuple(lines), story


def _unreduced_texts(comparison: Compared) -> list[str]:
    """A text for each reduction over devices that an equation's result still needs."""
    texts = []
    for axis, role in comparison.roles.items():
        if role in REDUCTIONS:
            texts.append(f"{role} over {axis}")
    return texts


def _collectives_at(ours: Played, lines: Iterable[Frame]) -> list[str]:
    """A text for each kind of collective that a compiled step has at source lines."""
    near = {(frame.file, frame.line) for frame in lines}
    texts: dict[str, None] = {}
    for row in traffic(ours.compiled).rows:
        if row.source and (row.source.file, row.source.line) in near:
            axes = " x ".join(row.axes) or "-"
            texts[f"{row.kind} over {axes} at {place_text(row.source)}"] = None
    return list(texts)


def _equation_text(record: Record, number: int, values: Mapping[int, Any]) -> str:
    """The text of an equation with its source line, and with the sharding of its result
    if `values` has the result under `number`.
    """
    place = place_text(next(iter(record.frames), None))
    equation = f"`{record.primitive}` at {place}"
    if number not in values:
        return equation
    value = values[number]
    leading_count = len(record.leading)
    text = array_text(record.dtype, value.shape[leading_count:])
    axes = [name for name, _ in record.manual_axes]
    if axes:
        return f"{equation}: {text} on each device of {', '.join(axes)}"
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else ()
    return f"{equation}: {text} {spec_text(tuple(spec)[leading_count:])}"
