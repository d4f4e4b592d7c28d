"""The layouts of checkpoints under Hugging Face's names, read off their configurations."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from ..._ground.errors import MapError
from ..._ground.text import quoted
from ._layout import TreeLayout
from ._places import Entry, Fused, Scaled


Rows = dict[str, Entry]


def hugging_face(
    config: Mapping[str, Any], *, prefix: str | None = None, ahead: Literal["raise", "drop"] = "raise"
) -> TreeLayout:
    """The layout of a checkpoint under Hugging Face's names.

    BERT's has its pooler. For a checkpoint without one: `.without("pooler", "pooler_bias")`.

    **Arguments:**

    - `config`: what its `config.json` says. Of models that see too, the part for text is used.
    - `prefix`: what stands before every name but the output weights', where it is not what the family usually has:
        `"transformer."` for a GPT-2 that was saved with its head.
    - `ahead`: of DeepSeek's layers behind the last that predict further tokens, for which there is no table. `"raise"`:
        an error, if the configuration has them. `"drop"`: they are left out, as Transformers leaves them out.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` for a `model_type` of which there is no table, for a configuration without a number that is needed, and
    for layers that predict ahead.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        hf = maps.hugging_face(config).to(maps.stacked(config))
        assert "layers/attention/query" in hf.rules
        ```
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        near = difflib.get_close_matches(str(kind), _FAMILIES, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(_FAMILIES)}."
        raise MapError(
            f"there is no table for the `model_type` {quoted(str(kind))}; {hint} Write its `TreeLayout`, one line per "
            "kind of weight."
        )
    text = text_config(config)
    count = text.get("num_nextn_predict_layers")
    if count and ahead != "drop":
        raise MapError(
            f"the configuration has {count} layer(s) behind the last that predict ahead (`num_nextn_predict_layers`), "
            "and there is no table for them; leave them out: `maps.hugging_face(config, ahead='drop')`."
        )
    rows, rest = _FAMILIES[str(kind)](text, prefix)
    if text.get("quantization_config"):
        rows = _in_blocks(rows, text["quantization_config"])
    return TreeLayout(rows, sizes=sizes_of(text), rest=rest)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is about text, with the kind of the whole model."""
    inner = config.get("text_config")
    return {**config, **inner, "model_type": config["model_type"]} if isinstance(inner, Mapping) else dict(config)


_SIZES = {
    "embed": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "latent": ("kv_lora_rank",),
    "value_dim": ("v_head_dim",),
}


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of axes that a configuration says."""
    found = {axis: _number(config, names) for axis, names in _SIZES.items()}
    if found["dim"] is None and found["embed"] and found["heads"] and found["latent"] is None:
        found["dim"] = found["embed"] // found["heads"]
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    if found["latent"] is not None:
        nope, rope = needed(config, "qk_nope_head_dim"), needed(config, "qk_rope_head_dim")
        found |= {"dim": nope + rope, "both_dim": nope + needed(config, "v_head_dim"), "kv_heads": None}
        found |= {"query_latent": config.get("q_lora_rank"), "latent_and_rope": needed(config, "kv_lora_rank") + rope}
    if config.get("num_nextn_predict_layers"):
        # The layer that predicts ahead has the names of one more.
        layers, dense = needed(config, "num_hidden_layers"), config.get("first_k_dense_replace", 0)
        found |= {"layers": layers, "moe_layers": layers - dense}
    return {axis: size for axis, size in found.items() if size}


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)


def needed(config: Mapping[str, Any], name: str) -> int:
    """A number of a configuration, or an error that names it."""
    if config.get(name) is None:
        raise MapError(f"the configuration of {config['model_type']!r} does not say `{name}`; add it.")
    return config[name]


def _is_tied(config: Mapping[str, Any], usually: bool = False) -> bool:
    return bool(config.get("tie_word_embeddings", usually))


_HEADS = (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))


def _attention(at: str, *, bias: bool = False, out_bias: bool = False, norms: bool = False) -> Rows:
    rows: Rows = {}
    for kind, heads in _HEADS:
        rows[f"{at}{kind[0]}_proj.weight"] = f"{kind}: ({heads} dim) embed"
        if bias:
            rows[f"{at}{kind[0]}_proj.bias"] = f"{kind}_bias: ({heads} dim)"
    rows[f"{at}o_proj.weight"] = "out: embed (heads dim)"
    if out_bias:
        rows[f"{at}o_proj.bias"] = "out_bias: embed"
    if norms:
        rows |= {f"{at}q_norm.weight": "query_norm: dim", f"{at}k_norm.weight": "key_norm: dim"}
    return rows


def _mlp(at: str, kinds: str = "", axes: str = "hidden") -> Rows:
    return {
        f"{at}gate_proj.weight": f"{kinds}gate: {axes} embed",
        f"{at}up_proj.weight": f"{kinds}up: {axes} embed",
        f"{at}down_proj.weight": f"{kinds}down: embed {axes}",
    }


_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_FOUR_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def _decoder(prefix: str, layer: Rows, norms: Mapping[str, str], *, tied: bool, head: str = "lm_head.weight") -> Rows:
    at = f"{prefix}layers.{{layers}}."
    rows: Rows = {f"{prefix}embed_tokens.weight": "embedding: vocab embed"}
    rows |= {f"{at}{name}.weight": f"{kind}: embed" for name, kind in norms.items()}
    rows |= layer | {f"{prefix}norm.weight": "norm: embed"}
    return rows if tied else rows | {head: "head: vocab embed"}


_Made = tuple[Rows, tuple[str, ...]]


def _llama(config: Mapping[str, Any], prefix: str | None) -> _Made:
    prefix, kind = "model." if prefix is None else prefix, config["model_type"]
    at, has_bias = f"{prefix}layers.{{layers}}.", bool(config.get("attention_bias", False))
    layer = _attention(
        f"{at}self_attn.", bias=has_bias or kind == "qwen2", out_bias=has_bias, norms=kind in ("qwen3", "qwen3_moe")
    )
    if kind == "qwen3_moe":
        layer |= {f"{at}mlp.gate.weight": "router: experts embed"}
        layer |= _mlp(f"{at}mlp.experts.{{experts}}.", "expert_")
    elif kind == "mixtral":
        moe = f"{at}block_sparse_moe."
        layer[f"{moe}gate.weight"] = "router: experts embed"
        layer[f"{moe}experts.{{experts}}.w1.weight"] = "expert_gate: hidden embed"
        layer[f"{moe}experts.{{experts}}.w3.weight"] = "expert_up: hidden embed"
        layer[f"{moe}experts.{{experts}}.w2.weight"] = "expert_down: embed hidden"
    else:
        layer |= _mlp(f"{at}mlp.")
        if config.get("mlp_bias"):
            layer |= {f"{at}mlp.{one}_proj.bias": f"{one}_bias: hidden" for one in ("gate", "up")}
            layer[f"{at}mlp.down_proj.bias"] = "down_bias: embed"
    # Old checkpoints have these beside what is learned.
    rest = (f"{at}self_attn.rotary_emb.inv_freq",)
    return _decoder(prefix, layer, _NORMS, tied=_is_tied(config)), rest


def _gemma(config: Mapping[str, Any], prefix: str | None) -> _Made:
    kind = config["model_type"]
    prefix = prefix if prefix is not None else "language_model.model." if kind == "gemma3" else "model."
    at = f"{prefix}layers.{{layers}}."
    layer = _attention(f"{at}self_attn.", norms=kind in ("gemma3", "gemma3_text")) | _mlp(f"{at}mlp.")
    rest = ("vision_tower.{rest*}", "multi_modal_projector.{rest*}") if kind == "gemma3" else ()
    norms = _NORMS if kind == "gemma" else _FOUR_NORMS
    head = "language_model.lm_head.weight" if kind == "gemma3" else "lm_head.weight"
    return _decoder(prefix, layer, norms, tied=_is_tied(config, True), head=head), rest


def _gpt2(config: Mapping[str, Any], prefix: str | None) -> _Made:
    prefix = prefix or ""
    at = f"{prefix}h.{{layers}}."
    thirds = [f"{kind}: embed ({heads} dim)" for kind, heads in _HEADS]
    biases = [f"{kind}_bias: ({heads} dim)" for kind, heads in _HEADS]
    rows: Rows = {f"{prefix}wte.weight": "embedding: vocab embed", f"{prefix}wpe.weight": "positions: positions embed"}
    for name, kind in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
        rows |= {f"{at}{name}.weight": f"{kind}: embed", f"{at}{name}.bias": f"{kind}_bias: embed"}
    # Conv1D keeps [in, out].
    rows |= {f"{at}attn.c_attn.weight": Fused(*thirds, dim=1), f"{at}attn.c_attn.bias": Fused(*biases)}
    rows |= {f"{at}attn.c_proj.weight": "out: (heads dim) embed", f"{at}attn.c_proj.bias": "out_bias: embed"}
    rows |= {f"{at}mlp.c_fc.weight": "up: embed hidden", f"{at}mlp.c_fc.bias": "up_bias: hidden"}
    rows |= {f"{at}mlp.c_proj.weight": "down: hidden embed", f"{at}mlp.c_proj.bias": "down_bias: embed"}
    rows |= {f"{prefix}ln_f.weight": "norm: embed", f"{prefix}ln_f.bias": "norm_bias: embed"}
    # The causal mask, which is no weight.
    return rows, (f"{at}attn.bias", f"{at}attn.masked_bias", *(() if not prefix else ("lm_head.weight",)))


def _deepseek(config: Mapping[str, Any], prefix: str | None) -> _Made:
    prefix = "model." if prefix is None else prefix
    at, dense = f"{prefix}layers.{{layers}}.", config.get("first_k_dense_replace", 0)
    attention: Rows = {}
    if config.get("q_lora_rank"):
        attention |= {
            "q_a_proj": "query_a: query_latent embed",
            "q_a_layernorm": "query_a_norm: query_latent",
            "q_b_proj": "query_b: (heads dim) query_latent",
        }
    else:
        attention["q_proj"] = "query: (heads dim) embed"
    attention |= {
        "kv_a_proj_with_mqa": "kv_a: latent_and_rope embed",
        "kv_a_layernorm": "kv_a_norm: latent",
        "kv_b_proj": "kv_b: (heads both_dim) latent",
        "o_proj": "latent_out: embed (heads value_dim)",
    }
    layer: Rows = {f"{at}self_attn.{name}.weight": entry for name, entry in attention.items()}
    if dense:
        layer |= _mlp(f"{prefix}layers.{{dense_layers}}.mlp.")
    moe = f"{prefix}layers.{{moe_layers+{dense}}}.mlp." if dense else f"{at}mlp."
    layer |= {f"{moe}gate.weight": "router: experts embed"}
    if config.get("topk_method", "noaux_tc" if config["model_type"] != "deepseek_v2" else "") == "noaux_tc":
        layer[f"{moe}gate.e_score_correction_bias"] = "router_bias: experts"
    layer |= _mlp(f"{moe}experts.{{experts}}.", "expert_") | _mlp(f"{moe}shared_experts.", "shared_", "shared_hidden")
    ahead = config.get("num_nextn_predict_layers") or 0
    last = needed(config, "num_hidden_layers") if ahead else 0
    rest = tuple(f"{prefix}layers.{last + one}.{{rest*}}" for one in range(ahead))
    return _decoder(prefix, layer, _NORMS, tied=_is_tied(config)), rest


def _bert(config: Mapping[str, Any], prefix: str | None) -> _Made:
    prefix = prefix or ""
    table, at = f"{prefix}embeddings.", f"{prefix}encoder.layer.{{layers}}."
    rows: Rows = {
        f"{table}word_embeddings.weight": "embedding: vocab embed",
        f"{table}position_embeddings.weight": "positions: positions embed",
        f"{table}token_type_embeddings.weight": "types: types embed",
        f"{table}LayerNorm.weight": "norm: embed",
        f"{table}LayerNorm.bias": "norm_bias: embed",
    }
    for kind, heads in _HEADS:
        rows[f"{at}attention.self.{kind}.weight"] = f"{kind}: ({heads} dim) embed"
        rows[f"{at}attention.self.{kind}.bias"] = f"{kind}_bias: ({heads} dim)"
    for name, kind, axes in (
        ("attention.output.dense", "out", "embed (heads dim)"),
        ("intermediate.dense", "up", "hidden embed"),
        ("output.dense", "down", "embed hidden"),
    ):
        rows[f"{at}{name}.weight"] = f"{kind}: {axes}"
        rows[f"{at}{name}.bias"] = f"{kind}_bias: {axes.split()[0]}"
    for name, kind in (("attention.output.LayerNorm", "attention_norm"), ("output.LayerNorm", "mlp_norm")):
        rows |= {f"{at}{name}.weight": f"{kind}: embed", f"{at}{name}.bias": f"{kind}_bias: embed"}
    rows |= {
        f"{prefix}pooler.dense.weight": "pooler: pooled embed",
        f"{prefix}pooler.dense.bias": "pooler_bias: pooled",
    }
    return rows, (f"{table}position_ids",)


def _in_blocks(rows: Rows, quantization: Mapping[str, Any]) -> Rows:
    """What `torch.nn.Linear` holds in fp8, with a scale per block of each matrix but the router's."""
    if quantization.get("quant_method") != "fp8" or not quantization.get("weight_block_size"):
        method = quantization.get("quant_method")
        raise MapError(f"weights of the `quant_method` {method!r} without blocks; there is a table for fp8 in blocks.")
    block, found = tuple(quantization["weight_block_size"]), {}
    for path, entry in rows.items():
        is_linear = isinstance(entry, str) and path.endswith(("_proj.weight", "_with_mqa.weight"))
        found[path] = Scaled(str(entry), f"{path}_scale_inv", block, "bfloat16") if is_linear else entry
    return found


_FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any], str | None], _Made]]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _llama),
        **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), _gemma),
        "gpt2": _gpt2,
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
        "bert": _bert,
    }
)
