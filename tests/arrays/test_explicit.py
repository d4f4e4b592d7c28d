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


LETTERS = {EXPLICIT: "E", AUTO: "a"}


def name_of(kinds: dict[str, AxisType]) -> str:
    return "".join(LETTERS[kind] for kind in kinds.values())


# Every kind once, with an ambient mesh or without one; the plain kinds both ways.
CASES = [
    *((kinds, position in (2, 5, 6)) for position, kinds in enumerate(KINDS)),
    (KINDS[0], True),
    (KINDS[7], True),
]
SOME_KINDS = pytest.mark.parametrize(
    "kinds", [KINDS[position] for position in (0, 2, 5, 7)], ids=name_of
)
AXES = AxisRules(
    [
        ("batch", ("data", "fsdp")),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("joined_heads", "tensor"),
        ("mlp", "tensor"),
    ],
    units={"joined_heads": 8},
)


class Block(eqx.Module):
    """Attention of 4 heads of 8 elements each over themselves."""

    activation: Callable[..., Any]
    query: jax.Array = shardfx.field(names=("embed", "joined_heads"))
    out: jax.Array = shardfx.field(names=("joined_heads", "embed"))

    def __init__(self, key: jax.Array):
        self.query = jax.random.normal(key, (16, 32)) / 4
        key_of_out = jax.random.fold_in(key, 1)
        self.out = jax.random.normal(key_of_out, (32, 16)) / 6
        self.activation = jax.nn.silu

    def __call__(self, x: jax.Array, say: Callable[..., Any]) -> jax.Array:
        """`x`: batch, position, embed. Every weight is gathered along what it
        contracts.
        """
        batch, length, _ = x.shape
        query = say(self.query, None, "joined_heads")
        joined_heads = say(x @ query, "batch", None, "joined_heads")
        heads = joined_heads.reshape(batch, length, 4, 8)
        heads = say(heads, "batch", None, "heads", None)
        products = jnp.einsum("bqhd,bshd->bhqs", heads, heads) / 8
        scores = jax.nn.softmax(products, axis=-1)
        mixed = jnp.einsum("bhqs,bshd->bqhd", scores, heads)
        mixed = say(mixed, "batch", ...)
        activated = self.activation(mixed.reshape(joined_heads.shape))
        whole_out = say(self.out)
        return say(x + activated @ whole_out, "batch", ...)


NORMAL_ACTIVATIONS = np.random.default_rng(0).normal(size=(8, 6, 16))
X = NORMAL_ACTIVATIONS.astype(np.float32)


def plans(kinds: dict[str, AxisType]) -> tuple[ShardPlan, ShardPlan]:
    mesh = MeshSpec(SIZES, axis_types=kinds).build(jax.devices())
    structs = eqx.filter_eval_shape(Block, jax.random.key(0))
    params = plan(structs, mesh, axes=AXES)
    batch = plan(X, mesh, names=("batch", None, None), axes=AXES)
    return params, batch


def saying(sharding_plan: ShardPlan | None) -> Callable[..., Any]:
    """Constrains an array by names; on one device says nothing."""

    def say(x: Any, *names: Any) -> Any:
        if sharding_plan is None:
            return x
        return constrain(x, names, sharding_plan)

    return say


def loss_of(block: Block, x: jax.Array, sharding_plan: ShardPlan | None) -> jax.Array:
    y = block(x, saying(sharding_plan))
    return jnp.mean(y**2)


@pytest.fixture(scope="module")
def expected() -> tuple[Any, Any]:
    block = Block(jax.random.key(0))
    value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
    loss, grads = value_and_grad(block, jnp.asarray(X), None)
    return gather(loss), gather(grads)


def assert_same(tree: Any, other: Any) -> None:
    """Equal but for the order of sums: 1e-6 of the largest element."""
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
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
    set_mesh = contextlib.nullcontext()
    if ambient:
        set_mesh = jax.set_mesh(params.jax_mesh)
    with set_mesh:
        block = filter_jit(Block, out_shardings=params)(jax.random.key(0))
        step = filter_jit(
            eqx.filter_value_and_grad(loss_of),
            in_shardings=(params, batch),
            out_shardings=(None, params),
        )
        loss, grads = step(block, shard(X, batch), params)
        arrays = eqx.filter(block, eqx.is_array)
        assert specs_of(arrays).query == P("fsdp", "tensor")
        arrays_of_grads = eqx.filter(grads, eqx.is_array)
        assert specs_of(arrays_of_grads).out == P("tensor", "fsdp")
        gathered = gather((loss, arrays_of_grads))
    assert_same(gathered, expected)


# --- constrain under every transformation


NORMAL_WEIGHTS = np.random.default_rng(1).normal(size=(8, 16))
W = NORMAL_WEIGHTS.astype(np.float32)


def tiny(kinds: dict[str, AxisType]) -> ShardPlan:
    mesh = MeshSpec(SIZES, axis_types=kinds).build(jax.devices())
    rules = PathRules([("w", P("data", "tensor"))])
    return plan({"w": W}, mesh, paths=rules, axes=AXES)


Say = Callable[..., Any]


def scan(say, x):
    def turn(carry, _):
        return say(jnp.sin(carry), "batch", "mlp"), None

    start = say(x, "batch", "mlp")
    result, _ = jax.lax.scan(turn, start, length=3)
    return result


def remat(say, x):
    @jax.checkpoint
    def sine(x):
        constrained = say(x, "batch", "mlp")
        return say(jnp.sin(constrained), "batch", ...)

    return sine(x)


def cond(say, x):
    def doubled(x):
        return say(x * 2, "batch", "mlp")

    def tripled(x):
        return say(x * 3, "batch", "mlp")

    constrained = say(x, "batch", "mlp")
    return jax.lax.cond(x.sum() > 0, doubled, tripled, constrained)


def vmap(say, x):
    def sine(row):
        return say(jnp.sin(row), "mlp")

    return jax.vmap(sine)(x)


def made_inside(say, x):
    numbers = say(jnp.arange(16.0), "mlp")
    return numbers + say(x, "batch", "mlp")


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

    def value_and_gradient(w, plan_of_program):
        say = saying(plan_of_program)

        def loss(w):
            return (program(say, w) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss))(w)

    actual = gather(value_and_gradient(w, sharding_plan))
    expected = gather(value_and_gradient(jnp.asarray(W), None))
    assert_same(actual, expected)


# --- six devices, odd sizes


@pytest.mark.parametrize(
    "types", [AUTO, EXPLICIT, {"data": EXPLICIT}], ids=["auto", "explicit", "mixed"]
)
def test_odd_sizes_on_two_by_three_devices(types):
    axes = {"data": 2, "tensor": 3}
    devices = jax.devices()[:6]
    mesh = MeshSpec(axes, axis_types=types).build(devices)
    numbers = X.ravel()
    tree = {
        "embed": numbers[:711].reshape(237, 3),
        "odd": numbers[:35].reshape(7, 5),
        "bias": numbers[:6],
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

    def doubled_leaf(x):
        return constrain(2 * x, P("tensor"), sharding_plan)

    step = filter_jit(
        lambda tree: jax.tree.map(doubled_leaf, tree),
        in_shardings=(sharding_plan,),
        out_shardings=sharding_plan,
    )
    doubled = step(placed)
    assert specs_of(doubled) == sharding_plan.specs
    arrays: Any = gather(doubled)
    for path, array in arrays.items():
        assert np.array_equal(array, 2 * tree[path])
