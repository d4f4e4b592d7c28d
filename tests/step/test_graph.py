"""A lowered step as operations: how often each runs, what it computes, and which
dimensions belong together.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import P

from shardfx import _step


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def program(step, *args, platform="tpu"):
    lowered = (
        jax.jit(step, keep_unused=True)
        .trace(*args)
        .lower(lowering_platforms=(platform,))
    )
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    return _step.program_of(module)


def named(graph, name):
    return [operation for operation in graph.operations if operation.name == name]


def groups(graph, operation):
    """The sizes of the factors of each dimension of the operands and results."""
    cases = (*operation.factors.ins, *operation.factors.outs)
    sizes = [
        [tuple(operation.factors.sizes[f] for f in dim) for dim in dims]
        for dims in cases
    ]
    assert len(sizes) == len(operation.ins) + len(operation.outs)
    return sizes


def test_products_and_reshapes_have_factors():
    (operation,) = named(
        program(lambda x, w: x @ w, f32(8, 16), f32(16, 32)), "dot_general"
    )
    (rows, summed), (also, columns) = operation.factors.ins
    assert summed == also
    assert operation.factors.outs == ((rows, columns),)
    assert operation.factors.reduction == {summed[0]}
    assert operation.flops == 2 * 8 * 16 * 32
    assert operation.times == 1
    graph = program(lambda x: x.reshape(4, 3, 6, 16), f32(4, 288))
    (operation,) = named(graph, "reshape")
    expected = [[(4,), (3, 6, 16)], [(4,), (3,), (6,), (16,)]]
    assert groups(graph, operation) == expected


def test_a_scan_runs_as_often_as_it_is_long():
    def step(w, x):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), x), x, w)

    graph = program(step, f32(7, 16, 16), f32(8, 16))
    assert {operation.times for operation in named(graph, "dot_general")} == {7.0}
    (taken,) = named(graph, "dynamic_slice")
    assert taken.ins[0] == graph.arguments[0], (
        "what the loop does not change is one value inside and outside"
    )
    assert [dim for dim, _ in taken.counted] == [0]
    (stacked,) = named(graph, "dynamic_update_slice")
    assert [dim for dim, _ in stacked.counted] == [0]
    counted = stacked.counted[0][1]
    assert counted == taken.counted[0][1]
    shapes = {
        graph.values[operation.outs[0]].shape for operation in named(graph, "return")
    }
    expected = {
        (),
        (8, 16),
        (7, 8, 16),
    }
    assert shapes == expected
    assert not graph.notes


def _nested(x):
    return jax.lax.fori_loop(
        2, 10, lambda i, y: jax.lax.fori_loop(0, 3, lambda j, z: jnp.sin(z), y) + i, x
    )


def _closing(x):
    closer = lambda state: (state[0] + 1, state[1] - 1, jnp.sin(state[2]))
    return jax.lax.while_loop(lambda state: state[0] < state[1], closer, (0, 10, x))[2]


@pytest.mark.parametrize(
    ("step", "args", "times"),
    [
        (_nested, (), 24.0),
        (
            lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y), x),
            (jnp.int32(3),),
            None,
        ),
        (_closing, (), None),
    ],
)
def test_loops_count_as_often_as_they_run_if_known(step, args, times):
    graph = program(step, f32(8), *args)
    actual = {operation.times for operation in named(graph, "sine")}
    assert actual == {times or 1.0}
    notes = (
        [] if times else ["the trips of a loop are not in the program: it counts once"]
    )
    assert [*graph.notes] == notes


def test_branches_count_for_their_share():
    def step(x, branch):
        return jax.lax.switch(branch, [jnp.sin, jnp.cos, lambda x: x], x)

    graph = program(step, f32(8), jnp.int32(0))
    times = [operation.times for operation in named(graph, "sine")]
    assert times == [pytest.approx(1 / 3)]
    operations = [
        operation
        for operation in named(graph, "carry")
        if operation.outs == graph.results
    ]
    count = len(operations)
    assert count == 3


def test_what_nothing_reads_is_left_out_in_loops_too():
    def step(w, x):
        def body(carry, weight):
            x, dead = carry
            return (jnp.tanh(x @ weight), jnp.cos(dead @ weight)), None

        (x, _), _ = jax.lax.scan(body, (x, x), w)
        return x, None

    graph = program(step, f32(7, 16, 16), f32(8, 16))
    assert len(named(graph, "dot_general")) == 1
    assert not named(graph, "cosine")


def test_constants_and_masks_are_free():
    def step(x):
        values = jnp.arange(64)[:, None]
        mask = values >= jnp.arange(64)
        return jnp.where(mask, x * 2, -jnp.inf)

    graph = program(step, f32(64, 64))
    assert not [
        operation
        for operation in graph.operations
        if all(graph.values[value].free for value in operation.ins)
    ]
    assert not graph.values[graph.results[0]].free


def negated_mean(x, w):
    return -jnp.mean(x @ w)


def clipped(x, w):
    y = x @ w
    return x * jnp.minimum(1.0, 1.0 / (jnp.sqrt(jnp.sum(y * y)) + 1e-6))


def scaled_in_a_loop(x, w):
    array = jnp.full(8, -jnp.mean(x @ w))
    scale = jnp.exp(array)
    return jax.lax.scan(lambda c, s: (c * s, None), x, scale)[0]


@pytest.mark.parametrize("step", [negated_mean, clipped, scaled_in_a_loop])
def test_the_operations_before_a_computed_scalar_are_listed(step):
    """A scalar is free beside constants, but it is no constant."""
    graph = program(step, f32(8, 16), f32(16, 32))
    assert len(named(graph, "dot_general")) == 1
    assert len(named(graph, "reduce")) == 1


def test_experts_in_groups_for_tpus():
    def step(rows, w, counts):
        return jax.value_and_grad(
            lambda w: jnp.sum(jax.lax.ragged_dot(rows, w, counts) ** 2)
        )(w)

    graph = program(
        step, f32(64, 16), f32(8, 16, 32), jax.ShapeDtypeStruct((8,), "int32")
    )
    forward, backward = named(graph, "ragged_dot")
    expected = [
        [(64,), (16,)],
        [(8,), (16,), (32,)],
        [(8,)],
        [(64,), (32,)],
    ]
    assert groups(graph, forward) == expected
    expected = [
        [(64,), (16,)],
        [(64,), (32,)],
        [(8,)],
        [(8,), (16,), (32,)],
    ]
    assert groups(graph, backward) == expected
    assert forward.flops == backward.flops == 2 * 64 * 16 * 32
    sizes = {forward.factors.sizes[f] for f in forward.factors.reduction}
    assert sizes == {8, 16}
    sizes = {backward.factors.sizes[f] for f in backward.factors.reduction}
    assert sizes == {64}


def test_a_convolution_counts_its_window():
    def step(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")

    (operation,) = named(
        program(step, f32(2, 4, 8, 8), f32(16, 4, 3, 3)), "convolution"
    )
    expected = 2 * (2 * 16 * 8 * 8) * (4 * 3 * 3)
    assert operation.flops == expected


def test_a_shard_map_is_noted_and_its_work_is_that_of_all_shards():
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=axis_types)

    def step(x, w):
        in_specs = (P("a"), P())
        return jax.shard_map(
            lambda x, w: x @ w, mesh=mesh, in_specs=in_specs, out_specs=P("a")
        )(x, w)

    graph = program(step, f32(8, 16), f32(16, 32))
    (operation,) = named(graph, "dot_general")
    assert operation.flops * operation.times == 2 * 8 * 16 * 32
    assert "`shard_map`" in [*graph.notes][0]


def test_lines_are_those_of_the_program():
    (operation,) = named(program(lambda x: jax.jit(jnp.sin)(x), f32(8)), "sine")
    assert any(
        line.file.endswith("test_graph.py")
        for line in _step.lines_of(operation.location)
    )
    stacks = _step.name_stacks(operation.location)
    assert stacks[0].endswith("sin")
    assert any("jit" in stack for stack in stacks)
