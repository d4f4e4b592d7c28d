"""MaxText's own rules: nothing is found in them, and mistakes among them are."""

import pytest

import shardfx as sfx
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
    # Axes of size 1, which MaxText's file leaves out.
    real = ("fsdp", "expert")
    told = {leaf.path: tuple(_only(entry, real) for entry in leaf.spec) for leaf in made.leaves}
    theirs = {path: tuple(_only(entry, real) for entry in spec) for path, spec in maxtext_model.SPECS.items()}
    assert {path: _trimmed(spec) for path, spec in told.items()} == theirs


def _only(entry, axes):
    entries = entry if isinstance(entry, tuple) else (entry,)
    return tuple(axis for axis in entries if axis in axes)


def _trimmed(spec):
    while spec and not spec[-1]:
        spec = spec[:-1]
    return spec


@pytest.mark.parametrize("which", MESHES)
@pytest.mark.parametrize(
    "make", [maxtext_model.deepseek, lambda: maxtext_model.mixtral(4)], ids=["deepseek", "mixtral"]
)
def test_nothing_is_found_in_maxtexts_rules(which, make):
    tree, names = make()
    found = sfx.lint(tree, maxtext_model.mesh(**MESHES[which]), names=names, axes=maxtext_model.AXES)
    assert found == (), str(found)


def test_mistakes_in_a_large_set_are_found_among_its_rules():
    tree, names = maxtext_model.mixtral(3)
    # As in MaxText's `ep-as-dp.yml`: rules to axes that the mesh lacks, and logical names without rules.
    axes = maxtext_model.AXES.without("embed_moe").extend([("activation_extra", "sequence_parallel")])
    found = sfx.lint(tree, maxtext_model.mesh(fsdp=4, tensor=2), names=names, axes=axes)
    assert [(one.code, one.where) for one in found] == [
        ("unknown-name", "name 'embed_moe'"),
        ("absent-axis", "mesh axis 'sequence_parallel'"),
    ]
