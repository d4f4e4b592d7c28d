import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, chips, filter_jit, follow, plan
from shardfx.cost import compile_for, fit
from shardfx.errors import (
    ChipError,
    LeafTypeError,
    MeshError,
    PlanMismatchError,
)


MESH = MeshSpec({"data": 4, "tensor": 2})
WIDTH = 64
HIDDEN = 256
LAYERS = 6
BATCH = 32
# A chip without tiles, and small enough that the steps below do not fit.
SMALL = dataclasses.replace(
    chips.find("h100"), name="small", usable_hbm_bytes=2_000_000
)


def adam(params):
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return {"mu": zeros, "nu": zeros, "count": jnp.zeros((), jnp.int32)}


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def updated(loss, params, opt, batch):
    grads = jax.grad(loss)(params, batch)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt["nu"], grads)
    new = jax.tree.map(
        lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), params, mu, nu
    )
    return new, {"mu": mu, "nu": nu, "count": opt["count"] + 1}


def plain(*, remat=False, batch=BATCH, over=None):
    """A training step, and the plans of its parameters, optimizer state and batch."""
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    structs = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    rules = PathRules([("up", P(None, None, "tensor")), ("down", P(None, "tensor"))])
    params = plan(
        structs,
        MESH,
        paths=rules,
    )
    opt = follow(adam, params, over=over)
    struct = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    rules = PathRules([(".*", P("data"))])
    x = plan(
        struct,
        MESH,
        paths=rules,
    )

    def loss(params, batch):
        return jnp.mean(
            jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, params)[0]
            ** 2
        )

    def step(params, opt, batch):
        return updated(loss, params, opt, batch)

    return step, (params, opt, x)


def training_step(donate: Any = "none", **changed):
    """A jitted training step, and its parameters, optimizer state and batch as structs."""
    step, plans = plain(**changed)
    jitted = filter_jit(step, out_shardings=plans[:2], donate=donate)
    structs = [plan.structs for plan in plans]
    return jitted, *structs


def groups(fitted):
    return {row.group: row.bytes for row in fitted.rows}


ONE = 2 * LAYERS * WIDTH * HIDDEN * 4 // 2


def test_fit_groups_arguments_by_their_use():
    fitted = fit(*training_step(), chip="h100")
    exact = {row.group: row.bytes for row in fitted.rows if row.exact}
    expected = {
        "parameters": ONE,
        "optimizer: mu": ONE,
        "optimizer: nu": ONE,
        "batch": BATCH * WIDTH * 4 // 4,
        "optimizer: the rest": 4,
        "results": 3 * ONE + 4,
    }
    assert exact == expected
    assert fitted.basis == "foreseen"
    assert fitted.batch == BATCH
    expected = sum(row.bytes for row in fitted.rows)
    assert fitted.peak_bytes == expected == fitted.usable_bytes - fitted.headroom_bytes


def changes_of(fitted):
    """What each change is, and the peak with it."""
    return [(change.what, change.peak_bytes) for change in fitted.changes]


def test_names_of_arguments_change_nothing():
    step, plans = plain(batch=2048)
    args = [plan.structs for plan in plans]

    def renamed(a, b, tok):
        return step(a, b, tok)

    ours = fit(filter_jit(step, out_shardings=plans[:2]), *args, chip=SMALL)
    theirs = fit(filter_jit(renamed, out_shardings=plans[:2]), *args, chip=SMALL)
    assert groups(ours) == groups(theirs)
    assert ours.batch == theirs.batch == 2048
    assert changes_of(ours) == changes_of(theirs)
    assert any("ZeRO-1" in what for what, _ in changes_of(ours))


def test_a_step_is_traced_once_for_the_verdict():
    step, plans = plain()
    calls = []

    def counted_step(*args):
        calls.append(None)
        return step(*args)

    structs = [plan.structs for plan in plans]
    fitted = fit(counted_step, *structs, chip=SMALL)
    assert str(fitted)
    assert len(calls) == 1
    assert fitted.changes
    assert len(calls) == 2  # half the batch is another step


def test_a_train_state_is_told_apart_by_what_reads_its_fields():
    _, params, opt, batch = training_step()

    def step(state, batch):
        def loss(params, batch):
            return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

        params, opt = updated(loss, state["params"], state["inner"], batch)
        return {"params": params, "inner": opt, "step": state["step"] + 1}

    sharding = batch.sharding.update(spec=P())  # pyright: ignore[reportAttributeAccessIssue]
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    state = {"params": params, "inner": opt, "step": count}
    bytes_by_group = groups(fit(step, state, batch, chip="h100"))
    assert bytes_by_group["parameters"] == ONE
    assert bytes_by_group["optimizer: inner/mu"] == ONE
    assert bytes_by_group["optimizer: inner/nu"] == ONE


def test_moments_of_replicated_arrays_that_are_cut_are_moments():
    """XLA computes a part of the new value of a vector on each device: it takes a piece
    of the moments, which says nothing about their purpose.
    """
    mesh = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
    shapes = {"w": (24, 64), "b": (64,), "v": (64, 16)}
    structs = {}
    for name, shape in shapes.items():
        structs[name] = jax.ShapeDtypeStruct(shape, "float32")
    rules = PathRules([("w|v", P("fsdp", "tensor")), ("b", P())])
    params = plan(structs, mesh, paths=rules)
    moments = follow(adam, params)

    def step(params, opt, batch):
        def loss(params, batch):
            hidden = jax.nn.relu(batch @ params["w"] + params["b"])
            return jnp.mean((hidden @ params["v"]) ** 2)

        return updated(loss, params, opt, batch)

    jitted = filter_jit(step, out_shardings=(params, moments))
    batch = jax.ShapeDtypeStruct((16, 24), "float32")
    fitted = fit(jitted, params.structs, moments.structs, batch, chip="h100")
    bytes_by_group = groups(fitted)
    size = params.bytes_per_device
    assert bytes_by_group["parameters"] == size
    assert bytes_by_group["optimizer: mu"] == size
    assert bytes_by_group["optimizer: nu"] == size


def test_a_plan_s_structs_in_place_of_a_module_with_functions():
    make = lambda: eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    model = eqx.filter_eval_shape(make)
    rules = PathRules([(".*", P())])
    structs = plan(model, MESH, paths=rules).structs
    x = jax.ShapeDtypeStruct((4, 8), "float32")

    def step(model, x):
        return jnp.mean(jax.vmap(model)(x))

    with pytest.raises(TypeError, match="'NoneType' object is not callable") as caught:
        fit(step, structs, x, chip="h100")
    assert "eqx.combine(plan.structs, model)" in "".join(caught.value.__notes__)
    fit(step, eqx.combine(structs, model), x, chip="h100")


def test_arrays_that_the_loss_does_not_read_are_with_their_like():
    """An array and its moments are in one row each with those that the loss reads, and a
    note says what tiles add to the parameters.
    """
    mesh = MESH.abstract()
    cases = (P("data"), P())
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in cases)

    def bias(sharding):
        struct = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=sharding)
        return {"bias": struct}

    params = {
        "a": bias(rows),
        "b": bias(whole),
        "c": bias(rows),
        "idle": bias(rows),
    }
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    opt = {"mu": params, "nu": params, "count": count}

    def loss(params, batch):
        return jnp.mean((params["a"]["bias"] * batch + params["c"]["bias"]) ** 2)

    def step(params, opt, batch):
        return updated(loss, params, opt, batch)

    batch = jax.ShapeDtypeStruct((32, 1000), jnp.float32, sharding=rows)
    # Its program returns the arrays of one sharding behind each other.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, opt))
    jitted = filter_jit(step, out_shardings=shardings)
    fitted = fit(jitted, params, opt, batch, chip="v5e")
    sizes = groups(fitted)
    tiled = (3 * 256 + 1024) * 4
    actual = [sizes[f"optimizer: {name}"] for name in ("mu", "nu")]
    assert actual == [tiled, tiled]
    assert sizes["parameters"] == tiled
    assert sizes["optimizer: the rest"] == 4
    assert (
        "the parameters are 6.8 KiB, as their plan says, and take 7.0 KiB in the chip's"
        " tiles of 8 x 128."
    ) in fitted.notes
    for note in fit(*training_step(), chip="h100").notes:
        assert "tiles" not in note


def test_moments_are_found_beside_parameters_in_one_argument():
    sharding = jax.NamedSharding(MESH.abstract(), P())
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    params = {"w": {"kernel": square}}
    state = {"params": params, "opt": [{"mu": params}]}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]["kernel"]) ** 2)

    def step(state, batch):
        grads = jax.grad(loss)(state["params"], batch)
        old_mu = state["opt"][0]["mu"]
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, old_mu, grads)
        new_params = jax.tree.map(lambda p, m: p - m, state["params"], mu)
        return {"params": new_params, "opt": [{"mu": mu}]}

    sizes = groups(fit(step, state, square, chip="h100"))
    assert sizes["parameters"] == 64 * 64 * 4
    assert sizes["optimizer: opt/0/mu"] == 64 * 64 * 4


def test_a_count_beside_a_bare_array_is_the_rest_of_an_optimizer():
    sharding = jax.NamedSharding(MESH.abstract(), P())
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)

    def step(w, count, batch):
        def loss(w):
            return jnp.mean((batch @ w) ** 2)

        gradient = jax.grad(loss)(w)
        return w - 0.1 * gradient, count + 1

    sizes = groups(fit(step, w, count, w, chip="h100"))
    assert sizes["parameters"] == 64 * 64 * 4
    assert sizes["optimizer: the rest"] == 4


def test_unchanged_weights_are_parameters_for_fit():
    sharding = jax.NamedSharding(MESH.abstract(), P())
    base = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    sharding = jax.NamedSharding(MESH.abstract(), P("data"))
    tokens = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=sharding)

    def step(tokens, base):
        rows = base[tokens]
        return jnp.sum(rows @ base)

    fitted = fit(step, tokens, base, chip="h100")
    assert fitted.bytes_of("parameters") == 64 * 64 * 4
    assert fitted.bytes_of("batch") == 32 * 4 // 4


@pytest.mark.parametrize("donate", ["none", ("params", "opt")])
def test_a_compiled_step_says_it_exactly(donate):
    step, *args = training_step(donate=donate)
    program = compile_for(step, *args, target="cpu")
    memory = program.memory_analysis()
    fitted = fit(program, chip="h100")
    assert fitted.basis == "compiled"
    for row in fitted.rows:
        assert row.exact
    assert fitted.peak_bytes == memory.needed_bytes
    assert not fitted.changes
    both = fit(step, *args, compiled=program, chip="h100")
    assert both.peak_bytes == fitted.peak_bytes
    assert both.basis == "compiled"
    assert groups(both)["parameters"] == ONE
    assert both.changes
    # What the estimate says of the same step is near, and nearer where nothing is left
    # to chance: results.
    guess = fit(step, *args, chip="h100")
    # The compiled program also returns the tuple of its results, 8 bytes for each.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert guess.bytes_of("results") == pytest.approx(results, abs=200)
    assert guess.peak_bytes == pytest.approx(fitted.peak_bytes, rel=0.25)


def scaled_update(scale, params, batch):
    """Parameters that a step returns with the same shape."""
    return params * scale + batch.T @ batch


class Trainer(eqx.Module):
    """A module whose methods are jitted."""

    scale: jax.Array

    @ft.partial(filter_jit, donate="params")
    def by_shardfx(self, params, batch):
        return scaled_update(self.scale, params, batch)

    @eqx.filter_jit(donate="all")
    def by_equinox(self, params, batch):
        return scaled_update(self.scale, params, batch)

    @ft.partial(jax.jit, donate_argnums=1)
    def by_jax(self, params, batch):
        return scaled_update(self.scale, params, batch)


SCALE = jnp.float32(2)
TRAINER = Trainer(SCALE)
BY_SHARDFX = filter_jit(scaled_update, donate="params")
PARTIAL_STEPS = {
    "shardfx": ft.partial(BY_SHARDFX, SCALE),
    "a number": ft.partial(BY_SHARDFX, 2.0),
    "equinox": ft.partial(eqx.filter_jit(scaled_update, donate="all"), SCALE),
    "equinox.Partial": eqx.Partial(BY_SHARDFX, SCALE),
    "jax": ft.partial(jax.jit(scaled_update, donate_argnums=(0, 1)), 2.0),
    "two partials": ft.partial(ft.partial(BY_SHARDFX), SCALE),
    "a method by shardfx": TRAINER.by_shardfx,
    "a method by equinox": TRAINER.by_equinox,
    "a method by jax": TRAINER.by_jax,
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("kind", PARTIAL_STEPS)
def test_a_partial_step_donates_what_it_was_jitted_to(kind):
    params = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    batch = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    whole = jax.jit(ft.partial(scaled_update, 2.0), donate_argnums=0)
    expected = fit(whole, params, batch, chip="h100")
    fitted = fit(PARTIAL_STEPS[kind], params, batch, chip="h100")
    assert fitted.bytes_of("results") == expected.bytes_of("results") == 0
    assert fitted.peak_bytes == pytest.approx(expected.peak_bytes, abs=8)


def by_words(fitted, words):
    (change,) = [change for change in fitted.changes if words in change.what]
    return change


def test_each_change_saves_what_it_says():
    before = fit(*training_step(), chip=SMALL)
    assert not before.fits  # the state alone is too much
    zero = by_words(before, "ZeRO-1")
    after = fit(*training_step(over="data"), chip=SMALL)
    # Parameters behind a gathered update are not the batch.
    assert after.batch == before.batch is not None
    assert zero.peak_bytes == after.peak_bytes == before.peak_bytes - zero.saves_bytes
    assert zero.how == 'follow(optimizer.init, params_plan, over="data")'
    donated = by_words(before, "donate")
    assert donated.how == 'filter_jit(step, donate=("params", "opt"))'
    # Old and new, half of each; the count stays.
    assert by_words(before, "bfloat16").saves_bytes == before.bytes_of("optimizer") - 4
    assert by_words(before, "ZeRO-3").saves_bytes > zero.saves_bytes
    assert (
        by_words(before, "host memory").host_bytes == before.bytes_of("optimizer") - 4
    )
    assert "ZeRO-1" in before.explain()
    assert "ZeRO-1" not in str(before)


def test_a_plan_alone_says_what_its_arrays_take_and_no_more():
    rules = PathRules([(".*", P())])
    weights = plan(
        {"up": jnp.ones((8, 8)), "average": jnp.ones(8)},
        MESH,
        paths=rules,
    )
    opt = follow(adam, weights, memory_kinds=[(".*", "pinned_host")])
    joined = ShardPlan.join(params=weights, opt=opt)
    fitted = fit(joined, chip="h100")
    assert groups(fitted) == {"params": 288, "opt": 0}
    assert fitted.basis == "arguments"
    assert not fitted.is_close
    assert "The arrays alone take 288 B of" in str(fitted)
    assert "activations are not counted." in str(fitted)
    (row,) = [row for row in fitted.rows if row.group == "opt"]
    assert row.host_bytes == 2 * 288 + 4
    assert "in host memory" in str(fitted)
    assert not fitted.changes
    assert fitted.batch is None


class Model(eqx.Module):
    weight: jax.Array
    bias: np.ndarray
    act: object = jnp.tanh

    def __call__(self, x):
        return self.act(x @ self.weight + jnp.asarray(self.bias, x.dtype))  # pyright: ignore[reportCallIssue]


def test_modules_with_functions_keys_and_odd_arrays():
    array = jnp.ones((12, 6), jnp.bfloat16)
    model = Model(array, np.zeros(6, np.float32))
    array = jnp.zeros((0, 4), jnp.float8_e4m3fn)
    rest = {"key": jax.random.key(0), "none": array}
    sharding = jax.NamedSharding(MESH.abstract(), P())
    x = jax.ShapeDtypeStruct((3, 12), jnp.bfloat16, sharding=sharding)

    def step(model, rest, x):
        noise = jax.random.normal(rest["key"], (3, 6), jnp.bfloat16)
        return model(x) + noise + jnp.sum(rest["none"].astype(jnp.bfloat16))

    fitted = fit(step, model, rest, x, chip="h100")
    assert fitted.bytes_of("parameters") == 12 * 6 * 2 + 24
    assert fitted.peak_bytes < 1024


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_types_and_manual_axes(kind):
    mesh = MeshSpec({"data": 4, "tensor": 2}, axis_types=kind)
    struct = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    rules = PathRules([(".*", P("data"))])
    x = plan(
        struct,
        mesh,
        paths=rules,
    )

    def step(x):
        y = jnp.sin(x) * 2
        inner = jax.shard_map(
            lambda z: z @ z.T @ z,
            mesh=mesh.abstract(),
            in_specs=P("data"),
            out_specs=P("data"),
        )
        return inner(y)

    fitted = fit(step, x.structs, chip="h100")
    assert fitted.bytes_of("batch") == fitted.bytes_of("results") == 64 * 32 * 4 // 4


def test_messages():
    step, *args = training_step()
    with pytest.raises(ChipError, match="there is no chip 'v9'"):
        fit(step, *args, chip="v9")
    with pytest.raises(LeafTypeError) as caught:
        fit(3)
    assert (
        str(caught.value)
        == "`step` must be a function, what one compiled to, or a plan, not int; pass"
        " `fit(step, *args, chip=...)`, as the step is called."
    )
    rules = PathRules([(".*", P())])
    with pytest.raises(
        PlanMismatchError,
        match="argument 0 is a plan, and a step takes arrays or structs",
    ):
        fit(step, plan(args[0], MESH, paths=rules), *args[1:])


def test_a_step_without_any_sharding_is_for_one_device():
    struct = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    weights = {
        "up": struct,
        "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)

    def step(w, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    compiled = jax.jit(step).lower(weights, x).compile()
    counted = fit(compiled, chip="h100").peak_bytes
    estimate = fit(step, weights, x, chip="h100")
    assert estimate.peak_bytes == pytest.approx(counted, rel=0.01)
    assert estimate.bytes_of("parameters") == 2 * 64 * 256 * 4
    assert "one device" in str(estimate)
    assert estimate.changes
    for traced in (jax.jit(step).trace(weights, x), filter_jit(step).trace(weights, x)):
        assert fit(traced, chip="h100").peak_bytes == estimate.peak_bytes

    # A mesh within the step is one.
    def constrained(w, x):
        rows = jax.NamedSharding(MeshSpec({"data": 8}).abstract(), jax.P("data"))
        return step(w, jax.lax.with_sharding_constraint(x, rows))

    with pytest.raises(MeshError, match="the step has no mesh"):
        fit(constrained, weights, x)


@pytest.mark.parametrize("is_partial", [False, True], ids=["closure", "partial"])
def test_an_array_that_a_step_closes_over_is_counted(is_partial):
    table = jnp.arange(WIDTH * HIDDEN, dtype=jnp.float32).reshape(WIDTH, HIDDEN)

    def step(table, batch):
        return jnp.tanh(batch @ table)

    rules = PathRules.parse(".*->data")
    struct = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    structs = plan(struct, MESH, paths=rules).structs
    closed_over = lambda batch: step(table, batch)
    if is_partial:
        closed_over = ft.partial(step, table)
    fitted = fit(closed_over, structs, chip=SMALL)
    assert fitted.bytes_of("constants and scalars") == table.nbytes
    assert any(array.bytes == table.nbytes for array in fitted.largest)

    # As an argument, each device has it whole too.
    replicated = plan(table, MESH, paths=PathRules.parse(".*->replicate")).structs
    given = fit(step, replicated, structs, chip=SMALL)
    assert given.bytes_of("constants and scalars") == 0
    assert fitted.peak_bytes == given.peak_bytes


def test_a_row_of_one_number_takes_no_memory_of_its_own():
    ones = np.ones((WIDTH, HIDDEN), np.float32)
    struct = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    structs = plan(struct, MESH, paths=PathRules.parse(".*->data")).structs
    fitted = fit(lambda batch: jnp.tanh(batch @ ones), structs, chip=SMALL)
    assert fitted.bytes_of("constants and scalars") == 0
