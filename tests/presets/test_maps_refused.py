import functools as ft
from typing import Any

import pytest
from small_models import (
    config_of,
    files_of,
)

from shardfx.errors import MapError
from shardfx.presets import maps


LLAMA = {"model_type": "llama", "num_attention_heads": 4}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 64, "head_dim": 8}
DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
CONFIGS = {
    "a family": (
        maps.hugging_face,
        {"model_type": "qwen3_mo"},
        r"'qwen3_mo' \(did you mean 'qwen3_moe'",
    ),
    "no family": (
        maps.hugging_face,
        {},
        r"for the `model_type` 'None'; there are llama,",
    ),
    "maxtext": (
        maps.maxtext,
        {"model_type": "gpt2"},
        r"no table of MaxText's names for 'gpt2'; there are",
    ),
    "heads": (
        maps.engine,
        {"model_type": "gpt2", "n_head": 6},
        r"6 heads do not divide into 4 shards; use another",
    ),
    "key heads": (
        maps.engine,
        {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 3},
        "3 key heads for 4",
    ),
    "no shards": (
        ft.partial(maps.engine, shards=0),
        LLAMA,
        r"`shards` is the number of devices of the engine, not 0; write it as in",
    ),
    "biases": (
        maps.maxtext,
        {**LLAMA, "attention_bias": True},
        "MaxText has no `out_bias`, which this configuration",
    ),
    "mlp biases": (
        maps.maxtext,
        {**LLAMA, "mlp_bias": True},
        "has no `gate_bias` and no `up_bias` and no `down_bias`",
    ),
    "blocks": (
        maps.maxtext,
        GEMMA,
        "the layers of Gemma 3 come in blocks of six; say `num_hidden_layers`",
    ),
    "a root": (
        maps.maxtext,
        {"model_type": "gemma"},
        r"hold a root of `hidden_size`, which the configuration",
    ),
    "layers": (
        maps.stacked,
        {**LLAMA, "num_nextn_predict_layers": 1},
        r"does not say `num_hidden_layers`; add it",
    ),
    **{
        dim: (
            maps.stacked,
            {**config_of("deepseek_v3"), dim: None},
            f"does not say `{dim}`; add it",
        )
        for dim in DIMS
    },
}


@pytest.mark.parametrize("layout, config, message", CONFIGS.values(), ids=CONFIGS)
def test_missing_and_impossible_configuration_is_named(layout, config, message):
    with pytest.raises(MapError, match=message):
        layout(config, **{"shards": 4} if layout is maps.engine else {})


@pytest.mark.parametrize("config", ["config.json", None, object()])
@pytest.mark.parametrize(
    "layout",
    [maps.hugging_face, maps.stacked, maps.maxtext, ft.partial(maps.engine, shards=2)],
)
def test_a_config_that_is_no_dict_is_named(layout, config):
    with pytest.raises(MapError, match=r"content of a model's config.json as a dict"):
        layout(config)


class ConfigWithGet:
    """A config that is no `Mapping`, as `ml_collections.ConfigDict`."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, key):
        return self.config[key]

    def get(self, key, default=None):
        return self.config.get(key, default)

    def keys(self):
        return self.config.keys()


def test_a_config_with_get_need_not_be_a_dict():
    config = config_of("llama")
    with_get: Any = ConfigWithGet(config)
    for layout in (maps.hugging_face, maps.stacked, maps.maxtext):
        assert layout(with_get).weights == layout(config).weights


A = "layers.{layers}.q"
B = "q"
PAIRS = {
    "kinds": (
        {A: "query: a", B: "key: b"},
        {B: "querry: a"},
        (
            r"(?s)has no `querry` \(did you mean 'query'.*no `query`"
            r" \(layers.\{layers\}.q\) \(did.*no `key` \(q\)"
        ),
    ),
    "axes": (
        {B: "q: a b"},
        {B: "q: a c"},
        r"`q` has other axes in both layouts: a b in `q`, a c in `q`",
    ),
    "a size": (
        {B: "q: (a b)"},
        {B: "q: a b"},
        r"needs the size of the axis `b`; say it: `layout.with_sizes\(b=...\)`",
    ),
    "parts": (
        {B: "q: a", "r": "q: a"},
        {B: "q: a"},
        r"the source has `q` in q, r; give each a range of the same axis",
    ),
    "a part": (
        {B: "q: a[:1] b", "r": "q: a[1:] b"},
        {B: "q: (a b)"},
        "`a` comes in parts, and must be a dimension of",
    ),
    "a turn": (
        {B: "q: a[0::3]", "r": "q: a[2::3]"},
        {B: "q: a"},
        "of every 3 `q` the source has those from 0, 2, not",
    ),
    "a gap": (
        {B: "q: a[:1] b", "r": "q: a[2:] b"},
        {B: "q: a b"},
        r"`q` in the ranges `a\[0:1\]`, `a\[2:\]`; the ranges of `a` begin at 0",
    ),
    "an overlap": (
        {B: "q: a[:3] b", "r": "q: a[2:] b"},
        {B: "q: a b"},
        r"the ranges `a\[0:3\]`, `a\[2:\]`; the ranges of `a` begin",
    ),
    "a late beginning": (
        {B: "q: a[2:] b"},
        {B: "q: a[3] b"},
        r"in the ranges `a\[2:\]`; the ranges of `a` begin at 0, and each",
    ),
    "entries apart": (
        {B: "q: a[0] b", "r": "q: a[2] b"},
        {B: "q: a b"},
        r"the ranges `a\[0\]`, `a\[2\]`; the ranges of `a` begin at 0",
    ),
    "an array per entry": (
        {A: "q: a"},
        {B: "q: a"},
        r"has `\{layers\}`, an axis that the target does not have",
    ),
}


@pytest.mark.parametrize("source, target, message", PAIRS.values(), ids=PAIRS)
def test_what_keeps_two_layouts_apart_is_named(source, target, message):
    with pytest.raises(MapError, match=message):
        maps.TreeLayout(source).to(maps.TreeLayout(target))


Q = maps.TreeLayout({B: "q: a"})
FUSED = maps.TreeLayout({B: maps.Fused("q: a", "k: a")})
LAYOUTS = {
    "without": (lambda: Q.without("k"), r"the layout has no kind 'k'; it has q"),
    "without a part": (
        lambda: FUSED.without("k"),
        r"'q' has other kinds beside; leave out all of them, or none",
    ),
    "paths": (lambda: Q.with_paths({"x": "y"}), r"the layout has no 'x'; it has q"),
    "drop": (
        lambda: Q.to(Q, drop=["qq"]),
        r"`drop` has `qq`, which the source has not \(did you mean 'q'",
    ),
    "a line": (
        lambda: maps.TreeLayout({A: "heads dim"}),
        r"'heads dim' cannot be read; write the kind and its axes",
    ),
    "a brace": (
        lambda: maps.TreeLayout({A: "q: (heads dim"}),
        r"'q: \(heads dim' cannot be read",
    ),
    "two ranges": (
        lambda: maps.TreeLayout({B: "q: a[:1] b[1:]"}),
        r"at most one axis has a range",
    ),
    "twice": (
        lambda: maps.TreeLayout({A: "q: layers embed"}),
        r"has the axis `layers` twice, in braces or without",
    ),
    "ranks": (
        lambda: maps.TreeLayout({A: maps.Fused("q: a b", "k: a")}),
        r"have as many dimensions each",
    ),
    "axes": (
        lambda: maps.stacked(config_of("llama")).with_sizes(vocabulary=8),
        r"no axis 'vocabulary' \(did you mean 'vocab'\?\); it has .*embed, ",
    ),
    "no parts": (
        lambda: maps.TreeLayout({A: maps.Fused()}),
        r"a `Fused` array has parts, and this has none",
    ),
    "dims": (
        lambda: maps.TreeLayout({A: maps.Fused("q: a b", dim=2)}),
        r"the parts have no dim 2",
    ),
}


@pytest.mark.parametrize("make, message", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_wrong_with_a_layout_is_said(make, message):
    with pytest.raises(MapError, match=message):
        make()


def test_a_layout_shows_sizes_under_custom_paths():
    halves = maps.TreeLayout(
        {"first": "w: layers[:2] b a", "second": "w: layers[2:] b a"}
    )
    assert "2 arrays, b=3\n  first   w: layers[:2] b a" in str(halves.with_sizes(b=3))
    weights = dict(halves.with_paths({"first": "one"}).weights)
    assert weights == {
        "one": "w: layers[:2] b a",
        "second": "w: layers[2:] b a",
    }


def test_an_odd_number_of_layers_in_pairs_is_named():
    config = config_of("gemma2")
    files = files_of("gemma2")
    mine = maps.maxtext(config)
    tree = maps.hugging_face(config).to(mine).apply(files)
    with pytest.raises(MapError, match=r"`stack` of different shapes, \[\(\d, "):
        maps.TreeLayout(dict(mine.weights), sizes=dict(mine.sizes)).to(
            maps.stacked(config)
        ).apply(tree)
