from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    follow,
    fsdp,
    plan,
)
from shardfx.errors import RuleError
from tests.plan.followed_plans import HEADS, MESH, SMALL, SMALL_PLAN
from tests.structs import struct


def train_state(model):
    return {
        "model": model,
        "opt": ADAM(eqx.filter(model, eqx.is_array)),
        "step": jnp.zeros((), jnp.int32),
    }


def t5x_adafactor(params: Any) -> Any:
    """A state with the leaves of T5X's own Adafactor: the statistics are below the path
    of the parameter.
    """

    def leaf(x):
        return {
            "m": jnp.zeros(x.shape),
            "v": jnp.zeros((1,)),
            "v_row": jnp.zeros(x.shape[:1]),
        }

    return {
        "step": jnp.zeros((), jnp.int32),
        "param_states": jax.tree.map(leaf, params),
    }


NAMED = plan({"w": struct(8, 6)}, MESH, names={"w": ("heads", "embed")}, axes=HEADS)
BUFFERS = AxisRules([("buffer", "data")])
GALORE = optax.contrib.galore(1e-3, rank=4).init
DECIDE = PathRules(
    [("projector/.*w", P("fsdp")), ("[mn]u/.*w", (..., "mlp")), ("", P())]
)
FREE = plan(SMALL, MESH, paths=PathRules.parse("w->None.tensor, b->None"))
LEFT = plan(
    {"w": struct(8, 8)}, MESH, paths=PathRules([("w", P(P.UNCONSTRAINED, "data"))])
)
EACH = {
    "a": struct(6, 4),
    "b": struct(12),
    "c": struct(4, 2),
    "d": struct(5, 3),
}
WHOLE = plan(EACH, MeshSpec({"x": 2, "y": 4}), paths=PathRules.parse(".*->replicate"))
BASE_RULES = PathRules([("q", P(None, "fsdp", "tensor")), ("o", P("fsdp"))])
BASE = {"q": {"weight": struct(8, 64, 128)}, "o": {"weight": struct(64, 64)}}
BASES = plan(BASE, MeshSpec({"fsdp": 4, "tensor": 2}), paths=BASE_RULES)
LORA = {
    "q": {"a": struct(8, 64, 16), "b": struct(8, 16, 128)},
    "o": {"a": struct(64, 16), "b": struct(16, 64)},
}
SCALES = {
    "q": {"scale": struct(8, 8, 2)},
    "o": {"scale": struct(64), "zero": struct(2, 64), "all": struct()},
}
# The activations of a model are leaves that are no arrays.
MODEL = plan(
    eqx.nn.MLP(16, 8, 32, 2, key=jax.random.key(0)),
    MESH,
    paths=PathRules([("", fsdp("tensor"))]),
)
ADAM = optax.adamw(1e-3).init
INNER = {"a": {"w": {"y": jnp.zeros((128, 256))}}}
STATES: dict[str, tuple[ShardPlan, Callable[[Any], Any], dict[str, Any]]] = {
    "model": (MODEL, train_state, {}),
    "path": (
        SMALL_PLAN,
        lambda tree: {"z": {"a": {"w": jnp.zeros((256, 128))}}, "same": tree["a"]["w"]},
        {},
    ),
    "compiler": (LEFT, ADAM, {}),
    "history": (SMALL_PLAN, optax.lbfgs(memory_size=10).init, {}),
    "below": (SMALL_PLAN, t5x_adafactor, {}),
    "shape": (SMALL_PLAN, lambda _: INNER, {}),
    "bare": (SMALL_PLAN, GALORE, {}),
    "rules": (
        SMALL_PLAN,
        GALORE,
        {"paths": DECIDE, "axes": AxisRules([("mlp", "tensor")])},
    ),
    "shadowed": (
        SMALL_PLAN,
        ADAM,
        {"paths": PathRules([("mu", P())]), "unused": "allow"},
    ),
    "over": (SMALL_PLAN, ADAM, {"over": "data"}),
    "over its own": (SMALL_PLAN, ADAM, {"over": ("fsdp", "data")}),
    "over free": (FREE, ADAM, {"over": ("data", "fsdp")}),
    "over large": (FREE, ADAM, {"over": fsdp("data", min_bytes=1024)}),
    "over units": (
        NAMED,
        lambda tree: {**tree, "e": jnp.zeros((0, 3))},
        {"over": "data"},
    ),
    "over each": (WHOLE, lambda tree: tree, {"over": ("x", "y")}),
    "adapters": (BASES, lambda _: LORA, {"adapters": [("[ab]$", "weight")]}),
    "scales": (BASES, lambda _: SCALES, {"scales": [("(scale|zero|all)$", "weight")]}),
}


@pytest.mark.parametrize(
    "state, path, spec, says",
    [
        (
            "model",
            "model/layers/0/weight",
            P("tensor"),
            "the sharding that `init` gives it|",
        ),
        (
            "model",
            "opt/0/mu/layers/0/bias",
            P("tensor"),
            "the sharding that `init` gives it|",
        ),
        ("model", "step", P(), "rank 0"),
        ("path", "z/a/w", P("fsdp", "tensor"), "path and shape of `a/w`"),
        ("path", "same", P("fsdp", "tensor"), "the sharding that `init` gives it"),
        ("compiler", "0/mu/w", P(None, "data"), ""),
        ("history", "0/diff_params_memory/a/w", P(None, "fsdp", "tensor"), ""),
        ("below", "param_states/a/w/m", P("fsdp", "tensor"), ""),
        ("below", "param_states/a/w/v_row", P("fsdp"), ""),
        ("below", "param_states/a/b/v", P(), "one element has nothing to shard"),
        ("shape", "a/w/y", P(), "follows no planned one"),
        ("bare", "0/projector/a/w", P(), "`follow(..., paths=...)`"),
        (
            "bare",
            "0/base_optimizer_state/mu/a/b",
            P("tensor"),
            "the sharding that `init` gives it|",
        ),
        ("rules", "0/projector/a/w", P("fsdp"), "paths[0] projector/.*w|"),
        (
            "rules",
            "0/base_optimizer_state/mu/a/w",
            P(None, "tensor"),
            "paths[1] [mn]u/.*w|",
        ),
        (
            "shadowed",
            "0/mu/a/w",
            P("fsdp", "tensor"),
            "the sharding that `init` gives it|",
        ),
        ("over", "0/mu/a/w", P(("fsdp", "data"), "tensor"), ", over data|"),
        ("over", "0/nu/a/b", P(("tensor", "data")), ", over data|"),
        ("over", "0/count", P(), "rank 0"),
        # An axis that the array has already adds nothing; a free dimension comes before
        # one that is cut.
        ("over its own", "0/mu/a/w", P(("fsdp", "data"), "tensor"), ", over data|"),
        ("over free", "0/mu/a/w", P(("data", "fsdp"), "tensor"), ", over data, fsdp|"),
        ("over large", "0/mu/a/w", P("data", "tensor"), ", over data|"),
        ("over large", "0/mu/a/b", P(), "fewer than the 1024 asked for"),
        ("over units", "w", P("tensor", "fsdp"), "`data` (2) beside the axes"),
        ("over units", "e", P(), "an array without elements has nothing to shard"),
        # What nothing has room for is a reason, whether other axes found some or not.
        ("over each", "a", P("x", "y"), "over y, x|"),
        ("over each", "b", P("y"), "over y|size 12 is not divisible by `x` (2) beside"),
        ("over each", "c", P("y", "x"), "over y, x|"),
        ("over each", "d", P(), "`x` (2) x `y` (4)"),
        ("adapters", "q/a", P(None, "fsdp"), "adapters[0] of `q/weight`"),
        ("adapters", "q/b", P(None, None, "tensor"), ""),
        ("adapters", "o/a", P("fsdp"), ""),
        ("adapters", "o/b", P(), ""),
        ("scales", "q/scale", P(None, "fsdp", "tensor"), ""),  # blocks of 8 x 64
        ("scales", "o/scale", P(), "may be those numbered (0) or (1)"),
        ("scales", "o/all", P(), "rank 0"),
        # Two blocks of 32 rows on four devices.
        (
            "scales",
            "o/zero",
            P(),
            "not divisible",
        ),
    ],
)
def test_each_leaf_follows_the_array_that_it_belongs_to(state, path, spec, says):
    planned, init, keywords = STATES[state]
    leaf = follow(init, planned, **keywords)[path]
    assert leaf.spec == spec
    assert says in f"{leaf.rule}|{'|'.join(map(str, leaf.reasons))}"
    assert not (says.endswith("|") and leaf.reasons)


@pytest.mark.parametrize(
    "planned, keywords, message",
    [
        (
            SMALL_PLAN,
            {"over": "dta"},
            r"`over` names mesh axis 'dta', .* \(did you mean 'data'\?\)",
        ),
        (
            SMALL_PLAN,
            {"paths": {"/m$": P()}},
            r"rule 0, the regex '/m\$', is shadowed: .* goes to what they follow\.",
        ),
        (
            SMALL_PLAN,
            {"paths": {"/v$": P("fdsp")}},
            r"uses the mesh axis 'fdsp' \(did you mean 'fsdp'\?\)",
        ),
        (
            BASES,
            {"adapters": [(".*q.*m$", "q/weigth")]},
            r"`adapters\[0\]` makes `q/weigth` of .*did you mean",
        ),
        (
            BASES,
            {"scales": [("scale", "weight")]},
            "`scales` entry 0, the regex 'scale', matches no path",
        ),
    ],
)
def test_what_follow_refuses(planned, keywords, message):
    if "paths" in keywords:
        paths = PathRules(keywords["paths"])
    else:
        paths = None
    with pytest.raises(RuleError, match=message):
        follow(t5x_adafactor, planned, **{**keywords, "paths": paths})


def test_the_result_keeps_the_axis_rules_of_the_plan():
    def init(tree):
        return {"w": tree["w"], "buffer": jnp.zeros(16)}

    rules = PathRules([("^buffer", ("buffer",))])
    followed = follow(init, NAMED, paths=rules, axes=BUFFERS)
    assert followed["buffer"].spec == P("data")
    assert followed.axes == HEADS
    on_other_mesh = followed.replan(MeshSpec({"data": 4, "fsdp": 3, "tensor": 2}))
    assert on_other_mesh["w"].spec == P("tensor", "fsdp")
    assert on_other_mesh["buffer"].spec == P("data")
    unnamed = plan({"w": struct(8, 6)}, MESH, paths=PathRules([("w", P())]))
    assert follow(init, unnamed, paths=rules, axes=BUFFERS).axes == BUFFERS


@pytest.mark.parametrize("over", ["data", fsdp("data", max_bytes=1)])
def test_over_keeps_an_axis_of_names_that_count_units(over):
    rules = PathRules([("scale", ("heads", None))])

    def init(params):
        return {"scale": jnp.zeros((2, 6))}

    sharding_plan = follow(init, NAMED, paths=rules)
    further = follow(init, NAMED, paths=rules, over=over)
    assert sharding_plan["scale"].spec == P("tensor")
    assert further["scale"].spec == P("tensor", "data")
