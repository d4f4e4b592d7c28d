# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Mistakes of a first day, made from the pages alone, each with the part of its message
that is the fix.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, PathRules, auto, chips, hosts
from tests.house.mistakes import (
    AXES,
    MESH,
    MODEL,
    PLAN,
    Mistake,
    X,
    listing,
    planned,
    step,
)


MISTAKES: dict[str, Mistake] = {}
mended_by = listing(MISTAKES)

ROWS = jax.NamedSharding(MESH, P(("data", "tensor")))
NETWORK = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
NETWORK_PLAN = sfx.plan(NETWORK, MESH, unmatched="replicate")


# Rules.


@mended_by("in a list: `PathRules([(regex, target)])`")
def a_rule_without_its_list():
    PathRules(("w", P("data")))


@mended_by("for several axes write a tuple, ('data', 'tensor')")
def two_axes_in_one_text():
    planned(("w", P("data,tensor")))


@mended_by("move them ahead of the rules that shadow them")
def the_general_rule_first():
    sfx.plan(MODEL, MESH, paths=PathRules([(".*", P()), ("w", P("data"))]))


@mended_by("a rule is a pair `(name, mesh axis)`")
def axis_rules_the_other_way_round():
    swapped = AxisRules([("data", "embed"), ("tensor", "mlp")])
    planned(("w", ("embed", "mlp")), axes=swapped)


@mended_by("`[(name, value)]`")
def a_mode_without_its_list():
    AxisRules(AXES.rules, modes={"decode": ("mlp", None)})


@mended_by("`paths=PathRules([(regex, names)])`")
def names_by_path():
    sfx.plan(NETWORK, MESH, names={"layers/0/weight": ("embed", "mlp")}, axes=AXES)


@mended_by("write `field(names=...)`")
def a_field_by_name():
    sfx.field(name=("embed", "mlp"))


@mended_by("names are a tuple, `('embed', ...)`")
def a_logical_name_in_a_spec():
    plan = sfx.plan(MODEL, MESH, names={"w": ("embed", None), "b": ()}, axes=AXES)
    sfx.constrain(X, P("embed"), plan)


# Compiling.


@mended_by("`check=shardfx.testing.verify`")
def a_check_by_name():
    sfx.filter_jit(step, check="verify")


@mended_by("pass the function that makes it")
def a_model_in_place_of_its_function():
    sfx.filter_jit(NETWORK, out_shardings=NETWORK_PLAN)(jax.random.key(0))


@mended_by("One plan is for all arguments: give a tuple")
def one_plan_for_all_arguments():
    sfx.filter_jit(step, in_shardings=PLAN)(MODEL, X)


@mended_by("Give a tuple one entry for each of its parts")
def two_entries_for_three_results():
    three = lambda model, x: (model, x, x)
    sfx.filter_jit(three, out_shardings=(PLAN, None))(MODEL, X)


@mended_by("size 12 is not divisible by `data` (2) x `tensor` (4)")
def a_batch_that_does_not_divide():
    sfx.filter_jit(step, in_shardings=(PLAN, ROWS))(MODEL, jnp.ones((12, 8)))


@mended_by("the sharding of a batch is `plan.sharding(names)`")
def a_batch_by_the_plan_of_a_model():
    sfx.shard(X, PLAN)


@mended_by("or the arguments are in another order")
def arguments_in_another_order():
    sfx.filter_jit(step, in_shardings=(PLAN, None))(X, MODEL)


@mended_by("Copy one of them first")
def one_array_read_and_donated():
    once = jnp.zeros(10)
    sfx.filter_jit(lambda x, y: x + y, donate="x")(once, once)


# Other calls.


@mended_by("It comes first: `plan(tree, devices)`")
def auto_plan_swapped():
    auto.plan("tpu:v5e:4x4", MODEL)


@mended_by('`"tpu:v5e:4x4"`')
def a_platform_for_a_chip():
    chips.find("tpu")


@mended_by("`hosts.grid_of(mesh)`")
def a_mesh_for_a_grid():
    hosts.data_layout(16, "data", MESH, 0)
