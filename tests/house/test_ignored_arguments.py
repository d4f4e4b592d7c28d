"""Arguments that would have no effect beside the others: an error says what to write."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, auto, checkpoint, cost, presets
from shardfx.errors import (
    CheckpointError,
    LeafTypeError,
    MapError,
    ProgramError,
    RuleError,
)
from shardfx.interop import huggingface


MESH = MeshSpec({"data": 4, "tensor": 2})
TREE = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
RULES = PathRules([("w", P("data"))])
AXES = AxisRules([("embed", "data")], modes={"serve": [("embed", None)]})
PLAN = sfx.plan(TREE, MESH, names={"w": ("embed", None)}, axes=AXES)
ON_ONE_AXIS = jax.NamedSharding(MeshSpec({"data": 8}).build(jax.devices()), P("data"))


class Call(NamedTuple):
    """A call with an argument that would have no effect, and its error."""

    make: Callable[[Any], object]
    error: type[Exception]
    message: str


CALLS = {
    "a mode without rules": Call(
        make=lambda path: sfx.plan(TREE, MESH, paths=RULES, mode="serve"),
        error=RuleError,
        message=r"`mode='serve'` is a mode of `axes`, which are not given; pass `axes=",
    ),
    "an unknown mode without names": Call(
        make=lambda path: sfx.plan(TREE, MESH, paths=RULES, axes=AXES, mode="sreve"),
        error=RuleError,
        message=r"mode 'sreve' is unknown; .*\(did you mean 'serve'\?\)",
    ),
    "rules for a finished plan": Call(
        make=lambda path: sfx.lint(PLAN, paths=RULES),
        error=RuleError,
        message=r"Write `lint\(plan\)`, or lint .*`lint\(plan.structs, mesh, paths=",
    ),
    "another mesh for a finished plan": Call(
        make=lambda path: sfx.lint(PLAN, MeshSpec({"data": 2})),
        error=RuleError,
        message=r"`mesh` would have no effect.*or plan .*`lint\(plan.replan\(mesh\)\)`",
    ),
    "a reference beside a mesh": Call(
        make=lambda path: sfx.testing.check_step(
            lambda mesh: jnp.sin,
            jnp.ones(8),
            reference=jnp.sin,
            mesh=MESH.build(jax.devices()),
        ),
        error=ProgramError,
        message="Leave one of them out",
    ),
    "a slice beside a finished program": Call(
        make=lambda path: sfx.testing.verify(
            jnp.sin, jnp.ones(8), compiler="tpu:v5e:2x4", compiled="HloModule m"
        ),
        error=ProgramError,
        message="`compiled` is a finished one; leave one of them out",
    ),
    "axes without paths": Call(
        make=lambda path: sfx.follow(lambda x: x, PLAN, axes=AxisRules([("a", None)])),
        error=RuleError,
        message=r"pass `paths=PathRules\(\[...\]\)`, or leave `axes` out",
    ),
    "a batch beside a plan": Call(
        make=lambda path: cost.fit(PLAN, TREE, chip="v5e"),
        error=LeafTypeError,
        message=r"write `fit\(plan, chip=...\)`, or pass the step",
    ),
    "experts beside a tensor parallel plan alone": Call(
        make=lambda path: huggingface.rules_of({"layers.*.w": "colwise"}, expert="ep"),
        error=RuleError,
        message=r"pass `rules_of\(plans_of\(model.config\), expert='ep'\)`, or leave it",
    ),
    "lost devices inside jit": Call(
        make=lambda path: jax.jit(
            lambda x: sfx.reshard(x, ON_ONE_AXIS, lost=jax.devices()[1:2])
        )(jnp.ones(8)),
        error=LeafTypeError,
        message="`reshard` inside `jit` takes no `lost`",
    ),
    "structs without a map": Call(
        make=lambda path: checkpoint.save(path / "c", {"w": np.ones(8)}, like=TREE),
        error=MapError,
        message="`like` says which arrays `map` makes, and there is no map",
    ),
    "the size of files for one file": Call(
        make=lambda path: checkpoint.save(
            path / "c.safetensors", {"w": np.ones(8)}, file_bytes=2**20
        ),
        error=CheckpointError,
        message="give a path without `.safetensors`, or leave `file_bytes` out",
    ),
    "another mesh for the bytes of a plan": Call(
        make=lambda path: cost.fit(PLAN, chip="v5e", mesh=MeshSpec({"data": 2})),
        error=LeafTypeError,
        message=r"write `fit\(plan, chip=...\)`",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_an_argument_without_effect_is_an_error(case, tmp_path):
    call = CALLS[case]
    with pytest.raises(call.error, match=call.message):
        call.make(tmp_path)


def test_what_a_plan_has_already_may_be_given_beside_it():
    assert sfx.lint(PLAN, MESH, axes=AXES) == sfx.lint(PLAN)
    followed = sfx.follow(lambda x: x, PLAN, axes=AXES)
    assert followed["w"].spec == PLAN["w"].spec
    beside_mesh = cost.fit(PLAN, chip="v5e", mesh=MESH)
    assert beside_mesh.peak_bytes == cost.fit(PLAN, chip="v5e").peak_bytes


def test_the_mesh_of_devices_may_be_given_beside_its_plan():
    slices = MeshSpec({"data": 8}, dcn={"data": 2})
    plan = sfx.plan(TREE, slices, paths=RULES)
    explicit = jax.make_mesh((8,), ("data",))
    for mesh in (ON_ONE_AXIS.mesh, explicit):
        assert sfx.lint(plan, mesh) == sfx.lint(plan)
        beside_mesh = cost.fit(plan, chip="v5e", mesh=mesh)
        assert beside_mesh.peak_bytes == cost.fit(plan, chip="v5e").peak_bytes


def test_arguments_that_only_other_cases_need_may_be_given(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": np.ones((8, 8), np.float32)})
    index = checkpoint.read_index(tmp_path / "c", root=tmp_path)
    plan = PLAN.on(MESH.build(jax.devices()))
    assert checkpoint.load(index, plan, root=tmp_path)["w"].shape == (8, 8)
    found = auto.search(jnp.sin, TREE["w"], devices=2, chip="v5e", closely=3)
    assert found
    compiled = jax.jit(jnp.sum).lower(jax.device_put(jnp.ones(8), ON_ONE_AXIS))
    sent = cost.traffic(compiled.compile())
    on_switch = cost.seconds(sent, "h100", MeshSpec({"data": 8}), slice="2x4")
    assert on_switch == cost.seconds(sent, "h100", MeshSpec({"data": 8}))


def test_a_dense_model_is_the_same_with_and_without_experts():
    dense = huggingface.Plans(tensor={"layers.*.w": "colwise"}, expert={}, head={})
    assert huggingface.rules_of(dense, expert="ep") == huggingface.rules_of(dense)
    model = "llama3-8b"
    stacked = presets.models.tree(model, stack_experts=True)
    assert stacked == presets.models.tree(model)


def test_a_plan_by_paths_joins_one_in_a_mode():
    served = sfx.plan(TREE, MESH, names={"w": ("embed", None)}, axes=AXES, mode="serve")
    by_paths = sfx.plan(TREE, MESH, paths=RULES)
    joined = sfx.ShardPlan.join(a=by_paths, b=served)
    assert joined.mode == "serve"
    assert joined["a/w"].spec == P("data")
    assert joined["b/w"].spec == P()
