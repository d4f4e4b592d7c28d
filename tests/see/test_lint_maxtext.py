"""MaxText's own rules: nothing is found in them, and mistakes among them are. `tests/data` says where they are from."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfx as sfx
from shardfx import MeshSpec
from shardfx._ground.spec import entry_axes
from shardfx.interop import maxtext


DEEPSEEK = json.loads((Path(__file__).parents[1] / "data" / "maxtext_deepseek.json").read_text())
AXES = maxtext.rules_of(DEEPSEEK).rules


def mesh(**sizes: int) -> MeshSpec:
    """A mesh of all of MaxText's axes, of which those that are not given have the size 1."""
    return MeshSpec({axis: sizes.get(axis, 1) for axis in DEEPSEEK["mesh_axes"]})


def deepseek() -> tuple[Any, Any]:
    """The arrays of DeepSeek-V2-Lite as MaxText has them, with layers in one array, and their names."""
    shapes = {path: jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16) for path, shape, _, _ in DEEPSEEK["leaves"]}
    names = {
        path: tuple(None if one == "-" else one for one in text.split()) for path, _, text, _ in DEEPSEEK["leaves"]
    }
    return shapes, names


MESHES = {
    "as MaxText's test has it": {"fsdp": 4, "expert": 4},
    "all that training uses": {"data": 2, "fsdp": 8, "tensor": 4, "context": 2, "expert": 4},
    "two dimensions of fsdp": {"fsdp": 4, "fsdp_transpose": 2},
    "to serve": {"tensor": 4, "autoregressive": 2},
    "slices": {"diloco": 2, "data": 2, "fsdp": 16},
}


def test_maxtexts_rules_decide_as_maxtext_does():
    tree, names = deepseek()
    made = sfx.plan(tree, mesh(fsdp=4, expert=4), names=names, axes=AXES)
    wanted = {path: _cut(spec) for path, _, _, spec in DEEPSEEK["leaves"]}
    assert {leaf.path: _cut(leaf.spec) for leaf in made.leaves} == wanted


def _cut(spec):
    """The axes of each dimension but those of size 1, which MaxText's file leaves out."""
    cut = {dim: [axis for axis in entry_axes(entry) if axis in ("fsdp", "expert")] for dim, entry in enumerate(spec)}
    return {dim: axes for dim, axes in cut.items() if axes}


@pytest.mark.parametrize("which", MESHES)
def test_nothing_is_found_in_maxtexts_rules(which):
    tree, names = deepseek()
    found = sfx.lint(tree, mesh(**MESHES[which]), names=names, axes=AXES)
    assert found == (), str(found)


def test_mistakes_in_a_large_set_are_found_among_its_rules():
    tree, names = deepseek()
    # As in MaxText's `ep-as-dp.yml`: rules to axes that the mesh lacks, and logical names without rules.
    axes = AXES.without("embed_moe").extend([("activation_extra", "sequence_parallel")])
    found = sfx.lint(tree, mesh(fsdp=4, tensor=2), names=names, axes=axes)
    assert [(one.code, one.where) for one in found] == [
        ("unknown-name", "name 'embed_moe'"),
        ("absent-axis", "mesh axis 'sequence_parallel'"),
    ]
