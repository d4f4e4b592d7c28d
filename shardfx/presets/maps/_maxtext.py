"""The layout of MaxText's parameters, as its own converter makes them from checkpoints under Hugging Face's names."""

import re
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from ..._ground.errors import MapError
from ._hugging_face import Config, hugging_face, text_config
from ._layout import TreeLayout
from ._places import Counted, Entry
from ._targets import SCANNED, LayerStack, stacks_of


# In Gemma's blocks, where these have other names.
_GEMMA = {
    "attention_norm": "pre_self_attention_norm/scale",
    "attention_post_norm": "post_self_attention_norm/scale",
    "mlp_norm": "pre_ffw_norm/scale",
    "mlp_post_norm": "post_ffw_norm/scale",
}
# How many layers of Gemma 3 are one block that is scanned: five that see a window, and one that sees all.
_PATTERN = 6
_MOE = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}
# Whose queries MaxText's converter divides by the square root of the head's size, which its attention then leaves out.
_DIVIDED = ("llama", "mistral", "mixtral", "gemma", "gemma2")
_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3_text")
_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"),
    *_GEMMAS,
)


def maxtext(config: Config, *, prefix: str = "params/", interleaved_rope: bool | None = None) -> TreeLayout:
    """The layout of MaxText's parameters with scanned layers: heads are a dimension, and layers are the second axis.

    MaxText keeps the query of Llama, Mistral, Mixtral, Gemma and Gemma 2 divided by the square root of the head's size,
    Gemma's embedding times the square root of its width, and Gemma's norms plus 1. So does the map: in float32, rounded
    to the weight's dtype, which loses nothing where a root is a power of two.

    The layers of Gemma 2 are scanned in pairs, one that sees a window and one that sees all, those of Gemma 3 in blocks
    of six; what is left over is in no stack. MaxText pads Gemma's vocabulary: `with_sizes(vocab=256128)`.

    **Arguments:**

    - `config`: as of [`shardfx.presets.maps.hugging_face`][].
    - `prefix`: the prefix of each path.
    - `interleaved_rope`: whether the two numbers that a rotation turns lie side by side, as MaxText has them for Llama
        3.1 and later, and not half a head apart. By default where the configuration has Llama 3's scaling.

    **Returns:**

    A [`shardfx.presets.maps.TreeLayout`][].

    **Raises:**

    `MapError` for families of which there is no table, as GPT-2, and for a configuration without a number that is
    needed.

    !!! Example

        ```python
        from shardfx.presets import maps

        config = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4}
        theirs = maps.maxtext(config)
        query = dict(theirs.weights)["params/decoder/layers/self_attention/query/kernel"]
        assert query == "query: embed layers heads dim"
        ```
    """
    family = config.get("model_type")
    if family not in _TYPES:
        raise MapError(f"there is no table of MaxText's names for {family!r}; there are {', '.join(_TYPES)}.")
    if interleaved_rope is None:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        interleaved_rope = scaling.get("rope_type") == "llama3"
    theirs = hugging_face(config, ahead="drop")
    sizes = dict(theirs.sizes)
    moe, rows = _MOE.get(str(family), "DeepSeekMoeBlock_0/MoeBlock_0"), dict[str, Entry]()
    names = {kind: one.maxtext for kind, one in SCANNED.items() if one.maxtext != "-"}
    names |= _GEMMA if family in _GEMMAS else {}
    absent = [kind for kind in theirs.kinds if kind not in names]
    if absent:
        raise MapError(
            f"MaxText has no {' and no '.join(f'`{kind}`' for kind in absent)}, which this configuration has "
            "(`attention_bias`, `mlp_bias`); write a `TreeLayout` for your own model."
        )
    for (kind, layers, axis), suffix in _scanned(config):
        name, axes = names[kind], re.sub("[()]", "", SCANNED[kind].axes)
        if interleaved_rope and kind in ("query", "key"):
            axes = axes.replace("dim", "(half two)")
        first, *others = axes.split(" ", 1)
        block, _, rest = name.partition("/")
        path = f"decoder/{layers}/{block}{suffix}/{rest}" if layers else name
        entry = _as_kept(str(family), kind, f"{kind}: {' '.join([first, axis, *others])}", sizes)
        rows[f"{prefix}{path.replace('{moe}', moe)}"] = entry
    apart = {"dim": "two half"} if interleaved_rope else {}
    return TreeLayout(
        rows, sizes=sizes | {"two": 2, "half": _size(sizes, "dim", "head_dim") // 2} if apart else sizes, apart=apart
    )


def _scanned(config: Config) -> Iterator[tuple[LayerStack, str]]:
    """Each kind of weight with the stack that holds its layers, and the end of the name of its block."""
    family = config["model_type"]
    for stack in stacks_of(config):
        if not stack.layers or family not in ("gemma2", "gemma3", "gemma3_text"):
            yield stack, ""
        elif family == "gemma2":
            for at, suffix in enumerate(("_local", "_global")):
                yield stack._replace(axis=f"layers[{at}::2]"), suffix
        else:
            count = text_config(config).get("num_hidden_layers")
            if count is None:
                raise MapError("the layers of Gemma 3 come in blocks of six; say `num_hidden_layers`.")
            end = count - count % _PATTERN
            for at in range(_PATTERN if end else 0):
                yield stack._replace(layers=f"layers/layers_{at}", axis=f"layers[{at}:{end}:{_PATTERN}]"), ""
            for at in range(end, count):
                yield LayerStack(stack.kind, f"layers_remainder/layers_{at - end}", f"layers[{at}]"), ""


def _as_kept(family: str, kind: str, text: str, sizes: Mapping[str, int]) -> Entry:
    """A weight's line, with the factor that MaxText multiplies the weight by."""
    if kind == "query" and family in _DIVIDED:
        return Counted(text, times=_size(sizes, "dim", "head_dim") ** -0.5)
    if kind == "embedding" and family in _GEMMAS:
        root = _size(sizes, "embed", "hidden_size") ** 0.5
        # Of Gemma 3 the root itself is rounded.
        is_rounded = family in ("gemma3", "gemma3_text")
        return Counted(text, times=float(np.asarray(root, jnp.bfloat16)) if is_rounded else root)
    return Counted(text, plus=1) if "norm" in kind and family in _GEMMAS else text


def _size(sizes: Mapping[str, int], axis: str, name: str) -> int:
    if axis not in sizes:
        raise MapError(f"MaxText's weights hold a root of `{name}`, which the configuration does not say; add it.")
    return sizes[axis]
