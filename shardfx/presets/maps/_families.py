"""The rows of each family of models: the path of each kind of weight in a checkpoint,
and the axes of its array.

`families.txt` in this folder has the rows, with torch's dimensions, `[out, in]`. The
functions here combine them and add the paths of the layers. Shapes, rules and maps are
all made from these rows. In a path, names in braces stand for the numbers of layers and
experts. In the function of a family, such as `_gpt_oss`, `prefix` is that of the
paths, `head_path` is the path of the output weights without `.weight`, and `options`
has the options of the model.
"""

import importlib.resources
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ._entries import Entry, Fused, groups_of


# The rows of a model: from the path of an array to its entry, such as
# `"query: (heads dim) embed"`.
Rows = dict[str, Entry]
# The options of a model, as in the table of models: `tied`, `qkv_bias`, `out_bias`,
# `mlp_bias`, `qk_norm`, `four_norms`; for DeepSeek also `q_lora`, `dense_layers`,
# `score_bias`. A missing option is off.
Options = Mapping[str, int]

_TEXT = (
    importlib.resources.files("shardfx.presets.maps")
    .joinpath("families.txt")
    .read_text(encoding="utf-8")
)
# From the name of a section of the file, such as `[qkv]`, to its rows, one per line.
_SECTIONS: Final = dict(
    re.findall(r"^\[([^]]+)\]\n(.*?\n)(?:\n|\Z)", _TEXT, re.DOTALL | re.MULTILINE)
)


def rows_of(family: str, options: Options, prefix: str | None = None) -> Rows:
    """Returns the rows of a family's text model.

    `family` is a family in the table of models, or a `model_type` of Hugging Face.
    Every path begins with `prefix`, or the family's usual prefix, except that of the
    output weights.
    """
    usual = prefix_of(family)
    head_path = f"{usual.removesuffix('model.')}lm_head"
    if prefix is None:
        prefix = usual
    return _FAMILIES[family](prefix, head_path, options)


def prefix_of(family: str) -> str:
    """Returns the usual prefix of the paths of a family's text model, such as "model."."""
    return _PREFIXES.get(family, "model.")


def vision_rows_of(family: str) -> Rows:
    """Returns the rows of a family's vision encoder and projector; none for a family
    without vision.
    """
    if family not in _VISION:
        return {}
    return _VISION[family]()


def further_rows_of(family: str) -> Rows:
    """Returns the rows of arrays that only checkpoints have: masks, rotary frequencies,
    pretraining heads and multi-token prediction layers.
    """
    return _rows("", _SECTIONS.get(f"{family}.beside", _SECTIONS["beside"]), leaf="")


def with_experts_stacked(rows: Rows) -> Rows:
    """Returns only the rows of experts, with all experts of a layer in one array
    instead of one array per expert: `moe.experts.{experts}.w1` with "expert_gate:
    hidden embed" becomes `moe.experts.w1` with "expert_gate: experts hidden embed".
    """
    stacked: Rows = {}
    for path, entry in rows.items():
        if "experts.{experts}." in path:
            kind, _, axes = str(entry).partition(": ")
            stacked[path.replace("{experts}.", "")] = f"{kind}: experts {axes}"
    return stacked


def _rows(prefix: str, text: str, leaf: str = ".weight") -> Rows:
    """The rows of a section's text. Their paths end in `leaf`; "" if the text has whole
    paths.
    """
    pairs = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    return {f"{prefix}{name}{leaf}": entry for name, entry in pairs}


def _with_biases(rows: Rows, dim: int = 0) -> Rows:
    """Returns the rows with one more for the bias of each weight. A bias has the axes
    of the weight's dimension `dim`.
    """
    biases = {}
    for path, entry in rows.items():
        biases[path.replace(".weight", ".bias")] = _bias(entry, dim)
    return rows | biases


def _bias(entry: Entry, dim: int) -> Entry:
    """The entry of the bias of a weight, which has the axes of the weight's dimension
    `dim`.
    """
    if isinstance(entry, Fused):
        return Fused(*[str(_bias(part, dim)) for part in entry.parts])
    kind, _, axes = str(entry).partition(": ")
    return f"{kind}_bias: {groups_of(axes)[dim]}"


def _attention(prefix: str, options: Options, qkv_text: str = _SECTIONS["qkv"]) -> Rows:
    """Returns the rows of an attention layer whose paths begin with `prefix`: the
    projections of queries, keys and values, which `qkv_text` has as text, the output,
    and the norms of queries and keys if `options` has them.
    """
    rows = _rows(prefix, qkv_text)
    if options.get("qkv_bias"):
        rows = _with_biases(rows)
    out = _rows(prefix, "o_proj  out: embed (heads dim)")
    if options.get("out_bias"):
        out = _with_biases(out)
    rows |= out
    if options.get("qk_norm"):
        rows |= _rows(prefix, _SECTIONS["qk_norms"])
    return rows


def _mlp(prefix: str, kind: str = "", hidden: str = "hidden") -> Rows:
    """Returns the rows of a gated feed-forward block. `kind` begins the names of its
    weights, such as "expert_", and `hidden` is the axis of its hidden units.
    """
    return _rows(prefix, _SECTIONS["mlp"].format(kind=kind, hidden=hidden))


def _router_and_experts(prefix: str) -> Rows:
    """Returns the rows of a router and of its experts."""
    router = _rows(prefix, "gate  router: experts embed")
    return router | _mlp(f"{prefix}experts.{{experts}}.", "expert_")


def _causal(
    prefix: str,
    head_path: str,
    options: Options,
    layer: Rows,
    norms_section: str = "norms",
) -> Rows:
    """Returns the rows of a decoder: embedding, norms, the rows `layer` of its layers,
    and the output weights at `head_path` unless they are tied to the embedding.

    `norms_section` is the section of `families.txt` with the norms of a layer.
    """
    section = "four_norms" if options.get("four_norms") else norms_section
    norms = _rows(f"{prefix}layers.{{layers}}.", _SECTIONS[section])
    last = _rows(prefix, "norm  norm: embed")
    if options.get("norm_bias"):
        norms = _with_biases(norms)
        last = _with_biases(last)
    rows = _rows(prefix, "embed_tokens  embedding: vocab embed") | norms | layer | last
    if options.get("tied"):
        return rows
    return {**rows, f"{head_path}.weight": "head: vocab embed"}


def _llama(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Llama, and of families with the same names."""
    layer = f"{prefix}layers.{{layers}}."
    mlp = _mlp(f"{layer}mlp.")
    if options.get("mlp_bias"):
        mlp = _with_biases(mlp)
    return _causal(
        prefix, head_path, options, _attention(f"{layer}self_attn.", options) | mlp
    )


def _mixtral(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Mixtral, in which every feed-forward block has experts."""
    layer = f"{prefix}layers.{{layers}}."
    moe = f"{layer}block_sparse_moe."
    routed = _rows(moe, "gate  router: experts embed")
    routed |= _rows(f"{moe}experts.{{experts}}.", _SECTIONS["mixtral.experts"])
    return _causal(
        prefix, head_path, options, _attention(f"{layer}self_attn.", options) | routed
    )


def _qwen3_moe(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Qwen3's models with experts in every layer."""
    layer = f"{prefix}layers.{{layers}}."
    attention = _attention(f"{layer}self_attn.", {"qk_norm": True})
    return _causal(
        prefix, head_path, options, attention | _router_and_experts(f"{layer}mlp.")
    )


def _qwen3_next(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Qwen3-Next. Most layers have linear attention, the others
    gated attention. There is also a multi-token prediction layer.
    """
    # The rows of each head hold its query, then its gate.
    gated = _SECTIONS["qkv"].replace(
        "query: (heads dim)", "query_and_gate: (heads two_dims)"
    )

    options = {**options, "qk_norm": True}
    layers = f"{prefix}layers."
    layer = _attention(f"{layers}{{full_layers}}.self_attn.", options, gated)
    layer |= _qwen3_next_mlp(f"{layers}{{layers}}.mlp.")
    # In linear attention, the rows are grouped by key head: its query, its key, and its
    # values and gates.
    linear = _SECTIONS["qwen3_next.linear"]
    layer |= _rows(f"{layers}{{linear_layers}}.linear_attn.", linear, leaf="")

    ahead = _attention("mtp.layers.0.self_attn.", options, gated)
    ahead |= _qwen3_next_mlp("mtp.layers.0.mlp.")
    ahead |= _rows("mtp.", _SECTIONS["qwen3_next.ahead"])
    ahead |= _rows("mtp.layers.0.", _SECTIONS["norms"])
    return _causal(prefix, head_path, options, layer) | ahead


def _qwen3_next_mlp(prefix: str) -> Rows:
    """Returns the rows of a block with routed experts, and one shared expert with a
    gate.
    """
    rows = _router_and_experts(prefix)
    rows |= _mlp(f"{prefix}shared_expert.", "shared_", "shared_hidden")
    return rows | _rows(prefix, "shared_expert_gate  shared_router: one embed")


def _olmo2(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of OLMo 2. The norms of a layer are behind attention and the
    feed-forward block, and those of queries and keys are over all heads together.
    """
    layer = f"{prefix}layers.{{layers}}."
    rows = _attention(f"{layer}self_attn.", {**options, "qk_norm": False})
    rows |= _rows(f"{layer}self_attn.", _SECTIONS["olmo2.norms"])
    rows |= _mlp(f"{layer}mlp.")
    return _causal(
        prefix=prefix,
        head_path=head_path,
        options=options,
        layer=rows,
        norms_section="olmo2.layer_norms",
    )


def _phi3(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Phi-3 and Phi-4. Query, key and value are concatenated, and so
    are gate and up.
    """
    layer = f"{prefix}layers.{{layers}}."
    thirds = Fused(
        "query: (heads dim) embed",
        "key: (kv_heads dim) embed",
        "value: (kv_heads dim) embed",
    )
    halves = Fused("gate: hidden embed", "up: hidden embed")
    rows: Rows = {
        f"{layer}self_attn.qkv_proj.weight": thirds,
        f"{layer}mlp.gate_up_proj.weight": halves,
    }
    rows |= _rows(f"{layer}self_attn.", "o_proj  out: embed (heads dim)")
    rows |= _rows(f"{layer}mlp.", "down_proj  down: embed hidden")
    return _causal(prefix, head_path, options, rows)


def _glm4_moe(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of GLM-4.5 to 4.7. The first layers are dense; the others have
    experts, of which each token uses the shared ones.
    """
    layer = f"{prefix}layers.{{layers}}."
    attention = _attention(f"{layer}self_attn.", options)
    return _causal(
        prefix, head_path, options, attention | _dense_then_routed(prefix, options)
    )


def _dense_then_routed(prefix: str, options: Options) -> Rows:
    """Returns the rows of feed-forward blocks of which the first `dense_layers` are
    dense, and the others have routed and shared experts.
    """
    dense_count = options.get("dense_layers", 0)
    moe = f"{prefix}layers.{{layers}}.mlp."
    rows: Rows = {}
    if dense_count:
        moe = f"{prefix}layers.{{moe_layers+{dense_count}}}.mlp."
        rows = _mlp(f"{prefix}layers.{{dense_layers}}.mlp.")
    rows |= _router_and_experts(moe)
    rows |= _mlp(f"{moe}shared_experts.", "shared_", "shared_hidden")
    if options.get("score_bias"):
        bias = "gate.e_score_correction_bias  router_bias: experts"
        rows |= _rows(moe, bias, leaf="")
    return rows


def _gemma3n(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Gemma 3n's text model: several residual streams (AltUp), a
    path of low rank beside attention (Laurel), and an embedding for each layer.
    """
    layer = f"{prefix}layers.{{layers}}."
    options = {**options, "tied": True, "four_norms": True, "qk_norm": True}
    rows = _attention(f"{layer}self_attn.", options) | _mlp(f"{layer}mlp.")
    rows |= _rows(layer, _SECTIONS["gemma3n.layer"], leaf="")
    rows |= _rows(prefix, _SECTIONS["gemma3n.beside_layers"])
    return _causal(prefix, head_path, options, rows)


def _deepseek(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of DeepSeek V2 and V3, with latent attention. The queries are
    compressed too if `options` has "q_lora".
    """
    layer = f"{prefix}layers.{{layers}}."
    query = "q_proj  query: (heads dim) embed"
    if options.get("q_lora"):
        query = _SECTIONS["deepseek.compressed"]
    attention = _rows(f"{layer}self_attn.", query)
    attention |= _rows(f"{layer}self_attn.", _SECTIONS["deepseek.latent"])
    return _causal(
        prefix, head_path, options, attention | _dense_then_routed(prefix, options)
    )


def _gpt_oss(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of GPT-OSS after unpacking from MXFP4. Experts are stacked,
    `[in, out]`, and the columns of gate and up alternate.
    """
    layer = f"{prefix}layers.{{layers}}."
    layer_rows = _attention(f"{layer}self_attn.", {"qkv_bias": True, "out_bias": True})
    layer_rows |= _rows(f"{layer}self_attn.", "sinks  sinks: heads", leaf="")
    layer_rows |= _with_biases(_rows(f"{layer}mlp.", "router  router: experts embed"))
    layer_rows |= _rows(f"{layer}mlp.experts.", _SECTIONS["gpt_oss.experts"], leaf="")
    return _causal(prefix, head_path, options, layer_rows)


def _llama4(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of Llama 4's text model. Experts are stacked, `[in, out]`. Gate
    and up are concatenated, so a shard may hold only one of them.
    """
    moe = f"{prefix}layers.{{routed_layers}}.feed_forward."
    layer_rows = _attention(f"{prefix}layers.{{layers}}.self_attn.", options)
    layer_rows |= _mlp(f"{prefix}layers.{{plain_layers}}.feed_forward.")
    layer_rows |= _rows(moe, _SECTIONS["llama4.experts"], leaf="")
    layer_rows |= _mlp(f"{moe}shared_expert.", "shared_", "shared_hidden")
    return _causal(prefix, head_path, options, layer_rows)


def _starcoder2(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of StarCoder2, in which all matrices and norms have biases."""
    layer = f"{prefix}layers.{{layers}}."
    layer_rows = _attention(f"{layer}self_attn.", {"qkv_bias": True, "out_bias": True})
    mlp = "c_fc    up: hidden embed\nc_proj  down: embed hidden"
    layer_rows |= _with_biases(_rows(f"{layer}mlp.", mlp))
    return _causal(prefix, head_path, {**options, "norm_bias": True}, layer_rows)


def _gpt(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of GPT-2 and GPT-3: Conv1D weights, `[in, out]`, with query, key
    and value concatenated.
    """
    layer = f"{prefix}h.{{layers}}."
    thirds = Fused(
        "query: embed (heads dim)",
        "key: embed (kv_heads dim)",
        "value: embed (kv_heads dim)",
        dim=1,
    )
    rows = _rows(prefix, "wte  embedding: vocab embed\nwpe  positions: positions embed")
    norms = "ln_1  attention_norm: embed\nln_2  mlp_norm: embed"
    rows |= _with_biases(_rows(layer, norms))
    matrices: Rows = {f"{layer}attn.c_attn.weight": thirds}
    matrices |= _rows(layer, _SECTIONS["gpt.out"])
    rows |= _with_biases(matrices, dim=-1)
    return rows | _with_biases(_rows(prefix, "ln_f  norm: embed"))


def _bert(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of BERT. The embeddings have a norm, and there is a pooler."""
    rows = _rows(f"{prefix}embeddings.", _SECTIONS["bert.table"])
    rows |= _with_biases(_rows(prefix, "embeddings.LayerNorm  norm: embed"))
    layer = f"{prefix}encoder.layer.{{layers}}."
    rows |= _with_biases(_rows(layer, _SECTIONS["bert.layer"]))
    return rows | _with_biases(_rows(prefix, "pooler.dense  pooler: pooled embed"))


def _t5(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of T5 v1.1. Feed-forward blocks are gated; output weights are
    not tied.
    """
    rows = _rows(prefix, "shared  embedding: vocab embed\nlm_head  head: vocab embed")
    parts_by_stack = {
        "encoder": ("SelfAttention", "DenseReluDense"),
        "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
    }
    for stack, parts in parts_by_stack.items():
        block = f"{prefix}{stack}.block."
        for number, part in enumerate(parts):
            layer = f"{block}{{layers}}.layer.{number}."
            section = "t5.attention" if part.endswith("Attention") else "t5.mlp"
            rows |= _rows(f"{layer}{part}.", _SECTIONS[section])
            rows |= _rows(layer, "layer_norm  norm: embed")
        # Only the first layer has the table of relative positions.
        rows |= _rows(
            f"{block}{{first}}.layer.0.SelfAttention.",
            "relative_attention_bias  relative: buckets heads",
        )
        rows |= _rows(f"{prefix}{stack}.", "final_layer_norm  norm: embed")
    return rows


def _vit(prefix: str, head_path: str, options: Options) -> Rows:
    """Returns the rows of a ViT under big_vision's names: flax kernels, `[in, out]`,
    with heads and head_dim as separate dimensions.
    """
    block = f"{prefix}Transformer.encoderblock_{{layers}}."
    rows = _rows(prefix, _SECTIONS["vit.ends"], leaf="")
    return rows | _rows(block, _SECTIONS["vit.block"], leaf="")


def _vision_of_gemma3() -> Rows:
    """Returns the rows of Gemma 3's vision encoder, a SigLIP, and of the projector to
    the text model.
    """
    layer = _SECTIONS["eye"].format(
        out="out_proj", norms=("layer_norm1", "layer_norm2")
    )
    tower = "vision_tower.vision_model."
    rows = _with_biases(_rows(f"{tower}encoder.layers.{{vision_layers}}.", layer))
    patches = (
        "embeddings.patch_embedding  patches: vision_embed colors patch_rows"
        " patch_columns"
    )
    rows |= _with_biases(_rows(tower, f"{patches}\npost_layernorm  norm: vision_embed"))
    rows |= _rows(
        tower, "embeddings.position_embedding  positions: vision_tokens vision_embed"
    )
    projector = (
        "mm_input_projection_weight  projector: projected"
        " embed\nmm_soft_emb_norm.weight  norm: vision_embed"
    )
    return rows | _rows("multi_modal_projector.", projector, leaf="")


def _vision_of_llama4() -> Rows:
    """Returns the rows of Llama 4's vision encoder and of the projector to the text
    model.
    """
    layer_norms = ("input_layernorm", "post_attention_layernorm")
    layer = _SECTIONS["eye"].format(out="o_proj", norms=layer_norms)
    rows = _with_biases(_rows("vision_model.model.layers.{vision_layers}.", layer))
    norms = "layernorm_pre  norm: vision_embed\nlayernorm_post  norm: vision_embed"
    rows |= _with_biases(_rows("vision_model.", norms))
    rows |= _rows("multi_modal_projector.", "linear_1  projector: embed vision_out")
    return rows | _rows("vision_model.", _SECTIONS["llama4.sight"], leaf="")


_PREFIXES = {
    **dict.fromkeys(("gemma3", "llama4"), "language_model.model."),
    "gemma3n": "model.language_model.",
    **dict.fromkeys(("gpt", "gpt2", "bert", "t5", "vit"), ""),
}
_VISION = {"gemma3": _vision_of_gemma3, "llama4": _vision_of_llama4}
_FAMILIES: Final[Mapping[str, Callable[[str, str, Options], Rows]]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
        **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), _llama),
        **dict.fromkeys(
            ("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek
        ),
        **dict.fromkeys(("gpt", "gpt2"), _gpt),
        **dict.fromkeys(("gemma3n", "gemma3n_text"), _gemma3n),
        "bert": _bert,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "llama4": _llama4,
        "mixtral": _mixtral,
        "olmo2": _olmo2,
        "phi3": _phi3,
        "qwen3_moe": _qwen3_moe,
        "qwen3_next": _qwen3_next,
        "starcoder2": _starcoder2,
        "t5": _t5,
        "vit": _vit,
    }
)
