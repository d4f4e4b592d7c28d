"""Hugging Face's tensor parallel and expert parallel plans as PathRules, and back. Neither transformers nor torch is
needed: a plan is a dict of the class, or is read from the source of a configuration file.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .._rules import Atomic, PathRules, Replicate, bare, check_path_rules, near, optional, replicate


# Which dimension of a weight each style cuts, counted from the end; `None` where every device has the whole one. That
# is what transformers' `ALL_PARALLEL_STYLES` do with parameters; what they do with activations XLA finds by itself.
_ROWS, _COLUMNS, _EXPERTS = "rows", "columns", "experts"
STYLES: dict[str, str | None] = {
    **dict.fromkeys(["colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"], _ROWS),
    **dict.fromkeys(["rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"], _COLUMNS),
    "embedding_rowwise": "first",
    "embedding_colwise": "second",
    "grouped_gemm": _EXPERTS,
    **dict.fromkeys(["replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "replicate"], None),
    **dict.fromkeys(["moe_tp_experts", "moe_identity_expert", "local_params", "sequence_parallel"], None),
    "ep_dispatch_experts": None,
}
_PACKED = 2
# The first two belong to the class of a configuration, the last one to that of a model.
_ATTRIBUTES = ("base_model_tp_plan", "base_model_ep_plan", "_tp_plan")
# What checkpoints call the parts of one expert, where the plan has all experts in one parameter; w1 and w3 are gate and
# up. `transformers/conversion_mapping.py` of 5.23 has these names.
_ON_DISK = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}


class Plans(NamedTuple):
    """The plans of one configuration class, from the names of modules and parameters to styles.

    **Arguments:**

    - `tensor`: `base_model_tp_plan`; empty where there is none.
    - `expert`: `base_model_ep_plan`; empty likewise.
    - `head`: `_tp_plan` of the model's class, of what lies beside the base model: `lm_head`; empty likewise.
    """

    tensor: dict[str, str]
    expert: dict[str, str]
    head: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Style:
    """The target of a rule: what one style does with a parameter, whatever its rank. See `rules_of`.

    **Arguments:**

    - `key`: the name in the plan, with `*` for numbers.
    - `style`: the name of the style.
    - `axis`: the mesh axes.
    - `unit`: how many elements of the dimension that is cut stay together.
    - `is_one_expert`: whether the parameter is of one expert, as checkpoints have it, and the plan's of all.
    """

    key: str
    style: str
    axis: str | tuple[str, ...]
    unit: int = 1
    is_one_expert: bool = False

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | Atomic:
        rank = len(leaf.shape)
        if self.is_one_expert and STYLES[self.style] == _EXPERTS:
            raise RuleError(
                f"the style {self.style!r} of `{self.key}` shards the dimension of experts, and `{path}` is one "
                "expert; stack the experts into one array, or leave out `expert=`."
            )
        dim = _dim(self.style, re.split("[./]", path)[-1], rank)
        if dim is None:
            return PartitionSpec()
        spec = PartitionSpec(*[None] * dim, self.axis)
        # Gate and up lie one behind the other: no shard may hold a part of each.
        parts = _PACKED if self.style.startswith("packed") and rank > 1 and not self.is_one_expert else 1
        size = leaf.shape[dim]
        unit = size // parts if parts > 1 and size % parts == 0 else self.unit
        return spec if unit == 1 else Atomic(spec, (*[1] * dim, unit, *[1] * (rank - dim - 1)))


def plans_in(source: str) -> dict[str, Plans]:
    """The plans of all classes in the source of a file, which is read and not run.

    **Arguments:**

    - `source`: the text of a `configuration_*.py`, or of a `modeling_*.py`, whose classes have a `head` alone:
        `plans._replace(head=others.head)`.

    **Returns:**

    By the name of the class its `Plans`; classes without any of their own are left out.

    **Raises:**

    `RuleError` for a plan that is computed from something else than constants.

    !!! Example

        ```python
        from shardfx.interop import huggingface

        source = '''
        class SmallConfig:
            base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}
        '''
        plans = huggingface.plans_in(__import__("textwrap").dedent(source))
        assert plans["SmallConfig"].tensor == {"layers.*.mlp.up_proj": "colwise"}
        ```
    """
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            given = {name: value for statement in node.body for name, value in _assigned(statement)}
            plans = [_plan(node.name, name, given.get(name)) for name in _ATTRIBUTES]
            if any(plan is not None for plan in plans):
                found[node.name] = Plans(*[plan or {} for plan in plans])
    return found


def plans_of(config: object) -> Plans:
    """The plans of a model or a configuration, or of the class of either.

    **Arguments:**

    - `config`: a model or its class; or a configuration or its class, which has no plan for `lm_head`.

    **Returns:**

    Its `Plans`.

    **Raises:**

    `RuleError` if it has no tensor parallel plan.
    """
    # A model has merged all plans in its own `_tp_plan`; that of its class is for its head alone.
    head = getattr(config if isinstance(config, type) else type(config), "_tp_plan", None)
    config = getattr(config, "config_class", None) or config
    tensor, expert = (getattr(config, name, None) for name in _ATTRIBUTES[:2])
    if not tensor:
        raise RuleError(f"{config!r:.80} has no `base_model_tp_plan`; write rules for it, or take `presets.hf`.")
    return Plans(dict(tensor), dict(expert or {}), dict(head or {}))


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

    Weights are in torch's layout, `[out, in]`, as checkpoints have them; the names may be joined by "." or "/".

    **Arguments:**

    - `plans`: what `plans_in` or `plans_of` gives, or a tensor parallel plan alone. A configuration has no plan for
        `lm_head`, which is then left to `rest`; `plans_of(model)` has one.
    - `tensor`: the mesh axis of tensor parallelism.
    - `expert`: the mesh axis of expert parallelism: then the plan for experts goes before the other one.
    - `prefix`: what the names of the model's parameters begin with, which is the `base_model_prefix` of its class:
        `"model"` for most, `"gpt_neox"` for GPT-NeoX. They may lack it.
    - `units`: by the last name of a module (`k_proj`) how many elements of the dimension that is cut stay together:
        `head_dim`. Hugging Face checks only that heads divide.
    - `rest`: the target for parameters that the plan does not name, which Hugging Face replicates.

    **Returns:**

    [`shardfx.PathRules`][]; every rule may go unused, since plans serve several variants of a model. A packed weight
    (gate and up in one) is cut between its parts only. Experts may be one array, as in the model, or an array each, as
    in checkpoints (`experts.0.gate_proj`, `experts.0.w1`).

    **Raises:**

    `RuleError` for a style that transformers does not have; where a plan is made, for expert parallelism of experts
    that are an array each.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, plan
        from shardfx.interop import huggingface

        rules = huggingface.rules_of(
            {
                "layers.*.self_attn.k_proj": "colwise",
                "layers.*.self_attn.o_proj": "rowwise",
            },
            units={"k_proj": 128},
        )
        weight = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
        tree = {"model.layers.0.self_attn.k_proj.weight": weight}
        made = plan(tree, MeshSpec({"tensor": 4}), paths=rules)
        assert made.leaves[0].spec == P("tensor")
        ```
    """
    own, experts, head = plans if isinstance(plans, Plans) else (plans, {}, {})
    merged = {key: (style, tensor) for key, style in {**own, **head}.items()}
    if expert is not None:
        axes = {key: expert if STYLES.get(style) == _EXPERTS else tensor for key, style in experts.items()}
        merged |= {key: (style, axes[key]) for key, style in experts.items()}
    for key, (style, _) in merged.items():
        if style not in STYLES:
            raise RuleError(
                f"{key!r} has the style {style!r}{near(style, tuple(STYLES))}, which is none of {[*STYLES]}."
            )
    rules: list[tuple[str, object]] = []
    # A parameter's own name decides before that of its module.
    for key in sorted(merged, key=lambda key: -key.count(".")):
        style, axis = merged[key]
        module, _, name = key.rpartition(".")
        begin = "" if key in head else prefix
        target = Style(key, style, axis, (units or {}).get(name, 1))
        rules.append((_regex(key, begin), optional(target)))
        if name in _ON_DISK and module.endswith("experts"):
            single = dataclasses.replace(target, is_one_expert=True)
            rules.append((_on_disk(module, _ON_DISK[name], begin), optional(single)))
    return PathRules([*rules, (".*", rest)])


def plan_of(rules: PathRules) -> dict[str, str]:
    """The plan, in Hugging Face's words, of rules that were made by `rules_of` or have targets of its kind.

    **Arguments:**

    - `rules`: rules whose targets are those of `rules_of`, and at the end at most one for the rest.

    **Returns:**

    From the names of modules to styles.

    **Raises:**

    `RuleError` that names the rule that the format cannot say.
    """
    check_path_rules("rules", rules)
    found = {}
    for number, (regex, target) in enumerate(rules.rules):
        inner = bare(target)
        if isinstance(inner, Style):
            found[inner.key] = inner.style  # the rule for single experts says the same
        elif not (number == len(rules.rules) - 1 and isinstance(inner, Replicate)):
            raise RuleError(
                f"rule {number} ({regex!r}) has the target {inner!r}, which a plan of Hugging Face cannot say: it "
                "gives modules the names of styles, and replicates the rest. Write it as `Style(key, style, axis)`."
            )
    return found


def _dim(style: str, name: str, rank: int) -> int | None:
    """Which dimension of a parameter a style cuts."""
    where = STYLES[style]
    if where is None or not rank:
        return None
    if where == _COLUMNS:
        is_whole = name == "bias" or (style == "packed_rowwise" and rank == 1)
        return None if is_whole else rank - 1
    if where == "second":
        return 1 if rank > 1 else None
    return max(rank - 2, 0) if where == _ROWS else 0


def _regex(key: str, prefix: str) -> str:
    return rf"^{_path(key, prefix)}(?:[./][^./]+)?$"


def _on_disk(module: str, names: tuple[str, ...], prefix: str) -> str:
    """A regex for the parameters of single experts. Mixtral's module of experts has another name in checkpoints."""
    path = _path(module, prefix).replace("[./]mlp[./]", "[./](?:mlp|block_sparse_moe)[./]")
    return rf"^{path}[./]\d+[./](?:{'|'.join(names)})[./][^./]+$"


def _path(key: str, prefix: str) -> str:
    parts = [r"\d+" if part == "*" else re.escape(part) for part in key.split(".")]
    begin = rf"(?:{re.escape(prefix)}[./])?" if prefix else ""
    return begin + "[./]".join(parts)


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    """The names that a statement of a class assigns, with what."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return [(statement.target.id, statement.value)] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.Assign):
        return [(target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _plan(owner: str, name: str, node: ast.expr | None) -> dict[str, str] | None:
    value = None if node is None else _value(node, {}, f"`{owner}.{name}`")
    if value is not None and not isinstance(value, dict):
        raise RuleError(f"`{owner}.{name}` is {value!r:.80}, and no plan; it must map names to styles.")
    return value


def _value(node: ast.expr, known: Mapping[str, object], what: str) -> Any:
    """The value of an expression that is made of constants."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in known:
            return known[name]
        case ast.Tuple(parts) | ast.List(parts):
            return tuple(_value(part, known, what) for part in parts)
        case ast.JoinedStr(parts):
            return "".join(str(_value(part, known, what)) for part in parts)
        case ast.FormattedValue(inner, -1, None):
            return _value(inner, known, what)
        case ast.Dict(keys, values):
            found: dict[object, object] = {}
            for key, value in zip(keys, values, strict=True):
                inner = _value(value, known, what)
                found |= inner if key is None else {_value(key, known, what): inner}
            return found
        case ast.DictComp(key, value, [ast.comprehension(ast.Name(name), over, [], 0)]):
            each = [{**known, name: item} for item in _value(over, known, what)]
            return {_value(key, one, what): _value(value, one, what) for one in each}
    raise RuleError(
        f"{what} holds `{ast.unparse(node)[:80]}`, which is no constant; give the dict itself to `rules_of`."
    )
