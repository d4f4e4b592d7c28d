"""The same program under Auto, Explicit and mixed axes, with and without an ambient
mesh, equals one device's.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfx
from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    constrain,
    filter_jit,
    gather,
    plan,
    shard,
    specs_of,
)


AUTO = AxisType.Auto
EXPLICIT = AxisType.Explicit
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
KINDS = [
    dict(zip(SIZES, kinds, strict=True))
    for kinds in itertools.product([AUTO, EXPLICIT], repeat=3)
]


def name_of(kinds: dict[str, AxisType]) -> str:
    letters = {True: "E", False: "a"}
    return "".join(letters[kind is EXPLICIT] for kind in kinds.values())


# Every kind once, with an ambient mesh or without one; the plain kinds both ways.
CASES = [(kinds, position in (2, 5, 6)) for position, kinds in enumerate(KINDS)] + [
    (KINDS[0], True),
    (KINDS[7], True),
]
SOME_KINDS = pytest.mark.parametrize(
    "kinds", [KINDS[position] for position in (0, 2, 5, 7)], ids=name_of
)
TENSOR = [(name, "tensor") for name in ("heads", "joined_heads", "mlp")]
AXES = AxisRules(
    [("batch", ("data", "fsdp")), ("embed", "fsdp"), *TENSOR], units={"joined_heads": 8}
)


class Block(eqx.Module):
    """Attention of 4 heads of 8 elements each over themselves."""

    activation: Callable[..., Any]
    query: jax.Array = shardfx.field(names=("embed", "joined_heads"))
    out: jax.Array = shardfx.field(names=("joined_heads", "embed"))

    def __init__(self, key: jax.Array):
        array = jax.random.normal(key, (16, 32))
        self.query = array / 4
        seed = jax.random.fold_in(key, 1)
        array = jax.random.normal(seed, (32, 16))
        self.out = array / 6
        self.activation = jax.nn.silu

    def __call__(self, x: jax.Array, say: Callable[..., Any]) -> jax.Array:
        """`x`: batch, position, embed. Every weight is gathered along what it
        contracts.
        """
        y = say(
            x @ say(self.query, None, "joined_heads"), "batch", None, "joined_heads"
        )
        heads = say(y.reshape(*x.shape[:2], 4, 8), "batch", None, "heads", None)
        products = jnp.einsum("bqhd,bshd->bhqs", heads, heads) / 8
        scores = jax.nn.softmax(products, axis=-1)
        mixed = say(jnp.einsum("bhqs,bshd->bqhd", scores, heads), "batch", ...)
        activated = self.activation(mixed.reshape(y.shape))
        return say(x + activated @ say(self.out), "batch", ...)


X = np.random.default_rng(0).normal(size=(8, 6, 16)).astype(np.float32)


def plans(kinds: dict[str, AxisType]) -> tuple[ShardPlan, ShardPlan]:
    mesh = MeshSpec(SIZES, axis_types=kinds).build(jax.devices())
    structs = eqx.filter_eval_shape(Block, jax.random.key(0))
    sharding_plan = plan(structs, mesh, axes=AXES)
    return sharding_plan, plan(X, mesh, names=("batch", None, None), axes=AXES)


def saying(sharding_plan: ShardPlan | None) -> Callable[..., Any]:
    """Constrains an array by names; on one device says nothing."""
    return lambda x, *names: (
        x if sharding_plan is None else constrain(x, names, sharding_plan)
    )


def loss_of(block: Block, x: jax.Array, sharding_plan: ShardPlan | None) -> jax.Array:
    return jnp.mean(block(x, saying(sharding_plan)) ** 2)


@pytest.fixture(scope="module")
def expected() -> tuple[Any, Any]:
    block = Block(jax.random.key(0))
    value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
    loss, grads = value_and_grad(block, jnp.asarray(X), None)
    return gather(loss), gather(grads)


def assert_same(tree: Any, two: Any) -> None:
    """Equal but for the order of sums: 1e-6 of the largest element."""
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(two), strict=True):
        atol = 2e-6 * np.abs(b).max()
        assert np.allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "kinds, ambient",
    CASES,
    ids=[f"{name_of(kinds)} {ambient}" for kinds, ambient in CASES],
)
def test_a_transformer_block_and_its_gradient_equal_one_device(
    kinds, ambient, expected
):
    params, batch = plans(kinds)
    both = eqx.filter_value_and_grad(loss_of)
    with jax.set_mesh(params.jax_mesh) if ambient else contextlib.nullcontext():
        block = filter_jit(Block, out_shardings=params)(jax.random.key(0))
        step = filter_jit(
            both, in_shardings=(params, batch), out_shardings=(None, params)
        )
        loss, grads = step(block, shard(X, batch), params)
        actual = specs_of(eqx.filter(block, eqx.is_array)).query
        assert actual == P("fsdp", "tensor")
        actual = specs_of(eqx.filter(grads, eqx.is_array)).out
        assert actual == P("tensor", "fsdp")
        gathered = gather((loss, eqx.filter(grads, eqx.is_array)))
    assert_same(gathered, expected)


# --- constrain under every transformation


W = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


def tiny(kinds: dict[str, AxisType]) -> ShardPlan:
    mesh = MeshSpec(SIZES, axis_types=kinds).build(jax.devices())
    rules = PathRules([("w", P("data", "tensor"))])
    return plan({"w": W}, mesh, paths=rules, axes=AXES)


Say = Callable[..., Any]


def scan(say, x):
    return jax.lax.scan(
        lambda carry, _: (say(jnp.sin(carry), "batch", "mlp"), None),
        say(x, "batch", "mlp"),
        None,
        3,
    )[0]


def remat(say, x):
    return jax.checkpoint(lambda x: say(jnp.sin(say(x, "batch", "mlp")), "batch", ...))(
        x
    )


def cond(say, x):
    return jax.lax.cond(
        x.sum() > 0,
        lambda x: say(x * 2, "batch", "mlp"),
        lambda x: say(x * 3, "batch", "mlp"),
        say(x, "batch", "mlp"),
    )


def vmap(say, x):
    return jax.vmap(lambda row: say(jnp.sin(row), "mlp"))(x)


def made_inside(say, x):
    return say(jnp.arange(16.0), "mlp") + say(x, "batch", "mlp")


PROGRAMS: dict[str, Callable[[Say, jax.Array], jax.Array]] = {
    "scan": scan,
    "remat": remat,
    "cond": cond,
    "vmap": vmap,
    "made inside": made_inside,
}


@SOME_KINDS
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_constrain_changes_no_value_and_no_gradient(kinds, program):
    sharding_plan = tiny(kinds)
    w = shard({"w": W}, sharding_plan)["w"]

    run = lambda say: jax.jit(
        jax.value_and_grad(lambda w: (program(say, w) ** 2).sum())
    )
    tree = gather(run(saying(sharding_plan))(w))
    output = run(saying(None))(jnp.asarray(W))
    gathered = gather(output)
    assert_same(tree, gathered)


# --- six devices, odd sizes


@pytest.mark.parametrize(
    "types", [AUTO, EXPLICIT, {"data": EXPLICIT}], ids=["auto", "explicit", "mixed"]
)
def test_odd_sizes_on_two_by_three_devices(types):
    axes = {"data": 2, "tensor": 3}
    devices = jax.devices()[:6]
    mesh = MeshSpec(axes, axis_types=types).build(devices)
    tree = {
        "embed": X.reshape(-1)[:711].reshape(237, 3),
        "odd": X.reshape(-1)[:35].reshape(7, 5),
        "bias": X[0, 0, :6],
    }
    rules = PathRules(
        [
            ("embed", P(("data", "tensor"))),
            ("odd", P("data", "tensor")),
            ("bias", P(("tensor", "data"))),
        ]
    )
    sharding_plan = plan(tree, mesh, paths=rules)
    expected_specs = {
        "embed": P("tensor"),
        "odd": P(),
        "bias": P(("tensor", "data")),
    }
    assert sharding_plan.specs == expected_specs
    placed = shard(tree, sharding_plan)
    assert specs_of(placed) == sharding_plan.specs

    twice = lambda tree: jax.tree.map(
        lambda x: constrain(2 * x, P("tensor"), sharding_plan), tree
    )
    doubled = filter_jit(
        twice, in_shardings=(sharding_plan,), out_shardings=sharding_plan
    )(placed)
    assert specs_of(doubled) == sharding_plan.specs
    for a, b in zip(*map(jax.tree.leaves, (tree, gather(doubled))), strict=True):
        assert np.array_equal(2 * a, b)
