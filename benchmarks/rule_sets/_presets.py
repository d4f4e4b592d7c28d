"""The cases of `shardfx.presets`: each family under its path rules and strategies, and
the axis rules of T5X and eformer.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

import shardfx as sfx
from shardfx import presets
from shardfx.presets import models

from ._case import MESHES, ROWS, Case, Loss, Model, by_paths, struct, tokens
from ._families import (
    bert_loss,
    decoder_loss,
    gpt_loss,
    latent_loss,
    t5_loss,
    vit_loss,
)


_LENGTH = 8
# Heads keep their width, which rules never cut.
_SIZES = {
    "embed": 48,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "hidden": 96,
    "vocab": 96,
    "experts": 6,
    "expert_hidden": 24,
    "q_lora": 24,
    "kv_lora": 24,
    "dense_layers": 2,
    "positions": 24,
    "patch": 4,
    "tokens": 16,
}


class _Family(NamedTuple):
    """A published model, its loss, and the preset for its paths, if it has one."""

    name: str
    loss: Loss
    preset: Callable[[], sfx.PathRules] | None


def _decoder(name: str, preset: Any, head_dim: int = 128) -> _Family:
    loss = ft.partial(decoder_loss, head_dim=head_dim)
    return _Family(name, loss, ft.partial(preset, head_dim=head_dim))


_FAMILIES = (
    _decoder("llama3-8b", presets.llama),
    _decoder("mistral-7b", presets.mistral),
    _decoder("qwen2.5-7b", presets.qwen2),
    _decoder("qwen3-0.6b", presets.qwen3),
    _decoder("gemma-2b", presets.gemma, 256),
    _decoder("gemma2-9b", presets.gemma, 256),
    _decoder("gemma3-1b", presets.gemma, 256),
    _decoder("starcoder2-3b", presets.starcoder2),
    _decoder("mixtral-8x7b", presets.mixtral),
    _decoder("qwen3-30b-a3b", presets.qwen3_moe),
    _Family(
        "deepseek-v3",
        ft.partial(latent_loss, nope=128, rope=64, value=128),
        presets.deepseek_v3,
    ),
    _Family("gpt2", ft.partial(gpt_loss, head_dim=64), presets.gpt2),
    _Family("bert-base", ft.partial(bert_loss, head_dim=64), presets.bert),
    _Family(
        "minilm-l6",
        ft.partial(bert_loss, head_dim=32),
        ft.partial(presets.bert, head_dim=32),
    ),
    _Family("t5.1.1-xxl", ft.partial(t5_loss, head_dim=64), presets.t5),
    _Family("vit-bigg-14", vit_loss, None),
)
_BY_NAME = {family.name: family for family in _FAMILIES}


def cases() -> Iterator[Case]:
    for family in _FAMILIES:
        make = ft.partial(_model, family)
        for mesh in MESHES:
            if family.preset is not None:
                name = f"presets.{_function(family.preset)}"
                planned = by_paths(family.preset())
                yield Case(
                    rules=name, model=family.name, mesh=mesh, make=make, planned=planned
                )
            for how in ("dp", "fsdp", "tp", "fsdp_tp"):
                planned = by_paths(models.rules_for(family.name, how))
                yield Case(
                    rules=f"rules_for {how}",
                    model=family.name,
                    mesh=mesh,
                    make=make,
                    planned=planned,
                )
    yield from _experts()
    yield from _t5x()
    yield from _eformer()


def _function(preset: Any) -> str:
    if isinstance(preset, ft.partial):
        return preset.func.__name__
    return preset.__name__


def _model(family: _Family, **how: Any) -> Model:
    config = models.config(family.name)
    sizes = {name: size for name, size in _SIZES.items() if name in config}
    tree = models.tree(family.name, dtype=jnp.float32, **sizes, **how)
    is_image = "patch" in config
    if is_image:
        batch = struct(ROWS, 16, 16, 3)
    else:
        batch = tokens(ROWS, _LENGTH)
    return Model(family.loss, tree, batch)


def _experts() -> Iterator[Case]:
    """Experts stacked, over an axis of their own, which also shards the rows."""
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        rules = by_paths(models.rules_for(name, "ep"))
        make = ft.partial(_model, _BY_NAME[name], stack_experts=True)
        for mesh in MESHES:
            axes = ("fsdp", "expert", "tensor")
            yield Case(
                rules="rules_for ep",
                model=name,
                mesh=mesh,
                make=make,
                planned=rules,
                axes=axes,
            )


# The names of T5X for arrays under Hugging Face's paths, `[out, in]`.
_T5X_NAMES = sfx.PathRules(
    [
        ("shared|lm_head", ("vocab", "embed")),
        ("relative_attention_bias", ("relpos_buckets", "heads")),
        ("Attention/[qkv]/", ("joined_kv", "embed")),
        ("Attention/o/", ("embed", "joined_kv")),
        ("wi_", ("mlp", "embed")),
        ("wo", ("embed", "mlp")),
        ("norm", ("embed",)),
    ]
)


def _t5x() -> Iterator[Case]:
    for activation_dims in (1, 2):
        for parameter_dims in (1, 2):
            axes = presets.t5x(activation_dims, parameter_dims)
            planned = by_paths(_T5X_NAMES, axes=axes)
            make = ft.partial(_model, _BY_NAME["t5.1.1-xxl"])
            # T5X has two mesh axes.
            for mesh in ("4x2", "2x4", "3x2"):
                name = f"presets.t5x({activation_dims}, {parameter_dims})"
                yield Case(
                    rules=name,
                    model="t5.1.1-xxl",
                    mesh=mesh,
                    make=make,
                    planned=planned,
                    axes=("data", "model"),
                )


def _eformer() -> Iterator[Case]:
    """eformer's layouts are for `[in, out]`, and here weights are `[out, in]`."""
    layouts = presets.layouts
    column = layouts.ColumnWise.axes[::-1]
    row = layouts.RowWise.axes[::-1]
    rules = [
        ("(q|k|v|gate|up)_proj/weight", column),
        ("(o|down)_proj/weight", row),
        ("embed_tokens|lm_head", layouts.RowWise.axes),
        (".*", sfx.replicate),
    ]
    paths = sfx.PathRules(rules)
    planned = by_paths(paths, axes=presets.eformer())
    make = ft.partial(_model, _BY_NAME["llama3-8b"])
    for mesh in MESHES:
        yield Case(
            rules="presets.eformer",
            model="llama3-8b",
            mesh=mesh,
            make=make,
            planned=planned,
            axes=("dp", "fsdp", "tp"),
        )
