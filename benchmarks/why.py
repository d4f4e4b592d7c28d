"""Whether the constraint that `shardings` tells of mends a step: `python -m benchmarks.why`.

The twelve steps of the zoo, by FSDP over 8 devices and without a constraint. The three largest arrays that are whole on
each device are looked up, the constraints that they want are put into the step, and XLA partitions both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

import shardfx as sfx
from shardfx._step import Step, step_of
from shardfx._step.lines import lines_of, own_line
from shardfx._step.lowered import meshes
from shardfx.cost import ArrayRow, StepShardings, Wanted
from shardfx.cost._hlo_text import parse_hlo
from shardfx.cost._shardings import shardings_of
from shardfx.cost._traffic import read

from ._zoo import models


MESH = sfx.MeshSpec({"fsdp": 8})
CUT = sfx.PathRules([(".*", sfx.fsdp("fsdp"))])
ROWS = sfx.PathRules([(".*", jax.P("fsdp"))])
NO_ARRAY = ("sdy.sharding_constraint", "stablehlo.while", "func.call", "stablehlo.constant")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    for name, make in models(jnp.bfloat16).items():
        step, *states, data = _laid(make())
        print(f"{name:34} {judged(step_of(step, [*states, *data]))}", flush=True)


def judged(step: Step) -> str:
    """How much smaller the arrays get, and what is sent before and after."""
    before = shardings_of(step, "cpu")
    largest: dict[Any, ArrayRow] = {}
    for row in before.replicated().rows:
        largest.setdefault((row.source, row.shape), row)
    pairs = [(row, one) for row in [*largest.values()][:3] for one in before.wanted(row)[:1]]
    if not pairs:
        return "nothing is whole that could be cut"
    module = constrained(step, [one for _, one in pairs])
    after = shardings_of(step, "cpu", module)
    smaller = [row.bytes_per_device / _bytes_at(after, row.source, row.shape) for row, _ in pairs]
    sent = [read(parse_hlo(step.partitioned("cpu", module=one)), step.mesh, step.leaves) for one in (None, module)]
    ratios = ", ".join(f"{ratio:.1f}" for ratio in smaller)
    return f"{ratios} times smaller; {sent[0].wire_bytes:,} bytes sent, then {sent[1].wire_bytes:,}"


def constrained(step: Step, wanted: list[Wanted]) -> Any:
    """The step's module with these constraints on what their lines make."""
    module = step.module("cpu")
    (mesh,) = [name for name, sizes in meshes(module).items() if sizes]
    clone = module.operation.clone()
    found: list[tuple[Any, Wanted]] = []

    def look(op: Any) -> Any:
        line = own_line(lines_of((op.location,)))
        for result in op.results if op.name not in NO_ARRAY else ():
            shape = tuple(result.type.shape) if isinstance(result.type, ir.RankedTensorType) else None
            found.extend((result, one) for one in wanted if (line, shape) == (one.line, one.shape))
        return ir.WalkResult.ADVANCE

    with clone.context, ir.Location.unknown(clone.context):
        clone.walk(look)
        for result, one in found:
            axes = [(entry,) if isinstance(entry, str) else entry or () for entry in one.spec]
            cut = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in own], True) for own in axes]
            with ir.InsertionPoint.after(result.owner):
                made = sdy.ShardingConstraintOp(result, sdy.TensorShardingAttr.get(mesh, cut))
            result.replace_all_uses_except(made.result, made.operation)
    return clone


def _laid(made: Any) -> tuple[Any, ...]:
    step, params, mu, nu, *data = made
    states = (sfx.plan(tree, MESH, paths=CUT).structs for tree in (params, mu, nu))
    return (step, *states, [sfx.plan(one, MESH, paths=ROWS).structs for one in data])


def _bytes_at(found: StepShardings, source: Any, shape: Any) -> int:
    return max(row.bytes_per_device for row in found.rows if (row.source, row.shape) == (source, shape))


if __name__ == "__main__":
    main()
