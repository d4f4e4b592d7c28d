import ast
import itertools
import math
import re
from typing import Any, cast

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _sources import folder_of
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, lint, match, plan
from shardfx.errors import RuleError, UnmatchedError
from shardfx.presets import models


# One of each family, the smallest, for what every family must do but not every size.
SMALL = (
    "bert-base deepseek-v2-lite gemma-2b gemma2-2b gemma3-270m gemma3-4b gpt-oss-20b"
    " gpt2 gpt3-6.7b llama2-7b llama3.2-1b llama4-maverick mistral-7b mixtral-8x7b"
    " qwen2.5-0.5b qwen3-0.6b qwen3-30b-a3b qwen3-next-80b-a3b starcoder2-3b"
    " t5.1.1-small vit-s-16 olmo2-7b phi3-mini glm4.5-air gemma3n-e2b"
).split()
MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 2, "fsdp": 8},
    "tp": {"tensor": 2},
    "fsdp_tp": {"data": 2, "fsdp": 8, "tensor": 2},
    "ep": {"expert": 8, "fsdp": 4, "tensor": 2},
}
PAIRS = []
for name in SMALL:
    PAIRS += [(name, how) for how in models.strategies(name)]


def few_layers(name, stack_experts=False):
    """The model with the fewest layers that have one of every kind."""
    if "deepseek" in name:
        layers = 3
    elif "next" in name:
        layers = 4
    else:
        layers = 2
    return models.tree(name, layers=layers, stack_experts=stack_experts)


def test_every_model_has_a_total_and_every_total_a_source():
    actual = sorted([*catalogue.PUBLISHED, *catalogue.MILLIONS, *catalogue.WITH_CLASS])
    assert actual == sorted(models.names())
    for name, millions in catalogue.ROUNDED.items():
        expected = pytest.approx(millions, rel=0.001)
        assert catalogue.PUBLISHED[name] / 1e6 == expected


def test_totals_are_those_of_keras_hub():
    stated: dict[str, int] = {}
    for file in folder_of("keras_hub").glob("src/models/*/*_presets.py"):
        text = file.read_text()
        stated |= {name: int(total) for name, total in re.findall(_PRESET, text)}
    for name, preset in catalogue.KERAS_HUB.items():
        assert stated[preset] == catalogue.PUBLISHED[name], name


# A preset's name, and the first total after it.
_PRESET = re.compile(
    r'^    "([\w.]+)": \{(?:(?!^    "[\w.]+": \{).)*?"params": ([\d_]+)',
    re.MULTILINE | re.DOTALL,
)
# In which of transformers' models the names of a tree are, for one name of each family;
# and the checkpoint's own names that transformers changes while it loads: of Mixtral's
# experts, and of the layer of Qwen3-Next that predicts ahead.
SOURCES = {
    **{
        "bert-base": "bert",
        "deepseek-v2": "deepseek_v2",
        "deepseek-v3": "deepseek_v3",
        "gemma-2b": "gemma",
    },
    **{
        "gemma2-2b": "gemma2",
        "gemma3-1b": "gemma3",
        "gemma3-4b": "gemma3 siglip",
        "gpt2": "gpt2",
    },
    **{
        "gpt-oss-20b": "gpt_oss",
        "llama3-8b": "llama",
        "llama4-maverick": "llama4",
        "mistral-7b": "mistral",
    },
    **{
        "mixtral-8x7b": "mixtral",
        "qwen2.5-7b": "qwen2",
        "qwen3-8b": "qwen3",
        "qwen3-30b-a3b": "qwen3_moe",
    },
    **{
        "qwen3-next-80b-a3b": "qwen3_next",
        "starcoder2-3b": "starcoder2",
        "t5.1.1-small": "t5",
    },
    **{
        "olmo2-7b": "olmo2",
        "phi4": "phi3",
        "glm4.5": "glm4_moe",
        "gemma3n-e2b": "gemma3n",
    },
}
RENAMED = {
    "mixtral-8x7b": {"block_sparse_moe", "w1", "w2", "w3"},
    "qwen3-next-80b-a3b": {"mtp", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_names_are_those_of_transformers(name):
    folder = folder_of("transformers") / "models"
    targets = []
    for model in SOURCES[name].split():
        tree = ast.parse((folder / model / f"modeling_{model}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                targets += node.targets
    attributes = {to.attr for to in targets if isinstance(to, ast.Attribute)}
    words = set()
    for path, _ in catalogue.paths_of(models.tree(name, layers=4)):
        words.update(word for word in path.split("/") if not word.isdigit())
    words -= {"weight", "bias"}
    assert words - attributes == RENAMED.get(name, set())


def test_experts_of_mixtral_are_named_as_transformers_reads_them():
    text = (folder_of("transformers") / "conversion_mapping.py").read_text()
    assert re.search(r"block_sparse_moe", text)
    assert re.search(r"\.w1\.weight", text)


@pytest.mark.parametrize("name", models.names())
def test_each_model_has_as_many_parameters_as_were_published(name):
    leaves = jax.tree.leaves(models.tree(name))
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    if name in catalogue.PUBLISHED:
        assert total == catalogue.PUBLISHED[name]
    elif name in catalogue.WITH_CLASS:
        heads = models.config(name)["heads"]
        embed = heads * models.config(name)["head_dim"]
        actual = total + 2 * embed + (embed + 1) * 1000
        assert actual == catalogue.WITH_CLASS[name]
    else:
        expected = pytest.approx(catalogue.MILLIONS[name], rel=0.001, abs=0.1)
        assert total / 1e6 == expected
    assert len(set(map(id, leaves))) == len(leaves)
    limit = {
        jnp.dtype("bfloat16"),
        jnp.dtype("float32"),
    }
    assert {leaf.dtype for leaf in leaves} <= limit


@pytest.mark.parametrize("name", SMALL)
def test_every_number_of_a_config_changes_the_tree(name):
    published = models.config(name)
    for number, value in published.items():
        if number == "dense_layers" or isinstance(value, bool):
            continue
        small: dict[str, Any] = (
            dict(published)
            | {"layers": 4}
            | ({"experts": 2} if "experts" in published else {})
        )
        assert models.tree(name, **small) != models.tree(
            name, **small | {number: small[number] + 1}
        ), number


@pytest.mark.parametrize("name, how", PAIRS)
def test_rules_plan_every_model_and_cut_all_that_can_be_cut(name, how):
    tree = few_layers(name, stack_experts=how == "ep")
    mesh = MeshSpec(MESHES[how])
    rules = models.rules_for(name, how)
    sharding_plan = plan(tree, mesh, paths=rules)
    reasons = itertools.chain.from_iterable(row.reasons for row in sharding_plan.leaves)
    codes = {reason.code.name for reason in reasons}
    # GPT's odd vocabulary, and the one kv head of small Gemmas.
    assert codes <= {"unit", "indivisible"}
    ways = math.prod(size for axis, size in MESHES[how].items() if axis != "data")
    # No tensor axis divides what is in no matrix product: norms, and the positions of
    # ViT.
    assert (
        codes
        or sharding_plan.bytes_per_device
        <= (1.15 if "tensor" in MESHES[how] else 1.03)
        * sharding_plan.bytes_total
        / ways
    )
    assert how != "dp" or sharding_plan.bytes_per_device == sharding_plan.bytes_total
    # A rule applies, or it is for a sibling in the family: then its regex finds no path
    # of this tree at all.
    used = set(jax.tree.leaves(match(tree, rules)))
    paths = [path for path, _ in catalogue.paths_of(tree)]
    unused = [
        regex for index, (regex, _) in enumerate(rules.rules) if index not in used
    ]
    regexes = [
        regex for regex in unused if any(re.search(regex, path) for path in paths)
    ]
    assert regexes == []
    # A check finds nothing but what cannot be cut. Without fsdp, some arrays are whole
    # by design.
    if "fsdp" in MESHES[how]:
        replicated_bytes = 2**24
    else:
        replicated_bytes = 2**40
    findings = lint(
        tree,
        mesh,
        paths=rules,
        replicated_bytes=replicated_bytes,
    )
    limit = {"corrected"} if codes else set()
    assert {reason.code for reason in findings} <= limit, findings


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"]
)
@pytest.mark.parametrize("how", ["fsdp", "fsdp_tp", "ep"])
def test_stacked_experts_are_cut_as_each_expert_would_be(name, how):
    tree = few_layers(name, stack_experts=True)
    single = few_layers(name)
    assert catalogue.parameters(single) == catalogue.parameters(tree)
    sharding_plan = plan(tree, MeshSpec(MESHES[how]), paths=models.rules_for(name, how))
    stacked = [
        row
        for row in sharding_plan.leaves
        if "/experts/" in row.path and len(row.shape) == 3
    ]
    assert stacked
    for row in stacked:
        assert row.spec[0] == ("expert" if how == "ep" else None)
    if how == "fsdp_tp" and "gpt-oss" not in name:
        apart = plan(single, MeshSpec(MESHES[how]), paths=models.rules_for(name, how))
        for row in stacked:
            expected = apart[row.path.replace("/experts/", "/experts/0/")].spec
            assert P(*row.spec[1:]) == expected


def test_rules_for_experts_need_experts_in_one_array():
    mesh = MeshSpec({"expert": 8})
    rules = models.rules_for("mixtral-8x7b", "ep")
    with pytest.raises(
        (RuleError, UnmatchedError),
        match=r"'\(experts\.w1\|experts\.w3\)\.weight\$', matches no path",
    ):
        plan(few_layers("mixtral-8x7b"), mesh, paths=rules)


def test_heads_are_not_cut():
    rules = models.rules_for("llama3-8b", "tp")
    mesh = MeshSpec({"tensor": 16})
    sharding_plan = plan(
        models.tree("llama3-8b"),
        mesh,
        paths=rules,
    )
    assert sharding_plan["model/layers/0/self_attn/q_proj/weight"].spec == P("tensor")
    assert sharding_plan["model/layers/0/self_attn/k_proj/weight"].spec == P()
    mesh_spec = MeshSpec({"tensor": 32})
    gated = plan(
        few_layers("qwen3-next-80b-a3b"),
        mesh_spec,
        paths=models.rules_for("qwen3-next-80b-a3b", "tp"),
    )
    assert gated["model/layers/0/linear_attn/in_proj_qkvz/weight"].spec == P()
    eyes = plan(
        few_layers("gemma3-4b"),
        MeshSpec({"tensor": 16}),
        paths=models.rules_for("gemma3-4b", "tp"),
    )
    layer = "vision_tower/vision_model/encoder/layers/0/self_attn"
    assert (
        eyes[f"{layer}/q_proj/weight"].spec
        == P("tensor")
        == eyes[f"{layer}/q_proj/bias"].spec
    )


def test_dtype_and_changes():
    tree = models.tree("deepseek-v3", layers=4, dtype=jnp.float8_e4m3fn)
    dtypes = {path: struct.dtype for path, struct in catalogue.paths_of(tree)}
    assert dtypes["model/layers/3/mlp/gate/e_score_correction_bias"] == jnp.float32
    assert dtypes["model/layers/3/mlp/gate/weight"] == jnp.float8_e4m3fn
    assert sorted(tree["model"]["layers"]) == list("0123")
    config = models.config("llama3-8b")
    config["layers"] = 1
    assert models.config("llama3-8b")["layers"] == 32


MISTAKES = {
    "a name": (
        lambda: models.tree("llama3-405"),
        r"no 'llama3-405' \(did you mean 'llama3-405b'",
    ),
    "nothing near": (
        lambda: models.config("\x1b[2J"),
        r"no '\\x1b\[2J'; there are llama2-7b,",
    ),
    "a number": (
        lambda: models.tree("gpt2", layer=2),
        r"`gpt2` has no number 'layer' \(did you mean 'layers'\?",
    ),
    "no number near": (
        lambda: models.tree("gpt2", zzz=2),
        r"'zzz'; it has heads, head_dim, layers,",
    ),
    "a text": (
        lambda: models.tree("gpt2", layers=cast(int, "2")),
        r"`gpt2`: `layers='2'` is no whole number",
    ),
    "a bool": (
        lambda: models.tree("gpt2", layers=True),
        r"`layers=True` is no whole number",
    ),
    "no heads": (
        lambda: models.tree("llama3-8b", heads=0),
        "`heads=0` is too small; the published number is 32, and the smallest is 1",
    ),
    "fewer layers than none": (
        lambda: models.tree("gpt2", layers=-1),
        "`layers=-1` is too small; the published number is 12, and the smallest is 0",
    ),
    "no name": (lambda: models.tree(cast(str, 3)), "`presets.models` has no '3'"),
    "no bool": (lambda: models.tree("llama3-8b", tied=1), r"`tied=1` is no bool"),
    "a strategy": (
        lambda: models.rules_for("gpt2", "tpu"),
        r"`gpt2` has no rules 'tpu'; there are dp, fsdp, tp",
    ),
}


def test_a_number_may_be_of_numpy_and_layers_may_be_none():
    expected = models.tree("gpt2", layers=2)
    assert models.tree("gpt2", layers=cast(int, np.int64(2))) == expected
    assert "h" not in models.tree("gpt2", layers=0)


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_what_there_is(case):
    call, message = MISTAKES[case]
    with pytest.raises(RuleError, match=message):
        call()
