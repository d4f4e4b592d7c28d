"""Hugging Face's plans for tensor and expert parallelism as PathRules. Torch is not
needed, since plans are dicts.

A plan maps the names of modules and parameters to styles, such as "colwise". A style
says how to shard.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .._rules import Atomic, PathRules, near, optional, replicate
from ._mappings import check_mapping


# The dimension of a weight that each style shards; `None` if every device has the whole
# weight. It is the one that transformers' `ALL_PARALLEL_STYLES` shard; XLA finds the
# shardings of activations itself. Those after the blank line are of transformers' main
# branch in September 2026, `integrations/tensor_parallel.py`, and in no release yet.
_ROWS = "rows"
_COLUMNS = "columns"
_EXPERTS = "experts"
STYLES: dict[str, str | None] = {
    **dict.fromkeys(
        ["colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"], _ROWS
    ),
    **dict.fromkeys(
        ["rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"], _COLUMNS
    ),
    "embedding_rowwise": "first",
    "embedding_colwise": "second",
    "grouped_gemm": _EXPERTS,
    **dict.fromkeys(
        ["replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "replicate"],
        None,
    ),
    **dict.fromkeys(
        ["moe_tp_experts", "moe_identity_expert", "local_params", "sequence_parallel"],
        None,
    ),
    "ep_dispatch_experts": None,
    **dict.fromkeys(["colwise_allgather", "colwise_loss_parallel"], _ROWS),
    "moe_tp_gate_up_colwise": _ROWS,
    **dict.fromkeys(["rowwise_allreduce", "rowwise_reduce_scatter"], _COLUMNS),
    "moe_tp_down_rowwise": _COLUMNS,
    **dict.fromkeys(["vocab_allreduce", "vocab_reduce_scatter"], "first"),
    **dict.fromkeys(["activation", "activation_seq_dim_2", "ep_router"], None),
    **dict.fromkeys(["module_allgather", "module_allgather_hidden_states"], None),
    **dict.fromkeys(["module_allgather_split", "moe_experts_allreduce"], None),
}
# The styles of weights that hold gate and up in one, and the number of these parts.
_PACKED_STYLES = ("packed_colwise", "packed_rowwise", "moe_tp_gate_up_colwise")
_PACKED_PARTS = 2
# The styles of the inside of experts, which a plan for experts replaces.
_INSIDE_EXPERTS = ("moe_tp_gate_up_colwise", "moe_tp_down_rowwise")
# transformers shards the table of embeddings over the vocabulary if a plan does not name
# it: `distributed/mixin.py`, since 5.22.
_EMBEDDING = {"embed_tokens": "embedding_rowwise"}
# Checkpoints have parameters of single experts under these names; the plan has one
# parameter for all experts. w1 and w3 are gate and up. The names are from
# `transformers/conversion_mapping.py` of 5.23.
_EXPERT_NAMES = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
}


class Plans(NamedTuple):
    """The parallelism plans of a configuration class.

    **Arguments:**

    - `tensor`: `base_model_tp_plan`, a dict from the names of modules and parameters to
      styles such as "colwise"; or `base_model_sp_plan`.
    - `expert`: `base_model_ep_plan`; empty if the class has none.
    - `head`: `_tp_plan` of the model's class, for parameters outside of the base model
      (`lm_head`); may be empty.
    """

    tensor: dict[str, str]
    expert: dict[str, str]
    head: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Style:
    """The target of a path rule: how a style of a Hugging Face plan, such as "colwise",
    shards a parameter of any rank.

    **Arguments:**

    - `key`, `style`: the name in the plan, with `*` for numbers, and the name of its
      style.
    - `axis`: the mesh axes over which the parameter is sharded.
    - `unit`: the number of elements of the sharded dimension that no shard may split.
    - `is_one_expert`: whether each expert has a parameter of its own, as in
      checkpoints, instead of one parameter for all experts of a layer.
    """

    key: str
    style: str
    axis: str | tuple[str, ...]
    unit: int = 1
    is_one_expert: bool = False

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | Atomic:
        """Returns the spec of the parameter `leaf` at `path`, with the units that no
        shard may split if there are any. Raises `RuleError` for one expert of a style
        that shards the dimension of experts.
        """
        rank = len(leaf.shape)
        if self.is_one_expert and STYLES[self.style] == _EXPERTS:
            raise RuleError(
                f"the style {self.style!r} of `{self.key}` shards the dimension of"
                f" experts, and `{path}` is one expert; stack the experts into one"
                " array, or leave out `expert=`."
            )
        name = re.split("[./]", path)[-1]
        dim = _sharded_dim(self.style, name, rank)
        if dim is None:
            return PartitionSpec()
        spec = PartitionSpec(*[None] * dim, self.axis)
        size = leaf.shape[dim]
        unit = self.unit
        is_packed = self.style in _PACKED_STYLES and rank > 1
        if is_packed and not self.is_one_expert and size % _PACKED_PARTS == 0:
            # Gate and up are concatenated: no shard may hold a part of each.
            unit = size // _PACKED_PARTS
        if unit == 1:
            return spec
        units = [1] * rank
        units[dim] = unit
        return Atomic(spec, tuple(units))


def plans_of(config: object, *, sequence: bool = False) -> Plans:
    """The parallelism plans of a model or a configuration, or of its class.

    **Arguments:**

    - `config`: a model, a configuration, or the class of either. A configuration has no
      plan for `lm_head`.
    - `sequence`: read `base_model_sp_plan` and `_sp_plan`, the plans for sequence
      parallelism, in the place of those for tensor parallelism.

    **Returns:**

    The `Plans`.

    **Raises:**

    `RuleError` if there is no such plan.
    """
    # A model has all plans merged in its own `_tp_plan`; that of its class is only for
    # its head.
    kind = "tp"
    if sequence:
        kind = "sp"
    owner = config
    if not isinstance(config, type):
        owner = type(config)
    head = getattr(owner, f"_{kind}_plan", None)
    config = getattr(config, "config_class", None) or config
    tensor = getattr(config, f"base_model_{kind}_plan", None)
    expert = getattr(config, "base_model_ep_plan", None)
    if not tensor:
        raise RuleError(
            f"{config!r:.80} has no `base_model_{kind}_plan`; write rules for it, or"
            " take `presets.hf`."
        )
    return Plans(
        tensor=dict(tensor),
        expert=dict(expert or {}),
        head=dict(head or {}),
    )


def rules_of(
    plans: Plans | Mapping[str, str],
    *,
    tensor: str | tuple[str, ...] = "tensor",
    expert: str | tuple[str, ...] | None = None,
    prefix: str = "model",
    units: Mapping[str, int] | None = None,
    rest: object = replicate,
) -> PathRules:
    """PathRules that shard a model's parameters as Hugging Face's plan does.

    Weights have torch's layout, `[out, in]`, as in checkpoints. The names in paths may
    be joined by "." or "/".

    **Arguments:**

    - `plans`: the result of `plans_of`, or a tensor parallel plan alone. `rest` decides
      about `lm_head` if the plans lack it, as those of a configuration do.
    - `tensor`: the mesh axis of tensor parallelism.
    - `expert`: the mesh axis of expert parallelism. If it is given, the plan for
      experts has priority, and replaces the styles of the inside of experts. The rules
      of a dense model, whose `plans_of` has none for experts, are the same with it.
    - `prefix`: the `base_model_prefix` of the model's class: `"model"` for most,
      `"gpt_neox"` for GPT-NeoX. Paths without the prefix match too.
    - `units`: from the last part of a module's name, such as `k_proj`, to the number of
      elements that no shard may split, such as `head_dim`. Hugging Face checks only
      that the number of heads is divisible.
    - `rest`: the target for parameters that the plan does not name. By default they are
      replicated, as by Hugging Face. But `embed_tokens` is sharded over the vocabulary
      where the plan does not name it, as by transformers since 5.22:
      `{"embed_tokens": "replicate", **plan}` keeps it whole.

    **Returns:**

    [`shardfx.PathRules`][]. All rules are optional, since a plan is for several
    variants of a model. A name with a layer's number comes before one with `*`, in any
    order of the plan. A packed weight (gate and up in one) is sharded only between
    its parts. The experts of a layer may be one array, as in the model, or one array
    each, as in checkpoints (`experts.0.gate_proj`, `experts.0.w1`).

    **Raises:**

    `RuleError` for a style that transformers does not have, a name of `units` that the
    plan does not have, or `expert` beside a tensor parallel plan alone. Planning with
    the rules raises it for expert parallelism if each expert has an array of its own.

    !!! Example

        ```python
        import jax
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, plan
        from shardfx.interop import huggingface

        styles = {"layers.*.self_attn.k_proj": "colwise"}
        rules = huggingface.rules_of(styles, units={"k_proj": 128})
        weight = jax.ShapeDtypeStruct((1024, 4096), "bfloat16")
        tree = {"model.layers.0.self_attn.k_proj.weight": weight}
        made = plan(tree, MeshSpec({"tensor": 4}), paths=rules)
        assert made.leaves[0].spec == P("tensor")
        ```
    """
    if not isinstance(plans, Plans):
        plans = _plans_alone(plans, expert)
    head = plans.head
    styles = {**plans.tensor, **head}
    if plans.tensor:
        styles = {**_EMBEDDING, **styles}
    if expert is not None and plans.expert:
        styles = {
            key: style for key, style in styles.items() if style not in _INSIDE_EXPERTS
        }
    # The style and the mesh axes of each name of the plan.
    merged = {key: (style, tensor) for key, style in styles.items()}
    if expert is not None:
        for key, style in plans.expert.items():
            axis = tensor
            if STYLES.get(style) == _EXPERTS:
                axis = expert
            merged[key] = (style, axis)
    for key, (style, _) in merged.items():
        if style not in STYLES:
            raise RuleError(
                f"{key!r} has the style {style!r}{near(str(style), tuple(STYLES))}, which is"
                f" none of {[*STYLES]}."
            )
    modules = list(dict.fromkeys(key.rpartition(".")[2] for key in merged))
    for name in units or ():
        if name not in modules:
            raise RuleError(
                f"`units` names {name!r}{near(str(name), modules)}, which is no module of"
                f" the plan; it has {', '.join(modules)}."
            )
    rules: list[tuple[str, object]] = []
    for key in sorted(merged, key=_priority):
        style, axis = merged[key]
        module, _, name = key.rpartition(".")
        # The head is beside the base model.
        begin = prefix
        if key in head:
            begin = ""
        target = Style(
            key=key,
            style=style,
            axis=axis,
            unit=(units or {}).get(name, 1),
        )
        rules.append((rf"^{_path_regex(key, begin)}(?:[./][^./]+)?$", optional(target)))
        if name in _EXPERT_NAMES and module.endswith("experts"):
            single = dataclasses.replace(target, is_one_expert=True)
            rules.append(
                (_expert_path(module, _EXPERT_NAMES[name], begin), optional(single))
            )
    return PathRules([*rules, (".*", rest)])


def _plans_alone(tensor: Mapping[str, str], expert: object) -> Plans:
    """The plans of a tensor parallel plan alone. Raises `RuleError` for `expert`, which
    would have no effect, and for what is no mapping.
    """
    check_mapping("plans", tensor, "rules_of(plans_of(model.config))")
    if expert is not None:
        raise RuleError(
            f"`expert={expert!r}` shards what a plan for experts names, and the plan is"
            " one for tensor parallelism alone; pass"
            f" `rules_of(plans_of(model.config), expert={expert!r})`, or leave it out."
        )
    return Plans(
        tensor=dict(tensor),
        expert={},
        head={},
    )


def _priority(key: str) -> tuple[bool, int, int]:
    """The place of a key of a plan among its rules, as transformers looks them up: names
    with numbers only before those with `*`, then a parameter's name before that of its
    module.
    """
    return "*" in key, -key.count("."), key.count("*")


def _sharded_dim(style: str, name: str, rank: int) -> int | None:
    """The dimension of a parameter that a style shards; `None` if it shards none.

    `name` is the last part of the parameter's name, such as "weight".
    """
    # Which dimension of a weight in torch's layout, such as its rows.
    where = STYLES[style]
    if where is None or not rank:
        return None
    if where == _COLUMNS:
        if name == "bias" or (style == "packed_rowwise" and rank == 1):
            return None
        return rank - 1
    if where == "second":
        if rank > 1:
            return 1
        return None
    if where == _ROWS:
        return max(rank - 2, 0)
    return 0


def _expert_path(module: str, names: tuple[str, ...], prefix: str) -> str:
    """A regex for the paths of single experts in checkpoints, also under the names of
    Mixtral's checkpoints.

    `module` is the experts' module in the plan. `names` are the names of an expert's
    matrices, such as "gate_proj". `prefix` is an optional first part of the paths, such
    as "model".
    """
    path = _path_regex(module, prefix).replace(
        "[./]mlp[./]", "[./](?:mlp|block_sparse_moe)[./]"
    )
    return rf"^{path}[./]\d+[./](?:{'|'.join(names)})[./][^./]+$"


def _path_regex(key: str, prefix: str) -> str:
    """A regex for the paths of a plan's name, such as "layers.*.mlp". `prefix` is as for
    `_expert_path`.
    """
    path = _joined_regex(key)
    if not prefix:
        return path
    return rf"(?:{_joined_regex(prefix)}[./])?{path}"


def _joined_regex(key: str) -> str:
    """A regex for the parts of a name, joined by "." or "/". A `*` is a number."""
    parts = []
    for part in key.split("."):
        if part == "*":
            parts.append(r"\d+")
        else:
            parts.append(re.escape(part))
    return "[./]".join(parts)
