"""Rules for the models of the table, by how they are trained: data parallel, FSDP, tensor parallel, experts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from jax.sharding import PartitionSpec as P

from ..._ground.errors import RuleError
from ..._ground.text import quoted
from ..._rules.path_rules import PathRules
from ..._rules.strategies import atomic, fsdp as fsdp_strategy, optional, replicate
from .. import hf
from ._named import row_of


Axes = tuple[str, ...]
Pairs = list[tuple[str, Any]]
Config = Mapping[str, Any]

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
    base = _BASE[row.family](row.config, (*along, *routed), across)
    # A rule for the experts must apply: without it, a tree of single experts would be sharded over none of them.
    experts = [
        (regex, target if routed else optional(target)) for regex, target in _experts(row, along, across, routed)
    ]
    return PathRules([*experts, *base.rules], axes=(data, *along, *across, *routed))


def _experts(row: Any, fsdp: Axes, tensor: Axes, expert: Axes) -> Pairs:
    """For experts that are one array."""
    if row.family == "gpt_oss":
        # Gate and up lie in turns: a pair stays together.
        return [
            (r"experts.gate_up_proj$", atomic(P(expert, fsdp, tensor), (1, 1, 2))),
            (r"experts.gate_up_proj_bias$", atomic(P(expert, tensor), (1, 2))),
            (r"experts.down_proj$", P(expert, tensor, fsdp)),
            (r"experts.down_proj_bias$", P(expert, fsdp)),
        ]
    if row.family == "llama4":
        # Gate and up lie one after the other: over `tensor`, a device has a part of one of them.
        return [
            (r"experts.gate_up_proj$", P(expert, fsdp, tensor)),
            (r"experts.down_proj$", P(expert, tensor, fsdp)),
        ]
    if row.family == "mixtral":
        return [
            (r"experts.w[13].weight$", P(expert, tensor, fsdp)),
            (r"experts.w2.weight$", P(expert, fsdp, tensor)),
        ]
    if "experts" in row.config:
        return [
            (r"mlp.experts.(gate|up)_proj.weight$", P(expert, tensor, fsdp)),
            (r"mlp.experts.down_proj.weight$", P(expert, fsdp, tensor)),
        ]
    return []


def _heads(preset: Callable[..., PathRules]) -> Callable[[Config, Axes, Axes], PathRules]:
    return lambda config, fsdp, tensor: preset(head_dim=config["head_dim"], fsdp=fsdp, tensor=tensor)


def _deepseek(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    nope, rope, value = config["nope"], config["rope"], config["value"]
    rules = hf.deepseek_v3(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, fsdp=fsdp, tensor=tensor)
    # The small models do not compress the query.
    return rules.prepend([(r"self_attn.q_proj.weight$", optional(atomic(P(tensor, fsdp), (nope + rope, 1))))])


def _gemma3(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    head_dim = config["vision_head_dim"]
    tower: Pairs = [
        (r"vision_tower.*[qkv]_proj.weight$", atomic(P(tensor, fsdp), (head_dim, 1))),
        (r"vision_tower.*[qkv]_proj.bias$", atomic(P(tensor), (head_dim,))),
        (r"vision_tower.*out_proj.weight$", atomic(P(fsdp, tensor), (1, head_dim))),
        (r"vision_tower.*fc1.weight$", P(tensor, fsdp)),
        (r"vision_tower.*fc1.bias$", P(tensor)),
        (r"vision_tower.*fc2.weight$", P(fsdp, tensor)),
        (r"vision_tower|multi_modal_projector", _anywhere(fsdp)),
    ]
    return hf.gemma(head_dim=config["head_dim"], fsdp=fsdp, tensor=tensor).prepend(tower)


def _llama4(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    head_dim = config["vision_head_dim"]
    own: Pairs = [
        (r"vision_model.*[qkv]_proj.weight$", atomic(P(tensor, fsdp), (head_dim, 1))),
        (r"vision_model.*[qkv]_proj.bias$", atomic(P(tensor), (head_dim,))),
        (r"vision_model.*o_proj.weight$", atomic(P(fsdp, tensor), (1, head_dim))),
        (r"vision_model.*fc1.weight$", P(tensor, fsdp)),
        (r"vision_model.*fc1.bias$", P(tensor)),
        (r"vision_model.*fc2.weight$", P(fsdp, tensor)),
        (r"vision_model|multi_modal_projector", _anywhere(fsdp)),
        (r"router.weight$", P(None, fsdp)),
    ]
    return hf.llama(head_dim=config["head_dim"], fsdp=fsdp, tensor=tensor).prepend(own)


def _gpt_oss(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    own: Pairs = [
        (r"[qkv]_proj.bias$", atomic(P(tensor), (config["head_dim"],))),
        (r"sinks$", P(tensor)),
        (r"router.weight$", P(None, fsdp)),
        (r"(o_proj|router).bias$", _anywhere(fsdp)),
    ]
    return hf.llama(head_dim=config["head_dim"], fsdp=fsdp, tensor=tensor).prepend(own)


def _qwen3_next(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    size, head_dim = config["linear_head_dim"], config["head_dim"]
    ratio = config["linear_value_heads"] // config["linear_key_heads"]
    own: Pairs = [
        # Each head of the keys has beside it its query, and the values and gates that belong to it.
        (r"in_proj_qkvz.weight$", atomic(P(tensor, fsdp), (2 * size * (1 + ratio), 1))),
        (r"in_proj_ba.weight$", atomic(P(tensor, fsdp), (2 * ratio, 1))),
        (r"linear_attn.out_proj.weight$", atomic(P(fsdp, tensor), (1, size))),
        (r"linear_attn.(conv1d.weight|dt_bias|A_log)$", _anywhere(fsdp)),
        (r"self_attn.q_proj.weight$", atomic(P(tensor, fsdp), (2 * head_dim, 1))),
        (r"(shared_expert_gate|mtp.fc).weight$", P(None, fsdp)),
        (r"mtp.pre_fc_norm_\w+.weight$", _anywhere(fsdp)),
    ]
    return hf.qwen3_moe(head_dim=head_dim, fsdp=fsdp, tensor=tensor).prepend(own)


def _vit(config: Config, fsdp: Axes, tensor: Axes) -> PathRules:
    return PathRules(
        [
            (r"(query|key|value).kernel$", P(fsdp, tensor)),
            (r"(query|key|value).bias$", P(tensor)),
            (r"out.kernel$", P(tensor, None, fsdp)),
            (r"Dense_0.kernel$", P(fsdp, tensor)),
            (r"Dense_0.bias$", P(tensor)),
            (r"Dense_1.kernel$", P(tensor, fsdp)),
            (r".*", _anywhere(fsdp)),
        ]
    )


def _anywhere(fsdp: Axes) -> Any:
    return fsdp_strategy(fsdp) if fsdp else replicate


_BASE: Final[Mapping[str, Callable[[Config, Axes, Axes], PathRules]]] = MappingProxyType(
    {
        "bert": _heads(hf.bert),
        "deepseek": _deepseek,
        "gemma": _heads(hf.gemma),
        "gemma3": _gemma3,
        "gpt": _heads(hf.gpt2),
        "gpt_oss": _gpt_oss,
        "llama": _heads(hf.llama),
        "llama4": _llama4,
        "mistral": _heads(hf.mistral),
        "mixtral": _heads(hf.mixtral),
        "qwen2": _heads(hf.qwen2),
        "qwen3": _heads(hf.qwen3),
        "qwen3_moe": _heads(hf.qwen3_moe),
        "qwen3_next": _qwen3_next,
        "starcoder2": _heads(hf.starcoder2),
        "t5": _heads(hf.t5),
        "vit": _vit,
    }
)
