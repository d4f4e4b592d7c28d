"""A plan as a table for a terminal."""

import textwrap

from .._ground.text import Shown, table
from .facts import NUMBERS, ReportRow, facts_of, report_rows_of
from .shard_plan import ShardPlan, check_plan


def report_rows(plan: ShardPlan) -> tuple[ReportRow, ...]:
    """The plan's arrays in the tree's order, repeated layers as one row.

    **Arguments:**

    - `plan`: the plan.

    **Returns:**

    One [`shardfx.ReportRow`][] for each group of arrays whose paths differ in numbers only, and that agree in
    everything else: shape, dtype, spec, rule, reasons.
    """
    check_plan("plan", plan)
    return report_rows_of(plan.content)


def report(plan: ShardPlan, *, width: int | None = None) -> str:
    """The plan as a table: for each array its shape, its spec, its bytes per device, and why.

    **Arguments:**

    - `plan`: the plan.
    - `width`: how many columns of text there are; longer paths and rules are then cut. `None` cuts nothing.

    **Returns:**

    The text: a row per array or group of alike arrays, then each reason once, the totals, and the largest
    arrays that every device holds whole. It is a `str` that the last line of a notebook's cell shows as it prints.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, report

        layer = {"wi": jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), "bias": jnp.ones(4099)}
        rules = PathRules.parse("wi->fsdp.tensor, bias->tensor")
        mesh = MeshSpec({"fsdp": 4, "tensor": 2})
        print(report(plan({"layers": [layer] * 24}, mesh, paths=rules), width=88))
        ```

        ```text
        path                 arrays  shape            spec         bytes/device  why
        layers/{0..23}/bias      24  f32[4099]        -               384.3 KiB  [1] paths[1] ..
        layers/{0..23}/wi        24  bf16[1024,4096]  fsdp,tensor      24.0 MiB  paths[0] wi
        ...
        ```
    """
    check_plan("plan", plan)
    facts = facts_of(plan.content)
    lines = table([facts.header, *facts.cells], right=NUMBERS, width=width)
    reasons = [_wrapped(text, width) for text in facts.reasons]
    parts = ["\n".join(lines), "\n".join(reasons), _wrapped(facts.totals, width), _wrapped(facts.replicated, width)]
    return Shown("\n\n".join(part for part in parts if part))


def _wrapped(text: str, width: int | None) -> str:
    return text if width is None else textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)
