# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Mistakes in calls with plans, each with the part of its message that is the fix."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import (
    From,
    TreeMap,
    auto,
    checkpoint,
    cost,
)
from tests.house.mistakes import (
    MESH,
    MODEL,
    OFF,
    PLAN,
    Mistake,
    X,
    listing,
    loaded,
    step,
)


MISTAKES: dict[str, Mistake] = {}
mended_by = listing(MISTAKES)


# JAX's functions.


@mended_by("write `plan.shardings`", name="in_shardings")
def in_shardings():
    jax.jit(lambda x: x, in_shardings=PLAN)(MODEL)


@mended_by("write `plan.shardings`", name="out_shardings")
def out_shardings():
    jax.jit(lambda x: x, out_shardings=PLAN)(MODEL)


@mended_by("write `plan.shardings`", name="device_put")
def device_put():
    jax.device_put(MODEL, PLAN)


# JAX 0.9 names the value, and not its type, which has the fix.
_IN_TREE_MAP = "write `plan.shardings`"
if jax.__version_info__ < (0, 10):
    _IN_TREE_MAP = "got ShardPlan"


@mended_by(_IN_TREE_MAP, name="tree.map")
def tree_map():
    jax.tree.map(lambda x, s: x, MODEL, PLAN)


# Compiling.


@mended_by("write `donate=`", name="donate_argnums")
def donate_argnums():
    sfx.filter_jit(step, donate_argnums=(0,))


@mended_by("static by itself", name="static_argnums")
def static_argnums():
    sfx.filter_jit(step, static_argnums=(0,))


@mended_by("it has `in_shardings`")
def a_misspelled_argument():
    sfx.filter_jit(step, in_sharding=PLAN)


@mended_by('True or "all"')
def a_parameter_to_donate():
    sfx.filter_jit(step, donate="mdl")(MODEL, X)


@mended_by("give one for each, or name parameters in a dict")
def too_many_entries():
    sfx.filter_jit(step, in_shardings=(PLAN, None, None))(MODEL, X)


@mended_by("`NamedSharding(plan.jax_mesh, spec)`")
def a_spec_as_sharding():
    sfx.filter_jit(step, in_shardings=(PLAN, P("data")))(MODEL, X)


@mended_by("`plan.sharding(names)`")
def names_as_sharding():
    sfx.filter_jit(step, in_shardings=(PLAN, ("batch", None)))(MODEL, X)


@mended_by("`plan.on(plan.mesh.build(jax.devices()))`")
def a_call_without_devices():
    sfx.filter_jit(step, in_shardings=(OFF, None))(MODEL, X)


@mended_by("Plan the tree that you use")
def another_result():
    sfx.filter_jit(lambda m: m["w"], out_shardings=PLAN)(MODEL)


@mended_by("as in `constrain(x, names, plan)`")
def constrain_by_a_plan():
    sfx.constrain(X, PLAN, ("embed", None))


@mended_by("map it over a tree with `jax.tree.map`")
def constrain_a_tree():
    sfx.constrain(MODEL, P("data"), PLAN)


@mended_by("plan with `axes=AxisRules([...])`")
def names_of_no_rules():
    sfx.constrain(X, ("embed", None), PLAN)


@mended_by("`jax.vmap(..., spmd_axis_name=...)`")
def a_spec_of_three():
    sfx.constrain(X, P("data", None, None), PLAN)


# Moving, saving and loading.


@mended_by("`reshard(tree, plan)`")
def reshard_a_plan():
    sfx.reshard(PLAN, MODEL)


@mended_by("use `NamedSharding(mesh, spec)`")
def reshard_to_a_mesh():
    sfx.reshard(MODEL, MESH)


@mended_by("give a plan of this tree, one sharding")
def reshard_a_part():
    sfx.reshard(MODEL, {"w": PLAN.shardings["w"]})


@mended_by("give a directory, or a .safetensors file")
def no_checkpoint():
    checkpoint.load("nothing", PLAN)


@mended_by("write `load(path, plan)`")
def load_the_plan_first():
    checkpoint.load(PLAN, "c")


@mended_by("write `save(path, tree, plan)`")
def save_the_tree_first():
    checkpoint.save(MODEL, "c")


@mended_by("`plan.on(plan.mesh.build(jax.devices()))`")
def load_without_devices():
    checkpoint.save("c", MODEL)
    checkpoint.load("c", OFF)


@mended_by("Make a plan with `shardfx.plan(tree, mesh, ...)`")
def load_to_a_mesh():
    checkpoint.save("c", MODEL)
    checkpoint.load("c", MESH)


@mended_by("`checkpoint.structs(index)`")
def load_another_shape():
    loaded({"w": jnp.ones((4, 4)), "b": jnp.ones(8)})


@mended_by('pass `dtype="plan"`')
def load_another_dtype():
    loaded({"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(8)})


@mended_by('pass `unread="allow"`')
def load_a_part():
    loaded({"w": jnp.ones((8, 8))})


@mended_by("load the others by `plan.select(...)`")
def load_more():
    loaded({**MODEL, "v": jnp.ones(8)})


@mended_by("save to a new name")
def save_again():
    [checkpoint.save("c", MODEL) for _ in range(2)]


@mended_by("what `shardfx.plan(tree, mesh, ...)` makes, or no plan")
def save_under_a_mesh():
    checkpoint.save("c", MODEL, MESH)


@mended_by("`int(step)`")
def a_step_in_words():
    checkpoint.Manager("m").save("last", MODEL)


@mended_by("the source has no `ww`; near `w`")
def a_map_from_nothing():
    TreeMap({"w": From("ww")}).apply(MODEL)


@mended_by("to a `From` or to a path")
def a_map_of_numbers():
    TreeMap({"w": 3})


# Costs, searches and what is seen.


@mended_by("pass the function that is jitted")
def a_step_that_was_called():
    cost.estimate(step(MODEL, X), MODEL, X)


@mended_by("did you mean v5e")
def a_misspelled_chip():
    cost.fit(step, PLAN.structs, X, chip="v5ee")


@mended_by("`filter_jit(step, ...).lower(...).compile()`")
def traffic_of_a_function():
    cost.traffic(step)


@mended_by("did you mean v7x")
def devices_that_are_not():
    auto.search(step, MODEL, X, devices="tpu:v9:2x2")


@mended_by("did you mean `w`?")
def explain_a_misspelled_path():
    sfx.explain(PLAN, "ww")


@mended_by("`lint(tree, MeshSpec({...}), ...)`")
def lint_without_a_mesh():
    sfx.lint(MODEL)


@mended_by("pass what `shardfx.plan(tree, mesh, ...)` returns")
def report_of_a_tree():
    sfx.report(MODEL)


@mended_by("pass what `shardfx.plan(tree, mesh, ...)` returns")
def diff_of_trees():
    sfx.diff(MODEL, MODEL)
