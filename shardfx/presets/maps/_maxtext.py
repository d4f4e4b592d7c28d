"""The layout of MaxText's parameters, as MaxText's converter makes them from Hugging
Face checkpoints.
"""

import re
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from ..._ground.errors import MapError
from ._entries import Counted, Entry
from ._hugging_face import Config, check_config, hugging_face, text_config
from ._layout import TreeLayout
from ._targets import SCANNED, LayerStack, stacks_of


# MaxText's names in Gemma's blocks that differ from those in `scanned.txt`.
_GEMMA = {
    "attention_norm": "pre_self_attention_norm/scale",
    "attention_post_norm": "post_self_attention_norm/scale",
    "mlp_norm": "pre_ffw_norm/scale",
    "mlp_post_norm": "post_ffw_norm/scale",
}
# The layers of Gemma 3 in one scanned block: five with sliding-window attention, and
# one with global attention.
_PATTERN = 6
_MOE = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}
# Families for which MaxText's converter divides the query weights by the square root of
# head_dim. MaxText's attention then does not divide.
_DIVIDED = ("llama", "mistral", "mixtral", "gemma", "gemma2")
_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3_text")
_TYPES = (
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
    ),
    *_GEMMAS,
)


def maxtext(
    config: Config,
    *,
    prefix: str = "params/",
    interleaved_rope: bool | None = None,
) -> TreeLayout:
    """Returns the layout of MaxText's parameters with scanned layers: heads and
    head_dim are separate, and layers are the second axis.

    MaxText stores the query weights of Llama, Mistral, Mixtral, Gemma and Gemma 2
    divided by the square root of head_dim, Gemma's embedding times the square root of
    its width, and Gemma's norm weights plus 1. The map applies the same factors in
    float32 and rounds to the weight's dtype, which is exact if the root is a power of
    two.

    The layers of Gemma 2 are scanned in pairs of a layer with sliding-window and one
    with global attention, the layers of Gemma 3 in blocks of six. Remaining layers are
    not stacked. MaxText pads Gemma's vocabulary: use `with_sizes(vocab=256128)`.

    **Arguments:**

    - `config`: the content of the model's `config.json` from Hugging Face.
    - `prefix`: a prefix of every path.
    - `interleaved_rope`: whether the two elements that a rotary embedding rotates are
      neighbours, as in MaxText for Llama 3.1 and later, instead of half a head apart.
      `None` means `True` exactly if the config has Llama 3's rope scaling.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` for a family without a table, such as GPT-2, and for a missing number in
    the config.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4}
        theirs = maps.maxtext(config)
        query = dict(theirs.weights)["params/decoder/layers/self_attention/query/kernel"]
        assert query == "query: embed layers heads dim"
        ```
    """
    check_config(config)
    family = config.get("model_type")
    if family not in _TYPES:
        raise MapError(
            f"there is no table of MaxText's names for {family!r}; there are"
            f" {', '.join(_TYPES)}."
        )
    if interleaved_rope is None:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        interleaved_rope = scaling.get("rope_type") == "llama3"
    theirs = hugging_face(config, ahead="drop")
    sizes = dict(theirs.sizes)
    moe = _MOE.get(str(family), "DeepSeekMoeBlock_0/MoeBlock_0")
    rows = dict[str, Entry]()
    # MaxText's name of each kind of weight, such as "self_attention/query/kernel".
    names = {}
    for kind, weight in SCANNED.items():
        if weight.maxtext != "-":
            names[kind] = weight.maxtext
    if family in _GEMMAS:
        names |= _GEMMA
    absent = [kind for kind in theirs.kinds if kind not in names]
    if absent:
        raise MapError(
            f"MaxText has no {' and no '.join(f'`{kind}`' for kind in absent)}, which"
            " this configuration has (`attention_bias`, `mlp_bias`); write a"
            " `TreeLayout` for your own model."
        )
    for (kind, layers, axis), suffix in _scanned(config):
        name = names[kind]
        axes = re.sub("[()]", "", SCANNED[kind].axes)
        if interleaved_rope and kind in ("query", "key"):
            axes = axes.replace("dim", "(half two)")
        # The axis of the layers is the second one.
        first_axis, *other_axes = axes.split(" ", 1)
        text = f"{kind}: {' '.join([first_axis, axis, *other_axes])}"
        path = name
        if layers:
            block, _, name_in_block = name.partition("/")
            path = f"decoder/{layers}/{block}{suffix}/{name_in_block}"
        entry = _as_stored(str(family), kind, text, sizes)
        rows[f"{prefix}{path.replace('{moe}', moe)}"] = entry
    if not interleaved_rope:
        return TreeLayout(rows, sizes=sizes, known=dict(theirs.known))
    halves = {"two": 2, "half": _size(sizes, "dim", "head_dim") // 2}
    return TreeLayout(
        rows,
        sizes=sizes | halves,
        apart={"dim": "two half"},
        known=dict(theirs.known),
    )


def _scanned(config: Config) -> Iterator[tuple[LayerStack, str]]:
    """Yields a `LayerStack` for each array of MaxText: one kind of weight in the layers
    that are scanned together.

    The second result is the suffix of the block's name in the path: "_local" for Gemma
    2's layers with sliding-window attention, "_global" for its other layers, and ""
    otherwise.
    """
    family = config["model_type"]
    for stack in stacks_of(config):
        if not stack.layers or family not in ("gemma2", "gemma3", "gemma3_text"):
            yield stack, ""
        elif family == "gemma2":
            for position, suffix in enumerate(("_local", "_global")):
                yield stack._replace(axis=f"layers[{position}::2]"), suffix
        else:
            count = text_config(config).get("num_hidden_layers")
            if count is None:
                raise MapError(
                    "the layers of Gemma 3 come in blocks of six; say"
                    " `num_hidden_layers`."
                )
            end = count - count % _PATTERN
            for position in range(min(_PATTERN, end)):
                layers = f"layers/layers_{position}"
                axis = f"layers[{position}:{end}:{_PATTERN}]"
                whole_stack = LayerStack(
                    kind=stack.kind,
                    layers=layers,
                    axis=axis,
                )
                yield whole_stack, ""
            for position in range(end, count):
                layers = f"layers_remainder/layers_{position - end}"
                stack_of_position = LayerStack(
                    kind=stack.kind,
                    layers=layers,
                    axis=f"layers[{position}]",
                )
                yield stack_of_position, ""


def _as_stored(family: str, kind: str, text: str, sizes: Mapping[str, int]) -> Entry:
    """Returns the entry of a weight in MaxText's layout: `text`, such as
    `"norm: embed"`, or a `Counted` if MaxText stores the weight multiplied or with a
    number added. The factor follows from `sizes`, the sizes of the axes.
    """
    if kind == "query" and family in _DIVIDED:
        return Counted(text, times=_size(sizes, "dim", "head_dim") ** -0.5)
    if kind == "embedding" and family in _GEMMAS:
        root = _size(sizes, "embed", "hidden_size") ** 0.5
        # For Gemma 3, MaxText rounds the root itself to bfloat16.
        if family in ("gemma3", "gemma3_text"):
            root = float(np.asarray(root, jnp.bfloat16))
        return Counted(text, times=root)
    if "norm" in kind and family in _GEMMAS:
        return Counted(text, plus=1)
    return text


def _size(sizes: Mapping[str, int], axis: str, name: str) -> int:
    """The size of an axis. Raises `MapError`, which says that the configuration lacks
    `name`, if it is unknown.
    """
    if axis not in sizes:
        raise MapError(
            f"MaxText's weights hold a root of `{name}`, which the configuration does"
            " not say; add it."
        )
    return sizes[axis]
