"""The shipped rules for models by name have no findings, on meshes whose axes divide what they cut."""

import pytest

import shardfx as sfx
from shardfx import MeshSpec
from shardfx.presets import models


MESHES = {
    "dp": {"fsdp": 1, "tensor": 1},
    "fsdp": {"fsdp": 8},
    "tp": {"tensor": 2},
    "fsdp_tp": {"fsdp": 4, "tensor": 2},
    "ep": {"expert": 4, "fsdp": 4, "tensor": 2},
}
# An odd vocabulary, or three heads: `tensor=2` cannot cut them, and these rules know no units for them.
ODD = ("gpt", "vit-ti")


@pytest.mark.parametrize("name", models.names())
def test_the_rules_of_a_model(name):
    for how in models.strategies(name):
        rules = models.rules_for(name, how)
        found = sfx.lint(models.tree(name, stack_experts=how == "ep"), MeshSpec(MESHES[how]), paths=rules)
        odd = {one.code for one in found.worst("warning")}
        assert odd <= ({"corrected"} if name.startswith(ODD) and "t" in how else set()), str(found)
        # With one head for keys there is nothing to cut in two: the rules keep heads whole, and `lint` says so.
        assert {one.code for one in found} <= {"corrected"}, str(found)


def test_data_parallel_rules_declare_the_axis_of_the_batch():
    tree, rules = models.tree("llama3-8b"), models.rules_for("llama3-8b", "dp")
    found = sfx.lint(tree, MeshSpec({"data": 8}), paths=rules)
    assert {one.code for one in found} <= {"replicated"}, str(found)
    (other,) = sfx.lint(tree, MeshSpec({"batch": 8}), paths=rules).without("replicated")
    assert (other.code, other.severity, other.where) == ("unused-axis", "info", "mesh axis 'batch'")


def test_the_largest_model():
    tree, rules = models.tree("llama3-405b"), models.rules_for("llama3-405b", "fsdp_tp")
    found = sfx.lint(tree, MeshSpec.parse("data=4,fsdp=64,tensor=8"), paths=rules)
    assert found == (), str(found)
