"""A plan as a table for a terminal."""

import re

from .._ground.text import Shown, table, wrapped
from .facts import NUMBERS, Facts, facts_of
from .shard_plan import ShardPlan, check_plan


def report(plan: ShardPlan, *, width: int | None = None) -> str:
    """The plan as a table: for each array its shape, its spec, its bytes per device, and why.

    **Arguments:**

    - `plan`: the plan.
    - `width`: how many columns of text there are. Where that is too few, the table says less of the rules, and what
        paths have in common becomes a heading. `None` is no limit.

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
        layers/{0..23}/bias      24  f32[4099]        -               384.3 KiB  [1] paths[1]
        layers/{0..23}/wi        24  bf16[1024,4096]  fsdp,tensor      24.0 MiB  paths[0]
        ...
        ```
    """
    check_plan("plan", plan)
    facts = facts_of(plan.content)
    lines = _table(facts, width)
    reasons = [wrapped(text, width) for text in facts.reasons]
    parts = ["\n".join(lines), "\n".join(reasons), wrapped(facts.totals, width), wrapped(facts.replicated, width)]
    return Shown("\n\n".join(part for part in parts if part))


# Of what asked for an array: the number of the rule, and where its memory is.
_BRIEF = re.compile(r"^(?:\[\d+\])*|paths\[\d+\]|in [\w]+$")
_MARKS = re.compile(r"^(?:\[\d+\])*|in [\w]+$")


def _table(facts: Facts, width: int | None) -> list[str]:
    """The rows; where they would be too long, the last column says less, then goes, and that of counts goes."""
    rows = [facts.header, *facts.cells]
    for said in (None, _BRIEF, _MARKS):
        shown = rows if said is None else [rows[0], *[(*row[:-1], _said(said, row[-1])) for row in rows[1:]]]
        lines = table(shown, right=NUMBERS)
        if width is None or max(map(len, lines)) <= width:
            return lines
    spare = ("arrays",) if any(row[-1] for row in shown[1:]) else ("why", "arrays")
    return table(shown, right=NUMBERS, width=width, spare=spare)


def _said(what: re.Pattern[str], why: str) -> str:
    return " ".join(part for part in what.findall(why) if part)
