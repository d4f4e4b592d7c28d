"""The shipped rules, those of models by name and those of MaxText have no findings with
the trees that they are for.
"""

import json
from pathlib import Path
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import pytest

import shardfx as sfx
from shardfx import MeshSpec, presets
from shardfx.interop import maxtext
from shardfx.presets import models, tokens
from tests.specs import entry_axes


@pytest.mark.parametrize(
    "name",
    [name for name, model in catalogue.MODELS.items() if model.preset is not None],
)
def test_the_presets_of_path_rules(name):
    model = catalogue.MODELS[name]
    rules = getattr(presets, str(model.preset))(**dict(model.arguments))
    # A tree may have tens of thousands of arrays, and takes longer to make than to lint.
    tree = model.make()
    for tensor in (1, 2):
        axes = {"fsdp": 4, "tensor": tensor}
        findings = sfx.lint(tree, MeshSpec(axes), paths=rules)
        # With one kv head, or 25 heads, there is nothing to cut in two: the rules keep
        # heads whole, and `lint` says so.
        if tensor > 1:
            whole = ("gemma-2b", "gemma3-1b", "gpt2-xl")
        else:
            whole = ()
        severities = {
            finding.severity for finding in findings if finding.where != "wte/weight"
        }
        assert severities == ({"info"} if name in whole else set()), findings
        # The vocabulary of GPT-2 is odd.
        odd = [finding.where for finding in findings if finding.severity == "warning"]
        if name.startswith("gpt2") and tensor > 1:
            expected = ["wte/weight"]
        else:
            expected = []
        assert odd == expected, str(findings)


THREE = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("how", ["fsdp_tp", "ep"])
def test_no_preset_has_a_layout_of_a_known_fault(name, how):
    if how not in models.strategies(name):
        return
    tree = models.tree(name, layers=2, stack_experts=how == "ep")
    findings = sfx.lint(tree, THREE, paths=models.rules_for(name, how), unused="allow")
    assert [reason for reason in findings if reason.code == "known-fault"] == []


def read(text: str) -> tuple[Any, Any]:
    """A tree of arrays and the tree of their names: a line for each array."""
    lines = [
        [part.split() for part in line.split(":")] for line in text.strip().splitlines()
    ]
    shapes = {
        path: jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.bfloat16)
        for (path,), shape, _ in lines
    }
    return shapes, {
        path: tuple(vars(tokens).get(name, name) for name in names)
        for (path,), _, names in lines
    }


# T5 1.1 XL with layers that are stacked, and the names that T5X gives to its
# parameters.
T5 = """
token_embedder: 32128 2048: vocab embed
decoder/self_attention/query: 24 2048 2048: layers embed joined_kv
decoder/self_attention/key: 24 2048 2048: layers embed joined_kv
decoder/self_attention/value: 24 2048 2048: layers embed joined_kv
decoder/self_attention/out: 24 2048 2048: layers joined_kv embed
decoder/mlp/wi_0: 24 2048 5120: layers embed mlp
decoder/mlp/wi_1: 24 2048 5120: layers embed mlp
decoder/mlp/wo: 24 5120 2048: layers mlp embed
decoder/norm: 24 2048: layers embed
decoder/relpos: 32 32: heads relpos_buckets
decoder/logits_dense: 2048 32128: embed vocab
"""
LLAMA = """
embed: 32000 4096: VOCAB EMBED
layers/0/q: 4096 32 128: EMBED HEAD HEAD_DIM
layers/0/k: 4096 8 128: EMBED KV_HEAD KV_HEAD_DIM
layers/0/v: 4096 8 128: EMBED KV_HEAD KV_HEAD_DIM
layers/0/o: 32 128 4096: HEAD HEAD_DIM EMBED
layers/0/up: 4096 14336: EMBED MLP_INTERMEDIATE
layers/0/down: 14336 4096: MLP_INTERMEDIATE EMBED
layers/0/norm: 4096: EMBED
"""


@pytest.mark.parametrize("activation_dims", [1, 2])
@pytest.mark.parametrize("parameter_dims", [1, 2])
def test_t5x(activation_dims, parameter_dims):
    tree, names = read(T5)
    axes = presets.t5x(activation_dims, parameter_dims)
    findings = sfx.lint(tree, MeshSpec({"data": 4, "model": 4}), names=names, axes=axes)
    assert findings == (), str(findings)


MODES: list[tuple[str | None, dict[str, Any]]] = [
    *((mode, {}) for mode in (None, "train", "prefill", "decode", "insert")),
    ("decode", {"decode_batch_axis": None}),
    ("decode", {"decode_head_axis": None, "decode_kv_head_axis": "fsdp"}),
    ("decode", {"head_axis": None}),
]


@pytest.mark.parametrize("mode, changes", MODES, ids=str)
def test_eformer(mode, changes):
    tree, names = read(LLAMA)
    if changes:
        axes = {"fsdp": 2, "tp": 4}
    else:
        axes = {
            "dp": 2,
            "fsdp": 2,
            "tp": 4,
            "sp": 2,
        }
    mesh = MeshSpec(axes)
    findings = sfx.lint(
        tree, mesh, names=names, axes=presets.eformer(**changes), mode=mode
    )
    assert findings == (), str(findings)


@pytest.mark.parametrize(
    "axis, text",
    [
        ("data", []),
        ("batch", [("unused-axis", "info", "mesh axis 'batch'")]),
        ("dta", [("unused-axis", "error", "mesh axis 'dta'")]),
    ],
)
def test_data_parallel_rules_declare_the_axis_of_the_batch(axis, text):
    tree = models.tree("llama3-8b")
    rules = models.rules_for("llama3-8b", "dp")
    findings = sfx.lint(tree, MeshSpec({axis: 8}), paths=rules).without("replicated")
    actual = [(finding.code, finding.severity, finding.where) for finding in findings]
    assert actual == text
    if axis == "dta":
        assert "The rules use 'data', which the mesh lacks" in findings[0].message
        assert findings[0].fix == "mesh = MeshSpec({'data': 8})"


# `tests/data` says where MaxText's rules are from.
DEEPSEEK = json.loads(
    (Path(__file__).parents[1] / "data" / "maxtext_deepseek.json").read_text()
)
AXES = maxtext.rules_of(DEEPSEEK).rules


def mesh(**sizes: int) -> MeshSpec:
    """A mesh of all of MaxText's axes, of which those that are not given have the size
    1.
    """
    axes = {axis: sizes.get(axis, 1) for axis in DEEPSEEK["mesh_axes"]}
    return MeshSpec(axes)


def deepseek() -> tuple[Any, Any]:
    """The arrays of DeepSeek-V2-Lite as MaxText has them, with layers in one array, and
    their names.
    """
    shapes = {
        path: jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16)
        for path, shape, _, _ in DEEPSEEK["leaves"]
    }
    names = {path: axes_of(text) for path, _, text, _ in DEEPSEEK["leaves"]}
    return shapes, names


def axes_of(text):
    """The logical axes in a text, where "-" is none."""
    axes = text.split()
    for dim, axis in enumerate(axes):
        if axis == "-":
            axes[dim] = None
    return tuple(axes)


MESHES = {
    "as MaxText's test has it": {"fsdp": 4, "expert": 4},
    "all that training uses": {
        "data": 2,
        "fsdp": 8,
        "tensor": 4,
        "context": 2,
        "expert": 4,
    },
    "two dimensions of fsdp": {"fsdp": 4, "fsdp_transpose": 2},
    "to serve": {"tensor": 4, "autoregressive": 2},
    "slices": {"diloco": 2, "data": 2, "fsdp": 16},
}


def test_maxtexts_rules_decide_as_maxtext_does():
    tree, names = deepseek()
    plan = sfx.plan(tree, mesh(fsdp=4, expert=4), names=names, axes=AXES)
    cut_by_path = {path: _cut(spec) for path, _, _, spec in DEEPSEEK["leaves"]}
    actual = {leaf.path: _cut(leaf.spec) for leaf in plan.leaves}
    assert actual == cut_by_path


def _cut(spec):
    """The axes of each dimension but those of size 1, which MaxText's file leaves out."""
    cut = {
        dim: [axis for axis in entry_axes(entry) if axis in ("fsdp", "expert")]
        for dim, entry in enumerate(spec)
    }
    return {dim: axes for dim, axes in cut.items() if axes}


@pytest.mark.parametrize("which", MESHES)
def test_nothing_is_found_in_maxtexts_rules(which):
    tree, names = deepseek()
    findings = sfx.lint(tree, mesh(**MESHES[which]), names=names, axes=AXES)
    assert findings == (), str(findings)


def test_mistakes_in_a_large_set_are_found_among_its_rules():
    tree, names = deepseek()
    # As in MaxText's `ep-as-dp.yml`: rules to axes that the mesh lacks, and logical
    # names without rules.
    axes = AXES.without("embed_moe").extend([("activation_extra", "sequence_parallel")])
    findings = sfx.lint(tree, mesh(fsdp=4, tensor=2), names=names, axes=axes)
    actual = [(reason.code, reason.where) for reason in findings]
    assert actual == [
        ("unknown-name", "name 'embed_moe'"),
        ("absent-axis", "mesh axis 'sequence_parallel'"),
    ]
