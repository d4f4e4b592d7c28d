"""A function of `filter_jit` that is traced and lowered, by plans with and without
devices.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, filter_jit, plan, shard
from shardfx.errors import PlanMismatchError


MESH = MeshSpec({"data": 2, "tensor": 4})
RULES = PathRules([("w", P(None, "tensor")), ("b", P("tensor")), ("x", P("data"))])
PARAMS = {"w": np.ones((4, 8), np.float32), "b": np.ones(8, np.float32)}
BATCH = {"x": np.ones((6, 4), np.float32)}


def step(params, batch, *more, rate=0.5, **named):
    y = batch["x"] @ params["w"] + params["b"] * rate + sum(more) + sum(named.values())
    return {"new": jax.tree.map(lambda x: x * 2, params), "y": y, "text": "text"}


def plans(mesh: MeshSpec | Mesh = MESH):
    sharding_plan = plan(PARAMS, mesh, paths=RULES, unused="allow")
    return sharding_plan, plan(BATCH, mesh, paths=RULES, unused="allow")


def traced(**kwargs):
    params, batch = plans()
    in_shardings = {"params": params, "batch": batch}
    jitted = filter_jit(step, in_shardings=in_shardings, **kwargs)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    return jitted.trace(params.structs, batch.structs, struct, rate=struct, z=struct)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_plans_without_devices_are_traced_and_lowered(platform):
    params, _ = plans()
    out_shardings = {"new": params, "y": None, "text": None}
    trace = traced(out_shardings=out_shardings)
    text = trace.lower(lowering_platforms=(platform,)).as_text()
    assert 'sdy.mesh @mesh = <["data"=2, "tensor"=4]>' in text
    # `w` as it comes in, and as it goes out.
    assert text.count('#sdy.sharding<@mesh, [{}, {"tensor"}]>') == 2


def test_a_trace_says_what_it_takes():
    params, batch = plans()
    trace = traced(donate=("params", 2))
    arrays = {array.path: array for array in trace.arrays}
    assert set(arrays) == {"params/w", "params/b", "batch/x", "more/0", "rate", "z"}
    assert arrays["params/w"].struct == params.structs["w"]
    assert arrays["batch/x"].struct == batch.structs["x"]
    assert arrays["rate"].struct.sharding is None
    arguments_by_path = {path: array.argument for path, array in arrays.items()}
    expected = {
        "params/w": 0,
        "params/b": 0,
        "batch/x": 1,
        "more/0": 2,
        "rate": 3,
        "z": 4,
    }
    assert arguments_by_path == expected  # fmt: skip
    paths = {path for path, array in arrays.items() if array.is_donated}
    assert paths == {
        "params/w",
        "params/b",
        "more/0",
    }
    actual = [(array.struct.shape, array.struct.dtype) for array in trace.arrays]
    expected = [(aval.shape, aval.dtype) for aval in trace.jaxpr.in_avals]
    assert actual == expected
    text = trace.lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    for array in trace.arrays:
        assert f'loc("{array.name}")' in text
    assert trace.argument_paths[arrays["params/w"].name] == "params/w"
    assert trace.mesh == MESH


def test_a_trace_says_what_it_returns():
    params, _ = plans()
    shardings = NamedSharding(MESH.abstract(), P("data")), None
    for out in (
        {"new": params, "y": shardings[0], "text": None},
        {"new": params, "y": None, "text": None},
        None,
    ):
        trace = traced(out_shardings=out)
        struct_by_path = {result.path: result.struct for result in trace.results}
        shapes = [result.struct.shape for result in trace.results]
        assert shapes == [aval.shape for aval in trace.jaxpr.out_avals]
        assert set(struct_by_path) == {"new/w", "new/b", "y"}
        assert struct_by_path["new/w"].shape == (4, 8)
        expected = params.shardings["w"] if out else None
        assert struct_by_path["new/w"].sharding == expected
        assert struct_by_path["y"].sharding == (out["y"] if out else None)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    only = filter_jit(lambda x: {"b": x + 1, "a": (x.sum(),)}).trace(struct)
    assert [result.path for result in only.results] == ["a/0", "b"]


def test_a_trace_has_what_that_of_jax_has():
    params, batch = plans()
    jitted = filter_jit(
        lambda params, batch: batch["x"] @ params["w"], in_shardings=(params, batch)
    )
    ours = jitted.trace(params.structs, batch.structs)
    theirs = jax.jit(lambda params, batch: batch["x"] @ params["w"]).trace(
        params.structs, batch.structs
    )
    texts = [str(eqn.primitive) for eqn in ours.jaxpr.eqns]
    assert texts == [str(eqn.primitive) for eqn in theirs.jaxpr.eqns]
    assert ours.fun_name == theirs.fun_name
    assert isinstance(ours.traced, type(theirs))


def test_arrays_of_the_function_itself_are_named():
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    sharding_plan = filter_jit(linear).trace(jax.ShapeDtypeStruct((4,), jnp.float32))
    named = [("Linear/weight", None), ("Linear/bias", None), ("x", 0)]
    actual = [(array.path, array.argument) for array in sharding_plan.arrays]
    assert actual == named


def test_live_arrays_may_stand_in_the_place_of_structs():
    params, batch = plans()
    placed = [
        shard(tree, sharding_plan.on(MESH.build(jax.devices())))
        for tree, sharding_plan in ((PARAMS, params), (BATCH, batch))
    ]
    jitted = filter_jit(
        lambda params, batch: batch["x"] @ params["w"], in_shardings=(params,)
    )
    for trees in ((PARAMS, BATCH), placed, jax.tree.map(jnp.asarray, (PARAMS, BATCH))):
        trace = jitted.trace(*trees)
        sharding_by_path = {array.path: array.struct.sharding for array in trace.arrays}
        assert sharding_by_path["params/w"] == params.shardings["w"]
        if trees is placed:
            expected = batch.shardings["x"]
        else:
            expected = None
        assert sharding_by_path["batch/x"] == expected
        assert "tensor" in trace.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_call_needs_devices(kind):
    mesh = MeshSpec(dict(MESH.shape), axis_types=kind)
    params, batch = plans(mesh)
    run = ft.partial(filter_jit, lambda params, batch: batch["x"] @ params["w"])
    struct = params.on(params.mesh.build(jax.devices()))
    sharding = NamedSharding(params.mesh.abstract(), P("data"))
    assert isinstance(sharding.mesh, AbstractMesh)
    output = run(in_shardings=(params, batch))
    for jitted in (
        output,
        run(in_shardings=(struct,), out_shardings=sharding),
    ):
        lowered = jitted.trace(params.structs, batch.structs).lower(
            lowering_platforms=("tpu",)
        )
        assert lowered.as_text()
        with pytest.raises(
            PlanMismatchError,
            match=r"was called, .* `plan.on\(plan.mesh.build\(jax.devices\(\)\)\)`",
        ):
            jitted(PARAMS, BATCH)


def test_a_struct_that_lies_otherwise_than_its_entry_is_an_error():
    mesh = MESH.build(jax.devices())
    for params, batch in (plans(), plans(mesh)):
        jitted = filter_jit(
            lambda params, batch: batch["x"] @ params["w"], in_shardings=(params, batch)
        )
        for lies_on in (MESH.abstract(), mesh):
            sharding = NamedSharding(lies_on, P(None, "data"))
            other = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)
            with pytest.raises(
                PlanMismatchError,
                match=r"`x` of argument 1 .* lies by .*, but its entry of `in_shar",
            ):
                jitted.trace(params.structs, {"x": other})
