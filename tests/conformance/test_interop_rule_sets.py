"""Rule sets of Hugging Face, MaxText, Keras, T5X and Levanter as values, decided as the
libraries decide.
"""

import ast
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from _sources import folder_of
from flax.linen import spmd
from jax.sharding import PartitionSpec as P

from shardfx import (
    Code,
    MeshSpec,
    PathRules,
    follow,
    fsdp,
    plan,
    presets,
    resolve,
)
from shardfx._ground.spec import canonical
from shardfx.errors import RuleError, UnmatchedError
from shardfx.interop import haliax, huggingface, keras, levanter, maxtext, t5x


DATA = json.loads(
    Path(__file__).parents[1].joinpath("data", "huggingface_plans.json").read_text()
)
MESH = MeshSpec({"expert": 2, "tensor": 4})


@pytest.fixture(scope="module")
def classes():
    """The plans in the sources of all configurations, of which nothing but these lines
    is run.
    """
    files = sorted(folder_of("transformers").glob("models/*/configuration_*.py"))
    nodes = [
        (file, node) for file in files for node in ast.parse(file.read_text()).body
    ]
    class_by_name = {}
    for file, node in nodes:
        if isinstance(node, ast.ClassDef):
            eval_by_unparse = {
                ast.unparse(statement.targets[0]): eval(
                    compile(ast.Expression(statement.value), str(file), "eval")
                )
                for statement in node.body
                if isinstance(statement, ast.Assign)
                and "_plan" in ast.unparse(statement.targets[0])
            }
            tensor, expert = (
                eval_by_unparse.get(f"base_model_{kind}_plan") or {}
                for kind in ("tp", "ep")
            )
            if tensor or expert:
                class_by_name[file.stem, node.name] = huggingface.Plans(
                    tensor, expert, {}
                )
    return class_by_name


def struct(shape):
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def specs_of(tree, rules, mesh=MESH):
    return {leaf.path: leaf.spec for leaf in plan(tree, mesh, paths=rules).leaves}


# Hugging Face


def test_every_class_of_transformers_converts(classes):
    assert len(classes) >= 145
    styles = {
        style for plans in classes.values() for part in plans for style in part.values()
    }
    assert len(styles) >= 15
    assert styles <= huggingface.STYLES.keys()
    for plans in classes.values():
        both = huggingface.rules_of(plans, expert="expert")
        keys = {rule[1].target.key for rule in both.rules[:-1]}
        implied = {"embed_tokens"} if plans.tensor else set()
        assert keys == plans.tensor.keys() | plans.expert.keys() | implied
        assert hash(both) == hash(huggingface.rules_of(plans, expert="expert"))


@pytest.mark.parametrize("name", DATA)
def test_plans_of_real_architectures(classes, name):
    (plans,) = [plans for (_, owner), plans in classes.items() if owner == name]
    tree = {path: struct(shape) for path, (shape, _) in DATA[name].items()}
    rules = huggingface.rules_of(
        plans, expert="expert", prefix=next(iter(tree)).partition(".")[0]
    )
    assert specs_of(tree, rules) == {
        path: P(*spec) for path, (_, spec) in DATA[name].items()
    }


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
    assert specs_of({path: struct(shape)}, huggingface.rules_of(PLAN))[path] == spec


def test_parts_of_packed_weights_and_heads_stay_whole():
    tree = {
        "layers.0.mlp.experts.gate_up_proj": struct((8, 256, 64)),
        "layers.0.mlp.w.weight": struct((64, 256)),
    }
    tree |= {"layers.0.self_attn.q_proj.weight": struct((64, 32))}
    rules = huggingface.rules_of(PLAN, units={"q_proj": 32})
    two, four = (plan(tree, MeshSpec({"tensor": size}), paths=rules) for size in (2, 4))
    assert [leaf.spec for leaf in two.leaves] == [
        P(None, "tensor"),
        P(None, "tensor"),
        P("tensor"),
    ]
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
    specs = specs_of(
        {"model.layers.3.w": struct(shape)}, rules, MeshSpec({"tensor": 2})
    )
    assert specs == {"model.layers.3.w": spec}


def test_the_plan_of_experts_replaces_what_shards_them_inside():
    inside = {
        "layers.*.mlp.experts.gate_up_proj": "moe_tp_gate_up_colwise",
        "layers.*.mlp.experts.down_proj": "moe_tp_down_rowwise",
    }
    plans = huggingface.Plans(
        inside, {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}, {}
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
    assert [*specs.values()] == [P(None, "tensor"), P("tensor")]


def test_embeddings_are_sharded_unless_a_plan_names_them():
    tree = {"model.embed_tokens.weight": struct((256, 64))}
    plans = {"layers.*.self_attn.q_proj": "colwise"}
    assert [*specs_of(tree, huggingface.rules_of(plans)).values()] == [P("tensor")]
    for styles in ({"embed_tokens": "replicate", **plans}, {}):
        assert [*specs_of(tree, huggingface.rules_of(styles)).values()] == [P()]


class SequenceConfig:
    base_model_sp_plan = {"embed_tokens": "vocab_reduce_scatter"}


def test_plans_for_sequence_parallelism_are_read():
    plans = huggingface.plans_of(SequenceConfig, sequence=True)
    assert plans == huggingface.Plans(SequenceConfig.base_model_sp_plan, {}, {})
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
    body = huggingface.Plans(LlamaConfig.base_model_tp_plan, {}, {})
    assert (
        huggingface.plans_of(LlamaForCausalLM())
        == plans
        == body._replace(head=LlamaForCausalLM._tp_plan)
    )
    assert (
        huggingface.plans_of(LlamaConfig) == huggingface.plans_of(LlamaConfig()) == body
    )
    assert list(specs_of(tree, huggingface.rules_of(plans)).values()) == [
        P("tensor"),
        P(None, "tensor"),
        P(),
    ]
    with pytest.raises(RuleError, match="has no `base_model_tp_plan`"):
        huggingface.plans_of(int)
    with pytest.raises(
        RuleError, match=r"the style 'colwse' \(did you mean 'colwise' or"
    ):
        huggingface.rules_of({"a": "colwse"})


EXPERTS = huggingface.Plans(
    {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    },
    {},
)


ON_DISK = [
    ("mlp", "gate_proj", "up_proj", "down_proj"),
    ("block_sparse_moe", "w1", "w3", "w2"),
]


@pytest.mark.parametrize("module, gate, up, down", ON_DISK)
def test_experts_under_their_names_on_disk(module, gate, up, down):
    text = f"model.layers.0.{module}.experts.7"
    tree = {
        f"{text}.{name}.weight": struct((64, 128) if name == down else (128, 64))
        for name in (gate, up, down)
    }
    specs = specs_of(tree, huggingface.rules_of(EXPERTS))
    assert list(specs.values()) == [
        P("tensor") if down not in path else P(None, "tensor") for path in specs
    ]
    with pytest.raises(
        RuleError,
        match=(
            "'grouped_gemm' .* shards the dimension of experts, and .* is one expert;"
        ),
    ):
        specs_of(tree, huggingface.rules_of(EXPERTS, expert="expert"))
    fused = {"model.layers.0.mlp.experts.gate_up_proj": struct((8, 256, 64))}
    assert specs_of(fused, huggingface.rules_of(EXPERTS, expert="expert")) == {
        [*fused][0]: P("expert")
    }


# MaxText

FILE = {
    "mesh_axes": ["data", "fsdp", "fsdp_transpose", "expert"],
    "data_sharding": [["data", "fsdp"]],
    "logical_axis_rules": [
        ["activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
        ["activation_length_attn", ["context"]],
        ["vocab", []],
        ["exp", "expert"],
        ["mlp", ["fsdp_transpose"]],
        ["embed", ["fsdp", "fsdp_transpose"]],
        ["embed", ["fsdp"]],
    ],
}


@pytest.mark.parametrize(
    "names",
    [
        ("embed", "mlp"),
        ("embed",),
        ("vocab", "embed"),
        ("exp", "embed", "mlp"),
        ("activation_batch", "embed"),
        ("x",),
    ],
)
def test_maxtext_decides_as_flax_does(names):
    mesh_axes, rules = maxtext.rules_of(FILE)
    flax_rules = [
        (name, axes if isinstance(axes, str) else tuple(axes))
        for name, axes in FILE["logical_axis_rules"]
    ]
    theirs = spmd.logical_to_mesh_axes(names, rules=flax_rules)
    assert resolve(names, rules).spec == canonical(
        P(*[None if axis == () else axis for axis in theirs or ()])
    )
    assert mesh_axes == tuple(FILE["mesh_axes"])


def test_maxtext_passes_over_axes_that_the_mesh_lacks():
    _, rules = maxtext.rules_of(FILE)
    tree = {"x": struct((8, 16))}
    sharding_plan = plan(
        tree,
        MeshSpec({"fsdp": 2}),
        names={"x": ("activation_length_attn", "embed")},
        axes=rules,
    )
    assert sharding_plan["x"].spec == P(None, "fsdp")


def test_maxtext_files_replace_the_rules_of_a_name():
    base = [["embed", ["tensor"]], ["norm", ["tensor"]], ["embed", ["data"]]]
    rules = maxtext.rules_of(FILE, base).rules
    assert rules.rules[0] == ("norm", "tensor")
    assert ("embed", "tensor") not in rules.rules
    with pytest.raises(
        RuleError, match="has no list of `logical_axis_rules`; it has .'mesh_axes'"
    ):
        maxtext.rules_of({"mesh_axes": []})
    with pytest.raises(RuleError, match=r"`logical_axis_rules\[0\]` is 'embed'"):
        maxtext.rules_of({"logical_axis_rules": ["embed"]})


# Keras


# Of Keras's TensorLayout, only the axes matter.
BIAS = SimpleNamespace(axes=("model",))
LAYOUT = {
    ".*dense.*kernel": (None, "model"),
    ".*dense.*bias": BIAS,
    "out/dense/kernel": ("model",),
}


def test_a_layout_map_matches_whole_paths():
    tree = {
        "m": {
            "dense_1": {
                "kernel": struct((8, 8)),
                "bias": struct((8,)),
                "kernel_scale": struct((8, 8)),
            }
        }
    }
    tree["out"] = {"dense": {"kernel": struct((8, 8))}}
    specs = specs_of(tree, keras.rules_of(LAYOUT), MeshSpec({"model": 4}))
    assert specs == {
        "m/dense_1/kernel": P(None, "model"),
        "m/dense_1/bias": P("model"),
        "m/dense_1/kernel_scale": P(),
        # A path that is a key takes its layout, whatever else matches it.
        "out/dense/kernel": P("model"),
    }


def test_layout_maps_that_say_nothing_are_refused():
    twice = keras.rules_of({".*kernel": ("model",), "dense.*": (None, "model")})
    with pytest.raises(
        RuleError,
        match=r"'dense/kernel' matches \['.\*kernel', 'dense.\*'\], and in a LayoutMap",
    ):
        specs_of({"dense": {"kernel": struct((8,))}}, twice, MeshSpec({"model": 4}))
    with pytest.raises(RuleError, match="the layout of 'w' is 3"):
        keras.rules_of({"w": 3})


def assigned_layouts(source):
    """What `layout_map[key] = (model_dim, data_dim)` assigns in a source, the axes
    called as they are by default.
    """
    layout_by_name = {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(
                [ast.Subscript(ast.Name("layout_map"), key)], ast.Tuple(parts)
            ):
                axes = [
                    part.id.removesuffix("_dim") if isinstance(part, ast.Name) else None
                    for part in parts
                ]
                layout_by_name[ast.literal_eval(key)] = tuple(axes)
    return layout_by_name


def test_the_maps_of_keras_hub():
    files = sorted(folder_of("keras_hub").glob("src/models/*/*_backbone.py"))
    layouts_by_stem = {
        file.stem: layouts
        for file in files
        if (layouts := assigned_layouts(file.read_text()))
    }
    assert len(layouts_by_stem) == 5
    for layout_map in layouts_by_stem.values():
        rules = keras.rules_of(layout_map)
        tree = {"token_embedding": {"embeddings": struct((256, 64))}}
        assert specs_of(tree, rules, MeshSpec({"data": 2, "model": 4})) == {
            "token_embedding/embeddings": P("model", "data")
        }


# Levanter


def test_two_mappings_of_a_trainer():
    trainer = {
        "tensor_parallel_axes": ["mlp", "heads"],
        "axis_resources": {"vocab": "model"},
    }
    both = levanter.mappings_of(
        trainer | {"parameter_axis_resources": {"mlp": ["model", "data"]}}
    )
    assert dict(both.compute.rules) == dict.fromkeys(
        ("vocab", "mlp", "heads"), "model"
    ) | {"batch": ("replica", "data")}
    assert dict(both.parameter.rules) == {
        **dict(both.compute.rules),
        "mlp": ("model", "data"),
        "embed": "data",
    }
    assert levanter.mappings_of({"fsdp_axis": ["embed", "x"]}).parameter.names == (
        "batch",
        "embed",
        "x",
    )
    assert (
        levanter.mappings_of({"fsdp_axis": None, "batch_axis": None}).parameter.rules
        == ()
    )


# haliax


class Axis(NamedTuple):
    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    """As in haliax/core.py, of which haliax 1.3 cannot be imported under JAX 0.10."""

    __module__ = "haliax.core"
    array: Any
    axes: tuple[Axis, ...]

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux)


EMBED = Axis("embed", 16)
MLP = Axis("mlp", 32)
LAYERS = Axis("layers", 4)


def named(*axes):
    shape = tuple(axis.size for axis in axes)
    return NamedArray(jax.ShapeDtypeStruct(shape, jnp.float32), axes)


def module_of_haliax():
    return {
        "up": named(LAYERS, EMBED, MLP),
        "down": named(LAYERS, MLP, EMBED),
        "scale": jax.ShapeDtypeStruct((16,), jnp.float32),
    }


def test_named_arrays_are_planned_by_the_names_that_they_carry():
    tree = module_of_haliax()
    mesh = MeshSpec({"data": 4, "model": 2})
    axes = levanter.rules_of({"embed": "data", "mlp": "model"}).extend(
        [("layers", None)]
    )
    names = haliax.names_of(tree, default=())
    assert names == {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "scale": (),
    }
    params = plan(tree, mesh, names=names, axes=axes)
    assert params["up/0"].spec == P(None, "data", "model")
    assert params["down/0"].spec == P(None, "model", "data")
    assert params["scale"].spec == P()
    moments = follow(optax.adam(1e-3).init, params)
    assert moments["0/mu/down/0"].spec == P(None, "model", "data")
    # Path rules remain for what has no names.
    rest = PathRules([("scale", P("data"))])
    mixed = plan(tree, mesh, names=haliax.names_of(tree), axes=axes, paths=rest)
    assert mixed["scale"].spec == P("data")


def test_named_arrays_that_nothing_reads_say_which_line_does():
    tree = module_of_haliax()
    mesh = MeshSpec({"data": 4})
    line = r"names=shardfx\.interop\.haliax\.names_of\(tree\)"
    with pytest.raises(RuleError, match=f"`NamedArray`s of haliax.*{line}"):
        plan(tree, mesh, axes=levanter.rules_of({"embed": "data"}))
    with pytest.raises(UnmatchedError, match=line):
        plan(tree, mesh, paths=PathRules([("scale", P())]))
    rules = PathRules([(".*", fsdp("data"))])
    assert plan(tree, mesh, paths=rules)["up/0"].spec != P()


# T5X

GIN = """
from t5x import partitioning
include 't5x/configs/runs/pretrain.gin'
utils.DatasetConfig:
  batch_size = 32  # not = 64
train_script.train:
  partitioner = @partitioning.PjitPartitioner()
partitioning.PjitPartitioner:
  num_partitions = 1
  model_parallel_submesh = (2, 2, 1, 1)
  logical_axis_rules= @partitioning.standard_logical_axis_rules()

partitioning.standard_logical_axis_rules:
  activation_partitioning_dims = 2
  parameter_partitioning_dims = 2
  additional_rules = [
      ('rows', 'data'),  # ours
      ('cols', None)]
"""


# As `t5x/contrib/moe/configs/runs/pretrain.gin` has it.
MOE = """
include 't5x/configs/runs/pretrain.gin'
NUM_MODEL_PARTITIONS = None
NUM_EXPERTS = 16
train_script.train.partitioner = @moe_partitioning.MoePjitPartitioner()
moe_partitioning.MoePjitPartitioner:
  num_experts = %NUM_EXPERTS
  num_partitions = %NUM_MODEL_PARTITIONS
  model_parallel_submesh = %MODEL_PARALLEL_SUBMESH
"""


def test_gin_files_of_experts():
    read = t5x.partitioning_of(GIN + MOE)
    assert read.num_partitions is None
    assert read.model_parallel_submesh is None
    assert read.num_experts == 16
    standard = presets.t5x(2, 2).rules
    experts = (
        ("expert", "expert"),
        ("expert_mlp", "model"),
        ("expert_replicas", "data"),
        ("unmodeled", None),
    )
    added = (("rows", "data"), ("cols", None))
    assert read.rules.rules == (
        ("batch", ("expert", "data")),
        *standard[1:],
        *experts,
        *added,
    )
    mesh = MeshSpec({"data": 2, "expert": 4, "model": 2})
    weight = {"wi": struct((16, 32, 64))}
    sharding_plan = plan(
        weight, mesh, names={"wi": ("expert", None, "expert_mlp")}, axes=read.rules
    )
    assert sharding_plan["wi"].spec == P("expert", None, "model")
    said = (
        "NUM_MODEL_PARTITIONS ="
        " 4\nmoe_partitioning.MoePjitPartitioner.logical_axis_rules = [('expert',"
        " 'data')]\n"
    )
    read = t5x.partitioning_of(MOE + said)
    assert read.num_partitions == 4
    assert read.rules.rules == (("expert", "data"),)
    # The function of that name beside the plain partitioner has no rules for experts.
    plain = (
        MOE + "moe_partitioning.MoePjitPartitioner.logical_axis_rules ="
        " @base.standard_logical_axis_rules()\n"
    )
    assert t5x.partitioning_of(plain).rules == presets.t5x()


UNKNOWN_PARTITIONERS = {
    "": "the text binds no partitioner",
    "from t5x import models\nBATCH_SIZE = 8\n": (
        "Includes are not read: give their texts before it"
    ),
    "train.partitioner = @mine.OwnPartitioner()\n": (
        "`OwnPartitioner` is none of T5X's partitioners"
    ),
    "mine.OwnPartitioner.num_partitions = 1\n": (
        "`OwnPartitioner` is none of T5X's partitioners"
    ),
}


@pytest.mark.parametrize("text", UNKNOWN_PARTITIONERS)
def test_gin_files_without_a_known_partitioner_are_refused(text):
    with pytest.raises(RuleError, match=UNKNOWN_PARTITIONERS[text]):
        t5x.partitioning_of(text)


def test_gin_files():
    read = t5x.partitioning_of(GIN)
    assert read == t5x.Partitioning(
        presets.t5x(2, 2, [("rows", "data"), ("cols", None)]), 1, (2, 2, 1, 1)
    )
    sizes = t5x.partitioning_of("partitioning.PjitPartitioner.num_partitions = 2\n")
    assert sizes == t5x.Partitioning(presets.t5x(), 2, None)
    later = GIN + "\npartitioning.PjitPartitioner.num_partitions = 8\n"
    assert t5x.partitioning_of(later).num_partitions == 8
    text = (
        "partitioning.PjitPartitioner.logical_axis_rules = [\n    ('batch', 'data'),\n "
        "   ('vocab', None),\n]\n"
    )
    assert t5x.partitioning_of(text).rules.rules == (("batch", "data"), ("vocab", None))
    with pytest.raises(RuleError, match="is bound to `%RULES`, which is no constant"):
        t5x.partitioning_of(
            "partitioning.PjitPartitioner.logical_axis_rules = %RULES\n"
        )
