"""The shipped rules for models by name have no findings, on meshes whose axes divide what they cut."""

import pytest

import shardfx as sfx
from shardfx import MeshSpec
from shardfx.presets import models


ODD = ("gpt2", "gpt3", "bert", "minilm", "t5.1.1-small", "t5.1.1-base", "vit-ti", "vit-s-16", "vit-b-16")
MESHES = {
    "dp": [{"fsdp": 1, "tensor": 1}],
    "fsdp": [{"fsdp": 8}, {"fsdp": 6}],
    "tp": [{"tensor": 2}, {"tensor": 8}],
    # On a v5e:4x4, and on six devices.
    "fsdp_tp": [{"fsdp": 4, "tensor": 2}, {"fsdp": 4, "tensor": 4}, {"fsdp": 3, "tensor": 2}],
    "ep": [{"expert": 4, "fsdp": 4, "tensor": 2}],
}


@pytest.mark.parametrize("name", models.names())
def test_the_rules_of_a_model(name):
    layers = min(models.config(name)["layers"], 4)
    for how in models.strategies(name):
        tree, rules = models.tree(name, layers=layers, stack_experts=how == "ep"), models.rules_for(name, how)
        for sizes in MESHES[how]:
            found = sfx.lint(tree, MeshSpec(sizes), paths=rules)
            # What a mesh axis does not divide is said, and that heads stay whole where there are too few; nothing else.
            assert {one.code for one in found} <= {"corrected"}, str(found)
            for one in found:
                told = "not divisible by" if one.severity == "warning" else "would cut inside"
                assert told in one.message, str(found)
            # A power of two divides all but these: an odd vocabulary, and ViT's three, six or twelve heads.
            if not any(size % 3 == 0 for size in sizes.values()) and not name.startswith(ODD):
                assert not found.worst("warning"), str(found)


def test_data_parallel_rules_declare_the_axis_of_the_batch():
    tree, rules = models.tree("llama3-8b"), models.rules_for("llama3-8b", "dp")
    found = sfx.lint(tree, MeshSpec({"data": 8}), paths=rules)
    assert {one.code for one in found} <= {"replicated"}, str(found)
    (other,) = sfx.lint(tree, MeshSpec({"batch": 8}), paths=rules).without("replicated")
    assert (other.code, other.severity, other.where) == ("unused-axis", "info", "mesh axis 'batch'")


def test_a_mesh_axis_that_is_spelt_wrong():
    tree, rules = models.tree("llama3-8b"), models.rules_for("llama3-8b", "dp")
    (found,) = sfx.lint(tree, MeshSpec({"dta": 8}), paths=rules).without("replicated")
    assert (found.code, found.severity, found.fix) == ("unused-axis", "error", "mesh = MeshSpec({'data': 8})")
    assert "The rules use 'data', which the mesh lacks" in found.message


def test_the_largest_model():
    tree, rules = models.tree("llama3-405b"), models.rules_for("llama3-405b", "fsdp_tp")
    found = sfx.lint(tree, MeshSpec.parse("data=4,fsdp=64,tensor=8"), paths=rules)
    assert found == (), str(found)
