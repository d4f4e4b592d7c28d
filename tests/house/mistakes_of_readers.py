# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Mistakes in what is loaded, searched and shown, each with the part of its message
that is the fix.
"""

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx import AxisRules, auto, checkpoint, cost
from tests.house.mistakes import (
    ADAM,
    ALL,
    MESH,
    MODEL,
    Mistake,
    X,
    listing,
    step,
)


MISTAKES: dict[str, Mistake] = {}
mended_by = listing(MISTAKES)

LAYERS = {f"layer{i}": {"w": jnp.ones((8, 8))} for i in range(20)}
STACK = {"layers": [{"w": jnp.ones((8, 8))} for _ in range(3)]}


def planned_whole(tree):
    return sfx.plan(tree, MESH, paths=ALL)


def products(params, x):
    return x @ params["w"]


def train(params, state, x):
    grads = jax.grad(step)(params, x)
    return jax.tree.map(jnp.subtract, params, grads), state


# Loading.


@mended_by('load `ShardPlan.join(model=plan)` with `unread="allow"`')
def the_plan_of_a_part():
    checkpoint.save("c", {"model": LAYERS})
    checkpoint.load("c", planned_whole(LAYERS))


@mended_by("load it by the plan of that part")
def the_plan_of_more():
    checkpoint.save("c", LAYERS)
    checkpoint.load("c", planned_whole({"model": LAYERS}))


@mended_by("and so for 19 more leaves: 'layer1/v'")
def one_cause_for_all_leaves():
    checkpoint.save("c", LAYERS)
    tree = {name: {"v": layer["w"]} for name, layer in LAYERS.items()}
    checkpoint.load("c", planned_whole(tree))


@mended_by("and so for 19 more leaves: 'layer1/w'")
def one_shape_for_all_leaves():
    checkpoint.save("c", LAYERS)
    tree = {name: {"w": jnp.ones((4, 8))} for name in LAYERS}
    checkpoint.load("c", planned_whole(tree))


# Costs and searches.


@mended_by("pass the function that `jax.grad` differentiates")
def a_policy_of_a_step():
    cost.policy(train, MODEL, ADAM.init(MODEL), X)


@mended_by("reduce it: `jnp.mean(loss(...))`")
def a_policy_of_many_numbers():
    cost.policy(products, MODEL, X)


@mended_by("pass `has_aux=True`")
def a_policy_without_has_aux():
    cost.policy(lambda model, x: (step(model, x), x), MODEL, X)


@mended_by("`policy(loss, *args)`")
def a_policy_of_a_number():
    cost.policy(step(MODEL, X), MODEL, X)


@mended_by("`params = shardfx.shard(params, plan)`")
def arguments_that_are_not_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    rules = AxisRules([("batch", "data")])
    jax.jit(auto.constrain_step(step, mesh, rules))(MODEL, X)


# What is seen.


@mended_by("write a regex: 'layers/[^/]+/w'")
def explain_a_glob():
    sfx.explain(planned_whole(STACK), "layers/*/w")


@mended_by("write a regex: '[^/]+/w'")
def explain_what_is_no_regex():
    sfx.explain(planned_whole(STACK), "*/w")
