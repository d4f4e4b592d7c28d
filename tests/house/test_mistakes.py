# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""A hundred mistakes, each with the part of its message that is the fix."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfx as sfx
from shardfx import (
    AxisRules,
    From,
    MeshSpec,
    PathRules,
    ShardPlan,
    TreeMap,
    auto,
    checkpoint,
    cost,
)


SPEC = MeshSpec({"data": 2, "tensor": 4})
MESH = SPEC.build(jax.devices())
OTHER_MESH = MeshSpec({"x": 8}).build(jax.devices())
MODEL = {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}
RULES = PathRules([("w", P("data")), ("b", P())])
ALL = PathRules([(".*", P())])
PLAN = sfx.plan(MODEL, MESH, paths=RULES)
OFF = sfx.plan(MODEL, SPEC, paths=RULES)
AXES = AxisRules([("embed", "data"), ("mlp", "tensor")])
ADAM = optax.adam(1e-3)
X = jnp.ones((8, 8))


def step(model, x):
    return (x @ model["w"]).sum()


def planned(*rules, **others):
    return sfx.plan(MODEL, MESH, paths=PathRules([*rules, ("b", P())]), **others)


def loaded(tree, **others):
    checkpoint.save("c", MODEL, PLAN)
    plan = sfx.plan(tree, MESH, paths=ALL, unused="allow")
    return checkpoint.load("c", plan, **others)


MISTAKES = {
    # Meshes.
    "an axis twice": (
        lambda: MeshSpec([("data", 2), ("data", 4)]),
        "give each axis one name",
    ),
    "size 0": (lambda: MeshSpec({"data": 0}), "use a positive integer, or -1"),
    "two free sizes": (lambda: MeshSpec({"a": -1, "b": -1}), "at most one"),
    "a text as size": (lambda: MeshSpec({"data": "2"}), "use a positive integer"),
    "a float as size": (lambda: MeshSpec({"data": 2.0}), "use a positive integer"),
    "names as sizes": (
        lambda: MeshSpec((2, 4), ("data", "model")),
        "dict(zip(names, sizes))",
    ),
    "a number of devices": (lambda: SPEC.build(8), "`mesh.build(jax.devices())`"),
    "too few devices": (
        lambda: MeshSpec({"data": 16}).build(jax.devices()),
        '`jax.config.update("jax_num_cpu_devices", 16)`',
    ),
    "too many devices": (
        lambda: MeshSpec({"data": 4}).build(jax.devices()),
        "`mesh.build(devices[:4])`",
    ),
    "no devices": (lambda: SPEC.build([]), "pass `jax.devices()`"),
    "sizes that do not divide": (
        lambda: MeshSpec({"data": -1, "t": 3}).fit(8),
        "use sizes whose product divides 8",
    ),
    "an unknown axis": (lambda: SPEC.axis_size("model"), "use one of those"),
    "a size in words": (
        lambda: MeshSpec.parse("data=two"),
        '"data=-1,fsdp=4,tensor=2"',
    ),
    "semicolons": (lambda: MeshSpec.parse("a=2;b=4"), '"data=-1,fsdp=4,tensor=2"'),
    "a dict as mesh": (
        lambda: sfx.plan(MODEL, {"data": 2}, paths=RULES),
        '`MeshSpec({"data": 4, "tensor": 2})`',
    ),
    "devices as mesh": (
        lambda: sfx.plan(MODEL, jax.devices(), paths=RULES),
        '`MeshSpec({"data": 4, "tensor": 2})`',
    ),
    "dcn of no axis": (
        lambda: MeshSpec({"data": 2}, dcn={"dataa": 2}),
        "the mesh has ('data',); use one of those",
    ),
    "dcn that does not divide": (
        lambda: MeshSpec({"data": 3}, dcn={"data": 2}),
        "`dcn` must divide the size",
    ),
    "axis types as text": (
        lambda: MeshSpec({"data": 2}, axis_types="auto"),
        "`AxisType.Auto`",
    ),
    "axis types as texts": (
        lambda: MeshSpec({"data": 2}, axis_types={"data": "explicit"}),
        "`AxisType.Auto`",
    ),
    "axis types of no axis": (
        lambda: MeshSpec({"data": 2}, axis_types={"dat": AxisType.Explicit}),
        "use one of those",
    ),
    "a split of another size": (
        lambda: SPEC.split("tensor", {"a": 3, "b": 2}),
        "give one part the size -1",
    ),
    # Rules.
    "no rules": (lambda: sfx.plan(MODEL, MESH), '`(".*", fsdp(...))`'),
    "an array without a rule": (
        lambda: sfx.plan(MODEL, MESH, paths=PathRules([("w", P())])),
        'or pass `unmatched="replicate"`',
    ),
    "an axis that the mesh lacks": (
        lambda: planned(("w", P("dat"))),
        "did you mean 'data'?",
    ),
    "a spec that is too long": (
        lambda: planned(("w", P("data", None, "tensor"))),
        "write `P('data',)`",
    ),
    "too few names": (
        lambda: planned(("w", ("embed",)), axes=AXES),
        "give one per dimension, and `...`",
    ),
    "names without axes": (
        lambda: planned(("w", ("embed", "mlp"))),
        "pass `axes=AxisRules([...])`",
    ),
    "a misspelled name": (
        lambda: planned(("w", ("embed", "mpl")), axes=AXES),
        "did you mean 'mlp'?",
    ),
    "a rule that never applies": (
        lambda: planned(("w", P()), ("norm", P())),
        "mark those that other trees need with `optional(target)`",
    ),
    "a rule behind another": (
        lambda: planned((".*", P()), ("w", P("data"))),
        "all that it matches (`w`) goes to rule 0 ('.*')",
    ),
    "strict sizes": (
        lambda: sfx.plan(
            {"w": jnp.ones((6, 7))},
            MESH,
            paths=PathRules([("w", P("tensor"))]),
            strict=True,
        ),
        "use axes whose product divides 6",
    ),
    "a regex with a slip": (
        lambda: PathRules([("w(", P())]),
        "unterminated subpattern at position 1",
    ),
    "a rule of three": (
        lambda: PathRules([("w", "data", "tensor")]),
        "`(regex, target)`",
    ),
    "a text as target": (
        lambda: PathRules([("w", "data")]),
        "write `PartitionSpec('data')`",
    ),
    "a number as target": (
        lambda: PathRules([("w", 3)]),
        "it must be a PartitionSpec, a tuple of logical names",
    ),
    "rules by position": (
        lambda: sfx.plan(MODEL, MESH, RULES),
        "`plan(tree, mesh, paths=rules)`",
    ),
    "a list of rules": (
        lambda: sfx.plan(MODEL, MESH, paths=[("w", P())]),
        "`PathRules([...])`",
    ),
    "axis rules as paths": (
        lambda: sfx.plan(MODEL, MESH, paths=AXES),
        "write `axes=` for them",
    ),
    "path rules as axes": (
        lambda: sfx.plan(MODEL, MESH, axes=RULES),
        "write `paths=` for them",
    ),
    "an unknown mode": (
        lambda: planned(("w", ("embed", "mlp")), axes=AXES, mode="decode"),
        "`rules.extend(modes={'decode': []})`",
    ),
    "an unknown policy": (
        lambda: sfx.plan(MODEL, MESH, paths=RULES, unmatched="ignore"),
        'use "raise" or "replicate"',
    ),
    "names of another tree": (
        lambda: sfx.plan(MODEL, MESH, names={"w": ("embed", "mlp")}, axes=AXES),
        "or `None` for a whole subtree",
    ),
    "a memory kind": (
        lambda: sfx.plan(MODEL, MESH, paths=RULES, memory_kinds=[("w", "pinned")]),
        "one of device, pinned_host, unpinned_host",
    ),
    "nothing to plan": (
        lambda: sfx.plan(None, MESH, paths=RULES),
        "pass the model's own tree",
    ),
    "a function to plan": (
        lambda: sfx.plan(lambda key: MODEL, MESH, paths=RULES),
        "`eqx.filter_eval_shape(make, ...)`",
    ),
    "a rule in text": (lambda: PathRules.parse("w=>data"), "write `regex->axes`"),
    "axis rules of texts": (lambda: AxisRules(["embed"]), "write (name, value)"),
    "an alias of itself": (
        lambda: AxisRules([("a", "data")]).with_alias("a", of="a"),
        "`rules.without('a')`",
    ),
    "rules that differ": (
        lambda: AXES.merge(AxisRules([("embed", "tensor")])),
        "use `without('embed')`",
    ),
    "without what is not there": (
        lambda: AXES.without("embd"),
        "did you mean 'embed'?",
    ),
    "an axis twice in a rule": (
        lambda: AxisRules([("a", ("data", "data"))]),
        "use it once",
    ),
    "a name twice": (
        lambda: sfx.resolve(("embed", "embed"), AXES),
        "give the second a name of its own",
    ),
    "a text as names": (lambda: sfx.resolve("embed", AXES), "write `('embed',)`"),
    "a name without a rule": (
        lambda: sfx.resolve(("emb",), AXES, unmatched="raise"),
        "`rules.extend([('emb', None)])`",
    ),
    "a text as spec": (
        lambda: sfx.correct("data", (8,), SPEC),
        "write `PartitionSpec('data')`",
    ),
    "a number as shape": (lambda: sfx.correct(P("data"), 8, SPEC), "write `(8,)`"),
    "no mesh": (lambda: sfx.correct(P("data"), (8,), None), "`MeshSpec({"),
    "a strict spec": (
        lambda: sfx.correct(P("tensor"), (6,), SPEC, strict=True),
        "use axes whose product divides 6",
    ),
    # Plans.
    "a misspelled path": (lambda: PLAN["ww"], "did you mean `w`?"),
    "a plan without devices": (
        lambda: sfx.shard(MODEL, OFF),
        "use `plan.on(plan.mesh.build(jax.devices()))`",
    ),
    "another shape": (
        lambda: sfx.shard({"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, PLAN),
        "plan the tree that you use",
    ),
    "the plan first": (lambda: sfx.shard(PLAN, MODEL), "as in `shard(tree, plan)`"),
    "a mesh as plan": (lambda: sfx.shard(MODEL, MESH), "`shardfx.plan(tree, mesh,"),
    "follow a plan": (lambda: sfx.follow(PLAN, ADAM.init), "pass `optimizer.init`"),
    "follow an optimizer": (lambda: sfx.follow(ADAM, PLAN), "pass `optimizer.init`"),
    "follow a state": (
        lambda: sfx.follow(ADAM.init(MODEL), PLAN),
        "pass `optimizer.init`",
    ),
    "follow a model": (
        lambda: sfx.follow(ADAM.init, MODEL),
        "pass what `shardfx.plan(tree, mesh, ...)` returns",
    ),
    "the state under the model's plan": (
        lambda: sfx.shard(ADAM.init(MODEL), PLAN),
        "`follow(optimizer.init, plan)`",
    ),
    "another mesh": (
        lambda: OFF.on(OTHER_MESH),
        "make the mesh with `plan.mesh.build(devices)`",
    ),
    "a mesh without devices": (
        lambda: OFF.on(SPEC),
        "`plan.on(plan.mesh.build(devices))`",
    ),
    "no JSON of a plan": (lambda: ShardPlan.from_json("{}"), "`plan.to_json()`"),
    "a join of nothing": (
        lambda: ShardPlan.join(),
        "`ShardPlan.join(params=params_plan, opt=opt_plan)`",
    ),
    "a join of two meshes": (
        lambda: ShardPlan.join(a=PLAN, b=sfx.plan(MODEL, OTHER_MESH, paths=ALL)),
        "make both for the same mesh",
    ),
    "select nothing": (lambda: PLAN.select("norm"), "paths look like `b`"),
    "replace a misspelled path": (
        lambda: PLAN.replace("ww", P()),
        "did you mean `w`?",
    ),
    "names without rules": (
        lambda: PLAN.sharding(("batch", None)),
        "plan with `axes=AxisRules([...])`, or pass a PartitionSpec",
    ),
    # JAX's functions.
    "in_shardings": (
        lambda: jax.jit(lambda x: x, in_shardings=PLAN)(MODEL),
        "write `plan.shardings`",
    ),
    "out_shardings": (
        lambda: jax.jit(lambda x: x, out_shardings=PLAN)(MODEL),
        "write `plan.shardings`",
    ),
    "device_put": (lambda: jax.device_put(MODEL, PLAN), "write `plan.shardings`"),
    "tree.map": (
        lambda: jax.tree.map(lambda x, s: x, MODEL, PLAN),
        "write `plan.shardings`",
    ),
    # Compiling.
    "donate_argnums": (
        lambda: sfx.filter_jit(step, donate_argnums=(0,)),
        "write `donate=`",
    ),
    "static_argnums": (
        lambda: sfx.filter_jit(step, static_argnums=(0,)),
        "static by itself",
    ),
    "a misspelled argument": (
        lambda: sfx.filter_jit(step, in_sharding=PLAN),
        "it has `in_shardings`",
    ),
    "a parameter to donate": (
        lambda: sfx.filter_jit(step, donate="mdl")(MODEL, X),
        'True or "all"',
    ),
    "too many entries": (
        lambda: sfx.filter_jit(step, in_shardings=(PLAN, None, None))(MODEL, X),
        "give one for each, or name parameters in a dict",
    ),
    "a spec as sharding": (
        lambda: sfx.filter_jit(step, in_shardings=(PLAN, P("data")))(MODEL, X),
        "`NamedSharding(plan.jax_mesh, spec)`",
    ),
    "names as sharding": (
        lambda: sfx.filter_jit(step, in_shardings=(PLAN, ("batch", None)))(MODEL, X),
        "`plan.sharding(names)`",
    ),
    "a call without devices": (
        lambda: sfx.filter_jit(step, in_shardings=(OFF, None))(MODEL, X),
        "`plan.on(plan.mesh.build(jax.devices()))`",
    ),
    "another result": (
        lambda: sfx.filter_jit(lambda m: m["w"], out_shardings=PLAN)(MODEL),
        "Plan the tree that you use",
    ),
    "constrain by a plan": (
        lambda: sfx.constrain(X, PLAN, ("embed", None)),
        "as in `constrain(x, names, plan)`",
    ),
    "constrain a tree": (
        lambda: sfx.constrain(MODEL, P("data"), PLAN),
        "map it over a tree with `jax.tree.map`",
    ),
    "names of no rules": (
        lambda: sfx.constrain(X, ("embed", None), PLAN),
        "plan with `axes=AxisRules([...])`",
    ),
    "a spec of three": (
        lambda: sfx.constrain(X, P("data", None, None), PLAN),
        "`jax.vmap(..., spmd_axis_name=...)`",
    ),
    # Moving, saving and loading.
    "reshard a plan": (lambda: sfx.reshard(PLAN, MODEL), "`reshard(tree, plan)`"),
    "reshard to a mesh": (
        lambda: sfx.reshard(MODEL, MESH),
        "use `NamedSharding(mesh, spec)`",
    ),
    "reshard a part": (
        lambda: sfx.reshard(MODEL, {"w": PLAN.shardings["w"]}),
        "give a plan of this tree, one sharding",
    ),
    "no checkpoint": (
        lambda: checkpoint.load("nothing", PLAN),
        "give a directory, or a .safetensors file",
    ),
    "load the plan first": (
        lambda: checkpoint.load(PLAN, "c"),
        "write `load(path, plan)`",
    ),
    "save the tree first": (
        lambda: checkpoint.save(MODEL, "c"),
        "write `save(path, tree, plan)`",
    ),
    "load without devices": (
        lambda: (checkpoint.save("c", MODEL), checkpoint.load("c", OFF)),
        "`plan.on(plan.mesh.build(jax.devices()))`",
    ),
    "load to a mesh": (
        lambda: (checkpoint.save("c", MODEL), checkpoint.load("c", MESH)),
        "Make a plan with `shardfx.plan(tree, mesh, ...)`",
    ),
    "load another shape": (
        lambda: loaded({"w": jnp.ones((4, 4)), "b": jnp.ones(8)}),
        "`checkpoint.structs(index)`",
    ),
    "load another dtype": (
        lambda: loaded({"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(8)}),
        'pass `dtype="plan"`',
    ),
    "load a part": (lambda: loaded({"w": jnp.ones((8, 8))}), 'pass `unread="allow"`'),
    "load more": (
        lambda: loaded({**MODEL, "v": jnp.ones(8)}),
        "load the others by `plan.select(...)`",
    ),
    "save again": (
        lambda: [checkpoint.save("c", MODEL) for _ in range(2)],
        "save to a new name",
    ),
    "save under a mesh": (
        lambda: checkpoint.save("c", MODEL, MESH),
        "what `shardfx.plan(tree, mesh, ...)` makes, or no plan",
    ),
    "a step in words": (
        lambda: checkpoint.Manager("m").save("last", MODEL),
        "`int(step)`",
    ),
    "a map from nothing": (
        lambda: TreeMap({"w": From("ww")}).apply(MODEL),
        "the source has no `ww`; near `w`",
    ),
    "a map of numbers": (lambda: TreeMap({"w": 3}), "to a `From` or to a path"),
    # Costs, searches and what is seen.
    "a step that was called": (
        lambda: cost.estimate(step(MODEL, X), MODEL, X),
        "pass the function that is jitted",
    ),
    "a misspelled chip": (
        lambda: cost.fit(step, PLAN.structs, X, chip="v5ee"),
        "did you mean v5e",
    ),
    "traffic of a function": (
        lambda: cost.traffic(step),
        "`filter_jit(step, ...).lower(...).compile()`",
    ),
    "devices that are not": (
        lambda: auto.search(step, MODEL, X, devices="tpu:v9:2x2"),
        "did you mean v7x",
    ),
    "explain a misspelled path": (
        lambda: sfx.explain(PLAN, "ww"),
        "did you mean `w`?",
    ),
    "lint without a mesh": (
        lambda: sfx.lint(MODEL),
        "`lint(tree, MeshSpec({...}), ...)`",
    ),
    "report of a tree": (
        lambda: sfx.report(MODEL),
        "pass what `shardfx.plan(tree, mesh, ...)` returns",
    ),
    "diff of trees": (
        lambda: sfx.diff(MODEL, MODEL),
        "pass what `shardfx.plan(tree, mesh, ...)` returns",
    ),
}


def test_there_are_a_hundred():
    assert len(MISTAKES) >= 100


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_a_mistake_has_the_fix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, fix = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, KeyError), match=re.escape(fix)):
        call()
