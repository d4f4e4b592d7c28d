"""MaxText's own rules: nothing is found in them, and mistakes among them are."""

import pytest

import shardfx as sfx
from shardfx._ground.spec import entry_axes
from tests.see import maxtext_model


MESHES = {
    "as MaxText's test has it": {"fsdp": 4, "expert": 4},
    "all that training uses": {"data": 2, "fsdp": 8, "tensor": 4, "context": 2, "expert": 4},
    "two dimensions of fsdp": {"fsdp": 4, "fsdp_transpose": 2},
    "to serve": {"tensor": 4, "autoregressive": 2},
    "slices": {"diloco": 2, "data": 2, "fsdp": 16},
}


def test_maxtexts_rules_decide_as_maxtext_does():
    tree, names = maxtext_model.deepseek()
    made = sfx.plan(tree, maxtext_model.mesh(fsdp=4, expert=4), names=names, axes=maxtext_model.AXES)
    assert {leaf.path: _cut(leaf.spec) for leaf in made.leaves} == {
        path: _cut(spec) for path, spec in maxtext_model.SPECS.items()
    }


def _cut(spec):
    """The axes of each dimension but those of size 1, which MaxText's file leaves out."""
    cut = {dim: [axis for axis in entry_axes(entry) if axis in ("fsdp", "expert")] for dim, entry in enumerate(spec)}
    return {dim: axes for dim, axes in cut.items() if axes}


@pytest.mark.parametrize("which", MESHES)
def test_nothing_is_found_in_maxtexts_rules(which):
    tree, names = maxtext_model.deepseek()
    found = sfx.lint(tree, maxtext_model.mesh(**MESHES[which]), names=names, axes=maxtext_model.AXES)
    assert found == (), str(found)


def test_mistakes_in_a_large_set_are_found_among_its_rules():
    tree, names = maxtext_model.deepseek()
    # As in MaxText's `ep-as-dp.yml`: rules to axes that the mesh lacks, and logical names without rules.
    axes = maxtext_model.AXES.without("embed_moe").extend([("activation_extra", "sequence_parallel")])
    found = sfx.lint(tree, maxtext_model.mesh(fsdp=4, tensor=2), names=names, axes=axes)
    assert [(one.code, one.where) for one in found] == [
        ("unknown-name", "name 'embed_moe'"),
        ("absent-axis", "mesh axis 'sequence_parallel'"),
    ]
