import dataclasses
import functools as ft
import itertools
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import chips
from shardfx.cost import Policy, policy
from shardfx.cost._policy import choice
from shardfx.cost._policy.making import PolicySearch
from shardfx.errors import (
    ChipError,
    LeafTypeError,
    OutOfMemoryError,
    PlanFormatError,
    PlanMismatchError,
    RuleError,
)


WIDTH = 16
HIDDEN = 32
LAYERS = 2
BATCH = 4
LENGTH = 8
SHAPES = {
    "qkv": (LAYERS, WIDTH, 3 * WIDTH),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
}


def layer(x, w):
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    x = x + jnp.einsum("bqk,bkd->bqd", scores, v)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def scanned(params, x):
    y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
    return jnp.mean(y**2)


def unrolled(params, x):
    for number in range(LAYERS):
        leaves_by_name = {name: leaf[number] for name, leaf in params.items()}
        x = layer(x, leaves_by_name)
    return jnp.mean(x**2)


def product(params, x):
    """A loss without layers."""
    hidden = jnp.tanh(x @ params["up"][0])
    return jnp.mean(hidden**2)


def arrays():
    numbers = np.random.default_rng(0)
    params = {
        name: jnp.asarray(0.2 * numbers.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    x = numbers.normal(size=(BATCH, LENGTH, WIDTH))
    return params, jnp.asarray(x, jnp.float32)


def chip_of(usable_bytes):
    """A chip without tiles, with as much memory as `usable_bytes`."""
    return dataclasses.replace(
        chips.find("h100"), name="small", usable_hbm_bytes=usable_bytes
    )


@ft.cache
def policies(loss):
    """A policy that keeps all, one that keeps some values, and one that keeps none."""
    search = PolicySearch(loss, arrays(), chip_of(10**9))
    points = choice.frontier(search.costs)
    cases = (points[0], points[len(points) // 2], points[-1])
    trials = [
        choice.Trial(point, peak_bytes=point.bytes, fits=True, is_counted=False)
        for point in cases
    ]
    return tuple(search.policy_of(trial, 10**9) for trial in trials)


def is_equal(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("loss", [scanned, unrolled])
def test_gradients_are_equal_bit_for_bit(loss):
    args = arrays()
    # As users compile it. The older emitter sums in another order where it fuses a
    # value that is computed again, also under `jax.checkpoint` alone.
    options = None
    if jax.__version_info__ < (0, 12):
        options = {"xla_cpu_use_fusion_emitters": True}

    def value_and_gradient(loss):
        gradient = jax.value_and_grad(loss)
        return jax.jit(gradient, compiler_options=options)(*args)

    plain = value_and_gradient(loss)
    _, some_kept, none_kept = policies(loss)
    for loss_policy in (some_kept, none_kept):
        assert is_equal(plain, value_and_gradient(loss_policy.apply(loss)))


@pytest.mark.parametrize("loss", [scanned, unrolled])
def test_offloaded_values_go_to_the_host_and_come_back(loss):
    args = arrays()
    _, _, none_kept = policies(loss)
    rows = []
    for row in none_kept.rows:
        if row.operation == "dot_general" and row.layers > 1:
            row = dataclasses.replace(row, choice="offload")
        rows.append(row)
    offloading = dataclasses.replace(none_kept, rows=tuple(rows))
    gradient = jax.jit(jax.value_and_grad(offloading.apply(loss)))

    lowered = gradient.trace(*args).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    # To the host in the forward pass, and back in the backward pass.
    assert "pinned_host" in text
    assert '"device"' in text
    # The CPU has one memory.
    plain = jax.jit(jax.value_and_grad(loss))(*args)
    plain_leaves = jax.tree.leaves(plain)
    leaves = jax.tree.leaves(gradient(*args))
    for leaf, plain_leaf in zip(leaves, plain_leaves, strict=True):
        np.testing.assert_allclose(plain_leaf, leaf, rtol=1e-5)


def test_equal_layers_share_one_choice():
    products_by_loss = {}
    for loss in (scanned, unrolled):
        all_kept, some_kept, _ = policies(loss)
        layers_by_operation = {}
        for row in some_kept.rows:
            if row.layers > 1:
                layers_by_operation[row.operation] = row.layers
        assert layers_by_operation["dot_general"] == LAYERS
        products = set()
        for row in all_kept.rows:
            if row.line != "-" and row.operation == "dot_general":
                products.add((row.line, row.shape))
        products_by_loss[loss] = products
    assert products_by_loss[scanned] == products_by_loss[unrolled]
    assert products_by_loss[scanned]


def test_a_policy_is_data():
    all_kept, some_kept, _ = policies(scanned)
    restored = Policy.from_json(some_kept.to_json())
    assert restored == some_kept
    assert hash(restored) == hash(some_kept)
    assert not some_kept.diff(some_kept)
    changes = all_kept.diff(some_kept)
    assert any(str(change).endswith("keep -> recompute") for change in changes)
    text = str(some_kept)
    assert "recompute" in text
    assert "dot_general f32[4,8,32]" in text
    assert "of the forward pass is computed again" in text


def test_a_text_that_is_no_policy():
    with pytest.raises(PlanFormatError, match="this text is no policy"):
        Policy.from_json("{}")
    all_kept, _, _ = policies(scanned)
    document = all_kept.to_json()
    text = document.replace('"version": 1', '"version": 9')
    with pytest.raises(PlanFormatError, match="version 9"):
        Policy.from_json(text)


@pytest.mark.parametrize(
    "field, value, name",
    [
        ("chip", 5, "chip"),
        ("budget_bytes", "80 GiB", "budget_bytes"),
        ("peak_bytes", True, "peak_bytes"),
        ("is_counted", "no", "is_counted"),
        ("flops", None, "flops"),
        ("notes", "left alone", "notes"),
        ("notes", [1], "notes"),
        ("rows", {}, "rows"),
        ("choice", "maybe", "choice"),
        ("line", None, "line"),
        ("shape", "88", "shape"),
        ("shape", [4, -1], "shape"),
        ("layers", 2.5, "layers"),
    ],
)
def test_a_policy_with_a_field_of_another_type(field, value, name):
    document = json.loads(policies(scanned)[1].to_json())
    holder = document
    if field not in document:
        holder = document["rows"][0]
    holder[field] = value
    with pytest.raises(PlanFormatError, match=f"this text is no policy .*`{name}`"):
        Policy.from_json(json.dumps(document))


@pytest.mark.parametrize("argnums", ["a", 1.5, (0, None), True, ((0,),)])
def test_argument_numbers_that_are_none(argnums):
    with pytest.raises(LeafTypeError, match="`argnums=.* has 2 arguments here"):
        policy(scanned, *arrays(), chip="h100", argnums=argnums)


@pytest.mark.parametrize("leave_bytes", ["1 GiB", None, True, float("nan")])
def test_bytes_to_leave_that_are_no_number(leave_bytes):
    with pytest.raises(RuleError, match="`leave_bytes=.*write `leave_bytes=2"):
        policy(scanned, *arrays(), chip="h100", leave_bytes=leave_bytes)


def test_bytes_to_leave_may_be_a_float():
    billion: Any = 1e9
    chosen_policy = policy(product, *arrays(), chip="h100", leave_bytes=billion)
    assert chosen_policy == policy(product, *arrays(), chip="h100", leave_bytes=10**9)
    assert Policy.from_json(chosen_policy.to_json()) == chosen_policy


def test_an_edited_loss_lacks_the_lines_of_its_policy():
    params, x = arrays()
    _, some_kept, _ = policies(scanned)
    with pytest.raises(PlanMismatchError) as caught:
        some_kept.apply(scanned)(params, x[:2])
    text = str(caught.value)
    assert "split f32[4,8,16] #0 of layer" in text
    assert "test_policy.py" in text
    assert "sfx.cost.policy(loss, *args" in text


def test_the_budget_decides():
    args = arrays()
    search = PolicySearch(scanned, args, chip_of(10**9))
    all_kept, *_, none_kept = choice.frontier(search.costs)
    highest = search.trial_of(10**9, all_kept).peak_bytes
    least = search.trial_of(10**9, none_kept).peak_bytes
    between = (highest + least) // 2
    chosen_policy = policy(scanned, *args, chip=chip_of(between + 100), leave_bytes=100)
    assert least <= chosen_policy.peak_bytes <= between == chosen_policy.budget_bytes
    assert 0 < chosen_policy.recomputed_flops < chosen_policy.flops
    roomy = policy(scanned, *args, chip=chip_of(2 * highest))
    assert {row.choice for row in roomy.rows} == {"keep"}
    assert roomy.recomputed_flops == 0
    with pytest.raises(
        OutOfMemoryError, match="with everything computed again"
    ) as caught:
        policy(scanned, *args, chip=chip_of(least - 1000))
    assert caught.value.needed_bytes == least


def test_the_choice_is_nearly_the_best_of_all_subsets():
    def block(w, x):
        y = jnp.tanh(x @ w["up"])
        elements = jax.nn.softmax(jnp.exp(y) @ w["down"]) ** 2
        return jnp.sum(elements)

    params, x = arrays()
    first = jax.tree.map(lambda leaf: leaf[0], params)
    costs = PolicySearch(block, (first, x), chip_of(10**9)).costs
    points = choice.frontier(costs)
    relevant = sorted(set().union(*(point.kept for point in points)))
    subsets = []
    for count in range(len(relevant) + 1):
        for subset in itertools.combinations(relevant, count):
            subsets.append(costs.point(frozenset(subset)))
    for limit in np.linspace(0, points[0].bytes, 9):
        best = min(point.seconds for point in subsets if point.bytes <= limit)
        start = next(point for point in points if point.bytes <= limit)
        assert choice.improved(costs, start, limit).seconds <= 1.03 * best


def test_lines_are_those_of_the_user():
    def loss(x):
        y = jnp.where(x > 0, jnp.exp(x), x)
        return jnp.sum(jax.nn.silu(y) ** 2)

    costs = PolicySearch(loss, (jnp.ones((4, 4)),), chip_of(10**9)).costs
    actual = {key.line.partition(":")[0] for key in costs.keys}
    assert actual == {"test_policy.py"}


def test_arguments_are_numbered_from_the_end_too():
    params, x = arrays()

    def swapped(x, params):
        return product(params, x)

    from_end = policy(swapped, x, params, chip="h100", argnums=-1)
    from_start = policy(swapped, x, params, chip="h100", argnums=1)
    assert from_end == from_start
    assert any(row.choice == "keep" for row in from_end.rows)


def test_the_arguments_of_grad():
    params, x = arrays()

    def loss(x, params, scale, name):
        assert name == "model"
        value = scale * product(params, x)
        return value, {"loss": value}

    args = (x, params, jnp.float32(2), "model")
    chosen_policy = policy(loss, *args, chip="h100", argnums=(0, 1), has_aux=True)
    loss_under_policy = chosen_policy.apply(loss)
    gradient = jax.grad(loss_under_policy, argnums=(0, 1), has_aux=True)
    grads, aux = gradient(*args)
    plain, _ = jax.grad(loss, argnums=(0, 1), has_aux=True)(*args)
    assert is_equal(grads, plain)
    assert aux["loss"].shape == ()
    assert chosen_policy.rows


def test_bytes_are_those_of_one_device():
    mesh = sfx.MeshSpec({"data": 2, "tensor": 2})
    params, x = jax.eval_shape(arrays)
    rules = sfx.PathRules(
        [("qkv|up", P(None, "data", "tensor")), ("down", P(None, "tensor", "data"))]
    )
    sharding_plan = sfx.plan(
        params,
        mesh,
        paths=rules,
    )
    params = sharding_plan.structs
    rules = sfx.PathRules([(".*", P("data"))])
    sharding_plan = sfx.plan(x, mesh, paths=rules)
    x = sharding_plan.structs
    rows = policy(scanned, params, x, chip="h100").rows
    sizes = {row.shape: row.bytes for row in rows if row.operation == "dot_general"}
    assert sizes[BATCH, LENGTH, HIDDEN] == BATCH * LENGTH * HIDDEN * 4 // 4


def test_checkpoints_of_the_user_stay():
    def loss(params, x):
        body = jax.checkpoint(layer)
        y, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, params)
        return jnp.mean(y**2)

    chosen_policy = policy(loss, *arrays(), chip="h100")
    notes = [note for note in chosen_policy.notes if "test_policy.py" in note]
    assert any("stays" in note for note in notes)
    for row in chosen_policy.rows:
        assert row.layers <= 1


def test_modules_and_their_functions():
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 4, key=jax.random.key(0))
    x = jnp.ones((BATCH, WIDTH))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    chosen_policy = policy(loss, model, x, chip="h100")
    assert {row.layers for row in chosen_policy.rows} >= {1}
    plain = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
    gradient = eqx.filter_grad(chosen_policy.apply(loss))
    assert is_equal(plain, eqx.filter_jit(gradient)(model, x))


def test_explicit_axes_stay_in_the_types():
    axis_types = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types)
    key = jax.random.key(0)

    def dropped(x, w):
        hidden = jax.nn.gelu(x @ w["up"])
        keep = jax.random.bernoulli(key, 0.9, hidden.shape)
        hidden = jnp.where(keep, hidden, 0)
        batch = NamedSharding(mesh, P("data"))
        y = jnp.einsum("bth,hd->btd", hidden, w["down"], out_sharding=batch)
        return x + y, None

    def loss(params, x):
        y, _ = jax.lax.scan(dropped, x, params)
        return jnp.mean(y**2)

    params, x = arrays()
    specs = {"up": P(None, None, "tensor"), "down": P(None, "tensor", None)}
    params = {
        name: jax.device_put(params[name], NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    search = PolicySearch(loss, (params, x), chip_of(10**9))
    points = choice.frontier(search.costs)
    trial = choice.Trial(points[-1], peak_bytes=0, fits=True, is_counted=False)
    none_kept = search.policy_of(trial, 10**9)
    assert "recompute" in {row.choice for row in none_kept.rows}
    [mask] = [row for row in none_kept.rows if row.dtype == "bool"]
    assert mask.bytes == BATCH * LENGTH * HIDDEN // 4

    plain = jax.jit(jax.grad(loss))(params, x)
    grads = jax.jit(jax.grad(none_kept.apply(loss)))(params, x)
    assert is_equal(plain, grads)
    actual = jax.tree.map(jax.typeof, plain)
    assert actual == jax.tree.map(jax.typeof, grads)


def test_a_loss_without_values_to_keep():
    def loss(w):
        return jnp.sum(w)

    w = jnp.ones((64, 64))
    assert policy(loss, w, chip="h100").rows == ()
    with pytest.raises(OutOfMemoryError, match="a smaller batch"):
        policy(loss, w, chip=chip_of(100))


def test_what_nobody_differentiates_is_no_work():
    """The maximum of a softmax is computed again, but no derivative of it."""

    def loss(w, x):
        return jnp.sum(jax.nn.softmax(x @ w) ** 2)

    args = (jnp.ones((64, 64)), jnp.ones((32, 64)))
    search = PolicySearch(loss, args, chip_of(10**9))
    work = search.costs.point(frozenset()).work
    # The maximum and the sum pass over 32 x 64 numbers.
    assert work.bytes == 2 * 32 * 64 * 4


def test_numbers_of_arguments_that_are_not_differentiated():
    def loss(number, x):
        return jnp.sum(x[number])

    args = (jnp.arange(3), jnp.ones((4,)))
    with pytest.raises(LeafTypeError, match="no floating-point array"):
        policy(loss, *args, chip="h100")
    assert policy(loss, *args, chip="h100", argnums=1)


def test_offload_is_bounded_by_the_link_to_the_host():
    args = arrays()
    search = PolicySearch(scanned, args, chip_of(10**9))
    *_, none_kept = choice.frontier(search.costs)
    least = search.trial_of(10**9, none_kept).peak_bytes + 1
    choices = {}
    for bytes_per_second in (1.0, 1e15):
        chip = dataclasses.replace(
            chip_of(least), host_bytes_per_second=bytes_per_second
        )
        chosen_policy = policy(scanned, *args, chip=chip, offload=True)
        choices[bytes_per_second] = {row.choice for row in chosen_policy.rows}
        assert chosen_policy.peak_bytes <= least
    assert "offload" not in choices[1.0]
    assert "offload" in choices[1e15]
    chip = dataclasses.replace(chip_of(least), host_bytes_per_second=0)
    with pytest.raises(ChipError, match="link to the host is not known"):
        policy(scanned, *args, chip=chip, offload=True)


def test_no_point_of_the_frontier_is_worse_than_another():
    """The backward pass reads a sum, or the larger product from which it is computed."""

    def sum_squared(w, x):
        sums = jnp.sum(x @ w["up"][0], axis=-1)
        return jnp.sum(sums**2)

    costs = PolicySearch(sum_squared, arrays(), chip_of(10**9)).costs
    points = choice.frontier(costs)
    assert len(points) > 1
    for larger, smaller in itertools.pairwise(points):
        assert larger.bytes > smaller.bytes
        assert larger.seconds < smaller.seconds


def test_a_point_that_needs_less_than_foreseen_is_chosen():
    """A value that is kept takes no memory for its computation."""
    costs = PolicySearch(scanned, arrays(), chip_of(10**9)).costs
    keeping_all, *points = choice.frontier(costs)
    above, first_fitting = points[4:6]
    budget = 1000 + first_fitting.bytes

    def try_point(point):
        peak = 1000 + point.bytes
        if point == above:
            peak = budget
        if point == keeping_all:
            peak = 2 * budget
        return choice.Trial(point, peak, fits=peak <= budget, is_counted=True)

    assert choice.chosen(costs, budget, 1000, try_point).point == above
