# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedExpression=false
"""Mistakes in arguments, such as their order or their type, each with the part of its
message that is the fix.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import (
    MeshSpec,
    PathRules,
    ShardPlan,
    TreeMap,
    checkpoint,
    chips,
    cost,
    hosts,
    sync,
)
from shardfx.presets.maps import TreeLayout
from tests.house.mistakes import (
    AXES,
    MESH,
    MODEL,
    PLAN,
    RULES,
    SPEC,
    Mistake,
    X,
    listing,
    planned,
    step,
)


MISTAKES: dict[str, Mistake] = {}
mended_by = listing(MISTAKES)

SHARDING = NamedSharding(MESH, P("data"))


# Maps.


@mended_by("write `drop=[path]`")
def a_number_to_drop():
    TreeMap({"w": "w"}, drop=3)


@mended_by("and 3 is none")
def a_number_among_the_dropped():
    TreeMap({"w": "w"}, rest=["v", 3])


@mended_by('as in "query: embed (heads dim)"')
def a_number_as_an_entry_of_a_layout():
    TreeLayout({"w": 3})


# Meshes and rules.


@mended_by("`mesh.fit(len(devices))`")
def devices_to_fit():
    SPEC.fit(jax.devices())


@mended_by("write `dcn={'data': 2}`")
def a_number_as_dcn():
    MeshSpec({"data": 4}, dcn=2)


@mended_by("write '.*.b'")
def a_glob_as_regex():
    PathRules([("*.b", P())])


@mended_by("write 'a/w' in place of 'a\\\\.w'")
def dots_in_a_path():
    rules = PathRules([(r"a\.w", P("data")), ("b", P())])
    sfx.plan({"a": MODEL}, MESH, paths=rules)


@mended_by("write 'a/w' in place of")
def brackets_in_a_path():
    rules = PathRules([(r"\['a'\]\['w'\]", P("data")), ("b", P())])
    sfx.plan({"a": MODEL}, MESH, paths=rules)


@mended_by("a tuple holds names, `('embed', ...)`")
def names_in_a_spec():
    planned(("w", P("embed", "mlp")), axes=AXES)


@mended_by("`fsdp(('data', 'tensor'))`")
def two_axes_of_fsdp():
    sfx.fsdp("data", "tensor")


@mended_by("write the spec, `sharding.spec`")
def a_sharding_as_target():
    PathRules([("w", SHARDING)])


@mended_by("write `sharding.spec`")
def correct_a_sharding():
    sfx.correct(SHARDING, (8,), MESH)


@mended_by("`correct(spec, shape, mesh)`, the spec first")
def correct_a_shape():
    sfx.correct((8, 8), P("data"), MESH)


@mended_by("`field(names=('embed',))`")
def names_by_position():
    sfx.field("embed")


# Plans.


@mended_by("the model comes first, `plan(tree, mesh, ...)`")
def plan_a_mesh():
    sfx.plan(MESH, MODEL, paths=RULES)


@mended_by("`plan.structs` on another mesh")
def plan_a_plan():
    sfx.plan(PLAN, MESH, paths=RULES)


@mended_by("`jax.ShapeDtypeStruct(shape, dtype)`")
def plan_shapes():
    sfx.plan({"w": (8, 8)}, MESH, paths=RULES)


@mended_by("write `2**20` for 1 MiB")
def bytes_in_words():
    sfx.plan(MODEL, MESH, paths=RULES, min_bytes="1MB")


@mended_by("`memory_kinds.items()`")
def a_dict_of_memory_kinds():
    sfx.plan(MODEL, MESH, paths=RULES, memory_kinds={"w": "pinned_host"})


@mended_by("[('.*', 'pinned_host')]")
def one_memory_kind():
    sfx.plan(MODEL, MESH, paths=RULES, memory_kinds="pinned_host")


@mended_by('`plan["layers/0/w"]`')
def a_plan_by_number():
    PLAN[0]


@mended_by("`plan[path].spec`")
def the_sharding_of_a_path():
    PLAN.sharding("w")


@mended_by("`ShardPlan.join(params=plan, opt=opt_plan)`")
def join_to_a_plan():
    PLAN.join(opt=PLAN)


@mended_by("`ShardPlan.join(params=params_plan, opt=opt_plan)`")
def join_by_position():
    ShardPlan.join(PLAN, PLAN)


@mended_by("`ShardPlan.from_json(pathlib.Path('plan.json').read_text())`")
def the_path_of_a_plan():
    ShardPlan.from_json("plan.json")


@mended_by("reads the text that `plan.to_json()` returned, not dict")
def a_plan_as_a_dict():
    ShardPlan.from_json({"format": "shardfx.plan"})


@mended_by("The planned arrays are below `0` in the tree")
def a_list_of_the_tree():
    sfx.shard([MODEL], PLAN)


# Calls.


@mended_by("`constrain(x, names, plan)`")
def constrain_a_spec():
    sfx.constrain(P("data"), X, PLAN)


@mended_by("`jnp.asarray(...)`")
def constrain_a_number():
    sfx.constrain(3.0, P("data"), PLAN)


@mended_by("`P('data')`")
def constrain_by_a_text():
    sfx.constrain(X, "data", PLAN)


@mended_by("`filter_jit(step, in_shardings=(plan, None))`")
def compile_a_result():
    sfx.filter_jit(step(MODEL, X))


@mended_by("`filter_jit(make, out_shardings=plan)(key)`")
def shard_structs():
    sfx.shard(jax.eval_shape(lambda: MODEL), PLAN)


@mended_by("write `gather(tree)`")
def gather_a_plan():
    sfx.gather(PLAN)


@mended_by("make the arrays first")
def gather_structs():
    sfx.gather(PLAN.structs)


@mended_by("pass a path of `report(plan)`")
def explain_a_number():
    sfx.explain(PLAN, 0)


@mended_by("one of error, warning, info")
def an_unknown_severity():
    sfx.lint(PLAN).worst("critical")


# Files.


@mended_by("write `save(path, tree, plan)`")
def save_a_plan():
    checkpoint.save("c", PLAN)


@mended_by("save what the jitted function returns")
def save_inside_jit():
    jax.jit(lambda model: checkpoint.save("c", model))(MODEL)


@mended_by('or "allow" to leave out what the plan lacks')
def an_unknown_policy_of_reading():
    checkpoint.save("c", MODEL)
    checkpoint.load("c", PLAN, unread="ignore")


@mended_by("write `map=TreeMap({...})`")
def a_dict_as_map():
    checkpoint.save("c", MODEL)
    checkpoint.load("c", PLAN, map={"w": "w"})


@mended_by('write `TreeMap({"w": "model.w"})`')
def a_map_of_a_list():
    TreeMap(["w"])


@mended_by("start anew if `manager.latest()` is `None`")
def load_before_a_save():
    checkpoint.Manager("m").load(PLAN)


@mended_by("`plan_reads(read_index(path), plan)`")
def reads_of_a_plan():
    checkpoint.plan_reads(PLAN, "c")


# Costs, hosts and transfers.


@mended_by('write `chip="v5e"`')
def a_number_as_chip():
    chips.find(8)


@mended_by("has 2 arguments here, numbered from 0")
def an_argument_that_is_not_there():
    cost.policy(step, MODEL, X, argnums=5)


@mended_by("as in `plan_transfer(src, dst)`")
def transfer_arrays():
    sync.plan_transfer(MODEL, PLAN)


@mended_by("as in `global_batch(local, plan)`")
def a_batch_under_a_sharding():
    hosts.global_batch(np.ones((8, 4)), SHARDING)


@mended_by("`regular_grid(spec, num_chunks)`")
def the_grid_of_a_spec():
    hosts.grid_of(SPEC)


@mended_by("`owned(shape, sharding, process_index)`")
def owned_the_sharding_first():
    hosts.owned(SHARDING, (8, 8), 0)


@mended_by("compares a ShardPlan or a TreeMap, not dict")
def compare_trees_of_hosts():
    hosts.assert_same_plan(MODEL)


@mended_by("write `plan.specs`")
def specs_of_a_plan():
    sfx.specs_of(PLAN)


@mended_by('call it with the mesh axis: `fsdp("data")`')
def a_strategy_that_is_not_called():
    sfx.PathRules([("w", sfx.fsdp)])
