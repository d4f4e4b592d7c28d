"""Where a step should say that its activations lie along the batch, because compilers lay them out otherwise."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from .._ground.spec import entries_of, entry_axes
from .._ground.text import array_text
from ..topology._mesh import MeshSpec
from .arguments import Arguments
from .frames import Frame, frames_of, own_line, place_text
from .graph import Op, Pin
from .layout import Layout, MeshParts
from .memory.layouts import graph_layouts
from .memory.program import Program
from .memory.usage import Usage, known_layouts
from .propagate import propagated


# A step that needs more constraints than these is better laid out as a whole: `shardfx.lay_out`.
_MOST = 6
# Arrays that are smaller than this share of the largest one that is laid out otherwise are not what takes the memory.
_WORTH = 0.05
# What hands values on between a loop and what is around it has no line of its own.
_PASSED = ("carry", "layer", "stack", "branch", "enter", "leave", "again", "shard_map", "result")


class AlongBatch(NamedTuple):
    """Constraints that keep the activations along the batch.

    **Arguments:**

    - `pins`: the layouts, by the numbers of the values in the step's graph.
    - `how`: as code, with the line of each.
    - `sources`: the lines.
    """

    pins: dict[int, Pin]
    how: str
    sources: tuple[Frame, ...]


def along_the_batch(program: Program, given: Arguments, usage: Usage) -> AlongBatch | None:
    """The constraints under which activations lie as the batch does; `None` where those that take memory do.

    How they would lie is what the batch alone asks for, with parameters that ask for nothing. The first array that
    lies otherwise is constrained, and the step laid out anew, until none is left that takes memory.
    """
    graph, sizes = program.graph, given.sizes
    assert graph is not None
    batch = {id(leaf.struct) for leaf in given.of_group("batch")}
    known = known_layouts(program, [leaf.struct.sharding for leaf in given.leaves], sizes)
    axes = MeshParts(MeshSpec(sizes))
    asked = {
        value: Pin(known[number])
        for value, number, leaf in zip(graph.arguments, program.block.ins, given.leaves, strict=True)
        if id(leaf.struct) in batch and any(known[number])
    }
    if not asked:
        return None
    wanted = propagated(graph, axes, asked)
    found = graph_layouts(program, axes, known, {})
    held = [graph.bound[program.variables[one.number]] for one in usage.peak.held if one.number in program.variables]
    lost = [math.prod(graph.values[value].shape) for value in held if _is_lost(wanted[value], found[value])]
    least = _WORTH * max(lost, default=0)
    pins: dict[int, Pin] = {}
    chosen: list[Op] = []
    while lost and len(pins) < _MOST:
        others = [op for op in graph.ops if _may_be_constrained(op, pins) and _is_lost(*_both(op, wanted, found))]
        if not any(math.prod(graph.values[op.results[0]].shape) >= least for op in others):
            break
        # The first one, however small: what comes after it follows it.
        chosen.append(others[0])
        pins[others[0].results[0]] = Pin(_entries(axes, *_both(others[0], wanted, found)))
        found = graph_layouts(program, axes, known, pins)
    told: dict[Frame | None, str] = {}
    shapes = {graph.values[op.results[0]].shape for op in chosen if not _is_backward(op)}
    for op in chosen:
        value = graph.values[op.results[0]]
        if _is_backward(op) and value.shape in shapes:
            continue  # a constraint holds for the gradient of what it constrains too
        source = _line_of(op)
        code = f"constrain(x, {_as_code(pins[op.results[0]], given)}, plan)"
        told.setdefault(source, f"{code} for {array_text(value.dtype, value.shape)} of {place_text(source)}")
    sources = tuple(source for source in told if source is not None)
    return AlongBatch(pins, "; ".join(told.values()), sources) if pins else None


def _both(op: Op, wanted: Sequence[Layout], found: Sequence[Layout]) -> tuple[Layout, Layout]:
    return wanted[op.results[0]], found[op.results[0]]


def _may_be_constrained(op: Op, pins: dict[int, Pin]) -> bool:
    return op.pin is None and op.name not in _PASSED and len(op.results) == 1 and op.results[0] not in pins


def _is_backward(op: Op) -> bool:
    """Whether an operation is of the backward pass."""
    return any("transpose(" in str(source.name_stack) for source in op.sources)


def _is_lost(wanted: Layout, found: Layout) -> bool:
    """Whether an array is not cut as the batch asks for."""
    return any(own[: len(parts)] != parts for parts, own in zip(wanted, found, strict=True))


def _entries(axes: MeshParts, wanted: Layout, found: Layout) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension: the batch's where that asks for some, else those that it has and may keep."""
    taken = {part for parts in wanted for part in parts}
    kept = [parts or tuple(part for part in own if part not in taken) for parts, own in zip(wanted, found, strict=True)]
    return tuple(axes.names(parts) for parts in kept)


def _as_code(pin: Pin, given: Arguments) -> str:
    """A layout as `constrain` takes it: by the name of the batch's dimension, where that has one."""
    cuts = [axes for axes in pin.entries if axes]
    named = [
        name
        for leaf in given.of_group("batch")
        if leaf.plan is not None and leaf.plan.names is not None
        for name, axes in zip(leaf.plan.names, map(entry_axes, entries_of(leaf.plan.spec)), strict=False)
        if isinstance(name, str) and [axes] == cuts
    ]
    if named:
        return f"({', '.join(_quoted(named[0]) if axes else 'None' for axes in pin.entries)})"
    return f"jax.P({', '.join(_entry(axes) for axes in pin.entries)})"


def _entry(axes: Sequence[str]) -> str:
    names = [_quoted(axis) for axis in axes]
    return "None" if not names else names[0] if len(names) == 1 else f"({', '.join(names)})"


def _quoted(name: str) -> str:
    return json.dumps(name)


def _line_of(op: Op) -> Frame | None:
    """The innermost line of the user's own program."""
    return own_line([frame for source in op.sources for frame in frames_of(source.traceback)])
