"""Maps between real layouts: bitwise what NumPy makes of the arrays, there and back."""

import jax
import numpy as np
import pytest
from small_models import (
    MODELS,
    close,
    config_of,
    equal,
    files_of,
    in_blocks,
    stacked_by_hand,
    unscaled,
)

from shardfx import From, TreeMap, checkpoint
from shardfx.errors import MapError
from shardfx.presets import maps


@pytest.mark.parametrize("family", MODELS)
def test_a_checkpoint_and_a_stacked_tree(family):
    config = config_of(family)
    files = files_of(family)
    theirs = maps.hugging_face(config)
    mine = maps.stacked(config)
    there = theirs.to(mine)
    tree = there.apply(files)
    equal(tree, stacked_by_hand(family, files))
    structs = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for path, array in tree.items()
    }
    equal(there.apply(files, like=structs), tree)
    array_by_path = {
        path: array
        for path, array in files.items()
        if not path.startswith(("vision", "multi"))
    }
    equal(mine.to(theirs).apply(tree), array_by_path)
    equal(mine.to(theirs).apply(tree, like=array_by_path), array_by_path)
    equal(there.inverse().apply(tree, like=array_by_path), array_by_path)
    assert TreeMap.from_json(there.to_json()) == there


def test_a_tree_of_maxtext_may_have_interleaved_positions():
    config = config_of("llama") | {"rope_scaling": {"rope_type": "llama3"}}
    files = files_of("llama")
    theirs = maps.hugging_face(config)
    mine = maps.maxtext(config)
    tree = theirs.to(mine).apply(files)
    for layer in range(3):
        rows = (
            files[f"model.layers.{layer}.self_attn.q_proj.weight"].reshape(4, 2, 4, 32)
            * 8**-0.5
        )
        # The two numbers that a rotation mixes are side by side, and half a head apart
        # in the checkpoint.
        by_hand = rows.swapaxes(1, 2).reshape(4, 8, 32).transpose(2, 0, 1)
        np.testing.assert_allclose(
            tree["params/decoder/layers/self_attention/query/kernel"][:, layer], by_hand
        )
    close(mine.to(theirs).apply(tree), files)
    close(theirs.to(mine).inverse().apply(tree, like=files), files)
    stacked = maps.stacked(config)
    equal(theirs.to(stacked).then(stacked.to(mine)).apply(files), tree)


@pytest.mark.parametrize(
    "family, position, experts, first",
    [
        ("mixtral", "layers/MoeBlock_0", "block_sparse_moe.experts.2.w1", 0),
        (
            "deepseek_v2",
            "moe_layers/DeepSeekMoeBlock_0/MoeBlock_0",
            "mlp.experts.2.gate_proj",
            1,
        ),
        (
            "deepseek_v3",
            "moe_layers/DeepSeekMoeBlock_0/MoeBlock_0",
            "mlp.experts.2.gate_proj",
            3,
        ),
    ],
)
def test_trees_of_maxtext_with_experts(family, position, experts, first):
    config = config_of(family)
    files = files_of(family)
    theirs = maps.hugging_face(config)
    mine = maps.maxtext(config)
    tree = theirs.to(mine).apply(files)
    # Experts, layers, in, out.
    assert (
        tree[f"params/decoder/{position}/wi_0"][2, 1]
        == files[f"model.layers.{first + 1}.{experts}.weight"].T
    ).all()
    if family == "deepseek_v3":
        weight = files["model.layers.4.self_attn.kv_b_proj.weight"].reshape(2, 16, 16)
        assert (
            tree["params/decoder/moe_layers/self_attention/wkv_b/kernel"][:, 1]
            == weight.transpose(2, 0, 1)
        ).all()
    close(mine.to(theirs).apply(tree), files)


@pytest.mark.parametrize(
    "heads, kv_heads, shards", [(4, 2, 1), (4, 2, 2), (4, 2, 4), (8, 1, 8), (8, 2, 8)]
)
def test_each_shard_of_an_engine_has_its_heads_and_units(heads, kv_heads, shards):
    sizes = {"heads": heads, "kv_heads": kv_heads}
    config = config_of("llama", **sizes)
    files = files_of("llama", **sizes)
    trainer = maps.stacked(config)
    served = maps.engine(config, shards=shards)
    trained = maps.hugging_face(config).to(trainer).apply(files)
    there = trainer.to(served)
    weights = there.apply(trained)
    text = "model.layers.0.self_attn."
    mlp = "model.layers.0.mlp."
    query, key, value = (
        files[f"{text}{projection}_proj.weight"].reshape(-1, 8, 32)
        for projection in "qkv"
    )
    # Fewer key heads than shards are there more than once.
    key, value = (
        np.repeat(projection, max(1, shards // kv_heads), axis=0)
        for projection in (key, value)
    )
    parts = [
        projection
        for shard in zip(
            *[np.split(each, shards) for each in (query, key, value)], strict=True
        )
        for projection in shard
    ]
    assert (
        weights[f"{text}qkv_proj.weight"] == np.concatenate(parts).reshape(-1, 32)
    ).all()
    assert (weights[f"{text}o_proj.weight"] == files[f"{text}o_proj.weight"]).all()
    gate_up = [
        np.stack(np.split(files[f"{mlp}{projection}_proj.weight"], shards))
        for projection in ("gate", "up")
    ]
    assert (
        weights[f"{mlp}gate_up_proj.weight"]
        == np.concatenate(gate_up, axis=1).reshape(-1, 32)
    ).all()
    equal(served.to(trainer).apply(weights), trained)
    equal(there.inverse().apply(weights, like=trained), trained)
    equal(maps.hugging_face(config).to(served).apply(files), weights)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "gemma2", "gpt2", "qwen2", "bert"]
)
def test_engines_of_other_families(family):
    config = config_of(family)
    files = files_of(family)
    theirs = maps.hugging_face(config)
    served = maps.engine(config, shards=2)
    weights = theirs.to(served).apply(files)
    if family == "qwen3_moe":
        both = weights["model.layers.1.mlp.experts.w13_weight"]
        gate, up = (
            files[f"model.layers.1.mlp.experts.3.{projection}_proj.weight"]
            for projection in ("gate", "up")
        )
        assert (
            both[3] == np.concatenate([gate[:12], up[:12], gate[12:], up[12:]])
        ).all()
        assert (
            weights["model.layers.1.mlp.experts.w2_weight"][3]
            == files["model.layers.1.mlp.experts.3.down_proj.weight"]
        ).all()
    if family == "gpt2":
        query, key, value = np.split(files["h.2.attn.c_attn.weight"], 3, axis=1)
        by_hand = [
            projection[:, half].T
            for half in (slice(16), slice(16, 32))
            for projection in (query, key, value)
        ]
        assert (
            weights["transformer.h.2.attn.c_attn.weight"] == np.concatenate(by_hand)
        ).all()
        for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            assert (
                weights[f"transformer.h.1.{name}.weight"]
                == files[f"h.1.{name}.weight"].T
            ).all()
    if family == "bert":
        query, key = (
            files[f"encoder.layer.0.attention.self.{projection}.weight"]
            for projection in ("query", "key")
        )
        fused = weights["encoder.layer.0.attention.self.qkv_proj.weight"]
        half = len(query) // 2
        assert (fused[: 2 * half] == np.concatenate([query[:half], key[:half]])).all()
    if family == "deepseek_v3":
        both = [
            files[f"model.layers.1.self_attn.{projection}.weight"]
            for projection in ("q_a_proj", "kv_a_proj_with_mqa")
        ]
        assert (
            weights["model.layers.1.self_attn.fused_qkv_a_proj.weight"]
            == np.concatenate(both)
        ).all()
        assert not [
            path
            for path in weights
            if "q_a_proj" in path.replace("fused_qkv_a_proj", "")
        ]
    if family == "qwen2":
        query, key = (
            files[f"model.layers.0.self_attn.{projection}_proj.bias"]
            for projection in "qk"
        )
        assert (
            weights["model.layers.0.self_attn.qkv_proj.bias"][:24]
            == np.concatenate([query[:16], key[:8]])
        ).all()
    equal(served.to(theirs).apply(weights), files)
    stacked = maps.stacked(config)
    equal(stacked.to(served).apply(theirs.to(stacked).apply(files)), weights)


@pytest.mark.parametrize("block", [128, 10])
def test_deepseeks_blocks_and_the_layer_that_predicts_ahead(block):
    """Blocks of 10 leave a part at every edge, and the layer after the last has the
    names of one more.
    """
    config = config_of("deepseek_v3") | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [block, block],
        },
        "num_nextn_predict_layers": 1,
    }
    files = in_blocks(files_of("deepseek_v3", np.float32), block)
    ahead = {
        path.replace(".4.", ".5."): file
        for path, file in files.items()
        if path.startswith("model.layers.4.")
    }
    files |= ahead | {
        "model.layers.5.eh_proj.weight": np.ones((64, 128)),
        "model.layers.5.enorm.weight": np.ones(64),
    }
    with pytest.raises(
        MapError, match="has 1 layer.*behind the last that predict ahead.*ahead='drop'"
    ):
        maps.hugging_face(config)
    theirs = maps.hugging_face(config, ahead="drop")
    mine = maps.stacked(config)
    there = theirs.to(mine)
    tree = there.apply(files)
    whole = unscaled(
        {path: file for path, file in files.items() if ".5." not in path}, block
    )
    equal(tree, stacked_by_hand("deepseek_v3", whole))
    with pytest.raises(
        MapError,
        match=(
            r"which a map cannot find; write it as bfloat16: with `\{\*\*config,"
            r" 'quantiz"
        ),
    ):
        mine.to(theirs)
    with pytest.raises(
        MapError,
        match="the map scales it, and an inverse would have to find the scales",
    ):
        there.inverse().apply(tree, like=files)
    plain = maps.hugging_face({**config, "quantization_config": None}, ahead="drop")
    equal(mine.to(plain).apply(tree), whole)
    # A file with one layer less is missed at once, and not taken for a smaller model.
    fewer = {path: file for path, file in files.items() if ".4." not in path}
    with pytest.raises(MapError, match=r"the source has no `model.layers.4.self_attn"):
        there.apply(fewer)
    with pytest.raises(
        MapError, match="weights of the `quant_method` 'awq' without blocks"
    ):
        maps.hugging_face(
            config | {"quantization_config": {"quant_method": "awq"}}, ahead="drop"
        )


def test_a_bert_with_and_without_its_pooler():
    config = config_of("bert")
    files = files_of("bert")
    theirs = maps.hugging_face(config)
    mine = maps.stacked(config)
    assert (
        theirs.to(mine).apply(files)["pooler/weight"] == files["pooler.dense.weight"].T
    ).all()
    without = {path: layout for path, layout in files.items() if "pooler" not in path}
    with pytest.raises(MapError, match="the source has no `pooler.dense.weight`"):
        theirs.to(mine).apply(without)
    theirs, mine = (
        layout.without("pooler", "pooler_bias") for layout in (theirs, mine)
    )
    tree = theirs.to(mine).apply(without)
    assert "pooler/weight" not in tree
    equal(theirs.to(mine).apply(files), tree)
    equal(mine.to(theirs).apply(tree), without)
    assert "pooler.dense.bias" in str(theirs)
    assert "(not used)" in str(theirs)


def test_a_checkpoint_with_a_prefix_and_unused_arrays():
    config = config_of("gpt2")
    files = files_of("gpt2")
    prefixed = {f"transformer.{path}": file for path, file in files.items()}
    prefixed |= {
        "lm_head.weight": files["wte.weight"],
        "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16)),
    }
    mine = maps.stacked(config)
    there = maps.hugging_face(config, prefix="transformer.").to(mine)
    equal(there.apply(prefixed), maps.hugging_face(config).to(mine).apply(files))


def test_output_weights_that_are_the_embedding():
    config = config_of("qwen3")
    files = files_of("qwen3")
    untied = config | {"tie_word_embeddings": False}
    tree = maps.hugging_face(config).to(maps.stacked(untied)).apply(files)
    assert (tree["head"] == files["model.embed_tokens.weight"].T).all()
    with pytest.raises(
        MapError,
        match=r"the target has no `head` \(head\); without it: `drop=\['head'\]`",
    ):
        maps.stacked(untied).to(maps.hugging_face(config))
    equal(
        maps.stacked(untied).to(maps.hugging_face(config), drop="head").apply(tree),
        files,
    )


def test_a_line_of_a_map_is_changed():
    config = config_of("llama")
    files = files_of("llama")
    rule_set = maps.hugging_face(config).to(maps.stacked(config))
    other = TreeMap(
        {**rule_set.rules, "head": From("model.embed_tokens.weight").T},
        drop=[*rule_set.drop, "lm_head.weight"],
    )
    tree = other.apply(files)
    assert (tree["head"] == files["model.embed_tokens.weight"].T).all()
    assert "head                        <- From('model.embed_tokens.weight').T" in str(
        other
    )
    for odd, words in (
        (rule_set.inverse(), "is inverted"),
        (rule_set.then(rule_set), "is 2 maps, one after the other"),
    ):
        with pytest.raises(
            MapError, match=f"this map {words}, and has no rules of its own"
        ):
            _ = odd.rules


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
    assert dict(halves.with_paths({"first": "one"}).weights) == {
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


# Sizes that the configuration tells


SIZES = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def weights_of_config(config):
    """The arrays of a model in the layout of Hugging Face."""
    embed = config["hidden_size"]
    hidden = config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"embed_tokens": (config["vocab_size"], embed), "norm": (embed,)}
    for i in range(config["num_hidden_layers"]):
        text = f"layers.{i}"
        for name, sizes in (
            ("self_attn.q_proj", (heads, embed)),
            ("self_attn.k_proj", (keys, embed)),
            ("self_attn.v_proj", (keys, embed)),
            ("self_attn.o_proj", (embed, heads)),
            ("mlp.gate_proj", (hidden, embed)),
            ("mlp.up_proj", (hidden, embed)),
            ("mlp.down_proj", (embed, hidden)),
            ("input_layernorm", (embed,)),
            ("post_attention_layernorm", (embed,)),
        ):
            shapes[f"{text}.{name}"] = sizes
    rng = np.random.default_rng(0)
    return {
        f"model.{name}.weight": rng.normal(size=sizes).astype(np.float32)
        for name, sizes in shapes.items()
    }


CHANGES = {
    "vocab_size": ({"vocab_size": 64}, r"layout\.with_sizes\(vocab=64\)"),
    "layers": ({"num_hidden_layers": 3}, r"with_sizes\(layers=3\)"),
    "fewer layers": ({"num_hidden_layers": 1}, r"with_sizes\(layers=1\)"),
    "hidden": ({"intermediate_size": 64}, r"with_sizes\(hidden=64\)"),
    "embed": ({"hidden_size": 40}, r"with_sizes\(embed=40\)"),
    "heads": ({"num_attention_heads": 8}, "by the sizes of its layout"),
    "split": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        "by the sizes of its layout",
    ),
    "kv heads": ({"num_key_value_heads": 4}, "by the sizes of its layout"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", [maps.maxtext, maps.stacked])
def test_an_export_has_the_sizes_of_its_configuration(tmp_path, layout, change):
    changes, text = CHANGES[change]
    trained = SIZES | changes
    theirs = maps.hugging_face(trained)
    mine = layout(trained)
    tree = theirs.to(mine).apply(weights_of_config(trained))
    checkpoint.save(tmp_path / "right", tree, map=mine.to(theirs))
    wrong = layout(SIZES).to(maps.hugging_face(SIZES))
    if layout is maps.stacked and change == "split":
        # One dimension holds the heads: only their product is there to see.
        checkpoint.save(tmp_path / "same", tree, map=wrong)
        return
    for where in (wrong, TreeMap.from_json(wrong.to_json())):
        for use in (
            lambda where=where: checkpoint.save(tmp_path / "wrong", tree, map=where),
            lambda where=where: where.apply(tree),
        ):
            with pytest.raises(MapError, match="by the sizes of its layout|its layout"):
                use()
    with pytest.raises(MapError, match=text):
        wrong.apply(tree)
    assert not (tmp_path / "wrong").exists()
    back = maps.hugging_face(SIZES).to(layout(SIZES)).inverse()
    with pytest.raises(MapError, match="its layout|has shape"):
        back.apply(tree, weights_of_config(SIZES))


OTHER_SPLIT = CHANGES["split"][0]
HEADS = {
    "stacked": maps.stacked,
    "maxtext": maps.maxtext,
    "engine": lambda config: maps.engine(config, shards=1),
    "hugging_face": maps.hugging_face,
}


@pytest.mark.parametrize("source", HEADS)
@pytest.mark.parametrize("target", HEADS)
def test_layouts_with_other_heads_of_one_width_are_refused(source, target):
    for config, other in ((SIZES, SIZES | OTHER_SPLIT), (SIZES | OTHER_SPLIT, SIZES)):
        with pytest.raises(
            MapError, match=r"split one width in two ways, heads=[42], d"
        ):
            HEADS[source](config).to(HEADS[target](other))
    fused = {"model_type": "phi3"}
    if "maxtext" not in (source, target):
        with pytest.raises(
            MapError, match="two ways, heads=4, dim=8 and heads=2, dim=16"
        ):
            layout = HEADS[target](SIZES | OTHER_SPLIT | fused)
            HEADS[source](SIZES | fused).to(layout)


@pytest.mark.parametrize(
    "family, number, paths",
    [
        ("mixtral", "intermediate_size", "expert_hidden"),
        ("qwen3_moe", "moe_intermediate_size", "expert_hidden"),
        ("deepseek_v3", "moe_intermediate_size", "expert_hidden"),
        ("glm4_moe", "moe_intermediate_size", "expert_hidden"),
        ("glm4_moe", "intermediate_size", "hidden"),
        ("glm4_moe", "n_shared_experts", "shared_hidden"),
    ],
)
def test_experts_have_the_width_of_their_configuration(family, number, paths):
    width = {"intermediate_size": 48, "moe_intermediate_size": 24}
    if family in ("mixtral", "deepseek_v3"):
        width["intermediate_size"] = MODELS[family][1]["hidden"]
    shared = {"n_shared_experts": 1} if family == "glm4_moe" else {}
    if family == "mixtral":
        width = {"intermediate_size": 48}
    config = config_of(family) | width | shared
    files = files_of(family)
    tree = maps.hugging_face(config).to(maps.stacked(config)).apply(files)
    equal(tree, stacked_by_hand(family, files))
    other = config | {number: config[number] + 1}
    with pytest.raises(MapError, match=rf"layout\.with_sizes\({paths}="):
        maps.hugging_face(other).to(maps.stacked(other)).apply(files)
    with pytest.raises(MapError, match=rf"layout\.with_sizes\({paths}="):
        maps.stacked(other).to(maps.hugging_face(other)).apply(tree)


def test_a_padded_vocabulary_is_cut_off_where_it_is_said(tmp_path):
    trained = SIZES | {"vocab_size": 64}
    theirs = maps.hugging_face(SIZES)
    padded = maps.maxtext(SIZES).with_sizes(vocab=64)
    weights = weights_of_config(trained)
    tree = maps.hugging_face(trained).to(maps.maxtext(trained)).apply(weights)
    checkpoint.save(tmp_path / "x", tree, map=padded.to(theirs))
    saved = checkpoint.read_index(tmp_path / "x")["model.embed_tokens.weight"]
    assert saved.shape == (60, 32)
