"""Rule sets of Hugging Face, MaxText, Keras, T5X and Levanter as values, decided as the
libraries decide.
"""

import ast
import dataclasses
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
    MeshSpec,
    PathRules,
    follow,
    fsdp,
    plan,
    presets,
    resolve,
)
from shardfx.errors import RuleError, UnmatchedError
from shardfx.interop import haliax, keras, levanter, maxtext, t5x
from tests.conformance.rule_set_mesh import specs_of, struct
from tests.specs import canonical


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
    flax_rules = []
    for name, axes in FILE["logical_axis_rules"]:
        flax_rules.append((name, axes if isinstance(axes, str) else tuple(axes)))
    theirs = spmd.logical_to_mesh_axes(names, rules=flax_rules)
    # An entry without axes, `()`, is none.
    spec = P(*[axis or None for axis in theirs or ()])
    expected = canonical(spec)
    assert resolve(names, rules).spec == expected
    assert mesh_axes == tuple(FILE["mesh_axes"])


def test_maxtext_passes_over_axes_that_the_mesh_lacks():
    _, rules = maxtext.rules_of(FILE)
    tree = {"x": struct((8, 16))}
    names = {"x": ("activation_length_attn", "embed")}
    mesh = MeshSpec({"fsdp": 2})
    sharding_plan = plan(
        tree,
        mesh,
        names=names,
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
    expected = {
        "m/dense_1/kernel": P(None, "model"),
        "m/dense_1/bias": P("model"),
        "m/dense_1/kernel_scale": P(),
        # A path that is a key takes its layout, whatever else matches it.
        "out/dense/kernel": P("model"),
    }
    assert specs == expected


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
                axes = []
                for part in parts:
                    is_name = isinstance(part, ast.Name)
                    axes.append(part.id.removesuffix("_dim") if is_name else None)
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
        mesh = MeshSpec({"data": 2, "model": 4})
        specs = specs_of(tree, rules, mesh)
        assert specs == {"token_embedding/embeddings": P("model", "data")}


# Levanter


def test_two_mappings_of_a_trainer():
    trainer = {
        "tensor_parallel_axes": ["mlp", "heads"],
        "axis_resources": {"vocab": "model"},
    }
    both = levanter.mappings_of(
        trainer | {"parameter_axis_resources": {"mlp": ["model", "data"]}}
    )
    expected = dict.fromkeys(("vocab", "mlp", "heads"), "model") | {
        "batch": ("replica", "data")
    }
    assert dict(both.compute.rules) == expected
    expected = {
        **dict(both.compute.rules),
        "mlp": ("model", "data"),
        "embed": "data",
    }
    assert dict(both.parameter.rules) == expected
    parameter = levanter.mappings_of({"fsdp_axis": ["embed", "x"]}).parameter
    names = parameter.names
    assert names == (
        "batch",
        "embed",
        "x",
    )
    parameter = levanter.mappings_of({"fsdp_axis": None, "batch_axis": None}).parameter
    rules = parameter.rules
    assert rules == ()


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
    rules = levanter.rules_of({"embed": "data", "mlp": "model"})
    axes = rules.extend([("layers", None)])
    names = haliax.names_of(tree, default=())
    expected = {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "scale": (),
    }
    assert names == expected
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
    spec = plan(tree, mesh, paths=rules)["up/0"].spec
    assert spec != P()


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
    expected = (
        ("batch", ("expert", "data")),
        *standard[1:],
        *experts,
        *added,
    )
    assert read.rules.rules == expected
    mesh = MeshSpec({"data": 2, "expert": 4, "model": 2})
    weight = {"wi": struct((16, 32, 64))}
    names = {"wi": ("expert", None, "expert_mlp")}
    sharding_plan = plan(weight, mesh, names=names, axes=read.rules)
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
    rules = presets.t5x(2, 2, [("rows", "data"), ("cols", None)])
    model_parallel_submesh = (2, 2, 1, 1)
    expected = t5x.Partitioning(
        rules=rules, num_partitions=1, model_parallel_submesh=model_parallel_submesh
    )
    assert read == expected
    sizes = t5x.partitioning_of("partitioning.PjitPartitioner.num_partitions = 2\n")
    assert sizes == t5x.Partitioning(
        rules=presets.t5x(), num_partitions=2, model_parallel_submesh=None
    )
    later = GIN + "\npartitioning.PjitPartitioner.num_partitions = 8\n"
    assert t5x.partitioning_of(later).num_partitions == 8
    text = (
        "partitioning.PjitPartitioner.logical_axis_rules = [\n    ('batch', 'data'),\n "
        "   ('vocab', None),\n]\n"
    )
    expected = (("batch", "data"), ("vocab", None))
    assert t5x.partitioning_of(text).rules.rules == expected
    with pytest.raises(RuleError, match="is bound to `%RULES`, which is no constant"):
        t5x.partitioning_of(
            "partitioning.PjitPartitioner.logical_axis_rules = %RULES\n"
        )


def test_gin_macros_that_go_in_a_circle_are_refused():
    text = "A = %B\nB = %A\npartitioning.PjitPartitioner.num_partitions = %A\n"
    with pytest.raises(RuleError, match="is bound to `%A`, which is no constant"):
        t5x.partitioning_of(text)
