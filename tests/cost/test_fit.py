import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import (
    ChipError,
    LeafTypeError,
    MeshSpec,
    PathRules,
    PlanMismatchError,
    ShardPlan,
    chips,
    compile_for,
    filter_jit,
    fit,
    follow,
    plan,
    zero_table,
)
from shardfx._cost.memory.layouts import padded


MESH = MeshSpec({"data": 4, "tensor": 2})
WIDTH, HIDDEN, LAYERS, BATCH = 64, 256, 6, 32
# A chip without tiles, and small enough that the steps below do not fit.
SMALL = dataclasses.replace(chips.find("h100"), name="small", usable_hbm_bytes=2_000_000)


def structs():
    return {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }


def adam(params):
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return {"mu": zeros, "nu": zeros, "count": jnp.zeros((), jnp.int32)}


def make_step(remat=False):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params, batch):
        body = jax.checkpoint(layer) if remat else layer
        return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)

    def step(params, opt, batch):
        grads = jax.grad(loss)(params, batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt["nu"], grads)
        new = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
        return new, {"mu": mu, "nu": nu, "count": opt["count"] + 1}

    return step


def plans(mesh=MESH, batch=BATCH, over=None):
    params = plan(structs(), mesh, paths=PathRules([("up", P(None, None, "tensor")), ("down", P(None, "tensor"))]))
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    return {
        "params": params,
        "opt": follow(adam, params, over=over),
        "batch": plan(x, mesh, paths=PathRules([(".*", P("data"))])),
    }


def groups(found):
    return {row.group: row.bytes for row in found.rows}


def test_arguments_are_counted_by_what_they_are_for():
    made = plans()
    found = fit(made, chip="h100")
    one = 2 * LAYERS * WIDTH * HIDDEN * 4 // 2
    assert groups(found) == {
        "parameters": one,
        "optimizer: mu": one,
        "optimizer: nu": one,
        "gradients": one,
        "batch": BATCH * WIDTH * 4 // 4,
        "optimizer: the rest": 4,
    }
    assert found.how == "arguments" and found.bytes_of("optimizer") == made["opt"].bytes_per_device
    assert found.peak_bytes == sum(row.bytes for row in found.rows) == found.usable_bytes - found.headroom_bytes
    assert "no step was given, so activations are not counted; pass `step=`." in str(found)


@pytest.mark.parametrize("form", ["by name", "in another order", "in order", "joined", "one tree"])
def test_plans_may_come_in_every_form(form):
    made, step = plans(), make_step()
    wanted = fit(made, step=step, chip="h100")
    if form == "in another order":
        found = fit({name: made[name] for name in ("batch", "params", "opt")}, step=step, chip="h100")
    elif form == "in order":
        found = fit([*made.values()], step=step, chip="h100")
    elif form == "joined":
        found = fit(ShardPlan.join(**made), step=step, chip="h100")
    elif form == "one tree":
        found = fit(ShardPlan.join(**made), step=lambda state: step(**state), chip="h100")
    else:
        found = fit(made, step=filter_jit(step), chip="h100")
    assert groups(found) == groups(wanted) and found.largest_batch == wanted.largest_batch


def compiled(made, step, *, donate="none"):
    mesh = MESH.build(jax.devices())
    on = [one.on(mesh) for one in made.values()]
    jitted = filter_jit(step, in_shardings=tuple(on), out_shardings=(on[0], on[1]), donate=donate)
    return jitted.lower(*[one.structs for one in on]).compile()


@pytest.mark.parametrize("donate", ["none", ("params", "opt")])
def test_a_compiled_step_says_it_exactly(donate):
    made, step = plans(), make_step()
    program = compiled(made, step, donate=donate)
    memory = program.memory_analysis()
    found = fit(made, step=program, chip="h100")
    assert found.how == "compiled" and all(row.exact for row in found.rows)
    assert found.peak_bytes == (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert groups(found)["parameters"] == made["params"].bytes_per_device
    both = fit(made, step=step, compiled=program, chip="h100", donate=donate)
    assert (both.peak_bytes, both.how) == (found.peak_bytes, "compiled")
    assert both.changes and both.largest_batch and not found.largest_batch
    # What the estimate says of the same step is near, and nearer to nothing that was left out: arguments and results.
    guess = fit(made, step=step, chip="h100", donate=donate)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The compiled program also returns the tuple of its results, 8 bytes for each.
    assert groups(guess).get("results", 0) == pytest.approx(results, abs=200)
    assert guess.peak_bytes == pytest.approx(found.peak_bytes, rel=0.25)


def compiled_for_cpu(made, step, **given):
    memory = compile_for(step, made, "cpu", **given).memory
    sums = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return sums + memory.temp_size_in_bytes


def test_what_is_live_in_a_chain_of_products():
    # 3 products: at the second, its operand and its result are live, and one of them lies where the last product's
    # result will; relu takes no memory of its own.
    mesh = MeshSpec({"data": 2})
    x = plan(jax.ShapeDtypeStruct((8, 16), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))
    w = plan(jax.ShapeDtypeStruct((16, 16), jnp.float32), mesh, paths=PathRules([(".*", P())]))

    def step(x, w):
        return jax.nn.relu(jax.nn.relu(x @ w) @ w) @ w

    found = fit({"x": x, "w": w}, step=step, chip="h100", groups=[("^w$", "parameters")])
    shard = 4 * 16 * 4
    assert groups(found) == {"parameters": 16 * 16 * 4, "activations": shard, "batch": shard, "results": shard}
    counted = compiled_for_cpu({"x": x, "w": w}, step)
    assert found.peak_bytes == pytest.approx(counted, abs=64)


def test_an_operand_that_must_be_gathered_counts_whole_while_it_is_used():
    mesh = MeshSpec({"data": 4})
    x = plan(jax.ShapeDtypeStruct((64, 128), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))
    w = plan(jax.ShapeDtypeStruct((128, 32), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))
    found = fit({"x": x, "weights": w}, step=lambda x, weights: x @ weights, chip="h100")
    assert groups(found)["copies in other layouts"] == 128 * 32 * 4
    assert groups(found)["parameters"] == 128 * 32 * 4 // 4
    (copy,) = [one for one in found.largest if one.group == "copies in other layouts"]
    assert copy.source is not None and copy.source.file == __file__ and copy.what == "f32[128,32] cut data,-"


def test_a_result_is_whole_before_it_is_added_up_and_spread():
    mesh = MeshSpec({"data": 4})
    x = plan(jax.ShapeDtypeStruct((64, 512), jnp.float32), mesh, paths=PathRules([(".*", P(None, "data"))]))
    w = plan(jax.ShapeDtypeStruct((512, 128), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))
    spread = jax.NamedSharding(mesh.abstract(), P("data"))

    def step(x, weights):
        return jax.lax.with_sharding_constraint(x @ weights, spread)

    found = fit({"x": x, "weights": w}, step=step, chip="h100")
    assert groups(found)["results"] == 64 * 128 * 4 // 4
    arguments = sum(row.bytes for row in found.rows if row.exact)
    assert found.peak_bytes >= arguments + 64 * 128 * 4


@pytest.mark.parametrize("returned", [lambda w, x: None, lambda w, x: {}, lambda w, x: jnp.sum(w["w"]) + jnp.sum(x)])
def test_steps_that_return_little_and_take_their_arguments_by_name(returned):
    w = plan({"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, MESH, paths=PathRules([("w", P())]))
    x = plan(jax.ShapeDtypeStruct((32, 64), jnp.float32), MESH, paths=PathRules([(".*", P("data"))]))

    def step(*, params, batch):
        return returned(params, batch)

    found = fit({"batch": x, "params": w}, step=step, chip="h100")
    assert found.bytes_of("parameters") == 64 * 64 * 4 and found.peak_bytes < 64 * 64 * 4 + 32 * 64 + 1024
    # As many as fit, beside parameters that do not grow.
    room = found.usable_bytes - found.bytes_of("parameters")
    assert found.largest_batch == pytest.approx(room // (64 * 4) * 4, rel=0.01)


def by_words(found, words):
    (change,) = [change for change in found.changes if words in change.what]
    return change


def test_each_change_saves_what_it_says():
    made, step = plans(), make_step()
    before = fit(made, step=step, chip=SMALL)
    assert not before.fits
    zero = by_words(before, "ZeRO-1")
    after = fit(plans(over="data"), step=step, chip=SMALL)
    assert zero.peak_bytes == after.peak_bytes == before.peak_bytes - zero.saves_bytes
    assert zero.how == 'follow(optimizer.init, params_plan, over="data")'
    donated = by_words(before, "donate")
    assert donated.how == 'filter_jit(step, donate=("opt", "params"))'
    assert donated.peak_bytes == fit(made, step=step, chip=SMALL, donate=("params", "opt")).peak_bytes
    assert donated.peak_bytes == fit(made, step=filter_jit(step, donate=("params", "opt")), chip=SMALL).peak_bytes
    # A small batch lies where results will: half of it saves nothing.
    assert not [change for change in before.changes if "half the batch" in change.what]
    half = by_words(fit(plans(batch=2048), step=step, chip=SMALL), "half the batch")
    assert half.peak_bytes == fit(plans(batch=1024), step=step, chip=SMALL).peak_bytes
    assert by_words(before, "bfloat16").saves_bytes == before.bytes_of("optimizer") - 4  # old and new, half of each
    third = by_words(before, "ZeRO-3")
    assert third.saves_bytes > zero.saves_bytes
    host = by_words(before, "host memory")
    assert host.host_bytes == before.bytes_of("optimizer") - 4


def test_remat_is_priced_before_it_is_written():
    made = plans(batch=2048)
    before = fit(made, step=make_step(), chip=SMALL)
    told = by_words(before, "recompute")
    after = fit(made, step=make_step(remat=True), chip=SMALL)
    assert told.peak_bytes == pytest.approx(after.peak_bytes, rel=0.15) and after.peak_bytes < 0.8 * before.peak_bytes
    assert not [change for change in after.changes if "recompute" in change.what]


def test_the_largest_batch_fits_and_the_next_does_not():
    step = make_step()
    found = fit(plans(), step=step, chip=SMALL)
    assert found.batch == BATCH and found.largest_batch == 0  # the state alone is too much
    roomy = dataclasses.replace(SMALL, usable_hbm_bytes=6_000_000)
    found = fit(plans(), step=step, chip=roomy)
    most = found.largest_batch
    assert most and most % 4 == 0 and most > BATCH
    assert fit(plans(batch=most), step=step, chip=roomy).fits
    assert not fit(plans(batch=most + 4), step=step, chip=roomy).fits
    assert f"The largest batch that fits: {most} (now 32)." in str(found)


def test_arrays_in_host_memory_take_none_of_the_chips():
    params = plans()["params"]
    opt = follow(adam, params, memory_kinds=[(".*", "pinned_host")])
    found = fit({"params": params, "opt": opt}, chip="h100")
    assert found.bytes_of("optimizer") == 0
    (mu,) = [row for row in found.rows if row.group == "optimizer: mu"]
    assert mu.host_bytes == params.bytes_per_device and "in host memory" in str(found)


def test_groups_are_told_by_names_and_can_be_told_otherwise():
    params = plan({"up": jnp.ones((8, 8)), "average": jnp.ones(8)}, MESH, paths=PathRules([(".*", P())]))
    cache = plan({"k": jnp.ones((4, 16)), "length": jnp.zeros((), int)}, MESH, paths=PathRules([(".*", P())]))
    found = fit({"params": params, "kv_cache": cache, "extra": params}, chip="h100")
    assert groups(found) == {"parameters": 288, "extra": 288, "KV cache": 260}
    found = fit({"params": params, "extra": params}, chip="h100", groups=[("^extra/up", "EMA"), ("average", "tail")])
    assert groups(found) == {"parameters": 256, "EMA": 256, "tail": 64}
    # One plan, not joined, is the parameters'.
    assert groups(fit(params, chip="h100")) == {"parameters": 288}


def test_a_train_state_is_told_apart_by_its_fields():
    def make(params):
        return {"params": params, "opt_state": (adam(params), ()), "step": jnp.zeros((), jnp.int32)}

    state = follow(make, plans()["params"])
    found = groups(fit(state, chip="h100"))
    assert found["optimizer: 0/mu"] == found["optimizer: 0/nu"] == found["parameters"] and found["step"] == 4


class Model(eqx.Module):
    weight: jax.Array
    bias: np.ndarray
    act: object = jnp.tanh

    def __call__(self, x):
        return self.act(x @ self.weight + jnp.asarray(self.bias, x.dtype))  # pyright: ignore[reportCallIssue]


def test_modules_with_functions_keys_and_odd_arrays():
    model = Model(jnp.ones((12, 6), jnp.bfloat16), np.zeros(6, np.float32))
    key = jax.random.key(0)
    empty = jnp.zeros((0, 4), jnp.float8_e4m3fn)
    rules = PathRules([("weight", P("tensor")), (".*", P())])
    ours, rest = plan(model, MESH, paths=rules), plan({"key": key, "none": empty}, MESH, paths=PathRules([(".*", P())]))
    x = jax.ShapeDtypeStruct((3, 12), jnp.bfloat16, sharding=jax.NamedSharding(MESH.abstract(), P()))

    def step(model, rest, x):
        noise = jax.random.normal(rest["key"], (3, 6), jnp.bfloat16)
        return model(x) + noise + jnp.sum(rest["none"].astype(jnp.bfloat16))

    args = (model, {"key": key, "none": empty}, x)
    found = fit({"model": ours, "rest": rest, "x": x}, step=step, args=args, chip="h100")
    assert groups(found)["parameters"] == 12 * 6 * 2 // 2 + 24 and groups(found)["rest"] == 8
    assert (found.batch, found.largest_batch) == (3, None)  # the step is written for three


def test_loops_and_branches_count_at_their_worst():
    x = plan(jax.ShapeDtypeStruct((64, 64), jnp.float32), MESH, paths=PathRules([(".*", P())]))

    def step(x):
        def body(carry):
            count, y = carry
            return count + 1, jnp.tanh(y @ y) @ y

        _, y = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))
        return jax.lax.cond(y[0, 0] > 0, lambda y: (y @ y) @ y, lambda y: y, y)

    found = fit({"x": x}, step=step, chip="h100")
    one = 64 * 64 * 4
    # The loop: what is carried, tanh of the product, and the next. The branch: as much.
    assert 2 * one <= groups(found)["activations"] <= 4 * one


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_types_and_manual_axes(kind):
    mesh = MeshSpec({"data": 4, "tensor": 2}, axis_types=kind)
    x = plan(jax.ShapeDtypeStruct((64, 32), jnp.float32), mesh, paths=PathRules([(".*", P("data"))]))

    def step(x):
        y = jnp.sin(x) * 2
        inner = jax.shard_map(lambda z: z @ z.T @ z, mesh=mesh.abstract(), in_specs=P("data"), out_specs=P("data"))
        return inner(y)

    found = fit({"x": x}, step=step, chip="h100")
    assert groups(found)["batch"] == groups(found)["results"] == 64 * 32 * 4 // 4


def test_a_constraint_lays_a_value_out_and_all_that_depends_on_it():
    x = plan(jax.ShapeDtypeStruct((64, 64), jnp.float32), MESH, paths=PathRules([(".*", P())]))
    rows = jax.NamedSharding(MESH.abstract(), P("data", "tensor"))

    def step(x):
        y = jax.lax.with_sharding_constraint(x @ x, rows)
        return jnp.sum((y * 2) @ y.T)

    found = fit({"x": x}, step=step, chip="h100")
    assert "f32[64,64] cut data,tensor" in [one.what for one in found.largest]


@pytest.mark.parametrize(
    "shape, dtype, bytes_",
    [
        ((16, 64, 8, 64), jnp.bfloat16, 16 * 8 * 64 * 128 * 2),
        ((32768, 64), jnp.float32, 32768 * 64 * 4),
        ((16, 1, 64, 1024), jnp.bfloat16, 16 * 64 * 1024 * 2),
        ((1, 1024), jnp.int32, 1024 * 4),
        ((64,), jnp.float32, 128 * 4),
        ((), jnp.float32, 4),
        ((0, 3), jnp.float32, 0),
    ],
)
def test_tiles_pad_the_two_dimensions_that_lose_least(shape, dtype, bytes_):
    # The first four are as libtpu lays out arguments for v5e.
    assert np.prod(padded(shape, (8, 128)), dtype=int) * jnp.dtype(dtype).itemsize == bytes_
    assert padded(shape, None) == shape


def test_messages():
    made = plans()
    with pytest.raises(ChipError, match="there is no chip 'v9'"):
        fit(made, chip="v9")
    with pytest.raises(LeafTypeError) as caught:
        fit(made, step=3)
    assert str(caught.value) == (
        "`step` must be a function, or what one compiled to, not int; pass `filter_jit(step, ...)`, or "
        "`filter_jit(step, ...).lower(...).compile()`."
    )
    with pytest.raises(LeafTypeError, match="`plans` must be a plan, a sequence of plans, or plans by name, not int"):
        fit(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanMismatchError, match="the plans are for different meshes: data=4,tensor=2, data=8"):
        fit({"params": made["params"], "batch": plans(MeshSpec({"data": 8, "tensor": 1}))["batch"]})
    with pytest.raises(PlanMismatchError, match="none of the plans says which mesh it is for"):
        fit({"params": structs()})
    with pytest.raises(PlanMismatchError, match=r"there are 3 plans \(params, opt, batch\) and 1 arguments in `args`"):
        fit(made, args=(structs(),))
    with pytest.raises(PlanMismatchError, match="an argument has 2 arrays, and the plan for it 1"):
        fit({"batch": made["batch"]}, args=(structs(),))


def test_the_stages_of_zero_are_those_of_the_plans():
    params = plans()["params"]
    made = zero_table(params, adam, over="data", chip=SMALL)
    one = params.bytes_per_device
    states = {False: follow(adam, params).bytes_per_device, True: follow(adam, params, over="data").bytes_per_device}
    found = [
        (row.stage, row.offload, row.parameters, row.gradients, row.optimizer, row.host_bytes) for row in made.rows
    ]
    assert found == [
        (0, False, one, one, states[False], 0),
        (0, True, one, one, 0, states[False]),
        (1, False, one, one, states[True], 0),
        (1, True, one, one, 0, states[True]),
        (2, False, one, one // 4, states[True], 0),
        (2, True, one, one // 4, 0, states[True]),
        (3, False, one // 4, one // 4, states[True], 0),
        (3, True, one // 4, one // 4, 0, states[True]),
    ]
    assert [row.fits for row in made.rows] == [row.bytes <= 2_000_000 for row in made.rows]
    assert "ZeRO-3, offload" in str(made) and "small has 1.9 MiB for a program" in str(made)


def test_a_state_comes_back_as_it_came():
    # The new parameters are computed from moments that are cut over `data`, and lie as the old ones all the same.
    found = fit(plans(over="data"), step=make_step(), chip="h100", donate=("params", "opt"))
    assert "results" not in groups(found)
    kept = fit(plans(over="data"), step=make_step(), chip="h100")
    assert groups(kept)["results"] == sum(plans(over="data")[name].bytes_per_device for name in ("params", "opt"))


def test_no_group_takes_less_than_nothing_where_arrays_lie_in_the_memory_of_results():
    weights = {"up": jax.ShapeDtypeStruct((64, 255), jnp.float32), "down": jax.ShapeDtypeStruct((255, 64), jnp.float32)}
    cut = PathRules([("up", P("fsdp")), ("down", P(None, "fsdp"))])
    params = plan(weights, MeshSpec({"data": 2, "fsdp": 2}), paths=cut)
    batch = plan(jax.ShapeDtypeStruct((16, 64), jnp.float32), params.mesh, paths=PathRules([("", P(("data", "fsdp")))]))

    def step(params, opt, batch):
        grads = jax.grad(lambda p: jnp.mean((jax.nn.relu(batch @ p["up"]) @ p["down"] - batch) ** 2))(params)
        new = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["mu"], grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, new), {**opt, "mu": new}

    found = fit([params, follow(adam, params), batch], step=step, chip=SMALL)
    assert min(row.bytes for row in found.rows) > 0
    assert sum(row.bytes for row in found.rows) == found.peak_bytes
