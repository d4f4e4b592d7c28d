"""Rules for the models of the table, by how they are trained: data parallel, FSDP, tensor parallel, experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..._ground.errors import RuleError
from ..._ground.text import quoted
from ..._rules import PathRules, optional, replicate
from .._row_rules import rows_for_rules, rules_of
from ..maps._families import with_experts_stacked
from ..maps._places import Entry
from ._named import row_of, sizes_of


# What each strategy cuts over, in the order fsdp, tensor, expert.
_CUTS: Final[Mapping[str, tuple[bool, bool, bool]]] = MappingProxyType(
    {
        "dp": (False, False, False),
        "fsdp": (True, False, False),
        "tp": (False, True, False),
        "fsdp_tp": (True, True, False),
        "ep": (True, True, True),
    }
)


def strategies(name: str | None = None) -> tuple[str, ...]:
    """The strategies that [`shardfx.presets.models.rules_for`][] has for a model.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][]; `None` for those that any model has.

    **Returns:**

    "dp", "fsdp", "tp", "fsdp_tp", and "ep" for a mixture of experts.

    !!! Example

        ```python
        from shardfx.presets import models

        assert "ep" in models.strategies("mixtral-8x7b")
        assert "ep" not in models.strategies("llama3-8b")
        ```
    """
    return tuple(how for how in _CUTS if how != "ep" or name is None or "experts" in row_of(name).config)


def rules_for(
    name: str, how: str, *, data: str = "data", fsdp: str = "fsdp", tensor: str = "tensor", expert: str = "expert"
) -> PathRules:
    """Rules for the arrays of a model by its name.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].
    - `how`: "dp" replicates all; "fsdp" cuts each array over `fsdp`, but never inside of a head; "tp" cuts the
        dimensions of heads, hidden units and vocabulary over `tensor`; "fsdp_tp" does both. "ep" cuts the experts
        over `expert`, each expert as "fsdp_tp" does, and everything else over `fsdp` and `expert` together; it
        needs `tree(..., stack_experts=True)`.
    - `data`: the mesh axis that is for the batch alone.
    - `fsdp`, `tensor`, `expert`: the mesh axes to use; an axis that the mesh lacks is left out.

    **Returns:**

    [`shardfx.PathRules`][] for `tree(name)`.

    **Raises:**

    `RuleError` for a name or a strategy that there is not.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, plan
        from shardfx.presets import models

        tree = models.tree("mixtral-8x7b", stack_experts=True)
        rules = models.rules_for("mixtral-8x7b", "ep")
        made = plan(tree, MeshSpec({"expert": 8, "fsdp": 4}), paths=rules)
        layer = "model/layers/0"
        routed = made[f"{layer}/block_sparse_moe/experts/w1/weight"]
        assert routed.spec == P("expert", None, "fsdp")
        query = made[f"{layer}/self_attn/q_proj/weight"]
        assert query.spec == P(None, ("fsdp", "expert"))
        ```
    """
    row = row_of(name)
    if how not in strategies(name):
        raise RuleError(f"`{name}` has no rules {quoted(how)}; there are {', '.join(strategies(name))}.")
    if how == "dp":
        return PathRules([(".*", replicate)], axes=(data,))
    along, across, routed = (
        (axis,) if used else () for axis, used in zip((fsdp, tensor, expert), _CUTS[how], strict=True)
    )
    sizes, every = sizes_of(row.config), rows_for_rules(row.family, row.config)
    stacked = with_experts_stacked(every) | {path: entry for path, entry in every.items() if _is_packed(entry)}
    rest = {path: entry for path, entry in every.items() if path not in stacked}
    # A rule for the experts must apply: without it, a tree of single experts would be sharded over none of them.
    rules = [
        (regex, target if routed else optional(target))
        for regex, target in rules_of(stacked, sizes, along, across, expert=routed, others=[*rest])
    ]
    for regex, target in rules_of(rest, sizes, (*along, *routed), across, others=[*stacked]):
        rules.append((regex, optional(target)))
    return PathRules(rules, axes=(data, *along, *across, *routed))


def _is_packed(entry: Entry) -> bool:
    """Whether the experts of a layer are one array in the checkpoint."""
    return isinstance(entry, str) and entry.startswith("expert_") and ": experts" in entry
