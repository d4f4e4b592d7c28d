"""`search` and `name_axes` of what `.trace` returned, alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from models import f32, mlp_step

from shardfx import filter_jit
from shardfx.auto import name_axes, search
from shardfx.errors import LeafTypeError


STEP, *ARGS = mlp_step(width=1024, hidden=8192, rows=4096)
DEVICES = "tpu:v5e:2x4"


def best_of(step, *args):
    best, *_ = search(step, *args, devices=DEVICES, effort="least")
    return best


def names_of(axes):
    return [axis.name for axis in axes]


def places_of(axes):
    return [axis.places for axis in axes]


def test_search_of_a_trace_equals_that_of_its_function():
    for jit in (
        jax.jit(STEP, donate_argnums=0),
        filter_jit(STEP, donate=0),
    ):
        best = best_of(jit, *ARGS)
        traced = jit.trace(*ARGS)
        of_trace = best_of(traced)
        assert of_trace.title == best.title
        assert of_trace.seconds == best.seconds
        assert of_trace.memory_bytes == best.memory_bytes
        assert of_trace.donated == best.donated == (0,)
        assert of_trace.code() == best.code()


def test_name_axes_of_a_trace_equals_that_of_its_function():
    traced = jax.jit(STEP).trace(*ARGS)
    axes = name_axes(STEP, *ARGS).axes
    axes_of_trace = name_axes(traced).axes
    assert names_of(axes_of_trace) == names_of(axes)
    joins = [axis.joins for axis in axes]
    assert [axis.joins for axis in axes_of_trace] == joins


def test_a_collected_argument_may_have_no_arrays():
    def step(*arrays):
        return arrays[0] @ arrays[2]

    traced = jax.jit(step).trace(f32(64, 32), None, f32(32, 16))
    places = places_of(name_axes(traced).axes)
    assert ("args[0][0]",) in places
    assert ("args[2][1]",) in places


SQUARE = f32(64, 64)


@pytest.mark.parametrize(
    "step, args",
    [
        (lambda *arrays: arrays[0] @ arrays[1], (SQUARE, SQUARE)),
        (
            lambda first, *arrays: arrays[0] @ first.T @ arrays[0].T,
            (SQUARE, SQUARE),
        ),
        (
            lambda w, *arrays: arrays[0]["x"] @ (w @ arrays[1]["y"]),
            (SQUARE, {"x": SQUARE}, {"y": SQUARE}),
        ),
    ],
)
def test_collected_arguments_of_traces_are_named_as_plain(step, args):
    traced = jax.jit(step).trace(*args)
    axes = name_axes(step, *args).axes
    axes_of_trace = name_axes(traced).axes
    assert names_of(axes_of_trace) == names_of(axes)
    if len(args) > 2:
        assert places_of(axes_of_trace) == places_of(axes)


def test_a_trace_takes_no_arguments():
    traced = jax.jit(STEP).trace(*ARGS)
    with pytest.raises(LeafTypeError, match="traced already; pass it alone"):
        search(traced, *ARGS, devices=DEVICES)


def test_a_trace_with_keywords_is_refused():
    def step(params, *, x):
        return STEP(params, x)

    for jit in (jax.jit(step), filter_jit(step)):
        traced = jit.trace(ARGS[0], x=ARGS[1])
        with pytest.raises(LeafTypeError, match=r"keyword arguments \(x\).*\*args"):
            search(traced, devices=DEVICES)


def test_a_trace_for_explicit_axes_is_refused():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=sharding)
    traced = jax.jit(jnp.sin).trace(x)
    with pytest.raises(LeafTypeError, match="Explicit axes.*pass the function"):
        search(traced, devices=DEVICES)


def test_a_trace_of_flax_modules_is_refused():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    traced = nnx.jit(lambda model, x: model(x)).trace(model, f32(64, 8))
    with pytest.raises(LeafTypeError, match=r"flax.nnx.*pass the function"):
        search(traced, devices=DEVICES)
