"""Whether the constraints that `fit` and `shardings` tell of mend a step:
`python -m benchmarks.why`.

The twelve steps of the zoo, by FSDP over 8 devices and without a constraint. What `fit`
advises is put into each, and what the three largest arrays want that are whole on each
device then; XLA partitions the step before and after.
"""

from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx import chips
from shardfx._step import parse_hlo, step_of
from shardfx.cost import ArrayRow, StepShardings
from shardfx.cost._counted import StepOnChip, saving_constraints, with_constraints
from shardfx.cost._shardings import shardings_of
from shardfx.cost._traffic import read

from ._zoo import models


MESH = sfx.MeshSpec({"fsdp": 8})
CUT = sfx.PathRules([(".*", sfx.fsdp("fsdp"))])
ROWS = sfx.PathRules([(".*", jax.P("fsdp"))])


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    for name, make in models(jnp.bfloat16).items():
        step, *states, data = _laid(make())
        on_chip = StepOnChip(
            step=step_of(step, [*states, *data]), chip=chips.find("v5e"), function=step
        )
        print(f"{name:34} {judged(on_chip)}", flush=True)


def judged(on_chip: StepOnChip) -> str:
    """How much smaller the arrays and the memory get, and what is sent before and
    after.
    """
    step = on_chip.step
    before = shardings_of(on_chip.step, "tpu")
    largest = _whole(before)
    advised = saving_constraints(on_chip)
    if advised:
        lines = list(advised.constraints)
    else:
        lines = []
    module = with_constraints(step, lines, "tpu")
    after = shardings_of(step, "tpu", module)
    for row in _whole(after):
        lines += after.missed_axes(row)[:1]
    if not lines:
        return "nothing is whole that could be cut"
    module = with_constraints(step, lines, "tpu")
    after = shardings_of(step, "tpu", module)
    smaller = ", ".join(
        f"{row.bytes_per_device / _bytes_at(after, row.source, row.shape):.1f}"
        for row in largest
    )
    sent = [
        read(parse_hlo(step.partitioned("tpu", module=line)), step.mesh, step.leaves)
        for line in (None, module)
    ]
    held = [on_chip.memory.peak_bytes, on_chip.memory_with(module).peak_bytes]
    return (
        f"{len(lines)} constraints, arrays {smaller} times smaller, memory"
        f" {held[0] / held[1]:.2f} times; {sent[0].wire_bytes:,} bytes sent, then"
        f" {sent[1].wire_bytes:,}"
    )


def _whole(shardings: StepShardings) -> list[ArrayRow]:
    """The three largest arrays that are whole and need not be, of a line and a shape
    each.
    """
    largest: dict[Any, ArrayRow] = {}
    for row in shardings.replicated().rows:
        largest.setdefault((row.source, row.shape), row)
    return [row for row in [*largest.values()][:3] if shardings.missed_axes(row)]


def _laid(planned: Any) -> tuple[Any, ...]:
    step, params, mu, nu, *data = planned
    states = (sfx.plan(tree, MESH, paths=CUT).structs for tree in (params, mu, nu))
    structs = [sfx.plan(array, MESH, paths=ROWS).structs for array in data]
    return (
        step,
        *states,
        structs,
    )


def _bytes_at(shardings: StepShardings, source: Any, shape: Any) -> int:
    return max(
        row.bytes_per_device
        for row in shardings.rows
        if (row.source, row.shape) == (source, shape)
    )


if __name__ == "__main__":
    main()
