"""An example of a name map: a Llama as Hugging Face stores it, into the demo's model, which stacks its layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardfx
from shardfx import From, MeshSpec, TreeMap, checkpoint
from shardfx._cli.demo.model import AXIS_RULES, LAYERS, Transformer


# Paths of the demo's model to Hugging Face's names; `{i}` is the layer. Torch keeps matrices as [out, in].
NAMES = {
    "embedding": ("model.embed_tokens.weight", False),
    "norm/scale": ("model.norm.weight", False),
    "unembedding": ("lm_head.weight", True),
    "layers/attention_norm/scale": ("model.layers.{i}.input_layernorm.weight", False),
    "layers/mlp_norm/scale": ("model.layers.{i}.post_attention_layernorm.weight", False),
    **{
        f"layers/attention/{ours}": (f"model.layers.{{i}}.self_attn.{theirs}_proj.weight", True)
        for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
    },
    **{f"layers/mlp/{name}": (f"model.layers.{{i}}.mlp.{name}_proj.weight", True) for name in ("gate", "up", "down")},
}


def in_file(path):
    name, is_matrix = NAMES[path]
    one = From(name).T if is_matrix else From(name)
    return one.stack("i") if "{i}" in name else one


@pytest.fixture(scope="module")
def model():
    return Transformer(key=jax.random.key(0))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model as Hugging Face would store it."""
    folder, tensors = tmp_path_factory.mktemp("hf"), {}
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    for key, array in leaves:
        path = jax.tree_util.keystr(key, simple=True, separator="/")
        name, is_matrix = NAMES[path]
        for layer in range(LAYERS) if "{i}" in name else [None]:
            one = np.asarray(array if layer is None else array[layer])
            tensors[name.format(i=layer)] = np.ascontiguousarray(one.T if is_matrix else one)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_a_llama_is_read_into_the_demo_s_model(model, folder, axes):
    made = shardfx.plan(model, MeshSpec(axes).build(jax.devices()), axes=AXIS_RULES)
    loaded = eqx.combine(checkpoint.load(folder, made, TreeMap({path: in_file(path) for path in NAMES})), model)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        if eqx.is_array(theirs):
            assert np.array_equal(mine, theirs)
            assert mine.sharding.mesh == made.jax_mesh
    tokens = jnp.arange(32).reshape(2, 16)
    assert np.allclose(eqx.filter_jit(loaded)(tokens), eqx.filter_jit(model)(tokens), atol=1e-4)


def test_the_plan_can_be_made_from_the_headers_alone(folder):
    tree = checkpoint.structs(checkpoint.read_index(folder))
    rules = shardfx.PathRules([("(norm|layernorm)", ()), (".*", shardfx.fsdp("fsdp"))])
    made = shardfx.plan(tree, MeshSpec({"fsdp": 8}), paths=rules)
    assert made["model.layers.3.mlp.up_proj.weight"].spec == jax.P("fsdp")
    assert made.bytes_per_device < made.bytes_total / 7
