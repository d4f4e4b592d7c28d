"""What a person reads when the input is wrong: the whole text, with the path, the values and the way out."""

import contextlib
import copy
import textwrap
import types
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    atomic,
    constrain,
    correct,
    diff,
    explain,
    filter_jit,
    follow,
    gather,
    lint,
    match,
    plan,
    report,
    resolve,
    shard,
    topology,
)
from shardfx._plan import differences, renamed
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
    UnknownPathError,
    UnmatchedError,
)
from shardfx.interop.eformer import axis_names_of
from shardfx.testing import plan_text


MESH = MeshSpec({"data": 2, "tensor": 4})
TREE = {
    "decoder": {"mlp": {"wi": jnp.ones((4, 10)), "wo": jnp.ones((10, 4))}, "norm": jnp.ones(4)},
    "embed": jnp.ones((64, 4)),
    "step": jnp.ones(()),
}
EVERYTHING = PathRules([(".*", P())])


def message(error: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    return str(caught.value)


def text(block: str) -> str:
    return textwrap.dedent(block).strip()


def test_rank_mismatch():
    rules = PathRules([("norm", P("data", "tensor")), ("wo", P("data", None, "tensor")), (".*", P())])
    found = message(SpecError, lambda: plan(TREE, MESH, paths=rules))
    assert found == text(
        """
        2 leaves, or groups of alike ones, cannot be planned:
          leaf `decoder/mlp/wo`: P('data', None, 'tensor') has 3 entries, but shape (10, 4) has 2 dimensions; write \
`P('data',)` if the first 2 are meant.
          leaf `decoder/norm`: P('data', 'tensor') has 2 entries, but shape (4,) has 1 dimension; write `P('data',)` \
if the first is meant.
        """
    )


def test_rank_mismatch_of_names():
    rules, axes = PathRules([("norm", ("mlp", "embed")), (".*", P())]), AxisRules([("mlp", "tensor")])
    assert (
        "leaf `decoder/norm`: 2 logical names ('mlp', 'embed') for an array of rank 1, shape (4,); give one per"
        in message(SpecError, lambda: plan(TREE, MESH, paths=rules, axes=axes))
    )


def test_rank_mismatch_of_units():
    rules = PathRules([("norm", atomic(P("tensor"), (1, 2))), (".*", P())])
    assert "leaf `decoder/norm`: the units (1, 2) are for rank 2, and the array has rank 1." in message(
        SpecError, lambda: plan(TREE, MESH, paths=rules)
    )


def test_unknown_mesh_axis_in_strict_mode():
    rules = PathRules([("embed", P("datta")), ("wi", P("tensor", "data")), (".*", P())])
    assert message(RuleError, lambda: plan(TREE, MESH, paths=rules)) == text(
        """
        the mesh data=2,tensor=4 lacks mesh axes that the rules use. If they are for other meshes, declare them, \
`AxisRules(..., axes=('datta',))` or `PathRules(..., axes=('datta',))`; or give the mesh the axis with size 1; or pass \
`unmatched="replicate"`:
          leaf `embed` (paths[0] embed) uses the mesh axis 'datta' (did you mean 'data'?)
        """
    )
    rules = PathRules(rules.rules, axes=["datta"])
    plan(TREE, MESH, paths=rules)
    assert message(SpecError, lambda: plan(TREE, MESH, paths=rules, strict=True)) == text(
        """
        `strict=True`, and these leaves are not sharded as asked:
          leaf `embed`, shape (64, 4): dim 0: the mesh has no axis `datta`; add the axis to the mesh, or drop it from \
the rule
        """
    )
    assert message(SpecError, lambda: correct(P(None, "datta"), (4, 4), MESH, strict=True)) == (
        "P(None, 'datta') for shape (4, 4) on mesh data=2,tensor=4: dim 1: the mesh has no axis `datta`; add the axis "
        "to the mesh, or drop it from the rule"
    )


def test_indivisible_in_strict_mode():
    rules = PathRules([("wi", P(None, ("data", "tensor"))), (".*", P())])
    assert (
        "leaf `decoder/mlp/wi`, shape (4, 10): dim 1: size 10 is not divisible by `data` (2) x `tensor` (4); use axes "
        "whose product divides 10"
    ) in message(SpecError, lambda: plan(TREE, MESH, paths=rules, strict=True))


def test_unknown_logical_name():
    rules = AxisRules([("batch", "data"), ("embed", "tensor")])
    assert message(UnmatchedError, lambda: resolve(("batch", "embd"), rules, unmatched="raise")) == (
        "no rule for the logical names `embd` (dim 1) (did you mean 'embed'?). The rules have ('batch', 'embed'); add "
        "one with `rules.extend([('embd', None)])`, or pass `unmatched=\"replicate\"`."
    )


def test_leaves_without_a_rule_are_all_in_one_error_largest_first():
    rules = PathRules([("mlp/w_in", P("data")), ("decoder/nrm", P())])
    found = message(UnmatchedError, lambda: plan(TREE, MESH, paths=rules))
    assert found == text(
        """
        no rule covers 4 of 5 leaves; add path rules or names for them, end the path rules with `(".*", fsdp(...))`, \
or pass `unmatched="replicate"`. Largest first:
          `embed`: float32[64, 4], 1024 bytes; the nearest rule is 'mlp/w_in'
          `decoder/mlp/wi`: float32[4, 10], 160 bytes; the nearest rule is 'decoder/nrm'
          `decoder/mlp/wo`: float32[10, 4], 160 bytes; the nearest rule is 'decoder/nrm'
          `decoder/norm`: float32[4], 16 bytes; the nearest rule is 'decoder/nrm'
        """
    )


def test_of_many_leaves_without_a_rule_the_largest_are_shown():
    tree = {f"w{i}": jax.ShapeDtypeStruct((i + 1,), jnp.int8) for i in range(1000)}
    lines = message(UnmatchedError, lambda: plan(tree, MESH)).splitlines()
    assert lines[0].startswith("no rule covers 1000 of 1000 leaves")
    assert lines[1] == "  `w999`: int8[1000], 1000 bytes"
    assert lines[-1] == f"  and {1000 - (len(lines) - 2)} more" and len(lines) < 60


def test_a_broken_regex_shows_the_position():
    assert message(RuleError, lambda: PathRules([("norm", P()), ("mlp/(wi|wo", P("data"))])) == text(
        """
        rule 1: the regex does not compile: missing ), unterminated subpattern at position 4:
            mlp/(wi|wo
                ^
        """
    )
    made = plan(TREE, MESH, paths=EVERYTHING)
    assert message(RuleError, lambda: made.select("a[")) == (
        "the regex 'a[' does not compile: unterminated character set at position 1"
    )


def test_a_malformed_compact_rule_shows_the_position():
    assert message(RuleError, lambda: PathRules.parse("norm->replicate, mlp=>data")) == text(
        """
        a rule has no `->`; write `regex->axes`, at position 16:
            norm->replicate, mlp=>data
                            ^
        """
    )


def test_a_regex_that_matches_nothing_anywhere():
    rules = PathRules([("decoder/nrm", P("data")), (".*", P())])
    assert message(RuleError, lambda: plan(TREE, MESH, paths=rules)) == (
        "rules that never apply are mostly mistakes. Correct them, take them out, mark those that other trees need "
        'with `optional(target)`, or pass `unused="allow"`:\n'
        "  rule 0, the regex 'decoder/nrm', matches no path of the tree; the nearest path is `decoder/norm`."
    )
    assert "  `memory_kinds` entry 0, the regex 'opt', matches no path of the tree; " in message(
        RuleError, lambda: plan(TREE, MESH, paths=EVERYTHING, memory_kinds=[("opt", "pinned_host")])
    )
    made = plan(TREE, MESH, paths=EVERYTHING)
    assert message(RuleError, lambda: made.select("attn")) == (
        "`select('attn')` matches no path of the plan; paths look like `decoder/mlp/wi`."
    )


def test_a_memory_kind_that_does_not_exist():
    wanted = "`memory_kinds` maps 'embed' to 'host'; a memory kind is one of device, pinned_host, unpinned_host."
    kinds = [("embed", "host")]
    assert message(RuleError, lambda: plan(TREE, MESH, paths=EVERYTHING, memory_kinds=kinds)) == wanted
    made = plan(TREE, MESH, paths=EVERYTHING)
    assert message(RuleError, lambda: follow(lambda tree: tree, made, memory_kinds=kinds)) == wanted


def test_a_mesh_for_more_devices_than_the_cpu_has():
    for axes in ({"data": 4, "tensor": 4}, {"data": -1, "tensor": 16}):
        plain = message(MeshError, lambda axes=axes: MeshSpec(axes).fit(8))
        for devices in (jax.devices(), np.array(jax.devices()).reshape(2, 4)):
            assert message(MeshError, lambda axes=axes, devices=devices: MeshSpec(axes).build(devices)) == (
                f'{plain} To emulate them on CPU: `jax.config.update("jax_num_cpu_devices", 16)` before the first '
                "use of JAX."
            )
    chips = [types.SimpleNamespace(platform="tpu", id=i) for i in range(8)]
    assert message(MeshError, lambda: MeshSpec({"data": 4, "tensor": 4}).order(chips)).endswith("take the rest.")


def test_a_malformed_mesh():
    assert message(MeshError, lambda: MeshSpec.parse("data:2,tensor=4")) == (
        "mesh 'data:2,tensor=4': 'data:2' is not of the form `name=size`; write it as in "
        '"data=-1,fsdp=4,tensor=2", or "data=8(dcn=2)" for an axis over two slices.'
    )


AXES = AxisRules([("mlp", "tensor")])
BARE_PATHS: list[Any] = [[("mlp", P())], (("mlp", P()),), {"mlp": P()}, "mlp->data", AXES]
BARE_AXES: list[Any] = [[("mlp", "tensor")], (("mlp", "tensor"),), {"mlp": "tensor"}, "mlp", EVERYTHING]


@pytest.mark.parametrize("bare", BARE_PATHS, ids=type)
def test_path_rules_that_are_not_wrapped(bare, as_users_run_it):
    wanted = (
        f"must be of type PathRules, not {type(bare).__name__}; wrap it: `PathRules([...])`, or "
        '`PathRules.parse("...")` for text.'
    )
    assert message(RuleError, lambda: plan(TREE, MESH, paths=bare)) == f"`paths` {wanted}"
    assert message(RuleError, lambda: match(TREE, bare)) == f"`rules` {wanted}"


@pytest.mark.parametrize("bare", BARE_AXES, ids=type)
def test_axis_rules_that_are_not_wrapped(bare, as_users_run_it):
    wanted = f"must be of type AxisRules, not {type(bare).__name__}; wrap it: `AxisRules([...])`."
    names = jax.tree.map(lambda leaf: (None,) * leaf.ndim, TREE)
    assert message(RuleError, lambda: plan(TREE, MESH, paths=EVERYTHING, axes=bare)) == f"`axes` {wanted}"
    assert message(RuleError, lambda: plan(TREE, MESH, names=names, axes=bare)) == f"`axes` {wanted}"
    assert message(RuleError, lambda: resolve(("mlp",), bare)) == f"`rules` {wanted}"
    assert message(RuleError, lambda: AXES.merge(bare)) == f"`other` {wanted}"


@pytest.mark.parametrize(
    "call, wanted",
    [
        (
            lambda: plan(TREE, MESH, paths=EVERYTHING, unmatched=cast(Any, "drop")),
            '`unmatched=\'drop\'` is no policy of `plan`; use "raise" or "replicate".',
        ),
        (
            lambda: plan(TREE, MESH, paths=EVERYTHING, unused=cast(Any, "drop")),
            '`unused=\'drop\'` is no policy of `plan`; use "raise" or "allow".',
        ),
        (
            lambda: plan(TREE, MESH, paths=EVERYTHING, axes=AXES).sharding(("mlp",), unmatched=cast(Any, "drop")),
            '`unmatched=\'drop\'` is no policy for an array; use "raise" or "replicate".',
        ),
        (
            lambda: atomic("heads", (1, 2)),
            "`atomic('heads', (1, 2))`: a name takes one int, a whole spec or tuple of names takes a tuple of ints, "
            "one per dimension.",
        ),
        (
            lambda: correct(P(cast(Any, 3)), (4,), MESH),
            "3 is no entry of a PartitionSpec; it must be a mesh axis, a tuple of mesh axes, `None` or "
            "`PartitionSpec.UNCONSTRAINED`.",
        ),
        (
            lambda: axis_names_of({"a": 3}),
            "a tree of specs holds 3, which is neither a PartitionSpec nor a NamedSharding.",
        ),
        (lambda: MESH.axis_size(cast(Any, (1,))), "mesh axes are named by strings, not by (1,)."),
        (
            lambda: topology.coords(cast(Any, jax.devices()[0]), 0),
            "`local_device_count` is 0; it must be at least 1 without `coords`.",
        ),
        (
            lambda: topology.device_order(jax.devices()[:2], (3,)),
            "mesh axes of sizes (3,) have 3 devices, but 2 were given.",
        ),
    ],
)
def test_arguments_that_mean_nothing(call, wanted, as_users_run_it):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == wanted


def test_what_is_no_plan(as_users_run_it):
    made: Any = plan(TREE, MESH.build(jax.devices()), paths=EVERYTHING, axes=AXES)
    x, tree, axes = jnp.ones((8, 8)), cast(Any, TREE), cast(Any, AXES)

    def wanted(what: str, kind: str) -> str:
        return f"`{what}` must be of type ShardPlan, not {kind}; pass what `shardfx.plan(tree, mesh, ...)` returns."

    for function, what, kind in (
        (lambda: constrain(x, (None, "mlp"), axes), "plan", "AxisRules"),
        (lambda: constrain(x, made, cast(Any, (None, "mlp"))), "plan", "tuple"),
        (lambda: constrain(x, None, cast(Any, None)), "plan", "NoneType"),
        (lambda: shard(tree, made.shardings), "plan", "dict"),
        (lambda: report(tree), "plan", "dict"),
        (lambda: differences(tree, made), "a", "dict"),
        (lambda: differences(made, tree), "b", "dict"),
        (lambda: diff(tree, made), "a", "dict"),
        (lambda: diff(made, tree), "b", "dict"),
        (lambda: explain(tree, "w"), "plan", "dict"),
        (lambda: plan_text(tree), "plan", "dict"),
        (lambda: ShardPlan.join(params=made, opt=tree), "opt", "dict"),
        (lambda: follow(lambda given: given, tree), "plan", "dict"),
    ):
        assert message(LeafTypeError, function) == wanted(what, kind)


def test_rules_that_are_not_there():
    paths, axes = PathRules([("w", P())]), AxisRules([("mlp", "tensor")], modes={"serve": []})
    for function, what, number, count in (
        (lambda: paths.drop(1), "drop", 1, 1),
        (lambda: paths.replace(-1, P()), "replace", -1, 1),
        (lambda: axes.replace(0, "fsdp", mode="serve"), "replace", 0, 0),
    ):
        told = f"`{what}({number})`: rules are numbered from 0, and these {count} have no rule {number}."
        assert message(RuleError, function) == told
    assert message(RuleError, lambda: axes.drop(0, mode="serv")) == (
        "`drop(mode='serv')`: these rules have the modes ('serve',) (did you mean 'serve'?)."
    )


def test_names_of_arrays_that_are_not_there(as_users_run_it):
    names = {"decoder": None, "embed": ("vocab", None), "step": None}
    assert message(UnknownPathError, lambda: renamed(TREE, {"embd": ()}, names=names)) == (
        "`renamed('embd': ...)`: no array of the tree has this path, or one that the regex matches; did you mean "
        "`embed`?"
    )
    assert message(RuleError, lambda: renamed(TREE, {"(": ()}, names=names)) == (
        "'(' is the path of no array, and no regex that compiles: missing ), unterminated subpattern at position 0"
    )
    assert message(RuleError, lambda: renamed(TREE, {"embed": "vocab"}, names=names)) == (
        "`renamed`: 'embed' gets 'vocab'; use a tuple with one name per dimension, or `None`."
    )


def test_what_cannot_be_checked(as_users_run_it):
    assert message(MeshError, lambda: lint(TREE)) == (
        "`lint` needs the mesh: `lint(tree, MeshSpec({...}), ...)`; a plan alone has its own."
    )
    found = lint(TREE, MESH, paths=EVERYTHING)
    assert message(ValueError, lambda: found.without("replicate")).startswith(
        "`without('replicate')`: the codes of findings are unplannable, invalid, "
    )
    bare: Any = [("w", P())]
    assert message(RuleError, lambda: lint(TREE, MESH, paths=bare)).startswith("`paths` must be of type PathRules")


def test_devices_in_the_place_of_a_mesh(as_users_run_it):
    made: Any = plan(TREE, MESH, paths=EVERYTHING)
    for other in (jax.devices(), MESH, MESH.abstract()):
        assert message(MeshError, lambda other=other: made.on(other)) == (
            f"`jax_mesh` must be of type Mesh, not {type(other).__name__}; make one of devices with "
            "`plan.on(plan.mesh.build(devices))`."
        )


def test_an_optimizer_in_the_place_of_its_init(as_users_run_it):
    optimizer: Any = optax.adam(1e-3)
    assert message(LeafTypeError, lambda: follow(optimizer, plan(TREE, MESH, paths=EVERYTHING))) == (
        f"`init` must be a function, not {type(optimizer).__name__}; pass `optimizer.init`."
    )


@pytest.mark.parametrize("ambient", [False, True])
def test_a_bare_spec_at_the_boundary_of_jit(ambient):
    made = plan(TREE, MESH.build(jax.devices()), paths=EVERYTHING)
    assert made.jax_mesh is not None
    spec = P("data")
    wanted = (
        f"`in_shardings` holds the bare spec {spec}; say which mesh it is for: `NamedSharding(plan.jax_mesh, {spec})`."
    )
    # Nothing is ambient: a mesh that happens to be set is not asked.
    with jax.set_mesh(made.jax_mesh) if ambient else contextlib.nullcontext():
        for entry in ((made, spec), (made, {"x": spec})):
            said = message(PlanMismatchError, lambda entry=entry: filter_jit(lambda tree, x: x, in_shardings=entry))
            assert said == wanted
        said = message(PlanMismatchError, lambda: filter_jit(lambda x: x, out_shardings=spec))
        assert said == wanted.replace("in_sh", "out_sh")


def test_leaves_of_the_wrong_type():
    assert message(LeafTypeError, lambda: plan({"a": {"w": P("data")}}, MESH, paths=EVERYTHING)) == (
        "leaf `a/w` is P('data',), but a plan is made from arrays or ShapeDtypeStructs; pass the model's own tree, and "
        "the specs as `paths=PathRules([...])`."
    )
    words = {"a": {"w": np.array(["word"])}}
    assert "leaf `a/w`: a NumPy array of dtype <U4 cannot be put on a device; take it out of the tree." in message(
        LeafTypeError, lambda: plan(words, MESH, paths=EVERYTHING)
    )
    made = plan(TREE, MESH.build(jax.devices()), paths=EVERYTHING)
    assert message(PlanMismatchError, lambda: shard({**TREE, "step": 3}, made)) == (
        "leaf `step` is int 3, but the plan has an array of shape () there; plan the tree that you use."
    )


def test_a_plan_used_with_another_tree():
    made = plan(TREE, MESH.build(jax.devices()), paths=EVERYTHING)
    assert message(PlanMismatchError, lambda: shard({**TREE, "extra": jnp.ones(2)}, made)) == (
        "this tree is not the one that was planned (1 array more, 0 missing): the plan has no `extra`. Plan the tree "
        "that you use."
    )
    assert message(PlanMismatchError, lambda: shard({"embeds": TREE["embed"]}, made)) == (
        "this tree is not the one that was planned (1 array more, 5 missing): the plan has no `embeds`; the tree has "
        "no `decoder/mlp/wi`. Plan the tree that you use."
    )
    assert message(PlanMismatchError, lambda: shard({**TREE, "embed": jnp.ones((64, 8))}, made)) == (
        "leaf `embed` is float32[64, 8], but the plan is for float32[64, 4]; plan the tree that you use."
    )
    assert message(
        PlanMismatchError, lambda: shard({**TREE, "embed": jnp.ones((64, 4), jnp.bfloat16)}, made)
    ).startswith("leaf `embed` is bfloat16[64, 4], but the plan is for float32[64, 4]")

    def train_step(params):
        return params

    assert message(
        PlanMismatchError, lambda: filter_jit(train_step, in_shardings=(made,))({"a": jnp.ones(2)})
    ).endswith(
        "train_step` is not the tree that its plan is for: this tree is not the one that was planned (1 array more, 5 "
        "missing): the plan has no `a`; the tree has no `decoder/mlp/wi`. Plan the tree that you use."
    )
    assert message(PlanMismatchError, lambda: ShardPlan.from_json(made.to_json(), like={"a": jnp.ones(2)})).startswith(
        "this tree is not the one that was planned (1 array more, 5 missing)"
    )


def test_nothing_moves_if_one_leaf_does_not_fit():
    made = plan(TREE, MESH.build(jax.devices()), paths=PathRules([("embed", P("tensor")), (".*", P())]))
    tree = {**TREE, "step": jnp.ones(3)}
    message(PlanMismatchError, lambda: shard(tree, made))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(tree))


def test_a_plan_without_devices():
    made = plan(TREE, MESH, paths=EVERYTHING)
    wanted = "use `plan.on(plan.mesh.build(jax.devices()))`."
    assert message(PlanMismatchError, lambda: shard(TREE, made)).endswith(wanted)
    assert message(PlanMismatchError, lambda: filter_jit(gather, in_shardings=(made,))(TREE)).endswith(wanted)  # pyright: ignore[reportArgumentType]
    assert message(PlanMismatchError, lambda: constrain(jnp.ones(4), P("data"), made)).endswith(wanted)


@pytest.mark.parametrize(
    "axes, wanted",
    [
        ((2, 2, 2), "a mesh axis has a name and a size, as in `MeshSpec({'data': 2, 'fsdp': 2, 'tensor': 2})`."),
        (8, "a mesh axis has a name and a size, as in `MeshSpec({'tensor': 8})`."),
        ("data=2", "a text is read by `MeshSpec.parse('data=2')`."),
    ],
)
def test_a_mesh_without_names_or_as_a_text(axes, wanted, as_users_run_it):
    assert message(MeshError, lambda: MeshSpec(axes)) == f"`MeshSpec({axes!r})`: {wanted}"


@pytest.mark.parametrize(
    "make, given, meant",
    [
        (lambda: MeshSpec(data=2), "data=2", {"data": 2}),
        (lambda: MeshSpec({"data": 2}, tensor=4), "{'data': 2}, tensor=4", {"data": 2, "tensor": 4}),
        (lambda: MeshSpec(), "", {"data": 8}),
    ],
)
def test_a_mesh_whose_axes_are_keywords(make, given, meant, as_users_run_it):
    wanted = f"`MeshSpec({given})`: axes are one mapping, slowest first: `MeshSpec({meant!r})`."
    assert message(MeshError, make) == wanted


def test_pairs_of_adapters_that_are_none(as_users_run_it):
    made = plan(TREE, MESH, paths=EVERYTHING)
    assert message(RuleError, lambda: follow(lambda x: x, made, adapters=cast(Any, ["lora"]))) == (
        '`adapters[0]` is \'lora\'; give pairs, as in `adapters=[("lora_[ab]$", "weight")]`.'
    )


def test_a_plan_is_read_by_path_and_joined_by_key(as_users_run_it):
    made = plan(TREE, MESH, paths=EVERYTHING)
    assert message(UnknownPathError, lambda: made[cast(Any, 0)]) == (
        "`plan[0]`: a plan is read by the path of an array, as in `plan['layers/0/w']`; `plan.leaves` has the arrays "
        "in order."
    )
    assert message(PlanMismatchError, lambda: ShardPlan.join(made, made)) == (
        "`join` needs at least one plan, each with the key of its tree: `ShardPlan.join(params=params_plan, "
        "opt=opt_plan)`."
    )


def test_errors_and_the_main_types_are_named_as_users_import_them():
    kinds = [RuleError, SpecError, ShardPlan, MeshSpec, AxisRules, PathRules]
    assert {kind.__module__ for kind in kinds} == {"shardfx", "shardfx.errors"}
    assert copy.deepcopy(MESH) == MESH
