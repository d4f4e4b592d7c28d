"""What is wrong with the rules that a command line names."""

from shardfx import lint
from shardfx._see import Finding, Findings

from ._asked import Asked, Inputs, plan_of, rules_of
from ._screen import working


def findings_of(
    asked: Asked, given: Inputs | None, *, replicated_bytes: int = 2**26, head_dim: int | None = None
) -> Findings:
    """All that is wrong with what was asked for, or looks so.

    **Arguments:**

    - `asked`: the words.
    - `given`: what they mean; `None` for a plan that was written as JSON.
    - `replicated_bytes`, `head_dim`: as in `shardfx.lint`.

    **Returns:**

    The findings: about the model, and about the optimizer's state where one was named.
    """
    with working("checking the rules"):
        if given is None:
            return lint(plan_of(asked), replicated_bytes=replicated_bytes, head_dim=head_dim)
        found = lint(
            given.model.tree,
            given.mesh,
            **rules_of(asked, given),
            replicated_bytes=replicated_bytes,
            head_dim=head_dim,
        )
        if asked.optimizer is None or found.worst("error"):
            return found
        return Findings([*found, *_of_states(asked, given, replicated_bytes)])


def _of_states(asked: Asked, given: Inputs, replicated_bytes: int) -> list[Finding]:
    """What is wrong with the optimizer's state alone: the model's own findings are there already."""
    found = lint(plan_of(asked, given), replicated_bytes=replicated_bytes)
    return [one for one in found if one.code == "optimizer-state"]
