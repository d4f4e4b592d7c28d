"""A function of `filter_jit` that is traced and lowered, by plans with and without
devices.
"""

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
    y = product(params, batch) + params["b"] * rate
    y += sum(more)
    y += sum(named.values())
    doubled = jax.tree.map(lambda x: x * 2, params)
    return {"new": doubled, "y": y, "text": "text"}


def product(params, batch):
    return batch["x"] @ params["w"]


def plans(mesh: MeshSpec | Mesh = MESH):
    params_plan = plan(PARAMS, mesh, paths=RULES, unused="allow")
    batch_plan = plan(BATCH, mesh, paths=RULES, unused="allow")
    return params_plan, batch_plan


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
    assert arguments_by_path == expected
    donated_paths = {path for path, array in arrays.items() if array.is_donated}
    assert donated_paths == {"params/w", "params/b", "more/0"}
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
    rows = NamedSharding(MESH.abstract(), P("data"))
    for out, w_sharding, y_sharding in (
        ({"new": params, "y": rows, "text": None}, params.shardings["w"], rows),
        ({"new": params, "y": None, "text": None}, params.shardings["w"], None),
        (None, None, None),
    ):
        trace = traced(out_shardings=out)
        struct_by_path = {result.path: result.struct for result in trace.results}
        shapes = [result.struct.shape for result in trace.results]
        assert shapes == [aval.shape for aval in trace.jaxpr.out_avals]
        assert set(struct_by_path) == {"new/w", "new/b", "y"}
        assert struct_by_path["new/w"].shape == (4, 8)
        assert struct_by_path["new/w"].sharding == w_sharding
        assert struct_by_path["y"].sharding == y_sharding

    def named(x):
        return {"b": x + 1, "a": (x.sum(),)}

    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    trace = filter_jit(named).trace(struct)
    assert [result.path for result in trace.results] == ["a/0", "b"]


def test_a_trace_has_what_that_of_jax_has():
    params, batch = plans()
    jitted = filter_jit(product, in_shardings=(params, batch))
    ours = jitted.trace(params.structs, batch.structs)
    theirs = jax.jit(product).trace(params.structs, batch.structs)
    texts = [str(eqn.primitive) for eqn in ours.jaxpr.eqns]
    assert texts == [str(eqn.primitive) for eqn in theirs.jaxpr.eqns]
    assert ours.fun_name == theirs.fun_name
    assert isinstance(ours.traced, type(theirs))


def test_arrays_of_the_function_itself_are_named():
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    trace = filter_jit(linear).trace(struct)
    actual = [(array.path, array.argument) for array in trace.arrays]
    assert actual == [("Linear/weight", None), ("Linear/bias", None), ("x", 0)]


def test_live_arrays_may_stand_in_the_place_of_structs():
    params, batch = plans()
    mesh = MESH.build(jax.devices())
    placed = (shard(PARAMS, params.on(mesh)), shard(BATCH, batch.on(mesh)))
    of_one_device = jax.tree.map(jnp.asarray, (PARAMS, BATCH))
    jitted = filter_jit(product, in_shardings=(params,))
    for trees, batch_sharding in (
        ((PARAMS, BATCH), None),
        (placed, batch.shardings["x"]),
        (of_one_device, None),
    ):
        trace = jitted.trace(*trees)
        sharding_by_path = {array.path: array.struct.sharding for array in trace.arrays}
        assert sharding_by_path["params/w"] == params.shardings["w"]
        assert sharding_by_path["batch/x"] == batch_sharding
        assert "tensor" in trace.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_call_needs_devices(kind):
    mesh = MeshSpec(dict(MESH.shape), axis_types=kind)
    params, batch = plans(mesh)
    built_plan = params.on(params.mesh.build(jax.devices()))
    sharding = NamedSharding(params.mesh.abstract(), P("data"))
    assert isinstance(sharding.mesh, AbstractMesh)
    for jitted in (
        filter_jit(product, in_shardings=(params, batch)),
        filter_jit(product, in_shardings=(built_plan,), out_shardings=sharding),
    ):
        trace = jitted.trace(params.structs, batch.structs)
        lowered = trace.lower(lowering_platforms=("tpu",))
        assert lowered.as_text()
        with pytest.raises(
            PlanMismatchError,
            match=r"was called, .* `plan.on\(plan.mesh.build\(jax.devices\(\)\)\)`",
        ):
            jitted(PARAMS, BATCH)


def test_a_struct_that_lies_otherwise_than_its_entry_is_an_error():
    mesh = MESH.build(jax.devices())
    for params, batch in (plans(), plans(mesh)):
        jitted = filter_jit(product, in_shardings=(params, batch))
        for lies_on in (MESH.abstract(), mesh):
            sharding = NamedSharding(lies_on, P(None, "data"))
            other = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)
            with pytest.raises(
                PlanMismatchError,
                match=r"`x` of argument 1 .* lies by .*, but its entry of `in_shar",
            ):
                jitted.trace(params.structs, {"x": other})
