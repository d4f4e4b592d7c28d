import numpy as np
import pytest
from small_models import (
    MODELS,
    config_of,
    equal,
    files_of,
    stacked_by_hand,
)

from shardfx import TreeMap, checkpoint
from shardfx.errors import MapError
from shardfx.presets import maps


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
    if family == "glm4_moe":
        shared = {"n_shared_experts": 1}
    else:
        shared = {}
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
