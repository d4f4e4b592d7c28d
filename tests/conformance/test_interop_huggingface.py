import ast
import json
from pathlib import Path

import pytest
from _sources import folder_of
from jax.sharding import PartitionSpec as P

from shardfx import (
    Code,
    MeshSpec,
    plan,
)
from shardfx.errors import RuleError
from shardfx.interop import huggingface
from tests.conformance.rule_set_mesh import specs_of, struct


DATA = json.loads(
    Path(__file__).parents[1].joinpath("data", "huggingface_plans.json").read_text()
)


@pytest.fixture(scope="module")
def classes():
    """The plans in the sources of all configurations, of which nothing but these lines
    is run.
    """
    files = sorted(folder_of("transformers").glob("models/*/configuration_*.py"))
    plans_by_class = {}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                values = plan_values(file, node)
                tensor = values.get("base_model_tp_plan") or {}
                expert = values.get("base_model_ep_plan") or {}
                if tensor or expert:
                    plans = huggingface.Plans(tensor=tensor, expert=expert, head={})
                    plans_by_class[file.stem, node.name] = plans
    return plans_by_class


def plan_values(file, node):
    """The values that a class assigns to names of plans."""
    values = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            name = ast.unparse(statement.targets[0])
            if "_plan" in name:
                code = compile(ast.Expression(statement.value), str(file), "eval")
                values[name] = eval(code)
    return values


# Hugging Face


def test_every_class_of_transformers_converts(classes):
    assert len(classes) >= 145
    styles = set()
    for plans in classes.values():
        for part in plans:
            styles.update(part.values())
    assert len(styles) >= 15
    assert styles <= huggingface.STYLES.keys()
    for plans in classes.values():
        both = huggingface.rules_of(plans, expert="expert")
        keys = {rule[1].target.key for rule in both.rules[:-1]}
        if plans.tensor:
            implied = {"embed_tokens"}
        else:
            implied = set()
        expected = plans.tensor.keys() | plans.expert.keys() | implied
        assert keys == expected
        assert hash(both) == hash(huggingface.rules_of(plans, expert="expert"))


@pytest.mark.parametrize("name", DATA)
def test_plans_of_real_architectures(classes, name):
    (plans,) = [plans for (_, owner), plans in classes.items() if owner == name]
    tree = {path: struct(shape) for path, (shape, _) in DATA[name].items()}
    prefix = next(iter(tree)).partition(".")[0]
    rules = huggingface.rules_of(plans, expert="expert", prefix=prefix)
    expected = {path: P(*spec) for path, (_, spec) in DATA[name].items()}
    assert specs_of(tree, rules) == expected


PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "embed": "embedding_rowwise",
    "ngram": "embedding_colwise",
    "layers.*.mlp.w": "packed_rowwise",
}


@pytest.mark.parametrize(
    "path, shape, spec",
    [
        ("model/layers/12/self_attn/q_proj/weight", (64, 32), P("tensor")),
        ("layers.12.self_attn.q_proj.bias", (64,), P("tensor")),
        ("model.layers.0.self_attn.o_proj.weight", (32, 64), P(None, "tensor")),
        ("model.layers.0.self_attn.o_proj.bias", (32,), P()),
        ("model.layers.0.mlp.experts.router", (32, 64), P()),
        ("model.embed.weight", (256, 64), P("tensor")),
        ("model.ngram.weight", (256, 64), P(None, "tensor")),
        ("vision.layers.0.self_attn.q_proj.weight", (64, 32), P()),
        ("model.layers.0.self_attn.q_proj.lora.weight", (64, 32), P()),
    ],
)
def test_what_styles_do(path, shape, spec):
    specs = specs_of({path: struct(shape)}, huggingface.rules_of(PLAN))[path]
    assert specs == spec


@pytest.mark.parametrize("joint", "./")
def test_a_prefix_of_parts_is_joined_as_paths_are(joint):
    rules = huggingface.rules_of(
        {"layers.*.q": "colwise"}, prefix="model.language_model"
    )
    path = joint.join(["model", "language_model", "layers", "0", "q", "weight"])
    assert specs_of({path: struct((64, 32))}, rules)[path] == P("tensor")


def test_parts_of_packed_weights_and_heads_stay_whole():
    tree = {
        "layers.0.mlp.experts.gate_up_proj": struct((8, 256, 64)),
        "layers.0.mlp.w.weight": struct((64, 256)),
    }
    tree |= {"layers.0.self_attn.q_proj.weight": struct((64, 32))}
    rules = huggingface.rules_of(PLAN, units={"q_proj": 32})
    two, four = (plan(tree, MeshSpec({"tensor": size}), paths=rules) for size in (2, 4))
    expected = [
        P(None, "tensor"),
        P(None, "tensor"),
        P("tensor"),
    ]
    assert [leaf.spec for leaf in two.leaves] == expected
    for leaf in four.leaves:
        assert leaf.spec == P()
        assert [why.code for why in leaf.reasons] == [Code.unit]
    refined = plan(tree, MeshSpec({"tensor": 4}), paths=rules, refine=True)
    assert refined.leaves[0].spec == P(None, "tensor_0")


# Styles of transformers' main branch, with an array that each shards.
NEW_STYLES = [
    ("colwise_allgather", (64, 32), P("tensor")),
    ("colwise_loss_parallel", (64, 32), P("tensor")),
    ("rowwise_allreduce", (32, 64), P(None, "tensor")),
    ("rowwise_reduce_scatter", (32, 64), P(None, "tensor")),
    ("vocab_allreduce", (64, 32), P("tensor")),
    ("vocab_reduce_scatter", (64, 32), P("tensor")),
    ("moe_tp_gate_up_colwise", (8, 64, 32), P(None, "tensor")),
    ("moe_tp_down_rowwise", (8, 32, 64), P(None, None, "tensor")),
    ("moe_experts_allreduce", (64, 32), P()),
    ("ep_router", (64, 32), P()),
    ("activation", (64,), P()),
    ("activation_seq_dim_2", (64,), P()),
    ("module_allgather", (64, 32), P()),
    ("module_allgather_hidden_states", (64, 32), P()),
    ("module_allgather_split", (64, 32), P()),
]


@pytest.mark.parametrize("style, shape, spec", NEW_STYLES)
def test_styles_of_the_main_branch(style, shape, spec):
    rules = huggingface.rules_of({"layers.*.w": style})
    mesh = MeshSpec({"tensor": 2})
    specs = specs_of({"model.layers.3.w": struct(shape)}, rules, mesh)
    assert specs == {"model.layers.3.w": spec}


def test_the_plan_of_experts_replaces_what_shards_them_inside():
    inside = {
        "layers.*.mlp.experts.gate_up_proj": "moe_tp_gate_up_colwise",
        "layers.*.mlp.experts.down_proj": "moe_tp_down_rowwise",
    }
    plans = huggingface.Plans(
        tensor=inside,
        expert={"layers.*.mlp.experts.gate_up_proj": "grouped_gemm"},
        head={},
    )
    tree = {
        "layers.0.mlp.experts.gate_up_proj": struct((8, 64, 32)),
        "layers.0.mlp.experts.down_proj": struct((8, 32, 64)),
    }
    mesh = MeshSpec({"expert": 2, "tensor": 2})
    by_expert = specs_of(tree, huggingface.rules_of(plans, expert="expert"), mesh)
    gate_up, down = sorted(tree, reverse=True)
    assert by_expert[gate_up] == P("expert")
    assert by_expert[down] == P()
    by_tensor = specs_of(tree, huggingface.rules_of(plans), mesh)
    assert by_tensor[gate_up] == P(None, "tensor")
    assert by_tensor[down] == P(None, None, "tensor")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_name_of_a_layer_comes_before_that_of_all(is_reversed):
    styles = {
        "layers.*.mlp.up_proj.weight": "colwise",
        "layers.0.mlp.up_proj": "rowwise",
    }
    if is_reversed:
        styles = dict(reversed(styles.items()))
    tree = {f"layers.{n}.mlp.up_proj.weight": struct((64, 32)) for n in (0, 1)}
    specs = specs_of(tree, huggingface.rules_of(styles))
    expected = [P(None, "tensor"), P("tensor")]
    assert [*specs.values()] == expected


def test_embeddings_are_sharded_unless_a_plan_names_them():
    tree = {"model.embed_tokens.weight": struct((256, 64))}
    plans = {"layers.*.self_attn.q_proj": "colwise"}
    specs = specs_of(tree, huggingface.rules_of(plans)).values()
    actual = [*specs]
    assert actual == [P("tensor")]
    for styles in ({"embed_tokens": "replicate", **plans}, {}):
        specs = specs_of(tree, huggingface.rules_of(styles)).values()
        actual = [*specs]
        assert actual == [P()]


class SequenceConfig:
    base_model_sp_plan = {"embed_tokens": "vocab_reduce_scatter"}


def test_plans_for_sequence_parallelism_are_read():
    plans = huggingface.plans_of(SequenceConfig, sequence=True)
    assert plans == huggingface.Plans(
        tensor=SequenceConfig.base_model_sp_plan, expert={}, head={}
    )
    with pytest.raises(RuleError, match="has no `base_model_sp_plan`"):
        huggingface.plans_of(int, sequence=True)


class LlamaConfig:
    base_model_tp_plan = {"layers.*.self_attn.o_proj": "rowwise"}


class LlamaForCausalLM:
    config_class = LlamaConfig
    _tp_plan = {"lm_head": "colwise_gather_output"}


def test_the_plan_of_a_models_class_is_for_its_head():
    tree = {
        "lm_head.weight": struct((256, 64)),
        "model.layers.0.self_attn.o_proj.weight": struct((64, 64)),
    }
    tree |= {"model.norm.weight": struct((64,))}
    plans = huggingface.plans_of(LlamaForCausalLM)
    body = huggingface.Plans(tensor=LlamaConfig.base_model_tp_plan, expert={}, head={})
    assert (
        huggingface.plans_of(LlamaForCausalLM())
        == plans
        == body._replace(head=LlamaForCausalLM._tp_plan)
    )
    assert (
        huggingface.plans_of(LlamaConfig) == huggingface.plans_of(LlamaConfig()) == body
    )
    specs = list(specs_of(tree, huggingface.rules_of(plans)).values())
    expected = [
        P("tensor"),
        P(None, "tensor"),
        P(),
    ]
    assert specs == expected
    with pytest.raises(RuleError, match="has no `base_model_tp_plan`"):
        huggingface.plans_of(int)
    with pytest.raises(
        RuleError, match=r"the style 'colwse' \(did you mean 'colwise' or"
    ):
        huggingface.rules_of({"a": "colwse"})


EXPERTS = huggingface.Plans(
    tensor={
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    expert={
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    },
    head={},
)

ON_DISK = [
    ("mlp", "gate_proj", "up_proj", "down_proj"),
    ("block_sparse_moe", "w1", "w3", "w2"),
]


def test_a_unit_of_a_module_that_the_plan_lacks_is_named():
    message = r"'q_prj' .did you mean 'q_proj' .*, which is no module of the plan"
    with pytest.raises(RuleError, match=message):
        huggingface.rules_of(PLAN, units={"q_prj": 32})


@pytest.mark.parametrize("module, gate, up, down", ON_DISK)
def test_experts_under_their_names_on_disk(module, gate, up, down):
    text = f"model.layers.0.{module}.experts.7"
    tree = {
        f"{text}.{gate}.weight": struct((128, 64)),
        f"{text}.{up}.weight": struct((128, 64)),
        f"{text}.{down}.weight": struct((64, 128)),
    }
    specs = specs_of(tree, huggingface.rules_of(EXPERTS))
    for path, spec in specs.items():
        expected = P(None, "tensor") if down in path else P("tensor")
        assert spec == expected
    with pytest.raises(
        RuleError,
        match=(
            "'grouped_gemm' .* shards the dimension of experts, and .* is one expert;"
        ),
    ):
        specs_of(tree, huggingface.rules_of(EXPERTS, expert="expert"))
    fused = {"model.layers.0.mlp.experts.gate_up_proj": struct((8, 256, 64))}
    actual = specs_of(fused, huggingface.rules_of(EXPERTS, expert="expert"))
    assert actual == {[*fused][0]: P("expert")}
