# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Mistakes in meshes, rules and plans, each with the part of its message that is the fix."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

import shardfx as sfx
from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
)
from tests.house.mistakes import (
    ADAM,
    ALL,
    AXES,
    MESH,
    MODEL,
    OFF,
    OTHER_MESH,
    PLAN,
    RULES,
    SPEC,
    Mistake,
    listing,
    planned,
)


MISTAKES: dict[str, Mistake] = {}
mended_by = listing(MISTAKES)


# Meshes.


@mended_by("give each axis one name")
def an_axis_twice():
    MeshSpec([("data", 2), ("data", 4)])


@mended_by("use a positive integer, or -1")
def size_0():
    MeshSpec({"data": 0})


@mended_by("at most one")
def two_free_sizes():
    MeshSpec({"a": -1, "b": -1})


@mended_by("use a positive integer")
def a_text_as_size():
    MeshSpec({"data": "2"})


@mended_by("use a positive integer")
def a_float_as_size():
    MeshSpec({"data": 2.0})


@mended_by("dict(zip(names, sizes))")
def names_as_sizes():
    MeshSpec((2, 4), ("data", "model"))


@mended_by("`mesh.build(jax.devices())`")
def a_number_of_devices():
    SPEC.build(8)


@mended_by('`jax.config.update("jax_num_cpu_devices", 16)`')
def too_few_devices():
    MeshSpec({"data": 16}).build(jax.devices())


@mended_by("`mesh.build(devices[:4])`")
def too_many_devices():
    MeshSpec({"data": 4}).build(jax.devices())


@mended_by("pass `jax.devices()`")
def no_devices():
    SPEC.build([])


@mended_by("use sizes whose product divides 8")
def sizes_that_do_not_divide():
    MeshSpec({"data": -1, "t": 3}).fit(8)


@mended_by("use one of those")
def an_unknown_axis():
    SPEC.axis_size("model")


@mended_by('"data=-1,fsdp=4,tensor=2"')
def a_size_in_words():
    MeshSpec.parse("data=two")


@mended_by('"data=-1,fsdp=4,tensor=2"')
def semicolons():
    MeshSpec.parse("a=2;b=4")


@mended_by('`MeshSpec({"data": 4, "tensor": 2})`')
def a_dict_as_mesh():
    sfx.plan(MODEL, {"data": 2}, paths=RULES)


@mended_by('`MeshSpec({"data": 4, "tensor": 2})`')
def devices_as_mesh():
    sfx.plan(MODEL, jax.devices(), paths=RULES)


@mended_by("the mesh has ('data',); use one of those")
def dcn_of_no_axis():
    MeshSpec({"data": 2}, dcn={"dataa": 2})


@mended_by("`dcn` must divide the size")
def dcn_that_does_not_divide():
    MeshSpec({"data": 3}, dcn={"data": 2})


@mended_by("`AxisType.Auto`")
def axis_types_as_text():
    MeshSpec({"data": 2}, axis_types="auto")


@mended_by("`AxisType.Auto`")
def axis_types_as_texts():
    MeshSpec({"data": 2}, axis_types={"data": "explicit"})


@mended_by("use one of those")
def axis_types_of_no_axis():
    MeshSpec({"data": 2}, axis_types={"dat": AxisType.Explicit})


@mended_by("give one part the size -1")
def a_split_of_another_size():
    SPEC.split("tensor", {"a": 3, "b": 2})


# Rules.


@mended_by('`(".*", fsdp(...))`')
def no_rules():
    sfx.plan(MODEL, MESH)


@mended_by('or pass `unmatched="replicate"`')
def an_array_without_a_rule():
    sfx.plan(MODEL, MESH, paths=PathRules([("w", P())]))


@mended_by("did you mean 'data'?")
def an_axis_that_the_mesh_lacks():
    planned(("w", P("dat")))


@mended_by("write `P('data',)`")
def a_spec_that_is_too_long():
    planned(("w", P("data", None, "tensor")))


@mended_by("give one per dimension, and `...`")
def too_few_names():
    planned(("w", ("embed",)), axes=AXES)


@mended_by("pass `axes=AxisRules([...])`")
def names_without_axes():
    planned(("w", ("embed", "mlp")))


@mended_by("did you mean 'mlp'?")
def a_misspelled_name():
    planned(("w", ("embed", "mpl")), axes=AXES)


@mended_by("mark those that other trees need with `optional(target)`")
def a_rule_that_never_applies():
    planned(("w", P()), ("norm", P()))


@mended_by("all that it matches (`w`) goes to rule 0 ('.*')")
def a_rule_behind_another():
    planned((".*", P()), ("w", P("data")))


@mended_by("use axes whose product divides 6")
def strict_sizes():
    sfx.plan(
        {"w": jnp.ones((6, 7))},
        MESH,
        paths=PathRules([("w", P("tensor"))]),
        strict=True,
    )


@mended_by("unterminated subpattern at position 1")
def a_regex_with_a_slip():
    PathRules([("w(", P())])


@mended_by("`(regex, target)`")
def a_rule_of_three():
    PathRules([("w", "data", "tensor")])


@mended_by("write `P('data')`")
def a_text_as_target():
    PathRules([("w", "data")])


@mended_by("it must be a PartitionSpec, a tuple of logical names")
def a_number_as_target():
    PathRules([("w", 3)])


@mended_by("`plan(tree, mesh, paths=rules)`")
def rules_by_position():
    sfx.plan(MODEL, MESH, RULES)


@mended_by("`PathRules([...])`")
def a_list_of_rules():
    sfx.plan(MODEL, MESH, paths=[("w", P())])


@mended_by("write `axes=` for them")
def axis_rules_as_paths():
    sfx.plan(MODEL, MESH, paths=AXES)


@mended_by("write `paths=` for them")
def path_rules_as_axes():
    sfx.plan(MODEL, MESH, axes=RULES)


@mended_by("`rules.extend(modes={'decode': []})`")
def an_unknown_mode():
    planned(("w", ("embed", "mlp")), axes=AXES, mode="decode")


@mended_by('use "raise" or "replicate"')
def an_unknown_policy():
    sfx.plan(MODEL, MESH, paths=RULES, unmatched="ignore")


@mended_by("or `None` for a whole subtree")
def names_of_another_tree():
    sfx.plan(MODEL, MESH, names={"w": ("embed", "mlp")}, axes=AXES)


@mended_by("one of device, pinned_host, unpinned_host")
def a_memory_kind():
    sfx.plan(MODEL, MESH, paths=RULES, memory_kinds=[("w", "pinned")])


@mended_by("pass the model's own tree")
def nothing_to_plan():
    sfx.plan(None, MESH, paths=RULES)


@mended_by("`eqx.filter_eval_shape(make, ...)`")
def a_function_to_plan():
    sfx.plan(lambda key: MODEL, MESH, paths=RULES)


@mended_by("write `regex->axes`")
def a_rule_in_text():
    PathRules.parse("w=>data")


@mended_by("write (name, value)")
def axis_rules_of_texts():
    AxisRules(["embed"])


@mended_by("`rules.without('a')`")
def an_alias_of_itself():
    AxisRules([("a", "data")]).with_alias("a", of="a")


@mended_by("use `without('embed')`")
def rules_that_differ():
    AXES.merge(AxisRules([("embed", "tensor")]))


@mended_by("did you mean 'embed'?")
def without_what_is_not_there():
    AXES.without("embd")


@mended_by("use it once")
def an_axis_twice_in_a_rule():
    AxisRules([("a", ("data", "data"))])


@mended_by("give the second a name of its own")
def a_name_twice():
    sfx.resolve(("embed", "embed"), AXES)


@mended_by("write `('embed',)`")
def a_text_as_names():
    sfx.resolve("embed", AXES)


@mended_by("`rules.extend([('emb', None)])`")
def a_name_without_a_rule():
    sfx.resolve(("emb",), AXES, unmatched="raise")


@mended_by("write `P('data')`")
def a_text_as_spec():
    sfx.correct("data", (8,), SPEC)


@mended_by("write `(8,)`")
def a_number_as_shape():
    sfx.correct(P("data"), 8, SPEC)


@mended_by("`MeshSpec({")
def no_mesh():
    sfx.correct(P("data"), (8,), None)


@mended_by("use axes whose product divides 6")
def a_strict_spec():
    sfx.correct(P("tensor"), (6,), SPEC, strict=True)


# Plans.


@mended_by("did you mean `w`?")
def a_misspelled_path():
    PLAN["ww"]


@mended_by("use `plan.on(plan.mesh.build(jax.devices()))`")
def a_plan_without_devices():
    sfx.shard(MODEL, OFF)


@mended_by("plan the tree that you use")
def another_shape():
    sfx.shard({"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, PLAN)


@mended_by("as in `shard(tree, plan)`")
def the_plan_first():
    sfx.shard(PLAN, MODEL)


@mended_by("`shardfx.plan(tree, mesh,")
def a_mesh_as_plan():
    sfx.shard(MODEL, MESH)


@mended_by("pass `optimizer.init`")
def follow_a_plan():
    sfx.follow(PLAN, ADAM.init)


@mended_by("pass `optimizer.init`")
def follow_an_optimizer():
    sfx.follow(ADAM, PLAN)


@mended_by("pass `optimizer.init`")
def follow_a_state():
    sfx.follow(ADAM.init(MODEL), PLAN)


@mended_by("pass what `shardfx.plan(tree, mesh, ...)` returns")
def follow_a_model():
    sfx.follow(ADAM.init, MODEL)


@mended_by("`follow(optimizer.init, plan)`", name="the state under the model's plan")
def the_state_under_the_model_s_plan():
    sfx.shard(ADAM.init(MODEL), PLAN)


@mended_by("make the mesh with `plan.mesh.build(devices)`")
def another_mesh():
    OFF.on(OTHER_MESH)


@mended_by("`plan.on(plan.mesh.build(devices))`")
def a_mesh_without_devices():
    OFF.on(SPEC)


@mended_by("`plan.to_json()`", name="no JSON of a plan")
def no_json_of_a_plan():
    ShardPlan.from_json("{}")


@mended_by("`ShardPlan.join(params=params_plan, opt=opt_plan)`")
def a_join_of_nothing():
    ShardPlan.join()


@mended_by("make both for the same mesh")
def a_join_of_two_meshes():
    ShardPlan.join(a=PLAN, b=sfx.plan(MODEL, OTHER_MESH, paths=ALL))


@mended_by("paths look like `b`")
def select_nothing():
    PLAN.select("norm")


@mended_by("did you mean `w`?")
def replace_a_misspelled_path():
    PLAN.replace("ww", P())


@mended_by("plan with `axes=AxisRules([...])`, or pass a PartitionSpec")
def names_without_rules():
    PLAN.sharding(("batch", None))
