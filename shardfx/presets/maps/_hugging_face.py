"""The layout of a Hugging Face checkpoint, made from its `config.json`."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from ..._ground.errors import MapError
from ..._ground.text import quoted
from ..._rules import near
from ._entries import Scaled
from ._families import Options, Rows, prefix_of, rows_of
from ._layout import TreeLayout


# The content of a `config.json`.
Config = Mapping[str, Any]


def hugging_face(
    config: Config,
    *,
    prefix: str | None = None,
    ahead: Literal["raise", "drop"] = "raise",
) -> TreeLayout:
    """Returns the layout of a checkpoint under Hugging Face's names.

    BERT's layout includes the pooler. For a checkpoint without one use
    `.without("pooler", "pooler_bias")`.

    **Arguments:**

    - `config`: the content of `config.json`. For a model with vision, only the text
      model is used.
    - `prefix`: the prefix of every name except that of the output weights, such as
      `"transformer."` for a GPT-2 that was saved with its language-model head. `None`
      for the family's usual prefix.
    - `ahead`: `"raise"` raises for DeepSeek's multi-token prediction layers, for which
      there is no table. `"drop"` leaves them out, as Transformers does.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` for a `model_type` without a table, for a missing number in the config,
    and for multi-token prediction layers under `ahead="raise"`.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
        hf = maps.hugging_face(config).to(maps.stacked(config))
        assert "layers/attention/query" in hf.rules
        ```
    """
    check_config(config)
    kind = config.get("model_type")
    if kind not in _MODEL_TYPES:
        raise MapError(
            "there is no table for the `model_type`"
            f" {quoted(str(kind))}{near(str(kind), _MODEL_TYPES)}; there are"
            f" {', '.join(_MODEL_TYPES)}. Write its `TreeLayout`, one line per kind of"
            " weight."
        )
    text = text_config(config)
    count = text.get("num_nextn_predict_layers")
    if count and ahead != "drop":
        raise MapError(
            f"the configuration has {count} layer(s) behind the last that predict ahead"
            " (`num_nextn_predict_layers`), and there is no table for them; leave them"
            " out: `maps.hugging_face(config, ahead='drop')`."
        )
    if prefix is None:
        prefix = prefix_of(str(kind))
    rows = rows_of(str(kind), _options_of(text), prefix)
    # Paths that a checkpoint may have besides, and that no map uses.
    rest = _rest(text, prefix)
    if text.get("quantization_config"):
        rows = _with_scales(rows, text["quantization_config"])
    return TreeLayout(rows, sizes=sizes_of(text), rest=rest, known=known_sizes(text))


@runtime_checkable
class _WithGet(Protocol):
    """A config that is read by key, such as a dict or `ml_collections.ConfigDict`."""

    def get(self, key: str, /) -> Any: ...


def check_config(config: object) -> None:
    """Raises `MapError` if the argument `config` of a layout is not read by key."""
    if not isinstance(config, _WithGet):
        raise MapError(
            "`config` is the content of a model's config.json as a dict, not"
            f" {quoted(type(config).__name__)}; write `json.load(open('config.json'))`,"
            " or `config.to_dict()` for a config of Transformers."
        )


def text_config(config: Config) -> Config:
    """Returns the part of a config that describes the text model, with the `model_type`
    of the whole model.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, **inner, "model_type": config["model_type"]}
    return dict(config)


_SIZES = {
    "embed": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "latent": ("kv_lora_rank",),
    "value_dim": ("v_head_dim",),
    "streams": ("altup_num_inputs",),
    "laurel_rank": ("laurel_rank",),
    "layer_input": ("hidden_size_per_layer_input",),
    "layer_vocab": ("vocab_size_per_layer_input",),
}


def sizes_of(config: Config) -> dict[str, int]:
    """Returns the sizes of all axes, such as "embed" and "heads", whose size follows
    from the config.
    """
    sizes: dict[str, Any] = {}
    # `names` are those of the number in the configs of different families.
    for axis, names in _SIZES.items():
        numbers = [config[name] for name in names if config.get(name) is not None]
        sizes[axis] = next(iter(numbers), None)
    # Whether queries and keys are those of latent attention, as in DeepSeek.
    is_latent = sizes["latent"] is not None
    if sizes["dim"] is None and sizes["embed"] and sizes["heads"] and not is_latent:
        sizes["dim"] = sizes["embed"] // sizes["heads"]
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    if is_latent:
        nope = needed(config, "qk_nope_head_dim")
        rope = needed(config, "qk_rope_head_dim")
        sizes["dim"] = nope + rope
        sizes["both_dim"] = nope + needed(config, "v_head_dim")
        sizes["kv_heads"] = None
        sizes["query_latent"] = config.get("q_lora_rank")
        sizes["latent_and_rope"] = needed(config, "kv_lora_rank") + rope
    if config.get("num_nextn_predict_layers"):
        # A multi-token prediction layer has the path of one further layer, so the
        # number of layers must be known.
        layers = needed(config, "num_hidden_layers")
        sizes["layers"] = layers
        sizes["moe_layers"] = layers - config.get("first_k_dense_replace", 0)
    return {axis: size for axis, size in sizes.items() if size}


def known_sizes(config: Config) -> dict[str, int]:
    """Returns the sizes of axes that no rule needs, and that a tree must have.

    If all layers have experts, `intermediate_size` is their width, unless
    `moe_intermediate_size` says it.
    """
    sizes = {"layers": config.get("num_hidden_layers", config.get("n_layer"))}
    sizes["hidden"] = config.get("intermediate_size")
    if any(config.get(name) for name in _SIZES["experts"]):
        width = config.get("moe_intermediate_size")
        sizes["expert_hidden"] = sizes["hidden"] if width is None else width
        shared = config.get("n_shared_experts")
        if type(width) is int and type(shared) is int:
            sizes["shared_hidden"] = shared * width
    return {axis: size for axis, size in sizes.items() if type(size) is int}


def needed(config: Config, name: str) -> int:
    """Returns the number `name` of the config. Raises `MapError` with this name if the
    number is missing.
    """
    if config.get(name) is None:
        raise MapError(
            f"the configuration of {config['model_type']!r} does not say `{name}`;"
            " add it."
        )
    return config[name]


def _options_of(config: Config) -> Options:
    """Returns the options of a model, such as "qkv_bias", from the config of its text
    model: what a family always has, and what the config says.
    """
    kind = config["model_type"]
    has_bias = bool(config.get("attention_bias", False))
    is_gemma = kind.startswith("gemma")
    # How experts are chosen; "noaux_tc" adds a bias to their scores.
    usual_method = "greedy" if kind == "deepseek_v2" else "noaux_tc"
    topk_method = config.get("topk_method", usual_method)
    has_norms = kind in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
    return {
        "tied": bool(config.get("tie_word_embeddings", is_gemma)),
        "qkv_bias": has_bias or kind == "qwen2",
        "out_bias": has_bias and kind != "glm4_moe",
        "mlp_bias": bool(config.get("mlp_bias")),
        "qk_norm": has_norms or bool(config.get("use_qk_norm")),
        "four_norms": is_gemma and kind != "gemma",
        "q_lora": config.get("q_lora_rank") or 0,
        "dense_layers": config.get("first_k_dense_replace", 0),
        "score_bias": topk_method == "noaux_tc",
    }


def _rest(config: Config, prefix: str) -> tuple[str, ...]:
    """Returns the paths of arrays that a checkpoint may have besides the weights of its
    text model, such as causal masks. The paths of the text model begin with `prefix`.
    """
    layers = f"{prefix}layers."
    kind = config["model_type"]
    if kind == "gpt2":
        # The causal masks, which are not weights.
        masks = (
            f"{prefix}h.{{layers}}.attn.bias",
            f"{prefix}h.{{layers}}.attn.masked_bias",
        )
        if prefix:
            return (*masks, "lm_head.weight")
        return masks
    if kind == "bert":
        return (f"{prefix}embeddings.position_ids",)
    if kind == "gemma3":
        return ("vision_tower.{rest*}", "multi_modal_projector.{rest*}")
    if kind == "gemma3n":
        towers = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
        return tuple(f"model.{tower}.{{rest*}}" for tower in towers)
    if kind.startswith(("llama", "mi", "qwen")):
        # Old checkpoints hold the frequencies of the rotary embedding.
        return (f"{layers}{{layers}}.self_attn.rotary_emb.inv_freq",)
    ahead_count = config.get("num_nextn_predict_layers") or 0
    # The layers that predict ahead have the numbers behind the last layer.
    first = needed(config, "num_hidden_layers") if ahead_count else 0
    numbers = range(first, first + ahead_count)
    return tuple(f"{layers}{number}.{{rest*}}" for number in numbers)


def _with_scales(rows: Rows, quantization: Config) -> Rows:
    """Returns the rows of an fp8 checkpoint, in which each linear weight is a `Scaled`
    one. `quantization` is the part `quantization_config` of the config.
    """
    method = quantization.get("quant_method")
    if method != "fp8" or not quantization.get("weight_block_size"):
        raise MapError(
            f"weights of the `quant_method` {method!r} without blocks; there is a table"
            " for fp8 in blocks."
        )
    block = tuple(quantization["weight_block_size"])
    scaled = {}
    for path, entry in rows.items():
        is_linear = isinstance(entry, str) and path.endswith(
            ("_proj.weight", "_with_mqa.weight")
        )
        if is_linear:
            scaled[path] = Scaled(
                part=str(entry),
                by=f"{path}_scale_inv",
                block=block,
                dtype="bfloat16",
            )
        else:
            scaled[path] = entry
    return scaled


_MODEL_TYPES = (
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
    ),
    *("gemma3n", "gemma3n_text", "olmo2", "phi3", "glm4_moe"),
    *("gpt2", "deepseek_v2", "deepseek_v3", "kimi_k2", "bert"),
)
