"""The rows of an estimate: what is sent, with the lines that it was traced from and the leaf that it is about."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .frames import Frame, frames_of, own_line
from .graph import Op, Traced
from .layout import MeshParts
from .traffic import IDLE
from .traffic_rows import TrafficRow
from .walk import Sent


_UPDATES = frozenset(("add", "sub", "add_any"))


def rows_of(traced: Traced, axes: MeshParts, found: Sequence[Sent]) -> tuple[TrafficRow, ...]:
    """A row for each collective, largest first; of each conditional the branch that sends most counts."""
    writer = _Writer(traced, axes)
    idle = _idle(traced, found)
    rows: dict[Any, TrafficRow] = {}
    for one in found:
        row = writer.row(one, is_idle=bool(idle & {*traced.branches(one.scope)}))
        key = (row.kind, row.axes, row.source, row.leaf, row.dtype, row.calls == 0, row.calls is None, row.note)
        rows[key] = row if key not in rows else _sum(rows[key], row)
    return tuple(sorted(rows.values(), key=lambda row: -row.wire_bytes))


def _idle(traced: Traced, found: Sequence[Sent]) -> set[tuple[int, int]]:
    """Of each conditional the branches that send less than another one."""
    sums: dict[int, dict[int, float]] = {}
    for scope in traced.scopes:
        if scope.branch is not None:
            sums.setdefault(scope.branch[0], {})[scope.branch[1]] = 0.0
    idle: set[tuple[int, int]] = set()
    # Conditionals inside others have higher numbers, and a branch is weighed by what counts in it.
    for conditional in sorted(sums, reverse=True):
        for one in found:
            within = traced.branches(one.scope)
            for label, branch in within:
                if label == conditional and not idle & {*within}:
                    sums[conditional][branch] += one.move.wire_bytes * traced.calls(one.scope)[0]
        costs = sums[conditional]
        chosen = max(costs, key=lambda branch: costs[branch])
        idle |= {(conditional, branch) for branch in costs if branch != chosen}
    return idle


def _sum(first: TrafficRow, other: TrafficRow) -> TrafficRow:
    calls = None if first.calls is None or other.calls is None else first.calls + other.calls
    wire = first.wire_bytes + other.wire_bytes
    return TrafficRow(
        **{
            **vars(first),
            "wire_bytes": wire,
            "dcn_bytes": first.dcn_bytes + other.dcn_bytes,
            "calls": calls,
            "shares": ((first.leaf, wire),),
        }
    )


class _Writer:
    def __init__(self, traced: Traced, axes: MeshParts):
        self.traced, self.axes = traced, axes
        self.origins = _origins(traced)
        self.goals = _goals(traced, self.origins)

    def row(self, one: Sent, *, is_idle: bool) -> TrafficRow:
        count, known = self.traced.calls(one.scope)
        count = 0 if is_idle else count
        move, note = one.move, one.note
        if not known:
            note = note or "the trips of a loop are not known and count once."
        if is_idle:
            note = IDLE
        sums = move.kind in ("all-reduce", "reduce-scatter")
        leaf = (self.goals if sums else self.origins).get(one.value)
        stack = self.stack(one)
        wire = round(count * move.wire_bytes)
        return TrafficRow(
            kind=move.kind,
            wire_bytes=wire,
            dcn_bytes=round(count * move.dcn_bytes),
            calls=count if known or is_idle else None,
            dtype=_hlo_dtype(self.traced.values[one.value].dtype),
            group_size=2 if move.kind == "collective-permute" else self.axes.count(move.parts),
            axes=self.axes.names(move.parts),
            source=own_line(stack),
            stack=stack,
            leaf=leaf,
            shares=((leaf, wire),),
            note=note,
        )

    def stack(self, one: Sent) -> tuple[Frame, ...]:
        if one.op < 0:
            return ()
        stacks = [frames_of(info.traceback) for info in self.traced.ops[one.op].sources]
        return tuple(dict.fromkeys(frame for stack in stacks for frame in stack))


def _hlo_dtype(dtype: Any) -> str:
    """As HLO writes it: f32, bf16, s32, pred."""
    if not jnp.issubdtype(dtype, np.generic):
        return "u32"  # a PRNG key
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        # PRNG keys are sent as the numbers that they are.
        dtype = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).dtype
    name = jnp.dtype(dtype).name
    if name == "bool":
        return "pred"
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def _origins(traced: Traced) -> dict[int, str]:
    """The argument that a value is, or a part of which it is, by the number of the value."""
    found = {at: value.path for at, value in enumerate(traced.values) if value.path is not None}
    for op in traced.ops:
        if op.rule.moves and op.name != "carry" and op.operands and op.operands[0] in found and op.results:
            for operand, result in zip(op.operands, op.results, strict=False):
                if operand in found:
                    found.setdefault(result, found[operand])
    return found


def _goals(traced: Traced, origins: dict[int, str]) -> dict[int, str]:
    """The argument that a value is added to in the end: the one whose gradient it is."""
    goals: dict[int, str] = {}
    returned = set(traced.results)
    for op in reversed(traced.ops):
        if not op.results:
            continue
        result = op.results[0]
        if result in returned:
            _begin(origins, op, goals)
            returned.update(v for v in op.operands if traced.values[v].shape == traced.values[result].shape)
        if result in goals and (op.rule.is_simple or op.name == "stack"):
            for operand in op.operands:
                if operand not in origins and _count(traced, operand) in (_count(traced, result), _part(traced, op)):
                    goals.setdefault(operand, goals[result])
    return goals


def _begin(origins: dict[int, str], op: Op, goals: dict[int, str]) -> None:
    if op.name not in _UPDATES or len(op.operands) != 2:
        return
    for weight, change in (op.operands, op.operands[::-1]):
        if weight in origins and change not in origins:
            goals.setdefault(change, origins[weight])


def _count(traced: Traced, value: int) -> int:
    return int(np.prod(traced.values[value].shape, dtype=object))


def _part(traced: Traced, op: Op) -> int:
    """How many elements one of a stack has."""
    shape = traced.values[op.results[0]].shape
    return int(np.prod(shape[1:], dtype=object)) if op.name == "stack" else -1
