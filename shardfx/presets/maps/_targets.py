"""The layouts of programs: a model that scans over its layers, and an inference engine's tree."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._ground.errors import MapError
from ._hugging_face import hugging_face, text_config
from ._layout import TreeLayout
from ._places import Entry, Fused, Place, places_of


class Stack(NamedTuple):
    """One array for a kind of weight: the name of its layers and their axis; empty for what is in no layer."""

    kind: str
    layers: str
    axis: str


# Per kind its name, and its axes without that of the layers.
_STACKED = {
    "embedding": ("embedding", "vocab embed"),
    "positions": ("positions", "positions embed"),
    "types": ("types", "types embed"),
    "norm": ("norm/scale", "embed"),
    "norm_bias": ("norm/bias", "embed"),
    "head": ("head", "embed vocab"),
    "attention_norm": ("attention_norm/scale", "embed"),
    "attention_norm_bias": ("attention_norm/bias", "embed"),
    "attention_post_norm": ("attention_post_norm/scale", "embed"),
    "mlp_norm": ("mlp_norm/scale", "embed"),
    "mlp_norm_bias": ("mlp_norm/bias", "embed"),
    "mlp_post_norm": ("mlp_post_norm/scale", "embed"),
    "query": ("attention/query", "embed (heads dim)"),
    "key": ("attention/key", "embed (kv_heads dim)"),
    "value": ("attention/value", "embed (kv_heads dim)"),
    "out": ("attention/out", "(heads dim) embed"),
    "query_bias": ("attention/query_bias", "(heads dim)"),
    "key_bias": ("attention/key_bias", "(kv_heads dim)"),
    "value_bias": ("attention/value_bias", "(kv_heads dim)"),
    "out_bias": ("attention/out_bias", "embed"),
    "query_norm": ("attention/query_norm", "dim"),
    "key_norm": ("attention/key_norm", "dim"),
    "latent_out": ("attention/out", "(heads value_dim) embed"),
    "query_a": ("attention/query_a", "embed query_latent"),
    "query_a_norm": ("attention/query_a_norm", "query_latent"),
    "query_b": ("attention/query_b", "query_latent (heads dim)"),
    "kv_a": ("attention/kv_a", "embed latent_and_rope"),
    "kv_a_norm": ("attention/kv_a_norm", "latent"),
    "kv_b": ("attention/kv_b", "latent (heads both_dim)"),
    "gate": ("mlp/gate", "embed hidden"),
    "up": ("mlp/up", "embed hidden"),
    "down": ("mlp/down", "hidden embed"),
    "gate_bias": ("mlp/gate_bias", "hidden"),
    "up_bias": ("mlp/up_bias", "hidden"),
    "down_bias": ("mlp/down_bias", "embed"),
    "router": ("mlp/router", "embed experts"),
    "router_bias": ("mlp/router_bias", "experts"),
    "expert_gate": ("mlp/experts/gate", "experts embed hidden"),
    "expert_up": ("mlp/experts/up", "experts embed hidden"),
    "expert_down": ("mlp/experts/down", "experts hidden embed"),
    "pooler": ("pooler/weight", "embed pooled"),
    "pooler_bias": ("pooler/bias", "pooled"),
    "shared_gate": ("mlp/shared/gate", "embed shared_hidden"),
    "shared_up": ("mlp/shared/up", "embed shared_hidden"),
    "shared_down": ("mlp/shared/down", "shared_hidden embed"),
}


def stacked(config: Mapping[str, Any], *, prefix: str = "") -> TreeLayout:
    """The layout of a model that scans over its layers: one array for each kind of weight, `[layers, in, out]`.

    Where a model's first layers are dense and the others have experts, there are two stacks, `dense_layers` and
    `moe_layers`.

    **Arguments:**

    - `config`: as of [`shardfx.presets.maps.hugging_face`][].
    - `prefix`: what stands before each path.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][]; `with_paths` gives the arrays the names that they have in your model.

    **Raises:**

    `MapError` as `hugging_face` does.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4}
        mine = maps.stacked(config).with_paths({"layers/attention/query": "blocks/wq"})
        hf = maps.hugging_face(config).to(mine)
        print(hf.rules["blocks/wq"])
        ```
    """
    rows: dict[str, Entry] = {}
    for kind, layers, axis in stacks_of(config):
        name, axes = _STACKED[kind]
        rows[f"{prefix}{layers}/{name}" if layers else f"{prefix}{name}"] = f"{kind}: {axis} {axes}"
    return TreeLayout(rows, sizes=dict(hugging_face(config, ahead="drop").sizes))


def engine(config: Mapping[str, Any], *, shards: int) -> TreeLayout:
    """The layout of an inference engine, as vLLM has it: a leaf per layer, and matrices that are fused for its devices.

    Query, key and value are one matrix, whose parts alternate by shard, so that each device has its own; gate and up
    too. With more shards than key heads each head is there several times. The experts of a layer are one array,
    `w13_weight` for gate and up, `w2_weight` for down. GPT-2's matrices are `[out, in]` and its paths begin with
    `transformer.`; DeepSeek's `q_a_proj` and `kv_a_proj_with_mqa` are one matrix, `fused_qkv_a_proj`, on every device.

    The names are those of `vllm/model_executor/models` in vLLM 0.10 and later, before it changes weights for its
    kernels.

    **Arguments:**

    - `config`: as of [`shardfx.presets.maps.hugging_face`][].
    - `shards`: over how many devices the engine cuts a matrix.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` where shards do not divide the heads, or shards and key heads do not divide each other.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {
            "model_type": "qwen2",
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        }
        trained, served = maps.stacked(config), maps.engine(config, shards=4)
        print(trained.to(served).rules["model.layers.{layers}.self_attn.qkv_proj.weight"])
        ```
    """
    theirs = hugging_face(config, prefix=_PREFIXES.get(str(config.get("model_type"))), ahead="drop")
    sizes = dict(theirs.sizes)
    heads = sizes.get("kv_heads", 1)
    if sizes.get("heads", shards) % shards:
        raise MapError(f"{sizes['heads']} heads do not divide into {shards} shards; use another `shards`.")
    copies = max(1, shards // heads)
    if (copies * heads) % shards:
        raise MapError(f"{heads} key heads for {shards} shards: neither divides the other; use another `shards`.")
    rows: dict[str, Entry] = {}
    for path, entry in theirs.weights:
        rows |= _fused(path, entry, shards, copies, theirs.kinds)
    return TreeLayout(rows, sizes=sizes | ({"copies": copies} if copies > 1 else {}))


# What vLLM puts before the names of a checkpoint without its head.
_PREFIXES = {"gpt2": "transformer."}


def _fused(path: str, entry: Entry, shards: int, copies: int, kinds: Sequence[str]) -> dict[str, Entry]:
    place, *others = places_of(path, entry)
    text = entry if isinstance(entry, str) else entry.part if not isinstance(entry, Fused) else ""
    is_latent = "kv_a" in kinds
    key = "kv_heads copies" if copies > 1 else "kv_heads"
    match place.kind:
        case _ if others and isinstance(entry, Fused):
            parts = [_turned(part) for part in entry.parts] if entry.dim else entry.parts
            return {path: Fused(*parts, shards=shards)}
        case "out" | "up" | "down" if text.startswith(("out: (", "up: embed", "down: hidden")):
            return {path: _turned(text)}
        case "query_a":
            return {path.replace("q_a_proj", "fused_qkv_a_proj"): Fused(text, "kv_a: latent_and_rope embed")}
        case "kv_a" if "query_a" in kinds:
            return {}
        case "query" | "query_bias" if not is_latent:
            own = path.replace(".self.query.", ".self.qkv_proj.").replace("q_proj", "qkv_proj")
            return {own: _qkv(text, key, shards)}
        case "gate" | "gate_bias" | "shared_gate":
            up = text.replace("gate", "up")
            return {path.replace("gate_proj", "gate_up_proj"): Fused(text, up, shards=shards)}
        case "expert_gate":
            both = ("expert_gate: experts hidden embed", "expert_up: experts hidden embed")
            return {_experts(place, "w13_weight"): Fused(*both, dim=1, shards=shards)}
        case "expert_down":
            return {_experts(place, "w2_weight"): "expert_down: experts embed hidden"}
        case "key" | "value" | "key_bias" | "value_bias" | "expert_up" | "shared_up":
            return {}
        case "up" | "up_bias" if "up_proj" in path:
            return {}
    return {path: text}


def _turned(text: str) -> str:
    """GPT-2's `[in, out]` as `[out, in]`."""
    kind, _, axes = text.partition(": ")
    first, *others = re.findall(r"\([^)]*\)|\S+", axes)
    return f"{kind}: {' '.join([*others, first])}"


def _qkv(text: str, key: str, shards: int) -> Fused:
    others = [text.replace("query", kind).replace("heads", key) for kind in ("key", "value")]
    return Fused(text, *others, shards=shards)


def _experts(place: Place, name: str) -> str:
    return f"{place.path.partition('{experts}')[0]}{name}"


def stacks_of(config: Mapping[str, Any]) -> Iterator[Stack]:
    """Each kind of weight of a model, and the stacks of layers in which it is."""
    theirs = hugging_face(config, ahead="drop")
    places = [place for path, entry in theirs.weights for place in places_of(path, entry)]
    dense = text_config(config).get("first_k_dense_replace", 0)
    for place in places:
        axis = next((one for one in place.in_path if one.endswith("layers")), "")
        if axis == "layers" and dense:
            yield Stack(place.kind, "dense_layers", f"layers[:{dense}]")
            yield Stack(place.kind, "moe_layers", f"layers[{dense}:]")
        else:
            yield Stack(place.kind, axis, axis)
