"""The shipped rules have no findings with the trees that they are for, nor those of models by name."""

import operator
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import pytest

import shardfx as sfx
from shardfx import MeshSpec, presets
from shardfx.presets import models, tokens


@pytest.mark.parametrize("name", [name for name, model in catalogue.MODELS.items() if model.preset is not None])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_presets_of_path_rules(name, tensor):
    model = catalogue.MODELS[name]
    rules = getattr(presets, str(model.preset))(**dict(model.arguments))
    found = sfx.lint(model.make(), MeshSpec({"fsdp": 4, "tensor": tensor}), paths=rules)
    # With one kv head, or 25 heads, there is nothing to cut in two: the rules keep heads whole, and `lint` says so.
    whole = ("gemma-2b", "gemma3-1b", "gpt2-xl") if tensor > 1 else ()
    assert {one.severity for one in found if one.where != "wte/weight"} == ({"info"} if name in whole else set()), found
    # The vocabulary of GPT-2 is odd.
    odd = [one.where for one in found if one.severity == "warning"]
    assert odd == (["wte/weight"] if name.startswith("gpt2") and tensor > 1 else []), str(found)


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


# T5 1.1 XL with layers that are stacked, and the names that T5X gives to its parameters.
T5 = {
    "token_embedder": (leaf(32128, 2048), ("vocab", "embed")),
    "decoder": {
        "self_attention": {
            **{role: (leaf(24, 2048, 2048), ("layers", "embed", "joined_kv")) for role in ("query", "key", "value")},
            "out": (leaf(24, 2048, 2048), ("layers", "joined_kv", "embed")),
        },
        "mlp": {
            **{wi: (leaf(24, 2048, 5120), ("layers", "embed", "mlp")) for wi in ("wi_0", "wi_1")},
            "wo": (leaf(24, 5120, 2048), ("layers", "mlp", "embed")),
        },
        "norm": (leaf(24, 2048), ("layers", "embed")),
        "relpos": (leaf(32, 32), ("heads", "relpos_buckets")),
        "logits_dense": (leaf(2048, 32128), ("embed", "vocab")),
    },
}
LLAMA = {
    "embed": (leaf(32000, 4096), (tokens.VOCAB, tokens.EMBED)),
    "layers": [
        {
            "q": (leaf(4096, 32, 128), (tokens.EMBED, tokens.HEAD, tokens.HEAD_DIM)),
            "k": (leaf(4096, 8, 128), (tokens.EMBED, tokens.KV_HEAD, tokens.KV_HEAD_DIM)),
            "v": (leaf(4096, 8, 128), (tokens.EMBED, tokens.KV_HEAD, tokens.KV_HEAD_DIM)),
            "o": (leaf(32, 128, 4096), (tokens.HEAD, tokens.HEAD_DIM, tokens.EMBED)),
            "up": (leaf(4096, 14336), (tokens.EMBED, tokens.MLP_INTERMEDIATE)),
            "down": (leaf(14336, 4096), (tokens.MLP_INTERMEDIATE, tokens.EMBED)),
            "norm": (leaf(4096), (tokens.EMBED,)),
        }
    ]
    * 4,
}


def halves(pairs: Any) -> tuple[Any, Any]:
    """A tree of pairs as two trees."""
    first, second = (
        jax.tree.map(operator.itemgetter(at), pairs, is_leaf=lambda node: isinstance(node, tuple)) for at in (0, 1)
    )
    return first, second


@pytest.mark.parametrize("activation_dims", [1, 2])
@pytest.mark.parametrize("parameter_dims", [1, 2])
def test_t5x(activation_dims, parameter_dims):
    tree, names = halves(T5)
    axes = presets.t5x(activation_dims, parameter_dims)
    found = sfx.lint(tree, MeshSpec({"data": 4, "model": 4}), names=names, axes=axes)
    assert found == (), str(found)


OF_DECODING = (
    {"decode_batch_axis": None},
    {"decode_head_axis": None, "decode_kv_head_axis": "fsdp"},
    {"head_axis": None},
)


@pytest.mark.parametrize(
    "mode, changes",
    [
        *((mode, {}) for mode in (None, "train", "prefill", "decode", "insert")),
        *(("decode", one) for one in OF_DECODING),
    ],
    ids=str,
)
def test_eformer(mode, changes):
    tree, names = halves(LLAMA)
    mesh = MeshSpec({"fsdp": 2, "tp": 4} if changes else {"dp": 2, "fsdp": 2, "tp": 4, "sp": 2})
    found = sfx.lint(tree, mesh, names=names, axes=presets.eformer(**changes), mode=mode)
    assert found == (), str(found)


@pytest.mark.parametrize(
    "axis, told",
    [
        ("data", []),
        ("batch", [("unused-axis", "info", "mesh axis 'batch'")]),
        ("dta", [("unused-axis", "error", "mesh axis 'dta'")]),
    ],
)
def test_data_parallel_rules_declare_the_axis_of_the_batch(axis, told):
    tree, rules = models.tree("llama3-8b"), models.rules_for("llama3-8b", "dp")
    found = sfx.lint(tree, MeshSpec({axis: 8}), paths=rules).without("replicated")
    assert [(one.code, one.severity, one.where) for one in found] == told
    if axis == "dta":
        assert "The rules use 'data', which the mesh lacks" in found[0].message
        assert found[0].fix == "mesh = MeshSpec({'data': 8})"
