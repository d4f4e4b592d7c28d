"""The layouts of two kinds of programs: models that scan over their layers, and
inference engines such as vLLM.
"""

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._ground.errors import MapError, whole_number
from ._entries import Entry, Fused, Weight, weights_of
from ._hugging_face import Config, check_config, hugging_face, text_config
from ._layout import TreeLayout


class LayerStack(NamedTuple):
    """The array that holds one kind of weight of a stack of layers.

    - `kind`: the kind of weight, such as "query".
    - `layers`: the name of the stack, such as "dense_layers"; empty for a weight
      outside of layers.
    - `axis`: the axis of the layers, such as `layers[:3]`; empty for a weight outside
      of layers.
    """

    kind: str
    layers: str
    axis: str


class Scanned(NamedTuple):
    """A kind of weight in a model that scans over its layers.

    - `axes`: its axes, without the axis of layers.
    - `name`: its name in the tree that the function `stacked` describes.
    - `maxtext`: its name in MaxText; "-" if MaxText lacks it.
    """

    axes: str
    name: str
    maxtext: str


_SCANNED = (
    importlib.resources.files("shardfx.presets.maps")
    .joinpath("scanned.txt")
    .read_text(encoding="utf-8")
)


def _scanned_kinds() -> dict[str, Scanned]:
    """The kinds of weights in `scanned.txt`, by their names. Two or more spaces
    separate the columns.
    """
    kinds = {}
    for line in _SCANNED.splitlines():
        kind, axes, name, maxtext = re.split("  +", line)
        kinds[kind] = Scanned(axes=axes, name=name, maxtext=maxtext)
    return kinds


SCANNED = _scanned_kinds()


def stacked(config: Config, *, prefix: str = "") -> TreeLayout:
    """Returns the layout of a model that scans over its layers: one array per kind of
    weight, `[layers, in, out]`.

    If a model's first layers are dense and the others have experts, there are two
    stacks, `dense_layers` and `moe_layers`.

    **Arguments:**

    - `config`: the content of the model's `config.json` from Hugging Face.
    - `prefix`: a prefix of every path.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][]; `with_paths` gives the arrays the names
    that they have in your model.

    **Raises:**

    `MapError` for a `model_type` without a table, or for a missing number in the
    config.

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
        axes, name, _ = SCANNED[kind]
        path = f"{layers}/{name}" if layers else name
        rows[f"{prefix}{path}"] = f"{kind}: {axis} {axes}"
    theirs = hugging_face(config, ahead="drop")
    return TreeLayout(rows, sizes=dict(theirs.sizes), known=dict(theirs.known))


def engine(config: Config, *, shards: int) -> TreeLayout:
    """Returns the layout of an inference engine such as vLLM: separate arrays per
    layer, with matrices fused for tensor parallelism.

    Query, key and value are one matrix. Their rows are interleaved by shard, so that
    each device holds its own query, key and value heads. Gate and up are one matrix in
    the same way. With more shards than key heads, each key and value head is repeated.
    The experts of a layer are one array: `w13_weight` for gate and up, `w2_weight` for
    down. GPT-2's matrices are `[out, in]` and its paths begin with `transformer.`.
    DeepSeek's `q_a_proj` and `kv_a_proj_with_mqa` are one matrix, `fused_qkv_a_proj`,
    which every device holds whole.

    The names are those of `vllm/model_executor/models` in vLLM 0.10 and later, before
    vLLM rearranges weights for its kernels.

    **Arguments:**

    - `config`: the content of the model's `config.json` from Hugging Face.
    - `shards`: the number of devices over which the engine shards a matrix (its tensor
      parallel size).

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` if `shards` does not divide the number of heads, or if neither `shards`
    nor the number of key heads divides the other.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 8}
        trained, served = maps.stacked(config), maps.engine(config, shards=4)
        print(trained.to(served).rules["model.layers.{layers}.self_attn.qkv_proj.weight"])
        ```
    """
    check_config(config)
    number = whole_number(shards)
    if number is None or number < 1:
        raise MapError(
            f"`shards` is the number of devices of the engine, not {shards!r}; write it"
            " as in `maps.engine(config, shards=4)`."
        )
    shards = number
    theirs = hugging_face(
        config,
        prefix=_PREFIXES.get(str(config.get("model_type"))),
        ahead="drop",
    )
    sizes = dict(theirs.sizes)
    kv_heads = sizes.get("kv_heads", 1)
    if sizes.get("heads", shards) % shards:
        raise MapError(
            f"{sizes['heads']} heads do not divide into {shards} shards; use another"
            " `shards`."
        )
    # How often each key and value head occurs.
    copies = max(1, shards // kv_heads)
    if (copies * kv_heads) % shards:
        raise MapError(
            f"{kv_heads} key heads for {shards} shards: neither divides the other; use"
            " another `shards`."
        )
    rows: dict[str, Entry] = {}
    for path, entry in theirs.weights:
        rows |= _fused(
            path=path,
            entry=entry,
            shards=shards,
            copies=copies,
            kinds=theirs.kinds,
        )
    if copies > 1:
        sizes["copies"] = copies
    return TreeLayout(rows, sizes=sizes)


# The prefix that vLLM adds to the names of a checkpoint that was saved without its
# language-model head.
_PREFIXES = {"gpt2": "transformer."}


# The beginnings of GPT-2's weights, whose matrices are `[in, out]`.
_OF_CONV1D = ("out: (", "up: embed", "down: hidden")


def _fused(
    path: str,
    entry: Entry,
    shards: int,
    copies: int,
    kinds: Sequence[str],
) -> dict[str, Entry]:
    """Returns the rows of the engine for one row of the checkpoint, its `path` and
    `entry`: none for a matrix that is part of another one, such as "key".

    `shards` is the number of devices, `copies` how often each key and value head
    occurs, and `kinds` are all kinds of weights in the checkpoint.
    """
    weight, *others = weights_of(path, entry)
    # The kind and its axes, such as "query: (heads dim) embed".
    text = ""
    if isinstance(entry, str):
        text = entry
    elif not isinstance(entry, Fused):
        text = entry.part
    is_latent = "kv_a" in kinds
    experts_path, _, _ = path.partition("{experts}")
    key_heads = "kv_heads copies" if copies > 1 else "kv_heads"
    match weight.kind:
        case _ if others and isinstance(entry, Fused):
            parts = entry.parts
            if entry.dim:
                parts = map(_transposed, entry.parts)
            return {path: Fused(*parts, shards=shards)}
        case "out" | "up" | "down" if text.startswith(_OF_CONV1D):
            return {path: _transposed(text)}
        case "query_a":
            fused_path = path.replace("q_a_proj", "fused_qkv_a_proj")
            return {fused_path: Fused(text, "kv_a: latent_and_rope embed")}
        case "kv_a" if "query_a" in kinds:
            return {}
        case "query" | "query_bias" if not is_latent:
            fused_path = path.replace(".self.query.", ".self.qkv_proj.")
            fused_path = fused_path.replace("q_proj", "qkv_proj")
            key_text = text.replace("query", "key").replace("heads", key_heads)
            value_text = text.replace("query", "value").replace("heads", key_heads)
            return {fused_path: Fused(text, key_text, value_text, shards=shards)}
        case "gate" | "gate_bias" | "shared_gate":
            gate_and_up = Fused(text, text.replace("gate", "up"), shards=shards)
            return {path.replace("gate_proj", "gate_up_proj"): gate_and_up}
        case "expert_gate":
            gate_and_up = Fused(
                "expert_gate: experts hidden embed",
                "expert_up: experts hidden embed",
                dim=1,
                shards=shards,
            )
            return {f"{experts_path}w13_weight": gate_and_up}
        case "expert_down":
            return {f"{experts_path}w2_weight": "expert_down: experts embed hidden"}
        case "key" | "value" | "key_bias" | "value_bias" | "expert_up" | "shared_up":
            return {}
        case "up" | "up_bias" if "up_proj" in path:
            return {}
    return {path: text}


def _transposed(text: str) -> str:
    """Returns the text of a GPT-2 weight with its axes transposed: `"up: hidden embed"`
    for `"up: embed hidden"`.
    """
    kind, _, axes = text.partition(": ")
    first, *others = re.findall(r"\([^)]*\)|\S+", axes)
    return f"{kind}: {' '.join([*others, first])}"


def stacks_of(config: Config) -> Iterator[LayerStack]:
    """Yields a `LayerStack` for each kind of weight of a model. It yields two if the
    model's dense layers and its layers with experts are separate stacks.
    """
    theirs = hugging_face(config, ahead="drop")
    weights: list[Weight] = []
    for path, entry in theirs.weights:
        weights += weights_of(path, entry)
    dense_count = text_config(config).get("first_k_dense_replace", 0)
    for weight in weights:
        layer_axes = [axis for axis in weight.in_path if axis.endswith("layers")]
        axis = layer_axes[0] if layer_axes else ""
        if axis == "layers" and dense_count:
            yield LayerStack(
                kind=weight.kind,
                layers="dense_layers",
                axis=f"layers[:{dense_count}]",
            )
            yield LayerStack(
                kind=weight.kind,
                layers="moe_layers",
                axis=f"layers[{dense_count}:]",
            )
        else:
            yield LayerStack(
                kind=weight.kind,
                layers=axis,
                axis=axis,
            )
