"""Maps between real layouts: bitwise what NumPy makes of the arrays, there and back."""

import itertools
from typing import Any

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

from shardfx import From, TreeMap
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
    applied = mine.to(theirs).apply(tree, like=array_by_path)
    equal(applied, array_by_path)
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
    applied = theirs.to(mine).inverse().apply(tree, like=files)
    close(applied, files)
    stacked = maps.stacked(config)
    applied = theirs.to(stacked).then(stacked.to(mine)).apply(files)
    equal(applied, tree)


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
    actual = tree[f"params/decoder/{position}/wi_0"][2, 1]
    assert (actual == files[f"model.layers.{first + 1}.{experts}.weight"].T).all()
    if family == "deepseek_v3":
        weight = files["model.layers.4.self_attn.kv_b_proj.weight"].reshape(2, 16, 16)
        expected = weight.transpose(2, 0, 1)
        assert (
            tree["params/decoder/moe_layers/self_attention/wkv_b/kernel"][:, 1]
            == expected
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
    parts = []
    for number in range(shards):
        for projection in (query, key, value):
            parts.append(np.split(projection, shards)[number])
    expected = np.concatenate(parts).reshape(-1, 32)
    assert (weights[f"{text}qkv_proj.weight"] == expected).all()
    assert (weights[f"{text}o_proj.weight"] == files[f"{text}o_proj.weight"]).all()
    gate_up = [
        np.stack(np.split(files[f"{mlp}{projection}_proj.weight"], shards))
        for projection in ("gate", "up")
    ]
    expected = np.concatenate(gate_up, axis=1).reshape(-1, 32)
    assert (weights[f"{mlp}gate_up_proj.weight"] == expected).all()
    equal(served.to(trainer).apply(weights), trained)
    equal(there.inverse().apply(weights, like=trained), trained)
    applied = maps.hugging_face(config).to(served).apply(files)
    equal(applied, weights)


def experts_are_fused(weights, files):
    """Gates and ups in halves, one for each shard."""
    layer = "model.layers.1.mlp.experts"
    gate = files[f"{layer}.3.gate_proj.weight"]
    up = files[f"{layer}.3.up_proj.weight"]
    expected = np.concatenate([gate[:12], up[:12], gate[12:], up[12:]])
    assert (weights[f"{layer}.w13_weight"][3] == expected).all()
    down = files[f"{layer}.3.down_proj.weight"]
    assert (weights[f"{layer}.w2_weight"][3] == down).all()


def convolutions_are_turned(weights, files):
    query, key, value = np.split(files["h.2.attn.c_attn.weight"], 3, axis=1)
    halves = [
        projection[:, half].T
        for half, projection in itertools.product(
            (slice(16), slice(16, 32)), (query, key, value)
        )
    ]
    fused = weights["transformer.h.2.attn.c_attn.weight"]
    assert (fused == np.concatenate(halves)).all()
    for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        turned = files[f"h.1.{name}.weight"].T
        assert (weights[f"transformer.h.1.{name}.weight"] == turned).all()


def attention_is_fused(weights, files):
    layer = "encoder.layer.0.attention.self"
    query = files[f"{layer}.query.weight"]
    key = files[f"{layer}.key.weight"]
    half = len(query) // 2
    expected = np.concatenate([query[:half], key[:half]])
    fused = weights[f"{layer}.qkv_proj.weight"]
    assert (fused[: 2 * half] == expected).all()


def latents_are_fused(weights, files):
    layer = "model.layers.1.self_attn"
    query = files[f"{layer}.q_a_proj.weight"]
    keys_and_values = files[f"{layer}.kv_a_proj_with_mqa.weight"]
    expected = np.concatenate([query, keys_and_values])
    assert (weights[f"{layer}.fused_qkv_a_proj.weight"] == expected).all()
    for path in weights:
        assert "q_a_proj" not in path.replace("fused_qkv_a_proj", "")


def biases_are_fused(weights, files):
    layer = "model.layers.0.self_attn"
    query = files[f"{layer}.q_proj.bias"]
    key = files[f"{layer}.k_proj.bias"]
    expected = np.concatenate([query[:16], key[:8]])
    assert (weights[f"{layer}.qkv_proj.bias"][:24] == expected).all()


@pytest.mark.parametrize(
    ("family", "check"),
    [
        ("qwen3_moe", experts_are_fused),
        ("deepseek_v3", latents_are_fused),
        ("gemma2", None),
        ("gpt2", convolutions_are_turned),
        ("qwen2", biases_are_fused),
        ("bert", attention_is_fused),
    ],
)
def test_engines_of_other_families(family, check):
    config = config_of(family)
    files = files_of(family)
    theirs = maps.hugging_face(config)
    served = maps.engine(config, shards=2)
    weights = theirs.to(served).apply(files)
    if check is not None:
        check(weights, files)
    equal(served.to(theirs).apply(weights), files)
    stacked = maps.stacked(config)
    applied = stacked.to(served).apply(theirs.to(stacked).apply(files))
    equal(applied, weights)


def test_shards_of_an_engine_as_an_integer_of_numpy():
    config = config_of("llama")
    shards: Any = np.int64(2)
    assert maps.engine(config, shards=shards) == maps.engine(config, shards=2)


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
    files_by_path = {path: file for path, file in files.items() if ".5." not in path}
    whole = unscaled(files_by_path, block)
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
    applied = theirs.to(mine).apply(files)["pooler/weight"]
    assert (applied == files["pooler.dense.weight"].T).all()
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
    array = np.ones((1, 1, 16, 16))
    prefixed |= {
        "lm_head.weight": files["wte.weight"],
        "transformer.h.0.attn.bias": array,
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
    applied = (
        maps.stacked(untied).to(maps.hugging_face(config), drop="head").apply(tree)
    )
    equal(
        applied,
        files,
    )


def test_a_line_of_a_map_is_changed():
    config = config_of("llama")
    files = files_of("llama")
    rule_set = maps.hugging_face(config).to(maps.stacked(config))
    rules = {**rule_set.rules, "head": From("model.embed_tokens.weight").T}
    other = TreeMap(
        rules,
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
