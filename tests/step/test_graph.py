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
    factors = operation.factors
    sizes_of_arrays = []
    for dims in (*factors.ins, *factors.outs):
        sizes_of_dims = []
        for dim in dims:
            sizes_of_dims.append(tuple(factors.sizes[factor] for factor in dim))
        sizes_of_arrays.append(sizes_of_dims)
    assert len(sizes_of_arrays) == len(operation.ins) + len(operation.outs)
    return sizes_of_arrays


def test_products_and_reshapes_have_factors():
    graph = program(lambda x, w: x @ w, f32(8, 16), f32(16, 32))
    (operation,) = named(graph, "dot_general")
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
        def layer(x, weight):
            return jnp.tanh(x @ weight), x

        return jax.lax.scan(layer, x, w)

    graph = program(step, f32(7, 16, 16), f32(8, 16))
    assert {operation.times for operation in named(graph, "dot_general")} == {7.0}
    (taken,) = named(graph, "dynamic_slice")
    assert taken.ins[0] == graph.arguments[0], (
        "what the loop does not change is one value inside and outside"
    )
    assert [dim for dim, _ in taken.counted] == [0]
    (stacked,) = named(graph, "dynamic_update_slice")
    assert stacked.counted == taken.counted
    shapes = set()
    for operation in named(graph, "return"):
        first_result = graph.values[operation.outs[0]]
        shapes.add(first_result.shape)
    assert shapes == {(), (8, 16), (7, 8, 16)}
    assert not graph.notes


def sine(_, x):
    return jnp.sin(x)


def nested(x):
    def turn(number, y):
        return jax.lax.fori_loop(0, 3, sine, y) + number

    return jax.lax.fori_loop(2, 10, turn, x)


def counted(x, count):
    return jax.lax.fori_loop(0, count, sine, x)


def closing(x):
    def are_apart(state):
        low, high, _ = state
        return low < high

    def closer(state):
        low, high, x = state
        return low + 1, high - 1, jnp.sin(x)

    _, _, result = jax.lax.while_loop(are_apart, closer, (0, 10, x))
    return result


@pytest.mark.parametrize(
    ("step", "args", "times"),
    [(nested, (), 24.0), (counted, (jnp.int32(3),), None), (closing, (), None)],
)
def test_loops_count_as_often_as_they_run_if_known(step, args, times):
    graph = program(step, f32(8), *args)
    actual = {operation.times for operation in named(graph, "sine")}
    if times is None:
        assert actual == {1.0}
        note = "the trips of a loop are not in the program: it counts once"
        assert [*graph.notes] == [note]
    else:
        assert actual == {times}
        assert not graph.notes


def test_branches_count_for_their_share():
    def step(x, branch):
        return jax.lax.switch(branch, [jnp.sin, jnp.cos, lambda x: x], x)

    graph = program(step, f32(8), jnp.int32(0))
    times = [operation.times for operation in named(graph, "sine")]
    assert times == [pytest.approx(1 / 3)]
    outs = [operation.outs for operation in named(graph, "carry")]
    assert outs.count(graph.results) == 3


def test_what_nothing_reads_is_left_out_in_loops_too():
    def step(w, x):
        def body(carry, weight):
            x, dead = carry
            new_x = jnp.tanh(x @ weight)
            new_dead = jnp.cos(dead @ weight)
            return (new_x, new_dead), None

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
    for operation in graph.operations:
        assert not all(graph.values[value].free for value in operation.ins)
    assert not graph.values[graph.results[0]].free


def negated_mean(x, w):
    return -jnp.mean(x @ w)


def clipped(x, w):
    y = x @ w
    norm = jnp.sqrt(jnp.sum(y * y))
    return x * jnp.minimum(1.0, 1.0 / (norm + 1e-6))


def scaled_in_a_loop(x, w):
    array = jnp.full(8, -jnp.mean(x @ w))
    scale = jnp.exp(array)
    result, _ = jax.lax.scan(lambda c, s: (c * s, None), x, scale)
    return result


@pytest.mark.parametrize("step", [negated_mean, clipped, scaled_in_a_loop])
def test_the_operations_before_a_computed_scalar_are_listed(step):
    """A scalar is free beside constants, but it is no constant."""
    graph = program(step, f32(8, 16), f32(16, 32))
    assert len(named(graph, "dot_general")) == 1
    assert len(named(graph, "reduce")) == 1


def test_experts_in_groups_for_tpus():
    def step(rows, w, counts):
        def loss(w):
            products = jax.lax.ragged_dot(rows, w, counts)
            return jnp.sum(products**2)

        return jax.value_and_grad(loss)(w)

    counts = jax.ShapeDtypeStruct((8,), "int32")
    graph = program(step, f32(64, 16), f32(8, 16, 32), counts)
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

    graph = program(step, f32(2, 4, 8, 8), f32(16, 4, 3, 3))
    (operation,) = named(graph, "convolution")
    expected = 2 * (2 * 16 * 8 * 8) * (4 * 3 * 3)
    assert operation.flops == expected


def test_a_shard_map_is_noted_and_its_work_is_that_of_all_shards():
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=axis_types)

    def step(x, w):
        product = jax.shard_map(
            lambda x, w: x @ w,
            mesh=mesh,
            in_specs=(P("a"), P()),
            out_specs=P("a"),
        )
        return product(x, w)

    graph = program(step, f32(8, 16), f32(16, 32))
    (operation,) = named(graph, "dot_general")
    assert operation.flops * operation.times == 2 * 8 * 16 * 32
    assert "`shard_map`" in [*graph.notes][0]


def test_lines_are_those_of_the_program():
    graph = program(lambda x: jax.jit(jnp.sin)(x), f32(8))
    (operation,) = named(graph, "sine")
    lines = _step.lines_of(operation.location)
    assert any(line.file.endswith("test_graph.py") for line in lines)
    stacks = _step.name_stacks(operation.location)
    assert stacks[0].endswith("sin")
    assert any("jit" in stack for stack in stacks)
