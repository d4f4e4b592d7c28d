"""Builds path rules from the rows of a model family. The axis names in a row determine
over which mesh axis each dimension is sharded.
"""

import functools as ft
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from .._ground.errors import RuleError, whole_number
from .._rules import (
    Atomic,
    PathRules,
    Replicate,
    Strategy,
    atomic,
    fsdp as fsdp_strategy,
    optional,
    replicate,
)
from .maps._entries import Weight, weights_of
from .maps._families import Options, Rows, further_rows_of, rows_of, vision_rows_of


# One mesh axis, several, or none: `()`.
Axes = str | tuple[str, ...]
Target = Atomic | Strategy | Replicate | P
Rules = list[tuple[str, Target]]
# From the name of an axis to its size.
Sizes = Mapping[str, Any]

# The names of axes, by the mesh axis over which their dimension is sharded:
# `_TENSOR_AXES` (heads, hidden units, vocabulary) over `tensor`, `_FSDP_AXES` over
# `fsdp`, `_UNSHARDED_AXES` over none.
_TENSOR_AXES = (
    *("vocab", "heads", "kv_heads", "hidden", "both_hidden", "shared_hidden", "pooled"),
    *(
        "linear_key_heads",
        "linear_value_heads",
        "vision_heads",
        "vision_hidden",
        "vision_out_units",
    ),
    *("layer_vocab", "layer_input", "layer_inputs_out", "fp4_rows"),
)
_FSDP_AXES = (
    *("embed", "two_embeds", "vision_embed", "adapted", "adapter_out"),
    "layer_inputs",
    # gpt-oss is published in blocks of 32 numbers. 90 of them are in a row, which few
    # meshes divide.
    "fp4_experts",
)
# The compressed queries, keys and values of latent attention, which belong to no head.
_LATENT = ("latent", "query_latent")
_UNSHARDED_AXES = (
    *("experts", "dim", "latent_and_rope", "buckets", "one", "ahead_embed"),
    *("laurel_rank", "routed_streams", "embed_out", "fp4_blocks", "fp4_bytes"),
)
# Axes over which a bias of one dimension is sharded like its matrix.
_AXES_OF_SHARDED_VECTORS = ("heads", "kv_heads", "vision_heads", "vision_hidden")


def rows_for_rules(family: str, options: Options) -> Rows:
    """Returns the rows of all arrays that models of a family may have, and of arrays
    that only checkpoints have. A row is a path and its entry, such as
    `model.layers.{layers}.self_attn.q_proj.weight` and "query: (heads dim) embed".

    `options` has the options that decide about biases, such as `qkv_bias`. Norms and
    other arrays that depend on an option are always included.
    """
    all_options = {
        **options,
        "qk_norm": True,
        "four_norms": True,
        "tied": False,
        "dense_layers": 1,
        "score_bias": True,
    }
    # The queries of DeepSeek are either whole or compressed, under other names.
    rows = rows_of(family, {**all_options, "q_lora": 0})
    rows |= rows_of(family, {**all_options, "q_lora": 1})
    rows |= vision_rows_of(family) | further_rows_of(family)
    if family != "deepseek":
        return rows
    # The fp8 checkpoint has, for each weight, an array of scales per block of
    # 128 x 128. Its name has a suffix.
    with_scales = {}
    for path, entry in rows.items():
        with_scales[path.replace(".weight", ".weight(_scale_inv)?")] = entry
    return with_scales


def rules_of(
    rows: Rows,
    sizes: Sizes,
    fsdp: Axes,
    tensor: Axes,
    *,
    expert: Axes = (),
    others: Sequence[str] = (),
) -> Rules:
    """Returns path rules for the rows of a family, with one rule for all rows that are
    sharded alike.

    - `rows`: for each array's path its entry, which names the kind of weight and
      the axes of each dimension, such as `query: embed (heads dim)`.
    - `sizes`: the sizes of inner axes, such as `dim` in the dimension `(heads dim)`. No
      shard may split an inner axis.
    - `fsdp`, `tensor`, `expert`: the mesh axes. Stacked experts are sharded over
      `expert` along their first dimension.
    - `others`: paths that no rule may match.

    Raises `RuleError` for an inner axis whose size is no positive number.
    """
    mesh_axes = (
        dict.fromkeys(_TENSOR_AXES, tensor)
        | dict.fromkeys(_FSDP_AXES, fsdp)
        | dict.fromkeys(_UNSHARDED_AXES)
    )
    paths_by_target: dict[Target, list[str]] = {}
    for path, entry in rows.items():
        # The kinds of weights in one array, such as query, key and value, are sharded
        # alike.
        weight, *_ = weights_of(path, entry)
        axes_of_weight = mesh_axes
        if weight.kind.startswith("expert_"):
            axes_of_weight = mesh_axes | {"experts": expert}
        target = _target(weight, axes_of_weight, sizes, fsdp)
        paths_by_target.setdefault(target, []).append(path)
    rules: Rules = []
    for target, paths in paths_by_target.items():
        unmatched = [*others, *[path for path in rows if path not in paths]]
        suffixes = [_suffix(path, unmatched) for path in paths]
        rules.append((_regex(suffixes), target))
    return rules


def _target(
    weight: Weight,
    mesh_axes: Mapping[str, Axes | None],
    sizes: Sizes,
    fsdp: Axes,
) -> Target:
    """Returns the target of the path rule for a weight: the mesh axes of each
    dimension, with the units that no shard may split; for norms and other small arrays,
    the strategy over `fsdp`.

    `mesh_axes` has the mesh axes of each axis of a weight. `sizes` has the sizes of
    inner axes, such as `dim` in the dimension `(heads dim)`, of which `heads` is the
    outer one. `fsdp` is for latent axes, and for the strategy of small arrays.
    """
    # `dims` has the axes of each dimension, such as `("heads", "dim")`.
    outer_axes = [axes_of_dim[0] for axes_of_dim in weight.dims]
    # Latent axes are sharded over `fsdp` only if no dimension is `embed`.
    latent_axes = None if "embed" in outer_axes else fsdp
    mesh_axes = {**mesh_axes, **dict.fromkeys(_LATENT, latent_axes)}
    is_small_vector = (
        len(outer_axes) == 1 and outer_axes[0] not in _AXES_OF_SHARDED_VECTORS
    )
    if is_small_vector or not set(outer_axes) <= mesh_axes.keys():
        # Norms, biases and small tables.
        if fsdp:
            return fsdp_strategy(fsdp)
        return replicate

    units = []
    for _, *inner_axes in weight.dims:
        inner_sizes = []
        for axis in inner_axes:
            inner_sizes.append(positive(sizes[axis], f"the size of `{axis}`"))
        units.append(math.prod(inner_sizes))
    spec = P(*[mesh_axes[axis] for axis in outer_axes])
    if max(units) > 1:
        return atomic(spec, tuple(units))
    return spec


# The name of an axis in a path, such as `{layers}`; also a number.
_BRACES = r"\{[^}]*\}"
_BRACES_OR_NUMBER = rf"{_BRACES}|\d+"


def _suffix(path: str, others: Sequence[str]) -> str:
    """Returns a regex for the shortest suffix of a path that no path in `others` has.
    If possible, it matches any layer number.

    For `model.layers.{layers}.mlp.up_proj.weight`: `up_proj.weight`. The "." also
    matches the "/" in the paths of a nested tree.
    """
    for segment_count in range(2, path.count(".") + 2):
        # First every number in the paths stands for any number. If the suffix is then
        # one of another path too, only braces do.
        for any_number in (_BRACES_OR_NUMBER, _BRACES):
            regex = _regex_of(path, any_number)
            suffix = ".".join(regex.split(".")[-segment_count:])
            if not any(
                _regex_of(other, any_number).endswith(suffix) for other in others
            ):
                return suffix
    return _regex_of(path, _BRACES)


# A preset compares each path with all others, and a model has hundreds.
@ft.lru_cache(maxsize=4096)
def _regex_of(path: str, any_number: str) -> str:
    """The path with a regex for any number in the place of each match of `any_number`."""
    return re.sub(any_number, r"\\d+", path)


def _regex(suffixes: Sequence[str]) -> str:
    """Returns one regex for several path suffixes. The suffix "norm.weight" also
    matches "layernorm.weight".
    """
    needed = []
    for suffix in dict.fromkeys(suffixes):
        # A longer suffix matches only what a shorter one matches too.
        shorter = [other for other in suffixes if other != suffix]
        if not any(suffix.endswith(other) for other in shorter):
            needed.append(suffix)
    heads, _, lasts = zip(*[suffix.rpartition(".") for suffix in needed], strict=True)
    if len(needed) == 1:
        return f"{needed[0]}$"
    if len({*lasts}) == 1:
        return f"({'|'.join(heads)}).{lasts[0]}$"
    return f"({'|'.join(needed)})$"


def positive(
    value: object,
    what: str,
    counted: str = "elements, as `head_dim=64`",
) -> int:
    """`value` as a Python int. Raises `RuleError`, which calls it `what`, if it is no
    positive integer. `counted` says what it is a number of, with an example.
    """
    number = whole_number(value)
    if number is None or number < 1:
        raise RuleError(f"{what} is {value!r}; give a positive number of {counted}.")
    return number


def not_negative(value: object, what: str) -> int:
    """`value` as a Python int: 0, or what `positive` returns."""
    return 0 if whole_number(value) == 0 else positive(value, what)


def _check_mesh_axes(name: str, axes: object) -> None:
    """Raises `RuleError` if `axes`, the argument `name` of a preset, is neither a mesh
    axis nor a tuple of mesh axes.
    """
    if not isinstance(axes, str | tuple | list):
        raise RuleError(
            f"`{name}={axes!r}` names no mesh axis; write one, as in"
            f" `{name}={name!r}`, a tuple of several, or `{name}=()` for none."
        )


def optional_rules(
    family: str,
    sizes: Mapping[str, int],
    fsdp: Axes,
    tensor: Axes,
) -> PathRules:
    """Returns path rules for a family of models. Each rule is optional, since a model
    need not have the rule's arrays.

    `sizes` has the sizes of axes that no shard may split, such as `dim` for the width
    of a head.
    """
    _check_mesh_axes("fsdp", fsdp)
    _check_mesh_axes("tensor", tensor)
    has_bias = family in ("qwen2", "glm4_moe")
    rows = rows_for_rules(family, {"qkv_bias": has_bias})
    rules = []
    for regex, target in rules_of(rows, sizes, fsdp, tensor):
        rules.append((regex, optional(target)))
    mesh_axes: list[str] = []
    for axis_or_axes in (fsdp, tensor):
        if isinstance(axis_or_axes, str):
            mesh_axes.append(axis_or_axes)
        else:
            mesh_axes += axis_or_axes
    return PathRules(rules, mesh_axes=mesh_axes)
