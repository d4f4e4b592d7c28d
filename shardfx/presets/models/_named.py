"""Published models by name: the tree of shapes of each, from its family and config, and
path rules for each training strategy.

The numbers are from each checkpoint's config.json, except: GPT-3 from its paper
(arXiv:2005.14165, table 2.1), T5 from t5x's gin files, ViT from big_vision's
models/vit.py. `llama3-405b` is Llama 3.1 405B, since Llama 3 has no such model.
big_vision distinguishes ViT "g" and "G"; other libraries call the larger one "bigG".
"""

import collections
import importlib.resources
import itertools as it
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..._convert import pattern
from ..._ground.errors import RuleError, whole_number
from ..._ground.text import quoted
from ..._rules import PathRules, near, optional, replicate
from .._row_rules import rows_for_rules, rules_of
from ..maps._entries import Fused, Weight, weights_of
from ..maps._families import Rows, rows_of, vision_rows_of, with_experts_stacked


# The text has a header line per family: the names of its numbers, and `name=value` for
# numbers that all its models share. Then follows a line per model, with its numbers in
# that order.
_TEXT = (
    importlib.resources.files("shardfx.presets.models")
    .joinpath("table.txt")
    .read_text(encoding="utf-8")
)


class ModelRow(NamedTuple):
    """A published model: the name of its family, and the numbers of its config."""

    family: str
    config: Mapping[str, int]


def _rows() -> Iterator[tuple[str, ModelRow]]:
    """Yields the name and the row of each published model in `table.txt`."""
    family = ""
    names = list[str]()
    shared = dict[str, int | bool]()
    # A line that begins with "+" goes on with the one before it.
    for line in _TEXT.replace("\n+", "").splitlines():
        name_or_family, *words = line.split()
        if name_or_family.endswith(":"):
            family = name_or_family[:-1]
            names = []
            shared = {}
            for word in words:
                name, _, text = word.partition("=")
                if text:
                    shared[name] = _number(text)
                else:
                    names.append(name)
        else:
            config = dict(zip(names, map(_number, words), strict=True)) | shared
            yield name_or_family, ModelRow(family, MappingProxyType(config))


def _number(text: str) -> int | bool:
    """A number of the table; "True" and "False" are bools."""
    if text in ("True", "False"):
        return text == "True"
    return int(text)


TABLE: Final[Mapping[str, ModelRow]] = MappingProxyType(dict(_rows()))


Tree = dict[str, Any]
# From an axis to its size. An axis of layers that are not consecutive has the list of
# their indices instead.
Sizes = Mapping[str, int | Sequence[int]]
# The options of a family, with their defaults for configs that lack them.
_OPTIONS: Final[Mapping[str, Mapping[str, bool]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "gemma"),
            {"tied": False, "qkv_bias": False, "qk_norm": False, "four_norms": False},
        ),
        "gemma3": {"tied": True, "qk_norm": True, "four_norms": True},
        "starcoder2": {"tied": True},
    }
)


def names() -> tuple[str, ...]:
    """Returns the names of the published models that [`shardfx.presets.models.tree`][]
    knows.

    **Returns:**

    The names, grouped by family.

    !!! Example

        ```python
        from shardfx.presets import models

        assert "llama3-405b" in models.names()
        ```
    """
    return tuple(TABLE)


def config(name: str) -> dict[str, Any]:
    """Returns the numbers of a model's config, from which its shapes are made.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].

    **Returns:**

    A new dict; each of its keys is a keyword argument of
    [`shardfx.presets.models.tree`][].

    **Raises:**

    `RuleError` for an unknown name, with the nearest known ones.

    !!! Example

        ```python
        from shardfx.presets import models

        assert models.config("llama3-8b")["kv_heads"] == 8
        ```
    """
    return dict(row_of(name).config)


def tree(
    name: str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    stack_experts: bool = False,
    **changes: int,
) -> Tree:
    """Returns the arrays of a published model as ShapeDtypeStructs, under the names of
    its checkpoint.

    Weights have the dimensions of the checkpoint, torch's `[out, in]`. Nothing is
    allocated.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].
    - `dtype`: the dtype of all arrays, except those that the checkpoint keeps in
      float32.
    - `stack_experts`: whether the experts of a layer are one array with a leading
      dimension, as expert parallelism needs them, instead of one array per expert. A
      dense model has no experts, and is the same with it.
    - `changes`: numbers that replace the published ones, by the names in
      [`shardfx.presets.models.config`][]. With `layers=2`, for example, the model is
      small enough to compile.

    **Returns:**

    Nested dicts of ShapeDtypeStructs.

    **Raises:**

    `RuleError` for an unknown model or an unknown number, with the nearest known ones;
    for a number below 1, or below 0 if it counts layers.

    !!! Example

        ```python
        from shardfx import MeshSpec, plan
        from shardfx.presets import models

        tree = models.tree("llama3-405b")
        layer = tree["model"]["layers"]["125"]
        assert layer["mlp"]["up_proj"]["weight"].shape == (53248, 16384)
        rules = models.rules_for("llama3-405b", "fsdp_tp")
        made = plan(tree, MeshSpec({"fsdp": 64, "tensor": 8}), paths=rules)
        assert made.bytes_per_device < 1.01 * made.bytes_total / 512
        ```
    """
    row = row_of(name)
    checked = _checked_changes(name, row, changes)
    # The numbers of the model, and the options that decide which arrays it has.
    options = {**_OPTIONS.get(row.family, {}), **row.config, **checked}
    rows = {**rows_of(row.family, options), **vision_rows_of(row.family)}
    if stack_experts:
        others = {
            path: entry for path, entry in rows.items() if "{experts}" not in path
        }
        rows = others | with_experts_stacked(rows)
    return tree_of(rows, sizes_of(options), dtype)


def row_of(name: str) -> ModelRow:
    """Returns the row of the model `name`. Raises `RuleError` with the nearest names
    for an unknown model.
    """
    if not isinstance(name, str) or name not in TABLE:
        hint = near(str(name).lower(), names()) or f"; there are {', '.join(TABLE)}"
        raise RuleError(f"`presets.models` has no {quoted(str(name))}{hint}.")
    return TABLE[name]


def _checked_changes(
    name: str,
    row: ModelRow,
    changes: Mapping[str, Any],
) -> dict[str, int]:
    """Returns the changes with Python's own numbers. Raises `RuleError` for a change of
    a number that the model `name` does not have, or to a value that the number cannot
    have.
    """
    options = {**row.config, **_OPTIONS.get(row.family, {})}
    checked: dict[str, int] = {}
    for option, value in changes.items():
        if option not in options:
            hint = near(option, tuple(options)) or f"; it has {', '.join(options)}"
            raise RuleError(f"`{name}` has no number {quoted(option)}{hint}.")
        if isinstance(options[option], bool):
            if not isinstance(value, bool):
                raise RuleError(f"`{name}`: `{option}={value!r:.60}` is no bool.")
            checked[option] = value
            continue
        # A bool is no number of layers.
        number = whole_number(value)
        if number is None:
            raise RuleError(f"`{name}`: `{option}={value!r:.60}` is no whole number.")
        least = 1
        if _may_be_zero(option):
            least = 0
        if number < least:
            raise RuleError(
                f"`{name}`: `{option}={number}` is too small; the published number is"
                f" {options[option]}, and the smallest is {least}."
            )
        checked[option] = number
    return checked


def _may_be_zero(option: str) -> bool:
    """Whether a model may have none of what a number of its config counts: layers of a
    kind, and a latent for queries.
    """
    return option.endswith("layers") or option == "q_lora"


def sizes_of(config: Mapping[str, int]) -> dict[str, int | Sequence[int]]:
    """Returns the sizes of all axes of a model's weights, such as "embed": the numbers
    of its config, and sizes that follow from them. For layers that are not consecutive,
    it is a list of their indices.
    """
    # A number that the config lacks is 0.
    numbers = collections.defaultdict[str, int](int, config)
    return {
        **config,
        **_sizes_of_widths(numbers),
        **_sizes_of_layers(numbers),
        **_sizes_of_vision(numbers),
    }


def _sizes_of_widths(numbers: Mapping[str, int]) -> dict[str, int]:
    """The sizes of axes that follow from the widths in a config. In `numbers`, what the
    config lacks is 0.
    """
    layers = numbers["layers"]
    embed = numbers["embed"] or numbers["heads"] * numbers["head_dim"]
    linear_dim = numbers["linear_head_dim"]
    key_heads = numbers["linear_key_heads"]
    value_heads = numbers["linear_value_heads"]
    values_of_key = value_heads // (key_heads or 1)
    layer_inputs = layers * numbers["layer_input"]
    return {
        "one": 1,
        "two": 2,
        "colors": 3,
        "types": 2,
        "first": min(layers, 1),
        "embed": embed,
        "pooled": embed,
        "dim": numbers["head_dim"] or numbers["nope"] + numbers["rope"],
        "two_dims": 2 * numbers["head_dim"],
        "ahead_embed": embed,
        "two_embeds": 2 * embed,
        # Latent attention.
        "query_latent": numbers["q_lora"],
        "latent": numbers["kv_lora"],
        "latent_and_rope": numbers["kv_lora"] + numbers["rope"],
        "both_dim": numbers["nope"] + numbers["value"],
        "value_dim": numbers["value"],
        # Experts.
        "both_hidden": 2 * numbers["expert_hidden"],
        "shared_hidden": (numbers["shared_experts"] or 1) * numbers["expert_hidden"],
        # Linear attention.
        "qkvz": 2 * linear_dim * (1 + values_of_key),
        "ba": 2 * values_of_key,
        "conv_rows": linear_dim * (2 * key_heads + value_heads),
        # Residual streams, and the inputs of all layers together.
        "stream_pairs": numbers["streams"] ** 2,
        "routed_streams": numbers["streams"],
        "more_streams": max(numbers["streams"] - 1, 0),
        "embed_out": embed,
        "layer_inputs": layer_inputs,
        "layer_inputs_out": layer_inputs,
    }


def _sizes_of_layers(numbers: Mapping[str, int]) -> dict[str, int | Sequence[int]]:
    """The counts or indices of layers of different kinds, such as dense and expert
    layers. In `numbers`, what the config lacks is 0.
    """
    layers = numbers["layers"]
    full_every = numbers["full_attention_every"] or 1
    routed_every = numbers["experts_every"] or 1
    full = range(full_every - 1, layers, full_every)
    routed = range(routed_every - 1, layers, routed_every)
    return {
        "dense_layers": min(numbers["dense_layers"], layers),
        "moe_layers": max(layers - numbers["dense_layers"], 0),
        "full_layers": list(full),
        "linear_layers": [index for index in range(layers) if index not in full],
        "routed_layers": list(routed),
        "plain_layers": [index for index in range(layers) if index not in routed],
    }


def _sizes_of_vision(numbers: Mapping[str, int]) -> dict[str, int]:
    """The sizes of axes of a vision encoder. The adapter's input is four neighbouring
    patches, whose joint width is `vision_hidden`. In `numbers`, what the config lacks
    is 0.
    """
    embed = numbers["vision_heads"] * numbers["vision_head_dim"]
    patch = numbers["vision_patch"] or numbers["patch"]
    return {
        "patch_rows": patch,
        "patch_columns": patch,
        "pixels": 3 * patch * patch,
        "vision_embed": embed,
        "projected": embed,
        "vision_places": numbers["vision_tokens"] + 1,
        "vision_hidden": numbers["vision_hidden"] or numbers["hidden"],
        "vision_out_units": numbers["vision_out"],
        "adapter_out": numbers["vision_out"],
        "adapted": numbers["vision_hidden"],
    }


def tree_of(rows: Rows, sizes: Sizes, dtype: DTypeLike) -> Tree:
    """Returns nested dicts with a ShapeDtypeStruct for each array of the rows.

    Arrays have dtype `dtype`, except those that checkpoints keep in float32.
    """
    tree: Tree = {}
    for path, entry in rows.items():
        concatenated_dim = entry.dim if isinstance(entry, Fused) else 0
        shape = _shape(weights_of(path, entry), concatenated_dim, sizes)
        leaf_dtype = jnp.float32 if path.endswith("e_score_correction_bias") else dtype
        # The path has the names of axes in braces, such as `{layers}`.
        path_pattern = pattern(path)
        axes = path_pattern.names
        indices_of_axes = [_indices(sizes[axis]) for axis in axes]
        for numbers in it.product(*indices_of_axes):
            filled_path = path_pattern.filled(dict(zip(axes, numbers, strict=True)))
            *above, last = str(filled_path).split(".")
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = jax.ShapeDtypeStruct(shape, leaf_dtype)
    return tree


def _indices(size: int | Sequence[int]) -> Sequence[int]:
    """The indices along an axis: its size may list them."""
    if isinstance(size, int):
        return range(size)
    return size


def _shape(weights: Sequence[Weight], dim: int, sizes: Sizes) -> tuple[int, ...]:
    """Returns the shape of the array that holds the `weights`, which are concatenated
    along dimension `dim`.
    """
    shapes = []
    for weight in weights:
        shape = []
        for axes_of_dim in weight.dims:
            shape.append(math.prod(_size(axis, weight, sizes) for axis in axes_of_dim))
        shapes.append(shape)
    joined = [*shapes[0]]
    # An array of rank 0 is alone.
    if joined:
        joined[dim] = sum(shape[dim] for shape in shapes)
    return tuple(joined)


def _size(axis: str, weight: Weight, sizes: Sizes) -> int:
    """The size of an axis in the array `weight`: the hidden units of experts may be
    others than those of dense layers.
    """
    is_expert = (
        axis == "hidden"
        and weight.kind.startswith("expert_")
        and "expert_hidden" in sizes
    )
    if is_expert:
        size = sizes["expert_hidden"]
    elif axis == "kv_heads":
        # A config without `kv_heads` (GPT, BERT) has as many key heads as query heads.
        size = sizes["kv_heads"] if "kv_heads" in sizes else sizes["heads"]
    else:
        size = sizes[axis]
    assert isinstance(size, int)
    return size


# Whether each strategy shards over the mesh axes fsdp, tensor and expert.
_CUTS: Final[Mapping[str, tuple[bool, bool, bool]]] = MappingProxyType(
    {
        "dp": (False, False, False),
        "fsdp": (True, False, False),
        "tp": (False, True, False),
        "fsdp_tp": (True, True, False),
        "ep": (True, True, True),
    }
)


def strategies(name: str | None = None) -> tuple[str, ...]:
    """Returns the strategies that [`shardfx.presets.models.rules_for`][] accepts for a
    model.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][]; `None` for the strategies of
      all models together.

    **Returns:**

    "dp", "fsdp", "tp", "fsdp_tp", and, for a mixture of experts or `None`, "ep".

    !!! Example

        ```python
        from shardfx.presets import models

        assert "ep" in models.strategies("mixtral-8x7b")
        assert "ep" not in models.strategies("llama3-8b")
        ```
    """
    accepted = list(_CUTS)
    if name is not None and "experts" not in row_of(name).config:
        accepted.remove("ep")
    return tuple(accepted)


def rules_for(
    name: str,
    how: str,
    *,
    data: str = "data",
    fsdp: str | tuple[str, ...] = "fsdp",
    tensor: str | tuple[str, ...] = "tensor",
    expert: str | tuple[str, ...] = "expert",
) -> PathRules:
    """Returns path rules that shard the arrays of a published model by a training
    strategy.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].
    - `how`: the strategy. "dp" replicates all arrays. "fsdp" shards each array over
      `fsdp`, but never inside of a head. "tp" shards the dimensions of heads, hidden
      units and vocabulary over `tensor`. "fsdp_tp" does both. "ep" shards the dimension
      of experts over `expert` and their other dimensions as "fsdp_tp" does, and shards
      all other arrays over `fsdp` and `expert` together; it needs
      `tree(..., stack_experts=True)`.
    - `data`: the mesh axis over which only the batch is sharded.
    - `fsdp`, `tensor`, `expert`: the mesh axes to use, one or a tuple for each; an axis
      that the mesh lacks is ignored.

    **Returns:**

    [`shardfx.PathRules`][] for `tree(name)`.

    **Raises:**

    `RuleError` for an unknown model, or a strategy that the model does not have.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, plan
        from shardfx.presets import models

        tree = models.tree("mixtral-8x7b", stack_experts=True)
        rules = models.rules_for("mixtral-8x7b", "ep")
        made = plan(tree, MeshSpec({"expert": 8, "fsdp": 4}), paths=rules)
        layer = "model/layers/0"
        routed = made[f"{layer}/block_sparse_moe/experts/w1/weight"]
        assert routed.spec == P("expert", None, "fsdp")
        query = made[f"{layer}/self_attn/q_proj/weight"]
        assert query.spec == P(None, ("fsdp", "expert"))
        ```
    """
    row = row_of(name)
    if how not in strategies(name):
        raise RuleError(
            f"`{name}` has no rules {quoted(how)}; there are"
            f" {', '.join(strategies(name))}."
        )
    if how == "dp":
        return PathRules([(".*", replicate)], mesh_axes=(data,))
    uses_fsdp, uses_tensor, uses_expert = _CUTS[how]
    fsdp_axes = _axes_if(uses_fsdp, fsdp)
    tensor_axes = _axes_if(uses_tensor, tensor)
    expert_axes = _axes_if(uses_expert, expert)
    sizes = sizes_of(row.config)
    all_rows = rows_for_rules(row.family, row.config)
    # The experts of a layer that the checkpoint itself holds as one array.
    packed = {}
    for path, entry in all_rows.items():
        if re.match("expert_.*: experts", str(entry)):
            packed[path] = entry
    stacked = with_experts_stacked(all_rows) | packed
    rest = {path: entry for path, entry in all_rows.items() if path not in stacked}

    rules: list[tuple[str, Any]] = []
    for regex, target in rules_of(
        stacked,
        sizes,
        fsdp_axes,
        tensor_axes,
        expert=expert_axes,
        others=[*rest],
    ):
        # The rules for experts must match: otherwise a tree with one array per expert
        # would not be sharded over `expert`.
        if not expert_axes:
            target = optional(target)
        rules.append((regex, target))
    for regex, target in rules_of(
        rest, sizes, (*fsdp_axes, *expert_axes), tensor_axes, others=[*stacked]
    ):
        rules.append((regex, optional(target)))
    return PathRules(rules, mesh_axes=(data, *fsdp_axes, *tensor_axes, *expert_axes))


def _axes_if(are_used: bool, axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """One mesh axis, or several, as a tuple; none if they are not used."""
    if not are_used:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
