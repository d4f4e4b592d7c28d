"""The arrays of a model, from the rows of its family and the numbers of its config."""

import collections
import itertools as it
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..._convert.patterns import pattern
from ..maps._families import Rows
from ..maps._places import Fused, Place, places_of


Tree = dict[str, Any]
# The size of an axis; of layers that are not all of one form, their numbers.
Sizes = Mapping[str, int | Sequence[int]]


def sizes_of(config: Mapping[str, int]) -> dict[str, int | Sequence[int]]:
    """The sizes of the axes of a model's rows, which have the names of the config or follow from it."""
    n = collections.defaultdict[str, int](int, config)
    layers, linear = n["layers"], n["linear_head_dim"]
    full, routed = n["full_attention_every"] or 1, n["experts_every"] or 1
    ratio = n["linear_value_heads"] // (n["linear_key_heads"] or 1)
    embed = n["embed"] or n["heads"] * n["head_dim"]
    vision_embed = n["vision_heads"] * n["vision_head_dim"]
    patch = n["vision_patch"] or n["patch"]
    return {
        **config,
        **{"one": 1, "two": 2, "colors": 3, "types": 2, "first": min(layers, 1)},
        **{"embed": embed, "pooled": embed, "dim": n["head_dim"] or n["nope"] + n["rope"]},
        **{"two_dims": 2 * n["head_dim"], "ahead_embed": embed, "two_embeds": 2 * embed},
        # Latent attention.
        **{"query_latent": n["q_lora"], "latent": n["kv_lora"], "latent_and_rope": n["kv_lora"] + n["rope"]},
        **{"both_dim": n["nope"] + n["value"], "value_dim": n["value"]},
        # Layers of several forms.
        "dense_layers": min(n["dense_layers"], layers),
        "moe_layers": max(layers - n["dense_layers"], 0),
        "full_layers": [index for index in range(layers) if (index + 1) % full == 0],
        "linear_layers": [index for index in range(layers) if (index + 1) % full],
        "routed_layers": [index for index in range(layers) if (index + 1) % routed == 0],
        "plain_layers": [index for index in range(layers) if (index + 1) % routed],
        # Experts, and linear attention.
        **{"both_hidden": 2 * n["expert_hidden"], "shared_hidden": (n["shared_experts"] or 1) * n["expert_hidden"]},
        **{"qkvz": 2 * linear * (1 + ratio), "ba": 2 * ratio},
        "conv_rows": linear * (2 * n["linear_key_heads"] + n["linear_value_heads"]),
        # What sees. The adapter's input is four patches side by side, which have the encoder's inner width.
        **{"patch_rows": patch, "patch_columns": patch, "pixels": 3 * patch * patch},
        **{"vision_embed": vision_embed, "projected": vision_embed, "vision_places": n["vision_tokens"] + 1},
        "vision_hidden": n["vision_hidden"] or n["hidden"],
        **{"vision_out_units": n["vision_out"], "adapter_out": n["vision_out"], "adapted": n["vision_hidden"]},
    }


def tree_of(rows: Rows, sizes: Sizes, dtype: DTypeLike) -> Tree:
    """Nested dicts of structs, each its own object; what checkpoints keep in float32 has that dtype."""
    tree: Tree = {}
    for path, entry in rows.items():
        shape = _shape(places_of(path, entry), entry.dim if isinstance(entry, Fused) else 0, sizes)
        kept = jnp.float32 if path.endswith("e_score_correction_bias") else dtype
        name = pattern(path)
        for numbers in it.product(*[_numbers(sizes[axis]) for axis in name.names]):
            *above, last = str(name.filled(dict(zip(name.names, numbers, strict=True)))).split(".")
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = jax.ShapeDtypeStruct(shape, kept)
    return tree


def _numbers(size: int | Sequence[int]) -> Sequence[int]:
    return range(size) if isinstance(size, int) else size


def _shape(places: Sequence[Place], dim: int, sizes: Sizes) -> tuple[int, ...]:
    """The shape of one place, or of several end to end."""
    shapes = [[math.prod(_size(axis, place, sizes) for axis in group) for group in place.dims] for place in places]
    whole = [sum(shape[dim] for shape in shapes) if at == dim else size for at, size in enumerate(shapes[0])]
    return tuple(whole)


def _size(axis: str, place: Place, sizes: Sizes) -> int:
    is_expert = axis == "hidden" and place.kind.startswith("expert_") and "expert_hidden" in sizes
    # GPT and BERT have as many key heads as heads.
    size = sizes["expert_hidden"] if is_expert else sizes["heads"] if axis not in sizes else sizes[axis]
    assert isinstance(size, int)
    return size
